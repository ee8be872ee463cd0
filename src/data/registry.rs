//! LLaMA-Factory's dataset_info.json: names for files, with the names of their columns.
//!
//! - `file_name` is meant from the directory of dataset_info.json. `formatting`, `columns` and
//!   `tags` are read as there: where `columns` stands, a column that it leaves out is not used.
//! - What cannot be trained on as it is meant is refused by name: rankings, images, video, audio,
//!   datasets that are on a hub, sampling by `num_samples`.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::columns::{Columns, Tags};
use super::tokenize::read_capped;
use crate::error::{Error, Result, printable};

const FILE: &str = "dataset_info.json";
/// Most bytes of a dataset_info.json.
const BYTES_MAX: u64 = 16 << 20;
const WHAT: &str = "dataset_info.json";

/// A dataset_info.json.
#[derive(Debug)]
pub(super) struct Registry {
    directory: PathBuf,
    entries: Map<String, Value>,
}

impl Registry {
    /// Reads the dataset_info.json of `directory`.
    pub(super) fn read(directory: &Path) -> Result<Registry> {
        let path = directory.join(FILE);
        let place = path.display().to_string();
        let bytes = read_capped(&path, BYTES_MAX)?.ok_or_else(|| {
            let remedy = "set data.dataset_dir to the directory that has it, or leave it out";
            Error::input(WHAT, directory.display().to_string(), FILE, "none", remedy)
        })?;
        let value: Value = serde_json::from_slice(&bytes).map_err(|error| {
            let (got, line) = (printable(&error.to_string()), error.line());
            Error::input(
                WHAT,
                format!("{place}:{line}"),
                "JSON",
                got,
                "correct the file",
            )
        })?;
        match value {
            Value::Object(entries) => Ok(Registry {
                directory: directory.to_path_buf(),
                entries,
            }),
            _ => Err(Error::input(
                WHAT,
                place,
                "an object of datasets by name",
                "something else",
                "write {\"name\": {\"file_name\": \"…\"}}",
            )),
        }
    }

    /// The file or directory of the dataset `name`, and its columns; `None` if it is not listed.
    pub(super) fn find(&self, name: &str) -> Result<Option<(PathBuf, Columns)>> {
        let Some(entry) = self.entries.get(name) else {
            return Ok(None);
        };
        self.read_entry(entry)
            .map_err(|fault| self.refuse(name, fault))
            .map(|(file, columns)| Some((self.directory.join(file), columns)))
    }

    fn refuse(&self, name: &str, fault: (String, String, &str)) -> Error {
        let place = format!(
            "{}, {}",
            self.directory.join(FILE).display(),
            printable(name)
        );
        let (expected, got, remedy) = fault;
        Error::input(WHAT, place, expected, printable(&got), remedy)
    }

    /// The error of a name that is not listed.
    pub(super) fn unknown(&self, name: &str) -> Error {
        let mut known: Vec<String> = self.entries.keys().take(12).map(|k| printable(k)).collect();
        if self.entries.len() > known.len() {
            known.push("…".to_string());
        }
        let expected = format!("a file, or a dataset of it ({})", known.join(", "));
        self.refuse(
            name,
            (expected, "neither".to_string(), "correct data.train"),
        )
    }

    fn read_entry(
        &self,
        entry: &Value,
    ) -> Result<(String, Columns), (String, String, &'static str)> {
        let fault = |expected: &str, got: String, remedy| (expected.to_string(), got, remedy);
        let Some(file) = entry["file_name"].as_str().filter(|name| !name.is_empty()) else {
            let hub = [
                "hf_hub_url",
                "ms_hub_url",
                "om_hub_url",
                "script_url",
                "cloud_file_name",
            ];
            let got = hub.iter().find(|key| entry.get(**key).is_some());
            let got = got.map_or("none".to_string(), |key| format!("{key} {}", entry[*key]));
            let remedy = "download the dataset and give file_name: Terrace fetches nothing";
            return Err(fault("a file_name", got, remedy));
        };
        if entry["ranking"] == true {
            let remedy = "preference data has two answers a row: train on the chosen ones alone";
            return Err(fault(
                "rows with one answer",
                "ranking: true".to_string(),
                remedy,
            ));
        }
        let amount = &entry["num_samples"];
        if !amount.is_null() {
            let remedy = "leave it out and set data.max_samples";
            return Err(fault("no num_samples", amount.to_string(), remedy));
        }
        let sharegpt = match entry["formatting"].as_str().unwrap_or("alpaca") {
            "alpaca" => false,
            "sharegpt" | "openai" => true,
            other => {
                let expected = "formatting \"alpaca\", \"sharegpt\" or \"openai\"";
                return Err(fault(
                    expected,
                    other.to_string(),
                    "convert the rows to one of them",
                ));
            }
        };
        let columns = &entry["columns"];
        for key in [
            "images", "videos", "audios", "chosen", "rejected", "kto_tag",
        ] {
            if let Some(column) = columns[key].as_str() {
                let remedy = "only text with one answer a row is trained on";
                return Err(fault("columns of text", format!("{key}: {column}"), remedy));
            }
        }
        let openai = entry["formatting"] == "openai";
        Ok((
            file.to_string(),
            columns_of(columns, &entry["tags"], sharegpt, openai),
        ))
    }
}

/// The columns by name: LLaMA-Factory's defaults where `columns` does not stand.
fn columns_of(columns: &Value, tags: &Value, sharegpt: bool, openai: bool) -> Columns {
    let given = columns.is_object();
    let named = |key: &str, default: Option<&str>| match columns[key].as_str() {
        Some(name) => Some(name.to_string()),
        None => default.filter(|_| !given).map(str::to_string),
    };
    if sharegpt {
        let tag = |key: &str, default: &str| tags[key].as_str().unwrap_or(default).to_string();
        let default = |sharegpt, openai_name| if openai { openai_name } else { sharegpt };
        return Columns::Messages {
            messages: named("messages", Some(default("conversations", "messages")))
                .unwrap_or_else(|| default("conversations", "messages").to_string()),
            system: named("system", None),
            tools: named("tools", None),
            tags: Tags {
                role: tag("role_tag", default("from", "role")),
                content: tag("content_tag", default("value", "content")),
                user: tag("user_tag", default("human", "user")),
                assistant: tag("assistant_tag", default("gpt", "assistant")),
                observation: tag("observation_tag", default("observation", "tool")),
                function: tag("function_tag", "function_call"),
                system: tag("system_tag", "system"),
            },
        };
    }
    Columns::Prompt {
        prompt: named("prompt", Some("instruction")).unwrap_or_else(|| "instruction".to_string()),
        query: named("query", Some("input")),
        response: named("response", Some("output")),
        history: named("history", None),
        system: named("system", None),
    }
}
