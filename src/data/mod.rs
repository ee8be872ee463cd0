//! Data: files to rows, rows to tokens, tokens to micro-batches, and a cursor that resumes exactly.
//!
//! - A [`Dataset`] is all tokens of its sources in file order: in memory where they are few, else
//!   in files of the token cache or in shards as they lie, read row by row.
//! - Deterministic: the same files, tokenizer and settings give the same tokens on any number of
//!   threads; the same seed gives the same micro-batches, from any [`Cursor`] on.
//! - Every error of a row names its file and line.
//! - Loss is never taken on what a user, a system or a tool said.
//! - Every row has a target, so that every step has: the others are left out and counted.
//! - Bounded: [`TOKENS_MAX`] tokens in memory; 16 bytes a row where they are not; `source`'s limits
//!   on lines and lists.
//!
//! It does not guess what a broken row meant, does not fetch anything, and knows no device.
//!
//! What run.toml names is found by `sources` and `registry` (dataset_info.json). Files go through
//! `source` (rows), `formats` and `columns` (their meaning), `templates` (a conversation's text),
//! `tokenize`, `words` and `sample` (tokens and mask), `reading` into a `table`, which `cache`
//! keeps; `shards` are tables as they lie. Then [`Dataset`], `mixture` and `packing` (which rows an
//! epoch takes and which share a sequence), `cursor` (micro-batches). `preview` prints them;
//! `quickstart` is built in.

mod cache;
mod columns;
pub mod cursor;
pub mod formats;
mod mixture;
pub mod packing;
#[cfg(feature = "parquet")]
mod parquet;
pub mod preview;
mod python;
pub mod quickstart;
mod reading;
mod registry;
pub mod sample;
mod shards;
pub mod source;
mod sources;
mod table;
pub mod templates;
pub mod tokenize;
mod words;

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

pub use cursor::{Batches, Cursor, eval_micros};
pub use preview::preview;
pub use tokenize::TextTokenizer;

use crate::config::DataConfig;
use crate::error::{Error, Result, printable};
use mixture::Group;
use table::{TRAINED, Table};

/// A target that has no loss.
pub const IGNORE: u32 = u32::MAX;

/// Most tokens of a dataset in memory.
pub const TOKENS_MAX: u64 = 1 << 32;

/// One micro-batch: sequences one after another, without padding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Micro {
    /// Token ids, `[T]`.
    pub tokens: Vec<u32>,
    /// What each token is to predict: the next token of its sequence, or [`IGNORE`] where that one
    /// is masked or the sequence ends. `[T]`.
    pub targets: Vec<u32>,
    /// Position of each token in its sequence, from 0. `[T]`.
    pub positions: Vec<u32>,
    /// Starts of the sequences and the end: 0, …, T.
    pub bounds: Vec<u32>,
}

impl Micro {
    /// Targets that have a loss.
    pub fn targets_count(&self) -> u64 {
        self.targets
            .iter()
            .filter(|&&target| target != IGNORE)
            .count() as u64
    }
}

/// Positions of `tokens` grouped by id, as (ids, starts, positions): ids ascend, and
/// `positions[starts[i]..starts[i + 1]]` are the positions of `ids[i]`, ascending.
pub fn sorted_tokens(tokens: &[u32]) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let count = u32::try_from(tokens.len()).expect("a micro-batch has fewer than 2^32 tokens");
    let mut positions: Vec<u32> = (0..count).collect();
    // Stable, so that equal ids keep ascending positions.
    positions.sort_by_key(|&position| tokens[position as usize]);
    let (mut ids, mut starts) = (Vec::new(), Vec::new());
    for (index, &position) in (0u32..).zip(&positions) {
        let id = tokens[position as usize];
        if ids.last() != Some(&id) {
            ids.push(id);
            starts.push(index);
        }
    }
    starts.push(count);
    (ids, starts, positions)
}

/// Bins of [`DatasetStats::lengths`].
pub const LENGTH_BINS: usize = 32;

