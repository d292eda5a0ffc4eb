//! Gradients of the weights of two layers in one launch, on compute capability 9.0: launches of `weight_grads.cu`.
//!
//! The weights of one layer of a small model have fewer tiles than the device has SMs. The tiles of two layers fill it
//! better; if they are still too few, the rows are divided as well. This variant runs where it is faster than a GEMM
//! for each layer.

use std::cell::{Cell, OnceCell};

use xlaunch_pool::DType;

use super::transposed::WeightGrad;
use super::{LinearBackwardWeight, LinearShape, cuda};
use crate::cuda::hopper::{HopperKernel, OTHER_SHARED, SQUARE, THREADS, TILE_K, TILE_M, tensor_map};
use crate::cuda::variants::{Fastest, Site, Variant};
use crate::cuda::{Arg, Gpu, Macro, args, source};
use crate::error::Result;
use crate::ops::Accumulate;
use crate::tensor::Tensor;

const TILE_N: usize = 128;
/// Number of warps that multiply. Each one has a counter per tile.
const MULTIPLIERS: usize = 8;
/// Number of tiles of each operand in shared memory at a time.
const STAGES: usize = 6;

pub(crate) static KERNEL: HopperKernel = HopperKernel {
    source: source!(
        "linear/weight_grads.cu",
        after "../cuda/headers/hopper.cuh", after "../cuda/headers/hopper_tiles.cuh"
    ),
    name: "weight_grads",
    macros: &[Macro::int("STAGES", STAGES)],
    threads: THREADS,
    shared: STAGES * (TILE_M + TILE_N) * TILE_K * size_of::<u16>() + OTHER_SHARED,
};

/// The way in which the gradients of two layers' weights are computed.
#[derive(Clone, Copy, Debug)]
enum Launches {
    /// A GEMM for each layer.
    Separate,
    /// One kernel.
    Together,
}

impl Variant for Launches {
    fn name(self) -> &'static str {
        match self {
            Self::Separate => "a GEMM for each layer",
            Self::Together => "one kernel for both layers",
        }
    }
}

const WAYS: [Launches; 2] = [Launches::Separate, Launches::Together];

/// State for the gradients of one layer's weights, and of two layers'.
#[derive(Debug, Default)]
pub(crate) struct WeightGrads {
    pub(crate) one: WeightGrad,
    fastest: Fastest<[LinearShape; 2]>,
    /// Counters of the kernel, one per warp and tile.
    counters: OnceCell<Tensor>,
    /// Number of parts into which a test has the rows divided.
    parts: Cell<Option<usize>>,
}

impl WeightGrads {
    /// Computes the gradient of one layer.
    pub(crate) fn one(&self, gpu: &Gpu, layer: LinearBackwardWeight<'_>) -> Result<()> {
        cuda::check_backward_weight(gpu, &layer);
        self.one.run(gpu, layer)
    }

    /// Computes the gradients of two layers.
    pub(crate) fn two(&self, gpu: &Gpu, layers: [LinearBackwardWeight<'_>; 2]) -> Result<()> {
        layers.iter().for_each(|layer| cuda::check_backward_weight(gpu, layer));
        let shapes = layers.map(|layer| layer.shape);
        let parts = self.parts.get().unwrap_or_else(|| parts(gpu, shapes));
        let is_supported = parts > 0 && supports(gpu, &layers);
        let run = |launches| match launches {
            Launches::Separate => layers.into_iter().try_for_each(|layer| self.one.run(gpu, layer)),
            Launches::Together => self.together(gpu, &layers, parts),
        };
        let site = Site { operation: "linear_backward_weights", shape: shapes, variants: WAYS.len() };
        let unsupported = "it is not bf16, not aligned, adds, has too many tiles, or not on Hopper";
        let unsupported = (!is_supported).then_some(unsupported);
        run(self.fastest.select(gpu, site, unsupported, &[KERNEL.source], &WAYS, run)?)
    }

    /// Selects one kernel for all layers that it supports from now on, with the rows in this number of parts; `None`
    /// restores the selection.
    pub(crate) fn force(&self, parts: Option<usize>) {
        self.parts.set(parts);
        self.fastest.force(parts.map(|_| Launches::Together as usize));
    }

    fn together(&self, gpu: &Gpu, layers: &[LinearBackwardWeight<'_>; 2], parts: usize) -> Result<()> {
        let [first, second] = layers;
        let (rows, tiles) = (first.shape.rows, tiles(first.shape) + tiles(second.shape));
        let parts = parts.min(gpu.gemm.workspace().len() / (tiles * TILE_M * TILE_N * size_of::<f32>()));
        let parts = parts.clamp(1, rows.div_ceil(TILE_K));
        let mut args = Vec::new();
        for layer in layers {
            let LinearShape { inputs, outputs, .. } = layer.shape;
            args.push(Arg::TensorMap(tensor_map(layer.dy, [outputs, rows, 1], [SQUARE, SQUARE, 1])?));
            args.push(Arg::TensorMap(tensor_map(layer.x, [inputs, rows, 1], [SQUARE, SQUARE, 1])?));
        }
        for layer in layers {
            args.extend_from_slice(args![layer.dw, layer.shape.outputs, layer.shape.inputs]);
        }
        let counters = self.counters(gpu)?;
        let partials = Arg::Word(gpu.gemm.workspace().address());
        args.extend([Arg::from(rows), partials, Arg::from(counters.all())]);
        // SAFETY: the operands were checked; the workspace has room for the sums of all blocks, there is a counter for
        // each warp of each tile, and all other work that uses them is enqueued to the same stream.
        unsafe { gpu.hopper.launch(&KERNEL, (tiles, parts, 1), &args) }
    }

    fn counters(&self, gpu: &Gpu) -> Result<&Tensor> {
        if let Some(counters) = self.counters.get() {
            return Ok(counters);
        }
        let counters = Tensor::new(&gpu.pool.persistent(), DType::I32, MULTIPLIERS * max_tiles(gpu))?;
        gpu.zero(counters.all())?;
        Ok(self.counters.get_or_init(|| counters))
    }
}

/// Maximum number of tiles, as given by the number of counters: more than the blocks that run at a time, for tests.
fn max_tiles(gpu: &Gpu) -> usize {
    gpu.hopper.multiprocessors().max(64)
}

/// Returns the number of parts of the rows with which all blocks fit on the device at once; 0 if there are too many
/// tiles.
fn parts(gpu: &Gpu, shapes: [LinearShape; 2]) -> usize {
    gpu.hopper.multiprocessors() / shapes.into_iter().map(tiles).sum::<usize>().max(1)
}

fn tiles(shape: LinearShape) -> usize {
    shape.outputs.div_ceil(TILE_M) * shape.inputs.div_ceil(TILE_N)
}

fn supports(gpu: &Gpu, layers: &[LinearBackwardWeight<'_>; 2]) -> bool {
    let [first, second] = layers;
    let supports = |layer: &LinearBackwardWeight<'_>| {
        let inner = [layer.shape.inputs, layer.shape.outputs];
        layer.acc == Accumulate::Overwrite
            && gpu.hopper.supports(&[layer.dy, layer.x, layer.dw], &inner, &[layer.shape.rows])
    };
    let tiles = tiles(first.shape) + tiles(second.shape);
    first.shape.rows == second.shape.rows && tiles <= max_tiles(gpu) && supports(first) && supports(second)
}
