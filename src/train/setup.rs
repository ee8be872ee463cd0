//! Memory and engine of a run: what `"auto"` comes to, arenas, scratch store.

use std::path::PathBuf;

use crate::config::{RunConfig, Size, StorePath};
use crate::device::Device;
use crate::error::Result;
use crate::host::HostArena;
use crate::machine::{self, HostMemory};
use crate::model::ModelSpec;
use crate::optimizer::Isa;
use crate::plan::regions::{DeviceMap, DeviceShape};
use crate::plan::{Budgets, DeviceProfile, Plan};
use crate::stats::Stats;
use crate::step::Engine;
use crate::store::{Scratch, StoredSection};
use crate::tile::{Precision, Section};
use crate::transfer::Tiers;

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

/// Resolves `"auto"` sizes on this machine for the CPU device: the device's arena is RAM too, so it
/// comes off the host's.
pub fn resolve_budgets(spec: &ModelSpec, config: &RunConfig) -> Budget {
    let memory = HostMemory::read();
    let auto = memory.auto();
    let mut sentences = Vec::new();
    let device = match config.memory.device {
        Size::Bytes(bytes) => bytes,
        Size::Auto => {
            let all_kept = everything_kept(spec, config);
            // Host states come first: the arena takes at most what they leave, or half.
            let device = all_kept.min(auto / 2);
            sentences.push(format!(
                "memory.device = auto: {} (the CPU device computes in RAM)",
                crate::plan::bytes_text(device)
            ));
            device
        }
    };
    let host = match config.memory.host {
        Size::Bytes(bytes) => bytes,
        Size::Auto => {
            let host = auto.saturating_sub(device);
            sentences.push(format!(
                "memory.host = auto: {} (available {}{}, less a reserve and the device's arena)",
                crate::plan::bytes_text(host),
                crate::plan::bytes_text(memory.available),
                memory.cgroup_left.map_or(String::new(), |left| {
                    format!(", cgroup leaves {}", crate::plan::bytes_text(left))
                })
            ));
            host
        }
    };
    let store: Vec<(PathBuf, u64)> = config
        .memory
        .store
        .iter()
        .map(|StorePath { path, size }| {
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
    Budget {
        budgets: Budgets {
            device,
            host,
            store: total,
        },
        store,
        sentences,
    }
}

/// Bytes of the device's arena with nothing recomputed.
fn everything_kept(spec: &ModelSpec, config: &RunConfig) -> u64 {
    let profile = DeviceProfile::cpu();
    let shape = DeviceShape {
        tokens: config.train.micro_batch * config.data.seq_len,
        seq_len: config.data.seq_len,
        micros: config.train.micro_batches,
        buffers: config.memory.buffers,
        kept: u64::from(spec.blocks) * config.train.micro_batches,
        activation_bytes: profile.activation_bytes,
        converts_weights: config.model.precision == Precision::Bf16,
        precision: config.model.precision,
        trains: true,
    };
    DeviceMap::new(spec, shape).bytes
}

/// Takes every tier's memory as the plan says and starts the lanes. Nothing is in the tiles yet.
/// Also what a person should know of the store.
pub fn build_engine(
    spec: &ModelSpec,
    config: &RunConfig,
    plan: Plan,
    budget: &Budget,
    trace: bool,
) -> Result<(Engine, Vec<String>)> {
    let mut sentences = Vec::new();
    let mut cutter = HostArena::take(plan.host.bytes)?;
    let slabs = usize::try_from(plan.host.slabs).expect("slabs are capped");
    let ring = cutter.cut_ring(slabs, plan.host.slab_bytes);
    let store = if plan.spills() {
        let sections: Vec<StoredSection> = stored_sections(&plan, |tile, section| {
            plan.tiles[usize::from(tile)].home(section) == crate::plan::Home::Store
        });
        let engine = config.memory.io_engine;
        let scratch = Scratch::create(&budget.store, &sections, engine, &[ring.span()])?;
        sentences.extend(scratch.sentences().iter().cloned());
        Some(scratch)
    } else {
        None
    };
    let device = Device::cpu(plan.map.bytes)?;
    let tiers = Tiers::new(&plan, device, cutter, ring, store, Stats::new(trace));
    Ok((Engine::start(spec, plan, tiers, Isa::detect())?, sentences))
}

/// Sections of a plan that `wanted` picks, as a store lays them out.
pub(crate) fn stored_sections(
    plan: &Plan,
    wanted: impl Fn(u16, Section) -> bool,
) -> Vec<StoredSection> {
    let mut sections = Vec::new();
    for tile in &plan.tiles {
        let id = tile.layout.id;
        for section in Section::ALL {
            if tile.homes[section as usize].is_some() && wanted(id.layer, section) {
                sections.push(StoredSection {
                    tile: id,
                    section,
                    elements: tile.layout.elements,
                    element_bytes: section.element_bytes(plan.precision),
                });
            }
        }
    }
    sections
}
