//! One value that a person gave for a key: read as what the key takes, or refused with the place,
//! what is right, what was there and what to do.
//!
//! - Numbers are read from their text: an integer never goes through a float.
//! - Every refusal names the key and the line, or `--set`.

use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use toml::de::{DeTable, DeValue};

use super::Size;
use super::keys::Key;
use crate::error::{Error, Result, printable};

/// What errors of this room call the thing they looked at.
pub(super) const WHAT: &str = "run.toml";

/// A value of a key, and where it stands.
pub(super) struct Given<'a> {
    pub(super) key: &'static Key,
    /// `a.toml line 3, train.steps`, or `--set train.steps`.
    pub(super) place: String,
    pub(super) value: &'a DeValue<'a>,
}

impl Given<'_> {
    /// The refusal of this value.
    pub(super) fn refuse(&self, expected: impl Into<String>) -> Error {
        let remedy = match self.key.default {
            "" => "correct it".to_string(),
            default => format!("correct it, or leave it out for the default {default}"),
        };
        self.refuse_with(expected, remedy)
    }

    fn refuse_with(&self, expected: impl Into<String>, remedy: impl Into<String>) -> Error {
        Error::input(WHAT, &self.place, expected, shown(self.value), remedy)
    }

    pub(super) fn integer(&self, least: u64, most: u64) -> Result<u64> {
        let value = match self.value {
            DeValue::Integer(digits) => u64::from_str_radix(digits.as_str(), digits.radix()).ok(),
            _ => None,
        };
        value
            .filter(|value| (least..=most).contains(value))
            .ok_or_else(|| self.refuse(format!("an integer from {least} to {most}")))
    }

    /// A finite float that `right` accepts; integers are read as floats.
    pub(super) fn float(&self, right: impl Fn(f64) -> bool, expected: &str) -> Result<f64> {
        float(self.value)
            .filter(|value| value.is_finite() && right(*value))
            .ok_or_else(|| self.refuse(expected))
    }

    pub(super) fn betas(&self) -> Result<[f64; 2]> {
        let pair: Vec<f64> = match self.value {
            DeValue::Array(values) => values.iter().filter_map(|v| float(v.get_ref())).collect(),
            _ => Vec::new(),
        };
        let given = self.value.as_array().map_or(0, |values| values.len());
        match pair[..] {
            [a, b] if given == 2 && [a, b].iter().all(|beta| (0.0..1.0).contains(beta)) => {
                Ok([a, b])
            }
            _ => Err(self.refuse("two numbers, each at least 0 and less than 1")),
        }
    }

    /// Weights: numbers above 0, or an empty list.
    pub(super) fn weights(&self) -> Result<Vec<f64>> {
        let values = self.value.as_array().map(|values| {
            let weight = |value: &toml::Spanned<DeValue<'_>>| {
                float(value.get_ref()).filter(|weight| weight.is_finite() && *weight > 0.0)
            };
            values.iter().map(weight).collect::<Option<Vec<f64>>>()
        });
        values
            .flatten()
            .ok_or_else(|| self.refuse("a list of numbers above 0"))
    }

    pub(super) fn boolean(&self) -> Result<bool> {
        match self.value {
            DeValue::Boolean(value) => Ok(*value),
            _ => Err(self.refuse("true or false")),
        }
    }

    /// One of a list of names.
    pub(super) fn choice<T: Copy>(&self, choices: &[(&str, T)]) -> Result<T> {
        let given = self.value.as_str();
        let found = choices.iter().find(|(name, _)| Some(*name) == given);
        found.map(|(_, value)| *value).ok_or_else(|| {
            let names: Vec<String> = choices
                .iter()
                .map(|(name, _)| format!("{name:?}"))
                .collect();
            self.refuse(names.join(", ").replacen("\"", "one of \"", 1))
        })
    }

    /// An address with a port that only this machine reaches, or a port of 127.0.0.1.
    pub(super) fn loopback(&self) -> Result<SocketAddr> {
        let expected = "a port, or an address of this machine alone as 127.0.0.1:9400";
        let on_port = |port: u16| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
        let address = match self.value {
            DeValue::String(text) => match text.strip_prefix("localhost:") {
                Some(port) => port.parse().ok().map(on_port),
                None => text.parse().ok(),
            },
            _ => {
                let port = self.integer(0, u64::from(u16::MAX));
                let port = port.map_err(|_| self.refuse(expected))?;
                u16::try_from(port).ok().map(on_port)
            }
        };
        let loopback = address.filter(|address: &SocketAddr| address.ip().is_loopback());
        loopback.ok_or_else(|| self.refuse(expected))
    }

    pub(super) fn path(&self) -> Result<PathBuf> {
        path(self.value).ok_or_else(|| self.refuse("a path in quotes"))
    }

    /// A path, or a list of paths.
    pub(super) fn paths(&self) -> Result<Vec<PathBuf>> {
        let paths = match self.value {
            DeValue::Array(values) => values.iter().map(|v| path(v.get_ref())).collect(),
            one => path(one).map(|path| vec![path]),
        };
        paths.ok_or_else(|| self.refuse("a path in quotes, or a list of them"))
    }

    /// A text, or a list of texts, none of them empty.
    pub(super) fn texts(&self) -> Result<Vec<String>> {
        let text = |value: &DeValue<'_>| {
            let text = value.as_str().filter(|text| !text.is_empty());
            text.map(str::to_string)
        };
        let texts = match self.value {
            DeValue::Array(values) => values.iter().map(|v| text(v.get_ref())).collect(),
            one => text(one).map(|text| vec![text]),
        };
        texts.ok_or_else(|| self.refuse("a text in quotes, or a list of them"))
    }

    pub(super) fn size(&self) -> Result<Size> {
        self.size_of(self.value)
    }

    /// The size in `value`, which is this value or a part of it.
    pub(super) fn size_of(&self, value: &DeValue<'_>) -> Result<Size> {
        let refuse = |remedy: String| {
            let expected = "a size with a unit in quotes, or \"auto\"";
            Error::input(WHAT, &self.place, expected, shown(value), remedy)
        };
        match value {
            DeValue::String(text) => match Size::read(text) {
                Ok(size) => Ok(size),
                Err(remedy) => Err(refuse(remedy)),
            },
            DeValue::Integer(digits) if digits.radix() == 10 => {
                let digits = printable(digits.as_str());
                Err(refuse(format!(
                    "add a unit: \"{digits}GiB\" or \"{digits}B\""
                )))
            }
            _ => Err(refuse("write it as \"24GiB\"".to_string())),
        }
    }

    /// The bytes a second in `value`.
    fn rate_of(&self, value: &DeValue<'_>) -> Result<u64> {
        let number = || {
            let DeValue::String(text) = value else {
                return None;
            };
            match Size::read(text.trim().strip_suffix("/s")?) {
                Ok(Size::Bytes(bytes)) => Some(bytes),
                _ => None,
            }
        };
        number().ok_or_else(|| {
            let remedy = "write it as \"2GB/s\"";
            Error::input(WHAT, &self.place, "a rate in quotes", shown(value), remedy)
        })
    }

    /// A path, or a list of paths and `{ path, size, read, write }`.
    pub(super) fn store(&self) -> Result<Vec<super::StorePath>> {
        let wrong = || self.refuse("a path in quotes, or a list of { path, size }");
        let places: Vec<&DeValue<'_>> = match self.value {
            DeValue::Array(values) => values.iter().map(|value| value.get_ref()).collect(),
            one => vec![one],
        };
        let mut store: Vec<super::StorePath> = Vec::new();
        for place in places {
            let one = match place {
                DeValue::Table(table) => self.store_table(table)?,
                other => super::StorePath::new(path(other).ok_or_else(wrong)?),
            };
            if store.iter().any(|known| known.path == one.path) {
                let shown = printable(&one.path.to_string_lossy());
                let remedy = "give each directory once, with the sum of its sizes";
                let got = format!("\"{shown}\" twice");
                return Err(Error::input(
                    WHAT,
                    &self.place,
                    "distinct paths",
                    got,
                    remedy,
                ));
            }
            store.push(one);
        }
        Ok(store)
    }

    fn store_table(&self, table: &DeTable<'_>) -> Result<super::StorePath> {
        for name in table.keys() {
            let name: &str = name.get_ref();
            if !STORE_KEYS.contains(&name) {
                return Err(unknown_key(
                    &self.place,
                    "an entry of memory.store",
                    &STORE_KEYS,
                    name,
                ));
            }
        }
        let given = table.get("path").and_then(|value| path(value.get_ref()));
        let size = match table.get("size") {
            Some(value) => self.size_of(value.get_ref())?,
            None => Size::Auto,
        };
        let rate = |name: &str| {
            let value = table.get(name).map(|value| value.get_ref());
            value.map(|value| self.rate_of(value)).transpose()
        };
        let (read, write) = (rate("read")?, rate("write")?);
        match given {
            Some(path) => Ok(super::StorePath {
                path,
                size,
                read,
                write,
            }),
            None => Err(self.refuse("a path in quotes, or a list of { path, size }")),
        }
    }
}

