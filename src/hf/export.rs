//! A Hugging Face directory from the tiles: whole or not at all.
//!
//! - Written beside its target, every file and the directory flushed, then renamed. A failure or a
//!   panic removes what was written; SIGKILL or a power cut leaves a directory `.NAME.partial-PID`,
//!   which the next export to that name removes: nobody holds its lock.
//! - Tiles are read extent by extent in layer order, each once: memory is one extent.
//! - bf16 takes the half of the master that the device computes with ([`split_master`]), so that
//!   the exported model's logits are the trained model's; f32 takes the master.
//! - File names are made here; names of tensors are only text in headers.
//!
//! An existing target is refused, or replaced if asked and if it holds nothing but a model's files.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::{open_regular, printable_path};
use crate::error::{Error, Result, printable};
use crate::model::ModelSpec;
use crate::tile::{EXTENT_ELEMENTS, TensorRange, TileLayout, split_master};

/// Numeric format of the exported weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportDtype {
    /// The bf16 weights that the device computes with.
    Bf16,
    /// The fp32 masters.
    F32,
}

impl ExportDtype {
    /// Bytes of an element.
    pub fn bytes(self) -> u64 {
        match self {
            ExportDtype::Bf16 => 2,
            ExportDtype::F32 => 4,
        }
    }

    fn header_name(self) -> &'static str {
        match self {
            ExportDtype::Bf16 => "BF16",
            ExportDtype::F32 => "F32",
        }
    }

    fn config_name(self) -> &'static str {
        match self {
            ExportDtype::Bf16 => "bfloat16",
            ExportDtype::F32 => "float32",
        }
    }
}

/// Where and how to export.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// The directory to make; its parent must exist.
    pub dir: PathBuf,
    /// Format of the weights.
    pub dtype: ExportDtype,
    /// Most bytes of tensors in a shard; one tensor is never split. At least 1.
    pub shard_bytes: u64,
    /// Replace a directory that is there and holds only a model's files.
    pub overwrite: bool,
}

/// What was exported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportReport {
    /// The directory.
    pub dir: PathBuf,
    /// Names of its files, in the order in which they were written.
    pub files: Vec<String>,
    /// Safetensors files.
    pub shard_count: usize,
    /// Tensors.
    pub tensor_count: usize,
    /// Parameters.
    pub parameters: u64,
    /// Bytes of tensors.
    pub tensor_bytes: u64,
}

/// Files that are taken over from the model's directory.
const COPIED: [&str; 15] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "USE_POLICY.md",
];
/// Most bytes of a copied file.
const COPIED_BYTES_MAX: u64 = 256 << 20;
const SHARDS_MAX: usize = 99_999;

/// Gives the fp32 masters of a range of a tile's elements.
pub type ReadMasters<'a> = dyn FnMut(&TileLayout, Range<u64>, &mut [f32]) -> Result<()> + 'a;

/// Exports a model. `original_config` is the JSON that the spec was read from; `source_dir`, the
/// directory from which tokenizer, chat template, generation_config.json and licence are copied;
/// `read` is called once for each extent, in layer order.
///
/// # Errors
/// [`Error::Input`] for a target that is there or cannot be; those of `read`; [`Error::Io`]. The
/// target is then as it was.
pub fn export(
    options: &ExportOptions,
    spec: &ModelSpec,
    original_config: Option<&Value>,
    source_dir: Option<&Path>,
    read: &mut ReadMasters,
) -> Result<ExportReport> {
    let target = Target::check(options, source_dir)?;
    let layouts = spec.tile_layouts();
    let shards = plan_shards(&layouts, options)?;
    let tensor_bytes = shards.iter().map(|shard| shard.tensor_bytes).sum();
    target.remove_leftovers();
    target.check_space(tensor_bytes)?;
    let mut partial = Partial::create(&target)?;
    let mut tensors = TensorWriter::new(&partial.path, options.dtype, &shards);
    let mut values = vec![0.0f32; EXTENT_ELEMENTS as usize];
    for layout in &layouts {
        for extent in 0..layout.extent_count() {
            let elements = layout.extent_elements(extent);
            let values = &mut values[..(elements.end - elements.start) as usize];
            read(layout, elements.clone(), values)?;
            tensors.write_extent(layout, elements, values)?;
        }
    }
    let mut files = tensors.finish()?;
    drop(values);
    if shards.len() > 1 {
        let index = index_json(&shards, tensor_bytes);
        files.push(partial.write_json("model.safetensors.index.json", &index)?);
    }
    let config = spec.to_config_json(original_config, options.dtype.config_name());
    files.push(partial.write_json("config.json", &config)?);
    if let Some(dir) = source_dir {
        for name in COPIED {
            if dir.join(name).symlink_metadata().is_ok() {
                partial.copy(dir, name)?;
                files.push(name.to_string());
            }
        }
    }
    if !files.iter().any(|name| name == "generation_config.json") {
        let generation = generation_json(&config);
        files.push(partial.write_json("generation_config.json", &generation)?);
    }
    partial.publish(&target)?;
    Ok(ExportReport {
        dir: options.dir.clone(),
        files,
        shard_count: shards.len(),
        tensor_count: shards.iter().map(|shard| shard.tensors.len()).sum(),
        parameters: spec.parameters(),
        tensor_bytes,
    })
}

