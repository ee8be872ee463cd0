//! Goal: the habits that no compiler checks hold in every file: which room may use which, where
//! `unsafe` and I/O may stand, how long files, functions and lines are, which words name nothing,
//! and that what the documents name exists.
//!
//! Method: the sources are read as text, with comments and literals blanked and test code cut off.
//! Each test collects every offence and fails with the list, a line each: `file:line: what`.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Rooms in the order in which they may use each other: a room uses rooms of earlier rows, and
/// those of its own row where `mutual`.
const DIRECTION: &[(&[&str], bool)] = &[
    (&["error", "report", "stats"], false),
    (&["config", "model", "tile"], true),
    (&["plan", "schedule", "store/format"], true),
    (&["suggest"], false),
    (&["host"], false),
    // Never each other: host is the hub.
    (&["store", "device"], false),
    // Both describe work to the templates; neither computes.
    (&["data", "machine"], false),
    (&["transfer", "layer", "optimizer"], false),
    (&["step"], false),
    (
        &[
            "checkpoint",
            "hf",
            "generate",
            "quickstart",
            "measure",
            "log",
        ],
        false,
    ),
    (&["inspect"], false),
    (&["train"], false),
];

/// Deciding is pure: no I/O, no clock, no threads, no unsafe.
const PURE: &[&str] = &[
    "config",
    "model",
    "tile",
    "plan",
    "schedule",
    "store/format",
    "suggest",
];
const IMPURE_WORDS: &[&str] = &[
    "std::fs",
    "std::time",
    "std::net",
    "std::process",
    "std::thread",
    "std::env",
    "unsafe",
];

/// Files or rooms in which `unsafe` may stand; `lib.rs` and `store/mod.rs` lift the lint for them.
const UNSAFE_ROOMS: &[&str] = &[
    "host",
    "device",
    "optimizer",
    "store/sys",
    "store/uring",
    "hf/mapped",
];

const FILE_LINES_MAX: usize = 600;
const FUNCTION_LINES_MAX: usize = 70;
const COLUMNS_MAX: usize = 100;

/// What is longer than it should be, with the length it has: it may shrink and never grow.
const LONG_FILES: &[(&str, usize)] = &[];
const LONG_FUNCTIONS: &[(&str, usize)] = &[
    ("src/schedule.rs link_previous", 85),
    ("src/schedule/simulate.rs work", 72),
];

fn longest(list: &[(&str, usize)], name: &str, otherwise: usize) -> usize {
    let known = list.iter().find(|(listed, _)| *listed == name);
    known.map_or(otherwise, |(_, lines)| *lines)
}

/// Parts of names that say nothing.
const BANNED_PARTS: &[&str] = &[
    "manager", "handler", "helper", "helpers", "util", "utils", "misc", "info",
];
/// Whole names that say nothing.
const BANNED_NAMES: &[&str] = &["context", "tmp", "data"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A source file with its code alone.
struct Source {
    /// Path from the project's root.
    path: String,
    /// As it is.
    text: String,
    /// Comments and literals blanked: same lines, same columns.
    code: String,
    /// `code` with `#[cfg(test)]` items blanked too.
    shipped: String,
}

/// Every `.rs` file below the given folders.
fn sources(folders: &[&str]) -> Vec<Source> {
    let mut paths = Vec::new();
    for folder in folders {
        collect(&root().join(folder), &mut paths);
    }
    paths.sort();
    assert!(!paths.is_empty());
    paths.iter().map(|path| read(path)).collect()
}

fn collect(folder: &Path, paths: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, paths);
        } else if path.extension().is_some_and(|e| e == "rs") {
            paths.push(path);
        }
    }
}

fn read(path: &Path) -> Source {
    let text = std::fs::read_to_string(path).unwrap();
    let code = blank_literals(&text);
    let shipped = if path.file_name().is_some_and(|name| name == "tests.rs") {
        String::new()
    } else {
        blank_tests(&code)
    };
    let path = path.strip_prefix(root()).unwrap();
    Source {
        path: path.to_str().unwrap().to_string(),
        text,
        code,
        shipped,
    }
}

