//! Goal: whichever I/O fails, once or from there on for ever, the store holds whole commits and all
//! that were acknowledged, and works again when the disk does.
//! Method: creation, three commits and an open, with the k-th operation failing, for all k: on the
//! simulated disk, and on both engines over a file system of the test's own (FUSE), where power
//! fails too, after every request. The file system's own mistakes (a flush that does nothing) must
//! be caught.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

#[path = "support/commits.rs"]
mod commits;
#[path = "support/fault_fs.rs"]
mod fault_fs;
#[path = "support/machine.rs"]
mod machine;

use std::path::Path;

use commits::{ring, section, verify};
use fault_fs::{FaultFs, FsFaults};
use machine::{ENGINES, skip};
use terrace::config::IoEngine;
use terrace::host::Ring;
use terrace::store::sim::{Faults, SimDisk};
use terrace::store::{CheckpointStore, Spec};
use terrace::tile::Section;
use terrace::{Error, Result};

/// One commit kept: the next one's region is all that there is beside it.
fn spec(engine: Option<IoEngine>) -> Spec {
    Spec {
        keep: 1,
        sections: vec![
            section(0, Section::Weight, 65, 2),
            section(0, Section::Moment1, 1 << 18, 4),
        ],
        engine,
        ..commits::spec()
    }
}

/// What a run came to.
struct Came {
    acknowledged: u64,
    error: Option<Error>,
}

/// Creation, three commits, an open. `open` opens or makes the store.
fn work(open: impl Fn() -> Result<CheckpointStore>, ring: &Ring) -> Came {
    let mut acknowledged = 0;
    let mut run = || {
        let mut store = open()?;
        for generation in 1..=3 {
            commits::commit(&mut store, generation)?;
            acknowledged = generation;
        }
        drop(store);
        verify(&open()?, ring)
    };
    let error = run().err();
    Came {
        acknowledged,
        error,
    }
}

/// Opens again where nothing fails any more, and goes on.
fn check(
    open: impl Fn() -> Result<CheckpointStore>,
    came: &Came,
    ring: &Ring,
) -> std::result::Result<(), String> {
    let say = |error: Error| error.to_string();
    let mut store = open().map_err(say)?;
    let newest = store.latest().unwrap_or(0);
    if newest != came.acknowledged && newest != came.acknowledged + 1 {
        return Err(format!(
            "{} acknowledged, found {newest}",
            came.acknowledged
        ));
    }
    verify(&store, ring).map_err(say)?;
    commits::commit(&mut store, newest + 1).map_err(say)?;
    verify(&store, ring).map_err(say)
}

#[test]
fn every_operation_of_the_simulated_disk_fails() {
    let spec = spec(None);
    let ring = ring(1 << 20);
    let bytes = spec.file_bytes().unwrap();
    let open = |disk: &SimDisk| {
        // A store that was not made whole has another name and is made anew.
        let made = disk.peek(0, 8).iter().any(|byte| *byte != 0);
        match made {
            true => CheckpointStore::open_disk(Box::new(disk.clone()), bytes, Some(&spec)),
            false => CheckpointStore::format_disk(Box::new(disk.clone()), &spec, 5),
        }
    };
    let plain = SimDisk::new(bytes, Faults::default());
    let came = work(|| open(&plain), &ring);
    assert!(came.error.is_none(), "{:?}", came.error);
    let count = plain.operation_count();
    let mut failed = 0;
    for k in 1..=count {
        for once in [true, false] {
            let faults = Faults {
                io_error_at: once.then_some(k),
                io_error_from: (!once).then_some(k),
                ..Faults::default()
            };
            let disk = SimDisk::new(bytes, faults);
            let came = work(|| open(&disk), &ring);
            failed += u64::from(came.error.is_some());
            disk.set_faults(Faults::default());
            // Six operations make the store; one that failed was never given its name.
            if came.acknowledged == 0 && k <= 6 {
                continue;
            }
            for seed in 0..4 {
                let image = disk.after_crash(seed, Faults::default());
                let outcome = check(|| open(&image), &came, &ring);
                outcome.unwrap_or_else(|e| panic!("operation {k}, once: {once}, cut {seed}: {e}"));
            }
            let outcome = check(|| open(&disk), &came, &ring);
            outcome.unwrap_or_else(|e| panic!("operation {k}, once: {once}: {e}"));
        }
    }
    println!("{count} operations, {failed} of {} runs failed", 2 * count);
    assert!(failed > count, "{failed}");
}

