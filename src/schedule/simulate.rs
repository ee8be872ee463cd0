//! A schedule run against rates: seconds of a step, and the hop that bounds it.
//!
//! - Each lane is one server, and so is the store, which serves whoever asks first; an action
//!   starts when its lane is free and all that it is after has ended. The third of three steps is
//!   reported: the pipe is full by then.
//! - An anchor of the store takes the longer of its copy and its disk time, beside the updates'.
//! - A spilled update takes the longer of its arithmetic and its disk time, since they overlap; one
//!   whose states live on the device, of its arithmetic and its copies each way.
//! - AdamW is bound by host memory, which copies to and from the device read and write beside it:
//!   their bytes delay it.
//! - Compression of spilled moments takes its core-seconds from AdamW's cores, and no less time
//!   than its threads need on all cores but one; it overlaps with the disk.
//! - On the CPU device arithmetic, AdamW and compression share the cores, so a step takes at least
//!   their sum.
//! - Arithmetic is matrix products, attention, and passes that read and write memory: activations
//!   between the products, f32 gradients of weights once a micro-batch, conversions of weights.
//!
//! Pure: the rates are measured elsewhere.

use super::{Action, Buffer, Form, Lane, Schedule};
use crate::plan::{GradientHome, Home, Plan};
use crate::tile::{Section, TileLayout};

/// Bytes that AdamW moves a parameter where its rate is measured: a split master, f32 moments and a
/// bf16 gradient.
pub const ADAMW_BYTES: u64 = 26;

/// What a machine can do, in bytes, FLOPs or parameters a second.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Rates {
    /// Matrix products of the device, FLOP/s.
    pub gemm: f64,
    /// Attention, forward and backward, heads 128 wide, FLOP/s as [`crate::plan::Flops`] counts.
    pub attention: f64,
    /// Bytes a second that passes between the products read and write.
    pub passes: f64,
    /// Host to device.
    pub promote: f64,
    /// Device to host.
    pub demote: f64,
    /// Store to host, alone.
    pub store_read: f64,
    /// Host to store, alone.
    pub store_write: f64,
    /// Both ways at once, bytes of both together: an update reads and writes the same extents.
    pub store_mixed: f64,
    /// AdamW over host memory, parameters a second of [`ADAMW_BYTES`] each.
    pub adamw: f64,
    /// Arithmetic and AdamW share the same cores.
    pub shared_cores: bool,
    /// Cores of the host.
    pub cores: u32,
    /// Compression of spilled moments.
    pub zstd: ZstdRates,
}

/// What compression of f32 moments does.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct ZstdRates {
    /// Bytes a second that one core encodes.
    pub encode: f64,
    /// Bytes a second that one core makes again.
    pub decode: f64,
    /// Bytes after by bytes before.
    pub ratio: f64,
}

impl ZstdRates {
    /// Where nobody measured: slower than any core that was measured, and for moments that shrink
    /// less than those that were.
    pub const ASSUMED: ZstdRates = ZstdRates {
        encode: 1.0e9,
        decode: 1.5e9,
        ratio: 0.88,
    };
}

impl Rates {
    /// The mixed rate of a store that takes reads and writes in turn.
    pub fn mixed_of(read: f64, write: f64) -> f64 {
        2.0 / (1.0 / read + 1.0 / write)
    }
}

/// Seconds of a step by the rates.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Prediction {
    /// A step, once the pipe is full.
    pub step_seconds: f64,
    /// Seconds of work on the compute lane.
    pub compute_seconds: f64,
    /// Seconds of promotions.
    pub promote_seconds: f64,
    /// Seconds of demotions.
    pub demote_seconds: f64,
    /// Seconds of the store, reads and writes.
    pub store_seconds: f64,
    /// Seconds of AdamW.
    pub update_seconds: f64,
    /// Seconds that all cores together take to compress and restore spilled moments.
    pub zstd_seconds: f64,
    /// Where the plan chose whether to compress: seconds of a step by the choice that it left.
    pub other_zstd_step_seconds: Option<f64>,
    /// Bytes promoted a step.
    pub promote_bytes: u64,
    /// Bytes demoted a step.
    pub demote_bytes: u64,
    /// Bytes read from the store a step.
    pub read_bytes: u64,
    /// Bytes written to the store a step.
    pub write_bytes: u64,
    /// FLOPs executed a step, recomputation included.
    pub executed_flops: f64,
    /// Tokens a step, if every sequence is full.
    pub tokens: u64,
}

