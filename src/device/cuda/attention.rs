//! Launches of `kernels/attention.cu`: which kernel for a shape, and its list of units of work.
//!
//! - bf16 of the widths in [`ENGINES`] uses tensor cores, by wgmma where [`wgmma`] has the width
//!   and the card is Hopper. All else (f32, other widths, addresses off 16 bytes, more shared
//!   memory than the card gives a block) uses the plain kernels: slow, as right.
//! - A unit is a block of queries or keys of one packed sequence; units come longest first, so that
//!   the last blocks of a grid are short. The order decides no sum.
//! - The wgmma kernels' blocks take items (a unit of a head) from a counter in front of the list,
//!   heads and sequences in sections whose keys and values the L2 cache holds.
//! - delta (`[heads, T]` f32) lies in the compute stream's workspace between the backward's
//!   launches.

use std::cmp::Reverse;

use super::driver::TensorMap;
use super::{Argument, CudaDevice, Dtype, STAGED_BYTES_MAX, View, assert_apart};
use crate::device::ops::AttentionShape;

/// Rows of a block of the plain kernels, a warp each.
const PLAIN_ROWS: u64 = 4;
/// u32 that describe a unit: first token of its sequence, length, first row, 0.
const UNIT_WORDS: usize = 4;
/// Units of a launch: with the list's head they are staged at once.
const UNITS_STAGED_MAX: usize = STAGED_BYTES_MAX / (4 * UNIT_WORDS) - 1;

/// In front of a list of the wgmma kernels: the next item, +∞ as f32, two unused.
const LIST_HEAD: [u32; UNIT_WORDS] = [0, f32::INFINITY.to_bits(), 0, 0];
/// Blocks of the wgmma kernels, each on a multiprocessor of its own: an H100 or H200 has 132. More
/// than there are wait, and find nothing left.
const STAYING_BLOCKS: u64 = 132;
/// Bytes of keys and values (or queries and their gradients) that blocks at work share in the L2
/// cache.
const SHARED_IN_CACHE: u64 = 32 << 20;

/// A kernel with its geometry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Launch {
    name: &'static str,
    /// Queries or keys of a block.
    rows: u64,
    threads: u32,
    shared_bytes: u64,
    grid: Grid,
}

/// What a kernel's blocks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Grid {
    /// Units times heads times blocks that share the columns of a row.
    Units { slices: u32 },
    /// Blocks that take items; boxes of as many queries (of as many keys, where the rows are
    /// queries) are copied beside those of the rows.
    Items { others: u32 },
}

/// The three tensor-core kernels of a head width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Engine {
    head_dim: u64,
    forward: Launch,
    queries: Launch,
    keys: Launch,
}

/// Tiles of the mma.sync kernels, as in the table of `TENSOR_KERNELS`: warps of forward, keys of a
/// tile of dq, queries of a tile of dk and dv, columns of these that a block has.
struct Tiles {
    head_dim: u64,
    warps: u64,
    keys: u64,
    queries: u64,
    columns: u64,
}

