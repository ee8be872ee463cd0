//! `terrace plan`: looking without training.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use terrace::config::{RunConfig, Size};
use terrace::error::{Error, Result};
use terrace::hf::{self, hub};
use terrace::measure::measure_rates;
use terrace::measure::profile::Profile;
use terrace::model::ModelSpec;
use terrace::plan::{Budgets, DeviceProfile, Plan, bytes_text, count_text};
use terrace::schedule::Schedule;
use terrace::schedule::choose::fastest;
use terrace::schedule::simulate::{Prediction, Rates, ZstdRates};
use terrace::suggest::{self, Question, Steps, suggest};
use terrace::train::{Budget, choose_device, model_dir, resolve_budgets};

use crate::{RunFile, say};

/// Arguments of `terrace plan`.
#[derive(Args)]
pub(crate) struct PlanArguments {
    /// The run's file
    #[arg(required_unless_present = "model")]
    run: Option<PathBuf>,
    /// Instead of a run's file: a model by its directory, its config.json or its name on the hub,
    /// with every key at its default
    #[arg(long, conflicts_with = "run", value_name = "NAME|PATH")]
    model: Option<PathBuf>,
    /// Change a value: --set train.steps=20
    #[arg(long = "set", value_name = "TABLE.KEY=VALUE")]
    sets: Vec<String>,
    /// Where to compute: cpu, cuda:0, or auto (a card if there is one). cuda with --device-memory
    /// is a card that need not be there
    #[arg(long, default_value = "auto")]
    device: String,
    /// Say which micro-batches, which step and which memory fit, fastest first; applies nothing
    #[arg(long)]
    suggest: bool,
    /// Of the suggestions, the row whose lines are printed or written
    #[arg(long, requires = "suggest", value_name = "ROW")]
    row: Option<usize>,
    /// Write the run with the suggestion to this file, which must not exist
    #[arg(long, requires = "suggest", value_name = "FILE")]
    write: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Print the schedule of a step, an action a line
    #[arg(long, conflicts_with = "suggest")]
    schedule: bool,
    /// Plan for a device of this much memory: a GPU that need not be there, or --device cpu: 24GB
    #[arg(long, value_name = "SIZE")]
    device_memory: Option<String>,
    /// Plan for this much host memory: 128GB
    #[arg(long, value_name = "SIZE")]
    host_memory: Option<String>,
    /// Plan for this much room in the store: 2TB
    #[arg(long, value_name = "SIZE", visible_alias = "store-size")]
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

/// What is planned, and for what.
struct Asked {
    config: RunConfig,
    spec: ModelSpec,
    profile: DeviceProfile,
    budget: Budget,
    rates: Rates,
}

/// Runs `terrace plan`.
pub(crate) fn plan(arguments: &PlanArguments) -> Result<()> {
    let asked = read(arguments)?;
    match arguments.suggest {
        true => suggestions(arguments, asked),
        false => show(arguments, &asked),
    }
}

/// The run and the machine, with what the command line puts in their places.
fn read(arguments: &PlanArguments) -> Result<Asked> {
    let (mut config, spec) = read_model(arguments)?;
    let memory = &mut config.memory;
    if let Some(text) = &arguments.device_memory {
        memory.device = Size::Bytes(size("--device-memory", text)?);
    }
    if let Some(text) = &arguments.host_memory {
        memory.host = Size::Bytes(size("--host-memory", text)?);
    }
    let (profile, sentence, otherwise) = device(arguments, &config)?;
    let mut budget = resolve_budgets(&spec, &config, &profile)?;
    budget.sentences.splice(0..0, sentence);
    if let Some(text) = &arguments.store_space {
        budget.budgets.store = size("--store-space", text)?;
    }
    let measured = arguments.profile.as_ref();
    let measured = measured.or(config.memory.profile.as_ref());
    let (mut rates, notes) = rates_of(measured, otherwise, &profile, &budget.store)?;
    budget.sentences.extend(notes);
    override_rates(arguments, &mut rates)?;
    Ok(Asked {
        config,
        spec,
        profile,
        budget,
        rates,
    })
}

/// The run's file with its model; or all defaults for the model that --model names.
fn read_model(arguments: &PlanArguments) -> Result<(RunConfig, ModelSpec)> {
    let sets = arguments.sets.clone();
    let Some(model) = &arguments.model else {
        let run = arguments.run.clone().expect("clap asks for one of the two");
        let config = RunFile { run, sets }.read()?;
        let (spec, _) = hf::read_config(model_dir(&config)?)?;
        return Ok((config, spec));
    };
    // Nothing is known of the data: its place is that of the template.
    let start =
        "[model]\npath = \".\"\n[data]\ntrain = \"data/train.jsonl\"\n[train]\nsteps = 1000\n";
    let mut config = RunConfig::parse(start, "--model", &sets)?;
    let is_file = model.file_name().is_some_and(|name| name == "config.json") || model.is_file();
    if !is_file {
        let path = hub::resolve(model)?;
        let (spec, _) = hf::read_config(&path)?;
        config.model.path = Some(path);
        return Ok((config, spec));
    }
    let text = std::fs::read_to_string(model).map_err(|e| Error::io("read", model, e))?;
    let spec = ModelSpec::from_config_json(&text, &model.display().to_string())?;
    let folder = model
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    config.model.path = Some(folder.unwrap_or(Path::new(".")).to_path_buf());
    Ok((config, spec))
}

/// The device, a sentence about it where it was looked for, and rates where it need not be there.
fn device(
    arguments: &PlanArguments,
    config: &RunConfig,
) -> Result<(DeviceProfile, Option<String>, Option<Rates>)> {
    let precision = config.model.precision;
    let wanted = arguments.device.as_str();
    let absent = || {
        let gpu = DeviceProfile::cuda("gpu", 0, precision);
        (gpu, None, Some(gpu_rates()))
    };
    // Device memory on the command line means a GPU, and rates of a server with one.
    if wanted != "cpu" && arguments.device_memory.is_some() {
        if wanted != "auto" && !wanted.starts_with("cuda") {
            choose_device(wanted, precision)?;
        }
        return Ok(absent());
    }
    match choose_device(wanted, precision) {
        Ok((profile, sentence)) => Ok((profile, Some(sentence), None)),
        // Sizes in the file serve as well.
        Err(Error::Device { .. }) if matches!(config.memory.device, Size::Bytes(_)) => Ok(absent()),
        Err(Error::Device {
            device,
            call,
            message,
            during,
            ..
        }) => Err(Error::Device {
            device,
            call,
            message,
            during,
            remedy: "; to plan for a card that is not here, add --device-memory 24GB".to_string(),
        }),
        Err(error) => Err(error),
    }
}

/// Prints the plan of the run as it is.
fn show(arguments: &PlanArguments, asked: &Asked) -> Result<()> {
    let Asked {
        config,
        spec,
        profile,
        budget,
        rates,
    } = asked;
    let (plan, prediction) = fastest(spec, config, profile, budget.budgets, rates)?;
    if arguments.json {
        return say(&format!("{:#}", plan.json(&prediction, rates)));
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
    say(&plan.table(&prediction, rates))?;
    what_if(
        spec,
        config,
        profile,
        budget.budgets,
        rates,
        (&plan, &prediction),
    )?;
    match arguments.schedule {
        true => list(&Schedule::train(&plan)),
        false => Ok(()),
    }
}

/// Prints what fits, fastest first, and the lines of one of them.
fn suggestions(arguments: &PlanArguments, asked: Asked) -> Result<()> {
    let budgets = asked.budget.budgets;
    let any_store = arguments.store_space.is_none() && asked.config.memory.store.is_empty();
    let steps = match arguments.model {
        Some(_) => Steps::Any,
        None => Steps::Run,
    };
    let rows = suggest(&Question {
        spec: &asked.spec,
        config: &asked.config,
        device: &asked.profile,
        budgets: (
            budgets.device,
            budgets.host,
            (!any_store).then_some(budgets.store),
        ),
        rates: &asked.rates,
        steps,
    })?;
    let preferred = suggest::preferred(&rows, &asked.config, steps);
    let chosen = arguments.row.unwrap_or(preferred + 1);
    let Some(row) = chosen.checked_sub(1).and_then(|index| rows.get(index)) else {
        let expected = format!("a row from 1 to {}", rows.len());
        let got = chosen.to_string();
        return Err(Error::input(
            "arguments",
            "--row",
            expected,
            got,
            "name one",
        ));
    };
    if let Some(path) = &arguments.write {
        write_new(path, &row.config.to_toml())?;
    }
    if arguments.json {
        return say(&format!("{:#}", suggest::json(&rows)));
    }
    for sentence in &asked.budget.sentences {
        say(sentence)?;
    }
    say(&format!(
        "{} parameters on {}, sequences of {}; device, host and store in GiB, predicted:",
        count_text(row.plan.parameters),
        asked.profile.name,
        asked.config.data.seq_len
    ))?;
    say(&suggest::table(&rows))?;
    if any_store && rows.iter().any(|row| row.plan.spills()) {
        say("the run names no store: rows with one need a directory on NVMe with that much room")?;
    }
    say(&format!("row {chosen}{}:\n", meaning(row, steps)))?;
    say(&row.toml())?;
    match &arguments.write {
        Some(path) => say(&format!("{}: written", path.display())),
        None => say("nothing was changed; --row N shows another's lines, --write FILE a whole run"),
    }
}

/// What a row means to the training.
fn meaning(row: &suggest::Suggestion, steps: Steps) -> &'static str {
    match (steps, row.same_training) {
        (Steps::Run, true) => {
            ", the run's own sequences a step and clipping: only the order of sums differs"
        }
        (Steps::Run, false) => ", another training than the run's: its step or clipping differs",
        (Steps::Any, _) => "; the step's size and clipping are yours to choose",
    }
}

fn write_new(path: &Path, text: &str) -> Result<()> {
    let made = std::fs::File::create_new(path);
    let written = made.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|source| Error::Io {
        action: "write",
        path: path.to_path_buf(),
        source,
        remedy: "; --write makes a new file".to_string(),
    })
}

