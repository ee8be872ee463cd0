//! run.toml read, checked and written.
//!
//! - [`RunConfig::parse`] applies the file over the defaults, then each `--set` in order, then
//!   checks what concerns two keys together. The first fault in the file's own order is the error;
//!   [`RunConfig::faults`] has them all.
//! - What [`RunConfig::to_toml`] writes, and the template, read back as the same configuration.
//!
//! No file is opened here: the caller brings the text. Single values are read in `given` by the
//! table in `keys`.

use toml::de::{DeTable, DeValue};

use super::given::{Given, WHAT, distance, shown, unknown_key};
pub use super::keys::Class;
use super::keys::{Key, TABLES, Table, keys};
use super::{OnSpike, RunConfig};
use crate::error::{Error, Result, printable};
use crate::tile::{GradientDtype, MomentDtype, Precision};

/// A key whose value is not what it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// `train.steps`
    pub key: String,
    /// As TOML; `unset` where there was nothing.
    pub old: String,
    /// As TOML; `unset` where there is nothing.
    pub new: String,
    /// What the change means on resume.
    pub class: Class,
}

impl RunConfig {
    /// The run described by `text`, changed by each of `sets` (`train.steps=20`). `place` names the
    /// text in errors. A `--set` of `train.steps` takes the place of `train.epochs`, and the other
    /// way round.
    ///
    /// # Errors
    /// [`Error::Input`] with the line or `--set`, the key, what is right and what was there.
    pub fn parse(text: &str, place: &str, sets: &[String]) -> Result<RunConfig> {
        Reading::of(text, place, sets, true).result()
    }

    /// As [`RunConfig::parse`], for a run whose model and data the program brings itself.
    ///
    /// # Errors
    /// As [`RunConfig::parse`].
    pub fn parse_quickstart(text: &str, place: &str, sets: &[String]) -> Result<RunConfig> {
        Reading::of(text, place, sets, false).result()
    }

    /// Every fault of `text` and `sets`, in their order; those between keys only where each key is
    /// right by itself.
    pub fn faults(text: &str, place: &str, sets: &[String]) -> Vec<Error> {
        Reading::of(text, place, sets, true).faults
    }

    /// The run as [`RunConfig::to_toml`] writes it, each value with where it comes from.
    ///
    /// # Errors
    /// As [`RunConfig::parse`].
    pub fn explained(text: &str, place: &str, sets: &[String]) -> Result<String> {
        let reading = Reading::of(text, place, sets, true);
        let places = reading.places.clone();
        let config = reading.result()?;
        let origin = |key: &Key| {
            let named = places.iter().rev().find(|(named, _)| *named == key.path());
            named.map_or("default", |(_, place)| place).to_string()
        };
        Ok(config.written(|key| format!("  # {}", origin(key))))
    }

    /// The run as a run.toml that [`RunConfig::parse`] reads back as the same.
    pub fn to_toml(&self) -> String {
        self.written(|_| String::new())
    }

    /// The lines of some keys, named as `train.steps`, under their tables.
    pub fn lines_of(&self, wanted: &[&str]) -> String {
        let mut text = String::new();
        for table in &TABLES {
            let lines: String = table
                .keys
                .iter()
                .filter(|key| wanted.contains(&key.path().as_str()))
                .filter_map(|key| Some(format!("{} = {}\n", key.name, (key.get)(self)?)))
                .collect();
            if !lines.is_empty() {
                text.push_str(&format!("[{}]\n{lines}", table.name));
            }
        }
        text
    }

    fn written(&self, remark: impl Fn(&Key) -> String) -> String {
        let mut text = String::new();
        for table in &TABLES {
            text.push_str(&format!("[{}]\n", table.name));
            for key in table.keys {
                if let Some(value) = (key.get)(self) {
                    text.push_str(&format!("{} = {value}{}\n", key.name, remark(key)));
                }
            }
            text.push('\n');
        }
        text.pop();
        text
    }

    /// xxh3-128 over all that may not change when a run is resumed, keys in order.
    pub fn identity_hash(&self) -> u128 {
        let mut text = String::new();
        for key in keys().filter(|key| key.class == Class::Forbidden) {
            if let Some(value) = (key.get)(self) {
                text.push_str(&format!("{} = {value}\n", key.path()));
            }
        }
        twox_hash::XxHash3_128::oneshot(text.as_bytes())
    }

