//! Hugging Face directories: configurations of real families, goldens of transformers, every bad
//! input with its message, and export→import as an identity.
//!
//! Files are made here byte by byte: no other writer of safetensors checks this reader.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};
use terrace::hf::safetensors::SafetensorsFile;
use terrace::hf::{ExportDtype, ExportOptions, WeightSource, export, read_config};
use terrace::model::{Family, ModelSpec, RopeScaling};
use terrace::tile::{EXTENT_ELEMENTS, TileLayout, split_master};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/hf");
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/rope.json");

fn fixture(name: &str) -> ModelSpec {
    let text = fs::read_to_string(Path::new(FIXTURES).join(name)).unwrap();
    ModelSpec::from_config_json(&text, name).unwrap()
}

fn tiny_config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "vocab_size": 50,
        "bos_token_id": 0,
        "eos_token_id": [1, 2],
        "a_key_of_the_future": {"kept": [1, 2]},
    })
}

fn spec_of(config: &Value) -> ModelSpec {
    ModelSpec::from_config_json(&config.to_string(), "config.json").unwrap()
}

fn error_of(text: &str) -> String {
    ModelSpec::from_config_json(text, "c")
        .unwrap_err()
        .to_string()
}

#[track_caller]
fn assert_says(message: &str, parts: &[&str]) {
    assert!(!message.contains('\n'), "more than one line: {message}");
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

// -- configurations ------------------------------------------------------------------------------

#[test]
fn real_models_have_their_published_parameter_counts() {
    let table: [(&str, Family, u64); 5] = [
        ("llama-2-7b.json", Family::Llama, 6_738_415_616),
        ("llama-3.1-8b.json", Family::Llama, 8_030_261_248),
        ("qwen2.5-7b.json", Family::Qwen2, 7_615_616_512),
        ("qwen3-0.6b.json", Family::Qwen3, 596_049_920),
        ("mistral-7b-v0.1.json", Family::Mistral, 7_241_732_096),
    ];
    for (name, family, parameters) in table {
        let spec = fixture(name);
        assert_eq!(spec.family, family, "{name}");
        assert_eq!(spec.parameters(), parameters, "{name}");
    }
    assert_eq!(fixture("mistral-7b-v0.1.json").windows, [Some(4096); 32]);
    assert_eq!(fixture("qwen2.5-7b.json").windows, [None; 28]);
    assert_eq!(
        fixture("llama-3.1-8b.json").eos_token_ids,
        [128001, 128008, 128009]
    );
    assert!(fixture("qwen3-0.6b.json").tied && fixture("qwen3-0.6b.json").qk_norm);
    assert!(fixture("qwen2.5-7b.json").qkv_bias && !fixture("qwen2.5-7b.json").output_bias);
}

#[test]
fn configurations_are_read_as_transformers_reads_them() {
    let goldens: Vec<Value> = serde_json::from_str(&fs::read_to_string(GOLDEN).unwrap()).unwrap();
    assert!(goldens.len() >= 30);
    let (mut equal, mut total, mut worst) = (0, 0, 0.0f64);
    for golden in &goldens {
        let config = &golden["config"];
        let spec = spec_of(config);
        let windows: Vec<Value> = spec.windows.iter().map(|w| json!(w)).collect();
        let eos = match spec.eos_token_ids.as_slice() {
            [] => Value::Null,
            [one] => json!(one),
            several => json!(several),
        };
        assert_eq!(json!(spec.head_dim), golden["head_dim"], "{config}");
        assert_eq!(json!(spec.kv_heads), golden["kv_heads"], "{config}");
        assert_eq!(json!(windows), golden["windows"], "{config}");
        assert_eq!(json!(spec.tied), golden["tied"], "{config}");
        assert_eq!(
            json!(spec.max_positions),
            golden["max_positions"],
            "{config}"
        );
        assert_eq!(json!(spec.bos_token_id), golden["bos"], "{config}");
        assert_eq!(eos, golden["eos"], "{config}");
        assert_eq!(
            json!(spec.output_bias),
            golden["attention_bias"],
            "{config}"
        );
        assert_eq!(
            spec.rms_eps,
            golden["eps"].as_f64().unwrap() as f32,
            "{config}"
        );
        let range = golden["initializer_range"].as_f64().unwrap() as f32;
        assert_eq!(spec.initializer_range, range, "{config}");

        let (frequencies, scale) = spec.rope.inverse_frequencies(spec.head_dim);
        assert_eq!(
            scale,
            golden["attention_scaling"].as_f64().unwrap() as f32,
            "{config}"
        );
        let expected = golden["inv_freq_bits"].as_array().unwrap();
        assert_eq!(frequencies.len(), expected.len(), "{config}");
        for (index, (got, bits)) in frequencies.iter().zip(expected).enumerate() {
            let expected = f32::from_bits(bits.as_u64().unwrap() as u32);
            let error = (f64::from(*got) / f64::from(expected) - 1.0).abs();
            assert!(
                error < 3e-7,
                "{config}: frequency {index}: {got:e} for {expected:e}"
            );
            worst = worst.max(error);
            equal += u32::from(*got == expected);
            total += 1;
        }
    }
    println!("{equal} of {total} inverse frequencies bitwise equal, worst {worst:e}");
}

/// Replaces or adds `key` in the tiny configuration; `raw` is JSON text.
fn with(key: &str, raw: &str) -> String {
    let mut config = tiny_config();
    let object = config.as_object_mut().unwrap();
    object.shift_remove(key);
    let text = config.to_string();
    format!("{{{}:{raw},{}", json!(key), &text[1..])
}

#[test]
fn absurd_configurations_are_refused_by_key_range_and_value() {
    let table: &[(&str, &str, &[&str])] = &[
        (
            "hidden_size",
            "1099511627776",
            &["c: hidden_size", "1 to 1048576", "1099511627776"],
        ),
        ("hidden_size", "0", &["hidden_size", "got 0"]),
        ("hidden_size", "-24", &["hidden_size", "got -24"]),
        (
            "hidden_size",
            "\"24\"",
            &["hidden_size", "an integer", "got \"24\""],
        ),
        ("hidden_size", "24.0", &["hidden_size", "got 24.0"]),
        ("hidden_size", "null", &["hidden_size", "got nothing"]),
        ("hidden_size", "[24]", &["hidden_size", "got a list [24]"]),
        (
            "hidden_size",
            "25",
            &["hidden_size", "a multiple of num_attention_heads (3)", "25"],
        ),
        ("hidden_size", "1e999", &["JSON", "number out of range"]),
        (
            "hidden_size",
            "3",
            &["head_dim", "an even number from 2 to 1024", "got 1"],
        ),
        (
            "num_hidden_layers",
            "2147483648",
            &["num_hidden_layers", "1 to 4096", "2147483648"],
        ),
        ("num_hidden_layers", "0", &["num_hidden_layers", "got 0"]),
        (
            "num_attention_heads",
            "0",
            &["num_attention_heads", "1 to 16384", "got 0"],
        ),
        (
            "num_attention_heads",
            "true",
            &["num_attention_heads", "got true"],
        ),
        (
            "num_key_value_heads",
            "2",
            &["num_key_value_heads", "a divisor of", "(3)", "got 2"],
        ),
        (
            "num_key_value_heads",
            "0",
            &["num_key_value_heads", "got 0"],
        ),
        ("head_dim", "7", &["head_dim", "an even number", "got 7"]),
        ("head_dim", "-8", &["head_dim", "got -8"]),
        ("head_dim", "0", &["head_dim", "got 0"]),
        ("vocab_size", "0", &["vocab_size", "got 0"]),
        (
            "vocab_size",
            "18446744073709551616",
            &["vocab_size", "1 to 16777216"],
        ),
        (
            "intermediate_size",
            "{}",
            &["intermediate_size", "got an object {}"],
        ),
        (
            "max_position_embeddings",
            "0",
            &["max_position_embeddings", "got 0"],
        ),
        ("rope_theta", "NaN", &["JSON", "line 1 column"]),
        (
            "rope_theta",
            "-10000.0",
            &["rope_theta", "a number from", "-10000.0"],
        ),
        ("rope_theta", "1.0", &["rope_theta", "got 1.0"]),
        ("rope_theta", "\"1e4\"", &["rope_theta", "got \"1e4\""]),
        (
            "rope_theta",
            "{\"__float__\":\"NaN\"}",
            &["rope_theta", "got an object"],
        ),
        ("rms_norm_eps", "-1e-5", &["rms_norm_eps", "got -0.00001"]),
        ("rms_norm_eps", "0", &["rms_norm_eps", "got 0"]),
        ("rms_norm_eps", "1e-60", &["rms_norm_eps", "1e-60"]),
        ("rms_norm_eps", "Infinity", &["JSON"]),
        (
            "initializer_range",
            "2",
            &["initializer_range", "0.0 to 1.0", "got 2"],
        ),
        (
            "tie_word_embeddings",
            "1",
            &["tie_word_embeddings", "true or false", "got 1"],
        ),
        ("eos_token_id", "-1", &["eos_token_id", "got -1"]),
        ("eos_token_id", "[1, \"2\"]", &["eos_token_id", "got \"2\""]),
        (
            "bos_token_id",
            "4294967295",
            &["bos_token_id", "4294967295"],
        ),
        (
            "model_type",
            "\"gpt2\"",
            &["architecture", "gpt2", "llama, qwen2, qwen3, mistral"],
        ),
        ("model_type", "\"\\u001b[31m\"", &["\\u{1b}[31m"]),
        ("model_type", "7", &["model_type", "a string", "got 7"]),
        ("model_type", "null", &["model_type", "got nothing"]),
        (
            "architectures",
            "[\"LlamaForSequenceClassification\"]",
            &["architecture", "LlamaForC"],
        ),
        (
            "hidden_act",
            "\"gelu\"",
            &["hidden_act", "gelu", "supported: silu"],
        ),
        ("mlp_bias", "true", &["mlp_bias", "not supported"]),
        (
            "attention_bias",
            "\"yes\"",
            &["attention_bias", "true or false"],
        ),
        (
            "quantization_config",
            "{\"bits\":4}",
            &["quantization_config", "{\"bits\":4}"],
        ),
        (
            "partial_rotary_factor",
            "0.5",
            &["partial_rotary_factor", "0.5"],
        ),
        (
            "rope_scaling",
            "7",
            &["rope_scaling", "an object or null", "got 7"],
        ),
        (
            "rope_scaling",
            "{\"factor\":2}",
            &["rope_scaling.rope_type", "yarn", "nothing"],
        ),
        (
            "rope_scaling",
            "{\"type\":\"dynamic\",\"factor\":2}",
            &["rope type", "\"dynamic\"", "yarn"],
        ),
        (
            "rope_scaling",
            "{\"rope_type\":\"longrope\"}",
            &["longrope", "default, linear, llama3"],
        ),
        (
            "rope_scaling",
            "{\"type\":\"linear\"}",
            &["rope_scaling.factor", "got nothing"],
        ),
        (
            "rope_scaling",
            "{\"type\":\"linear\",\"factor\":-1}",
            &["rope_scaling.factor", "-1"],
        ),
        (
            "rope_scaling",
            "{\"type\":\"yarn\"}",
            &["rope_scaling.factor", "got nothing"],
        ),
        (
            "rope_parameters",
            "{\"rope_type\":[1]}",
            &["rope_parameters.rope_type", "a list [1]"],
        ),
        (
            "rope_parameters",
            "{\"full_attention\":{}}",
            &["rope_parameters.rope_type"],
        ),
        (
            "rope_scaling",
            "{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,\"high_freq_factor\":4}",
            &[
                "rope_scaling.high_freq_factor",
                "more than low_freq_factor (4)",
            ],
        ),
        (
            "rope_scaling",
            "{\"rope_type\":\"yarn\",\"factor\":8,\"beta_fast\":1,\"beta_slow\":2}",
            &["rope_scaling.beta_fast", "at least beta_slow (2)"],
        ),
        (
            "layer_types",
            "[\"full_attention\"]",
            &["layer_types", "(2) entries", "got 1"],
        ),
        (
            "layer_types",
            "[\"conv\",\"conv\"]",
            &["layer type", "layer_types[0] \"conv\""],
        ),
        (
            "layer_types",
            "[\"full_attention\",\"sliding_attention\"]",
            &["layer_types[1]", "no sliding window"],
        ),
    ];
    ModelSpec::from_config_json(&with("hidden_size", "24"), "c").unwrap();
    for (key, raw, parts) in table {
        let message = error_of(&with(key, raw));
        assert_says(&message, parts);
    }
}

#[test]
fn malformed_and_oversized_configurations_are_refused() {
    assert_says(&error_of(""), &["config.json: c: expected JSON", "EOF"]);
    assert_says(&error_of("[]"), &["a JSON object", "got a list"]);
    assert_says(&error_of("null"), &["a JSON object", "got null"]);
    let text = with("rope_theta", "1e4");
    let duplicate = format!("{{\"rope_theta\":2e4,{}", &text[1..]);
    assert_says(
        &error_of(&duplicate),
        &["without duplicate keys", "duplicate key \"rope_theta\""],
    );
    assert_says(
        &error_of(&with(
            "rope_scaling",
            "{\"type\":\"linear\",\"factor\":1,\"factor\":2}",
        )),
        &["duplicate key \"factor\""],
    );
    assert_says(&error_of(&"[".repeat(100_000)), &["recursion limit"]);
    let mut config = tiny_config();
    for (key, value) in [
        ("hidden_size", 1 << 20),
        ("intermediate_size", 1 << 22),
        ("num_hidden_layers", 4096),
        ("num_attention_heads", 1 << 14),
    ] {
        config[key] = json!(value);
    }
    assert_says(
        &error_of(&config.to_string()),
        &[
            "all dimensions together",
            "at most 8796093022208 parameters",
            "got 63050953234841600",
        ],
    );
    config["num_hidden_layers"] = json!(1);
    assert_says(&error_of(&config.to_string()), &["all dimensions together"]);
}

#[test]
fn qwen_windows_without_a_window_are_refused() {
    let mut config = tiny_config();
    config["model_type"] = json!("qwen3");
    config["architectures"] = json!(["Qwen3ForCausalLM"]);
    config["layer_types"] = json!(["sliding_attention", "full_attention"]);
    assert_says(
        &error_of(&config.to_string()),
        &["layer_types[0]", "no sliding window"],
    );
    config["use_sliding_window"] = json!(true);
    assert_eq!(spec_of(&config).windows, [Some(4096), None]);
}

#[test]
fn written_configurations_read_back_as_the_same_model() {
    let goldens: Vec<Value> = serde_json::from_str(&fs::read_to_string(GOLDEN).unwrap()).unwrap();
    let mut specs: Vec<(ModelSpec, Option<Value>)> = Vec::new();
    for golden in &goldens {
        let config = golden["config"].clone();
        let spec = spec_of(&config);
        specs.push((spec.clone(), None));
        specs.push((spec, Some(config)));
    }
    for (spec, original) in specs {
        let written = spec.to_config_json(original.as_ref(), "bfloat16");
        assert_eq!(spec_of(&written), spec, "{written}");
        for spelling in [
            "torch_dtype",
            "dtype",
            "rope_theta",
            "rope_scaling",
            "rope_parameters",
        ] {
            assert!(written.get(spelling).is_some(), "{spelling}");
        }
        let mut only_new = written.clone();
        for key in ["rope_theta", "rope_scaling", "torch_dtype"] {
            only_new.as_object_mut().unwrap().shift_remove(key);
        }
        assert_eq!(spec_of(&only_new), spec, "{only_new}");
        let mut only_old = written.clone();
        for key in ["rope_parameters", "dtype"] {
            only_old.as_object_mut().unwrap().shift_remove(key);
        }
        assert_eq!(spec_of(&only_old), spec, "{only_old}");
    }
    let config = tiny_config();
    let written = spec_of(&config).to_config_json(Some(&config), "float32");
    assert_eq!(
        written["a_key_of_the_future"],
        config["a_key_of_the_future"]
    );
    assert_eq!(written["rms_norm_eps"].to_string(), "1e-6");
    assert!(spec_of(&config).rope.scaling == RopeScaling::Default);
}

/// Values that configurations should not have, and some that they may.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(|flag| json!(flag)),
        any::<i64>().prop_map(|number| json!(number)),
        any::<u64>().prop_map(|number| json!(number)),
        (0u64..200).prop_map(|number| json!(number)),
        (0u32..64).prop_map(|shift| json!(1u64 << shift)),
        any::<f64>().prop_map(|number| json!(number)),
        prop_oneof![
            Just("llama"),
            Just("qwen2"),
            Just("qwen3"),
            Just("mistral"),
            Just("yarn"),
            Just("llama3"),
            Just("linear"),
            Just("silu"),
            Just("sliding_attention"),
            Just("")
        ]
        .prop_map(|text| json!(text)),
    ];
    leaf.prop_recursive(2, 8, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
            prop::collection::vec((prop::sample::select(KEYS), inner), 0..6).prop_map(|entries| {
                Value::Object(
                    entries
                        .into_iter()
                        .map(|(k, v)| (k.to_string(), v))
                        .collect(),
                )
            }),
        ]
    })
}

