//! Linear layers with activation functions: selects a variant and launches it.
//!
//! For the tanh form of GELU, the epilogue of a cuBLASLt GEMM saves the pass in which a kernel reads and writes (N, F)
//! again. But a GEMM with such an epilogue can be slower than a plain one by as much. Therefore all variants of the
//! operation are timed as a whole. If no choice is possible (other functions, no bias, F32, rows that are not multiples
//! of 8 elements, deterministic runs, during a capture), the kernel runs. Every variant writes the same outputs and
//! partial sums and reads none of them.

use xlaunch_pool::DType;

use super::{
    Activation, ActivationBackward, ActivationForward, ActivationLinearBackward, LinearActivationForward,
};
use crate::cuda::gemm::{Epilogue, GemmCall, plain, transposed};
use crate::cuda::on_demand::{Compilation, OnDemand};
use crate::cuda::variants::{Fastest, Site, Variant};
use crate::cuda::{
    Arg, BLOCK_THREADS, Gpu, Launch, Macro, Source, VEC, args, expect_grad, is_bf16, source, vectorizable,
};
use crate::error::Result;
use crate::ops::reduce::cuda::ColumnSums;
use crate::ops::{Accumulate, LinearShape, reduce};
use crate::tensor::Slice;

/// Vectors per thread of `activation_fwd`.
const VECS: usize = 4;

const ACTIVATION_SOURCE: Source = source!("activation/kernel.cu", after "activation/functions.cuh");

/// Returns the source compiled for a function.
pub(crate) fn compilation(activation: Activation) -> Compilation {
    let macros = vec![Macro::int("ACTIVATION", activation as usize), Macro::int("ACTIVATION_VECS", VECS)];
    (ACTIVATION_SOURCE, macros, vec!["activation_fwd", "activation_bwd"])
}

/// The way in which an activation function or its derivative is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationVariant {
    /// A kernel, in a separate pass over the GEMM's output.
    Kernel,
    /// The GEMM's epilogue; in backward, the bias gradient takes a separate pass.
    Epilogue,
    /// The GEMM's epilogue, which also computes the bias gradient.
    EpilogueWithBiasGrad,
}

impl Variant for ActivationVariant {
    fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Epilogue => "GEMM epilogue",
            Self::EpilogueWithBiasGrad => "GEMM epilogue with bias gradient",
        }
    }
}

const FORWARD: [ActivationVariant; 2] = [ActivationVariant::Kernel, ActivationVariant::Epilogue];
const BACKWARD: [ActivationVariant; 3] =
    [ActivationVariant::Kernel, ActivationVariant::Epilogue, ActivationVariant::EpilogueWithBiasGrad];

/// An activation function and the layer before it in forward, after it in backward.
type Layer = (Activation, LinearShape);

fn forward_site(layer: Layer) -> Site<Layer> {
    Site { operation: "linear_activation_forward", shape: layer, variants: FORWARD.len() }
}

fn backward_site(layer: Layer, variants: usize) -> Site<Layer> {
    Site { operation: "activation_linear_backward", shape: layer, variants }
}

/// Activation functions, and linear layers with them.
#[derive(Debug, Default)]
pub(crate) struct Activations {
    kernels: OnDemand<Activation>,
    fastest: Fastest<Layer>,
}

impl Activations {
    pub(crate) fn forward(&self, gpu: &Gpu, args: ActivationForward<'_>) -> Result<()> {
        let ActivationForward { activation, h, a } = args;
        gpu.expect_act(h, a.len());
        gpu.expect_act(a, h.len());
        let launch = Launch::threads(h.len().div_ceil(VEC * VECS), BLOCK_THREADS);
        // SAFETY: checked above; a overlaps no input by the operation's contract.
        unsafe { self.launch(gpu, activation, "activation_fwd", launch, args![h, a, h.len()]) }
    }

