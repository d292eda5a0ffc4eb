//! Loss on held-out data.
//!
//! The batches of an evaluation are numbered, and rank r of n evaluates batches r, r + n, and so on, so a batch has the
//! same sequences regardless of the number of ranks. Every rank gets the loss of every sequence, and adds the losses in
//! order in double precision: the result does not depend on the number of ranks. Each loss is weighted by its number of
//! targets. With `train.eval_tokens`, the number of sequences does not depend on the batch size either.

use std::ops::Range;
use std::rc::Rc;

use xlaunch_comm::{Collective, Operation};
use xlaunch_engine::{DType, IGNORED, Tensor};
use xlaunch_spec::job::{JobSpec, TrainSection};

use super::batch_memory::BatchMemory;
use super::division::Division;
use super::gathers::Gathers;
use super::preferences::{PairSum, Preferences};
use super::replay::{Replay, Work};
use crate::data::{self, HeldOut, Mixture};
use crate::error::Result;
use crate::fail::{self, Place};
use crate::model::{BackendHandle, Model, Progress, Rows};
use crate::optim::AdamW;
use crate::phase;

/// Number of values of a sequence: its loss, targets, and pairs in the right order.
const VALUES: usize = 3;

/// The result of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// Mean loss over all targets, or pairs of answers.
    pub loss: f64,
    /// Number of targets, or pairs, in that mean.
    pub targets: u64,
    /// Share of pairs in the right order, if the job trains on preferences.
    pub accuracy: Option<f64>,
}

/// Buffers reused by all evaluations, and the captured graph of one batch.
#[derive(Debug)]
pub struct Evaluator {
    backend: BackendHandle,
    batch: BatchMemory,
    /// Maximum number of sequences per evaluation, over all ranks.
    max_sequences: u64,
    losses: Tensor,
    /// `None` unless the job trains on preferences.
    preferences: Option<Rc<Preferences>>,
    gathers: Gathers,
    /// True if a batch uses collectives, so that all ranks must run the same number of batches.
    together: bool,
    replay: Replay,
}

impl Evaluator {
    /// Allocates the buffers.
    pub fn new(
        backend: &BackendHandle,
        model: &Model,
        spec: &JobSpec,
        division: &Division,
        preferences: Option<Rc<Preferences>>,
    ) -> Result<Self> {
        let parts = model.layout.forward_parts();
        let batch = BatchMemory::new(backend, spec, model.shape.seq)?;
        Ok(Self {
            max_sequences: max_sequences(&spec.train, model.shape.seq),
            losses: backend.alloc_persistent(DType::F32, batch.rows().count())?,
            preferences,
            batch,
            gathers: Gathers::new(division, &parts, spec.comm.overlap, true),
            together: division.weights.is_some() || model.layout.expert_groups.size > 1,
            replay: Replay::new(backend, spec.engine.exec),
            backend: backend.clone(),
        })
    }

    /// Evaluates the first rows of the data: its share of the configured number of sequences, or all if there are
    /// fewer. Every rank calls it and gets the same result. Call it after the optimizer has [gathered](AdamW::gather)
    /// the model's weights.
    pub fn evaluate(
        &self,
        model: &Model,
        optimizer: &AdamW,
        collective: &mut dyn Collective,
        data: &HeldOut,
    ) -> Result<Evaluation> {
        let sequences = data.rows.rows().min(data.share_of(self.max_sequences));
        let sequences = usize::try_from(sequences).unwrap_or(usize::MAX);
        // The losses of all sequences, then their numbers of targets, and of pairs in the right order.
        let mut losses = vec![0.0; VALUES * sequences];
        self.evaluate_own_batches((model, optimizer), collective, &data.rows, &mut losses)?;
        fail::at(Place::Evaluation);
        let gathered = self.backend.alloc(DType::F32, losses.len())?;
        self.backend.write_f32(gathered.all(), &losses)?;
        // The sums are exact: the loss of a sequence comes from one rank, and all others contribute 0.
        let buckets = vec![gathered.lend(0..losses.len())];
        collective.run(Operation::AllReduce { buckets, dtype: DType::F32 })?;
        self.backend.read_f32(gathered.all(), &mut losses)?;
        collective.check()?;
        let (losses, rest) = losses.split_at(sequences);
        let (targets, preferred) = rest.split_at(sequences);
        let (loss, targets) = weighted_mean(losses, targets);
        let preferred: f64 = preferred.iter().copied().map(f64::from).sum();
        #[expect(clippy::cast_precision_loss, reason = "a share")]
        let accuracy = self.preferences.as_ref().map(|_| preferred / targets as f64);
        Ok(Evaluation { loss, targets, accuracy })
    }

