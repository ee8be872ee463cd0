//! Extents between slabs and homes of states on the device: threads each way, so that copies both
//! ways go on beside AdamW.
//!
//! A thread waits for each of its copies, so what it answers is done; another one's copy goes on
//! meanwhile.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};

use crate::device::{Device, Queue};
use crate::error::{Error, Result};
use crate::host::Lease;
use crate::host::pool::thread_time;
use crate::stats::{Hop, Stats};
use crate::store::disk::Direction;
use crate::store::{Completion, ExtentKey};

/// A copy of one extent.
pub(super) struct Load {
    /// A read fills the slab from the device.
    pub(super) kind: Direction,
    pub(super) key: ExtentKey,
    /// First byte on the device.
    pub(super) offset: u64,
    pub(super) bytes: usize,
    pub(super) slab: Lease,
    pub(super) reply: Sender<Completion>,
}

/// Threads of a way: one copies while another is woken.
const THREADS: usize = 2;

/// The threads; none where no states live on the device.
#[derive(Default)]
pub(super) struct Carriers {
    /// From the device, and back to it.
    ways: Option<[Sender<Load>; 2]>,
    threads: Vec<JoinHandle<()>>,
}

impl Carriers {
    /// Starts them.
    pub(super) fn start(device: &Arc<Device>, stats: &Arc<Stats>) -> Result<Carriers> {
        let mut threads = Vec::new();
        let mut way = |name: &str, queue| {
            // Bounded by the slabs of the ring.
            let (sender, loads) = crossbeam_channel::unbounded();
            let busy_until = Arc::new(Mutex::new(Instant::now()));
            for _ in 0..THREADS {
                let (device, stats, loads) = (device.clone(), stats.clone(), loads.clone());
                let busy_until = busy_until.clone();
                let thread = std::thread::Builder::new()
                    .name(format!("terrace-{name}"))
                    .spawn(move || carry(&device, queue, &stats, &loads, &busy_until))
                    .map_err(|source| Error::io("start a thread", "carrier".as_ref(), source))?;
                threads.push(thread);
            }
            Ok::<_, Error>(sender)
        };
        let out = way("states-out", Queue::StatesOut)?;
        let back = way("states-in", Queue::StatesIn)?;
        let ways = Some([out, back]);
        Ok(Carriers { ways, threads })
    }

    /// Hands a copy over.
    ///
    /// # Errors
    /// [`Error::Device`] if its threads have ended.
    pub(super) fn submit(&self, load: Load) -> Result<()> {
        let ways = self.ways.as_ref();
        let [out, back] = ways.expect("states live on the device");
        let way = match load.kind {
            Direction::Read => out,
            Direction::Write => back,
        };
        way.send(load).map_err(|_| ended())
    }

    /// The failure of a thread that panicked: it answers nobody.
    pub(super) fn failure(&self) -> Option<Error> {
        let any = self.threads.iter().any(JoinHandle::is_finished);
        any.then(ended)
    }
}

impl Drop for Carriers {
    fn drop(&mut self) {
        self.ways = None;
        for thread in self.threads.drain(..) {
            thread.join().ok();
        }
    }
}

fn ended() -> Error {
    Error::Device {
        device: "device".to_string(),
        call: "copies of states".to_string(),
        message: "the thread that waits for them has ended".to_string(),
        during: String::new(),
        remedy: String::new(),
    }
}

/// `busy_until` is when the way's last copy ended: time of two threads at once counts once.
fn carry(
    device: &Device,
    queue: Queue,
    stats: &Stats,
    loads: &Receiver<Load>,
    busy_until: &Mutex<Instant>,
) {
    device.enter(queue);
    for load in loads {
        let Load {
            kind,
            key,
            offset,
            bytes,
            mut slab,
            reply,
        } = load;
        let (started, on_processor) = (Instant::now(), thread_time());
        let hop = match kind {
            Direction::Read => {
                device.copy_out(offset, &mut slab.as_mut_slice::<u8>()[..bytes]);
                Hop::Demote
            }
            Direction::Write => {
                device.copy_in(offset, &slab.as_slice::<u8>()[..bytes]);
                Hop::Promote
            }
        };
        stats.crossed(hop, bytes as u64);
        let taken = match device.is_asynchronous() {
            true => {
                let mut until = busy_until.lock().unwrap_or_else(PoisonError::into_inner);
                let from = started.max(*until);
                *until = from.max(Instant::now());
                *until - from
            }
            false => thread_time().saturating_sub(on_processor),
        };
        stats.moved(hop == Hop::Promote, taken);
        let result = device.check();
        // Whoever dropped the receiver wants no answer; the slab goes back to its ring.
        reply
            .send(Completion {
                kind,
                key,
                slab,
                result,
            })
            .ok();
    }
}
