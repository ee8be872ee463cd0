//! What `data.train` and `data.eval` name: each entry is a source, each source a list of files.
//!
//! | entry | source |
//! |---|---|
//! | a name of `data.dataset_dir`'s dataset_info.json | that dataset |
//! | a file | itself |
//! | a directory | its data files by name, not those of directories within |
//! | a path with `*` or `?` in its last part | the files that match, by name |
//!
//! Not here: what the files hold (`source`, `shards`), dataset_info.json itself (`registry`).

use std::path::{Path, PathBuf};

use super::columns::Columns;
use super::registry::Registry;
use crate::config::DataConfig;
use crate::error::{Error, Result, printable};

/// Endings of files that hold rows.
const ROWS: [&str; 6] = ["json", "jsonl", "ndjson", "txt", "text", "parquet"];
/// Ending of files that hold token ids.
const SHARD: &str = "bin";
/// Entries of a directory that are looked at.
const ENTRIES_MAX: usize = 1 << 20;

/// One entry of a list of sources.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Source {
    /// As the list has it.
    pub(super) name: String,
    pub(super) files: Vec<PathBuf>,
    /// The files hold token ids.
    pub(super) shards: bool,
    /// What its columns are called, where dataset_info.json says.
    pub(super) columns: Option<Columns>,
}

/// The sources of `entries`, in order.
pub(super) fn resolve(entries: &[PathBuf], config: &DataConfig) -> Result<Vec<Source>> {
    let registry = config
        .dataset_dir
        .as_deref()
        .map(Registry::read)
        .transpose()?;
    let mut sources = Vec::with_capacity(entries.len());
    for entry in entries {
        let name = entry.to_string_lossy();
        let listed = registry
            .as_ref()
            .map(|registry| registry.find(&name))
            .transpose()?;
        let (files, columns) = match listed.flatten() {
            Some((path, columns)) => (files_of(&path, registry.as_ref())?, Some(columns)),
            None => (files_of(entry, registry.as_ref())?, None),
        };
        let shards = is_shards(entry, &files)?;
        sources.push(Source {
            name: name.into_owned(),
            files,
            shards,
            columns,
        });
    }
    Ok(sources)
}

fn refused(place: &Path, expected: &str, got: impl Into<String>, remedy: &str) -> Error {
    Error::input(
        "dataset",
        place.display().to_string(),
        expected,
        got,
        remedy,
    )
}

fn extension(path: &Path) -> String {
    let extension = path.extension().and_then(|extension| extension.to_str());
    extension.unwrap_or_default().to_ascii_lowercase()
}

/// The files that an entry names.
fn files_of(entry: &Path, registry: Option<&Registry>) -> Result<Vec<PathBuf>> {
    let pattern = entry.file_name().map(|name| name.to_string_lossy());
    let pattern = pattern.filter(|name| name.contains(['*', '?']) && !entry.exists());
    if let Some(pattern) = pattern {
        let parent = entry
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        let files = listed(parent.unwrap_or(Path::new(".")), |name| {
            matches(&pattern, name)
        })?;
        if files.is_empty() {
            return Err(refused(
                entry,
                "files that match",
                "none",
                "correct data.train",
            ));
        }
        return Ok(files);
    }
    if entry.is_dir() {
        let known = |name: &str| {
            let extension = extension(Path::new(name));
            ROWS.contains(&extension.as_str()) || extension == SHARD
        };
        let files = listed(entry, known)?;
        if files.is_empty() {
            let expected = format!("a directory of .{} or .{SHARD} files", ROWS.join(", ."));
            return Err(refused(
                entry,
                &expected,
                "none in it",
                "name the files themselves",
            ));
        }
        return Ok(files);
    }
    // A bare word that is no file was meant as a name.
    let bare = entry.components().count() == 1 && entry.extension().is_none();
    if bare && !entry.exists() {
        return Err(match registry {
            Some(registry) => registry.unknown(&entry.to_string_lossy()),
            None => refused(
                entry,
                "a file, a directory or a pattern",
                "nothing of that name",
                "correct it, or set data.dataset_dir to the directory of its dataset_info.json",
            ),
        });
    }
    Ok(vec![entry.to_path_buf()])
}

/// Files of a directory whose name is wanted, by name.
fn listed(directory: &Path, wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(directory).map_err(|e| Error::io("read", directory, e))?;
    let mut files = Vec::new();
    for entry in entries.take(ENTRIES_MAX) {
        let path = entry.map_err(|e| Error::io("read", directory, e))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !name.starts_with('.') && wanted(&name) && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Whether `name` matches: `*` stands for any characters, `?` for one.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // Where the last star is, and how much of the name it has taken.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        if pattern.get(p) == Some(&'*') {
            star = Some((p, n));
            p += 1;
        } else if pattern.get(p).is_some_and(|&c| c == '?' || c == name[n]) {
            (p, n) = (p + 1, n + 1);
        } else if let Some((at, taken)) = star {
            star = Some((at, taken + 1));
            (p, n) = (at + 1, taken + 1);
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|&c| c == '*')
}

/// Whether the files are shards; an error where some are and some are not.
fn is_shards(entry: &Path, files: &[PathBuf]) -> Result<bool> {
    let shards = files.iter().filter(|file| extension(file) == SHARD).count();
    if shards > 0 && shards < files.len() {
        let got = format!("{shards} .bin files and {} others", files.len() - shards);
        let remedy = "name them apart, as \"dir/*.bin\"";
        return Err(refused(
            entry,
            "files of rows or .bin files",
            printable(&got),
            remedy,
        ));
    }
    Ok(shards > 0)
}
