//! Small host arrays on their way to the card: indices, positions, bounds.
//!
//! - A ring of pinned memory and one of device memory, of the same size and the same offsets. An
//!   array is copied to the first, then, in the stream's order, to the second.
//! - A segment of the pinned ring is written again only after the copies out of it are done; the
//!   device's ring needs no wait, as the stream keeps its users in order.
//! - An operation stages at most [`SEGMENT_COUNT`]` − 1` arrays, so that none of them is
//!   overwritten before it is launched.

use super::driver::{self, DeviceMemory, Event, Fault, PinnedMemory, Stream};

/// Segments of the ring.
const SEGMENT_COUNT: usize = 8;

/// Bytes that an array starts on.
const ARRAY_ALIGNMENT: usize = 256;

/// The ring of one stream.
pub(super) struct Staging {
    pinned: PinnedMemory,
    device: DeviceMemory,
    /// By segment: the copies out of it when it was last left.
    left: Vec<Event>,
    segment_bytes: usize,
    segment: usize,
    /// First free byte of the segment.
    next: usize,
}

impl Staging {
    /// A ring whose arrays have at most `segment_bytes`, in the current context.
    pub(super) fn new(segment_bytes: usize) -> Result<Staging, Fault> {
        let bytes = SEGMENT_COUNT * segment_bytes;
        Ok(Staging {
            pinned: PinnedMemory::take(bytes)?,
            device: DeviceMemory::take(bytes as u64)?,
            left: (0..SEGMENT_COUNT)
                .map(|_| Event::new())
                .collect::<Result<_, _>>()?,
            segment_bytes,
            segment: 0,
            next: 0,
        })
    }

    /// Starts the copy of `values` on `stream`; returns its address on the card.
    ///
    /// # Panics
    /// If `values` is longer than a segment.
    pub(super) fn put(&mut self, values: &[u32], stream: &Stream) -> Result<u64, Fault> {
        let bytes = size_of_val(values);
        assert!(
            bytes <= self.segment_bytes,
            "{bytes} bytes of indices, at most {} are staged",
            self.segment_bytes
        );
        if self.next + bytes > self.segment_bytes {
            self.left[self.segment].record(stream)?;
            self.segment = (self.segment + 1) % SEGMENT_COUNT;
            self.next = 0;
            self.left[self.segment].wait()?;
        }
        let offset = self.segment * self.segment_bytes + self.next;
        self.next += bytes.next_multiple_of(ARRAY_ALIGNMENT);
        let address = self.device.address + offset as u64;
        debug_assert!(offset + bytes <= self.pinned.bytes);
        // SAFETY: in bounds of both rings; the pinned range has no copy in flight, as its segment's
        // event was waited for, and is not written again before the next one is.
        unsafe {
            let from = self.pinned.address.add(offset);
            std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), from, bytes);
            driver::copy_in(address, from, bytes, stream)?;
        }
        Ok(address)
    }
}
