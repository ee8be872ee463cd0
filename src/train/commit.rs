//! Commits beside training: one at a time, each on a thread of its own.
//!
//! - [`Committer::begin`] takes the state that is held and returns; the thread copies, writes and
//!   releases it tile by tile.
//! - [`Committer::end`] gives the outcome, once there is one; the checkpoints come back with it.
//! - Dropping waits for the commit under way: a run that ends with an error ends after it.
//!
//! When a commit is due, and what its failure means, is `train`'s.

use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::checkpoint::{Checkpoints, Progress, Written};
use crate::error::{Error, Result};
use crate::step::Held;

/// A commit that was made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CommitReport {
    /// The step whose state it is.
    pub step: u64,
    /// From its begin until it was durable.
    pub seconds: f64,
    /// Seconds in which the update lane waited for a tile to be copied, or the run for the commit
    /// to end.
    pub stall_seconds: f64,
    /// Beside which the stall is read: the commit's bytes at the rate at which its writes went,
    /// less the step beside them; without a step beside them, all of it. Flushes and copies are
    /// not in it.
    pub stall_bound_seconds: f64,
    /// Bytes written.
    pub bytes: u64,
}

/// A run's checkpoints, and the commit under way.
pub(super) struct Committer {
    directory: PathBuf,
    /// `None` while a commit is under way, and after one whose thread panicked.
    checkpoints: Option<Checkpoints>,
    running: Option<Running>,
    written_bytes: u64,
}

struct Running {
    step: u64,
    began: Instant,
    thread: JoinHandle<(Checkpoints, Result<Written>, Instant)>,
    /// What the update lane had waited for commits before.
    lane_waited: f64,
    /// Seconds of the step that was then the last, without waits for commits.
    step_seconds: f64,
}

/// The commit to make.
pub(super) struct Order {
    pub(super) held: Held,
    pub(super) progress: Progress,
    /// Called on the commit's thread before anything refers to its extents.
    pub(super) synced: Box<dyn FnOnce() + Send>,
    pub(super) lane_waited: f64,
    pub(super) step_seconds: f64,
}

impl Committer {
    /// Nothing under way.
    pub(super) fn new(checkpoints: Checkpoints) -> Committer {
        Committer {
            directory: checkpoints.path().to_path_buf(),
            written_bytes: checkpoints.made_bytes(),
            checkpoints: Some(checkpoints),
            running: None,
        }
    }

    /// The checkpoints' directory.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The checkpoints, while no commit is under way.
    pub(super) fn checkpoints(&mut self) -> Option<&mut Checkpoints> {
        self.checkpoints.as_mut()
    }

    /// The step of the commit under way.
    pub(super) fn running(&self) -> Option<u64> {
        self.running.as_ref().map(|running| running.step)
    }

    /// Bytes that this process wrote to the checkpoints: the file when it was made, then what ended
    /// commits wrote.
    pub(super) fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    /// Begins a commit.
    ///
    /// # Errors
    /// [`Error::Io`] if there is no thread to be had, [`Error::StoreFailed`] after a panic of one.
    ///
    /// # Panics
    /// If one is under way.
    pub(super) fn begin(&mut self, order: Order) -> Result<()> {
        assert!(self.running.is_none(), "one commit at a time");
        let mut checkpoints = self.checkpoints.take().ok_or_else(panicked)?;
        let (step, began) = (order.progress.step, Instant::now());
        let Order {
            held,
            progress,
            synced,
            lane_waited,
            step_seconds,
        } = order;
        let thread = std::thread::Builder::new()
            .name("terrace-commit".to_string())
            .spawn(move || {
                let written = checkpoints.commit(held, &progress, synced);
                (checkpoints, written, Instant::now())
            })
            .map_err(|source| Error::io("start a thread", "commit".as_ref(), source))?;
        self.running = Some(Running {
            step,
            began,
            thread,
            lane_waited,
            step_seconds,
        });
        Ok(())
    }

    /// The commit under way, if it has ended or `wait`. `lane_waited` is what the update lane has
    /// waited for commits so far, and `steps` counts the steps begun. With the error comes nothing:
    /// the checkpoints are those of before.
    pub(super) fn end(
        &mut self,
        wait: bool,
        steps: u64,
        lane_waited: impl FnOnce() -> f64,
    ) -> Option<Result<CommitReport>> {
        let ready = |running: &mut Running| wait || running.thread.is_finished();
        let running = self.running.take_if(ready)?;
        let waiting = Instant::now();
        let Ok((checkpoints, written, ended)) = running.thread.join() else {
            return Some(Err(panicked()));
        };
        let waited = waiting.elapsed().as_secs_f64();
        self.checkpoints = Some(checkpoints);
        let written = match written {
            Ok(written) => written,
            Err(error) => return Some(Err(error)),
        };
        self.written_bytes += written.bytes;
        let beside = match steps > running.step {
            true => running.step_seconds,
            false => 0.0,
        };
        Some(Ok(CommitReport {
            step: running.step,
            seconds: (ended - running.began).as_secs_f64(),
            stall_seconds: lane_waited() - running.lane_waited + waited,
            stall_bound_seconds: (written.busy_seconds - beside).max(0.0),
            bytes: written.bytes,
        }))
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            running.thread.join().ok();
        }
    }
}

fn panicked() -> Error {
    Error::StoreFailed {
        first: "a commit's thread panicked".to_string(),
    }
}
