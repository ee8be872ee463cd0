//! metrics.jsonl: one line a step, an evaluation or a commit, with enough digits to read back the
//! same floats.

use std::path::Path;

use serde_json::json;

use super::commit::CommitReport;
use super::lines::Lines;
use super::spikes::Spike;
use crate::error::Result;
use crate::log::Log;
use crate::log::status::State;
use crate::stats::{HOP_NAMES, Snapshot, WAIT_NAMES};

/// One training step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Steps done, this one included.
    pub step: u64,
    /// Mean loss over the step's targets, nats.
    pub loss: f64,
    /// Global norm before clipping.
    pub grad_norm: f64,
    /// Rate used.
    pub learning_rate: f64,
    /// Tokens.
    pub tokens: u64,
    /// Tokens with a target.
    pub targets: u64,
    /// Its norm was far above those before.
    pub spike: Option<Spike>,
    /// Steps so far that made no update.
    pub skipped: u64,
    /// Seconds since the step before returned.
    pub step_seconds: f64,
    /// Bytes over each hop and waits in that time.
    pub moved: Snapshot,
    /// Seconds in which the scratch store's disks were busy: reading, writing, either.
    pub store_seconds: [f64; 3],
    /// Bytes written to drives.
    pub written: DriveBytes,
}

/// Bytes written to drives.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DriveBytes {
    /// Spilled extents, since the step before.
    pub store: u64,
    /// Commits that ended since the step before, and the making of their file.
    pub checkpoint: u64,
    /// All of the run, processes before this one included.
    pub total: u64,
    /// The total as a share of what the drive is rated for, where `memory.drive_tbw` says.
    pub life: Option<f64>,
}

impl StepReport {
    /// Tokens a second.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.step_seconds.max(1e-9)
    }
}

/// The run's metrics file.
pub struct Metrics {
    lines: Lines,
    /// Most bytes written to drives that a line of an earlier process told.
    written_before: u64,
    /// Shows the lines.
    log: Option<Log>,
}

impl Metrics {
    /// Opens `dir`/metrics.jsonl to append, keeping lines up to `step`; at step 0 a file that holds
    /// any is kept beside it.
    pub fn open(dir: &Path, step: u64) -> Result<Metrics> {
        let mut written_before = 0;
        let lines = Lines::open(dir, "metrics.jsonl", step, |line| {
            let written = line["written_bytes"]["total"].as_u64();
            written_before = written.unwrap_or(0).max(written_before);
        })?;
        Ok(Metrics {
            lines,
            written_before,
            log: None,
        })
    }

    /// Most bytes written to drives that a line of an earlier process told, those of lost steps
    /// among them.
    pub fn written_before(&self) -> u64 {
        self.written_before
    }

    /// The warnings of the first line that was lost and of what could not be shown, each once.
    pub fn take_warning(&mut self) -> Option<String> {
        let shown = || self.log.as_mut().and_then(Log::take_warning);
        self.lines.take_warning().or_else(shown)
    }

    /// Hands every later line to `log` too.
    pub fn show(&mut self, log: Log) {
        self.log = Some(log);
    }

    /// Shows a line that is kept elsewhere.
    pub fn tell(&mut self, line: &serde_json::Value) {
        if let Some(log) = &mut self.log {
            log.tell(line);
        }
    }

    /// How the run ends, for who shows it.
    pub fn ends(&mut self, state: State, failure: Option<String>) {
        if let Some(log) = &mut self.log {
            log.ends(state, failure);
        }
    }

