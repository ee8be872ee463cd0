//! Goal: a person's run.toml is read as meant or refused with one line that says what to do.
//! Method: each bad input with its exact message; the template against the defaults; random
//! configurations written and read back.

use std::path::{Path, PathBuf};
use std::process::Command;

use proptest::prelude::*;
use terrace::config::import::import;
use terrace::config::{
    Class, DataFormat, IoEngine, RateSchedule, Recompute, RunConfig, Size, SpillZstd, StorePath,
    WeightInit, commented_template, json_schema,
};
use terrace::tile::{GradientDtype, MomentDtype, Precision};

const LEAST: &str = "[model]\npath = \"m\"\n[data]\ntrain = \"t.jsonl\"\n[train]\nsteps = 10\n";

fn least() -> RunConfig {
    let mut config = RunConfig::default();
    config.model.path = Some("m".into());
    config.data.train = vec!["t.jsonl".into()];
    config.train.steps = Some(10);
    config
}

fn parse(text: &str, sets: &[&str]) -> Result<RunConfig, String> {
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    RunConfig::parse(text, "a.toml", &sets).map_err(|error| {
        assert_eq!(error.exit_code(), 2);
        let line = error.to_string();
        assert!(!line.contains('\n'), "{line}");
        line
    })
}

fn refused(text: &str, sets: &[&str]) -> String {
    parse(text, sets).expect_err("a refusal")
}

#[test]
fn defaults_then_file_then_sets() {
    assert_eq!(parse(LEAST, &[]), Ok(least()));
    let config = parse(
        &format!("{LEAST}micro_batch = 3\nseed = 5\n"),
        &[
            "train.seed=6",
            "train.seed=7",
            "memory.host=24GiB",
            "train.schedule=wsd",
        ],
    );
    let mut expected = least();
    expected.train.micro_batch = 3;
    expected.train.seed = 7;
    expected.memory.host = Size::Bytes(24 << 30);
    expected.train.schedule = RateSchedule::Wsd;
    assert_eq!(config, Ok(expected));
}

#[test]
fn a_set_of_steps_takes_the_place_of_epochs() {
    let epochs = LEAST.replace("steps = 10", "epochs = 2");
    let config = parse(&epochs, &["train.steps=20"]).expect("a run");
    assert_eq!((config.train.steps, config.train.epochs), (Some(20), None));
    let config = parse(LEAST, &["train.epochs=3"]).expect("a run");
    assert_eq!((config.train.steps, config.train.epochs), (None, Some(3)));
}

#[test]
fn every_form_of_a_value_is_read() {
    let config = parse(
        "[model]\npath = 'm'\nprecision = \"fp32\"\ninit = \"random\"\n\
         [data]\ntrain = [\"a\", \"b\"]\neval = \"c\"\nformat = \"tokens\"\nseq_len = 0x10\n\
         [train]\nsteps = 1_000\nbetas = [0, 0.95]\nlearning_rate = 1_0e-3\n\
         [memory]\nstore = [\"s\", { path = \"r\", size = \"1.5TB\" }]\nio_engine = \"io_uring\"\n",
        &[],
    )
    .expect("a run");
    let mut expected = least();
    expected.model.precision = Precision::Fp32;
    expected.model.init = WeightInit::Random;
    expected.data.train = vec!["a".into(), "b".into()];
    expected.data.eval = vec!["c".into()];
    expected.data.format = DataFormat::Tokens;
    expected.data.seq_len = 16;
    expected.train.steps = Some(1000);
    expected.train.betas = [0.0, 0.95];
    expected.train.learning_rate = 0.01;
    // fp32 carries its gradients in f32 without being told.
    expected.train.gradient_dtype = GradientDtype::F32;
    expected.memory.store = vec![
        StorePath::new("s".into()),
        StorePath {
            size: Size::Bytes(1_500_000_000_000),
            ..StorePath::new("r".into())
        },
    ];
    expected.memory.io_engine = Some(IoEngine::Uring);
    assert_eq!(config, expected);
    for (set, path) in [("/nvme/a b", "/nvme/a b"), ("\"x\"", "x")] {
        let config = parse(LEAST, &[&format!("memory.store={set}")]).expect("a run");
        assert_eq!(config.memory.store[0].path, PathBuf::from(path));
    }
    let tables = format!("{LEAST}[[memory.store]]\npath = \"x\"\n[[memory.store]]\npath = \"y\"\n");
    assert_eq!(parse(&tables, &[]).expect("a run").memory.store.len(), 2);
}

