//! The checkpoint class: durable commits of a run's whole state.
//!
//! - A commit is whole or absent: after [`Commit::finish`] returned, it opens bit-exact after
//!   SIGKILL or a power cut; before that, the previous ones do.
//! - `keep` commits stay readable while the next is written, into a region that is free on disk.
//! - Any error of a write or a flush ends writing by this process; the file then holds the commits
//!   that it held. Nothing is tried again: a second flush may report success for lost bytes.
//! - Every extent read is checked against its manifest before anyone sees it.
//! - Opening changes nothing on disk; superblock copies are repaired before the first write.
//!
//! The order of a commit is in `commit`, the bytes in [`super::format`]. What the state means, and
//! the metadata's JSON, is the trainer's.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crossbeam_channel::Sender;

use super::commit;
use super::directory;
use super::disk::{self, Direction, Disk, Probe};
use super::engine::{Counters, Done, Engine, Order};
use super::format::{self, Geometry, Manifest, Region, SUPERBLOCK_COPIES, Superblock};
use super::recover::{Reader, damaged};
use super::{ExtentKey, ExtentTable, StoredSection, sys};
use crate::config::IoEngine;
use crate::error::{Error, Result};
use crate::host::{HostArena, Lease, Ring, Span};
use crate::tile::{EXTENT_BYTES_MAX, PAGE_BYTES};

pub use super::commit::{Commit, Phase};

/// Name of the file in its directory.
pub const FILE_NAME: &str = "checkpoint.tiles";
/// Name of the lock in its directory.
pub const LOCK_NAME: &str = "checkpoint.lock";
/// Slabs of the store's own, for manifests, zeros and payloads given as slices.
const OWN_SLABS: usize = 4;
/// Reads of [`CheckpointStore::read_all`] in flight.
const READS_MAX: usize = 8;

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

    fn geometry(&self, table: &ExtentTable) -> Option<Geometry> {
        let regions = u32::try_from(self.keep.checked_add(1)?).ok()?;
        Geometry::new(table.count() as u64, table.bytes(), regions)
    }
}

/// An order's owner within the store.
pub(super) struct Tag {
    pub(super) number: usize,
    pub(super) reply: Sender<Outcome>,
}

/// An order's outcome.
pub(super) struct Outcome {
    pub(super) number: usize,
    /// Of a read; a written slab is back in its ring.
    pub(super) slab: Option<Lease>,
    pub(super) checksum: u128,
    pub(super) result: io::Result<()>,
}

