//! What each lane does with an action.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use crossbeam_channel::Receiver;

use super::idle::Idle;
use super::told::Told;
use super::{Pass, Shared, update};
use crate::device::{Dtype, Queue, View};
use crate::error::{Error, Result};
use crate::host::pool::thread_time;
use crate::layer::{self, HeadTemplate};
use crate::layer::{BlockUse, HeadAccumulators, HeadUse};
use crate::schedule::{Accumulator, Action, Buffer, Finished, Lane};
use crate::stats::Wait;
use crate::tile::{Precision, Section};

/// A panic of a thread that has one of these does not leave the others waiting.
pub(super) struct Ended<'a> {
    shared: &'a Shared,
    pass: Option<Arc<Pass>>,
}

impl Ended<'_> {
    pub(super) fn new(shared: &Shared) -> Ended<'_> {
        Ended { shared, pass: None }
    }

    /// Names the pass that the thread is in from here on.
    pub(super) fn within(&mut self, pass: Arc<Pass>) -> Arc<Pass> {
        self.pass = Some(pass.clone());
        pass
    }
}

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shared.failure.set(Error::StoreFailed {
                first: "a lane panicked".to_string(),
            });
            if let Some(pass) = &self.pass {
                pass.progress.wake();
            }
        }
    }
}

/// A lane's thread: passes until the engine is dropped or a lane fails.
pub(super) fn run(shared: &Shared, lane: Lane, passes: &Receiver<Arc<Pass>>) {
    let mut ended = Ended::new(shared);
    match lane {
        Lane::Up => shared.tiers.device.enter(Queue::Up),
        Lane::Down => shared.tiers.device.enter(Queue::Down),
        Lane::Return => shared.tiers.device.enter(Queue::Return),
        Lane::Compute | Lane::Update => {}
    }
    let mut states = crate::transfer::states::StateStream::new(&shared.tiers);
    for pass in passes {
        let pass = ended.within(pass);
        let result = match lane {
            Lane::Update => update::walk(shared, &pass, &mut states),
            lane => walk(shared, lane, &pass, |index, action| {
                let result = match lane {
                    Lane::Up => shared.up(&pass, action),
                    Lane::Return => shared.give_back(action),
                    _ => shared.down(&pass, action),
                };
                result?;
                shared.poison_after(&pass, index);
                // Copies are done; a poisoned place must be so too before others write to it.
                shared.tiers.device.settle();
                shared.check_device(action)?;
                pass.progress.mark(index, pass.number);
                Ok(())
            }),
        };
        if let Err(error) = result {
            shared.failure.set(error);
            pass.progress.wake();
            return;
        }
    }
}

/// Walks a lane's actions in order; ends early, with an error, when any lane has failed.
pub(super) fn walk(
    shared: &Shared,
    lane: Lane,
    pass: &Pass,
    mut act: impl FnMut(usize, Action) -> Result<()>,
) -> Result<()> {
    for index in pass.schedule.lane(lane) {
        if !await_turn(shared, lane, pass, index) {
            return Err(Error::StoreFailed {
                first: "another lane failed".to_string(),
            });
        }
        let (started, on_processor) = (Instant::now(), thread_time());
        let action = pass.action(index);
        shared.show(lane, pass, &action);
        if let Err(error) = act(index, action) {
            shared.failure.set(error);
            pass.progress.wake();
            return Err(Error::StoreFailed {
                first: "this lane failed".to_string(),
            });
        }
        let stats = &shared.tiers.stats;
        if lane != Lane::Compute {
            // A card copies by itself; on the CPU device lanes share the cores.
            let taken = match shared.tiers.device.is_asynchronous() {
                true => started.elapsed(),
                false => thread_time().saturating_sub(on_processor),
            };
            stats.moved(lane != Lane::Down, taken);
        }
        stats.trace(lane_name(lane), || format!("{action:?}"), started);
    }
    Ok(())
}

