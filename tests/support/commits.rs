//! A checkpoint store's workload that several test files share: a small layout, contents that are
//! told apart by what wrote them, commits, and reading everything back.
#![allow(dead_code, reason = "each test file uses a part")]

use terrace::host::{HostArena, Ring};
use terrace::store::format::{self, Geometry};
use terrace::store::sim::{Event, mix};
use terrace::store::{CheckpointStore, ExtentKey, Spec, StoredSection};
use terrace::tile::{Section, TileId};
use terrace::{Error, Result};

/// Commits that the stores of [`spec`] keep.
pub(crate) const KEEP: u64 = 2;

/// A section of a layer's tile.
pub(crate) fn section(
    layer: u16,
    section: Section,
    elements: u64,
    element_bytes: u64,
) -> StoredSection {
    StoredSection {
        tile: TileId { layer, part: 0 },
        section,
        elements,
        element_bytes,
    }
}

/// Three extents: less than a page, several pages and a part, one page and two bytes.
pub(crate) fn spec() -> Spec {
    Spec {
        model_hash: 77,
        keep: KEEP,
        sections: vec![
            section(0, Section::Weight, 65, 2),
            section(0, Section::Moment1, 5000, 4),
            section(1, Section::Weight, 2049, 2),
        ],
        engine: None,
        memory: Vec::new(),
    }
}

/// Four slabs.
pub(crate) fn ring(slab_bytes: u64) -> Ring {
    let mut cutter = HostArena::take(4 * slab_bytes).unwrap();
    cutter.cut_ring(4, slab_bytes)
}

/// Bytes of an extent as `writer` (a generation, an attempt) writes them.
pub(crate) fn payload(writer: u64, key: ExtentKey, bytes: usize) -> Vec<u8> {
    let tile = u64::from(key.tile.layer) << 8 | key.section as u64;
    let seed = mix(writer ^ mix(tile ^ mix(u64::from(key.extent))));
    let words = (0..bytes.div_ceil(8) as u64).map(|index| mix(seed ^ index).to_le_bytes());
    words.flatten().take(bytes).collect()
}

/// What `writer` stores beside its state.
pub(crate) fn metadata(writer: u64) -> Vec<u8> {
    format!("{{\"step\":{writer}}}").into_bytes()
}

/// Commits `generation` with the contents of the writer of the same number.
pub(crate) fn commit(store: &mut CheckpointStore, generation: u64) -> Result<()> {
    let table = store.table().expect("opened with a spec").clone();
    let mut commit = store.begin_commit(generation)?;
    for index in 0..table.count() {
        let key = table.key(index);
        let bytes = payload(generation, key, table.payload_bytes(index));
        commit.write(key, &bytes)?;
    }
    commit.finish(&metadata(generation))
}

/// What a store holds after commits 1 to `last`.
pub(crate) fn kept(last: u64) -> Vec<u64> {
    (last.saturating_sub(KEEP - 1).max(1)..=last).collect()
}

/// Whether a slab holds what `writer` wrote to `key`, and zeros up to the page.
pub(crate) fn holds(slab: &[u8], writer: u64, key: ExtentKey, bytes: usize) -> bool {
    slab[..bytes] == payload(writer, key, bytes)
        && slab[bytes..bytes.next_multiple_of(4096)]
            .iter()
            .all(|byte| *byte == 0)
}

/// Reads everything of every generation, each written by the writer of its number.
pub(crate) fn verify(store: &CheckpointStore, ring: &Ring) -> Result<()> {
    let Some(table) = store.table() else {
        return Ok(());
    };
    for generation in store.generations() {
        assert_eq!(store.metadata(generation)?, metadata(generation));
        let keys: Vec<ExtentKey> = (0..table.count()).map(|index| table.key(index)).collect();
        let mut seen = 0;
        store.read_all(generation, keys.iter().copied(), ring, |key, slab| {
            let bytes = table.payload_bytes(table.index(key).unwrap());
            assert!(
                holds(slab.as_slice(), generation, key, bytes),
                "{generation} {key}"
            );
            seen += 1;
            Ok(())
        })?;
        assert_eq!(seen, table.count());
    }
    Ok(())
}

/// What lies at an offset of a store's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Copies 0 and 1, or 2 and 3, of the superblock.
    Superblocks(u64),
    Manifest(u64),
    Extents(u64),
}

fn part(geometry: &Geometry, offset: u64) -> Part {
    let Some(inside) = offset.checked_sub(format::REGIONS_START) else {
        return Part::Superblocks(offset / format::SUPERBLOCK_STRIDE / 2);
    };
    let region = inside / geometry.region_bytes;
    match inside % geometry.region_bytes < format::MANIFEST_COPIES * geometry.manifest_bytes_max {
        true => Part::Manifest(region),
        false => Part::Extents(region),
    }
}

/// Holds what a store asked of its disk to FORMAT.md, "A commit": nothing is written that refers to
/// what is not flushed, and a half of the superblock copies only when all else is. `ended`: the
/// last commit returned, so that nothing may be left unflushed.
pub(crate) fn check_order(
    geometry: &Geometry,
    events: &[Event],
    ended: bool,
) -> std::result::Result<(), String> {
    let mut unflushed: Vec<Part> = Vec::new();
    for (number, event) in events.iter().enumerate() {
        let Event::Write { offset, .. } = *event else {
            unflushed.clear();
            continue;
        };
        let now = part(geometry, offset);
        if let Some(before) = unflushed.iter().find(|before| **before != now) {
            return Err(format!(
                "write {number} to {now:?} while {before:?} is not flushed"
            ));
        }
        unflushed.push(now);
    }
    match unflushed.first() {
        Some(left) if ended => Err(format!("{left:?} is not flushed at the end")),
        _ => Ok(()),
    }
}

/// The facts of an error that says what a test expects of it: its name without the rest.
pub(crate) fn kind(error: &Error) -> &'static str {
    match error {
        Error::Input { .. } => "input",
        Error::Budget { .. } => "budget",
        Error::Io { .. } => "io",
        Error::Busy { .. } => "busy",
        Error::Damaged { .. } => "damaged",
        Error::ExtentChecksum { .. } => "checksum",
        Error::TileIo { .. } => "tile",
        Error::StoreFailed { .. } => "failed",
        Error::Unsupported { .. } => "unsupported",
        _ => "other",
    }
}
