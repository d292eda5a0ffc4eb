//! Loss on held-out data.

use std::sync::Arc;

use xlaunch_comm::Collective;
use xlaunch_engine::{Accumulate, DType, Tensor};
use xlaunch_proto::spec::JobSpec;

use super::replay::{Replay, Work};
use crate::data::{self, Order, Tokens};
use crate::error::Result;
use crate::model::{BackendHandle, Model, Rows};
use crate::phase;

/// Buffers that all evaluations reuse, and the captured graph of one batch.
#[derive(Debug)]
pub struct Evaluator {
    backend: BackendHandle,
    rows: Rows,
    /// Maximum number of batches per rank and evaluation.
    batches: u64,
    tokens: Tensor,
    targets: Tensor,
    losses: Tensor,
    result: Tensor,
    replay: Replay,
}

impl Evaluator {
    /// Allocates the buffers.
    pub fn new(backend: &BackendHandle, model: &Model, spec: &JobSpec) -> Result<Self> {
        let rows = Rows { batch: spec.train.batch, seq: model.shape.seq };
        Ok(Self {
            rows,
            batches: spec.train.eval_batches.max(1) as u64,
            tokens: backend.alloc_persistent(DType::I32, rows.count())?,
            targets: backend.alloc_persistent(DType::I32, rows.count())?,
            losses: backend.alloc_persistent(DType::F32, rows.count())?,
            result: backend.alloc_persistent(DType::F32, 1)?,
            replay: Replay::new(backend, spec.engine.exec),
            backend: backend.clone(),
        })
    }

    /// The mean loss over the first `train.eval_batches` batches per rank of `tokens` in file order (fewer if there are
    /// fewer, but at least one), and the number of tokens in that mean. Every rank calls it and gets the same result.
    pub fn evaluate(
        &self,
        model: &Model,
        collective: &mut dyn Collective,
        tokens: &Arc<Tokens>,
    ) -> Result<(f32, u64)> {
        let (rank, world) = (collective.rank(), collective.world_size());
        let order = Order::new(tokens.len(), self.rows.seq, None);
        let per_round = (self.rows.batch * world) as u64;
        let rounds = (order.windows() / per_round).clamp(1, self.batches);
        let schedule = data::Schedule { first: 0, rank, world, batch: self.rows.batch, seq: self.rows.seq };
        self.backend.zero(self.result.all())?;
        for round in 0..rounds {
            let batch = data::read(tokens, &order, schedule, round)?;
            self.backend.write_i32(self.tokens.all(), &batch.tokens)?;
            self.backend.write_i32(self.targets.all(), &batch.targets)?;
            self.replay.run(Work::Evaluate, || {
                let acts = model.forward(self.rows, self.tokens.all())?;
                model.loss(&acts, self.targets.all(), self.losses.all(), None)?;
                Ok(model.mean_loss(&self.losses, 1.0, self.result.all(), Accumulate::Add)?)
            })?;
            phase::advance();
        }
        collective.all_reduce(self.result.lend(0..1), DType::F32)?;
        collective.wait_all()?;
        let mut sum = [0.0];
        self.backend.read_f32(self.result.all(), &mut sum)?;
        #[expect(clippy::cast_precision_loss, reason = "numbers of ranks and rounds are small")]
        let mean = sum[0] / (rounds * world as u64) as f32;
        Ok((mean, rounds * per_round * self.rows.seq as u64))
    }

    /// As [`Stepper::drop_graphs`](super::Stepper::drop_graphs).
    pub fn drop_graphs(&self) {
        self.replay.drop_graphs();
    }
}
