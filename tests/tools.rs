//! Goal: what a person meets. Bad input and trouble end in one line on standard error that says
//! what, where, expected, got and what to do, with the exit code of its kind, and leave nothing
//! half-written; what the tools print for people and programs is right.
//!
//! Method: the real binaries in a directory of their own, with a model of 51 thousand parameters.
//! Messages are compared whole; directories are listed before and after. Mounts need root: without
//! it those tests print SKIP. `TERRACE_BLESS=1` rewrites benches/results/plans.md from the plans.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

#[path = "support/tool.rs"]
mod tool;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;
use terrace::device::cuda::Card;
use tool::{Ended, RUN};

const TERRACE: &str = env!("CARGO_BIN_EXE_terrace");
const INSPECT: &str = env!("CARGO_BIN_EXE_terrace-inspect");

fn model() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024,
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64,
        "initializer_range": 0.02, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    })
}

/// A directory with a model, a text and a run.toml, in which the tools run.
struct Room {
    dir: TempDir,
}

impl Room {
    fn new() -> Room {
        let room = Room {
            dir: tempfile::tempdir().unwrap(),
        };
        room.write("run.toml", RUN);
        let text = "the cat sat on the mat and looked at the moon\n\nthe moon looked back\n";
        room.write("text.txt", text);
        room.write_model("model", &[]);
        room
    }

    /// A room with a run of four steps, two commits and their export as `exported`.
    fn trained() -> Room {
        let room = Room::new();
        room.terrace("train run.toml").success();
        let export = "export --checkpoint run/checkpoint --out exported --dtype f32";
        room.terrace(export).success();
        room
    }

    /// A model directory without weights, some keys of its config.json changed.
    fn write_model(&self, name: &str, changes: &[(&str, Value)]) {
        let mut config = model();
        for (key, value) in changes {
            config[*key] = value.clone();
        }
        self.write(&format!("{name}/config.json"), &config.to_string());
        for (file, bytes) in terrace::data::quickstart::tokenizer_files() {
            std::fs::write(self.path(name).join(file), bytes).unwrap();
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn copy(&self, from: &str, to: &str) {
        std::fs::create_dir_all(self.path(to)).unwrap();
        for entry in std::fs::read_dir(self.path(from)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), self.path(to).join(entry.file_name())).unwrap();
        }
    }

    /// On the CPU whatever the machine has, unless the arguments name a device.
    fn command(&self, tool: &str, arguments: &str) -> Command {
        let mut command = Command::new(tool);
        command.current_dir(self.dir.path()).stdin(Stdio::null());
        let mut words = arguments.split_whitespace();
        command.args(words.clone());
        let computes = matches!(words.next(), Some("train" | "generate"));
        if computes && !words.any(|word| word == "--device") {
            command.args(["--device", "cpu"]);
        }
        command
    }

    fn terrace(&self, arguments: &str) -> Ended {
        self.command(TERRACE, arguments).output().unwrap().into()
    }

    /// Every file with its length and every directory below the room; locks are not counted.
    fn listing(&self) -> BTreeMap<PathBuf, Option<u64>> {
        let mut found = BTreeMap::new();
        list(self.dir.path(), &mut found);
        found
    }

    /// A command that must be refused: with this code, this one line, and nothing made.
    fn refused(&self, arguments: &str, code: i32, message: &str) {
        let before = self.listing();
        let ended = self.terrace(arguments);
        assert_eq!(ended.err, format!("terrace: {message}\n"), "{arguments}");
        assert_eq!(ended.code, code, "{arguments}");
        assert_eq!(self.listing(), before, "{arguments}");
    }
}

fn list(directory: &Path, found: &mut BTreeMap<PathBuf, Option<u64>>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            list(&path, found);
            found.insert(path, None);
        } else if path.extension().is_none_or(|extension| extension != "lock") {
            let bytes = std::fs::metadata(&path).unwrap().len();
            found.insert(path, Some(bytes));
        }
    }
}

/// A tmpfs of that size; `None` where it cannot be mounted, said once.
struct Mount {
    path: PathBuf,
}

impl Mount {
    fn tmpfs(path: PathBuf, size: &str) -> Option<Mount> {
        std::fs::create_dir_all(&path).unwrap();
        let mount = Command::new("mount")
            .args([
                "-t",
                "tmpfs",
                "-o",
                &format!("size={size},mode=0700"),
                "tmpfs",
            ])
            .arg(&path)
            .output();
        if !mount.as_ref().is_ok_and(|output| output.status.success()) {
            println!("SKIP: mount refused (not root?): {mount:?}");
            return None;
        }
        Some(Mount { path })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Lazily: the kernel lets go of a ring's file a moment after the ring is closed.
        Command::new("umount")
            .arg("-l")
            .arg(&self.path)
            .status()
            .ok();
    }
}

const NEW_RUN: &str = "train run.toml --set log.dir=new";

#[test]
fn models_that_cannot_be_trained_are_refused_before_anything_is_made() {
    let room = Room::trained();
    let run =
        |model: &str| format!("{NEW_RUN} --set model.path={model} --set model.init=pretrained");
    room.refused(
        &run("absent"),
        2,
        "model directory: absent: expected a directory with config.json, got nothing; name one: \
         model.path in run.toml, or --model",
    );
    room.refused(
        &run("model"),
        2,
        "safetensors: model: expected model.safetensors or model.safetensors.index.json, got \
         neither; fetch the weights in safetensors format; pickles (.bin, .pt) are not read",
    );
    room.copy("exported", "short");
    let weights = std::fs::File::options()
        .write(true)
        .open(room.path("short/model.safetensors"));
    weights.unwrap().set_len(100_000).unwrap();
    room.refused(
        &run("short"),
        2,
        "safetensors: short/model.safetensors: tensor model.embed_tokens.weight: \
         expected data within the file's 97936 bytes of tensors, got data_offsets [0, \
         131072]; fetch the file again",
    );
    room.copy("exported", "other");
    let wider = model().to_string().replace(":64,", ":80,");
    room.write("other/config.json", &wider);
    room.refused(
        &run("other"),
        2,
        "safetensors: other/model.safetensors: tensor model.layers.0.mlp.gate_proj.weight: \
         expected shape [80, 32], got [64, 32]; the config.json and the weights must be of one \
         model",
    );
    room.write_model("absurd", &[("hidden_size", json!(1u64 << 40))]);
    room.refused(
        &run("absurd"),
        2,
        "config.json: absurd/config.json: hidden_size: expected an integer from 1 to 1048576, got \
         1099511627776; correct the file or choose another model",
    );
    room.write_model("tokens", &[("vocab_size", json!(500))]);
    room.refused(
        &run("tokens"),
        2,
        "tokenizer: tokens/tokenizer.json: expected ids below 500, the model's vocabulary, got id \
         1023: a tokenizer that does not belong to the model; take config.json and \
         tokenizer.json from the same model",
    );
    room.write_model("gpt2", &[("model_type", json!("gpt2"))]);
    room.refused(
        &run("gpt2"),
        2,
        "architecture: gpt2/config.json: model_type gpt2 is not supported; supported: llama, \
         qwen2, qwen3, mistral",
    );
}

