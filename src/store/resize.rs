//! A checkpoint store whose `keep` changes: regions added and cut in place.
//!
//! - Regions do not move: a larger `keep` needs more of them at the end of the file, a smaller one
//!   fewer. No commit is copied, and none is freed here: the next commit frees what is too many.
//! - Space comes before the superblock that names it, and goes after the one that no longer does. A
//!   file that is longer than its superblock says was cut off in between; the rest is let go.
//! - A full disk is refused before anything changes.
//!
//! FORMAT.md, "Another keep", is the same in words.

use std::fs::File;
use std::path::Path;

use super::checkpoint::CheckpointStore;
use super::commit;
use super::directory;
use super::disk::{self, Probe};
use super::format::{Geometry, Region, Superblock};
use super::reader::own_ring;
use super::sys;
use crate::error::{Error, Result};
use crate::tile::PAGE_BYTES;

/// Lengthens the file of a store for `keep` commits, if it is too short. The superblock stays.
pub(super) fn lengthen(path: &Path, probe: &Probe, now: &Superblock, keep: u32) -> Result<()> {
    let Some(wanted) = sizes(&now.geometry, keep + 1) else {
        return Ok(());
    };
    let file =
        directory::open_file(path, probe.direct, false).map_err(|e| Error::io("open", path, e))?;
    let length = file
        .metadata()
        .map_err(|e| Error::io("look at", path, e))?
        .len();
    // What lies beyond the superblock's end was cut off before it was named: it may hold anything.
    let (start, end) = (now.geometry.file_bytes, wanted.file_bytes);
    if end <= start {
        return Ok(());
    }
    let missing = end.saturating_sub(length);
    let remedy = format!(
        "free space, or set checkpoint.keep = {} as it was",
        now.keep
    );
    let full = |free: u64| Error::Budget {
        tier: "checkpoint",
        needed: missing,
        budget: free,
        missing: missing.saturating_sub(free),
        remedy: format!("{} is too full to keep {keep}; {remedy}", path.display()),
    };
    let free = sys::free_bytes(path);
    if missing > free {
        return Err(full(free));
    }
    let grown = sys::reserve(&file, end).or_else(|error| match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => file.set_len(end),
        _ => Err(error),
    });
    if let Err(error) = grown {
        file.set_len(length).ok();
        return Err(match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => full(sys::free_bytes(path)),
            _ => Error::io("reserve space for", path, error),
        });
    }
    let ring = own_ring(None)?;
    let whole = file.try_clone().map_err(|e| Error::io("open", path, e))?;
    let (mut disk, _) = disk::open(file, end, probe, &[ring.span()])
        .map_err(|e| Error::io("start I/O on", path, e))?;
    commit::fill_with_zeros(&mut *disk, &ring, start..end)
        .and_then(|()| whole.sync_all())
        .map_err(|e| commit::write_error(path, end - start, e))
}

/// Sizes of a store with another count of regions.
fn sizes(now: &Geometry, region_count: u32) -> Option<Geometry> {
    Geometry::new(now.extent_count, now.extents_bytes, region_count)
}

fn file_bytes(now: &Geometry, region_count: u32) -> u64 {
    sizes(now, region_count).map_or(u64::MAX, |sizes| sizes.file_bytes)
}

impl CheckpointStore {
    /// Keeps `keep` commits from the next commit on, in a file of `bytes`.
    ///
    /// # Errors
    /// Those of a write, which end the use of the store.
    pub(super) fn set_keep(&mut self, keep: u32, bytes: u64) -> Result<()> {
        if keep == self.superblock.keep {
            return self.cut_spare_regions();
        }
        let was = self.superblock.keep;
        let mut next = self.superblock.clone();
        next.keep = keep;
        let wanted = (keep + 1).max(next.geometry.region_count);
        let fitting = sizes(&next.geometry, wanted).filter(|sizes| sizes.file_bytes <= bytes);
        next.geometry = fitting.ok_or_else(|| Error::Budget {
            tier: "checkpoint",
            needed: file_bytes(&next.geometry, wanted),
            budget: bytes,
            missing: file_bytes(&next.geometry, wanted).saturating_sub(bytes),
            remedy: format!("set checkpoint.keep = {was} as it was"),
        })?;
        next.regions.resize(wanted as usize, Region::Free);
        self.replace(next)?;
        self.cut_spare_regions()?;
        let (path, bytes) = (
            self.path.display().to_string(),
            self.superblock.geometry.file_bytes,
        );
        self.sentences.push(format!(
            "{path}: room for {keep} commits that are kept, was {was}; the file has {bytes} bytes"
        ));
        Ok(())
    }

    /// Cuts free regions off the end, as far as there are more than `keep` needs, and what the file
    /// has beyond its last region.
    pub(super) fn cut_spare_regions(&mut self) -> Result<()> {
        let regions = &self.superblock.regions;
        let used = regions.iter().rposition(|region| *region != Region::Free);
        let used = used.map_or(0, |last| last as u32 + 1);
        // One of those that stay must be free: the next commit goes there.
        let full = regions.iter().take_while(|region| **region != Region::Free);
        let full = full.count() as u32 == used;
        let wanted = (used + u32::from(full)).max(self.superblock.keep + 1);
        if wanted < self.superblock.geometry.region_count {
            let mut next = self.superblock.clone();
            next.geometry = sizes(&next.geometry, wanted).expect("fewer than there are");
            next.regions.truncate(wanted as usize);
            self.replace(next)?;
        }
        self.trim()
    }

    /// Frees a region where none is free, as an earlier version left files behind that it had cut
    /// too short: the commit that cannot be read, else the oldest.
    ///
    /// # Errors
    /// [`Error::Input`] if that would leave no commit; those of a write.
    pub(super) fn free_a_region(&mut self) -> Result<usize> {
        let readable = |index: usize| self.commits[index].is_some();
        let held = commit::in_order_of_leaving(&self.superblock.regions, self.pinned, readable);
        let [first, _, ..] = held[..] else {
            return Err(Error::input(
                "checkpoint",
                self.path.display().to_string(),
                "a region that is free beside the last commit",
                "none",
                "raise checkpoint.keep",
            ));
        };
        let mut next = self.superblock.clone();
        next.regions[first] = Region::Free;
        self.replace(next)?;
        self.commits[first] = None;
        Ok(first)
    }

    /// Puts another superblock in force that names the same commits, or fewer.
    fn replace(&mut self, mut next: Superblock) -> Result<()> {
        self.settle_copies()?;
        next.sequence += 1;
        self.write_superblock(&next, &[0, 1])?;
        self.write_superblock(&next, &[2, 3])?;
        self.commits.resize(next.regions.len(), None);
        self.superblock = next;
        Ok(())
    }

    /// Lets go what the file has beyond its last region.
    fn trim(&mut self) -> Result<()> {
        let end = self
            .superblock
            .geometry
            .file_bytes
            .next_multiple_of(PAGE_BYTES);
        let Some(file) = &self.file else {
            return Ok(());
        };
        let cut = |file: &File| match file.metadata()?.len() > end {
            true => file.set_len(end),
            false => Ok(()),
        };
        cut(file).map_err(|e| Error::io("shorten", &self.path, e))
    }
}