    pub(crate) fn backward(&self, gpu: &Gpu, args: ActivationBackward<'_>) -> Result<()> {
        let ActivationBackward { activation, rows, cols, h, dh, dbias, acc } = args;
        [h, dh].into_iter().for_each(|x| gpu.expect_act(x, rows * cols));
        dbias.into_iter().for_each(|dbias| expect_grad(dbias, cols));
        let gradient = Gradient::new(gpu, activation, [rows, cols], h, dh, dbias)?;
        self.gradient(gpu, &gradient)?;
        gradient.finish(gpu, acc)
    }

    pub(crate) fn linear_forward(&self, gpu: &Gpu, args: LinearActivationForward<'_>) -> Result<()> {
        let LinearActivationForward { shape: s, activation, x, w, bias, h, a } = args;
        gpu.expect_act(x, s.rows * s.inputs);
        gpu.expect_act(w, s.outputs * s.inputs);
        gpu.expect_optional_act(bias, s.outputs);
        [h, a].into_iter().for_each(|y| gpu.expect_act(y, s.rows * s.outputs));
        let gemm = |epilogue, c| {
            let (m, n, k) = (s.outputs, s.rows, s.inputs);
            let call = GemmCall { m, n, k, a: transposed(w), b: plain(x), epilogue, c, accumulate: false };
            // SAFETY: checked above; outputs overlap no input by the operation's contract.
            unsafe { gpu.gemm.run(&call) }
        };
        let run = |variant| match (variant, bias) {
            (ActivationVariant::Epilogue | ActivationVariant::EpilogueWithBiasGrad, Some(bias)) => {
                gemm(Epilogue::Gelu { bias, h }, a)
            }
            _ => {
                gemm(bias.map_or(Epilogue::None, Epilogue::Bias), h)?;
                self.forward(gpu, ActivationForward { activation, h, a })
            }
        };
        let operands = [Some(x), Some(w), bias, Some(h), Some(a)];
        let unsupported = no_epilogue(gpu, activation, bias, s.outputs, &operands);
        run(self.select(gpu, forward_site((activation, s)), unsupported, &FORWARD, run)?)
    }

    pub(crate) fn linear_backward(&self, gpu: &Gpu, args: ActivationLinearBackward<'_>) -> Result<()> {
        let ActivationLinearBackward { shape: s, activation, dy, w, h, dh, dbias, acc } = args;
        let (rows, cols) = (s.rows, s.inputs);
        gpu.expect_act(dy, rows * s.outputs);
        gpu.expect_act(w, s.outputs * cols);
        [h, dh].into_iter().for_each(|x| gpu.expect_act(x, rows * cols));
        dbias.into_iter().for_each(|dbias| expect_grad(dbias, cols));
        // Allocated for every variant, so that a step's requests to the pool do not depend on the choice.
        let gradient = Gradient::new(gpu, activation, [rows, cols], h, dh, dbias)?;
        let gemm = |epilogue| {
            let (m, n, k) = (cols, rows, s.outputs);
            let call = GemmCall { m, n, k, a: plain(w), b: plain(dy), epilogue, c: dh, accumulate: false };
            // SAFETY: checked above; outputs overlap no input by the operation's contract.
            unsafe { gpu.gemm.run(&call) }
        };
        // Writes dh, and either the partial sums of its rows or dbias.
        let run = |variant| match variant {
            ActivationVariant::Kernel => {
                gemm(Epilogue::None)?;
                self.gradient(gpu, &gradient)
            }
            ActivationVariant::Epilogue => {
                gemm(Epilogue::GeluGrad { h, dbias: None })?;
                gradient.sums.partials_of(gpu, dh)
            }
            ActivationVariant::EpilogueWithBiasGrad => gemm(Epilogue::GeluGrad { h, dbias }),
        };
        // The epilogue writes the bias gradient in its output's type and cannot accumulate.
        let with_bias_grad = dbias.is_some_and(is_bf16) && acc == Accumulate::Overwrite;
        let variants = if with_bias_grad { &BACKWARD[..] } else { &BACKWARD[..2] };
        let operands = [Some(dy), Some(w), Some(h), Some(dh), dbias];
        let unsupported = no_epilogue(gpu, activation, dbias, cols, &operands);
        let site = backward_site((activation, s), variants.len());
        let variant = self.select(gpu, site, unsupported, variants, run)?;
        run(variant)?;
        if variant == ActivationVariant::EpilogueWithBiasGrad {
            return Ok(());
        }
        gradient.finish(gpu, acc)
    }

