//! Random workloads of a checkpoint store on the simulated disk, held to a model of what it must
//! keep. A seed is a workload: its sessions, what each writes, what fails and how it ends.
//!
//! What must hold: a commit that was acknowledged comes back, with `keep` of them in all, whole and
//! bit-exact; one that was under way comes back whole or not at all; nothing else ever does. On a
//! disk that lies (loses or misdirects writes, flips bits) commits may be lost, but every byte that
//! is read is right or refused.
#![allow(dead_code, reason = "each test file uses a part")]

use std::collections::{BTreeMap, BTreeSet};

use terrace::host::Ring;
use terrace::store::disk::Disk;
use terrace::store::format::{self, Geometry};
use terrace::store::sim::{Faults, SimDisk, mix};
use terrace::store::{CheckpointStore, Spec};
use terrace::{Error, Result};

use super::commits;

/// What a check found to be wrong.
pub(crate) type Wrong = String;
/// Puts something between the store and the simulated disk.
pub(crate) type Wrap<'a> = &'a (dyn Fn(SimDisk, Geometry) -> Box<dyn Disk> + Sync);

/// The disk as it is.
pub(crate) fn plain(disk: SimDisk, _: Geometry) -> Box<dyn Disk> {
    Box::new(disk)
}

/// A commit: its generation and who wrote it. Each attempt writes other bytes.
type Commit = (u64, u64);

/// How a session ends, and what fails before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The process ends by itself.
    Exit,
    /// Power fails between operations.
    PowerCut,
    /// Power fails at an operation.
    PowerCutAt(u64),
    /// The process is killed at an operation; the machine goes on.
    KillAt(u64),
    /// Operations and flushes fail; then the process ends.
    FaultsThenExit,
    /// The same, then power fails.
    FaultsThenPowerCut,
}

struct Run<'a> {
    wrap: Wrap<'a>,
    spec: Spec,
    geometry: Geometry,
    ring: Ring,
    disk: SimDisk,
    random: u64,
    /// What the store held since the last commit that was acknowledged, that first: what was seen
    /// need not be durable, and power failing takes it back to one of them.
    seen: Vec<Vec<Commit>>,
    /// What the store held when it was last looked at.
    visible: Vec<Commit>,
    /// The commit that failed since, if one did: it may have come about.
    under_way: Option<Commit>,
    /// By generation: everything that ever wrote it.
    writers: BTreeMap<u64, BTreeSet<u64>>,
    next_writer: u64,
    /// All superblock copies are those of the last commit.
    settled: bool,
    /// Generations of which a manifest copy was damaged.
    halved: BTreeSet<u64>,
    /// Power failed since the store was last looked at: what is there now is all there is.
    cut: bool,
    /// The disk lies: loss is allowed, wrong bytes are not.
    lying: bool,
    log: Vec<String>,
}

/// Runs the workload of `seed` and returns what happened, a line an event.
///
/// # Errors
/// What is wrong.
pub(crate) fn run(seed: u64, wrap: Wrap<'_>) -> std::result::Result<Vec<String>, Wrong> {
    let mut spec = commits::spec();
    spec.keep = 1 + mix(seed) % 3;
    let bytes = spec.file_bytes().expect("a small layout");
    let disk = SimDisk::new(bytes, Faults::default());
    let store = CheckpointStore::format_disk(Box::new(disk.clone()), &spec, u128::from(seed) + 1);
    let geometry = store.map_err(|e| e.to_string())?.superblock().geometry;
    let mut run = Run {
        wrap,
        spec,
        geometry,
        ring: commits::ring(1 << 16),
        disk: disk.after_exit(Faults::default()),
        random: mix(seed ^ 0x5eed),
        seen: vec![Vec::new()],
        visible: Vec::new(),
        under_way: None,
        writers: BTreeMap::new(),
        next_writer: 1,
        settled: true,
        halved: BTreeSet::new(),
        cut: false,
        lying: seed % 4 == 3,
        log: Vec::new(),
    };
    for session in 0..4 + run.draw(4) {
        let went_on = run.session();
        match went_on.map_err(|wrong| format!("session {session}: {wrong}; {:#?}", run.log))? {
            true => {}
            false => break,
        }
    }
    Ok(run.log)
}

