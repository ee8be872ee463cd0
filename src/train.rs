//! A run: prepared from its configuration, trained step by step, committed, resumed.
//!
//! - [`Run::prepare`] reads model, tokenizer and data, and refuses bad input before memory is
//!   taken.
//! - [`Trainer`] owns the engine; a step is [`Trainer::step`], and the loop is the caller's.
//! - A commit is the state after a whole number of steps; the data cursor, the settings and the
//!   count of tokens are in its metadata. It is written beside the next step; a commit that is due
//!   while the last one is under way waits for it, and so does the end of the run.
//! - A commit that fails ends the run at the next step's boundary. A step that fails ends it after
//!   the commit under way.
//! - Resume restores bytes: the next losses are those of the run that was never stopped.
//!
//! What is printed and written beside the checkpoint is `report`'s and the tools'.

mod commit;
mod compare;
mod evaluation;
mod lines;
mod planned;
mod report;
mod samples;
mod setup;
mod show;
mod spikes;

pub use commit::CommitReport;
pub use compare::Comparison;
pub use evaluation::Evaluation;
pub use planned::{Planned, Stepped, Steps};
pub use report::{DriveBytes, Metrics, StepReport};
pub use samples::Sample;
pub use setup::{Budget, build_engine, choose_device, resolve_budgets};
pub use spikes::Spike;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crate::checkpoint::{Checkpoints, Progress};
use crate::config::{RunConfig, WeightInit};
use crate::data::{self, Batches, Dataset, Micro, TextTokenizer, eval_micros};
use crate::error::{Error, Result};
use crate::hf::{self, WeightSource};
use crate::log::status::State;
use crate::model::ModelSpec;
use crate::optimizer::learning_rate;
use crate::plan::Plan;
use crate::stats::{Hop, Snapshot, Wait};
use crate::step::{Engine, StepSettings};
use crate::store::{Counters, Phase, Scratch};
use crate::transfer::Tiers;
use commit::{Committer, Order};
use lines::Lines;
use samples::Prompt;

/// A run with everything read that it needs.
pub struct Run {
    /// Its configuration.
    pub config: RunConfig,
    /// The model.
    pub spec: ModelSpec,
    /// The model directory's config.json.
    pub model_json: serde_json::Value,
    /// Tokenizer, where the directory has one.
    pub tokenizer: Option<TextTokenizer>,
    /// Training data.
    pub dataset: Arc<Dataset>,
    /// Evaluation micro-batches, in order.
    pub eval: Vec<Micro>,
    /// Steps of the whole run.
    pub total_steps: u64,
    batches: Batches,
    prompts: Vec<Prompt>,
}

/// Which commit to start from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// From the model's weights; a checkpoint directory with commits is refused.
    Fresh,
    /// From the newest commit.
    Latest,
    /// From the commit of that step.
    Step(u64),
}

impl Start {
    /// The step of the commit, where it is not the newest.
    fn step(self) -> Option<u64> {
        match self {
            Start::Step(step) => Some(step),
            Start::Latest | Start::Fresh => None,
        }
    }
}

impl Run {
    /// Reads model, tokenizer and data.
    pub fn prepare(config: RunConfig) -> Result<Run> {
        let dir = model_dir(&config)?;
        let (spec, model_json) = hf::read_config(dir)?;
        let needs_tokenizer = dir.join("tokenizer.json").exists();
        let tokenizer = needs_tokenizer
            .then(|| TextTokenizer::load(dir, spec.vocab_size))
            .transpose()?;
        let (seed, vocab_size) = (config.train.seed, spec.vocab_size);
        let (dataset, held_out) = data::load(&config.data, seed, tokenizer.as_ref(), vocab_size)?;
        let dataset = Arc::new(dataset);
        let micro_batch = config.train.micro_batch;
        let eval = held_out.map(|held_out| eval_micros(&held_out, &config.data, micro_batch));
        let eval = eval.transpose()?.unwrap_or_default();
        let train = &config.train;
        let batches = Batches::new(
            dataset.clone(),
            &config.data,
            train.micro_batch,
            train.micro_batches,
            train.seed,
        )?;
        let epochs = train
            .epochs
            .map_or(0, |epochs| batches.steps_of_epochs(epochs));
        let total_steps = train.steps.unwrap_or(epochs);
        let prompts = Prompt::all(&config, tokenizer.as_ref(), &dataset, &eval)?;
        Ok(Run {
            prompts,
            config,
            spec,
            model_json,
            tokenizer,
            dataset,
            eval,
            total_steps,
            batches,
        })
    }

