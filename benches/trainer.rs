//! How fast is a step on the CPU device, how near to the plan is peak memory, and what does a spill
//! cost?
//!
//! Method: the shapes of SmolLM2-135M with random weights and tokens (or a model directory's), each
//! configuration in a process of its own, medians of steps after two of warm-up. Limits: peak
//! memory beside the plan's total; a spilled step beside the longer of the unspilled step and the
//! disk alone, whose time is measured by streaming the same extents through the same store without
//! arithmetic.
//!
//!     cargo bench --bench trainer -- [--seq-len 1024] [--steps 6] [--dir DIRECTORY] \
//!         [--model DIRECTORY]
//!
//! tok/s of transformers on the same machine: benches/reference/torch_cpu.py.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use serde_json::{Value, json};
use terrace::config::{RunConfig, StorePath};
use terrace::data::{IGNORE, Micro};
use terrace::error::{Error, Result};
use terrace::hf::{self, WeightSource};
use terrace::machine;
use terrace::model::ModelSpec;
use terrace::plan::{DeviceProfile, Plan, Purpose};
use terrace::step::{Engine, StepSettings};
use terrace::store::disk::Direction;
use terrace::store::{ExtentKey, Request};
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

struct Arguments {
    seq_len: u64,
    steps: usize,
    dir: PathBuf,
    model: Option<PathBuf>,
    part: Option<String>,
}

fn arguments() -> Arguments {
    let mut given = Arguments {
        seq_len: 1024,
        steps: 6,
        dir: std::env::temp_dir().join("terrace-bench-trainer"),
        model: None,
        part: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_default();
        match word.as_str() {
            "--seq-len" => given.seq_len = value().parse().expect("--seq-len is a number"),
            "--steps" => given.steps = value().parse().expect("--steps is a number"),
            "--dir" => given.dir = value().into(),
            "--model" => given.model = Some(value().into()),
            "--part" => given.part = Some(value()),
            // cargo bench adds this.
            "--bench" => {}
            other => panic!("unknown argument {other}"),
        }
    }
    given
}

fn main() {
    let arguments = arguments();
    let result = match &arguments.part {
        Some(part) => run_part(&arguments, part).map(|numbers| println!("{numbers}")),
        None => compare(&arguments),
    };
    if let Err(error) = result {
        eprintln!("trainer: {error}");
        std::process::exit(i32::from(error.exit_code()));
    }
}

/// Runs every part in a process of its own and prints the table.
fn compare(arguments: &Arguments) -> Result<()> {
    let part = |name: &str| -> Result<Value> {
        let program = std::env::current_exe().map_err(|e| Error::io("find", "self".as_ref(), e))?;
        let mut command = Command::new(&program);
        command.args(["--part", name, "--seq-len", &arguments.seq_len.to_string()]);
        command.args(["--steps", &arguments.steps.to_string()]);
        command.arg("--dir").arg(&arguments.dir);
        if let Some(model) = &arguments.model {
            command.arg("--model").arg(model);
        }
        let output = command
            .output()
            .map_err(|e| Error::io("run", &program, e))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let last = text.lines().last().unwrap_or_default();
        serde_json::from_str(last).map_err(|_| {
            let got = String::from_utf8_lossy(&output.stderr).trim().to_string();
            Error::input("bench", name, "a line of JSON", got, "see the message")
        })
    };
    println!(
        "{} cores, {} tokens a step",
        machine::cores(),
        arguments.seq_len
    );
    let (host, spilled) = (part("host")?, part("spilled")?);
    let number = |value: &Value, key: &str| value[key].as_f64().unwrap_or(f64::NAN);
    for (name, value) in [("all in host", &host), ("states spilled", &spilled)] {
        let (peak, plan) = (number(value, "peak_bytes"), number(value, "plan_bytes"));
        println!(
            "{name:15} {:8.3} s a step {:8.0} tok/s; \
             peak memory {:.3} GiB, plan {:.3} GiB, {:.1} %",
            number(value, "step_seconds"),
            number(value, "tokens_per_second"),
            peak / GIB,
            plan / GIB,
            100.0 * peak / plan,
        );
    }
    let limit = number(&host, "step_seconds").max(number(&spilled, "disk_seconds"));
    println!(
        "a spilled step  {:8.3} s, limit max(compute {:.3} s, disk {:.3} s for {:.3} GB each way) \
         = {limit:.3} s, {:.1} % of the limit's speed",
        number(&spilled, "step_seconds"),
        number(&host, "step_seconds"),
        number(&spilled, "disk_seconds"),
        number(&spilled, "spilled_bytes") / 1e9,
        100.0 * limit / number(&spilled, "step_seconds"),
    );
    println!("{}", json!({ "host": host, "spilled": spilled }));
    Ok(())
}

const GIB: f64 = (1u64 << 30) as f64;

