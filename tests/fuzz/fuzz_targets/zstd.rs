#![no_main]
//! libFuzzer's way to the target of that name.

#[path = "../targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::call("zstd", data));
