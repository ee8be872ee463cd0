//! The CUDA device: one arena on a card, kernels compiled for it, cublasLt for products.
//!
//! - One context, one allocation for the arena, one for each of the fixed pools (staging rings, the
//!   products' workspace); after [`CudaDevice::new`] no device memory is taken.
//! - A stream a queue. A thread works on the one that it entered ([`CudaDevice::enter`]); compute,
//!   if it entered none. Operations return at once; a stream runs them in order, and different
//!   streams are ordered by the schedule alone.
//! - Operations return nothing, so the first failed call is kept. [`CudaDevice::check`] gives it
//!   out; after it no work is given to the card.
//! - No float atomics, fixed grids for a shape, algorithms that no clock chose: the same bits on
//!   every run of the same card and libraries.
//!
//! Kernels are launched by the operations of `kernels` and `attention`, products by `gemm`; which
//! range may be used when is the schedule's to say.

mod attention;
mod card;
mod compile;
mod copies;
mod driver;
mod gemm;
mod kernels;
pub mod library;
mod numbers;
mod staging;

pub use card::{Card, card_count};
pub use compile::compile_kernels;

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;
use rayon::prelude::*;

use super::cpu::assert_apart;
use super::{Dtype, Number, View};
use crate::error::{Error, Result};
use crate::host::Span;
use driver::{Context, DeviceMemory, Event, Fault, Stream, TensorMap, checked};
use gemm::{BIAS_BYTES_MAX, Gemm};
use numbers::Numbers;
use staging::Staging;

/// Bytes of scratch for the products and kernels of the compute stream.
const WORKSPACE_BYTES: u64 = 32 << 20;

/// Bytes of the longest index array that an operation stages: a million numbers.
const STAGED_BYTES_MAX: usize = 4 << 20;

/// The same of the queue that stages none.
const STAGED_BYTES_MIN: usize = 256;

/// Dynamic shared memory that a kernel gets without asking.
const SHARED_BYTES_UNASKED: u32 = 48 << 10;

/// The queue that a thread gives its work to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// Operations.
    Compute,
    /// Weights to the device.
    Up,
    /// Gradients from it.
    Down,
    /// Updated weights to their home on the device.
    Return,
    /// Weights that are read beside a step.
    Aside,
    /// States from their homes on the device.
    StatesOut,
    /// States back to them.
    StatesIn,
}

/// How many there are.
const QUEUES: usize = 7;

/// A point in a queue's work. Of a device that has failed, it is reached.
pub struct Point(Option<Event>);

/// A kernel's parameter.
#[derive(Clone, Copy, Debug)]
pub(super) enum Argument {
    Pointer(u64),
    U32(u32),
    U64(u64),
    F32(f32),
    Map(TensorMap),
}

impl Argument {
    /// The parameter's address: its own where it is a map, else that of `word`, which gets the
    /// parameter in its low bytes.
    fn place(&self, word: &mut u64) -> *mut c_void {
        *word = match *self {
            Argument::Pointer(v) | Argument::U64(v) => v,
            Argument::U32(v) => u64::from(v),
            Argument::F32(v) => u64::from(v.to_bits()),
            Argument::Map(ref map) => return map.place(),
        };
        std::ptr::from_mut(word).cast()
    }
}

/// A kernel and the dynamic shared memory that it may be launched with.
#[derive(Clone, Copy)]
struct Kernel {
    raw: sys::CUfunction,
    shared_bytes: u32,
}

/// A loaded file of `kernels/`.
struct Module(sys::CUmodule);

/// A card as a device.
pub struct CudaDevice {
    name: String,
    ordinal: usize,
    activation: Dtype,
    capability: (u32, u32),
    arena: DeviceMemory,
    workspace: DeviceMemory,
    /// By queue, as is what it stages.
    streams: Vec<Stream>,
    staging: Vec<Mutex<Staging>>,
    numbers: Mutex<Numbers>,
    modules: Vec<Module>,
    kernels: Mutex<HashMap<&'static str, Kernel>>,
    fault: Mutex<Option<Fault>>,
    failed: AtomicBool,
    gemm: Gemm,
    /// Pinned host memory and the card's address of it, where it has one.
    pinned: Mutex<Vec<(Span, Option<u64>)>>,
    /// Last: everything above lives in it.
    context: Context,
}

