//! Bytes between host and the arena: the three hops' last piece, and numbers for tests and
//! sampling.
//!
//! - A copy goes by the calling thread's queue and is waited for: when a call returns, the host's
//!   bytes are the caller's again. A lane of copies is a thread of its own, so that the wait stops
//!   nobody else.
//! - From and to memory that [`CudaDevice::pin`] has pinned the card copies by itself; other memory
//!   goes through the driver's own buffers, slower.

use cudarc::driver::sys;
use half::bf16;

use super::driver::{self, checked};
use super::{CudaDevice, STAGED_BYTES_MAX, lock};
use crate::device::{Dtype, View};
use crate::host::Span;

/// Indices that are staged at once.
const STAGED_MAX: usize = STAGED_BYTES_MAX / size_of::<u32>();

impl CudaDevice {
    /// Copies `bytes` to the arena at byte `offset`; waits.
    pub(in crate::device) fn copy_in(&self, offset: u64, bytes: &[u8]) {
        let to = self.address(offset, bytes.len() as u64);
        if bytes.is_empty() {
            return;
        }
        self.attempt(|| {
            let stream = self.stream();
            // SAFETY: in bounds by `address`; `bytes` is borrowed until the stream has settled.
            unsafe { driver::copy_in(to, bytes.as_ptr(), bytes.len(), stream)? };
            stream.settle()
        });
    }

    /// Copies the arena's bytes from `offset` to `bytes`; waits.
    pub(in crate::device) fn copy_out(&self, offset: u64, bytes: &mut [u8]) {
        let from = self.address(offset, bytes.len() as u64);
        if bytes.is_empty() {
            return;
        }
        self.attempt(|| {
            let stream = self.stream();
            // SAFETY: in bounds by `address`; `bytes` is borrowed until the stream has settled.
            unsafe { driver::copy_out(bytes.as_mut_ptr(), from, bytes.len(), stream)? };
            stream.settle()
        });
    }

    /// Fills the view with NaN.
    pub(in crate::device) fn poison(&self, view: View) {
        let at = self.address(view.offset, view.bytes());
        if view.count == 0 {
            return;
        }
        self.attempt(|| {
            // SAFETY: in bounds by `address`; a released buffer has no user.
            let set =
                unsafe { sys::cuMemsetD8Async(at, 0xff, view.bytes() as usize, self.stream().0) };
            checked(set, || format!("cuMemsetD8Async of {} bytes", view.bytes()))
        });
    }

    /// Writes `values` to the view in its format; waits.
    pub(in crate::device) fn write_f32(&self, out: View, values: &[f32]) {
        assert_eq!(out.count, values.len() as u64, "values for the view");
        self.copy_in(out.offset, &encoded(values.iter().copied(), out.dtype));
    }

    /// The view's elements; waits for all work of the calling thread's queue.
    pub(in crate::device) fn read_f32(&self, x: View) -> Vec<f32> {
        let mut bytes = vec![0u8; usize::try_from(x.bytes()).expect("a view fits memory")];
        self.copy_out(x.offset, &mut bytes);
        decoded(&bytes, x.dtype).collect()
    }

    /// Copies numbers of format `dtype` to `out` in out's format; waits.
    pub(in crate::device) fn copy_converted_in(&self, dtype: Dtype, bytes: &[u8], out: View) {
        assert_eq!(
            bytes.len() as u64,
            out.count * dtype.bytes(),
            "numbers for the view"
        );
        if dtype == out.dtype {
            self.copy_in(out.offset, bytes);
        } else {
            self.copy_in(out.offset, &encoded(decoded(bytes, dtype), out.dtype));
        }
    }

    /// out\[i\] = table\[rows\[i\]\], read by the card from the host's memory itself; waits. False,
    /// and nothing done, if the table is not pinned or has another format than `out`.
    ///
    /// # Panics
    /// If a row leaves the table, or `out` is not as many rows.
    pub(in crate::device) fn gather_host_rows(
        &self,
        dtype: Dtype,
        table: &[u8],
        rows: &[u32],
        out: View,
        columns: u64,
    ) -> bool {
        let Some(address) = self.pinned_address(table).filter(|_| dtype == out.dtype) else {
            return false;
        };
        let row_bytes = columns * dtype.bytes();
        let height = table.len() as u64 / row_bytes;
        assert_eq!(out.count, rows.len() as u64 * columns, "out is [rows, C]");
        assert!(
            rows.iter().all(|row| u64::from(*row) < height),
            "rows of the table"
        );
        for (index, rows) in rows.chunks(STAGED_MAX).enumerate() {
            let first = (index * STAGED_MAX) as u64 * columns;
            let out = out.slice(first, rows.len() as u64 * columns);
            self.launch_gather(address, rows, out, columns);
        }
        // The table is borrowed until here, also after another lane's failure.
        self.keep(self.stream().settle());
        true
    }

    /// The card's address of pinned host memory.
    fn pinned_address(&self, bytes: &[u8]) -> Option<u64> {
        let start = bytes.as_ptr() as usize;
        let pinned = lock(&self.pinned);
        let (span, address) = pinned.iter().find(|(span, _)| {
            start >= span.address() && start + bytes.len() <= span.address() + span.bytes()
        })?;
        Some((*address)? + (start - span.address()) as u64)
    }

    /// Pins host memory, so that the card copies from and to it by itself, until the device is
    /// dropped. The words of the driver's refusal, after which the memory is used as it is.
    pub fn pin(&self, span: Span) -> std::result::Result<(), String> {
        let entered = self.context.enter();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        let mut address = 0;
        let pinned = entered.and_then(|()| {
            // SAFETY: the span keeps its mapping until it is dropped, which `unpin` precedes.
            let registered =
                unsafe { sys::cuMemHostRegister_v2(span.address() as *mut _, span.bytes(), flags) };
            checked(registered, || {
                format!("cuMemHostRegister of {} bytes", span.bytes())
            })
        });
        pinned.map_err(|fault| format!("{}: {}", fault.call, fault.message))?;
        // SAFETY: just registered; `address` outlives the call.
        let mapped =
            unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, span.address() as *mut _, 0) };
        // Without an address copies go on as fast; only gathers go by the host.
        let address = checked(mapped, String::new).ok().map(|()| address);
        lock(&self.pinned).push((span, address));
        Ok(())
    }

    /// Undoes every [`CudaDevice::pin`]; nothing is in flight.
    pub(super) fn unpin(&self) {
        for (span, _) in lock(&self.pinned).drain(..) {
            // SAFETY: registered by `pin` and not undone since; the mapping is still there.
            let _ = unsafe { sys::cuMemHostUnregister(span.address() as *mut _) };
        }
    }
}

fn encoded(values: impl Iterator<Item = f32>, dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
        Dtype::Bf16 => values
            .flat_map(|value| bf16::from_f32(value).to_le_bytes())
            .collect(),
    }
}

fn decoded(bytes: &[u8], dtype: Dtype) -> impl Iterator<Item = f32> {
    let width = dtype.bytes() as usize;
    bytes.chunks_exact(width).map(move |number| match dtype {
        Dtype::F32 => f32::from_le_bytes([number[0], number[1], number[2], number[3]]),
        Dtype::Bf16 => bf16::from_le_bytes([number[0], number[1]]).to_f32(),
    })
}
