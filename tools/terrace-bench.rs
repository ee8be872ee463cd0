//! `terrace-bench`: measures the tiers. Argument parsing and printing only.

#[path = "terrace-bench/hops.rs"]
mod hops;
#[path = "terrace-bench/jobs.rs"]
mod jobs;

use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use terrace::error::{Error, Result};

/// Measures the tiers: jobs on a drive in fio's words, every hop of this machine, and the profile
/// that plans are made with.
#[derive(Parser)]
#[command(
    version,
    max_term_width = 100,
    override_usage = "terrace-bench --name=NAME [--OPTION=VALUE]... | JOB-FILE...\n       \
                      terrace-bench hops DIRECTORY\n       \
                      terrace-bench profile -o profile.toml --store DIRECTORY"
)]
struct Bench {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Matrix products, copies, checksums, zstd, AdamW and the store of this machine, a line each
    Hops(hops::HopsArguments),
    /// Measure every hop in about a minute and write what `terrace plan` and `terrace train` read
    Profile(hops::ProfileArguments),
}

/// First words that are not a job's.
const COMMANDS: [&str; 7] = ["hops", "profile", "help", "-h", "--help", "-V", "--version"];

fn main() -> ExitCode {
    // A file size limit is an error of a write, not the end of the process.
    let flag = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, flag).ok();
    let arguments: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    let commanded = arguments
        .first()
        .is_none_or(|first| COMMANDS.contains(&first.as_str()));
    let ended = if commanded {
        command()
    } else {
        jobs::run(&arguments)
    };
    match ended {
        Ok(code) => code,
        Err(error) if error.is_broken_pipe() => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("terrace-bench: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn command() -> Result<ExitCode> {
    let parsed = Bench::command()
        .after_help(jobs::help())
        .try_get_matches()
        .and_then(|matches| Bench::from_arg_matches(&matches));
    match parsed {
        Ok(Bench {
            command: Command::Hops(arguments),
        }) => hops::hops(&arguments),
        Ok(Bench {
            command: Command::Profile(arguments),
        }) => hops::profile(&arguments),
        Err(error) => {
            let code = if error.use_stderr() { 2 } else { 0 };
            error.print().ok();
            Ok(ExitCode::from(code))
        }
    }
}

fn print(text: &str) -> Result<()> {
    let written = std::io::stdout().lock().write_all(text.as_bytes());
    written.map_err(|e| Error::io("write", "standard output".as_ref(), e))
}
