//! Goal: damage to a checkpoint store is survived where there is a second copy, and otherwise found
//! and named: the commit, or the very tile. Nothing else is affected, and nothing panics.
//! Method: 10,000 random corruptions of a store with two commits: bits, noise, punched holes,
//! swapped extents, swapped regions, swapped copies, other lengths. What must come of each follows
//! from which bytes it changed.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

#[path = "support/commits.rs"]
mod commits;
#[path = "support/seeds.rs"]
mod seeds;

use std::sync::LazyLock;

use terrace::Error;
use terrace::store::format::{self, Geometry, Superblock, superblock};
use terrace::store::sim::{Faults, SimDisk, mix};
use terrace::store::{CheckpointStore, ExtentTable};

const CORRUPTIONS: u64 = 10_000;
const COMMITS: u64 = 3;

/// A store after three commits, of which it keeps two.
struct Whole {
    disk: SimDisk,
    geometry: Geometry,
    table: ExtentTable,
    /// By region: its commit.
    held: Vec<Option<u64>>,
    manifest_bytes: usize,
}

static WHOLE: LazyLock<Whole> = LazyLock::new(|| {
    let spec = commits::spec();
    let disk = SimDisk::new(spec.file_bytes().unwrap(), Faults::default());
    let mut store = CheckpointStore::format_disk(Box::new(disk.clone()), &spec, 1).unwrap();
    for generation in 1..=COMMITS {
        commits::commit(&mut store, generation).unwrap();
    }
    let region = |region: &format::Region| match region {
        format::Region::Free => None,
        format::Region::Committed { generation, .. } => Some(*generation),
    };
    let held = store.superblock().regions.iter().map(region).collect();
    let manifest_bytes = store
        .superblock()
        .regions
        .iter()
        .find_map(|region| match region {
            format::Region::Free => None,
            format::Region::Committed { manifest_bytes, .. } => Some(*manifest_bytes as usize),
        });
    Whole {
        geometry: store.superblock().geometry,
        table: store.table().unwrap().clone(),
        held,
        manifest_bytes: manifest_bytes.unwrap(),
        disk,
    }
});

fn swap(disk: &SimDisk, a: u64, b: u64, bytes: usize) {
    let (one, two) = (disk.peek(a, bytes), disk.peek(b, bytes));
    disk.overwrite(a, &two);
    disk.overwrite(b, &one);
}

struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = mix(self.0);
        self.0 % bound
    }
}

impl Whole {
    fn extent(&self, region: usize, index: usize) -> (u64, usize) {
        let offset = self.geometry.extents_offset(region) + self.table.offset(index);
        (offset, self.table.slot_bytes(index))
    }

    /// A range that means something: a structure or an extent.
    fn place(&self, draw: &mut Draw) -> (u64, usize) {
        let region = draw.below(u64::from(self.geometry.region_count)) as usize;
        match draw.below(4) {
            0 => (format::superblock_offset(draw.below(4) as usize), 4096),
            1 => {
                let offset = self.geometry.manifest_offset(region, draw.below(2));
                (offset, self.manifest_bytes)
            }
            _ => self.extent(region, draw.below(self.table.count() as u64) as usize),
        }
    }