#[test]
fn data_that_cannot_be_trained_on_is_refused_before_anything_is_made() {
    let room = Room::new();
    let long: Vec<String> = (1..=40).map(|id| id.to_string()).collect();
    let rows = [
        (
            "empty",
            String::new(),
            "empty.jsonl: expected at least one row, got none; name a file that has rows",
        ),
        (
            "masked",
            r#"{"input_ids":[1,2,3],"labels":[-100,-100,-100]}"#.to_string(),
            "masked.jsonl: expected at least one token to train on, got 3 tokens in 1 rows, all \
             masked; look at `terrace data preview`: is there a turn of the assistant, or a label \
             that is not -100",
        ),
        (
            "broken",
            "{\"text\": \"whole\"}\n{\"text\":\n".to_string(),
            "broken.jsonl:2: expected a JSON object a line, got EOF while parsing a value at line \
             2 column 0; write each row on one line, or the file as one list […]",
        ),
        (
            "long",
            format!("{{\"input_ids\":[{}]}}", long.join(",")),
            "long.jsonl:1: expected at most 16 tokens, data.seq_len, got 40 tokens; set \
             data.truncate = true to cut it, or raise data.seq_len",
        ),
    ];
    for (name, text, message) in rows {
        room.write(&format!("{name}.jsonl"), &text);
        let arguments = format!("{NEW_RUN} --set data.train={name}.jsonl");
        room.refused(&arguments, 2, &format!("dataset: {message}"));
    }
    let arguments = format!("{NEW_RUN} --set data.train=absent.jsonl");
    let message = "open: absent.jsonl: No such file or directory (os error 2)";
    room.refused(&arguments, 4, message);
}

#[test]
fn run_files_and_arguments_that_are_wrong_are_refused() {
    let room = Room::new();
    room.write("typed.toml", &RUN.replace("steps", "stpes"));
    room.refused(
        "train typed.toml",
        2,
        "run.toml: typed.toml line 9: expected a key of [train] (steps, epochs, \
         micro_batch, micro_batches, learning_rate, schedule, warmup_steps, min_learning_rate, \
         betas, eps, weight_decay, max_grad_norm, gradient_dtype, on_spike, spike_threshold, \
         eval_every, early_stopping_patience, early_stopping_threshold, seed), got stpes; \
         did you mean steps?",
    );
    room.write("bare.toml", &RUN.replace("\"64MiB\"", "64"));
    room.refused(
        "plan bare.toml",
        2,
        "run.toml: bare.toml line 14, memory.device: expected a size with a unit in quotes, or \
         \"auto\", got 64; add a unit: \"64GiB\" or \"64B\"",
    );
    room.refused(
        "train absent.toml",
        4,
        "read: absent.toml: No such file or directory (os error 2); `terrace init` writes one",
    );
    room.refused(
        "train run.toml --device tpu",
        2,
        "device: tpu is not supported; supported: cpu, cuda:0 (or another card's number), auto",
    );
    room.refused(
        "plan run.toml --device-memory 24",
        2,
        "size: --device-memory: expected a size with a unit, or \"auto\", got \"24\"; add a unit: \
         \"24GiB\" or \"24B\"",
    );
    room.refused(
        "train run.toml --resume=last",
        2,
        "arguments: --resume: expected a step that is committed, got last; write --resume or \
         --resume=100",
    );
}

/// The library's own words for the card are expected of the tools, whatever lacks.
#[test]
fn a_card_that_is_not_there_is_refused_and_auto_says_why_it_takes_the_cpu() {
    let room = Room::new();
    let error = Card::read(99).err().unwrap().to_string();
    let remedies = ["or use --device cpu", "; `terrace doctor` lists the cards"];
    assert!(
        remedies.iter().any(|remedy| error.ends_with(remedy)),
        "{error}"
    );
    room.refused("train run.toml --device cuda:99", 1, &error);
    let Err(error) = Card::read(0) else {
        println!("SKIP: the machine has a card, which auto takes");
        return;
    };
    let out = room.terrace("train run.toml --device auto").success();
    let first = format!("device: cpu (auto found no card: {error})");
    assert_eq!(out.lines().next(), Some(first.as_str()));
}

#[test]
fn budgets_that_are_too_small_are_refused_with_the_missing_bytes() {
    let room = Room::new();
    let refused = |set: &str, message: &str| {
        room.refused(&format!("{NEW_RUN} --set {set}"), 2, message);
    };
    refused(
        "memory.device=100KiB",
        "device memory: needs 528128 bytes, budget 102400 (425728 missing); even one micro-batch \
         needs 521984 bytes, 440576 of them for one layer's weights and gradients: lower \
         train.micro_batch or data.seq_len, or raise memory.device",
    );
    refused(
        "memory.host=100KiB",
        "host memory: needs 3252224 bytes, budget 102400 (3149824 missing); with every section \
         spilled, gradients (106496 bytes) and the slab rings (3145728 bytes) remain: raise \
         memory.host, lower memory.slabs, or set train.max_grad_norm = 0 so that gradients need \
         not wait for the norm",
    );
    refused(
        "memory.host=3324KiB",
        "store memory: needs 503808 bytes, budget 0 (503808 missing); name a directory on NVMe \
         in memory.store, or raise memory.host by 503808 bytes",
    );
}

