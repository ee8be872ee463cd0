//! The optimizer: AdamW over spans of host tiles, clipping, and the learning rate of a step.
//!
//! - One fused pass: weight, moments and gradient are each read once, all but the gradient written
//!   once; 26 bytes of traffic a parameter with a split master and bf16 gradients, 18 with bf16
//!   moments too.
//! - The order of operations and every fused multiply-add is fixed (see [`adamw`]), and one source
//!   is compiled for each [`Isa`]: scalar, AVX2 and AVX-512 give the same bits. Subnormals are
//!   kept.
//! - It is elementwise: results do not depend on how a span is cut or on how many threads run.
//! - What is not a number is found before an update ([`first_non_finite`]); [`adamw`] itself
//!   checks nothing but lengths.
//!
//! It does not compute norms (the device does, from its fp32 accumulator), wait for anything or
//! know where a tile lives. Kernels are in [`sweep`], schedules in [`rate`], the rounding of bf16
//! moments in [`rounding`].

pub mod rate;
pub mod rounding;
mod sweep;

pub use rate::learning_rate;
pub use rounding::Rounding;

use std::ops::Range;
use std::time::Duration;

use crate::host::pool::{by_share, timed};
use crate::tile::join_master;

/// Elements of a piece of [`adamw_parallel`]: 896 KiB over all arrays of a split master.
pub const PIECE_ELEMENTS: usize = 1 << 16;

/// Least magnitude, as f32 bits, that rounds to infinity in bf16.
pub const BF16_OVERFLOW_BITS: u32 = 0x7F7F_8000;

/// Instruction set that an update is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// What every machine of the architecture has; fused multiply-adds may be in software.
    Scalar,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, DQ and VL, and FMA.
    Avx512,
}

impl Isa {
    /// All of them, in order of width.
    pub const ALL: [Isa; 3] = [Isa::Scalar, Isa::Avx2, Isa::Avx512];

    /// The widest that this processor runs.
    pub fn detect() -> Isa {
        let widest = Isa::ALL.into_iter().rev().find(|isa| isa.available());
        widest.unwrap_or(Isa::Scalar)
    }

    /// Whether this processor runs it.
    pub fn available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => false,
        }
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        })
    }
}

/// The numbers of one step's update: computed once, in f64, then rounded to f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwStep {
    /// The step, counted from 1.
    pub t: u64,
    /// 1 − rate·weight_decay: what a decayed weight is multiplied by.
    pub keep: f32,
    /// 1 − beta1.
    pub one_minus_beta1: f32,
    /// beta2.
    pub beta2: f32,
    /// 1 − beta2.
    pub one_minus_beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// rate / (1 − beta1^t).
    pub step_size: f32,
    /// 1 / √(1 − beta2^t), the root rounded to f32 before, as torch's divisor is.
    pub inv_sqrt_bias2: f32,
    /// Every gradient is multiplied by it: the clip coefficient, or 1.
    pub grad_scale: f32,
}

impl AdamwStep {
    /// The update of step `t`, counted from 1. `rate`, `betas`, `eps` and `weight_decay` are as
    /// `config` has validated them; `grad_scale` is [`clip_coefficient`]'s, or 1.
    ///
    /// # Panics
    /// If `t` is 0.
    pub fn new(
        rate: f64,
        betas: [f64; 2],
        eps: f64,
        weight_decay: f64,
        t: u64,
        grad_scale: f32,
    ) -> AdamwStep {
        assert!(t >= 1, "steps of an update are counted from 1");
        let [beta1, beta2] = betas;
        let power = |beta: f64| beta.powf(t as f64);
        AdamwStep {
            t,
            keep: (1.0 - rate * weight_decay) as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            eps: eps as f32,
            step_size: (rate / (1.0 - power(beta1))) as f32,
            inv_sqrt_bias2: 1.0 / (1.0 - power(beta2)).sqrt() as f32,
            grad_scale,
        }
    }
}

/// Master weights of a span.
#[derive(Debug)]
pub enum WeightSpan<'a> {
    /// bf16 weight and i16 residual: an exact fp32 master (see [`crate::tile::split_master`]).
    Split {
        /// bf16 bits.
        weight: &'a mut [u16],
        /// What they lack.
        residual: &'a mut [i16],
    },
    /// f32.
    Full(&'a mut [f32]),
}

impl<'a> WeightSpan<'a> {
    /// Elements.
    ///
    /// # Panics
    /// If weight and residual differ in length.
    pub fn count(&self) -> usize {
        match self {
            WeightSpan::Split { weight, residual } => {
                assert_eq!(weight.len(), residual.len(), "residual of another length");
                weight.len()
            }
            WeightSpan::Full(weight) => weight.len(),
        }
    }

