//! Muon (Jordan et al., 2024): momentum whose matrices are made orthogonal before they are added to the weights.
//!
//! ```text
//! MuonMomentum    m = momentum m + (1 - momentum) g,  u = (1 - momentum) g + momentum m
//! MuonPack        copies updates next to each other
//! Orthogonalize   u -> U V^T of its singular value decomposition U S V^T, approximately
//! MuonRowMoments  v = beta2 v + (1 - beta2) mean(u^2) of each row                              NorMuon only
//! MuonRowFactors  s = |u| / |u / sqrt(v)| / sqrt(v) of each row, with the norms of matrices    NorMuon only
//! MuonUpdate      p = p - lr (factor s u + weight_decay p)
//! ```
//! Each operation works on all matrices at once, or on all of one shape. Weights, gradients and moments are where the
//! model has them. Updates are packed, so that matrices of one shape follow each other: [`MuonPieces`] has their
//! positions.
//!
//! With cautious decay (Chen et al., 2025), weights decay only where `u p >= 0`, that is, not against the update.
//! NorMuon (Li et al., 2025) makes the rows of an update equally large on average over time, and keeps the norm of the
//! matrix.
//!
//! A polynomial of X that is odd in its singular values needs only products: `X' = (a I + b A + c A^2) X` with `A = X
//! X^T`. The [coefficients](POLAR_EXPRESS) of five such steps bring all singular values between 0.001 and 1 close to 1
//! ("The Polar Express", Amsel et al., 2025). For a matrix with more rows than columns, `A = X^T X` and `X' = X (...)`,
//! so that A has the smaller of the two sizes.
//!
//! Polynomials of A commute. So two steps can be one, `X' = P2 P1 X` with `P2` of the next A, `P1 A P1`: for a long
//! matrix this has fewer operations ("Gram Newton-Schulz", Zhang et al., 2026). In bf16, rounding then adds 1 to 2 % of
//! the result; three steps in one are not stable.
//!
//! A step is applied under the conditions of AdamW's (see `ops/adamw`), whose kernel runs last and counts skipped
//! steps.

mod cpu;
mod cuda;
mod orthogonal;
pub(crate) mod symmetric;
mod table;

use xlaunch_pool::DType;

use super::adamw::scalar;
use super::{Cuda, Op};
use crate::cpu::{Access, Threads};
use crate::cuda::{KernelFile, Macro, expect, source};
use crate::error::Result;
use crate::tensor::Slice;
pub use table::{MuonPiece, MuonPieces};

/// Coefficients a, b and c of each step, from "The Polar Express", for a margin of 2 %.
const POLAR_EXPRESS: [[f32; 3]; 5] = [
    [8.156_554, -22.483_294, 15.878_77],
    [4.042_93, -2.808_917_5, 0.500_017_8],
    [3.891_667_8, -2.772_484_3, 0.506_064_8],
    [3.285_753_7, -2.368_129_5, 0.464_490_25],
    [2.346_541_4, -1.709_782_8, 0.423_235_5],
];
/// Groups these steps for matrices whose sides differ by a factor of [`LONG`] or more: each group is made in one.
const PAIRS: [&[[f32; 3]]; 3] = {
    let (first, rest) = POLAR_EXPRESS.split_at(1);
    let (second, third) = rest.split_at(2);
    [first, second, third]
};
const LONG: usize = 2;

/// The matrix is divided by its norm times this first, so that rounding does not lead to singular values above 1.
const MARGIN: f32 = 1.02;
/// Added to the norm, for a matrix of zeros.
const EPS: f32 = 1e-7;
/// Added to the root of a row's second moment, for a row of zeros.
const ROW_EPS: f32 = 1e-8;

/// Limit of the matrices that one GEMM multiplies, in elements of the intermediate results: twice as many bytes in
/// bf16. One matrix may have more.
const BATCH_ELEMENTS: usize = 128 << 20;
/// Largest number of matrices that one GEMM multiplies.
const MAX_BATCH: usize = 64;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("muon/kernel.cu"),
    kernels: &[
        "muon_momentum",
        "muon_pack",
        "muon_norm_partials",
        "muon_scale",
        "muon_polynomial",
        "muon_row_moments",
        "muon_row_factors",
        "muon_update",
    ],
    macros: &[Macro::int("MUON_RATE", scalar::MUON_LEARNING_RATE)],
    dynamic_shared: &[],
};

/// Conditions under which a step is applied. All are F32 `[1]`; see [`AdamWStep`](super::AdamWStep).
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "described by AdamWStep")]
pub struct StepConditions<'a> {
    pub grad_norm_sq: Slice<'a>,
    pub loss: Slice<'a>,
    pub skipped: Slice<'a>,
    pub skip_limit: f32,
}

impl StepConditions<'_> {
    /// Panics unless the slices are such numbers.
    pub(crate) fn check(&self) {
        [self.grad_norm_sq, self.loss, self.skipped].into_iter().for_each(|x| expect(x, DType::F32, 1));
    }

    /// Returns whether the CPU applies the step.
    pub(crate) fn are_met(&self, access: &Access) -> bool {
        let [norm_sq, loss, skipped] =
            [self.grad_norm_sq, self.loss, self.skipped].map(|x| access.read(x, 1)[0]);
        norm_sq.is_finite() && loss.is_finite() && skipped < self.skip_limit
    }
}

