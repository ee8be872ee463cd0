//! The data that is built in: an English text of 357 kB and its tokenizer of 1,024 tokens, so that
//! a run needs no file at all. Where they come from and under which licence:
//! `quickstart/README.md`.

use super::TextTokenizer;
use crate::error::Result;

const TEXT: &str = include_str!("quickstart/text.txt");
const TOKENIZER_JSON: &[u8] = include_bytes!("quickstart/tokenizer.json");
const TOKENIZER_CONFIG: &[u8] = include_bytes!("quickstart/tokenizer_config.json");

/// Vocabulary of [`tokenizer`].
pub const VOCAB_SIZE: u64 = 1024;

/// The tokenizer: byte-level BPE with a ChatML-like chat template; `<|endoftext|>` ends a text.
pub fn tokenizer() -> Result<TextTokenizer> {
    TextTokenizer::from_bytes(TOKENIZER_JSON, TOKENIZER_CONFIG)
}

/// The bytes of tokenizer.json and tokenizer_config.json, to write beside an exported model.
pub fn tokenizer_files() -> [(&'static str, &'static [u8]); 2] {
    [
        ("tokenizer.json", TOKENIZER_JSON),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
    ]
}

/// The whole text.
pub fn text() -> &'static str {
    TEXT
}

/// The text to train on: all but its last twentieth.
pub fn train_text() -> &'static str {
    &TEXT[..held_out_start()]
}

/// The last twentieth of the text, for evaluation; it begins with a verse.
pub fn held_out_text() -> &'static str {
    &TEXT[held_out_start()..]
}

fn held_out_start() -> usize {
    let at = TEXT.len() - TEXT.len() / 20;
    TEXT[at..]
        .find('\n')
        .map_or(TEXT.len(), |line_end| at + line_end + 1)
}

/// Entropy, in nats a token, of `ids` under their own frequencies: the loss of the best guess that
/// looks at no context. 0 for no ids.
pub fn unigram_entropy(ids: &[u32]) -> f64 {
    let (_, starts, _) = super::sorted_tokens(ids);
    let total = ids.len() as f64;
    starts
        .windows(2)
        .map(|pair| f64::from(pair[1] - pair[0]) / total)
        .map(|share| -share * share.ln())
        .sum()
}