#[test]
fn each_bad_line_is_refused_by_name() {
    let size = "expected a size with a unit in quotes, or \"auto\", got";
    let cases: &[(&str, &str, String)] = &[
        ("train", "steps = 0", "an integer from 1 to 1000000000000, got 0; correct it".into()),
        ("train", "epochs = -1", "an integer from 1 to 1000000000000, got -1; correct it".into()),
        ("train", "micro_batch = 0", integer(1, 65536, "0", "1")),
        ("train", "micro_batch = 65537", integer(1, 65536, "65537", "1")),
        ("train", "micro_batch = 2.0", integer(1, 65536, "2.0", "1")),
        ("train", "micro_batch = \"2\"", integer(1, 65536, "\"2\"", "1")),
        ("train", "micro_batches = 0", integer(1, 65536, "0", "1")),
        ("train", "seed = -1", integer(0, i64::MAX as u64, "-1", "0")),
        ("train", "seed = 99999999999999999999", integer(0, i64::MAX as u64, "99999999999999999999", "0")),
        ("train", "warmup_steps = -5", integer(0, 1_000_000_000_000, "-5", "0")),
        ("train", "eval_every = true", integer(0, 1_000_000_000_000, "true", "0")),
        ("train", "learning_rate = -1e-3", number("finite number of at least 0", "-1e-3", "1e-5")),
        ("train", "learning_rate = nan", number("finite number of at least 0", "nan", "1e-5")),
        ("train", "learning_rate = inf", number("finite number of at least 0", "inf", "1e-5")),
        ("train", "learning_rate = \"1e-5\"", number("finite number of at least 0", "\"1e-5\"", "1e-5")),
        ("train", "min_learning_rate = -1", number("finite number of at least 0", "-1", "0.0")),
        ("train", "weight_decay = -0.1", number("finite number of at least 0", "-0.1", "0.01")),
        ("train", "max_grad_norm = inf", number("finite number of at least 0", "inf", "1.0")),
        ("train", "eps = 0", number("number above 0 in f32", "0", "1e-8")),
        ("train", "eps = 1e-60", number("number above 0 in f32", "1e-60", "1e-8")),
        ("train", "betas = [0.9, 1.0]", betas("[0.9, 1.0]")),
        ("train", "betas = [0.9]", betas("[0.9]")),
        ("train", "betas = [0.9, \"x\", 0.5]", betas("[0.9, \"x\", 0.5]")),
        ("train", "betas = 0.9", betas("0.9")),
        ("train", "schedule = \"cosin\"", "one of \"constant\", \"linear\", \"cosine\", \"wsd\", got \"cosin\"; correct it, or leave it out for the default \"cosine\"".into()),
        ("train", "gradient_dtype = \"fp16\"", "one of \"bf16\", \"f32\", got \"fp16\"; correct it, or leave it out for the default \"bf16\"".into()),
        ("optimizer", "moments = \"fp16\"", "one of \"f32\", \"bf16\", got \"fp16\"; correct it, or leave it out for the default \"f32\"".into()),
        ("model", "precision = \"fp16\"", "one of \"bf16\", \"fp32\", got \"fp16\"; correct it, or leave it out for the default \"bf16\"".into()),
        ("model", "init = 1", "one of \"pretrained\", \"random\", got 1; correct it, or leave it out for the default \"pretrained\"".into()),
        ("model", "path = \"\"", "a path in quotes, got \"\"; correct it".into()),
        ("data", "format = \"csv\"", "one of \"auto\", \"messages\", \"sharegpt\", \"alpaca\", \"prompt\", \"text\", \"tokens\", got \"csv\"; correct it, or leave it out for the default \"auto\"".into()),
        ("data", "seq_len = 1", integer(2, 1 << 20, "1", "1024")),
        ("data", "seq_len = 1048577", integer(2, 1 << 20, "1048577", "1024")),
        ("data", "packing = 1", "true or false, got 1; correct it, or leave it out for the default true".into()),
        ("data", "train = [1]", "a path in quotes, or a list of them, got [1]; correct it".into()),
        ("memory", "buffers = 9", integer(1, 8, "9", "2")),
        ("memory", "slabs = 3", integer(4, 256, "3", "16")),
        ("memory", "recompute = \"some\"", "one of \"auto\", \"all\", \"none\", got \"some\"; correct it, or leave it out for the default \"auto\"".into()),
        ("memory", "zstd = 1", "one of \"auto\", \"on\", \"off\", got 1; correct it, or leave it out for the default \"auto\"".into()),
        ("memory", "io_engine = \"aio\"", "one of \"auto\", \"io_uring\", \"pread\", got \"aio\"; correct it, or leave it out for the default \"auto\"".into()),
        ("memory", "host = 24", format!("{} 24; add a unit: \"24GiB\" or \"24B\"", &size[9..])),
        ("memory", "host = \"24\"", format!("{} \"24\"; add a unit: \"24GiB\" or \"24B\"", &size[9..])),
        ("memory", "host = \"24G\"", format!("{} \"24G\"; use one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB", &size[9..])),
        ("memory", "host = \"-1GB\"", format!("{} \"-1GB\"; write it as \"24GiB\"", &size[9..])),
        ("memory", "host = \"1.2.3GB\"", format!("{} \"1.2.3GB\"; write it as \"24GiB\"", &size[9..])),
        ("memory", "host = 1.5", format!("{} 1.5; write it as \"24GiB\"", &size[9..])),
        ("memory", "host = \"0GiB\"", format!("{} \"0GiB\"; give at least one byte, or leave it out", &size[9..])),
        ("memory", "device = \"16384PiB\"", format!("{} \"16384PiB\"; use at most 16383PiB", &size[9..])),
        ("memory", "device = \"99999999999999999999PB\"", format!("{} \"99999999999999999999PB\"; use at most 16383PiB", &size[9..])),
        ("memory", "device = \"1.0000000000000000000GB\"", format!("{} \"1.0000000000000000000GB\"; use fewer digits", &size[9..])),
        ("memory", "store = 5", store("5")),
        ("memory", "store = [{ size = \"1GB\" }]", store("[a table]")),
        ("memory", "store = [{ path = \"x\", size = 5 }]", format!("{} 5; add a unit: \"5GiB\" or \"5B\"", &size[9..])),
        ("memory", "store = [{ path = \"x\", read = \"2GB\" }]", "a rate in quotes, got \"2GB\"; write it as \"2GB/s\"".into()),
        ("memory", "store = [{ path = \"x\", sise = \"1GB\" }]", "a key of an entry of memory.store (path, size, read, write), got sise; did you mean size?".into()),
        ("memory", "store = [\"x\", \"x\"]", "distinct paths, got \"x\" twice; give each directory once, with the sum of its sizes".into()),
        ("checkpoint", "keep = 0", integer(1, 31, "0", "2")),
        ("checkpoint", "every = -1", integer(0, 1_000_000_000_000, "-1", "100")),
        ("checkpoint", "dir = 1", "a path in quotes, got 1; correct it".into()),
        ("data", "max_samples = 0", "an integer from 1 to 1000000000000, got 0; correct it".into()),
        ("data", "eval_split = 1.5", "a share from 0 to below 1, or a whole number of rows, got 1.5; correct it, or leave it out for the default 0.0".into()),
        ("data", "cache = 3", "a path in quotes, got 3; correct it, or leave it out for the default \"auto\"".into()),
        ("log", "dir = 1", "a path in quotes, got 1; correct it, or leave it out for the default \"runs/terrace\"".into()),
        ("log", "tensorboard = \"on\"", "true or false, got \"on\"; correct it, or leave it out for the default true".into()),
        ("log", "prometheus = 65536", loopback("65536")),
        ("log", "prometheus = \"0.0.0.0:9400\"", loopback("\"0.0.0.0:9400\"")),
        ("log", "prometheus = \"127.0.0.1\"", loopback("\"127.0.0.1\"")),
        ("log", "prometheus = \"[::]:9400\"", loopback("\"[::]:9400\"")),
        ("log", "prometheus = true", loopback("true")),
    ];
    for (table, bad, message) in cases {
        let key = bad.split(' ').next().expect("a key");
        let expected = format!("run.toml: a.toml line 2, {table}.{key}: expected {message}");
        assert_eq!(refused(&format!("[{table}]\n{bad}\n"), &[]), expected);
    }
}

fn integer(least: u64, most: u64, got: &str, default: &str) -> String {
    format!(
        "an integer from {least} to {most}, got {got}; correct it, or leave it out for the \
         default {default}"
    )
}

fn number(expected: &str, got: &str, default: &str) -> String {
    format!("a {expected}, got {got}; correct it, or leave it out for the default {default}")
}

fn betas(got: &str) -> String {
    format!(
        "two numbers, each at least 0 and less than 1, got {got}; correct it, or leave it out \
         for the default [0.9, 0.999]"
    )
}

fn loopback(got: &str) -> String {
    format!("a port, or an address of this machine alone as 127.0.0.1:9400, got {got}; correct it")
}

