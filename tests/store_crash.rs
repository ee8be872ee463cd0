//! Goal: the last acknowledged commit survives the death of the process and of the machine.
//! Method: a child commits for ever and is killed (SIGKILL) at random instants, on real files; and
//! power cuts, by killing a block server that keeps what was not flushed to itself (nbdkit's cache
//! filter), beneath the file alone and beneath ext4 and xfs. After each, everything is read.
//! A child whose flushes do nothing must be caught by the power cuts.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

#[path = "support/child.rs"]
mod child;
#[path = "support/commits.rs"]
mod commits;
#[path = "support/machine.rs"]
mod machine;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use child::{Told, fits, look};
use machine::{ENGINES, Mount, Running, lacks, run, skip, wait_for};
use terrace::config::IoEngine;
use terrace::host::Ring;
use terrace::store::sim::mix;

/// Kills of a run, over both engines; `TERRACE_KILLS` changes it.
const KILLS: u64 = 300;
/// Power cuts of each kind.
const CUTS: u64 = 7;

#[test]
#[ignore = "a process of other tests"]
fn child() {
    child::child();
}

fn scratch_directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Starts a child and hears what it says by a channel, so that waiting has an end.
fn start(mut command: Command) -> (Running, mpsc::Receiver<String>) {
    let mut running = Running(command.spawn().unwrap());
    let (say, heard) = mpsc::channel();
    let lines = machine::lines(&mut running.0);
    std::thread::spawn(move || lines.for_each(|line| say.send(line).unwrap_or(())));
    (running, heard)
}

fn hear_rest(told: &mut Told, heard: &mpsc::Receiver<String>) {
    heard.iter().for_each(|line| told.hear(&line));
}

/// One life of a child and its end. Returns the generations found.
fn kill(directory: &Path, engine: IoEngine, random: u64, before: u64, ring: &Ring) -> Vec<u64> {
    let (mut running, heard) = start(child::command(directory, Some(engine), 0));
    let mut told = Told::default();
    // As often as not in the middle of commits; otherwise anywhere, creation too.
    if random.is_multiple_of(2) {
        while told.committed.is_none() && told.error.is_none() {
            told.hear(&heard.recv_timeout(Duration::from_secs(30)).unwrap());
        }
    }
    std::thread::sleep(Duration::from_micros(mix(random) % 25_000));
    running.kill();
    hear_rest(&mut told, &heard);
    assert!(told.error.is_none(), "{engine:?}: {told:?}");
    let acknowledged = told.committed.unwrap_or(before);
    let found = look(directory, ring).unwrap_or_else(|e| panic!("{engine:?} {random}: {e}"));
    assert!(
        fits(&found, acknowledged),
        "{engine:?} {random}: {found:?} after {told:?}"
    );
    found
}

#[test]
fn no_commit_is_lost_by_a_kill() {
    let kills = std::env::var("TERRACE_KILLS").ok();
    let kills = kills.map_or(KILLS, |text| text.parse().unwrap());
    std::thread::scope(|scope| {
        for engine in ENGINES {
            scope.spawn(move || {
                let ring = commits::ring(1 << 16);
                let mut directory = scratch_directory();
                let (mut newest, mut under_way, mut half_made) = (0, 0, 0);
                for number in 0..kills / 2 {
                    if number % 15 == 0 {
                        directory = scratch_directory();
                        newest = 0;
                    }
                    let random = mix(number ^ (engine as u64) << 32);
                    let found = kill(directory.path(), engine, random, newest, &ring);
                    half_made += u64::from(directory.path().join("checkpoint.tiles.new").exists());
                    let now = found.last().copied().unwrap_or(0);
                    under_way += u64::from(now > newest);
                    newest = now;
                }
                println!(
                    "{engine:?}: {} kills, {under_way} after new commits, {half_made} in creation",
                    kills / 2
                );
                assert!(under_way > kills / 6, "{under_way}");
            });
        }
    });
}

/// Spilled extents end with their process, and what they took is free again.
#[test]
fn a_killed_process_leaves_no_scratch_file() {
    let directory = scratch_directory();
    let leftover = directory.path().join("scratch.tiles");
    std::fs::write(&leftover, vec![1; 1 << 20]).unwrap();
    let section = commits::section(0, terrace::tile::Section::Moment1, 5000, 4);
    let paths = [(directory.path().to_path_buf(), 1 << 20)];
    for _ in 0..2 {
        let store = (0..200).find_map(|_| {
            match terrace::store::Scratch::create(&paths, &[section], None, &[]) {
                // A child of another test's thread has the lock's file until it executes.
                Err(terrace::Error::Busy { .. }) => {
                    std::thread::sleep(std::time::Duration::from_millis(10));
                    None
                }
                other => Some(other.unwrap()),
            }
        });
        let store = store.expect("the lock is free again");
        assert!(!leftover.exists(), "without a name as soon as it is open");
        drop(store);
    }
}

/// A block server that keeps what was not flushed in memory of its own, and its disk: a file.
struct Server {
    nbdkit: Running,
    fuse: Running,
    disk: PathBuf,
}

impl Server {
    /// Serves `image` as the file `disk`, which is there already.
    fn start(image: &Path, disk: &Path, socket: &Path) -> Result<Server, String> {
        std::fs::remove_file(socket).ok();
        let bytes = std::fs::metadata(image).map_err(|e| e.to_string())?.len();
        let mut nbdkit = Command::new("nbdkit");
        nbdkit
            .args(["-f", "-U"])
            .arg(socket)
            .args(["--filter=cache", "file"]);
        let nbdkit = Running::start(nbdkit.arg(image).arg("cache=writeback"))?;
        wait_for("nbdkit's socket", || socket.exists())?;
        let fuse = Running::start(Command::new("nbdfuse").arg(disk).arg("--unix").arg(socket))?;
        let server = Server {
            nbdkit,
            fuse,
            disk: disk.to_path_buf(),
        };
        let served = || std::fs::metadata(disk).is_ok_and(|found| found.len() == bytes);
        wait_for("nbdfuse's disk", served)?;
        Ok(server)
    }

