//! Linear layers with gated activations in one kernel on compute capability 9.0: launches of `hopper.cu`.

use cudarc::driver::sys::CUtensorMap;

use crate::cuda::hopper::{
    HopperKernel, OTHER_SHARED, SQUARE, THREADS, TILE_K, TILE_M, cached_tile_rows, tensor_map,
};
use crate::cuda::{Arg, Gpu, Macro, Source, source};
use crate::error::Result;
use crate::ops::{Activation, GluLinearBackward, LinearGluForward};

pub(crate) const HOPPER_SOURCE: Source = source!(
    "glu/hopper.cu",
    after "../cuda/headers/hopper.cuh", after "../cuda/headers/hopper_tiles.cuh",
    after "activation/functions.cuh"
);

/// Rows of a warp, for which h is loaded at a time.
const WARP_ROWS: usize = 16;
/// Bytes of shared memory for h: for eight warps, 64 columns of g and u in two buffers.
const H_BYTES: usize = 8 * 2 * 4096;
/// Division of the product's tiles between the two warpgroups that multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tiling {
    /// Each takes half of the rows of each tile: most arithmetic per loaded byte.
    Halves,
    /// Each takes every other tile, half as wide: one warpgroup writes its results while the other one multiplies.
    Turns,
}

impl Tiling {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Halves => "own GEMM, tiles of 128 x 256",
            Self::Turns => "own GEMM, tiles of 128 x 128 in turn",
        }
    }

    const fn tile_n(self) -> usize {
        match self {
            Self::Halves => 256,
            Self::Turns => 128,
        }
    }

    fn kernel(self, activation: Activation, gradient: bool) -> &'static HopperKernel {
        &KERNELS[activation as usize][2 * usize::from(gradient) + self as usize]
    }
}

macro_rules! kernels {
    ($activation:expr) => {
        [
            kernel(Tiling::Halves, false, &macros($activation, Tiling::Halves, false)),
            kernel(Tiling::Turns, false, &macros($activation, Tiling::Turns, false)),
            kernel(Tiling::Halves, true, &macros($activation, Tiling::Halves, true)),
            kernel(Tiling::Turns, true, &macros($activation, Tiling::Turns, true)),
        ]
    };
}

/// Kernels by activation, in the order of [`Activation::ALL`]: forward in both tilings, then backward.
pub(crate) static KERNELS: [[HopperKernel; 4]; 5] = [
    kernels!(Activation::Silu),
    kernels!(Activation::Gelu),
    kernels!(Activation::GeluTanh),
    kernels!(Activation::Relu2),
    kernels!(Activation::QuickGelu),
];

const fn kernel(tiling: Tiling, gradient: bool, macros: &'static [Macro]) -> HopperKernel {
    let tiles = stages(tiling, gradient) * (TILE_M + tiling.tile_n()) * TILE_K * size_of::<u16>();
    let h = if gradient { H_BYTES } else { 0 };
    let shared = tiles + h + OTHER_SHARED;
    HopperKernel { source: HOPPER_SOURCE, name: "linear_glu", macros, threads: THREADS, shared }
}

const fn macros(activation: Activation, tiling: Tiling, gradient: bool) -> [Macro; 5] {
    [
        Macro::int("ACTIVATION", activation as usize),
        Macro::int("TILE_N", tiling.tile_n()),
        Macro::int("STAGES", stages(tiling, gradient)),
        Macro::int("TURNS", matches!(tiling, Tiling::Turns) as usize),
        Macro::int("GRADIENT", gradient as usize),
    ]
}

/// Returns the number of tiles of each operand in shared memory at a time: as many as fit.
const fn stages(tiling: Tiling, gradient: bool) -> usize {
    match (tiling, gradient) {
        (Tiling::Halves, false) => 4,
        (Tiling::Halves, true) => 3,
        (Tiling::Turns, false) => 6,
        (Tiling::Turns, true) => 5,
    }
}

pub(super) fn supports_forward(gpu: &Gpu, args: &LinearGluForward<'_>) -> bool {
    let LinearGluForward { shape, x, w, h, a, .. } = *args;
    gpu.hopper.supports(&[x, w, h, a], &[shape.inputs, shape.outputs / 2], &[shape.rows])
}

pub(super) fn supports_backward(gpu: &Gpu, args: &GluLinearBackward<'_>) -> bool {
    let GluLinearBackward { shape, dy, w, h, dh, .. } = *args;
    gpu.hopper.supports(&[dy, w, h, dh], &[shape.inputs, shape.outputs], &[shape.rows])
}

/// # Safety
/// The operands are supported and have the sizes of the shape, and outputs overlap no input.
pub(super) unsafe fn forward(gpu: &Gpu, tiling: Tiling, args: LinearGluForward<'_>) -> Result<()> {
    let LinearGluForward { shape, activation, x, w, h, a, .. } = args;
    let (rows, cols, k) = (shape.rows, shape.outputs / 2, shape.inputs);
    let a_map = tensor_map(x, [k, rows, 1], [TILE_K, TILE_M, 1])?;
    let b_map = tensor_map(w, [k, cols, 2], [TILE_K, tiling.tile_n() / 2, 1])?;
    // The kernel writes h without a map.
    let maps = [a_map, b_map, b_map];
    // SAFETY: the caller's promise.
    unsafe { launch(gpu, tiling, (activation, false), maps, [a.into(), h.into()], [rows, cols, k]) }
}

/// # Safety
/// The same as for [`forward`].
pub(super) unsafe fn backward(gpu: &Gpu, tiling: Tiling, args: GluLinearBackward<'_>) -> Result<()> {
    let GluLinearBackward { shape, activation, dy, w, h, dh, .. } = args;
    let (rows, cols, k) = (shape.rows, shape.inputs, shape.outputs);
    let a_map = tensor_map(dy, [k, rows, 1], [TILE_K, TILE_M, 1])?;
    let b_map = tensor_map(w, [cols, k, 1], [SQUARE, SQUARE, 1])?;
    let h_map = tensor_map(h, [cols, 2, rows], [SQUARE, 1, WARP_ROWS])?;
    let maps = [a_map, b_map, h_map];
    // SAFETY: the caller's promise.
    unsafe { launch(gpu, tiling, (activation, true), maps, [dh.into(), None.into()], [rows, cols, k]) }
}

/// # Safety
/// The maps describe operands of these sizes (rows, columns, k), and the pointers are those of the outputs.
unsafe fn launch(
    gpu: &Gpu,
    tiling: Tiling,
    (activation, gradient): (Activation, bool),
    maps: [CUtensorMap; 3],
    written: [Arg; 2],
    [rows, cols, k]: [usize; 3],
) -> Result<()> {
    let group = cached_tile_rows(k * size_of::<u16>());
    let tile_cols = if gradient { tiling.tile_n() } else { tiling.tile_n() / 2 };
    let blocks = (rows.div_ceil(TILE_M) * cols.div_ceil(tile_cols)).min(gpu.hopper.multiprocessors());
    let sizes = [rows, cols, k, group].map(Arg::from);
    let args = [&maps.map(Arg::TensorMap)[..], &written, &sizes].concat();
    // SAFETY: the arguments are those of the kernel; the rest is the caller's promise.
    unsafe { gpu.hopper.launch(tiling.kernel(activation, gradient), (blocks, 1, 1), &args) }
}
