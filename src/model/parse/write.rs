//! [`ModelSpec`] to config.json, in the spellings of transformers 4 and 5.
//!
//! - What the parser reads from the JSON written here is the same spec.
//! - Keys of the original that this model has no value for are kept as they are.

use serde_json::{Map, Value, json};

use super::FAMILIES;
use crate::model::{Family, ModelSpec, RopeScaling};

impl ModelSpec {
    /// config.json of this model: the original's keys, where there is one, with this model's values
    /// in both spellings. `dtype` is `bfloat16` or `float32`.
    pub fn to_config_json(&self, original: Option<&Value>, dtype: &str) -> Value {
        let mut object = original
            .and_then(Value::as_object)
            .cloned()
            .unwrap_or_default();
        let (_, model_type, architecture) = FAMILIES
            .into_iter()
            .find(|(family, ..)| *family == self.family)
            .expect("FAMILIES has every family");
        let mut set = |key: &str, value: Value| {
            object.insert(key.to_string(), value);
        };
        set("architectures", json!([architecture]));
        set("model_type", json!(model_type));
        set("vocab_size", json!(self.vocab_size));
        set("hidden_size", json!(self.hidden));
        set("intermediate_size", json!(self.intermediate));
        set("num_hidden_layers", json!(self.blocks));
        set("num_attention_heads", json!(self.heads));
        set("num_key_value_heads", json!(self.kv_heads));
        set("head_dim", json!(self.head_dim));
        set("hidden_act", json!("silu"));
        set("rms_norm_eps", json!(shortest(self.rms_eps)));
        set("initializer_range", json!(shortest(self.initializer_range)));
        set("max_position_embeddings", json!(self.max_positions));
        set("tie_word_embeddings", json!(self.tied));
        if matches!(self.family, Family::Llama | Family::Qwen3) {
            set("attention_bias", json!(self.output_bias));
        }
        if self.family == Family::Llama {
            set("mlp_bias", json!(false));
        }
        set("bos_token_id", json!(self.bos_token_id));
        set(
            "eos_token_id",
            match self.eos_token_ids.as_slice() {
                [] => Value::Null,
                [one] => json!(one),
                several => json!(several),
            },
        );
        set("torch_dtype", json!(dtype));
        set("dtype", json!(dtype));
        self.set_windows(&mut object);
        self.set_rope(&mut object);
        Value::Object(object)
    }

    fn set_windows(&self, object: &mut Map<String, Value>) {
        let window = self.windows.iter().flatten().next().copied();
        match self.family {
            Family::Llama => {}
            Family::Mistral => {
                object.insert("sliding_window".to_string(), json!(window));
            }
            Family::Qwen2 | Family::Qwen3 => {
                let types: Vec<&str> = self
                    .windows
                    .iter()
                    .map(|window| match window {
                        Some(_) => "sliding_attention",
                        None => "full_attention",
                    })
                    .collect();
                object.insert("layer_types".to_string(), json!(types));
                object.insert("use_sliding_window".to_string(), json!(window.is_some()));
                if window.is_some() || !object.contains_key("sliding_window") {
                    object.insert("sliding_window".to_string(), json!(window));
                }
                if !object.contains_key("max_window_layers") {
                    let full = self.windows.iter().take_while(|w| w.is_none()).count();
                    object.insert("max_window_layers".to_string(), json!(full));
                }
            }
        }
    }

    fn set_rope(&self, object: &mut Map<String, Value>) {
        let mut scaling = Map::new();
        let mut set = |key: &str, value: Value| {
            scaling.insert(key.to_string(), value);
        };
        match self.rope.scaling {
            RopeScaling::Default => {}
            RopeScaling::Linear { factor } => {
                set("rope_type", json!("linear"));
                set("factor", json!(factor));
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_positions,
            } => {
                set("rope_type", json!("llama3"));
                set("factor", json!(factor));
                set("low_freq_factor", json!(low_freq_factor));
                set("high_freq_factor", json!(high_freq_factor));
                set(
                    "original_max_position_embeddings",
                    json!(original_max_positions),
                );
            }
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_max_positions,
                attention_factor,
                truncate,
            } => {
                set("rope_type", json!("yarn"));
                set("factor", json!(factor));
                set("beta_fast", json!(beta_fast));
                set("beta_slow", json!(beta_slow));
                set(
                    "original_max_position_embeddings",
                    json!(original_max_positions),
                );
                set("attention_factor", json!(attention_factor));
                set("truncate", json!(truncate));
            }
        }
        let mut parameters = Map::new();
        parameters.insert("rope_theta".to_string(), json!(self.rope.theta));
        parameters.insert("rope_type".to_string(), json!("default"));
        parameters.extend(scaling.clone());
        object.insert("rope_theta".to_string(), json!(self.rope.theta));
        let scaling = match scaling.get("rope_type").cloned() {
            None => Value::Null,
            Some(name) => {
                // What the two older types are called by readers that came before `rope_type`.
                if name != "llama3" {
                    scaling.insert("type".to_string(), name);
                }
                Value::Object(scaling)
            }
        };
        object.insert("rope_scaling".to_string(), scaling);
        object.insert("rope_parameters".to_string(), Value::Object(parameters));
    }
}

/// The shortest decimal that rounds to that f32: 1e-5, not 9.99999974737875e-6.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}
