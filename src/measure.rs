//! What this machine does: rates of its hops, of matrix products and of AdamW, measured.
//!
//! - [`measure_rates`] takes a fraction of a second and no disk: what a plan on this machine uses.
//! - [`hops::measure`] takes a minute and writes a store of the size given, through the scratch
//!   class that a run spills with; what it wrote is gone when it returns. [`profile`] keeps it.
//! - [`load::run`] does what jobs in fio's words ask for: [`words`], [`job_file`], then [`outcome`]
//!   as text ([`fio_text`]) or JSON ([`fio_json`]).
//! - Rates are of the fastest of a few runs: what the hop can do, not what neighbours leave of it.

pub mod charts;
pub mod fio_json;
pub mod fio_text;
pub mod histogram;
pub mod hops;
pub mod job_file;
pub mod load;
pub mod outcome;
mod pattern;
pub mod profile;
mod target;
mod units;
pub mod usage;
pub mod words;
mod worker;

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rayon::prelude::*;

use crate::device::ops::AttentionShape;
use crate::device::{Device, Dtype, View};
use crate::error::Result;
use crate::host::{HostArena, Lease};
use crate::optimizer::{
    self, AdamwStep, GradientSpan, Isa, MomentSpan, PIECE_ELEMENTS, WeightSpan,
};
use crate::plan::DeviceProfile;
use crate::schedule::simulate::{Rates, ZstdRates, attention_cost};
use crate::tile::PAGE_BYTES;
use profile::STORE_BYTES_PER_SECOND;

/// Bytes of a parameter in memory: weight, residual, two moments, bf16 gradient.
const PARAMETER_BYTES: u64 = 14;
/// Bytes of a parameter that AdamW moves: all are read, all but the gradient written.
pub const ADAMW_TRAFFIC_BYTES: u64 = 26;

/// Copies of the CPU device: with another thread's beside them more than most caches hold, and
/// little beside the arenas of a small run.
const COPY_BYTES: usize = 16 << 20;

/// Rates of this machine and a device, measured in a fraction of a second; the store's are what a
/// common NVMe drive does: [`hops`] measures it.
///
/// # Errors
/// Those of taking memory.
pub fn measure_rates(profile: &DeviceProfile) -> Result<Rates> {
    // A card's copies are at their best from 16 MiB on.
    let copy_bytes = match profile.card {
        Some(_) => 64 << 20,
        None => COPY_BYTES,
    };
    let device = measure_device(profile, copy_bytes)?;
    Ok(Rates {
        gemm: device.gemm,
        attention: device.attention,
        passes: device.passes,
        promote: device.copy_in,
        demote: device.copy_out,
        store_read: STORE_BYTES_PER_SECOND,
        store_write: STORE_BYTES_PER_SECOND,
        store_mixed: STORE_BYTES_PER_SECOND,
        // More than the caches of a server's cores hold.
        adamw: measure_adamw(rayon::current_num_threads() * (8 << 20), 3)?.parameters,
        shared_cores: profile.card.is_none(),
        cores: u32::try_from(crate::machine::cores())
            .unwrap_or(u32::MAX)
            .max(1),
        zstd: ZstdRates::ASSUMED,
    })
}

struct DeviceRates {
    /// FLOP/s of a matrix product.
    gemm: f64,
    /// FLOP/s of attention with heads 128 wide, forward and backward.
    attention: f64,
    /// Bytes a second of a pass over activations.
    passes: f64,
    /// Bytes a second into the arena.
    copy_in: f64,
    /// Bytes a second out of it.
    copy_out: f64,
}

/// Operations of a card between two waits for it, so that the wait is not measured.
const CARD_BATCH: u32 = 16;
/// How long a card works before its products are timed.
const CLOCKS_RISE: Duration = Duration::from_millis(300);

/// Copies are of `copy_bytes`, from host memory only if that is more than the caches hold; on the
/// CPU device beside another thread's.
fn measure_device(profile: &DeviceProfile, copy_bytes: usize) -> Result<DeviceRates> {
    let side: u64 = if profile.card.is_some() { 4096 } else { 768 };
    let (matrix, width) = (side * side, profile.activation_bytes);
    let arena_bytes = (9 * matrix * width).max(copy_bytes as u64);
    let device = Device::open(profile.card, arena_bytes, width)?;
    let act = device.activation_dtype();
    let view = |index: u64| View::new(index * matrix * width, matrix, act);
    // A card is faster where all numbers are equal.
    let numbers = uniform(matrix as usize);
    (0..2).for_each(|index| device.write_f32(view(index), &numbers));
    let batch = if profile.card.is_some() {
        CARD_BATCH
    } else {
        1
    };
    let batched = |work: &dyn Fn()| {
        (0..batch).for_each(|_| work());
        device.settle();
    };
    let multiply = || device.linear_forward(view(0), view(1), None, view(2), side, false);
    batched(&multiply);
    if profile.card.is_some() {
        // An idle card takes a while to come to its clocks.
        let started = Instant::now();
        while started.elapsed() < CLOCKS_RISE {
            batched(&multiply);
        }
    }
    let seconds = |work: &dyn Fn()| fastest_seconds(5, || batched(work)) / f64::from(batch);
    let gemm = 2.0 * (side * matrix) as f64 / seconds(&multiply);
    let attention =
        attention_flops(side, head_dim(&device)) / seconds(&|| attend(&device, view, side));
    let pass_seconds = seconds(&|| device.swiglu_forward(view(0), view(1), view(2)));
    let mut cutter = HostArena::take(copy_bytes as u64)?;
    if let Device::Cuda(cuda) = &device {
        // A refusal is told when the run's own memory is pinned.
        cuda.pin(cutter.span()).ok();
    }
    let mut lease = cutter.cut(copy_bytes as u64);
    let bytes = lease.as_mut_slice::<u8>();
    let mut copies = || {
        let copy_in = fastest_seconds(5, || device.copy_in(0, bytes));
        [copy_in, fastest_seconds(5, || device.copy_out(0, bytes))]
    };
    let copies = match profile.card {
        Some(_) => copies(),
        None => beside_a_copy(copies),
    };
    let [copy_in, copy_out] = copies.map(|seconds| copy_bytes as f64 / seconds);
    device.check()?;
    Ok(DeviceRates {
        gemm,
        attention,
        passes: (3 * matrix * width) as f64 / pass_seconds,
        copy_in,
        copy_out,
    })
}

