//! A checkpoint store opened to be looked at: read-only, whoever holds it.
//!
//! - No lock is held, so that looking never keeps a run from starting. A run that goes on meanwhile
//!   may replace the oldest commits: a commit is looked up again before its bytes are called wrong.
//! - A store under training, or a damaged one, opens as far as it can be read.
//! - What a commit means (step, model, names of tensors) is in its metadata; a store without a
//!   run's metadata has tiles without names.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::names::{Names, TileName};
use super::pages::TileFile;
use super::survey::Survey;
use crate::checkpoint::Progress;
use crate::config::RunConfig;
use crate::error::{Error, Result};
use crate::model::ModelSpec;
use crate::store::checkpoint::{FILE_NAME, LOCK_NAME};
use crate::store::format::{Geometry, Manifest};
use crate::tile::Precision;

/// Tries to see the superblock copies of a running store at rest.
const LOOKS_MAX: usize = 5;
/// Time between two looks: longer than a flush.
const NAP: Duration = Duration::from_millis(20);

/// A store's file and all its structures.
pub struct Store {
    file: TileFile,
    survey: Survey,
    commits: Vec<Commit>,
    holder: Option<u32>,
}

/// A commit whose manifest is whole.
pub struct Commit {
    /// Its generation.
    pub generation: u64,
    /// Steps done; the generation where the metadata are not a run's.
    pub step: u64,
    /// Where the run stood, with its run.toml and config.json; `None` if the metadata are not a
    /// run's.
    pub progress: Option<Progress>,
    /// Its model and precision, where the metadata name one.
    pub model: Option<(ModelSpec, Precision)>,
    /// Names of its tiles and tensors.
    pub names: Names,
    manifest: Manifest,
}

impl Store {
    /// Opens the store at `path`: its directory, a run's `log.dir`, or its file.
    ///
    /// # Errors
    /// [`Error::Io`] if there is none; [`Error::Unsupported`] if a later version made it.
    pub fn open(path: &Path) -> Result<Store> {
        let path = file_at(path);
        let mut looks = 0;
        loop {
            let store = Store::look(&path, holder(path.parent().unwrap_or(Path::new("."))))?;
            looks += 1;
            // Between its flushes a commit leaves copies that differ, which is no damage.
            let at_rest = store.holder.is_none() || store.survey.stale_copies().is_empty();
            if at_rest || looks == LOOKS_MAX {
                return Ok(store);
            }
            std::thread::sleep(NAP);
        }
    }

    /// Opens the store whose lock this process has.
    pub(super) fn open_locked(path: &Path) -> Result<Store> {
        Store::look(&file_at(path), None)
    }

