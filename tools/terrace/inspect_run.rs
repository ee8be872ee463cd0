//! `terrace plan`, `terrace doctor`: looking without training.

use std::path::PathBuf;

use clap::Args;
use terrace::config::{RunConfig, Size};
use terrace::device::cuda;
use terrace::error::{Error, Result};
use terrace::hf;
use terrace::machine::{self, HostMemory};
use terrace::measure::measure_rates;
use terrace::measure::profile::Profile;
use terrace::model::ModelSpec;
use terrace::optimizer::Isa;
use terrace::plan::{Budgets, DeviceProfile, bytes_text, count_text};
use terrace::schedule::Schedule;
use terrace::schedule::simulate::{Prediction, Rates, fastest};
use terrace::tile::Precision;
use terrace::train::{choose_device, model_dir, resolve_budgets};

use crate::{RunFile, say};

/// Arguments of `terrace plan`.
#[derive(Args)]
pub(crate) struct PlanArguments {
    #[command(flatten)]
    file: RunFile,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Print the schedule of a step, an action a line
    #[arg(long)]
    schedule: bool,
    /// Plan for a GPU of this much memory that need not be there: 24GB
    #[arg(long, value_name = "SIZE")]
    device_memory: Option<String>,
    /// Plan for this much host memory: 128GB
    #[arg(long, value_name = "SIZE")]
    host_memory: Option<String>,
    /// Plan for this much room in the store: 2TB
    #[arg(long, value_name = "SIZE")]
    store_space: Option<String>,
    /// Host to device and back, bytes a second: 55GB
    #[arg(long, value_name = "SIZE/s")]
    pcie: Option<String>,
    /// Matrix products of the device, TFLOP/s
    #[arg(long, value_name = "TFLOPS")]
    gemm: Option<f64>,
    /// Rates of this machine or another: a file that `terrace-bench profile` wrote
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Store reads, bytes a second: 6GB
    #[arg(long, value_name = "SIZE/s")]
    disk_read: Option<String>,
    /// Store writes, bytes a second: 5GB
    #[arg(long, value_name = "SIZE/s")]
    disk_write: Option<String>,
    /// AdamW, 10⁹ parameters a second
    #[arg(long, value_name = "G")]
    adamw: Option<f64>,
}

fn size(flag: &str, text: &str) -> Result<u64> {
    match Size::parse(text.trim_end_matches("/s"), flag)? {
        Size::Bytes(bytes) => Ok(bytes),
        Size::Auto => Err(Error::input(
            "arguments",
            flag,
            "a size with a unit",
            "auto",
            "write 24GB",
        )),
    }
}

/// Runs `terrace plan`.
pub(crate) fn plan(arguments: &PlanArguments) -> Result<()> {
    let mut config = arguments.file.read()?;
    let (spec, _) = hf::read_config(model_dir(&config)?)?;
    // A plan needs no card: what the command line leaves out is this machine's as without one.
    let cpu = DeviceProfile::cpu();
    let memory = &mut config.memory;
    if let Some(text) = &arguments.device_memory {
        memory.device = Size::Bytes(size("--device-memory", text)?);
    }
    if let Some(text) = &arguments.host_memory {
        memory.host = Size::Bytes(size("--host-memory", text)?);
    }
    // Device memory on the command line means a GPU, and rates of a server with one.
    let (profile, otherwise) = if arguments.device_memory.is_some() {
        let precision = config.model.precision;
        (DeviceProfile::cuda("gpu", 0, precision), Some(gpu_rates()))
    } else {
        (cpu, None)
    };
    let mut budget = resolve_budgets(&spec, &config, &profile)?;
    if let Some(text) = &arguments.store_space {
        budget.budgets.store = size("--store-space", text)?;
    }
    let measured = arguments.profile.as_ref();
    let measured = measured.or(config.memory.profile.as_ref());
    let (mut rates, notes) = rates_of(measured, otherwise, &profile, &budget.store)?;
    budget.sentences.extend(notes);
    override_rates(arguments, &mut rates)?;
    let (plan, prediction) = fastest(&spec, &config, &profile, budget.budgets, &rates)?;
    let schedule = Schedule::train(&plan);
    if arguments.json {
        return say(&format!("{:#}", plan.json(&prediction, &rates)));
    }
    for sentence in &budget.sentences {
        say(sentence)?;
    }
    say(&format!(
        "{} parameters on {}, {}",
        count_text(plan.parameters),
        profile.name,
        match (plan.clipping, plan.deferred_layers()) {
            (true, _) => "gradients wait for the norm (max_grad_norm > 0)".to_string(),
            (false, 0) => "no clipping: a layer is updated as its gradient arrives".to_string(),
            (false, deferred) => format!(
                "no clipping: {deferred} of {} layers are updated under the next forward, the \
                 others as their gradients arrive",
                plan.layer_count()
            ),
        }
    ))?;
    say(&plan.table(&prediction, &rates))?;
    what_if(
        &spec,
        &config,
        &profile,
        budget.budgets,
        &rates,
        &prediction,
    )?;
    match arguments.schedule {
        true => list(&schedule),
        false => Ok(()),
    }
}