impl Source {
    /// `plan` of src/plan.rs and src/plan/print.rs; `None` of lib.rs.
    fn room(&self) -> Option<&str> {
        let inside = self.path.strip_prefix("src/")?;
        if inside.starts_with("store/format") {
            return Some("store/format");
        }
        let first = inside.split('/').next().unwrap();
        let room = first.trim_end_matches(".rs");
        (room != "lib").then_some(room)
    }

    /// How many modules deep: 1 for src/plan.rs and src/data/mod.rs, 2 for src/plan/print.rs.
    fn depth(&self) -> usize {
        let inside = self.path.strip_prefix("src/").unwrap();
        inside.split('/').count() - usize::from(inside.ends_with("/mod.rs"))
    }

    fn at(&self, offset: usize, what: &str) -> String {
        let line = self.text[..offset].matches('\n').count() + 1;
        format!("{}:{line}: {what}", self.path)
    }
}

/// Blanks comments, strings and characters, so that what is left is code at its old place.
fn blank_literals(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = literal_end(bytes, at);
        if end == at {
            at += 1;
            continue;
        }
        blank(&mut out, at, end);
        at = end;
    }
    String::from_utf8(out).unwrap()
}

/// Where the comment or literal ends that begins at `at`; `at` where none does.
fn literal_end(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    let find = |from: usize, needle: &[u8]| {
        let found = bytes[from..]
            .windows(needle.len())
            .position(|w| w == needle);
        found.map_or(bytes.len(), |found| from + found)
    };
    let after_word = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    if rest.starts_with(b"//") {
        return find(at, b"\n");
    }
    if rest.starts_with(b"/*") {
        return (find(at + 2, b"*/") + 2).min(bytes.len());
    }
    let raw = rest.strip_prefix(b"b").unwrap_or(rest);
    if let Some(hashes) = raw.strip_prefix(b"r").filter(|_| !after_word) {
        let count = hashes.iter().take_while(|b| **b == b'#').count();
        if hashes.get(count) == Some(&b'"') {
            let mut close = vec![b'"'];
            close.resize(count + 1, b'#');
            let start = bytes.len() - hashes.len() + count + 1;
            return (find(start, &close) + close.len()).min(bytes.len());
        }
    }
    if rest[0] == b'"' {
        let mut end = at + 1;
        while end < bytes.len() && bytes[end] != b'"' {
            end += if bytes[end] == b'\\' { 2 } else { 1 };
        }
        return (end + 1).min(bytes.len());
    }
    if rest[0] == b'\'' {
        // A character, or a lifetime: only the former closes.
        if rest.get(1) == Some(&b'\\') {
            return find(at + 3, b"'") + 1;
        }
        let width = match rest.get(1) {
            Some(first) if *first >= 0xF0 => 4,
            Some(first) if *first >= 0xE0 => 3,
            Some(first) if *first >= 0xC0 => 2,
            _ => 1,
        };
        if rest.get(1 + width) == Some(&b'\'') {
            return at + width + 2;
        }
    }
    at
}

fn blank(out: &mut [u8], start: usize, end: usize) {
    for byte in &mut out[start..end] {
        if *byte != b'\n' {
            *byte = b' ';
        }
    }
}

/// Blanks each item under `#[cfg(test)]`.
fn blank_tests(code: &str) -> String {
    let mut out = code.as_bytes().to_vec();
    for (start, _) in code.match_indices("#[cfg(test)]") {
        let bytes = code.as_bytes();
        let open = (start..bytes.len()).find(|at| matches!(bytes[*at], b'{' | b';'));
        let end = match open {
            Some(at) if bytes[at] == b'{' => closing_brace(bytes, at) + 1,
            Some(at) => at + 1,
            None => bytes.len(),
        };
        blank(&mut out, start, end);
    }
    String::from_utf8(out).unwrap()
}

fn closing_brace(bytes: &[u8], open: usize) -> usize {
    let mut depth = 0;
    for (at, byte) in bytes.iter().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    bytes.len() - 1
}

/// Identifiers of the code with their offsets.
fn words(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    code.split(move |c| !is_word(c))
        .filter(|word| !word.is_empty())
        .map(|word| (word.as_ptr() as usize - code.as_ptr() as usize, word))
}

