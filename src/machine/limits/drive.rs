//! The drive of a directory, as the block layer describes it.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{Finding, Level, Root};
use crate::plan::bytes_text;

/// A directory's drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drive {
    /// Major and minor number of its file system's device.
    pub device: (u32, u32),
    /// Bytes free there.
    pub free: u64,
}

impl Drive {
    /// That of `path` or of its nearest ancestor that is there.
    pub fn of(path: &Path) -> Option<Drive> {
        let path = std::path::absolute(path).ok()?;
        let found = path
            .ancestors()
            .find_map(|place| std::fs::metadata(place).ok())?;
        let device = found.dev();
        Some(Drive {
            device: (libc::major(device), libc::minor(device)),
            free: crate::machine::free_bytes(&path),
        })
    }

    /// Room, kind and life of the drive; `name` is how the directory is called.
    pub fn examine(&self, root: &Root, name: &str) -> Vec<Finding> {
        let mut findings = vec![self.room(name)];
        let subject = format!("drive of {name}");
        let (major, minor) = self.device;
        let entry = root.path(&format!("sys/dev/block/{major}:{minor}"));
        let Ok(folder) = std::fs::canonicalize(entry) else {
            let why = "not a block device that /sys shows (network, overlay or memory)";
            findings.push(Finding::unknown(&subject, why));
            return findings;
        };
        // A partition's queue is its parent's.
        let disk = match folder.join("queue").is_dir() {
            true => folder.as_path(),
            false => folder.parent().unwrap_or(&folder),
        };
        let read = |file: &str| {
            let text = std::fs::read_to_string(disk.join(file)).ok()?;
            Some(text.trim().to_string()).filter(|text| !text.is_empty())
        };
        let device = disk
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let model = read("device/model").map_or(String::new(), |model| format!(", {model}"));
        // Virtual drives call themselves rotating by default.
        let is_guest = device.starts_with("vd") || device.starts_with("xvd");
        findings.push(match read("queue/rotational").as_deref() {
            Some("1") if !is_guest => Finding::new(
                Level::Bad,
                &subject,
                format!("{device}{model}: a hard disk"),
                "name a directory on NVMe: a spilled step would take minutes",
            ),
            _ => Finding::good(&subject, format!("{device}{model}")),
        });
        findings.push(life(&device, read("device/life_time")));
        findings
    }

    fn room(&self, name: &str) -> Finding {
        const LEAST: u64 = 16 << 30;
        let subject = format!("store {name}");
        let found = format!("{} free", bytes_text(self.free));
        match self.free < LEAST {
            true => Finding::new(
                Level::Warning,
                &subject,
                found,
                "12 bytes a parameter are spilled at most, a checkpoint takes (keep + 1) x 12: \
                 free space, or name another directory",
            ),
            false => Finding::good(&subject, found),
        }
    }
}

/// What the drive has left. Flash cards tell it in /sys in tenths; NVMe drives only to root.
fn life(device: &str, tenths: Option<String>) -> Finding {
    let subject = format!("life of {device}");
    // `0x02 0x01`: two kinds of cells, 0x01 is up to 10 % used, 0x0b is beyond the rating.
    let used = tenths.and_then(|text| {
        let numbers = text.split_whitespace();
        let parsed = numbers.map(|n| u32::from_str_radix(n.trim_start_matches("0x"), 16).ok());
        parsed.collect::<Option<Vec<u32>>>()?.into_iter().max()
    });
    match used {
        Some(used @ 1..=8) => Finding::good(&subject, format!("at most {} % used", 10 * used)),
        Some(used @ 9..) => Finding::new(
            Level::Bad,
            &subject,
            format!("{} % used or more", 10 * (used - 1)),
            "spill less: raise memory.host, or use another drive",
        ),
        _ => Finding::new(
            Level::Unknown,
            &subject,
            "unknown: /sys does not tell",
            format!("smartctl -a /dev/{device} does, as root; memory.drive_tbw lets a run count"),
        ),
    }
}
