//! The device tier: an arena of its own, and one function an operation.
//!
//! - [`Device`] is an enum; its functions in [`ops`] are held to the same goldens on every side.
//! - Memory is one arena; a [`View`] is a typed range of it. Views are handles: they own nothing
//!   and can be copied; what may be written when is the schedule's to say.
//! - On the CPU device the arena is memory of its own, so promotion is a real copy.
//! - Reductions run in a fixed order: the same bits for any number of threads.
//!
//! Nothing here knows layers, tiles or the host arena. `transfer` copies in and out; `layer`
//! launches.

mod cpu;
pub mod cuda;
pub mod ops;

pub use cpu::CpuDevice;
pub use cuda::{CudaDevice, Point, Queue};

use std::collections::BTreeMap;

use crate::error::Result;

/// Numeric format of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    Bf16,
}

impl Dtype {
    /// Bytes of an element.
    pub fn bytes(self) -> u64 {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
        }
    }
}

/// A typed range of a device's arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// First byte; 64-byte aligned for regions that the plan cuts.
    pub offset: u64,
    /// Elements.
    pub count: u64,
    /// Format.
    pub dtype: Dtype,
}

impl View {
    /// A view of `count` elements at byte `offset`.
    pub fn new(offset: u64, count: u64, dtype: Dtype) -> View {
        View {
            offset,
            count,
            dtype,
        }
    }

    /// Elements `start..start + count` of this view.
    pub fn slice(self, start: u64, count: u64) -> View {
        assert!(
            start + count <= self.count,
            "slice {start}+{count} of {}",
            self.count
        );
        View {
            offset: self.offset + start * self.dtype.bytes(),
            count,
            dtype: self.dtype,
        }
    }

    /// Bytes covered.
    pub fn bytes(self) -> u64 {
        self.count * self.dtype.bytes()
    }
}

/// Numbers that may be on their way at once: one is to be read before so many later ones are asked
/// for.
pub const NUMBERS_MAX: usize = 2048;

/// What a sum comes to. [`Device::number`] reads it.
#[must_use]
#[derive(Clone, Copy, Debug)]
pub enum Number {
    /// It is known.
    Known(f64),
    /// A place among the numbers of the card that sums; it is known once the card has come to a
    /// [`Point`] after the operation.
    Card(usize),
}

/// A place that computes, with memory of its own.
pub enum Device {
    /// The processor, in f32 arithmetic over bf16 or f32 weights.
    Cpu(CpuDevice),
    /// A card: bf16 arithmetic with f32 sums, or f32.
    Cuda(Box<CudaDevice>),
}

impl Device {
    /// A CPU device with an arena of `arena_bytes` (rounded up to a page).
    /// [`Error::Io`](crate::Error::Io) if the system refuses the memory.
    pub fn cpu(arena_bytes: u64) -> Result<Device> {
        Ok(Device::Cpu(CpuDevice::new(arena_bytes)?))
    }

    /// A card with an arena of `arena_bytes` (rounded up to 2 MiB), whose weights and activations
    /// are in `activation`. [`Error::Device`](crate::Error::Device) names the call that failed.
    pub fn cuda(ordinal: usize, arena_bytes: u64, activation: Dtype) -> Result<Device> {
        let cuda = CudaDevice::new(ordinal, arena_bytes, activation)?;
        Ok(Device::Cuda(Box::new(cuda)))
    }

    /// Card `card`, or the CPU device, with an arena of `arena_bytes`; a card's weights and
    /// activations have `activation_bytes` a number, 2 or 4.
    pub fn open(card: Option<usize>, arena_bytes: u64, activation_bytes: u64) -> Result<Device> {
        match (card, activation_bytes) {
            (None, _) => Device::cpu(arena_bytes),
            (Some(ordinal), 2) => Device::cuda(ordinal, arena_bytes, Dtype::Bf16),
            (Some(ordinal), _) => Device::cuda(ordinal, arena_bytes, Dtype::F32),
        }
    }

    /// From here on the calling thread's work goes to `queue`; a thread that entered none computes.
    /// Queues run beside one another, each in order. The CPU device has none.
    pub fn enter(&self, queue: Queue) {
        if let Device::Cuda(cuda) = self {
            cuda.enter(queue);
        }
    }

    /// Whether operations may return before they are done.
    pub fn is_asynchronous(&self) -> bool {
        match self {
            Device::Cpu(_) => false,
            Device::Cuda(_) => true,
        }
    }

    /// The point after all that the calling thread's queue was given so far; `None` if that is
    /// done.
    pub fn point(&self) -> Option<Point> {
        match self {
            Device::Cpu(_) => None,
            Device::Cuda(cuda) => Some(cuda.point()),
        }
    }