#[test]
fn a_port_and_loopback_addresses_are_where_prometheus_may_ask() {
    for (given, read) in [
        ("9400", "127.0.0.1:9400"),
        ("\"127.0.0.1:9400\"", "127.0.0.1:9400"),
        ("\"localhost:0\"", "127.0.0.1:0"),
        ("\"[::1]:9400\"", "[::1]:9400"),
        ("\"127.9.9.9:1\"", "127.9.9.9:1"),
    ] {
        let config = parse(LEAST, &[&format!("log.prometheus={given}")]).unwrap();
        assert_eq!(config.log.prometheus.unwrap().to_string(), read);
    }
}

fn store(got: &str) -> String {
    format!(
        "a path in quotes, or a list of {{ path, size }}, got {got}; correct it, or leave it out \
         for the default []"
    )
}

/// The keys of a table, as errors list them.
fn keys_of(table: &str) -> String {
    let schema = terrace::config::json_schema();
    let keys = schema["properties"][table]["properties"].as_object();
    let keys: Vec<&str> = keys.into_iter().flatten().map(|(key, _)| &**key).collect();
    keys.join(", ")
}

#[test]
fn unknown_keys_and_tables_name_the_nearest() {
    let (train, log) = (keys_of("train"), keys_of("log"));
    let cases = [
        (
            "[train]\nstep = 4\n",
            &*format!(
                "a.toml line 2: expected a key of [train] ({train}), got step; did you mean steps?"
            ),
        ),
        (
            "[log]\ndirectory = \"x\"\n",
            &*format!(
                "a.toml line 2: expected a key of [log] ({log}), got directory; did you mean dir?"
            ),
        ),
        (
            "[log]\n\nseed = 1\n",
            &*format!(
                "a.toml line 3: expected a key of [log] ({log}), got seed; write it under [train]"
            ),
        ),
        (
            "steps = 4\n",
            "a.toml line 1: expected a table (model, data, train, optimizer, memory, checkpoint, \
             log), got steps; write it under [train]",
        ),
        (
            "[memmory]\n",
            "a.toml line 1: expected a table (model, data, train, optimizer, memory, checkpoint, \
             log), got memmory; did you mean [memory]?",
        ),
        (
            "log = 3\n",
            "a.toml line 1: expected a table [log], got 3; write its keys under [log]",
        ),
        // The first fault of the file, whatever the order of names.
        (
            "[train]\nzz = 1\n[checkpoint]\naa = 1\n",
            &*format!(
                "a.toml line 2: expected a key of [train] ({train}), got zz; did you mean eps?"
            ),
        ),
    ];
    for (text, message) in cases {
        assert_eq!(refused(text, &[]), format!("run.toml: {message}"));
    }
}

#[test]
fn text_that_is_no_toml_names_its_line() {
    for (text, at) in [
        ("[train\n", 1),
        ("[log]\ndir = \n", 2),
        ("[log]\ndir = \"a\"\ndir = \"b\"\n", 3),
    ] {
        let message = refused(text, &[]);
        let start = format!("run.toml: a.toml line {at}: expected TOML, got ");
        assert!(message.starts_with(&start), "{message}");
        assert!(message.ends_with("; correct the line"), "{message}");
    }
}

#[test]
fn bad_sets_name_themselves() {
    let cases = [
        (
            "train.steps",
            "--set: expected table.key=value, got train.steps; write it as train.steps=20",
        ),
        (
            "steps=5",
            "--set: expected table.key=value, got steps=5; write it as train.steps=20",
        ),
        (
            "train.steps=0",
            "--set train.steps: expected an integer from 1 to 1000000000000, got 0; correct it",
        ),
        (
            "log.dri=x",
            &*format!(
                "--set log.dri: expected a key of [log] ({}), got dri; did you mean dir?",
                keys_of("log")
            ),
        ),
        (
            "lag.dir=x",
            "--set lag.dir: expected a table (model, data, train, optimizer, memory, checkpoint, \
             log), got lag; did you mean [log]?",
        ),
        (
            "memory.host=24",
            "--set memory.host: expected a size with a unit in quotes, or \"auto\", got 24; add a \
             unit: \"24GiB\" or \"24B\"",
        ),
        (
            "train.seed=1\nkeep = 2",
            "--set train.seed: expected an integer from 0 to 9223372036854775807, got \
             \"1\\u{a}keep = 2\"; correct it, or leave it out for the default 0",
        ),
    ];
    for (set, message) in cases {
        assert_eq!(refused(LEAST, &[set]), format!("run.toml: {message}"));
    }
}

#[test]
fn keys_that_do_not_go_together_are_refused() {
    let both = format!("{LEAST}epochs = 1\n");
    let none = LEAST.replace("steps = 10", "");
    let no_model = LEAST.replace("path = \"m\"", "");
    let no_data = LEAST.replace("train = \"t.jsonl\"", "train = []");
    let late = LEAST.replace("steps = 10", "steps = 10\nwarmup_steps = 11");
    let cases: [(&str, &[&str], &str); 14] = [
        (
            &late,
            &[],
            "a.toml line 7, train.warmup_steps: expected at most train.steps (10), got 11; lower it, or train for more steps",
        ),
        (
            LEAST,
            &["data.mix=[1, 2]"],
            "--set data.mix: expected 1 weights, as data.train has sources, got 2; give each source one weight",
        ),
        (
            LEAST,
            &["data.mix=[0.5, 0]"],
            "--set data.mix: expected a list of numbers above 0, got [0.5, 0]; correct it, or leave it out for the default []",
        ),
        (
            LEAST,
            &["data.eval=e.jsonl", "data.eval_split=0.1"],
            "--set data.eval_split: expected 0 with data.eval, got 0.1; give one of them",
        ),
        (
            &both,
            &[],
            "a.toml: expected train.steps or train.epochs, got both; remove one of them",
        ),
        (
            &none,
            &[],
            "a.toml, train.steps: expected train.steps or train.epochs, got nothing; add epochs = 1 under [train]",
        ),
        (
            &no_model,
            &[],
            "a.toml, model.path: expected the directory of a model, got nothing; add path = \"…\" under [model]",
        ),
        (
            &no_data,
            &[],
            "a.toml, data.train: expected at least one training file, got nothing; add train = \"…\" under [data]",
        ),
        (
            LEAST,
            &["train.warmup_steps=11"],
            "--set train.warmup_steps: expected at most train.steps (10), got 11; lower it, or train for more steps",
        ),
        (
            LEAST,
            &["train.min_learning_rate=1e-4"],
            "--set train.min_learning_rate: expected at most train.learning_rate (1e-5), got 0.0001; lower it",
        ),
        (
            LEAST,
            &["model.precision=fp32", "train.gradient_dtype=bf16"],
            "--set train.gradient_dtype: expected \"f32\" under model.precision \"fp32\", got \"bf16\"; leave it out, or use precision \"bf16\"",
        ),
        (
            LEAST,
            &["model.precision=fp32", "optimizer.moments=bf16"],
            "--set optimizer.moments: expected \"f32\" under model.precision \"fp32\", got \"bf16\"; leave it out, or use precision \"bf16\"",
        ),
        (
            LEAST,
            &["train.eval_every=5"],
            "--set train.eval_every: expected 0 without data.eval, got 5; name files in data.eval, or set data.eval_split",
        ),
        (
            "",
            &[],
            "a.toml, train.steps: expected train.steps or train.epochs, got nothing; add epochs = 1 under [train]",
        ),
    ];
    for (text, sets, message) in cases {
        assert_eq!(refused(text, sets), format!("run.toml: {message}"));
    }
    let sets = ["train.steps=5".to_string()];
    let quickstart = RunConfig::parse_quickstart("", "quickstart", &sets).expect("no model needed");
    assert_eq!(quickstart.model.path, None);
}

