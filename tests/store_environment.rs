//! Goal: where the machine gives less than it should, the store works by other means or says what
//! is the matter, and what was committed stays whole.
//! Method: one test a circumstance, each on both engines: full disks, limits of the process,
//! filters of system calls, interrupted calls, sectors that fail, other file systems. What needs
//! root or a program says so where it is missing.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

#[path = "support/child.rs"]
mod child;
#[path = "support/commits.rs"]
mod commits;
#[path = "support/machine.rs"]
mod machine;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use child::{command, look, tell};
use machine::{ENGINES, Mount, Running, lacks, run, skip, wait_for};
use terrace::Error;
use terrace::config::IoEngine;
use terrace::store::{CheckpointStore, Spec};

#[test]
#[ignore = "a process of other tests"]
fn child() {
    child::child();
}

fn place() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn spec(engine: IoEngine) -> Spec {
    Spec {
        engine: Some(engine),
        ..commits::spec()
    }
}

/// A directory of the file system of a kind, mounted below `place`; the reason where there is none.
fn mounted(kind: &str, bytes: u64, place: &Path) -> Result<Mount, String> {
    let directory = place.join("mounted");
    std::fs::create_dir(&directory).map_err(|e| e.to_string())?;
    match kind {
        "tmpfs" => {
            if let Some(reason) = lacks(&["mount"]) {
                return Err(reason);
            }
            let size = format!("size={bytes}");
            Mount::new(&["-t", "tmpfs", "-o", &size, "tmpfs"], &directory)
        }
        "overlay" => {
            if let Some(reason) = lacks(&["mount"]) {
                return Err(reason);
            }
            let path = |name: &str| {
                std::fs::create_dir(place.join(name)).unwrap();
                place.join(name).display().to_string()
            };
            let options = format!(
                "lowerdir={},upperdir={},workdir={}",
                path("lower"),
                path("upper"),
                path("work")
            );
            Mount::new(&["-t", "overlay", "-o", &options, "overlay"], &directory)
        }
        _ => {
            let maker = format!("mkfs.{kind}");
            if let Some(reason) = lacks(&["mount", "losetup", &maker]) {
                return Err(reason);
            }
            Mount::on_image(kind, &place.join("image"), bytes, &directory)
        }
    }
}

/// Writes until nothing fits any more.
fn fill(path: &Path) {
    let mut file = std::fs::File::create(path).unwrap();
    for bytes in [1 << 20, 4096, 1] {
        while std::io::Write::write_all(&mut file, &vec![1; bytes]).is_ok() {}
    }
    file.sync_all().ok();
}

/// A full disk is refused when the store is made, and does not matter after.
#[test]
fn a_full_disk_is_refused_at_the_start_only() {
    for kind in ["tmpfs", "ext4"] {
        for engine in ENGINES {
            let place = place();
            let mount = match mounted(kind, 48 << 20, place.path()) {
                Ok(mount) => mount,
                Err(reason) => {
                    skip(&format!("full {kind}"), &reason);
                    break;
                }
            };
            let root = place.path().join("mounted");
            let store = root.join("store");
            let made = CheckpointStore::open_or_create(&store, &spec(engine)).unwrap();
            drop(made);
            fill(&root.join("filler"));
            let told = tell(command(&store, Some(engine), 3));
            assert_eq!(
                (told.committed, told.error),
                (Some(3), None),
                "{kind} {engine:?}"
            );
            assert_eq!(look(&store, &commits::ring(1 << 16)), Ok(vec![2, 3]));
            let second = root.join("second");
            let refused = CheckpointStore::open_or_create(&second, &spec(engine)).err();
            let Some(error @ (Error::Budget { .. } | Error::Io { .. })) = refused else {
                panic!("{kind} {engine:?}: {refused:?}")
            };
            println!("{kind} {engine:?}: {error}");
            assert!(!second.join("checkpoint.tiles").exists());
            assert!(
                !second.join("checkpoint.tiles.new").exists(),
                "its space is free again"
            );
            drop(mount);
        }
    }
}

