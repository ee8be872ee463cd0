//! Keys of `[model]`.

use super::{Key, key};
use crate::config::WeightInit;
use crate::config::written::{named, quoted_path};
use crate::tile::Precision;

const PRECISIONS: &[(&str, Precision)] = &[("bf16", Precision::Bf16), ("fp32", Precision::Fp32)];
const INITS: &[(&str, WeightInit)] = &[
    ("pretrained", WeightInit::Pretrained),
    ("random", WeightInit::Random),
];

pub(super) const KEYS: &[Key] = &[
    key!(
        model.path,
        Forbidden,
        "",
        "\"path/to/model\"",
        "Directory of the model in Hugging Face's layout.",
        |g| Some(g.path()?),
        |v| v.as_deref().map(quoted_path)
    ),
    key!(
        model.precision,
        Forbidden,
        "\"bf16\"",
        "",
        "\"bf16\": bf16 weights with an exact fp32 master, 12 bytes a parameter.\n\
         \"fp32\": everything in f32, gradients too.",
        |g| g.choice(PRECISIONS)?,
        |v| named(PRECISIONS, v)
    ),
    key!(
        model.init,
        Forbidden,
        "\"pretrained\"",
        "",
        "\"pretrained\": weights from the files under path.\n\
         \"random\": from train.seed; path needs only a config.json.",
        |g| g.choice(INITS)?,
        |v| named(INITS, v)
    ),
];
