//! The head: final norm, logits in chunks of rows that have a target, loss and its gradient fused.
//!
//! ```text
//! n = norm(x)·w                          z = n[rows]·Wᵀ
//! loss = logsumexp(z) − z[target]        dz = (softmax(z) − onehot)/count
//! ```

use super::{range_of, tensor_view};
use crate::data::{IGNORE, Micro};
use crate::device::{Device, Dtype, Number, View};
use crate::model::ModelSpec;
use crate::plan::regions::DeviceMap;
use crate::tile::TensorRange;

/// Launch list of the head.
pub struct HeadTemplate {
    hidden: u64,
    vocab: u64,
    eps: f32,
    norm: TensorRange,
    /// In the head tile, or in the embed tile if tied.
    matrix: TensorRange,
    tied: bool,
}

/// What one use of the template is given: offsets in the device's arena.
#[derive(Clone, Copy)]
pub struct HeadUse<'a> {
    /// Tokens and targets.
    pub micro: &'a Micro,
    /// The head tile's weights in the activation format.
    pub weights: u64,
    /// The embed tile's weights in the activation format; only read if tied.
    pub tied_weights: u64,
    /// Hidden states, act `[T, H]`.
    pub x: u64,
}

/// Offsets of the accumulators that the head adds to, f32.
#[derive(Clone, Copy)]
pub struct HeadAccumulators {
    /// The head tile's.
    pub head: u64,
    /// The embed tile's; only written if tied.
    pub embed: u64,
}

impl HeadTemplate {
    /// The launch list for the head of `spec`.
    pub fn new(spec: &ModelSpec) -> HeadTemplate {
        let head = spec.tile_layout(spec.layer_count() - 1);
        let embed = spec.tile_layout(0);
        let matrix = if spec.tied {
            range_of(&embed, "embed_tokens.weight")
        } else {
            range_of(&head, "lm_head.weight")
        };
        HeadTemplate {
            hidden: spec.hidden,
            vocab: spec.vocab_size,
            eps: spec.rms_eps,
            norm: range_of(&head, "norm.weight").expect("the head has a norm"),
            matrix: matrix.expect("a model has an output matrix"),
            tied: spec.tied,
        }
    }

    fn views(&self, device: &Device, map: &DeviceMap, used: &HeadUse<'_>) -> (View, View, View) {
        let act = device.activation_dtype();
        let tokens = used.micro.tokens.len() as u64;
        let x = View::new(used.x, tokens * self.hidden, act);
        let normed = View::new(map.head + map.head_scratch.normed, x.count, act);
        let inv = View::new(map.head + map.head_scratch.inv, tokens, Dtype::F32);
        (x, normed, inv)
    }

    fn matrix(&self, act: Dtype, used: &HeadUse<'_>) -> View {
        let base = if self.tied {
            used.tied_weights
        } else {
            used.weights
        };
        tensor_view(base, &self.matrix, act)
    }

    /// Sum of the losses of the micro-batch's targets. With accumulators also the gradient: dHidden
    /// replaces `x`, weights' gradients are added. `denominator` is the step's count of targets.
    pub fn loss(
        &self,
        device: &Device,
        map: &DeviceMap,
        used: HeadUse<'_>,
        denominator: u64,
        gradients: Option<HeadAccumulators>,
    ) -> Number {
        let act = device.activation_dtype();
        let (x, normed, inv) = self.views(device, map, &used);
        let norm = tensor_view(used.weights, &self.norm, act);
        let matrix = self.matrix(act, &used);
        device.rmsnorm_forward(x, norm, normed, inv, self.eps);
        let targets = &used.micro.targets;
        let rows: Vec<u32> = (0..)
            .zip(targets)
            .filter(|(_, t)| **t != IGNORE)
            .map(|(r, _)| r)
            .collect();
        let scratch = &map.head_scratch;
        let d_normed = View::new(map.head + scratch.d_normed, x.count, act);
        let losses = View::new(map.head + scratch.losses, rows.len() as u64, Dtype::F32);
        if gradients.is_some() {
            device.fill(d_normed, 0.0);
        }
        let scale = 1.0 / denominator as f32;
        let chunk_rows = usize::try_from(scratch.chunk_rows).expect("at most 4096");
        for (index, rows) in rows.chunks(chunk_rows).enumerate() {
            let count = rows.len() as u64;
            let chunk = View::new(map.head + scratch.chunk, count * self.hidden, act);
            let logits = View::new(map.head + scratch.logits, count * self.vocab, act);
            let chosen: Vec<u32> = rows.iter().map(|row| targets[*row as usize]).collect();
            let losses = losses.slice((index * chunk_rows) as u64, count);
            device.gather_rows(normed, rows, chunk, self.hidden);
            device.linear_forward(chunk, matrix, None, logits, self.hidden, false);
            let Some(accumulators) = gradients else {
                device.cross_entropy_loss(logits, &chosen, losses);
                continue;
            };
            device.cross_entropy(logits, &chosen, scale, losses);
            let base = if self.tied {
                accumulators.embed
            } else {
                accumulators.head
            };
            let d_matrix = tensor_view(base, &self.matrix, Dtype::F32);
            let d_chunk = View::new(map.head + scratch.d_chunk, count * self.hidden, act);
            device.linear_backward_weight(logits, chunk, d_matrix, self.hidden);
            device.linear_backward_input(logits, matrix, d_chunk, self.hidden, false);
            device.scatter_rows(d_chunk, rows, d_normed, self.hidden);
        }
        if let Some(accumulators) = gradients {
            let d_norm = tensor_view(accumulators.head, &self.norm, Dtype::F32);
            device.rmsnorm_backward(x, norm, inv, d_normed, d_normed, d_norm, false);
            device.convert(d_normed, x);
        }
        device.sum(losses)
    }

    /// Logits of the given rows, `rows.len() × V` numbers.
    pub fn logits(
        &self,
        device: &Device,
        map: &DeviceMap,
        used: HeadUse<'_>,
        rows: &[u32],
    ) -> Vec<f32> {
        let act = device.activation_dtype();
        let (x, normed, inv) = self.views(device, map, &used);
        device.rmsnorm_forward(
            x,
            tensor_view(used.weights, &self.norm, act),
            normed,
            inv,
            self.eps,
        );
        let scratch = &map.head_scratch;
        let chunk_rows = usize::try_from(scratch.chunk_rows).expect("at most 4096");
        let mut numbers = Vec::with_capacity(rows.len() * self.vocab as usize);
        for rows in rows.chunks(chunk_rows) {
            let count = rows.len() as u64;
            let chunk = View::new(map.head + scratch.chunk, count * self.hidden, act);
            let logits = View::new(map.head + scratch.logits, count * self.vocab, act);
            device.gather_rows(normed, rows, chunk, self.hidden);
            device.linear_forward(
                chunk,
                self.matrix(act, &used),
                None,
                logits,
                self.hidden,
                false,
            );
            numbers.extend(device.read_f32(logits));
        }
        numbers
    }
}
