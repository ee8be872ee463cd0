//! CPUs: how many may be used, what keeps it to these, and which memory is near which.
//!
//! - A run has as many threads of arithmetic as [`Cores::threads`] says.
//! - They are bound ([`Cores::pins`]) only where that can help: on several NUMA nodes, each thread
//!   to the CPUs of its node. On one node all memory is as near to all, and a bound thread waits
//!   when another process takes its CPU; under a quota below the CPUs at hand the kernel has to be
//!   free to choose.

use std::path::Path;

use super::cgroup_directories;

/// What there is.
#[derive(Clone, Debug, PartialEq)]
pub struct Cores {
    /// CPUs that this process may run on, by NUMA node, ascending; no node is empty.
    pub nodes: Vec<Vec<usize>>,
    /// CPUs of the machine that are online.
    pub online: usize,
    /// CPUs' worth of time that the cgroup grants, where it is limited.
    pub quota: Option<f64>,
}

impl Cores {
    /// Reads the affinity mask, the nodes and the CPU cgroup (v2, then v1).
    pub fn read() -> Cores {
        Cores::read_below(Path::new("/"))
    }

    /// The same of the /proc and /sys below `root`.
    pub(super) fn read_below(root: &Path) -> Cores {
        let text = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
        let status = text("proc/self/status");
        let mask = status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let mut allowed = mask.map_or(Vec::new(), cpu_list);
        if allowed.is_empty() {
            allowed = (0..super::cores()).collect();
        }
        let online = cpu_list(&text("sys/devices/system/cpu/online")).len();
        let node = |number: usize| {
            cpu_list(&text(&format!(
                "sys/devices/system/node/node{number}/cpulist"
            )))
        };
        let numbers = cpu_list(&text("sys/devices/system/node/online"));
        let nodes = numbers.into_iter().map(node).collect();
        Cores {
            online: online.max(allowed.len()),
            nodes: by_node(allowed, nodes),
            quota: quota(root),
        }
    }

    /// CPUs that the affinity mask allows.
    pub fn allowed(&self) -> usize {
        self.nodes.iter().map(Vec::len).sum()
    }

    /// Threads of arithmetic: the CPUs at hand, or the whole ones of a quota below them; at least
    /// one. What `RAYON_NUM_THREADS` says goes before it.
    pub fn threads(&self) -> usize {
        let whole = self.quota.map_or(usize::MAX, |quota| quota as usize);
        self.allowed().min(whole).max(1)
    }

    /// The CPUs of each thread, where threads are bound: those of its node.
    pub fn pins(&self) -> Option<Vec<Vec<usize>>> {
        let several = self.nodes.len() > 1 && self.threads() == self.allowed();
        several.then(|| {
            let of_node = |node: &Vec<usize>| vec![node.clone(); node.len()];
            self.nodes.iter().flat_map(of_node).collect()
        })
    }

    /// What was found and decided.
    pub fn sentence(&self) -> String {
        let quota = match self.quota {
            Some(quota) => format!("a quota of {quota:.2}"),
            None => "no quota".to_string(),
        };
        let nodes = self.nodes.len();
        let bound = match self.pins() {
            Some(_) => format!("on {nodes} NUMA nodes, each bound to its node"),
            None if nodes > 1 => format!("on {nodes} NUMA nodes, not bound: the quota is less"),
            None => "on one NUMA node, not bound".to_string(),
        };
        format!(
            "cores: {} of {} CPUs, {quota}: {} threads {bound}",
            self.allowed(),
            self.online,
            self.threads(),
        )
    }

    /// Said where less than half of the machine may be used.
    pub fn warning(&self) -> Option<String> {
        let threads = self.threads();
        (2 * threads < self.online).then(|| {
            let by = match threads < self.allowed() {
                true => "the cgroup's CPU quota",
                false => "the affinity mask or cpuset",
            };
            format!(
                "warning: {threads} of {} CPUs may be used, by {by}: AdamW, checksums and the CPU \
                 device have these alone; allow more",
                self.online
            )
        })
    }
}

