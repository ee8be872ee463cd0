//! Homes: of each section, and of each gradient that waits.
//!
//! - All sections are in host where they fit beside the pools. Where they do not, spare device
//!   memory takes waiting gradients first, then weights of blocks, which are promoted less often
//!   there, then their states if it may; what is still too much goes to the store, states before
//!   weights.
//! - The last blocks go to the device first: their updates come last, so the demotions of their
//!   gradients and weights have the time of the others' updates.
//! - Anchors that leave the device are in host. Where it has no room for them beside weights, those
//!   of the first layers go to the store: they are written and read once a step, as states are, and
//!   a spilled weight is read twice more.
//! - The embed tile's weight stays in host as long as it can, since every step gathers rows of it.

use super::{
    Budgets, Deferred, GradientHome, Home, HostMap, Purpose, SpillOrder, TilePlan, extents_bytes,
};
use crate::config::RunConfig;
use crate::error::{Error, Result};
use crate::model::ModelSpec;
use crate::plan::anchors::AnchorRows;
use crate::plan::regions::{REGION_ALIGN, TOO_LARGE};
use crate::tile::{EXTENT_BYTES_MAX, EXTENT_ELEMENTS, PAGE_BYTES, Precision, Section, TileLayout};

/// Slabs that a commit is written through: enough that a drive is never without a write.
const COMMIT_SLABS: u64 = 8;
/// Threads that code spilled moments: enough for the rate of a fast drive.
pub const CODERS: u64 = 4;

/// Bytes of an element of a gradient in host.
pub(super) fn gradient_bytes(config: &RunConfig) -> u64 {
    match config.precision() {
        Precision::Bf16 | Precision::Bf16Moments => config.train.gradient_dtype.bytes(),
        Precision::Fp32 => 4,
    }
}

/// What there is room for.
#[derive(Clone, Copy)]
pub(super) struct Room {
    /// Of each tier.
    pub(super) budgets: Budgets,
    /// What the device has beside its least map.
    pub(super) spare: u64,
    /// Anchors that leave the device.
    pub(super) anchors: Anchors,
    /// Moments are coded where any are spilled.
    pub(super) zstd: bool,
    /// Which layers spill first.
    pub(super) order: SpillOrder,
    /// States may move to the device.
    pub(super) states: bool,
}

/// Anchors that leave the device between forward and backward.
#[derive(Clone, Copy)]
pub(super) struct Anchors {
    /// Layers 1 to here, inclusive.
    pub(super) layers: u16,
    /// Layers 1 to here, inclusive, have them in the store; the others in host.
    pub(super) stored: u16,
    /// Bytes of one.
    pub(super) anchor_bytes: u64,
    /// Anchors of a layer.
    pub(super) micros: u64,
    /// Rows on the device.
    pub(super) rows: AnchorRows,
}

impl Anchors {
    /// Bytes of a layer's, each on its own pages, in host or in the store.
    fn row_bytes(self) -> u64 {
        let place = self.anchor_bytes.checked_next_multiple_of(PAGE_BYTES);
        place.unwrap_or(TOO_LARGE).saturating_mul(self.micros)
    }

    /// Whether a layer's gradient can wait where its anchors were.
    fn hold(self, layout: &TileLayout, config: &RunConfig) -> bool {
        let row_bytes = self.anchor_bytes.saturating_mul(self.micros);
        let gradient = layout.elements * gradient_bytes(config);
        let row = self.rows.waiting(layout.id.layer, gradient, row_bytes);
        row.is_some()
    }

    fn host_bytes(self) -> u64 {
        u64::from(self.layers - self.stored).saturating_mul(self.row_bytes())
    }

    fn store_bytes(self) -> u64 {
        u64::from(self.stored).saturating_mul(self.row_bytes())
    }
}

/// A home for everything.
pub(super) struct Placed {
    /// Tiles by layer.
    pub(super) tiles: Vec<TilePlan>,
    /// Host arena.
    pub(super) host: HostMap,
    /// Layers 1 to here, inclusive, have their anchors in the store.
    pub(super) stored_anchors: u16,
}

/// Gives every section and gradient a home. Where coders find no room, nothing is coded.
pub(super) fn place(
    spec: &ModelSpec,
    config: &RunConfig,
    purpose: Purpose,
    deferred: Deferred,
    room: Room,
) -> Result<Placed> {
    match place_all(spec, config, purpose, deferred, room) {
        Err(_) if room.zstd => {
            let plain = Room {
                zstd: false,
                ..room
            };
            place_all(spec, config, purpose, deferred, plain)
        }
        placed => placed,
    }
}

