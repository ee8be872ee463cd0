//! What a run wrote of itself, read while it runs or after: lines of metrics.jsonl and
//! samples.jsonl, run.json and status.json.
//!
//! - [`History::update`] reads what was added since; a file that was replaced is read anew.
//! - A step that is told twice was done twice: the later line counts, with all that follows it.
//! - Memory is bounded: beyond [`ROWS_MAX`] rows neighbours are joined. A line without end is
//!   passed over.
//! - Half a last line is left for later; lines that are no lines are counted.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::line::Line;
use super::status::{self, Status};
use crate::error::{Error, Result};
use crate::stats::WAIT_NAMES;

/// Most rows of steps; as many as twice the points that any chart has.
pub const ROWS_MAX: usize = 1 << 15;
/// Most evaluations, commits and samples that are kept, the last ones.
const OTHERS_MAX: usize = 4096;
/// Most bytes of a line.
const LINE_BYTES_MAX: usize = 1 << 20;

/// Numbers of several steps: their finite ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    sum: f64,
    count: u32,
    /// The least, infinite without any.
    pub least: f64,
    /// The greatest, infinite without any.
    pub most: f64,
}

impl Spread {
    fn of(value: Option<f64>) -> Spread {
        match value.filter(|value| value.is_finite()) {
            Some(value) => Spread {
                sum: value,
                count: 1,
                least: value,
                most: value,
            },
            None => Spread {
                sum: 0.0,
                count: 0,
                least: f64::INFINITY,
                most: f64::NEG_INFINITY,
            },
        }
    }

    fn join(self, other: Spread) -> Spread {
        Spread {
            sum: self.sum + other.sum,
            count: self.count + other.count,
            least: self.least.min(other.least),
            most: self.most.max(other.most),
        }
    }

    /// The least and the greatest.
    pub fn ends(&self) -> (f64, f64) {
        (self.least, self.most)
    }

    /// NaN without any.
    pub fn mean(&self) -> f64 {
        self.sum / f64::from(self.count)
    }
}

/// A step, or several in a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    /// The last of them.
    pub step: u64,
    /// How many.
    pub count: u64,
    /// Nats.
    pub loss: Spread,
    /// Before clipping.
    pub grad_norm: Spread,
    /// Rate.
    pub learning_rate: Spread,
    /// Of all.
    pub tokens: u64,
    /// Of all.
    pub seconds: f64,
    /// By hop, of all.
    pub bytes: [u64; 4],
    /// Busy by hop, of all.
    pub busy: [f64; 4],
    /// By cause, of all.
    pub stalls: [f64; WAIT_NAMES.len()],
    /// AdamW's, of all.
    pub update_seconds: f64,
    /// Those in which its threads had a processor, of all.
    pub update_core_seconds: f64,
    /// Disks of the scratch store busy either way, of all.
    pub store_seconds: f64,
    /// Bytes to drives: spilled extents, commits.
    pub written: [u64; 2],
}

impl Row {
    fn of(line: &Line, step: u64, seconds: f64) -> Row {
        let [.., read, write] = line.busy_seconds();
        Row {
            step,
            count: 1,
            loss: Spread::of(line.loss),
            grad_norm: Spread::of(line.grad_norm),
            learning_rate: Spread::of(line.learning_rate),
            tokens: line.tokens,
            seconds,
            bytes: line.hop_bytes(),
            busy: line.busy_seconds(),
            stalls: line.stalls(),
            update_seconds: line.update_seconds,
            // Older runs tell less.
            update_core_seconds: line.update_core_seconds.unwrap_or(line.update_seconds),
            store_seconds: line.store_seconds.unwrap_or(read.max(write)),
            written: [line.written_bytes.store, line.written_bytes.checkpoint],
        }
    }

    /// Both, `later` after this.
    pub fn join(mut self, later: &Row) -> Row {
        self.step = later.step;
        self.count += later.count;
        self.loss = self.loss.join(later.loss);
        self.grad_norm = self.grad_norm.join(later.grad_norm);
        self.learning_rate = self.learning_rate.join(later.learning_rate);
        self.tokens = self.tokens.saturating_add(later.tokens);
        self.seconds += later.seconds;
        add(&mut self.bytes, &later.bytes, u64::saturating_add);
        add(&mut self.busy, &later.busy, |a, b| a + b);
        add(&mut self.stalls, &later.stalls, |a, b| a + b);
        self.update_seconds += later.update_seconds;
        self.update_core_seconds += later.update_core_seconds;
        self.store_seconds += later.store_seconds;
        add(&mut self.written, &later.written, u64::saturating_add);
        self
    }

