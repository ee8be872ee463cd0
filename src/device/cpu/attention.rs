//! Causal attention of the CPU device, forward and backward, without a score matrix in memory.
//!
//! - A unit of work is a packed sequence's block of queries under one key-value head: the query
//!   heads of its group are the rows of one small product. Keys come in blocks of [`KEY_BLOCK`].
//! - Key ranges that no query of the unit sees are never visited; within a block the mask is an
//!   index range a row: key j is seen by query i iff i − window < j ≤ i.
//! - Backward recomputes probabilities from lse. dk and dv of a key block are sums over the query
//!   blocks that see it, always taken from the last query block to the first: a unit waits for its
//!   neighbour above to have added to a key block before it does (see [`Chain`]).
//! - Scratch is a vector a thread, at most [`scratch_elements`] of the largest shape met: 2 score
//!   blocks of 256 rows (more only for groups above 32) and five row sets, 1.2 MiB at D = 128.
//!
//! Block sizes depend on the head counts alone: the bits are the same for any number of threads.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use rayon::prelude::*;

use super::gemm::{Matrix, Output, Size, multiply};
use super::{CpuDevice, View, assert_apart, simd};
use crate::device::ops::AttentionShape;

/// Keys of a block of scores.
const KEY_BLOCK: usize = 256;
/// Rows (queries times heads of a group) that a block of scores is to have.
const ROWS_WANTED: usize = 256;

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// A block of queries of one packed sequence under one key-value head.
#[derive(Clone, Copy)]
struct Unit {
    /// First token of the sequence.
    start: usize,
    /// First query, counted from `start`.
    query: usize,
    /// Queries.
    count: usize,
    /// Key-value head.
    kv_head: usize,
    /// Index of the unit that adds to the same dk and dv before this one, if there is one.
    before: Option<usize>,
}

/// Sizes of a call, as indices.
#[derive(Clone, Copy)]
struct Geometry {
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    group: usize,
    dim: usize,
    window: usize,
    scale: f32,
}

impl Geometry {
    fn new(shape: &AttentionShape<'_>, q: View, k: View) -> Geometry {
        let (heads, kv_heads) = (shape.heads as usize, shape.kv_heads as usize);
        let dim = shape.head_dim as usize;
        assert!(
            dim > 0 && kv_heads > 0 && heads > 0,
            "attention without heads"
        );
        assert!(
            heads.is_multiple_of(kv_heads),
            "{heads} heads of {kv_heads} groups"
        );
        assert!(shape.window != Some(0), "a query sees at least itself");
        let last = shape.bounds.last().copied().expect("bounds end with T");
        assert_eq!(shape.bounds[0], 0, "bounds start with 0");
        assert!(shape.bounds.is_sorted(), "bounds ascend");
        let tokens = last as usize;
        assert_eq!(q.count as usize, tokens * heads * dim, "q is [T, heads, D]");
        assert_eq!(
            k.count as usize,
            tokens * kv_heads * dim,
            "k is [T, kv_heads, D]"
        );
        Geometry {
            tokens,
            heads,
            kv_heads,
            group: heads / kv_heads,
            dim,
            window: shape
                .window
                .map_or(usize::MAX, |w| usize::try_from(w).unwrap_or(usize::MAX)),
            scale: (1.0 / (dim as f64).sqrt()) as f32,
        }
    }

    /// Queries of a unit: a power of two, about [`ROWS_WANTED`] rows, at least 8.
    fn queries(self) -> usize {
        let wanted = (ROWS_WANTED / self.group).max(8);
        (1 << wanted.ilog2()).min(128)
    }

    /// All units: sequences in order, in each the last queries first (they cost most), heads
    /// within.
    fn units(self, bounds: &[u32]) -> Vec<Unit> {
        let block = self.queries();
        let mut units = Vec::new();
        for ends in bounds.windows(2) {
            let (start, length) = (ends[0] as usize, (ends[1] - ends[0]) as usize);
            for index in (0..length.div_ceil(block)).rev() {
                for kv_head in 0..self.kv_heads {
                    let query = index * block;
                    let last = query + block >= length;
                    units.push(Unit {
                        start,
                        query,
                        count: block.min(length - query),
                        kv_head,
                        before: (!last).then(|| units.len() - self.kv_heads),
                    });
                }
            }
        }
        units
    }

