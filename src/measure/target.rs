//! The files that a benchmark works on.
//!
//! - A file that this tool makes ends with a page of its own, the mark: what is not marked is read
//!   and never written, whatever the options say. Block devices and links are never written.
//! - The mark is written first, so that what a killed run leaves is known for what it is.
//! - Space is looked at and reserved before the first byte.
//! - What this run made is removed when the [`Target`] is dropped, unless it is to be kept.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::store::checksum;

use super::pattern::{self, Header};
use crate::config::IoEngine;
use crate::error::{Error, Result};
use crate::host::{HostArena, Span};
use crate::store::disk::{self, Direction, Disk, Operation, Probe};
use crate::tile::{EXTENT_BYTES_MAX, PAGE_BYTES};

const MAGIC: [u8; 32] = *b"a file made by terrace-bench, v1\n"
    .first_chunk()
    .expect("32 bytes");
const PAGE: usize = PAGE_BYTES as usize;
/// Transfers in flight while a file is filled.
const FILL_DEPTH: usize = 8;

/// The last page of a file of this tool's making.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    /// Bytes before the mark.
    bytes: u64,
    /// Of the blocks' headers.
    seed: u64,
    /// Every block of so many bytes has a header; 0: none has.
    sealed: u64,
    /// All bytes were written.
    filled: bool,
    /// Who made it wants it kept.
    keep: bool,
}

const FIELDS_END: usize = 72;

impl Mark {
    fn encode(&self) -> Vec<u8> {
        let mut page = vec![0; PAGE];
        page[..32].copy_from_slice(&MAGIC);
        let flags = u64::from(self.filled) | u64::from(self.keep) << 1;
        for (index, value) in [self.bytes, self.seed, self.sealed, flags]
            .iter()
            .enumerate()
        {
            page[32 + 8 * index..40 + 8 * index].copy_from_slice(&value.to_le_bytes());
        }
        let sum = checksum(&page[..FIELDS_END]);
        page[FIELDS_END..FIELDS_END + 16].copy_from_slice(&sum.to_le_bytes());
        page
    }

    /// The mark of a file, if it has one.
    fn read(file: &File, length: u64) -> Option<Mark> {
        let bytes = length.checked_sub(PAGE_BYTES)?;
        let mut page = vec![0; PAGE];
        file.read_exact_at(&mut page, bytes).ok()?;
        let sum = checksum(&page[..FIELDS_END]).to_le_bytes();
        if page[..32] != MAGIC || page[FIELDS_END..FIELDS_END + 16] != sum {
            return None;
        }
        let field = |index: usize| {
            let bytes = &page[32 + 8 * index..40 + 8 * index];
            u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
        };
        let mark = Mark {
            bytes: field(0),
            seed: field(1),
            sealed: field(2),
            filled: field(3) & 1 != 0,
            keep: field(3) & 2 != 0,
        };
        (mark.bytes == bytes).then_some(mark)
    }
}

/// What jobs need of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    /// Bytes; `None`: as many as it has.
    pub(super) bytes: Option<u64>,
    /// It will be written.
    pub(super) writes: bool,
    /// It must have been written once before.
    pub(super) filled: bool,
    /// Blocks of so many bytes have headers, before and after; 0: none.
    pub(super) sealed: u64,
    /// Of headers and contents.
    pub(super) seed: u64,
    /// It stays after the run.
    pub(super) keep: bool,
    /// Past the page cache.
    pub(super) direct: Option<bool>,
    /// How it is filled.
    pub(super) engine: Option<IoEngine>,
}

/// A file that is ready.
pub(super) struct Target {
    pub(super) path: PathBuf,
    /// Bytes that may be used.
    pub(super) bytes: u64,
    /// Of its blocks' headers.
    pub(super) seed: u64,
    writable: bool,
    /// It goes when this is dropped.
    remove: bool,
    /// Holds the lock.
    _file: File,
}

impl Drop for Target {
    fn drop(&mut self) {
        if self.remove {
            // Made by this run under a name that was free.
            std::fs::remove_file(&self.path).ok();
        }
    }
}

