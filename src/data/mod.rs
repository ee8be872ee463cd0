//! Data: files to rows, rows to tokens, tokens to micro-batches, and a cursor that resumes exactly.
//!
//! - A [`Dataset`] is all tokens of its files in file order: 4 bytes and a bit a token, read once.
//! - Deterministic: the same files, tokenizer and settings give the same tokens on any number of
//!   threads; the same seed gives the same micro-batches, from any [`Cursor`] on.
//! - Every error of a row names its file and line.
//! - Loss is never taken on what a user, a system or a tool said.
//! - Every row has a target, so that every step has: the others are left out and counted.
//! - Bounded: [`TOKENS_MAX`] tokens, `source`'s limits on lines and lists.
//!
//! It does not guess what a broken row meant, does not fetch anything, and knows no device.
//!
//! Files go through `source` (rows), `formats` (their meaning), `templates` (a conversation's
//! text), `tokenize` and `sample` (tokens and mask), [`Dataset`], `packing` (which rows share a
//! sequence), `cursor` (micro-batches). `preview` prints them; `quickstart` is built in.

pub mod cursor;
pub mod formats;
pub mod packing;
pub mod preview;
pub mod quickstart;
pub mod sample;
pub mod source;
pub mod templates;
pub mod tokenize;

use std::path::PathBuf;

use rayon::prelude::*;
use serde_json::Value;
use twox_hash::XxHash3_128;

pub use cursor::{Batches, Cursor, eval_micros};
pub use preview::preview;
pub use tokenize::TextTokenizer;

use crate::config::{DataConfig, DataFormat};
use crate::error::{Error, Result, printable};
use formats::Fault;
use sample::{Sample, Sampler};
use source::{Batch, RawRow};

/// A target that has no loss.
pub const IGNORE: u32 = u32::MAX;

/// Most tokens of a dataset.
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

/// What a dataset holds, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
    /// Documents without any text.
    pub left_out: u64,
}

impl DatasetStats {
    /// For the end of a line: empty, or `; ` and how many rows were left out without a target.
    pub fn without_targets_text(&self) -> String {
        match self.without_targets {
            0 => String::new(),
            rows => format!("; {rows} rows without a token to train on left out"),
        }
    }
}

/// Where a row came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Origin {
    file: u32,
    /// Line, or place in a list; `u32::MAX` stands for itself and all above.
    number: u32,
}

/// The tokens of a set of files, with the mask of the loss.
#[derive(Debug)]
pub struct Dataset {
    tokens: Vec<u32>,
    /// A bit a token: loss is taken where it is predicted.
    trained: Vec<u64>,
    /// Where each row begins in `tokens`, and the end.
    starts: Vec<u64>,
    /// As many as rows.
    origins: Vec<Origin>,
    files: Vec<String>,
    stats: DatasetStats,
}

impl Dataset {
    /// Reads and tokenizes `files` in order. `tokenizer` may be missing where every row has
    /// `input_ids`; ids must be below `vocab_size`.
    ///
    /// An error names the first row that is not right: not JSON, unknown keys, longer than
    /// `seq_len`, ids out of range; or that there is nothing to train on.
    pub fn load(
        files: &[PathBuf],
        config: &DataConfig,
        tokenizer: Option<&TextTokenizer>,
        vocab_size: u64,
    ) -> Result<Dataset> {
        let mut reading = Reading::new(config, tokenizer, vocab_size)?;
        for path in files {
            reading.begin_file(path.display().to_string());
            source::read_rows(path, &mut |batch| reading.add(batch))?;
        }
        reading.finish()
    }

    /// The dataset of one document, named `name` in errors.
    pub fn from_text(
        name: &str,
        text: &str,
        config: &DataConfig,
        tokenizer: &TextTokenizer,
    ) -> Result<Dataset> {
        let mut reading = Reading::new(config, Some(tokenizer), tokenizer.ids_end())?;
        reading.begin_file(name.to_string());
        reading.add(vec![(1, RawRow::Text(text.to_string()))])?;
        reading.finish()
    }

    /// What it holds, in numbers.
    pub fn stats(&self) -> DatasetStats {
        self.stats
    }

    /// Rows.
    pub fn rows(&self) -> u32 {
        u32::try_from(self.origins.len()).expect("checked as rows were added")
    }

    /// Token ids of a row.
    pub fn row(&self, row: u32) -> &[u32] {
        let range = self.range(row);
        &self.tokens[range.start..range.end]
    }

    /// Tokens of a row.
    pub fn row_len(&self, row: u32) -> u64 {
        self.starts[row as usize + 1] - self.starts[row as usize]
    }

    /// Whether loss is taken on token `index` of a row, where it is predicted.
    pub fn is_trained(&self, row: u32, index: usize) -> bool {
        bit(&self.trained, self.range(row).start + index)
    }

