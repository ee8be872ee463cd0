//! `terrace doctor`.

use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};
use terrace::device::cuda;
use terrace::error::Result;
use terrace::machine::limits::{self, Drive, Finding, Level, Need, Root};
use terrace::measure::measure_rates;
use terrace::plan::{DeviceProfile, bytes_text};
use terrace::schedule::simulate::Rates;
use terrace::store::disk;
use terrace::tile::Precision;
use terrace::train::choose_device;

use crate::say;

/// Arguments of `terrace doctor`.
#[derive(Args)]
pub(crate) struct DoctorArguments {
    /// Directory to look at as a store
    #[arg(long, default_value = ".", value_name = "DIRECTORY")]
    store: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs `terrace doctor`. What it finds is no failure of its own.
pub(crate) fn doctor(arguments: &DoctorArguments) -> Result<()> {
    let root = Root::here();
    let mut findings = limits::examine(&root, Need::default());
    findings.extend(store(arguments, &root)?);
    findings.extend(cards());
    let rates = rates(&mut findings)?;
    limits::sort(&mut findings);
    if arguments.json {
        let rates: serde_json::Map<String, Value> = rates
            .iter()
            .map(|(name, rates)| (name.clone(), json!(rates)))
            .collect();
        return say(&format!(
            "{:#}",
            json!({ "findings": findings, "rates": rates })
        ));
    }
    for finding in &findings {
        let mark = match finding.level {
            Level::Bad => "bad",
            Level::Warning => "warning",
            Level::Unknown => "unknown",
            Level::Good => "ok",
        };
        say(&format!("{mark:<9}{finding}"))?;
    }
    for (name, rates) in &rates {
        say(&format!(
            "measured on {name}: GEMM {:.0} GFLOP/s, copy {:.1} GB/s, AdamW {:.2} G parameters/s",
            rates.gemm / 1e9,
            rates.promote / 1e9,
            rates.adamw / 1e9
        ))?;
    }
    Ok(())
}

/// How the store would read and write in its directory, and the drive below it.
fn store(arguments: &DoctorArguments, root: &Root) -> Result<Vec<Finding>> {
    let name = arguments.store.display().to_string();
    let probe = disk::probe(&arguments.store, None)?;
    let engine = Finding {
        level: match (probe.direct, probe.warning.is_some()) {
            (true, false) => Level::Good,
            _ => Level::Warning,
        },
        subject: "store i/o".to_string(),
        found: probe.sentence,
        remedy: match (probe.warning, probe.direct) {
            (Some(warning), _) => format!("{warning}: name a directory on a local drive"),
            (None, false) => "without O_DIRECT the page cache takes memory and time: name a \
                              directory on ext4, xfs or btrfs"
                .to_string(),
            (None, true) => String::new(),
        },
    };
    let mut findings = vec![engine];
    if let Some(drive) = Drive::of(&arguments.store) {
        findings.extend(drive.examine(root, &name));
    }
    Ok(findings)
}

/// Libraries and cards, and what a missing one needs.
fn cards() -> Vec<Finding> {
    let finding = |level, subject: &str, found: String, remedy: &str| Finding {
        level,
        subject: subject.to_string(),
        found,
        remedy: remedy.to_string(),
    };
    let library = |text: String| match text.split_once("; ") {
        Some((found, remedy)) => finding(Level::Warning, "cuda", found.to_string(), remedy),
        None => finding(Level::Good, "cuda", text, ""),
    };
    let count = match cuda::card_count() {
        Ok(count) => count,
        Err(error) => {
            let none = "the CPU device trains small models";
            let mut findings = vec![finding(Level::Warning, "gpu", error.to_string(), none)];
            findings.extend(cuda::library::report().into_iter().map(library));
            return findings;
        }
    };
    let mut findings = vec![match cuda::versions() {
        Ok(versions) => finding(Level::Good, "cuda", versions, ""),
        Err(error) => finding(Level::Warning, "cuda", error.to_string(), ""),
    }];
    if count == 0 {
        let found = "the driver sees no card".to_string();
        let remedy = "nvidia-smi must list it; docker run --gpus all";
        findings.push(finding(Level::Warning, "gpu", found, remedy));
    }
    for ordinal in 0..count {
        let subject = format!("cuda:{ordinal}");
        let read = cuda::Card::read(ordinal);
        // A card without room for a context is there and serves nobody.
        findings.push(match read.and_then(|card| Ok((card.free_bytes()?, card))) {
            Ok((free, card)) => {
                let (major, minor) = card.capability;
                let free = bytes_text(free);
                let found = format!(
                    "{}, compute capability {major}.{minor} (bf16), {} multiprocessors, {} of \
                     memory, {free} free",
                    card.name,
                    card.multiprocessors,
                    bytes_text(card.memory_bytes),
                );
                finding(Level::Good, &subject, found, "")
            }
            Err(error) => finding(Level::Bad, &subject, error.to_string(), ""),
        });
    }
    findings
}

/// Rates of the CPU device, and of the first card where there is one. That it fails is a finding.
fn rates(findings: &mut Vec<Finding>) -> Result<Vec<(String, Rates)>> {
    let cpu = DeviceProfile::cpu();
    let mut rates = vec![(cpu.name.clone(), measure_rates(&cpu)?)];
    let (profile, _) = choose_device("auto", Precision::Bf16)?;
    if profile.card.is_some() {
        match measure_rates(&profile) {
            Ok(measured) => rates.push((profile.name.clone(), measured)),
            Err(error) => findings.push(Finding {
                level: Level::Bad,
                subject: format!("rates of {}", profile.name),
                found: error.to_string(),
                remedy: String::new(),
            }),
        }
    }
    Ok(rates)
}
