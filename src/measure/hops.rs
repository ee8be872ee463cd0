//! Every hop of this machine, measured for a [`Profile`].
//!
//! - The store is the scratch class that a run spills with, checksums and all, over its own ring
//!   of slabs; rates are of all bytes over all the time, since a drive's best moment is no plan.
//! - Cores and copies are the fastest of a few runs: what they can do, not what neighbours leave.
//! - What is written lies in a directory of this process's own, which is removed.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rayon::prelude::*;

use super::profile::{DeviceRates, HostRates, Identity, Profile, StoreRates, VERSION, date_text};
use super::{fastest_seconds, measure_adamw, measure_device};
use crate::config::IoEngine;
use crate::device::cuda;
use crate::error::{Error, Result};
use crate::host::{HostArena, Lease, Ring};
use crate::plan::DeviceProfile;
use crate::schedule::simulate::ZstdRates;
use crate::store::disk::{self, Direction};
use crate::store::moments::{MomentCoder, like_moments};
use crate::store::{Completion, ExtentKey, Request, Scratch, StoredSection, checksum};
use crate::tile::{EXTENT_BYTES_MAX, EXTENT_ELEMENTS, Precision, Section, TileId};

/// Extents in flight while the store is measured, as many as a run has by default.
const SLABS: usize = 16;
/// Level that the codec of checkpoints is measured at.
const ZSTD_LEVEL: i32 = 1;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Directories of stores.
    pub stores: Vec<PathBuf>,
    /// Bytes of each store's file.
    pub store_bytes: u64,
    /// Least seconds of reading, of writing and of both; the file is gone over at least once.
    pub store_seconds: f64,
    /// By a probe otherwise.
    pub engine: Option<IoEngine>,
    /// Bytes of host memory that copies go over.
    pub copy_bytes: u64,
    /// Cards too.
    pub cards: bool,
}

/// Measures everything that is wanted; `say` is told what begins.
///
/// # Errors
/// [`Error::Io`] and [`Error::Budget`] of the store; those of taking memory and of the cards.
pub fn measure(wanted: &Wanted, mut say: impl FnMut(&str)) -> Result<Profile> {
    let started = Instant::now();
    let places: Vec<Place> = wanted
        .stores
        .iter()
        .map(|path| Place::make(path))
        .collect::<Result<_>>()?;
    say("host memory, checksum, zstd, AdamW");
    let host = measure_host(wanted.copy_bytes)?;
    say("matrix products and copies of the CPU device");
    let mut device = vec![device_rates(&DeviceProfile::cpu(), 256 << 20)?];
    let count = if wanted.cards {
        cuda::card_count().unwrap_or(0)
    } else {
        0
    };
    for ordinal in 0..count {
        let card = cuda::Card::read(ordinal)?;
        say(&format!("cuda:{ordinal}, {}", card.name));
        let profile = DeviceProfile::cuda(&card.name, ordinal, Precision::Bf16);
        device.push(device_rates(&profile, 256 << 20)?);
    }
    let mut store = Vec::with_capacity(places.len());
    for (place, path) in places.iter().zip(&wanted.stores) {
        say(&format!("store {}", path.display()));
        let path = std::path::absolute(path).unwrap_or(path.clone());
        store.push(StoreRates {
            path,
            ..measure_store(&place.path, wanted)?
        });
    }
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let mut profile = Profile {
        version: VERSION,
        measured_at: date_text(now.as_secs()),
        terrace_version: env!("CARGO_PKG_VERSION").to_string(),
        seconds: started.elapsed().as_secs_f64(),
        machine: Identity::here(),
        host,
        device,
        store,
    };
    profile.round();
    Ok(profile)
}

fn device_rates(profile: &DeviceProfile, copy_bytes: usize) -> Result<DeviceRates> {
    let rates = measure_device(profile, copy_bytes)?;
    Ok(DeviceRates {
        name: profile.name.clone(),
        card: profile.card,
        gemm_flops_per_second: rates.gemm,
        attention_flops_per_second: Some(rates.attention),
        passes_bytes_per_second: Some(rates.passes),
        promote_bytes_per_second: rates.copy_in,
        demote_bytes_per_second: rates.copy_out,
    })
}

