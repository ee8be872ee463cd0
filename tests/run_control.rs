//! Goal: what is done between steps changes no step, and survives a resume: samples of generated
//! text.
//!
//! Method: the real binary trains the embedded model for a few steps, its states spilled, once
//! plainly and once with what is tested; lines of steps are compared digit by digit.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

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
