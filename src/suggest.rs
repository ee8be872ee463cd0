//! Settings that fit a machine, fastest first: the planner and the simulator, asked many times.
//!
//! - Pure and without chance: the same question gives the same answer.
//! - What is tried: how a step's sequences are split into micro-batches, larger steps, and no
//!   clipping. The first changes only the order of sums; the others are choices of whoever trains,
//!   so they are told apart and nothing is applied.
//! - What of activations is kept, which states spill and what lives on the device is the plan's.
//! - Where nothing fits, the answer is the least that would.
//!
//! Learning rates are not scaled with the step: that is a question of the training.

use crate::config::{RunConfig, Size, StorePath};
use crate::error::{Error, Result};
use crate::model::ModelSpec;
use crate::plan::{Budgets, DeviceProfile, Plan, bytes_text};
use crate::schedule::Schedule;
use crate::schedule::choose::fastest;
use crate::schedule::simulate::{Prediction, Rates, simulate};

/// Most micro-batches of a step that is suggested.
const MICROS_MAX: u64 = 256;
/// Most rows of an answer.
const ROWS_MAX: usize = 8;
/// A step that is larger must be faster by this share to be told.
const GAIN_MIN: f64 = 0.03;
/// Where a store is suggested and the run names none.
const STORE_PATH: &str = "/nvme/scratch";
/// More than any tier has.
const PLENTY: u64 = 1 << 52;

/// Which steps are tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steps {
    /// The run's sequences a step, and twice and four times as many by choice.
    Run,
    /// Of 8 Ki to 512 Ki tokens: nobody has said how large a step is to be.
    Any,
}

/// What is asked.
#[derive(Clone, Copy)]
pub struct Question<'a> {
    /// The model.
    pub spec: &'a ModelSpec,
    /// The run to start from.
    pub config: &'a RunConfig,
    /// The device.
    pub device: &'a DeviceProfile,
    /// What there is of each tier; `None` of the store is as much as it takes.
    pub budgets: (u64, u64, Option<u64>),
    /// What the machine does.
    pub rates: &'a Rates,
    /// Which steps are tried.
    pub steps: Steps,
}

/// Settings that fit, with what they come to.
#[derive(Clone, Debug)]
pub struct Suggestion {
    /// The run with them.
    pub config: RunConfig,
    /// Its plan.
    pub plan: Plan,
    /// A step of it.
    pub prediction: Prediction,
    /// Sequences a step and clipping are the run's own.
    pub same_training: bool,
}

impl Suggestion {
    /// Tokens a second.
    pub fn tokens_per_second(&self) -> f64 {
        self.prediction.tokens as f64 / self.prediction.step_seconds
    }

    /// What bounds a step, in words.
    pub fn reason(&self) -> String {
        let (p, plan) = (&self.prediction, &self.plan);
        let share = |seconds: f64| format!("{:.0} % of the step", 100.0 * seconds / p.step_seconds);
        let after_norm = match plan.clipping {
            true => ", which waits for the norm",
            false => "",
        };
        match p.bound() {
            "promote" => format!("PCIe to the device, {}", share(p.promote_seconds)),
            "demote" => format!("PCIe from the device, {}", share(p.demote_seconds)),
            "update" => format!("AdamW{after_norm}, {}", share(p.update_seconds)),
            "store" => format!(
                "disk, {}: {} read and written{after_norm}",
                share(p.store_seconds),
                bytes_text(p.read_bytes + p.write_bytes),
            ),
            _ if p.compute_seconds < 0.9 * p.step_seconds && plan.clipping => format!(
                "compute, {}; then AdamW, since the norm comes last",
                share(p.compute_seconds)
            ),
            _ => format!("compute, {}", share(p.compute_seconds)),
        }
    }

    /// Lines for run.toml, by table.
    pub fn toml(&self) -> String {
        let mut keys = vec![
            "train.micro_batch",
            "train.micro_batches",
            "train.max_grad_norm",
            "memory.device",
            "memory.host",
        ];
        if self.plan.spills() {
            keys.push("memory.store");
        }
        keys.push("memory.recompute");
        self.config.lines_of(&keys)
    }
}

