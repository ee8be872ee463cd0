//! The thread that owns a disk: orders come by a bounded channel, outcomes leave by a function.
//!
//! - A full channel makes its sender wait; in flight is at most the disk's depth.
//! - Orders of one extent run in the order given: a second one waits until the first has finished.
//! - Checksums are taken here: of a write after its slab was handed over, of a read before anyone
//!   sees it. Padding is zeroed before a write.
//! - Idle means blocked: on the channel when nothing is in flight, otherwise in the disk, which a
//!   sender wakes.
//! - Dropping the engine lets everything in flight and in the channel finish.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TryRecvError};

use super::disk::{Direction, Disk, Finished, Operation, Waker};
use super::watchdog::{Flight, Reporter, Say, Watchdog};
use super::{ExtentKey, checksum};
use crate::host::Lease;

/// Orders that wait for the thread.
pub(super) const QUEUE_MAX: usize = 32;

/// A transfer, as its owner wants it.
pub(super) struct Order<T> {
    pub(super) direction: Direction,
    pub(super) offset: u64,
    /// Bytes that count; what lies between them and the next page is zeroed before a write.
    pub(super) payload: usize,
    /// Whole pages.
    pub(super) bytes: usize,
    pub(super) slab: Lease,
    /// What it is called while it is waited for; `None`: a structure of the store's own.
    pub(super) key: Option<ExtentKey>,
    /// The owner's.
    pub(super) tag: T,
}

/// A transfer's outcome.
pub(super) struct Done<T> {
    pub(super) direction: Direction,
    pub(super) offset: u64,
    pub(super) bytes: usize,
    pub(super) slab: Lease,
    pub(super) tag: T,
    /// Of the padded bytes; 0 for a read with an error.
    pub(super) checksum: u128,
    pub(super) result: io::Result<()>,
}

enum Call<T> {
    Order(Order<T>),
    Flush(Sender<io::Result<()>>),
}

/// What moved in one direction since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// Operations finished.
    pub count: u64,
    /// Bytes of them, padding included.
    pub bytes: u64,
    /// Sum of their times in the disk, in nanoseconds.
    pub latency_ns: u64,
    /// Time with at least one in the disk, in nanoseconds.
    pub busy_ns: u64,
}

/// What moved since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// From the disk.
    pub read: Flow,
    /// To the disk.
    pub write: Flow,
    /// Time with anything in the disk, in nanoseconds.
    pub busy_ns: u64,
    /// Flushes (fdatasync).
    pub flush_count: u64,
}

impl Counters {
    fn flow(&mut self, direction: Direction) -> &mut Flow {
        match direction {
            Direction::Read => &mut self.read,
            Direction::Write => &mut self.write,
        }
    }

    /// Both, of several disks; times busy are those of the busiest.
    pub fn plus(mut self, other: Counters) -> Counters {
        for direction in [Direction::Read, Direction::Write] {
            let add = *{ other }.flow(direction);
            let flow = self.flow(direction);
            flow.count += add.count;
            flow.bytes += add.bytes;
            flow.latency_ns += add.latency_ns;
            flow.busy_ns = flow.busy_ns.max(add.busy_ns);
        }
        self.busy_ns = self.busy_ns.max(other.busy_ns);
        self.flush_count += other.flush_count;
        self
    }
}

/// What the thread shares with the senders.
struct Shared {
    /// The thread waits in the disk and would take more orders.
    asleep: AtomicBool,
    waker: Waker,
    counters: std::sync::Mutex<Counters>,
}

/// The sending side.
pub(super) struct Handle<T> {
    calls: Sender<Call<T>>,
    shared: Arc<Shared>,
}

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Handle<T> {
        Handle {
            calls: self.calls.clone(),
            shared: self.shared.clone(),
        }
    }
}

impl<T> Handle<T> {
    /// Hands an order over; waits while the channel is full.
    pub(super) fn submit(&self, order: Order<T>) -> Result<(), Stopped> {
        self.send(Call::Order(order))
    }

    fn send(&self, call: Call<T>) -> Result<(), Stopped> {
        self.calls.send(call).map_err(|_| Stopped)?;
        if self.shared.asleep.swap(false, Ordering::SeqCst) {
            self.shared.waker.wake();
        }
        Ok(())
    }
}