    fn look(path: &Path, holder: Option<u32>) -> Result<Store> {
        let file = TileFile::open(path)?;
        let mut survey = Survey::read(&file)?;
        let mut commits: Vec<Commit> = survey
            .commits
            .iter_mut()
            .filter_map(|found| found.manifest.take())
            .map(|manifest| Commit::of(manifest, path))
            .collect();
        commits.sort_by_key(|commit| commit.generation);
        Ok(Store {
            file,
            survey,
            commits,
            holder,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// Bytes that the file has.
    pub fn length(&self) -> u64 {
        self.file.length
    }

    /// Whether reads go past the page cache.
    pub fn direct(&self) -> bool {
        self.file.direct
    }

    /// Process that has the store open, 0 where unknown; `None` if nobody has.
    pub fn holder(&self) -> Option<u32> {
        self.holder
    }

    /// Its structures, copy by copy. Whole manifests are in [`Store::commits`].
    pub fn survey(&self) -> &Survey {
        &self.survey
    }

    /// Commits whose manifest is whole, oldest first.
    pub fn commits(&self) -> &[Commit] {
        &self.commits
    }

    /// The generation of the evaluation with the lowest loss, and that loss, as the newest commit
    /// tells it; `None` where it is not among the commits.
    pub fn best(&self) -> Option<(u64, f64)> {
        let progress = self.commits.last()?.progress.as_ref()?;
        let best = progress.evaluations.best?;
        let mut newest_first = self.commits.iter().rev();
        let commit = newest_first.find(|commit| {
            let progress = commit.progress.as_ref();
            progress.is_some_and(|progress| progress.is_of(best))
        })?;
        Some((commit.generation, best.loss))
    }

    /// The commit of `step`, or the newest.
    ///
    /// # Errors
    /// [`Error::Input`] if there is none; [`Error::Damaged`] if no superblock can be believed.
    pub fn commit(&self, step: Option<u64>) -> Result<&Commit> {
        self.require_superblock()?;
        let found = match step {
            None => self.commits.last(),
            Some(step) => self.commits.iter().rev().find(|c| c.step == step),
        };
        found.ok_or_else(|| {
            let steps: Vec<String> = self.commits.iter().map(|c| c.step.to_string()).collect();
            let expected = match steps.is_empty() {
                true => "a commit".to_string(),
                false => format!("one of the steps {}", steps.join(", ")),
            };
            Error::input(
                "checkpoint",
                self.path().display().to_string(),
                expected,
                step.map_or("none".to_string(), |step| step.to_string()),
                "name a step that is committed",
            )
        })
    }

    /// Refuses a store of which no superblock can be believed.
    ///
    /// # Errors
    /// [`Error::Damaged`].
    pub fn require_superblock(&self) -> Result<()> {
        if self.survey.superblock.is_some() {
            return Ok(());
        }
        let remedy = "all four copies are lost: restore the file from a copy";
        let fault = self.survey.superblock_fault();
        Err(fault.error(self.path().to_path_buf(), remedy))
    }

    /// What a person should know beside what was asked: who holds it, what is lost.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if let Some(pid) = self.holder {
            let holder = match pid {
                0 => "another process".to_string(),
                pid => format!("process {pid}"),
            };
            notes.push(format!(
                "in use by {holder}: this is what was committed so far"
            ));
        }
        if !self.file.direct {
            notes.push("read through the page cache: no direct I/O here".to_string());
        }
        if let Some(fault) = &self.survey.length {
            notes.push(format!(
                "the file has {}, expected {}",
                fault.got, fault.expected
            ));
        }
        for found in &self.survey.commits {
            let whole = self
                .commits
                .iter()
                .any(|c| c.generation == found.generation);
            if !whole {
                notes.push(format!(
                    "generation {} is lost: no copy of its manifest is whole",
                    found.generation
                ));
            }
        }
        notes
    }

    /// Looks again whether a commit is where it was, before its bytes are called wrong.
    ///
    /// # Errors
    /// [`Error::Overwritten`] if a run has replaced it since.
    pub(super) fn check_still_there(&self, manifest: &Manifest) -> Result<()> {
        let now = Survey::read(&self.file)?;
        let region = manifest.region as usize;
        let held = now
            .superblock
            .as_ref()
            .and_then(|s| s.regions.get(region).copied());
        let was = self
            .survey
            .superblock
            .as_ref()
            .and_then(|s| s.regions.get(region).copied());
        match now.superblock.is_none() || held == was {
            true => Ok(()),
            false => Err(Error::Overwritten {
                path: self.path().to_path_buf(),
                generation: manifest.generation,
            }),
        }
    }

    pub(super) fn file(&self) -> &TileFile {
        &self.file
    }

    /// Sizes; only for a store with a superblock, as one with a commit is.
    pub(super) fn geometry(&self) -> &Geometry {
        let superblock = self.survey.superblock.as_ref();
        &superblock
            .expect("a commit comes from a superblock")
            .geometry
    }
}

impl Commit {
    fn of(manifest: Manifest, path: &Path) -> Commit {
        let progress = Progress::from_json(&manifest.metadata, path).ok();
        let model = progress.as_ref().and_then(|progress| {
            let run = RunConfig::parse(&progress.run, "the commit's run.toml", &[]).ok()?;
            let text = progress.model.to_string();
            let spec = ModelSpec::from_config_json(&text, "the commit's config.json").ok()?;
            Some((spec, run.precision()))
        });
        Commit {
            generation: manifest.generation,
            step: progress.as_ref().map_or(manifest.generation, |p| p.step),
            names: Names::of(&manifest.table, model.as_ref().map(|(spec, _)| spec)),
            progress,
            model,
            manifest,
        }
    }

    /// Its extents and their checksums.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// config.json of its model.
    pub fn model_json(&self) -> Option<&Value> {
        self.progress.as_ref().map(|progress| &progress.model)
    }

    /// Its tiles, in order.
    pub fn tiles(&self) -> Vec<TileName> {
        let mut ids: Vec<_> = self.manifest.table.sections().map(|s| s.tile).collect();
        ids.dedup();
        ids.into_iter().map(|id| self.names.tile(id)).collect()
    }
}

/// The file that a person means: a directory's, a run's, or the one named.
pub fn file_at(path: &Path) -> PathBuf {
    if !path.is_dir() {
        return path.to_path_buf();
    }
    let direct = path.join(FILE_NAME);
    let of_run = path.join("checkpoint").join(FILE_NAME);
    match direct.symlink_metadata().is_err() && of_run.symlink_metadata().is_ok() {
        true => of_run,
        false => direct,
    }
}

/// The process that has a directory's store open, 0 where unknown.
pub(super) fn holder(directory: &Path) -> Option<u32> {
    let lock = open_lock(directory, false).ok()?;
    match lock.try_lock_shared() {
        Err(TryLockError::WouldBlock) => {
            let mut text = String::new();
            lock.take(20).read_to_string(&mut text).ok();
            Some(text.trim().parse().unwrap_or(0))
        }
        _ => None,
    }
}

/// Takes a directory's lock, to change something there.
///
/// # Errors
/// [`Error::Busy`] if another process has it.
pub(super) fn lock(directory: &Path) -> Result<File> {
    let path = directory.join(LOCK_NAME);
    let lock = open_lock(directory, true).map_err(|e| Error::io("open", &path, e))?;
    match lock.try_lock() {
        Ok(()) => {
            // Information only: the lock holds without it.
            let note = lock
                .set_len(0)
                .and_then(|()| writeln!(&lock, "{}", std::process::id()));
            note.ok();
            Ok(lock)
        }
        Err(TryLockError::WouldBlock) => Err(Error::Busy {
            path: directory.to_path_buf(),
            pid: holder(directory).unwrap_or(0),
        }),
        Err(TryLockError::Error(source)) => Err(Error::io("lock", &path, source)),
    }
}

fn open_lock(directory: &Path, writes: bool) -> std::io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(writes)
        .create(writes)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(directory.join(LOCK_NAME))
}
