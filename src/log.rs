//! What a run shows of itself, and how it is read again.
//!
//! - A run's lines of metrics.jsonl are handed to a thread of its own ([`Log`]), which writes event
//!   files for TensorBoard and status.json; another answers Prometheus. Neither a lane nor a step
//!   waits for them: what does not fit the queue is left out.
//! - What cannot be written is said once, and the run goes on.
//! - [`history`] reads what a run wrote, while it runs and after; [`page`] makes the report of it.
//!
//! Not here: metrics.jsonl itself and samples.jsonl, which are `train`'s.

pub mod events;
pub mod history;
pub mod line;
pub mod page;
pub mod plots;
pub mod prometheus;
pub mod status;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError};
use serde::Deserialize;
use serde_json::Value;

use crate::error::Result;
use crate::stats::{HOP_NAMES, WAIT_NAMES};
use crate::step::Watch;
use events::EventFile;
use line::Line;
use prometheus::{Endpoint, Numbers, locked};
use status::{State, Status};

/// Directory of event files, under that of the run.
pub const TENSORBOARD: &str = "tensorboard";

/// From one status to the next.
const TICK: Duration = Duration::from_millis(400);
/// Lines that wait for the thread; more are left out.
const LINES_MAX: usize = 1024;
/// Longest wait for the thread when a run ends: a file system that hangs must not keep it.
const END_MAX: Duration = Duration::from_secs(5);

/// What is shown, and where.
pub struct Settings {
    /// The run's directory.
    pub dir: PathBuf,
    /// Whether event files are written.
    pub tensorboard: bool,
    /// Where Prometheus may ask.
    pub prometheus: Option<SocketAddr>,
    /// run.json, but for the times of its starts; its `config` is the run.toml.
    pub about: Value,
    /// What Prometheus is told before the first step.
    pub numbers: Numbers,
}

enum Note {
    Line(Box<Line>),
    End(State, Option<String>),
}

/// The sentence of the first failure, until it is asked for.
type Warning = Arc<Mutex<Option<String>>>;

/// What a run shows, while it runs.
pub struct Log {
    notes: Sender<Note>,
    done: Receiver<()>,
    warning: Warning,
    behind: bool,
    ending: (State, Option<String>),
    endpoint: Option<Endpoint>,
}

impl Log {
    /// Writes run.json and begins. Also sentences for a person: addresses, and what could not be
    /// begun, without which the run goes on.
    pub fn start(settings: Settings, watch: Watch) -> Result<(Log, Vec<String>)> {
        let Settings {
            dir,
            tensorboard,
            prometheus,
            about,
            mut numbers,
        } = settings;
        let mut sentences = Vec::new();
        numbers.started_at = status::now();
        let steps_done = numbers.steps;
        let config = about["config"].as_str().unwrap_or_default().to_string();
        if let Err(error) = status::write_run(&dir, about, steps_done) {
            let path = dir.join(status::RUN);
            sentences.push(goes_on(&path.display().to_string(), &error));
        }
        let directory = dir.join(TENSORBOARD);
        let events = tensorboard.then(|| event_file(&directory, steps_done, &config));
        let events = events.and_then(|opened| {
            let failed = |error| goes_on(&directory.display().to_string(), &error);
            opened.map_err(|error| sentences.push(failed(error))).ok()
        });
        let status = Status {
            pid: std::process::id(),
            started_at: numbers.started_at,
            step: steps_done,
            total_steps: numbers.total_steps,
            ..Status::default()
        };
        let numbers = Arc::new(Mutex::new(numbers));
        let mut endpoint = None;
        if let Some(address) = prometheus {
            let opened = Endpoint::open(address, numbers.clone(), watch.clone());
            sentences.push(match &opened {
                Ok(endpoint) => format!("prometheus: http://{}/metrics", endpoint.address()),
                Err(error) => goes_on(&format!("log.prometheus {address}"), error),
            });
            endpoint = opened.ok();
        }
        let warning = Warning::default();
        let shown = Shown {
            dir,
            events,
            status,
            numbers,
            watch,
            seen: [false; HOP_NAMES.len() + WAIT_NAMES.len()],
            warning: warning.clone(),
            failed: [false; 2],
        };
        let (notes, received) = crossbeam_channel::bounded(LINES_MAX);
        let (ended, done) = crossbeam_channel::bounded(1);
        std::thread::Builder::new()
            .name("terrace-log".to_string())
            .spawn(move || {
                shown.run(&received);
                ended.send(()).ok();
            })
            .map_err(|source| crate::Error::io("start a thread", "log".as_ref(), source))?;
        let log = Log {
            notes,
            done,
            warning,
            behind: false,
            ending: (State::Failed, None),
            endpoint,
        };
        Ok((log, sentences))
    }

    /// Shows a line of metrics.jsonl or samples.jsonl.
    pub fn tell(&mut self, line: &Value) {
        let Ok(line) = Line::deserialize(line) else {
            return;
        };
        let full = self.notes.try_send(Note::Line(Box::new(line)));
        if matches!(full, Err(TrySendError::Full(_))) && !self.behind {
            self.behind = true;
            let mut warning = self.warning.lock().unwrap_or_else(PoisonError::into_inner);
            warning.get_or_insert_with(|| {
                "warning: the disk of log.dir is too slow for event files; steps are missing in \
                 them, the run goes on"
                    .to_string()
            });
        }
    }

