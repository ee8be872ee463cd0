//! metrics.jsonl: one line a step, an evaluation or a commit, with enough digits to read back the
//! same floats.
//!
//! After a resume the lines of steps that were lost with the crash are taken out, so that a step
//! has one line. A run that begins anew keeps an earlier run's file beside its own.
//!
//! A line that cannot be written is lost, and the run goes on: its state is in its commits. The
//! first such line leaves a warning.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde_json::json;

use super::commit::CommitReport;
use crate::error::{Error, Result};
use crate::stats::{HOP_NAMES, Snapshot, WAIT_NAMES};

/// Most files of earlier runs in a directory.
const ASIDE_MAX: u32 = 1000;

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
    /// Seconds since the step before returned.
    pub step_seconds: f64,
    /// Bytes over each hop and waits in that time.
    pub moved: Snapshot,
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
    path: PathBuf,
    file: File,
    /// Bytes of whole lines.
    length: u64,
    /// A line was lost.
    failed: bool,
    warning: Option<String>,
    /// Most bytes written to drives that a line of an earlier process told.
    written_before: u64,
}

impl Metrics {
    /// Opens `dir`/metrics.jsonl to append, keeping lines up to `step`. At step 0 none would be
    /// kept: a file that holds any is renamed to the first free of metrics.jsonl.1, .2, …
    pub fn open(dir: &Path, step: u64) -> Result<Metrics> {
        std::fs::create_dir_all(dir).map_err(|e| Error::io("make log.dir", dir, e))?;
        let path = dir.join("metrics.jsonl");
        if let Ok(old) = File::open(&path) {
            lock(&old, &path)?;
        }
        if step == 0 {
            set_aside(&path)?;
        }
        let Kept {
            bytes,
            first_left_out,
            written,
        } = kept_lines(&path, step)?;
        if let Some(first_left_out) = first_left_out {
            let staged = dir.join("metrics.jsonl.new");
            let replaced =
                std::fs::write(&staged, &bytes).and_then(|()| std::fs::rename(&staged, &path));
            // A full disk holds no second copy: what follows the first lost line goes with it.
            if replaced.is_err() {
                std::fs::remove_file(&staged).ok();
                let cut = OpenOptions::new().write(true).open(&path);
                cut.and_then(|file| file.set_len(first_left_out))
                    .map_err(|e| Error::io("cut", &path, e))?;
            }
        }
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let file = file.map_err(|e| Error::io("open", &path, e))?;
        lock(&file, &path)?;
        let found = file
            .metadata()
            .map_err(|e| Error::io("look at", &path, e))?;
        Ok(Metrics {
            path,
            file,
            length: found.len(),
            failed: false,
            warning: None,
            written_before: written,
        })
    }

    /// Most bytes written to drives that a line of an earlier process told, those of lost steps
    /// among them.
    pub fn written_before(&self) -> u64 {
        self.written_before
    }

    /// The warning of the first line that was lost, once.
    pub fn take_warning(&mut self) -> Option<String> {
        self.warning.take()
    }

    /// Appends a step.
    pub fn step(&mut self, report: &StepReport) {
        let moved = &report.moved;
        let written = &report.written;
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
            "update_seconds": moved.update_seconds,
            "written_bytes": {
                "store": written.store,
                "checkpoint": written.checkpoint,
                "total": written.total,
            },
        });
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
        let file = self.file.try_clone();
        Box::new(move || {
            file.and_then(|file| file.sync_data()).ok();
        })
    }

    fn line(&mut self, value: &serde_json::Value) {
        let line = format!("{value}\n");
        match self.file.write_all(line.as_bytes()) {
            Ok(()) => self.length += line.len() as u64,
            Err(error) => {
                // No half of a line stays; where even that is refused, a reader leaves it out.
                self.file.set_len(self.length).ok();
                if !self.failed {
                    self.failed = true;
                    self.warning = Some(format!(
                        "warning: {}: {error}; its lines are lost until there is space, the run \
                         goes on",
                        self.path.display()
                    ));
                }
            }
        }
    }
}

fn named<T: Copy + Into<serde_json::Value>>(names: &[&str], values: &[T]) -> serde_json::Value {
    let pairs = names.iter().zip(values);
    let pairs = pairs.map(|(name, value)| (name.to_string(), (*value).into()));
    serde_json::Value::Object(pairs.collect())
}

/// Takes the kernel's lock on a metrics file, which ends with its holder: a run without checkpoints
/// has no other lock, and a second one would replace the file that the first still writes.
fn lock(file: &File, path: &Path) -> Result<()> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(Error::Busy {
            path: path.to_path_buf(),
            pid: 0,
        }),
        // No locks there (some network file systems): the run can do without.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(()),
    }
}

/// Renames an earlier run's metrics, if there are any.
fn set_aside(path: &Path) -> Result<()> {
    if !std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() > 0) {
        return Ok(());
    }
    let aside = (1..=ASIDE_MAX)
        .map(|number| path.with_extension(format!("jsonl.{number}")))
        .find(|aside| aside.symlink_metadata().is_err());
    let aside = aside.ok_or_else(|| {
        Error::input(
            "log.dir",
            path.display().to_string(),
            format!("fewer than {ASIDE_MAX} metrics files of earlier runs"),
            "more",
            "move them elsewhere, or choose another log.dir",
        )
    })?;
    std::fs::rename(path, &aside).map_err(|e| Error::io("rename", path, e))
}

/// What of a metrics file stays.
#[derive(Default)]
struct Kept {
    /// Its lines.
    bytes: Vec<u8>,
    /// Where the first line begins that does not stay as it is, if there is one.
    first_left_out: Option<u64>,
    /// Most bytes written to drives that any line tells.
    written: u64,
}

/// Lines of a metrics file up to `step`; a line that a crash cut or garbled is left out.
fn kept_lines(path: &Path, step: u64) -> Result<Kept> {
    let mut kept = Kept::default();
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(kept),
        Err(error) => return Err(Error::io("open", path, error)),
    };
    // By bytes: what a crash left behind need not be text.
    let (mut reader, mut line) = (BufReader::new(file), Vec::new());
    let mut next = 0u64;
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line);
        let read = read.map_err(|e| Error::io("read", path, e))?;
        if read == 0 {
            return Ok(kept);
        }
        let value: serde_json::Value = serde_json::from_slice(&line).unwrap_or_default();
        let written = value["written_bytes"]["total"].as_u64();
        kept.written = kept.written.max(written.unwrap_or(0));
        let is_kept = value["step"].as_u64().is_some_and(|at| at <= step);
        if is_kept {
            kept.bytes.extend_from_slice(&line);
        }
        let is_ended = line.ends_with(b"\n");
        if is_kept && !is_ended {
            kept.bytes.push(b'\n');
        }
        if !is_kept || !is_ended {
            kept.first_left_out.get_or_insert(next);
        }
        next += read as u64;
    }
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