fn generation_json(config: &Value) -> Value {
    let mut generation = Map::new();
    generation.insert("_from_model_config".to_string(), json!(true));
    for key in ["bos_token_id", "eos_token_id"] {
        if !config[key].is_null() {
            generation.insert(key.to_string(), config[key].clone());
        }
    }
    Value::Object(generation)
}

/// A safetensors file to be written: its name and tensors, in order and without gaps.
struct Shard {
    name: String,
    tensors: Vec<TensorRange>,
    tensor_bytes: u64,
}

/// Tensors in layer order, each in the first shard that is not full.
fn plan_shards(layouts: &[TileLayout], options: &ExportOptions) -> Result<Vec<Shard>> {
    let mut shards: Vec<Shard> = Vec::new();
    for tensor in layouts.iter().flat_map(|layout| &layout.tensors) {
        let bytes = tensor.count * options.dtype.bytes();
        let fits = shards
            .last()
            .is_some_and(|shard| shard.tensor_bytes.saturating_add(bytes) <= options.shard_bytes);
        if !fits {
            shards.push(Shard {
                name: String::new(),
                tensors: Vec::new(),
                tensor_bytes: 0,
            });
        }
        let shard = shards.last_mut().expect("one was just pushed");
        shard.tensors.push(tensor.clone());
        shard.tensor_bytes += bytes;
    }
    let count = shards.len();
    if options.shard_bytes == 0 || count > SHARDS_MAX {
        return Err(Error::input(
            "export",
            "shard bytes",
            format!("a size that makes at most {SHARDS_MAX} shards"),
            options.shard_bytes.to_string(),
            "choose a larger one, 5GB is usual",
        ));
    }
    for (index, shard) in shards.iter_mut().enumerate() {
        shard.name = match count {
            1 => "model.safetensors".to_string(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        };
    }
    Ok(shards)
}

fn index_json(shards: &[Shard], tensor_bytes: u64) -> Value {
    let map: Map<String, Value> = shards
        .iter()
        .flat_map(|shard| {
            shard
                .tensors
                .iter()
                .map(|t| (t.name.clone(), json!(shard.name)))
        })
        .collect();
    json!({ "metadata": { "total_size": tensor_bytes }, "weight_map": map })
}

/// The 8 bytes of length and the header, padded with spaces to a multiple of 8 bytes.
fn shard_header(shard: &Shard, dtype: ExportDtype) -> Vec<u8> {
    let mut header = Map::new();
    header.insert("__metadata__".to_string(), json!({ "format": "pt" }));
    let mut begin = 0;
    for tensor in &shard.tensors {
        let end = begin + tensor.count * dtype.bytes();
        let entry = json!({
            "dtype": dtype.header_name(),
            "shape": tensor.shape,
            "data_offsets": [begin, end],
        });
        header.insert(tensor.name.clone(), entry);
        begin = end;
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(&text);
    bytes
}

/// Writes the shards one after another from the extents of the tiles in order.
struct TensorWriter<'a> {
    dir: &'a Path,
    dtype: ExportDtype,
    shards: &'a [Shard],
    /// Shards begun; the last of them is `file`.
    begun: usize,
    file: Option<(PathBuf, File)>,
    /// Bytes of tensors that `file` still lacks.
    missing: u64,
    bytes: Vec<u8>,
}

impl<'a> TensorWriter<'a> {
    fn new(dir: &'a Path, dtype: ExportDtype, shards: &'a [Shard]) -> TensorWriter<'a> {
        TensorWriter {
            dir,
            dtype,
            shards,
            begun: 0,
            file: None,
            missing: 0,
            bytes: Vec::new(),
        }
    }

    fn write_extent(
        &mut self,
        layout: &TileLayout,
        elements: Range<u64>,
        values: &[f32],
    ) -> Result<()> {
        for tensor in &layout.tensors {
            let whole = tensor.elements();
            let start = whole.start.max(elements.start);
            let end = whole.end.min(elements.end);
            if start >= end {
                continue;
            }
            if self.missing == 0 {
                self.begin_shard()?;
            }
            let part = (start - elements.start) as usize..(end - elements.start) as usize;
            self.write_values(&values[part])?;
        }
        Ok(())
    }

    fn begin_shard(&mut self) -> Result<()> {
        self.end_shard()?;
        let shard = &self.shards[self.begun];
        self.begun += 1;
        self.missing = shard.tensor_bytes;
        let path = self.dir.join(&shard.name);
        let mut file = create(&path)?;
        write(&mut file, &path, &shard_header(shard, self.dtype))?;
        self.file = Some((path, file));
        Ok(())
    }

    fn end_shard(&mut self) -> Result<()> {
        assert_eq!(self.missing, 0, "a shard ends where its tensors do");
        match self.file.take() {
            Some((path, file)) => flush(&file, &path),
            None => Ok(()),
        }
    }

    fn write_values(&mut self, values: &[f32]) -> Result<()> {
        self.bytes.clear();
        match self.dtype {
            ExportDtype::Bf16 => {
                self.bytes
                    .extend(values.iter().flat_map(|v| split_master(*v).0.to_le_bytes()));
            }
            ExportDtype::F32 => {
                self.bytes
                    .extend(values.iter().flat_map(|v| v.to_le_bytes()));
            }
        }
        let (path, file) = self.file.as_mut().expect("begin_shard opened one");
        write(file, path, &self.bytes)?;
        self.missing -= self.bytes.len() as u64;
        Ok(())
    }

    fn finish(mut self) -> Result<Vec<String>> {
        self.end_shard()?;
        assert_eq!(self.begun, self.shards.len(), "every shard was written");
        Ok(self.shards.iter().map(|shard| shard.name.clone()).collect())
    }
}