#[test]
fn the_template_is_the_defaults() {
    let template = commented_template();
    let mut expected = RunConfig::default();
    expected.model.path = Some("path/to/model".into());
    expected.data.train = vec!["data/train.jsonl".into()];
    expected.train.steps = Some(1000);
    assert_eq!(parse(&template, &[]), Ok(expected.clone()));
    // What is a comment for want of a default is right when its mark is taken away.
    let all = template
        .replace("# epochs = 1", "")
        .replace("# dir = ", "dir = ");
    expected.checkpoint.dir = Some("runs/terrace/checkpoint".into());
    assert_eq!(parse(&all, &[]), Ok(expected));
    assert!(template.contains("\n# epochs = 1\n"));
    assert!(template.lines().all(|line| line.len() <= 100), "{template}");
}

#[test]
fn sizes_are_exact() {
    let bytes = |text| match Size::parse(text, "x") {
        Ok(Size::Bytes(bytes)) => bytes,
        other => panic!("{text}: {other:?}"),
    };
    assert_eq!(bytes("24GiB"), 24 << 30);
    assert_eq!(bytes("24 GB"), 24_000_000_000);
    assert_eq!(bytes("512MiB"), 512 << 20);
    assert_eq!(bytes("1.5TB"), 1_500_000_000_000);
    assert_eq!(bytes("0.5KiB"), 512);
    assert_eq!(bytes("18446744073709551615B"), u64::MAX);
    assert_eq!(bytes("9007199254740993B"), 9_007_199_254_740_993);
    assert_eq!(bytes("4kB"), bytes("4KB"));
    assert_eq!(Size::parse(" auto ", "x").ok(), Some(Size::Auto));
    for bad in [
        "18446744073709551616B",
        "",
        "GiB",
        ".5GiB",
        "5.GiB",
        "1e3GB",
        "1 G B",
        "0.1B",
    ] {
        let error = Size::parse(bad, "--host-memory").expect_err(bad);
        assert!(
            error
                .to_string()
                .starts_with("size: --host-memory: expected a size")
        );
    }
}

#[test]
fn a_resumed_run_may_change_only_what_leaves_it_the_same_run() {
    let old = least();
    let classes = |sets: &[&str]| -> Vec<(String, Class)> {
        let new = parse(LEAST, sets).expect("a run");
        let differences = new.resume_differences(&old);
        let same = differences.iter().all(|d| d.class != Class::Forbidden);
        assert_eq!(
            new.identity_hash() == old.identity_hash(),
            same,
            "{differences:?}"
        );
        differences.into_iter().map(|d| (d.key, d.class)).collect()
    };
    assert_eq!(classes(&[]), []);
    for (class, sets) in [
        (
            Class::Free,
            vec![
                "train.steps=99",
                "checkpoint.every=7",
                "checkpoint.keep=9",
                "checkpoint.dir=c",
                "log.dir=x",
                "memory.host=1GiB",
                "memory.device=1GiB",
                "memory.store=/s",
                "memory.buffers=3",
                "memory.slabs=8",
                "memory.recompute=all",
                "memory.io_engine=pread",
                "data.cache=off",
                "data.cache_size=auto",
            ],
        ),
        (
            Class::Logged,
            vec![
                "train.learning_rate=0.5",
                "train.schedule=linear",
                "train.warmup_steps=3",
                "train.min_learning_rate=1e-9",
            ],
        ),
        (
            Class::Forbidden,
            vec![
                "model.path=n",
                "model.init=random",
                "data.train=u",
                "data.seq_len=64",
                "data.packing=false",
                "data.shuffle=false",
                "data.format=text",
                "data.truncate=true",
                "data.dataset_dir=d",
                "data.mix=[2]",
                "data.max_samples=3",
                "data.eval_split=0.5",
                "train.seed=1",
                "train.micro_batch=2",
                "train.micro_batches=2",
                "train.gradient_dtype=f32",
                "optimizer.moments=bf16",
            ],
        ),
    ] {
        for set in sets {
            let key = set.split('=').next().expect("a key").to_string();
            assert_eq!(classes(&[set]), [(key, class)]);
        }
    }
    let precision = classes(&["model.precision=fp32"]);
    assert_eq!(
        precision[0],
        ("model.precision".to_string(), Class::Forbidden)
    );
    let new = parse(LEAST, &["train.epochs=2"]).expect("a run");
    let shown: Vec<String> = new
        .resume_differences(&old)
        .iter()
        .map(|d| format!("{} {} {}", d.key, d.old, d.new))
        .collect();
    assert_eq!(shown, ["train.steps 10 unset", "train.epochs unset 2"]);
}

fn size() -> impl Strategy<Value = Size> {
    prop_oneof![
        Just(Size::Auto),
        (1u64..).prop_map(Size::Bytes),
        (1u64..4096, 0u32..52).prop_map(|(n, shift)| Size::Bytes(n << shift)),
    ]
}

fn path() -> impl Strategy<Value = PathBuf> {
    "[^\0]{1,12}".prop_map(PathBuf::from)
}

fn positive() -> impl Strategy<Value = f64> {
    prop_oneof![
        Just(0.0),
        0.0..10.0f64,
        (-300f64..300.0).prop_map(|e| 10f64.powf(e))
    ]
}

