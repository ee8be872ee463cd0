//! When the card itself worked on each action of the compute lane, for a trace.
//!
//! The lane launches and goes on, so the host's clock says nothing of the card. Timed points before
//! and after the launches of an action do: they are read when the lanes stand still, and become
//! the trace's lane [`CARD_LANE`]. Between the two points the card may also wait for the next
//! launch.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::device::{Device, Point};
use crate::schedule::Action;
use crate::stats::Stats;

/// Name of the lane.
pub const CARD_LANE: &str = "card";

/// Most actions that wait to be read.
const SPANS_MAX: usize = 1 << 16;

struct Span {
    action: Action,
    from: Point,
    to: Point,
}

/// Points of a run, until they are read.
pub(super) struct CardTrace {
    /// A point that the card had come to at the instant beside it.
    base: (Point, Instant),
    spans: Mutex<Vec<Span>>,
}

impl CardTrace {
    /// `None` where no trace is kept or operations are done when they return.
    pub(super) fn start(device: &Device, stats: &Stats) -> Option<CardTrace> {
        if !stats.traces() {
            return None;
        }
        let base = device.timed_point()?;
        device.settle();
        Some(CardTrace {
            base: (base, Instant::now()),
            spans: Mutex::default(),
        })
    }

    /// Keeps an action whose launches began after `from` and are all given to the card.
    pub(super) fn ends(&self, device: &Device, action: Action, from: Option<Point>) {
        if let (Some(from), Some(to)) = (from, device.timed_point()) {
            let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
            // A trace keeps no more than that of a whole run anyway.
            if spans.len() < SPANS_MAX {
                spans.push(Span { action, from, to });
            }
        }
    }

    /// Moves what was kept to the trace. The card has come to every point.
    pub(super) fn flush(&self, device: &Device, stats: &Stats) {
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        for Span { action, from, to } in spans.drain(..) {
            let seconds = device.seconds_between(&self.base.0, &from);
            let start = self.base.1 + Duration::from_secs_f64(seconds.max(0.0));
            let length = device.seconds_between(&from, &to);
            let length = Duration::from_secs_f64(length.max(0.0));
            stats.trace_at(CARD_LANE, format!("{action:?}"), start, length);
        }
    }
}
