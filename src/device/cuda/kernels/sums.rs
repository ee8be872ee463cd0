//! Launches of the kernels that sum in two stages: norms, gradients of biases, whole arrays.
//!
//! - A first kernel sums pieces, a second adds up what they gave, in order. The pieces follow from
//!   the shape alone.
//! - Partial sums lie at a `scratch` address, which is the compute stream's workspace unless the
//!   caller names another.

use super::{ELEMENTS, Names, named, one_format, rows_of, size};
use crate::device::cuda::{Argument, CudaDevice, assert_apart};
use crate::device::{Dtype, Number, View};

/// Most blocks of rows that a norm's weight gradient is summed over.
const NORM_BLOCKS_MAX: u64 = 512;
/// Most blocks of rows that a bias's gradient is summed over.
const BIAS_BLOCKS_MAX: u64 = 128;
/// Most pieces of a sum over a whole array.
const SUM_PIECES_MAX: u64 = 1024;
/// A piece of a sum is a multiple of what its block takes at a turn: 256 threads of eight elements.
const SUM_PIECE_ALIGN: u64 = 2048;

/// Bytes of the pieces of [`CudaDevice::squared_norm`] and [`CudaDevice::sum`].
const SUM_SCRATCH_BYTES: u64 = SUM_PIECES_MAX * 8;

/// Bytes of scratch of [`CudaDevice::rmsnorm_backward_with`] for rows of `columns`; 32 MiB at most.
pub(in crate::device::cuda) fn rmsnorm_scratch_bytes(columns: u64) -> u64 {
    NORM_BLOCKS_MAX * columns * 4
}

/// Bytes of scratch of [`CudaDevice::bias_backward_with`] for rows of `columns`.
pub(in crate::device::cuda) fn bias_scratch_bytes(columns: u64) -> u64 {
    BIAS_BLOCKS_MAX * columns * 4
}

/// A kernel of both formats for rows up to a length.
struct RowKernel {
    columns_max: u64,
    /// Threads that share a row.
    lanes: u32,
    names: Names,
}

macro_rules! row_kernels {
    ($kind:literal: $($columns:literal by $lanes:literal),*) => {
        [$(RowKernel {
            columns_max: $columns,
            lanes: $lanes,
            names: [
                concat!($kind, "_", $columns, "_bf16"),
                concat!($kind, "_", $columns, "_f32"),
            ],
        }),*]
    };
}

static RMSNORM_FORWARD: [RowKernel; 5] = row_kernels!(
    "rmsnorm_forward": 128 by 16, 1024 by 32, 4096 by 128, 8192 by 256, 16384 by 512
);
static RMSNORM_BACKWARD: [RowKernel; 6] = row_kernels!(
    "rmsnorm_backward": 128 by 16, 256 by 32, 1024 by 128, 4096 by 512, 8192 by 512, 16384 by 512
);

impl RowKernel {
    /// The kernel for rows of `columns`.
    ///
    /// # Panics
    /// If rows are longer than any kernel takes: 16384.
    fn of(kernels: &'static [RowKernel], columns: u64) -> &'static RowKernel {
        kernels
            .iter()
            .find(|kernel| columns <= kernel.columns_max)
            .unwrap_or_else(|| panic!("rows of {columns}: a norm takes 16384 at most"))
    }

    /// Threads of a block: one group above a warp, else as many as make 256.
    fn threads(&self) -> u32 {
        if self.lanes > 32 { self.lanes } else { 256 }
    }

    /// Rows that a block works on at once.
    fn groups(&self) -> u64 {
        u64::from(self.threads() / self.lanes)
    }
}

impl CudaDevice {
    pub(in crate::device) fn rmsnorm_forward(
        &self,
        x: View,
        w: View,
        y: View,
        inv: View,
        eps: f32,
    ) {
        let (rows, columns) = (inv.count, w.count);
        assert!(columns > 0, "w is [C], not empty");
        assert_eq!(x.count, rows * columns, "x is [R, C]");
        assert_eq!(y.count, x.count, "y is [R, C]");
        assert_eq!(inv.dtype, Dtype::F32, "inv is f32");
        assert_apart(&[y, inv], &[x, w]);
        let dtype = one_format(&[x, w, y]);
        let kernel = RowKernel::of(&RMSNORM_FORWARD, columns);
        self.launch(
            named(kernel.names, dtype),
            (size(rows.div_ceil(kernel.groups())), 1, 1),
            (kernel.threads(), 1, 1),
            0,
            &[
                self.at(x),
                self.at(w),
                self.at(y),
                self.at(inv),
                Argument::U64(rows),
                Argument::U32(size(columns)),
                Argument::F32(eps),
                self.vector(&[x, w, y], columns),
            ],
        );
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
        let scratch = self.workspace(rmsnorm_scratch_bytes(w.count));
        self.rmsnorm_backward_with(x, w, inv, dy, dx, dw, accumulate, scratch);
    }

