//! A model by its name on the hub, found in the local cache that other programs filled.
//!
//! - `org/name` or `org/name@revision`; a directory of that name comes first.
//! - The cache is `HF_HUB_CACHE`, else `HF_HOME/hub`, else `huggingface/hub` under `XDG_CACHE_HOME`
//!   or `~/.cache`: the order of Hugging Face's own library.
//! - [`resolve`] fetches nothing and writes nothing there. In a build with the `hub` feature
//!   [`fetch`] does, what lacks, in the same layout, so that other programs find it too.

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

/// As [`resolve`], after what lacks in the cache was downloaded: the descriptions (configuration,
/// tokenizer), and with `weights` the safetensors files. A download that was interrupted goes on.
/// Without the network, and under `HF_HUB_OFFLINE=1`, what is in the cache serves.
///
/// # Errors
/// [`Error::Input`] with the hub's words where it has no such model or does not answer.
#[cfg(feature = "hub")]
pub fn fetch(path: &Path, weights: bool) -> Result<PathBuf> {
    let offline = std::env::var("HF_HUB_OFFLINE");
    let offline = offline.is_ok_and(|value| {
        ["1", "ON", "YES", "TRUE", "on", "yes", "true"].contains(&value.as_str())
    });
    let (Some((name, revision)), Some(cache), false) = (hub_name(path), cache_directory(), offline)
    else {
        return resolve(path);
    };
    if resolve(path).is_ok_and(|found| is_whole(&found, weights)) {
        return resolve(path);
    }
    let failed = |error: hf_hub::api::sync::ApiError| {
        Error::input(
            WHAT,
            printable(&path.to_string_lossy()),
            "a model on the hub",
            printable(&error.to_string()),
            "check the name and the network; a gated model needs HF_TOKEN",
        )
    };
    let token = std::env::var("HF_TOKEN")
        .ok()
        .filter(|token| !token.is_empty());
    let mut api = hf_hub::api::sync::ApiBuilder::from_env()
        .with_cache_dir(cache)
        .with_retries(3)
        .with_progress(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_user_agent("terrace", env!("CARGO_PKG_VERSION"));
    if token.is_some() {
        api = api.with_token(token);
    }
    let kind = hf_hub::RepoType::Model;
    let model = hf_hub::Repo::with_revision(name.to_string(), kind, revision.to_string());
    let model = api.build().map_err(failed)?.repo(model);
    let files = model.info().map_err(failed)?.siblings;
    let names = files.iter().map(|file| file.rfilename.as_str());
    for name in in_order(names, weights) {
        model.get(name).map_err(failed)?;
    }
    resolve(path)
}

/// As [`resolve`]: a build without the `hub` feature has no network.
///
/// # Errors
/// As [`resolve`].
#[cfg(not(feature = "hub"))]
pub fn fetch(path: &Path, _weights: bool) -> Result<PathBuf> {
    resolve(path)
}

/// The configuration's file, which is fetched last: where it is, so are the others.
#[cfg(any(feature = "hub", test))]
const CONFIG: &str = "config.json";

/// Files of the hub that are read, names at the top of what `hf` reads, in the order in which they
/// are fetched: a fetch that was interrupted is not taken for a whole one.
#[cfg(any(feature = "hub", test))]
fn in_order<'a>(names: impl Iterator<Item = &'a str>, weights: bool) -> Vec<&'a str> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let is_wanted = |name: &&str| {
        let safe = !name.starts_with('.') && name.chars().all(plain);
        let described = [".json", ".jinja"].iter().any(|end| name.ends_with(end));
        safe && (described || weights && name.ends_with(".safetensors"))
    };
    let mut wanted: Vec<&str> = names.filter(is_wanted).collect();
    wanted.sort_by_key(|name| *name == CONFIG);
    wanted
}

/// Whether a snapshot has its configuration and, with `weights`, all files that its index names.
#[cfg(feature = "hub")]
fn is_whole(snapshot: &Path, weights: bool) -> bool {
    let has = |name: &str| snapshot.join(name).exists();
    if !has(CONFIG) || !weights || has("model.safetensors") {
        return has(CONFIG);
    }
    let index = std::fs::read_to_string(snapshot.join("model.safetensors.index.json"));
    let index: Option<serde_json::Value> =
        index.ok().and_then(|text| serde_json::from_str(&text).ok());
    let files = index
        .as_ref()
        .and_then(|index| index["weight_map"].as_object());
    files.is_some_and(|files| files.values().all(|file| file.as_str().is_some_and(has)))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_is_fetched_last() {
        let hub = [
            ".gitattributes",
            "chat_template.jinja",
            "config.json",
            "model.safetensors",
            "onnx/model.onnx",
            "../escape.json",
            "tokenizer.json",
        ];
        let described = ["chat_template.jinja", "tokenizer.json", "config.json"];
        assert_eq!(in_order(hub.into_iter(), false), described);
        let all = [
            "chat_template.jinja",
            "model.safetensors",
            "tokenizer.json",
            "config.json",
        ];
        assert_eq!(in_order(hub.into_iter(), true), all);
    }
}
