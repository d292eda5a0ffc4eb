//! Soft bound of logits (Gemma Team, 2024): `x = cap tanh(x / cap)`. [`FusedClassifier`](super::FusedClassifier)
//! applies it within its own passes; this operation is for logits that are read.

use rayon::prelude::*;

use super::{Cuda, Op};
use crate::cpu::math::{simd, tanh_relative};
use crate::cpu::{Access, Threads};
use crate::cuda::{BLOCK_THREADS, KernelFile, Launch, Macro, VEC, args, expect_grad, is_bf16, source};
use crate::error::Result;
use crate::tensor::Slice;

/// Elements per task on the CPU.
const SOFTCAP_ELEMENTS: usize = 1 << 13;
/// Vectors that a thread of the kernel fetches at once.
const SOFTCAP_VECS: usize = 2;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("softcap/kernel.cu"),
    kernels: &["softcap_f32", "softcap_bf16"],
    macros: &[Macro::int("SOFTCAP_VECS", SOFTCAP_VECS)],
    dynamic_shared: &[],
};

/// `x = cap tanh(x / cap)`, in place.
#[derive(Clone, Copy, Debug)]
pub struct SoftCap<'a> {
    /// (len,) F32 or Bf16.
    pub x: Slice<'a>,
    /// Bound of the magnitude of the results, above 0.
    pub cap: f32,
}

impl Op for SoftCap<'_> {
    fn cpu(self, threads: &Threads) {
        let access = Access::new("softcap");
        let x = access.write(self.x, self.x.len());
        threads.run(|| {
            x.par_chunks_mut(SOFTCAP_ELEMENTS).for_each(|x| {
                simd!(x.iter_mut().for_each(|x| *x = cpu(*x, self.cap)));
            });
        });
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let len = self.x.len();
        expect_grad(self.x, len);
        let name = if is_bf16(self.x) { "softcap_bf16" } else { "softcap_f32" };
        let launch = Launch::threads(len.div_ceil(VEC * SOFTCAP_VECS), BLOCK_THREADS);
        // SAFETY: the slice holds `len` elements of the type in the kernel's name.
        unsafe { gpu.launch(name, launch, args![self.x, len, self.cap]) }
    }
}

/// `cap tanh(x / cap)`.
#[inline(always)]
pub(crate) fn cpu(x: f32, cap: f32) -> f32 {
    cap * tanh_relative(x / cap)
}
