//! The driver's objects that the device uses: each made once, and undone when dropped.
//!
//! - Every call returns the driver's result as a [`Fault`]: the call with what it was about, and
//!   the driver's words. Nothing here panics and nothing is retried.
//! - The context is the ordinal's primary one, shared with every library of the process; waiting
//!   threads sleep, so that cores are left to the optimizer.
//! - Streams do not synchronise with the legacy stream, which nobody here uses.
//!
//! Objects may be used from any thread whose context is current: [`Context::enter`] makes it so.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{self, CUresult};

/// A failed call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    /// The call with what it was about.
    pub(super) call: String,
    /// The driver's words.
    pub(super) message: String,
}

/// A call's result; `call` is made into words only if it failed.
pub(super) fn checked(result: CUresult, call: impl FnOnce() -> String) -> Result<(), Fault> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(Fault {
        call: call(),
        message: words(result),
    })
}

fn words(result: CUresult) -> String {
    let mut name = std::ptr::null();
    let mut text = std::ptr::null();
    // SAFETY: both calls write a pointer to a string that lives as long as the process, or leave
    // it.
    unsafe {
        let _ = sys::cuGetErrorName(result, &mut name);
        let _ = sys::cuGetErrorString(result, &mut text);
    }
    let shown = |pointer: *const std::ffi::c_char| {
        if pointer.is_null() {
            return String::new();
        }
        // SAFETY: not null, so a static, terminated string of the driver's.
        unsafe { CStr::from_ptr(pointer) }
            .to_string_lossy()
            .into_owned()
    };
    match (shown(name), shown(text)) {
        (name, _) if name.is_empty() => format!("error {}", result as u32),
        (name, text) => format!("{text} ({name})"),
    }
}

thread_local! {
    /// Number of the [`Context`] that this thread made current last.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// Numbers of contexts. The driver may give a released context's address to a later one, so a
/// thread remembers the number.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

/// How a matrix of bf16 lies in device memory, for kernels that copy boxes of it (sm_90).
#[derive(Clone, Copy, Debug)]
pub(in crate::device) struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    /// `[tokens, heads, head_dim]` at `address` (a multiple of 16; heads of a multiple of 8), in
    /// boxes of `rows` tokens of 64 columns of one head, in shared memory with the 128-byte
    /// swizzle. What a box has beyond the matrix is zeros.
    pub(super) fn of_heads(
        address: u64,
        tokens: u64,
        heads: u64,
        head_dim: u64,
        rows: u32,
    ) -> Result<TensorMap, Fault> {
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let sizes = [head_dim, heads, tokens];
        let strides = [head_dim * 2, heads * head_dim * 2];
        let (part, step) = ([64, 1, rows], [1; 3]);
        // SAFETY: the driver reads three sizes, parts and steps and two strides, and writes the
        // map; it does not read the matrix.
        let encoded = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                3,
                address as *mut c_void,
                sizes.as_ptr(),
                strides.as_ptr(),
                part.as_ptr(),
                step.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        checked(encoded, || {
            format!("tensor map of {sizes:?} elements, boxes of {part:?}")
        })?;
        Ok(TensorMap(map))
    }

    /// Where it is, for a launch to copy it.
    pub(super) fn place(&self) -> *mut c_void {
        std::ptr::from_ref(&self.0).cast_mut().cast()
    }
}

/// The primary context of a card.
pub(super) struct Context {
    raw: sys::CUcontext,
    device: sys::CUdevice,
    number: u64,
}

