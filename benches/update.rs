//! Does a spilled update run at the disk's own rate of reading and writing at once?
//!
//! Method: the shapes of SmolLM2-135M with random weights and both moments spilled, sequences so
//! short that the update is most of a step. With clipping all updates follow the norm: what is
//! timed is from the norm to the last write, with no next step beside it, and its bytes are those
//! that the store counted. fio takes turns with it within the same minute, 4 MiB x 8, direct, half
//! reads, on a file of 1 GiB in the same directory. Medians, and the best of each: a disk that
//! others share is at its own rate only now and then.
//!
//!     cargo bench --bench update -- --dir DIRECTORY [--rounds 9] [--slabs 24] [--fio-seconds 2] \
//!         [--fio-mem mmaphuge] [--zstd on]
//!
//! With `--zstd on` moments are compressed on their way; those of the first round are zeros, later
//! ones are of real gradients of a random model. Bytes are the disk's, so compare seconds.
//!
//! Terrace's arena lies on huge pages, with which many drives are faster; fio's does where it is
//! told so and the machine has some (vm.nr_hugepages). Without fio: `--fio-seconds 0`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use serde_json::{Value, json};
use terrace::config::{RunConfig, SpillZstd, StorePath};
use terrace::data::{IGNORE, Micro};
use terrace::error::{Error, Result};
use terrace::hf::WeightSource;
use terrace::model::ModelSpec;
use terrace::plan::{Budgets, CODERS, DeviceProfile, Plan, Purpose};
use terrace::stats::Wait;
use terrace::step::{Engine, StepSettings};
use terrace::tile::Section;
use terrace::train::{Budget, build_engine};

/// SmolLM2-135M.
const SHAPE: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152,
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 8192,
    "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"
}"#;
const TOKENS: u64 = 16;

struct Arguments {
    dir: PathBuf,
    rounds: usize,
    slabs: u64,
    fio_seconds: u64,
    /// Where fio's buffers lie.
    fio_mem: String,
    zstd: SpillZstd,
}

fn arguments() -> Arguments {
    let mut given = Arguments {
        dir: std::env::temp_dir().join("terrace-bench-update"),
        rounds: 9,
        slabs: 24,
        fio_seconds: 2,
        fio_mem: "malloc".to_string(),
        zstd: SpillZstd::Off,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_default();
        match word.as_str() {
            "--dir" => given.dir = value().into(),
            "--rounds" => given.rounds = value().parse().expect("--rounds is a number"),
            "--slabs" => given.slabs = value().parse().expect("--slabs is a number"),
            "--fio-seconds" => given.fio_seconds = value().parse().expect("a number"),
            "--fio-mem" => given.fio_mem = value(),
            "--zstd" => {
                given.zstd = match value().as_str() {
                    "on" => SpillZstd::On,
                    "off" => SpillZstd::Off,
                    other => panic!("--zstd is on or off, not {other}"),
                }
            }
            // cargo bench adds this.
            "--bench" => {}
            other => panic!("unknown argument {other}"),
        }
    }
    given
}

