//! The scratch class: extents that the running step spilled.
//!
//! - One file a path, unlinked as soon as it is open: nothing outlives the process.
//! - Space is reserved at the start; nothing grows later.
//! - Extents are spread over the paths in proportion to their rates, or budgets.
//! - Each write raises the extent's generation and keeps its checksum in memory; each read is
//!   checked against it before anyone sees the bytes.
//! - With coders, extents of moments are compressed on their way to the disk ([`super::moments`]),
//!   on threads beside the disk's. Their slots keep their size, since an extent may turn
//!   incompressible: what shrinks is the bytes that move.
//! - The first failure of any I/O latches the store: outstanding and later requests are refused
//!   with its text.
//!
//! No fsync, no resume: that is [`super::checkpoint`].

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crossbeam_channel::Sender;

use super::disk::{self, Direction, Disk};
use super::engine::{Counters, Done, Engine, Handle, Order};
use super::moments::{self, MomentCoder};
use super::mutant::{self, Mutant};
use super::workers::{Jobs, Workers};
use super::{ExtentKey, ExtentTable, Say, StoredSection, directory, sys};
use crate::config::IoEngine;
use crate::error::{Error, Result};
use crate::host::{Lease, Span};
use crate::stats::{Hop, Stats};
use crate::tile::PAGE_BYTES;

/// Name of the file in each path's directory, while it has one.
pub const FILE_NAME: &str = "scratch.tiles";
/// Name of the lock in each path's directory.
pub const LOCK_NAME: &str = "scratch.lock";

/// A transfer of one extent.
pub struct Request {
    /// Which way.
    pub kind: Direction,
    /// The extent.
    pub key: ExtentKey,
    /// Its bytes, without padding: [`Scratch::payload_bytes`].
    pub bytes: usize,
    /// Memory of at least the extent's whole pages. A write zeroes what follows the payload.
    pub slab: Lease,
    /// Where the completion goes. It must have room for all that its owner has outstanding: the
    /// store's thread would wait for room, and with it everybody.
    pub reply: Sender<Completion>,
}

/// A finished request.
#[derive(Debug)]
pub struct Completion {
    /// Which way.
    pub kind: Direction,
    /// The extent.
    pub key: ExtentKey,
    /// The request's memory.
    pub slab: Lease,
    /// `Ok` of a read: the bytes are those of the extent's last write.
    pub result: Result<()>,
}

/// What is known of an extent's bytes on disk.
#[derive(Clone, Copy, Default)]
struct Entry {
    /// Writes so far; 0: it was never written and its checksum means nothing.
    generation: u64,
    checksum: u128,
    /// Its length there without padding, less than the payload's where it is coded.
    stored: usize,
    /// A write was handed to a coder and has not ended: until then nobody knows its length.
    coding: bool,
}

/// A path of a scratch store.
#[derive(Clone, Debug, PartialEq)]
pub struct Stripe {
    /// Its directory.
    pub path: PathBuf,
    /// Most bytes to use there.
    pub bytes: u64,
    /// Bytes a second, each read and written once; above 0. `None` where it is not known.
    pub rate: Option<f64>,
}

/// Where an extent lies.
#[derive(Clone, Copy)]
struct Place {
    path: u16,
    offset: u64,
}

struct Tag {
    index: usize,
    key: ExtentKey,
    reply: Sender<Completion>,
    form: Form,
}

/// How an extent is stored.
#[derive(Clone, Copy)]
struct Form {
    /// Bytes on disk without padding; those of the payload where it is plain.
    stored: usize,
    payload: usize,
    element_bytes: usize,
}

/// Work for a coder.
enum Job {
    /// Encode the order's slab, then hand it to the disk of that number.
    Encode { order: Order<Tag>, path: u16 },
    /// Decode the completion's slab, then answer.
    Decode {
        completion: Completion,
        form: Form,
        reply: Sender<Completion>,
    },
}

/// What the disks' threads and the coders share with the store.
#[derive(Default)]
struct Shared {
    entries: Mutex<Vec<Entry>>,
    failure: OnceLock<Error>,
    stats: OnceLock<Arc<Stats>>,
}

/// The scratch store.
pub struct Scratch {
    table: ExtentTable,
    places: Vec<Place>,
    shared: Arc<Shared>,
    /// Moments are coded.
    codes: bool,
    /// Before the engines, whose threads end after theirs.
    coders: Workers<Job>,
    engines: Vec<Engine<Tag>>,
    sentences: Vec<String>,
    /// Held until the engines are gone.
    _locks: Vec<File>,
}

