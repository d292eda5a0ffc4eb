//! Symmetric products of matrices on compute capability 9.0: launches of `symmetric.cu`.
//!
//! Half of such a product follows from the other half.

use crate::cuda::hopper::{HopperKernel, OTHER_SHARED, SQUARE, THREADS, TILE_K, TILE_M, tensor_map};
use crate::cuda::{Gpu, Macro, Source, args, source};
use crate::error::Result;
use crate::tensor::Slice;

const SYMMETRIC_SOURCE: Source = source!(
    "muon/symmetric.cu",
    after "../cuda/headers/hopper.cuh", after "../cuda/headers/hopper_tiles.cuh"
);

const SYMMETRIC_TILE_N: usize = 256;
/// Number of tiles of each operand in shared memory at a time: as many as fit.
const SYMMETRIC_STAGES: usize = 4;

/// The kernel for each [`Operand`].
pub(crate) static KERNELS: [HopperKernel; 2] =
    [kernel(&macros(Operand::Wide)), kernel(&macros(Operand::Tall))];

const fn kernel(macros: &'static [Macro]) -> HopperKernel {
    let shared = SYMMETRIC_STAGES * (TILE_M + SYMMETRIC_TILE_N) * TILE_K * size_of::<u16>() + OTHER_SHARED;
    HopperKernel { source: SYMMETRIC_SOURCE, name: "symmetric_product", macros, threads: THREADS, shared }
}

const fn macros(operand: Operand) -> [Macro; 2] {
    [Macro::int("TALL", operand as usize), Macro::int("STAGES", SYMMETRIC_STAGES)]
}

/// The matrices x and y whose product is computed. They are equal, or polynomials of the same symmetric matrix.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operand {
    /// (side, depth), and the product is x y^T.
    Wide,
    /// (depth, side), and the product is x^T y.
    Tall,
}

/// Sizes of a batch of products.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Rows and columns of a product.
    pub(super) side: usize,
    /// Number of products that are summed for each element.
    pub(super) depth: usize,
    /// Number of matrices.
    pub(super) matrices: usize,
}

/// `alpha I + beta added + gamma x y^T`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sum<'a> {
    pub(super) alpha: f32,
    /// A symmetric matrix of the sizes of the product.
    pub(super) added: Slice<'a>,
    pub(super) beta: f32,
    pub(super) gamma: f32,
}

/// Returns whether the kernels support these sizes and operands.
pub(super) fn supports(gpu: &Gpu, s: Sizes, operands: &[Slice<'_>]) -> bool {
    gpu.hopper.supports(
        operands,
        &[s.side, s.depth],
        &[s.matrices, s.side * s.matrices, s.depth * s.matrices],
    )
}

/// Computes the product, or a sum with it, of each matrix of a batch.
///
/// # Safety
/// The operands are supported and have these sizes, and `out` overlaps no input.
pub(super) unsafe fn product(
    gpu: &Gpu,
    s: Sizes,
    operand: Operand,
    [x, y]: [Slice<'_>; 2],
    sum: Option<Sum<'_>>,
    out: Slice<'_>,
) -> Result<()> {
    let Sizes { side, depth, matrices } = s;
    let [a, b] = [(x, TILE_M), (y, SYMMETRIC_TILE_N)].map(|(x, rows)| match operand {
        Operand::Wide => tensor_map(x, [depth, side, matrices], [TILE_K, rows, 1]),
        Operand::Tall => tensor_map(x, [side, depth, matrices], [SQUARE, SQUARE, 1]),
    });
    let (alpha, beta, gamma) = sum.map_or((0.0, 0.0, 1.0), |sum| (sum.alpha, sum.beta, sum.gamma));
    let added = sum.map(|sum| sum.added);
    let args = args![a?, b?, added, out, side, depth, matrices, alpha, beta, gamma];
    let tiles = matrices * side.div_ceil(TILE_M) * side.div_ceil(SYMMETRIC_TILE_N);
    let blocks = tiles.min(gpu.hopper.multiprocessors());
    // SAFETY: the arguments are those of the kernel; the rest is the caller's promise.
    unsafe { gpu.hopper.launch(&KERNELS[operand as usize], (blocks, 1, 1), args) }
}
