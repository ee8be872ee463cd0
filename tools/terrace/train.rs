//! `terrace train`.

use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGKILL, SIGTERM};
use terrace::checkpoint::{Best, checkpoint_dir};
use terrace::config::RunConfig;
use terrace::data::quickstart::unigram_entropy;
use terrace::error::{Error, Result};
use terrace::host::pool::keep_near;
use terrace::log::page;
use terrace::machine::Cores;
use terrace::machine::limits::{self, Need, Root};
use terrace::measure::measure_rates;
use terrace::measure::profile::Profile;
use terrace::plan::{DeviceProfile, Plan, bytes_text, count_text};
use terrace::schedule::choose::fastest;
use terrace::schedule::simulate::{Prediction, Rates};
use terrace::train::{
    Budget, Comparison, Evaluation, Run, Sample, Spike, Start, StepReport, Trainer, choose_device,
    resolve_budgets,
};
use terrace::{machine, quickstart};

use crate::kill_at;

/// Arguments of `terrace train`.
#[derive(Args)]
pub(crate) struct TrainArguments {
    /// The run's file; not with --quickstart
    #[arg(required_unless_present = "quickstart")]
    run: Option<PathBuf>,
    /// Train the embedded small model on the embedded text: no file, no network, two minutes
    #[arg(long, conflicts_with = "run", value_name = "DIRECTORY", num_args = 0..=1,
          default_missing_value = quickstart::DIRECTORY)]
    quickstart: Option<PathBuf>,
    /// Change a value: --set train.steps=20
    #[arg(long = "set", value_name = "TABLE.KEY=VALUE")]
    sets: Vec<String>,
    /// Where to compute: cpu, cuda:0, or auto (a card if there is one)
    #[arg(long, default_value = "auto")]
    device: String,
    /// Go on from the last commit, or from that of STEP
    #[arg(long, value_name = "STEP", num_args = 0..=1, require_equals = true,
          default_missing_value = "latest")]
    resume: Option<String>,
    /// Let data, seed or batch differ from the run that is resumed; the model's shapes and its
    /// precision cannot
    #[arg(long, requires = "resume")]
    resume_changed: bool,
    /// Write a Chrome trace of every action to this file
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Send a signal to this process at an instant of the run, for tests
    #[arg(long, hide = true, value_name = "INSTANT")]
    kill_at: Option<kill_at::Instant>,
    /// The signal
    #[arg(long, hide = true, value_name = "NUMBER", default_value_t = SIGKILL)]
    kill_signal: i32,
}

/// Set by the first SIGINT, SIGTERM or SIGHUP; a second one ends the process at once.
pub(crate) fn watch_signals() -> Result<Arc<AtomicI32>> {
    let signal = Arc::new(AtomicI32::new(0));
    let seen = Arc::new(std::sync::atomic::AtomicBool::new(false));
    for number in [SIGINT, SIGTERM, SIGHUP] {
        let watch = || -> std::io::Result<()> {
            let code = 128 + number;
            signal_hook::flag::register_conditional_shutdown(number, code, seen.clone())?;
            signal_hook::flag::register(number, seen.clone())?;
            Ok(())
        };
        watch().map_err(|e| Error::io("watch signals", "process".as_ref(), e))?;
        let noted = signal.clone();
        let mut signals = signal_hook::iterator::Signals::new([number])
            .map_err(|e| Error::io("watch signals", "process".as_ref(), e))?;
        std::thread::spawn(move || {
            for number in signals.forever() {
                noted.store(number, Ordering::Relaxed);
            }
        });
    }
    Ok(signal)
}

/// Chooses the device and, before anything starts the threads of arithmetic, binds them if that can
/// help; says both.
fn choose(device: &str, config: &RunConfig) -> Result<DeviceProfile> {
    let cores = Cores::read();
    let given = std::env::var_os("RAYON_NUM_THREADS").is_some();
    if let Some(cpus) = cores.pins().filter(|_| !given) {
        keep_near(cpus)?;
    }
    let (profile, sentence) = choose_device(device, config.precision())?;
    say(&sentence)?;
    say(&cores.sentence())?;
    if let Some(warning) = cores.warning() {
        say(&warning)?;
    }
    Ok(profile)
}

