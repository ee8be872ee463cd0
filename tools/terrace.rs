//! `terrace`: trains, plans, generates, exports. Argument parsing and printing only.

#[path = "terrace/config.rs"]
mod config;
#[path = "terrace/data.rs"]
mod data;
#[path = "terrace/doctor.rs"]
mod doctor;
#[path = "terrace/kill_at.rs"]
mod kill_at;
#[path = "terrace/model_out.rs"]
mod model_out;
#[path = "terrace/plan.rs"]
mod plan;
#[path = "terrace/report.rs"]
mod report;
#[path = "terrace/top.rs"]
mod top;
#[path = "terrace/train.rs"]
mod train;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use terrace::config::{RunConfig, WeightInit};
use terrace::error::{Error, Result};
use terrace::hf::hub;

/// Trains language models larger than the GPU's memory, every parameter, in full precision.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Terrace {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train, or go on from the last commit with --resume
    Train(train::TrainArguments),
    /// Show where every byte would live and what a step would cost; needs no GPU, disk or weights
    Plan(plan::PlanArguments),
    /// Continue a text with a model or a commit
    Generate(model_out::GenerateArguments),
    /// Write a commit as a Hugging Face directory
    Export(model_out::ExportArguments),
    /// Look at what a run would train on
    Data {
        #[command(subcommand)]
        command: data::DataCommand,
    },
    /// Write the report of a run: one HTML file
    Report(report::ReportArguments),
    /// Look at a run while it trains: tiers, hops, lanes, loss
    Top(top::TopArguments),
    /// Check, show, describe or import a run.toml
    Config {
        #[command(subcommand)]
        command: config::ConfigCommand,
    },
    /// Say what limits this machine, worst first, and how to change it
    Doctor(doctor::DoctorArguments),
    /// Write a commented run.toml
    Init {
        /// File to write; it must not exist
        #[arg(default_value = "run.toml")]
        path: PathBuf,
    },
}

/// The run.toml and what changes it.
#[derive(Args, Clone)]
struct RunFile {
    /// The run's file
    run: PathBuf,
    /// Change a value: --set train.steps=20
    #[arg(long = "set", value_name = "TABLE.KEY=VALUE")]
    sets: Vec<String>,
}

impl RunFile {
    fn text(&self) -> Result<String> {
        let failed = |source| Error::Io {
            action: "read",
            path: self.run.clone(),
            source,
            remedy: "; `terrace init` writes one".to_string(),
        };
        let bytes = std::fs::read(&self.run).map_err(failed)?;
        String::from_utf8(bytes).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            let (place, got) = (
                self.run.display().to_string(),
                format!("other bytes at byte {at}"),
            );
            Error::input("run.toml", place, "UTF-8", got, "save the file as UTF-8")
        })
    }

    /// The run, with a model's name on the hub replaced by its directory in the local cache.
    fn read(&self) -> Result<RunConfig> {
        self.read_for(false)
    }

    /// As [`RunFile::read`]; where the build fetches models, weights too if they are `wanted`.
    fn read_for(&self, wanted: bool) -> Result<RunConfig> {
        let place = self.run.display().to_string();
        let mut config = RunConfig::parse(&self.text()?, &place, &self.sets)?;
        if let Some(path) = &mut config.model.path {
            let weights = wanted && config.model.init == WeightInit::Pretrained;
            *path = hub::fetch(path, weights)?;
        }
        Ok(config)
    }
}

fn main() -> ExitCode {
    // A file size limit is an error of a write, not the end of the process.
    ignore_file_size_signal();
    let command = match Terrace::try_parse() {
        Ok(terrace) => terrace.command,
        Err(error) => {
            let code = if error.use_stderr() { 2 } else { 0 };
            error.print().ok();
            return ExitCode::from(code);
        }
    };
    let result = match command {
        Command::Train(arguments) => train::train(&arguments),
        Command::Plan(arguments) => plan::plan(&arguments),
        Command::Generate(arguments) => model_out::generate(&arguments),
        Command::Export(arguments) => model_out::export(&arguments),
        Command::Data { command } => data::run(&command),
        Command::Report(arguments) => report::report(&arguments),
        Command::Top(arguments) => top::top(&arguments),
        Command::Config { command } => config::run(&command),
        Command::Doctor(arguments) => doctor::doctor(&arguments),
        Command::Init { path } => init(&path),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is_broken_pipe() => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("terrace: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn ignore_file_size_signal() {
    let flag = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, flag).ok();
}

fn init(path: &std::path::Path) -> Result<()> {
    let mut file = std::fs::File::create_new(path).map_err(|source| match source.kind() {
        std::io::ErrorKind::AlreadyExists => Error::input(
            "init",
            path.display().to_string(),
            "a file that does not exist",
            "one that is there",
            "name another",
        ),
        _ => Error::io("make", path, source),
    })?;
    let text = terrace::config::parse::commented_template();
    file.write_all(text.as_bytes())
        .map_err(|e| Error::io("write", path, e))?;
    say(&format!(
        "{}: set model.path and data.train, then `terrace plan`",
        path.display()
    ))
}

/// Prints a line; a closed pipe is an error that ends the tool quietly.
fn say(line: &str) -> Result<()> {
    let written = writeln!(std::io::stdout().lock(), "{line}");
    written.map_err(|e| Error::io("write", "standard output".as_ref(), e))
}
