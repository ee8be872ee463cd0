//! Sources to tables: rows are tokenized on all threads and appended in order.
//!
//! - A source of rows is one table, in memory or through the token cache; a shard is a table of its
//!   own.
//! - `data.max_samples` counts rows as the files have them; what is behind them is not read.

use std::fs::File;
use std::io::Read;

use rayon::prelude::*;
use serde_json::Value;
use twox_hash::XxHash3_128;

use super::cache::Cache;
use super::columns::Columns;
use super::formats::{self, Fault};
use super::sample::{Sample, Sampler};
use super::source::{self, Batch, RawRow};
use super::sources::Source;
use super::table::{Sink, TRAINED, Table, TableBuilder};
use super::{TextTokenizer, length_bin, shards};
use crate::config::{DataConfig, DataFormat, TokenCache};
use crate::error::{Error, Result, printable};

/// Named in every key of the cache: another number, other tokens from the same files.
const READING_VERSION: u64 = 1;

/// Whether a write met the end of a disk or a quota.
fn is_full(error: &Error) -> bool {
    use std::io::ErrorKind::{QuotaExceeded, StorageFull};
    match error {
        Error::Io { source, .. } => [StorageFull, QuotaExceeded].contains(&source.kind()),
        _ => false,
    }
}

/// What every source of a dataset is read with.
pub(super) struct Reader<'a> {
    config: &'a DataConfig,
    tokenizer: Option<&'a TextTokenizer>,
    vocab_size: u64,
    seq_len: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(
        config: &'a DataConfig,
        tokenizer: Option<&'a TextTokenizer>,
        vocab_size: u64,
    ) -> Result<Reader<'a>> {
        let seq_len = usize::try_from(config.seq_len)
            .ok()
            .filter(|&tokens| (2..=1 << 30).contains(&tokens));
        let seq_len = seq_len.ok_or_else(|| {
            let got = config.seq_len.to_string();
            let (expected, remedy) = ("2 to 1073741824 tokens", "set data.seq_len");
            Error::input("run.toml", "data.seq_len", expected, got, remedy)
        })?;
        // The highest bit of a token is the mask's.
        let vocab_size = vocab_size.min(u64::from(TRAINED));
        Ok(Reader {
            config,
            tokenizer,
            vocab_size,
            seq_len,
        })
    }

    /// The tables of a source.
    pub(super) fn tables(&self, source: &Source, notes: &mut Vec<String>) -> Result<Vec<Table>> {
        if !source.shards {
            return Ok(vec![self.rows_table(source, notes)?]);
        }
        if !matches!(self.config.format, DataFormat::Auto | DataFormat::Tokens) {
            let expected = "rows, as data.format names them";
            let remedy = "leave data.format on auto";
            return Err(Error::input(
                "dataset",
                &source.name,
                expected,
                "a .bin file",
                remedy,
            ));
        }
        let mut left = self.config.max_samples;
        let mut tables = Vec::with_capacity(source.files.len());
        for path in &source.files {
            let table = shards::open(path, self.config.seq_len, self.vocab_size, left)?;
            left = left.map(|left| left - u64::from(table.rows()));
            tables.push(table);
            if left == Some(0) {
                break;
            }
        }
        Ok(tables)
    }

    /// The table of one document.
    pub(super) fn text_table(&self, name: &str, text: &str) -> Result<Table> {
        let mut reading = Reading::new(self, TableBuilder::new(Sink::Memory(Vec::new())), None);
        reading.begin_file(name.to_string());
        reading.add(vec![(1, RawRow::Text(text.to_string()))])?;
        Ok(reading.table.into_memory())
    }

    fn rows_table(&self, source: &Source, notes: &mut Vec<String>) -> Result<Table> {
        let bytes = source.files.iter().filter_map(|path| path.metadata().ok());
        let bytes = bytes.map(|metadata| metadata.len()).sum();
        let in_memory = || {
            let builder = TableBuilder::new(Sink::Memory(Vec::new()));
            Ok(self.read(source, builder)?.into_memory())
        };
        let Some(cache) = Cache::of(self.config, bytes)? else {
            return in_memory();
        };
        match self.cached_table(source, &cache, notes) {
            // Nobody asked for that directory: a full disk there must not keep a run from starting.
            Err(error) if self.config.cache == TokenCache::Auto && is_full(&error) => {
                let name = printable(&source.name);
                notes.push(format!(
                    "warning: {name}: tokens are kept in memory: {error}"
                ));
                in_memory()
            }
            table => table,
        }
    }

    /// The table of a source's rows, from the cache or kept there.
    fn cached_table(
        &self,
        source: &Source,
        cache: &Cache,
        notes: &mut Vec<String>,
    ) -> Result<Table> {
        let key = self.key(source)?;
        let name = printable(&source.name);
        if let Some(table) = cache.open(key) {
            notes.push(format!(
                "{name}: tokens read from {}",
                cache.path(key).display()
            ));
            return Ok(table);
        }
        let builder = cache.builder()?;
        let part = builder.part();
        let builder = self.read(source, builder);
        let changed = builder.is_ok() && key != self.key(source)?;
        if let Some(part) = part.filter(|_| builder.is_err() || changed) {
            std::fs::remove_file(part).ok();
        }
        let builder = builder?;
        if changed {
            let (expected, got) = (
                "files that stay as they are while they are read",
                "a change",
            );
            let remedy = "start again when the files are written";
            return Err(Error::input("dataset", &source.name, expected, got, remedy));
        }
        let table = cache.finish(builder, key)?;
        notes.push(format!(
            "{name}: tokens kept in {}",
            cache.path(key).display()
        ));
        Ok(table)
    }

    fn read(&self, source: &Source, builder: TableBuilder) -> Result<TableBuilder> {
        let mut reading = Reading::new(self, builder, source.columns.as_ref());
        let cuts = self.tokenizer.is_some_and(TextTokenizer::cuts_lines);
        for path in &source.files {
            reading.begin_file(path.display().to_string());
            if !source::read_rows(path, cuts, &mut |batch| reading.add(batch))? {
                break;
            }
        }
        Ok(reading.table)
    }

    /// A checksum of all that the tokens of a source depend on.
    fn key(&self, source: &Source) -> Result<u128> {
        let mut hash = XxHash3_128::new();
        let config = self.config;
        let settings = format!(
            "{READING_VERSION} {} {:?} {} {} {:?} {} {:032x} {:?} {:?}",
            env!("CARGO_PKG_VERSION"),
            config.format,
            config.seq_len,
            config.truncate,
            config.max_samples,
            self.vocab_size,
            self.tokenizer.map_or(0, TextTokenizer::fingerprint),
            source.columns,
            source.files,
        );
        hash.write(settings.as_bytes());
        let mut buffer = vec![0; 1 << 20];
        for path in &source.files {
            let failed = |error| Error::io("read", path, error);
            if path.is_dir() {
                return Err(source::refuse_directory(path));
            }
            let mut file = File::open(path).map_err(|error| Error::io("open", path, error))?;
            let mut bytes = 0;
            loop {
                let read = file.read(&mut buffer).map_err(failed)?;
                if read == 0 {
                    break;
                }
                hash.write(&buffer[..read]);
                bytes += read as u64;
            }
            hash.write(&bytes.to_le_bytes());
        }
        Ok(hash.finish_128())
    }
}