/// Runs the command.
pub(crate) fn train(arguments: &TrainArguments) -> Result<()> {
    let start = parse_start(arguments.resume.as_deref())?;
    let config = read_config(arguments)?;
    let trace_file = arguments.trace.as_deref();
    let trace_file = trace_file.map(TraceFile::open).transpose()?;
    let profile = choose(&arguments.device, &config)?;
    let signal = watch_signals()?;
    let run = Run::prepare(config)?;
    describe(&run)?;
    let budget = resolve_budgets(&run.spec, &run.config, &profile)?;
    for sentence in &budget.sentences {
        say(sentence)?;
    }
    let rates = rates_of(&run, &profile, &budget)?;
    let (plan, prediction) = fastest(&run.spec, &run.config, &profile, budget.budgets, &rates)?;
    say_plan(&plan, &prediction, &rates)?;
    let entropy = held_out_entropy(&run);
    let mut trainer = Trainer::start(
        run,
        plan,
        &budget,
        start,
        arguments.resume_changed,
        arguments.trace.is_some(),
    )?;
    for note in trainer.notes() {
        say(note)?;
    }
    for sentence in trainer.show(&prediction, &rates)? {
        say(&sentence)?;
    }
    if let Some(instant) = &arguments.kill_at {
        instant.arm(&mut trainer, arguments.kill_signal);
    }
    let ended = steps(&mut trainer, &prediction, entropy, &signal);
    if let Some(warning) = trainer.take_warning() {
        say(&warning)?;
    }
    let moved = machine_line();
    let log_dir = trainer.run().config.log.dir.clone();
    let checkpoint_dir = checkpoint_dir(&trainer.run().config);
    let (last_commit, step) = (trainer.last_commit(), trainer.steps_done());
    let best = trainer
        .best()
        .filter(|_| trainer.run().config.checkpoint.keep_best);
    let trace = ended.and_then(move |()| trainer.finish());
    // Of what failed too.
    write_report(&log_dir)?;
    let trace = trace?;
    if let (Some(file), Some(trace)) = (trace_file, trace) {
        file.write(&trace)?;
    }
    say(&moved)?;
    say(&format!(
        "metrics: {}",
        log_dir.join("metrics.jsonl").display()
    ))?;
    if let Some(step) = last_commit {
        say_commit(step, &checkpoint_dir, best)?;
    }
    match signal.load(Ordering::Relaxed) {
        0 => Ok(()),
        signal => Err(Error::Interrupted { signal, step }),
    }
}

/// The machine's rates, from the run's profile or measured.
fn rates_of(run: &Run, profile: &DeviceProfile, budget: &Budget) -> Result<Rates> {
    let Some(path) = &run.config.memory.profile else {
        return measure_rates(profile);
    };
    let (rates, notes) = Profile::read(path)?.rates(path, profile, &budget.store)?;
    for note in notes {
        say(&note)?;
    }
    Ok(rates)
}

/// Writes the page of a run that has ended; without it the run is as complete as with it.
fn write_report(log_dir: &Path) -> Result<()> {
    match page::write(log_dir, None) {
        Ok(path) => say(&format!("report: {}", path.display())),
        Err(error) => say(&format!("warning: {error}; the run has no report")),
    }
}

/// The trace's file. One that was made and stays empty, as that of a run which is refused, is
/// removed.
struct TraceFile {
    path: PathBuf,
    file: File,
    made: bool,
}

impl TraceFile {
    /// Opens the file before anything is trained, so that a path that cannot be written is refused
    /// at once. What it holds stays until the trace is complete.
    fn open(path: &Path) -> Result<TraceFile> {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(|e| Error::io("make", parent, e))?;
        }
        let made = path.symlink_metadata().is_err();
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).open(path);
        let file = file.map_err(|e| Error::io("create", path, e))?;
        let path = path.to_path_buf();
        Ok(TraceFile { path, file, made })
    }

    fn write(mut self, trace: &str) -> Result<()> {
        // A pipe has no length to cut.
        let cut = match self.file.metadata() {
            Ok(found) if found.is_file() => self.file.set_len(0),
            _ => Ok(()),
        };
        let written = cut.and_then(|()| self.file.write_all(trace.as_bytes()));
        written.map_err(|e| Error::io("write", &self.path, e))?;
        say(&format!("trace: {}", self.path.display()))
    }
}

