//! Whether a store is what was committed: its structures, and on request every byte.
//!
//! - Reading is sequential, region by region, and goes on after the first damage.
//! - What is found is repairable (a twin is whole) or a loss.
//! - A long verification can be rated, ended, and gone on with from a file of its own.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::extents::{Extents, extent_offset};
use super::store::{Commit, Store};
use super::stream::Reading;
use super::survey::Fault;
use crate::config::IoEngine;
use crate::error::{Error, Result};
use crate::tile::EXTENT_ELEMENTS;

/// How often the state is written while reading.
const STATE_EVERY: Duration = Duration::from_secs(2);

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// What is damaged exists a second time.
    Repairable,
    /// It does not.
    Loss,
}

/// Something that is not as it was written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// How bad.
    pub severity: Severity,
    /// Where and what.
    #[serde(flatten)]
    pub fault: Fault,
    /// Step of the commit, if it is one's.
    pub step: Option<u64>,
    /// Name of the tile, if it is one's.
    pub tile: Option<String>,
    /// Name of the section, if it is one's.
    pub section: Option<String>,
    /// Index of the extent within its section, if it is one's.
    pub extent: Option<u32>,
    /// Tensors that lie in it.
    pub tensors: Vec<String>,
}

impl Finding {
    fn of(severity: Severity, fault: Fault, step: Option<u64>) -> Finding {
        Finding {
            severity,
            fault,
            step,
            tile: None,
            section: None,
            extent: None,
            tensors: Vec::new(),
        }
    }
}

/// What to verify, and how.
#[derive(Clone, Debug, Default)]
pub struct VerifyOptions {
    /// Read every extent, not only the structures.
    pub full: bool,
    /// Only the commit of this step.
    pub step: Option<u64>,
    /// Engine and rate.
    pub reading: Reading,
    /// Where the state is kept, to go on from after an end.
    pub state: Option<PathBuf>,
}

/// What verifying found.
#[derive(Debug, Default)]
pub struct Verified {
    /// One for each damaged structure or extent.
    pub findings: Vec<Finding>,
    /// Commits looked at.
    pub commits: usize,
    /// Extents read that are as they were written.
    pub extents: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Extents that an earlier verification has read, whose state was gone on from.
    pub resumed_extents: u64,
    /// What read; `None` if no extent was.
    pub engine: Option<IoEngine>,
    /// What a person should know.
    pub notes: Vec<String>,
    /// Ended before all was read.
    pub interrupted: bool,
}

impl Verified {
    /// The worst that was found.
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|finding| finding.severity).max()
    }
}

/// What a verification keeps to go on from.
#[derive(Serialize, Deserialize)]
struct State {
    store_uuid: String,
    /// Checksum of each commit's manifest, in the order in which they are read.
    commits: Vec<String>,
    /// Extents that were read, over all commits.
    extents_done: u64,
    findings: Vec<Finding>,
}

