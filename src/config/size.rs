//! Byte counts as people write them: `"24GiB"`, `"1.5 TB"`, `"auto"`.
//!
//! Integer arithmetic only; what does not fit 64 bits, lacks a unit or is nothing is refused.

use std::fmt;

use super::Size;
use crate::error::{Error, Result, printable};

/// Units, largest first; those of powers of 1024 before those of 1000 at each height.
const UNITS: [(&str, u64); 12] = [
    ("PiB", 1 << 50),
    ("PB", 1_000_000_000_000_000),
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("KB", 1_000),
    ("kB", 1_000),
    ("B", 1),
];

impl Size {
    /// Reads a size; `place` is what errors name, such as `--host-memory`.
    ///
    /// ```
    /// use terrace::config::Size;
    /// assert_eq!(Size::parse("1.5 KiB", "--device-memory").unwrap(), Size::Bytes(1536));
    /// assert!(Size::parse("24", "--device-memory").is_err());
    /// ```
    ///
    /// # Errors
    /// [`Error::Input`] if it has no unit, is 0 or has more bytes than 64 bits count.
    pub fn parse(text: &str, place: &str) -> Result<Size> {
        Size::read(text).map_err(|remedy| {
            let got = format!("\"{}\"", printable(text));
            Error::input(
                "size",
                place,
                "a size with a unit, or \"auto\"",
                got,
                remedy,
            )
        })
    }

    /// The size, or what to do about the text. A part of a byte is dropped.
    pub(super) fn read(text: &str) -> Result<Size, String> {
        let text = text.trim();
        if text == "auto" {
            return Ok(Size::Auto);
        }
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.');
        let (number, unit) = text.split_at(end.unwrap_or(text.len()));
        let unit = unit.trim_start();
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let digits = format!("{whole}{fraction}");
        if whole.is_empty() || fraction.contains('.') || number.ends_with('.') {
            return Err("write it as \"24GiB\"".to_string());
        }
        if unit.is_empty() {
            return Err(format!("add a unit: \"{number}GiB\" or \"{number}B\""));
        }
        let Some((_, bytes)) = UNITS.iter().find(|(name, _)| *name == unit) else {
            return Err("use one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB".to_string());
        };
        let too_large = || "use at most 16383PiB".to_string();
        // 10^18 · 2^50 and its like stay within 128 bits as long as both factors have few digits.
        if fraction.len() > 18 || whole.len() > 20 {
            return Err("use fewer digits".to_string());
        }
        let scaled: u128 = digits.parse().map_err(|_| too_large())?;
        let product = scaled
            .checked_mul(u128::from(*bytes))
            .ok_or_else(too_large)?;
        let exact = product / 10u128.pow(u32::try_from(fraction.len()).unwrap_or(0));
        match u64::try_from(exact) {
            Ok(0) => Err("give at least one byte, or leave it out".to_string()),
            Ok(bytes) => Ok(Size::Bytes(bytes)),
            Err(_) => Err(too_large()),
        }
    }
}

/// In the largest unit that divides it, so that it reads back as the same.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Size::Bytes(bytes) = *self else {
            return f.write_str("auto");
        };
        let divides = |(_, unit): &&(&str, u64)| bytes != 0 && bytes.is_multiple_of(*unit);
        let (name, unit) = UNITS.iter().find(divides).unwrap_or(&("B", 1));
        write!(f, "{}{name}", bytes / unit)
    }
}