/// The checkpoint store.
pub struct CheckpointStore {
    pub(super) path: PathBuf,
    pub(super) engine: Engine<Tag>,
    pub(super) ring: Ring,
    pub(super) superblock: Superblock,
    /// `None` in a store opened without a [`Spec`] that holds no commit.
    pub(super) table: Option<ExtentTable>,
    /// By region: its commit, if it has one that can be read.
    pub(super) commits: Vec<Option<Manifest>>,
    /// Superblock copies that differ from the one in force.
    pub(super) stale: Vec<usize>,
    /// The first failure of a write or flush.
    pub(super) failure: Option<String>,
    pub(super) hook: Option<Box<dyn Fn(Phase) + Send>>,
    sentences: Vec<String>,
    /// Held until the engine is gone.
    _lock: Option<File>,
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
    /// [`Error::Input`] if it is another model's or keeps fewer commits, [`Error::Unsupported`] if
    /// a later version made it, [`Error::Damaged`] if no commit of it can be read.
    pub fn open_or_create(directory: &Path, spec: &Spec) -> Result<CheckpointStore> {
        directory::prepare(directory)?;
        let lock = directory::lock(directory, LOCK_NAME)?;
        let path = directory.join(FILE_NAME);
        let probe = disk::probe(directory, spec.engine)?;
        let mut store = match std::fs::symlink_metadata(&path) {
            Ok(_) => CheckpointStore::open_file(&path, &probe, Some(spec))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                create_file(directory, &probe, spec)?
            }
            Err(error) => return Err(Error::io("look at", &path, error)),
        };
        store.sentences.splice(0..0, probe.warning);
        store.sentences.insert(0, probe.sentence);
        store._lock = Some(lock);
        Ok(store)
    }

    /// Opens a store as it is, whoever made it, to look at it or to resume.
    ///
    /// # Errors
    /// As [`CheckpointStore::open_or_create`]; [`Error::Io`] if there is none.
    pub fn open_existing(directory: &Path) -> Result<CheckpointStore> {
        let path = directory.join(FILE_NAME);
        std::fs::symlink_metadata(&path).map_err(|source| Error::Io {
            action: "open",
            path: path.clone(),
            source,
            remedy: "; name a run's checkpoint.dir".to_string(),
        })?;
        let lock = directory::lock(directory, LOCK_NAME)?;
        let probe = disk::probe(directory, None)?;
        let mut store = CheckpointStore::open_file(&path, &probe, None)?;
        store.sentences.splice(0..0, probe.warning);
        store.sentences.insert(0, probe.sentence);
        store._lock = Some(lock);
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
        let own = own_ring(spec.map(|spec| ExtentTable::new(&spec.sections)).as_ref())?;
        let memory = memory(&own, spec);
        let (disk, note) = disk::open(file, whole, probe, &memory)
            .map_err(|e| Error::io("start I/O on", path, e))?;
        let mut store = CheckpointStore::open_disk_at(path, disk, length, own, spec)?;
        store.sentences.extend(note);
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
        CheckpointStore::open_disk_at(Path::new("simulated"), disk, bytes, own, spec)
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
        let engine = spawn(path, disk)?;
        let reader = Reader {
            path,
            engine: &engine,
            ring: &own,
        };
        let copies = reader.superblocks(bytes)?;
        let superblock = reader.choose(&copies)?;
        if let Some(spec) = spec {
            check_spec(path, &superblock, spec)?;
        }
        let (commits, warnings) = reader.commits(&superblock)?;
        let table = match spec {
            Some(spec) => Some(ExtentTable::new(&spec.sections)),
            None => commits
                .iter()
                .flatten()
                .next()
                .map(|found| found.table.clone()),
        };
        let stale = (0..SUPERBLOCK_COPIES)
            .filter(|copy| copies[*copy].as_ref().ok() != Some(&superblock))
            .collect();
        Ok(CheckpointStore {
            path: path.to_path_buf(),
            engine,
            ring: own,
            superblock,
            table,
            commits,
            stale,
            failure: None,
            hook: None,
            sentences: warnings,
            _lock: None,
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
            store_uuid: uuid,
            model_hash: spec.model_hash,
            layout_hash: format::layout_hash(&table),
            sequence: 1,
            keep: geometry.region_count - 1,
            geometry,
            regions: vec![Region::Free; geometry.region_count as usize],
        };
        let mut store = CheckpointStore {
            path: path.to_path_buf(),
            engine: spawn(path, disk)?,
            ring: own,
            commits: vec![None; superblock.regions.len()],
            superblock: superblock.clone(),
            table: Some(table),
            stale: Vec::new(),
            failure: None,
            hook: None,
            sentences: Vec::new(),
            _lock: None,
        };
        store.write_superblock(&superblock, &[0, 1])?;
        store.write_superblock(&superblock, &[2, 3])?;
        Ok(store)
    }

    /// What to say once: engine, direct or buffered, file system; then warnings, damage among them.
    pub fn sentences(&self) -> &[String] {
        &self.sentences
    }

    /// The store's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The superblock in force: identity, sizes, regions.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// All extents of a commit; `None` in a store opened without a [`Spec`] that has no commit.
    pub fn table(&self) -> Option<&ExtentTable> {
        self.table.as_ref()
    }

    /// Generations that can be read, ascending.
    pub fn generations(&self) -> Vec<u64> {
        let mut found: Vec<u64> = self
            .commits
            .iter()
            .flatten()
            .map(|m| m.generation)
            .collect();
        found.sort_unstable();
        found
    }

    /// The newest generation.
    pub fn latest(&self) -> Option<u64> {
        self.generations().last().copied()
    }

    /// What the trainer stored beside a generation.
    ///
    /// # Errors
    /// [`Error::Input`] if there is no such generation.
    pub fn metadata(&self, generation: u64) -> Result<Vec<u8>> {
        Ok(self.manifest(generation)?.metadata.clone())
    }

    /// Checksum of an extent's padded bytes, as committed.
    ///
    /// # Errors
    /// [`Error::Input`] if there is no such generation or extent.
    pub fn extent_checksum(&self, generation: u64, key: ExtentKey) -> Result<u128> {
        let manifest = self.manifest(generation)?;
        Ok(manifest.checksums[self.index(manifest, key)?])
    }

    /// Reads one extent into a slab of at least its padded bytes and checks it.
    ///
    /// # Errors
    /// [`Error::ExtentChecksum`], [`Error::TileIo`]; [`Error::Input`] if there is no such
    /// generation or extent.
    pub fn read(&self, generation: u64, key: ExtentKey, slab: Lease) -> Result<Lease> {
        let manifest = self.manifest(generation)?;
        let index = self.index(manifest, key)?;
        let (reply, outcomes) = crossbeam_channel::bounded(1);
        self.order_read(manifest, index, slab, reply)?;
        let outcome = outcomes.recv().map_err(|_| stopped())?;
        self.checked(manifest, outcome)
    }

    /// Reads extents, several at once, into slabs of `ring`, and gives each, checked, to `each`, in
    /// no particular order. Its error ends the reading and is returned.
    ///
    /// # Errors
    /// As [`CheckpointStore::read`].
    pub fn read_all(
        &self,
        generation: u64,
        keys: impl IntoIterator<Item = ExtentKey>,
        ring: &Ring,
        mut each: impl FnMut(ExtentKey, &Lease) -> Result<()>,
    ) -> Result<()> {
        let manifest = self.manifest(generation)?;
        let (reply, outcomes) = crossbeam_channel::bounded(READS_MAX);
        let mut keys = keys.into_iter().peekable();
        let mut outstanding = 0;
        while outstanding > 0 || keys.peek().is_some() {
            while outstanding < READS_MAX && keys.peek().is_some() {
                let slab = match ring.try_take() {
                    Some(slab) => slab,
                    None if outstanding == 0 => ring.take(),
                    None => break,
                };
                let key = keys.next().expect("peeked above");
                let index = self.index(manifest, key)?;
                self.order_read(manifest, index, slab, reply.clone())?;
                outstanding += 1;
            }
            let outcome = outcomes.recv().map_err(|_| stopped())?;
            outstanding -= 1;
            let key = manifest.table.key(outcome.number);
            let slab = self.checked(manifest, outcome)?;
            each(key, &slab)?;
        }
        Ok(())
    }

    /// Begins a commit of `generation`, which must be newer than all that the store holds.
    ///
    /// # Errors
    /// [`Error::StoreFailed`] after a failure, [`Error::Input`] if the generation is not newer,
    /// [`Error::Io`] if damaged superblock copies cannot be repaired.
    pub fn begin_commit(&mut self, generation: u64) -> Result<Commit<'_>> {
        commit::begin(self, generation)
    }

    /// Calls `hook` in each phase of every later commit, for tests that end the process there.
    pub fn set_phase_hook(&mut self, hook: Box<dyn Fn(Phase) + Send>) {
        self.hook = Some(hook);
    }

    /// What moved since the store was opened.
    pub fn counters(&self) -> Counters {
        self.engine.counters()
    }

    fn manifest(&self, generation: u64) -> Result<&Manifest> {
        let mut found = self.commits.iter().flatten();
        found.find(|m| m.generation == generation).ok_or_else(|| {
            Error::input(
                "checkpoint",
                self.path.display().to_string(),
                format!("one of its generations {:?}", self.generations()),
                generation.to_string(),
                "name one of them",
            )
        })
    }

    fn index(&self, manifest: &Manifest, key: ExtentKey) -> Result<usize> {
        manifest.table.index(key).ok_or_else(|| {
            Error::input(
                "checkpoint",
                self.path.display().to_string(),
                "an extent of the commit",
                key.to_string(),
                "name a tile, section and extent that it lists",
            )
        })
    }

    fn order_read(
        &self,
        manifest: &Manifest,
        index: usize,
        slab: Lease,
        reply: Sender<Outcome>,
    ) -> Result<()> {
        let bytes = manifest.table.slot_bytes(index);
        assert!(
            slab.len() >= bytes,
            "{:?} holds less than {bytes} bytes",
            slab
        );
        let order = Order {
            direction: Direction::Read,
            offset: self.extent_offset(manifest.region as usize, &manifest.table, index),
            payload: bytes,
            bytes,
            slab,
            tag: Tag {
                number: index,
                reply,
            },
        };
        self.engine.submit(order).map_err(|_| stopped())
    }

    /// The slab of a read that succeeded with the checksum that it should have.
    fn checked(&self, manifest: &Manifest, outcome: Outcome) -> Result<Lease> {
        let index = outcome.number;
        let region = manifest.region as usize;
        if let Err(source) = outcome.result {
            return Err(self.tile_error("read", region, &manifest.table, index, source));
        }
        let key = manifest.table.key(index);
        let expected = manifest.checksums[index];
        if outcome.checksum != expected {
            return Err(Error::ExtentChecksum {
                path: self.path.clone(),
                tile: key.place(),
                extent: key.extent,
                offset: self.extent_offset(region, &manifest.table, index),
                expected,
                got: outcome.checksum,
            });
        }
        Ok(outcome.slab.expect("a read gives its slab back"))
    }

    pub(super) fn extent_offset(&self, region: usize, table: &ExtentTable, index: usize) -> u64 {
        self.superblock.geometry.extents_offset(region) + table.offset(index)
    }

    pub(super) fn tile_error(
        &self,
        action: &'static str,
        region: usize,
        table: &ExtentTable,
        index: usize,
        source: io::Error,
    ) -> Error {
        let key = table.key(index);
        Error::TileIo {
            action,
            path: self.path.clone(),
            tile: key.place(),
            extent: key.extent,
            offset: self.extent_offset(region, table, index),
            needed: table.slot_bytes(index) as u64,
            free: sys::free_bytes(&self.path),
            source,
        }
    }
}

