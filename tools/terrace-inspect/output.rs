//! Printing that the commands share: text, JSON, tables, a progress bar, signals.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use terrace::config::{IoEngine, Size};
use terrace::error::{Error, Result};
use terrace::inspect::Reading;

/// Prints text; a closed pipe is an error that ends the tool quietly.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|e| Error::io("write", "standard output".as_ref(), e))
}

/// Prints JSON.
pub(crate) fn print_json(value: &Value) -> Result<()> {
    print(&format!("{value:#}\n"))
}

/// A line each.
pub(crate) fn lines(sentences: &[String]) -> String {
    sentences.iter().map(|s| format!("{s}\n")).collect()
}

/// Columns of equal width: the first `left` ones begin on the left, the others end on the right.
pub(crate) fn table(rows: &[Vec<String>], left: usize) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(column, (cell, width))| match column < left {
                true => format!("{cell:<width$}"),
                false => format!("{cell:>width$}"),
            });
        let line = cells.collect::<Vec<_>>().join("  ");
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// A number with five digits that count.
pub(crate) fn short(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 || !value.is_finite() {
        return format!("{value}");
    }
    match size {
        1e-3..1e5 => {
            let digits = (4 - size.log10().floor() as i32).max(0) as usize;
            format!("{value:.digits$}")
        }
        _ => format!("{value:.4e}"),
    }
}

/// A path as text.
pub(crate) fn path_text(path: &Path) -> String {
    path.display().to_string()
}

/// Name of an engine, as `--io-engine` takes it.
pub(crate) fn engine_name(engine: IoEngine) -> &'static str {
    match engine {
        IoEngine::Uring => "io_uring",
        IoEngine::Pread => "pread",
    }
}

/// How to read.
#[derive(clap::Args)]
pub(crate) struct ReadingArguments {
    /// io_uring or pread; default: io_uring where it works
    #[arg(long, value_name = "ENGINE")]
    io_engine: Option<String>,
    /// Most bytes a second: 200MB
    #[arg(long, value_name = "SIZE")]
    rate: Option<String>,
}

impl ReadingArguments {
    pub(crate) fn reading(&self) -> Result<Reading> {
        let wrong = |place: &str, expected: &str, got: &str| {
            Error::input("arguments", place, expected, got, "correct it")
        };
        let engine = match self.io_engine.as_deref() {
            None => None,
            Some("io_uring") => Some(IoEngine::Uring),
            Some("pread") => Some(IoEngine::Pread),
            Some(other) => return Err(wrong("--io-engine", "io_uring or pread", other)),
        };
        let rate = match &self.rate {
            None => None,
            Some(text) => match Size::parse(text.trim_end_matches("/s"), "--rate")? {
                Size::Bytes(bytes) => Some(bytes.max(1)),
                Size::Auto => return Err(wrong("--rate", "a size with a unit", text)),
            },
        };
        Ok(Reading { engine, rate })
    }
}

/// The signal that asked for an end, if one did.
pub(crate) struct Signals {
    caught: Arc<AtomicUsize>,
}

impl Signals {
    /// Catches SIGINT and SIGTERM; a second one ends the process at once.
    pub(crate) fn catch() -> Signals {
        let caught = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM] {
            let again = Arc::new(AtomicBool::new(false));
            let code = 128 + signal;
            signal_hook::flag::register_conditional_shutdown(signal, code, again.clone()).ok();
            signal_hook::flag::register(signal, again).ok();
            signal_hook::flag::register_usize(signal, caught.clone(), signal as usize).ok();
        }
        Signals { caught }
    }

    pub(crate) fn caught(&self) -> Option<u8> {
        match self.caught.load(Ordering::Relaxed) {
            0 => None,
            signal => Some(signal as u8),
        }
    }
}

/// A bar on a terminal, nothing elsewhere.
pub(crate) struct Bar(Option<ProgressBar>);

impl Bar {
    pub(crate) fn new(shown: bool) -> Bar {
        if !shown || !std::io::stderr().is_terminal() {
            return Bar(None);
        }
        let style = "{bar:30} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, \
                     {eta} left";
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        Bar(Some(bar))
    }

    pub(crate) fn set(&self, done: u64, total: u64) {
        if let Some(bar) = &self.0 {
            bar.set_length(total);
            bar.set_position(done);
        }
    }

    pub(crate) fn clear(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

pub(crate) fn ignore_file_size_signal() {
    signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))).ok();
}
