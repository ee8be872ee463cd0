//! Weights of a model, as f32, for any element range of any tile.
//!
//! - [`WeightSource::open`] checks every tensor's presence, shape and dtype before anything is
//!   read, so that [`WeightSource::fill`] can fail only by I/O and by values that are not finite.
//! - A tied model's `lm_head.weight`, if present, must equal the embedding: transformers leaves
//!   the two apart where they differ, and this model would be another one.
//! - Peak memory: the shards' headers, and one piece of [`PIECE_BYTES`] a call of fill.
//!
//! A source is `Sync`: tiles may be filled from several threads.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use super::safetensors::{Dtype, SafetensorsFile, TENSORS_MAX, TensorEntry};
use super::{printable_path, read_text};
use crate::error::{Error, Result, printable};
use crate::model::parse::UniqueValue;
use crate::model::random::NormalStream;
use crate::model::{Init, ModelSpec};
use crate::tile::TileLayout;

/// Bytes read from a file at once.
const PIECE_BYTES: usize = 256 << 10;
/// Most shards of a model.
const SHARDS_MAX: usize = 1024;
/// Most bytes of a model.safetensors.index.json.
const INDEX_BYTES_MAX: u64 = 64 << 20;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const EMBED: &str = "model.embed_tokens.weight";
const LM_HEAD: &str = "lm_head.weight";

/// Where a model's first weights come from.
#[derive(Debug)]
pub struct WeightSource {
    origin: Origin,
    notes: Vec<String>,
}

#[derive(Debug)]
enum Origin {
    Files {
        shards: Vec<SafetensorsFile>,
        /// Index into `shards`, and the entry there, of each tensor of the model.
        tensors: HashMap<String, (usize, TensorEntry)>,
    },
    Random {
        seed: u64,
        inits: HashMap<String, Init>,
    },
}

impl WeightSource {
    /// The safetensors of a Hugging Face directory: `model.safetensors`, or the shards that
    /// `model.safetensors.index.json` names.
    ///
    /// # Errors
    /// [`Error::Input`] naming the first tensor that is missing, has another shape, a dtype other
    /// than bf16, f16 and f32, or is not the model's; or what is wrong with a file.
    pub fn open(dir: &Path, spec: &ModelSpec) -> Result<WeightSource> {
        let (shards, found) = open_files(dir)?;
        let mut source = WeightSource::choose(dir, spec, shards, found)?;
        source.check_tied_head(spec, dir)?;
        Ok(source)
    }

    /// Random weights: each tensor as its [`Init`] says, from [`NormalStream`]s of `seed`.
    pub fn random(spec: &ModelSpec, seed: u64) -> WeightSource {
        let tensors = (0..spec.layer_count()).flat_map(|layer| spec.layer_tensors(layer));
        let inits = tensors.map(|tensor| (tensor.name, tensor.init)).collect();
        WeightSource {
            origin: Origin::Random { seed, inits },
            notes: Vec::new(),
        }
    }

    /// What a person should know: tensors that were there and are not used.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Values of `elements` of a tile, zero where no tensor lies.
    ///
    /// # Errors
    /// [`Error::Io`] where a file cannot be read; [`Error::Input`] for a value that is not finite,
    /// or a tensor that the model this source was opened for does not have.
    ///
    /// # Panics
    /// If `out` is not as long as `elements`, or they are past the tile's end.
    pub fn fill(&self, layout: &TileLayout, elements: Range<u64>, out: &mut [f32]) -> Result<()> {
        assert_eq!(
            out.len() as u64,
            elements.end - elements.start,
            "one f32 an element"
        );
        assert!(
            elements.end <= layout.elements,
            "elements past the end of {}",
            layout.id
        );
        out.fill(0.0);
        for tensor in &layout.tensors {
            let whole = tensor.elements();
            let start = whole.start.max(elements.start);
            let end = whole.end.min(elements.end);
            if start >= end {
                continue;
            }
            let part = (start - elements.start) as usize..(end - elements.start) as usize;
            self.fill_tensor(&tensor.name, start - tensor.start, &mut out[part])?;
        }
        Ok(())
    }

