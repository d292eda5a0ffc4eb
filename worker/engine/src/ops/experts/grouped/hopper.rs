//! Grouped GEMMs on compute capability 9.0: launches of `hopper.cu`.

use cudarc::driver::sys::CUtensorMap;
use xlaunch_pool::DType;

use super::{
    GroupedBackwardInput, GroupedBackwardWeight, GroupedForward, GroupedFp8, GroupedProduct, GroupedShape,
};
use crate::cuda::hopper::{
    HopperKernel, OTHER_SHARED, SQUARE, THREADS, TILE_K, TILE_M, TILE_ROW_BYTES, cached_tile_rows,
    strided_map, tensor_map,
};
use crate::cuda::{Arg, Gpu, Macro, Source, args, expect, expect_grad, is_bf16, source};
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

/// The kernels of each product, in the activations' type and in FP8.
pub(crate) static KERNELS: [HopperKernel; 3] = [
    kernel(&macros(GroupedProduct::Forward, false)),
    kernel(&macros(GroupedProduct::Input, false)),
    kernel(&macros(GroupedProduct::Weight, false)),
];
pub(crate) static FP8_KERNELS: [HopperKernel; 3] = [
    kernel(&macros(GroupedProduct::Forward, true)),
    kernel(&macros(GroupedProduct::Input, true)),
    kernel(&macros(GroupedProduct::Weight, true)),
];

const fn kernel(macros: &'static [Macro]) -> HopperKernel {
    let tiles = GROUPED_STAGES * (TILE_M + GROUPED_TILE_N) * TILE_ROW_BYTES;
    let offsets = (2 * MAX_EXPERTS + 1) * size_of::<i32>();
    let shared = tiles + offsets + OTHER_SHARED;
    HopperKernel { source: SOURCE, name: "grouped_hopper", macros, threads: THREADS, shared }
}

const fn macros(product: GroupedProduct, fp8: bool) -> [Macro; 4] {
    [
        Macro::int("PRODUCT", product as usize),
        Macro::int("FP8", fp8 as usize),
        Macro::int("STAGES", GROUPED_STAGES),
        Macro::int("MAX_EXPERTS", MAX_EXPERTS),
    ]
}

/// In place of the scales of FP8 operands.
const NONE: Option<Slice<'static>> = None;

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
    unsafe {
        launch(gpu, false, GroupedProduct::Forward, s, [a, b], args![offsets, NONE, NONE, y, true, false])
    }
}

/// # Safety
/// The same as for [`forward`].
pub(super) unsafe fn backward_input(gpu: &Gpu, args: GroupedBackwardInput<'_>) -> Result<()> {
    let GroupedBackwardInput { shape: s, offsets, dy, w, dx } = args;
    let a = tensor_map(dy, [s.outputs, s.rows, 1], [TILE_K, TILE_M, 1])?;
    let b = tensor_map(w, [s.inputs, s.outputs, s.experts], [SQUARE, SQUARE, 1])?;
    // SAFETY: the caller's promise.
    unsafe {
        launch(gpu, false, GroupedProduct::Input, s, [a, b], args![offsets, NONE, NONE, dx, true, false])
    }
}

/// # Safety
/// The same as for [`forward`].
pub(super) unsafe fn backward_weight(gpu: &Gpu, args: GroupedBackwardWeight<'_>) -> Result<()> {
    let GroupedBackwardWeight { shape: s, offsets, dy, x, dw, acc } = args;
    let a = tensor_map(dy, [s.outputs, s.rows, 1], [SQUARE, SQUARE, 1])?;
    let b = tensor_map(x, [s.inputs, s.rows, 1], [SQUARE, SQUARE, 1])?;
    let written = args![offsets, NONE, NONE, dw, is_bf16(dw), acc == Accumulate::Add];
    // SAFETY: the caller's promise.
    unsafe { launch(gpu, false, GroupedProduct::Weight, s, [a, b], written) }
}

pub(super) fn fp8(gpu: &Gpu, args: GroupedFp8<'_>) -> Result<()> {
    let GroupedFp8 { shape: s, product, offsets, a, b, out, acc } = args;
    let GroupedShape { rows, experts, inputs, outputs } = s;
    assert!(
        experts <= MAX_EXPERTS && gpu.hopper.supports(&[], &[rows, inputs, outputs], &[experts]),
        "{s:?}"
    );
    assert!(out.address().is_multiple_of(16), "{out:?}");
    expect(offsets, DType::I32, experts + 1);
    [a, b].iter().for_each(|operand| expect(operand.scale, DType::F32, 1));
    if product == GroupedProduct::Weight {
        expect_grad(out, out.len())
    } else {
        gpu.expect_act(out, out.len())
    }
    // Sizes and distances of the right operand. Its parts are the experts' weights.
    let (depth, left, [right, parts], strides) = match product {
        GroupedProduct::Forward => (inputs, rows, [outputs, experts], [inputs, outputs * inputs]),
        GroupedProduct::Input => (outputs, rows, [inputs, experts], [experts * outputs, outputs]),
        GroupedProduct::Weight => (rows, outputs, [inputs, 1], [rows, inputs * rows]),
    };
    let maps = [
        tensor_map(a.q, [depth, left, 1], [TILE_ROW_BYTES, TILE_M, 1])?,
        strided_map(b.q, [depth, right, parts], strides, [TILE_ROW_BYTES, GROUPED_TILE_N, 1])?,
    ];
    let [a_scale, b_scale] = [a, b].map(|operand| Some(operand.scale));
    let written = args![offsets, a_scale, b_scale, out, is_bf16(out), acc == Accumulate::Add];
    // SAFETY: checked above and by the caller; the output overlaps no input by the operation's contract.
    unsafe { launch(gpu, true, product, s, maps, written) }
}

/// # Safety
/// The maps describe operands of a layer of this shape, in the type that is multiplied, and the arguments are its
/// offsets, scales and output.
unsafe fn launch(
    gpu: &Gpu,
    fp8: bool,
    product: GroupedProduct,
    s: GroupedShape,
    maps: [CUtensorMap; 2],
    written: &[Arg],
) -> Result<()> {
    let (down, cols, k) = match product {
        GroupedProduct::Forward => (s.row_tiles(TILE_M), s.outputs, s.inputs),
        GroupedProduct::Input => (s.row_tiles(TILE_M), s.inputs, s.outputs),
        GroupedProduct::Weight => {
            (s.experts * s.outputs.div_ceil(TILE_M), s.inputs, s.rows.div_ceil(s.experts))
        }
    };
    let (kernels, element) = if fp8 { (&FP8_KERNELS, DType::Fp8E4m3) } else { (&KERNELS, DType::Bf16) };
    let group = cached_tile_rows(k * element.size());
    let blocks = (down * cols.div_ceil(GROUPED_TILE_N)).min(gpu.hopper.multiprocessors());
    let sizes = [s.experts, s.outputs, s.inputs, group].map(Arg::from);
    let args = [&maps.map(Arg::TensorMap)[..], written, &sizes].concat();
    // SAFETY: the arguments are those of the kernel; the rest is the caller's promise.
    unsafe { gpu.hopper.launch(&kernels[product as usize], (blocks, 1, 1), &args) }
}
