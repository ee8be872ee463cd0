//! Goal: a loss or gradient that is not a number stops the run before it reaches a weight
//! (invariant 10), and the error names the step and the last commit.
//!
//! Method: the weights of a tiny model are changed so that the loss, or the gradient of one tile
//! alone, is not finite; the bytes of every section are compared before and after the step.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

mod support;

use support::{Case, config, engine, settings, tile_bytes};
use terrace::Error;
use terrace::hf::WeightSource;
use terrace::hf::safetensors::SafetensorsFile;
use terrace::tile::Precision;

/// Steps that a number which is not one must stop, and what may have changed by then.
struct Broken {
    precision: Precision,
    max_grad_norm: f64,
    change: fn(&str, &mut [f32]),
}

impl Broken {
    /// The error of step 7 from changed weights, and the layers of whose tiles a byte changed.
    fn run(&self, case: &Case) -> (terrace::Result<f64>, Vec<u16>) {
        let micros = case.forward_micros();
        let mut config = config(self.precision, &micros);
        config.train.max_grad_norm = self.max_grad_norm;
        let mut engine = engine(&case.spec, &config);
        case.initialise_changed(&engine, self.change);
        engine.set_last_commit("the last commit is step 6 in run/checkpoint".to_string());
        let layers = 0..case.spec.layer_count();
        let before: Vec<_> = layers.clone().map(|l| tile_bytes(&engine, l)).collect();
        let result = engine.train_step(micros.clone(), settings(&config, 7, 1e-2));
        let drained = engine.drain();
        if result.is_err() {
            drained.unwrap_err();
            engine
                .train_step(micros, settings(&config, 8, 1e-2))
                .unwrap_err();
        }
        let changed = layers.filter(|l| tile_bytes(&engine, *l) != before[usize::from(*l)]);
        (result.map(|step| step.loss), changed.collect())
    }
}

/// Asserts that the error names step 7, the last commit and `part`.
fn assert_non_finite(result: terrace::Result<f64>, part: &str) {
    let Err(Error::NonFinite {
        step,
        what,
        value,
        last_commit,
    }) = result
    else {
        panic!("{part} was not refused: {result:?}");
    };
    assert_eq!((step, what.as_str()), (7, part));
    assert!(["NaN", "inf", "-inf"].contains(&value.as_str()), "{value}");
    assert_eq!(last_commit, "the last commit is step 6 in run/checkpoint");
}

/// Makes the gradient of block 0's query matrix overflow while every activation and the loss stay
/// finite: queries are zero, so huge keys do not show in the scores; the keys' size reaches the
/// gradient of the queries, and that of the norm's output multiplies it.
fn overflow_query_gradient(name: &str, values: &mut [f32]) {
    let scale = match name.strip_prefix("model.layers.0.") {
        Some("input_layernorm.weight") => 1e12,
        Some("self_attn.q_proj.weight") => 0.0,
        Some("self_attn.k_proj.weight") => 1e23,
        Some("self_attn.v_proj.weight") => 1e-12,
        _ => 1.0,
    };
    values.iter_mut().for_each(|value| *value *= scale);
}

fn break_one_weight(name: &str, values: &mut [f32], broken: f32) {
    if name == "model.layers.1.mlp.up_proj.weight" {
        values[77] = broken;
    }
}

#[test]
fn a_weight_that_is_not_a_number_stops_the_step_before_any_update() {
    let case = Case::open("llama");
    let changes: [fn(&str, &mut [f32]); 2] = [
        |name, values| break_one_weight(name, values, f32::NAN),
        |name, values| break_one_weight(name, values, f32::INFINITY),
    ];
    for precision in [Precision::Fp32, Precision::Bf16] {
        // The loss comes before any gradient, so clipping makes no difference.
        for max_grad_norm in [1.0, 0.0] {
            for change in changes {
                let broken = Broken {
                    precision,
                    max_grad_norm,
                    change,
                };
                let (result, changed) = broken.run(&case);
                assert_non_finite(result, "loss");
                assert!(changed.is_empty(), "no tile is updated");
            }
        }
    }
}