    /// Tokens of an epoch's sequences a place in them: 1 where each is `seq_len` long.
    pub fn packing_efficiency(&self) -> f64 {
        self.batches.efficiency()
    }

    /// Sequences of an epoch.
    pub fn sequences(&self) -> u64 {
        self.batches.sequences()
    }

    /// Where the run's weights begin.
    pub fn weights(&self) -> Result<WeightSource> {
        match self.config.model.init {
            WeightInit::Pretrained => WeightSource::open(model_dir(&self.config)?, &self.spec),
            WeightInit::Random => Ok(WeightSource::random(&self.spec, self.config.train.seed)),
        }
    }
}

/// The model directory of a configuration.
pub fn model_dir(config: &RunConfig) -> Result<&Path> {
    config.model.path.as_deref().ok_or_else(|| {
        Error::input(
            "run.toml",
            "model.path",
            "the directory of a model",
            "nothing",
            "set path = \"…\" under [model]",
        )
    })
}

/// A run under way.
pub struct Trainer {
    run: Run,
    /// Before the engine: what is under way ends while the lanes still run.
    committer: Option<Committer>,
    engine: Engine,
    metrics: Metrics,
    /// samples.jsonl, from the first sample on.
    samples: Option<Lines>,
    /// It could not be opened, which was said.
    samples_lost: bool,
    /// Steps, tokens and bytes that are done; the cursor is that of the start.
    progress: Progress,
    /// Step of the last commit.
    committed: Option<u64>,
    /// Commits that nobody has asked for.
    reports: Vec<CommitReport>,
    last_return: Instant,
    last_snapshot: Snapshot,
    /// The scratch store's counters after the last step.
    last_store: Counters,
    /// Seconds of the last step, without waits for commits.
    step_seconds: f64,
    /// Bytes to drives before this process began.
    written_before: u64,
    /// Bytes of commits that steps have told.
    checkpoint_bytes: u64,
    /// Sentences that a person should read once: engines, warnings, what a resume changed.
    notes: Vec<String>,
    /// To be told once.
    warning: Option<String>,
}

