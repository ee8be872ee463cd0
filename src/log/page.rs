//! The report of a run: one page of what it was, what it did and what it took.
//!
//! What a run did not write is left out, so that there is a page of any run: of one killed before
//! its first step, of one of an older version, of one that goes on.

use std::path::{Path, PathBuf};

use super::history::History;
use super::plots::{charts, curves, duration_text, lanes, settled, stalls, tiers};
use super::status::State;
use crate::error::{Error, Result};
use crate::plan::{bytes_text, count_text};
use crate::report::chart::Unit;
use crate::report::page::{Page, Panel, Part, Table};
use crate::report::{date_text, svg_file};
use crate::stats::HOP_NAMES;

/// Name of the page in a run's directory.
pub const REPORT: &str = "report.html";
/// Most rows of a table of commits, starts or samples.
const SHOWN_MAX: usize = 12;
/// Seconds after which a status that says "running" is not believed.
const SILENT_SECONDS: f64 = 10.0;

/// Writes the page of the run in `dir` to `to`, or to report.html there; its place.
///
/// # Errors
/// As [`History::open`]; [`Error::Io`] where it cannot be written.
pub fn write(dir: &Path, to: Option<&Path>) -> Result<PathBuf> {
    let history = History::open(dir)?;
    let path = to.map_or_else(|| dir.join(REPORT), Path::to_path_buf);
    let staged = path.with_added_extension("new");
    let html = page(&history).html();
    let written = std::fs::write(&staged, html).and_then(|()| std::fs::rename(&staged, &path));
    written.map_err(|error| {
        std::fs::remove_file(&staged).ok();
        Error::io("write", &path, error)
    })?;
    Ok(path)
}

/// Writes each chart of the run in `dir` as a file under `to`, which is made; their names.
///
/// # Errors
/// As [`write`].
pub fn write_svgs(dir: &Path, to: &Path) -> Result<Vec<String>> {
    let history = History::open(dir)?;
    std::fs::create_dir_all(to).map_err(|e| Error::io("make", to, e))?;
    let mut names = Vec::new();
    for (name, svg) in charts(&history) {
        let path = to.join(format!("{name}.svg"));
        std::fs::write(&path, svg_file(&svg)).map_err(|e| Error::io("write", &path, e))?;
        names.push(format!("{name}.svg"));
    }
    Ok(names)
}

/// The page.
pub fn page(history: &History) -> Page {
    let name = std::path::absolute(history.dir()).ok();
    let name = name.as_deref().and_then(Path::file_name);
    let name = name.map_or("run".into(), |name| name.to_string_lossy().into_owned());
    let panels = [
        outcome(history),
        curve_panel(history),
        samples(history),
        plan_panel(history),
        step_panel(history),
        stall_panel(history),
        commits(history),
        written(history),
        configuration(history),
    ];
    Page {
        title: name,
        subtitle: subtitle(history),
        panels: panels.into_iter().flatten().collect(),
    }
}

fn subtitle(history: &History) -> String {
    let run = &history.run;
    let mut parts = Vec::new();
    if let Some(parameters) = run["model"]["parameters"].as_u64() {
        let family = run["model"]["family"].as_str().unwrap_or("model");
        let parameters = count_text(parameters);
        parts.push(format!("{family}, {parameters} parameters"));
    }
    if let Some(device) = run["device"].as_str() {
        parts.push(format!("on {device}"));
    }
    let first = run["starts"][0]["at"].as_f64();
    parts.extend(first.map(|at| format!("begun {}", date_text(at as u64))));
    if let Some(version) = run["terrace_version"].as_str() {
        parts.push(format!("terrace {version}"));
    }
    parts.join(" · ")
}

/// What became of the run.
fn end(history: &History) -> (String, bool) {
    let Some(status) = &history.status else {
        return ("not told".to_string(), false);
    };
    match (status.state, &status.failure) {
        (State::Finished, _) if status.step < status.total_steps => (
            "finished early: train.early_stopping_patience was used up".to_string(),
            false,
        ),
        (State::Finished, _) => ("finished".to_string(), false),
        (State::Interrupted, _) => (
            format!("ended on request after step {}", status.step),
            false,
        ),
        (State::Failed, Some(words)) => (format!("failed: {words}"), true),
        (State::Failed, None) => ("failed".to_string(), true),
        (State::Running, _) if status.age() < SILENT_SECONDS => ("running".to_string(), false),
        (State::Running, _) => (
            "ended without a word: the process was killed, or the machine stopped".to_string(),
            true,
        ),
    }
}

fn table(heads: &[&str], rows: Vec<Vec<String>>) -> Part {
    Part::Table(Table {
        heads: heads.iter().map(ToString::to_string).collect(),
        rows,
    })
}

