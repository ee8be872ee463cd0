//! Where everything lies in the device's arena: pure offset arithmetic.
//!
//! - A region starts on [`REGION_ALIGN`] bytes and is never moved during a run.
//! - Regions are sized for the most tokens that a micro-batch can have; a smaller one uses the
//!   front.
//! - The wide accumulator of an untied model serves the head and then the embedding: the schedule
//!   demotes the first before it clears it for the second.
//!
//! What is written into a region, and when, is `schedule`'s; the launches are `layer`'s.

use super::anchors::AnchorRows;
use super::{GradientHome, Home, TilePlan};
use crate::model::ModelSpec;
use crate::tile::{Precision, SECTION_COUNT, Section, TileLayout};

/// Alignment of a region, in bytes.
pub const REGION_ALIGN: u64 = 256;

/// Bytes of a map that no address space holds: sizes end here instead of wrapping around.
pub(super) const TOO_LARGE: u64 = u64::MAX;

/// Name of the part that holds sections and gradients that live on the device.
pub(super) const HOMES: &str = "sections and gradients at home";

/// Bytes of an f32.
const F32: u64 = 4;

/// The product, or [`TOO_LARGE`].
fn product(factors: [u64; 3]) -> u64 {
    factors.into_iter().fold(1, u64::saturating_mul)
}

/// By layer, the offset of a gradient that waits on the device.
type Parked = Vec<Option<u64>>;
/// By layer and section, the offset of what lives on the device.
type Homes = Vec<[Option<u64>; SECTION_COUNT]>;

/// A size in whole alignments, or [`TOO_LARGE`].
fn aligned(bytes: u64) -> u64 {
    bytes
        .checked_next_multiple_of(REGION_ALIGN)
        .unwrap_or(TOO_LARGE)
}

/// Hands out regions one after another.
#[derive(Default)]
struct Cutter {
    next: u64,
    /// Bytes by purpose, up to `next` at the last call of `part`.
    parts: Vec<(&'static str, u64)>,
}

impl Cutter {
    fn cut(&mut self, bytes: u64) -> u64 {
        let offset = self.next;
        self.next = aligned(offset.saturating_add(bytes));
        offset
    }

    fn cut_all(&mut self, count: u64, bytes: u64) -> Vec<u64> {
        (0..count).map(|_| self.cut(bytes)).collect()
    }

    /// Names what was cut since the last call.
    fn part(&mut self, name: &'static str) {
        let before: u64 = self.parts.iter().map(|(_, bytes)| bytes).sum();
        self.parts.push((name, self.next - before));
    }

    /// Homes of sections, and places of gradients that wait, by layer.
    fn cut_homes(
        &mut self,
        shape: &DeviceShape,
        tiles: &[TilePlan],
        rows: AnchorRows,
        [anchors, anchor_bytes]: [u64; 2],
    ) -> (Homes, Parked) {
        let row_bytes = anchor_bytes.saturating_mul(shape.micros);
        let mut homes = Vec::with_capacity(tiles.len());
        let mut parked = Vec::with_capacity(tiles.len());
        for (layer, tile) in (0..).zip(tiles) {
            homes.push(Section::ALL.map(|section| {
                let here = tile.homes[section as usize] == Some(Home::Device);
                here.then(|| self.cut(tile.layout.section_bytes(section, shape.precision)))
            }));
            let bytes = tile.layout.elements * shape.gradient_bytes;
            let waits = tile.gradient == GradientHome::Device;
            let row = rows.waiting(layer, bytes, row_bytes);
            let in_row = row.map(|row| anchors + u64::from(row) * row_bytes);
            parked.push(waits.then(|| in_row.unwrap_or_else(|| self.cut(bytes))));
        }
        (homes, parked)
    }

    /// Workspaces that are kept, the lean ones first.
    fn cut_kept(&mut self, shape: &DeviceShape, workspace: &BlockWorkspace) -> Vec<u64> {
        let mut kept = self.cut_all(shape.lean, workspace.lean_bytes);
        kept.extend(self.cut_all(shape.kept - shape.lean, workspace.bytes));
        kept
    }

