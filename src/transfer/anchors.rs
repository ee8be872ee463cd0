//! Anchors that leave the device between forward and backward, each to a place in host or, through
//! the slab ring, to extents of the store.
//!
//! - An extent that is written is nobody's to wait for: its slab goes back to the ring when it is,
//!   and the store reads what was last given to it. A failed write latches the store, so that the
//!   anchor's read, or any earlier request, meets it.
//! - Of an anchor that a micro-batch does not fill, only extents with something in them move.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Tiers;
use crate::device::View;
use crate::error::Result;
use crate::host::{HostCutter, Lease};
use crate::plan::Plan;
use crate::stats::Hop;
use crate::store::{ExtentKey, StoredSection};
use crate::tile::{EXTENT_BYTES_MAX, Precision, Section, TileId};

/// Where anchors are while they are not on the device.
pub(super) struct Anchors {
    /// Layers 1 to here, inclusive, have them in the store.
    stored: u16,
    micros: u32,
    /// Those of the layers after, by layer then micro-batch.
    in_host: Vec<Mutex<Lease>>,
}

impl Anchors {
    /// Cuts the places in host.
    pub(super) fn cut(plan: &Plan, cutter: &mut HostCutter) -> Anchors {
        let shape = &plan.map.shape;
        let layers = u64::from(shape.travelling - plan.stored_anchors);
        let places = 0..layers * shape.micros;
        let in_host = places.map(|_| Mutex::new(cutter.cut(plan.map.anchor_bytes)));
        Anchors {
            stored: plan.stored_anchors,
            micros: u32::try_from(shape.micros).expect("micro-batches are capped"),
            in_host: in_host.collect(),
        }
    }

    /// Whether any are in the store.
    pub(super) fn are_stored(&self) -> bool {
        self.stored > 0
    }

    fn place(&self, layer: u16, micro: u32) -> MutexGuard<'_, Lease> {
        let index = (u32::from(layer - self.stored) - 1) * self.micros + micro;
        let place = &self.in_host[index as usize];
        place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The store's sections of a plan's anchors.
pub(super) fn stored(plan: &Plan) -> impl Iterator<Item = StoredSection> + '_ {
    let micros = u32::try_from(plan.map.shape.micros).expect("micro-batches are capped");
    let element_bytes = Section::Anchor.element_bytes(Precision::Bf16);
    (1..=plan.stored_anchors).flat_map(move |layer| {
        (0..micros).map(move |micro| StoredSection {
            tile: tile(layer, micro),
            section: Section::Anchor,
            elements: plan.map.anchor_bytes / element_bytes,
            element_bytes,
        })
    })
}

fn tile(layer: u16, micro: u32) -> TileId {
    let part = u16::try_from(micro).expect("micro-batches are capped");
    TileId { layer, part }
}

fn key(layer: u16, micro: u32, extent: u32) -> ExtentKey {
    ExtentKey {
        tile: tile(layer, micro),
        section: Section::Anchor,
        extent,
    }
}

/// Extents of an anchor that hold something of it.
fn extent_count(anchor: View) -> u32 {
    let count = anchor.bytes().div_ceil(EXTENT_BYTES_MAX);
    u32::try_from(count).expect("an anchor has fewer than 2^32 extents")
}

/// Byte of the device's arena at which an extent of an anchor begins.
fn offset(anchor: View, extent: u32) -> u64 {
    anchor.offset + u64::from(extent) * EXTENT_BYTES_MAX
}

impl Tiers {
    /// Demotes a layer's anchor to its place in host, or to the store: then the last writes are
    /// under way when this returns.
    pub fn demote_anchor(&self, layer: u16, micro: u32, anchor: View) -> Result<()> {
        self.stats.crossed(Hop::Demote, anchor.bytes());
        if layer > self.anchors.stored {
            let mut place = self.anchors.place(layer, micro);
            let bytes = usize::try_from(anchor.bytes()).expect("an anchor fits its place");
            self.device
                .copy_out(anchor.offset, &mut place.as_mut_slice::<u8>()[..bytes]);
            return Ok(());
        }
        // Without a receiver a finished write gives its slab back at once.
        let (reply, _) = crossbeam_channel::unbounded();
        for extent in 0..extent_count(anchor) {
            let key = key(layer, micro, extent);
            let mut slab = self.ring.take();
            let bytes = self.scratch().payload_bytes(key);
            self.device.copy_out(
                offset(anchor, extent),
                &mut slab.as_mut_slice::<u8>()[..bytes],
            );
            self.device.check()?;
            self.write_extent(key, slab, &reply)?;
        }
        Ok(())
    }

    /// Promotes it again.
    pub fn promote_anchor(&self, layer: u16, micro: u32, anchor: View) -> Result<()> {
        self.stats.crossed(Hop::Promote, anchor.bytes());
        if layer > self.anchors.stored {
            let place = self.anchors.place(layer, micro);
            let bytes = usize::try_from(anchor.bytes()).expect("an anchor fits its place");
            self.device
                .copy_in(anchor.offset, &place.as_slice::<u8>()[..bytes]);
            return Ok(());
        }
        let key = |extent| key(layer, micro, extent);
        self.stream_spilled(extent_count(anchor), &key, &mut |extent, bytes| {
            self.device.copy_in(offset(anchor, extent), bytes);
            Ok(())
        })
    }
}
