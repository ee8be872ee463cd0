//! The plan as a table for people and as JSON for programs.

use std::fmt::Write;

use super::regions::HOMES;
use super::{GradientHome, Home, Plan};
use crate::schedule::simulate::{Prediction, Rates};
use crate::tile::{Precision, Section};

/// Bytes with a unit and three digits: 1.50 GiB.
pub fn bytes_text(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{bytes} B")
    } else {
        format!("{value:.2} {}", units[unit])
    }
}

/// Parameters with a unit: 134.5 M.
pub fn count_text(count: u64) -> String {
    match count {
        0..1_000_000 => format!("{count}"),
        1_000_000..1_000_000_000 => format!("{:.1} M", count as f64 / 1e6),
        _ => format!("{:.2} B", count as f64 / 1e9),
    }
}

impl Plan {
    /// Bytes of the sections of a kind with homes on the device, in host and in the store.
    fn placed(&self, section: Section) -> [u64; 3] {
        let mut placed = [0; 3];
        for tile in &self.tiles {
            if let Some(home) = tile.homes[section as usize] {
                placed[home as usize] += tile.layout.section_bytes(section, self.precision);
            }
        }
        placed
    }

    /// Layers that are updated under the next forward.
    pub fn deferred_layers(&self) -> u16 {
        let count = self.layer_count();
        let deferred = (0..count).filter(|layer| self.deferred.contains(*layer, count));
        u16::try_from(deferred.count()).expect("at most all layers")
    }

    /// Bytes of gradients that wait on the device: in regions of their own, and where anchors were.
    fn parked_bytes(&self) -> [u64; 2] {
        let mut parked = [0; 2];
        for (layer, tile) in (0..).zip(&self.tiles) {
            if tile.gradient == GradientHome::Device {
                let in_row = self.map.waits_in_row(layer);
                parked[usize::from(in_row)] += tile.layout.elements * self.gradient_bytes;
            }
        }
        parked
    }

    /// What host holds beside homes and gradients.
    fn host_pools(&self) -> Vec<(String, u64)> {
        let host = &self.host;
        let mut pools = vec![
            ("weights under update".to_string(), 2 * host.weight_slot),
            (
                format!("{} slabs", host.slabs),
                host.slabs * host.slab_bytes,
            ),
            (
                format!("{} slabs of commits", host.commit_slabs),
                host.commit_slabs * host.slab_bytes,
            ),
            (
                format!("{} slabs of zstd", host.coder_slabs),
                host.coder_slabs * host.slab_bytes,
            ),
        ];
        pools.retain(|(_, bytes)| *bytes > 0);
        pools
    }

    /// The table that `terrace plan` prints.
    pub fn table(&self, prediction: &Prediction, rates: &Rates) -> String {
        let mut text = String::new();
        let mut line = |name: &str, host: String, store: String, device: String| {
            writeln!(text, "  {name:<34}{device:>14}{host:>14}{store:>14}").ok();
        };
        line("", "host".into(), "store".into(), "device".into());
        let shown = |bytes: u64| {
            if bytes == 0 {
                "-".to_string()
            } else {
                bytes_text(bytes)
            }
        };
        for section in Section::present(self.precision) {
            let [device, host, store] = self.placed(section);
            line(
                &section.to_string(),
                shown(host),
                shown(store),
                shown(device),
            );
        }
        let waiting = match (self.clipping, self.deferred_layers()) {
            (true, _) => "gradients that wait for the norm",
            (false, 0) => "gradient slots",
            (false, _) => "gradients that wait for their turn",
        };
        let parked = shown(self.parked_bytes()[0]);
        line(waiting, shown(self.host.gradients), "-".into(), parked);
        let anchors = (self.host.anchors, self.stored_anchor_bytes());
        if anchors != (0, 0) {
            let name = "anchors between forward and backward";
            line(name, shown(anchors.0), shown(anchors.1), "-".into());
        }
        for (name, bytes) in self.host_pools() {
            line(&name, shown(bytes), "-".into(), "-".into());
        }
        // What is at home there has lines of its own above.
        let parts = self.map.parts.iter().filter(|(name, _)| *name != HOMES);
        for (name, bytes) in parts {
            line(name, "-".into(), "-".into(), shown(*bytes));
        }
        let fixed = self.device.fixed_bytes;
        if fixed > 0 {
            let name = "context, kernels, workspaces";
            line(name, "-".into(), "-".into(), shown(fixed));
        }
        let [device, host, store] = self.tiers();
        line("total", shown(host.1), shown(store.1), shown(device.1));
        line("budget", shown(host.2), shown(store.2), shown(device.2));
        text.push_str(&self.sentences(prediction, rates));
        text
    }

