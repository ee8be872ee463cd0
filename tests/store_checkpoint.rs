//! Goal: a checkpoint store is exactly what was last committed, whatever happened since.
//! Method: real files on both engines for what a person sees; the simulated disk for power cuts at
//! every operation of a workload, and damage to chosen structures. Failing operations are in
//! `store_every_io`, random workloads in `store_model`, random damage in `store_damage`.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

#[path = "support/commits.rs"]
mod commits;
#[path = "support/machine.rs"]
mod machine;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex};

use commits::{commit, kept, payload, ring, section, spec, verify};
use terrace::config::IoEngine;
use terrace::host::Ring;
use terrace::store::format::{self, superblock};
use terrace::store::sim::{Faults, SimDisk, mix};
use terrace::store::{CheckpointStore, Phase, Spec, checksum};
use terrace::tile::{EXTENT_BYTES_MAX, EXTENT_ELEMENTS, Section};
use terrace::{Error, Result};

fn open(disk: &SimDisk, spec: Option<&Spec>) -> Result<CheckpointStore> {
    CheckpointStore::open_disk(Box::new(disk.clone()), disk.bytes(), spec)
}

/// A disk with an empty store, and the number of its operations and flushes so far.
fn formatted(faults: Faults) -> SimDisk {
    let bytes = spec().file_bytes().unwrap();
    let disk = SimDisk::new(bytes, Faults::default());
    CheckpointStore::format_disk(Box::new(disk.clone()), &spec(), 1).unwrap();
    let disk = disk.after_exit(Faults::default());
    disk.set_faults(faults);
    disk
}

/// Commits 1..=`last`; the last one acknowledged.
fn work(disk: &SimDisk, last: u64) -> u64 {
    let Ok(mut store) = open(disk, Some(&spec())) else {
        return 0;
    };
    for generation in 1..=last {
        if commit(&mut store, generation).is_err() {
            let later = store.begin_commit(100).err().expect("poisoned");
            assert!(matches!(later, Error::StoreFailed { .. }), "{later}");
            return generation - 1;
        }
    }
    last
}

/// After a crash: all that was acknowledged, or that and the commit under way, whole.
fn assert_opens(disk: &SimDisk, acknowledged: u64, ring: &Ring) -> CheckpointStore {
    let store = open(disk, Some(&spec())).unwrap_or_else(|e| panic!("{acknowledged}: {e}"));
    let found = store.generations();
    assert!(
        found == kept(acknowledged) || found == kept(acknowledged + 1),
        "{acknowledged} acknowledged, found {found:?}"
    );
    assert_eq!(store.sentences(), [""; 0], "nothing is lost");
    verify(&store, ring).unwrap_or_else(|e| panic!("{acknowledged}: {e}"));
    store
}

/// As [`assert_opens`], and the store can go on. Returns the newest generation found.
fn assert_whole(disk: &SimDisk, acknowledged: u64, ring: &Ring) -> u64 {
    let mut store = assert_opens(disk, acknowledged, ring);
    let newest = store.latest().unwrap_or(0);
    commit(&mut store, newest + 1).unwrap_or_else(|e| panic!("{acknowledged}: {e}"));
    drop(store);
    // Nothing unflushed survives this cut: the new commit must not need it.
    let store = open(&disk.after_crash(1, Faults::default()), Some(&spec())).unwrap();
    assert_eq!(store.latest(), Some(newest + 1));
    verify(&store, ring).unwrap();
    newest
}

fn engines() -> [IoEngine; 2] {
    [IoEngine::Uring, IoEngine::Pread]
}

