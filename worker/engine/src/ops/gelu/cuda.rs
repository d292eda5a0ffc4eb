//! Linear layers with GELU: selects a variant and launches it.
//!
//! The epilogue of a cuBLASLt GEMM saves the pass in which a kernel reads and writes (N, F) again. But a GEMM with such
//! an epilogue can be slower than a plain one by as much. Therefore all variants of the operation are timed as a whole.
//! If no choice is possible (F32, rows that are not multiples of 8 elements, deterministic runs, during a capture), the
//! kernel runs. Every variant writes the same outputs and partial sums and reads none of them.

use xlaunch_pool::DType;

use super::{GELU_CUBE, GELU_SCALE, GeluBackward, GeluForward, GeluLinearBackward, LinearGeluForward};
use crate::cuda::gemm::{Epilogue, GemmCall, plain, transposed};
use crate::cuda::variants::{Fastest, Site, Variant};
use crate::cuda::{
    BLOCK_THREADS, Gpu, KernelFile, Launch, Macro, VEC, args, expect_grad, is_bf16, source, vectorizable,
};
use crate::error::Result;
use crate::ops::reduce::cuda::ColumnSums;
use crate::ops::{Accumulate, LinearShape, reduce};
use crate::tensor::Slice;

/// Vectors per thread of `gelu_fwd`.
const VECS: usize = 4;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("gelu/kernel.cu"),
    kernels: &["gelu_fwd", "gelu_bwd"],
    macros: &[
        Macro::float("GELU_SCALE", GELU_SCALE),
        Macro::float("GELU_CUBE", GELU_CUBE),
        Macro::int("GELU_VECS", VECS),
    ],
    dynamic_shared: &[],
};

/// The way in which GELU or its derivative is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeluVariant {
    /// A kernel, in a separate pass over the GEMM's output.
    Kernel,
    /// The GEMM's epilogue; in backward, the bias gradient takes a separate pass.
    Epilogue,
    /// The GEMM's epilogue, which also computes the bias gradient.
    EpilogueWithBiasGrad,
}

impl Variant for GeluVariant {
    fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Epilogue => "GEMM epilogue",
            Self::EpilogueWithBiasGrad => "GEMM epilogue with bias gradient",
        }
    }
}

const FORWARD: [GeluVariant; 2] = [GeluVariant::Kernel, GeluVariant::Epilogue];
const BACKWARD: [GeluVariant; 3] =
    [GeluVariant::Kernel, GeluVariant::Epilogue, GeluVariant::EpilogueWithBiasGrad];

fn forward_site(shape: LinearShape) -> Site<LinearShape> {
    Site { operation: "linear_gelu_forward", shape, variants: FORWARD.len() }
}

fn backward_site(shape: LinearShape, variants: usize) -> Site<LinearShape> {
    Site { operation: "gelu_linear_backward", shape, variants }
}

pub(crate) fn activation(gpu: &Gpu, args: GeluForward<'_>) -> Result<()> {
    let GeluForward { h, a } = args;
    gpu.expect_act(h, a.len());
    gpu.expect_act(a, h.len());
    let launch = Launch::threads(h.len().div_ceil(VEC * VECS), BLOCK_THREADS);
    // SAFETY: checked above; a overlaps no input by the operation's contract.
    unsafe { gpu.launch("gelu_fwd", launch, args![h, a, h.len()]) }
}

pub(crate) fn activation_backward(gpu: &Gpu, args: GeluBackward<'_>) -> Result<()> {
    let GeluBackward { rows, cols, h, dh, dbias, acc } = args;
    [h, dh].into_iter().for_each(|x| gpu.expect_act(x, rows * cols));
    expect_grad(dbias, cols);
    let sums = ColumnSums::new(gpu, rows, cols)?;
    gradient(gpu, &sums, h, dh, rows, cols)?;
    sums.finish(gpu, dbias, acc)
}

/// Computes the gradient of h from that of gelu(h), in place, and partial sums over rows. The caller has checked the
/// operands.
fn gradient(
    gpu: &Gpu,
    sums: &ColumnSums,
    h: Slice<'_>,
    dh: Slice<'_>,
    rows: usize,
    cols: usize,
) -> Result<()> {
    let args = args![h, dh, sums.partials.all(), rows, cols];
    // SAFETY: the caller has checked the operands; there is one row of partial sums per grid row.
    unsafe { gpu.launch("gelu_bwd", sums.launch, args) }
}

/// Linear layers with GELU.
#[derive(Debug, Default)]
pub(crate) struct Gelu(Fastest<LinearShape>);