impl Scratch {
    /// Makes the store's files in the directories of `paths`, each with its budget in bytes.
    /// `memory` is registered with the kernel where allowed.
    ///
    /// # Errors
    /// [`Error::Budget`] if the budgets or the disks are too small, [`Error::Busy`] if another
    /// process has one of the directories, [`Error::Input`] if `engine` is asked for and refused.
    pub fn create(
        paths: &[(PathBuf, u64)],
        sections: &[StoredSection],
        engine: Option<IoEngine>,
        memory: &[Span],
    ) -> Result<Scratch> {
        let stripe = |(path, bytes): &(PathBuf, u64)| Stripe {
            path: path.clone(),
            bytes: *bytes,
            rate: None,
        };
        let stripes: Vec<Stripe> = paths.iter().map(stripe).collect();
        Scratch::create_striped(&stripes, sections, engine, memory)
    }

    /// As [`Scratch::create`], over paths of known rates: each takes bytes in proportion to its
    /// rate as far as its budget allows; in proportion to its budget where a rate is not known.
    ///
    /// # Errors
    /// As [`Scratch::create`].
    pub fn create_striped(
        paths: &[Stripe],
        sections: &[StoredSection],
        engine: Option<IoEngine>,
        memory: &[Span],
    ) -> Result<Scratch> {
        let table = ExtentTable::new(sections);
        let (places, used) = place(&table, paths)?;
        let mut disks = Vec::new();
        let (mut sentences, mut locks) = (Vec::new(), Vec::new());
        for (Stripe { path, .. }, bytes) in paths.iter().zip(used) {
            directory::prepare(path)?;
            locks.push(directory::lock(path, LOCK_NAME)?);
            let probe = disk::probe(path, engine)?;
            let file = make_file(path, bytes, probe.direct)?;
            let (disk, note) = disk::open(file, bytes, &probe, memory)
                .map_err(|e| Error::io("start I/O on", path, e))?;
            let share = 100.0 * bytes as f64 / table.bytes() as f64;
            let share = match paths.len() {
                1 => String::new(),
                _ => format!("; {share:.0} % of what is spilled"),
            };
            sentences.push(format!("{}{share}", probe.sentence));
            sentences.extend(probe.warning);
            sentences.extend(note);
            disks.push((path.join(FILE_NAME), disk));
        }
        Scratch::assemble(table, places, disks, sentences, locks)
    }

    /// A store on one disk given, for tests and benchmarks: `bytes` of it are used.
    pub fn on_disk(disk: Box<dyn Disk>, bytes: u64, sections: &[StoredSection]) -> Result<Scratch> {
        let table = ExtentTable::new(sections);
        let simulated = Stripe {
            path: PathBuf::from("simulated"),
            bytes,
            rate: None,
        };
        let (places, _) = place(&table, &[simulated])?;
        let disks = vec![(PathBuf::from("simulated"), disk)];
        Scratch::assemble(table, places, disks, Vec::new(), Vec::new())
    }

    fn assemble(
        table: ExtentTable,
        places: Vec<Place>,
        disks: Vec<(PathBuf, Box<dyn Disk>)>,
        sentences: Vec<String>,
        locks: Vec<File>,
    ) -> Result<Scratch> {
        let shared = Arc::new(Shared {
            entries: Mutex::new(vec![Entry::default(); table.count()]),
            ..Shared::default()
        });
        let coders = Workers::new();
        let mut engines = Vec::with_capacity(disks.len());
        for (path, disk) in disks {
            let (at, shared, jobs) = (path.clone(), shared.clone(), coders.jobs());
            let engine = Engine::spawn(&path, disk, move |done| settle(done, &at, &shared, &jobs))
                .map_err(|e| Error::io("start a thread for", &path, e))?;
            engines.push(engine);
        }
        Ok(Scratch {
            table,
            places,
            shared,
            codes: false,
            coders,
            engines,
            sentences,
            _locks: locks,
        })
    }

