//! `terrace-inspect`: looks into checkpoint stores and safetensors. Argument parsing and printing
//! only.

#[path = "terrace-inspect/change.rs"]
mod change;
#[path = "terrace-inspect/check.rs"]
mod check;
#[path = "terrace-inspect/differences.rs"]
mod differences;
#[path = "terrace-inspect/numbers.rs"]
mod numbers;
#[path = "terrace-inspect/output.rs"]
mod output;
#[path = "terrace-inspect/show.rs"]
mod show;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Looks into checkpoint stores and safetensors, also under a running training. Writes nothing but
/// by `repair --write`, `reclaim --write`, `export` and `copy`.
///
/// PATH is a checkpoint directory or its file, a run's log.dir, a .safetensors file, or a model
/// directory. Exit codes: 0 clean, 1 repairable (diff: different), 2 usage, 3 loss, 4 I/O, 5 busy.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Inspect {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// What a store is: superblock copies, regions, sizes, file system, who holds it
    Info(show::DescribeArguments),
    /// Commits; with --step, tiles and sections of one; tensors of safetensors
    List(show::ListArguments),
    /// Statistics of a tile's tensors, or of all tiles
    Stat(numbers::StatArguments),
    /// Values, statistics and a histogram of a tile or tensor
    Dump(numbers::DumpArguments),
    /// Check structures; with --full, read every extent and compare it with its checksum
    Verify(check::VerifyArguments),
    /// Compare two stores, two commits, or safetensors: bits, values and ulp of each tensor
    Diff(differences::DiffArguments),
    /// Restore superblock and manifest copies; shows what it would do unless --write is given
    Repair(check::RepairArguments),
    /// Write a commit's weights as a Hugging Face directory
    Export(change::ExportArguments),
    /// Copy a store to a new directory, verified
    Copy(change::CopyArguments),
    /// Leftovers of runs that ended too early; removes them if --write is given
    Reclaim(change::ReclaimArguments),
}

fn main() -> ExitCode {
    // A file size limit is an error of a write, not the end of the process.
    output::ignore_file_size_signal();
    let command = match Inspect::try_parse() {
        Ok(inspect) => inspect.command,
        Err(error) => {
            let code = if error.use_stderr() { 2 } else { 0 };
            error.print().ok();
            return ExitCode::from(code);
        }
    };
    let result = match &command {
        Command::Info(arguments) => show::describe(arguments),
        Command::List(arguments) => show::list(arguments),
        Command::Stat(arguments) => numbers::stat(arguments),
        Command::Dump(arguments) => numbers::dump(arguments),
        Command::Verify(arguments) => check::verify(arguments),
        Command::Diff(arguments) => differences::diff(arguments),
        Command::Repair(arguments) => check::repair(arguments),
        Command::Export(arguments) => change::export(arguments),
        Command::Copy(arguments) => change::copy(arguments),
        Command::Reclaim(arguments) => change::reclaim(arguments),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) if error.is_broken_pipe() => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("terrace-inspect: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
