//! The update lane: AdamW over each tile, span by span, with states that are spilled or live on the
//! device streaming through slabs.
//!
//! A tile that a commit is still to copy is not touched: see [`super::held`].

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::lanes::await_turn;
use super::{Pass, Shared};
use crate::error::{Error, Result};
use crate::optimizer::{AdamwStep, GradientSpan, MomentSpan, Rounding, WeightSpan, adamw_ranges};
use crate::schedule::{Action, GradientSlot, Lane};
use crate::stats::Wait;
use crate::tile::{Precision, Section};
use crate::transfer::states::{SpanSlabs, StateStream};

/// A tile to update.
#[derive(Clone, Copy)]
struct Tile {
    layer: u16,
    /// Its gradient.
    slot: GradientSlot,
    /// Its weight section, where that lives on the device.
    weight: Option<u32>,
    part: Part,
}

/// What of a tile is updated.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    /// The rows that the next step names.
    Named,
    /// What is left of the tile: most often all.
    Rest,
}

impl Tile {
    fn of(action: Action) -> Tile {
        match action {
            Action::UpdateRows { slot } => Tile {
                layer: 0,
                slot,
                weight: None,
                part: Part::Named,
            },
            Action::Update {
                layer,
                slot,
                weight,
            } => Tile {
                layer,
                slot,
                weight,
                part: Part::Rest,
            },
            other => unreachable!("{other:?} is not an action of the update lane"),
        }
    }
}

/// Walks the updates of a pass. An update is done when its spilled extents are written, so several
/// can be under way; they are marked in order.
pub(super) fn walk(shared: &Shared, pass: &Pass, states: &mut StateStream<'_>) -> Result<()> {
    let updates: Vec<(usize, Tile)> = pass
        .schedule
        .lane(Lane::Update)
        .map(|index| (index, Tile::of(pass.action(index))))
        .collect();
    let whole = updates.iter().filter(|(_, tile)| tile.part != Part::Named);
    states.announce(whole.map(|(_, tile)| tile.layer));
    states.advance()?;
    let mut under_way: VecDeque<(usize, u16)> = VecDeque::new();
    let settle = |states: &StateStream<'_>, under_way: &mut VecDeque<(usize, u16)>| {
        while under_way
            .front()
            .is_some_and(|(_, layer)| states.is_settled(*layer))
        {
            let (index, _) = under_way.pop_front().expect("its front was seen");
            pass.progress.mark(index, pass.number);
        }
    };
    for (index, tile) in updates {
        // Writes of earlier tiles end while this one waits for its gradient.
        while !under_way.is_empty() && !is_ready(pass, index) && !shared.failure.is_set() {
            states.wait()?;
            settle(states, &mut under_way);
        }
        if !await_turn(shared, Lane::Update, pass, index) {
            return Err(other_lane_failed());
        }
        if !pass.progress.is_free(index, pass.number) {
            // Its bytes of the step before are still to be copied into a commit.
            let waiting = Instant::now();
            while !under_way.is_empty() && !pass.progress.is_free(index, pass.number) {
                if shared.failure.is_set() {
                    break;
                }
                states.wait()?;
                settle(states, &mut under_way);
            }
            let free = pass.progress.wait_free(index, pass.number);
            let stats = &shared.tiers.stats;
            stats.waited(Wait::UpdateForCommit, waiting.elapsed());
            let layer = tile.layer;
            stats.trace("update", || format!("wait for commit of {layer}"), waiting);
            if !free {
                return Err(other_lane_failed());
            }
        }
        shared.show(Lane::Update, pass, &pass.action(index));
        let started = Instant::now();
        let layer = tile.layer;
        update_tile(shared, pass, states, tile)?;
        shared
            .tiers
            .stats
            .trace("update", || format!("{:?}", pass.action(index)), started);
        under_way.push_back((index, layer));
        settle(states, &mut under_way);
    }
    while !under_way.is_empty() {
        states.wait()?;
        settle(states, &mut under_way);
    }
    Ok(())
}

fn other_lane_failed() -> Error {
    Error::StoreFailed {
        first: "another lane failed".to_string(),
    }
}

fn is_ready(pass: &Pass, index: usize) -> bool {
    let after = &pass.schedule.actions[index].after;
    after.iter().all(|a| {
        pass.progress
            .is_done(a.action, pass.number - u64::from(a.previous))
    })
}

/// AdamW over one tile: extent by extent if anything of it passes through slabs, else in one pass.
/// In a step that is skipped extents still pass by: what was announced is read.
fn update_tile(
    shared: &Shared,
    pass: &Pass,
    states: &mut StateStream<'_>,
    tile: Tile,
) -> Result<()> {
    let Tile { layer, slot, .. } = tile;
    let adamw = pass
        .data
        .adamw
        .get()
        .expect("the schedule puts updates after the norm");
    let tiers = &shared.tiers;
    let layout = tiers.layout(layer);
    if !tiers
        .sections()
        .any(|section| tiers.is_streamed(layer, section))
    {
        // One pass over the whole tile: threads meet once.
        let started = Instant::now();
        let ranges = ranges(shared, pass, tile);
        let mut no_slabs = SpanSlabs::default();
        let elements = 0..layout.elements;
        let update = |adamw| update_span(shared, adamw, tile, elements, &ranges, &mut no_slabs);
        let processors = adamw.as_ref().map(update).unwrap_or_default();
        tiers.stats.updated(started.elapsed(), processors);
        if tile.part == Part::Rest {
            shared.poison_gradient(slot);
        }
        return Ok(());
    }
    for extent in 0..layout.extent_count() {
        let mut slabs = states.take(layer, extent)?;
        let started = Instant::now();
        let elements = layout.extent_elements(extent);
        let all = 0..usize::try_from(elements.end - elements.start).expect("an extent fits");
        let update = |adamw| update_span(shared, adamw, tile, elements, &[all], &mut slabs);
        let processors = adamw.as_ref().map(update).unwrap_or_default();
        tiers.stats.updated(started.elapsed(), processors);
        states.put(layer, extent, slabs)?;
    }
    shared.poison_gradient(slot);
    Ok(())
}