/// The file system, or a skip.
fn mounted(test: &str, directory: &Path) -> Option<FaultFs> {
    match FaultFs::mount(directory) {
        Ok(mounted) => Some(mounted),
        Err(error) => {
            skip(test, &format!("no mount of FUSE: {error}"));
            None
        }
    }
}

#[test]
fn every_request_of_both_engines_fails() {
    let ring = ring(1 << 20);
    for engine in ENGINES {
        let directory = tempfile::tempdir().unwrap();
        let Some(fs) = mounted("every_request", directory.path()) else {
            return;
        };
        let spec = spec(Some(engine));
        let open = || CheckpointStore::open_or_create(directory.path(), &spec);
        let came = work(open, &ring);
        assert!(came.error.is_none(), "{engine:?}: {:?}", came.error);
        let count = fs.request_count();
        let mut failed = 0;
        for k in 1..=count {
            for once in [true, false] {
                fs.clear();
                fs.set_faults(FsFaults {
                    error_at: once.then_some(k),
                    error_from: (!once).then_some(k),
                    ..FsFaults::default()
                });
                let came = work(open, &ring);
                failed += u64::from(came.error.is_some());
                fs.set_faults(FsFaults::default());
                if !once {
                    fs.cut(k);
                }
                let outcome = check(open, &came, &ring);
                outcome.unwrap_or_else(|wrong| {
                    let error = came.error.map(|error| error.to_string());
                    panic!("{engine:?}, request {k}, once: {once}: {wrong}; after {error:?}")
                });
            }
        }
        println!(
            "{engine:?}: {count} requests, {failed} of {} runs failed",
            2 * count
        );
        assert!(failed > count, "{failed}");
    }
}

/// The pread pool alone: the kernel's own repetition of a ring's short transfer on such a file
/// begins at the same place again. `store_environment` has short transfers of both engines.
#[test]
fn short_transfers_are_continued() {
    let ring = ring(1 << 20);
    let directory = tempfile::tempdir().unwrap();
    let Some(fs) = mounted("short_transfers", directory.path()) else {
        return;
    };
    let spec = spec(Some(IoEngine::Pread));
    let open = || CheckpointStore::open_or_create(directory.path(), &spec);
    let whole = work(open, &ring);
    assert!(whole.error.is_none(), "{:?}", whole.error);
    let plain = fs.request_count();
    fs.clear();
    fs.set_faults(FsFaults {
        short: true,
        ..FsFaults::default()
    });
    let came = work(open, &ring);
    assert!(came.error.is_none(), "{:?}", came.error);
    let count = fs.request_count();
    println!("{plain} requests, {count} with short transfers");
    assert!(count > plain + 20, "{count}");
    check(open, &came, &ring).unwrap();
}

/// A file system that leaves a flush out must be caught: the file's before it gets its name, and
/// the directory's after that.
#[test]
fn a_flush_left_out_at_creation_is_caught() {
    let ring = ring(1 << 20);
    let directory = tempfile::tempdir().unwrap();
    let Some(fs) = mounted("flush_left_out", directory.path()) else {
        return;
    };
    let spec = spec(None);
    let open = || CheckpointStore::open_or_create(directory.path(), &spec);
    let cuts = |faults: FsFaults, last: u64| {
        (0..40).find(|seed| {
            fs.clear();
            fs.set_faults(faults);
            let mut store = open().unwrap();
            for generation in 1..=last {
                commits::commit(&mut store, generation).unwrap();
            }
            drop(store);
            fs.cut(*seed);
            let came = Came {
                acknowledged: last,
                error: None,
            };
            check(open, &came, &ring).is_err()
        })
    };
    for last in [0, 1] {
        assert_eq!(cuts(FsFaults::default(), last), None);
    }
    let file = FsFaults {
        file_flush_ignored: true,
        ..FsFaults::default()
    };
    let names = FsFaults {
        directory_flush_ignored: true,
        ..FsFaults::default()
    };
    let found = [cuts(file, 0), cuts(names, 1)];
    println!("caught at seeds {found:?}");
    assert!(found.iter().all(Option::is_some), "{found:?}");
}