#[test]
fn sizes_beyond_64_bits_do_not_wrap_around_into_ones_that_fit() {
    let room = Room::new();
    room.write_model("wide", &[("hidden_size", json!(16384))]);
    let ended = room.terrace(
        "plan run.toml --set model.path=wide --set data.seq_len=1048576 --device-memory 16383PiB \
         --set train.micro_batch=65536 --set train.micro_batches=65536",
    );
    assert_eq!(ended.code, 2, "{ended:?}");
    let start =
        "terrace: run.toml: train.micro_batch x data.seq_len: expected at most 1048575 tokens";
    assert!(ended.err.starts_with(start), "{ended:?}");
    let ended = room.terrace(
        "plan run.toml --set model.path=wide --set data.seq_len=1048576 \
         --set memory.device=16383PiB --set train.micro_batch=65536 \
         --set train.micro_batches=65536",
    );
    assert_eq!(ended.code, 2, "{ended:?}");
    let start = "terrace: device memory: needs 18446744073709551615 bytes";
    assert!(ended.err.starts_with(start), "{ended:?}");
}

const SPILLED: &str = "train run.toml --set log.dir=new --set memory.host=3324KiB";

#[test]
fn a_store_that_cannot_be_written_is_refused() {
    let room = Room::new();
    // Permission bits do not bind root: a path below a file refuses everybody.
    room.write("file", "");
    room.refused(
        &format!("{SPILLED} --set memory.store=file/store"),
        4,
        "create: file/store: Not a directory (os error 20); name a directory that can be written",
    );
    room.refused(
        "train run.toml --set log.dir=file/run",
        4,
        "create: file/run/checkpoint: Not a directory (os error 20); name a directory that can be \
         written",
    );
    let Some(mount) = Mount::tmpfs(room.path("readonly"), "1m") else {
        return;
    };
    let remount = Command::new("mount")
        .args(["-o", "remount,ro"])
        .arg(&mount.path)
        .status();
    assert!(remount.unwrap().success());
    room.refused(
        &format!("{SPILLED} --set memory.store=readonly"),
        4,
        "open: readonly/scratch.lock: Read-only file system (os error 30); name a directory that \
         can be written",
    );
}

#[test]
fn a_store_that_is_full_is_refused_with_the_missing_bytes() {
    let room = Room::new();
    let Some(_mount) = Mount::tmpfs(room.path("full"), "300k") else {
        return;
    };
    let before = room.listing();
    let sized = room.terrace(&format!(
        "{SPILLED} --set memory.store=[{{path=\"full\",size=\"1MiB\"}}]"
    ));
    assert_eq!((sized.code, room.listing()), (2, before), "{sized:?}");
    let start = "terrace: store memory: needs 503808 bytes, budget ";
    let end = "full/scratch.tiles is too full; free space or lower memory.store\n";
    assert!(
        sized.err.starts_with(start) && sized.err.ends_with(end),
        "{sized:?}"
    );
}

/// A directory's free space was taken from its parent's file system: `"auto"` of a mount point
/// planned with bytes of another drive, and the run failed when it reserved them.
#[test]
fn an_auto_store_on_a_mount_point_counts_that_file_system() {
    let room = Room::new();
    let Some(_mount) = Mount::tmpfs(room.path("full"), "300k") else {
        return;
    };
    let plan = format!("{SPILLED} --set memory.store=full");
    let ended = room.terrace(&plan.replace("train", "plan"));
    assert_eq!(ended.code, 2, "{ended:?}");
    let start = "terrace: store memory: needs 503808 bytes, budget ";
    let budget = ended
        .err
        .strip_prefix(start)
        .and_then(|rest| rest.split(' ').next());
    let budget: u64 = budget
        .unwrap_or_else(|| panic!("{ended:?}"))
        .parse()
        .unwrap();
    assert!((200 << 10..=300 << 10).contains(&budget), "{budget}");
}

#[test]
fn a_full_disk_under_the_token_cache_leaves_the_tokens_in_memory() {
    let room = Room::new();
    let Some(_mount) = Mount::tmpfs(room.path("caches"), "300k") else {
        return;
    };
    let line = "{\"text\": \"the cat sat on the mat and looked at the moon\"}\n";
    room.write("long.jsonl", &line.repeat((33 << 20) / line.len()));
    let preview = |cache: &str| {
        let arguments = format!("data preview run.toml --set data.train=long.jsonl {cache}");
        let mut command = room.command(TERRACE, &arguments);
        let ended = command.env("XDG_CACHE_HOME", room.path("caches")).output();
        Ended::from(ended.unwrap())
    };
    let out = preview("").success();
    assert!(out.contains("tokens are kept in memory: write: "), "{out}");
    // A directory that was asked for by name is not passed over.
    let named = preview("--set data.cache=caches/own");
    assert_eq!(named.code, 4, "{named:?}");
    assert!(
        named.err.contains("set data.cache to another directory"),
        "{named:?}"
    );
}

#[test]
fn a_store_on_tmpfs_works_and_is_warned_of() {
    let room = Room::new();
    let Some(_mount) = Mount::tmpfs(room.path("memory"), "64m") else {
        return;
    };
    let out = room
        .terrace(&format!("{SPILLED} --set memory.store=memory"))
        .success();
    let warning = "memory is tmpfs: it takes host memory and is lost at a reboot\n";
    assert!(out.contains(warning), "{out}");
    assert!(out.contains("step 4: committed"), "{out}");
}