impl Drop for TraceFile {
    fn drop(&mut self) {
        let is_empty = self.file.metadata().is_ok_and(|found| found.len() == 0);
        if self.made && is_empty {
            std::fs::remove_file(&self.path).ok();
        }
    }
}

/// Prints a line. A run goes on when the reader of its output has gone away: what it computes is
/// in its commits and metrics.
fn say(line: &str) -> Result<()> {
    match crate::say(line) {
        Err(error) if error.is_broken_pipe() => Ok(()),
        said => said,
    }
}

/// What the kernel counts for this process.
fn machine_line() -> String {
    let (read, written) = machine::storage_bytes();
    format!(
        "peak memory {}; read from disk {}, written {} (as the kernel counts)",
        bytes_text(machine::peak_memory()),
        bytes_text(read),
        bytes_text(written)
    )
}

fn say_commit(step: u64, directory: &Path, best: Option<Best>) -> Result<()> {
    let checkpoint = directory.display();
    say(&format!(
        "commit of step {step}: {checkpoint}; \
         `terrace export --checkpoint {checkpoint} --out DIR` writes it for transformers, \
         `terrace generate --checkpoint {checkpoint}` talks to it"
    ))?;
    let Some(Best { step, loss }) = best else {
        return Ok(());
    };
    say(&format!(
        "best: step {step}, held-out loss {loss:.4}; with --best both take its commit"
    ))
}

fn parse_start(resume: Option<&str>) -> Result<Start> {
    match resume {
        None => Ok(Start::Fresh),
        Some("latest") => Ok(Start::Latest),
        Some(step) => step.parse().map(Start::Step).map_err(|_| {
            let expected = "a step that is committed";
            Error::input(
                "arguments",
                "--resume",
                expected,
                step,
                "write --resume or --resume=100",
            )
        }),
    }
}

fn read_config(arguments: &TrainArguments) -> Result<RunConfig> {
    if let Some(directory) = &arguments.quickstart {
        return quickstart::write(directory, &arguments.sets);
    }
    let run = arguments.run.clone().expect("clap asks for one of the two");
    crate::RunFile {
        run,
        sets: arguments.sets.clone(),
    }
    .read_for(true)
}

fn describe(run: &Run) -> Result<()> {
    let stats = run.dataset.stats();
    say(&format!(
        "model: {} parameters, {} blocks of {}, vocabulary {}, {:?}",
        count_text(run.spec.parameters()),
        run.spec.blocks,
        run.spec.hidden,
        run.spec.vocab_size,
        run.spec.family,
    ))?;
    say(&format!(
        "data: {} rows, {} tokens, {} of them trained on; {} sequences of at most {} an epoch, \
         {:.1} % full{}",
        stats.rows,
        stats.tokens,
        stats.targets,
        run.sequences(),
        run.config.data.seq_len,
        100.0 * run.packing_efficiency(),
        stats.without_targets_text(),
    ))?;
    let train = &run.config.train;
    say(&format!(
        "steps: {}, each {} micro-batches of {} sequences",
        run.total_steps, train.micro_batches, train.micro_batch
    ))
}

/// Prints the plan, and once what of this machine limits it.
fn say_plan(plan: &Plan, prediction: &Prediction, rates: &Rates) -> Result<()> {
    say(&plan.table(prediction, rates))?;
    let host = &plan.host;
    let need = Need {
        rings: (host.slabs + host.commit_slabs) * host.slab_bytes,
        card: plan.device.card.is_some(),
        store: plan.spills() || plan.checkpoint_bytes > 0,
    };
    for finding in limits::for_run(&Root::here(), need) {
        say(&format!("warning: {finding}"))?;
    }
    Ok(())
}

