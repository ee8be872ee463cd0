//! The bytes of a store on disk, format version 1, as FORMAT.md (above) lays them out.
//!
//! - Little-endian, explicit widths, offsets chained from field to field; reserved bytes are zero
//!   and checked.
//! - Every structure carries its own xxh3-128; one flipped bit anywhere is a [`Flaw`].
//! - Decoding takes nothing on trust: counts and sizes are compared with the bytes at hand before
//!   memory is taken, and with each other.
//!
//! Pure: no file, no clock. Which of several copies counts is `checkpoint`'s to decide.

mod listing;

use super::{EXTENT_COUNT_MAX, ExtentKey, ExtentTable, StoredSection, checksum};
use crate::tile::{EXTENT_BYTES_MAX, PAGE_BYTES, Section, TileId};

pub use listing::{Manifest, Stored, manifest_checksum};

/// A field's place in its structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Byte offset.
    pub start: usize,
    /// Bytes.
    pub bytes: usize,
}

/// Chains fields: each begins where the one before ends.
macro_rules! layout {
    ($(#[$doc:meta])* $room:ident { $($name:ident: $bytes:expr),+ $(,)? }) => {
        $(#[$doc])*
        pub mod $room {
            use super::Field;
            #[expect(non_snake_case, reason = "fields are named as their constants")]
            #[repr(C)]
            struct Chain { $($name: [u8; $bytes]),+ }
            $(
                #[doc = concat!("Field ", stringify!($name), ".")]
                pub const $name: Field =
                    Field { start: std::mem::offset_of!(Chain, $name), bytes: $bytes };
            )+
            /// All fields in order, by name.
            pub const FIELDS: &[(&str, Field)] = &[$((stringify!($name), $name)),+];
            /// Bytes of the structure.
            pub const BYTES: usize = size_of::<Chain>();
        }
    };
}

layout! {
    /// A superblock: one page.
    superblock {
        MAGIC: 8, VERSION: 4, COPY: 4, FEATURES_COMPATIBLE: 8, FEATURES_REQUIRED: 8,
        STORE_UUID: 16, MODEL_HASH: 16, LAYOUT_HASH: 16, SEQUENCE: 8, CLASS: 4, KEEP: 4,
        REGION_COUNT: 4, RESERVED_1: 4, EXTENT_COUNT: 8, EXTENTS_BYTES: 8, MANIFEST_BYTES_MAX: 8,
        REGION_BYTES: 8, FILE_BYTES: 8, RESERVED_2: 112, REGIONS: 2048, RESERVED_3: 1776,
        CHECKSUM: 16,
    }
}
layout! {
    /// One region in a superblock's table.
    region {
        STATE: 4, RESERVED_1: 4, GENERATION: 8, MANIFEST_OFFSET: 8, MANIFEST_BYTES: 8,
        MANIFEST_CHECKSUM: 16, RESERVED_2: 16,
    }
}
layout! {
    /// A manifest's beginning; entries follow, then the caller's metadata.
    manifest {
        MAGIC: 8, VERSION: 4, REGION: 4, STORE_UUID: 16, MODEL_HASH: 16, GENERATION: 8,
        EXTENT_COUNT: 8, METADATA_BYTES: 8, MANIFEST_BYTES: 8, RESERVED_1: 32, CHECKSUM: 16,
    }
}
layout! {
    /// One extent in a manifest.
    entry {
        LAYER: 2, PART: 2, SECTION: 1, ELEMENT_BYTES: 1, CODEC: 1, RESERVED_1: 1, EXTENT: 4,
        RESERVED_2: 4, PAYLOAD_BYTES: 8, OFFSET: 8, GENERATION: 8, STORED_BYTES: 8, CHECKSUM: 16,
    }
}

/// First bytes of a superblock.
pub const SUPERBLOCK_MAGIC: [u8; 8] = *b"TERRTILE";
/// First bytes of a manifest.
pub const MANIFEST_MAGIC: [u8; 8] = *b"TERRMANI";
/// Version of the format that this code writes and reads.
pub const VERSION: u32 = 1;
/// Required feature: extents may be compressed by zstd.
pub const FEATURE_ZSTD: u64 = 1;
/// Required features that this code knows.
pub const FEATURES_KNOWN: u64 = FEATURE_ZSTD;
/// Class of a checkpoint store. 1 is kept for scratch, which has no superblock.
pub const CLASS_CHECKPOINT: u32 = 2;
/// Copies of the superblock.
pub const SUPERBLOCK_COPIES: usize = 4;
/// Bytes from one superblock copy to the next.
pub const SUPERBLOCK_STRIDE: u64 = 1 << 20;
/// Where the first region begins.
pub const REGIONS_START: u64 = SUPERBLOCK_STRIDE * SUPERBLOCK_COPIES as u64;
/// Copies of a region's manifest.
pub const MANIFEST_COPIES: u64 = 2;
/// Most regions of a store: commits kept and one more.
pub const REGION_COUNT_MAX: usize = superblock::REGIONS.bytes / region::BYTES;
/// Most bytes of the caller's metadata in a manifest.
pub const METADATA_BYTES_MAX: usize = 1 << 20;
const PAGE: usize = PAGE_BYTES as usize;

const _: () = assert!(superblock::BYTES == PAGE, "a superblock is a page");
const _: () = assert!(
    superblock::CHECKSUM.start + 16 == PAGE,
    "its checksum ends it"
);
const _: () = assert!(region::BYTES == 64, "regions have no padding");
const _: () = assert!(
    manifest::BYTES == 128,
    "a manifest's beginning is 128 bytes"
);
const _: () = assert!(entry::BYTES == 64, "entries have no padding");
const _: () = assert!(REGION_COUNT_MAX == 32, "keep is at most 31");

/// What a whole superblock asks for that this code does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Newer {
    /// A later version of the format.
    Version(u32),
    /// Required features, as bits: those unknown.
    Features(u64),
}

impl std::fmt::Display for Newer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Newer::Version(version) => write!(f, "version {version}"),
            Newer::Features(bits) => write!(f, "required features {bits:#x}"),
        }
    }
}

