//! What this machine does: rates of its hops, of matrix products and of AdamW, measured.
//!
//! - [`measure_rates`] takes a fraction of a second and no disk: what a plan on this machine uses.
//! - [`Hops::measure`] takes seconds and writes a store of the size given, through the scratch
//!   class that a run spills with; what it wrote is gone when it returns.
//! - Rates are of the fastest of a few runs: what the hop can do, not what neighbours leave of it.

use std::path::{Path, PathBuf};
use std::time::Instant;

use rayon::prelude::*;

use crate::config::IoEngine;
use crate::device::{Device, View};
use crate::error::{Error, Result};
use crate::host::{HostArena, Lease, Ring};
use crate::optimizer::{self, AdamwStep, GradientSpan, Isa, PIECE_ELEMENTS, WeightSpan};
use crate::plan::DeviceProfile;
use crate::schedule::simulate::Rates;
use crate::store::disk::Direction;
use crate::store::{Completion, Request, Scratch, StoredSection};
use crate::tile::{EXTENT_BYTES_MAX, EXTENT_ELEMENTS, PAGE_BYTES, Section, TileId};

/// Bytes of a parameter in memory: weight, residual, two moments, bf16 gradient.
const PARAMETER_BYTES: u64 = 14;
/// Bytes of a parameter that AdamW moves: all are read, all but the gradient written.
pub const ADAMW_TRAFFIC_BYTES: u64 = 26;
/// Extents in flight while the store is measured.
const SLABS: usize = 16;

/// Rates of this machine and a device, measured in a fraction of a second; the store's are what a
/// common NVMe drive does: [`Hops`] measures it.
///
/// # Errors
/// Those of taking memory.
pub fn measure_rates(profile: &DeviceProfile) -> Result<Rates> {
    // A card's copies are at their best from 16 MiB on, and no cache is in their way.
    let copy_bytes = if profile.card.is_some() {
        64 << 20
    } else {
        2 << 20
    };
    let device = measure_device(profile, copy_bytes)?;
    Ok(Rates {
        gemm: device.gemm,
        promote: device.copy_in,
        demote: device.copy_out,
        store_read: 1.5e9,
        store_write: 1.5e9,
        adamw: measure_adamw(4 << 20, 3)?.parameters,
        shared_cores: profile.card.is_none(),
    })
}

struct DeviceRates {
    /// FLOP/s of a matrix product.
    gemm: f64,
    /// Bytes a second into the arena.
    copy_in: f64,
    /// Bytes a second out of it.
    copy_out: f64,
}

/// Copies are of `copy_bytes`: from host memory only if that is more than the caches hold.
fn measure_device(profile: &DeviceProfile, copy_bytes: usize) -> Result<DeviceRates> {
    let side: u64 = if profile.card.is_some() { 4096 } else { 768 };
    let (matrix, width) = (side * side, profile.activation_bytes);
    let arena_bytes = (3 * matrix * width).max(copy_bytes as u64);
    let device = Device::open(profile.card, arena_bytes, width)?;
    let act = device.activation_dtype();
    let view = |index: u64| View::new(index * matrix * width, matrix, act);
    device.fill(view(0), 0.5);
    device.fill(view(1), 0.25);
    let multiply = || {
        device.linear_forward(view(0), view(1), None, view(2), side, false);
        device.settle();
    };
    multiply();
    let gemm = 2.0 * (side * matrix) as f64 / fastest_seconds(5, multiply);
    let mut cutter = HostArena::take(copy_bytes as u64)?;
    if let Device::Cuda(cuda) = &device {
        // A refusal is told when the run's own memory is pinned.
        cuda.pin(cutter.span()).ok();
    }
    let mut lease = cutter.cut(copy_bytes as u64);
    let bytes = lease.as_mut_slice::<u8>();
    let count = copy_bytes as f64;
    let rates = DeviceRates {
        gemm,
        copy_in: count / fastest_seconds(5, || device.copy_in(0, bytes)),
        copy_out: count / fastest_seconds(5, || device.copy_out(0, bytes)),
    };
    device.check()?;
    Ok(rates)
}

/// AdamW beside the stream that bounds it.
struct AdamwRates {
    /// Parameters a second.
    parameters: f64,
    /// Bytes a second of reading and writing the same memory in place, both counted.
    stream: f64,
}

/// Over `count` parameters, which should be more than the caches hold.
fn measure_adamw(count: usize, times: u32) -> Result<AdamwRates> {
    // A page over for each of five sections.
    let mut cutter = HostArena::take(count as u64 * PARAMETER_BYTES + 5 * PAGE_BYTES)?;
    let mut leases = [2u64, 2, 4, 4, 2].map(|width| cutter.cut(count as u64 * width));
    let step = AdamwStep::new(1e-4, [0.9, 0.999], 1e-8, 0.01, 1, 1.0);
    let isa = Isa::detect();
    let update_seconds = fastest_seconds(times, || {
        let [weight, residual, moment1, moment2, gradient] = &mut leases;
        let span = WeightSpan::Split {
            weight: weight.as_mut_slice(),
            residual: residual.as_mut_slice(),
        };
        let gradient = GradientSpan::Bf16(gradient.as_slice());
        let (moment1, moment2) = (moment1.as_mut_slice(), moment2.as_mut_slice());
        optimizer::adamw_parallel(isa, &step, count, span, moment1, moment2, gradient);
    });
    let stream_seconds = fastest_seconds(times, || leases.iter_mut().for_each(stream));
    Ok(AdamwRates {
        parameters: count as f64 / update_seconds,
        stream: (2 * count as u64 * PARAMETER_BYTES) as f64 / stream_seconds,
    })
}