prop_compose! {
    fn run()(
        names in (path(), path(), path(), proptest::option::of(path())),
        lists in (
            proptest::collection::vec(path(), 1..4),
            proptest::collection::vec(path(), 1..4),
            proptest::collection::btree_set(path(), 0..4),
        ),
        sizes in (size(), size(), size()),
        counts in (2u64..=1 << 20, 1u64..=65536, 1u64..=65536, 0u64..=1000, 1u64..=31),
        more in (0u64..=i64::MAX as u64, 1u64..=8, 4u64..=256, 0u64..1_000_000, any::<[bool; 5]>()),
        floats in (positive(), positive(), positive(), 0.0..1.0f64, 0.0..1.0f64, 1e-30..1.0f64),
        kinds in (0usize..7, 0usize..4, 0usize..3, 0usize..3),
    ) -> RunConfig {
        let mut config = RunConfig::default();
        let [packing, shuffle, truncate, epochs, fp32] = more.4;
        config.model.path = Some(names.0);
        config.data.train = lists.0;
        config.data.eval = lists.1;
        (config.data.packing, config.data.shuffle) = (packing, shuffle);
        config.data.truncate = truncate;
        config.data.seq_len = counts.0;
        config.data.format = [
            DataFormat::Auto, DataFormat::Messages, DataFormat::Sharegpt, DataFormat::Alpaca,
            DataFormat::Prompt, DataFormat::Text, DataFormat::Tokens,
        ][kinds.0];
        if fp32 {
            config.model.precision = Precision::Fp32;
            config.train.gradient_dtype = GradientDtype::F32;
            config.model.init = WeightInit::Random;
        } else if truncate {
            config.train.gradient_dtype = GradientDtype::F32;
            config.optimizer.moments = MomentDtype::Bf16;
        }
        let train = &mut config.train;
        let count = Some(counts.3 + more.3 + 1);
        (train.steps, train.epochs) = if epochs { (None, count) } else { (count, None) };
        (train.micro_batch, train.micro_batches) = (counts.1, counts.2);
        train.warmup_steps = counts.3;
        train.learning_rate = floats.0;
        train.min_learning_rate = floats.0 * floats.3;
        (train.weight_decay, train.max_grad_norm) = (floats.1, floats.2);
        (train.betas, train.eps) = ([floats.3, floats.4], floats.5);
        train.schedule = [
            RateSchedule::Constant, RateSchedule::Linear, RateSchedule::Cosine, RateSchedule::Wsd,
        ][kinds.1];
        (train.eval_every, train.seed) = (more.3, more.0);
        let memory = &mut config.memory;
        (memory.device, memory.host) = (sizes.0, sizes.1);
        memory.store = lists.2.into_iter().map(|path| StorePath {
            path, size: sizes.2, read: more_rate(more.0), write: more_rate(more.3),
        }).collect();
        (memory.buffers, memory.slabs) = (more.1, more.2);
        memory.recompute = [Recompute::Auto, Recompute::All, Recompute::None][kinds.2];
        memory.zstd = [SpillZstd::Auto, SpillZstd::On, SpillZstd::Off][kinds.2];
        memory.io_engine = [None, Some(IoEngine::Uring), Some(IoEngine::Pread)][kinds.3];
        config.checkpoint.dir = names.3;
        (config.checkpoint.every, config.checkpoint.keep) = (more.3, counts.4);
        (config.checkpoint.zstd, config.memory.io_timeout) = (counts.4 % 20, more.3 % 86401);
        config.log.dir = names.1;
        config.log.tensorboard = !truncate;
        config.log.prometheus = Some(([127, 0, 0, 1], 9400).into()).filter(|_| shuffle);
        config
    }
}

proptest! {
    #[test]
    fn what_is_written_reads_back_as_the_same(config in run()) {
        let text = config.to_toml();
        let again = parse(&text, &[]);
        prop_assert_eq!(again.as_ref(), Ok(&config), "{}", text);
        prop_assert_eq!(again.expect("checked").identity_hash(), config.identity_hash());
    }

    #[test]
    fn any_text_is_read_or_refused(text in "[a-z\\[\\]={}.\", \n0-9#]{0,80}", set in ".{0,40}") {
        let known = format!("[train]\n{text}");
        for text in [&text, &known] {
            RunConfig::parse(text, "a.toml", &[]).err();
            RunConfig::parse(LEAST, "a.toml", &[set.clone(), format!("train.{set}")]).err();
        }
    }
}

#[test]
fn all_faults_of_a_file_are_named_in_their_order() {
    let text = "[model]\npath = 3\n[data]\ntrian = \"a\"\nmix = [0]\n[nowhere]\n[train]\n\
        steps = \"x\"\n";
    let sets = ["train.seed=-1".to_string()];
    let faults = RunConfig::faults(text, "a.toml", &sets);
    let places: Vec<String> = faults
        .iter()
        .map(|fault| {
            let line = fault.to_string();
            let place = line.strip_prefix("run.toml: ").expect("of run.toml");
            place
                .split(": expected")
                .next()
                .expect("a place")
                .to_string()
        })
        .collect();
    assert_eq!(
        places,
        [
            "a.toml line 2, model.path",
            "a.toml line 4",
            "a.toml line 5, data.mix",
            "a.toml line 6",
            "a.toml line 8, train.steps",
            "--set train.seed",
        ]
    );
    // What concerns several keys is looked at once each is right: all of it, too.
    let faults = RunConfig::faults("[train]\nwarmup_steps = 3\n", "a.toml", &[]);
    assert_eq!(faults.len(), 3, "steps, model.path, data.train: {faults:?}");
    assert!(RunConfig::faults(LEAST, "a.toml", &[]).is_empty());
}

#[test]
fn what_is_shown_reads_back_and_says_where_it_is_from() {
    let sets = ["train.seed=7".to_string()];
    let shown = RunConfig::explained(LEAST, "a.toml", &sets).expect("a run");
    assert_eq!(parse(&shown, &[]), parse(LEAST, &["train.seed=7"]));
    for line in [
        "path = \"m\"  # a.toml line 2",
        "seed = 7  # --set",
        "micro_batch = 1  # default",
    ] {
        assert!(
            shown.lines().any(|other| other == line),
            "{line} in {shown}"
        );
    }
}

const LLAMA_FACTORY: &str = "\
### model
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
### dataset
dataset: identity,alpaca_en_demo
template: qwen
cutoff_len: 2048
max_samples: 1000
interleave_probs: 0.7, 0.3
val_size: 0.1
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
eval_steps: 500
output_dir: saves/qwen
save_steps: 200
resume_from_checkpoint: null
lora_rank: 8
";

