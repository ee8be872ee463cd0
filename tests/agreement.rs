//! Goal: placement is not arithmetic (invariant 1). A run gives the same losses, norms, evaluations
//! and the same bytes of every section whatever its plan: spilled or not, kept or recomputed, any
//! number of buffers, slabs and threads, any instruction set, either I/O engine.
//! Method: tiny models trained for a few steps through the engine. In every run but the first of
//! each comparison, places are filled with NaN as soon as they are released. Runs with their own
//! number of threads, and those whose I/O the kernel counts, are processes of their own: this
//! executable, asked for its one ignored test.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

#[path = "support/tiny.rs"]
mod support;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use terrace::config::{IoEngine, Recompute, RunConfig, SpillZstd};
use terrace::device::{Device, View};
use terrace::hf::WeightSource;
use terrace::host::HostArena;
use terrace::machine::storage_bytes;
use terrace::model::ModelSpec;
use terrace::optimizer::Isa;
use terrace::plan::{
    Budgets, CODERS, Choice, Deferred, GradientHome, Home, Plan, Purpose, SpillOrder, TilePlan,
};
use terrace::stats::Stats;
use terrace::step::{Engine, StepSettings};
use terrace::store::{Scratch, checksum, disk};
use terrace::tile::{GradientDtype, Precision, Section};
use terrace::transfer::{self, Tiers};

const MICROS: u64 = 2;
const PLENTY: u64 = 1 << 50;

/// What is computed: everything here may change a result.
#[derive(Clone, Copy, Debug)]
struct Numbers {
    tied: bool,
    precision: Precision,
    gradients: GradientDtype,
    max_grad_norm: f64,
    blocks: u16,
    vocab_size: u64,
    seq_len: u64,
    steps: u64,
}

const SMALL: Numbers = Numbers {
    tied: false,
    precision: Precision::Bf16,
    gradients: GradientDtype::Bf16,
    max_grad_norm: 0.5,
    blocks: 3,
    vocab_size: 300,
    seq_len: 32,
    steps: 8,
};

impl Numbers {
    fn spec(&self) -> ModelSpec {
        support::spec(self.blocks, 64, self.vocab_size, self.tied)
    }
}

/// Sections that the host's budget has no room for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Spilled {
    Nothing,
    SomeMoments,
    Moments,
    MomentsAndResidual,
    /// Weights too, the embedding's included.
    All,
}

/// What lives on the device because host lacks room for it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum OnDevice {
    Nothing,
    /// Gradients that wait for their update; where none wait, weights.
    Gradients,
    /// Those and most blocks' weights.
    Weights,
    /// Those and states of blocks: of most, or of one where others are spilled.
    States,
}

/// How it is carried out: nothing here may change a result.
#[derive(Clone, Copy, Debug)]
struct Way {
    spilled: Spilled,
    on_device: OnDevice,
    /// Which layers spill first.
    order: SpillOrder,
    /// Layers that are updated under the next forward; with clipping all are.
    deferred: Deferred,
    /// Layers whose anchors are in host between forward and backward.
    travelling: u16,
    /// Of those, layers whose anchors are in the store instead.
    stored: u16,
    /// Blocks whose anchors are computed again for their backward.
    rebuilt: u16,
    buffers: u64,
    /// (block, micro) pairs whose activations are kept.
    kept: u64,
    /// So many of them without what passes give back.
    lean: u64,
    isa: Isa,
    engine: Option<IoEngine>,
    slabs: u64,
    /// Spilled moments are compressed.
    zstd: bool,
    poison: bool,
}

/// The way that others are compared with.
const PLAIN: Way = Way {
    spilled: Spilled::Nothing,
    on_device: OnDevice::Nothing,
    order: SpillOrder::LastFirst,
    deferred: Deferred { first: 0, last: 0 },
    travelling: 0,
    stored: 0,
    rebuilt: 0,
    buffers: 2,
    kept: 0,
    lean: 0,
    isa: Isa::Scalar,
    engine: None,
    slabs: 16,
    zstd: false,
    poison: false,
};