impl Run<'_> {
    fn draw(&mut self, below: u64) -> u64 {
        self.random = mix(self.random);
        self.random % below
    }

    fn open(&self) -> Result<CheckpointStore> {
        let disk = (self.wrap)(self.disk.clone(), self.geometry);
        CheckpointStore::open_disk(disk, self.disk.bytes(), Some(&self.spec))
    }

    /// One process: opens, commits, ends. `false`: a lying disk left nothing to go on with.
    fn session(&mut self) -> std::result::Result<bool, Wrong> {
        self.read_with_faults()?;
        let transient = Faults {
            seed: self.draw(u64::MAX),
            again: 100 * self.draw(2) as u32,
            short: 300 * self.draw(2) as u32,
            ..Faults::default()
        };
        self.disk.set_faults(transient);
        let Some(mut store) = self.look()? else {
            return Ok(false);
        };
        self.disk.count_anew();
        let end = match self.draw(8) {
            0 => End::Exit,
            1 => End::PowerCut,
            2 | 3 => End::PowerCutAt(self.soon()),
            4 | 5 => End::KillAt(self.soon()),
            6 => End::FaultsThenExit,
            _ => End::FaultsThenPowerCut,
        };
        self.log.push(format!("{end:?}"));
        let mut faults = self.faults_of(end, transient);
        if self.lying {
            faults.lost = 30 * self.draw(2) as u32;
            faults.misdirected = 30 * self.draw(2) as u32;
        }
        self.disk.set_faults(faults);
        for _ in 0..1 + self.draw(4) {
            if !self.work(&mut store, end)? {
                break;
            }
        }
        drop(store);
        self.end(end);
        if self.lying && self.draw(2) == 0 {
            let byte = self.draw(self.disk.bytes());
            self.disk.flip(byte, 3);
        } else {
            self.damage();
        }
        Ok(true)
    }

    /// Number of an operation of the next commits, as often as not of the first.
    fn soon(&mut self) -> u64 {
        let within = [12, 45][self.draw(2) as usize];
        self.disk.operation_count() + 1 + self.draw(within)
    }

    fn faults_of(&mut self, end: End, mut faults: Faults) -> Faults {
        match end {
            End::Exit | End::PowerCut => {}
            End::PowerCutAt(at) => faults.crash_at = Some(at),
            End::KillAt(at) => faults.io_error_from = Some(at),
            End::FaultsThenExit | End::FaultsThenPowerCut => {
                faults.io_error = 40 * self.draw(2) as u32;
                faults.flush_error = 150;
            }
        }
        faults
    }

    fn end(&mut self, end: End) {
        self.disk = match end {
            End::PowerCut | End::PowerCutAt(_) | End::FaultsThenPowerCut => {
                let seed = self.draw(u64::MAX);
                self.cut = true;
                self.disk.after_crash(seed, Faults::default())
            }
            _ => self.disk.clone(),
        };
        self.disk.set_faults(Faults::default());
    }

    /// Opens and verifies. `None`: a lying disk left a store that is refused.
    fn look(&mut self) -> std::result::Result<Option<CheckpointStore>, Wrong> {
        let store = match self.open() {
            Ok(store) => store,
            Err(error) if self.lying && is_refusal(&error) => {
                self.log.push(commits::kind(&error).to_string());
                return Ok(None);
            }
            Err(error) => return Err(format!("not opened: {error}")),
        };
        let found = store.generations();
        self.log.push(format!("holds {found:?}"));
        if self.lying {
            self.verify_loosely(&store)?;
            self.visible = found.iter().map(|g| (*g, 0)).collect();
            return Ok(Some(store));
        }
        let mut allowed = vec![self.visible.clone()];
        allowed.extend(self.under_way.map(|commit| self.after(commit)));
        if self.cut {
            allowed.extend(self.seen.iter().cloned());
        }
        let list = |state: &Vec<Commit>| state.iter().map(|c| c.0).collect::<Vec<u64>>();
        let state = allowed.iter().find(|state| list(state) == found);
        let Some(state) = state.cloned() else {
            return Err(format!("holds {found:?}, allowed {allowed:?}"));
        };
        if let [sentence, ..] = store.sentences() {
            return Err(format!("says {sentence}"));
        }
        self.verify(&store, &state)?;
        match std::mem::take(&mut self.cut) {
            true => self.seen = vec![state.clone()],
            false => self.seen.push(state.clone()),
        }
        self.visible = state;
        self.under_way = None;
        self.halved.retain(|generation| found.contains(generation));
        Ok(Some(store))
    }

    /// The state after one more commit.
    fn after(&self, commit: Commit) -> Vec<Commit> {
        let mut state = self.visible.clone();
        state.push(commit);
        let excess = state.len().saturating_sub(self.spec.keep as usize);
        state.split_off(excess)
    }

    fn verify(&self, store: &CheckpointStore, state: &[Commit]) -> std::result::Result<(), Wrong> {
        let table = store.table().expect("opened with a spec");
        for (generation, writer) in state {
            let said = |e: Error| format!("generation {generation}: {e}");
            let metadata = store.metadata(*generation).map_err(said)?;
            if metadata != self.metadata(*writer) {
                return Err(format!("generation {generation}: other metadata"));
            }
            let mut wrong = None;
            let keys = (0..table.count()).map(|index| table.key(index));
            let read = store.read_all(*generation, keys, &self.ring, |key, slab| {
                let bytes = table.payload_bytes(table.index(key).expect("of the table"));
                if !commits::holds(slab.as_slice(), *writer, key, bytes) {
                    wrong = Some(format!("generation {generation} {key}: wrong bytes"));
                }
                Ok(())
            });
            read.map_err(said)?;
            wrong.map_or(Ok(()), Err)?;
        }
        Ok(())
    }

    /// Every extent that is not refused is one that was written.
    fn verify_loosely(&self, store: &CheckpointStore) -> std::result::Result<(), Wrong> {
        let table = store.table().expect("opened with a spec");
        for generation in store.generations() {
            let Some(writers) = self.writers.get(&generation) else {
                return Err(format!("generation {generation} was never written"));
            };
            let mut possible = writers.clone();
            for index in 0..table.count() {
                let key = table.key(index);
                match store.read(generation, key, self.ring.take()) {
                    Ok(slab) => {
                        let bytes = table.payload_bytes(index);
                        possible.retain(|w| commits::holds(slab.as_slice(), *w, key, bytes));
                        if possible.is_empty() {
                            return Err(format!("generation {generation} {key}: wrong bytes"));
                        }
                    }
                    Err(error) if is_refusal(&error) => {}
                    Err(error) => return Err(error.to_string()),
                }
            }
        }
        Ok(())
    }

    /// Opens and reads with faults on the way: right or refused; the disk is as before.
    fn read_with_faults(&mut self) -> std::result::Result<(), Wrong> {
        if self.draw(4) != 0 {
            return Ok(());
        }
        let faults = Faults {
            seed: self.draw(u64::MAX),
            io_error: 30 * self.draw(2) as u32,
            bit_flip: 60 * self.draw(2) as u32,
            misdirected: 60 * self.draw(2) as u32,
            stale: 60 * self.draw(2) as u32,
            ..Faults::default()
        };
        self.disk.set_faults(faults);
        let outcome = match self.open() {
            Ok(store) => self.verify_loosely(&store),
            Err(error) if is_refusal(&error) => Ok(()),
            Err(error) => Err(error.to_string()),
        };
        self.disk.set_faults(Faults::default());
        outcome.map_err(|wrong| format!("reading with {faults:?}: {wrong}"))
    }

    fn metadata(&self, writer: u64) -> Vec<u8> {
        let mut metadata = commits::metadata(writer);
        // Now and then a manifest of several pages, or of more than a slab.
        let spaces = [0, 0, 0, 9000, 70_000][(mix(writer) % 5) as usize];
        metadata.resize(metadata.len() + spaces, b' ');
        metadata
    }

    /// A commit, whole or abandoned. `false`: it failed, and the store with it.
    fn work(&mut self, store: &mut CheckpointStore, end: End) -> std::result::Result<bool, Wrong> {
        let generation = store.next_generation() + self.draw(3);
        let writer = self.next_writer;
        self.next_writer += 1;
        self.writers.entry(generation).or_default().insert(writer);
        let abandoned = self.draw(8) == 0;
        let settled = std::mem::replace(&mut self.settled, false);
        let first_event = self.disk.events().len();
        let outcome = self.commit(store, (generation, writer), abandoned);
        let ended = outcome.is_ok() && !abandoned;
        if !self.lying {
            let events = &self.disk.events()[first_event..];
            commits::check_order(&self.geometry, events, ended)?;
        }
        match outcome {
            Ok(()) if abandoned => {
                self.log.push(format!("abandoned {generation}"));
                self.settled = settled;
                Ok(true)
            }
            Ok(()) => {
                self.log.push(format!("committed {generation}"));
                self.visible = self.after((generation, writer));
                self.seen = vec![self.visible.clone()];
                self.settled = true;
                Ok(true)
            }
            Err(error) if matches!(end, End::Exit | End::PowerCut) => {
                Err(format!("commit {generation} failed for nothing: {error}"))
            }
            Err(error) => {
                self.log
                    .push(format!("{generation}: {}", commits::kind(&error)));
                self.under_way = Some((generation, writer));
                let readable = matches!(end, End::FaultsThenExit | End::FaultsThenPowerCut);
                self.check_poisoned(store, &error, readable && !self.lying)?;
                Ok(false)
            }
        }
    }

    fn commit(
        &mut self,
        store: &mut CheckpointStore,
        (generation, writer): Commit,
        abandoned: bool,
    ) -> Result<()> {
        let metadata = self.metadata(writer);
        let table = store.table().expect("opened with a spec").clone();
        let (first, until) = (
            self.draw(table.count() as u64),
            self.draw(table.count() as u64),
        );
        let mut commit = store.begin_commit(generation)?;
        for index in 0..table.count() {
            if abandoned && index as u64 == until {
                return Ok(());
            }
            // In any order.
            let key = table.key((index + first as usize) % table.count());
            let index = table.index(key).expect("of the table");
            let bytes = commits::payload(writer, key, table.payload_bytes(index));
            commit.write(key, &bytes)?;
        }
        match abandoned {
            true => Ok(()),
            false => commit.finish(&metadata),
        }
    }

    /// A store that failed refuses to write, and still reads where the disk does.
    fn check_poisoned(
        &mut self,
        store: &mut CheckpointStore,
        error: &Error,
        readable: bool,
    ) -> std::result::Result<(), Wrong> {
        let generation = store.next_generation();
        match store.begin_commit(generation) {
            Err(Error::StoreFailed { .. }) => {}
            Err(other) => return Err(format!("after {error}: {other}")),
            Ok(_) => return Err(format!("went on after {error}")),
        }
        if readable {
            let faults = self.disk.faults();
            self.disk.set_faults(Faults::default());
            self.verify(store, &self.visible)?;
            self.disk.set_faults(faults);
        }
        Ok(())
    }

    /// Damage that must be survived: two superblock copies, one manifest copy of each commit.
    fn damage(&mut self) {
        if !self.settled || self.lying || self.draw(2) == 0 {
            return;
        }
        self.settled = false;
        for _ in 0..2 {
            let copy = self.draw(4) as usize;
            self.spoil(format::superblock_offset(copy), 4096);
        }
        for region in 0..self.geometry.region_count as usize {
            let copy = self.draw(2);
            let offset = self.geometry.manifest_offset(region, copy);
            let head = self.disk.peek(offset, 4096);
            let at = format::manifest::GENERATION.start;
            let bytes: [u8; 8] = head[at..at + 8].try_into().expect("eight bytes");
            let generation = u64::from_le_bytes(bytes);
            let held = self.visible.iter().any(|commit| commit.0 == generation);
            if held && self.halved.insert(generation) {
                self.spoil(offset, 300);
            }
        }
        self.log.push("damage".to_string());
    }

    fn spoil(&mut self, offset: u64, bytes: u64) {
        let at = offset + self.draw(bytes);
        match self.draw(4) {
            0 => self.disk.flip(at, 2),
            1 => self.disk.erase(offset, 512),
            // What was there before, whole: a write that never happened.
            2 => self.disk.revert(offset, 4096),
            _ => {
                let noise: Vec<u8> = (0..64).map(|i| mix(self.random ^ i) as u8).collect();
                self.disk.overwrite(offset, &noise);
            }
        }
    }
}

/// Errors by which a store says that what was read is not what was written.
fn is_refusal(error: &Error) -> bool {
    matches!(
        commits::kind(error),
        "damaged" | "io" | "checksum" | "tile" | "unsupported"
    )
}
