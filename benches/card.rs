//! How fast does a card train a model whose states live in host memory, and in the store?
//!
//! Method: shapes of a config.json (`--config`), cut to `--layers` blocks, random weights and
//! tokens; medians of the steps after two of warm-up. Limits: the card's matrix products, and the
//! schedule simulated with rates measured in the same minute. TFLOPS are 6 N tokens a second, N all
//! parameters, without recomputation and attention; "executed" counts both.
//!
//!     cargo bench --bench card -- --config tests/fixtures/configs/qwen2.5-7b/config.json \
//!         --layers 14 --micro-batch 16 --micro-batches 4 [--seq-len 1024] [--clip 1] [--steps 5] \
//!         [--device-memory 125GiB] [--host-memory 100GiB] [--store DIR --store-size 56GiB] \
//!         [--disk-rate 1.8GB] [--recompute all] [--deferred FIRST+LAST] [--trace FILE]
//!
//! `--disk-rate` is what the store's disk does with reads and writes at once, both together, a
//! second; a default without.

use std::path::PathBuf;
use std::time::Instant;

use rayon::prelude::*;
use serde_json::{Value, json};
use terrace::config::{Recompute, RunConfig, Size, StorePath};
use terrace::data::{IGNORE, Micro};
use terrace::error::{Error, Result};
use terrace::machine;
use terrace::measure::measure_rates;
use terrace::model::ModelSpec;
use terrace::plan::{Deferred, Plan, Purpose, bytes_text};
use terrace::schedule::Schedule;
use terrace::schedule::choose::fastest;
use terrace::schedule::simulate::simulate;
use terrace::stats::WAIT_NAMES;
use terrace::step::{CARD_LANE, Engine, StepSettings};
use terrace::store::{Counters, Scratch};
use terrace::train::{build_engine, choose_device, resolve_budgets};

struct Arguments {
    config: PathBuf,
    layers: Option<u64>,
    run: RunConfig,
    steps: usize,
    device: String,
    trace: Option<PathBuf>,
    /// Bytes a second of the store's disk, both ways together.
    disk_rate: Option<f64>,
    /// Layers updated under the next forward, instead of those that the rates suggest.
    deferred: Option<Deferred>,
}

fn size(text: &str) -> Size {
    Size::parse(text, "arguments").unwrap_or_else(|error| panic!("{error}"))
}

fn arguments() -> Arguments {
    let mut given = Arguments {
        config: PathBuf::from("tests/fixtures/configs/qwen2.5-7b/config.json"),
        layers: None,
        run: RunConfig::default(),
        steps: 5,
        device: "cuda:0".to_string(),
        trace: None,
        disk_rate: None,
        deferred: None,
    };
    let run = &mut given.run;
    run.checkpoint.every = 0;
    run.memory.slabs = 48;
    let (mut store, mut store_size) = (None, Size::Auto);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        // cargo bench adds this.
        if word == "--bench" {
            continue;
        }
        let value = words.next().unwrap_or_default();
        let number = || {
            value
                .parse::<u64>()
                .unwrap_or_else(|e| panic!("{word} {value}: {e}"))
        };
        match word.as_str() {
            "--config" => given.config = value.into(),
            "--layers" => given.layers = Some(number()),
            "--micro-batch" => run.train.micro_batch = number(),
            "--micro-batches" => run.train.micro_batches = number(),
            "--seq-len" => run.data.seq_len = number(),
            "--clip" => run.train.max_grad_norm = value.parse().expect("--clip is a number"),
            "--steps" => given.steps = number() as usize,
            "--slabs" => run.memory.slabs = number(),
            "--buffers" => run.memory.buffers = number(),
            "--device" => given.device = value,
            "--device-memory" => run.memory.device = size(&value),
            "--host-memory" => run.memory.host = size(&value),
            "--store" => store = Some(PathBuf::from(value)),
            "--store-size" => store_size = size(&value),
            "--disk-rate" => {
                let Size::Bytes(bytes) = size(&value) else {
                    panic!("--disk-rate is a size")
                };
                given.disk_rate = Some(bytes as f64);
            }
            "--recompute" if value == "all" => run.memory.recompute = Recompute::All,
            "--deferred" => {
                let (first, last) = value.split_once('+').expect("--deferred FIRST+LAST");
                let count = |text: &str| text.parse().expect("a number of layers");
                given.deferred = Some(Deferred {
                    first: count(first),
                    last: count(last),
                });
            }
            "--trace" => given.trace = Some(value.into()),
            _ => panic!("unknown argument {word} {value}"),
        }
    }
    run.memory.store = store
        .into_iter()
        .map(|path| StorePath {
            size: store_size,
            ..StorePath::new(path)
        })
        .collect();
    given
}

