//! Goal: what is done between steps changes no step, and survives a resume: samples of generated
//! text, the best evaluation's commit, early stopping. Steps that are skipped are, too.
//!
//! Method: the real binary trains the embedded model for a few steps, its states spilled, once
//! plainly and once with what is tested; lines of steps are compared digit by digit.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;
use terrace::{Planned, Start, quickstart};

/// A short run of the embedded model, half of its optimizer's state spilled.
const SHORT: &[&str] = &[
    "data.seq_len=64",
    "train.micro_batch=1",
    "train.micro_batches=1",
    "train.steps=6",
    "train.warmup_steps=2",
    "train.eval_every=0",
    "memory.host=21MiB",
    "checkpoint.every=2",
    "log.sample_every=0",
];

/// A run's directory.
struct Room(TempDir);

impl Room {
    fn new() -> Room {
        Room(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Trains with `sets` over those of a short run, and further arguments.
    fn train(&self, sets: &[&str], arguments: &[&str]) -> Output {
        let sets = SHORT.iter().chain(sets).flat_map(|set| ["--set", set]);
        Command::new(env!("CARGO_BIN_EXE_terrace"))
            .args(["train", "--device", "cpu", "--quickstart"])
            .arg(self.path("run"))
            .args(sets)
            .args(arguments)
            .output()
            .unwrap()
    }

    fn train_to_end(&self, sets: &[&str], arguments: &[&str]) -> String {
        let output = self.train(sets, arguments);
        assert!(output.status.success(), "{}", words(&output));
        words(&output)
    }

    fn lines(&self, name: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path("run").join(name)).unwrap();
        let read = |line: &str| serde_json::from_str(line).unwrap();
        text.lines().map(read).collect()
    }

    /// Step, loss and norm of each step, digit by digit.
    fn steps(&self) -> Vec<String> {
        let lines = self.lines("metrics.jsonl");
        let steps = lines.iter().filter(|line| line.get("loss").is_some());
        steps
            .map(|line| format!("{} {} {}", line["step"], line["loss"], line["grad_norm"]))
            .collect()
    }
}

fn words(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

const SAMPLED: &[&str] = &[
    "log.sample_every=2",
    "log.sample_tokens=5",
    "log.sample_prompts=[\"And the LORD said\", \"In the\"]",
];

#[test]
fn samples_change_no_step_and_are_the_same_after_a_resume() {
    let (plain, sampled, resumed) = (Room::new(), Room::new(), Room::new());
    plain.train_to_end(&[], &[]);
    assert!(!plain.path("run/samples.jsonl").exists());
    let said = sampled.train_to_end(SAMPLED, &[]);
    assert!(said.contains("step 4: sample: \"In the\" → "), "{said}");
    assert_eq!(sampled.steps(), plain.steps());
    let samples = sampled.lines("samples.jsonl");
    let told: Vec<_> = samples
        .iter()
        .map(|line| {
            (
                line["step"].as_u64().unwrap(),
                line["prompt"].as_str().unwrap(),
            )
        })
        .collect();
    let prompts = ["And the LORD said", "In the"];
    let expected = [2, 4, 6].map(|step| prompts.map(|prompt| (step, prompt)));
    assert_eq!(told, expected.concat());
    assert!(samples.iter().any(|line| line["sample"] != ""));
    // Killed after the samples of step 4, whose commit is not there: they are made again.
    let killed = resumed.train(SAMPLED, &["--kill-at", "commit:extents:2"]);
    assert!(!killed.status.success(), "{}", words(&killed));
    let said = resumed.train_to_end(SAMPLED, &["--resume"]);
    assert!(said.contains("step 3/6"), "{said}");
    assert_eq!(resumed.lines("samples.jsonl"), samples);
    assert_eq!(resumed.steps(), plain.steps());
}

/// An evaluation waits for the updates that would run under the next step: the step after it has
/// none, and a mean over such steps says that AdamW takes less than it does.
#[test]
fn steps_after_an_evaluation_or_a_sample_are_not_compared_with_the_plan() {
    for (sets, compared) in [
        (&["train.eval_every=0"][..], 4),
        (&["train.eval_every=2"], 2),
        (&["train.eval_every=4", "log.sample_every=3"], 2),
    ] {
        let said = Room::new().train_to_end(sets, &[]);
        let told = format!("seconds a step (mean of {compared} after the first 2):");
        assert!(said.contains(&told), "{sets:?}: {said}");
    }
}

/// A disk that is full loses lines of metrics and the run goes on: so it does where the file of
/// samples cannot even be made.
#[test]
fn samples_that_cannot_be_kept_are_said_once_and_the_run_goes_on() {
    let room = Room::new();
    let sets = with(&[SHORT, SAMPLED]).into_iter().map(str::to_string);
    let config = quickstart::write(&room.path("run"), &sets.collect::<Vec<_>>()).unwrap();
    let planned = Planned::new(config, "cpu").unwrap();
    let mut trainer = planned.start(Start::Fresh).unwrap();
    trainer.step().unwrap();
    std::fs::create_dir(room.path("run/samples.jsonl")).unwrap();
    for _ in 0..2 {
        assert_eq!(trainer.sample().unwrap().len(), 2);
    }
    let warnings: Vec<String> = std::iter::from_fn(|| trainer.take_warning()).collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("samples.jsonl"), "{warnings:?}");
    trainer.step().unwrap();
    trainer.finish().unwrap();
}

#[test]
fn without_prompts_the_beginning_of_the_data_is_continued_and_0_is_greedy() {
    let room = Room::new();
    let greedy = [
        "log.sample_every=6",
        "log.sample_tokens=3",
        "log.sample_temperature=0",
    ];
    room.train_to_end(&greedy, &[]);
    let samples = room.lines("samples.jsonl");
    let text = std::fs::read_to_string(room.path("run/data/held-out.txt")).unwrap();
    let prompt = samples[0]["prompt"].as_str().unwrap();
    assert!(
        text.starts_with(prompt) && !prompt.is_empty(),
        "{samples:?}"
    );
    let generated = Command::new(env!("CARGO_BIN_EXE_terrace"))
        .args([
            "generate",
            "--device",
            "cpu",
            "--tokens",
            "3",
            "--prompt",
            prompt,
            "--checkpoint",
        ])
        .arg(room.path("run/checkpoint"))
        .output()
        .unwrap();
    let line = format!("{}\n", samples[0]["sample"].as_str().unwrap());
    assert_eq!(String::from_utf8_lossy(&generated.stdout), line);
}

#[test]
fn prompts_that_cannot_be_are_refused_before_anything_is_made() {
    let room = Room::new();
    let long = format!("log.sample_prompts={:?}", "word ".repeat(80));
    let cases = [
        (
            &*long,
            "samples: log.sample_prompts: expected 1 to 63 tokens, one less than data.seq_len, got",
        ),
        (
            "log.sample_prompts=[\"\"]",
            "log.sample_prompts: expected a text in quotes, or a list of them, got [\"\"]",
        ),
    ];
    for (set, message) in cases {
        let output = room.train(&["log.sample_every=1", set], &[]);
        assert_eq!(output.status.code(), Some(2));
        assert!(words(&output).contains(message), "{}", words(&output));
        assert!(!room.path("run/metrics.jsonl").exists());
    }
}

/// Weights stay as they are, so that the first evaluation stays the best.
const STILL: &[&str] = &[
    "data.eval_split=3",
    "data.eval=[]",
    "train.learning_rate=0",
    "train.min_learning_rate=0",
];

fn with<'a>(parts: &[&[&'a str]]) -> Vec<&'a str> {
    parts.concat()
}

