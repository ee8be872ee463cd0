//! The checkpoint class: durable commits of a run's whole state.
//!
//! - A commit is whole or absent: after [`Commit::finish`] returned, it opens bit-exact after
//!   SIGKILL or a power cut; before that, the previous ones do.
//! - `keep` commits stay readable while the next is written, into a region that is free on disk.
//! - Any error of a write or a flush ends writing by this process; the file then holds the commits
//!   that it held. Nothing is tried again: a second flush may report success for lost bytes.
//! - Every extent read is checked against its manifest before anyone sees it.
//! - Opening changes nothing on disk but the count of regions, where `keep` is another one than
//!   before; superblock copies are repaired before the first write.
//!
//! The order of a commit is in `commit`, the bytes in [`super::format`]. What the state means, and
//! the metadata's JSON, is the trainer's.

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::path::Path;

use super::codec::{self, LEVEL_MAX};
use super::commit;
use super::directory;
use super::disk::{self, Disk, Probe};
use super::format::{self, Geometry, REGION_COUNT_MAX, Region, SUPERBLOCK_COPIES, Superblock};
use super::reader::{absent, own_ring, spawn};
use super::recover::{Found, Recovery, damaged};
use super::{ExtentTable, Reader, StoredSection, resize};
use crate::config::IoEngine;
use crate::error::{Error, Result};
use crate::host::{Ring, Span};
use crate::tile::PAGE_BYTES;

pub(super) use super::reader::{Outcome, Tag, stopped};

pub use super::commit::{Commit, Phase};

/// Name of the file in its directory.
pub const FILE_NAME: &str = "checkpoint.tiles";
/// Name of the lock in its directory.
pub const LOCK_NAME: &str = "checkpoint.lock";

/// What a run wants of its checkpoint store.
#[derive(Clone)]
pub struct Spec {
    /// Names the model: a store of another one is refused.
    pub model_hash: u128,
    /// Commits to keep, 1..=31.
    pub keep: u64,
    /// All that a commit holds.
    pub sections: Vec<StoredSection>,
    /// Engine; `None` is by the probe.
    pub engine: Option<IoEngine>,
    /// Rings whose slabs will be submitted, to be registered with the kernel where allowed.
    pub memory: Vec<Span>,
}

impl Spec {
    /// Bytes of the store's file, reserved at creation; `None` if the format cannot hold it.
    pub fn file_bytes(&self) -> Option<u64> {
        Some(self.geometry(&ExtentTable::new(&self.sections))?.file_bytes)
    }

    /// Commits to keep, if the format can.
    fn keep_count(&self) -> Option<u32> {
        let keep = u32::try_from(self.keep).ok()?;
        (1..REGION_COUNT_MAX as u32).contains(&keep).then_some(keep)
    }

    fn geometry(&self, table: &ExtentTable) -> Option<Geometry> {
        let regions = u32::try_from(self.keep.checked_add(1)?).ok()?;
        Geometry::new(table.count() as u64, table.bytes(), regions)
    }
}

/// The checkpoint store: what a [`Reader`] reads, and the sole right to change it.
pub struct CheckpointStore {
    reader: Reader,
    /// All superblock copies are the one in force, and durable.
    pub(super) settled: bool,
    /// The first failure of a write or flush.
    pub(super) failure: Option<String>,
    pub(super) hook: Option<Box<dyn Fn(Phase) + Send>>,
    /// Level of zstd for later commits; 0 is off.
    pub(super) zstd: i32,
    /// The generation that later commits free last.
    pub(super) pinned: Option<u64>,
    /// To shorten it; none on a disk given.
    pub(super) file: Option<File>,
}

impl Deref for CheckpointStore {
    type Target = Reader;

    fn deref(&self) -> &Reader {
        &self.reader
    }
}

impl DerefMut for CheckpointStore {
    fn deref_mut(&mut self) -> &mut Reader {
        &mut self.reader
    }
}

impl CheckpointStore {
    /// Whether `directory` has a store.
    pub fn exists(directory: &Path) -> bool {
        directory.join(FILE_NAME).symlink_metadata().is_ok()
    }

