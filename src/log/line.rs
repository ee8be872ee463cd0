//! A line of metrics.jsonl or samples.jsonl, as it is read: what is absent is `None`, and a number
//! that JSON cannot hold, written as null, is NaN.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};

use crate::stats::{HOP_NAMES, WAIT_NAMES};

/// One line; which kind it is, its keys say.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Line {
    /// Steps done.
    pub step: Option<u64>,
    /// Of a step, nats.
    #[serde(deserialize_with = "number")]
    pub loss: Option<f64>,
    /// Before clipping.
    #[serde(deserialize_with = "number")]
    pub grad_norm: Option<f64>,
    /// Used in the step.
    #[serde(deserialize_with = "number")]
    pub learning_rate: Option<f64>,
    /// Of a step.
    pub tokens: u64,
    /// A step has them; no other line does.
    pub step_seconds: Option<f64>,
    /// Bytes by hop.
    pub bytes: BTreeMap<String, u64>,
    /// Seconds by cause.
    pub stall_seconds: BTreeMap<String, f64>,
    /// Seconds in which hops were busy, by hop.
    pub hop_seconds: BTreeMap<String, f64>,
    /// Seconds of AdamW.
    pub update_seconds: f64,
    /// Seconds of them in which its threads had a processor.
    pub update_core_seconds: Option<f64>,
    /// Seconds in which the scratch store's disks were busy, either way.
    pub store_seconds: Option<f64>,
    /// Bytes written to drives.
    pub written_bytes: WrittenBytes,
    /// Share of the drive's rated life that the run has used.
    pub drive_life: Option<f64>,
    /// Of an evaluation, nats.
    #[serde(deserialize_with = "number")]
    pub eval_loss: Option<f64>,
    /// Of a commit.
    pub commit_seconds: Option<f64>,
    /// Of a commit.
    pub commit_stall_seconds: f64,
    /// Of a commit.
    pub commit_stall_bound_seconds: f64,
    /// Of a commit.
    pub commit_bytes: u64,
    /// What a sample goes on from.
    pub prompt: Option<String>,
    /// Of a sample: what the model wrote.
    pub sample: Option<String>,
}

/// Bytes that a step's line says were written to drives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct WrittenBytes {
    /// Spilled extents.
    pub store: u64,
    /// Commits.
    pub checkpoint: u64,
    /// All of the run so far.
    pub total: u64,
}

impl Line {
    /// Reads a line; `None` if it is not one.
    pub fn read(bytes: &[u8]) -> Option<Line> {
        let line: Line = serde_json::from_slice(bytes).ok()?;
        line.step.is_some().then_some(line)
    }

    /// By [`crate::stats::Hop`].
    pub fn hop_bytes(&self) -> [u64; 4] {
        HOP_NAMES.map(|name| self.bytes.get(name).copied().unwrap_or(0))
    }

    /// Busy seconds by [`crate::stats::Hop`].
    pub fn busy_seconds(&self) -> [f64; 4] {
        HOP_NAMES.map(|name| self.hop_seconds.get(name).copied().unwrap_or(0.0))
    }

    /// By [`crate::stats::Wait`].
    pub fn stalls(&self) -> [f64; WAIT_NAMES.len()] {
        WAIT_NAMES.map(|name| self.stall_seconds.get(name).copied().unwrap_or(0.0))
    }
}

/// A number that is there, NaN for null.
fn number<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    let number = Option::<f64>::deserialize(from)?;
    Ok(Some(number.unwrap_or(f64::NAN)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_numbers_are_told_from_those_that_json_cannot_hold() {
        let line = Line::read(br#"{"step":3,"loss":null,"step_seconds":1.5}"#);
        let line = line.expect("a line");
        assert!(line.loss.is_some_and(f64::is_nan));
        assert_eq!(line.grad_norm, None);
        assert_eq!(line.eval_loss, None);
        for other in [&b"{\"step\":3,\"lo"[..], b"", b"[]", b"{}", b"\xff"] {
            assert_eq!(Line::read(other), None);
        }
    }

    #[test]
    fn keys_that_are_not_known_are_passed_over() {
        let line = Line::read(br#"{"step":1,"bytes":{"promote":5,"new":6},"later":[1]}"#);
        assert_eq!(line.expect("a line").hop_bytes(), [5, 0, 0, 0]);
    }
}
