//! AdamW with decoupled weight decay (Loshchilov and Hutter, 2019) and global-norm clipping over a flat arena.
//!
//! `g = grads min(1, clip / sqrt(grad_norm_sq))`; `m = beta1 m + (1 - beta1) g`; `v = beta2 v + (1 - beta2) g^2`;
//! `p = p - lr (c1 m / (sqrt(c2 v) + eps) + weight_decay p)`, with decay only where the flag of the element is 1.
//! `c1 = 1 / (1 - beta1^t)` and `c2 = 1 / (1 - beta2^t)` correct the moments' bias in step t, counted from 1.
//!
//! A step whose loss or squared norm is not finite is skipped: it changes no weight and no moment. The decision is made
//! on the device, as the host may have enqueued the next step before it reads the loss:
//!
//! ```text
//! finite, skipped <  skip_limit    update, skipped = 0
//! finite, skipped >= skip_limit    nothing: training has diverged, and the state remains that of the last good step
//! not finite                       skipped = min(skipped + 1, skip_limit)
//! ```

pub(crate) mod cpu;

use xlaunch_pool::DType;

use super::{Cuda, Op};
use crate::cpu::Threads;
use crate::cuda::{KernelFile, Macro, args, expect, expect_grad, is_bf16, source};
use crate::error::Result;
use crate::tensor::Slice;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("adamw/kernel.cu"),
    kernels: &["adamw"],
    macros: &[
        Macro::int("DECAY_CHUNK", DECAY_CHUNK),
        Macro::int("MUON_FLAG", MUON_FLAG as usize),
        Macro::int("LEARNING_RATE", scalar::LEARNING_RATE),
        Macro::int("CORRECTION1", scalar::CORRECTION1),
        Macro::int("CORRECTION2", scalar::CORRECTION2),
    ],
    dynamic_shared: &[],
};

/// Constants of AdamW.
#[derive(Clone, Copy, Debug)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay, for elements whose decay flag is 1.
    pub weight_decay: f32,
    /// Largest global gradient norm; 0 turns clipping off.
    pub clip: f32,
    /// Number of consecutive skipped steps after which every later step is skipped, too; at least 1.
    pub skip_limit: f32,
}

/// One step over an arena of `len` elements. F32 unless noted.
#[derive(Clone, Copy, Debug)]
pub struct AdamWStep<'a> {
    /// Constants.
    pub config: AdamWConfig,
    /// (len,) master weights, updated in place.
    pub params: Slice<'a>,
    /// (len,) F32 or Bf16.
    pub grads: Slice<'a>,
    /// (len,) first moments, updated in place.
    pub m: Slice<'a>,
    /// (len,) second moments, updated in place.
    pub v: Slice<'a>,
    /// (len,) Bf16: receives the new weights, rounded to nearest even. Not supported by the CPU, which computes with
    /// the master weights.
    pub work: Option<Slice<'a>>,
    /// (ceil(len / [`DECAY_CHUNK`]),) U8: 1 where weights decay, [`MUON_FLAG`] where nothing changes.
    pub decay: Slice<'a>,
    /// ([`scalar::COUNT`],) values that change from step to step.
    pub scalars: Slice<'a>,
    /// (1,) squared global norm of the gradients.
    pub grad_norm_sq: Slice<'a>,
    /// (1,) loss of the global batch, which can be infinite even if all gradients are finite.
    pub loss: Slice<'a>,
    /// (1,) number of consecutive skipped steps, updated in place; 0 before the first step.
    pub skipped: Slice<'a>,
}

impl Op for AdamWStep<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::step(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let (c, len) = (self.config, self.params.len());
        [self.params, self.m, self.v].into_iter().for_each(|x| expect(x, DType::F32, len));
        expect_grad(self.grads, len);
        if let Some(work) = self.work {
            expect(work, DType::Bf16, len);
        }
        expect(self.decay, DType::U8, len.div_ceil(DECAY_CHUNK));
        expect(self.scalars, DType::F32, scalar::COUNT);
        [self.grad_norm_sq, self.loss, self.skipped].into_iter().for_each(|x| expect(x, DType::F32, 1));
        let args = args![
            self.params,
            self.grads,
            is_bf16(self.grads),
            self.m,
            self.v,
            self.work,
            self.decay,
            self.scalars,
            self.grad_norm_sq,
            self.loss,
            self.skipped,
            len,
            c.beta1,
            c.beta2,
            c.eps,
            c.weight_decay,
            c.clip,
            c.skip_limit,
        ];
        // SAFETY: checked above.
        unsafe { gpu.launch("adamw", gpu.grid_for(len), args) }
    }
}

/// Elements covered by one decay flag. Every parameter starts at a multiple of it.
pub const DECAY_CHUNK: usize = 64;

/// Flag of elements that Muon updates instead.
pub const MUON_FLAG: u8 = 2;

/// Indices into [`AdamWStep::scalars`], which are read from device memory so that a captured step can be replayed with
/// other values.
pub mod scalar {
    /// Learning rate.
    pub const LEARNING_RATE: usize = 0;
    /// `1 / (1 - beta1^t)` in step t, counted from 1.
    pub const CORRECTION1: usize = 1;
    /// `1 / (1 - beta2^t)`.
    pub const CORRECTION2: usize = 2;
    /// Learning rate of [`MuonUpdate`](crate::MuonUpdate).
    pub const MUON_LEARNING_RATE: usize = 3;
    /// Number of scalars.
    pub const COUNT: usize = 4;
}
