//! Templates: the launch list of each kind of layer, without weights.
//!
//! - A template owns nothing: no weights, no gradients, no device memory (invariant 9). It is given
//!   the arena's offsets of what it reads and writes for one use.
//! - Recompute and keep run the same launches on another workspace, so their bits are the same.
//! - The order of launches that add to one accumulator is fixed.
//!
//! Where weights come from is not known here; when a template runs is `step`'s.

mod block;
mod embed;
mod head;

pub use block::{BlockTemplate, BlockUse};
pub use embed::embed_backward;
pub use head::{HeadAccumulators, HeadTemplate, HeadUse};

use crate::device::{Dtype, View};
use crate::tile::{TensorRange, TileLayout};

/// The element range of a tensor, by the end of its name.
fn range_of(layout: &TileLayout, suffix: &str) -> Option<TensorRange> {
    layout
        .tensors
        .iter()
        .find(|tensor| tensor.name.ends_with(suffix))
        .cloned()
}

/// The tensor's view in a tile's weights or accumulator that begins at byte `base`.
fn tensor_view(base: u64, range: &TensorRange, dtype: Dtype) -> View {
    View::new(base + range.start * dtype.bytes(), range.count, dtype)
}
