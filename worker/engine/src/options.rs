//! How a back end computes, and what it computes on.

use xlaunch_pool::{DType, Options};

/// Arithmetic of matrix multiplications and element type of activations. Sums are always formed in F32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// F32 storage, no tf32 anywhere.
    Fp32,
    /// F32 storage, tf32 tensor cores.
    Tf32,
    /// Bf16 storage and tensor cores.
    Bf16,
}

impl Precision {
    /// Element type of activations.
    pub(crate) fn activations(self) -> DType {
        match self {
            Self::Fp32 | Self::Tf32 => DType::F32,
            Self::Bf16 => DType::Bf16,
        }
    }
}

/// How to open a GPU.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Arithmetic of matrix multiplications and, with it, the element type of activations.
    pub precision: Precision,
    /// Whether every operation gives the same bits each time, on any host. This rules out cuDNN's attention backward,
    /// which uses atomics, and algorithms chosen by timing, which another host may choose differently.
    pub deterministic: bool,
    /// Where memory comes from.
    pub pool: Options,
    /// Whether to print to stderr, once per operation and shape, which variant was selected and why.
    pub log_fallback: bool,
    /// Whether to warn on stderr, once each, of what is missing on this host and makes it slow.
    pub warnings: bool,
}

impl CudaOptions {
    /// The fastest variant of every operation, without a log or warnings.
    pub fn new(precision: Precision, pool: impl Into<Options>) -> Self {
        Self { precision, deterministic: false, pool: pool.into(), log_fallback: false, warnings: false }
    }
}

/// What a back end computes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Such as "NVIDIA H200" or "CPU (2 threads)".
    pub name: String,
    /// "GPU-..." or "cpu".
    pub uuid: String,
}
