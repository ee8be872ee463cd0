//! Row formats: one JSON value to a conversation, a prompt with its completion, a text or tokens.
//!
//! | format | keys |
//! |---|---|
//! | messages | `messages` (or `conversations`): a list of `{role, content}`; `tools` |
//! | sharegpt | `conversations` (or `messages`): a list of `{from, value}`; `system`, `tools` |
//! | alpaca | `instruction`, `output`; `input`, `system`, `history` |
//! | prompt | `prompt`, `question` or `query`, with `completion`, `answer` or `response` |
//! | text | `text` |
//! | tokens | `input_ids`; `labels`, `attention_mask` |
//!
//! - Further keys are left alone. What a row lacks or has wrongly is a [`Fault`]; who reads the
//!   file adds the place.
//! - A content that is a list of text parts is their concatenation; `null` is the empty text.
//! - An assistant turn is trained on unless its `loss_weight`, `weight` or `train` is 0 or false.
//!
//! Not here: files (`source`), text (`templates`), tokens (`sample`).

use serde_json::{Map, Value};

use crate::config::DataFormat;
use crate::error::{Error, printable};

/// What is wrong with a row, without its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What would have been right.
    pub expected: String,
    /// What was there.
    pub got: String,
    /// What to do.
    pub remedy: String,
}

impl Fault {
    /// A fault from its three facts.
    pub fn new(
        expected: impl Into<String>,
        got: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Fault {
        Fault {
            expected: expected.into(),
            got: got.into(),
            remedy: remedy.into(),
        }
    }

    /// The error of this fault at `place` in `what`.
    pub fn at(self, what: &'static str, place: impl Into<String>) -> Error {
        Error::input(what, place, self.expected, self.got, self.remedy)
    }
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// `system`, `developer`, `user`, `assistant`, `tool`, `function` or `ipython`.
    pub role: String,
    /// Loss is taken on it; only ever true of the assistant.
    pub trained: bool,
    /// What the template sees: `role`, `content` as text, and what else the row had.
    pub message: Map<String, Value>,
}

/// Messages in order, and the tools on offer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// The messages.
    pub turns: Vec<Turn>,
    /// A list of tools, as the template takes it.
    pub tools: Option<Value>,
}

impl Conversation {
    /// One question of the user and the assistant's answer.
    pub fn exchange(prompt: String, completion: String) -> Conversation {
        Conversation {
            turns: vec![
                plain_turn("user", prompt),
                plain_turn("assistant", completion),
            ],
            tools: None,
        }
    }
}

/// One row of a dataset.
#[derive(Clone, Debug, PartialEq)]
pub enum Row {
    /// For the chat template.
    Chat(Conversation),
    /// For the chat template where there is one, else prompt and completion in a row.
    Prompt {
        /// Not trained on.
        prompt: String,
        /// Trained on.
        completion: String,
    },
    /// A document.
    Text(String),
    /// Token ids, and which of them are trained on.
    Tokens {
        /// The ids.
        ids: Vec<u64>,
        /// As long as `ids`.
        trained: Vec<bool>,
    },
}

const PROMPT_KEYS: [&str; 3] = ["prompt", "question", "query"];
const COMPLETION_KEYS: [&str; 3] = ["completion", "answer", "response"];
const ROLES: [&str; 7] = [
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
    "ipython",
];
const FORMATS: &str = "messages (messages: role, content), sharegpt (conversations: from, value), \
    alpaca (instruction, input, output), prompt (prompt, completion; question, answer), \
    text (text) or tokens (input_ids, labels)";

/// The format of a row, by its keys.
pub fn detect(row: &Value) -> Result<DataFormat, Fault> {
    let row = object(row)?;
    let has = |key: &str| row.get(key).is_some_and(|value| !value.is_null());
    if has("input_ids") {
        return Ok(DataFormat::Tokens);
    }
    if let Some(list) = turn_list(row) {
        let from = list.first().is_some_and(|turn| turn.get("from").is_some());
        return Ok(if from {
            DataFormat::Sharegpt
        } else {
            DataFormat::Messages
        });
    }
    if has("instruction") && has("output") {
        return Ok(DataFormat::Alpaca);
    }
    if PROMPT_KEYS.iter().any(|key| has(key)) && COMPLETION_KEYS.iter().any(|key| has(key)) {
        return Ok(DataFormat::Prompt);
    }
    if has("text") {
        return Ok(DataFormat::Text);
    }
    Err(unknown_keys(row))
}

