//! Puts right what exists a second time: superblock copies, manifest copies, the file's length.
//!
//! - A plan is made first and can be looked at; nothing is written before it is asked for.
//! - A commit of which both manifests are lost is quarantined, if others are left: the superblock
//!   no longer names it, its bytes stay until a commit needs their place.
//! - What is overwritten is kept in a log beside the file, durable before the first write, and can
//!   be put back ([`undo`]).
//! - Extents exist once: their damage is not repaired.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::copy::whole_manifest;
use super::store::{Store, lock};
use crate::error::{Error, Result, printable};
use crate::store::checksum;
use crate::store::format::{Region, SUPERBLOCK_COPIES, Superblock, superblock_offset};

/// Most bytes of a line of a log: a manifest in hexadecimal.
const LINE_BYTES_MAX: u64 = 4 << 30;

/// A write that puts something right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// What is restored.
    pub what: String,
    /// Where.
    pub offset: u64,
    /// The bytes that belong there.
    pub after: Vec<u8>,
    /// A flush comes before it.
    flush_before: bool,
}

/// What a repair would do.
#[derive(Debug, Default)]
pub struct Repair {
    /// Writes, in order.
    pub changes: Vec<Change>,
    /// The length that the file gets.
    pub length: Option<u64>,
    /// Generations that the superblock will no longer name.
    pub quarantined: Vec<u64>,
    /// What stays damaged, a sentence each.
    pub lost: Vec<String>,
}

impl Repair {
    /// Nothing is to be done.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.length.is_none()
    }

    /// What will be done, a sentence each.
    pub fn sentences(&self) -> Vec<String> {
        let mut sentences: Vec<String> = Vec::new();
        sentences.extend(
            self.length
                .map(|length| format!("set the file's length to {length} bytes")),
        );
        sentences.extend(self.changes.iter().map(|change| {
            let (what, offset, bytes) = (&change.what, change.offset, change.after.len());
            format!("write {what}: {bytes} bytes at byte {offset}")
        }));
        sentences
    }
}

/// What would put `store` right.
///
/// # Errors
/// [`Error::Damaged`] if no superblock can be believed or no commit would be left;
/// [`Error::Busy`] if a run has it.
pub fn plan(store: &Store) -> Result<Repair> {
    store.require_superblock()?;
    if let Some(pid) = store.holder() {
        return Err(Error::Busy {
            path: directory_of(store.path()).to_path_buf(),
            pid,
        });
    }
    let mut repair = Repair::default();
    plan_length(store, &mut repair);
    plan_manifests(store, &mut repair)?;
    plan_superblocks(store, &mut repair)?;
    Ok(repair)
}

fn plan_length(store: &Store, repair: &mut Repair) {
    let (geometry, length) = (store.geometry(), store.length());
    if length < geometry.file_bytes {
        repair.length = Some(geometry.file_bytes);
    }
    for commit in store.commits() {
        let start = geometry.extents_offset(commit.manifest().region as usize);
        if start + geometry.extents_bytes > length {
            repair.lost.push(format!(
                "the end of the commit of step {} is past the file's end",
                commit.step
            ));
        }
    }
}

fn plan_manifests(store: &Store, repair: &mut Repair) -> Result<()> {
    let whole = |generation| store.commits().iter().any(|c| c.generation == generation);
    for found in &store.survey().commits {
        if !whole(found.generation) || found.copies.iter().all(Option::is_none) {
            continue;
        }
        let bytes = whole_manifest(store, found)?;
        for (copy, fault) in found.copies.iter().enumerate() {
            if fault.is_some() {
                repair.changes.push(Change {
                    what: format!("manifest (copy {copy}) of generation {}", found.generation),
                    offset: store.geometry().manifest_offset(found.region, copy as u64),
                    after: bytes.clone(),
                    flush_before: false,
                });
            }
        }
    }
    Ok(())
}

