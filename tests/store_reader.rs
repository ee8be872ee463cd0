//! Goal: a store can be read by many at once and beside the training that writes it, and what the
//! training overwrites is never called damage, nor damage overwritten.
//! Method: a writer and readers on one real file, in one process: locks belong to open files.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use terrace::Error;
use terrace::host::{HostArena, Ring};
use terrace::store::{CheckpointStore, ExtentKey, Reader, Spec, StoredSection};
use terrace::tile::{Section, TileId};

fn spec() -> Spec {
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
            section(Section::Moment1, 3000, 4),
        ],
        engine: None,
        memory: Vec::new(),
    }
}

fn ring() -> Ring {
    HostArena::take(4 << 16).unwrap().cut_ring(4, 1 << 16)
}

fn keys() -> Vec<ExtentKey> {
    spec().sections.iter().flat_map(|s| s.keys()).collect()
}

fn byte(generation: u64) -> u8 {
    generation as u8 | 0x80
}

fn commit(store: &mut CheckpointStore, generation: u64) {
    let mut commit = store.begin_commit(generation).unwrap();
    for key in keys() {
        let bytes = vec![byte(generation); commit.payload_bytes(key)];
        commit.write(key, &bytes).unwrap();
    }
    commit.finish(b"{}").unwrap();
}

fn committed(directory: &Path, last: u64) -> CheckpointStore {
    let mut store = CheckpointStore::open_or_create(directory, &spec()).unwrap();
    (1..=last).for_each(|generation| commit(&mut store, generation));
    store
}

/// Reads every extent of a generation; its bytes are that generation's or nobody sees them.
fn read(reader: &Reader, generation: u64, ring: &Ring) -> terrace::Result<()> {
    for key in keys() {
        let slab = reader.read(generation, key, ring.take())?;
        assert_eq!(slab.as_slice::<u8>()[..2000], vec![byte(generation); 2000]);
    }
    Ok(())
}

fn listing(directory: &Path) -> Vec<(String, std::time::SystemTime)> {
    let entry = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        (name, entry.metadata().unwrap().modified().unwrap())
    };
    let mut all: Vec<_> = std::fs::read_dir(directory).unwrap().map(entry).collect();
    all.sort();
    all
}

#[test]
fn readers_share_a_store_at_rest_and_keep_a_training_out() {
    let (directory, ring) = (tempfile::tempdir().unwrap(), ring());
    let absent = CheckpointStore::open_read_only(directory.path()).err();
    assert_eq!(absent.unwrap().exit_code(), 4);
    drop(committed(directory.path(), 3));
    let before = listing(directory.path());
    let first = CheckpointStore::open_read_only(directory.path()).unwrap();
    let second = CheckpointStore::open_read_only(directory.path()).unwrap();
    for reader in [&first, &second] {
        assert_eq!(
            (reader.generations(), reader.training()),
            (vec![2, 3], None)
        );
        assert!(reader.copies().iter().all(Result::is_ok));
        read(reader, 3, &ring).unwrap();
    }
    assert_eq!(listing(directory.path()), before, "nothing is written");
    let busy = CheckpointStore::open_or_create(directory.path(), &spec());
    let Some(Error::Busy { pid, .. }) = busy.err() else {
        panic!("a training began under readers")
    };
    assert_eq!(pid, std::process::id());
    drop((first, second));
    std::fs::remove_file(directory.path().join("checkpoint.lock")).unwrap();
    let reader = CheckpointStore::open_read_only(directory.path()).unwrap();
    assert!(reader.sentences()[1].starts_with("read without its lock"));
    read(&reader, 2, &ring).unwrap();
}