    /// `file:line` of a row.
    pub fn place(&self, row: u32) -> String {
        let origin = self.origins[row as usize];
        format!("{}:{}", self.files[origin.file as usize], origin.number)
    }

    /// A checksum of tokens, mask and rows: what a resumed run must find again.
    pub fn fingerprint(&self) -> u128 {
        let mut hash = XxHash3_128::new();
        for &token in &self.tokens {
            hash.write(&token.to_le_bytes());
        }
        for &word in self.trained.iter().chain(&self.starts) {
            hash.write(&word.to_le_bytes());
        }
        hash.finish_128()
    }

    fn range(&self, row: u32) -> std::ops::Range<usize> {
        let at = |index: usize| usize::try_from(self.starts[index]).expect("an index into memory");
        at(row as usize)..at(row as usize + 1)
    }

    /// Appends a row to a micro-batch, as a sequence of its own.
    fn append_row(&self, row: u32, micro: &mut Micro) {
        let range = self.range(row);
        let tokens = &self.tokens[range.clone()];
        if micro.bounds.is_empty() {
            micro.bounds.push(0);
        }
        micro.tokens.extend_from_slice(tokens);
        for index in 1..=tokens.len() {
            let trained = index < tokens.len() && bit(&self.trained, range.start + index);
            micro
                .targets
                .push(if trained { tokens[index] } else { IGNORE });
        }
        let length = u32::try_from(tokens.len()).expect("at most seq_len");
        micro.positions.extend(0..length);
        micro.bounds.push(
            u32::try_from(micro.tokens.len()).expect("a micro-batch has fewer than 2^32 tokens"),
        );
    }
}

fn bit(words: &[u64], index: usize) -> bool {
    words[index / 64] >> (index % 64) & 1 == 1
}

/// A dataset while its files are read.
struct Reading<'a> {
    dataset: Dataset,
    config: &'a DataConfig,
    tokenizer: Option<&'a TextTokenizer>,
    vocab_size: u64,
    seq_len: usize,
    /// Of the file that is being read, once its first row was seen.
    format: Option<DataFormat>,
    /// Of the rows without targets.
    tokens_left_out: u64,
}

