//! Tokens kept on disk between runs: one file for a source, named by all that its tokens depend on.
//!
//! - The name is a checksum of the source's bytes, the tokenizer and the settings: another text,
//!   template or length is another file. A file that is not whole is made again.
//! - A file is written beside its place, flushed, and renamed into it, so that two processes that
//!   make the same one each leave a whole one. A part that its process left behind is removed.
//! - Bounded by `data.cache_size`: what was used longest ago goes first. A file that another run
//!   has open stays readable to it.
//! - Directories are 0700 and files 0600: a dataset may be private.
//!
//! ```text
//! header 128 | tokens u32 × tokens | starts u64 × (rows + 1) | origins u64 × rows | JSON
//! ```
//!
//! All numbers are little-endian. The header: magic, key, fingerprint, checksum of the body, rows,
//! tokens, bytes of the JSON, and a checksum of all this.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use serde_json::{Value, json};
use twox_hash::{XxHash3_64, XxHash3_128};

use super::DatasetStats;
use super::table::{Sink, Starts, Table, TableBuilder, Tokens, cache_write_error};
use crate::config::{DataConfig, Size, TokenCache};
use crate::error::{Error, Result};

const MAGIC: &[u8; 8] = b"TERRTOK1";
const HEADER_BYTES: usize = 128;
/// Bytes of text from which on the cache is used by itself.
const AUTO_BYTES: u64 = 32 << 20;
const EXTENSION: &str = "tokens";

/// A directory of cache files.
#[derive(Debug)]
pub(super) struct Cache {
    directory: PathBuf,
    bytes_max: u64,
}

