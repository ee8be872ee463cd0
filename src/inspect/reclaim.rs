//! What Terrace left behind where it ended too early: found, listed, removed when asked.
//!
//! - Only what has a name and content of Terrace's own, in the directory named, and whose owner is
//!   gone: by the kernel's lock where there is one, otherwise by the process id in the name.
//! - A store, a finished export, and all that is not recognised is left alone; links are not
//!   followed.

use std::fs::{DirEntry, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::hf::export::foreign_entry;
use crate::store::format::{SUPERBLOCK_COPIES, SUPERBLOCK_MAGIC, superblock_offset};
use crate::store::{checkpoint, scratch};

/// A leftover.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Leftover {
    /// File or directory.
    pub path: PathBuf,
    /// Bytes that it takes on the disk.
    pub bytes: u64,
    /// What it is.
    pub what: String,
}

/// What was found in a directory.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// What can be removed.
    pub leftovers: Vec<Leftover>,
    /// What looks like a leftover and is left alone, with why.
    pub kept: Vec<String>,
}

/// Looks for leftovers in `directory` and, for a run's `log.dir`, in its checkpoint directory.
///
/// # Errors
/// [`Error::Io`] if a directory cannot be listed.
pub fn find(directory: &Path) -> Result<Found> {
    let mut found = Found::default();
    look(directory, &mut found)?;
    let checkpoint = directory.join("checkpoint");
    let is_directory = checkpoint.symlink_metadata().is_ok_and(|m| m.is_dir());
    if is_directory && checkpoint.join(checkpoint::LOCK_NAME).is_file() {
        look(&checkpoint, &mut found)?;
    }
    found.leftovers.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// Removes a leftover that is one still.
///
/// # Errors
/// [`Error::Input`] if it no longer is one; [`Error::Io`].
pub fn remove(leftover: &Leftover) -> Result<()> {
    let path = &leftover.path;
    let directory = path.parent().unwrap_or(Path::new("."));
    let mut again = Found::default();
    look(directory, &mut again)?;
    if !again.leftovers.iter().any(|found| found.path == *path) {
        return Err(Error::input(
            "reclaim",
            path.display().to_string(),
            "a leftover",
            "something that changed since",
            "list again",
        ));
    }
    let is_directory = path.symlink_metadata().is_ok_and(|m| m.is_dir());
    let removed = match is_directory {
        true => std::fs::remove_dir_all(path),
        false => std::fs::remove_file(path),
    };
    removed.map_err(|e| Error::io("remove", path, e))
}

fn look(directory: &Path, found: &mut Found) -> Result<()> {
    let failed = |source| Error::io("list", directory, source);
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(what) = name_of(&name) else { continue };
        let judged = match &what {
            Kind::NewStore => judge_file(&entry, directory, checkpoint::LOCK_NAME),
            Kind::Scratch => judge_file(&entry, directory, scratch::LOCK_NAME),
            Kind::Trial(pid) => judge_trial(&entry, *pid),
            Kind::Partial(pid) => judge_export(&entry, *pid),
        };
        let path = entry.path();
        match judged.map_err(|e| Error::io("look at", &path, e))? {
            Ok(bytes) => found.leftovers.push(Leftover {
                path,
                bytes,
                what: what.text().to_string(),
            }),
            Err(why) => found.kept.push(format!("{}: {why}", path.display())),
        }
    }
    Ok(())
}

enum Kind {
    NewStore,
    Scratch,
    Trial(u32),
    Partial(u32),
}

impl Kind {
    fn text(&self) -> &'static str {
        match self {
            Kind::NewStore => "a store that was not finished",
            Kind::Scratch => "spilled state of a run that has ended",
            Kind::Trial(_) => "a trial of direct I/O",
            Kind::Partial(_) => "an export that was not finished",
        }
    }
}

/// What a name says; `None` if it is none of a leftover's.
fn name_of(name: &str) -> Option<Kind> {
    if name == format!("{}.new", checkpoint::FILE_NAME) {
        return Some(Kind::NewStore);
    }
    if name == scratch::FILE_NAME {
        return Some(Kind::Scratch);
    }
    let hidden = name.strip_prefix('.')?;
    if let Some(pid) = hidden.strip_prefix("trial.") {
        return pid.parse().ok().map(Kind::Trial);
    }
    let (_, pid) = hidden.rsplit_once(".partial-")?;
    pid.parse().ok().map(Kind::Partial)
}

/// Its bytes on the disk, or why it is left alone.
type Judged = io::Result<std::result::Result<u64, String>>;

fn judge_file(entry: &DirEntry, directory: &Path, lock: &str) -> Judged {
    let metadata = entry.path().symlink_metadata()?;
    if !metadata.is_file() {
        return Ok(Err("not a regular file".to_string()));
    }
    let Ok(lock) = File::open(directory.join(lock)) else {
        return Ok(Err(format!("no {lock} beside it: not made by Terrace")));
    };
    if lock.try_lock_shared().is_err() {
        return Ok(Err("in use by another process".to_string()));
    }
    if lock_is_checkpoint(entry) && !is_unfinished_store(&entry.path())? {
        return Ok(Err(
            "other bytes than a store's: not made by Terrace".to_string()
        ));
    }
    Ok(Ok(metadata.blocks() * 512))
}

fn lock_is_checkpoint(entry: &DirEntry) -> bool {
    entry
        .file_name()
        .to_string_lossy()
        .starts_with(checkpoint::FILE_NAME)
}

/// Where a store has its superblocks there are superblocks, zeros or nothing yet.
fn is_unfinished_store(path: &Path) -> io::Result<bool> {
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    for copy in 0..SUPERBLOCK_COPIES {
        let mut page = [0; 4096];
        let read = file.read_at(&mut page, superblock_offset(copy))?;
        let page = &page[..read];
        if !page.starts_with(&SUPERBLOCK_MAGIC) && page.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn judge_trial(entry: &DirEntry, pid: u32) -> Judged {
    let metadata = entry.path().symlink_metadata()?;
    if !metadata.is_file() || metadata.len() > 4096 {
        return Ok(Err("not a trial of direct I/O".to_string()));
    }
    match is_running(pid) {
        true => Ok(Err(format!("in use by process {pid}"))),
        false => Ok(Ok(metadata.blocks() * 512)),
    }
}

fn judge_export(entry: &DirEntry, pid: u32) -> Judged {
    let path = entry.path();
    if !path.symlink_metadata()?.is_dir() {
        return Ok(Err("not a directory".to_string()));
    }
    if is_running(pid) {
        return Ok(Err(format!("in use by process {pid}")));
    }
    match foreign_entry(&path) {
        Ok(None) => {}
        Ok(Some(name)) => {
            let name = crate::error::printable(&name);
            return Ok(Err(format!("has {name}, which no export writes")));
        }
        Err(error) => return Ok(Err(error.to_string())),
    }
    let mut bytes = 0;
    for entry in std::fs::read_dir(&path)? {
        bytes += entry?.metadata()?.blocks() * 512;
    }
    Ok(Ok(bytes))
}

fn is_running(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}
