//! Goal: the scratch store gives back exactly what was written, on every engine, or says why not.
//! Method: real files in a directory of the test's own on both engines; damage through another
//! descriptor of the same file; faults that no file gives on demand, on the simulated disk.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

#[path = "support/machine.rs"]
mod machine;

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crossbeam_channel::unbounded;
use terrace::config::IoEngine;
use terrace::host::{HostArena, Ring};
use terrace::store::disk::Direction;
use terrace::store::sim::{Faults, SimDisk, mix};
use terrace::store::{Completion, ExtentKey, Request, Scratch, StoredSection};
use terrace::tile::{EXTENT_BYTES_MAX, EXTENT_ELEMENTS, Section, TileId};
use terrace::{Error, Result};

const ENGINES: [IoEngine; 2] = [IoEngine::Uring, IoEngine::Pread];

fn section(layer: u16, elements: u64, element_bytes: u64) -> StoredSection {
    StoredSection {
        tile: TileId { layer, part: 0 },
        section: Section::Moment1,
        elements,
        element_bytes,
    }
}

fn ring(count: usize) -> Ring {
    ring_of(count, 1 << 16)
}

fn ring_of(count: usize, slab_bytes: u64) -> Ring {
    let mut cutter = HostArena::take(count as u64 * slab_bytes).unwrap();
    cutter.cut_ring(count, slab_bytes)
}

fn fill(bytes: &mut [u8], seed: u64) {
    for (index, part) in bytes.chunks_mut(8).enumerate() {
        let word = mix(seed ^ mix(index as u64)).to_le_bytes();
        part.copy_from_slice(&word[..part.len()]);
    }
}

fn seed(key: ExtentKey, round: u64) -> u64 {
    mix((u64::from(key.tile.layer) << 40) | (u64::from(key.extent) << 8) | round)
}

fn send(
    store: &Scratch,
    ring: &Ring,
    kind: Direction,
    key: ExtentKey,
    round: u64,
) -> Result<Completion> {
    let (reply, completions) = unbounded();
    let mut slab = ring.take();
    let bytes = store.payload_bytes(key);
    // Garbage first: neither what a slab held before nor its padding may come back.
    slab.as_mut_slice::<u8>().fill(0xee);
    if kind == Direction::Write {
        fill(&mut slab.as_mut_slice()[..bytes], seed(key, round));
    }
    store.submit(Request {
        kind,
        key,
        bytes,
        slab,
        reply,
    })?;
    Ok(completions.recv().expect("every request is answered"))
}

fn assert_holds(done: &Completion, bytes: usize, round: u64) {
    assert!(done.result.is_ok(), "{:?}", done.result);
    let mut expected = vec![0; bytes];
    fill(&mut expected, seed(done.key, round));
    let got = &done.slab.as_slice::<u8>()[..bytes];
    assert!(got == expected, "{} differs", done.key);
    let padding = &done.slab.as_slice::<u8>()[bytes..bytes.next_multiple_of(4096)];
    assert!(
        padding.iter().all(|byte| *byte == 0),
        "{}: padding",
        done.key
    );
}

fn create(
    path: &Path,
    engine: IoEngine,
    sections: &[StoredSection],
    ring: &Ring,
) -> Option<Scratch> {
    let paths = [(path.to_path_buf(), 1 << 30)];
    opened(
        Scratch::create(&paths, sections, Some(engine), &[ring.span()]),
        engine,
    )
}

