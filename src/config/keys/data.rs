//! Keys of `[data]`.

use super::{COUNT_MAX, Key, key};
use crate::config::written::{named, number, path_list, quoted_path};
use crate::config::{DataFormat, TokenCache};

const FORMATS: &[(&str, DataFormat)] = &[
    ("auto", DataFormat::Auto),
    ("messages", DataFormat::Messages),
    ("sharegpt", DataFormat::Sharegpt),
    ("alpaca", DataFormat::Alpaca),
    ("prompt", DataFormat::Prompt),
    ("text", DataFormat::Text),
    ("tokens", DataFormat::Tokens),
];

pub(super) const KEYS: &[Key] = &[
    key!(
        data.train,
        Forbidden,
        "",
        "\"data/train.jsonl\"",
        "Training sources: a path, or a list of paths. A path is a file, a directory of them, a\n\
         pattern (shards/train_*.bin) or a name in dataset_dir.",
        |g| g.paths()?,
        |v| path_list(v)
    ),
    key!(
        data.eval,
        Logged,
        "[]",
        "",
        "Evaluation sources, as for train.",
        |g| g.paths()?,
        |v| path_list(v)
    ),
    key!(
        data.dataset_dir,
        Forbidden,
        "",
        "# \"data\"",
        "Directory of a dataset_info.json, whose names may then stand in train and eval.",
        |g| Some(g.path()?),
        |v| v.as_deref().map(quoted_path)
    ),
    key!(
        data.mix,
        Forbidden,
        "[]",
        "",
        "Weights of the sources of train, as [0.7, 0.3]: their shares of an epoch's rows. The\n\
         epoch ends where the first source was seen once; the others go on in the next one.\n\
         Without it an epoch is every row of every source.",
        |g| g.weights()?,
        |v| Some(format!("{v:?}"))
    ),
    key!(
        data.max_samples,
        Forbidden,
        "",
        "# 1000",
        "Most rows of a source: its first ones.",
        |g| Some(g.integer(1, COUNT_MAX)?),
        |v| v.map(|v| v.to_string())
    ),
    key!(
        data.eval_split,
        Forbidden,
        "0.0",
        "",
        "Rows of each source of train that are held out for evaluation, chosen by train.seed: a\n\
         share below 1, or a count. Not together with eval.",
        |g| g.float(
            |x| (0.0..1.0).contains(&x) || (x >= 1.0 && x.fract() == 0.0 && x <= 1e9),
            "a share from 0 to below 1, or a whole number of rows"
        )?,
        |v| number(*v)
    ),
    key!(
        data.cache,
        Free,
        "\"auto\"",
        "",
        "Where tokens are kept between runs, so that data may be larger than memory: \"auto\"\n\
         (from 32 MiB of text on, terrace/tokens under XDG_CACHE_HOME or ~/.cache), \"off\" (in\n\
         memory only) or a directory.",
        |g| match g.path()? {
            path if path.as_os_str() == "auto" => TokenCache::Auto,
            path if path.as_os_str() == "off" => TokenCache::Off,
            path => TokenCache::At(path),
        },
        |v| Some(match v {
            TokenCache::Auto => "\"auto\"".to_string(),
            TokenCache::Off => "\"off\"".to_string(),
            TokenCache::At(path) => quoted_path(path),
        })
    ),
    key!(
        data.cache_size,
        Free,
        "\"64GiB\"",
        "",
        "Most bytes there; what was used longest ago goes first. \"auto\" is half of what is free.",
        |g| g.size()?,
        |v| Some(format!("\"{v}\""))
    ),
    key!(
        data.format,
        Forbidden,
        "\"auto\"",
        "",
        "Rows: \"auto\" (by the keys of the first ones), \"messages\", \"sharegpt\", \"alpaca\",\n\
         \"prompt\", \"text\" or \"tokens\".",
        |g| g.choice(FORMATS)?,
        |v| named(FORMATS, v)
    ),
    key!(
        data.seq_len,
        Forbidden,
        "1024",
        "",
        "Most tokens of a sequence, 2 to 1048576.",
        |g| g.integer(2, 1 << 20)?,
        |v| Some(v.to_string())
    ),
    key!(
        data.packing,
        Forbidden,
        "true",
        "",
        "Short documents share a sequence; each attends only to itself.",
        |g| g.boolean()?,
        |v| Some(v.to_string())
    ),
    key!(
        data.shuffle,
        Forbidden,
        "true",
        "",
        "Rows are shuffled anew each epoch, from train.seed.",
        |g| g.boolean()?,
        |v| Some(v.to_string())
    ),
    key!(
        data.truncate,
        Forbidden,
        "false",
        "",
        "true: a row longer than seq_len is cut; false: it is refused by name.",
        |g| g.boolean()?,
        |v| Some(v.to_string())
    ),
];
