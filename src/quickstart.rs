//! The embedded run: a small model, its tokenizer and a text, written out as files of a normal run.
//!
//! `terrace train --quickstart` writes them under one directory and trains from there, so that
//! every other command works on what it leaves behind.

use std::path::Path;

use serde_json::json;

use crate::config::RunConfig;
use crate::data::quickstart;
use crate::error::{Error, Result};

/// Where the run is written when nothing else is said.
pub const DIRECTORY: &str = "runs/quickstart";

/// The quickstart's run.toml; `DIR` stands for its directory.
const RUN: &str = r#"# The run of `terrace train --quickstart`: a Llama of 2 M parameters
# learns the embedded text.
# Its state and gradients are about 37 MiB; memory.host is less, so that half of the optimizer's
# state lives in the store.
[model]
path = "DIR/model"
init = "random"

[data]
train = "DIR/data/train.txt"
eval = "DIR/data/held-out.txt"
seq_len = 256

[train]
steps = 240
micro_batch = 8
micro_batches = 2
learning_rate = 3e-3
schedule = "cosine"
warmup_steps = 20
min_learning_rate = 3e-4
betas = [0.9, 0.95]
weight_decay = 0.1
eval_every = 60
seed = 1

[memory]
device = "256MiB"
host = "24MiB"
store = "DIR/store"
slabs = 4

[checkpoint]
every = 60
keep = 2

[log]
dir = "DIR"
sample_every = 60
"#;

/// Writes the run's files under `directory`, which is made, and returns its configuration. Files
/// that are there already are replaced, but for a run.toml that was changed: that one is kept.
pub fn write(directory: &Path, sets: &[String]) -> Result<RunConfig> {
    let model = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024,
        "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 256,
        "initializer_range": 0.02, "tie_word_embeddings": true, "attention_bias": false,
        "mlp_bias": false, "bos_token_id": null, "eos_token_id": quickstart_eos()?,
        "torch_dtype": "bfloat16",
    });
    let shown = directory.display().to_string();
    let run = RUN.replace("DIR", &shown.replace('\\', "\\\\").replace('"', "\\\""));
    for folder in ["model", "data"] {
        let folder = directory.join(folder);
        std::fs::create_dir_all(&folder).map_err(|e| Error::io("make", &folder, e))?;
    }
    let mut files = vec![
        ("model/config.json", format!("{model:#}\n").into_bytes()),
        (
            "data/train.txt",
            quickstart::train_text().as_bytes().to_vec(),
        ),
        (
            "data/held-out.txt",
            quickstart::held_out_text().as_bytes().to_vec(),
        ),
    ];
    for (name, bytes) in quickstart::tokenizer_files() {
        files.push(match name {
            "tokenizer.json" => ("model/tokenizer.json", bytes.to_vec()),
            _ => ("model/tokenizer_config.json", bytes.to_vec()),
        });
    }
    let run_path = directory.join("run.toml");
    if !run_path.exists() {
        files.push(("run.toml", run.into_bytes()));
    }
    for (name, bytes) in files {
        let path = directory.join(name);
        std::fs::write(&path, bytes).map_err(|e| Error::io("write", &path, e))?;
    }
    let text = std::fs::read_to_string(&run_path).map_err(|e| Error::io("read", &run_path, e))?;
    parse(&text, &run_path.display().to_string(), sets)
}

/// The run's configuration. Where `sets` lower `train.steps` below the file's warm-up and say
/// nothing of that, it becomes a quarter of the steps: who asks for a short run means just that.
fn parse(text: &str, place: &str, sets: &[String]) -> Result<RunConfig> {
    let named = |key: &str| {
        let of = |set: &String| set.split('=').next().is_some_and(|name| name.trim() == key);
        sets.iter().any(of)
    };
    if !named("train.steps") || named("train.warmup_steps") {
        return RunConfig::parse(text, place, sets);
    }
    let with = |warmup_steps: u64| {
        let fitted = [sets, &[format!("train.warmup_steps={warmup_steps}")]].concat();
        RunConfig::parse(text, place, &fitted)
    };
    // Without a warm-up, so that the number of steps is all that can be wrong with it.
    let steps = with(0)?.train.steps.unwrap_or(0);
    RunConfig::parse(text, place, sets).or_else(|_| with(steps / 4))
}

fn quickstart_eos() -> Result<u32> {
    let tokenizer = quickstart::tokenizer()?;
    Ok(tokenizer
        .eos()
        .expect("the embedded tokenizer has an end of text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_shorter_than_its_warm_up_is_warmed_up_in_a_quarter() {
        let warmup = |sets: &[&str]| {
            let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
            parse(RUN, "run.toml", &sets).map(|config| config.train.warmup_steps)
        };
        assert_eq!(warmup(&[]).unwrap(), 20);
        assert_eq!(warmup(&["train.steps=20"]).unwrap(), 20);
        assert_eq!(warmup(&["train.steps = 6"]).unwrap(), 1);
        assert_eq!(warmup(&["train.steps=6", "train.steps=30"]).unwrap(), 20);
        let refused = |sets: &[&str]| warmup(sets).unwrap_err().to_string();
        let both = ["train.steps=6", "train.warmup_steps=7"];
        assert!(refused(&both).contains("train.warmup_steps: expected at most"));
        assert!(refused(&["train.steps=six"]).contains("train.steps"));
    }
}
