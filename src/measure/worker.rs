//! One copy of a job: which block comes next, and what became of it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::load::{Live, wait_until};
use super::outcome::Outcome;
use super::pattern::{self, Header, Permutation, Random};
use super::target::Target;
use super::usage::{Threads, Usage};
use super::words::Job;
use crate::error::{Error, Result};
use crate::host::{Lease, Ring};
use crate::store::disk::{Direction, Disk, Finished, Operation};

/// Most blocks whose writes are counted for `verify`: 256 MiB of counts.
const COUNTED_BLOCKS_MAX: u64 = 1 << 26;
const SIDES: [Direction; 2] = [Direction::Read, Direction::Write];

/// Blocks of the file that a copy uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region {
    pub(super) offset: u64,
    pub(super) blocks: u64,
    pub(super) block_bytes: u64,
}

/// What is in the disk.
struct Flight {
    side: usize,
    block: u64,
    sequence: u64,
    called: Instant,
    taken: Instant,
}

/// What to do next.
enum Next {
    Start {
        side: usize,
        block: u64,
    },
    /// A rate allows no more until then.
    Wait(Instant),
    /// Its block is in flight, or a flush waits for all that is.
    Hold,
    End,
}

/// Where each direction of a pass stands.
struct Order {
    random: bool,
    any_block: bool,
    seed: u64,
    next: [u64; 2],
    pass: [Option<(u64, Permutation)>; 2],
    choice: Random,
}

impl Order {
    fn block(&mut self, side: usize, blocks: u64) -> u64 {
        let (pass, at) = (self.next[side] / blocks, self.next[side] % blocks);
        self.next[side] += 1;
        if !self.random {
            return at;
        }
        if self.any_block {
            return self.choice.below(blocks);
        }
        let known = self.pass[side]
            .as_ref()
            .is_some_and(|(number, _)| *number == pass);
        if !known {
            let seed = self.seed ^ (pass << 1 | side as u64).wrapping_mul(0x9E37_79B9);
            self.pass[side] = Some((pass, Permutation::new(blocks, seed)));
        }
        let (_, order) = self.pass[side].as_ref().expect("made above");
        order.of(at)
    }
}

/// A copy of a job at work.
pub(super) struct Worker<'a> {
    job: &'a Job,
    target: &'a Target,
    region: Region,
    disk: Box<dyn Disk>,
    ring: Ring,
    threads: Threads,
    flights: HashMap<u64, Flight>,
    order: Order,
    /// Writes of each block by this copy; empty without `verify`.
    written: Vec<u32>,
    /// Sequences of this copy's writes begin after it.
    sequence_base: u64,
    next_token: u64,
    /// Blocks to move; `None`: until the time is over.
    left: Option<u64>,
    /// A block that waits for its earlier transfer.
    held: Option<(usize, u64)>,
    /// Blocks started by direction, for rates.
    started: [u64; 2],
    unflushed: u64,
    /// All is read back.
    reading_back: bool,
    began: Instant,
    counted: Option<(Instant, Usage)>,
    deadline: Option<Instant>,
    seal_seconds: f64,
}

