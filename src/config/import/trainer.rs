//! Keys of Hugging Face's Trainer that say when it evaluates and saves, and whom it tells.

use super::yaml::Entry;
use super::{Import, number};

/// When the Trainer evaluates, where the file says.
fn evaluates(import: &Import) -> Option<String> {
    let named = import.named("eval_strategy");
    named
        .or(import.named("evaluation_strategy"))
        .map(Entry::first)
}

fn is_no(text: &str) -> bool {
    ["no", "false", "False"].contains(&text)
}

pub(super) fn eval_steps(import: &mut Import, entry: &Entry) {
    // The Trainer looks at it under "steps" alone.
    let by_steps = evaluates(import).is_none_or(|by| by == "steps");
    if by_steps {
        import.steps_of(entry, "train.eval_every");
    }
}

pub(super) fn eval_strategy(import: &mut Import, entry: &Entry) {
    match entry.first().as_str() {
        // The Trainer then takes logging_steps, of which it has 500.
        "steps" if import.named("eval_steps").is_none() => {
            match import.named("logging_steps").cloned() {
                Some(logging) => import.steps_of(&logging, "train.eval_every"),
                None => import.set("train.eval_every", "500".to_string()),
            }
        }
        "steps" => {}
        no if is_no(no) => {}
        _ => import.line(
            entry,
            "is not by steps: set train.eval_every, which counts them",
        ),
    }
}

pub(super) fn save_strategy(import: &mut Import, entry: &Entry) {
    match entry.first().as_str() {
        "steps" => {}
        no if is_no(no) => import.line(
            entry,
            "is not taken over, since a run is exported from its last commit: checkpoint.every \
             counts the steps between commits, and one is made at the end",
        ),
        _ => import.line(
            entry,
            "is not by steps: set checkpoint.every, which counts them",
        ),
    }
}

pub(super) fn save_total_limit(import: &mut Import, entry: &Entry) {
    match entry.number() {
        Some(limit) if (1.0..=31.0).contains(&limit) => {
            import.set("checkpoint.keep", number(&entry.first()));
        }
        _ => import.line(
            entry,
            "is not 1 to 31, as checkpoint.keep has to be: 2 are kept",
        ),
    }
}

pub(super) fn load_best(import: &mut Import, entry: &Entry) {
    if entry.is_true() {
        import.set("checkpoint.keep_best", "true".to_string());
    }
}

pub(super) fn report_to(import: &mut Import, entry: &Entry) {
    let names = entry.values.iter().flat_map(|value| value.split(','));
    let names: Vec<String> = names.map(|name| name.trim().to_lowercase()).collect();
    if names.iter().all(|name| name == "none") {
        return import.set("log.tensorboard", "false".to_string());
    }
    let ours = |name: &String| ["tensorboard", "all", "none"].contains(&name.as_str());
    if !names.iter().all(ours) {
        import.line(
            entry,
            "is not written to: TensorBoard's event files, metrics.jsonl and report.html are",
        );
    }
}
