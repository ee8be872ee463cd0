//! Terrace trains language models that are larger than the GPU's memory.
#![deny(unsafe_code)]

pub mod config;
pub mod data;
#[allow(unsafe_code, reason = "device arenas are raw memory")]
pub mod device;
pub mod error;
pub mod hf;
#[allow(unsafe_code, reason = "the host arena is raw memory")]
pub mod host;
pub mod model;
#[allow(unsafe_code, reason = "SIMD intrinsics")]
pub mod optimizer;
pub mod store;
pub mod tile;

pub use error::{Error, Result};
