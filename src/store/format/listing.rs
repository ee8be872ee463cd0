//! The manifest's bytes: one commit's extents, their checksums, the caller's metadata.
//!
//! Entries tile the region's extents in ascending order without a gap; anything else is a flaw,
//! whatever its checksum says.

use twox_hash::XxHash3_128;

use super::{
    ExtentKey, ExtentTable, Field, Flaw, Geometry, MANIFEST_MAGIC, METADATA_BYTES_MAX, Section,
    StoredSection, TileId, entry, flaw, manifest, put, take, take_u16, take_u32, take_u64,
    take_u128, zeros,
};
use crate::tile::{EXTENT_ELEMENTS, PAGE_BYTES};

/// How an extent's payload is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// As it is.
    Plain,
    /// Shuffled by element width, then one zstd frame of so many bytes, which takes fewer pages
    /// than the payload.
    Zstd {
        /// Without padding.
        bytes: u32,
    },
}

/// One commit: its extents' checksums and the caller's metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Region that it describes.
    pub region: u32,
    /// The store's.
    pub store_uuid: u128,
    /// The model's.
    pub model_hash: u128,
    /// Of the commit.
    pub generation: u64,
    /// All extents.
    pub table: ExtentTable,
    /// Checksum of each extent's stored bytes with their padding, in the table's order.
    pub checksums: Vec<u128>,
    /// How each extent is stored, in the table's order.
    pub stored: Vec<Stored>,
    /// The caller's bytes.
    pub metadata: Vec<u8>,
}

/// Checksum of a manifest: all its bytes but the checksum's own.
pub fn manifest_checksum(bytes: &[u8]) -> u128 {
    let mut hash = XxHash3_128::new();
    hash.write(&bytes[..manifest::CHECKSUM.start]);
    hash.write(&bytes[manifest::BYTES..]);
    hash.finish_128()
}

impl Manifest {
    /// Bytes of an extent on disk, whole pages: at most [`ExtentTable::slot_bytes`].
    pub fn stored_bytes(&self, index: usize) -> usize {
        match self.stored[index] {
            Stored::Plain => self.table.slot_bytes(index),
            Stored::Zstd { bytes } => (bytes as usize).next_multiple_of(super::PAGE),
        }
    }

    /// Whether any extent is compressed.
    pub fn is_compressed(&self) -> bool {
        self.stored.iter().any(|stored| *stored != Stored::Plain)
    }

    /// The manifest's bytes, without padding to a page.
    ///
    /// # Panics
    /// If the metadata exceed [`METADATA_BYTES_MAX`].
    pub fn encode(&self, geometry: &Geometry) -> Vec<u8> {
        use manifest::*;
        assert!(self.metadata.len() <= METADATA_BYTES_MAX);
        assert_eq!(self.checksums.len(), self.table.count());
        assert_eq!(self.stored.len(), self.table.count());
        let entries = BYTES + self.table.count() * entry::BYTES;
        let total = entries + self.metadata.len();
        let mut bytes = vec![0; entries];
        put(&mut bytes, MAGIC, &MANIFEST_MAGIC);
        put(&mut bytes, VERSION, &super::VERSION.to_le_bytes());
        put(&mut bytes, REGION, &self.region.to_le_bytes());
        put(&mut bytes, STORE_UUID, &self.store_uuid.to_le_bytes());
        put(&mut bytes, MODEL_HASH, &self.model_hash.to_le_bytes());
        put(&mut bytes, GENERATION, &self.generation.to_le_bytes());
        put(
            &mut bytes,
            EXTENT_COUNT,
            &(self.table.count() as u64).to_le_bytes(),
        );
        put(
            &mut bytes,
            METADATA_BYTES,
            &(self.metadata.len() as u64).to_le_bytes(),
        );
        put(&mut bytes, MANIFEST_BYTES, &(total as u64).to_le_bytes());
        let extents = geometry.extents_offset(self.region as usize);
        for (index, sum) in self.checksums.iter().enumerate() {
            let start = BYTES + index * entry::BYTES;
            let (key, slot) = (
                self.table.key(index),
                &mut bytes[start..start + entry::BYTES],
            );
            put(slot, entry::LAYER, &key.tile.layer.to_le_bytes());
            put(slot, entry::PART, &key.tile.part.to_le_bytes());
            put(slot, entry::SECTION, &[key.section as u8]);
            put(
                slot,
                entry::ELEMENT_BYTES,
                &[self.table.element_bytes(index) as u8],
            );
            put(slot, entry::EXTENT, &key.extent.to_le_bytes());
            let payload = self.table.payload_bytes(index) as u64;
            put(slot, entry::PAYLOAD_BYTES, &payload.to_le_bytes());
            let offset = extents + self.table.offset(index);
            put(slot, entry::OFFSET, &offset.to_le_bytes());
            put(slot, entry::GENERATION, &self.generation.to_le_bytes());
            if let Stored::Zstd { bytes } = self.stored[index] {
                put(slot, entry::CODEC, &[1]);
                put(slot, entry::STORED_BYTES, &u64::from(bytes).to_le_bytes());
            }
            put(slot, entry::CHECKSUM, &sum.to_le_bytes());
        }
        bytes.extend_from_slice(&self.metadata);
        let sum = manifest_checksum(&bytes);
        put(&mut bytes, CHECKSUM, &sum.to_le_bytes());
        bytes
    }

