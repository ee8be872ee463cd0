//! Evaluations: the best one, and when too many came to nothing.
//!
//! - The best is the evaluation with the lowest loss. Where `checkpoint.keep_best` asks for it, its
//!   state is committed at once, and that commit stays however many follow.
//! - The words are those of Hugging Face's Trainer: an improvement is a loss lower than the lowest
//!   before by more than `early_stopping_threshold`; after `early_stopping_patience` evaluations in
//!   a row without one the run ends.
//! - All of it is in the commits' metadata, so that a resumed run counts on.

use std::time::Instant;

use super::Trainer;
use crate::checkpoint::{Best, Evaluations};
use crate::error::Result;

/// What an evaluation came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// Mean loss over the evaluation data, nats.
    pub loss: f64,
    /// No evaluation before had a lower one.
    pub is_best: bool,
    /// Evaluations in a row without an improvement, this one included.
    pub without_improvement: u64,
}

impl Trainer {
    /// Whether an evaluation is due after the steps done so far.
    pub fn evaluation_is_due(&self) -> bool {
        let (every, step) = (self.run.config.train.eval_every, self.progress.step);
        every > 0 && step.is_multiple_of(every)
    }

    /// Evaluates the state after the steps done so far, and counts it; `None` without evaluation
    /// data.
    ///
    /// # Errors
    /// That of a lane that failed.
    pub fn evaluate(&mut self) -> Result<Option<Evaluation>> {
        if self.run.eval.is_empty() {
            return Ok(None);
        }
        let at_once = usize::try_from(self.run.config.train.micro_batches).expect("capped");
        let (mut sum, mut targets) = (0.0, 0);
        for micros in self.run.eval.chunks(at_once) {
            match self.engine.evaluate(micros.to_vec()) {
                Ok((losses, count)) => {
                    sum += losses;
                    targets += count;
                }
                Err(error) => return Err(self.stopped(error)),
            }
        }
        let loss = sum / targets.max(1) as f64;
        // What it moved is no step's.
        self.last_snapshot = self.engine.tiers().stats.snapshot();
        self.count_store();
        self.metrics.evaluation(self.progress.step, loss);
        self.last_return = Instant::now();
        let threshold = self.run.config.train.early_stopping_threshold;
        let evaluations = &mut self.progress.evaluations;
        let is_best = count(evaluations, self.progress.step, loss, threshold);
        Ok(Some(Evaluation {
            loss,
            is_best,
            without_improvement: evaluations.without_improvement,
        }))
    }

    /// The evaluation with the lowest loss so far, resumed runs included.
    pub fn best(&self) -> Option<Best> {
        self.progress.evaluations.best
    }

    /// Whether the evaluations so far end the run, by `train.early_stopping_patience`.
    pub fn stops_early(&self) -> bool {
        let patience = self.run.config.train.early_stopping_patience;
        patience > 0 && self.progress.evaluations.without_improvement >= patience
    }

    /// Whether the state is that of the best evaluation, which is to be kept.
    pub(super) fn is_best_to_keep(&self) -> bool {
        let best = self.progress.evaluations.best.map(|best| best.step);
        self.run.config.checkpoint.keep_best && best == Some(self.progress.step)
    }
}

/// Counts an evaluation; whether it is the best. A loss that is not a number is none.
fn count(evaluations: &mut Evaluations, step: u64, loss: f64, threshold: f64) -> bool {
    let lowest = evaluations.best.map_or(f64::INFINITY, |best| best.loss);
    let improves = loss < lowest && lowest - loss > threshold;
    evaluations.without_improvement = match improves {
        true => 0,
        false => evaluations.without_improvement + 1,
    };
    let is_best = loss < lowest;
    if is_best {
        evaluations.best = Some(Best { step, loss });
    }
    is_best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_improves_by_less_than_the_threshold_is_the_best_and_uses_patience() {
        let mut evaluations = Evaluations::default();
        let losses = [3.0, 2.5, 2.45, 2.4, f64::NAN, 2.2, 2.2];
        let came_to = losses.map(|loss| {
            let is_best = count(&mut evaluations, 1, loss, 0.1);
            (is_best, evaluations.without_improvement)
        });
        let expected = [
            (true, 0),
            (true, 0),
            (true, 1),
            (true, 2),
            (false, 3),
            (true, 0),
            (false, 1),
        ];
        assert_eq!(came_to, expected);
        assert_eq!(evaluations.best.map(|best| best.loss), Some(2.2));
    }
}
