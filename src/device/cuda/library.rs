//! Finding CUDA's libraries on this machine, without ever a panic.
//!
//! - A library is looked for by its bare name first, as the loader does; then in the toolkit's
//!   folders and in pip's nvidia folders. One that is found there is opened by its path and kept,
//!   so that a later search by name meets it.
//! - Nothing of cudarc may be called before [`open`] succeeded: it panics where a library lacks.
//! - The environment is read (`CUDA_HOME`, `CUDA_PATH`, `VIRTUAL_ENV`, `CONDA_PREFIX`, `HOME`),
//!   never changed.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use cudarc::{cublaslt, driver, nvrtc};

use crate::error::{Error, Result};

/// Newest and oldest major version of the toolkit's libraries that serve.
const MAJOR_VERSIONS: [&str; 2] = ["13", "12"];

/// Oldest driver that serves, as `cuDriverGetVersion` counts: 12.0.
const DRIVER_VERSION_MIN: i32 = 12000;

/// One of the three libraries.
struct Library {
    /// `lib` and `.so` are left out.
    name: &'static str,
    /// What has to be installed.
    package: &'static str,
    present: fn() -> bool,
}

const LIBRARIES: [Library; 3] = [
    Library {
        name: "cuda",
        package: "NVIDIA's driver (nvidia-smi must work)",
        // SAFETY: opens and closes libraries by name; their initialisers are NVIDIA's.
        present: || unsafe { driver::sys::is_culib_present() },
    },
    Library {
        name: "nvrtc",
        package: "the CUDA toolkit, or pip install nvidia-cuda-nvrtc nvidia-cuda-runtime",
        // SAFETY: as above.
        present: || unsafe { nvrtc::sys::is_culib_present() },
    },
    Library {
        name: "cublasLt",
        package: "the CUDA toolkit, or pip install nvidia-cublas",
        // SAFETY: as above.
        present: || unsafe { cublaslt::sys::is_culib_present() },
    },
];

/// Makes the three libraries ready and starts the driver. [`Error::Device`] names what lacks and
/// how to get it.
///
/// Code and libraries of a newer major version than the driver's do not run on it, so the toolkit's
/// folders are searched for the driver's own version first, and what is newer all the same is
/// refused.
pub(super) fn open() -> Result<()> {
    let [driver, nvrtc, cublas] = &LIBRARIES;
    require(driver, &MAJOR_VERSIONS)?;
    // SAFETY: the library is present; `cuInit` may be called any number of times.
    let started = unsafe { driver::sys::cuInit(0) };
    super::driver::checked(started, || "cuInit".to_string())
        .map_err(|fault| failed(&fault.call, fault.message, "; or use --device cpu"))?;
    let version = super::driver::version();
    let version = version.map_err(|fault| failed(&fault.call, fault.message, ""))?;
    if version < DRIVER_VERSION_MIN {
        let got = format!(
            "the driver serves CUDA {}.{}",
            version / 1000,
            version % 1000 / 10
        );
        return Err(failed(
            "cuDriverGetVersion",
            got,
            "; CUDA 12.0 is needed: update NVIDIA's driver, or use --device cpu",
        ));
    }
    let major = version / 1000;
    let serve = serving(major);
    for library in [nvrtc, cublas] {
        require(library, serve)?;
    }
    not_newer("libnvrtc", super::compile::nvrtc_version()?.0, major)?;
    not_newer("libcublasLt", cublas_major(), major)
}

/// Major versions of the toolkit that a driver of one serves, newest first.
fn serving(driver: i32) -> &'static [&'static str] {
    let newer = |name: &&&str| name.parse().is_ok_and(|version: i32| version > driver);
    &MAJOR_VERSIONS[MAJOR_VERSIONS.iter().take_while(newer).count()..]
}

fn cublas_major() -> i32 {
    // SAFETY: the library is present. 12.8.4 is 120804, 13.1.0 is 130100.
    let version = unsafe { cublaslt::sys::cublasLtGetVersion() };
    i32::try_from(version / 10_000).unwrap_or(0)
}

fn not_newer(library: &str, found: i32, driver: i32) -> Result<()> {
    if found <= driver {
        return Ok(());
    }
    let got = format!("it is of CUDA {found}, the driver serves CUDA {driver}");
    let remedy = format!(
        "; update NVIDIA's driver, or install the toolkit's libraries of CUDA {driver} (pip \
         install nvidia-cuda-nvrtc-cu{driver} nvidia-cuda-runtime-cu{driver} \
         nvidia-cublas-cu{driver}), or use --device cpu"
    );
    Err(failed(&format!("open {library}.so"), got, &remedy))
}

fn failed(call: &str, message: String, remedy: &str) -> Error {
    Error::Device {
        device: "cuda".to_string(),
        call: call.to_string(),
        message,
        during: String::new(),
        remedy: remedy.to_string(),
    }
}

/// Makes NVRTC alone ready: kernels are compiled on machines without a card, too.
pub(super) fn open_nvrtc() -> Result<()> {
    LIBRARIES
        .iter()
        .filter(|library| library.name == "nvrtc")
        .try_for_each(|library| require(library, &MAJOR_VERSIONS))
}