/// A table while its files are read.
struct Reading<'a> {
    reader: &'a Reader<'a>,
    table: TableBuilder,
    columns: Option<&'a Columns>,
    /// Of the file that is being read, once its first row was seen.
    format: Option<DataFormat>,
    /// Rows that are still wanted.
    left: u64,
    /// Tokens of a long text that do not fill a row.
    rest: Vec<u32>,
}

impl<'a> Reading<'a> {
    fn new(reader: &'a Reader<'a>, table: TableBuilder, columns: Option<&'a Columns>) -> Self {
        let left = reader.config.max_samples.unwrap_or(u64::MAX);
        Reading {
            reader,
            table,
            columns,
            format: None,
            left,
            rest: Vec::new(),
        }
    }

    fn begin_file(&mut self, name: String) {
        self.table.files.push(name);
        self.format = None;
    }

    fn file(&self) -> &str {
        self.table.files.last().expect("begin_file came first")
    }

    /// Tokenizes a batch on all threads and appends it in order. Whether more rows are wanted.
    fn add(&mut self, mut batch: Batch) -> Result<bool> {
        let left = usize::try_from(self.left).unwrap_or(usize::MAX);
        batch.truncate(left);
        if let [(number, RawRow::Piece { text, first, last })] = &batch[..] {
            self.add_piece(*number, text, *first, *last)?;
            self.left -= u64::from(*last);
            return Ok(self.left > 0);
        }
        self.left -= batch.len() as u64;
        let format = match self.format {
            Some(format) => format,
            None if self.columns.is_some() => DataFormat::Auto,
            None => self.first_format(&batch)?,
        };
        self.format = Some(format);
        let tokenizer = self.reader.tokenizer;
        let template = tokenizer.and_then(TextTokenizer::template);
        let calls_as_text = template.is_some_and(|template| !template.writes_tool_calls());
        let (vocab_size, columns) = (self.reader.vocab_size, self.columns);
        let read = |value: &Value| match columns {
            Some(columns) => columns.read(value, calls_as_text),
            None => formats::read(value, format, calls_as_text),
        };
        let samples: Vec<(u64, Result<Sample, Fault>)> = batch
            .into_par_iter()
            .map_init(
                || Sampler::new(tokenizer, vocab_size),
                |sampler, (number, raw)| {
                    let sample = sampler.as_ref().map_err(Fault::clone).and_then(|sampler| {
                        let row = match raw {
                            RawRow::Line(line) => read(&parse(&line)?)?,
                            RawRow::Item(item) => read(&item)?,
                            RawRow::Text(text) | RawRow::Piece { text, .. } => {
                                formats::Row::Text(text)
                            }
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
        Ok(self.left > 0)
    }

    /// Appends a piece of a text that is too long to be in memory whole.
    fn add_piece(&mut self, number: u64, text: &str, first: bool, last: bool) -> Result<()> {
        let tokenizer = self
            .reader
            .tokenizer
            .expect("pieces are made for a tokenizer");
        let ids = tokenizer.document_piece(text, first, last);
        let place = || format!("{}:{number}", self.file());
        self.rest
            .extend(ids.map_err(|fault| fault.at("dataset", place()))?);
        let seq_len = self.reader.seq_len;
        let whole = match last {
            true => self.rest.len(),
            false => self.rest.len() / seq_len * seq_len,
        };
        let trained = vec![true; seq_len];
        for row in self.rest[..whole].chunks(seq_len) {
            self.table.push(row, &trained[..row.len()], number)?;
        }
        self.rest.drain(..whole);
        if last {
            self.table.stats.lengths[super::LENGTH_BINS - 1] += 1;
        }
        Ok(())
    }

    /// The format by name, or by the first row.
    fn first_format(&self, batch: &Batch) -> Result<DataFormat> {
        let named = self.reader.config.format;
        let Some((number, first)) = batch.first() else {
            return Ok(named);
        };
        let place = || format!("{}:{number}", self.file());
        let found = match first {
            RawRow::Text(_) | RawRow::Piece { .. }
                if matches!(named, DataFormat::Auto | DataFormat::Text) =>
            {
                Ok(DataFormat::Text)
            }
            RawRow::Text(_) | RawRow::Piece { .. } => Err(Fault::new(
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
        let (length, seq_len) = (sample.ids.len(), self.reader.seq_len);
        if length == 0 {
            self.table.stats.left_out += 1;
            return Ok(());
        }
        if length > seq_len && !sample.splits && !self.reader.config.truncate {
            return Err(Error::input(
                "dataset",
                format!("{}:{number}", self.file()),
                format!("at most {seq_len} tokens, data.seq_len"),
                format!("{length} tokens"),
                "set data.truncate = true to cut it, or raise data.seq_len",
            ));
        }
        self.table.stats.lengths[length_bin(length as u64)] += 1;
        let kept = if sample.splits {
            length
        } else {
            length.min(seq_len)
        };
        self.table.stats.truncated += u64::from(kept < length);
        // Nothing predicts a row's first token, and alone in a step a row without a target would
        // be a step without a loss: the builder leaves such rows out.
        for start in (0..kept).step_by(seq_len) {
            let end = (start + seq_len).min(kept);
            self.table
                .push(&sample.ids[start..end], &sample.trained[start..end], number)?;
        }
        Ok(())
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