impl Prediction {
    /// The hop or lane that is busiest.
    pub fn bound(&self) -> &'static str {
        [
            ("compute", self.compute_seconds),
            ("promote", self.promote_seconds),
            ("demote", self.demote_seconds),
            ("store", self.store_seconds),
            ("update", self.update_seconds + self.zstd_seconds),
        ]
        .into_iter()
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .map_or("compute", |(name, _)| name)
    }

    /// Seconds of a step in which the device computes nothing.
    pub fn stall_seconds(&self) -> f64 {
        (self.step_seconds - self.compute_seconds).max(0.0)
    }

    /// The least seconds that a step could take: its busiest lane alone.
    pub fn light_seconds(&self, shared_cores: bool) -> f64 {
        let update = self.update_seconds + self.zstd_seconds;
        let cores = if shared_cores {
            self.compute_seconds + update
        } else {
            self.compute_seconds.max(update)
        };
        cores
            .max(self.promote_seconds)
            .max(self.demote_seconds)
            .max(self.store_seconds)
    }
}

/// Work of one action.
#[derive(Clone, Copy, Default)]
struct Work {
    flops: f64,
    /// Attention's part of them.
    attention: f64,
    /// Bytes of passes between the products.
    passes: f64,
    promote: u64,
    demote: u64,
    read: u64,
    write: u64,
    parameters: u64,
    /// Core-seconds of compression.
    zstd: f64,
}

/// Bytes that an update moves a parameter: all are read, all but the gradient written.
fn update_bytes(plan: &Plan) -> u64 {
    let state = Section::ALL.map(|section| section.element_bytes(plan.precision));
    2 * state.iter().sum::<u64>() + plan.gradient_bytes
}

fn work(plan: &Plan, action: Action, rates: &Rates) -> Work {
    let tokens = plan.map.shape.tokens;
    let layout = |layer: u16| -> &TileLayout { &plan.tiles[usize::from(layer)].layout };
    let section_bytes =
        |layer: u16, section: Section| layout(layer).section_bytes(section, plan.precision);
    let weight_read = |layer: u16| {
        let spilled = plan.tiles[usize::from(layer)].home(Section::Weight) == Home::Store;
        if spilled {
            section_bytes(layer, Section::Weight)
        } else {
            0
        }
    };
    match action {
        Action::Gather { .. } => Work {
            promote: tokens * plan.map.anchor_bytes / tokens.max(1),
            read: weight_read(0),
            ..Work::default()
        },
        Action::Promote { layer, buffer } => {
            let tied = buffer == Buffer::Head && plan.tied;
            let also = if tied {
                section_bytes(0, Section::Weight)
            } else {
                0
            };
            Work {
                promote: section_bytes(layer, Section::Weight) + also,
                read: weight_read(layer) + if tied { weight_read(0) } else { 0 },
                ..Work::default()
            }
        }
        Action::Demote { layer, .. } => Work {
            demote: layout(layer).elements * plan.gradient_bytes,
            ..Work::default()
        },
        Action::UpdateRows { .. } => Work {
            parameters: named_elements(plan),
            ..Work::default()
        },
        Action::Update { layer, .. } => {
            let (spilled, zstd) = spilled_work(plan, layer, rates);
            let waits = plan.tiles[0].gradient != GradientHome::Shared;
            let rows_first = layer == 0 && waits && spilled == 0;
            let ahead = if rows_first { named_elements(plan) } else { 0 };
            let parameters = layout(layer).elements - ahead;
            let tile = &plan.tiles[usize::from(layer)];
            let carried = tile.states_on_device();
            let carried = carried.map(|section| section_bytes(layer, section)).sum();
            Work {
                promote: carried,
                demote: carried,
                read: spilled,
                write: spilled,
                parameters,
                zstd,
                ..Work::default()
            }
        }
        Action::DemoteAnchor { .. }
        | Action::PromoteAnchor { .. }
        | Action::DemoteWeight { .. }
        | Action::Return { .. } => travel_work(plan, action),
        _ => compute_work(plan, action),
    }
}

