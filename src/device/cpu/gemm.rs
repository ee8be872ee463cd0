//! Matrix products of the CPU device.
//!
//! - The output is cut into panels whose size depends on its shape alone; rayon runs panels, and
//!   within one the `gemm` crate runs on the calling thread. One thread makes all terms of a sum,
//!   in an order that the shape fixes.
//! - Transposes are strides. Only where a transposed right side (weights in forward) has a stride
//!   of whole half-kilobytes, whose lines share a few cache sets and make the crate's packing slow
//!   (67 against 87 GFLOP/s), is it turned piece by piece in a buffer of the thread (0.4 MiB).
//!
//! What the matrices mean is `ops`' to say.

use std::cell::RefCell;

use rayon::prelude::*;

use super::{CpuDevice, View, add_to, assert_apart};

/// Most rows and columns of a panel of the output, but for rounding. Larger ones pack less often
/// and leave less to share out: at 256 both cost a few percent.
const PANEL_MAX: usize = 256;
/// Panels are not halved below this.
const PANEL_MIN: usize = 64;
/// Panels that an output is cut into where its size allows.
const PANELS_WANTED: usize = 8;
/// Columns of a panel are whole AVX-512 kernels of the `gemm` crate, but for the last panel.
const COLUMN_ALIGN: usize = 64;
/// Rows of a panel are a multiple of this, but for the last panel.
const ROW_ALIGN: usize = 8;

/// Most terms of a sum whose right side is turned at once.
const DEPTH_MAX: usize = 384;
/// Elements from a row of the turned buffer to the next: a panel and a line, so that rows do not
/// fall on the same cache sets.
const TURNED_ROW: usize = PANEL_MAX + 16;
/// A transposed right side whose stride is a multiple of this many elements is turned.
const TURN_STRIDE: usize = 128;
/// Fewer rows than this are not worth turning the right side for.
const TURN_ROWS_MIN: usize = 16;

thread_local! {
    static TURNED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// A matrix to read: element (i, j) is at `at + i·row + j·column`.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    /// Element (0, 0).
    pub(super) at: *const f32,
    /// Elements from a row to the next.
    pub(super) row: usize,
    /// Elements from a column to the next.
    pub(super) column: usize,
}

// SAFETY: a matrix is a name; those who read through it keep the promises of `multiply`.
unsafe impl Send for Matrix {}
// SAFETY: as for Send.
unsafe impl Sync for Matrix {}

impl Matrix {
    /// A row-major matrix with `row` elements from a row to the next.
    pub(super) fn rows(at: *const f32, row: usize) -> Matrix {
        Matrix { at, row, column: 1 }
    }

    /// The same memory, read as the transpose.
    pub(super) fn transposed(self) -> Matrix {
        Matrix {
            at: self.at,
            row: self.column,
            column: self.row,
        }
    }

    /// The matrix from element (i, j) on.
    fn from(self, i: usize, j: usize) -> Matrix {
        let at = self.at.wrapping_add(i * self.row + j * self.column);
        Matrix { at, ..self }
    }
}

/// A row-major matrix to write, with `row` elements from a row to the next.
#[derive(Clone, Copy)]
pub(super) struct Output {
    /// Element (0, 0).
    pub(super) at: *mut f32,
    /// Elements from a row to the next.
    pub(super) row: usize,
}

// SAFETY: as for `Matrix`; panels of one output are disjoint.
unsafe impl Send for Output {}
// SAFETY: as for Send.
unsafe impl Sync for Output {}

impl Output {
    /// The matrix from element (i, j) on.
    fn from(self, i: usize, j: usize) -> Output {
        let at = self.at.wrapping_add(i * self.row + j);
        Output { at, ..self }
    }
}

/// Rows, columns and inner dimension of a product.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    /// Rows of the output.
    pub(super) rows: usize,
    /// Columns of the output.
    pub(super) columns: usize,
    /// Terms of each sum.
    pub(super) inner: usize,
}

