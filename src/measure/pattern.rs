//! What is in the blocks that a benchmark writes, and in which order they are met.
//!
//! - Contents are pseudo-random, so that no layer below compresses them or stores holes.
//! - Under `verify` a block begins with a header: where it belongs, whose it is, how often it was
//!   written, and the xxh3-128 of all after that. A read compares each: flipped, misdirected and
//!   stale bytes are told apart.
//! - A random order is a permutation made by arithmetic: no map in memory, every block once a pass.

use crate::store::checksum;

/// `terraceb` as bytes.
const MAGIC: [u8; 8] = *b"terraceb";
/// Magic, seed, offset, sequence, bytes, zero, checksum.
pub(super) const HEADER_BYTES: usize = 56;
const SUM_AT: usize = 40;

/// Numbers that look random; the same seed gives the same ones.
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(mix(seed ^ 0x9E37_79B9_7F4A_7C15))
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// Below `bound`, which is at least 1.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Fills memory with pseudo-random words.
pub(super) fn fill(words: &mut [u32], seed: u64) {
    let mut random = Random::new(seed);
    for pair in words.chunks_mut(2) {
        let value = random.next();
        pair[0] = value as u32;
        if let Some(second) = pair.get_mut(1) {
            *second = (value >> 32) as u32;
        }
    }
}

/// What a block's header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Of the file, from its mark.
    pub(super) seed: u64,
    /// Of the block in the file.
    pub(super) offset: u64,
    /// Writes of the block so far, its first filling included.
    pub(super) sequence: u64,
}

/// Writes the header and the checksum into a block.
pub(super) fn seal(block: &mut [u8], header: Header) {
    let bytes = block.len() as u64;
    block[..8].copy_from_slice(&MAGIC);
    for (at, value) in [
        (8, header.seed),
        (16, header.offset),
        (24, header.sequence),
        (32, bytes),
    ] {
        block[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
    let sum = sum(block);
    block[SUM_AT..HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
}

/// Of the fields and of all after the header: the checksum's own bytes are left out.
fn sum(block: &[u8]) -> u128 {
    let fields = checksum(&block[..SUM_AT]);
    checksum(&block[HEADER_BYTES..]) ^ fields.rotate_left(1)
}

/// How a block that was read differs from what was written: expected and got.
pub(super) fn compare(block: &[u8], want: Header, exact: bool) -> Result<(), (String, String)> {
    let field = |at: usize| {
        let bytes: [u8; 8] = block[at..at + 8].try_into().expect("eight bytes");
        u64::from_le_bytes(bytes)
    };
    let stored: [u8; 16] = block[SUM_AT..HEADER_BYTES]
        .try_into()
        .expect("sixteen bytes");
    let (stored, got) = (u128::from_le_bytes(stored), sum(block));
    if block[..8] != MAGIC {
        return Err((
            "the header of a block".into(),
            format!("{:02x?}", &block[..8]),
        ));
    }
    if stored != got {
        return Err((format!("checksum {stored:032x}"), format!("{got:032x}")));
    }
    for (name, at, want) in [
        ("seed", 8, want.seed),
        ("offset", 16, want.offset),
        ("bytes", 32, block.len() as u64),
    ] {
        if field(at) != want {
            return Err((format!("{name} {want}"), field(at).to_string()));
        }
    }
    if exact && field(24) != want.sequence {
        let expected = format!("write {} of the block", want.sequence);
        return Err((expected, format!("write {}, a stale one", field(24))));
    }
    Ok(())
}

/// A permutation of `0..count`.
#[derive(Clone, Debug)]
pub(super) struct Permutation {
    count: u64,
    half_bits: u32,
    keys: [u64; 4],
}

impl Permutation {
    pub(super) fn new(count: u64, seed: u64) -> Permutation {
        let mut random = Random::new(seed);
        let bits = (64 - count.saturating_sub(1).leading_zeros()).max(2);
        Permutation {
            count,
            half_bits: bits.div_ceil(2),
            keys: std::array::from_fn(|_| random.next()),
        }
    }

    /// Where `index` goes. Four rounds of a Feistel network permute the next power of four; what
    /// falls outside is sent round again, at most four times on average.
    pub(super) fn of(&self, index: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let mut value = index;
        loop {
            let (mut left, mut right) = (value >> self.half_bits, value & mask);
            for key in self.keys {
                (left, right) = (right, left ^ (mix(right ^ key) & mask));
            }
            value = (left << self.half_bits) | right;
            if value < self.count {
                return value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permutation_meets_every_block_once() {
        for count in [1, 2, 3, 5, 64, 1000, 4097] {
            let order = Permutation::new(count, 7);
            let mut met = vec![false; count as usize];
            for index in 0..count {
                let at = order.of(index) as usize;
                assert!(
                    !std::mem::replace(&mut met[at], true),
                    "{count}: {at} twice"
                );
            }
        }
        let order = Permutation::new(1000, 7);
        let ascending = (1..1000).filter(|i| order.of(*i) > order.of(i - 1)).count();
        assert!((400..600).contains(&ascending), "{ascending}");
    }

    #[test]
    fn every_flipped_bit_and_every_wrong_place_is_told() {
        let mut block = vec![0u8; 4096];
        for (index, byte) in block.iter_mut().enumerate() {
            *byte = index as u8;
        }
        let header = Header {
            seed: 3,
            offset: 8192,
            sequence: 2,
        };
        seal(&mut block, header);
        assert_eq!(compare(&block, header, true), Ok(()));
        for bit in (0..4096 * 8).step_by(37).chain(0..HEADER_BYTES * 8) {
            block[bit / 8] ^= 1 << (bit % 8);
            assert!(compare(&block, header, true).is_err(), "bit {bit}");
            block[bit / 8] ^= 1 << (bit % 8);
        }
        for wrong in [
            Header { seed: 4, ..header },
            Header {
                offset: 4096,
                ..header
            },
            Header {
                sequence: 3,
                ..header
            },
        ] {
            assert!(compare(&block, wrong, true).is_err(), "{wrong:?}");
        }
        let newer = Header {
            sequence: 3,
            ..header
        };
        assert_eq!(compare(&block, newer, false), Ok(()));
    }
}
