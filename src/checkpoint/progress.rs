//! Where a run stands at a commit, as the JSON of its metadata, and what may differ in the run that
//! goes on from there.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::config::RunConfig;
use crate::config::parse::Class;
use crate::data::{Cursor, Dataset};
use crate::error::{Error, Result};

/// Where a run stands at a commit.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// Steps done.
    pub step: u64,
    /// Tokens done.
    pub tokens: u64,
    /// The next sequence.
    pub cursor: Cursor,
    /// The run.toml, complete.
    pub run: String,
    /// Checksum of the training data.
    pub data: String,
    /// The model directory's config.json.
    pub model: Value,
    /// Bytes written to drives so far, of all processes of the run.
    pub written: u64,
    /// Device and libraries that computed it (see [`Device::identity`](crate::device::Device)).
    pub device: String,
    /// Matrix products with their algorithms, where a library chose them.
    pub products: BTreeMap<String, String>,
    /// What evaluations came to.
    pub evaluations: Evaluations,
    /// What gradient norms came to.
    pub norms: Norms,
}

/// What the evaluations of a run came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluations {
    /// The one with the lowest loss.
    pub best: Option<Best>,
    /// Those since the loss last fell by more than `train.early_stopping_threshold`.
    pub without_improvement: u64,
}

/// The evaluation with the lowest loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Steps done by then.
    pub step: u64,
    /// Mean loss, nats.
    pub loss: f64,
}

/// What the gradient norms of a run came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Norms {
    /// Their running mean.
    pub mean: f64,
    /// Norms in it.
    pub count: u64,
    /// Steps without an update, by `train.on_spike`.
    pub skipped: u64,
    /// Those of them at the end, without one between them.
    pub skipped_in_a_row: u64,
}

impl Progress {
    /// The progress of a run that has trained nothing yet.
    pub fn new(config: &RunConfig, dataset: &Dataset, model: &Value, cursor: Cursor) -> Progress {
        Progress {
            step: 0,
            tokens: 0,
            cursor,
            run: config.to_toml(),
            data: format!("{:032x}", dataset.fingerprint()),
            model: model.clone(),
            written: 0,
            device: String::new(),
            products: BTreeMap::new(),
            evaluations: Evaluations::default(),
            norms: Norms::default(),
        }
    }

    /// Takes over what a commit counted; a warning where another device computed it.
    pub fn goes_on_from(&mut self, found: &Progress) -> Option<String> {
        (self.step, self.tokens, self.written) = (found.step, found.tokens, found.written);
        (self.evaluations, self.norms) = (found.evaluations, found.norms);
        self.products.clone_from(&found.products);
        let differs = !found.device.is_empty() && found.device != self.device;
        differs.then(|| {
            format!(
                "warning: the commit was computed on {}, this run computes on {}: the last bits \
                 of its numbers may differ",
                found.device, self.device
            )
        })
    }

    /// Whether this is the commit of `best`: of its step, and of the run that evaluated it. One
    /// that was left behind by a run that went back may have the same step.
    pub(crate) fn is_of(&self, best: Best) -> bool {
        self.step == best.step && self.evaluations.best == Some(best)
    }

    pub(super) fn to_json(&self) -> Value {
        json!({
            "terrace": env!("CARGO_PKG_VERSION"),
            "step": self.step,
            "tokens": self.tokens,
            "cursor": self.cursor,
            "run": self.run,
            "data": self.data,
            "model": self.model,
            "written": self.written,
            "device": self.device,
            "products": self.products,
            "evaluations": self.evaluations,
            "norms": self.norms,
        })
    }

    pub(crate) fn from_json(bytes: &[u8], path: &Path) -> Result<Progress> {
        let damaged = |got: String| Error::Damaged {
            path: path.to_path_buf(),
            what: "metadata of a commit".to_string(),
            offset: 0,
            expected: "step, tokens, cursor, run, data and model".to_string(),
            got,
            remedy: "resume from another commit with --resume=STEP".to_string(),
        };
        let value: Value = serde_json::from_slice(bytes).map_err(|e| damaged(e.to_string()))?;
        let text = |key: &str| value[key].as_str().map(str::to_string);
        let read = || {
            Some(Progress {
                step: value["step"].as_u64()?,
                tokens: value["tokens"].as_u64()?,
                cursor: serde_json::from_value(value["cursor"].clone()).ok()?,
                run: text("run")?,
                data: text("data")?,
                model: value["model"].clone(),
                // Commits of versions that did not tell have none.
                written: value["written"].as_u64().unwrap_or(0),
                device: text("device").unwrap_or_default(),
                products: serde_json::from_value(value["products"].clone()).unwrap_or_default(),
                evaluations: told(&value["evaluations"]),
                norms: told(&value["norms"]),
            })
        };
        read().ok_or_else(|| damaged("another set of keys".to_string()))
    }

