//! Safetensors looked at as files: one, or all of a model's directory.
//!
//! Headers are checked by `hf` before anything is used. Tensors stand in the order of the files.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::hf::import::open_shards_of;
use crate::hf::safetensors::{SafetensorsFile, TensorEntry};

/// Open safetensors files.
pub struct TensorFiles {
    path: PathBuf,
    files: Vec<SafetensorsFile>,
    /// Index of the file, and the name.
    order: Vec<(usize, String)>,
}

/// A tensor of a file.
pub struct Tensor<'a> {
    /// Its name, as it stands in the file.
    pub name: &'a str,
    /// Its file.
    pub file: &'a SafetensorsFile,
    /// Its format and place.
    pub entry: &'a TensorEntry,
}

impl Tensor<'_> {
    /// Elements.
    pub fn elements(&self) -> u64 {
        // The header's check has multiplied them.
        self.entry.shape.iter().product()
    }
}

impl TensorFiles {
    /// Whether a directory has a model's safetensors.
    pub fn is_there(directory: &Path) -> bool {
        ["model.safetensors", "model.safetensors.index.json"]
            .iter()
            .any(|name| directory.join(name).symlink_metadata().is_ok())
    }

    /// Opens a `.safetensors` file, or those of a model's directory.
    ///
    /// # Errors
    /// Those of [`SafetensorsFile::open`]; [`Error::Input`] for an index that is wrong or a
    /// directory without any.
    pub fn open(path: &Path) -> Result<TensorFiles> {
        let files = if path.is_dir() {
            open_shards_of(path)?
        } else {
            let parent = match path.parent() {
                Some(parent) if parent != Path::new("") => parent,
                _ => Path::new("."),
            };
            let name = path.file_name().and_then(|name| name.to_str());
            let name = name.ok_or_else(|| {
                Error::input(
                    "safetensors",
                    path.display().to_string(),
                    "a file's name in UTF-8",
                    "another",
                    "rename it",
                )
            })?;
            vec![SafetensorsFile::open(parent, name)?]
        };
        let mut order: Vec<(usize, u64, String)> = Vec::new();
        for (index, file) in files.iter().enumerate() {
            order.extend(file.names().filter_map(|name| {
                let offset = file.tensor(name)?.offset;
                Some((index, offset, name.to_string()))
            }));
        }
        order.sort_unstable();
        Ok(TensorFiles {
            path: path.to_path_buf(),
            files,
            order: order
                .into_iter()
                .map(|(file, _, name)| (file, name))
                .collect(),
        })
    }

    /// What was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files.
    pub fn files(&self) -> &[SafetensorsFile] {
        &self.files
    }

    /// All tensors.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        self.order.iter().filter_map(|(index, name)| {
            let file = &self.files[*index];
            let entry = file.tensor(name)?;
            Some(Tensor { name, file, entry })
        })
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        self.files.iter().find_map(|file| {
            let (name, entry) = file.named(name)?;
            Some(Tensor { name, file, entry })
        })
    }
}