    /// The first sentence about what could not be shown, once.
    pub fn take_warning(&mut self) -> Option<String> {
        let mut warning = self.warning.lock().unwrap_or_else(PoisonError::into_inner);
        warning.take()
    }

    /// How the run ends, which is shown when this is dropped; without it, it has failed.
    pub fn ends(&mut self, state: State, failure: Option<String>) {
        self.ending = (state, failure);
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let (state, failure) = self.ending.clone();
        let note = Note::End(state, failure);
        let told = self.notes.send_timeout(note, END_MAX).is_ok();
        if told {
            self.done.recv_timeout(END_MAX).ok();
        }
        self.endpoint.take();
    }
}

/// A process's event file, which begins with its run.toml.
fn event_file(
    directory: &std::path::Path,
    steps_done: u64,
    config: &str,
) -> std::io::Result<EventFile> {
    let mut events = EventFile::create(directory, steps_done + 1)?;
    events.text(steps_done, "config", &format!("```toml\n{config}```"))?;
    Ok(events)
}

fn goes_on(what: &str, error: &std::io::Error) -> String {
    format!("warning: {what}: {error}; the run goes on without it")
}

/// The thread's own.
struct Shown {
    dir: PathBuf,
    events: Option<EventFile>,
    status: Status,
    numbers: Arc<Mutex<Numbers>>,
    watch: Watch,
    /// Hops and stalls that have had a number other than 0: the others are not drawn.
    seen: [bool; HOP_NAMES.len() + WAIT_NAMES.len()],
    warning: Warning,
    /// Of event files and of the status: each is said once.
    failed: [bool; 2],
}

impl Shown {
    fn run(mut self, notes: &Receiver<Note>) {
        let mut next = Instant::now();
        loop {
            match notes.recv_deadline(next) {
                Ok(Note::Line(line)) => self.line(&line),
                Ok(Note::End(state, failure)) => {
                    self.status.state = state;
                    self.status.failure = failure;
                    return self.tick();
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if Instant::now() >= next {
                self.tick();
                next = Instant::now() + TICK;
            }
        }
    }

    fn tick(&mut self) {
        self.status.look(&self.watch);
        locked(&self.numbers).resident_bytes = self.status.resident_bytes;
        if let Err(error) = self.status.write(&self.dir) {
            self.fails(
                1,
                &self.dir.join(status::STATUS).display().to_string(),
                &error,
            );
        }
    }

    fn line(&mut self, line: &Line) {
        if line.step_seconds.is_some() {
            self.status.step = line.step.unwrap_or(self.status.step);
        }
        let flops = {
            let mut numbers = locked(&self.numbers);
            numbers.take(line);
            numbers.step_flops
        };
        let scalars = self.scalars(line, flops);
        let step = line.step.unwrap_or(0);
        let Some(events) = &mut self.events else {
            return;
        };
        let mut result = Ok(());
        if !scalars.is_empty() {
            result = events.scalars(step, &scalars);
        }
        if let (Some(prompt), Some(sample)) = (&line.prompt, &line.sample) {
            // Indented by four, Markdown leaves a text as it is.
            let quoted = format!("{prompt}⟶{sample}").replace(['\n', '\r'], "\n    ");
            result = result.and(events.text(step, "samples", &format!("    {quoted}")));
        }
        if let Err(error) = result {
            let path = events.path().display().to_string();
            self.fails(0, &path, &error);
        }
    }

    fn fails(&mut self, which: usize, path: &str, error: &std::io::Error) {
        if !std::mem::replace(&mut self.failed[which], true) {
            let sentence = format!("warning: {path}: {error}; the run goes on");
            let mut warning = self.warning.lock().unwrap_or_else(PoisonError::into_inner);
            warning.get_or_insert(sentence);
        }
    }

    /// Numbers of a line, by tag; names are those that the field uses.
    fn scalars(&mut self, line: &Line, flops: f64) -> Vec<(String, f64)> {
        let mut scalars = Vec::new();
        let mut add = |tag: &str, value: f64| scalars.push((tag.to_string(), value));
        for (tag, value) in [
            ("train/loss", line.loss),
            ("train/grad_norm", line.grad_norm),
            ("train/learning_rate", line.learning_rate),
            ("eval/loss", line.eval_loss),
            ("eval/perplexity", line.eval_loss.map(f64::exp)),
            ("commit/seconds", line.commit_seconds),
        ] {
            if let Some(value) = value {
                add(tag, value);
            }
        }
        if line.commit_seconds.is_some() {
            add("commit/stall_seconds", line.commit_stall_seconds);
        }
        let Some(seconds) = line.step_seconds.filter(|seconds| *seconds > 0.0) else {
            return scalars;
        };
        add("speed/step_seconds", seconds);
        add("speed/tokens_per_second", line.tokens as f64 / seconds);
        add("speed/tflops", flops / seconds / 1e12);
        let rates = line.hop_bytes().map(|bytes| bytes as f64 / seconds);
        let named = HOP_NAMES.map(|name| format!("hops/{name}_bytes_per_second"));
        let stalls = WAIT_NAMES.map(|name| format!("stalls/{name}_seconds"));
        let named = named.iter().zip(rates);
        let all = named.chain(stalls.iter().zip(line.stalls()));
        for ((name, value), seen) in all.zip(&mut self.seen) {
            *seen |= value > 0.0;
            if *seen {
                add(name, value);
            }
        }
        scalars
    }
}
