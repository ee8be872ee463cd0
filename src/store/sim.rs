//! The simulated disk: seeded faults and crashes, for tests.
//!
//! Fault model:
//! - a write changes the live image at once and the durable one only by a flush;
//! - a crash keeps, loses or tears (at 512 bytes) each write since the last flush, each by itself,
//!   and applies them in any order;
//! - completions come back in any order;
//! - a read or a write may fail with EIO or EAGAIN or come short (and be continued); a read may
//!   find a flipped bit or what the place held before; either may go to another place, and a write
//!   that reports success may never have happened;
//! - a flush may fail: each write that it covered is then durable, torn or lost, reads see it all
//!   the same, and no later flush covers it;
//! - a process that ends takes nothing with it: the next one reads what was written, flushed or
//!   not (a clone of the disk).
//!
//! Everything random follows from the seed, the place and how often it was met before: the same
//! orders meet the same faults, however threads run. Memory is taken only for pages not zero.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::disk::{DEPTH, Direction, Disk, Finished, Next, Operation, Progress, Waker};
use crate::tile::PAGE_BYTES;

const PAGE: usize = PAGE_BYTES as usize;
const SECTOR: usize = 512;

/// Which faults happen, each in so many of 1000 operations; all 0 by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Seed of everything random.
    pub seed: u64,
    /// EIO.
    pub io_error: u32,
    /// EIO of the operation of this number, counted from 1.
    pub io_error_at: Option<u64>,
    /// EIO of the operation of this number and of all later ones.
    pub io_error_from: Option<u64>,
    /// EAGAIN, as many times as it falls; then it is tried again.
    pub again: u32,
    /// Moves a part, then is continued.
    pub short: u32,
    /// One bit of what is read is wrong.
    pub bit_flip: u32,
    /// A write or a read goes to a place one page on or back.
    pub misdirected: u32,
    /// A read finds what the place held before it was last written.
    pub stale: u32,
    /// A write reports success and never happened.
    pub lost: u32,
    /// A flush fails.
    pub flush_error: u32,
    /// Fails the flush of this number, counted from 1.
    pub flush_error_at: Option<u64>,
    /// Power fails at the operation (start or flush) of this number, counted from 1.
    pub crash_at: Option<u64>,
}

/// An image: pages that are not zero. Shared by its copies until one of them writes.
type Pages = BTreeMap<u64, Arc<[u8; PAGE]>>;

/// What a store asked of the disk, in the order in which it asked. Reads are not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A write of `bytes` at `offset` began.
    Write {
        /// Byte offset.
        offset: u64,
        /// Bytes.
        bytes: usize,
    },
    /// A flush.
    Flush,
}

#[derive(Default)]
struct State {
    live: Pages,
    durable: Pages,
    /// Since the last flush, in order.
    unflushed: Vec<(u64, Vec<u8>)>,
    /// By page: what it held before its last write.
    previous: Pages,
    events: Vec<Event>,
    faults: Faults,
    operations: u64,
    /// By offset (of a flush: the greatest), how many operations there were.
    visits: HashMap<u64, u64>,
    flushes: u64,
    crashed: bool,
}

/// A simulated disk. Clones share their images: one is the store's, one the test's.
#[derive(Clone)]
pub struct SimDisk {
    state: Arc<Mutex<State>>,
    bytes: u64,
    ready: Arc<Mutex<Vec<Finished>>>,
}

/// The number after `state` in a fixed sequence (splitmix64).
pub fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn store(pages: &mut Pages, offset: u64, bytes: &[u8]) {
    let mut at = offset;
    let mut rest = bytes;
    while !rest.is_empty() {
        let (page, within) = (at / PAGE_BYTES, (at % PAGE_BYTES) as usize);
        let count = rest.len().min(PAGE - within);
        let (now, later) = rest.split_at(count);
        if pages.contains_key(&page) || now.iter().any(|byte| *byte != 0) {
            let page = pages.entry(page).or_insert_with(|| Arc::new([0; PAGE]));
            Arc::make_mut(page)[within..within + count].copy_from_slice(now);
        }
        at += count as u64;
        rest = later;
    }
}

fn load(pages: &Pages, offset: u64, bytes: &mut [u8]) {
    for (index, part) in bytes.chunks_mut(PAGE).enumerate() {
        match pages.get(&(offset / PAGE_BYTES + index as u64)) {
            Some(page) => part.copy_from_slice(&page[..part.len()]),
            None => part.fill(0),
        }
    }
}

