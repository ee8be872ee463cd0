//! Goal: every kernel compiles for every kind of card that Terrace serves, found wherever NVRTC is.
//!
//! Method: the device's own compilation, for each architecture; needs NVRTC and no card. Without it
//! the test says so and passes. The cache is a directory of the test's, so that nothing old counts,
//! and a second compilation must give the same code from it.

#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use terrace::device::cuda::compile_kernels;

/// Ampere, Ada, Hopper with its own instructions, Blackwell.
const ARCHITECTURES: [&str; 5] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100"];

#[test]
fn kernels_compile_for_every_card() {
    let cache = tempfile::tempdir().unwrap();
    // SAFETY: this binary has one test, which has started no thread yet.
    unsafe { std::env::set_var("XDG_CACHE_HOME", cache.path()) };
    for architecture in ARCHITECTURES {
        let started = std::time::Instant::now();
        let kernels = match compile_kernels(architecture) {
            Ok(kernels) => kernels,
            Err(error) if error.to_string().contains("open libnvrtc") => {
                println!("SKIP: {error}");
                return;
            }
            Err(error) => panic!("{architecture}: {error}"),
        };
        assert!(!kernels.is_empty());
        for (name, code) in &kernels {
            assert_eq!(&code[..4], b"\x7fELF", "{name} for {architecture}");
        }
        let bytes: usize = kernels.iter().map(|(_, code)| code.len()).sum();
        println!(
            "{architecture}: {} files, {bytes} bytes, {:.1} s",
            kernels.len(),
            started.elapsed().as_secs_f64()
        );
        assert_eq!(
            kernels,
            compile_kernels(architecture).unwrap(),
            "from the cache"
        );
    }
}
