//! Muon (Jordan et al., 2024): momentum whose matrices are made orthogonal before they are added to the weights.
//!
//! ```text
//! MuonMomentum    m = momentum m + (1 - momentum) g,  u = (1 - momentum) g + momentum m        all matrices at once
//! Orthogonalize   u -> U V^T of its singular value decomposition U S V^T, approximately        each matrix
//! MuonUpdate      p = p - lr (factor u + weight_decay p)                                       each matrix
//! ```
//! With cautious decay (Chen et al., 2025), weights decay only where `u p >= 0`: not against the update.
//!
//! A polynomial of X that is odd in its singular values needs products only: `X' = (a I + b A + c A^2) X` with `A = X
//! X^T`. The [coefficients](POLAR_EXPRESS) of five such steps bring all singular values between 0.001 and 1 close to 1
//! ("The Polar Express", Amsel et al., 2025). For a matrix with more rows than columns, `A = X^T X` and `X' = X (...)`,
//! so that A has the smaller of both sizes.
//!
//! A step is applied under the conditions of AdamW's (see `ops/adamw`), whose kernel runs last and counts skipped
//! steps.

mod cpu;
mod cuda;

use xlaunch_pool::DType;

use super::adamw::{DECAY_CHUNK, MUON_FLAG, scalar};
use super::{Cuda, Op};
use crate::cpu::Threads;
use crate::cuda::{KernelFile, Macro, source};
use crate::error::Result;
use crate::tensor::Slice;

/// Coefficients a, b and c of each step, from "The Polar Express", for a margin of 2 %.
const POLAR_EXPRESS: [[f32; 3]; 5] = [
    [8.156_554, -22.483_294, 15.878_77],
    [4.042_93, -2.808_917_5, 0.500_017_8],
    [3.891_667_8, -2.772_484_3, 0.506_064_8],
    [3.285_753_7, -2.368_129_5, 0.464_490_25],
    [2.346_541_4, -1.709_782_8, 0.423_235_5],
];
/// The matrix is divided by its norm times this first, so that rounding does not lead to singular values above 1.
const MARGIN: f32 = 1.02;
/// Added to the norm, for a matrix of zeros.
const EPS: f32 = 1e-7;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("muon/kernel.cu"),
    kernels: &["muon_momentum", "muon_scale", "muon_polynomial", "muon_update"],
    macros: &[
        Macro::int("DECAY_CHUNK", DECAY_CHUNK),
        Macro::int("MUON_FLAG", MUON_FLAG as usize),
        Macro::int("MUON_RATE", scalar::MUON_LEARNING_RATE),
    ],
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

/// The momentum of flagged elements, and their update with Nesterov's momentum.
#[derive(Clone, Copy, Debug)]
pub struct MuonMomentum<'a> {
    /// (len,) F32 or Bf16.
    pub grads: Slice<'a>,
    /// (len,) F32 momentum, updated in place.
    pub m: Slice<'a>,
    /// (len,) activations: receives the update of flagged elements.
    pub update: Slice<'a>,
    /// (ceil(len / [`DECAY_CHUNK`]),) U8: [`MUON_FLAG`] for the elements to update.
    pub flags: Slice<'a>,
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

/// Makes a matrix nearly orthogonal, in place: its singular values become 0.84 to 1.15, unless they are below a
/// thousandth of its norm.
#[derive(Clone, Copy, Debug)]
pub struct Orthogonalize<'a> {
    /// R.
    pub rows: usize,
    /// C.
    pub cols: usize,
    /// (R, C) activations.
    pub x: Slice<'a>,
}

impl Op for Orthogonalize<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::orthogonalize(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::orthogonalize(gpu, self)
    }

    fn scratch(&self) -> usize {
        let side = self.rows.min(self.cols);
        DType::F32.size() * (self.x.len() + 2 * side * side)
    }
}

/// `params -= lr (factor update + weight_decay params)`.
#[derive(Clone, Copy, Debug)]
pub struct MuonUpdate<'a> {
    /// (len,) activations.
    pub update: Slice<'a>,
    /// (len,) F32 master weights, updated in place.
    pub params: Slice<'a>,
    /// (len,) Bf16: receives the new weights. Not supported by the CPU.
    pub work: Option<Slice<'a>>,
    /// Factor of the update, which depends on the matrix's shape.
    pub factor: f32,
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
