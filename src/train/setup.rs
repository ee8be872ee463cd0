//! Memory and engine of a run: which device, what `"auto"` comes to, arenas, scratch store.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::config::{RunConfig, Size, StorePath};
use crate::device::Device;
use crate::device::cuda::{self, Card};
use crate::error::{Error, Result};
use crate::host::HostArena;
use crate::machine::{self, HostMemory};
use crate::measure::profile::Profile;
use crate::model::ModelSpec;
use crate::optimizer::Isa;
use crate::plan::regions::{DeviceMap, DeviceShape};
use crate::plan::{Budgets, DeviceProfile, Plan};
use crate::stats::Stats;
use crate::step::Engine;
use crate::store::{Scratch, Stripe};
use crate::tile::Precision;
use crate::transfer::{self, Tiers};

/// The device that `--device` names, and a sentence that says which and why: `cpu`, `cuda:N`, or
/// `auto`, the first card where there is one with its libraries, else the CPU.
pub fn choose_device(text: &str, precision: Precision) -> Result<(DeviceProfile, String)> {
    let card = |ordinal: usize| {
        let card = Card::read(ordinal)?;
        // One that is full has no room for a context: another may.
        card.free_bytes()?;
        let sentence = format!(
            "device: cuda:{ordinal}, {}, {} of memory",
            card.name,
            crate::plan::bytes_text(card.memory_bytes)
        );
        let profile = DeviceProfile::cuda(&card.name, ordinal, precision);
        Ok::<_, Error>((profile, sentence))
    };
    match text {
        "cpu" => Ok((DeviceProfile::cpu(), "device: cpu".to_string())),
        "auto" => Ok(first_card(card).unwrap_or_else(|error| {
            let sentence = format!("device: cpu (auto found no card: {error})");
            (DeviceProfile::cpu(), sentence)
        })),
        _ => {
            let ordinal = text
                .strip_prefix("cuda")
                .map(|rest| rest.strip_prefix(':').unwrap_or(rest));
            match ordinal.map(|ordinal| {
                if ordinal.is_empty() {
                    Ok(0)
                } else {
                    ordinal.parse()
                }
            }) {
                Some(Ok(ordinal)) => card(ordinal),
                _ => Err(Error::Unsupported {
                    what: "device",
                    got: text.to_string(),
                    supported: "cpu, cuda:0 (or another card's number), auto".to_string(),
                }),
            }
        }
    }
}

/// The first card that serves; the first one's error if none does.
fn first_card<T>(card: impl Fn(usize) -> Result<T>) -> Result<T> {
    let first = card(0);
    if first.is_ok() {
        return first;
    }
    let others = 1..cuda::card_count().unwrap_or(0);
    others.map(card).find(Result::is_ok).unwrap_or(first)
}

/// Budgets with `"auto"` resolved, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Budget {
    /// For the plan.
    pub budgets: Budgets,
    /// Directories of the scratch store with their bytes.
    pub store: Vec<(PathBuf, u64)>,
    /// One sentence for each size that was `"auto"`.
    pub sentences: Vec<String>,
}

/// Resolves `"auto"` sizes on this machine. The CPU device's arena is RAM too, so it comes off the
/// host's; a card's is what is free on it. [`Error::Device`] where the card does not say.
pub fn resolve_budgets(
    spec: &ModelSpec,
    config: &RunConfig,
    profile: &DeviceProfile,
) -> Result<Budget> {
    let memory = HostMemory::read();
    let auto = memory.auto();
    let mut sentences = Vec::new();
    let device = device_budget(spec, config, profile, auto, &mut sentences)?;
    let host = match config.memory.host {
        Size::Bytes(bytes) => bytes,
        Size::Auto => {
            let in_ram = if profile.card.is_none() { device } else { 0 };
            let host = auto.saturating_sub(in_ram);
            sentences.push(format!(
                "memory.host = auto: {} (available {}{}, less a reserve{})",
                crate::plan::bytes_text(host),
                crate::plan::bytes_text(memory.available),
                memory.cgroup_left.map_or(String::new(), |left| {
                    format!(", cgroup leaves {}", crate::plan::bytes_text(left))
                }),
                if in_ram > 0 {
                    " and the device's arena"
                } else {
                    ""
                }
            ));
            host
        }
    };
    let store: Vec<(PathBuf, u64)> = config
        .memory
        .store
        .iter()
        .map(|StorePath { path, size, .. }| {
            let bytes = match size {
                Size::Bytes(bytes) => *bytes,
                Size::Auto => {
                    let free = machine::free_bytes(path);
                    let bytes = free - free / 20;
                    sentences.push(format!(
                        "memory.store {}: auto: {}",
                        path.display(),
                        crate::plan::bytes_text(bytes)
                    ));
                    bytes
                }
            };
            (path.clone(), bytes)
        })
        .collect();
    let total = store
        .iter()
        .fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
    Ok(Budget {
        budgets: Budgets {
            device,
            host,
            store: total,
        },
        store,
        sentences,
    })
}

