//! The store tier: extents of tiles on NVMe, in two classes that share engines and checksums.
//!
//! - [`scratch`] holds what the running step spilled: no fsync, may be lost, never wrong bytes.
//! - [`checkpoint`] is durable: a finished commit opens bit-exact after SIGKILL or a power cut.
//! - An extent is at most 4 MiB of one section; its payload is padded with zeros to a page, and its
//!   checksum (xxh3-128 over the padded bytes) is kept elsewhere, so that stale and misdirected
//!   writes show.
//! - Every extent is checked before anyone sees it, on every read.
//! - A slab moves into an operation and comes back with its completion.
//! - The bytes on disk are described in FORMAT.md and made in [`format`], nowhere else.
//!
//! Nothing here knows a model, a plan or a device. Engines: [`disk`] (trait, probe), `pool`,
//! `uring`, [`sim`].

pub mod checkpoint;
pub mod codec;
mod commit;
mod directory;
pub mod disk;
mod engine;
#[doc = include_str!("FORMAT.md")]
pub mod format;
pub mod moments;
#[doc(hidden)]
pub mod mutant;
mod pool;
mod reader;
pub(crate) mod recover;
mod resize;
pub mod scratch;
pub mod sim;
#[allow(unsafe_code, reason = "fallocate, statfs and eventfd are libc calls")]
mod sys;
#[allow(unsafe_code, reason = "the kernel reads and writes slabs in flight")]
mod uring;
mod watchdog;
mod workers;

use std::fmt;

use crate::tile::{EXTENT_ELEMENTS, PAGE_BYTES, Precision, Section, TileId, TileLayout};

pub use checkpoint::{CheckpointStore, Commit, Phase, Spec};
pub use engine::{Counters, Flow};
pub use reader::{Reader, Recheck};
pub use recover::Lost;
pub use scratch::{Completion, Request, Scratch, Stripe};
pub(crate) use sys::advise_huge_pages;
pub use watchdog::{IO_TIMEOUT_SECONDS, Say};

/// Names an extent: elements `extent * EXTENT_ELEMENTS ..` of one section of one tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExtentKey {
    /// The tile.
    pub tile: TileId,
    /// Its section.
    pub section: Section,
    /// Index of the extent within the section.
    pub extent: u32,
}

impl fmt::Display for ExtentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} extent {}", self.tile, self.section, self.extent)
    }
}

impl ExtentKey {
    /// Tile and section, as errors name them.
    pub(crate) fn place(&self) -> String {
        format!("{} {}", self.tile, self.section)
    }
}

/// A section that lives in a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredSection {
    /// The tile.
    pub tile: TileId,
    /// Its section.
    pub section: Section,
    /// Elements, at least 1.
    pub elements: u64,
    /// Bytes of an element, 1..=4.
    pub element_bytes: u64,
}

impl StoredSection {
    /// A tile's section under the run's precision.
    pub fn of(layout: &TileLayout, section: Section, precision: Precision) -> StoredSection {
        StoredSection {
            tile: layout.id,
            section,
            elements: layout.elements,
            element_bytes: section.element_bytes(precision),
        }
    }

    /// Extents of the section.
    pub fn extent_count(&self) -> u32 {
        u32::try_from(self.elements.div_ceil(EXTENT_ELEMENTS)).expect("checked by the table")
    }

    /// Bytes of the section with every extent padded to a page.
    pub fn slot_bytes(&self) -> u64 {
        (self.elements * self.element_bytes).next_multiple_of(PAGE_BYTES)
    }

    /// Names of its extents, in order.
    pub fn keys(&self) -> impl Iterator<Item = ExtentKey> + use<> {
        let (tile, section) = (self.tile, self.section);
        (0..self.extent_count()).map(move |extent| ExtentKey {
            tile,
            section,
            extent,
        })
    }
}

/// All extents of a store in the order of (tile, section, extent), with their sizes and their
/// places in one contiguous range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtentTable {
    sections: Vec<PlacedSection>,
    count: usize,
    bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PlacedSection {
    section: StoredSection,
    /// Index of its first extent.
    first: usize,
    /// Offset of its first extent.
    offset: u64,
}