impl Target {
    /// Finds or makes the file. `stop` ends its filling early.
    pub(super) fn prepare(path: &Path, need: Need, stop: &AtomicBool) -> Result<Target> {
        let found = match std::fs::metadata(path) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Target::make(path, need, stop);
            }
            Err(error) => return Err(Error::io("look at", path, error)),
        };
        let device = found.file_type().is_block_device();
        // Neither written nor removed: it leads to what somebody else named.
        let linked = std::fs::symlink_metadata(path).is_ok_and(|link| link.is_symlink());
        if !device && !found.is_file() {
            let got = if found.is_dir() {
                "a directory"
            } else {
                "something else"
            };
            return Err(refused(
                path,
                "a file or a block device",
                got,
                "name a file",
            ));
        }
        let file = File::open(path).map_err(|e| Error::io("open", path, e))?;
        let length = match device {
            true => io::Seek::seek(&mut &file, io::SeekFrom::End(0)),
            false => Ok(found.len()),
        };
        let length = length.map_err(|e| Error::io("look at", path, e))?;
        match Mark::read(&file, length).filter(|_| !device && !linked) {
            Some(mark) => Target::reuse(path, file, mark, need, stop),
            None => Target::foreign(path, file, length, need, device),
        }
    }

    /// A file or device of somebody else: read as it is.
    fn foreign(path: &Path, file: File, length: u64, need: Need, device: bool) -> Result<Target> {
        if need.writes {
            let link = std::fs::symlink_metadata(path).is_ok_and(|link| link.is_symlink());
            let (got, remedy) = match device {
                _ if link => ("a link", "name the file itself"),
                true => ("a block device", "devices are only read: name a file on it"),
                false => (
                    "one that somebody else made",
                    "name a file that is not there yet",
                ),
            };
            return Err(refused(
                path,
                "a file that terrace-bench made, to write",
                got,
                remedy,
            ));
        }
        if need.sealed > 0 {
            let remedy = "verify works on files that terrace-bench wrote with verify";
            return Err(refused(
                path,
                "blocks with headers",
                "a file of somebody else",
                remedy,
            ));
        }
        let bytes = length / PAGE_BYTES * PAGE_BYTES;
        let wanted = need.bytes.unwrap_or(bytes);
        if wanted > bytes || bytes == 0 {
            let expected = format!("at least {} bytes", wanted.max(PAGE_BYTES));
            return Err(refused(
                path,
                &expected,
                &length.to_string(),
                "lower size or offset",
            ));
        }
        let (path, seed) = (path.to_path_buf(), need.seed);
        Ok(Target {
            path,
            bytes,
            seed,
            writable: false,
            remove: false,
            _file: file,
        })
    }

    /// A file of an earlier run: used if it serves, made anew if not.
    fn reuse(path: &Path, file: File, mark: Mark, need: Need, stop: &AtomicBool) -> Result<Target> {
        lock(&file, path)?;
        let serves = mark.bytes >= need.bytes.unwrap_or(mark.bytes)
            && (mark.filled || !need.filled)
            && (need.sealed == 0 || mark.sealed == need.sealed);
        // What a run was asked to keep is evidence: reading must not replace it.
        if !serves && mark.keep && !need.writes {
            let blocks = |bytes: u64| match bytes {
                0 => "no headers".to_string(),
                bytes => format!("headers every {bytes} bytes"),
            };
            return Err(refused(
                path,
                &format!(
                    "a kept file of at least {} bytes, written, with {}",
                    need.bytes.unwrap_or(mark.bytes),
                    blocks(need.sealed)
                ),
                &format!(
                    "{} bytes, {}, {}",
                    mark.bytes,
                    if mark.filled {
                        "written"
                    } else {
                        "not all written"
                    },
                    blocks(mark.sealed)
                ),
                "read it with the bs and size that it was written with, or remove it",
            ));
        }
        if !serves {
            let need = Need {
                bytes: Some(need.bytes.unwrap_or(mark.bytes).max(mark.bytes)),
                keep: need.keep || mark.keep,
                ..need
            };
            std::fs::remove_file(path).map_err(|e| Error::io("remove a leftover", path, e))?;
            return Target::make(path, need, stop);
        }
        let target = Target {
            path: path.to_path_buf(),
            bytes: mark.bytes,
            seed: mark.seed,
            writable: true,
            remove: !(mark.keep || need.keep),
            _file: file,
        };
        let sealed = if need.writes {
            need.sealed
        } else {
            mark.sealed
        };
        let mark = Mark {
            sealed,
            keep: mark.keep || need.keep,
            ..mark
        };
        target.write_mark(&mark)?;
        Ok(target)
    }

    fn make(path: &Path, need: Need, stop: &AtomicBool) -> Result<Target> {
        let Some(bytes) = need.bytes.map(|bytes| bytes.next_multiple_of(PAGE_BYTES)) else {
            return Err(refused(
                path,
                "a file that is there",
                "none",
                "add size=1g to make one",
            ));
        };
        let made = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(path);
        let file = made.map_err(|source| Error::Io {
            action: "create",
            path: path.to_path_buf(),
            source,
            remedy: "; name a directory that is there and can be written".to_string(),
        })?;
        let mut target = Target {
            path: path.to_path_buf(),
            bytes,
            seed: need.seed,
            writable: true,
            remove: true,
            _file: file,
        };
        lock(&target._file, path)?;
        let remedy = "free space or lower size";
        crate::store::reserve(&target._file, path, bytes + PAGE_BYTES, "disk", remedy)?;
        let seed = need.seed;
        let mut mark = Mark {
            bytes,
            seed,
            sealed: 0,
            filled: false,
            keep: need.keep,
        };
        target.write_mark(&mark)?;
        if need.filled && !target.fill(need, stop)? {
            return Ok(target);
        }
        mark.filled = need.filled;
        mark.sealed = need.sealed;
        target.write_mark(&mark)?;
        target.remove = !need.keep;
        Ok(target)
    }

    fn write_mark(&self, mark: &Mark) -> Result<()> {
        let write = || -> io::Result<()> {
            let mut options = OpenOptions::new();
            options
                .write(true)
                .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC);
            options
                .open(&self.path)?
                .write_all_at(&mark.encode(), mark.bytes)
        };
        write().map_err(|e| Error::io("write the mark of", &self.path, e))
    }

    /// Writes every byte once; `false` if it was stopped.
    fn fill(&self, need: Need, stop: &AtomicBool) -> Result<bool> {
        // Whole blocks where they have headers.
        let block = need.sealed.max(PAGE_BYTES);
        let piece = (EXTENT_BYTES_MAX / block).max(1) * block;
        let mut cutter = HostArena::take(FILL_DEPTH as u64 * piece)?;
        let ring = cutter.cut_ring(FILL_DEPTH, piece);
        let mut slabs: Vec<_> = (0..FILL_DEPTH).map(|_| ring.take()).collect();
        for (index, slab) in slabs.iter_mut().enumerate() {
            pattern::fill(slab.as_mut_slice(), need.seed ^ index as u64);
        }
        let span = [ring.span()];
        let (mut disk, _) = self.open(need.direct, need.engine, &span)?;
        let (mut offset, mut finished) = (0, Vec::new());
        let end = self.bytes;
        while offset < end || disk.in_flight() > 0 {
            let stopped = stop.load(Ordering::Relaxed);
            if stopped && disk.in_flight() == 0 {
                return Ok(false);
            }
            while offset < end && !stopped {
                let Some(mut slab) = slabs.pop() else { break };
                let bytes = piece.min(end - offset) as usize;
                if need.sealed > 0 {
                    let mut at = offset;
                    let whole = bytes / need.sealed as usize * need.sealed as usize;
                    let memory = &mut slab.as_mut_slice::<u8>()[..whole];
                    for block in memory.chunks_exact_mut(need.sealed as usize) {
                        let header = Header {
                            seed: need.seed,
                            offset: at,
                            sequence: 0,
                        };
                        pattern::seal(block, header);
                        at += need.sealed;
                    }
                }
                let direction = Direction::Write;
                disk.start(Operation {
                    direction,
                    offset,
                    bytes,
                    slab,
                    token: 0,
                });
                offset += bytes as u64;
            }
            disk.wait(&mut finished);
            for done in finished.drain(..) {
                done.result.map_err(|e| Error::io("fill", &self.path, e))?;
                slabs.push(done.operation.slab);
            }
        }
        disk.flush()
            .map_err(|e| Error::io("flush", &self.path, e))?;
        Ok(true)
    }

    /// The file, and whether past the page cache: as asked, else where the file system can.
    fn open_file(&self, direct: Option<bool>) -> Result<(File, bool)> {
        let open = |direct: bool| {
            let flag = if direct { libc::O_DIRECT } else { 0 };
            let link = if self.writable { libc::O_NOFOLLOW } else { 0 };
            let mut options = OpenOptions::new();
            options.read(true).write(self.writable);
            options
                .custom_flags(flag | link | libc::O_CLOEXEC)
                .open(&self.path)
        };
        match (open(direct.unwrap_or(true)), direct) {
            (Ok(file), _) => Ok((file, direct.unwrap_or(true))),
            (Err(error), None) if error.raw_os_error() == Some(libc::EINVAL) => {
                let file = open(false).map_err(|e| Error::io("open", &self.path, e))?;
                Ok((file, false))
            }
            (Err(source), _) => {
                let remedy = match source.raw_os_error() {
                    Some(libc::EINVAL) => "; this file system has no direct I/O: direct=0",
                    _ => "",
                };
                let (path, remedy) = (self.path.clone(), remedy.to_string());
                Err(Error::Io {
                    action: "open",
                    path,
                    source,
                    remedy,
                })
            }
        }
    }

    /// A disk of the trainer's on this file, and a sentence that says which.
    pub(super) fn open(
        &self,
        direct: Option<bool>,
        engine: Option<IoEngine>,
        memory: &[Span],
    ) -> Result<(Box<dyn Disk>, String)> {
        let (file, direct) = self.open_file(direct)?;
        let tried = |engine: IoEngine| {
            let file = file.try_clone()?;
            let (file_system, sentence) = (String::new(), String::new());
            let probe = Probe {
                engine,
                direct,
                file_system,
                sentence,
                warning: None,
            };
            disk::open(file, self.bytes, &probe, memory)
        };
        let wanted = engine.unwrap_or(IoEngine::Uring);
        let (disk, used, note) = match (tried(wanted), engine) {
            (Ok((disk, note)), _) => (disk, wanted, note),
            (Err(error), None) => {
                let (disk, _) =
                    tried(IoEngine::Pread).map_err(|e| Error::io("start I/O on", &self.path, e))?;
                (disk, IoEngine::Pread, Some(format!("io_uring: {error}")))
            }
            (Err(source), Some(_)) => {
                let remedy = "; leave ioengine out, or set it to pread".to_string();
                let path = self.path.clone();
                return Err(Error::Io {
                    action: "start I/O on",
                    path,
                    source,
                    remedy,
                });
            }
        };
        let name = if used == IoEngine::Uring {
            "io_uring"
        } else {
            "pread pool"
        };
        let kind = if direct { "direct" } else { "buffered" };
        let note = note.map_or(String::new(), |note| format!(" ({note})"));
        Ok((
            disk,
            format!("{}: {name}, {kind} I/O{note}", self.path.display()),
        ))
    }
}

fn refused(path: &Path, expected: &str, got: &str, remedy: &str) -> Error {
    Error::input("file", path.display().to_string(), expected, got, remedy)
}

fn lock(file: &File, path: &Path) -> Result<()> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(Error::Busy {
            path: path.to_path_buf(),
            pid: 0,
        }),
        Err(TryLockError::Error(error)) => Err(Error::io("lock", path, error)),
    }
}
