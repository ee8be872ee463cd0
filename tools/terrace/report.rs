//! `terrace report`: the page of a run, and its charts as files.

use std::path::PathBuf;

use clap::Args;
use terrace::error::Result;
use terrace::log::page;

use crate::say;

/// Arguments of `terrace report`.
#[derive(Args)]
pub(crate) struct ReportArguments {
    /// The run's directory: its log.dir
    run: PathBuf,
    /// Where to write the page; without it, report.html in that directory
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write the charts as SVG files into this directory, and no page
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "output")]
    svg: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn report(arguments: &ReportArguments) -> Result<()> {
    let ReportArguments { run, output, svg } = arguments;
    let Some(directory) = svg else {
        let path = page::write(run, output.as_deref())?;
        return say(&format!("report: {}", path.display()));
    };
    let names = page::write_svgs(run, directory)?;
    say(&format!("{}: {}", directory.display(), names.join(", ")))
}