fn run_part(arguments: &Arguments, part: &str) -> Result<Value> {
    let spec = match &arguments.model {
        Some(dir) => hf::read_config(dir)?.0,
        None => ModelSpec::from_config_json(SHAPE, "the built-in shape")?,
    };
    let mut config = RunConfig::default();
    config.data.seq_len = arguments.seq_len;
    config.memory.slabs = 24;
    let store = arguments.dir.join("store");
    config.memory.store = vec![StorePath::new(store.clone())];
    let mut budget = Budget {
        budgets: terrace::plan::Budgets {
            device: 8 << 30,
            host: u64::MAX / 2,
            store: 0,
        },
        store: Vec::new(),
        sentences: Vec::new(),
    };
    let profile = DeviceProfile::cpu();
    let plan_for =
        |budget: &Budget| Plan::new(&spec, &config, &profile, budget.budgets, Purpose::Train);
    if part == "spilled" {
        // Both moments go to the store.
        let all = plan_for(&budget)?;
        let moments: u64 = all
            .tiles
            .iter()
            .map(|tile| {
                2 * tile
                    .layout
                    .section_slot_bytes(Section::Moment1, all.precision)
            })
            .sum();
        budget.budgets.host = all.host.bytes - moments;
        budget.budgets.store = 2 * moments;
        budget.store = vec![(store, 2 * moments)];
    }
    let plan = plan_for(&budget)?;
    let plan_bytes = plan.host.bytes + plan.map.bytes;
    let (mut engine, _) = build_engine(&spec, &config, plan, &budget, false)?;
    let weights = match &arguments.model {
        Some(dir) => WeightSource::open(dir, &spec)?,
        None => WeightSource::random(&spec, 1),
    };
    let tiers = engine.tiers();
    tiers.initialise(|layer, elements, out| weights.fill(tiers.layout(layer), elements, out))?;
    drop(weights);
    let seconds = median_step(&mut engine, &spec, arguments)?;
    let peak_bytes = machine::peak_memory();
    let (disk_seconds, spilled_bytes) = disk_alone(&engine)?;
    std::fs::remove_dir_all(&arguments.dir).ok();
    Ok(json!({
        "part": part, "step_seconds": seconds,
        "tokens_per_second": arguments.seq_len as f64 / seconds,
        "peak_bytes": peak_bytes, "plan_bytes": plan_bytes,
        "disk_seconds": disk_seconds, "spilled_bytes": spilled_bytes,
    }))
}

fn median_step(engine: &mut Engine, spec: &ModelSpec, arguments: &Arguments) -> Result<f64> {
    const WARM_UP: usize = 2;
    let mut seconds = Vec::new();
    let mut last = Instant::now();
    for step in 0..arguments.steps + WARM_UP {
        let settings = StepSettings {
            skipped: 0,
            step: step as u64 + 1,
            learning_rate: 1e-5,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.01,
            max_grad_norm: 1.0,
            skip_above: None,
        };
        engine.train_step(
            vec![micro(arguments.seq_len, spec.vocab_size, step as u64)],
            settings,
        )?;
        if step >= WARM_UP {
            seconds.push(last.elapsed().as_secs_f64());
        }
        last = Instant::now();
    }
    engine.drain()?;
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[seconds.len() / 2])
}

/// One sequence of pseudo-random tokens.
fn micro(length: u64, vocab: u64, seed: u64) -> Micro {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut token = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % vocab) as u32
    };
    let tokens: Vec<u32> = (0..length).map(|_| token()).collect();
    let mut targets = tokens[1..].to_vec();
    targets.push(IGNORE);
    let length = length as u32;
    Micro {
        tokens,
        targets,
        positions: (0..length).collect(),
        bounds: vec![0, length],
    }
}

/// Seconds to read and write every spilled extent once, reads ahead of writes as in an update, and
/// the bytes of one direction.
fn disk_alone(engine: &Engine) -> Result<(f64, u64)> {
    let tiers = engine.tiers();
    let Some(store) = &tiers.store else {
        return Ok((0.0, 0));
    };
    let keys: Vec<ExtentKey> = tiers
        .extents()
        .filter(|key| tiers.is_spilled(key.tile.layer, key.section))
        .collect();
    let (reply, done) = crossbeam_channel::unbounded();
    let request = |kind, key, slab| Request {
        kind,
        key,
        bytes: store.payload_bytes(key),
        slab,
        reply: reply.clone(),
    };
    let started = Instant::now();
    let (mut asked, mut written) = (0, 0);
    while written < keys.len() {
        while asked < keys.len()
            && let Some(slab) = tiers.ring.try_take()
        {
            store.submit(request(Direction::Read, keys[asked], slab))?;
            asked += 1;
        }
        let completion = done.recv().expect("this function holds a sender");
        completion.result?;
        match completion.kind {
            Direction::Read => {
                store.submit(request(Direction::Write, completion.key, completion.slab))?;
            }
            Direction::Write => written += 1,
        }
    }
    let bytes = keys
        .iter()
        .map(|key| store.payload_bytes(*key) as u64)
        .sum();
    Ok((started.elapsed().as_secs_f64(), bytes))
}
