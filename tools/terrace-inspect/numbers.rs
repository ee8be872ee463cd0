//! `terrace-inspect stat` and `dump`: numbers.

use std::ops::Range;
use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};
use terrace::error::{Error, Result, printable};
use terrace::inspect::names::TileName;
use terrace::inspect::statistics::{Bucket, Statistics, measure};
use terrace::inspect::values::{Format, Part, Values, elements_of, parts_of};
use terrace::inspect::{Commit, Source, Store, TensorFiles};
use terrace::tile::TensorRange;

use crate::output::{lines, path_text, print, print_json, short, table};

/// Rows of a histogram.
const ROWS_MAX: i32 = 24;
/// Characters of its longest bar.
const BAR: u64 = 40;

/// Arguments of `stat`.
#[derive(Args)]
pub(crate) struct StatArguments {
    /// Checkpoint directory, its file, or safetensors
    path: PathBuf,
    /// Tile (embed, block 12, head) or tensor; without it, a line for each tile
    tile: Vec<String>,
    /// The commit of this step; the newest otherwise
    #[arg(long)]
    step: Option<u64>,
    /// Only this section: weight, residual, moment1, moment2, master
    #[arg(long)]
    section: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `dump`.
#[derive(Args)]
pub(crate) struct DumpArguments {
    /// Checkpoint directory, its file, or safetensors
    path: PathBuf,
    /// Tile (embed, block 12, head) or tensor
    #[arg(required = true)]
    tile: Vec<String>,
    /// A tensor of the tile, by its name in Hugging Face's files
    #[arg(long)]
    tensor: Option<String>,
    /// weight, residual, moment1, moment2, or master (weight and residual joined)
    #[arg(long, default_value = "weight")]
    section: String,
    /// The commit of this step; the newest otherwise
    #[arg(long)]
    step: Option<u64>,
    /// First element to print
    #[arg(long, default_value_t = 0)]
    start: u64,
    /// Elements to print
    #[arg(long, default_value_t = 32)]
    count: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn part_of(text: &str) -> Result<Part> {
    Part::parse(text).ok_or_else(|| {
        let expected = "weight, residual, moment1, moment2 or master";
        Error::input(
            "arguments",
            "--section",
            expected,
            printable(text),
            "correct it",
        )
    })
}

/// A line of `stat`.
struct Row {
    tile: Option<String>,
    tensor: Option<String>,
    part: String,
    format: Format,
    statistics: Statistics,
}

/// Runs `stat`.
pub(crate) fn stat(arguments: &StatArguments) -> Result<u8> {
    let only = arguments.section.as_deref().map(part_of).transpose()?;
    let name = arguments.tile.join(" ");
    let (rows, notes) = match Source::open(&arguments.path)? {
        Source::Store(store) => {
            let commit = store.commit(arguments.step)?;
            let rows = if name.is_empty() {
                tile_rows(&store, commit, only)?
            } else {
                let (tile, tensor) = commit.names.find(&name, &path_text(store.path()))?;
                tensor_rows(&store, commit, &tile, tensor.as_ref(), only)?
            };
            (rows, store.notes())
        }
        Source::Tensors(files) => (file_rows(&files, &name)?, Vec::new()),
    };
    if arguments.json {
        let rows: Vec<Value> = rows
            .iter()
            .map(|row| {
                json!({
                    "tile": row.tile, "tensor": row.tensor, "part": row.part,
                    "format": row.format.to_string(),
                    "statistics": statistics_json(&row.statistics),
                })
            })
            .collect();
        print_json(&json!({ "rows": rows, "notes": notes }))?;
        return Ok(0);
    }
    let mut cells = vec![
        [
            "tile", "tensor", "part", "format", "elements", "zeros", "nan", "inf", "min", "max",
            "mean", "std", "l2",
        ]
        .map(str::to_string)
        .to_vec(),
    ];
    cells.extend(rows.iter().map(row_cells));
    print(&(lines(&notes) + &table(&cells, 4)))?;
    Ok(0)
}

fn row_cells(row: &Row) -> Vec<String> {
    let found = &row.statistics;
    let or_dash = |text: &Option<String>| text.as_deref().map_or("-".to_string(), printable);
    let mut cells = vec![
        or_dash(&row.tile),
        or_dash(&row.tensor),
        row.part.clone(),
        row.format.to_string(),
    ];
    cells.extend([found.count, found.zeros, found.nan, found.infinite].map(|n| n.to_string()));
    let numbers = [
        found.min,
        found.max,
        found.mean(),
        found.deviation(),
        found.norm(),
    ];
    cells.extend(numbers.map(|number| match found.finite() {
        0 => "-".to_string(),
        _ => short(number),
    }));
    cells
}

/// A line for each part of each tile.
fn tile_rows(store: &Store, commit: &Commit, only: Option<Part>) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for tile in commit.tiles() {
        let elements = 0..elements_of(commit, tile.id);
        // Padding between tensors is no number of the model's.
        let tensors = commit.names.tensors(tile.id);
        let mut ranges: Vec<Range<u64>> = tensors.iter().map(TensorRange::elements).collect();
        if ranges.is_empty() {
            ranges.push(elements.clone());
        }
        for part in wanted(commit, &tile, only) {
            let mut values = Values::of_tile(store, commit, tile.id, part, elements.clone())?;
            let mut whole = Statistics::default();
            for found in measure(&mut values, &ranges)? {
                whole.merge(&found);
            }
            rows.push(Row {
                tile: Some(tile.name.clone()),
                tensor: None,
                part: part.to_string(),
                format: values.format(),
                statistics: whole,
            });
        }
    }
    Ok(rows)
}

/// Parts to look at: all that are stored, or the one asked for, which a tile may lack.
fn wanted(commit: &Commit, tile: &TileName, only: Option<Part>) -> Vec<Part> {
    match only {
        Some(part) => vec![part],
        None => {
            let parts = parts_of(commit, tile.id).into_iter();
            parts.filter(|part| *part != Part::Master).collect()
        }
    }
}

/// A line for each part of each tensor of a tile.
fn tensor_rows(
    store: &Store,
    commit: &Commit,
    tile: &TileName,
    tensor: Option<&TensorRange>,
    only: Option<Part>,
) -> Result<Vec<Row>> {
    let all = 0..elements_of(commit, tile.id);
    let tensors = match tensor {
        Some(tensor) => std::slice::from_ref(tensor),
        None => commit.names.tensors(tile.id),
    };
    let mut ranges: Vec<(Option<String>, Range<u64>)> = tensors
        .iter()
        .map(|tensor| (Some(tensor.name.clone()), tensor.elements()))
        .collect();
    if ranges.is_empty() {
        ranges.push((None, all));
    }
    let (start, end) = (ranges[0].1.start, ranges[ranges.len() - 1].1.end);
    let inside: Vec<Range<u64>> = ranges
        .iter()
        .map(|(_, range)| range.start - start..range.end - start)
        .collect();
    let mut rows = Vec::new();
    for part in wanted(commit, tile, only) {
        let mut values = Values::of_tile(store, commit, tile.id, part, start..end)?;
        let found = measure(&mut values, &inside)?;
        for ((name, _), statistics) in ranges.iter().zip(found) {
            rows.push(Row {
                tile: Some(tile.name.clone()),
                tensor: name.clone(),
                part: part.to_string(),
                format: values.format(),
                statistics,
            });
        }
    }
    Ok(rows)
}

fn file_rows(files: &TensorFiles, name: &str) -> Result<Vec<Row>> {
    if !name.is_empty() {
        tensor_of(files, name)?;
    }
    let mut rows = Vec::new();
    for tensor in files
        .tensors()
        .filter(|tensor| name.is_empty() || tensor.name == name)
    {
        let elements = 0..tensor.elements();
        let Some(mut values) = Values::of_tensor(tensor.file, tensor.entry, elements.clone())
        else {
            continue;
        };
        let statistics = measure(&mut values, &[elements])?.remove(0);
        rows.push(Row {
            tile: None,
            tensor: Some(tensor.name.to_string()),
            part: "tensor".to_string(),
            format: values.format(),
            statistics,
        });
    }
    Ok(rows)
}

fn tensor_of<'a>(
    files: &'a TensorFiles,
    name: &str,
) -> Result<terrace::inspect::tensors::Tensor<'a>> {
    files.tensor(name).ok_or_else(|| {
        Error::input(
            "tensor",
            path_text(files.path()),
            "a tensor that the files have",
            printable(name),
            "`list` shows all",
        )
    })
}

