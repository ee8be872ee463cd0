//! run.toml: parsed and validated once, nothing resolved.
//!
//! - Order of settings: built-in defaults, then the file, then each `--set a.b=c` as given. Of two
//!   that name the same key the later one counts; `terrace config show` prints what came of it.
//! - An unknown key is an error that names the nearest known one; sizes are strings with units.
//! - Paths are kept as written; relative ones are meant from the current directory.
//!
//! Nothing here reads a file, asks the machine or knows a device: `train` and the tools do.

mod given;
pub mod import;
mod keys;
pub mod parse;
mod schema;
mod size;
mod written;

pub(crate) use given::distance;
pub use schema::json_schema;

pub use parse::{Class, Difference, commented_template};

use core::net::SocketAddr;
use std::path::PathBuf;

use crate::tile::{GradientDtype, MomentDtype, Precision};

/// A byte count that a person wrote, or `"auto"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// As the machine allows; resolved once, at the start, and printed.
    Auto,
    /// Bytes.
    Bytes(u64),
}

/// `[model]`
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Directory in Hugging Face's layout; `None` only in the embedded quickstart.
    pub path: Option<PathBuf>,
    /// Precision of weights and master.
    pub precision: Precision,
    /// Where weights come from.
    pub init: WeightInit,
}

/// Where weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightInit {
    /// From the safetensors files under `model.path`.
    Pretrained,
    /// Random, from `train.seed`; `model.path` needs only a config.json.
    Random,
}

/// `[optimizer]`
#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerConfig {
    /// Format of AdamW's moments.
    pub moments: MomentDtype,
}

/// How the rows of a dataset are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataFormat {
    /// By the keys of the first rows.
    Auto,
    /// `messages`: a list of `{role, content}`.
    Messages,
    /// `conversations`: a list of `{from, value}`.
    Sharegpt,
    /// `instruction`, `input`, `output`.
    Alpaca,
    /// `prompt` and `completion`, or `question` and `answer`.
    Prompt,
    /// `text`, or the whole of a .txt file.
    Text,
    /// `input_ids`, and `labels` if present.
    Tokens,
}

/// Where tokens of long files are kept between runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenCache {
    /// Under the user's cache directory, for files of some length.
    Auto,
    /// Nowhere: tokens are in memory.
    Off,
    /// In this directory, for files of any length.
    At(PathBuf),
}

/// `[data]`
#[derive(Clone, Debug, PartialEq)]
pub struct DataConfig {
    /// Training sources: files, directories, `*` patterns, names in `dataset_dir`.
    pub train: Vec<PathBuf>,
    /// Evaluation sources.
    pub eval: Vec<PathBuf>,
    /// Directory of a dataset_info.json whose names may stand among the sources.
    pub dataset_dir: Option<PathBuf>,
    /// Weights of the training sources in an epoch's rows; empty: all rows of all.
    pub mix: Vec<f64>,
    /// Most rows of a source.
    pub max_samples: Option<u64>,
    /// Training rows held out for evaluation: a share below 1, or a count.
    pub eval_split: f64,
    /// Where tokens are kept between runs.
    pub cache: TokenCache,
    /// Most bytes of that directory.
    pub cache_size: Size,
    /// Row format.
    pub format: DataFormat,
    /// Most tokens of a sequence.
    pub seq_len: u64,
    /// Several short documents share a sequence, each attending only to itself.
    pub packing: bool,
    /// Rows are shuffled anew each epoch, from `train.seed`.
    pub shuffle: bool,
    /// A longer row is cut at `seq_len`; otherwise it is refused by name.
    pub truncate: bool,
}

/// Shape of the learning rate over steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateSchedule {
    /// Peak after warm-up.
    Constant,
    /// Straight line to the floor.
    Linear,
    /// Half a cosine to the floor.
    Cosine,
    /// Warm-up, stable, then a straight decay over the last tenth of the steps.
    Wsd,
}

