//! `--kill-at`, for tests: a signal to this process itself at a chosen instant of a run.
//!
//! - `LANE:ACTION:STEP` or `LANE:ACTION:STEP:NTH`, as `compute:backward:7:2`: just before the
//!   second backward of step 7. Steps are counted from 1, and so are the actions of that name in a
//!   step.
//! - `commit:PHASE:NTH`, as `commit:manifestflushed:1`: when this process's first commit is there.

use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
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
}

impl FromStr for Instant {
    type Err = String;

    fn from_str(text: &str) -> Result<Instant, String> {
        let expected = || "expected LANE:ACTION:STEP[:NTH] or commit:PHASE:NTH".to_string();
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
        })
    }
}

impl Instant {
    /// Sends `signal` to this process when the instant comes.
    pub(crate) fn arm(&self, trainer: &mut Trainer, signal: i32) {
        let (wanted, seen) = (self.clone(), AtomicU64::new(0));
        let reached = move || {
            if seen.fetch_add(1, Ordering::Relaxed) + 1 == wanted.nth {
                signal_hook::low_level::raise(signal).ok();
                // A signal that does not end the process is noted by another thread.
                if signal != SIGKILL {
                    std::thread::sleep(Duration::from_millis(200));
                }
            }
        };
        let wanted = self.clone();
        if wanted.lane == "commit" {
            trainer.set_phase_hook(Box::new(move |phase| {
                if name_of(&phase) == wanted.name {
                    reached();
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
                    reached();
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
