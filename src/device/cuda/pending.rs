use super::*;
use crate::device::ops::{AttentionShape, SortedTokens};
#[allow(unused_variables, clippy::too_many_arguments, dead_code)]
impl CudaDevice {
    pub(in crate::device) fn fill(&self, out: View, value: f32) {
        unimplemented!()
    }
    pub(in crate::device) fn convert(&self, src: View, out: View) {
        unimplemented!()
    }
    pub(in crate::device) fn add(&self, a: View, b: View, out: View) {
        unimplemented!()
    }
    pub(in crate::device) fn rmsnorm_forward(
        &self,
        x: View,
        w: View,
        y: View,
        inv: View,
        eps: f32,
    ) {
        unimplemented!()
    }
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
        unimplemented!()
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
        unimplemented!()
    }
    pub(in crate::device) fn bias_backward(&self, dy: View, db: View) {
        unimplemented!()
    }
    pub(in crate::device) fn attention_forward(
        &self,
        q: View,
        k: View,
        v: View,
        o: View,
        lse: View,
        shape: AttentionShape<'_>,
    ) {
        unimplemented!()
    }
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
        unimplemented!()
    }
    pub(in crate::device) fn swiglu_forward(&self, g: View, u: View, a: View) {
        unimplemented!()
    }
    pub(in crate::device) fn swiglu_backward(
        &self,
        g: View,
        u: View,
        da: View,
        dg: View,
        du: View,
    ) {
        unimplemented!()
    }
    pub(in crate::device) fn gather_rows(&self, x: View, rows: &[u32], out: View, columns: u64) {
        unimplemented!()
    }
    pub(in crate::device) fn scatter_rows(&self, x: View, rows: &[u32], out: View, columns: u64) {
        unimplemented!()
    }
    pub(in crate::device) fn cross_entropy(
        &self,
        z: View,
        targets: &[u32],
        scale: f32,
        losses: View,
    ) {
        unimplemented!()
    }
    pub(in crate::device) fn cross_entropy_loss(&self, z: View, targets: &[u32], losses: View) {
        unimplemented!()
    }
    pub(in crate::device) fn embed_backward(
        &self,
        dy: View,
        order: &SortedTokens,
        dw: View,
        hidden: u64,
    ) {
        unimplemented!()
    }
    pub(in crate::device) fn squared_norm(&self, x: View) -> f64 {
        unimplemented!()
    }
    pub(in crate::device) fn sum(&self, x: View) -> f64 {
        unimplemented!()
    }
    pub(in crate::device) fn round_in_place(&self, x: View) {
        unimplemented!()
    }
}
