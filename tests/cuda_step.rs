//! Goal: a card trains. Where bytes live, what is recomputed and how many buffers there are changes
//! no bit there either; in fp32 its losses are the CPU device's, in bf16 they are close to them.
//!
//! Method: the golden cases' ten steps, with clipping and without, on plans that differ; losses,
//! norms and masters are compared by their bits. Ten steps against PyTorch are `golden_step`'s,
//! with `TERRACE_TEST_DEVICE=cuda:0`. Without a card the tests say so and pass.

#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

mod support;

use support::{Case, config, masters, numbers, settings};
use terrace::config::Recompute;
use terrace::device::cuda::card_count;
use terrace::device::{Device, Dtype, View};
use terrace::plan::{Budgets, DeviceProfile, Plan, Purpose};
use terrace::tile::{GradientDtype, Precision};
use terrace::train::{Budget, build_engine};

/// How a run differs from another.
#[derive(Clone, Copy, Debug)]
struct Variant {
    buffers: u64,
    recompute: Recompute,
}

const VARIANTS: [Variant; 4] = [
    Variant {
        buffers: 2,
        recompute: Recompute::Auto,
    },
    Variant {
        buffers: 2,
        recompute: Recompute::Auto,
    },
    Variant {
        buffers: 1,
        recompute: Recompute::All,
    },
    Variant {
        buffers: 3,
        recompute: Recompute::None,
    },
];

/// What a run came to.
struct Run {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: Vec<(String, Vec<f64>)>,
    /// Mean loss of the first step's micro-batches, evaluated at the end.
    evaluated: f64,
}

fn has_card() -> bool {
    match card_count() {
        Ok(0) => println!("SKIP: the driver sees no card"),
        Err(error) => println!("SKIP: {error}"),
        Ok(_) => return true,
    }
    false
}

fn run(
    case: &Case,
    profile: &DeviceProfile,
    precision: Precision,
    max_grad_norm: f64,
    variant: Variant,
) -> Run {
    let steps = case.step_micros();
    let mut config = config(precision, &steps.concat());
    config.train.micro_batches = steps[0].len() as u64;
    config.train.max_grad_norm = max_grad_norm;
    config.memory.buffers = variant.buffers;
    config.memory.recompute = variant.recompute;
    if precision == Precision::Bf16 {
        config.train.gradient_dtype = GradientDtype::Bf16;
    }
    let budgets = Budgets {
        device: 1 << 30,
        host: 1 << 30,
        store: 0,
    };
    let budget = Budget {
        budgets,
        store: Vec::new(),
        sentences: Vec::new(),
    };
    let plan = Plan::new(&case.spec, &config, profile, budgets, Purpose::Train).unwrap();
    let (mut engine, sentences) = build_engine(&case.spec, &config, plan, &budget, false).unwrap();
    for sentence in sentences {
        println!("{sentence}");
    }
    case.initialise(&engine);
    let rates = numbers(&case.record["training"]["learning_rates"]);
    let first = steps[0].clone();
    let mut results = Vec::new();
    for (index, (micros, rate)) in steps.into_iter().zip(rates).enumerate() {
        let settings = settings(&config, index as u64 + 1, rate);
        results.push(engine.train_step(micros, settings).unwrap());
    }
    let (sum, targets) = engine.evaluate(first).unwrap();
    Run {
        losses: results.iter().map(|result| result.loss).collect(),
        norms: results.iter().map(|result| result.grad_norm).collect(),
        weights: masters(&engine).into_iter().collect(),
        evaluated: sum / targets as f64,
    }
}

fn bits(numbers: &[f64]) -> Vec<u64> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

#[test]
fn placement_changes_no_bit_on_a_card() {
    if !has_card() {
        return;
    }
    for name in ["llama31", "qwen2", "qwen3"] {
        let case = Case::open(name);
        for precision in [Precision::Bf16, Precision::Fp32] {
            for max_grad_norm in [0.0, 1.0] {
                let card = DeviceProfile::cuda("card", 0, precision);
                let of = |variant| run(&case, &card, precision, max_grad_norm, variant);
                let first = of(VARIANTS[0]);
                for variant in &VARIANTS[1..] {
                    let other = of(*variant);
                    let what = format!("{name} {precision:?} {max_grad_norm} {variant:?}");
                    assert_eq!(bits(&first.losses), bits(&other.losses), "{what}: losses");
                    assert_eq!(bits(&first.norms), bits(&other.norms), "{what}: norms");
                    let evaluated = (first.evaluated.to_bits(), other.evaluated.to_bits());
                    assert_eq!(evaluated.0, evaluated.1, "{what}: evaluated");
                    for ((tensor, a), (_, b)) in first.weights.iter().zip(&other.weights) {
                        assert_eq!(bits(a), bits(b), "{what}: {tensor}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_card_and_the_cpu_learn_alike() {
    if !has_card() {
        return;
    }
    // f32 sums in another order; bf16 activations have 8 bits, and a loss is a mean of many.
    for (precision, limit) in [(Precision::Fp32, 2e-5), (Precision::Bf16, 1e-2)] {
        for name in ["llama31", "qwen2", "qwen3"] {
            let case = Case::open(name);
            let card = DeviceProfile::cuda("card", 0, precision);
            let of = |profile: &DeviceProfile| run(&case, profile, precision, 1.0, VARIANTS[0]);
            let (cpu, cuda) = (of(&DeviceProfile::cpu()), of(&card));
            for (step, (want, got)) in cpu.losses.iter().zip(&cuda.losses).enumerate() {
                let off = (got - want).abs() / want.max(1.0);
                println!(
                    "{name} {precision:?} step {step}: cpu {want:.7} card {got:.7} off {off:.1e}"
                );
                assert!(
                    off <= limit,
                    "{name} {precision:?} step {step}: {got} for {want}"
                );
            }
        }
    }
}

/// Sequences of many lengths multiply many shapes: what a commit tells of them has an end.
#[test]
fn a_card_records_a_bounded_number_of_products() {
    if !has_card() {
        return;
    }
    let device = Device::open(Some(0), 64 << 20, 2).unwrap();
    let Device::Cuda(card) = &device else {
        panic!("a card was asked for");
    };
    let view = |offset: u64, count: u64| View::new(offset, count, Dtype::Bf16);
    let weight = view(0, 8 * 8);
    for tokens in 1..=6000 {
        let (x, y) = (view(1 << 20, tokens * 8), view(2 << 20, tokens * 8));
        device.linear_forward(x, weight, None, y, 8, false);
    }
    device.settle();
    device.check().unwrap();
    let products = card.products();
    assert_eq!(products.len(), 512);
    let text: usize = products.iter().map(|(key, of)| key.len() + of.len()).sum();
    assert!(text < 256 << 10, "{text} bytes");
}