pub(super) fn stopped() -> Error {
    Error::StoreFailed {
        first: "the store's thread has ended".to_string(),
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

fn spawn(path: &Path, disk: Box<dyn Disk>) -> Result<Engine<Tag>> {
    let settle = |done: Done<Tag>| {
        let outcome = Outcome {
            number: done.tag.number,
            slab: (done.direction == Direction::Read).then_some(done.slab),
            checksum: done.checksum,
            result: done.result,
        };
        // Whoever dropped the receiver wants no answer.
        done.tag.reply.send(outcome).ok();
    };
    Engine::spawn(disk, settle).map_err(|e| Error::io("start a thread for", path, e))
}

/// Slabs of the store's own: at most 16 MiB, beside the host tier's budget.
fn own_ring(table: Option<&ExtentTable>) -> Result<Ring> {
    let largest = table.map_or(EXTENT_BYTES_MAX, |table| table.slot_bytes_max() as u64);
    let slab = largest.clamp(16 * PAGE_BYTES, EXTENT_BYTES_MAX);
    let mut cutter = HostArena::take(OWN_SLABS as u64 * slab)?;
    Ok(cutter.cut_ring(OWN_SLABS, slab))
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
    let keep = u64::from(superblock.keep);
    if spec.keep > keep {
        return refused(
            format!("room for checkpoint.keep = {}", spec.keep),
            format!("a file made for {keep}"),
            "set checkpoint.keep to that, or choose another checkpoint.dir",
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
    commit::fill_with_zeros(&mut *disk, &own, bytes)
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
