//! One step as data: which action runs on which lane, after which others.
//!
//! - Derived from the plan alone; `step` obeys it, `simulate` times it, tests replay it.
//! - A lane runs its actions in order. Everything else that an action waits for is in its `after`
//!   list: actions of the same step, or of the one before (`previous`), which the first skips.
//! - Steps of a run overlap through those lists only: with clipping, the updates of step s run
//!   under the forward of step s + 1, layer by layer.
//! - The order of micro-batches, of accumulation and of tile norms is the same under every plan
//!   (invariant 1); a plan adds and removes transfers, and turns *keep* into *recompute*.
//!
//! Nothing here knows sizes or seconds, nor how an action is carried out.

pub mod simulate;

use crate::plan::{GradientSlots, Plan};

/// Who carries out an action; a lane runs its actions one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// The device's arithmetic.
    Compute,
    /// Host (or store through host) to device.
    Up,
    /// Device to host.
    Down,
    /// AdamW over host tiles, with the store's reads and writes of spilled sections.
    Update,
}

impl Lane {
    /// All lanes.
    pub const ALL: [Lane; 4] = [Lane::Compute, Lane::Up, Lane::Down, Lane::Update];
}

/// A place for a layer's weights on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Buffer {
    /// One of the block buffers.
    Block(u32),
    /// The head's own: its tile's weight, and the embed tile's if tied.
    Head,
}

/// An f32 gradient accumulator on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulator {
    /// One of the two for blocks.
    Block(u32),
    /// The head tile's.
    Head,
    /// The embed tile's; the same memory as the head's if untied.
    Embed,
}

/// A place in host where a finished gradient waits for its update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GradientSlot {
    /// The tile's own.
    Tile(u16),
    /// One of the two of block size.
    Block(u32),
    /// The one for head and embed.
    Wide,
}

/// One thing to do. Layers are indexed as in the model: 0 embed, 1..=L blocks, L + 1 head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Copies the embedding rows of a micro-batch to the anchor of layer 1.
    Gather {
        /// Micro-batch.
        micro: u32,
    },
    /// Promotes a layer's weight section.
    Promote {
        /// Layer.
        layer: u16,
        /// Into.
        buffer: Buffer,
    },
    /// Makes the layer's weights those that launches use.
    Bind {
        /// Layer.
        layer: u16,
        /// From.
        buffer: Buffer,
    },
    /// A block's forward; reads the anchor of `layer`, writes that of the next.
    Forward {
        /// Layer.
        layer: u16,
        /// Micro-batch.
        micro: u32,
        /// Slot in which the activations stay for backward; `None` recomputes them.
        keep: Option<u32>,
    },
    /// A block's forward in place on the anchor of layer 1; nothing stays.
    ForwardOnly {
        /// Layer.
        layer: u16,
        /// Micro-batch.
        micro: u32,
    },
    /// The head's forward, loss and backward; leaves dHidden in the last anchor.
    Loss {
        /// Micro-batch.
        micro: u32,
    },
    /// The head's forward and loss.
    Evaluate {
        /// Micro-batch.
        micro: u32,
    },
    /// The head's logits of the last token of each sequence.
    Logits {
        /// Micro-batch.
        micro: u32,
    },
    /// Sets an accumulator to zero.
    Clear {
        /// Layer that it is for.
        layer: u16,
        /// Which.
        accumulator: Accumulator,
    },
    /// A block's backward, from kept activations or from its anchor.
    Backward {
        /// Layer.
        layer: u16,
        /// Micro-batch.
        micro: u32,
        /// Slot of kept activations.
        kept: Option<u32>,
        /// Where gradients are added.
        accumulator: Accumulator,
    },
    /// The embedding's backward.
    EmbedBackward {
        /// Micro-batch.
        micro: u32,
    },
    /// The tile's norm from its accumulator, then the one rounding to the gradient's format.
    Finish {
        /// Layer.
        layer: u16,
        /// Which.
        accumulator: Accumulator,
    },
    /// Demotes a finished gradient.
    Demote {
        /// Layer.
        layer: u16,
        /// From.
        accumulator: Accumulator,
        /// To.
        slot: GradientSlot,
    },
    /// The global norm, and the factor that clips it.
    Clip,
    /// AdamW over a tile.
    Update {
        /// Layer.
        layer: u16,
        /// Its gradient.
        slot: GradientSlot,
    },
}