    /// f32 accumulators of the head and the embed tile of that many elements. Tied, both are full
    /// until the end of backward; else the head's is done before the embed's begins: one region.
    fn cut_accumulators(&mut self, [head, embed]: [u64; 2], tied: bool) -> (u64, u64) {
        if tied {
            (self.cut(head * F32), self.cut(embed * F32))
        } else {
            let shared = self.cut(embed.max(head) * F32);
            (shared, shared)
        }
    }
}

/// Offsets, within a workspace, of what a block's forward leaves for its backward. `T` is the
/// capacity in tokens; act is the device's activation format. What passes can give back comes last:
/// where memory is short it is not kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockWorkspace {
    /// Inverse RMS of the input, f32 `[T]`.
    pub inv1: u64,
    /// Queries as attention sees them, act `[T, heads·D]`.
    pub q: u64,
    /// Keys, act `[T, kv_heads·D]`.
    pub k: u64,
    /// Values, act `[T, kv_heads·D]`.
    pub v: u64,
    /// Queries before their norm, act `[T, heads·D]`; only with q/k norm.
    pub q_raw: u64,
    /// Keys before their norm, act `[T, kv_heads·D]`; only with q/k norm.
    pub k_raw: u64,
    /// Inverse RMS of each query head, f32 `[T, heads]`; only with q/k norm.
    pub inv_q: u64,
    /// Inverse RMS of each key head, f32 `[T, kv_heads]`; only with q/k norm.
    pub inv_k: u64,
    /// Attention's output, act `[T, heads·D]`.
    pub o: u64,
    /// Log-sum-exp, f32 `[heads, T]`.
    pub lse: u64,
    /// Residual stream after attention, act `[T, H]`.
    pub x2: u64,
    /// Inverse RMS of x2, f32 `[T]`.
    pub inv2: u64,
    /// Gate, act `[T, I]`.
    pub g: u64,
    /// Up, act `[T, I]`.
    pub u: u64,
    /// Bytes up to here: what follows is computed from it without a product.
    pub lean_bytes: u64,
    /// Normed input, act `[T, H]`.
    pub n1: u64,
    /// Normed x2, act `[T, H]`.
    pub n2: u64,
    /// silu(gate)·up, act `[T, I]`.
    pub a: u64,
    /// Bytes of the whole.
    pub bytes: u64,
}

impl BlockWorkspace {
    /// Offsets for `tokens` of capacity and activations of `act` bytes.
    pub fn new(spec: &ModelSpec, tokens: u64, act: u64) -> BlockWorkspace {
        let mut cutter = Cutter::default();
        let (q, kv) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        let normed = u64::from(spec.qk_norm);
        let mut rows = |width: u64, bytes: u64| cutter.cut(product([tokens, width, bytes]));
        let mut workspace = BlockWorkspace {
            inv1: rows(1, F32),
            q: rows(q, act),
            k: rows(kv, act),
            v: rows(kv, act),
            q_raw: rows(q * normed, act),
            k_raw: rows(kv * normed, act),
            inv_q: rows(spec.heads * normed, F32),
            inv_k: rows(spec.kv_heads * normed, F32),
            o: rows(q, act),
            lse: rows(spec.heads, F32),
            x2: rows(spec.hidden, act),
            inv2: rows(1, F32),
            g: rows(spec.intermediate, act),
            u: rows(spec.intermediate, act),
            lean_bytes: rows(0, act),
            n1: rows(spec.hidden, act),
            n2: rows(spec.hidden, act),
            a: rows(spec.intermediate, act),
            bytes: 0,
        };
        workspace.bytes = cutter.next;
        workspace
    }