impl Trainer {
    /// Takes memory, fills it from the weights or a commit, and starts the engine's lanes.
    /// `resume_changed` lets settings differ that a resume otherwise refuses.
    pub fn start(
        mut run: Run,
        plan: Plan,
        budget: &Budget,
        start: Start,
        resume_changed: bool,
        trace: bool,
    ) -> Result<Trainer> {
        let mut notes = run.dataset.notes().to_vec();
        // Weights that do not fit the model are refused before memory is taken or a file made.
        let fresh = start == Start::Fresh;
        let weights = fresh.then(|| run.weights()).transpose()?;
        let (engine, sentences) = build_engine(&run.spec, &run.config, plan, budget, trace)?;
        notes.extend(sentences);
        let tiers = engine.tiers();
        let mut checkpoints = match run.config.checkpoint.every {
            0 if fresh => None,
            _ => Some(Checkpoints::open(&run.config, &run.spec, tiers, fresh)?),
        };
        let mut progress = Progress::new(
            &run.config,
            &run.dataset,
            &run.model_json,
            run.batches.cursor(),
        );
        progress.device = tiers.device.identity();
        match (weights, &mut checkpoints) {
            (Some(weights), _) => {
                notes.extend(weights.notes().iter().cloned());
                let filled = tiers.initialise(|layer, elements, out| {
                    weights.fill(tiers.layout(layer), elements, out)
                });
                filled.map_err(|error| cause(tiers, error))?;
            }
            (None, Some(checkpoints)) => {
                let found = checkpoints.restore(tiers, start.step());
                let found = found.map_err(|error| cause(tiers, error))?;
                notes.extend(found.changes(&run.config, &progress, resume_changed)?);
                notes.extend(progress.goes_on_from(&found));
                run.batches.seek(found.cursor)?;
            }
            (None, None) => unreachable!("a resume opens its checkpoints"),
        }
        if let Some(checkpoints) = &checkpoints {
            notes.extend(checkpoints.sentences());
        }
        let metrics = Metrics::open(&run.config.log.dir, progress.step)?;
        let mut trainer = Trainer {
            samples: samples::reopen(&run.config.log.dir, progress.step)?,
            samples_lost: false,
            committer: checkpoints.map(Committer::new),
            committed: (progress.step > 0).then_some(progress.step),
            written_before: progress.written.max(metrics.written_before()),
            run,
            metrics,
            progress,
            reports: Vec::new(),
            last_return: Instant::now(),
            last_snapshot: engine.tiers().stats.snapshot(),
            last_store: Counters::default(),
            step_seconds: 0.0,
            checkpoint_bytes: 0,
            engine,
            notes,
            warning: None,
        };
        trainer.name_last_commit();
        trainer.count_store();
        Ok(trainer)
    }

    /// Sentences that a person should read once.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The run.
    pub fn run(&self) -> &Run {
        &self.run
    }