fn opened(result: Result<Scratch>, engine: IoEngine) -> Option<Scratch> {
    match result {
        Ok(store) => {
            println!("{:?}", store.sentences());
            Some(store)
        }
        Err(Error::Input { got, .. }) if engine == IoEngine::Uring => {
            machine::skip("io_uring", &got);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn keys(sections: &[StoredSection]) -> Vec<ExtentKey> {
    sections.iter().flat_map(StoredSection::keys).collect()
}

#[test]
fn odd_lengths_come_back_on_both_engines() {
    let lengths = [
        1,
        2,
        511,
        512,
        513,
        4095,
        4096,
        4097,
        3 * 4096 - 1,
        3 * 4096 + 1,
    ];
    let mut sections: Vec<StoredSection> = lengths
        .iter()
        .enumerate()
        .map(|(layer, bytes)| section(layer as u16, *bytes, 1))
        .collect();
    sections.push(section(100, 2 * EXTENT_ELEMENTS + 1, 4));
    sections.push(section(101, EXTENT_ELEMENTS, 2));
    for engine in ENGINES {
        let directory = tempfile::tempdir().unwrap();
        let ring = ring_of(4, EXTENT_BYTES_MAX);
        let Some(store) = create(directory.path(), engine, &sections, &ring) else {
            continue;
        };
        let file = directory.path().join("scratch.tiles");
        assert!(!file.exists(), "unlinked while open");
        for round in 1..=2 {
            for key in keys(&sections) {
                let done = send(&store, &ring, Direction::Write, key, round).unwrap();
                assert!(done.result.is_ok(), "{:?}", done.result);
                assert_eq!(store.generation(key), round);
            }
            for key in keys(&sections) {
                let done = send(&store, &ring, Direction::Read, key, round).unwrap();
                assert_holds(&done, store.payload_bytes(key), round);
            }
        }
        let counters = store.counters();
        let count = 2 * keys(&sections).len() as u64;
        assert_eq!((counters.read.count, counters.write.count), (count, count));
        assert_eq!(counters.read.bytes, 2 * store.table().bytes());
        assert!(counters.write.busy_ns > 0);
        assert_eq!(counters.flush_count, 0, "scratch is never flushed");
    }
}

/// Writes then reads 50 extents three times with whatever slabs are free.
fn exchange(store: &Scratch, ring: &Ring, mine: &[ExtentKey]) {
    let check = |done: Completion, round| match done.kind {
        Direction::Read => assert_holds(&done, store.payload_bytes(done.key), round),
        Direction::Write => assert!(done.result.is_ok(), "{:?}", done.result),
    };
    for round in 1..=3 {
        let (reply, completions) = unbounded();
        for kind in [Direction::Write, Direction::Read] {
            for key in mine.iter().copied() {
                // A slab comes free only when its completion is looked at.
                let mut slab = loop {
                    match ring.try_take() {
                        Some(slab) => break slab,
                        None => {
                            let wait = std::time::Duration::from_millis(1);
                            completions
                                .recv_timeout(wait)
                                .into_iter()
                                .for_each(|d| check(d, round));
                        }
                    }
                };
                let bytes = store.payload_bytes(key);
                slab.as_mut_slice::<u8>().fill(0);
                if kind == Direction::Write {
                    fill(&mut slab.as_mut_slice()[..bytes], seed(key, round));
                }
                let reply = reply.clone();
                store
                    .submit(Request {
                        kind,
                        key,
                        bytes,
                        slab,
                        reply,
                    })
                    .unwrap();
            }
        }
        drop(reply);
        completions.into_iter().for_each(|done| check(done, round));
    }
}

#[test]
fn many_requests_from_two_threads_share_few_slabs_over_two_paths() {
    let sections: Vec<StoredSection> = (0..100).map(|layer| section(layer, 5000, 4)).collect();
    for engine in ENGINES {
        let directories = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let paths: Vec<(PathBuf, u64)> = directories
            .iter()
            .map(|d| (d.path().to_path_buf(), 2 << 20))
            .collect();
        let ring = ring(40);
        let made = Scratch::create(&paths, &sections, Some(engine), &[ring.span()]);
        let Some(store) = opened(made, engine) else {
            continue;
        };
        let all = keys(&sections);
        std::thread::scope(|scope| {
            for mine in all.chunks(50) {
                let (store, ring) = (&store, &ring);
                scope.spawn(move || exchange(store, ring, mine));
            }
        });
        assert_eq!(ring.free_count(), 40, "every slab came back");
        assert_eq!(store.counters().write.count, 300);
    }
}

#[test]
fn requests_for_one_extent_take_effect_in_order() {
    let sections = [section(0, 3000, 4)];
    let key = keys(&sections)[0];
    for engine in ENGINES {
        let directory = tempfile::tempdir().unwrap();
        let ring = ring(8);
        let Some(store) = create(directory.path(), engine, &sections, &ring) else {
            continue;
        };
        let (reply, completions) = unbounded();
        for round in 1..=50 {
            for kind in [Direction::Write, Direction::Read] {
                let mut slab = ring.take();
                let bytes = store.payload_bytes(key);
                if kind == Direction::Write {
                    fill(&mut slab.as_mut_slice()[..bytes], seed(key, round));
                }
                let reply = reply.clone();
                store
                    .submit(Request {
                        kind,
                        key,
                        bytes,
                        slab,
                        reply,
                    })
                    .unwrap();
            }
            let write = completions.recv().unwrap();
            assert_eq!(write.kind, Direction::Write);
            assert_holds(&completions.recv().unwrap(), 12000, round);
        }
    }
}

/// The file has no name, but this process has it open: damage it by its descriptor.
#[test]
fn a_byte_changed_on_the_disk_is_found_and_named() {
    let sections = [section(3, 3000, 4), section(4, 3000, 4)];
    for engine in ENGINES {
        let directory = tempfile::tempdir().unwrap();
        let ring = ring(2);
        let Some(store) = create(directory.path(), engine, &sections, &ring) else {
            continue;
        };
        for key in keys(&sections) {
            let done = send(&store, &ring, Direction::Write, key, 1).unwrap();
            done.result.unwrap();
        }
        let name = directory.path().join("scratch.tiles (deleted)");
        let link = std::fs::read_dir("/proc/self/fd")
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .find(|path| std::fs::read_link(path).is_ok_and(|target| target == name))
            .expect("the store's descriptor");
        let mut options = std::fs::OpenOptions::new();
        let file = options.read(true).write(true).open(link).unwrap();
        let offset = 12288 + 5000;
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ 4], offset).unwrap();
        file.sync_all().unwrap();
        let [whole, bad] = [keys(&sections)[0], keys(&sections)[1]];
        let done = send(&store, &ring, Direction::Read, whole, 1).unwrap();
        assert_holds(&done, 12000, 1);
        drop(done);
        let done = send(&store, &ring, Direction::Read, bad, 1).unwrap();
        let error = done.result.unwrap_err();
        assert_eq!(error.exit_code(), 3);
        let text = error.to_string();
        assert!(
            text.contains("tile 4.0 moment1, extent 0 at byte 12288"),
            "{text}"
        );
        drop(done.slab);
        let later = send(&store, &ring, Direction::Read, whole, 1).unwrap_err();
        let Error::StoreFailed { first } = later else {
            panic!("{later}")
        };
        assert_eq!(first, text);
    }
}

#[test]
fn no_fault_of_the_simulated_disk_gives_wrong_bytes() {
    let sections: Vec<StoredSection> = (0..20).map(|layer| section(layer, 2000, 4)).collect();
    let ring = ring(3);
    let (mut checksums, mut errors, mut clean) = (0, 0, 0);
    for seed in 0..300 {
        let faults = Faults {
            seed,
            io_error: 5,
            short: 200,
            bit_flip: 5,
            misdirected: 5,
            ..Faults::default()
        };
        let disk = SimDisk::new(20 * 8192, faults);
        let store = Scratch::on_disk(Box::new(disk), 20 * 8192, &sections).unwrap();
        let mut outcome = Ok(());
        'run: for round in 1..=2 {
            for kind in [Direction::Write, Direction::Read] {
                for key in keys(&sections) {
                    let done = send(&store, &ring, kind, key, round).unwrap();
                    if done.result.is_err() {
                        outcome = done.result;
                        break 'run;
                    }
                    if kind == Direction::Read {
                        assert_holds(&done, 8000, round);
                    }
                }
            }
        }
        match outcome {
            Ok(()) => clean += 1,
            Err(Error::ExtentChecksum { .. }) => checksums += 1,
            Err(Error::TileIo { .. }) => errors += 1,
            Err(error) => panic!("seed {seed}: {error}"),
        }
    }
    println!("clean {clean}, checksum {checksums}, I/O {errors}");
    assert!(clean > 20 && checksums > 20 && errors > 20);
}

