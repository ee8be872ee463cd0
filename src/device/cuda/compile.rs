//! Kernels from source to the card's code: NVRTC, once a card, then from a cache on disk.
//!
//! - One module a `.cu` file of `kernels/`; sources and the headers beside them are in the binary.
//! - The cache's key is everything that decides the code: sources, options, architecture and
//!   NVRTC's version. A file that cannot be read or written is only slower; a damaged one is
//!   compiled anew.
//! - Options are written out in full, no fast math: `--fmad=true` contracts a·b + c, which is exact
//!   to one rounding and the same on every run; divisions, roots and denormals are IEEE's.

use std::ffi::{CStr, CString};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};

use super::library;
use crate::error::{Error, Result};

/// A file of `kernels/`.
pub(super) struct Source {
    /// Its name there.
    pub(super) name: &'static str,
    text: &'static str,
}

macro_rules! sources {
    ($($name:literal),* $(,)?) => {
        /// Every module of the device.
        pub(super) const SOURCES: &[Source] = &[$(Source {
            name: $name,
            text: include_str!(concat!("../../../kernels/", $name)),
        }),*];
    };
}
sources![
    "attention.cu",
    "attention_plain.cu",
    "cast.cu",
    "embed.cu",
    "loss.cu",
    "reduce.cu",
    "rmsnorm.cu",
    "rope.cu",
    "rows.cu",
    "swiglu.cu",
];

macro_rules! headers {
    ($($name:literal),* $(,)?) => {
        /// What kernels `#include`: its name and text.
        const HEADERS: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../../../kernels/", $name)))),*];
    };
}
headers![
    "attention_common.cuh",
    "attention_mma.cuh",
    "attention_primitives.cuh",
    "attention_wgmma.cuh",
    "common.cuh",
];

/// Bytes in front of the code in a cache file: the code's own xxh3-128.
const CACHE_HEADER_BYTES: usize = 16;

/// The architecture of a card as NVRTC names it; with `a` where kernels use what only this one has
/// (wgmma): `sm_86`, `sm_90a`.
pub(super) fn architecture(capability: (u32, u32)) -> String {
    let feature = if capability == (9, 0) { "a" } else { "" };
    format!("sm_{}{}{feature}", capability.0, capability.1)
}

/// Code of one source for `architecture`, from the cache or compiled. [`Error::Device`] with
/// NVRTC's log if it does not compile.
pub(super) fn code(source: &Source, architecture: &str) -> Result<Vec<u8>> {
    let version = nvrtc_version()?;
    let options = options(architecture);
    let key = key(source, &options, version);
    let cached = cache_folder().map(|folder| folder.join(format!("{key:032x}.cubin")));
    if let Some(code) = cached.as_deref().and_then(read_cached) {
        return Ok(code);
    }
    let code = compile(source, &options)?;
    if let Some(path) = cached {
        // Without a cache the next start compiles again, and nothing else changes.
        write_cached(&path, &code).ok();
    }
    Ok(code)
}

fn options(architecture: &str) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".to_string(),
        "--fmad=true".to_string(),
        "--ftz=false".to_string(),
        "--prec-div=true".to_string(),
        "--prec-sqrt=true".to_string(),
    ];
    // Kernels do without the toolkit's headers where it is not installed.
    let include = library::include_folders();
    options.extend(
        include
            .iter()
            .map(|folder| format!("-I{}", folder.display())),
    );
    options
}

fn key(source: &Source, options: &[String], version: (i32, i32)) -> u128 {
    let mut hash = twox_hash::XxHash3_128::new();
    let words = [source.name, source.text, &format!("{version:?}")];
    let headers = HEADERS.iter().flat_map(|(name, text)| [*name, *text]);
    for word in words
        .into_iter()
        .chain(headers)
        .chain(options.iter().map(String::as_str))
    {
        hash.write(&(word.len() as u64).to_le_bytes());
        hash.write(word.as_bytes());
    }
    hash.finish_128()
}

/// Major and minor; the library is present. [`Error::Device`] if it is too old.
pub(super) fn nvrtc_version() -> Result<(i32, i32)> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both numbers outlive the call; the library is present.
    let result = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    if result != nvrtcResult::NVRTC_SUCCESS || major < 12 {
        return Err(failed(
            "nvrtcVersion".to_string(),
            format!("{result:?}, version {major}.{minor}"),
            "; NVRTC 12.0 is needed",
        ));
    }
    Ok((major, minor))
}