    /// Appends a step.
    pub fn step(&mut self, report: &StepReport) {
        let moved = &report.moved;
        let written = &report.written;
        let [read, write, store] = report.store_seconds;
        let busy = [moved.up_seconds, moved.down_seconds, read, write];
        let mut line = json!({
            "step": report.step,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "learning_rate": report.learning_rate,
            "tokens": report.tokens,
            "targets": report.targets,
            "step_seconds": report.step_seconds,
            "tokens_per_second": report.tokens_per_second(),
            "bytes": named(&HOP_NAMES, &moved.bytes),
            "stall_seconds": named(&WAIT_NAMES, &moved.waits),
            "hop_seconds": named(&HOP_NAMES, &busy),
            "update_seconds": moved.update_seconds,
            "update_core_seconds": moved.update_core_seconds,
            "store_seconds": store,
            "written_bytes": {
                "store": written.store,
                "checkpoint": written.checkpoint,
                "total": written.total,
            },
        });
        if let Some(spike) = report.spike {
            line["spike"] = json!({ "mean_norm": spike.mean, "skipped": spike.skipped });
        }
        if report.skipped > 0 {
            line["skipped_steps"] = report.skipped.into();
        }
        if let Some(life) = written.life {
            line["drive_life"] = life.into();
        }
        self.line(&line);
    }

    /// Appends an evaluation.
    pub fn evaluation(&mut self, step: u64, loss: f64) {
        self.line(&json!({ "step": step, "eval_loss": loss, "eval_perplexity": loss.exp() }));
    }

    /// Appends a commit.
    pub fn commit(&mut self, report: &CommitReport) {
        self.line(&json!({
            "step": report.step,
            "commit_seconds": report.seconds,
            "commit_stall_seconds": report.stall_seconds,
            "commit_stall_bound_seconds": report.stall_bound_seconds,
            "commit_bytes": report.bytes,
        }));
    }

    /// Makes durable, when called, what was written by now. What that cannot save is lines.
    pub fn syncer(&self) -> Box<dyn FnOnce() + Send> {
        self.lines.syncer()
    }

    fn line(&mut self, line: &serde_json::Value) {
        self.tell(line);
        self.lines.push(line);
    }
}

fn named<T: Copy + Into<serde_json::Value>>(names: &[&str], values: &[T]) -> serde_json::Value {
    let pairs = names.iter().zip(values);
    let pairs = pairs.map(|(name, value)| (name.to_string(), (*value).into()));
    serde_json::Value::Object(pairs.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn garbled_lines_and_those_of_lost_steps_are_left_out() {
        let dir = std::env::temp_dir().join(format!("terrace-metrics-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("metrics.jsonl");
        let mut written = b"{\"step\":1}\n\xff\xfe\0\n{\"step\":2}\n{\"step\":3}\n".to_vec();
        written.extend_from_slice(b"{\"step\":2,\"lo");
        std::fs::write(&path, written).unwrap();
        let opened = Metrics::open(&dir, 2);
        let second = Metrics::open(&dir, 2);
        let left = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(opened.is_ok());
        let refusal = second
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default();
        let end = "in use by another process; stop it or choose another directory";
        assert!(refusal.ends_with(end), "{refusal}");
        assert_eq!(left, "{\"step\":1}\n{\"step\":2}\n");
    }

    #[test]
    fn a_run_from_the_beginning_keeps_the_lines_of_those_before() {
        let name = format!("terrace-metrics-aside-{}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&dir).unwrap();
        for run in 0..3 {
            let mut metrics = Metrics::open(&dir, 0).unwrap();
            metrics.evaluation(1, f64::from(run));
        }
        drop(Metrics::open(&dir, 0).unwrap());
        // The last one left no line, which is nothing to keep.
        drop(Metrics::open(&dir, 0).unwrap());
        let read = |name: &str| std::fs::read_to_string(dir.join(name)).ok();
        let names = ["", ".1", ".2", ".3", ".4"].map(|end| read(&format!("metrics.jsonl{end}")));
        std::fs::remove_dir_all(&dir).unwrap();
        let line = |loss: f64| {
            let perplexity = loss.exp();
            let values = json!({ "step": 1, "eval_loss": loss, "eval_perplexity": perplexity });
            Some(format!("{values}\n"))
        };
        let expected = [Some(String::new()), line(0.0), line(1.0), line(2.0), None];
        assert_eq!(names, expected);
    }
}