/// `[train]`
#[derive(Clone, Debug, PartialEq)]
pub struct TrainConfig {
    /// Optimizer steps; exclusive with `epochs`.
    pub steps: Option<u64>,
    /// Passes over the data.
    pub epochs: Option<u64>,
    /// Sequences of a micro-batch.
    pub micro_batch: u64,
    /// Micro-batches of a step.
    pub micro_batches: u64,
    /// Peak rate.
    pub learning_rate: f64,
    /// Shape over steps.
    pub schedule: RateSchedule,
    /// Steps from 0 to the peak.
    pub warmup_steps: u64,
    /// Floor of the schedule.
    pub min_learning_rate: f64,
    /// AdamW's betas.
    pub betas: [f64; 2],
    /// AdamW's epsilon.
    pub eps: f64,
    /// Decoupled decay of tensors of rank ≥ 2.
    pub weight_decay: f64,
    /// Global gradient norm is clipped to this; 0 is off.
    pub max_grad_norm: f64,
    /// Format of gradients between device and optimizer.
    pub gradient_dtype: GradientDtype,
    /// What is done about a spike of the gradient norm.
    pub on_spike: OnSpike,
    /// How many times its running mean a norm may be.
    pub spike_threshold: f64,
    /// Steps between evaluations; 0 is never.
    pub eval_every: u64,
    /// Evaluations without an improvement that end the run; 0 is never.
    pub early_stopping_patience: u64,
    /// What of an evaluation's loss is no improvement.
    pub early_stopping_threshold: f64,
    /// Seed of everything random.
    pub seed: u64,
}

/// One path of `memory.store`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorePath {
    /// Directory of the scratch store.
    pub path: PathBuf,
    /// Most bytes to use there.
    pub size: Size,
    /// Bytes a second that can be read there, where a person says so.
    pub read: Option<u64>,
    /// Bytes a second that can be written there, where a person says so.
    pub write: Option<u64>,
}

impl StorePath {
    /// A directory, with all else left open.
    pub fn new(path: PathBuf) -> StorePath {
        StorePath {
            path,
            size: Size::Auto,
            read: None,
            write: None,
        }
    }

    /// Bytes a second of what is read and written once each, if a rate is known; the other is
    /// taken to be the same.
    pub fn rate(&self) -> Option<f64> {
        let (read, write) = (self.read.or(self.write)?, self.write.or(self.read)?);
        Some(1.0 / (1.0 / read as f64 + 1.0 / write as f64))
    }
}

/// What activations are kept instead of recomputed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// Kept as far as `memory.device` allows.
    Auto,
    /// Every block is recomputed.
    All,
    /// Nothing is recomputed; refused if it does not fit.
    None,
}

/// `[memory]`
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryConfig {
    /// Arena of the device.
    pub device: Size,
    /// Arena of the host.
    pub host: Size,
    /// Where overflow is spilled.
    pub store: Vec<StorePath>,
    /// Device buffers of block weights, 1..=8: 2 is a double buffer.
    pub buffers: u64,
    /// Host slabs of extents in flight, 4..=256.
    pub slabs: u64,
    /// Kept or recomputed activations.
    pub recompute: Recompute,
    /// Whether spilled moments are compressed on their way to the disk.
    pub zstd: SpillZstd,
    /// Engine of the store: `None` is by a probe.
    pub io_engine: Option<IoEngine>,
    /// Terabytes (10^12 bytes) that the drive of store and checkpoints is rated to take; `None`
    /// where nobody says.
    pub drive_tbw: Option<f64>,
    /// Measured rates of this machine, as `terrace-bench profile` writes them.
    pub profile: Option<PathBuf>,
    /// Seconds after which an operation of the store that has not come back is said; 0 is never.
    pub io_timeout: u64,
}

/// Whether spilled moments are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpillZstd {
    /// Where the plan's rates predict a shorter step by it.
    Auto,
    /// Wherever host memory has room for it.
    On,
    /// Never.
    Off,
}

impl SpillZstd {
    /// Whether they are, where `auto` is the plan's choice.
    pub fn or(self, auto: bool) -> bool {
        match self {
            SpillZstd::Auto => auto,
            SpillZstd::On => true,
            SpillZstd::Off => false,
        }
    }
}

/// Engine of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoEngine {
    /// io_uring.
    Uring,
    /// A pool of threads with pread and pwrite.
    Pread,
}

/// `[checkpoint]`
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointConfig {
    /// Directory of the checkpoint store; `None` is `log.dir`/checkpoint.
    pub dir: Option<PathBuf>,
    /// Steps between commits; 0 is off, with a warning.
    pub every: u64,
    /// Commits that are kept, at least 1.
    pub keep: u64,
    /// The commit of the evaluation with the lowest loss is kept too.
    pub keep_best: bool,
    /// Level of zstd, 1..=19; 0 is off.
    pub zstd: u64,
}

