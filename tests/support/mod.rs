//! What several tests share: tiny models with goldens, engines that run them, comparisons.
//!
//! - [`Case`] is a folder of `tests/golden` (its README says what each key is).
//! - [`engine`] takes memory as a run does: `Plan::new`, then `build_engine`.
//! - [`Comparison`] holds tensors to a reference and prints a table of all of them.
#![allow(dead_code, reason = "each test uses a part")]

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde_json::Value;
use terrace::config::{RunConfig, Size};
use terrace::data::{IGNORE, Micro};
use terrace::hf::WeightSource;
use terrace::hf::safetensors::SafetensorsFile;
use terrace::model::ModelSpec;
use terrace::plan::{Budgets, DeviceProfile, Plan, Purpose};
use terrace::schedule::GradientSlot;
use terrace::step::{Engine, StepSettings};
use terrace::tile::{GradientDtype, Precision};
use terrace::train::{Budget, build_engine, choose_device};

/// Tensors by name.
pub(crate) type Tensors = BTreeMap<String, Vec<f64>>;

/// A golden case: a tiny model and what PyTorch computed from it.
pub(crate) struct Case {
    /// Its folder.
    pub dir: PathBuf,
    /// The model.
    pub spec: ModelSpec,
    /// golden.json.
    pub record: Value,
}

impl Case {
    /// Opens `tests/golden/{name}`.
    pub(crate) fn open(name: &str) -> Case {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let dir = root.join("tests/golden").join(name);
        let text = std::fs::read_to_string(dir.join("golden.json")).unwrap();
        Case {
            spec: terrace::hf::read_config(&dir).unwrap().0,
            record: serde_json::from_str(&text).unwrap(),
            dir,
        }
    }

    /// Micro-batches of the forward and backward golden, packed as they are listed.
    pub(crate) fn forward_micros(&self) -> Vec<Micro> {
        micros(&self.record["forward"]["micro_batches"])
    }

    /// Micro-batches of each training step.
    pub(crate) fn step_micros(&self) -> Vec<Vec<Micro>> {
        let steps = self.record["training"]["steps"].as_array().unwrap();
        steps
            .iter()
            .map(|step| micros(&step["micro_batches"]))
            .collect()
    }

    /// Sets the engine's weights to the case's first ones; moments to zero.
    pub(crate) fn initialise(&self, engine: &Engine) {
        self.initialise_changed(engine, |_, _| {});
    }

    /// As [`Case::initialise`], with each tensor changed by `change(name, values)` first.
    pub(crate) fn initialise_changed(&self, engine: &Engine, change: impl Fn(&str, &mut [f32])) {
        let weights = WeightSource::open(&self.dir, &self.spec).unwrap();
        let tiers = engine.tiers();
        let fill = |layer, elements: std::ops::Range<u64>, out: &mut [f32]| {
            let layout = tiers.layout(layer);
            assert_eq!(layout.extent_count(), 1, "tiny tiles have one extent");
            weights.fill(layout, elements, out)?;
            for tensor in &layout.tensors {
                let range = tensor.elements();
                change(
                    &tensor.name,
                    &mut out[range.start as usize..range.end as usize],
                );
            }
            Ok(())
        };
        tiers.initialise(fill).unwrap();
    }
}

/// All tensors of a safetensors file, as f64.
pub(crate) fn read_tensors(dir: &Path, name: &str) -> Tensors {
    let file = SafetensorsFile::open(dir, name).unwrap();
    let bytes = std::fs::read(dir.join(name)).unwrap();
    let mut tensors = Tensors::new();
    for name in file.names() {
        let entry = file.tensor(name).unwrap();
        let raw = &bytes[entry.offset as usize..(entry.offset + entry.bytes) as usize];
        let values = match entry.dtype.name() {
            "F32" => raw
                .as_chunks::<4>()
                .0
                .iter()
                .map(|bytes| f64::from(f32::from_le_bytes(*bytes)))
                .collect(),
            "F64" => raw
                .as_chunks::<8>()
                .0
                .iter()
                .map(|bytes| f64::from_le_bytes(*bytes))
                .collect(),
            other => panic!("goldens have no {other}"),
        };
        tensors.insert(name.to_string(), values);
    }
    tensors
}

