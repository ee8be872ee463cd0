//! All structures of a store's file, copy by copy: what is whole, what is not, what counts.
//!
//! - Bytes become structures in [`crate::store::format`] only.
//! - A copy that cannot be read or decoded is a fact to report, not an error; so is a file
//!   that is shorter than its superblock names.
//! - What is in force is decided as FORMAT.md, "Opening", says.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::pages::TileFile;
use crate::error::{Error, Result};
use crate::store::format::{
    self, Flaw, Geometry, MANIFEST_COPIES, Manifest, Region, SUPERBLOCK_COPIES, Superblock,
};
use crate::store::recover::{in_force, newest};
use crate::tile::PAGE_BYTES;

/// What is wrong at a place of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Which part.
    pub what: String,
    /// Where it is in the file.
    pub offset: u64,
    /// What it should be.
    pub expected: String,
    /// What it is.
    pub got: String,
}

impl Fault {
    fn of(flaw: Flaw, base: u64, copy: usize) -> Fault {
        Fault {
            what: format!("{} (copy {copy})", flaw.what),
            offset: base + flaw.offset as u64,
            expected: flaw.expected,
            got: flaw.got,
        }
    }

    /// The fault as an error of the file at `path`.
    pub fn error(&self, path: PathBuf, remedy: &str) -> Error {
        Error::Damaged {
            path,
            what: self.what.clone(),
            offset: self.offset,
            expected: self.expected.clone(),
            got: self.got.clone(),
            remedy: remedy.to_string(),
        }
    }
}

/// A commit that the superblock in force names.
pub struct Found {
    /// Its region.
    pub region: usize,
    /// Its generation.
    pub generation: u64,
    /// Bytes of its manifest.
    pub manifest_bytes: u64,
    /// Checksum of its manifest.
    pub manifest_checksum: u128,
    /// What is wrong with each manifest copy; `None` where it is whole.
    pub copies: [Option<Fault>; MANIFEST_COPIES as usize],
    /// The manifest, if a copy of it is whole.
    pub manifest: Option<Manifest>,
}

/// What a file holds.
pub struct Survey {
    /// Each superblock copy, or what is wrong with it.
    pub copies: Vec<Result<Superblock, Fault>>,
    /// The superblock in force; `None` if no copy can be believed.
    pub superblock: Option<Superblock>,
    /// Its commits, by region.
    pub commits: Vec<Found>,
    /// The file is shorter than its superblock names.
    pub length: Option<Fault>,
}

impl Survey {
    /// Reads every structure of `file`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a later version made the store.
    pub(super) fn read(file: &TileFile) -> Result<Survey> {
        let copies = read_superblocks(file)?;
        let superblock = in_force(copies.iter().flatten(), |superblock| {
            newest(superblock).is_none_or(|region| {
                let found = read_commit(file, superblock, region);
                found.is_some_and(|found| found.manifest.is_some())
            })
        });
        let superblock = superblock.cloned();
        let mut survey = Survey {
            copies,
            superblock,
            commits: Vec::new(),
            length: None,
        };
        if let Some(superblock) = &survey.superblock {
            let regions = 0..superblock.regions.len();
            survey.commits = regions
                .filter_map(|region| read_commit(file, superblock, region))
                .collect();
            let expected = superblock.geometry.file_bytes;
            survey.length = (file.length < expected).then(|| Fault {
                what: "file length".to_string(),
                offset: file.length,
                expected: format!("{expected} bytes"),
                got: format!("{} bytes", file.length),
            });
        }
        Ok(survey)
    }

    /// Superblock copies that differ from the one in force, with what is wrong.
    pub fn stale_copies(&self) -> Vec<(usize, Fault)> {
        let Some(superblock) = &self.superblock else {
            return Vec::new();
        };
        let copies = self.copies.iter().enumerate();
        copies
            .filter_map(|(copy, found)| match found {
                Ok(found) if found == superblock => None,
                Ok(found) => Some((
                    copy,
                    Fault {
                        what: format!("superblock (copy {copy})"),
                        offset: format::superblock_offset(copy),
                        expected: format!("sequence {}", superblock.sequence),
                        got: format!("sequence {}", found.sequence),
                    },
                )),
                Err(fault) => Some((copy, fault.clone())),
            })
            .collect()
    }