fn main() {
    if let Err(error) = bench(&arguments()) {
        eprintln!("card: {error}");
        std::process::exit(i32::from(error.exit_code()));
    }
}

fn read_spec(arguments: &Arguments) -> Result<ModelSpec> {
    let path = &arguments.config;
    let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
    let place = path.display().to_string();
    let mut spec = ModelSpec::from_config_json(&text, &place)?;
    if let Some(layers) = arguments.layers {
        spec.blocks = u16::try_from(layers).expect("--layers fits");
        spec.windows.resize(usize::from(spec.blocks), None);
    }
    Ok(spec)
}

fn bench(arguments: &Arguments) -> Result<()> {
    let (config, spec) = (&arguments.run, read_spec(arguments)?);
    let (profile, sentence) = choose_device(&arguments.device, config.model.precision)?;
    println!("{sentence}");
    let budget = resolve_budgets(&spec, config, &profile)?;
    let mut rates = measure_rates(&profile)?;
    if let Some(rate) = arguments.disk_rate {
        (rates.store_read, rates.store_write, rates.store_mixed) = (rate, rate, rate);
    }
    let budgets = budget.budgets;
    let (plan, prediction) = match arguments.deferred {
        None => fastest(&spec, config, &profile, budgets, &rates)?,
        Some(deferred) => {
            let (purpose, config) = (Purpose::Train, &arguments.run);
            let plan = Plan::deferring(&spec, config, &profile, budgets, purpose, deferred)?;
            let prediction = simulate(&plan, &Schedule::train(&plan), &rates);
            (plan, prediction)
        }
    };
    println!(
        "{} of {} layers are updated under the next forward",
        plan.deferred_layers(),
        plan.layer_count()
    );
    print!("{}", plan.table(&prediction, &rates));
    let started = Instant::now();
    let (parameters, host_plan) = (plan.parameters, plan.host.bytes);
    let (mut engine, notes) =
        build_engine(&spec, config, plan, &budget, arguments.trace.is_some())?;
    notes.iter().for_each(|note| println!("{note}"));
    fill(&engine)?;
    println!(
        "memory taken and filled in {:.1} s",
        started.elapsed().as_secs_f64()
    );
    let (seconds, waits, losses, steady) = run_steps(&mut engine, &spec, arguments)?;
    write_trace(&engine, arguments, steady)?;
    let tokens = prediction.tokens as f64;
    let tflops = 6.0 * parameters as f64 * tokens / seconds / 1e12;
    let executed = prediction.executed_flops / seconds / 1e12;
    let peak = machine::peak_memory();
    println!(
        "{:.2} B parameters, {:.0}k tokens, clipping {}: {seconds:.3} s a step, {:.0} tok/s, \
         {tflops:.0} TFLOPS (6N), {executed:.0} executed; predicted {:.3} s ({:.1} %); host {} \
         ({:.2} B a parameter, plan {})",
        parameters as f64 / 1e9,
        tokens / 1024.0,
        config.train.max_grad_norm > 0.0,
        tokens / seconds,
        prediction.step_seconds,
        100.0 * prediction.step_seconds / seconds,
        bytes_text(peak),
        peak as f64 / parameters as f64,
        bytes_text(host_plan),
    );
    println!(
        "{}",
        json!({
            "parameters": parameters, "tokens": prediction.tokens, "step_seconds": seconds,
            "tflops_6n": tflops, "tflops_executed": executed, "prediction": prediction,
            "rates": rates, "peak_bytes": peak, "waits": waits, "losses": losses,
        })
    );
    Ok(())
}

/// Writes the trace, if one was kept, and says how busy the card was from `steady` on.
fn write_trace(engine: &Engine, arguments: &Arguments, steady: Instant) -> Result<()> {
    engine.drain()?;
    let stats = &engine.tiers().stats;
    if let Some(busy) = stats.busy_share(CARD_LANE, steady) {
        println!(
            "compute busy on the card: {:.1} % of the steps after the first two",
            100.0 * busy
        );
    }
    if let (Some(path), Some(trace)) = (&arguments.trace, stats.chrome_trace()) {
        std::fs::write(path, trace).map_err(|e| Error::io("write", path, e))?;
    }
    Ok(())
}

