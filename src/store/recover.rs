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

use super::checkpoint::Tag;
use super::disk::Direction;
use super::engine::{Engine, Order};
use super::format::{self, Manifest, Region, SUPERBLOCK_COPIES, Superblock};
use crate::error::{Error, Result};
use crate::host::Ring;
use crate::tile::PAGE_BYTES;

/// A superblock copy, or why there is none.
pub(super) type Copy = std::result::Result<Superblock, Error>;

/// What opening reads.
pub(super) struct Reader<'a> {
    pub(super) path: &'a Path,
    pub(super) engine: &'a Engine<Tag>,
    pub(super) ring: &'a Ring,
}

impl Reader<'_> {
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
                tag: Tag {
                    number: 0,
                    reply: reply.clone(),
                },
            };
            self.engine.submit(order).map_err(|_| ended())?;
            let outcome = outcomes.recv().map_err(|_| ended())?;
            outcome.result?;
            let slab = outcome.slab.expect("a read gives its slab back");
            read.extend_from_slice(&slab.as_slice()[..count]);
        }
        Ok(read)
    }

    /// All copies: the superblock, or why there is none. Refuses a newer version and a file whose
    /// length is not the one that its superblocks name.
    pub(super) fn superblocks(&self, bytes: u64) -> Result<Vec<Copy>> {
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
                Ok(Ok(found)) if found.geometry.file_bytes != bytes => Err(damaged(
                    self.path,
                    "file length",
                    bytes,
                    &format!("{} bytes", found.geometry.file_bytes),
                    &format!("{bytes} bytes"),
                )),
                Ok(Ok(found)) => Ok(found),
                Ok(Err(version)) => {
                    return Err(Error::Unsupported {
                        what: "checkpoint format",
                        got: format!("{}: version {version}", self.path.display()),
                        supported: format!("version {}", format::VERSION),
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
    pub(super) fn choose(&self, copies: &[Copy]) -> Result<Superblock> {
        let mut found: Vec<&Superblock> = copies.iter().flatten().collect();
        found.sort_by_key(|superblock| std::cmp::Reverse(superblock.sequence));
        let mut agreed = None;
        for candidate in &found {
            let count = found.iter().filter(|other| *other == candidate).count();
            if count >= 2 || self.newest_is_whole(candidate) {
                agreed = Some((*candidate).clone());
                break;
            }
        }
        if let Some(superblock) = agreed {
            return Ok(superblock);
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
        let generation = |index: &usize| match superblock.regions[*index] {
            Region::Free => None,
            Region::Committed { generation, .. } => Some(generation),
        };
        let newest = (0..superblock.regions.len())
            .filter_map(|index| Some((generation(&index)?, index)))
            .max();
        newest.is_none_or(|(_, index)| self.commit(superblock, index).is_ok())
    }

    /// Every region's commit, and sentences about those that cannot be read. Refused if there are
    /// commits and none of them can.
    pub(super) fn commits(
        &self,
        superblock: &Superblock,
    ) -> Result<(Vec<Option<Manifest>>, Vec<String>)> {
        let mut commits = vec![None; superblock.regions.len()];
        let mut warnings = Vec::new();
        let mut first = None;
        for (index, slot) in commits.iter_mut().enumerate() {
            let Region::Committed { generation, .. } = superblock.regions[index] else {
                continue;
            };
            match self.commit(superblock, index) {
                Ok(manifest) => *slot = Some(manifest),
                Err(error) => {
                    warnings.push(format!(
                        "generation {generation} is lost: {error}; or go on from the commits that \
                         are left"
                    ));
                    first.get_or_insert(error);
                }
            }
        }
        match first {
            Some(error) if commits.iter().all(Option::is_none) => Err(error),
            _ => Ok((commits, warnings)),
        }
    }

    /// The first manifest copy of a committed region that is whole and the one named.
    fn commit(&self, superblock: &Superblock, index: usize) -> Result<Manifest> {
        let Region::Committed {
            generation,
            manifest_bytes,
            manifest_checksum,
        } = superblock.regions[index]
        else {
            unreachable!("asked for committed regions only")
        };
        let geometry = &superblock.geometry;
        let mut refusal = None;
        for copy in 0..format::MANIFEST_COPIES {
            let offset = geometry.manifest_offset(index, copy);
            let read = self.read(offset, manifest_bytes.next_multiple_of(PAGE_BYTES));
            let mut bytes = match read {
                Ok(bytes) => bytes,
                Err(error) => {
                    refusal.get_or_insert(Error::io("read a manifest of", self.path, error));
                    continue;
                }
            };
            bytes.truncate(manifest_bytes as usize);
            let error = match Manifest::decode(&bytes, geometry) {
                Ok(found)
                    if format::manifest_checksum(&bytes) == manifest_checksum
                        && found.region as usize == index
                        && found.generation == generation
                        && found.store_uuid == superblock.store_uuid
                        && found.model_hash == superblock.model_hash
                        && format::layout_hash(&found.table) == superblock.layout_hash =>
                {
                    return Ok(found);
                }
                Ok(found) => damaged(
                    self.path,
                    "manifest",
                    offset,
                    &format!("generation {generation} of region {index}"),
                    &format!("another one (generation {})", found.generation),
                ),
                Err(flaw) => damaged(
                    self.path,
                    flaw.what,
                    offset + flaw.offset as u64,
                    &flaw.expected,
                    &flaw.got,
                ),
            };
            refusal.get_or_insert(error);
        }
        Err(refusal.expect("every copy was refused"))
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
