//! The loss of pairs of documents, of which the first is preferred: Direct Preference Optimisation (Rafailov et al.,
//! 2023).
//!
//! The gain of a document is the sum of `reference - losses` over its tokens: the logarithm of the ratio of its
//! probabilities under the model and under the reference. With the margin `m = beta (gain of the first - gain of the
//! second)`, a pair has the loss `-log sigmoid(m)`. Its derivative by the loss of a token is `beta sigmoid(-m)` in the
//! first document, and `-beta sigmoid(-m)` in the second.
//!
//! The documents of a row are pairs, one after another. The last document is padding if it has no partner.

use xlaunch_pool::DType;

use super::{Cuda, Op};
use crate::cpu::{Access, Threads};
use crate::cuda::{KernelFile, Launch, Macro, args, expect, source};
use crate::error::Result;
use crate::tensor::Slice;

/// Threads of a block, which processes one row.
const PREFERENCE_THREADS: u32 = 512;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("preference/kernel.cu"),
    kernels: &["preference"],
    macros: &[Macro::int("PREFERENCE_THREADS", PREFERENCE_THREADS as usize)],
    dynamic_shared: &[],
};

/// Losses of pairs, and their derivatives by the losses of tokens.
#[derive(Clone, Copy, Debug)]
pub struct PreferenceLoss<'a> {
    /// B.
    pub batch: usize,
    /// T.
    pub seq: usize,
    /// Factor of the margins.
    pub beta: f32,
    /// (B, T) I32: index within the row of the last token of each token's document.
    pub last: Slice<'a>,
    /// (B, T) F32: losses of tokens under the model; 0 for those that do not count.
    pub losses: Slice<'a>,
    /// (B, T) F32: the same under the reference.
    pub reference: Slice<'a>,
    /// (B, T) F32: derivatives of the pairs' losses by those of tokens; 0 in the padding.
    pub weights: Slice<'a>,
    /// (3, B) F32: sums over the pairs of a row: of their losses, of those with a positive margin, and of margins.
    pub sums: Slice<'a>,
}

impl Op for PreferenceLoss<'_> {
    /// Runs on one thread.
    #[expect(clippy::cast_possible_truncation, reason = "the results are F32")]
    fn cpu(self, _: &Threads) {
        let (a, count) = (Access::new("preference"), self.batch * self.seq);
        let (last, losses) = (a.read_i32(self.last, count), a.read(self.losses, count));
        let (reference, weights) = (a.read(self.reference, count), a.write(self.weights, count));
        let (sums, beta) = (a.write(self.sums, 3 * self.batch), f64::from(self.beta));
        // Rows are filled from their start, also by bounds that no batch has.
        let next = |at: usize, first: usize| {
            usize::try_from(last[at + first]).map_or(first, |last| last.max(first)) + 1
        };
        for row in 0..self.batch {
            let (at, mut start, mut totals) = (row * self.seq, 0, [0.0; 3]);
            while start < self.seq {
                let middle = next(at, start);
                if middle >= self.seq {
                    weights[at + start..at + self.seq].fill(0.0);
                    break;
                }
                let end = next(at, middle);
                let gain = |tokens: std::ops::Range<usize>| -> f64 {
                    let tokens = at + tokens.start..at + tokens.end;
                    let pairs = reference[tokens.clone()].iter().zip(&losses[tokens]);
                    pairs.map(|(reference, loss)| f64::from(reference - loss)).sum()
                };
                let margin = beta * (gain(start..middle) - gain(middle..end));
                let slope = beta / (1.0 + margin.exp());
                weights[at + start..at + middle].fill(slope as f32);
                weights[at + middle..at + end].fill(-slope as f32);
                let loss = (-margin).max(0.0) + (-margin.abs()).exp().ln_1p();
                let pair = [loss, f64::from(u8::from(margin > 0.0)), margin];
                totals.iter_mut().zip(pair).for_each(|(total, value)| *total += value);
                start = end;
            }
            totals
                .iter()
                .enumerate()
                .for_each(|(index, total)| sums[index * self.batch + row] = *total as f32);
        }
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let Self { batch, seq, beta, last, losses, reference, weights, sums } = self;
        expect(last, DType::I32, batch * seq);
        [losses, reference, weights].into_iter().for_each(|tokens| expect(tokens, DType::F32, batch * seq));
        expect(sums, DType::F32, 3 * batch);
        let args = args![last, losses, reference, weights, sums, seq, beta];
        // SAFETY: checked above; indices of documents are below T by the operation's contract.
        unsafe { gpu.launch("preference", Launch::blocks(batch, PREFERENCE_THREADS), args) }
    }
}