/// First segments of a path that follows `crate::`: one, or those of a braced list.
fn first_segments(rest: &str) -> Vec<String> {
    let word = |text: &str| -> String {
        let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_'));
        text[..end.unwrap_or(text.len())].to_string()
    };
    let Some(list) = rest.strip_prefix('{') else {
        return vec![word(rest)];
    };
    let (mut depth, mut names, mut start) = (0, Vec::new(), 0);
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                names.push(word(list[start..at].trim()));
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                names.push(word(list[start..at].trim()));
                start = at + 1;
            }
            _ => {}
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

/// Rooms that the shipped code of a file names, with where.
fn used_rooms(source: &Source) -> Vec<(usize, String)> {
    let code = &source.shipped;
    let mut used = Vec::new();
    let mut note = |at: usize, rest: &str| {
        for first in first_segments(rest) {
            let inside = rest[first.len()..].starts_with("::format");
            let room = if first == "store" && inside {
                "store/format".to_string()
            } else {
                first
            };
            used.push((at, room));
        }
    };
    for (at, _) in code.match_indices("crate::") {
        if !code[..at].ends_with('$') {
            note(at, &code[at + "crate::".len()..]);
        }
    }
    // As many `super` as the file is deep reach the crate's root.
    let root = "super::".repeat(source.depth());
    for (at, _) in code.match_indices(root.as_str()) {
        note(at, &code[at + root.len()..]);
    }
    used
}

fn rank(room: &str) -> Option<usize> {
    DIRECTION
        .iter()
        .position(|(rooms, _)| rooms.contains(&room))
}

fn report(offences: Vec<String>) {
    assert!(
        offences.is_empty(),
        "{} offences:\n{}",
        offences.len(),
        offences.join("\n")
    );
}

#[test]
fn rooms_use_each_other_in_one_direction() {
    let mut offences = Vec::new();
    for source in sources(&["src"]) {
        let Some(room) = source.room() else { continue };
        let Some(own) = rank(room) else {
            offences.push(format!(
                "{}: room {room} has no place in DIRECTION",
                source.path
            ));
            continue;
        };
        for (at, used) in used_rooms(&source) {
            let (outer, inner) = (room.split('/').next(), used.split('/').next());
            if outer == inner {
                continue;
            }
            let allowed = match rank(&used) {
                // `crate::Error` and `crate::Result` are the root's names for error's.
                None => used.starts_with(char::is_uppercase),
                Some(other) => other < own || (other == own && DIRECTION[own].1),
            };
            if !allowed {
                offences.push(source.at(at, &format!("{room} may not use {used}")));
            }
        }
    }
    report(offences);
}

#[test]
fn every_room_of_the_direction_exists() {
    let rooms: BTreeSet<String> = sources(&["src"])
        .iter()
        .filter_map(|source| source.room().map(str::to_string))
        .collect();
    let listed: BTreeSet<String> = DIRECTION
        .iter()
        .flat_map(|(row, _)| row.iter().map(|room| room.to_string()))
        .collect();
    assert_eq!(rooms, listed);
}

#[test]
fn pure_rooms_touch_no_file_clock_thread_or_raw_memory() {
    let mut offences = Vec::new();
    for source in sources(&["src"]) {
        if !source.room().is_some_and(|room| PURE.contains(&room)) {
            continue;
        }
        for word in IMPURE_WORDS {
            for (at, _) in source.shipped.match_indices(word) {
                offences.push(source.at(at, word));
            }
        }
        // `use std::{fs, ...}` names them too.
        for (at, _) in source.shipped.match_indices("use std::{") {
            offences.push(source.at(at, "write one `use std::…` a line in a pure room"));
        }
    }
    report(offences);
}

fn may_be_unsafe(path: &str) -> bool {
    let inside = path.strip_prefix("src/").unwrap_or(path);
    let inside = inside.trim_end_matches(".rs");
    UNSAFE_ROOMS
        .iter()
        .any(|room| inside == *room || inside.starts_with(&format!("{room}/")))
}