    /// Opens the store in `directory`, or makes it: reserved and filled with zeros, which takes as
    /// long as writing (keep + 1) commits.
    ///
    /// # Errors
    /// [`Error::Budget`] on a full disk, [`Error::Busy`] if another process has it,
    /// [`Error::Input`] if it is another model's, [`Error::Unsupported`] if
    /// a later version made it, [`Error::Damaged`] if no commit of it can be read.
    pub fn open_or_create(directory: &Path, spec: &Spec) -> Result<CheckpointStore> {
        directory::prepare(directory)?;
        let lock = directory::lock(directory, LOCK_NAME)?;
        let path = directory.join(FILE_NAME);
        let probe = disk::probe(directory, spec.engine)?;
        let mut store = match std::fs::symlink_metadata(&path) {
            Ok(_) => CheckpointStore::open_for(&path, &probe, spec)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                create_file(directory, &probe, spec)?
            }
            Err(error) => return Err(Error::io("look at", &path, error)),
        };
        store.sentences.splice(0..0, probe.warning);
        store.sentences.insert(0, probe.sentence);
        store.lock = Some(lock);
        Ok(store)
    }

    /// Opens a store to read from: any number of readers at once, and beside a running training.
    ///
    /// # Errors
    /// [`Error::Io`] if there is none, [`Error::Unsupported`] if a later version made it,
    /// [`Error::Damaged`] if no superblock can be believed. Commits that cannot be read are no
    /// error: [`Reader::lost`] has them.
    pub fn open_read_only(directory: &Path) -> Result<Reader> {
        Reader::open(directory)
    }

    /// Opens a store as it is, whoever made it, alone.
    ///
    /// # Errors
    /// As [`CheckpointStore::open_or_create`]; [`Error::Io`] if there is none.
    pub fn open_existing(directory: &Path) -> Result<CheckpointStore> {
        let path = directory.join(FILE_NAME);
        std::fs::symlink_metadata(&path).map_err(|e| absent(&path, e))?;
        let lock = directory::lock(directory, LOCK_NAME)?;
        let probe = disk::probe(directory, None)?;
        let mut store = CheckpointStore::open_file(&path, &probe, None)?;
        store.sentences.splice(0..0, probe.warning);
        store.sentences.insert(0, probe.sentence);
        store.lock = Some(lock);
        Ok(store)
    }

    /// Opens the file with room for the commits that `spec` keeps.
    fn open_for(path: &Path, probe: &Probe, spec: &Spec) -> Result<CheckpointStore> {
        let keep = spec.keep_count().ok_or_else(|| unfit(path, spec))?;
        let mut store = CheckpointStore::open_file(path, probe, Some(spec))?;
        if keep + 1 > store.superblock.geometry.region_count {
            let superblock = store.superblock.clone();
            // A disk has one length for life.
            drop(store);
            resize::lengthen(path, probe, &superblock, keep)?;
            store = CheckpointStore::open_file(path, probe, Some(spec))?;
        }
        store.set_keep(keep, u64::MAX)?;
        Ok(store)
    }

    fn open_file(path: &Path, probe: &Probe, spec: Option<&Spec>) -> Result<CheckpointStore> {
        let opened = directory::open_file(path, probe.direct, false);
        let file = opened.map_err(|e| Error::io("open", path, e))?;
        let length = file
            .metadata()
            .map_err(|e| Error::io("look at", path, e))?
            .len();
        let whole = length / PAGE_BYTES * PAGE_BYTES;
        let shortened = file.try_clone().map_err(|e| Error::io("open", path, e))?;
        let own = own_ring(spec.map(|spec| ExtentTable::new(&spec.sections)).as_ref())?;
        let memory = memory(&own, spec);
        let (disk, note) = disk::open(file, whole, probe, &memory)
            .map_err(|e| Error::io("start I/O on", path, e))?;
        let mut store = CheckpointStore::open_disk_at(path, disk, length, own, spec)?;
        store.sentences.extend(note);
        store.file = Some(shortened);
        Ok(store)
    }

    /// Opens the store on a disk of `bytes`, for tests: a simulated one, say.
    pub fn open_disk(
        disk: Box<dyn Disk>,
        bytes: u64,
        spec: Option<&Spec>,
    ) -> Result<CheckpointStore> {
        let table = spec.map(|spec| ExtentTable::new(&spec.sections));
        let own = own_ring(table.as_ref())?;
        let mut store =
            CheckpointStore::open_disk_at(Path::new("simulated"), disk, bytes, own, spec)?;
        if let Some(keep) = spec.and_then(Spec::keep_count) {
            store.set_keep(keep, bytes)?;
        }
        Ok(store)
    }

    fn open_disk_at(
        path: &Path,
        disk: Box<dyn Disk>,
        bytes: u64,
        own: Ring,
        spec: Option<&Spec>,
    ) -> Result<CheckpointStore> {
        if bytes < format::REGIONS_START {
            return Err(damaged(
                path,
                "file",
                0,
                "at least 4 MiB",
                &format!("{bytes} bytes"),
            ));
        }
        let threads = spawn(path, disk)?;
        let recovery = Recovery {
            path,
            engine: &threads.1,
            ring: &own,
        };
        let found = recovery.find(bytes)?;
        if let Some(spec) = spec {
            check_spec(path, &found.superblock, spec)?;
        }
        let found = found.readable()?;
        let mut reader = Reader::new(path, threads, own, found);
        if let Some(spec) = spec {
            reader.table = Some(ExtentTable::new(&spec.sections));
        }
        Ok(CheckpointStore {
            reader,
            settled: false,
            failure: None,
            hook: None,
            zstd: 0,
            pinned: None,
            file: None,
        })
    }

    /// Makes an empty store on a disk of [`Spec::file_bytes`] zeros.
    ///
    /// # Errors
    /// [`Error::Input`] if the format cannot hold it, [`Error::Io`] if the disk refuses.
    pub fn format_disk(disk: Box<dyn Disk>, spec: &Spec, uuid: u128) -> Result<CheckpointStore> {
        let own = own_ring(Some(&ExtentTable::new(&spec.sections)))?;
        CheckpointStore::format_disk_at(Path::new("simulated"), disk, spec, own, uuid)
    }

    fn format_disk_at(
        path: &Path,
        disk: Box<dyn Disk>,
        spec: &Spec,
        own: Ring,
        uuid: u128,
    ) -> Result<CheckpointStore> {
        let table = ExtentTable::new(&spec.sections);
        let geometry = spec.geometry(&table).ok_or_else(|| unfit(path, spec))?;
        let superblock = Superblock {
            features_required: 0,
            store_uuid: uuid,
            model_hash: spec.model_hash,
            layout_hash: format::layout_hash(&table),
            sequence: 1,
            keep: geometry.region_count - 1,
            geometry,
            regions: vec![Region::Free; geometry.region_count as usize],
        };
        let found = Found {
            copies: (0..SUPERBLOCK_COPIES)
                .map(|_| Ok(superblock.clone()))
                .collect(),
            commits: vec![None; superblock.regions.len()],
            lost: Vec::new(),
            superblock: superblock.clone(),
        };
        let mut reader = Reader::new(path, spawn(path, disk)?, own, found);
        reader.table = Some(table);
        let mut store = CheckpointStore {
            reader,
            settled: true,
            failure: None,
            hook: None,
            zstd: 0,
            pinned: None,
            file: None,
        };
        store.write_superblock(&superblock, &[0, 1])?;
        store.write_superblock(&superblock, &[2, 3])?;
        Ok(store)
    }

    /// Begins a commit of `generation`, which must be newer than all that the store holds.
    ///
    /// # Errors
    /// [`Error::StoreFailed`] after a failure, [`Error::Input`] if the generation is not newer,
    /// [`Error::Io`] if damaged superblock copies cannot be repaired.
    pub fn begin_commit(&mut self, generation: u64) -> Result<Commit<'_>> {
        commit::begin(self, generation)
    }

    /// Compresses the extents of later commits at `level` of zstd, 1 to 19, or, by 0, no more.
    /// Extents that it would not shorten stay plain. Any commit can be read, whatever is set.
    ///
    /// # Errors
    /// [`Error::Io`] if no threads can be started.
    ///
    /// # Panics
    /// If the level is above 19.
    pub fn set_zstd(&mut self, level: u64) -> Result<()> {
        assert!(level <= LEVEL_MAX, "zstd level {level}");
        if level > 0 {
            let started = codec::start(&self.workers, self.engine.handle());
            started.map_err(|e| Error::io("start a thread for", &self.path, e))?;
        }
        self.zstd = level as i32;
        Ok(())
    }

    /// Lets later commits keep `generation` among the `keep` that they leave, however old it is;
    /// by `None`, the newest alone. One that is not there is nothing to keep.
    pub fn set_pinned(&mut self, generation: Option<u64>) {
        self.pinned = generation;
    }

    /// Calls `hook` in each phase of every later commit, for tests that end the process there.
    pub fn set_phase_hook(&mut self, hook: Box<dyn Fn(Phase) + Send>) {
        self.hook = Some(hook);
    }
}

