//! Micro-batches in order, and the place to go on from.
//!
//! - A step is exactly `micro_batches` micro-batches of exactly `micro_batch` sequences. Nothing is
//!   left out: the last step of an epoch goes on with the first sequences of the next.
//! - A [`Cursor`] names the next sequence. Seeking to it gives the same micro-batches as having
//!   come there, whatever was read before.
//! - Every step has a target, as each row of a dataset has one.
//!
//! Not here: the order itself (`packing`), threads: a step is a copy of a few thousand numbers.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::packing::{EpochPlan, epoch_order};
use super::{Dataset, Micro};
use crate::config::DataConfig;
use crate::error::{Error, Result};

/// Epochs whose sequences are counted exactly by [`Batches::steps_of_epochs`].
const EPOCHS_COUNTED_MAX: u64 = 16;

/// The next sequence of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Cursor {
    /// Passes over the data that are done.
    pub epoch: u64,
    /// Sequences of this epoch that are done.
    pub sequence: u64,
}

/// The micro-batches of a training run.
#[derive(Debug)]
pub struct Batches {
    dataset: Arc<Dataset>,
    seq_len: u64,
    packing: bool,
    shuffle: bool,
    micro_batch: u64,
    micro_batches: u64,
    seed: u64,
    cursor: Cursor,
    /// Of `cursor.epoch`.
    plan: EpochPlan,
}

impl Batches {
    /// Micro-batches of `micro_batch` sequences, `micro_batches` a step, both at least 1; the order
    /// is from `seed`. Begins at the first epoch's first sequence.
    pub fn new(
        dataset: Arc<Dataset>,
        config: &DataConfig,
        micro_batch: u64,
        micro_batches: u64,
        seed: u64,
    ) -> Result<Batches> {
        let tokens = u128::from(micro_batch) * u128::from(config.seq_len);
        if micro_batch == 0 || micro_batches == 0 || tokens > u128::from(u32::MAX >> 1) {
            return Err(Error::input(
                "run.toml",
                "train.micro_batch",
                "1 or more, with micro_batch × seq_len below 2^31 tokens",
                format!(
                    "micro_batch {micro_batch}, micro_batches {micro_batches}, seq_len {}",
                    config.seq_len
                ),
                "correct run.toml",
            ));
        }
        let mut batches = Batches {
            dataset,
            seq_len: config.seq_len,
            packing: config.packing,
            shuffle: config.shuffle,
            micro_batch,
            micro_batches,
            seed,
            cursor: Cursor::default(),
            plan: EpochPlan::default(),
        };
        batches.plan = batches.plan_of(0);
        Ok(batches)
    }

    /// The next step's micro-batches, each with a target, as every row has one; [`Error::Io`] where
    /// a row's file cannot be read.
    pub fn next_step(&mut self) -> Result<Vec<Micro>> {
        let mut micros = Vec::new();
        let mut marked = Vec::new();
        for _ in 0..self.micro_batches {
            let mut micro = Micro::default();
            for _ in 0..self.micro_batch {
                if self.cursor.sequence == self.plan.sequences() {
                    self.enter(self.cursor.epoch + 1);
                }
                for &row in self.plan.rows(self.cursor.sequence) {
                    self.dataset.append_row(row, &mut marked, &mut micro)?;
                }
                self.cursor.sequence += 1;
            }
            micros.push(micro);
        }
        Ok(micros)
    }

    /// Where the next step begins.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// Goes on from `cursor`. An error if this data has no such sequence.
    pub fn seek(&mut self, cursor: Cursor) -> Result<()> {
        let plan = if cursor.epoch == self.cursor.epoch {
            None
        } else {
            Some(self.plan_of(cursor.epoch))
        };
        let sequences = plan.as_ref().unwrap_or(&self.plan).sequences();
        if cursor.sequence > sequences {
            return Err(Error::input(
                "data cursor",
                format!("epoch {}", cursor.epoch),
                format!("at most {sequences} sequences"),
                cursor.sequence.to_string(),
                "resume with the data, seed and batch that the run began with",
            ));
        }
        if let Some(plan) = plan {
            self.plan = plan;
        }
        self.cursor = cursor;
        Ok(())
    }

    /// Steps that the first epoch takes, the last one perhaps with sequences of the second.
    pub fn steps_per_epoch(&self) -> u64 {
        self.steps_of_epochs(1)
    }

    /// Steps until `epochs` epochs are done. Packing may make a few sequences more or fewer an
    /// epoch: beyond 16 epochs the mean of the first 16 is taken for each.
    pub fn steps_of_epochs(&self, epochs: u64) -> u64 {
        let counted = epochs.min(if self.packing && self.shuffle {
            EPOCHS_COUNTED_MAX
        } else {
            1
        });
        let exact: u64 = (0..counted)
            .map(|epoch| self.plan_of(epoch).sequences())
            .sum();
        let sequences = u128::from(exact) * u128::from(epochs) / u128::from(counted.max(1));
        let step = u128::from(self.micro_batch) * u128::from(self.micro_batches);
        u64::try_from(sequences.div_ceil(step)).unwrap_or(u64::MAX)
    }

    /// Sequences of the epoch that the cursor is in.
    pub fn sequences(&self) -> u64 {
        self.plan.sequences()
    }

    /// Tokens a place of this epoch's sequences: 1 where each is `seq_len` long.
    pub fn efficiency(&self) -> f64 {
        efficiency(&self.dataset, &self.plan, self.seq_len)
    }

    fn enter(&mut self, epoch: u64) {
        self.plan = self.plan_of(epoch);
        self.cursor = Cursor { epoch, sequence: 0 };
    }

    fn plan_of(&self, epoch: u64) -> EpochPlan {
        let order = self.dataset.epoch_order(self.seed, epoch, self.shuffle);
        EpochPlan::new(
            order,
            |row| self.dataset.row_len(row),
            self.seq_len,
            self.packing,
        )
    }
}

/// Tokens a place of the sequences of `plan`.
pub(super) fn efficiency(dataset: &Dataset, plan: &EpochPlan, seq_len: u64) -> f64 {
    let rows = (0..plan.sequences()).flat_map(|sequence| plan.rows(sequence));
    let tokens: u64 = rows.map(|&row| dataset.row_len(row)).sum();
    tokens as f64 / (plan.sequences() as f64 * seq_len as f64)
}

/// The plan of `dataset` in file order.
pub(super) fn plan_in_order(dataset: &Dataset, config: &DataConfig) -> EpochPlan {
    let order = epoch_order(dataset.rows(), 0, 0, false);
    EpochPlan::new(
        order,
        |row| dataset.row_len(row),
        config.seq_len,
        config.packing,
    )
}

/// The micro-batches of an evaluation: every row once, in file order; the last may hold fewer
/// sequences. [`Error::Io`] where a row's file cannot be read.
pub fn eval_micros(dataset: &Dataset, config: &DataConfig, micro_batch: u64) -> Result<Vec<Micro>> {
    let plan = plan_in_order(dataset, config);
    let mut micros: Vec<Micro> = Vec::new();
    let mut marked = Vec::new();
    for sequence in 0..plan.sequences() {
        if sequence % micro_batch.max(1) == 0 {
            micros.push(Micro::default());
        }
        let micro = micros.last_mut().expect("pushed for the first sequence");
        for &row in plan.rows(sequence) {
            dataset.append_row(row, &mut marked, micro)?;
        }
    }
    Ok(micros)
}