    /// First key that query `query` of a sequence sees.
    fn first_key(self, query: usize) -> usize {
        (query + 1).saturating_sub(self.window)
    }

    /// Keys of the block `keys` that `query` sees, counted from the block's first.
    fn seen(self, query: usize, keys: &std::ops::Range<usize>) -> std::ops::Range<usize> {
        let end = keys.end.min(query + 1);
        let start = self.first_key(query).max(keys.start).min(end);
        start - keys.start.min(start)..end.saturating_sub(keys.start)
    }

    /// Key blocks of a unit: index of the first, and one after the last.
    fn key_blocks(self, unit: Unit) -> std::ops::Range<usize> {
        let end = unit.query + unit.count;
        self.first_key(unit.query) / KEY_BLOCK..end.div_ceil(KEY_BLOCK)
    }

    /// Keys of block `block` that some query of the unit may see.
    fn keys(self, unit: Unit, block: usize) -> std::ops::Range<usize> {
        let first = self.first_key(unit.query).max(block * KEY_BLOCK);
        first..(unit.query + unit.count).min((block + 1) * KEY_BLOCK)
    }

    /// Offset of a unit's queries in q, o or their gradients; a query is `group · dim` elements.
    fn query_offset(self, unit: Unit, query: usize) -> usize {
        let token = unit.start + unit.query + query;
        (token * self.heads + unit.kv_head * self.group) * self.dim
    }

    /// Offset of a key in k, v or their gradients.
    fn key_offset(self, unit: Unit, key: usize) -> usize {
        ((unit.start + key) * self.kv_heads + unit.kv_head) * self.dim
    }

    fn key_row(self) -> usize {
        self.kv_heads * self.dim
    }
}

/// f32 elements of scratch that a thread needs for a shape.
fn scratch_elements(geometry: Geometry) -> usize {
    let rows = geometry.queries() * geometry.group;
    2 * rows * KEY_BLOCK + 3 * rows * geometry.dim + 2 * rows
}

/// Runs `work` with this thread's scratch for the shape; its content is whatever was left there.
fn with_scratch(geometry: Geometry, work: impl FnOnce(&mut [f32])) {
    let needed = scratch_elements(geometry);
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < needed {
            scratch.resize(needed, 0.0);
        }
        work(&mut scratch[..needed]);
    });
}

/// An array that units write in parts of their own, or in turn.
#[derive(Clone, Copy)]
struct Shared(*mut f32, usize);

// SAFETY: units write disjoint parts, or the same part one after another by `Chain`.
unsafe impl Send for Shared {}
// SAFETY: as for Send.
unsafe impl Sync for Shared {}

impl Shared {
    /// # Safety
    /// No other reference to the range exists until this one ends.
    unsafe fn part<'a>(self, start: usize, count: usize) -> &'a mut [f32] {
        assert!(start + count <= self.1);
        // SAFETY: in bounds as asserted; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), count) }
    }
}

/// Order in which units add to dk and dv.
///
/// Units are claimed in the order of their list, so the unit before is always running or done when
/// one waits for it: some thread can always go on. Each publishes the next key block that it has
/// yet to add; who comes after adds to a block once that number is past it.
struct Chain {
    claimed: AtomicUsize,
    next_block: Vec<AtomicU32>,
}