fn statistics_json(found: &Statistics) -> Value {
    let number = |value: f64| (found.finite() > 0).then_some(value);
    json!({
        "count": found.count, "finite": found.finite(), "zeros": found.zeros,
        "nan": found.nan, "infinite": found.infinite, "subnormal": found.subnormal,
        "first_non_finite": found.first_non_finite,
        "min": number(found.min), "max": number(found.max), "mean": number(found.mean()),
        "std": number(found.deviation()), "l2": number(found.norm()),
        "histogram": found.histogram(),
    })
}

/// What `dump` looks at.
struct Subject {
    tile: Option<String>,
    tensor: Option<String>,
    part: String,
    shape: Vec<u64>,
    count: u64,
}

/// Runs `dump`.
pub(crate) fn dump(arguments: &DumpArguments) -> Result<u8> {
    let part = part_of(&arguments.section)?;
    let name = arguments.tile.join(" ");
    match Source::open(&arguments.path)? {
        Source::Store(store) => {
            let commit = store.commit(arguments.step)?;
            let place = path_text(store.path());
            let (tile, mut tensor) = commit.names.find(&name, &place)?;
            if let Some(wanted) = &arguments.tensor {
                let tensors = commit.names.tensors(tile.id).iter();
                let found = tensors.clone().find(|tensor| tensor.name == *wanted);
                let known: Vec<&str> = tensors.map(|tensor| tensor.name.as_str()).collect();
                tensor = Some(found.cloned().ok_or_else(|| {
                    let expected = format!("one of {}", known.join(", "));
                    Error::input(
                        "arguments",
                        "--tensor",
                        expected,
                        printable(wanted),
                        "correct it",
                    )
                })?);
            }
            let all = elements_of(commit, tile.id);
            let elements = tensor.as_ref().map_or(0..all, TensorRange::elements);
            let subject = Subject {
                tile: Some(tile.name.clone()),
                tensor: tensor.as_ref().map(|tensor| tensor.name.clone()),
                part: part.to_string(),
                shape: tensor.map_or(vec![all], |tensor| tensor.shape),
                count: elements.end - elements.start,
            };
            let open = |within: Range<u64>| {
                let range = elements.start + within.start..elements.start + within.end;
                Values::of_tile(&store, commit, tile.id, part, range)
            };
            dump_values(arguments, &subject, &store.notes(), open)
        }
        Source::Tensors(files) => {
            let name = arguments.tensor.as_ref().unwrap_or(&name);
            let tensor = tensor_of(&files, name)?;
            let subject = Subject {
                tile: None,
                tensor: Some(name.clone()),
                part: "tensor".to_string(),
                shape: tensor.entry.shape.clone(),
                count: tensor.elements(),
            };
            let open = |within: Range<u64>| {
                let values = Values::of_tensor(tensor.file, tensor.entry, within);
                values.ok_or_else(|| Error::Unsupported {
                    what: "format",
                    got: tensor.entry.dtype.name().to_string(),
                    supported: "formats of whole bytes".to_string(),
                })
            };
            dump_values(arguments, &subject, &[], open)
        }
    }
}

