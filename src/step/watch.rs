//! Where the lanes are, for who shows a run: read from outside, never told by a lane.

use std::sync::{Arc, Mutex, PoisonError};

use super::progress::Progress;
use crate::schedule::{Action, Form, Lane, Schedule};
use crate::stats::{Snapshot, Stats};

/// The schedule under way.
#[derive(Clone)]
struct Under {
    schedule: Arc<Schedule>,
    progress: Arc<Progress>,
    number: u64,
}

/// Reads an engine's progress and counters; keeps none of its memory.
#[derive(Clone)]
pub struct Watch {
    stats: Arc<Stats>,
    under: Arc<Mutex<Option<Under>>>,
}

/// Where a lane is in its actions of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LanePlace {
    /// Lane.
    pub lane: Lane,
    /// Actions that are done.
    pub done: usize,
    /// All of them; not 0.
    pub of: usize,
    /// The first that is not done: under way, or waiting.
    pub action: Option<Action>,
    /// They are those of the step before, whose last updates run under this one.
    pub previous: bool,
}

impl Watch {
    pub(super) fn new(stats: Arc<Stats>) -> Watch {
        Watch {
            stats,
            under: Arc::default(),
        }
    }

    /// A pass begins.
    pub(super) fn enter(&self, schedule: &Arc<Schedule>, progress: &Arc<Progress>, number: u64) {
        *self.under.lock().unwrap_or_else(PoisonError::into_inner) = Some(Under {
            schedule: schedule.clone(),
            progress: progress.clone(),
            number,
        });
    }

    /// Counters at this instant.
    pub fn snapshot(&self) -> Snapshot {
        self.stats.snapshot()
    }

    /// What runs and where its lanes are, those without actions left out; `None` before the first
    /// pass, and when a lane is just at the table: who looks comes again.
    pub fn places(&self) -> Option<(Form, Vec<LanePlace>)> {
        let Under {
            schedule,
            progress,
            number,
        } = {
            let under = self.under.lock().unwrap_or_else(PoisonError::into_inner);
            under.as_ref()?.clone()
        };
        let mut places = Vec::new();
        for lane in Lane::ALL {
            let actions: Vec<usize> = schedule.lane(lane).collect();
            if actions.is_empty() {
                continue;
            }
            let mut done = progress.count_done(&actions, number)?;
            let mut previous = false;
            if done == 0 && number > 1 {
                let before = progress.count_done(&actions, number - 1)?;
                previous = before < actions.len();
                done = if previous { before } else { 0 };
            }
            let action = actions.get(done).map(|at| schedule.actions[*at].action);
            places.push(LanePlace {
                lane,
                done,
                of: actions.len(),
                action,
                previous,
            });
        }
        Some((schedule.form, places))
    }
}

/// The layer and the micro-batch that an action is about, where it is about one.
pub fn subject(action: Action) -> (Option<u16>, Option<u32>) {
    match action {
        Action::Gather { micro }
        | Action::Loss { micro }
        | Action::Evaluate { micro }
        | Action::Logits { micro }
        | Action::EmbedBackward { micro } => (None, Some(micro)),
        Action::Forward { layer, micro, .. }
        | Action::ForwardOnly { layer, micro }
        | Action::Rebuild { layer, micro }
        | Action::Backward { layer, micro, .. }
        | Action::DemoteAnchor { layer, micro }
        | Action::PromoteAnchor { layer, micro } => (Some(layer), Some(micro)),
        Action::Promote { layer, .. }
        | Action::Bind { layer, .. }
        | Action::Clear { layer, .. }
        | Action::Finish { layer, .. }
        | Action::Park { layer, .. }
        | Action::Demote { layer, .. }
        | Action::DemoteWeight { layer, .. }
        | Action::Update { layer, .. }
        | Action::Return { layer, .. } => (Some(layer), None),
        Action::Clip | Action::UpdateRows { .. } => (None, None),
    }
}