/// The row in `format`, which is not [`DataFormat::Auto`]. `calls_as_text` is for a template that
/// does not write calls of tools: a `function_call` turn is then its own text.
pub fn read(row: &Value, format: DataFormat, calls_as_text: bool) -> Result<Row, Fault> {
    let row = object(row)?;
    match format {
        DataFormat::Messages | DataFormat::Sharegpt => {
            conversation(row, calls_as_text).map(Row::Chat)
        }
        DataFormat::Alpaca => alpaca(row).map(Row::Chat),
        DataFormat::Prompt => prompt(row, calls_as_text),
        DataFormat::Text => Ok(Row::Text(text(row, "text")?.unwrap_or_default())),
        DataFormat::Tokens => tokens(row),
        DataFormat::Auto => Err(unknown_keys(row)),
    }
}

pub(super) fn object(row: &Value) -> Result<&Map<String, Value>, Fault> {
    row.as_object()
        .ok_or_else(|| Fault::new("a JSON object", kind(row), "write one {…} a row"))
}

/// `a list`, `a number`: what a value is, in words.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn unknown_keys(row: &Map<String, Value>) -> Fault {
    let mut seen: Vec<String> = row.keys().take(12).map(|key| printable(key)).collect();
    if row.len() > seen.len() {
        seen.push("…".to_string());
    }
    let got = if seen.is_empty() {
        "none".to_string()
    } else {
        seen.join(", ")
    };
    Fault::new(
        format!("the keys of one of the formats {FORMATS}"),
        format!("the keys {got}"),
        "rename the columns, or name the format in data.format",
    )
}

/// The text under `key`; `None` where the key is absent or null.
fn text(row: &Map<String, Value>, key: &str) -> Result<Option<String>, Fault> {
    match row.get(key) {
        None if key == "text" => Err(unknown_keys(row)),
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(other) => Err(Fault::new(
            format!("a text in `{key}`"),
            kind(other),
            "correct the row",
        )),
    }
}

fn turn_list(row: &Map<String, Value>) -> Option<&Vec<Value>> {
    ["messages", "conversations", "conversation"]
        .iter()
        .find_map(|key| row.get(*key)?.as_array())
}

fn conversation(row: &Map<String, Value>, calls_as_text: bool) -> Result<Conversation, Fault> {
    let list = turn_list(row).ok_or_else(|| unknown_keys(row))?;
    if list.is_empty() {
        return Err(Fault::new(
            "at least one message",
            "an empty list",
            "remove the row",
        ));
    }
    let mut turns = Vec::with_capacity(list.len() + 1);
    if let Some(system) = text(row, "system")?.filter(|text| !text.is_empty()) {
        turns.push(plain_turn("system", system));
    }
    for (index, message) in list.iter().enumerate() {
        let read = turn(message, calls_as_text).map_err(|fault| Fault {
            got: format!("{} in message {}", fault.got, index + 1),
            ..fault
        })?;
        turns.push(read);
    }
    Ok(Conversation {
        turns,
        tools: tools(row)?,
    })
}

fn plain_turn(role: &str, content: String) -> Turn {
    let mut message = Map::new();
    message.insert("role".to_string(), role.into());
    message.insert("content".to_string(), content.into());
    Turn {
        role: role.to_string(),
        trained: role == "assistant",
        message,
    }
}

fn turn(message: &Value, calls_as_text: bool) -> Result<Turn, Fault> {
    let message = object(message)?;
    if let Some(from) = message.get("from") {
        let name = from.as_str().unwrap_or_default();
        let value = text(message, "value")?.unwrap_or_default();
        let role = match name {
            "human" | "user" => "user",
            "gpt" | "assistant" | "chatgpt" | "bing" | "model" => "assistant",
            "system" => "system",
            "observation" | "tool" | "function_response" => "tool",
            "function_call" if calls_as_text => "assistant",
            "function_call" => return function_call(value),
            _ => {
                return Err(unknown_role(
                    from,
                    "human, gpt, system, observation or function_call",
                ));
            }
        };
        let mut turn = plain_turn(role, value);
        turn.trained = turn.trained && weight(message)?;
        return Ok(turn);
    }
    let Some(Value::String(role)) = message.get("role") else {
        return Err(Fault::new(
            "`role` and `content`, or `from` and `value`",
            keys(message),
            "correct the row",
        ));
    };
    if !ROLES.contains(&role.as_str()) {
        return Err(unknown_role(
            &message["role"],
            "system, developer, user, assistant, tool, function or ipython",
        ));
    }
    let mut message = message.clone();
    let trained = role == "assistant" && weight(&message)?;
    for key in ["loss_weight", "weight", "train"] {
        message.shift_remove(key);
    }
    let content = content(message.get("content"))?;
    let role = role.clone();
    message.insert("content".to_string(), content.into());
    Ok(Turn {
        role,
        trained,
        message,
    })
}

