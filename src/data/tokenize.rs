//! The model's own tokenizer: text to ids and back, with its chat template and special tokens.
//!
//! - Ids equal those of transformers for the same `tokenizer.json`: truncation and padding that
//!   the file asks for are off, special tokens are added only where asked.
//! - Every id that can come out is below the model's vocabulary: checked once, at load.
//! - A long document is tokenized in pieces by several threads. A piece ends where a line ends;
//!   each seam is proven by tokenizing across it, and where one proof fails the document is
//!   tokenized whole.
//! - Words that came before are not tokenized again, where that is the same (`words`).
//!
//! Not here: which tokens are trained on (`sample`), what a conversation looks like (`templates`).

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;
use serde_json::Value;
use tokenizers::{PostProcessor, PostProcessorWrapper, Tokenizer};
use twox_hash::XxHash3_128;

use super::formats::Fault;
use super::templates::ChatTemplate;
use super::words::{Cuts, WordCache};
use crate::error::{Error, Result, printable};

/// Most bytes of a tokenizer.json.
pub const TOKENIZER_BYTES_MAX: u64 = 64 << 20;
/// Most bytes of each file beside it.
const SETTINGS_BYTES_MAX: u64 = 4 << 20;
/// Least bytes of a piece of a document.
const PIECE_BYTES: usize = 64 << 10;
/// Bytes on either side of a seam that are tokenized across it.
const SEAM_BYTES: usize = 256;

/// A tokenizer, its special tokens and its chat template.
pub struct TextTokenizer {
    tokenizer: Tokenizer,
    /// Kept apart: it moves offsets, which the mask of a conversation is made from.
    post_processor: Option<PostProcessorWrapper>,
    template: Option<ChatTemplate>,
    eos: Option<u32>,
    eos_ids: Vec<u32>,
    ids_end: u64,
    /// Of tokenizer.json, tokenizer_config.json and the template.
    files_hash: u128,
    /// Where a text may be cut into words.
    cuts: Option<Cuts>,
    /// As many as there were threads at once.
    caches: Mutex<Vec<WordCache>>,
}

impl std::fmt::Debug for TextTokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TextTokenizer")
            .field("ids_end", &self.ids_end)
            .field("eos_ids", &self.eos_ids)
            .finish()
    }
}

impl TextTokenizer {
    /// The tokenizer in `model_dir`: `tokenizer.json` and, where they are, `chat_template.jinja`,
    /// `tokenizer_config.json` and `generation_config.json`. Ids must be below `vocab_size`.
    pub fn load(model_dir: &Path, vocab_size: u64) -> Result<TextTokenizer> {
        let path = model_dir.join("tokenizer.json");
        let json = read_capped(&path, TOKENIZER_BYTES_MAX)?.ok_or_else(|| {
            Error::input(
                "tokenizer",
                model_dir.display().to_string(),
                "tokenizer.json",
                "a directory without one",
                "copy it from the model's repository, or give rows of `input_ids`",
            )
        })?;
        let optional = |name: &str| read_capped(&model_dir.join(name), SETTINGS_BYTES_MAX);
        let config = optional("tokenizer_config.json")?.unwrap_or_else(|| b"{}".to_vec());
        let template = optional("chat_template.jinja")?;
        let mut loaded = TextTokenizer::build(
            &json,
            &config,
            template.as_deref(),
            &path.display().to_string(),
        )?;
        loaded.check_vocabulary(vocab_size, &path.display().to_string())?;
        if let Some(generation) = optional("generation_config.json")? {
            let place = model_dir
                .join("generation_config.json")
                .display()
                .to_string();
            loaded.add_generation_eos(&parse_json(&generation, &place)?);
        }
        Ok(loaded)
    }

    /// A tokenizer from the bytes of its tokenizer.json and tokenizer_config.json.
    pub fn from_bytes(tokenizer_json: &[u8], config_json: &[u8]) -> Result<TextTokenizer> {
        TextTokenizer::build(tokenizer_json, config_json, None, "tokenizer.json")
    }

