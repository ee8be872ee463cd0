//! Making a commit: the order of writes and flushes that keeps the store whole at every instant.
//!
//! - Only a region that is free in all durable superblocks is written.
//! - Each group of writes is flushed before anything refers to it: extents, manifests, superblock
//!   copies 0 and 1, copies 2 and 3.
//! - The first error poisons the store; what was committed stays.
//!
//! FORMAT.md, "A commit", is the same order in words, with what each cut leaves.

use std::io;
use std::path::Path;

use crossbeam_channel::{Receiver, Sender};

use super::checkpoint::{CheckpointStore, Outcome, Tag, stopped};
use super::codec::Job;
use super::disk::{Direction, Disk, Operation};
use super::engine::Order;
use super::format::{self, METADATA_BYTES_MAX, Manifest, Region, Stored, Superblock};
use super::mutant::{self, Mutant};
use super::{ExtentKey, ExtentTable, sys};
use crate::error::{Error, Result};
use crate::host::{Lease, Ring};
use crate::tile::PAGE_BYTES;

/// Where a commit stands, for tests that end the process there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The first extent was handed over.
    Extents,
    /// All extents are durable.
    ExtentsFlushed,
    /// The manifests are written, not flushed.
    Manifest,
    /// The manifests are durable.
    ManifestFlushed,
    /// Superblock copies 0 and 1 are durable: the commit holds from here on.
    SuperblockHalf,
    /// All copies are durable.
    Superblock,
}

impl Phase {
    /// All, in order.
    pub const ALL: [Phase; 6] = [
        Phase::Extents,
        Phase::ExtentsFlushed,
        Phase::Manifest,
        Phase::ManifestFlushed,
        Phase::SuperblockHalf,
        Phase::Superblock,
    ];
}

/// A commit under way. Dropping it unfinished leaves the store as it was.
pub struct Commit<'a> {
    store: &'a mut CheckpointStore,
    table: ExtentTable,
    region: usize,
    generation: u64,
    /// By extent; `None` until it was handed over, then 0 until it was written.
    checksums: Vec<Option<u128>>,
    /// By extent, of those written.
    stored: Vec<Stored>,
    handed: usize,
    settled: usize,
    reply: Sender<Outcome>,
    outcomes: Receiver<Outcome>,
}

pub(super) fn begin(store: &mut CheckpointStore, generation: u64) -> Result<Commit<'_>> {
    if let Some(first) = &store.failure {
        let first = first.clone();
        return Err(Error::StoreFailed { first });
    }
    let committed = |region: &Region| match region {
        Region::Free => None,
        Region::Committed { generation, .. } => Some(*generation),
    };
    let newest = store.superblock.regions.iter().filter_map(committed).max();
    let Some(table) = store.table.clone() else {
        return Err(refused(
            store,
            "a store opened with its sections",
            "one without a commit",
        ));
    };
    if newest.is_some_and(|newest| generation <= newest) {
        let expected = format!("a generation after {}", newest.unwrap_or(0));
        return Err(refused(store, &expected, &generation.to_string()));
    }
    store.settle_copies()?;
    let mut regions = store.superblock.regions.iter();
    let region = match regions.position(|region| *region == Region::Free) {
        Some(region) => region,
        None => store.free_a_region()?,
    };
    // Room for every outcome: the store's thread never waits here.
    let (reply, outcomes) = crossbeam_channel::unbounded();
    Ok(Commit {
        store,
        region,
        generation,
        checksums: vec![None; table.count()],
        stored: vec![Stored::Plain; table.count()],
        table,
        handed: 0,
        settled: 0,
        reply,
        outcomes,
    })
}

fn refused(store: &CheckpointStore, expected: &str, got: &str) -> Error {
    Error::input(
        "commit",
        store.path.display().to_string(),
        expected,
        got,
        "resume from the newest generation, or choose another checkpoint.dir",
    )
}