const KEYS: &[&str] = &[
    "architectures",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_type",
    "type",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
    "max_position_embeddings",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "rms_norm_eps",
    "eos_token_id",
    "bos_token_id",
    "tie_word_embeddings",
    "attention_bias",
    "initializer_range",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn mutated_configurations_never_panic(
        changes in prop::collection::vec((prop::sample::select(KEYS), any_json()), 1..4),
        cut in prop::option::of(0.0..1.0f64),
    ) {
        let mut config = tiny_config();
        for (key, value) in changes {
            config[key] = value;
        }
        let mut text = config.to_string();
        if let Some(cut) = cut {
            text.truncate((text.len() as f64 * cut) as usize);
        }
        if let Ok(spec) = ModelSpec::from_config_json(&text, "c") {
            // A model that is accepted can be laid out, and written and read again.
            prop_assert!(spec.parameters() <= terrace::model::parse::PARAMETERS_MAX);
            let (frequencies, scale) = spec.rope.inverse_frequencies(spec.head_dim);
            prop_assert!(scale.is_finite() && frequencies.iter().all(|f| f.is_finite()));
            let written = spec.to_config_json(Some(&config), "float32");
            prop_assert_eq!(spec_of(&written), spec);
        }
    }

    #[test]
    fn mutated_headers_never_panic(
        changes in prop::collection::vec((0.0..1.0f64, any::<u8>()), 1..4),
        resize in prop::option::of(0usize..400),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let header = json!({
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
        });
        let mut bytes = safetensors(&header.to_string(), 26);
        for (place, byte) in changes {
            let place = (bytes.len() as f64 * place) as usize;
            bytes[place] = byte;
        }
        if let Some(resize) = resize {
            bytes.resize(resize, 0);
        }
        fs::write(dir.path().join("x.safetensors"), &bytes).unwrap();
        let _ = SafetensorsFile::open(dir.path(), "x.safetensors");
    }
}

