//! Chat templates: a conversation to text, and which of its bytes are the assistant's.
//!
//! - Rendering equals transformers' `apply_chat_template` byte for byte: `trim_blocks`,
//!   `lstrip_blocks`, Python's spelling of printed values and of `tojson`, Python's string methods.
//! - Where the template marks what the assistant wrote by `{% generation %}`, that is the mask, as
//!   in transformers. Elsewhere an assistant turn is the text between "the turns before it, with
//!   the generation prompt" and "the turns up to it", so its end-of-turn token is trained on and
//!   its header is not.
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

use minijinja::value::Value;
use minijinja::{Environment, ErrorKind, context};

use super::formats::{Conversation, Fault, Turn};
use super::python::{print_as_python, strftime, to_json};
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
            source: with_generation_filter(source),
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
        environment.add_filter("generation", |text: String| {
            Value::from_safe_string(format!("{}{text}{}", MARKS[0], MARKS[1]))
        });
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
        let (text, marked) = without_marks(&self.marked_text(&messages, &tools, false)?);
        if let Some(trained) = of_assistant(&conversation.turns, marked) {
            return Ok(Rendered { text, trained });
        }
        let whole = Whole {
            renderer: self,
            turns: &conversation.turns,
            text,
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
        Ok(without_marks(&self.marked_text(messages, tools, prompt)?).0)
    }

    fn marked_text(
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

/// The ranges that the template marked, less those of turns that are not trained on; `None` where
/// it marked none, or where a range cannot be told to be a turn's.
fn of_assistant(turns: &[Turn], marked: Vec<Range<usize>>) -> Option<Vec<Range<usize>>> {
    let assistant = turns.iter().filter(|turn| turn.role == "assistant");
    let trained: Vec<bool> = assistant.map(|turn| turn.trained).collect();
    if marked.is_empty() {
        return None;
    }
    if marked.len() == trained.len() {
        let both = marked.into_iter().zip(trained);
        return Some(
            both.filter_map(|(range, trained)| trained.then_some(range))
                .collect(),
        );
    }
    trained.into_iter().all(|trained| trained).then_some(marked)
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

/// Around what stands within `{% generation %}`: no text has these characters.
const MARKS: [char; 2] = ['\u{10fffe}', '\u{10ffff}'];

/// The source with `{% generation %}` and `{% endgeneration %}` as a filter that puts [`MARKS`]
/// around what is between: their white-space control stays as it was.
fn with_generation_filter(source: &str) -> String {
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
            "generation" => out.push_str(&tag[..length].replacen(name, "filter generation", 1)),
            "endgeneration" => out.push_str(&tag[..length].replacen(name, "endfilter", 1)),
            _ => out.push_str(&tag[..length]),
        }
        rest = &tag[length..];
    }
    out.push_str(rest);
    out
}

/// The text without [`MARKS`], and the ranges that they stood around.
fn without_marks(text: &str) -> (String, Vec<Range<usize>>) {
    let (mut plain, mut ranges) = (String::with_capacity(text.len()), Vec::new());
    let mut start = 0;
    for c in text.chars() {
        if c == MARKS[0] {
            start = plain.len();
        } else if c == MARKS[1] {
            ranges.push(start..plain.len());
        } else {
            plain.push(c);
        }
    }
    (plain, ranges)
}
