//! Goal: whatever is written, whatever fails and whenever it ends, both classes of the store give
//! back what was written or say why not; no acknowledged commit is lost.
//! Method: random workloads on the simulated disk, held to a model; a seed is a workload and
//! replays identically. `TERRACE_SEEDS=100000 cargo test --test store_model` runs more of them.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

#[path = "support/commits.rs"]
mod commits;
#[path = "support/model.rs"]
mod model;
#[path = "support/seeds.rs"]
mod seeds;

use std::collections::BTreeMap;

use crossbeam_channel::unbounded;
use terrace::Error;
use terrace::host::Ring;
use terrace::store::disk::Direction;
use terrace::store::sim::{Faults, SimDisk, mix};
use terrace::store::{Completion, ExtentKey, Request, Scratch, StoredSection};
use terrace::tile::Section;

const SEEDS: u64 = 2000;

#[test]
fn checkpoints_keep_what_was_committed() {
    seeds::run(SEEDS, "--test store_model checkpoints", |seed| {
        model::run(seed, &model::plain).map(|_| ())
    });
}

/// A failing seed can be looked at: it does the same again, but for the few in which a thread that
/// is late changes how many operations follow a failure. And the workloads reach what they are
/// about.
#[test]
fn a_seed_replays_identically() {
    let mut seen = BTreeMap::new();
    let mut otherwise = Vec::new();
    for seed in 0..60 {
        let first = model::run(seed, &model::plain).unwrap();
        if first != model::run(seed, &model::plain).unwrap() {
            otherwise.push(seed);
        }
        for line in first {
            let word = line.split([' ', '(']).next().unwrap().to_string();
            *seen.entry(word).or_insert(0) += 1;
        }
    }
    println!("{seen:?}; otherwise: {otherwise:?}");
    assert!(otherwise.len() <= 3, "{otherwise:?} went otherwise");
    let ends = [
        "Exit",
        "PowerCut",
        "PowerCutAt",
        "KillAt",
        "FaultsThenExit",
        "FaultsThenPowerCut",
    ];
    for what in ends
        .iter()
        .chain(&["abandoned", "committed", "damage", "holds"])
    {
        assert!(seen.contains_key(*what), "no {what}: {seen:?}");
    }
}

fn sections(large: bool) -> Vec<StoredSection> {
    let mut sections: Vec<StoredSection> = (0..6)
        .map(|layer| commits::section(layer, Section::Moment1, 1 + 1700 * u64::from(layer), 4))
        .collect();
    if large {
        sections.push(commits::section(6, Section::Residual, (1 << 20) + 5, 1));
    }
    sections
}

/// The scratch store and what was last written to each of its extents.
struct ScratchRun {
    store: Scratch,
    ring: Ring,
    written: BTreeMap<ExtentKey, u64>,
    /// Outstanding, in the order given: the extent, and for a read what it must find.
    asked: BTreeMap<ExtentKey, Vec<Option<u64>>>,
    reply: crossbeam_channel::Sender<Completion>,
    completions: crossbeam_channel::Receiver<Completion>,
}

impl ScratchRun {
    fn ask(&mut self, kind: Direction, key: ExtentKey, writer: u64) -> terrace::Result<()> {
        let mut slab = self.ring.take();
        let bytes = self.store.payload_bytes(key);
        slab.as_mut_slice::<u8>().fill(0xee);
        let expected = match kind {
            Direction::Read => self.written.get(&key).copied(),
            Direction::Write => {
                let payload = commits::payload(writer, key, bytes);
                slab.as_mut_slice::<u8>()[..bytes].copy_from_slice(&payload);
                self.written.insert(key, writer);
                None
            }
        };
        let reply = self.reply.clone();
        self.store.submit(Request {
            kind,
            key,
            bytes,
            slab,
            reply,
        })?;
        self.asked.entry(key).or_default().push(expected);
        Ok(())
    }

    /// Takes one completion. `Ok(false)`: the store refused, as it may where the disk fails.
    fn settle(&mut self) -> Result<bool, String> {
        let done = self.completions.recv().map_err(|e| e.to_string())?;
        let expected = self.asked.get_mut(&done.key).unwrap().remove(0);
        match (done.result, done.kind, expected) {
            (Ok(()), Direction::Write, _) => Ok(true),
            (Ok(()), Direction::Read, Some(writer)) => {
                let bytes = self.store.payload_bytes(done.key);
                match commits::holds(done.slab.as_slice(), writer, done.key, bytes) {
                    true => Ok(true),
                    false => Err(format!("{}: wrong bytes", done.key)),
                }
            }
            (Ok(()), Direction::Read, None) => Err(format!("{} was never written", done.key)),
            (
                Err(
                    Error::TileIo { .. } | Error::ExtentChecksum { .. } | Error::StoreFailed { .. },
                ),
                _,
                _,
            ) => Ok(false),
            (Err(other), _, _) => Err(other.to_string()),
        }
    }
}

fn scratch(seed: u64) -> Result<(), String> {
    let mut random = mix(seed ^ 0x5c4a);
    let mut draw = |below: u64| {
        random = mix(random);
        random % below
    };
    let mut rate = |of_1000: u64| (of_1000 * draw(2)) as u32;
    let faults = Faults {
        io_error: rate(5),
        again: rate(100),
        short: rate(300),
        bit_flip: rate(10),
        misdirected: rate(10),
        stale: rate(10),
        lost: rate(10),
        seed,
        ..Faults::default()
    };
    let sections = sections(seed.is_multiple_of(16));
    let bytes = sections.iter().map(StoredSection::slot_bytes).sum();
    let disk = SimDisk::new(bytes, faults);
    let store = Scratch::on_disk(Box::new(disk), bytes, &sections).map_err(|e| e.to_string())?;
    let (reply, completions) = unbounded();
    let mut run = ScratchRun {
        store,
        ring: commits::ring(if seed.is_multiple_of(16) {
            1 << 20
        } else {
            1 << 16
        }),
        written: BTreeMap::new(),
        asked: BTreeMap::new(),
        reply,
        completions,
    };
    let keys: Vec<ExtentKey> = sections.iter().flat_map(StoredSection::keys).collect();
    let (mut outstanding, mut failed) = (0, false);
    for writer in 1..=40 {
        let key = keys[draw(keys.len() as u64) as usize];
        // Never-written extents are read in a test of their own: the read ends the store.
        let kind = match run.written.contains_key(&key) && draw(2) == 0 {
            true => Direction::Read,
            false => Direction::Write,
        };
        while outstanding > draw(4) {
            outstanding -= 1;
            failed |= !run.settle()?;
        }
        match run.ask(kind, key, writer) {
            Ok(()) if failed => return Err("it went on after a failure".to_string()),
            Ok(()) => outstanding += 1,
            Err(Error::StoreFailed { .. }) => break,
            Err(other) => return Err(other.to_string()),
        }
    }
    for _ in 0..outstanding {
        failed |= !run.settle()?;
    }
    if failed && run.ask(Direction::Write, keys[0], 99).is_ok() {
        return Err("it went on after a failure".to_string());
    }
    Ok(())
}

#[test]
fn scratch_extents_are_what_was_last_written_to_them() {
    seeds::run(SEEDS, "--test store_model scratch", scratch);
}
