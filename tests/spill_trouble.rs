//! Goal: trouble of the disk in the middle of a spilled update is a run that ends clearly or goes
//! on slowly, never a wrong loss; and what was committed is gone on from, bitwise.
//! Method: the real binary trains a tiny model with its moments spilled and stops itself (SIGSTOP)
//! in the middle of an update; the test then makes the disk fail, fill up, forget or slow down, and
//! lets it go on. What it says is held to what it must name, its losses and, after a resume, the
//! bytes of its last commit to those of a run that was never disturbed.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

#[path = "support/fault_fs.rs"]
mod fault_fs;
#[path = "support/machine.rs"]
mod machine;

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;

use fault_fs::{FaultFs, FsFaults, Transfer};
use machine::{ENGINES, Mount, lacks, run, skip, wait_for};
use terrace::config::IoEngine;
use terrace::host::HostArena;
use terrace::store::{CheckpointStore, checksum};
use terrace::tile::EXTENT_BYTES_MAX;

const STEPS: u64 = 9;
const EVERY: u64 = 3;
/// In the middle of step 7's update: its second extents' tile. The commit of step 3 is durable;
/// that of step 6 may be under way.
const MIDDLE: &str = "update:update:7:2";
/// Room for weights, gradients, slabs and some residuals; the other residuals and all moments
/// spill.
const HOST_BYTES: u64 = 532_144;

const MODEL: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97,
  "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
  "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-05, "hidden_act": "silu",
  "rope_parameters": { "rope_theta": 10000.0, "rope_type": "default" },
  "max_position_embeddings": 128, "initializer_range": 0.02, "tie_word_embeddings": false,
  "attention_bias": false, "mlp_bias": false, "bos_token_id": 1, "eos_token_id": 2,
  "dtype": "float32"
}"#;

/// Settings under which weights and the first block's anchors spill too: nothing of a run's numbers
/// depends on them.
const SMALLEST: &[&str] = &[
    "--set",
    "memory.device=236288B",
    "--set",
    "memory.host=460000B",
];
/// Settings under which moments are compressed on their way to the store, with memory for that.
const ZSTD: &[&str] = &["--set", "memory.zstd=on", "--set", "memory.host=663216B"];
/// Bytes of an anchor there: no other extent has so few.
const ANCHOR_BYTES: u64 = 4096;

/// A run's directory, and arguments of every command in it.
struct Place(tempfile::TempDir, &'static [&'static str]);

/// What a run came to: lines of steps without what the clock says, and checksums of extents.
#[derive(PartialEq)]
struct Outcome {
    steps: BTreeMap<u64, String>,
    state: BTreeMap<String, u128>,
}

impl Place {
    fn new() -> Place {
        Place::with(&[])
    }

