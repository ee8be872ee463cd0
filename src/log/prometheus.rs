//! Numbers of a run for Prometheus, in its text format, at a loopback address.
//!
//! - One thread answers, one client at a time, each within [`CLIENT_TIME`] and with a request of at
//!   most [`REQUEST_BYTES_MAX`]: a client can keep others from their answer for that long, and
//!   nothing else.
//! - It reads counters and the last lines; no lane and no step waits for it.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::line::Line;
use crate::stats::{HOP_NAMES, Snapshot, WAIT_NAMES};
use crate::step::Watch;

/// Most time that a client may take, from its first byte to the last of the answer.
pub const CLIENT_TIME: Duration = Duration::from_secs(2);
/// Most bytes of a request's head.
pub const REQUEST_BYTES_MAX: usize = 8 << 10;

/// What Prometheus is told.
#[derive(Clone, Debug, Default)]
pub struct Numbers {
    /// Labels of the run: name and value.
    pub labels: Vec<(&'static str, String)>,
    /// When the process began to train, in seconds since 1970.
    pub started_at: f64,
    /// Steps done.
    pub steps: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// FLOPs executed a step.
    pub step_flops: f64,
    /// The last step's line.
    pub last: Line,
    /// Of the last evaluation.
    pub eval_loss: Option<f64>,
    /// Tokens of this process's steps.
    pub tokens: u64,
    /// Seconds of this process's steps.
    pub seconds: f64,
    /// Commits of this process.
    pub commits: u64,
    /// The last commit's line.
    pub commit: Line,
    /// Name, planned bytes and budget of each tier.
    pub tiers: Vec<(&'static str, u64, u64)>,
    /// Resident memory of the process.
    pub resident_bytes: u64,
}

/// Text under construction.
struct Exposition(String);

impl Exposition {
    fn metric(&mut self, name: &str, kind: &str, help: &str, samples: &[(String, f64)]) {
        if samples.is_empty() {
            return;
        }
        let name = format!("terrace_{name}");
        write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n").ok();
        for (labels, value) in samples {
            writeln!(self.0, "{name}{labels} {}", number(*value)).ok();
        }
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.metric(name, "gauge", help, &[(String::new(), value)]);
    }

    fn counter(&mut self, name: &str, help: &str, value: f64) {
        self.metric(name, "counter", help, &[(String::new(), value)]);
    }
}

/// As the format writes numbers.
fn number(value: f64) -> String {
    match value {
        value if value.is_nan() => "NaN".to_string(),
        value if value.is_infinite() && value > 0.0 => "+Inf".to_string(),
        value if value.is_infinite() => "-Inf".to_string(),
        value => format!("{value}"),
    }
}

fn label(name: &str, value: &str) -> String {
    let value = value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

impl Numbers {
    /// Takes a line's numbers.
    pub fn take(&mut self, line: &Line) {
        if let Some(seconds) = line.step_seconds {
            self.steps = line.step.unwrap_or(self.steps);
            self.tokens += line.tokens;
            self.seconds += seconds;
            self.last = line.clone();
        }
        if let Some(loss) = line.eval_loss {
            self.eval_loss = Some(loss);
        }
        if line.commit_seconds.is_some() {
            self.commits += 1;
            self.commit = line.clone();
        }
    }

    /// The whole answer.
    pub fn text(&self, moved: &Snapshot) -> String {
        let mut text = Exposition(String::new());
        let labels: Vec<String> = self.labels.iter().map(|(n, v)| label(n, v)).collect();
        let labels = format!("{{{}}}", labels.join(","));
        text.metric("run_info", "gauge", "What runs.", &[(labels, 1.0)]);
        let started = "When the process began to train, since 1970.";
        text.gauge("start_time_seconds", started, self.started_at);
        text.gauge("step", "Steps done.", self.steps as f64);
        text.gauge(
            "steps_planned",
            "Steps of the whole run.",
            self.total_steps as f64,
        );
        self.last_step(&mut text);
        let tokens = "Tokens trained on by this process.";
        text.counter("tokens_total", tokens, self.tokens as f64);
        let seconds = "Seconds of the steps of this process.";
        text.counter("step_seconds_total", seconds, self.seconds);
        let by = |name: &str, names: &[&str], values: &[f64]| -> Vec<(String, f64)> {
            let labels = names
                .iter()
                .map(|value| format!("{{{}}}", label(name, value)));
            labels.zip(values.iter().copied()).collect()
        };
        let hops = by("hop", &HOP_NAMES, &moved.bytes.map(|bytes| bytes as f64));
        text.metric("hop_bytes_total", "counter", "Bytes over each hop.", &hops);
        let stalls = by("cause", &WAIT_NAMES, &moved.waits);
        let help = "Seconds that a lane stood still.";
        text.metric("stall_seconds_total", "counter", help, &stalls);
        let update = "Seconds of AdamW, waiting for a core included.";
        text.counter("update_seconds_total", update, moved.update_seconds);
        self.commits(&mut text);
        let names: Vec<&str> = self.tiers.iter().map(|tier| tier.0).collect();
        let planned: Vec<f64> = self.tiers.iter().map(|tier| tier.1 as f64).collect();
        let budgets: Vec<f64> = self.tiers.iter().map(|tier| tier.2 as f64).collect();
        let planned = by("tier", &names, &planned);
        text.metric(
            "tier_planned_bytes",
            "gauge",
            "Planned of each tier.",
            &planned,
        );
        let budgets = by("tier", &names, &budgets);
        text.metric(
            "tier_budget_bytes",
            "gauge",
            "Allowed of each tier.",
            &budgets,
        );
        let resident = "Resident memory of the process.";
        text.gauge(
            "resident_memory_bytes",
            resident,
            self.resident_bytes as f64,
        );
        text.0
    }

    fn last_step(&self, text: &mut Exposition) {
        let last = &self.last;
        if let Some(loss) = last.loss {
            text.gauge("loss_nats", "Mean loss of the last step.", loss);
        }
        if let Some(loss) = self.eval_loss {
            text.gauge("eval_loss_nats", "Of the last evaluation.", loss);
        }
        if let Some(norm) = last.grad_norm {
            text.gauge("gradient_norm", "Before clipping, in the last step.", norm);
        }
        if let Some(rate) = last.learning_rate {
            text.gauge("learning_rate", "Of the last step.", rate);
        }
        if let Some(seconds) = last.step_seconds.filter(|seconds| *seconds > 0.0) {
            text.gauge("step_seconds", "Of the last step.", seconds);
            let rate = last.tokens as f64 / seconds;
            text.gauge("tokens_per_second", "In the last step.", rate);
            let flops = self.step_flops / seconds;
            text.gauge("flops_per_second", "Executed, in the last step.", flops);
            let written = "Bytes written to drives by the run, all its processes together.";
            let total = last.written_bytes.total as f64;
            text.counter("drive_written_bytes_total", written, total);
        }
        if let Some(life) = last.drive_life {
            text.gauge(
                "drive_life_ratio",
                "Of the rated life, used by the run.",
                life,
            );
        }
    }

    fn commits(&self, text: &mut Exposition) {
        text.counter(
            "commits_total",
            "Commits of this process.",
            self.commits as f64,
        );
        if let (Some(step), Some(seconds)) = (self.commit.step, self.commit.commit_seconds) {
            text.gauge("last_commit_step", "Step of the last commit.", step as f64);
            text.gauge("last_commit_seconds", "What it took.", seconds);
            let stall = self.commit.commit_stall_seconds;
            text.gauge(
                "last_commit_stall_seconds",
                "What updates waited for it.",
                stall,
            );
            let bytes = self.commit.commit_bytes as f64;
            text.gauge("last_commit_bytes", "What it wrote.", bytes);
        }
    }
}

/// The endpoint; it closes when dropped.
pub struct Endpoint {
    address: SocketAddr,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Endpoint {
    /// Listens at `address`; port 0 is any that is free.
    pub fn open(
        address: SocketAddr,
        numbers: Arc<Mutex<Numbers>>,
        watch: Watch,
    ) -> std::io::Result<Endpoint> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let ended = Arc::new(AtomicBool::new(false));
        let seen = ended.clone();
        let thread = std::thread::Builder::new()
            .name("terrace-numbers".to_string())
            .spawn(move || {
                for client in listener.incoming() {
                    if seen.load(Ordering::Relaxed) {
                        break;
                    }
                    match client {
                        // A client that goes away or is too slow has itself to blame.
                        Ok(client) => drop(answer(client, &numbers, &watch)),
                        // Out of file descriptors: not as fast as the loop can turn.
                        Err(_) => std::thread::sleep(Duration::from_millis(100)),
                    }
                }
            })?;
        Ok(Endpoint {
            address,
            ended,
            thread: Some(thread),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        // Wakes the thread; where that fails it stays asleep until the process ends.
        let woken = TcpStream::connect_timeout(&self.address, CLIENT_TIME).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            thread.join().ok();
        }
    }
}

fn answer(mut client: TcpStream, numbers: &Mutex<Numbers>, watch: &Watch) -> std::io::Result<()> {
    let until = Instant::now() + CLIENT_TIME;
    let left = || {
        let left = until.saturating_duration_since(Instant::now());
        // A timeout of nothing is refused by the system.
        left.max(Duration::from_millis(1))
    };
    let mut head = [0; REQUEST_BYTES_MAX];
    let mut length = 0;
    let ended = |head: &[u8]| head.windows(4).any(|end| end == b"\r\n\r\n");
    while !ended(&head[..length]) && length < head.len() && Instant::now() < until {
        client.set_read_timeout(Some(left()))?;
        match client.read(&mut head[length..])? {
            0 => break,
            read => length += read,
        }
    }
    let whole = ended(&head[..length]);
    let line = head[..length].split(|byte| *byte == b'\r').next();
    let line = String::from_utf8_lossy(line.unwrap_or_default()).into_owned();
    let mut words = line.split(' ');
    let (method, target) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    let path = target.split('?').next().unwrap_or("");
    let (status, body) = match (whole, method, path) {
        (false, ..) => ("400 Bad Request", "not a request\n".to_string()),
        (true, "GET" | "HEAD", "/metrics") => {
            let numbers = locked(numbers).clone();
            ("200 OK", numbers.text(&watch.snapshot()))
        }
        (true, "GET" | "HEAD", _) => ("404 Not Found", "see /metrics\n".to_string()),
        _ => ("405 Method Not Allowed", "GET or HEAD\n".to_string()),
    };
    let mut reply = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    if method != "HEAD" {
        reply.push_str(&body);
    }
    let mut rest = reply.as_bytes();
    while !rest.is_empty() && Instant::now() < until {
        client.set_write_timeout(Some(left()))?;
        let sent = client.write(rest)?;
        rest = &rest[sent..];
    }
    client.shutdown(Shutdown::Write)
}

/// The numbers, whoever panicked with them.
pub(super) fn locked(numbers: &Mutex<Numbers>) -> MutexGuard<'_, Numbers> {
    numbers.lock().unwrap_or_else(PoisonError::into_inner)
}