/// Something that an action waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct After {
    /// Index of the other action.
    pub action: u32,
    /// It is that of the step before; nothing to wait for in a run's first step.
    pub previous: bool,
}

/// An action with its lane and what it waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduledAction {
    /// What.
    pub action: Action,
    /// Where.
    pub lane: Lane,
    /// When.
    pub after: Vec<After>,
}

/// What a schedule is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// Forward, backward, update.
    Train,
    /// Forward and loss.
    Evaluate,
    /// Forward and the last logits.
    Generate,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// What it is for.
    pub form: Form,
    /// Micro-batches.
    pub micros: u32,
    /// Actions in an order that respects every `after` of the same step.
    pub actions: Vec<ScheduledAction>,
}

impl Schedule {
    /// The training step of a plan.
    pub fn train(plan: &Plan) -> Schedule {
        let micros = u32::try_from(plan.map.shape.micros).expect("micro-batches are capped");
        let mut builder = Builder::new(plan, Form::Train, micros);
        builder.gather();
        builder.forward();
        builder.loss();
        builder.backward();
        builder.update();
        builder.link_previous();
        builder.schedule
    }

    /// A pass without gradients over `micros` micro-batches, at most the plan's.
    pub fn forward_only(plan: &Plan, form: Form, micros: u32) -> Schedule {
        assert!(form != Form::Train && u64::from(micros) <= plan.map.shape.micros);
        let mut builder = Builder::new(plan, form, micros);
        builder.gather();
        builder.forward();
        builder.loss();
        builder.link_previous();
        builder.schedule
    }

    /// Indices of a lane's actions, in order.
    pub fn lane(&self, lane: Lane) -> impl Iterator<Item = usize> + '_ {
        (0..self.actions.len()).filter(move |index| self.actions[*index].lane == lane)
    }

    /// Index of the last action equal to `action`.
    pub fn index_of(&self, action: Action) -> Option<u32> {
        let index = self
            .actions
            .iter()
            .rposition(|scheduled| scheduled.action == action)?;
        Some(u32::try_from(index).expect("a schedule has fewer than 2^32 actions"))
    }
}

struct Builder<'a> {
    plan: &'a Plan,
    head: u16,
    schedule: Schedule,
    /// Last promotion into each layer's buffer.
    promoted: Vec<Option<u32>>,
    /// Last compute action that used each block buffer.
    used: Vec<Option<u32>>,
    demoted: Vec<Option<u32>>,
    updated: Vec<Option<u32>>,
}

