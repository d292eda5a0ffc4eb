//! Logits of the router: a linear layer with outputs in F32, because small differences decide which experts are chosen.
//! The gradients are those of a linear layer.

use xlaunch_pool::DType;

use crate::cpu::gemm::{Mat, blocked_gemm};
use crate::cpu::{Access, Threads};
use crate::cuda::gemm::{Epilogue, GemmCall, plain, transposed};
use crate::cuda::{BLOCK_THREADS, Launch, args, expect};
use crate::error::Result;
use crate::ops::{Cuda, LinearShape, Op};
use crate::tensor::Slice;

/// `logits = x w^T (+ bias)`.
#[derive(Clone, Copy, Debug)]
pub struct RouterLogits<'a> {
    /// Sizes: O is the number of experts.
    pub shape: LinearShape,
    /// (N, I).
    pub x: Slice<'a>,
    /// (O, I).
    pub w: Slice<'a>,
    /// (O,).
    pub bias: Option<Slice<'a>>,
    /// (N, O) F32.
    pub logits: Slice<'a>,
}

impl Op for RouterLogits<'_> {
    fn cpu(self, threads: &Threads) {
        let (a, s) = (Access::new("router_logits"), self.shape);
        let (x, w) = (a.read(self.x, s.rows * s.inputs), a.read(self.w, s.outputs * s.inputs));
        let logits = a.write(self.logits, s.rows * s.outputs);
        let (x, w) = (Mat::new(x, s.rows, s.inputs), Mat::new(w, s.outputs, s.inputs));
        blocked_gemm(threads, logits, x, w.t(), false);
        if let Some(bias) = self.bias.map(|bias| a.read(bias, s.outputs)) {
            let rows = logits.chunks_exact_mut(s.outputs);
            rows.for_each(|row| row.iter_mut().zip(bias).for_each(|(logit, bias)| *logit += bias));
        }
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let Self { shape: s, x, w, bias, logits } = self;
        gpu.expect_act(x, s.rows * s.inputs);
        gpu.expect_act(w, s.outputs * s.inputs);
        gpu.expect_optional_act(bias, s.outputs);
        expect(logits, DType::F32, s.rows * s.outputs);
        let call = GemmCall {
            m: s.outputs,
            n: s.rows,
            k: s.inputs,
            a: transposed(w),
            b: plain(x),
            epilogue: Epilogue::None,
            c: logits,
            accumulate: false,
        };
        // SAFETY: checked above; the logits overlap no input by the operation's contract.
        unsafe { gpu.gemm.run(&call) }?;
        let Some(bias) = bias else { return Ok(()) };
        // A GEMM's epilogue adds a bias of its output's type only, which is not that of the weights.
        let len = logits.len();
        let launch = Launch::threads(len, BLOCK_THREADS);
        // SAFETY: checked above.
        unsafe { gpu.launch("router_logit_bias", launch, args![bias, logits, len, s.outputs]) }
    }
}