pub(super) fn keys(row: &Map<String, Value>) -> String {
    let seen: Vec<String> = row.keys().take(12).map(|key| printable(key)).collect();
    format!(
        "the keys {}",
        if seen.is_empty() {
            "none".to_string()
        } else {
            seen.join(", ")
        }
    )
}

fn unknown_role(got: &Value, known: &str) -> Fault {
    Fault::new(
        format!("a role among {known}"),
        printable(&got.to_string()),
        "rename the role",
    )
}

/// A message's content as text: parts are put together.
pub(super) fn content(value: Option<&Value>) -> Result<String, Fault> {
    match value {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let mut whole = String::new();
            for part in parts {
                let text = part.as_str().or_else(|| {
                    let kind = part.get("type").and_then(Value::as_str).unwrap_or("text");
                    let text = part.get("text").or_else(|| part.get("value"));
                    text.and_then(Value::as_str).filter(|_| kind == "text")
                });
                let text = text.ok_or_else(|| {
                    let kind = part
                        .get("type")
                        .map_or("a part without one".to_string(), Value::to_string);
                    Fault::new(
                        "content parts of type text",
                        printable(&kind),
                        "leave out what is no text",
                    )
                })?;
                whole.push_str(text);
            }
            Ok(whole)
        }
        Some(other) => Err(Fault::new(
            "a text or a list of parts in `content`",
            kind(other),
            "correct the row",
        )),
    }
}

/// Whether a message of the assistant is trained on.
fn weight(message: &Map<String, Value>) -> Result<bool, Fault> {
    for key in ["loss_weight", "weight", "train"] {
        match message.get(key) {
            None | Some(Value::Null) => {}
            Some(Value::Bool(train)) => return Ok(*train),
            Some(value) if value.as_f64() == Some(0.0) => return Ok(false),
            Some(value) if value.as_f64() == Some(1.0) => return Ok(true),
            Some(value) => {
                return Err(Fault::new(
                    format!("0 or 1 in `{key}`"),
                    printable(&value.to_string()),
                    "only whole weights are supported",
                ));
            }
        }
    }
    Ok(true)
}

/// sharegpt's `function_call`: a JSON object, or a list of them, with `name` and `arguments`.
fn function_call(value: String) -> Result<Turn, Fault> {
    let calls = match serde_json::from_str(&value) {
        Ok(Value::Array(calls)) => calls,
        Ok(call @ Value::Object(_)) => vec![call],
        _ => return Ok(plain_turn("assistant", value)),
    };
    let mut tool_calls = Vec::with_capacity(calls.len());
    for call in calls {
        if call.get("name").is_none() {
            return Ok(plain_turn("assistant", value));
        }
        tool_calls.push(serde_json::json!({"type": "function", "function": call}));
    }
    let mut turn = plain_turn("assistant", String::new());
    turn.message
        .insert("tool_calls".to_string(), Value::Array(tool_calls));
    Ok(turn)
}

/// `tools`: a list, or a text that holds one; a bare function is put in its `{type, function}`.
fn tools(row: &Map<String, Value>) -> Result<Option<Value>, Fault> {
    let wrong = |got: &str| {
        Fault::new(
            "a list of tools in `tools`",
            printable(got),
            "correct the row",
        )
    };
    let list = match row.get("tools") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Value::String(text)) => serde_json::from_str(text).map_err(|_| wrong(text))?,
        Some(value) => value.clone(),
    };
    let Value::Array(mut list) = list else {
        return Err(wrong(kind(&list)));
    };
    for tool in &mut list {
        if tool.get("name").is_some() && tool.get("function").is_none() {
            *tool = serde_json::json!({"type": "function", "function": tool.take()});
        }
    }
    Ok((!list.is_empty()).then_some(Value::Array(list)))
}