/// Waits for everything that an action is after; false if a lane has failed.
pub(super) fn await_turn(shared: &Shared, lane: Lane, pass: &Pass, index: usize) -> bool {
    for after in &pass.schedule.actions[index].after {
        // Its own stream keeps the compute lane's actions in order, done or only launched.
        let of = pass.schedule.actions[after.action as usize].lane;
        if (lane, of) == (Lane::Compute, Lane::Compute) {
            continue;
        }
        let number = pass.number - u64::from(after.previous);
        if pass.progress.is_done(after.action, number) {
            continue;
        }
        let compute = lane == Lane::Compute;
        let device = &shared.tiers.device;
        let (began, started) = (compute.then(|| Idle::begin(device)), Instant::now());
        if !pass.progress.wait(after.action, number) {
            return false;
        }
        let cause = match (lane, pass.action(after.action as usize)) {
            (Lane::Compute, Action::DemoteAnchor { .. } | Action::PromoteAnchor { .. }) => {
                Some(Wait::ComputeForAnchors)
            }
            (Lane::Compute, Action::Demote { .. }) => Some(Wait::ComputeForDemote),
            (Lane::Compute, _) => Some(Wait::ComputeForWeights),
            (Lane::Up, Action::Update { .. }) => Some(Wait::PromoteForUpdate),
            _ => None,
        };
        let stats = &shared.tiers.stats;
        match (cause, began) {
            (Some(cause), Some(began)) => shared.idle.end(device, stats, cause, began),
            (Some(cause), None) => stats.waited(cause, started.elapsed()),
            (None, _) => {}
        }
    }
    !shared.failure.is_set()
}

fn lane_name(lane: Lane) -> &'static str {
    match lane {
        Lane::Compute => "compute",
        Lane::Up => "up",
        Lane::Down => "down",
        Lane::Update => "update",
        Lane::Return => "return",
    }
}

impl Shared {
    fn up(&self, pass: &Pass, action: Action) -> Result<()> {
        let map = &self.plan.map;
        match action {
            Action::Gather { micro } => {
                let tokens = &pass.data.micros[micro as usize].tokens;
                let out = self.anchor(pass, 1, micro);
                self.tiers.gather_rows(tokens, self.hidden, out)
            }
            Action::PromoteAnchor { layer, micro } => {
                let anchor = self.anchor(pass, layer, micro);
                self.tiers.promote_anchor(layer, micro, anchor)
            }
            Action::Promote {
                layer,
                buffer: Buffer::Block(index),
            } => self
                .tiers
                .promote_weight(layer, map.buffers[index as usize]),
            Action::Promote {
                layer,
                buffer: Buffer::Head,
            } => {
                self.tiers.promote_weight(layer, map.head_weight)?;
                map.tied_weight
                    .map_or(Ok(()), |offset| self.tiers.promote_weight(0, offset))
            }
            other => unreachable!("{other:?} is not an action of the up lane"),
        }
    }

    /// The input of a layer, act `[T, H]`.
    fn anchor(&self, pass: &Pass, layer: u16, micro: u32) -> View {
        let tokens = pass.data.micros[micro as usize].tokens.len() as u64;
        let act = self.tiers.device.activation_dtype();
        let offset = self.plan.map.anchor(layer, micro);
        View::new(offset, tokens * self.hidden, act)
    }

    fn down(&self, pass: &Pass, action: Action) -> Result<()> {
        match action {
            Action::Demote { layer, from, slot } => {
                let gradient = match from {
                    Finished::In(accumulator) => self.finished_gradient(layer, accumulator),
                    Finished::Parked => self.parked_gradient(layer),
                };
                self.tiers.demote_gradient(gradient, slot);
            }
            Action::DemoteWeight { layer, slot } => self.tiers.demote_weight(layer, slot),
            Action::DemoteAnchor { layer, micro } => {
                let anchor = self.anchor(pass, layer, micro);
                self.tiers.demote_anchor(layer, micro, anchor)?;
            }
            other => unreachable!("{other:?} is not an action of the down lane"),
        }
        Ok(())
    }

    fn give_back(&self, action: Action) -> Result<()> {
        let Action::Return { layer, slot } = action else {
            unreachable!("{action:?} is not an action of the return lane");
        };
        self.tiers.return_weight(layer, slot);
        Ok(())
    }