/// Most extents of a store: 4 TiB of the smallest sections' worth of table.
pub const EXTENT_COUNT_MAX: u64 = 1 << 24;

const _: () = assert!(
    EXTENT_ELEMENTS.is_multiple_of(PAGE_BYTES),
    "full extents are pages, whatever an element's size"
);

impl ExtentTable {
    /// Places `sections`, in any order given.
    ///
    /// # Panics
    /// If a section is empty, comes twice, has elements of more than 4 bytes, or all have more than
    /// [`EXTENT_COUNT_MAX`] extents: the plan's to avoid.
    pub fn new(sections: &[StoredSection]) -> ExtentTable {
        let mut sorted = sections.to_vec();
        sorted.sort_by_key(|section| (section.tile, section.section));
        let mut table = ExtentTable {
            sections: Vec::with_capacity(sorted.len()),
            count: 0,
            bytes: 0,
        };
        for section in sorted {
            assert!(
                (1..=4).contains(&section.element_bytes),
                "{}",
                section.element_bytes
            );
            assert!(
                (1..=EXTENT_COUNT_MAX * EXTENT_ELEMENTS).contains(&section.elements),
                "{} {} has {} elements",
                section.tile,
                section.section,
                section.elements
            );
            let id = |s: &StoredSection| (s.tile, s.section);
            assert!(
                table
                    .sections
                    .last()
                    .is_none_or(|last| id(&last.section) < id(&section)),
                "{} {} comes twice",
                section.tile,
                section.section
            );
            table.sections.push(PlacedSection {
                section,
                first: table.count,
                offset: table.bytes,
            });
            table.count += section.extent_count() as usize;
            table.bytes += section.slot_bytes();
            assert!(table.count as u64 <= EXTENT_COUNT_MAX, "too many extents");
        }
        table
    }

    /// Extents of all sections.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Bytes of all extents, padded.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The sections, sorted.
    pub fn sections(&self) -> impl Iterator<Item = &StoredSection> {
        self.sections.iter().map(|placed| &placed.section)
    }

    /// Index of an extent; `None` if the store has no such extent.
    pub fn index(&self, key: ExtentKey) -> Option<usize> {
        let at = self
            .sections
            .binary_search_by_key(&(key.tile, key.section), |placed| {
                (placed.section.tile, placed.section.section)
            })
            .ok()?;
        let placed = &self.sections[at];
        (key.extent < placed.section.extent_count()).then(|| placed.first + key.extent as usize)
    }

    /// Name of the extent at `index`.
    pub fn key(&self, index: usize) -> ExtentKey {
        let (placed, extent) = self.placed(index);
        ExtentKey {
            tile: placed.section.tile,
            section: placed.section.section,
            extent,
        }
    }

    /// Bytes of an extent's elements, without padding.
    pub fn payload_bytes(&self, index: usize) -> usize {
        let (placed, extent) = self.placed(index);
        let start = u64::from(extent) * EXTENT_ELEMENTS;
        let elements = (placed.section.elements - start).min(EXTENT_ELEMENTS);
        (elements * placed.section.element_bytes) as usize
    }

    /// Bytes of an extent on disk: whole pages.
    pub fn slot_bytes(&self, index: usize) -> usize {
        self.payload_bytes(index)
            .next_multiple_of(PAGE_BYTES as usize)
    }

    /// Most bytes that an extent of this store has on disk.
    pub fn slot_bytes_max(&self) -> usize {
        let first = |placed: &PlacedSection| self.slot_bytes(placed.first);
        self.sections.iter().map(first).max().unwrap_or(0)
    }

    /// Offset of an extent in the contiguous range of all.
    pub fn offset(&self, index: usize) -> u64 {
        let (placed, extent) = self.placed(index);
        placed.offset + u64::from(extent) * EXTENT_ELEMENTS * placed.section.element_bytes
    }

    /// Bytes of an extent's element.
    pub fn element_bytes(&self, index: usize) -> u64 {
        self.placed(index).0.section.element_bytes
    }

