//! Loss on held-out data.
//!
//! The batches of an evaluation are numbered, and rank r of n evaluates batches r, r + n, and so on, so a batch has the
//! same sequences regardless of the number of ranks. Every rank gets the loss of every sequence, and adds the losses in
//! order in double precision: the result does not depend on the number of ranks. With `train.eval_tokens`, the number
//! of sequences does not depend on the batch size either.

use std::sync::Arc;

use xlaunch_comm::{Collective, Operation};
use xlaunch_engine::{DType, Tensor};
use xlaunch_spec::job::{JobSpec, TrainSection};

use super::division::Division;
use super::gathers::Gathers;
use super::replay::{Replay, Work};
use crate::data::{self, Order, Tokens};
use crate::error::Result;
use crate::fail::{self, Place};
use crate::model::{BackendHandle, Model, Rows};
use crate::optim::AdamW;
use crate::phase;

/// Buffers reused by all evaluations, and the captured graph of one batch.
#[derive(Debug)]
pub struct Evaluator {
    backend: BackendHandle,
    rows: Rows,
    /// Maximum number of sequences per evaluation, over all ranks.
    max_sequences: u64,
    tokens: Tensor,
    targets: Tensor,
    losses: Tensor,
    gathers: Gathers,
    /// True if a batch uses collectives, so that all ranks must run the same number of batches.
    together: bool,
    replay: Replay,
}

impl Evaluator {
    /// Allocates the buffers.
    pub fn new(backend: &BackendHandle, model: &Model, spec: &JobSpec, division: &Division) -> Result<Self> {
        let parts = model.layout.forward_parts();
        let rows = Rows { batch: spec.train.batch, seq: model.shape.seq };
        Ok(Self {
            rows,
            max_sequences: max_sequences(&spec.train, model.shape.seq),
            tokens: backend.alloc_persistent(DType::I32, rows.count())?,
            targets: backend.alloc_persistent(DType::I32, rows.count())?,
            losses: backend.alloc_persistent(DType::F32, rows.count())?,
            gathers: Gathers::new(division, &parts, spec.comm.overlap, true),
            together: division.weights.is_some(),
            replay: Replay::new(backend, spec.engine.exec),
            backend: backend.clone(),
        })
    }

    /// Returns the mean loss over the first sequences of `tokens` in file order, and the number of tokens in that mean.
    /// Uses the configured number of sequences, or all if there are fewer. Every rank calls it and gets the same
    /// result. Call it after the optimizer has [gathered](AdamW::gather) the model's weights.
    pub fn evaluate(
        &self,
        model: &Model,
        optimizer: &AdamW,
        collective: &mut dyn Collective,
        tokens: &Arc<Tokens>,
    ) -> Result<(f64, u64)> {
        let order = Order::new(tokens.len(), self.rows.seq, None);
        let sequences = order.windows().min(self.max_sequences);
        let mut losses = vec![0.0; usize::try_from(sequences).unwrap_or(usize::MAX)];
        self.evaluate_own_batches((model, optimizer), collective, tokens, &order, &mut losses)?;
        fail::at(Place::Evaluation);
        let gathered = self.backend.alloc(DType::F32, losses.len())?;
        self.backend.write_f32(gathered.all(), &losses)?;
        // The sum is exact: the loss of a sequence comes from one rank, and all others contribute 0.
        let buckets = vec![gathered.lend(0..losses.len())];
        collective.run(Operation::AllReduce { buckets, dtype: DType::F32 })?;
        self.backend.read_f32(gathered.all(), &mut losses)?;
        collective.check()?;
        Ok((mean(&losses), sequences * self.rows.seq as u64))
    }

    /// Writes the mean loss of every sequence that this rank evaluates to `losses`.
    fn evaluate_own_batches(
        &self,
        (model, optimizer): (&Model, &AdamW),
        collective: &mut dyn Collective,
        tokens: &Tokens,
        order: &Order,
        losses: &mut [f32],
    ) -> Result<()> {
        let Rows { batch, seq } = self.rows;
        let (rank, world) = (collective.rank(), collective.world_size());
        let schedule = data::Schedule { first: 0, rank, world, batch, seq };
        let mut token_losses = vec![0.0; self.rows.count()];
        let batches = losses.len().div_ceil(batch);
        let all = if self.together { batches.next_multiple_of(world) } else { batches };
        for (round, number) in (rank..all).step_by(world).enumerate() {
            // Sequences past the end repeat the first ones, and are ignored.
            let read = data::read(tokens, order, schedule, round as u64)?;
            self.backend.write_i32(self.tokens.all(), &read.tokens)?;
            self.backend.write_i32(self.targets.all(), &read.targets)?;
            self.run(model, optimizer, collective)?;
            self.backend.read_f32(self.losses.all(), &mut token_losses)?;
            let own = losses.get_mut(number * batch..).unwrap_or_default();
            for (loss, tokens) in own.iter_mut().zip(token_losses.chunks_exact(seq)) {
                #[expect(clippy::cast_possible_truncation, reason = "a collective sums F32")]
                let rounded = mean(tokens) as f32;
                *loss = rounded;
            }
            phase::advance();
        }
        Ok(())
    }

    /// Computes the losses of the batch that was written last.
    pub fn run(&self, model: &Model, optimizer: &AdamW, collective: &mut dyn Collective) -> Result<()> {
        self.replay.run(Work::Evaluate, || {
            let mut part = 0..;
            let acts = model.forward_with_gathers(self.rows, self.tokens.all(), || -> Result<()> {
                self.gathers.begin_part(part.next().unwrap_or(0), model, optimizer, collective).map(drop)
            })?;
            Ok(model.loss(&acts, self.targets.all(), self.losses.all())?)
        })
    }

    /// See [`Stepper::drop_graphs`](super::Stepper::drop_graphs).
    pub fn drop_graphs(&self) {
        self.replay.drop_graphs();
    }
}

/// Returns the maximum number of sequences of `seq` tokens in an evaluation.
fn max_sequences(train: &TrainSection, seq: usize) -> u64 {
    match train.eval_tokens {
        0 => (train.eval_batches as u64).saturating_mul(train.batch as u64),
        tokens => tokens.div_ceil(seq as u64),
    }
}

#[expect(clippy::cast_precision_loss, reason = "a count of losses")]
fn mean(losses: &[f32]) -> f64 {
    losses.iter().copied().map(f64::from).sum::<f64>() / losses.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evaluated_tokens_are_rounded_up_to_sequences_whatever_the_batch() {
        let sequences = |eval_tokens, batch| {
            max_sequences(&TrainSection { eval_tokens, batch, eval_batches: 3, ..Default::default() }, 32)
        };
        assert_eq!((sequences(0, 4), sequences(0, 5)), (12, 15));
        assert_eq!((sequences(320, 4), sequences(320, 5), sequences(321, 5)), (10, 10, 11));
        assert_eq!(sequences(1, 4), 1);
    }
}