    /// As [`Device::point`], with the time at which the device comes to it; `None` where operations
    /// are done when they return.
    pub fn timed_point(&self) -> Option<Point> {
        match self {
            Device::Cpu(_) => None,
            Device::Cuda(cuda) => cuda.timed_point(),
        }
    }

    /// Seconds from one timed point to another, both reached.
    pub fn seconds_between(&self, from: &Point, to: &Point) -> f64 {
        match self {
            Device::Cpu(_) => 0.0,
            Device::Cuda(cuda) => cuda.seconds_between(from, to),
        }
    }

    /// Waits for a point of this device.
    pub fn reach(&self, point: &Point) {
        if let Device::Cuda(cuda) = self {
            cuda.reach(point);
        }
    }

    /// A number whose operation the device has done.
    ///
    /// # Panics
    /// If it is of another kind of device.
    pub fn number(&self, number: Number) -> f64 {
        match (number, self) {
            (Number::Known(value), _) => value,
            (Number::Card(place), Device::Cuda(cuda)) => cuda.told(place),
            (Number::Card(_), Device::Cpu(_)) => panic!("the CPU device knows its numbers"),
        }
    }

    /// Waits until all work of the calling thread's queue is done.
    pub fn settle(&self) {
        if let Device::Cuda(cuda) = self {
            cuda.settle();
        }
    }

    /// The first failed call of the device, which operations do not return. Numbers that were read
    /// from a device count only if this is asked afterwards.
    /// [`Error::Device`](crate::Error::Device), again at every later call.
    pub fn check(&self) -> Result<()> {
        match self {
            Device::Cpu(_) => Ok(()),
            Device::Cuda(cuda) => cuda.check(),
        }
    }

    /// What fixes the bits of a run beside its settings: on a card its name and the versions of its
    /// libraries.
    pub fn identity(&self) -> String {
        match self {
            Device::Cpu(_) => "cpu".to_string(),
            Device::Cuda(cuda) => {
                let versions = cuda::versions().unwrap_or_default();
                format!("{}, {versions}", cuda.name())
            }
        }
    }

    /// Matrix products met so far with the algorithm of each, where a library chose it.
    pub fn products(&self) -> BTreeMap<String, String> {
        match self {
            Device::Cpu(_) => BTreeMap::new(),
            Device::Cuda(cuda) => cuda.products(),
        }
    }

    /// Bytes of the arena.
    pub fn arena_bytes(&self) -> u64 {
        match self {
            Device::Cpu(cpu) => cpu.arena_bytes(),
            Device::Cuda(cuda) => cuda.arena_bytes(),
        }
    }

    /// Copies `bytes` to the arena at byte `offset`. May be called from any thread while operations
    /// run on other ranges; the schedule keeps the ranges apart.
    ///
    /// # Panics
    /// If the range leaves the arena.
    pub fn copy_in(&self, offset: u64, bytes: &[u8]) {
        match self {
            Device::Cpu(cpu) => cpu.copy_in(offset, bytes),
            Device::Cuda(cuda) => cuda.copy_in(offset, bytes),
        }
    }

    /// Copies the arena's bytes from `offset` on to `bytes`; otherwise as [`Device::copy_in`].
    ///
    /// # Panics
    /// If the range leaves the arena.
    pub fn copy_out(&self, offset: u64, bytes: &mut [u8]) {
        match self {
            Device::Cpu(cpu) => cpu.copy_out(offset, bytes),
            Device::Cuda(cuda) => cuda.copy_out(offset, bytes),
        }
    }

    /// out\[i\] = table\[rows\[i\]\] of a table in host memory, `columns` numbers a row, where the
    /// device reads that memory by itself and in `out`'s format. False, and nothing done, where
    /// not.
    pub fn gather_host_rows(
        &self,
        dtype: Dtype,
        table: &[u8],
        rows: &[u32],
        out: View,
        columns: u64,
    ) -> bool {
        match self {
            Device::Cpu(_) => false,
            Device::Cuda(cuda) => cuda.gather_host_rows(dtype, table, rows, out, columns),
        }
    }

    /// Fills a released buffer with NaN, so that a use after its release shows. For tests.
    pub fn poison(&self, view: View) {
        match self {
            Device::Cpu(cpu) => cpu.poison(view),
            Device::Cuda(cuda) => cuda.poison(view),
        }
    }

    /// Writes `values` to the view, rounded to its format. For tables made on the host and tests.
    pub fn write_f32(&self, out: View, values: &[f32]) {
        match self {
            Device::Cpu(cpu) => cpu.write_f32(out, values),
            Device::Cuda(cuda) => cuda.write_f32(out, values),
        }
    }
}

#[cfg(test)]
mod tests;
