//! The plan: where each section lives, and how large every pool is.
//!
//! - A pure function of model, run config and budgets: the same input gives the same plan.
//! - Weights and states live in host; only the overflow goes to the device where it has room, then
//!   to the store, states before weights.
//! - What does not fit is refused with the bytes that are missing and what would help.
//! - A plan changes where bytes live and what is recomputed, never what is computed (invariant 1).
//!
//! Order within a step is `schedule`'s, its seconds are `schedule::simulate`'s; resolving `"auto"`
//! asks the machine and is `machine`'s.

pub mod anchors;
mod device;
mod flops;
mod homes;
mod print;
pub use flops::Flops;
pub use homes::CODERS;
pub use print::{bytes_text, count_text};
pub mod regions;

use crate::config::RunConfig;
use crate::error::{Error, Result};
use crate::model::ModelSpec;
use crate::tile::{PAGE_BYTES, Precision, SECTION_COUNT, Section, TileLayout};
use device::{check_card, fill_device, least_device};
use homes::{Anchors, Placed, Room};
use regions::DeviceMap;

/// What the plan needs to know of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceProfile {
    /// Name for people.
    pub name: String,
    /// Bytes of an activation.
    pub activation_bytes: u64,
    /// bf16 weights are converted before they are used.
    pub converts_bf16: bool,
    /// The card's ordinal; `None` is the CPU device.
    pub card: Option<usize>,
    /// Bytes that it takes beside its arena.
    pub fixed_bytes: u64,
}

/// What a card takes beside the arena: context, kernels, libraries, staging and the products'
/// workspaces; measured on an H200 with CUDA 13.
const CARD_FIXED_BYTES: u64 = 840 << 20;

impl DeviceProfile {
    /// The CPU device: f32 activations.
    pub fn cpu() -> DeviceProfile {
        DeviceProfile {
            name: "cpu".to_string(),
            activation_bytes: 4,
            converts_bf16: true,
            card: None,
            fixed_bytes: 0,
        }
    }

    /// A card: activations in the weights' format, which need no conversion.
    pub fn cuda(name: &str, card: usize, precision: Precision) -> DeviceProfile {
        DeviceProfile {
            name: name.to_string(),
            activation_bytes: Section::Weight.element_bytes(precision),
            converts_bf16: false,
            card: Some(card),
            fixed_bytes: CARD_FIXED_BYTES,
        }
    }
}

/// Bytes that a run may use in each tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budgets {
    /// The device: its arena and its fixed bytes.
    pub device: u64,
    /// The host's arena.
    pub host: u64,
    /// Spilled extents and anchors, all paths together.
    pub store: u64,
}

/// What a plan is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Every section of a tile, gradients, checkpoints; the forward-only form too.
    Train,
    /// Weights alone, forward only.
    Forward,
}

/// Tier of a section's home.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Home {
    /// A region of the device's arena; only of a block. It is demoted for its update and promoted
    /// after: a weight section whole, states extent by extent.
    Device,
    /// A slot of the host arena.
    Host,
    /// Extents of the scratch store.
    Store,
}

/// Where a finished gradient is until its update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GradientHome {
    /// In a slot of host that tiles share: the tile is updated as its gradient arrives.
    Shared,
    /// In a slot of host of its own.
    Host,
    /// In a region of the device of its own, from where it is demoted for its update.
    Device,
}

/// Layers whose updates wait for the end of the backward pass: without clipping, those whose
/// weights the next forward needs late, or whose gradients the backward pass gives late.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Deferred {
    /// So many from the embedding on.
    pub first: u16,
    /// So many blocks up to the last.
    pub last: u16,
}

impl Deferred {
    /// Every layer.
    pub const ALL: Deferred = Deferred {
        first: u16::MAX,
        last: 0,
    };

    /// Whether it names a layer of `count`.
    pub fn contains(self, layer: u16, count: u16) -> bool {
        layer < self.first || layer + 1 < count && count - 1 - layer <= self.last
    }
}

/// What is chosen by predicted seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Choice {
    /// Layers whose updates wait for the end of the backward pass; with clipping all do.
    pub deferred: Deferred,
    /// At least so many of the layers whose anchors leave the device have them in the store, even
    /// where states of tiles go there first.
    pub stored_anchors: u16,
    /// At most so many blocks have anchors that are computed again for their backward, from those
    /// of the block before: memory of the device for a forward of a block each.
    pub rebuilt_anchors: u16,
    /// Spilled moments are compressed, where the config leaves that to the plan.
    pub zstd: bool,
    /// Which layers spill first.
    pub order: SpillOrder,
    /// Spare memory of the device is a home of states, before it is of kept activations.
    pub states_on_device: bool,
}

