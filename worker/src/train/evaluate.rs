//! Loss on held-out data.

use std::sync::Arc;

use xlaunch_comm::Collective;
use xlaunch_engine::{Accumulate, DType};
use xlaunch_proto::spec::JobSpec;

use crate::data::{self, Order, Tokens};
use crate::error::Result;
use crate::model::{BackendHandle, Model, Rows};

/// Mean loss over the first `train.eval_batches` batches per rank of `tokens` in file order, or as many as there are,
/// at least one; and the number of tokens it is the mean of. Every rank calls it and gets the same.
pub fn evaluate(
    backend: &BackendHandle,
    model: &Model,
    collective: &mut dyn Collective,
    tokens: &Arc<Tokens>,
    spec: &JobSpec,
) -> Result<(f32, u64)> {
    let rows = Rows { batch: spec.train.batch, seq: model.shape.seq };
    let (rank, world) = (collective.rank(), collective.world());
    let order = Order::new(tokens.len(), rows.seq, None);
    let per_round = (rows.batch * world) as u64;
    let rounds = (order.windows() / per_round).clamp(1, spec.train.eval_batches.max(1) as u64);
    let schedule = data::Schedule { first: 0, rank, world, batch: rows.batch, seq: rows.seq };

    let device = |dtype, len| backend.alloc(dtype, len);
    let (ids, targets) = (device(DType::I32, rows.count())?, device(DType::I32, rows.count())?);
    let (losses, result) = (device(DType::F32, rows.count())?, device(DType::F32, 1)?);
    backend.zero(result.all())?;
    #[expect(clippy::cast_precision_loss, reason = "numbers of ranks and rounds are small")]
    let share = 1.0 / (rounds * world as u64) as f32;
    for round in 0..rounds {
        let batch = data::read(tokens, &order, schedule, round)?;
        backend.write_i32(ids.all(), &batch.tokens)?;
        backend.write_i32(targets.all(), &batch.targets)?;
        let acts = model.forward(rows, ids.all())?;
        model.loss(&acts, targets.all(), losses.all(), None)?;
        model.mean_loss(&losses, share, result.all(), Accumulate::Add)?;
    }
    collective.all_reduce(result.lend(0..1), DType::F32)?;
    collective.finish()?;
    let mut loss = [0.0];
    backend.read_f32(result.all(), &mut loss)?;
    Ok((loss[0], rounds * per_round * rows.seq as u64))
}