impl Default for CheckpointConfig {
    fn default() -> CheckpointConfig {
        CheckpointConfig {
            dir: None,
            every: 100,
            keep: 2,
            keep_best: false,
            zstd: 0,
        }
    }
}

impl CheckpointConfig {
    /// Commits that a store holds when it is full.
    pub fn held(&self) -> u64 {
        self.keep + u64::from(self.keep_best)
    }
}

/// What is done about a gradient norm far above those before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnSpike {
    /// It is told.
    Continue,
    /// The run ends.
    Stop,
    /// Its step makes no update.
    Skip,
}

/// `[log]`
#[derive(Clone, Debug, PartialEq)]
pub struct LogConfig {
    /// Directory of metrics, samples, event files and the report.
    pub dir: PathBuf,
    /// Steps between samples of generated text; 0 is never.
    pub sample_every: u64,
    /// Texts to continue; empty: the beginning of the data.
    pub sample_prompts: Vec<String>,
    /// They go through the chat template as a user's turn.
    pub sample_chat: bool,
    /// Most tokens of a sample.
    pub sample_tokens: u64,
    /// Temperature of sampling; 0 is greedy.
    pub sample_temperature: f64,
    /// Event files for TensorBoard are written.
    pub tensorboard: bool,
    /// Where Prometheus may ask; a loopback address.
    pub prometheus: Option<SocketAddr>,
}

/// A run, as a person described it.
#[derive(Clone, Debug, PartialEq)]
pub struct RunConfig {
    /// `[model]`
    pub model: ModelConfig,
    /// `[data]`
    pub data: DataConfig,
    /// `[train]`
    pub train: TrainConfig,
    /// `[optimizer]`
    pub optimizer: OptimizerConfig,
    /// `[memory]`
    pub memory: MemoryConfig,
    /// `[checkpoint]`
    pub checkpoint: CheckpointConfig,
    /// `[log]`
    pub log: LogConfig,
}

impl RunConfig {
    /// Formats of weights, master and moments.
    pub fn precision(&self) -> Precision {
        match (self.model.precision, self.optimizer.moments) {
            (Precision::Bf16, MomentDtype::Bf16) => Precision::Bf16Moments,
            (precision, _) => precision,
        }
    }
}

impl Default for LogConfig {
    fn default() -> LogConfig {
        LogConfig {
            dir: PathBuf::from("runs/terrace"),
            sample_every: 0,
            sample_prompts: Vec::new(),
            sample_chat: false,
            sample_tokens: 64,
            sample_temperature: 0.7,
            tensorboard: true,
            prometheus: None,
        }
    }
}

impl Default for RunConfig {
    fn default() -> RunConfig {
        RunConfig {
            model: ModelConfig {
                path: None,
                precision: Precision::Bf16,
                init: WeightInit::Pretrained,
            },
            data: DataConfig {
                train: Vec::new(),
                eval: Vec::new(),
                dataset_dir: None,
                mix: Vec::new(),
                max_samples: None,
                eval_split: 0.0,
                cache: TokenCache::Auto,
                cache_size: Size::Bytes(64 << 30),
                format: DataFormat::Auto,
                seq_len: 1024,
                packing: true,
                shuffle: true,
                truncate: false,
            },
            train: TrainConfig {
                steps: None,
                epochs: None,
                micro_batch: 1,
                micro_batches: 1,
                learning_rate: 1e-5,
                schedule: RateSchedule::Cosine,
                warmup_steps: 0,
                min_learning_rate: 0.0,
                betas: [0.9, 0.999],
                eps: 1e-8,
                weight_decay: 0.01,
                max_grad_norm: 1.0,
                gradient_dtype: GradientDtype::Bf16,
                on_spike: OnSpike::Continue,
                spike_threshold: 5.0,
                eval_every: 0,
                early_stopping_patience: 0,
                early_stopping_threshold: 0.0,
                seed: 0,
            },
            optimizer: OptimizerConfig {
                moments: MomentDtype::F32,
            },
            memory: MemoryConfig {
                device: Size::Auto,
                host: Size::Auto,
                store: Vec::new(),
                buffers: 2,
                slabs: 16,
                recompute: Recompute::Auto,
                zstd: SpillZstd::Auto,
                io_engine: None,
                drive_tbw: None,
                profile: None,
                io_timeout: 60,
            },
            checkpoint: CheckpointConfig::default(),
            log: LogConfig::default(),
        }
    }
}
