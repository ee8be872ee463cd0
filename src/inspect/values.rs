//! Numbers of a section or a tensor as they are stored, in pieces, and what they are worth.
//!
//! - A section is read extent by extent, checked; a master is joined from weight and residual.
//! - A tensor of a safetensors file is read in pieces of the same size.
//! - Memory is a few pieces, however large the tensor.

use std::fmt;
use std::ops::Range;

use super::extents::Extents;
use super::store::{Commit, Store};
use super::stream::Reading;
use crate::error::{Error, Result};
use crate::hf::safetensors::{Dtype, SafetensorsFile, TensorEntry};
use crate::store::ExtentKey;
use crate::tile::{EXTENT_ELEMENTS, Section, TileId, join_master};

/// Bytes of a piece of a tensor file.
const PIECE_BYTES: u64 = 4 << 20;

/// How an element is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
    /// IEEE double.
    F64,
    /// Two's complement of that many bytes.
    Signed(u8),
    /// Unsigned of that many bytes.
    Unsigned(u8),
    /// Bytes whose numbers are not known here: compared bit by bit, not printed.
    Opaque(u8),
}

impl Format {
    /// That of a section whose elements have `bytes`.
    pub fn of_section(section: Section, bytes: u64) -> Format {
        match (section, bytes) {
            (Section::Residual, 2) => Format::Signed(2),
            (_, 2) => Format::Bf16,
            (_, 4) => Format::F32,
            (_, bytes) => Format::Opaque(bytes as u8),
        }
    }

    /// That of a dtype; `None` for those of less than a byte.
    pub fn of_dtype(dtype: Dtype) -> Option<Format> {
        Some(match dtype.name() {
            "BF16" => Format::Bf16,
            "F16" => Format::F16,
            "F32" => Format::F32,
            "F64" => Format::F64,
            "I8" => Format::Signed(1),
            "I16" => Format::Signed(2),
            "I32" => Format::Signed(4),
            "I64" => Format::Signed(8),
            "U8" | "BOOL" => Format::Unsigned(1),
            "U16" => Format::Unsigned(2),
            "U32" => Format::Unsigned(4),
            "U64" => Format::Unsigned(8),
            _ if dtype.bits().is_multiple_of(8) => Format::Opaque((dtype.bits() / 8) as u8),
            _ => return None,
        })
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Format::Bf16 | Format::F16 => 2,
            Format::F32 => 4,
            Format::F64 => 8,
            Format::Signed(bytes) | Format::Unsigned(bytes) | Format::Opaque(bytes) => {
                usize::from(bytes)
            }
        }
    }

    /// Whether its numbers are known here.
    pub fn has_numbers(self) -> bool {
        !matches!(self, Format::Opaque(_))
    }

    /// Smallest normal number; 0 where all are exact.
    pub fn normal_min(self) -> f64 {
        match self {
            Format::Bf16 | Format::F32 => f64::from(f32::MIN_POSITIVE),
            Format::F16 => half::f16::MIN_POSITIVE.to_f64(),
            Format::F64 => f64::MIN_POSITIVE,
            _ => 0.0,
        }
    }

    /// Appends the numbers of whole elements to `out`. 64-bit integers are rounded.
    pub fn widen(self, bytes: &[u8], out: &mut Vec<f64>) {
        let two = || bytes.as_chunks::<2>().0.iter();
        let four = || bytes.as_chunks::<4>().0.iter();
        let eight = || bytes.as_chunks::<8>().0.iter();
        let widen = |bits: u16| f64::from(f32::from_bits(u32::from(bits) << 16));
        match self {
            Format::Bf16 => out.extend(two().map(|b| widen(u16::from_le_bytes(*b)))),
            Format::F16 => out.extend(two().map(|b| half::f16::from_le_bytes(*b).to_f64())),
            Format::F32 => out.extend(four().map(|b| f64::from(f32::from_le_bytes(*b)))),
            Format::F64 => out.extend(eight().map(|b| f64::from_le_bytes(*b))),
            Format::Signed(1) => out.extend(bytes.iter().map(|b| f64::from(*b as i8))),
            Format::Signed(2) => out.extend(two().map(|b| f64::from(i16::from_le_bytes(*b)))),
            Format::Signed(4) => out.extend(four().map(|b| f64::from(i32::from_le_bytes(*b)))),
            Format::Signed(_) => out.extend(eight().map(|b| i64::from_le_bytes(*b) as f64)),
            Format::Unsigned(1) => out.extend(bytes.iter().map(|b| f64::from(*b))),
            Format::Unsigned(2) => out.extend(two().map(|b| f64::from(u16::from_le_bytes(*b)))),
            Format::Unsigned(4) => out.extend(four().map(|b| f64::from(u32::from_le_bytes(*b)))),
            Format::Unsigned(_) => out.extend(eight().map(|b| u64::from_le_bytes(*b) as f64)),
            Format::Opaque(bytes_each) => {
                out.extend(
                    bytes
                        .chunks_exact(usize::from(bytes_each))
                        .map(|_| f64::NAN),
                );
            }
        }
    }

    /// An element's bits, and its place among all values of the format in ascending order, so that
    /// the difference of two is their distance in ulp. Both zeros have the same place.
    pub(super) fn bits_and_place(self, element: &[u8]) -> (u64, i64) {
        let mut wide = [0; 8];
        wide[..element.len()].copy_from_slice(element);
        let bits = u64::from_le_bytes(wide);
        let width = element.len() as u32 * 8;
        let top = 1u64 << (width - 1);
        let place = match self {
            Format::Bf16 | Format::F16 | Format::F32 | Format::F64 => {
                let magnitude = (bits & (top - 1)) as i64;
                if bits & top == 0 {
                    magnitude
                } else {
                    -magnitude
                }
            }
            Format::Signed(_) => ((bits << (64 - width)) as i64) >> (64 - width),
            Format::Unsigned(_) | Format::Opaque(_) => bits as i64,
        };
        (bits, place)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Format::Bf16 => f.write_str("bf16"),
            Format::F16 => f.write_str("f16"),
            Format::F32 => f.write_str("f32"),
            Format::F64 => f.write_str("f64"),
            Format::Signed(bytes) => write!(f, "i{}", 8 * bytes),
            Format::Unsigned(bytes) => write!(f, "u{}", 8 * bytes),
            Format::Opaque(bytes) => write!(f, "{}-bit", 8 * bytes),
        }
    }
}

