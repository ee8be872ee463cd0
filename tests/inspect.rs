//! Goal: whoever looks into a store sees what is there, whole or damaged, and changes nothing that
//! they did not ask to change.
//!
//! Method: the real binary on stores that the trainer wrote, once as they are and once with every
//! kind of damage put in at places that the format names. Files are compared byte for byte before
//! and after; what is printed is compared whole where a person reads it, by key where a program
//! does.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

#[path = "support/tool.rs"]
mod tool;

use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use serde_json::{Value, json};
use tempfile::TempDir;
use terrace::store::checksum;
use terrace::store::format::{Region, Superblock, superblock, superblock_offset};
use tool::{Ended, RUN};

const TERRACE: &str = env!("CARGO_BIN_EXE_terrace");
const INSPECT: &str = env!("CARGO_BIN_EXE_terrace-inspect");

const STORE: &str = "run/checkpoint/checkpoint.tiles";

/// A directory in which the tools run.
struct Room {
    dir: TempDir,
}

/// Trains once in each precision; every room has a copy.
fn trained(precision: &str) -> Room {
    static ROOMS: OnceLock<[TempDir; 2]> = OnceLock::new();
    let rooms = ROOMS.get_or_init(|| {
        // Tied and split, untied and f32.
        ["bf16", "fp32"].map(|precision| {
            let dir = tempfile::tempdir().unwrap();
            train(dir.path(), precision);
            dir
        })
    });
    let from = rooms[usize::from(precision == "fp32")].path();
    let room = Room {
        dir: tempfile::tempdir().unwrap(),
    };
    for folder in ["run", "run/checkpoint"] {
        std::fs::create_dir(room.path(folder)).unwrap();
        for entry in std::fs::read_dir(from.join(folder)).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_file() {
                let to = room.path(folder).join(entry.file_name());
                std::fs::copy(entry.path(), to).unwrap();
            }
        }
    }
    room
}

fn train(dir: &Path, precision: &str) {
    let model = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024,
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64,
        "initializer_range": 0.02, "tie_word_embeddings": precision == "bf16",
        "torch_dtype": "bfloat16",
    });
    std::fs::create_dir(dir.join("model")).unwrap();
    std::fs::write(dir.join("model/config.json"), model.to_string()).unwrap();
    for (file, bytes) in terrace::data::quickstart::tokenizer_files() {
        std::fs::write(dir.join("model").join(file), bytes).unwrap();
    }
    let text = "the cat sat on the mat and looked at the moon\n\nthe moon looked back\n";
    std::fs::write(dir.join("text.txt"), text).unwrap();
    std::fs::write(dir.join("run.toml"), RUN).unwrap();
    let set = format!("model.precision={precision}");
    let output = Command::new(TERRACE)
        .args(["train", "run.toml", "--device", "cpu", "--set", &set])
        .current_dir(dir)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}

impl Room {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn run(&self, tool: &str, arguments: &str) -> Ended {
        let output = Command::new(tool)
            .args(arguments.split_whitespace())
            .current_dir(self.dir.path())
            .output();
        output.unwrap().into()
    }

    fn inspect(&self, arguments: &str) -> Ended {
        self.run(INSPECT, arguments)
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.path(STORE)).unwrap()
    }

    fn superblock(&self) -> Superblock {
        let page = &self.bytes()[..4096];
        Superblock::decode(page, 0).unwrap().unwrap()
    }

    /// Overwrites bytes of the store.
    fn put(&self, offset: u64, bytes: &[u8]) {
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(self.path(STORE))
            .unwrap();
        file.write_all_at(bytes, offset).unwrap();
    }

    /// Spoils both or one of the manifest copies of a region.
    fn spoil_manifest(&self, region: usize, copies: &[u64]) {
        let geometry = self.superblock().geometry;
        for copy in copies {
            self.put(geometry.manifest_offset(region, *copy) + 200, b"spoiled");
        }
    }

    fn spoil_superblocks(&self, copies: &[usize]) {
        for copy in copies {
            self.put(superblock_offset(*copy) + 88, b"spoiled");
        }
    }

    /// Region of the commit of that generation.
    fn region(&self, wanted: u64) -> usize {
        let regions = self.superblock().regions;
        let found = regions.iter().position(|region| match region {
            Region::Free => false,
            Region::Committed { generation, .. } => *generation == wanted,
        });
        found.unwrap()
    }

    /// The names in a directory.
    fn names(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(folder)).unwrap();
        let mut names: Vec<String> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

