//! Checkpoint stores and safetensors looked at from outside, for `terrace-inspect`.
//!
//! - Nothing here needs a plan, a device or a run; a store under training opens too.
//! - Nothing is written but by [`repair`], [`copy`], [`export`] and [`reclaim`], each of which says
//!   first what it would do.
//! - Structures are decoded by [`crate::store::format`] alone, extents checked before their use.
//! - Names of tensors and metadata are data: never a path, escaped where they are printed.
//! - Memory is bounded: files of any size stream through a few pieces of 4 MiB.
//!
//! [`survey`] reads structures, [`store`] gives them meaning, `stream` and `ring` read ahead,
//! `extents` checks; [`values`], [`statistics`] and [`diff`] look at numbers.

pub mod copy;
pub mod diff;
pub mod export;
mod extents;
pub mod names;
mod pages;
pub mod reclaim;
pub mod repair;
#[cfg(feature = "inspect-uring")]
mod ring;
mod sink;
pub mod statistics;
pub mod store;
mod stream;
pub mod survey;
pub mod tensors;
pub mod values;
pub mod verify;

use std::io::Read;
use std::path::Path;

pub use store::{Commit, Store};
pub use stream::Reading;
pub use tensors::TensorFiles;

use crate::error::{Error, Result};
use crate::store::checkpoint::FILE_NAME;
use crate::store::format::{SUPERBLOCK_COPIES, SUPERBLOCK_MAGIC, superblock_offset};

/// What a path turned out to be.
pub enum Source {
    /// A checkpoint store.
    Store(Box<Store>),
    /// Safetensors: a file, or a model's directory.
    Tensors(TensorFiles),
}

impl Source {
    /// Opens a checkpoint directory or its file, a run's `log.dir`, a safetensors file or a
    /// directory of such.
    ///
    /// # Errors
    /// [`Error::Io`] if there is nothing; [`Error::Input`] for something else; those of
    /// [`Store::open`] and [`TensorFiles::open`].
    pub fn open(path: &Path) -> Result<Source> {
        let is_store = if path.is_dir() {
            let file = store::file_at(path);
            file.symlink_metadata().is_ok() || !TensorFiles::is_there(path)
        } else {
            let named = |end: &str| path.extension().is_some_and(|found| found == end);
            path.file_name().is_some_and(|name| name == FILE_NAME)
                || (!named("safetensors") && has_magic(path)?)
        };
        if is_store {
            return Ok(Source::Store(Box::new(Store::open(path)?)));
        }
        Ok(Source::Tensors(TensorFiles::open(path)?))
    }

    /// Opens a store, where nothing else will do.
    ///
    /// # Errors
    /// As [`Source::open`]; [`Error::Input`] for safetensors.
    pub fn open_store(path: &Path) -> Result<Store> {
        match Source::open(path)? {
            Source::Store(store) => Ok(*store),
            Source::Tensors(_) => Err(Error::input(
                "checkpoint",
                path.display().to_string(),
                "a checkpoint directory",
                "safetensors",
                "name a run's checkpoint.dir",
            )),
        }
    }
}

/// Whether any superblock copy of a file begins as one does. A directory's file needs no such
/// look: its name says what it is.
fn has_magic(path: &Path) -> Result<bool> {
    use std::os::unix::fs::{FileExt, OpenOptionsExt};
    let failed = |source| Error::Io {
        action: "open",
        path: path.to_path_buf(),
        source,
        remedy: "; name a run's checkpoint.dir or safetensors".to_string(),
    };
    // NONBLOCK: opening a pipe must not wait for a writer.
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(path)
        .map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(failed(std::io::Error::other("not a regular file")));
    }
    let magic = |copy| {
        let mut found = [0; 8];
        let read = file.read_exact_at(&mut found, superblock_offset(copy));
        read.is_ok() && found == SUPERBLOCK_MAGIC
    };
    if (0..SUPERBLOCK_COPIES).any(magic) {
        return Ok(true);
    }
    let mut header = [0; 9];
    let is_tensors = (&file).read_exact(&mut header).is_ok() && header[8] == b'{';
    if is_tensors {
        return Ok(false);
    }
    Err(Error::input(
        "file",
        path.display().to_string(),
        "a checkpoint store or safetensors",
        "neither",
        "name a run's checkpoint.dir or a .safetensors file",
    ))
}
