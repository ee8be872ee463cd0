//! status.json: where a run is at this moment, replaced a few times a second, and run.json: what
//! was started. Readers see whole files or none.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::machine;
use crate::schedule::Form;
use crate::stats::WAIT_NAMES;
use crate::step::{LanePlace, Watch, subject};

/// Name of the file that tells where a run is.
pub const STATUS: &str = "status.json";
/// Name of the file that tells what was started.
pub const RUN: &str = "run.json";
/// Most starts that run.json tells of.
const STARTS_MAX: usize = 1000;

/// How a run ended, if it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It has not; or its process was killed.
    #[default]
    Running,
    /// After its last step.
    Finished,
    /// Before that, as somebody asked.
    Interrupted,
    /// By an error.
    Failed,
}

/// Where a lane is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LaneStatus {
    /// Its name.
    pub lane: String,
    /// Actions of the step that are done.
    pub done: usize,
    /// All of them.
    pub of: usize,
    /// The next one's name.
    pub action: String,
    /// Its layer: 0 embed, blocks from 1 on, then the head.
    pub layer: Option<u16>,
    /// Its micro-batch, from 0 on.
    pub micro: Option<u32>,
    /// They are those of the step before.
    pub previous: bool,
}

/// Where a run is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Process.
    pub pid: u32,
    /// Seconds since 1970.
    pub updated_at: f64,
    /// When this process began to train, in seconds since 1970.
    pub started_at: f64,
    /// Whether it goes on.
    pub state: State,
    /// Why it failed.
    pub failure: Option<String>,
    /// Steps done.
    pub step: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// `training`, `evaluating` or `sampling`.
    pub doing: String,
    /// Lanes that have something to do in it.
    pub lanes: Vec<LaneStatus>,
    /// Bytes over each [`crate::stats::Hop`] since the process began.
    pub bytes: [u64; 4],
    /// Seconds waited by [`crate::stats::Wait`] since then.
    pub waits: [f64; WAIT_NAMES.len()],
    /// Resident memory of the process.
    pub resident_bytes: u64,
}

impl Status {
    /// Reads what moves from the engine.
    pub fn look(&mut self, watch: &Watch) {
        let snapshot = watch.snapshot();
        self.updated_at = now();
        self.bytes = snapshot.bytes;
        self.waits = snapshot.waits;
        self.resident_bytes = machine::resident_memory();
        if let Some((form, places)) = watch.places() {
            self.doing = match form {
                Form::Train => "training",
                Form::Evaluate => "evaluating",
                Form::Generate => "sampling",
            }
            .to_string();
            self.lanes = places.into_iter().map(lane_status).collect();
        }
    }

    /// The status of the run in `dir`; `None` where there is none that can be read.
    pub fn read(dir: &Path) -> Option<Status> {
        serde_json::from_slice(&std::fs::read(dir.join(STATUS)).ok()?).ok()
    }

    /// Replaces the status of the run in `dir`.
    pub fn write(&self, dir: &Path) -> std::io::Result<()> {
        let text = serde_json::to_string(self).map_err(std::io::Error::other)?;
        replace(&dir.join(STATUS), text.as_bytes())
    }

    /// Seconds since it was written.
    pub fn age(&self) -> f64 {
        (now() - self.updated_at).max(0.0)
    }
}

fn lane_status(place: LanePlace) -> LaneStatus {
    let (layer, micro) = place.action.map_or((None, None), subject);
    let name = place.action.map(|action| format!("{action:?}"));
    let name = name.as_deref().unwrap_or("");
    LaneStatus {
        lane: format!("{:?}", place.lane).to_lowercase(),
        done: place.done,
        of: place.of,
        action: name.split(' ').next().unwrap_or("").to_lowercase(),
        layer,
        micro,
        previous: place.previous,
    }
}

/// Seconds since 1970.
pub fn now() -> f64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap_or_default().as_secs_f64()
}

/// Writes `about` as run.json under `dir`, with this start and, where steps were done before, those
/// that the file told of.
pub fn write_run(dir: &Path, mut about: Value, steps_done: u64) -> std::io::Result<()> {
    let path = dir.join(RUN);
    let mut starts = match steps_done {
        0 => Vec::new(),
        _ => read_run(dir)["starts"]
            .as_array()
            .cloned()
            .unwrap_or_default(),
    };
    starts.push(json!({ "at": now(), "after_step": steps_done }));
    let first = starts.len().saturating_sub(STARTS_MAX);
    about["starts"] = starts.split_off(first).into();
    replace(&path, format!("{about:#}\n").as_bytes())
}

/// run.json of the run in `dir`; null where there is none that can be read.
pub fn read_run(dir: &Path) -> Value {
    let bytes = std::fs::read(dir.join(RUN)).unwrap_or_default();
    serde_json::from_slice(&bytes).unwrap_or_default()
}

fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let staged = path.with_added_extension("new");
    std::fs::write(&staged, bytes)?;
    std::fs::rename(&staged, path)
}
