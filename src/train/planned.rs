//! The whole way for other programs: a configuration, its plan, its steps.
//!
//! `terrace train` goes the same way and prints between.

use super::{Budget, Evaluation, Run, Sample, Start, StepReport, Trainer};
use super::{choose_device, resolve_budgets};
use crate::config::RunConfig;
use crate::error::Result;
use crate::measure::measure_rates;
use crate::measure::profile::Profile;
use crate::plan::Plan;
use crate::schedule::choose::fastest;
use crate::schedule::simulate::{Prediction, Rates};

/// A run with the fastest plan that fits its budgets. Nothing is taken and nothing written yet.
pub struct Planned {
    /// What is trained, on what.
    pub run: Run,
    /// Where every byte will live.
    pub plan: Plan,
    /// What a step will cost.
    pub prediction: Prediction,
    /// By these rates of the machine.
    pub rates: Rates,
    budget: Budget,
}

impl Planned {
    /// Reads model and data, measures the machine (or reads `memory.profile`) and plans. `device`
    /// is `cpu`, `cuda:0` or another card's number, or `auto`.
    ///
    /// # Errors
    /// What is wrong with the input, or which budget is too small and by how much.
    pub fn new(config: RunConfig, device: &str) -> Result<Planned> {
        let (profile, _) = choose_device(device, config.precision())?;
        let run = Run::prepare(config)?;
        let budget = resolve_budgets(&run.spec, &run.config, &profile)?;
        let rates = match &run.config.memory.profile {
            Some(path) => Profile::read(path)?.rates(path, &profile, &budget.store)?.0,
            None => measure_rates(&profile)?,
        };
        let (plan, prediction) = fastest(&run.spec, &run.config, &profile, budget.budgets, &rates)?;
        Ok(Planned {
            run,
            plan,
            prediction,
            rates,
            budget,
        })
    }

    /// The plan as `terrace plan` prints it.
    pub fn table(&self) -> String {
        self.plan.table(&self.prediction, &self.rates)
    }

    /// Takes memory, fills it from the model's weights or from a commit, and starts the lanes.
    ///
    /// # Errors
    /// As [`Trainer::start`].
    pub fn start(self, start: Start) -> Result<Trainer> {
        Trainer::start(self.run, self.plan, &self.budget, start, false, false)
    }
}

/// A step, and what was due after it.
#[derive(Debug)]
pub struct Stepped {
    /// The step.
    pub report: StepReport,
    /// The evaluation that was due.
    pub evaluation: Option<Evaluation>,
    /// The samples that were due.
    pub samples: Vec<Sample>,
}

/// The steps of a run that are left, from [`Trainer::steps`].
pub struct Steps<'a> {
    trainer: &'a mut Trainer,
    ended: bool,
}

impl Trainer {
    /// The steps that are left, each with the evaluation, samples and commit that are due after it;
    /// the state after the last one is committed. Ends after an error. Who leaves the loop early
    /// calls [`Trainer::commit`] and [`Trainer::finish`], and can go on later.
    pub fn steps(&mut self) -> Steps<'_> {
        Steps {
            trainer: self,
            ended: false,
        }
    }

    fn step_and_what_is_due(&mut self) -> Result<Stepped> {
        let report = self.step()?;
        let is_last = report.step >= self.run.total_steps;
        let evaluation = match self.evaluation_is_due() || is_last {
            true => self.evaluate()?,
            false => None,
        };
        let samples = match self.samples_are_due() {
            true => self.sample()?,
            false => Vec::new(),
        };
        if self.commit_is_due() {
            self.commit()?;
        }
        Ok(Stepped {
            report,
            evaluation,
            samples,
        })
    }
}

impl Iterator for Steps<'_> {
    type Item = Result<Stepped>;

    fn next(&mut self) -> Option<Result<Stepped>> {
        if self.ended {
            return None;
        }
        let trainer = &mut *self.trainer;
        let item = if trainer.steps_done() < trainer.run.total_steps && !trainer.stops_early() {
            Some(trainer.step_and_what_is_due())
        } else {
            let committed = trainer.commit().and_then(|()| trainer.finish_commit());
            committed.err().map(Err)
        };
        self.ended = !matches!(item, Some(Ok(_)));
        item
    }
}