    fn fill_tensor(&self, name: &str, first: u64, out: &mut [f32]) -> Result<()> {
        let unknown = || {
            let place = format!("tensor {}", printable(name));
            let expected = "a tensor of the model that was opened";
            Error::input(
                "safetensors",
                place,
                expected,
                "another",
                "open the model's own files",
            )
        };
        match &self.origin {
            Origin::Files { shards, tensors } => {
                let (shard, entry) = tensors.get(name).ok_or_else(unknown)?;
                read_values(&shards[*shard], entry, first, out)?;
                // The bf16 half of a NaN can be finite: nothing would show it later.
                match out.iter().position(|value| !value.is_finite()) {
                    Some(at) => Err(not_finite(
                        shards[*shard].path(),
                        name,
                        first + at as u64,
                        out[at],
                    )),
                    None => Ok(()),
                }
            }
            Origin::Random { seed, inits } => {
                match inits.get(name).ok_or_else(unknown)? {
                    Init::Normal(deviation) => {
                        NormalStream::new(*seed, name).fill(first, *deviation, out);
                    }
                    Init::Ones => out.fill(1.0),
                    Init::Zeros => out.fill(0.0),
                }
                Ok(())
            }
        }
    }

    /// Takes the model's tensors out of those found; checks each, and that nothing is left over.
    fn choose(
        dir: &Path,
        spec: &ModelSpec,
        shards: Vec<SafetensorsFile>,
        mut found: BTreeMap<String, usize>,
    ) -> Result<WeightSource> {
        let mut tensors = HashMap::new();
        for expected in (0..spec.layer_count()).flat_map(|layer| spec.layer_tensors(layer)) {
            let wrong = |path: &Path, expected_text: String, got: String| {
                let place = format!("{}: tensor {}", printable_path(path), expected.name);
                let remedy = "the config.json and the weights must be of one model";
                Error::input("safetensors", place, expected_text, got, remedy)
            };
            let Some((name, shard)) = found.remove_entry(&expected.name) else {
                let shape = format!("shape {:?}", expected.shape);
                return Err(wrong(dir, shape, "no such tensor".to_string()));
            };
            let file = &shards[shard];
            let entry = file
                .tensor(&name)
                .expect("found lists what shards have")
                .clone();
            if entry.shape != expected.shape {
                let shape = format!("shape {:?}", expected.shape);
                return Err(wrong(file.path(), shape, format!("{:?}", entry.shape)));
            }
            if let Dtype::Other(_) = entry.dtype {
                let got = entry.dtype.name().to_string();
                return Err(wrong(
                    file.path(),
                    "dtype BF16, F16 or F32".to_string(),
                    got,
                ));
            }
            tensors.insert(name, (shard, entry));
        }
        let mut notes = Vec::new();
        let mut extra = Vec::new();
        for (name, shard) in found {
            if name.ends_with(".rotary_emb.inv_freq") {
                continue;
            }
            if name == LM_HEAD && spec.tied {
                let entry = shards[shard]
                    .tensor(LM_HEAD)
                    .expect("found lists what shards have");
                tensors.insert(name, (shard, entry.clone()));
                notes.push(format!(
                    "{LM_HEAD} equals {EMBED}, to which it is tied, and is ignored"
                ));
                continue;
            }
            extra.push(name);
        }
        if !extra.is_empty() {
            let shown: Vec<String> = extra.iter().take(5).map(|name| printable(name)).collect();
            return Err(Error::input(
                "safetensors",
                printable_path(dir),
                "only the tensors that config.json describes",
                format!("{} more: {}", extra.len(), shown.join(", ")),
                "the config.json and the weights must be of one model",
            ));
        }
        Ok(WeightSource {
            origin: Origin::Files { shards, tensors },
            notes,
        })
    }