/// The thread and its first sender. Dropping it waits for the thread, which ends after the last
/// order of the last sender.
pub(super) struct Engine<T> {
    /// `None` only while dropping.
    handle: Option<Handle<T>>,
    thread: Option<JoinHandle<()>>,
    watchdog: Watchdog,
}

/// The thread has ended, which it does only by a panic.
#[derive(Debug)]
pub(super) struct Stopped;

impl<T: Send + 'static> Engine<T> {
    /// Starts the thread; `path` is what slow operations are said of. `settle` gets each outcome
    /// there and must not wait for an order's sender.
    pub(super) fn spawn(
        path: &Path,
        disk: Box<dyn Disk>,
        settle: impl FnMut(Done<T>) + Send + 'static,
    ) -> io::Result<Engine<T>> {
        let (calls, orders) = crossbeam_channel::bounded(QUEUE_MAX);
        let shared = Arc::new(Shared {
            asleep: AtomicBool::new(false),
            waker: disk.waker(),
            counters: std::sync::Mutex::default(),
        });
        let watchdog = Watchdog::spawn(path)?;
        let mut thread = Thread {
            watched: watchdog.reporter(),
            disk,
            orders,
            shared: shared.clone(),
            tags: HashMap::new(),
            held: None,
            next_token: 0,
            in_disk: [(0, Instant::now()); 2],
            busy_since: Instant::now(),
            settle: Box::new(settle),
        };
        let thread = std::thread::Builder::new()
            .name("terrace-store".to_string())
            .spawn(move || thread.run())?;
        Ok(Engine {
            handle: Some(Handle { calls, shared }),
            thread: Some(thread),
            watchdog,
        })
    }

    /// When a slow operation is said, zero is never, and where.
    pub(super) fn set_io_timeout(&self, timeout: Duration, say: Option<Say>) {
        self.watchdog.set(timeout, say);
    }

    /// The sending side, for clones of it.
    pub(super) fn handle(&self) -> &Handle<T> {
        self.handle.as_ref().expect("only drop takes the handle")
    }

    /// Hands an order over; waits while the channel is full.
    pub(super) fn submit(&self, order: Order<T>) -> Result<(), Stopped> {
        self.handle().submit(order)
    }

    /// Makes durable all that was ordered before, as far as it succeeded.
    pub(super) fn flush(&self) -> io::Result<()> {
        let (reply, outcome) = crossbeam_channel::bounded(1);
        let stopped = || io::Error::other("the store's thread has ended");
        let sent = self.handle().send(Call::Flush(reply));
        sent.map_err(|Stopped| stopped())?;
        outcome.recv().unwrap_or_else(|_| Err(stopped()))
    }

    pub(super) fn counters(&self) -> Counters {
        let counters = self.handle().shared.counters.lock();
        *counters.unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl<T> Drop for Engine<T> {
    fn drop(&mut self) {
        self.handle = None;
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

struct Pending<T> {
    tag: T,
    started: Instant,
    checksum: u128,
}

struct Thread<T> {
    watched: Reporter,
    disk: Box<dyn Disk>,
    orders: Receiver<Call<T>>,
    shared: Arc<Shared>,
    /// By token: what is in the disk, with its offset.
    tags: HashMap<u64, (u64, Pending<T>)>,
    /// Waits for another order of its extent, or, a flush, for all.
    held: Option<Call<T>>,
    next_token: u64,
    /// For reads and writes: how many are in the disk, and since when at least one is.
    in_disk: [(usize, Instant); 2],
    /// Since when anything is in the disk.
    busy_since: Instant,
    settle: Box<dyn FnMut(Done<T>) + Send>,
}

impl<T> Thread<T> {
    fn run(&mut self) {
        let mut finished = Vec::new();
        let mut open = true;
        loop {
            while self.disk.in_flight() < self.disk.depth() {
                match self.next_call(&mut open) {
                    Some(call) => {
                        if let Some(call) = self.try_begin(call) {
                            self.held = Some(call);
                            break;
                        }
                    }
                    None => break,
                }
            }
            if self.disk.in_flight() == 0 && self.held.is_none() && !open {
                return;
            }
            self.wait(open, &mut finished);
            for done in finished.drain(..) {
                self.finish(done);
            }
        }
    }

    /// The next call that may begin; waits for one only when nothing is in flight.
    fn next_call(&mut self, open: &mut bool) -> Option<Call<T>> {
        if let Some(call) = self.held.take() {
            return Some(call);
        }
        if !*open {
            return None;
        }
        let call = if self.disk.in_flight() == 0 {
            self.orders.recv().map_err(|_| TryRecvError::Disconnected)
        } else {
            self.orders.try_recv()
        };
        match call {
            Ok(call) => Some(call),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                *open = false;
                None
            }
        }
    }

    /// Waits in the disk. A sender wakes it only while it could take the order.
    fn wait(&mut self, open: bool, finished: &mut Vec<Finished>) {
        let takes = open && self.held.is_none() && self.disk.in_flight() < self.disk.depth();
        if takes {
            self.shared.asleep.store(true, Ordering::SeqCst);
            if !self.orders.is_empty() {
                // Sent after the last look and before `asleep`: nobody will wake for it.
                self.shared.asleep.store(false, Ordering::SeqCst);
                return;
            }
        }
        self.disk.wait(finished);
        self.shared.asleep.store(false, Ordering::SeqCst);
    }

    /// Begins a call, or gives it back if it has to wait for what is in flight.
    fn try_begin(&mut self, call: Call<T>) -> Option<Call<T>> {
        match call {
            Call::Flush(reply) => {
                if self.disk.in_flight() > 0 {
                    return Some(Call::Flush(reply));
                }
                let flight = Flight {
                    action: "flush",
                    key: None,
                    offset: 0,
                };
                self.watched.begin(self.next_token, flight);
                let outcome = self.disk.flush();
                self.watched.end(self.next_token);
                self.count(|counters| counters.flush_count += 1);
                reply.send(outcome).ok();
            }
            Call::Order(order) => {
                if self
                    .tags
                    .values()
                    .any(|(offset, _)| *offset == order.offset)
                {
                    return Some(Call::Order(order));
                }
                self.begin(order);
            }
        }
        None
    }

    fn begin(&mut self, mut order: Order<T>) {
        let sum = match order.direction {
            Direction::Read => 0,
            Direction::Write => {
                let bytes = &mut order.slab.as_mut_slice::<u8>()[..order.bytes];
                bytes[order.payload..].fill(0);
                checksum(bytes)
            }
        };
        let started = Instant::now();
        if self.in_disk.iter().all(|(count, _)| *count == 0) {
            self.busy_since = started;
        }
        let (count, since) = &mut self.in_disk[order.direction as usize];
        if *count == 0 {
            *since = started;
        }
        *count += 1;
        let token = self.next_token;
        self.next_token += 1;
        let pending = Pending {
            tag: order.tag,
            started,
            checksum: sum,
        };
        self.tags.insert(token, (order.offset, pending));
        let flight = Flight {
            action: order.direction.verb(),
            key: order.key,
            offset: order.offset,
        };
        self.watched.begin(token, flight);
        self.disk.start(Operation {
            direction: order.direction,
            offset: order.offset,
            bytes: order.bytes,
            slab: order.slab,
            token,
        });
    }

    fn finish(&mut self, Finished { operation, result }: Finished) {
        let (_, pending) = self
            .tags
            .remove(&operation.token)
            .expect("every token was started once");
        self.watched.end(operation.token);
        let direction = operation.direction;
        let (count, since) = &mut self.in_disk[direction as usize];
        *count -= 1;
        let ended = |count: usize, since: Instant| match count {
            0 => since.elapsed().as_nanos() as u64,
            _ => 0,
        };
        let busy_one_way = ended(*count, *since);
        let all = self.in_disk.iter().map(|(count, _)| count).sum();
        let busy = ended(all, self.busy_since);
        self.count(|counters| {
            let flow = counters.flow(direction);
            flow.count += 1;
            flow.bytes += operation.bytes as u64;
            flow.latency_ns += pending.started.elapsed().as_nanos() as u64;
            flow.busy_ns += busy_one_way;
            counters.busy_ns += busy;
        });
        let sum = match direction {
            Direction::Read if result.is_ok() => {
                checksum(&operation.slab.as_slice()[..operation.bytes])
            }
            _ => pending.checksum,
        };
        (self.settle)(Done {
            direction,
            offset: operation.offset,
            bytes: operation.bytes,
            slab: operation.slab,
            tag: pending.tag,
            checksum: sum,
            result,
        });
    }

    fn count(&self, change: impl FnOnce(&mut Counters)) {
        let counters = self.shared.counters.lock();
        change(&mut counters.unwrap_or_else(std::sync::PoisonError::into_inner));
    }
}