/// What is wrong with bytes that were read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flaw {
    /// Which part.
    pub what: &'static str,
    /// Byte offset within the structure.
    pub offset: usize,
    /// What it should be.
    pub expected: String,
    /// What it is.
    pub got: String,
}

fn flaw<T>(
    what: &'static str,
    field: Field,
    expected: impl ToString,
    got: impl ToString,
) -> Result<T, Flaw> {
    Err(Flaw {
        what,
        offset: field.start,
        expected: expected.to_string(),
        got: got.to_string(),
    })
}

/// A region in the superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Region {
    /// To be written by the next commit.
    Free,
    /// Holds a commit.
    Committed {
        /// Its generation.
        generation: u64,
        /// Bytes of its manifest, without padding.
        manifest_bytes: u64,
        /// The manifest's checksum.
        manifest_checksum: u128,
    },
}

/// Sizes that follow from a table of extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Extents of a region.
    pub extent_count: u64,
    /// Bytes of a region's extents.
    pub extents_bytes: u64,
    /// Bytes reserved for each copy of a manifest.
    pub manifest_bytes_max: u64,
    /// Bytes of a region.
    pub region_bytes: u64,
    /// Regions.
    pub region_count: u32,
    /// Bytes of the file.
    pub file_bytes: u64,
}

