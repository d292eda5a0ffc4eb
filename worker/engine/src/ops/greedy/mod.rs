//! Greedy decoding on the device: the most likely token becomes the next step's input without involving the host.
//!
//! For each row: `id = argmax of its logits` (the lowest of equal ones, -1 if no logit is a number), `tokens = max(id,
//! 0)`, `positions = min(positions + 1, last)`. The bound keeps steps that are enqueued after the end of a sequence
//! within the cache.

pub(crate) mod cpu;
pub(crate) mod cuda;

use super::{Cuda, Op};
use crate::cpu::Threads;
use crate::error::Result;
use crate::tensor::Slice;

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
    fn cpu(self, _: &Threads) {
        cpu::run(self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::run(gpu, self)
    }
}
