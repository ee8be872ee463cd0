//! Counters of every hop, waits by cause, and the trace of a run.
//!
//! - Counting is a few relaxed atomic additions an action; the trace is kept only when asked for.
//! - Seconds are wall-clock seconds of the thread that did the work or waited; on the CPU device,
//!   where lanes share the cores, copies count while their thread has a processor. On a card the
//!   compute lane's waits are the card's, by its own clock, from driver 12.8 on.
//!
//! Nothing here decides anything: no number of this room reaches a loss or a weight.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// An edge between neighbouring tiers, with direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Hop {
    /// Host to device.
    Promote = 0,
    /// Device to host.
    Demote = 1,
    /// Store to host.
    Read = 2,
    /// Host to store.
    Write = 3,
}

/// Why a lane stood still.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Wait {
    /// Compute, for weights or embedding rows.
    ComputeForWeights = 0,
    /// Compute, for a gradient to leave its accumulator.
    ComputeForDemote = 1,
    /// Promotion, for a layer's update.
    PromoteForUpdate = 2,
    /// Update, for extents that are spilled or live on the device.
    UpdateForStore = 3,
    /// Update, for a commit to have copied the tile.
    UpdateForCommit = 4,
    /// Compute, for an anchor to leave the device or to come back.
    ComputeForAnchors = 5,
}

/// Names of the waits, as metrics.jsonl has them.
pub const WAIT_NAMES: [&str; 6] = [
    "compute_for_weights",
    "compute_for_demote",
    "promote_for_update",
    "update_for_store",
    "update_for_commit",
    "compute_for_anchors",
];
/// Names of the hops, as metrics.jsonl has them.
pub const HOP_NAMES: [&str; 4] = ["promote", "demote", "store_read", "store_write"];

/// Numbers at one instant; the difference of two is a step's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// Bytes by [`Hop`].
    pub bytes: [u64; 4],
    /// Seconds waited by [`Wait`].
    pub waits: [f64; 6],
    /// Seconds of AdamW arithmetic.
    pub update_seconds: f64,
    /// Seconds of them in which its threads had a processor, the mean of the threads.
    pub update_core_seconds: f64,
    /// Seconds in which promotions were under way.
    pub up_seconds: f64,
    /// Seconds in which demotions were under way.
    pub down_seconds: f64,
}

impl Snapshot {
    /// What was added since `earlier`.
    pub fn since(&self, earlier: &Snapshot) -> Snapshot {
        let mut difference = *self;
        for (bytes, before) in difference.bytes.iter_mut().zip(earlier.bytes) {
            *bytes -= before;
        }
        for (seconds, before) in difference.waits.iter_mut().zip(earlier.waits) {
            *seconds -= before;
        }
        difference.update_seconds -= earlier.update_seconds;
        difference.update_core_seconds -= earlier.update_core_seconds;
        difference.up_seconds -= earlier.up_seconds;
        difference.down_seconds -= earlier.down_seconds;
        difference
    }
}

/// One action in the trace.
#[derive(Clone, Debug)]
pub struct TraceEvent {
    /// Lane, as it prints.
    pub lane: &'static str,
    /// Action, as it prints.
    pub name: String,
    /// Since the start of the run.
    pub start: Duration,
    /// Its length.
    pub length: Duration,
}

/// Counters shared by all lanes.
pub struct Stats {
    started: Instant,
    bytes: [AtomicU64; 4],
    wait_nanoseconds: [AtomicU64; 6],
    update_nanoseconds: AtomicU64,
    update_core_nanoseconds: AtomicU64,
    up_nanoseconds: AtomicU64,
    down_nanoseconds: AtomicU64,
    trace: Option<Mutex<Vec<TraceEvent>>>,
}

/// Most events kept in a trace; later ones are dropped.
const TRACE_EVENTS_MAX: usize = 1 << 20;

impl Stats {
    /// Zeroed counters; with `trace` every action is kept.
    pub fn new(trace: bool) -> Stats {
        Stats {
            started: Instant::now(),
            bytes: Default::default(),
            wait_nanoseconds: Default::default(),
            update_nanoseconds: AtomicU64::new(0),
            update_core_nanoseconds: AtomicU64::new(0),
            up_nanoseconds: AtomicU64::new(0),
            down_nanoseconds: AtomicU64::new(0),
            trace: trace.then(|| Mutex::new(Vec::new())),
        }
    }