    /// As `rmsnorm_backward`, with [`rmsnorm_scratch_bytes`] at `scratch`, a multiple of 16.
    #[expect(clippy::too_many_arguments, reason = "an operation's tensors")]
    pub(in crate::device::cuda) fn rmsnorm_backward_with(
        &self,
        x: View,
        w: View,
        inv: View,
        dy: View,
        dx: View,
        dw: View,
        accumulate: bool,
        scratch: u64,
    ) {
        let (rows, columns) = (inv.count, w.count);
        assert!(columns > 0, "w is [C], not empty");
        assert_eq!(dw.count, columns, "dw is [C]");
        assert_eq!(x.count, rows * columns, "x is [R, C]");
        assert_eq!(
            (dx.count, dy.count),
            (x.count, x.count),
            "dx, dy are [R, C]"
        );
        assert_eq!(
            (inv.dtype, dw.dtype),
            (Dtype::F32, Dtype::F32),
            "inv and dw are f32"
        );
        assert_apart(&[dx, dw], &[x, w, inv]);
        if dx == dy && !accumulate {
            assert_apart(&[dw], &[dy]);
        } else {
            assert_apart(&[dx, dw], &[dy]);
        }
        assert_eq!(scratch % 16, 0, "scratch for vectors");
        let dtype = one_format(&[x, w, dy, dx]);
        let kernel = RowKernel::of(&RMSNORM_BACKWARD, columns);
        let rows_per_block = rows
            .div_ceil(NORM_BLOCKS_MAX)
            .next_multiple_of(kernel.groups());
        let blocks = rows.div_ceil(rows_per_block.max(1));
        self.launch(
            named(kernel.names, dtype),
            (size(blocks), 1, 1),
            (kernel.threads(), 1, 1),
            0,
            &[
                self.at(x),
                self.at(w),
                self.at(inv),
                self.at(dy),
                self.at(dx),
                Argument::Pointer(scratch),
                Argument::U64(rows),
                Argument::U64(rows_per_block),
                Argument::U32(size(columns)),
                Argument::U32(accumulate.into()),
                self.vector(&[x, w, dy, dx], columns),
            ],
        );
        self.add_partials(scratch, dw, blocks);
    }

    pub(in crate::device) fn bias_backward(&self, dy: View, db: View) {
        let scratch = self.workspace(bias_scratch_bytes(db.count));
        self.bias_backward_with(dy, db, scratch);
    }

    /// As `bias_backward`, with [`bias_scratch_bytes`] at `scratch`.
    pub(in crate::device::cuda) fn bias_backward_with(&self, dy: View, db: View, scratch: u64) {
        let columns = db.count;
        let rows = rows_of(dy.count, columns, "dy");
        assert_eq!(db.dtype, Dtype::F32, "db is f32");
        assert_apart(&[db], &[dy]);
        let rows_per_block = rows.div_ceil(BIAS_BLOCKS_MAX);
        let blocks = rows.div_ceil(rows_per_block.max(1));
        self.launch(
            named(["column_partials_bf16", "column_partials_f32"], dy.dtype),
            (size(columns.div_ceil(256)), size(blocks), 1),
            (256, 1, 1),
            0,
            &[
                self.at(dy),
                Argument::Pointer(scratch),
                Argument::U64(rows),
                Argument::U64(rows_per_block),
                Argument::U32(size(columns)),
                self.vector(&[dy], columns),
            ],
        );
        self.add_partials(scratch, db, blocks);
    }

    pub(in crate::device) fn squared_norm(&self, x: View) -> Number {
        self.sum_pieces("square_partials", x)
    }

    pub(in crate::device) fn sum(&self, x: View) -> Number {
        self.sum_pieces("sum_partials", x)
    }

    /// out\[c\] += Σ of `blocks` partial sums at `partial`.
    fn add_partials(&self, partial: u64, out: View, blocks: u64) {
        if blocks == 0 {
            return;
        }
        self.launch(
            "add_partials",
            (size(out.count.div_ceil(32)), 1, 1),
            (32, 16, 1),
            0,
            &[
                Argument::Pointer(partial),
                self.at(out),
                Argument::U32(size(blocks)),
                Argument::U32(size(out.count)),
            ],
        );
    }

    /// The two launches of a sum over a whole array, and the copy of what it comes to.
    fn sum_pieces(&self, name: &'static str, x: View) -> Number {
        assert_eq!(x.dtype, Dtype::F32, "f32 is what is summed");
        let scratch = self.workspace(SUM_SCRATCH_BYTES + 8);
        let out = scratch + SUM_SCRATCH_BYTES;
        let piece = x
            .count
            .div_ceil(SUM_PIECES_MAX)
            .next_multiple_of(SUM_PIECE_ALIGN);
        let pieces = x.count.div_ceil(piece.max(1));
        self.launch(
            name,
            (size(pieces), 1, 1),
            (256, 1, 1),
            0,
            &[
                self.at(x),
                Argument::Pointer(scratch),
                Argument::U64(x.count),
                Argument::U64(piece),
                self.vector(&[x], ELEMENTS),
            ],
        );
        self.launch(
            "total",
            (1, 1, 1),
            (256, 1, 1),
            0,
            &[
                Argument::Pointer(scratch),
                Argument::Pointer(out),
                Argument::U32(size(pieces)),
            ],
        );
        self.tell(out)
    }
}
