//! AdamW in one launch.

use xlaunch_pool::DType;

use super::{AdamWStep, DECAY_CHUNK, scalar};
use crate::cuda::{Gpu, KernelFile, Macro, args, expect, expect_grad, is_bf16, source};
use crate::error::Result;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("adamw/kernel.cu"),
    kernels: &["adamw"],
    macros: &[
        Macro::int("DECAY_CHUNK", DECAY_CHUNK),
        Macro::int("LEARNING_RATE", scalar::LEARNING_RATE),
        Macro::int("CORRECTION1", scalar::CORRECTION1),
        Macro::int("CORRECTION2", scalar::CORRECTION2),
    ],
    dynamic_shared: &[],
};

pub(crate) fn step(gpu: &Gpu, a: AdamWStep<'_>) -> Result<()> {
    let (c, len) = (a.config, a.params.len());
    [a.params, a.m, a.v].into_iter().for_each(|x| expect(x, DType::F32, len));
    expect_grad(a.grads, len);
    if let Some(work) = a.work {
        expect(work, DType::Bf16, len);
    }
    expect(a.decay, DType::U8, len.div_ceil(DECAY_CHUNK));
    expect(a.scalars, DType::F32, scalar::COUNT);
    [a.grad_norm_sq, a.loss, a.skipped].into_iter().for_each(|x| expect(x, DType::F32, 1));
    let args = args![
        a.params,
        a.grads,
        is_bf16(a.grads),
        a.m,
        a.v,
        a.work,
        a.decay,
        a.scalars,
        a.grad_norm_sq,
        a.loss,
        a.skipped,
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
