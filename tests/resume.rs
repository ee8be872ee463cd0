//! Goal: resume is invisible (invariant 2). A run that is killed anywhere and resumed ends with the
//! same losses and the same bytes of every section as the run that was never stopped.
//! Method: the real binary trains a tiny model with its states spilled, and sends itself SIGKILL at
//! chosen instants: in forward, backward, update and transfers, at each phase of a commit, and at
//! an action of the next step while a commit is in a phase. The instants that were reached are
//! counted. Then what else a resume promises: signals, other settings, older commits, moved files,
//! disks that are full or fail.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{LazyLock, Mutex};

use terrace::host::HostArena;
use terrace::store::{CheckpointStore, Phase, checksum};
use terrace::tile::EXTENT_BYTES_MAX;

const STEPS: u64 = 20;
const EVERY: u64 = 3;
const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

const MODEL: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97,
  "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
  "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-05, "hidden_act": "silu",
  "rope_parameters": { "rope_theta": 10000.0, "rope_type": "default" },
  "max_position_embeddings": 128, "initializer_range": 0.02, "tie_word_embeddings": false,
  "attention_bias": false, "mlp_bias": false, "bos_token_id": 1, "eos_token_id": 2,
  "dtype": "float32"
}"#;

/// A run's directory.
struct Place(tempfile::TempDir);

/// What a run came to.
#[derive(PartialEq)]
struct Outcome {
    /// Lines of steps, by step, without what the clock says.
    steps: BTreeMap<u64, String>,
    /// Checksums of extents, by extent.
    state: BTreeMap<String, u128>,
    /// Step, tokens and cursor of the last commit.
    progress: String,
}