/// What a dataset holds, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatasetStats {
    /// Rows; a document that was split counts once a piece.
    pub rows: u64,
    /// Tokens of all rows.
    pub tokens: u64,
    /// Tokens that are predicted with a loss.
    pub targets: u64,
    /// Tokens of the longest row.
    pub longest: u64,
    /// Rows that were cut at `seq_len`, those without a target then included.
    pub truncated: u64,
    /// Rows that were left out since none of their tokens is predicted with a loss.
    pub without_targets: u64,
    /// Tokens of those.
    pub masked_tokens: u64,
    /// Documents without any text.
    pub left_out: u64,
    /// Rows as the files have them, before they are cut or split, by length: bin `i` counts those
    /// of more than 2^(i−1) and at most 2^i tokens.
    pub lengths: [u64; LENGTH_BINS],
}

impl DatasetStats {
    /// For the end of a line: empty, or `; ` and how many rows were left out without a target.
    pub fn without_targets_text(&self) -> String {
        match self.without_targets {
            0 => String::new(),
            rows => format!("; {rows} rows without a token to train on left out"),
        }
    }

    fn add(&mut self, other: &DatasetStats) {
        self.rows += other.rows;
        self.tokens += other.tokens;
        self.targets += other.targets;
        self.longest = self.longest.max(other.longest);
        self.truncated += other.truncated;
        self.without_targets += other.without_targets;
        self.masked_tokens += other.masked_tokens;
        self.left_out += other.left_out;
        for (sum, more) in self.lengths.iter_mut().zip(&other.lengths) {
            *sum += more;
        }
    }
}

/// The bin of [`DatasetStats::lengths`] for a row of `tokens`.
fn length_bin(tokens: u64) -> usize {
    let bin = u64::BITS - tokens.saturating_sub(1).leading_zeros();
    (bin as usize).min(LENGTH_BINS - 1)
}

/// One row: its tokens, and which of them are trained on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// Token ids.
    pub ids: Vec<u32>,
    /// As long as `ids`: loss is taken where the token is predicted.
    pub trained: Vec<bool>,
}

/// A source of a dataset, in numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceStats {
    /// As run.toml names it.
    pub name: String,
    /// Rows in use.
    pub rows: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Its share of an epoch's rows.
    pub share: f64,
}

/// The tokens of a list of sources, with the mask of the loss.
#[derive(Debug)]
pub struct Dataset {
    tables: Arc<Vec<Table>>,
    /// First row of each table, and the end.
    firsts: Vec<u32>,
    /// Rows in use, ascending; `None` for all.
    selected: Option<Vec<u32>>,
    /// The rows in use of each source.
    groups: Vec<Group>,
    /// Rows are taken by the groups' weights, not all of all.
    mixed: bool,
    stats: DatasetStats,
    notes: Vec<String>,
}

/// Training data and, where run.toml has any, evaluation data; `seed` chooses the rows of
/// `data.eval_split`. `tokenizer` may be missing where every row has ids; ids must be below
/// `vocab_size`.
///
/// An error names the first row that is not right: not JSON, unknown keys, longer than `seq_len`,
/// ids out of range; or that there is nothing to train on.
pub fn load(
    config: &DataConfig,
    seed: u64,
    tokenizer: Option<&TextTokenizer>,
    vocab_size: u64,
) -> Result<(Dataset, Option<Dataset>)> {
    let mut train = Dataset::load(&config.train, config, tokenizer, vocab_size)?;
    train.weigh(&config.mix)?;
    if config.eval_split > 0.0 {
        let (train, eval) = train.split(config.eval_split, seed)?;
        return Ok((train, Some(eval)));
    }
    let eval = match config.eval.is_empty() {
        true => None,
        false => Some(Dataset::load(&config.eval, config, tokenizer, vocab_size)?),
    };
    Ok((train, eval))
}

/// What the lists of sources name that is not there; nothing is read but dataset_info.json.
pub fn faults(config: &DataConfig) -> Vec<Error> {
    let mut faults = Vec::new();
    for entry in config.train.iter().chain(&config.eval) {
        match sources::resolve(std::slice::from_ref(entry), config) {
            Err(fault) => faults.push(fault),
            Ok(found) => {
                let files = found.iter().flat_map(|source| &source.files);
                faults.extend(files.filter_map(|path| {
                    let error = std::fs::File::open(path).err()?;
                    Some(Error::io("open", path, error))
                }));
            }
        }
    }
    faults
}