// SAFETY: a context is a driver handle that any thread may make current.
unsafe impl Send for Context {}
// SAFETY: the driver's calls on a context may come from several threads at once.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of a card. `cuInit` must have succeeded.
    pub(super) fn retain(device: sys::CUdevice) -> Result<Context, Fault> {
        let sleeping = sys::CUctx_flags_enum::CU_CTX_SCHED_BLOCKING_SYNC as u32;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `device` is one that the driver named; `raw` outlives the call.
        unsafe {
            // Refused where the context is in use already: then its owner chose how to wait.
            let _ = sys::cuDevicePrimaryCtxSetFlags_v2(device, sleeping);
            checked(sys::cuDevicePrimaryCtxRetain(&mut raw, device), || {
                "cuDevicePrimaryCtxRetain".to_string()
            })?;
        }
        let retained = Context {
            raw,
            device,
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
        };
        retained.enter()?;
        Ok(retained)
    }

    /// Makes the context current for the calling thread.
    pub(super) fn enter(&self) -> Result<(), Fault> {
        if CURRENT.get() == self.number {
            return Ok(());
        }
        // SAFETY: the context is retained until drop.
        let result = unsafe { sys::cuCtxSetCurrent(self.raw) };
        checked(result, || "cuCtxSetCurrent".to_string())?;
        CURRENT.set(self.number);
        Ok(())
    }

    /// Bytes of device memory that are free, and all there are.
    pub(super) fn memory(&self) -> Result<(u64, u64), Fault> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both numbers outlive the call.
        let result = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
        checked(result, || "cuMemGetInfo".to_string())?;
        Ok((free as u64, total as u64))
    }

    /// Waits for everything that was given to the card.
    pub(super) fn settle(&self) -> Result<(), Fault> {
        self.enter()?;
        // SAFETY: the context is current.
        let result = unsafe { sys::cuCtxSynchronize() };
        checked(result, || "cuCtxSynchronize".to_string())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `retain`; everything made in it is dropped before it.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Device memory, taken once.
pub(super) struct DeviceMemory {
    /// First byte; 256-byte aligned.
    pub(super) address: u64,
    pub(super) bytes: u64,
}

impl DeviceMemory {
    /// Takes `bytes` (at least one) in the current context.
    pub(super) fn take(bytes: u64) -> Result<DeviceMemory, Fault> {
        let mut address = 0;
        // SAFETY: `address` outlives the call.
        let result = unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1) as usize) };
        checked(result, || format!("cuMemAlloc of {bytes} bytes"))?;
        Ok(DeviceMemory { address, bytes })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: taken by `take`; the device settles before its memory is dropped.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// Pinned host memory of the driver's own, cached (not write-combined), zeroed.
pub(super) struct PinnedMemory {
    pub(super) address: *mut u8,
    pub(super) bytes: usize,
}

// SAFETY: the memory belongs to this object until its drop.
unsafe impl Send for PinnedMemory {}

impl PinnedMemory {
    /// Takes `bytes` in the current context.
    pub(super) fn take(bytes: usize) -> Result<PinnedMemory, Fault> {
        let mut address = std::ptr::null_mut::<c_void>();
        // SAFETY: `address` outlives the call.
        let result =
            unsafe { sys::cuMemHostAlloc(&mut address, bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
        checked(result, || format!("cuMemHostAlloc of {bytes} bytes"))?;
        let address = address.cast::<u8>();
        // SAFETY: `bytes` long and nobody else has it yet.
        unsafe { std::ptr::write_bytes(address, 0, bytes) };
        Ok(PinnedMemory { address, bytes })
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // SAFETY: taken by `take`; the device settles before its memory is dropped.
        let _ = unsafe { sys::cuMemFreeHost(self.address.cast()) };
    }
}

/// A queue of work for the card.
pub(super) struct Stream(pub(super) sys::CUstream);

// SAFETY: a stream is a driver handle; any thread may give it work.
unsafe impl Send for Stream {}
// SAFETY: the driver orders calls that come from several threads at once.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream in the current context.
    pub(super) fn new() -> Result<Stream, Fault> {
        let mut raw = std::ptr::null_mut();
        let apart = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `raw` outlives the call.
        let result = unsafe { sys::cuStreamCreate(&mut raw, apart) };
        checked(result, || "cuStreamCreate".to_string())?;
        Ok(Stream(raw))
    }

    /// Waits until all work given to it is done.
    pub(super) fn settle(&self) -> Result<(), Fault> {
        // SAFETY: the stream lives as long as self.
        let result = unsafe { sys::cuStreamSynchronize(self.0) };
        checked(result, || "cuStreamSynchronize".to_string())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by `new`; the device settles before its streams are dropped.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.0) };
    }
}

