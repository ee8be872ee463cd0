//! Keys of `[log]`.

use super::{COUNT_MAX, Key, key};
use crate::config::written::{number, quoted_path, text_list};

pub(super) const KEYS: &[Key] = &[
    key!(
        log.dir,
        Free,
        "\"runs/terrace\"",
        "",
        "Directory of metrics.jsonl, samples.jsonl, event files and the report.",
        |g| g.path()?,
        |v| Some(quoted_path(v))
    ),
    key!(
        log.sample_every,
        Free,
        "0",
        "",
        "Steps between samples of generated text, also at the end: printed, and whole in\n\
         samples.jsonl; 0 is never. Each token of a sample costs a forward pass.",
        |g| g.integer(0, COUNT_MAX)?,
        |v| Some(v.to_string())
    ),
    key!(
        log.sample_prompts,
        Free,
        "[]",
        "",
        "Texts to continue. [] is the beginning of the first row held out, else of the first one\n\
         trained on: of a conversation what precedes the first answer.",
        |g| g.texts()?,
        |v| text_list(v)
    ),
    key!(
        log.sample_chat,
        Free,
        "false",
        "",
        "true: each of these texts is a user's turn in the tokenizer's chat template.",
        |g| g.boolean()?,
        |v| Some(v.to_string())
    ),
    key!(
        log.sample_tokens,
        Free,
        "64",
        "",
        "Most tokens of a sample, 1 to 65536; with its prompt at most data.seq_len.",
        |g| g.integer(1, 65536)?,
        |v| Some(v.to_string())
    ),
    key!(
        log.sample_temperature,
        Free,
        "0.7",
        "",
        "Temperature of sampling, with the nucleus of 0.9 and train.seed; 0 is greedy.",
        |g| g.float(|x| x >= 0.0, "a finite number of at least 0")?,
        |v| number(*v)
    ),
    key!(
        log.tensorboard,
        Free,
        "true",
        "",
        "Event files for TensorBoard, in tensorboard under dir.",
        |g| g.boolean()?,
        |v| Some(v.to_string())
    ),
    key!(
        log.prometheus,
        Free,
        "",
        "# 9400",
        "Port of this machine's own address at which Prometheus finds the run's numbers, under\n\
         /metrics; or an address with a port, 127.0.0.1:9400 or [::1]:9400. Where another program\n\
         has it, a warning says so and the run goes on without.",
        |g| Some(g.loopback()?),
        |v| v.map(|v| format!("\"{v}\""))
    ),
];
