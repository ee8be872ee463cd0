//! A checkpoint directory looked at from outside: what it holds, and whether all of it can be read.
//!
//! - Nothing is written. A store under training is read beside it; what the training overwrites
//!   meanwhile is counted apart from damage.
//! - Verifying reads every extent of the commits asked for and goes on after the first that is
//!   damaged.

use std::path::Path;

use super::{Progress, own_ring};
use crate::error::{Error, Result};
use crate::host::Ring;
use crate::store::{CheckpointStore, Reader};
use crate::tile::{EXTENT_BYTES_MAX, Section};

/// A checkpoint directory, opened to look at.
pub struct Inspection {
    store: Reader,
    ring: Ring,
}

/// What a commit is.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct CommitSummary {
    /// Its number in the store.
    pub generation: u64,
    /// Steps done.
    pub step: u64,
    /// Tokens done.
    pub tokens: u64,
    /// Extents.
    pub extents: usize,
    /// Bytes of all extents on disk, padded to pages.
    pub bytes: u64,
    /// Bytes by kind of section, over all tiles.
    pub sections: Vec<(String, u64)>,
}

/// What verifying found.
#[derive(Debug, Default)]
pub struct Verified {
    /// Commits read.
    pub commits: usize,
    /// Extents that are as they were written.
    pub extents: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Extents that a running training overwrote before they were read: neither right nor damaged.
    pub overwritten: u64,
    /// One for each damaged or unreadable extent or manifest.
    pub damage: Vec<Error>,
}

impl Inspection {
    /// Opens the store of a directory, beside a running training if there is one.
    ///
    /// # Errors
    /// Those of [`CheckpointStore::open_read_only`].
    pub fn open(directory: &Path) -> Result<Inspection> {
        let store = CheckpointStore::open_read_only(directory)?;
        let ring = own_ring(EXTENT_BYTES_MAX)?;
        Ok(Inspection { store, ring })
    }

    /// Engine and file system, then warnings, damage among them.
    pub fn sentences(&self) -> &[String] {
        self.store.sentences()
    }

    /// Its commits, oldest first.
    ///
    /// # Errors
    /// [`Error::Damaged`] for metadata that is not a run's.
    pub fn commits(&self) -> Result<Vec<CommitSummary>> {
        let generations = self.store.generations();
        if let ([], [first, ..]) = (&generations[..], self.store.lost()) {
            return Err(self.lost(first.region, first.generation));
        }
        generations
            .into_iter()
            .map(|generation| self.summary(generation))
            .collect()
    }

    fn summary(&self, generation: u64) -> Result<CommitSummary> {
        let metadata = self.store.metadata(generation)?;
        let progress = Progress::from_json(&metadata, self.store.path())?;
        let table = self
            .store
            .table()
            .expect("a store with commits has a table");
        let mut sections = Vec::new();
        for kind in Section::ALL {
            let of_kind = table.sections().filter(|section| section.section == kind);
            let bytes: u64 = of_kind.map(|section| section.slot_bytes()).sum();
            if bytes > 0 {
                sections.push((kind.to_string(), bytes));
            }
        }
        Ok(CommitSummary {
            generation,
            step: progress.step,
            tokens: progress.tokens,
            extents: table.count(),
            bytes: table.bytes(),
            sections,
        })
    }

    /// Reads and checks every extent of all commits, or of that of `step`.
    ///
    /// # Errors
    /// [`Error::Input`] if `step` is not committed. Damage is not an error but in the result.
    pub fn verify(&self, step: Option<u64>) -> Result<Verified> {
        let mut commits = self.commits()?;
        let steps: Vec<String> = commits.iter().map(|c| c.step.to_string()).collect();
        if let Some(step) = step {
            commits.retain(|commit| commit.step == step);
            if commits.is_empty() {
                return Err(Error::input(
                    "checkpoint",
                    self.store.path().display().to_string(),
                    format!("one of the steps {}", steps.join(", ")),
                    step.to_string(),
                    "name a step that is committed",
                ));
            }
        }
        let mut verified = Verified::default();
        for commit in &commits {
            self.read_commit(commit.generation, &mut verified);
        }
        if step.is_none() {
            let lost = self.store.lost().iter();
            let errors = lost.map(|lost| self.lost(lost.region, lost.generation));
            verified.damage.extend(errors);
        }
        Ok(verified)
    }

    fn read_commit(&self, generation: u64, verified: &mut Verified) {
        let table = self
            .store
            .table()
            .expect("a store with commits has a table");
        verified.commits += 1;
        for index in 0..table.count() {
            let key = table.key(index);
            match self.store.read(generation, key, self.ring.take()) {
                Ok(_) => {
                    verified.extents += 1;
                    verified.bytes += table.slot_bytes(index) as u64;
                }
                Err(Error::Overwritten { .. }) => verified.overwritten += 1,
                Err(error) => verified.damage.push(error),
            }
        }
    }

    fn lost(&self, region: usize, generation: u64) -> Error {
        Error::Damaged {
            path: self.store.path().to_path_buf(),
            what: format!("manifest of generation {generation}"),
            offset: self.store.superblock().geometry.manifest_offset(region, 0),
            expected: "one of its copies whole".to_string(),
            got: "none".to_string(),
            remedy: "resume from another commit".to_string(),
        }
    }
}