    fn with(settings: &'static [&'static str]) -> Place {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let place = Place(directory, settings);
        let path = |name: &str| place.path(name);
        for name in ["model", "store"] {
            std::fs::create_dir(path(name)).unwrap();
        }
        std::fs::write(path("model/config.json"), MODEL).unwrap();
        let rows = (0..40u64).map(|row| {
            let ids: Vec<u64> = (0..5 + row * 7 % 23)
                .map(|i| (row * 31 + i * i * 7) % 97)
                .collect();
            format!("{{\"input_ids\": {ids:?}}}\n")
        });
        std::fs::write(path("rows.jsonl"), rows.collect::<String>()).unwrap();
        let run = format!(
            "[model]\npath = {:?}\ninit = \"random\"\n\
             [data]\ntrain = {:?}\nseq_len = 32\n\
             [train]\nsteps = {STEPS}\nmicro_batches = 2\nlearning_rate = 1e-2\nseed = 5\n\
             [memory]\ndevice = \"64 MiB\"\nhost = \"{HOST_BYTES}B\"\nslabs = 4\n\
             store = [{{ path = {:?}, size = \"1 MiB\" }}]\n\
             [checkpoint]\nevery = {EVERY}\nkeep = 2\n\
             [log]\ndir = {:?}\n",
            path("model"),
            path("rows.jsonl"),
            path("store"),
            path("log"),
        );
        std::fs::write(path("run.toml"), run).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, engine: IoEngine, arguments: &[&str]) -> Command {
        let engine = match engine {
            IoEngine::Uring => "memory.io_engine=io_uring",
            IoEngine::Pread => "memory.io_engine=pread",
        };
        let mut command = Command::new(env!("CARGO_BIN_EXE_terrace"));
        command
            .arg("train")
            .arg(self.path("run.toml"))
            .args(["--device", "cpu", "--set", engine])
            .args(self.1)
            .args(arguments)
            .env("RAYON_NUM_THREADS", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn train(&self, engine: IoEngine, arguments: &[&str]) -> Output {
        self.command(engine, arguments).output().unwrap()
    }

    /// Starts a run and returns when it has stopped itself in the middle of an update.
    fn stopped(&self, engine: IoEngine) -> Stopped {
        self.stopped_at(engine, MIDDLE)
    }

    /// As [`Place::stopped`], at another instant.
    fn stopped_at(&self, engine: IoEngine, instant: &str) -> Stopped {
        let signal = libc::SIGSTOP.to_string();
        let at = ["--kill-at", instant, "--kill-signal", &signal];
        let child = self.command(engine, &at).spawn();
        let stopped = Stopped(Some(child.unwrap()));
        // SAFETY: the structure is all integers and pointers.
        let mut told: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let what = libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT;
        // SAFETY: a structure that outlives the call. The child can still be waited for after.
        let refused = unsafe { libc::waitid(libc::P_PID, stopped.id(), &raw mut told, what) };
        assert_eq!(refused, 0);
        match told.si_code {
            libc::CLD_STOPPED => stopped,
            _ => panic!("{}", words(&stopped.go_on())),
        }
    }

    fn steps(&self) -> BTreeMap<u64, String> {
        let text = std::fs::read_to_string(self.path("log/metrics.jsonl")).unwrap();
        let values = text.lines().map(|line| serde_json::from_str(line).unwrap());
        let lines = values.filter(|value: &serde_json::Value| value.get("loss").is_some());
        let kept = lines.map(|value| {
            let keys = ["loss", "grad_norm", "learning_rate", "tokens", "targets"];
            let line = keys.map(|key| value[key].to_string()).join(" ");
            (value["step"].as_u64().unwrap(), line)
        });
        kept.collect()
    }

    fn outcome(&self) -> Outcome {
        let store = CheckpointStore::open_existing(&self.path("log/checkpoint")).unwrap();
        let newest = store.latest().unwrap();
        let mut cutter = HostArena::take(EXTENT_BYTES_MAX).unwrap();
        let ring = cutter.cut_ring(1, EXTENT_BYTES_MAX);
        let mut state = BTreeMap::new();
        let table = store.table().unwrap();
        for index in 0..table.count() {
            let key = table.key(index);
            let slab = store.read(newest, key, ring.take()).unwrap();
            let bytes = &slab.as_slice::<u8>()[..table.payload_bytes(index)];
            state.insert(key.to_string(), checksum(bytes));
        }
        let steps = self.steps();
        Outcome { steps, state }
    }

    /// Holds a run that ended with an error of its store to what it must say, and goes on from its
    /// last commit. Returns its line.
    fn assert_ended_and_resumes(
        &self,
        engine: IoEngine,
        ended: &Output,
        code: i32,
        parts: &[&str],
    ) -> String {
        let said = words(ended);
        assert_eq!(ended.status.code(), Some(code), "{said}");
        let errors = String::from_utf8_lossy(&ended.stderr);
        let line = errors.lines().last().unwrap_or_default().to_string();
        for once in ["terrace: ", "scratch.tiles", "the last commit is"] {
            assert_eq!(errors.matches(once).count(), 1, "{once}: {said}");
        }
        let scratch = self.path("store/scratch.tiles");
        let named = [
            "extent",
            &scratch.display().to_string(),
            "the last commit is step ",
        ];
        for part in named.iter().chain(parts) {
            assert!(line.contains(part), "{part}: {said}");
        }
        let last = line.split("the last commit is step ").nth(1).unwrap();
        let last: u64 = last.split(' ').next().unwrap().parse().unwrap();
        assert!([3, 6].contains(&last), "{said}");
        for (step, line) in self.steps() {
            assert_eq!(line, UNDISTURBED.steps[&step], "{said}");
        }
        self.assert_resumes(engine, last);
        line
    }

    /// Resumes, from the commit of step `last`, and holds the end to the undisturbed run's.
    fn assert_resumes(&self, engine: IoEngine, last: u64) {
        let resumed = self.train(engine, &["--resume"]);
        let said = words(&resumed);
        assert!(resumed.status.success(), "{said}");
        let first = format!("\nstep {}/{STEPS}: ", last + 1);
        let before = format!("\nstep {last}/{STEPS}: ");
        assert!(said.contains(&first) && !said.contains(&before), "{said}");
        self.assert_undisturbed(&said);
    }

    fn assert_undisturbed(&self, said: &str) {
        let (got, plain) = (self.outcome(), &*UNDISTURBED);
        assert_eq!(got.steps, plain.steps, "{said}");
        assert!(got.state == plain.state, "{said}");
    }
}

/// The run that nothing disturbed.
static UNDISTURBED: LazyLock<Outcome> = LazyLock::new(|| {
    let place = Place::new();
    let output = place.train(IoEngine::Pread, &[]);
    let said = words(&output);
    assert!(output.status.success(), "{said}");
    let moments = said.lines().filter(|line| line.starts_with("  moment"));
    // Device, host, store.
    let homes = moments.map(|line| line.split_whitespace().nth(2) == Some("-"));
    assert_eq!(homes.collect::<Vec<_>>(), [true, true], "{said}");
    let outcome = place.outcome();
    assert_eq!(outcome.steps.len() as u64, STEPS);
    outcome
});

fn words(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

/// A run that stopped itself. It is killed when dropped, also by a panic.
struct Stopped(Option<Child>);

impl Stopped {
    fn id(&self) -> u32 {
        self.0.as_ref().unwrap().id()
    }

    /// Lets it go on, to its end.
    fn go_on(mut self) -> Output {
        let child = self.0.take().unwrap();
        // SAFETY: a signal to a child that is not waited for yet.
        unsafe { libc::kill(child.id() as i32, libc::SIGCONT) };
        child.wait_with_output().unwrap()
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            child.kill().ok();
            child.wait().ok();
        }
    }
}

#[test]
fn a_transfer_that_fails_ends_the_run_with_its_tile_and_the_last_commit() {
    if let Some(reason) = lacks(&[]) {
        return skip("a transfer that fails", &reason);
    }
    for (engine, kind, errno, settings) in [
        (IoEngine::Uring, Transfer::Read, libc::EIO, &[][..]),
        (IoEngine::Pread, Transfer::Write, libc::EIO, &[]),
        (IoEngine::Uring, Transfer::Write, libc::ENOSPC, &[]),
        (IoEngine::Pread, Transfer::Read, libc::EIO, ZSTD),
        (IoEngine::Uring, Transfer::Write, libc::EIO, ZSTD),
    ] {
        let place = Place::with(settings);
        let fs = match FaultFs::mount(&place.path("store")) {
            Ok(fs) => fs,
            Err(error) => return skip("a transfer that fails", &format!("FUSE: {error}")),
        };
        let stopped = place.stopped(engine);
        fs.set_faults(FsFaults {
            error_at: Some(2),
            only: Some(kind),
            errno: Some(errno),
            ..FsFaults::default()
        });
        let ended = stopped.go_on();
        let requests = fs.request_count();
        assert!(requests >= 2, "{requests} of {kind:?}: {}", words(&ended));
        fs.set_faults(FsFaults::default());
        let action = match kind {
            Transfer::Read => "terrace: read of tile",
            Transfer::Write => "terrace: write of tile",
        };
        let system = format!("(os error {errno})");
        let line = place.assert_ended_and_resumes(engine, &ended, 4, &[action, &system]);
        println!("{engine:?}: {line}");
    }
}

#[test]
fn killed_in_an_update_a_run_leaves_its_store_empty_and_goes_on() {
    for (engine, settings) in ENGINES.map(|e| [(e, &[][..]), (e, ZSTD)]).concat() {
        let place = Place::with(settings);
        let mut stopped = place.stopped(engine);
        let mut child = stopped.0.take().unwrap();
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGKILL));
        let said = words(&output).contains("zstd of spilled moments: on (memory.zstd)");
        assert_eq!(said, settings == ZSTD, "{}", words(&output));
        let left = std::fs::read_dir(place.path("store")).unwrap();
        let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["scratch.lock"]);
        let store = CheckpointStore::open_existing(&place.path("log/checkpoint")).unwrap();
        let metadata = store.metadata(store.latest().unwrap()).unwrap();
        drop(store);
        let metadata: serde_json::Value = serde_json::from_slice(&metadata).unwrap();
        place.assert_resumes(engine, metadata["step"].as_u64().unwrap());
    }
}