/// Applies what a failure leaves of writes that were not flushed: each is kept, lost or torn by
/// itself, in any order. Seed 0 keeps all in order, 1 none.
fn keep_some(image: &mut Pages, unflushed: &[(u64, Vec<u8>)], seed: u64) {
    let mut visits = HashMap::new();
    let mut random = |offset: u64| {
        let visit: &mut u64 = visits.entry(offset).or_default();
        *visit += 1;
        mix(seed ^ mix(offset ^ mix(*visit)))
    };
    let mut order: Vec<(u64, &(u64, Vec<u8>))> = unflushed
        .iter()
        .map(|write| (random(write.0), write))
        .collect();
    if seed > 1 {
        order.sort_by_key(|(random, _)| *random);
    }
    for (random, (offset, bytes)) in order {
        match (seed, mix(random) % 3) {
            // The two ends of the range are always among the seeds 0 and 1.
            (0, _) | (2.., 0) => store(image, *offset, bytes),
            (1, _) | (2.., 1) => {}
            (2.., _) => {
                for (index, sector) in bytes.chunks(SECTOR).enumerate() {
                    if mix(random ^ mix(index as u64 + 1)) & 1 == 0 {
                        store(image, offset + (index * SECTOR) as u64, sector);
                    }
                }
            }
        }
    }
}

impl SimDisk {
    /// A disk of `bytes` zeros.
    pub fn new(bytes: u64, faults: Faults) -> SimDisk {
        SimDisk::with_image(Pages::new(), bytes, faults)
    }

    /// A disk of the bytes given: a file's, say.
    pub fn of_bytes(bytes: &[u8]) -> SimDisk {
        let mut image = Pages::new();
        store(&mut image, 0, bytes);
        SimDisk::with_image(image, bytes.len() as u64, Faults::default())
    }

    fn with_image(image: Pages, bytes: u64, faults: Faults) -> SimDisk {
        let state = State {
            live: image.clone(),
            durable: image,
            faults,
            ..State::default()
        };
        SimDisk {
            state: Arc::new(Mutex::new(state)),
            bytes,
            ready: Arc::default(),
        }
    }

    /// A disk with the image that a power cut leaves now. Seed 0 keeps all writes, 1 none.
    pub fn after_crash(&self, seed: u64, faults: Faults) -> SimDisk {
        let state = self.state();
        let mut image = state.durable.clone();
        keep_some(&mut image, &state.unflushed, seed);
        SimDisk::with_image(image, self.bytes, faults)
    }

    /// A disk with what reads see now: the process ended, the machine did not.
    pub fn after_exit(&self, faults: Faults) -> SimDisk {
        SimDisk::with_image(self.state().live.clone(), self.bytes, faults)
    }

    /// Turns over one bit, as ageing does: live and durable.
    pub fn flip(&self, byte: u64, bit: u8) {
        let mut state = self.state();
        let State { live, durable, .. } = &mut *state;
        for image in [live, durable] {
            let page = image
                .entry(byte / PAGE_BYTES)
                .or_insert_with(|| Arc::new([0; PAGE]));
            Arc::make_mut(page)[(byte % PAGE_BYTES) as usize] ^= 1 << bit;
        }
    }

    /// Replaces a range by zeros, live and durable.
    pub fn erase(&self, offset: u64, bytes: usize) {
        self.overwrite(offset, &vec![0; bytes]);
    }

    /// Replaces a range by other bytes, live and durable.
    pub fn overwrite(&self, offset: u64, bytes: &[u8]) {
        let mut state = self.state();
        let State { live, durable, .. } = &mut *state;
        for image in [live, durable] {
            store(image, offset, bytes);
        }
    }

    /// Puts back what a range of whole pages held before it was last written, live and durable.
    pub fn revert(&self, offset: u64, bytes: usize) {
        let mut before = self.peek(offset, bytes);
        self.state().load_previous(offset, &mut before);
        self.overwrite(offset, &before);
    }

    /// What reads see now, from `offset`.
    pub fn peek(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let mut peeked = vec![0; bytes];
        load(&self.state().live, offset, &mut peeked);
        peeked
    }

    /// Writes and flushes so far.
    pub fn events(&self) -> Vec<Event> {
        self.state().events.clone()
    }

    /// The faults from here on.
    pub fn faults(&self) -> Faults {
        self.state().faults
    }

    /// Sets the faults from here on.
    pub fn set_faults(&self, faults: Faults) {
        self.state().faults = faults;
    }

    /// Operations started and flushes so far.
    pub fn operation_count(&self) -> u64 {
        self.state().operations
    }

    /// Counts operations from 0 again. How many of those under way still come after a failure
    /// depends on threads: what follows must not.
    pub fn count_anew(&self) {
        let mut state = self.state();
        state.operations = 0;
        state.visits.clear();
    }

    /// Flushes so far.
    pub fn flush_count(&self) -> u64 {
        self.state().flushes
    }

