//! Marks actions of the compute lane as done when the device has done them.
//!
//! The compute lane launches and goes on. For an action that another lane waits for it leaves the
//! point that its stream had come to here; this thread waits for the points in their order, and
//! marks. All other actions of the lane are marked as soon as they are launched: only the lane
//! itself is after them, and its stream keeps their order.
//!
//! Numbers that the host needs (losses, norms) are not read here: the operation that returns them
//! waits for its stream.

use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::Sender;

use super::lanes::Ended;
use super::{Pass, Shared};
use crate::device::Point;
use crate::error::{Error, Result};
use crate::schedule::{Lane, Schedule};

/// Points that may wait to be reached; the compute lane waits for room.
const POINTS_MAX: usize = 1024;

/// An action and the point after its launches.
struct Mark {
    point: Point,
    index: usize,
    pass: Arc<Pass>,
}

/// The marker's thread.
pub(super) struct Marker {
    marks: Option<Sender<Mark>>,
    thread: Option<JoinHandle<()>>,
}

impl Marker {
    /// Starts the thread. It holds the tiers until it is dropped.
    pub(super) fn start(shared: &Arc<Shared>) -> Result<Marker> {
        let (marks, received) = crossbeam_channel::bounded::<Mark>(POINTS_MAX);
        let shared = shared.clone();
        let thread = std::thread::Builder::new()
            .name("terrace-marker".to_string())
            .spawn(move || {
                let mut ended = Ended::new(&shared);
                for Mark { point, index, pass } in received {
                    let pass = ended.within(pass);
                    shared.tiers.device.reach(&point);
                    if let Err(error) = shared.check_device(pass.action(index)) {
                        shared.failure.set(error);
                        pass.progress.wake();
                        return;
                    }
                    pass.progress.mark(index, pass.number);
                }
            })
            .map_err(|source| Error::io("start a thread", "marker".as_ref(), source))?;
        Ok(Marker {
            marks: Some(marks),
            thread: Some(thread),
        })
    }

    /// Marks the action once the device has done all that the calling thread has launched.
    pub(super) fn mark_when_reached(&self, shared: &Shared, pass: &Arc<Pass>, index: usize) {
        let Some(point) = shared.tiers.device.point() else {
            return pass.progress.mark(index, pass.number);
        };
        let mark = Mark {
            point,
            index,
            pass: pass.clone(),
        };
        // A thread that has ended left its failure behind.
        self.marks
            .as_ref()
            .expect("the sender is there until drop")
            .send(mark)
            .ok();
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        self.marks.take();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

/// By action: it is the compute lane's, and another lane is after it.
pub(super) fn awaited(schedule: &Schedule) -> Vec<bool> {
    let mut awaited = vec![false; schedule.actions.len()];
    for scheduled in schedule.actions.iter().filter(|s| s.lane != Lane::Compute) {
        for after in &scheduled.after {
            let index = after.action as usize;
            awaited[index] |= schedule.actions[index].lane == Lane::Compute;
        }
    }
    awaited
}
