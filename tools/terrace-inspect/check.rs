//! `terrace-inspect verify` and `repair`: whether a store is whole, and what can be put right.

use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};
use terrace::error::{Error, Result, printable};
use terrace::inspect::repair::{self, Repair};
use terrace::inspect::verify::{Finding, Severity, Verified, VerifyOptions, verify as check};
use terrace::inspect::{Source, Store, TensorFiles};
use terrace::plan::bytes_text;

use crate::output::{
    Bar, ReadingArguments, Signals, engine_name, lines, path_text, print, print_json,
};

/// Arguments of `verify`.
#[derive(Args)]
pub(crate) struct VerifyArguments {
    /// Checkpoint directory, its file, or safetensors
    path: PathBuf,
    /// Read every extent and compare it with its checksum
    #[arg(long)]
    full: bool,
    /// Only the commit of this step
    #[arg(long)]
    step: Option<u64>,
    /// Where to keep how far it came; goes on from there if the file is there
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    #[command(flatten)]
    reading: ReadingArguments,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `repair`.
#[derive(Args)]
pub(crate) struct RepairArguments {
    /// Checkpoint directory or its file
    path: PathBuf,
    /// Do it; without this, only what would be done is shown
    #[arg(long)]
    write: bool,
    /// Put back what an earlier repair overwrote, from its log
    #[arg(long, value_name = "LOG")]
    undo: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn code_of(worst: Option<Severity>) -> u8 {
    match worst {
        None => 0,
        Some(Severity::Repairable) => 1,
        Some(Severity::Loss) => 3,
    }
}

/// Runs `verify`.
pub(crate) fn verify(arguments: &VerifyArguments) -> Result<u8> {
    let store = match Source::open(&arguments.path)? {
        Source::Store(store) => store,
        Source::Tensors(files) => return verify_files(&files, arguments),
    };
    let options = VerifyOptions {
        full: arguments.full,
        step: arguments.step,
        reading: arguments.reading.reading()?,
        state: arguments.state.clone(),
    };
    let signals = Signals::catch();
    let bar = Bar::new(!arguments.json);
    let verified = check(&store, &options, &mut |done, total| {
        bar.set(done, total);
        signals.caught().is_none()
    })?;
    bar.clear();
    if arguments.json {
        print_json(&verified_json(&store, &verified, arguments.full))?;
    } else {
        for finding in &verified.findings {
            eprintln!("terrace-inspect: {}", finding_text(&store, finding));
        }
        print(&verified_text(&verified, arguments.full))?;
    }
    Ok(match signals.caught() {
        Some(signal) if verified.interrupted => 128 + signal,
        _ => code_of(verified.worst()),
    })
}

fn finding_text(store: &Store, finding: &Finding) -> String {
    let remedy = match (finding.severity, finding.extent) {
        (Severity::Repairable, _) => "`repair` restores it",
        (Severity::Loss, Some(_)) => "it exists once: resume from another commit, check the drive",
        (Severity::Loss, None) => "no copy is left: restore the file from a copy",
    };
    finding
        .fault
        .error(store.path().to_path_buf(), remedy)
        .to_string()
}

fn verified_text(verified: &Verified, full: bool) -> String {
    let mut text = lines(&verified.notes);
    if verified.resumed_extents > 0 {
        text.push_str(&format!(
            "went on after {} extents\n",
            verified.resumed_extents
        ));
    }
    let found = match verified.findings.len() {
        0 => "nothing damaged".to_string(),
        count => format!("{count} damaged"),
    };
    let ended = if verified.interrupted {
        "ended early: "
    } else {
        ""
    };
    text.push_str(&match full {
        true => format!(
            "{ended}{} commits: {} extents, {} read and right; {found}\n",
            verified.commits,
            verified.extents,
            bytes_text(verified.bytes)
        ),
        false => format!(
            "{} commits: structures read, {found}; --full reads every extent\n",
            verified.commits
        ),
    });
    text
}

fn verified_json(store: &Store, verified: &Verified, full: bool) -> Value {
    json!({
        "path": path_text(store.path()),
        "full": full,
        "commits": verified.commits,
        "extents": verified.extents,
        "bytes": verified.bytes,
        "resumed_extents": verified.resumed_extents,
        "engine": verified.engine.map(engine_name),
        "interrupted": verified.interrupted,
        "worst": verified.worst(),
        "findings": verified.findings,
        "notes": verified.notes,
    })
}

/// Headers were checked when the files were opened; values are scanned if all is to be read.
fn verify_files(files: &TensorFiles, arguments: &VerifyArguments) -> Result<u8> {
    use terrace::inspect::statistics::measure;
    use terrace::inspect::values::Values;
    let (mut tensors, mut bytes, mut non_finite) = (0u64, 0u64, Vec::new());
    for tensor in files.tensors() {
        tensors += 1;
        bytes += tensor.entry.bytes;
        let elements = 0..tensor.elements();
        let values = Values::of_tensor(tensor.file, tensor.entry, elements.clone());
        let Some(mut values) = values.filter(|v| arguments.full && v.format().has_numbers()) else {
            continue;
        };
        let found = measure(&mut values, &[elements])?.remove(0);
        if let Some(first) = found.first_non_finite {
            non_finite.push((tensor.name.to_string(), found.nan, found.infinite, first));
        }
    }
    let note = "safetensors have no checksums: only structure and finite numbers can be checked";
    if arguments.json {
        let found: Vec<Value> = non_finite
            .iter()
            .map(|(name, nan, infinite, first)| {
                json!({"tensor": name, "nan": nan, "infinite": infinite, "first": first})
            })
            .collect();
        print_json(&json!({
            "path": path_text(files.path()), "full": arguments.full, "tensors": tensors,
            "bytes": bytes, "non_finite": arguments.full.then_some(found), "notes": [note],
        }))?;
    } else {
        for (name, nan, infinite, first) in &non_finite {
            eprintln!(
                "terrace-inspect: {}: {nan} nan, {infinite} infinite, first at element {first}",
                printable(name)
            );
        }
        let found = match arguments.full {
            true => format!(
                "read; {} with numbers that are not finite",
                non_finite.len()
            ),
            false => "listed; numbers were not read (--full reads them)".to_string(),
        };
        let bytes = bytes_text(bytes);
        print(&format!("{note}\n{tensors} tensors, {bytes} {found}\n"))?;
    }
    Ok(if non_finite.is_empty() { 0 } else { 3 })
}

/// Runs `repair`.
pub(crate) fn repair(arguments: &RepairArguments) -> Result<u8> {
    if let Some(log) = &arguments.undo {
        let sentences = repair::undo(&arguments.path, log, arguments.write)?;
        if arguments.json {
            let value = json!({"written": arguments.write, "changes": sentences});
            return print_json(&value).map(|()| 0);
        }
        return print(&(lines(&sentences) + written_text(arguments.write))).map(|()| 0);
    }
    let store = Source::open_store(&arguments.path)?;
    let mut planned = repair::plan(&store)?;
    let mut log = None;
    if arguments.write && !planned.is_empty() {
        (planned, log) = repair::repair(&arguments.path)?;
    }
    if arguments.json {
        print_json(&json!({
            "path": path_text(store.path()),
            "written": log.is_some(),
            "log": log.as_deref().map(path_text),
            "changes": planned.sentences(),
            "quarantined": planned.quarantined,
            "lost": planned.lost,
        }))?;
    } else {
        print(&repair_text(&planned, log.as_deref(), arguments.write))?;
    }
    Ok(match (planned.lost.is_empty(), planned.is_empty()) {
        (false, _) => 3,
        (true, false) if log.is_none() => 1,
        _ => 0,
    })
}

fn written_text(written: bool) -> &'static str {
    match written {
        true => "",
        false => "nothing was written: pass --write to do this\n",
    }
}

fn repair_text(planned: &Repair, log: Option<&std::path::Path>, writes: bool) -> String {
    let mut text = lines(&planned.sentences());
    for generation in &planned.quarantined {
        text.push_str(&format!(
            "quarantine generation {generation}: no longer named\n"
        ));
    }
    text.push_str(&lines(&planned.lost));
    if planned.is_empty() {
        return text + "nothing to repair\n";
    }
    if let Some(log) = log {
        text.push_str(&format!(
            "written; what was there is in {}\n",
            log.display()
        ));
    }
    text + written_text(writes)
}

/// What a command that needs a store says of an end by a signal.
pub(crate) fn interrupted(error: &Error) -> bool {
    std::mem::discriminant(error)
        == std::mem::discriminant(&Error::Interrupted { signal: 0, step: 0 })
}