/// What other settings would change, as the same simulation predicts.
fn what_if(
    spec: &ModelSpec,
    config: &RunConfig,
    profile: &DeviceProfile,
    budgets: Budgets,
    rates: &Rates,
    (plan, now): (&Plan, &Prediction),
) -> Result<()> {
    if let Some(without) = without_stored_anchors(spec, config, profile, budgets, plan) {
        let tokens = |config: &RunConfig| config.train.micro_batch * config.train.micro_batches;
        let share = 100.0 * tokens(&without) as f64 / tokens(config) as f64;
        say(&format!(
            "  with train.micro_batch = {} and train.micro_batches = {}, {share:.0} % of the \
             tokens a step, no anchors would go to the store",
            without.train.micro_batch, without.train.micro_batches
        ))?;
    }
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
            bytes_text(plan.store_bytes()),
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

/// The run with as many sequences a micro-batch, else as many micro-batches, as keep all anchors
/// out of the store; `None` where none have to be there or one sequence is too much.
fn without_stored_anchors(
    spec: &ModelSpec,
    config: &RunConfig,
    profile: &DeviceProfile,
    budgets: Budgets,
    plan: &Plan,
) -> Option<RunConfig> {
    if plan.stored_anchors == 0 || plan.anchors_by_choice {
        return None;
    }
    let fits = |config: &RunConfig| {
        let plan = Plan::fitting(spec, config, profile, budgets);
        plan.is_ok_and(|plan| plan.stored_anchors == 0)
    };
    let largest = |most: u64, set: &dyn Fn(&mut RunConfig, u64)| {
        let with = |count| {
            let mut other = config.clone();
            set(&mut other, count);
            other
        };
        // All counts up to `low` fit, those from `high` on do not.
        let (mut low, mut high) = (0, most);
        while high - low > 1 {
            let middle = low.midpoint(high);
            match fits(&with(middle)) {
                true => low = middle,
                false => high = middle,
            }
        }
        (low > 0).then(|| with(low))
    };
    largest(config.train.micro_batch, &|c, count| {
        c.train.micro_batch = count
    })
    .or_else(|| {
        largest(config.train.micro_batches, &|c, count| {
            c.train.micro_batches = count
        })
    })
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

/// GPU servers as measured: H200, PCIe 5, 16 cores, one cloud disk; AdamW is the middle of several.
fn gpu_rates() -> Rates {
    Rates {
        gemm: 650e12,
        attention: 350e12,
        passes: 3.5e12,
        promote: 55e9,
        demote: 55e9,
        store_read: 1.7e9,
        store_write: 2.3e9,
        store_mixed: 1.7e9,
        adamw: 5.2e9,
        shared_cores: false,
        cores: 16,
        zstd: ZstdRates::ASSUMED,
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