/// What came of a run, floats as bits.
#[derive(Clone, Debug, PartialEq)]
struct Outcome {
    losses: Vec<u64>,
    norms: Vec<u64>,
    evaluations: Vec<u64>,
    logits: Vec<u32>,
    /// Checksum of each extent of each section.
    state: Vec<(String, u128)>,
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn plan(numbers: Numbers, way: Way) -> Plan {
    let spec = numbers.spec();
    let mut config: RunConfig = support::config(numbers.seq_len, MICROS);
    config.model.precision = numbers.precision;
    config.train.gradient_dtype = numbers.gradients;
    config.train.max_grad_norm = numbers.max_grad_norm;
    config.memory.buffers = way.buffers;
    config.memory.slabs = way.slabs;
    config.memory.recompute = Recompute::All;
    config.memory.zstd = match way.zstd {
        true => SpillZstd::On,
        false => SpillZstd::Off,
    };
    let make = |config: &RunConfig, device, host| {
        let budgets = Budgets {
            device,
            host,
            store: PLENTY,
        };
        let profile = support::profile(numbers.precision);
        let choice = Choice {
            deferred: way.deferred,
            stored_anchors: way.stored,
            rebuilt_anchors: way.rebuilt,
            order: way.order,
            states_on_device: way.on_device == OnDevice::States,
            zstd: false,
        };
        Plan::choosing(&spec, config, &profile, budgets, Purpose::Train, choice).unwrap()
    };
    let least = make(&config, PLENTY, PLENTY);
    let bytes = |wanted: &[Section]| -> u64 {
        let tiles = least.tiles.iter();
        let slots = tiles.flat_map(|tile| {
            let slot = |s: &Section| tile.layout.section_slot_bytes(*s, numbers.precision);
            wanted.iter().map(slot)
        });
        slots.sum()
    };
    let moments = bytes(&[Section::Moment1, Section::Moment2]);
    let host = least.host.bytes
        - match way.spilled {
            Spilled::Nothing => 0,
            Spilled::SomeMoments => moments / 3,
            Spilled::Moments => moments,
            Spilled::MomentsAndResidual => moments + bytes(&[Section::Residual]),
            Spilled::All => bytes(&Section::ALL),
        };
    let block = |section| {
        let layout = &least.tiles[1].layout;
        layout.section_slot_bytes(section, numbers.precision)
    };
    let (weight, state) = (block(Section::Weight), block(Section::Moment2));
    let blocks = u64::from(numbers.blocks);
    let lack = match way.on_device {
        OnDevice::Nothing => 0,
        OnDevice::Gradients if way.travelling > 0 => saved_by_gradients(&least) / 4,
        OnDevice::Gradients if waiting(&least) => saved_by_gradients(&least) / 2,
        // Of three blocks' weights two would be slots for the updates.
        OnDevice::Gradients | OnDevice::Weights => {
            saved_by_gradients(&least) + least.tiles[1].layout.elements
        }
        OnDevice::States => saved_by_gradients(&least) + (blocks - 2) * weight + blocks * state,
    };
    let on_device = way.on_device != OnDevice::Nothing;
    if !on_device {
        // Room for activations alone, so that nothing else moves there.
        config.memory.recompute = match way.kept {
            0 => Recompute::All,
            kept if kept == MICROS * u64::from(numbers.blocks) => Recompute::None,
            _ => Recompute::Auto,
        };
    }
    let spare = match (way.on_device, way.spilled) {
        (OnDevice::Nothing, _) => 0,
        (OnDevice::States, Spilled::SomeMoments) => {
            let waiting = |tile: &&TilePlan| tile.gradient == GradientHome::Host;
            let waiting = least.tiles.iter().filter(waiting);
            let gradients: u64 = waiting.map(|tile| tile.layout.elements).sum();
            gradients * least.gradient_bytes + blocks * weight + 2 * state
        }
        // Rows of anchors alone.
        _ if way.travelling > 0 => 0,
        _ => PLENTY,
    };
    let row = least.map.anchor_bytes * MICROS;
    let arena = least.map.bytes + least.device.fixed_bytes;
    let workspace = &least.map.workspace;
    let kept = (way.kept - way.lean) * workspace.bytes + way.lean * workspace.lean_bytes;
    let device = arena - row * u64::from(way.travelling) + kept + spare;
    let place = least.map.anchor_bytes.next_multiple_of(4096);
    let anchors = u64::from(way.travelling - way.stored) * MICROS * place;
    let coders = if way.zstd { CODERS } else { 0 };
    let plan = make(
        &config,
        device,
        host - lack + anchors + coders * least.host.slab_bytes,
    );
    assert_eq!(plan.host.coder_slabs, coders);
    assert_eq!(plan.map.shape.travelling, way.travelling);
    assert_eq!(plan.map.shape.rebuilt, way.rebuilt);
    assert_eq!(plan.stored_anchors, way.stored);
    let lean = plan.map.shape.lean;
    assert_eq!((plan.kept.len() as u64, lean), (way.kept, way.lean));
    check_spilled(&plan, way.spilled);
    let waits = |tile: &TilePlan| tile.gradient == GradientHome::Device;
    let homes = plan.map.homes.iter().flatten().flatten().count();
    assert_eq!(homes > 0 || plan.tiles.iter().any(waits), on_device);
    let here = |section: Section| {
        let places = plan.map.homes.iter().map(|of| of[section as usize]);
        places.flatten().count()
    };
    let weights = here(Section::Weight);
    assert_eq!(
        weights > 0,
        on_device && !(way.on_device == OnDevice::Gradients && waiting(&least))
    );
    let states = way.on_device == OnDevice::States;
    assert_eq!(here(Section::Moment2) > 0, states);
    let rows = (1..=numbers.blocks).filter(|layer| plan.map.waits_in_row(*layer));
    let mut blocks = plan.tiles[1..=usize::from(numbers.blocks)].iter();
    let any = blocks.any(|tile| tile.gradient == GradientHome::Device);
    assert_eq!(rows.count() > 0, numbers.seq_len > 256 && any);
    plan
}

fn blocks(plan: &Plan) -> impl Iterator<Item = &TilePlan> {
    plan.tiles[1..plan.tiles.len() - 1].iter()
}

/// Bytes that host is spared if every gradient that waits does so on the device.
fn saved_by_gradients(plan: &Plan) -> u64 {
    let slot =
        |tile: &TilePlan| (tile.layout.elements * plan.gradient_bytes).next_multiple_of(4096);
    let waiting = |tile: &&TilePlan| tile.gradient == GradientHome::Host;
    let own: u64 = plan.tiles.iter().filter(waiting).map(slot).sum();
    if own == 0 {
        return 0;
    }
    let [first, .., last] = &plan.tiles[..] else {
        unreachable!("a model has blocks")
    };
    let shared = 2 * slot(&plan.tiles[1]) + slot(first).max(slot(last));
    own - (shared - 2 * plan.host.block_slot - plan.host.wide_slot)
}

/// Whether a block's gradient waits for its update.
fn waiting(plan: &Plan) -> bool {
    blocks(plan).any(|tile| tile.gradient == GradientHome::Host)
}

fn check_spilled(plan: &Plan, wanted: Spilled) {
    let spilled = |section: Section| {
        let homes = || plan.tiles.iter().map(|tile| tile.homes[section as usize]);
        let count = homes().filter(|home| *home == Some(Home::Store)).count();
        (count > 0, count == homes().flatten().count())
    };
    // Spread, second moments go before first ones.
    let (first, all) = spilled(Section::Moment1);
    let some = first || spilled(Section::Moment2).0;
    assert_eq!(some, wanted != Spilled::Nothing);
    assert_eq!(
        all,
        !matches!(wanted, Spilled::Nothing | Spilled::SomeMoments)
    );
    let weights = wanted == Spilled::All;
    assert_eq!(spilled(Section::Weight), (weights, weights));
}

/// Starts the lanes with random weights; `None`, with the reason printed, where the machine lacks
/// what the way asks for.
fn start(numbers: Numbers, way: Way, directory: &Path) -> Option<Engine> {
    if !way.isa.available() {
        println!("SKIP {}: not on this processor", way.isa);
        return None;
    }
    let (spec, plan) = (numbers.spec(), plan(numbers, way));
    let mut cutter = HostArena::take(plan.host.bytes).unwrap();
    let span = cutter.span();
    let ring = cutter.cut_ring(plan.host.slabs as usize, plan.host.slab_bytes);
    let mut store = None;
    if plan.spills() {
        let paths = [(PathBuf::from(directory), PLENTY)];
        match Scratch::create(&paths, &transfer::stored(&plan), way.engine, &[ring.span()]) {
            Ok(mut scratch) => {
                let staging = (0..plan.host.coder_slabs).map(|_| cutter.cut(plan.host.slab_bytes));
                scratch.start_coders(staging.collect()).unwrap();
                store = Some(scratch);
            }
            Err(error) if way.engine == Some(IoEngine::Uring) => {
                println!("SKIP io_uring: {error}");
                return None;
            }
            Err(error) => panic!("{error}"),
        }
    }
    let profile = &plan.device;
    let device = Device::open(profile.card, plan.map.bytes, profile.activation_bytes).unwrap();
    if let Device::Cuda(cuda) = &device {
        cuda.pin(span).unwrap();
    }
    let mut tiers = Tiers::new(&plan, device, cutter, ring, store, Stats::new(false)).unwrap();
    tiers.poison = way.poison;
    let weights = WeightSource::random(&spec, 11);
    let fill =
        |layer, elements, out: &mut [f32]| weights.fill(&spec.tile_layout(layer), elements, out);
    tiers.initialise(fill).unwrap();
    Some(Engine::start(&spec, plan, tiers, way.isa).unwrap())
}

fn settings(step: u64, numbers: Numbers) -> StepSettings {
    StepSettings {
        skipped: 0,
        step,
        learning_rate: 1e-2,
        betas: [0.9, 0.99],
        eps: 1e-8,
        weight_decay: 0.1,
        max_grad_norm: numbers.max_grad_norm,
        skip_above: None,
    }
}

/// Trains, with an evaluation under way and logits at the end.
fn train(numbers: Numbers, engine: &mut Engine) -> Outcome {
    let micros = |seed, count| support::micros(seed, count, numbers.seq_len, numbers.vocab_size);
    let mut outcome = Outcome {
        losses: Vec::new(),
        norms: Vec::new(),
        evaluations: Vec::new(),
        logits: Vec::new(),
        state: Vec::new(),
    };
    for step in 1..=numbers.steps {
        let result = engine.train_step(micros(step, MICROS), settings(step, numbers));
        let result = result.unwrap();
        outcome.losses.push(result.loss.to_bits());
        outcome.norms.push(result.grad_norm.to_bits());
        if step == numbers.steps / 2 {
            // Of fewer micro-batches than a step, then of as many.
            for count in 1..=MICROS {
                let (sum, _) = engine.evaluate(micros(1000, count)).unwrap();
                assert!(sum.is_finite());
                outcome.evaluations.push(sum.to_bits());
            }
        }
    }
    let logits = engine.last_logits(micros(2000, 1)).unwrap();
    outcome.logits = logits
        .concat()
        .iter()
        .map(|value| value.to_bits())
        .collect();
    engine.drain().unwrap();
    let tiers = engine.tiers();
    let mut bytes = Vec::new();
    for key in tiers.extents() {
        tiers.read_extent_into(key, &mut bytes).unwrap();
        outcome.state.push((key.to_string(), checksum(&bytes)));
    }
    outcome
}

fn run(numbers: Numbers, way: Way) -> Option<Outcome> {
    let directory = directory();
    let mut engine = start(numbers, way, directory.path())?;
    Some(train(numbers, &mut engine))
}

/// Holds each way to the plain one.
fn agree(numbers: Numbers, ways: &[Way]) {
    let plain = run(numbers, PLAIN).expect("every machine can");
    let first = f64::from_bits(plain.losses[0]);
    let last = f64::from_bits(*plain.losses.last().unwrap());
    assert!(first.is_finite() && last.is_finite() && first != last);
    for way in ways {
        let way = Way {
            poison: true,
            ..*way
        };
        if let Some(outcome) = run(numbers, way) {
            assert!(
                outcome == plain,
                "{numbers:?}\n{way:?}\n{}",
                differences(&outcome, &plain)
            );
        }
    }
}

fn differences(got: &Outcome, plain: &Outcome) -> String {
    let floats = |bits: &[u64]| bits.iter().map(|b| f64::from_bits(*b)).collect::<Vec<_>>();
    let pairs = got.state.iter().zip(&plain.state);
    let extents: Vec<&str> = pairs
        .filter(|(a, b)| a != b)
        .map(|(a, _)| a.0.as_str())
        .collect();
    format!(
        "losses {:?}\nnot    {:?}\nnorms {:?}\nnot   {:?}\nevaluations or logits differ: {}\n\
         extents {extents:?}",
        floats(&got.losses),
        floats(&plain.losses),
        floats(&got.norms),
        floats(&plain.norms),
        (&got.evaluations, &got.logits) != (&plain.evaluations, &plain.logits),
    )
}

fn ways() -> Vec<Way> {
    let pairs = 3 * MICROS;
    let spilled = |spilled| Way { spilled, ..PLAIN };
    vec![
        PLAIN,
        Way {
            buffers: 1,
            kept: 1,
            isa: Isa::Avx2,
            ..PLAIN
        },
        Way {
            buffers: 3,
            kept: pairs,
            lean: 2,
            isa: Isa::Avx512,
            ..PLAIN
        },
        Way {
            buffers: 8,
            kept: pairs - 1,
            lean: pairs - 1,
            isa: Isa::Avx2,
            ..PLAIN
        },
        spilled(Spilled::SomeMoments),
        Way {
            order: SpillOrder::Spread,
            ..spilled(Spilled::SomeMoments)
        },
        Way {
            zstd: true,
            slabs: 4,
            isa: Isa::Avx2,
            ..spilled(Spilled::All)
        },
        Way {
            slabs: 4,
            isa: Isa::Avx512,
            ..spilled(Spilled::Moments)
        },
        Way {
            engine: Some(IoEngine::Pread),
            buffers: 1,
            ..spilled(Spilled::MomentsAndResidual)
        },
        Way {
            engine: Some(IoEngine::Uring),
            kept: pairs,
            lean: pairs,
            buffers: 3,
            ..spilled(Spilled::All)
        },
        Way {
            engine: Some(IoEngine::Pread),
            slabs: 4,
            buffers: 1,
            ..spilled(Spilled::All)
        },
        Way {
            engine: Some(IoEngine::Uring),
            slabs: 4,
            deferred: Deferred { first: 2, last: 2 },
            ..spilled(Spilled::All)
        },
        Way {
            deferred: Deferred { first: 1, last: 1 },
            isa: Isa::Avx2,
            ..PLAIN
        },
        Way {
            on_device: OnDevice::Gradients,
            deferred: Deferred { first: 5, last: 2 },
            ..PLAIN
        },
        Way {
            on_device: OnDevice::Weights,
            buffers: 1,
            isa: Isa::Avx2,
            ..PLAIN
        },
        Way {
            on_device: OnDevice::Weights,
            deferred: Deferred { first: 3, last: 0 },
            slabs: 4,
            ..PLAIN
        },
        Way {
            on_device: OnDevice::States,
            slabs: 4,
            isa: Isa::Avx512,
            ..PLAIN
        },
        Way {
            on_device: OnDevice::States,
            spilled: Spilled::SomeMoments,
            order: SpillOrder::DeferredFirst,
            deferred: Deferred { first: 0, last: 1 },
            slabs: 6,
            ..PLAIN
        },
    ]
}

fn agree_for(precision: Precision, tied: bool) {
    for max_grad_norm in [0.5, 0.0] {
        let numbers = Numbers {
            precision,
            tied,
            max_grad_norm,
            ..SMALL
        };
        agree(numbers, &ways());
    }
}

/// Tied in bf16 with clipping, and untied in f32 without.
fn agree_tied_and_not(numbers: Numbers, ways: &[Way]) {
    for (tied, precision, max_grad_norm) in
        [(true, Precision::Bf16, 0.5), (false, Precision::Fp32, 0.0)]
    {
        let numbers = Numbers {
            tied,
            precision,
            max_grad_norm,
            ..numbers
        };
        agree(numbers, ways);
    }
}

#[test]
fn gradients_may_wait_where_anchors_were() {
    let ways = [
        Way {
            on_device: OnDevice::Gradients,
            deferred: Deferred { first: 0, last: 3 },
            ..PLAIN
        },
        Way {
            on_device: OnDevice::States,
            deferred: Deferred { first: 6, last: 0 },
            buffers: 1,
            slabs: 4,
            ..PLAIN
        },
        Way {
            on_device: OnDevice::Gradients,
            deferred: Deferred { first: 10, last: 0 },
            travelling: 1,
            ..PLAIN
        },
    ];
    let numbers = Numbers {
        blocks: 8,
        seq_len: 512,
        steps: 4,
        ..SMALL
    };
    agree_tied_and_not(numbers, &ways);
}

#[test]
fn anchors_may_be_in_host() {
    let ways = [
        Way {
            travelling: 1,
            ..PLAIN
        },
        Way {
            travelling: 3,
            buffers: 1,
            isa: Isa::Avx2,
            ..PLAIN
        },
        Way {
            travelling: 2,
            deferred: Deferred { first: 4, last: 1 },
            buffers: 3,
            ..PLAIN
        },
    ];
    let numbers = Numbers { blocks: 5, ..SMALL };
    agree_tied_and_not(numbers, &ways);
}

#[test]
fn anchors_may_be_computed_again() {
    let pairs = 8 * MICROS;
    let ways = [
        Way {
            rebuilt: 1,
            ..PLAIN
        },
        Way {
            rebuilt: 3,
            buffers: 3,
            kept: pairs - 2,
            lean: pairs - 2,
            deferred: Deferred { first: 4, last: 2 },
            isa: Isa::Avx2,
            ..PLAIN
        },
        Way {
            rebuilt: 3,
            spilled: Spilled::All,
            slabs: 4,
            ..PLAIN
        },
        Way {
            rebuilt: 1,
            travelling: 1,
            isa: Isa::Avx512,
            ..PLAIN
        },
    ];
    let numbers = Numbers { blocks: 8, ..SMALL };
    agree_tied_and_not(numbers, &ways);
    // A row is long enough for a gradient.
    let ways = [
        Way {
            rebuilt: 2,
            on_device: OnDevice::Gradients,
            deferred: Deferred { first: 10, last: 0 },
            buffers: 8,
            ..PLAIN
        },
        Way {
            rebuilt: 3,
            on_device: OnDevice::States,
            deferred: Deferred { first: 0, last: 3 },
            ..PLAIN
        },
    ];
    let numbers = Numbers {
        seq_len: 512,
        ..numbers
    };
    agree_tied_and_not(numbers, &ways);
}

#[test]
fn anchors_may_be_in_the_store() {
    let ways = [
        Way {
            travelling: 1,
            stored: 1,
            slabs: 4,
            engine: Some(IoEngine::Pread),
            ..PLAIN
        },
        Way {
            travelling: 3,
            stored: 2,
            buffers: 1,
            isa: Isa::Avx2,
            engine: Some(IoEngine::Uring),
            ..PLAIN
        },
        Way {
            travelling: 3,
            stored: 3,
            deferred: Deferred { first: 4, last: 1 },
            spilled: Spilled::Moments,
            slabs: 4,
            ..PLAIN
        },
        Way {
            travelling: 2,
            stored: 2,
            spilled: Spilled::All,
            slabs: 6,
            isa: Isa::Avx512,
            ..PLAIN
        },
    ];
    let numbers = Numbers { blocks: 5, ..SMALL };
    agree_tied_and_not(numbers, &ways);
}

/// All tiers of a plan, with its store in `directory`; nothing is in the tiles.
fn tiers_of(plan: &Plan, directory: &Path) -> Tiers {
    let (profile, arena) = (&plan.device, plan.map.bytes);
    let device = Device::open(profile.card, arena, profile.activation_bytes).unwrap();
    let mut cutter = HostArena::take(plan.host.bytes).unwrap();
    let ring = cutter.cut_ring(plan.host.slabs as usize, plan.host.slab_bytes);
    let store = plan.spills().then(|| {
        let paths = [(PathBuf::from(directory), PLENTY)];
        Scratch::create(&paths, &transfer::stored(plan), None, &[ring.span()]).unwrap()
    });
    Tiers::new(plan, device, cutter, ring, store, Stats::new(false)).unwrap()
}

/// More rows than are gathered at once, from a table in host and from a spilled one.
#[test]
fn rows_that_are_gathered_in_pieces_are_those_that_were_named() {
    const TOKENS: u64 = 20_000;
    let spec = support::spec(1, 64, 17, false);
    let config = support::config(TOKENS, 1);
    let profile = support::profile(config.precision());
    let budgets = |host| Budgets {
        device: PLENTY,
        host,
        store: PLENTY,
    };
    let plan = |host| Plan::new(&spec, &config, &profile, budgets(host), Purpose::Forward);
    let roomy = plan(PLENTY).unwrap();
    for host in [roomy.host.bytes, roomy.host.bytes - roomy.host.homes] {
        let plan = plan(host).unwrap();
        let directory = directory();
        let tiers = tiers_of(&plan, directory.path());
        assert_eq!(tiers.is_spilled(0, Section::Weight), plan.spills());
        // Each row holds its own number.
        let rows = |_, elements: Range<u64>, out: &mut [f32]| {
            let numbered = out.iter_mut().zip(elements);
            numbered.for_each(|(value, element)| *value = (element / spec.hidden) as f32);
            Ok(())
        };
        tiers.initialise(rows).unwrap();
        let tokens: Vec<u32> = (0..TOKENS as u32).map(|at| at * 7 % 17).collect();
        let out = View::new(
            plan.map.anchor(1, 0),
            TOKENS * spec.hidden,
            tiers.device.activation_dtype(),
        );
        tiers.gather_rows(&tokens, spec.hidden, out).unwrap();
        let got = tiers.device.read_f32(out);
        let wanted = tokens.iter().flat_map(|row| [*row as f32; 64]);
        assert!(got.into_iter().eq(wanted), "spilled: {}", plan.spills());
    }
}

/// Of an anchor of two extents that its micro-batch fills to a half, the first moves; of a full one
/// both do.
#[test]
fn an_anchor_of_several_extents_comes_back() {
    const TOKENS: u64 = 20_000;
    let spec = support::spec(3, 64, 17, false);
    let mut config = support::config(TOKENS, 2);
    config.memory.recompute = Recompute::All;
    let profile = support::profile(Precision::Fp32);
    let choose = |device| {
        let budgets = Budgets {
            device,
            host: PLENTY,
            store: PLENTY,
        };
        let choice = Choice {
            stored_anchors: 1,
            ..Choice::default()
        };
        Plan::choosing(&spec, &config, &profile, budgets, Purpose::Train, choice).unwrap()
    };
    let all = choose(PLENTY);
    let row = 2 * all.map.anchor_bytes;
    let plan = choose(all.map.bytes + profile.fixed_bytes - row);
    assert_eq!((plan.map.shape.travelling, plan.stored_anchors), (1, 1));
    let directory = directory();
    let tiers = tiers_of(&plan, directory.path());
    let anchor = |micro, tokens| {
        let offset = plan.map.anchor(1, micro);
        View::new(
            offset,
            tokens * spec.hidden,
            tiers.device.activation_dtype(),
        )
    };
    let views = [anchor(0, TOKENS), anchor(1, TOKENS / 2)];
    let values = |micro: u32| -> Vec<f32> {
        let word = |index| ((index * 7 + u64::from(micro) * 3) % 251) as f32;
        (0..views[micro as usize].count).map(word).collect()
    };
    for (micro, view) in (0..).zip(views) {
        tiers.device.write_f32(view, &values(micro));
        tiers.demote_anchor(1, micro, view).unwrap();
        tiers.device.settle();
        tiers.device.poison(view);
    }
    for (micro, view) in (0..2).zip(views).rev() {
        tiers.promote_anchor(1, micro, view).unwrap();
        assert!(tiers.device.read_f32(view) == values(micro));
    }
    let moved = tiers.stats.snapshot().bytes;
    let extents = plan.map.anchor_bytes + (4 << 20);
    assert_eq!(&moved[2..], [extents; 2]);
    assert_eq!(moved[0], moved[1]);
}

/// Compressed or not, moments come back as they were, and compressed ones move fewer bytes, in what
/// is told as on the disk.
#[test]
fn compressed_moments_agree_and_move_fewer_bytes() {
    for precision in [Precision::Bf16, Precision::Fp32, Precision::Bf16Moments] {
        let numbers = Numbers { precision, ..SMALL };
        let plain = run(numbers, PLAIN).expect("every machine can");
        let moved = [false, true].map(|zstd| {
            let way = Way {
                zstd,
                spilled: Spilled::Moments,
                poison: true,
                ..PLAIN
            };
            let directory = directory();
            let mut engine = start(numbers, way, directory.path()).unwrap();
            let outcome = train(numbers, &mut engine);
            assert!(outcome == plain, "{}", differences(&outcome, &plain));
            let counted = engine.tiers().scratch().counters();
            let [_, _, read, write] = engine.tiers().stats.snapshot().bytes;
            [read, write, counted.read.bytes, counted.write.bytes]
        });
        for (with, without) in moved[1].iter().zip(moved[0]) {
            assert!(*with < without * 19 / 20, "{precision:?}: {moved:?}");
        }
        println!("{precision:?}: without and with {moved:?}");
    }
}

#[test]
fn bf16_untied() {
    agree_for(Precision::Bf16, false);
}

#[test]
fn bf16_tied() {
    agree_for(Precision::Bf16, true);
}

#[test]
fn fp32_untied() {
    agree_for(Precision::Fp32, false);
}

#[test]
fn fp32_tied() {
    agree_for(Precision::Fp32, true);
}

#[test]
fn bf16_moments() {
    agree_for(Precision::Bf16Moments, true);
}

#[test]
fn bf16_with_f32_gradients() {
    let numbers = Numbers {
        gradients: GradientDtype::F32,
        tied: true,
        ..SMALL
    };
    agree(numbers, &ways());
}

#[test]
fn sections_of_several_extents_stream_alike() {
    let spilled = |spilled| Way { spilled, ..PLAIN };
    let ways = [
        Way {
            isa: Isa::Avx512,
            ..spilled(Spilled::Moments)
        },
        Way {
            engine: Some(IoEngine::Uring),
            slabs: 4,
            ..spilled(Spilled::All)
        },
        Way {
            engine: Some(IoEngine::Pread),
            slabs: 6,
            ..spilled(Spilled::All)
        },
    ];
    for (tied, precision, max_grad_norm) in [
        (true, Precision::Bf16, 0.5),
        (false, Precision::Fp32, 0.0),
        (true, Precision::Bf16Moments, 0.0),
    ] {
        let numbers = Numbers {
            tied,
            precision,
            max_grad_norm,
            blocks: 1,
            vocab_size: 33_000,
            steps: 2,
            ..SMALL
        };
        assert!(numbers.spec().tile_layout(0).extent_count() > 2);
        agree(numbers, &ways);
    }
}

#[test]
fn other_numbers_give_other_results() {
    let plain = run(SMALL, PLAIN).unwrap();
    let clipped = Numbers {
        max_grad_norm: 0.25,
        ..SMALL
    };
    let other = run(clipped, PLAIN).unwrap();
    assert_eq!(plain.losses[0], other.losses[0]);
    assert_ne!(plain.losses, other.losses);
    let same = plain.state.iter().zip(&other.state).filter(|(a, b)| a == b);
    assert_eq!(same.count(), 0);
}

/// What a child process trains.
const CHILD: Way = Way {
    spilled: Spilled::All,
    engine: None,
    kept: 0,
    poison: true,
    isa: Isa::Scalar,
    ..PLAIN
};

#[test]
#[ignore = "run by other tests in a process of its own"]
fn child() {
    let directory = directory();
    let probe = disk::probe(directory.path(), None).unwrap();
    let before = storage_bytes();
    let mut engine = start(SMALL, CHILD, directory.path()).unwrap();
    let outcome = train(SMALL, &mut engine);
    let after = storage_bytes();
    println!("threads {}", rayon::current_num_threads());
    println!("outcome {:032x}", outcome_checksum(&outcome));
    println!("direct {} {}", probe.direct, probe.file_system);
    println!("read {}", after.0 - before.0);
    println!("written {}", after.1 - before.1);
}

fn outcome_checksum(outcome: &Outcome) -> u128 {
    checksum(format!("{outcome:?}").as_bytes())
}

/// Runs the child; what it printed after each word.
fn run_child(threads: u32) -> impl Fn(&str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--ignored", "--nocapture"])
        .env("RAYON_NUM_THREADS", threads.to_string())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    move |word: &str| {
        let mut lines = text.lines();
        let found = lines.find_map(|line| line.strip_prefix(&format!("{word} ")));
        found
            .unwrap_or_else(|| panic!("no {word} in {text}"))
            .to_string()
    }
}

#[test]
fn any_number_of_threads_agrees() {
    let plain = format!("{:032x}", outcome_checksum(&run(SMALL, PLAIN).unwrap()));
    for threads in [1, 2, 3] {
        let child = run_child(threads);
        assert_eq!(child("threads"), threads.to_string());
        assert_eq!(child("outcome"), plain, "{threads} threads");
    }
}

#[test]
fn the_kernel_counts_what_is_spilled() {
    let child = run_child(2);
    if !child("direct").starts_with("true") {
        println!(
            "SKIP bytes that the kernel counts: no O_DIRECT on {}",
            child("direct")
        );
        return;
    }
    let number = |word| child(word).parse::<u64>().unwrap();
    // Each update reads and writes every extent; the first weights are written before.
    let plan = plan(SMALL, CHILD);
    let (read, written) = (number("read"), number("written"));
    let (steps, once) = (SMALL.steps, plan.spilled_bytes);
    println!("spilled {once} bytes, {steps} steps: read {read}, written {written}");
    assert!(read >= steps * once, "{read}");
    assert!(written >= (steps + 1) * once, "{written}");
}
