//! config.json to [`ModelSpec`]; back again is `write`.
//!
//! - Defaults are those of transformers 5.24's configuration classes, family by family; the five
//!   dimensions that make a model (`hidden_size`, `intermediate_size`, `num_hidden_layers`,
//!   `num_attention_heads`, `vocab_size`) must be there.
//! - Both spellings are read: `rope_theta` and `rope_scaling` of transformers 4, and
//!   `rope_parameters` of transformers 5. Where both are given, the priority is transformers'.
//! - Every number is checked against a range before anything is computed from it, and the sum of
//!   parameters in u128 against [`PARAMETERS_MAX`]. Nothing here panics on any text.
//! - What would change the arithmetic and is not done is refused, never ignored.
//!
//! Files are read by `hf`.

mod json;
mod write;

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::{Family, ModelSpec, Rope, RopeScaling};
use crate::error::{Error, Result, printable};

pub(crate) use json::{UniqueValue, parse_json};

/// Most parameters that a model may have.
pub const PARAMETERS_MAX: u64 = 1 << 43;

const VOCAB: RangeInclusive<u64> = 1..=1 << 24;
const HIDDEN: RangeInclusive<u64> = 1..=1 << 20;
const INTERMEDIATE: RangeInclusive<u64> = 1..=1 << 22;
const BLOCKS: RangeInclusive<u64> = 1..=4096;
const HEADS: RangeInclusive<u64> = 1..=1 << 14;
const HEAD_DIM: RangeInclusive<u64> = 2..=1024;
const POSITIONS: RangeInclusive<u64> = 1..=1 << 30;
const TOKEN_ID: RangeInclusive<u64> = 0..=(u32::MAX - 1) as u64;

/// Family, `model_type`, and the class in `architectures`.
const FAMILIES: [(Family, &str, &str); 4] = [
    (Family::Llama, "llama", "LlamaForCausalLM"),
    (Family::Qwen2, "qwen2", "Qwen2ForCausalLM"),
    (Family::Qwen3, "qwen3", "Qwen3ForCausalLM"),
    (Family::Mistral, "mistral", "MistralForCausalLM"),
];

const ROPE_TYPES: &str = "default, linear, llama3, yarn";

impl ModelSpec {
    /// The model that the text of a config.json describes. `place` is the file's name in errors.
    ///
    /// # Errors
    /// [`Error::Input`] names the key, the range expected and what was there;
    /// [`Error::Unsupported`] names what is not done and lists what is.
    pub fn from_config_json(text: &str, place: &str) -> Result<ModelSpec> {
        let value = parse_json(text, "config.json", place)?;
        let Value::Object(object) = &value else {
            return Err(Error::input(
                "config.json",
                place,
                "a JSON object",
                kind_of(&value),
                REMEDY,
            ));
        };
        let keys = Keys {
            place,
            prefix: "",
            object,
        };
        let family = family(&keys)?;
        refuse_unsupported(&keys, family)?;

        let hidden = keys.whole("hidden_size", HIDDEN, None)?;
        let heads = keys.whole("num_attention_heads", HEADS, None)?;
        let blocks = keys.whole("num_hidden_layers", BLOCKS, None)?;
        let max_positions = keys.whole(
            "max_position_embeddings",
            POSITIONS,
            Some(match family {
                Family::Llama => 2048,
                Family::Qwen2 | Family::Qwen3 => 32768,
                Family::Mistral => 131_072,
            }),
        )?;
        let attention_bias = matches!(family, Family::Llama | Family::Qwen3)
            && keys.flag("attention_bias", false)?;
        let (bos, eos) = match family {
            Family::Llama | Family::Mistral => (Some(1), vec![2]),
            Family::Qwen2 | Family::Qwen3 => (None, Vec::new()),
        };
        let head_dim = head_dim(&keys, family, hidden, heads)?;
        let spec = ModelSpec {
            family,
            vocab_size: keys.whole("vocab_size", VOCAB, None)?,
            hidden,
            intermediate: keys.whole("intermediate_size", INTERMEDIATE, None)?,
            blocks: u16::try_from(blocks).expect("BLOCKS ends below 2^16"),
            heads,
            kv_heads: kv_heads(&keys, family, heads)?,
            head_dim,
            rms_eps: keys.number("rms_norm_eps", 1e-30..=1.0, Some(1e-6))? as f32,
            rope: rope(&keys, max_positions)?,
            windows: windows(&keys, family, blocks)?,
            tied: keys.flag("tie_word_embeddings", false)?,
            qkv_bias: attention_bias || family == Family::Qwen2,
            output_bias: attention_bias,
            qk_norm: family == Family::Qwen3,
            max_positions,
            initializer_range: keys.number("initializer_range", 0.0..=1.0, Some(0.02))? as f32,
            eos_token_ids: token_ids(&keys, "eos_token_id", eos)?,
            bos_token_id: bos_token_id(&keys, bos)?,
        };
        check_total(&spec, place)?;
        Ok(spec)
    }
}

