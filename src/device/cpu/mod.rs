//! The CPU device: an arena of its own and every operation in f32 arithmetic.
//!
//! - The arena is one anonymous mapping, page-aligned, zeroed when taken, never grown. Promotion
//!   copies into it, demotion out of it; nothing else leaves or enters.
//! - **The schedule keeps ranges apart.** Operations take views, which own nothing. An operation
//!   checks that its own outputs overlap none of its inputs; that nobody else touches them while it
//!   runs is what the schedule of a step promises. Every `SAFETY` comment here rests on these two.
//! - Work is cut into pieces whose size depends on the shape alone, and sums over pieces are
//!   combined in their order: any number of rayon threads gives the same bits.
//! - Memory beside the arena is bounded by the shape of one operation's piece (packed panels of a
//!   product, score blocks of attention), a few MiB a thread.
//!
//! No operation allocates in the arena, converts weights on its own or knows what a layer is.
//! Start at `gemm` for products, `attention`, `rows` for what works a row at a time, `loss`.

mod attention;
mod gemm;
mod gradients;
mod loss;
mod rows;
mod simd;

use std::ptr::NonNull;

use half::bf16;
use rayon::prelude::*;

use super::{Dtype, View};
use crate::error::{Error, Result};
use crate::tile::PAGE_BYTES;

/// Elements of a piece of an elementwise operation.
const PIECE: usize = 1 << 14;

/// The processor as a device, with `arena_bytes` of memory of its own.
pub struct CpuDevice {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the device until its drop; its ranges are plain numbers.
unsafe impl Send for CpuDevice {}
// SAFETY: several threads may call at once on disjoint ranges; the schedule keeps them disjoint.
unsafe impl Sync for CpuDevice {}

impl CpuDevice {
    /// Takes `arena_bytes` (rounded up to a page) of memory and touches them, so that a lack shows
    /// here. [`Error::Io`] if the system refuses.
    pub fn new(arena_bytes: u64) -> Result<CpuDevice> {
        let refused = |source| Error::Io {
            action: "take device memory",
            path: format!("{arena_bytes} bytes").into(),
            source,
            remedy: "; lower memory.device".to_string(),
        };
        let bytes = arena_bytes
            .max(1)
            .checked_next_multiple_of(PAGE_BYTES)
            .and_then(|bytes| isize::try_from(bytes).ok())
            .ok_or_else(|| refused(std::io::ErrorKind::OutOfMemory.into()))?
            .unsigned_abs();
        // SAFETY: an anonymous private mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(refused(std::io::Error::last_os_error()));
        }
        for advice in [libc::MADV_HUGEPAGE, libc::MADV_DONTDUMP] {
            // SAFETY: the range is the mapping just made; advice that is refused is only advice.
            unsafe { libc::madvise(base, bytes, advice) };
        }
        let base = NonNull::new(base.cast::<u8>()).expect("mmap returned a non-null mapping");
        // SAFETY: the mapping is `bytes` long and nobody else has it yet.
        unsafe { std::ptr::write_bytes(base.as_ptr(), 0, bytes) };
        Ok(CpuDevice { base, bytes })
    }

    /// Bytes of the arena: what was asked for, rounded up to a page.
    pub fn arena_bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Copies `bytes` to the arena at byte `offset`. May run beside operations on other ranges.
    pub fn copy_in(&self, offset: u64, bytes: &[u8]) {
        let at = self.at(offset, bytes.len() as u64);
        // SAFETY: in bounds by `at`; the schedule lets nobody else touch the range meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
    }