impl Room {
    /// Runs another tool on the run's checkpoint.
    fn tool(&self, tool: &str, arguments: &str) -> Output {
        let checkpoint = self.path("run/checkpoint").display().to_string();
        let arguments = arguments.split(' ').map(|argument| match argument {
            "DIR" => checkpoint.clone(),
            "OUT" => self.path("out").display().to_string(),
            other => other.to_string(),
        });
        Command::new(tool).args(arguments).output().unwrap()
    }

    /// Steps of its commits, and the one that is marked as the best.
    fn commits(&self) -> (Vec<u64>, Vec<u64>) {
        let listed = self.tool(env!("CARGO_BIN_EXE_terrace-inspect"), "list DIR --json");
        let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
        let commits = listed["commits"].as_array().unwrap();
        let step = |commit: &Value| commit["step"].as_u64().unwrap();
        let best = commits.iter().filter(|commit| commit["best"] == true);
        (commits.iter().map(step).collect(), best.map(step).collect())
    }
}

#[test]
fn the_best_evaluation_keeps_its_commit_whatever_keep_says() {
    let best = [
        "train.eval_every=1",
        "checkpoint.keep=1",
        "checkpoint.keep_best=true",
    ];
    let sets = with(&[STILL, &best, &["checkpoint.every=3", "train.steps=9"]]);
    let room = Room::new();
    let killed = room.train(&sets, &["--kill-at", "commit:manifest:4"]);
    assert!(!killed.status.success(), "{}", words(&killed));
    // Its step is no multiple of checkpoint.every: it was committed for itself.
    assert_eq!(room.commits(), (vec![1, 6], vec![1]));
    let said = room.train_to_end(&sets, &["--resume"]);
    assert_eq!(room.commits(), (vec![1, 9], vec![1]));
    assert!(said.contains("best: step 1, held-out loss "), "{said}");
    let (terrace, inspect) = (
        env!("CARGO_BIN_EXE_terrace"),
        env!("CARGO_BIN_EXE_terrace-inspect"),
    );
    let listed = words(&room.tool(inspect, "list DIR"));
    assert!(listed.contains("step 1 (best, held-out loss "), "{listed}");
    let exported = room.tool(terrace, "export --checkpoint DIR --best --out OUT");
    assert!(exported.status.success(), "{}", words(&exported));
    let exported = std::fs::read(room.path("out/model.safetensors")).unwrap();
    let again = room.tool(
        terrace,
        "export --checkpoint DIR --step 1 --overwrite --out OUT",
    );
    assert!(again.status.success(), "{}", words(&again));
    assert!(std::fs::read(room.path("out/model.safetensors")).unwrap() == exported);
    // Without it the next commits take its place, and what is asked for by name is not there.
    let off = with(&[&sets, &["checkpoint.keep_best=false", "train.steps=12"]]);
    room.train_to_end(&off, &["--resume"]);
    assert_eq!(room.commits(), (vec![12], vec![]));
    let refused = room.tool(
        terrace,
        "export --checkpoint DIR --best --overwrite --out OUT",
    );
    let message = "expected step 1, which has the lowest loss, got steps 12; \
                   set checkpoint.keep_best = true";
    assert_eq!(refused.status.code(), Some(2));
    assert!(words(&refused).contains(message), "{}", words(&refused));
}