    /// Tokens a second; NaN without time.
    pub fn tokens_per_second(&self) -> f64 {
        match self.seconds > 0.0 {
            true => self.tokens as f64 / self.seconds,
            false => f64::NAN,
        }
    }
}

fn add<T: Copy, const N: usize>(to: &mut [T; N], other: &[T; N], sum: impl Fn(T, T) -> T) {
    for (to, other) in to.iter_mut().zip(other) {
        *to = sum(*to, *other);
    }
}

/// A text that the model wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Steps done.
    pub step: u64,
    /// What it goes on from.
    pub prompt: String,
    /// What the model wrote.
    pub text: String,
}

/// A run's past.
pub struct History {
    dir: PathBuf,
    metrics: Tail,
    samples_file: Tail,
    /// run.json; null where it is not there.
    pub run: Value,
    /// status.json.
    pub status: Option<Status>,
    /// Steps, ascending.
    pub rows: Vec<Row>,
    /// Steps and losses of evaluations, ascending.
    pub evaluations: Vec<(u64, f64)>,
    /// Lines of the last commits.
    pub commits: Vec<Line>,
    /// All of them.
    pub commit_count: u64,
    /// The last ones.
    pub samples: Vec<Sample>,
    /// Bytes to drives that the last step tells, of the whole run.
    pub written_total: u64,
    /// Share of the drive's life that the last step tells.
    pub drive_life: Option<f64>,
    /// Lines that could not be read.
    pub unreadable: u64,
    /// Steps whose loss is no finite number.
    pub non_finite: u64,
    /// Steps that were told again, as after a resume.
    pub repeated: u64,
    /// Steps a row, where there are many.
    joined: u64,
}

impl History {
    /// The run in `dir`, read so far.
    ///
    /// # Errors
    /// [`Error::Input`] where nothing there is of a run, [`Error::Io`] where a file cannot be read.
    pub fn open(dir: &Path) -> Result<History> {
        let mut history = History {
            dir: dir.to_path_buf(),
            metrics: Tail::new(dir.join("metrics.jsonl")),
            samples_file: Tail::new(dir.join("samples.jsonl")),
            run: Value::Null,
            status: None,
            rows: Vec::new(),
            evaluations: Vec::new(),
            commits: Vec::new(),
            commit_count: 0,
            samples: Vec::new(),
            written_total: 0,
            drive_life: None,
            unreadable: 0,
            non_finite: 0,
            repeated: 0,
            joined: 1,
        };
        history.update()?;
        let nothing = history.metrics.id.is_none() && history.run.is_null();
        if nothing {
            let there = if dir.is_dir() {
                "neither"
            } else {
                "no directory"
            };
            return Err(Error::input(
                "run",
                dir.display().to_string(),
                "the directory of a run (log.dir), with metrics.jsonl or run.json",
                there,
                "name that directory",
            ));
        }
        Ok(history)
    }

    /// The run's directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Reads what was added.
    pub fn update(&mut self) -> Result<()> {
        self.status = Status::read(&self.dir);
        let run = status::read_run(&self.dir);
        if !run.is_null() {
            self.run = run;
        }
        let mut metrics = std::mem::take(&mut self.metrics);
        let read = metrics.read(self, History::restart, History::metrics_line);
        self.metrics = metrics;
        read?;
        let mut samples = std::mem::take(&mut self.samples_file);
        let restart = |history: &mut History| history.samples.clear();
        let read = samples.read(self, restart, History::sample_line);
        self.samples_file = samples;
        read
    }

    /// Forgets what metrics.jsonl told.
    fn restart(&mut self) {
        self.rows.clear();
        self.evaluations.clear();
        self.commits.clear();
        self.commit_count = 0;
        (self.written_total, self.drive_life) = (0, None);
        (self.unreadable, self.non_finite, self.repeated) = (0, 0, 0);
        self.joined = 1;
    }

    fn sample_line(&mut self, bytes: &[u8]) {
        let line = Line::read(bytes).unwrap_or_default();
        if let (Some(step), Some(text)) = (line.step, line.sample) {
            let prompt = line.prompt.unwrap_or_default();
            self.samples.push(Sample { step, prompt, text });
            trim(&mut self.samples);
        }
    }