    /// Elements before `index`, and those from it on.
    fn split_at(self, index: usize) -> (WeightSpan<'a>, WeightSpan<'a>) {
        match self {
            WeightSpan::Split { weight, residual } => {
                let (weight, weight_rest) = weight.split_at_mut(index);
                let (residual, residual_rest) = residual.split_at_mut(index);
                let rest = WeightSpan::Split {
                    weight: weight_rest,
                    residual: residual_rest,
                };
                (WeightSpan::Split { weight, residual }, rest)
            }
            WeightSpan::Full(weight) => {
                let (weight, rest) = weight.split_at_mut(index);
                (WeightSpan::Full(weight), WeightSpan::Full(rest))
            }
        }
    }
}

/// Moments of a span.
#[derive(Debug)]
pub enum MomentSpan<'a> {
    /// f32: exact.
    F32 {
        /// First moment.
        moment1: &'a mut [f32],
        /// Second moment.
        moment2: &'a mut [f32],
    },
    /// bf16 bits. The weight is updated with the moments before they are rounded.
    Bf16 {
        /// First moment.
        moment1: &'a mut [u16],
        /// Second moment.
        moment2: &'a mut [u16],
        /// How both are rounded, from the span's first element on.
        rounding: Rounding,
    },
}

impl<'a> MomentSpan<'a> {
    /// Elements.
    ///
    /// # Panics
    /// If the two differ in length.
    pub fn count(&self) -> usize {
        let (count1, count2) = match self {
            MomentSpan::F32 { moment1, moment2 } => (moment1.len(), moment2.len()),
            MomentSpan::Bf16 {
                moment1, moment2, ..
            } => (moment1.len(), moment2.len()),
        };
        assert_eq!(count1, count2, "moment2 of another length");
        count1
    }

    fn split_at(self, index: usize) -> (MomentSpan<'a>, MomentSpan<'a>) {
        match self {
            MomentSpan::F32 { moment1, moment2 } => {
                let (moment1, rest1) = moment1.split_at_mut(index);
                let (moment2, rest2) = moment2.split_at_mut(index);
                let rest = MomentSpan::F32 {
                    moment1: rest1,
                    moment2: rest2,
                };
                (MomentSpan::F32 { moment1, moment2 }, rest)
            }
            MomentSpan::Bf16 {
                moment1,
                moment2,
                rounding,
            } => {
                let (moment1, rest1) = moment1.split_at_mut(index);
                let (moment2, rest2) = moment2.split_at_mut(index);
                let rest = MomentSpan::Bf16 {
                    moment1: rest1,
                    moment2: rest2,
                    rounding: rounding.skip(index),
                };
                let first = MomentSpan::Bf16 {
                    moment1,
                    moment2,
                    rounding,
                };
                (first, rest)
            }
        }
    }
}

/// Gradients of a span.
#[derive(Clone, Copy, Debug)]
pub enum GradientSpan<'a> {
    /// bf16 bits.
    Bf16(&'a [u16]),
    /// f32.
    F32(&'a [f32]),
}

impl<'a> GradientSpan<'a> {
    /// Elements.
    pub fn count(&self) -> usize {
        match self {
            GradientSpan::Bf16(gradient) => gradient.len(),
            GradientSpan::F32(gradient) => gradient.len(),
        }
    }

    fn split_at(self, index: usize) -> (GradientSpan<'a>, GradientSpan<'a>) {
        match self {
            GradientSpan::Bf16(gradient) => {
                let (gradient, rest) = gradient.split_at(index);
                (GradientSpan::Bf16(gradient), GradientSpan::Bf16(rest))
            }
            GradientSpan::F32(gradient) => {
                let (gradient, rest) = gradient.split_at(index);
                (GradientSpan::F32(gradient), GradientSpan::F32(rest))
            }
        }
    }
}

/// Everything that an update reads and writes, of equal lengths.
struct Span<'a> {
    weight: WeightSpan<'a>,
    moments: MomentSpan<'a>,
    gradient: GradientSpan<'a>,
}

impl<'a> Span<'a> {
    fn new(
        weight: WeightSpan<'a>,
        moments: MomentSpan<'a>,
        gradient: GradientSpan<'a>,
    ) -> Span<'a> {
        let count = weight.count();
        assert_eq!(moments.count(), count, "moments of another length");
        assert_eq!(gradient.count(), count, "gradient of another length");
        Span {
            weight,
            moments,
            gradient,
        }
    }

    fn count(&self) -> usize {
        self.gradient.count()
    }

    fn split_at(self, index: usize) -> (Span<'a>, Span<'a>) {
        let (weight, weight_rest) = self.weight.split_at(index);
        let (moments, moments_rest) = self.moments.split_at(index);
        let (gradient, gradient_rest) = self.gradient.split_at(index);
        (
            Span::new(weight, moments, gradient),
            Span::new(weight_rest, moments_rest, gradient_rest),
        )
    }
}

