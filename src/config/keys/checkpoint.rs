//! Keys of `[checkpoint]`.

use super::{COUNT_MAX, Key, key};
use crate::config::written::quoted_path;

pub(super) const KEYS: &[Key] = &[
    key!(
        checkpoint.dir,
        Free,
        "",
        "# \"runs/terrace/checkpoint\"",
        "Directory of checkpoints; without it, checkpoint under log.dir.",
        |g| Some(g.path()?),
        |v| v.as_deref().map(quoted_path)
    ),
    key!(
        checkpoint.every,
        Free,
        "100",
        "",
        "Steps between checkpoints; 0 is never.",
        |g| g.integer(0, COUNT_MAX)?,
        |v| Some(v.to_string())
    ),
    key!(
        checkpoint.keep,
        Free,
        "2",
        "",
        "Checkpoints that are kept, 1 to 31; each takes 12 bytes a parameter.",
        |g| g.integer(1, 31)?,
        |v| Some(v.to_string())
    ),
    key!(
        checkpoint.keep_best,
        Free,
        "false",
        "",
        "true: the one of the evaluation with the lowest loss is kept beside these; it is made\n\
         right after the evaluation. `terrace export --best` takes it.",
        |g| g.boolean()?,
        |v| Some(v.to_string())
    ),
    key!(
        checkpoint.zstd,
        Free,
        "0",
        "",
        "Level of zstd for later checkpoints, 1 to 19; 0 is off. It takes CPU time and shortens\n\
         what is written; the space reserved stays the same.",
        |g| g.integer(0, 19)?,
        |v| Some(v.to_string())
    ),
];
