//! What limits a machine, and how to change it: findings from /proc and /sys, each with a remedy.
//!
//! - All files are read below a root, so that another machine's can be looked at, and a test's.
//! - What cannot be read is said to be unknown; nothing is guessed, nothing needs to be root.
//! - [`examine`] says all; [`for_run`] what a run should not begin without saying.
//!
//! Nothing is changed here.

mod drive;
mod numa;

pub use drive::Drive;

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::HostMemory;
use super::cores::{Cores, cpu_list};
use crate::plan::bytes_text;

/// How much something matters, worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// A run is much slower than the machine, or fails.
    Bad,
    /// A run may be slower, or may fail.
    Warning,
    /// It could not be found out.
    Unknown,
    /// As it should be.
    Good,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How much it matters.
    pub level: Level,
    /// What: `cores`, `locked memory`.
    pub subject: String,
    /// What was found.
    pub found: String,
    /// What to do; empty where there is nothing to do.
    pub remedy: String,
}

impl Finding {
    pub(super) fn new(
        level: Level,
        subject: &str,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        Finding {
            level,
            subject: subject.to_string(),
            found: found.into(),
            remedy: remedy.into(),
        }
    }

    fn good(subject: &str, found: impl Into<String>) -> Finding {
        Finding::new(Level::Good, subject, found, "")
    }

    pub(super) fn unknown(subject: &str, why: impl Into<String>) -> Finding {
        Finding::new(
            Level::Unknown,
            subject,
            format!("unknown: {}", why.into()),
            "",
        )
    }
}

/// `cores: 2 of 16; start …`
impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.subject, self.found)?;
        match self.remedy.as_str() {
            "" => Ok(()),
            remedy => write!(f, "; {remedy}"),
        }
    }
}

/// Below which everything is read: `/`, or a copy of another machine's /proc and /sys.
#[derive(Clone, Debug)]
pub struct Root(PathBuf);

impl Root {
    /// This machine.
    pub fn here() -> Root {
        Root(PathBuf::from("/"))
    }

    /// Files below `path`.
    pub fn at(path: &Path) -> Root {
        Root(path.to_path_buf())
    }

    pub(super) fn path(&self, below: &str) -> PathBuf {
        self.0.join(below.trim_start_matches('/'))
    }

    pub(super) fn text(&self, below: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.path(below)).ok()?;
        Some(text.trim().to_string())
    }

    fn number(&self, below: &str) -> Option<u64> {
        self.text(below)?.parse().ok()
    }

    /// What follows `key` and a colon in a file of such lines.
    fn field(&self, below: &str, key: &str) -> Option<String> {
        let text = self.text(below)?;
        text.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            (name.trim() == key).then(|| value.trim().to_string())
        })
    }

    /// Bytes of a line `key: n kB` of /proc/meminfo.
    fn meminfo(&self, key: &str) -> Option<u64> {
        let kilobytes = self.field("proc/meminfo", key)?;
        let number: u64 = kilobytes.strip_suffix("kB")?.trim().parse().ok()?;
        Some(number * 1024)
    }

    /// The soft limit of a line of /proc/self/limits; `u64::MAX` is unlimited.
    fn limit(&self, name: &str) -> Option<u64> {
        let text = self.text("proc/self/limits")?;
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let soft = line.split_whitespace().next()?;
        match soft {
            "unlimited" => Some(u64::MAX),
            number => number.parse().ok(),
        }
    }

    /// Cores that the process may run on; `None` where that is not told.
    pub(super) fn allowed_cores(&self) -> Option<Vec<usize>> {
        let list = cpu_list(&self.field("proc/self/status", "Cpus_allowed_list")?);
        (!list.is_empty()).then_some(list)
    }
}

/// What a run takes, where it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// Bytes of slab rings: registered with io_uring.
    pub rings: u64,
    /// A card is used.
    pub card: bool,
    /// Something is spilled or committed: a store is used.
    pub store: bool,
}

impl Default for Need {
    /// The rings of a run with nothing set: 16 slabs and 8 of commits.
    fn default() -> Need {
        Need {
            rings: 24 * (4 << 20),
            card: true,
            store: true,
        }
    }
}

/// Everything that can be seen without a store and without a driver, worst first.
pub fn examine(root: &Root, need: Need) -> Vec<Finding> {
    let mut findings = vec![
        cores(root),
        simd(root),
        memory(root),
        locked_memory(root, need),
        huge_pages(root),
        reserved_pages(root),
        swap(root),
        overcommit(root),
        open_files(root),
        file_size(root),
        kernel(root),
        io_uring(root),
    ];
    findings.extend(numa::examine(root));
    sort(&mut findings);
    findings
}

/// Orders findings, worst first, and otherwise as they came.
pub fn sort(findings: &mut [Finding]) {
    findings.sort_by_key(|finding| finding.level);
}