    fn build(
        json: &[u8],
        config: &[u8],
        template: Option<&[u8]>,
        place: &str,
    ) -> Result<TextTokenizer> {
        let wrong = |error: tokenizers::Error| {
            Error::input(
                "tokenizer",
                place,
                "a tokenizer of the tokenizers library",
                printable(&error.to_string()),
                "copy it again from the model's repository",
            )
        };
        // The library panics where a decoder is not JSON, its strings too.
        parse_json(json, place)?;
        let mut files_hash = XxHash3_128::new();
        for bytes in [json, config, template.unwrap_or_default()] {
            files_hash.write(&bytes.len().to_le_bytes());
            files_hash.write(bytes);
        }
        let mut tokenizer = Tokenizer::from_bytes(json).map_err(wrong)?;
        tokenizer.with_truncation(None).map_err(wrong)?;
        tokenizer.with_padding(None);
        let post_processor = tokenizer.get_post_processor().cloned();
        tokenizer.with_post_processor(None::<PostProcessorWrapper>);
        let largest = tokenizer.get_vocab(true).into_values().max();
        let cuts = Cuts::of(&tokenizer);
        let config = parse_json(config, place)?;
        let special = special_tokens(&config);
        let eos = eos_of(&tokenizer, &special, place)?;
        let source = match template {
            Some(bytes) => Some(String::from_utf8(bytes.to_vec()).map_err(|_| {
                Error::input(
                    "chat template",
                    place,
                    "UTF-8",
                    "other bytes",
                    "save it as UTF-8",
                )
            })?),
            None => template_of(&config),
        };
        let template = match source {
            Some(source) => Some(
                ChatTemplate::new(&source, special)
                    .map_err(|fault| fault.at("chat template", place))?,
            ),
            None => None,
        };
        Ok(TextTokenizer {
            tokenizer,
            post_processor,
            template,
            eos,
            eos_ids: eos.into_iter().collect(),
            ids_end: largest.map_or(0, |id| u64::from(id) + 1),
            files_hash: files_hash.finish_128(),
            cuts,
            caches: Mutex::default(),
        })
    }

    fn check_vocabulary(&self, vocab_size: u64, place: &str) -> Result<()> {
        if self.ids_end <= vocab_size {
            return Ok(());
        }
        Err(Error::input(
            "tokenizer",
            place,
            format!("ids below {vocab_size}, the model's vocabulary"),
            format!(
                "id {}: a tokenizer that does not belong to the model",
                self.ids_end - 1
            ),
            "take config.json and tokenizer.json from the same model",
        ))
    }

    /// Ids that end a generation may be more than the tokenizer's own end: a number or a list.
    fn add_generation_eos(&mut self, generation: &Value) {
        let listed = match generation.get("eos_token_id") {
            Some(Value::Array(list)) => list.clone(),
            Some(one) => vec![one.clone()],
            None => Vec::new(),
        };
        for id in listed.iter().filter_map(Value::as_u64) {
            let id = u32::try_from(id).unwrap_or(u32::MAX);
            if u64::from(id) < self.ids_end && !self.eos_ids.contains(&id) {
                self.eos_ids.push(id);
            }
        }
    }