fn place_all(
    spec: &ModelSpec,
    config: &RunConfig,
    purpose: Purpose,
    deferred: Deferred,
    room: Room,
) -> Result<Placed> {
    let precision = config.precision();
    let present = |section: Section| {
        let wanted = purpose == Purpose::Train || section == Section::Weight;
        (wanted && section.element_bytes(precision) > 0).then_some(Home::Host)
    };
    let waits = |layer: u16| match deferred.contains(layer, spec.layer_count()) {
        true => GradientHome::Host,
        false => GradientHome::Shared,
    };
    let tiles = (0..).zip(spec.tile_layouts());
    let tiles: Vec<TilePlan> = tiles
        .map(|(layer, layout)| TilePlan {
            layout,
            homes: Section::ALL.map(present),
            gradient: waits(layer),
        })
        .collect();
    if purpose == Purpose::Forward {
        return spill(tiles, config, purpose, room);
    }
    // Weights on the device pass through slots of host: too much for the smallest of hosts.
    let with = use_spare(&tiles, config, room, true);
    match spill(with, config, purpose, room) {
        Err(Error::Budget { tier: "host", .. }) => {
            let without = use_spare(&tiles, config, room, false);
            spill(without, config, purpose, room)
        }
        placed => placed,
    }
}

/// What can move to the device.
#[derive(Clone, Copy, PartialEq)]
enum Movable {
    Gradient,
    Section(Section),
}

/// Moves gradients that wait, weights of blocks, and their states if it may, to the device, as few
/// as let the host hold the rest; where it cannot, as many of each kind as help it most.
fn use_spare(tiles: &[TilePlan], config: &RunConfig, room: Room, weights: bool) -> Vec<TilePlan> {
    let precision = config.precision();
    let blocks = || (1..tiles.len() - 1).rev();
    // Those first that take no memory. The embedding's is finished last and wanted first: it is
    // moved after all others.
    let order = blocks().chain([tiles.len() - 1, 0]);
    let waiting = order.filter(|layer| tiles[*layer].gradient == GradientHome::Host);
    let mut waiting: Vec<usize> = waiting.collect();
    waiting.sort_by_key(|layer| !room.anchors.hold(&tiles[*layer].layout, config));
    let gradients = waiting.into_iter().map(|layer| (layer, Movable::Gradient));
    let weight = Movable::Section(Section::Weight);
    let weights = blocks().filter(|_| weights).map(|layer| (layer, weight));
    // A block's states one after another: fewer tiles are updated in pieces.
    let states = [Section::Residual, Section::Moment2, Section::Moment1];
    let present = move |section: &Section| section.element_bytes(precision) > 0;
    let states = blocks().filter(|_| room.states).flat_map(|layer| {
        let of_layer = states.into_iter().filter(present);
        of_layer.map(move |section| (layer, Movable::Section(section)))
    });
    let mut spare = Spare {
        tiles: tiles.to_vec(),
        left: room.spare,
        host: host_map(tiles, config, Purpose::Train, room.anchors).bytes,
    };
    spare.take(gradients, config, room);
    spare.take(weights, config, room);
    spare.take(states, config, room);
    spare.tiles
}

/// What moves to the device, and what that leaves.
struct Spare {
    tiles: Vec<TilePlan>,
    /// Bytes of the device.
    left: u64,
    /// Bytes that the host needs.
    host: u64,
}

impl Spare {
    /// As many of the moves, all of a kind, as are needed or help most.
    fn take(
        &mut self,
        moves: impl Iterator<Item = (usize, Movable)>,
        config: &RunConfig,
        room: Room,
    ) {
        let (mut tiles, mut left) = (self.tiles.clone(), self.left);
        for (layer, moved) in moves {
            if self.host <= room.budgets.host {
                return;
            }
            let tile = &mut tiles[layer];
            let bytes = match moved {
                Movable::Gradient if room.anchors.hold(&tile.layout, config) => 0,
                Movable::Gradient => tile.layout.elements * gradient_bytes(config),
                Movable::Section(section) => tile.layout.section_bytes(section, config.precision()),
            };
            let Some(rest) = left.checked_sub(bytes.next_multiple_of(REGION_ALIGN)) else {
                continue;
            };
            left = rest;
            match moved {
                Movable::Gradient => tile.gradient = GradientHome::Device,
                Movable::Section(section) => tile.homes[section as usize] = Some(Home::Device),
            }
            // The first of a kind may also cost the slots that they all pass through.
            let host = host_map(&tiles, config, Purpose::Train, room.anchors).bytes;
            if host < self.host {
                (self.host, self.left) = (host, left);
                self.tiles.clone_from(&tiles);
            }
        }
    }
}