    /// Copies the arena's bytes from `offset` to `bytes`. May run beside operations on other
    /// ranges.
    pub fn copy_out(&self, offset: u64, bytes: &mut [u8]) {
        let at = self.at(offset, bytes.len() as u64);
        // SAFETY: in bounds by `at`; the schedule lets nobody write the range meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(at, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Fills the view with NaN, so that a use of a released buffer shows.
    pub fn poison(&self, view: View) {
        let at = self.at(view.offset, view.bytes());
        // SAFETY: in bounds by `at`; a released buffer has no user.
        unsafe { std::ptr::write_bytes(at, 0xff, view.bytes() as usize) };
    }

    /// Writes `values` to the view in its format.
    pub(super) fn write_f32(&self, out: View, values: &[f32]) {
        assert_eq!(out.count, values.len() as u64, "values for the view");
        match out.dtype {
            Dtype::F32 => self.output(out).copy_from_slice(values),
            Dtype::Bf16 => {
                for (o, v) in self.output_bf16(out).iter_mut().zip(values) {
                    *o = bf16::from_f32(*v).to_bits();
                }
            }
        }
    }

    pub(super) fn read_f32(&self, x: View) -> Vec<f32> {
        match x.dtype {
            Dtype::F32 => self.input(x).to_vec(),
            Dtype::Bf16 => self.input_bf16(x).iter().map(|b| widen(*b)).collect(),
        }
    }

    pub(super) fn fill(&self, out: View, value: f32) {
        match out.dtype {
            Dtype::F32 => {
                let pieces = self.output(out).par_chunks_mut(PIECE);
                pieces.for_each(|piece| piece.fill(value));
            }
            Dtype::Bf16 => self.output_bf16(out).fill(bf16::from_f32(value).to_bits()),
        }
    }

    pub(super) fn convert(&self, src: View, out: View) {
        assert_eq!(src.count, out.count, "elements of src and out");
        assert_apart(&[out], &[src]);
        match (src.dtype, out.dtype) {
            (Dtype::F32, Dtype::F32) => {
                let pairs = self.output(out).par_chunks_mut(PIECE);
                pairs
                    .zip(self.input(src).par_chunks(PIECE))
                    .for_each(|(o, x)| o.copy_from_slice(x));
            }
            (Dtype::Bf16, Dtype::Bf16) => {
                self.output_bf16(out).copy_from_slice(self.input_bf16(src));
            }
            (Dtype::Bf16, Dtype::F32) => {
                let pairs = self.output(out).par_chunks_mut(PIECE);
                pairs
                    .zip(self.input_bf16(src).par_chunks(PIECE))
                    .for_each(|(o, x)| widen_all(x, o));
            }
            (Dtype::F32, Dtype::Bf16) => {
                let pairs = self.output_bf16(out).par_chunks_mut(PIECE);
                pairs
                    .zip(self.input(src).par_chunks(PIECE))
                    .for_each(|(o, x)| narrow_all(x, o));
            }
        }
    }

    pub(super) fn add(&self, a: View, b: View, out: View) {
        assert_eq!(
            (a.count, b.count),
            (out.count, out.count),
            "elements of a + b"
        );
        let others: Vec<View> = [a, b].into_iter().filter(|v| *v != out).collect();
        assert_apart(&[out], &others);
        let sum = self.output(out).par_chunks_mut(PIECE);
        match others[..] {
            [] => sum.for_each(|o| simd::scale(o, 2.0)),
            [other] => sum
                .zip(self.input(other).par_chunks(PIECE))
                .for_each(|(o, x)| add_to(o, x)),
            _ => sum
                .zip(self.input(a).par_chunks(PIECE))
                .zip(self.input(b).par_chunks(PIECE))
                .for_each(|((o, a), b)| {
                    o.copy_from_slice(a);
                    add_to(o, b);
                }),
        }
    }

    /// First byte of a range of the arena.
    fn at(&self, offset: u64, bytes: u64) -> *mut u8 {
        let end = offset.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.bytes as u64),
            "bytes {offset}+{bytes} of an arena of {}",
            self.bytes
        );
        // SAFETY: in bounds, as just asserted.
        unsafe { self.base.as_ptr().add(offset as usize) }
    }

    /// First element of an f32 view.
    fn at_f32(&self, view: View) -> *mut f32 {
        assert_eq!(view.dtype, Dtype::F32, "the CPU computes in f32");
        assert_eq!(view.offset % 4, 0, "an f32 view starts on 4 bytes");
        self.at(view.offset, view.bytes()).cast()
    }

    /// First element of a bf16 view.
    fn at_bf16(&self, view: View) -> *mut u16 {
        assert_eq!(view.dtype, Dtype::Bf16, "a view of bf16");
        assert_eq!(view.offset % 2, 0, "a bf16 view starts on 2 bytes");
        self.at(view.offset, view.bytes()).cast()
    }

    /// An operation's input. Operations call `assert_apart` before they take any.
    fn input(&self, view: View) -> &[f32] {
        let at = self.at_f32(view);
        // SAFETY: in bounds, aligned, initialised; apart from this operation's outputs by
        // `assert_apart`, from all others until it returns by the schedule.
        unsafe { std::slice::from_raw_parts(at, view.count as usize) }
    }

    /// An operation's output; taken once an operation.
    #[expect(
        clippy::mut_from_ref,
        reason = "the schedule is the right to the range"
    )]
    fn output(&self, view: View) -> &mut [f32] {
        let at = self.at_f32(view);
        // SAFETY: as `input`; taken once an operation, so it is the only reference.
        unsafe { std::slice::from_raw_parts_mut(at, view.count as usize) }
    }

    /// As `input`, of bf16.
    fn input_bf16(&self, view: View) -> &[u16] {
        let at = self.at_bf16(view);
        // SAFETY: as `input`.
        unsafe { std::slice::from_raw_parts(at, view.count as usize) }
    }

    /// As `output`, of bf16.
    #[expect(
        clippy::mut_from_ref,
        reason = "the schedule is the right to the range"
    )]
    fn output_bf16(&self, view: View) -> &mut [u16] {
        let at = self.at_bf16(view);
        // SAFETY: as `output`.
        unsafe { std::slice::from_raw_parts_mut(at, view.count as usize) }
    }
}

impl Drop for CpuDevice {
    fn drop(&mut self) {
        // SAFETY: views own nothing and operations borrow the device, so no range is in use.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Asserts that no output overlaps another output or an input.
pub(super) fn assert_apart(outputs: &[View], inputs: &[View]) {
    let apart = |a: View, b: View| {
        a.count == 0
            || b.count == 0
            || a.offset + a.bytes() <= b.offset
            || b.offset + b.bytes() <= a.offset
    };
    for (index, out) in outputs.iter().enumerate() {
        for other in inputs.iter().chain(&outputs[index + 1..]) {
            assert!(apart(*out, *other), "output {out:?} overlaps {other:?}");
        }
    }
}

fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

simd::vectorised! {
    fn widen_all(x: &[u16], out: &mut [f32]) {
        for (o, b) in out.iter_mut().zip(x) {
            *o = f32::from_bits(u32::from(*b) << 16);
        }
    }
}

simd::vectorised! {
    /// Nearest, ties to even; a NaN keeps its sign and upper bits and is made quiet.
    fn narrow_all(x: &[f32], out: &mut [u16]) {
        for (o, v) in out.iter_mut().zip(x) {
            let bits = v.to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            let quiet = (bits >> 16) | 0x40;
            *o = if v.is_nan() { quiet } else { rounded } as u16;
        }
    }
}

simd::vectorised! {
    /// out += x.
    fn add_to(out: &mut [f32], x: &[f32]) {
        for (o, v) in out.iter_mut().zip(x) {
            *o += *v;
        }
    }
}
