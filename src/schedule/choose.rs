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
use crate::plan::anchors::AnchorRows;
use crate::plan::{Budgets, Choice, Deferred, DeviceProfile, Plan, Purpose, SpillOrder};

/// Steps from none to all that are tried of a count of layers.
const TRIALS: u16 = 8;
/// Counts of layers that are tried where few of them matter.
const FEW: [u16; 14] = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48];

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
/// - Where tiles are spilled, anchors leave the device, or nothing else fits: so many blocks have
///   no anchors of their own on the device, which is a home to others in their place.
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
    let mut best: Option<(Choice, Plan, Prediction)> = None;
    let mut refused = None;
    for start in Choice::to_fit(device) {
        // Starts that rebuild are for what fits no other way.
        let is_enough = |(from, plan, _): &(Choice, Plan, Prediction)| {
            !plan.spills() || from.rebuilt_anchors != start.rebuilt_anchors
        };
        if best.as_ref().is_some_and(is_enough) {
            break;
        }
        match search(&make, config, spec, rates, start) {
            Ok((plan, prediction)) => {
                if best
                    .as_ref()
                    .is_none_or(|best| is_faster(&prediction, &best.2))
                {
                    best = Some((start, plan, prediction));
                }
            }
            Err(error) => refused = Some(error.or_nearer(refused)),
        }
    }
    match best {
        Some((_, plan, prediction)) => Ok((plan, prediction)),
        None => Err(refused.expect("a search has found a plan or was refused")),
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
    search.choose_arrangement(config, defers, rates);
    let plan = &search.best.0;
    let may_rebuild = plan.spills() || plan.map.shape.travelling > 0 || start.rebuilt_anchors > 0;
    if may_rebuild && search.choose_rebuilt(spec.blocks) {
        search.choose_arrangement(config, defers, rates);
    }
    search.tell_zstd(config);
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
    fn try_out(&mut self, choice: Choice, may_spill: bool) {
        let Ok(other) = (self.make)(choice) else {
            return;
        };
        let is_allowed = may_spill || other.0.store_bytes() <= self.best.0.store_bytes();
        if is_allowed && is_faster(&other.1, &self.best.1) {
            (self.best, self.choice) = (other, choice);
        }
    }

    /// Whether the busiest lane hardly waits: no order of the same work is faster by much.
    fn is_light(&self, rates: &Rates) -> bool {
        let light = self.best.1.light_seconds(rates.shared_cores);
        self.best.1.step_seconds < light * 1.02
    }

    /// When tiles are updated, and what is spilled, where anything is, and how.
    fn choose_arrangement(&mut self, config: &RunConfig, defers: bool, rates: &Rates) {
        self.arrange(defers, rates);
        if self.choose_zstd(config) {
            self.arrange(defers, rates);
        }
    }

    fn arrange(&mut self, defers: bool, rates: &Rates) {
        let layers = self.best.0.layer_count();
        if defers && !self.is_light(rates) {
            self.choose_deferred(layers);
        }
        if self.best.0.spilled_bytes > 0 && !self.is_light(rates) {
            self.choose_order(defers, layers);
            self.choose_anchors();
        }
    }

    /// Every pair of counts; where one was found before, those that differ from it in one.
    fn choose_deferred(&mut self, layers: u16) {
        let best = self.choice.deferred;
        let (firsts, lasts) = (|| counts(layers), || counts(layers / 3));
        let again = self.choice.rebuilt_anchors > 0 || self.choice.zstd;
        let pairs: Vec<(u16, u16)> = match again {
            false => firsts()
                .flat_map(|f| lasts().map(move |l| (f, l)))
                .collect(),
            true => firsts()
                .map(|first| (first, best.last))
                .chain(lasts().map(|last| (best.first, last)))
                .collect(),
        };
        for (first, last) in pairs {
            let deferred = Deferred { first, last };
            let choice = Choice {
                deferred,
                ..self.choice
            };
            self.try_out(choice, false);
        }
    }

    /// What spills first, with as many updates under the next forward as go with it: there the disk
    /// has little else to do.
    fn choose_order(&mut self, defers: bool, layers: u16) {
        let Deferred { first, last } = self.choice.deferred;
        let firsts = counts(layers).filter(|_| defers);
        for first in std::iter::once(first).chain(firsts) {
            let choice = Choice {
                deferred: Deferred { first, last },
                order: SpillOrder::Spread,
                ..self.choice
            };
            self.try_out(choice, true);
        }
        let lasts = FEW.into_iter().filter(|last| defers && *last <= layers / 3);
        for (first, last) in lasts.flat_map(|last| [(0, last), (first, last)]) {
            let choice = Choice {
                deferred: Deferred { first, last },
                order: SpillOrder::DeferredFirst,
                ..self.choice
            };
            self.try_out(choice, true);
        }
    }

    fn choose_anchors(&mut self) {
        for stored_anchors in counts(self.best.0.map.shape.travelling) {
            let choice = Choice {
                stored_anchors,
                ..self.choice
            };
            self.try_out(choice, true);
        }
    }

    /// Whether more blocks without anchors are better, or fewer.
    fn choose_rebuilt(&mut self, blocks: u16) -> bool {
        let before = self.choice.rebuilt_anchors;
        let most = AnchorRows::rebuilt_max(blocks, 0);
        let few = FEW.into_iter().filter(|few| *few < most);
        for rebuilt_anchors in [0].into_iter().chain(few).chain([most]) {
            let choice = Choice {
                rebuilt_anchors,
                ..self.choice
            };
            self.try_out(choice, true);
        }
        self.choice.rebuilt_anchors != before
    }

    /// Whether moments are compressed.
    fn choose_zstd(&mut self, config: &RunConfig) -> bool {
        let before = self.choice.zstd;
        if self.best.0.spills_moments() && config.memory.zstd == SpillZstd::Auto {
            self.try_out(self.other_zstd(), true);
        }
        self.choice.zstd != before
    }

    fn other_zstd(&self) -> Choice {
        Choice {
            zstd: !self.choice.zstd,
            ..self.choice
        }
    }

    /// Says what the other way to treat moments would come to.
    fn tell_zstd(&mut self, config: &RunConfig) {
        if !self.best.0.spills_moments() || config.memory.zstd != SpillZstd::Auto {
            return;
        }
        let Ok(other) = (self.make)(self.other_zstd()) else {
            return;
        };
        // Coders may have found no room.
        if other.0.host.coder_slabs != self.best.0.host.coder_slabs {
            self.best.1.other_zstd_step_seconds = Some(other.1.step_seconds);
        }
    }
}
