//! `terrace generate` and `terrace export`: what comes out of a run.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use clap::Args;
use terrace::checkpoint::{Choice, CommittedWeights, checkpoint_at, model_of_commits};
use terrace::config::{RunConfig, Size};
use terrace::data::TextTokenizer;
use terrace::error::{Error, Result};
use terrace::generate::{Sampling, generate as extend, prompt_ids};
use terrace::hf::{self, ExportDtype, ExportOptions, WeightSource, hub};
use terrace::model::ModelSpec;
use terrace::plan::{Plan, Purpose, bytes_text};
use terrace::tile::Precision;
use terrace::train::{build_engine, choose_device, model_dir, resolve_budgets};

use crate::say;
use crate::train::watch_signals;

/// Longest text, as data.seq_len's.
const SEQ_LEN_MAX: u64 = 1 << 20;

/// Where weights come from: a commit, or a model directory.
#[derive(Args)]
pub(crate) struct Source {
    /// Checkpoint directory of a run, or the run's log.dir
    #[arg(
        long,
        value_name = "DIRECTORY",
        conflicts_with = "model",
        required_unless_present = "model"
    )]
    checkpoint: Option<PathBuf>,
    /// The commit of this step; the newest otherwise
    #[arg(long, requires = "checkpoint")]
    step: Option<u64>,
    /// The commit of the evaluation with the lowest loss (checkpoint.keep_best)
    #[arg(long, requires = "checkpoint", conflicts_with = "step")]
    best: bool,
    /// Model directory in Hugging Face's layout, or a name in the local cache
    #[arg(long, value_name = "NAME|DIRECTORY")]
    model: Option<PathBuf>,
}

/// Weights that were opened, with the run that they belong to.
enum Weights {
    Commit(Box<CommittedWeights>),
    Files(WeightSource),
}

struct Opened {
    config: RunConfig,
    spec: ModelSpec,
    model_json: serde_json::Value,
    weights: Weights,
}

impl Source {
    fn open(&self) -> Result<Opened> {
        if let Some(dir) = &self.model {
            let dir = hub::resolve(dir)?;
            let (spec, model_json) = hf::read_config(&dir)?;
            let weights = Weights::Files(WeightSource::open(&dir, &spec)?);
            let mut config = RunConfig::default();
            config.model.path = Some(dir);
            return Ok(Opened {
                config,
                spec,
                model_json,
                weights,
            });
        }
        let directory = self.checkpoint.as_deref();
        let directory = &checkpoint_at(directory.expect("clap asks for one of the two"));
        let choice = match self.step {
            Some(step) => Choice::Step(step),
            None if self.best => Choice::Best,
            None => Choice::Newest,
        };
        let committed = CommittedWeights::open(directory, choice)?;
        let mut config = RunConfig::parse(&committed.progress.run, "the commit's run.toml", &[])?;
        config.model.path = model_of_commits(&config, directory);
        let model_json = committed.progress.model.clone();
        let place = format!("config.json in {}", directory.display());
        let spec = ModelSpec::from_config_json(&model_json.to_string(), &place)?;
        Ok(Opened {
            config,
            spec,
            model_json,
            weights: Weights::Commit(Box::new(committed)),
        })
    }
}

impl Weights {
    fn fill(
        &self,
        layout: &terrace::tile::TileLayout,
        elements: std::ops::Range<u64>,
        precision: Precision,
        out: &mut [f32],
    ) -> Result<()> {
        match self {
            Weights::Commit(committed) => committed.read_master(layout, elements, precision, out),
            Weights::Files(files) => files.fill(layout, elements, out),
        }
    }
}

