//! Pieces written to a new file, several at once.
//!
//! Memory moves into a write and goes back to where it came from. The first failure ends the
//! writing; it is what [`Sink::finish`] returns. Nothing is durable before a flush of the file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender};

use super::pages::Pages;
use super::stream::DEPTH;
use crate::config::IoEngine;

/// A write.
pub(super) struct Job {
    pub(super) offset: u64,
    pub(super) pages: Pages,
    /// Bytes of `pages` that are written, whole pages.
    pub(super) bytes: usize,
    /// Who wants the memory back.
    pub(super) home: Option<Sender<Pages>>,
}

impl Job {
    /// Gives the memory back and keeps the first failure.
    pub(super) fn settle(
        home: Option<Sender<Pages>>,
        pages: Pages,
        result: io::Result<()>,
        failure: &Failure,
    ) {
        if let Some(home) = home {
            home.try_send(pages).ok();
        }
        if let Err(error) = result {
            let mut failure = failure.lock().unwrap_or_else(PoisonError::into_inner);
            failure.get_or_insert(error);
        }
    }
}

/// The first failure.
pub(super) type Failure = Arc<Mutex<Option<io::Error>>>;

/// The writing side of a copy.
pub(super) struct Sink {
    jobs: Option<Sender<Job>>,
    failure: Failure,
    engine: IoEngine,
    threads: Vec<JoinHandle<()>>,
}

impl Sink {
    /// Starts to take writes to `file` by the engine named, or by the best that works.
    pub(super) fn start(file: &Arc<File>, wanted: Option<IoEngine>) -> io::Result<Sink> {
        let (jobs, work) = crossbeam_channel::bounded(DEPTH);
        let failure = Failure::default();
        let mut sink = Sink {
            jobs: Some(jobs),
            failure: failure.clone(),
            engine: IoEngine::Pread,
            threads: Vec::new(),
        };
        if wanted != Some(IoEngine::Pread) {
            match start_ring(file, &work, &failure) {
                Ok(thread) => {
                    sink.engine = IoEngine::Uring;
                    sink.threads.push(thread);
                    return Ok(sink);
                }
                Err(error) if wanted == Some(IoEngine::Uring) => return Err(error),
                Err(_) => {}
            }
        }
        for index in 0..DEPTH {
            let (file, work, failure) = (file.clone(), work.clone(), failure.clone());
            let thread = std::thread::Builder::new()
                .name(format!("inspect-write-{index}"))
                .spawn(move || {
                    for job in work {
                        let bytes = &job.pages.bytes()[..job.bytes];
                        let result = file.write_all_at(bytes, job.offset);
                        Job::settle(job.home, job.pages, result, &failure);
                    }
                })?;
            sink.threads.push(thread);
        }
        Ok(sink)
    }

    /// What writes.
    pub(super) fn engine(&self) -> IoEngine {
        self.engine
    }

    /// Hands a write over; waits while too many are under way.
    ///
    /// # Errors
    /// The first failure so far.
    pub(super) fn write(&self, job: Job) -> io::Result<()> {
        if let Some(error) = self.failed() {
            return Err(error);
        }
        let ended = |_| io::Error::other("a writing thread has ended");
        let jobs = self.jobs.as_ref().expect("only an end takes the channel");
        jobs.send(job).map_err(ended)
    }

    /// Waits for all writes.
    ///
    /// # Errors
    /// The first failure.
    pub(super) fn finish(mut self) -> io::Result<()> {
        self.end();
        self.failed().map_or(Ok(()), Err)
    }

    fn failed(&self) -> Option<io::Error> {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.take()
    }

    fn end(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            thread.join().ok();
        }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(feature = "inspect-uring")]
fn start_ring(
    file: &Arc<File>,
    work: &Receiver<Job>,
    failure: &Failure,
) -> io::Result<JoinHandle<()>> {
    super::ring::start_writes(file.try_clone()?, work.clone(), failure.clone())
}

#[cfg(not(feature = "inspect-uring"))]
fn start_ring(
    _file: &Arc<File>,
    _work: &Receiver<Job>,
    _failure: &Failure,
) -> io::Result<JoinHandle<()>> {
    Err(io::Error::other("built without inspect-uring"))
}
