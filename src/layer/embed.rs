//! The embedding: its forward is a gather by `transfer`, so only its backward is a launch.

use crate::data::Micro;
use crate::device::ops::SortedTokens;
use crate::device::{Device, Dtype, View};

/// Adds a micro-batch's gradient to the embedding's accumulator: dw\[id\] += Σ dy over its
/// positions. dy act `[T, H]`, `accumulator` f32 `[V, H]`.
pub fn embed_backward(
    device: &Device,
    micro: &Micro,
    order: &SortedTokens,
    hidden: u64,
    dy: u64,
    accumulator: View,
) {
    let tokens = micro.tokens.len() as u64;
    let dy = View::new(dy, tokens * hidden, device.activation_dtype());
    assert_eq!(accumulator.dtype, Dtype::F32);
    device.embed_backward(dy, order, accumulator, hidden);
}
