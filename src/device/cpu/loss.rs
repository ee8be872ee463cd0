//! Cross entropy and the scalar reductions of the CPU device.
//!
//! - A row of logits is one piece of work: its maximum, its exponentials (summed in f32 over short
//!   pieces, in f64 across them), its loss from the f64 sum.
//! - `squared_norm` sums f64 over pieces of [`NORM_PIECE`] elements, in order.
//!
//! Masked targets do not come here: callers gather the rows that have a loss.

use rayon::prelude::*;

use super::{CpuDevice, View, assert_apart, simd};

/// Elements of a piece of a squared norm.
const NORM_PIECE: usize = 1 << 16;

impl CpuDevice {
    pub(in crate::device) fn cross_entropy(
        &self,
        z: View,
        targets: &[u32],
        scale: f32,
        losses: View,
    ) {
        let columns = row_width(z, targets, losses);
        assert_apart(&[z, losses], &[]);
        let rows = self.output(z).par_chunks_mut(columns);
        rows.zip(targets)
            .zip(self.output(losses))
            .for_each(|((row, target), loss)| {
                let target = *target as usize;
                let max = simd::max(row);
                let chosen = row[target];
                let sum = simd::exp_in_place(row, max);
                *loss = row_loss(max, sum, chosen);
                let factor = (f64::from(scale) / sum) as f32;
                let probability = f64::from(row[target]) / sum;
                simd::scale(row, factor);
                row[target] = ((probability - 1.0) * f64::from(scale)) as f32;
            });
    }

    pub(in crate::device) fn cross_entropy_loss(&self, z: View, targets: &[u32], losses: View) {
        let columns = row_width(z, targets, losses);
        assert_apart(&[losses], &[z]);
        let rows = self.input(z).par_chunks(columns);
        rows.zip(targets)
            .zip(self.output(losses))
            .for_each(|((row, target), loss)| {
                let max = simd::max(row);
                *loss = row_loss(max, simd::exp_sum(row, max), row[*target as usize]);
            });
    }

    pub(in crate::device) fn squared_norm(&self, x: View) -> f64 {
        let pieces = self.input(x).par_chunks(NORM_PIECE);
        let sums: Vec<f64> = pieces.map(simd::squares).collect();
        sums.iter().sum()
    }

    pub(in crate::device) fn sum(&self, x: View) -> f64 {
        self.input(x).iter().map(|v| f64::from(*v)).sum()
    }
}

/// max + ln(sum) − chosen, rounded once.
fn row_loss(max: f32, sum: f64, chosen: f32) -> f32 {
    (f64::from(max) - f64::from(chosen) + sum.ln()) as f32
}

/// Width of a row of logits, with lengths and targets checked.
fn row_width(z: View, targets: &[u32], losses: View) -> usize {
    let rows = targets.len() as u64;
    assert_eq!(losses.count, rows, "losses is [R]");
    if rows == 0 {
        assert_eq!(z.count, 0, "z is [R, V]");
        return 1;
    }
    assert!(z.count > 0 && z.count.is_multiple_of(rows), "z is [R, V]");
    let columns = z.count / rows;
    let largest = targets.iter().max().copied().unwrap_or(0);
    assert!(
        u64::from(largest) < columns,
        "target {largest} of {columns}"
    );
    columns as usize
}