fn unfit(path: &Path, spec: &Spec) -> Error {
    Error::input(
        "checkpoint",
        path.display().to_string(),
        "checkpoint.keep of 1 to 31 and at least one section",
        format!("keep {} and {} sections", spec.keep, spec.sections.len()),
        "change checkpoint.keep",
    )
}

fn memory(own: &Ring, spec: Option<&Spec>) -> Vec<Span> {
    let mut memory = vec![own.span()];
    memory.extend(spec.iter().flat_map(|spec| spec.memory.iter().cloned()));
    memory
}

fn check_spec(path: &Path, superblock: &Superblock, spec: &Spec) -> Result<()> {
    let refused = |expected: String, got: String, remedy: &str| {
        Err(Error::input(
            "checkpoint",
            path.display().to_string(),
            expected,
            got,
            remedy,
        ))
    };
    if superblock.model_hash != spec.model_hash {
        return refused(
            format!("a checkpoint of this model ({:032x})", spec.model_hash),
            format!("one of another ({:032x})", superblock.model_hash),
            "choose another checkpoint.dir, or the model that it was made with",
        );
    }
    let table = ExtentTable::new(&spec.sections);
    let hash = format::layout_hash(&table);
    if superblock.layout_hash != hash {
        return refused(
            format!("{} extents, layout {hash:032x}", table.count()),
            format!(
                "{} extents, layout {:032x}",
                superblock.geometry.extent_count, superblock.layout_hash
            ),
            "choose another checkpoint.dir, or the precision that it was made with",
        );
    }
    Ok(())
}

