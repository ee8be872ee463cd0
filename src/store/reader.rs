//! A checkpoint store opened to read: beside other readers, and beside a running training.
//!
//! - Opening writes nothing, not even a trial page, and needs no right to write.
//! - Readers share the directory's lock; a training has it alone. A reader that meets a training
//!   reads all the same, without the lock.
//! - Beside a training, what cannot be read or has another checksum is looked at twice: if the
//!   superblock no longer names the region as it did at the opening, the extent was overwritten
//!   ([`Error::Overwritten`]); otherwise it is damaged. Bytes whose checksum is right are right.
//! - Every extent read is checked against its manifest before anyone sees it.
//!
//! Which superblock is in force and which commits can be read is `recover`'s to find.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crossbeam_channel::Sender;

use super::checkpoint::{FILE_NAME, LOCK_NAME};
use super::codec::{self, Decoding, Job};
use super::directory::{self, Shared};
use super::disk::{self, Direction, Disk};
use super::engine::{Counters, Done, Engine, Order};
use super::format::{Manifest, Region, Stored, Superblock};
use super::mutant::{self, Mutant};
use super::recover::{Copy, Found, Lost, Recovery};
use super::workers::Workers;
use super::{ExtentKey, ExtentTable, Say, sys};
use crate::error::{Error, Result};
use crate::host::{HostArena, Lease, Ring};
use crate::tile::{EXTENT_BYTES_MAX, PAGE_BYTES};

/// Slabs of the store's own, for manifests, zeros and payloads given as slices.
const OWN_SLABS: usize = 4;
/// Reads of [`Reader::read_all`] in flight.
const READS_MAX: usize = 8;
/// Openings that a running training may disturb before the reader gives up: each takes
/// milliseconds, a commit at least four flushes.
const OPENINGS_MAX: usize = 100;

/// An order's owner within the store.
pub(super) struct Tag {
    pub(super) number: usize,
    pub(super) reply: Sender<Outcome>,
    /// How what is written was encoded.
    pub(super) stored: Stored,
    /// What is read is decoded before it is given back.
    pub(super) decoding: Option<Decoding>,
}

impl Tag {
    pub(super) fn new(number: usize, reply: Sender<Outcome>) -> Tag {
        Tag {
            number,
            reply,
            stored: Stored::Plain,
            decoding: None,
        }
    }
}

/// An order's outcome.
pub(super) struct Outcome {
    pub(super) number: usize,
    /// Of a read; a written slab is back in its ring.
    pub(super) slab: Option<Lease>,
    /// Of the stored bytes with their padding.
    pub(super) checksum: u128,
    pub(super) stored: Stored,
    pub(super) result: io::Result<()>,
}

/// A checkpoint store as it was when it was opened, to read from.
pub struct Reader {
    pub(super) path: PathBuf,
    /// Before the engine, whose thread ends after theirs.
    pub(super) workers: Workers<Job>,
    pub(super) engine: Engine<Tag>,
    pub(super) ring: Ring,
    pub(super) superblock: Superblock,
    /// By number: the superblock of each copy, or why there is none.
    pub(super) copies: Vec<Copy>,
    /// `None` in a store opened without a [`super::Spec`] that holds no commit.
    pub(super) table: Option<ExtentTable>,
    /// By region: its commit, if it has one that can be read.
    pub(super) commits: Vec<Option<Manifest>>,
    /// Commits that the superblock names and that cannot be read.
    pub(super) lost: Vec<Lost>,
    pub(super) sentences: Vec<String>,
    /// A training that has the store: its process, 0 where unknown.
    training: Option<u32>,
    /// A training may write while this reads.
    disturbed: bool,
    /// Held until the engine is gone.
    pub(super) lock: Option<File>,
}

/// What became of a store while it was being read.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Recheck {
    /// Sequence of the superblock in force.
    pub sequence: u64,
    /// Generations that were there at the opening and are not any more, ascending.
    pub overwritten: Vec<u64>,
    /// Generations committed since the opening, ascending.
    pub newer: Vec<u64>,
}

