//! Chat templates: a conversation to text, and which of its bytes are the assistant's.
//!
//! - Rendering equals transformers' `apply_chat_template` byte for byte: `trim_blocks`,
//!   `lstrip_blocks`, Python's spelling of printed values and of `tojson`, Python's string methods.
//!   `{% generation %}` is an `{% if true %}` here: the mask below does not need it.
//! - An assistant turn is the text between "the turns before it, with the generation prompt" and
//!   "the turns up to it", so its end-of-turn token is trained on and its header is not.
//! - Some templates write earlier turns differently from the last one (Qwen3 leaves out what they
//!   thought), so that those two texts are no prefixes of the whole. Then the turn is found by
//!   rendering the whole conversation again with only that turn's words replaced: what changes is
//!   its text. What can still not be told apart is an error, never a guess. The same where the
//!   text of the turns before lacks what they said.
//! - The clock does not enter: `strftime_now` gives a fixed date (see [`ChatTemplate::date`]), so
//!   that a run resumed on another day reads the same tokens.
//!
//! Not here: tokenizing (`tokenize`), reading rows (`formats`).

use std::ops::Range;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, ErrorKind, Output, State, context};

use super::formats::{Conversation, Fault, Turn};
use crate::error::printable;

/// Most turns of one conversation: the mask renders it twice for each turn of the assistant.
pub const TURNS_MAX: usize = 1024;

/// Unix seconds of 2024-07-26 00:00 UTC, the date that Llama 3's own template falls back to.
pub const DATE_DEFAULT: i64 = 1_721_952_000;

/// A chat template and the special tokens that it may print.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    source: String,
    special: Vec<(String, String)>,
    date: i64,
}

/// A conversation as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// The whole text.
    pub text: String,
    /// Byte ranges that are trained on, ascending, apart.
    pub trained: Vec<Range<usize>>,
}

impl ChatTemplate {
    /// The template with `special` as (`bos_token`, its text) pairs. An error if it does not parse.
    pub fn new(source: &str, special: Vec<(String, String)>) -> Result<ChatTemplate, Fault> {
        let template = ChatTemplate {
            source: without_generation_tags(source),
            special,
            date: DATE_DEFAULT,
        };
        template.renderer().map(|_| ())?;
        Ok(template)
    }

    /// Sets what `strftime_now` prints, in Unix seconds, UTC.
    pub fn set_date(&mut self, unix_seconds: i64) {
        self.date = unix_seconds;
    }

    /// What `strftime_now` prints, in Unix seconds.
    pub fn date(&self) -> i64 {
        self.date
    }

    /// Whether the template writes calls of tools by itself.
    pub fn writes_tool_calls(&self) -> bool {
        self.source.contains("tool_calls")
    }

    /// The compiled template; make one a thread and use it for many rows.
    pub fn renderer(&self) -> Result<Renderer<'_>, Fault> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_formatter(print_as_python);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", |text: String| -> Result<String, _> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, text))
        });
        let date = self.date;
        environment.add_function("strftime_now", move |format: String| {
            strftime(date, &format)
        });
        environment
            .add_template("chat", &self.source)
            .map_err(|error| fault("a chat template that parses", &error))?;
        Ok(Renderer {
            environment,
            special: &self.special,
        })
    }
}

/// A compiled [`ChatTemplate`].
pub struct Renderer<'a> {
    environment: Environment<'a>,
    special: &'a [(String, String)],
}

