//! Goal: a store whose `checkpoint.keep` changes loses no commit, whenever it is interrupted, and
//! takes or gives back the space.
//! Method: real files for lengths and a full disk; the simulated disk for power cuts at every
//! operation of a change and the commits after it.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::path::Path;

use terrace::Error;
use terrace::host::{HostArena, Ring};
use terrace::store::format::{Geometry, Region, SUPERBLOCK_COPIES};
use terrace::store::sim::{Faults, SimDisk, mix};
use terrace::store::{CheckpointStore, Reader, Spec, StoredSection};
use terrace::tile::{Section, TileId};

fn spec(keep: u64) -> Spec {
    let section = |section, elements| StoredSection {
        tile: TileId { layer: 0, part: 0 },
        section,
        elements,
        element_bytes: 4,
    };
    Spec {
        model_hash: 5,
        keep,
        sections: vec![
            section(Section::Weight, 1000),
            section(Section::Moment1, 3000),
        ],
        engine: None,
        memory: Vec::new(),
    }
}

fn bytes(keep: u64) -> u64 {
    spec(keep).file_bytes().unwrap()
}

fn ring() -> Ring {
    HostArena::take(4 << 16).unwrap().cut_ring(4, 1 << 16)
}

fn commit(store: &mut CheckpointStore, generation: u64) -> terrace::Result<()> {
    let table = store.table().unwrap().clone();
    let mut commit = store.begin_commit(generation)?;
    for index in 0..table.count() {
        let bytes = vec![generation as u8; table.payload_bytes(index)];
        commit.write(table.key(index), &bytes)?;
    }
    commit.finish(b"{}")
}

fn assert_reads(store: &Reader, ring: &Ring) {
    let table = store.table().unwrap();
    for generation in store.generations() {
        for index in 0..table.count() {
            let slab = store
                .read(generation, table.key(index), ring.take())
                .unwrap();
            let got = &slab.as_slice::<u8>()[..table.payload_bytes(index)];
            assert!(got.iter().all(|byte| *byte == generation as u8));
        }
    }
}

fn open(directory: &Path, keep: u64) -> terrace::Result<CheckpointStore> {
    CheckpointStore::open_or_create(directory, &spec(keep))
}

fn length(directory: &Path) -> u64 {
    directory.join("checkpoint.tiles").metadata().unwrap().len()
}

#[test]
fn keep_is_raised_and_lowered_in_place() {
    let (directory, ring) = (tempfile::tempdir().unwrap(), ring());
    let at = directory.path();
    let mut store = open(at, 2).unwrap();
    (1..=3).for_each(|generation| commit(&mut store, generation).unwrap());
    drop(store);
    assert_eq!(length(at), bytes(2));
    let mut store = open(at, 4).unwrap();
    assert_eq!((store.generations(), length(at)), (vec![2, 3], bytes(4)));
    assert!(
        store
            .sentences()
            .last()
            .unwrap()
            .contains("room for 4 commits that are kept, was 2")
    );
    (4..=6).for_each(|generation| commit(&mut store, generation).unwrap());
    assert_eq!(store.generations(), [3, 4, 5, 6]);
    assert_reads(&store, &ring);
    drop(store);
    // All are there until the next commit: one of them may be what the run goes on from.
    let mut store = open(at, 1).unwrap();
    assert_eq!(store.generations(), [3, 4, 5, 6]);
    assert_reads(&store, &ring);
    let mut generation = 7;
    while length(at) > bytes(1) {
        assert!(generation < 12, "the file is cut within a few commits");
        commit(&mut store, generation).unwrap();
        assert_eq!(store.generations(), [generation]);
        assert_reads(&store, &ring);
        generation += 1;
    }
    drop(store);
    let store = CheckpointStore::open_read_only(at).unwrap();
    assert_eq!(store.generations(), [generation - 1]);
    assert_reads(&store, &ring);
}