impl Reader {
    pub(super) fn new(
        path: &Path,
        (workers, engine): (Workers<Job>, Engine<Tag>),
        ring: Ring,
        found: Found,
    ) -> Reader {
        let table = found.commits.iter().flatten().next();
        let sentences = found.lost.iter().map(Lost::sentence).collect();
        Reader {
            path: path.to_path_buf(),
            workers,
            engine,
            ring,
            superblock: found.superblock,
            copies: found.copies,
            table: table.map(|manifest| manifest.table.clone()),
            commits: found.commits,
            lost: found.lost,
            sentences,
            training: None,
            disturbed: false,
            lock: None,
        }
    }

    pub(super) fn open(directory: &Path) -> Result<Reader> {
        let path = directory.join(FILE_NAME);
        std::fs::symlink_metadata(&path).map_err(|e| absent(&path, e))?;
        let shared = directory::lock_shared(directory, LOCK_NAME)?;
        let own = own_ring(None)?;
        let opened = disk::open_to_read(&path, &[own.span()])?;
        let mut reader = Reader::on_disk(&path, opened.disk, opened.bytes, own)?;
        reader.sentences.insert(0, opened.sentence);
        reader.disturbed = !matches!(shared, Shared::Locked(_));
        match shared {
            Shared::Locked(lock) => reader.lock = Some(lock),
            Shared::Held(pid) => {
                reader.training = Some(pid);
                let holder = crate::error::holder_text(pid);
                reader.sentences.insert(
                    1,
                    format!(
                        "read beside {holder}, which has it: as of sequence {}, generations {:?}",
                        reader.superblock.sequence,
                        reader.generations()
                    ),
                );
            }
            Shared::None(reason) => {
                let sentence = format!("read without its lock: {reason}");
                reader.sentences.insert(1, sentence);
            }
        }
        Ok(reader)
    }

    /// Opens the store on a disk of `bytes` that someone may be writing, for tests.
    ///
    /// # Errors
    /// As [`super::CheckpointStore::open_read_only`].
    pub fn open_disk(disk: Box<dyn Disk>, bytes: u64) -> Result<Reader> {
        let mut reader = Reader::on_disk(Path::new("simulated"), disk, bytes, own_ring(None)?)?;
        (reader.training, reader.disturbed) = (Some(0), true);
        Ok(reader)
    }

    fn on_disk(path: &Path, disk: Box<dyn Disk>, bytes: u64, own: Ring) -> Result<Reader> {
        let threads = spawn(path, disk)?;
        let recovery = Recovery {
            path,
            engine: &threads.1,
            ring: &own,
        };
        let mut damage = None;
        for _ in 0..OPENINGS_MAX {
            let found = recovery
                .find(bytes)
                .and_then(|found| Ok((recovery.superblock(bytes)?.sequence, found)));
            match found {
                // What was found belongs together if no commit ended meanwhile.
                Ok((now, found)) if now == found.superblock.sequence => {
                    return Ok(Reader::new(path, threads, own, found));
                }
                Ok(_) => damage = None,
                // Copies that are just being written look damaged, too.
                Err(error @ Error::Damaged { .. }) => damage = Some(error),
                Err(error) => return Err(error),
            }
        }
        if let Some(damage) = damage {
            return Err(damage);
        }
        Err(Error::Busy {
            path: path.to_path_buf(),
            pid: 0,
        })
    }

    /// Superblock copies as they were at the opening, by number: what each holds, or why it counts
    /// for nothing. Copies that differ from [`Reader::superblock`] are repaired by the next commit.
    pub fn copies(&self) -> &[std::result::Result<Superblock, Error>] {
        &self.copies
    }

    /// Commits that the superblock names and that cannot be read.
    pub fn lost(&self) -> &[Lost] {
        &self.lost
    }