#[test]
fn directories_of_a_run_that_runs_are_refused_with_its_process() {
    let room = Room::new();
    assert_eq!(room.terrace("train run.toml").code, 0);
    let endless = "train run.toml --set train.steps=1000000 --set checkpoint.every=100000 \
                   --set memory.host=3324KiB --set memory.store=store --resume";
    let mut holder = room
        .command(TERRACE, endless)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(holder.stdout.take().unwrap()).lines();
    // Both locks are taken before the first step's line.
    assert!(lines.any(|line| line.unwrap().starts_with("step ")));
    // It must not wait for a reader.
    let drain = std::thread::spawn(move || lines.for_each(drop));
    let pid = holder.id();
    let message = |path: &str| {
        format!("{path}: in use by process {pid}; stop it or choose another directory")
    };
    let code = |arguments: &str| room.terrace(arguments);
    let checkpoint = code("train run.toml");
    let store = code(&format!("{SPILLED} --set memory.store=store"));
    let export = code("export --checkpoint run/checkpoint --out beside");
    let generate = "generate --checkpoint run/checkpoint --prompt moon --tokens 4 --device cpu";
    let generated = code(generate);
    let inspect = room
        .command(INSPECT, "verify run/checkpoint")
        .output()
        .unwrap();
    holder.kill().unwrap();
    holder.wait().unwrap();
    drain.join().unwrap();
    for (ended, path) in [(checkpoint, "run/checkpoint"), (store, "store")] {
        assert_eq!(ended.code, 5, "{ended:?}");
        assert_eq!(ended.err, format!("terrace: {}\n", message(path)));
    }
    // Reading needs no lock: what is committed comes out as it does when the run has ended.
    let (read, name) = (
        |path: &str| std::fs::read(room.path(path)).unwrap(),
        "model.safetensors",
    );
    assert_eq!(
        (export.code, generated.code),
        (0, 0),
        "{export:?} {generated:?}"
    );
    assert_eq!(
        code("export --checkpoint run/checkpoint --out after").code,
        0
    );
    assert!(read(&format!("beside/{name}")) == read(&format!("after/{name}")));
    assert_eq!(code(generate).out, generated.out);
    let inspect = Ended::from(inspect);
    assert_eq!(inspect.code, 0, "{inspect:?}");
    let used = format!("in use by process {pid}: this is what was committed so far\n");
    assert!(inspect.out.starts_with(&used), "{inspect:?}");
    assert!(!room.path("new/checkpoint/checkpoint.tiles").exists());
}

#[test]
fn what_does_not_fit_a_checkpoint_is_refused_and_the_checkpoint_stays() {
    let room = Room::trained();
    let bytes = || std::fs::read(room.path("run/checkpoint/checkpoint.tiles")).unwrap();
    let before = bytes();
    room.refused(
        "train run.toml",
        2,
        "checkpoint: run/checkpoint: expected an empty checkpoint.dir for a new run, got commits \
         up to step 4; pass --resume to go on, or choose another checkpoint.dir or log.dir",
    );
    room.refused(
        "train run.toml --resume=3",
        2,
        "resume: run/checkpoint: expected one of the steps 2, 4, got 3; name a step that is \
         committed",
    );
    room.refused(
        "train run.toml --resume --set train.seed=9",
        2,
        "resume: train.seed: expected 0, got 9; change it back, or pass --resume-changed to go on \
         with another run",
    );
    room.refused(
        "train run.toml --resume --set log.dir=new",
        2,
        "resume: new/checkpoint: expected a commit, got none; start without --resume, or name \
         its checkpoint.dir or log.dir",
    );
    for (set, key, was, is) in [
        ("optimizer.moments=bf16", "optimizer.moments", "f32", "bf16"),
        ("model.precision=fp32", "model.precision", "bf16", "fp32"),
    ] {
        let end = "change it back: a commit's format stays, also with --resume-changed; to go on \
                   in another, export the commit and train that with another log.dir";
        let message = format!("resume: {key}: expected \"{was}\", got \"{is}\"; {end}");
        for changed in ["", " --resume-changed"] {
            let arguments = format!("train run.toml --resume --set {set}{changed}");
            room.refused(&arguments, 2, &message);
        }
    }
    room.write_model("wider", &[("intermediate_size", json!(96))]);
    let other = room.terrace("train run.toml --resume --set model.path=wider");
    assert_eq!(other.code, 2, "{other:?}");
    let start = "terrace: checkpoint: run/checkpoint/checkpoint.tiles: expected a checkpoint of \
                 this model (";
    let end = "); choose another checkpoint.dir, or the model that it was made with\n";
    assert!(
        other.err.starts_with(start) && other.err.ends_with(end),
        "{other:?}"
    );
    assert_eq!(other.err.lines().count(), 1);
    assert!(bytes() == before, "a refusal changed the checkpoint");
}

/// An export without its tokenizer is of little use: transformers' pipelines refuse it.
#[test]
fn a_commit_is_exported_with_its_tokenizer_from_any_directory() {
    let room = Room::trained();
    let away = tempfile::tempdir().unwrap();
    for (checkpoint, out) in [("run/checkpoint", "a"), ("run", "b")] {
        let place = room.path(checkpoint).display().to_string();
        let mut command = room.command(TERRACE, "export --dtype float32 --out");
        command.arg(away.path().join(out)).arg("--checkpoint");
        let ended = Ended::from(
            command
                .arg(place)
                .current_dir(away.path())
                .output()
                .unwrap(),
        );
        let said = ended.success();
        assert!(!said.contains("warning"), "{said}");
        for name in ["tokenizer.json", "model.safetensors"] {
            let bytes = |path: PathBuf| std::fs::read(path).unwrap();
            let away = bytes(away.path().join(out).join(name));
            assert!(away == bytes(room.path("exported").join(name)), "{name}");
        }
    }
    // Where it is really gone, that is said with its name.
    std::fs::rename(room.path("model"), room.path("moved")).unwrap();
    let said = room
        .terrace("export --checkpoint run --out without")
        .success();
    let warning = "warning: model.path of the run, model, is not there: no tokenizer files";
    assert!(said.starts_with(warning), "{said}");
}

#[test]
fn an_export_that_does_not_fit_is_refused_before_anything_is_written() {
    let room = Room::trained();
    let Some(_mount) = Mount::tmpfs(room.path("small"), "64k") else {
        return;
    };
    let before = room.listing();
    let ended = room.terrace("export --checkpoint run/checkpoint --out small/model");
    let refusal = ended.refused(2);
    assert!(
        refusal.contains("bytes free, got 65536; free space"),
        "{refusal}"
    );
    assert_eq!(room.listing(), before);
}