/// A point in a stream's work.
pub(super) struct Event(sys::CUevent);

// SAFETY: an event is a driver handle; any thread may record it or wait for it.
unsafe impl Send for Event {}
// SAFETY: as for Send; the driver orders the calls.
unsafe impl Sync for Event {}

impl Event {
    /// An event without a time; done until it is recorded. Waiting for it sleeps.
    pub(super) fn new() -> Result<Event, Fault> {
        Event::with(sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32)
    }

    /// An event that keeps the time at which it was reached.
    pub(super) fn timed() -> Result<Event, Fault> {
        Event::with(0)
    }

    fn with(flags: u32) -> Result<Event, Fault> {
        let mut raw = std::ptr::null_mut();
        let flags = flags | sys::CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC as u32;
        // SAFETY: `raw` outlives the call.
        let result = unsafe { sys::cuEventCreate(&mut raw, flags) };
        checked(result, || "cuEventCreate".to_string())?;
        Ok(Event(raw))
    }

    /// The event is everything given to `stream` so far.
    pub(super) fn record(&self, stream: &Stream) -> Result<(), Fault> {
        // SAFETY: both handles live as long as their objects.
        let result = unsafe { sys::cuEventRecord(self.0, stream.0) };
        checked(result, || "cuEventRecord".to_string())
    }

    /// Seconds from `earlier` to here; both are timed and have been reached. From driver 12.8 on.
    pub(super) fn seconds_since(&self, earlier: &Event) -> Result<f64, Fault> {
        let mut milliseconds = 0.0f32;
        // SAFETY: both handles live as long as their objects, and the number outlives the call.
        let result = unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, earlier.0, self.0) };
        checked(result, || "cuEventElapsedTime".to_string())?;
        Ok(f64::from(milliseconds) / 1e3)
    }

    /// Waits until everything it was recorded after is done.
    pub(super) fn wait(&self) -> Result<(), Fault> {
        // SAFETY: the handle lives as long as self.
        let result = unsafe { sys::cuEventSynchronize(self.0) };
        checked(result, || "cuEventSynchronize".to_string())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `new`; the driver keeps it until work that names it is done.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// The driver's version as it counts: 12080 is CUDA 12.8. The library must be present.
pub(super) fn version() -> Result<i32, Fault> {
    let mut version = 0;
    // SAFETY: `version` outlives the call.
    let result = unsafe { sys::cuDriverGetVersion(&mut version) };
    checked(result, || "cuDriverGetVersion".to_string())?;
    Ok(version)
}

/// Starts a copy from host to the card, in the stream's order.
///
/// # Safety
/// `from` has `bytes` bytes that stay unchanged until the stream has passed the copy, and the range
/// at `to` is the caller's until then.
pub(super) unsafe fn copy_in(
    to: u64,
    from: *const u8,
    bytes: usize,
    stream: &Stream,
) -> Result<(), Fault> {
    // SAFETY: as the caller promises.
    let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, stream.0) };
    checked(result, || format!("cuMemcpyHtoDAsync of {bytes} bytes"))
}

/// Starts a copy from the card to host, in the stream's order.
///
/// # Safety
/// `to` has room for `bytes` bytes that nobody touches until the stream has passed the copy.
pub(super) unsafe fn copy_out(
    to: *mut u8,
    from: u64,
    bytes: usize,
    stream: &Stream,
) -> Result<(), Fault> {
    // SAFETY: as the caller promises.
    let result = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, stream.0) };
    checked(result, || format!("cuMemcpyDtoHAsync of {bytes} bytes"))
}
