//! The plan: where each section lives, and how large every pool is.
//!
//! - A pure function of model, run config and budgets: the same input gives the same plan.
//! - Weights and states live in host; only the overflow goes to the store, states before weights.
//! - What does not fit is refused with the bytes that are missing and what would help.
//! - A plan changes where bytes live and what is recomputed, never what is computed (invariant 1).
//!
//! Order within a step is `schedule`'s, its seconds are `schedule::simulate`'s; resolving `"auto"`
//! asks the machine and is `machine`'s.

mod print;
pub use print::{bytes_text, count_text};
pub mod regions;

use crate::config::{Recompute, RunConfig};
use crate::error::{Error, Result};
use crate::model::ModelSpec;
use crate::tile::{
    EXTENT_BYTES_MAX, EXTENT_ELEMENTS, PAGE_BYTES, Precision, SECTION_COUNT, Section, TileLayout,
};
use regions::{DeviceMap, DeviceShape};

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
}

impl DeviceProfile {
    /// The CPU device: f32 activations.
    pub fn cpu() -> DeviceProfile {
        DeviceProfile {
            name: "cpu".to_string(),
            activation_bytes: 4,
            converts_bf16: true,
            card: None,
        }
    }

    /// A card: activations in the weights' format, which need no conversion.
    pub fn cuda(name: &str, card: usize, precision: Precision) -> DeviceProfile {
        DeviceProfile {
            name: name.to_string(),
            activation_bytes: Section::Weight.element_bytes(precision),
            converts_bf16: false,
            card: Some(card),
        }
    }
}

/// Bytes that a run may use in each tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budgets {
    /// The device's arena.
    pub device: u64,
    /// The host's arena.
    pub host: u64,
    /// Spilled extents, all paths together.
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
    /// A slot of the host arena.
    Host,
    /// Extents of the scratch store.
    Store,
}

/// A tile's layout and the homes of its sections.
#[derive(Clone, Debug, PartialEq)]
pub struct TilePlan {
    /// Layout.
    pub layout: TileLayout,
    /// By [`Section`]; `None` where the section is absent.
    pub homes: [Option<Home>; SECTION_COUNT],
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
}

/// Where finished gradients wait in host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientSlots {
    /// One slot a tile: all wait for the norm.
    PerTile,
    /// Two slots of block size and one wide: a tile is updated as its gradient arrives.
    Shared,
}

/// Sizes within the host's arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostMap {
    /// Bytes of homes.
    pub homes: u64,
    /// Bytes of gradient slots.
    pub gradients: u64,
    /// How gradients wait.
    pub gradient_slots: GradientSlots,
    /// Slabs of the ring.
    pub slabs: u64,
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
    /// Format of weights and master.
    pub precision: Precision,
    /// Tiles by layer.
    pub tiles: Vec<TilePlan>,
    /// Host arena.
    pub host: HostMap,
    /// Device arena.
    pub map: DeviceMap,
    /// (block, micro) pairs whose activations are kept, in slot order.
    pub kept: Vec<(u16, u32)>,
    /// Gradients wait for the global norm.
    pub clipping: bool,
    /// Bytes of an element of a gradient in host.
    pub gradient_bytes: u64,
    /// The head computes with the embed tile's weight.
    pub tied: bool,
    /// Bytes of spilled extents in the store, padded to pages.
    pub spilled_bytes: u64,
    /// (keep + 1) × state bytes; 0 where checkpoints are off.
    pub checkpoint_bytes: u64,
    /// Parameters.
    pub parameters: u64,
    /// Blocks.
    pub blocks: u16,
    /// FLOPs of one token's forward.
    pub flops: Flops,
}

/// FLOPs of one token's forward: two a multiply-add, causal attention counted at half its square.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Flops {
    /// A block, attention included, at the longest sequence.
    pub block: f64,
    /// The head.
    pub head: f64,
}

impl Flops {
    fn new(spec: &ModelSpec, seq_len: u64) -> Flops {
        let matrices = spec.tile_layout(1).decayed_elements as f64;
        let attention = (seq_len * spec.heads * spec.head_dim) as f64;
        Flops {
            block: 2.0 * matrices + 2.0 * attention,
            head: 2.0 * (spec.vocab_size * spec.hidden) as f64,
        }
    }
}