impl Geometry {
    /// Sizes of a store with `extent_count` extents of `extents_bytes` in all; `None` if they do
    /// not fit the format.
    pub fn new(extent_count: u64, extents_bytes: u64, region_count: u32) -> Option<Geometry> {
        if !(1..=EXTENT_COUNT_MAX).contains(&extent_count)
            || !extents_bytes.is_multiple_of(PAGE_BYTES)
            || extents_bytes < extent_count * PAGE_BYTES
            || extents_bytes > extent_count * EXTENT_BYTES_MAX
            || !(2..=REGION_COUNT_MAX).contains(&(region_count as usize))
        {
            return None;
        }
        let manifest_bytes_max = (manifest::BYTES as u64
            + extent_count * entry::BYTES as u64
            + METADATA_BYTES_MAX as u64)
            .next_multiple_of(PAGE_BYTES);
        let region_bytes = extents_bytes.checked_add(MANIFEST_COPIES * manifest_bytes_max)?;
        let file_bytes = region_bytes
            .checked_mul(u64::from(region_count))?
            .checked_add(REGIONS_START)?;
        (file_bytes < 1 << 62).then_some(Geometry {
            extent_count,
            extents_bytes,
            manifest_bytes_max,
            region_bytes,
            region_count,
            file_bytes,
        })
    }

    /// Where a manifest copy of a region begins.
    pub fn manifest_offset(&self, region: usize, copy: u64) -> u64 {
        assert!(region < self.region_count as usize && copy < MANIFEST_COPIES);
        REGIONS_START + region as u64 * self.region_bytes + copy * self.manifest_bytes_max
    }

    /// Where the extents of a region begin.
    pub fn extents_offset(&self, region: usize) -> u64 {
        self.manifest_offset(region, 0) + MANIFEST_COPIES * self.manifest_bytes_max
    }
}

/// Where a superblock copy begins.
pub fn superblock_offset(copy: usize) -> u64 {
    assert!(copy < SUPERBLOCK_COPIES);
    copy as u64 * SUPERBLOCK_STRIDE
}

/// What the store is and which commits it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Bits that a reader must know, of [`FEATURES_KNOWN`].
    pub features_required: u64,
    /// Made at random at creation.
    pub store_uuid: u128,
    /// Names the model whose state this is.
    pub model_hash: u128,
    /// Names the table of sections.
    pub layout_hash: u128,
    /// Grows by one with each change.
    pub sequence: u64,
    /// Commits kept.
    pub keep: u32,
    /// Sizes.
    pub geometry: Geometry,
    /// One a region.
    pub regions: Vec<Region>,
}

fn put(bytes: &mut [u8], field: Field, value: &[u8]) {
    bytes[field.start..field.start + field.bytes].copy_from_slice(value);
}

fn take<const N: usize>(bytes: &[u8], field: Field) -> [u8; N] {
    assert_eq!(field.bytes, N, "a field is read in its own width");
    let mut value = [0; N];
    value.copy_from_slice(&bytes[field.start..field.start + N]);
    value
}

fn take_u16(bytes: &[u8], field: Field) -> u16 {
    u16::from_le_bytes(take(bytes, field))
}

fn take_u32(bytes: &[u8], field: Field) -> u32 {
    u32::from_le_bytes(take(bytes, field))
}

fn take_u64(bytes: &[u8], field: Field) -> u64 {
    u64::from_le_bytes(take(bytes, field))
}

fn take_u128(bytes: &[u8], field: Field) -> u128 {
    u128::from_le_bytes(take(bytes, field))
}

fn zeros(bytes: &[u8], fields: &[Field]) -> Result<(), Flaw> {
    for field in fields {
        if bytes[field.start..field.start + field.bytes]
            .iter()
            .any(|byte| *byte != 0)
        {
            return flaw("reserved bytes", *field, "zeros", "other bytes");
        }
    }
    Ok(())
}

impl Superblock {
    /// Generations that its regions hold, ascending.
    pub fn generations(&self) -> Vec<u64> {
        let held = self.regions.iter().filter_map(|region| match region {
            Region::Free => None,
            Region::Committed { generation, .. } => Some(*generation),
        });
        let mut held: Vec<u64> = held.collect();
        held.sort_unstable();
        held
    }

