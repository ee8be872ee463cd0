//! Goal: every command of the README does what it says.
//!
//! Method: the lines of its `sh` blocks run in their order in a shell, in a directory of their own,
//! with the built tools on the path. What a page may ask for and a test may not (a big model, half
//! a minute of disk, folders of somebody's machine) is replaced by [`STANDS_FOR`]; a replacement
//! that no line needs any more fails too. Commands that need a card, the network or other programs
//! are in [`NOT_HERE`].

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

use std::path::Path;
use std::process::Command;

const README: &str = include_str!("../README.md");

/// What stands in the README, and what is run in its place.
const STANDS_FOR: &[(&str, &str)] = &[
    (
        "cargo run --release --bin terrace -- train --quickstart",
        "terrace train --quickstart --device cpu --set train.steps=4",
    ),
    ("terrace init run.toml", "terrace init first.toml"),
    (
        "terrace train run.toml --resume",
        "terrace train run.toml --resume --set train.steps=6",
    ),
    ("--set train.steps=20", "--set train.steps=5"),
    ("--device cuda:0", "--device cpu --set model.init=random"),
    (
        "model.path=SmolLM2-135M-Instruct",
        "model.path=runs/quickstart/model",
    ),
    ("data.seq_len=1024", "data.seq_len=64"),
    ("--set train.steps=300", "--set train.steps=4"),
    ("--set train.micro_batch=8", "--set train.micro_batch=2"),
    ("train.warmup_steps=20", "train.warmup_steps=1"),
    ("train.eval_every=50", "train.eval_every=2"),
    (
        "import llama_factory.yaml -o run.toml",
        "import llama_factory.yaml -o imported.toml",
    ),
    (
        "--model Qwen/Qwen2.5-7B",
        concat!(
            "--model ",
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fixtures/configs/qwen2.5-7b"
        ),
    ),
    ("block 12", "block 1"),
    ("model.layers.12.", "model.layers.1."),
    ("--step-a 100 --step-b 200", "--step-a 4 --step-b 6"),
    ("--size=4g", "--size=32m"),
    ("--runtime=30", "--runtime=1"),
    ("--ramp_time=2", "--ramp_time=0"),
    ("/nvme/", "nvme/"),
    ("/backup/", "backup/"),
];

/// Commands that are not run, and why.
const NOT_HERE: &[(&str, &str)] = &[
    ("cargo test", "it runs this"),
    ("tensorboard", "it serves until it is stopped"),
];

/// A run whose checkpoints have steps 2, 4 and 6, with the quickstart's model.
const RUN: &str = r#"
[model]
path = "runs/quickstart/model"
init = "random"
[data]
train = "runs/quickstart/data/train.txt"
seq_len = 64
[train]
steps = 4
micro_batch = 2
micro_batches = 2
learning_rate = 2e-3
[memory]
device = "256MiB"
host = "256MiB"
[checkpoint]
every = 2
keep = 2
[log]
dir = "runs/terrace"
"#;

/// Rows as GSM8K has them.
const GSM8K: &str = r#"{"question": "A hen lays 2 eggs a day. How many in 3 days?", "answer": "2 x 3 = 6\n#### 6"}
{"question": "Of 9 apples 4 are red. How many are not?", "answer": "9 - 4 = 5\n#### 5"}
"#;

/// A full fine-tune in LLaMA-Factory's words.
const LLAMA_FACTORY: &str = "\
model_name_or_path: runs/quickstart/model
stage: sft
finetuning_type: full
dataset: alpaca_en
cutoff_len: 512
per_device_train_batch_size: 1
learning_rate: 1.0e-5
num_train_epochs: 1
bf16: true
";

/// Commands of the `sh` blocks: continued lines joined, comments cut.
fn commands(page: &str) -> Vec<String> {
    let mut found = Vec::new();
    let (mut inside, mut open) = (false, String::new());
    for line in page.lines() {
        match (inside, line.trim_end()) {
            (false, "```sh") => inside = true,
            (true, "```") => inside = false,
            (true, line) => {
                let line = line.split("  #").next().unwrap().trim_end();
                let line = line.strip_prefix("# ").map_or(line, |_| "");
                open.push_str(line.trim_end_matches('\\').trim());
                if line.ends_with('\\') {
                    open.push(' ');
                } else if !open.is_empty() {
                    found.push(std::mem::take(&mut open));
                }
            }
            _ => {}
        }
    }
    found
}

#[test]
fn commands_are_read_as_a_shell_reads_them() {
    let page = "```sh\nterrace a   # says\nterrace b \\\n   --c  # more\n```\nterrace d\n";
    assert_eq!(commands(page), ["terrace a", "terrace b --c"]);
}

#[test]
fn every_command_of_the_readme_works() {
    let room = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(room.path().join(name), text).unwrap();
    write("run.toml", RUN);
    write("llama_factory.yaml", LLAMA_FACTORY);
    write(
        "nightly.fio",
        "[job]\nfilename=nvme/bench\nrw=read\nbs=1m\nsize=8m\n",
    );
    for folder in ["nvme/scratch", "backup", "gsm8k"] {
        std::fs::create_dir_all(room.path().join(folder)).unwrap();
    }
    write("gsm8k/train.jsonl", &GSM8K.repeat(8));
    write("gsm8k/test.jsonl", GSM8K);
    let tools = Path::new(env!("CARGO_BIN_EXE_terrace")).parent().unwrap();
    let path = format!("{}:{}", tools.display(), std::env::var("PATH").unwrap());
    let mut used = vec![false; STANDS_FOR.len()];
    let mut ran = 0;
    for command in commands(README) {
        if let Some((_, why)) = NOT_HERE
            .iter()
            .find(|(start, _)| command.starts_with(start))
        {
            println!("SKIP: {command}: {why}");
            continue;
        }
        let mut here = command.clone();
        for (index, (from, to)) in STANDS_FOR.iter().enumerate() {
            used[index] |= here.contains(from);
            here = here.replace(from, to);
        }
        let output = Command::new("sh")
            .args(["-ec", &here])
            .current_dir(room.path())
            .env("PATH", &path)
            .env("XDG_CACHE_HOME", room.path().join("cache"))
            .output()
            .unwrap();
        // `diff` says by 1 that there are differences.
        let fine = output.status.success()
            || here.starts_with("terrace-inspect diff") && output.status.code() == Some(1);
        assert!(
            fine,
            "{command}\nrun as: {here}\n{:?}\n{}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        ran += 1;
    }
    println!("{ran} commands");
    assert!(ran > 20, "{ran} commands");
    for ((from, _), used) in STANDS_FOR.iter().zip(used) {
        assert!(used, "no command has {from:?} any more");
    }
}