/// A limit on a file's size ends an extent in its middle: short, then an error. The signal that
/// comes with it is ignored.
#[test]
fn a_file_size_limit_is_an_error_with_its_tile() {
    for engine in ENGINES {
        let place = place();
        let told = tell(command(place.path(), Some(engine), 1));
        assert_eq!(told.committed, Some(1), "{told:?}");
        let store = CheckpointStore::open_or_create(place.path(), &spec(engine)).unwrap();
        let key = commits::spec().sections[2].keys().next().unwrap();
        let table = store.table().unwrap();
        let extents = store.superblock().geometry.extents_offset(1);
        let offset = extents + table.offset(table.index(key).unwrap());
        drop(store);
        // Of the last extent's two pages one fits.
        let mut limited = command(place.path(), Some(engine), 1);
        child::limit(&mut limited, libc::RLIMIT_FSIZE, offset + 4096);
        let told = tell(limited);
        let (code, text) = told.error.expect("the write has no room");
        assert_eq!((code, told.committed), (4, None), "{text}");
        assert!(
            text.contains("write of tile 1.0 weight, extent 0"),
            "{text}"
        );
        assert!(text.contains("os error 27"), "{text}");
        assert_eq!(look(place.path(), &commits::ring(1 << 16)), Ok(vec![1]));
        let told = tell(command(place.path(), Some(engine), 1));
        assert_eq!((told.committed, told.error), (Some(2), None));
    }
}