impl<'a> Builder<'a> {
    fn new(plan: &'a Plan, form: Form, micros: u32) -> Builder<'a> {
        let layers = usize::from(plan.layer_count());
        Builder {
            plan,
            head: plan.layer_count() - 1,
            schedule: Schedule {
                form,
                micros,
                actions: Vec::new(),
            },
            promoted: vec![None; layers],
            used: vec![None; plan.map.buffers.len()],
            demoted: vec![None; layers],
            updated: vec![None; layers],
        }
    }

    fn push(&mut self, lane: Lane, action: Action, after: &[Option<u32>]) -> u32 {
        let index = u32::try_from(self.schedule.actions.len()).expect("fewer than 2^32 actions");
        let after = after.iter().flatten().map(|&action| After {
            action,
            previous: false,
        });
        self.schedule.actions.push(ScheduledAction {
            action,
            lane,
            after: after.collect(),
        });
        index
    }

    fn trains(&self) -> bool {
        self.schedule.form == Form::Train
    }

    fn buffer_index(&self, layer: u16) -> usize {
        usize::from(layer - 1) % self.plan.map.buffers.len()
    }

    fn buffer(&self, layer: u16) -> Buffer {
        Buffer::Block(u32::try_from(self.buffer_index(layer)).expect("at most 8 buffers"))
    }

    /// Accumulator of a layer: blocks take turns.
    fn accumulator(&self, layer: u16) -> Accumulator {
        if layer == 0 {
            Accumulator::Embed
        } else if layer == self.head {
            Accumulator::Head
        } else {
            Accumulator::Block(u32::from(self.head - 1 - layer) % 2)
        }
    }

    fn slot(&self, layer: u16) -> GradientSlot {
        match self.plan.host.gradient_slots {
            GradientSlots::PerTile => GradientSlot::Tile(layer),
            GradientSlots::Shared if layer == 0 || layer == self.head => GradientSlot::Wide,
            GradientSlots::Shared => GradientSlot::Block(u32::from(self.head - 1 - layer) % 2),
        }
    }

    fn gather(&mut self) {
        for micro in 0..self.schedule.micros {
            self.push(Lane::Up, Action::Gather { micro }, &[]);
        }
    }

    fn promote(&mut self, layer: u16) {
        let buffer = self.buffer(layer);
        let free = self.used[self.buffer_index(layer)];
        let index = self.push(Lane::Up, Action::Promote { layer, buffer }, &[free]);
        self.promoted[usize::from(layer)] = Some(index);
    }

    fn bind(&mut self, layer: u16, buffer: Buffer) -> u32 {
        let promoted = self.promoted[usize::from(layer)];
        self.push(Lane::Compute, Action::Bind { layer, buffer }, &[promoted])
    }

    fn forward(&mut self) {
        for layer in 1..self.head {
            self.promote(layer);
            let buffer = self.buffer(layer);
            let mut last = self.bind(layer, buffer);
            for micro in 0..self.schedule.micros {
                let gathered = (layer == 1).then_some(micro);
                let action = if self.trains() {
                    let keep = self.plan.kept_slot(layer - 1, micro);
                    Action::Forward { layer, micro, keep }
                } else {
                    Action::ForwardOnly { layer, micro }
                };
                last = self.push(Lane::Compute, action, &[gathered]);
            }
            let buffer = self.buffer_index(layer);
            self.used[buffer] = Some(last);
        }
    }

    fn loss(&mut self) {
        let head = self.head;
        let action = Action::Promote {
            layer: head,
            buffer: Buffer::Head,
        };
        self.promoted[usize::from(head)] = Some(self.push(Lane::Up, action, &[]));
        if self.trains() {
            let accumulator = Accumulator::Head;
            self.push(
                Lane::Compute,
                Action::Clear {
                    layer: head,
                    accumulator,
                },
                &[],
            );
            if self.plan.tied {
                let accumulator = Accumulator::Embed;
                self.push(
                    Lane::Compute,
                    Action::Clear {
                        layer: 0,
                        accumulator,
                    },
                    &[],
                );
            }
        }
        self.bind(head, Buffer::Head);
        for micro in 0..self.schedule.micros {
            let action = match self.schedule.form {
                Form::Train => Action::Loss { micro },
                Form::Evaluate => Action::Evaluate { micro },
                Form::Generate => Action::Logits { micro },
            };
            self.push(Lane::Compute, action, &[]);
        }
        if self.trains() {
            self.finish(head);
        }
    }

    /// Norm, rounding, demotion, and without clipping the update.
    fn finish(&mut self, layer: u16) {
        let accumulator = self.accumulator(layer);
        let finished = self.push(Lane::Compute, Action::Finish { layer, accumulator }, &[]);
        let slot = self.slot(layer);
        // The slot's previous gradient of this step must have been consumed.
        let consumed = match slot {
            GradientSlot::Tile(_) => None,
            GradientSlot::Block(_) if layer + 2 < self.head => self.updated[usize::from(layer) + 2],
            GradientSlot::Block(_) => None,
            GradientSlot::Wide => (layer == 0)
                .then(|| self.updated[usize::from(self.head)])
                .flatten(),
        };
        let action = Action::Demote {
            layer,
            accumulator,
            slot,
        };
        let demoted = self.push(Lane::Down, action, &[Some(finished), consumed]);
        self.demoted[usize::from(layer)] = Some(demoted);
        if !self.plan.clipping {
            let updated = self.push(
                Lane::Update,
                Action::Update { layer, slot },
                &[Some(demoted)],
            );
            self.updated[usize::from(layer)] = Some(updated);
        }
    }

    fn backward(&mut self) {
        let resident = u16::try_from(self.plan.map.buffers.len()).expect("at most 8 buffers");
        for layer in (1..self.head).rev() {
            // The last blocks of the forward are still in their buffers.
            if self.head - layer > resident {
                self.promote(layer);
            }
            let accumulator = self.accumulator(layer);
            let demoted = (layer + 2 < self.head).then(|| self.demoted[usize::from(layer) + 2]);
            let clear = Action::Clear { layer, accumulator };
            self.push(Lane::Compute, clear, &[demoted.flatten()]);
            let buffer = self.buffer(layer);
            let mut last = self.bind(layer, buffer);
            for micro in 0..self.schedule.micros {
                let kept = self.plan.kept_slot(layer - 1, micro);
                let action = Action::Backward {
                    layer,
                    micro,
                    kept,
                    accumulator,
                };
                last = self.push(Lane::Compute, action, &[]);
            }
            let buffer = self.buffer_index(layer);
            self.used[buffer] = Some(last);
            self.finish(layer);
        }
        if !self.plan.tied {
            let action = Action::Clear {
                layer: 0,
                accumulator: Accumulator::Embed,
            };
            let demoted = self.demoted[usize::from(self.head)];
            self.push(Lane::Compute, action, &[demoted]);
        }
        for micro in 0..self.schedule.micros {
            self.push(Lane::Compute, Action::EmbedBackward { micro }, &[]);
        }
        self.finish(0);
    }

    fn update(&mut self) {
        if !self.plan.clipping {
            return;
        }
        let clip = self.push(Lane::Compute, Action::Clip, &[]);
        for layer in 0..=self.head {
            let demoted = self.demoted[usize::from(layer)];
            let slot = self.slot(layer);
            let action = Action::Update { layer, slot };
            let updated = self.push(Lane::Update, action, &[Some(clip), demoted]);
            self.updated[usize::from(layer)] = Some(updated);
        }
    }

    /// Waits on the step before: a tile's use for its update, a place's reuse for its last user.
    fn link_previous(&mut self) {
        let mut links: Vec<(usize, u32)> = Vec::new();
        let mut buffers_seen = vec![false; self.plan.map.buffers.len()];
        let mut blocks_cleared = 0;
        let last_block_use = self.used.clone();
        let index = |action| self.schedule.index_of(action);
        let last_of_head = self.schedule.actions.iter().rposition(|s| {
            matches!(
                s.action,
                Action::Loss { .. } | Action::Evaluate { .. } | Action::Logits { .. }
            )
        });
        let last_of_head = last_of_head.and_then(|i| u32::try_from(i).ok());
        for (at, scheduled) in self.schedule.actions.iter().enumerate() {
            let mut link = |other: Option<u32>| links.extend(other.map(|other| (at, other)));
            match scheduled.action {
                Action::Gather { micro } => {
                    link(self.updated[0]);
                    let first = self.accumulator(1);
                    let kept = self.plan.kept_slot(0, micro);
                    link(index(Action::Backward {
                        layer: 1,
                        micro,
                        kept,
                        accumulator: first,
                    }));
                    if !self.trains() {
                        link(last_of_head);
                    }
                }
                Action::Promote {
                    layer,
                    buffer: Buffer::Block(_),
                } => {
                    link(self.updated[usize::from(layer)]);
                    let buffer = self.buffer_index(layer);
                    if !buffers_seen[buffer] {
                        link(last_block_use[buffer]);
                        buffers_seen[buffer] = true;
                    }
                }
                Action::Promote {
                    layer,
                    buffer: Buffer::Head,
                } => {
                    link(self.updated[usize::from(layer)]);
                    link(last_of_head);
                    if self.plan.tied {
                        link(self.updated[0]);
                    }
                }
                Action::Clear {
                    accumulator: Accumulator::Block(_),
                    ..
                } => {
                    // The last two blocks of the step before hold the two accumulators.
                    blocks_cleared += 1;
                    if blocks_cleared <= 2 {
                        link(self.last_demote(scheduled.action));
                    }
                }
                Action::Clear {
                    accumulator: Accumulator::Head,
                    layer,
                } => {
                    let holder = if self.plan.tied { layer } else { 0 };
                    link(self.demoted[usize::from(holder)]);
                }
                Action::Clear {
                    accumulator: Accumulator::Embed,
                    ..
                } => {
                    link(self.demoted[0]);
                }
                Action::Demote { slot, .. } => link(self.last_update(slot)),
                _ => {}
            }
        }
        for (at, action) in links {
            self.schedule.actions[at].after.push(After {
                action,
                previous: true,
            });
        }
    }

    /// Last demotion from the accumulator that `clear` is for.
    fn last_demote(&self, clear: Action) -> Option<u32> {
        let Action::Clear { accumulator, .. } = clear else {
            return None;
        };
        let index = self.schedule.actions.iter().rposition(
            |s| matches!(s.action, Action::Demote { accumulator: a, .. } if a == accumulator),
        )?;
        u32::try_from(index).ok()
    }

    /// Last update that consumes `slot`.
    fn last_update(&self, slot: GradientSlot) -> Option<u32> {
        let index = self
            .schedule
            .actions
            .iter()
            .rposition(|s| matches!(s.action, Action::Update { slot: of, .. } if of == slot))?;
        u32::try_from(index).ok()
    }
}