const fn mma(names: [&'static str; 3], tiles: &Tiles) -> Engine {
    let row_bytes = tiles.head_dim * 2 + 16;
    let held = if tiles.head_dim > 128 {
        16 * tiles.warps
    } else {
        0
    };
    Engine {
        head_dim: tiles.head_dim,
        forward: Launch {
            name: names[0],
            rows: 16 * tiles.warps,
            threads: 32 * tiles.warps as u32,
            shared_bytes: (32 * tiles.warps + held) * row_bytes,
            grid: Grid::Units { slices: 1 },
        },
        queries: Launch {
            name: names[1],
            rows: 64,
            threads: 128,
            shared_bytes: (128 + 4 * tiles.keys) * row_bytes,
            grid: Grid::Units { slices: 1 },
        },
        keys: Launch {
            name: names[2],
            rows: 64,
            threads: 128,
            shared_bytes: (128 + 4 * tiles.queries) * row_bytes,
            grid: Grid::Units {
                slices: (tiles.head_dim / tiles.columns) as u32,
            },
        },
    }
}

macro_rules! engines {
    ($($head_dim:literal: $warps:literal, $keys:literal, $queries:literal, $columns:literal;)*) => {
        /// The mma.sync kernels.
        const ENGINES: &[Engine] = &[$(mma(
            [
                concat!("attention_forward_", $head_dim),
                concat!("attention_backward_queries_", $head_dim),
                concat!("attention_backward_keys_", $head_dim),
            ],
            &Tiles {
                head_dim: $head_dim,
                warps: $warps,
                keys: $keys,
                queries: $queries,
                columns: $columns,
            },
        )),*];
    };
}
engines! {
    32: 8, 64, 64, 32;
    64: 8, 64, 64, 64;
    80: 8, 64, 32, 80;
    96: 8, 64, 32, 96;
    128: 8, 32, 32, 128;
    256: 4, 16, 16, 128;
}

/// Of a wgmma kernel, as in `attention.cu`: rows of a tile of what its unit does not consist of,
/// and how many such tiles are in shared memory.
struct Rings {
    others: u32,
    tiles: u32,
}

/// The wgmma kernels of a head width.
fn wgmma(head_dim: u64) -> Option<Engine> {
    let rings = |others, tiles| Rings { others, tiles };
    let (names, queries) = match head_dim {
        64 => (
            [
                "attention_forward_wgmma_64",
                "attention_backward_queries_wgmma_64",
                "attention_backward_keys_wgmma_64",
            ],
            rings(96, 5),
        ),
        128 => (
            [
                "attention_forward_wgmma_128",
                "attention_backward_queries_wgmma_128",
                "attention_backward_keys_wgmma_128",
            ],
            rings(64, 8),
        ),
        _ => return None,
    };
    // Row tiles of q, of q and do, of k and v; of a ring of queries, lse and delta too; barriers
    // and scratch take less than 3 KiB.
    let launch = |name, row_tiles: u32, rings: Rings, sums_bytes: u64| {
        let rows = u64::from(row_tiles * 128 + rings.tiles * rings.others);
        Launch {
            name,
            rows: 128,
            threads: 384,
            shared_bytes: rows * head_dim * 2 + sums_bytes + (3 << 10),
            grid: Grid::Items {
                others: rings.others,
            },
        }
    };
    Some(Engine {
        head_dim,
        forward: launch(names[0], 1, rings(128, 4), 0),
        queries: launch(names[1], 2, queries, 0),
        keys: launch(names[2], 2, rings(64, 8), 4 * 64 * 8),
    })
}

/// Dynamic shared memory that a block may ask for, by compute capability.
fn shared_bytes_max(capability: (u32, u32)) -> u64 {
    match capability {
        (8, 0 | 7) => 163 << 10,
        (8, _) | (12, _) => 99 << 10,
        (9..=11, _) => 227 << 10,
        _ => 48 << 10,
    }
}

/// The tensor-core kernels for a width on a card; `None` is the plain ones.
fn engine(head_dim: u64, capability: (u32, u32)) -> Option<Engine> {
    let mut engine = ENGINES.iter().find(|e| e.head_dim == head_dim).copied()?;
    if capability == (9, 0) {
        engine = wgmma(head_dim).unwrap_or(engine);
    }
    let needed = [engine.forward, engine.queries, engine.keys].map(|launch| launch.shared_bytes);
    let fits = needed
        .iter()
        .all(|bytes| *bytes <= shared_bytes_max(capability));
    fits.then_some(engine)
}

/// What the rows of a unit are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rows {
    Queries,
    Keys,
}

/// The units of `rows` rows of all sequences; of sequences that start in the same `section` tokens
/// longest first, equal ones in order.
fn units(bounds: &[u32], rows: u64, window: u64, kind: Rows, section: u64) -> Vec<u32> {
    let mut found = Vec::new();
    for ends in bounds.windows(2) {
        let length = u64::from(ends[1] - ends[0]);
        for block in 0..length.div_ceil(rows) {
            let (first, last) = (block * rows, length.min((block + 1) * rows));
            let cost = match kind {
                Rows::Queries => last - (first + 1).saturating_sub(window),
                Rows::Keys => length.min(last - 1 + window) - first,
            };
            let order = (u64::from(ends[0]) / section, Reverse(cost));
            found.push((order, [ends[0], ends[1] - ends[0], index(first), 0]));
        }
    }
    found.sort_by_key(|(order, _)| *order);
    found.into_iter().flat_map(|(_, unit)| unit).collect()
}