impl Gelu {
    pub(crate) fn forward(&self, gpu: &Gpu, args: LinearGeluForward<'_>) -> Result<()> {
        let LinearGeluForward { shape: s, x, w, bias, h, a } = args;
        gpu.expect_act(x, s.rows * s.inputs);
        gpu.expect_act(w, s.outputs * s.inputs);
        gpu.expect_act(bias, s.outputs);
        [h, a].into_iter().for_each(|y| gpu.expect_act(y, s.rows * s.outputs));
        let gemm = |epilogue, c| {
            let (m, n, k) = (s.outputs, s.rows, s.inputs);
            let call = GemmCall { m, n, k, a: transposed(w), b: plain(x), epilogue, c, accumulate: false };
            // SAFETY: checked above; outputs overlap no input by the operation's contract.
            unsafe { gpu.gemm.run(&call) }
        };
        let run = |variant| match variant {
            GeluVariant::Kernel => {
                gemm(Epilogue::Bias(bias), h)?;
                activation(gpu, GeluForward { h, a })
            }
            GeluVariant::Epilogue | GeluVariant::EpilogueWithBiasGrad => gemm(Epilogue::Gelu { bias, h }, a),
        };
        let vectors = vectorizable(s.outputs, &[x, w, bias, h, a]);
        run(self.select(gpu, forward_site(s), vectors, &FORWARD, run)?)
    }

    pub(crate) fn backward(&self, gpu: &Gpu, args: GeluLinearBackward<'_>) -> Result<()> {
        let GeluLinearBackward { shape: s, dy, w, h, dh, dbias, acc } = args;
        let (rows, cols) = (s.rows, s.inputs);
        gpu.expect_act(dy, rows * s.outputs);
        gpu.expect_act(w, s.outputs * cols);
        [h, dh].into_iter().for_each(|x| gpu.expect_act(x, rows * cols));
        expect_grad(dbias, cols);
        // Allocated for every variant, so that a step's requests to the pool do not depend on the choice.
        let sums = ColumnSums::new(gpu, rows, cols)?;
        let gemm = |epilogue| {
            let (m, n, k) = (cols, rows, s.outputs);
            let call = GemmCall { m, n, k, a: plain(w), b: plain(dy), epilogue, c: dh, accumulate: false };
            // SAFETY: checked above; outputs overlap no input by the operation's contract.
            unsafe { gpu.gemm.run(&call) }
        };
        // Writes dh, and either the partial sums of its rows or dbias.
        let run = |variant| match variant {
            GeluVariant::Kernel => {
                gemm(Epilogue::None)?;
                gradient(gpu, &sums, h, dh, rows, cols)
            }
            GeluVariant::Epilogue => {
                gemm(Epilogue::GeluGrad { h, dbias: None })?;
                sums.partials_of(gpu, dh)
            }
            GeluVariant::EpilogueWithBiasGrad => gemm(Epilogue::GeluGrad { h, dbias: Some(dbias) }),
        };
        // The epilogue writes the bias gradient in its output's type and cannot accumulate.
        let with_bias_grad = is_bf16(dbias) && acc == Accumulate::Overwrite;
        let variants = if with_bias_grad { &BACKWARD[..] } else { &BACKWARD[..2] };
        let vectors = vectorizable(cols, &[dy, w, h, dh, dbias]);
        let variant = self.select(gpu, backward_site(s, variants.len()), vectors, variants, run)?;
        run(variant)?;
        if variant == GeluVariant::EpilogueWithBiasGrad {
            return Ok(());
        }
        sums.finish(gpu, dbias, acc)
    }

    /// Selects this variant instead of the fastest from now on: in forward for one layer's shape, in backward for the
    /// next layer's.
    pub(crate) fn force(&self, forward: LinearShape, backward: LinearShape, variant: GeluVariant) {
        let forward_variant = if variant == GeluVariant::Kernel { variant } else { GeluVariant::Epilogue };
        let backward = backward_site(backward, BACKWARD.len());
        self.0.set(forward_site(forward), forward_variant as usize);
        self.0.set(backward, variant as usize);
    }

    /// Selects the fastest of these variants. The first one supports every shape and type.
    fn select(
        &self,
        gpu: &Gpu,
        site: Site<LinearShape>,
        vectors: bool,
        variants: &[GeluVariant],
        run: impl Fn(GeluVariant) -> Result<()>,
    ) -> Result<GeluVariant> {
        let unsupported = match () {
            () if gpu.activations != DType::Bf16 => Some("activations are not bf16"),
            () if !vectors => Some("rows are not multiples of 8 elements"),
            () => None,
        };
        let sources = [KERNELS.source, reduce::cuda::KERNELS.source];
        self.0.select(gpu, site, unsupported, &sources, variants, run)
    }
}