    /// How many of `pairs` are kept in `room` bytes, and how many of these lean: as many as there
    /// is room for lean, since the rest saves products; then as many of them whole as still fit.
    pub(super) fn kept_in(&self, room: u64, pairs: u64) -> (u64, u64) {
        let lean = self.lean_bytes.max(1);
        let kept = pairs.min(room / lean);
        let more = (self.bytes - self.lean_bytes).max(1);
        let whole = kept.min((room - kept * lean) / more);
        (kept, kept - whole)
    }
}

/// Offsets of a block backward's own scratch; used between launches, never kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackwardScratch {
    /// Gradient of silu(gate)·up, act `[T, I]`.
    pub da: u64,
    /// Gradient of a norm's output, act `[T, H]`.
    pub dn: u64,
    /// Gradient of attention's output, act `[T, heads·D]`.
    pub d_o: u64,
    /// Gradient of queries, act `[T, heads·D]`.
    pub dq: u64,
    /// Gradient of keys, act `[T, kv_heads·D]`.
    pub dk: u64,
    /// Gradient of values, act `[T, kv_heads·D]`.
    pub dv: u64,
    /// Bytes of the whole.
    pub bytes: u64,
}

impl BackwardScratch {
    fn new(spec: &ModelSpec, tokens: u64, act: u64) -> BackwardScratch {
        let mut cutter = Cutter::default();
        let (q, kv) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        let mut rows = |width: u64| cutter.cut(product([tokens, width, act]));
        let mut scratch = BackwardScratch {
            da: rows(spec.intermediate),
            dn: rows(spec.hidden),
            d_o: rows(q),
            dq: rows(q),
            dk: rows(kv),
            dv: rows(kv),
            bytes: 0,
        };
        scratch.bytes = cutter.next;
        scratch
    }
}

/// Offsets of the head's scratch. `R` is [`HeadScratch::chunk_rows`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadScratch {
    /// Rows of logits at a time: fixed by the model, never by the plan (invariant 1).
    pub chunk_rows: u64,
    /// Normed hidden states, act `[T, H]`.
    pub normed: u64,
    /// Their gradient, act `[T, H]`.
    pub d_normed: u64,
    /// Inverse RMS, f32 `[T]`.
    pub inv: u64,
    /// Losses, f32 `[T]`.
    pub losses: u64,
    /// Rows with a target, act `[R, H]`.
    pub chunk: u64,
    /// Their gradient, act `[R, H]`.
    pub d_chunk: u64,
    /// Logits and their gradient, act `[R, V]`.
    pub logits: u64,
    /// Bytes of the whole.
    pub bytes: u64,
}

impl HeadScratch {
    fn new(spec: &ModelSpec, tokens: u64, act: u64) -> HeadScratch {
        let chunk_rows = loss_chunk_rows(spec.vocab_size, act);
        let mut cutter = Cutter::default();
        let rows = chunk_rows.min(tokens);
        let mut scratch = HeadScratch {
            chunk_rows,
            normed: cutter.cut(product([tokens, spec.hidden, act])),
            d_normed: cutter.cut(product([tokens, spec.hidden, act])),
            inv: cutter.cut(tokens * F32),
            losses: cutter.cut(tokens * F32),
            chunk: cutter.cut(rows * spec.hidden * act),
            d_chunk: cutter.cut(rows * spec.hidden * act),
            logits: cutter.cut(rows * spec.vocab_size * act),
            bytes: 0,
        };
        scratch.bytes = cutter.next;
        scratch
    }
}

/// Rows of logits computed at a time, in whole 64s: about 16 Mi logits where activations are f32.
/// Where they are bf16, on a card, as many as 320 Mi, since each chunk adds to the whole of the
/// matrix's f32 gradient: with few rows that traffic would cost more than the products.
///
/// For a vocabulary of 49,152 in f32 these are 320 rows, 63 MB; for one of 152,064 in bf16 they are
/// 2,176 rows, 662 MB.
pub fn loss_chunk_rows(vocab_size: u64, activation_bytes: u64) -> u64 {
    let (logits, most) = if activation_bytes == 2 {
        (320 << 20, 4096)
    } else {
        (16 << 20, 1024)
    };
    (logits / vocab_size / 64 * 64).clamp(64, most)
}

