//! Keys of `[train]`.

use super::{COUNT_MAX, Key, SEED_MAX, key};
use crate::config::written::{named, number};
use crate::config::{OnSpike, RateSchedule};
use crate::tile::GradientDtype;

const SCHEDULES: &[(&str, RateSchedule)] = &[
    ("constant", RateSchedule::Constant),
    ("linear", RateSchedule::Linear),
    ("cosine", RateSchedule::Cosine),
    ("wsd", RateSchedule::Wsd),
];
const ON_SPIKE: &[(&str, OnSpike)] = &[
    ("continue", OnSpike::Continue),
    ("stop", OnSpike::Stop),
    ("skip", OnSpike::Skip),
];
const GRADIENT_DTYPES: &[(&str, GradientDtype)] =
    &[("bf16", GradientDtype::Bf16), ("f32", GradientDtype::F32)];

pub(super) const KEYS: &[Key] = &[
    key!(
        train.steps,
        Free,
        "",
        "1000",
        "Optimizer steps. Give steps or epochs, not both.",
        |g| Some(g.integer(1, COUNT_MAX)?),
        |v| v.map(|v| v.to_string())
    ),
    key!(
        train.epochs,
        Free,
        "",
        "# 1",
        "Passes over the data.",
        |g| Some(g.integer(1, COUNT_MAX)?),
        |v| v.map(|v| v.to_string())
    ),
    key!(
        train.micro_batch,
        Forbidden,
        "1",
        "",
        "Sequences of a micro-batch, 1 to 65536.",
        |g| g.integer(1, 65536)?,
        |v| Some(v.to_string())
    ),
    key!(
        train.micro_batches,
        Forbidden,
        "1",
        "",
        "Micro-batches of a step, 1 to 65536.",
        |g| g.integer(1, 65536)?,
        |v| Some(v.to_string())
    ),
    key!(
        train.learning_rate,
        Logged,
        "1e-5",
        "",
        "Peak learning rate.",
        |g| g.float(|x| x >= 0.0, "a finite number of at least 0")?,
        |v| number(*v)
    ),
    key!(
        train.schedule,
        Logged,
        "\"cosine\"",
        "",
        "After warm-up: \"constant\", \"linear\" or \"cosine\" to min_learning_rate, or \"wsd\":\n\
         constant, then a straight line over the last tenth of the steps.",
        |g| g.choice(SCHEDULES)?,
        |v| named(SCHEDULES, v)
    ),
    key!(
        train.warmup_steps,
        Logged,
        "0",
        "",
        "Steps over which the rate rises from 0; at most steps.",
        |g| g.integer(0, COUNT_MAX)?,
        |v| Some(v.to_string())
    ),
    key!(
        train.min_learning_rate,
        Logged,
        "0.0",
        "",
        "Where the schedule ends; at most learning_rate.",
        |g| g.float(|x| x >= 0.0, "a finite number of at least 0")?,
        |v| number(*v)
    ),
    key!(
        train.betas,
        Logged,
        "[0.9, 0.999]",
        "",
        "AdamW's betas, each at least 0 and less than 1.",
        |g| g.betas()?,
        |v| Some(format!("{v:?}"))
    ),
    key!(
        train.eps,
        Logged,
        "1e-8",
        "",
        "AdamW's epsilon, above 0 in f32.",
        |g| g.float(
            |x| x as f32 > 0.0 && (x as f32).is_finite(),
            "a number above 0 in f32"
        )?,
        |v| number(*v)
    ),
    key!(
        train.weight_decay,
        Logged,
        "0.01",
        "",
        "Decoupled weight decay of tensors with two or more dimensions.",
        |g| g.float(|x| x >= 0.0, "a finite number of at least 0")?,
        |v| number(*v)
    ),
    key!(
        train.max_grad_norm,
        Logged,
        "1.0",
        "",
        "Global gradient norm is clipped to this; 0 is off: 2 bytes a parameter less, and updates\n\
         need not wait for the norm.",
        |g| g.float(|x| x >= 0.0, "a finite number of at least 0")?,
        |v| number(*v)
    ),
    key!(
        train.gradient_dtype,
        Forbidden,
        "\"bf16\"",
        "",
        "Gradients on their way to the optimizer: \"bf16\", rounded once, or \"f32\". Accumulated\n\
         in f32 either way; \"f32\" under precision \"fp32\".",
        |g| g.choice(GRADIENT_DTYPES)?,
        |v| named(GRADIENT_DTYPES, v)
    ),
    key!(
        train.on_spike,
        Logged,
        "\"continue\"",
        "",
        "What to do when the gradient norm is more than spike_threshold times its running mean:\n\
         \"continue\" says so, \"stop\" ends the run at its last commit, \"skip\" makes no update\n\
         in that step; a norm that is not finite is skipped too. The norm is judged since it is\n\
         known before any weight changes, and differs less between batches than the loss.\n\
         A skipped step counts as a step, of the learning rate too, and not as one of AdamW's.\n\
         \"skip\" needs max_grad_norm: only then do updates wait for the norm.",
        |g| g.choice(ON_SPIKE)?,
        |v| named(ON_SPIKE, v)
    ),
    key!(
        train.spike_threshold,
        Logged,
        "5.0",
        "",
        "Above 1. The mean is over the last 50 or so steps; the first 20 are not judged.",
        |g| g.float(|x| x > 1.0, "a finite number above 1")?,
        |v| number(*v)
    ),
    key!(
        train.eval_every,
        Free,
        "0",
        "",
        "Steps between evaluations; 0 is never.",
        |g| g.integer(0, COUNT_MAX)?,
        |v| Some(v.to_string())
    ),
    key!(
        train.early_stopping_patience,
        Free,
        "0",
        "",
        "Evaluations in a row without an improvement after which the run ends; 0 is never.",
        |g| g.integer(0, COUNT_MAX)?,
        |v| Some(v.to_string())
    ),
    key!(
        train.early_stopping_threshold,
        Free,
        "0.0",
        "",
        "An improvement is a loss lower than the lowest before by more than this, nats.",
        |g| g.float(|x| x >= 0.0, "a finite number of at least 0")?,
        |v| number(*v)
    ),
    key!(
        train.seed,
        Forbidden,
        "0",
        "",
        "Seed of everything random.",
        |g| g.integer(0, SEED_MAX)?,
        |v| Some(v.to_string())
    ),
];
