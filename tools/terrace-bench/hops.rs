//! `terrace-bench hops` and `terrace-bench profile`.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use terrace::config::{IoEngine, Size};
use terrace::error::{Error, Result};
use terrace::measure::ADAMW_TRAFFIC_BYTES;
use terrace::measure::hops::{Wanted, measure};
use terrace::measure::profile::Profile;

/// Arguments of `terrace-bench hops`.
#[derive(Args)]
pub(crate) struct HopsArguments {
    /// Directory on the drive to measure; a directory is made in it and removed at the end
    directory: PathBuf,
    /// Bytes of the store's file
    #[arg(long, default_value = "256MiB")]
    bytes: String,
    /// How to do I/O; by a probe otherwise
    #[arg(long)]
    engine: Option<EngineName>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `terrace-bench profile`.
#[derive(Args)]
pub(crate) struct ProfileArguments {
    /// File to write
    #[arg(long, short, value_name = "FILE", default_value = "profile.toml")]
    output: PathBuf,
    /// Directory of a store to measure, as memory.store names it; may come several times
    #[arg(long, value_name = "DIRECTORY")]
    store: Vec<PathBuf>,
    /// Bytes of a store's file
    #[arg(long, default_value = "1GiB")]
    bytes: String,
    /// Seconds of reading, of writing and of both, for each store
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    seconds: f64,
    /// How to do I/O; by a probe otherwise
    #[arg(long)]
    engine: Option<EngineName>,
    /// Replace a file that is there
    #[arg(long)]
    overwrite: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum EngineName {
    #[value(name = "io_uring")]
    Uring,
    Pread,
}

fn engine(name: Option<EngineName>) -> Option<IoEngine> {
    name.map(|name| match name {
        EngineName::Uring => IoEngine::Uring,
        EngineName::Pread => IoEngine::Pread,
    })
}

fn bytes(text: &str) -> Result<u64> {
    match Size::parse(text, "--bytes")? {
        Size::Bytes(bytes) => Ok(bytes),
        Size::Auto => {
            let expected = "a size with a unit";
            Err(Error::input(
                "arguments",
                "--bytes",
                expected,
                "auto",
                "write 256MiB",
            ))
        }
    }
}

/// Runs `terrace-bench hops`.
pub(crate) fn hops(arguments: &HopsArguments) -> Result<ExitCode> {
    let wanted = Wanted {
        stores: vec![arguments.directory.clone()],
        store_bytes: bytes(&arguments.bytes)?,
        store_seconds: 0.0,
        engine: engine(arguments.engine),
        copy_bytes: 256 << 20,
        cards: true,
    };
    let profile = measure(&wanted, |_| ())?;
    if arguments.json {
        let json = serde_json::to_string_pretty(&profile);
        crate::print(&(json.expect("numbers and strings are JSON") + "\n"))?;
    } else {
        crate::print(&lines(&profile))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `terrace-bench profile`.
pub(crate) fn profile(arguments: &ProfileArguments) -> Result<ExitCode> {
    let path = &arguments.output;
    if path.exists() && !arguments.overwrite {
        return Err(Error::input(
            "arguments",
            format!("--output {}", path.display()),
            "a file that does not exist",
            "one that is there",
            "name another, or add --overwrite",
        ));
    }
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    if let Some(parent) = parent.filter(|parent| !parent.is_dir()) {
        let source = std::io::ErrorKind::NotFound.into();
        return Err(Error::io("write into", parent, source));
    }
    if !(arguments.seconds.is_finite() && arguments.seconds >= 0.0) {
        let got = arguments.seconds.to_string();
        return Err(Error::input(
            "arguments",
            "--seconds",
            "a number from 0",
            got,
            "correct it",
        ));
    }
    let wanted = Wanted {
        stores: arguments.store.clone(),
        store_bytes: bytes(&arguments.bytes)?,
        store_seconds: arguments.seconds,
        engine: engine(arguments.engine),
        copy_bytes: 256 << 20,
        cards: true,
    };
    let talks = std::io::stderr().is_terminal();
    let profile = measure(&wanted, |what| {
        if talks {
            eprintln!("measuring {what}");
        }
    })?;
    std::fs::write(path, profile.text()).map_err(|e| Error::io("write", path, e))?;
    let mut text = lines(&profile);
    if arguments.store.is_empty() {
        text.push_str("no store was measured: add --store DIRECTORY\n");
    }
    text.push_str(&format!(
        "{}: {:.0} s; `terrace plan run.toml --profile {0}`, or memory.profile = \"{0}\"\n",
        path.display(),
        profile.seconds
    ));
    crate::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// A hop a line.
fn lines(profile: &Profile) -> String {
    let gigabytes = |rate: f64| format!("{:.2} GB/s", rate / 1e9);
    let host = &profile.host;
    let machine = &profile.machine;
    let mut text = format!("{}, {} cores\n", machine.cpu, machine.cores);
    let mut line = |name: &str, value: String| text.push_str(&format!("{name:<17}{value}\n"));
    let adamw = host.adamw_parameters_per_second * ADAMW_TRAFFIC_BYTES as f64;
    let percent = 100.0 * adamw / host.stream_bytes_per_second;
    line("host copy", gigabytes(host.copy_bytes_per_second));
    line("host in place", gigabytes(host.stream_bytes_per_second));
    line(
        "adamw",
        format!(
            "{} ({:.3} G parameters/s), {percent:.0} % of in place",
            gigabytes(adamw),
            host.adamw_parameters_per_second / 1e9
        ),
    );
    let core = "of one core";
    line(
        "checksum",
        format!("{} {core}", gigabytes(host.checksum_bytes_per_second)),
    );
    line(
        "zstd",
        format!(
            "level {}: {} in, {} out {core}, to {:.1} % of moment-like values",
            host.zstd_level,
            gigabytes(host.zstd_compress_bytes_per_second),
            gigabytes(host.zstd_decompress_bytes_per_second),
            100.0 * host.zstd_ratio
        ),
    );
    let moments = (
        host.moments_encode_bytes_per_second,
        host.moments_decode_bytes_per_second,
        host.moments_ratio,
    );
    if let (Some(encode), Some(decode), Some(ratio)) = moments {
        let (encode, decode) = (gigabytes(encode), gigabytes(decode));
        let percent = 100.0 * ratio;
        line(
            "zstd of spilled",
            format!("{encode} in, {decode} out {core}, to {percent:.1} % of moment-like values"),
        );
    }
    for device in &profile.device {
        let flops = |rate: f64| match rate {
            rate if rate < 1e13 => format!("{:.1} GFLOP/s", rate / 1e9),
            rate => format!("{:.1} TFLOP/s", rate / 1e12),
        };
        let gemm = flops(device.gemm_flops_per_second);
        let name = device
            .card
            .map_or(String::new(), |card| format!(", cuda:{card}"));
        line("gemm", format!("{gemm}, {}{name}", device.name));
        if let Some(rate) = device.attention_flops_per_second {
            line("attention", flops(rate));
        }
        if let Some(rate) = device.passes_bytes_per_second {
            line("activations", gigabytes(rate));
        }
        line("host to device", gigabytes(device.promote_bytes_per_second));
        line("device to host", gigabytes(device.demote_bytes_per_second));
    }
    text + &store_lines(profile)
}

/// A direction of a store a line.
fn store_lines(profile: &Profile) -> String {
    let gigabytes = |rate: f64| format!("{:.2} GB/s", rate / 1e9);
    let mut text = String::new();
    let mut line = |name: &str, value: String| text.push_str(&format!("{name:<17}{value}\n"));
    for store in &profile.store {
        let direct = if store.direct { "direct" } else { "buffered" };
        let (path, system) = (store.path.display(), &store.file_system);
        let mebibytes = store.bytes >> 20;
        line(
            "store",
            format!("{path}: {}, {direct} I/O, {system}", store.engine),
        );
        let over = format!("over {mebibytes} MiB");
        line(
            "store write",
            format!("{} {over}", gigabytes(store.write_bytes_per_second)),
        );
        line(
            "store read",
            format!("{} {over}", gigabytes(store.read_bytes_per_second)),
        );
        line(
            "store mixed",
            format!(
                "{} both ways {over}",
                gigabytes(store.mixed_bytes_per_second)
            ),
        );
    }
    text
}