    /// The accumulator's f32 view for a layer.
    pub(super) fn accumulator(&self, layer: u16, accumulator: Accumulator) -> View {
        let map = &self.plan.map;
        let offset = match accumulator {
            Accumulator::Block(index) => map.accumulators[index as usize],
            Accumulator::Head => map.head_accumulator,
            Accumulator::Embed => map.embed_accumulator,
        };
        View::new(offset, self.tiers.layout(layer).elements, Dtype::F32)
    }

    /// A finished gradient: rounded in place to the front of its accumulator, or as accumulated.
    fn finished_gradient(&self, layer: u16, accumulator: Accumulator) -> View {
        let view = self.accumulator(layer, accumulator);
        if self.plan.gradient_bytes == 2 {
            View {
                dtype: Dtype::Bf16,
                ..view
            }
        } else {
            view
        }
    }

    /// A finished gradient where it waits on the device.
    pub(super) fn parked_gradient(&self, layer: u16) -> View {
        let offset = self.plan.map.parked[usize::from(layer)];
        let dtype = match self.plan.gradient_bytes {
            2 => Dtype::Bf16,
            _ => Dtype::F32,
        };
        let offset = offset.expect("the plan has a place for a gradient that is parked");
        View::new(offset, self.tiers.layout(layer).elements, dtype)
    }

    /// Byte offsets of the bound weights: the layer's own, and the embed tile's for a tied head.
    fn bound(&self, layer: u16) -> (u64, u64) {
        let map = &self.plan.map;
        let is_head = layer + 1 == self.plan.layer_count();
        if let Some(compute) = map.compute_weight {
            let act = map.shape.activation_bytes;
            return (compute, compute + self.tiers.layout(layer).elements * act);
        }
        if is_head {
            (map.head_weight, map.tied_weight.unwrap_or(map.head_weight))
        } else {
            let buffer = usize::from(layer - 1) % map.buffers.len();
            let home = self.tiers.device_home(layer, Section::Weight);
            let weights = home.unwrap_or(map.buffers[buffer]);
            (weights, weights)
        }
    }

    fn bind(&self, layer: u16, buffer: Buffer) {
        let map = &self.plan.map;
        if map.compute_weight.is_none() {
            return;
        }
        let (own, tied) = self.bound(layer);
        let act = self.tiers.device.activation_dtype();
        let stored = match self.plan.precision {
            Precision::Bf16 | Precision::Bf16Moments => Dtype::Bf16,
            Precision::Fp32 => Dtype::F32,
        };
        let convert = |layer: u16, from: u64, to: u64| {
            let count = self.tiers.layout(layer).elements;
            self.tiers
                .device
                .convert(View::new(from, count, stored), View::new(to, count, act));
        };
        match buffer {
            Buffer::Block(index) => convert(layer, map.buffers[index as usize], own),
            Buffer::Home(_) => {
                let home = self.tiers.device_home(layer, Section::Weight);
                convert(layer, home.expect("it lives on the device"), own);
            }
            Buffer::Head => {
                convert(layer, map.head_weight, own);
                if let Some(weight) = map.tied_weight {
                    convert(0, weight, tied);
                }
            }
        }
    }

