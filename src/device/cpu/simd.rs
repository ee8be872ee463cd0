//! Vector loops of the CPU device: plain Rust that the compiler vectorises, compiled three times.
//!
//! - [`vectorised!`] makes a function for AVX-512, for AVX2 with FMA and for the plain target, and
//!   chooses at run time. The body is one, so the order of operations is one: every fused
//!   multiply-add is written as `mul_add` and the compiler adds none, so all three give the same
//!   bits.
//! - Sums run in [`LANES`] lanes whatever the vector width, and are folded in a fixed order.
//!
//! No parallelism here: callers cut fixed pieces.

/// Partial sums of a reduction: a full AVX-512 register of f32, two of AVX2.
pub(super) const LANES: usize = 16;

/// Elements that are summed in f32 before they are added to an f64 total.
const F32_SUM_MAX: usize = 256;

/// Declares a function whose body is compiled for each vector width and chosen at run time.
macro_rules! vectorised {
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block
    ) => {
        $(#[$meta])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
                fn avx512($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
                if $crate::device::cpu::simd::has_avx512() {
                    // SAFETY: the processor has just said that it has these instructions.
                    return unsafe { avx512($($arg),*) };
                }
                if $crate::device::cpu::simd::has_avx2() {
                    // SAFETY: as above.
                    return unsafe { avx2($($arg),*) };
                }
            }
            body($($arg),*)
        }
    };
}
pub(super) use vectorised;

/// The processor and the system have the AVX-512 subset that the loops are compiled for.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512bw")
        && has_avx2()
}

/// The processor and the system have AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// e^x within 1 ulp where the result is normal; 0 below −104, infinity above 89, NaN for NaN.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2; e^r = 1 + r + r²·q(r), q of degree 5 by interpolation of
/// (e^r − 1 − r)/r² at the Chebyshev nodes (relative error 8e-10); 2^n in two factors, so that
/// results near both ends of the range are rounded once.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const Q: [f32; 6] = [
        0.5,
        0.166_666_67,
        0.041_666_463,
        0.008_333_31,
        0.001_393_373_1,
        0.000_198_910_8,
    ];
    const LN2_HIGH: f32 = std::f32::consts::LN_2;
    const LN2_LOW: f32 = -1.904_654_2e-9;
    // 1.5·2²³: adding it rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_HIGH, x);
    let r = n.mul_add(-LN2_LOW, r);
    let mut q = Q[5];
    q = q.mul_add(r, Q[4]);
    q = q.mul_add(r, Q[3]);
    q = q.mul_add(r, Q[2]);
    q = q.mul_add(r, Q[1]);
    q = q.mul_add(r, Q[0]);
    let power = (r * r).mul_add(q, r) + 1.0;
    let exponent = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = exponent >> 1;
    let rest = exponent.wrapping_sub(half);
    let first = f32::from_bits((half.wrapping_add(127) << 23) as u32);
    let second = f32::from_bits((rest.wrapping_add(127) << 23) as u32);
    power * first * second
}

/// Folds lanes in halves: the order does not depend on the vector width.
#[inline(always)]
pub(super) fn fold(lanes: [f32; LANES]) -> f32 {
    let mut sums = lanes;
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}

/// Σ f(i) over 0..count: f32 lanes within pieces of [`F32_SUM_MAX`], the pieces in f64.
#[inline(always)]
pub(super) fn lane_sum(count: usize, term: impl Fn(usize) -> f32) -> f64 {
    let mut total = 0.0f64;
    let mut start = 0;
    while start < count {
        let end = count.min(start + F32_SUM_MAX);
        let mut lanes = [0.0f32; LANES];
        let mut i = start;
        while i + LANES <= end {
            for (lane, sum) in lanes.iter_mut().enumerate() {
                *sum += term(i + lane);
            }
            i += LANES;
        }
        for (lane, sum) in lanes.iter_mut().enumerate().take(end - i) {
            *sum += term(i + lane);
        }
        total += f64::from(fold(lanes));
        start = end;
    }
    total
}

vectorised! {
    /// The largest element, NaN passed over; −∞ for none.
    pub(super) fn max(x: &[f32]) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let mut pieces = x.chunks_exact(LANES);
        for piece in &mut pieces {
            for (largest, v) in lanes.iter_mut().zip(piece) {
                *largest = if *v > *largest { *v } else { *largest };
            }
        }
        let mut largest = f32::NEG_INFINITY;
        for v in lanes.iter().chain(pieces.remainder()) {
            largest = if *v > largest { *v } else { largest };
        }
        largest
    }
}