    /// Ids of `text`. `add_special` adds what the model expects around a text, such as a first
    /// token; a rendered conversation has it already.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        self.ids_of(text, add_special)
            .map_err(|fault| fault.at("tokenizer", "text"))
    }

    /// The text of `ids`; those of no token are left out.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.tokenizer
            .decode(ids, skip_special)
            .map_err(|error| tokenizer_fault(&error).at("tokenizer", "ids"))
    }

    /// Ids that end a text when it is generated.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// The id that ends a document.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// One more than the largest id.
    pub fn ids_end(&self) -> u64 {
        self.ids_end
    }

    /// The chat template, where the model has one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// Sets the date that a chat template may print, in Unix seconds.
    pub fn set_date(&mut self, unix_seconds: i64) {
        if let Some(template) = &mut self.template {
            template.set_date(unix_seconds);
        }
    }

    /// Ids of `text`, as [`TextTokenizer::encode`].
    pub(super) fn ids_of(&self, text: &str, add_special: bool) -> Result<Vec<u32>, Fault> {
        let Some(cuts) = self.cuts else {
            return self.ids_of_whole(text, add_special);
        };
        let (before, behind) = match add_special {
            true => self.affixes()?,
            false => Default::default(),
        };
        let mut ids = Vec::with_capacity(before.len() + text.len() / 4 + behind.len());
        ids.extend(before);
        self.words(text, cuts, |id, _| ids.push(id))?;
        ids.extend(behind);
        Ok(ids)
    }

    fn ids_of_whole(&self, text: &str, add_special: bool) -> Result<Vec<u32>, Fault> {
        let mut encoding = self
            .tokenizer
            .encode_fast(text, false)
            .map_err(|error| tokenizer_fault(&error))?;
        if add_special && let Some(post) = &self.post_processor {
            encoding = post
                .process(encoding, None, true)
                .map_err(|error| tokenizer_fault(&error))?;
        }
        Ok(encoding.get_ids().to_vec())
    }

    /// Ids of `text` with the byte at which each begins, nothing added.
    pub(super) fn ids_and_starts(&self, text: &str) -> Result<(Vec<u32>, Vec<usize>), Fault> {
        let Some(cuts) = self.cuts else {
            return self.encode_piece(text);
        };
        let (mut ids, mut starts) = (Vec::new(), Vec::new());
        self.words(text, cuts, |id, start| {
            ids.push(id);
            starts.push(start);
        })?;
        Ok((ids, starts))
    }

    fn words(&self, text: &str, cuts: Cuts, sink: impl FnMut(u32, usize)) -> Result<(), Fault> {
        let lock = || self.caches.lock().unwrap_or_else(PoisonError::into_inner);
        let mut cache = lock().pop().unwrap_or_default();
        let done = cache.tokenize(text, cuts, |piece| self.encode_piece(piece), sink);
        lock().push(cache);
        done
    }

    fn encode_piece(&self, text: &str) -> Result<(Vec<u32>, Vec<usize>), Fault> {
        let encoding = self
            .tokenizer
            .encode(text, false)
            .map_err(|error| tokenizer_fault(&error))?;
        let starts = encoding.get_offsets().iter().map(|offsets| offsets.0);
        Ok((encoding.get_ids().to_vec(), starts.collect()))
    }

    /// The ids that the model expects before any text.
    pub(super) fn leading_ids(&self) -> Result<Vec<u32>, Fault> {
        Ok(self.affixes()?.0)
    }

    /// What special tokens add before and behind a text.
    fn affixes(&self) -> Result<(Vec<u32>, Vec<u32>), Fault> {
        let (whole, plain) = (
            self.ids_of_whole("a", true)?,
            self.ids_of_whole("a", false)?,
        );
        let at = (0..whole.len()).find(|&at| whole[at..].starts_with(&plain));
        let (before, rest) = whole.split_at(at.unwrap_or(0));
        let behind = if at.is_some() {
            &rest[plain.len()..]
        } else {
            &[]
        };
        Ok((before.to_vec(), behind.to_vec()))
    }

    /// Ids of a document: what the model expects first, the text, and its end.
    pub(super) fn document(&self, text: &str) -> Result<Vec<u32>, Fault> {
        let mut ids = match self.pieces(text)? {
            Some(ids) => [self.leading_ids()?, ids].concat(),
            None => self.ids_of(text, true)?,
        };
        if let Some(eos) = self.eos
            && ids.last() != Some(&eos)
        {
            ids.push(eos);
        }
        Ok(ids)
    }

    /// Whether a long text may be tokenized part by part, each after the end of a line.
    pub(super) fn cuts_lines(&self) -> bool {
        self.cuts == Some(Cuts::SpacesAndLines)
    }

    /// Ids of a part of a document, which begins or ends it or both.
    pub(super) fn document_piece(
        &self,
        text: &str,
        first: bool,
        last: bool,
    ) -> Result<Vec<u32>, Fault> {
        let mut ids = if first {
            self.leading_ids()?
        } else {
            Vec::new()
        };
        match self.pieces(text)? {
            Some(pieces) => ids.extend(pieces),
            None => ids.extend(self.ids_of(text, false)?),
        }
        if let Some(eos) = self.eos.filter(|eos| last && ids.last() != Some(eos)) {
            ids.push(eos);
        }
        Ok(ids)
    }

    /// A checksum of the files that it was made from and of the date that a template may print.
    pub(super) fn fingerprint(&self) -> u128 {
        let date = self.template.as_ref().map_or(0, ChatTemplate::date);
        XxHash3_128::oneshot(format!("{:032x} {date}", self.files_hash).as_bytes())
    }

    /// Ids of a long text, piece by piece; `None` where it is short or a seam would show.
    fn pieces(&self, text: &str) -> Result<Option<Vec<u32>>, Fault> {
        let seams = seams(text);
        if seams.is_empty() {
            return Ok(None);
        }
        let proven = seams
            .par_iter()
            .map(|&at| self.seam_holds(text, at))
            .collect::<Result<Vec<_>, _>>()?;
        if !proven.into_iter().all(|holds| holds) {
            return Ok(None);
        }
        let ends: Vec<usize> = seams.iter().copied().chain([text.len()]).collect();
        let starts = [&[0], &seams[..]].concat();
        let pieces = starts
            .par_iter()
            .zip(&ends)
            .map(|(&start, &end)| self.ids_of(&text[start..end], false))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Some(pieces.concat()))
    }

    /// Tokenizing across `at` gives the same as up to it and from it.
    fn seam_holds(&self, text: &str, at: usize) -> Result<bool, Fault> {
        let left = text.floor_char_boundary(at.saturating_sub(SEAM_BYTES));
        let right = text.ceil_char_boundary((at + SEAM_BYTES).min(text.len()));
        let mut apart = self.ids_of(&text[left..at], false)?;
        apart.extend(self.ids_of(&text[at..right], false)?);
        Ok(apart == self.ids_of(&text[left..right], false)?)
    }
}