fn alpaca(row: &Map<String, Value>) -> Result<Conversation, Fault> {
    let (Some(instruction), Some(output)) = (text(row, "instruction")?, text(row, "output")?)
    else {
        return Err(unknown_keys(row));
    };
    let mut turns = Vec::new();
    if let Some(system) = text(row, "system")?.filter(|text| !text.is_empty()) {
        turns.push(plain_turn("system", system));
    }
    match row.get("history") {
        None | Some(Value::Null) => {}
        Some(Value::Array(pairs)) => {
            for pair in pairs {
                let (Some(user), Some(assistant), None) =
                    (pair[0].as_str(), pair[1].as_str(), pair.get(2))
                else {
                    return Err(Fault::new(
                        "pairs of texts in `history`",
                        printable(&pair.to_string()),
                        "correct the row",
                    ));
                };
                turns.push(plain_turn("user", user.to_string()));
                turns.push(plain_turn("assistant", assistant.to_string()));
            }
        }
        Some(other) => {
            return Err(Fault::new(
                "a list in `history`",
                kind(other),
                "correct the row",
            ));
        }
    }
    let question = match text(row, "input")?.filter(|input| !input.is_empty()) {
        Some(input) => format!("{instruction}\n{input}"),
        None => instruction,
    };
    turns.push(plain_turn("user", question));
    turns.push(plain_turn("assistant", output));
    Ok(Conversation { turns, tools: None })
}

fn prompt(row: &Map<String, Value>, calls_as_text: bool) -> Result<Row, Fault> {
    let find = |keys: &[&str]| {
        keys.iter()
            .find_map(|key| row.get(*key).filter(|value| !value.is_null()).cloned())
    };
    let (Some(prompt), Some(completion)) = (find(&PROMPT_KEYS), find(&COMPLETION_KEYS)) else {
        return Err(unknown_keys(row));
    };
    match (prompt, completion) {
        (Value::String(prompt), Value::String(completion)) => {
            Ok(Row::Prompt { prompt, completion })
        }
        (Value::Array(prompt), Value::Array(completion)) => {
            let asked = prompt.len();
            let mut turns = Vec::with_capacity(asked + completion.len());
            for (index, message) in prompt.iter().chain(&completion).enumerate() {
                let mut turn = turn(message, calls_as_text)?;
                turn.trained = turn.trained && index >= asked;
                turns.push(turn);
            }
            Ok(Row::Chat(Conversation {
                turns,
                tools: tools(row)?,
            }))
        }
        (prompt, completion) => Err(Fault::new(
            "prompt and completion both texts, or both lists of messages",
            format!("{} and {}", kind(&prompt), kind(&completion)),
            "correct the row",
        )),
    }
}

fn tokens(row: &Map<String, Value>) -> Result<Row, Fault> {
    let ids = row.get("input_ids").ok_or_else(|| unknown_keys(row))?;
    let ids = numbers(ids, "input_ids")?;
    let list = |key: &str| match row.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => numbers(value, key).map(Some),
    };
    let (labels, attended) = (list("labels")?, list("attention_mask")?);
    for (key, other) in [("labels", &labels), ("attention_mask", &attended)] {
        if let Some(other) = other
            && other.len() != ids.len()
        {
            return Err(Fault::new(
                format!("{} values in `{key}`, as many as `input_ids`", ids.len()),
                other.len().to_string(),
                "make them equally long",
            ));
        }
    }
    let mut kept = Vec::with_capacity(ids.len());
    let mut trained = Vec::with_capacity(ids.len());
    for (index, &id) in ids.iter().enumerate() {
        if attended.as_ref().is_some_and(|mask| mask[index] == 0) {
            continue;
        }
        let label = labels.as_ref().map_or(id, |labels| labels[index]);
        if label != -100 && label != id {
            return Err(Fault::new(
                format!("-100 or {id}, the id itself, in `labels` at {index}"),
                label.to_string(),
                "labels are not shifted: Terrace does that",
            ));
        }
        kept.push(u64::try_from(id).map_err(|_| {
            Fault::new(
                format!("an id from 0 in `input_ids` at {index}"),
                id.to_string(),
                "correct the row",
            )
        })?);
        trained.push(label != -100);
    }
    if kept.is_empty() {
        return Err(Fault::new(
            "at least one id in `input_ids`",
            "none",
            "remove the row",
        ));
    }
    Ok(Row::Tokens { ids: kept, trained })
}

fn numbers(value: &Value, key: &str) -> Result<Vec<i64>, Fault> {
    let wrong = |got: &Value| {
        Fault::new(
            format!("a list of whole numbers in `{key}`"),
            printable(&got.to_string()),
            "correct the row",
        )
    };
    let list = value.as_array().ok_or_else(|| wrong(value))?;
    list.iter()
        .map(|number| number.as_i64().ok_or_else(|| wrong(number)))
        .collect()
}
