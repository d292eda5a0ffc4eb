//! SwiGLU: launches its kernels, and selects the variant of a linear layer with SwiGLU.
//!
//! Our own GEMM applies SwiGLU, or its derivative, before it writes its result, which saves the pass in which a kernel
//! reads and writes (N, 2 F) again. It runs where it is faster than a GEMM followed by a kernel.

use super::hopper::{self, Tiling};
use super::{LinearSwigluForward, SwigluBackward, SwigluForward, SwigluLinearBackward};
use crate::cuda::variants::{Fastest, Site, Variant};
use crate::cuda::{Gpu, KernelFile, Launch, Macro, args, source, vec_threads};
use crate::error::Result;
use crate::ops::linear::cuda as linear;
use crate::ops::{LinearBackwardInput, LinearForward, LinearShape};

/// Rows that a block's threads fetch together.
const SWIGLU_ROWS: usize = 2;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("swiglu/kernel.cu"),
    kernels: &["swiglu_fwd", "swiglu_bwd"],
    macros: &[Macro::int("SWIGLU_ROWS", SWIGLU_ROWS)],
    dynamic_shared: &[],
};

pub(crate) fn forward(gpu: &Gpu, args: SwigluForward<'_>) -> Result<()> {
    let SwigluForward { rows, ffn, h, a } = args;
    gpu.expect_act(h, 2 * rows * ffn);
    gpu.expect_act(a, rows * ffn);
    let launch = Launch::blocks(rows.div_ceil(SWIGLU_ROWS), vec_threads(gpu, ffn));
    // SAFETY: checked above.
    unsafe { gpu.launch("swiglu_fwd", launch, args![h, a, rows, ffn]) }
}

pub(crate) fn backward(gpu: &Gpu, args: SwigluBackward<'_>) -> Result<()> {
    let SwigluBackward { rows, ffn, h, da, dh } = args;
    [h, dh].into_iter().for_each(|x| gpu.expect_act(x, 2 * rows * ffn));
    gpu.expect_act(da, rows * ffn);
    let launch = Launch::blocks(rows.div_ceil(SWIGLU_ROWS), vec_threads(gpu, ffn));
    // SAFETY: checked above.
    unsafe { gpu.launch("swiglu_bwd", launch, args![h, da, dh, rows, ffn]) }
}

/// The way in which a linear layer with SwiGLU is computed.
#[derive(Clone, Copy, Debug)]
enum SwigluVariant {
    /// A GEMM, followed by a kernel for SwiGLU.
    Kernel,
    /// Our own GEMM.
    Epilogue(Tiling),
}

impl Variant for SwigluVariant {
    fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Epilogue(tiling) => tiling.name(),
        }
    }
}

/// The kernel, then the tilings in order.
const VARIANTS: [SwigluVariant; 3] =
    [SwigluVariant::Kernel, SwigluVariant::Epilogue(Tiling::Halves), SwigluVariant::Epilogue(Tiling::Turns)];

/// Linear layers with SwiGLU.
#[derive(Debug, Default)]
pub(crate) struct Swiglu(Fastest<LinearShape>);

impl Swiglu {
    pub(crate) fn linear_forward(&self, gpu: &Gpu, args: LinearSwigluForward<'_>) -> Result<()> {
        let LinearSwigluForward { shape, x, w, h, a } = args;
        let (rows, ffn) = (shape.rows, shape.outputs / 2);
        gpu.expect_act(x, rows * shape.inputs);
        gpu.expect_act(w, 2 * ffn * shape.inputs);
        gpu.expect_act(h, 2 * rows * ffn);
        gpu.expect_act(a, rows * ffn);
        let site = Site { operation: "linear_swiglu_forward", shape, variants: VARIANTS.len() };
        let run = |variant| match variant {
            SwigluVariant::Kernel => {
                linear::forward(gpu, LinearForward { shape, x, w, bias: None, y: h })?;
                forward(gpu, SwigluForward { rows, ffn, h, a })
            }
            // SAFETY: checked above; this variant is selected only for operands that it supports; outputs overlap no
            // input by the operation's contract.
            SwigluVariant::Epilogue(tiling) => unsafe { hopper::forward(gpu, tiling, args) },
        };
        run(self.select(gpu, site, hopper::supports_forward(gpu, &args), run)?)
    }

    pub(crate) fn linear_backward(&self, gpu: &Gpu, args: SwigluLinearBackward<'_>) -> Result<()> {
        let SwigluLinearBackward { shape, dy, w, h, da, dh } = args;
        let (rows, ffn) = (shape.rows, shape.inputs);
        gpu.expect_act(dy, rows * shape.outputs);
        gpu.expect_act(w, shape.outputs * ffn);
        [h, dh].into_iter().for_each(|x| gpu.expect_act(x, 2 * rows * ffn));
        gpu.expect_act(da, rows * ffn);
        let site = Site { operation: "swiglu_linear_backward", shape, variants: VARIANTS.len() };
        let run = |variant| match variant {
            SwigluVariant::Kernel => {
                linear::backward_input(gpu, LinearBackwardInput { shape, dy, w, dx: da })?;
                backward(gpu, SwigluBackward { rows, ffn, h, da, dh })
            }
            // SAFETY: as in forward.
            SwigluVariant::Epilogue(tiling) => unsafe { hopper::backward(gpu, tiling, args) },
        };
        run(self.select(gpu, site, hopper::supports_backward(gpu, &args), run)?)
    }

    /// Uses this variant from now on for all operands that it supports; `None` restores the selection.
    pub(crate) fn force(&self, tiling: Option<Tiling>) {
        self.0.force(tiling.map(|tiling| 1 + tiling as usize));
    }

    /// Selects the fastest variant. The kernel supports every shape and type.
    fn select(
        &self,
        gpu: &Gpu,
        site: Site<LinearShape>,
        is_supported: bool,
        run: impl Fn(SwigluVariant) -> Result<()>,
    ) -> Result<SwigluVariant> {
        let unsupported = "it is not bf16, not aligned, or not on compute capability 9.0";
        let unsupported = (!is_supported).then_some(unsupported);
        self.0.select(gpu, site, unsupported, &[KERNELS.source, hopper::HOPPER_SOURCE], &VARIANTS, run)
    }
}
