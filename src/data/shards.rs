//! Shards of token ids that another program wrote: `.bin` files of `u16` or `u32`, little-endian.
//!
//! - With llm.c's header of 256 numbers of 4 bytes: magic 20240520, version 1, `u16` ids; or magic
//!   20240801, version 7, `u32` ids; the third number counts the ids.
//! - Without one, as nanoGPT writes them: ids alone, `u16` where the model's vocabulary fits that,
//!   else `u32`. Where it fits and yet every other `u16` is 0, they are `u32`.
//! - A row is the next `seq_len` ids, whatever documents they belong to; loss is taken on all.
//! - Each shard is read once at the start, for its checksum and its largest id, then row by row.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;

use twox_hash::XxHash3_128;

use super::table::{Starts, Table, Tokens, Width, halves, words};
use super::{DatasetStats, length_bin};
use crate::error::{Error, Result};

const HEADER_BYTES: u64 = 1024;
/// (magic, version, width) of llm.c's headers.
const HEADERS: [(u32, u32, Width); 2] = [(20_240_520, 1, Width::Two), (20_240_801, 7, Width::Four)];
/// Ids that are looked at to tell `u32` from `u16`.
const PROBE_BYTES: u64 = 1 << 16;

/// The rows of the shard at `path`, at most `rows_max`. Ids must be below `vocab_size`.
pub(super) fn open(
    path: &Path,
    seq_len: u64,
    vocab_size: u64,
    rows_max: Option<u64>,
) -> Result<Table> {
    let failed = |error| Error::io("read", path, error);
    let mut file = File::open(path).map_err(|error| Error::io("open", path, error))?;
    let bytes = file.metadata().map_err(failed)?.len();
    let (tokens_at, width) = layout(&file, path, bytes, vocab_size)?;
    let tokens = (bytes - tokens_at) / width.bytes();
    // A row of one id predicts nothing.
    let rows = tokens / seq_len + u64::from(tokens % seq_len > 1);
    let rows = rows
        .min(rows_max.unwrap_or(u64::MAX))
        .min(u64::from(u32::MAX));
    let end = tokens.min(rows * seq_len);
    if rows == 0 {
        let got = format!("{tokens} ids");
        return Err(refused(
            path,
            "at least two token ids",
            got,
            "name another file",
        ));
    }
    let fingerprint = check_ids(
        &mut file,
        path,
        (tokens_at, width, tokens),
        vocab_size,
        seq_len,
    )?;
    let mut stats = DatasetStats {
        rows,
        tokens: end,
        targets: end - rows,
        longest: seq_len.min(end),
        ..DatasetStats::default()
    };
    stats.lengths[length_bin(seq_len)] = rows;
    Ok(Table {
        tokens: Tokens::Shard {
            file,
            path: path.to_path_buf(),
            tokens_at,
            width,
        },
        starts: Starts::Even {
            row: seq_len,
            rows: u32::try_from(rows).expect("capped above"),
            end,
        },
        files: vec![path.display().to_string()],
        stats,
        fingerprint,
    })
}

fn refused(path: &Path, expected: &str, got: impl Into<String>, remedy: &str) -> Error {
    Error::input("dataset", path.display().to_string(), expected, got, remedy)
}

/// Where ids begin and how wide they are.
fn layout(file: &File, path: &Path, bytes: u64, vocab_size: u64) -> Result<(u64, Width)> {
    let mut first = [0; 12];
    let with_header = bytes >= HEADER_BYTES && file.read_exact_at(&mut first, 0).is_ok();
    let numbers: Vec<u32> = words(&first).collect();
    let known = HEADERS
        .iter()
        .find(|(magic, ..)| with_header && numbers[0] == *magic);
    if let Some((_, version, width)) = known {
        if numbers[1] != *version {
            let (expected, got) = (format!("version {version}"), numbers[1].to_string());
            return Err(refused(
                path,
                &expected,
                got,
                "write it again with llm.c's tools",
            ));
        }
        let expected = HEADER_BYTES + u64::from(numbers[2]) * width.bytes();
        if bytes != expected {
            let expected = format!("{expected} bytes, as its header counts {} ids", numbers[2]);
            return Err(refused(
                path,
                &expected,
                format!("{bytes}"),
                "copy the file again",
            ));
        }
        return Ok((HEADER_BYTES, *width));
    }
    let mut width = if vocab_size <= 1 << 16 {
        Width::Two
    } else {
        Width::Four
    };
    if width == Width::Two && bytes >= 8 && bytes.is_multiple_of(4) {
        let mut probe = vec![0; usize::try_from(bytes.min(PROBE_BYTES)).expect("small")];
        let read = file.read_exact_at(&mut probe, 0);
        read.map_err(|error| Error::io("read", path, error))?;
        if halves(&probe).skip(1).step_by(2).all(|half| half == 0) {
            width = Width::Four;
        }
    }
    if !bytes.is_multiple_of(width.bytes()) {
        let expected = format!("ids of {} bytes each", width.bytes());
        let got = format!("{bytes} bytes");
        return Err(refused(path, &expected, got, "copy the file again"));
    }
    Ok((0, width))
}

/// Checks every id and returns the shard's checksum.
fn check_ids(
    file: &mut File,
    path: &Path,
    (tokens_at, width, tokens): (u64, Width, u64),
    vocab_size: u64,
    seq_len: u64,
) -> Result<u128> {
    let mut hash = XxHash3_128::new();
    hash.write(&seq_len.to_le_bytes());
    hash.write(&width.bytes().to_le_bytes());
    let mut buffer = vec![0; 1 << 20];
    let mut done = 0;
    std::io::Seek::seek(file, std::io::SeekFrom::Start(tokens_at))
        .map_err(|error| Error::io("read", path, error))?;
    while done < tokens {
        let left = (tokens - done) * width.bytes();
        let part = usize::try_from(left.min(1 << 20)).expect("at most a MiB");
        file.read_exact(&mut buffer[..part])
            .map_err(|error| Error::io("read", path, error))?;
        let part = &buffer[..part];
        hash.write(part);
        let large = |id: u64| id >= vocab_size;
        let found = match width {
            Width::Two => halves(part).position(|id| large(id.into())),
            Width::Four => words(part).position(|id| large(id.into())),
        };
        if let Some(at) = found {
            let id = match width {
                Width::Two => halves(part).nth(at).map(u32::from),
                Width::Four => words(part).nth(at),
            };
            let bits = width.bytes() * 8;
            let got = format!("{} as u{bits} at {}", id.unwrap_or(0), done + at as u64);
            let expected = format!("ids below {vocab_size}, the model's vocabulary");
            return Err(refused(
                path,
                &expected,
                got,
                "tokenize with the model's own tokenizer",
            ));
        }
        done += part.len() as u64 / width.bytes();
    }
    Ok(hash.finish_128())
}