    /// Writes the mean loss, the number of targets, and that of pairs in the right order, of every sequence that this
    /// rank evaluates to the parts of `values`.
    fn evaluate_own_batches(
        &self,
        (model, optimizer): (&Model, &AdamW),
        collective: &mut dyn Collective,
        held_out: &Mixture,
        values: &mut [f32],
    ) -> Result<()> {
        let rows = self.batch.rows();
        let (batch, seq) = (rows.batch, rows.seq);
        let (rank, world) = (collective.rank(), collective.world_size());
        let schedule = data::Schedule { first: 0, rank, world, batch, accumulate: 1, seq };
        let mut token_losses = vec![0.0; rows.count()];
        let sequences = values.len() / VALUES;
        let batches = sequences.div_ceil(batch);
        let all = if self.together { batches.next_multiple_of(world) } else { batches };
        for (round, number) in (rank..all).step_by(world).enumerate() {
            // Sequences past the end repeat the first ones, and are ignored.
            let read = data::read(held_out, schedule, round as u64)?;
            self.batch.write(&self.backend, &read)?;
            self.run(model, optimizer, collective)?;
            let own = number * batch..sequences.min((number + 1) * batch);
            let results = match &self.preferences {
                Some(preferences) => self.pair_results(preferences, held_out, own.clone())?,
                None => {
                    self.backend.read_f32(self.losses.all(), &mut token_losses)?;
                    let rows = token_losses.chunks_exact(seq).zip(read.targets.chunks_exact(seq));
                    rows.map(|(losses, targets)| mean(losses, targets)).collect()
                }
            };
            for (sequence, result) in own.zip(results) {
                for (part, value) in result.into_iter().enumerate() {
                    values[part * sequences + sequence] = value;
                }
            }
            phase::advance();
        }
        Ok(())
    }

    /// Returns the mean loss of the pairs, their number, and that of those in the right order, of each of these
    /// sequences, which are the first of the batch that was run last.
    #[expect(clippy::cast_precision_loss, reason = "a collective sums F32")]
    fn pair_results(
        &self,
        preferences: &Preferences,
        held_out: &Mixture,
        sequences: Range<usize>,
    ) -> Result<Vec<[f32; VALUES]>> {
        let Rows { batch, seq, .. } = self.batch.rows();
        let (mut losses, mut preferred) = (vec![0.0; batch], vec![0.0; batch]);
        self.backend.read_f32(preferences.sums(PairSum::Losses), &mut losses)?;
        self.backend.read_f32(preferences.sums(PairSum::Preferred), &mut preferred)?;
        let results = sequences.zip(losses.iter().zip(preferred)).map(|(sequence, (loss, preferred))| {
            let pairs = held_out.targets(seq, sequence as u64)? as f32;
            Ok([loss / pairs.max(1.0), pairs, preferred])
        });
        results.collect()
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
            let (rows, tokens, targets) = (self.batch.rows(), self.batch.tokens(), self.batch.targets());
            if let Some(preferences) = &self.preferences {
                preferences.run_reference(rows, tokens, targets)?;
            }
            let output = model.output_with_progress(rows, tokens, progress)?;
            model.loss(&output, targets, self.losses.all())?;
            match &self.preferences {
                Some(preferences) => preferences.compare(rows, self.losses.all()).map(drop),
                None => Ok(()),
            }
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
fn mean(losses: &[f32], targets: &[i32]) -> [f32; VALUES] {
    let count = targets.iter().filter(|target| **target != IGNORED).count();
    let total = losses.iter().copied().map(f64::from).sum::<f64>();
    [(total / count.max(1) as f64) as f32, count as f32, 0.0]
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