/// out = a·b, or out += a·b, on the calling thread.
///
/// # Safety
/// a `[rows, inner]`, b `[inner, columns]` and out `[rows, columns]` are in bounds, initialised
/// (out only if accumulating) and out overlaps neither, nor is touched by another thread.
pub(super) unsafe fn multiply(size: Size, a: Matrix, b: Matrix, out: Output, accumulate: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        gemm::gemm(
            size.rows,
            size.columns,
            size.inner,
            out.at,
            1,
            out.row as isize,
            accumulate,
            a.at,
            a.column as isize,
            a.row as isize,
            b.at,
            b.column as isize,
            b.row as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// [`multiply`] over fixed panels on rayon's threads; `bias` is added to every row of out.
///
/// # Safety
/// As [`multiply`].
unsafe fn multiply_panels(
    size: Size,
    a: Matrix,
    b: Matrix,
    out: Output,
    bias: Option<&[f32]>,
    accumulate: bool,
) {
    if size.rows == 0 || size.columns == 0 {
        return;
    }
    let (high, wide) = panel_shape(size.rows, size.columns);
    let across = size.columns.div_ceil(wide);
    let panels = size.rows.div_ceil(high) * across;
    (0..panels).into_par_iter().for_each(|panel| {
        let (i, j) = (panel / across * high, panel % across * wide);
        let part = Size {
            rows: high.min(size.rows - i),
            columns: wide.min(size.columns - j),
            inner: size.inner,
        };
        let at = out.from(i, j);
        if let Some(bias) = bias {
            let bias = &bias[j..j + part.columns];
            for row in 0..part.rows {
                let first = at.at.wrapping_add(row * at.row);
                // SAFETY: a row of this panel, in bounds and initialised memory of the arena;
                // panels are disjoint.
                let row = unsafe { std::slice::from_raw_parts_mut(first, part.columns) };
                if accumulate {
                    add_to(row, bias);
                } else {
                    row.copy_from_slice(bias);
                }
            }
        }
        let read = accumulate || bias.is_some();
        if b.row == 1 && b.column.is_multiple_of(TURN_STRIDE) && part.rows >= TURN_ROWS_MIN {
            // SAFETY: a part of what the caller promised; panels are disjoint.
            unsafe { multiply_turned(part, a.from(i, 0), b.from(0, j), at, read) };
        } else {
            // SAFETY: as above.
            unsafe { multiply(part, a.from(i, 0), b.from(0, j), at, read) };
        }
    });
}

/// [`multiply`] for a b whose columns are contiguous: pieces of it are turned first.
///
/// # Safety
/// As [`multiply`]; at most `PANEL_MAX` columns.
unsafe fn multiply_turned(size: Size, a: Matrix, b: Matrix, out: Output, accumulate: bool) {
    assert!(b.row == 1 && size.columns <= PANEL_MAX);
    let depth = size
        .inner
        .div_ceil(size.inner.div_ceil(DEPTH_MAX).max(1))
        .next_multiple_of(16);
    TURNED.with_borrow_mut(|turned| {
        turned.resize(DEPTH_MAX * TURNED_ROW, 0.0);
        let mut start = 0;
        while start < size.inner {
            let part = Size {
                inner: depth.min(size.inner - start),
                ..size
            };
            // SAFETY: columns of b are contiguous, in bounds by the caller's promise.
            unsafe { turn(b.from(start, 0), part.inner, size.columns, turned) };
            let b = Matrix::rows(turned.as_ptr(), TURNED_ROW);
            // SAFETY: b is the buffer just filled; the rest is part of the caller's promise.
            unsafe { multiply(part, a.from(0, start), b, out, accumulate || start > 0) };
            start += part.inner;
        }
    });
}

/// turned\[p\]\[column\] = b\[p\]\[column\], 16 by 16: whole lines are read, in whichever set they
/// lie.
///
/// # Safety
/// b is `[depth, columns]` with contiguous columns, in bounds.
unsafe fn turn(b: Matrix, depth: usize, columns: usize, turned: &mut [f32]) {
    for first in (0..columns).step_by(16) {
        let count = 16.min(columns - first);
        for start in (0..depth).step_by(16) {
            let length = 16.min(depth - start);
            let mut square = [[0.0f32; 16]; 16];
            for (i, line) in square.iter_mut().enumerate().take(count) {
                let at = b.from(start, first + i).at;
                // SAFETY: part of a column, in bounds by the caller's promise.
                let source = unsafe { std::slice::from_raw_parts(at, length) };
                line[..length].copy_from_slice(source);
            }
            for p in 0..length {
                let row = &mut turned[(start + p) * TURNED_ROW + first..][..16];
                for (i, v) in row.iter_mut().enumerate() {
                    *v = square[i][p];
                }
            }
        }
    }
}

/// Rows and columns of the panels that an output is cut into. Depends on its shape alone.
fn panel_shape(rows: usize, columns: usize) -> (usize, usize) {
    let even = |length: usize, max: usize, align: usize| {
        length
            .div_ceil(length.div_ceil(max))
            .next_multiple_of(align)
    };
    let mut max = PANEL_MAX;
    loop {
        let (high, wide) = (even(rows, max, ROW_ALIGN), even(columns, max, COLUMN_ALIGN));
        let panels = rows.div_ceil(high) * columns.div_ceil(wide);
        if panels >= PANELS_WANTED || max / 2 < PANEL_MIN {
            return (high, wide);
        }
        max /= 2;
    }
}

/// Rows of a matrix of `count` elements and `columns` columns.
fn rows_of(count: u64, columns: u64, what: &str) -> u64 {
    assert!(
        columns > 0 && count.is_multiple_of(columns),
        "{what}: {count} elements in rows of {columns}"
    );
    count / columns
}

impl CpuDevice {
    pub(super) fn matrix(&self, view: View, row: u64) -> Matrix {
        Matrix::rows(self.at_f32(view), row as usize)
    }

    fn matrix_out(&self, view: View, row: u64) -> Output {
        Output {
            at: self.at_f32(view),
            row: row as usize,
        }
    }

    pub(in crate::device) fn linear_forward(
        &self,
        x: View,
        w: View,
        bias: Option<View>,
        y: View,
        k: u64,
        accumulate: bool,
    ) {
        let (t, n) = (rows_of(x.count, k, "x"), rows_of(w.count, k, "w"));
        assert_eq!(y.count, t * n, "y is [T, N]");
        let mut inputs = vec![x, w];
        inputs.extend(bias);
        assert_apart(&[y], &inputs);
        let bias = bias.map(|bias| {
            assert_eq!(bias.count, n, "bias is [N]");
            self.input(bias)
        });
        let size = Size {
            rows: t as usize,
            columns: n as usize,
            inner: k as usize,
        };
        let (x, w) = (self.matrix(x, k), self.matrix(w, k));
        let y = self.matrix_out(y, n);
        // SAFETY: lengths and overlap asserted above; the schedule keeps others away.
        unsafe { multiply_panels(size, x, w.transposed(), y, bias, accumulate) };
    }

    pub(in crate::device) fn linear_backward_input(
        &self,
        dy: View,
        w: View,
        dx: View,
        k: u64,
        accumulate: bool,
    ) {
        let (t, n) = (rows_of(dx.count, k, "dx"), rows_of(w.count, k, "w"));
        assert_eq!(dy.count, t * n, "dy is [T, N]");
        assert_apart(&[dx], &[dy, w]);
        let size = Size {
            rows: t as usize,
            columns: k as usize,
            inner: n as usize,
        };
        let (dy, w) = (self.matrix(dy, n), self.matrix(w, k));
        let dx = self.matrix_out(dx, k);
        // SAFETY: lengths and overlap asserted above; the schedule keeps others away.
        unsafe { multiply_panels(size, dy, w, dx, None, accumulate) };
    }

    pub(in crate::device) fn linear_backward_weight(&self, dy: View, x: View, dw: View, k: u64) {
        let (t, n) = (rows_of(x.count, k, "x"), rows_of(dw.count, k, "dw"));
        assert_eq!(dy.count, t * n, "dy is [T, N]");
        assert_apart(&[dw], &[dy, x]);
        let size = Size {
            rows: n as usize,
            columns: k as usize,
            inner: t as usize,
        };
        let (dy, x) = (self.matrix(dy, n), self.matrix(x, k));
        let dw = self.matrix_out(dw, k);
        // SAFETY: lengths and overlap asserted above; the schedule keeps others away.
        unsafe { multiply_panels(size, dy.transposed(), x, dw, None, true) };
    }
}
