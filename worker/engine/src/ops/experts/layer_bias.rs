//! Biases of the linear layers of experts: those of expert e are added to the rows between two offsets.

use rayon::prelude::*;
use xlaunch_pool::DType;

use super::index;
use crate::cpu::{Access, Threads};
use crate::cuda::{
    BLOCK_THREADS, COLUMN_BLOCK, KernelFile, Launch, VEC, args, expect, expect_grad, source, vec_threads,
};
use crate::error::Result;
use crate::ops::{Accumulate, Cuda, Op, reduce};
use crate::tensor::Slice;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("experts/layer_bias.cu"),
    kernels: &["expert_bias_fwd", "expert_bias_bwd", "router_logit_bias"],
    macros: &[],
    dynamic_shared: &[],
};

/// `y[i] += bias[e]` for the rows i of expert e.
#[derive(Clone, Copy, Debug)]
pub struct ExpertBiasForward<'a> {
    /// Columns.
    pub cols: usize,
    /// (E + 1,) I32: see [`SortByExpert`](super::SortByExpert).
    pub offsets: Slice<'a>,
    /// (E, columns).
    pub bias: Slice<'a>,
    /// (M, columns), updated in place. Rows past the last offset stay.
    pub y: Slice<'a>,
}

/// `dbias[e] = sum_i dy[i]`; 0 for an expert without rows.
#[derive(Clone, Copy, Debug)]
pub struct ExpertBiasBackward<'a> {
    /// Columns.
    pub cols: usize,
    /// (E + 1,) I32.
    pub offsets: Slice<'a>,
    /// (M, columns).
    pub dy: Slice<'a>,
    /// (E, columns) gradient.
    pub dbias: Slice<'a>,
    /// Selects whether the gradient is added.
    pub acc: Accumulate,
}

/// Returns the rows of each expert.
fn rows_of(offsets: &[i32]) -> impl Iterator<Item = std::ops::Range<usize>> {
    offsets.windows(2).map(|bounds| index(bounds[0])..index(bounds[1]))
}

impl Op for ExpertBiasForward<'_> {
    fn cpu(self, _: &Threads) {
        let (a, cols) = (Access::new("expert_bias_forward"), self.cols);
        let offsets = a.read_i32(self.offsets, self.offsets.len());
        let (bias, y) = (a.read(self.bias, self.bias.len()), a.write(self.y, self.y.len()));
        for (rows, bias) in rows_of(offsets).zip(bias.chunks_exact(cols)) {
            for y in y[rows.start * cols..rows.end * cols].chunks_exact_mut(cols) {
                y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
            }
        }
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let (Self { cols, offsets, bias, y }, experts) = (self, self.offsets.len() - 1);
        let rows = y.len() / cols;
        expect(offsets, DType::I32, experts + 1);
        gpu.expect_act(bias, experts * cols);
        gpu.expect_act(y, rows * cols);
        let threads = vec_threads(gpu, cols);
        let at_once = (BLOCK_THREADS / threads).max(1);
        let launch = Launch::rows(rows.div_ceil(at_once as usize), (threads, at_once));
        // SAFETY: checked above; offsets rise to at most the number of rows by the operation's contract.
        unsafe { gpu.launch("expert_bias_fwd", launch, args![offsets, bias, y, experts, rows, cols]) }
    }
}

impl Op for ExpertBiasBackward<'_> {
    fn cpu(self, threads: &Threads) {
        let (a, cols, add) = (Access::new("expert_bias_backward"), self.cols, self.acc == Accumulate::Add);
        let offsets = a.read_i32(self.offsets, self.offsets.len());
        let (dy, dbias) = (a.read(self.dy, self.dy.len()), a.write(self.dbias, self.dbias.len()));
        let rows: Vec<_> = rows_of(offsets).collect();
        threads.run(|| {
            dbias.par_chunks_exact_mut(cols).zip(rows).for_each(|(dbias, rows)| {
                let mut sums = vec![0.0; cols];
                for dy in dy[rows.start * cols..rows.end * cols].chunks_exact(cols) {
                    sums.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy);
                }
                reduce::cpu::add_partials(&[sums], dbias, add);
            });
        });
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let (Self { cols, offsets, dy, dbias, acc }, experts) = (self, self.offsets.len() - 1);
        expect(offsets, DType::I32, experts + 1);
        gpu.expect_act(dy, dy.len() / cols * cols);
        expect_grad(dbias, experts * cols);
        let sums = gpu.alloc(DType::F32, experts * cols)?;
        let grid = (cols.div_ceil(COLUMN_BLOCK.0 as usize * VEC), experts, 1);
        let launch = Launch { grid, block: COLUMN_BLOCK, shared: 0 };
        // SAFETY: checked above; offsets rise to at most the number of rows by the operation's contract.
        unsafe { gpu.launch("expert_bias_bwd", launch, args![offsets, dy, sums.all(), cols]) }?;
        reduce::cuda::column_sum_final(gpu, &sums, experts * cols, &[dbias], acc)
    }

    fn scratch(&self) -> usize {
        DType::F32.size() * self.dbias.len()
    }
}
