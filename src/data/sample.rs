//! Rows to tokens, with a flag for each token that is trained on.
//!
//! - A conversation is rendered whole and tokenized once; a token is trained on when it begins
//!   within a turn of the assistant. So the ids are those of transformers, and a token across a
//!   border counts to the side that it begins on.
//! - A document ends with the end-of-text token, where the tokenizer has one.
//!
//! Not here: lengths (`Dataset` refuses, cuts or splits), files (`source`).

use super::formats::{Conversation, Fault, Row};
use super::templates::{Rendered, Renderer};
use super::tokenize::TextTokenizer;

/// The tokens of one row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Token ids.
    pub ids: Vec<u32>,
    /// As long as `ids`: loss is taken where the token is predicted.
    pub trained: Vec<bool>,
    /// A document, which is split where it is too long.
    pub splits: bool,
}

/// Makes samples of rows; one a thread.
pub struct Sampler<'a> {
    tokenizer: Option<&'a TextTokenizer>,
    renderer: Option<Renderer<'a>>,
    vocab_size: u64,
}

impl<'a> Sampler<'a> {
    /// A sampler with the model's tokenizer, where there is one.
    pub fn new(
        tokenizer: Option<&'a TextTokenizer>,
        vocab_size: u64,
    ) -> Result<Sampler<'a>, Fault> {
        let template = tokenizer.and_then(TextTokenizer::template);
        Ok(Sampler {
            tokenizer,
            renderer: template.map(|template| template.renderer()).transpose()?,
            vocab_size,
        })
    }

    /// Tokens of `row`; none at all for an empty document.
    pub fn sample(&self, row: Row) -> Result<Sample, Fault> {
        match row {
            Row::Chat(conversation) => self.chat(&conversation),
            Row::Prompt { prompt, completion } if self.renderer.is_some() => {
                self.chat(&Conversation::exchange(prompt, completion))
            }
            Row::Prompt { prompt, completion } => self.plain(&prompt, &completion),
            Row::Text(text) if text.is_empty() => Ok(Sample::default()),
            Row::Text(text) => {
                let ids = self.tokenizer()?.document(&text)?;
                Ok(Sample {
                    trained: vec![true; ids.len()],
                    ids,
                    splits: true,
                })
            }
            Row::Tokens { ids, trained } => self.tokens(ids, trained),
        }
    }

    fn tokenizer(&self) -> Result<&'a TextTokenizer, Fault> {
        self.tokenizer.ok_or_else(|| {
            Fault::new(
                "`input_ids`, as the model has no tokenizer",
                "a row of text",
                "put tokenizer.json into the model's directory",
            )
        })
    }

    fn chat(&self, conversation: &Conversation) -> Result<Sample, Fault> {
        let tokenizer = self.tokenizer()?;
        let Some(renderer) = &self.renderer else {
            return Err(Fault::new(
                "a chat template for a conversation",
                "a tokenizer without one",
                "put chat_template.jinja beside tokenizer.json, or give rows of prompt and \
                 completion",
            ));
        };
        masked(tokenizer, &renderer.render(conversation)?)
    }

    /// Prompt and completion one after the other, then the end: for a model without a template.
    fn plain(&self, prompt: &str, completion: &str) -> Result<Sample, Fault> {
        let tokenizer = self.tokenizer()?;
        let text = format!("{prompt}{completion}");
        let trained = std::iter::once(prompt.len()..text.len()).collect();
        let body = masked(tokenizer, &Rendered { text, trained })?;
        let leading = tokenizer.leading_ids()?;
        let mut sample = Sample {
            trained: vec![false; leading.len()],
            ids: leading,
            splits: false,
        };
        sample.ids.extend(body.ids);
        sample.trained.extend(body.trained);
        if let Some(eos) = tokenizer.eos() {
            sample.ids.push(eos);
            sample.trained.push(true);
        }
        Ok(sample)
    }

    fn tokens(&self, ids: Vec<u64>, trained: Vec<bool>) -> Result<Sample, Fault> {
        let mut narrow = Vec::with_capacity(ids.len());
        for (index, &id) in ids.iter().enumerate() {
            let fits = u32::try_from(id).ok().filter(|_| id < self.vocab_size);
            narrow.push(fits.ok_or_else(|| {
                Fault::new(
                    format!("ids below {}, the model's vocabulary", self.vocab_size),
                    format!("{id} in `input_ids` at {index}"),
                    "tokenize with the model's own tokenizer",
                )
            })?);
        }
        Ok(Sample {
            ids: narrow,
            trained,
            splits: false,
        })
    }
}

/// The text's tokens; trained on are those that begin within its ranges.
fn masked(tokenizer: &TextTokenizer, rendered: &Rendered) -> Result<Sample, Fault> {
    let (ids, starts) = tokenizer.ids_and_starts(&rendered.text)?;
    let mut ranges = rendered.trained.iter().peekable();
    let trained = starts.iter().map(|&start| {
        while ranges.peek().is_some_and(|range| range.end <= start) {
            ranges.next();
        }
        ranges.peek().is_some_and(|range| range.start <= start)
    });
    Ok(Sample {
        trained: trained.collect(),
        ids,
        splits: false,
    })
}
