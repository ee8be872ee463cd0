//! Every operation that a layer template launches: shapes and formula in its doc, one function
//! each.
//!
//! Activations and gradients between layers are in [`Device::activation_dtype`]; weight gradients,
//! norms' inverse RMS, log-sum-exp and losses are f32. Weights are `activation_dtype` too by the
//! time an operation sees them (`convert` is launched when a buffer is bound). Index arrays are
//! host slices; a device that needs them in its own memory stages them itself.
//!
//! `T` tokens of a micro-batch, `H` hidden, `V` vocabulary, `D` head width. All matrices row-major.
//! Every function asserts its lengths, and that outputs overlap no input unless it says "in place".

use super::{Device, Dtype, Number, View};

/// Shape of an attention call.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape<'a> {
    /// Query heads.
    pub heads: u64,
    /// Key and value heads; divides `heads`.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Keys that a query sees, itself included; `None` is all before it.
    pub window: Option<u64>,
    /// Starts of the packed sequences and the end: 0, …, T. Attention never crosses one.
    pub bounds: &'a [u32],
}

/// Token positions grouped by id, for the embedding's gradient: `positions[starts[i]..starts[i+1]]`
/// are the positions of `ids[i]`, ascending; ids ascend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SortedTokens {
    /// Distinct token ids, ascending.
    pub ids: Vec<u32>,
    /// Where each id's positions begin, and the end.
    pub starts: Vec<u32>,
    /// Positions in the micro-batch.
    pub positions: Vec<u32>,
}

macro_rules! dispatch {
    ($self:ident, $name:ident ( $($arg:expr),* )) => {
        match $self {
            Device::Cpu(cpu) => cpu.$name($($arg),*),
            Device::Cuda(cuda) => cuda.$name($($arg),*),
        }
    };
}

impl Device {
    /// Format of activations on this device.
    pub fn activation_dtype(&self) -> Dtype {
        match self {
            Device::Cpu(_) => Dtype::F32,
            Device::Cuda(cuda) => cuda.activation(),
        }
    }

    /// out\[i\] = value.
    pub fn fill(&self, out: View, value: f32) {
        dispatch!(self, fill(out, value))
    }

    /// out = src in out's format; bf16 → f32 is exact, f32 → bf16 rounds to nearest, ties to even.
    pub fn convert(&self, src: View, out: View) {
        dispatch!(self, convert(src, out))
    }

    /// out = a + b, each `[n]`; out may be a or b (in place).
    pub fn add(&self, a: View, b: View, out: View) {
        dispatch!(self, add(a, b, out))
    }

    /// RMSNorm over rows: inv\[r\] = 1/√(mean(x\[r\]²) + eps), y = x·inv·w. x, y `[R, C]`, w `[C]`,
    /// inv `[R]` f32.
    pub fn rmsnorm_forward(&self, x: View, w: View, y: View, inv: View, eps: f32) {
        dispatch!(self, rmsnorm_forward(x, w, y, inv, eps))
    }

    /// Gradient of [`Device::rmsnorm_forward`]: dx = inv·(dy·w − x̂·mean(dy·w·x̂)) with x̂ = x·inv;
    /// added to dx if `accumulate`, and dx may be dy (in place) if not. dw `[C]` f32 is always
    /// added to: dw += Σ_r dy·x̂, in a fixed order.
    #[expect(clippy::too_many_arguments, reason = "an operation's tensors")]
    pub fn rmsnorm_backward(
        &self,
        x: View,
        w: View,
        inv: View,
        dy: View,
        dx: View,
        dw: View,
        accumulate: bool,
    ) {
        dispatch!(self, rmsnorm_backward(x, w, inv, dy, dx, dw, accumulate))
    }

    /// Rotary embedding in place on x `[T, heads, D]`, pairing (i, i + D/2) as Hugging Face does:
    /// (a, b) → (a·cos − b·sin, b·cos + a·sin); `inverse` negates sin (the gradient). `table` is
    /// `[positions, 2, D/2]` f32: cos, then sin (already scaled); `positions` `[T]`.
    pub fn rope(
        &self,
        x: View,
        heads: u64,
        head_dim: u64,
        table: View,
        positions: &[u32],
        inverse: bool,
    ) {
        dispatch!(self, rope(x, heads, head_dim, table, positions, inverse))
    }

    /// y = x·wᵀ (+ bias), or y += x·wᵀ (+ bias) if `accumulate`. x `[T, K]`, w `[N, K]`,
    /// y `[T, N]`. T is `y.count / N`, N is `w.count / K`.
    pub fn linear_forward(
        &self,
        x: View,
        w: View,
        bias: Option<View>,
        y: View,
        k: u64,
        accumulate: bool,
    ) {
        dispatch!(self, linear_forward(x, w, bias, y, k, accumulate))
    }

    /// dx = dy·w, or dx += dy·w. dy `[T, N]`, w `[N, K]`, dx `[T, K]`.
    pub fn linear_backward_input(&self, dy: View, w: View, dx: View, k: u64, accumulate: bool) {
        dispatch!(self, linear_backward_input(dy, w, dx, k, accumulate))
    }

