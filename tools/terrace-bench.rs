//! `terrace-bench`: measures the tiers. Argument parsing and printing only.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use terrace::config::{IoEngine, Size};
use terrace::error::{Error, Result};
use terrace::measure::Hops;

/// Measures what every hop of this machine does.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Bench {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Matrix products, copies, AdamW and the store of this machine, a line each
    Hops(HopsArguments),
}

#[derive(Args)]
struct HopsArguments {
    /// Directory on the drive to measure; a directory is made in it and removed at the end
    directory: PathBuf,
    /// Bytes to write to the store and read back
    #[arg(long, default_value = "256MiB")]
    bytes: String,
    /// How to do I/O; by a probe otherwise
    #[arg(long)]
    engine: Option<EngineName>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum EngineName {
    #[value(name = "io_uring")]
    Uring,
    Pread,
}

fn main() -> ExitCode {
    let Command::Hops(arguments) = match Bench::try_parse() {
        Ok(bench) => bench.command,
        Err(error) => {
            let code = if error.use_stderr() { 2 } else { 0 };
            error.print().ok();
            return ExitCode::from(code);
        }
    };
    match hops(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is_broken_pipe() => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("terrace-bench: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn hops(arguments: &HopsArguments) -> Result<()> {
    let Size::Bytes(bytes) = Size::parse(&arguments.bytes, "--bytes")? else {
        let expected = "a size with a unit";
        let remedy = "write 256MiB";
        return Err(Error::input(
            "arguments",
            "--bytes",
            expected,
            "auto",
            remedy,
        ));
    };
    let engine = arguments.engine.map(|name| match name {
        EngineName::Uring => IoEngine::Uring,
        EngineName::Pread => IoEngine::Pread,
    });
    let hops = Hops::measure(&arguments.directory, bytes, engine)?;
    let text = if arguments.json {
        let json = serde_json::to_string_pretty(&hops);
        json.expect("numbers and strings are JSON") + "\n"
    } else {
        lines(&hops)
    };
    let written = std::io::stdout().lock().write_all(text.as_bytes());
    written.map_err(|e| Error::io("write", "standard output".as_ref(), e))
}

fn lines(hops: &Hops) -> String {
    let rates = &hops.rates;
    let gigabytes = |rate: f64| format!("{:.2} GB/s", rate / 1e9);
    let percent = 100.0 * hops.adamw_bytes / hops.stream_bytes;
    let mut text = String::new();
    for sentence in &hops.store {
        text.push_str(sentence);
        text.push('\n');
    }
    let adamw = format!(
        "{} ({:.3} G parameters/s), {percent:.0} % of an in-place stream's {}",
        gigabytes(hops.adamw_bytes),
        rates.adamw / 1e9,
        gigabytes(hops.stream_bytes),
    );
    let store_bytes = hops.store_bytes >> 20;
    for (name, value) in [
        ("gemm f32", format!("{:.1} GFLOP/s", rates.gemm / 1e9)),
        ("host to device", gigabytes(rates.promote)),
        ("device to host", gigabytes(rates.demote)),
        ("adamw", adamw),
        (
            "store write",
            format!("{} over {store_bytes} MiB", gigabytes(rates.store_write)),
        ),
        (
            "store read",
            format!("{} over {store_bytes} MiB", gigabytes(rates.store_read)),
        ),
    ] {
        text.push_str(&format!("{name:<16}{value}\n"));
    }
    text
}
