//! Grouped GEMMs on compute capability 9.0: launches of `hopper.cu`.

use cudarc::driver::sys::CUtensorMap;

use super::{GroupedBackwardInput, GroupedBackwardWeight, GroupedForward, GroupedShape};
use crate::cuda::hopper::{
    HopperKernel, OTHER_SHARED, SQUARE, THREADS, TILE_K, TILE_M, cached_tile_rows, tensor_map,
};
use crate::cuda::{Arg, Gpu, Macro, Source, args, is_bf16, source};
use crate::error::Result;
use crate::ops::Accumulate;
use crate::ops::experts::MAX_EXPERTS;
use crate::tensor::Slice;

const SOURCE: Source = source!(
    "experts/grouped/hopper.cu",
    after "../cuda/headers/hopper.cuh", after "../cuda/headers/hopper_tiles.cuh"
);

const GROUPED_TILE_N: usize = 256;
/// Number of tiles of each operand in shared memory at a time: as many as fit.
const GROUPED_STAGES: usize = 4;

/// The products of a layer.
#[derive(Clone, Copy, Debug)]
enum Product {
    Forward,
    Input,
    Weight,
}

pub(crate) static KERNELS: [HopperKernel; 3] =
    [kernel(&macros(Product::Forward)), kernel(&macros(Product::Input)), kernel(&macros(Product::Weight))];

const fn kernel(macros: &'static [Macro]) -> HopperKernel {
    let tiles = GROUPED_STAGES * (TILE_M + GROUPED_TILE_N) * TILE_K * size_of::<u16>();
    let offsets = (2 * MAX_EXPERTS + 1) * size_of::<i32>();
    let shared = tiles + offsets + OTHER_SHARED;
    HopperKernel { source: SOURCE, name: "grouped_hopper", macros, threads: THREADS, shared }
}

const fn macros(product: Product) -> [Macro; 3] {
    [
        Macro::int("PRODUCT", product as usize),
        Macro::int("STAGES", GROUPED_STAGES),
        Macro::int("MAX_EXPERTS", MAX_EXPERTS),
    ]
}

/// Returns whether the kernels support a layer with these operands in the activations' type.
pub(super) fn supports(gpu: &Gpu, s: GroupedShape, operands: &[Slice<'_>]) -> bool {
    gpu.hopper.supports(operands, &[s.inputs, s.outputs], &[s.rows, s.experts])
}

/// Returns whether the kernels support this gradient.
pub(super) fn supports_weight(gpu: &Gpu, args: &GroupedBackwardWeight<'_>) -> bool {
    supports(gpu, args.shape, &[args.dy, args.x]) && args.dw.address().is_multiple_of(16)
}

/// # Safety
/// The operands are supported and have the sizes of the shape, the offsets are those of its rows, and the output
/// overlaps no input.
pub(super) unsafe fn forward(gpu: &Gpu, args: GroupedForward<'_>) -> Result<()> {
    let GroupedForward { shape: s, offsets, x, w, y } = args;
    let a = tensor_map(x, [s.inputs, s.rows, 1], [TILE_K, TILE_M, 1])?;
    let b = tensor_map(w, [s.inputs, s.outputs, s.experts], [TILE_K, GROUPED_TILE_N, 1])?;
    // SAFETY: the caller's promise.
    unsafe { launch(gpu, Product::Forward, s, [a, b], args![offsets, y, true, false]) }
}

/// # Safety
/// The same as for [`forward`].
pub(super) unsafe fn backward_input(gpu: &Gpu, args: GroupedBackwardInput<'_>) -> Result<()> {
    let GroupedBackwardInput { shape: s, offsets, dy, w, dx } = args;
    let a = tensor_map(dy, [s.outputs, s.rows, 1], [TILE_K, TILE_M, 1])?;
    let b = tensor_map(w, [s.inputs, s.outputs, s.experts], [SQUARE, SQUARE, 1])?;
    // SAFETY: the caller's promise.
    unsafe { launch(gpu, Product::Input, s, [a, b], args![offsets, dx, true, false]) }
}

/// # Safety
/// The same as for [`forward`].
pub(super) unsafe fn backward_weight(gpu: &Gpu, args: GroupedBackwardWeight<'_>) -> Result<()> {
    let GroupedBackwardWeight { shape: s, offsets, dy, x, dw, acc } = args;
    let a = tensor_map(dy, [s.outputs, s.rows, 1], [SQUARE, SQUARE, 1])?;
    let b = tensor_map(x, [s.inputs, s.rows, 1], [SQUARE, SQUARE, 1])?;
    let written = args![offsets, dw, is_bf16(dw), acc == Accumulate::Add];
    // SAFETY: the caller's promise.
    unsafe { launch(gpu, Product::Weight, s, [a, b], written) }
}

/// # Safety
/// The maps describe operands of a layer of this shape, and the arguments are its offsets and its output.
unsafe fn launch(
    gpu: &Gpu,
    product: Product,
    s: GroupedShape,
    maps: [CUtensorMap; 2],
    written: &[Arg],
) -> Result<()> {
    let (down, cols, k) = match product {
        Product::Forward => (s.row_tiles(TILE_M), s.outputs, s.inputs),
        Product::Input => (s.row_tiles(TILE_M), s.inputs, s.outputs),
        Product::Weight => (s.experts * s.outputs.div_ceil(TILE_M), s.inputs, s.rows.div_ceil(s.experts)),
    };
    let group = cached_tile_rows(k);
    let blocks = (down * cols.div_ceil(GROUPED_TILE_N)).min(gpu.hopper.multiprocessors());
    let sizes = [s.experts, s.outputs, s.inputs, group].map(Arg::from);
    let args = [&maps.map(Arg::TensorMap)[..], written, &sizes].concat();
    // SAFETY: the arguments are those of the kernel; the rest is the caller's promise.
    unsafe { gpu.hopper.launch(&KERNELS[product as usize], (blocks, 1, 1), &args) }
}
