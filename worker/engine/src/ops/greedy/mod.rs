//! Greedy decoding on the device: the most likely token becomes the next step's input without involving the host.
//!
//! Computes for each row `id = argmax of its logits` (the lowest of equal ones, -1 if no logit is a number), `tokens =
//! max(id, 0)`, `positions = min(positions + 1, last)`. The bound keeps steps that are enqueued after the end of a
//! sequence within the cache.

use xlaunch_pool::DType;

use super::{Cuda, Op};
use crate::cpu::{Access, Threads};
use crate::cuda::{KernelFile, Launch, args, expect, source};
use crate::error::Result;
use crate::tensor::Slice;

/// Threads of a block, which processes one row.
const GREEDY_THREADS: u32 = 1024;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("greedy/kernel.cu"),
    kernels: &["greedy"],
    macros: &[],
    dynamic_shared: &[],
};

/// Selects the most likely token of every row.
#[derive(Clone, Copy, Debug)]
pub struct Greedy<'a> {
    /// N.
    pub rows: usize,
    /// V.
    pub vocab: usize,
    /// (N, Vp) F32, Vp >= V.
    pub logits: Slice<'a>,
    /// (N,) I32.
    pub tokens: Slice<'a>,
    /// (N,) I32.
    pub positions: Slice<'a>,
    /// The largest position.
    pub last: usize,
    /// (N,) F32, which holds ids exactly up to 2^24.
    pub ids: Slice<'a>,
}

impl Op for Greedy<'_> {
    /// Runs on one thread.
    #[expect(clippy::cast_precision_loss, reason = "ids are below 2^24")]
    fn cpu(self, _: &Threads) {
        let a = Access::new("greedy");
        let (tokens, positions) =
            (a.write_i32(self.tokens, self.rows), a.write_i32(self.positions, self.rows));
        let (logits, ids) = (a.read(self.logits, self.logits.len()), a.write(self.ids, self.rows));
        let last = i32::try_from(self.last).unwrap_or(i32::MAX);
        for (n, logits) in logits.chunks_exact(logits.len() / self.rows).enumerate() {
            let (mut best, mut largest) = (None, f32::NEG_INFINITY);
            for (id, logit) in logits[..self.vocab].iter().enumerate() {
                if *logit > largest {
                    (best, largest) = (Some(id), *logit);
                }
            }
            ids[n] = best.map_or(-1.0, |id| id as f32);
            tokens[n] = best.and_then(|id| i32::try_from(id).ok()).unwrap_or(0);
            positions[n] = (positions[n] + 1).min(last);
        }
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let padded = self.logits.len() / self.rows.max(1);
        assert!(padded >= self.vocab, "{padded} logits of {}", self.vocab);
        expect(self.logits, DType::F32, self.rows * padded);
        [self.tokens, self.positions].into_iter().for_each(|ids| expect(ids, DType::I32, self.rows));
        expect(self.ids, DType::F32, self.rows);
        let args = args![self.logits, self.tokens, self.positions, self.ids, self.vocab, padded, self.last];
        // SAFETY: checked above.
        unsafe { gpu.launch("greedy", Launch::blocks(self.rows, GREEDY_THREADS), args) }
    }
}