/// Keys of an entry of `memory.store`.
const STORE_KEYS: [&str; 4] = ["path", "size", "read", "write"];

fn path(value: &DeValue<'_>) -> Option<PathBuf> {
    let text = value.as_str()?;
    (!text.is_empty() && !text.contains('\0')).then(|| PathBuf::from(text))
}

fn float(value: &DeValue<'_>) -> Option<f64> {
    match value {
        DeValue::Float(text) => text.as_str().parse().ok(),
        DeValue::Integer(digits) if digits.radix() == 10 => digits.as_str().parse().ok(),
        _ => None,
    }
}

/// The refusal of a key that `table` does not have.
pub(super) fn unknown_key(place: &str, table: &str, known: &[&str], got: &str) -> Error {
    let nearest = known.iter().min_by_key(|name| distance(name, got));
    let remedy = match nearest {
        Some(nearest) => format!("did you mean {nearest}?"),
        None => "remove it".to_string(),
    };
    let expected = format!("a key of {table} ({})", known.join(", "));
    Error::input(WHAT, place, expected, printable(got), remedy)
}

/// Edits (insert, remove, replace a character) that make one text the other.
pub(crate) fn distance(a: &str, b: &str) -> usize {
    // Longer foreign names are as far as their first characters: the work stays bounded.
    let b: Vec<char> = b.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// A value as errors show it.
pub(super) fn shown(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("\"{}\"", printable(text)),
        DeValue::Integer(digits) => {
            let prefix = match digits.radix() {
                2 => "0b",
                8 => "0o",
                16 => "0x",
                _ => "",
            };
            format!("{prefix}{}", printable(digits.as_str()))
        }
        DeValue::Float(text) => printable(text.as_str()),
        DeValue::Boolean(value) => value.to_string(),
        DeValue::Datetime(value) => printable(&value.to_string()),
        DeValue::Array(values) => {
            let mut parts: Vec<String> =
                values.iter().take(4).map(|v| shown(v.get_ref())).collect();
            if values.len() > 4 {
                parts.push("…".to_string());
            }
            printable(&format!("[{}]", parts.join(", ")))
        }
        DeValue::Table(_) => "a table".to_string(),
    }
}
