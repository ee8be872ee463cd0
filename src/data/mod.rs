//! Data: files to rows, rows to tokens, tokens to micro-batches, with a cursor that resumes exactly.

/// A target that has no loss.
pub const IGNORE: u32 = u32::MAX;

/// One micro-batch: sequences one after another, without padding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Micro {
    /// Token ids, `[T]`.
    pub tokens: Vec<u32>,
    /// What each token is to predict: the next token of its sequence, or [`IGNORE`] where that one
    /// is masked or the sequence ends. `[T]`.
    pub targets: Vec<u32>,
    /// Position of each token in its sequence, from 0. `[T]`.
    pub positions: Vec<u32>,
    /// Starts of the sequences and the end: 0, …, T.
    pub bounds: Vec<u32>,
}
