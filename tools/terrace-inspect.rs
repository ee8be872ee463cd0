//! `terrace-inspect`: looks into a checkpoint directory. Argument parsing and printing only.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use serde_json::json;
use terrace::checkpoint::{CommitSummary, Inspection};
use terrace::error::{Error, Result};
use terrace::plan::bytes_text;

/// Looks into the checkpoint directory of a run that is not running.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Inspect {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Commits with their sizes
    List {
        /// Checkpoint directory
        directory: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Read every extent and compare it with its checksum
    Verify {
        /// Checkpoint directory
        directory: PathBuf,
        /// Only the commit of this step
        #[arg(long)]
        step: Option<u64>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

fn main() -> ExitCode {
    let command = match Inspect::try_parse() {
        Ok(inspect) => inspect.command,
        Err(error) => {
            let code = if error.use_stderr() { 2 } else { 0 };
            error.print().ok();
            return ExitCode::from(code);
        }
    };
    let result = match command {
        Command::List { directory, json } => list(&directory, json),
        Command::Verify {
            directory,
            step,
            json,
        } => verify(&directory, step, json),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is_broken_pipe() => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("terrace-inspect: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn list(directory: &std::path::Path, as_json: bool) -> Result<()> {
    let inspection = Inspection::open(directory)?;
    let commits = inspection.commits()?;
    if as_json {
        let commits: Vec<_> = commits.iter().map(commit_json).collect();
        let value = json!({ "commits": commits, "notes": inspection.sentences() });
        return print(&format!("{value:#}\n"));
    }
    let mut text = lines(inspection.sentences());
    for commit in &commits {
        text.push_str(&format!(
            "generation {}: step {}, {} tokens, {} in {} extents",
            commit.generation,
            commit.step,
            commit.tokens,
            bytes_text(commit.bytes),
            commit.extents,
        ));
        for (section, bytes) in &commit.sections {
            text.push_str(&format!(", {section} {}", bytes_text(*bytes)));
        }
        text.push('\n');
    }
    if commits.is_empty() {
        text.push_str("no commits\n");
    }
    print(&text)
}

fn commit_json(commit: &CommitSummary) -> serde_json::Value {
    let sections: serde_json::Map<String, serde_json::Value> = commit
        .sections
        .iter()
        .map(|(name, bytes)| (name.clone(), (*bytes).into()))
        .collect();
    json!({
        "generation": commit.generation,
        "step": commit.step,
        "tokens": commit.tokens,
        "extents": commit.extents,
        "bytes": commit.bytes,
        "sections": sections,
    })
}

/// Ends with the first damage, after all of it was printed.
fn verify(directory: &std::path::Path, step: Option<u64>, as_json: bool) -> Result<()> {
    let inspection = Inspection::open(directory)?;
    let verified = inspection.verify(step)?;
    let damage: Vec<String> = verified.damage.iter().map(|e| e.to_string()).collect();
    if as_json {
        let value = json!({
            "commits": verified.commits,
            "extents": verified.extents,
            "bytes": verified.bytes,
            "damage": damage,
            "notes": inspection.sentences(),
        });
        print(&format!("{value:#}\n"))?;
    } else {
        let mut text = lines(inspection.sentences());
        for what in &damage {
            text.push_str(&format!("damaged: {what}\n"));
        }
        text.push_str(&format!(
            "{} commits: {} extents, {} read and right; {} damaged\n",
            verified.commits,
            verified.extents,
            bytes_text(verified.bytes),
            damage.len(),
        ));
        print(&text)?;
    }
    verified.damage.into_iter().next().map_or(Ok(()), Err)
}

fn lines(sentences: &[String]) -> String {
    sentences.iter().map(|line| format!("{line}\n")).collect()
}

fn print(text: &str) -> Result<()> {
    let written = std::io::stdout().lock().write_all(text.as_bytes());
    written.map_err(|e| Error::io("write", "standard output".as_ref(), e))
}
