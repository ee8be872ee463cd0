//! Rows of anchors on the device: which layer's inputs lie in which, all micro-batches of a layer
//! in one.
//!
//! - A layer has a row of its own, but for those whose anchors leave the device or are rebuilt.
//! - The first t layers' anchors leave it: layers 1 to t + 2 take turns in two rows, and those of
//!   t + 1 and t + 2 are still there when backward comes to them.
//! - Every other block of a run in the middle is rebuilt: its anchors are overwritten after its
//!   forward, and computed again from those of the block before. All of these use the row of the
//!   block two after the last of them: forward writes that one's anchors after theirs, backward
//!   uses them before.

/// Which layer has which row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnchorRows {
    blocks: u16,
    travelling: u16,
    rebuilt: u16,
}

impl AnchorRows {
    /// Rows of a model of so many blocks, where anchors of layers 1 to `travelling` leave the
    /// device and those of `rebuilt` blocks, at most [`AnchorRows::rebuilt_max`], are rebuilt.
    pub(super) fn new(blocks: u16, travelling: u16, rebuilt: u16) -> AnchorRows {
        assert!(
            rebuilt <= AnchorRows::rebuilt_max(blocks, travelling),
            "only every other block can be rebuilt"
        );
        AnchorRows {
            blocks,
            travelling,
            rebuilt,
        }
    }

    /// Most blocks that can be rebuilt: of those whose own row and that of the block before are
    /// nobody else's, and not the last two, since the head's row holds the gradient of the hidden
    /// states.
    pub fn rebuilt_max(blocks: u16, travelling: u16) -> u16 {
        let last = blocks.saturating_sub(2);
        (last + 2).saturating_sub(first_rebuilt(travelling)) / 2
    }

    /// Rows: without gradients one, in which all blocks compute in place.
    pub(super) fn count(self, trains: bool) -> u64 {
        let kept = self.blocks - self.travelling - self.rebuilt;
        1 + u64::from(kept) * u64::from(trains)
    }

    /// The last block that is rebuilt. The run is in the middle, away from layers whose gradients
    /// wait in their rows.
    fn last(self) -> u16 {
        let last = self.blocks - 2;
        let spare = last - first_rebuilt(self.travelling) - 2 * (self.rebuilt - 1);
        last - spare / 2
    }

    /// Whether the layer's anchors are computed again for its backward.
    pub fn is_rebuilt(self, layer: u16) -> bool {
        self.rebuilt > 0
            && layer <= self.last()
            && (self.last() - layer).is_multiple_of(2)
            && (self.last() - layer) / 2 < self.rebuilt
    }

    /// Row of a layer's anchors.
    pub fn row(self, layer: u16) -> u16 {
        let layer = match self.is_rebuilt(layer) {
            true => self.last() + 2,
            false => layer,
        };
        let index = layer - 1;
        match self.travelling {
            travelling if travelling > 0 && index < travelling + 2 => index % 2,
            travelling => index - travelling - self.rebuilt_before(layer),
        }
    }

    /// So many blocks before this one are rebuilt.
    fn rebuilt_before(self, layer: u16) -> u16 {
        (1..layer).filter(|layer| self.is_rebuilt(*layer)).count() as u16
    }

    /// Row in which the finished gradient of a block can wait, of so many bytes where a row has so
    /// many: one that the layer has for itself. Nobody reads a block's anchors after its backward,
    /// and nobody writes them before the next forward comes to the block before.
    pub(super) fn waiting(self, layer: u16, bytes: u64, row_bytes: u64) -> Option<u16> {
        let alternates = self.travelling > 0 && layer <= self.travelling + 2;
        let shared = self.rebuilt > 0 && (self.is_rebuilt(layer) || layer == self.last() + 2);
        let own = layer > 0 && layer <= self.blocks && !alternates && !shared;
        (own && bytes <= row_bytes).then(|| self.row(layer))
    }
}

/// The first block that can be rebuilt where so many layers' anchors leave the device.
fn first_rebuilt(travelling: u16) -> u16 {
    match travelling {
        0 => 2,
        travelling => travelling + 4,
    }
}

/// Most layers whose anchors can leave the device: the head's holds the gradient of the hidden
/// states, and two rows are for those that come and go.
pub fn travelling_max(blocks: u16) -> u16 {
    blocks.saturating_sub(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_row_is_written_before_its_anchors_are_used() {
        for (blocks, travelling) in
            (1..14).flat_map(|b| (0..=travelling_max(b)).map(move |t| (b, t)))
        {
            for rebuilt in 0..=AnchorRows::rebuilt_max(blocks, travelling) {
                let rows = AnchorRows::new(blocks, travelling, rebuilt);
                let layers = || 1..=blocks + 1;
                let rebuilt_layers = layers().filter(|layer| rows.is_rebuilt(*layer));
                assert_eq!(rebuilt_layers.clone().count(), usize::from(rebuilt));
                let highest = layers().map(|layer| rows.row(layer)).max();
                assert_eq!(
                    highest.map(|row| u64::from(row) + 1),
                    Some(rows.count(true))
                );
                for layer in rebuilt_layers {
                    assert!(layer > 1 && layer < blocks - 1 && !rows.is_rebuilt(layer - 1));
                    assert!(layer > travelling && rows.row(layer) != rows.row(layer - 1));
                    // The row is another's, whose anchors come later and go earlier.
                    let others = layers().filter(|l| !rows.is_rebuilt(*l));
                    let owner: Vec<u16> =
                        others.filter(|l| rows.row(*l) == rows.row(layer)).collect();
                    assert!(
                        owner.len() == 1 && owner[0] >= layer + 2,
                        "{rows:?} {owner:?}"
                    );
                    assert_eq!(rows.waiting(owner[0], 0, 1), None);
                }
            }
        }
    }
}
