//! Launches of `kernels/*.cu`, but for attention: one function an operation; nobody else launches.
//!
//! - Each checks every length, format and overlap, then launches on the calling thread's stream; a
//!   view's bounds are [`CudaDevice::pointer`]'s to check. An empty operation launches nothing.
//! - Grids and pieces follow from the shape alone, never from the card: so do the orders of sums.
//! - `vector` tells a kernel that addresses are multiples of 16 bytes and rows of eight elements;
//!   without it elements move one by one, in the same order of sums.
//!
//! What an operation means is said in `ops`; how a kernel works, in its file. Sums in two stages
//! are launched by `sums`.

mod sums;

use super::{Argument, CudaDevice, Dtype, View, assert_apart};
use crate::device::ops::SortedTokens;

/// Threads of a block of an elementwise kernel.
const ELEMENT_THREADS: u32 = 256;
/// Elements of a thread of an elementwise kernel, columns of a thread of a row-wise one.
const ELEMENTS: u64 = 8;
/// Columns of a block that moves rows: 128 threads, four sweeps.
const MOVED_COLUMNS: u64 = 4096;
/// Columns of a block of the embedding's gradient: 128 threads.
const EMBED_COLUMNS: u64 = 1024;
/// Elements that are rounded in place by one block, before those whose input and output are apart.
const ROUND_FIRST: u64 = 8192;

