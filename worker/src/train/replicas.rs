//! Arenas compared and checked across ranks, and shards gathered on rank 0.

use xlaunch_comm::{Collective, Sharding};
use xlaunch_engine::{Accumulate, DType, Sum, Tensor};

use crate::error::Result;
use crate::model::BackendHandle;

/// The largest absolute difference between this rank's `arena` and rank 0's. Every rank calls it.
pub fn max_difference_to_rank_0(
    backend: &BackendHandle,
    arena: &Tensor,
    collective: &mut dyn Collective,
) -> Result<f64> {
    let len = arena.len();
    let reference = backend.alloc(DType::F32, len)?;
    backend.cast(arena.all(), reference.all())?;
    collective.broadcast(reference.lend(0..len), 0)?;
    collective.wait_all()?;
    let (mut theirs, mut ours) = (vec![0.0; len], vec![0.0; len]);
    backend.read_f32(reference.all(), &mut theirs)?;
    backend.read_f32(arena.all(), &mut ours)?;
    let differences = theirs.iter().zip(&ours).map(|(a, b)| f64::from((a - b).abs()));
    Ok(differences.fold(0.0, f64::max))
}

/// Whether every value of these tensors is finite on every rank. A sum that overflows fp32 counts as not finite. Every
/// rank calls it and gets the same answer.
pub(super) fn all_finite(
    backend: &BackendHandle,
    tensors: [&Tensor; 3],
    collective: &mut dyn Collective,
) -> Result<bool> {
    let sum = backend.alloc(DType::F32, 1)?;
    backend.zero(sum.all())?;
    for x in tensors {
        backend.sum(Sum { x: x.all(), scale: 1.0, out: sum.all(), acc: Accumulate::Add })?;
    }
    collective.all_reduce(sum.lend(0..1), DType::F32)?;
    collective.wait_all()?;
    let mut total = [0.0];
    backend.read_f32(sum.all(), &mut total)?;
    collective.check()?;
    Ok(total[0].is_finite())
}

/// Gathers the arena of which every rank has a `shard`; `Some` on rank 0. It does so bucket by bucket, so that no
/// device needs memory for the whole arena. Every rank calls it.
pub(super) fn gather_on_rank_0(
    backend: &BackendHandle,
    sharding: &Sharding,
    shard: &Tensor,
    collective: &mut dyn Collective,
) -> Result<Option<Vec<f32>>> {
    let is_rank_0 = collective.rank() == 0;
    let mut arena = vec![0.0; if is_rank_0 { sharding.arena_len() } else { 0 }];
    for bucket in sharding.plan().buckets() {
        let own = sharding.in_shard(bucket);
        let gathered = match sharding.is_sharded() {
            false => None,
            true => {
                let whole = backend.alloc(shard.dtype(), bucket.len())?;
                collective.all_gather(shard.lend(own.clone()), whole.lend(0..bucket.len()))?;
                collective.wait_all()?;
                Some(whole)
            }
        };
        if is_rank_0 {
            let values = gathered.as_ref().map_or_else(|| shard.slice(own), Tensor::all);
            backend.read_f32(values, &mut arena[bucket.clone()])?;
        }
    }
    collective.check()?;
    Ok(is_rank_0.then_some(arena))
}
