//! Tiles copied out for a commit, while other tiles are promoted and updated.
//!
//! - Extents travel in slabs of the commits' own ring: a copy of a home, or read from the scratch
//!   store. A full ring waits for the commit's writes.
//! - Once an extent has been given away, nothing of its tile is looked at for it again: when the
//!   last one is, the tile may be updated, written or not.
//!
//! That nobody changes the tile meanwhile is `step`'s to keep.

use super::{Tiers, byte_range};
use crate::device::Queue;
use crate::error::Result;
use crate::host::Lease;
use crate::store::ExtentKey;
use crate::tile::Section;

impl Tiers {
    /// Calls `with` for each extent of a section, in no particular order, with a slab that begins
    /// with its bytes. The first error ends it, `with`'s own among them.
    ///
    /// # Panics
    /// If the plan has no ring for commits.
    pub fn capture_section(
        &self,
        layer: u16,
        section: Section,
        with: &mut dyn FnMut(ExtentKey, Lease) -> Result<()>,
    ) -> Result<()> {
        let ring = self.commit_ring.as_ref();
        let ring = ring.expect("the plan has slabs for commits");
        let layout = self.layout(layer);
        let key = |extent| ExtentKey {
            tile: layout.id,
            section,
            extent,
        };
        let width = section.element_bytes(self.precision());
        if let Some(offset) = self.device_home(layer, section) {
            // A queue of its own: the copies wait for no work of the step.
            self.device.enter(Queue::Aside);
            for extent in 0..layout.extent_count() {
                let range = byte_range(&layout.extent_elements(extent), width);
                let mut slab = ring.take();
                let bytes = &mut slab.as_mut_slice::<u8>()[..range.len()];
                self.device.copy_out(offset + range.start as u64, bytes);
                self.device.check()?;
                with(key(extent), slab)?;
            }
            return Ok(());
        }
        if !self.is_spilled(layer, section) {
            for extent in 0..layout.extent_count() {
                let range = byte_range(&layout.extent_elements(extent), width);
                // The slab first: no home is locked while the disk is waited for.
                let mut slab = ring.take();
                let home = self.home(layer, section).expect("it is not spilled");
                slab.as_mut_slice::<u8>()[..range.len()]
                    .copy_from_slice(&home.as_slice::<u8>()[range]);
                drop(home);
                with(key(extent), slab)?;
            }
            return Ok(());
        }
        let (reply, done) = crossbeam_channel::unbounded();
        // Half the ring: the other half is being written meanwhile.
        let reads_max = ring.count().div_ceil(2);
        let (mut asked, mut given) = (0, 0);
        while given < layout.extent_count() {
            while asked < layout.extent_count() && ((asked - given) as usize) < reads_max {
                let slab = match ring.try_take() {
                    Some(slab) => slab,
                    None if asked == given => ring.take(),
                    None => break,
                };
                self.read_extent(key(asked), slab, &reply)?;
                asked += 1;
            }
            let completion = self.answer(&done)?;
            completion.result?;
            with(completion.key, completion.slab)?;
            given += 1;
        }
        Ok(())
    }
}
