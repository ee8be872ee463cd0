//! Which rows an epoch takes where sources have weights, and which are held out.
//!
//! - Weights are shares of an epoch's rows. An epoch ends where the first source was seen once: it
//!   takes `share × min(rows / share)` rows of each source, at least one. The others go on in the
//!   next epoch where they stopped, each through all its rows before one comes again.
//! - Like `packing`, all of it is a pure function of the rows' numbers, the weights and (seed,
//!   epoch), so that a cursor is all that a resumed run needs.

use std::ops::Range;

use super::packing;
use crate::error::{Error, Result};

/// A source's rows in use.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Group {
    pub(super) name: String,
    pub(super) rows: Range<u32>,
    /// Above 0; what they add up to does not matter.
    pub(super) weight: f64,
}

/// Numbers that keep the orders of sources and of the split apart from an epoch's.
const SOURCE_SALT: u64 = 0x5bd1_e995_9d1b_54a5;
const SPLIT_SALT: u64 = 0x2545_f491_4f6c_dd1d;

/// Rows that an epoch takes of each group.
pub(super) fn rows_of_groups(groups: &[Group], mixed: bool) -> Vec<u64> {
    let counts = groups.iter().map(|group| group.rows.len() as u64);
    if !mixed {
        return counts.collect();
    }
    let epoch = groups
        .iter()
        .map(|group| group.rows.len() as f64 / group.weight);
    let epoch = epoch.fold(f64::INFINITY, f64::min);
    let taken = |(group, count): (&Group, u64)| {
        // Positive and at most the count, but for the rounding of the two divisions.
        ((group.weight * epoch).round() as u64).clamp(1, count)
    };
    groups.iter().zip(counts).map(taken).collect()
}

/// Rows of `epoch` in its order. Each group has a row.
pub(super) fn epoch_order(groups: &[Group], seed: u64, epoch: u64, shuffled: bool) -> Vec<u32> {
    // (place in the unshuffled epoch as a fraction, group), for an even mixture.
    let mut places: Vec<(f64, usize, u32)> = Vec::new();
    let counts = rows_of_groups(groups, true);
    for (index, (group, &count)) in groups.iter().zip(&counts).enumerate() {
        let own = u32::try_from(group.rows.len()).expect("a range of u32");
        let salt = SOURCE_SALT.wrapping_mul(index as u64 + 1);
        let order = |pass| packing::epoch_order(own, seed ^ salt, pass, shuffled);
        let first = u128::from(epoch) * u128::from(count);
        let pass = u64::try_from(first / u128::from(own)).unwrap_or(u64::MAX);
        let at = usize::try_from(first % u128::from(own)).expect("below a u32");
        let mut taken: Vec<u32> = order(pass).split_off(at);
        let count = usize::try_from(count).expect("at most the group's rows");
        if taken.len() < count {
            taken.extend(order(pass.wrapping_add(1)));
        }
        taken.truncate(count);
        for (place, row) in taken.into_iter().enumerate() {
            let fraction = (place as f64 + 0.5) / count as f64;
            places.push((fraction, index, group.rows.start + row));
        }
    }
    places.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let rows: Vec<u32> = places.into_iter().map(|(.., row)| row).collect();
    let total = u32::try_from(rows.len()).expect("at most all rows");
    let order = packing::epoch_order(total, seed, epoch, shuffled);
    order.into_iter().map(|at| rows[at as usize]).collect()
}

type Part = (Vec<u32>, Vec<Group>);

/// Training and evaluation rows with their groups: `amount` of each group is held out, a share
/// below 1 or a count.
pub(super) fn split(groups: &[Group], amount: f64, seed: u64) -> Result<(Part, Part)> {
    let (mut train, mut eval): (Part, Part) = Default::default();
    for group in groups {
        let count = u32::try_from(group.rows.len()).expect("a range of u32");
        let held_out = match amount {
            share if share < 1.0 => ((f64::from(count) * share).round() as u32).max(1),
            whole => whole as u32,
        };
        if held_out >= count {
            return Err(Error::input(
                "run.toml",
                format!("data.eval_split of {}", group.name),
                format!("fewer than its {count} rows"),
                held_out.to_string(),
                "hold out fewer, or name files in data.eval",
            ));
        }
        let order = packing::epoch_order(count, seed ^ SPLIT_SALT, 0, true);
        let mut is_held_out = vec![false; count as usize];
        for &row in &order[..held_out as usize] {
            is_held_out[row as usize] = true;
        }
        for (part, wanted) in [(&mut train, false), (&mut eval, true)] {
            let start = u32::try_from(part.0.len()).expect("a part of all rows");
            let rows = group.rows.clone().zip(&is_held_out);
            part.0.extend(
                rows.filter(|(_, held)| **held == wanted)
                    .map(|(row, _)| row),
            );
            let end = u32::try_from(part.0.len()).expect("a part of all rows");
            part.1.push(Group {
                rows: start..end,
                ..group.clone()
            });
        }
    }
    Ok((train, eval))
}
