//! The host tier: one arena taken at the start, cut into home slots and a ring of slabs.
//!
//! - The arena is one anonymous mapping, touched when cut, never grown, left out of core dumps
//!   and of children (the kernel may be reading or writing it when a process forks).
//! - A [`Lease`] is the exclusive right to one range of the arena. It is not Clone; it moves into
//!   an operation and comes back with its result, so no reference exists while the kernel or a DMA
//!   engine may touch the bytes. Dropping it gives a slab back to its ring.
//! - A full ring waits; nothing grows.
//!
//! What the ranges mean is the plan's to say; who fills them, `transfer`'s. The threads that walk
//! them are [`pool`]'s.

pub mod pool;

use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::tile::PAGE_BYTES;
use crossbeam_channel::{Receiver, Sender};

/// The single allocation of the host tier.
pub struct HostArena {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the arena until its drop; ranges of it are reached only through
// leases, which are disjoint by construction (`HostCutter` hands each byte out once).
unsafe impl Send for HostArena {}
// SAFETY: as for Send; the arena itself has no method that reads or writes the mapping.
unsafe impl Sync for HostArena {}

impl HostArena {
    /// Takes `bytes` (rounded up to a page) of memory. They are touched as they are cut, which is
    /// at the start too, so that a lack shows there.
    pub fn take(bytes: u64) -> Result<HostCutter> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES).max(PAGE_BYTES);
        let refused = |source| Error::Io {
            action: "take host memory",
            path: format!("{bytes} bytes").into(),
            source,
            remedy: "; lower memory.host".to_string(),
        };
        let length =
            usize::try_from(bytes).map_err(|_| refused(std::io::ErrorKind::OutOfMemory.into()))?;
        // SAFETY: an anonymous private mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(refused(std::io::Error::last_os_error()));
        }
        for advice in [
            libc::MADV_HUGEPAGE,
            libc::MADV_DONTFORK,
            libc::MADV_DONTDUMP,
        ] {
            // SAFETY: the range is the mapping just made; advice that is refused is only advice.
            unsafe { libc::madvise(base, length, advice) };
        }
        let base = NonNull::new(base.cast::<u8>()).expect("mmap returned a non-null mapping");
        let arena = Arc::new(HostArena {
            base,
            bytes: length,
        });
        Ok(HostCutter { arena, next: 0 })
    }

    /// Zeroes a range by all threads, each the share of it that it will use: one alone touches 5 GB
    /// a second.
    fn touch(&self, offset: usize, bytes: usize) {
        const PIECE_BYTES: usize = 2 << 20;
        let end = offset + bytes;
        let starts = (offset..end).step_by(PIECE_BYTES).collect();
        pool::by_share(starts, |start| {
            let bytes = PIECE_BYTES.min(end - start);
            // SAFETY: a range of the mapping, each given to one thread; nobody else has it yet.
            unsafe { std::ptr::write_bytes(self.base.as_ptr().add(start), 0, bytes) };
        });
    }
}

