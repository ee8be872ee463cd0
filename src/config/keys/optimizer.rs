//! Keys of `[optimizer]`.

use super::{Key, key};
use crate::config::written::named;
use crate::tile::MomentDtype;

const MOMENT_DTYPES: &[(&str, MomentDtype)] =
    &[("f32", MomentDtype::F32), ("bf16", MomentDtype::Bf16)];

pub(super) const KEYS: &[Key] = &[key!(
    optimizer.moments,
    Forbidden,
    "\"f32\"",
    "",
    "AdamW's moments: \"f32\", or \"bf16\" for those who prefer memory to exactness: 8 bytes\n\
     a parameter instead of 12, rounded stochastically (from train.seed) each step. Not under\n\
     precision \"fp32\".",
    |g| g.choice(MOMENT_DTYPES)?,
    |v| named(MOMENT_DTYPES, v)
)];