#[test]
fn a_failed_write_names_itself_and_latches_the_store() {
    let sections = [section(2, 100, 2)];
    let key = keys(&sections)[0];
    let ring = ring(1);
    let faults = Faults {
        io_error: 1000,
        ..Faults::default()
    };
    let disk = SimDisk::new(4096, faults);
    let store = Scratch::on_disk(Box::new(disk), 4096, &sections).unwrap();
    let done = send(&store, &ring, Direction::Write, key, 1).unwrap();
    let error = done.result.unwrap_err();
    assert_eq!(error.exit_code(), 4);
    let text = error.to_string();
    assert!(
        text.contains("write of tile 2.0 moment1, extent 0"),
        "{text}"
    );
    assert!(text.contains("needed 4096 bytes, free "), "{text}");
    drop(done.slab);
    let later = send(&store, &ring, Direction::Write, key, 1).unwrap_err();
    let Error::StoreFailed { first } = later else {
        panic!("{later}")
    };
    assert_eq!(first, text);
    assert_eq!(ring.free_count(), 1, "the refused request's slab came back");
}

#[test]
fn an_extent_that_was_never_written_cannot_be_read() {
    let directory = tempfile::tempdir().unwrap();
    let sections = [section(0, 100, 2)];
    let ring = ring(1);
    let store = create(directory.path(), IoEngine::Pread, &sections, &ring).unwrap();
    let done = send(&store, &ring, Direction::Read, keys(&sections)[0], 1).unwrap();
    let text = done.result.unwrap_err().to_string();
    assert!(text.contains("never written"), "{text}");
}

