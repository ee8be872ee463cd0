//! Every key of run.toml, once: its name, meaning, default, how it is read and written, and
//! whether it may change when a run is resumed.
//!
//! The template, the writer, the reader and the comparison on resume are loops over [`KEYS`].

use super::given::Given;
use super::written::{named, number, path_list, quoted_path, store_list};
use super::{DataFormat, IoEngine, RateSchedule, Recompute, RunConfig, TokenCache, WeightInit};
use crate::error::Result;
use crate::tile::{GradientDtype, Precision};

/// What a change of a key means to a run that is resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Changes nothing that is computed from the state at hand.
    Free,
    /// Changes what comes; allowed, and written to the log.
    Logged,
    /// Would make it another run; refused without `--resume-changed`.
    Forbidden,
}

/// A key of run.toml.
pub(super) struct Key {
    pub(super) table: &'static str,
    pub(super) name: &'static str,
    pub(super) class: Class,
    /// Its default as TOML; empty where there is none.
    pub(super) default: &'static str,
    /// What the template shows where there is no default; `#` before it keeps it a comment.
    pub(super) example: &'static str,
    /// For the template: meaning, unit, range; one comment a line.
    pub(super) meaning: &'static str,
    pub(super) set: fn(&mut RunConfig, &Given<'_>) -> Result<()>,
    /// As TOML; `None` where nothing is set.
    pub(super) get: fn(&RunConfig) -> Option<String>,
}

impl Key {
    /// `train.steps`
    pub(super) fn path(&self) -> String {
        format!("{}.{}", self.table, self.name)
    }
}

/// What each table is about, in the order in which a file has them.
pub(super) const TABLES: [(&str, &str); 6] = [
    ("model", "What is trained."),
    ("data", "What it is trained on."),
    ("train", "How."),
    (
        "memory",
        "Where weights, gradients and optimizer state live. Never changes a result.",
    ),
    ("checkpoint", "What a run can be resumed from."),
    ("log", "Metrics, plots and traces."),
];

const PRECISIONS: &[(&str, Precision)] = &[("bf16", Precision::Bf16), ("fp32", Precision::Fp32)];
const INITS: &[(&str, WeightInit)] = &[
    ("pretrained", WeightInit::Pretrained),
    ("random", WeightInit::Random),
];
const FORMATS: &[(&str, DataFormat)] = &[
    ("auto", DataFormat::Auto),
    ("messages", DataFormat::Messages),
    ("sharegpt", DataFormat::Sharegpt),
    ("alpaca", DataFormat::Alpaca),
    ("prompt", DataFormat::Prompt),
    ("text", DataFormat::Text),
    ("tokens", DataFormat::Tokens),
];
const SCHEDULES: &[(&str, RateSchedule)] = &[
    ("constant", RateSchedule::Constant),
    ("linear", RateSchedule::Linear),
    ("cosine", RateSchedule::Cosine),
    ("wsd", RateSchedule::Wsd),
];
const GRADIENT_DTYPES: &[(&str, GradientDtype)] =
    &[("bf16", GradientDtype::Bf16), ("f32", GradientDtype::F32)];
const RECOMPUTES: &[(&str, Recompute)] = &[
    ("auto", Recompute::Auto),
    ("all", Recompute::All),
    ("none", Recompute::None),
];
const IO_ENGINES: &[(&str, Option<IoEngine>)] = &[
    ("auto", None),
    ("io_uring", Some(IoEngine::Uring)),
    ("pread", Some(IoEngine::Pread)),
];

/// Most of what counts steps or epochs.
const COUNT_MAX: u64 = 1_000_000_000_000;
/// The largest integer of TOML.
const SEED_MAX: u64 = i64::MAX as u64;

/// `key!(table.name, class, default, example, meaning, set, get)`
macro_rules! key {
    ($table:ident . $name:ident, $class:ident, $default:literal, $example:literal, $meaning:expr,
     |$given:ident| $read:expr, |$value:ident| $write:expr) => {
        Key {
            table: stringify!($table),
            name: stringify!($name),
            class: Class::$class,
            default: $default,
            example: $example,
            meaning: $meaning,
            set: |config, $given| {
                config.$table.$name = $read;
                Ok(())
            },
            get: |config| {
                let $value = &config.$table.$name;
                $write
            },
        }
    };
}

/// All keys, in the order in which a file has them.
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
        train.eval_every,
        Free,
        "0",
        "",
        "Steps between evaluations; 0 is never.",
        |g| g.integer(0, COUNT_MAX)?,
        |v| Some(v.to_string())
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
    key!(
        memory.device,
        Free,
        "\"auto\"",
        "",
        "Device memory to use: \"24GiB\", \"141 GB\", or \"auto\".",
        |g| g.size()?,
        |v| Some(format!("\"{v}\""))
    ),
    key!(
        memory.host,
        Free,
        "\"auto\"",
        "",
        "Host memory to use; \"auto\" is what is free, less a reserve.",
        |g| g.size()?,
        |v| Some(format!("\"{v}\""))
    ),
    key!(
        memory.store,
        Free,
        "[]",
        "",
        "Where to spill what host memory cannot hold: a path, or a list as\n\
         [{ path = \"/nvme/scratch\", size = \"512GiB\" }]. With its rates in each entry\n\
         (read = \"3GB/s\", write = \"2GB/s\") bytes are spread by those; without, by size.",
        |g| g.store()?,
        |v| store_list(v)
    ),
    key!(
        memory.buffers,
        Free,
        "2",
        "",
        "Device buffers of block weights, 1 to 8.",
        |g| g.integer(1, 8)?,
        |v| Some(v.to_string())
    ),
    key!(
        memory.slabs,
        Free,
        "16",
        "",
        "Host slabs of 4 MiB in flight to and from the store, 4 to 256.",
        |g| g.integer(4, 256)?,
        |v| Some(v.to_string())
    ),
    key!(
        memory.recompute,
        Free,
        "\"auto\"",
        "",
        "Activations: \"auto\" keeps what fits, \"all\" recomputes every block, \
         \"none\" keeps all.",
        |g| g.choice(RECOMPUTES)?,
        |v| named(RECOMPUTES, v)
    ),
    key!(
        memory.io_engine,
        Free,
        "\"auto\"",
        "",
        "Engine of the store: \"auto\", \"io_uring\" or \"pread\".",
        |g| g.choice(IO_ENGINES)?,
        |v| named(IO_ENGINES, v)
    ),
    key!(
        memory.drive_tbw,
        Free,
        "",
        "# 600",
        "Terabytes written (TBW) that the drive of memory.store and checkpoint.dir is rated for,\n\
         the sum of several: metrics and plan then show the share of its life.",
        |g| Some(g.float(|x| x > 0.0, "a number of terabytes above 0")?),
        |v| v.and_then(number)
    ),
    key!(
        memory.profile,
        Free,
        "",
        "# \"profile.toml\"",
        "Rates of this machine, measured once by `terrace-bench profile`; without it, a moment's\n\
         measurement and a common drive.",
        |g| Some(g.path()?),
        |v| v.as_deref().map(quoted_path)
    ),
    key!(
        memory.io_timeout,
        Free,
        "60",
        "",
        "Seconds after which a read or write of the store that has not come back is said, 0 to\n\
         86400; 0 is never. It ends nothing.",
        |g| g.integer(0, 86400)?,
        |v| Some(v.to_string())
    ),
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
        checkpoint.zstd,
        Free,
        "0",
        "",
        "Level of zstd for later checkpoints, 1 to 19; 0 is off. It takes CPU time and shortens\n\
         what is written; the space reserved stays the same.",
        |g| g.integer(0, 19)?,
        |v| Some(v.to_string())
    ),
    key!(
        log.dir,
        Free,
        "\"runs/terrace\"",
        "",
        "Directory of metrics.jsonl, event files and plots.",
        |g| g.path()?,
        |v| Some(quoted_path(v))
    ),
];