/// One AdamW update of a span, on the calling thread. The first `decayed` elements (all, if the
/// span is shorter) are decayed. With every operation rounded to f32 and `fma` rounding once:
///
/// ```text
/// g     = gradient · grad_scale
/// w     = weight · keep                                    the decayed elements only
/// m     = fma(g − moment1, one_minus_beta1, moment1)
/// v     = fma(one_minus_beta2 · g, g, beta2 · moment2)
/// denom = √v · inv_sqrt_bias2 + eps
/// w     = w − (step_size · m) / denom
/// ```
///
/// This is torch.optim.AdamW's own order, but for one division less (benches/adamw.rs): moments
/// come out with its bits, weights within 1 ulp of the largest term where the weight is that term.
/// A split master is joined before and split after, exactly. bf16 moments are widened before and
/// rounded after (see [`rounding`]); the weight has had the moments as they were computed.
/// Gradients must have been found finite; then only a moment or a weight that overflows its format
/// can become anything else.
///
/// # Panics
/// If the lengths differ, or this processor does not run `isa`.
pub fn adamw(
    isa: Isa,
    step: &AdamwStep,
    decayed: usize,
    weight: WeightSpan<'_>,
    moments: MomentSpan<'_>,
    gradient: GradientSpan<'_>,
) {
    assert!(isa.available(), "this processor has no {isa}");
    update(isa, step, decayed, Span::new(weight, moments, gradient));
}

/// [`adamw`] on all threads of rayon's current pool, in pieces of at most [`PIECE_ELEMENTS`]: the
/// same elements on the same thread each time, as far as all are free (see [`by_share`]).
///
/// # Panics
/// As [`adamw`].
pub fn adamw_parallel(
    isa: Isa,
    step: &AdamwStep,
    decayed: usize,
    weight: WeightSpan<'_>,
    moments: MomentSpan<'_>,
    gradient: GradientSpan<'_>,
) {
    let all = 0..gradient.count();
    adamw_ranges(isa, step, decayed, weight, moments, gradient, &[all]);
}

/// [`adamw_parallel`] of the elements in `ranges` alone, which ascend and do not overlap. Returns
/// the time that its threads had a processor for it, the mean of them.
///
/// # Panics
/// As [`adamw`], or if a range leaves the span.
pub fn adamw_ranges(
    isa: Isa,
    step: &AdamwStep,
    decayed: usize,
    weight: WeightSpan<'_>,
    moments: MomentSpan<'_>,
    gradient: GradientSpan<'_>,
    ranges: &[Range<usize>],
) -> Duration {
    assert!(isa.available(), "this processor has no {isa}");
    let mut rest = Span::new(weight, moments, gradient);
    let (mut at, mut pieces) = (0, Vec::new());
    for range in ranges {
        (_, rest) = rest.split_at(range.start - at);
        at = range.start;
        while at < range.end {
            let count = PIECE_ELEMENTS.min(range.end - at);
            let piece;
            (piece, rest) = rest.split_at(count);
            pieces.push((decayed.saturating_sub(at), piece));
            at += count;
        }
    }
    let run = |(decayed, piece)| update(isa, step, decayed, piece);
    // A span that one thread takes in no time is not worth another thread's waking.
    match ranges.iter().map(Range::len).sum::<usize>() <= PIECE_ELEMENTS {
        true => timed(|| pieces.into_iter().for_each(run)),
        false => by_share(pieces, run),
    }
}

fn update(isa: Isa, step: &AdamwStep, decayed: usize, span: Span<'_>) {
    let decayed = decayed.min(span.count());
    let (first, rest) = span.split_at(decayed);
    for (keep, part) in [(step.keep, first), (1.0, rest)] {
        if part.count() > 0 {
            sweep::run(isa, step, keep, part);
        }
    }
}

/// Index of the first gradient that is infinite or not a number. In bf16 a finite accumulator of
/// [`BF16_OVERFLOW_BITS`] or more has become infinite, and is found here.
pub fn first_non_finite(gradient: GradientSpan<'_>) -> Option<usize> {
    match gradient {
        GradientSpan::Bf16(bits) => sweep::first(bits, |x| x & 0x7F80 == 0x7F80),
        GradientSpan::F32(values) => sweep::first(values, |x| !x.is_finite()),
    }
}

/// Index of the first master weight that is not a number, or whose bf16 half would be infinite;
/// of f32 weights, the first that is infinite or not a number.
pub fn first_non_finite_weight(weight: &WeightSpan<'_>) -> Option<usize> {
    match weight {
        WeightSpan::Split { weight, residual } => sweep::first_pair(weight, residual, |hi, lo| {
            overflows_bf16(join_master(hi, lo))
        }),
        WeightSpan::Full(values) => sweep::first(values, |x| !x.is_finite()),
    }
}

/// Whether the value is not a number or rounds to infinity in bf16.
#[inline]
pub fn overflows_bf16(value: f32) -> bool {
    value.to_bits() & 0x7FFF_FFFF >= BF16_OVERFLOW_BITS
}

/// What gradients of global norm `norm` are multiplied by, as torch's `clip_grad_norm_` does:
/// min(1, max_norm / (norm + 1e-6)). A `max_norm` of 0 is off, and gives 1.
pub fn clip_coefficient(norm: f64, max_norm: f64) -> f32 {
    if max_norm == 0.0 {
        return 1.0;
    }
    (max_norm / (norm + 1e-6)).min(1.0) as f32
}

#[cfg(test)]
mod tests;