#[test]
fn wrong_exports_and_prompts_are_refused() {
    let room = Room::trained();
    room.refused(
        "export --checkpoint run/checkpoint --out exported",
        2,
        "export: exported: expected a new directory, got one that is there; choose another, or \
         pass --overwrite if it is an export",
    );
    room.refused(
        "export --checkpoint run/checkpoint --out new --dtype f64",
        2,
        "arguments: --dtype: expected bf16 or f32, got f64; correct it",
    );
    room.refused(
        "export --checkpoint absent --out new",
        4,
        "open: absent/checkpoint.tiles: No such file or directory (os error 2); name a run's \
         checkpoint.dir",
    );
    room.refused(
        "generate --checkpoint run/checkpoint --prompt=",
        2,
        "generate: the prompt: expected at least one token, got none; give a text to continue",
    );
    room.refused(
        "generate --model exported --prompt=cat --temperature=-1",
        2,
        "arguments: --temperature: expected 0 or more, got -1; correct it",
    );
    room.refused(
        "generate --model exported --prompt=cat --tokens 30 --seq-len 16",
        2,
        "generate: prompt and --tokens: expected 1 to 16 tokens together, got 2 + 30; shorten \
         the prompt, lower --tokens, or raise --seq-len",
    );
    room.refused(
        "generate --model exported --prompt=cat --tokens 18446744073709551615",
        2,
        "arguments: prompt and --tokens: expected 2 to 1048576 tokens, got 18446744073709551615; \
         correct it",
    );
    room.refused(
        "generate --model exported --prompt=cat --seq-len 1048577",
        2,
        "arguments: --seq-len: expected 2 to 1048576 tokens, got 1048577; correct it",
    );
}

#[test]
fn a_refused_run_leaves_no_empty_trace() {
    let room = Room::new();
    let refused = || room.terrace("train run.toml --trace trace.json --set memory.host=1KiB");
    assert_eq!(refused().code, 2);
    assert!(!room.path("trace.json").exists());
    std::fs::write(room.path("trace.json"), "").unwrap();
    assert_eq!(refused().code, 2);
    // What was there before is somebody's.
    assert!(room.path("trace.json").exists());
}

#[test]
fn init_writes_a_file_that_parses_and_keeps_one_that_is_there() {
    let room = Room::new();
    room.terrace("init made.toml").success();
    let text = std::fs::read_to_string(room.path("made.toml")).unwrap();
    terrace::config::RunConfig::parse(&text, "made.toml", &[]).unwrap();
    room.refused(
        "init made.toml",
        2,
        "init: made.toml: expected a file that does not exist, got one that is there; name another",
    );
    assert_eq!(
        std::fs::read_to_string(room.path("made.toml")).unwrap(),
        text
    );
}

#[test]
fn plan_as_json_has_totals_that_are_the_sums_of_their_parts() {
    let room = Room::new();
    let arguments = "plan run.toml --json --set memory.host=3324KiB --set memory.store=store";
    let plan: Value = serde_json::from_str(&room.terrace(arguments).success()).unwrap();
    let number = |value: &Value| {
        value
            .as_u64()
            .unwrap_or_else(|| panic!("{value} in {plan}"))
    };
    let host = &plan["host"];
    let slabs = number(&host["slabs"]) + number(&host["commit_slabs"]);
    let rings = slabs * number(&host["slab_bytes"]);
    let pools = number(&host["gradients"]) + number(&host["weight_slots"]);
    let parts = number(&host["homes"]) + pools + number(&host["anchors"]) + rings;
    assert_eq!(number(&host["total"]), parts);
    assert!(parts <= number(&plan["budgets"]["host"]));
    let arena = &plan["device_arena"];
    let sum: u64 = arena["parts"]
        .as_object()
        .unwrap()
        .values()
        .map(number)
        .sum();
    assert_eq!(number(&arena["total"]), sum);
    let sections = plan["sections"].as_object().unwrap();
    let spilled: u64 = sections
        .values()
        .map(|section| number(&section["store"]))
        .sum();
    let store = number(&plan["store"]["total"]);
    // In the store every extent is whole pages.
    assert!(
        spilled > 0 && (spilled..spilled + 16 * 4096).contains(&store),
        "{plan}"
    );
    assert_eq!(number(&plan["parameters"]), 51_360);
    assert!(plan["prediction"]["step_seconds"].as_f64().unwrap() > 0.0);
    assert!(!room.path("store").exists(), "a plan makes nothing");
}

#[test]
fn data_preview_marks_what_is_not_trained_on() {
    let room = Room::new();
    let row = r#"{"messages":[{"role":"user","content":"who sat?"},{"role":"assistant","content":"the cat"}]}"#;
    room.write("chat.jsonl", row);
    let arguments = "data preview run.toml --set data.train=chat.jsonl --set data.seq_len=48";
    let expected = "sequence 0: 1 rows, 22 of 48 tokens\n--- chat.jsonl:1, 22 tokens\n\
                    ⟦<|im_start|>user\nwho sat?<|im_end|>\n<|im_start|>assistant\n⟧the cat\
                    <|im_end|>\n\n1 rows, 22 tokens, 5 trained on (22.7 %), longest row 22, mean \
                    22.0\n1 sequences of at most 48 tokens, 45.8 % full; 0 rows cut, 0 empty \
                    texts left out\nrow lengths: half are at most 22 tokens, 90 % 22, 99 % 22\n";
    let shown = room.terrace(arguments).success();
    assert!(shown.starts_with(expected), "{shown}");
    let with_ids = room.terrace(&format!("{arguments} --ids")).success();
    assert!(with_ids.contains("\nids 1 "), "{with_ids}");
}