/// What is looked at of a tile: a section as it is stored, or the fp32 master.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// A section.
    Section(Section),
    /// Weight and residual joined.
    Master,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Part::Section(section) => section.fmt(f),
            Part::Master => f.write_str("master"),
        }
    }
}

impl Part {
    /// The part of that name.
    pub fn parse(text: &str) -> Option<Part> {
        if text == "master" {
            return Some(Part::Master);
        }
        let section = Section::ALL.into_iter().find(|s| s.to_string() == text);
        section.map(Part::Section)
    }
}

/// Elements of a commit's tile or of a tensor, in order.
pub struct Values<'a> {
    format: Format,
    origin: Origin<'a>,
    /// Elements not yet handed out.
    left: Range<u64>,
    out: Vec<u8>,
}

enum Origin<'a> {
    Section(Extents<'a>),
    Master {
        extents: Extents<'a>,
        weight: Vec<u8>,
    },
    File {
        file: &'a SafetensorsFile,
        entry: &'a TensorEntry,
    },
}

impl<'a> Values<'a> {
    /// Elements of a part of a tile, within its elements.
    ///
    /// # Errors
    /// [`Error::Input`] if the commit has no such tile or part.
    pub fn of_tile(
        store: &'a Store,
        commit: &'a Commit,
        tile: TileId,
        part: Part,
        elements: Range<u64>,
    ) -> Result<Values<'a>> {
        let manifest = commit.manifest();
        let element_bytes = |section| {
            let sections = manifest.table.sections();
            let mut found = sections.filter(|s| s.tile == tile && s.section == section);
            found.next().map(|section| section.element_bytes)
        };
        let whole = EXTENT_ELEMENTS;
        let extents = if elements.is_empty() {
            0..0
        } else {
            elements.start / whole..elements.end.div_ceil(whole)
        };
        let indices = |sections: &[Section]| -> Vec<usize> {
            let keys = extents.clone().flat_map(|extent| {
                let extent = extent as u32;
                sections.iter().map(move |section| ExtentKey {
                    tile,
                    section: *section,
                    extent,
                })
            });
            keys.filter_map(|key| manifest.table.index(key)).collect()
        };
        let read = |sections: &[Section]| {
            Extents::start(store, manifest, indices(sections), Reading::pread())
        };
        let missing = || {
            let present = parts_of(commit, tile).into_iter().map(|p| p.to_string());
            Error::input(
                "section",
                format!("{} of step {}", commit.names.tile(tile), commit.step),
                format!("one of {}", present.collect::<Vec<_>>().join(", ")),
                part.to_string(),
                "name one of these",
            )
        };
        let (format, origin) = match part {
            Part::Section(section) => {
                let bytes = element_bytes(section).ok_or_else(missing)?;
                let origin = Origin::Section(read(&[section])?);
                (Format::of_section(section, bytes), origin)
            }
            Part::Master => match element_bytes(Section::Weight).ok_or_else(missing)? {
                2 if element_bytes(Section::Residual) == Some(2) => {
                    let origin = Origin::Master {
                        extents: read(&[Section::Weight, Section::Residual])?,
                        weight: Vec::new(),
                    };
                    (Format::F32, origin)
                }
                4 => (Format::F32, Origin::Section(read(&[Section::Weight])?)),
                _ => return Err(missing()),
            },
        };
        Ok(Values {
            format,
            origin,
            left: elements,
            out: Vec::new(),
        })
    }

    /// Elements of a tensor of a file; `None` for formats of less than a byte.
    pub fn of_tensor(
        file: &'a SafetensorsFile,
        entry: &'a TensorEntry,
        elements: Range<u64>,
    ) -> Option<Values<'a>> {
        Some(Values {
            format: Format::of_dtype(entry.dtype)?,
            origin: Origin::File { file, entry },
            left: elements,
            out: Vec::new(),
        })
    }

    /// How its elements are stored.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The next elements' bytes, at least one element; `None` after the last.
    ///
    /// # Errors
    /// Those of reading: nothing unverified is handed out.
    pub fn next_bytes(&mut self) -> Result<Option<&[u8]>> {
        if self.left.is_empty() {
            return Ok(None);
        }
        let first = self.left.start;
        let size = self.format.bytes() as u64;
        let whole = first / EXTENT_ELEMENTS * EXTENT_ELEMENTS;
        let end = match self.origin {
            Origin::File { .. } => (first + PIECE_BYTES / size).min(self.left.end),
            _ => (whole + EXTENT_ELEMENTS).min(self.left.end),
        };
        self.left.start = end;
        // Bytes of the extent that are asked for.
        let part = ((first - whole) * size) as usize..((end - whole) * size) as usize;
        match &mut self.origin {
            Origin::Section(extents) => Ok(Some(&next_extent(extents)?[part])),
            Origin::Master { extents, weight } => {
                let half = part.start / 2..part.end / 2;
                weight.clear();
                weight.extend_from_slice(&next_extent(extents)?[half.clone()]);
                let residual = &next_extent(extents)?[half];
                self.out.clear();
                let halves = weight.as_chunks::<2>().0.iter();
                for (hi, lo) in halves.zip(residual.as_chunks::<2>().0) {
                    let (hi, lo) = (u16::from_le_bytes(*hi), i16::from_le_bytes(*lo));
                    self.out
                        .extend_from_slice(&join_master(hi, lo).to_le_bytes());
                }
                Ok(Some(&self.out))
            }
            Origin::File { file, entry } => {
                self.out.resize(((end - first) * size) as usize, 0);
                file.read(entry.offset + first * size, &mut self.out)?;
                Ok(Some(&self.out))
            }
        }
    }
}