    /// A tied model's head, where its files have one, must be the embedding.
    fn check_tied_head(&mut self, spec: &ModelSpec, dir: &Path) -> Result<()> {
        let Origin::Files { shards, tensors } = &mut self.origin else {
            return Ok(());
        };
        if !spec.tied {
            return Ok(());
        }
        let Some((head_shard, head)) = tensors.remove(LM_HEAD) else {
            return Ok(());
        };
        let (embed_shard, embed) = &tensors[EMBED];
        let differs = |got: String| {
            Error::input(
                "safetensors",
                format!("{}: tensor {LM_HEAD}", printable_path(dir)),
                format!("the values of {EMBED}, to which config.json ties it"),
                got,
                "set tie_word_embeddings to false in config.json to train the two apart",
            )
        };
        if (head.dtype, &head.shape) != (embed.dtype, &embed.shape) {
            return Err(differs(format!("{} {:?}", head.dtype.name(), head.shape)));
        }
        let (mut ours, mut theirs) = (vec![0u8; PIECE_BYTES], vec![0u8; PIECE_BYTES]);
        let mut done = 0;
        while done < head.bytes {
            let count = (head.bytes - done).min(PIECE_BYTES as u64) as usize;
            shards[head_shard].read(head.offset + done, &mut ours[..count])?;
            shards[*embed_shard].read(embed.offset + done, &mut theirs[..count])?;
            if ours[..count] != theirs[..count] {
                return Err(differs("other values".to_string()));
            }
            done += count as u64;
        }
        Ok(())
    }
}

fn exists(dir: &Path, name: &str) -> bool {
    dir.join(name).symlink_metadata().is_ok()
}

fn not_finite(path: &Path, name: &str, element: u64, value: f32) -> Error {
    Error::input(
        "safetensors",
        format!("{}: tensor {name}, element {element}", printable_path(path)),
        "a finite number",
        value.to_string(),
        "fetch the model again, or take an earlier checkpoint of it",
    )
}

/// Elements `first..` of a tensor as f32: bf16 and f16 widen exactly.
fn read_values(
    file: &SafetensorsFile,
    entry: &TensorEntry,
    first: u64,
    out: &mut [f32],
) -> Result<()> {
    let size = (entry.dtype.bits() / 8) as usize;
    let mut piece = vec![0u8; PIECE_BYTES.min(out.len() * size)];
    let mut offset = entry.offset + first * size as u64;
    for values in out.chunks_mut(PIECE_BYTES / size) {
        let piece = &mut piece[..values.len() * size];
        file.read(offset, piece)?;
        offset += piece.len() as u64;
        match entry.dtype {
            Dtype::Bf16 => {
                for (value, bytes) in values.iter_mut().zip(piece.as_chunks::<2>().0) {
                    *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
                }
            }
            Dtype::F16 => {
                for (value, bytes) in values.iter_mut().zip(piece.as_chunks::<2>().0) {
                    *value = half::f16::from_le_bytes(*bytes).to_f32();
                }
            }
            Dtype::F32 => {
                for (value, bytes) in values.iter_mut().zip(piece.as_chunks::<4>().0) {
                    *value = f32::from_le_bytes(*bytes);
                }
            }
            Dtype::Other(_) => unreachable!("choose() takes three dtypes only"),
        }
    }
    Ok(())
}

/// The safetensors of a directory, with the file of each tensor that counts.
fn open_files(dir: &Path) -> Result<(Vec<SafetensorsFile>, BTreeMap<String, usize>)> {
    if exists(dir, SINGLE) {
        let shard = SafetensorsFile::open(dir, SINGLE)?;
        let found = shard.names().map(|name| (name.to_string(), 0)).collect();
        Ok((vec![shard], found))
    } else if exists(dir, INDEX) {
        open_shards(dir)
    } else {
        Err(Error::input(
            "safetensors",
            printable_path(dir),
            format!("{SINGLE} or {INDEX}"),
            "neither",
            "fetch the weights in safetensors format; pickles (.bin, .pt) are not read",
        ))
    }
}

/// The safetensors of a directory: one file, or the shards that its index names.
///
/// # Errors
/// [`Error::Input`] for what is wrong with a file or the index, or if there is neither.
pub(crate) fn open_shards_of(dir: &Path) -> Result<Vec<SafetensorsFile>> {
    open_files(dir).map(|(files, _)| files)
}