impl Question<'_> {
    fn given(&self) -> Budgets {
        let (device, host, store) = self.budgets;
        Budgets {
            device,
            host,
            store: store.unwrap_or(PLENTY),
        }
    }

    fn sequences(&self) -> u64 {
        let train = &self.config.train;
        train.micro_batch.saturating_mul(train.micro_batches)
    }

    /// Sequences a step to try, ascending.
    fn step_sizes(&self) -> Vec<u64> {
        let mut sizes: Vec<u64> = match self.steps {
            Steps::Run => [1, 2, 4].map(|f| self.sequences().saturating_mul(f)).into(),
            Steps::Any => (13..=19)
                .map(|power| ((1u64 << power) / self.config.data.seq_len).max(1))
                .collect(),
        };
        sizes.dedup();
        sizes
    }

    /// Norms to clip to: the run's, and none.
    fn clippings(&self) -> Vec<f64> {
        let mut clippings = vec![self.config.train.max_grad_norm, 0.0];
        clippings.dedup();
        clippings
    }

    fn with(&self, sequences: u64, micro_batch: u64, clip: f64) -> RunConfig {
        let mut config = self.config.clone();
        config.train.micro_batch = micro_batch;
        config.train.micro_batches = sequences / micro_batch;
        config.train.max_grad_norm = clip;
        config
    }

    /// The fastest way to take a step of so many sequences, if there is one; of the first step that
    /// has none, `refused` keeps why not even its smallest micro-batches fit.
    fn best_split(
        &self,
        sequences: u64,
        clip: f64,
        refused: &mut Option<Error>,
    ) -> Option<Suggestion> {
        let same_training =
            sequences == self.sequences() && clip == self.config.train.max_grad_norm;
        let mut best: Option<Suggestion> = None;
        let mut last = None;
        for micro_batch in splits(sequences) {
            let config = self.with(sequences, micro_batch, clip);
            let plan = Plan::fitting(self.spec, &config, self.device, self.given());
            let plan = match plan {
                Ok(plan) => plan,
                Err(error) => {
                    last = Some(error);
                    continue;
                }
            };
            let prediction = simulate(&plan, &Schedule::train(&plan), self.rates);
            let faster = |best: &Suggestion| {
                prediction.step_seconds < best.prediction.step_seconds * (1.0 - 1e-9)
            };
            if best.as_ref().is_none_or(faster) {
                best = Some(Suggestion {
                    config,
                    plan,
                    prediction,
                    same_training,
                });
            }
        }
        let Some(mut best) = best else {
            *refused = refused.take().or(last);
            return None;
        };
        let (spec, config, device) = (self.spec, &best.config, self.device);
        let found = fastest(spec, config, device, self.given(), self.rates).ok()?;
        (best.plan, best.prediction) = found;
        let memory = &mut best.config.memory;
        if best.plan.spills() && memory.store.is_empty() {
            memory.store = vec![StorePath {
                size: Size::Bytes(best.plan.store_bytes().next_multiple_of(1 << 30)),
                ..StorePath::new(STORE_PATH.into())
            }];
        }
        Some(best)
    }

    fn fits(&self, budgets: Budgets) -> bool {
        let sequences = self.step_sizes()[0];
        let smallest = splits(sequences).last().copied().unwrap_or(1);
        self.clippings().into_iter().any(|clip| {
            let config = self.with(sequences, smallest, clip);
            Plan::fitting(self.spec, &config, self.device, budgets).is_ok()
        })
    }

    /// The least of one tier with which the smallest step fits, to a 64th of itself; the tier's
    /// field of [`Budgets`] is what `set` writes.
    fn least(&self, given: Budgets, set: impl Fn(&mut Budgets, u64)) -> Option<u64> {
        let fits = |bytes: u64| {
            let mut budgets = given;
            set(&mut budgets, bytes);
            self.fits(budgets)
        };
        if !fits(PLENTY) {
            return None;
        }
        let (mut no, mut yes) = (0, PLENTY);
        while yes - no > (yes / 64).max(1 << 20) {
            let middle = no + (yes - no) / 2;
            match fits(middle) {
                true => yes = middle,
                false => no = middle,
            }
        }
        Some(yes)
    }

    /// The one line where nothing fits.
    fn nothing_fits(&self) -> Error {
        let given = self.given();
        let one = [
            ("memory.host", self.least(given, |b, bytes| b.host = bytes)),
            (
                "memory.device",
                self.least(given, |b, bytes| b.device = bytes),
            ),
            (
                "memory.store",
                self.least(given, |b, bytes| b.store = bytes),
            ),
        ];
        let text = |(key, bytes): &(&str, Option<u64>)| {
            let bytes = (*bytes)?.next_multiple_of(1 << 20);
            Some(format!("{key} of {}", bytes_text(bytes)))
        };
        let mut ways: Vec<String> = one.iter().filter_map(text).collect();
        if ways.is_empty() {
            // No one tier is enough: the device first, since nothing else replaces it.
            let mut all = Budgets {
                device: PLENTY,
                host: PLENTY,
                store: PLENTY,
            };
            all.device = self.least(all, |b, bytes| b.device = bytes).unwrap_or(0);
            all.host = self.least(all, |b, bytes| b.host = bytes).unwrap_or(0);
            all.store = self.least(all, |b, bytes| b.store = bytes).unwrap_or(0);
            let [device, host, store] = [all.device, all.host, all.store].map(bytes_text);
            ways.push(format!(
                "memory.device of {device} with memory.host of {host} and memory.store of {store}"
            ));
        }
        let sequences = self.step_sizes()[0];
        let tokens = sequences * self.config.data.seq_len;
        let store = self.budgets.2.map_or("any store".to_string(), |bytes| {
            format!("{} of store", bytes_text(bytes))
        });
        Error::input(
            "plan",
            format!("a step of {tokens} tokens in the smallest micro-batches"),
            format!("at least {}", ways.join(", or ")),
            format!(
                "{} of device, {} of host, {store}",
                bytes_text(given.device),
                bytes_text(given.host)
            ),
            "raise one of them, or take a smaller step or shorter sequences",
        )
    }
}