/// Small uniform numbers in every weight: any will do for speed.
fn fill(engine: &Engine) -> Result<()> {
    let tiers = engine.tiers();
    tiers.initialise(|layer, elements, out| {
        let layout = tiers.layout(layer);
        let ones = layout.decayed_elements;
        let pieces = out.par_chunks_mut(1 << 14).enumerate();
        pieces.for_each(|(piece, values)| {
            let first = elements.start + (piece << 14) as u64;
            let mut state = (first ^ (u64::from(layer) << 40)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            for (at, value) in (first..).zip(values) {
                state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(at);
                let uniform = (state >> 40) as f32 / (1 << 24) as f32 - 0.5;
                *value = if at < ones { uniform * 0.07 } else { 1.0 };
            }
        });
        Ok(())
    })
}

/// Median seconds, waits a step, and losses.
fn run_steps(
    engine: &mut Engine,
    spec: &ModelSpec,
    arguments: &Arguments,
) -> Result<(f64, Value, Vec<f64>, Instant)> {
    const WARM_UP: usize = 2;
    let train = &arguments.run.train;
    let (mut seconds, mut losses) = (Vec::new(), Vec::new());
    let mut last = Instant::now();
    let mut steady = last;
    let counted = |engine: &Engine| {
        let store = engine.tiers().store.as_ref();
        store.map(Scratch::counters).unwrap_or_default()
    };
    let (mut snapshot, mut store) = (engine.tiers().stats.snapshot(), counted(engine));
    for step in 0..arguments.steps + WARM_UP {
        let settings = StepSettings {
            skipped: 0,
            step: step as u64 + 1,
            learning_rate: 1e-5,
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.01,
            max_grad_norm: train.max_grad_norm,
            skip_above: None,
        };
        let micros = (0..train.micro_batches)
            .map(|micro| random_micro(arguments, spec, (step as u64) << 20 | micro))
            .collect();
        let result = engine.train_step(micros, settings)?;
        losses.push(result.loss);
        let elapsed = last.elapsed().as_secs_f64();
        println!(
            "step {}: {elapsed:.3} s, loss {:.4}, norm {:.3}",
            step + 1,
            result.loss,
            result.grad_norm
        );
        if step >= WARM_UP {
            seconds.push(elapsed);
        } else {
            (snapshot, store) = (engine.tiers().stats.snapshot(), counted(engine));
            steady = Instant::now();
        }
        last = Instant::now();
    }
    let waited = engine.tiers().stats.snapshot().since(&snapshot);
    say_disk(store, counted(engine), steady.elapsed().as_secs_f64());
    engine.drain()?;
    let steps = arguments.steps as f64;
    let mut waits: serde_json::Map<String, Value> = WAIT_NAMES
        .into_iter()
        .zip(waited.waits)
        .map(|(name, seconds)| (name.to_string(), (seconds / steps).into()))
        .collect();
    waits.insert("update".to_string(), (waited.update_seconds / steps).into());
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    Ok((median, Value::Object(waits), losses, steady))
}

/// What the store's disk did in so many seconds.
fn say_disk(before: Counters, after: Counters, seconds: f64) {
    let bytes = |of: Counters| (of.read.bytes + of.write.bytes) as f64;
    let moved = bytes(after) - bytes(before);
    if moved == 0.0 {
        return;
    }
    let share = |ns: fn(Counters) -> u64| (ns(after) - ns(before)) as f64 / 1e7 / seconds;
    println!(
        "disk: busy {:.1} % of the time, reading {:.1} %, writing {:.1} %; {:.2} GB/s of the time",
        share(|of| of.busy_ns),
        share(|of| of.read.busy_ns),
        share(|of| of.write.busy_ns),
        moved / seconds / 1e9
    );
}

/// Sequences of pseudo-random tokens.
fn random_micro(arguments: &Arguments, spec: &ModelSpec, seed: u64) -> Micro {
    let (sequences, length) = (arguments.run.train.micro_batch, arguments.run.data.seq_len);
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut micro = Micro {
        bounds: vec![0],
        ..Micro::default()
    };
    for sequence in 1..=sequences {
        for position in 0..length {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            micro.tokens.push((state % spec.vocab_size) as u32);
            micro.positions.push(position as u32);
        }
        micro.bounds.push((sequence * length) as u32);
    }
    micro.targets = micro.tokens[1..].to_vec();
    micro.targets.push(IGNORE);
    for end in &micro.bounds[1..] {
        micro.targets[*end as usize - 1] = IGNORE;
    }
    micro
}