    /// The page of copy number `copy`.
    pub fn encode(&self, copy: usize) -> Vec<u8> {
        use superblock::*;
        assert!(copy < SUPERBLOCK_COPIES);
        assert_eq!(self.regions.len(), self.geometry.region_count as usize);
        let mut page = vec![0; BYTES];
        put(&mut page, MAGIC, &SUPERBLOCK_MAGIC);
        put(&mut page, VERSION, &super::format::VERSION.to_le_bytes());
        put(&mut page, COPY, &(copy as u32).to_le_bytes());
        put(
            &mut page,
            FEATURES_REQUIRED,
            &self.features_required.to_le_bytes(),
        );
        put(&mut page, STORE_UUID, &self.store_uuid.to_le_bytes());
        put(&mut page, MODEL_HASH, &self.model_hash.to_le_bytes());
        put(&mut page, LAYOUT_HASH, &self.layout_hash.to_le_bytes());
        put(&mut page, SEQUENCE, &self.sequence.to_le_bytes());
        put(&mut page, CLASS, &CLASS_CHECKPOINT.to_le_bytes());
        put(&mut page, KEEP, &self.keep.to_le_bytes());
        let sizes = &self.geometry;
        put(&mut page, REGION_COUNT, &sizes.region_count.to_le_bytes());
        put(&mut page, EXTENT_COUNT, &sizes.extent_count.to_le_bytes());
        put(&mut page, EXTENTS_BYTES, &sizes.extents_bytes.to_le_bytes());
        put(
            &mut page,
            MANIFEST_BYTES_MAX,
            &sizes.manifest_bytes_max.to_le_bytes(),
        );
        put(&mut page, REGION_BYTES, &sizes.region_bytes.to_le_bytes());
        put(&mut page, FILE_BYTES, &sizes.file_bytes.to_le_bytes());
        for (index, found) in self.regions.iter().enumerate() {
            let start = REGIONS.start + index * region::BYTES;
            let bytes = &mut page[start..start + region::BYTES];
            if let Region::Committed {
                generation,
                manifest_bytes,
                manifest_checksum,
            } = found
            {
                let offset = sizes.manifest_offset(index, 0);
                put(bytes, region::STATE, &1u32.to_le_bytes());
                put(bytes, region::GENERATION, &generation.to_le_bytes());
                put(bytes, region::MANIFEST_OFFSET, &offset.to_le_bytes());
                put(bytes, region::MANIFEST_BYTES, &manifest_bytes.to_le_bytes());
                put(
                    bytes,
                    region::MANIFEST_CHECKSUM,
                    &manifest_checksum.to_le_bytes(),
                );
            }
        }
        let sum = checksum(&page[..CHECKSUM.start]);
        put(&mut page, CHECKSUM, &sum.to_le_bytes());
        page
    }

