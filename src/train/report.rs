//! metrics.jsonl: one line a step, an evaluation or a commit, with enough digits to read back the
//! same floats.
//!
//! After a resume the lines of steps that were lost with the crash are taken out, so that a step
//! has one line. A run that begins anew keeps an earlier run's file beside its own.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::json;

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
    file: BufWriter<File>,
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
        let kept = kept_lines(&path, step)?;
        let staged = dir.join("metrics.jsonl.new");
        std::fs::write(&staged, kept).map_err(|e| Error::io("write", &staged, e))?;
        std::fs::rename(&staged, &path).map_err(|e| Error::io("replace", &path, e))?;
        let file = OpenOptions::new().append(true).open(&path);
        let file = file.map_err(|e| Error::io("open", &path, e))?;
        lock(&file, &path)?;
        Ok(Metrics {
            path,
            file: BufWriter::new(file),
        })
    }

    /// Appends a step.
    pub fn step(&mut self, report: &StepReport) -> Result<()> {
        let named = |names: [&str; 4], values: [serde_json::Value; 4]| {
            names
                .into_iter()
                .map(str::to_string)
                .zip(values)
                .collect::<serde_json::Map<_, _>>()
        };
        let moved = &report.moved;
        self.line(&json!({
            "step": report.step,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "learning_rate": report.learning_rate,
            "tokens": report.tokens,
            "targets": report.targets,
            "step_seconds": report.step_seconds,
            "tokens_per_second": report.tokens_per_second(),
            "bytes": named(HOP_NAMES, moved.bytes.map(|bytes| bytes.into())),
            "stall_seconds": named(WAIT_NAMES, moved.waits.map(|seconds| seconds.into())),
            "update_seconds": moved.update_seconds,
        }))
    }

    /// Appends an evaluation.
    pub fn evaluation(&mut self, step: u64, loss: f64) -> Result<()> {
        self.line(&json!({ "step": step, "eval_loss": loss, "eval_perplexity": loss.exp() }))
    }

    /// Appends a commit.
    pub fn commit(&mut self, step: u64, seconds: f64) -> Result<()> {
        self.line(&json!({ "step": step, "commit_seconds": seconds }))
    }

    /// Makes durable what was written: a commit's lines must not be lost before it.
    pub fn flush(&mut self) -> Result<()> {
        self.file
            .flush()
            .and_then(|()| self.file.get_ref().sync_data())
            .map_err(|e| Error::io("write", &self.path, e))
    }

    fn line(&mut self, value: &serde_json::Value) -> Result<()> {
        let written = writeln!(self.file, "{value}").and_then(|()| self.file.flush());
        written.map_err(|e| Error::io("write", &self.path, e))
    }
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

/// Lines of a metrics file up to `step`; a line that a crash cut or garbled is left out.
fn kept_lines(path: &Path, step: u64) -> Result<Vec<u8>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io("open", path, error)),
    };
    let mut kept = Vec::new();
    // By bytes: what a crash left behind need not be text.
    for line in BufReader::new(file).split(b'\n') {
        let line = line.map_err(|e| Error::io("read", path, e))?;
        let value: Option<serde_json::Value> = serde_json::from_slice(&line).ok();
        let at = value.as_ref().and_then(|value| value["step"].as_u64());
        if at.is_some_and(|at| at <= step) {
            kept.extend_from_slice(&line);
            kept.push(b'\n');
        }
    }
    Ok(kept)
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
            metrics.commit(1, f64::from(run)).unwrap();
        }
        drop(Metrics::open(&dir, 0).unwrap());
        // The last one left no line, which is nothing to keep.
        drop(Metrics::open(&dir, 0).unwrap());
        let read = |name: &str| std::fs::read_to_string(dir.join(name)).ok();
        let names = ["", ".1", ".2", ".3", ".4"].map(|end| read(&format!("metrics.jsonl{end}")));
        std::fs::remove_dir_all(&dir).unwrap();
        let line = |seconds| Some(format!("{{\"step\":1,\"commit_seconds\":{seconds:?}}}\n"));
        let expected = [Some(String::new()), line(0.0), line(1.0), line(2.0), None];
        assert_eq!(names, expected);
    }
}