/// Bytes that an update reads, and writes, of a layer's spilled sections, and core-seconds of
/// compressing and restoring them.
fn spilled_work(plan: &Plan, layer: u16, rates: &Rates) -> (u64, f64) {
    let tile = &plan.tiles[usize::from(layer)];
    let rates = rates.zstd;
    let (mut moved, mut zstd) = (0, 0.0);
    for section in tile.spilled() {
        let bytes = tile.layout.section_bytes(section, plan.precision);
        if plan.host.coder_slabs == 0 || !section.is_moment() {
            moved += bytes;
            continue;
        }
        // What shrinks is a byte of each element, and what takes time is the element.
        let as_f32 = 4.0 * tile.layout.elements as f64;
        moved += (bytes as f64 - (1.0 - rates.ratio) * as_f32) as u64;
        zstd += as_f32 * (1.0 / rates.encode + 1.0 / rates.decode);
    }
    (moved, zstd)
}

/// Anchors that travel, and weights that live on the device.
fn travel_work(plan: &Plan, action: Action) -> Work {
    let weight = |layer: u16| {
        let layout = &plan.tiles[usize::from(layer)].layout;
        layout.section_bytes(Section::Weight, plan.precision)
    };
    let stored = |layer: u16| match layer <= plan.stored_anchors {
        true => plan.map.anchor_bytes,
        false => 0,
    };
    match action {
        Action::DemoteAnchor { layer, .. } => Work {
            demote: plan.map.anchor_bytes,
            write: stored(layer),
            ..Work::default()
        },
        Action::PromoteAnchor { layer, .. } => Work {
            promote: plan.map.anchor_bytes,
            read: stored(layer),
            ..Work::default()
        },
        Action::DemoteWeight { layer, .. } => Work {
            demote: weight(layer),
            ..Work::default()
        },
        Action::Return { layer, .. } => Work {
            promote: weight(layer),
            ..Work::default()
        },
        other => unreachable!("{other:?} does not travel"),
    }
}

/// Elements of embedding rows that a step names, if each token were another row: at most half of
/// the table, since text repeats itself.
fn named_elements(plan: &Plan) -> u64 {
    let elements = plan.tiles[0].layout.elements;
    let tokens = plan.map.shape.tokens * plan.map.shape.micros;
    let hidden = plan.map.anchor_bytes / (plan.map.shape.tokens * plan.map.shape.activation_bytes);
    tokens.saturating_mul(hidden).min(elements / 2)
}

fn compute_work(plan: &Plan, action: Action) -> Work {
    let tokens = plan.map.shape.tokens as f64;
    let flops = &plan.flops;
    let elements = |layer: u16| plan.tiles[usize::from(layer)].layout.elements as f64;
    // An f32 gradient is read and written wherever products are added to it.
    const ADDED: f64 = 8.0;
    let block = |forwards: f64, backwards: f64| Work {
        flops: (forwards + 2.0 * backwards) * flops.block * tokens,
        attention: (forwards + 2.0 * backwards) * flops.attention * tokens,
        passes: (forwards * flops.forward_bytes + backwards * flops.backward_bytes) * tokens,
        ..Work::default()
    };
    match action {
        Action::Bind { layer, .. } if plan.map.compute_weight.is_some() => Work {
            passes: (2 + plan.map.shape.activation_bytes) as f64 * elements(layer),
            ..Work::default()
        },
        Action::Forward { .. } | Action::ForwardOnly { .. } | Action::Rebuild { .. } => {
            block(1.0, 0.0)
        }
        Action::Backward { kept, layer, .. } => {
            let mut work = block(if kept.is_some() { 0.0 } else { 1.0 }, 1.0);
            if kept.is_none() {
                work.flops -= flops.last * tokens;
            }
            work.passes += ADDED * elements(layer);
            if kept.is_some_and(|slot| plan.map.is_lean(slot)) {
                work.passes += flops.restored_bytes * tokens;
            }
            work
        }
        Action::Loss { .. } => {
            let matrix = flops.head / 2.0;
            let chunks = (tokens / plan.map.head_scratch.chunk_rows as f64).ceil();
            Work {
                flops: 3.0 * flops.head * tokens,
                passes: flops.head_bytes * tokens + ADDED * matrix * chunks,
                ..Work::default()
            }
        }
        Action::Evaluate { .. } => Work {
            flops: flops.head * tokens,
            passes: flops.head_bytes / 2.0 * tokens,
            ..Work::default()
        },
        Action::Finish { layer, .. } => Work {
            passes: ADDED * elements(layer),
            ..Work::default()
        },
        _ => Work::default(),
    }
}