impl Plan {
    /// Makes the plan, or says what is missing.
    pub fn new(
        spec: &ModelSpec,
        config: &RunConfig,
        device: &DeviceProfile,
        budgets: Budgets,
        purpose: Purpose,
    ) -> Result<Plan> {
        let (map, kept) = plan_device(spec, config, device, budgets.device, purpose)?;
        let clipping = config.train.max_grad_norm > 0.0;
        let precision = config.model.precision;
        let gradient_bytes = match precision {
            Precision::Bf16 => config.train.gradient_dtype.bytes(),
            Precision::Fp32 => 4,
        };
        let layouts = spec.tile_layouts();
        let mut host = host_pools(&layouts, config, clipping, precision, gradient_bytes);
        if purpose == Purpose::Forward {
            host.bytes -= host.gradients;
            host.gradients = 0;
        }
        let tiles = place_sections(layouts, config, &mut host, budgets, purpose)?;
        let spilled_bytes: u64 = tiles
            .iter()
            .flat_map(|tile| {
                tile.spilled()
                    .map(|s| extents_bytes(&tile.layout, s, precision))
            })
            .sum();
        let state_bytes: u64 = tiles
            .iter()
            .flat_map(|tile| {
                Section::present(precision).map(|s| extents_bytes(&tile.layout, s, precision))
            })
            .sum();
        let every = config.checkpoint.every;
        let checkpoint_bytes = match purpose {
            Purpose::Train if every > 0 => state_bytes * (config.checkpoint.keep + 1),
            _ => 0,
        };
        Ok(Plan {
            purpose,
            device: device.clone(),
            budgets,
            precision,
            tiles,
            host,
            map,
            kept,
            clipping,
            gradient_bytes,
            tied: spec.tied,
            spilled_bytes,
            checkpoint_bytes,
            parameters: spec.parameters(),
            blocks: spec.blocks,
            flops: Flops::new(spec, config.data.seq_len),
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

    /// Whether anything lives in the store.
    pub fn spills(&self) -> bool {
        self.spilled_bytes > 0
    }
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

/// The device's map with as many kept activations as fit.
fn plan_device(
    spec: &ModelSpec,
    config: &RunConfig,
    device: &DeviceProfile,
    budget: u64,
    purpose: Purpose,
) -> Result<(DeviceMap, Vec<(u16, u32)>)> {
    let micros = config.train.micro_batches;
    let mut shape = DeviceShape {
        tokens: config.train.micro_batch * config.data.seq_len,
        seq_len: config.data.seq_len,
        micros,
        buffers: config.memory.buffers,
        kept: 0,
        activation_bytes: device.activation_bytes,
        converts_weights: device.converts_bf16 && config.model.precision == Precision::Bf16,
        precision: config.model.precision,
        trains: purpose == Purpose::Train,
    };
    let least = DeviceMap::new(spec, shape);
    let pairs = u64::from(spec.blocks) * micros;
    let room = budget.saturating_sub(least.bytes) / least.workspace.bytes.max(1);
    shape.kept = match config.memory.recompute {
        _ if purpose == Purpose::Forward => 0,
        Recompute::All => 0,
        Recompute::Auto => room.min(pairs),
        Recompute::None => pairs,
    };
    let map = DeviceMap::new(spec, shape);
    if map.bytes > budget || map.bytes == regions::TOO_LARGE {
        return Err(device_refusal(spec, config, &least, &map, budget));
    }
    // The last in forward order are kept: they wait for the shortest time.
    let all = (0..spec.blocks).flat_map(|block| {
        (0..micros).map(move |micro| (block, u32::try_from(micro).expect("micros are capped")))
    });
    let kept = all
        .skip(usize::try_from(pairs - shape.kept).expect("pairs are capped"))
        .collect();
    Ok((map, kept))
}

/// Why the device cannot hold the run, with the largest count of micro-batches that it can.
fn device_refusal(
    spec: &ModelSpec,
    config: &RunConfig,
    least: &DeviceMap,
    map: &DeviceMap,
    budget: u64,
) -> Error {
    let (shape, micros) = (map.shape, map.shape.micros);
    let anchors = if shape.trains {
        u64::from(spec.blocks) + 1
    } else {
        1
    };
    // A micro-batch's anchors, and what of it must be kept.
    let per_micro = anchors
        .saturating_mul(map.anchor_bytes)
        .saturating_add((shape.kept / micros).saturating_mul(map.workspace.bytes));
    let fixed = map.bytes.saturating_sub(per_micro.saturating_mul(micros));
    let largest = budget.saturating_sub(fixed) / per_micro;
    let remedy = if config.memory.recompute == Recompute::None && least.bytes <= budget {
        "set memory.recompute = \"auto\", or raise memory.device".to_string()
    } else if largest > 0 {
        format!("train.micro_batches = {largest} is the largest that fits, or raise memory.device")
    } else {
        let layer: u64 = least.parts.iter().take(3).map(|(_, bytes)| bytes).sum();
        format!(
            "even one micro-batch needs {} bytes, {layer} of them for one layer's weights and \
             gradients: lower train.micro_batch or data.seq_len, or raise memory.device",
            fixed.saturating_add(per_micro),
        )
    };
    Error::Budget {
        tier: "device",
        needed: map.bytes,
        budget,
        missing: map.bytes - budget,
        remedy,
    }
}

/// Pools that a run needs whatever is spilled.
fn host_pools(
    layouts: &[TileLayout],
    config: &RunConfig,
    clipping: bool,
    precision: Precision,
    gradient_bytes: u64,
) -> HostMap {
    let slot =
        |layout: &TileLayout| (layout.elements * gradient_bytes).next_multiple_of(PAGE_BYTES);
    let (wide, blocks): (Vec<_>, Vec<_>) = layouts
        .iter()
        .enumerate()
        .partition(|(i, _)| *i == 0 || i + 1 == layouts.len());
    let (gradients, gradient_slots) = if clipping {
        (layouts.iter().map(slot).sum(), GradientSlots::PerTile)
    } else {
        let block = blocks
            .iter()
            .map(|(_, layout)| slot(layout))
            .max()
            .unwrap_or(0);
        let wide = wide
            .iter()
            .map(|(_, layout)| slot(layout))
            .max()
            .unwrap_or(0);
        (2 * block + wide, GradientSlots::Shared)
    };
    let longest = layouts
        .iter()
        .map(|layout| layout.elements)
        .max()
        .unwrap_or(0);
    let widest = Section::present(precision)
        .map(|s| s.element_bytes(precision))
        .max()
        .unwrap_or(4);
    let slab_bytes = (longest.min(EXTENT_ELEMENTS) * widest)
        .next_multiple_of(PAGE_BYTES)
        .min(EXTENT_BYTES_MAX);
    let slabs = config.memory.slabs;
    HostMap {
        homes: 0,
        gradients,
        gradient_slots,
        slabs,
        slab_bytes,
        bytes: gradients + slabs * slab_bytes,
    }
}

/// Gives each section a home: host while it fits, states spilled before weights, and of the embed
/// tile's weight last of all, since every step gathers rows from it.
fn place_sections(
    layouts: Vec<TileLayout>,
    config: &RunConfig,
    host: &mut HostMap,
    budgets: Budgets,
    purpose: Purpose,
) -> Result<Vec<TilePlan>> {
    let precision = config.model.precision;
    let present = |section: Section| {
        let wanted = purpose == Purpose::Train || section == Section::Weight;
        (wanted && section.element_bytes(precision) > 0).then_some(Home::Host)
    };
    let mut tiles: Vec<TilePlan> = layouts
        .into_iter()
        .map(|layout| TilePlan {
            layout,
            homes: Section::ALL.map(present),
        })
        .collect();
    let slot = |tile: &TilePlan, section| tile.layout.section_slot_bytes(section, precision);
    let held = || Section::ALL.into_iter().filter(|s| present(*s).is_some());
    let all: u64 = tiles
        .iter()
        .flat_map(|tile| held().map(|s| slot(tile, s)))
        .sum();
    let mut overflow = (host.bytes + all).saturating_sub(budgets.host);
    let groups: [&[Section]; 3] = [
        &[Section::Moment2, Section::Moment1],
        &[Section::Residual],
        &[Section::Weight],
    ];
    let mut homes = all;
    let mut spilled: Vec<(usize, Section)> = Vec::new();
    for sections in groups {
        if overflow == 0 {
            break;
        }
        spilled.clear();
        // Last layers first: the update reads them last.
        let mut left: Vec<(usize, Section)> = (0..tiles.len())
            .rev()
            .flat_map(|tile| sections.iter().map(move |section| (tile, *section)))
            .filter(|(tile, section)| tiles[*tile].homes[*section as usize].is_some())
            .collect();
        while overflow > 0 && !left.is_empty() {
            // The smallest section that ends the overflow, else the next in order.
            let ending = left
                .iter()
                .enumerate()
                .filter(|(_, (tile, section))| slot(&tiles[*tile], *section) >= overflow)
                .min_by_key(|(_, (tile, section))| slot(&tiles[*tile], *section))
                .map(|(index, _)| index);
            let (tile, section) = left.remove(ending.unwrap_or(0));
            let bytes = slot(&tiles[tile], section);
            tiles[tile].homes[section as usize] = Some(Home::Store);
            spilled.push((tile, section));
            overflow = overflow.saturating_sub(bytes);
            homes -= bytes;
        }
    }
    let room = budgets.host.saturating_sub(host.bytes + homes);
    homes += put_back(&mut tiles, spilled, precision, room);
    host.homes = homes;
    host.bytes += homes;
    refuse_overflow(&tiles, config, host, budgets)?;
    Ok(tiles)
}

/// The section that ended the overflow may have made room for some that went before it. Gives those
/// of `spilled` that fit into `room` a home in host again; the bytes that they take. Only for the
/// group that was spilled last: states are spilled before weights.
fn put_back(
    tiles: &mut [TilePlan],
    mut spilled: Vec<(usize, Section)>,
    precision: Precision,
    room: u64,
) -> u64 {
    let slot = |tile: &TilePlan, section| tile.layout.section_slot_bytes(section, precision);
    spilled.sort_by_key(|(tile, section)| std::cmp::Reverse(slot(&tiles[*tile], *section)));
    let mut taken = 0;
    for (tile, section) in spilled {
        let bytes = slot(&tiles[tile], section);
        if taken + bytes <= room {
            tiles[tile].homes[section as usize] = Some(Home::Host);
            taken += bytes;
        }
    }
    taken
}

fn refuse_overflow(
    tiles: &[TilePlan],
    config: &RunConfig,
    host: &HostMap,
    budgets: Budgets,
) -> Result<()> {
    if host.bytes > budgets.host {
        return Err(Error::Budget {
            tier: "host",
            needed: host.bytes,
            budget: budgets.host,
            missing: host.bytes - budgets.host,
            remedy: format!(
                "with every section spilled, gradients ({} bytes) and the slab ring ({} bytes) \
                 remain: raise memory.host, lower memory.slabs{}",
                host.gradients,
                host.slabs * host.slab_bytes,
                if host.gradient_slots == GradientSlots::PerTile {
                    ", or set train.max_grad_norm = 0 so that gradients need not wait for the norm"
                } else {
                    ""
                }
            ),
        });
    }
    let needed: u64 = tiles
        .iter()
        .flat_map(|tile| {
            tile.spilled()
                .map(|s| extents_bytes(&tile.layout, s, config.model.precision))
        })
        .sum();
    if needed > budgets.store {
        return Err(Error::Budget {
            tier: "store",
            needed,
            budget: budgets.store,
            missing: needed - budgets.store,
            remedy: match (budgets.store, &config.memory.store[..]) {
                (0, []) => format!(
                    "name a directory on NVMe in memory.store, or raise memory.host by {needed} \
                     bytes"
                ),
                (0, [first, ..]) => format!(
                    "memory.store has no space in {}: make some, name another directory, or raise \
                     memory.host by {needed} bytes",
                    first.path.display()
                ),
                _ => "add space to memory.store, or raise memory.host".to_string(),
            },
        });
    }
    Ok(())
}