impl Choice {
    /// What to begin with, by turns, until one fits: nothing chosen; then what makes room on a
    /// device. The CPU device's memory is RAM, as the host's is, and no home of states.
    pub(crate) fn to_fit(device: &DeviceProfile) -> Vec<Choice> {
        let choices = [(0, false), (0, true), (u16::MAX, false), (u16::MAX, true)];
        choices
            .into_iter()
            .filter(|(_, states_on_device)| device.card.is_some() || !states_on_device)
            .map(|(rebuilt_anchors, states_on_device)| Choice {
                rebuilt_anchors,
                states_on_device,
                ..Choice::default()
            })
            .collect()
    }
}

/// Which layers spill first, of those whose sections are as well spilled as others'.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SpillOrder {
    /// The last ones, whose updates come last where they wait for the norm.
    #[default]
    LastFirst,
    /// Spread over all, so that the disk has work throughout a step.
    Spread,
    /// Those that are updated under the next forward, where the disk has nothing else to do, from
    /// the last on; then the others, spread.
    DeferredFirst,
}

impl SpillOrder {
    /// As the plan's JSON has it.
    pub fn name(self) -> &'static str {
        match self {
            SpillOrder::LastFirst => "last",
            SpillOrder::Spread => "spread",
            SpillOrder::DeferredFirst => "deferred",
        }
    }
}

/// A tile's layout and the homes of its sections.
#[derive(Clone, Debug, PartialEq)]
pub struct TilePlan {
    /// Layout.
    pub layout: TileLayout,
    /// By [`Section`]; `None` where the section is absent.
    pub homes: [Option<Home>; SECTION_COUNT],
    /// Where its gradient waits.
    pub gradient: GradientHome,
}

impl TilePlan {
    /// Home of a section that is present.
    pub fn home(&self, section: Section) -> Home {
        self.homes[section as usize].expect("the section is present under the run's precision")
    }

    /// Sections that are spilled, in order.
    pub fn spilled(&self) -> impl Iterator<Item = Section> + '_ {
        Section::ALL
            .into_iter()
            .filter(|s| self.homes[*s as usize] == Some(Home::Store))
    }

    /// States that live on the device, in order.
    pub fn states_on_device(&self) -> impl Iterator<Item = Section> + '_ {
        Section::ALL
            .into_iter()
            .filter(|s| *s != Section::Weight && self.homes[*s as usize] == Some(Home::Device))
    }

    /// Whether a moment is spilled.
    pub fn spills_moments(&self) -> bool {
        self.spilled().any(Section::is_moment)
    }
}

/// Sizes within the host's arena.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostMap {
    /// Bytes of homes.
    pub homes: u64,
    /// Bytes of gradient slots, tiles' own and shared.
    pub gradients: u64,
    /// Bytes of each of the two gradient slots that blocks share; 0 without them.
    pub block_slot: u64,
    /// Bytes of the gradient slot that head and embed share; 0 without it.
    pub wide_slot: u64,
    /// Bytes of each of the two slots in which weights of the device are updated; 0 without them.
    pub weight_slot: u64,
    /// Bytes of anchors that are here between forward and backward.
    pub anchors: u64,
    /// Slabs of the ring.
    pub slabs: u64,
    /// Slabs of a ring of its own, through which commits are written beside training; 0 where
    /// checkpoints are off.
    pub commit_slabs: u64,
    /// Slabs in which spilled moments are compressed, each by a thread of its own; 0 where they are
    /// not.
    pub coder_slabs: u64,
    /// Bytes of a slab.
    pub slab_bytes: u64,
    /// Bytes of the arena.
    pub bytes: u64,
}

/// Placement, sizes and prediction for a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// What it is for.
    pub purpose: Purpose,
    /// Device it was made for.
    pub device: DeviceProfile,
    /// Budgets it was made for.
    pub budgets: Budgets,
    /// Formats of weights, master and moments.
    pub precision: Precision,
    /// What the rounding of bf16 moments draws from: the run's seed.
    pub seed: u64,
    /// Tiles by layer.
    pub tiles: Vec<TilePlan>,
    /// Layers 1 to here, inclusive, have their anchors in the store between forward and backward:
    /// the first ones, which backward needs last, of those that leave the device.
    pub stored_anchors: u16,
    /// So many were asked for ([`Choice::stored_anchors`]), in place of states of tiles: no tier
    /// lacked room for them.
    pub anchors_by_choice: bool,
    /// Which layers spill first.
    pub order: SpillOrder,
    /// Host arena.
    pub host: HostMap,
    /// Device arena.
    pub map: DeviceMap,
    /// (block, micro) pairs whose activations are kept, in slot order.
    pub kept: Vec<(u16, u32)>,
    /// Gradients wait for the global norm.
    pub clipping: bool,
    /// Layers that are updated in their order after the backward pass, under the next forward; the
    /// others as their gradients arrive. All of them with clipping.
    pub deferred: Deferred,
    /// Bytes of an element of a gradient in host.
    pub gradient_bytes: u64,
    /// The head computes with the embed tile's weight.
    pub tied: bool,
    /// Bytes of spilled extents of tiles in the store, padded to pages.
    pub spilled_bytes: u64,
    /// (keep + 1) × state bytes; 0 where checkpoints are off.
    pub checkpoint_bytes: u64,
    /// What drives are made to take.
    pub wear: Wear,
    /// Parameters.
    pub parameters: u64,
    /// Blocks.
    pub blocks: u16,
    /// Arithmetic of one token.
    pub flops: Flops,
}