/// Numbers of a JSON list.
pub(crate) fn numbers(list: &Value) -> Vec<f64> {
    let list = list.as_array().unwrap();
    list.iter().map(|value| value.as_f64().unwrap()).collect()
}

/// Packed micro-batches of a golden's list of lists of sequences.
pub(crate) fn micros(list: &Value) -> Vec<Micro> {
    let list = list.as_array().unwrap();
    list.iter()
        .map(|sequences| {
            let sequences = sequences.as_array().unwrap();
            pack(sequences.iter().map(|sequence| {
                let ints = |key: &str| numbers(&sequence[key]).into_iter();
                let tokens = ints("tokens").map(|token| token as u32).collect();
                // −100 is a target that has no loss.
                let target = |value: f64| if value < 0.0 { IGNORE } else { value as u32 };
                (tokens, ints("targets").map(target).collect())
            }))
        })
        .collect()
}

/// A micro-batch of (tokens, targets) sequences, one after another.
pub(crate) fn pack(sequences: impl Iterator<Item = (Vec<u32>, Vec<u32>)>) -> Micro {
    let mut micro = Micro {
        bounds: vec![0],
        ..Micro::default()
    };
    for (tokens, targets) in sequences {
        assert_eq!(tokens.len(), targets.len());
        micro.positions.extend(0..tokens.len() as u32);
        micro.tokens.extend(tokens);
        micro.targets.extend(targets);
        micro.bounds.push(micro.tokens.len() as u32);
    }
    micro
}

/// The sequences of a micro-batch, as [`pack`] takes them.
pub(crate) fn unpack(micro: &Micro) -> Vec<(Vec<u32>, Vec<u32>)> {
    let sequences = micro.bounds.windows(2);
    sequences
        .map(|ends| {
            let range = ends[0] as usize..ends[1] as usize;
            (
                micro.tokens[range.clone()].to_vec(),
                micro.targets[range].to_vec(),
            )
        })
        .collect()
}

/// A configuration with room for `micros` a step, f32 gradients and no checkpoints.
pub(crate) fn config(precision: Precision, micros: &[Micro]) -> RunConfig {
    let longest = |micro: &Micro| micro.bounds.windows(2).map(|ends| ends[1] - ends[0]).max();
    let seq_len = u64::from(micros.iter().filter_map(longest).max().unwrap());
    let tokens = micros.iter().map(|micro| micro.tokens.len() as u64).max();
    let mut config = RunConfig::default();
    config.model.precision = precision;
    config.data.seq_len = seq_len;
    config.train.micro_batch = tokens.unwrap().div_ceil(seq_len);
    config.train.micro_batches = micros.len() as u64;
    config.train.gradient_dtype = GradientDtype::F32;
    config.memory.device = Size::Bytes(1 << 30);
    config.memory.host = Size::Bytes(1 << 30);
    config.checkpoint.every = 0;
    config
}

/// The device under test: the CPU, or what `TERRACE_TEST_DEVICE` names (`cuda:0`).
pub(crate) fn profile(precision: Precision) -> DeviceProfile {
    match std::env::var("TERRACE_TEST_DEVICE") {
        Ok(name) => choose_device(&name, precision).unwrap().0,
        Err(_) => DeviceProfile::cpu(),
    }
}

/// An engine on the device under test with everything in host. Its tiles are empty.
pub(crate) fn engine(spec: &ModelSpec, config: &RunConfig) -> Engine {
    engine_of_changed_plan(spec, config, |_| {})
}

/// As [`engine`], with the plan changed after it was made.
pub(crate) fn engine_of_changed_plan(
    spec: &ModelSpec,
    config: &RunConfig,
    change: impl Fn(&mut Plan),
) -> Engine {
    let budgets = Budgets {
        device: 1 << 30,
        host: 1 << 30,
        store: 0,
    };
    let profile = profile(config.model.precision);
    let mut plan = Plan::new(spec, config, &profile, budgets, Purpose::Train).unwrap();
    change(&mut plan);
    let budget = Budget {
        budgets,
        store: Vec::new(),
        sentences: Vec::new(),
    };
    build_engine(spec, config, plan, &budget, false).unwrap().0
}

