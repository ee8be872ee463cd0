//! The state after a training step, held still for a commit while the next step goes on.
//!
//! - A tile is *held* from [`Engine::hold`](super::Engine::hold) until it is released: the update
//!   lane does not begin the update of any later step on it, and waits for nothing else.
//! - Its update of the step itself may still be under way: [`Held::settled`] waits for that one.
//! - Forward and backward go on; promotions only read.
//! - A failure of a later step does not end it: what was held is whole.
//!
//! Whoever holds reads and copies; nothing is copied here.

use std::sync::Arc;

use super::progress::Progress;
use super::{Engine, Shared};
use crate::error::{Error, Result};
use crate::schedule::{Action, Lane};
use crate::transfer::Tiers;

/// The tiles of all layers after a step. Dropping it releases those that are left.
pub struct Held {
    shared: Arc<Shared>,
    progress: Arc<Progress>,
    /// The pass whose state is held; 0 before the first.
    pass: u64,
    /// In the order in which the next step updates them.
    tiles: Vec<Tile>,
}

struct Tile {
    layer: u16,
    /// The actions that change it; a part of the embed tile may be updated ahead of the rest.
    updates: Vec<u32>,
    /// The last action of a step that changes it: its update, or the return of its weight.
    last: u32,
}

impl Engine {
    /// Holds the state after the steps that [`Engine::train_step`] has returned from. To be
    /// released before the next call of this; until then tiles of layers that are held keep their
    /// bytes.
    ///
    /// # Panics
    /// If the plan does not train.
    pub fn hold(&self) -> Held {
        let held = self.hold_loosely();
        for action in held.tiles.iter().flat_map(|tile| &tile.updates) {
            held.progress.hold(*action, held.pass);
        }
        held
    }

    /// As [`Engine::hold`], but holding nothing: later updates may change what is read. Only to
    /// test that holding is needed.
    #[doc(hidden)]
    pub fn hold_loosely(&self) -> Held {
        let track = self.train.as_ref().expect("the plan trains");
        let mut tiles: Vec<Tile> = Vec::new();
        for (index, scheduled) in track.schedule.actions.iter().enumerate() {
            let index = u32::try_from(index).expect("a schedule has fewer than 2^32 actions");
            let layer = match scheduled.action {
                Action::UpdateRows { .. } => 0,
                Action::Update { layer, .. } | Action::Return { layer, .. } => layer,
                _ => continue,
            };
            if !tiles.iter().any(|tile| tile.layer == layer) {
                tiles.push(Tile {
                    layer,
                    updates: Vec::new(),
                    last: index,
                });
            }
            let tile = tiles.iter_mut().find(|tile| tile.layer == layer);
            let tile = tile.expect("it is there by now");
            tile.last = index;
            if scheduled.lane == Lane::Update {
                tile.updates.push(index);
            }
        }
        Held {
            shared: self.shared.clone(),
            progress: track.progress.clone(),
            pass: track.number,
            tiles,
        }
    }
}

impl Held {
    /// Layers, in the order in which the next step will update them.
    pub fn layers(&self) -> impl Iterator<Item = u16> + '_ {
        self.tiles.iter().map(|tile| tile.layer)
    }

    /// Waits until the layer's own update is done; its tile may be read from then on, until it is
    /// released.
    ///
    /// # Errors
    /// [`Error::StoreFailed`] if a lane failed before that.
    pub fn settled(&self, layer: u16) -> Result<&Tiers> {
        let last = self.tile(layer).last;
        if self.progress.wait_despite_failure(last, self.pass) {
            return Ok(&self.shared.tiers);
        }
        let first = self.shared.failure.words().unwrap_or_default();
        Err(Error::StoreFailed { first })
    }

    /// Lets later steps update the layer.
    pub fn release(&self, layer: u16) {
        for action in &self.tile(layer).updates {
            self.progress.release(*action);
        }
    }

    fn tile(&self, layer: u16) -> &Tile {
        let found = self.tiles.iter().find(|tile| tile.layer == layer);
        found.expect("every layer is updated once a step")
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        for action in self.tiles.iter().flat_map(|tile| &tile.updates) {
            self.progress.release(*action);
        }
    }
}