    /// The manifest in `bytes`, which are exactly its own.
    pub fn decode(bytes: &[u8], geometry: &Geometry) -> Result<Manifest, Flaw> {
        use manifest::*;
        let whole = Field { start: 0, bytes: 0 };
        if bytes.len() < BYTES {
            return flaw(
                "manifest",
                whole,
                format!("at least {BYTES} bytes"),
                bytes.len(),
            );
        }
        let magic: [u8; 8] = take(bytes, MAGIC);
        if magic != MANIFEST_MAGIC {
            return flaw("manifest magic", MAGIC, "TERRMANI", format!("{magic:02x?}"));
        }
        let (expected, got) = (take_u128(bytes, CHECKSUM), manifest_checksum(bytes));
        if expected != got {
            let (expected, got) = (format!("{expected:032x}"), format!("{got:032x}"));
            return flaw("manifest checksum", CHECKSUM, expected, got);
        }
        let version = take_u32(bytes, VERSION);
        if version != super::VERSION {
            return flaw("manifest version", VERSION, super::VERSION, version);
        }
        let region = take_u32(bytes, REGION);
        if region >= geometry.region_count {
            return flaw(
                "region",
                REGION,
                format!("below {}", geometry.region_count),
                region,
            );
        }
        zeros(bytes, &[RESERVED_1])?;
        let count = take_u64(bytes, EXTENT_COUNT);
        if count != geometry.extent_count {
            return flaw("extent count", EXTENT_COUNT, geometry.extent_count, count);
        }
        let entries = BYTES as u64 + count * entry::BYTES as u64;
        let metadata = take_u64(bytes, METADATA_BYTES);
        let total = entries.checked_add(metadata);
        if metadata > METADATA_BYTES_MAX as u64 || total != Some(bytes.len() as u64) {
            let expected = format!("what {} bytes leave", bytes.len());
            return flaw("metadata bytes", METADATA_BYTES, expected, metadata);
        }
        let named = take_u64(bytes, MANIFEST_BYTES);
        if named != bytes.len() as u64 {
            return flaw("manifest bytes", MANIFEST_BYTES, bytes.len(), named);
        }
        let generation = take_u64(bytes, GENERATION);
        let (head, tail) = bytes.split_at(entries as usize);
        let (table, checksums, stored) =
            decode_entries(&head[BYTES..], region as usize, generation, geometry)?;
        Ok(Manifest {
            region,
            store_uuid: take_u128(bytes, STORE_UUID),
            model_hash: take_u128(bytes, MODEL_HASH),
            generation,
            table,
            checksums,
            stored,
            metadata: tail.to_vec(),
        })
    }
}

struct Entry {
    key: ExtentKey,
    element_bytes: u64,
    payload: u64,
    offset: u64,
    stored: Stored,
    checksum: u128,
}

