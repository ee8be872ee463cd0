//! Goal: a store that a released version made opens for ever, whole or with a damaged copy, and
//! what a later version makes is refused by name.
//! Method: small images in tests/fixtures, each a store's file compressed by zstd; the README there
//! says how they were made.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use terrace::host::{HostArena, Ring};
use terrace::store::format::{self, superblock};
use terrace::store::{CheckpointStore, ExtentKey, Reader, Spec, StoredSection, checksum};
use terrace::tile::{Section, TileId};

const MODEL_HASH: u128 = 0x7e22_ace0;
/// Far more than any image has.
const IMAGE_BYTES_MAX: usize = 64 << 20;

fn spec() -> Spec {
    let section = |layer, section, elements, element_bytes| StoredSection {
        tile: TileId { layer, part: 0 },
        section,
        elements,
        element_bytes,
    };
    Spec {
        model_hash: MODEL_HASH,
        keep: 2,
        sections: vec![
            section(0, Section::Weight, 65, 2),
            section(0, Section::Residual, 6001, 2),
            section(1, Section::Weight, 2049, 4),
            section(1, Section::Moment1, 9000, 4),
            section(1, Section::Moment2, 9000, 4),
        ],
        engine: None,
        memory: Vec::new(),
    }
}

/// Values that compress a little, as states do, from plain integer arithmetic.
fn payload(generation: u64, key: ExtentKey, bytes: usize) -> Vec<u8> {
    let seed = generation << 32 | u64::from(key.tile.layer) << 8 | key.section as u64;
    let word = |index: u64| {
        let random = (seed ^ index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((random >> 52) as u32 | 0x3a00_0000).to_le_bytes()
    };
    (0..bytes.div_ceil(4) as u64)
        .flat_map(word)
        .take(bytes)
        .collect()
}

fn metadata(generation: u64) -> Vec<u8> {
    format!("{{\"step\":{generation}}}").into_bytes()
}

fn commit(store: &mut CheckpointStore, generation: u64) {
    let table = store.table().unwrap().clone();
    let mut commit = store.begin_commit(generation).unwrap();
    for index in 0..table.count() {
        let key = table.key(index);
        let bytes = payload(generation, key, table.payload_bytes(index));
        commit.write(key, &bytes).unwrap();
    }
    commit.finish(&metadata(generation)).unwrap();
}

fn assert_holds(store: &Reader, generations: &[u64], ring: &Ring) {
    assert_eq!(store.generations(), generations);
    let table = store.table().unwrap();
    for generation in generations.iter().copied() {
        assert_eq!(store.metadata(generation).unwrap(), metadata(generation));
        for index in 0..table.count() {
            let key = table.key(index);
            let slab = store.read(generation, key, ring.take()).unwrap();
            let bytes = table.payload_bytes(index);
            assert!(
                slab.as_slice::<u8>()[..bytes] == payload(generation, key, bytes),
                "{key}"
            );
        }
    }
}

fn ring() -> Ring {
    HostArena::take(4 << 16).unwrap().cut_ring(4, 1 << 16)
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/store_v1")
}

/// A directory with the store of an image.
fn unpack(name: &str) -> tempfile::TempDir {
    let image = std::fs::read(fixtures().join(name)).unwrap();
    let bytes = zstd::bulk::decompress(&image, IMAGE_BYTES_MAX).unwrap();
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("checkpoint.tiles"), bytes).unwrap();
    directory
}

/// Makes the images anew, when asked to by name.
#[test]
fn images_are_made_when_asked_for() {
    if std::env::var_os("TERRACE_MAKE_FIXTURES").is_none() {
        println!("not asked for: TERRACE_MAKE_FIXTURES is not set");
        return;
    }
    std::fs::create_dir_all(fixtures()).unwrap();
    for (name, level) in [("plain", 0), ("zstd", 3), ("damaged", 3)] {
        let directory = tempfile::tempdir().unwrap();
        let mut store = CheckpointStore::open_or_create(directory.path(), &spec()).unwrap();
        store.set_zstd(level).unwrap();
        (1..=3).for_each(|generation| commit(&mut store, generation));
        let (path, sizes) = (store.path().to_path_buf(), store.superblock().geometry);
        let region = store.manifest(3).unwrap().region as usize;
        drop(store);
        if name == "damaged" {
            let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            let junk = [0x55; 512];
            file.write_all_at(&junk, format::superblock_offset(0))
                .unwrap();
            file.write_all_at(&junk, sizes.manifest_offset(region, 0))
                .unwrap();
        }
        let image = zstd::bulk::compress(&std::fs::read(path).unwrap(), 19).unwrap();
        std::fs::write(fixtures().join(format!("{name}.tiles.zst")), image).unwrap();
    }
}

#[test]
fn stores_of_version_1_open_and_go_on() {
    let ring = ring();
    for name in ["plain", "zstd", "damaged"] {
        let directory = unpack(&format!("{name}.tiles.zst"));
        let reader = CheckpointStore::open_read_only(directory.path()).unwrap();
        assert_holds(&reader, &[2, 3], &ring);
        let damaged = reader.copies().iter().filter(|copy| copy.is_err()).count();
        assert_eq!(damaged, usize::from(name == "damaged"));
        assert_eq!(reader.manifest(3).unwrap().is_compressed(), name != "plain");
        assert_eq!(
            reader.superblock().features_required,
            u64::from(name != "plain")
        );
        drop(reader);
        let mut store = CheckpointStore::open_or_create(directory.path(), &spec()).unwrap();
        commit(&mut store, 4);
        drop(store);
        let reader = CheckpointStore::open_read_only(directory.path()).unwrap();
        assert_holds(&reader, &[3, 4], &ring);
        assert!(
            reader.copies().iter().all(Result::is_ok),
            "repaired by the commit"
        );
    }
}

#[test]
fn what_a_later_version_made_is_refused_by_name() {
    for (field, value, expected) in [
        (superblock::VERSION, 2u64, "version 2"),
        (
            superblock::FEATURES_REQUIRED,
            1 << 40 | 1,
            "required features 0x10000000000",
        ),
    ] {
        let directory = unpack("plain.tiles.zst");
        let path = directory.path().join("checkpoint.tiles");
        let mut bytes = std::fs::read(&path).unwrap();
        for copy in 0..4 {
            let start = format::superblock_offset(copy) as usize;
            let page = &mut bytes[start..start + superblock::BYTES];
            let value = &value.to_le_bytes()[..field.bytes];
            page[field.start..field.start + field.bytes].copy_from_slice(value);
            let sum = checksum(&page[..superblock::CHECKSUM.start]).to_le_bytes();
            page[superblock::CHECKSUM.start..].copy_from_slice(&sum);
        }
        std::fs::write(&path, &bytes).unwrap();
        let refusals = [
            CheckpointStore::open_read_only(directory.path())
                .err()
                .unwrap(),
            CheckpointStore::open_or_create(directory.path(), &spec())
                .err()
                .unwrap(),
        ];
        for refusal in refusals {
            assert_eq!(refusal.exit_code(), 2, "{refusal}");
            assert!(refusal.to_string().contains(expected), "{refusal}");
        }
        assert!(
            std::fs::read(&path).unwrap() == bytes,
            "nothing was written"
        );
    }
}