/// What a run writes to drives beside spilled extents, and what they are rated for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Wear {
    /// Bytes of a commit; 0 where checkpoints are off.
    pub commit_bytes: u64,
    /// Steps from a commit to the next.
    pub commit_every: u64,
    /// Steps of the run, where they are given.
    pub steps: Option<u64>,
    /// Terabytes (10^12 bytes) that the drive may take, where they are given.
    pub drive_tbw: Option<f64>,
}

impl Wear {
    fn new(config: &RunConfig, purpose: Purpose, state_bytes: u64) -> Wear {
        let every = config.checkpoint.every;
        let commits = purpose == Purpose::Train && every > 0;
        Wear {
            commit_bytes: if commits { state_bytes } else { 0 },
            commit_every: every,
            steps: config.train.steps,
            drive_tbw: config.memory.drive_tbw,
        }
    }

    /// Bytes a step, of which `spilled` go to the scratch store, with commits spread over the steps
    /// between them.
    pub fn step_bytes(&self, spilled: u64) -> f64 {
        spilled as f64 + self.commit_bytes as f64 / self.commit_every.max(1) as f64
    }
}

impl Plan {
    /// Makes the plan, or says what is missing. Without clipping every layer is updated as its
    /// gradient arrives.
    pub fn new(
        spec: &ModelSpec,
        config: &RunConfig,
        device: &DeviceProfile,
        budgets: Budgets,
        purpose: Purpose,
    ) -> Result<Plan> {
        Plan::deferring(spec, config, device, budgets, purpose, Deferred::default())
    }

    /// As [`Plan::new`] of a run that trains; what would be refused may have no anchors of some
    /// blocks on the device, and states there where that is a card.
    pub fn fitting(
        spec: &ModelSpec,
        config: &RunConfig,
        device: &DeviceProfile,
        budgets: Budgets,
    ) -> Result<Plan> {
        let plan = |choice| Plan::choosing(spec, config, device, budgets, Purpose::Train, choice);
        let mut refused = None;
        for choice in Choice::to_fit(device) {
            match plan(choice) {
                Err(error @ Error::Budget { .. }) => refused = Some(error.or_nearer(refused)),
                planned => return planned,
            }
        }
        Err(refused.expect("all that was tried was refused"))
    }

    /// As [`Plan::new`], with the updates of `deferred` layers under the next forward; with
    /// clipping those of all layers are.
    pub fn deferring(
        spec: &ModelSpec,
        config: &RunConfig,
        device: &DeviceProfile,
        budgets: Budgets,
        purpose: Purpose,
        deferred: Deferred,
    ) -> Result<Plan> {
        let choice = Choice {
            deferred,
            ..Choice::default()
        };
        Plan::choosing(spec, config, device, budgets, purpose, choice)
    }