/// Places at which a long text may be cut: after a single line end that stands between a visible
/// character and an ASCII letter or digit, at least [`PIECE_BYTES`] apart.
fn seams(text: &str) -> Vec<usize> {
    let bytes = text.as_bytes();
    let mut seams = Vec::new();
    let mut at = PIECE_BYTES;
    while at < bytes.len() {
        let cut = bytes[at - 1] == b'\n'
            && !bytes[at - 2].is_ascii_whitespace()
            && bytes[at - 2].is_ascii()
            && bytes[at].is_ascii_alphanumeric();
        if cut {
            seams.push(at);
            at += PIECE_BYTES;
        } else {
            at += 1;
        }
    }
    seams
}

/// The id that ends a document, where tokenizer_config.json names one.
fn eos_of(tokenizer: &Tokenizer, special: &[(String, String)], place: &str) -> Result<Option<u32>> {
    let Some((_, text)) = special.iter().find(|(name, _)| name == "eos_token") else {
        return Ok(None);
    };
    tokenizer.token_to_id(text).map(Some).ok_or_else(|| {
        Error::input(
            "tokenizer",
            place,
            format!("the eos_token {} of tokenizer_config.json", printable(text)),
            "a vocabulary without it",
            "take both files from the same model",
        )
    })
}

fn tokenizer_fault(error: &tokenizers::Error) -> Fault {
    Fault::new(
        "a text that the tokenizer takes",
        printable(&error.to_string()),
        "correct the text",
    )
}

/// `bos_token` and the like, as (name, text): a text, or an object with `content`.
fn special_tokens(config: &Value) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for name in [
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
        "sep_token",
        "cls_token",
        "mask_token",
    ] {
        let value = config.get(name);
        let text =
            value.and_then(|value| value.as_str().or_else(|| value.get("content")?.as_str()));
        if let Some(text) = text {
            found.push((name.to_string(), text.to_string()));
        }
    }
    found
}

/// `chat_template`: a text, or a list of `{name, template}` of which `default` is taken.
fn template_of(config: &Value) -> Option<String> {
    match config.get("chat_template")? {
        Value::String(source) => Some(source.clone()),
        Value::Array(named) => {
            let default = named
                .iter()
                .find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"));
            Some(default?.get("template")?.as_str()?.to_string())
        }
        _ => None,
    }
}

fn parse_json(bytes: &[u8], place: &str) -> Result<Value> {
    serde_json::from_slice(bytes).map_err(|error| {
        Error::input(
            "tokenizer",
            place,
            "JSON",
            printable(&error.to_string()),
            "copy the file again",
        )
    })
}

/// The file's bytes, `None` where there is none; an error above `bytes_max`.
pub(super) fn read_capped(path: &Path, bytes_max: u64) -> Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("open", path, error)),
    };
    let metadata = file
        .metadata()
        .map_err(|error| Error::io("read", path, error))?;
    let mut bytes = Vec::new();
    if metadata.is_file() {
        file.take(bytes_max + 1)
            .read_to_end(&mut bytes)
            .map_err(|error| Error::io("read", path, error))?;
    }
    if !metadata.is_file() || bytes.len() as u64 > bytes_max {
        return Err(Error::input(
            "tokenizer",
            path.display().to_string(),
            format!("a file of at most {bytes_max} bytes"),
            if metadata.is_file() {
                format!("{} bytes", metadata.len())
            } else {
                "no plain file".to_string()
            },
            "take the file from the model's repository",
        ));
    }
    Ok(Some(bytes))
}
