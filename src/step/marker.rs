//! Marks actions of the compute lane as done when the device has done them.
//!
//! The compute lane launches and goes on. For an action that another lane waits for it leaves the
//! point that its stream had come to here; this thread waits for the points in their order, and
//! marks. All other actions of the lane are marked as soon as they are launched: only the lane
//! itself is after them, and its stream keeps their order.
//!
//! Numbers that the host needs (losses, norms) come the same way: their actions are marked once
//! the number is taken ([`super::told`]).

use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::Sender;

use super::lanes::Ended;
use super::told::Told;
use super::{Pass, Shared};
use crate::device::{NUMBERS_MAX, Point};
use crate::error::{Error, Result};
use crate::schedule::{Lane, Schedule};

/// Points that may wait to be reached; the compute lane waits for room.
const POINTS_MAX: usize = 1024;
/// Each point may bring a number; one more is on either side of the queue.
const _: () = assert!(POINTS_MAX + 2 <= NUMBERS_MAX);

/// An action and the point after its launches.
struct Mark {
    point: Point,
    index: usize,
    told: Option<Told>,
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
                for mark in received {
                    let pass = ended.within(mark.pass);
                    shared.tiers.device.reach(&mark.point);
                    let (index, told) = (mark.index, mark.told);
                    let taken = shared.check_device(pass.action(index));
                    let take = |told| shared.take_told(&pass, told);
                    if let Err(error) = taken.and_then(|()| told.map_or(Ok(()), take)) {
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

    /// Marks the action, and takes its number before, once the device has done all that the
    /// calling thread has launched.
    pub(super) fn mark_when_reached(
        &self,
        pass: &Arc<Pass>,
        index: usize,
        point: Point,
        told: Option<Told>,
    ) {
        let mark = Mark {
            point,
            index,
            told,
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