fn on_file(directory: &Path, engine: IoEngine, spec: &Spec) -> Option<CheckpointStore> {
    let spec = Spec {
        engine: Some(engine),
        ..spec.clone()
    };
    match CheckpointStore::open_or_create(directory, &spec) {
        Ok(store) => {
            println!("{:?}", store.sentences());
            Some(store)
        }
        Err(Error::Input {
            what: "memory.io_engine",
            got,
            ..
        }) => {
            machine::skip(&format!("{engine:?}"), &got);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn commits_come_back_after_the_file_is_opened_again() {
    let ring = ring(EXTENT_BYTES_MAX);
    let mut spec = spec();
    spec.sections
        .push(section(2, Section::Moment2, 2 * EXTENT_ELEMENTS + 3, 4));
    spec.memory.push(ring.span());
    for engine in engines() {
        let directory = tempfile::tempdir().unwrap();
        let Some(mut store) = on_file(directory.path(), engine, &spec) else {
            continue;
        };
        assert_eq!(store.latest(), None);
        for generation in 1..=4 {
            commit(&mut store, generation).unwrap();
        }
        let busy = CheckpointStore::open_existing(directory.path())
            .err()
            .expect("held");
        assert_eq!(busy.exit_code(), 5);
        verify(&store, &ring).unwrap();
        drop(store);
        let file = directory.path().join("checkpoint.tiles");
        assert_eq!(file.metadata().unwrap().len(), spec.file_bytes().unwrap());
        let store = CheckpointStore::open_existing(directory.path()).unwrap();
        assert_eq!(store.generations(), [3, 4]);
        verify(&store, &ring).unwrap();
        let key = spec.sections[1].keys().next().unwrap();
        let slab = store.read(4, key, ring.take()).unwrap();
        let sum = checksum(&slab.as_slice()[..20480]);
        assert_eq!(store.extent_checksum(4, key).unwrap(), sum);
        drop((store, slab));
        let mut store = on_file(directory.path(), engine, &spec).unwrap();
        let mut commit = store.begin_commit(9).unwrap();
        let mut slab = ring.take();
        slab.as_mut_slice::<u8>()[..20000].copy_from_slice(&payload(9, key, 20000));
        commit.submit(key, slab).unwrap();
        drop(commit);
        assert_eq!(ring.free_count(), 4, "an abandoned commit's slab came back");
        assert_eq!(store.generations(), [3, 4]);
        verify(&store, &ring).unwrap();
    }
}

#[test]
fn a_store_of_another_run_is_refused_by_what_differs() {
    let directory = tempfile::tempdir().unwrap();
    drop(on_file(directory.path(), IoEngine::Pread, &spec()).unwrap());
    let refusal = |change: fn(&mut Spec)| {
        let mut other = spec();
        change(&mut other);
        let error = CheckpointStore::open_or_create(directory.path(), &other).err();
        let error = error.expect("refused");
        assert_eq!(error.exit_code(), 2, "{error}");
        error.to_string()
    };
    let model = refusal(|spec| spec.model_hash = 78);
    assert!(model.contains("checkpoint of this model"), "{model}");
    let layout = refusal(|spec| spec.sections[0].elements += 1);
    assert!(layout.contains("layout"), "{layout}");
    let none = tempfile::tempdir().unwrap();
    for keep in [0, 32, u64::MAX] {
        let error = CheckpointStore::open_or_create(none.path(), &Spec { keep, ..spec() });
        assert_eq!(error.err().expect("refused").exit_code(), 2);
    }
}

#[test]
fn a_newer_version_is_refused_by_name_and_a_short_file_as_damage() {
    let directory = tempfile::tempdir().unwrap();
    drop(on_file(directory.path(), IoEngine::Pread, &spec()).unwrap());
    let path = directory.path().join("checkpoint.tiles");
    let whole = std::fs::read(&path).unwrap();
    let mut newer = whole.clone();
    newer[superblock::VERSION.start] = 2;
    let sum = checksum(&newer[..superblock::CHECKSUM.start]);
    newer[superblock::CHECKSUM.start..superblock::BYTES].copy_from_slice(&sum.to_le_bytes());
    std::fs::write(&path, &newer).unwrap();
    let error = CheckpointStore::open_existing(directory.path())
        .err()
        .unwrap();
    assert!(
        error.to_string().contains("version 2 is not supported"),
        "{error}"
    );
    assert_eq!(std::fs::read(&path).unwrap(), newer, "nothing was written");
    for length in [
        0,
        4096,
        1 << 20,
        (4 << 20) + 1,
        whole.len() - 4096,
        whole.len() - 1,
    ] {
        std::fs::write(&path, &whole[..length]).unwrap();
        let error = CheckpointStore::open_existing(directory.path())
            .err()
            .unwrap();
        assert_eq!(error.exit_code(), 3, "{length}: {error}");
    }
    std::fs::write(&path, vec![0; whole.len()]).unwrap();
    let error = CheckpointStore::open_existing(directory.path())
        .err()
        .unwrap();
    assert!(error.to_string().contains("superblock magic"), "{error}");
}

#[test]
fn an_extent_twice_or_not_at_all_is_a_programmer_error() {
    let disk = formatted(Faults::default());
    let mut store = open(&disk, Some(&spec())).unwrap();
    let key = spec().sections[0].keys().next().unwrap();
    let twice = catch_unwind(AssertUnwindSafe(|| {
        let mut commit = store.begin_commit(1).unwrap();
        commit.write(key, &[1; 130]).unwrap();
        commit.write(key, &[1; 130]).ok();
    }));
    assert!(twice.is_err());
    let absent = catch_unwind(AssertUnwindSafe(|| {
        let mut commit = store.begin_commit(1).unwrap();
        commit.write(key, &[1; 130]).unwrap();
        commit.finish(b"{}").ok();
    }));
    assert!(absent.is_err());
    assert_eq!(store.latest(), None);
    commit(&mut store, 1).unwrap();
    let old = store.begin_commit(1).err().expect("not newer");
    assert_eq!(old.exit_code(), 2);
    let mut begun = store.begin_commit(2).unwrap();
    for section in spec().sections {
        let key = section.keys().next().unwrap();
        let bytes = payload(2, key, begun.payload_bytes(key));
        begun.write(key, &bytes).unwrap();
    }
    let long = begun
        .finish(&vec![b' '; (1 << 20) + 1])
        .expect_err("too long");
    assert_eq!(long.exit_code(), 2);
    assert_eq!(store.latest(), Some(1));
}

#[test]
fn phases_are_reported_in_their_order() {
    let disk = formatted(Faults::default());
    let mut store = open(&disk, Some(&spec())).unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = seen.clone();
    store.set_phase_hook(Box::new(move |phase| sink.lock().unwrap().push(phase)));
    commit(&mut store, 1).unwrap();
    assert_eq!(*seen.lock().unwrap(), Phase::ALL);
    assert_eq!(
        disk.flush_count(),
        2 + 4,
        "the copies that were read, by halves; then each group of writes once"
    );
}

/// Power fails at each operation of five commits; of what was not flushed any part is kept.
#[test]
fn a_power_cut_at_any_operation_leaves_whole_commits() {
    let ring = ring(1 << 16);
    let plain = formatted(Faults::default());
    assert_eq!(work(&plain, 5), 5);
    let count = plain.operation_count();
    assert!(count > 60, "{count}");
    let (mut before, mut after) = (0, 0);
    for crash_at in 1..=count {
        let faults = Faults {
            crash_at: Some(crash_at),
            ..Faults::default()
        };
        let disk = formatted(faults);
        let acknowledged = work(&disk, 5);
        for seed in 0..10 {
            let seed = if seed < 2 {
                seed
            } else {
                mix(crash_at ^ mix(seed))
            };
            let image = disk.after_crash(seed, Faults::default());
            let newest = assert_whole(&image, acknowledged, &ring);
            before += u64::from(newest == acknowledged);
            after += u64::from(newest > acknowledged);
            // A second cut, somewhere in the commit that follows the first.
            let again = disk.after_crash(
                seed,
                Faults {
                    crash_at: Some(8 + mix(seed) % 20),
                    ..Faults::default()
                },
            );
            let mut last = newest;
            if let Ok(mut store) = open(&again, Some(&spec()))
                && commit(&mut store, newest + 1).is_ok()
            {
                last = newest + 1;
            }
            assert_whole(
                &again.after_crash(mix(seed), Faults::default()),
                last,
                &ring,
            );
        }
    }
    println!("{count} cuts: previous {before}, next {after}");
    assert!(
        before > 100 && after > 20,
        "both outcomes are met: {before} {after}"
    );
}

fn committed(last: u64) -> SimDisk {
    let disk = formatted(Faults::default());
    assert_eq!(work(&disk, last), last);
    disk
}

#[test]
fn damage_to_any_two_superblock_copies_is_survived_and_repaired() {
    let ring = ring(1 << 16);
    for first in 0..4 {
        for second in 0..4 {
            let disk = committed(3);
            for copy in [first, second] {
                disk.erase(format::superblock_offset(copy), 4096);
            }
            assert_whole(&disk, 3, &ring);
            // The commit within has rewritten all copies.
            for copy in 0..4 {
                let one = disk.after_exit(Faults::default());
                for other in (0..4).filter(|other| *other != copy) {
                    one.flip(format::superblock_offset(other) + 60, 3);
                }
                let store = open(&one, None).unwrap();
                assert_eq!(store.generations(), kept(4));
            }
        }
    }
    let disk = committed(1);
    for copy in 0..4 {
        disk.flip(format::superblock_offset(copy) + 100, 0);
    }
    let error = open(&disk, Some(&spec())).err().expect("no copy is left");
    assert_eq!(error.exit_code(), 3);
    assert!(error.to_string().contains("superblock checksum"), "{error}");
}

#[test]
fn a_damaged_manifest_has_a_twin_and_a_lost_one_is_said() {
    let ring = ring(1 << 16);
    let disk = committed(3);
    let store = open(&disk, None).unwrap();
    let sizes = store.superblock().geometry;
    // Commits 1, 2 and 3 went to regions 0, 1 and 2; commit 3 freed region 0.
    drop(store);
    for copy in 0..2 {
        let one = disk.after_exit(Faults::default());
        one.flip(sizes.manifest_offset(2, copy) + 130, 7);
        let store = open(&one, Some(&spec())).unwrap();
        assert_eq!(store.generations(), [2, 3]);
        verify(&store, &ring).unwrap();
    }
    let lost = disk.after_exit(Faults::default());
    for copy in 0..2 {
        lost.flip(sizes.manifest_offset(2, copy) + 130, 7);
    }
    let store = open(&lost, Some(&spec())).unwrap();
    assert_eq!(store.generations(), [2]);
    assert!(
        store.sentences()[0].starts_with("generation 3 is lost")
            && store.sentences()[0].ends_with("go on from the commits that are left"),
        "{:?}",
        store.sentences()
    );
    verify(&store, &ring).unwrap();
    drop(store);
    for copy in 0..2 {
        lost.erase(sizes.manifest_offset(1, copy), 4096);
    }
    let error = open(&lost, Some(&spec())).err().expect("nothing is left");
    assert_eq!(error.exit_code(), 3);
}

#[test]
fn a_damaged_extent_is_refused_by_name_and_the_others_are_read() {
    let ring = ring(1 << 16);
    let disk = committed(2);
    let store = open(&disk, None).unwrap();
    let table = store.table().unwrap().clone();
    let extents = store.superblock().geometry.extents_offset(1);
    let bad = spec().sections[1].keys().next().unwrap();
    let offset = extents + table.offset(table.index(bad).unwrap());
    // In the padding too: 5000 elements of 4 bytes end in the middle of the fifth page.
    for byte in [0, 19999, 20479] {
        disk.flip(offset + byte, 5);
        let error = store.read(2, bad, ring.take()).expect_err("damaged");
        let Error::ExtentChecksum {
            tile,
            extent,
            offset: at,
            ..
        } = &error
        else {
            panic!("{error}")
        };
        assert_eq!(
            (tile.as_str(), *extent, *at),
            ("tile 0.0 moment1", 0, offset)
        );
        let other = spec().sections[0].keys().next().unwrap();
        store.read(2, other, ring.take()).unwrap();
        store.read(1, bad, ring.take()).unwrap();
        disk.flip(offset + byte, 5);
    }
    verify(&store, &ring).unwrap();
}