    /// Adds bytes that crossed a hop.
    pub fn crossed(&self, hop: Hop, bytes: u64) {
        self.bytes[hop as usize].fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds time that a lane stood still.
    pub fn waited(&self, wait: Wait, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.wait_nanoseconds[wait as usize].fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// Adds time of a lane of promotions, or of demotions.
    pub fn moved(&self, up: bool, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let counter = match up {
            true => &self.up_nanoseconds,
            false => &self.down_nanoseconds,
        };
        counter.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// Adds time of AdamW's arithmetic, and that in which its threads had a processor.
    pub fn updated(&self, time: Duration, mean: Duration) {
        for (counter, time) in [
            (&self.update_nanoseconds, time),
            (&self.update_core_nanoseconds, mean),
        ] {
            let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            counter.fetch_add(nanoseconds, Ordering::Relaxed);
        }
    }

    /// Records an action that began at `start` and ends now, if a trace is kept.
    pub fn trace(&self, lane: &'static str, name: impl FnOnce() -> String, start: Instant) {
        let Some(trace) = &self.trace else { return };
        let mut events = trace.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() < TRACE_EVENTS_MAX {
            let length = start.elapsed();
            let start = start.saturating_duration_since(self.started);
            events.push(TraceEvent {
                lane,
                name: name(),
                start,
                length,
            });
        }
    }

    /// Whether a trace is kept.
    pub fn traces(&self) -> bool {
        self.trace.is_some()
    }

    /// Records an event whose times are known, if a trace is kept.
    pub fn trace_at(&self, lane: &'static str, name: String, start: Instant, length: Duration) {
        let Some(trace) = &self.trace else { return };
        let mut events = trace.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() < TRACE_EVENTS_MAX {
            let start = start.saturating_duration_since(self.started);
            events.push(TraceEvent {
                lane,
                name,
                start,
                length,
            });
        }
    }

    /// Share of the time that a lane was at work, from the first of its actions that began at
    /// `from` or later to the end of its last; its actions do not overlap. `None` without any.
    pub fn busy_share(&self, lane: &str, from: Instant) -> Option<f64> {
        let from = from.saturating_duration_since(self.started);
        let events = self.trace.as_ref()?;
        let events = events.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = events.iter().filter(|e| e.lane == lane && e.start >= from);
        let busy: Duration = wanted.clone().map(|event| event.length).sum();
        let first = wanted.clone().map(|event| event.start).min()?;
        let last = wanted.map(|event| event.start + event.length).max()?;
        Some(busy.as_secs_f64() / (last - first).as_secs_f64())
    }

    /// Numbers at this instant.
    pub fn snapshot(&self) -> Snapshot {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let seconds = |counter: &AtomicU64| read(counter) as f64 / 1e9;
        Snapshot {
            bytes: std::array::from_fn(|i| read(&self.bytes[i])),
            waits: std::array::from_fn(|i| seconds(&self.wait_nanoseconds[i])),
            update_seconds: seconds(&self.update_nanoseconds),
            update_core_seconds: seconds(&self.update_core_nanoseconds),
            up_seconds: seconds(&self.up_nanoseconds),
            down_seconds: seconds(&self.down_nanoseconds),
        }
    }

    /// The trace in Chrome's JSON format (chrome://tracing, Perfetto), one row a lane.
    pub fn chrome_trace(&self) -> Option<String> {
        let trace = self.trace.as_ref()?;
        let events = trace.lock().unwrap_or_else(PoisonError::into_inner);
        let rows: Vec<serde_json::Value> = events
            .iter()
            .map(|event| {
                serde_json::json!({
                    "ph": "X", "pid": 1, "tid": event.lane, "name": event.name,
                    "ts": event.start.as_secs_f64() * 1e6, "dur": event.length.as_secs_f64() * 1e6,
                })
            })
            .collect();
        Some(serde_json::json!({ "traceEvents": rows }).to_string())
    }
}