#[test]
fn a_file_of_llama_factory_is_imported() {
    let imported = import(LLAMA_FACTORY, "lf.yaml").expect("a run");
    assert_eq!(
        imported.toml,
        "# Imported from lf.yaml, a file of LLaMA-Factory.

[model]
path = \"Qwen/Qwen2.5-1.5B-Instruct\"

[data]
train = [\"identity\", \"alpaca_en_demo\"]
dataset_dir = \"data\"
mix = [0.7, 0.3]
max_samples = 1000
eval_split = 0.1
seq_len = 2048
packing = false
truncate = true

[train]
epochs = 3
micro_batches = 2
weight_decay = 0.0
eval_every = 500
seed = 42

[checkpoint]
every = 200

[log]
dir = \"saves/qwen\"
"
    );
    assert_eq!(
        imported.lines,
        [
            "lf.yaml:11: template: qwen is left out: the tokenizer's own chat template is used",
            "lf.yaml:22: warmup_ratio: 0.1 is a share of steps that are not known yet: set \
             train.warmup_steps; `terrace data preview` tells the steps",
            "lf.yaml:28: lora_rank: 8 has no counterpart and is left out",
            "lf.yaml: trust_remote_code, do_train, deepspeed: say how LLaMA-Factory runs, not what \
             it learns; Terrace plans by itself",
        ]
    );
}

#[test]
fn a_share_of_known_steps_becomes_steps() {
    for (ratio, steps, warmup) in [
        ("0.03", "1000", "30"),
        ("0.1", "55", "6"),
        ("0.0", "9", "0"),
    ] {
        let yaml = format!(
            "model_name_or_path: m\ndataset: d\nwarmup_ratio: {ratio}\nmax_steps: {steps}\n"
        );
        let imported = import(&yaml, "lf.yaml").expect("a run");
        let config = RunConfig::parse(&imported.toml, "run.toml", &[]).expect("a run");
        assert_eq!(config.train.warmup_steps.to_string(), warmup);
        assert!(imported.lines.iter().all(|line| !line.contains("warmup")));
    }
}

/// The run of these lines of LLaMA-Factory, and what is said of them.
fn imported(lines: &[&str]) -> (RunConfig, Vec<String>) {
    let yaml = format!("model_name_or_path: m\ndataset: d\n{}\n", lines.join("\n"));
    let imported = import(&yaml, "lf.yaml").expect("a run");
    let config = RunConfig::parse(&imported.toml, "run.toml", &[]).expect("a run");
    (config, imported.lines)
}

#[test]
fn warm_up_in_steps_beats_a_share_of_them_in_any_order() {
    let with = |lines: &[&str]| imported(lines).0.train.warmup_steps;
    let steps = "max_steps: 200";
    assert_eq!(with(&[steps, "warmup_steps: 20", "warmup_ratio: 0.5"]), 20);
    assert_eq!(with(&[steps, "warmup_ratio: 0.5", "warmup_steps: 20"]), 20);
    assert_eq!(with(&[steps, "warmup_ratio: 0.5", "warmup_steps: 0"]), 100);
    assert_eq!(with(&[steps, "warmup_steps: 0", "warmup_ratio: 0.5"]), 100);
    assert_eq!(with(&[steps, "warmup_steps: 0.1"]), 20);
}

#[test]
fn the_least_rate_of_a_cosine_is_taken_over() {
    let cosine = "lr_scheduler_type: cosine_with_min_lr";
    for (rate, kwargs, least) in [
        ("1e-4", "min_lr: 1e-6", 1e-6),
        ("2e-4", "min_lr_rate: 0.5", 1e-4),
    ] {
        let rate = format!("learning_rate: {rate}");
        let kwargs = format!("lr_scheduler_kwargs:\n  {kwargs}");
        let (config, lines) = imported(&[cosine, &kwargs, &rate]);
        assert_eq!(config.train.min_learning_rate, least);
        assert_eq!(config.train.schedule, RateSchedule::Cosine);
        assert_eq!(lines, [""; 0]);
    }
}

#[test]
fn when_the_other_program_saves_and_evaluates_is_taken_over_or_told() {
    let (config, lines) = imported(&[
        "max_steps: 200",
        "val_size: 0.1",
        "save_steps: 0.1",
        "save_total_limit: 0",
        "eval_strategy: steps",
        "logging_steps: 25",
        "load_best_model_at_end: true",
        "early_stopping_steps: 3",
    ]);
    assert_eq!((config.checkpoint.every, config.checkpoint.keep), (20, 2));
    let train = &config.train;
    assert_eq!((train.eval_every, train.early_stopping_patience), (25, 3));
    assert!(config.checkpoint.keep_best);
    assert_eq!(
        lines[..2],
        [
            "lf.yaml:6: save_total_limit: 0 is not 1 to 31, as checkpoint.keep has to be: 2 are \
             kept",
            "lf.yaml:9: load_best_model_at_end: true keeps that commit; `terrace export --best` \
             takes it",
        ]
    );
    // Without evaluations by steps there is no best one, and nothing is refused.
    let (config, lines) = imported(&[
        "num_train_epochs: 1",
        "val_size: 0.1",
        "eval_steps: 0.25",
        "eval_strategy: epoch",
        "save_strategy: \"no\"",
        "save_steps: 0.5",
        "load_best_model_at_end: true",
    ]);
    assert!(!config.checkpoint.keep_best);
    assert_eq!((config.train.eval_every, config.checkpoint.every), (0, 500));
    let begins = [
        "lf.yaml:6: eval_strategy: epoch is not by steps: set train.eval_every",
        "lf.yaml:7: save_strategy: no is not taken over",
        "lf.yaml:8: save_steps: 0.5 is a share of steps that are not known yet: set \
         checkpoint.every",
        "lf.yaml:9: load_best_model_at_end: true needs evaluations: set train.eval_every",
    ];
    assert_eq!(lines.len(), begins.len(), "{lines:?}");
    for (line, begin) in lines.iter().zip(begins) {
        assert!(line.starts_with(begin), "{line}");
    }
    // Under "no" the Trainer does not look at eval_steps.
    let no = ["eval_strategy: \"no\"", "eval_steps: 10", "stage: pt"];
    let config = imported(&no).0;
    assert_eq!(config.train.eval_every, 0);
    assert!(config.data.packing, "what is pre-trained on is packed");
}

#[test]
fn what_a_run_is_reported_to_is_taken_over_or_told() {
    for (value, tensorboard, told) in [
        ("none", false, false),
        ("tensorboard", true, false),
        ("all", true, false),
        ("wandb", true, true),
        ("[wandb, tensorboard]", true, true),
    ] {
        let (config, lines) = imported(&[&format!("report_to: {value}")]);
        assert_eq!(config.log.tensorboard, tensorboard, "{value}");
        let telling = "is not written to: TensorBoard's event files";
        let found = lines.iter().any(|line| line.contains(telling));
        assert_eq!(found, told, "{value}: {lines:?}");
    }
}

/// As the Trainer has it, in whatever order they are written.
#[test]
fn warmup_steps_that_are_named_go_before_a_share() {
    for (lines, warmup) in [
        (["warmup_ratio: 0.1", "warmup_steps: 20"], 20),
        (["warmup_steps: 20", "warmup_ratio: 0.1"], 20),
        (["warmup_ratio: 0.1", "warmup_steps: 0"], 100),
        (["warmup_steps: 0", "warmup_ratio: 0.1"], 100),
        (["warmup_steps: 0", "warmup_ratio: 1"], 1000),
        (["warmup_steps: 0", "warmup_ratio: 5"], 0),
    ] {
        let lines = lines.join("\n");
        let yaml = format!("model_name_or_path: m\ndataset: d\nmax_steps: 1000\n{lines}\n");
        let imported = import(&yaml, "lf.yaml").expect("a run");
        let config = RunConfig::parse(&imported.toml, "run.toml", &[]).expect("a run");
        assert_eq!(config.train.warmup_steps, warmup, "{lines}");
    }
}

/// Evaluations without rows refused the whole import, by a line of a file that nobody had written.
#[test]
fn evaluations_without_rows_are_left_out_of_an_import() {
    let yaml = "model_name_or_path: m\ndataset: d\nval_size: 0\neval_strategy: steps\n\
                eval_steps: 50\nload_best_model_at_end: true\n";
    let imported = import(yaml, "lf.yaml").expect("a run");
    let config = RunConfig::parse(&imported.toml, "run.toml", &[]).expect("a run");
    assert_eq!(
        (config.train.eval_every, config.checkpoint.keep_best),
        (0, false)
    );
    let told = |key: &str| imported.lines.iter().any(|line| line.contains(key));
    assert!(
        told("eval_steps") && told("load_best"),
        "{:?}",
        imported.lines
    );
}

/// `eval_strategy: epoch` has no key here: the best of no evaluations must not refuse the file.
#[test]
fn the_best_of_no_evaluations_is_left_out_of_an_import() {
    let yaml = "model_name_or_path: m\ndataset: d\neval_strategy: epoch\n\
                load_best_model_at_end: true\nearly_stopping_steps: 3\nval_size: 0.1\n";
    let imported = import(yaml, "lf.yaml").expect("a run");
    let config = RunConfig::parse(&imported.toml, "run.toml", &[]).expect("a run");
    assert!(!config.checkpoint.keep_best);
    assert_eq!(config.train.early_stopping_patience, 0);
    let told = |key: &str| imported.lines.iter().any(|line| line.contains(key));
    assert!(
        told("keep_best") && told("early_stopping"),
        "{:?}",
        imported.lines
    );
    // The Trainer looks at eval_steps under "steps" alone.
    let yaml = yaml.replace("epoch", "steps") + "eval_steps: 50\n";
    let imported = import(&yaml, "lf.yaml").expect("a run");
    let config = RunConfig::parse(&imported.toml, "run.toml", &[]).expect("a run");
    assert!(config.checkpoint.keep_best);
    assert_eq!(config.train.early_stopping_patience, 3);
}

#[test]
fn a_file_of_megatrain_is_imported() {
    let yaml = "model:
  name: \"Qwen/Qwen2.5-7B-Instruct\"
  dtype: \"bfloat16\"
  attn_implementation: \"flash_attention_2\"
dataset:
  name: \"metamath\"
  dataset_dir: \"data\"
  query_field: \"query\"
  max_seq_len: 1024
training:
  batch_size: 128
  gradient_accumulation_steps: 1
  num_steps: 500
  learning_rate: 1.0e-5
  max_grad_norm: 1.0
optimizer:
  type: \"deepspeed_adam\"
  beta2: 0.95
memory:
  num_grad_slabs: 12
";
    let imported = import(yaml, "mt.yaml").expect("a run");
    assert_eq!(
        imported.toml,
        "# Imported from mt.yaml, a file of MegaTrain.

[model]
path = \"Qwen/Qwen2.5-7B-Instruct\"

[data]
train = [\"metamath\"]
dataset_dir = \"data\"
packing = false
truncate = true

[train]
steps = 500
micro_batch = 128
schedule = \"constant\"
betas = [0.9, 0.95]
seed = 42
"
    );
    assert_eq!(
        imported.lines,
        [
            "mt.yaml:3: model.dtype: bfloat16 is precision \"bf16\", here with an exact fp32 master",
            "mt.yaml:8: dataset.query_field: query has no counterpart and is left out",
            "mt.yaml:17: optimizer.type: deepspeed_adam is AdamW here, as torch.optim.AdamW, in f32",
            "mt.yaml: model.attn_implementation, memory.num_grad_slabs: say how MegaTrain runs, not \
             what it learns; Terrace plans by itself",
        ]
    );
}

#[test]
fn the_schema_has_every_key() {
    let schema = json_schema();
    let text = commented_template();
    let mut table = "";
    for line in text.lines() {
        let line = line.strip_prefix("# ").unwrap_or(line);
        if let Some(name) = line
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
        {
            table = name;
        } else if let Some((key, _)) = line.split_once(" = ")
            && key.chars().all(|c| c.is_ascii_lowercase() || c == '_')
        {
            let found = &schema["properties"][table]["properties"][key];
            assert!(found["description"].is_string(), "{table}.{key}");
        }
    }
    let train = &schema["properties"]["train"]["properties"];
    assert_eq!(train["steps"]["minimum"], 1);
    assert_eq!(train["schedule"]["enum"][2], "cosine");
    assert_eq!(train["learning_rate"]["default"], 1e-5);
}

/// A folder with a small model, and a command line within it: what it wrote to standard error.
struct Newcomer {
    folder: tempfile::TempDir,
}

impl Newcomer {
    fn new() -> Newcomer {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("model");
        std::fs::create_dir(&model).expect("a folder");
        let config = serde_json::json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024,
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "max_position_embeddings": 256, "tie_word_embeddings": true,
        });
        std::fs::write(model.join("config.json"), config.to_string()).expect("written");
        for (name, bytes) in terrace::data::quickstart::tokenizer_files() {
            std::fs::write(model.join(name), bytes).expect("written");
        }
        Newcomer { folder }
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        let path = self.folder.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(path, bytes).expect("written");
    }

    /// Exit code, standard output and standard error.
    fn run(&self, arguments: &[&str]) -> (i32, String, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_terrace"))
            .args(arguments)
            .current_dir(self.folder.path())
            .env("HOME", self.folder.path())
            .env_remove("XDG_CACHE_HOME")
            .env_remove("HF_HUB_CACHE")
            .env("HF_HOME", self.folder.path().join("hf"))
            .output()
            .expect("it starts");
        let text = |bytes: Vec<u8>| {
            let text = String::from_utf8(bytes).expect("UTF-8");
            text.replace(&self.folder.path().display().to_string(), "HOME")
        };
        let code = output.status.code().expect("an exit code");
        (code, text(output.stdout), text(output.stderr))
    }
}