fn measure_host(copy_bytes: u64) -> Result<HostRates> {
    let parameters = usize::try_from(copy_bytes / 16).unwrap_or(1).max(1 << 20);
    let adamw = measure_adamw(parameters, 5)?;
    let mut cutter = HostArena::take(2 * copy_bytes + EXTENT_BYTES_MAX)?;
    let (mut from, mut to) = (cutter.cut(copy_bytes), cutter.cut(copy_bytes));
    like_moments(from.as_mut_slice());
    let piece = 1 << 20;
    let copy_seconds = fastest_seconds(5, || {
        let (from, to) = (from.as_slice::<u8>(), to.as_mut_slice::<u8>());
        to.par_chunks_mut(piece)
            .zip(from.par_chunks(piece))
            .for_each(|(to, from)| {
                to.copy_from_slice(from);
            });
    });
    let extents = from.as_slice::<u8>().chunks(EXTENT_BYTES_MAX as usize);
    let checksum_seconds = fastest_seconds(3, || {
        let sum = extents
            .clone()
            .fold(0, |sum, extent| sum ^ checksum(extent));
        std::hint::black_box(sum);
    });
    let zstd = measure_zstd(&from.as_slice()[..copy_bytes.min(4 * EXTENT_BYTES_MAX) as usize])?;
    let spilled = measure_moments(from.as_mut_slice(), cutter.cut(EXTENT_BYTES_MAX))?;
    Ok(HostRates {
        copy_bytes_per_second: copy_bytes as f64 / copy_seconds,
        stream_bytes_per_second: adamw.stream,
        adamw_parameters_per_second: adamw.parameters,
        checksum_bytes_per_second: copy_bytes as f64 / checksum_seconds,
        zstd_level: ZSTD_LEVEL,
        zstd_compress_bytes_per_second: zstd[0],
        zstd_decompress_bytes_per_second: zstd[1],
        zstd_ratio: zstd[2],
        moments_encode_bytes_per_second: Some(spilled.encode),
        moments_decode_bytes_per_second: Some(spilled.decode),
        moments_ratio: Some(spilled.ratio),
    })
}

/// Bytes a second of compressing and decompressing shuffled extents, and the ratio.
fn measure_zstd(bytes: &[u8]) -> Result<[f64; 3]> {
    let failed = |error: std::io::Error| Error::io("compress", "moments".as_ref(), error);
    let shuffled: Vec<Vec<u8>> = bytes
        .chunks(EXTENT_BYTES_MAX as usize)
        .map(|extent| {
            // All first bytes of the values, then all second ones: equal exponents meet.
            (0..4)
                .flat_map(|byte| extent.iter().skip(byte).step_by(4).copied())
                .collect()
        })
        .collect();
    let mut compressor = zstd::bulk::Compressor::new(ZSTD_LEVEL).map_err(failed)?;
    let mut packed: Vec<Vec<u8>> = Vec::new();
    for extent in &shuffled {
        packed.push(compressor.compress(extent).map_err(failed)?);
    }
    let mut room = vec![0; zstd::zstd_safe::compress_bound(EXTENT_BYTES_MAX as usize)];
    let compress_seconds = fastest_seconds(3, || {
        for extent in &shuffled {
            compressor.compress_to_buffer(extent, &mut room[..]).ok();
        }
    });
    let mut decompressor = zstd::bulk::Decompressor::new().map_err(failed)?;
    let decompress_seconds = fastest_seconds(3, || {
        for extent in &packed {
            decompressor
                .decompress_to_buffer(extent, &mut room[..])
                .ok();
        }
    });
    let all = bytes.len() as f64;
    let small: usize = packed.iter().map(Vec::len).sum();
    Ok([
        all / compress_seconds,
        all / decompress_seconds,
        small as f64 / all,
    ])
}

