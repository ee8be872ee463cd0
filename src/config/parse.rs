//! run.toml read, checked and written.
//!
//! - [`RunConfig::parse`] applies the file over the defaults, then each `--set` in order, then
//!   checks what concerns two keys together. The first fault in the file's own order is the error.
//! - What [`RunConfig::to_toml`] writes, and the template, read back as the same configuration.
//!
//! No file is opened here: the caller brings the text. Single values are read in `given` by the
//! table in `keys`.

use toml::de::{DeTable, DeValue};

use super::RunConfig;
use super::given::{Given, WHAT, distance, shown, unknown_key};
pub use super::keys::Class;
use super::keys::{KEYS, Key, TABLES};
use crate::error::{Error, Result, printable};
use crate::tile::{GradientDtype, Precision};

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
        let config = RunConfig::parse_quickstart(text, place, sets)?;
        if config.model.path.is_none() {
            let expected = "the directory of a model";
            return Err(missing(
                place,
                "model.path",
                expected,
                "path = \"…\" under [model]",
            ));
        }
        if config.data.train.is_empty() {
            let expected = "at least one training file";
            return Err(missing(
                place,
                "data.train",
                expected,
                "train = \"…\" under [data]",
            ));
        }
        Ok(config)
    }

    /// As [`RunConfig::parse`], for a run whose model and data the program brings itself.
    ///
    /// # Errors
    /// As [`RunConfig::parse`].
    pub fn parse_quickstart(text: &str, place: &str, sets: &[String]) -> Result<RunConfig> {
        let mut config = RunConfig::default();
        let mut given: Vec<&'static str> = Vec::new();
        let mut named = |key: &'static Key| {
            if (key.table, key.name) == ("train", "gradient_dtype") {
                given.push(key.name);
            }
        };
        apply_text(&mut config, text, place, &mut named)?;
        if config.train.steps.is_some() && config.train.epochs.is_some() {
            let (expected, remedy) = ("train.steps or train.epochs", "remove one of them");
            return Err(Error::input(WHAT, place, expected, "both", remedy));
        }
        for set in sets {
            apply_set(&mut config, set, &mut named)?;
        }
        if config.model.precision == Precision::Fp32 && given.is_empty() {
            config.train.gradient_dtype = GradientDtype::F32;
        }
        config.validate(place)?;
        Ok(config)
    }

    /// What concerns two keys together.
    fn validate(&self, place: &str) -> Result<()> {
        let train = &self.train;
        let wrong = |key: &str, expected: String, got: String, remedy: &str| {
            Err(Error::input(
                WHAT,
                format!("{place}, {key}"),
                expected,
                got,
                remedy,
            ))
        };
        if train.steps.is_none() && train.epochs.is_none() {
            let (expected, remedy) = ("train.steps or train.epochs", "epochs = 1 under [train]");
            return Err(missing(place, "train.steps", expected, remedy));
        }
        if let Some(steps) = train.steps
            && train.warmup_steps > steps
        {
            let (expected, got) = (format!("at most train.steps ({steps})"), train.warmup_steps);
            let remedy = "lower it, or train for more steps";
            return wrong("train.warmup_steps", expected, got.to_string(), remedy);
        }
        if train.min_learning_rate > train.learning_rate {
            let expected = format!("at most train.learning_rate ({:?})", train.learning_rate);
            let got = format!("{:?}", train.min_learning_rate);
            return wrong("train.min_learning_rate", expected, got, "lower it");
        }
        if self.model.precision == Precision::Fp32 && train.gradient_dtype == GradientDtype::Bf16 {
            let expected = "\"f32\" under model.precision \"fp32\"".to_string();
            let got = "\"bf16\"".to_string();
            let remedy = "leave it out, or use precision \"bf16\"";
            return wrong("train.gradient_dtype", expected, got, remedy);
        }
        if train.eval_every > 0 && self.data.eval.is_empty() {
            let expected = "0 without data.eval".to_string();
            let (got, remedy) = (train.eval_every.to_string(), "name files in data.eval");
            return wrong("train.eval_every", expected, got, remedy);
        }
        Ok(())
    }

    /// The run as a run.toml that [`RunConfig::parse`] reads back as the same.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        for (table, _) in TABLES {
            text.push_str(&format!("[{table}]\n"));
            for key in KEYS.iter().filter(|key| key.table == table) {
                if let Some(value) = (key.get)(self) {
                    text.push_str(&format!("{} = {value}\n", key.name));
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
        for key in KEYS.iter().filter(|key| key.class == Class::Forbidden) {
            if let Some(value) = (key.get)(self) {
                text.push_str(&format!("{} = {value}\n", key.path()));
            }
        }
        twox_hash::XxHash3_128::oneshot(text.as_bytes())
    }

    /// What differs from the run that is resumed, in the order of the keys.
    pub fn resume_differences(&self, old: &RunConfig) -> Vec<Difference> {
        let shown = |config, key: &Key| (key.get)(config).unwrap_or_else(|| "unset".to_string());
        KEYS.iter()
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
    for (table, about) in TABLES {
        text.push_str(&format!("\n# {about}\n[{table}]\n"));
        for key in KEYS.iter().filter(|key| key.table == table) {
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

fn missing(place: &str, key: &str, expected: &str, remedy: &str) -> Error {
    let place = format!("{place}, {key}");
    Error::input(WHAT, place, expected, "nothing", format!("add {remedy}"))
}

fn apply_text(
    config: &mut RunConfig,
    text: &str,
    place: &str,
    named: &mut impl FnMut(&'static Key),
) -> Result<()> {
    let tables = DeTable::parse(text).map_err(|source| {
        let place = match source.span() {
            Some(span) => format!("{place} line {}", line(text, span.start)),
            None => place.to_string(),
        };
        let got = printable(&source.message().replace('\n', ", "));
        Error::input(WHAT, place, "TOML", got, "correct the line")
    })?;
    for (name, value) in in_order(tables.get_ref()) {
        let at = format!("{place} line {}", line(text, name.span().start));
        let table = known_table(&at, name.get_ref())?;
        let DeValue::Table(keys) = value.get_ref() else {
            let (expected, got) = (format!("a table [{table}]"), shown(value.get_ref()));
            let remedy = format!("write its keys under [{table}]");
            return Err(Error::input(WHAT, at, expected, got, remedy));
        };
        for (name, value) in in_order(keys) {
            let at = format!("{place} line {}", line(text, name.span().start));
            let key = known_key(&at, table, name.get_ref())?;
            named(key);
            let place = format!("{at}, {}", key.path());
            let value = value.get_ref();
            (key.set)(config, &Given { key, place, value })?;
        }
    }
    Ok(())
}

fn apply_set(
    config: &mut RunConfig,
    set: &str,
    named: &mut impl FnMut(&'static Key),
) -> Result<()> {
    let malformed = || {
        let got = printable(set);
        Error::input(
            WHAT,
            "--set",
            "table.key=value",
            got,
            "write it as train.steps=20",
        )
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
        "steps" => config.train.epochs = None,
        "epochs" => config.train.steps = None,
        _ => {}
    }
    named(key);
    let value = &value;
    (key.set)(config, &Given { key, place, value })
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

fn known_table(place: &str, name: &str) -> Result<&'static str> {
    if let Some((table, _)) = TABLES.iter().find(|(table, _)| *table == name) {
        return Ok(table);
    }
    let tables = TABLES.map(|(table, _)| table);
    let remedy = match KEYS.iter().find(|key| key.name == name) {
        Some(key) => format!("write it under [{}]", key.table),
        None => {
            let nearest = tables.iter().min_by_key(|table| distance(table, name));
            format!("did you mean [{}]?", nearest.unwrap_or(&"train"))
        }
    };
    let expected = format!("a table ({})", tables.join(", "));
    Err(Error::input(WHAT, place, expected, printable(name), remedy))
}

fn known_key(place: &str, table: &'static str, name: &str) -> Result<&'static Key> {
    let keys = || KEYS.iter().filter(|key| key.table == table);
    if let Some(key) = keys().find(|key| key.name == name) {
        return Ok(key);
    }
    let known: Vec<&str> = keys().map(|key| key.name).collect();
    let mut error = unknown_key(place, &format!("[{table}]"), &known, name);
    if let Some(key) = KEYS.iter().find(|key| key.name == name)
        && let Error::Input { remedy, .. } = &mut error
    {
        *remedy = format!("write it under [{}]", key.table);
    }
    Err(error)
}
