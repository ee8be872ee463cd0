//! The one trait of the store: a disk that takes operations and gives back completions. And the
//! probe that picks its engine for a directory.
//!
//! - An operation owns its slab until its completion; nothing else can reach the bytes meanwhile.
//! - Offsets, lengths and addresses are whole pages, checked in one place ([`Operation::check`]).
//! - A completion without error moved every byte: short transfers are continued by [`Progress`],
//!   transient refusals repeated, both within a fixed count.
//! - In flight is at most [`Disk::depth`]; starting more is a programmer error.
//!
//! What an operation means, and its checksum, is `engine`'s and its users'.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use super::mutant::{self, Mutant};
use super::pool::PoolDisk;
use super::sys;
use super::uring::UringDisk;
use crate::config::IoEngine;
use crate::error::{Error, Result};
use crate::host::{HostArena, Lease, Span};
use crate::tile::PAGE_BYTES;

/// Most operations that a disk has in flight.
pub const DEPTH: usize = 16;
/// Transfers without progress after which an operation fails.
const ATTEMPTS_MAX: u32 = 64;
const PAGE: usize = PAGE_BYTES as usize;

/// Which way bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the disk to the slab.
    Read,
    /// From the slab to the disk.
    Write,
}

impl Direction {
    /// As errors name it.
    pub fn verb(self) -> &'static str {
        match self {
            Direction::Read => "read",
            Direction::Write => "write",
        }
    }
}

/// A transfer between a slab's beginning and a place of the disk.
#[derive(Debug)]
pub struct Operation {
    /// Which way.
    pub direction: Direction,
    /// Byte offset on the disk, a multiple of a page.
    pub offset: u64,
    /// Bytes, a multiple of a page, at most the slab's.
    pub bytes: usize,
    /// The memory.
    pub slab: Lease,
    /// The starter's own number, given back with the completion.
    pub token: u64,
}

impl Operation {
    /// The only check of alignment and bounds that an operation needs.
    ///
    /// # Panics
    /// If it is wrong: the caller's error.
    pub fn check(&self, disk_bytes: u64) {
        assert!(
            self.offset.is_multiple_of(PAGE_BYTES),
            "offset {}",
            self.offset
        );
        assert!(
            self.bytes > 0 && self.bytes.is_multiple_of(PAGE),
            "bytes {}",
            self.bytes
        );
        assert!(
            self.bytes <= self.slab.len(),
            "{} of {:?}",
            self.bytes,
            self.slab
        );
        assert!(
            self.slab.as_ptr().addr().is_multiple_of(PAGE),
            "{:?}",
            self.slab
        );
        let end = self.offset.checked_add(self.bytes as u64);
        assert!(
            end.is_some_and(|end| end <= disk_bytes),
            "{}+{} past {disk_bytes}",
            self.offset,
            self.bytes
        );
    }
}

/// A finished operation: `Ok` moved every byte.
#[derive(Debug)]
pub struct Finished {
    /// The operation with its slab.
    pub operation: Operation,
    /// Its outcome.
    pub result: io::Result<()>,
}

/// Ends a [`Disk::wait`] from another thread.
#[derive(Clone)]
pub struct Waker(Arc<dyn Fn() + Send + Sync>);

impl Waker {
    /// Wraps what raises the disk's own signal.
    pub fn new(raise: impl Fn() + Send + Sync + 'static) -> Waker {
        Waker(Arc::new(raise))
    }

    /// Makes the present or the next wait return.
    pub fn wake(&self) {
        (self.0)()
    }
}

/// A disk. Its methods are called by one thread at a time.
pub trait Disk: Send {
    /// Most operations in flight.
    fn depth(&self) -> usize;

    /// Operations started and not yet given back.
    fn in_flight(&self) -> usize;

    /// Starts an operation. Its outcome, a refusal too, comes by [`Disk::wait`].
    ///
    /// # Panics
    /// If the operation is malformed or `depth` are in flight.
    fn start(&mut self, operation: Operation);