#[test]
fn unsafe_stands_only_in_the_rooms_that_lift_it() {
    let mut offences = Vec::new();
    let mut lifted = BTreeSet::new();
    for source in sources(&["src", "tools"]) {
        for (at, word) in words(&source.code) {
            if word == "unsafe" && !may_be_unsafe(&source.path) {
                offences.push(source.at(at, "unsafe"));
            }
            if word == "unsafe_code" && source.code[..at].trim_end().ends_with("allow(") {
                let rest = &source.code[at..];
                let module = rest.find("mod ").map(|found| &rest[found + 4..]).unwrap();
                let name = module.split(';').next().unwrap();
                // What src/hf.rs and src/hf/mod.rs declare lies in src/hf.
                let inside = source.path.strip_prefix("src/").unwrap();
                let inside = inside.trim_end_matches(".rs").trim_end_matches("/mod");
                let inside = if inside == "lib" { "" } else { inside };
                lifted.insert(
                    format!("{inside}/{name}")
                        .trim_start_matches('/')
                        .to_string(),
                );
            }
        }
    }
    let listed: BTreeSet<String> = UNSAFE_ROOMS.iter().map(|room| room.to_string()).collect();
    assert_eq!(
        lifted, listed,
        "`#[allow(unsafe_code)]` against UNSAFE_ROOMS"
    );
    let lib = std::fs::read_to_string(root().join("src/lib.rs")).unwrap();
    assert!(lib.contains("#![deny(unsafe_code)]"));
    report(offences);
}

#[test]
fn every_unsafe_block_says_who_keeps_its_promise() {
    let mut offences = Vec::new();
    for source in sources(&["src", "tests", "benches"]) {
        let lines: Vec<&str> = source.text.lines().collect();
        for (at, word) in words(&source.code) {
            let rest = source.code[at..]
                .strip_prefix("unsafe")
                .map(str::trim_start);
            let Some(rest) = rest.filter(|_| word == "unsafe") else {
                continue;
            };
            let line = source.text[..at].matches('\n').count();
            let wanted = if rest.starts_with('{') || rest.starts_with("impl") {
                "// SAFETY:"
            } else if rest.starts_with("fn") {
                "# Safety"
            } else {
                continue;
            };
            // The comment may stand above a statement or a match arm of several lines.
            let above = line.saturating_sub(12);
            let named = lines[above..=line].iter().any(|l| l.contains(wanted));
            let trait_method = wanted == "# Safety" && lines[line].starts_with("    ");
            if !named && !trait_method {
                offences.push(source.at(at, &format!("without {wanted}")));
            }
        }
    }
    report(offences);
}

#[test]
fn files_are_short_enough_to_be_read() {
    let mut offences = Vec::new();
    for source in sources(&["src", "tools", "benches"]) {
        // Up to the tests at the foot.
        let lines = source.shipped.trim_end().matches('\n').count() + 1;
        if lines > longest(LONG_FILES, &source.path, FILE_LINES_MAX) {
            offences.push(format!("{}: {lines} lines before its tests", source.path));
        }
    }
    report(offences);
}

#[test]
fn functions_are_short_enough_to_be_seen_at_once() {
    let mut offences = Vec::new();
    for source in sources(&["src", "tools", "benches"]) {
        let bytes = source.shipped.as_bytes();
        for (at, word) in words(&source.shipped) {
            if word != "fn" {
                continue;
            }
            let body = (at..bytes.len()).find(|i| matches!(bytes[*i], b'{' | b';'));
            let Some(open) = body.filter(|open| bytes[*open] == b'{') else {
                continue;
            };
            let end = closing_brace(bytes, open);
            let lines = source.shipped[at..end].matches('\n').count() + 1;
            let name = words(&source.shipped[at..])
                .nth(1)
                .map_or("", |(_, name)| name);
            let named = format!("{} {name}", source.path);
            if lines > longest(LONG_FUNCTIONS, &named, FUNCTION_LINES_MAX) {
                offences.push(source.at(at, &format!("fn {name}: {lines} lines")));
            }
        }
    }
    report(offences);
}