vectorised! {
    /// x = e^(x − shift); the sum of the results, f32 within short pieces and f64 across them.
    pub(super) fn exp_in_place(x: &mut [f32], shift: f32) -> f64 {
        let mut total = 0.0f64;
        for piece in x.chunks_mut(F32_SUM_MAX) {
            let mut lanes = [0.0f32; LANES];
            let mut rows = piece.chunks_exact_mut(LANES);
            for row in &mut rows {
                for (sum, v) in lanes.iter_mut().zip(row) {
                    *v = exp(*v - shift);
                    *sum += *v;
                }
            }
            for (sum, v) in lanes.iter_mut().zip(rows.into_remainder()) {
                *v = exp(*v - shift);
                *sum += *v;
            }
            total += f64::from(fold(lanes));
        }
        total
    }
}

vectorised! {
    /// Σ e^(x − shift), summed as [`exp_in_place`] does.
    pub(super) fn exp_sum(x: &[f32], shift: f32) -> f64 {
        let mut total = 0.0f64;
        for piece in x.chunks(F32_SUM_MAX) {
            let mut lanes = [0.0f32; LANES];
            let mut rows = piece.chunks_exact(LANES);
            for row in &mut rows {
                for (sum, v) in lanes.iter_mut().zip(row) {
                    *sum += exp(*v - shift);
                }
            }
            for (sum, v) in lanes.iter_mut().zip(rows.remainder()) {
                *sum += exp(*v - shift);
            }
            total += f64::from(fold(lanes));
        }
        total
    }
}

vectorised! {
    /// x = x·factor.
    pub(super) fn scale(x: &mut [f32], factor: f32) {
        for v in x {
            *v *= factor;
        }
    }
}

vectorised! {
    /// out = x·factor.
    pub(super) fn scaled(x: &[f32], factor: f32, out: &mut [f32]) {
        for (o, v) in out.iter_mut().zip(x) {
            *o = *v * factor;
        }
    }
}

vectorised! {
    /// Σ a·b.
    pub(super) fn dot(a: &[f32], b: &[f32]) -> f64 {
        let b = &b[..a.len()];
        lane_sum(a.len(), |i| a[i] * b[i])
    }
}

vectorised! {
    /// Σ x² in f64.
    pub(super) fn squares(x: &[f32]) -> f64 {
        let mut lanes = [0.0f64; LANES];
        let mut rows = x.chunks_exact(LANES);
        for row in &mut rows {
            for (sum, v) in lanes.iter_mut().zip(row) {
                let v = f64::from(*v);
                *sum += v * v;
            }
        }
        for (sum, v) in lanes.iter_mut().zip(rows.remainder()) {
            let v = f64::from(*v);
            *sum += v * v;
        }
        lanes.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Goal: exp is within 1 ulp of the true value over its whole range, and its ends are right.
    // Method: a dense walk over bit patterns against f64's exp.
    #[test]
    fn exp_is_within_one_ulp() {
        let mut worst = 0.0f64;
        for step in 0..2_000_000u32 {
            let x = -87.3 + f64::from(step) * (88.72 + 87.3) / 2e6;
            let x = x as f32;
            let want = f64::from(x).exp();
            let ulp = f64::from((want as f32).next_up()) - f64::from(want as f32);
            worst = worst.max((f64::from(exp(x)) - want).abs() / ulp);
        }
        assert!(worst <= 1.0, "{worst} ulp");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-200.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(100.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        let denormal = f64::from(exp(-100.0));
        assert!((denormal - (-100.0f64).exp()).abs() <= 2f64.powi(-149));
    }

    #[test]
    fn every_vector_width_gives_the_same_bits() {
        vectorised! {
            fn wide(x: &mut [f32]) -> f64 { lane_sum(x.len(), |i| exp(x[i])) }
        }
        fn plain(x: &mut [f32]) -> f64 {
            lane_sum(x.len(), |i| exp(x[i]))
        }
        let mut x: Vec<f32> = (0..1003).map(|i| (i as f32) * 0.017 - 9.0).collect();
        assert_eq!(wide(&mut x).to_bits(), plain(&mut x).to_bits());
    }
}
