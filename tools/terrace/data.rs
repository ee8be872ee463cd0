//! `terrace data`: what a run would train on.

use std::io::IsTerminal;
use std::sync::Arc;

use clap::{Args, Subcommand};
use terrace::config::RunConfig;
use terrace::data::preview::{PreviewOptions, preview as write_preview};
use terrace::data::{self, Batches, Dataset, TextTokenizer};
use terrace::error::{Error, Result};
use terrace::hf;
use terrace::train::model_dir;

use crate::{RunFile, say};

#[derive(Subcommand)]
pub(crate) enum DataCommand {
    /// Print the first sequences with masked tokens marked, the numbers of the whole, and how long
    /// rows are
    Preview(PreviewArguments),
}

/// Arguments of `terrace data preview`.
#[derive(Args)]
pub(crate) struct PreviewArguments {
    #[command(flatten)]
    file: RunFile,
    /// Sequences to print
    #[arg(long, short = 'n', default_value_t = 3)]
    sequences: u64,
    /// Print token ids too
    #[arg(long)]
    ids: bool,
    /// Show the evaluation data instead
    #[arg(long)]
    eval: bool,
}

/// Runs `terrace data …`.
pub(crate) fn run(command: &DataCommand) -> Result<()> {
    match command {
        DataCommand::Preview(arguments) => preview(arguments),
    }
}

fn preview(arguments: &PreviewArguments) -> Result<()> {
    let config = arguments.file.read()?;
    let dir = model_dir(&config)?;
    let (spec, _) = hf::read_config(dir)?;
    let tokenizer = dir.join("tokenizer.json").exists();
    let tokenizer = tokenizer
        .then(|| TextTokenizer::load(dir, spec.vocab_size))
        .transpose()?;
    let (seed, vocab_size) = (config.train.seed, spec.vocab_size);
    let (train, eval) = data::load(&config.data, seed, tokenizer.as_ref(), vocab_size)?;
    for note in train.notes() {
        say(note)?;
    }
    let dataset = match (arguments.eval, eval) {
        (false, _) => train,
        (true, Some(eval)) => eval,
        (true, None) => {
            let remedy = "set data.eval or data.eval_split";
            let place = "--eval";
            return Err(Error::input(
                "arguments",
                place,
                "evaluation data",
                "none",
                remedy,
            ));
        }
    };
    let stdout = std::io::stdout();
    let options = PreviewOptions {
        sequences: arguments.sequences,
        colour: stdout.is_terminal(),
        ids: arguments.ids,
    };
    write_preview(
        &dataset,
        &config.data,
        tokenizer.as_ref(),
        options,
        &mut stdout.lock(),
    )?;
    match arguments.eval {
        true => Ok(()),
        false => say(&steps_text(&config, dataset)?),
    }
}

/// How many steps the run has: what a share of them, as of warm-up, is a share of.
fn steps_text(config: &RunConfig, dataset: Dataset) -> Result<String> {
    let train = &config.train;
    let (micro_batch, micro_batches) = (train.micro_batch, train.micro_batches);
    let dataset = Arc::new(dataset);
    let batches = Batches::new(
        dataset,
        &config.data,
        micro_batch,
        micro_batches,
        train.seed,
    )?;
    let of = |epochs| batches.steps_of_epochs(epochs);
    let steps = train.steps.unwrap_or_else(|| of(train.epochs.unwrap_or(0)));
    let an_epoch = of(1);
    Ok(format!(
        "{steps} steps, each {micro_batches} micro-batches of {micro_batch} sequences; an epoch is \
         {an_epoch}"
    ))
}
