//! Outcomes in the shape of fio's JSON, so that what reads fio's reads this.
//!
//! Bandwidths are `bw` in KiB/s and `bw_bytes`; times are nanoseconds where the name says so,
//! milliseconds in `runtime`. What fio does not have stands under `terrace`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::histogram::{Histogram, PERCENTILES};
use super::outcome::{Outcome, Side};

/// What errors are called by number: EILSEQ for bytes that differ, EIO for all without a number.
const ERRNO_DIFFERS: i32 = 84;

/// The whole document.
pub fn document(outcomes: &[Outcome]) -> Value {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    json!({
        "fio version": format!("terrace-bench-{}", env!("CARGO_PKG_VERSION")),
        "timestamp": now.as_secs(),
        "timestamp_ms": now.as_millis() as u64,
        "time": super::profile::date_text(now.as_secs()),
        "jobs": outcomes.iter().map(job).collect::<Vec<Value>>(),
    })
}

fn job(outcome: &Outcome) -> Value {
    let options: Map<String, Value> = [("name".to_string(), outcome.job.name.clone())]
        .into_iter()
        .chain(outcome.job.given.clone())
        .map(|(name, value)| (name, Value::from(value)))
        .collect();
    let (user, system) = outcome.cpu_percent();
    let [nanoseconds, microseconds, milliseconds] = latencies(outcome);
    let depths = outcome.depth_percents();
    let batches = outcome.batch_percents();
    let labels = ["1", "2", "4", "8", "16", "32", ">=64"];
    let shares = |labels: &[&str], values: &[f64]| -> Map<String, Value> {
        let pairs = labels.iter().zip(values);
        pairs
            .map(|(label, value)| (label.to_string(), json!(value)))
            .collect()
    };
    let submits = ["0", "4", "8", "16", "32", "64", ">=64"];
    json!({
        "jobname": outcome.job.name,
        "groupid": outcome.group,
        "error": outcome.error.as_ref().map_or(0, errno),
        "eta": 0,
        "elapsed": outcome.elapsed.as_secs_f64().ceil() as u64,
        "job options": options,
        "read": side(outcome, 0),
        "write": side(outcome, 1),
        "trim": unused_side(),
        "sync": {
            "total_ios": outcome.flushes.count(),
            "lat_ns": latency(&outcome.flushes, true),
        },
        "job_runtime": milliseconds_of(outcome.threads_time),
        "usr_cpu": user,
        "sys_cpu": system,
        "ctx": outcome.usage.switches,
        "majf": outcome.usage.major_faults,
        "minf": outcome.usage.minor_faults,
        "iodepth_level": shares(&labels, &depths),
        // Every transfer is handed over alone.
        "iodepth_submit": shares(&submits, &[0.0, 100.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        "iodepth_complete": shares(&submits, &batches),
        "latency_ns": nanoseconds,
        "latency_us": microseconds,
        "latency_ms": milliseconds,
        "latency_depth": outcome.job.depth,
        "latency_target": 0,
        "latency_percentile": 100.0,
        "latency_window": 0,
        "terrace": {
            "copies": outcome.copies,
            "notes": outcome.notes,
            "error": outcome.error.as_ref().map(ToString::to_string),
            "cpu_seconds": outcome.usage.user_seconds + outcome.usage.system_seconds,
            "checksum_bytes": outcome.checked.bytes,
            "checksum_seconds": outcome.checked.seconds,
        },
    })
}

fn errno(error: &crate::Error) -> i32 {
    match error {
        crate::Error::Io { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
        crate::Error::Damaged { .. } => ERRNO_DIFFERS,
        _ => libc::EINVAL,
    }
}

fn milliseconds_of(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn side(outcome: &Outcome, index: usize) -> Value {
    let side = &outcome.sides[index];
    if side.count == 0 {
        return unused_side();
    }
    let rate = outcome.bytes_per_second(index);
    let count_rate = outcome.count_per_second(index);
    let mut value = json!({
        "io_bytes": side.bytes,
        "io_kbytes": side.bytes >> 10,
        "bw_bytes": rate as u64,
        "bw": (rate / 1024.0) as u64,
        "iops": count_rate,
        "runtime": milliseconds_of(side.runtime).max(1),
        "total_ios": side.count,
        "short_ios": 0,
        "drop_ios": 0,
        "slat_ns": latency(&side.submission, false),
        "clat_ns": latency(&side.completion, true),
        "lat_ns": latency(&side.total, false),
    });
    let samples = Samples::of(side);
    let block = outcome.job.block_bytes as f64 / 1024.0;
    let object = value.as_object_mut().expect("an object was made above");
    for (name, number) in samples.fields("bw", "bw_dev", 1.0) {
        object.insert(name, number);
    }
    let all = if rate > 0.0 {
        100.0 * samples.mean * 1024.0 / rate
    } else {
        0.0
    };
    object.insert("bw_agg".to_string(), json!(all.min(100.0)));
    for (name, number) in samples.fields("iops", "iops_stddev", 1.0 / block) {
        object.insert(name, number);
    }
    value
}

/// Bandwidth over intervals of half a second, KiB/s.
pub(super) struct Samples {
    pub(super) count: usize,
    pub(super) min: f64,
    pub(super) max: f64,
    pub(super) mean: f64,
    pub(super) deviation: f64,
}

impl Samples {
    pub(super) fn of(side: &Side) -> Samples {
        let rates: Vec<f64> = side
            .series
            .rates(500)
            .iter()
            .map(|rate| rate / 1024.0)
            .collect();
        let count = rates.len();
        let mean = rates.iter().sum::<f64>() / count.max(1) as f64;
        let spread: f64 = rates.iter().map(|rate| (rate - mean).powi(2)).sum();
        Samples {
            count,
            min: rates
                .iter()
                .copied()
                .fold(f64::INFINITY, f64::min)
                .min(f64::MAX),
            max: rates.iter().copied().fold(0.0, f64::max),
            mean,
            deviation: if count > 1 {
                (spread / (count - 1) as f64).sqrt()
            } else {
                0.0
            },
        }
    }

    fn fields(&self, name: &str, deviation: &str, scale: f64) -> [(String, Value); 5] {
        let whole = |value: f64| json!((value * scale).round() as u64);
        let min = if self.count == 0 { 0.0 } else { self.min };
        [
            (format!("{name}_min"), whole(min)),
            (format!("{name}_max"), whole(self.max)),
            (format!("{name}_mean"), json!(self.mean * scale)),
            (deviation.to_string(), json!(self.deviation * scale)),
            (format!("{name}_samples"), json!(self.count)),
        ]
    }
}

fn latency(histogram: &Histogram, percentiles: bool) -> Value {
    let mut value = json!({
        "min": histogram.min(),
        "max": histogram.max(),
        "mean": histogram.mean(),
        "stddev": histogram.deviation(),
        "N": histogram.count(),
    });
    if percentiles && histogram.count() > 0 {
        let pairs = PERCENTILES.iter().map(|percent| {
            (
                format!("{percent:.6}"),
                Value::from(histogram.percentile(*percent)),
            )
        });
        value["percentile"] = Value::Object(pairs.collect());
    }
    value
}

fn unused_side() -> Value {
    let none = latency(&Histogram::default(), false);
    json!({
        "io_bytes": 0, "io_kbytes": 0, "bw_bytes": 0, "bw": 0, "iops": 0.0, "runtime": 0,
        "total_ios": 0, "short_ios": 0, "drop_ios": 0,
        "slat_ns": none, "clat_ns": none, "lat_ns": none,
        "bw_min": 0, "bw_max": 0, "bw_agg": 0.0, "bw_mean": 0.0, "bw_dev": 0.0, "bw_samples": 0,
        "iops_min": 0, "iops_max": 0, "iops_mean": 0.0, "iops_stddev": 0.0, "iops_samples": 0,
    })
}

/// Bounds of fio's table of latencies.
pub(super) const BOUNDS: [u64; 10] = [2, 4, 10, 20, 50, 100, 250, 500, 750, 1000];

/// Percent of all transfers whose latency is at most each bound and above the one before: in
/// nanoseconds, microseconds, milliseconds.
pub(super) fn shares(outcome: &Outcome) -> [Vec<(String, f64)>; 3] {
    let mut all = outcome.sides[0].total.clone();
    all.merge(&outcome.sides[1].total);
    let count = all.count().max(1) as f64;
    let mut before = 0;
    let mut share = |bound: u64| {
        let below = all.below(bound.saturating_add(1));
        let between = below.saturating_sub(before);
        before = below;
        100.0 * between as f64 / count
    };
    let mut tables = [1u64, 1_000, 1_000_000].map(|unit| {
        let pairs = BOUNDS
            .iter()
            .map(|bound| (bound.to_string(), share(bound * unit)));
        pairs.collect::<Vec<_>>()
    });
    tables[2].push(("2000".to_string(), share(2_000_000_000)));
    tables[2].push((">=2000".to_string(), share(u64::MAX - 1)));
    tables
}

fn latencies(outcome: &Outcome) -> [Map<String, Value>; 3] {
    shares(outcome).map(|table| {
        table
            .into_iter()
            .map(|(bound, share)| (bound, json!(share)))
            .collect()
    })
}
