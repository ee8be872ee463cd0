//! A store's directory: its lock, its file, its space.
//!
//! - One process a directory, by the kernel's lock on an open file: it ends with its holder,
//!   however that ends. The process id within is information only.
//! - Directories are made 0700, files 0600; links are not followed; a directory that group or
//!   others may write, or that is another user's, is refused, but for a sticky one.
//! - Space is reserved when a file is made, and a full disk refused there.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use super::sys;
use crate::error::{Error, Result};

/// Makes the directory if it is not there and checks it.
pub(super) fn prepare(directory: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(|e| unwritable("create", directory, e))?;
    let found =
        std::fs::symlink_metadata(directory).map_err(|e| Error::io("look at", directory, e))?;
    let refused = |expected: &str, got: &str, remedy: &str| {
        let place = directory.display().to_string();
        Err(Error::input(
            "store directory",
            place,
            expected,
            got,
            remedy,
        ))
    };
    if found.file_type().is_symlink() {
        return refused("a directory", "a symbolic link", "name what it points to");
    }
    let mode = found.permissions().mode() & 0o7777;
    if mode & 0o022 != 0 && mode & 0o1000 == 0 {
        return refused(
            "one that only its owner writes",
            &format!("one that its group or everybody may write (mode {mode:o})"),
            "take that right away (chmod go-w), or name another directory",
        );
    }
    // A superuser may use anyone's, as in a container with a mounted directory.
    let user = sys::user();
    if user != 0 && found.uid() != user && mode & 0o1000 == 0 {
        return refused(
            "one's own",
            &format!("one of user {}", found.uid()),
            "name another directory",
        );
    }
    Ok(())
}

fn unwritable(action: &'static str, path: &Path, source: io::Error) -> Error {
    Error::Io {
        action,
        path: path.to_path_buf(),
        source,
        remedy: "; name a directory that can be written".to_string(),
    }
}

/// Takes the directory's lock, named `name`, for the life of the file returned.
pub(super) fn lock(directory: &Path, name: &str) -> Result<File> {
    let path = directory.join(name);
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(&path)
        .map_err(|e| unwritable("open", &path, e))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(Error::Busy {
                path: directory.to_path_buf(),
                pid: holder(&file),
            });
        }
        Err(TryLockError::Error(source)) => return Err(Error::io("lock", &path, source)),
    }
    let mut note = || {
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())
    };
    // On a full disk the lock holds all the same; only the holder's name is missing.
    note().ok();
    Ok(file)
}

/// What a reader got of a directory's lock.
pub(super) enum Shared {
    /// It is shared with other readers as long as the file is open; nobody writes.
    Locked(File),
    /// A process has it alone: its id, 0 where unknown.
    Held(u32),
    /// There is none to share, or the file system knows none: why.
    None(String),
}

/// Shares the directory's lock with other readers. Writes nothing.
pub(super) fn lock_shared(directory: &Path, name: &str) -> Result<Shared> {
    let path = directory.join(name);
    let without = |error: io::Error| Ok(Shared::None(format!("{}: {error}", path.display())));
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(&path);
    let file = match opened {
        Ok(file) => file,
        Err(error) => return without(error),
    };
    match file.try_lock_shared() {
        Ok(()) => Ok(Shared::Locked(file)),
        Err(TryLockError::WouldBlock) => Ok(Shared::Held(holder(&file))),
        Err(TryLockError::Error(error)) => without(error),
    }
}

/// The process that has a lock: as the kernel says, else as the last one that had it alone noted;
/// 0 where neither does.
fn holder(file: &File) -> u32 {
    let listed = || {
        let found = file.metadata().ok()?;
        let (major, minor) = (libc::major(found.dev()), libc::minor(found.dev()));
        let place = format!("{major:02x}:{minor:02x}:{}", found.ino());
        let locks = std::fs::read_to_string("/proc/locks").ok()?;
        // `1: FLOCK  ADVISORY  WRITE 4711 fd:00:131 0 EOF`; who waits has `->` before FLOCK.
        locks.lines().find_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let is_it = words.get(1) == Some(&"FLOCK") && words.get(5) == Some(&place.as_str());
            is_it.then(|| words[4].parse().ok()).flatten()
        })
    };
    let noted = || {
        let mut text = String::new();
        file.take(20).read_to_string(&mut text).ok()?;
        text.trim().parse().ok()
    };
    listed().or_else(noted).unwrap_or(0)
}

/// Opens a store's file, newly made if `fresh`. A link is refused.
pub(super) fn open_file(path: &Path, direct: bool, fresh: bool) -> io::Result<File> {
    let direct = if direct { libc::O_DIRECT } else { 0 };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(fresh)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | direct)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    Ok(file)
}

/// Opens a store's file to read. A link is refused.
pub(super) fn open_to_read(path: &Path, direct: bool) -> io::Result<File> {
    let direct = if direct { libc::O_DIRECT } else { 0 };
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | direct)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    Ok(file)
}

/// A file of one page without a name, for the probe.
pub(super) fn trial_file(directory: &Path, direct: bool) -> io::Result<File> {
    let path = directory.join(format!(".trial.{}", std::process::id()));
    std::fs::remove_file(&path).ok();
    let opened = open_file(&path, direct, true);
    // A refused O_DIRECT leaves the file behind on some file systems.
    std::fs::remove_file(&path).ok();
    opened
}

/// Reserves `bytes` for the new file at `path`, or says how many are missing.
pub(super) fn reserve(
    file: &File,
    path: &Path,
    bytes: u64,
    tier: &'static str,
    remedy: &str,
) -> Result<()> {
    let free = sys::free_bytes(path);
    let full = |free: u64| Error::Budget {
        tier,
        needed: bytes,
        budget: free,
        missing: bytes.saturating_sub(free),
        remedy: format!("{} is too full; {remedy}", path.display()),
    };
    if bytes > free {
        return Err(full(free));
    }
    match sys::reserve(file, bytes) {
        Ok(()) => Ok(()),
        // No reservation there (NFS, FUSE): the length is set, and space was looked at above.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => file
            .set_len(bytes)
            .map_err(|e| Error::io("extend", path, e)),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)) => {
            file.set_len(0).ok();
            Err(full(sys::free_bytes(path).min(free)))
        }
        Err(error) => Err(Error::io("reserve space for", path, error)),
    }?;
    let length = file
        .metadata()
        .map_err(|e| Error::io("look at", path, e))?
        .size();
    if length < bytes {
        return Err(Error::io(
            "reserve space for",
            path,
            io::ErrorKind::UnexpectedEof.into(),
        ));
    }
    Ok(())
}

/// Makes the directory's entries durable.
pub(super) fn sync(directory: &Path) -> Result<()> {
    File::open(directory)
        .and_then(|opened| opened.sync_all())
        .map_err(|e| Error::io("flush", directory, e))
}