impl Drop for HostArena {
    fn drop(&mut self) {
        // SAFETY: every lease holds the arena by Arc, so no range of it is in use.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Cuts an arena into leases, each byte once, from its beginning to its end.
pub struct HostCutter {
    arena: Arc<HostArena>,
    next: usize,
}

impl HostCutter {
    /// The next `bytes` of the arena, starting on a page.
    ///
    /// # Panics
    /// If the arena is shorter than the plan that asks.
    pub fn cut(&mut self, bytes: u64) -> Lease {
        let bytes = usize::try_from(bytes).expect("the arena fits the address space");
        let slot = bytes.next_multiple_of(PAGE_BYTES as usize);
        assert!(
            self.next + slot <= self.arena.bytes,
            "the plan cut more than it took"
        );
        let offset = self.next;
        self.next += slot;
        self.arena.touch(offset, slot);
        Lease {
            arena: self.arena.clone(),
            offset,
            bytes,
            ring: None,
        }
    }

    /// The next `count` slabs of `slab_bytes` each, as a ring.
    pub fn cut_ring(&mut self, count: usize, slab_bytes: u64) -> Ring {
        let (give_back, free) = crossbeam_channel::bounded(count);
        let start = self.next;
        for _ in 0..count {
            let mut lease = self.cut(slab_bytes);
            lease.ring = Some(give_back.clone());
            drop(lease);
        }
        Ring {
            free,
            give_back,
            arena: self.arena.clone(),
            count,
            slab_bytes,
            start,
            end: self.next,
        }
    }

    /// The whole arena, cut or not, for registration with a device.
    pub fn span(&self) -> Span {
        Span {
            arena: self.arena.clone(),
            start: 0,
            end: self.arena.bytes,
            stride: PAGE_BYTES as usize,
        }
    }

    /// Bytes not yet cut.
    pub fn left(&self) -> u64 {
        (self.arena.bytes - self.next) as u64
    }
}

/// A ring of equal slabs; taking one waits until one is free.
pub struct Ring {
    free: Receiver<(usize, usize)>,
    give_back: Sender<(usize, usize)>,
    arena: Arc<HostArena>,
    count: usize,
    slab_bytes: u64,
    start: usize,
    end: usize,
}

/// The memory of a ring, to be registered with an engine of I/O or a device. It keeps the arena,
/// so the range stays mapped as long as anyone has it registered; it gives no access to the bytes.
#[derive(Clone)]
pub struct Span {
    arena: Arc<HostArena>,
    start: usize,
    end: usize,
    stride: usize,
}

impl Span {
    /// First byte, as a number; page-aligned.
    pub fn address(&self) -> usize {
        self.arena.base.as_ptr() as usize + self.start
    }

    /// Bytes of the range.
    pub fn bytes(&self) -> usize {
        self.end - self.start
    }

    /// Bytes from a slab to the next: cut the range only at its multiples.
    pub fn stride(&self) -> usize {
        self.stride
    }
}

impl Ring {
    /// Waits for a free slab.
    pub fn take(&self) -> Lease {
        let range = self.free.recv().expect("the ring holds its own sender");
        self.lease(range)
    }

    /// A free slab, if there is one.
    pub fn try_take(&self) -> Option<Lease> {
        self.free.try_recv().ok().map(|range| self.lease(range))
    }

    /// Slabs in the ring, free or not.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Slabs that are free at this instant.
    pub fn free_count(&self) -> usize {
        self.free.len()
    }

    /// The ring's memory, for registration.
    pub fn span(&self) -> Span {
        Span {
            arena: self.arena.clone(),
            start: self.start,
            end: self.end,
            stride: (self.slab_bytes as usize).next_multiple_of(PAGE_BYTES as usize),
        }
    }

    /// Bytes of a slab.
    pub fn slab_bytes(&self) -> u64 {
        self.slab_bytes
    }

    fn lease(&self, (offset, bytes): (usize, usize)) -> Lease {
        Lease {
            arena: self.arena.clone(),
            offset,
            bytes,
            ring: Some(self.give_back.clone()),
        }
    }
}

/// The exclusive right to one range of the host arena.
pub struct Lease {
    arena: Arc<HostArena>,
    offset: usize,
    bytes: usize,
    ring: Option<Sender<(usize, usize)>>,
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lease({}..{})", self.offset, self.offset + self.bytes)
    }
}

impl Lease {
    /// Bytes of the range.
    #[expect(clippy::len_without_is_empty, reason = "a lease is never empty in use")]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// First byte; page-aligned.
    pub fn as_ptr(&self) -> *const u8 {
        // SAFETY: the range lies within the mapping.
        unsafe { self.arena.base.as_ptr().add(self.offset) }
    }

    /// First byte, for an operation that the lease has moved into.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.as_ptr().cast_mut()
    }

    /// The range as numbers. `T` is u8, u16, i16, u32 or f32: every bit pattern is a value.
    pub fn as_slice<T: Pod>(&self) -> &[T] {
        // SAFETY: page-aligned, initialised at cut, in bounds; shared access follows &self.
        unsafe { std::slice::from_raw_parts(self.as_ptr().cast(), self.bytes / size_of::<T>()) }
    }

    /// The range as numbers, to write.
    pub fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        let count = self.bytes / size_of::<T>();
        // SAFETY: as `as_slice`; the lease is the only right to the range, and &mut self its only
        // use.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr().cast(), count) }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(ring) = &self.ring {
            // A send fails only when the ring is gone, and then nobody waits for the slab.
            ring.send((self.offset, self.bytes)).ok();
        }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// Plain numbers: no padding, every bit pattern valid.
pub trait Pod: sealed::Sealed + Copy {}
macro_rules! pod {
    ($($t:ty),*) => { $(impl sealed::Sealed for $t {} impl Pod for $t {})* };
}
pod!(u8, u16, i16, u32, f32);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slab_comes_back_when_dropped_and_ranges_are_disjoint() {
        let mut cutter = HostArena::take(5 * PAGE_BYTES).expect("five pages");
        let mut home = cutter.cut(100);
        let ring = cutter.cut_ring(2, PAGE_BYTES);
        let (mut a, mut b) = (ring.take(), ring.take());
        assert!(ring.try_take().is_none());
        home.as_mut_slice::<u8>().fill(1);
        a.as_mut_slice::<u8>().fill(2);
        b.as_mut_slice::<u8>().fill(3);
        assert!(home.as_slice::<u8>().iter().all(|x| *x == 1));
        assert!(a.as_slice::<u8>().iter().all(|x| *x == 2));
        drop(a);
        assert_eq!(ring.free_count(), 1);
        assert_eq!(ring.take().as_slice::<u8>()[0], 2);
        assert_eq!(cutter.left(), 2 * PAGE_BYTES);
    }
}
