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

mod build;
pub mod choose;
mod link;
pub mod simulate;

use crate::plan::Plan;
use build::Builder;

/// Who carries out an action; a lane runs its actions one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// The device's arithmetic.
    Compute,
    /// Host (or store through host) to device.
    Up,
    /// Device to host.
    Down,
    /// AdamW over host tiles, with reads and writes of spilled sections and copies of states that
    /// live on the device.
    Update,
    /// Host to device, after an update: weights that live there.
    Return,
}

impl Lane {
    /// All lanes.
    pub const ALL: [Lane; 5] = [
        Lane::Compute,
        Lane::Up,
        Lane::Down,
        Lane::Update,
        Lane::Return,
    ];
}

/// A place for a layer's weights on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Buffer {
    /// One of the block buffers.
    Block(u32),
    /// The head's own: its tile's weight, and the embed tile's if tied.
    Head,
    /// The home of a block whose weights live on the device.
    Home(u16),
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

/// Where a finished gradient is before its demotion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finished {
    /// In its accumulator.
    In(Accumulator),
    /// In the place on the device where it waits.
    Parked,
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
    /// The anchor of a layer again: the forward of the block before, on its anchor.
    Rebuild {
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
    /// Copies a finished gradient to where it waits on the device.
    Park {
        /// Layer.
        layer: u16,
        /// From.
        accumulator: Accumulator,
    },
    /// Demotes a finished gradient.
    Demote {
        /// Layer.
        layer: u16,
        /// From.
        from: Finished,
        /// To.
        slot: GradientSlot,
    },
    /// Demotes a block's anchor to host until backward.
    DemoteAnchor {
        /// Layer.
        layer: u16,
        /// Micro-batch.
        micro: u32,
    },
    /// Promotes it again.
    PromoteAnchor {
        /// Layer.
        layer: u16,
        /// Micro-batch.
        micro: u32,
    },
    /// Demotes a weight section that lives on the device, for its update.
    DemoteWeight {
        /// Layer.
        layer: u16,
        /// To: one of the two weight slots.
        slot: u32,
    },
    /// The global norm, and the factor that clips it.
    Clip,
    /// AdamW over the rows of the embed tile that the next step names, so that it can begin.
    UpdateRows {
        /// The tile's gradient.
        slot: GradientSlot,
    },
    /// AdamW over a tile: of the embed tile, over the rows that [`Action::UpdateRows`] left.
    Update {
        /// Layer.
        layer: u16,
        /// Its gradient.
        slot: GradientSlot,
        /// Its weight section, where that lives on the device.
        weight: Option<u32>,
    },
    /// Promotes an updated weight section to its home on the device.
    Return {
        /// Layer.
        layer: u16,
        /// From.
        slot: u32,
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
