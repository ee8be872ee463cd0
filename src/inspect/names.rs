//! Tiles by the names that people use: `embed`, `block 12`, `head`, and tensors within.
//!
//! Blocks count from 0, as in Hugging Face's names. A tile that no model names is `tile 3.0`. Names
//! of tensors are text only.

use std::collections::BTreeMap;
use std::fmt;

use crate::error::{Error, Result, printable};
use crate::model::{LayerKind, ModelSpec};
use crate::store::ExtentTable;
use crate::tile::{TensorRange, TileId, TileLayout};

/// A tile and what it is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileName {
    /// Its number.
    pub id: TileId,
    /// Its name: `embed`, `block 12`, `head`, or `tile 3.0`.
    pub name: String,
}

impl fmt::Display for TileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Names and layouts of a commit's tiles.
#[derive(Clone, Debug, Default)]
pub struct Names {
    kinds: BTreeMap<TileId, LayerKind>,
    layouts: BTreeMap<TileId, TileLayout>,
    tiles: Vec<TileId>,
}

impl Names {
    /// Those of a model, where its layouts are the table's.
    pub(super) fn of(table: &ExtentTable, spec: Option<&ModelSpec>) -> Names {
        let mut names = Names {
            tiles: table.sections().map(|section| section.tile).collect(),
            ..Names::default()
        };
        names.tiles.dedup();
        let Some(spec) = spec else { return names };
        for layout in spec.tile_layouts() {
            let mut sections = table.sections().filter(|s| s.tile == layout.id).peekable();
            let fits = sections.peek().is_some();
            if fits && sections.all(|section| section.elements == layout.elements) {
                let kind = spec.layer_kind(layout.id.layer);
                names.kinds.insert(layout.id, kind);
                names.layouts.insert(layout.id, layout);
            }
        }
        names
    }

    /// A tile's name.
    pub fn tile(&self, id: TileId) -> TileName {
        let name = match (self.kinds.get(&id), id.part) {
            (Some(LayerKind::Embed), 0) => "embed".to_string(),
            (Some(LayerKind::Block(block)), 0) => format!("block {block}"),
            (Some(LayerKind::Head), 0) => "head".to_string(),
            _ => id.to_string(),
        };
        TileName { id, name }
    }

    /// The tensors of a tile; none where no model names them.
    pub fn tensors(&self, id: TileId) -> &[TensorRange] {
        self.layouts.get(&id).map_or(&[], |layout| &layout.tensors)
    }

    /// Names of tensors that lie in a range of a tile's elements.
    pub fn tensors_within(&self, id: TileId, elements: std::ops::Range<u64>) -> Vec<String> {
        let inside = |tensor: &&TensorRange| {
            tensor.start < elements.end && elements.start < tensor.elements().end
        };
        let tensors = self.tensors(id).iter().filter(inside);
        tensors.map(|tensor| tensor.name.clone()).collect()
    }

    /// The tile that a person names, and the tensor where they named one.
    ///
    /// # Errors
    /// [`Error::Input`] listing the names that there are.
    pub fn find(&self, text: &str, place: &str) -> Result<(TileName, Option<TensorRange>)> {
        let wanted = normal(text);
        for id in &self.tiles {
            let tile = self.tile(*id);
            let numbered = [id.to_string(), format!("{}.{}", id.layer, id.part)];
            if normal(&tile.name) == wanted || numbered.iter().any(|n| normal(n) == wanted) {
                return Ok((tile, None));
            }
        }
        for (id, layout) in &self.layouts {
            if let Some(tensor) = layout.tensor(text.trim()) {
                return Ok((self.tile(*id), Some(tensor.clone())));
            }
        }
        let known: Vec<String> = self.tiles.iter().map(|id| self.tile(*id).name).collect();
        let shown = match known.as_slice() {
            [first, second, .., last] if known.len() > 4 => {
                format!("{first}, {second}, ..., {last}")
            }
            _ => known.join(", "),
        };
        Err(Error::input(
            "tile",
            place,
            format!("one of {shown}, or a tensor's name"),
            printable(text),
            "`list --step` shows all",
        ))
    }
}

/// Without spaces, dots, dashes and case: `Block-12` is `block 12`.
fn normal(text: &str) -> String {
    let text = text.trim().to_lowercase();
    let mut parts = text.split([' ', '-', '_', '.']);
    // The dot between layer and part counts.
    match (parts.next(), parts.clone().count()) {
        (Some(word), 1) if word.chars().all(char::is_alphabetic) => text
            .chars()
            .filter(|c| !matches!(c, ' ' | '-' | '_' | '.'))
            .collect(),
        _ => text.split_whitespace().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoredSection;
    use crate::tile::Section;

    #[test]
    fn tiles_are_found_by_the_ways_in_which_people_write_them() {
        let tile = |layer| TileId { layer, part: 0 };
        let section = |layer| StoredSection {
            tile: tile(layer),
            section: Section::Weight,
            elements: 64,
            element_bytes: 2,
        };
        let table = ExtentTable::new(&[section(0), section(3), section(13)]);
        let mut names = Names::of(&table, None);
        let find = |names: &Names, text: &str| names.find(text, "x").map(|(tile, _)| tile.id.layer);
        assert_eq!(find(&names, "tile 3.0").unwrap(), 3);
        assert_eq!(find(&names, "3.0").unwrap(), 3);
        assert!(find(&names, "30").is_err());
        names.kinds.insert(tile(0), LayerKind::Embed);
        names.kinds.insert(tile(3), LayerKind::Block(2));
        names.kinds.insert(tile(13), LayerKind::Block(12));
        for text in ["block 12", "Block12", "block.12", "block-12", " block  12 "] {
            assert_eq!(find(&names, text).unwrap(), 13, "{text}");
        }
        assert_eq!(find(&names, "embed").unwrap(), 0);
        let error = find(&names, "block 1\u{1b}[2J").unwrap_err().to_string();
        assert_eq!(
            error,
            "tile: x: expected one of embed, block 2, block 12, or a tensor's name, got \
             block 1\\u{1b}[2J; `list --step` shows all"
        );
    }
}