/// Reads and writes every word in place, on all threads.
fn stream(section: &mut Lease) {
    let zero = std::hint::black_box(0);
    let words = section.as_mut_slice::<u32>();
    words.par_chunks_mut(PIECE_ELEMENTS).for_each(|piece| {
        for word in piece {
            *word = word.wrapping_add(zero);
        }
    });
}

fn fastest_seconds(times: u32, mut work: impl FnMut()) -> f64 {
    let mut fastest = f64::INFINITY;
    for _ in 0..times {
        let started = Instant::now();
        work();
        fastest = fastest.min(started.elapsed().as_secs_f64());
    }
    fastest.max(1e-9)
}

/// What every hop of this machine does.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Hops {
    /// Rates as a plan takes them.
    pub rates: Rates,
    /// Bytes a second that AdamW moves, 26 a parameter.
    pub adamw_bytes: f64,
    /// Bytes a second of the in-place stream that bounds it.
    pub stream_bytes: f64,
    /// Bytes that went to the store and back.
    pub store_bytes: u64,
    /// Engine, direct or buffered, file system; warnings.
    pub store: Vec<String>,
}

impl Hops {
    /// Measures everything; the store in a new directory under `directory`, with `store_bytes`
    /// there and back through `engine`, or the one that a probe picks.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::Budget`] of the store; those of taking memory.
    pub fn measure(directory: &Path, store_bytes: u64, engine: Option<IoEngine>) -> Result<Hops> {
        let place = Place::make(directory)?;
        let store = measure_store(&place.path, store_bytes, engine)?;
        let device = measure_device(&DeviceProfile::cpu(), 256 << 20)?;
        let adamw = measure_adamw(16 << 20, 5)?;
        Ok(Hops {
            rates: Rates {
                gemm: device.gemm,
                promote: device.copy_in,
                demote: device.copy_out,
                store_read: store.read,
                store_write: store.write,
                adamw: adamw.parameters,
                shared_cores: true,
            },
            adamw_bytes: adamw.parameters * ADAMW_TRAFFIC_BYTES as f64,
            stream_bytes: adamw.stream,
            store_bytes: store.bytes,
            store: store.sentences,
        })
    }
}

/// A directory of this process's own, removed at the end. What was there before is not touched.
struct Place {
    path: PathBuf,
}

impl Place {
    fn make(parent: &Path) -> Result<Place> {
        let path = parent.join(format!("terrace-bench.{}", std::process::id()));
        match std::fs::create_dir(&path) {
            Ok(()) => Ok(Place { path }),
            Err(source) => Err(Error::Io {
                action: "make",
                path,
                source,
                remedy: "; name a directory that is there and can be written".to_string(),
            }),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // The directory was made by this process, and nobody else writes there.
        std::fs::remove_dir_all(&self.path).ok();
    }
}

struct StoreRates {
    write: f64,
    read: f64,
    bytes: u64,
    sentences: Vec<String>,
}

fn measure_store(path: &Path, bytes: u64, engine: Option<IoEngine>) -> Result<StoreRates> {
    let elements = (bytes / 4)
        .max(EXTENT_ELEMENTS)
        .next_multiple_of(EXTENT_ELEMENTS);
    let section = StoredSection {
        tile: TileId { layer: 0, part: 0 },
        section: Section::Moment1,
        elements,
        element_bytes: 4,
    };
    let mut cutter = HostArena::take(SLABS as u64 * EXTENT_BYTES_MAX)?;
    let ring = cutter.cut_ring(SLABS, EXTENT_BYTES_MAX);
    let bytes = section.slot_bytes();
    let paths = [(path.to_path_buf(), bytes)];
    let store = Scratch::create(&paths, &[section], engine, &[ring.span()])?;
    // Slabs that hold zeros might be stored as holes.
    for slab in (0..SLABS)
        .map(|_| ring.take())
        .collect::<Vec<_>>()
        .iter_mut()
    {
        for (index, word) in slab.as_mut_slice::<u32>().iter_mut().enumerate() {
            *word = (index as u32).wrapping_mul(0x9E37_79B9);
        }
    }
    let write_seconds = move_all(&store, &section, &ring, Direction::Write)?;
    let read_seconds = move_all(&store, &section, &ring, Direction::Read)?;
    Ok(StoreRates {
        write: bytes as f64 / write_seconds,
        read: bytes as f64 / read_seconds,
        bytes,
        sentences: store.sentences().to_vec(),
    })
}

/// Seconds for every extent of a section to move one way, as many at once as there are slabs.
fn move_all(store: &Scratch, section: &StoredSection, ring: &Ring, kind: Direction) -> Result<f64> {
    let (reply, completions) = crossbeam_channel::bounded::<Completion>(SLABS);
    let mut keys = section.keys().peekable();
    let mut in_flight = 0;
    let started = Instant::now();
    while in_flight > 0 || keys.peek().is_some() {
        while let Some(slab) = keys.peek().is_some().then(|| ring.try_take()).flatten() {
            let key = keys.next().expect("peeked above");
            let bytes = store.payload_bytes(key);
            let reply = reply.clone();
            store.submit(Request {
                kind,
                key,
                bytes,
                slab,
                reply,
            })?;
            in_flight += 1;
        }
        let completion = completions.recv().expect("this function holds a sender");
        in_flight -= 1;
        completion.result?;
    }
    Ok(started.elapsed().as_secs_f64().max(1e-9))
}
