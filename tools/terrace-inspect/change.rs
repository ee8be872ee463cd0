//! `terrace-inspect export`, `copy` and `reclaim`: what makes or removes files.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use terrace::checkpoint::model_of_commits;
use terrace::config::{RunConfig, Size};
use terrace::error::{Error, Result};
use terrace::hf::{ExportDtype, ExportOptions};
use terrace::inspect::Source;
use terrace::inspect::copy::{CopyOptions, copy as copy_store};
use terrace::inspect::export::export as export_commit;
use terrace::inspect::reclaim::{find, remove};
use terrace::plan::bytes_text;

use crate::check::interrupted;
use crate::output::{Bar, ReadingArguments, Signals, engine_name, path_text, print, print_json};

/// Format of exported weights.
#[derive(Clone, Copy, ValueEnum)]
enum Dtype {
    /// What the model computed with
    Bf16,
    /// The exact master
    F32,
}

/// Arguments of `export`.
#[derive(Args)]
pub(crate) struct ExportArguments {
    /// Checkpoint directory or its file
    path: PathBuf,
    /// Directory to make
    #[arg(long, value_name = "DIRECTORY")]
    out: PathBuf,
    /// The commit of this step; the newest otherwise
    #[arg(long)]
    step: Option<u64>,
    /// Format of the weights
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: Dtype,
    /// Most bytes of tensors in a file
    #[arg(long, default_value = "5GB")]
    shard_size: String,
    /// Replace a model directory that is there
    #[arg(long)]
    overwrite: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `copy`.
#[derive(Args)]
pub(crate) struct CopyArguments {
    /// Checkpoint directory or its file
    path: PathBuf,
    /// Directory to make
    #[arg(long, value_name = "DIRECTORY")]
    out: PathBuf,
    /// Only the commit of this step
    #[arg(long)]
    step: Option<u64>,
    #[command(flatten)]
    reading: ReadingArguments,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `reclaim`.
#[derive(Args)]
pub(crate) struct ReclaimArguments {
    /// Directory to look in: checkpoint.dir, log.dir, memory.store, or one with exports
    path: PathBuf,
    /// Remove what is listed
    #[arg(long)]
    write: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs `export`.
pub(crate) fn export(arguments: &ExportArguments) -> Result<u8> {
    let Size::Bytes(shard_bytes) = Size::parse(&arguments.shard_size, "--shard-size")? else {
        let expected = "a size with a unit";
        return Err(Error::input(
            "arguments",
            "--shard-size",
            expected,
            "auto",
            "write 5GB",
        ));
    };
    let store = Source::open_store(&arguments.path)?;
    let commit = store.commit(arguments.step)?;
    let run = commit
        .progress
        .as_ref()
        .map(|progress| progress.run.as_str());
    let config = RunConfig::parse(run.unwrap_or(""), "the commit's run.toml", &[]).ok();
    let directory = store.path().parent().unwrap_or(Path::new("."));
    let source = config.and_then(|config| model_of_commits(&config, directory));
    let source = source.filter(|dir| dir.is_dir());
    let options = ExportOptions {
        dir: arguments.out.clone(),
        dtype: match arguments.dtype {
            Dtype::Bf16 => ExportDtype::Bf16,
            Dtype::F32 => ExportDtype::F32,
        },
        shard_bytes: shard_bytes.max(1),
        overwrite: arguments.overwrite,
    };
    let report = export_commit(&store, commit, &options, source.as_deref())?;
    let mut notes = store.notes();
    if source.is_none() {
        let note = "model.path of the run is not there: no tokenizer files were written";
        notes.push(note.to_string());
    }
    if arguments.json {
        print_json(&json!({
            "out": path_text(&report.dir), "step": commit.step, "files": report.files,
            "tensors": report.tensor_count, "parameters": report.parameters,
            "bytes": report.tensor_bytes, "notes": notes,
        }))?;
    } else {
        print(&crate::output::lines(&notes))?;
        print(&format!(
            "{}: step {}, {} tensors, {} parameters, {} in {} files of weights\n",
            report.dir.display(),
            commit.step,
            report.tensor_count,
            report.parameters,
            bytes_text(report.tensor_bytes),
            report.shard_count
        ))?;
    }
    Ok(0)
}

/// Runs `copy`.
pub(crate) fn copy(arguments: &CopyArguments) -> Result<u8> {
    let store = Source::open_store(&arguments.path)?;
    let options = CopyOptions {
        out: arguments.out.clone(),
        step: arguments.step,
        reading: arguments.reading.reading()?,
    };
    let signals = Signals::catch();
    let bar = Bar::new(!arguments.json);
    let copied = copy_store(&store, &options, &mut |done, total| {
        bar.set(done, total);
        signals.caught().is_none()
    });
    bar.clear();
    let copied = match copied {
        Err(error) if interrupted(&error) => {
            eprintln!("terrace-inspect: ended; nothing of the copy is kept");
            return Ok(128 + signals.caught().unwrap_or(0));
        }
        other => other?,
    };
    let mut notes = store.notes();
    let replaced = copied.replaced.iter();
    notes.extend(replaced.map(|step| {
        format!("the commit of step {step} was replaced by a newer one while it was read")
    }));
    if arguments.json {
        print_json(&json!({
            "path": path_text(&copied.path), "bytes": copied.bytes, "steps": copied.steps,
            "replaced": copied.replaced, "engine": engine_name(copied.engine), "notes": notes,
        }))?;
    } else {
        let steps: Vec<String> = copied.steps.iter().map(u64::to_string).collect();
        print(&crate::output::lines(&notes))?;
        print(&format!(
            "{}: {} with steps {}, written and read back\n",
            copied.path.display(),
            bytes_text(copied.bytes),
            steps.join(", ")
        ))?;
    }
    Ok(0)
}

/// Runs `reclaim`.
pub(crate) fn reclaim(arguments: &ReclaimArguments) -> Result<u8> {
    let found = find(&arguments.path)?;
    if arguments.write {
        for leftover in &found.leftovers {
            remove(leftover)?;
        }
    }
    let bytes: u64 = found.leftovers.iter().map(|leftover| leftover.bytes).sum();
    if arguments.json {
        let leftovers: Vec<Value> = found
            .leftovers
            .iter()
            .map(|leftover| {
                json!({
                    "path": path_text(&leftover.path), "bytes": leftover.bytes,
                    "what": leftover.what,
                })
            })
            .collect();
        print_json(&json!({
            "leftovers": leftovers, "bytes": bytes, "removed": arguments.write,
            "kept": found.kept,
        }))?;
        return Ok(0);
    }
    let mut text = String::new();
    for leftover in &found.leftovers {
        let (path, what) = (shown(&leftover.path), &leftover.what);
        text.push_str(&format!("{path}: {what}, {}\n", bytes_text(leftover.bytes)));
    }
    for kept in &found.kept {
        text.push_str(&format!("left alone: {kept}\n"));
    }
    text.push_str(&match (found.leftovers.is_empty(), arguments.write) {
        (true, _) => "nothing to reclaim\n".to_string(),
        (false, true) => format!("{} given back\n", bytes_text(bytes)),
        (false, false) => format!("{}: pass --write to remove these\n", bytes_text(bytes)),
    });
    print(&text)?;
    Ok(0)
}

fn shown(path: &Path) -> String {
    terrace::error::printable(&path.to_string_lossy())
}
