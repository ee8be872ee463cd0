//! Derives a schedule: actions in the order of their lanes, with what each waits for in its step.

use std::collections::BTreeMap;

use super::{
    Accumulator, Action, After, Buffer, Finished, Form, GradientSlot, Lane, Schedule,
    ScheduledAction,
};
use crate::plan::{GradientHome, Home, Plan};
use crate::tile::Section;

pub(super) struct Builder<'a> {
    pub(super) plan: &'a Plan,
    pub(super) head: u16,
    pub(super) schedule: Schedule,
    /// Last promotion into each layer's buffer.
    promoted: Vec<Option<u32>>,
    /// Last compute action that used each block buffer.
    pub(super) used: Vec<Option<u32>>,
    /// By layer: its gradient's norm and rounding.
    finished: Vec<Option<u32>>,
    /// By layer: the demotion of its gradient from the accumulator.
    pub(super) demoted: Vec<Option<u32>>,
    /// By layer: the copy of its gradient to where it waits on the device.
    parked: Vec<Option<u32>>,
    /// By layer: its update, the whole of it.
    pub(super) updated: Vec<Option<u32>>,
    /// By micro-batch: the gathering of its rows.
    gathered: Vec<u32>,
    /// By layer and micro-batch: the demotion of its anchor.
    anchors_left: BTreeMap<(u16, u32), u32>,
    /// The update of the embedding rows that the next step names.
    pub(super) rows_updated: Option<u32>,
    /// By shared gradient slot (two of blocks, the wide one): the last update from it.
    slot_users: [Option<u32>; 3],
    /// By weight slot: the last return from it.
    weight_users: [Option<u32>; 2],
    /// Uses so far of the blocks' gradient slots, and of the weight slots.
    slot_uses: usize,
    weight_uses: usize,
}

