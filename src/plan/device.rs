//! The device's tier of a plan: what it must hold, what its kernels take, what of activations is
//! kept in the room that is left.

use super::anchors::{AnchorRows, travelling_max};
use super::regions::{self, DeviceMap, DeviceShape};
use super::{DeviceProfile, Purpose, TilePlan, homes};
use crate::config::{Recompute, RunConfig};
use crate::error::{Error, Result};
use crate::model::ModelSpec;
use crate::tile::Precision;

/// Widest row that a card's norm kernels take.
const CARD_HIDDEN_MAX: u64 = 16_384;
/// Bytes for one f32 a token and head between the launches of an attention's backward.
const CARD_SUMS_BYTES: u64 = 32 << 20;
/// Most tokens whose ids, positions and runs of equal ids (one more) are staged at once.
const CARD_TOKENS_MAX: u64 = (1 << 20) - 1;

/// Refuses what a card's kernels do not take.
pub(super) fn check_card(
    spec: &ModelSpec,
    config: &RunConfig,
    device: &DeviceProfile,
) -> Result<()> {
    if device.card.is_none() {
        return Ok(());
    }
    if spec.hidden > CARD_HIDDEN_MAX {
        return Err(Error::Unsupported {
            what: "hidden_size on a card",
            got: spec.hidden.to_string(),
            supported: format!("at most {CARD_HIDDEN_MAX}"),
        });
    }
    let tokens = config.train.micro_batch.saturating_mul(config.data.seq_len);
    let most = CARD_TOKENS_MAX.min(CARD_SUMS_BYTES / (4 * spec.heads.max(1)));
    if tokens > most {
        return Err(Error::input(
            "run.toml",
            "train.micro_batch x data.seq_len",
            format!(
                "at most {most} tokens of a micro-batch on a card with {} heads",
                spec.heads
            ),
            tokens.to_string(),
            "lower train.micro_batch and raise train.micro_batches, or lower data.seq_len",
        ));
    }
    Ok(())
}

/// The least map that serves, with up to `rebuilt` blocks whose anchors are computed again; with
/// `recompute = "none"`, with all activations kept, lean, and none of that.
pub(super) fn least_device(
    spec: &ModelSpec,
    config: &RunConfig,
    device: &DeviceProfile,
    budget: u64,
    purpose: Purpose,
    rebuilt: u16,
) -> Result<DeviceMap> {
    let micros = config.train.micro_batches;
    let mut shape = DeviceShape {
        tokens: config.train.micro_batch * config.data.seq_len,
        seq_len: config.data.seq_len,
        micros,
        buffers: config.memory.buffers,
        kept: 0,
        lean: 0,
        travelling: 0,
        rebuilt: 0,
        activation_bytes: device.activation_bytes,
        converts_weights: device.converts_bf16 && config.precision() != Precision::Fp32,
        precision: config.precision(),
        gradient_bytes: homes::gradient_bytes(config),
        trains: purpose == Purpose::Train,
    };
    let fixed = device.fixed_bytes;
    let needed = |map: &DeviceMap| map.bytes.saturating_add(fixed);
    let map_of = |shape| DeviceMap::new(spec, shape, &[]);
    let all_kept = shape.trains && config.memory.recompute == Recompute::None;
    if all_kept {
        shape.kept = u64::from(spec.blocks) * micros;
        shape.lean = shape.kept;
    }
    let mut map = map_of(shape);
    let row = map.anchor_bytes.saturating_mul(micros).max(1);
    let rows = |bytes: u64| u16::try_from(bytes.div_ceil(row)).unwrap_or(u16::MAX);
    if shape.trains {
        // A block is rebuilt from the one before, whose weights must be there at once.
        let rebuilds = !all_kept && shape.buffers > 1;
        let lack = rows(needed(&map).saturating_sub(budget));
        shape.rebuilt = if rebuilds { rebuilt } else { 0 };
        loop {
            let most = AnchorRows::rebuilt_max(spec.blocks, shape.travelling);
            shape.rebuilt = shape.rebuilt.min(most);
            // Anchors leave where the device cannot hold them: no more of them than that.
            let leave = lack
                .saturating_sub(shape.rebuilt)
                .min(travelling_max(spec.blocks));
            if leave <= shape.travelling {
                break;
            }
            shape.travelling = leave;
        }
        map = map_of(shape);
    }
    if needed(&map) > budget || map.bytes == regions::TOO_LARGE {
        let (kept, lean) = (0, 0);
        let least = map_of(DeviceShape {
            kept,
            lean,
            ..shape
        });
        return Err(device_refusal(config, [&least, &map], fixed, budget));
    }
    Ok(map)
}

/// The device's map with what the tiles have there, and as many kept activations as fit.
pub(super) fn fill_device(
    spec: &ModelSpec,
    config: &RunConfig,
    least: &DeviceMap,
    tiles: &[TilePlan],
    budget: u64,
) -> (DeviceMap, Vec<(u16, u32)>) {
    let mut shape = least.shape;
    (shape.kept, shape.lean) = (0, 0);
    let homes = DeviceMap::new(spec, shape, tiles);
    let pairs = u64::from(spec.blocks) * shape.micros;
    if shape.trains && config.memory.recompute != Recompute::All {
        let room = budget.saturating_sub(homes.bytes);
        (shape.kept, shape.lean) = homes.workspace.kept_in(room, pairs);
    }
    assert!(shape.kept >= least.shape.kept, "the least map fitted");
    let map = DeviceMap::new(spec, shape, tiles);
    assert!(map.bytes <= budget, "what is added was room that was left");
    // The last in forward order are kept: they wait for the shortest time.
    let all = (0..spec.blocks).flat_map(|block| {
        (0..shape.micros)
            .map(move |micro| (block, u32::try_from(micro).expect("micros are capped")))
    });
    let kept = all
        .skip(usize::try_from(pairs - shape.kept).expect("pairs are capped"))
        .collect();
    (map, kept)
}

/// Why the device cannot hold the run, with the largest count of micro-batches that it can.
fn device_refusal(
    config: &RunConfig,
    [least, map]: [&DeviceMap; 2],
    fixed_bytes: u64,
    budget: u64,
) -> Error {
    let needed = map.bytes.saturating_add(fixed_bytes);
    let arena = budget.saturating_sub(fixed_bytes);
    let (shape, micros) = (map.shape, map.shape.micros);
    let rows = map.anchor_rows.count(shape.trains);
    // A micro-batch's anchors, and what of it must be kept.
    let per_micro = rows
        .saturating_mul(map.anchor_bytes)
        .saturating_add((shape.kept / micros).saturating_mul(map.workspace.lean_bytes));
    let fixed = map.bytes.saturating_sub(per_micro.saturating_mul(micros));
    let largest = arena.saturating_sub(fixed) / per_micro;
    let remedy = if config.memory.recompute == Recompute::None && least.bytes <= arena {
        "set memory.recompute = \"auto\", or raise memory.device".to_string()
    } else if largest > 0 {
        format!("train.micro_batches = {largest} is the largest that fits, or raise memory.device")
    } else {
        let layer: u64 = least.parts.iter().take(3).map(|(_, bytes)| bytes).sum();
        format!(
            "even one micro-batch needs {} bytes, {layer} of them for one layer's weights and \
             gradients: lower train.micro_batch or data.seq_len, or raise memory.device",
            fixed.saturating_add(per_micro).saturating_add(fixed_bytes),
        )
    };
    Error::Budget {
        tier: "device",
        needed,
        budget,
        missing: needed - budget,
        remedy,
    }
}