    /// As [`Plan::deferring`], with all that is chosen by predicted seconds as `choice` says.
    pub fn choosing(
        spec: &ModelSpec,
        config: &RunConfig,
        device: &DeviceProfile,
        budgets: Budgets,
        purpose: Purpose,
        choice: Choice,
    ) -> Result<Plan> {
        let clipping = config.train.max_grad_norm > 0.0;
        let precision = config.precision();
        let deferred = match purpose {
            Purpose::Forward => Deferred::default(),
            Purpose::Train if clipping => Deferred::ALL,
            Purpose::Train => choice.deferred,
        };
        check_card(spec, config, device)?;
        let rebuilt = choice.rebuilt_anchors;
        let least = least_device(spec, config, device, budgets.device, purpose, rebuilt)?;
        let arena = budgets.device - device.fixed_bytes;
        let asked = choice.stored_anchors.min(least.shape.travelling);
        let room = Room {
            budgets,
            spare: arena - least.bytes,
            anchors: Anchors {
                layers: least.shape.travelling,
                stored: asked,
                anchor_bytes: least.anchor_bytes,
                micros: least.shape.micros,
                rows: least.anchor_rows,
            },
            zstd: config.memory.zstd.or(choice.zstd),
            order: choice.order,
            states: choice.states_on_device,
        };
        let Placed {
            tiles,
            host,
            stored_anchors,
        } = homes::place(spec, config, purpose, deferred, room)?;
        let (map, kept) = fill_device(spec, config, &least, &tiles, arena);
        let in_store = |tile: &TilePlan, s| tile.homes[s as usize] == Some(Home::Store);
        let spilled_bytes = stored_bytes(&tiles, precision, in_store);
        let state_bytes = stored_bytes(&tiles, precision, |_, _| true);
        let wear = Wear::new(config, purpose, state_bytes);
        Ok(Plan {
            purpose,
            device: device.clone(),
            budgets,
            precision,
            seed: config.train.seed,
            tiles,
            stored_anchors,
            order: choice.order,
            anchors_by_choice: asked > 0 && stored_anchors == asked,
            host,
            map,
            kept,
            clipping,
            deferred,
            gradient_bytes: homes::gradient_bytes(config),
            tied: spec.tied,
            spilled_bytes,
            checkpoint_bytes: wear.commit_bytes * (config.checkpoint.held() + 1),
            wear,
            parameters: spec.parameters(),
            blocks: spec.blocks,
            flops: Flops::new(spec, config.data.seq_len, device.activation_bytes),
        })
    }

    /// Layers, embed and head included.
    pub fn layer_count(&self) -> u16 {
        self.blocks + 2
    }

    /// Slot of the kept activations of (block, micro), if they are kept.
    pub fn kept_slot(&self, block: u16, micro: u32) -> Option<u32> {
        let micros = self.map.shape.micros;
        if block >= self.blocks || u64::from(micro) >= micros {
            return None;
        }
        // Kept are the last pairs in forward order.
        let first = u64::from(self.blocks) * micros - self.kept.len() as u64;
        let slot = (u64::from(block) * micros + u64::from(micro)).checked_sub(first)?;
        Some(u32::try_from(slot).expect("kept slots are fewer than 2^32"))
    }

    /// Bytes of the store that anchors take, padded to pages.
    pub fn stored_anchor_bytes(&self) -> u64 {
        let place = self.map.anchor_bytes.next_multiple_of(PAGE_BYTES);
        u64::from(self.stored_anchors) * self.map.shape.micros * place
    }

    /// Bytes of the store: spilled extents and anchors.
    pub fn store_bytes(&self) -> u64 {
        self.spilled_bytes + self.stored_anchor_bytes()
    }

    /// Sections that have homes, in order.
    pub fn sections(&self) -> impl Iterator<Item = Section> + '_ {
        let of_first = &self.tiles[0].homes;
        let present = |section: &Section| of_first[*section as usize].is_some();
        Section::ALL.into_iter().filter(present)
    }

    /// Whether states live on the device.
    pub fn states_on_device(&self) -> bool {
        let has = |tile: &TilePlan| tile.states_on_device().next().is_some();
        self.tiles.iter().any(has)
    }

    /// Whether moments are in the store.
    pub fn spills_moments(&self) -> bool {
        self.tiles.iter().any(TilePlan::spills_moments)
    }

    /// Name, bytes that the plan takes and budget of each tier.
    pub fn tiers(&self) -> [(&'static str, u64, u64); 3] {
        let Budgets {
            device,
            host,
            store,
        } = self.budgets;
        let arena = self.map.bytes + self.device.fixed_bytes;
        [
            ("device", arena, device),
            ("host", self.host.bytes, host),
            ("store", self.store_bytes(), store),
        ]
    }

    /// Whether anything is in the store.
    pub fn spills(&self) -> bool {
        self.store_bytes() > 0
    }
}

/// Bytes of the extents of sections that are `wanted`.
fn stored_bytes(
    tiles: &[TilePlan],
    precision: Precision,
    wanted: impl Fn(&TilePlan, Section) -> bool,
) -> u64 {
    let of_tile = |tile: &TilePlan| -> u64 {
        let sections = Section::present(precision).filter(|s| wanted(tile, *s));
        sections
            .map(|s| extents_bytes(&tile.layout, s, precision))
            .sum()
    };
    tiles.iter().map(of_tile).sum()
}

/// Bytes of a section's extents in a store: each padded to a page.
pub fn extents_bytes(layout: &TileLayout, section: Section, precision: Precision) -> u64 {
    (0..layout.extent_count())
        .map(|index| {
            let elements = layout.extent_elements(index);
            let bytes = (elements.end - elements.start) * section.element_bytes(precision);
            bytes.next_multiple_of(PAGE_BYTES)
        })
        .sum()
}