/// AdamW's settings in a configuration, for step `step` counted from 1.
pub(crate) fn settings(config: &RunConfig, step: u64, learning_rate: f64) -> StepSettings {
    StepSettings {
        skipped: 0,
        step,
        learning_rate,
        betas: config.train.betas,
        eps: config.train.eps,
        weight_decay: config.train.weight_decay,
        max_grad_norm: config.train.max_grad_norm,
        skip_above: None,
    }
}

/// Gradients of the last step, by parameter. The plan clips, so each tile's waits in host.
pub(crate) fn gradients(engine: &Engine) -> Tensors {
    engine.drain().unwrap();
    assert!(engine.plan().clipping);
    by_name(engine, |layer| {
        let place = engine.tiers().gradient(GradientSlot::Tile(layer));
        match engine.plan().gradient_bytes {
            4 => place.as_slice::<f32>().to_vec(),
            _ => {
                let widen = |half: &u16| f32::from_bits(u32::from(*half) << 16);
                place.as_slice::<u16>().iter().map(widen).collect()
            }
        }
    })
}

/// The fp32 master, by parameter.
pub(crate) fn masters(engine: &Engine) -> Tensors {
    engine.drain().unwrap();
    by_name(engine, |layer| {
        let mut values = vec![0.0; engine.tiers().layout(layer).elements as usize];
        engine.tiers().read_master(layer, 0, &mut values).unwrap();
        values
    })
}

fn by_name(engine: &Engine, tile: impl Fn(u16) -> Vec<f32>) -> Tensors {
    let mut tensors = Tensors::new();
    for layout in engine.tiers().layouts() {
        let values = tile(layout.id.layer);
        for tensor in &layout.tensors {
            let range = tensor.elements();
            let part = &values[range.start as usize..range.end as usize];
            let part = part.iter().map(|value| f64::from(*value)).collect();
            tensors.insert(tensor.name.clone(), part);
        }
    }
    tensors
}

/// Tensors against references: each one's figures, and whether they are within their limits.
#[derive(Default)]
pub(crate) struct Comparison {
    rows: Vec<(String, bool)>,
}

/// How far PyTorch's float32 was from a reference, as golden.json records it, and the limits that
/// follow.
#[derive(Clone, Copy, Debug)]
struct RecordedError {
    max_abs: f64,
    l2: f64,
    reference_max_abs: f64,
    reference_l2: f64,
}

/// How far a tensor may be from its reference.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    torch: RecordedError,
    max_abs: f64,
    l2: f64,
}

/// The recorded errors of several tensors.
pub(crate) struct RecordedErrors {
    by_name: HashMap<String, RecordedError>,
    /// Largest error of an element that is always allowed, as a part of the reference's largest.
    floor_max_abs: f64,
    /// L2 error that is always allowed, as a part of the reference's l2.
    floor_l2: f64,
}

impl RecordedErrors {
    /// From an object of golden.json.
    pub(crate) fn read(value: &Value) -> RecordedErrors {
        let read = |value: &Value| {
            let figure = |key: &str| value[key].as_f64().unwrap();
            RecordedError {
                max_abs: figure("max_abs"),
                l2: figure("l2"),
                reference_max_abs: figure("reference_max_abs"),
                reference_l2: figure("reference_l2"),
            }
        };
        let entries = value.as_object().unwrap().iter();
        let by_name: HashMap<_, _> = entries
            .map(|(name, value)| (name.clone(), read(value)))
            .collect();
        let rounding = f64::from(f32::EPSILON);
        let mut errors = RecordedErrors {
            by_name,
            floor_max_abs: rounding,
            floor_l2: rounding,
        };
        errors.floor_max_abs = errors.worst(|error| error.max_abs / error.reference_max_abs);
        errors
    }

    /// Where one flipped bit decides how large errors become: each tensor may be as far off as the
    /// worst of any of these runs, relative to its reference.
    pub(crate) fn with_flips_of(mut self, runs: &[RecordedErrors]) -> RecordedErrors {
        for run in runs {
            let max_abs = run.worst(|error| error.max_abs / error.reference_max_abs);
            self.floor_max_abs = self.floor_max_abs.max(max_abs);
            let l2 = run.worst(|error| error.l2 / error.reference_l2);
            self.floor_l2 = self.floor_l2.max(l2);
        }
        self
    }

