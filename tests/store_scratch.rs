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
use terrace::stats::Stats;
use terrace::store::disk::{Direction, Disk, Finished, Operation, Waker};
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
    send_bytes(store, ring, kind, key, |bytes| {
        fill(bytes, seed(key, round))
    })
}

/// A read, or a write of the bytes that `put` sets.
fn send_bytes(
    store: &Scratch,
    ring: &Ring,
    kind: Direction,
    key: ExtentKey,
    put: impl FnOnce(&mut [u8]),
) -> Result<Completion> {
    let (reply, completions) = unbounded();
    let mut slab = ring.take();
    let bytes = store.payload_bytes(key);
    // Garbage first: neither what a slab held before nor its padding may come back.
    slab.as_mut_slice::<u8>().fill(0xee);
    if kind == Direction::Write {
        put(&mut slab.as_mut_slice()[..bytes]);
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
    let sections: Vec<StoredSection> = (0..20).map(|layer| section(layer, 5000, 4)).collect();
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
        let disk = SimDisk::new(20 * 20_480, faults);
        let mut store = Scratch::on_disk(Box::new(disk), 20 * 20_480, &sections).unwrap();
        if seed % 2 == 1 {
            store = with_coders(store);
        }
        let mut outcome = Ok(());
        'run: for round in 1..=2 {
            for kind in [Direction::Write, Direction::Read] {
                for key in keys(&sections) {
                    let written = content(20_000, 4, seed, round);
                    let done = exchange_one(&store, &ring, kind, key, &written).unwrap();
                    if done.result.is_err() {
                        outcome = done.result;
                        break 'run;
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

/// A store whose moments are coded, on two threads.
fn with_coders(mut store: Scratch) -> Scratch {
    let mut cutter = HostArena::take(2 * EXTENT_BYTES_MAX).unwrap();
    let staging = (0..2).map(|_| cutter.cut(EXTENT_BYTES_MAX)).collect();
    store.start_coders(staging).unwrap();
    store
}

/// Small numbers as f32 or bf16, which shrink, in even rounds; in odd ones noise, which does not.
fn content(bytes: usize, element_bytes: usize, seed: u64, round: u64) -> Vec<u8> {
    let mut content = vec![0; bytes];
    fill(&mut content, seed ^ round);
    if round.is_multiple_of(2) {
        for element in content.chunks_mut(element_bytes) {
            let last = element.len() - 1;
            element[last] = 0x38 | element[last] & 1;
        }
    }
    content
}

fn exchange_one(
    store: &Scratch,
    ring: &Ring,
    kind: Direction,
    key: ExtentKey,
    written: &[u8],
) -> Result<Completion> {
    let bytes = store.payload_bytes(key);
    let done = send_bytes(store, ring, kind, key, |to| to.copy_from_slice(written))?;
    if kind == Direction::Read && done.result.is_ok() {
        let (got, padding) = done.slab.as_slice::<u8>().split_at(bytes);
        assert!(got == written, "{key} differs");
        let padding = &padding[..bytes.next_multiple_of(4096) - bytes];
        assert!(padding.iter().all(|byte| *byte == 0), "{key}: padding");
    }
    Ok(done)
}

#[test]
fn coded_moments_come_back_and_move_fewer_bytes() {
    let of = |layer, section, elements, element_bytes| StoredSection {
        tile: TileId { layer, part: 0 },
        section,
        elements,
        element_bytes,
    };
    let sections = [
        of(0, Section::Moment1, 2 * EXTENT_ELEMENTS + 17, 4),
        of(0, Section::Moment2, 50_001, 4),
        of(1, Section::Moment1, EXTENT_ELEMENTS + 1, 2),
        of(2, Section::Moment2, 1, 4),
        // These stay as they are.
        of(2, Section::Weight, 40_000, 2),
        of(3, Section::Moment1, 40_000, 1),
    ];
    for engine in ENGINES {
        let directory = tempfile::tempdir().unwrap();
        let ring = ring_of(4, EXTENT_BYTES_MAX);
        let Some(store) = create(directory.path(), engine, &sections, &ring) else {
            continue;
        };
        let store = with_coders(store);
        let stats = std::sync::Arc::new(Stats::new(false));
        store.count_into(&stats);
        let mut before = [0; 2];
        for round in 1..=4 {
            for kind in [Direction::Write, Direction::Read] {
                for (section, key) in sections.iter().flat_map(|s| s.keys().map(move |k| (s, k))) {
                    let bytes = store.payload_bytes(key);
                    let width = section.element_bytes as usize;
                    let written = content(bytes, width, seed(key, 0), round);
                    let done = exchange_one(&store, &ring, kind, key, &written).unwrap();
                    done.result.unwrap();
                }
            }
            let counted = store.counters();
            let moved = [counted.read.bytes, counted.write.bytes];
            let all = store.table().bytes();
            let shares = [0, 1].map(|way| (moved[way] - before[way]) as f64 / all as f64);
            before = moved;
            match round.is_multiple_of(2) {
                true => assert!(shares.iter().all(|s| (0.7..0.8).contains(s)), "{shares:?}"),
                false => assert_eq!(shares, [1.0; 2]),
            }
        }
        let [.., read, write] = stats.snapshot().bytes;
        assert_eq!(read, write);
        let pages = 4096 * 4 * keys(&sections).len() as u64;
        assert!(
            read <= before[0] && read + pages > before[0],
            "{read} {before:?}"
        );
        assert_eq!(ring.free_count(), 4, "every slab came back");
    }
}

/// A byte that decoding would not notice, one that it would, and one of the padding: the checksum
/// is what finds them.
#[test]
fn a_changed_byte_of_a_coded_extent_is_found_before_it_is_decoded() {
    let sections = [section(3, 10_000, 4)];
    let key = keys(&sections)[0];
    let written = content(40_000, 4, 1, 2);
    for at in [0, 29_999, 30_000, 30_001, 31_000] {
        let ring = ring(2);
        let disk = SimDisk::new(40_960, Faults::default());
        let changes = Changes {
            disk,
            at,
            changed: false,
        };
        let store = Scratch::on_disk(Box::new(changes), 40_960, &sections).unwrap();
        let store = with_coders(store);
        let done = exchange_one(&store, &ring, Direction::Write, key, &written).unwrap();
        done.result.unwrap();
        drop(done.slab);
        let done = exchange_one(&store, &ring, Direction::Read, key, &written).unwrap();
        let error = done.result.unwrap_err();
        assert!(
            matches!(error, Error::ExtentChecksum { .. }),
            "{at}: {error}"
        );
        drop(done.slab);
        let later = exchange_one(&store, &ring, Direction::Read, key, &written).unwrap_err();
        assert!(matches!(later, Error::StoreFailed { .. }), "{later}");
    }
}

/// A simulated disk that changes a byte of each read.
struct Changes {
    disk: SimDisk,
    at: usize,
    changed: bool,
}

impl Disk for Changes {
    fn depth(&self) -> usize {
        self.disk.depth()
    }

    fn in_flight(&self) -> usize {
        self.disk.in_flight()
    }

    fn start(&mut self, operation: Operation) {
        self.disk.start(operation);
    }

    fn wait(&mut self, finished: &mut Vec<Finished>) {
        self.disk.wait(finished);
        for done in finished {
            if done.operation.direction == Direction::Read && !self.changed {
                done.operation.slab.as_mut_slice::<u8>()[self.at] ^= 4;
                self.changed = true;
            }
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.disk.flush()
    }

    fn waker(&self) -> Waker {
        self.disk.waker()
    }
}

/// Nobody knows how many bytes to read: asking is a mistake of the caller's.
#[test]
#[should_panic(expected = "tile 0.0 moment1 extent 0: its write is in flight")]
fn a_coded_extent_cannot_be_read_while_its_write_is_in_flight() {
    let sections = [section(0, EXTENT_ELEMENTS, 4)];
    let key = keys(&sections)[0];
    let ring = ring_of(4, EXTENT_BYTES_MAX);
    let bytes = 4 << 20;
    let disk = SimDisk::new(bytes, Faults::default());
    let store = with_coders(Scratch::on_disk(Box::new(disk), bytes, &sections).unwrap());
    // A write takes milliseconds, but this thread may have to wait for a core.
    for _ in 0..100 {
        let (reply, completions) = unbounded();
        for kind in [Direction::Write, Direction::Read] {
            store
                .submit(Request {
                    kind,
                    key,
                    bytes: bytes as usize,
                    slab: ring.take(),
                    reply: reply.clone(),
                })
                .unwrap();
        }
        drop(reply);
        completions.into_iter().for_each(drop);
    }
}

/// A store that is dropped lets what its coders have finish, and every slab comes back.
#[test]
fn a_store_with_coders_ends_with_requests_under_way() {
    let sections: Vec<StoredSection> = (0..20).map(|layer| section(layer, 5000, 4)).collect();
    for _ in 0..20 {
        let ring = ring(40);
        let disk = SimDisk::new(20 * 20_480, Faults::default());
        let store = Scratch::on_disk(Box::new(disk), 20 * 20_480, &sections).unwrap();
        let store = with_coders(store);
        let (reply, completions) = unbounded();
        for (key, kind) in keys(&sections)
            .into_iter()
            .map(|key| (key, Direction::Write))
        {
            let mut slab = ring.take();
            slab.as_mut_slice::<u8>()[..20_000].copy_from_slice(&content(20_000, 4, 1, 2));
            let (bytes, reply) = (20_000, reply.clone());
            let request = Request {
                kind,
                key,
                bytes,
                slab,
                reply,
            };
            store.submit(request).unwrap();
        }
        drop((store, reply));
        assert_eq!(
            completions
                .into_iter()
                .filter(|done| done.result.is_ok())
                .count(),
            20
        );
        assert_eq!(ring.free_count(), 40);
    }
}