#[test]
fn a_gradient_that_overflows_does_not_reach_its_tile() {
    let case = Case::open("llama");
    for precision in [Precision::Fp32, Precision::Bf16] {
        for max_grad_norm in [1.0, 0.0] {
            let mut broken = Broken {
                precision,
                max_grad_norm,
                change: |_, _| {},
            };
            // A sound step changes every tile: what follows can tell.
            let (result, changed) = broken.run(&case);
            assert!(result.unwrap().is_finite());
            assert_eq!(changed, [0, 1, 2, 3]);

            broken.change = overflow_query_gradient;
            let (result, changed) = broken.run(&case);
            assert_non_finite(result, "gradient norm of tile 1.0");
            if max_grad_norm > 0.0 {
                assert!(changed.is_empty(), "{precision:?}: no tile is updated");
            } else {
                // Tiles whose gradients came earlier may have been updated; this one and the
                // embedding, which comes after it, not.
                let reached = changed.iter().any(|layer| *layer <= 1);
                assert!(!reached, "{precision:?}: {changed:?} were updated");
            }
        }
    }
}

/// By choice such a step makes no update, nor does one whose norm is above a limit; what follows is
/// as if it had not been, AdamW's count of steps included.
#[test]
fn a_step_that_is_skipped_leaves_every_byte_as_it_was() {
    let case = Case::open("llama");
    let changes: [fn(&str, &mut [f32]); 3] = [
        |_, _| {},
        |name, values| break_one_weight(name, values, f32::NAN),
        overflow_query_gradient,
    ];
    for (precision, change) in [Precision::Fp32, Precision::Bf16]
        .into_iter()
        .flat_map(|precision| changes.map(|change| (precision, change)))
    {
        let micros = case.forward_micros();
        let config = config(precision, &micros);
        let mut engine = engine(&case.spec, &config);
        case.initialise_changed(&engine, change);
        let layers = 0..case.spec.layer_count();
        let bytes = |engine: &_| {
            layers
                .clone()
                .map(|l| tile_bytes(engine, l))
                .collect::<Vec<_>>()
        };
        let before = bytes(&engine);
        let mut skipping = settings(&config, 1, 1e-2);
        skipping.skip_above = Some(1e-9);
        let result = engine.train_step(micros.clone(), skipping).unwrap();
        assert!(result.skipped, "{precision:?}");
        engine.drain().unwrap();
        assert!(bytes(&engine) == before, "{precision:?}: no byte changes");
        case.initialise_changed(&engine, |_, _| {});
        let mut second = settings(&config, 2, 1e-2);
        (second.skipped, second.skip_above) = (1, Some(f64::MAX));
        assert!(!engine.train_step(micros.clone(), second).unwrap().skipped);
        engine.drain().unwrap();
        let after = bytes(&engine);
        let mut other = support::engine(&case.spec, &config);
        case.initialise_changed(&other, |_, _| {});
        other
            .train_step(micros, settings(&config, 1, 1e-2))
            .unwrap();
        other.drain().unwrap();
        assert!(bytes(&other) == after, "{precision:?}: as a first step");
    }
}

/// The all-ones NaN rounds to −0 in bf16: loss and norm would stay finite, the master never.
#[test]
fn a_model_file_with_a_number_that_is_not_one_is_refused() {
    let case = Case::open("llama");
    let name = "model.layers.1.mlp.up_proj.weight";
    let file = SafetensorsFile::open(&case.dir, "model.safetensors").unwrap();
    let entry = file.tensor(name).unwrap();
    let sound = std::fs::read(case.dir.join("model.safetensors")).unwrap();
    let layout = case.spec.tile_layout(2);
    for (bits, got) in [(0x7FFF_FFFFu32, "NaN"), (0xFF80_0000, "-inf")] {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = sound.clone();
        let at = entry.offset as usize + 77 * 4;
        bytes[at..at + 4].copy_from_slice(&bits.to_le_bytes());
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        let weights = WeightSource::open(dir.path(), &case.spec).unwrap();
        let mut values = vec![0.0; layout.elements as usize];
        let error = weights
            .fill(&layout, 0..layout.elements, &mut values)
            .unwrap_err();
        let Error::Input {
            place, got: was, ..
        } = &error
        else {
            panic!("{error}");
        };
        assert!(
            place.ends_with(&format!("tensor {name}, element 77")),
            "{error}"
        );
        assert_eq!(was, got);
        let sound = layout
            .tensor("model.layers.1.mlp.down_proj.weight")
            .unwrap();
        let mut values = vec![0.0; sound.count as usize];
        weights
            .fill(&layout, sound.elements(), &mut values)
            .unwrap();
    }
}
