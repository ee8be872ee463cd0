//! Goal: each limit is found where it is, and only there. Method: copies of /proc and /sys of a
//! good machine, in a directory, with one thing changed at a time.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

use std::path::PathBuf;

use terrace::machine::limits::{Drive, Finding, Level, Need, Root, examine, for_run};

/// A machine of 16 cores on two nodes with a card on the second, as a container without limits
/// sees it.
struct Faked(tempfile::TempDir);

const CARD: &str = "sys/bus/pci/devices/0000:81:00.0";

impl Faked {
    fn new() -> Faked {
        let faked = Faked(tempfile::tempdir().unwrap());
        let limits = "Limit                     Soft Limit           Hard Limit           Units\n\
            Max file size             unlimited            unlimited            bytes\n\
            Max open files            65536                65536                files\n\
            Max locked memory         unlimited            unlimited            bytes\n";
        for (path, text) in [
            (
                "proc/self/status",
                "Name:\tx\nCpus_allowed_list:\t8-15\nCapEff:\t0000000000000000\nSeccomp:\t0\n",
            ),
            ("proc/self/limits", limits),
            ("proc/self/cgroup", "0::/one/two\n"),
            (
                "proc/cpuinfo",
                "processor\t: 0\nflags\t\t: fpu avx2 fma avx512f avx512bw\n",
            ),
            (
                "proc/meminfo",
                "MemAvailable:   65536000 kB\nSwapTotal:       0 kB\nSwapFree:       0 kB\n\
                 HugePages_Free:        0\nHugepagesize:       2048 kB\n\
                 CommitLimit:   8000000 kB\nCommitted_AS:   4000000 kB\n",
            ),
            ("proc/sys/vm/overcommit_memory", "0\n"),
            ("proc/sys/kernel/osrelease", "6.8.0-31-generic\n"),
            ("proc/sys/kernel/io_uring_disabled", "0\n"),
            (
                "sys/kernel/mm/transparent_hugepage/enabled",
                "always [madvise] never\n",
            ),
            ("sys/devices/system/cpu/online", "8-15\n"),
            ("sys/devices/system/node/node0/cpulist", "0-7\n"),
            ("sys/devices/system/node/node1/cpulist", "8-15\n"),
        ] {
            faked.write(path, text);
        }
        for (name, text) in [
            ("vendor", "0x10de\n"),
            ("class", "0x030200\n"),
            ("numa_node", "1\n"),
            ("current_link_speed", "32.0 GT/s PCIe\n"),
            ("max_link_speed", "32.0 GT/s PCIe\n"),
            ("current_link_width", "16\n"),
            ("max_link_width", "16\n"),
        ] {
            faked.write(&format!("{CARD}/{name}"), text);
        }
        // A bridge, and another vendor's card.
        faked.write("sys/bus/pci/devices/0000:00:00.0/vendor", "0x10de\n");
        faked.write("sys/bus/pci/devices/0000:00:00.0/class", "0x060000\n");
        faked
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn replace(&self, path: &str, old: &str, new: &str) {
        let text = std::fs::read_to_string(self.path(path)).unwrap();
        assert!(text.contains(old), "{text}");
        self.write(path, &text.replace(old, new));
    }

    fn root(&self) -> Root {
        Root::at(self.0.path())
    }

    fn examine(&self) -> Vec<Finding> {
        examine(&self.root(), Need::default())
    }
}

/// The one finding that is not good, in words.
fn only(findings: &[Finding]) -> (Level, String) {
    let not_good: Vec<&Finding> = findings.iter().filter(|f| f.level != Level::Good).collect();
    let [one] = not_good[..] else {
        panic!("{not_good:#?}");
    };
    assert_eq!(findings[0], *one, "worst first");
    (one.level, one.to_string())
}

#[test]
fn a_good_machine_has_nothing_to_change() {
    let findings = Faked::new().examine();
    let all_good = findings.iter().all(|finding| finding.level == Level::Good);
    assert!(all_good, "{findings:#?}");
    assert!(findings.iter().all(|finding| finding.remedy.is_empty()));
    assert_eq!(for_run(&Faked::new().root(), Need::default()), []);
}

#[test]
fn each_limit_is_found_where_it_is_and_has_a_remedy() {
    let status = "proc/self/status";
    let limits = "proc/self/limits";
    let cases: &[(&str, &str, &str, Level, &str)] = &[
        (
            "sys/devices/system/cpu/online",
            "8-15",
            "0-15",
            Level::Warning,
            "cores: 8 of 16 are visible to this process; widen it",
        ),
        (
            "sys/devices/system/cpu/online",
            "8-15",
            "0-31",
            Level::Bad,
            "cores: 8 of 32 are visible",
        ),
        (
            limits,
            "Max locked memory         unlimited",
            "Max locked memory         8388608",
            Level::Warning,
            "locked memory: at most 8.00 MiB; slab rings of 96.00 MiB are registered",
        ),
        (
            limits,
            "Max open files            65536",
            "Max open files            256",
            Level::Warning,
            "open files: at most 256;",
        ),
        (
            limits,
            "Max file size             unlimited",
            "Max file size             1073741824",
            Level::Warning,
            "file size: at most 1.00 GiB a file",
        ),
        (
            "sys/kernel/mm/transparent_hugepage/enabled",
            "always [madvise] never",
            "always madvise [never]",
            Level::Warning,
            "transparent huge pages: never",
        ),
        (
            "proc/meminfo",
            "HugePages_Free:        0",
            "HugePages_Free:        512",
            Level::Warning,
            "reserved huge pages: 1.00 GiB lie idle",
        ),
        (
            "proc/meminfo",
            "SwapTotal:       0 kB",
            "SwapTotal:       8388608 kB",
            Level::Warning,
            "swap: 8.00 GiB of 8.00 GiB in use",
        ),
        (
            "proc/sys/vm/overcommit_memory",
            "0",
            "2",
            Level::Warning,
            "overcommit: mode 2: only 3.81 GiB more",
        ),
        (
            "proc/cpuinfo",
            " avx2 fma avx512f avx512bw",
            " sse2",
            Level::Warning,
            "simd: neither",
        ),
        (
            "proc/sys/kernel/osrelease",
            "6.8.0-31",
            "5.4.0-100",
            Level::Warning,
            "kernel: 5.4.0-100-generic: io_uring",
        ),
        (
            "proc/sys/kernel/io_uring_disabled",
            "0",
            "2",
            Level::Warning,
            "io_uring: disabled for all; sysctl",
        ),
        (
            status,
            "Seccomp:\t0",
            "Seccomp:\t2",
            Level::Unknown,
            "io_uring: a seccomp filter is on",
        ),
        (
            "sys/bus/pci/devices/0000:81:00.0/current_link_width",
            "16",
            "4",
            Level::Bad,
            "pcie of the card 0000:81:00.0: 32 GT/s x4 now, 32 GT/s x16 at most; seat",
        ),
        (
            "sys/bus/pci/devices/0000:81:00.0/current_link_speed",
            "32.0",
            "2.5",
            Level::Warning,
            "pcie of the card 0000:81:00.0: 2.5 GT/s x16 now",
        ),
        (
            "sys/bus/pci/devices/0000:81:00.0/numa_node",
            "1",
            "0",
            Level::Bad,
            "numa of the card 0000:81:00.0: node 0; this process runs on others",
        ),
        (
            "sys/bus/pci/devices/0000:81:00.0/numa_node",
            "1",
            "-1",
            Level::Unknown,
            "numa of the card 0000:81:00.0: unknown: the firmware",
        ),
    ];
    for (path, old, new, level, start) in cases {
        let faked = Faked::new();
        faked.replace(path, old, new);
        let (found, text) = only(&faked.examine());
        assert_eq!(found, *level, "{text}");
        assert!(text.starts_with(start), "{text}");
    }
}

#[test]
fn a_capability_lifts_the_limit_of_locked_memory() {
    let faked = Faked::new();
    let (old, new) = (
        "locked memory         unlimited",
        "locked memory         8388608",
    );
    faked.replace("proc/self/limits", old, new);
    faked.replace(
        "proc/self/status",
        "CapEff:\t0000000000000000",
        "CapEff:\t0000000000004000",
    );
    assert!(faked.examine().iter().all(|f| f.level == Level::Good));
}

#[test]
fn control_groups_limit_cores_and_memory_from_any_ancestor() {
    let faked = Faked::new();
    // The group itself has no quota, its parent has.
    faked.write("sys/fs/cgroup/one/two/cpu.max", "max 100000\n");
    faked.write("sys/fs/cgroup/one/cpu.max", "250000 100000\n");
    let (level, text) = only(&faked.examine());
    assert_eq!(level, Level::Bad);
    assert!(
        text.starts_with("cores: the CPU quota allows 2.5 of 8; raise it"),
        "{text}"
    );
    // The first version of control groups.
    let faked = Faked::new();
    faked.write("proc/self/cgroup", "3:cpu,cpuacct:/one\n");
    faked.write("sys/fs/cgroup/cpu/one/cpu.cfs_quota_us", "600000\n");
    faked.write("sys/fs/cgroup/cpu/one/cpu.cfs_period_us", "100000\n");
    let (level, text) = only(&faked.examine());
    assert_eq!(level, Level::Warning);
    assert!(text.contains("allows 6.0 of 8"), "{text}");
    let faked = Faked::new();
    faked.write("sys/fs/cgroup/one/memory.max", "21474836480\n");
    faked.write("sys/fs/cgroup/one/memory.current", "10737418240\n");
    let (_, text) = only(&faked.examine());
    let start =
        "memory available: 62.50 GiB, of which the control group leaves 10.00 GiB; memory.h";
    assert!(text.starts_with(start), "{text}");
}

#[test]
fn a_machine_that_tells_nothing_is_unknown_and_never_bad() {
    let nothing = tempfile::tempdir().unwrap();
    let findings = examine(&Root::at(nothing.path()), Need::default());
    for finding in &findings {
        assert!(finding.level >= Level::Unknown, "{finding:?}");
    }
    let unknown = findings
        .iter()
        .filter(|f| f.level == Level::Unknown)
        .count();
    assert!(unknown > 8, "{findings:#?}");
}

#[test]
fn a_run_is_told_of_its_rings_and_of_a_far_card() {
    let faked = Faked::new();
    faked.replace("proc/self/status", "8-15", "0-1");
    faked.write("sys/devices/system/cpu/online", "0-1\n");
    faked.replace(
        "proc/self/limits",
        "memory         unlimited",
        "memory         65536",
    );
    let said = |need: Need| -> Vec<String> {
        let findings = for_run(&faked.root(), need);
        findings
            .into_iter()
            .map(|finding| finding.subject)
            .collect()
    };
    let all = ["numa of the card 0000:81:00.0", "locked memory"];
    assert_eq!(said(Need::default()), all);
    let plain = Need {
        card: false,
        store: false,
        ..Need::default()
    };
    assert_eq!(said(plain), [] as [&str; 0]);
}

#[test]
fn drives_are_told_by_their_queue_and_their_life() {
    let faked = Faked::new();
    let drive = |device, free| Drive { device, free };
    let folder = "sys/devices/pci/block/sda";
    faked.write(&format!("{folder}/queue/rotational"), "1\n");
    faked.write(&format!("{folder}/device/model"), "Old Disk\n");
    faked.write(&format!("{folder}/sda1/partition"), "1\n");
    let flash = "sys/devices/mmc/block/mmcblk0";
    faked.write(&format!("{flash}/queue/rotational"), "0\n");
    faked.write(&format!("{flash}/device/life_time"), "0x02 0x0b\n");
    std::fs::create_dir_all(faked.path("sys/dev/block")).unwrap();
    for (number, target) in [
        ("8:1", format!("{folder}/sda1")),
        ("179:0", flash.to_string()),
    ] {
        let link = faked.path(&format!("sys/dev/block/{number}"));
        std::os::unix::fs::symlink(faked.path(&target), link).unwrap();
    }
    let texts = |drive: Drive| -> Vec<(Level, String)> {
        let findings = drive.examine(&faked.root(), "/data");
        findings.iter().map(|f| (f.level, f.to_string())).collect()
    };
    let disk = texts(drive((8, 1), 1 << 40));
    assert_eq!(
        disk[0],
        (Level::Good, "store /data: 1.00 TiB free".to_string())
    );
    assert_eq!(disk[1].0, Level::Bad);
    assert!(
        disk[1]
            .1
            .starts_with("drive of /data: sda, Old Disk: a hard disk; name"),
        "{disk:?}"
    );
    assert_eq!(disk[2].0, Level::Unknown);
    assert!(disk[2].1.contains("smartctl -a /dev/sda"), "{disk:?}");
    let card = texts(drive((179, 0), 1 << 30));
    assert_eq!(card[0].0, Level::Warning);
    assert!(
        card[0]
            .1
            .starts_with("store /data: 1.00 GiB free; 12 bytes"),
        "{card:?}"
    );
    assert_eq!(
        card[1],
        (Level::Good, "drive of /data: mmcblk0".to_string())
    );
    let worn = "life of mmcblk0: 100 % used or more; spill less";
    assert!(
        card[2].0 == Level::Bad && card[2].1.starts_with(worn),
        "{card:?}"
    );
    let absent = texts(drive((0, 42), 1 << 40));
    assert_eq!(absent[1].0, Level::Unknown);
}