impl Renderer<'_> {
    /// The conversation as text, with the ranges of its assistant turns that are trained on.
    pub fn render(&self, conversation: &Conversation) -> Result<Rendered, Fault> {
        if conversation.turns.len() > TURNS_MAX {
            return Err(Fault::new(
                format!("at most {TURNS_MAX} turns in a conversation"),
                format!("{} turns", conversation.turns.len()),
                "split it into several rows",
            ));
        }
        let messages: Vec<Value> = conversation
            .turns
            .iter()
            .map(|turn| Value::from_serialize(&turn.message))
            .collect();
        let tools = conversation.tools.as_ref().map(Value::from_serialize);
        let whole = Whole {
            renderer: self,
            turns: &conversation.turns,
            text: self.text(&messages, &tools, false)?,
            messages,
            tools,
        };
        let mut trained: Vec<Range<usize>> = Vec::new();
        let mut end_before = 0;
        for (index, turn) in conversation.turns.iter().enumerate() {
            if turn.role != "assistant" {
                continue;
            }
            let range = whole.assistant_range(index, end_before)?;
            if range.start < end_before || range.end < range.start {
                return Err(unmatched(index));
            }
            end_before = range.end;
            if turn.trained && !range.is_empty() {
                trained.push(range);
            }
        }
        Ok(Rendered {
            text: whole.text,
            trained,
        })
    }

    /// The text of a prompt: the turns and the header of the assistant's next one.
    pub fn prompt(&self, conversation: &Conversation) -> Result<String, Fault> {
        let messages: Vec<Value> = conversation
            .turns
            .iter()
            .map(|turn| Value::from_serialize(&turn.message))
            .collect();
        let tools = conversation.tools.as_ref().map(Value::from_serialize);
        self.text(&messages, &tools, true)
    }

    fn text(
        &self,
        messages: &[Value],
        tools: &Option<Value>,
        prompt: bool,
    ) -> Result<String, Fault> {
        let none = Value::from(());
        let settings = context! {
            messages => messages,
            tools => tools.as_ref().unwrap_or(&none),
            documents => none,
            add_generation_prompt => prompt,
        };
        let special: Value = self
            .special
            .iter()
            .map(|(name, text)| (name.as_str(), text.as_str()))
            .collect();
        let template = self
            .environment
            .get_template("chat")
            .expect("added by renderer()");
        template
            .render(context! { ..settings, ..special })
            .map_err(|error| fault("a conversation that the chat template takes", &error))
    }
}

/// A conversation rendered whole, in which turns are looked for.
struct Whole<'a> {
    renderer: &'a Renderer<'a>,
    turns: &'a [Turn],
    text: String,
    messages: Vec<Value>,
    tools: Option<Value>,
}

/// Two contents without a common first or last character, and without white space that a template
/// could strip.
const STAND_INS: [&str; 2] = ["\u{2}A\u{2}", "\u{3}B\u{3}"];

impl Whole<'_> {
    /// Bytes of the whole text that turn `index`, one of the assistant, wrote; the one before it
    /// ends at `end_before`.
    fn assistant_range(&self, index: usize, end_before: usize) -> Result<Range<usize>, Fault> {
        // A template may refuse a conversation that begins with the assistant, or ends early:
        // that alone is no reason to refuse the whole, which rendered.
        let before = self.part(&self.messages[..index], true).ok();
        let before = before.filter(|before| self.text.starts_with(before.as_str()));
        let upto = self.part(&self.messages[..=index], false).ok();
        if let (Some(before), Some(upto)) = (&before, &upto)
            && self.text.starts_with(upto.as_str())
            && before.len() <= upto.len()
            && self.has_words_before(before, index, end_before)
        {
            return Ok(before.len()..upto.len());
        }
        let words = self.changed_range(index)?;
        let floor = if index > 0 {
            self.changed_range(index - 1)?.end
        } else {
            0
        };
        let header_end = before.map(|before| before.len());
        let start = header_end.filter(|end| (floor..=words.start).contains(end));
        let start = start.unwrap_or(words.start);
        let end = words.end + common_prefix(&self.text[words.end..], &self.tail(index)?);
        let ceiling = match index + 1 < self.turns.len() {
            true => self.changed_range(index + 1)?.start,
            false => self.text.len(),
        };
        if floor <= start && end <= ceiling {
            return Ok(start..end);
        }
        Err(unmatched(index))
    }

    /// Whether `before` holds what was said since `end_before`: some templates write a question
    /// only together with its answer, and then `before` is a prefix that ends too early.
    fn has_words_before(&self, before: &str, index: usize, end_before: usize) -> bool {
        let Some(mut rest) = before.get(end_before..) else {
            return false;
        };
        let assistant = |turn: &Turn| turn.role == "assistant";
        let first = self.turns[..index]
            .iter()
            .rposition(assistant)
            .map_or(0, |at| at + 1);
        for turn in &self.turns[first..index] {
            let content = turn
                .message
                .get("content")
                .and_then(|content| content.as_str());
            let words = content.unwrap_or_default().trim();
            let Some(at) = rest.find(words) else {
                return false;
            };
            rest = &rest[at + words.len()..];
        }
        true
    }

    /// The bytes of the whole text that depend on the words of turn `index`.
    fn changed_range(&self, index: usize) -> Result<Range<usize>, Fault> {
        let mut start = self.text.len();
        let mut behind = self.text.len();
        for content in STAND_INS {
            let other = self.part(&self.with_stand_in(index, content), false)?;
            start = start.min(common_prefix(&self.text, &other));
            behind = behind.min(common_suffix(&self.text, &other));
        }
        // Where the words are empty, what is before and behind them may share characters.
        Ok(start..(self.text.len() - behind).max(start))
    }

    /// What the template writes behind the words of turn `index` when that is the last: its end of
    /// turn.
    fn tail(&self, index: usize) -> Result<String, Fault> {
        let content = STAND_INS[0];
        let text = self.part(&self.with_stand_in(index, content)[..=index], false)?;
        let at = text.rfind(content).ok_or_else(|| unmatched(index))?;
        Ok(text[at + content.len()..].to_string())
    }

    /// The messages, with nothing but `content` in place of what turn `index` says.
    fn with_stand_in(&self, index: usize, content: &str) -> Vec<Value> {
        let mut messages = self.messages.clone();
        let mut message = self.turns[index].message.clone();
        for key in ["tool_calls", "reasoning_content", "thinking"] {
            message.remove(key);
        }
        message.insert("content".to_string(), content.into());
        messages[index] = Value::from_serialize(&message);
        messages
    }

    fn part(&self, messages: &[Value], prompt: bool) -> Result<String, Fault> {
        self.renderer.text(messages, &self.tools, prompt)
    }
}

