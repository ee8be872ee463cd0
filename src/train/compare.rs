//! What the plan predicted of a step beside what was measured, hop by hop.
//!
//! Stall is the time in which the device had nothing to compute: for weights that were not yet
//! promoted or updated, and for gradients that had not left. AdamW's time, and that of copies on
//! the CPU device, is that in which they had a processor: waiting for one is no hop's.
//!
//! Steps count from the third on: the first fill caches, and updates of one step run under the
//! next.
//! Only steps without an evaluation or a sample before them should be added.

use std::fmt::Write;

use super::StepReport;
use crate::schedule::simulate::Prediction;
use crate::stats::Wait;

/// Steps that are left out.
const WARM_UP: u64 = 2;

/// Sums over the steps of a run.
#[derive(Clone, Debug, Default)]
pub struct Comparison {
    seen: u64,
    steps: u64,
    step: f64,
    compute: f64,
    stall: f64,
    up: f64,
    down: f64,
    update: f64,
    store: f64,
}

impl Comparison {
    /// Adds a step.
    pub fn add(&mut self, report: &StepReport) {
        self.seen += 1;
        if self.seen <= WARM_UP {
            return;
        }
        let moved = &report.moved;
        let waited = |wait: Wait| moved.waits[wait as usize];
        let waits = waited(Wait::ComputeForWeights)
            + waited(Wait::ComputeForDemote)
            + waited(Wait::ComputeForAnchors);
        self.steps += 1;
        self.step += report.step_seconds;
        self.compute += (report.step_seconds - waits).max(0.0);
        self.stall += waits;
        self.up += moved.up_seconds;
        self.down += moved.down_seconds;
        self.update += moved.update_core_seconds;
        let [.., busy] = report.store_seconds;
        self.store += busy;
    }

    /// A table of seconds a step; `None` before the third step.
    pub fn table(&self, prediction: &Prediction) -> Option<String> {
        if self.steps == 0 {
            return None;
        }
        let mut text = format!(
            "predicted and measured, seconds a step (mean of {} after the first {WARM_UP}):",
            self.steps
        );
        for (name, predicted, measured) in [
            ("step", prediction.step_seconds, self.step),
            ("compute", prediction.compute_seconds, self.compute),
            ("stall", prediction.stall_seconds(), self.stall),
            ("up", prediction.promote_seconds, self.up),
            ("down", prediction.demote_seconds, self.down),
            ("store", prediction.store_seconds, self.store),
            ("AdamW", prediction.update_seconds, self.update),
        ] {
            let measured = measured / self.steps as f64;
            // What takes no time to speak of is no hop of this run.
            let least = 1e-3 * self.step / self.steps as f64;
            if predicted < least && measured < least {
                continue;
            }
            let apart = match predicted < least {
                true => "-".to_string(),
                false => format!("{:+.1} %", 100.0 * (measured / predicted - 1.0)),
            };
            write!(
                text,
                "\n  {name:<8}{predicted:>10.3}{measured:>10.3}{apart:>10}"
            )
            .ok();
        }
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Snapshot;

    #[test]
    fn the_first_steps_are_left_out_and_the_others_averaged() {
        let report = |step: u64, seconds: f64| {
            let mut moved = Snapshot {
                update_core_seconds: 0.25 * seconds,
                ..Snapshot::default()
            };
            moved.waits[Wait::ComputeForWeights as usize] = 0.5 * seconds;
            StepReport {
                step,
                loss: 1.0,
                grad_norm: 1.0,
                learning_rate: 0.0,
                tokens: 1,
                targets: 1,
                spike: None,
                skipped: 0,
                step_seconds: seconds,
                moved,
                store_seconds: [0.0; 3],
                written: crate::train::DriveBytes::default(),
            }
        };
        let prediction = Prediction {
            step_seconds: 2.0,
            compute_seconds: 2.0,
            update_seconds: 0.5,
            ..Prediction::default()
        };
        let mut comparison = Comparison::default();
        for (step, seconds) in [(1, 100.0), (2, 100.0)] {
            comparison.add(&report(step, seconds));
            assert_eq!(comparison.table(&prediction), None);
        }
        comparison.add(&report(3, 1.0));
        comparison.add(&report(4, 3.0));
        let table = comparison.table(&prediction).expect("two steps count");
        let lines: Vec<&str> = table.lines().skip(1).collect();
        assert_eq!(
            lines,
            [
                "  step         2.000     2.000    +0.0 %",
                "  compute      2.000     1.000   -50.0 %",
                "  stall        0.000     1.000         -",
                "  AdamW        0.500     0.500    +0.0 %",
            ]
        );
    }
}
