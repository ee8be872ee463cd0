//! `terrace config`: a run.toml checked, shown, described, or made of another program's file.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use terrace::config::{RunConfig, import, json_schema};
use terrace::data;
use terrace::error::{Error, Result};
use terrace::hf;
use terrace::train::model_dir;

use crate::{RunFile, say};

#[derive(Subcommand)]
pub(crate) enum ConfigCommand {
    /// Name every fault of a run.toml, with its line, and what it names that is not there
    Check(RunFile),
    /// Print the whole run: defaults, then the file, then each --set; each value with its origin
    Show(RunFile),
    /// Print the JSON schema of a run.toml, for editors
    Schema,
    /// Make a run.toml of a YAML file of MegaTrain or LLaMA-Factory
    Import(ImportArguments),
}

/// Arguments of `terrace config import`.
#[derive(Args)]
pub(crate) struct ImportArguments {
    /// The YAML file
    file: PathBuf,
    /// Write the run.toml there, which must not exist, instead of printing it
    #[arg(long, short = 'o', value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Runs `terrace config …`.
pub(crate) fn run(command: &ConfigCommand) -> Result<()> {
    match command {
        ConfigCommand::Check(file) => check(file),
        ConfigCommand::Show(file) => {
            let place = file.run.display().to_string();
            let text = RunConfig::explained(&file.text()?, &place, &file.sets)?;
            say(text.trim_end())
        }
        ConfigCommand::Schema => say(&format!("{:#}", json_schema())),
        ConfigCommand::Import(arguments) => import_file(arguments),
    }
}

/// Names all faults; the first is the error.
fn check(file: &RunFile) -> Result<()> {
    let place = file.run.display().to_string();
    let mut faults = RunConfig::faults(&file.text()?, &place, &file.sets);
    if faults.is_empty() {
        let config = file.read();
        let config = config.and_then(|config| {
            faults.extend(hf::read_config(model_dir(&config)?).err());
            faults.extend(data::faults(&config.data));
            Ok(())
        });
        faults.extend(config.err());
    }
    let count = faults.len();
    let mut faults = faults.into_iter();
    let Some(first) = faults.next() else {
        return say(&format!(
            "{place}: right; `terrace plan` says whether it fits"
        ));
    };
    // The first is printed by main, as every error is.
    if count > 1 {
        for fault in faults {
            eprintln!("terrace: {fault}");
        }
        eprintln!("terrace: {count} faults in all; the first one:");
    }
    Err(first)
}

fn import_file(arguments: &ImportArguments) -> Result<()> {
    let path = &arguments.file;
    let place = path.display().to_string();
    let file = std::fs::File::open(path).map_err(|error| Error::io("open", path, error))?;
    let mut bytes = Vec::new();
    file.take(import::BYTES_MAX as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| Error::io("read", path, error))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let got = format!("other bytes at byte {}", error.utf8_error().valid_up_to());
        Error::input("import", &place, "UTF-8", got, "name the YAML file")
    })?;
    let imported = import::import(&text, &place)?;
    for line in &imported.lines {
        eprintln!("terrace: {line}");
    }
    match &arguments.out {
        None => say(imported.toml.trim_end()),
        Some(out) => {
            write_new(out, &imported.toml)?;
            let shown = out.display();
            say(&format!(
                "{shown}: written; next `terrace config check {shown}`"
            ))
        }
    }
}

fn write_new(path: &Path, text: &str) -> Result<()> {
    let mut file = std::fs::File::create_new(path).map_err(|source| match source.kind() {
        std::io::ErrorKind::AlreadyExists => {
            let (expected, got) = ("a file that does not exist", "one that is there");
            Error::input(
                "import",
                path.display().to_string(),
                expected,
                got,
                "name another",
            )
        }
        _ => Error::io("make", path, source),
    })?;
    file.write_all(text.as_bytes())
        .map_err(|error| Error::io("write", path, error))
}