/// Unigram entropy of the evaluation targets: what a guess without context loses.
fn held_out_entropy(run: &Run) -> Option<f64> {
    let targets: Vec<u32> = run
        .eval
        .iter()
        .flat_map(|micro| micro.targets.iter().copied())
        .filter(|target| *target != terrace::data::IGNORE)
        .collect();
    (!targets.is_empty()).then(|| unigram_entropy(&targets))
}

/// All steps that are left, with evaluations and commits between them.
fn steps(
    trainer: &mut Trainer,
    prediction: &Prediction,
    entropy: Option<f64>,
    signal: &AtomicI32,
) -> Result<()> {
    let (total, first) = (trainer.run().total_steps, trainer.steps_done());
    let console = Console::new(trainer, prediction);
    if let Some(entropy) = entropy {
        console.line(&format!(
            "unigram entropy of the held-out text: {entropy:.4} nats"
        ))?;
    }
    if trainer.run().config.checkpoint.every == 0 {
        console.line("warning: checkpoint.every = 0: nothing of this run survives a crash")?;
    }
    let mut comparison = Comparison::default();
    let is_left = |trainer: &Trainer| trainer.steps_done() < total && !trainer.stops_early();
    if !is_left(trainer) {
        let (done, why) = (
            trainer.steps_done(),
            match trainer.stops_early() {
                true => "train.early_stopping_patience is used up",
                false => "train.steps or train.epochs asks for no more",
            },
        );
        console.line(&format!("nothing to do: {done} steps are done, {why}"))?;
    }
    // An evaluation or a sample waits for the updates that would run under the next step.
    let mut is_whole = true;
    while is_left(trainer) && signal.load(Ordering::Relaxed) == 0 {
        let report = trainer.step()?;
        console.step(&report)?;
        console.spike(&report)?;
        if is_whole {
            comparison.add(&report);
        }
        is_whole = true;
        console.news(trainer)?;
        // First, so that its line is there whenever the commit is.
        if trainer.evaluation_is_due() || report.step == total {
            evaluate(trainer, &console)?;
            is_whole = trainer.run().eval.is_empty();
        }
        // Who sends a signal wants the run to end, not to talk.
        if trainer.samples_are_due() && signal.load(Ordering::Relaxed) == 0 {
            sample(trainer, &console)?;
            is_whole = false;
        }
        if trainer.commit_is_due() {
            trainer.commit()?;
        }
    }
    if trainer.stops_early() && trainer.steps_done() < total && trainer.steps_done() > first {
        console.line("early stopping: train.early_stopping_patience is used up")?;
    }
    if signal.load(Ordering::Relaxed) != 0 {
        console.line("signal: the step is complete; the run ends here")?;
    }
    trainer.commit()?;
    trainer.finish_commit()?;
    console.news(trainer)?;
    if let Some(table) = comparison.table(prediction) {
        console.line(&table)?;
    }
    console.bar.finish_and_clear();
    Ok(())
}

fn evaluate(trainer: &mut Trainer, console: &Console) -> Result<()> {
    let step = trainer.steps_done();
    let Some(Evaluation {
        loss,
        is_best,
        without_improvement,
    }) = trainer.evaluate()?
    else {
        return Ok(());
    };
    let best = if is_best { ", the best so far" } else { "" };
    let counted = trainer.run().config.train.early_stopping_patience > 0;
    let without = match counted && without_improvement > 0 {
        true => format!(", {without_improvement} in a row without an improvement"),
        false => String::new(),
    };
    let perplexity = loss.exp();
    console.line(&format!(
        "step {step}: held-out loss {loss:.4} nats, perplexity {perplexity:.2}{best}{without}"
    ))?;
    Ok(())
}

/// A bar on a terminal, plain lines elsewhere.
struct Console {
    bar: ProgressBar,
    terminal: bool,
    total: u64,
    started: Instant,
    first: u64,
    light_seconds: f64,
    /// Executed a step, recomputation too.
    flops: f64,
    parameters: f64,
    /// When a step was last printed, where there is no bar.
    said: Cell<Option<Instant>>,
}

/// Longest time without a line of a step, for logs that are read while they grow.
const SILENT_MAX: Duration = Duration::from_secs(60);

