//! Pieces of a file read ahead, several at once, and handed out in order.
//!
//! - Reading has threads of its own: checksums and comparisons run beside it.
//! - Memory is [`BUFFERS`] pieces, however long the file.
//! - A failed piece is handed out as its error; the others still come.
//! - The engine is tokio-uring where it was asked for, compiled in and allowed by the kernel;
//!   otherwise threads that call pread.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};

use super::pages::{Pages, TileFile};
use crate::config::IoEngine;
use crate::error::{Error, Result};

/// Reads in flight.
pub(super) const DEPTH: usize = 8;
/// Pieces in memory: those in flight, and those that wait to be handed out.
const BUFFERS: usize = DEPTH + 4;
/// Longest sleep before the end of the stream is noticed.
const NAP: Duration = Duration::from_millis(50);

/// A range of the file, whole pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) offset: u64,
    pub(super) bytes: usize,
}

/// How to read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reading {
    /// The engine; `None` is io_uring where it works, pread elsewhere.
    pub engine: Option<IoEngine>,
    /// Most bytes a second.
    pub rate: Option<u64>,
}

impl Reading {
    /// Threads that call pread, as fast as they can.
    pub fn pread() -> Reading {
        Reading {
            engine: Some(IoEngine::Pread),
            rate: None,
        }
    }
}

pub(super) struct Done {
    pub(super) index: usize,
    pub(super) pages: Pages,
    pub(super) result: io::Result<()>,
}

/// What the reading threads share.
#[derive(Clone)]
pub(super) struct Feed {
    pub(super) file: TileFile,
    pub(super) pieces: Arc<[Piece]>,
    pub(super) free: Receiver<Pages>,
    pub(super) done: Sender<Done>,
    pace: Arc<Mutex<Pace>>,
    stop: Arc<AtomicBool>,
}

struct Pace {
    rate: Option<u64>,
    started: Instant,
    bytes: u64,
}

impl Feed {
    /// Waits until `bytes` more are within the rate; `false` when the stream has ended.
    pub(super) fn may_read(&self, bytes: usize) -> bool {
        let due = {
            let mut pace = self.pace.lock().unwrap_or_else(PoisonError::into_inner);
            let due = pace.rate.map(|rate| {
                pace.started + Duration::from_secs_f64(pace.bytes as f64 / rate as f64)
            });
            pace.bytes += bytes as u64;
            due
        };
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return false;
            }
            let left = due.map(|due| due.saturating_duration_since(Instant::now()));
            match left {
                Some(left) if !left.is_zero() => std::thread::sleep(left.min(NAP)),
                _ => return true,
            }
        }
    }
}

/// Pieces that are read ahead.
pub(super) struct Stream {
    done: Receiver<Done>,
    free: Option<Sender<Pages>>,
    /// Came before one that is to be handed out first.
    early: BTreeMap<usize, Done>,
    next: usize,
    count: usize,
    engine: IoEngine,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Stream {
    /// Starts to read `pieces` in order.
    ///
    /// # Errors
    /// [`Error::Io`] if a thread cannot be started; [`Error::Input`] if io_uring was asked for and
    /// is not to be had.
    pub(super) fn start(file: &TileFile, pieces: Vec<Piece>, how: Reading) -> Result<Stream> {
        let largest = pieces.iter().map(|piece| piece.bytes).max().unwrap_or(0);
        let count = pieces.len();
        let (free, buffers) = crossbeam_channel::bounded(BUFFERS);
        for _ in 0..BUFFERS.min(count) {
            free.send(Pages::new(largest)).ok();
        }
        let (done, finished) = crossbeam_channel::bounded(BUFFERS);
        let stop = Arc::new(AtomicBool::new(false));
        let pace = Pace {
            rate: how.rate,
            started: Instant::now(),
            bytes: 0,
        };
        let feed = Feed {
            file: file.clone(),
            pieces: pieces.into(),
            free: buffers,
            done,
            pace: Arc::new(Mutex::new(pace)),
            stop: stop.clone(),
        };
        let (engine, threads) = begin(&feed, how.engine)?;
        Ok(Stream {
            done: finished,
            free: Some(free),
            early: BTreeMap::new(),
            next: 0,
            count,
            engine,
            stop,
            threads,
        })
    }

    /// What reads.
    pub(super) fn engine(&self) -> IoEngine {
        self.engine
    }

    /// The next piece; `None` after the last.
    pub(super) fn next(&mut self) -> Option<Done> {
        if self.next == self.count {
            return None;
        }
        let wanted = self.next;
        self.next += 1;
        loop {
            if let Some(done) = self.early.remove(&wanted) {
                return Some(done);
            }
            match self.done.recv() {
                Ok(done) => self.early.insert(done.index, done),
                // A reading thread ended by a panic, which it printed.
                Err(_) => return None,
            };
        }
    }

    /// Where memory is given back by others. Every copy must be dropped for the stream to end.
    pub(super) fn home(&self) -> Option<Sender<Pages>> {
        self.free.clone()
    }

    /// Takes memory back for a later piece.
    pub(super) fn give_back(&self, pages: Pages) {
        if let Some(free) = &self.free {
            free.try_send(pages).ok();
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.free = None;
        // A full channel would hold a thread.
        while self.done.recv().is_ok() {}
        for thread in self.threads.drain(..) {
            thread.join().ok();
        }
    }
}

fn begin(feed: &Feed, wanted: Option<IoEngine>) -> Result<(IoEngine, Vec<JoinHandle<()>>)> {
    if wanted != Some(IoEngine::Pread) {
        match start_ring(feed) {
            Ok(thread) => return Ok((IoEngine::Uring, vec![thread])),
            Err(error) if wanted == Some(IoEngine::Uring) => {
                return Err(Error::input(
                    "arguments",
                    "--io-engine",
                    "a system and a build that allow io_uring",
                    error.to_string(),
                    "leave it out or name pread",
                ));
            }
            Err(_) => {}
        }
    }
    let next = Arc::new(AtomicUsize::new(0));
    let mut threads = Vec::with_capacity(DEPTH);
    for index in 0..DEPTH.min(feed.pieces.len()) {
        let (feed, next) = (feed.clone(), next.clone());
        let thread = std::thread::Builder::new()
            .name(format!("inspect-read-{index}"))
            .spawn(move || read_pieces(&feed, &next))
            .map_err(|e| Error::io("start a thread for", std::path::Path::new("reading"), e))?;
        threads.push(thread);
    }
    Ok((IoEngine::Pread, threads))
}

#[cfg(feature = "inspect-uring")]
fn start_ring(feed: &Feed) -> io::Result<JoinHandle<()>> {
    super::ring::start_reads(feed.clone())
}

#[cfg(not(feature = "inspect-uring"))]
fn start_ring(_feed: &Feed) -> io::Result<JoinHandle<()>> {
    Err(io::Error::other("built without inspect-uring"))
}

/// A thread's part: memory first, then a piece, so that the piece wanted first always has memory.
fn read_pieces(feed: &Feed, next: &AtomicUsize) {
    while let Ok(mut pages) = feed.free.recv() {
        let index = next.fetch_add(1, Ordering::Relaxed);
        let Some(piece) = feed.pieces.get(index).copied() else {
            return;
        };
        if !feed.may_read(piece.bytes) {
            return;
        }
        let result = feed.file.read_into(piece.offset, piece.bytes, &mut pages);
        let done = Done {
            index,
            pages,
            result,
        };
        if feed.done.send(done).is_err() {
            return;
        }
    }
}