impl<'a> Builder<'a> {
    pub(super) fn new(plan: &'a Plan, form: Form, micros: u32) -> Builder<'a> {
        let layers = usize::from(plan.layer_count());
        Builder {
            plan,
            head: plan.layer_count() - 1,
            schedule: Schedule {
                form,
                micros,
                actions: Vec::new(),
            },
            promoted: vec![None; layers],
            used: vec![None; plan.map.buffers.len()],
            finished: vec![None; layers],
            demoted: vec![None; layers],
            parked: vec![None; layers],
            updated: vec![None; layers],
            gathered: Vec::new(),
            anchors_left: BTreeMap::new(),
            rows_updated: None,
            slot_users: [None; 3],
            weight_users: [None; 2],
            slot_uses: 0,
            weight_uses: 0,
        }
    }

    fn push(&mut self, lane: Lane, action: Action, after: &[Option<u32>]) -> u32 {
        let index = u32::try_from(self.schedule.actions.len()).expect("fewer than 2^32 actions");
        let after = after.iter().flatten().map(|&action| After {
            action,
            previous: false,
        });
        self.schedule.actions.push(ScheduledAction {
            action,
            lane,
            after: after.collect(),
        });
        index
    }

    pub(super) fn trains(&self) -> bool {
        self.schedule.form == Form::Train
    }

    pub(super) fn buffer_index(&self, layer: u16) -> usize {
        usize::from(layer - 1) % self.plan.map.buffers.len()
    }

    fn buffer(&self, layer: u16) -> Buffer {
        Buffer::Block(u32::try_from(self.buffer_index(layer)).expect("at most 8 buffers"))
    }

    /// Accumulator of a layer: blocks take turns.
    pub(super) fn accumulator(&self, layer: u16) -> Accumulator {
        if layer == 0 {
            Accumulator::Embed
        } else if layer == self.head {
            Accumulator::Head
        } else {
            Accumulator::Block(u32::from(self.head - 1 - layer) % 2)
        }
    }

    fn lives_on_device(&self, layer: u16) -> bool {
        self.plan.tiles[usize::from(layer)].home(Section::Weight) == Home::Device
    }

    fn gradient_home(&self, layer: u16) -> GradientHome {
        self.plan.tiles[usize::from(layer)].gradient
    }

    /// Blocks whose weights come through the buffers: the first ones.
    fn streamed(&self) -> u16 {
        let streams = |layer: &u16| !self.lives_on_device(*layer);
        (1..self.head).take_while(streams).count() as u16
    }

    pub(super) fn gather(&mut self) {
        for micro in 0..self.schedule.micros {
            let gathered = self.push(Lane::Up, Action::Gather { micro }, &[]);
            self.gathered.push(gathered);
            self.demote_anchor(1, micro, gathered);
        }
    }

    fn promote(&mut self, layer: u16) {
        let buffer = self.buffer(layer);
        let free = self.used[self.buffer_index(layer)];
        let index = self.push(Lane::Up, Action::Promote { layer, buffer }, &[free]);
        self.promoted[usize::from(layer)] = Some(index);
    }

    /// Where a block's weights are used, after their promotion if `promotes`.
    fn weights(&mut self, layer: u16, promotes: bool) -> Buffer {
        if self.lives_on_device(layer) {
            return Buffer::Home(layer);
        }
        if promotes {
            self.promote(layer);
        }
        self.buffer(layer)
    }

    /// Names the last action that uses a buffer of blocks.
    fn used(&mut self, buffer: Buffer, last: u32) {
        if let Buffer::Block(index) = buffer {
            self.used[index as usize] = Some(last);
        }
    }

    /// The demotion of a layer's anchor, if it travels.
    fn left(&self, layer: u16, micro: u32) -> Option<u32> {
        self.anchors_left.get(&(layer, micro)).copied()
    }

    /// Demotes a layer's anchor, if it travels, as soon as it is written.
    fn demote_anchor(&mut self, layer: u16, micro: u32, written: u32) {
        if self.trains() && layer <= self.plan.map.shape.travelling {
            let action = Action::DemoteAnchor { layer, micro };
            let left = self.push(Lane::Down, action, &[Some(written)]);
            self.anchors_left.insert((layer, micro), left);
        }
    }

    /// Promotes a layer's anchors, if they travel, once the anchors in their row are used.
    fn promote_anchors(&mut self, layer: u16, row_used: &[u32]) -> Vec<Option<u32>> {
        let mut promoted = vec![None; self.schedule.micros as usize];
        if layer <= self.plan.map.shape.travelling {
            for (micro, promoted) in (0..).zip(&mut promoted) {
                let action = Action::PromoteAnchor { layer, micro };
                let after = [Some(row_used[micro as usize]), self.left(layer, micro)];
                *promoted = Some(self.push(Lane::Up, action, &after));
            }
        }
        promoted
    }

    fn bind(&mut self, layer: u16, buffer: Buffer) -> u32 {
        let promoted = self.promoted[usize::from(layer)];
        self.push(Lane::Compute, Action::Bind { layer, buffer }, &[promoted])
    }

    pub(super) fn forward(&mut self) {
        for layer in 1..self.head {
            let buffer = self.weights(layer, true);
            let mut last = self.bind(layer, buffer);
            for micro in 0..self.schedule.micros {
                let gathered = (layer == 1).then(|| self.gathered[micro as usize]);
                // The row of its output held the anchor of two layers before.
                let left = (layer > 1).then(|| self.left(layer - 1, micro)).flatten();
                let action = if self.trains() {
                    let keep = self.plan.kept_slot(layer - 1, micro);
                    Action::Forward { layer, micro, keep }
                } else {
                    Action::ForwardOnly { layer, micro }
                };
                last = self.push(Lane::Compute, action, &[gathered, left]);
                self.demote_anchor(layer + 1, micro, last);
            }
            self.used(buffer, last);
        }
    }

    pub(super) fn loss(&mut self) {
        let head = self.head;
        let action = Action::Promote {
            layer: head,
            buffer: Buffer::Head,
        };
        self.promoted[usize::from(head)] = Some(self.push(Lane::Up, action, &[]));
        if self.trains() {
            let accumulator = Accumulator::Head;
            self.push(
                Lane::Compute,
                Action::Clear {
                    layer: head,
                    accumulator,
                },
                &[],
            );
            if self.plan.tied {
                let accumulator = Accumulator::Embed;
                self.push(
                    Lane::Compute,
                    Action::Clear {
                        layer: 0,
                        accumulator,
                    },
                    &[],
                );
            }
        }
        self.bind(head, Buffer::Head);
        for micro in 0..self.schedule.micros {
            let action = match self.schedule.form {
                Form::Train => Action::Loss { micro },
                Form::Evaluate => Action::Evaluate { micro },
                Form::Generate => Action::Logits { micro },
            };
            self.push(Lane::Compute, action, &[]);
        }
        if self.trains() {
            self.finish(head);
        }
    }

    /// Norm, rounding, and the way to where the gradient waits or is updated.
    fn finish(&mut self, layer: u16) {
        let accumulator = self.accumulator(layer);
        let finished = self.push(Lane::Compute, Action::Finish { layer, accumulator }, &[]);
        self.finished[usize::from(layer)] = Some(finished);
        match self.gradient_home(layer) {
            GradientHome::Shared => {
                let from = Finished::In(accumulator);
                let (demoted, slot) = self.demote_to_shared(layer, from, finished);
                self.demoted[usize::from(layer)] = Some(demoted);
                self.update_tile(layer, slot, demoted, None);
            }
            GradientHome::Host => {
                let action = Action::Demote {
                    layer,
                    from: Finished::In(accumulator),
                    slot: GradientSlot::Tile(layer),
                };
                let demoted = self.push(Lane::Down, action, &[Some(finished)]);
                self.demoted[usize::from(layer)] = Some(demoted);
            }
            GradientHome::Device => {
                let parked = self.push(Lane::Compute, Action::Park { layer, accumulator }, &[]);
                self.parked[usize::from(layer)] = Some(parked);
            }
        }
    }

    /// Demotes a gradient to a slot that tiles share, once the slot's last one is consumed.
    fn demote_to_shared(&mut self, layer: u16, from: Finished, ready: u32) -> (u32, GradientSlot) {
        let slot = if layer == 0 || layer == self.head {
            GradientSlot::Wide
        } else {
            let turn = u32::try_from(self.slot_uses % 2).expect("0 or 1");
            self.slot_uses += 1;
            GradientSlot::Block(turn)
        };
        let consumed = self.slot_users[shared_index(slot)];
        let action = Action::Demote { layer, from, slot };
        (
            self.push(Lane::Down, action, &[Some(ready), consumed]),
            slot,
        )
    }

    /// The update of a tile whose gradient is in `slot`, and the way of weights that live on the
    /// device.
    fn update_tile(&mut self, layer: u16, slot: GradientSlot, demoted: u32, clip: Option<u32>) {
        let weight = self.lives_on_device(layer).then(|| {
            let turn = self.weight_uses % 2;
            self.weight_uses += 1;
            let slot = u32::try_from(turn).expect("0 or 1");
            let after = [self.finished[usize::from(layer)], self.weight_users[turn]];
            let action = Action::DemoteWeight { layer, slot };
            (slot, self.push(Lane::Down, action, &after))
        });
        let action = Action::Update {
            layer,
            slot,
            weight: weight.map(|(slot, _)| slot),
        };
        let after = [clip, Some(demoted), weight.map(|(_, demoted)| demoted)];
        let updated = self.push(Lane::Update, action, &after);
        self.updated[usize::from(layer)] = Some(updated);
        if !matches!(slot, GradientSlot::Tile(_)) {
            self.slot_users[shared_index(slot)] = Some(updated);
        }
        if let Some((slot, _)) = weight {
            let action = Action::Return { layer, slot };
            let returned = self.push(Lane::Return, action, &[Some(updated)]);
            self.weight_users[slot as usize] = Some(returned);
        }
    }

    /// The anchors of a layer again. The weights of the block before come for it and stay for that
    /// block's own backward, which is next.
    fn rebuild(&mut self, layer: u16, promotes: bool) {
        let before = layer - 1;
        let buffer = self.weights(before, promotes);
        self.bind(before, buffer);
        for micro in 0..self.schedule.micros {
            self.push(Lane::Compute, Action::Rebuild { layer, micro }, &[]);
        }
    }

    pub(super) fn backward(&mut self) {
        let resident = u16::try_from(self.plan.map.buffers.len()).expect("at most 8 buffers");
        let streamed = self.streamed();
        let rows = self.plan.map.anchor_rows;
        // Backward of each micro-batch of the layer after, and of the one after that.
        let mut used: [Vec<u32>; 2] = Default::default();
        for layer in (1..self.head).rev() {
            // The last blocks that came through the buffers are still there.
            let promotes = |layer: u16| layer + resident <= streamed;
            // Its weights came when the anchors of the block after were computed again.
            let came = rows.is_rebuilt(layer + 1);
            let buffer = self.weights(layer, promotes(layer) && !came);
            if rows.is_rebuilt(layer) {
                self.rebuild(layer, promotes(layer - 1));
            }
            let anchors = self.promote_anchors(layer, &used[1]);
            let accumulator = self.accumulator(layer);
            let demoted = (layer + 2 < self.head).then(|| self.demoted[usize::from(layer) + 2]);
            let clear = Action::Clear { layer, accumulator };
            self.push(Lane::Compute, clear, &[demoted.flatten()]);
            let mut last = self.bind(layer, buffer);
            let mut now = Vec::new();
            for micro in 0..self.schedule.micros {
                let kept = self.plan.kept_slot(layer - 1, micro);
                let action = Action::Backward {
                    layer,
                    micro,
                    kept,
                    accumulator,
                };
                last = self.push(Lane::Compute, action, &[anchors[micro as usize]]);
                now.push(last);
            }
            used = [now, std::mem::take(&mut used[0])];
            self.used(buffer, last);
            self.finish(layer);
        }
        if !self.plan.tied {
            let action = Action::Clear {
                layer: 0,
                accumulator: Accumulator::Embed,
            };
            let demoted = self.demoted[usize::from(self.head)];
            self.push(Lane::Compute, action, &[demoted]);
        }
        for micro in 0..self.schedule.micros {
            self.push(Lane::Compute, Action::EmbedBackward { micro }, &[]);
        }
        self.finish(0);
    }

    /// The updates that wait for the end of the backward pass, in the order of the next forward. Of
    /// the embedding, only the rows that it names are needed first.
    pub(super) fn update(&mut self) {
        let clipping = self.plan.clipping;
        let clip = clipping.then(|| self.push(Lane::Compute, Action::Clip, &[]));
        let mut embed = None;
        let waits = |layer: &u16| self.gradient_home(*layer) != GradientHome::Shared;
        let mut order: Vec<u16> = (0..=self.head).filter(waits).collect();
        // The embedding's gradient is the last to come: until it is there, block 1 is updated,
        // which the forward needs as early.
        if order.starts_with(&[0, 1]) {
            order.swap(0, 1);
        }
        for layer in order {
            if layer == self.head {
                self.update_rest(embed.take(), clip);
            }
            let (demoted, slot) = match self.parked[usize::from(layer)] {
                Some(parked) => self.demote_to_shared(layer, Finished::Parked, parked),
                None => {
                    let demoted = self.demoted[usize::from(layer)];
                    (
                        demoted.expect("it waits in host"),
                        GradientSlot::Tile(layer),
                    )
                }
            };
            if layer == 0 && self.updates_rows_first() {
                let after = [clip, Some(demoted)];
                let rows = self.push(Lane::Update, Action::UpdateRows { slot }, &after);
                self.rows_updated = Some(rows);
                embed = Some((slot, demoted));
            } else {
                self.update_tile(layer, slot, demoted, clip);
            }
        }
        self.update_rest(embed, clip);
    }

    fn update_rest(&mut self, embed: Option<(GradientSlot, u32)>, clip: Option<u32>) {
        if let Some((slot, demoted)) = embed {
            self.update_tile(0, slot, demoted, clip);
        }
    }

    /// Spilled sections stream extent by extent, not row by row.
    fn updates_rows_first(&self) -> bool {
        self.plan.tiles[0].spilled().next().is_none()
    }
}

/// Index of a slot that tiles share.
fn shared_index(slot: GradientSlot) -> usize {
    match slot {
        GradientSlot::Block(index) => index as usize,
        GradientSlot::Wide => 2,
        GradientSlot::Tile(_) => unreachable!("a tile's own slot is not shared"),
    }
}