    /// Compresses moments from here on, on a thread for each of `staging`, which hold an extent
    /// each. Without any nothing changes. From then on a coded extent's requests must wait for its
    /// last write's completion.
    ///
    /// # Errors
    /// [`Error::Io`] if no threads can be started.
    pub fn start_coders(&mut self, staging: Vec<Lease>) -> Result<()> {
        self.codes = !staging.is_empty();
        let count = staging.len();
        let mut staging = staging.into_iter();
        let started = self.coders.start(count, || {
            let buffer = staging.next().expect("one a thread");
            let mut coder = MomentCoder::new(buffer)?;
            let disks: Vec<Handle<Tag>> = self.engines.iter().map(|e| e.handle().clone()).collect();
            let shared = self.shared.clone();
            Ok(move |job| work_on(job, &mut coder, &disks, &shared))
        });
        started.map_err(|e| Error::io("start a thread for", "zstd".as_ref(), e))
    }

    /// Adds what disks move, without padding, to the counters of hops too.
    pub fn count_into(&self, stats: &Arc<Stats>) {
        self.shared.stats.set(stats.clone()).ok();
    }

    /// What to say once: engine, direct or buffered, file system of each path; then warnings.
    pub fn sentences(&self) -> &[String] {
        &self.sentences
    }

    /// All extents.
    pub fn table(&self) -> &ExtentTable {
        &self.table
    }

    /// Bytes of an extent without padding.
    ///
    /// # Panics
    /// If the store has no such extent.
    pub fn payload_bytes(&self, key: ExtentKey) -> usize {
        self.table.payload_bytes(self.index(key))
    }

    /// Writes of an extent so far; 0 before the first.
    ///
    /// # Panics
    /// If the store has no such extent.
    pub fn generation(&self, key: ExtentKey) -> u64 {
        self.shared.entries()[self.index(key)].generation
    }

    /// Hands a request over; waits while the queue of its path is full. Requests for one extent
    /// take effect in the order given.
    ///
    /// # Errors
    /// [`Error::StoreFailed`] after the first failure; the slab goes back to its ring.
    ///
    /// # Panics
    /// If the store has no such extent, `bytes` or the slab do not fit it, or it is coded and a
    /// write of it has not completed.
    pub fn submit(&self, request: Request) -> Result<()> {
        let index = self.index(request.key);
        let (payload, bytes) = (
            self.table.payload_bytes(index),
            self.table.slot_bytes(index),
        );
        assert_eq!(request.bytes, payload, "{}", request.key);
        assert!(
            request.slab.len() >= bytes,
            "{}: {:?}",
            request.key,
            request.slab
        );
        if let Some(first) = self.shared.failure.get() {
            let first = first.to_string();
            return Err(Error::StoreFailed { first });
        }
        let element_bytes = self.table.element_bytes(index);
        let coded = self.codes && moments::takes(request.key.section, element_bytes);
        let mut stored = payload;
        if coded {
            let entry = &mut self.shared.entries()[index];
            assert!(!entry.coding, "{}: its write is in flight", request.key);
            match request.kind {
                Direction::Read if entry.generation > 0 => stored = entry.stored,
                Direction::Read => {}
                Direction::Write => entry.coding = true,
            }
        }
        let place = self.places[index];
        let order = Order {
            direction: request.kind,
            offset: place.offset,
            payload: stored,
            bytes: stored.next_multiple_of(PAGE_BYTES as usize),
            slab: request.slab,
            key: Some(request.key),
            tag: Tag {
                index,
                key: request.key,
                reply: request.reply,
                form: Form {
                    stored,
                    payload,
                    element_bytes: element_bytes as usize,
                },
            },
        };
        if coded && request.kind == Direction::Write {
            let path = place.path;
            self.coders.submit(Job::Encode { order, path });
            return Ok(());
        }
        self.engines[usize::from(place.path)]
            .submit(order)
            .map_err(|_| ended())
    }

    /// The first failure, whoever's request met it.
    pub fn failure(&self) -> Option<Error> {
        self.shared.failure.get().map(Error::again)
    }

    /// How long an operation may take before a line says it, zero is for ever, and where: without
    /// `say` to standard error. The default is [`super::IO_TIMEOUT_SECONDS`].
    pub fn set_io_timeout(&self, timeout: Duration, say: Option<Say>) {
        for engine in &self.engines {
            engine.set_io_timeout(timeout, say.clone());
        }
    }

    /// What moved so far, over all paths.
    pub fn counters(&self) -> Counters {
        let each = self.engines.iter().map(Engine::counters);
        each.fold(Counters::default(), Counters::plus)
    }