    /// Waits until something finished or the waker was used, then appends all that finished.
    /// Returns at once when nothing is in flight.
    fn wait(&mut self, finished: &mut Vec<Finished>);

    /// Makes every finished write durable (fdatasync).
    ///
    /// # Panics
    /// If something is in flight.
    fn flush(&mut self) -> io::Result<()>;

    /// What ends a wait from another thread.
    fn waker(&self) -> Waker;
}

/// How far an operation has come; shared by the engines, so that all treat short transfers alike.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Bytes moved, whole pages.
    pub(super) done: usize,
    idle: u32,
}

/// What to do after a transfer.
#[derive(Debug)]
pub(super) enum Next {
    /// Transfer the rest, from `done`.
    Again,
    /// All bytes moved.
    Done,
    /// It cannot be completed.
    Failed(io::Error),
}

impl Progress {
    /// Takes the outcome of a transfer that began at `done`. A short one is continued from its last
    /// whole page: direct I/O refuses other offsets.
    pub(super) fn advance(&mut self, operation: &Operation, moved: io::Result<usize>) -> Next {
        let before = self.done;
        match moved {
            Ok(0) => {
                return Next::Failed(match operation.direction {
                    Direction::Read => io::ErrorKind::UnexpectedEof.into(),
                    Direction::Write => io::Error::from_raw_os_error(libc::ENOSPC),
                });
            }
            Ok(bytes) if before + bytes >= operation.bytes => return Next::Done,
            Ok(_) if mutant::is(Mutant::ShortAccepted) => return Next::Done,
            Ok(bytes) => self.done = (before + bytes) / PAGE * PAGE,
            Err(error) if is_transient(&error) => {
                if self.idle >= ATTEMPTS_MAX {
                    return Next::Failed(error);
                }
            }
            Err(error) => return Next::Failed(error),
        }
        if self.done > before {
            self.idle = 0;
        } else {
            self.idle += 1;
        }
        if self.idle > ATTEMPTS_MAX {
            return Next::Failed(io::Error::other("short transfers without progress"));
        }
        Next::Again
    }
}

/// Whether the kernel asks for a repetition. ECANCELED: the thread that started it has ended.
pub(super) fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EAGAIN | libc::EINTR | libc::EBUSY | libc::ECANCELED)
    )
}

/// What the probe of a directory found and chose.
#[derive(Clone, Debug)]
pub struct Probe {
    /// The engine.
    pub engine: IoEngine,
    /// O_DIRECT works there.
    pub direct: bool,
    /// Name of the file system.
    pub file_system: String,
    /// The choice in one sentence, to be said once.
    pub sentence: String,
    /// What a person should know about this place, if anything.
    pub warning: Option<String>,
}