fn decode_entry(slot: &[u8], start: usize, generation: u64) -> Result<Entry, Flaw> {
    use entry::*;
    let at = |field: Field| Field {
        start: start + field.start,
        ..field
    };
    zeros(slot, &[RESERVED_1, RESERVED_2])?;
    let [section] = take(slot, SECTION);
    let Some(section) = Section::from_index(section) else {
        return flaw("section", at(SECTION), "0..=3", section);
    };
    let [element_bytes] = take(slot, ELEMENT_BYTES);
    if !(1..=4).contains(&element_bytes) {
        return flaw("element bytes", at(ELEMENT_BYTES), "1..=4", element_bytes);
    }
    let payload = take_u64(slot, PAYLOAD_BYTES);
    let ([codec], stored) = (take(slot, CODEC), take_u64(slot, STORED_BYTES));
    // A frame that saves no page is never kept, so it ends before the payload's last page begins.
    let most = payload.saturating_sub(1) / PAGE_BYTES * PAGE_BYTES;
    let stored = match (codec, u32::try_from(stored)) {
        (0, Ok(0)) => Stored::Plain,
        (1, Ok(bytes)) if bytes > 0 && stored <= most => Stored::Zstd { bytes },
        (0 | 1, _) => {
            let expected = format!("0 if plain, else 1..={most}");
            return flaw("stored bytes", at(STORED_BYTES), expected, stored);
        }
        _ => return flaw("codec", at(CODEC), "0 (none) or 1 (zstd)", codec),
    };
    let of = take_u64(slot, GENERATION);
    if of != generation {
        return flaw("extent generation", at(GENERATION), generation, of);
    }
    Ok(Entry {
        key: ExtentKey {
            tile: TileId {
                layer: take_u16(slot, LAYER),
                part: take_u16(slot, PART),
            },
            section,
            extent: take_u32(slot, EXTENT),
        },
        element_bytes: u64::from(element_bytes),
        payload,
        offset: take_u64(slot, OFFSET),
        stored,
        checksum: take_u128(slot, CHECKSUM),
    })
}

/// The entries must tile the region's extents in ascending order without a gap.
fn decode_entries(
    bytes: &[u8],
    region: usize,
    generation: u64,
    geometry: &Geometry,
) -> Result<(ExtentTable, Vec<u128>, Vec<Stored>), Flaw> {
    let mut sections: Vec<StoredSection> = Vec::new();
    let count = bytes.len() / entry::BYTES;
    let (mut checksums, mut stored) = (Vec::with_capacity(count), Vec::with_capacity(count));
    let mut end = geometry.extents_offset(region);
    for (index, slot) in bytes.chunks_exact(entry::BYTES).enumerate() {
        let start = manifest::BYTES + index * entry::BYTES;
        let found = decode_entry(slot, start, generation)?;
        let bytes = entry::BYTES;
        let place = Field { start, bytes };
        if found.offset != end {
            return flaw("extent offset", place, end, found.offset);
        }
        let most = EXTENT_ELEMENTS * found.element_bytes;
        let whole = found.payload.is_multiple_of(found.element_bytes);
        if found.payload == 0 || found.payload > most || !whole {
            return flaw(
                "extent payload",
                place,
                format!("1..={most}"),
                found.payload,
            );
        }
        let elements = found.payload / found.element_bytes;
        let key = found.key;
        let id = (key.tile, key.section);
        match sections.last_mut() {
            Some(last) if (last.tile, last.section) == id => {
                let expected = last.elements.div_ceil(EXTENT_ELEMENTS);
                if u64::from(key.extent) != expected
                    || !last.elements.is_multiple_of(EXTENT_ELEMENTS)
                    || last.element_bytes != found.element_bytes
                {
                    return flaw("extent index", place, expected, key.extent);
                }
                last.elements += elements;
            }
            last => {
                let ascends = last.is_none_or(|last| (last.tile, last.section) < id);
                if key.extent != 0 || !ascends {
                    return flaw("extent", place, "the first of a later section", key);
                }
                sections.push(StoredSection {
                    tile: key.tile,
                    section: key.section,
                    elements,
                    element_bytes: found.element_bytes,
                });
            }
        }
        checksums.push(found.checksum);
        stored.push(found.stored);
        end += found.payload.next_multiple_of(PAGE_BYTES);
    }
    let expected = geometry.extents_offset(region) + geometry.extents_bytes;
    if end != expected {
        let place = Field {
            start: manifest::BYTES,
            bytes: bytes.len(),
        };
        return flaw("end of the extents", place, expected, end);
    }
    Ok((ExtentTable::new(&sections), checksums, stored))
}