/// A program of NVRTC's, destroyed when dropped.
struct Program(nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `nvrtcCreateProgram`, destroyed once.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

fn compile(source: &Source, options: &[String]) -> Result<Vec<u8>> {
    let call = || format!("compile kernels/{}", source.name);
    let terminated = |text: &str| CString::new(text).expect("sources and options hold no zero");
    let (text, name) = (terminated(source.text), terminated(source.name));
    let headers: Vec<[CString; 2]> = HEADERS
        .iter()
        .map(|(name, text)| [terminated(name), terminated(text)])
        .collect();
    let header_texts: Vec<_> = headers.iter().map(|[_, text]| text.as_ptr()).collect();
    let header_names: Vec<_> = headers.iter().map(|[name, _]| name.as_ptr()).collect();
    let header_count = i32::try_from(HEADERS.len()).expect("a handful of headers");
    let mut program = Program(std::ptr::null_mut());
    // SAFETY: all strings outlive the program, whose handle is written to a live place.
    let made = unsafe {
        sys::nvrtcCreateProgram(
            &mut program.0,
            text.as_ptr(),
            name.as_ptr(),
            header_count,
            header_texts.as_ptr(),
            header_names.as_ptr(),
        )
    };
    if made != nvrtcResult::NVRTC_SUCCESS {
        std::mem::forget(program);
        return Err(failed(call(), format!("{made:?}"), ""));
    }
    let options: Vec<CString> = options.iter().map(|option| terminated(option)).collect();
    let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
    let count = i32::try_from(pointers.len()).expect("a handful of options");
    // SAFETY: the program is live; `pointers` are `count` terminated strings.
    let compiled = unsafe { sys::nvrtcCompileProgram(program.0, count, pointers.as_ptr()) };
    if compiled != nvrtcResult::NVRTC_SUCCESS {
        let remedy = if compiled == nvrtcResult::NVRTC_ERROR_INVALID_OPTION {
            "; a card newer than NVRTC needs a newer NVRTC (pip install -U nvidia-cuda-nvrtc)"
        } else {
            ""
        };
        return Err(failed(
            call(),
            format!("{compiled:?}: {}", first_errors(&program)),
            remedy,
        ));
    }
    let mut bytes = 0;
    // SAFETY: the program is live and compiled; `bytes` outlives the call.
    let sized = unsafe { sys::nvrtcGetCUBINSize(program.0, &mut bytes) };
    let mut code = vec![0u8; bytes];
    // SAFETY: `code` has the size that was just asked for.
    let got = unsafe { sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()) };
    let success = nvrtcResult::NVRTC_SUCCESS;
    if sized != success || got != success || code.is_empty() {
        return Err(failed(call(), format!("no code: {sized:?}, {got:?}"), ""));
    }
    Ok(code)
}

/// The errors of a compilation's log, on one line.
fn first_errors(program: &Program) -> String {
    let mut bytes = 0;
    // SAFETY: the program is live; `bytes` outlives the call.
    if unsafe { sys::nvrtcGetProgramLogSize(program.0, &mut bytes) } != nvrtcResult::NVRTC_SUCCESS {
        return String::new();
    }
    let mut log = vec![0u8; bytes.max(1)];
    // SAFETY: `log` has the size that was just asked for.
    if unsafe { sys::nvrtcGetProgramLog(program.0, log.as_mut_ptr().cast()) }
        != nvrtcResult::NVRTC_SUCCESS
    {
        return String::new();
    }
    let log = CStr::from_bytes_until_nul(&log)
        .unwrap_or_default()
        .to_string_lossy();
    let errors: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("error"))
        .take(4)
        .collect();
    errors.join(" | ")
}

fn failed(call: String, message: String, remedy: &str) -> Error {
    Error::Device {
        device: "cuda".to_string(),
        call,
        message,
        during: String::new(),
        remedy: remedy.to_string(),
    }
}

/// `$XDG_CACHE_HOME/terrace/kernels`, made for its owner alone.
fn cache_folder() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty());
    let base = base
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))?;
    let folder = base.join("terrace/kernels");
    let made = std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&folder);
    made.ok().map(|()| folder)
}

fn read_cached(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = std::fs::read(path).ok()?;
    if bytes.len() <= CACHE_HEADER_BYTES {
        return None;
    }
    let code = bytes.split_off(CACHE_HEADER_BYTES);
    let sum = twox_hash::XxHash3_128::oneshot(&code);
    (bytes == sum.to_le_bytes()).then_some(code)
}

fn write_cached(path: &Path, code: &[u8]) -> std::io::Result<()> {
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&partial)?;
    let written = file
        .write_all(&twox_hash::XxHash3_128::oneshot(code).to_le_bytes())
        .and_then(|()| file.write_all(code))
        .and_then(|()| std::fs::rename(&partial, path));
    if written.is_err() {
        std::fs::remove_file(&partial).ok();
    }
    written
}

/// Every kernel's code for an architecture (`sm_80`), by file; needs NVRTC and no card.
/// [`Error::Device`] with NVRTC's words if one does not compile.
pub fn compile_kernels(architecture: &str) -> Result<Vec<(&'static str, Vec<u8>)>> {
    super::library::open_nvrtc()?;
    SOURCES
        .iter()
        .map(|source| Ok((source.name, code(source, architecture)?)))
        .collect()
}
