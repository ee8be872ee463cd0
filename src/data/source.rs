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
/// Bytes of a text that is in memory whole; of a longer one, of each piece.
pub const TEXT_BYTES: u64 = 32 << 20;
/// Bytes of lines that are read before they are tokenized.
const BATCH_BYTES: usize = 8 << 20;
/// Rows of a list that are read before they are tokenized.
pub(super) const BATCH_ROWS: usize = 1024;

/// A row as it stands in its file.
#[derive(Clone, Debug)]
pub enum RawRow {
    /// A line, not yet parsed.
    Line(Vec<u8>),
    /// An item of a list.
    Item(Value),
    /// A whole text.
    Text(String),
    /// A part of a long text, which goes on after the end of a line.
    Piece {
        /// The part.
        text: String,
        /// Nothing is before it.
        first: bool,
        /// Nothing is behind it.
        last: bool,
    },
}

/// Rows with the number of their line, or of their place in a list, from 1.
pub type Batch = Vec<(u64, RawRow)>;

/// Takes a batch of rows; whether more are wanted.
pub(super) type Rows<'a> = dyn FnMut(Batch) -> Result<bool> + 'a;

/// Reads `path` and hands its rows on in order, as long as more are wanted: whether they still are
/// at its end. `cuts` says that a long text may be cut after its lines.
pub fn read_rows(path: &Path, cuts: bool, sink: &mut Rows<'_>) -> Result<bool> {
    let file = File::open(path).map_err(|error| Error::io("open", path, error))?;
    let metadata = file
        .metadata()
        .map_err(|error| Error::io("read", path, error))?;
    if metadata.is_dir() {
        return Err(refuse_directory(path));
    }
    if !metadata.is_file() {
        return Err(refused(
            path,
            "a file",
            "something else",
            "copy what it gives to a file",
        ));
    }
    let extension = path
        .extension()
        .and_then(|extension| extension.to_str())
        .unwrap_or_default();
    let mut reader = BufReader::with_capacity(1 << 20, file);
    skip_mark(&mut reader, path)?;
    match extension.to_ascii_lowercase().as_str() {
        "txt" | "text" if cuts && metadata.len() > TEXT_BYTES => {
            text_pieces(reader, path, TEXT_BYTES, sink)
        }
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
        "parquet" => parquet_rows(path, sink),
        "gz" | "zst" | "xz" | "bz2" | "zip" => {
            let expected = "a file that is not compressed";
            Err(refused(
                path,
                expected,
                extension,
                "unpack it first, as gunzip does",
            ))
        }
        _ => Err(Error::Unsupported {
            what: "dataset file",
            got: path.display().to_string(),
            supported: ".jsonl, .json, .txt, .bin, .parquet, or a directory of them".to_string(),
        }),
    }
}

/// The error of a directory where files were meant.
pub(super) fn refuse_directory(path: &Path) -> Error {
    refused(path, "a file", "a directory", "name the files themselves")
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
    String::from_utf8(bytes).map_err(|error| not_utf8(path, 1, &error))
}

/// The error of a text whose first line is `first_line` of its file.
fn not_utf8(path: &Path, first_line: usize, error: &std::string::FromUtf8Error) -> Error {
    let at = error.utf8_error().valid_up_to();
    let ends = error.as_bytes()[..at].iter().filter(|&&byte| byte == b'\n');
    let place = format!("{}:{}", path.display(), first_line + ends.count());
    let got = format!("other bytes at byte {at}");
    Error::input("dataset", place, "UTF-8", got, "save the file as UTF-8")
}

/// A long text piece by piece, in batches of one.
fn text_pieces(
    reader: impl Read,
    path: &Path,
    piece_bytes: u64,
    sink: &mut Rows<'_>,
) -> Result<bool> {
    let mut reader = reader.take(u64::MAX);
    let (mut bytes, mut line, mut first) = (Vec::new(), 1, true);
    loop {
        reader.set_limit(piece_bytes);
        let read = reader
            .read_to_end(&mut bytes)
            .map_err(|error| Error::io("read", path, error))?;
        let last = (read as u64) < piece_bytes;
        // After a line end between a visible character and a letter or digit, as `words` cuts.
        let cut = |at: &usize| {
            bytes[at - 1] == b'\n'
                && bytes[at - 2].is_ascii_graphic()
                && bytes[*at].is_ascii_alphanumeric()
        };
        let end = match last {
            true => Some(bytes.len()),
            false => (2..bytes.len()).rev().find(cut),
        };
        let place = || format!("{}:{line}", path.display());
        let Some(end) = end else {
            let expected = format!("lines that begin with a letter, within {piece_bytes} bytes");
            let remedy = "write rows of `text` as JSON lines";
            return Err(Error::input("dataset", place(), expected, "none", remedy));
        };
        let rest = bytes.split_off(end);
        let text = String::from_utf8(std::mem::replace(&mut bytes, rest));
        let text = text.map_err(|error| not_utf8(path, line, &error))?;
        let ends = text.bytes().filter(|&byte| byte == b'\n').count();
        if !sink(vec![(line as u64, RawRow::Piece { text, first, last })])? {
            return Ok(false);
        }
        line += ends;
        first = false;
        if last {
            return Ok(true);
        }
    }
}

