//! Terrace trains language models that are larger than the GPU's memory, every parameter, in full
//! precision, on one machine.
//!
//! ```text
//!  store (NVMe)          host (RAM)                      device
//!  scratch extents  ⇄  homes, gradient slots,   ⇄  weight buffers, anchors,
//!  checkpoints          ring of slabs               accumulators, workspaces
//!        store             host                          device
//!          └───────────── transfer ────────────────────────┘
//!                             step  ←  schedule  ←  plan  ←  config, model, tile
//! ```
//!
//! # As a library
//!
//! A configuration is planned, started and stepped, as `terrace train` does between its lines:
//!
//! ```
//! use terrace::{Planned, RunConfig, Start, quickstart};
//!
//! # fn main() -> terrace::Result<()> {
//! # let folder = std::env::temp_dir().join(format!("terrace-doc-{}", std::process::id()));
//! // The embedded small model and text; else RunConfig::parse(text, "run.toml", &[]).
//! let sets = ["train.steps=3".to_string(), "log.sample_every=0".to_string()];
//! let config: RunConfig = quickstart::write(&folder, &sets)?;
//! let planned = Planned::new(config, "cpu")?;
//! println!("{}", planned.table());
//! let mut trainer = planned.start(Start::Fresh)?;
//! for step in trainer.steps() {
//!     let report = step?.report;
//!     println!("step {}: loss {:.3}", report.step, report.loss);
//! }
//! assert_eq!(trainer.last_commit(), Some(3));
//! trainer.finish()?;
//! # std::fs::remove_dir_all(&folder).ok();
//! # Ok(())
//! # }
//! ```
//!
//! What is exported at the root is what versions speak of (CHANGELOG.md). The rooms below are
//! public for the tools and tests of this repository, and may change in any version. They stand in
//! data-path order; ARCHITECTURE.md tells a step once, and names the test of each invariant.
//! `unsafe` is denied but for the rooms that are lifted here by name.
#![doc = include_str!("ARCHITECTURE.md")]
#![deny(unsafe_code)]

pub mod error;
pub mod report;
pub mod stats;
// What is wanted: pure, no I/O, no clock.
pub mod config;
pub mod model;
pub mod plan;
pub mod schedule;
pub mod suggest;
pub mod tile;
// Where bytes live: host is the hub.
#[allow(unsafe_code, reason = "device arenas are raw memory")]
pub mod device;
#[allow(unsafe_code, reason = "the host arena is raw memory")]
pub mod host;
pub mod store;
// What moves, what computes.
pub mod data;
pub mod layer;
pub mod machine;
#[allow(
    unsafe_code,
    reason = "loops compiled for SIMD are called behind a check"
)]
pub mod optimizer;
pub mod step;
pub mod transfer;
// What remains.
pub mod checkpoint;
pub mod generate;
pub mod hf;
pub mod inspect;
pub mod log;
pub mod measure;
pub mod quickstart;
pub mod train;

pub use config::RunConfig;
pub use error::{Error, Result};
pub use plan::Plan;
pub use train::{Evaluation, Planned, Sample, Start, StepReport, Stepped, Steps, Trainer};
