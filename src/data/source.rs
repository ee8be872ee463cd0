//! Files to rows, in bounded batches: JSON lines, a JSON list, or a plain text.
//!
//! - What a `.json` or `.jsonl` file is, its first character says: `[` begins a list.
//! - A byte-order mark, blank lines and Windows line ends are taken; the text of a `.txt` file is
//!   left as it is otherwise.
//! - Memory is bounded: [`LINE_BYTES_MAX`] a line, [`LIST_BYTES_MAX`] a list or a text, and
//!   [`BATCH_BYTES`] of lines at a time.
//!
//! Not here: what a row means (`formats`).

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde::de::{DeserializeSeed, Deserializer, SeqAccess, Visitor};
use serde_json::Value;

use crate::error::{Error, Result, printable};

/// Most bytes of a line.
pub const LINE_BYTES_MAX: u64 = 64 << 20;
/// Most bytes of a file that is one JSON list or one text; JSON lines may be longer.
pub const LIST_BYTES_MAX: u64 = 1 << 30;
/// Bytes of lines that are read before they are tokenized.
const BATCH_BYTES: usize = 8 << 20;
/// Rows of a list that are read before they are tokenized.
const BATCH_ROWS: usize = 1024;

/// A row as it stands in its file.
#[derive(Clone, Debug)]
pub enum RawRow {
    /// A line, not yet parsed.
    Line(Vec<u8>),
    /// An item of a list.
    Item(Value),
    /// A whole text.
    Text(String),
}

/// Rows with the number of their line, or of their place in a list, from 1.
pub type Batch = Vec<(u64, RawRow)>;

/// Reads `path` and hands its rows on in order.
pub fn read_rows(path: &Path, sink: &mut dyn FnMut(Batch) -> Result<()>) -> Result<()> {
    let file = File::open(path).map_err(|error| Error::io("open", path, error))?;
    let metadata = file
        .metadata()
        .map_err(|error| Error::io("read", path, error))?;
    if !metadata.is_file() {
        let got = if metadata.is_dir() {
            "a directory"
        } else {
            "something else"
        };
        return Err(refused(path, "a file", got, "name the files themselves"));
    }
    let extension = path
        .extension()
        .and_then(|extension| extension.to_str())
        .unwrap_or_default();
    let mut reader = BufReader::with_capacity(1 << 20, file);
    skip_mark(&mut reader, path)?;
    match extension.to_ascii_lowercase().as_str() {
        "txt" | "text" => {
            capped(
                path,
                metadata.len(),
                "cut it, or write rows of `text` as JSON lines",
            )?;
            sink(vec![(1, RawRow::Text(whole_text(reader, path)?))])
        }
        "json" | "jsonl" | "ndjson" => match first_byte(&mut reader, path)? {
            Some(b'[') => {
                capped(path, metadata.len(), "write it as JSON lines")?;
                list_rows(reader, path, sink)
            }
            _ => line_rows(reader, path, sink),
        },
        _ => Err(Error::Unsupported {
            what: "dataset file",
            got: path.display().to_string(),
            supported: ".jsonl, .json, .txt".to_string(),
        }),
    }
}

fn refused(path: &Path, expected: &str, got: &str, remedy: &str) -> Error {
    Error::input("dataset", path.display().to_string(), expected, got, remedy)
}

fn capped(path: &Path, bytes: u64, remedy: &str) -> Result<()> {
    if bytes <= LIST_BYTES_MAX {
        return Ok(());
    }
    Err(refused(
        path,
        &format!("at most {LIST_BYTES_MAX} bytes"),
        &format!("{bytes} bytes"),
        remedy,
    ))
}

/// Skips a UTF-8 byte-order mark; UTF-16's is an error that names it.
fn skip_mark(reader: &mut BufReader<File>, path: &Path) -> Result<()> {
    let start = reader
        .fill_buf()
        .map_err(|error| Error::io("read", path, error))?;
    if start.starts_with(b"\xff\xfe") || start.starts_with(b"\xfe\xff") {
        return Err(refused(path, "UTF-8", "UTF-16", "save the file as UTF-8"));
    }
    let mark = if start.starts_with(b"\xef\xbb\xbf") {
        3
    } else {
        0
    };
    reader.consume(mark);
    Ok(())
}