fn family(keys: &Keys) -> Result<Family> {
    let supported = || FAMILIES.map(|(_, name, _)| name).join(", ");
    let name = match keys.get("model_type") {
        None => return Err(keys.wrong("model_type", supported(), "nothing")),
        Some(Value::String(name)) => name,
        Some(other) => return Err(keys.wrong("model_type", "a string", show(other))),
    };
    let Some((family, _, class)) = FAMILIES.into_iter().find(|(_, known, _)| known == name) else {
        return Err(Error::Unsupported {
            what: "architecture",
            got: format!("{}: model_type {}", keys.place, printable(name)),
            supported: supported(),
        });
    };
    match keys.get("architectures") {
        None => Ok(family),
        Some(Value::Array(classes)) if classes.is_empty() => Ok(family),
        Some(Value::Array(classes)) if classes.iter().any(|c| c.as_str() == Some(class)) => {
            Ok(family)
        }
        Some(other) => Err(Error::Unsupported {
            what: "architecture",
            got: format!("{}: {} of model_type {name}", keys.place, show(other)),
            supported: FAMILIES.map(|(_, _, class)| class).join(", "),
        }),
    }
}

/// Keys that would change the arithmetic and that are not done.
fn refuse_unsupported(keys: &Keys, family: Family) -> Result<()> {
    for key in [
        "quantization_config",
        "compression_config",
        "per_layer_config",
    ] {
        if let Some(value) = keys.get(key) {
            return Err(Error::Unsupported {
                what: "config.json",
                got: format!("{}: {key} {}", keys.place, show(value)),
                supported: "unquantized weights in bf16, f16 or f32, all blocks alike".to_string(),
            });
        }
    }
    match keys.get("hidden_act") {
        None => {}
        Some(Value::String(name)) if name == "silu" => {}
        Some(other) => {
            return Err(Error::Unsupported {
                what: "hidden_act",
                got: show(other),
                supported: "silu".to_string(),
            });
        }
    }
    if family == Family::Llama && keys.flag("mlp_bias", false)? {
        return Err(Error::Unsupported {
            what: "mlp_bias",
            got: "true".to_string(),
            supported: "false".to_string(),
        });
    }
    refuse_partial_rotary(keys)
}

fn refuse_partial_rotary(keys: &Keys) -> Result<()> {
    let factor = keys.number("partial_rotary_factor", 0.0..=1.0, Some(1.0))?;
    if factor != 1.0 {
        return Err(Error::Unsupported {
            what: "partial_rotary_factor",
            got: factor.to_string(),
            supported: "1.0".to_string(),
        });
    }
    Ok(())
}

fn head_dim(keys: &Keys, family: Family, hidden: u64, heads: u64) -> Result<u64> {
    let given = keys.get("head_dim").is_some() || family == Family::Qwen3;
    if !hidden.is_multiple_of(heads) && (family == Family::Llama || !given) {
        let expected = format!("a multiple of num_attention_heads ({heads})");
        return Err(keys.wrong("hidden_size", expected, hidden.to_string()));
    }
    let default = if family == Family::Qwen3 {
        128
    } else {
        hidden / heads
    };
    let head_dim = keys.whole("head_dim", HEAD_DIM, Some(default))?;
    // A default is out of range where hidden_size and heads do not fit each other.
    if !HEAD_DIM.contains(&head_dim) || !head_dim.is_multiple_of(2) {
        let expected = format!(
            "an even number from {} to {}",
            HEAD_DIM.start(),
            HEAD_DIM.end()
        );
        return Err(keys.wrong("head_dim", expected, head_dim.to_string()));
    }
    Ok(head_dim)
}