/// Makes the file under another name and gives it its own when it is whole.
fn create_file(directory: &Path, probe: &Probe, spec: &Spec) -> Result<CheckpointStore> {
    let path = directory.join(FILE_NAME);
    let unready = directory.join(format!("{FILE_NAME}.new"));
    let bytes = spec.file_bytes().ok_or_else(|| unfit(&path, spec))?;
    match std::fs::remove_file(&unready) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(Error::io("remove a leftover", &unready, error));
        }
        _ => {}
    }
    let made = create_unready(directory, &unready, bytes, probe, spec);
    let mut store = made.inspect_err(|_| {
        // The space of what was not made is given back; a second failure would hide the first.
        std::fs::remove_file(&unready).ok();
    })?;
    std::fs::rename(&unready, &path).map_err(|e| Error::io("rename", &unready, e))?;
    directory::sync(directory)?;
    store.path = path;
    Ok(store)
}

fn create_unready(
    directory: &Path,
    unready: &Path,
    bytes: u64,
    probe: &Probe,
    spec: &Spec,
) -> Result<CheckpointStore> {
    let file = directory::open_file(unready, probe.direct, true)
        .map_err(|e| Error::io("create", unready, e))?;
    let remedy = "free space, lower checkpoint.keep or name another checkpoint.dir";
    directory::reserve(&file, unready, bytes, "checkpoint", remedy)?;
    let whole = file
        .try_clone()
        .map_err(|e| Error::io("open", unready, e))?;
    let own = own_ring(Some(&ExtentTable::new(&spec.sections)))?;
    let (disk, note) = disk::open(file, bytes, probe, &memory(&own, Some(spec)))
        .map_err(|e| Error::io("start I/O on", unready, e))?;
    // Zeros first, through an engine of their own, so that no superblock precedes them.
    let mut disk = disk;
    commit::fill_with_zeros(&mut *disk, &own, 0..bytes)
        .and_then(|()| whole.sync_all())
        .map_err(|e| commit::write_error(unready, bytes, e))?;
    directory::sync(directory)?;
    let uuid = random_uuid().map_err(|e| Error::io("read", Path::new("/dev/urandom"), e))?;
    let mut store = CheckpointStore::format_disk_at(unready, disk, spec, own, uuid)?;
    store.sentences.extend(note);
    Ok(store)
}

fn random_uuid() -> io::Result<u128> {
    let mut bytes = [0; 16];
    io::Read::read_exact(&mut File::open("/dev/urandom")?, &mut bytes)?;
    Ok(u128::from_le_bytes(bytes))
}
