//! Terrace trains language models that are larger than the GPU's memory.
#![deny(unsafe_code)]

pub mod error;
pub mod stats;
// What is wanted: pure.
pub mod config;
pub mod model;
pub mod plan;
pub mod schedule;
pub mod tile;
// Where bytes live.
#[allow(unsafe_code, reason = "device arenas are raw memory")]
pub mod device;
#[allow(unsafe_code, reason = "the host arena is raw memory")]
pub mod host;
pub mod store;
// What moves, what computes.
pub mod data;
pub mod layer;
pub mod machine;
#[allow(unsafe_code, reason = "SIMD intrinsics")]
pub mod optimizer;
pub mod step;
pub mod transfer;
// What remains.
pub mod checkpoint;
pub mod generate;
pub mod hf;
pub mod quickstart;
pub mod train;

pub use error::{Error, Result};