fn require(library: &Library, majors: &[&str]) -> Result<()> {
    if make_present(library, majors) {
        return Ok(());
    }
    Err(failed(
        &format!("open lib{}.so", library.name),
        "found neither by the loader nor in the toolkit's or pip's folders".to_string(),
        &format!("; install {}, or use --device cpu", library.package),
    ))
}

/// One line a library: where it is, or what to install.
pub fn report() -> Vec<String> {
    LIBRARIES
        .iter()
        .map(|library| {
            let name = library.name;
            if (library.present)() {
                format!("lib{name}: found by the loader")
            } else if let Some(path) = find(name, &MAJOR_VERSIONS) {
                format!("lib{name}: {}", path.display())
            } else {
                format!("lib{name}: absent; install {}", library.package)
            }
        })
        .collect()
}

fn make_present(library: &Library, majors: &[&str]) -> bool {
    if (library.present)() {
        return true;
    }
    let Some(path) = find(library.name, majors) else {
        return false;
    };
    let folder = path.parent().unwrap_or(Path::new("/"));
    if library.name == "nvrtc" {
        // NVRTC opens its built-in functions by bare name while it compiles.
        for builtins in versions_of(folder, "libnvrtc-builtins.so.") {
            keep_open(&builtins);
        }
    }
    keep_open(&path) && (library.present)()
}

/// Opens a library for the whole process and for ever.
fn keep_open(path: &Path) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: a terminated path; the library's initialisers are NVIDIA's. It is never closed.
    let opened = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    !opened.is_null()
}

/// The newest copy of a library outside the loader's path.
fn find(name: &str, majors: &[&str]) -> Option<PathBuf> {
    let versions = if name == "cuda" { &["1"] } else { majors };
    let folders = library_folders();
    versions.iter().find_map(|version| {
        let file = format!("lib{name}.so.{version}");
        folders
            .iter()
            .map(|folder| folder.join(&file))
            .find(|path| path.exists())
    })
}

/// Files of a folder whose names begin so.
fn versions_of(folder: &Path, start: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(start))
        })
        .collect();
    found.sort();
    found.reverse();
    found
}

/// Folders that may hold the toolkit's libraries, in order of preference.
fn library_folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for root in toolkit_roots() {
        folders.extend(["lib64", "lib", "targets/x86_64-linux/lib"].map(|lib| root.join(lib)));
    }
    folders.extend(pip_folders("lib"));
    folders.extend(
        [
            "/usr/lib/wsl/lib",
            "/usr/lib/x86_64-linux-gnu",
            "/usr/lib64",
        ]
        .map(PathBuf::from),
    );
    folders.retain(|folder| folder.is_dir());
    folders
}

/// Folders with `cuda_bf16.h`, in order of preference; and those of CCCL beside them.
pub(super) fn include_folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = toolkit_roots()
        .iter()
        .map(|root| root.join("include"))
        .collect();
    folders.extend(pip_folders("include"));
    folders.push("/usr/include".into());
    folders.retain(|folder| folder.join("cuda_bf16.h").exists());
    let Some(first) = folders.into_iter().next() else {
        return Vec::new();
    };
    let cccl = first.join("cccl");
    [first, cccl]
        .into_iter()
        .filter(|folder| folder.is_dir())
        .collect()
}

fn toolkit_roots() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"]
        .iter()
        .filter_map(std::env::var_os)
        .map(PathBuf::from)
        .collect();
    roots.push("/usr/local/cuda".into());
    roots.extend(versions_of("/usr/local".as_ref(), "cuda-"));
    roots
}

/// `lib` or `include` of every package under pip's nvidia folders: `nvidia/cu13/lib`,
/// `nvidia/cublas/lib`.
fn pip_folders(last: &str) -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .iter()
        .filter_map(std::env::var_os)
        .map(PathBuf::from)
        .collect();
    roots.extend(std::env::var_os("HOME").map(|home| Path::new(&home).join(".local")));
    roots.extend(["/usr/local", "/usr"].map(PathBuf::from));
    let mut folders = Vec::new();
    for root in roots {
        for python in versions_of(&root.join("lib"), "python3") {
            for packages in ["site-packages", "dist-packages"] {
                let nvidia = python.join(packages).join("nvidia");
                folders.extend(
                    versions_of(&nvidia, "")
                        .iter()
                        .map(|folder| folder.join(last)),
                );
            }
        }
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_serves_its_own_major_version_and_older_ones() {
        assert_eq!(serving(12), ["12"]);
        assert_eq!(serving(13), ["13", "12"]);
        assert_eq!(serving(14), ["13", "12"]);
        assert!(not_newer("libnvrtc", 12, 13).is_ok());
        let refusal = not_newer("libnvrtc", 13, 12).unwrap_err().to_string();
        assert!(refusal.contains("nvidia-cuda-nvrtc-cu12"), "{refusal}");
    }
}