/// The tools themselves ignore that signal: a limit is an error, not a death.
#[test]
fn the_tools_survive_the_signal_of_a_file_size_limit() {
    let place = place();
    let mut limited = Command::new(env!("CARGO_BIN_EXE_terrace"));
    limited.args(["init", "run.toml"]).current_dir(place.path());
    let set = || {
        let limit = libc::rlimit {
            rlim_cur: 10,
            rlim_max: 10,
        };
        // SAFETY: a structure that outlives the call.
        match unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: between fork and exec only one system call.
    unsafe { limited.pre_exec(set) };
    let output = limited.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{text}");
    assert!(text.contains("os error 27"), "{text}");
}

/// Without locked memory buffers are not registered; the store says so and works.
#[test]
fn little_locked_memory_is_said_and_does_not_matter() {
    if let Some(reason) = lacks(&[]) {
        return skip("locked_memory", &reason);
    }
    for engine in ENGINES {
        // Root may lock what it likes: another user, who must reach the directory.
        let place = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(place.path(), Some(65534), Some(65534)).unwrap();
        let mut limited = command(place.path(), Some(engine), 3);
        limited.uid(65534).gid(65534);
        child::limit(&mut limited, libc::RLIMIT_MEMLOCK, 16 << 10);
        let reachable = limited.get_program().to_owned();
        let told = match limited.spawn() {
            Ok(child) => child::Told::all(child),
            Err(error) => {
                let reason = format!("another user cannot run {}: {error}", reachable.display());
                return skip("locked_memory", &reason);
            }
        };
        assert_eq!(
            (told.committed, &told.error),
            (Some(3), &None),
            "{engine:?}: {told:?}"
        );
        let noted = told
            .says
            .iter()
            .any(|said| said.starts_with("buffers are not registered"));
        assert_eq!(noted, engine == IoEngine::Uring, "{told:?}");
        assert_eq!(look(place.path(), &commits::ring(1 << 16)), Ok(vec![2, 3]));
    }
}

/// Containers forbid io_uring, in several ways: the pread pool takes over and the reason is said;
/// who asked for io_uring by name is refused.
#[test]
fn a_forbidden_ring_is_replaced_by_the_pread_pool() {
    let setup = [libc::SYS_io_uring_setup];
    let enter = [libc::SYS_io_uring_enter];
    let register = [libc::SYS_io_uring_register];
    for (calls, errno) in [
        (setup, libc::EPERM),
        (setup, libc::ENOSYS),
        (setup, libc::ENOMEM),
        (enter, libc::EPERM),
        (register, libc::EPERM),
    ] {
        let forbidden: Vec<(i64, u16)> = calls.iter().map(|call| (*call, errno as u16)).collect();
        let filtered = |directory: &Path, engine| {
            let mut filtered = command(directory, engine, 3);
            child::filter(&mut filtered, &forbidden);
            tell(filtered)
        };
        let place = place();
        let told = filtered(place.path(), Some(IoEngine::Uring));
        let (code, text) = told.error.expect("asked for by name");
        assert_eq!(code, 2, "{text}");
        assert!(text.contains("memory.io_engine"), "{text}");
        let told = filtered(place.path(), None);
        assert_eq!((told.committed, &told.error), (Some(3), &None), "{told:?}");
        assert!(told.says[0].contains("pread pool"), "{told:?}");
        assert!(
            told.says[0].contains(&format!("(io_uring: {}", reason(errno))),
            "{told:?}"
        );
        let told = filtered(place.path(), Some(IoEngine::Pread));
        assert_eq!((told.committed, told.error), (Some(6), None));
        assert_eq!(look(place.path(), &commits::ring(1 << 16)), Ok(vec![5, 6]));
    }
}

fn reason(errno: i32) -> String {
    std::io::Error::from_raw_os_error(errno).to_string()
}

/// A call that a signal interrupts is made again, whichever and however often.
#[test]
fn interrupted_calls_are_made_again() {
    if let Some(reason) = lacks(&["strace"]) {
        return skip("interrupted_calls", &reason);
    }
    for engine in ENGINES {
        let calls: &[&str] = match engine {
            IoEngine::Uring => &["io_uring_enter:error=EINTR", "io_uring_enter:error=EAGAIN"],
            IoEngine::Pread => &["pread64,pwrite64:error=EINTR", "pwrite64:error=EAGAIN"],
        };
        for call in calls {
            let place = place();
            // The second and then every third: what comes after an interruption goes through.
            let inject = format!("inject={call}:when=2+3");
            let inner = command(place.path(), Some(engine), 3);
            let mut traced = Command::new("strace");
            let (names, _) = call.split_once(':').unwrap();
            traced
                .args(["-f", "-qq", "-o"])
                .arg(place.path().join("trace"))
                .args(["-e", &format!("trace={names}"), "-e", &inject]);
            if engine == IoEngine::Pread {
                // Not the loader's own reads.
                for name in ["checkpoint.tiles", "checkpoint.tiles.new"] {
                    traced.arg("-P").arg(place.path().join(name));
                }
            }
            traced
                .arg(inner.get_program())
                .args(inner.get_args())
                .envs(
                    inner
                        .get_envs()
                        .filter_map(|(key, value)| Some((key, value?))),
                )
                .stdout(std::process::Stdio::piped())
                .stderr(std::process::Stdio::null());
            let told = tell(traced);
            let trace = std::fs::read_to_string(place.path().join("trace")).unwrap_or_default();
            let count = trace.matches("(INJECTED)").count();
            assert_eq!(
                (told.committed, &told.error),
                (Some(3), &None),
                "{call}: {told:?}"
            );
            assert!(count > 5, "{call}: {count} injected");
            println!("{engine:?}: {call}, {count} times");
            assert_eq!(look(place.path(), &commits::ring(1 << 16)), Ok(vec![2, 3]));
        }
    }
}

#[test]
fn other_file_systems_hold_a_store() {
    for (kind, bytes) in [("tmpfs", 64 << 20), ("overlay", 0), ("btrfs", 160 << 20)] {
        let place = place();
        let mount = match mounted(kind, bytes, place.path()) {
            Ok(mount) => mount,
            Err(reason) => {
                skip(kind, &reason);
                continue;
            }
        };
        for engine in ENGINES {
            let directory = place.path().join("mounted").join(format!("{engine:?}"));
            let first = tell(command(&directory, Some(engine), 2));
            assert_eq!(
                (first.committed, &first.error),
                (Some(2), &None),
                "{kind}: {first:?}"
            );
            println!("{}", first.says[0]);
            let second = tell(command(&directory, Some(engine), 2));
            assert_eq!((second.committed, second.error), (Some(4), None), "{kind}");
            assert_eq!(look(&directory, &commits::ring(1 << 16)), Ok(vec![3, 4]));
            let mode = |name: &str| {
                let found = std::fs::metadata(directory.join(name)).unwrap();
                found.permissions().mode() & 0o777
            };
            assert_eq!((mode("."), mode("checkpoint.tiles")), (0o700, 0o600));
        }
        drop(mount);
    }
}

/// A disk of which one sector fails: qemu's blkdebug beneath a file of FUSE.
struct BadSector {
    daemon: Running,
    disk: std::path::PathBuf,
}

impl BadSector {
    fn start(image: &Path, disk: &Path, kind: &str, offset: u64) -> Result<BadSector, String> {
        let sector = offset / 512;
        let block = format!(
            "{{\"driver\":\"blkdebug\",\"node-name\":\"bad\",\"image\":{{\"driver\":\"file\",\
             \"filename\":{:?},\"locking\":\"off\"}},\"inject-error\":[{{\"event\":\"none\",\
             \"iotype\":\"{kind}\",\"errno\":5,\"sector\":{sector},\"once\":false}}]}}",
            image.display().to_string()
        );
        let export = format!(
            "type=fuse,id=it,node-name=bad,mountpoint={},writable=on,allow-other=off",
            disk.display()
        );
        let mut daemon = Command::new("qemu-storage-daemon");
        daemon.args(["--blockdev", &block, "--export", &export]);
        let daemon = Running::start(&mut daemon)?;
        let bytes = std::fs::metadata(image).map_err(|e| e.to_string())?.len();
        let served = || std::fs::metadata(disk).is_ok_and(|found| found.len() == bytes);
        let bad = BadSector {
            daemon,
            disk: disk.to_path_buf(),
        };
        wait_for("the disk with a bad sector", served)?;
        Ok(bad)
    }
}

impl Drop for BadSector {
    fn drop(&mut self) {
        run(Command::new("umount").arg("-l").arg(&self.disk)).ok();
        self.daemon.kill();
    }
}

#[test]
fn a_bad_sector_is_an_error_with_its_tile_and_spares_the_others() {
    if let Some(reason) = lacks(&["qemu-storage-daemon", "umount"]) {
        return skip("bad_sector", &reason);
    }
    let ring = commits::ring(1 << 16);
    for engine in ENGINES {
        let place = place();
        let [kept, served] = ["kept", "served"].map(|name| place.path().join(name));
        std::fs::create_dir(&served).unwrap();
        assert_eq!(tell(command(&kept, Some(engine), 2)).committed, Some(2));
        let (image, disk) = (
            kept.join("checkpoint.tiles"),
            served.join("checkpoint.tiles"),
        );
        std::fs::write(&disk, "").unwrap();
        let store = CheckpointStore::open_or_create(&kept, &spec(engine)).unwrap();
        let geometry = store.superblock().geometry;
        let table = store.table().unwrap().clone();
        drop(store);
        let keys: Vec<_> = (0..table.count()).map(|index| table.key(index)).collect();
        // In the middle of an extent of the second commit, for reads.
        let offset = geometry.extents_offset(1) + table.offset(1) + 8192;
        let bad = BadSector::start(&image, &disk, "read", offset).unwrap();
        let store = CheckpointStore::open_or_create(&served, &spec(engine)).unwrap();
        let error = store.read(2, keys[1], ring.take()).unwrap_err();
        assert_eq!(error.exit_code(), 4, "{error}");
        assert!(
            error
                .to_string()
                .contains("read of tile 0.0 moment1, extent 0"),
            "{error}"
        );
        store.read(2, keys[0], ring.take()).unwrap();
        store.read(1, keys[1], ring.take()).unwrap();
        drop(store);
        drop(bad);
        // In the region that the next commit takes, for writes.
        let offset = geometry.extents_offset(2) + table.offset(1) + 8192;
        let bad = BadSector::start(&image, &disk, "write", offset).unwrap();
        let told = tell(command(&served, Some(engine), 1));
        let (code, text) = told.error.expect("the sector fails");
        assert_eq!(code, 4, "{text}");
        assert!(
            text.contains("write of tile 0.0 moment1, extent 0"),
            "{text}"
        );
        drop(bad);
        // A superblock copy and a manifest copy that cannot be read have their twins.
        for offset in [0, geometry.manifest_offset(1, 0)] {
            let bad = BadSector::start(&image, &disk, "read", offset).unwrap();
            assert_eq!(look(&served, &ring), Ok(vec![1, 2]));
            drop(bad);
        }
        assert_eq!(look(&kept, &ring), Ok(vec![1, 2]));
    }
}