fn plan_superblocks(store: &Store, repair: &mut Repair) -> Result<()> {
    let survey = store.survey();
    let Some(superblock) = &survey.superblock else {
        return Ok(());
    };
    let stale: Vec<usize> = survey
        .stale_copies()
        .iter()
        .map(|(copy, _)| *copy)
        .collect();
    push_superblock(repair, superblock, &stale);
    let whole = |generation| store.commits().iter().any(|c| c.generation == generation);
    let unreadable: Vec<_> = survey
        .commits
        .iter()
        .filter(|f| !whole(f.generation))
        .collect();
    if unreadable.is_empty() {
        return Ok(());
    }
    if store.commits().is_empty() {
        let remedy = "no commit is left to go on from: restore the file from a copy";
        let fault = unreadable.iter().find_map(|found| found.copies[0].as_ref());
        let fault = fault.or(unreadable[0].copies[1].as_ref()).cloned();
        let fault = fault.unwrap_or_else(|| survey.superblock_fault());
        return Err(fault.error(store.path().to_path_buf(), remedy));
    }
    let mut next = superblock.clone();
    next.sequence += 1;
    for found in unreadable {
        next.regions[found.region] = Region::Free;
        repair.quarantined.push(found.generation);
        repair.lost.push(format!(
            "generation {} cannot be read: no copy of its manifest is whole",
            found.generation
        ));
    }
    let half = SUPERBLOCK_COPIES / 2;
    push_superblock(repair, &next, &(0..half).collect::<Vec<_>>());
    push_superblock(
        repair,
        &next,
        &(half..SUPERBLOCK_COPIES).collect::<Vec<_>>(),
    );
    Ok(())
}

/// Copies of a superblock, after all that was pushed before is durable.
fn push_superblock(repair: &mut Repair, superblock: &Superblock, copies: &[usize]) {
    for (index, copy) in copies.iter().enumerate() {
        repair.changes.push(Change {
            what: format!("superblock (copy {copy}), sequence {}", superblock.sequence),
            offset: superblock_offset(*copy),
            after: superblock.encode(*copy),
            flush_before: index == 0,
        });
    }
}

/// First line of a log.
#[derive(Serialize, Deserialize)]
struct LogHead {
    terrace_repair: u32,
    /// Bytes that the file had.
    length: u64,
}

/// Another line of a log: bytes that were there before a change.
#[derive(Serialize, Deserialize)]
struct Before {
    what: String,
    offset: u64,
    /// In hexadecimal; fewer than were written where the file ended, none where they could not be
    /// read.
    before: String,
    /// Bytes that were written.
    bytes: usize,
    /// Checksum of what was written.
    after: String,
}