#[test]
fn doctor_says_what_the_machine_has() {
    let room = Room::new();
    let before = room.listing();
    let out = room.terrace("doctor").success();
    let levels = ["bad", "warning", "unknown", "ok"];
    let mut last = 0;
    for line in out.lines().filter(|line| !line.starts_with("measured on ")) {
        let (level, _) = line.split_once(' ').unwrap();
        let rank = levels.iter().position(|known| *known == level).unwrap();
        assert!(rank >= last, "worst first: {out}");
        last = rank;
    }
    let subjects = [
        "cores: ",
        "simd: ",
        "memory available: ",
        "locked memory: ",
        "transparent huge pages: ",
        "numa: ",
        "io_uring: ",
        "kernel: ",
        "store .: ",
        "store i/o: ",
        "drive of .: ",
    ];
    for subject in subjects {
        let found = out
            .lines()
            .any(|line| line.get(9..).is_some_and(|l| l.starts_with(subject)));
        assert!(found, "{subject}: {out}");
    }
    assert!(
        out.lines()
            .any(|line| line.starts_with("measured on cpu: ")),
        "{out}"
    );
    let json: Value = serde_json::from_str(&room.terrace("doctor --json").success()).unwrap();
    let findings = json["findings"].as_array().unwrap();
    assert!(findings.len() >= subjects.len());
    for finding in findings {
        let level = finding["level"].as_str().unwrap();
        let remedy = finding["remedy"].as_str().unwrap();
        assert!(
            level == "good" || level == "unknown" || !remedy.is_empty(),
            "{finding}"
        );
    }
    assert!(json["rates"]["cpu"]["gemm"].as_f64().unwrap() > 0.0);
    let ended = room.terrace("doctor --store nowhere");
    assert_eq!((ended.code, ended.err.lines().count()), (4, 1), "{ended:?}");
    assert_eq!(room.listing(), before);
}

#[test]
fn a_plan_can_be_for_the_cpu_for_a_card_that_is_not_here_or_for_a_model_alone() {
    let room = Room::new();
    let cpu = room
        .terrace("plan run.toml --device cpu --device-memory 48MiB")
        .success();
    assert!(cpu.contains(" parameters on cpu, "), "{cpu}");
    let sizes = "--device-memory 2GB --host-memory 1GB";
    let gpu = room
        .terrace(&format!("plan run.toml --device cuda {sizes}"))
        .success();
    assert!(gpu.contains(" parameters on gpu, "), "{gpu}");
    for model in ["model", "model/config.json"] {
        let alone = room
            .terrace(&format!("plan --model {model} {sizes}"))
            .success();
        assert!(alone.contains(" parameters on gpu, "), "{alone}");
    }
    if Card::read(0).is_err() {
        let ended = room.terrace("plan run.toml --device cuda --set memory.device=auto");
        assert_eq!(ended.code, 1, "{ended:?}");
        let end = "to plan for a card that is not here, add --device-memory 24GB\n";
        assert!(ended.err.ends_with(end), "{ended:?}");
    }
    for (arguments, code) in [
        ("plan", 2),
        ("plan run.toml --model model", 2),
        ("plan --model nowhere/config.json", 4),
        ("plan run.toml --device tpu", 2),
        ("plan run.toml --row 2", 2),
    ] {
        assert_eq!(room.terrace(arguments).code, code, "{arguments}");
    }
}

/// With states first none would be there; that a micro-batch less of 256 does it is no advice.
#[test]
fn anchors_that_are_in_the_store_by_choice_are_told_so() {
    let config = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/fixtures/configs/qwen2.5-7b/config.json"
    );
    let out = Room::new()
        .terrace(&format!(
            "plan --model {config} --device-memory 24GB --host-memory 64GB --store-size 200GB \
             --set train.micro_batches=256 --set train.max_grad_norm=0"
        ))
        .success();
    let told = "in place of states: the predicted step is shorter so\n";
    assert!(out.contains(told), "{out}");
    assert!(!out.contains("no anchors would go to the store"), "{out}");
}

#[test]
fn a_suggestion_is_printed_and_written_and_changes_nothing() {
    let room = Room::new();
    let before = room.listing();
    let asked = "plan run.toml --suggest --device-memory 2GB --host-memory 1GB";
    let out = room.terrace(asked).success();
    assert!(out.contains("bound by\n   1  "), "{out}");
    for line in [
        "[train]\nmicro_batch = ",
        "[memory]\ndevice = \"2GB\"\nhost = \"1GB\"\n",
    ] {
        assert!(out.contains(line), "{line}: {out}");
    }
    assert!(
        out.contains(", the run's own sequences a step and clipping: "),
        "{out}"
    );
    assert_eq!(room.listing(), before);
    let json: Value =
        serde_json::from_str(&room.terrace(&format!("{asked} --json")).success()).unwrap();
    let rows = json.as_array().unwrap();
    let same = rows
        .iter()
        .position(|row| row["same_training"] == true)
        .unwrap();
    let product =
        |row: &Value| row["micro_batch"].as_u64().unwrap() * row["micro_batches"].as_u64().unwrap();
    assert_eq!(product(&rows[same]), 2);
    let other = (0..rows.len()).find(|row| *row != same).unwrap();
    room.terrace(&format!("{asked} --row {} --write new.toml", other + 1))
        .success();
    let written = std::fs::read_to_string(room.path("new.toml")).unwrap();
    let line = format!("micro_batches = {}\n", rows[other]["micro_batches"]);
    assert!(written.contains(&line), "{written}");
    // A file that is there stays; what was written is a run.
    let ended = room.terrace(&format!("{asked} --write new.toml"));
    assert_eq!((ended.code, ended.err.lines().count()), (4, 1), "{ended:?}");
    room.terrace("plan new.toml").success();
    let ended = room.terrace(&format!("{asked} --row 99"));
    assert_eq!(ended.code, 2, "{ended:?}");
    let ended = room.terrace("plan run.toml --suggest --device-memory 1MiB --host-memory 1MiB");
    assert_eq!((ended.code, ended.err.lines().count()), (2, 1), "{ended:?}");
    assert!(ended.err.contains("expected at least memory."), "{ended:?}");
}

