//! A row whose columns a person named, as LLaMA-Factory's dataset_info.json does.
//!
//! - A prompt row is instruction, query and response, or one text where there is no response; a
//!   messages row is a list with roles by tag.
//! - A row is put into the keys that `formats` knows and read there: what is wrong with it is said
//!   in the same words.

use serde_json::{Map, Value, json};

use super::formats::{self, Fault, Row};
use crate::config::DataFormat;
use crate::error::printable;

/// What a dataset calls its columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Columns {
    /// LLaMA-Factory's "alpaca".
    Prompt {
        prompt: String,
        query: Option<String>,
        /// Without it each row is a text to train on.
        response: Option<String>,
        history: Option<String>,
        system: Option<String>,
    },
    /// LLaMA-Factory's "sharegpt".
    Messages {
        messages: String,
        system: Option<String>,
        tools: Option<String>,
        tags: Tags,
    },
}

/// What a list of messages calls keys and roles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tags {
    pub(super) role: String,
    pub(super) content: String,
    pub(super) user: String,
    pub(super) assistant: String,
    pub(super) observation: String,
    pub(super) function: String,
    pub(super) system: String,
}

impl Columns {
    /// The row's meaning; `calls_as_text` as for `formats::read`.
    pub(super) fn read(&self, row: &Value, calls_as_text: bool) -> Result<Row, Fault> {
        let row = formats::object(row)?;
        let mut plain = Map::new();
        let mut take = |column: &Option<String>, key: &str| {
            if let Some(value) = column.as_ref().and_then(|column| row.get(column)) {
                plain.insert(key.to_string(), value.clone());
            }
        };
        match self {
            Columns::Prompt {
                prompt,
                query,
                response,
                history,
                system,
            } => {
                let asked = required(row, prompt)?.clone();
                let Some(response) = response else {
                    let text = json!({"text": asked});
                    return formats::read(&text, DataFormat::Text, calls_as_text);
                };
                take(query, "input");
                take(history, "history");
                take(system, "system");
                plain.insert("instruction".to_string(), asked);
                plain.insert("output".to_string(), required(row, response)?.clone());
                formats::read(&Value::Object(plain), DataFormat::Alpaca, calls_as_text)
            }
            Columns::Messages {
                messages,
                system,
                tools,
                tags,
            } => {
                take(system, "system");
                take(tools, "tools");
                let list = required(row, messages)?;
                let list = list.as_array().ok_or_else(|| {
                    let expected = format!("a list of messages in `{}`", printable(messages));
                    Fault::new(expected, formats::kind(list), "correct the row")
                })?;
                let turns: Result<Vec<Value>, Fault> =
                    list.iter().map(|message| tags.turn(message)).collect();
                plain.insert("conversations".to_string(), Value::Array(turns?));
                formats::read(&Value::Object(plain), DataFormat::Sharegpt, calls_as_text)
            }
        }
    }
}

fn required<'a>(row: &'a Map<String, Value>, column: &str) -> Result<&'a Value, Fault> {
    row.get(column)
        .filter(|value| !value.is_null())
        .ok_or_else(|| {
            let remedy = "correct `columns` in dataset_info.json, or the row";
            Fault::new(
                format!("the column `{}`", printable(column)),
                formats::keys(row),
                remedy,
            )
        })
}

impl Tags {
    /// The message with the keys and roles that `formats` knows.
    fn turn(&self, message: &Value) -> Result<Value, Fault> {
        let message = formats::object(message)?;
        let role = required(message, &self.role)?;
        let roles = [
            (&self.user, "human"),
            (&self.assistant, "gpt"),
            (&self.observation, "observation"),
            (&self.function, "function_call"),
            (&self.system, "system"),
        ];
        let known = roles.iter().find(|(tag, _)| role == tag.as_str());
        let (_, from) = known.ok_or_else(|| {
            let names = roles.map(|(tag, _)| printable(tag)).join(", ");
            let remedy = "correct `tags` in dataset_info.json, or the row";
            Fault::new(
                format!("a role among {names}"),
                printable(&role.to_string()),
                remedy,
            )
        })?;
        let mut turn = Map::new();
        turn.insert("from".to_string(), (*from).into());
        let value = formats::content(message.get(&self.content))?;
        turn.insert("value".to_string(), value.into());
        for key in ["loss_weight", "weight", "train"] {
            if let Some(weight) = message.get(key) {
                turn.insert(key.to_string(), weight.clone());
            }
        }
        Ok(Value::Object(turn))
    }
}