/// Makes a plan and carries it out. Returns it with the log of what was overwritten, if anything
/// was.
///
/// # Errors
/// As [`plan`]; [`Error::Io`].
pub fn repair(path: &Path) -> Result<(Repair, Option<PathBuf>)> {
    let path = super::store::file_at(path);
    // Nothing is made where there is no store.
    Store::open(&path)?;
    let _lock = lock(directory_of(&path))?;
    let store = Store::open_locked(&path)?;
    let repair = plan(&store)?;
    if repair.is_empty() {
        return Ok((repair, None));
    }
    let file = open_to_write(&path)?;
    let log = write_log(&file, &path, &repair)?;
    let failed = |source| Error::Io {
        action: "write",
        path: path.clone(),
        source,
        remedy: format!("; what was there is in {}", log.display()),
    };
    if let Some(length) = repair.length {
        file.set_len(length).map_err(failed)?;
    }
    for change in &repair.changes {
        if change.flush_before {
            file.sync_all().map_err(failed)?;
        }
        file.write_all_at(&change.after, change.offset)
            .map_err(failed)?;
    }
    file.sync_all().map_err(failed)?;
    Ok((repair, Some(log)))
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

fn open_to_write(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(path)
        .map_err(|e| Error::io("open", path, e))
}

/// Keeps what the changes will overwrite, durably, in a new file beside the store's.
fn write_log(file: &File, path: &Path, repair: &Repair) -> Result<PathBuf> {
    let log = free_name(directory_of(path));
    let failed = |source| Error::io("write", &log, source);
    let new = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(&log)
        .map_err(failed)?;
    let mut out = BufWriter::new(new);
    let length = file
        .metadata()
        .map_err(|e| Error::io("look at", path, e))?
        .len();
    let head = LogHead {
        terrace_repair: 1,
        length,
    };
    line(&mut out, &head).map_err(failed)?;
    let mut keep = |what: &str, offset: u64, after: &[u8]| {
        let left = length.saturating_sub(offset);
        let mut before = vec![0; left.min(after.len() as u64) as usize];
        // What the drive cannot read cannot be kept; it is written over all the same.
        let kept = file.read_exact_at(&mut before, offset).is_ok();
        let before = Before {
            what: what.to_string(),
            offset,
            before: if kept { hex(&before) } else { String::new() },
            bytes: after.len(),
            after: format!("{:032x}", checksum(after)),
        };
        line(&mut out, &before).map_err(failed)
    };
    for change in &repair.changes {
        keep(&change.what, change.offset, &change.after)?;
    }
    let new = out.into_inner().map_err(|e| failed(e.into_error()))?;
    new.sync_all().map_err(failed)?;
    let directory = directory_of(path);
    let flushed = File::open(directory).and_then(|directory| directory.sync_all());
    flushed.map_err(|e| Error::io("flush", directory, e))?;
    Ok(log)
}

fn line(out: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_string(value)?;
    writeln!(out, "{text}")
}

/// `repair.log`, or the first of `repair.1.log`, ... that is free.
fn free_name(directory: &Path) -> PathBuf {
    let names = (0..).map(|number| match number {
        0 => "repair.log".to_string(),
        number => format!("repair.{number}.log"),
    });
    let mut paths = names.map(|name| directory.join(name));
    let free = paths.find(|path| path.symlink_metadata().is_err());
    free.expect("there are endless names")
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        write!(text, "{byte:02x}").expect("text has room");
    }
    text
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let pairs = text.as_bytes().chunks(2);
    pairs
        .map(|pair| match pair {
            [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
            _ => None,
        })
        .collect()
}

/// Puts back what a repair overwrote, as its log says; only looks, unless `writes`. Returns what
/// is put back, a sentence each.
///
/// # Errors
/// [`Error::Input`] for something that is not a log, or if the file has other bytes than the repair
/// left; [`Error::Busy`] if a run has the store; [`Error::Io`].
pub fn undo(path: &Path, log: &Path, writes: bool) -> Result<Vec<String>> {
    let path = super::store::file_at(path);
    let _lock = lock(directory_of(&path))?;
    let file = open_to_write(&path)?;
    let (head, changes) = read_log(log)?;
    let mut sentences = Vec::new();
    // Later changes lie over earlier ones.
    let mut seen: Vec<u64> = Vec::new();
    for change in changes.iter().rev() {
        let newest = !seen.contains(&change.offset);
        seen.push(change.offset);
        let now = checksum_at(&file, &path, change)?;
        if newest && now != change.after {
            return Err(Error::input(
                "repair",
                format!("{}: {}", path.display(), printable(&change.what)),
                format!(
                    "the bytes that the repair wrote ({})",
                    printable(&change.after)
                ),
                format!("others ({now})"),
                "the store was written since: it is left as it is",
            ));
        }
        let (what, offset) = (printable(&change.what), change.offset);
        sentences.push(format!("put back {what} at byte {offset}"));
    }
    if !writes {
        return Ok(sentences);
    }
    let failed = |source| Error::io("write", &path, source);
    for change in changes.iter().rev() {
        let bytes = unhex(&change.before).ok_or_else(|| not_a_log(log, "other digits"))?;
        file.write_all_at(&bytes, change.offset).map_err(failed)?;
    }
    file.set_len(head.length).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    Ok(sentences)
}

fn checksum_at(file: &File, path: &Path, change: &Before) -> Result<String> {
    let length = file
        .metadata()
        .map_err(|e| Error::io("look at", path, e))?
        .len();
    if change
        .offset
        .checked_add(change.bytes as u64)
        .is_none_or(|end| end > length)
    {
        return Ok("past the file's end".to_string());
    }
    let mut now = vec![0; change.bytes];
    file.read_exact_at(&mut now, change.offset)
        .map_err(|e| Error::io("read", path, e))?;
    Ok(format!("{:032x}", checksum(&now)))
}

fn read_log(log: &Path) -> Result<(LogHead, Vec<Before>)> {
    let file = File::open(log).map_err(|e| Error::io("open", log, e))?;
    let mut lines = BufReader::new(file.take(LINE_BYTES_MAX)).lines();
    let mut next = || match lines.next() {
        None => Ok(None),
        Some(line) => line.map(Some).map_err(|e| Error::io("read", log, e)),
    };
    let wrong = |error: serde_json::Error| not_a_log(log, &error.to_string());
    let head = next()?.ok_or_else(|| not_a_log(log, "nothing"))?;
    let head: LogHead = serde_json::from_str(&head).map_err(wrong)?;
    let mut changes = Vec::new();
    while let Some(text) = next()? {
        changes.push(serde_json::from_str(&text).map_err(wrong)?);
    }
    Ok((head, changes))
}

fn not_a_log(log: &Path, got: &str) -> Error {
    Error::input(
        "repair",
        log.display().to_string(),
        "the log of a repair",
        printable(got),
        "name the repair.log that a repair wrote",
    )
}
