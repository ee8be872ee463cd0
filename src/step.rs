//! Executes a schedule: the only room that starts transfers and launches layers.
//!
//! - One thread a lane; the compute lane is the caller's own thread. Each walks its actions of the
//!   schedule in order and waits for what `after` names. Nothing else orders the lanes.
//! - Steps overlap as the schedule says: a call returns when the step's loss and norm are known,
//!   while its last updates may still run. [`Engine::drain`] waits for all of them.
//! - A device may return from an operation before it is done. Lanes that copy wait for their
//!   copies; the compute lane does not wait: what other lanes are after is marked, and numbers
//!   are taken, by the marker's thread, once the device has reached them.
//! - The first failure of a lane stops all lanes; every later call returns an error.
//! - A commit runs beside the next step: tiles that [`Engine::hold`] keeps are not updated before
//!   they are released.
//! - A non-finite loss or norm stops the run before any update that it would reach (invariant 10),
//!   or is skipped by choice: then all lanes walk as ever, and the update lane changes nothing.
//!
//! What is done and in which order is decided in `schedule`; how bytes move, in `transfer`.

mod card_trace;
mod held;
mod idle;
mod lanes;
mod marker;
mod named;
mod poison;
mod progress;
mod told;
mod update;
mod watch;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;

use crossbeam_channel::Sender;

use crate::data::{IGNORE, Micro, sorted_tokens};
use crate::device::ops::SortedTokens;
use crate::device::{Dtype, Queue, View};
use crate::error::{Error, Result};
use crate::layer::{BlockTemplate, HeadTemplate};
use crate::model::ModelSpec;
use crate::optimizer::{AdamwStep, Isa, clip_coefficient};
use crate::plan::Plan;
use crate::schedule::{Action, Form, Lane, Schedule};
use crate::transfer::Tiers;
pub use card_trace::CARD_LANE;
use card_trace::CardTrace;
pub use held::Held;
use idle::Idle;
use marker::Marker;
use named::NamedRows;
use progress::{Failure, Progress};
pub use watch::{LanePlace, Watch, subject};

/// How AdamW runs in a step; the bias corrections and the rate are computed from it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepSettings {
    /// The step, counted from 1.
    pub step: u64,
    /// Steps before it that made no update: AdamW's t is `step − skipped`.
    pub skipped: u64,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// AdamW's betas.
    pub betas: [f64; 2],
    /// AdamW's epsilon.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Norm to clip to; 0 is off.
    pub max_grad_norm: f64,
    /// The step makes no update where its norm is larger than this or not finite; without it a
    /// norm that is not finite is an error. Only with clipping.
    pub skip_above: Option<f64>,
}

/// What a training step came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepResult {
    /// Mean loss over all targets of the step, in nats.
    pub loss: f64,
    /// Global L2 norm of the gradient, before clipping.
    pub grad_norm: f64,
    /// Tokens of the step.
    pub tokens: u64,
    /// Tokens with a target.
    pub targets: u64,
    /// It made no update.
    pub skipped: bool,
}

/// The data of one pass over a schedule.
struct PassData {
    micros: Vec<Micro>,
    sorted: Vec<SortedTokens>,
    /// Targets of the whole pass.
    targets: u64,
    settings: Option<StepSettings>,
    /// Sum of losses by micro-batch.
    losses: Mutex<Vec<f64>>,
    /// Squared norm by layer.
    norms: Mutex<Vec<f64>>,
    /// Set when updates may run; `None` where the step makes none.
    adamw: OnceLock<Option<AdamwStep>>,
    grad_norm: OnceLock<f64>,
    /// Logits by micro-batch, in the generating form.
    logits: Mutex<Vec<Vec<f32>>>,
    /// Embedding rows that were updated ahead of the others.
    rows_ahead: OnceLock<Arc<[u32]>>,
}

/// One run of a schedule.
struct Pass {
    schedule: Arc<Schedule>,
    progress: Arc<Progress>,
    /// By action: it is the compute lane's and another lane waits for it.
    awaited: Arc<Vec<bool>>,
    /// Counted from 1 among passes of the same progress table.
    number: u64,
    data: PassData,
}

/// Sees each action just before its lane carries it out, with the number of its step (0 in a
/// forward-only pass).
pub type Observer = Box<dyn Fn(Lane, &Action, u64) + Send + Sync>;

/// What all lanes share.
struct Shared {
    plan: Plan,
    tiers: Tiers,
    hidden: u64,
    block: BlockTemplate,
    head: HeadTemplate,
    isa: Isa,
    failure: Arc<Failure>,
    /// Named in errors of a non-finite step.
    last_commit: Mutex<String>,
    observer: OnceLock<Observer>,
    named: NamedRows,
    idle: Idle,
}