/// Opens the shards that the index names, and checks that they hold what it says.
fn open_shards(dir: &Path) -> Result<(Vec<SafetensorsFile>, BTreeMap<String, usize>)> {
    let path = dir.join(INDEX);
    let wrong = |place: String, expected: &str, got: String| {
        let place = format!("{}{place}", printable_path(&path));
        Error::input(
            "safetensors index",
            place,
            expected,
            got,
            "fetch the model again",
        )
    };
    let text = read_text(dir, INDEX, INDEX_BYTES_MAX)?;
    let index: Index = serde_json::from_str(&text).map_err(|error| {
        wrong(
            String::new(),
            "a valid index",
            printable(&error.to_string()),
        )
    })?;
    drop(text);
    let mut shards = Vec::new();
    for name in &index.shards {
        check_shard_name(name)
            .map_err(|expected| wrong(": weight_map".to_string(), expected, printable(name)))?;
        shards.push(SafetensorsFile::open(dir, name)?);
    }
    for (tensor, shard) in &index.weight_map {
        if shards[*shard].tensor(tensor).is_none() {
            let place = format!(": weight_map: tensor {}", printable(tensor));
            let got = format!("no such tensor in {}", printable(&index.shards[*shard]));
            return Err(wrong(place, "a tensor of its shard", got));
        }
    }
    for (number, shard) in shards.iter().enumerate() {
        for tensor in shard.names() {
            let listed = index.weight_map.get(tensor);
            if listed != Some(&number) && !tensor.ends_with(".rotary_emb.inv_freq") {
                let place = format!(": weight_map: tensor {}", printable(tensor));
                let got = match listed {
                    Some(other) => printable(&index.shards[*other]),
                    None => "nothing".to_string(),
                };
                let expected = format!("{}, which has it", printable(&index.shards[number]));
                return Err(wrong(place, &expected, got));
            }
        }
    }
    Ok((shards, index.weight_map))
}

/// A shard is a file beside the index: no path, nothing that another system reads as one.
fn check_shard_name(name: &str) -> Result<(), &'static str> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if !name.chars().all(plain) || name.starts_with('.') || !(1..=255).contains(&name.len()) {
        return Err("a file name of letters, digits, '-', '_' and '.', without a path");
    }
    if !name.ends_with(".safetensors") {
        return Err("a file name that ends in .safetensors");
    }
    Ok(())
}

/// model.safetensors.index.json.
struct Index {
    /// File names, in the order in which the map names them first.
    shards: Vec<String>,
    /// Index into `shards` of each tensor.
    weight_map: BTreeMap<String, usize>,
}

impl<'de> Deserialize<'de> for Index {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(IndexVisitor)
    }
}

struct IndexVisitor;

impl<'de> Visitor<'de> for IndexVisitor {
    type Value = Index;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object with weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Index, A::Error> {
        let mut index = None;
        let mut others = Vec::new();
        while let Some(key) = entries.next_key::<String>()? {
            if (key == "weight_map" && index.is_some()) || others.contains(&key) {
                return Err(A::Error::custom(format!(
                    "duplicate key {}",
                    printable(&key)
                )));
            }
            if key == "weight_map" {
                index = Some(entries.next_value::<WeightMap>()?.0);
                continue;
            }
            if others.len() == 64 {
                return Err(A::Error::custom("more than 64 keys"));
            }
            entries.next_value::<UniqueValue>()?;
            others.push(key);
        }
        index.ok_or_else(|| A::Error::custom("weight_map is missing"))
    }
}

struct WeightMap(Index);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(WeightMapVisitor)
    }
}

struct WeightMapVisitor;

impl<'de> Visitor<'de> for WeightMapVisitor {
    type Value = WeightMap;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object of file names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<WeightMap, A::Error> {
        let mut numbers: HashMap<String, usize> = HashMap::new();
        let mut index = Index {
            shards: Vec::new(),
            weight_map: BTreeMap::new(),
        };
        while let Some((tensor, shard)) = entries.next_entry::<String, String>()? {
            if index.weight_map.contains_key(&tensor) {
                return Err(A::Error::custom(format!(
                    "duplicate key {}",
                    printable(&tensor)
                )));
            }
            if index.weight_map.len() == TENSORS_MAX {
                return Err(A::Error::custom(format!("more than {TENSORS_MAX} tensors")));
            }
            let number = match numbers.get(&shard) {
                Some(number) => *number,
                None if index.shards.len() == SHARDS_MAX => {
                    return Err(A::Error::custom(format!("more than {SHARDS_MAX} shards")));
                }
                None => {
                    index.shards.push(shard.clone());
                    numbers.insert(shard, index.shards.len() - 1);
                    index.shards.len() - 1
                }
            };
            index.weight_map.insert(tensor, number);
        }
        Ok(WeightMap(index))
    }
}
