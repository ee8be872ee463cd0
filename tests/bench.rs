//! Goal: who knows fio can use `terrace-bench`: its words are read, its job files run, what parses
//! its JSON parses this. Nothing that this tool did not make is ever written, what it made is gone
//! afterwards however it ends, and a profile comes back as the rates of a plan.
//!
//! Method: the real binary in a directory of its own, files of a few blocks. Messages are compared
//! whole. JSON is held against the keys and types of a document that fio 3.33 wrote. No test
//! measures a speed.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

#[path = "support/tool.rs"]
mod tool;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
use terrace::measure::job_file;
use terrace::measure::profile::Profile;
use terrace::measure::words::{self, Job, WORDS};
use terrace::schedule::simulate::ZstdRates;
use tool::Ended;

const BENCH: &str = env!("CARGO_BIN_EXE_terrace-bench");
const TERRACE: &str = env!("CARGO_BIN_EXE_terrace");
const FIO: &str = include_str!("fixtures/bench/fio-3.33.json");

struct Room {
    dir: TempDir,
}

impl Room {
    fn new() -> Room {
        let dir = tempfile::tempdir().unwrap();
        Room { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    fn command(&self, tool: &str, arguments: &str) -> Command {
        let mut command = Command::new(tool);
        command.current_dir(self.dir.path()).stdin(Stdio::null());
        command.args(arguments.split_whitespace());
        command
    }

    fn bench(&self, arguments: &str) -> Ended {
        self.command(BENCH, arguments).output().unwrap().into()
    }

    fn json(&self, arguments: &str) -> Value {
        let out = self
            .bench(&format!("{arguments} --output-format=json"))
            .success();
        serde_json::from_str(&out).unwrap()
    }

    /// Names and lengths below the room.
    fn listing(&self) -> BTreeMap<PathBuf, u64> {
        let entries = std::fs::read_dir(self.dir.path()).unwrap();
        let one = |entry: std::io::Result<std::fs::DirEntry>| {
            let entry = entry.unwrap();
            (entry.file_name().into(), entry.metadata().unwrap().len())
        };
        entries.map(one).collect()
    }
}

fn wait_for(what: &str, mut there: impl FnMut() -> bool) {
    let started = Instant::now();
    while !there() {
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "{what} did not come"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn every_option_is_read_and_its_bad_values_are_refused() {
    // Of each: a good value, a bad one.
    let values = BTreeMap::from([
        ("name", ("disk", "a/b")),
        ("filename", ("there", "a:b")),
        ("directory", (".", "")),
        ("rw", ("randrw", "trim")),
        ("rwmixread", ("70", "101")),
        ("rwmixwrite", ("30", "-1")),
        ("bs", ("4Mi", "4x")),
        ("size", ("1.5g", "0")),
        ("io_size", ("64k", "k")),
        ("offset", ("0", "?")),
        ("offset_increment", ("4k", "four")),
        ("iodepth", ("16", "17")),
        ("numjobs", ("4", "0")),
        ("direct", ("0", "2")),
        ("buffered", ("1", "maybe")),
        ("ioengine", ("psync", "libaio")),
        ("fixedbufs", ("0", "x")),
        ("rate", ("1m,2m", "fast")),
        ("rate_iops", ("100", "0")),
        ("time_based", ("1", "yes")),
        ("runtime", ("1.5m", "0")),
        ("ramp_time", ("500ms", "soon")),
        ("startdelay", ("0", "-1")),
        ("loops", ("3", "0")),
        ("group_reporting", ("1", "2")),
        ("new_group", ("1", "2")),
        ("stonewall", ("1", "2")),
        ("verify", ("xxh3", "crc32c")),
        ("do_verify", ("0", "2")),
        ("fsync", ("8", "-8")),
        ("end_fsync", ("1", "2")),
        ("overwrite", ("1", "2")),
        ("unlink", ("0", "2")),
        ("norandommap", ("1", "2")),
        ("randseed", ("42", "abc")),
        ("thread", ("1", "0")),
    ]);
    let default = Job::default();
    for word in WORDS {
        let (good, bad) = values
            .get(word.name)
            .unwrap_or_else(|| panic!("{}", word.name));
        for name in [word.name].into_iter().chain(word.also.iter().copied()) {
            let mut job = Job::default();
            words::set(&mut job, "arguments", name, name, good).unwrap();
            let kept = job.given.pop();
            if !["name", "startdelay", "offset", "thread"].contains(&word.name) {
                assert_ne!(
                    Job {
                        given: vec![],
                        ..job
                    },
                    default,
                    "{name} changed nothing"
                );
            }
            assert!(kept.is_some() || name == "name");
            let refused = words::set(&mut default.clone(), "arguments", name, name, bad);
            assert_eq!(refused.unwrap_err().exit_code(), 2, "{name}={bad}");
        }
    }
}

#[test]
fn job_files_are_read_as_fio_reads_them() {
    let text = "
        ; a comment
        # another
        [global]
        bs=4Ki
        size = 1M
        direct=1
        group_reporting
        [first]
        rw=write
        bs=64k
        [global]
        iodepth=8
        [second]
        stonewall
        rw=randread
        numjobs=2
        runtime=90
        time_based
    ";
    let jobs = job_file::read_text(text, "disk.fio", &Job::default()).unwrap();
    let [first, second] = &jobs[..] else {
        panic!("{jobs:?}")
    };
    assert_eq!(
        (first.name.as_str(), first.block_bytes, first.depth),
        ("first", 65536, 1)
    );
    assert_eq!(first.access.name, "write");
    assert!(first.grouped && !first.stonewall && first.direct == Some(true));
    assert_eq!(
        (second.block_bytes, second.depth, second.copies),
        (4096, 8, 2)
    );
    assert_eq!(second.runtime, Some(Duration::from_secs(90)));
    assert!(second.stonewall && second.time_based && second.grouped);
    let path = std::env::var("PATH").unwrap();
    let text = "[a]\nfilename=${PATH}x\nsize=4k";
    match job_file::read_text(text, "disk.fio", &Job::default()) {
        Ok(jobs) => assert_eq!(jobs[0].filename, Some(PathBuf::from(path + "x"))),
        // Several paths in it: the variable was put in, and its colons refused.
        Err(error) => assert!(path.contains(':') && error.to_string().contains(&path[..20])),
    }
    // The command line: what stands before the first name is common.
    let arguments = [
        "--bs=8k",
        "--size",
        "1m",
        "-name=a",
        "--rw",
        "write",
        "--name=b",
        "--fixedbufs",
    ];
    let request = job_file::parse(&arguments.map(str::to_string)).unwrap();
    let names: Vec<_> = request
        .jobs
        .iter()
        .map(|j| (j.name.as_str(), j.access.name))
        .collect();
    assert_eq!(names, [("a", "write"), ("b", "read")]);
    assert!(
        request
            .jobs
            .iter()
            .all(|j| j.block_bytes == 8192 && j.size == Some(1 << 20))
    );
}

#[test]
fn bad_input_ends_in_one_line_that_names_the_nearest() {
    let room = Room::new();
    room.write("foreign", "not of this tool's making");
    room.write("word.fio", "[a]\nsize=4k\n\nblokcsize=4k\n");
    room.write("value.fio", "[a]\nrw=raed\n");
    room.write("early.fio", "rw=read\n[a]\n");
    room.write("bracket.fio", "[a\n");
    room.write("variable.fio", "[a]\nsize=${NO_SUCH_VARIABLE}\n");
    std::fs::create_dir(room.path("directory")).unwrap();
    for (arguments, message) in [
        (
            "--name=a --rwmixraed=50",
            "arguments: --rwmixraed: expected one of fio's words that terrace-bench knows, got rwmixraed; did you mean rwmixread? `terrace-bench --help` lists all",
        ),
        (
            "--name=a --rw=raed",
            "arguments: --rw: expected read, write, randread, randwrite, rw or randrw, got \"raed\"; did you mean read?",
        ),
        (
            "--name=a --iodepth=64",
            "arguments: --iodepth: expected 1 to 16, got \"64\"; the engines have at most 16 in flight; use numjobs for more",
        ),
        (
            "--name=a --ioengine=libaio",
            "arguments: --ioengine: expected io_uring or pread, got \"libaio\"; correct it",
        ),
        (
            "--name=a --bs",
            "arguments: --bs: expected SIZE, got nothing; add it",
        ),
        (
            "--name=a --bs=1000 --size=1m",
            "jobs: job a: bs: expected a multiple of 4096 up to 1g, got 1000; bs=4m is an extent of the store",
        ),
        (
            "--name=a --bs=1m --size=4k",
            "jobs: job a: size: expected at least bs, 1048576, got 4096; raise it or lower bs",
        ),
        (
            "--name=a --rw=read",
            "jobs: job a: size: expected bytes of the file to make, got none; add size=1g",
        ),
        (
            "--name=a --size=1m --time_based",
            "jobs: job a: time_based: expected a runtime beside it, got none; add runtime=30",
        ),
        (
            "--name=a --size=1m --filename=f --rw=write --verify=xxh3 --numjobs=2",
            "jobs: job a: verify: expected one writer a block, got numjobs=2; give each its own: directory instead of filename, or offset_increment",
        ),
        (
            "--output-format=jsno --name=a",
            "arguments: --output-format: expected normal or json, got \"jsno\"; correct it",
        ),
        (
            "--parse-only",
            "arguments: jobs: expected 1 to 256, got 0; write `terrace-bench --name=NAME --rw=read --size=1g`, or name a job file",
        ),
        (
            "word.fio",
            "job file: word.fio:4: blokcsize: expected one of fio's words that terrace-bench knows, got blokcsize; did you mean blocksize? `terrace-bench --help` lists all",
        ),
        (
            "value.fio",
            "job file: value.fio:2: rw: expected read, write, randread, randwrite, rw or randrw, got \"raed\"; did you mean read?",
        ),
        (
            "early.fio",
            "job file: early.fio:1: rw: expected a section before it, got none; begin with [global] or [NAME]",
        ),
        (
            "bracket.fio",
            "job file: bracket.fio:1: expected [NAME], got [a; close the bracket",
        ),
        (
            "variable.fio",
            "job file: variable.fio:2: size: expected a variable of the environment, got ${NO_SUCH_VARIABLE}, which is not set; set it",
        ),
        (
            "--name=a --filename=foreign --rw=write --size=4k",
            "file: foreign: expected a file that terrace-bench made, to write, got one that somebody else made; name a file that is not there yet",
        ),
        (
            "--name=a --filename=foreign --rw=read --size=4k",
            "file: foreign: expected at least 4096 bytes, got 25; lower size or offset",
        ),
        (
            "--name=a --filename=foreign --rw=read --size=4k --verify=xxh3",
            "file: foreign: expected blocks with headers, got a file of somebody else; verify works on files that terrace-bench wrote with verify",
        ),
        (
            "--name=a --filename=directory --rw=read --size=4k",
            "file: directory: expected a file or a block device, got a directory; name a file",
        ),
        (
            "--name=a --filename=absent --rw=read",
            "file: absent: expected a file that is there, got none; add size=1g to make one",
        ),
    ] {
        let line = room.bench(arguments).refused(2);
        assert_eq!(line, format!("terrace-bench: {message}"), "{arguments}");
    }
    let line = room.bench("no-such.fio").refused(4);
    assert_eq!(
        line,
        "terrace-bench: read: no-such.fio: No such file or directory (os error 2); options begin with --, other words are job files"
    );
    let line = room
        .bench("--name=a --directory=absent --size=4k")
        .refused(4);
    assert_eq!(
        line,
        "terrace-bench: create: absent/a.0.0: No such file or directory (os error 2); name a directory that is there and can be written"
    );
    let line = room
        .bench("--name=a --filename=huge --rw=write --size=900t")
        .refused(2);
    assert!(
        line.starts_with("terrace-bench: disk memory: needs 989560465002496 bytes"),
        "{line}"
    );
    assert!(
        line.ends_with("huge is too full; free space or lower size"),
        "{line}"
    );
    assert!(!room.path("huge").exists());
    assert_eq!(
        std::fs::read(room.path("foreign")).unwrap(),
        b"not of this tool's making"
    );
}

#[test]
fn every_kind_of_job_moves_its_bytes_on_both_engines_and_leaves_nothing() {
    let room = Room::new();
    for engine in ["io_uring", "pread"] {
        for rw in ["read", "write", "randread", "randwrite", "rw", "randrw"] {
            let json = room.json(&format!(
                "--name=a --rw={rw} --bs=16k --size=256k --iodepth=4 --ioengine={engine} --fsync=5"
            ));
            let job = &json["jobs"][0];
            let bytes = |side: &str| job[side]["io_bytes"].as_u64().unwrap();
            assert_eq!(
                bytes("read") + bytes("write"),
                256 << 10,
                "{engine} {rw}: {job}"
            );
            assert_eq!(
                bytes("read") > 0,
                rw.contains("read") || rw.ends_with("rw"),
                "{rw}"
            );
            assert_eq!(
                bytes("write") > 0,
                rw.contains("write") || rw.ends_with("rw"),
                "{rw}"
            );
            let flushes = job["sync"]["total_ios"].as_u64().unwrap();
            let writes = job["write"]["total_ios"].as_u64().unwrap();
            assert_eq!(flushes, writes.div_ceil(5), "{rw}");
            assert_eq!(job["error"], 0);
            assert!(room.listing().is_empty(), "{:?}", room.listing());
        }
    }
}

/// Every key below a value with its type, numbers alike; first elements stand for lists.
fn keys(value: &Value, path: &str, found: &mut BTreeMap<String, &'static str>) {
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "list",
        Value::Object(_) => "object",
    };
    found.insert(path.to_string(), kind);
    match value {
        Value::Object(entries) => {
            // What was given differs from run to run.
            let entries = entries.iter().filter(|_| !path.ends_with("job options"));
            entries.for_each(|(name, inner)| keys(inner, &format!("{path}/{name}"), found));
        }
        Value::Array(list) => {
            if let Some(first) = list.first() {
                keys(first, &format!("{path}/0"), found);
            }
        }
        _ => {}
    }
}

#[test]
fn json_has_every_key_of_fio_with_its_type() {
    let room = Room::new();
    let json = room.json("--name=r --rw=rw --bs=64k --size=1m --iodepth=4 --fsync=4");
    let (mut theirs, mut ours) = (BTreeMap::new(), BTreeMap::new());
    keys(&serde_json::from_str(FIO).unwrap(), "", &mut theirs);
    keys(&json, "", &mut ours);
    theirs.retain(|path, _| !path.starts_with("/disk_util"));
    assert!(theirs.len() > 150, "{}", theirs.len());
    for (path, kind) in &theirs {
        assert_eq!(ours.get(path), Some(kind), "{path}");
    }
    let job = &json["jobs"][0];
    for side in ["read", "write"] {
        let number = |name: &str| job[side][name].as_f64().unwrap();
        assert_eq!(number("io_bytes"), number("total_ios") * 65536.0);
        assert!((number("bw") - number("bw_bytes") / 1024.0).abs() <= 1.0);
        let lat = &job[side]["lat_ns"];
        let clat = &job[side]["clat_ns"];
        assert_eq!(lat["N"], job[side]["total_ios"]);
        assert!(lat["mean"].as_f64().unwrap() >= clat["mean"].as_f64().unwrap());
        let percentile = |name: &str| clat["percentile"][name].as_u64().unwrap();
        assert!(percentile("50.000000") <= percentile("99.000000"));
        assert!(percentile("99.990000") <= clat["max"].as_u64().unwrap());
    }
    let shares = ["latency_ns", "latency_us", "latency_ms"].map(|unit| {
        job[unit]
            .as_object()
            .unwrap()
            .values()
            .map(|share| share.as_f64().unwrap())
            .sum::<f64>()
    });
    assert!(
        (shares.iter().sum::<f64>() - 100.0).abs() < 0.01,
        "{shares:?}"
    );
}

#[test]
fn copies_are_reported_alone_or_as_a_group() {
    let room = Room::new();
    let job = "--name=a --rw=randread --bs=4k --size=64k --numjobs=3 --directory=.";
    let alone = room.json(job);
    assert_eq!(alone["jobs"].as_array().unwrap().len(), 3);
    let grouped = room.json(&format!("{job} --group_reporting"));
    assert_eq!(grouped["jobs"].as_array().unwrap().len(), 1);
    assert_eq!(grouped["jobs"][0]["read"]["io_bytes"], 3 * 65536);
    assert_eq!(grouped["jobs"][0]["terrace"]["copies"], 3);
    let text = room.bench(
        "--name=x --rw=read --bs=4k --size=64k --name=y --stonewall --rw=write --bs=4k --size=64k",
    );
    let text = text.success();
    for line in [
        "x: (groupid=0, jobs=1): err= 0",
        "y: (groupid=1, jobs=1): err= 0",
        "Run status group 1 (all jobs):",
    ] {
        assert!(text.lines().any(|have| have == line), "{line}: {text}");
    }
    let chosen = "--name=x --size=64k --name=y --size=64k --section=y --parse-only";
    let text = room.bench(chosen).success();
    assert_eq!(
        text,
        "y: (g=0): rw=read, bs=4KiB, ioengine=auto, iodepth=1, numjobs=1\n"
    );
    assert!(room.listing().is_empty());
}

#[test]
fn a_flipped_byte_is_found_and_named() {
    let room = Room::new();
    let job = "--name=a --filename=kept --bs=8k --size=128k --iodepth=4 --verify=xxh3 --unlink=0";
    let written = room.json(&format!("{job} --rw=randwrite"));
    // Everything was read back after writing.
    assert_eq!(written["jobs"][0]["read"]["io_bytes"], 128 << 10);
    assert_eq!(written["jobs"][0]["terrace"]["checksum_bytes"], 256 << 10);
    // A random order met every block once: none is without a header.
    room.bench(&format!("{job} --rw=read")).success();
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(room.path("kept"))
        .unwrap();
    file.write_all_at(&[0x55], 5 * 8192 + 4000).unwrap();
    for rw in ["read", "randread"] {
        let line = room
            .bench(&format!("{job} --rw={rw} --output=/dev/null"))
            .refused(3);
        let start =
            "terrace-bench: job a: kept: block of 8192 bytes at byte 40960: expected checksum ";
        let end = "; the bytes read are not those that were written: check the drive";
        assert!(line.starts_with(start) && line.ends_with(end), "{line}");
    }
    let json = room.bench(&format!("{job} --rw=read --output-format=json"));
    let json: Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!(json["jobs"][0]["error"], 84);
    // A block of another place, whole in itself.
    let mut block = vec![0; 8192];
    file.write_all_at(&block, 0).unwrap();
    let kept = std::fs::File::open(room.path("kept")).unwrap();
    kept.read_exact_at(&mut block, 3 * 8192).unwrap();
    file.write_all_at(&block, 5 * 8192).unwrap();
    file.write_all_at(&block, 0).unwrap();
    let line = room
        .bench(&format!("{job} --rw=read --output=/dev/null"))
        .refused(3);
    // Which of the two comes first is the disk's to say.
    let wrong = |at: u64| line.contains(&format!("expected offset {at}, got 24576"));
    assert!(wrong(0) || wrong(5 * 8192), "{line}");
}

#[test]
fn what_others_made_is_read_and_never_written() {
    let room = Room::new();
    let bytes: Vec<u8> = (0..65536u32).map(|i| (i % 251) as u8).collect();
    std::fs::write(room.path("foreign"), &bytes).unwrap();
    let json = room.json("--name=a --filename=foreign --rw=read --bs=4k");
    assert_eq!(json["jobs"][0]["read"]["io_bytes"], 65536);
    for rw in ["write", "randwrite", "rw", "randrw"] {
        room.bench(&format!(
            "--name=a --filename=foreign --rw={rw} --bs=4k --size=4k"
        ))
        .refused(2);
    }
    // A link to a file of this tool's making is not written through either.
    room.json("--name=a --filename=ours --rw=write --bs=4k --size=64k --unlink=0");
    std::os::unix::fs::symlink("ours", room.path("link")).unwrap();
    room.bench("--name=a --filename=link --rw=write --bs=4k --size=64k")
        .refused(2);
    // What was kept stays, and serves again.
    let ours = std::fs::metadata(room.path("ours")).unwrap().len();
    assert_eq!(ours, 65536 + 4096);
    room.json("--name=a --filename=ours --rw=randrw --bs=4k");
    assert!(room.path("ours").exists());
    assert_eq!(std::fs::read(room.path("foreign")).unwrap(), bytes);
    // A file that only looks like one of ours is not.
    let mut forged = std::fs::read(room.path("ours")).unwrap();
    forged.extend_from_slice(&[0; 4096]);
    std::fs::write(room.path("forged"), &forged).unwrap();
    room.bench("--name=a --filename=forged --rw=write --bs=4k --size=64k")
        .refused(2);
}

/// A run that only a signal ends, at work: something of its file is written.
fn endless(room: &Room, name: &str) -> std::process::Child {
    let job = format!(
        "--name=a --filename={name} --rw=randwrite --bs=4k --size=256k --time_based --runtime=1h"
    );
    let mut command = room.command(BENCH, &job);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = child.spawn().unwrap();
    let path = room.path(name);
    wait_for("a write", || {
        let bytes = std::fs::read(&path).unwrap_or_default();
        bytes.iter().take(256 << 10).any(|byte| *byte != 0)
    });
    child
}

fn signal(child: &std::process::Child, name: &str) {
    let status = Command::new("kill")
        .args([name, &child.id().to_string()])
        .status()
        .unwrap();
    assert!(status.success());
}

#[test]
fn a_signal_ends_it_with_its_report_and_its_files_removed() {
    let room = Room::new();
    for (name, code) in [("-INT", 130), ("-TERM", 143)] {
        let child = endless(&room, "made");
        signal(&child, name);
        let ended = Ended::from(child.wait_with_output().unwrap());
        assert_eq!(ended.code, code, "{ended:?}");
        assert!(
            ended.out.contains("a: (groupid=0, jobs=1): err= 0"),
            "{ended:?}"
        );
        assert!(room.listing().is_empty(), "{:?}", room.listing());
    }
}

#[test]
fn a_killed_runs_file_is_taken_over_and_two_runs_do_not_share_one() {
    let room = Room::new();
    let mut child = endless(&room, "left");
    let line = room
        .bench("--name=b --filename=left --rw=read --bs=4k")
        .refused(5);
    assert_eq!(
        line,
        "terrace-bench: left: in use by another process; stop it or choose another directory"
    );
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(room.path("left").exists());
    room.json("--name=b --filename=left --rw=rw --bs=4k --size=512k");
    assert!(room.listing().is_empty(), "{:?}", room.listing());
}

#[test]
fn a_rate_holds_a_job_back() {
    let room = Room::new();
    let started = Instant::now();
    // 16 blocks: the last may start after 15 of them at 64 a second.
    room.json("--name=a --rw=read --bs=4k --size=64k --rate_iops=64");
    assert!(
        started.elapsed() >= Duration::from_millis(230),
        "{:?}",
        started.elapsed()
    );
    let started = Instant::now();
    room.json("--name=a --rw=write --bs=4k --size=64k --rate=256k");
    assert!(
        started.elapsed() >= Duration::from_millis(230),
        "{:?}",
        started.elapsed()
    );
}

#[test]
fn a_report_is_one_file_that_needs_nothing_else() {
    let room = Room::new();
    let jobs = "--report=out.html --bs=4k --size=256k --name=<b>first --rw=randrw --name=second --stonewall --rw=read";
    room.bench(jobs).success();
    let html = std::fs::read_to_string(room.path("out.html")).unwrap();
    assert!(html.starts_with("<!doctype html>") && html.ends_with("</html>\n"));
    assert_eq!(html.matches("<section>").count(), 2);
    // Bandwidth and two directions of latencies; then one.
    assert_eq!(html.matches("<svg").count(), 3 + 2);
    assert_eq!(html.matches("<svg").count(), html.matches("</svg>").count());
    assert!(html.contains("&lt;b&gt;first") && !html.contains("<b>first"));
    for alien in ["<script", "http", "url(", "@import", "NaN", "inf"] {
        assert!(!html.contains(alien), "{alien}");
    }
    assert_eq!(room.listing().len(), 1);
}

const PROFILE: &str = r#"
version = 1
measured_at = "2026-11-29T23:42:24Z"
terrace_version = "0.1.0"
seconds = 60.0

[machine]
cpu = "a processor"
cores = 999
memory_bytes = 1

[host]
copy_bytes_per_second = 1e10
stream_bytes_per_second = 2e10
adamw_parameters_per_second = 1e9
checksum_bytes_per_second = 1e10
zstd_level = 1
zstd_compress_bytes_per_second = 1e9
zstd_decompress_bytes_per_second = 2e9
zstd_ratio = 0.8

[[device]]
name = "cpu"
gemm_flops_per_second = 1e12
promote_bytes_per_second = 5e9
demote_bytes_per_second = 6e9

[[store]]
path = "."
file_system = "ext4"
engine = "io_uring"
direct = true
bytes = 1
read_bytes_per_second = 3e9
write_bytes_per_second = 2e9
mixed_bytes_per_second = 2.5e9
"#;

const MODEL: &str = r#"{"architectures":["LlamaForCausalLM"],"model_type":"llama",
"vocab_size":1024,"hidden_size":32,"intermediate_size":64,"num_hidden_layers":2,
"num_attention_heads":2,"num_key_value_heads":1,"head_dim":16,"hidden_act":"silu",
"rms_norm_eps":1e-5,"rope_theta":10000.0,"max_position_embeddings":64,
"tie_word_embeddings":true,"torch_dtype":"bfloat16"}"#;

const RUN: &str = r#"
[model]
path = "model"
init = "random"
[data]
train = "text.txt"
seq_len = 16
[train]
steps = 4
[memory]
device = "64MiB"
host = "64MiB"
store = "spill"
"#;

fn planned(room: &Room, arguments: &str) -> Ended {
    room.command(TERRACE, &format!("plan run.toml {arguments}"))
        .output()
        .unwrap()
        .into()
}

fn room_with_a_run() -> Room {
    let room = Room::new();
    std::fs::create_dir(room.path("model")).unwrap();
    room.write("model/config.json", MODEL);
    room.write("run.toml", RUN);
    room
}

#[test]
fn a_plan_takes_its_rates_from_a_profile() {
    let room = room_with_a_run();
    room.write("profile.toml", PROFILE);
    let json = planned(&room, "--profile profile.toml --json").success();
    let rates = serde_json::from_str::<Value>(&json).unwrap()["rates"].clone();
    for (name, rate) in [
        ("gemm", 1e12),
        ("promote", 5e9),
        ("demote", 6e9),
        ("store_read", 3e9),
        ("store_write", 2e9),
        ("store_mixed", 2.5e9),
        ("adamw", 1e9),
    ] {
        assert_eq!(rates[name], rate, "{name}: {rates}");
    }
    // Of an earlier version: what it lacks is assumed.
    assert_eq!(rates["zstd"]["ratio"], ZstdRates::ASSUMED.ratio);
    let text = planned(&room, "--set memory.profile=profile.toml").success();
    let warned = "warning: profile.toml: measured on a processor, 999 cores, no GPU; this is ";
    assert!(text.lines().any(|line| line.starts_with(warned)), "{text}");
    assert!(
        text.contains("rates: profile.toml, measured 2026-11-29T23:42:24Z\n"),
        "{text}"
    );
    // A store on another file system than any that was measured.
    if Path::new("/dev/shm").is_dir() {
        let text = planned(
            &room,
            "--profile profile.toml --set memory.store=/dev/shm/absent",
        );
        let text = text.success();
        assert!(
            text.contains("warning: /dev/shm/absent was not measured"),
            "{text}"
        );
    } else {
        println!("SKIP: no /dev/shm");
    }
    for (from, to, message) in [
        (
            "version = 1",
            "version = 2",
            "profile: bad.toml: expected version 1, got 2; measure again: `terrace-bench profile -o profile.toml`",
        ),
        (
            "version = 1\n",
            "",
            "profile: bad.toml: expected version 1, got none; measure again: `terrace-bench profile -o profile.toml`",
        ),
        (
            "zstd_ratio",
            "zstd_ration",
            "profile: bad.toml:20: expected a profile, got unknown field `zstd_ration`, expected one of ",
        ),
        (
            "= 3e9",
            "= -3e9",
            "profile: bad.toml: .: read: expected a rate above 0, got -3000000000; measure again",
        ),
        (
            "= 3e9",
            "= nan",
            "profile: bad.toml: .: read: expected a rate above 0, got NaN; measure again",
        ),
        (
            "= 3e9",
            "= \"fast\"",
            "profile: bad.toml:34: expected a profile, got invalid type: string \"fast\", expected f64; measure again",
        ),
    ] {
        assert!(PROFILE.contains(from));
        room.write("bad.toml", &PROFILE.replacen(from, to, 1));
        let line = planned(&room, "--profile bad.toml").refused(2);
        assert!(line.starts_with(&format!("terrace: {message}")), "{line}");
    }
    let line = planned(&room, "--profile absent.toml").refused(4);
    assert_eq!(
        line,
        "terrace: read: absent.toml: No such file or directory (os error 2); `terrace-bench profile -o profile.toml` writes one"
    );
}

#[test]
fn stores_of_a_profile_work_at_once() {
    let room = Room::new();
    let (slow, fast) = (room.path("slow"), room.path("fast"));
    std::fs::create_dir(&slow).unwrap();
    std::fs::create_dir(&fast).unwrap();
    let second = PROFILE.split("[[store]]").nth(1).unwrap();
    let (slow_text, fast_text) = (slow.display().to_string(), fast.display().to_string());
    let text = PROFILE.replace("path = \".\"", &format!("path = {slow_text:?}"))
        + "[[store]]"
        + &second
            .replace("path = \".\"", &format!("path = {fast_text:?}"))
            .replace("= 2.5e9", "= 7.5e9");
    let profile = Profile::parse(&text, "two").unwrap();
    let cpu = terrace::plan::DeviceProfile::cpu();
    let stores = [(slow, 9 << 30), (fast, 1 << 30)];
    let (rates, _) = profile.rates(Path::new("two"), &cpu, &stores).unwrap();
    // A quarter and three quarters of the bytes, by their rates and not by their sizes.
    assert_eq!(rates.store_mixed, 10e9);
    assert_eq!(rates.store_read, 4e9);
    let (rates, notes) = profile.rates(Path::new("two"), &cpu, &stores[..1]).unwrap();
    assert_eq!(rates.store_mixed, 2.5e9);
    assert!(notes.iter().all(|note| !note.contains("was not measured")));
}

#[test]
fn a_profile_measures_every_hop_and_comes_back_as_it_was() {
    let room = room_with_a_run();
    let before = room.listing();
    let text =
        room.bench("profile -o profile.toml --store . --bytes 8MiB --seconds 0 --engine pread");
    let text = text.success();
    for name in [
        "host copy",
        "adamw",
        "checksum",
        "zstd",
        "zstd of spilled",
        "gemm",
        "host to device",
        "device to host",
        "store write",
        "store read",
        "store mixed",
    ] {
        assert!(
            text.lines().any(|line| line.starts_with(name)),
            "{name}: {text}"
        );
    }
    let profile = Profile::read(&room.path("profile.toml")).unwrap();
    assert_eq!(Profile::parse(&profile.text(), "again").unwrap(), profile);
    let cpu = terrace::plan::DeviceProfile::cpu();
    let (rates, _) = profile.rates(Path::new("here"), &cpu, &[]).unwrap();
    assert_eq!(rates.cores as usize, profile.machine.cores);
    assert_eq!(
        Some(rates.zstd.encode),
        profile.host.moments_encode_bytes_per_second
    );
    assert_eq!(
        Some(rates.zstd.decode),
        profile.host.moments_decode_bytes_per_second
    );
    // As real moments after a few steps: 0.83.
    assert!(
        (0.82..0.85).contains(&rates.zstd.ratio),
        "{}",
        rates.zstd.ratio
    );
    let store = profile.store_rates(room.dir.path()).unwrap();
    assert_eq!((store.bytes, store.engine.as_str()), (8 << 20, "pread"));
    let planned = planned(&room, "--profile profile.toml").success();
    assert!(!planned.contains("warning"), "{planned}");
    // Nothing else is left, and nothing is replaced unasked.
    std::fs::remove_file(room.path("profile.toml")).unwrap();
    assert_eq!(room.listing(), before);
    room.write("profile.toml", "mine");
    let line = room.bench("profile -o profile.toml").refused(2);
    assert_eq!(
        line,
        "terrace-bench: arguments: --output profile.toml: expected a file that does not exist, got one that is there; name another, or add --overwrite"
    );
}

#[test]
fn hops_prints_json_and_leaves_what_was_there() {
    let room = Room::new();
    std::fs::create_dir(room.path("terrace-bench.0")).unwrap();
    let before = room.listing();
    let out = room.bench("hops . --bytes 8MiB --json").success();
    let hops: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(hops["store"][0]["bytes"], 8 << 20);
    assert!(hops["host"]["checksum_bytes_per_second"].as_f64().unwrap() > 0.0);
    let absent = room.bench("hops absent").refused(4);
    let start = "terrace-bench: make: absent/terrace-bench.";
    let end =
        "No such file or directory (os error 2); name a directory that is there and can be written";
    assert!(
        absent.starts_with(start) && absent.ends_with(end),
        "{absent}"
    );
    room.bench("hops . --bytes 8").refused(2);
    assert_eq!(room.listing(), before);
}

#[test]
fn help_names_every_option() {
    let room = Room::new();
    let help = room.bench("--help").success();
    for word in WORDS {
        assert!(help.contains(&format!("--{}", word.name)), "{}", word.name);
    }
    for word in [
        "profile",
        "hops",
        "--report",
        "--output-format",
        "--parse-only",
    ] {
        assert!(help.contains(word), "{word}");
    }
    assert!(
        help.lines().all(|line| line.chars().count() <= 130),
        "{help}"
    );
}

/// A read job with another bs, or without a size, wrote a kept file anew and called it good.
#[test]
fn a_kept_file_is_not_replaced_by_reading_it() {
    let room = Room::new();
    let run = |options: &str| room.bench(&format!("--name=a --filename=f --verify=xxh3 {options}"));
    run("--rw=write --bs=16k --size=256k --unlink=0").success();
    run("--rw=read --bs=16k").success();
    let mut bytes = std::fs::read(room.path("f")).unwrap();
    bytes[100_000] ^= 1;
    std::fs::write(room.path("f"), &bytes).unwrap();
    for (options, code) in [
        ("--rw=read --bs=16k", 3),
        ("--rw=read --bs=16k --size=256k", 3),
        ("--rw=read --bs=32k --size=256k", 2),
        ("--rw=randread --bs=4k", 2),
        ("--rw=read --bs=16k --size=512k", 2),
    ] {
        let ended = run(options);
        assert_eq!(ended.code, code, "{options}: {ended:?}");
        assert!(
            std::fs::read(room.path("f")).unwrap() == bytes,
            "{options} wrote"
        );
    }
}
