//! Words that were tokenized before: most of a text is words that came already.
//!
//! - A text is cut before each single space that stands between two visible characters. For the
//!   tokenizers that [`Cuts::of`] knows, the ids of a text are those of these pieces one after the
//!   other: no token reaches over such a place. Others are left alone.
//! - A [`WordCache`] keeps ids and starts of short pieces; a piece that is not there goes through
//!   the tokenizer. So what comes out never depends on what the cache holds.
//! - Bounded: [`WORDS_MAX`] pieces of at most [`WORD_BYTES_MAX`] bytes.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use serde_json::Value;
use tokenizers::{ModelWrapper, Tokenizer};
use twox_hash::XxHash3_64;

/// Most pieces of a cache; a full one is emptied.
const WORDS_MAX: usize = 1 << 17;
/// Most bytes of a piece that is kept.
const WORD_BYTES_MAX: usize = 48;

/// Patterns that split a text so that a space before a visible character begins a piece: GPT-2's,
/// Qwen2's and Llama 3's.
const PATTERNS: [&str; 3] = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
];

/// What Metaspace writes for a space.
const METASPACE: char = '\u{2581}';

/// Where texts of a tokenizer may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cuts {
    /// Before a single space between visible characters.
    Spaces,
    /// There, and after a line end between a visible character and an ASCII letter or digit.
    SpacesAndLines,
}

impl Cuts {
    /// Where texts of `tokenizer` may be cut; `None` where nothing is known of it.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Cuts> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else {
            return None;
        };
        if model.dropout.is_some_and(|dropout| dropout > 0.0) {
            return None;
        }
        let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
        if !normalizer.is_null() && normalizer["type"] != "NFC" {
            return None;
        }
        // A token that a person added is found before all else: none may reach over a cut, or
        // take the white space behind it.
        let added = tokenizer.get_added_tokens_decoder();
        if added
            .values()
            .any(|token| token.rstrip || cut_after(&token.content, 0).is_some())
        {
            return None;
        }
        let splitter = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
        if splitter["type"] == "Metaspace" {
            let replacement = splitter["replacement"].as_str()?;
            let apart = replacement.chars().eq([METASPACE])
                && tokenizer.get_vocab(false).keys().all(|token| apart(token))
                && tokenizer.token_to_id("\u{2581}").is_some();
            return apart.then_some(Cuts::Spaces);
        }
        splits_words(&splitter).then_some(Cuts::SpacesAndLines)
    }

    /// Where the piece of `text` ends that begins at `start`.
    fn piece_end(self, text: &str, start: usize) -> usize {
        let bytes = text.as_bytes();
        let mut at = start + 1;
        while at < bytes.len() {
            let cut = match bytes[at] {
                b' ' => is_cut(text, at),
                b'\n' if self == Cuts::SpacesAndLines && is_line_cut(bytes, at) => {
                    return at + 1;
                }
                _ => false,
            };
            if cut {
                return at;
            }
            at += 1;
        }
        bytes.len()
    }
}

/// Whether the pre-tokenizer is byte-level with one of [`PATTERNS`], alone or after `Digits`.
fn splits_words(splitter: &Value) -> bool {
    let one = std::slice::from_ref(splitter);
    let steps = match splitter["type"].as_str() {
        Some("Sequence") => splitter["pretokenizers"]
            .as_array()
            .map_or(one, Vec::as_slice),
        _ => one,
    };
    let steps = match steps {
        [first, rest @ ..] if first["type"] == "Digits" => rest,
        _ => steps,
    };
    let byte_level = |step: &Value, by_pattern: bool| {
        step["type"] == "ByteLevel"
            && step["use_regex"] == by_pattern
            && step["add_prefix_space"] == false
    };
    match steps {
        [only] => byte_level(only, true),
        [split, last] => {
            let pattern = split["pattern"]["Regex"].as_str().unwrap_or_default();
            split["type"] == "Split"
                && split["behavior"] == "Isolated"
                && split["invert"] == false
                && PATTERNS.contains(&pattern)
                && byte_level(last, false)
        }
        _ => false,
    }
}

/// Whether no space stands behind another character in a token of Metaspace's.
fn apart(token: &str) -> bool {
    !token.trim_start_matches(METASPACE).contains(METASPACE)
}

/// The first cut of `text` behind `start`.
fn cut_after(text: &str, start: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    (start + 1..bytes.len()).find(|&at| bytes[at] == b' ' && is_cut(text, at))
}

/// Whether the space at `at` stands between two visible characters.
fn is_cut(text: &str, at: usize) -> bool {
    let visible = |c: char| !c.is_whitespace() && c != METASPACE;
    let bytes = text.as_bytes();
    let (Some(&before), Some(&behind)) = (bytes.get(at.wrapping_sub(1)), bytes.get(at + 1)) else {
        return false;
    };
    if before.is_ascii() && behind.is_ascii() {
        return before.is_ascii_graphic() && behind.is_ascii_graphic();
    }
    text[..at].chars().next_back().is_some_and(visible)
        && text[at + 1..].chars().next().is_some_and(visible)
}

fn is_line_cut(bytes: &[u8], at: usize) -> bool {
    bytes[at - 1].is_ascii_graphic() && bytes.get(at + 1).is_some_and(u8::is_ascii_alphanumeric)
}

/// Keys are hashed by `xxh3` already.
#[derive(Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = XxHash3_64::oneshot(bytes);
    }

    fn write_u8(&mut self, _: u8) {}
}

/// Ids of one piece, with the byte in it at which each begins.
type Word = Box<[(u32, u8)]>;

/// Pieces that were tokenized before; one a thread.
#[derive(Default)]
pub(super) struct WordCache {
    words: HashMap<Box<str>, Word, BuildHasherDefault<Hashed>>,
}

impl WordCache {
    /// Calls `sink` with each id of `text` and the byte at which it begins. `encode` is the
    /// tokenizer for one piece.
    pub(super) fn tokenize<E>(
        &mut self,
        text: &str,
        cuts: Cuts,
        encode: impl Fn(&str) -> Result<(Vec<u32>, Vec<usize>), E>,
        mut sink: impl FnMut(u32, usize),
    ) -> Result<(), E> {
        let mut start = 0;
        while start < text.len() {
            let end = cuts.piece_end(text, start);
            let piece = &text[start..end];
            if let Some(word) = self.words.get(piece) {
                for &(id, at) in word {
                    sink(id, start + usize::from(at));
                }
            } else {
                let (ids, starts) = encode(piece)?;
                for (&id, &at) in ids.iter().zip(&starts) {
                    sink(id, start + at);
                }
                // The first piece may be written differently there than elsewhere.
                if start > 0 && piece.len() <= WORD_BYTES_MAX {
                    self.keep(piece, &ids, &starts);
                }
            }
            start = end;
        }
        Ok(())
    }

    fn keep(&mut self, piece: &str, ids: &[u32], starts: &[usize]) {
        if self.words.len() == WORDS_MAX {
            self.words.clear();
        }
        let narrow = |&at: &usize| u8::try_from(at).unwrap_or(u8::MAX);
        let word = ids.iter().copied().zip(starts.iter().map(narrow)).collect();
        self.words.insert(piece.into(), word);
    }
}
