//! Hugging Face directories: weights in, weights out.
//!
//! - [`safetensors`] reads one file's header and checks it against the file, all before its use.
//! - [`import`] gives any element range of any tile as f32, from files or from a seed.
//! - [`export`] writes a directory that transformers loads, whole or not at all.
//!
//! config.json is read and written as text in `model::parse`; here are only its files. Names of
//! tensors are never used as paths, and no pickle is read.

pub mod export;
pub mod hub;
pub mod import;
#[allow(unsafe_code, reason = "model files are read through a mapping")]
mod mapped;
pub mod safetensors;

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Error, Result, printable};
use crate::model::ModelSpec;
use crate::model::parse::parse_json;

pub use export::{ExportDtype, ExportOptions, ExportReport, ReadMasters, export};
pub use import::WeightSource;

/// Most bytes of a config.json.
pub const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// The model that `dir/config.json` describes, and the file's JSON for a later export.
///
/// # Errors
/// Those of [`ModelSpec::from_config_json`]; I/O; a file that is too large or not UTF-8.
pub fn read_config(dir: &Path) -> Result<(ModelSpec, Value)> {
    let path = dir.join("config.json");
    if !dir.is_dir() {
        let got = if dir.exists() { "a file" } else { "nothing" };
        return Err(Error::input(
            "model directory",
            printable_path(dir),
            "a directory with config.json",
            got,
            "name one: model.path in run.toml, or --model",
        ));
    }
    let text = read_text(dir, "config.json", CONFIG_BYTES_MAX)?;
    let place = printable_path(&path);
    let spec = ModelSpec::from_config_json(&text, &place)?;
    let value = parse_json(&text, "config.json", &place)?;
    Ok((spec, value))
}

/// The text of a file of a model directory, at most `bytes_max` bytes.
fn read_text(dir: &Path, name: &str, bytes_max: u64) -> Result<String> {
    let path = dir.join(name);
    let (file, bytes) = open_regular(dir, name)?;
    if bytes > bytes_max {
        return Err(Error::input(
            "model directory",
            printable_path(&path),
            format!("at most {bytes_max} bytes"),
            format!("{bytes}"),
            "check that this is the file meant",
        ));
    }
    let mut content = Vec::new();
    // The file may grow while it is read.
    let read = file.take(bytes_max).read_to_end(&mut content);
    read.map_err(|source| Error::io("read", &path, source))?;
    String::from_utf8(content).map_err(|error| {
        let offset = error.utf8_error().valid_up_to();
        Error::input(
            "model directory",
            printable_path(&path),
            "UTF-8",
            format!("other bytes at byte {offset}"),
            "write the file anew as UTF-8",
        )
    })
}

/// Opens the regular file `name` of a model directory, with its length. A symbolic link may lead
/// within the directory, or from a Hugging Face cache's `snapshots/X` to its `blobs`; anything else
/// that is not a regular file of the directory is refused: links out, devices, pipes.
fn open_regular(dir: &Path, name: &str) -> Result<(File, u64)> {
    let path = dir.join(name);
    let refuse = |got: String| {
        Error::input(
            "model directory",
            printable_path(&path),
            "a regular file within the model's directory",
            got,
            "copy the file there",
        )
    };
    let canonical = |path: &Path| {
        path.canonicalize().map_err(|source| Error::Io {
            action: "open",
            path: path.to_path_buf(),
            source,
            remedy: "; fetch the model again".to_string(),
        })
    };
    let (root, target) = (canonical(dir)?, canonical(&path)?);
    if !target.starts_with(&root) && !blobs_of(&root).is_some_and(|b| target.starts_with(b)) {
        return Err(refuse(format!("a link to {}", printable_path(&target))));
    }
    // NOFOLLOW: the target was resolved and checked, a link put there since is not followed.
    // NONBLOCK: opening a pipe must not wait for a writer.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(&target)
        .map_err(|source| Error::io("open", &path, source))?;
    let metadata = file
        .metadata()
        .map_err(|source| Error::io("open", &path, source))?;
    if !metadata.is_file() {
        return Err(refuse("something else".to_string()));
    }
    Ok((file, metadata.len()))
}

fn blobs_of(snapshot: &Path) -> Option<PathBuf> {
    let snapshots = snapshot.parent()?;
    (snapshots.file_name()? == "snapshots").then(|| snapshots.with_file_name("blobs"))
}

fn printable_path(path: &Path) -> String {
    let text = path.to_string_lossy();
    // printable() keeps 120 characters; of a longer path the end says more than the beginning.
    let skip = text.chars().count().saturating_sub(119);
    if skip == 0 {
        return printable(&text);
    }
    let end: String = text.chars().skip(skip).collect();
    printable(&format!("…{end}"))
}