/// Bytes of the device's arena; `auto` is what `"auto"` may take of RAM.
fn device_budget(
    spec: &ModelSpec,
    config: &RunConfig,
    profile: &DeviceProfile,
    auto: u64,
    sentences: &mut Vec<String>,
) -> Result<u64> {
    Ok(match config.memory.device {
        Size::Bytes(bytes) => bytes,
        Size::Auto if profile.card.is_some() => {
            let card = Card::read(profile.card.unwrap_or(0))?;
            // The plan takes of it what it has a use for.
            let device = card.free_bytes()?;
            sentences.push(format!(
                "memory.device = auto: {}, free on the card",
                crate::plan::bytes_text(device)
            ));
            device
        }
        Size::Auto => {
            let all_kept = everything_kept(spec, config, profile);
            // Host states come first: the arena takes at most what they leave, or half.
            let device = all_kept.min(auto / 2);
            sentences.push(format!(
                "memory.device = auto: {} (the CPU device computes in RAM)",
                crate::plan::bytes_text(device)
            ));
            device
        }
    })
}

/// Bytes of the device's arena with nothing recomputed.
fn everything_kept(spec: &ModelSpec, config: &RunConfig, profile: &DeviceProfile) -> u64 {
    let shape = DeviceShape {
        tokens: config.train.micro_batch * config.data.seq_len,
        seq_len: config.data.seq_len,
        micros: config.train.micro_batches,
        buffers: config.memory.buffers,
        kept: u64::from(spec.blocks) * config.train.micro_batches,
        lean: 0,
        travelling: 0,
        rebuilt: 0,
        activation_bytes: profile.activation_bytes,
        converts_weights: profile.converts_bf16 && config.precision() != Precision::Fp32,
        precision: config.precision(),
        gradient_bytes: 0,
        trains: true,
    };
    DeviceMap::new(spec, shape, &[]).bytes
}

/// Takes every tier's memory as the plan says and starts the lanes. Nothing is in the tiles yet.
/// Also what a person should know of the store and of pinning.
pub fn build_engine(
    spec: &ModelSpec,
    config: &RunConfig,
    plan: Plan,
    budget: &Budget,
    trace: bool,
) -> Result<(Engine, Vec<String>)> {
    let mut sentences = Vec::new();
    // The card first: its lack shows before host memory is touched.
    let device = Device::open(
        plan.device.card,
        plan.map.bytes,
        plan.device.activation_bytes,
    )?;
    let mut cutter = HostArena::take(plan.host.bytes)?;
    if let Device::Cuda(cuda) = &device
        && let Err(refusal) = cuda.pin(cutter.span())
    {
        sentences.push(format!(
            "warning: host memory is pageable, copies to the card are slow: {refusal}; lower \
             memory.host, or look into the kernel's log for why pages could not be pinned"
        ));
    }
    let slabs = usize::try_from(plan.host.slabs).expect("slabs are capped");
    let ring = cutter.cut_ring(slabs, plan.host.slab_bytes);
    let store = if plan.spills() {
        let sections = transfer::stored(&plan);
        let engine = config.memory.io_engine;
        let profile = config.memory.profile.as_deref();
        let measured = profile.map(Profile::read).transpose()?;
        // Each byte read and written once is two bytes of a mixed rate.
        let rate_at = |path: &Path| {
            let rates = measured.as_ref()?.store_rates(path)?;
            Some(rates.mixed_bytes_per_second / 2.0)
        };
        let given = |path: &Path| config.memory.store.iter().find(|given| given.path == *path);
        let stripe = |(path, bytes): &(PathBuf, u64)| Stripe {
            path: path.clone(),
            bytes: *bytes,
            rate: given(path)
                .and_then(StorePath::rate)
                .or_else(|| rate_at(path)),
        };
        let stripes: Vec<Stripe> = budget.store.iter().map(stripe).collect();
        let mut scratch = Scratch::create_striped(&stripes, &sections, engine, &[ring.span()])?;
        let staging = (0..plan.host.coder_slabs).map(|_| cutter.cut(plan.host.slab_bytes));
        scratch.start_coders(staging.collect())?;
        scratch.set_io_timeout(Duration::from_secs(config.memory.io_timeout), None);
        sentences.extend(scratch.sentences().iter().cloned());
        Some(scratch)
    } else {
        None
    };
    let tiers = Tiers::new(&plan, device, cutter, ring, store, Stats::new(trace))?;
    Ok((Engine::start(spec, plan, tiers, Isa::detect())?, sentences))
}