    fn corrupt(&self, disk: &SimDisk, draw: &mut Draw) {
        let (offset, bytes) = self.place(draw);
        match draw.below(6) {
            0 | 1 => {
                let byte = draw.below(bytes as u64);
                disk.flip(offset + byte, draw.below(8) as u8);
            }
            2 => {
                let noise: Vec<u8> = (0..1 + draw.below(600)).map(|_| draw.0 as u8).collect();
                let noise: Vec<u8> = noise.iter().map(|_| draw.below(256) as u8).collect();
                let start = draw.below(bytes as u64);
                let count = noise.len().min(bytes - start as usize);
                disk.overwrite(offset + start, &noise[..count]);
            }
            // A hole: whole sectors of zeros.
            3 => {
                let start = draw.below(bytes.div_ceil(512) as u64) * 512;
                disk.erase(offset + start, 512.min(bytes - start as usize));
            }
            // Two places' bytes change places.
            4 => {
                let (other, other_bytes) = self.place(draw);
                swap(disk, offset, other, bytes.min(other_bytes));
            }
            // Two regions do.
            _ => {
                let count = u64::from(self.geometry.region_count);
                let [a, b] = [0; 2].map(|_: u64| draw.below(count) as usize);
                let geometry = &self.geometry;
                for copy in 0..format::MANIFEST_COPIES {
                    let [a, b] = [a, b].map(|region| geometry.manifest_offset(region, copy));
                    swap(disk, a, b, self.manifest_bytes);
                }
                let [a, b] = [a, b].map(|region| geometry.extents_offset(region));
                swap(disk, a, b, self.table.bytes() as usize);
            }
        }
    }

    fn same(&self, disk: &SimDisk, (offset, bytes): (u64, usize)) -> bool {
        disk.peek(offset, bytes) == self.disk.peek(offset, bytes)
    }

    /// Generations that must be there: one copy of their manifest is as it was.
    fn readable(&self, disk: &SimDisk) -> Vec<(usize, u64)> {
        let regions = self.held.iter().enumerate();
        let held = regions.filter_map(|(region, held)| Some((region, (*held)?)));
        let whole = |region, copy| {
            let offset = self.geometry.manifest_offset(region, copy);
            self.same(disk, (offset, self.manifest_bytes))
        };
        held.filter(|(region, _)| whole(*region, 0) || whole(*region, 1))
            .collect()
    }
}

fn open(disk: &SimDisk) -> terrace::Result<CheckpointStore> {
    let spec = commits::spec();
    CheckpointStore::open_disk(Box::new(disk.clone()), disk.bytes(), Some(&spec))
}

fn check(seed: u64) -> Result<(), String> {
    let whole = &*WHOLE;
    let disk = whole.disk.after_exit(Faults::default());
    let draw = &mut Draw(mix(seed));
    for _ in 0..1 + draw.below(3) {
        whole.corrupt(&disk, draw);
    }
    let copies = (0..4).filter(|copy| {
        let offset = format::superblock_offset(*copy);
        whole.same(&disk, (offset, 4096))
    });
    let copies = copies.count();
    let mut readable = whole.readable(&disk);
    readable.sort_by_key(|(_, generation)| *generation);
    let newest = readable
        .last()
        .is_some_and(|(_, generation)| *generation == COMMITS);
    let opens = !readable.is_empty() && (copies >= 2 || copies == 1 && newest);
    let store = match open(&disk) {
        Ok(store) if opens => store,
        Ok(_) => {
            return Err(format!(
                "opened with {copies} superblock copies, {readable:?}"
            ));
        }
        Err(error @ Error::Damaged { .. }) if !opens && error.exit_code() == 3 => return Ok(()),
        Err(error) => return Err(format!("{copies} superblock copies, {readable:?}: {error}")),
    };
    let generations: Vec<u64> = readable.iter().map(|(_, generation)| *generation).collect();
    if store.generations() != generations {
        return Err(format!(
            "holds {:?}, not {generations:?}",
            store.generations()
        ));
    }
    for lost in whole
        .held
        .iter()
        .flatten()
        .filter(|held| !generations.contains(held))
    {
        let sentence = format!("generation {lost} is lost");
        if !store
            .sentences()
            .iter()
            .any(|said| said.starts_with(&sentence))
        {
            return Err(format!("not said: {sentence}"));
        }
    }
    check_extents(whole, &disk, &store, &readable)?;
    drop(store);
    repair(&disk, &generations)
}

