//! Reads and writes by io_uring, through tokio-uring's runtime on a thread of its own.
//!
//! Memory moves into an operation and comes back with its result. Outcomes are handed on in the
//! order of their starts; the thread waits for memory only while nothing is in flight, so that it
//! never keeps a completion from being seen.

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, TryRecvError};
use tokio_uring::buf::BoundedBuf;
use tokio_uring::fs::File;

use super::pages::{Pages, TileFile, read_rest};
use super::sink::{Failure, Job};
use super::stream::{DEPTH, Done, Feed, Piece};

/// Runs `work` in a runtime on a new thread, once the kernel gave it a ring.
fn start<F>(name: &str, work: impl FnOnce() -> F + Send + 'static) -> io::Result<JoinHandle<()>>
where
    F: Future<Output = ()>,
{
    let (started, outcome) = crossbeam_channel::bounded(1);
    let thread = std::thread::Builder::new()
        .name(name.to_string())
        .spawn(move || {
            let mut builder = tokio_uring::builder();
            match tokio_uring::Runtime::new(builder.entries(2 * DEPTH as u32)) {
                Ok(runtime) => {
                    started.send(Ok(())).ok();
                    runtime.block_on(work());
                }
                Err(error) => {
                    started.send(Err(error)).ok();
                }
            }
        })?;
    let ended = || Err(io::Error::other("the thread has ended"));
    outcome.recv().unwrap_or_else(|_| ended()).map(|()| thread)
}

/// Reads the feed's pieces.
pub(super) fn start_reads(feed: Feed) -> io::Result<JoinHandle<()>> {
    start("inspect-ring", move || read_pieces(feed))
}

async fn read_pieces(feed: Feed) {
    let Ok(file) = feed.file.file.try_clone() else {
        // The descriptors ran out; every piece then says so.
        return fail_all(&feed);
    };
    let file = Rc::new(File::from_std(file));
    let mut in_flight = VecDeque::with_capacity(DEPTH);
    let mut next = 0;
    loop {
        while in_flight.len() < DEPTH && next < feed.pieces.len() {
            let pages = match feed.free.try_recv() {
                Ok(pages) => pages,
                Err(TryRecvError::Empty) if in_flight.is_empty() => match feed.free.recv() {
                    Ok(pages) => pages,
                    Err(_) => return,
                },
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            };
            let piece = feed.pieces[next];
            if !feed.may_read(piece.bytes) {
                return;
            }
            let read = read_piece(file.clone(), feed.file.clone(), piece, pages, next);
            in_flight.push_back(tokio_uring::spawn(read));
            next += 1;
        }
        let Some(first) = in_flight.pop_front() else {
            return;
        };
        let Ok(done) = first.await else {
            return;
        };
        if feed.done.send(done).is_err() {
            return;
        }
    }
}

fn fail_all(feed: &Feed) {
    for index in 0..feed.pieces.len() {
        let done = Done {
            index,
            pages: Pages::new(0),
            result: Err(io::Error::from_raw_os_error(libc::EMFILE)),
        };
        if feed.done.send(done).is_err() {
            return;
        }
    }
}

async fn read_piece(
    file: Rc<File>,
    plain: TileFile,
    piece: Piece,
    pages: Pages,
    index: usize,
) -> Done {
    let start = pages.start;
    let slice = pages.memory.slice(start..start + piece.bytes);
    let (moved, slice) = file.read_at(slice, piece.offset).await;
    let mut pages = Pages::from_parts(slice.into_inner(), start);
    let result = match moved {
        Ok(bytes) if bytes == piece.bytes => Ok(()),
        Ok(bytes) => rest(&plain, piece, bytes, &mut pages),
        Err(error) if is_transient(&error) => rest(&plain, piece, 0, &mut pages),
        Err(error) => Err(error),
    };
    Done {
        index,
        pages,
        result,
    }
}

/// What a short read left, by pread.
fn rest(file: &TileFile, piece: Piece, done: usize, pages: &mut Pages) -> io::Result<()> {
    read_rest(
        &file.file,
        piece.offset,
        done,
        &mut pages.bytes_mut()[..piece.bytes],
    )
}

fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EAGAIN | libc::EINTR | libc::ECANCELED)
    )
}

/// Writes jobs until their channel ends.
pub(super) fn start_writes(
    file: std::fs::File,
    work: Receiver<Job>,
    failure: Failure,
) -> io::Result<JoinHandle<()>> {
    start("inspect-ring", move || write_jobs(file, work, failure))
}

async fn write_jobs(file: std::fs::File, work: Receiver<Job>, failure: Failure) {
    let file = Rc::new(File::from_std(file));
    let mut in_flight = VecDeque::with_capacity(DEPTH);
    let mut open = true;
    while open || !in_flight.is_empty() {
        while open && in_flight.len() < DEPTH {
            let job = match in_flight.is_empty() {
                true => work.recv().map_err(|_| TryRecvError::Disconnected),
                false => work.try_recv(),
            };
            match job {
                Ok(job) => {
                    let write = write_job(file.clone(), job, failure.clone());
                    in_flight.push_back(tokio_uring::spawn(write));
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => open = false,
            }
        }
        if let Some(first) = in_flight.pop_front() {
            // A panic of the task was printed, and its memory is gone with it.
            first.await.ok();
        }
    }
}

async fn write_job(file: Rc<File>, job: Job, failure: Failure) {
    let start = job.pages.start;
    let slice = job.pages.memory.slice(start..start + job.bytes);
    let (result, slice) = file.write_all_at(slice, job.offset).await;
    let pages = Pages::from_parts(slice.into_inner(), start);
    Job::settle(job.home, pages, result, &failure);
}
