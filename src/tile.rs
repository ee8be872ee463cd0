//! Tiles: one layer's whole state, and all arithmetic of offsets within it.
//!
//! - A tile has up to four sections (weight, residual, moment1, moment2), each contiguous in every
//!   tier, each starting on [`PAGE_BYTES`], all indexed by the same element.
//! - Decayed tensors come first, so weight decay is one split of the element range.
//! - Every tensor starts on [`TENSOR_ALIGN`] elements; the padding between is zero and stays zero.
//! - An extent is [`EXTENT_ELEMENTS`] elements of one section: at most 4 MiB, the unit of I/O,
//!   checksum, generation and codec. Extent k of every section covers the same elements.
//! - The fp32 master is weight and residual together: [`split_master`], [`join_master`].
//!
//! Nothing here touches memory of a tier. Where tiles live is `plan`; what moves them, `transfer`.

use std::fmt;
use std::ops::Range;

/// Alignment of sections and of direct I/O, in bytes.
pub const PAGE_BYTES: u64 = 4096;
/// Elements of an extent; the last one of a section may be shorter.
pub const EXTENT_ELEMENTS: u64 = 1 << 20;
/// Most bytes that an extent can have: f32 elements.
pub const EXTENT_BYTES_MAX: u64 = EXTENT_ELEMENTS * 4;
/// Elements at whose multiples a tensor may start: 256 bytes of f32.
pub const TENSOR_ALIGN: u64 = 64;
/// Most sections that a tile can have.
pub const SECTION_COUNT: usize = 4;

const _: () = assert!(
    (EXTENT_ELEMENTS * 2).is_multiple_of(PAGE_BYTES),
    "an extent of bf16 is whole pages"
);

/// Numeric formats of a run's weights, master and moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// bf16 weights and an i16 residual: together an exact fp32 master.
    Bf16,
    /// f32 weights, no residual.
    Fp32,
    /// As [`Precision::Bf16`], with bf16 moments: 8 bytes a parameter, and inexact.
    Bf16Moments,
}

/// Numeric format of AdamW's moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MomentDtype {
    /// Exact.
    F32,
    /// Rounded stochastically each step.
    Bf16,
}

/// Numeric format of gradients on their way from the device to the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GradientDtype {
    /// Rounded once (nearest, ties to even) after accumulation in f32.
    Bf16,
    /// As accumulated.
    F32,
}

impl GradientDtype {
    /// Bytes of an element.
    pub fn bytes(self) -> u64 {
        match self {
            GradientDtype::Bf16 => 2,
            GradientDtype::F32 => 4,
        }
    }
}

/// Names a tile: a layer of the model, and a part of it (0 until layers have several tiles).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TileId {
    /// Index of the layer in the model's order: 0 embed, 1..=L blocks, L + 1 head.
    pub layer: u16,
    /// Part of the layer.
    pub part: u16,
}

impl fmt::Display for TileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tile {}.{}", self.layer, self.part)
    }
}

/// A part of a tile: the unit of placement. [`Section::Anchor`] is none, but lies in a store as
/// sections do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Section {
    /// bf16, or f32 under [`Precision::Fp32`].
    Weight = 0,
    /// i16: what the bf16 weight lacks of the fp32 master. Absent under [`Precision::Fp32`].
    Residual = 1,
    /// AdamW's first moment: f32, or bf16 under [`Precision::Bf16Moments`].
    Moment1 = 2,
    /// AdamW's second moment, in the first one's format.
    Moment2 = 3,
    /// A layer's input for one micro-batch, which is the tile's part, between forward and backward:
    /// in words of four bytes, whatever the device computes in. Never in a checkpoint.
    Anchor = 4,
}

impl Section {
    /// All sections of a tile, in the order in which it stores them.
    pub const ALL: [Section; SECTION_COUNT] = [
        Section::Weight,
        Section::Residual,
        Section::Moment1,
        Section::Moment2,
    ];

    /// Bytes of an element; 0 where the section is absent.
    pub fn element_bytes(self, precision: Precision) -> u64 {
        match (self, precision) {
            (Section::Residual, Precision::Fp32) => 0,
            (Section::Weight, Precision::Fp32) => 4,
            (Section::Weight | Section::Residual, _) => 2,
            (Section::Moment1 | Section::Moment2, Precision::Bf16Moments) => 2,
            (Section::Moment1 | Section::Moment2 | Section::Anchor, _) => 4,
        }
    }

    /// Whether it is one of AdamW's moments.
    pub fn is_moment(self) -> bool {
        matches!(self, Section::Moment1 | Section::Moment2)
    }

    /// Those present under `precision`, in order.
    pub fn present(precision: Precision) -> impl Iterator<Item = Section> {
        Section::ALL
            .into_iter()
            .filter(move |s| s.element_bytes(precision) > 0)
    }

    /// The section of a number on disk.
    pub fn from_index(index: u8) -> Option<Section> {
        Section::ALL.get(usize::from(index)).copied()
    }
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Section::Weight => "weight",
            Section::Residual => "residual",
            Section::Moment1 => "moment1",
            Section::Moment2 => "moment2",
            Section::Anchor => "anchor",
        })
    }
}