fn kv_heads(keys: &Keys, family: Family, heads: u64) -> Result<u64> {
    const KEY: &str = "num_key_value_heads";
    // A null stands for "as many as query heads" in every family; an absent key does not.
    let default = match (keys.object.contains_key(KEY), family) {
        (true, _) | (_, Family::Llama) => heads,
        (_, Family::Qwen2 | Family::Qwen3) => 32,
        (_, Family::Mistral) => 8,
    };
    let kv_heads = keys.whole(KEY, HEADS, Some(default))?;
    if !heads.is_multiple_of(kv_heads) {
        let expected = format!("a divisor of num_attention_heads ({heads})");
        return Err(keys.wrong(KEY, expected, kv_heads.to_string()));
    }
    Ok(kv_heads)
}

fn windows(keys: &Keys, family: Family, blocks: u64) -> Result<Vec<Option<u64>>> {
    // Of sliding_window an absent key means 4096, a null none.
    let window = match keys.object.get("sliding_window") {
        Some(Value::Null) => None,
        _ => Some(keys.whole("sliding_window", POSITIONS, Some(4096))?),
    };
    let (window, types) = match family {
        Family::Llama => (None, layer_types(keys, blocks)?),
        Family::Mistral => (window, layer_types(keys, blocks)?),
        Family::Qwen2 | Family::Qwen3 => {
            let used = keys.flag("use_sliding_window", false)?;
            let first = keys.whole("max_window_layers", 0..=1 << 32, Some(28))?;
            let window = if used { window } else { None };
            let types = match layer_types(keys, blocks)? {
                Some(types) => types,
                None => (0..blocks)
                    .map(|i| window.is_some() && i >= first)
                    .collect(),
            };
            (window, Some(types))
        }
    };
    let sliding = match types {
        Some(types) => types,
        None => vec![window.is_some(); blocks as usize],
    };
    let uniform = !matches!(family, Family::Qwen2 | Family::Qwen3);
    for (index, sliding) in sliding.iter().enumerate() {
        if (*sliding && window.is_none()) || (uniform && *sliding != window.is_some()) {
            let expected = match window {
                None => "full_attention, for no sliding window is in use",
                Some(_) => "sliding_attention, for every block has the window",
            };
            let got = if *sliding {
                "sliding_attention"
            } else {
                "full_attention"
            };
            return Err(keys.wrong(&format!("layer_types[{index}]"), expected, got));
        }
    }
    Ok(sliding
        .into_iter()
        .map(|sliding| window.filter(|_| sliding))
        .collect())
}

/// `layer_types`, as "is this block sliding".
fn layer_types(keys: &Keys, blocks: u64) -> Result<Option<Vec<bool>>> {
    const KEY: &str = "layer_types";
    let types = match keys.get(KEY) {
        None => return Ok(None),
        Some(Value::Array(types)) => types,
        Some(other) => return Err(keys.wrong(KEY, "a list", show(other))),
    };
    if types.len() as u64 != blocks {
        let expected = format!("num_hidden_layers ({blocks}) entries");
        return Err(keys.wrong(KEY, expected, types.len().to_string()));
    }
    let sliding = types
        .iter()
        .enumerate()
        .map(|(index, name)| match name.as_str() {
            Some("full_attention" | "attention") => Ok(false),
            Some("sliding_attention") => Ok(true),
            _ => Err(Error::Unsupported {
                what: "layer type",
                got: format!("{KEY}[{index}] {}", show(name)),
                supported: "full_attention, sliding_attention".to_string(),
            }),
        });
    sliding.collect::<Result<Vec<bool>>>().map(Some)
}

fn token_ids(keys: &Keys, key: &str, default: Vec<u32>) -> Result<Vec<u32>> {
    let id = |value: &Value| {
        let id = value.as_u64().filter(|id| TOKEN_ID.contains(id));
        id.map(|id| id as u32)
            .ok_or_else(|| keys.wrong(key, "a token id, a list of them, or null", show(value)))
    };
    match keys.object.get(key) {
        None => Ok(default),
        Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(ids)) if ids.len() <= 1024 => ids.iter().map(id).collect(),
        Some(value) => Ok(vec![id(value)?]),
    }
}