    /// Why no superblock can be believed.
    pub fn superblock_fault(&self) -> Fault {
        let fault = self.copies.iter().find_map(|copy| copy.as_ref().err());
        fault.cloned().unwrap_or_else(|| Fault {
            what: "superblocks".to_string(),
            offset: 0,
            expected: "two that agree".to_string(),
            got: "all different".to_string(),
        })
    }
}

/// The four superblock copies.
pub(super) fn read_superblocks(file: &TileFile) -> Result<Vec<Result<Superblock, Fault>>> {
    let mut copies = Vec::with_capacity(SUPERBLOCK_COPIES);
    for copy in 0..SUPERBLOCK_COPIES {
        let offset = format::superblock_offset(copy);
        let page = match file.read(offset, PAGE_BYTES as usize) {
            Ok(page) => page,
            Err(error) => {
                copies.push(Err(unreadable("superblock", copy, offset, &error)));
                continue;
            }
        };
        copies.push(match Superblock::decode(page.bytes(), copy) {
            Ok(Ok(found)) => Ok(found),
            Ok(Err(newer)) => {
                return Err(Error::Unsupported {
                    what: "checkpoint format",
                    got: format!("{}: {newer}", file.path.display()),
                    supported: format!("version {}", format::VERSION),
                });
            }
            Err(flaw) => Err(Fault::of(flaw, offset, copy)),
        });
    }
    Ok(copies)
}

fn unreadable(what: &str, copy: usize, offset: u64, error: &std::io::Error) -> Fault {
    Fault {
        what: format!("{what} (copy {copy})"),
        offset,
        expected: "bytes that can be read".to_string(),
        got: error.to_string(),
    }
}

/// Both manifest copies of a region; `None` for a free one.
fn read_commit(file: &TileFile, superblock: &Superblock, region: usize) -> Option<Found> {
    let Region::Committed {
        generation,
        manifest_bytes,
        manifest_checksum,
    } = superblock.regions[region]
    else {
        return None;
    };
    let mut found = Found {
        region,
        generation,
        manifest_bytes,
        manifest_checksum,
        copies: [None, None],
        manifest: None,
    };
    for copy in 0..MANIFEST_COPIES {
        match read_manifest(file, superblock, &found, copy) {
            Ok(manifest) => found.manifest = found.manifest.or(Some(manifest)),
            Err(fault) => found.copies[copy as usize] = Some(fault),
        }
    }
    Some(found)
}

/// Bytes of a manifest copy, padded to a page.
pub(super) fn read_manifest_bytes(
    file: &TileFile,
    geometry: &Geometry,
    found: &Found,
    copy: u64,
) -> Result<Vec<u8>, Fault> {
    let offset = geometry.manifest_offset(found.region, copy);
    let bytes = found.manifest_bytes.next_multiple_of(PAGE_BYTES);
    let failed = |error: &std::io::Error| unreadable("manifest", copy as usize, offset, error);
    // Before memory is taken for it.
    if offset + bytes > file.length {
        return Err(failed(&std::io::ErrorKind::UnexpectedEof.into()));
    }
    let pages = file.read(offset, bytes as usize).map_err(|e| failed(&e))?;
    Ok(pages.bytes()[..bytes as usize].to_vec())
}

fn read_manifest(
    file: &TileFile,
    superblock: &Superblock,
    found: &Found,
    copy: u64,
) -> Result<Manifest, Fault> {
    let geometry = &superblock.geometry;
    let offset = geometry.manifest_offset(found.region, copy);
    let mut bytes = read_manifest_bytes(file, geometry, found, copy)?;
    bytes.truncate(found.manifest_bytes as usize);
    let manifest = Manifest::decode(&bytes, geometry)
        .map_err(|flaw| Fault::of(flaw, offset, copy as usize))?;
    let named = format::manifest_checksum(&bytes) == found.manifest_checksum
        && manifest.region as usize == found.region
        && manifest.generation == found.generation
        && manifest.store_uuid == superblock.store_uuid
        && manifest.model_hash == superblock.model_hash
        && format::layout_hash(&manifest.table) == superblock.layout_hash;
    if named {
        return Ok(manifest);
    }
    Err(Fault {
        what: format!("manifest (copy {copy})"),
        offset,
        expected: format!("generation {} of region {}", found.generation, found.region),
        got: format!("another one (generation {})", manifest.generation),
    })
}
