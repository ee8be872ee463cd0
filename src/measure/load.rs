//! Runs jobs: files are made ready, then each copy of a job is a thread that keeps a disk of the
//! trainer's busy.
//!
//! - The thread does what the store's own thread does: takes a slab, starts an operation, waits.
//!   Its latencies are measured around those calls.
//! - Nothing is counted in the ramp. Whatever ends a job, what is in flight ends first.
//! - A copy that fails ends alone; its failure stands in its outcome.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::outcome::{self, Outcome};
use super::target::{Need, Target};
use super::usage::{self, Threads};
use super::words::Job;
use super::worker::{Region, Worker};
use crate::error::{Error, Result};
use crate::host::HostArena;
use crate::machine::HostMemory;

/// How far jobs are, for a line of progress.
#[derive(Debug, Default)]
pub struct Live {
    /// Bytes read and written so far.
    pub bytes: [AtomicU64; 2],
    /// What is being done.
    pub phase: Mutex<String>,
}

impl Live {
    fn say(&self, phase: String) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = phase;
    }
}

/// A copy of a job.
struct Copy<'a> {
    job: &'a Job,
    index: u32,
    group: u32,
    wave: u32,
    path: PathBuf,
}

/// Runs all jobs; `stop` ends them early, with what they have done so far.
///
/// # Errors
/// Those of making the files: [`Error::Input`] for one that is not this tool's, [`Error::Budget`]
/// for a disk or memory that is too small, [`Error::Busy`], [`Error::Io`]. What fails later is in
/// the outcomes.
pub fn run(jobs: &[Job], stop: &AtomicBool, live: &Live) -> Result<Vec<Outcome>> {
    let copies = copies(jobs);
    check_memory(&copies)?;
    let mut targets: BTreeMap<PathBuf, Target> = BTreeMap::new();
    for copy in &copies {
        if targets.contains_key(&copy.path) {
            continue;
        }
        live.say(format!("laying out {}", copy.path.display()));
        let need = need(&copies, &copy.path)?;
        targets.insert(copy.path.clone(), Target::prepare(&copy.path, need, stop)?);
    }
    let mut outcomes = Vec::with_capacity(copies.len());
    let waves = copies.last().map_or(0, |copy| copy.wave);
    for wave in 0..=waves {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let group: Vec<&Copy> = copies.iter().filter(|copy| copy.wave == wave).collect();
        live.say(
            group
                .iter()
                .map(|c| c.job.name.as_str())
                .collect::<Vec<_>>()
                .join(", "),
        );
        outcomes.extend(run_wave(&group, &targets, stop, live));
    }
    Ok(outcome::join(outcomes))
}

/// Bytes that the copies of the jobs may need at most of each file: for `--parse-only`.
pub fn describe(job: &Job, group: u32) -> String {
    let size = |bytes: u64| match bytes {
        bytes if bytes.is_multiple_of(1 << 10) => format!("{}KiB", bytes >> 10),
        bytes => format!("{bytes}B"),
    };
    let engine = match job.engine {
        None => "auto",
        Some(crate::config::IoEngine::Uring) => "io_uring",
        Some(crate::config::IoEngine::Pread) => "pread",
    };
    format!(
        "{}: (g={group}): rw={}, bs={}, ioengine={engine}, iodepth={}, numjobs={}",
        job.name,
        job.access.name,
        size(job.block_bytes),
        job.depth,
        job.copies
    )
}

/// Groups of the jobs, as reports number them.
pub fn groups(jobs: &[Job]) -> Vec<u32> {
    let mut group = 0;
    let numbered = jobs.iter().enumerate().map(|(index, job)| {
        if index > 0 && (job.stonewall || job.new_group) {
            group += 1;
        }
        group
    });
    numbered.collect()
}

fn copies(jobs: &[Job]) -> Vec<Copy<'_>> {
    let groups = groups(jobs);
    let (mut copies, mut wave) = (Vec::new(), 0);
    for (number, job) in jobs.iter().enumerate() {
        if number > 0 && job.stonewall {
            wave += 1;
        }
        for index in 0..job.copies {
            let own = PathBuf::from(format!("{}.{index}.0", job.name));
            let name = job.filename.clone().unwrap_or(own);
            let path = job
                .directory
                .as_ref()
                .map_or(name.clone(), |dir| dir.join(name));
            copies.push(Copy {
                job,
                index,
                group: groups[number],
                wave,
                path,
            });
        }
    }
    copies
}

/// Slabs of all copies that run at once fit the machine.
fn check_memory(copies: &[Copy]) -> Result<()> {
    let waves = copies.last().map_or(0, |copy| copy.wave);
    let of = |wave: u32| {
        let bytes = |copy: &Copy| copy.job.depth as u64 * copy.job.block_bytes;
        copies
            .iter()
            .filter(|c| c.wave == wave)
            .map(bytes)
            .sum::<u64>()
    };
    let needed = (0..=waves).map(of).max().unwrap_or(0);
    let budget = HostMemory::read().auto();
    if needed > budget {
        return Err(Error::Budget {
            tier: "host",
            needed,
            budget,
            missing: needed - budget,
            remedy: "lower bs, iodepth or numjobs".to_string(),
        });
    }
    Ok(())
}