    /// The process of a training that had the store at the opening, 0 where unknown; `None` if none
    /// had it, and none can begin while this lives.
    pub fn training(&self) -> Option<u32> {
        self.training
    }

    /// One copy of a region's manifest, as it is now.
    ///
    /// # Errors
    /// What is wrong with it; [`Error::Overwritten`] as for an extent.
    ///
    /// # Panics
    /// If the region is free in [`Reader::superblock`], or `copy` is not 0 or 1.
    pub fn manifest_copy(&self, region: usize, copy: u64) -> Result<Manifest> {
        let read = self.recovery().manifest(&self.superblock, region, copy);
        read.map_err(|error| match self.superblock.regions[region] {
            Region::Committed { generation, .. } => self.told_apart(region, generation, error),
            Region::Free => error,
        })
    }

    /// Looks at the superblock again.
    ///
    /// # Errors
    /// If there is none in force any more.
    pub fn recheck(&self) -> Result<Recheck> {
        let now = self
            .recovery()
            .superblock(self.superblock.geometry.file_bytes)?;
        let (was, is) = (self.superblock.generations(), now.generations());
        let without = |all: &[u64], others: &[u64]| {
            let kept = all.iter().filter(|generation| !others.contains(generation));
            kept.copied().collect()
        };
        Ok(Recheck {
            sequence: now.sequence,
            overwritten: without(&was, &is),
            newer: without(&is, &was),
        })
    }

