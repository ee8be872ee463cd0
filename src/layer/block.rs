//! A transformer block: pre-norm attention with grouped queries and rotary positions, then SwiGLU.
//!
//! ```text
//! n1 = norm(x)·w1          q, k, v = n1·Wqkvᵀ (+ b)     [q, k = norm per head]   q, k = rope
//! o = attention(q, k, v)   x2 = x + o·Woᵀ (+ b)
//! n2 = norm(x2)·w2         g, u = n2·Wguᵀ
//! a = silu(g)·u            y = x2 + a·Wdᵀ
//! ```

use super::{range_of, tensor_view};
use crate::data::Micro;
use crate::device::ops::AttentionShape;
use crate::device::{Device, Dtype, View};
use crate::model::ModelSpec;
use crate::plan::regions::{BackwardScratch, BlockWorkspace, DeviceMap};
use crate::tile::{TensorRange, TileLayout};

/// Launch list of every block of a model; their tiles have the same layout.
pub struct BlockTemplate {
    hidden: u64,
    inner: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    eps: f32,
    windows: Vec<Option<u64>>,
    q: TensorRange,
    k: TensorRange,
    v: TensorRange,
    o: TensorRange,
    gate: TensorRange,
    up: TensorRange,
    down: TensorRange,
    norm1: TensorRange,
    norm2: TensorRange,
    q_bias: Option<TensorRange>,
    k_bias: Option<TensorRange>,
    v_bias: Option<TensorRange>,
    o_bias: Option<TensorRange>,
    q_norm: Option<TensorRange>,
    k_norm: Option<TensorRange>,
}

/// What one use of the template is given: offsets in the device's arena.
#[derive(Clone, Copy)]
pub struct BlockUse<'a> {
    /// Index of the block, from 0.
    pub block: u16,
    /// Tokens, positions and bounds.
    pub micro: &'a Micro,
    /// The tile's weights in the activation format.
    pub weights: u64,
    /// The block's input, act `[T, H]`.
    pub x: u64,
    /// Where activations for backward go, or are, and where those are that passes give back.
    pub activations: (u64, u64),
}

/// Views of a workspace for the tokens of one micro-batch.
struct Activations {
    x: View,
    n1: View,
    inv1: View,
    q: View,
    k: View,
    v: View,
    q_raw: View,
    k_raw: View,
    inv_q: View,
    inv_k: View,
    o: View,
    lse: View,
    x2: View,
    inv2: View,
    n2: View,
    g: View,
    u: View,
    a: View,
}

impl BlockTemplate {
    /// The launch list for blocks of `spec`.
    pub fn new(spec: &ModelSpec) -> BlockTemplate {
        let layout: TileLayout = spec.tile_layout(1);
        let required = |suffix| range_of(&layout, suffix).expect("a block has this tensor");
        BlockTemplate {
            hidden: spec.hidden,
            inner: spec.intermediate,
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            eps: spec.rms_eps,
            windows: spec.windows.clone(),
            q: required("q_proj.weight"),
            k: required("k_proj.weight"),
            v: required("v_proj.weight"),
            o: required("o_proj.weight"),
            gate: required("gate_proj.weight"),
            up: required("up_proj.weight"),
            down: required("down_proj.weight"),
            norm1: required("input_layernorm.weight"),
            norm2: required("post_attention_layernorm.weight"),
            q_bias: range_of(&layout, "q_proj.bias"),
            k_bias: range_of(&layout, "k_proj.bias"),
            v_bias: range_of(&layout, "v_proj.bias"),
            o_bias: range_of(&layout, "o_proj.bias"),
            q_norm: range_of(&layout, "q_norm.weight"),
            k_norm: range_of(&layout, "k_norm.weight"),
        }
    }

