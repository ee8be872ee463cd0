//! What the machine has: memory, cores, and what `"auto"` sizes come to.
//!
//! Every number is read once, at the start, and printed; nothing is guessed later.

use std::path::Path;

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
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let available = meminfo
            .lines()
            .find_map(|line| line.strip_prefix("MemAvailable:"))
            .and_then(|rest| rest.trim().strip_suffix("kB"))
            .and_then(|number| number.trim().parse::<u64>().ok())
            .map_or(0, |kilobytes| kilobytes * 1024);
        HostMemory {
            available,
            cgroup_left: cgroup_left(),
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

fn cgroup_left() -> Option<u64> {
    let number = |path: &Path| {
        std::fs::read_to_string(path)
            .ok()?
            .trim()
            .parse::<u64>()
            .ok()
    };
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mut left: Option<u64> = None;
    for line in own.lines() {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next(), fields.next()?, fields.next()?);
        let (root, limit, usage) = if controllers.is_empty() {
            ("/sys/fs/cgroup", "memory.max", "memory.current")
        } else if controllers
            .split(',')
            .any(|controller| controller == "memory")
        {
            (
                "/sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        } else {
            continue;
        };
        // The limit of any ancestor binds; in a container the path may not exist, the root does.
        let mut directory = Path::new(root).join(path.trim_start_matches('/'));
        loop {
            if let (Some(limit), Some(usage)) = (
                number(&directory.join(limit)),
                number(&directory.join(usage)),
            ) {
                // v1 writes "no limit" as a number near 2^63.
                if limit < 1 << 60 {
                    let here = limit.saturating_sub(usage);
                    left = Some(left.map_or(here, |other| other.min(here)));
                }
            }
            if directory == Path::new(root) || !directory.pop() {
                break;
            }
        }
    }
    left
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
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
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