#[test]
fn what_a_training_overwrites_is_told_from_damage() {
    let (directory, ring) = (tempfile::tempdir().unwrap(), ring());
    let mut store = committed(directory.path(), 3);
    let reader = CheckpointStore::open_read_only(directory.path()).unwrap();
    assert_eq!(reader.training(), Some(std::process::id()));
    let seen = &reader.sentences()[1];
    assert!(seen.contains("sequence 4, generations [2, 3]"), "{seen}");
    read(&reader, 2, &ring).unwrap();
    // Commit 4 goes where 1 was and frees 2, whose bytes stay until commit 5 takes their place.
    commit(&mut store, 4);
    read(&reader, 2, &ring).unwrap();
    commit(&mut store, 5);
    let again = reader.recheck().unwrap();
    assert_eq!((again.sequence, again.newer), (6, vec![4, 5]));
    assert_eq!(again.overwritten, [2, 3]);
    let gone = read(&reader, 2, &ring).unwrap_err();
    assert!(
        matches!(gone, Error::Overwritten { generation: 2, .. }),
        "{gone}"
    );
    assert_eq!(gone.exit_code(), 5);
    let region = |generation| reader.manifest(generation).unwrap().region as usize;
    let gone = reader.manifest_copy(region(2), 1).unwrap_err();
    assert!(
        matches!(gone, Error::Overwritten { generation: 2, .. }),
        "{gone}"
    );
    read(&reader, 3, &ring).unwrap();
    // A bit of the newest commit turns over: damage, whatever the training does elsewhere.
    let reader = CheckpointStore::open_read_only(directory.path()).unwrap();
    let sizes = reader.superblock().geometry;
    let region = |generation| reader.manifest(generation).unwrap().region as usize;
    let file = store.path().to_path_buf();
    let file = std::fs::OpenOptions::new().write(true).open(file).unwrap();
    file.write_all_at(&[7], sizes.extents_offset(region(5)))
        .unwrap();
    file.write_all_at(&[7], sizes.manifest_offset(region(5), 0) + 200)
        .unwrap();
    let damage = read(&reader, 5, &ring).unwrap_err();
    assert!(matches!(damage, Error::ExtentChecksum { .. }), "{damage}");
    let damage = reader.manifest_copy(region(5), 0).unwrap_err();
    assert!(matches!(damage, Error::Damaged { .. }), "{damage}");
    reader.manifest_copy(region(5), 1).unwrap();
}

#[test]
fn lost_commits_do_not_keep_a_reader_out() {
    let directory = tempfile::tempdir().unwrap();
    let store = committed(directory.path(), 2);
    let (path, sizes) = (store.path().to_path_buf(), store.superblock().geometry);
    drop(store);
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    for copy in 0..4 {
        file.write_all_at(&[9], sizes.manifest_offset(copy / 2, copy as u64 % 2) + 70)
            .unwrap();
    }
    file.write_all_at(&[9], 1 << 20).unwrap();
    let refused = CheckpointStore::open_existing(directory.path())
        .err()
        .unwrap();
    assert_eq!(refused.exit_code(), 3);
    let reader = CheckpointStore::open_read_only(directory.path()).unwrap();
    assert_eq!(reader.generations(), [0u64; 0]);
    let lost: Vec<_> = reader
        .lost()
        .iter()
        .map(|l| (l.region, l.generation))
        .collect();
    assert_eq!(lost, [(0, 1), (1, 2)]);
    let whole: Vec<bool> = reader.copies().iter().map(Result::is_ok).collect();
    assert_eq!(whole, [true, false, true, true]);
}

/// Both manifests of the newest commit are gone: the next commit takes its place among those that
/// are kept, not the place of the last one that can be read.
#[test]
fn a_lost_commit_is_freed_before_one_that_can_be_read() {
    let (directory, ring) = (tempfile::tempdir().unwrap(), ring());
    let store = committed(directory.path(), 3);
    let sizes = store.superblock().geometry;
    let region = store.manifest(3).unwrap().region as usize;
    let path = store.path().to_path_buf();
    drop(store);
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    for copy in 0..2 {
        file.write_all_at(&[9], sizes.manifest_offset(region, copy) + 70)
            .unwrap();
    }
    let mut store = CheckpointStore::open_or_create(directory.path(), &spec()).unwrap();
    assert_eq!((store.generations(), store.next_generation()), (vec![2], 4));
    commit(&mut store, 4);
    assert_eq!(store.superblock().generations(), [2, 4]);
    read(&store, 2, &ring).unwrap();
    read(&store, 4, &ring).unwrap();
}

#[test]
fn readers_beside_a_training_that_commits_without_pause_see_no_damage() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = committed(directory.path(), 2);
    let done = AtomicBool::new(false);
    let (whole, overwritten) = std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let (mut whole, mut overwritten, ring) = (0, 0, ring());
            while !done.load(Ordering::Relaxed) {
                let reader = CheckpointStore::open_read_only(directory.path()).unwrap();
                assert!(reader.lost().is_empty(), "{:?}", reader.lost());
                assert!(reader.generations().len() >= 2);
                for generation in reader.generations() {
                    for _ in 0..20 {
                        match read(&reader, generation, &ring) {
                            Ok(()) => whole += 1,
                            Err(Error::Overwritten { .. }) => overwritten += 1,
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
            }
            (whole, overwritten)
        });
        (3..=150).for_each(|generation| commit(&mut store, generation));
        done.store(true, Ordering::Relaxed);
        reading.join().unwrap()
    });
    println!("{whole} whole, {overwritten} overwritten");
    assert!(whole > 0);
}