    fn metrics_line(&mut self, bytes: &[u8]) {
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return;
        }
        let Some(line) = Line::read(bytes) else {
            self.unreadable += 1;
            return;
        };
        let step = line.step.unwrap_or(0);
        if let Some(seconds) = line.step_seconds {
            self.step_line(&line, step, seconds);
        }
        if let Some(loss) = line.eval_loss {
            self.evaluations.retain(|(at, _)| *at < step);
            self.evaluations.push((step, loss));
            trim(&mut self.evaluations);
        }
        if line.commit_seconds.is_some() {
            self.commit_count += 1;
            self.commits.push(line.clone());
            trim(&mut self.commits);
        }
        if line.sample.is_some() {
            self.sample_line(bytes);
        }
    }

    fn step_line(&mut self, line: &Line, step: u64, seconds: f64) {
        if self.rows.last().is_some_and(|last| last.step >= step) {
            self.repeated += self.rows.last().map_or(0, |last| last.step) + 1 - step;
            self.rows.retain(|row| row.step < step);
            self.evaluations.retain(|(at, _)| *at < step);
        }
        let row = Row::of(line, step, seconds.max(0.0));
        if line.loss.is_some_and(|loss| !loss.is_finite()) {
            self.non_finite += 1;
        }
        self.written_total = line.written_bytes.total;
        self.drive_life = line.drive_life.or(self.drive_life);
        match self.rows.last_mut() {
            Some(last) if last.count < self.joined => *last = last.join(&row),
            _ => self.rows.push(row),
        }
        if self.rows.len() > ROWS_MAX {
            let pairs = self.rows.chunks(2);
            let joined = pairs.map(|pair| pair.get(1).map_or(pair[0], |b| pair[0].join(b)));
            self.rows = joined.collect();
            self.joined *= 2;
        }
    }

    /// Steps of which lines were read, joined; `None` without any.
    pub fn total(&self) -> Option<Row> {
        let (first, rest) = self.rows.split_first()?;
        Some(rest.iter().fold(*first, |sum, row| sum.join(row)))
    }

    /// Step and loss of the least evaluation.
    pub fn best_evaluation(&self) -> Option<(u64, f64)> {
        let finite = self.evaluations.iter().filter(|(_, loss)| loss.is_finite());
        finite.copied().min_by(|a, b| a.1.total_cmp(&b.1))
    }
}

/// Lets go of the first ones.
fn trim<T>(list: &mut Vec<T>) {
    if list.len() > OTHERS_MAX {
        list.drain(..OTHERS_MAX / 2);
    }
}

/// A file of lines that grows.
#[derive(Default)]
struct Tail {
    path: PathBuf,
    /// Device and inode.
    id: Option<(u64, u64)>,
    offset: u64,
    partial: Vec<u8>,
    /// The line under way is longer than lines may be.
    passing: bool,
}

impl Tail {
    fn new(path: PathBuf) -> Tail {
        Tail {
            path,
            ..Tail::default()
        }
    }

