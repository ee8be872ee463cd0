//! Numbers of the compute lane that the host needs: losses, and the norms of finished gradients.
//!
//! On a card they come when the card has come to them, while the lane launches on: the marker's
//! thread takes them, before it marks the action that they belong to. What is not finite is found
//! there, before anything that waits for the action begins. The lane itself waits for them twice
//! at most: before the step is clipped, and at its end.

use std::sync::PoisonError;

use super::{Pass, Shared};
use crate::device::Number;
use crate::error::{Error, Result};
use crate::schedule::{Action, Lane};

/// f32 values from here on round to an infinite bf16.
const BF16_ROUNDS_TO_INFINITY: f64 = f32::from_bits(0x7F7F_8000) as f64;

/// A number and what it is of.
#[derive(Clone, Copy)]
pub(super) enum Told {
    /// Sum of the losses of a micro-batch.
    Loss { micro: u32, number: Number },
    /// Squared norm of a layer's finished gradient.
    Norm { layer: u16, number: Number },
}

impl Shared {
    /// Takes a number that the device knows. [`Error::NonFinite`] if it is not one, and the step
    /// is not one that is skipped then.
    pub(super) fn take_told(&self, pass: &Pass, told: Told) -> Result<()> {
        match told {
            Told::Loss { micro, number } => {
                let sum = self.tiers.device.number(number);
                if !sum.is_finite() && !pass.skips_non_finite() {
                    return Err(self.non_finite(pass, "loss".to_string(), sum));
                }
                let losses = pass.data.losses.lock();
                losses.unwrap_or_else(PoisonError::into_inner)[micro as usize] = sum;
                Ok(())
            }
            Told::Norm { layer, number } => {
                self.take_norm(pass, layer, self.tiers.device.number(number))
            }
        }
    }

    fn take_norm(&self, pass: &Pass, layer: u16, mut squared: f64) -> Result<()> {
        // A gradient so large that rounding could make it infinite is not a number either.
        let limit = match self.plan.gradient_bytes {
            2 => BF16_ROUNDS_TO_INFINITY,
            _ => f64::MAX,
        };
        if squared.is_nan() || squared.sqrt() >= limit {
            if !pass.skips_non_finite() {
                let what = format!("gradient norm of {}", self.tiers.layout(layer).id);
                return Err(self.non_finite(pass, what, squared.sqrt()));
            }
            squared = f64::INFINITY;
        }
        let norms = pass.data.norms.lock();
        let mut norms = norms.unwrap_or_else(PoisonError::into_inner);
        norms.resize(usize::from(self.plan.layer_count()), 0.0);
        norms[usize::from(layer)] = squared;
        drop(norms);
        // The embedding is finished last: the norm of the whole is known.
        if layer == 0 {
            let norm = pass.global_norm();
            pass.data.grad_norm.set(norm).expect("a step has one norm");
        }
        Ok(())
    }

    /// Waits until every number of the pass up to here is taken: they come in order.
    pub(super) fn await_told(&self, pass: &Pass) -> Result<()> {
        let tells = |action| {
            let of_loss = matches!(action, Action::Loss { .. } | Action::Evaluate { .. });
            of_loss || matches!(action, Action::Finish { .. })
        };
        let lane = pass.schedule.lane(Lane::Compute);
        let Some(last) = lane.filter(|index| tells(pass.action(*index))).last() else {
            return Ok(());
        };
        let last = u32::try_from(last).expect("fewer than 2^32 actions");
        match pass.progress.wait(last, pass.number) {
            true => Ok(()),
            false => Err(Error::StoreFailed {
                first: "another lane failed".to_string(),
            }),
        }
    }
}
