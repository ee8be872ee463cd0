//! Rows of tokens in one place: in memory, in a file of the token cache, or in a shard of tokens
//! that another program wrote.
//!
//! - A token is a `u32` whose highest bit says that loss is taken where it is predicted; ids are
//!   below 2^31. A shard's are `u16` or `u32` ids, all trained on.
//! - Memory: 4 bytes a token where they are in memory; else 8 bytes a row of a cache file, and
//!   nothing a row of a shard. Files are read row by row.
//!
//! Not here: where cache files are kept (`cache`), what a shard looks like (`shards`).

use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use twox_hash::XxHash3_128;

use super::{DatasetStats, TOKENS_MAX};
use crate::error::{Error, Result};

/// Set in a token that is trained on.
pub(super) const TRAINED: u32 = 1 << 31;

/// Where a row came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Origin {
    pub(super) file: u32,
    /// Line, or place in a list; `u32::MAX` stands for itself and all above.
    pub(super) number: u32,
}

/// Width of a shard's ids in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    Two,
    Four,
}

impl Width {
    pub(super) fn bytes(self) -> u64 {
        match self {
            Width::Two => 2,
            Width::Four => 4,
        }
    }
}

/// Where the tokens are.
#[derive(Debug)]
pub(super) enum Tokens {
    /// Marked with [`TRAINED`].
    Memory(Vec<u32>, Vec<Origin>),
    /// A cache file: marked tokens from `tokens_at` on, an origin of 8 bytes a row.
    Cached {
        file: File,
        path: PathBuf,
        tokens_at: u64,
        origins_at: u64,
    },
    /// Plain ids from `tokens_at` on.
    Shard {
        file: File,
        path: PathBuf,
        tokens_at: u64,
        width: Width,
    },
}

/// Where each row begins.
#[derive(Debug)]
pub(super) enum Starts {
    /// As many as rows, and the end.
    Listed(Vec<u64>),
    /// Every `row` tokens, `rows` of them, the last one ends at `end`.
    Even { row: u64, rows: u32, end: u64 },
}

/// Rows of tokens.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) tokens: Tokens,
    pub(super) starts: Starts,
    pub(super) files: Vec<String>,
    pub(super) stats: DatasetStats,
    /// A checksum of tokens, mask and rows.
    pub(super) fingerprint: u128,
}

impl Table {
    pub(super) fn rows(&self) -> u32 {
        match &self.starts {
            Starts::Listed(starts) => {
                u32::try_from(starts.len() - 1).expect("checked as rows were added")
            }
            Starts::Even { rows, .. } => *rows,
        }
    }

    /// First token of a row, and the end of it.
    fn bounds(&self, row: u32) -> (u64, u64) {
        match &self.starts {
            Starts::Listed(starts) => (starts[row as usize], starts[row as usize + 1]),
            Starts::Even {
                row: tokens, end, ..
            } => {
                let start = u64::from(row) * tokens;
                (start, (start + tokens).min(*end))
            }
        }
    }

    pub(super) fn row_len(&self, row: u32) -> u64 {
        let (start, end) = self.bounds(row);
        end - start
    }

    /// Appends a row's tokens, marked, to `out`.
    pub(super) fn read(&self, row: u32, out: &mut Vec<u32>) -> Result<()> {
        let (start, end) = self.bounds(row);
        let index = |at: u64| usize::try_from(at).expect("an index into memory");
        let length = index(end - start);
        let read = |file: &File, path: &Path, at: u64, width: u64| {
            let mut bytes = vec![0; length * index(width)];
            file.read_exact_at(&mut bytes, at + start * width)
                .map_err(|error| Error::io("read", path, error))?;
            Ok::<_, Error>(bytes)
        };
        match &self.tokens {
            Tokens::Memory(tokens, _) => out.extend_from_slice(&tokens[index(start)..index(end)]),
            Tokens::Cached {
                file,
                path,
                tokens_at,
                ..
            } => {
                let bytes = read(file, path, *tokens_at, 4)?;
                out.extend(words(&bytes));
            }
            Tokens::Shard {
                file,
                path,
                tokens_at,
                width,
            } => {
                let bytes = read(file, path, *tokens_at, width.bytes())?;
                match width {
                    Width::Two => out.extend(halves(&bytes).map(|id| u32::from(id) | TRAINED)),
                    Width::Four => out.extend(words(&bytes).map(|id| id | TRAINED)),
                }
            }
        }
        Ok(())
    }

    /// `file:line` of a row; the first file alone where the place cannot be read.
    pub(super) fn place(&self, row: u32) -> String {
        let origin = match &self.tokens {
            Tokens::Memory(_, origins) => Some(origins[row as usize]),
            Tokens::Cached {
                file, origins_at, ..
            } => {
                let mut bytes = [0; 8];
                let at = origins_at + u64::from(row) * 8;
                let read = file.read_exact_at(&mut bytes, at).ok();
                let mut pair = words(&bytes);
                let pair = (pair.next().unwrap_or(0), pair.next().unwrap_or(0));
                read.map(|()| Origin {
                    file: pair.0,
                    number: pair.1,
                })
            }
            Tokens::Shard { .. } => {
                return format!("{}: token {}", self.files[0], self.bounds(row).0);
            }
        };
        match origin {
            Some(origin) => format!("{}:{}", self.files[origin.file as usize], origin.number),
            None => self.files[0].clone(),
        }
    }
}