#[test]
fn generating_is_repeatable_and_an_export_says_what_its_commit_says() {
    let room = Room::trained();
    let generate = |source: &str, more: &str| {
        let fixed = "--prompt=the --tokens 12 --ids";
        let ended = room.terrace(&format!("generate {source} {fixed} {more}"));
        ended.success()
    };
    let commit = generate("--checkpoint run/checkpoint", "");
    let ids: Vec<u32> = commit
        .split_whitespace()
        .map(|id| id.parse().unwrap())
        .collect();
    assert_eq!(ids.len(), 12, "{commit}");
    assert_eq!(generate("--checkpoint run/checkpoint", ""), commit);
    assert_eq!(generate("--model exported", ""), commit);
    let sampled = |seed: u32| {
        generate(
            "--model exported",
            &format!("--temperature 2 --seed {seed}"),
        )
    };
    assert_eq!(sampled(1), sampled(1));
    assert_ne!(sampled(1), sampled(2));
    // The earlier commit is another model.
    let earlier = generate(
        "--checkpoint run/checkpoint --step 2",
        "--temperature 2 --seed 1",
    );
    assert_ne!(earlier, sampled(1));
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let room = Room::trained();
    for (tool, arguments) in [
        (TERRACE, "plan run.toml --schedule"),
        (TERRACE, "data preview run.toml"),
        (TERRACE, "generate --model exported --prompt=the --tokens 2"),
        (TERRACE, "doctor"),
        (TERRACE, "--help"),
        (INSPECT, "list run/checkpoint"),
        (INSPECT, "verify run/checkpoint"),
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = room
            .command(tool, arguments)
            .stdout(writer)
            .output()
            .unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(
            (output.status.code(), stderr.as_str()),
            (Some(0), ""),
            "{arguments}"
        );
    }
    // A run is not ended by it: what it computes is in its commits.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut train = room.command(TERRACE, "train run.toml --set log.dir=unread");
    let output = train.stdout(writer).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    room.terrace("export --checkpoint unread/checkpoint --step 4 --out unread/exported")
        .success();
}

/// Changes a byte of each copy of `text` in the run's checkpoint file; how many there were.
fn damage(room: &Room, text: &str) -> usize {
    let path = room.path("run/checkpoint/checkpoint.tiles");
    let mut bytes = std::fs::read(&path).unwrap();
    let places: Vec<usize> = bytes
        .windows(text.len())
        .enumerate()
        .filter_map(|(at, window)| (window == text.as_bytes()).then_some(at))
        .collect();
    for at in &places {
        bytes[*at] ^= 1;
    }
    std::fs::write(&path, bytes).unwrap();
    places.len()
}

#[test]
fn a_run_goes_on_and_commits_after_its_newest_commit_was_lost() {
    let room = Room::trained();
    assert_eq!(damage(&room, "\"step\":4,"), 2, "both copies of a manifest");
    let out = room
        .terrace("train run.toml --resume --set train.steps=5")
        .success();
    assert!(out.contains("is lost"), "{out}");
    assert!(
        out.contains("step 3/5") && out.contains("step 5: committed"),
        "{out}"
    );
    room.terrace("export --checkpoint run/checkpoint --step 5 --out five")
        .success();
}

#[test]
fn resuming_from_a_damaged_commit_names_the_others() {
    let room = Room::trained();
    let path = room.path("run/checkpoint/checkpoint.tiles");
    let mut bytes = std::fs::read(&path).unwrap();
    // The end of the newest commit's region is its last extent.
    let region = (bytes.len() - (4 << 20)) / 3;
    let commit = (0..3)
        .map(|index| (4 << 20) + index * region)
        .find(|start| {
            let region = &bytes[*start..*start + region];
            region.windows(9).any(|window| window == b"\"step\":4,")
        });
    let end = commit.expect("one of three regions") + region;
    let last = (0..end).rev().find(|at| bytes[*at] != 0).unwrap();
    bytes[last] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let ended = room.terrace("train run.toml --resume --set train.steps=5");
    assert_eq!(ended.code, 3, "{ended:?}");
    assert!(
        ended.err.contains("commit of step 4: checksum of tile "),
        "{ended:?}"
    );
    assert!(
        ended
            .err
            .ends_with("; check the drive, then try --resume=2\n"),
        "{ended:?}"
    );
    room.terrace("train run.toml --resume=2").success();
}

#[test]
fn a_row_without_targets_is_left_out_and_said() {
    let room = Room::new();
    let masked = "{\"input_ids\":[5,6,7],\"labels\":[-100,-100,-100]}\n";
    let rows = format!("{}{masked}", "{\"input_ids\":[5,6,7]}\n".repeat(3));
    room.write("rows.jsonl", &rows);
    let ended = room.terrace(
        "train run.toml --set data.train=rows.jsonl --set data.eval=[] --set data.packing=false \
         --set data.shuffle=false --set train.micro_batch=1 --set train.micro_batches=1 \
         --set checkpoint.every=100",
    );
    assert_eq!(ended.code, 0, "{ended:?}");
    let said = "; 1 rows without a token to train on left out\n";
    assert!(ended.out.contains(said), "{ended:?}");
}

const MODELS: [&str; 5] = [
    "qwen2.5-7b",
    "qwen2.5-14b",
    "qwen2.5-32b",
    "qwen2.5-72b",
    "dense-120b",
];
/// Device and host memory.
const MACHINES: [(&str, &str); 3] = [("24GB", "128GB"), ("141GB", "128GB"), ("141GB", "1500GB")];
/// What else is asked for, and how it is called.
const VARIANTS: [(&str, &str); 3] = [
    ("", "as run.toml"),
    ("--set train.max_grad_norm=0", "no clipping"),
    (
        "--set train.max_grad_norm=0 --set train.micro_batches=1 --set data.seq_len=1024",
        "no clipping, 1 micro-batch of 1024",
    ),
];

const PLANS: &str = "# Plans for hardware that need not be there

`tests/tools.rs` makes this page from what `terrace plan` prints and fails when they differ;
`TERRACE_BLESS=1 cargo test --test tools plans` writes it anew. Each row is

    terrace plan tests/fixtures/configs/run.toml --json \\
        --set model.path=tests/fixtures/configs/MODEL \\
        --device-memory DEVICE --host-memory HOST --store-space 4TB [VARIANT]

4 micro-batches of 1 × 2048 tokens, bf16 with an exact fp32 master, gradients that wait for the norm
unless clipping is off (`--set train.max_grad_norm=0`). Rates are those of one server as measured
once (GEMM 650 TFLOP/s, attention 350 TFLOP/s, PCIe 55 GB/s, one cloud disk of 1.7 GB/s both ways
at once, AdamW 5.2e9 parameters/s): predictions, not measurements. Qwen2.5's dimensions are the
published ones; the dense 120B is a Llama shape of this project's own (106 blocks of 10240).
";

