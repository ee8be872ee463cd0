//! Operations of the CPU device that work a row, or an element, at a time.
//!
//! - Pieces are fixed numbers of rows or elements. Sums across rows (norm weights, biases) run in
//!   f32 over [`F32_ROWS`] rows and in f64 across those, piece after piece in order.
//! - Where an operation may run in place, each row is read to the stack or a row buffer before it
//!   is written, so that no element has two references.

use rayon::prelude::*;

use super::simd::{exp, lane_sum, vectorised};
use super::{CpuDevice, PIECE, View, add_to, assert_apart};
use crate::device::ops::SortedTokens;

/// Rows that a sum across rows takes in f32 before it goes to f64.
const F32_ROWS: usize = 32;
/// Most pieces that a sum across rows is cut into; bounds the partial sums' memory.
const PIECES_MAX: usize = 64;
/// Columns of a piece of a sum over all rows.
const COLUMN_PIECE: usize = 64;
/// Rows of a piece of a row-wise operation.
const ROW_PIECE: usize = 16;

impl CpuDevice {
    pub(in crate::device) fn rmsnorm_forward(
        &self,
        x: View,
        w: View,
        y: View,
        inv: View,
        eps: f32,
    ) {
        let columns = w.count as usize;
        assert!(columns > 0, "w is [C], not empty");
        assert_eq!(x.count, inv.count * w.count, "x is [R, C]");
        assert_eq!(y.count, x.count, "y is [R, C]");
        assert_apart(&[y, inv], &[x, w]);
        let w = self.input(w);
        self.output(y)
            .par_chunks_mut(ROW_PIECE * columns)
            .zip(self.input(x).par_chunks(ROW_PIECE * columns))
            .zip(self.output(inv).par_chunks_mut(ROW_PIECE))
            .for_each(|((y, x), inv)| norm_rows(x, w, y, inv, eps));
    }

    #[expect(clippy::too_many_arguments, reason = "an operation's tensors")]
    pub(in crate::device) fn rmsnorm_backward(
        &self,
        x: View,
        w: View,
        inv: View,
        dy: View,
        dx: View,
        dw: View,
        accumulate: bool,
    ) {
        let (rows, columns) = (inv.count as usize, w.count as usize);
        assert!(columns > 0, "w is [C], not empty");
        assert_eq!(dw.count, w.count, "dw is [C]");
        assert_eq!(x.count, inv.count * w.count, "x is [R, C]");
        assert_eq!(
            (dx.count, dy.count),
            (x.count, x.count),
            "dx, dy are [R, C]"
        );
        let in_place = dx == dy && !accumulate;
        assert_apart(&[dx, dw], &[x, w, inv]);
        if in_place {
            assert_apart(&[dw], &[dy]);
        } else {
            assert_apart(&[dx, dw], &[dy]);
        }
        let piece = rows.div_ceil(PIECES_MAX).next_multiple_of(F32_ROWS).max(1);
        let (x, w, inv) = (self.input(x), self.input(w), self.input(inv));
        let dy = (!in_place).then(|| self.input(dy));
        let partial: Vec<Vec<f64>> = self
            .output(dx)
            .par_chunks_mut(piece * columns)
            .enumerate()
            .map(|(index, dx)| {
                let start = index * piece;
                let count = dx.len() / columns;
                let elements = start * columns..(start + count) * columns;
                let inv = &inv[start..start + count];
                let dy = dy.map(|dy| &dy[elements.clone()]);
                norm_gradient(&x[elements], w, inv, dy, dx, accumulate)
            })
            .collect();
        for (column, dw) in self.output(dw).iter_mut().enumerate() {
            let sum: f64 = partial.iter().map(|piece| piece[column]).sum();
            *dw += sum as f32;
        }
    }

    pub(in crate::device) fn rope(
        &self,
        x: View,
        heads: u64,
        head_dim: u64,
        table: View,
        positions: &[u32],
        inverse: bool,
    ) {
        let (heads, dim) = (heads as usize, head_dim as usize);
        assert!(
            heads > 0 && dim > 0 && dim.is_multiple_of(2),
            "heads of even width"
        );
        assert_eq!(
            x.count as usize,
            positions.len() * heads * dim,
            "x is [T, heads, D]"
        );
        assert!(
            table.count.is_multiple_of(head_dim),
            "table is [positions, 2, D/2]"
        );
        let last = positions.iter().max().map_or(0, |p| u64::from(*p) + 1);
        assert!(
            last * head_dim <= table.count,
            "position {last} of the table"
        );
        assert_apart(&[x], &[table]);
        let table = self.input(table);
        self.output(x)
            .par_chunks_mut(ROW_PIECE * heads * dim)
            .zip(positions.par_chunks(ROW_PIECE))
            .for_each(|(x, positions)| {
                for (token, position) in x.chunks_exact_mut(heads * dim).zip(positions) {
                    let at = *position as usize * dim;
                    let (cos, sin) = table[at..at + dim].split_at(dim / 2);
                    rotate(token, cos, sin, inverse);
                }
            });
    }

