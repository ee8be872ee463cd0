//! What does a store cost that does nothing, how long does it take to open, how fast does it
//! resume?
//!
//! `cargo bench --bench store -- DIRECTORY [--tiles 10000] [--mebibytes 512]`; `benches/store.py`
//! has the comparison with fio.
#![allow(clippy::unwrap_used, reason = "a benchmark ends where it fails")]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Parser;
use serde_json::json;
use terrace::error::Result;
use terrace::host::HostArena;
use terrace::store::{CheckpointStore, Scratch, Spec, StoredSection};
use terrace::tile::{EXTENT_BYTES_MAX, EXTENT_ELEMENTS, Section, TileId};

#[derive(Parser)]
struct Arguments {
    /// Directory on the drive to measure; directories are made in it and removed
    directory: PathBuf,
    /// Tiles of the store that is opened
    #[arg(long, default_value_t = 10_000)]
    tiles: u16,
    /// MiB of the commit that is resumed from
    #[arg(long, default_value_t = 512)]
    mebibytes: u64,
    /// Seconds of idling
    #[arg(long, default_value_t = 5.0)]
    idle: f64,
    /// Cargo passes it.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let place = arguments
        .directory
        .join(format!("store-bench.{}", std::process::id()));
    std::fs::create_dir(&place).unwrap();
    let result = measure(&arguments, &place);
    std::fs::remove_dir_all(&place).unwrap();
    result
}

fn measure(arguments: &Arguments, place: &Path) -> Result<()> {
    let idle = idle_percent(&place.join("idle"), arguments.idle)?;
    println!(
        "idle ring        {idle:.3} % of a core over {} s",
        arguments.idle
    );
    let open = open_seconds(&place.join("open"), arguments.tiles)?;
    println!(
        "open             {:.3} s for {} tiles",
        open, arguments.tiles
    );
    let (read, bytes) = resume_rate(&place.join("resume"), arguments.mebibytes)?;
    println!(
        "resume           {:.3} GB/s, every extent checked, {bytes} bytes",
        read / 1e9
    );
    println!(
        "{}",
        json!({ "idle_percent": idle, "open_seconds": open, "tiles": arguments.tiles,
                "resume_bytes_per_second": read, "resume_bytes": bytes })
    );
    Ok(())
}

/// CPU of this process in seconds.
fn cpu_seconds() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let nanoseconds = tasks.filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    });
    nanoseconds.sum::<f64>() / 1e9
}

fn section(layer: u16, elements: u64) -> StoredSection {
    let tile = TileId { layer, part: 0 };
    StoredSection {
        tile,
        section: Section::Moment1,
        elements,
        element_bytes: 4,
    }
}

fn idle_percent(directory: &Path, seconds: f64) -> Result<f64> {
    let paths = [(directory.to_path_buf(), 64 << 20)];
    let _store = Scratch::create(&paths, &[section(0, EXTENT_ELEMENTS)], None, &[])?;
    std::thread::sleep(Duration::from_millis(300));
    let before = cpu_seconds();
    std::thread::sleep(Duration::from_secs_f64(seconds));
    Ok(100.0 * (cpu_seconds() - before) / seconds)
}

fn committed(directory: &Path, sections: Vec<StoredSection>) -> Result<()> {
    let spec = Spec {
        model_hash: 1,
        keep: 1,
        sections,
        engine: None,
        memory: Vec::new(),
    };
    let mut store = CheckpointStore::open_or_create(directory, &spec)?;
    let payload: Vec<u8> = (0..EXTENT_BYTES_MAX).map(|i| (i % 251) as u8).collect();
    let mut commit = store.begin_commit(1)?;
    for key in spec.sections.iter().flat_map(StoredSection::keys) {
        commit.write(key, &payload[..commit.payload_bytes(key)])?;
    }
    commit.finish(b"{}")
}

/// Median of nine.
fn open_seconds(directory: &Path, tiles: u16) -> Result<f64> {
    committed(
        directory,
        (0..tiles).map(|layer| section(layer, 1024)).collect(),
    )?;
    let mut seconds = Vec::new();
    for _ in 0..9 {
        let started = Instant::now();
        let store = CheckpointStore::open_existing(directory)?;
        assert_eq!(store.latest(), Some(1));
        seconds.push(started.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[4])
}

/// Bytes a second of reading and checking a whole commit, median of five, and its bytes.
fn resume_rate(directory: &Path, mebibytes: u64) -> Result<(f64, u64)> {
    let elements = mebibytes << 18;
    let section = section(0, elements);
    committed(directory, vec![section])?;
    let store = CheckpointStore::open_existing(directory)?;
    let mut cutter = HostArena::take(16 * EXTENT_BYTES_MAX)?;
    let ring = cutter.cut_ring(16, EXTENT_BYTES_MAX);
    let mut rates = Vec::new();
    for _ in 0..5 {
        let started = Instant::now();
        store.read_all(1, section.keys(), &ring, |_, _| Ok(()))?;
        rates.push((elements * 4) as f64 / started.elapsed().as_secs_f64());
    }
    rates.sort_by(f64::total_cmp);
    Ok((rates[2], elements * 4))
}