    /// dw += dyᵀ·x. dy `[T, N]`, x `[T, K]`, dw `[N, K]` f32.
    pub fn linear_backward_weight(&self, dy: View, x: View, dw: View, k: u64) {
        dispatch!(self, linear_backward_weight(dy, x, dw, k))
    }

    /// db += Σ_t dy\[t\], in a fixed order. dy `[T, N]`, db `[N]` f32.
    pub fn bias_backward(&self, dy: View, db: View) {
        dispatch!(self, bias_backward(dy, db))
    }

    /// Causal attention with grouped queries: o = softmax(q·kᵀ/√D)·v within each packed sequence.
    /// q, o `[T, heads, D]`, k, v `[T, kv_heads, D]`; lse `[heads, T]` f32 (natural logarithm of
    /// the sum of exponentials of scaled scores).
    pub fn attention_forward(
        &self,
        q: View,
        k: View,
        v: View,
        o: View,
        lse: View,
        shape: AttentionShape<'_>,
    ) {
        dispatch!(self, attention_forward(q, k, v, o, lse, shape))
    }

    /// Gradient of [`Device::attention_forward`]; dq, dk, dv are overwritten. dq may be `do_`'s
    /// memory only if the device says so: callers keep them apart.
    #[expect(clippy::too_many_arguments, reason = "an operation's tensors")]
    pub fn attention_backward(
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
        dispatch!(
            self,
            attention_backward(q, k, v, o, lse, do_, dq, dk, dv, shape)
        )
    }

    /// a = silu(g)·u, each `[n]`, silu(x) = x/(1 + e^−x).
    pub fn swiglu_forward(&self, g: View, u: View, a: View) {
        dispatch!(self, swiglu_forward(g, u, a))
    }

    /// Gradient of [`Device::swiglu_forward`]: dg = da·u·silu'(g), du = da·silu(g); dg may be g and
    /// du may be u (in place).
    pub fn swiglu_backward(&self, g: View, u: View, da: View, dg: View, du: View) {
        dispatch!(self, swiglu_backward(g, u, da, dg, du))
    }

    /// out\[i\] = x\[rows\[i\]\]. x `[T, C]`, out `[rows.len(), C]`.
    pub fn gather_rows(&self, x: View, rows: &[u32], out: View, columns: u64) {
        dispatch!(self, gather_rows(x, rows, out, columns))
    }

    /// out\[rows\[i\]\] = x\[i\]; rows are distinct; other rows of out stay.
    pub fn scatter_rows(&self, x: View, rows: &[u32], out: View, columns: u64) {
        dispatch!(self, scatter_rows(x, rows, out, columns))
    }

    /// Cross entropy and its gradient in place: loss\[r\] = logsumexp(z\[r\]) −
    /// z\[r\]\[target\[r\]\], then z = (softmax(z) − onehot(target))·scale. z `[R, V]`, losses
    /// `[R]` f32.
    pub fn cross_entropy(&self, z: View, targets: &[u32], scale: f32, losses: View) {
        dispatch!(self, cross_entropy(z, targets, scale, losses))
    }

    /// Cross entropy without a gradient; z is left as it was.
    pub fn cross_entropy_loss(&self, z: View, targets: &[u32], losses: View) {
        dispatch!(self, cross_entropy_loss(z, targets, losses))
    }

    /// Embedding gradient as a segment sum: dw\[id\] += Σ dy\[p\] over the id's positions in
    /// ascending order. dy `[T, H]`, dw `[V, H]` f32.
    pub fn embed_backward(&self, dy: View, order: &SortedTokens, dw: View, hidden: u64) {
        dispatch!(self, embed_backward(dy, order, dw, hidden))
    }

    /// Σ x² in f64, over fixed pieces in a fixed order. x f32.
    pub fn squared_norm(&self, x: View) -> Number {
        match self {
            Device::Cpu(cpu) => Number::Known(cpu.squared_norm(x)),
            Device::Cuda(cuda) => cuda.squared_norm(x),
        }
    }

    /// Σ x in f64, in order; for the losses of a micro-batch.
    pub fn sum(&self, x: View) -> Number {
        match self {
            Device::Cpu(cpu) => Number::Known(cpu.sum(x)),
            Device::Cuda(cuda) => cuda.sum(x),
        }
    }

    /// Rounds an f32 view to bf16 (nearest, ties to even) in place: the result is the front half of
    /// its bytes. The one rounding of a finished gradient.
    pub fn round_in_place(&self, x: View) {
        dispatch!(self, round_in_place(x))
    }

    /// Copies little-endian numbers of format `dtype` from host to `out`, in out's format.
    pub fn copy_converted_in(&self, dtype: Dtype, bytes: &[u8], out: View) {
        dispatch!(self, copy_converted_in(dtype, bytes, out))
    }

    /// The view's elements, as f32. For sampling and tests; never on a step's path.
    pub fn read_f32(&self, x: View) -> Vec<f32> {
        dispatch!(self, read_f32(x))
    }
}