impl Commit<'_> {
    /// Bytes of an extent without padding.
    ///
    /// # Panics
    /// If the store has no such extent.
    pub fn payload_bytes(&self, key: ExtentKey) -> usize {
        self.table.payload_bytes(self.index(key))
    }

    /// Hands one extent over in a slab of at least its padded bytes; what follows the payload there
    /// is zeroed. The slab goes back to its ring by itself when it is written.
    ///
    /// # Errors
    /// The first failed write so far, after which the commit can only be dropped.
    ///
    /// # Panics
    /// If the store has no such extent, the slab is too short, or the extent came before.
    pub fn submit(&mut self, key: ExtentKey, slab: Lease) -> Result<()> {
        let index = self.index(key);
        let bytes = self.table.slot_bytes(index);
        assert!(
            slab.len() >= bytes,
            "{key}: {slab:?} is shorter than {bytes} bytes"
        );
        assert!(
            self.checksums[index].is_none(),
            "{key} was written before in this commit"
        );
        self.settle_ready()?;
        self.checksums[index] = Some(0);
        let order = Order {
            direction: Direction::Write,
            offset: self.store.extent_offset(self.region, &self.table, index),
            payload: self.table.payload_bytes(index),
            bytes,
            slab,
            key: Some(key),
            tag: Tag::new(index, self.reply.clone()),
        };
        match self.store.zstd {
            0 => self.store.engine.submit(order).map_err(|_| stopped())?,
            level => self.store.workers.submit(Job::Encode {
                order,
                element_bytes: self.table.element_bytes(index) as usize,
                level,
            }),
        }
        self.handed += 1;
        if self.handed == 1 {
            self.store.reached(Phase::Extents);
        }
        Ok(())
    }

    /// Copies one extent's payload into a slab of the store's own and hands that over.
    ///
    /// # Errors
    /// As [`Commit::submit`].
    ///
    /// # Panics
    /// As [`Commit::submit`], or if `payload` is not the extent's length.
    pub fn write(&mut self, key: ExtentKey, payload: &[u8]) -> Result<()> {
        assert_eq!(payload.len(), self.payload_bytes(key), "{key}");
        let mut slab = self.store.ring.take();
        slab.as_mut_slice::<u8>()[..payload.len()].copy_from_slice(payload);
        self.submit(key, slab)
    }

    /// Makes the commit durable. When this returns `Ok`, it opens after any crash.
    ///
    /// # Errors
    /// The first failure: the store takes no more commits from this process, and holds those that
    /// it held ([`Phase::SuperblockHalf`] reached: perhaps this one too). [`Error::Input`] if the
    /// metadata exceed 1 MiB.
    ///
    /// # Panics
    /// If an extent was not written.
    pub fn finish(mut self, metadata: &[u8]) -> Result<()> {
        if metadata.len() > METADATA_BYTES_MAX {
            let expected = format!("metadata of at most {METADATA_BYTES_MAX} bytes");
            return Err(refused(self.store, &expected, &metadata.len().to_string()));
        }
        let absent = self.checksums.iter().position(Option::is_none);
        assert_eq!(
            absent.map(|index| self.table.key(index)),
            None,
            "never written"
        );
        while self.settled < self.handed {
            let outcome = self.outcomes.recv().map_err(|_| stopped())?;
            self.settle(outcome)?;
        }
        self.store.flush(self.table.bytes())?;
        self.store.reached(Phase::ExtentsFlushed);
        let manifest = Manifest {
            region: self.region as u32,
            store_uuid: self.store.superblock.store_uuid,
            model_hash: self.store.superblock.model_hash,
            generation: self.generation,
            table: self.table.clone(),
            checksums: self.checksums.iter().flatten().copied().collect(),
            stored: self.stored.clone(),
            metadata: metadata.to_vec(),
        };
        let region = self.write_manifest(&manifest)?;
        let readable = |region: usize| self.store.commits[region].is_some();
        let pinned = self.store.pinned;
        let mut superblock = succeed(
            &self.store.superblock,
            self.region,
            region,
            pinned,
            readable,
        );
        if manifest.is_compressed() {
            superblock.features_required |= format::FEATURE_ZSTD;
        }
        self.store.write_superblock(&superblock, &[0, 1])?;
        self.store.reached(Phase::SuperblockHalf);
        self.store.write_superblock(&superblock, &[2, 3])?;
        self.store.reached(Phase::Superblock);
        for (index, region) in superblock.regions.iter().enumerate() {
            if *region == Region::Free {
                self.store.commits[index] = None;
            }
        }
        self.store.superblock = superblock;
        self.store.commits[self.region] = Some(manifest);
        self.store.cut_spare_regions()
    }

    fn write_manifest(&mut self, manifest: &Manifest) -> Result<Region> {
        let geometry = self.store.superblock.geometry;
        let bytes = manifest.encode(&geometry);
        let region = Region::Committed {
            generation: self.generation,
            manifest_bytes: bytes.len() as u64,
            manifest_checksum: format::manifest_checksum(&bytes),
        };
        for copy in 0..format::MANIFEST_COPIES {
            let offset = geometry.manifest_offset(self.region, copy);
            self.store.write_bytes(offset, &bytes)?;
        }
        self.store.reached(Phase::Manifest);
        self.store.flush(bytes.len() as u64)?;
        self.store.reached(Phase::ManifestFlushed);
        Ok(region)
    }

    fn index(&self, key: ExtentKey) -> usize {
        let index = self.table.index(key);
        index.unwrap_or_else(|| panic!("{key} is not in the checkpoint store"))
    }

    fn settle_ready(&mut self) -> Result<()> {
        while let Ok(outcome) = self.outcomes.try_recv() {
            self.settle(outcome)?;
        }
        Ok(())
    }

    fn settle(&mut self, outcome: Outcome) -> Result<()> {
        self.settled += 1;
        let index = outcome.number;
        match outcome.result {
            Ok(()) => {
                self.checksums[index] = Some(outcome.checksum);
                self.stored[index] = outcome.stored;
                Ok(())
            }
            Err(source) => {
                let store = &mut *self.store;
                let error = store.tile_error("write", self.region, &self.table, index, source);
                store.poison(&error);
                Err(error)
            }
        }
    }
}