#[test]
fn an_anchor_that_fails_on_its_way_ends_the_run_with_its_layer_and_the_last_commit() {
    if let Some(reason) = lacks(&[]) {
        return skip("an anchor that fails", &reason);
    }
    for (engine, kind, instant, action) in [
        (
            IoEngine::Uring,
            Transfer::Write,
            "down:demoteanchor:7:2",
            "terrace: write of tile 1.1 anchor",
        ),
        (
            IoEngine::Pread,
            Transfer::Read,
            "up:promoteanchor:7",
            "terrace: read of tile 1.0 anchor",
        ),
    ] {
        let place = Place::with(SMALLEST);
        let fs = match FaultFs::mount(&place.path("store")) {
            Ok(fs) => fs,
            Err(error) => return skip("an anchor that fails", &format!("FUSE: {error}")),
        };
        let stopped = place.stopped_at(engine, instant);
        fs.set_faults(FsFaults {
            error_from: Some(1),
            only: Some(kind),
            bytes: Some(ANCHOR_BYTES),
            ..FsFaults::default()
        });
        let ended = stopped.go_on();
        fs.set_faults(FsFaults::default());
        let line = place.assert_ended_and_resumes(engine, &ended, 4, &[action, "(os error 5)"]);
        println!("{engine:?}: {line}");
    }
}

