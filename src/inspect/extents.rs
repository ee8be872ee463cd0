//! Extents of a commit, read ahead and checked: nothing unverified is handed out.
//!
//! Extents that lie side by side are read together, up to 4 MiB; where such a read fails, each is
//! read alone, so that the right one is named.

use std::io;

use super::pages::{Pages, TileFile};
use super::store::Store;
use super::stream::{Done, Piece, Reading, Stream};
use crate::config::IoEngine;
use crate::error::{Error, Result};
use crate::store::checksum;
use crate::store::codec::Coder;
use crate::store::format::{Geometry, Manifest, Stored};
use crate::tile::EXTENT_BYTES_MAX;

/// Extents that are read together: `first..first + count` of a list of indices.
struct Run {
    first: usize,
    count: usize,
}

/// Extents of one commit in a given order.
pub(super) struct Extents<'a> {
    store: &'a Store,
    manifest: &'a Manifest,
    indices: Vec<usize>,
    runs: Vec<Run>,
    stream: Stream,
    current: Option<Done>,
    /// Position in `indices` of the next extent.
    next: usize,
    lone: Pages,
    /// Decodes compressed extents, in `decoded`; only where there are any.
    coder: Option<(Coder, Vec<u8>)>,
}

/// An extent that was handed out.
pub(super) struct Extent<'a> {
    /// Its index in the commit's table.
    pub(super) index: usize,
    /// Its payload, checked and decoded; or why not.
    pub(super) bytes: Result<&'a [u8]>,
    /// Bytes that it has on the disk.
    pub(super) stored_bytes: u64,
}

impl<'a> Extents<'a> {
    /// Starts to read the extents at `indices` of a commit's table.
    ///
    /// # Errors
    /// As `Stream::start`.
    pub(super) fn start(
        store: &'a Store,
        manifest: &'a Manifest,
        indices: Vec<usize>,
        how: Reading,
    ) -> Result<Extents<'a>> {
        let geometry = store.geometry();
        let (runs, pieces) = join_runs(manifest, geometry, &indices, how.rate);
        Ok(Extents {
            store,
            manifest,
            indices,
            runs,
            stream: Stream::start(store.file(), pieces, how)?,
            current: None,
            next: 0,
            lone: Pages::new(0),
            coder: match manifest.is_compressed() {
                true => Some(new_coder(store)?),
                false => None,
            },
        })
    }

    /// What reads.
    pub(super) fn engine(&self) -> IoEngine {
        self.stream.engine()
    }

    /// Whether every extent was handed out.
    pub(super) fn is_finished(&self) -> bool {
        self.next == self.indices.len()
    }

    /// The next extent; `None` after the last.
    pub(super) fn next(&mut self) -> Option<Extent<'_>> {
        let index = *self.indices.get(self.next)?;
        let run = match &self.current {
            Some(done) => done.index,
            None => {
                let done = self.stream.next()?;
                let run = done.index;
                self.current = Some(done);
                run
            }
        };
        let Run { first, count } = self.runs[run];
        if self.next == first + count {
            let done = self.current.take()?;
            self.stream.give_back(done.pages);
            return self.next();
        }
        self.next += 1;
        let (store, manifest) = (self.store, self.manifest);
        let (table, first) = (&manifest.table, self.indices[first]);
        let start = (table.offset(index) - table.offset(first)) as usize;
        let stored_bytes = manifest.stored_bytes(index);
        let done = self.current.as_ref()?;
        let read = match &done.result {
            Ok(()) => Ok(&done.pages.bytes()[start..start + stored_bytes]),
            Err(_) => read_alone(store.file(), manifest, store.geometry(), index)
                .map(|pages| self.lone = pages)
                .map(|()| &self.lone.bytes()[..stored_bytes]),
        };
        let bytes = match read {
            Ok(bytes) => check(store, manifest, index, bytes)
                .and_then(|bytes| decode(store, manifest, index, bytes, &mut self.coder)),
            Err(source) => Err(read_error(store, manifest, index, source)),
        };
        Some(Extent {
            index,
            bytes,
            stored_bytes: stored_bytes as u64,
        })
    }
}

fn new_coder(store: &Store) -> Result<(Coder, Vec<u8>)> {
    let refused = |source| Error::io("start to decode", store.path(), source);
    let coder = Coder::new().map_err(refused)?;
    Ok((coder, vec![0; EXTENT_BYTES_MAX as usize]))
}