impl Cache {
    /// The cache for a source of `text_bytes`; `None` where its tokens go to memory.
    pub(super) fn of(config: &DataConfig, text_bytes: u64) -> Result<Option<Cache>> {
        let (directory, named) = match &config.cache {
            TokenCache::Off => return Ok(None),
            TokenCache::Auto if text_bytes < AUTO_BYTES => return Ok(None),
            TokenCache::Auto => match own_directory() {
                Some(directory) => (directory, false),
                None => return Ok(None),
            },
            TokenCache::At(directory) => (directory.clone(), true),
        };
        let made = DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory);
        match made {
            Ok(()) => {}
            // Nobody asked for this place by name.
            Err(_) if !named => return Ok(None),
            Err(error) => return Err(Error::io("make", &directory, error)),
        }
        let bytes_max = match config.cache_size {
            Size::Bytes(bytes) => bytes,
            Size::Auto => crate::store::free_bytes(&directory) / 2,
        };
        Ok(Some(Cache {
            directory,
            bytes_max,
        }))
    }

    pub(super) fn path(&self, key: u128) -> PathBuf {
        self.directory.join(format!("{key:032x}.{EXTENSION}"))
    }

    /// The table of `key`, if a whole one is there.
    pub(super) fn open(&self, key: u128) -> Option<Table> {
        let path = self.path(key);
        let table = read_table(&path, key)?;
        if let Tokens::Cached { file, .. } = &table.tokens {
            // What was used last goes last; a clock that cannot be set costs order only.
            file.set_modified(SystemTime::now()).ok();
        }
        Some(table)
    }

    /// A builder whose tokens go to a new file.
    pub(super) fn builder(&self) -> Result<TableBuilder> {
        self.remove_abandoned();
        let (file, path) = self.new_part()?;
        let mut writer = BufWriter::with_capacity(1 << 20, file);
        writer
            .write_all(&[0; HEADER_BYTES])
            .map_err(|error| cache_write_error(&path, error))?;
        let bytes_max = self.bytes_max;
        Ok(TableBuilder::new(Sink::File {
            writer,
            path,
            bytes_max,
        }))
    }

    /// A new file, locked until it is closed: that tells others that somebody still writes it.
    fn new_part(&self) -> Result<(File, PathBuf)> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = self
                .directory
                .join(format!("{}-{count}.part", std::process::id()));
            let mut options = OpenOptions::new();
            options.read(true).write(true).create_new(true).mode(0o600);
            let file = match options.open(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(Error::io("make", &path, error)),
            };
            file.lock()
                .map_err(|error| Error::io("lock", &path, error))?;
            // Another process may have taken it for abandoned before it was locked.
            if path.exists() {
                return Ok((file, path));
            }
        }
    }

    /// Finishes a builder's file under `key` and opens it.
    pub(super) fn finish(&self, mut builder: TableBuilder, key: u128) -> Result<Table> {
        let fingerprint = builder.fingerprint();
        let rest = rest_of(&builder);
        let Sink::File { writer, path, .. } = builder.sink else {
            unreachable!("made by Cache::builder");
        };
        let place = self.path(key);
        let header = Header {
            key,
            fingerprint,
            checksum: 0,
            rows: builder.stats.rows,
            tokens: builder.stats.tokens,
            json_bytes: rest.json_bytes,
        };
        // The file stays open, and locked, until it has its name.
        let written = write_file(writer, header, &rest.bytes).and_then(|_locked| {
            fs::rename(&path, &place)?;
            File::open(&self.directory)?.sync_all()
        });
        if let Err(error) = written {
            fs::remove_file(&path).ok();
            return Err(cache_write_error(&path, error));
        }
        self.shrink(&place);
        self.open(key).ok_or_else(|| {
            let read_back = io::Error::other("what was written does not read back");
            Error::io("read", &place, read_back)
        })
    }

    /// Removes the files used longest ago until the rest is within the limit; `kept` stays.
    fn shrink(&self, kept: &Path) {
        let mut files: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
        for path in self.files(EXTENSION) {
            if let Ok(metadata) = fs::metadata(&path) {
                let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                files.push((used, metadata.len(), path));
            }
        }
        files.sort();
        let mut total: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, bytes, path) in files {
            if total > self.bytes_max && path != kept && fs::remove_file(&path).is_ok() {
                total -= bytes;
            }
        }
    }

    /// Removes parts whose process ended before they were whole.
    fn remove_abandoned(&self) {
        for path in self.files("part") {
            // The lock is held until the file is gone, so that its maker cannot take it meanwhile.
            let file = File::open(&path).ok();
            if let Some(file) = file.filter(|file| file.try_lock().is_ok()) {
                fs::remove_file(&path).ok();
                drop(file);
            }
        }
    }

    fn files(&self, extension: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.directory)
            .into_iter()
            .flatten()
            .flatten();
        entries
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|own| own == extension))
            .collect()
    }
}

/// Where the cache is when nothing else is said.
fn own_directory() -> Option<PathBuf> {
    let variable = |name: &str| {
        let value = std::env::var_os(name).map(PathBuf::from);
        value.filter(|path| path.is_absolute())
    };
    let base = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")))?;
    Some(base.join("terrace/tokens"))
}

/// What stands behind the tokens.
struct Rest {
    bytes: Vec<u8>,
    json_bytes: u64,
}

fn rest_of(builder: &TableBuilder) -> Rest {
    let mut bytes = Vec::with_capacity(builder.starts.len() * 16);
    bytes.extend(builder.starts.iter().flat_map(|start| start.to_le_bytes()));
    for origin in &builder.origins {
        bytes.extend(origin.file.to_le_bytes());
        bytes.extend(origin.number.to_le_bytes());
    }
    let json = json!({"files": builder.files, "stats": builder.stats}).to_string();
    bytes.extend(json.as_bytes());
    Rest {
        bytes,
        json_bytes: json.len() as u64,
    }
}

struct Header {
    key: u128,
    fingerprint: u128,
    checksum: u128,
    rows: u64,
    tokens: u64,
    json_bytes: u64,
}