/// Arguments of `terrace generate`.
#[derive(Args)]
pub(crate) struct GenerateArguments {
    #[command(flatten)]
    source: Source,
    /// Where to compute: cpu, cuda:0, or auto (a card if there is one)
    #[arg(long, default_value = "auto")]
    device: String,
    /// Text to continue; standard input if absent
    #[arg(long)]
    prompt: Option<String>,
    /// Put the prompt through the chat template as a user's turn
    #[arg(long)]
    chat: bool,
    /// Most new tokens
    #[arg(long, default_value_t = 64)]
    tokens: u64,
    /// 0 is greedy
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Nucleus of sampling
    #[arg(long, default_value_t = 1.0)]
    top_p: f64,
    /// Seed of sampling
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Longest text, prompt included; default: just what is needed
    #[arg(long)]
    seq_len: Option<u64>,
    /// Host memory to use; the run's memory.host otherwise
    #[arg(long, value_name = "SIZE")]
    host_memory: Option<String>,
    /// Print token ids instead of text
    #[arg(long)]
    ids: bool,
}

/// Runs `terrace generate`.
pub(crate) fn generate(arguments: &GenerateArguments) -> Result<()> {
    check_sampling(arguments)?;
    let opened = arguments.source.open()?;
    let dir = model_dir(&opened.config)?.to_path_buf();
    let tokenizer = TextTokenizer::load(&dir, opened.spec.vocab_size)?;
    let mut tokens = prompt_tokens(arguments, &tokenizer)?;
    let mut config = opened.config.clone();
    config.data.seq_len = seq_len(arguments, tokens.len() as u64)?;
    (config.train.micro_batch, config.train.micro_batches) = (1, 1);
    config.memory.device = Size::Auto;
    if let Some(text) = &arguments.host_memory {
        config.memory.host = Size::parse(text, "--host-memory")?;
    }
    let (profile, _) = choose_device(&arguments.device, config.model.precision)?;
    let budget = resolve_budgets(&opened.spec, &config, &profile)?;
    let mut budgets = budget.budgets;
    budgets.device = u64::MAX;
    let plan = Plan::new(&opened.spec, &config, &profile, budgets, Purpose::Forward)?;
    let (mut engine, _) = build_engine(&opened.spec, &config, plan, &budget, false)?;
    let precision = config.model.precision;
    let tiers = engine.tiers();
    tiers.initialise(|layer, elements, out| {
        opened
            .weights
            .fill(tiers.layout(layer), elements, precision, out)
    })?;
    let mut ends = opened.spec.eos_token_ids.clone();
    ends.extend(tokenizer.eos_ids());
    let sampling = Sampling {
        temperature: arguments.temperature,
        top_p: arguments.top_p,
        seed: arguments.seed,
    };
    let start = tokens.len();
    let mut new: Vec<u32> = Vec::new();
    let mut shown = String::new();
    extend(
        &mut engine,
        &mut tokens,
        arguments.tokens,
        &ends,
        sampling,
        |token| {
            new.push(token);
            if arguments.ids {
                print(&format!("{}{token}", if new.len() > 1 { " " } else { "" }))?;
            } else {
                // Bytes of a character may span tokens: print what is whole.
                let text = tokenizer.decode(&new, true)?;
                if !text.ends_with('\u{fffd}') {
                    print(text.strip_prefix(shown.as_str()).unwrap_or(&text))?;
                    shown = text;
                }
            }
            Ok(true)
        },
    )?;
    debug_assert_eq!(tokens.len(), start + new.len());
    print("\n")
}

fn check_sampling(arguments: &GenerateArguments) -> Result<()> {
    let (temperature, top_p) = (arguments.temperature, arguments.top_p);
    let checks = [
        (
            "--temperature",
            temperature,
            temperature.is_finite() && temperature >= 0.0,
            "0 or more",
        ),
        (
            "--top-p",
            top_p,
            top_p > 0.0 && top_p <= 1.0,
            "above 0, at most 1",
        ),
    ];
    for (flag, value, right, expected) in checks {
        if !right {
            let got = value.to_string();
            return Err(Error::input("arguments", flag, expected, got, "correct it"));
        }
    }
    Ok(())
}