fn bos_token_id(keys: &Keys, default: Option<u32>) -> Result<Option<u32>> {
    let ids = token_ids(keys, "bos_token_id", default.into_iter().collect())?;
    Ok(ids.first().copied())
}

fn check_total(spec: &ModelSpec, place: &str) -> Result<()> {
    // Layers have few tensors and every block has the same ones: this allocates next to nothing.
    let layer_parameters = |index: u16| -> u128 {
        let tensors = spec.layer_tensors(index);
        tensors
            .iter()
            .map(|t| t.shape.iter().map(|d| u128::from(*d)).product::<u128>())
            .sum()
    };
    let total = layer_parameters(0)
        + layer_parameters(1) * u128::from(spec.blocks)
        + layer_parameters(spec.blocks + 1);
    if total > u128::from(PARAMETERS_MAX) {
        return Err(Error::input(
            "config.json",
            format!("{place}: all dimensions together"),
            format!("at most {PARAMETERS_MAX} parameters"),
            format!("{total}"),
            REMEDY,
        ));
    }
    Ok(())
}

/// Rotary embedding, with transformers' priorities: a `rope_scaling` that is not empty, else
/// `rope_parameters`; the base within it, else `rope_theta`, else 10000.
fn rope(keys: &Keys, max_positions: u64) -> Result<Rope> {
    let theta = keys.number("rope_theta", THETA, Some(10_000.0))?;
    let empty = Map::new();
    let mut chosen = Keys {
        place: keys.place,
        prefix: "rope_parameters.",
        object: &empty,
    };
    for (key, prefix) in [
        ("rope_scaling", "rope_scaling."),
        ("rope_parameters", "rope_parameters."),
    ] {
        match keys.get(key) {
            None => continue,
            Some(Value::Object(object)) if object.is_empty() => continue,
            Some(Value::Object(object)) => {
                chosen = Keys {
                    place: keys.place,
                    prefix,
                    object,
                };
                break;
            }
            Some(other) => return Err(keys.wrong(key, "an object or null", show(other))),
        }
    }
    let keys_of_model = keys;
    let keys = chosen;
    refuse_partial_rotary(&keys)?;
    let theta = keys.number("rope_theta", THETA, Some(theta))?;
    let scaling = match rope_type(&keys)? {
        "default" => RopeScaling::Default,
        "linear" => RopeScaling::Linear {
            factor: keys.number("factor", FACTOR, None)?,
        },
        name => {
            // A value beside the model's other keys outranks the one within.
            let within = keys.whole(ORIGINAL, POSITIONS, Some(max_positions))?;
            let original = keys_of_model.whole(ORIGINAL, POSITIONS, Some(within))?;
            match name {
                "llama3" => llama3(&keys, original)?,
                _ => yarn(&keys, original, max_positions)?,
            }
        }
    };
    Ok(Rope { theta, scaling })
}

const ORIGINAL: &str = "original_max_position_embeddings";
const THETA: RangeInclusive<f64> = 1.000_001..=1e30;
const FACTOR: RangeInclusive<f64> = 1e-6..=1e6;

fn rope_type<'a>(keys: &Keys<'a>) -> Result<&'a str> {
    let (key, value) = match (keys.get("rope_type"), keys.get("type")) {
        (Some(value), _) => ("rope_type", value),
        (None, Some(value)) => ("type", value),
        // transformers reads a factor without a type as no scaling at all; nobody means that.
        (None, None) => match keys.object.keys().find(|key| *key != "rope_theta") {
            None => return Ok("default"),
            Some(_) => return Err(keys.wrong("rope_type", ROPE_TYPES, "nothing")),
        },
    };
    match value.as_str() {
        Some(name @ ("default" | "linear" | "llama3" | "yarn")) => Ok(name),
        Some(_) => Err(Error::Unsupported {
            what: "rope type",
            got: format!("{}{key} {}", keys.prefix, show(value)),
            supported: ROPE_TYPES.to_string(),
        }),
        None => Err(keys.wrong(key, ROPE_TYPES, show(value))),
    }
}