/// What other settings would change, as the same simulation predicts.
fn what_if(
    spec: &ModelSpec,
    config: &RunConfig,
    profile: &DeviceProfile,
    budgets: Budgets,
    rates: &Rates,
    now: &Prediction,
) -> Result<()> {
    let other = |what: &str, config: &RunConfig, budgets: Budgets| -> Result<()> {
        let Ok((plan, prediction)) = fastest(spec, config, profile, budgets, rates) else {
            return Ok(());
        };
        let rate = |p: &Prediction| p.tokens as f64 / p.step_seconds;
        let gain = 100.0 * (rate(&prediction) / rate(now) - 1.0);
        if gain.abs() < 1.0 {
            return Ok(());
        }
        say(&format!(
            "  {what}: {:.3} s a step, {:.0} tokens/s ({gain:+.0} %), {} spilled",
            prediction.step_seconds,
            rate(&prediction),
            bytes_text(plan.spilled_bytes),
        ))
    };
    let mut changed = config.clone();
    if config.train.max_grad_norm > 0.0 {
        changed.train.max_grad_norm = 0.0;
        other(
            "without clipping (train.max_grad_norm = 0)",
            &changed,
            budgets,
        )?;
        changed = config.clone();
    }
    changed.train.micro_batches *= 2;
    other("with train.micro_batches doubled", &changed, budgets)?;
    for (what, more) in [
        ("with a quarter more memory.host", [0, 1]),
        ("with a quarter more memory.device", [1, 0]),
    ] {
        let [device, host] = more;
        let more = Budgets {
            device: budgets.device.saturating_add(budgets.device / 4 * device),
            host: budgets.host.saturating_add(budgets.host / 4 * host),
            ..budgets
        };
        other(what, config, more)?;
    }
    Ok(())
}

/// Prints every action with its lane and what it waits for.
fn list(schedule: &Schedule) -> Result<()> {
    for (index, scheduled) in schedule.actions.iter().enumerate() {
        let after: Vec<String> = scheduled
            .after
            .iter()
            .map(|a| format!("{}{}", if a.previous { "-" } else { "" }, a.action))
            .collect();
        say(&format!(
            "{index:5} {:8} {:?} after [{}]",
            format!("{:?}", scheduled.lane),
            scheduled.action,
            after.join(" ")
        ))?;
    }
    Ok(())
}

/// Rates of a profile where there is one; else those given, or this machine's.
fn rates_of(
    measured: Option<&PathBuf>,
    otherwise: Option<Rates>,
    device: &DeviceProfile,
    store: &[(PathBuf, u64)],
) -> Result<(Rates, Vec<String>)> {
    match (measured, otherwise) {
        (Some(path), _) => Profile::read(path)?.rates(path, device, store),
        (None, Some(rates)) => Ok((rates, Vec::new())),
        (None, None) => Ok((measure_rates(device)?, Vec::new())),
    }
}

/// A GPU server as measured once: H200, PCIe 5, 16 cores, one cloud disk.
fn gpu_rates() -> Rates {
    Rates {
        gemm: 650e12,
        promote: 55e9,
        demote: 55e9,
        store_read: 1.7e9,
        store_write: 2.3e9,
        store_mixed: Rates::mixed_of(1.7e9, 2.3e9),
        adamw: 4.2e9,
        shared_cores: false,
    }
}

