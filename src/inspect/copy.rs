//! A store copied to a new directory: every extent checked on the way, and again where it lies.
//!
//! - The copy has the original's sizes and identity: a run goes on from it as from the original.
//! - What no commit holds is written as zeros, so that later commits find their blocks written.
//! - The file has another name until all of it is durable; its superblocks are written last. A
//!   failure removes what was written.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::export::refuse_store;
use super::extents::Extents;
use super::pages::Pages;
use super::sink::{Job, Sink};
use super::store::{Commit, Store, lock};
use super::stream::Reading;
use super::survey::{Found, read_manifest_bytes};
use super::verify::{VerifyOptions, verify};
use crate::config::IoEngine;
use crate::error::{Error, Result};
use crate::store::checkpoint::FILE_NAME;
use crate::store::format::{
    MANIFEST_COPIES, REGIONS_START, Region, SUPERBLOCK_COPIES, Superblock, superblock_offset,
};

/// Bytes of a write of zeros.
const ZEROS_BYTES: u64 = 4 << 20;

/// Where to copy, and what.
#[derive(Clone, Debug)]
pub struct CopyOptions {
    /// The directory to make; an empty one will do.
    pub out: PathBuf,
    /// Only the commit of this step.
    pub step: Option<u64>,
    /// Engine and rate.
    pub reading: Reading,
}

/// What was copied.
#[derive(Debug)]
pub struct Copied {
    /// The new file.
    pub path: PathBuf,
    /// Its bytes.
    pub bytes: u64,
    /// Steps of its commits, oldest first.
    pub steps: Vec<u64>,
    /// Steps of commits that a run replaced meanwhile.
    pub replaced: Vec<u64>,
    /// What wrote.
    pub engine: IoEngine,
}

/// Copies a store. `progress` hears of bytes written and read back and of all that will be, and
/// ends the copying by `false`.
///
/// # Errors
/// [`Error::Input`] for a target that is there; [`Error::Budget`] for one too small;
/// [`Error::ExtentChecksum`] if a commit is damaged: name another one by its step; those of reading
/// and writing; [`Error::Interrupted`] when ended. The target is then as it was.
pub fn copy(
    store: &Store,
    options: &CopyOptions,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Copied> {
    let mut commits: Vec<&Commit> = match options.step {
        Some(step) => vec![store.commit(Some(step))?],
        None => store.commits().iter().collect(),
    };
    store.commit(None)?;
    refuse_store(store, &options.out)?;
    let made = prepare(&options.out)?;
    let path = options.out.join(FILE_NAME);
    let unready = options.out.join(format!("{FILE_NAME}.new"));
    let clean = || {
        std::fs::remove_file(&unready).ok();
        std::fs::remove_file(&path).ok();
        if made {
            std::fs::remove_file(options.out.join(crate::store::checkpoint::LOCK_NAME)).ok();
            std::fs::remove_dir(&options.out).ok();
        }
    };
    let copied = (|| {
        let _lock = lock(&options.out)?;
        let mut work = Work::create(store, &unready, options, progress)?;
        let replaced = work.write_regions(&mut commits)?;
        let engine = work.write_superblocks(&commits)?;
        std::fs::rename(&unready, &path).map_err(|e| Error::io("rename", &unready, e))?;
        flush_directory(&options.out)?;
        let steps = commits.iter().map(|commit| commit.step).collect();
        let bytes = store.geometry().file_bytes;
        check_copy(&path, options.reading, bytes, progress)?;
        Ok(Copied {
            path: path.clone(),
            bytes,
            steps,
            replaced,
            engine,
        })
    })();
    copied.inspect_err(|_| clean())
}

/// Makes the directory; `false` if it was there and empty.
fn prepare(out: &Path) -> Result<bool> {
    match DirBuilder::new().mode(0o700).create(out) {
        Ok(()) => return Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(Error::io("create", out, error)),
    }
    let mut entries = std::fs::read_dir(out).map_err(|e| Error::io("list", out, e))?;
    if entries.next().is_none() {
        return Ok(false);
    }
    Err(Error::input(
        "copy",
        out.display().to_string(),
        "a new directory",
        "one that is there and not empty",
        "choose another",
    ))
}

struct Work<'a> {
    store: &'a Store,
    file: Arc<File>,
    path: &'a Path,
    options: &'a CopyOptions,
    progress: &'a mut dyn FnMut(u64, u64) -> bool,
    done: u64,
}