fn next_extent<'a>(extents: &'a mut Extents<'_>) -> Result<&'a [u8]> {
    match extents.next() {
        Some(extent) => extent.bytes,
        None => Err(Error::StoreFailed {
            first: "a reading thread has ended".to_string(),
        }),
    }
}

/// Parts of a tile that can be looked at.
pub fn parts_of(commit: &Commit, tile: TileId) -> Vec<Part> {
    let sections = commit.manifest().table.sections();
    let of_tile = sections.filter(|section| section.tile == tile);
    let mut parts: Vec<Part> = of_tile
        .map(|section| Part::Section(section.section))
        .collect();
    let has = |section| parts.contains(&Part::Section(section));
    if has(Section::Weight) && has(Section::Residual) {
        parts.push(Part::Master);
    }
    parts
}

/// Elements of a tile's sections.
pub fn elements_of(commit: &Commit, tile: TileId) -> u64 {
    let mut sections = commit.manifest().table.sections();
    let found = sections.find(|section| section.tile == tile);
    found.map_or(0, |section| section.elements)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_ulp_apart_in_every_format() {
        let place = |format: Format, bytes: &[u8]| format.bits_and_place(bytes).1;
        let f32_place = |value: f32| place(Format::F32, &value.to_le_bytes());
        assert_eq!(f32_place(1.0f32.next_up()) - f32_place(1.0), 1);
        assert_eq!(
            f32_place(f32::from_bits(1)) - f32_place(-f32::from_bits(1)),
            2
        );
        assert_eq!(f32_place(0.0), f32_place(-0.0));
        assert!(f32_place(-2.0) < f32_place(-1.0));
        assert_eq!(place(Format::Bf16, &0xBF81u16.to_le_bytes()), -0x3F81);
        assert_eq!(place(Format::Signed(2), &(-3i16).to_le_bytes()), -3);
        assert_eq!(place(Format::Signed(8), &(-3i64).to_le_bytes()), -3);
    }

    #[test]
    fn every_format_widens_its_own_bytes() {
        let widened = |format: Format, bytes: &[u8]| {
            let mut out = Vec::new();
            format.widen(bytes, &mut out);
            out
        };
        assert_eq!(widened(Format::Bf16, &[0x80, 0x3F, 0, 0xC0]), [1.0, -2.0]);
        assert_eq!(widened(Format::F16, &[0, 0x3C]), [1.0]);
        assert_eq!(widened(Format::Signed(2), &(-7i16).to_le_bytes()), [-7.0]);
        assert_eq!(widened(Format::Unsigned(1), &[255]), [255.0]);
        assert_eq!(widened(Format::F64, &0.1f64.to_le_bytes()), [0.1]);
    }
}