/// A kernel's name for bf16 and for f32.
type Names = [&'static str; 2];

impl CudaDevice {
    pub(in crate::device) fn fill(&self, out: View, value: f32) {
        let names = ["fill_bf16", "fill_f32"];
        self.launch_elements(
            named(names, out.dtype),
            &[out],
            &[self.at(out), Argument::F32(value)],
        );
    }

    pub(in crate::device) fn convert(&self, src: View, out: View) {
        assert_eq!(src.count, out.count, "elements of src and out");
        assert_apart(&[out], &[src]);
        let names = match src.dtype {
            Dtype::Bf16 => ["convert_bf16_bf16", "convert_bf16_f32"],
            Dtype::F32 => ["convert_f32_bf16", "convert_f32_f32"],
        };
        self.launch_elements(
            named(names, out.dtype),
            &[src, out],
            &[self.at(src), self.at(out)],
        );
    }

    pub(in crate::device) fn add(&self, a: View, b: View, out: View) {
        assert_eq!(
            (a.count, b.count),
            (out.count, out.count),
            "elements of a + b"
        );
        let others: Vec<View> = [a, b].into_iter().filter(|v| *v != out).collect();
        assert_apart(&[out], &others);
        let dtype = one_format(&[a, b, out]);
        self.launch_elements(
            named(["add_bf16", "add_f32"], dtype),
            &[a, b, out],
            &[self.at(a), self.at(b), self.at(out)],
        );
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
        assert!(
            heads > 0 && head_dim > 0 && head_dim.is_multiple_of(2),
            "heads of even width"
        );
        let tokens = positions.len() as u64;
        assert_eq!(x.count, tokens * heads * head_dim, "x is [T, heads, D]");
        assert_eq!(table.dtype, Dtype::F32, "the table is f32");
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
        if tokens == 0 {
            return;
        }
        let half = head_dim / 2;
        let threads = (heads * half.div_ceil(ELEMENTS)).next_multiple_of(32);
        let positions = self.stage_u32(positions);
        self.launch(
            named(["rope_bf16", "rope_f32"], x.dtype),
            (size(tokens), 1, 1),
            (size(threads.min(256)), 1, 1),
            0,
            &[
                self.at(x),
                self.at(table),
                Argument::Pointer(positions),
                Argument::U32(size(heads)),
                Argument::U32(size(half)),
                Argument::F32(if inverse { -1.0 } else { 1.0 }),
                self.vector(&[x, table], half),
            ],
        );
    }

    pub(in crate::device) fn swiglu_forward(&self, g: View, u: View, a: View) {
        assert_eq!((g.count, u.count), (a.count, a.count), "g, u and a are [n]");
        assert_apart(&[a], &[g, u]);
        let dtype = one_format(&[g, u, a]);
        self.launch_elements(
            named(["swiglu_forward_bf16", "swiglu_forward_f32"], dtype),
            &[g, u, a],
            &[self.at(g), self.at(u), self.at(a)],
        );
    }

    pub(in crate::device) fn swiglu_backward(
        &self,
        g: View,
        u: View,
        da: View,
        dg: View,
        du: View,
    ) {
        let views = [g, u, da, dg, du];
        assert!(
            views.iter().all(|view| view.count == da.count),
            "g, u, da, dg and du are [n]"
        );
        assert_apart(&[dg, du], &[da]);
        for (gradient, other, own) in [(dg, du, g), (du, dg, u)] {
            assert_apart(&[other], &[own]);
            if gradient != own {
                assert_apart(&[gradient], &[own]);
            }
        }
        let dtype = one_format(&views);
        self.launch_elements(
            named(["swiglu_backward_bf16", "swiglu_backward_f32"], dtype),
            &views,
            &views.map(|view| self.at(view)),
        );
    }

    pub(in crate::device) fn gather_rows(&self, x: View, rows: &[u32], out: View, columns: u64) {
        let height = rows_of(x.count, columns, "x");
        assert_eq!(out.count, rows.len() as u64 * columns, "out is [rows, C]");
        assert_rows(rows, height);
        self.move_rows(
            ["gather_rows_bf16", "gather_rows_f32"],
            x,
            rows,
            out,
            columns,
        );
    }

    pub(in crate::device) fn scatter_rows(&self, x: View, rows: &[u32], out: View, columns: u64) {
        let height = rows_of(out.count, columns, "out");
        assert_eq!(x.count, rows.len() as u64 * columns, "x is [rows, C]");
        assert_rows(rows, height);
        let mut seen = vec![false; usize::try_from(height).expect("rows of a view")];
        for row in rows {
            let twice = std::mem::replace(&mut seen[*row as usize], true);
            assert!(!twice, "row {row} twice");
        }
        self.move_rows(
            ["scatter_rows_bf16", "scatter_rows_f32"],
            x,
            rows,
            out,
            columns,
        );
    }

    pub(in crate::device) fn cross_entropy(
        &self,
        z: View,
        targets: &[u32],
        scale: f32,
        losses: View,
    ) {
        let columns = logit_columns(z, targets, losses);
        assert_apart(&[z, losses], &[]);
        if targets.is_empty() {
            return;
        }
        let staged = self.stage_u32(targets);
        self.launch(
            named(["cross_entropy_bf16", "cross_entropy_f32"], z.dtype),
            (size(losses.count), 1, 1),
            (512, 1, 1),
            0,
            &[
                self.at(z),
                Argument::Pointer(staged),
                self.at(losses),
                Argument::U32(size(columns)),
                Argument::F32(scale),
                self.vector(&[z], columns),
            ],
        );
    }

    pub(in crate::device) fn cross_entropy_loss(&self, z: View, targets: &[u32], losses: View) {
        let columns = logit_columns(z, targets, losses);
        assert_apart(&[losses], &[z]);
        if targets.is_empty() {
            return;
        }
        let staged = self.stage_u32(targets);
        self.launch(
            named(
                ["cross_entropy_loss_bf16", "cross_entropy_loss_f32"],
                z.dtype,
            ),
            (size(losses.count), 1, 1),
            (512, 1, 1),
            0,
            &[
                self.at(z),
                Argument::Pointer(staged),
                self.at(losses),
                Argument::U32(size(columns)),
                self.vector(&[z], columns),
            ],
        );
    }

    pub(in crate::device) fn embed_backward(
        &self,
        dy: View,
        order: &SortedTokens,
        dw: View,
        hidden: u64,
    ) {
        let height = rows_of(dw.count, hidden, "dw");
        let tokens = order.positions.len() as u64;
        assert_eq!(dy.count, tokens * hidden, "dy is [T, H]");
        assert_eq!(dw.dtype, Dtype::F32, "dw is f32");
        assert_eq!(
            order.starts.len(),
            order.ids.len() + 1,
            "a start an id, and the end"
        );
        assert_eq!(order.starts[0], 0, "starts cover the positions");
        assert_eq!(
            order.starts.last().map(|end| u64::from(*end)),
            Some(tokens),
            "starts cover the positions"
        );
        assert!(order.starts.is_sorted(), "starts ascend");
        assert!(
            order.ids.windows(2).all(|pair| pair[0] < pair[1]),
            "ids ascend"
        );
        assert_rows(&order.ids, height);
        assert_rows(&order.positions, tokens);
        assert_apart(&[dw], &[dy]);
        if order.ids.is_empty() {
            return;
        }
        let ids = self.stage_u32(&order.ids);
        let starts = self.stage_u32(&order.starts);
        let positions = self.stage_u32(&order.positions);
        self.launch(
            named(["embed_backward_bf16", "embed_backward_f32"], dy.dtype),
            (
                size(order.ids.len() as u64),
                size(hidden.div_ceil(EMBED_COLUMNS)),
                1,
            ),
            (128, 1, 1),
            0,
            &[
                self.at(dy),
                Argument::Pointer(ids),
                Argument::Pointer(starts),
                Argument::Pointer(positions),
                self.at(dw),
                Argument::U32(size(hidden)),
                self.vector(&[dy, dw], hidden),
            ],
        );
    }

    pub(in crate::device) fn round_in_place(&self, x: View) {
        assert_eq!(x.dtype, Dtype::F32, "f32 is what is rounded");
        if x.count == 0 {
            return;
        }
        let vector = self.vector(&[x], ELEMENTS);
        let first = x.count.min(ROUND_FIRST);
        self.launch(
            "round_first",
            (1, 1, 1),
            (size(ROUND_FIRST / ELEMENTS), 1, 1),
            0,
            &[self.at(x), Argument::U64(first), vector],
        );
        // [a, 2a): read from bytes [4a, 8a), written to [2a, 4a), which the launches before have
        // read.
        let mut start = first;
        while start < x.count {
            let end = x.count.min(2 * start);
            self.launch(
                "round_rest",
                (element_blocks(end - start), 1, 1),
                (ELEMENT_THREADS, 1, 1),
                0,
                &[self.at(x), Argument::U64(start), Argument::U64(end), vector],
            );
            start = end;
        }
    }

    /// Launches an elementwise kernel, whose last parameters are count and `vector`.
    fn launch_elements(&self, name: &'static str, views: &[View], arguments: &[Argument]) {
        let count = views[0].count;
        let ends = [Argument::U64(count), self.vector(views, ELEMENTS)];
        self.launch(
            name,
            (element_blocks(count), 1, 1),
            (ELEMENT_THREADS, 1, 1),
            0,
            &[arguments, &ends].concat(),
        );
    }

    fn move_rows(&self, names: Names, x: View, rows: &[u32], out: View, columns: u64) {
        assert_apart(&[out], &[x]);
        let dtype = one_format(&[x, out]);
        if rows.is_empty() {
            return;
        }
        let staged = self.stage_u32(rows);
        self.launch(
            named(names, dtype),
            (
                size(rows.len() as u64),
                size(columns.div_ceil(MOVED_COLUMNS)),
                1,
            ),
            (128, 1, 1),
            0,
            &[
                self.at(x),
                Argument::Pointer(staged),
                self.at(out),
                Argument::U32(size(columns)),
                self.vector(&[x, out], columns),
            ],
        );
    }

    /// out\[i\] = row `rows\[i\]` of the table at `address`, which the card can read.
    pub(super) fn launch_gather(&self, address: u64, rows: &[u32], out: View, columns: u64) {
        let names = ["gather_rows_bf16", "gather_rows_f32"];
        let vector = self.pointer(out).is_multiple_of(16)
            && address.is_multiple_of(16)
            && columns.is_multiple_of(ELEMENTS);
        let staged = self.stage_u32(rows);
        self.launch(
            named(names, out.dtype),
            (
                size(rows.len() as u64),
                size(columns.div_ceil(MOVED_COLUMNS)),
                1,
            ),
            (128, 1, 1),
            0,
            &[
                Argument::Pointer(address),
                Argument::Pointer(staged),
                self.at(out),
                Argument::U32(size(columns)),
                Argument::U32(vector.into()),
            ],
        );
    }

    fn at(&self, view: View) -> Argument {
        Argument::Pointer(self.pointer(view))
    }

    /// Whether kernels may move 16 bytes at once: addresses and rows of `columns` allow it.
    fn vector(&self, views: &[View], columns: u64) -> Argument {
        let aligned = views
            .iter()
            .all(|view| self.pointer(*view).is_multiple_of(16));
        Argument::U32(u32::from(aligned && columns.is_multiple_of(ELEMENTS)))
    }
}

fn named(names: Names, dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Bf16 => names[0],
        Dtype::F32 => names[1],
    }
}