#[test]
fn killed_between_an_anchors_write_and_its_read_a_run_goes_on() {
    for engine in ENGINES {
        let place = Place::with(SMALLEST);
        let mut stopped = place.stopped_at(engine, "up:promoteanchor:8:2");
        let mut child = stopped.0.take().unwrap();
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        let said = words(&output);
        let anchors = said.lines().find(|line| line.contains("anchors between"));
        // Device, host, store.
        let homes: Vec<&str> = anchors.unwrap().split_whitespace().skip(5).collect();
        assert_eq!(homes, ["-", "-", "8.00", "KiB"], "{said}");
        let store = CheckpointStore::open_existing(&place.path("log/checkpoint")).unwrap();
        let metadata = store.metadata(store.latest().unwrap()).unwrap();
        drop(store);
        let metadata: serde_json::Value = serde_json::from_slice(&metadata).unwrap();
        place.assert_resumes(engine, metadata["step"].as_u64().unwrap());
    }
}

/// A drive: ext4 on a loop device on a sparse file of a small tmpfs, mounted where the store is.
struct Drive {
    /// Unmounted first.
    _store: Mount,
    _backing: Mount,
    image: PathBuf,
    /// `MAJOR:MINOR`.
    device: String,
}

impl Drive {
    fn new(place: &Place) -> Result<Drive, String> {
        let programs = ["mount", "losetup", "mkfs.ext4", "findmnt", "fallocate"];
        if let Some(reason) = lacks(&programs) {
            return Err(reason);
        }
        let backing = place.path("backing");
        std::fs::create_dir(&backing).map_err(|e| e.to_string())?;
        let size = ["-t", "tmpfs", "-o", "size=16m", "tmpfs"];
        let backing_mount = Mount::new(&size, &backing)?;
        let image = backing.join("image");
        let store = Mount::on_image("ext4", &image, 64 << 20, &place.path("store"))?;
        let mut find = Command::new("findmnt");
        find.args(["-n", "-o", "MAJ:MIN"]).arg(place.path("store"));
        let device = run(&mut find)?.trim().to_string();
        Ok(Drive {
            _store: store,
            _backing: backing_mount,
            image,
            device,
        })
    }
}

/// Without an error: zeros where the moments were.
#[test]
fn a_drive_that_forgets_ends_the_run() {
    for (engine, settings, instant) in [
        (IoEngine::Pread, &[][..], MIDDLE),
        (IoEngine::Uring, &[][..], MIDDLE),
        (IoEngine::Uring, ZSTD, MIDDLE),
        (IoEngine::Pread, SMALLEST, "up:promoteanchor:7:2"),
    ] {
        let place = Place::with(settings);
        let drive = match Drive::new(&place) {
            Ok(drive) => drive,
            Err(reason) => return skip("a drive that forgets", &reason),
        };
        let stopped = place.stopped_at(engine, instant);
        let mut punch = Command::new("fallocate");
        punch.args(["--punch-hole", "--offset", "0", "--length", "64MiB"]);
        run(punch.arg(&drive.image)).unwrap();
        let ended = stopped.go_on();
        drop(drive);
        // The directory below, with nothing mounted there, is as good.
        let line = place.assert_ended_and_resumes(engine, &ended, 3, &["checksum expected"]);
        println!("{engine:?}: {line}");
    }
}