/// Little-endian numbers of 4 bytes.
pub(super) fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes
        .chunks_exact(4)
        .map(|four| u32::from_le_bytes([four[0], four[1], four[2], four[3]]))
}

/// Little-endian numbers of 2 bytes.
pub(super) fn halves(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes
        .chunks_exact(2)
        .map(|two| u16::from_le_bytes([two[0], two[1]]))
}

/// Where a table's tokens go while it is made.
pub(super) enum Sink {
    Memory(Vec<u32>),
    /// A new file, written from its header's end on.
    File {
        writer: BufWriter<File>,
        path: PathBuf,
        bytes_max: u64,
    },
}

/// A table while its rows come.
pub(super) struct TableBuilder {
    pub(super) sink: Sink,
    hash: XxHash3_128,
    pub(super) starts: Vec<u64>,
    pub(super) origins: Vec<Origin>,
    pub(super) files: Vec<String>,
    pub(super) stats: DatasetStats,
}

impl TableBuilder {
    pub(super) fn new(sink: Sink) -> TableBuilder {
        TableBuilder {
            sink,
            hash: XxHash3_128::new(),
            starts: vec![0],
            origins: Vec::new(),
            files: Vec::new(),
            stats: DatasetStats::default(),
        }
    }

    /// Appends a row of at least one token, from line `number` of the last of `files`.
    pub(super) fn push(&mut self, ids: &[u32], trained: &[bool], number: u64) -> Result<()> {
        let targets = trained.iter().skip(1).filter(|&&trained| trained).count() as u64;
        if targets == 0 {
            self.stats.without_targets += 1;
            self.stats.masked_tokens += ids.len() as u64;
            return Ok(());
        }
        let total = self.stats.tokens + ids.len() as u64;
        self.check_room(total, number)?;
        let marked = ids.iter().zip(trained);
        let marked = marked.map(|(&id, &trained)| id | if trained { TRAINED } else { 0 });
        match &mut self.sink {
            Sink::Memory(tokens) => {
                for token in marked {
                    self.hash.write(&token.to_le_bytes());
                    tokens.push(token);
                }
            }
            Sink::File { writer, path, .. } => {
                let bytes: Vec<u8> = marked.flat_map(u32::to_le_bytes).collect();
                self.hash.write(&bytes);
                let written = writer.write_all(&bytes);
                written.map_err(|error| cache_write_error(path, error))?;
            }
        }
        self.starts.push(total);
        self.origins.push(Origin {
            file: u32::try_from(self.files.len() - 1).unwrap_or(u32::MAX),
            number: u32::try_from(number).unwrap_or(u32::MAX),
        });
        self.stats.rows += 1;
        self.stats.tokens = total;
        self.stats.longest = self.stats.longest.max(ids.len() as u64);
        self.stats.targets += targets;
        Ok(())
    }

    fn check_room(&self, total: u64, number: u64) -> Result<()> {
        let file = self.files.last().map_or("", String::as_str);
        if let Sink::File { bytes_max, .. } = &self.sink
            && total * 4 + self.starts.len() as u64 * 16 > *bytes_max
        {
            return Err(Error::input(
                "dataset",
                format!("{file}:{number}"),
                format!("tokens within {bytes_max} bytes, data.cache_size"),
                "more",
                "raise data.cache_size, or set data.max_samples",
            ));
        }
        // Rows have a token at least, so that memory's limit also keeps their count below 2^32.
        let in_memory = matches!(self.sink, Sink::Memory(_)) && total >= TOKENS_MAX;
        if in_memory || self.starts.len() as u64 > u64::from(u32::MAX) {
            return Err(Error::input(
                "dataset",
                format!("{file}:{number}"),
                format!("fewer than {TOKENS_MAX} rows, and tokens in memory"),
                "more",
                "set data.cache to a directory, or train on the files one after another",
            ));
        }
        Ok(())
    }

    /// The file that is written, if one is.
    pub(super) fn part(&self) -> Option<PathBuf> {
        match &self.sink {
            Sink::Memory(_) => None,
            Sink::File { path, .. } => Some(path.clone()),
        }
    }

    /// The checksum of all rows; call once, at the end.
    pub(super) fn fingerprint(&mut self) -> u128 {
        for start in &self.starts {
            self.hash.write(&start.to_le_bytes());
        }
        self.hash.finish_128()
    }

    /// The table of a builder that wrote to memory.
    pub(super) fn into_memory(mut self) -> Table {
        let fingerprint = self.fingerprint();
        let Sink::Memory(mut tokens) = self.sink else {
            unreachable!("a builder of memory");
        };
        tokens.shrink_to_fit();
        Table {
            tokens: Tokens::Memory(tokens, self.origins),
            starts: Starts::Listed(self.starts),
            files: self.files,
            stats: self.stats,
            fingerprint,
        }
    }
}

/// A write to the cache that the system refused.
pub(super) fn cache_write_error(path: &Path, source: std::io::Error) -> Error {
    Error::Io {
        action: "write",
        path: path.to_path_buf(),
        source,
        remedy: "; free space there, or set data.cache to another directory or \"off\"".to_string(),
    }
}
