//! A model by its name on the hub, found in the local cache that other programs filled.
//!
//! - `org/name` or `org/name@revision`; a directory of that name comes first.
//! - The cache is `HF_HUB_CACHE`, else `HF_HOME/hub`, else `huggingface/hub` under `XDG_CACHE_HOME`
//!   or `~/.cache`: the order of Hugging Face's own library.
//! - Nothing is fetched, and nothing there is written.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result, printable};

const WHAT: &str = "model";

/// The directory of the model that `path` names: itself, or its snapshot in the cache.
///
/// # Errors
/// [`Error::Input`] where it is a name and the cache has no such model or revision.
pub fn resolve(path: &Path) -> Result<PathBuf> {
    let Some((name, revision)) = hub_name(path) else {
        return Ok(path.to_path_buf());
    };
    let missing = |got: String| {
        let fetch = match revision {
            "main" => format!("hf download {name}"),
            revision => format!("hf download {name} --revision {revision}"),
        };
        let remedy = format!("fetch it with `{fetch}`, or give the directory of a model");
        let expected = "a directory, or a model in the local cache";
        Error::input(
            WHAT,
            printable(&path.to_string_lossy()),
            expected,
            got,
            remedy,
        )
    };
    let Some(cache) = cache_directory() else {
        return Err(missing(
            "no cache: neither HF_HOME nor HOME is set".to_string(),
        ));
    };
    let model = cache.join(format!("models--{}", name.replace('/', "--")));
    if !model.is_dir() {
        return Err(missing(format!("nothing in {}", cache.display())));
    }
    // A revision is a branch or a tag, named under refs, or the commit itself.
    let reference = std::fs::read_to_string(model.join("refs").join(revision));
    let commit = reference.map_or(revision.to_string(), |commit| commit.trim().to_string());
    let plain = !commit.is_empty() && commit.chars().all(|c| c.is_ascii_alphanumeric());
    let snapshot = model.join("snapshots").join(&commit);
    match plain && snapshot.is_dir() {
        true => Ok(snapshot),
        false => Err(missing(format!(
            "no revision {} there",
            printable(revision)
        ))),
    }
}

/// The name and revision, if `path` is no directory and can be a name on the hub.
fn hub_name(path: &Path) -> Option<(&str, &str)> {
    let text = path.to_str().filter(|_| !path.exists())?;
    let (name, revision) = text.split_once('@').unwrap_or((text, "main"));
    let part = |part: &str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !part.is_empty() && !part.starts_with('.') && part.chars().all(plain)
    };
    let named = match name.split_once('/') {
        Some((organisation, name)) => part(organisation) && part(name),
        None => false,
    };
    let revisions = revision.split('/').all(part);
    (named && revisions).then_some((name, revision))
}

/// Where Hugging Face's library keeps what it fetched.
fn cache_directory() -> Option<PathBuf> {
    let variable = |name: &str| {
        let value = std::env::var_os(name).filter(|value| !value.is_empty());
        value.map(PathBuf::from)
    };
    variable("HF_HUB_CACHE")
        .or_else(|| Some(variable("HF_HOME")?.join("hub")))
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("huggingface/hub")))
        .or_else(|| Some(variable("HOME")?.join(".cache/huggingface/hub")))
}