/// The first character that is not white space, not taken.
fn first_byte(reader: &mut BufReader<File>, path: &Path) -> Result<Option<u8>> {
    // White space before the first row counts for its line, so only what is buffered is looked at.
    let start = reader
        .fill_buf()
        .map_err(|error| Error::io("read", path, error))?;
    Ok(start
        .iter()
        .copied()
        .find(|byte| !byte.is_ascii_whitespace()))
}

fn whole_text(reader: BufReader<File>, path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    let mut limited = reader.take(LIST_BYTES_MAX);
    limited
        .read_to_end(&mut bytes)
        .map_err(|error| Error::io("read", path, error))?;
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let line = error.as_bytes()[..at]
            .iter()
            .filter(|&&byte| byte == b'\n')
            .count()
            + 1;
        let place = format!("{}:{line}", path.display());
        Error::input(
            "dataset",
            place,
            "UTF-8",
            format!("other bytes at byte {at}"),
            "save the file as UTF-8",
        )
    })
}

fn line_rows(
    mut reader: BufReader<File>,
    path: &Path,
    sink: &mut dyn FnMut(Batch) -> Result<()>,
) -> Result<()> {
    let mut batch: Batch = Vec::new();
    let mut bytes = 0;
    for number in 1.. {
        let mut line = Vec::new();
        let mut limited = reader.by_ref().take(LINE_BYTES_MAX + 1);
        let read = limited
            .read_until(b'\n', &mut line)
            .map_err(|error| Error::io("read", path, error))?;
        if read == 0 {
            break;
        }
        if line.len() as u64 > LINE_BYTES_MAX {
            let place = format!("{}:{number}", path.display());
            let expected = format!("a line of at most {LINE_BYTES_MAX} bytes");
            return Err(Error::input(
                "dataset",
                place,
                expected,
                "a longer one",
                "write a row a line",
            ));
        }
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        bytes += line.len();
        batch.push((number, RawRow::Line(line)));
        if bytes >= BATCH_BYTES {
            bytes = 0;
            sink(std::mem::take(&mut batch))?;
        }
    }
    if batch.is_empty() {
        Ok(())
    } else {
        sink(batch)
    }
}

fn list_rows(
    reader: BufReader<File>,
    path: &Path,
    sink: &mut dyn FnMut(Batch) -> Result<()>,
) -> Result<()> {
    let mut rows = ListRows {
        sink,
        stopped: None,
    };
    let mut json = serde_json::Deserializer::from_reader(reader.take(LIST_BYTES_MAX));
    let read = (&mut rows).deserialize(&mut json).and_then(|()| json.end());
    if let Some(error) = rows.stopped {
        return Err(error);
    }
    read.map_err(|error| {
        let place = format!("{}:{}", path.display(), error.line());
        Error::input(
            "dataset",
            place,
            "a JSON list of rows",
            printable(&error.to_string()),
            "correct the file",
        )
    })
}

/// Takes a JSON list item by item, so that the whole is never in memory as values.
struct ListRows<'a> {
    sink: &'a mut dyn FnMut(Batch) -> Result<()>,
    /// The sink's error, which serde cannot carry.
    stopped: Option<Error>,
}

impl<'de> DeserializeSeed<'de> for &mut ListRows<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for &mut ListRows<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a list of rows")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let mut batch: Batch = Vec::new();
        let mut number = 0;
        loop {
            let item: Option<Value> = list.next_element()?;
            let last = item.is_none();
            if let Some(item) = item {
                number += 1;
                batch.push((number, RawRow::Item(item)));
            }
            if (batch.len() == BATCH_ROWS || last)
                && !batch.is_empty()
                && let Err(error) = (self.sink)(std::mem::take(&mut batch))
            {
                self.stopped = Some(error);
                return Err(serde::de::Error::custom("stopped"));
            }
            if last {
                return Ok(());
            }
        }
    }
}