#[test]
fn a_pinned_commit_stays_among_those_kept_until_another_is_pinned() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = open(directory.path(), 3).unwrap();
    let mut after = |pinned: Option<u64>, generation: u64| {
        store.set_pinned(pinned);
        commit(&mut store, generation).unwrap();
        assert_reads(&store, &ring());
        store.generations()
    };
    assert_eq!(after(None, 1), [1]);
    assert_eq!(after(Some(1), 2), [1, 2]);
    assert_eq!(after(Some(1), 3), [1, 2, 3]);
    assert_eq!(after(Some(1), 4), [1, 3, 4]);
    assert_eq!(after(Some(1), 9), [1, 4, 9]);
    assert_eq!(after(Some(4), 10), [4, 9, 10]);
    assert_eq!(after(Some(4), 11), [4, 10, 11]);
    // One that is not there takes no place.
    assert_eq!(after(Some(7), 12), [10, 11, 12]);
    drop(store);
    let reader = CheckpointStore::open_read_only(directory.path()).unwrap();
    assert_eq!(reader.generations(), [10, 11, 12]);
    // The newest stays, whatever is pinned.
    drop(reader);
    let mut store = open(directory.path(), 1).unwrap();
    store.set_pinned(Some(12));
    commit(&mut store, 13).unwrap();
    assert_eq!(store.generations(), [13]);
}

#[test]
fn a_power_cut_at_any_operation_leaves_the_pinned_commit() {
    let (ring, size) = (ring(), bytes(2));
    let made = SimDisk::new(size, Faults::default());
    let mut store = CheckpointStore::format_disk(Box::new(made.clone()), &spec(2), 1).unwrap();
    commit(&mut store, 1).unwrap();
    drop(store);
    for crash_at in 1.. {
        let disk = made.after_exit(Faults::default());
        disk.set_faults(Faults {
            crash_at: Some(crash_at),
            ..Faults::default()
        });
        let opened = CheckpointStore::open_disk(Box::new(disk.clone()), size, Some(&spec(2)));
        let mut acknowledged = 1;
        if let Ok(mut store) = opened {
            store.set_pinned(Some(1));
            while acknowledged < 4 && commit(&mut store, acknowledged + 1).is_ok() {
                acknowledged += 1;
            }
        }
        for seed in [0, 1, mix(crash_at)] {
            let image = disk.after_crash(seed, Faults::default());
            let store = CheckpointStore::open_disk(Box::new(image), size, None).unwrap();
            let (all, newest) = (store.generations(), store.latest().unwrap());
            assert!(all.contains(&1), "{crash_at}: {all:?}");
            assert!(
                [acknowledged, acknowledged + 1].contains(&newest),
                "{all:?}"
            );
            assert_reads(&store, &ring);
        }
        if disk.operation_count() < crash_at {
            break;
        }
    }
}

#[test]
fn a_file_longer_than_its_superblock_says_is_cut_back() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = open(directory.path(), 2).unwrap();
    commit(&mut store, 1).unwrap();
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(store.path())
        .unwrap();
    drop(store);
    file.set_len(bytes(5) - 77).unwrap();
    let reader = CheckpointStore::open_read_only(directory.path()).unwrap();
    assert_eq!(reader.generations(), [1]);
    drop(reader);
    assert_eq!(open(directory.path(), 2).unwrap().generations(), [1]);
    assert_eq!(length(directory.path()), bytes(2));
}

#[test]
fn a_full_disk_refuses_a_larger_keep_and_keeps_what_there_is() {
    let (directory, ring) = (tempfile::tempdir().unwrap(), ring());
    let mount = std::process::Command::new("mount")
        .args([
            "-t",
            "tmpfs",
            "-o",
            &format!("size={}", bytes(2) + (1 << 20)),
            "tmpfs",
        ])
        .arg(directory.path())
        .output();
    if !mount.as_ref().is_ok_and(|output| output.status.success()) {
        println!("SKIP: mount refused (not root?): {mount:?}");
        return;
    }
    let outcome = std::panic::catch_unwind(|| {
        let mut store = open(directory.path(), 2).unwrap();
        commit(&mut store, 1).unwrap();
        drop(store);
        let refused = open(directory.path(), 3).err().expect("too large");
        let text = refused.to_string();
        assert!(
            matches!(
                refused,
                Error::Budget {
                    tier: "checkpoint",
                    ..
                }
            ),
            "{text}"
        );
        assert!(text.contains("set checkpoint.keep = 2 as it was"), "{text}");
        assert_eq!(length(directory.path()), bytes(2));
        let store = open(directory.path(), 2).unwrap();
        assert_eq!(store.generations(), [1]);
        assert_reads(&store, &ring);
    });
    // Lazily: the kernel lets go of a ring's file a moment after the ring is closed.
    let umount = std::process::Command::new("umount")
        .arg("-l")
        .arg(directory.path())
        .status();
    assert!(umount.unwrap().success());
    outcome.unwrap();
}