    fn index(&self, key: ExtentKey) -> usize {
        let index = self.table.index(key);
        index.unwrap_or_else(|| panic!("{key} is not in the scratch store"))
    }
}

impl Shared {
    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Latches the first failure.
    fn failed(&self, error: &Error) {
        self.failure.get_or_init(|| error.again());
    }
}

fn ended() -> Error {
    Error::StoreFailed {
        first: "the store's thread has ended".to_string(),
    }
}

/// Spreads the extents: each goes to the path that is then least used in proportion to its rate, or
/// to its budget where not all rates are known. Returns their places and the bytes used of each.
fn place(table: &ExtentTable, paths: &[Stripe]) -> Result<(Vec<Place>, Vec<u64>)> {
    let rates: Option<Vec<f64>> = paths.iter().map(|path| path.rate).collect();
    let weights = rates.unwrap_or_else(|| paths.iter().map(|path| path.bytes as f64).collect());
    let mut used = vec![0u64; paths.len()];
    let mut places = Vec::with_capacity(table.count());
    for index in 0..table.count() {
        let bytes = table.slot_bytes(index) as u64;
        let fill = |path: &usize| {
            let after = used[*path] + bytes;
            (after <= paths[*path].bytes).then(|| after as f64 / weights[*path])
        };
        let fitting = (0..paths.len()).filter_map(|path| Some((path, fill(&path)?)));
        let Some((path, _)) = fitting.min_by(|a, b| a.1.total_cmp(&b.1)) else {
            let budget = paths
                .iter()
                .fold(0u64, |sum, path| sum.saturating_add(path.bytes));
            return Err(Error::Budget {
                tier: "store",
                needed: table.bytes(),
                budget,
                missing: table.bytes().saturating_sub(budget).max(bytes),
                remedy: "raise memory.store or add a path to it".to_string(),
            });
        };
        places.push(Place {
            path: path as u16,
            offset: used[path],
        });
        used[path] += bytes;
    }
    Ok((places, used))
}

/// The file of one path: leftovers removed, without a name once open, reserved.
fn make_file(directory: &Path, bytes: u64, direct: bool) -> Result<File> {
    let path = directory.join(FILE_NAME);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(Error::io("remove a leftover", &path, error));
        }
        _ => {}
    }
    let file =
        directory::open_file(&path, direct, true).map_err(|e| Error::io("create", &path, e))?;
    std::fs::remove_file(&path).map_err(|e| Error::io("unlink", &path, e))?;
    if bytes > 0 {
        directory::reserve(
            &file,
            &path,
            bytes,
            "store",
            "free space or lower memory.store",
        )?;
    }
    Ok(file)
}

/// On the store's thread: latches, answers, or lets a coder answer.
fn settle(mut done: Done<Tag>, path: &Path, shared: &Shared, jobs: &Jobs<Job>) {
    let outcome = std::mem::replace(&mut done.result, Ok(()));
    let result = match (judge(&done, outcome, path, shared), shared.failure.get()) {
        // After a failed write its extent's next read would find what was there before.
        (Ok(()), Some(first)) => {
            let first = first.to_string();
            Err(Error::StoreFailed { first })
        }
        (result, _) => result,
    };
    if let Err(error) = &result {
        shared.failed(error);
    }
    let Tag {
        key, reply, form, ..
    } = done.tag;
    let completion = Completion {
        kind: done.direction,
        key,
        slab: done.slab,
        result,
    };
    let coded = done.direction == Direction::Read && form.stored < form.payload;
    if coded && completion.result.is_ok() {
        // Without coders the store is being dropped, and nobody waits.
        let job = Job::Decode {
            completion,
            form,
            reply,
        };
        jobs.send(Some(job)).ok();
        return;
    }
    // Whoever dropped the receiver wants no answer; the slab goes back to its ring.
    reply.send(completion).ok();
}