/// Verifies a store. `progress` hears of bytes read and of all that will be, and ends the reading
/// by `false`.
///
/// # Errors
/// [`Error::Input`] if the step is not committed; those of writing the state. Damage is not an
/// error but in the result.
pub fn verify(
    store: &Store,
    options: &VerifyOptions,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Verified> {
    let mut verified = Verified {
        notes: store.notes(),
        ..Verified::default()
    };
    verified.findings = structural(store, options.step);
    if store.survey().superblock.is_none() {
        return Ok(verified);
    }
    let mut commits: Vec<&Commit> = match options.step {
        Some(step) => vec![store.commit(Some(step))?],
        None => store.commits().iter().collect(),
    };
    commits.sort_by_key(|commit| commit.manifest().region);
    verified.commits = commits.len();
    if options.full {
        let mut reader = Reader {
            store,
            options,
            total: commits
                .iter()
                .map(|c| stored_bytes(c, 0..c.manifest().table.count()))
                .sum(),
            done_bytes: 0,
            done: 0,
            skip: 0,
            structural: verified.findings.len(),
            commits,
            saved: Instant::now(),
        };
        reader.read(&mut verified, progress)?;
    }
    Ok(verified)
}

/// What is wrong with the structures; of one commit's if a step is named.
pub fn structural(store: &Store, step: Option<u64>) -> Vec<Finding> {
    let survey = store.survey();
    let mut findings = Vec::new();
    if survey.superblock.is_none() {
        for copy in &survey.copies {
            if let Err(fault) = copy {
                findings.push(Finding::of(Severity::Loss, fault.clone(), None));
            }
        }
        if findings.is_empty() {
            findings.push(Finding::of(Severity::Loss, survey.superblock_fault(), None));
        }
        return findings;
    }
    for (_, fault) in survey.stale_copies() {
        findings.push(Finding::of(Severity::Repairable, fault, None));
    }
    if let Some(fault) = &survey.length {
        let end = |region: usize| {
            let geometry = store.geometry();
            geometry.manifest_offset(region, 0) + geometry.region_bytes
        };
        let cut = survey
            .commits
            .iter()
            .any(|found| end(found.region) > store.length());
        let severity = if cut {
            Severity::Loss
        } else {
            Severity::Repairable
        };
        findings.push(Finding::of(severity, fault.clone(), None));
    }
    for found in &survey.commits {
        let commit = store
            .commits()
            .iter()
            .find(|c| c.generation == found.generation);
        let of_step = commit.map(|commit| commit.step);
        if step.is_some() && step != of_step {
            continue;
        }
        let severity = match commit {
            Some(_) => Severity::Repairable,
            None => Severity::Loss,
        };
        for fault in found.copies.iter().flatten() {
            let mut fault = fault.clone();
            fault.what = format!("{} of generation {}", fault.what, found.generation);
            findings.push(Finding::of(severity, fault, of_step));
        }
    }
    findings
}

/// Reads the extents of several commits.
struct Reader<'a> {
    store: &'a Store,
    options: &'a VerifyOptions,
    commits: Vec<&'a Commit>,
    /// Bytes of all commits, and those passed.
    total: u64,
    done_bytes: u64,
    /// Extents passed, and those that an earlier verification has read.
    done: u64,
    skip: u64,
    /// Findings that are not of extents.
    structural: usize,
    saved: Instant,
}

