//! Stochastic rounding of moments to bf16.
//!
//! - A value between two bf16 numbers becomes the upper with the probability that is its share of
//!   the way there, so what is stored is right on average. Nearest rounding is not: a second moment
//!   moves by 1 − beta2 of itself a step, less than half of bf16's spacing, and would stand still
//!   (Gupta et al. 2015, "Deep learning with limited numerical precision"; Zamirai et al. 2020,
//!   "Revisiting bfloat16 training").
//! - The chance is a hash of (seed, step, tile, element): no state, and the same bits however a
//!   tile is cut, placed or resumed.
//! - Where bf16 holds the value exactly, zero included, nothing changes.

use crate::tile::TileId;

/// The chances of one step's update of elements of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounding {
    keys: [u32; 2],
    /// Index of the first element, modulo 2^32.
    first: u32,
}

impl Rounding {
    /// For the update of step `t` of a tile, from its element `first` on.
    pub fn new(seed: u64, t: u64, tile: TileId, first: u64) -> Rounding {
        let place = (u64::from(tile.layer) << 16) | u64::from(tile.part);
        let words = [seed, t, place].map(u64::to_le_bytes);
        let hash = twox_hash::XxHash3_64::oneshot(words.as_flattened());
        Rounding {
            keys: [hash as u32, (hash >> 32) as u32],
            first: first as u32,
        }
    }

    /// From `count` elements later on.
    pub(super) fn skip(self, count: usize) -> Rounding {
        Rounding {
            first: self.first.wrapping_add(count as u32),
            ..self
        }
    }

    /// 32 random bits for the element `index` after the first, 16 for each moment: two rounds of
    /// xor-shift and multiply with the constants of MurmurHash3's finalizer, each round keyed.
    #[inline(always)]
    pub(super) fn bits(self, index: u32) -> u32 {
        let mut x = self.first.wrapping_add(index) ^ self.keys[0];
        x = (x ^ (x >> 16)).wrapping_mul(0x85EB_CA6B) ^ self.keys[1];
        x = (x ^ (x >> 13)).wrapping_mul(0xC2B2_AE35);
        x ^ (x >> 16)
    }
}

/// bf16 bits of a value, the upper neighbour where what bf16 lacks and `chance` carry.
#[inline(always)]
pub(super) fn round(value: f32, chance: u16) -> u16 {
    (value.to_bits().wrapping_add(u32::from(chance)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    const TILE: TileId = TileId { layer: 3, part: 0 };

    #[test]
    fn rounding_is_right_on_average_and_exact_where_bf16_is() {
        let rounding = Rounding::new(1, 2, TILE, 0);
        let count = 1 << 16;
        for (value, low) in [
            (1.0f32, 0u32),
            (-3.0e-7, 0x4000),
            (0.7, 0x8001),
            (5e-41, 0xFFFF),
        ] {
            let bits = (value.to_bits() & 0xFFFF_0000) | low;
            for shift in [0, 16] {
                let rounded = (0..count).map(|i| {
                    u32::from(round(
                        f32::from_bits(bits),
                        (rounding.bits(i) >> shift) as u16,
                    ))
                });
                let upper: u32 = rounded.map(|hi| hi - (bits >> 16)).sum();
                // A share of 2^16 draws: within five standard deviations, none of which is low = 0.
                let share = f64::from(low) / 65536.0;
                let deviation = (share * (1.0 - share) * f64::from(count)).sqrt();
                let off = f64::from(upper) - share * f64::from(count);
                assert!(
                    off.abs() <= 5.0 * deviation,
                    "{value} {low:x}: {off} of {deviation}"
                );
            }
        }
    }

    #[test]
    fn every_part_of_the_key_changes_the_chances() {
        let of = |rounding: Rounding| (0..64).map(|i| rounding.bits(i)).collect::<Vec<_>>();
        let plain = of(Rounding::new(1, 2, TILE, 0));
        let other = TileId { layer: 3, part: 1 };
        for rounding in [
            Rounding::new(2, 2, TILE, 0),
            Rounding::new(1, 3, TILE, 0),
            Rounding::new(1, 2, other, 0),
            Rounding::new(1, 2, TILE, 1 << 20),
        ] {
            assert!(of(rounding).iter().zip(&plain).all(|(a, b)| a != b));
        }
        let later = Rounding::new(1, 2, TILE, 7);
        assert_eq!(of(later)[..57], plain[7..]);
        assert_eq!(later, Rounding::new(1, 2, TILE, 0).skip(7));
    }
}