// -- safetensors ---------------------------------------------------------------------------------

fn safetensors(header: &str, data_bytes: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data_bytes, 0x3c);
    bytes
}

fn open_bytes(bytes: &[u8]) -> Result<SafetensorsFile, String> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("x.safetensors"), bytes).unwrap();
    SafetensorsFile::open(dir.path(), "x.safetensors").map_err(|error| error.to_string())
}

#[test]
fn bad_headers_are_refused_each_with_its_reason() {
    let f32 = |begin: u64, end: u64| {
        format!("{{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[{begin},{end}]}}")
    };
    let entry = |text: &str| format!("{{\"a\":{text}}}");
    let long = format!("{{\"{}\":{}}}", "n".repeat(2000), f32(0, 4));
    let table: Vec<(String, usize, &[&str])> =
        vec![
        (format!("{{\"a\":{},\"a\":{}}}", f32(0, 4), f32(4, 8)), 8, &["duplicate key a"]),
        (
            entry(r#"{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}"#),
            4,
            &["tensor a", "duplicate key dtype"],
        ),
        (r#"{"__metadata__":{"x":"1","x":"2"}}"#.to_string(), 0, &["duplicate key x"]),
        (
            r#"{"__metadata__":{},"__metadata__":{}}"#.to_string(),
            0,
            &["duplicate key __metadata__"],
        ),
        (r#"{"__metadata__":{"x":1}}"#.to_string(), 0, &["a string"]),
        (
            format!("{{\"a\":{},\"b\":{}}}", f32(0, 4), f32(2, 6)),
            6,
            &["tensor b", "overlap", "end of a"],
        ),
        (format!("{{\"a\":{},\"b\":{}}}", f32(0, 4), f32(0, 4)), 4, &["tensor b", "overlap"]),
        (
            format!("{{\"a\":{},\"b\":{}}}", f32(0, 4), f32(8, 12)),
            12,
            &["tensor b", "byte 4", "hole"],
        ),
        (entry(&f32(4, 8)), 8, &["tensor a", "byte 0", "hole"]),
        (entry(&f32(4, 0)), 4, &["tensor a", "begin <= end", "[4, 0]"]),
        (entry(&f32(0, 4)), 3, &["tensor a", "within the file's 3 bytes"]),
        (entry(&f32(0, 4)), 5, &["4 bytes of tensors", "got 5: trailing bytes"]),
        (entry(&f32(0, 5)), 5, &["tensor a", "32 bits for F32 [1]", "got 5 bytes"]),
        (
            entry(r#"{"dtype":"F32","shape":[1],"data_offsets":[]}"#),
            0,
            &["tensor a", "data_offsets of 0"],
        ),
        (
            entry(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}"#),
            4,
            &["more than 2 numbers"],
        ),
        (entry(r#"{"dtype":"F32","shape":[1],"data_offsets":[-1,4]}"#), 4, &["tensor a", "-1"]),
        (entry(r#"{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}"#), 4, &["tensor a", "1.5"]),
        (
            entry(r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}"#),
            0,
            &["tensor a", "more bits than a 64-bit number counts"],
        ),
        (entry(r#"{"dtype":"F4","shape":[3],"data_offsets":[0,1]}"#), 1, &["12 bits for F4 [3]"]),
        (
            entry(r#"{"dtype":"F33","shape":[1],"data_offsets":[0,4]}"#),
            4,
            &["dtype F33", "BF16 F16 F32"],
        ),
        (entry(r#"{"dtype":"F32","data_offsets":[0,4]}"#), 4, &["tensor a", "shape is missing"]),
        (entry(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}"#), 4, &["unknown key x"]),
        (
            entry(r#"{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}"#),
            4,
            &["more than 8"],
        ),
        (entry("7"), 0, &["tensor a"]),
        ("[]".to_string(), 0, &["begins with {"]),
        ("{".to_string(), 0, &["a valid header", "EOF"]),
        ("{} x".to_string(), 0, &["a valid header", "trailing"]),
        (String::new(), 0, &["begins with {"]),
        (long, 4, &["a tensor's name of 2000 bytes"]),
        (
            "{\"\\u001b[2J\\n\\u202e\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}"
                .to_string(),
            4,
            &["\\u{1b}[2J\\u{a}\\u{202e}"],
        ),
    ];
    for (header, data_bytes, parts) in table {
        let message = open_bytes(&safetensors(&header, data_bytes)).unwrap_err();
        assert_says(&message, parts);
        assert_says(&message, &["safetensors: ", "x.safetensors"]);
    }
}

#[test]
fn bad_lengths_are_refused_before_memory_is_taken() {
    assert_says(
        &open_bytes(b"").unwrap_err(),
        &["8 bytes of header length", "0 bytes"],
    );
    assert_says(&open_bytes(b"1234567").unwrap_err(), &["a file of 7 bytes"]);
    let with_length = |n: u64| [&n.to_le_bytes()[..], b"{}"].concat();
    let message = open_bytes(&with_length(u64::MAX)).unwrap_err();
    assert_says(
        &message,
        &["at most 100000000 bytes", "18446744073709551615"],
    );
    assert_says(
        &open_bytes(&with_length(100_000_001)).unwrap_err(),
        &["got 100000001"],
    );
    assert_says(
        &open_bytes(&with_length(3)).unwrap_err(),
        &["at most 2 bytes, as the file has"],
    );
    let mut bytes = safetensors("{\"\u{e9}\":1}", 0);
    bytes[10] = 0xff;
    assert_says(&open_bytes(&bytes).unwrap_err(), &["UTF-8", "byte 10"]);
    let mut header = String::from("{");
    for index in 0..=terrace::hf::safetensors::TENSORS_MAX {
        header +=
            &format!("\"{index}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}},");
    }
    header.pop();
    header.push('}');
    assert_says(
        &open_bytes(&safetensors(&header, 0)).unwrap_err(),
        &["more than 131072 tensors"],
    );
}

#[test]
fn valid_headers_are_read() {
    let header = r#"{"b":{"dtype":"BF16","shape":[2],"data_offsets":[4,8]},"s":{"shape":[],
        "data_offsets":[0,4],"dtype":"F32"},
        "e":{"dtype":"F32","shape":[0,7],"data_offsets":[4,4]}}   "#;
    let file = open_bytes(&safetensors(header, 8)).unwrap();
    assert_eq!(
        file.tensor("b").unwrap().offset,
        8 + header.len() as u64 + 4
    );
    assert_eq!(file.tensor("e").unwrap().bytes, 0);
    assert_eq!(file.names().count(), 3);
    assert!(open_bytes(&safetensors("{}", 0)).is_ok());
}

// -- directories ---------------------------------------------------------------------------------

/// A model directory with the tiny configuration and random weights; the masters of every tile.
struct Model {
    dir: tempfile::TempDir,
    spec: ModelSpec,
}

impl Model {
    fn new(config: &Value, dtype: ExportDtype, shard_bytes: u64) -> Model {
        let dir = tempfile::tempdir().unwrap();
        let spec = spec_of(config);
        let source = WeightSource::random(&spec, 5);
        let options = ExportOptions {
            dir: dir.path().join("model"),
            dtype,
            shard_bytes,
            overwrite: false,
        };
        let mut read =
            |layout: &TileLayout, range, out: &mut [f32]| source.fill(layout, range, out);
        export(&options, &spec, Some(config), None, &mut read).unwrap();
        Model { dir, spec }
    }

    fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("model")
    }

    fn error(&self) -> String {
        WeightSource::open(&self.path(), &self.spec)
            .unwrap_err()
            .to_string()
    }

    /// Rewrites the header of the single file; tensors may be added with their bytes.
    fn edit(&self, change: impl FnOnce(&mut Value, &mut Vec<u8>)) {
        let path = self.path().join("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
        let mut tensors = bytes[8 + n..].to_vec();
        change(&mut header, &mut tensors);
        let mut bytes = safetensors(&header.to_string(), 0);
        bytes.extend(tensors);
        fs::write(path, bytes).unwrap();
    }
}

fn append(
    header: &mut Value,
    tensors: &mut Vec<u8>,
    name: &str,
    dtype: &str,
    shape: &[u64],
    bytes: &[u8],
) {
    let begin = tensors.len();
    tensors.extend_from_slice(bytes);
    header[name] = json!({
        "dtype": dtype, "shape": shape, "data_offsets": [begin, tensors.len()],
    });
}

fn tile(source: &WeightSource, layout: &TileLayout) -> Vec<u32> {
    let mut values = vec![f32::NAN; layout.elements as usize];
    source
        .fill(layout, 0..layout.elements, &mut values)
        .unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

#[test]
fn export_then_import_is_the_identity() {
    let mut qwen = tiny_config();
    qwen["model_type"] = json!("qwen2");
    qwen["architectures"] = json!(["Qwen2ForCausalLM"]);
    qwen["tie_word_embeddings"] = json!(true);
    for (config, dtype, shard_bytes, shards) in [
        (tiny_config(), ExportDtype::F32, u64::MAX, 1),
        (tiny_config(), ExportDtype::Bf16, u64::MAX, 1),
        (tiny_config(), ExportDtype::F32, 10_000, 5),
        (qwen.clone(), ExportDtype::Bf16, 1, 26),
        (qwen, ExportDtype::Bf16, 6_000, 4),
    ] {
        let model = Model::new(&config, dtype, shard_bytes);
        let random = WeightSource::random(&model.spec, 5);
        let (spec, original) = read_config(&model.path()).unwrap();
        assert_eq!(spec, model.spec);
        assert_eq!(
            original["a_key_of_the_future"],
            config["a_key_of_the_future"]
        );
        let source = WeightSource::open(&model.path(), &spec).unwrap();
        assert!(source.notes().is_empty());
        for layout in spec.tile_layouts() {
            let expected: Vec<u32> = tile(&random, &layout)
                .into_iter()
                .map(|bits| match dtype {
                    ExportDtype::F32 => bits,
                    ExportDtype::Bf16 => u32::from(split_master(f32::from_bits(bits)).0) << 16,
                })
                .collect();
            assert_eq!(tile(&source, &layout), expected);
        }
        let count = fs::read_dir(model.path())
            .unwrap()
            .filter(|e| {
                e.as_ref()
                    .unwrap()
                    .file_name()
                    .to_string_lossy()
                    .ends_with(".safetensors")
            })
            .count();
        assert_eq!(count, shards, "{shard_bytes}");
        let left: Vec<_> = fs::read_dir(model.dir.path()).unwrap().collect();
        assert_eq!(left.len(), 1, "nothing but the model is left");
        again(&model, &source, dtype, shard_bytes);
    }
}

/// What was imported exports to the same bytes.
fn again(model: &Model, source: &WeightSource, dtype: ExportDtype, shard_bytes: u64) {
    let dir = model.dir.path().join("again");
    let options = ExportOptions {
        dir: dir.clone(),
        dtype,
        shard_bytes,
        overwrite: false,
    };
    let (spec, original) = read_config(&model.path()).unwrap();
    let mut read = |layout: &TileLayout, range, out: &mut [f32]| source.fill(layout, range, out);
    let from = model.path();
    let report = export(&options, &spec, Some(&original), Some(&from), &mut read).unwrap();
    assert_eq!(report.parameters, spec.parameters());
    assert_eq!(report.tensor_bytes, spec.parameters() * dtype.bytes());
    let mut names: Vec<_> = fs::read_dir(&from)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    names.sort();
    let mut files: Vec<_> = report.files.iter().map(std::ffi::OsString::from).collect();
    files.sort();
    assert_eq!(files, names);
    for name in names {
        assert!(
            fs::read(from.join(&name)).unwrap() == fs::read(dir.join(&name)).unwrap(),
            "{name:?}"
        );
    }
}

#[test]
fn files_have_the_form_that_others_read() {
    let model = Model::new(&tiny_config(), ExportDtype::Bf16, 4_000);
    let index = fs::read_to_string(model.path().join("model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_str(&index).unwrap();
    assert_eq!(
        index["metadata"]["total_size"],
        json!(model.spec.parameters() * 2)
    );
    let map = index["weight_map"].as_object().unwrap();
    let names: usize = (0..4)
        .map(|layer| model.spec.layer_tensors(layer).len())
        .sum();
    assert_eq!(map.len(), names);
    let first = map["model.embed_tokens.weight"].as_str().unwrap();
    assert!(first.starts_with("model-00001-of-0000") && first.ends_with(".safetensors"));
    let bytes = fs::read(model.path().join(first)).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert_eq!(n % 8, 0);
    let header: Value = serde_json::from_slice(&bytes[8..8 + n as usize]).unwrap();
    assert_eq!(header["__metadata__"], json!({"format": "pt"}));
    let generation = fs::read_to_string(model.path().join("generation_config.json")).unwrap();
    let generation: Value = serde_json::from_str(&generation).unwrap();
    assert_eq!(generation["eos_token_id"], json!([1, 2]));
    assert_eq!(generation["bos_token_id"], json!(0));
}

#[test]
fn f16_and_any_range_are_filled_exactly() {
    let model = Model::new(&tiny_config(), ExportDtype::F32, u64::MAX);
    let values: Vec<f32> = (0..24).map(|i| (i as f32 - 12.0) * 0.37).collect();
    let halves: Vec<u8> = values
        .iter()
        .flat_map(|v| half::f16::from_f32(*v).to_le_bytes())
        .collect();
    model.edit(|header, tensors| {
        // The final norm is the last tensor of the file.
        tensors.truncate(tensors.len() - 24 * 4);
        append(header, tensors, "model.norm.weight", "F16", &[24], &halves);
    });
    let source = WeightSource::open(&model.path(), &model.spec).unwrap();
    let layout = model.spec.tile_layout(3);
    let whole = tile(&source, &layout);
    let norm = layout.tensor("model.norm.weight").unwrap().start as usize;
    for (index, value) in values.iter().enumerate() {
        let expected = half::f16::from_f32(*value).to_f32();
        assert_eq!(f32::from_bits(whole[norm + index]), expected);
    }
    assert!(
        whole[norm + 24..].iter().all(|bits| *bits == 0),
        "padding is zero"
    );
    let block = model.spec.tile_layout(1);
    let whole = tile(&source, &block);
    for start in (0..block.elements).step_by(61) {
        let end = (start + 97).min(block.elements);
        let mut part = vec![f32::NAN; (end - start) as usize];
        source.fill(&block, start..end, &mut part).unwrap();
        let part: Vec<u32> = part.into_iter().map(f32::to_bits).collect();
        assert_eq!(part, whole[start as usize..end as usize], "{start}..{end}");
    }
}

#[test]
fn tensors_that_are_not_the_models_are_refused() {
    let model = || Model::new(&tiny_config(), ExportDtype::F32, u64::MAX);
    let other = model();
    other.edit(|header, _| {
        let entry = header
            .as_object_mut()
            .unwrap()
            .shift_remove("model.norm.weight")
            .unwrap();
        header["model.other"] = entry;
    });
    assert_says(
        &other.error(),
        &["tensor model.norm.weight", "shape [24]", "no such tensor"],
    );
    let other = model();
    other.edit(|header, _| header["lm_head.weight"]["shape"] = json!([24, 50]));
    assert_says(
        &other.error(),
        &["tensor lm_head.weight", "shape [50, 24]", "got [24, 50]"],
    );
    let other = model();
    other.edit(|header, _| {
        header["model.norm.weight"]["dtype"] = json!("I32");
    });
    assert_says(
        &other.error(),
        &["tensor model.norm.weight", "BF16, F16 or F32", "got I32"],
    );
    let other = model();
    other.edit(|header, tensors| {
        for name in ["../../etc/x", "/abs", "b\u{0}", "c", "d", "e"] {
            append(header, tensors, name, "U8", &[1], b"x");
        }
    });
    assert_says(
        &other.error(),
        &["6 more: ../../etc/x, /abs, b\\u{0}, c, d;"],
    );
    let other = model();
    other.edit(|header, tensors| {
        let name = "model.layers.0.self_attn.rotary_emb.inv_freq";
        append(header, tensors, name, "F32", &[1], b"1234");
    });
    WeightSource::open(&other.path(), &other.spec).unwrap();
    let empty = tempfile::tempdir().unwrap();
    let message = WeightSource::open(empty.path(), &other.spec)
        .unwrap_err()
        .to_string();
    assert_says(
        &message,
        &[
            "model.safetensors or model.safetensors.index.json",
            "got neither",
        ],
    );
}

#[test]
fn a_tied_head_must_equal_the_embedding() {
    let mut config = tiny_config();
    config["tie_word_embeddings"] = json!(true);
    let model = Model::new(&config, ExportDtype::F32, u64::MAX);
    model.edit(|header, tensors| {
        let embed = tensors[..50 * 24 * 4].to_vec();
        append(header, tensors, "lm_head.weight", "F32", &[50, 24], &embed);
    });
    let source = WeightSource::open(&model.path(), &model.spec).unwrap();
    assert!(
        source.notes()[0].contains("lm_head.weight"),
        "{:?}",
        source.notes()
    );
    model.edit(|_, tensors| *tensors.last_mut().unwrap() ^= 1);
    assert_says(
        &model.error(),
        &["lm_head.weight", "got other values", "tie_word_embeddings"],
    );
    let model = Model::new(&config, ExportDtype::F32, u64::MAX);
    model.edit(|header, tensors| {
        append(header, tensors, "lm_head.weight", "BF16", &[1], b"12");
    });
    assert_says(&model.error(), &["lm_head.weight", "got BF16 [1]"]);
}

#[test]
fn an_index_may_name_only_files_beside_it() {
    let model = Model::new(&tiny_config(), ExportDtype::F32, 10_000);
    let index_path = model.path().join("model.safetensors.index.json");
    let index: Value = serde_json::from_str(&fs::read_to_string(&index_path).unwrap()).unwrap();
    let norm = index["weight_map"]["model.norm.weight"].clone();
    let write = |text: &str| fs::write(&index_path, text).unwrap();
    let set = |shard: &str| {
        let mut index = index.clone();
        index["weight_map"]["model.norm.weight"] = json!(shard);
        write(&index.to_string());
    };
    for name in [
        "../x.safetensors",
        "/etc/passwd",
        "a\\b.safetensors",
        "https://x/y.safetensors",
        "",
        ".",
        "..",
        "a/../b.safetensors",
        "\u{1b}.safetensors",
        ".hidden.safetensors",
    ] {
        set(name);
        assert_says(
            &model.error(),
            &["weight_map", "a file name of letters", "without a path"],
        );
    }
    set("model.bin");
    assert_says(&model.error(), &["ends in .safetensors", "got model.bin"]);
    set("absent.safetensors");
    assert_says(
        &model.error(),
        &["open", "absent.safetensors", "No such file"],
    );

    let outside = model.dir.path().join("outside.safetensors");
    fs::copy(model.path().join(norm.as_str().unwrap()), &outside).unwrap();
    symlink(&outside, model.path().join("link.safetensors")).unwrap();
    set("link.safetensors");
    assert_says(
        &model.error(),
        &[
            "a regular file within",
            "got a link to",
            "outside.safetensors",
        ],
    );
    symlink("/dev/zero", model.path().join("zero.safetensors")).unwrap();
    set("zero.safetensors");
    assert_says(&model.error(), &["a regular file within", "/dev/zero"]);
    fs::create_dir(model.path().join("dir.safetensors")).unwrap();
    set("dir.safetensors");
    assert_says(
        &model.error(),
        &["a regular file within", "got something else"],
    );
    let pipe = model.path().join("pipe.safetensors");
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    set("pipe.safetensors");
    assert_says(
        &model.error(),
        &["a regular file within", "got something else"],
    );
    symlink(
        norm.as_str().unwrap(),
        model.path().join("inside.safetensors"),
    )
    .unwrap();
    let inside = index
        .to_string()
        .replace(norm.as_str().unwrap(), "inside.safetensors");
    write(&inside);
    WeightSource::open(&model.path(), &model.spec).unwrap();
}

#[test]
fn an_index_must_agree_with_its_shards() {
    let model = Model::new(&tiny_config(), ExportDtype::F32, 10_000);
    let index_path = model.path().join("model.safetensors.index.json");
    let text = fs::read_to_string(&index_path).unwrap();
    let index: Value = serde_json::from_str(&text).unwrap();
    let write = |text: &str| fs::write(&index_path, text).unwrap();
    let mut changed = index.clone();
    changed["weight_map"]["no.such\u{7}"] = index["weight_map"]["model.norm.weight"].clone();
    write(&changed.to_string());
    assert_says(
        &model.error(),
        &["tensor no.such\\u{7}", "no such tensor in model-0000"],
    );
    let mut changed = index.clone();
    changed["weight_map"]["model.norm.weight"] =
        index["weight_map"]["model.embed_tokens.weight"].clone();
    write(&changed.to_string());
    assert_says(
        &model.error(),
        &["tensor model.norm.weight", "no such tensor in model-00001"],
    );
    let mut changed = index.clone();
    changed["weight_map"]
        .as_object_mut()
        .unwrap()
        .shift_remove("lm_head.weight");
    write(&changed.to_string());
    assert_says(
        &model.error(),
        &["tensor lm_head.weight", "which has it", "got nothing"],
    );
    let twice = text.replacen(
        "\"weight_map\": {",
        "\"weight_map\": {\"lm_head.weight\": \"x\",",
        1,
    );
    write(&twice);
    assert_says(&model.error(), &["duplicate key lm_head.weight"]);
    write("{\"weight_map\":{},\"weight_map\":{}}");
    assert_says(&model.error(), &["duplicate key weight_map"]);
    write("{\"metadata\":{\"a\":1,\"a\":2},\"weight_map\":{}}");
    assert_says(&model.error(), &["duplicate key", "a"]);
    write("{\"weight_map\":{\"a\":7}}");
    assert_says(&model.error(), &["a valid index", "expected a string"]);
    write("{}");
    assert_says(&model.error(), &["weight_map is missing"]);
}

#[test]
fn a_cache_snapshot_may_link_to_its_blobs() {
    let model = Model::new(&tiny_config(), ExportDtype::F32, u64::MAX);
    let root = tempfile::tempdir().unwrap();
    let snapshot = root.path().join("snapshots/abc");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir(root.path().join("blobs")).unwrap();
    for (name, blob) in [("config.json", "1"), ("model.safetensors", "2")] {
        fs::copy(
            model.path().join(name),
            root.path().join("blobs").join(blob),
        )
        .unwrap();
        symlink(format!("../../blobs/{blob}"), snapshot.join(name)).unwrap();
    }
    let (spec, _) = read_config(&snapshot).unwrap();
    WeightSource::open(&snapshot, &spec).unwrap();
    fs::rename(root.path().join("blobs"), root.path().join("other")).unwrap();
    fs::remove_file(snapshot.join("config.json")).unwrap();
    symlink("../../other/1", snapshot.join("config.json")).unwrap();
    assert_says(
        &read_config(&snapshot).unwrap_err().to_string(),
        &["got a link to"],
    );
}

// -- export --------------------------------------------------------------------------------------

fn options(dir: &Path, overwrite: bool) -> ExportOptions {
    ExportOptions {
        dir: dir.to_path_buf(),
        dtype: ExportDtype::Bf16,
        shard_bytes: 4_000,
        overwrite,
    }
}

fn export_random(options: &ExportOptions, source_dir: Option<&Path>) -> Result<(), String> {
    let spec = spec_of(&tiny_config());
    let source = WeightSource::random(&spec, 1);
    let mut read = |layout: &TileLayout, range, out: &mut [f32]| source.fill(layout, range, out);
    export(options, &spec, None, source_dir, &mut read)
        .map(|_| ())
        .map_err(|error| error.to_string())
}

#[test]
fn an_export_never_takes_the_place_of_what_is_not_one() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("out");
    export_random(&options(&dir, false), None).unwrap();
    let message = export_random(&options(&dir, false), None).unwrap_err();
    assert_says(
        &message,
        &[
            "export: ",
            "a new directory",
            "one that is there",
            "overwrite",
        ],
    );
    export_random(&options(&dir, true), None).unwrap();
    let message = export_random(&options(&dir, true), Some(&dir)).unwrap_err();
    assert_says(
        &message,
        &["another directory", "the model that is exported from"],
    );
    fs::write(dir.join("thesis.tex"), "precious").unwrap();
    let message = export_random(&options(&dir, true), None).unwrap_err();
    assert_says(&message, &["a model's files only", "got thesis.tex"]);
    assert_eq!(
        fs::read_to_string(dir.join("thesis.tex")).unwrap(),
        "precious"
    );
    let file = root.path().join("file");
    fs::write(&file, "").unwrap();
    assert_says(
        &export_random(&options(&file, true), None).unwrap_err(),
        &["a new directory"],
    );
    symlink(&dir, root.path().join("link")).unwrap();
    let link = root.path().join("link");
    assert_says(
        &export_random(&options(&link, true), None).unwrap_err(),
        &["a new directory"],
    );
    let deep = root.path().join("a/b");
    assert_says(
        &export_random(&options(&deep, true), None).unwrap_err(),
        &["a parent that is"],
    );
    for dir in ["/", "..", ""] {
        let message = export_random(&options(Path::new(dir), true), None).unwrap_err();
        assert_says(&message, &["a path that ends in a directory's name"]);
    }
    let mut none = options(&root.path().join("new"), false);
    none.shard_bytes = 0;
    assert_says(
        &export_random(&none, None).unwrap_err(),
        &["shard bytes", "got 0"],
    );
    let mut names: Vec<_> = fs::read_dir(root.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["file", "link", "out"]);
}

#[test]
fn a_failed_export_leaves_nothing_and_the_old_one_whole() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("out");
    export_random(&options(&dir, false), None).unwrap();
    let before = fs::read(dir.join("config.json")).unwrap();
    let spec = spec_of(&tiny_config());
    for fail_at in 0..4 {
        let mut calls = 0;
        let mut read = |_: &TileLayout, _: std::ops::Range<u64>, _: &mut [f32]| {
            calls += 1;
            match calls > fail_at {
                true => Err(terrace::Error::StoreFailed {
                    first: "the disk".to_string(),
                }),
                false => Ok(()),
            }
        };
        let error = export(&options(&dir, true), &spec, None, None, &mut read).unwrap_err();
        assert_says(&error.to_string(), &["the disk"]);
        assert_eq!(
            fs::read_dir(root.path()).unwrap().count(),
            1,
            "only the old export"
        );
        assert_eq!(fs::read(dir.join("config.json")).unwrap(), before);
    }
    let panicked = std::panic::catch_unwind(|| {
        let mut read = |_: &TileLayout, _: std::ops::Range<u64>, _: &mut [f32]| panic!("planned");
        let _ = export(&options(&dir, true), &spec, None, None, &mut read);
    });
    assert!(panicked.is_err());
    assert_eq!(
        fs::read_dir(root.path()).unwrap().count(),
        1,
        "only the old export"
    );
}

/// In a container every process may have the same number: what a killed export left was in the way
/// of the next one, and elsewhere it took its room for ever.
#[test]
fn what_a_killed_export_left_is_removed_by_the_next_and_nothing_else() {
    let root = tempfile::tempdir().unwrap();
    let make = |name: &str, file: &str| {
        let dir = root.path().join(name);
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join(file), "x").unwrap();
        dir
    };
    let own = format!(".out.partial-{}", std::process::id());
    make(&own, "model.safetensors");
    make(".out.partial-1", "model-00001-of-00002.safetensors");
    let stay = [
        make(".out.partial-2", "model.safetensors"),
        make(".out.partial-3", "notes.txt"),
        make(".out.partial-mine", "model.safetensors"),
        make(".outer.partial-4", "model.safetensors"),
    ];
    let in_use = fs::File::open(&stay[0]).unwrap();
    in_use.lock().unwrap();
    export_random(&options(&root.path().join("out"), false), None).unwrap();
    assert!(stay.iter().all(|dir| dir.is_dir()));
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1 + stay.len());
}

#[test]
fn the_models_own_files_are_copied_and_links_out_refused() {
    let root = tempfile::tempdir().unwrap();
    let source = root.path().join("source");
    fs::create_dir(&source).unwrap();
    for name in [
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
        "LICENSE",
    ] {
        fs::write(source.join(name), name).unwrap();
    }
    fs::write(source.join("pytorch_model.bin"), "no").unwrap();
    let dir = root.path().join("out");
    export_random(&options(&dir, false), Some(&source)).unwrap();
    for name in [
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
        "LICENSE",
    ] {
        assert_eq!(fs::read_to_string(dir.join(name)).unwrap(), name);
    }
    assert!(!dir.join("pytorch_model.bin").exists());
    symlink("/etc/passwd", source.join("vocab.json")).unwrap();
    let message = export_random(&options(&dir, true), Some(&source)).unwrap_err();
    assert_says(
        &message,
        &["vocab.json", "a regular file within", "/etc/passwd"],
    );
}

#[test]
fn tiles_of_several_extents_are_read_once_and_in_order() {
    let mut config = tiny_config();
    config["vocab_size"] = json!(100_000);
    let spec = spec_of(&config);
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("out");
    let source = WeightSource::random(&spec, 9);
    let mut ranges = Vec::new();
    let mut read = |layout: &TileLayout, range: std::ops::Range<u64>, out: &mut [f32]| {
        ranges.push((layout.id.layer, range.clone()));
        source.fill(layout, range, out)
    };
    let mut wide = options(&dir, false);
    wide.dtype = ExportDtype::F32;
    wide.shard_bytes = u64::MAX;
    export(&wide, &spec, None, None, &mut read).unwrap();
    let e = EXTENT_ELEMENTS;
    assert_eq!(
        ranges[..3],
        [(0, 0..e), (0, e..2 * e), (0, 2 * e..2_400_000)]
    );
    let opened = WeightSource::open(&dir, &spec).unwrap();
    for layout in spec.tile_layouts() {
        assert!(
            tile(&opened, &layout) == tile(&source, &layout),
            "{}",
            layout.id
        );
    }
}
