//! Random numbers of a model made from a seed: a pure function of (seed, tensor name, element).
//!
//! - Counter based: any element range can be made alone, in any order, on any number of threads.
//! - Stable for ever: integers, and f64 additions, multiplications, divisions and square roots,
//!   which IEEE 754 defines to the last bit. No libm, whose last bits change with its version.
//!
//! The construction. `key = mix(mix(seed + G) ^ fnv1a64(name))`. Pair p of a tensor takes the two
//! uniforms `mix(key + (2p + 1)G)` and `mix(key + (2p + 2)G)`, their top 53 bits; Box–Muller makes
//! of them elements 2p (cosine) and 2p + 1 (sine). `mix` is SplitMix64's finalizer and G its
//! increment. The largest value that can come out is √(2·53·ln 2) = 8.58 standard deviations.

/// SplitMix64's increment: 2^64 divided by the golden ratio.
const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// A tensor's stream of standard normal numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormalStream {
    key: u64,
}

impl NormalStream {
    /// The stream of that tensor under that seed.
    pub fn new(seed: u64, tensor: &str) -> NormalStream {
        let name = tensor.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        NormalStream {
            key: mix(mix(seed.wrapping_add(INCREMENT)) ^ name),
        }
    }

    /// Writes elements `first..first + out.len()`, each times `deviation`, rounded once to f32.
    pub fn fill(&self, first: u64, deviation: f32, out: &mut [f32]) {
        let deviation = f64::from(deviation);
        let mut pair = (u64::MAX, (0.0, 0.0));
        for (offset, value) in out.iter_mut().enumerate() {
            let element = first + offset as u64;
            if pair.0 != element / 2 {
                pair = (element / 2, self.pair(element / 2));
            }
            let (even, odd) = pair.1;
            *value = (if element.is_multiple_of(2) { even } else { odd } * deviation) as f32;
        }
    }

    fn pair(&self, index: u64) -> (f64, f64) {
        let uniform = |count: u64| mix(self.key.wrapping_add(count.wrapping_mul(INCREMENT))) >> 11;
        let scale = 1.0 / (1u64 << 53) as f64;
        // In (0, 1], so that the logarithm is finite.
        let first = (uniform(index.wrapping_mul(2).wrapping_add(1)) + 1) as f64 * scale;
        let second = uniform(index.wrapping_mul(2).wrapping_add(2)) as f64 * scale;
        let radius = (-2.0 * natural_log(first)).sqrt();
        let (sine, cosine) = sine_cosine_of_turns(second);
        (radius * cosine, radius * sine)
    }
}

fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// ln x for a normal positive x, within 2^-51 of it: x = m·2^e with m in [√½, √2),
/// ln m = 2·artanh((m − 1)/(m + 1)).
fn natural_log(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut mantissa = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    // |s| ≤ 0.1716, so the first term left out is below 2^-60 of the sum.
    let mut series = 0.0;
    for odd in [
        23.0, 21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0,
    ] {
        series = series * square + 1.0 / odd;
    }
    exponent as f64 * std::f64::consts::LN_2 + 2.0 * s * series
}

/// sin and cos of `turns` whole turns, `turns` in [0, 1): reduced exactly to an eighth of a turn.
fn sine_cosine_of_turns(turns: f64) -> (f64, f64) {
    let quarter = (turns * 4.0 + 0.5) as u64;
    let x = (turns - quarter as f64 * 0.25) * std::f64::consts::TAU;
    let square = x * x;
    let (mut sine, mut cosine) = (0.0, 0.0);
    // Taylor to x^19 and x^18; |x| ≤ π/4.
    for n in (0..10).rev() {
        let n = 2.0 * f64::from(n);
        sine = 1.0 - sine * square / ((n + 2.0) * (n + 3.0));
        cosine = 1.0 - cosine * square / ((n + 1.0) * (n + 2.0));
    }
    let sine = sine * x;
    match quarter % 4 {
        0 => (sine, cosine),
        1 => (cosine, -sine),
        2 => (-sine, -cosine),
        _ => (-cosine, sine),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithm_and_circle_agree_with_the_library() {
        for i in 1..20_000u64 {
            let x = i as f64 / 19_999.0;
            assert!(
                (natural_log(x) - x.ln()).abs() <= 4e-16 * x.ln().abs().max(1.0),
                "ln {x}"
            );
            let turns = x * 0.999_999;
            let (sine, cosine) = sine_cosine_of_turns(turns);
            let (s, c) = (turns * std::f64::consts::TAU).sin_cos();
            assert!(
                (sine - s).abs() < 2e-15 && (cosine - c).abs() < 2e-15,
                "turns {turns}"
            );
        }
        let tiny = 1.0 / (1u64 << 53) as f64;
        assert!((natural_log(tiny) - tiny.ln()).abs() < 1e-14);
    }

    #[test]
    fn any_range_gives_the_same_elements() {
        let stream = NormalStream::new(7, "model.norm.weight");
        let mut whole = vec![0.0; 1001];
        stream.fill(0, 0.02, &mut whole);
        for (first, count) in [(0, 1), (1, 1), (1, 2), (500, 501), (999, 2)] {
            let mut part = vec![0.0; count];
            stream.fill(first as u64, 0.02, &mut part);
            assert_eq!(part, whole[first..first + count]);
        }
    }

    #[test]
    fn moments_are_those_of_the_standard_normal() {
        let mut values = vec![0.0f32; 1 << 20];
        NormalStream::new(3, "w").fill(0, 1.0, &mut values);
        let n = values.len() as f64;
        let moment = |power: i32| {
            values
                .iter()
                .map(|v| f64::from(*v).powi(power))
                .sum::<f64>()
                / n
        };
        assert!(moment(1).abs() < 0.004, "{}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.006, "{}", moment(2));
        assert!(moment(3).abs() < 0.016, "{}", moment(3));
        assert!((moment(4) - 3.0).abs() < 0.04, "{}", moment(4));
        let pairs: f64 = values
            .windows(2)
            .map(|w| f64::from(w[0]) * f64::from(w[1]))
            .sum();
        assert!((pairs / n).abs() < 0.004);
    }

    #[test]
    fn seeds_and_names_give_streams_of_their_own() {
        let first = |seed, name| {
            let mut out = [0.0f32; 4];
            NormalStream::new(seed, name).fill(0, 1.0, &mut out);
            out
        };
        assert_ne!(first(1, "a"), first(2, "a"));
        assert_ne!(first(1, "a"), first(1, "b"));
    }

    /// These bits may never change: runs are reproduced from their seed by later releases.
    #[test]
    fn bits_are_stable() {
        let mut out = [0.0f32; 6];
        NormalStream::new(42, "model.embed_tokens.weight").fill(123_456_789_012, 0.02, &mut out);
        let bits: Vec<u32> = out.iter().map(|value| value.to_bits()).collect();
        let expected = [
            0x3ce1_7282,
            0xbd0c_2874,
            0x3bd4_9c2e,
            0xbb16_20ef,
            0xbcb6_aec8,
            0x3be2_51e9,
        ];
        assert_eq!(bits, expected);
    }
}