    /// What differs from the run that is resumed, in the order of the keys.
    pub fn resume_differences(&self, old: &RunConfig) -> Vec<Difference> {
        let shown = |config, key: &Key| (key.get)(config).unwrap_or_else(|| "unset".to_string());
        keys()
            .filter(|key| (key.get)(self) != (key.get)(old))
            .map(|key| Difference {
                key: key.path(),
                old: shown(old, key),
                new: shown(self, key),
                class: key.class,
            })
            .collect()
    }
}

/// A run.toml with every key, its meaning and its default; model, data and steps are examples.
pub fn commented_template() -> String {
    let mut text = String::from(
        "# A run of Terrace. `terrace plan` shows what it would do; `--set table.key=value` \
         changes\n# a value for one run. Relative paths are meant from the current directory.\n",
    );
    for table in &TABLES {
        text.push_str(&format!("\n# {}\n[{}]\n", table.about, table.name));
        for key in table.keys {
            for line in key.meaning.lines() {
                text.push_str(&format!("# {line}\n"));
            }
            let name = key.name;
            match (key.default, key.example.strip_prefix("# ")) {
                ("", Some(example)) => text.push_str(&format!("# {name} = {example}\n")),
                ("", None) => text.push_str(&format!("{name} = {}\n", key.example)),
                (default, _) => text.push_str(&format!("{name} = {default}\n")),
            }
        }
    }
    text
}

/// The tables in the order in which a file has them.
pub(super) fn tables() -> impl Iterator<Item = &'static str> {
    TABLES.iter().map(|table| table.name)
}

/// The keys of a table with their defaults as TOML, empty where there is none.
pub(super) fn defaults_of(table: &str) -> impl Iterator<Item = (String, &'static str)> {
    let keys = keys().filter(move |key| key.table == table);
    keys.map(|key| (key.path(), key.default))
}

fn missing(place: &str, key: &str, expected: &str, remedy: &str) -> Error {
    let place = format!("{place}, {key}");
    Error::input(WHAT, place, expected, "nothing", format!("add {remedy}"))
}

/// A run.toml while it is read: every fault is kept.
struct Reading {
    config: RunConfig,
    faults: Vec<Error>,
    /// Keys that were named, with `a.toml line 3` or `--set`, in order.
    places: Vec<(String, String)>,
}

impl Reading {
    /// Reads `text`, then `sets`; `whole` runs name a model and data.
    fn of(text: &str, place: &str, sets: &[String], whole: bool) -> Reading {
        let mut reading = Reading {
            config: RunConfig::default(),
            faults: Vec::new(),
            places: Vec::new(),
        };
        reading.apply_text(text, place);
        let train = &reading.config.train;
        if train.steps.is_some() && train.epochs.is_some() {
            let (expected, remedy) = ("train.steps or train.epochs", "remove one of them");
            let both = Error::input(WHAT, place, expected, "both", remedy);
            reading.faults.push(both);
        }
        for set in sets {
            if let Err(fault) = reading.apply_set(set) {
                reading.faults.push(fault);
            }
        }
        let named = |key: &str| reading.places.iter().any(|(named, _)| named == key);
        if reading.config.model.precision == Precision::Fp32 && !named("train.gradient_dtype") {
            reading.config.train.gradient_dtype = GradientDtype::F32;
        }
        if reading.faults.is_empty() {
            reading.check_keys_together(place);
            reading.check_lists(place);
            reading.check_between_steps(place);
            if whole {
                reading.check_whole(place);
            }
        }
        reading
    }

    fn result(mut self) -> Result<RunConfig> {
        match self.faults.is_empty() {
            true => Ok(self.config),
            false => Err(self.faults.swap_remove(0)),
        }
    }

    /// The refusal of a key that does not go with another.
    fn refuse(&mut self, place: &str, key: &str, expected: String, got: String, remedy: &str) {
        let named = self.places.iter().rev().find(|(named, _)| named == key);
        let place = match named {
            Some((_, place)) if place == "--set" => format!("--set {key}"),
            Some((_, place)) => format!("{place}, {key}"),
            None => format!("{place}, {key}"),
        };
        let fault = Error::input(WHAT, place, expected, got, remedy);
        self.faults.push(fault);
    }