/// How much longer attention takes an operation with heads of that width than with 128: a score's
/// softmax costs as much as 64 more elements of a head, which is what an H200 showed at 64.
pub fn attention_cost(head_dim: f64) -> f64 {
    const SOFTMAX: f64 = 64.0;
    let width = head_dim.max(1.0);
    (width + SOFTMAX) / width / ((128.0 + SOFTMAX) / 128.0)
}

fn compute_seconds(plan: &Plan, work: &Work, rates: &Rates) -> f64 {
    (work.flops - work.attention) / rates.gemm
        + work.attention * attention_cost(plan.flops.head_dim) / rates.attention
        + work.passes / rates.passes
}

/// Steps that are run: the pipe is full in the last.
const STEPS: usize = 3;

/// Runs three steps of the schedule and reports the last.
pub fn simulate(plan: &Plan, schedule: &Schedule, rates: &Rates) -> Prediction {
    let rates = &Rates {
        adamw: rates.adamw * ADAMW_BYTES as f64 / update_bytes(plan) as f64,
        ..*rates
    };
    let works: Vec<Work> = schedule
        .actions
        .iter()
        .map(|s| work(plan, s.action, rates))
        .collect();
    let mut prediction = Prediction {
        tokens: plan.map.shape.tokens * u64::from(schedule.micros),
        ..Prediction::default()
    };
    for work in &works {
        prediction.executed_flops += work.flops;
        prediction.promote_bytes += work.promote;
        prediction.demote_bytes += work.demote;
        prediction.read_bytes += work.read;
        prediction.write_bytes += work.write;
        prediction.compute_seconds += compute_seconds(plan, work, rates);
        prediction.promote_seconds += work.promote as f64 / rates.promote;
        prediction.demote_seconds += work.demote as f64 / rates.demote;
        prediction.store_seconds += disk_seconds(work, rates);
        prediction.update_seconds += work.parameters as f64 / rates.adamw;
        prediction.zstd_seconds += work.zstd / f64::from(rates.cores);
    }
    let step_end = clock(plan, schedule, &works, rates);
    let pipelined = if schedule.form == Form::Train {
        step_end[STEPS - 1] - step_end[STEPS - 2]
    } else {
        step_end[0]
    };
    prediction.step_seconds = pipelined.max(prediction.light_seconds(rates.shared_cores));
    prediction
}