impl Place {
    fn new() -> Place {
        let place = Place(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        let path = |name: &str| place.path(name);
        std::fs::create_dir(path("model")).unwrap();
        std::fs::write(path("model/config.json"), MODEL).unwrap();
        let rows = (0..40u64).map(|row| {
            let length = 5 + row * 7 % 23;
            let ids: Vec<u64> = (0..length).map(|i| (row * 31 + i * i * 7) % 97).collect();
            format!("{{\"input_ids\": {ids:?}}}\n")
        });
        std::fs::write(path("rows.jsonl"), rows.collect::<String>()).unwrap();
        let run = format!(
            "[model]\npath = {:?}\ninit = \"random\"\n\
             [data]\ntrain = {:?}\nseq_len = 32\n\
             [train]\nsteps = {STEPS}\nmicro_batches = 2\nlearning_rate = 1e-2\nseed = 5\n\
             [memory]\ndevice = \"64 MiB\"\nhost = \"{HOST_BYTES}B\"\nslabs = 4\n\
             store = [{{ path = {:?}, size = \"64 MiB\" }}]\n\
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

    fn train(&self, arguments: &[&str]) -> Output {
        let output = Command::new(env!("CARGO_BIN_EXE_terrace"))
            .arg("train")
            .arg(self.path("run.toml"))
            .args(["--device", "cpu"])
            .args(arguments)
            .env("RAYON_NUM_THREADS", "1")
            .output();
        output.unwrap()
    }

    /// Trains until the commit of step 3 is there, and a line of a later step.
    fn kill_after_step_3_is_committed(&self) {
        let output = self.train(&["--kill-at", "compute:forward:5@superblock:1"]);
        assert_eq!(output.status.signal(), Some(SIGKILL), "{}", words(&output));
        assert_eq!(self.newest_commit(), Some(3));
    }

    /// Trains with files of at most `blocks` of 512 bytes.
    fn train_limited(&self, blocks: u64, arguments: &[&str]) -> Output {
        let output = Command::new("sh")
            .args(["-c", &format!("ulimit -f {blocks}; exec \"$0\" \"$@\"")])
            .arg(env!("CARGO_BIN_EXE_terrace"))
            .arg("train")
            .arg(self.path("run.toml"))
            .args(["--device", "cpu"])
            .args(arguments)
            .env("RAYON_NUM_THREADS", "1")
            .output();
        output.unwrap()
    }

    /// Trains to the end, or panics with what the run said.
    fn train_to_end(&self, arguments: &[&str]) -> String {
        let output = self.train(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", words(&output));
        words(&output)
    }

    fn steps(&self) -> BTreeMap<u64, String> {
        let text = std::fs::read_to_string(self.path("log/metrics.jsonl")).unwrap();
        let mut steps = BTreeMap::new();
        for line in text.lines() {
            let value: serde_json::Value = serde_json::from_str(line).unwrap();
            if value.get("loss").is_none() {
                continue;
            }
            let keys = ["loss", "grad_norm", "learning_rate", "tokens", "targets"];
            let kept = keys.map(|key| value[key].to_string()).join(" ");
            let step = value["step"].as_u64().unwrap();
            assert_eq!(steps.insert(step, kept), None, "step {step} has one line");
        }
        steps
    }

    /// Step of the newest commit.
    fn newest_commit(&self) -> Option<u64> {
        let directory = self.path("log/checkpoint");
        if !CheckpointStore::exists(&directory) {
            return None;
        }
        let store = CheckpointStore::open_existing(&directory).unwrap();
        let metadata = store.metadata(store.latest()?).unwrap();
        let metadata: serde_json::Value = serde_json::from_slice(&metadata).unwrap();
        metadata["step"].as_u64()
    }

    fn outcome(&self) -> Outcome {
        let directory = self.path("log/checkpoint");
        let store = CheckpointStore::open_existing(&directory).unwrap();
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
        let metadata: serde_json::Value =
            serde_json::from_slice(&store.metadata(newest).unwrap()).unwrap();
        let progress = ["step", "tokens", "cursor"].map(|key| metadata[key].to_string());
        Outcome {
            steps: self.steps(),
            state,
            progress: progress.join(" "),
        }
    }

    /// Holds the finished run to the one that was never stopped.
    fn assert_undisturbed(&self, story: &str) {
        let (got, plain) = (self.outcome(), &*UNDISTURBED);
        assert_eq!(got.steps, plain.steps, "{story}");
        assert_eq!(got.progress, plain.progress, "{story}");
        let pairs = got.state.iter().zip(&plain.state);
        let other: Vec<_> = pairs.filter(|(a, b)| a != b).map(|(a, _)| a.0).collect();
        assert!(
            other.is_empty() && got.state.len() == plain.state.len(),
            "{story}: {other:?}"
        );
    }
}

/// Bytes of the ring that commits are written through.
const COMMIT_RING_BYTES: u64 = 8 * 32_768;
/// Bytes for that, weights, gradients and some residuals; the other residuals and all moments
/// spill.
const HOST_BYTES: u64 = COMMIT_RING_BYTES + 270_000;

/// The run that was never stopped.
static UNDISTURBED: LazyLock<Outcome> = LazyLock::new(|| {
    let place = Place::new();
    println!("{}", place.train_to_end(&[]));
    let outcome = place.outcome();
    assert_eq!(outcome.steps.len() as u64, STEPS);
    assert!(place.path("store").exists());
    outcome
});

fn words(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

/// An instant to be killed at, and the steps of which one is the newest commit that is left; 0 is
/// none.
#[derive(Clone, Debug)]
struct Kill(String, Vec<u64>);

fn kill(instant: &str) -> Kill {
    let (at, beside) = instant.split_once('@').unwrap_or((instant, ""));
    let parts: Vec<&str> = match beside {
        "" => at.split(':').collect(),
        phase => ["commit"].into_iter().chain(phase.split(':')).collect(),
    };
    let number: u64 = parts[2].parse().unwrap();
    let left = if parts[0] == "commit" {
        // The number counts the commits of a process that began at step 0.
        let holds = matches!(parts[1], "superblockhalf" | "superblock");
        match (beside, holds) {
            // The commit goes on until the other lane comes to its instant.
            (beside, false) if !beside.is_empty() => vec![EVERY * (number - 1), EVERY * number],
            (_, holds) => vec![EVERY * if holds { number } else { number - 1 }],
        }
    } else {
        // The last one that was due may still be under way.
        let due = (number - 1) / EVERY * EVERY;
        vec![due, due.saturating_sub(EVERY)]
    };
    Kill(instant.to_string(), left)
}

/// Each run's kills, one after another; a second one hits the run that was resumed.
fn stories() -> Vec<Vec<Kill>> {
    let stories: [&[&str]; 34] = [
        &["compute:forward:2"],
        &["compute:forward:7:3", "compute:forward:9:2"],
        &["compute:forward:14:6"],
        &["compute:forward:20"],
        &["compute:backward:1"],
        &["compute:backward:5:2"],
        &["compute:backward:11:4", "update:update:11:3"],
        &["compute:backward:19:6"],
        &["update:update:1:2"],
        &["update:update:6:4"],
        &["update:update:12:1"],
        &["update:update:17:5", "compute:backward:18:1"],
        &["up:promote:8:1"],
        &["up:gather:10", "up:gather:10"],
        &["down:demote:9:2"],
        &["compute:loss:13:2"],
        &["compute:clip:15", "compute:clip:16"],
        &["commit:extents:1"],
        &["commit:extents:4"],
        &["commit:extentsflushed:2"],
        &["commit:manifest:1"],
        &["commit:manifest:3"],
        &["commit:manifestflushed:4"],
        &["commit:superblockhalf:1"],
        &["commit:superblockhalf:3", "compute:embedbackward:11"],
        &["commit:superblock:5", "down:demote:18:5"],
        &["compute:forward:4@extents:1", "compute:loss:2"],
        &["compute:forward:7:3@extents:2"],
        &["compute:backward:10:2@extents:3", "up:promote:8"],
        &["up:promote:13:1@extentsflushed:4"],
        &["update:update:7:4@extentsflushed:2"],
        &["down:demote:4:3@manifest:1"],
        &["update:update:10@manifestflushed:3"],
        &["compute:clip:16@superblockhalf:5"],
    ];
    let story = |instants: &&[&str]| instants.iter().map(|instant| kill(instant)).collect();
    stories.iter().map(story).collect()
}

/// Room for gradients and slabs alone, and none to spare on the device: weights spill too.
const NO_HOMES: [&str; 6] = [
    "--set",
    "memory.host=465144B",
    "--set",
    "memory.buffers=1",
    "--set",
    "memory.recompute=none",
];

/// Kills and resumes one run as its story says; the instants that were reached. Some
/// processes have their weights spilled too.
fn play(story: &[Kill]) -> Vec<String> {
    let place = Place::new();
    let mut reached = Vec::new();
    let mut left = None;
    for (index, Kill(instant, allowed)) in story.iter().enumerate() {
        let mut arguments = vec!["--kill-at", instant];
        if (index + story.len()).is_multiple_of(2) {
            arguments.extend(NO_HOMES);
        }
        arguments.extend(left.map(|_| "--resume"));
        let output = place.train(&arguments);
        assert_eq!(
            output.status.signal(),
            Some(SIGKILL),
            "{instant}: {}",
            words(&output)
        );
        let (at, beside) = instant.split_once('@').unwrap_or((instant, ""));
        let name: Vec<&str> = at.split(':').take(2).collect();
        reached.push(name.join(":"));
        if let Some((phase, _)) = beside.split_once(':') {
            reached.push(format!("beside {phase}"));
        }
        left = place.newest_commit();
        assert!(allowed.contains(&left.unwrap_or(0)), "{instant}: {left:?}");
    }
    if left.is_none() && story[0].0.starts_with("commit") {
        let refused = place.train(&["--resume"]);
        assert_eq!(
            refused.status.code(),
            Some(2),
            "{story:?}: {}",
            words(&refused)
        );
    }
    let said = match left {
        Some(step) if step % 2 == 0 => place.train_to_end(&[&["--resume"], &NO_HOMES[..]].concat()),
        Some(_) => place.train_to_end(&["--resume"]),
        None => place.train_to_end(&[]),
    };
    // The run went on right after the commit that was expected to be left.
    let first = left.unwrap_or(0) + 1;
    assert!(
        said.contains(&format!("\nstep {first}/{STEPS}: ")),
        "{story:?}: {said}"
    );
    let before = format!("\nstep {}/{STEPS}: ", first - 1);
    assert!(!said.contains(&before), "{story:?}: {said}");
    place.assert_undisturbed(&format!("{story:?}"));
    reached
}

#[test]
fn killed_anywhere_a_run_goes_on_bitwise() {
    LazyLock::force(&UNDISTURBED);
    let (left, reached) = (Mutex::new(stories()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let next = left.lock().unwrap().pop();
                    let Some(story) = next else { return };
                    let instants = play(&story);
                    reached.lock().unwrap().extend(instants);
                }
            });
        }
    });
    let reached = reached.into_inner().unwrap();
    println!("{} kills", reached.len());
    assert!(reached.len() >= 20);
    let reached: BTreeSet<String> = reached.into_iter().collect();
    let mut wanted: Vec<String> = ["compute:forward", "compute:backward", "update:update"]
        .map(str::to_string)
        .to_vec();
    let phases = Phase::ALL.iter();
    wanted.extend(phases.map(|phase| format!("commit:{phase:?}").to_lowercase()));
    wanted.extend(["beside extents", "beside manifest", "beside superblockhalf"].map(String::from));
    for instant in wanted {
        assert!(reached.contains(&instant), "{instant} was never hit");
    }
}

#[test]
fn a_signal_ends_the_run_after_its_step_and_commit() {
    let place = Place::new();
    let signal = SIGTERM.to_string();
    let at = ["--kill-at", "compute:backward:8", "--kill-signal", &signal];
    let output = place.train(&at);
    assert_eq!(
        output.status.code(),
        Some(128 + SIGTERM),
        "{}",
        words(&output)
    );
    let done = *place.steps().keys().last().unwrap();
    assert!((8..STEPS).contains(&done), "{done}");
    let said = words(&output);
    assert!(said.contains(&format!("commit of step {done}")), "{said}");
    assert!(
        said.contains(&format!("signal {SIGTERM} after step {done}")),
        "{said}"
    );
    place.train_to_end(&["--resume"]);
    place.assert_undisturbed("SIGTERM");
}

#[test]
fn without_checkpoints_a_run_says_so_and_leaves_none() {
    let place = Place::new();
    let off = ["--set", "checkpoint.every=0"];
    let said = place.train_to_end(&off);
    assert!(said.contains("checkpoint.every = 0"), "{said}");
    assert!(!place.path("log/checkpoint").exists());
    assert_eq!(place.steps(), UNDISTURBED.steps);
    let signal = SIGTERM.to_string();
    let at = ["--kill-at", "compute:loss:4", "--kill-signal", &signal];
    let output = place.train(&[&off[..], &at].concat());
    assert_eq!(
        output.status.code(),
        Some(128 + SIGTERM),
        "{}",
        words(&output)
    );
    let done = *place.steps().keys().last().unwrap();
    let said = words(&output);
    assert!(
        said.contains(&format!("signal {SIGTERM} after step {done}")),
        "{said}"
    );
    assert!(!said.contains("committed"), "{said}");
}

/// Trains with arguments that must be refused as bad input; what was said.
fn refused(place: &Place, arguments: &[&str]) -> String {
    let before = std::fs::read(place.path("log/metrics.jsonl")).unwrap();
    let output = place.train(arguments);
    assert_eq!(output.status.code(), Some(2), "{}", words(&output));
    let after = std::fs::read(place.path("log/metrics.jsonl")).unwrap();
    assert!(before == after, "a refused run leaves the metrics alone");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn another_run_over_the_commits_is_refused() {
    let place = Place::new();
    place.train_to_end(&["--set", "train.steps=4"]);
    let said = refused(&place, &[]);
    assert!(
        said.contains("--resume") && said.contains("step 4"),
        "{said}"
    );
    let said = refused(&place, &["--resume", "--set", "train.seed=6"]);
    assert!(
        said.contains("train.seed") && said.contains("--resume-changed"),
        "{said}"
    );
    let said = refused(&place, &["--resume=2"]);
    assert!(said.contains("3, 4"), "{said}");
    std::fs::write(place.path("rows.jsonl"), "{\"input_ids\": [1, 2, 3]}\n").unwrap();
    let said = refused(&place, &["--resume"]);
    assert!(said.contains("data"), "{said}");
}

#[test]
fn an_older_commit_is_gone_on_from() {
    let place = Place::new();
    place.train_to_end(&[]);
    place.assert_undisturbed("never stopped");
    let said = place.train_to_end(&["--resume=18"]);
    assert!(
        said.contains("\nstep 19/20: ") && !said.contains("\nstep 18/20: "),
        "{said}"
    );
    place.assert_undisturbed("--resume=18");
    // Where nothing is left to do, nothing is done.
    place.train_to_end(&["--resume"]);
    place.assert_undisturbed("--resume at the end");
}

#[test]
fn another_plan_goes_on_from_the_same_bytes() {
    let place = Place::new();
    let output = place.train(&["--kill-at", "compute:forward:8@superblock:2"]);
    assert_eq!(output.status.signal(), Some(SIGKILL));
    let roomy = ["--set", "memory.host=64MiB", "--set", "memory.buffers=1"];
    let more = [
        "--resume",
        "--set",
        "memory.recompute=all",
        "--kill-at",
        "update:update:13",
    ];
    let output = place.train(&[&roomy[..], &more].concat());
    assert_eq!(output.status.signal(), Some(SIGKILL), "{}", words(&output));
    place.train_to_end(&["--resume"]);
    place.assert_undisturbed("all in host in between");
    assert!(Path::new(&place.path("store")).exists());
}

#[test]
fn a_signal_while_a_commit_is_under_way_ends_the_run_after_both() {
    let place = Place::new();
    let signal = SIGTERM.to_string();
    let instant = "compute:backward:7:2@extents:2";
    let output = place.train(&["--kill-at", instant, "--kill-signal", &signal]);
    assert_eq!(output.status.code(), Some(143), "{}", words(&output));
    let said = words(&output);
    assert!(said.contains("step 6: committed"), "{said}");
    assert!(said.contains("commit of step 7"), "{said}");
    assert_eq!(place.newest_commit(), Some(7));
    place.train_to_end(&["--resume"]);
    place.assert_undisturbed(instant);
}

#[test]
fn a_commit_that_cannot_be_written_ends_the_run_and_the_one_before_is_named() {
    let place = Place::new();
    place.kill_after_step_3_is_committed();
    // A file may be 4 MiB long: room for the superblocks, and none for what comes after them.
    let output = place.train_limited(8192, &["--resume"]);
    let said = words(&output);
    assert_eq!(output.status.code(), Some(4), "{said}");
    for part in [
        "write of tile",
        "File too large",
        "needed",
        "free",
        "the last commit is step 3",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // The commit of step 6 failed; that of step 9 would have waited for it.
    let done = *place.steps().keys().last().unwrap();
    assert!((6..=9).contains(&done), "{done}");
    assert_eq!(place.newest_commit(), Some(3));
    place.train_to_end(&["--resume"]);
    place.assert_undisturbed("a commit that failed");
}

#[test]
fn a_metrics_file_that_cannot_be_written_costs_its_lines_and_nothing_else() {
    let place = Place::new();
    let roomy = ["--set", "memory.host=64MiB", "--set", "checkpoint.every=0"];
    // 4 KiB: some lines.
    let output = place.train_limited(8, &roomy);
    let said = words(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert_eq!(said.matches("its lines are lost").count(), 1, "{said}");
    assert!(said.contains(&format!("step {STEPS}/{STEPS}: ")), "{said}");
    let steps = place.steps();
    assert!(
        (1..STEPS).contains(&(steps.len() as u64)),
        "{}",
        steps.len()
    );
    for (step, line) in steps {
        assert_eq!(line, UNDISTURBED.steps[&step]);
    }
}

#[test]
fn a_step_that_is_not_finite_ends_the_run_after_the_commit_beside_it() {
    let place = Place::new();
    let sets = ["train.learning_rate=1e30", "checkpoint.every=1"];
    let output = place.train(&["--set", sets[0], "--set", sets[1]]);
    let said = words(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("terrace: step 2: "), "{said}");
    assert!(said.contains("the last commit is step 1 in "), "{said}");
    assert_eq!(place.newest_commit(), Some(1));
}

#[test]
fn a_run_that_was_moved_goes_on_and_one_whose_contents_changed_does_not() {
    let place = Place::new();
    place.kill_after_step_3_is_committed();
    std::fs::rename(place.path("model"), place.path("elsewhere")).unwrap();
    std::fs::rename(place.path("rows.jsonl"), place.path("lines.jsonl")).unwrap();
    let run = std::fs::read_to_string(place.path("run.toml")).unwrap();
    let run = run.replace("/model\"", "/elsewhere\"");
    std::fs::write(
        place.path("run.toml"),
        run.replace("/rows.jsonl", "/lines.jsonl"),
    )
    .unwrap();
    let config = place.path("elsewhere/config.json");
    let changed = MODEL.replace("10000.0", "20000.0");
    assert_ne!(changed, MODEL);
    std::fs::write(&config, changed).unwrap();
    let said = refused(&place, &["--resume"]);
    assert!(said.contains("model.path"), "{said}");
    std::fs::write(&config, MODEL).unwrap();
    let said = place.train_to_end(&["--resume"]);
    assert!(said.contains("resumed with model.path = "), "{said}");
    assert!(said.contains("resumed with data.train = "), "{said}");
    place.assert_undisturbed("moved");
    // In its place, too.
    std::fs::write(&config, MODEL.replace("10000.0", "20000.0")).unwrap();
    let said = refused(&place, &["--resume"]);
    assert!(said.contains("config.json"), "{said}");
}

#[test]
fn bytes_written_to_drives_are_counted_over_a_resume() {
    let place = Place::new();
    place.kill_after_step_3_is_committed();
    let read = || {
        let text = std::fs::read_to_string(place.path("log/metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
        lines.collect::<Vec<serde_json::Value>>()
    };
    let total = |line: &serde_json::Value| line["written_bytes"]["total"].as_u64();
    let lost = read().iter().filter_map(total).max().unwrap();
    // A millionth of a terabyte.
    place.train_to_end(&["--resume", "--set", "memory.drive_tbw=1e-6"]);
    let lines = read();
    let steps: Vec<_> = lines.iter().filter(|line| total(line).is_some()).collect();
    let totals: Vec<u64> = steps.iter().map(|line| total(line).unwrap()).collect();
    assert!(totals.is_sorted(), "{totals:?}");
    // What the killed process wrote in steps that are lost counts.
    assert!(totals[3] > lost, "{totals:?} after {lost}");
    let commits: u64 = lines
        .iter()
        .filter_map(|line| line["commit_bytes"].as_u64())
        .sum();
    let last = *totals.last().unwrap();
    assert!(commits > 0 && last > commits, "{last} of {commits}");
    let life = steps.last().unwrap()["drive_life"].as_f64().unwrap();
    assert_eq!(life, last as f64 / 1e6);
    let parts = |key: &str| -> u64 {
        let part = |line: &&serde_json::Value| line["written_bytes"][key].as_u64().unwrap();
        steps[4..].iter().map(part).sum()
    };
    assert_eq!(last - totals[3], parts("store") + parts("checkpoint"));
}

#[test]
fn a_disk_that_is_full_does_not_keep_a_run_from_going_on() {
    let place = Place::new();
    std::fs::create_dir(place.path("log")).unwrap();
    let mount = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=12m", "tmpfs"])
        .arg(place.path("log"))
        .output();
    if !mount.as_ref().is_ok_and(|output| output.status.success()) {
        println!("SKIP full file system: mount refused (not root?): {mount:?}");
        return;
    }
    let roomy = ["--set", "memory.host=64MiB"];
    place.kill_after_step_3_is_committed();
    // Everything that is left, to the last page.
    let filler = std::fs::File::create(place.path("log/filler")).unwrap();
    let page = [1; 4096];
    while std::io::Write::write_all(&mut &filler, &page).is_ok() {}
    // From before lines that are there: they must go without a second copy of the others.
    let output = place.train(&[&roomy[..], &["--resume"]].concat());
    let said = words(&output);
    drop(filler);
    std::fs::remove_file(place.path("log/filler")).unwrap();
    let (steps, newest) = (place.steps(), place.newest_commit());
    let state = (output.status.success() && newest.is_some()).then(|| place.outcome().state);
    // Lazily: the kernel lets go of a ring's file a moment after the ring is closed.
    let umount = Command::new("umount")
        .arg("-l")
        .arg(place.path("log"))
        .status();
    assert!(umount.unwrap().success());
    assert!(output.status.success(), "{said}");
    assert_eq!(newest, Some(STEPS));
    assert!(state.unwrap() == UNDISTURBED.state, "{said}");
    assert!(steps.len() >= 3, "{}", steps.len());
    for (step, line) in steps {
        assert_eq!(line, UNDISTURBED.steps[&step]);
    }
}