    /// Power fails.
    fn cut(&mut self) {
        self.nbdkit.kill();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.nbdkit.kill();
        run(Command::new("umount").arg("-l").arg(&self.disk)).ok();
        self.fuse.kill();
    }
}

/// Lets a child commit in `directory` on a served disk until power fails. Returns what it told.
fn commit_until_cut(server: &mut Server, command: Command, random: u64) -> Told {
    let (_running, heard) = start(command);
    let mut told = Told::default();
    while told.committed.is_none() && told.error.is_none() {
        match heard.recv_timeout(Duration::from_secs(60)) {
            Ok(line) => told.hear(&line),
            Err(error) => panic!("{error}: {told:?}"),
        }
    }
    assert!(told.error.is_none(), "{told:?}");
    std::thread::sleep(Duration::from_micros(mix(random) % 150_000));
    server.cut();
    // The child meets EIO and ends; what is mounted is let go of only then.
    while told.error.is_none() {
        match heard.recv_timeout(Duration::from_secs(60)) {
            Ok(line) => told.hear(&line),
            Err(_) => break,
        }
    }
    told
}

/// Power cuts beneath the store's file itself. Returns how many lost something.
fn cut_plain(cuts: u64, without_flushes: bool) -> u64 {
    let ring = commits::ring(1 << 16);
    let place = scratch_directory();
    let [kept, served] = ["kept", "served"].map(|name| place.path().join(name));
    std::fs::create_dir(&served).unwrap();
    let mut made = child::command(&kept, None, 1);
    made.stdout(std::process::Stdio::null());
    assert!(made.status().unwrap().success());
    let (image, disk) = (
        kept.join("checkpoint.tiles"),
        served.join("checkpoint.tiles"),
    );
    std::fs::write(&disk, "").unwrap();
    let mut lost = 0;
    for number in 0..cuts {
        let engine = ENGINES[number as usize % 2];
        let mut server = Server::start(&image, &disk, &place.path().join("socket")).unwrap();
        let mut command = child::command(&served, Some(engine), 0);
        if without_flushes {
            let calls = [(libc::SYS_fdatasync, 0), (libc::SYS_fsync, 0)];
            child::filter(&mut command, &calls);
        }
        let told = commit_until_cut(&mut server, command, number);
        drop(server);
        let acknowledged = told.committed.unwrap();
        match look(&kept, &ring) {
            Ok(found) if fits(&found, acknowledged) => {}
            _ if without_flushes => lost += 1,
            other => panic!("{engine:?}, cut {number}: {other:?} after {told:?}"),
        }
    }
    lost
}

const SERVER: [&str; 3] = ["nbdkit", "nbdfuse", "umount"];

#[test]
fn no_commit_is_lost_by_a_power_cut() {
    if let Some(reason) = lacks(&SERVER) {
        return skip("power_cut", &reason);
    }
    cut_plain(CUTS, false);
    let lost = cut_plain(3, true);
    assert!(lost > 0, "a process without flushes must be caught");
    println!("{CUTS} cuts, none lost; without flushes {lost} of 3");
}

fn cut_beneath(kind: &str, bytes: u64) {
    let test = format!("power_cut beneath {kind}");
    let maker = format!("mkfs.{kind}");
    if let Some(reason) = lacks(&[&SERVER[..], &["mount", "losetup", &maker]].concat()) {
        return skip(&test, &reason);
    }
    let ring = commits::ring(1 << 16);
    let place = scratch_directory();
    let [image, disk, mounted] = ["image", "disk", "mounted"].map(|name| place.path().join(name));
    std::fs::create_dir(&mounted).unwrap();
    std::fs::write(&disk, "").unwrap();
    let made = Mount::on_image(kind, &image, bytes, &mounted);
    match made {
        Ok(mount) => drop(mount),
        Err(reason) => return skip(&test, &reason),
    }
    let directory = mounted.join("store");
    for number in 0..CUTS {
        let engine = ENGINES[number as usize % 2];
        let mut server = Server::start(&image, &disk, &place.path().join("socket")).unwrap();
        let source = disk.display().to_string();
        let mount = Mount::new(&["-o", "loop", &source], &mounted).unwrap();
        let told = commit_until_cut(
            &mut server,
            child::command(&directory, Some(engine), 0),
            number,
        );
        drop(mount);
        drop(server);
        let source = image.display().to_string();
        let mount = Mount::new(&["-o", "loop", &source], &mounted).unwrap();
        let found = look(&directory, &ring);
        drop(mount);
        let found = found.unwrap_or_else(|e| panic!("{kind}, cut {number}: {e} after {told:?}"));
        let acknowledged = told.committed.unwrap();
        assert!(
            fits(&found, acknowledged),
            "{kind}, cut {number}: {found:?} after {told:?}"
        );
    }
    println!("{kind}: {CUTS} cuts, none lost");
}

#[test]
fn no_commit_is_lost_by_a_power_cut_beneath_ext4() {
    cut_beneath("ext4", 128 << 20);
}

#[test]
fn no_commit_is_lost_by_a_power_cut_beneath_xfs() {
    cut_beneath("xfs", 512 << 20);
}