impl<'a> Work<'a> {
    fn create(
        store: &'a Store,
        path: &'a Path,
        options: &'a CopyOptions,
        progress: &'a mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Work<'a>> {
        let bytes = store.geometry().file_bytes;
        let open = |direct| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | direct)
                .open(path)
        };
        let file = open(libc::O_DIRECT).or_else(|error| match error.raw_os_error() {
            Some(libc::EINVAL | libc::EOPNOTSUPP) => {
                std::fs::remove_file(path).ok();
                open(0)
            }
            _ => Err(error),
        });
        let file = file.map_err(|e| Error::io("create", path, e))?;
        crate::store::reserve(&file, path, bytes, "checkpoint", "free space")?;
        Ok(Work {
            store,
            file: Arc::new(file),
            path,
            options,
            progress,
            done: 0,
        })
    }

    /// All but the superblocks, made durable. Commits that a run replaced meanwhile are taken out.
    fn write_regions(&mut self, commits: &mut Vec<&Commit>) -> Result<Vec<u64>> {
        let sink = self.sink()?;
        self.zeros(&sink, 0, REGIONS_START)?;
        let geometry = *self.store.geometry();
        let mut replaced = Vec::new();
        for region in 0..geometry.region_count as usize {
            let start = geometry.manifest_offset(region, 0);
            let commit = commits
                .iter()
                .find(|c| c.manifest().region as usize == region);
            let Some(commit) = commit.copied() else {
                self.zeros(&sink, start, geometry.region_bytes)?;
                continue;
            };
            let before = self.done;
            match self.write_commit(&sink, commit) {
                Ok(()) => {}
                Err(error @ Error::Overwritten { .. }) => {
                    commits.retain(|kept| kept.generation != commit.generation);
                    if commits.is_empty() {
                        return Err(error);
                    }
                    replaced.push(commit.step);
                    self.done = before;
                    self.zeros(&sink, start, geometry.region_bytes)?;
                }
                Err(error) => return Err(error),
            }
        }
        self.settle(sink)?;
        Ok(replaced)
    }

    fn write_commit(&mut self, sink: &Sink, commit: &Commit) -> Result<()> {
        let (store, manifest) = (self.store, commit.manifest());
        let (geometry, region) = (*store.geometry(), manifest.region as usize);
        let found = store
            .survey()
            .commits
            .iter()
            .find(|found| found.region == region);
        let bytes = whole_manifest(store, found.expect("a commit was found in the survey"))?;
        for copy in 0..MANIFEST_COPIES {
            let offset = geometry.manifest_offset(region, copy);
            self.zeros_after(sink, offset, &bytes, geometry.manifest_bytes_max)?;
        }
        let indices = (0..manifest.table.count()).collect();
        let mut extents = Extents::start(store, manifest, indices, self.options.reading)?;
        while let Some(run) = extents.next_run() {
            let run = run?;
            let job = Job {
                offset: run.piece.offset,
                bytes: run.piece.bytes,
                pages: run.pages,
                home: run.home,
            };
            self.write(sink, job)?;
        }
        if extents.is_finished() {
            return Ok(());
        }
        Err(Error::StoreFailed {
            first: "a reading thread has ended".to_string(),
        })
    }

    /// `bytes` at `offset`, then zeros up to `whole`.
    fn zeros_after(&mut self, sink: &Sink, offset: u64, bytes: &[u8], whole: u64) -> Result<()> {
        for (index, part) in bytes.chunks(ZEROS_BYTES as usize).enumerate() {
            let mut pages = Pages::new(part.len());
            pages.bytes_mut()[..part.len()].copy_from_slice(part);
            let job = Job {
                offset: offset + index as u64 * ZEROS_BYTES,
                bytes: part.len(),
                pages,
                home: None,
            };
            self.write(sink, job)?;
        }
        let written = bytes.len() as u64;
        self.zeros(sink, offset + written, whole - written)
    }

    fn zeros(&mut self, sink: &Sink, offset: u64, bytes: u64) -> Result<()> {
        let end = offset + bytes;
        let mut at = offset;
        while at < end {
            let count = (end - at).min(ZEROS_BYTES) as usize;
            let job = Job {
                offset: at,
                bytes: count,
                pages: Pages::new(count),
                home: None,
            };
            self.write(sink, job)?;
            at += count as u64;
        }
        Ok(())
    }

    fn sink(&self) -> Result<Sink> {
        let started = Sink::start(&self.file, self.options.reading.engine);
        started.map_err(|e| Error::io("start writing", self.path, e))
    }

    fn write(&mut self, sink: &Sink, job: Job) -> Result<()> {
        self.done += job.bytes as u64;
        sink.write(job).map_err(|e| self.failed(e))?;
        let all = 2 * self.store.geometry().file_bytes;
        match (self.progress)(self.done, all) {
            true => Ok(()),
            false => Err(ended()),
        }
    }

    fn settle(&self, sink: Sink) -> Result<IoEngine> {
        let engine = sink.engine();
        let outcome = sink.finish().and_then(|()| self.file.sync_all());
        outcome.map(|()| engine).map_err(|e| self.failed(e))
    }

    fn failed(&self, source: io::Error) -> Error {
        Error::Io {
            action: "write",
            path: self.path.to_path_buf(),
            source,
            remedy: "; nothing of the copy is kept".to_string(),
        }
    }

    /// The superblocks that name these commits, half by half.
    fn write_superblocks(&mut self, commits: &[&Commit]) -> Result<IoEngine> {
        let superblock = superblock_of(self.store, commits);
        let mut engine = IoEngine::Pread;
        for half in [
            0..SUPERBLOCK_COPIES / 2,
            SUPERBLOCK_COPIES / 2..SUPERBLOCK_COPIES,
        ] {
            let sink = self.sink()?;
            for copy in half {
                let page = superblock.encode(copy);
                let mut pages = Pages::new(page.len());
                pages.bytes_mut()[..page.len()].copy_from_slice(&page);
                let job = Job {
                    offset: superblock_offset(copy),
                    bytes: page.len(),
                    pages,
                    home: None,
                };
                sink.write(job).map_err(|e| self.failed(e))?;
            }
            engine = self.settle(sink)?;
        }
        Ok(engine)
    }
}