impl<'a> Reading<'a> {
    fn new(
        config: &'a DataConfig,
        tokenizer: Option<&'a TextTokenizer>,
        vocab_size: u64,
    ) -> Result<Reading<'a>> {
        let seq_len = usize::try_from(config.seq_len)
            .ok()
            .filter(|&tokens| (2..=1 << 30).contains(&tokens));
        let seq_len = seq_len.ok_or_else(|| {
            let got = config.seq_len.to_string();
            Error::input(
                "run.toml",
                "data.seq_len",
                "2 to 1073741824 tokens",
                got,
                "set data.seq_len",
            )
        })?;
        Ok(Reading {
            dataset: Dataset {
                tokens: Vec::new(),
                trained: Vec::new(),
                starts: vec![0],
                origins: Vec::new(),
                files: Vec::new(),
                stats: DatasetStats::default(),
            },
            config,
            tokenizer,
            vocab_size,
            seq_len,
            format: None,
            tokens_left_out: 0,
        })
    }

    fn begin_file(&mut self, name: String) {
        self.dataset.files.push(name);
        self.format = None;
    }

    fn file(&self) -> &str {
        self.dataset.files.last().expect("begin_file came first")
    }

    /// Tokenizes a batch on all threads and appends it in order.
    fn add(&mut self, batch: Batch) -> Result<()> {
        let format = match self.format {
            Some(format) => format,
            None => self.first_format(&batch)?,
        };
        self.format = Some(format);
        let template = self.tokenizer.and_then(TextTokenizer::template);
        let calls_as_text = template.is_some_and(|template| !template.writes_tool_calls());
        let (tokenizer, vocab_size) = (self.tokenizer, self.vocab_size);
        let samples: Vec<(u64, Result<Sample, Fault>)> = batch
            .into_par_iter()
            .map_init(
                || Sampler::new(tokenizer, vocab_size),
                |sampler, (number, raw)| {
                    let sample = sampler.as_ref().map_err(Fault::clone).and_then(|sampler| {
                        let row = match raw {
                            RawRow::Line(line) => {
                                formats::read(&parse(&line)?, format, calls_as_text)?
                            }
                            RawRow::Item(item) => formats::read(&item, format, calls_as_text)?,
                            RawRow::Text(text) => formats::Row::Text(text),
                        };
                        sampler.sample(row)
                    });
                    (number, sample)
                },
            )
            .collect();
        for (number, sample) in samples {
            let place = || format!("{}:{number}", self.file());
            let sample = sample.map_err(|fault| fault.at("dataset", place()))?;
            self.push(&sample, number)?;
        }
        Ok(())
    }

    /// The format by name, or by the first row.
    fn first_format(&self, batch: &Batch) -> Result<DataFormat> {
        let Some((number, first)) = batch.first() else {
            return Ok(self.config.format);
        };
        let place = || format!("{}:{number}", self.file());
        let named = self.config.format;
        let found = match first {
            RawRow::Text(_) if matches!(named, DataFormat::Auto | DataFormat::Text) => {
                Ok(DataFormat::Text)
            }
            RawRow::Text(_) => Err(Fault::new(
                "JSON rows, as data.format names them",
                "a plain text",
                "leave data.format on auto, or give a .jsonl file",
            )),
            _ if named != DataFormat::Auto => Ok(named),
            RawRow::Line(line) => parse(line).and_then(|row| formats::detect(&row)),
            RawRow::Item(item) => formats::detect(item),
        };
        found.map_err(|fault| fault.at("dataset", place()))
    }

    /// Appends a row: split if it is a document, cut or refused if it is too long.
    fn push(&mut self, sample: &Sample, number: u64) -> Result<()> {
        let length = sample.ids.len();
        if length == 0 {
            self.dataset.stats.left_out += 1;
            return Ok(());
        }
        if length > self.seq_len && !sample.splits && !self.config.truncate {
            return Err(Error::input(
                "dataset",
                format!("{}:{number}", self.file()),
                format!("at most {} tokens, data.seq_len", self.seq_len),
                format!("{length} tokens"),
                "set data.truncate = true to cut it, or raise data.seq_len",
            ));
        }
        let kept = if sample.splits {
            length
        } else {
            length.min(self.seq_len)
        };
        self.dataset.stats.truncated += u64::from(kept < length);
        for start in (0..kept).step_by(self.seq_len) {
            let end = (start + self.seq_len).min(kept);
            self.push_row(&sample.ids[start..end], &sample.trained[start..end], number)?;
        }
        Ok(())
    }

    /// Appends a row that fits, unless nothing of it is trained on: alone in a step, it would be a
    /// step without a loss. Nothing predicts a row's first token.
    fn push_row(&mut self, ids: &[u32], trained: &[bool], number: u64) -> Result<()> {
        let dataset = &mut self.dataset;
        let targets = trained.iter().skip(1).filter(|&&trained| trained).count() as u64;
        if targets == 0 {
            dataset.stats.without_targets += 1;
            self.tokens_left_out += ids.len() as u64;
            return Ok(());
        }
        let total = dataset.tokens.len() as u64 + ids.len() as u64;
        // Rows have a token at least, so that this also keeps their count below 2^32.
        if total >= TOKENS_MAX {
            return Err(Error::input(
                "dataset",
                format!("{}:{number}", self.file()),
                format!("fewer than {TOKENS_MAX} tokens in all"),
                "more",
                "train on the files one after another",
            ));
        }
        for &trained in trained {
            let index = dataset.stats.tokens;
            if index.is_multiple_of(64) {
                dataset.trained.push(0);
            }
            let word = dataset
                .trained
                .last_mut()
                .expect("pushed with the first token");
            *word |= u64::from(trained) << (index % 64);
            dataset.stats.tokens += 1;
        }
        dataset.tokens.extend_from_slice(ids);
        dataset.starts.push(total);
        dataset.origins.push(Origin {
            file: u32::try_from(dataset.files.len() - 1).unwrap_or(u32::MAX),
            number: u32::try_from(number).unwrap_or(u32::MAX),
        });
        dataset.stats.rows += 1;
        dataset.stats.longest = dataset.stats.longest.max(ids.len() as u64);
        dataset.stats.targets += targets;
        Ok(())
    }

    fn finish(mut self) -> Result<Dataset> {
        let place = self.dataset.files.join(", ");
        let place = if place.is_empty() {
            "data.train".to_string()
        } else {
            printable(&place)
        };
        let masked = self.dataset.stats.without_targets;
        if self.dataset.origins.is_empty() && masked == 0 {
            return Err(Error::input(
                "dataset",
                place,
                "at least one row",
                "none",
                "name a file that has rows",
            ));
        }
        if self.dataset.origins.is_empty() {
            return Err(Error::input(
                "dataset",
                place,
                "at least one token to train on",
                format!(
                    "{} tokens in {masked} rows, all masked",
                    self.tokens_left_out
                ),
                "look at `terrace data preview`: is there a turn of the assistant, \
                 or a label that is not -100",
            ));
        }
        self.dataset.tokens.shrink_to_fit();
        Ok(self.dataset)
    }
}

/// A line as JSON.
fn parse(line: &[u8]) -> Result<Value, Fault> {
    let text = std::str::from_utf8(line).map_err(|error| {
        Fault::new(
            "UTF-8",
            format!("other bytes at byte {} of the line", error.valid_up_to()),
            "save the file as UTF-8",
        )
    })?;
    serde_json::from_str(text).map_err(|error| {
        let got = error
            .to_string()
            .replace(" at line 1 column ", " at column ");
        Fault::new(
            "a JSON object a line",
            printable(&got),
            "write each row on one line, or the file as one list […]",
        )
    })
}