impl Console {
    fn new(trainer: &mut Trainer, prediction: &Prediction) -> Console {
        let (total, done) = (trainer.run().total_steps, trainer.steps_done());
        let parameters = trainer.run().spec.parameters();
        let shared_cores = trainer.engine().plan().device.card.is_none();
        let terminal = std::io::stderr().is_terminal();
        let bar = if terminal {
            ProgressBar::new(total)
        } else {
            ProgressBar::hidden()
        };
        let style = "{bar:24} {pos}/{len} {msg} [{elapsed} < {eta}]";
        bar.set_style(ProgressStyle::with_template(style).expect("the template is constant"));
        bar.set_position(done);
        bar.reset_eta();
        let light_seconds = prediction.light_seconds(shared_cores);
        let flops = prediction.executed_flops;
        Console {
            bar,
            terminal,
            total,
            started: Instant::now(),
            first: done,
            light_seconds,
            flops,
            parameters: parameters as f64,
            said: Cell::new(None),
        }
    }

    fn line(&self, line: &str) -> Result<()> {
        self.bar.suspend(|| say(line))
    }

    /// What happened beside the steps: commits that ended, lines that were lost.
    fn news(&self, trainer: &mut Trainer) -> Result<()> {
        for commit in trainer.take_commits() {
            self.line(&format!(
                "step {}: committed {} in {:.2} s beside training; stall {:.2} s, bound {:.2} s",
                commit.step,
                bytes_text(commit.bytes),
                commit.seconds,
                commit.stall_seconds,
                commit.stall_bound_seconds
            ))?;
        }
        match trainer.take_warning() {
            Some(warning) => self.line(&warning),
            None => Ok(()),
        }
    }

    /// A norm far above those before.
    fn spike(&self, report: &StepReport) -> Result<()> {
        let Some(Spike { mean, skipped }) = report.spike else {
            return Ok(());
        };
        let (step, norm) = (report.step, report.grad_norm);
        let done = match skipped {
            true => format!("; no update was made ({} steps so far)", report.skipped),
            false => String::new(),
        };
        self.line(&format!(
            "step {step}: spike: gradient norm {norm:.3}, running mean {mean:.3}{done}"
        ))
    }

    fn step(&self, report: &StepReport) -> Result<()> {
        let message = format!(
            "loss {:.4} norm {:.3} lr {:.2e} {:.0} tok/s {:.3} TFLOPS ({:.3} of 6 N) {:.0} % of \
             light time",
            report.loss,
            report.grad_norm,
            report.learning_rate,
            report.tokens_per_second(),
            self.flops / report.step_seconds / 1e12,
            6.0 * self.parameters * report.tokens_per_second() / 1e12,
            100.0 * self.light_seconds / report.step_seconds,
        );
        if self.terminal {
            self.bar.set_message(message);
            self.bar.set_position(report.step);
            return Ok(());
        }
        // Every step of a short run; about a hundred lines of a long one, and no silence that would
        // look like a run that stands still.
        let every = (self.total / 100).max(1);
        let is_due = report.step.is_multiple_of(every) || report.step == self.total;
        let silent = self.said.get().is_none_or(|at| at.elapsed() >= SILENT_MAX);
        if is_due || silent {
            self.said.set(Some(Instant::now()));
            let done = (report.step - self.first) as f64;
            let left = (self.total - report.step) as f64;
            let left_seconds = self.started.elapsed().as_secs_f64() / done * left;
            say(&format!(
                "step {}/{}: {message}, {left_seconds:.0} s left",
                report.step, self.total
            ))?;
        }
        Ok(())
    }
}

/// Prints samples that are due, shortened.
fn sample(trainer: &mut Trainer, console: &Console) -> Result<()> {
    const SHOWN: usize = 200;
    let short = |text: &str| {
        let mut shown: String = text.chars().take(SHOWN).collect();
        if shown.len() < text.len() {
            shown.push('…');
        }
        shown
    };
    for Sample { step, prompt, text } in trainer.sample()? {
        let (prompt, text) = (short(&prompt), short(&text));
        console.line(&format!("step {step}: sample: {prompt:?} → {text:?}"))?;
    }
    Ok(())
}