    /// The superblock in a page read as copy number `copy`. One that is whole but newer is
    /// `Ok(Err(what))`: magic, version, required features and checksum stay where they are in every
    /// version.
    pub fn decode(page: &[u8], copy: usize) -> Result<Result<Superblock, Newer>, Flaw> {
        use superblock::*;
        assert_eq!(page.len(), BYTES);
        let magic: [u8; 8] = take(page, MAGIC);
        if magic != SUPERBLOCK_MAGIC {
            return flaw(
                "superblock magic",
                MAGIC,
                "TERRTILE",
                format!("{magic:02x?}"),
            );
        }
        let (expected, got) = (take_u128(page, CHECKSUM), checksum(&page[..CHECKSUM.start]));
        if expected != got {
            let (expected, got) = (format!("{expected:032x}"), format!("{got:032x}"));
            return flaw("superblock checksum", CHECKSUM, expected, got);
        }
        let version = take_u32(page, VERSION);
        if version > super::format::VERSION {
            return Ok(Err(Newer::Version(version)));
        }
        let exact = [
            ("superblock version", VERSION, super::format::VERSION),
            ("superblock copy", COPY, copy as u32),
            ("store class", CLASS, CLASS_CHECKPOINT),
        ];
        for (what, field, expected) in exact {
            let got = take_u32(page, field);
            if got != expected {
                return flaw(what, field, expected, got);
            }
        }
        let features_required = take_u64(page, FEATURES_REQUIRED);
        let unknown = features_required & !FEATURES_KNOWN;
        if unknown != 0 {
            return Ok(Err(Newer::Features(unknown)));
        }
        zeros(page, &[RESERVED_1, RESERVED_2, RESERVED_3])?;
        let geometry = Superblock::decode_geometry(page)?;
        let keep = take_u32(page, KEEP);
        if keep == 0 || keep >= geometry.region_count {
            let expected = format!("1..={}", geometry.region_count - 1);
            return flaw("keep", KEEP, expected, keep);
        }
        let regions = (0..REGION_COUNT_MAX).map(|index| decode_region(page, index, &geometry));
        let mut regions = regions.collect::<Result<Vec<Region>, Flaw>>()?;
        regions.truncate(geometry.region_count as usize);
        Ok(Ok(Superblock {
            features_required,
            store_uuid: take_u128(page, STORE_UUID),
            model_hash: take_u128(page, MODEL_HASH),
            layout_hash: take_u128(page, LAYOUT_HASH),
            sequence: take_u64(page, SEQUENCE),
            keep,
            geometry,
            regions,
        }))
    }

    fn decode_geometry(page: &[u8]) -> Result<Geometry, Flaw> {
        use superblock::*;
        let (count, bytes) = (take_u64(page, EXTENT_COUNT), take_u64(page, EXTENTS_BYTES));
        let region_count = take_u32(page, REGION_COUNT);
        let Some(geometry) = Geometry::new(count, bytes, region_count) else {
            let got = format!("{count} extents, {bytes} bytes, {region_count} regions");
            return flaw(
                "store sizes",
                EXTENT_COUNT,
                "sizes within the format's",
                got,
            );
        };
        let exact = [
            (MANIFEST_BYTES_MAX, geometry.manifest_bytes_max),
            (REGION_BYTES, geometry.region_bytes),
            (FILE_BYTES, geometry.file_bytes),
        ];
        for (field, expected) in exact {
            let got = take_u64(page, field);
            if got != expected {
                return flaw("store sizes", field, expected, got);
            }
        }
        Ok(geometry)
    }
}

fn decode_region(page: &[u8], index: usize, geometry: &Geometry) -> Result<Region, Flaw> {
    let start = superblock::REGIONS.start + index * region::BYTES;
    let bytes = &page[start..start + region::BYTES];
    let at = |field: Field| Field {
        start: start + field.start,
        ..field
    };
    let state = take_u32(bytes, region::STATE);
    let inside = index < geometry.region_count as usize;
    if state == 0 {
        zeros(
            page,
            &[Field {
                start,
                bytes: region::BYTES,
            }],
        )?;
        return Ok(Region::Free);
    }
    if state != 1 || !inside {
        return flaw("region state", at(region::STATE), "0 or 1", state);
    }
    zeros(page, &[at(region::RESERVED_1), at(region::RESERVED_2)])?;
    let (expected, got) = (
        geometry.manifest_offset(index, 0),
        take_u64(bytes, region::MANIFEST_OFFSET),
    );
    if expected != got {
        return flaw(
            "manifest offset",
            at(region::MANIFEST_OFFSET),
            expected,
            got,
        );
    }
    let manifest_bytes = take_u64(bytes, region::MANIFEST_BYTES);
    let least = manifest::BYTES as u64 + geometry.extent_count * entry::BYTES as u64;
    if !(least..=geometry.manifest_bytes_max).contains(&manifest_bytes) {
        let expected = format!("{least}..={}", geometry.manifest_bytes_max);
        return flaw(
            "manifest bytes",
            at(region::MANIFEST_BYTES),
            expected,
            manifest_bytes,
        );
    }
    Ok(Region::Committed {
        generation: take_u64(bytes, region::GENERATION),
        manifest_bytes,
        manifest_checksum: take_u128(bytes, region::MANIFEST_CHECKSUM),
    })
}

