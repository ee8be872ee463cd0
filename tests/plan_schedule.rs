//! Goal: a plan never exceeds a budget nor spills more than it must, or says what is missing; a
//! schedule is right under every interleaving of its lanes, and each of its waits is needed.
//! Method: random small models, budgets and settings (proptest shrinks them; PROPTEST_RNG_SEED sets
//! the seed). Schedules are replayed over three steps on the machine in `plan_schedule/machine.rs`,
//! with lanes picked at random and at the extremes. Then each wait is taken out: unless other waits
//! imply it, starting its action as early as the rest allows must be caught.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

#[path = "plan_schedule/machine.rs"]
mod machine;
#[path = "support/tiny.rs"]
mod support;

use std::collections::BTreeMap;

use machine::{At, Machine, ancestors};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use terrace::Error;
use terrace::config::{Recompute, RunConfig, Size, SpillZstd, StorePath};
use terrace::model::ModelSpec;
use terrace::plan::anchors::travelling_max;
use terrace::plan::regions::DeviceMap;
use terrace::plan::{
    Budgets, CODERS, Choice, Deferred, DeviceProfile, GradientHome, Home, Plan, Purpose,
    SpillOrder, TilePlan,
};
use terrace::schedule::choose::fastest;
use terrace::schedule::simulate::{Prediction, Rates, ZstdRates, simulate};
use terrace::schedule::{Action, Form, Lane, Schedule};
use terrace::suggest::{self, Question, Steps, suggest};
use terrace::tile::{GradientDtype, MomentDtype, Precision, Section};

const STEPS: u64 = 3;
const PLENTY: u64 = 1 << 50;

/// A model and a run of it.
#[derive(Clone)]
struct Case {
    spec: ModelSpec,
    config: RunConfig,
    choice: Choice,
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (s, toml) = (&self.spec, self.config.to_toml());
        let set: Vec<&str> = toml.lines().filter(|line| line.contains('=')).collect();
        let size = (s.blocks, s.hidden, s.vocab_size, s.tied);
        write!(
            f,
            "(blocks, hidden, vocab, tied) = {size:?}; {:?}; {}",
            self.choice,
            set.join("; ")
        )
    }
}

impl Case {
    fn plan(&self, budgets: Budgets) -> Result<Plan, Error> {
        self.plan_for(budgets, Purpose::Train)
    }

    fn plan_for(&self, budgets: Budgets, purpose: Purpose) -> Result<Plan, Error> {
        let device = DeviceProfile::cpu();
        let choice = self.choice;
        Plan::choosing(&self.spec, &self.config, &device, budgets, purpose, choice)
    }

    /// With so many blocks whose anchors are computed again, at most.
    fn rebuilding(&self, rebuilt_anchors: u16) -> Case {
        let choice = Choice {
            rebuilt_anchors,
            ..self.choice
        };
        Case {
            choice,
            ..self.clone()
        }
    }

    /// The plan with all in host.
    fn roomy(&self) -> Plan {
        self.plan(budgets(PLENTY, PLENTY, 0))
            .expect("everything fits")
    }
}

fn updating(deferred: Deferred) -> Choice {
    Choice {
        deferred,
        ..Choice::default()
    }
}

/// No file of regressions is written.
fn random_cases(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..Default::default()
    }
}

fn budgets(device: u64, host: u64, store: u64) -> Budgets {
    Budgets {
        device,
        host,
        store,
    }
}

prop_compose! {
    fn cases()(
        blocks in 1u16..=8,
        hidden in prop::sample::select(vec![16u64, 64]),
        vocab in prop::sample::select(vec![17u64, 300, 4000]),
        tied: bool,
        micros in 1u64..=4,
        buffers in 1u64..=8,
        rebuilt_anchors in 0u16..=4,
        slabs in 4u64..=16,
        clips: bool,
        fp32: bool,
        long_gradients: bool,
        first in 0u16..=8,
        last in 0u16..=8,
        states_on_device: bool,
        order in prop::sample::select(vec![
            SpillOrder::LastFirst,
            SpillOrder::Spread,
            SpillOrder::DeferredFirst,
        ]),
        recompute in prop::sample::select(vec![Recompute::Auto, Recompute::All, Recompute::None]),
    ) -> Case {
        let spec = support::spec(blocks, hidden, vocab, tied);
        let mut config = support::config(32, micros);
        config.memory.buffers = buffers;
        config.memory.slabs = slabs;
        config.memory.recompute = recompute;
        config.train.max_grad_norm = if clips { 1.0 } else { 0.0 };
        config.model.precision = if fp32 { Precision::Fp32 } else { Precision::Bf16 };
        if long_gradients {
            config.train.gradient_dtype = GradientDtype::F32;
        }
        let deferred = Deferred { first, last };
        let choice = Choice { states_on_device, order, rebuilt_anchors, ..updating(deferred) };
        Case { spec, config, choice }
    }
}

fn sections(plan: &Plan) -> Vec<(&TilePlan, Section)> {
    let present = |tile| Section::present(plan.precision).map(move |section| (tile, section));
    plan.tiles.iter().flat_map(present).collect()
}

fn spilled(plan: &Plan) -> Vec<(Section, u64)> {
    let of_store = sections(plan).into_iter();
    of_store
        .filter(|(tile, section)| tile.home(*section) == Home::Store)
        .map(|(tile, section)| {
            (
                section,
                tile.layout.section_slot_bytes(section, plan.precision),
            )
        })
        .collect()
}

/// Moments go first, then residuals, then weights.
fn rank(section: Section) -> u8 {
    match section {
        Section::Moment1 | Section::Moment2 => 0,
        Section::Residual => 1,
        Section::Weight => 2,
        Section::Anchor => unreachable!("no section of a tile"),
    }
}

fn check_homes(plan: &Plan) -> Result<(), TestCaseError> {
    let mut homes = 0;
    for tile in &plan.tiles {
        for section in Section::ALL {
            let present = section.element_bytes(plan.precision) > 0;
            prop_assert_eq!(tile.homes[section as usize].is_some(), present);
            if tile.homes[section as usize] == Some(Home::Host) {
                homes += tile.layout.section_slot_bytes(section, plan.precision);
            }
        }
    }
    let slabs = plan.host.slabs + plan.host.commit_slabs + plan.host.coder_slabs;
    let rings = slabs * plan.host.slab_bytes;
    prop_assert_eq!(plan.host.homes, homes);
    let weights = 2 * plan.host.weight_slot;
    let place = plan.map.anchor_bytes.next_multiple_of(4096);
    let anchors = u64::from(plan.map.shape.travelling) * plan.map.shape.micros * place;
    prop_assert_eq!(plan.host.anchors + plan.stored_anchor_bytes(), anchors);
    prop_assert!(plan.stored_anchors <= plan.map.shape.travelling);
    prop_assert_eq!(
        plan.host.bytes,
        homes + plan.host.gradients + weights + plan.host.anchors + rings
    );
    prop_assert!(anchors == 0 || plan.host.slab_bytes >= plan.map.anchor_bytes.min(4 << 20));
    prop_assert!(plan.host.bytes <= plan.budgets.host);
    prop_assert!(plan.map.bytes <= plan.budgets.device);
    prop_assert!(plan.store_bytes() <= plan.budgets.store);
    check_gradients(plan)?;
    check_stored_anchors(plan)?;
    let spilled = spilled(plan);
    let Some(last) = spilled.iter().map(|(section, _)| rank(*section)).max() else {
        return Ok(());
    };
    for (tile, section) in sections(plan) {
        let in_host = tile.home(section) == Home::Host;
        prop_assert!(
            !in_host || rank(section) >= last,
            "{section} of an earlier rank is in host"
        );
    }
    // Only the overflow: no spilled section of the last rank would fit back into host.
    let fitting = spilled.iter().find(|(section, bytes)| {
        rank(*section) == last && plan.host.bytes + bytes <= plan.budgets.host
    });
    prop_assert_eq!(fitting, None);
    Ok(())
}

/// Anchors go to the store after states of tiles and before weights, and only the overflow of them.
fn check_stored_anchors(plan: &Plan) -> Result<(), TestCaseError> {
    let (stored, travelling) = (plan.stored_anchors, plan.map.shape.travelling);
    let weights = spilled(plan)
        .iter()
        .any(|(section, _)| *section == Section::Weight);
    prop_assert!(!weights || stored == travelling);
    if stored > 0 {
        for (tile, section) in sections(plan) {
            // What a whole layer's anchors left of their room is given back to a state.
            let row = plan.stored_anchor_bytes() / u64::from(stored);
            let slot = tile.layout.section_slot_bytes(section, plan.precision);
            let fits = slot < row || weights;
            let state = section != Section::Weight && tile.home(section) == Home::Host;
            prop_assert!(!state || fits, "{section} is in host");
        }
        let row = plan.stored_anchor_bytes() / u64::from(stored);
        prop_assert!(weights || plan.host.bytes + row > plan.budgets.host);
    }
    Ok(())
}