/// AdamW over `ranges`, counted from `elements.start`, of the same elements of each section,
/// wherever each of them is: an extent where one is in a slab. Returns the time that threads
/// had a processor for it, the mean of them.
fn update_span(
    shared: &Shared,
    adamw: &AdamwStep,
    tile: Tile,
    elements: Range<u64>,
    ranges: &[Range<usize>],
    slabs: &mut SpanSlabs,
) -> Duration {
    let Tile {
        layer,
        slot,
        weight,
        ..
    } = tile;
    let tiers = &shared.tiers;
    let layout = tiers.layout(layer);
    let range = elements.start as usize..elements.end as usize;
    let count = range.len();
    let decayed = layout.decayed_elements.clamp(elements.start, elements.end) - elements.start;
    let mut homes = Section::ALL.map(|section| tiers.home_mut(layer, section));
    let mut demoted = weight.map(|slot| tiers.weight_slot(slot));
    let [weight_slab, residual_slab, moment1_slab, moment2_slab] = slabs;
    let [weight_home, residual_home, moment1_home, moment2_home] = &mut homes;
    // A section's span is in its slab if it has one, else a range of its home; a weight that
    // lives on the device is in its slot.
    let weight_home = match &mut demoted {
        Some(slot) => &mut Some(&mut **slot),
        None => &mut weight_home.as_mut().map(|home| &mut **home),
    };
    macro_rules! span {
        ($slab:ident, $home:ident, $t:ty) => {
            match ($slab, $home) {
                (Some(slab), _) => &mut slab.as_mut_slice::<$t>()[..count],
                (None, Some(home)) => &mut home.as_mut_slice::<$t>()[range.clone()],
                (None, None) => &mut [],
            }
        };
    }
    let weight = match tiers.precision() {
        Precision::Bf16 | Precision::Bf16Moments => WeightSpan::Split {
            weight: span!(weight_slab, weight_home, u16),
            residual: span!(residual_slab, residual_home, i16),
        },
        Precision::Fp32 => WeightSpan::Full(span!(weight_slab, weight_home, f32)),
    };
    let moments = match tiers.precision() {
        Precision::Bf16 | Precision::Fp32 => MomentSpan::F32 {
            moment1: span!(moment1_slab, moment1_home, f32),
            moment2: span!(moment2_slab, moment2_home, f32),
        },
        Precision::Bf16Moments => MomentSpan::Bf16 {
            moment1: span!(moment1_slab, moment1_home, u16),
            moment2: span!(moment2_slab, moment2_home, u16),
            rounding: Rounding::new(shared.plan.seed, adamw.t, layout.id, elements.start),
        },
    };
    let gradient = tiers.gradient(slot);
    let gradient = if shared.plan.gradient_bytes == 2 {
        GradientSpan::Bf16(&gradient.as_slice::<u16>()[range])
    } else {
        GradientSpan::F32(&gradient.as_slice::<f32>()[range])
    };
    let decayed = usize::try_from(decayed).expect("a tile fits memory");
    adamw_ranges(
        shared.isa, adamw, decayed, weight, moments, gradient, ranges,
    )
}

/// Elements of a tile that this update is for. What the next step names is asked for here, once.
fn ranges(shared: &Shared, pass: &Pass, tile: Tile) -> Vec<Range<usize>> {
    let elements = shared.tiers.layout(tile.layer).elements;
    let elements = usize::try_from(elements).expect("a tile fits memory");
    let width = usize::try_from(shared.hidden).expect("a row fits memory");
    let rows = match tile.part {
        // Nobody named any: all rows now, and none are left.
        Part::Named => pass.data.rows_ahead.get_or_init(|| {
            let named = shared.named.after(pass.number);
            named.unwrap_or_else(|| (0..u32::try_from(elements / width).expect("rows")).collect())
        }),
        Part::Rest => match pass.data.rows_ahead.get().filter(|_| tile.layer == 0) {
            Some(rows) => rows,
            None => return std::iter::once(0..elements).collect(),
        },
    };
    let mut named: Vec<Range<usize>> = Vec::new();
    for row in rows.iter().map(|row| *row as usize) {
        let range = row * width..(row + 1) * width;
        match named.last_mut().filter(|last| last.end == range.start) {
            Some(last) => last.end = range.end,
            None => named.push(range),
        }
    }
    if tile.part == Part::Named {
        return named;
    }
    let starts = std::iter::once(0).chain(named.iter().map(|range| range.end));
    let ends = named.iter().map(|range| range.start).chain([elements]);
    let rest = starts.zip(ends).map(|(start, end)| start..end);
    rest.filter(|range| !range.is_empty()).collect()
}
