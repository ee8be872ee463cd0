//! What a job did, in numbers that add up over its copies.

use std::time::Duration;

use super::histogram::{Histogram, Series};
use super::usage::Usage;
use super::words::Job;
use crate::error::Error;

/// Reads or writes of a job.
#[derive(Clone, Debug, Default)]
pub struct Side {
    /// Bytes moved.
    pub bytes: u64,
    /// Transfers.
    pub count: u64,
    /// From the call to the kernel's taking it, nanoseconds.
    pub submission: Histogram,
    /// From there to its end.
    pub completion: Histogram,
    /// Both.
    pub total: Histogram,
    /// Bytes over time.
    pub series: Series,
    /// Counted time of the longest copy.
    pub runtime: Duration,
}

impl Side {
    fn seconds(&self) -> f64 {
        self.runtime.as_secs_f64().max(1e-9)
    }

    fn merge(&mut self, other: &Side) {
        self.bytes += other.bytes;
        self.count += other.count;
        self.submission.merge(&other.submission);
        self.completion.merge(&other.completion);
        self.total.merge(&other.total);
        self.series.merge(&other.series);
        self.runtime = self.runtime.max(other.runtime);
    }
}

/// What checksums took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Checked {
    /// Bytes of blocks that were sealed or compared.
    pub bytes: u64,
    /// Seconds of it.
    pub seconds: f64,
}

/// What a job did.
#[derive(Debug)]
pub struct Outcome {
    /// The job.
    pub job: Job,
    /// Group of reports, from 0.
    pub group: u32,
    /// Copies that are counted here.
    pub copies: u32,
    /// Its first failure.
    pub error: Option<Error>,
    /// Reads, writes.
    pub sides: [Side; 2],
    /// Flushes, nanoseconds.
    pub flushes: Histogram,
    /// Counted time of the longest copy.
    pub runtime: Duration,
    /// Counted time of all copies together.
    pub threads_time: Duration,
    /// Since the job began, ramp and all.
    pub elapsed: Duration,
    /// CPU of its threads in the counted time.
    pub usage: Usage,
    /// Transfers by how many were in flight when they were submitted.
    pub depths: [u64; 17],
    /// Completions by how many came at once.
    pub batches: [u64; 17],
    /// Checksums.
    pub checked: Checked,
    /// Engine and file in a sentence; what was not allowed.
    pub notes: Vec<String>,
}

impl Outcome {
    pub(super) fn new(job: Job, group: u32) -> Outcome {
        Outcome {
            job,
            group,
            copies: 1,
            error: None,
            sides: Default::default(),
            flushes: Histogram::default(),
            runtime: Duration::ZERO,
            threads_time: Duration::ZERO,
            elapsed: Duration::ZERO,
            usage: Usage::default(),
            depths: [0; 17],
            batches: [0; 17],
            checked: Checked::default(),
            notes: Vec::new(),
        }
    }

    pub(super) fn merge(&mut self, other: Outcome) {
        self.copies += other.copies;
        for (side, more) in self.sides.iter_mut().zip(&other.sides) {
            side.merge(more);
        }
        self.flushes.merge(&other.flushes);
        self.runtime = self.runtime.max(other.runtime);
        self.threads_time += other.threads_time;
        self.elapsed = self.elapsed.max(other.elapsed);
        self.usage = self.usage.plus(&other.usage);
        for (to, from) in self.depths.iter_mut().zip(other.depths) {
            *to += from;
        }
        for (to, from) in self.batches.iter_mut().zip(other.batches) {
            *to += from;
        }
        self.checked.bytes += other.checked.bytes;
        self.checked.seconds += other.checked.seconds;
        for note in other.notes {
            if !self.notes.contains(&note) {
                self.notes.push(note);
            }
        }
        self.error = self.error.take().or(other.error);
    }

    /// Bytes a second of a side, 0 for reads, over the counted time.
    pub fn bytes_per_second(&self, side: usize) -> f64 {
        self.sides[side].bytes as f64 / self.sides[side].seconds()
    }

    /// Transfers a second of a side.
    pub fn count_per_second(&self, side: usize) -> f64 {
        self.sides[side].count as f64 / self.sides[side].seconds()
    }

    /// Percent of a core: in this program, in the kernel; of the mean copy, as fio has it.
    pub fn cpu_percent(&self) -> (f64, f64) {
        let seconds = self.threads_time.as_secs_f64().max(1e-9);
        let percent = |used: f64| 100.0 * used / seconds;
        (
            percent(self.usage.user_seconds),
            percent(self.usage.system_seconds),
        )
    }

    /// Shares, in percent, of transfers by depth: 1, 2, 4, 8, 16, 32, 64 and more.
    pub fn depth_percents(&self) -> [f64; 7] {
        let mut shares = [0.0; 7];
        let all: u64 = self.depths.iter().sum();
        for (depth, count) in self.depths.iter().enumerate().skip(1) {
            shares[depth.ilog2() as usize] += 100.0 * *count as f64 / all.max(1) as f64;
        }
        shares
    }

    /// Shares of completions by how many came at once: 0, up to 4, 8, 16, 32, 64 and more.
    pub fn batch_percents(&self) -> [f64; 7] {
        let mut shares = [0.0; 7];
        let all: u64 = self.batches.iter().sum();
        for (size, count) in self.batches.iter().enumerate().skip(1) {
            let at = if size <= 4 {
                1
            } else {
                (size - 1).ilog2() as usize
            };
            shares[at] += 100.0 * *count as f64 / all.max(1) as f64;
        }
        shares
    }
}

/// Joins the copies of a job, or all jobs of a group, where that is asked for.
pub(super) fn join(outcomes: Vec<Outcome>) -> Vec<Outcome> {
    let mut joined: Vec<Outcome> = Vec::new();
    for outcome in outcomes {
        match joined.last_mut() {
            Some(last) if outcome.job.grouped && last.group == outcome.group => last.merge(outcome),
            _ => joined.push(outcome),
        }
    }
    joined
}