fn override_rates(arguments: &PlanArguments, rates: &mut Rates) -> Result<()> {
    let replaced = |flag, text: &Option<String>, to: &mut f64| -> Result<()> {
        if let Some(text) = text {
            *to = size(flag, text)? as f64;
        }
        Ok(())
    };
    replaced("--pcie", &arguments.pcie, &mut rates.promote)?;
    replaced("--pcie", &arguments.pcie, &mut rates.demote)?;
    replaced("--disk-read", &arguments.disk_read, &mut rates.store_read)?;
    replaced(
        "--disk-write",
        &arguments.disk_write,
        &mut rates.store_write,
    )?;
    if arguments.disk_read.is_some() || arguments.disk_write.is_some() {
        rates.store_mixed = Rates::mixed_of(rates.store_read, rates.store_write);
    }
    let factor = |flag: &str, value: Option<f64>, unit: f64, to: &mut f64| match value {
        Some(value) if !(value.is_finite() && value > 0.0) => {
            let got = value.to_string();
            Err(Error::input(
                "arguments",
                flag,
                "a number above 0",
                got,
                "correct it",
            ))
        }
        Some(value) => {
            *to = value * unit;
            Ok(())
        }
        None => Ok(()),
    };
    factor("--gemm", arguments.gemm, 1e12, &mut rates.gemm)?;
    factor("--adamw", arguments.adamw, 1e9, &mut rates.adamw)
}

/// Arguments of `terrace doctor`.
#[derive(Args)]
pub(crate) struct DoctorArguments {
    /// Directory to look at as a store
    #[arg(long, default_value = ".")]
    store: PathBuf,
}

/// Runs `terrace doctor`.
pub(crate) fn doctor(arguments: &DoctorArguments) -> Result<()> {
    let memory = HostMemory::read();
    let cores = machine::cores();
    say(&format!(
        "cores: {cores}{}",
        if cores < 4 {
            " (few: AdamW and GEMM share them)"
        } else {
            ""
        }
    ))?;
    say(&format!(
        "simd: {:?} for AdamW, chosen at run time",
        Isa::detect()
    ))?;
    say(&format!(
        "memory available: {}",
        bytes_text(memory.available)
    ))?;
    if let Some(left) = memory.cgroup_left {
        say(&format!("memory cgroup leaves: {}", bytes_text(left)))?;
    }
    say(&format!(
        "memory.host = auto would be: {}",
        bytes_text(memory.auto())
    ))?;
    let pages = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    let pages = pages.unwrap_or_else(|_| "unknown".to_string());
    let remedy = if pages.contains("[never]") {
        "; echo madvise > /sys/kernel/mm/transparent_hugepage/enabled speeds AdamW up"
    } else {
        ""
    };
    say(&format!("transparent huge pages: {}{remedy}", pages.trim()))?;
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    if let Some(line) = limits
        .lines()
        .find(|line| line.starts_with("Max locked memory"))
    {
        let words: Vec<&str> = line.split_whitespace().collect();
        let limit = words.get(3).copied().unwrap_or("unknown");
        say(&format!(
            "locked memory limit: {limit} bytes; io_uring buffers are registered within it"
        ))?;
    }
    say(&format!(
        "store {}: {} free",
        arguments.store.display(),
        bytes_text(machine::free_bytes(&arguments.store))
    ))?;
    let probe = terrace::store::disk::probe(&arguments.store, None)?;
    say(&probe.sentence)?;
    if let Some(warning) = &probe.warning {
        say(warning)?;
    }
    say_rates(&DeviceProfile::cpu())?;
    doctor_cuda()
}

/// Libraries and cards, and what a missing one needs.
fn doctor_cuda() -> Result<()> {
    for line in cuda::library::report() {
        say(&line)?;
    }
    let count = match cuda::card_count() {
        Ok(count) => count,
        Err(error) => return say(&format!("gpu: none is used; {error}")),
    };
    say(&cuda::versions()?)?;
    if count == 0 {
        say("gpu: the driver sees no card; the CPU device trains small models")?;
    }
    for ordinal in 0..count {
        match cuda::Card::read(ordinal) {
            Ok(card) => say(&format!(
                "cuda:{ordinal}: {}, compute capability {}.{}, {} multiprocessors, {} of memory, \
                 {} free",
                card.name,
                card.capability.0,
                card.capability.1,
                card.multiprocessors,
                bytes_text(card.memory_bytes),
                bytes_text(card.free_bytes()?)
            ))?,
            Err(error) => say(&format!("cuda:{ordinal}: {error}"))?,
        }
    }
    // A card that fails here would fail a run: the error says why.
    let (profile, _) = choose_device("auto", Precision::Bf16)?;
    if profile.card.is_some() {
        say_rates(&profile)?;
    }
    Ok(())
}

fn say_rates(profile: &DeviceProfile) -> Result<()> {
    let rates = measure_rates(profile)?;
    say(&format!(
        "measured on {}: GEMM {:.0} GFLOP/s, copy {:.1} GB/s, AdamW {:.2} G parameters/s",
        profile.name,
        rates.gemm / 1e9,
        rates.promote / 1e9,
        rates.adamw / 1e9
    ))
}