impl Chain {
    fn new(units: usize) -> Chain {
        Chain {
            claimed: AtomicUsize::new(0),
            next_block: (0..units).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    fn claim(&self) -> usize {
        self.claimed.fetch_add(1, Ordering::Relaxed)
    }

    /// Waits until the unit before has added to `block`.
    fn wait(&self, before: Option<usize>, block: usize) {
        let Some(before) = before else { return };
        let mut spins = 0u32;
        while self.next_block[before].load(Ordering::Acquire) as usize <= block {
            spins += 1;
            if spins < 1000 {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }

    fn added(&self, unit: usize, block: usize) {
        self.next_block[unit].store(block as u32 + 1, Ordering::Release);
    }
}

/// Marks a unit as done even if it panics, so that no other waits for ever.
struct Done<'a>(&'a AtomicU32);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(u32::MAX, Ordering::Release);
    }
}

impl CpuDevice {
    pub(in crate::device) fn attention_forward(
        &self,
        q: View,
        k: View,
        v: View,
        o: View,
        lse: View,
        shape: AttentionShape<'_>,
    ) {
        let geometry = Geometry::new(&shape, q, k);
        assert_eq!(
            (v.count, o.count),
            (k.count, q.count),
            "v is as k, o is as q"
        );
        assert_eq!(
            lse.count as usize,
            geometry.heads * geometry.tokens,
            "lse is [heads, T]"
        );
        assert_apart(&[o, lse], &[q, k, v]);
        let (q, k, v) = (self.input(q), self.input(k), self.input(v));
        let o = Shared(self.at_f32(o), o.count as usize);
        let lse = Shared(self.at_f32(lse), lse.count as usize);
        let units = geometry.units(shape.bounds);
        units.par_iter().with_max_len(1).for_each(|unit| {
            with_scratch(geometry, |scratch| {
                forward_unit(geometry, *unit, [q, k, v], o, lse, scratch);
            });
        });
    }

