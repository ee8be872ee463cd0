//! Seeds of random tests: how many, which, on how many threads; a failing one is printed with what
//! runs it again.
#![allow(dead_code, reason = "each test file uses a part")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Runs seeds 0 to `count` on all processors. `TERRACE_SEEDS=100000` changes the count, or names a
/// range as `20000..40000`; `TERRACE_SEED` runs that one alone.
pub(crate) fn run(count: u64, test: &str, each: impl Fn(u64) -> Result<(), String> + Sync) {
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse::<u64>().unwrap())
    };
    if let Some(seed) = number("TERRACE_SEED") {
        println!("seed {seed}: {:?}", each(seed));
        return each(seed).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
    let range = match std::env::var("TERRACE_SEEDS") {
        Err(_) => 0..count,
        Ok(text) => match text.split_once("..") {
            Some((from, to)) => from.parse().unwrap()..to.parse().unwrap(),
            None => 0..text.parse().unwrap(),
        },
    };
    println!("{test}: seeds {range:?}");
    let wrong = first_wrong(range, &each);
    if let Some((seed, wrong)) = wrong {
        panic!("seed {seed}: {wrong}\nagain: TERRACE_SEED={seed} cargo test {test}");
    }
}

/// The lowest-numbered seed found wrong, or one that panicked; later ones are not begun then.
pub(crate) fn first_wrong(
    seeds: std::ops::Range<u64>,
    each: &(impl Fn(u64) -> Result<(), String> + Sync),
) -> Option<(u64, String)> {
    let next = AtomicU64::new(seeds.start);
    let found: Mutex<Option<(u64, String)>> = Mutex::new(None);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end || found.lock().unwrap().is_some() {
                        return;
                    }
                    let outcome = catch_unwind(AssertUnwindSafe(|| each(seed)));
                    let wrong = match outcome {
                        Ok(Ok(())) => continue,
                        Ok(Err(wrong)) => wrong,
                        Err(panic) => format!("panicked: {}", words(&*panic)),
                    };
                    let mut found = found.lock().unwrap();
                    if found.as_ref().is_none_or(|(earlier, _)| seed < *earlier) {
                        *found = Some((seed, wrong));
                    }
                }
            });
        }
    });
    found.into_inner().unwrap()
}

/// What a panic said.
pub(crate) fn words(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "without words".to_string())
}