/// Wrong run.toml files: name and text.
const WRONG_RUNS: &[(&str, &str)] = &[
    (
        "an unknown key",
        "[model]\npath = \"model\"\n[train]\nlr = 1e-5\nsteps = 1\n",
    ),
    ("no TOML", "[model]\npath = model\n"),
    ("YAML", "model_name_or_path: Qwen/Qwen2.5-7B\nstage: sft\n"),
    ("no unit", "[memory]\nhost = 24\n"),
    ("an unknown table", "[optimiser]\nlr = 1\n"),
    ("nothing", ""),
    (
        "a model that is nowhere",
        "[model]\npath = \"org/name\"\n[data]\ntrain = \"a.jsonl\"\n[train]\nsteps = 1\n",
    ),
    (
        "data that is nowhere",
        "[model]\npath = \"model\"\n[data]\ntrain = [\"x/none.jsonl\", \"alpaca\"]\n[train]\nsteps = 1\n",
    ),
    (
        "more warm-up than steps",
        "[model]\npath = \"model\"\n[data]\ntrain = \"a\"\n[train]\nsteps = 5\nwarmup_steps = 9\n",
    ),
    (
        "weights for other sources",
        "[model]\npath = \"model\"\n[data]\ntrain = [\"a\", \"b\"]\nmix = [1]\n[train]\nsteps = 5\n",
    ),
];