/// What a run should say before it begins, beside its cores: too little locked memory for its
/// rings, cores far from the card.
pub fn for_run(root: &Root, need: Need) -> Vec<Finding> {
    let mut findings = Vec::new();
    if need.store {
        findings.push(locked_memory(root, need));
    }
    if need.card {
        findings.extend(numa::examine(root));
    }
    findings.retain(|finding| finding.level <= Level::Warning);
    sort(&mut findings);
    findings
}

fn cores(root: &Root) -> Finding {
    const FEW: usize = 4;
    let subject = "cores";
    let Some(allowed) = root.allowed_cores() else {
        return Finding::unknown(subject, "no Cpus_allowed_list in /proc/self/status");
    };
    let Cores { online, quota, .. } = Cores::read_below(&root.0);
    let quota = quota.filter(|quota| *quota < allowed.len() as f64);
    if let Some(quota) = quota {
        let found = format!("the CPU quota allows {quota:.1} of {online}");
        let remedy = "raise it: docker run --cpus, CPUQuota of the unit, cpu.max of the group";
        let level = match quota < online as f64 / 2.0 || quota < FEW as f64 {
            true => Level::Bad,
            false => Level::Warning,
        };
        return Finding::new(level, subject, found, remedy);
    }
    let count = allowed.len();
    if count < online {
        let found = format!("{count} of {online} are visible to this process");
        let remedy = "widen it: taskset, docker run --cpuset-cpus, --cpus-per-task of Slurm";
        let level = match 2 * count < online || count < FEW {
            true => Level::Bad,
            false => Level::Warning,
        };
        return Finding::new(level, subject, found, remedy);
    }
    if count < FEW {
        let found = format!("{count}: few, AdamW and tokenising share them");
        let remedy = "take a machine with more where AdamW bounds the step";
        return Finding::new(Level::Warning, subject, found, remedy);
    }
    Finding::good(subject, count.to_string())
}

fn simd(root: &Root) -> Finding {
    let subject = "simd";
    let Some(flags) = root.field("proc/cpuinfo", "flags") else {
        return Finding::unknown(subject, "no flags in /proc/cpuinfo");
    };
    let has = |name: &str| flags.split_whitespace().any(|flag| flag == name);
    if has("avx512f") && has("avx512bw") {
        Finding::good(subject, "AVX-512 for AdamW")
    } else if has("avx2") && has("fma") {
        Finding::good(
            subject,
            "AVX2 for AdamW: as fast as AVX-512 where memory bounds it",
        )
    } else {
        let found = "neither AVX-512 nor AVX2 with FMA: AdamW runs as scalar code";
        let remedy = "a virtual machine may hide them: pass the host's CPU through (-cpu host)";
        Finding::new(Level::Warning, subject, found, remedy)
    }
}

fn memory(root: &Root) -> Finding {
    let subject = "memory available";
    let memory = HostMemory::read_below(&root.0);
    if memory.available == 0 {
        return Finding::unknown(subject, "no MemAvailable in /proc/meminfo");
    }
    let auto = format!(
        "memory.host = \"auto\" would be {}",
        bytes_text(memory.auto())
    );
    let available = bytes_text(memory.available);
    match memory.cgroup_left {
        Some(left) if left < memory.available => Finding::new(
            Level::Warning,
            subject,
            format!(
                "{available}, of which the control group leaves {}; {auto}",
                bytes_text(left)
            ),
            "raise it: docker run --memory, MemoryMax of the unit, --mem of Slurm",
        ),
        _ => Finding::good(subject, format!("{available}; {auto}")),
    }
}

fn locked_memory(root: &Root, need: Need) -> Finding {
    const CAP_IPC_LOCK: u32 = 14;
    let subject = "locked memory";
    let Some(limit) = root.limit("Max locked memory") else {
        return Finding::unknown(subject, "no such line in /proc/self/limits");
    };
    let rings = bytes_text(need.rings);
    if limit == u64::MAX {
        return Finding::good(subject, "no limit");
    }
    let capabilities = root.field("proc/self/status", "CapEff");
    let capabilities = capabilities.and_then(|mask| u64::from_str_radix(&mask, 16).ok());
    if capabilities.is_some_and(|mask| mask >> CAP_IPC_LOCK & 1 == 1) {
        let found = format!("limit of {} that CAP_IPC_LOCK lifts", bytes_text(limit));
        return Finding::good(subject, found);
    }
    if limit < need.rings {
        let found = format!(
            "at most {}; slab rings of {rings} are registered with io_uring, and go unregistered",
            bytes_text(limit)
        );
        let remedy = "ulimit -l unlimited; LimitMEMLOCK=infinity; docker run --ulimit memlock=-1";
        return Finding::new(Level::Warning, subject, found, remedy);
    }
    Finding::good(
        subject,
        format!("at most {}; slab rings take {rings}", bytes_text(limit)),
    )
}

fn huge_pages(root: &Root) -> Finding {
    let subject = "transparent huge pages";
    let path = "sys/kernel/mm/transparent_hugepage/enabled";
    let Some(text) = root.text(path) else {
        return Finding::unknown(subject, format!("no /{path}"));
    };
    match text.contains("[never]") {
        true => Finding::new(
            Level::Warning,
            subject,
            "never: AdamW and direct I/O walk pages of 4 KiB",
            format!("echo madvise > /{path}, as root"),
        ),
        false => Finding::good(subject, text),
    }
}

