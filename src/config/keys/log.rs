//! Keys of `[log]`.

use super::{Key, key};
use crate::config::written::quoted_path;

pub(super) const KEYS: &[Key] = &[key!(
    log.dir,
    Free,
    "\"runs/terrace\"",
    "",
    "Directory of metrics.jsonl, event files and plots.",
    |g| g.path()?,
    |v| Some(quoted_path(v))
)];