/// Each extent is read as it was written, or refused with its name where a byte of it changed.
fn check_extents(
    whole: &Whole,
    disk: &SimDisk,
    store: &CheckpointStore,
    readable: &[(usize, u64)],
) -> Result<(), String> {
    let ring = commits::ring(1 << 15);
    for (region, generation) in readable {
        for index in 0..whole.table.count() {
            let key = whole.table.key(index);
            let place = whole.extent(*region, index);
            let named = format!("{} {}", key.tile, key.section);
            match store.read(*generation, key, ring.take()) {
                Ok(slab) => {
                    let bytes = whole.table.payload_bytes(index);
                    if !commits::holds(slab.as_slice(), *generation, key, bytes) {
                        return Err(format!("generation {generation} {key}: wrong bytes"));
                    }
                }
                Err(Error::ExtentChecksum {
                    tile,
                    extent,
                    offset,
                    ..
                }) if !whole.same(disk, place) => {
                    if (tile.as_str(), extent, offset) != (&*named, key.extent, place.0) {
                        return Err(format!("{named} is called {tile} {extent} at {offset}"));
                    }
                }
                Err(error) => return Err(format!("generation {generation} {key}: {error}")),
            }
        }
    }
    Ok(())
}

/// The next commit puts all superblock copies right and is whole.
fn repair(disk: &SimDisk, generations: &[u64]) -> Result<(), String> {
    let mut store = open(disk).map_err(|e| e.to_string())?;
    let next = store.next_generation();
    commits::commit(&mut store, next).map_err(|e| e.to_string())?;
    drop(store);
    let pages = (0..4).map(|copy| (copy, disk.peek(format::superblock_offset(copy), 4096)));
    let decoded: Vec<_> = pages
        .map(|(copy, page)| Superblock::decode(&page, copy))
        .collect();
    if decoded
        .iter()
        .any(|copy| !matches!(copy, Ok(Ok(_))) || *copy != decoded[0])
    {
        return Err("a superblock copy is not repaired".to_string());
    }
    let found = open(disk).map_err(|e| e.to_string())?.generations();
    match found.last() == Some(&next) && (generations.len() < 2 || found.len() == 2) {
        true => Ok(()),
        false => Err(format!("{found:?} after {generations:?} and {next}")),
    }
}

#[test]
fn damage_is_survived_or_found_and_named() {
    seeds::run(CORRUPTIONS, "--test store_damage damage", check);
}

/// Cut off or grown by any number of bytes, the file is refused as damaged.
#[test]
fn another_length_is_refused() {
    let whole = &*WHOLE;
    let bytes = whole.disk.bytes();
    let mut lengths: Vec<u64> = (0..1000)
        .map(|seed| mix(seed) % (bytes + (1 << 20)))
        .collect();
    lengths.extend([
        0,
        511,
        4096,
        (4 << 20) - 1,
        4 << 20,
        bytes - 4096,
        bytes - 1,
        bytes + 4096,
    ]);
    for length in lengths.into_iter().filter(|length| *length != bytes) {
        let disk = SimDisk::new(bytes.max(length).next_multiple_of(4096), Faults::default());
        for offset in (0..4).map(format::superblock_offset) {
            disk.overwrite(offset, &whole.disk.peek(offset, 4096));
        }
        let spec = commits::spec();
        let opened = CheckpointStore::open_disk(Box::new(disk), length, Some(&spec));
        let error = opened
            .err()
            .unwrap_or_else(|| panic!("{length} bytes were opened"));
        assert_eq!(error.exit_code(), 3, "{length}: {error}");
    }
}

/// Every bit of every superblock copy and of a manifest's own bytes is guarded.
#[test]
fn every_bit_of_a_structure_is_guarded() {
    let whole = &*WHOLE;
    let page = whole.disk.peek(0, superblock::BYTES);
    assert!(matches!(Superblock::decode(&page, 0), Ok(Ok(_))));
    for copy in 1..4 {
        let decoded = Superblock::decode(&page, copy);
        assert!(decoded.is_err(), "copy 0 in the place of copy {copy}");
    }
    for bit in 0..page.len() * 8 {
        let mut page = page.clone();
        page[bit / 8] ^= 1 << (bit % 8);
        assert!(Superblock::decode(&page, 0).is_err(), "bit {bit}");
    }
}
