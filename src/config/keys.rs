//! Every key of run.toml, once: its name, meaning, default, how it is read and written, and
//! whether it may change when a run is resumed.
//!
//! The template, the writer, the reader and the comparison on resume are loops over [`TABLES`].

mod checkpoint;
mod data;
mod log;
mod memory;
mod model;
mod optimizer;
mod train;

use super::RunConfig;
use super::given::Given;
use crate::error::Result;

/// What a change of a key means to a run that is resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Changes nothing that is computed from the state at hand.
    Free,
    /// Changes what comes; allowed, and written to the log.
    Logged,
    /// Would make it another run; refused without `--resume-changed`.
    Forbidden,
}

/// A key of run.toml.
pub(super) struct Key {
    pub(super) table: &'static str,
    pub(super) name: &'static str,
    pub(super) class: Class,
    /// Its default as TOML; empty where there is none.
    pub(super) default: &'static str,
    /// What the template shows where there is no default; `#` before it keeps it a comment.
    pub(super) example: &'static str,
    /// For the template: meaning, unit, range; one comment a line.
    pub(super) meaning: &'static str,
    pub(super) set: fn(&mut RunConfig, &Given<'_>) -> Result<()>,
    /// As TOML; `None` where nothing is set.
    pub(super) get: fn(&RunConfig) -> Option<String>,
}

impl Key {
    /// `train.steps`
    pub(super) fn path(&self) -> String {
        format!("{}.{}", self.table, self.name)
    }
}

/// A table of run.toml.
pub(super) struct Table {
    pub(super) name: &'static str,
    /// For the template.
    pub(super) about: &'static str,
    /// In the order in which a file has them.
    pub(super) keys: &'static [Key],
}

/// The tables, in the order in which a file has them.
pub(super) static TABLES: [Table; 7] = [
    Table {
        name: "model",
        about: "What is trained.",
        keys: model::KEYS,
    },
    Table {
        name: "data",
        about: "What it is trained on.",
        keys: data::KEYS,
    },
    Table {
        name: "train",
        about: "How.",
        keys: train::KEYS,
    },
    Table {
        name: "optimizer",
        about: "What the optimizer keeps.",
        keys: optimizer::KEYS,
    },
    Table {
        name: "memory",
        about: "Where weights, gradients and optimizer state live. Never changes a result.",
        keys: memory::KEYS,
    },
    Table {
        name: "checkpoint",
        about: "What a run can be resumed from.",
        keys: checkpoint::KEYS,
    },
    Table {
        name: "log",
        about: "What it shows of itself.",
        keys: log::KEYS,
    },
];

/// All keys, in the order in which a file has them.
pub(super) fn keys() -> impl Iterator<Item = &'static Key> {
    TABLES.iter().flat_map(|table| table.keys)
}

/// Most of what counts steps or epochs.
const COUNT_MAX: u64 = 1_000_000_000_000;
/// The largest integer of TOML.
const SEED_MAX: u64 = i64::MAX as u64;

/// `key!(table.name, class, default, example, meaning, set, get)`
macro_rules! key {
    ($table:ident . $name:ident, $class:ident, $default:literal, $example:literal, $meaning:expr,
     |$given:ident| $read:expr, |$value:ident| $write:expr) => {
        Key {
            table: stringify!($table),
            name: stringify!($name),
            class: super::Class::$class,
            default: $default,
            example: $example,
            meaning: $meaning,
            set: |config, $given| {
                config.$table.$name = $read;
                Ok(())
            },
            get: |config| {
                let $value = &config.$table.$name;
                $write
            },
        }
    };
}

use key;