#[test]
fn a_second_store_in_the_directory_is_refused_with_the_holder() {
    let directory = tempfile::tempdir().unwrap();
    let sections = [section(0, 100, 2)];
    let ring = ring(1);
    std::fs::write(directory.path().join("scratch.tiles"), "left by a crash").unwrap();
    let first = create(directory.path(), IoEngine::Pread, &sections, &ring).unwrap();
    let paths = [(directory.path().to_path_buf(), 1 << 20)];
    let again = || Scratch::create(&paths, &sections, None, &[]);
    let error = again().err().expect("it is in use");
    assert_eq!(error.exit_code(), 5);
    let Error::Busy { pid, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(pid, std::process::id());
    drop(first);
    again().expect("free again");
}

#[test]
fn a_budget_or_a_disk_that_is_too_small_is_refused_at_the_start() {
    let sections = [section(0, 8 << 20, 4)];
    let directory = tempfile::tempdir().unwrap();
    let paths = [(directory.path().to_path_buf(), 31 << 20)];
    let refused = Scratch::create(&paths, &sections, None, &[]).err();
    let Some(Error::Budget { needed, budget, .. }) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!((needed, budget), (32 << 20, 31 << 20));

    let mount = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=16m", "tmpfs"])
        .arg(directory.path())
        .output();
    if !mount.as_ref().is_ok_and(|output| output.status.success()) {
        machine::skip("full file system", &format!("mount refused: {mount:?}"));
        return;
    }
    let paths = [(directory.path().to_path_buf(), 1 << 30)];
    let refused = Scratch::create(&paths, &sections, None, &[]).err();
    let small = Scratch::create(&paths, &[section(0, 100, 4)], None, &[]);
    let said = small.map(|store| store.sentences().join("\n"));
    // Lazily: the kernel lets go of a ring's file a moment after the ring is closed.
    let umount = std::process::Command::new("umount")
        .arg("-l")
        .arg(directory.path())
        .status();
    assert!(umount.unwrap().success());
    let Some(Error::Budget { needed, budget, .. }) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(needed, 32 << 20);
    assert!(budget <= 16 << 20, "free bytes are named: {budget}");
    let said = said.expect("100 elements fit");
    assert!(said.contains("tmpfs: it takes host memory"), "{said}");
}