/// A thinly provisioned drive promises more than there is: what was reserved has no room.
#[test]
fn a_drive_that_is_thinner_than_it_says_ends_the_run() {
    let place = Place::new();
    let drive = match Drive::new(&place) {
        Ok(drive) => drive,
        Err(reason) => return skip("a thin drive", &reason),
    };
    let filler = drive.image.with_file_name("filler");
    let file = std::fs::File::create(&filler).unwrap();
    while std::io::Write::write_all(&mut &file, &[1; 4096]).is_ok() {}
    let ended = place.train(IoEngine::Uring, &[]);
    let said = words(&ended);
    assert_eq!(ended.status.code(), Some(4), "{said}");
    let last = said.lines().last().unwrap();
    println!("{last}");
    for part in ["terrace: write of tile", "scratch.tiles", "(os error "] {
        assert!(last.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("step 1/"), "{said}");
    drop(file);
    std::fs::remove_file(filler).unwrap();
    drop(drive);
    let again = place.train(IoEngine::Uring, &[]);
    place.assert_undisturbed(&words(&again));
}

/// A cgroup of blkio that lets little through to a device; removed when dropped.
struct Throttle(PathBuf);

impl Throttle {
    fn new(name: &str, device: &str, bytes_per_second: u64) -> Result<Throttle, String> {
        let blkio = Path::new("/sys/fs/cgroup/blkio");
        if !blkio.join("blkio.throttle.read_bps_device").exists() {
            return Err("no blkio cgroup (version 1) with throttling".to_string());
        }
        let group = Throttle(blkio.join(name));
        std::fs::create_dir(&group.0).map_err(|e| e.to_string())?;
        for direction in ["read", "write"] {
            let file = format!("blkio.throttle.{direction}_bps_device");
            let rule = format!("{device} {bytes_per_second}");
            std::fs::write(group.0.join(file), rule).map_err(|e| e.to_string())?;
        }
        Ok(group)
    }

    fn take(&self, process: u32) {
        std::fs::write(self.0.join("cgroup.procs"), process.to_string()).unwrap();
    }

    /// Bytes that went through.
    fn bytes(&self, device: &str, direction: &str) -> u64 {
        let file = self.0.join("blkio.throttle.io_service_bytes");
        let text = std::fs::read_to_string(file).unwrap();
        let start = format!("{device} {direction} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&start));
        line.map_or(0, |bytes| bytes.parse().unwrap())
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        wait_for("the cgroup to be empty", || {
            std::fs::remove_dir(&self.0).is_ok()
        })
        .ok();
    }
}

#[test]
fn a_drive_that_became_slow_makes_the_run_slow_and_nothing_else() {
    const BYTES_PER_SECOND: u64 = 256 << 10;
    for engine in ENGINES {
        let place = Place::new();
        let drive = match Drive::new(&place) {
            Ok(drive) => drive,
            Err(reason) => return skip("a slow drive", &reason),
        };
        let stopped = place.stopped(engine);
        let name = format!("terrace-test-{}", stopped.id());
        let throttle = match Throttle::new(&name, &drive.device, BYTES_PER_SECOND) {
            Ok(throttle) => throttle,
            Err(reason) => return skip("a slow drive", &reason),
        };
        throttle.take(stopped.id());
        let started = std::time::Instant::now();
        let ended = stopped.go_on();
        let said = words(&ended);
        assert!(ended.status.success(), "{said}");
        let moved = ["Read", "Write"].map(|way| throttle.bytes(&drive.device, way));
        println!(
            "{engine:?}: {moved:?} bytes read and written at {BYTES_PER_SECOND} B/s, {:.2} s",
            started.elapsed().as_secs_f64()
        );
        // The rest of step 7, steps 8 and 9, and more than half a megabyte of moments in each.
        assert!(moved.iter().all(|bytes| *bytes > 400 << 10), "{moved:?}");
        place.assert_undisturbed(&said);
    }
}
