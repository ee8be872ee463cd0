//! The scratch class: extents that the running step spilled.
//!
//! - One file a path, unlinked as soon as it is open: nothing outlives the process.
//! - Space is reserved at the start; nothing grows later.
//! - Extents are spread over the paths in proportion to their rates, or budgets.
//! - Each write raises the extent's generation and keeps its checksum in memory; each read is
//!   checked against it before anyone sees the bytes.
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
use super::engine::{Counters, Done, Engine, Order};
use super::mutant::{self, Mutant};
use super::{ExtentKey, ExtentTable, Say, StoredSection, directory, sys};
use crate::config::IoEngine;
use crate::error::{Error, Result};
use crate::host::{Lease, Span};

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
}

type Entries = Arc<Mutex<Vec<Entry>>>;
type Failure = Arc<OnceLock<Error>>;

/// The scratch store.
pub struct Scratch {
    table: ExtentTable,
    places: Vec<Place>,
    entries: Entries,
    failure: Failure,
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
        let entries: Entries = Arc::new(Mutex::new(vec![Entry::default(); table.count()]));
        let failure = Failure::default();
        let mut engines = Vec::with_capacity(disks.len());
        for (path, disk) in disks {
            let (entries, failure) = (entries.clone(), failure.clone());
            let at = path.clone();
            let engine = Engine::spawn(&path, disk, move |done| {
                settle(done, &at, &entries, &failure)
            })
            .map_err(|e| Error::io("start a thread for", &path, e))?;
            engines.push(engine);
        }
        Ok(Scratch {
            table,
            places,
            entries,
            failure,
            engines,
            sentences,
            _locks: locks,
        })
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
        locked(&self.entries)[self.index(key)].generation
    }

    /// Hands a request over; waits while the queue of its path is full. Requests for one extent
    /// take effect in the order given.
    ///
    /// # Errors
    /// [`Error::StoreFailed`] after the first failure; the slab goes back to its ring.
    ///
    /// # Panics
    /// If the store has no such extent, or `bytes` or the slab do not fit it.
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
        if let Some(first) = self.failure.get() {
            let first = first.to_string();
            return Err(Error::StoreFailed { first });
        }
        let place = self.places[index];
        let order = Order {
            direction: request.kind,
            offset: place.offset,
            payload,
            bytes,
            slab: request.slab,
            key: Some(request.key),
            tag: Tag {
                index,
                key: request.key,
                reply: request.reply,
            },
        };
        self.engines[usize::from(place.path)]
            .submit(order)
            .map_err(|_| Error::StoreFailed {
                first: "the store's thread has ended".to_string(),
            })
    }

    /// The first failure, whoever's request met it.
    pub fn failure(&self) -> Option<Error> {
        self.failure.get().map(Error::again)
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

fn locked(entries: &Entries) -> MutexGuard<'_, Vec<Entry>> {
    entries.lock().unwrap_or_else(PoisonError::into_inner)
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

/// On the store's thread: keeps or compares the checksum, latches, answers.
fn settle(done: Done<Tag>, path: &Path, entries: &Entries, failure: &Failure) {
    let Tag { index, key, reply } = done.tag;
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
    let result = match (done.result, done.direction) {
        (Err(source), _) => Err(failed(source)),
        (Ok(()), Direction::Write) => {
            let entry = &mut locked(entries)[index];
            entry.generation += 1;
            entry.checksum = done.checksum;
            Ok(())
        }
        (Ok(()), Direction::Read) => {
            let entry = locked(entries)[index];
            if entry.generation == 0 {
                Err(failed(io::Error::new(
                    io::ErrorKind::NotFound,
                    "the extent was never written",
                )))
            } else if entry.checksum != done.checksum && !mutant::is(Mutant::ChecksumUnchecked) {
                Err(Error::ExtentChecksum {
                    path: path.to_path_buf(),
                    tile: key.place(),
                    extent: key.extent,
                    offset: done.offset,
                    expected: entry.checksum,
                    got: done.checksum,
                })
            } else {
                Ok(())
            }
        }
    };
    let result = match (result, failure.get()) {
        // After a failed write its extent's next read would find what was there before.
        (Ok(()), Some(first)) => {
            let first = first.to_string();
            Err(Error::StoreFailed { first })
        }
        (result, _) => result,
    };
    if let Err(error) = &result {
        failure.get_or_init(|| error.again());
    }
    let completion = Completion {
        kind: done.direction,
        key,
        slab: done.slab,
        result,
    };
    // Whoever dropped the receiver wants no answer; the slab goes back to its ring.
    reply.send(completion).ok();
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