/// Tries a page of direct I/O and a ring in `directory` and picks the engine: io_uring where the
/// kernel lets it work, otherwise the pread pool. `wanted` is taken or refused, never replaced.
pub fn probe(directory: &Path, wanted: Option<IoEngine>) -> Result<Probe> {
    let system = sys::file_system(directory).map_err(|e| Error::io("look at", directory, e))?;
    let trial = |direct| super::directory::trial_file(directory, direct);
    let direct = match trial(true).and_then(|file| try_page(&file)) {
        Ok(()) => true,
        // A store that has its space may be opened on a full disk; a new one is refused later.
        Err(error) if is_full(&error) => true,
        Err(error) if is_unsupported(&error) => false,
        Err(error) => return Err(Error::io("try", directory, error)),
    };
    let ring = match wanted {
        Some(IoEngine::Pread) => Err(io::Error::other("not asked for")),
        _ => trial(direct).and_then(|file| {
            let mut disk = UringDisk::new(Arc::new(file), PAGE_BYTES, direct, &[])?;
            try_ring(&mut disk)
        }),
    };
    if let (Some(IoEngine::Uring), Err(error)) = (wanted, &ring) {
        return Err(Error::input(
            "memory.io_engine",
            directory.display().to_string(),
            "a system that allows io_uring",
            error.to_string(),
            "leave memory.io_engine out or set it to \"pread\"",
        ));
    }
    let engine = if ring.is_ok() {
        IoEngine::Uring
    } else {
        IoEngine::Pread
    };
    let reason = match (&ring, wanted) {
        (Err(error), None) => format!(" (io_uring: {error})"),
        _ => String::new(),
    };
    let sentence = format!(
        "{}: {}, {} I/O, {}{reason}",
        directory.display(),
        match engine {
            IoEngine::Uring => "io_uring",
            IoEngine::Pread => "pread pool",
        },
        if direct { "direct" } else { "buffered" },
        system.name,
    );
    let warning = if system.volatile {
        Some(format!(
            "{} is {}: it takes host memory and is lost at a reboot",
            directory.display(),
            system.name
        ))
    } else if system.remote {
        Some(format!(
            "{} is {}: locks, flushes and speed are not those of a local drive",
            directory.display(),
            system.name
        ))
    } else {
        None
    };
    Ok(Probe {
        engine,
        direct,
        file_system: system.name,
        sentence,
        warning,
    })
}

/// A file opened to read.
pub(super) struct OpenedToRead {
    pub(super) disk: Box<dyn Disk>,
    /// Its length.
    pub(super) bytes: u64,
    /// Engine and file system, in one sentence.
    pub(super) sentence: String,
}

/// Opens a file to read, by io_uring where the kernel lets it work, without writing anywhere.
pub(super) fn open_to_read(path: &Path, memory: &[Span]) -> Result<OpenedToRead> {
    let open = |direct| {
        let file = super::directory::open_to_read(path, direct)?;
        let bytes = file.metadata()?.len();
        if bytes >= PAGE_BYTES {
            let mut cutter =
                HostArena::take(PAGE_BYTES).map_err(|error| io::Error::other(error.to_string()))?;
            file.read_at(cutter.cut(PAGE_BYTES).as_mut_slice(), 0)?;
        }
        Ok((file, bytes, direct))
    };
    let opened = open(true).or_else(|error| match is_unsupported(&error) {
        true => open(false),
        false => Err(error),
    });
    let (file, bytes, direct) = opened.map_err(|e| Error::io("open", path, e))?;
    let whole = bytes / PAGE_BYTES * PAGE_BYTES;
    let file = Arc::new(file);
    let (disk, engine): (Box<dyn Disk>, _) =
        match UringDisk::new(file.clone(), whole, direct, memory) {
            Ok(disk) => (Box::new(disk), "io_uring"),
            Err(_) => {
                let pool =
                    PoolDisk::new(file, whole).map_err(|e| Error::io("start I/O on", path, e))?;
                (Box::new(pool), "pread pool")
            }
        };
    let system = sys::file_system(path).map_err(|e| Error::io("look at", path, e))?;
    let sentence = format!(
        "{}: {engine}, {} I/O, {}, read-only",
        path.display(),
        if direct { "direct" } else { "buffered" },
        system.name,
    );
    Ok(OpenedToRead {
        disk,
        bytes,
        sentence,
    })
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOTTY)
    )
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

/// A page written and read back: some file systems take the flag and refuse the I/O.
fn try_page(file: &File) -> io::Result<()> {
    let mut cutter =
        HostArena::take(PAGE_BYTES).map_err(|error| io::Error::other(error.to_string()))?;
    let mut page = cutter.cut(PAGE_BYTES);
    page.as_mut_slice::<u8>().fill(0xa5);
    let wrote = file.write_at(page.as_slice(), 0)?;
    page.as_mut_slice::<u8>().fill(0);
    let read = file.read_at(page.as_mut_slice(), 0)?;
    if wrote != PAGE || read != PAGE || page.as_slice::<u8>().iter().any(|byte| *byte != 0xa5) {
        return Err(io::Error::other(
            "a page read back differs from what was written",
        ));
    }
    Ok(())
}

