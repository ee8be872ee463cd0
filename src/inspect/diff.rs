//! Two sets of numbers compared, tensor by tensor: bits, values, ulp.
//!
//! - Two commits are compared section by section, as they are stored; where one has an fp32 weight
//!   and the other weight and residual, their masters are.
//! - A commit against safetensors: its bf16 weights against bf16, its masters against the rest.
//! - Same formats are compared bit by bit; different ones by value.
//!
//! Both sides stream; memory is a few pieces of each.

use std::collections::BTreeSet;
use std::ops::Range;

use super::store::{Commit, Store};
use super::tensors::TensorFiles;
use super::values::{Format, Part, Values, elements_of, parts_of};
use crate::error::{Error, Result};
use crate::tile::{Section, TileId};

/// Elements compared at once: small enough for the cache.
const STRIDE: usize = 4096;

/// A side of a comparison.
#[derive(Clone, Copy)]
pub enum Side<'a> {
    /// A commit.
    Commit(&'a Store, &'a Commit),
    /// Safetensors.
    Tensors(&'a TensorFiles),
}

/// How two tensors, or two sections without names, differ.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Difference {
    /// The tile's name; `None` between safetensors.
    pub tile: Option<String>,
    /// The tensor's name; `None` where no model names it.
    pub tensor: Option<String>,
    /// Section, `master`, or `tensor`.
    pub part: String,
    /// Formats of both sides.
    pub formats: [String; 2],
    /// Elements of each.
    pub elements: u64,
    /// Elements that differ: in bits, or in value where the formats do.
    pub differing: u64,
    /// Bits that differ; `None` where the formats do.
    pub bits: Option<u64>,
    /// Largest |a − b| over pairs of finite numbers.
    pub max_abs: f64,
    /// Largest distance in units of the last place; `None` where the formats differ.
    pub max_ulp: Option<u64>,
    /// Pairs of which one is not finite, or both are and not the same.
    pub non_finite: u64,
    /// Index of the first element that differs.
    pub first: Option<u64>,
    /// Shape, outermost first; empty where no model names it.
    pub shape: Vec<u64>,
}

/// What a comparison came to.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Compared {
    /// Tensors and sections compared.
    pub pairs: u64,
    /// Of these, those that differ.
    pub differing_pairs: u64,
    /// Elements compared.
    pub elements: u64,
    /// Elements that differ.
    pub differing: u64,
    /// What only the first side has.
    pub only_a: Vec<String>,
    /// What only the second side has.
    pub only_b: Vec<String>,
    /// What both have and cannot be compared, with why.
    pub skipped: Vec<String>,
}

impl Compared {
    /// Whether both sides are the same.
    pub fn is_equal(&self) -> bool {
        self.differing_pairs == 0 && self.only_a.is_empty() && self.only_b.is_empty()
    }
}

/// Compares two sides and gives each pair to `each`, in order.
///
/// # Errors
/// Those of reading either side, and of `each`.
pub fn diff(a: Side, b: Side, each: &mut dyn FnMut(&Difference) -> Result<()>) -> Result<Compared> {
    let mut job = Job {
        compared: Compared::default(),
        each,
    };
    match (a, b) {
        (Side::Commit(store_a, a), Side::Commit(store_b, b)) => {
            job.commits((store_a, a), (store_b, b))?;
        }
        (Side::Commit(store, commit), Side::Tensors(files)) => {
            job.commit_and_files(store, commit, files, false)?;
        }
        (Side::Tensors(files), Side::Commit(store, commit)) => {
            job.commit_and_files(store, commit, files, true)?;
        }
        (Side::Tensors(a), Side::Tensors(b)) => job.files(a, b)?,
    }
    Ok(job.compared)
}

struct Job<'a> {
    compared: Compared,
    each: &'a mut dyn FnMut(&Difference) -> Result<()>,
}

/// A range of elements that is reported alone.
struct Slot {
    tensor: Option<String>,
    shape: Vec<u64>,
    elements: Range<u64>,
}

