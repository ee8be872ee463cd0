//! `terrace-inspect info` and `list`: what there is.

use std::path::PathBuf;

use clap::Args;
use serde_json::{Map, Value, json};
use terrace::error::{Result, printable};
use terrace::inspect::names::TileName;
use terrace::inspect::survey::Fault;
use terrace::inspect::{Commit, Source, Store, TensorFiles};
use terrace::plan::bytes_text;
use terrace::store::{StoredSection, format};
use terrace::tile::Section;

use crate::output::{lines, path_text, print, print_json, table};

/// Arguments of `info`.
#[derive(Args)]
pub(crate) struct DescribeArguments {
    /// Checkpoint directory, its file, or safetensors
    path: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `list`.
#[derive(Args)]
pub(crate) struct ListArguments {
    /// Checkpoint directory, its file, or safetensors
    path: PathBuf,
    /// Tiles and sections of the commit of this step
    #[arg(long)]
    step: Option<u64>,
    /// Tensors too, of the newest commit where no step is named
    #[arg(long)]
    tensors: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs `info`.
pub(crate) fn describe(arguments: &DescribeArguments) -> Result<u8> {
    let store = match Source::open(&arguments.path)? {
        Source::Store(store) => store,
        Source::Tensors(files) => return describe_files(&files, arguments.json),
    };
    if arguments.json {
        print_json(&store_json(&store))?;
    } else {
        print(&store_text(&store))?;
    }
    match store.survey().superblock {
        Some(_) => Ok(0),
        None => store.require_superblock().map(|()| 0),
    }
}

fn copy_text(fault: Option<&Fault>) -> String {
    match fault {
        None => "whole".to_string(),
        Some(fault) => format!(
            "{} at byte {}: expected {}, got {}",
            fault.what, fault.offset, fault.expected, fault.got
        ),
    }
}

/// What is wrong with each superblock copy, by number.
fn superblock_faults(store: &Store) -> Vec<Option<Fault>> {
    let survey = store.survey();
    if survey.superblock.is_none() {
        let faults = survey
            .copies
            .iter()
            .map(|copy| copy.as_ref().err().cloned());
        return faults.collect();
    }
    let stale = survey.stale_copies();
    let copies = 0..format::SUPERBLOCK_COPIES;
    copies
        .map(|copy| {
            stale
                .iter()
                .find(|(found, _)| *found == copy)
                .map(|(_, f)| f.clone())
        })
        .collect()
}

fn store_json(store: &Store) -> Value {
    let survey = store.survey();
    let superblock = survey.superblock.as_ref();
    let regions = superblock.map_or(0, |superblock| superblock.regions.len());
    let regions: Vec<Value> = (0..regions)
        .map(|region| {
            let found = survey.commits.iter().find(|found| found.region == region);
            let commit = found.and_then(|found| {
                store
                    .commits()
                    .iter()
                    .find(|c| c.generation == found.generation)
            });
            json!({
                "region": region,
                "generation": found.map(|found| found.generation),
                "step": commit.map(|commit| commit.step),
                "manifest_bytes": found.map(|found| found.manifest_bytes),
                "manifest_faults": found.map(|found| &found.copies),
            })
        })
        .collect();
    json!({
        "path": path_text(store.path()),
        "bytes": store.length(),
        "file_system": terrace::store::file_system(store.path()),
        "free_bytes": terrace::store::free_bytes(store.path()),
        "direct": store.direct(),
        "holder": store.holder(),
        "version": superblock.map(|_| format::VERSION),
        "store_uuid": superblock.map(|s| format!("{:032x}", s.store_uuid)),
        "model_hash": superblock.map(|s| format!("{:032x}", s.model_hash)),
        "layout_hash": superblock.map(|s| format!("{:032x}", s.layout_hash)),
        "sequence": superblock.map(|s| s.sequence),
        "keep": superblock.map(|s| s.keep),
        "extents": superblock.map(|s| s.geometry.extent_count),
        "commit_bytes": superblock.map(|s| s.geometry.extents_bytes),
        "region_bytes": superblock.map(|s| s.geometry.region_bytes),
        "file_bytes": superblock.map(|s| s.geometry.file_bytes),
        "superblock_faults": superblock_faults(store),
        "regions": regions,
        "notes": store.notes(),
    })
}

fn store_text(store: &Store) -> String {
    let mut rows: Vec<[String; 2]> = Vec::new();
    let mut row = |name: &str, text: String| rows.push([name.to_string(), text]);
    let reads = if store.direct() { "direct" } else { "buffered" };
    let system = terrace::store::file_system(store.path()).unwrap_or("unknown".to_string());
    row("file", path_text(store.path()));
    row(
        "size",
        format!(
            "{} on {system}, {reads} I/O, {} free",
            bytes_text(store.length()),
            bytes_text(terrace::store::free_bytes(store.path()))
        ),
    );
    let holder = match store.holder() {
        None => "nobody".to_string(),
        Some(0) => "another process".to_string(),
        Some(pid) => format!("process {pid}"),
    };
    row("in use by", holder);
    let survey = store.survey();
    if let Some(superblock) = &survey.superblock {
        let geometry = &superblock.geometry;
        row(
            "format",
            format!("version {}, class checkpoint", format::VERSION),
        );
        row("store", format!("{:032x}", superblock.store_uuid));
        row("model", format!("{:032x}", superblock.model_hash));
        row("layout", format!("{:032x}", superblock.layout_hash));
        row("sequence", superblock.sequence.to_string());
        row(
            "commit",
            format!(
                "{} in {} extents, keep {}",
                bytes_text(geometry.extents_bytes),
                geometry.extent_count,
                superblock.keep
            ),
        );
    }
    for (copy, fault) in superblock_faults(store).iter().enumerate() {
        row(&format!("superblock {copy}"), copy_text(fault.as_ref()));
    }
    let regions = survey.superblock.as_ref().map_or(0, |s| s.regions.len());
    for region in 0..regions {
        row(&format!("region {region}"), region_text(store, region));
    }
    let rows: Vec<Vec<String>> = rows.into_iter().map(Vec::from).collect();
    table(&rows, 2) + &lines(&store.notes())
}

fn region_text(store: &Store, region: usize) -> String {
    let mut commits = store.survey().commits.iter();
    let Some(found) = commits.find(|found| found.region == region) else {
        return "free".to_string();
    };
    let mut readable = store.commits().iter();
    let commit = readable.find(|commit| commit.generation == found.generation);
    let step = commit.map_or("unknown".to_string(), |commit| commit.step.to_string());
    let copies = found.copies.iter().map(|copy| copy_text(copy.as_ref()));
    format!(
        "generation {}, step {step}, manifests {}",
        found.generation,
        copies.collect::<Vec<_>>().join(" and ")
    )
}

fn describe_files(files: &TensorFiles, as_json: bool) -> Result<u8> {
    let rows: Vec<(String, usize, u64)> = files
        .files()
        .iter()
        .map(|file| {
            let entries = file.names().filter_map(|name| file.tensor(name));
            let bytes = entries.map(|entry| entry.bytes).sum();
            (path_text(file.path()), file.names().count(), bytes)
        })
        .collect();
    if as_json {
        let files_json: Vec<Value> = rows
            .iter()
            .map(|(path, tensors, bytes)| json!({"path": path, "tensors": tensors, "bytes": bytes}))
            .collect();
        print_json(&json!({"path": path_text(files.path()), "files": files_json}))?;
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = rows
        .into_iter()
        .map(|(path, tensors, bytes)| vec![path, format!("{tensors} tensors"), bytes_text(bytes)])
        .collect();
    print(&table(&rows, 1))?;
    Ok(0)
}

/// Runs `list`.
pub(crate) fn list(arguments: &ListArguments) -> Result<u8> {
    let store = match Source::open(&arguments.path)? {
        Source::Store(store) => store,
        Source::Tensors(files) => return list_files(&files, arguments.json),
    };
    store.require_superblock()?;
    if arguments.step.is_some() || arguments.tensors {
        let commit = store.commit(arguments.step)?;
        return list_tiles(&store, commit, arguments);
    }
    if arguments.json {
        let best = store.best().map(|(generation, _)| generation);
        let commits = store.commits().iter();
        let commits: Vec<Value> = commits.map(|commit| commit_json(commit, best)).collect();
        print_json(&json!({ "commits": commits, "notes": store.notes() }))?;
        return Ok(0);
    }
    let mut text = lines(&store.notes());
    let best = store.best();
    for commit in store.commits() {
        let manifest = commit.manifest();
        text.push_str(&format!(
            "generation {}: step {}{}{}, {} in {} extents",
            commit.generation,
            commit.step,
            best_text(commit, best),
            tokens_text(commit),
            bytes_text(manifest.table.bytes()),
            manifest.table.count(),
        ));
        for (section, bytes) in section_bytes(commit) {
            text.push_str(&format!(", {section} {}", bytes_text(bytes)));
        }
        text.push('\n');
    }
    if store.commits().is_empty() {
        text.push_str("no commits\n");
    }
    print(&text)?;
    Ok(0)
}

/// Says of the best commit that it is.
fn best_text(commit: &Commit, best: Option<(u64, f64)>) -> String {
    let of = best.filter(|(generation, _)| *generation == commit.generation);
    of.map_or(String::new(), |(_, loss)| {
        format!(" (best, held-out loss {loss:.4})")
    })
}

fn tokens_text(commit: &Commit) -> String {
    let progress = commit.progress.as_ref();
    progress.map_or(String::new(), |progress| {
        format!(", {} tokens", progress.tokens)
    })
}

fn section_bytes(commit: &Commit) -> Vec<(Section, u64)> {
    let of = |kind: Section| {
        let sections = commit.manifest().table.sections();
        let of_kind = sections.filter(|section| section.section == kind);
        (kind, of_kind.map(|section| section.slot_bytes()).sum())
    };
    Section::ALL
        .into_iter()
        .map(of)
        .filter(|(_, bytes)| *bytes > 0)
        .collect()
}

fn commit_json(commit: &Commit, best: Option<u64>) -> Value {
    let sections: Map<String, Value> = section_bytes(commit)
        .into_iter()
        .map(|(section, bytes)| (section.to_string(), bytes.into()))
        .collect();
    json!({
        "generation": commit.generation,
        "step": commit.step,
        "tokens": commit.progress.as_ref().map(|progress| progress.tokens),
        "best": best == Some(commit.generation),
        "extents": commit.manifest().table.count(),
        "bytes": commit.manifest().table.bytes(),
        "sections": sections,
    })
}

fn list_tiles(store: &Store, commit: &Commit, arguments: &ListArguments) -> Result<u8> {
    if arguments.json {
        let tiles = commit.tiles();
        let tiles: Vec<Value> = tiles.iter().map(|tile| tile_json(commit, tile)).collect();
        print_json(&json!({
            "generation": commit.generation,
            "step": commit.step,
            "tiles": tiles,
            "notes": store.notes(),
        }))?;
        return Ok(0);
    }
    let kinds: Vec<Section> = section_bytes(commit)
        .iter()
        .map(|(kind, _)| *kind)
        .collect();
    let mut rows = vec![["tile", "elements"].map(str::to_string).to_vec()];
    rows[0].extend(kinds.iter().map(Section::to_string));
    for tile in commit.tiles() {
        let sections = sections_of(commit, &tile);
        let elements = sections.first().map_or(0, |section| section.elements);
        let mut row = vec![tile.name.clone(), elements.to_string()];
        row.extend(kinds.iter().map(|kind| {
            let found = sections.iter().find(|section| section.section == *kind);
            found.map_or("-".to_string(), |section| bytes_text(section.slot_bytes()))
        }));
        rows.push(row);
        if arguments.tensors {
            rows.extend(commit.names.tensors(tile.id).iter().map(|tensor| {
                let name = printable(&tensor.name);
                vec![
                    format!("  {name} {:?}", tensor.shape),
                    tensor.count.to_string(),
                ]
            }));
        }
    }
    print(&(lines(&store.notes()) + &table(&rows, 1)))?;
    Ok(0)
}

fn sections_of(commit: &Commit, tile: &TileName) -> Vec<StoredSection> {
    let sections = commit.manifest().table.sections();
    sections
        .filter(|section| section.tile == tile.id)
        .copied()
        .collect()
}

fn tile_json(commit: &Commit, tile: &TileName) -> Value {
    let sections = sections_of(commit, tile);
    let sections_json: Vec<Value> = sections
        .iter()
        .map(|section| {
            json!({
                "section": section.section.to_string(),
                "element_bytes": section.element_bytes,
                "bytes": section.slot_bytes(),
                "extents": section.extent_count(),
            })
        })
        .collect();
    let tensors: Vec<Value> = commit
        .names
        .tensors(tile.id)
        .iter()
        .map(|tensor| json!({"name": tensor.name, "shape": tensor.shape, "start": tensor.start}))
        .collect();
    json!({
        "tile": tile.name,
        "layer": tile.id.layer,
        "part": tile.id.part,
        "elements": sections.first().map(|section| section.elements),
        "sections": sections_json,
        "tensors": tensors,
    })
}

fn list_files(files: &TensorFiles, as_json: bool) -> Result<u8> {
    if as_json {
        let tensors: Vec<Value> = files
            .tensors()
            .map(|tensor| {
                json!({
                    "name": tensor.name,
                    "dtype": tensor.entry.dtype.name(),
                    "shape": tensor.entry.shape,
                    "bytes": tensor.entry.bytes,
                    "file": path_text(tensor.file.path()),
                })
            })
            .collect();
        print_json(&json!({ "tensors": tensors, "notes": [] }))?;
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = files
        .tensors()
        .map(|tensor| {
            vec![
                printable(tensor.name),
                tensor.entry.dtype.name().to_string(),
                format!("{:?}", tensor.entry.shape),
                bytes_text(tensor.entry.bytes),
            ]
        })
        .collect();
    print(&table(&rows, 3))?;
    Ok(0)
}