// SAFETY: modules and functions are driver handles, valid in any thread whose context is current;
// what changes is behind locks.
unsafe impl Send for CudaDevice {}
// SAFETY: as for Send; the schedule keeps ranges of the arena apart.
unsafe impl Sync for CudaDevice {}

thread_local! {
    static QUEUE: Cell<Queue> = const { Cell::new(Queue::Compute) };
}

impl CudaDevice {
    /// Card `ordinal` with an arena of `arena_bytes` (rounded up to 2 MiB); `activation` is the
    /// format of weights and activations. [`Error::Device`] names the call that failed and its
    /// bytes.
    pub fn new(ordinal: usize, arena_bytes: u64, activation: Dtype) -> Result<CudaDevice> {
        library::open()?;
        let label = format!("cuda:{ordinal}");
        let failed = |fault: Fault| fault.error(&label, "");
        let card = Card::read(ordinal)?;
        let primary = card.retain()?;
        let arena_bytes = arena_bytes.max(1).next_multiple_of(2 << 20);
        let memory = |bytes: u64| {
            DeviceMemory::take(bytes).map_err(|fault| {
                let free = primary.memory().map_or(0, |(free, _)| free);
                let remedy = format!(
                    "; {free} bytes are free: lower memory.device, or end what uses the card"
                );
                fault.error(&label, &remedy)
            })
        };
        let arena = memory(arena_bytes)?;
        let workspace = memory(WORKSPACE_BYTES + BIAS_BYTES_MAX)?;
        let stream = || Stream::new().map_err(failed);
        let staging = |queue: usize| {
            let stages = queue == Queue::Compute as usize || queue == Queue::Up as usize;
            let bytes = if stages {
                STAGED_BYTES_MAX
            } else {
                STAGED_BYTES_MIN
            };
            Staging::new(bytes).map(Mutex::new).map_err(failed)
        };
        let architecture = compile::architecture(card.capability);
        let codes: Vec<Vec<u8>> = compile::SOURCES
            .par_iter()
            .map(|source| compile::code(source, &architecture))
            .collect::<Result<_>>()?;
        let modules = compile::SOURCES
            .iter()
            .zip(&codes)
            .map(|(source, code)| load(code, source.name, &label))
            .collect::<Result<_>>()?;
        let device = CudaDevice {
            name: card.name,
            ordinal,
            activation,
            capability: card.capability,
            arena,
            workspace,
            streams: (0..QUEUES).map(|_| stream()).collect::<Result<_>>()?,
            staging: (0..QUEUES).map(staging).collect::<Result<_>>()?,
            numbers: Numbers::new().map(Mutex::new).map_err(failed)?,
            modules,
            kernels: Mutex::default(),
            fault: Mutex::new(None),
            failed: AtomicBool::new(false),
            gemm: Gemm::new().map_err(failed)?,
            pinned: Mutex::default(),
            context: primary,
        };
        Ok(device)
    }

    /// The card's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes of the arena.
    pub fn arena_bytes(&self) -> u64 {
        self.arena.bytes
    }

    /// Format of weights and activations.
    pub(super) fn activation(&self) -> Dtype {
        self.activation
    }

    /// Compute capability of the card, major and minor.
    pub(super) fn capability(&self) -> (u32, u32) {
        self.capability
    }

    /// From here on the calling thread's work goes to `queue`.
    pub fn enter(&self, queue: Queue) {
        QUEUE.set(queue);
        let entered = self.context.enter();
        self.keep(entered);
    }

    /// The first failure of any call; again at every later call.
    pub fn check(&self) -> Result<()> {
        match &*lock(&self.fault) {
            Some(fault) => Err(fault.clone().error(&self.label(), "")),
            None => Ok(()),
        }
    }

    /// Waits until all work of the calling thread's queue is done.
    pub fn settle(&self) {
        self.attempt(|| self.stream().settle());
    }

    /// The point in the calling thread's queue after all that it was given so far.
    pub fn point(&self) -> Point {
        self.record(Event::new)
    }

    /// As [`CudaDevice::point`], with the time at which the card comes to it; `None` before driver
    /// 12.8, which does not tell times by the call that is used here.
    pub fn timed_point(&self) -> Option<Point> {
        let serves = driver::version().is_ok_and(|version| version >= 12_080);
        serves.then(|| self.record(Event::timed))
    }