/// Whole numbers with a space between thousands.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

fn outcome(history: &History) -> Option<Panel> {
    let run = &history.run;
    let (end, is_bad) = end(history);
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut row = |name: &str, value: String| rows.push(vec![name.to_string(), value]);
    let total = history.total();
    let done = total.map_or(0, |total| total.step);
    let of = run["total_steps"].as_u64();
    let of = of.map_or(String::new(), |of| format!(" of {}", grouped(of)));
    row("steps", format!("{}{of}", grouped(done)));
    if let Some(total) = total {
        let last = history.rows.last().expect("there is a total of them");
        row("tokens", grouped(total.tokens));
        row("time in steps", duration_text(total.seconds));
        row("last loss", format!("{:.4} nats", last.loss.mean()));
        let rate = total.tokens_per_second();
        row("mean rate", format!("{} tokens/s", grouped(rate as u64)));
        let flops = run["plan"]["prediction"]["executed_flops"].as_f64();
        if let Some(flops) = flops.filter(|_| total.seconds > 0.0) {
            let rate = flops * total.count as f64 / total.seconds;
            let text = format!("{} executed, recomputation too", Unit::Flops.text(rate));
            row("arithmetic", text);
        }
    }
    if let Some((step, loss)) = history.best_evaluation() {
        let perplexity = loss.exp();
        let text = format!("{loss:.4} nats (perplexity {perplexity:.2}) at step {step}");
        row("least held-out loss", text);
    }
    let trained_on = &run["data"];
    if let Some(tokens) = trained_on["tokens"].as_u64() {
        let rows = trained_on["rows"].as_u64().unwrap_or(0);
        let text = format!("{} rows, {} tokens", grouped(rows), grouped(tokens));
        row("data", text);
    }
    if let Some(cpu) = run["machine"]["cpu"].as_str() {
        let cores = run["machine"]["cores"].as_u64().unwrap_or(0);
        let memory = run["machine"]["memory_bytes"].as_u64().unwrap_or(0);
        let text = format!("{cpu}, {cores} cores, {}", bytes_text(memory));
        row("machine", text);
    }
    let mut parts = Vec::new();
    if is_bad {
        parts.push(Part::Failure(end.clone()));
    }
    parts.push(table(&[], rows));
    parts.extend(remarks(history).into_iter().map(Part::Text));
    Some(Panel {
        title: "Outcome".to_string(),
        subtitle: if is_bad { String::new() } else { end },
        parts,
    })
}

/// What a reader should know of the numbers.
fn remarks(history: &History) -> Vec<String> {
    let mut remarks = Vec::new();
    let starts = history.run["starts"].as_array();
    let starts = starts.map_or(&[][..], Vec::as_slice);
    if starts.len() > 1 {
        let steps = starts.iter().skip(1).rev().take(SHOWN_MAX).rev();
        let steps = steps.filter_map(|start| start["after_step"].as_u64());
        let steps: Vec<String> = steps.map(grouped).collect();
        remarks.push(format!(
            "Resumed {} times, after step {}.",
            starts.len() - 1,
            steps.join(", ")
        ));
    }
    let mut count = |count: u64, what: &str| {
        if count > 0 {
            remarks.push(format!("{} {what}", grouped(count)));
        }
    };
    count(history.repeated, "steps were told twice; the later count.");
    count(history.non_finite, "steps have a loss that is no number.");
    count(
        history.unreadable,
        "lines of metrics.jsonl could not be read.",
    );
    if history.rows.is_empty() {
        remarks.push("No step was done.".to_string());
    }
    remarks
}

fn curve_panel(history: &History) -> Option<Panel> {
    let parts: Vec<Part> = curves(history)
        .iter()
        .map(|(_, chart)| Part::Chart(chart.svg()))
        .collect();
    let joined = history.rows.iter().any(|row| row.count > 1) || history.rows.len() > 600;
    let subtitle = match joined {
        true => "means of neighbouring steps; the band is from their least to their greatest",
        false => "every step",
    };
    (!parts.is_empty()).then(|| Panel {
        title: "Curves".to_string(),
        subtitle: subtitle.to_string(),
        parts,
    })
}

fn samples(history: &History) -> Option<Panel> {
    let shown = history.samples.iter().rev().take(SHOWN_MAX);
    let parts: Vec<Part> = shown
        .map(|sample| Part::Quote {
            head: format!("step {}: {}", grouped(sample.step), sample.prompt),
            text: sample.text.clone(),
        })
        .collect();
    (!parts.is_empty()).then(|| Panel {
        title: "Samples".to_string(),
        subtitle: "what the model wrote, the latest first".to_string(),
        parts,
    })
}

