//! A file's bytes through a mapping: read without a copy of the file in the process's memory.
//!
//! - Pages are dropped from the process once they were read, so that importing a model takes no
//!   memory beyond the plan's.
//! - The length is checked against the file again before each read. A file that another program
//!   cuts during the read itself ends the process with SIGBUS: the price of a mapping.

use std::fs::File;
use std::io;

use memmap2::{Advice, Mmap, UncheckedAdvice};

/// A mapped file.
#[derive(Debug)]
pub(super) struct Mapped {
    file: File,
    map: Mmap,
}

impl Mapped {
    /// Maps a whole file, which must not be empty.
    pub(super) fn new(file: File) -> io::Result<Mapped> {
        // SAFETY: the mapping is read-only and private to this object; that nobody cuts the file
        // while it is mapped is checked before each read and otherwise the system's to punish.
        let map = unsafe { Mmap::map(&file) }?;
        map.advise(Advice::Sequential)?;
        Ok(Mapped { file, map })
    }

    /// Copies bytes at `offset`; an error if the file no longer has them.
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(out.len() as u64);
        let length = self.file.metadata()?.len().min(self.map.len() as u64);
        let Some(end) = end.filter(|end| *end <= length) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        out.copy_from_slice(&self.map[offset as usize..end as usize]);
        // SAFETY: the mapping is of a file and never written: dropped pages read the same again.
        let dropped = unsafe {
            self.map
                .unchecked_advise_range(UncheckedAdvice::DontNeed, offset as usize, out.len())
        };
        // Advice that is refused costs memory only.
        dropped.or(Ok(()))
    }
}