    pub(in crate::device) fn bias_backward(&self, dy: View, db: View) {
        let columns = db.count as usize;
        assert!(
            columns > 0 && dy.count.is_multiple_of(db.count),
            "dy is [T, N]"
        );
        assert_apart(&[db], &[dy]);
        let dy = self.input(dy);
        self.output(db)
            .par_chunks_mut(COLUMN_PIECE)
            .enumerate()
            .for_each(|(index, db)| sum_columns(dy, columns, index * COLUMN_PIECE, db));
    }

    pub(in crate::device) fn swiglu_forward(&self, g: View, u: View, a: View) {
        assert_eq!((g.count, u.count), (a.count, a.count), "g, u and a are [n]");
        assert_apart(&[a], &[g, u]);
        self.output(a)
            .par_chunks_mut(PIECE)
            .zip(self.input(g).par_chunks(PIECE))
            .zip(self.input(u).par_chunks(PIECE))
            .for_each(|((a, g), u)| swiglu(g, u, a));
    }

    pub(in crate::device) fn swiglu_backward(
        &self,
        g: View,
        u: View,
        da: View,
        dg: View,
        du: View,
    ) {
        assert_eq!(
            (g.count, u.count),
            (da.count, da.count),
            "g, u and da are [n]"
        );
        assert_eq!(
            (dg.count, du.count),
            (da.count, da.count),
            "dg and du are [n]"
        );
        assert_apart(&[dg, du], &[da]);
        for (gradient, other, own) in [(dg, du, g), (du, dg, u)] {
            assert_apart(&[other], &[own]);
            if gradient != own {
                assert_apart(&[gradient], &[own]);
            }
        }
        let apart_g = (dg != g).then(|| self.input(g));
        let apart_u = (du != u).then(|| self.input(u));
        let da = self.input(da);
        self.output(dg)
            .par_chunks_mut(PIECE)
            .zip(self.output(du).par_chunks_mut(PIECE))
            .enumerate()
            .for_each(|(index, (dg, du))| {
                let elements = index * PIECE..index * PIECE + dg.len();
                if let Some(g) = apart_g {
                    dg.copy_from_slice(&g[elements.clone()]);
                }
                if let Some(u) = apart_u {
                    du.copy_from_slice(&u[elements.clone()]);
                }
                swiglu_gradient(&da[elements], dg, du);
            });
    }

    pub(in crate::device) fn gather_rows(&self, x: View, rows: &[u32], out: View, columns: u64) {
        let width = columns as usize;
        assert!(width > 0 && x.count.is_multiple_of(columns), "x is [T, C]");
        assert_eq!(out.count, rows.len() as u64 * columns, "out is [rows, C]");
        assert_apart(&[out], &[x]);
        let x = self.input(x);
        self.output(out)
            .par_chunks_mut(ROW_PIECE * width)
            .zip(rows.par_chunks(ROW_PIECE))
            .for_each(|(out, rows)| {
                for (out, row) in out.chunks_exact_mut(width).zip(rows) {
                    let at = *row as usize * width;
                    out.copy_from_slice(&x[at..at + width]);
                }
            });
    }

    pub(in crate::device) fn scatter_rows(&self, x: View, rows: &[u32], out: View, columns: u64) {
        let width = columns as usize;
        assert!(
            width > 0 && out.count.is_multiple_of(columns),
            "out is [T, C]"
        );
        assert_eq!(x.count, rows.len() as u64 * columns, "x is [rows, C]");
        assert_apart(&[out], &[x]);
        let out = self.output(out);
        let mut seen = vec![false; out.len() / width];
        for (x, row) in self.input(x).chunks_exact(width).zip(rows) {
            let row = *row as usize;
            assert!(!std::mem::replace(&mut seen[row], true), "row {row} twice");
            out[row * width..(row + 1) * width].copy_from_slice(x);
        }
    }

    pub(in crate::device) fn embed_backward(
        &self,
        dy: View,
        order: &SortedTokens,
        dw: View,
        hidden: u64,
    ) {
        let width = hidden as usize;
        assert!(width > 0 && dw.count.is_multiple_of(hidden), "dw is [V, H]");
        assert_eq!(
            dy.count,
            order.positions.len() as u64 * hidden,
            "dy is [T, H]"
        );
        assert_eq!(
            order.starts.len(),
            order.ids.len() + 1,
            "a start an id, and the end"
        );
        let covered = (order.starts.first(), order.starts.last());
        let end = order.positions.len() as u32;
        assert_eq!(
            covered,
            (Some(&0), Some(&end)),
            "starts cover the positions"
        );
        assert_apart(&[dw], &[dy]);
        let dy = self.input(dy);
        let mut rest = self.output(dw);
        let mut next = 0;
        let mut rows = Vec::with_capacity(order.ids.len());
        for (id, ends) in order.ids.iter().zip(order.starts.windows(2)) {
            let id = *id as usize;
            assert!(id >= next, "ids ascend: {id} after {next}");
            let (row, after) = rest[(id - next) * width..].split_at_mut(width);
            (rest, next) = (after, id + 1);
            rows.push((row, &order.positions[ends[0] as usize..ends[1] as usize]));
        }
        rows.into_par_iter()
            .with_min_len(ROW_PIECE)
            .for_each(|(row, positions)| {
                let mut sum = vec![0.0f32; width];
                for position in positions {
                    let at = *position as usize * width;
                    add_to(&mut sum, &dy[at..at + width]);
                }
                add_to(row, &sum);
            });
    }
}

