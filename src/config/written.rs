//! Values of keys as TOML.

use super::{Size, StorePath};

pub(super) fn named<T: PartialEq>(choices: &[(&'static str, T)], value: &T) -> Option<String> {
    let found = choices.iter().find(|(_, choice)| choice == value);
    found.map(|(name, _)| format!("\"{name}\""))
}

fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

pub(super) fn quoted_path(path: &std::path::Path) -> String {
    quoted(&path.to_string_lossy())
}

pub(super) fn text_list(texts: &[String]) -> Option<String> {
    let texts: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
    Some(format!("[{}]", texts.join(", ")))
}

pub(super) fn path_list(paths: &[std::path::PathBuf]) -> Option<String> {
    let paths: Vec<String> = paths.iter().map(|path| quoted_path(path)).collect();
    Some(format!("[{}]", paths.join(", ")))
}

pub(super) fn store_list(store: &[StorePath]) -> Option<String> {
    let entry = |s: &StorePath| {
        let (path, size) = (quoted_path(&s.path), s.size);
        let rate = |name, rate: Option<u64>| match rate {
            Some(rate) => format!(", {name} = \"{}/s\"", Size::Bytes(rate)),
            None => String::new(),
        };
        let (read, write) = (rate("read", s.read), rate("write", s.write));
        format!("{{ path = {path}, size = \"{size}\"{read}{write} }}")
    };
    let entries: Vec<String> = store.iter().map(entry).collect();
    Some(format!("[{}]", entries.join(", ")))
}

/// Shortest digits that read back as the same number.
pub(super) fn number(value: f64) -> Option<String> {
    Some(format!("{value:?}"))
}