impl Job<'_> {
    fn commits(&mut self, a: (&Store, &Commit), b: (&Store, &Commit)) -> Result<()> {
        let ids = |commit: &Commit| -> BTreeSet<TileId> {
            commit.tiles().into_iter().map(|tile| tile.id).collect()
        };
        let (of_a, of_b) = (ids(a.1), ids(b.1));
        for id in of_a.union(&of_b) {
            let (has_a, has_b) = (of_a.contains(id), of_b.contains(id));
            match (has_a, has_b) {
                (true, true) => self.tiles(a, b, *id)?,
                (true, false) => self.compared.only_a.push(a.1.names.tile(*id).name),
                _ => self.compared.only_b.push(b.1.names.tile(*id).name),
            }
        }
        Ok(())
    }

    fn tiles(&mut self, a: (&Store, &Commit), b: (&Store, &Commit), id: TileId) -> Result<()> {
        let tile = a.1.names.tile(id).name;
        let (elements, other) = (elements_of(a.1, id), elements_of(b.1, id));
        if elements != other {
            let why = format!("{tile}: {elements} elements against {other}");
            self.compared.skipped.push(why);
            self.compared.differing_pairs += 1;
            return Ok(());
        }
        let slots = slots(a.1, b.1, id, elements);
        let (parts_a, parts_b) = (stored_parts(a.1, id), stored_parts(b.1, id));
        let only = |mine: &[(Part, Format)], theirs: &[(Part, Format)]| -> Vec<String> {
            let absent = |p: &&(Part, Format)| !theirs.iter().any(|other| other.0 == p.0);
            mine.iter()
                .filter(absent)
                .map(|(part, _)| format!("{tile} {part}"))
                .collect()
        };
        let weight = |parts: &[(Part, Format)]| {
            let found = parts
                .iter()
                .find(|(part, _)| *part == Part::Section(Section::Weight));
            found.map(|(_, format)| *format)
        };
        // Precisions differ: what the weights stand for is compared, not how they are split.
        let masters = weight(&parts_a) != weight(&parts_b);
        let split = [Section::Weight, Section::Residual].map(Part::Section);
        if !masters {
            self.compared.only_a.extend(only(&parts_a, &parts_b));
            self.compared.only_b.extend(only(&parts_b, &parts_a));
        } else {
            self.pair_of_tiles(a, b, id, Part::Master, &slots)?;
        }
        for (part, _) in &parts_a {
            let both = parts_b.iter().any(|other| other.0 == *part);
            if both && !(masters && split.contains(part)) {
                self.pair_of_tiles(a, b, id, *part, &slots)?;
            }
        }
        Ok(())
    }

    fn pair_of_tiles(
        &mut self,
        a: (&Store, &Commit),
        b: (&Store, &Commit),
        id: TileId,
        part: Part,
        slots: &[Slot],
    ) -> Result<()> {
        let elements = 0..elements_of(a.1, id);
        let mut mine = Values::of_tile(a.0, a.1, id, part, elements.clone())?;
        let mut theirs = Values::of_tile(b.0, b.1, id, part, elements)?;
        let tile = a.1.names.tile(id).name;
        self.pair(
            &mut mine,
            &mut theirs,
            slots,
            Some(&tile),
            &part.to_string(),
        )
    }

    fn commit_and_files(
        &mut self,
        store: &Store,
        commit: &Commit,
        files: &TensorFiles,
        files_first: bool,
    ) -> Result<()> {
        let mut seen = BTreeSet::new();
        let (mut only_commit, mut only_files) = (Vec::new(), Vec::new());
        for tile in commit.tiles() {
            for range in commit.names.tensors(tile.id) {
                seen.insert(range.name.clone());
                let Some(tensor) = files.tensor(&range.name) else {
                    only_commit.push(range.name.clone());
                    continue;
                };
                let format = Format::of_dtype(tensor.entry.dtype);
                let same = tensor.entry.shape == range.shape;
                let (true, Some(format)) = (same, format) else {
                    self.skip(&range.name, &range.shape, &tensor.entry.shape);
                    continue;
                };
                let weights =
                    format == Format::Bf16 && parts_of(commit, tile.id).contains(&Part::Master);
                let part = match weights {
                    true => Part::Section(Section::Weight),
                    false => Part::Master,
                };
                let mine = Values::of_tile(store, commit, tile.id, part, range.elements())?;
                let theirs = Values::of_tensor(tensor.file, tensor.entry, 0..range.count);
                let (mut mine, Some(mut theirs)) = (mine, theirs) else {
                    continue;
                };
                let slots = [Slot {
                    tensor: Some(range.name.clone()),
                    shape: range.shape.clone(),
                    elements: 0..range.count,
                }];
                let (first, second) = match files_first {
                    true => (&mut theirs, &mut mine),
                    false => (&mut mine, &mut theirs),
                };
                self.pair(first, second, &slots, Some(&tile.name), &part.to_string())?;
            }
        }
        if seen.is_empty() {
            let why = "a commit without a model's names, so no tensor of the files is in it";
            self.compared.skipped.push(why.to_string());
        }
        let names = files.tensors().map(|tensor| tensor.name.to_string());
        only_files.extend(names.filter(|name| !seen.contains(name)));
        if files_first {
            std::mem::swap(&mut only_commit, &mut only_files);
        }
        self.compared.only_a = only_commit;
        self.compared.only_b = only_files;
        Ok(())
    }

    fn files(&mut self, a: &TensorFiles, b: &TensorFiles) -> Result<()> {
        for mine in a.tensors() {
            let Some(theirs) = b.tensor(mine.name) else {
                self.compared.only_a.push(mine.name.to_string());
                continue;
            };
            let count = mine.elements();
            let same = mine.entry.shape == theirs.entry.shape;
            let values = Values::of_tensor(mine.file, mine.entry, 0..count);
            let others = Values::of_tensor(theirs.file, theirs.entry, 0..count);
            let (true, Some(mut values), Some(mut others)) = (same, values, others) else {
                self.skip(mine.name, &mine.entry.shape, &theirs.entry.shape);
                continue;
            };
            let slots = [Slot {
                tensor: Some(mine.name.to_string()),
                shape: mine.entry.shape.clone(),
                elements: 0..count,
            }];
            self.pair(&mut values, &mut others, &slots, None, "tensor")?;
        }
        let names = b.tensors().filter(|tensor| a.tensor(tensor.name).is_none());
        self.compared.only_b = names.map(|tensor| tensor.name.to_string()).collect();
        Ok(())
    }

    fn skip(&mut self, name: &str, a: &[u64], b: &[u64]) {
        let why = match a == b {
            true => format!("{name}: a format of less than a byte"),
            false => format!("{name}: shape {a:?} against {b:?}"),
        };
        self.compared.skipped.push(why);
        self.compared.differing_pairs += 1;
    }

    /// Compares two streams of as many elements and reports each slot.
    fn pair(
        &mut self,
        a: &mut Values,
        b: &mut Values,
        slots: &[Slot],
        tile: Option<&str>,
        part: &str,
    ) -> Result<()> {
        let formats = (a.format(), b.format());
        let mut tallies: Vec<Tally> = slots.iter().map(|_| Tally::new(formats)).collect();
        let mut slot = 0;
        zip(a, b, |first, a, b| {
            let (size_a, size_b) = (formats.0.bytes(), formats.1.bytes());
            let end = first + (a.len() / size_a) as u64;
            let mut at = first;
            while at < end && slot < slots.len() {
                let elements = &slots[slot].elements;
                let (from, to) = (at.max(elements.start), end.min(elements.end));
                if from < to {
                    let range = (from - first) as usize..(to - first) as usize;
                    tallies[slot].take(
                        from - elements.start,
                        &a[range.start * size_a..range.end * size_a],
                        &b[range.start * size_b..range.end * size_b],
                    );
                }
                at = to.max(at);
                if elements.end > end {
                    break;
                }
                slot += 1;
            }
        })?;
        for (slot, tally) in slots.iter().zip(tallies) {
            let found = Difference {
                tile: tile.map(str::to_string),
                tensor: slot.tensor.clone(),
                part: part.to_string(),
                shape: slot.shape.clone(),
                ..tally.found
            };
            self.compared.pairs += 1;
            self.compared.differing_pairs += u64::from(found.differing > 0);
            self.compared.elements += found.elements;
            self.compared.differing += found.differing;
            (self.each)(&found)?;
        }
        Ok(())
    }
}

