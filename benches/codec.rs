//! What compressing a checkpoint's state costs and saves, and what its checksum costs, on a real
//! checkpoint: `cargo bench --bench codec -- DIRECTORY [--levels 1,3]`.
//!
//! Reads the newest commit of the directory (read-only) and codes its extents, one after another,
//! on this thread as the store's threads do. Times are CPU time of this thread. Prints one JSON
//! line a section and level, one for all of a level, one for the checksum, and, as level 0, one a
//! section of moments as spilled ones are compressed.
#![allow(clippy::unwrap_used, reason = "a benchmark ends where it fails")]

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Parser;
use terrace::host::HostArena;
use terrace::store::codec::Coder;
use terrace::store::format::Stored;
use terrace::store::moments::MomentCoder;
use terrace::store::{CheckpointStore, Reader, checksum};
use terrace::tile::EXTENT_BYTES_MAX;

#[derive(Parser)]
struct Arguments {
    /// Checkpoint directory
    directory: PathBuf,
    /// Levels of zstd
    #[arg(long, value_delimiter = ',', default_value = "1,3")]
    levels: Vec<i32>,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// CPU seconds of this thread.
fn cpu_seconds() -> f64 {
    // SAFETY: the structure is two integers.
    let mut time: libc::timespec = unsafe { std::mem::zeroed() };
    // SAFETY: the structure outlives the call.
    let refused = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(refused, 0);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[derive(Default)]
struct Sums {
    payload: f64,
    stored: f64,
    plain: u64,
    extents: u64,
    encode: f64,
    decode: f64,
}

impl Sums {
    fn add(&mut self, other: &Sums) {
        self.payload += other.payload;
        self.stored += other.stored;
        self.plain += other.plain;
        self.extents += other.extents;
        self.encode += other.encode;
        self.decode += other.decode;
    }

    fn print(&self, level: i32, section: &str) {
        let line = serde_json::json!({
            "hop": "zstd",
            "level": level,
            "section": section,
            "bytes": self.payload,
            "extents": self.extents,
            "plain_extents": self.plain,
            "ratio": self.payload / self.stored,
            "encode_bytes_per_cpu_second": self.payload / self.encode,
            "decode_bytes_per_cpu_second": self.payload / self.decode,
        });
        println!("{line}");
    }
}

fn main() {
    let arguments = Arguments::parse();
    let reader = CheckpointStore::open_read_only(&arguments.directory).unwrap();
    let generation = reader.latest().expect("a commit");
    for level in &arguments.levels {
        let mut sections = BTreeMap::new();
        code(&reader, generation, *level, &mut sections);
        let mut all = Sums::default();
        for (section, sums) in &sections {
            sums.print(*level, section);
            all.add(sums);
        }
        all.print(*level, "all");
    }
    let mut sections = BTreeMap::new();
    code_moments(&reader, generation, &mut sections);
    sections
        .iter()
        .for_each(|(section, sums)| sums.print(0, section));
    measure_checksum();
}

/// As the scratch store does; times are the best of three.
fn code_moments(reader: &Reader, generation: u64, sections: &mut BTreeMap<String, Sums>) {
    let table = reader.table().expect("a commit has a table");
    let mut cutter = HostArena::take(3 * EXTENT_BYTES_MAX).unwrap();
    let mut coder = MomentCoder::new(cutter.cut(EXTENT_BYTES_MAX)).unwrap();
    let ring = cutter.cut_ring(2, EXTENT_BYTES_MAX);
    for index in 0..table.count() {
        let (key, payload) = (table.key(index), table.payload_bytes(index));
        if !key.section.is_moment() {
            continue;
        }
        let width = table.element_bytes(index) as usize;
        let mut slab = reader.read(generation, key, ring.take()).unwrap();
        let original = slab.as_slice::<u8>()[..payload].to_vec();
        let slab = slab.as_mut_slice::<u8>();
        let sums = sections.entry(key.section.to_string()).or_default();
        let (mut encode, mut decode, mut stored) = (f64::INFINITY, f64::INFINITY, None);
        for _ in 0..3 {
            let started = cpu_seconds();
            stored = coder.encode(slab, payload, width);
            encode = encode.min(cpu_seconds() - started);
            let Some(stored) = stored else { break };
            let started = cpu_seconds();
            coder.decode(slab, stored, payload, width).unwrap();
            decode = decode.min(cpu_seconds() - started);
            assert!(slab[..payload] == original, "{key}");
        }
        sums.payload += payload as f64;
        sums.extents += 1;
        sums.encode += encode;
        sums.plain += u64::from(stored.is_none());
        sums.decode += if stored.is_some() { decode } else { 0.0 };
        let stored = stored.unwrap_or(payload);
        sums.stored += stored.next_multiple_of(4096) as f64;
    }
}

fn code(reader: &Reader, generation: u64, level: i32, sections: &mut BTreeMap<String, Sums>) {
    let table = reader.table().expect("a commit has a table");
    let mut cutter = HostArena::take(2 * EXTENT_BYTES_MAX).unwrap();
    let ring = cutter.cut_ring(2, EXTENT_BYTES_MAX);
    let mut coder = Coder::new().unwrap();
    for index in 0..table.count() {
        let (key, payload) = (table.key(index), table.payload_bytes(index));
        let width = table.element_bytes(index) as usize;
        let mut slab = reader.read(generation, key, ring.take()).unwrap();
        let original = slab.as_slice::<u8>()[..payload].to_vec();
        let slab = &mut slab.as_mut_slice::<u8>()[..table.slot_bytes(index)];
        let sums = sections.entry(key.section.to_string()).or_default();
        let started = cpu_seconds();
        let stored = coder.encode(slab, payload, width, level).unwrap();
        sums.encode += cpu_seconds() - started;
        sums.payload += payload as f64;
        sums.extents += 1;
        match stored {
            Stored::Plain => {
                sums.plain += 1;
                sums.stored += payload as f64;
            }
            Stored::Zstd { bytes } => {
                sums.stored += (bytes as usize).next_multiple_of(4096) as f64;
                let started = cpu_seconds();
                coder.decode(slab, bytes as usize, payload, width).unwrap();
                sums.decode += cpu_seconds() - started;
            }
        }
        assert!(slab[..payload] == original, "{key}");
    }
}

/// Over more than the caches hold, extent by extent, beside a sum of the same bytes: what reading
/// them alone takes.
fn measure_checksum() {
    const GIB: f64 = (1u64 << 30) as f64;
    let bytes: Vec<u8> = (0..256usize << 20).map(|i| ((i * 31) >> 3) as u8).collect();
    let extents = || bytes.chunks(EXTENT_BYTES_MAX as usize);
    let (mut sums, mut reads) = (Vec::new(), Vec::new());
    for _ in 0..9 {
        let started = cpu_seconds();
        let sum = extents().fold(0, |sum, extent| sum ^ checksum(extent));
        sums.push((cpu_seconds() - started) * GIB / bytes.len() as f64);
        let started = cpu_seconds();
        let words = extents().flat_map(|extent| extent.chunks_exact(8));
        let read = words.fold(0u64, |sum, word| {
            sum.wrapping_add(u64::from_le_bytes(word.try_into().unwrap()))
        });
        reads.push((cpu_seconds() - started) * GIB / bytes.len() as f64);
        std::hint::black_box((sum, read));
    }
    let median = |seconds: &mut Vec<f64>| {
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    };
    let line = serde_json::json!({
        "hop": "checksum",
        "core_seconds_per_gib": median(&mut sums),
        "core_seconds_per_gib_best": sums[0],
        "read_alone_core_seconds_per_gib": median(&mut reads),
    });
    println!("{line}");
}
