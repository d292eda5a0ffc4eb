//! FP8: launches of the kernels that round, and matrix multiplications by cuBLASLt.

use xlaunch_pool::DType;

use super::format::{SMALLEST_MAX, is_fp8};
use super::{Amax, FP8_MULTIPLE, Fp8Operand, GemmFp8, QuantizeFp8};
use crate::cuda::gemm::{Epilogue, GemmCall, plain, transposed};
use crate::cuda::{Gpu, KernelFile, Launch, Macro, VEC, args, expect, source};
use crate::error::Result;
use crate::ops::Accumulate;
use crate::tensor::Slice;

/// Edge of the tiles that blocks round, and the number of threads per block.
const FP8_TILE: usize = 128;
const FP8_THREADS: usize = (FP8_TILE / VEC) * (FP8_TILE / VEC);

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("fp8/kernel.cu"),
    kernels: &["fp8_amax", "fp8_quantize_e4m3", "fp8_quantize_e5m2"],
    macros: &[
        Macro::int("FP8_TILE", FP8_TILE),
        Macro::int("FP8_THREADS", FP8_THREADS),
        Macro::float("FP8_SMALLEST_MAX", SMALLEST_MAX),
    ],
    dynamic_shared: &[],
};

pub(crate) fn amax(gpu: &Gpu, args: Amax<'_>) -> Result<()> {
    let Amax { rows, cols, x, end, amax } = args;
    expect_multiples([cols]);
    gpu.expect_act(x, rows * cols);
    end.into_iter().for_each(|end| expect(end, DType::I32, 1));
    zero_amax(gpu, amax)?;
    // SAFETY: checked above.
    unsafe { gpu.launch("fp8_amax", gpu.grid_for(x.len().div_ceil(VEC)), args![x, amax, end, rows, cols]) }
}

/// Checks the output of an [`Amax`] and sets it to 0, before a kernel raises it.
pub(crate) fn zero_amax(gpu: &Gpu, amax: Slice<'_>) -> Result<()> {
    expect(amax, DType::F32, 1);
    gpu.zero(amax)
}

pub(crate) fn quantize(gpu: &Gpu, args: QuantizeFp8<'_>) -> Result<()> {
    let QuantizeFp8 { rows, cols, dtype, x, amax, q, transposed, scale, end } = args;
    expect_multiples([rows, cols]);
    assert!(is_fp8(dtype), "{} is not FP8", dtype.name());
    gpu.expect_act(x, rows * cols);
    [q, transposed].into_iter().flatten().for_each(|out| expect(out, dtype, rows * cols));
    expect(scale, DType::F32, 1);
    expect(amax, DType::F32, 1);
    if let Some(end) = end {
        expect(end, DType::I32, 1);
    }
    let name = if dtype == DType::Fp8E4m3 { "fp8_quantize_e4m3" } else { "fp8_quantize_e5m2" };
    let launch = Launch::blocks(rows.div_ceil(FP8_TILE) * cols.div_ceil(FP8_TILE), FP8_THREADS as u32);
    // SAFETY: checked above; outputs overlap no input by the operation's contract.
    unsafe { gpu.launch(name, launch, args![x, amax, end, q, transposed, scale, rows, cols]) }
}

pub(crate) fn gemm(gpu: &Gpu, args: GemmFp8<'_>) -> Result<()> {
    let GemmFp8 { rows, cols, depth, a, b, bias, y, acc } = args;
    expect_multiples([rows, cols, depth]);
    for (Fp8Operand { q, scale }, rows) in [(a, rows), (b, cols)] {
        assert!(is_fp8(q.dtype()), "{} is not FP8", q.dtype().name());
        expect(q, q.dtype(), rows * depth);
        expect(scale, DType::F32, 1);
    }
    expect(y, if bias.is_some() { gpu.activations } else { y.dtype() }, rows * cols);
    gpu.expect_optional_act(bias, cols);
    let call = GemmCall {
        m: cols,
        n: rows,
        k: depth,
        a: transposed(b.q).scaled(b.scale),
        b: plain(a.q).scaled(a.scale),
        epilogue: bias.map_or(Epilogue::None, Epilogue::Bias),
        c: y,
        accumulate: acc == Accumulate::Add,
    };
    // SAFETY: checked above; y overlaps no input by the operation's contract.
    unsafe { gpu.gemm.run(&call) }
}

fn expect_multiples<const N: usize>(sizes: [usize; N]) {
    assert!(
        sizes.iter().all(|size| size.is_multiple_of(FP8_MULTIPLE)),
        "FP8 needs multiples of 16: {sizes:?}"
    );
}