fn try_ring(disk: &mut UringDisk) -> io::Result<()> {
    let mut cutter =
        HostArena::take(PAGE_BYTES).map_err(|error| io::Error::other(error.to_string()))?;
    let mut slab = cutter.cut(PAGE_BYTES);
    slab.as_mut_slice::<u8>().fill(0x5a);
    for direction in [Direction::Write, Direction::Read] {
        disk.start(Operation {
            direction,
            offset: 0,
            bytes: PAGE,
            slab,
            token: 0,
        });
        let mut finished = Vec::new();
        while finished.is_empty() {
            disk.wait(&mut finished);
        }
        let Some(Finished { operation, result }) = finished.pop() else {
            return Err(io::Error::other("a completion got lost"));
        };
        match result {
            // The ring works; there is no room to try with.
            Err(error) if is_full(&error) => return Ok(()),
            result => result?,
        }
        slab = operation.slab;
        if direction == Direction::Write {
            slab.as_mut_slice::<u8>().fill(0);
        }
    }
    if slab.as_slice::<u8>().iter().any(|byte| *byte != 0x5a) {
        return Err(io::Error::other(
            "a page read back differs from what was written",
        ));
    }
    Ok(())
}

/// A disk of `bytes` on `file` by the engine that `probe` chose. `memory` is registered with the
/// kernel where it allows that. The note, if any, says what was not allowed.
pub fn open(
    file: File,
    bytes: u64,
    probe: &Probe,
    memory: &[Span],
) -> io::Result<(Box<dyn Disk>, Option<String>)> {
    let file = Arc::new(file);
    match probe.engine {
        IoEngine::Uring => {
            let disk = UringDisk::new(file, bytes, probe.direct, memory)?;
            let note = disk.note().map(str::to_string);
            Ok((Box::new(disk), note))
        }
        IoEngine::Pread => Ok((Box::new(PoolDisk::new(file, bytes)?), None)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(direction: Direction) -> Operation {
        let mut cutter = HostArena::take(4 * PAGE_BYTES).unwrap();
        Operation {
            direction,
            offset: 0,
            bytes: 4 * PAGE,
            slab: cutter.cut(4 * PAGE_BYTES),
            token: 0,
        }
    }

    #[test]
    fn a_short_transfer_continues_from_its_last_whole_page() {
        let op = operation(Direction::Write);
        let mut progress = Progress::default();
        assert!(matches!(progress.advance(&op, Ok(PAGE + 904)), Next::Again));
        assert_eq!(progress.done, PAGE);
        assert!(matches!(progress.advance(&op, Ok(3 * PAGE)), Next::Done));
    }

    #[test]
    fn transfers_without_progress_end() {
        for outcome in [
            || Ok(100),
            || Err(io::Error::from_raw_os_error(libc::EAGAIN)),
        ] {
            let op = operation(Direction::Read);
            let mut progress = Progress::default();
            let count = (0..1000)
                .take_while(|_| matches!(progress.advance(&op, outcome()), Next::Again))
                .count();
            assert_eq!(count, ATTEMPTS_MAX as usize, "bounded");
        }
    }

    #[test]
    fn nothing_moved_is_an_end_of_file_or_a_full_disk() {
        let mut progress = Progress::default();
        let Next::Failed(eof) = progress.advance(&operation(Direction::Read), Ok(0)) else {
            panic!("a read of nothing is an error")
        };
        assert_eq!(eof.kind(), io::ErrorKind::UnexpectedEof);
        let Next::Failed(full) = progress.advance(&operation(Direction::Write), Ok(0)) else {
            panic!("a write of nothing is an error")
        };
        assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    }
}