    /// Bytes of the disk.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ready(&self) -> MutexGuard<'_, Vec<Finished>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Counts an operation; its random number, or the error of a machine without power.
    fn count(&mut self, offset: u64) -> io::Result<u64> {
        self.operations += 1;
        let visit = self.visits.entry(offset).or_default();
        *visit += 1;
        let random = mix(self.faults.seed ^ mix(offset ^ mix(*visit)));
        self.crashed |= self.faults.crash_at.is_some_and(|at| self.operations >= at);
        let refused = self.faults.io_error_at == Some(self.operations)
            || self
                .faults
                .io_error_from
                .is_some_and(|from| self.operations >= from);
        if self.crashed || refused {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(random)
    }

    /// One transfer of the rest of an operation: bytes moved.
    fn transfer(&mut self, operation: &mut Operation, done: usize, random: u64) -> usize {
        let falls = |salt: u64, of_1000: u32| mix(random ^ salt) % 1000 < u64::from(of_1000);
        let left = operation.bytes - done;
        // From page to page, and at last the rest: the continuation starts where the part ended.
        let count = if left > PAGE && falls(1, self.faults.short) {
            PAGE + mix(random ^ done as u64) as usize % (left - PAGE)
        } else {
            left
        };
        let mut offset = operation.offset + done as u64;
        if falls(2, self.faults.misdirected) {
            offset = match offset.checked_sub(PAGE_BYTES) {
                Some(before) => before,
                None => offset + PAGE_BYTES,
            };
        }
        match operation.direction {
            Direction::Read => {
                let bytes = &mut operation.slab.as_mut_slice::<u8>()[done..done + count];
                load(&self.live, offset, bytes);
                if falls(6, self.faults.stale) {
                    self.load_previous(offset, bytes);
                }
                if falls(3, self.faults.bit_flip) {
                    let bit = mix(random ^ 4) as usize % (count * 8);
                    bytes[bit / 8] ^= 1 << (bit % 8);
                }
            }
            Direction::Write if falls(7, self.faults.lost) => {}
            Direction::Write => {
                let bytes = &operation.slab.as_slice::<u8>()[done..done + count];
                self.write(offset, bytes);
            }
        }
        count
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        let pages = offset / PAGE_BYTES..(offset + bytes.len() as u64).div_ceil(PAGE_BYTES);
        for page in pages {
            let before = self.live.get(&page).cloned();
            let before = before.unwrap_or_else(|| Arc::new([0; PAGE]));
            self.previous.insert(page, before);
        }
        store(&mut self.live, offset, bytes);
        self.unflushed.push((offset, bytes.to_vec()));
    }

    fn load_previous(&self, offset: u64, bytes: &mut [u8]) {
        for (index, part) in bytes.chunks_mut(PAGE).enumerate() {
            if let Some(page) = self.previous.get(&(offset / PAGE_BYTES + index as u64)) {
                part.copy_from_slice(&page[..part.len()]);
            }
        }
    }
}

impl Disk for SimDisk {
    fn depth(&self) -> usize {
        DEPTH
    }

    fn in_flight(&self) -> usize {
        self.ready().len()
    }

    fn start(&mut self, mut operation: Operation) {
        operation.check(self.bytes);
        let mut state = self.state();
        if operation.direction == Direction::Write {
            let (offset, bytes) = (operation.offset, operation.bytes);
            state.events.push(Event::Write { offset, bytes });
        }
        let counted = state.count(operation.offset);
        // Power fails while this write is under way: it may be kept, lost or torn too.
        if counted.is_err() && state.faults.crash_at == Some(state.operations) {
            let bytes = operation.bytes;
            if operation.direction == Direction::Write {
                let written = operation.slab.as_slice::<u8>()[..bytes].to_vec();
                state.unflushed.push((operation.offset, written));
            }
        }
        let mut progress = Progress::default();
        let result = counted.and_then(|random| {
            if mix(random ^ 5) % 1000 < u64::from(state.faults.io_error) {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            for attempt in 0.. {
                let again = mix(random ^ mix(8 + attempt)) % 1000 < u64::from(state.faults.again);
                let moved = if again {
                    Err(io::Error::from_raw_os_error(libc::EAGAIN))
                } else {
                    Ok(state.transfer(&mut operation, progress.done, random))
                };
                match progress.advance(&operation, moved) {
                    Next::Again => {}
                    Next::Done => return Ok(()),
                    Next::Failed(error) => return Err(error),
                }
            }
            unreachable!("attempts are bounded by the progress")
        });
        let place = mix(state.operations) as usize;
        drop(state);
        let mut ready = self.ready();
        assert!(ready.len() < DEPTH, "more than {DEPTH} in flight");
        let place = place % (ready.len() + 1);
        ready.insert(place, Finished { operation, result });
    }

    fn wait(&mut self, finished: &mut Vec<Finished>) {
        // One at a time: the others stay in flight.
        let done = self.ready().pop();
        finished.extend(done);
    }

    fn flush(&mut self) -> io::Result<()> {
        assert_eq!(self.in_flight(), 0, "a flush covers only what finished");
        let mut state = self.state();
        state.events.push(Event::Flush);
        let random = state.count(u64::MAX)?;
        state.flushes += 1;
        let unflushed = std::mem::take(&mut state.unflushed);
        if state.faults.flush_error_at == Some(state.flushes)
            || mix(random ^ 9) % 1000 < u64::from(state.faults.flush_error)
        {
            keep_some(&mut state.durable, &unflushed, mix(random));
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        for (offset, bytes) in unflushed {
            store(&mut state.durable, offset, &bytes);
        }
        Ok(())
    }

    fn waker(&self) -> Waker {
        // A wait never blocks.
        Waker::new(|| {})
    }
}
