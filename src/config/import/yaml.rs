//! The YAML of an import: values by their paths, with their lines.

use saphyr_parser::{Event, Parser, ScalarStyle};

use super::{BYTES_MAX, WHAT};
use crate::error::{Error, Result, printable};

/// Most levels of a file.
const DEPTH_MAX: usize = 32;

/// A value of the file, by its path.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// `training.batch_size`; a list's items share the path of the list.
    pub(super) path: String,
    pub(super) line: usize,
    pub(super) values: Vec<String>,
}

impl Entry {
    pub(super) fn first(&self) -> String {
        self.values.first().cloned().unwrap_or_default()
    }

    pub(super) fn number(&self) -> Option<f64> {
        self.first().parse().ok()
    }

    /// null is as good as nothing.
    pub(super) fn is_null(&self) -> bool {
        matches!(&self.values[..], [only] if ["", "null", "~"].contains(&only.as_str()))
    }

    pub(super) fn is_true(&self) -> bool {
        ["true", "yes", "on", "True", "TRUE"].contains(&self.first().as_str())
    }
}

/// The values of the file by path, in order.
pub(super) fn entries(text: &str, place: &str) -> Result<Vec<Entry>> {
    let wrong = |line: usize, got: &str, remedy: &str| {
        let place = format!("{place}:{line}");
        Error::input(
            WHAT,
            place,
            "YAML of keys and values",
            printable(got),
            remedy,
        )
    };
    if text.len() > BYTES_MAX {
        let got = format!("{} bytes", text.len());
        return Err(wrong(1, &got, "name the training configuration"));
    }
    let mut tree = Tree::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| {
            let line = error.marker().line();
            wrong(line, error.info(), "correct the line")
        })?;
        let line = span.start.line();
        tree.take(event, line)
            .map_err(|(got, remedy)| wrong(line, &got, remedy))?;
    }
    Ok(tree.entries)
}

/// The file's values while its events come.
#[derive(Default)]
struct Tree {
    entries: Vec<Entry>,
    /// Of each level the key that is open: `None` where the next scalar is a key.
    open: Vec<Option<String>>,
    in_list: bool,
}

impl Tree {
    /// Takes an event; what is wrong with it and what to do.
    fn take(&mut self, event: Event<'_>, line: usize) -> Result<(), (String, &'static str)> {
        let refuse = |got: &str, remedy| Err((got.to_string(), remedy));
        match event {
            Event::Alias(_) => return refuse("an alias", "write the value itself"),
            Event::MappingStart(..) if self.in_list => {
                return refuse("a mapping in a list", "leave it out");
            }
            Event::MappingStart(..) if self.open.len() == DEPTH_MAX => {
                return refuse("too many levels", "leave them out");
            }
            Event::MappingStart(..) => self.open.push(None),
            Event::MappingEnd => {
                self.open.pop();
                self.close();
            }
            Event::SequenceStart(..) if self.open.is_empty() || self.in_list => {
                return refuse("a list in place of keys", "correct the line");
            }
            Event::SequenceStart(..) => {
                self.in_list = true;
                self.push(line, Vec::new());
            }
            Event::SequenceEnd => {
                self.in_list = false;
                self.close();
            }
            Event::Scalar(value, style, ..) => match self.open.last_mut() {
                None if value.is_empty() => {}
                None => return refuse(&value, "write it as `key: value`"),
                Some(key @ None) => *key = Some(value.into_owned()),
                Some(Some(_)) if self.in_list => {
                    let entry = self
                        .entries
                        .last_mut()
                        .expect("pushed where the list began");
                    entry.values.push(value.into_owned());
                }
                Some(Some(_)) => {
                    let empty = value.is_empty() && style == ScalarStyle::Plain;
                    let value = if empty {
                        "null".to_string()
                    } else {
                        value.into_owned()
                    };
                    self.push(line, vec![value]);
                    self.close();
                }
            },
            _ => {}
        }
        Ok(())
    }

    fn push(&mut self, line: usize, values: Vec<String>) {
        let keys: Vec<&str> = self.open.iter().flatten().map(String::as_str).collect();
        let path = keys.join(".");
        self.entries.push(Entry { path, line, values });
    }

    /// The innermost key has its value.
    fn close(&mut self) {
        if let Some(key) = self.open.last_mut() {
            *key = None;
        }
    }
}