/// Names a table of sections: equal tables, and only they, have equal hashes.
pub fn layout_hash(table: &ExtentTable) -> u128 {
    let mut bytes = Vec::new();
    for section in table.sections() {
        bytes.extend(section.tile.layer.to_le_bytes());
        bytes.extend(section.tile.part.to_le_bytes());
        bytes.push(section.section as u8);
        bytes.push(section.element_bytes as u8);
        bytes.extend(section.elements.to_le_bytes());
    }
    checksum(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tile::EXTENT_ELEMENTS;

    fn sample() -> (Superblock, Manifest) {
        let section = |layer, section, elements, element_bytes| StoredSection {
            tile: TileId { layer, part: 0 },
            section,
            elements,
            element_bytes,
        };
        let table = ExtentTable::new(&[
            section(0, Section::Weight, 65, 2),
            section(1, Section::Moment1, EXTENT_ELEMENTS + 7, 4),
        ]);
        let geometry = Geometry::new(table.count() as u64, table.bytes(), 3).unwrap();
        let manifest = Manifest {
            region: 1,
            store_uuid: 0x1234_5678_9abc,
            model_hash: 7 << 100,
            generation: 42,
            checksums: vec![1, 2 << 77, 3],
            stored: vec![
                Stored::Plain,
                Stored::Zstd { bytes: 3 << 20 },
                Stored::Plain,
            ],
            metadata: b"{\"step\":42}".to_vec(),
            table,
        };
        let bytes = manifest.encode(&geometry);
        let superblock = Superblock {
            features_required: FEATURE_ZSTD,
            store_uuid: manifest.store_uuid,
            model_hash: manifest.model_hash,
            layout_hash: layout_hash(&manifest.table),
            sequence: 9,
            keep: 2,
            geometry,
            regions: vec![
                Region::Free,
                Region::Committed {
                    generation: 42,
                    manifest_bytes: bytes.len() as u64,
                    manifest_checksum: manifest_checksum(&bytes),
                },
                Region::Free,
            ],
        };
        (superblock, manifest)
    }

    #[test]
    fn what_was_encoded_decodes_to_itself() {
        let (superblock, manifest) = sample();
        for copy in 0..SUPERBLOCK_COPIES {
            let page = superblock.encode(copy);
            assert_eq!(Superblock::decode(&page, copy), Ok(Ok(superblock.clone())));
            let elsewhere = (copy + 1) % SUPERBLOCK_COPIES;
            assert_eq!(
                Superblock::decode(&page, elsewhere).unwrap_err().what,
                "superblock copy",
                "a copy written to another's place is refused"
            );
        }
        let bytes = manifest.encode(&superblock.geometry);
        assert_eq!(Manifest::decode(&bytes, &superblock.geometry), Ok(manifest));
    }

    #[test]
    fn every_single_bit_flip_is_refused() {
        let (superblock, manifest) = sample();
        let mut page = superblock.encode(2);
        for bit in 0..page.len() * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert!(
                Superblock::decode(&page, 2).is_err(),
                "superblock bit {bit}"
            );
            page[bit / 8] ^= 1 << (bit % 8);
        }
        let mut bytes = manifest.encode(&superblock.geometry);
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(
                Manifest::decode(&bytes, &superblock.geometry).is_err(),
                "manifest bit {bit}"
            );
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        for length in 0..bytes.len() {
            assert!(Manifest::decode(&bytes[..length], &superblock.geometry).is_err());
        }
    }

    /// Not only checksums guard: wrong values with right checksums are refused too, or mean what
    /// they say. Random bytes, then the checksum put right; no panic, no huge allocation.
    #[test]
    fn wrong_values_under_right_checksums_never_panic() {
        let (superblock, manifest) = sample();
        let page = superblock.encode(0);
        let bytes = manifest.encode(&superblock.geometry);
        let mut state = 1u64;
        let mut random = move || {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) as usize
        };
        let (mut refused, mut newer) = (0, 0);
        for _ in 0..20_000 {
            let mut page = page.clone();
            let at = random() % 640;
            page[at] = random() as u8;
            let sum = checksum(&page[..superblock::CHECKSUM.start]);
            put(&mut page, superblock::CHECKSUM, &sum.to_le_bytes());
            match Superblock::decode(&page, 0) {
                Err(_) => refused += 1,
                Ok(Err(_)) => newer += 1,
                Ok(Ok(_)) => {}
            }
            let mut bytes = bytes.clone();
            let at = random() % bytes.len();
            bytes[at] = random() as u8;
            let sum = manifest_checksum(&bytes);
            put(&mut bytes, manifest::CHECKSUM, &sum.to_le_bytes());
            refused += usize::from(Manifest::decode(&bytes, &superblock.geometry).is_err());
        }
        assert!(refused > 10_000 && newer > 100, "{refused} {newer}");
    }

    #[test]
    fn a_newer_version_is_told_from_damage() {
        let (superblock, _) = sample();
        let mut page = superblock.encode(0);
        put(&mut page, superblock::VERSION, &2u32.to_le_bytes());
        assert!(
            Superblock::decode(&page, 0).is_err(),
            "without its checksum it is damage"
        );
        let sum = checksum(&page[..superblock::CHECKSUM.start]);
        put(&mut page, superblock::CHECKSUM, &sum.to_le_bytes());
        assert_eq!(Superblock::decode(&page, 0), Ok(Err(Newer::Version(2))));
        let mut page = superblock.encode(0);
        put(
            &mut page,
            superblock::FEATURES_REQUIRED,
            &7u64.to_le_bytes(),
        );
        let sum = checksum(&page[..superblock::CHECKSUM.start]);
        put(&mut page, superblock::CHECKSUM, &sum.to_le_bytes());
        let newer = Superblock::decode(&page, 0).unwrap().unwrap_err();
        assert_eq!(newer.to_string(), "required features 0x6");
    }

    /// The tables of FORMAT.md are the constants, row by row.
    #[test]
    fn the_tables_of_the_document_are_the_constants() {
        let text = include_str!("FORMAT.md");
        let rooms = [
            ("### Superblock", superblock::FIELDS, superblock::BYTES),
            ("### Region", region::FIELDS, region::BYTES),
            ("### Manifest", manifest::FIELDS, manifest::BYTES),
            ("### Entry", entry::FIELDS, entry::BYTES),
        ];
        for (title, fields, total) in rooms {
            let start = text.find(&format!("{title}\n")).expect(title) + title.len();
            let rest = &text[start..];
            let part = &rest[..rest.find("\n##").unwrap_or(rest.len())];
            let rows: Vec<(String, usize, usize)> = part
                .lines()
                .filter_map(|line| {
                    let mut cells = line.split('|').map(str::trim).skip(1);
                    let (start, bytes, name) = (cells.next()?, cells.next()?, cells.next()?);
                    Some((name.to_string(), start.parse().ok()?, bytes.parse().ok()?))
                })
                .collect();
            let constants: Vec<(String, usize, usize)> = fields
                .iter()
                .map(|(name, field)| (name.to_lowercase(), field.start, field.bytes))
                .collect();
            assert_eq!(rows, constants, "{title}");
            let last = constants.last().unwrap();
            assert_eq!(last.1 + last.2, total);
        }
    }
}