    /// What concerns two keys together.
    fn check_keys_together(&mut self, place: &str) {
        let train = self.config.train.clone();
        if train.steps.is_none() && train.epochs.is_none() {
            let (expected, remedy) = ("train.steps or train.epochs", "epochs = 1 under [train]");
            self.faults
                .push(missing(place, "train.steps", expected, remedy));
        }
        if let Some(steps) = train.steps
            && train.warmup_steps > steps
        {
            let (expected, got) = (format!("at most train.steps ({steps})"), train.warmup_steps);
            let remedy = "lower it, or train for more steps";
            self.refuse(
                place,
                "train.warmup_steps",
                expected,
                got.to_string(),
                remedy,
            );
        }
        if train.min_learning_rate > train.learning_rate {
            let expected = format!("at most train.learning_rate ({:?})", train.learning_rate);
            let got = format!("{:?}", train.min_learning_rate);
            self.refuse(place, "train.min_learning_rate", expected, got, "lower it");
        }
        let fp32 = self.config.model.precision == Precision::Fp32;
        if fp32 && train.gradient_dtype == GradientDtype::Bf16 {
            let expected = "\"f32\" under model.precision \"fp32\"".to_string();
            let got = "\"bf16\"".to_string();
            let remedy = "leave it out, or use precision \"bf16\"";
            self.refuse(place, "train.gradient_dtype", expected, got, remedy);
        }
        if fp32 && self.config.optimizer.moments == MomentDtype::Bf16 {
            let expected = "\"f32\" under model.precision \"fp32\"".to_string();
            let got = "\"bf16\"".to_string();
            let remedy = "leave it out, or use precision \"bf16\"";
            self.refuse(place, "optimizer.moments", expected, got, remedy);
        }
    }

    /// What needs evaluations, checkpoints or clipping.
    fn check_between_steps(&mut self, place: &str) {
        let (train, checkpoint) = (self.config.train.clone(), self.config.checkpoint.clone());
        let mut needs = |key: &str, expected: &str, got: String, remedy: &str| {
            self.refuse(place, key, expected.to_string(), got, remedy);
        };
        let patience = train.early_stopping_patience;
        if patience > 0 && train.eval_every == 0 {
            let (key, remedy) = ("train.early_stopping_patience", "set train.eval_every");
            needs(key, "0 without evaluations", patience.to_string(), remedy);
        }
        if checkpoint.keep_best {
            let key = "checkpoint.keep_best";
            if train.eval_every == 0 {
                let expected = "false without evaluations";
                needs(key, expected, "true".to_string(), "set train.eval_every");
            }
            if checkpoint.every == 0 {
                let expected = "false without checkpoints";
                needs(key, expected, "true".to_string(), "set checkpoint.every");
            }
            if checkpoint.keep > 30 {
                let (key, expected) = ("checkpoint.keep", "at most 30 with keep_best");
                needs(key, expected, checkpoint.keep.to_string(), "lower it");
            }
        }
        if train.on_spike == OnSpike::Skip && train.max_grad_norm == 0.0 {
            let expected = "\"continue\" or \"stop\" without clipping";
            let remedy = "set train.max_grad_norm above 0, so that updates wait for the norm";
            needs("train.on_spike", expected, "\"skip\"".to_string(), remedy);
        }
    }

    /// What concerns the lists of data together.
    fn check_lists(&mut self, place: &str) {
        let (lists, eval_every) = (self.config.data.clone(), self.config.train.eval_every);
        if eval_every > 0 && lists.eval.is_empty() && lists.eval_split == 0.0 {
            let expected = "0 without data.eval".to_string();
            let remedy = "name files in data.eval, or set data.eval_split";
            self.refuse(
                place,
                "train.eval_every",
                expected,
                eval_every.to_string(),
                remedy,
            );
        }
        if lists.eval_split > 0.0 && !lists.eval.is_empty() {
            let expected = "0 with data.eval".to_string();
            let got = format!("{:?}", lists.eval_split);
            self.refuse(place, "data.eval_split", expected, got, "give one of them");
        }
        if !lists.mix.is_empty() && lists.mix.len() != lists.train.len() {
            let expected = format!("{} weights, as data.train has sources", lists.train.len());
            let got = lists.mix.len().to_string();
            self.refuse(
                place,
                "data.mix",
                expected,
                got,
                "give each source one weight",
            );
        }
    }

    /// What a run needs that brings nothing itself.
    fn check_whole(&mut self, place: &str) {
        if self.config.model.path.is_none() {
            let (expected, remedy) = ("the directory of a model", "path = \"…\" under [model]");
            self.faults
                .push(missing(place, "model.path", expected, remedy));
        }
        if self.config.data.train.is_empty() {
            let (expected, remedy) = ("at least one training file", "train = \"…\" under [data]");
            self.faults
                .push(missing(place, "data.train", expected, remedy));
        }
    }