impl Drop for Commit<'_> {
    fn drop(&mut self) {
        // Writes still under way would otherwise meet those of the next commit.
        while self.settled < self.handed && self.outcomes.recv().is_ok() {
            self.settled += 1;
        }
    }
}

/// The superblock after a commit: the new region, and beyond `keep` those freed that cannot be
/// read, then the oldest, the generation `pinned` last.
fn succeed(
    superblock: &Superblock,
    new: usize,
    region: Region,
    pinned: Option<u64>,
    readable: impl Fn(usize) -> bool,
) -> Superblock {
    let mut next = superblock.clone();
    next.sequence += 1;
    next.regions[new] = region;
    let readable = |index| index == new || readable(index);
    let held = in_order_of_leaving(&next.regions, pinned, readable);
    let many = held.len().saturating_sub(superblock.keep as usize);
    for index in &held[..many] {
        next.regions[*index] = Region::Free;
    }
    next
}

/// Committed regions in the order in which they are freed: those that cannot be read, then the
/// oldest; the generation `pinned` only after all others that can be read, but for the newest.
pub(super) fn in_order_of_leaving(
    regions: &[Region],
    pinned: Option<u64>,
    readable: impl Fn(usize) -> bool,
) -> Vec<usize> {
    let generation = |region: &Region| match region {
        Region::Free => None,
        Region::Committed { generation, .. } => Some(*generation),
    };
    let newest = regions.iter().filter_map(generation).max();
    let held = regions.iter().enumerate().filter_map(|(index, region)| {
        let generation = Some(generation(region)?);
        let stays = generation == newest || generation == pinned;
        Some((readable(index), stays, generation, index))
    });
    let mut held: Vec<(bool, bool, Option<u64>, usize)> = held.collect();
    held.sort_unstable();
    held.into_iter().map(|(.., index)| index).collect()
}

/// What a refused write or flush of anything but an extent says.
pub(super) fn write_error(path: &Path, needed: u64, source: io::Error) -> Error {
    Error::Io {
        action: "write",
        path: path.to_path_buf(),
        source,
        remedy: format!(
            " (needed {needed} bytes, free {}); earlier commits are whole",
            sys::free_bytes(path)
        ),
    }
}