#[test]
fn evaluations_without_an_improvement_end_the_run_also_over_a_resume() {
    let sets = with(&[
        STILL,
        &["train.eval_every=1", "train.early_stopping_patience=3"],
    ]);
    let sets = with(&[&sets, &["checkpoint.every=1"]]);
    let (room, plain) = (Room::new(), Room::new());
    let said = plain.train_to_end(&sets, &[]);
    assert!(said.contains("early stopping: "), "{said}");
    assert_eq!(plain.steps().len(), 4);
    let killed = room.train(&sets, &["--kill-at", "compute:backward:4"]);
    assert!(!killed.status.success(), "{}", words(&killed));
    room.train_to_end(&sets, &["--resume"]);
    assert_eq!(room.steps(), plain.steps());
    let said = room.train_to_end(&sets, &["--resume"]);
    let nothing = "nothing to do: 4 steps are done, train.early_stopping_patience is used up";
    assert!(said.contains(nothing), "{said}");
    let said = room.train_to_end(
        &with(&[&sets, &["train.early_stopping_patience=5"]]),
        &["--resume"],
    );
    assert!(said.contains("5 in a row without an improvement"), "{said}");
    assert_eq!(room.steps().len(), 6);
}

/// So many norms are above the mean that some steps are spikes.
const SPIKY: &[&str] = &[
    "train.steps=30",
    "train.learning_rate=1e-5",
    "train.min_learning_rate=0",
    "train.spike_threshold=1.05",
    "checkpoint.every=8",
];

#[test]
fn skipped_steps_are_counted_and_a_resume_skips_the_same() {
    let sets = with(&[SPIKY, &["train.on_spike=skip"]]);
    let (room, plain) = (Room::new(), Room::new());
    let said = plain.train_to_end(&with(&[&sets, &["memory.host=64MiB"]]), &[]);
    assert!(
        said.contains("; no update was made (1 steps so far)"),
        "{said}"
    );
    let steps = |room: &Room| {
        let lines = room.lines("metrics.jsonl").into_iter();
        let steps = lines.filter(|line| line.get("loss").is_some());
        let keys = ["step", "loss", "grad_norm", "spike", "skipped_steps"];
        steps
            .map(|line| keys.map(|key| line[key].to_string()).join(" "))
            .collect::<Vec<_>>()
    };
    // One before the spike is committed, one after.
    let killed = room.train(&sets, &["--kill-at", "compute:backward:24"]);
    assert!(!killed.status.success(), "{}", words(&killed));
    let killed = room.train(&sets, &["--resume", "--kill-at", "compute:backward:27"]);
    assert!(words(&killed).contains("step 17/30"), "{}", words(&killed));
    let said = room.train_to_end(&sets, &["--resume"]);
    assert!(said.contains("step 25/30"), "{said}");
    assert_eq!(steps(&room), steps(&plain));
    let last = plain.lines("metrics.jsonl");
    let skipped = last.iter().filter(|line| line["spike"]["skipped"] == true);
    let counted = last
        .iter()
        .filter_map(|line| line["skipped_steps"].as_u64());
    assert_eq!(counted.max(), Some(skipped.count() as u64));
}

#[test]
fn a_spike_may_end_the_run_or_be_told() {
    let room = Room::new();
    let stopped = room.train(&with(&[SPIKY, &["train.on_spike=stop"]]), &[]);
    assert_eq!(stopped.status.code(), Some(1), "{}", words(&stopped));
    let said = words(&stopped);
    assert!(
        said.contains("more than 1.05 times its running mean"),
        "{said}"
    );
    assert!(said.contains("the last commit is step "), "{said}");
    let told = Room::new().train_to_end(SPIKY, &[]);
    assert!(told.contains(": spike: gradient norm "), "{told}");
}