    /// Gives every whole line that was added to `take`; first, if the file is another than before
    /// or shorter, calls `restart`. A file that is not there has no lines.
    fn read<T>(
        &mut self,
        to: &mut T,
        restart: impl Fn(&mut T),
        take: impl Fn(&mut T, &[u8]),
    ) -> Result<()> {
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(Error::io("open", &self.path, error)),
        };
        let failed = |error| Error::io("read", &self.path, error);
        let found = file.metadata().map_err(failed)?;
        let id = Some((found.dev(), found.ino()));
        if self.id != id || found.len() < self.offset {
            restart(to);
            *self = Tail {
                id,
                ..Tail::new(std::mem::take(&mut self.path))
            };
        }
        let failed = |error| Error::io("read", &self.path, error);
        file.seek(SeekFrom::Start(self.offset)).map_err(failed)?;
        let mut chunk = vec![0; 256 << 10];
        loop {
            let read = file.read(&mut chunk);
            let read = read.map_err(|error| Error::io("read", &self.path, error))?;
            if read == 0 {
                return Ok(());
            }
            self.offset += read as u64;
            let mut rest = &chunk[..read];
            while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                self.extend(&rest[..end]);
                if !self.passing {
                    take(to, &self.partial);
                }
                self.partial.clear();
                self.passing = false;
                rest = &rest[end + 1..];
            }
            self.extend(rest);
        }
    }

    fn extend(&mut self, bytes: &[u8]) {
        if self.partial.len() + bytes.len() > LINE_BYTES_MAX {
            self.passing = true;
            self.partial.clear();
        }
        if !self.passing {
            self.partial.extend_from_slice(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn step(step: u64, loss: &str) -> String {
        format!("{{\"step\":{step},\"loss\":{loss},\"tokens\":10,\"step_seconds\":2.0}}\n")
    }

    #[test]
    fn lines_are_read_as_they_come() {
        let dir = tempfile::tempdir().unwrap();
        assert!(History::open(dir.path()).is_err());
        let path = dir.path().join("metrics.jsonl");
        std::fs::write(&path, step(1, "2.0") + "{\"step\":2,\"lo").unwrap();
        let mut history = History::open(dir.path()).unwrap();
        assert_eq!((history.rows.len(), history.unreadable), (1, 0));
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(b"ss\":null,\"step_seconds\":1}\n\xff\xfe\n")
            .unwrap();
        file.write_all(vec![b'x'; 3 * LINE_BYTES_MAX].as_slice())
            .unwrap();
        file.write_all(format!("\n{}", step(3, "1.0")).as_bytes())
            .unwrap();
        history.update().unwrap();
        let steps: Vec<u64> = history.rows.iter().map(|row| row.step).collect();
        assert_eq!(steps, [1, 2, 3]);
        assert_eq!((history.unreadable, history.non_finite), (1, 1));
        assert!(history.rows[1].loss.mean().is_nan());
        // Replaced by a resume.
        std::fs::write(dir.path().join("new"), step(1, "2.5")).unwrap();
        std::fs::rename(dir.path().join("new"), &path).unwrap();
        history.update().unwrap();
        assert_eq!(history.rows.len(), 1);
        assert_eq!(history.rows[0].loss.mean(), 2.5);
    }

    #[test]
    fn older_lines_tell_less() {
        let dir = tempfile::tempdir().unwrap();
        let old = "{\"step\":1,\"loss\":1.0,\"step_seconds\":2.0,\"update_seconds\":0.5,\
                   \"hop_seconds\":{\"store_read\":0.25,\"store_write\":0.75}";
        let new = old.replace("\"step\":1", "\"step\":2")
            + ",\"update_core_seconds\":0.125,\"store_seconds\":0.875";
        std::fs::write(
            dir.path().join("metrics.jsonl"),
            format!("{old}}}\n{new}}}\n"),
        )
        .unwrap();
        let rows = History::open(dir.path()).unwrap().rows;
        let of = |row: &Row| (row.update_core_seconds, row.store_seconds);
        assert_eq!((of(&rows[0]), of(&rows[1])), ((0.5, 0.75), (0.125, 0.875)));
    }

    #[test]
    fn a_step_that_is_told_twice_counts_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut text = String::new();
        for at in 1..=6 {
            text += &step(at, "3.0");
        }
        text += "{\"step\":6,\"eval_loss\":9.0}\n";
        for at in 4..=5 {
            text += &step(at, "1.0");
        }
        text += "{\"step\":5,\"eval_loss\":2.0}\n{\"step\":5,\"eval_loss\":2.5}\n";
        std::fs::write(dir.path().join("metrics.jsonl"), text).unwrap();
        let history = History::open(dir.path()).unwrap();
        let losses: Vec<f64> = history.rows.iter().map(|row| row.loss.mean()).collect();
        assert_eq!(losses, [3.0, 3.0, 3.0, 1.0, 1.0]);
        assert_eq!(history.evaluations, [(5, 2.5)]);
        assert_eq!(history.repeated, 3);
        assert_eq!(history.total().unwrap().tokens, 50);
    }

    #[test]
    fn many_steps_are_joined_and_nothing_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let count = 3 * ROWS_MAX as u64 + 7;
        let text: String = (1..=count).map(|at| step(at, "1.5")).collect();
        std::fs::write(dir.path().join("metrics.jsonl"), text).unwrap();
        let history = History::open(dir.path()).unwrap();
        assert!(history.rows.len() <= ROWS_MAX);
        let total = history.total().unwrap();
        assert_eq!((total.step, total.count), (count, count));
        assert_eq!(total.tokens, 10 * count);
        assert_eq!(total.loss.mean(), 1.5);
    }
}