fn llama3(keys: &Keys, original_max_positions: u64) -> Result<RopeScaling> {
    let low_freq_factor = keys.number("low_freq_factor", FACTOR, None)?;
    let high_freq_factor = keys.number("high_freq_factor", FACTOR, None)?;
    if high_freq_factor <= low_freq_factor {
        let expected = format!("more than low_freq_factor ({low_freq_factor})");
        return Err(keys.wrong("high_freq_factor", expected, high_freq_factor.to_string()));
    }
    Ok(RopeScaling::Llama3 {
        factor: keys.number("factor", FACTOR, None)?,
        low_freq_factor,
        high_freq_factor,
        original_max_positions,
    })
}

fn yarn(keys: &Keys, original_max_positions: u64, max_positions: u64) -> Result<RopeScaling> {
    let ratio = max_positions as f64 / original_max_positions as f64;
    // A factor that is null, not one that is absent, means the ratio of the two lengths.
    let default = keys.object.get("factor").map(|_| ratio);
    let factor = keys.number("factor", FACTOR, default)?;
    let or_default = |key: &str, default: f64| {
        let value = keys.number(key, 0.0..=1e6, Some(default))?;
        Ok::<f64, Error>(if value == 0.0 { default } else { value })
    };
    let (beta_fast, beta_slow) = (
        or_default("beta_fast", 32.0)?,
        or_default("beta_slow", 1.0)?,
    );
    if beta_fast < beta_slow {
        let expected = format!("at least beta_slow ({beta_slow})");
        return Err(keys.wrong("beta_fast", expected, beta_fast.to_string()));
    }
    let mscale = keys.number("mscale", 0.0..=1e6, Some(0.0))?;
    let mscale_all_dim = keys.number("mscale_all_dim", 0.0..=1e6, Some(0.0))?;
    let scale_of = |scale: f64| {
        if factor <= 1.0 {
            1.0
        } else {
            0.1 * scale * factor.ln() + 1.0
        }
    };
    let default = if mscale != 0.0 && mscale_all_dim != 0.0 {
        scale_of(mscale) / scale_of(mscale_all_dim)
    } else {
        scale_of(1.0)
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast,
        beta_slow,
        original_max_positions,
        attention_factor: keys.number("attention_factor", 0.0..=1e12, Some(default))?,
        truncate: keys.flag("truncate", true)?,
    })
}

const REMEDY: &str = "correct the file or choose another model";

/// An object of config.json, and how its keys are called in errors.
struct Keys<'a> {
    place: &'a str,
    prefix: &'a str,
    object: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    /// The value of a key; null counts as absent.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, expected: impl Into<String>, got: impl Into<String>) -> Error {
        let place = format!("{}: {}{key}", self.place, self.prefix);
        Error::input("config.json", place, expected, got, REMEDY)
    }

    fn whole(&self, key: &str, range: RangeInclusive<u64>, default: Option<u64>) -> Result<u64> {
        let got = match (self.get(key), default) {
            (Some(value), _) => match value.as_u64() {
                Some(number) if range.contains(&number) => return Ok(number),
                _ => show(value),
            },
            (None, Some(default)) => return Ok(default),
            (None, None) => "nothing".to_string(),
        };
        let expected = format!("an integer from {} to {}", range.start(), range.end());
        Err(self.wrong(key, expected, got))
    }

    fn number(&self, key: &str, range: RangeInclusive<f64>, default: Option<f64>) -> Result<f64> {
        let got = match (self.get(key), default) {
            (Some(value), _) => match value.as_f64() {
                Some(number) if range.contains(&number) => return Ok(number),
                _ => show(value),
            },
            (None, Some(default)) => return Ok(default),
            (None, None) => "nothing".to_string(),
        };
        let expected = format!("a number from {:?} to {:?}", range.start(), range.end());
        Err(self.wrong(key, expected, got))
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wrong(key, "true or false", show(other))),
        }
    }
}

fn show(value: &Value) -> String {
    match value {
        Value::Array(_) | Value::Object(_) => {
            let text = printable(&value.to_string());
            format!("{} {text}", kind_of(value))
        }
        other => printable(&other.to_string()),
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a flag",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