impl Dataset {
    /// Every row of `entries` in order; as [`load`], without weights and split.
    pub fn load(
        entries: &[PathBuf],
        config: &DataConfig,
        tokenizer: Option<&TextTokenizer>,
        vocab_size: u64,
    ) -> Result<Dataset> {
        let reader = reading::Reader::new(config, tokenizer, vocab_size)?;
        let mut notes = Vec::new();
        let mut sources = Vec::new();
        for source in sources::resolve(entries, config)? {
            let tables = reader.tables(&source, &mut notes)?;
            sources.push((source.name, tables));
        }
        Dataset::of(sources, notes)
    }

    /// The dataset of one document, named `name` in errors.
    pub fn from_text(
        name: &str,
        text: &str,
        config: &DataConfig,
        tokenizer: &TextTokenizer,
    ) -> Result<Dataset> {
        let reader = reading::Reader::new(config, Some(tokenizer), tokenizer.ids_end())?;
        let table = reader.text_table(name, text)?;
        Dataset::of(vec![(name.to_string(), vec![table])], Vec::new())
    }

    fn of(sources: Vec<(String, Vec<Table>)>, notes: Vec<String>) -> Result<Dataset> {
        let (mut tables, mut groups, mut firsts) = (Vec::new(), Vec::new(), vec![0u32]);
        let mut stats = DatasetStats::default();
        for (name, own) in sources {
            let start = *firsts.last().expect("begins with 0");
            for table in own {
                stats.add(&table.stats);
                let end = firsts
                    .last()
                    .expect("begins with 0")
                    .checked_add(table.rows());
                firsts.push(end.ok_or_else(|| {
                    let (expected, remedy) = ("fewer than 2^32 rows", "train on fewer files");
                    Error::input("dataset", &name, expected, "more", remedy)
                })?);
                tables.push(table);
            }
            let rows = start..*firsts.last().expect("pushed");
            groups.push(Group {
                name,
                rows,
                weight: 1.0,
            });
        }
        if stats.rows == 0 {
            return Err(nothing(&tables, &stats));
        }
        let tables = Arc::new(tables);
        Ok(Dataset {
            tables,
            firsts,
            selected: None,
            groups,
            mixed: false,
            stats,
            notes,
        })
    }

    /// What a person should read once: what came from the token cache.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// What it holds, in numbers.
    pub fn stats(&self) -> DatasetStats {
        self.stats
    }

    /// The sources, in order.
    pub fn sources(&self) -> Vec<SourceStats> {
        let counts = mixture::rows_of_groups(&self.groups, self.mixed);
        let total: u64 = counts.iter().sum();
        let of = |(group, count): (&Group, u64)| SourceStats {
            name: group.name.clone(),
            rows: group.rows.len() as u64,
            tokens: group.rows.clone().map(|row| self.row_len(row)).sum(),
            share: count as f64 / total.max(1) as f64,
        };
        self.groups.iter().zip(counts).map(of).collect()
    }

    /// Rows in use.
    pub fn rows(&self) -> u32 {
        match &self.selected {
            Some(rows) => u32::try_from(rows.len()).expect("a part of all rows"),
            None => *self.firsts.last().expect("begins with 0"),
        }
    }

    /// Tokens and mask of a row; [`Error::Io`] where its file cannot be read.
    pub fn row(&self, row: u32) -> Result<Row> {
        let mut marked = Vec::new();
        let (table, inner) = self.find(row);
        table.read(inner, &mut marked)?;
        Ok(Row {
            ids: marked.iter().map(|token| token & !TRAINED).collect(),
            trained: marked.iter().map(|token| token & TRAINED != 0).collect(),
        })
    }

    /// Tokens of a row.
    pub fn row_len(&self, row: u32) -> u64 {
        let (table, inner) = self.find(row);
        table.row_len(inner)
    }

    /// `file:line` of a row.
    pub fn place(&self, row: u32) -> String {
        let (table, inner) = self.find(row);
        table.place(inner)
    }

    /// A checksum of tokens, mask and rows: what a resumed run must find again.
    pub fn fingerprint(&self) -> u128 {
        if let [table] = &self.tables[..] {
            return table.fingerprint;
        }
        let mut hash = XxHash3_128::new();
        for table in self.tables.iter() {
            hash.write(&table.fingerprint.to_le_bytes());
        }
        hash.finish_128()
    }

    /// The table of a row, and the row's number there.
    fn find(&self, row: u32) -> (&Table, u32) {
        let row = self
            .selected
            .as_ref()
            .map_or(row, |rows| rows[row as usize]);
        let table = self.firsts.partition_point(|&first| first <= row) - 1;
        (&self.tables[table], row - self.firsts[table])
    }

