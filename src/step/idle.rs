//! How long a card had nothing to do while the compute lane waited for another.
//!
//! The lane launches ahead of the card, so its own waiting says little. Timed points around it do:
//! the card comes to the first when all that was launched before is done, and to the second at
//! once if it has nothing else. They are read when a pass is over.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::device::{Device, Point};
use crate::stats::{Stats, Wait};

/// Waits of a pass, until they are read.
#[derive(Default)]
pub(super) struct Idle {
    waits: Mutex<Vec<(Wait, Point, Point)>>,
}

/// A wait that has begun.
pub(super) struct Began {
    at: Instant,
    point: Option<Point>,
}

impl Idle {
    /// The compute lane begins to wait.
    pub(super) fn begin(device: &Device) -> Began {
        Began {
            at: Instant::now(),
            point: device.timed_point(),
        }
    }

    /// It goes on. Where the device tells no times, the lane's own wait counts.
    pub(super) fn end(&self, device: &Device, stats: &Stats, wait: Wait, began: Began) {
        match (began.point, device.timed_point()) {
            (Some(from), Some(to)) => {
                let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
                waits.push((wait, from, to));
            }
            _ => stats.waited(wait, began.at.elapsed()),
        }
    }

    /// Forgets what was kept.
    pub(super) fn clear(&self) {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        waits.clear();
    }

    /// Counts what was kept, once the device has come to the last point: it has by then, unless
    /// something was launched after what the pass ended with.
    pub(super) fn flush(&self, device: &Device, stats: &Stats) {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((.., last)) = waits.last() {
            device.reach(last);
        }
        for (wait, from, to) in waits.drain(..) {
            let seconds = device.seconds_between(&from, &to).max(0.0);
            stats.waited(wait, Duration::from_secs_f64(seconds));
        }
    }
}
