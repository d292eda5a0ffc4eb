//! Attention sinks: a learned logit of each query head takes part in the softmax, but has no value (OpenAI, 2025). They
//! are added between attention and what reads its output, so attention itself does not know of them.
//!
//! With a sink z, and `lse` and `out` of attention without it: `lse' = log(exp(lse) + exp(z))` and
//! `out' = exp(lse - lse') out`. With these two in place of `lse` and `out`, the backward of attention computes the
//! gradients of queries, keys and values: its probabilities `exp(s - lse')` are those next to the sink, and
//! `delta = dout . out'` has no part of the sink, which has no value. What remains is `dz = -sum exp(z - lse') delta`.

use rayon::prelude::*;
use xlaunch_pool::DType;

use super::AttentionShape;
use crate::cpu::{Access, Threads, math};
use crate::cuda::{BLOCK_THREADS, KernelFile, Launch, VEC, args, expect, expect_grad, source};
use crate::error::Result;
use crate::ops::{Accumulate, Cuda, Op, reduce};
use crate::tensor::Slice;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("attention/sinks.cu"),
    kernels: &["attention_sinks_fwd", "attention_sinks_bwd"],
    macros: &[],
    dynamic_shared: &[],
};

/// Blocks of the sums over tokens that run on a multiprocessor at once.
const SINK_BLOCKS_PER_SM: usize = 8;

/// Adds the sinks to the results of [`AttentionForward`](super::AttentionForward), in place.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSinksForward<'a> {
    /// Sizes of attention.
    pub shape: AttentionShape,
    /// (H,).
    pub sinks: Slice<'a>,
    /// (B, T, H D).
    pub out: Slice<'a>,
    /// (B, H, T) F32.
    pub lse: Slice<'a>,
}

/// The gradient of the sinks.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSinksBackward<'a> {
    /// Sizes of attention.
    pub shape: AttentionShape,
    /// (H,).
    pub sinks: Slice<'a>,
    /// (B, T, H D), with the sinks.
    pub out: Slice<'a>,
    /// (B, T, H D).
    pub dout: Slice<'a>,
    /// (B, H, T) F32, with the sinks.
    pub lse: Slice<'a>,
    /// (H,) gradient.
    pub dsinks: Slice<'a>,
    /// Selects whether the gradient is added.
    pub acc: Accumulate,
}

/// Returns the number of threads of a row of a head: a power of two of at most a warp, as heads have at most 256
/// elements.
fn lanes(s: AttentionShape) -> usize {
    (s.width / VEC).next_power_of_two()
}

impl Op for AttentionSinksForward<'_> {
    fn cpu(self, threads: &Threads) {
        let (a, s) = (Access::new("attention_sinks_forward"), self.shape);
        let (rows, sinks) = (s.batch * s.seq * s.heads, a.read(self.sinks, s.heads));
        let (out, lse) = (a.write(self.out, rows * s.width), a.write(self.lse, rows));
        threads.run(|| {
            let sequences = out.par_chunks_mut(s.seq * s.heads * s.width);
            sequences.zip(lse.par_chunks_mut(s.heads * s.seq)).for_each(|(out, lse)| {
                for (row, out) in out.chunks_exact_mut(s.width).enumerate() {
                    let (sink, lse) = (sinks[row % s.heads], &mut lse[row % s.heads * s.seq + row / s.heads]);
                    let excess = sink - *lse;
                    let factor = 1.0 / (1.0 + excess.exp());
                    *lse = lse.max(sink) + (-excess.abs()).exp().ln_1p();
                    out.iter_mut().for_each(|x| *x *= factor);
                }
            });
        });
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let Self { shape: s, sinks, out, lse } = self;
        let rows = s.batch * s.seq * s.heads;
        gpu.expect_act(sinks, s.heads);
        gpu.expect_act(out, rows * s.width);
        expect(lse, DType::F32, rows);
        let launch = Launch::threads(rows * lanes(s), BLOCK_THREADS);
        let args = args![sinks, out, lse, rows, s.seq, s.heads, s.width, lanes(s)];
        // SAFETY: checked above.
        unsafe { gpu.launch("attention_sinks_fwd", launch, args) }
    }
}

impl Op for AttentionSinksBackward<'_> {
    fn cpu(self, threads: &Threads) {
        let (a, s) = (Access::new("attention_sinks_backward"), self.shape);
        let (rows, sinks) = (s.batch * s.seq * s.heads, a.read(self.sinks, s.heads));
        let (out, dout) = (a.read(self.out, rows * s.width), a.read(self.dout, rows * s.width));
        let (lse, dsinks) = (a.read(self.lse, rows), a.write(self.dsinks, s.heads));
        let len = s.seq * s.heads * s.width;
        let partials: Vec<Vec<f32>> = threads.run(|| {
            let sequences = out.par_chunks(len).zip(dout.par_chunks(len));
            let sums = sequences.zip(lse.par_chunks(s.heads * s.seq)).map(|((out, dout), lse)| {
                let mut sums = vec![0.0; s.heads];
                let rows = out.chunks_exact(s.width).zip(dout.chunks_exact(s.width));
                for (row, (out, dout)) in rows.enumerate() {
                    let (token, head) = (row / s.heads, row % s.heads);
                    let probability = (sinks[head] - lse[head * s.seq + token]).exp();
                    sums[head] -= probability * math::dot(out, dout);
                }
                sums
            });
            sums.collect()
        });
        reduce::cpu::add_partials(&partials, dsinks, self.acc == Accumulate::Add);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let Self { shape: s, sinks, out, dout, lse, dsinks, acc } = self;
        let tokens = s.batch * s.seq;
        gpu.expect_act(sinks, s.heads);
        [out, dout].into_iter().for_each(|x| gpu.expect_act(x, tokens * s.heads * s.width));
        expect(lse, DType::F32, tokens * s.heads);
        expect_grad(dsinks, s.heads);
        let at_once = gpu.device.multiprocessors as usize * SINK_BLOCKS_PER_SM;
        let most = tokens.div_ceil(BLOCK_THREADS as usize / lanes(s)).max(1);
        let blocks = (at_once / s.heads).clamp(1, most);
        let partials = gpu.alloc(DType::F32, blocks * s.heads)?;
        let launch = Launch { grid: (blocks, s.heads, 1), block: (BLOCK_THREADS, 1), shared: 0 };
        let args = args![sinks, out, dout, lse, partials.all(), tokens, s.seq, s.heads, s.width, lanes(s)];
        // SAFETY: checked above; there is a row of partial sums for each block of a head.
        unsafe { gpu.launch("attention_sinks_bwd", launch, args) }?;
        reduce::cuda::column_sum_final(gpu, &partials, s.heads, &[dsinks], acc)
    }
}