/// What the arena must be able to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceShape {
    /// Most tokens of a micro-batch.
    pub tokens: u64,
    /// Longest sequence.
    pub seq_len: u64,
    /// Micro-batches of a step.
    pub micros: u64,
    /// Buffers of block weights.
    pub buffers: u64,
    /// (block, micro) pairs whose activations are kept.
    pub kept: u64,
    /// So many of these, the first, without what passes give back.
    pub lean: u64,
    /// Layers 1 to here, inclusive, have their anchors elsewhere between forward and backward.
    pub travelling: u16,
    /// So many blocks have anchors that are computed again for their backward.
    pub rebuilt: u16,
    /// Bytes of an activation.
    pub activation_bytes: u64,
    /// The device computes on copies of the weights in its activation format.
    pub converts_weights: bool,
    /// Format of weights.
    pub precision: Precision,
    /// Bytes of an element of a finished gradient.
    pub gradient_bytes: u64,
    /// Gradients and kept activations are needed; a forward-only map has neither.
    pub trains: bool,
}

/// Byte offsets of every region of the device's arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceMap {
    /// The shape it was made for.
    pub shape: DeviceShape,
    /// Weight sections of blocks: slots of the double buffer.
    pub buffers: Vec<u64>,
    /// Weight section of the head tile.
    pub head_weight: u64,
    /// Weight section of the embed tile, which a tied head computes with; absent if untied.
    pub tied_weight: Option<u64>,
    /// Copies in the activation format of the layer that is bound; absent if not converted.
    pub compute_weight: Option<u64>,
    /// f32 gradient accumulators of blocks, two.
    pub accumulators: Vec<u64>,
    /// f32 accumulator of the head tile.
    pub head_accumulator: u64,
    /// f32 accumulator of the embed tile.
    pub embed_accumulator: u64,
    /// Anchors: the input of each block and of the head, by row then micro.
    pub anchors: u64,
    /// Which layer's anchors lie in which row.
    pub anchor_rows: AnchorRows,
    /// Bytes from one anchor to the next.
    pub anchor_bytes: u64,
    /// By layer and section: the section's home, where that is the device.
    pub homes: Vec<[Option<u64>; SECTION_COUNT]>,
    /// By layer: where its finished gradient waits, where that is the device: in a region of its
    /// own, or in the row of its anchors.
    pub parked: Vec<Option<u64>>,
    /// cos and sin of every position, f32 `[seq_len, 2, D/2]`.
    pub rope: u64,
    /// Offsets within a workspace.
    pub workspace: BlockWorkspace,
    /// Workspace of a block that is not kept.
    pub shared_workspace: u64,
    /// Workspaces that are kept from forward to backward.
    pub kept: Vec<u64>,
    /// Base of the backward scratch.
    pub backward: u64,
    /// Offsets within it.
    pub backward_scratch: BackwardScratch,
    /// Base of the head's scratch.
    pub head: u64,
    /// Offsets within it.
    pub head_scratch: HeadScratch,
    /// Bytes by purpose, for the plan's table.
    pub parts: Vec<(&'static str, u64)>,
    /// Bytes of the arena.
    pub bytes: u64,
}

