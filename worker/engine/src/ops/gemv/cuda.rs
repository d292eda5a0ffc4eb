//! Launches of the kernels for a few rows: tensor cores for bf16, FP32 units otherwise.

use xlaunch_pool::DType;

use super::{GEMV_ROWS, Gemv};
use crate::cuda::{Gpu, KernelFile, Launch, Macro, args, expect, is_bf16, source};
use crate::error::Result;
use crate::ops::Activation;

/// Outputs per block of the tensor core kernels, and inputs that a warp reads at a time.
const MMA_OUTPUTS: usize = 16;
const MMA_INPUTS: usize = 32;
/// Maximum number of warps per block of these kernels. They split the inputs, and each should read several times.
const MMA_WARPS: usize = 16;
const MMA_READS: usize = 3;
/// Warps per block of the FP32 kernel, one per output.
const FMA_WARPS: usize = 8;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("gemv/kernel.cu", after "activation/functions.cuh"),
    kernels: &["gemv_fma", "gemv_mma_8", "gemv_mma_16", "gemv_mma_32"],
    macros: &[Macro::int("GEMV_WARPS", MMA_WARPS)],
    dynamic_shared: &[],
};

pub(crate) fn run(gpu: &Gpu, a: Gemv<'_>) -> Result<()> {
    let s = a.shape;
    assert!(s.rows <= GEMV_ROWS, "{s:?} has more than {GEMV_ROWS} rows");
    gpu.expect_act(a.x, s.rows * s.inputs);
    gpu.expect_act(a.w, s.outputs * s.inputs);
    gpu.expect_optional_act(a.bias, s.outputs);
    let y_bf16 = is_bf16(a.y);
    expect(a.y, if y_bf16 { DType::Bf16 } else { DType::F32 }, s.rows * s.outputs);
    let aligned = [a.x, a.w].iter().all(|x| x.address().is_multiple_of(16));
    let tensor_cores = gpu.activations == DType::Bf16
        && gpu.device.capability.0 >= 8
        && s.inputs.is_multiple_of(MMA_INPUTS)
        && aligned;
    let (name, launch) = if tensor_cores {
        let name = match s.rows {
            0..=8 => "gemv_mma_8",
            9..=16 => "gemv_mma_16",
            _ => "gemv_mma_32",
        };
        let warps = s.inputs.div_ceil(MMA_INPUTS * MMA_READS).next_power_of_two().min(MMA_WARPS);
        (name, Launch::blocks(s.outputs.div_ceil(MMA_OUTPUTS), gpu.device.warp * warps as u32))
    } else {
        ("gemv_fma", Launch::blocks(s.outputs.div_ceil(FMA_WARPS), gpu.device.warp * FMA_WARPS as u32))
    };
    let activation = a.activation.map_or(Activation::ALL.len(), |activation| activation as usize);
    let args = args![a.x, a.w, a.bias, a.y, y_bf16, activation, s.rows, s.inputs, s.outputs];
    // SAFETY: checked above; y overlaps no input by the operation's contract.
    unsafe { gpu.launch(name, launch, args) }
}