/// Runs `work` while another thread copies, as a lane of the CPU device does beside the others:
/// they share memory, and two threads of a core its units.
fn beside_a_copy<T>(work: impl FnOnce() -> T) -> T {
    let (began, ended) = (Barrier::new(2), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (from, mut to) = (vec![1u8; COPY_BYTES], vec![0u8; COPY_BYTES]);
            to.copy_from_slice(&from);
            began.wait();
            while !ended.load(Ordering::Relaxed) {
                std::hint::black_box(&mut to).copy_from_slice(&from);
            }
        });
        began.wait();
        let result = work();
        ended.store(true, Ordering::Relaxed);
        result
    })
}

/// Numbers from -1 to 1, without a pattern.
fn uniform(count: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        // Xorshift, Marsaglia 2003.
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as i32 as f32 / i32::MAX as f32
    };
    (0..count).map(|_| next()).collect()
}

/// Width of a head where attention is measured.
fn head_dim(device: &Device) -> u64 {
    if device.is_asynchronous() { 128 } else { 64 }
}

/// Attention, forward and backward, over `side` tokens of one sequence in `side` columns of heads.
fn attend(device: &Device, view: impl Fn(u64) -> View, side: u64) {
    let head_dim = head_dim(device);
    let heads = side / head_dim;
    let bounds = [0, u32::try_from(side).expect("a few thousand tokens")];
    let shape = || AttentionShape {
        heads,
        kv_heads: heads,
        head_dim,
        window: None,
        bounds: &bounds,
    };
    let sums = View::new(view(8).offset, heads * side, Dtype::F32);
    let [q, k, v, o] = [0, 1, 2, 3].map(&view);
    let [d_o, dq, dk, dv] = [4, 5, 6, 7].map(&view);
    device.attention_forward(q, k, v, o, sums, shape());
    device.attention_backward(q, k, v, o, sums, d_o, dq, dk, dv, shape());
}

/// Its FLOPs as [`crate::plan::Flops`] counts them for heads 128 wide.
fn attention_flops(side: u64, head_dim: u64) -> f64 {
    let forward = 2.0 * (side * side * side) as f64;
    3.0 * forward * attention_cost(head_dim as f64)
}

/// AdamW beside the stream that bounds it.
struct AdamwRates {
    /// Parameters a second.
    parameters: f64,
    /// Bytes a second of reading and writing the same memory in place, both counted.
    stream: f64,
}

/// Over `count` parameters, which should be more than the caches hold.
fn measure_adamw(count: usize, times: u32) -> Result<AdamwRates> {
    // A page over for each of five sections.
    let mut cutter = HostArena::take(count as u64 * PARAMETER_BYTES + 5 * PAGE_BYTES)?;
    let mut leases = [2u64, 2, 4, 4, 2].map(|width| cutter.cut(count as u64 * width));
    let step = AdamwStep::new(1e-4, [0.9, 0.999], 1e-8, 0.01, 1, 1.0);
    let isa = Isa::detect();
    let update_seconds = fastest_seconds(times, || {
        let [weight, residual, moment1, moment2, gradient] = &mut leases;
        let span = WeightSpan::Split {
            weight: weight.as_mut_slice(),
            residual: residual.as_mut_slice(),
        };
        let gradient = GradientSpan::Bf16(gradient.as_slice());
        let moments = MomentSpan::F32 {
            moment1: moment1.as_mut_slice(),
            moment2: moment2.as_mut_slice(),
        };
        optimizer::adamw_parallel(isa, &step, count, span, moments, gradient);
    });
    let stream_seconds = fastest_seconds(times, || leases.iter_mut().for_each(stream));
    Ok(AdamwRates {
        parameters: count as f64 / update_seconds,
        stream: (2 * count as u64 * PARAMETER_BYTES) as f64 / stream_seconds,
    })
}

/// Reads and writes every word in place, on all threads.
fn stream(section: &mut Lease) {
    let zero = std::hint::black_box(0);
    let words = section.as_mut_slice::<u32>();
    words.par_chunks_mut(PIECE_ELEMENTS).for_each(|piece| {
        for word in piece {
            *word = word.wrapping_add(zero);
        }
    });
}

/// Least time that is measured for, so that a neighbour's moment does not decide.
const LEAST_MEASURED: Duration = Duration::from_millis(150);

/// Of at least so many runs and at least that long.
fn fastest_seconds(times: u32, mut work: impl FnMut()) -> f64 {
    let mut fastest = f64::INFINITY;
    let began = Instant::now();
    let mut done = 0;
    while done < times || began.elapsed() < LEAST_MEASURED {
        let started = Instant::now();
        work();
        fastest = fastest.min(started.elapsed().as_secs_f64());
        done += 1;
    }
    fastest.max(1e-9)
}