impl<'a> Worker<'a> {
    pub(super) fn new(
        job: &'a Job,
        target: &'a Target,
        region: Region,
        seed: u64,
        disk: Box<dyn Disk>,
        ring: Ring,
        threads: Threads,
    ) -> Worker<'a> {
        let mut slabs: Vec<Lease> = (0..ring.count()).map(|_| ring.take()).collect();
        for (index, slab) in slabs.iter_mut().enumerate() {
            pattern::fill(slab.as_mut_slice(), seed.wrapping_add(index as u64));
        }
        drop(slabs);
        let bytes = job
            .io_bytes
            .map(|bytes| (bytes / region.block_bytes).max(1));
        let blocks = bytes.unwrap_or(region.blocks) * u64::from(job.loops);
        let now = Instant::now();
        let base = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let base = base.map_or(1, |time| time.as_micros() as u64);
        Worker {
            job,
            target,
            region,
            disk,
            ring,
            threads,
            flights: HashMap::new(),
            order: Order {
                random: job.access.random,
                any_block: job.any_block,
                seed,
                next: [0; 2],
                pass: [None, None],
                choice: Random::new(seed),
            },
            written: Vec::new(),
            sequence_base: base << 24,
            next_token: 0,
            left: (!job.time_based).then_some(blocks),
            held: None,
            started: [0; 2],
            unflushed: 0,
            reading_back: false,
            began: now,
            counted: None,
            deadline: None,
            seal_seconds: 0.0,
        }
    }

    /// Does the job.
    ///
    /// # Errors
    /// [`Error::Io`] of a transfer or flush, [`Error::Damaged`] of a block that is not what was
    /// written there. What was done before is in `outcome`.
    pub(super) fn run(
        mut self,
        outcome: &mut Outcome,
        stop: &AtomicBool,
        live: &Live,
    ) -> Result<()> {
        if self.job.verify {
            if self.region.blocks > COUNTED_BLOCKS_MAX {
                let expected = format!("at most {COUNTED_BLOCKS_MAX} blocks to verify");
                let got = self.region.blocks.to_string();
                let place = self.target.path.display().to_string();
                return Err(Error::input(
                    "file",
                    place,
                    expected,
                    got,
                    "raise bs or lower size",
                ));
            }
            self.written = vec![0; self.region.blocks as usize];
        }
        self.began = Instant::now();
        let ramp_end = self.began + self.job.ramp;
        self.deadline = self.job.runtime.map(|time| ramp_end + time);
        if self.job.ramp.is_zero() {
            self.count_from(self.began);
        }
        let mut result = self.pump(outcome, stop, live);
        if result.is_ok() && (self.job.end_fsync || self.unflushed > 0 && self.job.fsync > 0) {
            result = self.flush(outcome);
        }
        self.close(outcome);
        let wanted = self.job.verify && self.job.verify_after && self.job.access.writes;
        if result.is_ok() && wanted && !stop.load(Ordering::Relaxed) {
            result = self.read_back(outcome, stop, live);
        }
        outcome.checked.seconds = self.seal_seconds;
        result
    }

    fn count_from(&mut self, instant: Instant) {
        self.counted = Some((instant, self.threads.usage()));
    }

    /// Ends a counted time.
    fn close(&mut self, outcome: &mut Outcome) {
        let Some((from, usage)) = self.counted else {
            return;
        };
        let runtime = from.elapsed();
        outcome.usage = outcome.usage.plus(&self.threads.usage().since(&usage));
        outcome.runtime += runtime;
        outcome.threads_time += runtime;
        let access = self.job.access;
        for (index, side) in outcome.sides.iter_mut().enumerate() {
            let active = match index {
                0 => access.reads || self.reading_back,
                _ => access.writes && !self.reading_back,
            };
            if active && side.count > 0 {
                side.runtime += runtime;
            }
        }
    }

    /// Reads every block that this copy wrote.
    fn read_back(&mut self, outcome: &mut Outcome, stop: &AtomicBool, live: &Live) -> Result<()> {
        self.reading_back = true;
        self.order.next = [0; 2];
        self.held = None;
        self.left = Some(self.region.blocks);
        self.deadline = None;
        self.count_from(Instant::now());
        let result = self.pump(outcome, stop, live);
        self.close(outcome);
        result
    }

    /// Keeps the disk busy until the job is done, stopped or has failed, and all has come back.
    fn pump(&mut self, outcome: &mut Outcome, stop: &AtomicBool, live: &Live) -> Result<()> {
        let mut finished: Vec<Finished> = Vec::with_capacity(16);
        let mut failure: Option<Error> = None;
        loop {
            let mut until = None;
            let mut ended = failure.is_some() || stop.load(Ordering::Relaxed);
            while !ended && self.flights.len() < self.job.depth {
                match self.next(Instant::now()) {
                    Next::Start { side, block } => self.start(side, block, outcome),
                    Next::Wait(instant) => {
                        until = Some(instant);
                        break;
                    }
                    Next::Hold => break,
                    Next::End => ended = true,
                }
            }
            if self.flights.is_empty() {
                if let Some(error) = failure {
                    return Err(error);
                }
                if ended {
                    return Ok(());
                }
                if self.flush_is_due() {
                    self.flush(outcome)?;
                }
                wait_until(until.unwrap_or_else(Instant::now), stop);
                continue;
            }
            self.disk.wait(&mut finished);
            let now = Instant::now();
            if self.counted.is_none() && now >= self.began + self.job.ramp {
                self.count_from(now);
            }
            if !finished.is_empty() && self.counted.is_some() {
                outcome.batches[finished.len().min(16)] += 1;
            }
            for done in finished.drain(..) {
                if let Err(error) = self.finish(done, now, outcome, live) {
                    failure.get_or_insert(error);
                }
            }
        }
    }

    fn next(&mut self, now: Instant) -> Next {
        if self.deadline.is_some_and(|deadline| now >= deadline) {
            return Next::End;
        }
        if self.flush_is_due() {
            return Next::Hold;
        }
        if let Some((side, block)) = self.held.take() {
            return self.unless_in_flight(side, block);
        }
        if self.reading_back {
            return self.next_written();
        }
        if self.left == Some(0) {
            return Next::End;
        }
        let access = self.job.access;
        let side = match (access.reads, access.writes) {
            (true, true) => {
                let reads = self.order.choice.below(100) < u64::from(self.job.read_percent);
                usize::from(!reads)
            }
            (_, writes) => usize::from(writes),
        };
        if let Some(due) = self.due(side).filter(|due| *due > now) {
            return Next::Wait(due);
        }
        let block = self.order.block(side, self.region.blocks);
        if let Some(left) = &mut self.left {
            *left -= 1;
        }
        self.unless_in_flight(side, block)
    }

    fn next_written(&mut self) -> Next {
        while self.order.next[0] < self.region.blocks {
            let block = self.order.next[0];
            self.order.next[0] += 1;
            if self.written[block as usize] > 0 {
                return Next::Start { side: 0, block };
            }
        }
        Next::End
    }

    /// With `verify`, a block has one transfer at a time.
    fn unless_in_flight(&mut self, side: usize, block: u64) -> Next {
        if self.job.verify && self.flights.values().any(|flight| flight.block == block) {
            self.held = Some((side, block));
            return Next::Hold;
        }
        Next::Start { side, block }
    }

    /// When the rates allow the next transfer of a direction.
    fn due(&self, side: usize) -> Option<Instant> {
        let started = self.started[side];
        let by_bytes = self.job.rate[side]
            .map(|rate| (started * self.region.block_bytes) as f64 / rate as f64);
        let by_count = self.job.rate_iops[side].map(|rate| started as f64 / rate as f64);
        let seconds = by_bytes.unwrap_or(0.0).max(by_count.unwrap_or(0.0));
        (by_bytes.is_some() || by_count.is_some())
            .then(|| self.began + Duration::from_secs_f64(seconds))
    }

    fn flush_is_due(&self) -> bool {
        self.job.fsync > 0 && self.unflushed >= self.job.fsync
    }

    fn flush(&mut self, outcome: &mut Outcome) -> Result<()> {
        let started = Instant::now();
        self.disk
            .flush()
            .map_err(|e| Error::io("flush", &self.target.path, e))?;
        self.unflushed = 0;
        if self.counted.is_some() {
            outcome.flushes.add(started.elapsed().as_nanos() as u64);
        }
        Ok(())
    }

    fn start(&mut self, side: usize, block: u64, outcome: &mut Outcome) {
        let bytes = self.region.block_bytes as usize;
        let offset = self.region.offset + block * self.region.block_bytes;
        let mut slab = self.ring.take();
        let mut sequence = 0;
        if self.job.verify {
            let written = &mut self.written[block as usize];
            if side == 1 {
                *written += 1;
            }
            sequence = self.sequence_base + u64::from(*written);
        }
        if self.job.verify && side == 1 {
            let header = Header {
                seed: self.target.seed,
                offset,
                sequence,
            };
            let started = Instant::now();
            pattern::seal(&mut slab.as_mut_slice::<u8>()[..bytes], header);
            self.checked(outcome, bytes, started);
        }
        let token = self.next_token;
        self.next_token += 1;
        self.started[side] += 1;
        let called = Instant::now();
        self.disk.start(Operation {
            direction: SIDES[side],
            offset,
            bytes,
            slab,
            token,
        });
        let taken = Instant::now();
        self.flights.insert(
            token,
            Flight {
                side,
                block,
                sequence,
                called,
                taken,
            },
        );
        if self.counted.is_some() {
            outcome.depths[self.flights.len().min(16)] += 1;
        }
        if side == 1 {
            self.unflushed += 1;
        }
    }

    fn checked(&mut self, outcome: &mut Outcome, bytes: usize, started: Instant) {
        if self.counted.is_some() {
            outcome.checked.bytes += bytes as u64;
            self.seal_seconds += started.elapsed().as_secs_f64();
        }
    }

    fn finish(
        &mut self,
        done: Finished,
        now: Instant,
        outcome: &mut Outcome,
        live: &Live,
    ) -> Result<()> {
        let Finished { operation, result } = done;
        let flight = self
            .flights
            .remove(&operation.token)
            .expect("every token starts once");
        let action = if flight.side == 0 { "read" } else { "write" };
        result.map_err(|source| Error::Io {
            action,
            path: self.target.path.clone(),
            source,
            remedy: format!("; {} bytes at byte {}", operation.bytes, operation.offset),
        })?;
        live.bytes[flight.side].fetch_add(operation.bytes as u64, Ordering::Relaxed);
        if let Some((from, _)) = self.counted {
            let side = &mut outcome.sides[flight.side];
            side.bytes += operation.bytes as u64;
            side.count += 1;
            let nanoseconds = |since: Instant| now.saturating_duration_since(since).as_nanos();
            let submission = flight.taken.duration_since(flight.called).as_nanos() as u64;
            side.submission.add(submission);
            side.completion.add(nanoseconds(flight.taken) as u64);
            side.total.add(nanoseconds(flight.called) as u64);
            // The read-back goes on where the writing ended.
            let at = now.saturating_duration_since(from) + outcome.runtime;
            side.series
                .add(at.as_millis() as u64, operation.bytes as u64);
        }
        if self.job.verify && flight.side == 0 {
            self.compare(&flight, &operation, outcome)?;
        }
        Ok(())
    }

    fn compare(
        &mut self,
        flight: &Flight,
        operation: &Operation,
        outcome: &mut Outcome,
    ) -> Result<()> {
        let started = Instant::now();
        let header = Header {
            seed: self.target.seed,
            offset: operation.offset,
            sequence: flight.sequence,
        };
        // What others wrote has a sequence of theirs.
        let own = self.written[flight.block as usize] > 0;
        let block = &operation.slab.as_slice::<u8>()[..operation.bytes];
        let same = pattern::compare(block, header, own);
        self.checked(outcome, operation.bytes, started);
        same.map_err(|(expected, got)| Error::Damaged {
            path: self.target.path.clone(),
            what: format!("block of {} bytes", operation.bytes),
            offset: operation.offset,
            expected,
            got,
            remedy: "the bytes read are not those that were written: check the drive".to_string(),
        })
    }
}
