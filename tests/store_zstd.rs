//! Goal: a compressed commit is bit for bit the one that is not, takes fewer bytes, and no frame,
//! however made, gives other bytes or takes more memory than its payload.
//! Method: commits at several levels on real files of both engines; a manifest made by hand around
//! a frame that lies; the simulated disk for power cuts.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::os::unix::fs::FileExt;

use terrace::Error;
use terrace::config::IoEngine;
use terrace::host::{HostArena, Ring};
use terrace::store::format::{self, FEATURE_ZSTD, Region, Stored};
use terrace::store::sim::{Faults, SimDisk, mix};
use terrace::store::{CheckpointStore, ExtentKey, Spec, StoredSection, checksum};
use terrace::tile::{EXTENT_BYTES_MAX, EXTENT_ELEMENTS, Section, TileId};

fn spec(large: u64) -> Spec {
    let section = |section, elements, element_bytes| StoredSection {
        tile: TileId { layer: 0, part: 0 },
        section,
        elements,
        element_bytes,
    };
    Spec {
        model_hash: 5,
        keep: 2,
        sections: vec![
            section(Section::Weight, 1000, 2),
            section(Section::Residual, 30_000, 2),
            section(Section::Moment1, 30_001, 4),
            section(Section::Moment2, large, 4),
        ],
        engine: None,
        memory: Vec::new(),
    }
}

/// Residuals are noise; the others have few exponents, as states do.
fn payload(generation: u64, key: ExtentKey, bytes: usize) -> Vec<u8> {
    let seed = mix(generation ^ mix(key.section as u64 ^ mix(u64::from(key.extent))));
    let word = |index: u64| {
        let random = mix(seed ^ index);
        match key.section {
            Section::Residual => (random as u32).to_le_bytes(),
            _ => (((random % 4000) as f32 - 2000.0) * 1e-7).to_le_bytes(),
        }
    };
    (0..bytes.div_ceil(4) as u64)
        .flat_map(word)
        .take(bytes)
        .collect()
}

fn commit(store: &mut CheckpointStore, generation: u64) -> terrace::Result<()> {
    let table = store.table().unwrap().clone();
    let mut commit = store.begin_commit(generation)?;
    for index in 0..table.count() {
        let key = table.key(index);
        commit.write(key, &payload(generation, key, table.payload_bytes(index)))?;
    }
    commit.finish(b"{}")
}

fn verify(store: &CheckpointStore, ring: &Ring) {
    let table = store.table().unwrap();
    for generation in store.generations() {
        let keys: Vec<ExtentKey> = (0..table.count()).map(|index| table.key(index)).collect();
        let mut seen = 0;
        let each = |key, slab: &terrace::host::Lease| {
            let bytes = table.payload_bytes(table.index(key).unwrap());
            let got = slab.as_slice::<u8>();
            assert!(
                got[..bytes] == payload(generation, key, bytes),
                "{generation} {key}"
            );
            let padding = &got[bytes..bytes.next_multiple_of(4096)];
            assert!(padding.iter().all(|byte| *byte == 0), "{generation} {key}");
            seen += 1;
            Ok(())
        };
        store.read_all(generation, keys, ring, each).unwrap();
        assert_eq!(seen, table.count());
    }
}

fn ring() -> Ring {
    HostArena::take(8 * EXTENT_BYTES_MAX)
        .unwrap()
        .cut_ring(8, EXTENT_BYTES_MAX)
}

#[test]
fn commits_of_any_level_come_back_and_take_fewer_bytes() {
    let ring = ring();
    for engine in [IoEngine::Uring, IoEngine::Pread] {
        let directory = tempfile::tempdir().unwrap();
        let spec = Spec {
            engine: Some(engine),
            ..spec(2 * EXTENT_ELEMENTS + 3)
        };
        let mut store = match CheckpointStore::open_or_create(directory.path(), &spec) {
            Err(error) if engine == IoEngine::Uring && error.exit_code() == 2 => {
                println!("SKIP io_uring: {error}");
                continue;
            }
            opened => opened.unwrap(),
        };
        let mut written = Vec::new();
        for (generation, level) in [(1, 0), (2, 1), (3, 19), (4, 0)] {
            store.set_zstd(level).unwrap();
            let before = store.counters().write.bytes;
            commit(&mut store, generation).unwrap();
            written.push(store.counters().write.bytes - before);
            verify(&store, &ring);
            let features = store.superblock().features_required;
            assert_eq!(features, if generation > 1 { FEATURE_ZSTD } else { 0 });
        }
        println!("bytes written at levels 0, 1, 19, 0: {written:?}");
        assert!(written[1] * 10 < written[0] * 9 && written[2] <= written[1]);
        assert_eq!(written[3], written[0]);
        let third = store.manifest(3).unwrap();
        assert_eq!(third.stored[0], Stored::Plain, "a page cannot be shortened");
        assert_eq!(third.stored[1], Stored::Plain, "noise cannot be shortened");
        assert!(matches!(third.stored[3], Stored::Zstd { .. }));
        drop(store);
        // Whoever opens it next, at whatever level, reads both.
        let store = CheckpointStore::open_existing(directory.path()).unwrap();
        assert_eq!(store.generations(), [3, 4]);
        verify(&store, &ring);
        let file = directory.path().join("checkpoint.tiles");
        assert_eq!(file.metadata().unwrap().len(), spec.file_bytes().unwrap());
    }
}