    #[expect(clippy::too_many_arguments, reason = "an operation's tensors")]
    pub(in crate::device) fn attention_backward(
        &self,
        q: View,
        k: View,
        v: View,
        o: View,
        lse: View,
        do_: View,
        dq: View,
        dk: View,
        dv: View,
        shape: AttentionShape<'_>,
    ) {
        let geometry = Geometry::new(&shape, q, k);
        assert_eq!(
            (v.count, o.count),
            (k.count, q.count),
            "v is as k, o is as q"
        );
        assert_eq!(
            (dq.count, do_.count),
            (q.count, q.count),
            "dq and do are as q"
        );
        assert_eq!(
            (dk.count, dv.count),
            (k.count, k.count),
            "dk and dv are as k"
        );
        assert_eq!(
            lse.count as usize,
            geometry.heads * geometry.tokens,
            "lse is [heads, T]"
        );
        assert_apart(&[dq, dk, dv], &[q, k, v, o, lse, do_]);
        self.fill(dk, 0.0);
        self.fill(dv, 0.0);
        let inputs = Inputs {
            q: self.input(q),
            k: self.input(k),
            v: self.input(v),
            o: self.input(o),
            lse: self.input(lse),
            do_: self.input(do_),
        };
        let outputs = [dq, dk, dv].map(|x| Shared(self.at_f32(x), x.count as usize));
        let units = geometry.units(shape.bounds);
        let chain = Chain::new(units.len());
        (0..units.len())
            .into_par_iter()
            .with_max_len(1)
            .for_each(|_| {
                let index = chain.claim();
                let _done = Done(&chain.next_block[index]);
                with_scratch(geometry, |scratch| {
                    backward_unit(geometry, &units, index, &inputs, outputs, &chain, scratch);
                });
            });
    }
}

/// out\[rows, keys\] = a\[rows, D\]·b\[keys, D\]ᵀ with `KEY_BLOCK` elements from a row to the next.
fn scores(geometry: Geometry, rows: usize, a: &[f32], b: &[f32], keys: usize, out: &mut [f32]) {
    let size = Size {
        rows,
        columns: keys,
        inner: geometry.dim,
    };
    assert!(a.len() >= rows * geometry.dim && out.len() >= rows * KEY_BLOCK && keys <= KEY_BLOCK);
    assert!(b.len() >= (keys - 1) * geometry.key_row() + geometry.dim);
    let a = Matrix::rows(a.as_ptr(), geometry.dim);
    let b = Matrix::rows(b.as_ptr(), geometry.key_row()).transposed();
    let out = Output {
        at: out.as_mut_ptr(),
        row: KEY_BLOCK,
    };
    // SAFETY: lengths asserted above; out is a unique reference.
    unsafe { multiply(size, a, b, out, false) };
}

/// out\[rows, D\] += p\[rows, keys\]·b\[keys, D\].
fn weigh(geometry: Geometry, rows: usize, p: &[f32], b: &[f32], keys: usize, out: &mut [f32]) {
    let size = Size {
        rows,
        columns: geometry.dim,
        inner: keys,
    };
    assert!(p.len() >= rows * KEY_BLOCK && keys <= KEY_BLOCK && out.len() >= rows * geometry.dim);
    assert!(b.len() >= (keys - 1) * geometry.key_row() + geometry.dim);
    let p = Matrix::rows(p.as_ptr(), KEY_BLOCK);
    let b = Matrix::rows(b.as_ptr(), geometry.key_row());
    let out = Output {
        at: out.as_mut_ptr(),
        row: geometry.dim,
    };
    // SAFETY: lengths asserted above; out is a unique reference.
    unsafe { multiply(size, p, b, out, true) };
}

/// out\[keys, D\] += p\[rows, keys\]ᵀ·a\[rows, D\], out within a gradient of keys or values.
///
/// # Safety
/// No other thread touches these keys of this head.
unsafe fn gather_keys(
    geometry: Geometry,
    rows: usize,
    p: &[f32],
    a: &[f32],
    keys: usize,
    (out, offset): (Shared, usize),
) {
    let size = Size {
        rows: keys,
        columns: geometry.dim,
        inner: rows,
    };
    assert!(p.len() >= rows * KEY_BLOCK && keys <= KEY_BLOCK && a.len() >= rows * geometry.dim);
    assert!(offset + (keys - 1) * geometry.key_row() + geometry.dim <= out.1);
    let p = Matrix::rows(p.as_ptr(), KEY_BLOCK).transposed();
    let a = Matrix::rows(a.as_ptr(), geometry.dim);
    let out = Output {
        at: out.0.wrapping_add(offset),
        row: geometry.key_row(),
    };
    // SAFETY: lengths asserted above; exclusive by the caller's promise.
    unsafe { multiply(size, p, a, out, true) };
}

/// Softmax in one pass over key blocks: a running maximum and sum a row, the weighted values
/// rescaled whenever the maximum grows.
fn forward_unit(
    geometry: Geometry,
    unit: Unit,
    [q, k, v]: [&[f32]; 3],
    o: Shared,
    lse: Shared,
    scratch: &mut [f32],
) {
    let (dim, group) = (geometry.dim, geometry.group);
    let rows = unit.count * group;
    let (p, rest) = scratch.split_at_mut(rows * KEY_BLOCK);
    let (queries, rest) = rest.split_at_mut(rows * dim);
    let (weighted, rest) = rest.split_at_mut(rows * dim);
    let (max, rest) = rest.split_at_mut(rows);
    let sum = &mut rest[..rows];
    for (query, scaled) in queries.chunks_exact_mut(group * dim).enumerate() {
        let at = geometry.query_offset(unit, query);
        simd::scaled(&q[at..at + group * dim], geometry.scale, scaled);
    }
    weighted.fill(0.0);
    max.fill(f32::NEG_INFINITY);
    sum.fill(0.0);
    for block in geometry.key_blocks(unit) {
        let keys = geometry.keys(unit, block);
        let at = geometry.key_offset(unit, keys.start);
        scores(geometry, rows, queries, &k[at..], keys.len(), p);
        for row in 0..rows {
            let seen = geometry.seen(unit.query + row / group, &keys);
            let p = &mut p[row * KEY_BLOCK..][..keys.len()];
            p[..seen.start].fill(0.0);
            p[seen.end..].fill(0.0);
            if seen.is_empty() {
                continue;
            }
            let p = &mut p[seen];
            let largest = simd::max(p).max(max[row]);
            if largest > max[row] && sum[row] != 0.0 {
                let shrink = simd::exp(max[row] - largest);
                sum[row] *= shrink;
                simd::scale(&mut weighted[row * dim..][..dim], shrink);
            }
            max[row] = largest;
            sum[row] += simd::exp_in_place(p, largest) as f32;
        }
        weigh(geometry, rows, p, &v[at..], keys.len(), weighted);
    }
    for row in 0..rows {
        let (query, head) = (row / group, row % group);
        let at = geometry.query_offset(unit, query) + head * dim;
        // SAFETY: this unit alone writes the outputs of its queries and heads.
        let out = unsafe { o.part(at, dim) };
        simd::scaled(&weighted[row * dim..][..dim], 1.0 / sum[row], out);
        let head = unit.kv_head * group + head;
        let token = unit.start + unit.query + query;
        // SAFETY: as above.
        let out = unsafe { lse.part(head * geometry.tokens + token, 1) };
        out[0] = (f64::from(max[row]) + f64::from(sum[row]).ln()) as f32;
    }
}

/// What backward reads.
struct Inputs<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    o: &'a [f32],
    lse: &'a [f32],
    do_: &'a [f32],
}