/// First byte of a copy.
fn start_of(copy: &Copy) -> u64 {
    copy.job.offset + u64::from(copy.index) * copy.job.offset_increment
}

/// What all copies together need of one file.
fn need(copies: &[Copy], path: &Path) -> Result<Need> {
    let users: Vec<&Copy> = copies.iter().filter(|copy| copy.path == *path).collect();
    let ends = users
        .iter()
        .map(|copy| Some(start_of(copy) + copy.job.size?));
    let bytes = ends
        .collect::<Option<Vec<u64>>>()
        .and_then(|ends| ends.into_iter().max());
    let jobs = || users.iter().map(|copy| copy.job);
    let mut sealed = jobs().filter(|job| job.verify).map(|job| job.block_bytes);
    let first = sealed.next().unwrap_or(0);
    if let Some(other) = sealed.find(|bytes| *bytes != first) {
        let place = path.display().to_string();
        let got = format!("{first} and {other}");
        let expected = "one bs of all jobs that verify it";
        return Err(Error::input(
            "file",
            place,
            expected,
            got,
            "give each its own file",
        ));
    }
    let writes = jobs().any(|job| job.access.writes);
    let plain_writer = jobs().any(|job| job.access.writes && !job.verify);
    Ok(Need {
        bytes,
        writes,
        // A kept file that a later run is to verify has headers everywhere.
        filled: jobs().any(|job| job.access.reads || job.overwrite || (job.verify && !job.unlink)),
        // Who writes without headers leaves none behind.
        sealed: if plain_writer && !jobs().any(|job| job.verify && job.access.reads) {
            0
        } else {
            first
        },
        seed: users[0].job.seed,
        keep: jobs().any(|job| !job.unlink),
        direct: users[0].job.direct,
        engine: users[0].job.engine,
    })
}

fn run_wave(
    copies: &[&Copy],
    targets: &BTreeMap<PathBuf, Target>,
    stop: &AtomicBool,
    live: &Live,
) -> Vec<Outcome> {
    let ready = Barrier::new(copies.len());
    let opening = Mutex::new(());
    std::thread::scope(|scope| {
        let threads: Vec<_> = copies
            .iter()
            .map(|copy| {
                let target = &targets[&copy.path];
                let (ready, opening) = (&ready, &opening);
                scope.spawn(move || run_copy(copy, target, ready, opening, stop, live))
            })
            .collect();
        let ended = threads.into_iter().zip(copies).map(|(thread, copy)| {
            thread.join().unwrap_or_else(|_| {
                let mut outcome = Outcome::new(copy.job.clone(), copy.group);
                let source = std::io::Error::other("the job's thread has panicked");
                outcome.error = Some(Error::io("run", &copy.path, source));
                outcome
            })
        });
        ended.collect()
    })
}

fn run_copy(
    copy: &Copy,
    target: &Target,
    ready: &Barrier,
    opening: &Mutex<()>,
    stop: &AtomicBool,
    live: &Live,
) -> Outcome {
    let mut outcome = Outcome::new(copy.job.clone(), copy.group);
    let worker = open(copy, target, opening, &mut outcome);
    ready.wait();
    let began = Instant::now();
    wait_until(began + copy.job.start_delay, stop);
    let result = worker.and_then(|worker| worker.run(&mut outcome, stop, live));
    outcome.error = result.err();
    outcome.elapsed = began.elapsed();
    outcome
}

fn open<'a>(
    copy: &Copy<'a>,
    target: &'a Target,
    opening: &Mutex<()>,
    outcome: &mut Outcome,
) -> Result<Worker<'a>> {
    let job = copy.job;
    let offset = start_of(copy);
    let size = job.size.unwrap_or(target.bytes.saturating_sub(offset));
    let blocks = size.min(target.bytes.saturating_sub(offset)) / job.block_bytes;
    if blocks == 0 {
        return Err(Error::input(
            "file",
            target.path.display().to_string(),
            format!("a block of {} bytes after offset {offset}", job.block_bytes),
            format!("{} bytes", target.bytes),
            "lower offset or bs",
        ));
    }
    let mut cutter = HostArena::take(job.depth as u64 * job.block_bytes)?;
    let ring = cutter.cut_ring(job.depth, job.block_bytes);
    let span = [ring.span()];
    let memory = if job.registered { &span[..] } else { &[] };
    // One at a time, so that the threads that a disk starts are known for its own.
    let alone = opening.lock().unwrap_or_else(PoisonError::into_inner);
    let before = usage::all_threads();
    let (disk, sentence) = target.open(job.direct, job.engine, memory)?;
    let threads = Threads::since(&before);
    drop(alone);
    outcome.notes.push(sentence);
    let seed = job.seed ^ (u64::from(copy.index) << 32);
    let region = Region {
        offset,
        blocks,
        block_bytes: job.block_bytes,
    };
    Ok(Worker::new(job, target, region, seed, disk, ring, threads))
}

/// Sleeps in pieces, so that `stop` is seen.
pub(super) fn wait_until(when: Instant, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let left = when.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(Duration::from_millis(20)));
    }
}
