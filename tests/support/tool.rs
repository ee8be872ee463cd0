//! How a tool ended, and the run that tests of several tools make.
#![allow(dead_code, reason = "each test file uses a part")]

use std::process::Output;

use serde_json::Value;

/// Four steps with two commits of a small model in `model`, from `text.txt`.
pub(crate) const RUN: &str = r#"
[model]
path = "model"
init = "random"
[data]
train = "text.txt"
seq_len = 16
[train]
steps = 4
micro_batch = 1
micro_batches = 2
learning_rate = 2e-2
[memory]
device = "64MiB"
host = "64MiB"
[checkpoint]
every = 2
keep = 2
[log]
dir = "run"
"#;

/// How a tool ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Ended {
        Ended {
            code: output.status.code().expect("no signal ended it"),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl Ended {
    /// Standard output of a success.
    pub(crate) fn success(self) -> String {
        assert_eq!(self.code, 0, "{self:?}");
        assert_eq!(self.err, "", "{}", self.out);
        self.out
    }

    /// One line on standard error, and nothing else.
    pub(crate) fn refused(self, code: i32) -> String {
        assert_eq!(self.code, code, "{self:?}");
        assert_eq!(self.err.matches('\n').count(), 1, "{self:?}");
        self.err.trim_end().to_string()
    }

    /// Standard output, whatever the code.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }
}