impl Reader<'_> {
    fn read(
        &mut self,
        verified: &mut Verified,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<()> {
        self.resume(verified)?;
        for commit in self.commits.clone() {
            if !self.read_commit(commit, verified, progress)? {
                verified.interrupted = true;
                break;
            }
        }
        match &self.options.state {
            Some(_) if verified.interrupted => self.save(verified),
            // All was read: the next one begins anew.
            Some(path) => match std::fs::remove_file(path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    Err(Error::io("remove", path, error))
                }
                _ => Ok(()),
            },
            None => Ok(()),
        }
    }

    /// Reads one commit; `false` when the person ended it.
    fn read_commit(
        &mut self,
        commit: &Commit,
        verified: &mut Verified,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<bool> {
        let (store, table) = (self.store, &commit.manifest().table);
        let count = table.count() as u64;
        let skipped = self.skip.saturating_sub(self.done).min(count);
        self.done += skipped;
        self.done_bytes += stored_bytes(commit, 0..skipped as usize);
        if skipped == count {
            return Ok(true);
        }
        let indices = (skipped as usize..table.count()).collect();
        let mut extents = Extents::start(store, commit.manifest(), indices, self.options.reading)?;
        verified.engine = Some(extents.engine());
        while let Some(extent) = extents.next() {
            let (index, stored) = (extent.index, extent.stored_bytes);
            match extent.bytes {
                Ok(_) => {
                    verified.extents += 1;
                    verified.bytes += stored;
                }
                Err(Error::Overwritten { .. }) => {
                    verified.notes.push(format!(
                        "the commit of step {} was replaced by a newer one while it was read",
                        commit.step
                    ));
                    self.done_bytes += stored_bytes(commit, index..table.count());
                    self.done += count - index as u64;
                    return Ok(true);
                }
                Err(error) => verified
                    .findings
                    .push(damaged(store, commit, index, &error)),
            }
            self.done += 1;
            self.done_bytes += stored;
            if !progress(self.done_bytes, self.total) {
                return Ok(false);
            }
            if self.saved.elapsed() > STATE_EVERY {
                self.save(verified)?;
            }
        }
        // `Extents` ends early only if a thread of its own did.
        if extents.is_finished() {
            return Ok(true);
        }
        Err(Error::StoreFailed {
            first: "a reading thread has ended".to_string(),
        })
    }

    fn identity(&self) -> (String, Vec<String>) {
        let superblock = self.store.survey().superblock.as_ref();
        let uuid = superblock.map_or(0, |superblock| superblock.store_uuid);
        let found = &self.store.survey().commits;
        let checksum = |commit: &&Commit| {
            let found = found.iter().find(|f| f.generation == commit.generation);
            format!("{:032x}", found.map_or(0, |found| found.manifest_checksum))
        };
        let commits = self.commits.iter().map(checksum).collect();
        (format!("{uuid:032x}"), commits)
    }

    /// Goes on from the state of an earlier verification of the same commits.
    fn resume(&mut self, verified: &mut Verified) -> Result<()> {
        let Some(path) = &self.options.state else {
            return Ok(());
        };
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(Error::io("read", path, error)),
        };
        let state: State = serde_json::from_str(&text).map_err(|error| {
            Error::input(
                "verify",
                path.display().to_string(),
                "the state of a verification",
                crate::error::printable(&error.to_string()),
                "name another file, or remove this one",
            )
        })?;
        let (uuid, commits) = self.identity();
        if (state.store_uuid.as_str(), &state.commits) != (uuid.as_str(), &commits) {
            let note = "the state is of other commits: verified from the beginning";
            verified.notes.push(note.to_string());
            return Ok(());
        }
        self.skip = state.extents_done;
        verified.resumed_extents = state.extents_done;
        verified.findings.extend(state.findings);
        Ok(())
    }

    fn save(&mut self, verified: &Verified) -> Result<()> {
        self.saved = Instant::now();
        let Some(path) = &self.options.state else {
            return Ok(());
        };
        let (store_uuid, commits) = self.identity();
        let state = State {
            store_uuid,
            commits,
            extents_done: self.done,
            findings: verified.findings[self.structural..].to_vec(),
        };
        let text = serde_json::to_string_pretty(&state).expect("a state is plain values");
        replace(path, text.as_bytes())
    }
}

/// Bytes that some extents of a commit have on the disk.
fn stored_bytes(commit: &Commit, indices: std::ops::Range<usize>) -> u64 {
    let manifest = commit.manifest();
    indices
        .map(|index| manifest.stored_bytes(index) as u64)
        .sum()
}

/// Writes a file beside `path` and gives it that name, so that an end leaves one of the two.
fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    std::fs::write(&beside, bytes).map_err(|e| Error::io("write", &beside, e))?;
    std::fs::rename(&beside, path).map_err(|e| Error::io("rename", &beside, e))
}

/// An extent that could not be read, or is not what was written.
fn damaged(store: &Store, commit: &Commit, index: usize, error: &Error) -> Finding {
    let manifest = commit.manifest();
    let key = manifest.table.key(index);
    let (expected, got) = match error {
        Error::ExtentChecksum { expected, got, .. } => {
            (format!("checksum {expected:032x}"), format!("{got:032x}"))
        }
        Error::TileIo { source, .. } => ("bytes that can be read".to_string(), source.to_string()),
        other => ("an extent that can be read".to_string(), other.to_string()),
    };
    let tile = commit.names.tile(key.tile);
    let start = u64::from(key.extent) * EXTENT_ELEMENTS;
    let elements = manifest.table.payload_bytes(index) as u64 / manifest.table.element_bytes(index);
    let fault = Fault {
        what: format!(
            "step {}, {tile} {}, extent {}",
            commit.step, key.section, key.extent
        ),
        offset: extent_offset(manifest, store.geometry(), index),
        expected,
        got,
    };
    Finding {
        tile: Some(tile.name),
        section: Some(key.section.to_string()),
        extent: Some(key.extent),
        tensors: commit
            .names
            .tensors_within(key.tile, start..start + elements),
        ..Finding::of(Severity::Loss, fault, Some(commit.step))
    }
}