/// The store's superblock with these commits alone.
fn superblock_of(store: &Store, commits: &[&Commit]) -> Superblock {
    let superblock = store.survey().superblock.as_ref();
    let mut superblock = superblock
        .expect("a commit comes from a superblock")
        .clone();
    for (index, region) in superblock.regions.iter_mut().enumerate() {
        if !commits
            .iter()
            .any(|c| c.manifest().region as usize == index)
        {
            *region = Region::Free;
        }
    }
    superblock
}

/// The manifest's bytes from a copy that is whole.
pub(super) fn whole_manifest(store: &Store, found: &Found) -> Result<Vec<u8>> {
    let copy = found.copies.iter().position(Option::is_none);
    let copy = copy.expect("a commit has a whole manifest") as u64;
    let bytes = read_manifest_bytes(store.file(), store.geometry(), found, copy);
    bytes.map_err(|fault| fault.error(store.path().to_path_buf(), "try again"))
}

fn ended() -> Error {
    Error::Interrupted {
        signal: signal_hook::consts::SIGINT,
        step: 0,
    }
}

fn flush_directory(path: &Path) -> Result<()> {
    let flushed = File::open(path).and_then(|directory| directory.sync_all());
    flushed.map_err(|e| Error::io("flush", path, e))
}

/// Reads the copy back.
fn check_copy(
    path: &Path,
    reading: Reading,
    before: u64,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<()> {
    let copy = Store::open(path)?;
    let options = VerifyOptions {
        full: true,
        reading,
        ..VerifyOptions::default()
    };
    let mut tick = |done: u64, all: u64| progress(before + done, before + all.max(done));
    let verified = verify(&copy, &options, &mut tick)?;
    if verified.interrupted {
        return Err(ended());
    }
    match verified.findings.first() {
        None => Ok(()),
        Some(finding) => Err(finding
            .fault
            .error(path.to_path_buf(), "the copy is removed: check the drive")),
    }
}