/// Sequences of a micro-batch to try: those that divide the step, larger first, powers of two and
/// the whole.
fn splits(sequences: u64) -> Vec<u64> {
    let powers = (0..=63).map(|power| 1u64 << power);
    let mut splits: Vec<u64> = powers
        .chain([sequences, sequences / 3, sequences / 6])
        .filter(|part| *part > 0 && sequences.is_multiple_of(*part))
        .filter(|part| sequences / part <= MICROS_MAX)
        .collect();
    splits.sort_unstable_by(|a, b| b.cmp(a));
    splits.dedup();
    splits
}

/// Settings that fit, most tokens a second first: of each size of a step and each choice of
/// clipping the fastest; larger steps only where they are faster.
///
/// # Errors
/// [`Error::Input`] with the least that would fit, where nothing does; what no memory would help.
pub fn suggest(question: &Question<'_>) -> Result<Vec<Suggestion>> {
    let mut rows: Vec<Suggestion> = Vec::new();
    let mut refused = None;
    for clip in question.clippings() {
        let mut fastest = 0.0;
        for sequences in question.step_sizes() {
            let Some(row) = question.best_split(sequences, clip, &mut refused) else {
                continue;
            };
            if row.same_training || row.tokens_per_second() > fastest * (1.0 + GAIN_MIN) {
                fastest = row.tokens_per_second().max(fastest);
                rows.push(row);
            }
        }
    }
    if rows.is_empty() {
        return Err(match refused {
            Some(error @ (Error::Input { .. } | Error::Unsupported { .. })) => error,
            _ => question.nothing_fits(),
        });
    }
    rows.sort_by(|a, b| {
        let order = b.tokens_per_second().total_cmp(&a.tokens_per_second());
        order.then(a.prediction.tokens.cmp(&b.prediction.tokens))
    });
    // The run's own training is always among them.
    while rows.len() > ROWS_MAX {
        let slowest = rows.iter().rposition(|row| !row.same_training);
        rows.remove(slowest.unwrap_or(rows.len() - 1));
    }
    Ok(rows)
}

/// The row to take unasked: the fastest that leaves the training as it is, where a run says what
/// that is; else the fastest with the run's clipping.
pub fn preferred(rows: &[Suggestion], config: &RunConfig, steps: Steps) -> usize {
    let wanted = |row: &Suggestion| match steps {
        Steps::Run => row.same_training,
        Steps::Any => row.config.train.max_grad_norm == config.train.max_grad_norm,
    };
    rows.iter().position(wanted).unwrap_or(0)
}

/// The rows as a table for people, numbered from 1.
pub fn table(rows: &[Suggestion]) -> String {
    let mut text = format!(
        "  {:>2}  {:>13}  {:>8}  {:>8}  {:>9}  {:>9}  {:>7}  {:>7}  {:>7}  {:>5}  bound by\n",
        "#",
        "micro-batches",
        "tokens",
        "clipping",
        "s a step",
        "tokens/s",
        "device",
        "host",
        "store",
        "kept",
    );
    for (number, row) in (1..).zip(rows) {
        let (train, plan) = (&row.config.train, &row.plan);
        let gib = |bytes: u64| format!("{:.1}", bytes as f64 / (1u64 << 30) as f64);
        let pairs = (u64::from(plan.blocks) * plan.map.shape.micros).max(1);
        let clipping = match plan.clipping {
            true => train.max_grad_norm.to_string(),
            false => "off".to_string(),
        };
        text.push_str(&format!(
            "  {number:>2}  {:>13}  {:>8}  {clipping:>8}  {:>9.3}  {:>9.0}  {:>7}  {:>7}  {:>7}  \
             {:>3} %  {}\n",
            format!("{} x {}", train.micro_batches, train.micro_batch),
            row.prediction.tokens,
            row.prediction.step_seconds,
            row.tokens_per_second(),
            gib(plan.map.bytes + plan.device.fixed_bytes),
            gib(plan.host.bytes),
            gib(plan.store_bytes()),
            100 * plan.kept.len() as u64 / pairs,
            row.reason(),
        ));
    }
    text
}

/// The rows for programs: sizes in bytes, times in seconds.
pub fn json(rows: &[Suggestion]) -> serde_json::Value {
    let row = |row: &Suggestion| {
        let (train, plan) = (&row.config.train, &row.plan);
        serde_json::json!({
            "micro_batch": train.micro_batch,
            "micro_batches": train.micro_batches,
            "max_grad_norm": train.max_grad_norm,
            "tokens": row.prediction.tokens,
            "same_training": row.same_training,
            "step_seconds": row.prediction.step_seconds,
            "tokens_per_second": row.tokens_per_second(),
            "device": plan.map.bytes + plan.device.fixed_bytes,
            "host": plan.host.bytes,
            "store": plan.store_bytes(),
            "kept": plan.kept.len(),
            "block_micro_pairs": u64::from(plan.blocks) * plan.map.shape.micros,
            "bound_by": row.prediction.bound(),
            "reason": row.reason(),
            "toml": row.toml(),
        })
    };
    rows.iter().map(row).collect()
}
