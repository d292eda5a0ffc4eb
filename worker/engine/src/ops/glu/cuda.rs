//! Gated activations: launches their kernels, and selects the variant of a linear layer with one.
//!
//! Our own GEMM applies the activation, or its derivative, before it writes its result, which saves the pass in which a
//! kernel reads and writes (N, 2 F) again. It runs where it is faster than a GEMM followed by a kernel.

use xlaunch_pool::DType;

use super::hopper::{self, Tiling};
use super::{GluBackward, GluForward, GluInputs, GluLinearBackward, LinearGluForward};
use crate::cuda::on_demand::{Compilation, OnDemand};
use crate::cuda::variants::{Fastest, Site, Variant};
use crate::cuda::{Arg, Gpu, Launch, Macro, Source, args, expect, source, vec_threads};
use crate::error::Result;
use crate::ops::experts::rows::PADDING_ROWS;
use crate::ops::fp8::cuda::zero_amax;
use crate::ops::linear::cuda as linear;
use crate::ops::{Activation, LinearBackwardInput, LinearForward, LinearShape};

/// Rows that a block's threads fetch together.
const GLU_ROWS: usize = 2;

const GLU_SOURCE: Source = source!("glu/kernel.cu", after "activation/functions.cuh");

/// Returns the source compiled for an activation.
pub(crate) fn compilation(activation: Activation) -> Compilation {
    let macros = vec![
        Macro::int("ACTIVATION", activation as usize),
        Macro::int("GLU_ROWS", GLU_ROWS),
        Macro::int("PADDING_ROWS", PADDING_ROWS),
    ];
    (GLU_SOURCE, macros, vec!["glu_fwd", "glu_bwd"])
}

/// The way in which a linear layer with a gated activation is computed.
#[derive(Clone, Copy, Debug)]
enum GluVariant {
    /// A GEMM, followed by a kernel for the gated activation.
    Kernel,
    /// Our own GEMM.
    Epilogue(Tiling),
}

impl Variant for GluVariant {
    fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Epilogue(tiling) => tiling.name(),
        }
    }
}

/// The kernel, then the tilings in order.
const VARIANTS: [GluVariant; 3] =
    [GluVariant::Kernel, GluVariant::Epilogue(Tiling::Halves), GluVariant::Epilogue(Tiling::Turns)];

/// An activation and the layer before it in forward, after it in backward.
type Layer = (Activation, LinearShape);

/// Gated activations, and linear layers with them.
#[derive(Debug, Default)]
pub(crate) struct Glu {
    kernels: OnDemand<Activation>,
    fastest: Fastest<Layer>,
}

impl Glu {
    pub(crate) fn forward(&self, gpu: &Gpu, args: GluForward<'_>) -> Result<()> {
        let GluForward { activation, inputs, rows, ffn, h, a, end, amax } = args;
        gpu.expect_act(h, 2 * rows * ffn);
        gpu.expect_act(a, rows * ffn);
        end.into_iter().for_each(|end| expect(end, DType::I32, 1));
        amax.map_or(Ok(()), |amax| zero_amax(gpu, amax))?;
        let launch = Launch::blocks(rows.div_ceil(GLU_ROWS), vec_threads(gpu, ffn));
        // SAFETY: checked above.
        unsafe {
            let args = args![h, a, end, amax, rows, ffn, inputs.limit, inputs.offset];
            self.launch(gpu, (activation, "glu_fwd"), launch, args)
        }
    }

    pub(crate) fn backward(&self, gpu: &Gpu, args: GluBackward<'_>) -> Result<()> {
        let GluBackward { activation, inputs, rows, ffn, h, da, dh, end, amax } = args;
        [h, dh].into_iter().for_each(|x| gpu.expect_act(x, 2 * rows * ffn));
        gpu.expect_act(da, rows * ffn);
        end.into_iter().for_each(|end| expect(end, DType::I32, 1));
        amax.map_or(Ok(()), |amax| zero_amax(gpu, amax))?;
        let launch = Launch::blocks(rows.div_ceil(GLU_ROWS), vec_threads(gpu, ffn));
        // SAFETY: checked above.
        unsafe {
            let args = args![h, da, dh, end, amax, rows, ffn, inputs.limit, inputs.offset];
            self.launch(gpu, (activation, "glu_bwd"), launch, args)
        }
    }

