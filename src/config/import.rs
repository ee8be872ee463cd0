//! A YAML file of MegaTrain or LLaMA-Factory as a run.toml.
//!
//! - What the file leaves out has the other program's default, where Terrace's differs.
//! - Each key without a counterpart, and each whose meaning is not quite the same, has a line that
//!   says so; keys that only say where or how the other program runs are named in one line.
//! - YAML is read as a tree of plain values; aliases are refused. Nothing is looked up: a path or a
//!   name of a model stays what it is.

mod trainer;
mod yaml;

use super::RunConfig;
use super::parse::{defaults_of, tables};
use crate::error::{Error, Result, printable};
use trainer::{eval_steps, eval_strategy, load_best, report_to, save_strategy, save_total_limit};
use yaml::{Entry, entries};

const WHAT: &str = "import";
/// Most bytes of a file.
pub const BYTES_MAX: usize = 1 << 20;

/// What an import gives.
#[derive(Clone, Debug, PartialEq)]
pub struct Imported {
    /// The run.toml.
    pub toml: String,
    /// A line for each key that is not in it, or is there with another meaning.
    pub lines: Vec<String>,
}

/// How a key of the other program is written here.
enum To {
    /// This key, the value as it is: a number, true or false.
    Plain(&'static str),
    /// This key, the value in quotes.
    Quoted(&'static str),
    /// This key, a list of texts; a text with commas is one.
    List(&'static str),
    /// By a function of its own.
    By(fn(&mut Import, &Entry)),
    /// Nowhere, and it changes no result.
    Nowhere,
}

use To::{By, List, Nowhere, Plain, Quoted};

const MEGATRAIN: &[(&str, To)] = &[
    ("model.name", Quoted("model.path")),
    ("model.dtype", By(dtype)),
    ("dataset.name", List("data.train")),
    ("dataset.path", List("data.train")),
    ("dataset.dataset_dir", Quoted("data.dataset_dir")),
    ("dataset.max_seq_len", By(cutoff)),
    ("training.batch_size", Plain("train.micro_batch")),
    (
        "training.gradient_accumulation_steps",
        Plain("train.micro_batches"),
    ),
    ("training.num_steps", Plain("train.steps")),
    ("training.learning_rate", Plain("train.learning_rate")),
    ("training.weight_decay", Plain("train.weight_decay")),
    ("training.max_grad_norm", Plain("train.max_grad_norm")),
    ("training.warmup_steps", Plain("train.warmup_steps")),
    ("training.seed", Plain("train.seed")),
    ("optimizer.beta1", By(|import, entry| import.beta(0, entry))),
    ("optimizer.beta2", By(|import, entry| import.beta(1, entry))),
    ("optimizer.eps", Plain("train.eps")),
    ("model.attn_implementation", Nowhere),
    ("model.trust_remote_code", Nowhere),
    ("dataset.num_workers", Nowhere),
    ("optimizer.type", By(optimizer)),
    ("memory.checkpoint_interval", Nowhere),
    ("memory.num_grad_slabs", Nowhere),
    ("logging.log_interval", Nowhere),
    ("logging.enable_timing", Nowhere),
];

/// Defaults of MegaTrain that are not Terrace's.
const MEGATRAIN_DEFAULTS: &[(&str, &str)] = &[
    ("data.packing", "false"),
    ("data.truncate", "true"),
    ("train.schedule", "\"constant\""),
    ("train.seed", "42"),
];

const LLAMA_FACTORY: &[(&str, To)] = &[
    ("model_name_or_path", Quoted("model.path")),
    ("stage", By(stage)),
    ("finetuning_type", By(finetuning)),
    ("dataset", List("data.train")),
    ("eval_dataset", List("data.eval")),
    ("dataset_dir", Quoted("data.dataset_dir")),
    ("cutoff_len", By(cutoff)),
    ("max_samples", Plain("data.max_samples")),
    ("val_size", Plain("data.eval_split")),
    ("packing", Plain("data.packing")),
    ("neat_packing", By(neat_packing)),
    ("interleave_probs", By(mix)),
    ("tokenized_path", Quoted("data.cache")),
    ("per_device_train_batch_size", Plain("train.micro_batch")),
    ("gradient_accumulation_steps", Plain("train.micro_batches")),
    ("learning_rate", Plain("train.learning_rate")),
    ("num_train_epochs", By(epochs)),
    ("max_steps", By(steps)),
    ("lr_scheduler_type", By(schedule)),
    (
        "lr_scheduler_kwargs.min_lr",
        Plain("train.min_learning_rate"),
    ),
    ("lr_scheduler_kwargs.min_lr_rate", By(min_lr_rate)),
    ("warmup_steps", By(warmup)),
    ("warmup_ratio", By(warmup_ratio)),
    ("weight_decay", Plain("train.weight_decay")),
    ("adam_beta1", By(|import, entry| import.beta(0, entry))),
    ("adam_beta2", By(|import, entry| import.beta(1, entry))),
    ("adam_epsilon", Plain("train.eps")),
    ("max_grad_norm", Plain("train.max_grad_norm")),
    ("seed", Plain("train.seed")),
    ("eval_steps", By(eval_steps)),
    ("eval_strategy", By(eval_strategy)),
    ("evaluation_strategy", By(eval_strategy)),
    ("bf16", By(dtype_flag)),
    ("pure_bf16", By(dtype_flag)),
    ("fp16", By(dtype_flag)),
    ("output_dir", Quoted("log.dir")),
    (
        "save_steps",
        By(|import, entry| import.steps_of(entry, "checkpoint.every")),
    ),
    ("save_strategy", By(save_strategy)),
    ("save_total_limit", By(save_total_limit)),
    ("load_best_model_at_end", By(load_best)),
    ("report_to", By(report_to)),
    (
        "early_stopping_steps",
        Plain("train.early_stopping_patience"),
    ),
    ("template", By(template)),
    ("deepspeed", Nowhere),
    ("do_train", Nowhere),
    ("do_eval", Nowhere),
    ("trust_remote_code", Nowhere),
    ("overwrite_cache", Nowhere),
    ("overwrite_output_dir", Nowhere),
    ("preprocessing_num_workers", Nowhere),
    ("dataloader_num_workers", Nowhere),
    ("logging_steps", Nowhere),
    ("logging_dir", Nowhere),
    ("plot_loss", Nowhere),
    ("save_only_model", Nowhere),
    ("per_device_eval_batch_size", Nowhere),
    ("run_name", Nowhere),
    ("ddp_timeout", Nowhere),
    ("flash_attn", Nowhere),
    ("gradient_checkpointing", Nowhere),
    ("disable_gradient_checkpointing", Nowhere),
    ("enable_liger_kernel", Nowhere),
    ("use_unsloth_gc", Nowhere),
    ("resume_from_checkpoint", Nowhere),
];

/// Defaults of LLaMA-Factory and of the Trainer under it that are not Terrace's.
const LLAMA_FACTORY_DEFAULTS: &[(&str, &str)] = &[
    ("data.dataset_dir", "\"data\""),
    ("data.seq_len", "2048"),
    ("data.truncate", "true"),
    ("data.packing", "false"),
    ("train.epochs", "3"),
    ("train.micro_batch", "8"),
    ("train.learning_rate", "5e-5"),
    ("train.schedule", "\"linear\""),
    ("train.weight_decay", "0.0"),
    ("train.seed", "42"),
    ("checkpoint.every", "500"),
];

/// The run.toml of a YAML `text`; `place` names it in errors and lines.
///
/// # Errors
/// [`Error::Input`] where it is no YAML, is not of a program that is known, or has a value that a
/// run cannot have.
pub fn import(text: &str, place: &str) -> Result<Imported> {
    let entries = entries(text, place)?;
    let has = |name: &str| entries.iter().any(|entry| entry.path == name);
    let (program, table, defaults) = if has("model_name_or_path") {
        ("LLaMA-Factory", LLAMA_FACTORY, LLAMA_FACTORY_DEFAULTS)
    } else if has("model.name") {
        ("MegaTrain", MEGATRAIN, MEGATRAIN_DEFAULTS)
    } else {
        let expected = "model_name_or_path (LLaMA-Factory) or model.name (MegaTrain)";
        let remedy = "write a run.toml with `terrace init`";
        return Err(Error::input(WHAT, place, expected, "neither", remedy));
    };
    let mut import = Import {
        place: place.to_string(),
        program,
        keys: Vec::new(),
        lines: Vec::new(),
        unused: Vec::new(),
        betas: [None, None],
        entries: entries.clone(),
    };
    for entry in &entries {
        import.take(entry, table);
    }
    import.finish(defaults)
}

/// An import under way.
struct Import {
    place: String,
    program: &'static str,
    /// Keys of run.toml with their values as TOML.
    keys: Vec<(String, String)>,
    lines: Vec<String>,
    /// Keys that have no meaning here.
    unused: Vec<String>,
    betas: [Option<String>; 2],
    /// All of the file: some keys mean something only beside others, wherever these are.
    entries: Vec<Entry>,
}

impl Import {
    fn take(&mut self, entry: &Entry, table: &[(&str, To)]) {
        let found = table.iter().find(|(name, _)| *name == entry.path);
        let Some((_, to)) = found else {
            return self.line(entry, "has no counterpart and is left out");
        };
        if entry.is_null() {
            return;
        }
        match to {
            Plain(key) => self.set(key, number(&entry.first())),
            Quoted(key) => self.set(key, quoted(&entry.first())),
            List(key) => {
                let names = entry.values.iter().flat_map(|value| value.split(','));
                let names: Vec<String> = names.map(|name| quoted(name.trim())).collect();
                self.set(key, format!("[{}]", names.join(", ")));
            }
            By(write) => write(self, entry),
            Nowhere => self.unused.push(entry.path.clone()),
        }
    }

    fn set(&mut self, key: &str, value: String) {
        self.keys.retain(|(named, _)| named != key);
        self.keys.push((key.to_string(), value));
    }

    fn line(&mut self, entry: &Entry, what: &str) {
        let (place, line) = (&self.place, entry.line);
        let (path, value) = (printable(&entry.path), printable(&entry.values.join(", ")));
        self.lines
            .push(format!("{place}:{line}: {path}: {value} {what}"));
    }

    fn beta(&mut self, at: usize, entry: &Entry) {
        self.betas[at] = Some(number(&entry.first()));
    }

    /// A key of the file that has a value.
    fn named(&self, path: &str) -> Option<&Entry> {
        let found = self.entries.iter().find(|entry| entry.path == path);
        found.filter(|entry| !entry.is_null())
    }

    /// Steps of the run, where the file says.
    fn steps(&self) -> Option<f64> {
        let steps = self.named("max_steps").and_then(Entry::number);
        steps.filter(|steps| *steps > 0.0)
    }

    /// A key that counts steps, or names a share of all of them, which the Trainer rounds up.
    fn steps_of(&mut self, entry: &Entry, key: &str) {
        let share = entry.number().filter(|share| *share > 0.0 && *share < 1.0);
        match (share, self.steps()) {
            (None, _) => self.set(key, number(&entry.first())),
            (Some(share), Some(steps)) => self.set(key, format!("{:.0}", (share * steps).ceil())),
            (Some(_), None) => self.line(
                entry,
                &format!(
                    "is a share of steps that are not known yet: set {key}; `terrace data preview` \
                     tells the steps"
                ),
            ),
        }
    }

    /// Leaves out what needs evaluations where there are none.
    fn look_at_evaluations(&mut self) {
        let split = self.named("val_size").and_then(Entry::number);
        let has_rows = self.has("data.eval") || split.is_some_and(|size| size > 0.0);
        let evaluates = has_rows && self.has("train.eval_every");
        let asks = self
            .named("eval_steps")
            .or(self.named("eval_strategy"))
            .cloned();
        if let Some(entry) = asks.filter(|_| self.has("train.eval_every") && !has_rows) {
            self.keys.retain(|(named, _)| named != "train.eval_every");
            self.line(
                &entry,
                "needs rows: set data.eval or data.eval_split, then train.eval_every",
            );
        }
        for (key, path) in [
            ("checkpoint.keep_best", "load_best_model_at_end"),
            ("train.early_stopping_patience", "early_stopping_steps"),
        ] {
            let Some(entry) = self.named(path).filter(|_| self.has(key)).cloned() else {
                continue;
            };
            if !evaluates {
                self.keys.retain(|(named, _)| named != key);
                let missing = "set train.eval_every, and data.eval or data.eval_split";
                self.line(&entry, &format!("needs evaluations: {missing}, then {key}"));
            } else if key == "checkpoint.keep_best" {
                self.line(
                    &entry,
                    "keeps that commit; `terrace export --best` takes it",
                );
            }
        }
    }

    fn has(&self, key: &str) -> bool {
        self.keys.iter().any(|(named, _)| named == key)
    }

    fn finish(mut self, defaults: &[(&str, &str)]) -> Result<Imported> {
        if self.betas.iter().any(Option::is_some) {
            let [first, second] = self.betas.clone();
            let or = |beta: Option<String>, default: &str| beta.unwrap_or(default.to_string());
            let betas = format!("[{}, {}]", or(first, "0.9"), or(second, "0.999"));
            self.set("train.betas", betas);
        }
        self.look_at_evaluations();
        let steps = self.has("train.steps");
        for (key, value) in defaults {
            let given = self.has(key) || (*key == "train.epochs" && steps);
            if !given {
                self.set(key, value.to_string());
            }
        }
        // One of them: what was named beats a share.
        if self.has("data.eval") && self.has("data.eval_split") {
            self.keys.retain(|(key, _)| key != "data.eval_split");
        }
        if !self.unused.is_empty() {
            let (place, names) = (&self.place, self.unused.join(", "));
            self.lines.push(format!(
                "{place}: {names}: say how {} runs, not what it learns; Terrace plans by itself",
                self.program
            ));
        }
        let toml = self.text();
        RunConfig::parse(&toml, &format!("the run.toml made of {}", self.place), &[])?;
        Ok(Imported {
            toml,
            lines: self.lines,
        })
    }

    /// The keys under their tables, in run.toml's order.
    fn text(&self) -> String {
        let (program, place) = (self.program, printable(&self.place));
        let mut text = format!("# Imported from {place}, a file of {program}.\n");
        for table in tables() {
            let mut section = String::new();
            for (key, default) in defaults_of(table) {
                let named = self.keys.iter().find(|(named, _)| *named == key);
                let name = key.split_once('.').map_or("", |(_, name)| name);
                match named {
                    Some((_, value)) if *value == default => {}
                    Some((_, value)) => section.push_str(&format!("{name} = {value}\n")),
                    None => {}
                }
            }
            if !section.is_empty() {
                text.push_str(&format!("\n[{table}]\n{section}"));
            }
        }
        text
    }
}

fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

/// A scalar as TOML: a number or a boolean where it is one, else a text.
fn number(text: &str) -> String {
    if let Ok(whole) = text.parse::<i64>() {
        return whole.to_string();
    }
    if let Ok(number) = text.parse::<f64>()
        && number.is_finite()
    {
        return format!("{number:?}");
    }
    match text {
        "true" | "True" | "TRUE" | "yes" | "on" => "true".to_string(),
        "false" | "False" | "FALSE" | "no" | "off" => "false".to_string(),
        other => quoted(other),
    }
}

fn dtype(import: &mut Import, entry: &Entry) {
    match entry.first().trim_start_matches("torch.") {
        "bfloat16" | "bf16" => {
            import.line(
                entry,
                "is precision \"bf16\", here with an exact fp32 master",
            );
        }
        "float32" | "fp32" => import.set("model.precision", quoted("fp32")),
        _ => import.line(entry, "is not trained in: precision \"bf16\" is taken"),
    }
}

fn dtype_flag(import: &mut Import, entry: &Entry) {
    if !entry.is_true() {
        return;
    }
    match entry.path.as_str() {
        "bf16" => {}
        "pure_bf16" => import.line(entry, "becomes bf16 weights with an exact fp32 master"),
        _ => import.line(entry, "is not trained in: precision \"bf16\" is taken"),
    }
}

fn cutoff(import: &mut Import, entry: &Entry) {
    import.set("data.seq_len", number(&entry.first()));
    import.set("data.truncate", "true".to_string());
}

fn stage(import: &mut Import, entry: &Entry) {
    match entry.first().as_str() {
        "sft" => {}
        "pt" => {
            // LLaMA-Factory packs what is pre-trained on, unless told not to.
            if import.named("packing").is_none() {
                import.set("data.packing", "true".to_string());
            }
            import.line(entry, "is what rows of `text` mean: nothing else is needed");
        }
        _ => import.line(entry, "is not trained: this run is a supervised fine-tune"),
    }
}

fn finetuning(import: &mut Import, entry: &Entry) {
    if entry.first() != "full" {
        import.line(entry, "is not done: Terrace trains every parameter");
    }
}

fn neat_packing(import: &mut Import, entry: &Entry) {
    if entry.is_true() {
        import.set("data.packing", "true".to_string());
    }
}

fn mix(import: &mut Import, entry: &Entry) {
    let weights = entry.values.iter().flat_map(|value| value.split(','));
    let weights: Vec<String> = weights.map(|weight| number(weight.trim())).collect();
    import.set("data.mix", format!("[{}]", weights.join(", ")));
}

fn epochs(import: &mut Import, entry: &Entry) {
    let given = entry.number().unwrap_or(0.0);
    if given.fract() != 0.0 {
        import.line(entry, "is rounded up: epochs are whole");
    }
    if !import.has("train.steps") {
        import.set("train.epochs", format!("{}", given.ceil()));
    }
}

fn steps(import: &mut Import, entry: &Entry) {
    // -1 leaves it to the epochs.
    if entry.number().is_some_and(|steps| steps > 0.0) {
        import.keys.retain(|(key, _)| key != "train.epochs");
        import.set("train.steps", number(&entry.first()));
    }
}

fn schedule(import: &mut Import, entry: &Entry) {
    let name = match entry.first().as_str() {
        "cosine" | "cosine_with_min_lr" => "cosine",
        "linear" => "linear",
        "constant" | "constant_with_warmup" => "constant",
        "warmup_stable_decay" => "wsd",
        _ => {
            return import.line(entry, "is not among the schedules: linear is taken");
        }
    };
    import.set("train.schedule", quoted(name));
}

/// A share of the learning rate, of which the Trainer has 5e-5.
fn min_lr_rate(import: &mut Import, entry: &Entry) {
    let rate = import.named("learning_rate").map(Entry::number);
    match (entry.number(), rate.unwrap_or(Some(5e-5))) {
        (Some(share), Some(rate)) => {
            import.set("train.min_learning_rate", format!("{:?}", share * rate));
        }
        _ => import.line(entry, "is no number and is left out"),
    }
}

fn warmup(import: &mut Import, entry: &Entry) {
    // 0 leaves it to the share.
    if entry.number() != Some(0.0) {
        import.steps_of(entry, "train.warmup_steps");
    }
}

fn warmup_ratio(import: &mut Import, entry: &Entry) {
    // Steps beat a share of them.
    let steps = import.named("warmup_steps").and_then(Entry::number);
    if steps.is_some_and(|steps| steps > 0.0) {
        return;
    }
    match (entry.number(), import.steps()) {
        (Some(0.0), _) => {}
        (Some(1.0), Some(all)) => import.set("train.warmup_steps", format!("{all:.0}")),
        (Some(share), _) if share > 0.0 && share < 1.0 => {
            import.steps_of(entry, "train.warmup_steps");
        }
        _ => import.line(
            entry,
            "is no share of steps that are known: set train.warmup_steps",
        ),
    }
}

fn optimizer(import: &mut Import, entry: &Entry) {
    import.line(entry, "is AdamW here, as torch.optim.AdamW, in f32");
}

fn template(import: &mut Import, entry: &Entry) {
    import.line(
        entry,
        "is left out: the tokenizer's own chat template is used",
    );
}
