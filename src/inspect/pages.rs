//! A store's file opened to be looked at, and memory that direct I/O can fill.
//!
//! - The file is opened read-only, past the page cache where the file system allows it, so that
//!   what is verified is what the drive has. Links, pipes and devices are refused.
//! - [`Pages`] is plain memory that starts on a page; it moves into a read and comes back.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::store::advise_huge_pages;
use crate::tile::PAGE_BYTES;

const PAGE: usize = PAGE_BYTES as usize;

/// What memory starts on: a huge page. A direct read pins one of these instead of 512 pages.
const ALIGNMENT: usize = 2 << 20;

/// Memory that starts on a page, a huge one where the system has them.
pub(super) struct Pages {
    pub(super) memory: Vec<u8>,
    /// Where the page begins within `memory`.
    pub(super) start: usize,
    /// Bytes from there.
    bytes: usize,
}

impl Pages {
    /// Zeros of at least `bytes`, whole pages.
    pub(super) fn new(bytes: usize) -> Pages {
        let bytes = bytes.next_multiple_of(PAGE).max(PAGE);
        let mut memory = vec![0; bytes + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT);
        advise_huge_pages(&mut memory[start..start + bytes]);
        Pages {
            memory,
            start,
            bytes,
        }
    }

    /// Memory that an operation gave back.
    #[cfg(feature = "inspect-uring")]
    pub(super) fn from_parts(memory: Vec<u8>, start: usize) -> Pages {
        let bytes = memory.len() - ALIGNMENT;
        Pages {
            memory,
            start,
            bytes,
        }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.bytes]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.bytes]
    }
}

/// A file of tiles, open for reading.
#[derive(Clone)]
pub(super) struct TileFile {
    pub(super) path: PathBuf,
    pub(super) file: Arc<File>,
    /// Bytes that it had when it was opened.
    pub(super) length: u64,
    /// Reads go past the page cache.
    pub(super) direct: bool,
}

impl TileFile {
    /// Opens a regular file; a link is refused.
    pub(super) fn open(path: &Path) -> Result<TileFile> {
        let failed = |source| Error::Io {
            action: "open",
            path: path.to_path_buf(),
            source,
            remedy: "; name a run's checkpoint.dir or safetensors".to_string(),
        };
        let plain = open_with(path, 0).map_err(failed)?;
        let metadata = plain.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Err(failed(io::Error::other("not a regular file")));
        }
        // Some file systems take the flag and refuse the read.
        let direct = open_with(path, libc::O_DIRECT).and_then(|file| {
            let mut page = Pages::new(PAGE);
            file.read_at(page.bytes_mut(), 0).map(|_| file)
        });
        let (file, direct) = match direct {
            Ok(file) => (file, true),
            Err(_) => (plain, false),
        };
        Ok(TileFile {
            path: path.to_path_buf(),
            file: Arc::new(file),
            length: metadata.len(),
            direct,
        })
    }

    /// Fills `out`'s first `bytes` (whole pages) from a page of the file on.
    ///
    /// # Errors
    /// Those of the system; [`io::ErrorKind::UnexpectedEof`] past the file's end.
    pub(super) fn read_into(&self, offset: u64, bytes: usize, out: &mut Pages) -> io::Result<()> {
        read_rest(&self.file, offset, 0, &mut out.bytes_mut()[..bytes])
    }

    /// `bytes` (whole pages) from a page of the file on.
    pub(super) fn read(&self, offset: u64, bytes: usize) -> io::Result<Pages> {
        let mut pages = Pages::new(bytes);
        self.read_into(offset, bytes, &mut pages)?;
        Ok(pages)
    }
}

fn open_with(path: &Path, flags: i32) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags(flags | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(path)
}

/// Goes on with a read of which `done` bytes are there: from the last whole page, since direct I/O
/// refuses other offsets.
pub(super) fn read_rest(
    file: &File,
    offset: u64,
    mut done: usize,
    out: &mut [u8],
) -> io::Result<()> {
    while done < out.len() {
        let from = done / PAGE * PAGE;
        match file.read_at(&mut out[from..], offset + from as u64) {
            Ok(read) if from + read <= done => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => done = from + read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