    /// What differs in the run that goes on from here, `now` being its own progress, as sentences;
    /// an error for what may not, unless `allowed`. Model and data are held by their contents: they
    /// may have moved.
    pub fn changes(
        &self,
        config: &RunConfig,
        now: &Progress,
        allowed: bool,
    ) -> Result<Vec<String>> {
        let old = RunConfig::parse(&self.run, "the commit's run.toml", &[])?;
        let mut sentences = Vec::new();
        let refused = |place: &str, expected: &str, got: &str| {
            Error::input(
                "resume",
                place,
                expected,
                got,
                "change it back, or pass --resume-changed to go on with another run",
            )
        };
        // As it is read back from a commit.
        let model: Option<Value> = serde_json::from_str(&now.model.to_string()).ok();
        let same_model = model.as_ref() == Some(&self.model);
        for difference in config.resume_differences(&old) {
            let (key, old, new) = (difference.key, difference.old, difference.new);
            let moved = match key.as_ref() {
                "model.path" => same_model,
                "data.train" => now.data == self.data,
                _ => false,
            };
            match difference.class {
                Class::Free => {}
                Class::Forbidden if !allowed && !moved => return Err(refused(&key, &old, &new)),
                _ => sentences.push(format!("resumed with {key} = {new}, was {old}")),
            }
        }
        let contents = [
            ("the model's config.json", "model", same_model),
            (
                "training data (its tokens' checksum)",
                "training data",
                now.data == self.data,
            ),
        ];
        for (place, name, same) in contents {
            if same {
                continue;
            }
            if !allowed {
                let (expected, got) = match name {
                    "model" => ("what the commit holds", "another"),
                    _ => (self.data.as_str(), now.data.as_str()),
                };
                return Err(refused(place, expected, got));
            }
            sentences.push(format!("resumed with another {name}"));
        }
        Ok(sentences)
    }
}

/// What a commit tells; nothing yet where it is of a version that did not.
fn told<T: Default + for<'de> Deserialize<'de>>(value: &Value) -> T {
    T::deserialize(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_comes_back_from_its_metadata_and_older_ones_lack_what_they_did_not_tell() {
        let products = BTreeMap::from([("8 x 8 x 8 NN".to_string(), "1 2 3".to_string())]);
        let progress = Progress {
            step: 3,
            tokens: 5,
            cursor: serde_json::from_value(json!({"epoch": 1, "sequence": 2})).unwrap_or_default(),
            run: "run".to_string(),
            data: "data".to_string(),
            model: json!({"a": 1}),
            written: 7,
            device: "a card".to_string(),
            products,
            evaluations: Evaluations {
                best: Some(Best { step: 2, loss: 0.1 }),
                without_improvement: 1,
            },
            norms: Norms {
                mean: 1.0 / 3.0,
                count: 3,
                skipped: 2,
                skipped_in_a_row: 1,
            },
        };
        let read = |value: Value| Progress::from_json(value.to_string().as_bytes(), "x".as_ref());
        assert_eq!(read(progress.to_json()).ok(), Some(progress.clone()));
        let mut older = progress.to_json();
        let keys = older.as_object_mut().expect("an object");
        for key in ["written", "device", "products", "evaluations", "norms"] {
            keys.shift_remove(key);
        }
        let read = read(older).expect("older metadata are read");
        assert_eq!((read.written, read.device.as_str()), (0, ""));
        assert_eq!(read.products, BTreeMap::new());
        assert_eq!(read.evaluations, Evaluations::default());
        assert_eq!(read.norms, Norms::default());
        assert_eq!(read.step, progress.step);
    }
}