/// Gradients of deferred tiles wait in places of their own, the others go through shared slots;
/// what is on the device has a region there, and host has the slots that the schedule names.
fn check_gradients(plan: &Plan) -> Result<(), TestCaseError> {
    let last = usize::from(plan.layer_count()) - 1;
    let mut own = 0;
    for (layer, tile) in plan.tiles.iter().enumerate() {
        let bytes = (tile.layout.elements * plan.gradient_bytes).next_multiple_of(4096);
        let shared = match layer == 0 || layer == last {
            true => plan.host.wide_slot,
            false => plan.host.block_slot,
        };
        let waits = tile.gradient != GradientHome::Shared;
        let layer = layer as u16;
        prop_assert_eq!(waits, plan.deferred.contains(layer, plan.layer_count()));
        let layer = usize::from(layer);
        if tile.gradient == GradientHome::Host {
            own += bytes;
        } else {
            prop_assert!(shared >= bytes);
        }
        let on_device = tile.gradient == GradientHome::Device;
        prop_assert_eq!(plan.map.parked[layer].is_some(), on_device);
        let weight = tile.home(Section::Weight) == Home::Device;
        let places = plan.map.homes[layer];
        for section in Section::ALL {
            let here = tile.homes[section as usize] == Some(Home::Device);
            prop_assert_eq!(places[section as usize].is_some(), here);
        }
        let bytes = tile
            .layout
            .section_slot_bytes(Section::Weight, plan.precision);
        prop_assert!(!weight || plan.host.weight_slot >= bytes);
    }
    let shared = 2 * plan.host.block_slot + plan.host.wide_slot;
    prop_assert_eq!(plan.host.gradients, own + shared);
    Ok(())
}

/// The device is a home only to what host has no room for.
fn check_spare(case: &Case, plan: &Plan) -> Result<(), TestCaseError> {
    let map = &plan.map;
    // What waits where anchors were takes nothing.
    let parked = (0..plan.layer_count())
        .filter(|layer| map.parked[usize::from(*layer)].is_some() && !map.waits_in_row(*layer));
    if parked.count() + map.homes.iter().flatten().flatten().count() == 0 {
        return Ok(());
    }
    let shape = plan.map.shape;
    let mut least = case.rebuilding(shape.rebuilt);
    least.config.memory.recompute = Recompute::All;
    // As many anchors leave it, or are computed again.
    let row = plan.map.anchor_bytes * shape.micros;
    let all = least.rebuilding(0).roomy().map.bytes;
    let device = all - u64::from(shape.travelling + shape.rebuilt) * row;
    match least.plan(budgets(device, plan.budgets.host, PLENTY)) {
        Ok(without) => {
            prop_assert!(without.spilled_bytes > 0);
            // Coders may have found no room without.
            let coded = plan.host.coder_slabs > without.host.coder_slabs;
            prop_assert!(coded || without.store_bytes() >= plan.store_bytes());
        }
        Err(error) => {
            let of_host = matches!(error, Error::Budget { tier: "host", .. });
            prop_assert!(of_host, "{}", error);
        }
    }
    Ok(())
}

/// Checks a refusal, and that the missing bytes are what was missing.
fn check_refusal(case: &Case, given: Budgets, error: &Error) -> Result<(), TestCaseError> {
    let Error::Budget {
        tier,
        needed,
        budget,
        missing,
        remedy,
    } = error
    else {
        return Err(TestCaseError::fail(format!("{error}")));
    };
    prop_assert_eq!(*needed, budget + missing);
    let granted = |bytes: u64| {
        let mut budgets = given;
        let place = match *tier {
            "device" => &mut budgets.device,
            "host" => &mut budgets.host,
            "store" => &mut budgets.store,
            other => return Err(TestCaseError::fail(format!("tier {other}"))),
        };
        assert_eq!(*place, *budget);
        *place += bytes;
        Ok(match case.plan(budgets) {
            Err(Error::Budget { tier, .. }) => tier.to_string(),
            _ => "none".to_string(),
        })
    };
    prop_assert_ne!(&granted(*missing)?, tier);
    prop_assert_eq!(&granted(missing - 1)?, tier);
    check_largest(case, given.device, remedy, Purpose::Train)
}

/// Where a remedy names the largest count of micro-batches, it fits and one more does not.
fn check_largest(
    case: &Case,
    device: u64,
    remedy: &str,
    purpose: Purpose,
) -> Result<(), TestCaseError> {
    let Some(rest) = remedy.strip_prefix("train.micro_batches = ") else {
        return Ok(());
    };
    let largest: u64 = rest.split(' ').next().unwrap().parse().unwrap();
    let fits = |micros: u64| {
        let mut case = case.clone();
        case.config.train.micro_batches = micros;
        case.plan_for(budgets(device, PLENTY, 0), purpose).is_ok()
    };
    prop_assert!(fits(largest) && !fits(largest + 1), "{remedy}");
    Ok(())
}

/// Regions as (name, start, end); those that share memory by design have one name.
fn regions(plan: &Plan) -> Vec<(String, u64, u64)> {
    let map: &DeviceMap = &plan.map;
    let bytes = |layer: u16, width: u64| plan.tiles[usize::from(layer)].layout.elements * width;
    let weight = Section::Weight.element_bytes(plan.precision);
    let head = plan.layer_count() - 1;
    let mut regions = Vec::new();
    let mut add = |name: &str, start: u64, bytes: u64| {
        regions.push((name.to_string(), start, start + bytes));
    };
    for (index, start) in map.buffers.iter().enumerate() {
        add(&format!("buffer {index}"), *start, bytes(1, weight));
    }
    add("head weight", map.head_weight, bytes(head, weight));
    if let Some(start) = map.tied_weight {
        add("tied weight", start, bytes(0, weight));
    }
    if let Some(start) = map.compute_weight {
        let tied = if plan.tied { bytes(0, 4) } else { 0 };
        add(
            "compute weight",
            start,
            bytes(1, 4).max(bytes(head, 4) + tied),
        );
    }
    for (index, start) in map.accumulators.iter().enumerate() {
        add(&format!("accumulator {index}"), *start, bytes(1, 4));
    }
    let names = if plan.tied {
        ["head sum", "embed sum"]
    } else {
        ["wide sum"; 2]
    };
    add(names[0], map.head_accumulator, bytes(head, 4));
    add(names[1], map.embed_accumulator, bytes(0, 4));
    let micros = map.shape.micros as u32;
    for (layer, micro) in (1..=head).flat_map(|layer| (0..micros).map(move |micro| (layer, micro)))
    {
        // Layers may take turns in a row.
        let name = format!("anchor row {} {micro}", map.anchor_rows.row(layer));
        add(&name, map.anchor(layer, micro), map.anchor_bytes);
    }
    for layer in 0..=head {
        for section in Section::ALL {
            if let Some(start) = map.homes[usize::from(layer)][section as usize] {
                let bytes = bytes(layer, section.element_bytes(plan.precision));
                add(&format!("{section} {layer}"), start, bytes);
            }
        }
        if let Some(start) = map.parked[usize::from(layer)] {
            let bytes = bytes(layer, plan.gradient_bytes);
            match map.waits_in_row(layer) {
                true => assert!(bytes <= map.anchor_bytes * map.shape.micros),
                false => add(&format!("gradient {layer}"), start, bytes),
            }
        }
    }
    for (index, start) in map.kept.iter().enumerate() {
        add(
            &format!("kept {index}"),
            *start,
            map.kept_bytes(index as u32),
        );
    }
    add("rope", map.rope, map.shape.seq_len * 4);
    // A block's scratch and the head's are used in turn.
    add("scratch", map.shared_workspace, map.workspace.bytes);
    add("scratch", map.head, map.head_scratch.bytes);
    let backward = map.shared_workspace + map.workspace.bytes;
    assert!(
        map.backward >= backward,
        "backward needs the workspace at once"
    );
    add("scratch", map.backward, map.backward_scratch.bytes);
    regions
}