/// Device and host memory that suggestions are asked for.
const ASKED: [(&str, &str); 4] = [
    ("24GB", "64GB"),
    ("24GB", "128GB"),
    ("80GB", "512GB"),
    ("141GB", "128GB"),
];

const SUGGESTIONS: &str = "
## Suggestions

    terrace plan --suggest --model tests/fixtures/configs/MODEL/config.json \\
        --device-memory DEVICE --host-memory HOST --store-space 4TB

The fastest with clipping and the fastest without, sequences of 1,024; sizes in GiB.

| machine | model | micro-batches | tokens | clipping | device | host | store | s a step \
| tokens/s | bound by |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
";

/// The fastest rows of one model on one machine, with clipping and without.
fn suggested_rows(model: &str, device: &str, host: &str) -> String {
    let room = Path::new(env!("CARGO_MANIFEST_DIR"));
    let arguments = format!(
        "plan --suggest --json --model tests/fixtures/configs/{model}/config.json \
         --device-memory {device} --host-memory {host} --store-space 4TB"
    );
    let output = Command::new(TERRACE)
        .current_dir(room)
        .args(arguments.split_whitespace())
        .output();
    let answer: Value = serde_json::from_str(&Ended::from(output.unwrap()).success()).unwrap();
    let rows = answer.as_array().unwrap();
    let gib = |value: &Value| value.as_u64().unwrap() as f64 / (1u64 << 30) as f64;
    [true, false]
        .into_iter()
        .filter_map(|clips| {
            let clipped = |row: &&Value| (row["max_grad_norm"] != 0.0) == clips;
            let row = rows.iter().find(clipped)?;
            Some(format!(
                "| {device} + {host} | {model} | {} x {} | {} | {} | {:.1} | {:.1} | {:.1} | \
                 {:.2} | {:.0} | {} |\n",
                row["micro_batches"],
                row["micro_batch"],
                row["tokens"],
                if clips { "on" } else { "off" },
                gib(&row["device"]),
                gib(&row["host"]),
                gib(&row["store"]),
                row["step_seconds"].as_f64().unwrap(),
                row["tokens_per_second"].as_f64().unwrap(),
                row["reason"].as_str().unwrap(),
            ))
        })
        .collect()
}

/// One row of the page, and whether the plan was refused.
fn plan_row(model: &str, device: &str, host: &str, variant: &str) -> (String, bool) {
    let room = Path::new(env!("CARGO_MANIFEST_DIR"));
    let arguments = format!(
        "plan tests/fixtures/configs/run.toml --json \
         --set model.path=tests/fixtures/configs/{model} --device-memory {device} \
         --host-memory {host} --store-space 4TB {variant}"
    );
    let output = Command::new(TERRACE)
        .current_dir(room)
        .args(arguments.split_whitespace())
        .output();
    let ended = Ended::from(output.unwrap());
    if ended.code != 0 {
        assert_eq!((ended.code, ended.err.lines().count()), (2, 1), "{ended:?}");
        let message = ended.err.strip_prefix("terrace: ").unwrap().trim_end();
        return (
            format!("| {model} | refused: {message} | | | | | |\n"),
            true,
        );
    }
    let plan: Value = serde_json::from_str(&ended.out).unwrap();
    let gigabytes = |value: &Value| format!("{:.1}", value.as_u64().unwrap() as f64 / 1e9);
    let prediction = &plan["prediction"];
    let row = format!(
        "| {model} | {} | {} | {} | {} of {} | {:.2} | {} |\n",
        gigabytes(&plan["device_arena"]["total"]),
        gigabytes(&plan["host"]["total"]),
        gigabytes(&plan["store"]["total"]),
        plan["kept"],
        plan["block_micro_pairs"],
        prediction["step_seconds"].as_f64().unwrap(),
        plan["bound_by"].as_str().unwrap(),
    );
    (row, false)
}

#[test]
fn plans_for_models_of_7_to_120_billion_parameters_are_those_of_the_page() {
    let mut page = PLANS.to_string();
    let mut refused = Vec::new();
    for (device, host) in MACHINES {
        for (variant, name) in VARIANTS {
            page.push_str(&format!("\n## {device} device + {host} host, {name}\n\n"));
            page.push_str(
                "| model | device GB | host GB | store GB | blocks kept | s a step | bound by |\n",
            );
            page.push_str("| --- | --- | --- | --- | --- | --- | --- |\n");
            for model in MODELS {
                let (row, no) = plan_row(model, device, host, variant);
                page.push_str(&row);
                if no {
                    refused.push((device, host, name, model));
                }
            }
        }
    }
    page.push_str(SUGGESTIONS);
    for (device, host) in ASKED {
        for model in ["qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b"] {
            page.push_str(&suggested_rows(model, device, host));
        }
    }
    // What the design promises of the largest: without clipping all of it in 1.5 TB of host memory.
    let (row, no) = plan_row("dense-120b", "141GB", "1500GB", VARIANTS[1].0);
    assert!(!no && row.split('|').nth(4) == Some(" 0.0 "), "{row}");
    assert!(
        !refused.iter().any(|(.., model)| *model == "qwen2.5-7b"),
        "{refused:?}"
    );
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/results/plans.md");
    if std::env::var_os("TERRACE_BLESS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap();
    let differing = page
        .lines()
        .zip(written.lines())
        .find(|(made, kept)| made != kept);
    assert!(
        page == written,
        "benches/results/plans.md differs, first in {differing:#?}"
    );
}

#[test]
fn a_prompt_may_come_from_standard_input() {
    let room = Room::trained();
    let mut child = room
        .command(TERRACE, "generate --model exported --tokens 3 --ids")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"the").unwrap();
    let piped = Ended::from(child.wait_with_output().unwrap()).success();
    let given = room.terrace("generate --model exported --prompt=the --tokens 3 --ids");
    assert_eq!(piped, given.success());
}