vectorised! {
    fn norm_rows(x: &[f32], w: &[f32], y: &mut [f32], inv: &mut [f32], eps: f32) {
        let columns = w.len();
        let rows = x.chunks_exact(columns).zip(y.chunks_exact_mut(columns));
        for ((x, y), inv) in rows.zip(inv) {
            let mean = lane_sum(columns, |i| x[i] * x[i]) / columns as f64;
            *inv = (1.0 / (mean + f64::from(eps)).sqrt()) as f32;
            for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
                *y = *x * *inv * *w;
            }
        }
    }
}

vectorised! {
    /// dx of some rows, and their Σ dy·x̂; dy is what dx holds where it is none.
    fn norm_gradient(
        x: &[f32],
        w: &[f32],
        inv: &[f32],
        dy: Option<&[f32]>,
        dx: &mut [f32],
        accumulate: bool,
    ) -> Vec<f64> {
        let columns = w.len();
        let mut total = vec![0.0f64; columns];
        let mut partial = vec![0.0f32; columns];
        let mut held = vec![0.0f32; columns];
        for (row, dx) in dx.chunks_exact_mut(columns).enumerate() {
            let elements = row * columns..(row + 1) * columns;
            let (x, inv) = (&x[elements.clone()], inv[row]);
            held.copy_from_slice(dy.map_or(&*dx, |dy| &dy[elements]));
            let dy = &held[..columns];
            let mean = lane_sum(columns, |i| dy[i] * w[i] * x[i]) / columns as f64;
            // inv·(dy·w − x·inv·mean·inv): the two factors that a row shares are made once.
            let pull = (mean * f64::from(inv) * f64::from(inv)) as f32;
            for (((p, dy), x), _) in partial.iter_mut().zip(dy).zip(x).zip(w) {
                *p += *dy * (*x * inv);
            }
            for (((dx, dy), x), w) in dx.iter_mut().zip(dy).zip(x).zip(w) {
                let gradient = inv * (*dy * *w - *x * pull);
                *dx = if accumulate { *dx + gradient } else { gradient };
            }
            if (row + 1).is_multiple_of(F32_ROWS) {
                flush(&mut partial, &mut total);
            }
        }
        flush(&mut partial, &mut total);
        total
    }
}

/// total += partial; partial = 0.
#[inline(always)]
fn flush(partial: &mut [f32], total: &mut [f64]) {
    for (total, partial) in total.iter_mut().zip(partial) {
        *total += f64::from(*partial);
        *partial = 0.0;
    }
}

vectorised! {
    /// sums += Σ over rows of columns `first..first + sums.len()`.
    fn sum_columns(x: &[f32], columns: usize, first: usize, sums: &mut [f32]) {
        let count = sums.len();
        let (mut partial, mut total) = ([0.0f32; COLUMN_PIECE], [0.0f64; COLUMN_PIECE]);
        for (row, x) in x.chunks_exact(columns).enumerate() {
            for (partial, x) in partial.iter_mut().zip(&x[first..first + count]) {
                *partial += *x;
            }
            if (row + 1).is_multiple_of(F32_ROWS) {
                flush(&mut partial, &mut total);
            }
        }
        flush(&mut partial, &mut total);
        for (sum, total) in sums.iter_mut().zip(total) {
            *sum += total as f32;
        }
    }
}

vectorised! {
    fn rotate(token: &mut [f32], cos: &[f32], sin: &[f32], inverse: bool) {
        let half = cos.len();
        let sign = if inverse { -1.0 } else { 1.0 };
        for head in token.chunks_exact_mut(2 * half) {
            let (a, b) = head.split_at_mut(half);
            for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                let sin = sign * *sin;
                (*a, *b) = (*a * *cos - *b * sin, *b * *cos + *a * sin);
            }
        }
    }
}

vectorised! {
    fn swiglu(g: &[f32], u: &[f32], a: &mut [f32]) {
        for ((a, g), u) in a.iter_mut().zip(g).zip(u) {
            *a = *g / (1.0 + exp(-*g)) * *u;
        }
    }
}

vectorised! {
    /// dg holds g and du holds u on entry.
    fn swiglu_gradient(da: &[f32], dg: &mut [f32], du: &mut [f32]) {
        for ((da, dg), du) in da.iter().zip(dg).zip(du) {
            let (g, u) = (*dg, *du);
            let gate = 1.0 / (1.0 + exp(-g));
            *dg = *da * u * (gate * (1.0 + g * (1.0 - gate)));
            *du = *da * (g * gate);
        }
    }
}