fn check_regions(plan: &Plan) -> Result<(), TestCaseError> {
    let mut regions = regions(plan);
    regions.sort_by_key(|(_, start, _)| *start);
    for (index, (name, start, end)) in regions.iter().enumerate() {
        prop_assert!(*end <= plan.map.bytes, "{name} leaves the arena");
        for (other, from, _) in &regions[index + 1..] {
            prop_assert!(
                name == other || from >= end,
                "{name} {start}..{end} and {other} {from}"
            );
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(random_cases(1024))]

    #[test]
    fn a_plan_fits_its_budgets_or_says_what_is_missing(
        mut case in cases(),
        zstd: bool,
        device in 0u64..=300,
        host in 0u64..=110,
        store in 0u64..=110,
    ) {
        case.config.memory.zstd = if zstd { SpillZstd::On } else { SpillZstd::Off };
        let roomy = case.roomy();
        let all: u64 = sections(&roomy)
            .into_iter()
            .map(|(tile, section)| tile.layout.section_slot_bytes(section, roomy.precision))
            .sum();
        // The device's is most often enough, so that the other tiers are reached.
        let given = budgets(
            roomy.map.bytes * device.min(100) / 100,
            roomy.host.bytes * host / 100,
            all * store / 100,
        );
        match case.plan(given) {
            Ok(plan) => {
                check_homes(&plan)?;
                check_regions(&plan)?;
                check_spare(&case, &plan)?;
                prop_assert_eq!(case.plan(given).unwrap(), plan);
            }
            Err(error) => check_refusal(&case, given, &error)?,
        }
    }

    #[test]
    fn a_forward_only_plan_holds_weights_alone(
        case in cases(),
        host in 0u64..=110,
        device in 0u64..=100,
    ) {
        let plan = |given| case.plan_for(given, Purpose::Forward);
        let roomy = plan(budgets(PLENTY, PLENTY, 0)).unwrap();
        let given = budgets(roomy.map.bytes * device / 100, roomy.host.bytes * host / 100, PLENTY);
        match plan(given) {
            Ok(plan) => {
                prop_assert!(plan.host.bytes <= given.host && plan.map.bytes <= given.device);
                prop_assert!(plan.kept.is_empty());
                let states = |tile: &TilePlan| tile.homes[1..].iter().any(Option::is_some);
                let weights = !plan.tiles.iter().any(states);
                prop_assert!(weights);
            }
            Err(Error::Budget { tier, missing, remedy, .. }) => {
                check_largest(&case, given.device, &remedy, Purpose::Forward)?;
                let mut more = given;
                *(if tier == "device" { &mut more.device } else { &mut more.host }) += missing;
                let again = plan(more);
                let same = matches!(again, Err(Error::Budget { tier: other, .. }) if other == tier);
                prop_assert!(!same, "{tier} is refused again");
            }
            Err(error) => return Err(TestCaseError::fail(format!("{error}"))),
        }
    }
}

/// A full drive was answered by the advice to name a directory, which was named.
#[test]
fn a_store_without_space_is_not_called_missing() {
    let mut case = Case {
        spec: support::spec(3, 16, 17, false),
        config: support::config(32, 2),
        choice: Choice::default(),
    };
    // The device has no room to spare either.
    case.config.memory.recompute = Recompute::All;
    let roomy = case.roomy();
    let given = budgets(roomy.map.bytes, roomy.host.bytes - 1, 0);
    let refusal = |case: &Case| case.plan(given).unwrap_err().to_string();
    assert!(refusal(&case).contains("; name a directory on NVMe in memory.store, or raise"));
    case.config.memory.store = vec![StorePath::new("full".into())];
    let named = "; memory.store has no space in full: make some, name another directory, or raise \
                 memory.host by ";
    assert!(refusal(&case).contains(named), "{}", refusal(&case));
}

#[test]
fn what_a_cards_kernels_do_not_take_is_refused_by_the_plan() {
    let card = DeviceProfile::cuda("gpu", 0, Precision::Bf16);
    let plan = |hidden: u64, seq_len: u64| {
        let mut spec = support::spec(1, 16, 17, false);
        (spec.hidden, spec.max_positions) = (hidden, seq_len);
        let config = support::config(seq_len, 1);
        let plenty = budgets(PLENTY, PLENTY, 0);
        Plan::new(&spec, &config, &card, plenty, Purpose::Train)
    };
    assert!(plan(16, (1 << 20) - 1).is_ok() && plan(16_384, 32).is_ok());
    let wide = plan(16_392, 32).unwrap_err().to_string();
    assert!(
        wide.contains("hidden_size on a card") && wide.contains("at most 16384"),
        "{wide}"
    );
    let long = plan(16, 1 << 20).unwrap_err().to_string();
    assert!(
        long.contains("at most 1048575 tokens of a micro-batch"),
        "{long}"
    );
}

#[test]
fn a_drive_takes_spilled_bytes_and_commits_spread_over_their_steps() {
    let mut case = Case {
        spec: support::spec(3, 16, 17, false),
        config: support::config(32, 2),
        choice: Choice::default(),
    };
    case.config.checkpoint.every = 4;
    case.config.checkpoint.keep = 2;
    case.config.train.steps = Some(100);
    case.config.memory.drive_tbw = Some(0.5);
    let plan = case.roomy();
    let prediction = Prediction {
        write_bytes: 1_000_000,
        step_seconds: 2.0,
        ..Prediction::default()
    };
    let state = plan.wear.commit_bytes as f64;
    assert!(state >= 12.0 * plan.parameters as f64);
    assert_eq!(plan.checkpoint_bytes as f64, 3.0 * state);
    let rates = machine_rates();
    let wear = &plan.json(&prediction, &rates)["wear"];
    let step = 1e6 + state / 4.0;
    assert_eq!(wear["step_bytes"], step);
    let run = 3.0 * state + 100.0 * step;
    assert_eq!(wear["run_bytes"], run);
    assert_eq!(wear["run_share"], run / 0.5e12);
    assert_eq!(wear["days_of_life"], 0.5e12 / step * 2.0 / 86_400.0);
    let table = plan.table(&prediction, &rates);
    assert!(table.contains("; rated for 0.5 TB: "), "{table}");
    // Without checkpoints and a rating.
    case.config.checkpoint.every = 0;
    case.config.memory.drive_tbw = None;
    let plan = case.roomy();
    let wear = &plan.json(&prediction, &rates)["wear"];
    assert_eq!(wear["step_bytes"], 1e6);
    assert!(wear["run_share"].is_null() && wear["days_of_life"].is_null());
    let table = plan.table(&prediction, &rates);
    assert!(
        table.contains("checkpoint.every = 0") && !table.contains("rated"),
        "{table}"
    );
}

/// Layers whose anchors find no room in host have them in the store, where a step writes and reads
/// them once, and the prediction gives them the disk's time.
#[test]
fn anchors_of_the_store_are_counted() {
    let mut case = Case {
        spec: support::spec(6, 16, 17, false),
        config: support::config(64, 2),
        choice: Choice::default(),
    };
    case.config.memory.recompute = Recompute::All;
    case.config.train.max_grad_norm = 0.0;
    case.config.checkpoint.every = 0;
    let roomy = case.roomy();
    let row = roomy.map.anchor_bytes * 2;
    let device = roomy.map.bytes - 4 * row;
    let place = 2 * roomy.map.anchor_bytes.next_multiple_of(4096);
    let host = roomy.host.bytes + 4 * place;
    let in_host = case.plan(budgets(device, host, PLENTY)).unwrap();
    assert_eq!((in_host.stored_anchors, in_host.spills()), (0, false));
    // Where states are in the store too, anchors follow them, as few as are too many.
    let states: u64 = sections(&roomy)
        .into_iter()
        .filter(|(_, section)| *section != Section::Weight)
        .map(|(tile, section)| tile.layout.section_slot_bytes(section, roomy.precision))
        .sum();
    for (lack, stored) in [(0, 0), (1, 1), (place, 1), (place + 1, 2), (4 * place, 4)] {
        let plan = case.plan(budgets(device, host - states - lack, PLENTY));
        let plan = plan.unwrap();
        assert_eq!(plan.stored_anchors, stored, "{lack} of {place}");
        assert_eq!(plan.stored_anchor_bytes(), u64::from(stored) * place);
    }
    // Or they are there because that was chosen.
    case.choice.stored_anchors = 3;
    let plan = case
        .plan(budgets(device, host - 3 * place, PLENTY))
        .unwrap();
    assert_eq!((plan.stored_anchors, plan.spilled_bytes), (3, 0));
    assert_eq!(plan.tiers()[2], ("store", 3 * place, PLENTY));
    let mut rates = machine_rates();
    let predict = |plan: &Plan, rates: &Rates| simulate(plan, &Schedule::train(plan), rates);
    let prediction = predict(&plan, &rates);
    let bytes = 3 * row;
    assert_eq!(
        (prediction.write_bytes, prediction.read_bytes),
        (bytes, bytes)
    );
    let seconds = bytes as f64 / rates.store_write + bytes as f64 / rates.store_read;
    assert!((prediction.store_seconds / seconds - 1.0).abs() < 1e-9);
    let wear = &plan.json(&prediction, &rates)["wear"];
    assert_eq!(wear["step_bytes"], bytes as f64);
    assert!(plan.table(&prediction, &rates).contains("anchors between"));
    // A disk that is slow enough is what the step takes.
    (rates.store_write, rates.store_read) = (1e3, 1e3);
    let slow = predict(&plan, &rates);
    assert!(slow.step_seconds >= slow.store_seconds && slow.bound() == "store");
    // No room in the store.
    case.choice.stored_anchors = 0;
    let refusal = case.plan(budgets(device, host - states - 4 * place, states + place));
    let refusal = refusal.unwrap_err().to_string();
    let said = format!("{} bytes of it are anchors", 4 * place);
    assert!(refusal.contains(&said), "{refusal}");
}

/// Where not all activations fit whole, more of them are kept without what passes give back; what
/// room is left then makes some of them whole.
#[test]
fn activations_are_kept_lean_before_few_are_kept_whole() {
    let mut case = Case {
        spec: support::spec(3, 16, 17, false),
        config: support::config(32, 2),
        choice: Choice::default(),
    };
    case.config.memory.recompute = Recompute::All;
    let least = case.roomy().map;
    case.config.memory.recompute = Recompute::Auto;
    let (lean, whole) = (least.workspace.lean_bytes, least.workspace.bytes);
    assert!(lean < whole && whole < 2 * lean);
    for (room, kept, of_them_lean) in [
        (0, 0, 0),
        (lean - 1, 0, 0),
        (lean, 1, 1),
        (whole, 1, 0),
        (2 * lean, 2, 2),
        (5 * lean + whole - lean, 5, 4),
        (6 * lean, 6, 6),
        (5 * whole + lean, 6, 1),
        (6 * whole, 6, 0),
        (9 * whole, 6, 0),
    ] {
        let plan = case.plan(budgets(least.bytes + room, PLENTY, 0)).unwrap();
        let got = (plan.kept.len(), plan.map.shape.lean);
        assert_eq!(got, (kept, of_them_lean), "{room} bytes");
        assert_eq!(plan.map.shape.kept, kept as u64);
        let text = plan.table(&Default::default(), &machine_rates());
        let told = text.contains(&format!("{of_them_lean} of them without"));
        assert_eq!(told, of_them_lean > 0, "{text}");
    }
    // "none" is served by lean ones alone.
    case.config.memory.recompute = Recompute::None;
    let plan = case.plan(budgets(least.bytes + 6 * lean, PLENTY, 0));
    assert_eq!(plan.unwrap().map.shape.lean, 6);
    // What is given back takes passes, and no products.
    let rates = Rates {
        passes: 1e9,
        ..machine_rates()
    };
    let seconds = |room: u64| {
        let plan = case.plan(budgets(least.bytes + room, PLENTY, 0)).unwrap();
        let prediction = simulate(&plan, &Schedule::train(&plan), &rates);
        (prediction.executed_flops, prediction.compute_seconds)
    };
    let (some, none) = (seconds(6 * lean), seconds(6 * whole));
    let elements = (4.0 * 16.0 + 3.0 * 56.0) * 32.0 * 6.0;
    assert_eq!(some.0, none.0);
    assert!((some.1 - none.1 - elements * 4.0 / 1e9).abs() < 1e-12);
}

/// Twelve blocks in four micro-batches, without clipping and with nothing kept.
fn unclipped(hidden: u64, seq_len: u64) -> Case {
    let mut case = Case {
        spec: support::spec(12, hidden, 17, false),
        config: support::config(seq_len, 4),
        choice: Choice::default(),
    };
    case.config.train.max_grad_norm = 0.0;
    case.config.memory.recompute = Recompute::All;
    case
}

/// Rates of a machine whose disk does so many bytes a second, either way and both ways.
fn beside(disk: f64) -> Rates {
    Rates {
        store_mixed: disk,
        store_read: disk,
        store_write: disk,
        ..machine_rates()
    }
}

/// A step whose disk works only while the updates of neighbours run, and then has nothing to do,
/// took 33 s where the disk alone takes 25.
#[test]
fn what_spills_is_spread_where_the_disk_then_always_has_work() {
    let case = unclipped(16, 64);
    let roomy = case.roomy();
    let moments: u64 = roomy
        .tiles
        .iter()
        .map(|tile| 8 * tile.layout.elements)
        .sum();
    let given = budgets(roomy.map.bytes, roomy.host.bytes - moments / 3, PLENTY);
    let plan = |spread| {
        let mut case = case.clone();
        case.choice.order = match spread {
            true => SpillOrder::Spread,
            false => SpillOrder::LastFirst,
        };
        case.plan(given).unwrap()
    };
    let (last, spread) = (plan(false), plan(true));
    let spilling = |plan: &Plan| -> Vec<bool> {
        let of_block = |tile: &TilePlan| tile.spilled().next().is_some();
        plan.tiles[1..=12].iter().map(of_block).collect()
    };
    assert!(spilling(&last).is_sorted(), "{:?}", spilling(&last));
    // Of neighbours one at least, and no more in one half than in the other by two.
    let of = spilling(&spread);
    assert!(of.windows(2).all(|pair| pair[0] || pair[1]), "{of:?}");
    let count = |half: &[bool]| half.iter().filter(|spills| **spills).count();
    assert!(count(&of[..6]).abs_diff(count(&of[6..])) <= 2, "{of:?}");
    assert!(last.spilled_bytes.abs_diff(spread.spilled_bytes) < moments / 20);
    // Arithmetic takes half as long as the disk.
    let mut rates = machine_rates();
    let predict = |plan: &Plan, rates: &Rates| simulate(plan, &Schedule::train(plan), rates);
    let compute = predict(&last, &rates).compute_seconds;
    let moved = 2.0 * last.spilled_bytes as f64;
    rates.store_mixed = moved / (2.0 * compute);
    (rates.store_read, rates.store_write) = (rates.store_mixed, rates.store_mixed);
    let device = DeviceProfile::cpu();
    let (_, prediction) = fastest(&case.spec, &case.config, &device, given, &rates).unwrap();
    let other = predict(&last, &rates).step_seconds;
    let of_spread = predict(&spread, &rates).step_seconds;
    assert!(of_spread < 0.95 * other, "{of_spread} of {other}");
    assert!(prediction.step_seconds <= of_spread);
    let disk = predict(&spread, &rates).store_seconds;
    assert!(
        prediction.step_seconds < 1.25 * disk,
        "{} of {disk}",
        prediction.step_seconds
    );
}

/// 14.77 B parameters beside 112 GiB of host took 29.8 s a step with 32 GiB of moments on a disk,
/// while a card kept 70 GiB of activations.
#[test]
fn states_live_on_a_card_where_that_is_faster_than_a_disk_and_nowhere_else() {
    let mut case = Case {
        spec: support::spec(12, 64, 17, false),
        config: support::config(64, 4),
        choice: Choice::default(),
    };
    case.config.train.max_grad_norm = 0.0;
    let roomy = case.roomy();
    let states: u64 = roomy.tiles.iter().map(|t| 10 * t.layout.elements).sum();
    let mut least = case.clone();
    least.config.memory.recompute = Recompute::All;
    let (least, host) = (least.roomy().map.bytes, roomy.host.bytes - states / 2);
    let (card, cpu) = (
        DeviceProfile::cuda("card", 0, Precision::Bf16),
        DeviceProfile::cpu(),
    );
    let made = |device: &DeviceProfile, store, rates: &Rates| {
        let given = budgets(least + states + device.fixed_bytes, host, store);
        fastest(&case.spec, &case.config, device, given, rates)
    };
    let with = |disk, link| Rates {
        promote: link,
        demote: link,
        shared_cores: false,
        ..beside(disk)
    };
    let (plan, _) = made(&card, PLENTY, &with(1e6, 1e9)).unwrap();
    assert!(plan.states_on_device() && plan.spilled_bytes < states / 8);
    // Without any disk.
    let (mut plan, _) = made(&card, 0, &with(1e6, 1e9)).unwrap();
    assert!(plan.states_on_device() && !plan.spills());
    // With few slabs nothing goes on at once.
    let seconds = |plan: &Plan| {
        let rates = with(1e6, 1e8);
        simulate(plan, &Schedule::train(plan), &rates).step_seconds
    };
    let (at_once, one) = (seconds(&plan), std::mem::replace(&mut plan.host.slabs, 4));
    assert!(one >= 9 && seconds(&plan) > 1.3 * at_once, "{at_once}");
    // Copies that are slower than the disk.
    let (plan, _) = made(&card, PLENTY, &with(1e12, 1e5)).unwrap();
    assert!(!plan.states_on_device() && plan.spills());
    // The CPU device's memory is RAM too.
    let (plan, _) = made(&cpu, PLENTY, &with(1e6, 1e9)).unwrap();
    assert!(!plan.states_on_device() && plan.spills());
    assert!(made(&cpu, 0, &with(1e6, 1e9)).is_err());
}

/// 14.77 B parameters on one card took 62.5 s a step of 256k tokens beside a disk that others used
/// too, with 46 GiB of moments on it and 123 GiB of anchors on the card; 47.3 s with fewer of both.
#[test]
fn anchors_are_computed_again_where_that_is_faster_than_a_disk_or_all_that_fits() {
    let case = unclipped(64, 512);
    let roomy = case.roomy();
    let row = roomy.map.anchor_bytes * 4;
    let weights: u64 = roomy.tiles.iter().map(|t| 2 * t.layout.elements).sum();
    let made = |case: &Case, store, disk| {
        let rates = beside(disk);
        let given = budgets(roomy.map.bytes, roomy.host.bytes - weights / 2, store);
        let device = DeviceProfile::cpu();
        fastest(&case.spec, &case.config, &device, given, &rates)
    };
    let rebuilt = |made: Result<(Plan, Prediction), Error>| made.unwrap().0.map.shape.rebuilt;
    let (plan, prediction) = made(&case, PLENTY, 1e6).unwrap();
    let few = plan.map.shape.rebuilt;
    assert!(few > 0 && u64::from(few) * row < weights + row, "{few}");
    assert!(plan.map.bytes <= roomy.map.bytes && plan.spilled_bytes < weights / 4);
    assert!(plan.table(&prediction, &machine_rates()).contains(&format!(
        "anchors of {few} of 12 blocks take no device memory"
    )));
    assert_eq!(rebuilt(made(&case, PLENTY, 1e15)), 0);
    // Without any disk.
    assert!(rebuilt(made(&case, 0, 1e6)) > 0);
    // Weights of two blocks are needed at once.
    let mut single = case.clone();
    single.config.memory.buffers = 1;
    assert!(made(&single, 0, 1e6).is_err());
}

/// What fits only with anchors that are computed again, and spills: states live on a card, and
/// fewer are computed again, where that is faster.
#[test]
fn what_fits_no_other_way_is_chosen_by_seconds_too() {
    let case = unclipped(64, 512);
    let card = DeviceProfile::cuda("card", 0, Precision::Bf16);
    let plan = |given, choice| {
        let (spec, config) = (&case.spec, &case.config);
        Plan::choosing(spec, config, &card, given, Purpose::Train, choice)
    };
    let roomy = plan(budgets(PLENTY, PLENTY, 0), Choice::default()).unwrap();
    let weights: u64 = roomy.tiles.iter().map(|t| 2 * t.layout.elements).sum();
    let device = roomy.map.bytes + card.fixed_bytes;
    let given = |store| budgets(device, roomy.host.bytes - weights, store);
    let found = |store, disk| {
        let rates = beside(disk);
        let (spec, config) = (&case.spec, &case.config);
        fastest(spec, config, &card, given(store), &rates).unwrap()
    };
    let start = |states_on_device| Choice {
        states_on_device,
        ..Choice::default()
    };
    let (few, more) = (weights / 4, weights * 3 / 4);
    assert!(plan(given(few), start(false)).is_err() && plan(given(few), start(true)).is_err());
    let (found_few, _) = found(few, 1e6);
    assert!(found_few.states_on_device() && !found_few.spills());
    let (found_more, _) = found(more, 1e12);
    let rebuilt = found_more.map.shape.rebuilt;
    assert!(rebuilt < found_few.map.shape.rebuilt, "{rebuilt}");
}

/// AdamW was predicted as if copies to and from the device, which use the same memory, were not
/// there: 18 % too fast on a server whose step it bounds.
#[test]
fn copies_beside_adamw_delay_it() {
    let mut case = Case {
        spec: support::spec(6, 16, 17, false),
        config: support::config(32, 2),
        choice: updating(Deferred { first: 8, last: 0 }),
    };
    case.config.train.max_grad_norm = 0.0;
    case.config.memory.recompute = Recompute::All;
    let plan = case.roomy();
    let rates = Rates {
        gemm: 1e15,
        attention: 1e15,
        passes: 1e15,
        ..machine_rates()
    };
    let schedule = Schedule::train(&plan);
    let predict = |rates: &Rates| simulate(&plan, &schedule, rates);
    let slow = Rates {
        adamw: 1e7,
        ..rates
    };
    let prediction = predict(&slow);
    let memory = slow.adamw * 26.0;
    let copied = (prediction.promote_bytes + prediction.demote_bytes) as f64;
    let (alone, most) = (prediction.update_seconds, copied / memory);
    assert!(most > 0.1 * alone, "{prediction:?}");
    let delay = prediction.step_seconds - alone;
    assert!(
        delay > 0.3 * most && delay < 1.01 * most,
        "{delay} of {most}"
    );
    // A memory that has rate to spare is not felt.
    let fast = predict(&Rates {
        adamw: 1e15,
        ..rates
    });
    assert!(fast.step_seconds < 1.01 * (fast.promote_seconds + fast.demote_seconds));
}

/// Updates and anchors ask for the disk at different times of a step: which of them is in the store
/// is chosen by predicted seconds.
#[test]
fn anchors_take_the_place_of_states_in_the_store_where_that_is_faster() {
    let spec = support::spec(6, 16, 17, false);
    let mut config = support::config(64, 8);
    config.memory.recompute = Recompute::All;
    config.train.max_grad_norm = 0.0;
    let case = Case {
        spec: spec.clone(),
        config: config.clone(),
        choice: Choice::default(),
    };
    let roomy = case.roomy();
    let row = roomy.map.anchor_bytes * 8;
    let given = budgets(roomy.map.bytes - 4 * row, roomy.host.bytes, PLENTY);
    let mut rates = machine_rates();
    (rates.store_write, rates.store_read, rates.store_mixed) = (1e8, 1e8, 1e6);
    rates.gemm = 1e9;
    let device = DeviceProfile::cpu();
    let default = case.plan(given).unwrap();
    assert!(default.stored_anchors < 4 && default.spilled_bytes > 0);
    let before = simulate(&default, &Schedule::train(&default), &rates);
    let (plan, prediction) = fastest(&spec, &config, &device, given, &rates).unwrap();
    assert!(plan.stored_anchors > default.stored_anchors);
    assert!(prediction.step_seconds < before.step_seconds * 0.99);
    // Where it is not, states are.
    (rates.store_write, rates.store_read, rates.store_mixed) = (1e9, 1e9, 1e9);
    let (plan, _) = fastest(&spec, &config, &device, given, &rates).unwrap();
    assert_eq!(plan.stored_anchors, default.stored_anchors);
}

/// A card beside a host that lacks half of a model's moments, and what the plan makes of `rates`.
fn spilling(
    device: &DeviceProfile,
    rates: &Rates,
    change: impl Fn(&mut RunConfig),
) -> (Plan, Prediction) {
    let (spec, mut config) = fixture("qwen2.5-1.5b");
    config.memory.recompute = Recompute::All;
    change(&mut config);
    let plenty = budgets(PLENTY, PLENTY, PLENTY);
    let roomy = Plan::new(&spec, &config, device, plenty, Purpose::Train).unwrap();
    // Nothing else finds room on the device.
    let least = roomy.map.bytes + device.fixed_bytes;
    let given = |host| budgets(least, host, PLENTY);
    let moments = spec.parameters() * 2 * Section::Moment1.element_bytes(roomy.precision);
    fastest(
        &spec,
        &config,
        device,
        given(roomy.host.bytes - moments / 2),
        rates,
    )
    .unwrap()
}

/// A slow disk and idle cores: that is where compression is on, and the step is shorter by it.
#[test]
fn spilled_moments_are_compressed_where_that_shortens_the_predicted_step() {
    let card = DeviceProfile::cuda("gpu", 0, Precision::Bf16);
    let auto = |_: &mut RunConfig| {};
    let slow = Rates {
        gemm: 1e14,
        attention: 1e14,
        store_read: 1.0e9,
        store_write: 1.0e9,
        store_mixed: 1.4e9,
        adamw: 5e9,
        zstd: ZstdRates {
            encode: 2e9,
            decode: 3e9,
            ratio: 0.83,
        },
        ..machine_rates()
    };
    let (plan, on) = spilling(&card, &slow, auto);
    let (unpressed, off) = spilling(&card, &slow, |c| c.memory.zstd = SpillZstd::Off);
    assert_eq!(
        (plan.host.coder_slabs, unpressed.host.coder_slabs),
        (CODERS, 0)
    );
    // The same plan without, which may have been chosen otherwise if it were not for zstd.
    let other = on.other_zstd_step_seconds.unwrap();
    let ratio = other / off.step_seconds;
    assert!((0.99..1.031).contains(&ratio), "{ratio}");
    assert_eq!(off.other_zstd_step_seconds, None);
    assert!(on.step_seconds < off.step_seconds * 0.95, "{on:?} {off:?}");
    // The coders' slabs are host's, so as many bytes more are spilled, to the next section.
    assert!(plan.host.bytes <= plan.budgets.host && plan.spilled_bytes >= unpressed.spilled_bytes);
    let ratio = on.write_bytes as f64 / plan.spilled_bytes as f64;
    assert!((0.825..0.84).contains(&ratio), "{ratio}");
    assert_eq!(on.read_bytes, on.write_bytes);
    let table = plan.table(&on, &slow);
    let seconds = format!("{other:.3} s without, by 0.83 of their bytes");
    let line = table.lines().find(|line| line.contains("zstd of spilled"));
    let line = line.unwrap();
    assert!(line.contains(": on (") && line.contains(&seconds), "{line}");
    let json = plan.json(&on, &slow);
    assert_eq!(
        (&json["zstd"]["on"], &json["host"]["coder_slabs"]),
        (&true.into(), &CODERS.into())
    );
    assert_eq!(json["zstd"]["other_step_seconds"], other);

    // bf16 moments have half the bytes and lose as many of them.
    let bf16 = |c: &mut RunConfig| c.optimizer.moments = MomentDtype::Bf16;
    let (plan, on) = spilling(&card, &slow, bf16);
    let ratio = on.write_bytes as f64 / plan.spilled_bytes as f64;
    assert!((0.65..0.68).contains(&ratio), "{ratio}");

    // Off, and the choice that is left is not faster.
    let few = Rates {
        cores: 1,
        store_mixed: 7e9,
        ..slow
    };
    let shared = Rates {
        shared_cores: true,
        cores: 2,
        gemm: 1e10,
        ..slow
    };
    let mut fast = slow;
    (fast.store_read, fast.store_write, fast.store_mixed) = (1e11, 1e11, 1e11);
    let mut incompressible = slow;
    incompressible.zstd.ratio = 1.0;
    let mut slow_coders = slow;
    (slow_coders.zstd.encode, slow_coders.zstd.decode) = (1e7, 1e7);
    let cpu = DeviceProfile::cpu();
    for (what, device, rates) in [
        ("one core", &card, few),
        ("the CPU device", &cpu, shared),
        ("a fast disk", &card, fast),
        ("incompressible", &card, incompressible),
        ("slow coders", &card, slow_coders),
    ] {
        let (plan, prediction) = spilling(device, &rates, auto);
        assert_eq!(plan.host.coder_slabs, 0, "{what}");
        let other = prediction.other_zstd_step_seconds.unwrap();
        assert!(prediction.step_seconds <= other * 1.0101, "{what}");
        assert!(
            plan.table(&prediction, &rates).contains("moments: off ("),
            "{what}"
        );
        // Unless that is asked for.
        let (plan, prediction) = spilling(device, &rates, |c| c.memory.zstd = SpillZstd::On);
        assert_eq!(plan.host.coder_slabs, CODERS, "{what}");
        // What else is chosen then is chosen with it.
        assert!(prediction.step_seconds < other * 1.01, "{what}");
    }
    // Without spilled moments there is nothing to say.
    let (spec, mut roomy) = fixture("qwen2.5-1.5b");
    roomy.memory.zstd = SpillZstd::On;
    let given = budgets(40 << 30, PLENTY, PLENTY);
    let (plan, prediction) = fastest(&spec, &roomy, &card, given, &slow).unwrap();
    assert_eq!(plan.host.coder_slabs, 0);
    assert!(!plan.table(&prediction, &slow).contains("zstd"));
}

const GB: u64 = 1_000_000_000;

/// A model of the fixtures, and a run of it.
fn fixture(model: &str) -> (ModelSpec, RunConfig) {
    let path = format!("tests/fixtures/configs/{model}/config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let spec = ModelSpec::from_config_json(&text, &path).unwrap();
    let mut config = RunConfig::default();
    (config.train.micro_batch, config.train.micro_batches) = (2, 12);
    (spec, config)
}

/// A question for a model of the fixtures on a card.
fn ask(
    model: &str,
    (device_bytes, host, store): (u64, u64, Option<u64>),
    steps: Steps,
) -> (
    ModelSpec,
    RunConfig,
    Result<Vec<suggest::Suggestion>, Error>,
) {
    let (spec, mut config) = fixture(model);
    config.memory.device = Size::Bytes(device_bytes);
    config.memory.host = Size::Bytes(host);
    let device = DeviceProfile::cuda("gpu", 0, Precision::Bf16);
    let rates = Rates {
        gemm: 600e12,
        attention: 300e12,
        passes: 3e12,
        promote: 50e9,
        demote: 50e9,
        store_read: 2e9,
        store_write: 2e9,
        store_mixed: 2e9,
        adamw: 4e9,
        ..machine_rates()
    };
    let answer = suggest(&Question {
        spec: &spec,
        config: &config,
        device: &device,
        budgets: (device_bytes, host, store),
        rates: &rates,
        steps,
    });
    (spec, config, answer)
}

/// The run that a row's lines describe, over the run that was asked about.
fn pasted(config: &RunConfig, row: &suggest::Suggestion) -> RunConfig {
    let mut text = config.to_toml();
    for line in row.toml().lines().filter(|line| line.contains(" = ")) {
        let (key, _) = line.split_once(" = ").unwrap();
        let place = text
            .lines()
            .find(|old| old.starts_with(&format!("{key} = ")));
        match place.map(str::to_string) {
            Some(old) => text = text.replace(&format!("{old}\n"), &format!("{line}\n")),
            None => text.push_str(&format!("# {line}\n")),
        }
    }
    let text = text.replace("train = []", "train = \"x\"");
    let text = text.replace("[model]", "[model]\npath = \"x\"");
    let sets = ["train.steps=1".to_string()];
    RunConfig::parse(&text, "pasted", &sets).unwrap()
}

#[test]
fn what_is_suggested_fits_its_budgets_and_can_be_pasted() {
    for model in ["qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b"] {
        for (device, host) in [(24, 64), (24, 128), (80, 512), (141, 128)] {
            let budgets = (device * GB, host * GB, Some(4000 * GB));
            let (spec, config, answer) = ask(model, budgets, Steps::Run);
            let rows = answer.unwrap();
            assert!(!rows.is_empty() && rows.len() <= 8);
            let case = format!("{model} on {device}/{host}");
            for row in &rows {
                let plan = &row.plan;
                let used = plan.map.bytes + plan.device.fixed_bytes;
                assert!(used <= budgets.0 && plan.host.bytes <= budgets.1, "{case}");
                assert!(plan.store_bytes() <= 4000 * GB, "{case}");
                let train = &row.config.train;
                let sequences = train.micro_batch * train.micro_batches;
                let same = sequences == 24 && train.max_grad_norm == 1.0;
                assert_eq!(row.same_training, same, "{case}");
                assert!([24, 48, 96].contains(&sequences), "{case}");
                // The lines give the same plan again.
                let again = pasted(&config, row);
                let (purpose, given) = (Purpose::Train, plan.budgets);
                let choice = Choice {
                    deferred: plan.deferred,
                    stored_anchors: plan.stored_anchors,
                    rebuilt_anchors: plan.map.shape.rebuilt,
                    zstd: plan.host.coder_slabs > 0,
                    order: plan.order,
                    states_on_device: plan.states_on_device(),
                };
                let made = Plan::choosing(&spec, &again, &plan.device, given, purpose, choice);
                let made = made.unwrap();
                assert_eq!(made.host, plan.host, "{case}");
                assert_eq!(
                    (made.map.bytes, made.kept.len()),
                    (plan.map.bytes, plan.kept.len())
                );
            }
            let speed = |row: &suggest::Suggestion| row.tokens_per_second();
            assert!(rows.is_sorted_by(|a, b| speed(a) >= speed(b)), "{case}");
            let preferred = &rows[suggest::preferred(&rows, &config, Steps::Run)];
            // The run's own training may not fit where another does.
            let any = rows.iter().any(|row| row.same_training);
            assert_eq!(preferred.same_training, any, "{case}");
            assert_eq!(
                any,
                (model, device) != ("qwen2.5-32b", 24) || host > 64,
                "{case}"
            );
            let schedule = Schedule::train(&preferred.plan);
            let machine = || Machine::new(&preferred.plan, &schedule, 2);
            machine().finish_in_order(ORDERS[0]).unwrap();
            machine().finish_at_random(7).unwrap();
        }
    }
}

#[test]
fn the_same_question_has_the_same_answer_and_no_way_that_it_tried_is_faster() {
    let budgets = (24 * GB, 128 * GB, None);
    let (spec, config, first) = ask("qwen2.5-7b", budgets, Steps::Run);
    let (_, _, second) = ask("qwen2.5-7b", budgets, Steps::Run);
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_eq!(suggest::table(&first), suggest::table(&second));
    assert_eq!(suggest::json(&first), suggest::json(&second));
    // Splits of the run's own step, by hand.
    let row = &first[suggest::preferred(&first, &config, Steps::Run)];
    let rates = machine_rates();
    let device = DeviceProfile::cuda("gpu", 0, Precision::Bf16);
    for micro_batch in [1, 2, 3, 4, 6, 8, 12, 24] {
        let mut other = config.clone();
        other.train.micro_batch = micro_batch;
        other.train.micro_batches = 24 / micro_batch;
        let budgets = row.plan.budgets;
        let Ok(plan) = Plan::new(&spec, &other, &device, budgets, Purpose::Train) else {
            continue;
        };
        let rates = Rates {
            gemm: 600e12,
            attention: 300e12,
            passes: 3e12,
            promote: 50e9,
            demote: 50e9,
            adamw: 4e9,
            ..rates
        };
        let seconds = simulate(&plan, &Schedule::train(&plan), &rates).step_seconds;
        assert!(
            row.prediction.step_seconds <= seconds * 1.005,
            "{micro_batch}: {seconds}"
        );
    }
}

#[test]
fn a_larger_step_is_only_told_where_it_is_faster_and_open_steps_start_small() {
    let budgets = (80 * GB, 512 * GB, None);
    let (_, config, answer) = ask("qwen2.5-1.5b", budgets, Steps::Any);
    let rows = answer.unwrap();
    let clipped = rows.iter().filter(|row| row.plan.clipping);
    let mut clipped: Vec<_> = clipped
        .map(|r| (r.prediction.tokens, r.tokens_per_second()))
        .collect();
    clipped.sort_unstable_by_key(|(tokens, _)| *tokens);
    assert!(clipped.len() > 1, "{clipped:?}");
    for pair in clipped.windows(2) {
        assert!(pair[1].1 > pair[0].1, "{clipped:?}");
    }
    assert!(
        rows[suggest::preferred(&rows, &config, Steps::Any)]
            .plan
            .clipping
    );
}

#[test]
fn where_nothing_fits_the_least_of_each_tier_is_told_and_fits() {
    let told = |model: &str, budgets| -> String {
        let (_, _, answer) = ask(model, budgets, Steps::Run);
        answer.err().unwrap().to_string()
    };
    // Host alone would do, and so would a store; a card of no more than this cannot hold a layer.
    let text = told("qwen2.5-7b", (24 * GB, 32 * GB, Some(1 << 20)));
    let (start, end) = (
        "plan: a step of 24576 tokens in the smallest micro-batches: expected at least memory.host",
        "; raise one of them, or take a smaller step or shorter sequences",
    );
    assert!(text.starts_with(start) && text.ends_with(end), "{text}");
    assert!(text.contains(", or memory.store of "), "{text}");
    assert_eq!(text.lines().count(), 1);
    let size = |after: &str| {
        let rest = text.split_once(after).unwrap().1;
        let words: Vec<&str> = rest.split([' ', ',', ';']).take(2).collect();
        match Size::parse(&words.join(" "), "least").unwrap() {
            Size::Bytes(bytes) => bytes,
            Size::Auto => unreachable!(),
        }
    };
    let (host, store) = (size("memory.host of "), size("memory.store of "));
    // Printed with three digits: a little more and a little less.
    for (budgets, fits) in [
        ((24 * GB, host + host / 100, Some(1 << 20)), true),
        ((24 * GB, host - host / 20, Some(1 << 20)), false),
        ((24 * GB, 32 * GB, Some(store + store / 100)), true),
        ((24 * GB, 32 * GB, Some(store - store / 20)), false),
    ] {
        let (_, _, answer) = ask("qwen2.5-7b", budgets, Steps::Run);
        assert_eq!(answer.is_ok(), fits, "{budgets:?}");
    }
    // No one tier is enough.
    let text = told("qwen2.5-32b", (1 << 20, 1 << 20, Some(1 << 20)));
    assert!(text.contains("at least memory.device of "), "{text}");
    assert!(text.contains(" with memory.host of ") && text.contains(" and memory.store of "));
}

/// Of an open step the largest are more tokens than a micro-batch of a card may have. That is why
/// they were not planned whole, and not why nothing fits.
#[test]
fn a_split_that_is_too_large_does_not_hide_the_tier_that_is_too_small() {
    let (_, _, answer) = ask("qwen2.5-7b", (GB, GB, Some(GB)), Steps::Any);
    let text = answer.err().unwrap().to_string();
    let start = "plan: a step of 8192 tokens in the smallest micro-batches: expected at least ";
    assert!(text.starts_with(start), "{text}");
}

fn machine_rates() -> Rates {
    Rates {
        gemm: 1e12,
        attention: 1e12,
        passes: 1e12,
        promote: 1e10,
        demote: 1e10,
        store_read: 1e9,
        store_write: 1e9,
        store_mixed: 1e9,
        adamw: 1e9,
        shared_cores: false,
        cores: 16,
        zstd: ZstdRates::ASSUMED,
    }
}

/// A plan whose host lacks `lack` percent of what can live on the device, which has room for
/// `spare` percent of it and for `kept` activations, but lacks `travelling` rows of anchors: what
/// is computed again is of these.
fn crowded(case: &Case, [kept, lack, spare]: [u64; 3], travelling: u16) -> Plan {
    let mut case = case.clone();
    case.config.memory.recompute = Recompute::All;
    let roomy = case.roomy();
    let weight = Section::Weight.element_bytes(roomy.precision);
    let last = roomy.tiles.len() - 1;
    let tiles = roomy.tiles.iter().enumerate();
    let movable: u64 = tiles
        .map(|(layer, tile)| {
            let waits = u64::from(tile.gradient == GradientHome::Host);
            let block = u64::from(layer > 0 && layer < last);
            tile.layout.elements * (waits * roomy.gradient_bytes + block * weight)
        })
        .sum();
    let row = roomy.map.anchor_bytes * roomy.map.shape.micros;
    let host = roomy.host.bytes - movable * lack / 100;
    let rows = match travelling {
        0 => roomy.map.bytes,
        travelling => case.rebuilding(0).roomy().map.bytes - row * u64::from(travelling),
    };
    case.config.memory.recompute = Recompute::Auto;
    let device = rows + movable * spare / 100 + kept * roomy.map.workspace.bytes;
    case.plan(budgets(device, host, PLENTY))
        .expect("the store has room")
}

/// A plan with some activations kept.
fn keeping(case: &Case, kept: u64) -> Plan {
    let mut case = case.clone();
    case.config.memory.recompute = Recompute::All;
    let least = case.roomy().map;
    case.config.memory.recompute = Recompute::Auto;
    let device = least.bytes + kept * least.workspace.bytes;
    case.plan(budgets(device, PLENTY, 0))
        .expect("everything fits")
}

fn schedules(plan: &Plan) -> Vec<Schedule> {
    let micros = plan.map.shape.micros as u32;
    vec![
        Schedule::train(plan),
        Schedule::forward_only(plan, Form::Evaluate, micros),
        Schedule::forward_only(plan, Form::Generate, 1),
    ]
}

fn weights_on_device(plan: &Plan) -> usize {
    let weight = Section::Weight as usize;
    let homes = plan.map.homes.iter().map(|of| of[weight]);
    homes.flatten().count()
}

/// Actions of a step: each term is one kind of action, or those of one loop.
fn action_count(plan: &Plan, schedule: &Schedule) -> u64 {
    let (blocks, micros) = (u64::from(plan.blocks), u64::from(schedule.micros));
    let here = weights_on_device(plan) as u64;
    let parked = plan.map.parked.iter().flatten().count() as u64;
    let forward = micros + 2 * (blocks + 1) - here + blocks * micros + micros;
    if schedule.form != Form::Train {
        return forward;
    }
    let promotes = (blocks - here).saturating_sub(plan.map.shape.buffers);
    let clears = blocks + 2;
    let spills = plan.tiles[0].spilled().next().is_some();
    let waits = plan.tiles[0].gradient != GradientHome::Shared;
    let rows = u64::from(waits && !spills);
    let anchors = 2 * u64::from(plan.map.shape.travelling) * micros;
    let rebuilt = u64::from(plan.map.shape.rebuilt) * (1 + micros);
    let finished = 3 * (blocks + 2) + parked + 2 * here + rows + anchors + rebuilt;
    let backward = promotes + blocks + blocks * micros + micros + clears + finished;
    forward + backward + u64::from(plan.clipping)
}

/// Lane orders: each lane first, and each last.
const ORDERS: [[usize; 5]; 10] = [
    [0, 1, 2, 3, 4],
    [1, 0, 2, 3, 4],
    [2, 3, 4, 0, 1],
    [3, 4, 2, 1, 0],
    [4, 3, 2, 1, 0],
    [1, 2, 3, 4, 0],
    [0, 2, 3, 4, 1],
    [0, 1, 3, 4, 2],
    [4, 1, 0, 2, 3],
    [1, 3, 2, 0, 4],
];

fn replay(plan: &Plan, schedule: &Schedule, seed: u64) -> Result<(), String> {
    for order in ORDERS {
        Machine::new(plan, schedule, STEPS).finish_in_order(order)?;
    }
    for round in 0..4 {
        Machine::new(plan, schedule, STEPS).finish_at_random(seed ^ round)?;
    }
    Ok(())
}

/// Interleavings in which `late` starts before `early` has ended.
fn replay_reversed(
    plan: &Plan,
    schedule: &Schedule,
    early: At,
    late: At,
    seed: u64,
) -> Result<(), String> {
    for way in 0..3 {
        let mut machine = Machine::new(plan, schedule, STEPS);
        match way {
            0 => {
                machine.start_early(late)?;
                machine.end(late)?;
            }
            1 => {
                machine.start_early(early)?;
                machine.start_early(late)?;
                machine.end(late)?;
            }
            _ => {
                machine.start_early(late)?;
                machine.start_early(early)?;
                machine.end(early)?;
            }
        }
        machine.finish_at_random(seed)?;
    }
    Ok(())
}

/// Kind of an action, for the table of waits.
fn kind(action: Action) -> String {
    let text = format!("{action:?}");
    text.split([' ', '{'])
        .next()
        .unwrap_or_default()
        .to_string()
}

/// What came of taking out each wait.
#[derive(Default)]
struct Waits {
    caught: u64,
    /// Kinds of waits that other paths imply, with their count.
    implied: BTreeMap<String, u64>,
    /// Waits that nothing implies and no interleaving missed.
    needless: Vec<String>,
}

fn take_out_each(plan: &Plan, schedule: &Schedule, seed: u64, waits: &mut Waits) {
    for index in 0..schedule.actions.len() {
        for wait in 0..schedule.actions[index].after.len() {
            let mut mutated = schedule.clone();
            let after = mutated.actions[index].after.remove(wait);
            let (early, late) = (
                (1 - u64::from(after.previous), after.action as usize),
                (1, index),
            );
            let name = format!(
                "{:?} {} after {}{}",
                schedule.form,
                kind(schedule.actions[index].action),
                if after.previous {
                    "the previous step's "
                } else {
                    ""
                },
                kind(schedule.actions[after.action as usize].action),
            );
            if ancestors(&mutated, late).contains(&early) {
                *waits.implied.entry(name).or_default() += 1;
            } else if replay_reversed(plan, &mutated, early, late, seed).is_ok() {
                waits
                    .needless
                    .push(format!("{name} ({index} after {})", after.action));
            } else {
                waits.caught += 1;
            }
        }
    }
}

proptest! {
    #![proptest_config(random_cases(128))]

    #[test]
    fn a_schedule_is_right_under_every_interleaving(
        case in cases(),
        kept in 0u64..=24,
        lack in 0u64..=100,
        spare in 0u64..=120,
        travelling in 0u16..=4,
        stored in 0u16..=4,
        seed: u64,
    ) {
        let mut case = case;
        case.choice.stored_anchors = stored;
        let travelling = travelling.min(travelling_max(case.spec.blocks));
        let spare = if travelling > 0 { 0 } else { spare };
        let kept = if travelling > 0 { 0 } else { kept };
        let plan = crowded(&case, [kept, lack, spare], travelling);
        if case.config.memory.recompute != Recompute::None {
            let shape = plan.map.shape;
            let spared = shape.travelling + shape.rebuilt;
            prop_assert!(spared == travelling || spared > travelling && shape.travelling == 0);
        }
        check_regions(&plan)?;
        check_gradients(&plan)?;
        for block in 0..=plan.blocks {
            for micro in 0..=case.config.train.micro_batches as u32 {
                let slot = plan.kept.iter().position(|pair| *pair == (block, micro));
                prop_assert_eq!(plan.kept_slot(block, micro), slot.map(|slot| slot as u32));
            }
        }
        for schedule in schedules(&plan) {
            prop_assert_eq!(schedule.actions.len() as u64, action_count(&plan, &schedule));
            for (index, scheduled) in schedule.actions.iter().enumerate() {
                let mut after = scheduled.after.iter();
                let ordered = after.all(|a| a.previous || (a.action as usize) < index);
                prop_assert!(ordered, "an action is after a later one");
            }
            let replayed = replay(&plan, &schedule, seed);
            prop_assert_eq!(replayed, Ok(()));
        }
    }
}

#[test]
fn every_wait_is_needed_or_implied_by_others() {
    let mut waits = Waits::default();
    let (mut homes, mut parked, mut rows, mut anchors) = (0, 0, 0, 0);
    for (blocks, micros, buffers) in [
        (1, 1, 1),
        (2, 2, 1),
        (3, 1, 2),
        (5, 2, 2),
        (4, 2, 3),
        (3, 2, 8),
        (4, 6, 2),
    ] {
        for (tied, norm) in [(false, 0.0), (false, 1.0), (true, 0.0), (true, 1.0)] {
            let mut config = support::config(32, micros);
            config.memory.buffers = buffers;
            config.train.max_grad_norm = norm;
            let spec = support::spec(blocks, 16, 17, tied);
            let case = |first, last| Case {
                spec: spec.clone(),
                config: config.clone(),
                choice: updating(Deferred { first, last }),
            };
            let stored = |case: Case, stored_anchors| Case {
                choice: Choice {
                    stored_anchors,
                    ..case.choice
                },
                ..case
            };
            // All in host; gradients on the device; weights too; updates in both orders.
            let plans = [
                keeping(&case(0, 0), 1),
                keeping(&case(1, 2), 1),
                crowded(&case(blocks + 2, 0), [1, 40, 120], 0),
                crowded(&case(2, 1), [0, 90, 120], 0),
                crowded(&case(1, 0), [0, 0, 0], travelling_max(blocks)),
                crowded(&stored(case(1, 0), 2), [0, 0, 0], travelling_max(blocks)),
                keeping(&case(2, 1).rebuilding(1), 1),
                crowded(&case(blocks + 2, 0).rebuilding(9), [0, 90, 120], 0),
            ];
            for plan in plans {
                anchors += plan.stored_anchors;
                homes += weights_on_device(&plan);
                parked += plan.map.parked.iter().flatten().count();
                let in_row = |layer: &u16| plan.map.waits_in_row(*layer);
                rows += (0..plan.layer_count()).filter(in_row).count();
                for schedule in schedules(&plan) {
                    take_out_each(&plan, &schedule, 7, &mut waits);
                }
            }
        }
    }
    println!("{} waits were missed when taken out", waits.caught);
    for (name, count) in &waits.implied {
        println!("implied by others: {count:4} × {name}");
    }
    assert_eq!(
        waits.needless,
        Vec::<String>::new(),
        "nothing needs these waits"
    );
    assert!(waits.caught > 500);
    assert!(
        homes > 10 && parked > rows + 10 && rows > 10 && anchors > 10,
        "{homes} weights, {parked} gradients, {rows} in rows, {anchors} layers of anchors"
    );
}

#[test]
fn the_machine_sees_a_schedule_without_any_wait_between_lanes() {
    let case = Case {
        spec: support::spec(3, 16, 17, false),
        config: support::config(32, 2),
        choice: Choice::default(),
    };
    let plan = keeping(&case, 0);
    let mut schedule = Schedule::train(&plan);
    for scheduled in &mut schedule.actions {
        scheduled.after.clear();
    }
    for lane in [Lane::Compute, Lane::Up, Lane::Down, Lane::Update] {
        let mut order = [0, 1, 2, 3, 4];
        order.swap(0, lane as usize);
        let replayed = Machine::new(&plan, &schedule, STEPS).finish_in_order(order);
        assert!(replayed.is_err(), "{lane:?} first");
    }
}