#[test]
fn lines_are_at_most_a_hundred_columns() {
    let mut offences = Vec::new();
    for source in sources(&["src", "tools", "tests", "benches"]) {
        for (index, line) in source.text.lines().enumerate() {
            let columns = line.chars().count();
            // A row of a test's table is a line, however long its messages are.
            let row = source.path.starts_with("tests/") && line.contains('"');
            if columns > COLUMNS_MAX && !row {
                offences.push(format!("{}:{}: {columns} columns", source.path, index + 1));
            }
        }
    }
    report(offences);
}

/// Lower-case parts of a snake_case or CamelCase name.
fn parts(name: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    for c in name.chars() {
        if c == '_' || (c.is_uppercase() && name.contains(char::is_lowercase)) {
            parts.push(String::new());
        }
        if c != '_' {
            parts.last_mut().unwrap().extend(c.to_lowercase());
        }
    }
    parts
}

#[test]
fn names_say_what_they_name() {
    let declares = [
        "fn", "struct", "enum", "trait", "mod", "const", "static", "type", "let",
    ];
    let mut offences = Vec::new();
    for source in sources(&["src", "tools", "tests", "benches"]) {
        let all: Vec<(usize, &str)> = words(&source.code).collect();
        for pair in all.windows(3) {
            let (word, mut declared) = (pair[0].1, pair[1]);
            if !declares.contains(&word) {
                continue;
            }
            if declared.1 == "mut" {
                declared = pair[2];
            }
            let (at, name) = declared;
            // The room of rows and tokens is called that, as run.toml's table is.
            if word == "mod" && name == "data" {
                continue;
            }
            let part = parts(name)
                .iter()
                .any(|part| BANNED_PARTS.contains(&part.as_str()));
            if part || BANNED_NAMES.contains(&name) {
                offences.push(source.at(at, &format!("{word} {name}")));
            }
        }
        let stem = Path::new(&source.path)
            .file_stem()
            .unwrap()
            .to_str()
            .unwrap();
        if parts(stem)
            .iter()
            .any(|part| BANNED_PARTS.contains(&part.as_str()))
        {
            offences.push(source.path.clone());
        }
    }
    report(offences);
}

#[test]
fn every_dependency_says_why_it_is_there() {
    let text = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let (mut offences, mut table, mut seen) = (Vec::new(), "", 0);
    for (index, line) in lines.iter().enumerate() {
        if line.starts_with('[') {
            table = line;
        }
        let name = line.split([' ', '=']).next().unwrap();
        if !table.ends_with("dependencies]") || name.is_empty() || line.starts_with(['[', '#']) {
            continue;
        }
        seen += 1;
        let above = lines[index - 1];
        // `serde_json` shares the comment of `serde` above it.
        let sibling = above
            .split([' ', '='])
            .next()
            .filter(|above| !above.is_empty());
        let sibling = sibling.is_some_and(|above| name.starts_with(above));
        if !above.starts_with("# ") && !sibling {
            offences.push(format!(
                "Cargo.toml:{}: {name} without a comment",
                index + 1
            ));
        }
    }
    assert!(seen > 10, "{seen}");
    report(offences);
}

/// Every name that the code declares, with the files that do.
fn declarations() -> BTreeMap<String, Vec<String>> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for source in sources(&["src", "tests", "tools", "benches"]) {
        let all: Vec<(usize, &str)> = words(&source.code).collect();
        for pair in all.windows(2) {
            let kinds = ["fn", "struct", "enum", "trait", "mod", "const", "type"];
            if kinds.contains(&pair[0].1) {
                let files = found.entry(pair[1].1.to_string()).or_default();
                files.push(source.path.clone());
            }
        }
    }
    found
}

