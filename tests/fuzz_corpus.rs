//! Goal: no bytes from elsewhere make a parser panic, hang or take much memory.
//! Method: the fuzz targets of `tests/fuzz/targets.rs` on the committed corpus, on inputs made as a
//! writer makes them, and on some thousand seeded mutations of both. By hand, for longer:
//! `TERRACE_FUZZ_SECONDS=600 cargo test --test fuzz_corpus TARGET -- --nocapture`.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

#[path = "fuzz/targets.rs"]
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use terrace::store::sim::mix;

/// Mutations of each target in a run.
const MUTATIONS: u64 = 2000;
/// Most bytes of an input.
const BYTES_MAX: usize = 1 << 16;
/// Most memory that all of it may take: this process' peak.
const MEMORY_BYTES_MAX: u64 = 512 << 20;

/// Words that parsers look for.
const WORDS: [&str; 24] = [
    "null",
    "true",
    "-1",
    "0",
    "1e999",
    "18446744073709551615",
    "9223372036854775808",
    "\"\"",
    "[]",
    "{}",
    "[[[[",
    "\\u0000",
    "\u{202e}",
    "../",
    "/etc/passwd",
    "\"shape\":[4294967295,4294967297]",
    "\"data_offsets\":[]",
    "\"data_offsets\":[8,0]",
    "\"dtype\":\"F4\"",
    "\"hidden_size\":1099511627776",
    "\"vocab_size\":0",
    "\"from\":\"gpt\",\"value\":",
    "\"role\":\"assistant\",\"content\":",
    "\"input_ids\":[1,2]",
];

struct Mutator(u64);

impl Mutator {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = mix(self.0);
        (self.0 % bound.max(1) as u64) as usize
    }

    /// A few changes to one input, with parts of another.
    fn mutate(&mut self, input: &[u8], other: &[u8]) -> Vec<u8> {
        let mut bytes = input.to_vec();
        for _ in 0..1 + self.below(4) {
            let at = self.below(bytes.len() + 1);
            match self.below(8) {
                0 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                1 if at < bytes.len() => bytes[at] = self.below(256) as u8,
                2 => {
                    let count = 1 + self.below(16);
                    bytes.drain(at..(at + count).min(bytes.len()));
                }
                3 => {
                    let word = WORDS[self.below(WORDS.len())].as_bytes();
                    let end = (at + self.below(2) * word.len()).min(bytes.len());
                    bytes.splice(at..end, word.iter().copied());
                }
                4 => {
                    // An integer at one of its bounds.
                    let value = [0, 1, u64::MAX, 1 << 63, 1 << 32, 4096][self.below(6)];
                    let width = [1, 2, 4, 8][self.below(4)].min(bytes.len() - at);
                    bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
                }
                5 => {
                    let from = self.below(other.len());
                    let end = (from + 1 + self.below(64)).min(other.len());
                    bytes.splice(at..at, other[from..end].iter().copied());
                }
                6 => {
                    // A part twice: a key, a bracket, an entry.
                    let end = (at + 1 + self.below(64)).min(bytes.len());
                    let part = bytes[at..end].to_vec();
                    bytes.splice(at..at, part);
                }
                _ => bytes.truncate(at.max(1)),
            }
        }
        bytes.truncate(BYTES_MAX);
        bytes
    }
}

/// The committed inputs of a target and those that are made.
fn inputs(name: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fuzz/corpus")
        .join(name);
    let mut inputs = targets::seeds(name);
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    inputs.extend(paths.iter().map(|path| std::fs::read(path).unwrap()));
    assert!(!inputs.is_empty(), "{name} has no inputs");
    inputs
}

fn attempt(name: &str, input: &[u8]) {
    let began = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| targets::call(name, input)));
    let slow = began.elapsed() > Duration::from_secs(20);
    if outcome.is_err() || slow {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.input"));
        std::fs::write(&path, input).unwrap();
        panic!("{name}: {} (20 s are too long: {slow})", path.display());
    }
}

fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) << 10
}

fn fuzz(name: &str) {
    let mut inputs = inputs(name);
    for input in &inputs {
        attempt(name, input);
    }
    let seconds = std::env::var("TERRACE_FUZZ_SECONDS").ok();
    let seconds = seconds.map(|text| Duration::from_secs(text.parse().unwrap()));
    let start = Instant::now();
    let clock = seconds.map_or(1, |_| std::process::id().into());
    let mut mutator = Mutator(mix(clock));
    let mut count = 0;
    while seconds.map_or(count < MUTATIONS, |seconds| start.elapsed() < seconds) {
        let [one, other] = [0; 2].map(|_: usize| mutator.below(inputs.len()));
        let input = mutator.mutate(&inputs[one], &inputs[other]);
        attempt(name, &input);
        // A walk: what was made is changed further, now and then.
        if mutator.below(50) == 0 {
            let known = inputs.len();
            match known < 500 {
                true => inputs.push(input),
                false => inputs[known / 2 + mutator.below(known / 2)] = input,
            }
        }
        count += 1;
    }
    let peak = peak_bytes();
    println!("{name}: {count} inputs, peak {} MiB", peak >> 20);
    assert!(peak <= MEMORY_BYTES_MAX, "{name}: {peak} bytes");
}

macro_rules! targets {
    ($($name:ident),+ $(,)?) => {
        $(#[test] fn $name() { fuzz(stringify!($name)); })+

        #[test]
        fn every_target_is_run() {
            let run = [$(stringify!($name)),+];
            let known: Vec<&str> = targets::TARGETS.iter().map(|(name, _)| *name).collect();
            assert_eq!(run.to_vec(), known);
        }
    };
}

targets!(
    superblock,
    manifest,
    store,
    safetensors,
    index,
    config,
    tokenizer,
    rows,
    run,
    zstd
);