/// One unit of backward; `outputs` are dq, dk, dv.
fn backward_unit(
    geometry: Geometry,
    units: &[Unit],
    index: usize,
    x: &Inputs<'_>,
    [dq, dk, dv]: [Shared; 3],
    chain: &Chain,
    scratch: &mut [f32],
) {
    let unit = units[index];
    let (dim, group) = (geometry.dim, geometry.group);
    let rows = unit.count * group;
    let (p, rest) = scratch.split_at_mut(rows * KEY_BLOCK);
    let (ds, rest) = rest.split_at_mut(rows * KEY_BLOCK);
    let (queries, rest) = rest.split_at_mut(rows * dim);
    let (dout, rest) = rest.split_at_mut(rows * dim);
    let (dqueries, rest) = rest.split_at_mut(rows * dim);
    let (delta, rest) = rest.split_at_mut(rows);
    let lse = &mut rest[..rows];
    for query in 0..unit.count {
        let at = geometry.query_offset(unit, query);
        let part = query * group * dim..(query + 1) * group * dim;
        let width = part.len();
        simd::scaled(
            &x.q[at..at + width],
            geometry.scale,
            &mut queries[part.clone()],
        );
        dout[part].copy_from_slice(&x.do_[at..at + width]);
        for head in 0..group {
            let (row, at) = (query * group + head, at + head * dim);
            delta[row] = simd::dot(&x.do_[at..at + dim], &x.o[at..at + dim]) as f32;
            let token = unit.start + unit.query + query;
            lse[row] = x.lse[(unit.kv_head * group + head) * geometry.tokens + token];
        }
    }
    dqueries.fill(0.0);
    for block in geometry.key_blocks(unit) {
        let keys = geometry.keys(unit, block);
        let count = keys.len();
        let at = geometry.key_offset(unit, keys.start);
        scores(geometry, rows, queries, &x.k[at..], count, p);
        scores(geometry, rows, dout, &x.v[at..], count, ds);
        for row in 0..rows {
            let seen = geometry.seen(unit.query + row / group, &keys);
            let p = &mut p[row * KEY_BLOCK..][..count];
            let ds = &mut ds[row * KEY_BLOCK..][..count];
            score_gradient(p, ds, seen, lse[row], delta[row]);
        }
        weigh(geometry, rows, ds, &x.k[at..], count, dqueries);
        chain.wait(unit.before, block);
        // SAFETY: units of other heads touch other elements; those of this head take turns.
        unsafe { gather_keys(geometry, rows, p, dout, count, (dv, at)) };
        // SAFETY: as above.
        unsafe { gather_keys(geometry, rows, ds, queries, count, (dk, at)) };
        chain.added(index, block);
    }
    for (query, dqueries) in dqueries.chunks_exact(group * dim).enumerate() {
        let at = geometry.query_offset(unit, query);
        // SAFETY: this unit alone writes the gradients of its queries and heads.
        let out = unsafe { dq.part(at, group * dim) };
        simd::scaled(dqueries, geometry.scale, out);
    }
}

/// p = e^(p − lse) and ds = p·(ds − delta) where the row sees, 0 elsewhere.
fn score_gradient(
    p: &mut [f32],
    ds: &mut [f32],
    seen: std::ops::Range<usize>,
    lse: f32,
    delta: f32,
) {
    for row in [&mut *p, &mut *ds] {
        row[..seen.start].fill(0.0);
        row[seen.end..].fill(0.0);
    }
    probability_gradient(&mut p[seen.clone()], &mut ds[seen], lse, delta);
}

simd::vectorised! {
    fn probability_gradient(p: &mut [f32], ds: &mut [f32], lse: f32, delta: f32) {
        for (p, ds) in p.iter_mut().zip(ds) {
            *p = simd::exp(*p - lse);
            *ds = *p * (*ds - delta);
        }
    }
}