    fn worst(&self, ratio: impl Fn(&RecordedError) -> f64) -> f64 {
        let rounding = f64::from(f32::EPSILON);
        self.by_name.values().map(ratio).fold(rounding, f64::max)
    }

    /// Tensors that have one.
    pub(crate) fn count(&self) -> usize {
        self.by_name.len()
    }

    /// L2 norm of the errors of all tensors together.
    pub(crate) fn l2(&self) -> f64 {
        let squares = self.by_name.values().map(|error| error.l2 * error.l2);
        squares.sum::<f64>().sqrt()
    }

    /// `factor` times what PyTorch's float32 was off, which is one draw a tensor.
    ///
    /// The largest error comes from a heavy tail (gradients are sums of outer products, so a single
    /// large input makes an outlier): it is held to the worst relative one of the case. The l2
    /// error is an average and is held to the tensor's own figure, or one rounding of a float32,
    /// and one element that is as far off as may be: the biases have 16 elements.
    pub(crate) fn limit(&self, name: &str, factor: f64) -> Limit {
        let torch = self.by_name[name];
        let max_abs = factor * self.floor_max_abs * torch.reference_max_abs;
        let l2 = factor * torch.l2.max(self.floor_l2 * torch.reference_l2);
        Limit {
            torch,
            max_abs,
            l2: l2.hypot(max_abs),
        }
    }
}

impl Comparison {
    /// Compares a tensor with its reference: largest and l2 error against the limit's.
    pub(crate) fn tensor(&mut self, name: &str, ours: &[f64], reference: &[f64], limit: Limit) {
        assert_eq!(ours.len(), reference.len(), "{name}");
        let (mut max_abs, mut squares) = (0.0f64, 0.0);
        let (mut dot, mut our_squares, mut reference_squares) = (0.0, 0.0, 0.0);
        for (a, b) in ours.iter().zip(reference) {
            let difference = (a - b).abs();
            // A NaN must not lose against the largest so far.
            max_abs = if difference.is_nan() {
                f64::NAN
            } else {
                max_abs.max(difference)
            };
            squares += difference * difference;
            dot += a * b;
            our_squares += a * a;
            reference_squares += b * b;
        }
        let good = max_abs <= limit.max_abs && squares.sqrt() <= limit.l2;
        let row = format!(
            "{name}: max {max_abs:.2e} (torch {:.2e}, limit {:.2e}), \
             l2 {:.2e} (torch {:.2e}, limit {:.2e}), 1 - cosine {:.1e}, norm ratio {:.9}",
            limit.torch.max_abs,
            limit.max_abs,
            squares.sqrt(),
            limit.torch.l2,
            limit.l2,
            1.0 - dot / (our_squares * reference_squares).sqrt(),
            (our_squares / reference_squares).sqrt(),
        );
        self.rows.push((row, good));
    }

    /// Compares a number that may be `limit` away.
    pub(crate) fn number(&mut self, name: &str, ours: f64, reference: f64, limit: f64) {
        let error = (ours - reference).abs();
        let row = format!("{name}: {ours:.9} for {reference:.9}: {error:.2e} (limit {limit:.2e})");
        self.rows.push((row, error <= limit));
    }

    /// Names and figures of what is beyond its limit.
    pub(crate) fn failures(&self) -> Vec<&str> {
        let beyond = self.rows.iter().filter(|(_, good)| !good);
        beyond.map(|(row, _)| row.as_str()).collect()
    }

    /// Panics with the whole table if anything is beyond its limit.
    pub(crate) fn assert_good(&self, what: &str) {
        assert!(!self.rows.is_empty(), "{what}: nothing was compared");
        if self.failures().is_empty() {
            return;
        }
        let mut table = format!("{what}: {} beyond their limits", self.failures().len());
        for (row, good) in &self.rows {
            write!(table, "\n{} {row}", if *good { "    " } else { "BAD " }).unwrap();
        }
        panic!("{table}");
    }
}

/// Bytes of every section of a layer's tile, all in host.
pub(crate) fn tile_bytes(engine: &Engine, layer: u16) -> Vec<Vec<u8>> {
    let tiers = engine.tiers();
    let sections = tiers.sections();
    sections
        .map(|section| {
            let home = tiers.home(layer, section).unwrap();
            home.as_slice::<u8>().to_vec()
        })
        .collect()
}