    /// Selects this variant instead of the fastest from now on: in forward for one layer's shape, in backward for the
    /// next layer's. The function is the tanh form of GELU.
    pub(crate) fn force(&self, forward: LinearShape, backward: LinearShape, variant: ActivationVariant) {
        let forward_variant =
            if variant == ActivationVariant::Kernel { variant } else { ActivationVariant::Epilogue };
        let backward = backward_site((Activation::GeluTanh, backward), BACKWARD.len());
        self.fastest.set(forward_site((Activation::GeluTanh, forward)), forward_variant as usize);
        self.fastest.set(backward, variant as usize);
    }

    /// Selects the fastest of these variants. The first one supports every function, shape and type.
    fn select(
        &self,
        gpu: &Gpu,
        site: Site<Layer>,
        unsupported: Option<&str>,
        variants: &[ActivationVariant],
        run: impl Fn(ActivationVariant) -> Result<()>,
    ) -> Result<ActivationVariant> {
        let sources = [ACTIVATION_SOURCE, reduce::cuda::KERNELS.source];
        self.fastest.select(gpu, site, unsupported, &sources, variants, run)
    }

    /// Computes the gradient of h from that of f(h), in place, and partial sums over rows.
    fn gradient(&self, gpu: &Gpu, gradient: &Gradient<'_>) -> Result<()> {
        let Gradient { activation, h, dh, dbias, sums } = gradient;
        let partials = dbias.map(|_| sums.partials.all());
        let args = args![*h, *dh, partials, sums.rows, sums.cols];
        // SAFETY: the caller of `Gradient::new` has checked the operands; there is one row of partial sums per grid
        // row.
        unsafe { self.launch(gpu, *activation, "activation_bwd", sums.launch, args) }
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// Same as for [`Kernels::launch`](crate::cuda::Kernels::launch).
    unsafe fn launch(
        &self,
        gpu: &Gpu,
        activation: Activation,
        name: &'static str,
        launch: Launch,
        args: &[Arg],
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.kernels.launch(&gpu.kernels, (activation, name), compilation, launch, args) }
    }
}

/// The gradient of h in place of that of f(h), and the sum of its rows if there is a bias.
struct Gradient<'a> {
    activation: Activation,
    h: Slice<'a>,
    dh: Slice<'a>,
    dbias: Option<Slice<'a>>,
    sums: ColumnSums,
}

impl<'a> Gradient<'a> {
    /// The caller has checked the operands.
    #[track_caller]
    fn new(
        gpu: &Gpu,
        activation: Activation,
        [rows, cols]: [usize; 2],
        h: Slice<'a>,
        dh: Slice<'a>,
        dbias: Option<Slice<'a>>,
    ) -> Result<Self> {
        Ok(Self { activation, h, dh, dbias, sums: ColumnSums::new(gpu, rows, cols)? })
    }

    /// Adds the partial sums to the gradient of the bias.
    fn finish(&self, gpu: &Gpu, acc: Accumulate) -> Result<()> {
        self.dbias.map_or(Ok(()), |dbias| self.sums.finish(gpu, dbias, acc))
    }
}

/// Returns the reason why no epilogue supports this layer, if so. `bias` is that of h, or its gradient.
fn no_epilogue(
    gpu: &Gpu,
    activation: Activation,
    bias: Option<Slice<'_>>,
    cols: usize,
    operands: &[Option<Slice<'_>>],
) -> Option<&'static str> {
    let operands: Vec<Slice<'_>> = operands.iter().flatten().copied().collect();
    match () {
        () if activation != Activation::GeluTanh => Some("cuBLASLt has only the tanh form of GELU"),
        () if bias.is_none() => Some("there is no bias"),
        () if gpu.activations != DType::Bf16 => Some("activations are not bf16"),
        () if !vectorizable(cols, &operands) => Some("rows are not multiples of 8 elements"),
        () => None,
    }
}