/// Counts what moved, and keeps its checksum or compares it.
fn judge(done: &Done<Tag>, outcome: io::Result<()>, path: &Path, shared: &Shared) -> Result<()> {
    let (index, key, form) = (done.tag.index, done.tag.key, done.tag.form);
    let failed = |source| Error::TileIo {
        action: done.direction.verb(),
        path: path.to_path_buf(),
        tile: key.place(),
        extent: key.extent,
        offset: done.offset,
        needed: done.bytes as u64,
        free: sys::free_bytes(path),
        source,
    };
    outcome.map_err(failed)?;
    let hop = match done.direction {
        Direction::Read => Hop::Read,
        Direction::Write => Hop::Write,
    };
    if let Some(stats) = shared.stats.get() {
        stats.crossed(hop, form.stored as u64);
    }
    let entry = &mut shared.entries()[index];
    if done.direction == Direction::Write {
        *entry = Entry {
            generation: entry.generation + 1,
            checksum: done.checksum,
            stored: form.stored,
            coding: false,
        };
        return Ok(());
    }
    if entry.generation == 0 {
        let never = "the extent was never written";
        return Err(failed(io::Error::new(io::ErrorKind::NotFound, never)));
    }
    if entry.checksum != done.checksum && !mutant::is(Mutant::ChecksumUnchecked) {
        return Err(Error::ExtentChecksum {
            path: path.to_path_buf(),
            tile: key.place(),
            extent: key.extent,
            offset: done.offset,
            expected: entry.checksum,
            got: done.checksum,
        });
    }
    Ok(())
}

/// Latches the store where its thread panics: the job at hand is answered by nobody.
struct Watched<'a>(&'a Shared);

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.failed(&ended());
        }
    }
}

/// On a coder's thread.
fn work_on(job: Job, coder: &mut MomentCoder, disks: &[Handle<Tag>], shared: &Shared) {
    let _watched = Watched(shared);
    match job {
        Job::Encode { mut order, path } => {
            let form = &mut order.tag.form;
            let slab = order.slab.as_mut_slice::<u8>();
            if let Some(stored) = coder.encode(slab, form.payload, form.element_bytes) {
                form.stored = stored;
                order.payload = stored;
                order.bytes = stored.next_multiple_of(PAGE_BYTES as usize);
            }
            if disks[usize::from(path)].submit(order).is_err() {
                shared.failed(&ended());
            }
        }
        Job::Decode {
            mut completion,
            form,
            reply,
        } => {
            let slab = completion.slab.as_mut_slice::<u8>();
            let decoded = coder.decode(slab, form.stored, form.payload, form.element_bytes);
            if let Err(source) = decoded {
                let error = Error::io("decode", completion.key.place().as_ref(), source);
                shared.failed(&error);
                completion.result = Err(error);
            }
            // Whoever dropped the receiver wants no answer; the slab goes back to its ring.
            reply.send(completion).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tile::{Section, TileId};

    #[test]
    fn extents_are_spread_in_proportion_and_never_overlap() {
        let sections: Vec<StoredSection> = (0..50)
            .map(|layer| StoredSection {
                tile: TileId { layer, part: 0 },
                section: Section::Moment1,
                elements: 3 << 20,
                element_bytes: 4,
            })
            .collect();
        let table = ExtentTable::new(&sections);
        let stripe = |bytes, rate| Stripe {
            path: PathBuf::from("a path"),
            bytes,
            rate,
        };
        let by_rate = |first: Option<f64>, second, bytes| {
            let paths = [stripe(1 << 30, first), stripe(bytes, second)];
            place(&table, &paths).unwrap().1
        };
        assert_eq!(
            by_rate(Some(1e9), Some(3e9), 1 << 30),
            [148 << 20, 452 << 20]
        );
        assert_eq!(
            by_rate(Some(1e9), Some(3e9), 200 << 20),
            [400 << 20, 200 << 20]
        );
        assert_eq!(by_rate(Some(1e9), None, 1 << 30), [300 << 20, 300 << 20]);
        let paths = [stripe(500 << 20, None), stripe(250 << 20, None)];
        let (places, used) = place(&table, &paths).unwrap();
        assert_eq!(used.iter().sum::<u64>(), table.bytes());
        assert_eq!(used, [400 << 20, 200 << 20]);
        let mut next = [0u64; 2];
        for (index, at) in places.iter().enumerate() {
            assert_eq!(at.offset, next[usize::from(at.path)]);
            next[usize::from(at.path)] += table.slot_bytes(index) as u64;
        }
        let refusal = place(&table, &[stripe(500 << 20, Some(1e9))])
            .err()
            .expect("100 MiB are missing");
        assert_eq!(refusal.exit_code(), 2);
        assert!(
            refusal.to_string().contains(&(100u64 << 20).to_string()),
            "{refusal}"
        );
    }
}
