//! Spikes: gradient norms far above those before, and what is done about them.
//!
//! - A norm is judged by the running mean of those before, from the twenty-first step on. It
//!   enters the mean as at most `spike_threshold` times it, so that one spike hardly moves it and a
//!   lasting change is followed within some tens of steps.
//! - A skipped step is a step: its data are used, the learning rate goes on. It is none of AdamW's,
//!   as a step that PyTorch's GradScaler skips: weights, moments and t stay.
//! - The mean is in the commits' metadata: a resumed run judges alike.

use crate::checkpoint::Norms;
use crate::config::{OnSpike, TrainConfig};
use crate::error::{Error, Result};

/// Norms before the first that is judged.
const UNJUDGED: u64 = 20;
/// Norms that the mean reaches back over, about.
const REACH: u64 = 50;
/// Steps in a row that may be skipped; a run that skips more learns nothing.
const SKIPPED_IN_A_ROW_MAX: u64 = 10;

/// A norm far above its running mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spike {
    /// The running mean of the norms before.
    pub mean: f64,
    /// The step made no update.
    pub skipped: bool,
}

/// The largest norm that is no spike; none is too large while too few are known.
fn limit(norms: &Norms, threshold: f64) -> f64 {
    match norms.count < UNJUDGED || norms.mean == 0.0 {
        true => f64::MAX,
        false => threshold * norms.mean,
    }
}

/// What [`crate::step::StepSettings::skip_above`] is for the next step.
pub(super) fn skip_above(norms: &Norms, train: &TrainConfig) -> Option<f64> {
    let skips = train.on_spike == OnSpike::Skip;
    skips.then(|| limit(norms, train.spike_threshold))
}

/// Counts the norm of a step; what it was, if it was a spike.
pub(super) fn count(norms: &mut Norms, threshold: f64, norm: f64, skipped: bool) -> Option<Spike> {
    let limit = limit(norms, threshold);
    let spike = (skipped || norm > limit).then_some(Spike {
        mean: norms.mean,
        skipped,
    });
    norms.skipped += u64::from(skipped);
    norms.skipped_in_a_row = match skipped {
        true => norms.skipped_in_a_row + 1,
        false => 0,
    };
    if norm.is_finite() {
        norms.count += 1;
        norms.mean += (norm.min(limit) - norms.mean) / norms.count.min(REACH) as f64;
    }
    spike
}

/// The end of a run by a spike of `step`, where that is asked for or too many were skipped.
pub(super) fn check(
    norms: &Norms,
    train: &TrainConfig,
    (step, norm): (u64, f64),
    spike: Option<Spike>,
) -> Result<()> {
    let Some(Spike { mean, .. }) = spike else {
        return Ok(());
    };
    let value = match train.on_spike {
        OnSpike::Stop => format!(
            "{norm:.4}, more than {} times its running mean {mean:.4} (train.on_spike = \"stop\")",
            train.spike_threshold
        ),
        OnSpike::Skip if norms.skipped_in_a_row >= SKIPPED_IN_A_ROW_MAX => format!(
            "{norm:.4}, running mean {mean:.4}: {SKIPPED_IN_A_ROW_MAX} steps in a row were skipped"
        ),
        OnSpike::Skip | OnSpike::Continue => return Ok(()),
    };
    Err(Error::NonFinite {
        step,
        what: "gradient norm".to_string(),
        value,
        last_commit: String::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lone_spike_is_seen_and_a_lasting_change_is_followed() {
        let mut norms = Norms::default();
        let mut add = |norm| count(&mut norms, 5.0, norm, false).map(|spike| spike.mean);
        // Too few are known to judge.
        assert_eq!(add(100.0), None);
        let first: Vec<_> = (0..200).filter_map(|_| add(1.0)).collect();
        assert!(first.is_empty(), "{first:?}");
        let mean = add(40.0).unwrap();
        assert!((1.0..1.2).contains(&mean), "{mean}");
        assert_eq!(add(1.0), None);
        let steps = (0..100).take_while(|_| add(40.0).is_some()).count();
        assert!((10..50).contains(&steps), "{steps}");
    }

    #[test]
    fn norms_that_are_not_finite_leave_the_mean_alone() {
        let mut norms = Norms::default();
        (0..30).for_each(|_| assert_eq!(count(&mut norms, 3.0, 2.0, false), None));
        let before = norms;
        let spike = count(&mut norms, 3.0, f64::NAN, true);
        assert_eq!(
            spike,
            Some(Spike {
                mean: 2.0,
                skipped: true
            })
        );
        assert_eq!((norms.mean, norms.count), (before.mean, before.count));
        assert_eq!((norms.skipped, norms.skipped_in_a_row), (1, 1));
        count(&mut norms, 3.0, 2.0, false);
        assert_eq!((norms.skipped, norms.skipped_in_a_row), (1, 0));
    }
}