/// The host's arena with every section that has a home there.
fn host_map(tiles: &[TilePlan], config: &RunConfig, purpose: Purpose, anchors: Anchors) -> HostMap {
    let precision = config.precision();
    let page = |bytes: u64| bytes.next_multiple_of(PAGE_BYTES);
    let gradient = |tile: &TilePlan| page(tile.layout.elements * gradient_bytes(config));
    let last = tiles.len() - 1;
    let (mut own, mut block_slot, mut wide_slot, mut weight_slot) = (0, 0, 0, 0);
    let mut homes = 0;
    for (layer, tile) in tiles.iter().enumerate() {
        let shared = match layer == 0 || layer == last {
            true => &mut wide_slot,
            false => &mut block_slot,
        };
        match tile.gradient {
            _ if purpose == Purpose::Forward => {}
            GradientHome::Host => own += gradient(tile),
            GradientHome::Shared | GradientHome::Device => *shared = gradient(tile).max(*shared),
        }
        for section in Section::present(precision) {
            let bytes = tile.layout.section_slot_bytes(section, precision);
            match tile.homes[section as usize] {
                Some(Home::Host) => homes += bytes,
                Some(Home::Device) if section == Section::Weight => {
                    weight_slot = bytes.max(weight_slot);
                }
                Some(Home::Device | Home::Store) | None => {}
            }
        }
    }
    let longest = tiles.iter().map(|tile| tile.layout.elements).max();
    let widest = Section::present(precision).map(|s| s.element_bytes(precision));
    let slab_bytes = (longest.unwrap_or(0).min(EXTENT_ELEMENTS) * widest.max().unwrap_or(4))
        .max(anchors.anchor_bytes * u64::from(anchors.layers > 0))
        .min(EXTENT_BYTES_MAX)
        .next_multiple_of(PAGE_BYTES);
    let gradients = own + 2 * block_slot + wide_slot;
    let slabs = config.memory.slabs;
    let commit_slabs = match (purpose, config.checkpoint.every) {
        (Purpose::Forward, _) | (_, 0) => 0,
        _ => COMMIT_SLABS,
    };
    let rings = (slabs + commit_slabs) * slab_bytes;
    HostMap {
        homes,
        gradients,
        block_slot,
        wide_slot,
        weight_slot,
        anchors: anchors.host_bytes(),
        slabs,
        commit_slabs,
        coder_slabs: 0,
        slab_bytes,
        bytes: (homes + gradients + 2 * weight_slot + rings).saturating_add(anchors.host_bytes()),
    }
}

/// Sends what the host has no room for to the store.
fn spill(
    mut tiles: Vec<TilePlan>,
    config: &RunConfig,
    purpose: Purpose,
    room: Room,
) -> Result<Placed> {
    let precision = config.precision();
    let Room {
        budgets,
        mut anchors,
        ..
    } = room;
    let map = |tiles: &[TilePlan], anchors| {
        let mut host = host_map(tiles, config, purpose, anchors);
        if room.zstd && tiles.iter().any(TilePlan::spills_moments) {
            host.coder_slabs = CODERS;
            host.bytes += CODERS * host.slab_bytes;
        }
        host
    };
    let mut host = map(&tiles, anchors);
    let mut overflow = host.bytes.saturating_sub(budgets.host);
    if overflow > 0 && room.zstd {
        // Moments go first, and with the first of them come the coders.
        overflow += CODERS * host.slab_bytes;
    }
    let states: [&[Section]; 2] = [&[Section::Moment2, Section::Moment1], &[Section::Residual]];
    let mut spilled: Vec<(usize, Section)> = Vec::new();
    for sections in states {
        let order = order(&tiles, sections, room.order);
        spill_sections(&mut tiles, order, precision, &mut overflow, &mut spilled);
    }
    if overflow > 0 && anchors.layers > anchors.stored {
        let rows = overflow.div_ceil(anchors.row_bytes().max(1));
        let left = anchors.layers - anchors.stored;
        anchors.stored += u16::try_from(rows).map_or(left, |rows| rows.min(left));
        host = map(&tiles, anchors);
        overflow = host.bytes.saturating_sub(budgets.host);
    }
    let weights = order(&tiles, &[Section::Weight], room.order);
    spill_sections(&mut tiles, weights, precision, &mut overflow, &mut spilled);
    let bytes = map(&tiles, anchors).bytes;
    put_back(
        &mut tiles,
        spilled,
        precision,
        budgets.host.saturating_sub(bytes),
    );
    let host = map(&tiles, anchors);
    refuse_overflow(&tiles, config, &host, anchors, budgets)?;
    Ok(Placed {
        tiles,
        host,
        stored_anchors: anchors.stored,
    })
}

