//! The loops over elements, written once and compiled once for each instruction set.
//!
//! - [`update`] is the only place where AdamW's arithmetic stands. `mul_add` is one rounding in
//!   every compilation, and no other operation may be contracted or reordered, so the bits agree.
//! - Slices are cut to equal lengths by the caller's assertion; nothing is read or written by
//!   pointer.
//! - Loops go in turns of whole cache lines, each of which asks for the lines of a later one.
//!
//! No intrinsics but the prefetch: the compiler vectorises these loops as far as the enabled
//! features allow (`benches/adamw.rs` shows whether memory is the bound).

use super::rounding::{self, Rounding};
use super::{AdamwStep, GradientSpan, Isa, MomentSpan, Span, WeightSpan};
use crate::tile::{join_master, split_master};

/// Elements of a turn: whole lines of every array, if it starts on one.
const TURN_ELEMENTS: usize = 32;
/// Elements between a turn and what it asks for. The hardware's own prefetch does not keep up with
/// five arrays at once: without this an Intel Xeon reaches seven eighths of the stream's bytes.
const AHEAD_ELEMENTS: usize = 512;
/// Bytes that memory moves at once.
const LINE_BYTES: usize = 64;
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
    let (moments, gradient) = (span.moments, span.gradient);
    match span.weight {
        WeightSpan::Split { weight, residual } => {
            by_moments(step, keep, weight, residual, moments, gradient);
        }
        // Elements of no bytes in the residual's place.
        WeightSpan::Full(weight) => {
            let mut nothing = vec![(); weight.len()];
            by_moments(step, keep, weight, &mut nothing, moments, gradient);
        }
    }
}

#[inline(always)]
fn by_moments<R: Copy, W: Master<R>>(
    step: &AdamwStep,
    keep: f32,
    weight: &mut [W],
    residual: &mut [R],
    moments: MomentSpan<'_>,
    gradient: GradientSpan<'_>,
) {
    match moments {
        MomentSpan::F32 { moment1, moment2 } => {
            let moments = (moment1, moment2, None);
            by_gradient(step, keep, weight, residual, moments, gradient);
        }
        MomentSpan::Bf16 {
            moment1,
            moment2,
            rounding,
        } => {
            let moments = (moment1, moment2, Some(rounding));
            by_gradient(step, keep, weight, residual, moments, gradient);
        }
    }
}

#[inline(always)]
fn by_gradient<R: Copy, W: Master<R>, M: Moment>(
    step: &AdamwStep,
    keep: f32,
    weight: &mut [W],
    residual: &mut [R],
    moments: (&mut [M], &mut [M], Option<Rounding>),
    gradient: GradientSpan<'_>,
) {
    match gradient {
        GradientSpan::Bf16(gradient) => elements(step, keep, weight, residual, moments, gradient),
        GradientSpan::F32(gradient) => elements(step, keep, weight, residual, moments, gradient),
    }
}

/// A weight of the span, which with what it lacks (`R`) is an f32.
trait Master<R>: Copy {
    fn join(self, residual: R) -> f32;
    fn split(value: f32) -> (Self, R);
}

impl Master<i16> for u16 {
    #[inline(always)]
    fn join(self, residual: i16) -> f32 {
        join_master(self, residual)
    }

    #[inline(always)]
    fn split(value: f32) -> (u16, i16) {
        split_master(value)
    }
}

impl Master<()> for f32 {
    #[inline(always)]
    fn join(self, _: ()) -> f32 {
        self
    }

    #[inline(always)]
    fn split(value: f32) -> (f32, ()) {
        (value, ())
    }
}

/// A number of the span that is read as f32: f32, or bf16 bits.
trait Number: Copy {
    fn value(self) -> f32;
}

impl Number for u16 {
    #[inline(always)]
    fn value(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
    }
}

impl Number for f32 {
    #[inline(always)]
    fn value(self) -> f32 {
        self
    }
}

/// A moment of the span: rounded to bf16 by 16 random bits, or f32 as it is.
trait Moment: Number {
    fn round(value: f32, chance: u16) -> Self;
}

impl Moment for u16 {
    #[inline(always)]
    fn round(value: f32, chance: u16) -> u16 {
        rounding::round(value, chance)
    }
}

impl Moment for f32 {
    #[inline(always)]
    fn round(value: f32, _: u16) -> f32 {
        value
    }
}

/// The span in turns of [`TURN_ELEMENTS`], and what is left.
#[inline(always)]
fn elements<R: Copy, W: Master<R>, M: Moment, G: Number>(
    step: &AdamwStep,
    keep: f32,
    weight: &mut [W],
    residual: &mut [R],
    (moment1, moment2, rounding): (&mut [M], &mut [M], Option<Rounding>),
    gradient: &[G],
) {
    let element = |index: usize, hi: &mut W, lo: &mut R, m: &mut M, v: &mut M, g: G| {
        let bits = rounding.map_or(0, |rounding| rounding.bits(index as u32));
        let (w, new_m, new_v) = update(step, keep, hi.join(*lo), m.value(), v.value(), g.value());
        (*hi, *lo) = W::split(w);
        (*m, *v) = (
            M::round(new_m, bits as u16),
            M::round(new_v, (bits >> 16) as u16),
        );
    };
    let (weight, weight_left) = weight.as_chunks_mut::<TURN_ELEMENTS>();
    let (residual, residual_left) = residual.as_chunks_mut::<TURN_ELEMENTS>();
    let (moment1, moment1_left) = moment1.as_chunks_mut::<TURN_ELEMENTS>();
    let (moment2, moment2_left) = moment2.as_chunks_mut::<TURN_ELEMENTS>();
    let (gradient, gradient_left) = gradient.as_chunks::<TURN_ELEMENTS>();
    let weights = weight.iter_mut().zip(residual);
    let moments = moment1.iter_mut().zip(moment2);
    let mut index = 0;
    for (((hi, lo), (m, v)), g) in weights.zip(moments).zip(gradient) {
        prefetch(hi);
        prefetch(lo);
        prefetch(m);
        prefetch(v);
        prefetch(g);
        // Copies, which alias nothing: registers once the loop is vectorised.
        let mut turn = (*hi, *lo, *m, *v);
        for (i, g) in g.iter().enumerate() {
            let (hi, lo, m, v) = (
                &mut turn.0[i],
                &mut turn.1[i],
                &mut turn.2[i],
                &mut turn.3[i],
            );
            element(index + i, hi, lo, m, v, *g);
        }
        (*hi, *lo, *m, *v) = turn;
        index += TURN_ELEMENTS;
    }
    let weights = weight_left.iter_mut().zip(residual_left);
    let moments = moment1_left.iter_mut().zip(moment2_left);
    for (((hi, lo), (m, v)), g) in weights.zip(moments).zip(gradient_left) {
        element(index, hi, lo, m, v, *g);
        index += 1;
    }
}

/// Asks for the lines that the turn [`AHEAD_ELEMENTS`] after the one at `start` will want: what
/// lies past the span is most often the next one's.
#[inline(always)]
fn prefetch<T>(turn: &[T; TURN_ELEMENTS]) {
    let ahead = turn.as_ptr().wrapping_add(AHEAD_ELEMENTS).cast::<u8>();
    for byte in (0..size_of_val(turn)).step_by(LINE_BYTES) {
        let line = ahead.wrapping_add(byte);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch reads nothing and faults nowhere, whatever the address.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = line;
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
