//! A commit as a Hugging Face directory, by `hf::export`: read ahead, checked, streamed.

use std::path::Path;

use super::extents::Extents;
use super::store::{Commit, Store};
use super::stream::Reading;
use crate::error::{Error, Result};
use crate::hf::{self, ExportOptions, ExportReport};
use crate::store::ExtentKey;
use crate::tile::{Precision, Section, TileLayout, join_master};

/// Exports a commit's weights. `source_dir` gives tokenizer and licence, if it is there.
///
/// # Errors
/// [`Error::Input`] for a commit without a model, or a target that is there or in the store's
/// directory; those of reading and writing. The target is then as it was.
pub fn export(
    store: &Store,
    commit: &Commit,
    options: &ExportOptions,
    source_dir: Option<&Path>,
) -> Result<ExportReport> {
    refuse_store(store, &options.dir)?;
    let (Some((spec, precision)), Some(model)) = (&commit.model, commit.model_json()) else {
        return Err(Error::input(
            "export",
            store.path().display().to_string(),
            "a commit with its run's model",
            "metadata of something else",
            "only commits of terrace train can be exported",
        ));
    };
    let layouts = spec.tile_layouts();
    let table = &commit.manifest().table;
    let sections: &[Section] = match precision {
        Precision::Bf16 | Precision::Bf16Moments => &[Section::Weight, Section::Residual],
        Precision::Fp32 => &[Section::Weight],
    };
    let mut indices = Vec::new();
    for layout in &layouts {
        for extent in 0..layout.extent_count() {
            for section in sections {
                let key = ExtentKey {
                    tile: layout.id,
                    section: *section,
                    extent,
                };
                indices.push(table.index(key).ok_or_else(|| missing(store, key))?);
            }
        }
    }
    let mut extents = Extents::start(store, commit.manifest(), indices, Reading::pread())?;
    let mut weight = Vec::new();
    let mut read = |_: &TileLayout, _: std::ops::Range<u64>, out: &mut [f32]| {
        weight.clear();
        weight.extend_from_slice(next(&mut extents)?);
        match precision {
            Precision::Bf16 | Precision::Bf16Moments => {
                let residual = next(&mut extents)?.as_chunks::<2>().0;
                let pairs = weight.as_chunks::<2>().0.iter().zip(residual);
                for (value, (hi, lo)) in out.iter_mut().zip(pairs) {
                    *value = join_master(u16::from_le_bytes(*hi), i16::from_le_bytes(*lo));
                }
            }
            Precision::Fp32 => {
                for (value, bits) in out.iter_mut().zip(weight.as_chunks::<4>().0) {
                    *value = f32::from_le_bytes(*bits);
                }
            }
        }
        Ok(())
    };
    hf::export(options, spec, Some(model), source_dir, &mut read)
}

fn next<'a>(extents: &'a mut Extents<'_>) -> Result<&'a [u8]> {
    let ended = || Error::StoreFailed {
        first: "a reading thread has ended".to_string(),
    };
    extents.next().ok_or_else(ended)?.bytes
}

fn missing(store: &Store, key: ExtentKey) -> Error {
    Error::input(
        "export",
        store.path().display().to_string(),
        "the sections of the commit's own model",
        format!("none for {key}"),
        "the commit's config.json is another model's",
    )
}

/// Refuses a target within the store's directory.
pub(super) fn refuse_store(store: &Store, target: &Path) -> Result<()> {
    let directory = store.path().parent().unwrap_or(Path::new("."));
    let inside = || {
        let store = directory.canonicalize().ok()?;
        let mut found = target;
        loop {
            // What does not exist yet lies where its nearest parent does.
            if let Ok(real) = found.canonicalize() {
                return Some(real.starts_with(store));
            }
            found = match found.parent() {
                Some(parent) if parent != Path::new("") => parent,
                _ => Path::new("."),
            };
        }
    };
    match inside() {
        Some(true) => Err(Error::input(
            "arguments",
            "--out",
            "a directory outside the store's",
            crate::error::printable(&target.to_string_lossy()),
            "choose another",
        )),
        _ => Ok(()),
    }
}