    /// What the table's columns do not say.
    fn sentences(&self, prediction: &Prediction, rates: &Rates) -> String {
        let pairs = u64::from(self.blocks) * self.map.shape.micros;
        let shape = &self.map.shape;
        let lean = match shape.lean {
            0 => String::new(),
            lean => format!(", {lean} of them without what norms and SwiGLU give back"),
        };
        let kept = format!(
            "  kept: {} of {pairs} block activations{lean}, the others are recomputed; \
             {} weight buffers, {} micro-batches of at most {} tokens",
            self.kept.len(),
            self.map.buffers.len(),
            shape.micros,
            shape.tokens,
        );
        let anchors = self.device_sentences() + &self.anchors_sentence();
        let checkpoints = if self.checkpoint_bytes > 0 {
            let bytes = bytes_text(self.checkpoint_bytes);
            format!("  checkpoints: {bytes} in checkpoint.dir, with one free beside those kept")
        } else {
            "  checkpoints: off (checkpoint.every = 0): a crash loses the run".to_string()
        };
        let moved = format!(
            "  a step moves: up {}, down {}, store read {}, store write {}",
            bytes_text(prediction.promote_bytes),
            bytes_text(prediction.demote_bytes),
            bytes_text(prediction.read_bytes),
            bytes_text(prediction.write_bytes),
        );
        let zstd = self.zstd_sentence(prediction, rates);
        let wear = self.wear_sentence(prediction);
        let shared = if rates.shared_cores {
            "; compute and AdamW share the cores"
        } else {
            ""
        };
        let stall = prediction.stall_seconds();
        let stall = match (stall > 0.01 * prediction.step_seconds, self.clipping) {
            (false, _) => String::new(),
            (true, true) => {
                format!("; the device waits {stall:.3} s, since updates wait for the norm")
            }
            (true, false) => format!("; the device waits {stall:.3} s"),
        };
        let predicted = format!(
            "  predicted: {:.3} s a step, {:.0} tokens/s, bound by {} \
             (compute {:.3} s, up {:.3} s, down {:.3} s, store {:.3} s, AdamW {:.3} s)\
             {shared}{stall}",
            prediction.step_seconds,
            prediction.tokens as f64 / prediction.step_seconds,
            prediction.bound(),
            prediction.compute_seconds,
            prediction.promote_seconds,
            prediction.demote_seconds,
            prediction.store_seconds,
            prediction.update_seconds,
        );
        let inexact = match self.precision {
            Precision::Bf16Moments => {
                "  inexact: moments are rounded to bf16, stochastically (optimizer.moments)\n"
            }
            Precision::Bf16 | Precision::Fp32 => "",
        };
        format!("{inexact}{kept}\n{anchors}{checkpoints}\n{moved}\n{zstd}{wear}{predicted}\n")
    }

