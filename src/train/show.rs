//! What a run shows of itself while it trains: what was started, and where its lines go.

use serde_json::{Value, json};

use super::{Run, Trainer};
use crate::error::Result;
use crate::log::prometheus::Numbers;
use crate::log::{Log, Settings};
use crate::machine;
use crate::plan::Plan;
use crate::schedule::simulate::{Prediction, Rates};

impl Trainer {
    /// Begins to show the run as `[log]` says: run.json, status.json, event files, Prometheus;
    /// until then metrics.jsonl alone is written. `prediction` and `rates` are those that the plan
    /// was chosen by. Sentences for a person; what cannot be shown is among them, and no error.
    ///
    /// # Errors
    /// [`crate::Error::Io`] if there is no thread to be had.
    pub fn show(&mut self, prediction: &Prediction, rates: &Rates) -> Result<Vec<String>> {
        let (run, plan) = (&self.run, self.engine.plan());
        let about = about(run, plan, prediction, rates);
        let model = run.config.model.path.as_ref();
        let model = model.map_or(String::new(), |path| path.display().to_string());
        let numbers = Numbers {
            labels: vec![
                ("version", env!("CARGO_PKG_VERSION").to_string()),
                ("device", plan.device.name.clone()),
                ("model", model),
                ("directory", run.config.log.dir.display().to_string()),
            ],
            steps: self.progress.step,
            total_steps: run.total_steps,
            step_flops: prediction.executed_flops,
            tiers: plan.tiers().to_vec(),
            ..Numbers::default()
        };
        let settings = Settings {
            dir: run.config.log.dir.clone(),
            tensorboard: run.config.log.tensorboard,
            prometheus: run.config.log.prometheus,
            about,
            numbers,
        };
        let (log, sentences) = Log::start(settings, self.engine.watch())?;
        self.metrics.show(log);
        Ok(sentences)
    }
}

/// run.json, but for the times of its starts.
fn about(run: &Run, plan: &Plan, prediction: &Prediction, rates: &Rates) -> Value {
    let spec = &run.spec;
    let stats = run.dataset.stats();
    json!({
        "version": 1,
        "terrace_version": env!("CARGO_PKG_VERSION"),
        "total_steps": run.total_steps,
        "device": plan.device.name,
        "machine": {
            "cpu": machine::cpu_model(),
            "cores": machine::cores(),
            "memory_bytes": machine::memory_bytes(),
        },
        "model": {
            "path": run.config.model.path,
            "family": format!("{:?}", spec.family),
            "parameters": spec.parameters(),
            "blocks": spec.blocks,
            "hidden": spec.hidden,
            "vocab_size": spec.vocab_size,
        },
        "data": {
            "rows": stats.rows,
            "tokens": stats.tokens,
            "targets": stats.targets,
            "sequences": run.sequences(),
            "packing_efficiency": run.packing_efficiency(),
        },
        "plan": plan.json(prediction, rates),
        "config": run.config.to_toml(),
    })
}
