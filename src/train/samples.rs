//! Samples of generated text between steps: printed by the tools, kept in samples.jsonl.
//!
//! - Sampling changes nothing of the training: it runs the forward-only schedule after all updates,
//!   as an evaluation does.
//! - The text depends on the weights, the prompt and the seed alone: after a resume it is what it
//!   would have been.
//! - Prompts are made when a run is prepared, so that one that cannot be is refused before memory
//!   is taken.

use std::path::Path;
use std::time::Instant;

use serde_json::json;

use super::lines::Lines;
use super::{Run, Trainer, model_dir};
use crate::config::RunConfig;
use crate::data::{Dataset, IGNORE, Micro, TextTokenizer};
use crate::error::{Error, Result};
use crate::generate::{Sampling, generate, prompt_ids};

/// Nucleus of samples.
const TOP_P: f64 = 0.9;
/// Tokens of a document that are its beginning.
const BEGINNING: usize = 12;
const FILE: &str = "samples.jsonl";

/// A text that a model in training wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Steps done.
    pub step: u64,
    /// What it continues.
    pub prompt: String,
    /// What it came to.
    pub text: String,
}

/// A text to continue.
pub(super) struct Prompt {
    text: String,
    ids: Vec<u32>,
}

impl Prompt {
    /// Those that `log` asks for; none where it asks for no samples.
    pub(super) fn all(
        config: &RunConfig,
        tokenizer: Option<&TextTokenizer>,
        dataset: &Dataset,
        eval: &[Micro],
    ) -> Result<Vec<Prompt>> {
        let log = &config.log;
        if log.sample_every == 0 {
            return Ok(Vec::new());
        }
        let tokenizer = tokenizer.ok_or_else(|| {
            let place = model_dir(config).map_or(String::new(), |dir| dir.display().to_string());
            let remedy = "copy the model's tokenizer there, or set log.sample_every = 0";
            Error::input("samples", place, "tokenizer.json", "none", remedy)
        })?;
        if log.sample_prompts.is_empty() {
            let ids = beginning(dataset, eval, config.data.seq_len)?;
            let text = tokenizer.decode(&ids, false)?;
            return Ok(vec![Prompt { text, ids }]);
        }
        let prompt = |text: &String| {
            let ids = prompt_ids(tokenizer, text, log.sample_chat, "log.sample_prompts")?;
            let longest = config.data.seq_len - 1;
            if ids.is_empty() || ids.len() as u64 > longest {
                let expected = format!("1 to {longest} tokens, one less than data.seq_len");
                let begin: String = text.chars().take(40).collect();
                let got = format!("{} in {begin:?}…", ids.len());
                let remedy = "shorten the text";
                return Err(Error::input(
                    "samples",
                    "log.sample_prompts",
                    expected,
                    got,
                    remedy,
                ));
            }
            let text = text.clone();
            Ok(Prompt { text, ids })
        };
        log.sample_prompts.iter().map(prompt).collect()
    }
}

/// How the first row begins: what precedes its first answer, or a few tokens of a document.
fn beginning(dataset: &Dataset, eval: &[Micro], seq_len: u64) -> Result<Vec<u32>> {
    let (ids, answer) = match eval.first() {
        Some(micro) => {
            let end = micro.bounds[1] as usize;
            let answer = micro.targets[..end].iter().position(|t| *t != IGNORE);
            // A target is the token after.
            (micro.tokens[..end].to_vec(), answer.map(|at| at + 1))
        }
        None => {
            let row = dataset.row(0)?;
            let answer = row.trained.iter().skip(1).position(|trained| *trained);
            (row.ids, answer.map(|at| at + 1))
        }
    };
    let most = usize::try_from(seq_len / 2)
        .expect("seq_len is capped")
        .max(1);
    let masked = answer.filter(|before| (2..=most).contains(before));
    let count = masked.unwrap_or(BEGINNING.min(most)).min(ids.len());
    Ok(ids[..count].to_vec())
}

/// Opens the file of an earlier process, if there is one, to take lost steps out.
pub(super) fn reopen(dir: &Path, step: u64) -> Result<Option<Lines>> {
    let found = dir.join(FILE).symlink_metadata().is_ok();
    let open = || Lines::open(dir, FILE, step, |_| {});
    found.then(open).transpose()
}

impl Run {
    /// Whether samples are asked for.
    pub fn samples(&self) -> bool {
        !self.prompts.is_empty()
    }
}

impl Trainer {
    /// Whether samples are due after the steps done so far.
    pub fn samples_are_due(&self) -> bool {
        let (every, step) = (self.run.config.log.sample_every, self.progress.step);
        every > 0 && step > 0 && (step.is_multiple_of(every) || step >= self.run.total_steps)
    }

    /// Continues each prompt, and keeps what came of it in samples.jsonl.
    ///
    /// # Errors
    /// That of a lane that failed.
    pub fn sample(&mut self) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for index in 0..self.run.prompts.len() {
            let text = match self.continued(index) {
                Ok(text) => text,
                Err(error) => return Err(self.stopped(error)),
            };
            samples.push(Sample {
                step: self.progress.step,
                prompt: self.run.prompts[index].text.clone(),
                text,
            });
        }
        if self.samples.is_none() && !samples.is_empty() {
            let dir = &self.run.config.log.dir;
            // As with a line: what cannot be kept does not end the run.
            match Lines::open(dir, FILE, self.progress.step, |_| {}) {
                Ok(lines) => self.samples = Some(lines),
                Err(error) => self.lost_samples(&error),
            }
        }
        if let Some(file) = &mut self.samples {
            for Sample { step, prompt, text } in &samples {
                let line = json!({ "step": step, "prompt": prompt, "sample": text });
                file.push(&line);
                self.metrics.tell(&line);
            }
        }
        // What it moved is no step's.
        self.last_snapshot = self.engine.tiers().stats.snapshot();
        self.count_store();
        self.last_return = Instant::now();
        Ok(samples)
    }

    fn lost_samples(&mut self, error: &Error) {
        if !std::mem::replace(&mut self.samples_lost, true) {
            let warning = format!("warning: {error}; samples are only printed, the run goes on");
            self.warning.get_or_insert(warning);
        }
    }

    fn continued(&mut self, prompt: usize) -> Result<String> {
        let config = &self.run.config;
        let mut ids = self.run.prompts[prompt].ids.clone();
        let start = ids.len();
        let left = config.data.seq_len - start as u64;
        let tokenizer = self.run.tokenizer.as_ref();
        let tokenizer = tokenizer.expect("a prompt was made with it");
        let ends = [&self.run.spec.eos_token_ids, tokenizer.eos_ids()].concat();
        let sampling = Sampling {
            temperature: config.log.sample_temperature,
            top_p: TOP_P,
            seed: config.train.seed,
        };
        let count = config.log.sample_tokens.min(left);
        generate(&mut self.engine, &mut ids, count, &ends, sampling, |_| {
            Ok(true)
        })?;
        tokenizer.decode(&ids[start..], true)
    }
}