#[test]
fn the_same_state_gives_the_same_file() {
    let images = [0, 1].map(|_| {
        let directory = tempfile::tempdir().unwrap();
        let mut store = CheckpointStore::open_or_create(directory.path(), &spec(9000)).unwrap();
        store.set_zstd(3).unwrap();
        commit(&mut store, 1).unwrap();
        let manifest = store.manifest(1).unwrap();
        (manifest.checksums.clone(), manifest.stored.clone())
    });
    assert_eq!(images[0], images[1]);
}

/// A frame with a right checksum that is not its payload: what a wrong program, not a disk, makes.
#[test]
fn a_frame_that_lies_is_damage_by_name() {
    let (directory, ring) = (tempfile::tempdir().unwrap(), ring());
    let mut store = CheckpointStore::open_or_create(directory.path(), &spec(9000)).unwrap();
    store.set_zstd(1).unwrap();
    commit(&mut store, 1).unwrap();
    let (path, mut superblock) = (store.path().to_path_buf(), store.superblock().clone());
    let mut manifest = store.manifest(1).unwrap().clone();
    drop(store);
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    let bomb = zstd::bulk::compress(&vec![0; 512 << 20], 1).unwrap();
    assert!(bomb.len() < 20 << 12, "{}", bomb.len());
    let mut bytes = bomb.clone();
    bytes.resize(bomb.len().next_multiple_of(4096), 0);
    let at = superblock.geometry.extents_offset(0) + manifest.table.offset(2);
    file.write_all_at(&bytes, at).unwrap();
    manifest.checksums[2] = checksum(&bytes);
    manifest.stored[2] = Stored::Zstd {
        bytes: bomb.len() as u32,
    };
    let encoded = manifest.encode(&superblock.geometry);
    superblock.regions[0] = Region::Committed {
        generation: 1,
        manifest_bytes: encoded.len() as u64,
        manifest_checksum: format::manifest_checksum(&encoded),
    };
    for copy in 0..2 {
        file.write_all_at(&encoded, superblock.geometry.manifest_offset(0, copy))
            .unwrap();
    }
    let write_superblocks = |superblock: &format::Superblock| {
        for copy in 0..4 {
            let page = superblock.encode(copy);
            file.write_all_at(&page, format::superblock_offset(copy))
                .unwrap();
        }
    };
    write_superblocks(&superblock);
    let reader = CheckpointStore::open_read_only(directory.path()).unwrap();
    let key = reader.table().unwrap().key(2);
    let error = reader.read(1, key, ring.take()).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Damaged { .. }), "{text}");
    assert!(
        text.contains("tile 0.0 moment1, extent 0") && text.contains("zstd"),
        "{text}"
    );
    reader
        .read(1, reader.table().unwrap().key(3), ring.take())
        .unwrap();
    drop(reader);
    // Compressed extents in a store that does not say so: such a manifest is refused.
    superblock.features_required = 0;
    write_superblocks(&superblock);
    let reader = CheckpointStore::open_read_only(directory.path()).unwrap();
    assert_eq!(reader.lost().len(), 1);
}

#[test]
fn a_damaged_frame_is_found_by_its_checksum() {
    let (directory, ring) = (tempfile::tempdir().unwrap(), ring());
    let mut store = CheckpointStore::open_or_create(directory.path(), &spec(9000)).unwrap();
    store.set_zstd(1).unwrap();
    commit(&mut store, 1).unwrap();
    let at = store.superblock().geometry.extents_offset(0) + store.table().unwrap().offset(2);
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(store.path())
        .unwrap();
    file.write_all_at(&[0x55], at + 100).unwrap();
    let error = store
        .read(1, store.table().unwrap().key(2), ring.take())
        .unwrap_err();
    assert!(matches!(error, Error::ExtentChecksum { .. }), "{error}");
}

#[test]
fn a_power_cut_at_any_operation_leaves_whole_compressed_commits() {
    let (spec, ring) = (spec(9000), ring());
    let bytes = spec.file_bytes().unwrap();
    let mut outcomes = [0, 0];
    for crash_at in 1..60 {
        let disk = SimDisk::new(bytes, Faults::default());
        CheckpointStore::format_disk(Box::new(disk.clone()), &spec, 1).unwrap();
        let disk = disk.after_exit(Faults::default());
        disk.set_faults(Faults {
            crash_at: Some(crash_at),
            ..Faults::default()
        });
        let mut acknowledged = 0;
        if let Ok(mut store) =
            CheckpointStore::open_disk(Box::new(disk.clone()), bytes, Some(&spec))
        {
            store.set_zstd(1).unwrap();
            while acknowledged < 4 && commit(&mut store, acknowledged + 1).is_ok() {
                acknowledged += 1;
            }
        }
        for seed in 0..2 {
            let image = disk.after_crash(mix(seed ^ crash_at), Faults::default());
            let store = CheckpointStore::open_disk(Box::new(image), bytes, Some(&spec)).unwrap();
            let newest = store.latest().unwrap_or(0);
            assert!(newest == acknowledged || newest == acknowledged + 1);
            outcomes[(newest - acknowledged) as usize] += 1;
            assert!(store.lost().is_empty());
            verify(&store, &ring);
        }
    }
    assert!(outcomes.iter().all(|count| *count > 5), "{outcomes:?}");
}