/// What compression of spilled moments does to the first extents of `bytes`, which it keeps.
fn measure_moments(bytes: &mut [u8], staging: Lease) -> Result<ZstdRates> {
    const EXTENTS: usize = 8;
    let failed = |error: std::io::Error| Error::io("compress", "moments".as_ref(), error);
    let mut coder = MomentCoder::new(staging).map_err(failed)?;
    let (mut all, mut small) = (0.0, 0.0);
    let (mut encode_seconds, mut decode_seconds) = (0.0, 0.0);
    let extents = bytes.chunks_mut(EXTENT_BYTES_MAX as usize);
    for extent in extents.take(EXTENTS) {
        let payload = extent.len();
        let mut fastest = [f64::INFINITY; 2];
        for _ in 0..3 {
            let started = Instant::now();
            let stored = coder.encode(extent, payload, 4).unwrap_or(payload);
            fastest[0] = fastest[0].min(started.elapsed().as_secs_f64());
            let started = Instant::now();
            if stored < payload {
                let decoded = coder.decode(extent, stored, payload, 4);
                decoded.map_err(failed)?;
            }
            fastest[1] = fastest[1].min(started.elapsed().as_secs_f64());
            small += stored as f64 / 3.0;
        }
        all += payload as f64;
        encode_seconds += fastest[0];
        decode_seconds += fastest[1];
    }
    Ok(ZstdRates {
        encode: all / encode_seconds,
        decode: all / decode_seconds,
        ratio: small / all,
    })
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

fn measure_store(path: &Path, wanted: &Wanted) -> Result<StoreRates> {
    let elements = (wanted.store_bytes / 4).max(EXTENT_ELEMENTS);
    let section = StoredSection {
        tile: TileId { layer: 0, part: 0 },
        section: Section::Moment1,
        elements: elements.next_multiple_of(EXTENT_ELEMENTS),
        element_bytes: 4,
    };
    let mut cutter = HostArena::take(SLABS as u64 * EXTENT_BYTES_MAX)?;
    let ring = cutter.cut_ring(SLABS, EXTENT_BYTES_MAX);
    let bytes = section.slot_bytes();
    let probe = disk::probe(path, wanted.engine)?;
    let paths = [(path.to_path_buf(), bytes)];
    let store = Scratch::create(&paths, &[section], wanted.engine, &[ring.span()])?;
    // Slabs that hold zeros might be stored as holes.
    let mut slabs: Vec<_> = (0..SLABS).map(|_| ring.take()).collect();
    for slab in &mut slabs {
        like_moments(slab.as_mut_slice());
    }
    drop(slabs);
    let mover = Mover {
        store: &store,
        section: &section,
        ring: &ring,
    };
    // The first pass only makes the extents: later ones overwrite, as a run's steps do.
    mover.pass(Pass::Write)?;
    let least = Duration::from_secs_f64(wanted.store_seconds.clamp(0.0, 3600.0));
    Ok(StoreRates {
        path: path.to_path_buf(),
        file_system: probe.file_system,
        engine: match probe.engine {
            IoEngine::Uring => "io_uring".to_string(),
            IoEngine::Pread => "pread".to_string(),
        },
        direct: probe.direct,
        bytes,
        write_bytes_per_second: mover.rate(Pass::Write, least, bytes)?,
        read_bytes_per_second: mover.rate(Pass::Read, least, bytes)?,
        mixed_bytes_per_second: mover.rate(Pass::Update, least, 2 * bytes)?,
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Read,
    Write,
    /// Each extent is read, then written.
    Update,
}

struct Mover<'a> {
    store: &'a Scratch,
    section: &'a StoredSection,
    ring: &'a Ring,
}

impl Mover<'_> {
    /// Bytes a second of whole passes, each of `bytes`, over at least `least`.
    fn rate(&self, pass: Pass, least: Duration, bytes: u64) -> Result<f64> {
        let started = Instant::now();
        let mut passes = 0u32;
        while passes == 0 || started.elapsed() < least {
            self.pass(pass)?;
            passes += 1;
        }
        let seconds = started.elapsed().as_secs_f64().max(1e-9);
        Ok(bytes as f64 * f64::from(passes) / seconds)
    }

    /// Moves every extent once, as many at a time as there are slabs.
    fn pass(&self, pass: Pass) -> Result<()> {
        let (reply, completions) = crossbeam_channel::bounded::<Completion>(SLABS);
        let submit = |kind, key: ExtentKey, slab| {
            let bytes = self.store.payload_bytes(key);
            self.store.submit(Request {
                kind,
                key,
                bytes,
                slab,
                reply: reply.clone(),
            })
        };
        let first = if pass == Pass::Write {
            Direction::Write
        } else {
            Direction::Read
        };
        let mut keys = self.section.keys().peekable();
        let mut in_flight = 0;
        while in_flight > 0 || keys.peek().is_some() {
            while let Some(slab) = keys
                .peek()
                .is_some()
                .then(|| self.ring.try_take())
                .flatten()
            {
                submit(first, keys.next().expect("peeked above"), slab)?;
                in_flight += 1;
            }
            let completion = completions.recv().expect("this function holds a sender");
            completion.result?;
            if pass == Pass::Update && completion.kind == Direction::Read {
                submit(Direction::Write, completion.key, completion.slab)?;
            } else {
                in_flight -= 1;
            }
        }
        Ok(())
    }
}
