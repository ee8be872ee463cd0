//! `--kill-at`, for tests: a signal to this process itself at a chosen instant of a run.
//!
//! - `LANE:ACTION:STEP` or `LANE:ACTION:STEP:NTH`, as `compute:backward:7:2`: just before the
//!   second backward of step 7. Steps are counted from 1, and so are the actions of that name in a
//!   step.
//! - `commit:PHASE:NTH`, as `commit:manifestflushed:1`: when this process's first commit is there.
//! - `LANE:ACTION:STEP[:NTH]@PHASE:NTH`, as `compute:loss:4@extents:1`: just before the action,
//!   when the commit, which stays in that phase until then, is there: both at once.

use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use signal_hook::consts::SIGKILL;
use terrace::store::Phase;
use terrace::train::Trainer;

/// An instant of a run.
#[derive(Clone, Debug)]
pub(crate) struct Instant {
    /// Lower case; `commit` for a phase.
    lane: String,
    /// Lower case.
    name: String,
    /// Of a lane's action only.
    step: u64,
    nth: u64,
    /// The phase, and which commit's, that a lane's action meets.
    beside: Option<(String, u64)>,
}

/// Longest wait of the two for each other: a test that asks for what never meets must end.
const MEETING_MAX: Duration = Duration::from_secs(60);

/// Where a commit and a lane wait for each other.
#[derive(Clone, Default)]
struct Meeting(Arc<(Mutex<[bool; 2]>, Condvar)>);

impl Meeting {
    /// The side `side` is there; returns when the other is too, or will not be.
    fn arrive(&self, side: usize) {
        let (there, changed) = &*self.0;
        let mut there = there.lock().unwrap_or_else(PoisonError::into_inner);
        there[side] = true;
        changed.notify_all();
        let both = changed.wait_timeout_while(there, MEETING_MAX, |there| *there != [true; 2]);
        drop(both);
    }
}

impl FromStr for Instant {
    type Err = String;

    fn from_str(text: &str) -> Result<Instant, String> {
        let expected =
            || "expected LANE:ACTION:STEP[:NTH][@PHASE:NTH] or commit:PHASE:NTH".to_string();
        let (text, beside) = match text.split_once('@') {
            Some((text, beside)) => {
                let phase = format!("commit:{beside}").parse::<Instant>()?;
                (text, Some((phase.name, phase.nth)))
            }
            None => (text, None),
        };
        let parts: Vec<String> = text.split(':').map(str::to_lowercase).collect();
        let number = |part: &String| part.parse::<u64>().map_err(|_| expected());
        let (step, nth) = match &parts[..] {
            [lane, name, nth] if lane == "commit" => {
                if !Phase::ALL.iter().any(|phase| name_of(phase) == *name) {
                    return Err(format!("one of the phases {:?}", Phase::ALL));
                }
                (0, number(nth)?)
            }
            [_, _, step] => (number(step)?, 1),
            [_, _, step, nth] => (number(step)?, number(nth)?),
            _ => return Err(expected()),
        };
        Ok(Instant {
            lane: parts[0].clone(),
            name: parts[1].clone(),
            step,
            nth,
            beside,
        })
    }
}

impl Instant {
    /// Sends `signal` to this process when the instant comes.
    pub(crate) fn arm(&self, trainer: &mut Trainer, signal: i32) {
        let (wanted, seen) = (self.clone(), AtomicU64::new(0));
        let reached = move |meeting: Option<&Meeting>| {
            if seen.fetch_add(1, Ordering::Relaxed) + 1 == wanted.nth {
                if let Some(meeting) = meeting {
                    meeting.arrive(1);
                }
                signal_hook::low_level::raise(signal).ok();
                // A signal that does not end the process is noted by another thread.
                if signal != SIGKILL {
                    std::thread::sleep(Duration::from_millis(200));
                }
            }
        };
        let wanted = self.clone();
        let meeting = Meeting::default();
        if let Some((phase_name, nth)) = self.beside.clone() {
            let (meeting, seen) = (meeting.clone(), AtomicU64::new(0));
            trainer.set_phase_hook(Box::new(move |phase| {
                if name_of(&phase) == phase_name && seen.fetch_add(1, Ordering::Relaxed) + 1 == nth
                {
                    meeting.arrive(0);
                }
            }));
        }
        if wanted.lane == "commit" {
            trainer.set_phase_hook(Box::new(move |phase| {
                if name_of(&phase) == wanted.name {
                    reached(None);
                }
            }));
            return;
        }
        trainer
            .engine()
            .observe(Box::new(move |lane, action, step| {
                if step == wanted.step
                    && name_of(&lane) == wanted.lane
                    && name_of(action) == wanted.name
                {
                    reached(wanted.beside.as_ref().map(|_| &meeting));
                }
            }));
    }
}

/// A variant's name in lower case, without its fields.
fn name_of(variant: &impl std::fmt::Debug) -> String {
    let text = format!("{variant:?}");
    let name = text.split(' ').next().unwrap_or_default();
    name.to_lowercase()
}
