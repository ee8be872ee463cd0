//! A run: prepared from its configuration, trained step by step, committed, resumed.
//!
//! - [`Run::prepare`] reads model, tokenizer and data, and refuses bad input before memory is
//!   taken.
//! - [`Trainer`] owns the engine; a step is [`Trainer::step`], and the loop is the caller's.
//! - A commit is made with all tiles at home, so it is the state after a whole number of steps; the
//!   data cursor, the settings and the count of tokens are in its metadata.
//! - Resume restores bytes: the next losses are those of the run that was never stopped.
//!
//! What is printed and written beside the checkpoint is `report`'s and the tools'.

mod report;
mod setup;

pub use report::{Metrics, StepReport};
pub use setup::{Budget, build_engine, choose_device, resolve_budgets};

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crate::checkpoint::{Checkpoints, Progress};
use crate::config::{RunConfig, WeightInit};
use crate::data::{Batches, Dataset, Micro, TextTokenizer, eval_micros};
use crate::error::{Error, Result};
use crate::hf::{self, WeightSource};
use crate::model::ModelSpec;
use crate::optimizer::learning_rate;
use crate::plan::Plan;
use crate::stats::Snapshot;
use crate::step::{Engine, StepSettings};
use crate::store::Phase;

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

impl Run {
    /// Reads model, tokenizer and data.
    pub fn prepare(config: RunConfig) -> Result<Run> {
        let dir = model_dir(&config)?;
        let (spec, model_json) = hf::read_config(dir)?;
        let needs_tokenizer = dir.join("tokenizer.json").exists();
        let tokenizer = needs_tokenizer
            .then(|| TextTokenizer::load(dir, spec.vocab_size))
            .transpose()?;
        let dataset = Dataset::load(
            &config.data.train,
            &config.data,
            tokenizer.as_ref(),
            spec.vocab_size,
        )?;
        let dataset = Arc::new(dataset);
        let eval = if config.data.eval.is_empty() {
            Vec::new()
        } else {
            let files = &config.data.eval;
            let held_out = Dataset::load(files, &config.data, tokenizer.as_ref(), spec.vocab_size)?;
            eval_micros(&held_out, &config.data, config.train.micro_batch)
        };
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
        Ok(Run {
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
    engine: Engine,
    checkpoints: Option<Checkpoints>,
    metrics: Metrics,
    /// Steps that are done.
    step: u64,
    /// Tokens that are done.
    tokens: u64,
    /// Step of the last commit.
    committed: Option<u64>,
    last_return: Instant,
    last_snapshot: Snapshot,
    /// Sentences that a person should read once: engines, warnings, what a resume changed.
    notes: Vec<String>,
}

impl Trainer {
    /// Takes memory, fills it from the weights or a commit, and starts the engine's lanes.
    /// `resume_changed` lets settings differ that a resume otherwise refuses.
    pub fn start(
        run: Run,
        plan: Plan,
        budget: &Budget,
        start: Start,
        resume_changed: bool,
        trace: bool,
    ) -> Result<Trainer> {
        let mut notes = Vec::new();
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
        let (mut step, mut tokens) = (0, 0);
        let mut batches_at = None;
        match (weights, &mut checkpoints) {
            (Some(weights), _) => {
                notes.extend(weights.notes().iter().cloned());
                tiers.initialise(|layer, elements, out| {
                    weights.fill(tiers.layout(layer), elements, out)
                })?;
            }
            (None, Some(checkpoints)) => {
                let wanted = if let Start::Step(step) = start {
                    Some(step)
                } else {
                    None
                };
                let progress = checkpoints.restore(tiers, wanted)?;
                notes.extend(progress.changes(&run.config, &run.dataset, resume_changed)?);
                (step, tokens) = (progress.step, progress.tokens);
                batches_at = Some(progress.cursor);
            }
            (None, None) => unreachable!("a resume opens its checkpoints"),
        }
        if let Some(checkpoints) = &checkpoints {
            notes.extend(checkpoints.sentences());
        }
        let metrics = Metrics::open(&run.config.log.dir, step)?;
        let committed = (step > 0).then_some(step);
        let last_snapshot = tiers.stats.snapshot();
        let mut trainer = Trainer {
            run,
            engine,
            checkpoints,
            metrics,
            step,
            tokens,
            committed,
            last_return: Instant::now(),
            last_snapshot,
            notes,
        };
        if let Some(cursor) = batches_at {
            trainer.run.batches.seek(cursor)?;
        }
        trainer.name_last_commit();
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
        if let Some(checkpoints) = &mut self.checkpoints {
            checkpoints.set_phase_hook(hook);
        }
    }

    /// Steps that are done.
    pub fn steps_done(&self) -> u64 {
        self.step
    }

    /// Step of the last commit.
    pub fn last_commit(&self) -> Option<u64> {
        self.committed
    }

    /// One optimizer step.
    pub fn step(&mut self) -> Result<StepReport> {
        let train = &self.run.config.train;
        let rate = learning_rate(train, self.run.total_steps, self.step);
        let settings = StepSettings {
            step: self.step + 1,
            learning_rate: rate,
            betas: train.betas,
            eps: train.eps,
            weight_decay: train.weight_decay,
            max_grad_norm: train.max_grad_norm,
        };
        let micros = self.run.batches.next_step();
        let result = self.engine.train_step(micros, settings)?;
        self.step += 1;
        self.tokens += result.tokens;
        let seconds = self.last_return.elapsed().as_secs_f64();
        self.last_return = Instant::now();
        let snapshot = self.engine.tiers().stats.snapshot();
        let moved = snapshot.since(&self.last_snapshot);
        self.last_snapshot = snapshot;
        let report = StepReport {
            step: self.step,
            loss: result.loss,
            grad_norm: result.grad_norm,
            learning_rate: rate,
            tokens: result.tokens,
            targets: result.targets,
            step_seconds: seconds,
            moved,
        };
        self.metrics.step(&report)?;
        Ok(report)
    }

    /// Mean loss over the evaluation data; `None` without such data.
    pub fn evaluate(&mut self) -> Result<Option<f64>> {
        if self.run.eval.is_empty() {
            return Ok(None);
        }
        let at_once = usize::try_from(self.run.config.train.micro_batches).expect("capped");
        let (mut sum, mut targets) = (0.0, 0);
        for micros in self.run.eval.chunks(at_once) {
            let (losses, count) = self.engine.evaluate(micros.to_vec())?;
            sum += losses;
            targets += count;
        }
        let loss = sum / targets.max(1) as f64;
        self.metrics.evaluation(self.step, loss)?;
        self.last_return = Instant::now();
        Ok(Some(loss))
    }

    /// Whether a commit is due after the steps done so far.
    pub fn commit_is_due(&self) -> bool {
        let every = self.run.config.checkpoint.every;
        every > 0 && self.step.is_multiple_of(every) && self.committed != Some(self.step)
    }

    /// Whether an evaluation is due after the steps done so far.
    pub fn evaluation_is_due(&self) -> bool {
        let every = self.run.config.train.eval_every;
        every > 0 && self.step.is_multiple_of(every)
    }

    /// Makes the state after the steps done so far durable. Seconds that it took; `None` if
    /// checkpoints are off or this step is committed already.
    pub fn commit(&mut self) -> Result<Option<f64>> {
        if self.committed == Some(self.step) || self.step == 0 {
            return Ok(None);
        }
        let Some(checkpoints) = &mut self.checkpoints else {
            return Ok(None);
        };
        let started = Instant::now();
        self.engine.drain()?;
        self.metrics.flush()?;
        let progress = Progress::new(
            self.step,
            self.tokens,
            self.run.batches.cursor(),
            &self.run.config,
            &self.run.dataset,
            &self.run.model_json,
        );
        checkpoints.commit(self.engine.tiers(), &progress)?;
        self.committed = Some(self.step);
        self.name_last_commit();
        let seconds = started.elapsed().as_secs_f64();
        self.metrics.commit(self.step, seconds)?;
        self.last_return = Instant::now();
        Ok(Some(seconds))
    }

    /// Waits for the last updates and writes what is buffered. The trace, if one was kept.
    pub fn finish(mut self) -> Result<Option<String>> {
        self.engine.drain()?;
        self.metrics.flush()?;
        Ok(self.engine.tiers().stats.chrome_trace())
    }

    fn name_last_commit(&self) {
        if let (Some(step), Some(checkpoints)) = (self.committed, &self.checkpoints) {
            let place = checkpoints.path().display();
            self.engine
                .set_last_commit(format!("the last commit is step {step} in {place}"));
        }
    }
}
