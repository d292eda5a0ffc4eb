//! Options of a back end, and information about its device.

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

/// Options for opening a GPU.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Arithmetic of matrix multiplications and, with it, the element type of activations.
    pub precision: Precision,
    /// True if every operation gives the same bits each time, on any host. This rules out cuDNN's attention backward,
    /// which uses atomics, and algorithms chosen by timing, which another host may choose differently.
    pub deterministic: bool,
    /// Options of the memory pool.
    pub pool: Options,
    /// True to print to stderr, once per operation and shape, which variant was selected and why.
    pub log_fallback: bool,
    /// True to warn on stderr, once each, about missing libraries that make this host slow.
    pub warnings: bool,
}

impl CudaOptions {
    /// Creates options that use the fastest variant of every operation, without a log or warnings.
    pub fn new(precision: Precision, pool: impl Into<Options>) -> Self {
        Self { precision, deterministic: false, pool: pool.into(), log_fallback: false, warnings: false }
    }
}

/// The device of a back end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name, such as "NVIDIA H200" or "CPU (2 threads)".
    pub name: String,
    /// "GPU-..." or "cpu".
    pub uuid: String,
}