    /// Whether spilled moments are compressed, and why.
    fn zstd_sentence(&self, prediction: &Prediction, rates: &Rates) -> String {
        if !self.spills_moments() {
            return String::new();
        }
        let on = self.host.coder_slabs > 0;
        let named = if on { "on" } else { "off" };
        let why = match prediction.other_zstd_step_seconds {
            Some(other) => format!(
                "a step would take {other:.3} s {}, by {:.2} of their bytes, {:.2} GB/s to \
                 encode and {:.2} GB/s to decode on each of {} cores",
                if on { "without" } else { "with it" },
                self.moment_ratio(rates),
                rates.zstd.encode / 1e9,
                rates.zstd.decode / 1e9,
                rates.cores,
            ),
            None if on => "memory.zstd".to_string(),
            None => "memory.zstd, or no room in host for its slabs".to_string(),
        };
        format!("  zstd of spilled moments: {named} ({why})\n")
    }

    /// Bytes of compressed moments by bytes before.
    fn moment_ratio(&self, rates: &Rates) -> f64 {
        let width = Section::Moment1.element_bytes(self.precision) as f64;
        1.0 - (1.0 - rates.zstd.ratio) * 4.0 / width
    }

    /// What states on the device cost, and which gradients take no memory of their own.
    fn device_sentences(&self) -> String {
        let mut text = String::new();
        let states: u64 = Section::present(self.precision)
            .filter(|section| *section != Section::Weight)
            .map(|section| self.placed(section)[Home::Device as usize])
            .sum();
        if states > 0 {
            writeln!(
                text,
                "  {} of states live on the device and go to host and back for their update: \
                 host has no room for them",
                bytes_text(states)
            )
            .ok();
        }
        let in_rows = self.parked_bytes()[1];
        if in_rows > 0 {
            let bytes = bytes_text(in_rows);
            writeln!(
                text,
                "  {bytes} of gradients wait on the device where anchors were that are used up"
            )
            .ok();
        }
        text
    }

    /// Which anchors go to the store, and why or what would keep them out of it.
    fn anchors_sentence(&self) -> String {
        let rebuilt = match self.map.shape.rebuilt {
            0 => String::new(),
            rebuilt => format!(
                "  anchors of {rebuilt} of {} blocks take no device memory: they are computed \
                 again for their backward, from those of the block before\n",
                self.blocks
            ),
        };
        rebuilt + &self.stored_anchors_sentence()
    }

    fn stored_anchors_sentence(&self) -> String {
        match self.stored_anchors {
            0 => String::new(),
            stored if self.anchors_by_choice => format!(
                "  anchors of {stored} of {} blocks are written to the store in forward and read \
                 in backward, in place of states: the predicted step is shorter so\n",
                self.blocks
            ),
            stored => format!(
                "  anchors of {stored} of {} blocks are written to the store in forward and read \
                 in backward: fewer tokens a step (train.micro_batch, train.micro_batches) would \
                 avoid it\n",
                self.blocks
            ),
        }
    }

    /// Bytes written to drives over the whole run: the checkpoints' file and the spilled extents
    /// when they are made, every step's, every commit's and the last one's; `None` where nobody
    /// says how many steps.
    fn run_bytes(&self, prediction: &Prediction) -> Option<f64> {
        let steps = self.wear.steps?;
        let commits = steps.div_ceil(self.wear.commit_every.max(1));
        let made = (self.checkpoint_bytes + self.spilled_bytes) as f64;
        let written = steps as f64 * prediction.write_bytes as f64;
        Some(made + written + commits as f64 * self.wear.commit_bytes as f64)
    }

    /// Shares of a drive's rated life and the days that it lasts, where its rating is given.
    fn wear_sentence(&self, prediction: &Prediction) -> String {
        let step = self.wear.step_bytes(prediction.write_bytes);
        if step == 0.0 {
            return String::new();
        }
        let commits = self.wear.commit_bytes as f64 / self.wear.commit_every.max(1) as f64;
        let mut text = format!(
            "  a step writes to drives: {} ({} spilled, {} of commits)",
            bytes_text(step as u64),
            bytes_text(prediction.write_bytes),
            bytes_text(commits as u64)
        );
        if let Some(bytes) = self.run_bytes(prediction) {
            write!(text, "; the run {}", bytes_text(bytes as u64)).ok();
        }
        if let Some(terabytes) = self.wear.drive_tbw {
            let rated = terabytes * 1e12;
            let days = rated / step * prediction.step_seconds / 86_400.0;
            let share = self.run_bytes(prediction);
            let share =
                share.map(|bytes| format!("{:.2} % of it by this run, ", 1e2 * bytes / rated));
            let share = share.unwrap_or_default();
            write!(
                text,
                "; rated for {terabytes} TB: {share}{days:.1} days of training"
            )
            .ok();
        }
        text + "\n"
    }