/// The target's place, checked before anything is written.
struct Target {
    dir: PathBuf,
    parent: PathBuf,
    name: String,
    replaces: bool,
}

impl Target {
    fn check(options: &ExportOptions, source_dir: Option<&Path>) -> Result<Target> {
        let dir = &options.dir;
        let refuse = |expected: &str, got: String, remedy: &str| {
            Error::input("export", printable_path(dir), expected, got, remedy)
        };
        let Some(name) = dir.file_name().and_then(|name| name.to_str()) else {
            let expected = "a path that ends in a directory's name in UTF-8";
            return Err(refuse(expected, "none".to_string(), "name a new directory"));
        };
        let parent = match dir.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        if !parent.is_dir() {
            let got = "none there".to_string();
            return Err(refuse("a parent that is a directory", got, "create it"));
        }
        let parent = parent
            .canonicalize()
            .map_err(|source| Error::io("open", parent, source))?;
        let dir = parent.join(name);
        let replaces = match dir.symlink_metadata() {
            Ok(metadata) if !options.overwrite || !metadata.is_dir() => {
                let got = "one that is there".to_string();
                let remedy = "choose another, or pass --overwrite if it is an export";
                return Err(refuse("a new directory", got, remedy));
            }
            Ok(_) => true,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
            Err(source) => return Err(Error::io("open", &dir, source)),
        };
        if replaces {
            if source_dir.is_some_and(|s| s.canonicalize().is_ok_and(|s| s == dir)) {
                let got = "the model that is exported from".to_string();
                return Err(refuse("another directory", got, "choose another"));
            }
            if let Some(entry) = foreign_entry(&dir)? {
                let expected = "a directory with a model's files only, to overwrite";
                return Err(refuse(
                    expected,
                    printable(&entry),
                    "choose another directory",
                ));
            }
        }
        Ok(Target {
            name: name.to_string(),
            dir,
            parent,
            replaces,
        })
    }

    /// Refuses a disk that is too full before anything is written. What is replaced goes last.
    fn check_space(&self, bytes: u64) -> Result<()> {
        let free = crate::store::free_bytes(&self.parent);
        // 0 is also what file systems say that do not say.
        if free == 0 || free >= bytes {
            return Ok(());
        }
        let place = printable_path(&self.parent);
        let (expected, got) = (format!("{bytes} bytes free"), free.to_string());
        let remedy = "free space, or name a directory of another file system in --out";
        Err(Error::input("export", place, expected, got, remedy))
    }

    fn sibling(&self, what: &str) -> PathBuf {
        self.parent
            .join(format!(".{}.{what}-{}", self.name, std::process::id()))
    }

