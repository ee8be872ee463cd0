//! Goal: a commit is the state after its step, whatever the next step does meanwhile, and the next
//! step is what it would be without it (invariants 1 and 2).
//! Method: a tiny model is trained through the engine, with a commit after every step on a thread
//! of its own, onto a simulated disk. Each commit is compared, extent by extent, with the state of
//! a run that stood still to be looked at. A slow disk makes updates wait; a run that does not hold
//! its tiles shows that they have to; a write that fails leaves the commit before.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

#[path = "support/tiny.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::time::Duration;

use terrace::checkpoint::commit_state;
use terrace::error::{Error, Result};
use terrace::hf::WeightSource;
use terrace::host::HostArena;
use terrace::plan::{Budgets, Choice, Plan, Purpose};
use terrace::stats::Wait;
use terrace::step::{Engine, Held, StepSettings};
use terrace::store::disk::{Disk, Finished, Operation, Waker};
use terrace::store::sim::{Faults, SimDisk};
use terrace::store::{CheckpointStore, ExtentKey, Spec, StoredSection, checksum};
use terrace::tile::{EXTENT_BYTES_MAX, Precision};
use terrace::train::{Budget, build_engine};

const SEQ_LEN: u64 = 32;
const VOCAB: u64 = 300;
const STEPS: u64 = 4;

/// How a run is trained; `spilled` changes no byte.
#[derive(Clone, Copy, Debug)]
struct Way {
    max_grad_norm: f64,
    spilled: bool,
    learning_rate: f64,
    /// Where something is spilled.
    states_on_device: bool,
}

const CLIPPED: Way = Way {
    max_grad_norm: 0.5,
    spilled: false,
    learning_rate: 1e-2,
    states_on_device: false,
};
const UNCLIPPED: Way = Way {
    max_grad_norm: 0.0,
    ..CLIPPED
};

/// Each extent with the checksum of its bytes.
type State = Vec<(String, u128)>;