    /// The engine, for sampling.
    pub fn engine(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Calls `hook` at each phase of every later commit, for tests that end the process there.
    pub fn set_phase_hook(&mut self, hook: Box<dyn Fn(Phase) + Send>) {
        if let Some(checkpoints) = self.committer.as_mut().and_then(Committer::checkpoints) {
            checkpoints.set_phase_hook(hook);
        }
    }

    /// Steps that are done.
    pub fn steps_done(&self) -> u64 {
        self.progress.step
    }

    /// Step of the last commit that is durable.
    pub fn last_commit(&self) -> Option<u64> {
        self.committed
    }

    /// Commits that ended since this was last called, oldest first.
    pub fn take_commits(&mut self) -> Vec<CommitReport> {
        std::mem::take(&mut self.reports)
    }

    /// What a person should know of metrics.jsonl or samples.jsonl, once.
    pub fn take_warning(&mut self) -> Option<String> {
        if let Some(warning) = self.warning.take() {
            return Some(warning);
        }
        let lost = self.samples.as_mut().and_then(Lines::take_warning);
        lost.or_else(|| self.metrics.take_warning())
    }

    /// Where a library now computes a product by another algorithm than the commit tells, the bits
    /// differ from those of the run that was never stopped: that is said.
    fn compare_products(&mut self, now: &BTreeMap<String, String>) {
        let before = &self.progress.products;
        let differs = |product: &&String| {
            before
                .get(*product)
                .is_some_and(|was| *was != now[*product])
        };
        if let Some(product) = now.keys().find(differs) {
            self.warning = Some(format!(
                "warning: the product {product} is computed by another algorithm than before the \
                 resume: the last bits of its numbers may differ"
            ));
        }
        self.progress.products.clone_from(now);
    }

    /// One optimizer step.
    ///
    /// # Errors
    /// That of a commit which failed since the last step; that of the step, after the commit under
    /// way has ended.
    pub fn step(&mut self) -> Result<StepReport> {
        self.end_commit(false)?;
        let train = &self.run.config.train;
        let rate = learning_rate(train, self.run.total_steps, self.progress.step);
        let settings = StepSettings {
            step: self.progress.step + 1,
            skipped: self.progress.norms.skipped,
            learning_rate: rate,
            betas: train.betas,
            eps: train.eps,
            weight_decay: train.weight_decay,
            max_grad_norm: train.max_grad_norm,
            skip_above: spikes::skip_above(&self.progress.norms, train),
        };
        let threshold = train.spike_threshold;
        let micros = self.run.batches.next_step()?;
        let result = match self.engine.train_step(micros, settings) {
            Ok(result) => result,
            Err(error) => return Err(self.stopped(error)),
        };
        self.progress.step += 1;
        self.progress.tokens += result.tokens;
        let (norm, skipped) = (result.grad_norm, result.skipped);
        let spike = spikes::count(&mut self.progress.norms, threshold, norm, skipped);
        let seconds = self.last_return.elapsed().as_secs_f64();
        self.last_return = Instant::now();
        let snapshot = self.engine.tiers().stats.snapshot();
        let moved = snapshot.since(&self.last_snapshot);
        self.step_seconds = seconds - moved.waits[Wait::UpdateForCommit as usize];
        self.last_snapshot = snapshot;
        self.end_commit(false)?;
        let report = StepReport {
            step: self.progress.step,
            loss: result.loss,
            grad_norm: result.grad_norm,
            learning_rate: rate,
            tokens: result.tokens,
            targets: result.targets,
            spike,
            skipped: self.progress.norms.skipped,
            step_seconds: seconds,
            moved,
            store_seconds: self.count_store(),
            written: self.count_written(moved.bytes[Hop::Write as usize]),
        };
        self.metrics.step(&report);
        let (norms, train) = (&self.progress.norms, &self.run.config.train);
        match spikes::check(norms, train, (report.step, report.grad_norm), spike) {
            Ok(()) => Ok(report),
            Err(error) => Err(self.stopped(error)),
        }
    }

    /// Whether a commit is due after the steps done so far.
    pub fn commit_is_due(&self) -> bool {
        let every = self.run.config.checkpoint.every;
        let is_due = self.progress.step.is_multiple_of(every) || self.is_best_to_keep();
        every > 0 && is_due && !self.is_committed()
    }

    /// Begins to make the state after the steps done so far durable, and returns; a commit under
    /// way is waited for first. Nothing is done if checkpoints are off or this step is committed.
    pub fn commit(&mut self) -> Result<()> {
        if self.is_committed() || self.progress.step == 0 || self.committer.is_none() {
            return Ok(());
        }
        self.end_commit(true)?;
        self.engine.check().map_err(|error| self.stopped(error))?;
        let progress = Progress {
            cursor: self.run.batches.cursor(),
            products: self.engine.tiers().device.products(),
            ..self.progress.clone()
        };
        self.compare_products(&progress.products);
        let order = Order {
            held: self.engine.hold(),
            progress,
            synced: self.syncer(),
            lane_waited: self.lane_waited(),
            step_seconds: self.step_seconds,
        };
        let committer = self.committer.as_mut().expect("seen above");
        committer.begin(order)?;
        self.last_return = Instant::now();
        Ok(())
    }

    /// Makes durable, when called, the lines written by now.
    fn syncer(&self) -> Box<dyn FnOnce() + Send> {
        let (metrics, samples) = (self.metrics.syncer(), &self.samples);
        let samples = samples.as_ref().map(Lines::syncer);
        Box::new(move || {
            metrics();
            if let Some(sync) = samples {
                sync();
            }
        })
    }

    /// Waits until the commit under way is durable, if there is one.
    pub fn finish_commit(&mut self) -> Result<()> {
        self.end_commit(true)
    }

    /// Waits for the last updates and the commit under way. The trace, if one was kept.
    pub fn finish(mut self) -> Result<Option<String>> {
        self.end_commit(true)?;
        self.engine.drain().map_err(|error| self.stopped(error))?;
        self.syncer()();
        let state = match self.progress.step >= self.run.total_steps || self.stops_early() {
            true => State::Finished,
            false => State::Interrupted,
        };
        self.metrics.ends(state, None);
        Ok(self.engine.tiers().stats.chrome_trace())
    }

    /// Whether the state after the steps done so far is committed, or on the way.
    fn is_committed(&self) -> bool {
        let running = self.committer.as_ref().and_then(Committer::running);
        let step = Some(self.progress.step);
        step == self.committed || step == running
    }

    /// Takes the outcome of the commit under way, if it has ended or `wait`.
    fn end_commit(&mut self, wait: bool) -> Result<()> {
        let Some(committer) = &mut self.committer else {
            return Ok(());
        };
        let stats = &self.engine.tiers().stats;
        let waited = || stats.snapshot().waits[Wait::UpdateForCommit as usize];
        match committer.end(wait, self.progress.step, waited) {
            None => Ok(()),
            Some(Ok(report)) => {
                self.committed = Some(report.step);
                self.name_last_commit();
                self.metrics.commit(&report);
                self.reports.push(report);
                Ok(())
            }
            // A lane that failed is why the commit could not be made.
            Some(Err(error)) => {
                let first = self.engine.check().err().unwrap_or(error);
                Err(self.stopped(first))
            }
        }
    }

    /// The error of a run that ends, with the last commit named: the one under way too, if it can
    /// be made.
    fn stopped(&mut self, error: Error) -> Error {
        let error = cause(self.engine.tiers(), error);
        let mut last_commit = String::new();
        if let Err(Error::Stopped { source, .. }) = self.end_commit(true)
            && source.to_string() != error.to_string()
        {
            last_commit = format!("{source}; ");
        }
        last_commit += &self.last_commit_text();
        let stopped = match error {
            Error::NonFinite {
                step, what, value, ..
            } => Error::NonFinite {
                step,
                what,
                value,
                last_commit,
            },
            stopped @ Error::Stopped { .. } => stopped,
            error => Error::Stopped {
                source: Box::new(error),
                last_commit,
            },
        };
        self.metrics.ends(State::Failed, Some(stopped.to_string()));
        stopped
    }

    fn lane_waited(&self) -> f64 {
        self.engine.tiers().stats.snapshot().waits[Wait::UpdateForCommit as usize]
    }

    /// Seconds in which the scratch store's disks were busy since the last call: reading, writing,
    /// either.
    fn count_store(&mut self) -> [f64; 3] {
        let store = self.engine.tiers().store.as_ref();
        let now = store.map(Scratch::counters).unwrap_or_default();
        let last = std::mem::replace(&mut self.last_store, now);
        let busy = |of: &Counters| [of.read.busy_ns, of.write.busy_ns, of.busy_ns];
        let (now, last) = (busy(&now), busy(&last));
        std::array::from_fn(|way| (now[way] - last[way]) as f64 / 1e9)
    }

    /// Bytes to drives since the last call, of which `store` are spilled extents.
    fn count_written(&mut self, store: u64) -> DriveBytes {
        let commits = self.committer.as_ref().map_or(0, Committer::written_bytes);
        let spilled = self.last_snapshot.bytes[Hop::Write as usize];
        let total = self.written_before + spilled + commits;
        let checkpoint = commits - self.checkpoint_bytes;
        self.checkpoint_bytes = commits;
        self.progress.written = total;
        let rated = self.run.config.memory.drive_tbw;
        DriveBytes {
            store,
            checkpoint,
            total,
            life: rated.map(|terabytes| total as f64 / (terabytes * 1e12)),
        }
    }

    fn last_commit_text(&self) -> String {
        match (self.committed, &self.committer) {
            (Some(step), Some(committer)) => {
                let place = committer.directory().display();
                format!("the last commit is step {step} in {place}")
            }
            _ => "there is no commit yet".to_string(),
        }
    }

    fn name_last_commit(&self) {
        self.engine.set_last_commit(self.last_commit_text());
    }
}

/// The scratch store's first failure in place of what followed from it: who waited for another's
/// transfer met only that.
fn cause(tiers: &Tiers, error: Error) -> Error {
    match (tiers.store.as_ref().and_then(Scratch::failure), error) {
        (Some(first), Error::StoreFailed { .. }) => first,
        (_, error) => error,
    }
}