/// Wrong data files: name and bytes.
const WRONG_DATA: &[(&str, &[u8])] = &[
    ("empty.jsonl", b""),
    ("cut.json", b"[{\"text\": \"a\"},\n{\"te"),
    ("cut.jsonl", b"{\"text\": \"a\"}\n{\"text\": \"b"),
    ("columns.jsonl", b"{\"title\": \"a\", \"body\": \"b\"}\n"),
    ("latin1.jsonl", b"{\"text\": \"caf\xe9\"}\r\n"),
    ("utf16.json", b"\xff\xfe[\0]\0"),
    ("zero.jsonl", b"{\"input_ids\": []}\n"),
    ("rows.jsonl.gz", b"\x1f\x8b\x08\0"),
    ("rows.csv", b"a,b\n1,2\n"),
    ("rows.parquet", b"PAR1nothing"),
    ("folder/notes.md", b"no data"),
    ("both/a.bin", b"\x01\0\x02\0"),
    ("odd.bin", b"\x01\0\x02\0\x03"),
    ("large.bin", b"\x01\0\xff\xff"),
    (
        "role.jsonl",
        b"{\"messages\": [{\"role\": \"bot\", \"content\": \"a\"}]}\n",
    ),
    (
        "question.jsonl",
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n",
    ),
    (
        "labels.jsonl",
        b"{\"input_ids\": [1, 2], \"labels\": [2, 3]}\n",
    ),
    ("bom.jsonl", b"\xef\xbb\xbf{\"text\": 3}\r\n"),
];

/// Entries of a dataset_info.json that cannot be trained on.
const WRONG_ENTRIES: &[(&str, &str)] = &[
    ("on_hub", "{\"hf_hub_url\": \"org/data\"}"),
    ("ranked", "{\"file_name\": \"a.json\", \"ranking\": true}"),
    (
        "pictures",
        "{\"file_name\": \"a.json\", \"columns\": {\"images\": \"images\"}}",
    ),
    ("sampled", "{\"file_name\": \"a.json\", \"num_samples\": 5}"),
    (
        "foreign",
        "{\"file_name\": \"a.json\", \"formatting\": \"csv\"}",
    ),
    (
        "renamed",
        "{\"file_name\": \"r.json\", \"columns\": {\"prompt\": \"q\", \"response\": \"a\"}}",
    ),
    (
        "tagged",
        "{\"file_name\": \"t.json\", \"formatting\": \"sharegpt\", \"tags\": {\"user_tag\": \"U\"}}",
    ),
];

/// Each wrong file with its one line, as in `fixtures/refusals.txt`; TERRACE_SNAPSHOTS=write makes
/// that file anew, to be read before it is kept.
#[test]
fn wrong_files_have_one_line_each() {
    let newcomer = Newcomer::new();
    let mut seen = String::new();
    let mut note = |name: &str, (code, _, text): (i32, String, String)| {
        let line = text.trim_end().lines().last().unwrap_or_default();
        seen.push_str(&format!("{name} ({code})\n    {line}\n"));
    };
    for (name, text) in WRONG_RUNS {
        newcomer.write("wrong.toml", text.as_bytes());
        note(name, newcomer.run(&["config", "check", "wrong.toml"]));
    }
    let run = LEAST
        .replace("\"m\"", "\"model\"")
        .replace("\n[train]", "\nseq_len = 64\n[train]");
    newcomer.write("run.toml", run.as_bytes());
    newcomer.write("both/b.jsonl", b"{\"text\": \"a\"}");
    newcomer.write("r.json", b"[{\"question\": \"a\", \"a\": \"b\"}]");
    newcomer.write(
        "t.json",
        b"[{\"conversations\": [{\"from\": \"human\", \"value\": \"a\"}]}]",
    );
    let entries: Vec<String> = WRONG_ENTRIES
        .iter()
        .map(|(name, entry)| format!("\"{name}\": {entry}"))
        .collect();
    newcomer.write(
        "dataset_info.json",
        format!("{{{}}}", entries.join(", ")).as_bytes(),
    );
    for (name, bytes) in WRONG_DATA {
        newcomer.write(name, bytes);
        let entry = match Path::new(name).parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_str().expect("UTF-8"),
            _ => name,
        };
        let set = format!("data.train={entry}");
        note(
            name,
            newcomer.run(&["data", "preview", "run.toml", "--set", &set]),
        );
    }
    for name in WRONG_ENTRIES
        .iter()
        .map(|(name, _)| *name)
        .chain(["absent"])
    {
        let set = format!("data.train={name}");
        let sets = ["--set", "data.dataset_dir=.", "--set", &set];
        note(
            name,
            newcomer.run(&[&["data", "preview", "run.toml"], &sets[..]].concat()),
        );
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/refusals.txt");
    if std::env::var_os("TERRACE_SNAPSHOTS").is_some() {
        std::fs::write(&path, &seen).expect("written");
    }
    let kept = std::fs::read_to_string(&path).expect("the snapshots");
    for (seen, kept) in seen.lines().zip(kept.lines()) {
        assert_eq!(seen, kept);
    }
    assert_eq!(seen.lines().count(), kept.lines().count());
}

#[test]
fn a_model_is_found_by_its_name_in_the_local_cache() {
    let newcomer = Newcomer::new();
    newcomer.write("t.jsonl", b"{\"text\": \"a b c\"}");
    newcomer.write(
        "run.toml",
        LEAST.replace("\"m\"", "\"org/small\"").as_bytes(),
    );
    let model = newcomer.folder.path().join("hf/hub/models--org--small");
    let snapshot = model.join("snapshots/abc123");
    std::fs::create_dir_all(model.join("refs")).expect("a folder");
    std::fs::create_dir_all(&snapshot).expect("a folder");
    for entry in std::fs::read_dir(newcomer.folder.path().join("model")).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name");
        std::fs::copy(&path, snapshot.join(name)).expect("copied");
    }
    let check = |set: &str| newcomer.run(&["config", "check", "run.toml", "--set", set]);
    let missing = check("train.seed=1");
    assert_eq!(missing.0, 2);
    assert!(
        missing
            .2
            .contains("no revision main there; fetch it with `hf download org/small`")
    );
    std::fs::write(model.join("refs/main"), "abc123").expect("written");
    assert_eq!(check("train.seed=1").0, 0, "{:?}", check("train.seed=1"));
    assert_eq!(check("model.path=org/small@abc123").0, 0);
    assert_eq!(check("model.path=org/small@v2").0, 2);
    let preview = newcomer.run(&["data", "preview", "run.toml"]);
    assert_eq!(preview.0, 0, "{}", preview.2);
}

fn more_rate(seed: u64) -> Option<u64> {
    (!seed.is_multiple_of(3)).then_some(seed)
}