fn dump_values<'a>(
    arguments: &DumpArguments,
    subject: &Subject,
    notes: &[String],
    open: impl Fn(Range<u64>) -> Result<Values<'a>>,
) -> Result<u8> {
    let mut whole = open(0..subject.count)?;
    let format = whole.format();
    if !format.has_numbers() {
        return Err(Error::Unsupported {
            what: "format",
            got: format.to_string(),
            supported: "bf16, f16, f32, f64 and integers".to_string(),
        });
    }
    let all = 0..subject.count;
    let found = measure(&mut whole, std::slice::from_ref(&all))?.remove(0);
    let start = arguments.start.min(subject.count);
    let end = start.saturating_add(arguments.count).min(subject.count);
    let mut shown = Vec::new();
    let mut values = open(start..end)?;
    if arguments.json {
        while let Some(bytes) = values.next_bytes()? {
            format.widen(bytes, &mut shown);
        }
        let shown: Vec<Value> = shown.iter().map(|value| number_json(*value)).collect();
        print_json(&json!({
            "tile": subject.tile, "tensor": subject.tensor, "part": subject.part,
            "format": format.to_string(), "shape": subject.shape,
            "statistics": statistics_json(&found),
            "start": start, "values": shown, "notes": notes,
        }))?;
        return Ok(0);
    }
    let names = [&subject.tile, &subject.tensor].into_iter().flatten();
    let names: Vec<String> = names.map(|name| printable(name)).collect();
    let (part, shape) = (&subject.part, &subject.shape);
    let mut text = lines(notes);
    text.push_str(&format!(
        "{} {part}, {format} {shape:?}\n",
        names.join(", ")
    ));
    text.push_str(&statistics_text(&found));
    text.push_str(&histogram_text(&found.histogram()));
    print(&text)?;
    let mut index = start;
    while let Some(bytes) = values.next_bytes()? {
        shown.clear();
        format.widen(bytes, &mut shown);
        print(&values_text(index, &shown, format))?;
        index += shown.len() as u64;
    }
    Ok(0)
}