fn start(way: Way, directory: &Path) -> Engine {
    let spec = support::spec(3, 64, VOCAB, false);
    let mut config = support::config(SEQ_LEN, 2);
    config.train.max_grad_norm = way.max_grad_norm;
    config.memory.slabs = 4;
    let make = |host, states_on_device| {
        let budgets = Budgets {
            device: 1 << 30,
            host,
            store: 1 << 30,
        };
        let profile = support::profile(Precision::Bf16);
        let choice = Choice {
            states_on_device,
            ..Choice::default()
        };
        let purpose = Purpose::Train;
        let plan = Plan::choosing(&spec, &config, &profile, budgets, purpose, choice).unwrap();
        (plan, budgets)
    };
    let (roomy, budgets) = make(1 << 30, false);
    let (plan, budgets) = match way.spilled {
        true => make(roomy.host.bytes - roomy.host.homes, way.states_on_device),
        false => (roomy, budgets),
    };
    assert_eq!(plan.spills(), way.spilled);
    assert_eq!(plan.states_on_device(), way.states_on_device);
    let store = match way.spilled {
        true => vec![(PathBuf::from(directory), budgets.store)],
        false => Vec::new(),
    };
    let budget = Budget {
        budgets,
        store,
        sentences: Vec::new(),
    };
    let engine = build_engine(&spec, &config, plan, &budget, false)
        .unwrap()
        .0;
    let weights = WeightSource::random(&spec, 11);
    let fill =
        |layer, elements, out: &mut [f32]| weights.fill(&spec.tile_layout(layer), elements, out);
    engine.tiers().initialise(fill).unwrap();
    engine
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// The bits of the loss.
fn step(engine: &mut Engine, way: Way, step: u64) -> Result<u64> {
    let settings = StepSettings {
        skipped: 0,
        step,
        learning_rate: way.learning_rate,
        betas: [0.9, 0.99],
        eps: 1e-8,
        weight_decay: 0.1,
        max_grad_norm: way.max_grad_norm,
        skip_above: None,
    };
    let micros = support::micros(step, 2, SEQ_LEN, VOCAB);
    Ok(engine.train_step(micros, settings)?.loss.to_bits())
}

/// Losses and states after each step of a run that stands still to be looked at.
fn watched(way: Way, steps: u64) -> (Vec<u64>, Vec<State>) {
    let directory = directory();
    let mut engine = start(way, directory.path());
    let (mut losses, mut states, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
    for number in 1..=steps {
        losses.push(step(&mut engine, way, number).unwrap());
        engine.drain().unwrap();
        let tiers = engine.tiers();
        let state = tiers.extents().map(|key| {
            tiers.read_extent_into(key, &mut bytes).unwrap();
            (key.to_string(), checksum(&bytes))
        });
        states.push(state.collect());
    }
    (losses, states)
}

fn spec_of(engine: &Engine) -> Spec {
    let tiers = engine.tiers();
    let of = |layout| {
        let stored = move |section| StoredSection::of(layout, section, tiers.precision());
        tiers.sections().map(stored)
    };
    Spec {
        model_hash: 7,
        keep: 2,
        sections: tiers.layouts().iter().flat_map(of).collect(),
        engine: None,
        memory: Vec::new(),
    }
}

/// What a generation holds, in the order of the engine's extents.
fn committed(store: &CheckpointStore, generation: u64, engine: &Engine) -> State {
    let mut cutter = HostArena::take(EXTENT_BYTES_MAX).unwrap();
    let ring = cutter.cut_ring(1, EXTENT_BYTES_MAX);
    let table = store.table().unwrap();
    let read = |key: ExtentKey| {
        let slab = store.read(generation, key, ring.take()).unwrap();
        let bytes = table.payload_bytes(table.index(key).unwrap());
        (key.to_string(), checksum(&slab.as_slice::<u8>()[..bytes]))
    };
    engine.tiers().extents().map(read).collect()
}

/// A disk whose every wait takes a while.
struct SlowDisk(SimDisk, Duration);

impl Disk for SlowDisk {
    fn depth(&self) -> usize {
        self.0.depth()
    }
    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }
    fn start(&mut self, operation: Operation) {
        self.0.start(operation);
    }
    fn wait(&mut self, finished: &mut Vec<Finished>) {
        std::thread::sleep(self.1);
        self.0.wait(finished);
    }
    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
    fn waker(&self) -> Waker {
        self.0.waker()
    }
}

/// A run with a commit of every step beside the next one.
struct Beside {
    losses: Vec<u64>,
    commits: Vec<State>,
    /// Seconds that updates waited for commits.
    waited: f64,
}

fn beside(way: Way, wait: Duration, hold: fn(&Engine) -> Held) -> Beside {
    let directory = directory();
    let mut engine = start(way, directory.path());
    let spec = spec_of(&engine);
    let disk = SimDisk::new(spec.file_bytes().unwrap(), Faults::default());
    let slow = Box::new(SlowDisk(disk, wait));
    let mut store = CheckpointStore::format_disk(slow, &spec, 1).unwrap();
    let mut run = Beside {
        losses: vec![step(&mut engine, way, 1).unwrap()],
        commits: Vec::new(),
        waited: 0.0,
    };
    for number in 2..=STEPS + 1 {
        let held = hold(&engine);
        let commit = std::thread::spawn(move || {
            let made = commit_state(&mut store, held, number - 1, b"state", || {});
            (store, made)
        });
        if number <= STEPS {
            run.losses.push(step(&mut engine, way, number).unwrap());
            // Its updates end only as the commit lets them.
            engine.drain().unwrap();
        }
        let made;
        (store, made) = commit.join().unwrap();
        made.unwrap();
        let newest = store.latest().unwrap();
        run.commits.push(committed(&store, newest, &engine));
    }
    run.waited = engine.tiers().stats.snapshot().waits[Wait::UpdateForCommit as usize];
    run
}

#[test]
fn a_commit_is_the_state_of_its_step_and_disturbs_nothing() {
    for way in [CLIPPED, UNCLIPPED] {
        let (losses, states) = watched(way, STEPS);
        for (spilled, states_on_device) in [(false, false), (true, false), (true, true)] {
            let way = Way {
                spilled,
                states_on_device,
                ..way
            };
            let run = beside(way, Duration::ZERO, Engine::hold);
            assert_eq!(run.losses, losses, "{way:?}");
            assert!(run.commits == states, "{way:?}");
        }
    }
}

#[test]
fn updates_wait_for_a_slow_disk_and_the_commit_is_still_that_of_its_step() {
    for way in [CLIPPED, UNCLIPPED] {
        let (losses, states) = watched(way, STEPS);
        for (spilled, states_on_device) in [(false, false), (true, false), (true, true)] {
            let way = Way {
                spilled,
                states_on_device,
                ..way
            };
            let run = beside(way, Duration::from_millis(10), Engine::hold);
            assert!(run.waited > 0.0, "{way:?}: {}", run.waited);
            assert_eq!(run.losses, losses, "{way:?}");
            assert!(run.commits == states, "{way:?}");
        }
    }
}

/// A test of the tests: what the ones above compare does depend on the wait.
#[test]
fn without_the_wait_a_commit_mixes_two_steps() {
    for way in [CLIPPED, UNCLIPPED] {
        let (losses, states) = watched(way, STEPS);
        let run = beside(way, Duration::from_millis(10), Engine::hold_loosely);
        assert_eq!(run.losses, losses, "a commit only reads");
        assert_eq!(run.waited, 0.0);
        let mixed = run
            .commits
            .iter()
            .zip(&states)
            .filter(|(got, of)| got != of);
        assert!(
            mixed.count() > 0,
            "{way:?}: no commit was reached by an update"
        );
    }
}

#[test]
fn a_write_that_fails_leaves_the_commit_before_and_lets_training_go_on() {
    let directory = directory();
    let way = CLIPPED;
    let (losses, states) = watched(way, 3);
    let mut engine = start(way, directory.path());
    let spec = spec_of(&engine);
    let bytes = spec.file_bytes().unwrap();
    let disk = SimDisk::new(bytes, Faults::default());
    let mut store = CheckpointStore::format_disk(Box::new(disk.clone()), &spec, 1).unwrap();
    let mut got = vec![step(&mut engine, way, 1).unwrap()];
    commit_state(&mut store, engine.hold(), 1, b"one", || {}).unwrap();
    disk.set_faults(Faults {
        io_error_at: Some(disk.operation_count() + 7),
        ..Faults::default()
    });
    got.push(step(&mut engine, way, 2).unwrap());
    let held = engine.hold();
    let commit = std::thread::spawn(move || {
        let made = commit_state(&mut store, held, 2, b"two", || {});
        let again = store.begin_commit(9).err();
        (made, again)
    });
    // The failed commit lets go of what it held.
    got.push(step(&mut engine, way, 3).unwrap());
    engine.drain().unwrap();
    let (made, again) = commit.join().unwrap();
    let error = made.unwrap_err();
    assert!(
        matches!(
            error,
            Error::TileIo {
                action: "write",
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(error.exit_code(), 4);
    let refused = again.expect("a store that failed takes no commit");
    assert!(
        refused.to_string().contains(&error.to_string()),
        "{refused}"
    );
    assert_eq!(got, losses);
    let after = Box::new(disk.after_crash(3, Faults::default()));
    let store = CheckpointStore::open_disk(after, bytes, Some(&spec)).unwrap();
    assert_eq!(store.generations(), [1]);
    assert!(committed(&store, 1, &engine) == states[0]);
}

#[test]
fn a_step_that_is_not_finite_does_not_end_the_commit_beside_it() {
    for max_grad_norm in [0.5, 0.0] {
        let way = Way {
            max_grad_norm,
            learning_rate: 1e30,
            ..CLIPPED
        };
        let (_, states) = watched(way, 1);
        let directory = directory();
        let mut engine = start(way, directory.path());
        let spec = spec_of(&engine);
        let disk = SimDisk::new(spec.file_bytes().unwrap(), Faults::default());
        let slow = Box::new(SlowDisk(disk, Duration::from_millis(10)));
        let mut store = CheckpointStore::format_disk(slow, &spec, 1).unwrap();
        step(&mut engine, way, 1).unwrap();
        let held = engine.hold();
        let commit = std::thread::spawn(move || {
            let made = commit_state(&mut store, held, 1, b"one", || {});
            (store, made)
        });
        let error = step(&mut engine, way, 2).unwrap_err();
        assert!(matches!(error, Error::NonFinite { step: 2, .. }), "{error}");
        let (store, made) = commit.join().unwrap();
        made.unwrap();
        assert!(committed(&store, 1, &engine) == states[0]);
    }
}
