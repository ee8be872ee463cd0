//! Opening a checkpoint store: which superblock is in force, and which commits can be read.
//!
//! - A copy that cannot be read or decoded is a bad copy, not a failure.
//! - Nothing is believed that is not whole: a superblock that only one copy holds counts when the
//!   manifest of its newest commit is whole.
//! - Nothing is written here.
//!
//! FORMAT.md, "Opening", is the same in words, with its cases.

use std::io;
use std::path::Path;

use super::disk::Direction;
use super::engine::{Engine, Order};
use super::format::{self, Manifest, Region, SUPERBLOCK_COPIES, Superblock};
use super::mutant::{self, Mutant};
use super::reader::Tag;
use crate::error::{Error, Result};
use crate::host::Ring;
use crate::tile::PAGE_BYTES;

/// A superblock copy, or why there is none.
pub(super) type Copy = std::result::Result<Superblock, Error>;

/// A commit that the superblock names and that cannot be read.
#[derive(Debug)]
pub struct Lost {
    /// Its region.
    pub region: usize,
    /// Its generation.
    pub generation: u64,
    /// Why: of its first manifest copy.
    pub error: Error,
}

impl Lost {
    pub(super) fn sentence(&self) -> String {
        format!(
            "generation {} is lost: {}; or go on from the commits that are left",
            self.generation, self.error
        )
    }
}

/// FORMAT.md, "Opening": the highest sequence that two copies agree on or whose newest commit is
/// whole.
pub(crate) fn in_force<'a>(
    copies: impl Iterator<Item = &'a Superblock>,
    newest_is_whole: impl Fn(&Superblock) -> bool,
) -> Option<&'a Superblock> {
    let mut found: Vec<&Superblock> = copies.collect();
    found.sort_by_key(|superblock| std::cmp::Reverse(superblock.sequence));
    if mutant::is(Mutant::SequenceUnchecked) {
        found.reverse();
    }
    let agree = |candidate: &Superblock| found.iter().filter(|f| **f == candidate).count() >= 2;
    let mut candidates = found.iter();
    candidates
        .find(|candidate| agree(candidate) || newest_is_whole(candidate))
        .copied()
}

/// Region of the newest commit.
pub(crate) fn newest(superblock: &Superblock) -> Option<usize> {
    let held = superblock.regions.iter().enumerate();
    held.filter_map(|(index, region)| match region {
        Region::Free => None,
        Region::Committed { generation, .. } => Some((*generation, index)),
    })
    .max()
    .map(|(_, index)| index)
}

/// What a store holds.
pub(super) struct Found {
    /// By number.
    pub(super) copies: Vec<Copy>,
    /// In force.
    pub(super) superblock: Superblock,
    /// By region.
    pub(super) commits: Vec<Option<Manifest>>,
    pub(super) lost: Vec<Lost>,
}

impl Found {
    /// Refused if there are commits and none of them can be read.
    pub(super) fn readable(mut self) -> Result<Found> {
        if self.commits.iter().all(Option::is_none) && !self.lost.is_empty() {
            return Err(self.lost.swap_remove(0).error);
        }
        Ok(self)
    }
}

/// What opening reads with.
pub(super) struct Recovery<'a> {
    pub(super) path: &'a Path,
    pub(super) engine: &'a Engine<Tag>,
    pub(super) ring: &'a Ring,
}