/// The payload of an extent whose stored bytes are right.
fn decode<'a>(
    store: &Store,
    manifest: &Manifest,
    index: usize,
    bytes: &'a [u8],
    coder: &'a mut Option<(Coder, Vec<u8>)>,
) -> Result<&'a [u8]> {
    let table = &manifest.table;
    let payload = table.payload_bytes(index);
    let (Stored::Zstd { bytes: stored }, Some((coder, decoded))) =
        (manifest.stored[index], coder.as_mut())
    else {
        return Ok(&bytes[..payload]);
    };
    decoded[..bytes.len()].copy_from_slice(bytes);
    let width = table.element_bytes(index) as usize;
    let outcome = coder.decode(decoded, stored as usize, payload, width);
    outcome.map_err(|source| read_error(store, manifest, index, source))?;
    Ok(&decoded[..payload])
}

/// Neighbouring extents with the memory that holds them, all checked.
pub(super) struct CheckedRun {
    pub(super) piece: Piece,
    pub(super) pages: Pages,
    pub(super) home: Option<crossbeam_channel::Sender<Pages>>,
}

impl Extents<'_> {
    /// The next extents that were read together; `None` after the last. Not to be mixed with
    /// [`Extents::next`].
    pub(super) fn next_run(&mut self) -> Option<Result<CheckedRun>> {
        let done = self.stream.next()?;
        let Run { first, count } = self.runs[done.index];
        let (store, manifest) = (self.store, self.manifest);
        let indices = &self.indices[first..first + count];
        if let Err(source) = done.result {
            return Some(Err(read_error(store, manifest, indices[0], source)));
        }
        let mut at = 0;
        for index in indices {
            let end = at + manifest.stored_bytes(*index);
            if let Err(error) = check(store, manifest, *index, &done.pages.bytes()[at..end]) {
                return Some(Err(error));
            }
            at = end;
        }
        self.next = first + count;
        Some(Ok(CheckedRun {
            piece: Piece {
                offset: extent_offset(manifest, store.geometry(), indices[0]),
                bytes: at,
            },
            pages: done.pages,
            home: self.stream.home(),
        }))
    }
}

/// Joins neighbours in the file into one read. At a rate each is read alone, at its time.
fn join_runs(
    manifest: &Manifest,
    geometry: &Geometry,
    indices: &[usize],
    rate: Option<u64>,
) -> (Vec<Run>, Vec<Piece>) {
    let table = &manifest.table;
    let start = geometry.extents_offset(manifest.region as usize);
    let (mut runs, mut pieces): (Vec<Run>, Vec<Piece>) = (Vec::new(), Vec::new());
    for (position, index) in indices.iter().enumerate() {
        let (offset, bytes) = (start + table.offset(*index), manifest.stored_bytes(*index));
        match (runs.last_mut(), pieces.last_mut()) {
            (Some(run), Some(piece))
                if rate.is_none()
                    && piece.offset + piece.bytes as u64 == offset
                    && (piece.bytes + bytes) as u64 <= EXTENT_BYTES_MAX =>
            {
                run.count += 1;
                piece.bytes += bytes;
            }
            _ => {
                runs.push(Run {
                    first: position,
                    count: 1,
                });
                pieces.push(Piece { offset, bytes });
            }
        }
    }
    (runs, pieces)
}

fn read_alone(
    file: &TileFile,
    manifest: &Manifest,
    geometry: &Geometry,
    index: usize,
) -> io::Result<Pages> {
    let offset = extent_offset(manifest, geometry, index);
    file.read(offset, manifest.stored_bytes(index))
}

/// Where an extent begins in the file.
pub(super) fn extent_offset(manifest: &Manifest, geometry: &Geometry, index: usize) -> u64 {
    geometry.extents_offset(manifest.region as usize) + manifest.table.offset(index)
}

fn check<'a>(
    store: &Store,
    manifest: &Manifest,
    index: usize,
    bytes: &'a [u8],
) -> Result<&'a [u8]> {
    let (expected, got) = (manifest.checksums[index], checksum(bytes));
    if expected == got {
        return Ok(bytes);
    }
    // A run that goes on meanwhile may have put a newer commit there.
    store.check_still_there(manifest)?;
    let key = manifest.table.key(index);
    Err(Error::ExtentChecksum {
        path: store.path().to_path_buf(),
        tile: key.place(),
        extent: key.extent,
        offset: extent_offset(manifest, store.geometry(), index),
        expected,
        got,
    })
}

fn read_error(store: &Store, manifest: &Manifest, index: usize, source: io::Error) -> Error {
    let key = manifest.table.key(index);
    Error::TileIo {
        action: "read",
        path: store.path().to_path_buf(),
        tile: key.place(),
        extent: key.extent,
        offset: extent_offset(manifest, store.geometry(), index),
        needed: manifest.stored_bytes(index) as u64,
        free: crate::store::free_bytes(store.path()),
        source,
    }
}
