//! The loops over elements, written once and compiled once for each instruction set.
//!
//! - [`update`] is the only place where AdamW's arithmetic stands. `mul_add` is one rounding in
//!   every compilation, and no other operation may be contracted or reordered, so the bits agree.
//! - Slices are cut to equal lengths by the caller's assertion; no pointer arithmetic here.
//!
//! No intrinsics: the compiler vectorises these loops as far as the enabled features allow
//! (`benches/adamw.rs` shows whether memory is the bound).

use super::{AdamwStep, GradientSpan, Isa, Span, WeightSpan};
use crate::tile::{join_master, split_master};

/// Elements between two looks at what a search has found.
const SEARCH_ELEMENTS: usize = 1024;

/// Updates the span; decayed weights are multiplied by `keep`.
pub(super) fn run(isa: Isa, step: &AdamwStep, keep: f32, span: Span<'_>) {
    match isa {
        Isa::Scalar => sweep(step, keep, span),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `adamw` and `adamw_parallel` asserted that the processor has these features.
        Isa::Avx2 => unsafe { sweep_avx2(step, keep, span) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as for AVX2.
        Isa::Avx512 => unsafe { sweep_avx512(step, keep, span) },
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 | Isa::Avx512 => unreachable!("not available on this architecture"),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn sweep_avx2(step: &AdamwStep, keep: f32, span: Span<'_>) {
    sweep(step, keep, span);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
fn sweep_avx512(step: &AdamwStep, keep: f32, span: Span<'_>) {
    sweep(step, keep, span);
}

#[inline(always)]
fn sweep(step: &AdamwStep, keep: f32, span: Span<'_>) {
    let (m, v) = (span.moment1, span.moment2);
    match (span.weight, span.gradient) {
        (WeightSpan::Split { weight, residual }, GradientSpan::Bf16(g)) => {
            sweep_split(step, keep, weight, residual, m, v, g, bf16_value)
        }
        (WeightSpan::Split { weight, residual }, GradientSpan::F32(g)) => {
            sweep_split(step, keep, weight, residual, m, v, g, |g| g)
        }
        (WeightSpan::Full(weight), GradientSpan::Bf16(g)) => {
            sweep_full(step, keep, weight, m, v, g, bf16_value)
        }
        (WeightSpan::Full(weight), GradientSpan::F32(g)) => {
            sweep_full(step, keep, weight, m, v, g, |g| g)
        }
    }
}

#[inline(always)]
fn bf16_value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[inline(always)]
#[expect(
    clippy::too_many_arguments,
    reason = "one slice an array, so that none may alias"
)]
fn sweep_split<G: Copy>(
    step: &AdamwStep,
    keep: f32,
    weight: &mut [u16],
    residual: &mut [i16],
    moment1: &mut [f32],
    moment2: &mut [f32],
    gradient: &[G],
    value: impl Fn(G) -> f32,
) {
    let weights = weight.iter_mut().zip(residual);
    let moments = moment1.iter_mut().zip(moment2);
    for (((hi, lo), (m, v)), g) in weights.zip(moments).zip(gradient) {
        let w;
        (w, *m, *v) = update(step, keep, join_master(*hi, *lo), *m, *v, value(*g));
        (*hi, *lo) = split_master(w);
    }
}

#[inline(always)]
fn sweep_full<G: Copy>(
    step: &AdamwStep,
    keep: f32,
    weight: &mut [f32],
    moment1: &mut [f32],
    moment2: &mut [f32],
    gradient: &[G],
    value: impl Fn(G) -> f32,
) {
    let moments = moment1.iter_mut().zip(moment2);
    for ((w, (m, v)), g) in weight.iter_mut().zip(moments).zip(gradient) {
        (*w, *m, *v) = update(step, keep, *w, *m, *v, value(*g));
    }
}

/// One element: weight, moment1 and moment2 after the step. The formula is [`super::adamw`]'s.
#[inline(always)]
fn update(s: &AdamwStep, keep: f32, w: f32, m: f32, v: f32, g: f32) -> (f32, f32, f32) {
    let g = g * s.grad_scale;
    let w = w * keep;
    let m = (g - m).mul_add(s.one_minus_beta1, m);
    let v = (s.one_minus_beta2 * g).mul_add(g, s.beta2 * v);
    let denom = v.sqrt() * s.inv_sqrt_bias2 + s.eps;
    let w = w - s.step_size * m / denom;
    (w, m, v)
}

/// Index of the first element that is `bad`.
#[inline(always)]
pub(super) fn first<T: Copy>(values: &[T], bad: impl Fn(T) -> bool) -> Option<usize> {
    for (index, piece) in values.chunks(SEARCH_ELEMENTS).enumerate() {
        // Without an early exit, so that the loop is vectorised.
        if piece.iter().fold(false, |any, x| any | bad(*x)) {
            let within = piece.iter().position(|x| bad(*x))?;
            return Some(index * SEARCH_ELEMENTS + within);
        }
    }
    None
}

/// As [`first`], over two arrays of equal length.
#[inline(always)]
pub(super) fn first_pair<A: Copy, B: Copy>(
    a: &[A],
    b: &[B],
    bad: impl Fn(A, B) -> bool,
) -> Option<usize> {
    let pieces = a.chunks(SEARCH_ELEMENTS).zip(b.chunks(SEARCH_ELEMENTS));
    for (index, (a, b)) in pieces.enumerate() {
        if a.iter().zip(b).fold(false, |any, (a, b)| any | bad(*a, *b)) {
            let within = a.iter().zip(b).position(|(a, b)| bad(*a, *b))?;
            return Some(index * SEARCH_ELEMENTS + within);
        }
    }
    None
}
