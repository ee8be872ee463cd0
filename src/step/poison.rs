//! Poisoning, for tests: a place is filled with NaN as soon as the schedule has no more use for
//! what it holds, so that a use after its release shows in the results.
//!
//! Only where [`Tiers::poison`](crate::transfer::Tiers::poison) is set; a run never does.

use super::{Pass, Shared};
use crate::device::{Dtype, View};
use crate::schedule::{Action, Buffer, Finished, GradientSlot};
use crate::tile::Section;

impl Shared {
    /// Poisons what the action at `index` was the last to use. Before the action is marked as done:
    /// until then nobody else may touch these places.
    pub(super) fn poison_after(&self, pass: &Pass, index: usize) {
        if !self.tiers.poison {
            return;
        }
        let map = &self.plan.map;
        let head = self.plan.layer_count() - 1;
        let anchor = |layer, micro| self.poison(map.anchor(layer, micro), map.anchor_bytes);
        match pass.action(index) {
            Action::Forward { layer, micro, .. } => {
                if self.plan.map.anchor_rows.is_rebuilt(layer) {
                    anchor(layer, micro);
                }
                self.poison_used(pass, index, layer, micro);
            }
            Action::ForwardOnly { layer, micro } => self.poison_used(pass, index, layer, micro),
            Action::Rebuild { layer, micro } => self.poison_used(pass, index, layer - 1, micro),
            Action::Backward {
                layer, micro, kept, ..
            } => {
                anchor(layer, micro);
                if let Some(slot) = kept {
                    self.poison(map.kept[slot as usize], map.kept_bytes(slot));
                }
                self.poison_used(pass, index, layer, micro);
            }
            Action::Loss { micro } => self.poison_used(pass, index, head, micro),
            Action::Evaluate { micro } | Action::Logits { micro } => {
                anchor(1, micro);
                self.poison_used(pass, index, head, micro);
            }
            Action::EmbedBackward { micro } => anchor(head, micro),
            Action::Demote { layer, from, .. } => self.tiers.device.poison(match from {
                Finished::In(accumulator) => self.accumulator(layer, accumulator),
                Finished::Parked => self.parked_gradient(layer),
            }),
            Action::Park { layer, accumulator } => {
                self.tiers
                    .device
                    .poison(self.accumulator(layer, accumulator));
            }
            Action::Return { slot, .. } => {
                let mut weight = self.tiers.weight_slot(slot);
                weight.as_mut_slice::<u8>().fill(0xff);
            }
            _ => {}
        }
    }

    /// Poisons a gradient that its update has consumed.
    pub(super) fn poison_gradient(&self, slot: GradientSlot) {
        if self.tiers.poison {
            let mut gradient = self.tiers.gradient(slot);
            gradient.as_mut_slice::<u8>().fill(0xff);
        }
    }

    /// Scratch after each use; weights after the layer's last micro-batch.
    fn poison_used(&self, pass: &Pass, index: usize, layer: u16, micro: u32) {
        let map = &self.plan.map;
        self.poison(map.shared_workspace, map.bytes - map.shared_workspace);
        if micro + 1 < pass.schedule.micros {
            return;
        }
        let is_head = layer + 1 == self.plan.layer_count();
        let with_embed = is_head && self.plan.tied;
        let elements = |layer: u16| self.tiers.layout(layer).elements;
        let own = elements(layer);
        let tied = if with_embed { elements(0) } else { 0 };
        if let Some(offset) = map.compute_weight {
            self.poison(offset, (own + tied) * map.shape.activation_bytes);
        }
        let buffer = if is_head {
            Buffer::Head
        } else if self.tiers.device_home(layer, Section::Weight).is_some() {
            return;
        } else {
            let index = usize::from(layer - 1) % map.buffers.len();
            Buffer::Block(u32::try_from(index).expect("at most 8 buffers"))
        };
        // A block that is bound again without a promotion is still needed.
        let later = &pass.schedule.actions[index + 1..];
        let next = later.iter().find_map(|scheduled| match scheduled.action {
            Action::Promote { buffer: b, .. } if b == buffer => Some(true),
            Action::Bind { buffer: b, .. } if b == buffer => Some(false),
            _ => None,
        });
        if next == Some(false) {
            return;
        }
        let width = Section::Weight.element_bytes(self.plan.precision);
        match buffer {
            Buffer::Block(index) => self.poison(map.buffers[index as usize], own * width),
            Buffer::Head => self.poison(map.head_weight, own * width),
            Buffer::Home(_) => unreachable!("homes keep what they hold"),
        }
        if let Some(offset) = map.tied_weight.filter(|_| with_embed) {
            self.poison(offset, tied * width);
        }
    }

    fn poison(&self, offset: u64, bytes: u64) {
        let view = View::new(offset, bytes / 2, Dtype::Bf16);
        self.tiers.device.poison(view);
    }
}