/// When the compute lane has ended each step. Of all lanes, that goes on whose next action can
/// start first, so that the store is given out in the order in which it is asked for.
fn clock(plan: &Plan, schedule: &Schedule, works: &[Work], rates: &Rates) -> [f64; STEPS] {
    const WAITS: f64 = f64::INFINITY;
    const UPDATE: usize = Lane::Update as usize;
    // Bytes a second of host memory, as far as AdamW shows it.
    let memory = rates.adamw * update_bytes(plan) as f64;
    let lanes = Lane::ALL.map(|lane| schedule.lane(lane).collect::<Vec<usize>>());
    let mut ended = vec![[WAITS; STEPS]; schedule.actions.len()];
    let mut done = [0usize; Lane::ALL.len()];
    let mut free = [0.0f64; Lane::ALL.len()];
    let mut store_free = 0.0f64;
    let mut copy_rates = [0.0f64; Lane::ALL.len()];
    let mut copied_until = [0.0f64; Lane::ALL.len()];
    let mut update = Updating::default();
    let mut step_end = [0.0f64; STEPS];
    let start = |lane: usize, done: usize, free: f64, ended: &[[f64; STEPS]]| {
        let step = done.checked_div(lanes[lane].len()).filter(|s| *s < STEPS)?;
        let index = lanes[lane][done % lanes[lane].len()];
        let after = schedule.actions[index].after.iter();
        let of = |after: &super::After| match step.checked_sub(usize::from(after.previous)) {
            Some(step) => ended[after.action as usize][step],
            None => 0.0,
        };
        Some((after.map(of).fold(free, f64::max), lane, step, index))
    };
    loop {
        let next = (0..lanes.len()).filter_map(|l| start(l, done[l], free[l], &ended));
        let Some((start, lane, step, index)) = next.min_by(|a, b| a.0.total_cmp(&b.0)) else {
            return step_end;
        };
        assert!(start < WAITS, "a schedule does not wait in a circle");
        let work = &works[index];
        let disk = disk_seconds(work, rates);
        let ways = [
            work.promote as f64 / rates.promote,
            work.demote as f64 / rates.demote,
        ];
        let copies = ways[0] + ways[1];
        let mut end = start
            + compute_seconds(plan, work, rates)
            + work.parameters as f64 / rates.adamw
            + work.zstd / f64::from(rates.cores);
        let copied_beside = |lane: usize, end: f64| (end.min(copied_until[lane]) - start).max(0.0);
        if lane == UPDATE {
            let beside = (0..lanes.len()).filter(|other| *other != UPDATE);
            let copied = |lane| copy_rates[lane] * copied_beside(lane, end);
            let carried = (work.promote + work.demote) as f64;
            end += (beside.map(copied).sum::<f64>() + carried) / memory;
            if carried > 0.0 {
                let copying = |lane: Lane| copied_beside(lane as usize, end);
                let up = ways[0] + copying(Lane::Up) + copying(Lane::Return);
                let down = ways[1] + copying(Lane::Down);
                end = match overlaps(plan, schedule.actions[index].action) {
                    true => end.max(start + up.max(down)),
                    false => end + up + down,
                };
            }
            update = Updating { index, step, end };
        } else if copies > 0.0 {
            end += copies;
            copy_rates[lane] = (work.promote + work.demote) as f64 / copies;
            copied_until[lane] = start + copies;
            let copied = copy_rates[lane] * (end.min(update.end) - start).max(0.0);
            update.end += copied / memory;
            if free[UPDATE] < update.end {
                free[UPDATE] = update.end;
                ended[update.index][update.step] = update.end;
            }
        }
        if disk > 0.0 {
            store_free = store_free.max(start) + disk;
            end = end
                .max(store_free)
                .max(start + work.zstd / coders(plan, rates));
        }
        done[lane] += 1;
        free[lane] = end;
        ended[index][step] = end;
        if schedule.actions[index].lane == Lane::Compute {
            step_end[step] = end;
        }
    }
}

/// Whether there are slabs for spans that are read, updated and written at once.
fn overlaps(plan: &Plan, action: Action) -> bool {
    let Action::Update { layer, .. } = action else {
        return true;
    };
    let tile = &plan.tiles[usize::from(layer)];
    let sections = tile.spilled().count() + tile.states_on_device().count();
    plan.host.slabs >= 3 * sections as u64
}

/// Cores that compress: as many as there are threads, less one for the store's own thread.
fn coders(plan: &Plan, rates: &Rates) -> f64 {
    let cores = u64::from(rates.cores).saturating_sub(1).max(1);
    plan.host.coder_slabs.clamp(1, cores) as f64
}

/// The update that began last.
#[derive(Default)]
struct Updating {
    index: usize,
    step: usize,
    /// Of its arithmetic; its disk time may be longer.
    end: f64,
}

fn disk_seconds(work: &Work, rates: &Rates) -> f64 {
    let both = work.read.min(work.write);
    (work.read - both) as f64 / rates.store_read
        + (work.write - both) as f64 / rates.store_write
        + 2.0 * both as f64 / rates.store_mixed
}
