//! What the machine has: memory, cores ([`cores`]), and what `"auto"` sizes come to.
//!
//! Every number is read once, at the start, and printed; nothing is guessed later. What limits the
//! machine, and how to change it, is told by [`limits`].

pub mod cores;
pub mod limits;

pub use cores::Cores;

use std::path::{Path, PathBuf};

/// Memory that a run may plan with, and where the number comes from.
#[derive(Clone, Debug, PartialEq)]
pub struct HostMemory {
    /// MemAvailable of the kernel, bytes.
    pub available: u64,
    /// Limit of the memory cgroup less its use, if there is a limit.
    pub cgroup_left: Option<u64>,
}

impl HostMemory {
    /// Reads /proc/meminfo and the memory cgroup (v2, then v1).
    pub fn read() -> HostMemory {
        HostMemory::read_below(Path::new("/"))
    }

    /// The same of the /proc and /sys below `root`.
    pub fn read_below(root: &Path) -> HostMemory {
        let meminfo = std::fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
        let available = meminfo
            .lines()
            .find_map(|line| line.strip_prefix("MemAvailable:"))
            .and_then(|rest| rest.trim().strip_suffix("kB"))
            .and_then(|number| number.trim().parse::<u64>().ok())
            .map_or(0, |kilobytes| kilobytes * 1024);
        HostMemory {
            available,
            cgroup_left: cgroup_left(root),
        }
    }

    /// min(MemAvailable, cgroup limit − use) less max(2 GiB, 10 %); at least a sixteenth of it.
    pub fn auto(&self) -> u64 {
        let least = self
            .cgroup_left
            .map_or(self.available, |left| left.min(self.available));
        let reserve = (2u64 << 30).max(least / 10);
        least.saturating_sub(reserve).max(least / 16)
    }
}

fn cgroup_left(below: &Path) -> Option<u64> {
    let number = |path: &Path| {
        std::fs::read_to_string(path)
            .ok()?
            .trim()
            .parse::<u64>()
            .ok()
    };
    let left = cgroup_directories(below, "memory")
        .into_iter()
        .filter_map(|(v2, at)| {
            let (limit, usage) = match v2 {
                true => ("memory.max", "memory.current"),
                false => ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            };
            let (limit, usage) = (number(&at.join(limit))?, number(&at.join(usage))?);
            // v1 writes "no limit" as a number near 2^63.
            (limit < 1 << 60).then(|| limit.saturating_sub(usage))
        });
    left.min()
}

/// Directories of the process's cgroup and of all above it, whose limits bind too, and whether each
/// is of v2; all below `below`, which is `/`. In a container the path may not exist; the root does.
fn cgroup_directories(below: &Path, controller: &str) -> Vec<(bool, PathBuf)> {
    let own = std::fs::read_to_string(below.join("proc/self/cgroup")).unwrap_or_default();
    let mut found = Vec::new();
    for line in own.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let v2 = controllers.is_empty();
        if !v2 && !controllers.split(',').any(|named| named == controller) {
            continue;
        }
        let root = below.join("sys/fs/cgroup");
        let root = root.join(if v2 { "" } else { controller });
        let mut directory = root.join(path.trim_start_matches('/'));
        loop {
            found.push((v2, directory.clone()));
            if directory == root || !directory.pop() {
                break;
            }
        }
    }
    found
}

/// Cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |count| count.get())
}

/// The processor's model, as the kernel names it; the architecture where it has no name.
pub fn cpu_model() -> String {
    let found = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = found
        .lines()
        .find_map(|line| line.strip_prefix("model name"));
    let name = named
        .and_then(|rest| rest.split_once(':'))
        .map(|(_, name)| name.trim());
    name.unwrap_or(std::env::consts::ARCH).to_string()
}

/// Bytes of memory that the machine has, used or not.
pub fn memory_bytes() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"));
    let kilobytes = total.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse().ok());
    kilobytes.map_or(0, |kilobytes: u64| kilobytes * 1024)
}

/// Peak resident memory of this process in bytes, as the kernel counts it.
pub fn peak_memory() -> u64 {
    process_memory("VmHWM:")
}

/// Resident memory of this process in bytes, as the kernel counts it.
pub fn resident_memory() -> u64 {
    process_memory("VmRSS:")
}

fn process_memory(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|rest| rest.trim().strip_suffix("kB"))
        .and_then(|number| number.trim().parse::<u64>().ok())
        .map_or(0, |kilobytes| kilobytes * 1024)
}

/// Bytes that this process's reads and writes moved from and to storage, as the kernel counts them.
pub fn storage_bytes() -> (u64, u64) {
    let io = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let field = |name: &str| {
        io.lines()
            .find_map(|line| line.strip_prefix(name))
            .and_then(|number| number.trim().parse().ok())
            .unwrap_or(0)
    };
    (field("read_bytes:"), field("write_bytes:"))
}

/// Free bytes of the file system that holds `path`, or its nearest existing ancestor.
pub fn free_bytes(path: &Path) -> u64 {
    let Ok(mut place) = std::path::absolute(path) else {
        return 0;
    };
    while !place.exists() && place.pop() {}
    crate::store::free_bytes(&place)
}
