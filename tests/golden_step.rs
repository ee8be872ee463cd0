//! Goal: forward, backward and whole steps compute what PyTorch computes (tests/golden).
//!
//! Method: the engine runs tiny models from the goldens' weights and micro-batches, and each number
//! is compared with the float64 run. A tolerance is a multiple of the error that PyTorch's own
//! float32 made against float64, with a floor where that error happened to be lucky. Perturbed
//! models must fail the same comparisons. Every test also drives the schedule, the transfers and
//! the lanes: nothing is called but what a run calls.

mod support;

use support::{Case, Comparison, config, engine, gradients, numbers, pack, read_tensors, settings};
use support::{RecordedErrors, unpack};
use terrace::data::{IGNORE, Micro};
use terrace::model::ModelSpec;
use terrace::step::Engine;
use terrace::tile::Precision;

const CASES: [&str; 9] = [
    "llama",
    "llama31",
    "llama_linear",
    "llama_bias",
    "qwen2",
    "qwen2_window",
    "qwen3",
    "mistral",
    "yarn",
];

/// Our error may be this many times PyTorch's own.
const FORWARD_FACTOR: f64 = 2.0;

/// Loss, norm, all gradients and all logits of a case's forward golden, from `spec`.
fn compare_forward(case: &Case, spec: &ModelSpec) -> Comparison {
    let mut comparison = Comparison::default();
    let golden = read_tensors(&case.dir, "golden.safetensors");
    let forward = &case.record["forward"];
    let micros = case.forward_micros();
    let mut config = config(Precision::Fp32, &micros);
    config.train.max_grad_norm = 1e30;
    let mut engine = engine(spec, &config);
    case.initialise(&engine);

    let result = engine
        .train_step(micros.clone(), settings(&config, 1, 0.0))
        .unwrap();
    let figure = |key: &str, kind: &str| forward[key][kind].as_f64().unwrap();
    let exact = figure("loss", "f64");
    let limit = 1e-5 * exact.max(1.0);
    comparison.number("loss", result.loss, exact, limit);
    let exact = figure("gradient_norm", "f64");
    let torch = ["f32", "sdpa"].map(|kind| (figure("gradient_norm", kind) - exact).abs());
    let errors = RecordedErrors::read(&forward["gradient_error"]);
    // Two norms differ by at most the norm of the difference; where errors of the two samples
    // cancelled, that bound is the honest one.
    let limit = (FORWARD_FACTOR * torch[0].max(torch[1])).max(errors.l2());
    comparison.number("gradient norm", result.grad_norm, exact, limit);

    let ours = gradients(&engine);
    assert_eq!(ours.len(), errors.count(), "one gradient a parameter");
    for (name, gradient) in &ours {
        let reference = &golden[&format!("gradient.{name}")];
        let label = format!("gradient of {name}");
        comparison.tensor(
            &label,
            gradient,
            reference,
            errors.limit(name, FORWARD_FACTOR),
        );
    }
    compare_token_losses(&mut comparison, &mut engine, &micros, &golden);
    drop(engine);
    compare_logits(&mut comparison, case, spec, &micros, &golden);
    comparison
}

/// Each target's loss alone: a forward-only pass in which nothing else has a target.
fn compare_token_losses(
    comparison: &mut Comparison,
    engine: &mut Engine,
    micros: &[Micro],
    golden: &support::Tensors,
) {
    for (m, micro) in micros.iter().enumerate() {
        for (s, ends) in micro.bounds.windows(2).enumerate() {
            let reference = &golden[&format!("losses.{m}.{s}")];
            for row in ends[0]..ends[1] {
                let target = micro.targets[row as usize];
                if target == IGNORE {
                    continue;
                }
                let mut alone = micro.clone();
                alone.targets.fill(IGNORE);
                alone.targets[row as usize] = target;
                let (loss, targets) = engine.evaluate(vec![alone]).unwrap();
                assert_eq!(targets, 1);
                let at = row - ends[0];
                let exact = reference[at as usize];
                let label = format!("loss {m}.{s}, token {at}");
                comparison.number(&label, loss, exact, 1e-5 * exact.max(1.0));
            }
        }
    }
}

/// Logits of every row: the engine gives those of a sequence's last token, so each sequence becomes
/// a micro-batch of all its prefixes.
fn compare_logits(
    comparison: &mut Comparison,
    case: &Case,
    spec: &ModelSpec,
    micros: &[Micro],
    golden: &support::Tensors,
) {
    let errors = RecordedErrors::read(&case.record["forward"]["logits_error"]);
    for (m, micro) in micros.iter().enumerate() {
        let prefixes: Vec<Micro> = unpack(micro)
            .into_iter()
            .map(|(tokens, _)| {
                let prefix = |end: usize| (tokens[..end].to_vec(), vec![IGNORE; end]);
                pack((1..=tokens.len()).map(prefix))
            })
            .collect();
        let mut engine = engine(spec, &config(Precision::Fp32, &prefixes));
        case.initialise(&engine);
        let logits = engine.last_logits(prefixes).unwrap();
        for (s, rows) in logits.iter().enumerate() {
            let key = format!("{m}.{s}");
            let ours: Vec<f64> = rows.iter().map(|value| f64::from(*value)).collect();
            let reference = &golden[&format!("logits.{key}")];
            let label = format!("logits {key}");
            comparison.tensor(&label, &ours, reference, errors.limit(&key, FORWARD_FACTOR));
        }
    }
}

#[test]
fn forward_and_gradients_are_those_of_float64() {
    for name in CASES {
        let case = Case::open(name);
        compare_forward(&case, &case.spec).assert_good(name);
    }
}