impl Recovery<'_> {
    /// Everything that the store of a file of `bytes` holds.
    pub(super) fn find(&self, bytes: u64) -> Result<Found> {
        let copies = self.superblocks(bytes)?;
        let superblock = self.choose(&copies)?;
        let (commits, lost) = self.commits(&superblock);
        Ok(Found {
            copies,
            superblock,
            commits,
            lost,
        })
    }

    /// The superblock in force now.
    pub(super) fn superblock(&self, bytes: u64) -> Result<Superblock> {
        self.choose(&self.superblocks(bytes)?)
    }

    fn read(&self, offset: u64, bytes: u64) -> io::Result<Vec<u8>> {
        let mut read = Vec::with_capacity(bytes as usize);
        let (reply, outcomes) = crossbeam_channel::bounded(1);
        let ended = || io::Error::other("the store's thread has ended");
        while (read.len() as u64) < bytes {
            let count = (bytes - read.len() as u64).min(self.ring.slab_bytes()) as usize;
            let order = Order {
                direction: Direction::Read,
                offset: offset + read.len() as u64,
                payload: count,
                bytes: count,
                slab: self.ring.take(),
                key: None,
                tag: Tag::new(0, reply.clone()),
            };
            self.engine.submit(order).map_err(|_| ended())?;
            let outcome = outcomes.recv().map_err(|_| ended())?;
            outcome.result?;
            let slab = outcome.slab.expect("a read gives its slab back");
            read.extend_from_slice(&slab.as_slice()[..count]);
        }
        Ok(read)
    }

    /// All copies: the superblock, or why there is none. Refuses a newer version and a file
    /// that is shorter than its superblocks say.
    fn superblocks(&self, bytes: u64) -> Result<Vec<Copy>> {
        let mut copies = Vec::with_capacity(SUPERBLOCK_COPIES);
        for copy in 0..SUPERBLOCK_COPIES {
            let offset = format::superblock_offset(copy);
            let page = match self.read(offset, PAGE_BYTES) {
                Ok(page) => page,
                Err(error) => {
                    copies.push(Err(Error::io("read a superblock of", self.path, error)));
                    continue;
                }
            };
            copies.push(match Superblock::decode(&page, copy) {
                Ok(Ok(found)) if found.geometry.file_bytes > bytes => Err(damaged(
                    self.path,
                    "file length",
                    bytes,
                    &format!("at least {} bytes", found.geometry.file_bytes),
                    &format!("{bytes} bytes"),
                )),
                Ok(Ok(found)) => Ok(found),
                Ok(Err(newer)) => {
                    return Err(Error::Unsupported {
                        what: "checkpoint format",
                        got: format!("{}: {newer}", self.path.display()),
                        supported: format!(
                            "version {}, required features {:#x}",
                            format::VERSION,
                            format::FEATURES_KNOWN
                        ),
                    });
                }
                Err(flaw) => Err(damaged(
                    self.path,
                    &format!("{} (copy {copy})", flaw.what),
                    offset + flaw.offset as u64,
                    &flaw.expected,
                    &flaw.got,
                )),
            });
        }
        Ok(copies)
    }

    /// The superblock in force; FORMAT.md, "Opening", says which.
    fn choose(&self, copies: &[Copy]) -> Result<Superblock> {
        let whole = |superblock: &Superblock| self.newest_is_whole(superblock);
        if let Some(superblock) = in_force(copies.iter().flatten(), whole) {
            return Ok(superblock.clone());
        }
        Err(match copies.iter().find_map(|copy| copy.as_ref().err()) {
            Some(Error::Damaged {
                what,
                offset,
                expected,
                got,
                ..
            }) => damaged(self.path, what, *offset, expected, got),
            Some(error) => damaged(self.path, "superblocks", 0, "one whole", &error.to_string()),
            None => damaged(
                self.path,
                "superblocks",
                0,
                "two that agree",
                "all different",
            ),
        })
    }

    fn newest_is_whole(&self, superblock: &Superblock) -> bool {
        newest(superblock).is_none_or(|region| self.commit(superblock, region).is_ok())
    }

    fn commits(&self, superblock: &Superblock) -> (Vec<Option<Manifest>>, Vec<Lost>) {
        let mut commits = vec![None; superblock.regions.len()];
        let mut lost = Vec::new();
        for (region, slot) in commits.iter_mut().enumerate() {
            let Region::Committed { generation, .. } = superblock.regions[region] else {
                continue;
            };
            match self.commit(superblock, region) {
                Ok(manifest) => *slot = Some(manifest),
                Err(error) => lost.push(Lost {
                    region,
                    generation,
                    error,
                }),
            }
        }
        (commits, lost)
    }

    /// The first manifest copy of a committed region that is whole and the one named.
    fn commit(&self, superblock: &Superblock, region: usize) -> Result<Manifest> {
        let mut refusal = None;
        for copy in 0..format::MANIFEST_COPIES {
            match self.manifest(superblock, region, copy) {
                Ok(found) => return Ok(found),
                Err(error) => refusal.get_or_insert(error),
            };
        }
        Err(refusal.expect("every copy was refused"))
    }

    /// A manifest copy of a committed region, if it is whole and the one that `superblock` names.
    ///
    /// # Panics
    /// If the region is free.
    pub(super) fn manifest(
        &self,
        superblock: &Superblock,
        region: usize,
        copy: u64,
    ) -> Result<Manifest> {
        let Region::Committed {
            generation,
            manifest_bytes,
            manifest_checksum,
        } = superblock.regions[region]
        else {
            panic!("region {region} is free")
        };
        let geometry = &superblock.geometry;
        let offset = geometry.manifest_offset(region, copy);
        let mut bytes = self
            .read(offset, manifest_bytes.next_multiple_of(PAGE_BYTES))
            .map_err(|error| Error::io("read a manifest of", self.path, error))?;
        bytes.truncate(manifest_bytes as usize);
        let found = Manifest::decode(&bytes, geometry).map_err(|flaw| {
            let at = offset + flaw.offset as u64;
            damaged(self.path, flaw.what, at, &flaw.expected, &flaw.got)
        })?;
        let named = format::manifest_checksum(&bytes) == manifest_checksum
            && found.region as usize == region
            && found.generation == generation
            && found.store_uuid == superblock.store_uuid
            && found.model_hash == superblock.model_hash
            && format::layout_hash(&found.table) == superblock.layout_hash
            && (superblock.features_required & format::FEATURE_ZSTD != 0 || !found.is_compressed());
        if !named && !mutant::is(Mutant::GenerationUnchecked) {
            return Err(damaged(
                self.path,
                "manifest",
                offset,
                &format!("generation {generation} of region {region}"),
                &format!("another one (generation {})", found.generation),
            ));
        }
        Ok(found)
    }
}

pub(super) fn damaged(path: &Path, what: &str, offset: u64, expected: &str, got: &str) -> Error {
    Error::Damaged {
        path: path.to_path_buf(),
        what: what.to_string(),
        offset,
        expected: expected.to_string(),
        got: got.to_string(),
        remedy: "restore the file from a copy, or move it away to start anew".to_string(),
    }
}