impl CheckpointStore {
    /// The generation that the next commit can have: after every one that the store holds, those
    /// that cannot be read among them.
    pub fn next_generation(&self) -> u64 {
        let held = self.superblock.regions.iter().map(|region| match region {
            Region::Free => 0,
            Region::Committed { generation, .. } => *generation,
        });
        held.max().unwrap_or(0) + 1
    }

    pub(super) fn reached(&self, phase: Phase) {
        if let Some(hook) = &self.hook {
            hook(phase);
        }
    }

    fn poison(&mut self, error: &Error) {
        if !mutant::is(Mutant::FailureForgotten) {
            self.failure.get_or_insert_with(|| error.to_string());
        }
    }

    fn poisoned(&mut self, needed: u64, source: io::Error) -> Error {
        let error = write_error(&self.path, needed, source);
        self.poison(&error);
        error
    }

    fn flush(&mut self, needed: u64) -> Result<()> {
        let outcome = self.engine.flush();
        outcome.map_err(|error| self.poisoned(needed, error))
    }

    /// Makes all superblock copies the one in force, and durable. What was read need not be: the
    /// process that wrote it may have ended before its flush. By halves: a cut must not meet all
    /// copies at once.
    pub(super) fn settle_copies(&mut self) -> Result<()> {
        if !self.settled {
            let superblock = self.superblock.clone();
            self.write_superblock(&superblock, &[0, 1])?;
            self.write_superblock(&superblock, &[2, 3])?;
            self.settled = true;
        }
        Ok(())
    }

    /// Writes `bytes` at `offset`, padded to a page, through the store's own slabs.
    fn write_bytes(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        let (reply, outcomes) = crossbeam_channel::unbounded();
        let slab_bytes = self.ring.slab_bytes() as usize;
        for (index, part) in bytes.chunks(slab_bytes).enumerate() {
            let mut slab = self.ring.take();
            slab.as_mut_slice::<u8>()[..part.len()].copy_from_slice(part);
            let order = Order {
                direction: Direction::Write,
                offset: offset + (index * slab_bytes) as u64,
                payload: part.len(),
                bytes: part.len().next_multiple_of(PAGE_BYTES as usize),
                slab,
                key: None,
                tag: Tag::new(index, reply.clone()),
            };
            self.engine.submit(order).map_err(|_| stopped())?;
        }
        drop(reply);
        let mut failed = None;
        for outcome in outcomes {
            failed = failed.or(outcome.result.err());
        }
        match failed {
            None => Ok(()),
            Some(error) => Err(self.poisoned(bytes.len() as u64, error)),
        }
    }

    /// Writes copies of a superblock and flushes.
    pub(super) fn write_superblock(
        &mut self,
        superblock: &Superblock,
        copies: &[usize],
    ) -> Result<()> {
        for copy in copies {
            self.write_bytes(format::superblock_offset(*copy), &superblock.encode(*copy))?;
        }
        self.flush(PAGE_BYTES)
    }
}

/// Writes zeros over new space of a file, so that later writes find their blocks written already.
pub(super) fn fill_with_zeros(
    disk: &mut dyn Disk,
    ring: &Ring,
    space: std::ops::Range<u64>,
) -> io::Result<()> {
    let (mut next, bytes) = (space.start, space.end);
    let mut finished = Vec::new();
    let mut failed = None;
    while next < bytes && failed.is_none() || disk.in_flight() > 0 {
        while next < bytes && failed.is_none() {
            let Some(mut slab) = ring.try_take() else {
                break;
            };
            slab.as_mut_slice::<u8>().fill(0);
            let count = (bytes - next).min(ring.slab_bytes());
            disk.start(Operation {
                direction: Direction::Write,
                offset: next,
                bytes: count as usize,
                slab,
                token: 0,
            });
            next += count;
        }
        disk.wait(&mut finished);
        for done in finished.drain(..) {
            failed = failed.or(done.result.err());
        }
    }
    match failed {
        None => disk.flush(),
        Some(error) => Err(error),
    }
}
