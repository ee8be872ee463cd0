//! Which rows share a sequence, and in which order an epoch takes them.
//!
//! - A pure function of row lengths, `seq_len`, packing, and (seed, epoch): the same for ever.
//!   Order: Fisher-Yates from the last row down, with numbers of SplitMix64 started at a mix of
//!   seed and epoch, each narrowed by the high half of a 64×64-bit product.
//! - Packing is first fit in that order: a row goes into the first of the last [`OPEN_MAX`]
//!   sequences that are not full and have room for it, else it begins a new one. Sequences come in
//!   the order of their first row.
//! - Each row is in exactly one sequence, whole.
//!
//! Not here: tokens.

use std::collections::VecDeque;

/// Sequences that are still looked at for a row.
pub const OPEN_MAX: usize = 64;

/// The sequences of an epoch: row indices, grouped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EpochPlan {
    rows: Vec<u32>,
    /// Where each sequence begins in `rows`, and the end.
    starts: Vec<u32>,
}

impl EpochPlan {
    /// Sequences of rows of `lengths` tokens, in the order of `order`, each of at most `seq_len`
    /// tokens where rows are `packed`, else one a row.
    pub fn new(
        order: Vec<u32>,
        lengths: impl Fn(u32) -> u64,
        seq_len: u64,
        packed: bool,
    ) -> EpochPlan {
        let rows_count = u32::try_from(order.len()).expect("Dataset holds at most u32::MAX rows");
        if !packed {
            return EpochPlan {
                rows: order,
                starts: (0..=rows_count).collect(),
            };
        }
        let mut sequence_of = Vec::with_capacity(order.len());
        let mut count = 0u32;
        // (sequence, tokens that still fit), oldest first.
        let mut open: VecDeque<(u32, u64)> = VecDeque::with_capacity(OPEN_MAX + 1);
        for &row in &order {
            let length = lengths(row);
            let found = open.iter().position(|&(_, room)| room >= length);
            let at = found.unwrap_or_else(|| {
                if open.len() == OPEN_MAX {
                    open.pop_front();
                }
                open.push_back((count, seq_len.max(length)));
                count += 1;
                open.len() - 1
            });
            sequence_of.push(open[at].0);
            open[at].1 -= length;
            if open[at].1 == 0 {
                open.remove(at);
            }
        }
        EpochPlan::grouped(&order, &sequence_of, count)
    }

    /// Rows sorted by sequence, in order within each.
    fn grouped(order: &[u32], sequence_of: &[u32], count: u32) -> EpochPlan {
        let mut starts = vec![0u32; count as usize + 1];
        for &sequence in sequence_of {
            starts[sequence as usize + 1] += 1;
        }
        for index in 1..starts.len() {
            starts[index] += starts[index - 1];
        }
        let mut next = starts.clone();
        let mut rows = vec![0; order.len()];
        for (&row, &sequence) in order.iter().zip(sequence_of) {
            rows[next[sequence as usize] as usize] = row;
            next[sequence as usize] += 1;
        }
        EpochPlan { rows, starts }
    }

    /// Sequences of the epoch.
    pub fn sequences(&self) -> u64 {
        self.starts.len() as u64 - 1
    }

    /// Rows of sequence `index`, which is below [`EpochPlan::sequences`].
    pub fn rows(&self, index: u64) -> &[u32] {
        let index = usize::try_from(index).expect("below sequences()");
        &self.rows[self.starts[index] as usize..self.starts[index + 1] as usize]
    }
}

/// Rows 0 to `count` in the order of `epoch`; ascending where they are not `shuffled`.
pub fn epoch_order(count: u32, seed: u64, epoch: u64, shuffled: bool) -> Vec<u32> {
    let mut order: Vec<u32> = (0..count).collect();
    if shuffled {
        let mut state = mix(mix(seed) ^ epoch);
        for last in (1..order.len()).rev() {
            let number = u128::from(next(&mut state)) * (last as u128 + 1);
            let other = usize::try_from(number >> 64).expect("at most `last`");
            order.swap(last, other);
        }
    }
    order
}

/// SplitMix64: a Weyl sequence by the golden ratio, mixed.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mix(*state)
}

/// The finalizer of SplitMix64 (variant 13 of Stafford's).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_what_it_was() {
        // Made by a Python program from the description above.
        assert_eq!(epoch_order(10, 0, 0, true), [4, 9, 2, 5, 1, 7, 6, 0, 3, 8]);
        assert_eq!(epoch_order(10, 0, 1, true), [9, 4, 0, 5, 2, 1, 6, 8, 3, 7]);
        assert_eq!(epoch_order(10, 1, 0, true), [5, 6, 1, 8, 7, 4, 3, 9, 0, 2]);
        assert_eq!(epoch_order(3, 1, 0, false), [0, 1, 2]);
    }

    #[test]
    fn packing_is_first_fit() {
        let lengths = [5u64, 6, 4, 3, 10, 2];
        let plan = EpochPlan::new((0..6).collect(), |row| lengths[row as usize], 10, true);
        let sequences: Vec<&[u32]> = (0..plan.sequences()).map(|at| plan.rows(at)).collect();
        assert_eq!(sequences, [&[0, 2][..], &[1, 3], &[4], &[5]]);
        // The window is bounded: room in the first of 65 open sequences is forgotten.
        let window = EpochPlan::new(
            (0..67).collect(),
            |row| if row < 65 { 6 } else { 4 },
            10,
            true,
        );
        assert_eq!(
            (window.rows(0), window.rows(1), window.rows(2)),
            (&[0][..], &[1, 65][..], &[2, 66][..])
        );
    }
}