fn unmatched(index: usize) -> Fault {
    Fault::new(
        "a chat template in whose text each turn can be found",
        format!(
            "turn {} of the assistant, which overlaps another",
            index + 1
        ),
        "tokenize these rows yourself and give `input_ids` and `labels`",
    )
}

/// Bytes that both texts begin with, in whole characters.
fn common_prefix(a: &str, b: &str) -> usize {
    let pairs = a.chars().zip(b.chars());
    pairs
        .take_while(|(x, y)| x == y)
        .map(|(x, _)| x.len_utf8())
        .sum()
}

/// Bytes that both texts end with, in whole characters.
fn common_suffix(a: &str, b: &str) -> usize {
    let pairs = a.chars().rev().zip(b.chars().rev());
    pairs
        .take_while(|(x, y)| x == y)
        .map(|(x, _)| x.len_utf8())
        .sum()
}

fn fault(expected: &str, error: &minijinja::Error) -> Fault {
    let mut got = match error.detail() {
        Some(detail) => detail.to_string(),
        None => error.kind().to_string(),
    };
    if let Some(line) = error.line() {
        got.push_str(&format!(" (template line {line})"));
    }
    Fault::new(
        expected,
        printable(&got),
        "correct the row, or the template beside tokenizer.json",
    )
}

/// The source with `{% generation %}` and `{% endgeneration %}` as an `if` that is always true:
/// their white-space control stays as it was.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(length) = tag.find("%}").map(|end| end + 2) else {
            rest = tag;
            break;
        };
        let name = tag[2..length - 2].trim_matches(|c: char| c.is_whitespace() || "-+".contains(c));
        match name {
            "generation" => out.push_str(&tag[..length].replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag[..length].replacen("endgeneration", "endif", 1)),
            _ => out.push_str(&tag[..length]),
        }
        rest = &tag[length..];
    }
    out.push_str(rest);
    out
}

/// `{{ value }}` as Python's `str` has it.
fn print_as_python(out: &mut Output, _: &State, value: &Value) -> Result<(), minijinja::Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(()),
        ValueKind::String => out
            .write_str(value.as_str().unwrap_or_default())
            .map_err(Into::into),
        _ => {
            let mut text = String::new();
            python_repr(value, &mut text)?;
            out.write_str(&text).map_err(Into::into)
        }
    }
}