    /// Rows of `epoch` in its order.
    fn epoch_order(&self, seed: u64, epoch: u64, shuffled: bool) -> Vec<u32> {
        match self.mixed {
            true => mixture::epoch_order(&self.groups, seed, epoch, shuffled),
            false => packing::epoch_order(self.rows(), seed, epoch, shuffled),
        }
    }

    /// Takes rows by weights, one a source; all rows where there are none.
    fn weigh(&mut self, weights: &[f64]) -> Result<()> {
        if weights.is_empty() {
            return Ok(());
        }
        for (group, &weight) in self.groups.iter_mut().zip(weights) {
            if group.rows.is_empty() {
                let remedy = "leave the source and its weight out";
                return Err(Error::input(
                    "dataset",
                    &group.name,
                    "at least one row",
                    "none",
                    remedy,
                ));
            }
            group.weight = weight;
        }
        self.mixed = true;
        Ok(())
    }

    /// Training and evaluation rows: of each source a share below 1, or a count, chosen by `seed`.
    fn split(self, amount: f64, seed: u64) -> Result<(Dataset, Dataset)> {
        let (train, eval) = mixture::split(&self.groups, amount, seed)?;
        let part = |(selected, groups): (Vec<u32>, Vec<Group>), mixed| Dataset {
            tables: self.tables.clone(),
            firsts: self.firsts.clone(),
            selected: Some(selected),
            groups,
            mixed,
            stats: self.stats,
            notes: Vec::new(),
        };
        let (mut train, mut eval) = (part(train, self.mixed), part(eval, false));
        eval.count()?;
        train.stats.rows -= eval.stats.rows;
        train.stats.tokens -= eval.stats.tokens;
        train.stats.targets -= eval.stats.targets;
        train.stats.longest = (0..train.rows())
            .map(|row| train.row_len(row))
            .max()
            .unwrap_or(0);
        train.notes = self.notes;
        Ok((train, eval))
    }

    /// Counts the rows in use anew; what was left out is the training data's.
    fn count(&mut self) -> Result<()> {
        let mut stats = DatasetStats::default();
        for row in 0..self.rows() {
            let row = self.row(row)?;
            stats.rows += 1;
            stats.tokens += row.ids.len() as u64;
            stats.longest = stats.longest.max(row.ids.len() as u64);
            stats.targets += row.trained.iter().skip(1).filter(|&&t| t).count() as u64;
            stats.lengths[length_bin(row.ids.len() as u64)] += 1;
        }
        self.stats = stats;
        Ok(())
    }

    /// Appends a row to a micro-batch, as a sequence of its own. `marked` is room to read into.
    fn append_row(&self, row: u32, marked: &mut Vec<u32>, micro: &mut Micro) -> Result<()> {
        let (table, inner) = self.find(row);
        marked.clear();
        table.read(inner, marked)?;
        if micro.bounds.is_empty() {
            micro.bounds.push(0);
        }
        micro
            .tokens
            .extend(marked.iter().map(|token| token & !TRAINED));
        let next = marked.iter().skip(1).map(|&token| match token & TRAINED {
            0 => IGNORE,
            _ => token & !TRAINED,
        });
        micro.targets.extend(next.chain([IGNORE]));
        let length = u32::try_from(marked.len()).expect("at most seq_len");
        micro.positions.extend(0..length);
        micro.bounds.push(
            u32::try_from(micro.tokens.len()).expect("a micro-batch has fewer than 2^32 tokens"),
        );
        Ok(())
    }
}

/// The error of a dataset without rows.
fn nothing(tables: &[Table], stats: &DatasetStats) -> Error {
    let files: Vec<&str> = tables
        .iter()
        .flat_map(|table| &table.files)
        .map(String::as_str)
        .collect();
    let place = match files.is_empty() {
        true => "data.train".to_string(),
        false => printable(&files.join(", ")),
    };
    if stats.without_targets == 0 {
        let remedy = "name a file that has rows";
        return Error::input("dataset", place, "at least one row", "none", remedy);
    }
    let got = format!(
        "{} tokens in {} rows, all masked",
        stats.masked_tokens, stats.without_targets
    );
    Error::input(
        "dataset",
        place,
        "at least one token to train on",
        got,
        "look at `terrace data preview`: is there a turn of the assistant, or a label that is not \
         -100",
    )
}