/// Sections of the tiles in the order in which they spill. Any first part of what is spread is
/// spread over the tiles, which multiples of the golden ratio are.
fn order(tiles: &[TilePlan], sections: &[Section], order: SpillOrder) -> Vec<(usize, Section)> {
    // A step's beginning waits for the embedding.
    let waits = |tile: &usize| *tile != 0 && tiles[*tile].gradient != GradientHome::Shared;
    let (whole, mut spread): (Vec<usize>, Vec<usize>) = match order {
        SpillOrder::LastFirst => ((0..tiles.len()).collect(), Vec::new()),
        SpillOrder::Spread => (Vec::new(), (0..tiles.len()).collect()),
        SpillOrder::DeferredFirst => (0..tiles.len()).partition(waits),
    };
    let golden = |tile: &usize| (*tile as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    spread.sort_by_key(|tile| (*tile == 0, golden(tile)));
    let last_first = whole.into_iter().rev();
    let mut order: Vec<(usize, Section)> = last_first
        .flat_map(|tile| sections.iter().map(move |section| (tile, *section)))
        .collect();
    for section in sections {
        order.extend(spread.iter().map(|tile| (*tile, *section)));
    }
    order
}

/// Spills in the order `left` as few as end the overflow. Where anything is, `spilled` names it,
/// and nothing that was spilled before.
fn spill_sections(
    tiles: &mut [TilePlan],
    mut left: Vec<(usize, Section)>,
    precision: Precision,
    overflow: &mut u64,
    spilled: &mut Vec<(usize, Section)>,
) {
    let slot = |tile: &TilePlan, section| tile.layout.section_slot_bytes(section, precision);
    left.retain(|(tile, section)| tiles[*tile].homes[*section as usize] == Some(Home::Host));
    if *overflow > 0 && !left.is_empty() {
        spilled.clear();
    }
    while *overflow > 0 && !left.is_empty() {
        // The smallest section that ends the overflow, else the next in order. A step's beginning
        // would wait for the embedding.
        let ends = |(tile, section): &(usize, Section)| {
            *tile != 0 && slot(&tiles[*tile], *section) >= *overflow
        };
        let ending = left
            .iter()
            .enumerate()
            .filter(|(_, of)| ends(of))
            .min_by_key(|(_, (tile, section))| slot(&tiles[*tile], *section))
            .map(|(index, _)| index);
        let (tile, section) = left.remove(ending.unwrap_or(0));
        *overflow = overflow.saturating_sub(slot(&tiles[tile], section));
        tiles[tile].homes[section as usize] = Some(Home::Store);
        spilled.push((tile, section));
    }
}

/// The section that ended the overflow may have made room for some that went before it. Gives those
/// of `spilled` that fit into `room` a home in host again. Only for the group that was spilled
/// last: states are spilled before weights.
fn put_back(
    tiles: &mut [TilePlan],
    mut spilled: Vec<(usize, Section)>,
    precision: Precision,
    room: u64,
) {
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
}

fn refuse_overflow(
    tiles: &[TilePlan],
    config: &RunConfig,
    host: &HostMap,
    anchors: Anchors,
    budgets: Budgets,
) -> Result<()> {
    if host.bytes > budgets.host {
        return Err(Error::Budget {
            tier: "host",
            needed: host.bytes,
            budget: budgets.host,
            missing: host.bytes - budgets.host,
            remedy: format!(
                "with every section spilled, gradients ({} bytes) and the slab rings ({} bytes) \
                 remain: raise memory.host, lower memory.slabs{}",
                host.gradients,
                (host.slabs + host.commit_slabs + host.coder_slabs) * host.slab_bytes,
                match config.train.max_grad_norm > 0.0 {
                    true => {
                        ", or set train.max_grad_norm = 0 so that gradients need not wait for the \
                         norm"
                    }
                    false => "",
                }
            ),
        });
    }
    let spilled: u64 = tiles
        .iter()
        .flat_map(|tile| {
            tile.spilled()
                .map(|s| extents_bytes(&tile.layout, s, config.precision()))
        })
        .sum();
    let needed = spilled.saturating_add(anchors.store_bytes());
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
                _ if anchors.stored > 0 => format!(
                    "{} bytes of it are anchors: add space to memory.store, raise memory.host or \
                     memory.device, or lower train.micro_batches or data.seq_len",
                    anchors.store_bytes()
                ),
                _ => "add space to memory.store, or raise memory.host".to_string(),
            },
        });
    }
    Ok(())
}