/// What `name`, quoted in a document, lacks to be true; `None` if it is, or names no code.
fn untrue(name: &str, declared: &BTreeMap<String, Vec<String>>) -> Option<String> {
    let folders = ["src/", "tests/", "tools/", "benches/", "kernels/"];
    let (path, rest) = match name.split_once("::") {
        Some((path, rest)) => (path, Some(rest)),
        None => (name, None),
    };
    let is_path = folders.iter().any(|folder| path.starts_with(folder));
    if is_path && !root().join(path).exists() {
        return Some(format!("{path} does not exist"));
    }
    let room = rank(path).is_some() || root().join(format!("tests/{path}.rs")).exists();
    let last = rest.map(|rest| rest.rsplit("::").next().unwrap());
    let last = last.or_else(|| (!is_path && name.matches('_').count() >= 3).then_some(name))?;
    let last = last.trim_end_matches("()");
    let word = last.chars().all(|c| c.is_alphanumeric() || c == '_');
    if !word || (rest.is_some() && !room && !is_path) {
        return None;
    }
    let Some(files) = declared.get(last) else {
        return Some(format!("{last} is declared nowhere"));
    };
    let folder = format!("src/{path}");
    let test = format!("tests/{path}.rs");
    let inside = rest.is_none()
        || files
            .iter()
            .any(|file| *file == path || *file == test || file.starts_with(&folder));
    (!inside).then(|| format!("{last} is not in {path} but in {}", files.join(", ")))
}

#[test]
fn what_the_architecture_names_exists() {
    let path = "src/ARCHITECTURE.md";
    let Ok(text) = std::fs::read_to_string(root().join(path)) else {
        println!("SKIP: {path} is not written");
        return;
    };
    let declared = declarations();
    let mut offences = Vec::new();
    for (index, line) in text.lines().enumerate() {
        for name in line.split('`').skip(1).step_by(2) {
            if let Some(offence) = untrue(name, &declared) {
                offences.push(format!("{path}:{}: `{name}`: {offence}", index + 1));
            }
        }
    }
    report(offences);
}

#[test]
fn names_in_documents_are_checked_against_the_code() {
    let declared = declarations();
    for right in [
        "src/store/FORMAT.md",
        "tests/tidy.rs::names_in_documents_are_checked_against_the_code",
        "tidy::names_in_documents_are_checked_against_the_code",
        "names_in_documents_are_checked_against_the_code",
        "plan::Plan",
        "std::fs",
        "memory.host",
        "cargo test",
    ] {
        assert_eq!(untrue(right, &declared), None, "{right}");
    }
    // In parts, so that this file does not declare them.
    let absent = ["no_such_test", "_anywhere"].concat();
    for wrong in [
        "src/plans.rs".to_string(),
        format!("tidy::{absent}"),
        absent,
        "plan::Trainer".to_string(),
    ] {
        assert!(untrue(&wrong, &declared).is_some(), "{wrong}");
    }
}

#[test]
fn the_format_tables_are_compared_with_the_code() {
    let format = read(&root().join("src/store/format.rs"));
    let test = format.text.split_once("#[cfg(test)]").map(|(_, test)| test);
    assert!(
        test.is_some_and(|test| test.contains("include_str!(\"FORMAT.md\")")),
        "src/store/format.rs has no test that reads FORMAT.md"
    );
}

#[test]
fn every_kernel_has_a_golden_test() {
    let Ok(entries) = std::fs::read_dir(root().join("kernels")) else {
        println!("SKIP: no kernels");
        return;
    };
    let mut offences = Vec::new();
    for entry in entries {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "cu") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let named = text.lines().take(40).any(|line| line.contains("golden"));
        if !named {
            offences.push(format!("{}: names no golden test", path.display()));
        }
    }
    report(offences);
}

#[test]
fn code_is_told_from_comments_and_literals() {
    let code =
        blank_literals("a(\"crate::x\\\"\") // crate::y\n'{' r#\"}\"# b'\\'' <'a> /* { */ z");
    let left: Vec<&str> = code.split_whitespace().collect();
    assert_eq!(left, ["a(", ")", "b", "<'a>", "z"]);
    assert_eq!(code.matches('\n').count(), 1);
    let cut = blank_tests("fn a() {}\n#[cfg(test)]\nmod tests { fn b() { c } }\nfn d() {}");
    let left: Vec<&str> = words(&cut).map(|(_, word)| word).collect();
    assert_eq!(left, ["fn", "a", "fn", "d"]);
    assert_eq!(first_segments("{a::{b, c}, d, e as f}"), ["a", "d", "e"]);
    assert_eq!(first_segments("plan::Plan;"), ["plan"]);
    assert_eq!(parts("readHelperInfo_x"), ["read", "helper", "info", "x"]);
}
