//! `terrace-inspect diff`: two sets of numbers.

use std::path::PathBuf;

use clap::Args;
use terrace::error::{Error, Result, printable};
use terrace::inspect::Source;
use terrace::inspect::diff::{Compared, Difference, Side, diff as compare};
use terrace::inspect::store::Store;

use crate::output::{print, print_json, short, table};

/// Arguments of `diff`.
#[derive(Args)]
pub(crate) struct DiffArguments {
    /// Checkpoint directory, its file, or safetensors
    a: PathBuf,
    /// The other side; without it, another commit of the same store: the one before the newest
    /// beside the newest where no step is named
    b: Option<PathBuf>,
    /// The commit of the first side; the newest otherwise
    #[arg(long)]
    step_a: Option<u64>,
    /// The commit of the second side; the newest otherwise
    #[arg(long)]
    step_b: Option<u64>,
    /// Print what is equal too
    #[arg(long)]
    all: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs `diff`.
pub(crate) fn diff(arguments: &DiffArguments) -> Result<u8> {
    let a = Source::open(&arguments.a)?;
    let b = arguments
        .b
        .as_ref()
        .map(|path| Source::open(path))
        .transpose()?;
    let b = b.as_ref().unwrap_or(&a);
    let step_a = match (&a, &arguments.b, arguments.step_a, arguments.step_b) {
        // One store and no steps: its newest commit beside the one before.
        (Source::Store(store), None, None, None) => Some(one_before_the_newest(store)?),
        (_, _, step, _) => step,
    };
    let mut rows: Vec<Difference> = Vec::new();
    let all = arguments.all;
    let compared = compare(
        side(&a, step_a)?,
        side(b, arguments.step_b)?,
        &mut |found| {
            if all || found.differing > 0 {
                rows.push(found.clone());
            }
            Ok(())
        },
    )?;
    if arguments.json {
        let mut value = serde_json::to_value(&compared).expect("plain values");
        value["equal"] = compared.is_equal().into();
        value["rows"] = rows.iter().map(difference_json).collect();
        print_json(&value)?;
    } else {
        print(&diff_text(&compared, &rows))?;
    }
    Ok(u8::from(!compared.is_equal()))
}

fn one_before_the_newest(store: &Store) -> Result<u64> {
    match store.commits() {
        [.., before, _] => Ok(before.step),
        _ => Err(Error::input(
            "arguments",
            "B",
            "another store, or a store with two commits",
            "one with less",
            "name the other side",
        )),
    }
}

fn side(source: &Source, step: Option<u64>) -> Result<Side<'_>> {
    Ok(match source {
        Source::Store(store) => Side::Commit(store, store.commit(step)?),
        Source::Tensors(files) => Side::Tensors(files),
    })
}

fn difference_json(found: &Difference) -> serde_json::Value {
    serde_json::to_value(found).expect("plain values")
}

fn diff_text(compared: &Compared, rows: &[Difference]) -> String {
    let mut text = String::new();
    if !rows.is_empty() {
        let title = [
            "tile", "tensor", "part", "format", "elements", "differ", "bits", "max|d|", "max ulp",
            "first",
        ];
        let mut cells = vec![title.map(str::to_string).to_vec()];
        cells.extend(rows.iter().map(difference_cells));
        text.push_str(&table(&cells, 4));
    }
    for (side, names) in [("first", &compared.only_a), ("second", &compared.only_b)] {
        for name in names {
            text.push_str(&format!("only in the {side}: {}\n", printable(name)));
        }
    }
    for why in &compared.skipped {
        text.push_str(&format!("not compared: {}\n", printable(why)));
    }
    text.push_str(&format!(
        "{} of {} pairs differ, {} of {} elements\n",
        compared.differing_pairs, compared.pairs, compared.differing, compared.elements
    ));
    text
}

fn difference_cells(found: &Difference) -> Vec<String> {
    let or_dash = |text: &Option<String>| text.as_deref().map_or("-".to_string(), printable);
    let count = |number: Option<u64>| number.map_or("-".to_string(), |n| n.to_string());
    let formats = match found.formats[0] == found.formats[1] {
        true => found.formats[0].clone(),
        false => found.formats.join("/"),
    };
    let first = found
        .first
        .map_or("-".to_string(), |first| match found.shape.as_slice() {
            [_, columns] if *columns > 0 => format!("[{}, {}]", first / columns, first % columns),
            _ => format!("[{first}]"),
        });
    vec![
        or_dash(&found.tile),
        or_dash(&found.tensor),
        found.part.clone(),
        formats,
        found.elements.to_string(),
        found.differing.to_string(),
        count(found.bits),
        short(found.max_abs),
        count(found.max_ulp),
        first,
    ]
}