/// Sections of a tile with their formats, without the master.
fn stored_parts(commit: &Commit, id: TileId) -> Vec<(Part, Format)> {
    let sections = commit.manifest().table.sections();
    let of_tile = sections.filter(|section| section.tile == id);
    of_tile
        .map(|s| {
            (
                Part::Section(s.section),
                Format::of_section(s.section, s.element_bytes),
            )
        })
        .collect()
}

/// The tensors of a tile where both commits name the same ones, otherwise the whole.
fn slots(a: &Commit, b: &Commit, id: TileId, elements: u64) -> Vec<Slot> {
    let (of_a, of_b) = (a.names.tensors(id), b.names.tensors(id));
    if of_a.is_empty() || of_a != of_b {
        return vec![Slot {
            tensor: None,
            shape: Vec::new(),
            elements: 0..elements,
        }];
    }
    let slot = |tensor: &crate::tile::TensorRange| Slot {
        tensor: Some(tensor.name.clone()),
        shape: tensor.shape.clone(),
        elements: tensor.elements(),
    };
    of_a.iter().map(slot).collect()
}

/// Gives the same elements of both sides to `each`, with the index of the first.
fn zip(a: &mut Values, b: &mut Values, mut each: impl FnMut(u64, &[u8], &[u8])) -> Result<()> {
    let (size_a, size_b) = (a.format().bytes(), b.format().bytes());
    let (mut rest_a, mut rest_b): (Vec<u8>, Vec<u8>) = (Vec::new(), Vec::new());
    let mut first = 0;
    loop {
        if rest_a.is_empty() {
            rest_a.extend_from_slice(a.next_bytes()?.unwrap_or(&[]));
        }
        if rest_b.is_empty() {
            rest_b.extend_from_slice(b.next_bytes()?.unwrap_or(&[]));
        }
        let count = (rest_a.len() / size_a).min(rest_b.len() / size_b);
        if count == 0 {
            return match rest_a.is_empty() && rest_b.is_empty() {
                true => Ok(()),
                false => Err(Error::StoreFailed {
                    first: "a side ended before the other".to_string(),
                }),
            };
        }
        each(first, &rest_a[..count * size_a], &rest_b[..count * size_b]);
        rest_a.drain(..count * size_a);
        rest_b.drain(..count * size_b);
        first += count as u64;
    }
}

