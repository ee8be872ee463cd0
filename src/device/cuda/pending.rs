use super::*;
use crate::device::ops::AttentionShape;
#[allow(unused_variables, clippy::too_many_arguments, dead_code)]
impl CudaDevice {
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
}