    /// The compute lane. An action may come to a number that the device has still to tell.
    pub(super) fn compute(&self, pass: &Pass, action: Action) -> Result<Option<Told>> {
        let map = &self.plan.map;
        let device = &self.tiers.device;
        let micro = |index: u32| &pass.data.micros[index as usize];
        let last = self.plan.layer_count() - 1;
        let block_use = |layer: u16, index: u32, x: u64, kept: Option<u32>| BlockUse {
            block: layer - 1,
            micro: micro(index),
            weights: self.bound(layer).0,
            x,
            activations: map.activations(kept),
        };
        match action {
            Action::Bind { layer, buffer } => self.bind(layer, buffer),
            Action::Forward { layer, micro, keep } => {
                let used = block_use(layer, micro, map.anchor(layer, micro), keep);
                self.block
                    .forward(device, map, used, Some(map.anchor(layer + 1, micro)));
            }
            Action::Rebuild { layer, micro } => {
                let before = layer - 1;
                let used = block_use(before, micro, map.anchor(before, micro), None);
                self.block
                    .forward(device, map, used, Some(map.anchor(layer, micro)));
            }
            Action::ForwardOnly { layer, micro } => {
                let x = map.anchor(1, micro);
                let used = block_use(layer, micro, x, None);
                self.block.forward(device, map, used, Some(x));
            }
            Action::Clear { layer, accumulator } => {
                device.fill(self.accumulator(layer, accumulator), 0.0);
            }
            Action::Loss { micro } => {
                return Ok(Some(self.loss(pass, micro, map.anchor(last, micro), true)));
            }
            Action::Evaluate { micro } => {
                return Ok(Some(self.loss(pass, micro, map.anchor(1, micro), false)));
            }
            Action::Logits { micro } => self.logits(pass, micro),
            Action::Backward {
                layer,
                micro,
                kept,
                accumulator,
            } => {
                let used = block_use(layer, micro, map.anchor(layer, micro), kept);
                match kept {
                    None => self.block.forward(device, map, used, None),
                    Some(slot) if map.is_lean(slot) => self.block.restore(device, map, used),
                    Some(_) => {}
                }
                let accumulator = self.accumulator(layer, accumulator).offset;
                self.block
                    .backward(device, map, used, map.anchor(last, micro), accumulator);
            }
            Action::EmbedBackward { micro } => self.embed_backward(pass, micro),
            Action::Finish { layer, accumulator } => {
                return Ok(Some(self.finish(layer, accumulator)));
            }
            Action::Park { layer, accumulator } => {
                let gradient = self.finished_gradient(layer, accumulator);
                device.convert(gradient, self.parked_gradient(layer));
            }
            Action::Clip => self.clip(pass)?,
            other => unreachable!("{other:?} is not an action of the compute lane"),
        }
        Ok(None)
    }

    fn embed_backward(&self, pass: &Pass, index: u32) {
        let (micro, order) = (
            &pass.data.micros[index as usize],
            &pass.data.sorted[index as usize],
        );
        // The tensor, without the padding at the tile's end.
        let accumulator = View {
            count: self.tiers.layout(0).tensors[0].count,
            ..self.accumulator(0, Accumulator::Embed)
        };
        let dy = self.plan.map.anchor(self.plan.layer_count() - 1, index);
        let device = &self.tiers.device;
        layer::embed_backward(device, micro, order, self.hidden, dy, accumulator);
    }

    fn head_use<'a>(&self, pass: &'a Pass, micro: u32, x: u64) -> (&HeadTemplate, HeadUse<'a>) {
        let (weights, tied_weights) = self.bound(self.plan.layer_count() - 1);
        let micro = &pass.data.micros[micro as usize];
        (
            &self.head,
            HeadUse {
                micro,
                weights,
                tied_weights,
                x,
            },
        )
    }

    fn loss(&self, pass: &Pass, micro: u32, x: u64, gradients: bool) -> Told {
        let map = &self.plan.map;
        let (head, used) = self.head_use(pass, micro, x);
        let accumulators = HeadAccumulators {
            head: map.head_accumulator,
            embed: map.embed_accumulator,
        };
        let gradients = gradients.then_some(accumulators);
        let number = head.loss(
            &self.tiers.device,
            map,
            used,
            pass.data.targets.max(1),
            gradients,
        );
        Told::Loss { micro, number }
    }

    fn logits(&self, pass: &Pass, micro: u32) {
        let x = self.plan.map.anchor(1, micro);
        let (head, used) = self.head_use(pass, micro, x);
        let rows: Vec<u32> = used.micro.bounds[1..].iter().map(|end| end - 1).collect();
        let logits = head.logits(&self.tiers.device, &self.plan.map, used, &rows);
        pass.data
            .logits
            .lock()
            .unwrap_or_else(PoisonError::into_inner)[micro as usize] = logits;
    }

    /// Norm of a finished gradient, then its one rounding.
    fn finish(&self, layer: u16, accumulator: Accumulator) -> Told {
        let view = self.accumulator(layer, accumulator);
        let number = self.tiers.device.squared_norm(view);
        if self.plan.gradient_bytes == 2 {
            self.tiers.device.round_in_place(view);
        }
        Told::Norm { layer, number }
    }
}