/// A schedule in use: its table of what is done.
struct Track {
    schedule: Arc<Schedule>,
    progress: Arc<Progress>,
    awaited: Arc<Vec<bool>>,
    number: u64,
}

/// Lanes and all tiers of a run.
pub struct Engine {
    shared: Arc<Shared>,
    lanes: Vec<(Sender<Arc<Pass>>, JoinHandle<()>)>,
    /// Only where the device is asynchronous.
    marker: Option<Marker>,
    card_trace: Option<CardTrace>,
    train: Option<Track>,
    forward: Option<Track>,
    watch: Watch,
}

impl Engine {
    /// Starts the lanes. The tiers hold a model already.
    pub fn start(spec: &ModelSpec, plan: Plan, tiers: Tiers, isa: Isa) -> Result<Engine> {
        let shared = Arc::new(Shared {
            hidden: spec.hidden,
            block: BlockTemplate::new(spec),
            head: HeadTemplate::new(spec),
            plan,
            tiers,
            isa,
            failure: Arc::new(Failure::default()),
            last_commit: Mutex::new("there is no commit yet".to_string()),
            observer: OnceLock::new(),
            named: NamedRows::default(),
            idle: Idle::default(),
        });
        shared.write_rope_table(spec);
        shared.tiers.device.check()?;
        let asynchronous = shared.tiers.device.is_asynchronous();
        let marker = asynchronous.then(|| Marker::start(&shared)).transpose()?;
        let card_trace = CardTrace::start(&shared.tiers.device, &shared.tiers.stats);
        let mut engine = Engine {
            watch: Watch::new(shared.tiers.stats.clone()),
            shared,
            lanes: Vec::new(),
            marker,
            card_trace,
            train: None,
            forward: None,
        };
        if engine.shared.plan.map.shape.trains {
            engine.train = Some(engine.track(Schedule::train(&engine.shared.plan)));
        }
        for lane in [Lane::Up, Lane::Down, Lane::Update, Lane::Return] {
            let (sender, receiver) = crossbeam_channel::bounded::<Arc<Pass>>(2);
            let shared = engine.shared.clone();
            let thread = std::thread::Builder::new()
                .name(format!("terrace-{lane:?}").to_lowercase())
                .spawn(move || lanes::run(&shared, lane, &receiver))
                .map_err(|source| Error::io("start a thread", "lane".as_ref(), source))?;
            engine.lanes.push((sender, thread));
        }
        Ok(engine)
    }

    fn track(&self, schedule: Schedule) -> Track {
        let progress = Arc::new(Progress::new(
            schedule.actions.len(),
            self.shared.failure.clone(),
        ));
        Track {
            awaited: Arc::new(marker::awaited(&schedule)),
            schedule: Arc::new(schedule),
            progress,
            number: 0,
        }
    }

    /// The plan that the engine runs.
    pub fn plan(&self) -> &Plan {
        &self.shared.plan
    }

    /// All tiers. Homes may be read or written only after [`Engine::drain`], or as [`Held`] says.
    pub fn tiers(&self) -> &Tiers {
        &self.shared.tiers
    }

    /// For who shows where the lanes are.
    pub fn watch(&self) -> Watch {
        self.watch.clone()
    }

    /// Names the last commit, for the error of a non-finite step.
    pub fn set_last_commit(&self, name: String) {
        *self
            .shared
            .last_commit
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = name;
    }

    /// Shows every later action to `observer`, for tests that end the process there. The first
    /// observer stays.
    pub fn observe(&self, observer: Observer) {
        self.shared.observer.set(observer).ok();
    }

    /// One training step over the plan's micro-batches. Returns when loss and norm are known.
    pub fn train_step(&mut self, micros: Vec<Micro>, settings: StepSettings) -> Result<StepResult> {
        self.check()?;
        assert_eq!(micros.len() as u64, self.shared.plan.map.shape.micros);
        assert!(settings.skip_above.is_none() || settings.max_grad_norm > 0.0);
        let pass = Self::next_pass(self.train.as_mut(), micros, Some(settings));
        let shared = &pass.data;
        self.shared.named.name(pass.number - 1, &shared.sorted);
        let tokens = shared
            .micros
            .iter()
            .map(|micro| micro.tokens.len() as u64)
            .sum();
        let targets = shared.targets;
        assert!(targets > 0, "every row of a dataset has a target");
        self.run(&pass)?;
        let losses = shared.losses.lock().unwrap_or_else(PoisonError::into_inner);
        let grad_norm = *shared.grad_norm.get().expect("the compute lane has ended");
        let loss = losses.iter().sum::<f64>() / targets as f64;
        Ok(StepResult {
            loss,
            grad_norm,
            tokens,
            targets,
            skipped: shared.adamw.get() == Some(&None),
        })
    }