    /// Removes what exports to this name left that were killed. One that goes on has the lock of
    /// its directory; where there are no locks, nothing is removed.
    fn remove_leftovers(&self) {
        let start = format!(".{}.partial-", self.name);
        // What cannot be listed or removed is in nobody's way: its name is of another process.
        for entry in fs::read_dir(&self.parent).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let process = name.to_str().and_then(|name| name.strip_prefix(&start));
            if process.is_none_or(|process| process.parse::<u32>().is_err()) {
                continue;
            }
            let path = self.parent.join(&name);
            let is_dir = path.symlink_metadata().is_ok_and(|found| found.is_dir());
            let unused = is_dir && lock(&path).is_ok_and(|lock| lock.is_some());
            if unused && matches!(foreign_entry(&path), Ok(None)) {
                fs::remove_dir_all(&path).ok();
            }
        }
    }
}

/// The first entry of a directory that no export would have written.
pub(crate) fn foreign_entry(dir: &Path) -> Result<Option<String>> {
    let io = |source| Error::io("list", dir, source);
    for entry in fs::read_dir(dir).map_err(io)? {
        let entry = entry.map_err(io)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let ours = COPIED.contains(&name.as_str())
            || ["config.json", "model.safetensors.index.json"].contains(&name.as_str())
            || (name.starts_with("model") && name.ends_with(".safetensors"));
        if !ours || !entry.file_type().map_err(io)?.is_file() {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// The lock of a directory, which ends with this; `None` where another process has it.
fn lock(dir: &Path) -> std::io::Result<Option<File>> {
    let dir = File::open(dir)?;
    match dir.try_lock() {
        Ok(()) => Ok(Some(dir)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// The directory while it is written; removed when dropped before it was published.
struct Partial {
    path: PathBuf,
    published: bool,
    /// Tells other exports that it is in use, where the file system has locks.
    _lock: Option<File>,
}

impl Partial {
    fn create(target: &Target) -> Result<Partial> {
        let path = target.sibling("partial");
        fs::create_dir(&path).map_err(|source| Error::io("create", &path, source))?;
        let lock = lock(&path).ok().flatten();
        Ok(Partial {
            path,
            published: false,
            _lock: lock,
        })
    }

    fn write_json(&self, name: &str, value: &Value) -> Result<String> {
        let path = self.path.join(name);
        let mut file = create(&path)?;
        write(&mut file, &path, format!("{value:#}\n").as_bytes())?;
        flush(&file, &path)?;
        Ok(name.to_string())
    }

    fn copy(&self, source_dir: &Path, name: &str) -> Result<()> {
        let (source, bytes) = open_regular(source_dir, name)?;
        let source_path = source_dir.join(name);
        if bytes > COPIED_BYTES_MAX {
            return Err(Error::input(
                "export",
                printable_path(&source_path),
                format!("at most {COPIED_BYTES_MAX} bytes"),
                bytes.to_string(),
                "check that this is the file meant",
            ));
        }
        let path = self.path.join(name);
        let mut file = create(&path)?;
        let copied = std::io::copy(&mut source.take(COPIED_BYTES_MAX), &mut file);
        copied.map_err(|source| Error::io("copy", &source_path, source))?;
        flush(&file, &path)
    }

    /// Flushes the directory and renames it to its target, whose old content goes last.
    fn publish(&mut self, target: &Target) -> Result<()> {
        flush_dir(&self.path)?;
        let rename = |from: &Path, to: &Path| {
            fs::rename(from, to).map_err(|source| Error::io("rename", from, source))
        };
        let replaced = target.sibling("replaced");
        if target.replaces {
            rename(&target.dir, &replaced)?;
        }
        if let Err(error) = rename(&self.path, &target.dir) {
            if target.replaces {
                rename(&replaced, &target.dir)?;
            }
            return Err(error);
        }
        self.published = true;
        flush_dir(&target.parent)?;
        if target.replaces {
            let removed = fs::remove_dir_all(&replaced);
            removed.map_err(|source| Error::io("remove", &replaced, source))?;
        }
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.published {
            // The error that led here is the one to report; the directory's name says what it is.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

fn create(path: &Path) -> Result<File> {
    let file = OpenOptions::new().write(true).create_new(true).open(path);
    file.map_err(|source| Error::io("create", path, source))
}

fn write(file: &mut File, path: &Path, bytes: &[u8]) -> Result<()> {
    file.write_all(bytes).map_err(|source| Error::Io {
        action: "write",
        path: path.to_path_buf(),
        source,
        remedy: "; nothing of the export is kept".to_string(),
    })
}

fn flush(file: &File, path: &Path) -> Result<()> {
    file.sync_all()
        .map_err(|source| Error::io("flush", path, source))
}

fn flush_dir(path: &Path) -> Result<()> {
    let dir = File::open(path).map_err(|source| Error::io("open", path, source))?;
    flush(&dir, path)
}
