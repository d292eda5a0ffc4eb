//! Loss on held-out data.
//!
//! The batches of an evaluation are numbered, and rank r of n evaluates batches r, r + n, and so on, so a batch has the
//! same sequences regardless of the number of ranks. Every rank gets the loss of every sequence, and adds the losses in
//! order in double precision: the result does not depend on the number of ranks. Each loss is weighted by its number of
//! targets. With `train.eval_tokens`, the number of sequences does not depend on the batch size either.

use xlaunch_comm::{Collective, Operation};
use xlaunch_engine::{DType, IGNORED, Tensor};
use xlaunch_spec::job::{JobSpec, TrainSection};

use super::batch_memory::BatchMemory;
use super::division::Division;
use super::gathers::Gathers;
use super::replay::{Replay, Work};
use crate::data::{self, HeldOut, Mixture};
use crate::error::Result;
use crate::fail::{self, Place};
use crate::model::{BackendHandle, Model, Progress};
use crate::optim::AdamW;
use crate::phase;

/// Buffers reused by all evaluations, and the captured graph of one batch.
#[derive(Debug)]
pub struct Evaluator {
    backend: BackendHandle,
    batch: BatchMemory,
    /// Maximum number of sequences per evaluation, over all ranks.
    max_sequences: u64,
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
        let batch = BatchMemory::new(backend, spec, model.shape.seq)?;
        Ok(Self {
            max_sequences: max_sequences(&spec.train, model.shape.seq),
            losses: backend.alloc_persistent(DType::F32, batch.rows().count())?,
            batch,
            gathers: Gathers::new(division, &parts, spec.comm.overlap, true),
            together: division.weights.is_some() || model.layout.expert_groups.size > 1,
            replay: Replay::new(backend, spec.engine.exec),
            backend: backend.clone(),
        })
    }

    /// Returns the mean loss over the first rows of the data, and the number of targets in that mean. Uses the data's
    /// share of the configured number of sequences, or all if there are fewer. Every rank calls it and gets the same
    /// result. Call it after the optimizer has [gathered](AdamW::gather) the model's weights.
    pub fn evaluate(
        &self,
        model: &Model,
        optimizer: &AdamW,
        collective: &mut dyn Collective,
        data: &HeldOut,
    ) -> Result<(f64, u64)> {
        let sequences = data.rows.rows().min(data.share_of(self.max_sequences));
        let sequences = usize::try_from(sequences).unwrap_or(usize::MAX);
        // The losses of all sequences, then their numbers of targets.
        let mut losses = vec![0.0; 2 * sequences];
        self.evaluate_own_batches((model, optimizer), collective, &data.rows, &mut losses)?;
        fail::at(Place::Evaluation);
        let gathered = self.backend.alloc(DType::F32, losses.len())?;
        self.backend.write_f32(gathered.all(), &losses)?;
        // The sums are exact: the loss of a sequence comes from one rank, and all others contribute 0.
        let buckets = vec![gathered.lend(0..losses.len())];
        collective.run(Operation::AllReduce { buckets, dtype: DType::F32 })?;
        self.backend.read_f32(gathered.all(), &mut losses)?;
        collective.check()?;
        let (losses, targets) = losses.split_at(sequences);
        Ok(weighted_mean(losses, targets))
    }

    /// Writes the mean loss and the number of targets of every sequence that this rank evaluates to the halves of
    /// `losses`.
    fn evaluate_own_batches(
        &self,
        (model, optimizer): (&Model, &AdamW),
        collective: &mut dyn Collective,
        held_out: &Mixture,
        losses: &mut [f32],
    ) -> Result<()> {
        let rows = self.batch.rows();
        let (batch, seq) = (rows.batch, rows.seq);
        let (rank, world) = (collective.rank(), collective.world_size());
        let schedule = data::Schedule { first: 0, rank, world, batch, accumulate: 1, seq };
        let mut token_losses = vec![0.0; rows.count()];
        let (losses, targets) = losses.split_at_mut(losses.len() / 2);
        let batches = losses.len().div_ceil(batch);
        let all = if self.together { batches.next_multiple_of(world) } else { batches };
        for (round, number) in (rank..all).step_by(world).enumerate() {
            // Sequences past the end repeat the first ones, and are ignored.
            let read = data::read(held_out, schedule, round as u64)?;
            self.batch.write(&self.backend, &read)?;
            self.run(model, optimizer, collective)?;
            self.backend.read_f32(self.losses.all(), &mut token_losses)?;
            let own = losses.get_mut(number * batch..).unwrap_or_default();
            let own_targets = targets.get_mut(number * batch..).unwrap_or_default();
            let sequences = token_losses.chunks_exact(seq).zip(read.targets.chunks_exact(seq));
            for ((loss, count), (losses, targets)) in own.iter_mut().zip(own_targets).zip(sequences) {
                (*loss, *count) = mean(losses, targets);
            }
            phase::advance();
        }
        Ok(())
    }

    /// Computes the losses of the batch that was written last.
    pub fn run(&self, model: &Model, optimizer: &AdamW, collective: &mut dyn Collective) -> Result<()> {
        self.replay.run(Work::Evaluate, || {
            let mut part = 0..;
            let progress = |progress| -> Result<()> {
                match progress {
                    Progress::NextPart => {
                        let part = part.next().unwrap_or(0);
                        self.gathers.begin_part(part, model, optimizer, collective).map(drop)
                    }
                    Progress::Exchange(exchange) => Ok(collective.exchange(exchange)?),
                    Progress::Finished(_) => Ok(()),
                }
            };
            let output = model.output_with_progress(self.batch.rows(), self.batch.tokens(), progress)?;
            Ok(model.loss(&output, self.batch.targets(), self.losses.all())?)
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

/// Returns the mean of the losses of a sequence, and the number of its targets that count. Ignored ones have loss 0.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "a collective sums F32")]
fn mean(losses: &[f32], targets: &[i32]) -> (f32, f32) {
    let count = targets.iter().filter(|target| **target != IGNORED).count();
    let total = losses.iter().copied().map(f64::from).sum::<f64>();
    ((total / count.max(1) as f64) as f32, count as f32)
}

/// Returns the mean over all targets from those of sequences, and the number of targets.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "counts of targets of a sequence are whole numbers below 2^24"
)]
fn weighted_mean(losses: &[f32], targets: &[f32]) -> (f64, u64) {
    let total = targets.iter().map(|count| *count as u64).sum();
    if targets.windows(2).all(|pair| pair[0] == pair[1]) {
        return (losses.iter().copied().map(f64::from).sum::<f64>() / losses.len() as f64, total);
    }
    let weighted = losses.iter().zip(targets).map(|(loss, count)| f64::from(*loss) * f64::from(*count));
    (weighted.sum::<f64>() / total as f64, total)
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