/// Where a tensor lies in its tile's element range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorRange {
    /// Name in Hugging Face's files.
    pub name: String,
    /// Shape, outermost first.
    pub shape: Vec<u64>,
    /// First element, a multiple of [`TENSOR_ALIGN`].
    pub start: u64,
    /// Elements: the product of the shape.
    pub count: u64,
}

impl TensorRange {
    /// Elements that the tensor covers.
    pub fn elements(&self) -> Range<u64> {
        self.start..self.start + self.count
    }
}

/// Table of tensor → element range within a tile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileLayout {
    /// The tile.
    pub id: TileId,
    /// Its tensors in element order: decayed ones (rank ≥ 2) first.
    pub tensors: Vec<TensorRange>,
    /// Elements of each section, padding included; a multiple of [`TENSOR_ALIGN`].
    pub elements: u64,
    /// Elements before this one are decayed.
    pub decayed_elements: u64,
    /// Elements that are parameters: `elements` without padding.
    pub parameters: u64,
}

impl TileLayout {
    /// Lays out tensors given as (name, shape), keeping their order among decayed and others.
    /// Shapes must have been checked against a cap; their products are checked again here.
    ///
    /// # Panics
    /// If a shape's product does not fit in 63 bits.
    pub fn new(id: TileId, tensors: &[(String, Vec<u64>)]) -> TileLayout {
        let mut layout = TileLayout {
            id,
            tensors: Vec::with_capacity(tensors.len()),
            elements: 0,
            decayed_elements: 0,
            parameters: 0,
        };
        for decayed in [true, false] {
            for (name, shape) in tensors
                .iter()
                .filter(|(_, shape)| (shape.len() >= 2) == decayed)
            {
                let count = shape
                    .iter()
                    .try_fold(1u64, |product, dim| product.checked_mul(*dim))
                    .filter(|count| *count < 1 << 62)
                    .expect("tensor shapes are checked when the model is read");
                layout.tensors.push(TensorRange {
                    name: name.clone(),
                    shape: shape.clone(),
                    start: layout.elements,
                    count,
                });
                layout.parameters += count;
                layout.elements = (layout.elements + count).next_multiple_of(TENSOR_ALIGN);
            }
            if decayed {
                layout.decayed_elements = layout.elements;
            }
        }
        layout
    }

    /// Bytes of a section, without the padding to a page.
    pub fn section_bytes(&self, section: Section, precision: Precision) -> u64 {
        self.elements * section.element_bytes(precision)
    }

    /// Bytes of a section in a tier's slot: whole pages.
    pub fn section_slot_bytes(&self, section: Section, precision: Precision) -> u64 {
        self.section_bytes(section, precision)
            .next_multiple_of(PAGE_BYTES)
    }

    /// Extents of each section.
    pub fn extent_count(&self) -> u32 {
        u32::try_from(self.elements.div_ceil(EXTENT_ELEMENTS)).expect("a tile has < 2^52 elements")
    }

    /// Elements of extent `index` of every section.
    pub fn extent_elements(&self, index: u32) -> Range<u64> {
        let start = u64::from(index) * EXTENT_ELEMENTS;
        assert!(
            start < self.elements,
            "extent {index} of {} is past its end",
            self.id
        );
        start..(start + EXTENT_ELEMENTS).min(self.elements)
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorRange> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}

/// Splits an fp32 value into the bf16 bits that the device sees and the residual: nearest, ties
/// away from zero. Wrapping, so [`join_master`] restores every bit pattern.
///
/// ```
/// let (hi, lo) = terrace::tile::split_master(1.0e-3);
/// assert_eq!(terrace::tile::join_master(hi, lo), 1.0e-3);
/// ```
#[inline]
pub fn split_master(value: f32) -> (u16, i16) {
    let bits = value.to_bits();
    let hi = bits.wrapping_add(0x8000) >> 16;
    (hi as u16, bits.wrapping_sub(hi << 16) as i16)
}

/// The fp32 value of a bf16 weight and its residual.
#[inline]
pub fn join_master(hi: u16, lo: i16) -> f32 {
    f32::from_bits((u32::from(hi) << 16).wrapping_add(i32::from(lo) as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_then_join_restores_every_high_half_and_edge() {
        for hi in 0..=u16::MAX {
            for lo in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let bits = (u32::from(hi) << 16) | lo;
                let (h, l) = split_master(f32::from_bits(bits));
                assert_eq!(join_master(h, l).to_bits(), bits);
            }
        }
    }

    #[test]
    fn layout_has_no_overlap_and_only_alignment_gaps() {
        let tensors = vec![
            ("norm".to_string(), vec![70]),
            ("w".to_string(), vec![3, 5]),
            ("b".to_string(), vec![1]),
            ("u".to_string(), vec![64, 2]),
        ];
        let layout = TileLayout::new(TileId { layer: 1, part: 0 }, &tensors);
        let mut end = 0;
        for tensor in &layout.tensors {
            assert_eq!(tensor.start, end);
            end = (tensor.start + tensor.count).next_multiple_of(TENSOR_ALIGN);
        }
        assert_eq!(layout.elements, end);
        assert_eq!(layout.decayed_elements, 64 + 128);
        assert_eq!(layout.parameters, 70 + 15 + 1 + 128);
        let names: Vec<_> = layout.tensors.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["w", "u", "norm", "b"]);
    }
}