impl DeviceMap {
    /// Lays out the arena for `shape` and for what `tiles` have on the device; none for a map
    /// without homes.
    pub fn new(spec: &ModelSpec, shape: DeviceShape, tiles: &[TilePlan]) -> DeviceMap {
        let act = shape.activation_bytes;
        let layout = |layer: u16| spec.tile_layout(layer);
        let (embed, block, head) = (layout(0), layout(1), layout(spec.layer_count() - 1));
        let weight = |of: &TileLayout| of.section_bytes(Section::Weight, shape.precision);
        let train = u64::from(shape.trains);
        let mut cutter = Cutter::default();

        let buffers = cutter.cut_all(shape.buffers, weight(&block));
        let head_weight = cutter.cut(weight(&head));
        let tied_weight = spec.tied.then(|| cutter.cut(weight(&embed)));
        cutter.part("weight buffers");

        let head_elements = head.elements + if spec.tied { embed.elements } else { 0 };
        let compute_weight = shape
            .converts_weights
            .then(|| cutter.cut(block.elements.max(head_elements) * act));
        cutter.part("weights in the arithmetic's format");

        let accumulators = cutter.cut_all(2, block.elements * F32 * train);
        let ends = [head.elements, embed.elements].map(|elements| elements * train);
        let (head_accumulator, embed_accumulator) = cutter.cut_accumulators(ends, spec.tied);
        cutter.part("gradient accumulators");

        let anchor_bytes = aligned(product([shape.tokens, spec.hidden, act]));
        let anchor_rows = AnchorRows::new(spec.blocks, shape.travelling, shape.rebuilt);
        let rows = anchor_rows.count(shape.trains);
        let anchors = cutter.cut(product([anchor_bytes, rows, shape.micros]));
        cutter.part("anchors");
        let (homes, parked) = cutter.cut_homes(&shape, tiles, anchor_rows, [anchors, anchor_bytes]);
        cutter.part(HOMES);
        let workspace = BlockWorkspace::new(spec, shape.tokens, act);
        let kept = cutter.cut_kept(&shape, &workspace);
        cutter.part("kept activations");
        let rope = cutter.cut(shape.seq_len * spec.head_dim * F32);
        // Blocks and head never compute at once.
        let scratch = cutter.next;
        let shared_workspace = cutter.cut(workspace.bytes);
        let backward_scratch = BackwardScratch::new(spec, shape.tokens, act);
        let backward = cutter.cut(backward_scratch.bytes * train);
        let head_scratch = HeadScratch::new(spec, shape.tokens, act);
        cutter.next = cutter.next.max(scratch.saturating_add(head_scratch.bytes));
        cutter.part("scratch");

        DeviceMap {
            shape,
            buffers,
            head_weight,
            tied_weight,
            compute_weight,
            accumulators,
            head_accumulator,
            embed_accumulator,
            anchors,
            anchor_rows,
            anchor_bytes,
            homes,
            parked,
            rope,
            workspace,
            shared_workspace,
            kept,
            backward,
            backward_scratch,
            head: scratch,
            head_scratch,
            bytes: cutter.next,
            parts: cutter.parts,
        }
    }

    /// Whether a layer's gradient waits where its anchors were.
    pub fn waits_in_row(&self, layer: u16) -> bool {
        let at = self.parked[usize::from(layer)];
        at.is_some_and(|at| layer > 0 && at == self.anchor(layer, 0))
    }

    /// Offset of the anchor that is the input of layer `layer` (1..=blocks + 1) for `micro`. The
    /// forward-only form computes in place on those of layer 1.
    pub fn anchor(&self, layer: u16, micro: u32) -> u64 {
        let row = u64::from(self.anchor_rows.row(layer));
        assert!(
            row == 0 || self.shape.trains,
            "a forward-only map has anchors of one layer"
        );
        self.anchors + (row * self.shape.micros + u64::from(micro)) * self.anchor_bytes
    }

    /// Where a block's activations are for which `slot` is kept, or nothing; and where those that
    /// passes give back are: bases of offsets within a workspace.
    pub fn activations(&self, slot: Option<u32>) -> (u64, u64) {
        let base = slot.map_or(self.shared_workspace, |slot| self.kept[slot as usize]);
        let is_lean = slot.is_some_and(|slot| self.is_lean(slot));
        (base, if is_lean { self.shared_workspace } else { base })
    }

    /// Whether what a slot keeps lacks what passes give back.
    pub fn is_lean(&self, slot: u32) -> bool {
        u64::from(slot) < self.shape.lean
    }

    /// Bytes of a slot of kept activations.
    pub fn kept_bytes(&self, slot: u32) -> u64 {
        match self.is_lean(slot) {
            true => self.workspace.lean_bytes,
            false => self.workspace.bytes,
        }
    }
}