    /// Seconds from one timed point to another, both reached; 0 after a failure.
    pub fn seconds_between(&self, from: &Point, to: &Point) -> f64 {
        let mut seconds = 0.0;
        if let (Some(from), Some(to)) = (&from.0, &to.0) {
            self.attempt(|| {
                seconds = to.seconds_since(from)?;
                Ok(())
            });
        }
        seconds
    }

    fn record(&self, make: impl FnOnce() -> Result<Event, Fault>) -> Point {
        let mut point = None;
        self.attempt(|| {
            let event = make()?;
            event.record(self.stream())?;
            point = Some(event);
            Ok(())
        });
        Point(point)
    }

    /// Waits for a point; at once after a failure.
    pub fn reach(&self, point: &Point) {
        if let Some(event) = &point.0 {
            self.attempt(|| event.wait());
        }
    }

    /// The view's address on the card.
    ///
    /// # Panics
    /// If the view leaves the arena or its start is not a multiple of its element.
    pub(super) fn pointer(&self, view: View) -> u64 {
        assert_eq!(
            view.offset % view.dtype.bytes(),
            0,
            "{view:?} starts on an element"
        );
        self.address(view.offset, view.bytes())
    }

    /// Address of a byte range of the arena.
    fn address(&self, offset: u64, bytes: u64) -> u64 {
        let end = offset.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.arena.bytes),
            "bytes {offset}+{bytes} of an arena of {}",
            self.arena.bytes
        );
        self.arena.address + offset
    }

    /// Scratch of the compute stream, valid until the calling operation's last launch: the next one
    /// may use it.
    ///
    /// # Panics
    /// If `bytes` is more than 32 MiB, or the thread entered another queue.
    pub(super) fn workspace(&self, bytes: u64) -> u64 {
        assert!(
            bytes <= WORKSPACE_BYTES,
            "{bytes} bytes of {WORKSPACE_BYTES} of scratch"
        );
        assert_eq!(
            QUEUE.get(),
            Queue::Compute,
            "scratch belongs to the compute stream"
        );
        self.workspace.address
    }

    /// Launches kernel `name` (`extern "C"`) on the calling thread's stream; an empty grid is no
    /// launch.
    pub(super) fn launch(
        &self,
        name: &'static str,
        grid: (u32, u32, u32),
        block: (u32, u32, u32),
        shared_bytes: u32,
        arguments: &[Argument],
    ) {
        if grid.0 == 0 || grid.1 == 0 || grid.2 == 0 {
            return;
        }
        self.attempt(|| {
            let kernel = self.kernel(name, shared_bytes)?;
            let mut words = vec![0; arguments.len()];
            let placed = arguments.iter().zip(&mut words);
            let mut pointers: Vec<*mut c_void> = placed
                .map(|(argument, word)| argument.place(word))
                .collect();
            // SAFETY: the wrappers in this room pass each kernel the parameters that its source
            // declares, with ranges in bounds by `pointer`; the driver copies them before it
            // returns (little-endian, so a short parameter is a word's first bytes).
            let launched = unsafe {
                sys::cuLaunchKernel(
                    kernel.raw,
                    grid.0,
                    grid.1,
                    grid.2,
                    block.0,
                    block.1,
                    block.2,
                    shared_bytes,
                    self.stream().0,
                    pointers.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            };
            checked(launched, || {
                format!(
                    "launch of {name}, grid {grid:?}, block {block:?}, {shared_bytes} bytes shared"
                )
            })
        });
    }

    /// Copies a small host array to the card in the stream's order and returns its address, valid
    /// until the calling operation's last launch. At most seven arrays an operation.
    ///
    /// # Panics
    /// If the array is longer than a million numbers.
    pub(super) fn stage_u32(&self, values: &[u32]) -> u64 {
        let mut address = self.arena.address;
        self.attempt(|| {
            address = lock(&self.staging[QUEUE.get() as usize]).put(values, self.stream())?;
            Ok(())
        });
        address
    }

    /// Has the f64 at `address` of the workspace told to the host, in the stream's order.
    pub(super) fn tell(&self, address: u64) -> Number {
        let mut number = Number::Known(0.0);
        self.attempt(|| {
            number = Number::Card(lock(&self.numbers).copy(address, self.stream())?);
            Ok(())
        });
        number
    }

    /// A number at a place of the ring.
    pub(super) fn told(&self, place: usize) -> f64 {
        lock(&self.numbers).read(place)
    }

    fn label(&self) -> String {
        format!("cuda:{}", self.ordinal)
    }

    fn stream(&self) -> &Stream {
        &self.streams[QUEUE.get() as usize]
    }

    /// Makes a call, unless one has failed; keeps its failure.
    fn attempt(&self, call: impl FnOnce() -> Result<(), Fault>) {
        if !self.failed.load(Ordering::Acquire) {
            let result = self.context.enter().and_then(|()| call());
            self.keep(result);
        }
    }

    fn keep(&self, result: Result<(), Fault>) {
        if let Err(fault) = result {
            lock(&self.fault).get_or_insert(fault);
            self.failed.store(true, Ordering::Release);
        }
    }

    /// The kernel, found in its module at its first launch, ready for `shared_bytes`.
    fn kernel(&self, name: &'static str, shared_bytes: u32) -> Result<Kernel, Fault> {
        let mut kernels = lock(&self.kernels);
        let mut kernel = match kernels.get(name) {
            Some(kernel) if kernel.shared_bytes >= shared_bytes => return Ok(*kernel),
            Some(kernel) => *kernel,
            None => self.find_kernel(name)?,
        };
        if shared_bytes > kernel.shared_bytes {
            let attribute =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function belongs to a module that lives as long as self.
            let set = unsafe {
                sys::cuFuncSetAttribute(kernel.raw, attribute, shared_bytes.cast_signed())
            };
            checked(set, || {
                format!("{shared_bytes} bytes of shared memory for {name}")
            })?;
            kernel.shared_bytes = shared_bytes;
        }
        kernels.insert(name, kernel);
        Ok(kernel)
    }

    fn find_kernel(&self, name: &str) -> Result<Kernel, Fault> {
        let symbol = CString::new(name).expect("a kernel's name");
        let mut last = Err(Fault {
            call: format!("find kernel {name}"),
            message: "no module is loaded".to_string(),
        });
        for module in &self.modules {
            let mut raw = std::ptr::null_mut();
            // SAFETY: the module lives as long as self; `raw` outlives the call.
            let found = unsafe { sys::cuModuleGetFunction(&mut raw, module.0, symbol.as_ptr()) };
            last = checked(found, || format!("find kernel {name}"));
            if last.is_ok() {
                return Ok(Kernel {
                    raw,
                    shared_bytes: SHARED_BYTES_UNASKED,
                });
            }
        }
        last.map(|()| unreachable!("a found kernel was returned"))
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Nothing may be in flight when memory and streams go; a failed card has nothing in flight.
        let _ = self.context.settle();
        self.unpin();
        for module in self.modules.drain(..) {
            // SAFETY: no launch is in flight, and nobody can launch any more.
            let _ = unsafe { sys::cuModuleUnload(module.0) };
        }
    }
}

impl Fault {
    fn error(self, device: &str, remedy: &str) -> Error {
        Error::Device {
            device: device.to_string(),
            call: self.call,
            message: self.message,
            during: String::new(),
            remedy: remedy.to_string(),
        }
    }
}

/// Versions of the driver, NVRTC and cublasLt in one line: with the card they fix every bit.
pub fn versions() -> Result<String> {
    library::open()?;
    let driver = driver::version().map_err(|fault| fault.error("cuda", ""))?;
    let (major, minor) = compile::nvrtc_version()?;
    Ok(format!(
        "driver for CUDA {}.{}, NVRTC {major}.{minor}, cublasLt {}",
        driver / 1000,
        driver % 1000 / 10,
        Gemm::version()
    ))
}

fn load(code: &[u8], name: &str, label: &str) -> Result<Module> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: `code` is a whole cubin, copied by the driver; the context is current.
    let loaded = unsafe { sys::cuModuleLoadData(&mut raw, code.as_ptr().cast()) };
    checked(loaded, || {
        format!("cuModuleLoadData of kernels/{name}, {} bytes", code.len())
    })
    .map_err(|fault| fault.error(label, ""))?;
    Ok(Module(raw))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