    fn wear_json(&self, prediction: &Prediction) -> serde_json::Value {
        let step = self.wear.step_bytes(prediction.write_bytes);
        let run = self.run_bytes(prediction);
        let rated = self.wear.drive_tbw.map(|terabytes| terabytes * 1e12);
        let share = rated.and_then(|rated| Some(run? / rated));
        let days = rated.map(|rated| rated / step * prediction.step_seconds / 86_400.0);
        serde_json::json!({
            "step_bytes": step,
            "run_bytes": run,
            "rated_bytes": rated,
            "run_share": share,
            "days_of_life": days.filter(|days| days.is_finite()),
        })
    }

    /// The plan as JSON: sizes in bytes, times in seconds.
    pub fn json(&self, prediction: &Prediction, rates: &Rates) -> serde_json::Value {
        let sections: serde_json::Map<String, serde_json::Value> = Section::present(self.precision)
            .map(|section| {
                let [device, host, store] = self.placed(section);
                (
                    section.to_string(),
                    serde_json::json!({ "device": device, "host": host, "store": store }),
                )
            })
            .collect();
        let parts: serde_json::Map<String, serde_json::Value> = self
            .map
            .parts
            .iter()
            .map(|(name, bytes)| (name.to_string(), (*bytes).into()))
            .collect();
        serde_json::json!({
            "device": self.device.name,
            "parameters": self.parameters,
            "inexact": self.precision == Precision::Bf16Moments,
            "clipping": self.clipping,
            "deferred_layers": self.deferred_layers(),
            "spills_first": self.order.name(),
            "gradients_on_device": self.parked_bytes()[0],
            "gradients_in_anchors": self.parked_bytes()[1],
            "budgets": {
                "device": self.budgets.device,
                "host": self.budgets.host,
                "store": self.budgets.store,
            },
            "host": {
                "total": self.host.bytes,
                "homes": self.host.homes,
                "gradients": self.host.gradients,
                "weight_slots": 2 * self.host.weight_slot,
                "anchors": self.host.anchors,
                "slabs": self.host.slabs, "slab_bytes": self.host.slab_bytes,
                "commit_slabs": self.host.commit_slabs,
                "coder_slabs": self.host.coder_slabs,
            },
            "rebuilt_anchors": self.map.shape.rebuilt,
            "store": { "total": self.store_bytes(), "anchors": self.stored_anchor_bytes() },
            "device_arena": { "total": self.map.bytes, "parts": parts },
            "device_fixed": self.device.fixed_bytes,
            "zstd": {
                "on": self.host.coder_slabs > 0,
                "moment_ratio": self.moment_ratio(rates),
                "step_seconds": prediction.step_seconds,
                "other_step_seconds": prediction.other_zstd_step_seconds,
            },
            "checkpoint": { "total": self.checkpoint_bytes },
            "wear": self.wear_json(prediction),
            "sections": sections,
            "kept": self.kept.len(),
            "kept_lean": self.map.shape.lean,
            "block_micro_pairs": u64::from(self.blocks) * self.map.shape.micros,
            "buffers": self.map.buffers.len(),
            "micro_batches": self.map.shape.micros,
            "micro_batch_tokens": self.map.shape.tokens,
            "rates": rates,
            "prediction": prediction,
            "bound_by": prediction.bound(),
        })
    }
}