/// The format that all of `views` have.
fn one_format(views: &[View]) -> Dtype {
    let dtype = views[0].dtype;
    assert!(
        views.iter().all(|view| view.dtype == dtype),
        "one format: {views:?}"
    );
    dtype
}

/// A size as a kernel's 32-bit parameter, or a side of a grid.
fn size(value: u64) -> u32 {
    u32::try_from(value).expect("a size below 2³²")
}

/// Blocks of an elementwise launch.
fn element_blocks(count: u64) -> u32 {
    size(count.div_ceil(u64::from(ELEMENT_THREADS) * ELEMENTS))
}

/// Rows of `count` elements in rows of `columns`.
fn rows_of(count: u64, columns: u64, what: &str) -> u64 {
    assert!(
        columns > 0 && count.is_multiple_of(columns),
        "{what}: {count} elements in rows of {columns}"
    );
    count / columns
}

fn assert_rows(rows: &[u32], height: u64) {
    let largest = rows.iter().max().map_or(0, |row| u64::from(*row) + 1);
    assert!(largest <= height, "row {largest} of {height}");
}

/// Columns of logits, with lengths and targets checked.
fn logit_columns(z: View, targets: &[u32], losses: View) -> u64 {
    let rows = targets.len() as u64;
    assert_eq!(losses.count, rows, "losses is [R]");
    assert_eq!(losses.dtype, Dtype::F32, "losses are f32");
    if rows == 0 {
        assert_eq!(z.count, 0, "z is [R, V]");
        return 0;
    }
    assert!(z.count > 0, "z is [R, V]");
    let columns = rows_of(z.count, rows, "z");
    let largest = targets.iter().max().copied().unwrap_or(0);
    assert!(
        u64::from(largest) < columns,
        "target {largest} of {columns}"
    );
    columns
}