fn plan_panel(history: &History) -> Option<Panel> {
    let chart = tiers(history)?;
    let plan = &history.run["plan"];
    let count = |name: &str| plan[name].as_u64().unwrap_or(0);
    let kept = format!(
        "{} of {} block activations are kept, the others recomputed; {} micro-batches of at most \
         {} tokens; a step is bound by {}.",
        count("kept"),
        count("block_micro_pairs"),
        count("micro_batches"),
        grouped(count("micro_batch_tokens")),
        plan["bound_by"].as_str().unwrap_or("nothing known")
    );
    Some(Panel {
        title: "Plan".to_string(),
        subtitle: "where every byte lives".to_string(),
        parts: vec![Part::Chart(chart.svg()), Part::Text(kept)],
    })
}

fn step_panel(history: &History) -> Option<Panel> {
    let row = settled(history)?;
    let mut parts = Vec::new();
    parts.extend(lanes(history).map(|chart| Part::Chart(chart.svg())));
    let keys = ["promote_bytes", "demote_bytes", "read_bytes", "write_bytes"];
    let mut rows = Vec::new();
    for (hop, key) in keys.iter().enumerate() {
        let predicted = history.run["plan"]["prediction"][key].as_u64();
        let (bytes, busy) = (row.bytes[hop] / row.count, row.busy[hop]);
        if bytes == 0 && predicted.unwrap_or(0) == 0 {
            continue;
        }
        let rate = row.bytes[hop] as f64 / busy;
        rows.push(vec![
            HOP_NAMES[hop].replace('_', " "),
            predicted.map_or("-".to_string(), bytes_text),
            bytes_text(bytes),
            match rate.is_finite() {
                true => Unit::BytesPerSecond.text(rate),
                false => "-".to_string(),
            },
        ]);
    }
    if !rows.is_empty() {
        let heads = ["hop", "predicted a step", "measured a step", "while busy"];
        parts.push(table(&heads, rows));
    }
    let steps = grouped(row.count);
    (!parts.is_empty()).then(|| Panel {
        title: "A step, predicted and measured".to_string(),
        subtitle: format!("mean of {steps} steps; lanes run beside each other"),
        parts,
    })
}

fn stall_panel(history: &History) -> Option<Panel> {
    let chart = stalls(history)?;
    Some(Panel {
        title: "Stalls".to_string(),
        subtitle: "who waited: for what; lanes wait beside each other".to_string(),
        parts: vec![Part::Chart(chart.svg())],
    })
}

fn commits(history: &History) -> Option<Panel> {
    let shown = history.commits.iter().rev().take(SHOWN_MAX);
    let rows: Vec<Vec<String>> = shown
        .map(|line| {
            vec![
                grouped(line.step.unwrap_or(0)),
                format!("{:.2} s", line.commit_seconds.unwrap_or(0.0)),
                format!("{:.2} s", line.commit_stall_seconds),
                format!("{:.2} s", line.commit_stall_bound_seconds),
                bytes_text(line.commit_bytes),
            ]
        })
        .collect();
    let heads = ["step", "took", "stall", "stall's bound", "written"];
    (!rows.is_empty()).then(|| Panel {
        title: "Commits".to_string(),
        subtitle: format!(
            "{} beside training, the latest first",
            grouped(history.commit_count)
        ),
        parts: vec![table(&heads, rows)],
    })
}

fn written(history: &History) -> Option<Panel> {
    let total = history.total().filter(|_| history.written_total > 0)?;
    let [store, checkpoint] = total.written;
    let mut rows = vec![
        vec![
            "spilled extents, in the steps above".to_string(),
            bytes_text(store),
        ],
        vec![
            "commits, in the steps above".to_string(),
            bytes_text(checkpoint),
        ],
        vec![
            "all: between steps and in repeated ones too".to_string(),
            bytes_text(history.written_total),
        ],
    ];
    if let Some(life) = history.drive_life {
        let text = format!("{:.4} %", 100.0 * life);
        rows.push(vec!["of the drive's rated life".to_string(), text]);
    }
    Some(Panel {
        title: "Written to drives".to_string(),
        subtitle: "by the run, over all its processes".to_string(),
        parts: vec![table(&[], rows)],
    })
}

fn configuration(history: &History) -> Option<Panel> {
    let text = history.run["config"].as_str()?.trim_end().to_string();
    Some(Panel {
        title: "Configuration".to_string(),
        subtitle: "every value, defaults too".to_string(),
        parts: vec![Part::Quote {
            head: String::new(),
            text,
        }],
    })
}
