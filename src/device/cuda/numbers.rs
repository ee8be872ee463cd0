//! Sums on their way to the host: f64 in pinned memory, copied in the stream's order.
//!
//! A ring of places: a number is there once its stream has passed the copy, and until
//! [`NUMBERS_MAX`] others were asked for.

use super::driver::{self, Fault, PinnedMemory, Stream};
use crate::device::NUMBERS_MAX;

/// The ring.
pub(super) struct Numbers {
    memory: PinnedMemory,
    next: usize,
}

impl Numbers {
    /// A ring in the current context.
    pub(super) fn new() -> Result<Numbers, Fault> {
        let memory = PinnedMemory::take(NUMBERS_MAX * size_of::<f64>())?;
        Ok(Numbers { memory, next: 0 })
    }

    /// Starts the copy of the f64 at address `from`; returns its place.
    pub(super) fn copy(&mut self, from: u64, stream: &Stream) -> Result<usize, Fault> {
        let place = self.next;
        self.next = (place + 1) % NUMBERS_MAX;
        // SAFETY: `place` is in bounds; nobody reads it before a point after this copy.
        unsafe {
            let to = self.memory.address.add(place * size_of::<f64>());
            driver::copy_out(to, from, size_of::<f64>(), stream)?;
        }
        Ok(place)
    }

    /// The number at a place, whose copy has been passed.
    pub(super) fn read(&self, place: usize) -> f64 {
        assert!(place < NUMBERS_MAX, "place {place}");
        // SAFETY: in bounds and aligned; the card wrote it before the point that was waited for.
        unsafe { std::ptr::read_volatile(self.memory.address.cast::<f64>().add(place)) }
    }
}