    fn placed(&self, index: usize) -> (&PlacedSection, u32) {
        assert!(
            index < self.count,
            "extent {index} of {} does not exist",
            self.count
        );
        let at = self
            .sections
            .partition_point(|placed| placed.first <= index)
            - 1;
        let placed = &self.sections[at];
        (placed, (index - placed.first) as u32)
    }
}

/// Checksum of an extent, a manifest or a superblock.
pub fn checksum(bytes: &[u8]) -> u128 {
    twox_hash::XxHash3_128::oneshot(bytes)
}

/// Bytes free to this process on the file system of `path`; 0 where it does not say.
pub fn free_bytes(path: &std::path::Path) -> u64 {
    sys::free_bytes(path)
}

/// Reserves the first `bytes` of the new file at `path`.
///
/// # Errors
/// [`crate::Error::Budget`] of `tier`, ending in `remedy`, where the file system has less.
pub fn reserve(
    file: &std::fs::File,
    path: &std::path::Path,
    bytes: u64,
    tier: &'static str,
    remedy: &str,
) -> crate::Result<()> {
    directory::reserve(file, path, bytes, tier, remedy)
}

/// Name of the file system of `path`; `None` where nobody says.
pub fn file_system(path: &std::path::Path) -> Option<String> {
    sys::file_system(path).ok().map(|found| found.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The checksum is a contract with every file written: xxh3-128, seed 0, whatever instructions
    /// the machine has. Of bytes 0, 1, .. 250, 0, 1, ..
    #[test]
    fn the_checksum_is_xxh3_128_at_every_length_class() {
        let known: [(usize, u128); 15] = [
            (0, 0x99aa06d3014798d86001c324468d497f),
            (1, 0xa6cd5e9392000f6ac44bdff4074eecdb),
            (3, 0xe3b55f57945a17cf5f4299fc161c9cbb),
            (4, 0xeb70bf5fc779e9e6a6111d53e80a3db5),
            (8, 0xe1e4432a62217fe4cfd50c61c8bb98c1),
            (9, 0x16c769d83e4aebce907931979dca3746),
            (16, 0x72950631827607e2842812cc870dcae2),
            (17, 0x685bc458b37d057fc06e233df7729217),
            (128, 0x14792fc3af88dc6c05321a0b64d67b41),
            (129, 0xdd5e74ac6b45f54ebc30b63382b09a3b),
            (240, 0x65b5be86da5540e7c92b68e16f83bbb6),
            (241, 0x1da1cb61bcb8a2a102e8cd95421c6d02),
            (4095, 0xc586959432953ea5a541030d777f5abe),
            (4096, 0xe12cd72144990fe57135ffa504f1bc71),
            (1 << 20, 0x53738d98098cabba6e0d7ac36b8c10ff),
        ];
        for (length, expected) in known {
            let bytes: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
            assert_eq!(checksum(&bytes), expected, "{length} bytes");
        }
    }

    #[test]
    fn the_table_tiles_its_range_without_gaps_and_names_every_extent_once() {
        let section = |layer, section, elements, element_bytes| StoredSection {
            tile: TileId { layer, part: 0 },
            section,
            elements,
            element_bytes,
        };
        let table = ExtentTable::new(&[
            section(2, Section::Moment1, EXTENT_ELEMENTS * 2 + 1, 4),
            section(0, Section::Weight, 64, 2),
            section(2, Section::Weight, EXTENT_ELEMENTS, 2),
        ]);
        assert_eq!(table.count(), 5);
        let mut offset = 0;
        for index in 0..table.count() {
            assert_eq!(table.index(table.key(index)), Some(index));
            assert_eq!(table.offset(index), offset);
            offset += table.slot_bytes(index) as u64;
        }
        assert_eq!(offset, table.bytes());
        assert_eq!(table.payload_bytes(0), 128);
        assert_eq!(table.payload_bytes(4), 4);
        assert_eq!(table.slot_bytes_max(), 4 << 20);
        let absent = ExtentKey {
            extent: 3,
            ..table.key(4)
        };
        assert_eq!(table.index(absent), None);
    }
}
