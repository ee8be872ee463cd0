//! The learning rate of a step, as transformers' schedules count: steps from 0, and step 0 of a
//! warm-up has rate 0.
//!
//! Factors are computed in f64 in transformers' own order of operations, so with a floor of 0 the
//! values agree to f64 rounding. A floor is mixed in as its `cosine_with_min_lr` does.
//! Warm-up always starts from 0, also under a floor.

use crate::config::{RateSchedule, TrainConfig};

/// Share of the steps, as a divisor, over which [`RateSchedule::Wsd`] decays.
pub const WSD_DECAY_DIVISOR: u64 = 10;

/// Rate of `step` (from 0) of a run of `total_steps`. Steps from `total_steps` on have the rate
/// that the schedule ends with.
pub fn learning_rate(config: &TrainConfig, total_steps: u64, step: u64) -> f64 {
    let peak = config.learning_rate;
    let warmup = config.warmup_steps;
    if step < warmup {
        return peak * (step as f64 / warmup as f64);
    }
    let step = step.min(total_steps.max(warmup));
    let after_warmup = total_steps.saturating_sub(warmup);
    let factor = match config.schedule {
        RateSchedule::Constant => return peak,
        RateSchedule::Linear => {
            (total_steps.saturating_sub(step)) as f64 / after_warmup.max(1) as f64
        }
        RateSchedule::Cosine => {
            let progress = (step - warmup) as f64 / after_warmup.max(1) as f64;
            0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
        }
        RateSchedule::Wsd => {
            let decay = wsd_decay_steps(total_steps, warmup);
            let stable_end = warmup + after_warmup - decay;
            if step < stable_end {
                return peak;
            }
            1.0 - (step - stable_end) as f64 / decay.max(1) as f64
        }
    };
    if peak == 0.0 {
        return 0.0;
    }
    let floor = config.min_learning_rate / peak;
    peak * (factor * (1.0 - floor) + floor).max(0.0)
}

/// Steps over which [`RateSchedule::Wsd`] decays: the last tenth, at least one, and none of the
/// warm-up's.
pub fn wsd_decay_steps(total_steps: u64, warmup_steps: u64) -> u64 {
    (total_steps / WSD_DECAY_DIVISOR)
        .max(1)
        .min(total_steps.saturating_sub(warmup_steps))
}
