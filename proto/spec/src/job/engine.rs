//! The section `[engine]`.

use serde::{Deserialize, Serialize};

/// Device, arithmetic and memory of each worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct EngineSection {
    /// Kind of device to train on.
    pub device: Device,
    /// Arithmetic of matrix multiplications. Default: bf16 on GPUs, fp32 on CPUs.
    pub precision: Option<Precision>,
    /// Method of launching the operations of a step on a GPU.
    pub exec: Exec,
    /// Make repeated runs on the same kind of GPU bit-identical, by avoiding cuDNN's attention and kernels selected by
    /// timing. Slower. CPU runs are always bit-identical.
    pub deterministic: bool,
    /// Allocator of device memory.
    pub pool: PoolMode,
    /// Maximum device memory of each rank's allocator in MiB. Default: no limit.
    pub memory_limit_mb: Option<u64>,
}

impl Default for EngineSection {
    fn default() -> Self {
        Self {
            device: Device::Auto,
            precision: None,
            exec: Exec::Graph,
            deterministic: false,
            pool: PoolMode::On,
            memory_limit_mb: None,
        }
    }
}

/// Kind of device to train on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// GPUs if there are any, otherwise the CPU.
    Auto,
    /// NVIDIA GPUs, one per worker.
    Cuda,
    /// The CPU. Its cores are divided among the workers.
    Cpu,
}

/// Arithmetic of matrix multiplications. Master weights and optimizer state are always fp32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// fp32 throughout, without TF32. Slow on GPUs; for comparisons.
    Fp32,
    /// fp32 tensors, TF32 tensor cores.
    Tf32,
    /// bf16 weights, activations and matrix multiplications, with fp32 accumulation.
    Bf16,
    /// Like bf16, but the linear layers of all blocks multiply in FP8 (E4M3, gradients E5M2) with a scale per tensor.
    /// Faster above about a billion parameters. Needs compute capability 8.9, for experts 9.0, and sizes that are
    /// multiples of 16.
    Fp8,
}

impl Precision {
    /// Returns whether activations, and gradients on the wire, are bf16.
    pub fn has_bf16_activations(self) -> bool {
        matches!(self, Self::Bf16 | Self::Fp8)
    }

    /// Returns the name used in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Tf32 => "tf32",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        }
    }
}

/// Method of launching the operations of a step on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Exec {
    /// The third step is captured as a CUDA graph, and later steps replay it. Gives the same results as stream. On the
    /// CPU, and with `engine.pool = "off"`, the same as stream.
    Graph,
    /// Operations are launched one by one.
    Stream,
}

/// Allocator of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum PoolMode {
    /// A caching allocator, which reuses freed buffers. With `engine.exec = "graph"` on a GPU, the same as plan.
    On,
    /// Like on, but the addresses of repeated steps are planned once, so that every step gets the same addresses.
    Plan,
    /// Every buffer is a driver allocation. Very slow; for comparisons.
    Off,
}