/// The momentum of all pieces, and their update with Nesterov's momentum.
#[derive(Clone, Copy, Debug)]
pub struct MuonMomentum<'a> {
    /// (len,) F32 or Bf16.
    pub grads: Slice<'a>,
    /// (len,) F32 momentum, updated in place.
    pub m: Slice<'a>,
    /// Activations: receives the updates.
    pub update: Slice<'a>,
    /// Position of `update` among the packed updates; pieces that are not in it as a whole have no update. `None` if
    /// updates are in the places of the gradients.
    pub packed_from: Option<usize>,
    /// The pieces.
    pub pieces: &'a MuonPieces,
    /// Decay of the momentum.
    pub momentum: f32,
    /// Largest global gradient norm; 0 turns clipping off.
    pub clip: f32,
    /// Conditions.
    pub conditions: StepConditions<'a>,
}

impl Op for MuonMomentum<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::momentum(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::momentum(gpu, self)
    }
}

/// Copies pieces from their places in the model to their places among packed updates.
#[derive(Clone, Copy, Debug)]
pub struct MuonPack<'a> {
    /// Activations.
    pub from: Slice<'a>,
    /// Activations.
    pub to: Slice<'a>,
    /// The pieces.
    pub pieces: &'a MuonPieces,
}

impl Op for MuonPack<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::pack(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::pack(gpu, self)
    }
}

/// Makes matrices nearly orthogonal, in place: their singular values become 0.84 to 1.15, unless they are below a
/// thousandth of the matrix's norm. The result for a matrix does not depend on the others.
#[derive(Clone, Copy, Debug)]
pub struct Orthogonalize<'a> {
    /// R.
    pub rows: usize,
    /// C.
    pub cols: usize,
    /// (any number, R, C) activations, at a multiple of [`MUON_ALIGN`] elements from the start of
    /// their tensor.
    pub x: Slice<'a>,
}

/// Returns the floating-point operations that make a matrix of these rows and columns orthogonal.
pub fn orthogonal_operations((rows, cols): (usize, usize)) -> u64 {
    let (short, long) = (rows.min(cols) as u64, rows.max(cols) as u64);
    // A and X' of each step or pair, and products of short matrices: a square, and in a pair four more.
    let of =
        |steps: &[_]| 4 * short * short * long + 2 * short * short * short * (4 * steps.len() as u64 - 3);
    steps((rows, cols)).map(of).sum()
}

/// Returns the steps for a matrix of these rows and columns, and which of them are made in one. Their number is odd.
fn steps((rows, cols): (usize, usize)) -> impl Iterator<Item = &'static [[f32; 3]]> {
    let is_long = rows.max(cols) >= LONG * rows.min(cols);
    let (pairs, single) = if is_long { (&PAIRS[..], 0) } else { (&[][..], POLAR_EXPRESS.len()) };
    pairs.iter().copied().chain(POLAR_EXPRESS[..single].chunks(1))
}

/// Alignment, in elements, of the first of several matrices that are made orthogonal at once: then it does not decide
/// between algorithms, in any element type.
pub const MUON_ALIGN: usize = 128;

impl Orthogonalize<'_> {
    /// Number of elements of the intermediate results of a matrix.
    fn scratch_elements(&self) -> usize {
        let side = self.rows.min(self.cols);
        self.rows * self.cols + 3 * side * side
    }

    /// Largest number of matrices of this shape that one GEMM multiplies.
    fn batch(&self) -> usize {
        (BATCH_ELEMENTS / self.scratch_elements()).clamp(1, MAX_BATCH)
    }
}

impl Op for Orthogonalize<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::orthogonalize(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        orthogonal::orthogonalize(gpu, self)
    }

    fn scratch(&self) -> usize {
        let count = (self.x.len() / (self.rows * self.cols)).min(self.batch());
        self.x.dtype().size() * count * self.scratch_elements()
            + DType::F32.size() * orthogonal::norm_partials(count)
    }
}

/// Updates the second moment of the rows that begin in the pieces.
#[derive(Clone, Copy, Debug)]
pub struct MuonRowMoments<'a> {
    /// Activations: the packed updates.
    pub update: Slice<'a>,
    /// (len,) F32. A row's second moment is in the place of its first element.
    pub v: Slice<'a>,
    /// (2 rows,) F32: receives the mean of the squares of each row, then the second moments.
    pub moments: Slice<'a>,
    /// The pieces.
    pub pieces: &'a MuonPieces,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Conditions.
    pub conditions: StepConditions<'a>,
}

impl Op for MuonRowMoments<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::row_moments(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::row_moments(gpu, self)
    }
}

/// Turns the second moments of [`MuonRowMoments`] into the factors of the rows of an update.
#[derive(Clone, Copy, Debug)]
pub struct MuonRowFactors<'a> {
    /// (2 rows,) F32: mean squares, and second moments, which become the factors.
    pub moments: Slice<'a>,
    /// Whole matrices.
    pub matrices: &'a MuonPieces,
}

impl Op for MuonRowFactors<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::row_factors(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::row_factors(gpu, self)
    }
}

/// `params -= lr (factor row_factor update + weight_decay params)` for all pieces.
#[derive(Clone, Copy, Debug)]
pub struct MuonUpdate<'a> {
    /// Activations: the packed updates.
    pub update: Slice<'a>,
    /// (len,) F32 master weights, updated in place.
    pub params: Slice<'a>,
    /// (len,) Bf16: receives the new weights. Not supported by the CPU.
    pub work: Option<Slice<'a>>,
    /// The pieces, with factors that depend on the matrix's shape.
    pub pieces: &'a MuonPieces,
    /// (rows,) F32: factors of rows, if there are any.
    pub row_factors: Option<Slice<'a>>,
    /// Weight decay.
    pub weight_decay: f32,
    /// Whether weights decay only if `update params >= 0`.
    pub cautious: bool,
    /// ([`scalar::COUNT`],) F32, with the learning rate at [`scalar::MUON_LEARNING_RATE`].
    pub scalars: Slice<'a>,
    /// Conditions.
    pub conditions: StepConditions<'a>,
}

impl Op for MuonUpdate<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::update(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::update(gpu, self)
    }
}
