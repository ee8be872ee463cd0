//! CPU time and switches of a few threads of this process, as the kernel counts them.
//!
//! A job's threads are its own, those that its disk started, and the kernel's workers that carry
//! its ring's requests: they are named after the thread that owns the ring.

use std::collections::BTreeSet;
use std::path::Path;

/// What threads have used.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// Seconds in this program.
    pub user_seconds: f64,
    /// Seconds in the kernel for it.
    pub system_seconds: f64,
    /// Times that a thread gave way or was made to.
    pub switches: u64,
    /// Page faults that read from a disk.
    pub major_faults: u64,
    /// Other page faults.
    pub minor_faults: u64,
}

impl Usage {
    /// What was used since `earlier`.
    pub fn since(&self, earlier: &Usage) -> Usage {
        Usage {
            user_seconds: (self.user_seconds - earlier.user_seconds).max(0.0),
            system_seconds: (self.system_seconds - earlier.system_seconds).max(0.0),
            switches: self.switches.saturating_sub(earlier.switches),
            major_faults: self.major_faults.saturating_sub(earlier.major_faults),
            minor_faults: self.minor_faults.saturating_sub(earlier.minor_faults),
        }
    }

    /// Both.
    pub fn plus(&self, other: &Usage) -> Usage {
        Usage {
            user_seconds: self.user_seconds + other.user_seconds,
            system_seconds: self.system_seconds + other.system_seconds,
            switches: self.switches + other.switches,
            major_faults: self.major_faults + other.major_faults,
            minor_faults: self.minor_faults + other.minor_faults,
        }
    }
}

/// Threads of a job.
#[derive(Clone, Debug)]
pub(super) struct Threads {
    own: u32,
    started: Vec<u32>,
}

/// This thread's id; 0 where the kernel does not say.
pub(super) fn own_thread() -> u32 {
    let link = std::fs::read_link("/proc/thread-self").unwrap_or_default();
    let name = link.file_name().unwrap_or_default().to_string_lossy();
    name.parse().unwrap_or(0)
}

/// All threads of this process.
pub(super) fn all_threads() -> BTreeSet<u32> {
    let entries = std::fs::read_dir("/proc/self/task").into_iter().flatten();
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect()
}

impl Threads {
    /// This thread, and those that were started since `before` was read.
    pub(super) fn since(before: &BTreeSet<u32>) -> Threads {
        let own = own_thread();
        let started = all_threads()
            .difference(before)
            .copied()
            .filter(|id| *id != own)
            .collect();
        Threads { own, started }
    }

    /// What they have used so far.
    pub(super) fn usage(&self) -> Usage {
        let mut usage = of(self.own);
        for thread in &self.started {
            usage = usage.plus(&of(*thread));
        }
        let worker = format!("iou-wrk-{}", self.own);
        for thread in all_threads() {
            let name = std::fs::read_to_string(format!("/proc/self/task/{thread}/comm"));
            if name.is_ok_and(|name| name.trim() == worker) {
                usage = usage.plus(&of(thread));
            }
        }
        usage
    }
}

fn of(thread: u32) -> Usage {
    let directory = format!("/proc/self/task/{thread}");
    let directory = Path::new(&directory);
    let stat = std::fs::read_to_string(directory.join("stat")).unwrap_or_default();
    // The name, in brackets, may hold anything; what follows are numbers.
    let numbers: Vec<u64> = stat
        .rsplit_once(')')
        .map_or("", |(_, rest)| rest)
        .split_whitespace()
        .map(|word| word.parse().unwrap_or(0))
        .collect();
    let number = |index: usize| numbers.get(index).copied().unwrap_or(0);
    let (user, system) = (number(11) as f64, number(12) as f64);
    let schedule = std::fs::read_to_string(directory.join("schedstat")).unwrap_or_default();
    let exact = schedule
        .split_whitespace()
        .next()
        .and_then(|word| word.parse::<f64>().ok());
    // Ticks of 10 ms share out what the scheduler counts in nanoseconds.
    let total = exact.map_or((user + system) / 100.0, |nanoseconds| nanoseconds / 1e9);
    let share = if user + system > 0.0 {
        user / (user + system)
    } else {
        0.5
    };
    let status = std::fs::read_to_string(directory.join("status")).unwrap_or_default();
    let switches = status
        .lines()
        .filter(|line| line.contains("ctxt_switches:"))
        .filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok())
        .sum();
    Usage {
        user_seconds: total * share,
        system_seconds: total * (1.0 - share),
        switches,
        major_faults: number(9),
        minor_faults: number(7),
    }
}