/// Huge pages set aside by hand serve nobody here: the arena takes transparent ones.
fn reserved_pages(root: &Root) -> Finding {
    let subject = "reserved huge pages";
    let count = |key| root.field("proc/meminfo", key)?.parse::<u64>().ok();
    let free = count("HugePages_Free").unwrap_or(0);
    let page = root.meminfo("Hugepagesize").unwrap_or(2 << 20);
    match free {
        0 => Finding::good(subject, "none lie idle"),
        free => Finding::new(
            Level::Warning,
            subject,
            format!(
                "{} lie idle, taken from what runs may use",
                bytes_text(free * page)
            ),
            "echo 0 > /proc/sys/vm/nr_hugepages, as root, unless another program needs them",
        ),
    }
}

fn swap(root: &Root) -> Finding {
    let subject = "swap";
    let (Some(total), Some(free)) = (root.meminfo("SwapTotal"), root.meminfo("SwapFree")) else {
        return Finding::unknown(subject, "no SwapTotal in /proc/meminfo");
    };
    if total == 0 {
        return Finding::good(subject, "none");
    }
    let used = total.saturating_sub(free);
    let found = format!("{} of {} in use", bytes_text(used), bytes_text(total));
    match used > total / 10 {
        true => Finding::new(
            Level::Warning,
            subject,
            format!("{found}: state that is swapped out is read back in every step"),
            "lower memory.host, end other programs, or swapoff -a as root",
        ),
        false => Finding::good(subject, found),
    }
}

fn overcommit(root: &Root) -> Finding {
    let subject = "overcommit";
    let Some(mode) = root.number("proc/sys/vm/overcommit_memory") else {
        return Finding::unknown(subject, "no /proc/sys/vm/overcommit_memory");
    };
    if mode != 2 {
        return Finding::good(subject, format!("mode {mode}"));
    }
    let limit = root.meminfo("CommitLimit").unwrap_or(0);
    let left = limit.saturating_sub(root.meminfo("Committed_AS").unwrap_or(0));
    Finding::new(
        Level::Warning,
        subject,
        format!(
            "mode 2: only {} more can be reserved, a card's driver reserves much",
            bytes_text(left)
        ),
        "echo 0 > /proc/sys/vm/overcommit_memory, as root",
    )
}

fn open_files(root: &Root) -> Finding {
    const LEAST: u64 = 1024;
    let subject = "open files";
    match root.limit("Max open files") {
        None => Finding::unknown(subject, "no such line in /proc/self/limits"),
        Some(limit) if limit < LEAST => Finding::new(
            Level::Warning,
            subject,
            format!("at most {limit}; data of many shards and a store need more"),
            "ulimit -n 65536",
        ),
        Some(u64::MAX) => Finding::good(subject, "no limit"),
        Some(limit) => Finding::good(subject, format!("at most {limit}")),
    }
}

fn file_size(root: &Root) -> Finding {
    let subject = "file size";
    match root.limit("Max file size") {
        None => Finding::unknown(subject, "no such line in /proc/self/limits"),
        Some(u64::MAX) => Finding::good(subject, "no limit"),
        Some(limit) => Finding::new(
            Level::Warning,
            subject,
            format!(
                "at most {} a file; a store or checkpoint is one file",
                bytes_text(limit)
            ),
            "ulimit -f unlimited",
        ),
    }
}

fn kernel(root: &Root) -> Finding {
    let subject = "kernel";
    let Some(release) = root.text("proc/sys/kernel/osrelease") else {
        return Finding::unknown(subject, "no /proc/sys/kernel/osrelease");
    };
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    match version < (5, 11) {
        true => Finding::new(
            Level::Warning,
            subject,
            format!("{release}: io_uring there lacks what the store uses, or counts its memory"),
            "use Linux 5.15 or later; the pread pool serves meanwhile",
        ),
        false => Finding::good(subject, release),
    }
}

fn io_uring(root: &Root) -> Finding {
    let subject = "io_uring";
    let disabled = root.number("proc/sys/kernel/io_uring_disabled");
    let filtered = root.field("proc/self/status", "Seccomp").as_deref() == Some("2");
    let remedy = "sysctl kernel.io_uring_disabled=0 as root; the pread pool serves meanwhile";
    match (disabled, filtered) {
        (Some(2), _) => Finding::new(Level::Warning, subject, "disabled for all", remedy),
        (Some(1), _) => Finding::new(
            Level::Warning,
            subject,
            "only for the group kernel.io_uring_group and for CAP_SYS_ADMIN",
            remedy,
        ),
        (_, true) => Finding::new(
            Level::Unknown,
            subject,
            "a seccomp filter is on, as in containers: it may forbid it",
            "what the store says of its directory counts; docker run --security-opt seccomp=FILE",
        ),
        _ => Finding::good(subject, "allowed"),
    }
}