fn number_json(value: f64) -> Value {
    match value.is_finite() {
        true => value.into(),
        false => value.to_string().into(),
    }
}

fn statistics_text(found: &Statistics) -> String {
    let mut text = format!(
        "{} elements: {} zero, {} subnormal, {} nan, {} infinite\n",
        found.count, found.zeros, found.subnormal, found.nan, found.infinite
    );
    if let Some(first) = found.first_non_finite {
        text.push_str(&format!("first that is not finite: element {first}\n"));
    }
    if found.finite() > 0 {
        text.push_str(&format!(
            "min {}, max {}, mean {}, std {}, l2 {}\n",
            short(found.min),
            short(found.max),
            short(found.mean()),
            short(found.deviation()),
            short(found.norm())
        ));
    }
    text
}

/// Magnitudes by powers of two, joined where there are many.
fn histogram_text(buckets: &[Bucket]) -> String {
    let (Some(first), Some(last)) = (buckets.first(), buckets.last()) else {
        return String::new();
    };
    let span = last.exponent - first.exponent + 1;
    let step = (span - 1) / ROWS_MAX + 1;
    let mut rows: Vec<(i32, u64, u64)> = Vec::new();
    for bucket in buckets {
        let low = first.exponent + (bucket.exponent - first.exponent) / step * step;
        match rows.last_mut() {
            Some(row) if row.0 == low => {
                row.1 += bucket.negative;
                row.2 += bucket.positive;
            }
            _ => rows.push((low, bucket.negative, bucket.positive)),
        }
    }
    let most = rows.iter().map(|row| row.1 + row.2).max().unwrap_or(1);
    let mut cells = vec![
        ["magnitude", "", "negative", "positive"]
            .map(str::to_string)
            .to_vec(),
    ];
    cells.extend(rows.iter().map(|(low, negative, positive)| {
        let bar = ((negative + positive) * BAR).div_ceil(most) as usize;
        vec![
            format!("2^{low} to 2^{}", low + step),
            "#".repeat(bar),
            negative.to_string(),
            positive.to_string(),
        ]
    }));
    table(&cells, 2)
}

fn values_text(first: u64, values: &[f64], format: Format) -> String {
    let mut text = String::new();
    for (row, values) in values.chunks(8).enumerate() {
        text.push_str(&format!("[{}]", first + row as u64 * 8));
        for value in values {
            // The shortest text that reads back as the same number of the format.
            match format {
                Format::F64 => text.push_str(&format!(" {value:?}")),
                Format::Bf16 | Format::F16 | Format::F32 => {
                    text.push_str(&format!(" {:?}", *value as f32));
                }
                _ => text.push_str(&format!(" {value}")),
            }
        }
        text.push('\n');
    }
    text
}