#[cfg(feature = "parquet")]
fn parquet_rows(path: &Path, sink: &mut Rows<'_>) -> Result<bool> {
    super::parquet::read_rows(path, sink)
}

#[cfg(not(feature = "parquet"))]
fn parquet_rows(path: &Path, _: &mut Rows<'_>) -> Result<bool> {
    let remedy = "build with `cargo build --release --features parquet`, or convert it to .jsonl";
    Err(refused(path, "a build with parquet", "one without", remedy))
}

fn line_rows(mut reader: BufReader<File>, path: &Path, sink: &mut Rows<'_>) -> Result<bool> {
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
            if !sink(std::mem::take(&mut batch))? {
                return Ok(false);
            }
        }
    }
    if batch.is_empty() {
        Ok(true)
    } else {
        sink(batch)
    }
}

fn list_rows(reader: BufReader<File>, path: &Path, sink: &mut Rows<'_>) -> Result<bool> {
    let mut rows = ListRows {
        sink,
        stopped: None,
    };
    let mut json = serde_json::Deserializer::from_reader(reader.take(LIST_BYTES_MAX));
    let read = (&mut rows).deserialize(&mut json).and_then(|()| json.end());
    if let Some(stopped) = rows.stopped {
        return stopped.map_or(Ok(false), Err);
    }
    read.map(|()| true).map_err(|error| {
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
    sink: &'a mut Rows<'a>,
    /// Set where the sink wants no more: with its error, which serde cannot carry, if that is why.
    stopped: Option<Option<Error>>,
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
            if (batch.len() == BATCH_ROWS || last) && !batch.is_empty() {
                self.stopped = match (self.sink)(std::mem::take(&mut batch)) {
                    Ok(true) => None,
                    Ok(false) => Some(None),
                    Err(error) => Some(Some(error)),
                };
                if self.stopped.is_some() {
                    return Err(serde::de::Error::custom("stopped"));
                }
            }
            if last {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_long_text_are_the_text() {
        let text = "A line.\nAnother, with é and 中.\n\n  Not here\nbut here.\n".repeat(40);
        for piece_bytes in [60, 61, 100, 1000, 1 << 20] {
            let (mut whole, mut lines, mut ends) = (String::new(), Vec::new(), Vec::new());
            let mut sink = |batch: Batch| {
                for (number, row) in batch {
                    let RawRow::Piece { text, first, last } = row else {
                        panic!("a piece");
                    };
                    assert_eq!(first, whole.is_empty());
                    assert_eq!(number as usize, whole.matches('\n').count() + 1);
                    whole.push_str(&text);
                    lines.push(number);
                    ends.push(last);
                }
                Ok(true)
            };
            let path = Path::new("a.txt");
            assert!(text_pieces(text.as_bytes(), path, piece_bytes, &mut sink).expect("pieces"));
            assert_eq!(whole, text);
            assert_eq!(lines.len() > 1, (piece_bytes as usize) < text.len());
            assert_eq!(ends.iter().filter(|last| **last).count(), 1);
            assert_eq!(ends.last(), Some(&true));
        }
        let none = "no such place ".repeat(20);
        let refused = text_pieces(none.as_bytes(), Path::new("a.txt"), 60, &mut |_| Ok(true));
        assert!(
            refused
                .unwrap_err()
                .to_string()
                .contains("lines that begin with a letter")
        );
        let broken = [b"A line.\n".as_slice(), b"B \xff\n"].concat();
        let refused = text_pieces(&broken[..], Path::new("a.txt"), 60, &mut |_| Ok(true));
        assert!(
            refused
                .unwrap_err()
                .to_string()
                .starts_with("dataset: a.txt:2: expected UTF-8")
        );
    }
}