    fn recovery(&self) -> Recovery<'_> {
        Recovery {
            path: &self.path,
            engine: &self.engine,
            ring: &self.ring,
        }
    }

    /// `error`, or that the region is no longer what it was when the store was opened.
    fn told_apart(&self, region: usize, generation: u64, error: Error) -> Error {
        if !self.disturbed {
            return error;
        }
        let bytes = self.superblock.geometry.file_bytes;
        // A look may meet copies that are just being written.
        let looks = (0..OPENINGS_MAX).map(|_| self.recovery().superblock(bytes));
        match looks.into_iter().find(Result::is_ok).transpose() {
            Ok(Some(now)) if now.regions.get(region) != self.superblock.regions.get(region) => {
                Error::Overwritten {
                    path: self.path.clone(),
                    generation,
                }
            }
            _ => error,
        }
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

    /// All extents of a commit; `None` in a store opened without a [`super::Spec`] that has no
    /// commit.
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

    /// Checksum of an extent's stored bytes with their padding, as committed.
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
    /// [`Error::ExtentChecksum`], [`Error::TileIo`]; [`Error::Overwritten`] if a running training
    /// has used its place meanwhile; [`Error::Input`] if there is no such generation or extent.
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
    /// As [`Reader::read`].
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

    /// How long an operation may take before a line says it, zero is for ever, and where: without
    /// `say` to standard error. The default is [`super::IO_TIMEOUT_SECONDS`].
    pub fn set_io_timeout(&self, timeout: Duration, say: Option<Say>) {
        self.engine.set_io_timeout(timeout, say);
    }

    /// What moved since the store was opened.
    pub fn counters(&self) -> Counters {
        self.engine.counters()
    }

    /// A generation's manifest.
    ///
    /// # Errors
    /// [`Error::Input`] if there is no such generation that can be read.
    pub fn manifest(&self, generation: u64) -> Result<&Manifest> {
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
        let slot = manifest.table.slot_bytes(index);
        assert!(slab.len() >= slot, "{slab:?} holds less than {slot} bytes");
        let mut tag = Tag::new(index, reply);
        if let Stored::Zstd { bytes } = manifest.stored[index] {
            let started = codec::start(&self.workers, self.engine.handle());
            started.map_err(|e| Error::io("start a thread for", &self.path, e))?;
            tag.decoding = Some(Decoding {
                stored: bytes as usize,
                payload: manifest.table.payload_bytes(index),
                element_bytes: manifest.table.element_bytes(index) as usize,
                checksum: manifest.checksums[index],
            });
        }
        let bytes = manifest.stored_bytes(index);
        let order = Order {
            direction: Direction::Read,
            offset: self.extent_offset(manifest.region as usize, &manifest.table, index),
            payload: bytes,
            bytes,
            slab,
            key: Some(manifest.table.key(index)),
            tag,
        };
        self.engine.submit(order).map_err(|_| stopped())
    }

    /// The slab of a read that succeeded with the checksum that it should have.
    fn checked(&self, manifest: &Manifest, outcome: Outcome) -> Result<Lease> {
        let index = outcome.number;
        let region = manifest.region as usize;
        if let Err(source) = outcome.result {
            if source.kind() == io::ErrorKind::InvalidData {
                return Err(self.undecodable(manifest, index, &source));
            }
            let error = self.tile_error("read", region, &manifest.table, index, source);
            return Err(self.told_apart(region, manifest.generation, error));
        }
        let key = manifest.table.key(index);
        let expected = manifest.checksums[index];
        if outcome.checksum != expected && !mutant::is(Mutant::ChecksumUnchecked) {
            let error = Error::ExtentChecksum {
                path: self.path.clone(),
                tile: key.place(),
                extent: key.extent,
                offset: self.extent_offset(region, &manifest.table, index),
                expected,
                got: outcome.checksum,
            };
            return Err(self.told_apart(region, manifest.generation, error));
        }
        Ok(outcome.slab.expect("a read gives its slab back"))
    }

    /// Bytes that have the right checksum and are not what their manifest says.
    fn undecodable(&self, manifest: &Manifest, index: usize, source: &io::Error) -> Error {
        let key = manifest.table.key(index);
        Error::Damaged {
            path: self.path.clone(),
            what: format!("{}, extent {}", key.place(), key.extent),
            offset: self.extent_offset(manifest.region as usize, &manifest.table, index),
            expected: format!(
                "a zstd frame of {} bytes",
                manifest.table.payload_bytes(index)
            ),
            got: source.to_string(),
            remedy: "restore the file from a copy, or resume from another commit".to_string(),
        }
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

/// The threads of a store on `disk`.
pub(super) fn spawn(path: &Path, disk: Box<dyn Disk>) -> Result<(Workers<Job>, Engine<Tag>)> {
    let workers = Workers::new();
    let decoder = workers.jobs();
    let settle = move |done: Done<Tag>| {
        let Tag {
            number,
            reply,
            stored,
            decoding,
        } = done.tag;
        let outcome = Outcome {
            number,
            slab: (done.direction == Direction::Read).then_some(done.slab),
            checksum: done.checksum,
            stored,
            result: done.result,
        };
        match decoding {
            Some(decoding) if outcome.result.is_ok() && outcome.checksum == decoding.checksum => {
                let job = Job::Decode {
                    outcome,
                    decoding,
                    reply,
                };
                decoder.send(Some(job)).ok();
            }
            // Whoever dropped the receiver wants no answer.
            _ => {
                reply.send(outcome).ok();
            }
        }
    };
    let engine =
        Engine::spawn(path, disk, settle).map_err(|e| Error::io("start a thread for", path, e))?;
    Ok((workers, engine))
}

/// Slabs of the store's own: at most 16 MiB, beside the host tier's budget.
pub(super) fn own_ring(table: Option<&ExtentTable>) -> Result<Ring> {
    let largest = table.map_or(EXTENT_BYTES_MAX, |table| table.slot_bytes_max() as u64);
    let slab = largest.clamp(16 * PAGE_BYTES, EXTENT_BYTES_MAX);
    let mut cutter = HostArena::take(OWN_SLABS as u64 * slab)?;
    Ok(cutter.cut_ring(OWN_SLABS, slab))
}

/// A store that is not there.
pub(super) fn absent(path: &Path, source: io::Error) -> Error {
    Error::Io {
        action: "open",
        path: path.to_path_buf(),
        source,
        remedy: "; name a run's checkpoint.dir".to_string(),
    }
}
