//! Tiny models, run configurations and micro-batches that several test files share.
#![allow(dead_code, reason = "each test file uses a part")]

use terrace::config::RunConfig;
use terrace::data::{IGNORE, Micro};
use terrace::model::{Family, ModelSpec, Rope, RopeScaling};
use terrace::plan::DeviceProfile;
use terrace::store::sim::mix;
use terrace::tile::Precision;
use terrace::train::choose_device;

/// A Llama-shaped model with two query heads a key head.
pub(crate) fn spec(blocks: u16, hidden: u64, vocab_size: u64, tied: bool) -> ModelSpec {
    ModelSpec {
        family: Family::Llama,
        vocab_size,
        hidden,
        intermediate: hidden * 2 + 24,
        blocks,
        heads: 4,
        kv_heads: 2,
        head_dim: hidden / 4,
        rms_eps: 1e-5,
        rope: Rope {
            theta: 10_000.0,
            scaling: RopeScaling::Default,
        },
        windows: vec![None; usize::from(blocks)],
        tied,
        qkv_bias: false,
        output_bias: false,
        qk_norm: false,
        max_positions: 128,
        initializer_range: 0.05,
        eos_token_ids: vec![0],
        bos_token_id: None,
    }
}

/// The device under test: the CPU, or what `TERRACE_TEST_DEVICE` names (`cuda:0`).
pub(crate) fn profile(precision: Precision) -> DeviceProfile {
    match std::env::var("TERRACE_TEST_DEVICE") {
        Ok(name) => choose_device(&name, precision).unwrap().0,
        Err(_) => DeviceProfile::cpu(),
    }
}

/// A run without files: `micros` micro-batches of one sequence of `seq_len`.
pub(crate) fn config(seq_len: u64, micros: u64) -> RunConfig {
    let mut config = RunConfig::default();
    config.data.seq_len = seq_len;
    config.train.micro_batches = micros;
    config.train.steps = Some(1000);
    config
}

/// Micro-batches of a step: two packed sequences each, of lengths that differ, some targets masked.
pub(crate) fn micros(seed: u64, count: u64, seq_len: u64, vocab_size: u64) -> Vec<Micro> {
    (0..count)
        .map(|index| {
            let mut state = mix(seed ^ mix(index));
            let mut draw = |below: u64| {
                state = mix(state);
                state % below
            };
            let mut micro = Micro {
                bounds: vec![0],
                ..Micro::default()
            };
            let first = 2 + draw(seq_len / 2 - 2);
            let second = 2 + draw(seq_len / 2 - 2);
            for length in [first, second] {
                let tokens: Vec<u32> = (0..length).map(|_| draw(vocab_size) as u32).collect();
                for position in 0..length as usize {
                    let masked = draw(5) == 0;
                    let next = tokens.get(position + 1).copied().filter(|_| !masked);
                    micro.targets.push(next.unwrap_or(IGNORE));
                    micro.positions.push(position as u32);
                }
                micro.tokens.extend(tokens);
                micro.bounds.push(micro.tokens.len() as u32);
            }
            micro
        })
        .collect()
}
