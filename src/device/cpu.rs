//! The CPU device.
/// The CPU device.
pub struct CpuDevice {}
