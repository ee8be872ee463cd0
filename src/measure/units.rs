//! Values of fio's words: sizes, times, numbers, paths. `None` is a value that is not right.

use std::path::PathBuf;
use std::time::Duration;

use crate::config::IoEngine;

/// A job's name, which a file may be named after.
pub(super) fn plain_name(text: &str) -> Option<String> {
    (!text.is_empty() && !text.contains(['/', '\0'])).then(|| text.to_string())
}

pub(super) fn path(text: &str) -> Option<PathBuf> {
    // fio takes several files with `:` between them; a job here has one.
    let mut plain = String::new();
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => plain.push(letters.next()?),
            ':' | '\0' => return None,
            other => plain.push(other),
        }
    }
    (!plain.is_empty()).then(|| PathBuf::from(plain))
}

pub(super) fn flag(text: &str) -> Option<bool> {
    match text {
        "0" | "false" => Some(false),
        "1" | "true" => Some(true),
        _ => None,
    }
}

pub(super) fn engine(text: &str) -> Option<Option<IoEngine>> {
    match text {
        "auto" => Some(None),
        "io_uring" => Some(Some(IoEngine::Uring)),
        "pread" | "psync" | "sync" => Some(Some(IoEngine::Pread)),
        _ => None,
    }
}

pub(super) fn percent(text: &str) -> Option<u32> {
    u32::try_from(number(text, 0, 100)?).ok()
}

pub(super) fn number(text: &str, least: u64, most: u64) -> Option<u64> {
    let value: u64 = text.parse().ok()?;
    (least..=most).contains(&value).then_some(value)
}

pub(super) fn pair(text: &str, read: impl Fn(&str) -> Option<u64>) -> Option<[Option<u64>; 2]> {
    let side = |text: &str| {
        if text.is_empty() {
            return Some(None);
        }
        read(text).map(Some)
    };
    match text.split_once(',') {
        Some((reads, writes)) => Some([side(reads)?, side(writes)?]),
        None => Some([Some(read(text)?); 2]),
    }
}

/// Bytes of `4k`, `4Ki`, `4KiB`, `1.5g`; at least one.
pub(super) fn size(text: &str) -> Option<u64> {
    size_or_zero(text).filter(|bytes| *bytes > 0)
}

pub(super) fn size_or_zero(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.');
    let (digits, unit) = text.split_at(end.unwrap_or(text.len()));
    let unit = unit.to_ascii_lowercase();
    let unit = unit.strip_suffix('b').unwrap_or(&unit);
    let unit = unit.strip_suffix('i').unwrap_or(unit);
    let power = ["", "k", "m", "g", "t", "p"]
        .iter()
        .position(|known| *known == unit)?;
    let scale = 1u64 << (10 * power);
    if let Ok(whole) = digits.parse::<u64>() {
        return whole.checked_mul(scale);
    }
    let value: f64 = digits.parse().ok()?;
    let bytes = value * scale as f64;
    (bytes.is_finite() && bytes < 1e18).then_some(bytes as u64)
}

/// `90`, `90s`, `1.5m`, `250ms`.
pub(super) fn time(text: &str) -> Option<Duration> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.');
    let (digits, unit) = text.split_at(end.unwrap_or(text.len()));
    let seconds = match unit {
        "us" | "usec" => 1e-6,
        "ms" | "msec" => 1e-3,
        "" | "s" | "sec" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => return None,
    };
    let value: f64 = digits.parse().ok()?;
    Duration::try_from_secs_f64(value * seconds).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_those_of_fio() {
        for (text, bytes) in [
            ("4096", 4096),
            ("4k", 4096),
            ("4K", 4096),
            ("4Ki", 4096),
            ("4KiB", 4096),
            ("4kb", 4096),
            ("1.5m", 3 << 19),
            ("2G", 2 << 30),
            ("1t", 1 << 40),
        ] {
            assert_eq!(size(text), Some(bytes), "{text}");
        }
        for text in ["", "k", "4q", "-1", "4 k", "1.2.3", "99999999999p", "0"] {
            assert_eq!(size(text), None, "{text}");
        }
        assert_eq!(time("90"), Some(Duration::from_secs(90)));
        assert_eq!(time("1.5m"), Some(Duration::from_secs(90)));
        assert_eq!(time("250ms"), Some(Duration::from_millis(250)));
        assert_eq!(time("5 minutes"), None);
        assert_eq!(pair("1m", size), Some([Some(1 << 20); 2]));
        assert_eq!(pair("1m,", size), Some([Some(1 << 20), None]));
        assert_eq!(path("a:b"), None);
        assert_eq!(path("a\\:b"), Some(PathBuf::from("a:b")));
    }
}