    fn activations(&self, act: Dtype, map: &DeviceMap, used: &BlockUse<'_>) -> Activations {
        let tokens = used.micro.tokens.len() as u64;
        let w: &BlockWorkspace = &map.workspace;
        let (base, given_back) = used.activations;
        let rows = |offset: u64, width: u64| View::new(base + offset, tokens * width, act);
        let passes = |offset: u64, width: u64| View::new(given_back + offset, tokens * width, act);
        let numbers =
            |offset: u64, width: u64| View::new(base + offset, tokens * width, Dtype::F32);
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        Activations {
            x: View::new(used.x, tokens * self.hidden, act),
            n1: passes(w.n1, self.hidden),
            inv1: numbers(w.inv1, 1),
            q: rows(w.q, q),
            k: rows(w.k, kv),
            v: rows(w.v, kv),
            q_raw: rows(if self.q_norm.is_some() { w.q_raw } else { w.q }, q),
            k_raw: rows(if self.k_norm.is_some() { w.k_raw } else { w.k }, kv),
            inv_q: numbers(w.inv_q, self.heads),
            inv_k: numbers(w.inv_k, self.kv_heads),
            o: rows(w.o, q),
            lse: numbers(w.lse, self.heads),
            x2: rows(w.x2, self.hidden),
            inv2: numbers(w.inv2, 1),
            n2: passes(w.n2, self.hidden),
            g: rows(w.g, self.inner),
            u: rows(w.u, self.inner),
            a: passes(w.a, self.inner),
        }
    }