#[test]
fn what_is_there_is_listed_for_people_and_programs_and_nothing_changes() {
    let room = trained("bf16");
    let before = (room.bytes(), room.names("run/checkpoint"));
    let commits = room.inspect("list run --json").json()["commits"].clone();
    let line = |generation: u64| {
        let tokens = &commits[generation as usize - 1]["tokens"];
        format!(
            "generation {generation}: step {}, {tokens} tokens, 640.00 KiB in 16 extents, weight \
             108.00 KiB, residual 108.00 KiB, moment1 212.00 KiB, moment2 212.00 KiB\n",
            2 * generation
        )
    };
    let text = room.inspect("list run/checkpoint").success();
    assert_eq!(text, line(1) + &line(2));
    // A run's directory, the directory and the file are the same store.
    let all = ["run", "run/checkpoint", STORE].map(|path| {
        let listed = room.inspect(&format!("list {path} --json")).json();
        listed["commits"].clone()
    });
    assert!(all[0] == all[1] && all[1] == all[2], "{all:?}");
    let keys =
        |value: &Value| -> Vec<String> { value.as_object().unwrap().keys().cloned().collect() };
    assert_eq!(
        keys(&all[0][0]),
        [
            "generation",
            "step",
            "tokens",
            "best",
            "extents",
            "bytes",
            "sections"
        ]
    );
    let tiles = room.inspect("list run --step 2 --json").json();
    assert_eq!(keys(&tiles), ["generation", "step", "tiles", "notes"]);
    let names: Vec<&str> = tiles["tiles"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["tile"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["embed", "block 0", "block 1", "head"]);
    assert_eq!(
        tiles["tiles"][0]["tensors"][0]["name"],
        "model.embed_tokens.weight"
    );
    let described = room.inspect("info run --json").json();
    assert_eq!(described["keep"], 2);
    assert_eq!(described["holder"], Value::Null);
    assert_eq!(
        described["superblock_faults"],
        json!([null, null, null, null])
    );
    assert_eq!(described["regions"].as_array().unwrap().len(), 3);
    let text = room.inspect("info run").success();
    assert!(
        text.contains("generation 2, step 4, manifests whole and whole"),
        "{text}"
    );
    for arguments in [
        "verify run",
        "verify run --full",
        "stat run",
        "dump run block 1",
    ] {
        room.inspect(arguments).success();
    }
    assert!((room.bytes(), room.names("run/checkpoint")) == before);
}

#[test]
fn a_step_or_a_tile_that_is_not_there_is_refused_with_those_that_are() {
    let room = trained("bf16");
    let refused = |arguments: &str, message: &str| {
        let ended = room.inspect(arguments);
        assert_eq!(
            (ended.code, ended.err),
            (2, format!("terrace-inspect: {message}\n"))
        );
    };
    refused(
        "verify run --step 3",
        "checkpoint: run/checkpoint/checkpoint.tiles: expected one of the steps 2, 4, got 3; name \
         a step that is committed",
    );
    refused(
        "stat run block 7",
        "tile: run/checkpoint/checkpoint.tiles: expected one of embed, block 0, block 1, head, or \
         a tensor's name, got block 7; `list --step` shows all",
    );
    refused(
        "dump run embed --section moments",
        "arguments: --section: expected weight, residual, moment1, moment2 or master, got moments; \
         correct it",
    );
    std::fs::write(
        room.path("foreign"),
        "of somebody else, and longer than a header",
    )
    .unwrap();
    refused(
        "list foreign",
        "file: foreign: expected a checkpoint store or safetensors, got neither; name a run's \
         checkpoint.dir or a .safetensors file",
    );
    assert_eq!(room.inspect("list absent").code, 4);
}

#[test]
fn numbers_of_a_tensor_are_those_that_an_export_has() {
    for precision in ["bf16", "fp32"] {
        let room = trained(precision);
        room.inspect("export run --out exported --dtype f32")
            .success();
        let tensor = "model.layers.1.mlp.down_proj.weight";
        let dump = |path: &str, rest: &str| -> Value {
            let arguments = format!("dump {path} {tensor} --count 100000 --json {rest}");
            room.inspect(&arguments).json()
        };
        let master = if precision == "bf16" {
            "--section master"
        } else {
            ""
        };
        let (ours, theirs) = (dump("run", master), dump("exported", ""));
        assert_eq!(ours["values"].as_array().unwrap().len(), 32 * 64);
        assert_eq!(ours["values"], theirs["values"]);
        assert_eq!(ours["statistics"], theirs["statistics"]);
        assert_eq!(ours["tile"], "block 1");
        // A tensor within its tile, and a part of it.
        let part = room.inspect(&format!(
            "dump run block 1 --tensor {tensor} {master} --start 64 --count 3 --json"
        ));
        assert_eq!(
            part.json()["values"],
            json!(ours["values"].as_array().unwrap()[64..67])
        );
        let equal = room.inspect("diff run exported").success();
        assert!(equal.starts_with("0 of "), "{equal}");
        let stat = room
            .inspect("stat run embed --section moment2 --json")
            .json();
        assert_eq!(stat["rows"][0]["statistics"]["count"], 1024 * 32);
    }
}

#[test]
fn exports_are_those_of_terrace_export_and_never_in_the_store() {
    let room = trained("bf16");
    for (dtype, step) in [("bf16", 4), ("f32", 2)] {
        let options = format!("--dtype {dtype} --step {step}");
        let terrace = format!("export --checkpoint run/checkpoint --out theirs-{dtype} {options}");
        let ended = room.run(TERRACE, &terrace);
        assert_eq!(ended.code, 0, "{ended:?}");
        room.inspect(&format!("export run --out ours-{dtype} {options}"))
            .success();
        let (theirs, ours) = (format!("theirs-{dtype}"), format!("ours-{dtype}"));
        assert_eq!(room.names(&theirs), room.names(&ours));
        for name in room.names(&ours) {
            let read = |folder: &str| std::fs::read(room.path(folder).join(&name)).unwrap();
            assert!(read(&theirs) == read(&ours), "{name}");
        }
    }
    let before = room.names("run/checkpoint");
    assert_eq!(
        room.inspect("export run --out ours-f32").code,
        2,
        "it is there"
    );
    room.inspect("export run --out ours-f32 --overwrite")
        .success();
    assert_eq!(
        room.inspect("export run --out run/checkpoint/model").code,
        2
    );
    assert_eq!(room.inspect("copy run --out run/checkpoint/copy").code, 2);
    assert_eq!(room.names("run/checkpoint"), before);
}

#[test]
fn differences_are_counted_in_bits_values_and_ulp() {
    let room = trained("bf16");
    let same = room.inspect("diff run run --json");
    assert_eq!(same.code, 0);
    assert_eq!(
        (
            same.json()["equal"].clone(),
            same.json()["differing"].clone()
        ),
        (json!(true), json!(0))
    );
    let steps = room.inspect("diff run --step-a 2 --step-b 4 --json");
    assert_eq!(steps.code, 1);
    assert!(steps.json()["rows"].as_array().unwrap().len() > 20);
    // One element of one tensor moved by one unit in its last place.
    room.inspect("export run --out a --dtype f32").success();
    room.inspect("export run --out b --dtype f32").success();
    let path = room.path("b/model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let at = header + 4 * (32 + 5);
    let value = f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    bytes[at..at + 4].copy_from_slice(&f32::from_bits(value.to_bits() ^ 1).to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let moved = (f64::from(value) - f64::from(f32::from_bits(value.to_bits() ^ 1))).abs();
    for pair in ["a b", "run b", "b run"] {
        let found = room.inspect(&format!("diff {pair} --json"));
        assert_eq!(found.code, 1, "{pair}");
        let rows = found.json()["rows"].clone();
        assert_eq!(rows.as_array().unwrap().len(), 1, "{rows}");
        let row = &rows[0];
        assert_eq!(row["tensor"], "model.embed_tokens.weight");
        assert_eq!(
            (&row["differing"], &row["bits"], &row["max_ulp"]),
            (&json!(1), &json!(1), &json!(1))
        );
        assert_eq!(
            (&row["first"], &row["max_abs"]),
            (&json!(37), &json!(moved))
        );
    }
    let text = room.inspect("diff a b").out;
    assert!(text.contains("[1, 5]"), "{text}");
    // Another precision and another model: masters are compared, and what only one has is named.
    let other = trained("fp32");
    std::fs::rename(other.path("run"), room.path("other")).unwrap();
    let found = room.inspect("diff run other --json").json();
    let parts = found["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["part"].clone());
    assert!(parts.clone().any(|part| part == "master"), "{found}");
    assert!(
        found["skipped"][0].as_str().unwrap().starts_with("head: "),
        "{found}"
    );
}

#[test]
fn a_damaged_extent_is_named_with_its_tensors_and_the_rest_is_read() {
    for engine in ["io_uring", "pread"] {
        let room = trained("bf16");
        let geometry = room.superblock().geometry;
        let offset = geometry.extents_offset(room.region(2));
        room.put(offset + 5, b"!");
        let ended = room.inspect(&format!("verify run --full --io-engine {engine}"));
        if engine == "io_uring" && ended.code == 2 && ended.err.contains("--io-engine") {
            println!("SKIP: no io_uring here: {}", ended.err);
            continue;
        }
        assert_eq!(ended.code, 3, "{ended:?}");
        let start = format!(
            "terrace-inspect: run/checkpoint/checkpoint.tiles: step 4, embed weight, extent 0 at \
             byte {offset}: expected checksum "
        );
        assert!(ended.err.starts_with(&start), "{ended:?}");
        let end = "; it exists once: resume from another commit, check the drive\n";
        assert!(ended.err.ends_with(end), "{ended:?}");
        assert_eq!(
            ended.out,
            "2 commits: 31 extents, 1.19 MiB read and right; 1 damaged\n"
        );
        let found = room.inspect("verify run --full --json").json();
        let finding = &found["findings"][0];
        assert_eq!(finding["severity"], "loss");
        assert_eq!(
            (&finding["tile"], &finding["section"]),
            (&json!("embed"), &json!("weight"))
        );
        assert_eq!(finding["tensors"], json!(["model.embed_tokens.weight"]));
        // Structures are whole, the other commit is whole, and nothing comes out of this one.
        room.inspect("verify run").success();
        room.inspect("verify run --full --step 2").success();
        assert_eq!(room.inspect("dump run embed").code, 3);
        assert_eq!(room.inspect("export run --out exported").code, 3);
        assert_eq!(room.inspect("copy run --out copied").code, 3);
        assert!(!room.path("exported").exists() && !room.path("copied").exists());
        room.inspect("copy run --out copied --step 2").success();
        assert_eq!(
            room.inspect("repair run --write").out,
            "nothing to repair\n"
        );
    }
}

#[test]
fn structures_that_exist_twice_are_repaired_and_the_log_undoes_it() {
    type Damage = fn(&Room);
    let damages: [(&str, Damage); 5] = [
        ("superblock", |room| room.spoil_superblocks(&[2])),
        ("superblocks", |room| room.spoil_superblocks(&[0, 3])),
        ("three superblocks", |room| {
            room.spoil_superblocks(&[0, 1, 3])
        }),
        ("manifest", |room| room.spoil_manifest(room.region(1), &[0])),
        ("both", |room| {
            room.spoil_manifest(room.region(2), &[1]);
            room.spoil_superblocks(&[1]);
        }),
    ];
    for (what, damage) in damages {
        let room = trained("bf16");
        let whole = room.bytes();
        damage(&room);
        let damaged = room.bytes();
        let verified = room.inspect("verify run --full");
        assert_eq!(verified.code, 1, "{what}: {verified:?}");
        assert!(
            verified.err.contains("`repair` restores it"),
            "{verified:?}"
        );
        let dry = room.inspect("repair run");
        assert_eq!(dry.code, 1, "{dry:?}");
        assert!(
            dry.out
                .ends_with("nothing was written: pass --write to do this\n"),
            "{dry:?}"
        );
        assert!(room.bytes() == damaged, "{what}: a dry run wrote");
        assert_eq!(
            room.names("run/checkpoint"),
            ["checkpoint.lock", "checkpoint.tiles"]
        );
        room.inspect("repair run --write").success();
        assert!(room.bytes() == whole, "{what}: not what it was");
        room.inspect("verify run --full").success();
        assert_eq!(
            room.inspect("repair run --write").success(),
            "nothing to repair\n"
        );
        let log = "run/checkpoint/repair.log";
        room.inspect(&format!("repair run --undo {log}")).success();
        assert!(room.bytes() == whole, "{what}: a dry undo wrote");
        room.inspect(&format!("repair run --undo {log} --write"))
            .success();
        assert!(room.bytes() == damaged, "{what}: not put back");
        assert_eq!(
            room.inspect(&format!("repair run --undo {log} --write"))
                .code,
            2,
            "{what}"
        );
    }
}

#[test]
fn a_commit_without_a_manifest_is_quarantined_and_a_run_goes_on_from_the_other() {
    let room = trained("bf16");
    room.spoil_manifest(room.region(2), &[0, 1]);
    let damaged = room.bytes();
    let verified = room.inspect("verify run --json");
    assert_eq!(verified.code, 3);
    assert_eq!(verified.json()["worst"], "loss");
    let list = room.inspect("list run").out;
    let note = "generation 2 is lost: no copy of its manifest is whole\ngeneration 1: step 2, ";
    assert!(list.contains(note), "{list}");
    let ended = room.inspect("repair run --write --json");
    assert_eq!(ended.code, 3, "what is lost stays lost: {ended:?}");
    assert_eq!(ended.json()["quarantined"], json!([2]));
    room.inspect("verify run --full").success();
    assert_eq!(
        room.inspect("list run --json").json()["commits"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    room.inspect("repair run --undo run/checkpoint/repair.log --write")
        .success();
    assert!(room.bytes() == damaged);
    // Nothing is quarantined that would leave nothing.
    room.spoil_manifest(room.region(1), &[0, 1]);
    let damaged = room.bytes();
    let ended = room.inspect("repair run --write");
    assert_eq!(ended.code, 3, "{ended:?}");
    assert!(
        ended.err.contains("no commit is left to go on from"),
        "{ended:?}"
    );
    assert!(room.bytes() == damaged);
}

#[test]
fn a_file_cut_short_is_named_and_mended_where_nothing_is_lost() {
    let room = trained("bf16");
    let whole = room.bytes();
    let cut = |length: u64| {
        std::fs::write(room.path(STORE), &whole).unwrap();
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(room.path(STORE))
            .unwrap();
        file.set_len(length).unwrap();
    };
    // The last region is free.
    let geometry = room.superblock().geometry;
    cut(geometry.manifest_offset(2, 0) + 4096);
    assert_eq!(room.inspect("verify run").code, 1);
    room.inspect("repair run --write").success();
    assert!(room.bytes() == whole);
    // In the second commit, or its manifests, or before the first.
    cut(geometry.extents_offset(1) + 8192 + 17);
    let ended = room.inspect("verify run --full --json");
    assert_eq!(ended.code, 3);
    let findings = ended.json()["findings"].clone();
    let named = findings.as_array().unwrap().iter();
    assert!(
        named
            .clone()
            .any(|f| f["tile"] == "head" && f["section"] == "moment2"),
        "{findings}"
    );
    assert!(!named.clone().any(|f| f["step"] == 2), "{findings}");
    for length in [
        geometry.manifest_offset(1, 0) + 100,
        5 << 20,
        1 << 20,
        100,
        0,
    ] {
        cut(length);
        let ended = room.inspect("verify run --full");
        assert_eq!(ended.code, 3, "{length}: {ended:?}");
    }
}

#[test]
fn stores_of_others_and_of_later_versions_are_refused_and_left_alone() {
    let room = trained("bf16");
    let whole = room.bytes();
    room.spoil_superblocks(&[0, 1, 2, 3]);
    for command in ["info", "list", "repair", "repair --write", "verify", "stat"] {
        let ended = room.inspect(&format!("{command} run"));
        assert_eq!(ended.code, 3, "{command}: {ended:?}");
    }
    std::fs::write(room.path(STORE), &whole).unwrap();
    for copy in 0..4 {
        let start = superblock_offset(copy);
        let mut page = whole[start as usize..][..4096].to_vec();
        page[superblock::VERSION.start] = 9;
        let sum = checksum(&page[..superblock::CHECKSUM.start]);
        page[superblock::CHECKSUM.start..].copy_from_slice(&sum.to_le_bytes());
        room.put(start, &page);
    }
    let later = room.bytes();
    for command in [
        "info",
        "list",
        "repair",
        "repair --write",
        "verify",
        "dump embed",
    ] {
        let ended = room.inspect(&command.replacen(' ', " run ", 1));
        let ended = match command.contains(' ') {
            true => ended,
            false => room.inspect(&format!("{command} run")),
        };
        assert_eq!(ended.code, 2, "{command}: {ended:?}");
    }
    assert!(room.bytes() == later);
    // Random bytes under the store's name.
    std::fs::write(room.path(STORE), vec![0x5a; 5 << 20]).unwrap();
    assert_eq!(room.inspect("verify run").code, 3);
}

#[test]
fn a_store_under_training_is_looked_at_and_not_changed() {
    let room = trained("bf16");
    room.spoil_superblocks(&[1]);
    let lock = room.path("run/checkpoint/checkpoint.lock");
    let mut held = std::fs::OpenOptions::new().write(true).open(lock).unwrap();
    held.try_lock().unwrap();
    held.set_len(0).unwrap();
    writeln!(held, "{}", std::process::id()).unwrap();
    let before = room.bytes();
    let used = format!(
        "in use by process {}: this is what was committed so far\n",
        std::process::id()
    );
    for command in ["list run", "stat run embed", "verify run --full"] {
        let ended = room.inspect(command);
        assert!(ended.out.starts_with(&used), "{command}: {ended:?}");
    }
    assert_eq!(
        room.inspect("info run --json").json()["holder"],
        std::process::id()
    );
    for command in ["repair run", "repair run --write"] {
        assert_eq!(room.inspect(command).code, 5, "{command}");
    }
    room.inspect("copy run --out copied").success();
    room.inspect("export run --out exported").success();
    assert!(room.bytes() == before);
}

#[test]
fn a_copy_is_the_store_byte_for_byte_and_a_run_goes_on_from_it() {
    let room = trained("fp32");
    for engine in ["", "--io-engine pread"] {
        let ended = room.inspect(&format!("copy run --out copied {engine} --json"));
        assert_eq!(ended.json()["steps"], json!([2, 4]));
        assert!(std::fs::read(room.path("copied/checkpoint.tiles")).unwrap() == room.bytes());
        assert_eq!(room.inspect("copy run --out copied").code, 2, "it is there");
        std::fs::remove_dir_all(room.path("copied")).unwrap();
    }
    room.inspect("copy run --out copied --step 2").success();
    let listed = room.inspect("list copied --json").json();
    assert_eq!(listed["commits"].as_array().unwrap().len(), 1);
    assert_eq!(listed["commits"][0]["step"], 2);
    room.inspect("verify copied --full").success();
    room.inspect("diff run copied --step-a 2").success();
}

#[test]
fn a_verification_ends_by_a_signal_and_goes_on_where_it_was() {
    let room = trained("bf16");
    let geometry = room.superblock().geometry;
    room.put(geometry.extents_offset(room.region(1)) + 5, b"!");
    let mut slow = Command::new(INSPECT)
        .args("verify run --full --rate 100KB/s --state state --json".split(' '))
        .current_dir(room.dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // It writes its state every two seconds; the whole would take thirteen.
    while !room.path("state").exists() {
        assert!(
            slow.try_wait().unwrap().is_none(),
            "it ended before its state was written"
        );
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let kill = Command::new("kill")
        .args(["-INT", &slow.id().to_string()])
        .status()
        .unwrap();
    assert!(kill.success());
    let ended = slow.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130));
    let first: Value = serde_json::from_slice(&ended.stdout).unwrap();
    assert_eq!(first["interrupted"], true);
    let rest = room.inspect("verify run --full --state state --json");
    assert_eq!(rest.code, 3);
    let rest = rest.json();
    let resumed = rest["resumed_extents"].as_u64().unwrap();
    assert!((1..32).contains(&resumed), "{rest}");
    assert_eq!(resumed + rest["extents"].as_u64().unwrap(), 32);
    assert_eq!(
        rest["findings"].as_array().unwrap().len(),
        1,
        "what was found is kept: {rest}"
    );
    assert!(!room.path("state").exists());
}

#[test]
fn leftovers_are_listed_first_and_only_terraces_own_are_removed() {
    let room = trained("bf16");
    let make = |name: &str, bytes: &[u8]| {
        let path = room.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    };
    // No process has this number: Linux gives at most 2^22.
    make("run/checkpoint/checkpoint.tiles.new", &[0; 8192]);
    make("run/checkpoint/.trial.99999999", b"");
    make(".model.partial-99999999/model.safetensors", b"");
    make(".other.partial-99999999/thesis.txt", b"of somebody else");
    make(
        &format!(".busy.partial-{}/config.json", std::process::id()),
        b"{}",
    );
    make("scratch/scratch.tiles", b"without a lock beside it");
    let all = [".", "run", "run/checkpoint", "scratch"].map(|folder| room.names(folder));
    let listed = room.inspect("reclaim run").success();
    assert!(listed.contains("a store that was not finished"), "{listed}");
    assert!(
        listed.ends_with(": pass --write to remove these\n"),
        "{listed}"
    );
    let kept = room.inspect("reclaim . --json").json();
    assert_eq!(kept["leftovers"].as_array().unwrap().len(), 1, "{kept}");
    assert_eq!(kept["kept"].as_array().unwrap().len(), 2, "{kept}");
    assert_eq!(
        [".", "run", "run/checkpoint", "scratch"].map(|f| room.names(f)),
        all
    );
    for folder in [".", "run", "scratch"] {
        room.inspect(&format!("reclaim {folder} --write")).success();
    }
    assert_eq!(
        room.names("run/checkpoint"),
        ["checkpoint.lock", "checkpoint.tiles"]
    );
    assert!(!room.path(".model.partial-99999999").exists());
    assert!(room.path(".other.partial-99999999/thesis.txt").exists());
    assert!(room.path("scratch/scratch.tiles").exists());
    assert_eq!(
        room.inspect("reclaim run").success(),
        "nothing to reclaim\n"
    );
    // Other bytes under a leftover's name stay.
    make("run/checkpoint/checkpoint.tiles.new", b"a thesis");
    room.inspect("reclaim run --write").success();
    assert!(room.path("run/checkpoint/checkpoint.tiles.new").exists());
}

#[test]
fn names_of_tensors_are_data_and_safetensors_are_checked() {
    let room = trained("bf16");
    let header = "{\"../../etc/x\\u001b[2J\": {\"dtype\": \"F32\", \"shape\": [2], \
                  \"data_offsets\": [0, 8]}, \"b\": {\"dtype\": \"I8\", \"shape\": [3], \
                  \"data_offsets\": [8, 11]}}";
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(&f32::NAN.to_le_bytes());
    bytes.extend_from_slice(&1.5f32.to_le_bytes());
    bytes.extend_from_slice(&[1, 2, 0xff]);
    std::fs::write(room.path("t.safetensors"), &bytes).unwrap();
    let listed = room.inspect("list t.safetensors").success();
    assert!(
        listed.starts_with("../../etc/x\\u{1b}[2J  F32  [2]"),
        "{listed:?}"
    );
    room.inspect("verify t.safetensors").success();
    let full = room.inspect("verify t.safetensors --full");
    assert_eq!(full.code, 3);
    assert!(
        full.err.contains("1 nan, 0 infinite, first at element 0"),
        "{full:?}"
    );
    let dumped = room.inspect("dump t.safetensors b --json").json();
    assert_eq!(dumped["values"], json!([1.0, 2.0, -1.0]));
    room.inspect("diff t.safetensors t.safetensors").success();
    bytes.pop();
    std::fs::write(room.path("t.safetensors"), &bytes).unwrap();
    assert_eq!(
        room.inspect("verify t.safetensors").code,
        2,
        "a byte is missing"
    );
}

#[test]
fn a_reader_that_goes_away_ends_a_command_quietly() {
    let room = trained("bf16");
    let mut dump = Command::new(INSPECT)
        .args("dump run embed --count 1000000".split(' '))
        .current_dir(room.dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = dump.stdout.take().unwrap();
    out.read_exact(&mut [0; 16]).unwrap();
    drop(out);
    let ended = dump.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    assert!(ended.stderr.is_empty(), "{ended:?}");
}