/// Sizes of a call, checked.
#[derive(Clone, Copy)]
struct Geometry<'a> {
    tokens: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    /// At most the tokens, at least 1.
    window: u64,
    bounds: &'a [u32],
    dtype: Dtype,
}

impl<'a> Geometry<'a> {
    fn new(shape: AttentionShape<'a>, like_q: &[View], like_k: &[View], lse: View) -> Geometry<'a> {
        let (heads, kv_heads, head_dim) = (shape.heads, shape.kv_heads, shape.head_dim);
        assert!(
            heads > 0 && kv_heads > 0 && head_dim > 0 && heads.is_multiple_of(kv_heads),
            "{heads} heads of {kv_heads} groups, {head_dim} wide"
        );
        assert!(shape.window != Some(0), "a query sees at least itself");
        assert_eq!(shape.bounds.first(), Some(&0), "bounds start with 0");
        assert!(shape.bounds.is_sorted(), "bounds ascend");
        let tokens = shape.bounds.last().copied().map_or(0, u64::from);
        assert!(tokens < 1 << 30, "{tokens} tokens");
        for view in like_q {
            assert_eq!(view.count, tokens * heads * head_dim, "[T, heads, D]");
        }
        for view in like_k {
            assert_eq!(view.count, tokens * kv_heads * head_dim, "[T, kv_heads, D]");
        }
        assert_eq!(lse.count, heads * tokens, "lse is [heads, T]");
        assert_eq!(lse.dtype, Dtype::F32, "lse is f32");
        let dtype = like_q[0].dtype;
        let views = like_q.iter().chain(like_k);
        assert!(views.clone().all(|v| v.dtype == dtype), "one format");
        Geometry {
            tokens,
            heads,
            kv_heads,
            head_dim,
            window: shape.window.unwrap_or(tokens).min(tokens).max(1),
            bounds: shape.bounds,
            dtype,
        }
    }

    /// The last parameters of every kernel.
    fn problem(&self) -> [Argument; 5] {
        [
            Argument::U64(self.tokens),
            Argument::U32(index(self.heads)),
            Argument::U32(index(self.kv_heads)),
            Argument::U32(index(self.window)),
            Argument::F32((1.0 / (self.head_dim as f64).sqrt()) as f32),
        ]
    }

    /// A plain kernel's name.
    fn plain(&self, names: [&'static str; 2]) -> &'static str {
        match self.dtype {
            Dtype::Bf16 => names[0],
            Dtype::F32 => names[1],
        }
    }
}

impl CudaDevice {
    pub(in crate::device) fn attention_forward(
        &self,
        q: View,
        k: View,
        v: View,
        o: View,
        lse: View,
        shape: AttentionShape<'_>,
    ) {
        let geometry = Geometry::new(shape, &[q, o], &[k, v], lse);
        assert_apart(&[o, lse], &[q, k, v]);
        if geometry.tokens == 0 {
            return;
        }
        let rest = self.pointers(&[o, lse]);
        match self.attention_engine(&geometry, &[q, k, v, o]) {
            Some(engine) => {
                self.launch_units(&geometry, engine.forward, Rows::Queries, &[q, k, v], &rest);
            }
            None => {
                let mut arguments = self.pointers(&[q, k, v]);
                arguments.extend(rest);
                let names = [
                    "attention_forward_plain_bf16",
                    "attention_forward_plain_f32",
                ];
                let bounds = self.stage_u32(geometry.bounds);
                self.launch_plain(&geometry, names, Rows::Queries, arguments, bounds);
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "an operation's tensors")]
    pub(in crate::device) fn attention_backward(
        &self,
        q: View,
        k: View,
        v: View,
        o: View,
        lse: View,
        do_: View,
        dq: View,
        dk: View,
        dv: View,
        shape: AttentionShape<'_>,
    ) {
        let geometry = Geometry::new(shape, &[q, o, do_, dq], &[k, v, dk, dv], lse);
        assert_apart(&[dq, dk, dv], &[q, k, v, o, lse, do_]);
        if geometry.tokens == 0 {
            return;
        }
        let delta = Argument::Pointer(self.workspace(4 * geometry.heads * geometry.tokens));
        self.launch_delta(&geometry, &[o, do_], delta);
        let inputs = [q, k, v, do_];
        let mut sums = self.pointers(&[lse]);
        sums.push(delta);
        let with = |outputs: &[View]| [sums.clone(), self.pointers(outputs)].concat();
        let (for_queries, for_keys) = (with(&[dq]), with(&[dk, dv]));
        match self.attention_engine(&geometry, &[q, k, v, do_, dq, dk, dv]) {
            Some(engine) => {
                self.launch_units(
                    &geometry,
                    engine.queries,
                    Rows::Queries,
                    &inputs,
                    &for_queries,
                );
                self.launch_units(&geometry, engine.keys, Rows::Keys, &inputs, &for_keys);
            }
            None => {
                let inputs = self.pointers(&inputs);
                let for_queries = [inputs.clone(), for_queries].concat();
                let for_keys = [inputs, for_keys].concat();
                let bounds = self.stage_u32(geometry.bounds);
                let names = [
                    "attention_backward_queries_plain_bf16",
                    "attention_backward_queries_plain_f32",
                ];
                self.launch_plain(&geometry, names, Rows::Queries, for_queries, bounds);
                let names = [
                    "attention_backward_keys_plain_bf16",
                    "attention_backward_keys_plain_f32",
                ];
                self.launch_plain(&geometry, names, Rows::Keys, for_keys, bounds);
            }
        }
    }

    fn pointers(&self, views: &[View]) -> Vec<Argument> {
        let pointer = |view: &View| Argument::Pointer(self.pointer(*view));
        views.iter().map(pointer).collect()
    }

    /// The tensor-core kernels for a call; `None` is the plain ones.
    fn attention_engine(&self, geometry: &Geometry<'_>, views: &[View]) -> Option<Engine> {
        let aligned = views.iter().all(|v| self.pointer(*v).is_multiple_of(16));
        if geometry.dtype != Dtype::Bf16 || !aligned {
            return None;
        }
        engine(geometry.head_dim, self.capability())
    }

    /// Launches a tensor-core kernel over the units of its rows: `inputs` are q, k, v and, of the
    /// gradients, do; `rest` are its parameters from there to the list.
    fn launch_units(
        &self,
        geometry: &Geometry<'_>,
        launch: Launch,
        kind: Rows,
        inputs: &[View],
        rest: &[Argument],
    ) {
        let group = geometry.heads / geometry.kv_heads;
        // What the items of a head share: k and v, or q and do of the group.
        let (heads, group_heads, shared) = match kind {
            Rows::Queries => (geometry.heads, group, 1),
            Rows::Keys => (geometry.kv_heads, 1, group),
        };
        let token_bytes = 2 * 2 * geometry.head_dim * shared;
        let section = (SHARED_IN_CACHE / token_bytes).max(1);
        let units = units(geometry.bounds, launch.rows, geometry.window, kind, section);
        // Units are independent: of very many short sequences several launches do the same.
        for units in units.chunks(UNITS_STAGED_MAX * UNIT_WORDS) {
            let count = (units.len() / UNIT_WORDS) as u64;
            let mut arguments;
            let grid = match launch.grid {
                Grid::Units { slices } => {
                    arguments = self.pointers(inputs);
                    arguments.extend(rest);
                    arguments.push(Argument::Pointer(self.stage_u32(units)));
                    (index(count), index(heads), slices)
                }
                Grid::Items { others } => {
                    arguments = self.maps(geometry, inputs, kind, index(launch.rows), others);
                    arguments.extend(rest);
                    let list = [&LIST_HEAD, units].concat();
                    arguments.push(Argument::Pointer(self.stage_u32(&list)));
                    let sections = (section / geometry.tokens).max(1) * group_heads;
                    arguments.extend(
                        [count, heads, sections.min(heads)].map(|size| Argument::U32(index(size))),
                    );
                    (index(STAYING_BLOCKS.min(count * heads)), 1, 1)
                }
            };
            arguments.extend(geometry.problem());
            self.launch(
                launch.name,
                grid,
                (launch.threads, 1, 1),
                index(launch.shared_bytes),
                &arguments,
            );
        }
    }

    /// Tensor maps of q, k, v and do: boxes of `rows` tokens of what the rows are, of `others` of
    /// the other two. Empty after a failure, when nothing is launched.
    fn maps(
        &self,
        geometry: &Geometry<'_>,
        inputs: &[View],
        kind: Rows,
        rows: u32,
        others: u32,
    ) -> Vec<Argument> {
        let (queries, keys) = match kind {
            Rows::Queries => (rows, others),
            Rows::Keys => (others, rows),
        };
        let shapes = [
            (geometry.heads, queries),
            (geometry.kv_heads, keys),
            (geometry.kv_heads, keys),
            (geometry.heads, queries),
        ];
        let mut maps = Vec::new();
        self.attempt(|| {
            for (view, (heads, rows)) in inputs.iter().zip(shapes) {
                maps.push(Argument::Map(TensorMap::of_heads(
                    self.pointer(*view),
                    geometry.tokens,
                    heads,
                    geometry.head_dim,
                    rows,
                )?));
            }
            Ok(())
        });
        maps
    }

    /// Launches a plain kernel over all tokens; its rows' f32 sums are in shared memory.
    fn launch_plain(
        &self,
        geometry: &Geometry<'_>,
        names: [&'static str; 2],
        kind: Rows,
        mut arguments: Vec<Argument>,
        bounds: u64,
    ) {
        let (heads, sums) = match kind {
            Rows::Queries => (geometry.heads, 1),
            Rows::Keys => (geometry.kv_heads, 2),
        };
        arguments.push(Argument::Pointer(bounds));
        arguments.push(Argument::U32(index(geometry.bounds.len() as u64 - 1)));
        arguments.push(Argument::U32(index(geometry.head_dim)));
        arguments.extend(geometry.problem());
        self.launch(
            geometry.plain(names),
            (index(geometry.tokens.div_ceil(PLAIN_ROWS)), index(heads), 1),
            (128, 1, 1),
            index(4 * PLAIN_ROWS * sums * geometry.head_dim),
            &arguments,
        );
    }

    /// delta = Σ do·o of each token and head.
    fn launch_delta(&self, geometry: &Geometry<'_>, views: &[View], delta: Argument) {
        let mut arguments = self.pointers(views);
        arguments.push(delta);
        arguments.push(Argument::U32(index(geometry.head_dim)));
        arguments.extend(geometry.problem());
        self.launch(
            geometry.plain(["attention_delta_bf16", "attention_delta_f32"]),
            (
                index(geometry.tokens.div_ceil(PLAIN_ROWS)),
                index(geometry.heads),
                1,
            ),
            (128, 1, 1),
            0,
            &arguments,
        );
    }
}

/// A size as a kernel's 32-bit parameter.
fn index(value: u64) -> u32 {
    u32::try_from(value).expect("a size below 2³²")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every row of every sequence is in one unit, and no unit before a longer one.
    #[test]
    fn units_cover_each_row_once() {
        let bounds = [0, 1, 1, 130, 700];
        for (rows, window, kind) in [
            (128, 700, Rows::Queries),
            (64, 100, Rows::Queries),
            (64, 700, Rows::Keys),
            (128, 1, Rows::Keys),
        ] {
            let units = units(&bounds, rows, window, kind, 1 << 20);
            let mut seen = vec![0; 700];
            let mut longest = u64::MAX;
            for unit in units.chunks(UNIT_WORDS) {
                let (start, length, first) = (unit[0], unit[1], u64::from(unit[2]));
                assert!(bounds.windows(2).any(|b| b == [start, start + length]));
                let last = (first + rows).min(u64::from(length));
                for row in first..last {
                    seen[start as usize + row as usize] += 1;
                }
                let length = u64::from(length);
                let pairs = match kind {
                    Rows::Queries => last - (first + 1).saturating_sub(window),
                    Rows::Keys => length.min(last - 1 + window) - first,
                };
                assert!(pairs <= longest);
                longest = pairs;
            }
            assert!(seen.iter().all(|count| *count == 1), "{seen:?}");
        }
    }

    #[test]
    fn a_card_gets_kernels_that_it_has_memory_for() {
        for capability in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (11, 0), (12, 0)] {
            for width in [32, 64, 80, 96, 128, 256] {
                let engine = engine(width, capability).unwrap();
                let wgmma = engine.forward.name.contains("wgmma");
                assert_eq!(wgmma, capability == (9, 0) && [64, 128].contains(&width));
            }
            assert_eq!(engine(72, capability), None);
        }
        assert_eq!(engine(64, (7, 5)), None);
    }
}