/// Counts the differences of one slot.
struct Tally {
    formats: (Format, Format),
    found: Difference,
    values: [Vec<f64>; 2],
}

impl Tally {
    fn new(formats: (Format, Format)) -> Tally {
        let same = formats.0 == formats.1;
        let has_ulp = same && formats.0.has_numbers();
        Tally {
            formats,
            found: Difference {
                tile: None,
                tensor: None,
                part: String::new(),
                formats: [formats.0.to_string(), formats.1.to_string()],
                elements: 0,
                differing: 0,
                bits: same.then_some(0),
                max_abs: 0.0,
                max_ulp: has_ulp.then_some(0),
                non_finite: 0,
                first: None,
                shape: Vec::new(),
            },
            values: [Vec::new(), Vec::new()],
        }
    }

    /// Takes elements from index `first` on.
    fn take(&mut self, first: u64, a: &[u8], b: &[u8]) {
        let (size_a, size_b) = (self.formats.0.bytes(), self.formats.1.bytes());
        self.found.elements += (a.len() / size_a) as u64;
        let strides = a.chunks(STRIDE * size_a).zip(b.chunks(STRIDE * size_b));
        for (index, (a, b)) in strides.enumerate() {
            let same_format = self.formats.0 == self.formats.1;
            if !(same_format && a == b) {
                self.take_stride(first + (index * STRIDE) as u64, a, b);
            }
        }
    }

    fn take_stride(&mut self, first: u64, a: &[u8], b: &[u8]) {
        let (format_a, format_b) = self.formats;
        self.values.iter_mut().for_each(Vec::clear);
        format_a.widen(a, &mut self.values[0]);
        format_b.widen(b, &mut self.values[1]);
        let numbers = format_a.has_numbers() && format_b.has_numbers();
        let elements = a
            .chunks_exact(format_a.bytes())
            .zip(b.chunks_exact(format_b.bytes()));
        for (index, (a, b)) in elements.enumerate() {
            let (x, y) = (self.values[0][index], self.values[1][index]);
            let found = &mut self.found;
            if let Some(bits) = &mut found.bits {
                if a == b {
                    continue;
                }
                let ((bits_a, place_a), (bits_b, place_b)) =
                    (format_a.bits_and_place(a), format_a.bits_and_place(b));
                *bits += u64::from((bits_a ^ bits_b).count_ones());
                let both_finite = x.is_finite() && y.is_finite();
                if let Some(ulp) = found.max_ulp.as_mut().filter(|_| both_finite) {
                    *ulp = (*ulp).max(place_a.abs_diff(place_b));
                }
            } else if x == y || (x.is_nan() && y.is_nan()) {
                continue;
            }
            found.differing += 1;
            found.first.get_or_insert(first + index as u64);
            if x.is_finite() && y.is_finite() {
                found.max_abs = found.max_abs.max((x - y).abs());
            } else if numbers {
                found.non_finite += 1;
            }
        }
    }
}