/// Python's `repr` of a JSON-like value.
fn python_repr(value: &Value, out: &mut String) -> Result<(), minijinja::Error> {
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if !value.is_integer() => {
            out.push_str(&python_float(f64::try_from(value.clone())?))
        }
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            let quote = if text.contains('\'') && !text.contains('"') {
                '"'
            } else {
                '\''
            };
            out.push(quote);
            for c in text.chars() {
                match c {
                    '\\' => out.push_str("\\\\"),
                    '\n' => out.push_str("\\n"),
                    '\r' => out.push_str("\\r"),
                    '\t' => out.push_str("\\t"),
                    c if c == quote => out.extend(['\\', c]),
                    c if c.is_control() && u32::from(c) < 256 => {
                        out.push_str(&format!("\\x{:02x}", u32::from(c)))
                    }
                    c => out.push(c),
                }
            }
            out.push(quote);
        }
        ValueKind::Seq => {
            out.push('[');
            for (index, item) in value.try_iter()?.enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                python_repr(&item, out)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                python_repr(&key, out)?;
                out.push_str(": ");
                python_repr(&value.get_item(&key)?, out)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// `value | tojson(indent=…)` as Python's `json.dumps(value, ensure_ascii=False)` writes it.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    let json = serde_json::to_value(value).map_err(|error| {
        minijinja::Error::new(ErrorKind::BadSerialization, "tojson").with_source(error)
    })?;
    let mut out = String::new();
    write_json(&json, indent, 0, &mut out);
    Ok(Value::from_safe_string(out))
}

fn write_json(json: &serde_json::Value, indent: Option<usize>, depth: usize, out: &mut String) {
    use serde_json::Value as Json;
    let line = |out: &mut String, depth: usize| {
        if let Some(width) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', width.min(64) * depth));
        }
    };
    let comma = if indent.is_some() { "," } else { ", " };
    match json {
        Json::Array(items) if !items.is_empty() => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                out.push_str(if index > 0 { comma } else { "" });
                line(out, depth + 1);
                write_json(item, indent, depth + 1, out);
            }
            line(out, depth);
            out.push(']');
        }
        Json::Object(entries) if !entries.is_empty() => {
            out.push('{');
            for (index, (key, item)) in entries.iter().enumerate() {
                out.push_str(if index > 0 { comma } else { "" });
                line(out, depth + 1);
                out.push_str(&Json::String(key.clone()).to_string());
                out.push_str(": ");
                write_json(item, indent, depth + 1, out);
            }
            line(out, depth);
            out.push('}');
        }
        Json::Number(number) if number.is_f64() => {
            out.push_str(&python_float(number.as_f64().unwrap_or(0.0)))
        }
        plain => out.push_str(&plain.to_string()),
    }
}

/// Python's `repr` of a float: the shortest digits that give it back; an exponent below 1e-4 and
/// from 1e16 on.
fn python_float(value: f64) -> String {
    if !value.is_finite() {
        let name = if value.is_nan() { "NaN" } else { "Infinity" };
        return format!("{}{name}", if value < 0.0 { "-" } else { "" });
    }
    let size = value.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').expect("{:e} writes one");
        let (sign, power) = match exponent.strip_prefix('-') {
            Some(power) => ('-', power),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{power:0>2}");
    }
    format!("{value:?}")
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

/// Unix seconds by Python's `strftime`, UTC; a letter that is not known stays as it is.
fn strftime(unix_seconds: i64, format: &str) -> String {
    let (days, second) = (
        unix_seconds.div_euclid(86_400),
        unix_seconds.rem_euclid(86_400),
    );
    let (year, month, day) = civil_date(days);
    let weekday = DAYS[usize::try_from((days + 4).rem_euclid(7)).unwrap_or(0)];
    let name = MONTHS[usize::try_from(month - 1).unwrap_or(0)];
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(c) = letters.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match letters.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", year.rem_euclid(100))),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('B') => out.push_str(name),
            Some('b') => out.push_str(&name[..3]),
            Some('A') => out.push_str(weekday),
            Some('a') => out.push_str(&weekday[..3]),
            Some('H') => out.push_str(&format!("{hour:02}")),
            Some('M') => out.push_str(&format!("{minute:02}")),
            Some('S') => out.push_str(&format!("{second:02}")),
            Some('F') => out.push_str(&format!("{year}-{month:02}-{day:02}")),
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

/// Days since 1970-01-01 as (year, month, day): years are counted from March, so that the leap day
/// comes last; 400 years are 146,097 days.
fn civil_date(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let (era, of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}