impl Header {
    fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let fields = [
            &MAGIC[..],
            &self.key.to_le_bytes(),
            &self.fingerprint.to_le_bytes(),
            &self.checksum.to_le_bytes(),
            &self.rows.to_le_bytes(),
            &self.tokens.to_le_bytes(),
            &self.json_bytes.to_le_bytes(),
        ]
        .concat();
        bytes[..fields.len()].copy_from_slice(&fields);
        let checksum = XxHash3_64::oneshot(&bytes[..HEADER_BYTES - 8]);
        bytes[HEADER_BYTES - 8..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Option<Header> {
        let wide = |at: usize| Some(u128::from_le_bytes(bytes[at..at + 16].try_into().ok()?));
        let word = |at: usize| Some(u64::from_le_bytes(bytes[at..at + 8].try_into().ok()?));
        let header = Header {
            key: wide(8)?,
            fingerprint: wide(24)?,
            checksum: wide(40)?,
            rows: word(56)?,
            tokens: word(64)?,
            json_bytes: word(72)?,
        };
        (header.to_bytes() == *bytes).then_some(header)
    }

    /// Bytes of the whole file.
    fn file_bytes(&self) -> Option<u64> {
        let rows = self.rows.checked_mul(16)?.checked_add(8)?;
        let body = self.tokens.checked_mul(4)?.checked_add(rows)?;
        body.checked_add(self.json_bytes)?
            .checked_add(HEADER_BYTES as u64)
    }
}

/// Writes what stands behind the tokens, then the header, and waits for the disk.
fn write_file(mut writer: BufWriter<File>, mut header: Header, rest: &[u8]) -> io::Result<File> {
    writer.write_all(rest)?;
    let mut file = writer
        .into_inner()
        .map_err(io::IntoInnerError::into_error)?;
    header.checksum = body_checksum(&mut file)?;
    file.write_all_at(&header.to_bytes(), 0)?;
    file.sync_all()?;
    Ok(file)
}

/// Checksum of all that stands behind the header.
fn body_checksum(file: &mut File) -> io::Result<u128> {
    file.seek(SeekFrom::Start(HEADER_BYTES as u64))?;
    let mut hash = XxHash3_128::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hash.finish_128()),
            read => hash.write(&buffer[..read]),
        }
    }
}

/// The table in the file, if the file is whole and of `key`.
fn read_table(path: &Path, key: u128) -> Option<Table> {
    let mut file = File::open(path).ok()?;
    let mut bytes = [0; HEADER_BYTES];
    file.read_exact(&mut bytes).ok()?;
    let header = Header::from_bytes(&bytes).filter(|header| header.key == key)?;
    let whole = file.metadata().ok()?.len() == header.file_bytes()?
        && body_checksum(&mut file).ok()? == header.checksum;
    if !whole {
        return None;
    }
    let starts_at = HEADER_BYTES as u64 + header.tokens * 4;
    let origins_at = starts_at + (header.rows + 1) * 8;
    let mut starts = vec![0; usize::try_from((header.rows + 1) * 8).ok()?];
    file.read_exact_at(&mut starts, starts_at).ok()?;
    let starts = starts
        .chunks_exact(8)
        .map(|eight| u64::from_le_bytes(eight.try_into().expect("eight bytes")))
        .collect();
    let mut json = vec![0; usize::try_from(header.json_bytes).ok()?];
    file.read_exact_at(&mut json, origins_at + header.rows * 8)
        .ok()?;
    let json: Value = serde_json::from_slice(&json).ok()?;
    let stats: DatasetStats = serde_json::from_value(json["stats"].clone()).ok()?;
    Some(Table {
        tokens: Tokens::Cached {
            file,
            path: path.to_path_buf(),
            tokens_at: HEADER_BYTES as u64,
            origins_at,
        },
        starts: Starts::Listed(starts),
        files: serde_json::from_value(json["files"].clone()).ok()?,
        stats,
        fingerprint: header.fingerprint,
    })
}
