//! The gradient of a layer's weights in TF32, with one of its operands transposed before.
//!
//! The sum is over rows, but tensor cores read TF32 along the columns of both operands in memory, and Hopper's have no
//! other way. cuBLASLt then multiplies as GPUs before them did, at half the rate or less. A copy of the operand with
//! fewer columns costs less than it gains where the other one has many.

use xlaunch_pool::DType;

use super::{LinearBackwardWeight, LinearShape, cuda};
use crate::cuda::gemm::{Epilogue, GemmCall, plain, transposed};
use crate::cuda::variants::{Fastest, Site, Variant};
use crate::cuda::{Gpu, KernelFile, Launch, Macro, args, source};
use crate::error::Result;
use crate::ops::Accumulate;
use crate::options::Precision;
use crate::tensor::Tensor;

/// Edge of a tile, and rows of it that a block moves at a time.
const TRANSPOSE_TILE: usize = 32;
const TRANSPOSE_ROWS: usize = 8;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("linear/transpose.cu"),
    kernels: &["transpose"],
    macros: &[Macro::int("TRANSPOSE_TILE", TRANSPOSE_TILE), Macro::int("TRANSPOSE_ROWS", TRANSPOSE_ROWS)],
    dynamic_shared: &[],
};

/// What the GEMM reads.
#[derive(Clone, Copy, Debug)]
enum Operands {
    AsTheyAre,
    OneTransposed,
}

impl Variant for Operands {
    fn name(self) -> &'static str {
        match self {
            Self::AsTheyAre => "operands as they are",
            Self::OneTransposed => "one operand transposed",
        }
    }
}

const OPERANDS: [Operands; 2] = [Operands::AsTheyAre, Operands::OneTransposed];

/// Gradients of one layer's weights.
#[derive(Debug, Default)]
pub(crate) struct WeightGrad(Fastest<LinearShape>);

impl WeightGrad {
    /// `dw` of operands that were checked.
    pub(crate) fn run(&self, gpu: &Gpu, args: LinearBackwardWeight<'_>) -> Result<()> {
        if gpu.precision != Precision::Tf32 {
            return cuda::weight_gradient(gpu, args);
        }
        let LinearShape { rows, inputs, outputs } = args.shape;
        // Allocated for both variants, so that a step's requests to the pool do not depend on the choice.
        let scratch = gpu.alloc(DType::F32, rows * inputs.min(outputs))?;
        let run = |operands| match operands {
            Operands::AsTheyAre => cuda::weight_gradient(gpu, args),
            Operands::OneTransposed => one_transposed(gpu, args, &scratch),
        };
        let site = Site { operation: "linear_backward_weight", shape: args.shape, variants: OPERANDS.len() };
        let unsupported =
            (args.acc == Accumulate::Add).then_some("it adds, so it cannot be repeated for timing");
        run(self.0.select(gpu, site, unsupported, &[KERNELS.source], &OPERANDS, run)?)
    }

    /// From now on, whether an operand is transposed wherever that is supported; or what was selected.
    pub(crate) fn force(&self, transposed: Option<bool>) {
        self.0.force(transposed.map(usize::from));
    }
}

fn one_transposed(gpu: &Gpu, args: LinearBackwardWeight<'_>, scratch: &Tensor) -> Result<()> {
    let LinearBackwardWeight { shape: LinearShape { rows, inputs, outputs }, dy, x, dw, .. } = args;
    let (narrow, cols) = if inputs <= outputs { (x, inputs) } else { (dy, outputs) };
    let tiles = rows.div_ceil(TRANSPOSE_TILE) * cols.div_ceil(TRANSPOSE_TILE);
    let launch = Launch::rows(tiles, (TRANSPOSE_TILE as u32, TRANSPOSE_ROWS as u32));
    // SAFETY: the caller has checked the operands; the scratch memory is as large as the narrower one.
    unsafe { gpu.launch("transpose", launch, args![narrow, scratch.all(), rows, cols]) }?;
    let (a, b) = match inputs <= outputs {
        true => (transposed(scratch.all()), transposed(dy)),
        false => (plain(x), plain(scratch.all())),
    };
    let call =
        GemmCall { m: inputs, n: outputs, k: rows, a, b, epilogue: Epilogue::None, c: dw, accumulate: false };
    // SAFETY: as above; dw overlaps no input by the operation's contract.
    unsafe { gpu.gemm.run(&call) }
}
