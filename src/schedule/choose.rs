//! The plan of a run, chosen by predicted seconds.
//!
//! - Every choice that memory allows is planned and simulated, a kind at a time, the best of one
//!   kind being where the next begins.
//! - One that costs memory or moves more is taken only where it saves a hundredth.
//!
//! Pure: the rates are measured elsewhere.

use super::Schedule;
use super::simulate::{Prediction, Rates, simulate};
use crate::config::{RunConfig, SpillZstd};
use crate::error::{Error, Result};
use crate::model::ModelSpec;
use crate::plan::{Budgets, Choice, Deferred, DeviceProfile, Plan, Purpose, SpillOrder};

/// Steps from none to all that are tried of a count of layers.
const TRIALS: u16 = 8;

/// The plan of a training run with its prediction, chosen by predicted seconds.
///
/// - On a card, states of tiles that would be spilled live there in place of kept activations, or
///   do not.
/// - Without clipping, and where arithmetic and AdamW do not share cores, so many updates run under
///   the next forward.
/// - Where tiles are spilled: which of them first.
/// - Where tiles are spilled and anchors leave the device, so many of these are in the store in
///   their place: their writes come in forward and their reads in backward.
/// - Spilled moments are compressed or not.
///
/// # Errors
/// [`Error::Budget`] if no choice fits, and those of a config that no device serves.
pub fn fastest(
    spec: &ModelSpec,
    config: &RunConfig,
    device: &DeviceProfile,
    budgets: Budgets,
    rates: &Rates,
) -> Result<(Plan, Prediction)> {
    let make = |choice| {
        let plan = Plan::choosing(spec, config, device, budgets, Purpose::Train, choice)?;
        let prediction = simulate(&plan, &Schedule::train(&plan), rates);
        Ok::<_, Error>((plan, prediction))
    };
    let plain = search(&make, config, spec, rates, Choice::default());
    if device.card.is_none() || plain.as_ref().is_ok_and(|(plan, _)| !plan.spills()) {
        return plain;
    }
    // The CPU device's memory is RAM, as the host's is; a card's is more.
    let states = Choice {
        states_on_device: true,
        ..Choice::default()
    };
    match (plain, search(&make, config, spec, rates, states)) {
        (Ok(plain), Ok(carried)) if !is_faster(&carried.1, &plain.1) => Ok(plain),
        (plain, Err(_)) => plain,
        (_, carried) => carried,
    }
}

/// The best plan by all that is chosen from `start` on.
fn search(
    make: &dyn Fn(Choice) -> Result<(Plan, Prediction)>,
    config: &RunConfig,
    spec: &ModelSpec,
    rates: &Rates,
    start: Choice,
) -> Result<(Plan, Prediction)> {
    let mut search = Search {
        make,
        choice: start,
        best: make(start)?,
    };
    let defers = !search.best.0.clipping && !rates.shared_cores;
    search.choose_deferred(defers, spec.layer_count());
    if search.best.0.spilled_bytes > 0 {
        search.choose_order(defers, spec.layer_count());
        search.choose_anchors();
    }
    if search.best.0.spills_moments() && config.memory.zstd == SpillZstd::Auto {
        search.choose_zstd()?;
    }
    Ok(search.best)
}

/// What is best so far.
struct Search<'a> {
    make: &'a dyn Fn(Choice) -> Result<(Plan, Prediction)>,
    choice: Choice,
    best: (Plan, Prediction),
}

/// From none to `most`.
fn counts(most: u16) -> impl Iterator<Item = u16> {
    (0..=TRIALS).map(move |trial| most * trial / TRIALS)
}

fn is_faster(a: &Prediction, b: &Prediction) -> bool {
    a.step_seconds < b.step_seconds * 0.99
}

impl Search<'_> {
    /// Takes the choice if it is faster and, unless it is about what spills, spills no more. What
    /// finds no room makes a plan worse, or none.
    fn try_out(&mut self, choice: Choice) {
        let Ok(other) = (self.make)(choice) else {
            return;
        };
        let moves_states = choice.order != SpillOrder::LastFirst || choice.stored_anchors > 0;
        let is_allowed = moves_states || other.0.store_bytes() <= self.best.0.store_bytes();
        if is_allowed && is_faster(&other.1, &self.best.1) {
            (self.best, self.choice) = (other, choice);
        }
    }

    fn choose_deferred(&mut self, defers: bool, layers: u16) {
        let firsts = counts(layers).filter(|_| defers);
        for (first, last) in firsts.flat_map(|f| counts(layers / 3).map(move |l| (f, l))) {
            let deferred = Deferred { first, last };
            self.try_out(Choice {
                deferred,
                ..self.choice
            });
        }
    }

    /// What spills first, with as many updates under the next forward as go with it: there the disk
    /// has little else to do.
    fn choose_order(&mut self, defers: bool, layers: u16) {
        let Deferred { first, last } = self.choice.deferred;
        let firsts = counts(layers).filter(|_| defers);
        for first in std::iter::once(first).chain(firsts) {
            self.try_out(Choice {
                deferred: Deferred { first, last },
                order: SpillOrder::Spread,
                ..self.choice
            });
        }
        let lasts = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32].into_iter();
        let lasts = lasts.filter(|last| defers && *last <= layers / 3);
        for (first, last) in lasts.flat_map(|last| [(0, last), (first, last)]) {
            self.try_out(Choice {
                deferred: Deferred { first, last },
                order: SpillOrder::DeferredFirst,
                ..self.choice
            });
        }
    }

    fn choose_anchors(&mut self) {
        for stored_anchors in counts(self.best.0.map.shape.travelling) {
            self.try_out(Choice {
                stored_anchors,
                ..self.choice
            });
        }
    }

    fn choose_zstd(&mut self) -> Result<()> {
        let mut other = (self.make)(Choice {
            zstd: true,
            ..self.choice
        })?;
        if other.0.host.coder_slabs > 0 {
            if is_faster(&other.1, &self.best.1) {
                std::mem::swap(&mut self.best, &mut other);
            }
            self.best.1.other_zstd_step_seconds = Some(other.1.step_seconds);
        }
        Ok(())
    }
}