/// A list of the kernel's: "0-3,8" is 0, 1, 2, 3 and 8. What is no list is empty.
pub(super) fn cpu_list(text: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse::<usize>().ok()?..=last.trim().parse::<usize>().ok()?)
    };
    text.trim().split(',').filter_map(range).flatten().collect()
}

/// Allowed CPUs by node; those of no node are one of their own.
fn by_node(mut allowed: Vec<usize>, nodes: Vec<Vec<usize>>) -> Vec<Vec<usize>> {
    let mut found = Vec::new();
    for node in nodes {
        let (here, others) = allowed.iter().partition(|cpu| node.contains(cpu));
        found.push(here);
        allowed = others;
    }
    found.push(allowed);
    found.retain(|cpus: &Vec<usize>| !cpus.is_empty());
    found
}

/// The least quota of the process's cgroup and those above it, in CPUs.
fn quota(root: &Path) -> Option<f64> {
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let quotas = cgroup_directories(root, "cpu")
        .into_iter()
        .filter_map(|(v2, at)| {
            let text = match v2 {
                true => read(&at.join("cpu.max")),
                false => {
                    read(&at.join("cpu.cfs_quota_us")) + " " + &read(&at.join("cpu.cfs_period_us"))
                }
            };
            quota_of(&text)
        });
    quotas.min_by(f64::total_cmp)
}

/// "200000 100000" is 2 CPUs; "max 100000" and "-1 100000" are no limit.
fn quota_of(text: &str) -> Option<f64> {
    let mut numbers = text.split_whitespace().map(str::parse::<f64>);
    let (quota, period) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    (quota > 0.0 && period > 0.0).then(|| quota / period)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cores(allowed: usize, nodes: usize, online: usize, quota: Option<f64>) -> Cores {
        let node = |n: usize| (0..online).filter(|cpu| cpu % nodes == n).collect();
        Cores {
            nodes: by_node((0..allowed).collect(), (0..nodes).map(node).collect()),
            online,
            quota,
        }
    }

    #[test]
    fn lists_and_quotas_are_the_kernels() {
        assert_eq!(cpu_list("\t0-3,8\n"), [0, 1, 2, 3, 8]);
        assert!(cpu_list("").is_empty());
        assert_eq!(quota_of("150000 100000\n"), Some(1.5));
        assert_eq!(quota_of("max 100000"), None);
        assert_eq!(quota_of("-1\n 100000\n"), None);
        assert_eq!(quota_of(" "), None);
    }

    #[test]
    fn threads_are_bound_on_several_nodes_without_a_quota_alone() {
        let two = cores(4, 2, 8, None);
        let (even, odd) = (vec![0, 2], vec![1, 3]);
        assert_eq!(two.pins(), Some(vec![even.clone(), even, odd.clone(), odd]));
        assert_eq!(cores(4, 1, 4, None).pins(), None);
        let limited = cores(4, 2, 8, Some(3.5));
        assert_eq!((limited.threads(), limited.pins()), (3, None));
        assert_eq!(cores(4, 2, 8, Some(0.5)).threads(), 1);
        assert!(cores(4, 2, 8, Some(16.0)).pins().is_some());
    }

    #[test]
    fn few_of_many_are_warned_of() {
        assert_eq!(cores(4, 1, 8, None).warning(), None);
        assert_eq!(cores(2, 1, 2, None).warning(), None);
        let masked = cores(3, 1, 8, None).warning().expect("a warning");
        assert!(masked.starts_with("warning: 3 of 8 CPUs may be used, by the affinity mask"));
        let quota = cores(8, 1, 8, Some(2.5)).warning().expect("a warning");
        assert!(quota.starts_with("warning: 2 of 8 CPUs may be used, by the cgroup's CPU quota"));
    }

    #[test]
    fn this_machine_has_as_many_as_std_says() {
        let cores = Cores::read();
        assert_eq!(cores.threads(), super::super::cores(), "{cores:?}");
    }
}
