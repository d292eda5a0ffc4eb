//! Balances the load of experts by biasing their choice (Wang et al., 2024; DeepSeek-V3), without a loss.
//!
//! After a step, the bias of an expert rises by `rate` if fewer tokens than the mean chose it, and falls by `rate` if
//! more did. Loads are whole numbers and compared exactly, so the result does not depend on how they were added up.

use xlaunch_pool::DType;

use crate::cpu::{Access, Threads};
use crate::cuda::{BLOCK_THREADS, KernelFile, Launch, args, expect, source};
use crate::error::Result;
use crate::ops::{Cuda, Op, StepConditions};
use crate::tensor::Slice;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("experts/bias.cu"),
    kernels: &["router_bias"],
    macros: &[],
    dynamic_shared: &[],
};

/// `bias += rate sign(mean load - load)` in each of L layers, in a step that is applied.
#[derive(Clone, Copy, Debug)]
pub struct UpdateRouterBias<'a> {
    /// E, the number of experts of a layer.
    pub experts: usize,
    /// How much a bias changes in a step.
    pub rate: f32,
    /// (L, E) F32: number of choices of each expert in the step.
    pub loads: Slice<'a>,
    /// (L, E) F32, updated in place.
    pub bias: Slice<'a>,
    /// The biases stay unchanged unless these are met.
    pub conditions: StepConditions<'a>,
}

impl Op for UpdateRouterBias<'_> {
    fn cpu(self, _: &Threads) {
        let (a, len) = (Access::new("update_router_bias"), self.bias.len());
        let (loads, bias) = (a.read(self.loads, len), a.write(self.bias, len));
        if !self.conditions.are_met(&a) {
            return;
        }
        for (bias, loads) in bias.chunks_exact_mut(self.experts).zip(loads.chunks_exact(self.experts)) {
            let total: f64 = loads.iter().copied().map(f64::from).sum();
            for (bias, load) in bias.iter_mut().zip(loads) {
                let missing = total - f64::from(*load) * self.experts as f64;
                let sign = f32::from(i8::from(missing > 0.0) - i8::from(missing < 0.0));
                *bias += self.rate * sign;
            }
        }
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let (Self { experts, rate, loads, bias, conditions }, len) = (self, self.bias.len());
        assert!(experts > 0 && len.is_multiple_of(experts), "{len} biases of {experts} experts");
        [loads, bias].into_iter().for_each(|x| expect(x, DType::F32, len));
        conditions.check();
        let StepConditions { grad_norm_sq, loss, skipped, skip_limit } = conditions;
        let args = args![loads, bias, grad_norm_sq, loss, skipped, len, experts, rate, skip_limit];
        // SAFETY: checked above.
        unsafe { gpu.launch("router_bias", Launch::threads(len, BLOCK_THREADS), args) }
    }
}
