//! What a token costs to compute: products, attention, and bytes between them.

use crate::model::ModelSpec;

/// Arithmetic of one token: FLOPs two a multiply-add, causal attention counted at half its square,
/// at the longest sequence; bytes that passes between the products read and write.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Flops {
    /// A block's forward, attention included.
    pub block: f64,
    /// Its last product's part of it, which a recomputation leaves out: backward does not need y.
    pub last: f64,
    /// Attention's part of it.
    pub attention: f64,
    /// Width of a head.
    pub head_dim: f64,
    /// The head's forward.
    pub head: f64,
    /// Bytes of norms, rotations, residuals and SwiGLU in a block's forward.
    pub forward_bytes: f64,
    /// In its backward.
    pub backward_bytes: f64,
    /// In giving back what lean kept activations lack.
    pub restored_bytes: f64,
    /// Bytes of the head's loss and norm, both ways.
    pub head_bytes: f64,
}

impl Flops {
    pub(super) fn new(spec: &ModelSpec, seq_len: u64, activation_bytes: u64) -> Flops {
        let matrices = spec.tile_layout(1).decayed_elements as f64;
        let attention = 2.0 * (seq_len * spec.heads * spec.head_dim) as f64;
        let rotated = (spec.heads + spec.kv_heads) * spec.head_dim;
        let (hidden, inner) = (spec.hidden, spec.intermediate);
        // What each pass reads and writes, counted in elements.
        let bytes = |elements: u64| (elements * activation_bytes) as f64;
        Flops {
            block: 2.0 * matrices + attention,
            last: 2.0 * (hidden * inner) as f64,
            attention,
            head_dim: spec.head_dim as f64,
            head: 2.0 * (spec.vocab_size * hidden) as f64,
            forward_bytes: bytes(8 * hidden + 2 * rotated + 3 * inner),
            backward_bytes: bytes(8 * hidden + 2 * rotated + 5 * inner),
            restored_bytes: bytes(4 * hidden + 3 * inner),
            head_bytes: bytes(3 * spec.vocab_size + 10 * hidden),
        }
    }
}