    fn attention_shape<'a>(&self, used: &BlockUse<'a>) -> AttentionShape<'a> {
        AttentionShape {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            window: self.windows[usize::from(used.block)],
            bounds: &used.micro.bounds,
        }
    }

    /// Forward; writes the workspace and, unless the output is not wanted (recompute), `y`. `y` may
    /// be the input's memory.
    pub fn forward(&self, device: &Device, map: &DeviceMap, used: BlockUse<'_>, y: Option<u64>) {
        let act = device.activation_dtype();
        let s = self.activations(act, map, &used);
        let weight = |range: &TensorRange| tensor_view(used.weights, range, act);
        let bias = |range: &Option<TensorRange>| range.as_ref().map(weight);
        let positions = &used.micro.positions;
        let rope = self.rope_table(map);

        device.rmsnorm_forward(s.x, weight(&self.norm1), s.n1, s.inv1, self.eps);
        device.linear_forward(
            s.n1,
            weight(&self.q),
            bias(&self.q_bias),
            s.q_raw,
            self.hidden,
            false,
        );
        device.linear_forward(
            s.n1,
            weight(&self.k),
            bias(&self.k_bias),
            s.k_raw,
            self.hidden,
            false,
        );
        device.linear_forward(
            s.n1,
            weight(&self.v),
            bias(&self.v_bias),
            s.v,
            self.hidden,
            false,
        );
        if let (Some(q_norm), Some(k_norm)) = (&self.q_norm, &self.k_norm) {
            device.rmsnorm_forward(s.q_raw, weight(q_norm), s.q, s.inv_q, self.eps);
            device.rmsnorm_forward(s.k_raw, weight(k_norm), s.k, s.inv_k, self.eps);
        }
        device.rope(s.q, self.heads, self.head_dim, rope, positions, false);
        device.rope(s.k, self.kv_heads, self.head_dim, rope, positions, false);
        device.attention_forward(s.q, s.k, s.v, s.o, s.lse, self.attention_shape(&used));

        let attention_width = self.heads * self.head_dim;
        device.convert(s.x, s.x2);
        device.linear_forward(
            s.o,
            weight(&self.o),
            bias(&self.o_bias),
            s.x2,
            attention_width,
            true,
        );
        device.rmsnorm_forward(s.x2, weight(&self.norm2), s.n2, s.inv2, self.eps);
        device.linear_forward(s.n2, weight(&self.gate), None, s.g, self.hidden, false);
        device.linear_forward(s.n2, weight(&self.up), None, s.u, self.hidden, false);
        device.swiglu_forward(s.g, s.u, s.a);
        if let Some(y) = y {
            let y = View::new(y, s.x2.count, act);
            device.convert(s.x2, y);
            device.linear_forward(s.a, weight(&self.down), None, y, self.inner, true);
        }
    }

    /// Gives back what lean kept activations lack: the passes of [`BlockTemplate::forward`], so
    /// the same bits.
    pub fn restore(&self, device: &Device, map: &DeviceMap, used: BlockUse<'_>) {
        let act = device.activation_dtype();
        let s = self.activations(act, map, &used);
        let weight = |range: &TensorRange| tensor_view(used.weights, range, act);
        device.rmsnorm_forward(s.x, weight(&self.norm1), s.n1, s.inv1, self.eps);
        device.rmsnorm_forward(s.x2, weight(&self.norm2), s.n2, s.inv2, self.eps);
        device.swiglu_forward(s.g, s.u, s.a);
    }

    /// Backward from a filled workspace, whose gate and up it consumes. `dy` is the gradient of the
    /// output and becomes that of the input; gradients of weights are added at `accumulator`, f32.
    pub fn backward(
        &self,
        device: &Device,
        map: &DeviceMap,
        used: BlockUse<'_>,
        dy: u64,
        accumulator: u64,
    ) {
        let act = device.activation_dtype();
        let s = self.activations(act, map, &used);
        let weight = |range: &TensorRange| tensor_view(used.weights, range, act);
        let gradient = |range: &TensorRange| tensor_view(accumulator, range, Dtype::F32);
        let scratch: &BackwardScratch = &map.backward_scratch;
        let temporary = |offset: u64, count: u64| View::new(map.backward + offset, count, act);
        let dy = View::new(dy, s.x.count, act);
        let (da, dn) = (
            temporary(scratch.da, s.a.count),
            temporary(scratch.dn, s.x.count),
        );

        // MLP: y = x2 + a·Wdᵀ.
        device.linear_backward_input(dy, weight(&self.down), da, self.inner, false);
        device.linear_backward_weight(dy, s.a, gradient(&self.down), self.inner);
        device.swiglu_backward(s.g, s.u, da, s.g, s.u);
        device.linear_backward_weight(s.g, s.n2, gradient(&self.gate), self.hidden);
        device.linear_backward_weight(s.u, s.n2, gradient(&self.up), self.hidden);
        device.linear_backward_input(s.g, weight(&self.gate), dn, self.hidden, false);
        device.linear_backward_input(s.u, weight(&self.up), dn, self.hidden, true);
        let norm2 = (weight(&self.norm2), gradient(&self.norm2));
        device.rmsnorm_backward(s.x2, norm2.0, s.inv2, dn, dy, norm2.1, true);

        // Attention: x2 = x + o·Woᵀ; dy is the gradient of x2 by now.
        let attention_width = self.heads * self.head_dim;
        let d_o = temporary(scratch.d_o, s.o.count);
        device.linear_backward_input(dy, weight(&self.o), d_o, attention_width, false);
        device.linear_backward_weight(dy, s.o, gradient(&self.o), attention_width);
        if let Some(bias) = &self.o_bias {
            device.bias_backward(dy, gradient(bias));
        }
        let dq = temporary(scratch.dq, s.q.count);
        let (dk, dv) = (
            temporary(scratch.dk, s.k.count),
            temporary(scratch.dv, s.v.count),
        );
        let shape = self.attention_shape(&used);
        device.attention_backward(s.q, s.k, s.v, s.o, s.lse, d_o, dq, dk, dv, shape);
        let (rope, positions) = (self.rope_table(map), &used.micro.positions);
        device.rope(dq, self.heads, self.head_dim, rope, positions, true);
        device.rope(dk, self.kv_heads, self.head_dim, rope, positions, true);
        if let (Some(q_norm), Some(k_norm)) = (&self.q_norm, &self.k_norm) {
            let (wq, wk) = (weight(q_norm), weight(k_norm));
            device.rmsnorm_backward(s.q_raw, wq, s.inv_q, dq, dq, gradient(q_norm), false);
            device.rmsnorm_backward(s.k_raw, wk, s.inv_k, dk, dk, gradient(k_norm), false);
        }
        for (d, matrix, bias) in [
            (dq, &self.q, &self.q_bias),
            (dk, &self.k, &self.k_bias),
            (dv, &self.v, &self.v_bias),
        ] {
            device.linear_backward_weight(d, s.n1, gradient(matrix), self.hidden);
            if let Some(bias) = bias {
                device.bias_backward(d, gradient(bias));
            }
            device.linear_backward_input(d, weight(matrix), dn, self.hidden, matrix != &self.q);
        }
        let norm1 = (weight(&self.norm1), gradient(&self.norm1));
        device.rmsnorm_backward(s.x, norm1.0, s.inv1, dn, dy, norm1.1, true);
    }

    fn rope_table(&self, map: &DeviceMap) -> View {
        View::new(map.rope, map.shape.seq_len * self.head_dim, Dtype::F32)
    }
}