/// Longest text of the plan: what was asked for, or what prompt and new tokens come to.
fn seq_len(arguments: &GenerateArguments, prompt: u64) -> Result<u64> {
    let needed = prompt.saturating_add(arguments.tokens).max(2);
    let (place, tokens) = match arguments.seq_len {
        Some(tokens) => ("--seq-len", tokens),
        None => ("prompt and --tokens", needed),
    };
    if (2..=SEQ_LEN_MAX).contains(&tokens) {
        return Ok(tokens);
    }
    let expected = format!("2 to {SEQ_LEN_MAX} tokens");
    let got = tokens.to_string();
    Err(Error::input(
        "arguments",
        place,
        expected,
        got,
        "correct it",
    ))
}

fn prompt_tokens(arguments: &GenerateArguments, tokenizer: &TextTokenizer) -> Result<Vec<u32>> {
    let text = match &arguments.prompt {
        Some(text) => text.clone(),
        None => std::io::read_to_string(std::io::stdin())
            .map_err(|e| Error::io("read", "standard input".as_ref(), e))?,
    };
    prompt_ids(tokenizer, &text, arguments.chat, "--prompt")
}

fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|e| Error::io("write", "standard output".as_ref(), e))
}

/// Arguments of `terrace export`.
#[derive(Args)]
pub(crate) struct ExportArguments {
    #[command(flatten)]
    source: Source,
    /// Directory to make
    #[arg(long, value_name = "DIRECTORY")]
    out: PathBuf,
    /// bf16 (or bfloat16): what the model computed with; f32 (or fp32, float32): the exact master
    #[arg(long, default_value = "bf16")]
    dtype: String,
    /// Most bytes of tensors in a file, as transformers' save_pretrained
    #[arg(long, default_value = "5GB", visible_alias = "max-shard-size")]
    shard_size: String,
    /// Replace a model directory that is there
    #[arg(long)]
    overwrite: bool,
}

/// Runs `terrace export`.
pub(crate) fn export(arguments: &ExportArguments) -> Result<()> {
    let dtype = match arguments.dtype.as_str() {
        "bf16" | "bfloat16" => ExportDtype::Bf16,
        "f32" | "fp32" | "float32" => ExportDtype::F32,
        other => {
            let expected = "bf16 or f32";
            return Err(Error::input(
                "arguments",
                "--dtype",
                expected,
                other,
                "correct it",
            ));
        }
    };
    let Size::Bytes(shard_bytes) = Size::parse(&arguments.shard_size, "--shard-size")? else {
        let expected = "a size with a unit";
        return Err(Error::input(
            "arguments",
            "--shard-size",
            expected,
            "auto",
            "write 5GB",
        ));
    };
    let opened = arguments.source.open()?;
    let named = opened.config.model.path.as_deref();
    let dir = named.filter(|dir| dir.is_dir());
    if dir.is_none() {
        let named = named.unwrap_or(Path::new("")).display();
        say(&format!(
            "warning: model.path of the run, {named}, is not there: no tokenizer files are \
             written; copy them beside the weights"
        ))?;
    }
    let options = ExportOptions {
        dir: arguments.out.clone(),
        dtype,
        shard_bytes: shard_bytes.max(1),
        overwrite: arguments.overwrite,
    };
    let precision = opened.config.model.precision;
    let weights = &opened.weights;
    let signal = watch_signals()?;
    let exported = hf::export(
        &options,
        &opened.spec,
        Some(&opened.model_json),
        dir,
        &mut |layout, elements, out| match signal.load(Ordering::Relaxed) {
            0 => weights.fill(layout, elements, precision, out),
            signal => Err(Error::Interrupted { signal, step: 0 }),
        },
    );
    let report = match exported {
        Err(Error::Interrupted { signal, .. }) => {
            eprintln!("terrace: export: ended by signal {signal}; nothing of it is kept");
            std::process::exit(128 + signal);
        }
        exported => exported?,
    };
    say(&format!(
        "{}: {} tensors, {} parameters, {} in {} files of weights",
        report.dir.display(),
        report.tensor_count,
        report.parameters,
        bytes_text(report.tensor_bytes),
        report.shard_count
    ))
}
