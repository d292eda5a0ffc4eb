//! The gradient of a layer's weights in TF32, with one of the operands transposed first.
//!
//! The sum is over rows, but tensor cores read TF32 along the columns of both operands in memory, and Hopper's have no
//! alternative. cuBLASLt then multiplies as on earlier GPUs, at half the rate or less. If one operand has many columns,
//! a transposed copy of the other one, which has fewer, costs less than it saves.

use xlaunch_pool::DType;

use super::{LinearBackwardWeight, LinearShape, cuda};
use crate::cuda::gemm::{Epilogue, GemmCall, plain, transposed};
use crate::cuda::variants::{Fastest, Site, Variant};
use crate::cuda::{Gpu, KernelFile, Launch, Macro, args, source};
use crate::error::Result;
use crate::ops::Accumulate;
use crate::options::Precision;
use crate::tensor::Tensor;

/// Edge of a tile, and number of its rows that a block moves at a time.
const TRANSPOSE_TILE: usize = 32;
const TRANSPOSE_ROWS: usize = 8;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("linear/transpose.cu"),
    kernels: &["transpose"],
    macros: &[Macro::int("TRANSPOSE_TILE", TRANSPOSE_TILE), Macro::int("TRANSPOSE_ROWS", TRANSPOSE_ROWS)],
    dynamic_shared: &[],
};

/// The operands of the GEMM.
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

/// State for the gradients of one layer's weights.
#[derive(Debug, Default)]
pub(crate) struct WeightGrad(Fastest<LinearShape>);

impl WeightGrad {
    /// Computes `dw`. The caller has checked the operands.
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

    /// Sets whether an operand is transposed from now on, wherever that is supported; `None` restores the selection.
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
    let (a, b) = if inputs <= outputs {
        (transposed(scratch.all()), transposed(dy))
    } else {
        (plain(x), plain(scratch.all()))
    };
    let call =
        GemmCall { m: inputs, n: outputs, k: rows, a, b, epilogue: Epilogue::None, c: dw, accumulate: false };
    // SAFETY: as above; dw overlaps no input by the operation's contract.
    unsafe { gpu.gemm.run(&call) }
}