fn main() {
    if let Err(error) = run(&arguments()) {
        eprintln!("update: {error}");
        std::process::exit(i32::from(error.exit_code()));
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let spec = ModelSpec::from_config_json(SHAPE, "the built-in shape")?;
    std::fs::create_dir_all(&arguments.dir).map_err(|e| Error::io("make", &arguments.dir, e))?;
    let mut engine = spilled_engine(&spec, arguments)?;
    let file = arguments.dir.join("fio.file");
    if arguments.fio_seconds > 0 {
        fio(&file, &["--rw=write"])?;
    }
    let runtime = format!("--runtime={}", arguments.fio_seconds);
    let memory = format!("--mem={}", arguments.fio_mem);
    let (mut rows, mut seconds) = (Vec::new(), Vec::new());
    for round in 0..=arguments.rounds {
        let update = timed_update(&mut engine, &spec, round as u64 + 1)?;
        let mixed = [
            "--rw=rw",
            "--rwmixread=50",
            "--time_based",
            &runtime,
            &memory,
        ];
        let disk = match arguments.fio_seconds {
            0 => f64::NAN,
            _ => fio(&file, &mixed)?,
        };
        // The first step allocates what later ones have.
        if round > 0 {
            println!(
                "update {:6.3} GB/s ({:.3} s, AdamW {:.3} s, waiting for the store {:.3} s)   fio \
                 {:6.3} GB/s",
                update.bytes / update.seconds / 1e9,
                update.seconds,
                update.adamw,
                update.waited,
                disk / 1e9
            );
            seconds.push(update.seconds);
            rows.push((update.bytes / update.seconds, disk));
        }
    }
    std::fs::remove_file(&file).ok();
    let sorted = |of: fn(&(f64, f64)) -> f64| {
        let mut values: Vec<f64> = rows.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let (updates, disks) = (sorted(|row| row.0), sorted(|row| row.1));
    let mut shares: Vec<f64> = rows.iter().map(|(update, disk)| update / disk).collect();
    shares.sort_by(f64::total_cmp);
    let middle = rows.len() / 2;
    seconds.sort_by(f64::total_cmp);
    println!("seconds of an update: median {:.3}", seconds[middle]);
    println!(
        "medians: update {:.3} GB/s, fio {:.3} GB/s, {:.1} %; of each pair {:.1} %; best of each \
         {:.3} and {:.3} GB/s",
        updates[middle] / 1e9,
        disks[middle] / 1e9,
        100.0 * updates[middle] / disks[middle],
        100.0 * shares[middle],
        updates[rows.len() - 1] / 1e9,
        disks[rows.len() - 1] / 1e9,
    );
    println!("{}", json!({ "update": updates, "fio": disks }));
    Ok(())
}

/// An engine whose moments are all in the store.
fn spilled_engine(spec: &ModelSpec, arguments: &Arguments) -> Result<Engine> {
    let mut config = RunConfig::default();
    config.data.seq_len = TOKENS;
    config.memory.slabs = arguments.slabs;
    config.checkpoint.every = 0;
    config.memory.zstd = arguments.zstd;
    let store = arguments.dir.join("store");
    config.memory.store = vec![StorePath::new(store.clone())];
    let profile = DeviceProfile::cpu();
    let plan = |device, host| {
        let budgets = Budgets {
            device,
            host,
            store: u64::MAX / 2,
        };
        Plan::new(spec, &config, &profile, budgets, Purpose::Train)
    };
    let all = plan(8 << 30, u64::MAX / 2)?;
    let slot = |tile: &terrace::plan::TilePlan| {
        let section = Section::Moment1;
        2 * tile.layout.section_slot_bytes(section, all.precision)
    };
    let moments: u64 = all.tiles.iter().map(slot).sum();
    let coders = match arguments.zstd {
        SpillZstd::On => CODERS * all.host.slab_bytes,
        SpillZstd::Auto | SpillZstd::Off => 0,
    };
    // No room for what would otherwise move to the device.
    let plan = plan(all.map.bytes, all.host.bytes - moments + coders)?;
    let budget = Budget {
        budgets: plan.budgets,
        store: vec![(store, 2 * moments)],
        sentences: Vec::new(),
    };
    let (engine, sentences) = build_engine(spec, &config, plan, &budget, false)?;
    println!("{}; {} slabs", sentences.join("; "), arguments.slabs);
    let (tiers, weights) = (engine.tiers(), WeightSource::random(spec, 1));
    tiers.initialise(|layer, elements, out| weights.fill(tiers.layout(layer), elements, out))?;
    Ok(engine)
}

struct Update {
    bytes: f64,
    seconds: f64,
    adamw: f64,
    waited: f64,
}

/// One step; from its norm to the last write.
fn timed_update(engine: &mut Engine, spec: &ModelSpec, step: u64) -> Result<Update> {
    let settings = StepSettings {
        step,
        skipped: 0,
        learning_rate: 1e-5,
        betas: [0.9, 0.999],
        eps: 1e-8,
        weight_decay: 0.01,
        max_grad_norm: 1.0,
        skip_above: None,
    };
    let token = |index: u64| ((index * 2_654_435_761 + step * 97) % spec.vocab_size) as u32;
    let tokens: Vec<u32> = (0..TOKENS).map(token).collect();
    let mut targets = tokens[1..].to_vec();
    targets.push(IGNORE);
    let micro = Micro {
        positions: (0..TOKENS as u32).collect(),
        bounds: vec![0, TOKENS as u32],
        tokens,
        targets,
    };
    engine.train_step(vec![micro], settings)?;
    let moved = |engine: &Engine| {
        let counted = engine.tiers().scratch().counters();
        (counted.read.bytes + counted.write.bytes) as f64
    };
    let (bytes, before) = (moved(engine), engine.tiers().stats.snapshot());
    let started = Instant::now();
    engine.drain()?;
    let seconds = started.elapsed().as_secs_f64();
    let spent = engine.tiers().stats.snapshot().since(&before);
    Ok(Update {
        bytes: moved(engine) - bytes,
        seconds,
        adamw: spent.update_seconds,
        waited: spent.waits[Wait::UpdateForStore as usize],
    })
}

/// Bytes a second that fio read and wrote together.
fn fio(file: &Path, arguments: &[&str]) -> Result<f64> {
    let refused = |got: String| Error::input("fio", "its result", "JSON", got, "see the message");
    let output = Command::new("fio")
        .args([
            "--name=disk",
            "--size=1g",
            "--bs=4m",
            "--iodepth=8",
            "--direct=1",
        ])
        .args(["--ioengine=io_uring", "--output-format=json"])
        .arg(format!("--filename={}", file.display()))
        .args(arguments)
        .output()
        .map_err(|e| Error::io("run", "fio".as_ref(), e))?;
    let told: Value = serde_json::from_slice(&output.stdout)
        .map_err(|_| refused(String::from_utf8_lossy(&output.stderr).trim().to_string()))?;
    let rate = |way: &str| told["jobs"][0][way]["bw_bytes"].as_f64().unwrap_or(0.0);
    Ok(rate("read") + rate("write"))
}
