//! AdamW with decoupled weight decay (Loshchilov and Hutter, 2019) and global-norm clipping over a flat arena.
//!
//! `g = grads min(1, clip / sqrt(grad_norm_sq))`; `m = beta1 m + (1 - beta1) g`; `v = beta2 v + (1 - beta2) g^2`;
//! `p = p - lr c1 m / (sqrt(c2 v) + eps) - decay p`, with the learning rate and the decay of the element's group.
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
        Macro::int("GROUP_CHUNK", GROUP_CHUNK),
        Macro::int("MUON_GROUP", MUON_GROUP as usize),
        Macro::int("LEARNING_RATES", scalar::LEARNING_RATES),
        Macro::int("DECAYS", scalar::DECAYS),
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
    /// (ceil(len / [`GROUP_CHUNK`]),) U8: groups, below [`GROUPS`], or [`MUON_GROUP`].
    pub groups: Slice<'a>,
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
        expect(self.groups, DType::U8, len.div_ceil(GROUP_CHUNK));
        expect(self.scalars, DType::F32, scalar::COUNT);
        [self.grad_norm_sq, self.loss, self.skipped].into_iter().for_each(|x| expect(x, DType::F32, 1));
        let args = args![
            self.params,
            self.grads,
            is_bf16(self.grads),
            self.m,
            self.v,
            self.work,
            self.groups,
            self.scalars,
            self.grad_norm_sq,
            self.loss,
            self.skipped,
            len,
            c.beta1,
            c.beta2,
            c.eps,
            c.clip,
            c.skip_limit,
        ];
        // SAFETY: checked above.
        unsafe { gpu.launch("adamw", gpu.grid_for(len), args) }
    }
}

/// Elements that belong to the same group. Every parameter starts at a multiple of it.
pub const GROUP_CHUNK: usize = 64;

/// Number of groups of parameters, each with its learning rate and weight decay.
pub const GROUPS: usize = 5;

/// Group of elements that Muon updates instead.
pub const MUON_GROUP: u8 = u8::MAX;

/// Indices into [`AdamWStep::scalars`], which are read from device memory so that a captured step can be replayed with
/// other values.
pub mod scalar {
    use super::GROUPS;

    /// Learning rate of each group.
    pub const LEARNING_RATES: usize = 0;
    /// Learning rate times weight decay of each group.
    pub const DECAYS: usize = LEARNING_RATES + GROUPS;
    /// `1 / (1 - beta1^t)` in step t, counted from 1.
    pub const CORRECTION1: usize = DECAYS + GROUPS;
    /// `1 / (1 - beta2^t)`.
    pub const CORRECTION2: usize = CORRECTION1 + 1;
    /// Learning rate of [`MuonUpdate`](crate::MuonUpdate).
    pub const MUON_LEARNING_RATE: usize = CORRECTION2 + 1;
    /// Number of scalars.
    pub const COUNT: usize = MUON_LEARNING_RATE + 1;
}
