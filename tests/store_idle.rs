//! Goal: a store that has nothing to do costs nothing. Method: a process of its own (so this file
//! has one test), CPU time of its store threads over half a second, on both engines.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::time::Duration;

use terrace::config::IoEngine;
use terrace::host::HostArena;
use terrace::store::disk::Direction;
use terrace::store::{Request, Scratch, StoredSection};
use terrace::tile::{Section, TileId};

/// CPU time of this process' threads whose name begins so, in clock ticks.
fn ticks(name: &str) -> (u64, usize) {
    let (mut sum, mut count) = (0, 0);
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        let Some((head, tail)) = stat.rsplit_once(')') else {
            continue;
        };
        if head.contains(name) {
            let fields: Vec<&str> = tail.split_whitespace().collect();
            sum += fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
            count += 1;
        }
    }
    (sum, count)
}

#[test]
fn an_idle_store_uses_no_cpu() {
    for engine in [IoEngine::Uring, IoEngine::Pread] {
        let directory = tempfile::tempdir().unwrap();
        let section = StoredSection {
            tile: TileId { layer: 0, part: 0 },
            section: Section::Weight,
            elements: 100,
            element_bytes: 4,
        };
        let paths = [(directory.path().to_path_buf(), 1 << 20)];
        let store = match Scratch::create(&paths, &[section], Some(engine), &[]) {
            Ok(store) => store,
            Err(error) if engine == IoEngine::Uring => {
                println!("SKIP io_uring: {error}");
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let (reply, completions) = crossbeam_channel::unbounded();
        store
            .submit(Request {
                kind: Direction::Write,
                key: section.keys().next().unwrap(),
                bytes: 400,
                slab: HostArena::take(4096).unwrap().cut(4096),
                reply,
            })
            .unwrap();
        completions.recv().unwrap().result.unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let (before, count) = ticks("(terrace-");
        assert!(count >= 1, "the store's thread is there");
        std::thread::sleep(Duration::from_millis(500));
        let used = ticks("(terrace-").0 - before;
        // A tick is 10 ms; a spinning thread would use 50.
        assert!(used <= 2, "{engine:?}: {used} ticks");
    }
}