    pub(crate) fn linear_forward(&self, gpu: &Gpu, args: LinearGluForward<'_>) -> Result<()> {
        let LinearGluForward { shape, activation, inputs, x, w, bias, h, a } = args;
        let (rows, ffn) = (shape.rows, shape.outputs / 2);
        gpu.expect_act(x, rows * shape.inputs);
        gpu.expect_act(w, 2 * ffn * shape.inputs);
        gpu.expect_optional_act(bias, 2 * ffn);
        gpu.expect_act(h, 2 * rows * ffn);
        gpu.expect_act(a, rows * ffn);
        let run = |variant| match variant {
            GluVariant::Kernel => {
                linear::forward(gpu, LinearForward { shape, x, w, bias, y: h })?;
                self.forward(gpu, GluForward { activation, inputs, rows, ffn, h, a, end: None, amax: None })
            }
            // SAFETY: checked above; this variant is selected only for operands that it supports; outputs overlap no
            // input by the operation's contract.
            GluVariant::Epilogue(tiling) => unsafe { hopper::forward(gpu, tiling, args) },
        };
        let unsupported = bias
            .map(|_| "it does not add a bias")
            .or(unsupported(inputs, hopper::supports_forward(gpu, &args)));
        let shape = (activation, shape);
        let site = Site { operation: "linear_glu_forward", shape, variants: VARIANTS.len() };
        run(self.select(gpu, site, unsupported, run)?)
    }

    pub(crate) fn linear_backward(&self, gpu: &Gpu, args: GluLinearBackward<'_>) -> Result<()> {
        let GluLinearBackward { shape, activation, inputs, dy, w, h, da, dh } = args;
        let (rows, ffn) = (shape.rows, shape.inputs);
        gpu.expect_act(dy, rows * shape.outputs);
        gpu.expect_act(w, shape.outputs * ffn);
        [h, dh].into_iter().for_each(|x| gpu.expect_act(x, 2 * rows * ffn));
        gpu.expect_act(da, rows * ffn);
        let run = |variant| match variant {
            GluVariant::Kernel => {
                linear::backward_input(gpu, LinearBackwardInput { shape, dy, w, dx: da })?;
                self.backward(
                    gpu,
                    GluBackward { activation, inputs, rows, ffn, h, da, dh, end: None, amax: None },
                )
            }
            // SAFETY: as in forward.
            GluVariant::Epilogue(tiling) => unsafe { hopper::backward(gpu, tiling, args) },
        };
        let unsupported = unsupported(inputs, hopper::supports_backward(gpu, &args));
        let shape = (activation, shape);
        let site = Site { operation: "glu_linear_backward", shape, variants: VARIANTS.len() };
        run(self.select(gpu, site, unsupported, run)?)
    }

    /// Uses this variant from now on for all operands that it supports; `None` restores the selection.
    pub(crate) fn force(&self, tiling: Option<Tiling>) {
        self.fastest.force(tiling.map(|tiling| 1 + tiling as usize));
    }

    /// Selects the fastest variant. The kernel supports every shape and type.
    fn select(
        &self,
        gpu: &Gpu,
        site: Site<Layer>,
        unsupported: Option<&str>,
        run: impl Fn(GluVariant) -> Result<()>,
    ) -> Result<GluVariant> {
        self.fastest.select(gpu, site, unsupported, &[GLU_SOURCE, hopper::HOPPER_SOURCE], &VARIANTS, run)
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// Same as for [`Kernels::launch`](crate::cuda::Kernels::launch).
    unsafe fn launch(
        &self,
        gpu: &Gpu,
        kernel: (Activation, &'static str),
        launch: Launch,
        args: &[Arg],
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.kernels.launch(&gpu.kernels, kernel, compilation, launch, args) }
    }
}

fn unsupported(inputs: GluInputs, is_supported: bool) -> Option<&'static str> {
    if inputs != GluInputs::PLAIN {
        return Some("it does not bound its inputs");
    }
    (!is_supported).then_some("it is not bf16, not aligned, or not on compute capability 9.0")
}