/// From `before` to `after` commits kept, then three commits; power fails at each operation.
fn cuts(before: u64, after: u64) {
    let ring = ring();
    let size = bytes(before.max(after));
    let made = SimDisk::new(size, Faults::default());
    let mut store = CheckpointStore::format_disk(Box::new(made.clone()), &spec(before), 1).unwrap();
    (1..=before + 1).for_each(|generation| commit(&mut store, generation).unwrap());
    drop(store);
    let mut ends = std::collections::BTreeSet::new();
    for crash_at in 1.. {
        let disk = made.after_exit(Faults::default());
        disk.set_faults(Faults {
            crash_at: Some(crash_at),
            ..Faults::default()
        });
        let mut acknowledged = before + 1;
        let opened = CheckpointStore::open_disk(Box::new(disk.clone()), size, Some(&spec(after)));
        if let Ok(mut store) = opened {
            while acknowledged < before + 4 && commit(&mut store, acknowledged + 1).is_ok() {
                acknowledged += 1;
            }
        }
        for seed in 0..3 {
            let image = disk.after_crash(
                if seed < 2 { seed } else { mix(seed ^ crash_at) },
                Faults::default(),
            );
            let store = CheckpointStore::open_disk(Box::new(image.clone()), size, None).unwrap();
            assert!(store.lost().is_empty(), "{:?}", store.lost());
            let newest = store.latest().unwrap();
            assert!(
                newest == acknowledged || newest == acknowledged + 1,
                "{newest}"
            );
            let least = before.min(after) as usize;
            assert!(
                store.generations().len() >= least,
                "{:?}",
                store.generations()
            );
            assert_reads(&store, &ring);
            ends.insert((
                store.superblock().keep,
                store.superblock().geometry.region_count,
            ));
            drop(store);
            // And the run goes on from there.
            let again = CheckpointStore::open_disk(Box::new(image), size, Some(&spec(after)));
            let mut store = again.unwrap();
            commit(&mut store, newest + 1).unwrap();
            assert_reads(&store, &ring);
        }
        if disk.operation_count() < crash_at {
            break;
        }
    }
    println!("{before} to {after}: (keep, regions) met: {ends:?}");
    assert!(ends.len() >= 2);
}

#[test]
fn a_power_cut_while_keep_is_raised_loses_nothing() {
    cuts(1, 3);
}

#[test]
fn a_power_cut_while_keep_is_lowered_loses_nothing() {
    cuts(3, 1);
}

/// Lowered right after as many commits as were kept, the file was cut to regions that all held one,
/// and the next commit panicked.
#[test]
fn a_region_stays_free_when_keep_is_lowered() {
    let (directory, ring) = (tempfile::tempdir().unwrap(), ring());
    let at = directory.path();
    let mut store = open(at, 5).unwrap();
    (1..=4).for_each(|generation| commit(&mut store, generation).unwrap());
    drop(store);
    let mut store = open(at, 1).unwrap();
    assert_eq!(store.generations(), [1, 2, 3, 4]);
    // FORMAT.md promises it: the next commit goes there while all four are still held.
    assert!(store.superblock().regions.contains(&Region::Free));
    (5..=7).for_each(|generation| {
        commit(&mut store, generation).unwrap();
        assert_eq!(store.generations(), [generation]);
    });
    assert_reads(&store, &ring);
}

/// A file that was cut so goes on too: its oldest commit makes room.
#[test]
fn a_store_without_a_free_region_goes_on() {
    let (directory, ring) = (tempfile::tempdir().unwrap(), ring());
    let at = directory.path();
    let mut store = open(at, 2).unwrap();
    (1..=2).for_each(|generation| commit(&mut store, generation).unwrap());
    let mut cut = store.superblock().clone();
    drop(store);
    let now = cut.geometry;
    cut.geometry = Geometry::new(now.extent_count, now.extents_bytes, 2).unwrap();
    cut.regions.truncate(2);
    cut.keep = 1;
    let path = at.join("checkpoint.tiles");
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    for copy in 0..SUPERBLOCK_COPIES {
        let page = cut.encode(copy);
        std::os::unix::fs::FileExt::write_all_at(&file, &page, (copy as u64) << 20).unwrap();
    }
    file.set_len(cut.geometry.file_bytes).unwrap();
    let mut store = open(at, 1).unwrap();
    assert_eq!(store.generations(), [1, 2]);
    (3..=5).for_each(|generation| {
        commit(&mut store, generation).unwrap();
        assert_eq!(store.generations(), [generation]);
    });
    assert_reads(&store, &ring);
}
