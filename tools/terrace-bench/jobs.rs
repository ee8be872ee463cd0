//! Jobs in fio's words.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use terrace::error::{Error, Result};
use terrace::measure::job_file::{self, GENERAL, Request};
use terrace::measure::load::{self, Live};
use terrace::measure::words::WORDS;
use terrace::measure::{charts, fio_json, fio_text};

/// Runs what a command line in fio's words asks for.
pub(crate) fn run(arguments: &[String]) -> Result<ExitCode> {
    let request = job_file::parse(arguments)?;
    let groups = load::groups(&request.jobs);
    let mut head = String::new();
    for (job, group) in request.jobs.iter().zip(groups) {
        head.push_str(&load::describe(job, group));
        head.push('\n');
    }
    if request.parse_only {
        crate::print(&head)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (stop, signal) = watch_signals()?;
    let live = Arc::new(Live::default());
    let outcomes = {
        let _progress = Progress::start(live.clone(), request.progress);
        load::run(&request.jobs, &stop, &live)?
    };
    let text = if request.json {
        format!("{:#}\n", fio_json::document(&outcomes))
    } else {
        head + &fio_text::report(&outcomes)
    };
    write_out(&request, &text)?;
    if let Some(path) = &request.report {
        let page = charts::page(&outcomes);
        std::fs::write(path, page).map_err(|e| Error::io("write", path, e))?;
    }
    let mut failed = None;
    for outcome in outcomes {
        if let Some(error) = outcome.error {
            eprintln!("terrace-bench: job {}: {error}", outcome.job.name);
            failed.get_or_insert(error.exit_code());
        }
    }
    Ok(match (signal.load(Ordering::Relaxed), failed) {
        (0, code) => ExitCode::from(code.unwrap_or(0)),
        (signal, _) => ExitCode::from(u8::try_from(128 + signal).unwrap_or(1)),
    })
}

fn write_out(request: &Request, text: &str) -> Result<()> {
    match &request.output {
        None => crate::print(text),
        Some(path) => std::fs::write(path, text).map_err(|e| Error::io("write", path, e)),
    }
}

/// The first SIGINT, SIGTERM or SIGHUP ends the jobs, whose files are then removed; a second one
/// ends the process.
pub(crate) fn watch_signals() -> Result<(Arc<AtomicBool>, Arc<AtomicI32>)> {
    let stop = Arc::new(AtomicBool::new(false));
    let signal = Arc::new(AtomicI32::new(0));
    let watch = || -> std::io::Result<()> {
        for number in [SIGINT, SIGTERM, SIGHUP] {
            let code = 128 + number;
            signal_hook::flag::register_conditional_shutdown(number, code, stop.clone())?;
        }
        let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        let (stop, signal) = (stop.clone(), signal.clone());
        std::thread::Builder::new()
            .name("signals".to_string())
            .spawn(move || {
                for number in signals.forever() {
                    signal.store(number, Ordering::Relaxed);
                    stop.store(true, Ordering::Relaxed);
                }
            })?;
        Ok(())
    };
    watch().map_err(|e| Error::io("watch signals", "process".as_ref(), e))?;
    Ok((stop, signal))
}

/// A line on a terminal while jobs run; nothing elsewhere.
struct Progress {
    ended: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Progress {
    fn start(live: Arc<Live>, wanted: Option<bool>) -> Progress {
        let ended = Arc::new(AtomicBool::new(false));
        let seen = ended.clone();
        let shown = wanted.unwrap_or_else(|| std::io::stderr().is_terminal());
        let thread = shown.then(|| std::thread::spawn(move || show(&live, &seen)));
        Progress { ended, thread }
    }
}

fn show(live: &Live, ended: &AtomicBool) {
    let mut before = [0u64; 2];
    let mut last = Instant::now();
    while !ended.load(Ordering::Relaxed) {
        std::thread::park_timeout(Duration::from_millis(500));
        let seconds = last.elapsed().as_secs_f64().max(1e-3);
        last = Instant::now();
        let rates = [0, 1].map(|side: usize| {
            let bytes = live.bytes[side].load(Ordering::Relaxed);
            let rate = (bytes - before[side]) as f64 / seconds / f64::from(1 << 20);
            before[side] = bytes;
            rate
        });
        let phase = live
            .phase
            .lock()
            .map(|phase| phase.clone())
            .unwrap_or_default();
        eprint!(
            "\r\x1b[K{phase}: r={:.0} MiB/s w={:.0} MiB/s",
            rates[0], rates[1]
        );
        std::io::stderr().flush().ok();
    }
    eprint!("\r\x1b[K");
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            thread.join().ok();
        }
    }
}

/// The options, for `--help`.
pub(crate) fn help() -> String {
    let mut text = String::from(
        "Jobs, in fio's words:\n  \
         terrace-bench --name=disk --filename=/nvme/bench --rw=read --bs=4m --size=4g\n  \
         terrace-bench disk.fio          [global] and [job] sections of key = value\n\n\
         Sizes take k, m, g, t (powers of 1024, with or without i and b), times us, ms, s, m, h,\n\
         d. A file that terrace-bench did not make is read and never written; what it makes is\n\
         removed.\n\nOptions of a job:\n",
    );
    let mut row = |name: &str, value: &str, meaning: &str| {
        let equals = if value.is_empty() { "" } else { "=" };
        let left = format!("--{name}{equals}{value}");
        if left.len() < 29 {
            text.push_str(&format!("  {left:<29} {meaning}\n"));
        } else {
            text.push_str(&format!("  {left}\n  {:<29} {meaning}\n", ""));
        }
    };
    for word in WORDS {
        let name = std::iter::once(word.name).chain(word.also.iter().copied());
        row(
            &name.collect::<Vec<_>>().join(", --"),
            word.value,
            word.meaning,
        );
    }
    text.push_str("\nOptions of the whole:\n");
    let mut row = |name: &str, value: &str, meaning: &str| {
        let equals = if value.is_empty() { "" } else { "=" };
        let left = format!("--{name}{equals}{value}");
        text.push_str(&format!("  {left:<29} {meaning}\n"));
    };
    for (name, value, meaning) in GENERAL {
        row(name, value, meaning);
    }
    text
}
