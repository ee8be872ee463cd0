//! Waits across steps: an action may begin before the step before has ended, but not before what it
//! needs of it.

use super::build::Builder;
use super::{Accumulator, Action, After, Buffer, Finished};

impl Builder<'_> {
    /// Waits on the step before: a tile's use for its update, a place's reuse for its last user.
    pub(super) fn link_previous(&mut self) {
        let mut links: Vec<(usize, u32)> = Vec::new();
        let mut buffers_seen = vec![false; self.plan.map.buffers.len()];
        let mut homes_seen = vec![false; usize::from(self.plan.layer_count())];
        let mut blocks_cleared = 0;
        let last_block_use = self.used.clone();
        let last_of_head = self.last(|action| {
            matches!(
                action,
                Action::Loss { .. } | Action::Evaluate { .. } | Action::Logits { .. }
            )
        });
        for (at, scheduled) in self.schedule.actions.iter().enumerate() {
            let mut link = |other: Option<u32>| links.extend(other.map(|other| (at, other)));
            match scheduled.action {
                Action::Gather { micro } => {
                    link(self.rows_updated.or(self.updated[0]));
                    link(self.last_in_row(1, micro));
                    link(self.user_of_first_anchor(micro));
                    link(last_of_head.filter(|_| !self.trains()));
                }
                Action::Promote {
                    layer,
                    buffer: Buffer::Block(_),
                } => {
                    link(self.updated[usize::from(layer)]);
                    let buffer = self.buffer_index(layer);
                    if !buffers_seen[buffer] {
                        link(last_block_use[buffer]);
                        buffers_seen[buffer] = true;
                    }
                }
                Action::Promote {
                    layer,
                    buffer: Buffer::Head,
                } => {
                    link(self.updated[usize::from(layer)]);
                    link(last_of_head);
                    if self.plan.tied {
                        link(self.updated[0]);
                    }
                }
                Action::Clear {
                    accumulator: Accumulator::Block(_),
                    ..
                } => {
                    // The last two blocks of the step before hold the two accumulators.
                    blocks_cleared += 1;
                    if blocks_cleared <= 2 {
                        link(self.last_demote(scheduled.action));
                    }
                }
                Action::Bind {
                    layer,
                    buffer: Buffer::Home(_),
                } if !homes_seen[usize::from(layer)] => {
                    homes_seen[usize::from(layer)] = true;
                    let returned = |a| matches!(a, Action::Return { layer: of, .. } if of == layer);
                    link(self.last(returned));
                }
                action => link(self.user_of_gradient(action)),
            }
        }
        let previous = true;
        for (at, action) in links {
            let after = &mut self.schedule.actions[at].after;
            after.push(After { action, previous });
        }
    }

    /// Where a gradient waits in the row of a layer's anchors: its demotion, which the first to
    /// write there waits for.
    fn last_in_row(&self, layer: u16, micro: u32) -> Option<u32> {
        let waits = self.trains() && micro == 0 && self.plan.map.waits_in_row(layer);
        waits.then(|| self.last_from_parked(layer)).flatten()
    }

    /// The backward that uses the anchor of layer 1 last.
    fn user_of_first_anchor(&self, micro: u32) -> Option<u32> {
        self.schedule.index_of(Action::Backward {
            layer: 1,
            micro,
            kept: self.plan.kept_slot(0, micro),
            accumulator: self.accumulator(1),
        })
    }

    /// Last user, in the step before, of the place of a gradient that `action` writes.
    fn user_of_gradient(&self, action: Action) -> Option<u32> {
        match action {
            Action::Forward { layer, micro, .. } => self.last_in_row(layer + 1, micro),
            Action::Clear {
                accumulator: Accumulator::Head,
                layer,
            } => self.demoted[usize::from(if self.plan.tied { layer } else { 0 })],
            Action::Clear {
                accumulator: Accumulator::Embed,
                ..
            } => self.demoted[0],
            Action::Park { layer, .. } => self.last_from_parked(layer),
            Action::Demote { slot, .. } => {
                self.last(|a| matches!(a, Action::Update { slot: of, .. } if of == slot))
            }
            Action::DemoteWeight { slot, .. } => {
                self.last(|a| matches!(a, Action::Return { slot: of, .. } if of == slot))
            }
            _ => None,
        }
    }

    /// The demotion of a layer's gradient from where it waits on the device.
    fn last_from_parked(&self, layer: u16) -> Option<u32> {
        self.last(|a| {
            matches!(a, Action::Demote { layer: of, from: Finished::Parked, .. } if of == layer)
        })
    }

    /// Last demotion from the accumulator that `clear` is for.
    fn last_demote(&self, clear: Action) -> Option<u32> {
        let Action::Clear { accumulator, .. } = clear else {
            return None;
        };
        let from = Finished::In(accumulator);
        self.last(|action| matches!(action, Action::Demote { from: f, .. } if f == from))
    }

    /// The last action that is as asked.
    fn last(&self, is_wanted: impl Fn(Action) -> bool) -> Option<u32> {
        let index = self
            .schedule
            .actions
            .iter()
            .rposition(|scheduled| is_wanted(scheduled.action))?;
        u32::try_from(index).ok()
    }
}