    /// Sum of losses and count of targets of at most the plan's micro-batches; nothing changes.
    pub fn evaluate(&mut self, micros: Vec<Micro>) -> Result<(f64, u64)> {
        let pass = self.forward_pass(Form::Evaluate, micros)?;
        self.run(&pass)?;
        self.drain()?;
        let losses = pass
            .data
            .losses
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Ok((losses.iter().sum(), pass.data.targets))
    }

    /// Logits `[sequences, V]` of the last token of each sequence, by micro-batch.
    pub fn last_logits(&mut self, micros: Vec<Micro>) -> Result<Vec<Vec<f32>>> {
        let pass = self.forward_pass(Form::Generate, micros)?;
        self.run(&pass)?;
        self.drain()?;
        let mut logits = pass
            .data
            .logits
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::take(&mut *logits))
    }

    /// The first failure of any lane, if there is one.
    pub fn check(&self) -> Result<()> {
        self.shared.failure.check()
    }

    /// Waits until every update has been made and every tile is home.
    pub fn drain(&self) -> Result<()> {
        if let Some(track) = &self.train {
            self.shared.named.name(track.number, &[]);
        }
        for track in self.train.iter().chain(&self.forward) {
            track.progress.wait_all(track.number)?;
        }
        let tiers = &self.shared.tiers;
        tiers.device.settle();
        tiers.device.check()?;
        self.shared.idle.flush(&tiers.device, &tiers.stats);
        if let Some(trace) = &self.card_trace {
            trace.flush(&tiers.device, &tiers.stats);
        }
        self.check()
    }

    fn forward_pass(&mut self, form: Form, micros: Vec<Micro>) -> Result<Arc<Pass>> {
        self.drain()?;
        let count = u32::try_from(micros.len()).expect("at most the plan's micro-batches");
        let fits = |track: &Track| (track.schedule.form, track.schedule.micros) == (form, count);
        if !self.forward.as_ref().is_some_and(fits) {
            let schedule = Schedule::forward_only(&self.shared.plan, form, count);
            self.forward = Some(self.track(schedule));
        }
        Ok(Self::next_pass(self.forward.as_mut(), micros, None))
    }

    fn next_pass(
        track: Option<&mut Track>,
        micros: Vec<Micro>,
        settings: Option<StepSettings>,
    ) -> Arc<Pass> {
        let track = track.expect("the plan has this form");
        track.number += 1;
        let targets = micros
            .iter()
            .flat_map(|m| &m.targets)
            .filter(|t| **t != IGNORE)
            .count();
        let adamw = OnceLock::new();
        if let Some(settings) = settings.filter(|settings| settings.max_grad_norm == 0.0) {
            adamw
                .set(Some(settings.adamw(1.0)))
                .expect("the lock is new");
        }
        let sorted = if settings.is_some() {
            micros
                .iter()
                .map(|micro| {
                    let (ids, starts, positions) = sorted_tokens(&micro.tokens);
                    SortedTokens {
                        ids,
                        starts,
                        positions,
                    }
                })
                .collect()
        } else {
            Vec::new()
        };
        Arc::new(Pass {
            schedule: track.schedule.clone(),
            progress: track.progress.clone(),
            awaited: track.awaited.clone(),
            number: track.number,
            data: PassData {
                sorted,
                targets: targets as u64,
                settings,
                losses: Mutex::new(vec![0.0; micros.len()]),
                norms: Mutex::new(Vec::new()),
                adamw,
                grad_norm: OnceLock::new(),
                logits: Mutex::new(vec![Vec::new(); micros.len()]),
                rows_ahead: OnceLock::new(),
                micros,
            },
        })
    }

    /// Hands the pass to the other lanes and runs the compute lane here.
    fn run(&self, pass: &Arc<Pass>) -> Result<()> {
        self.watch
            .enter(&pass.schedule, &pass.progress, pass.number);
        for (sender, _) in &self.lanes {
            // A lane that has ended left its failure behind.
            sender.send(pass.clone()).ok();
        }
        self.shared.tiers.device.enter(Queue::Compute);
        lanes::walk(&self.shared, Lane::Compute, pass, |index, action| {
            let device = &self.shared.tiers.device;
            let traced = self.card_trace.as_ref();
            let from = traced.and_then(|_| device.timed_point());
            let told = self.shared.compute(pass, action)?;
            if let Some(trace) = traced {
                trace.ends(device, action, from);
            }
            self.shared.poison_after(pass, index);
            self.shared.check_device(action)?;
            let is_awaited = pass.awaited[index] || told.is_some();
            if let (Some(marker), true, Some(point)) = (&self.marker, is_awaited, device.point()) {
                marker.mark_when_reached(pass, index, point, told);
                return Ok(());
            }
            told.map_or(Ok(()), |told| self.shared.take_told(pass, told))?;
            pass.progress.mark(index, pass.number);
            Ok(())
        })
        .and_then(|()| self.shared.await_told(pass))
        .map_err(|error| self.shared.failure.first_or(error))?;
        if pass.data.settings.is_some() {
            // The last number came after all that was launched; a pass without one is drained.
            let tiers = &self.shared.tiers;
            self.shared.idle.flush(&tiers.device, &tiers.stats);
        }
        Ok(())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shared.failure.set(Error::StoreFailed {
            first: "the run has ended".to_string(),
        });
        for track in self.train.iter().chain(&self.forward) {
            track.progress.wake();
        }
        for (sender, thread) in self.lanes.drain(..) {
            drop(sender);
            thread.join().ok();
        }
        self.marker.take();
        // Their events end before the device, which ends with `shared`.
        self.card_trace.take();
        self.shared.idle.clear();
    }
}