    fn apply_text(&mut self, text: &str, place: &str) {
        let tables = match DeTable::parse(text) {
            Ok(tables) => tables,
            Err(source) => {
                let place = match source.span() {
                    Some(span) => format!("{place} line {}", line(text, span.start)),
                    None => place.to_string(),
                };
                let got = printable(&source.message().replace('\n', ", "));
                // Other trainers' files are YAML.
                let remedy = match text
                    .lines()
                    .any(|line| line.starts_with("model_name_or_path:"))
                {
                    true => "make a run.toml of it with `terrace config import`",
                    false => "correct the line",
                };
                let fault = Error::input(WHAT, place, "TOML", got, remedy);
                self.faults.push(fault);
                return;
            }
        };
        for (name, value) in in_order(tables.get_ref()) {
            let at = format!("{place} line {}", line(text, name.span().start));
            let table = match known_table(&at, name.get_ref()) {
                Ok(table) => table,
                Err(fault) => {
                    self.faults.push(fault);
                    continue;
                }
            };
            let DeValue::Table(keys) = value.get_ref() else {
                let (expected, got) = (format!("a table [{}]", table.name), shown(value.get_ref()));
                let remedy = format!("write its keys under [{}]", table.name);
                let fault = Error::input(WHAT, at, expected, got, remedy);
                self.faults.push(fault);
                continue;
            };
            for (name, value) in in_order(keys) {
                let at = format!("{place} line {}", line(text, name.span().start));
                if let Err(fault) = self.apply(table, name.get_ref(), value.get_ref(), &at) {
                    self.faults.push(fault);
                }
            }
        }
    }

    /// Applies one value of the text, which stands at `at`.
    fn apply(
        &mut self,
        table: &'static Table,
        name: &str,
        value: &DeValue<'_>,
        at: &str,
    ) -> Result<()> {
        let key = known_key(at, table, name)?;
        self.places.push((key.path(), at.to_string()));
        let place = format!("{at}, {}", key.path());
        (key.set)(&mut self.config, &Given { key, place, value })
    }

    fn apply_set(&mut self, set: &str) -> Result<()> {
        let malformed = || {
            let (got, remedy) = (printable(set), "write it as train.steps=20");
            Error::input(WHAT, "--set", "table.key=value", got, remedy)
        };
        let (path, text) = set.split_once('=').ok_or_else(malformed)?;
        let (table, name) = path.trim().split_once('.').ok_or_else(malformed)?;
        let place = format!("--set {}", printable(path.trim()));
        let key = known_key(&place, known_table(&place, table)?, name)?;
        let text = text.trim();
        let parsed = DeValue::parse(text).map(|value| value.into_inner());
        // What is no TOML is a bare word: 24GiB, runs/b, cosine.
        let value = parsed.unwrap_or_else(|_| DeValue::String(text.into()));
        match key.name {
            "steps" => self.config.train.epochs = None,
            "epochs" => self.config.train.steps = None,
            _ => {}
        }
        self.places.push((key.path(), "--set".to_string()));
        let value = &value;
        (key.set)(&mut self.config, &Given { key, place, value })
    }
}

/// Entries as the text has them, so that its first fault is the one reported.
fn in_order<'a, 'i>(
    table: &'a DeTable<'i>,
) -> Vec<(
    &'a toml::Spanned<toml::de::DeString<'i>>,
    &'a toml::Spanned<DeValue<'i>>,
)> {
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(name, _)| name.span().start);
    entries
}

/// Line of a byte, from 1.
fn line(text: &str, byte: usize) -> usize {
    let before = text.as_bytes().iter().take(byte);
    1 + before.filter(|b| **b == b'\n').count()
}

fn known_table(place: &str, name: &str) -> Result<&'static Table> {
    if let Some(table) = TABLES.iter().find(|table| table.name == name) {
        return Ok(table);
    }
    let tables = TABLES.each_ref().map(|table| table.name);
    let remedy = match keys().find(|key| key.name == name) {
        Some(key) => format!("write it under [{}]", key.table),
        None => {
            let nearest = tables.iter().min_by_key(|table| distance(table, name));
            format!("did you mean [{}]?", nearest.unwrap_or(&"train"))
        }
    };
    let expected = format!("a table ({})", tables.join(", "));
    Err(Error::input(WHAT, place, expected, printable(name), remedy))
}

fn known_key(place: &str, table: &'static Table, name: &str) -> Result<&'static Key> {
    if let Some(key) = table.keys.iter().find(|key| key.name == name) {
        return Ok(key);
    }
    let known: Vec<&str> = table.keys.iter().map(|key| key.name).collect();
    let mut error = unknown_key(place, &format!("[{}]", table.name), &known, name);
    if let Some(key) = keys().find(|key| key.name == name)
        && let Error::Input { remedy, .. } = &mut error
    {
        *remedy = format!("write it under [{}]", key.table);
    }
    Err(error)
}