impl StepSettings {
    fn adamw(&self, grad_scale: f32) -> AdamwStep {
        let StepSettings {
            step,
            skipped,
            learning_rate,
            betas,
            eps,
            weight_decay,
            ..
        } = *self;
        let t = step - skipped;
        AdamwStep::new(learning_rate, betas, eps, weight_decay, t, grad_scale)
    }
}

impl Shared {
    fn show(&self, lane: Lane, pass: &Pass, action: &Action) {
        if let Some(observer) = self.observer.get() {
            let step = pass.data.settings.map_or(0, |settings| settings.step);
            observer(lane, action, step);
        }
    }

    /// cos and sin of every position, f32 `[seq_len, 2, D/2]`, computed in f32 as transformers
    /// does.
    fn write_rope_table(&self, spec: &ModelSpec) {
        let (frequencies, scale) = spec.rope.inverse_frequencies(spec.head_dim);
        let seq_len = self.plan.map.shape.seq_len;
        let mut table = Vec::with_capacity((seq_len * spec.head_dim) as usize);
        for position in 0..seq_len {
            let angles = frequencies
                .iter()
                .map(|frequency| position as f32 * frequency);
            table.extend(angles.clone().map(|angle| angle.cos() * scale));
            table.extend(angles.map(|angle| angle.sin() * scale));
        }
        let view = View::new(self.plan.map.rope, table.len() as u64, Dtype::F32);
        self.tiers.device.write_f32(view, &table);
    }

    /// A failed call of the device, met at the end of an action.
    fn check_device(&self, action: Action) -> Result<()> {
        self.tiers.device.check().map_err(|error| match error {
            Error::Device {
                device,
                call,
                message,
                remedy,
                ..
            } => Error::Device {
                device,
                call,
                message,
                during: format!(" during {action:?}"),
                remedy,
            },
            other => other,
        })
    }

    /// The error of a number that is not one; the run stops.
    fn non_finite(&self, pass: &Pass, what: String, value: f64) -> Error {
        Error::NonFinite {
            step: pass.data.settings.map_or(0, |settings| settings.step),
            what,
            value: value.to_string(),
            last_commit: self
                .last_commit
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone(),
        }
    }

    /// Global norm from the tiles' in tile order; sets the factor that clips it, or that nothing
    /// is updated.
    fn clip(&self, pass: &Pass) -> Result<()> {
        let settings = pass
            .data
            .settings
            .expect("only training passes have a norm");
        self.await_told(pass)?;
        let norm = pass.global_norm();
        let losses = pass.data.losses.lock();
        let losses = losses.unwrap_or_else(PoisonError::into_inner);
        let finite = !norm.is_nan() && losses.iter().all(|loss| loss.is_finite());
        let above = |limit: f64| !finite || norm > limit;
        let is_skipped = settings.skip_above.is_some_and(above);
        if !norm.is_finite() && !is_skipped {
            return Err(self.non_finite(pass, "gradient norm".to_string(), norm));
        }
        let scale = || clip_coefficient(norm, settings.max_grad_norm);
        let adamw = (!is_skipped).then(|| settings.adamw(scale()));
        pass.data.adamw.set(adamw).expect("a step is clipped once");
        Ok(())
    }
}

impl Pass {
    fn global_norm(&self) -> f64 {
        let norms = self
            .data
            .norms
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        norms.iter().sum::<f64>().sqrt()
    }

    /// A number that is not one makes the step one without an update.
    fn skips_non_finite(&self) -> bool {
        let settings = self.data.settings.as_ref();
        settings.is_some_and(|settings| settings.skip_above.is_some())
    }

    fn action(&self, index: usize) -> Action {
        self.schedule.actions[index].action
    }
}
