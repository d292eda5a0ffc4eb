//! Arenas between ranks: whether all hold the same, and what each holds a share of.

use xlaunch_comm::{Collective, Sharding};
use xlaunch_engine::{DType, Tensor};

use crate::error::Result;
use crate::model::BackendHandle;

/// Largest difference between this rank's `arena` and rank 0's. Every rank calls it.
pub fn largest_difference(
    backend: &BackendHandle,
    arena: &Tensor,
    collective: &mut dyn Collective,
) -> Result<f64> {
    let len = arena.len();
    let reference = backend.alloc(DType::F32, len)?;
    backend.cast(arena.all(), reference.all())?;
    collective.broadcast(reference.lend(0..len), 0)?;
    collective.finish()?;
    let (mut theirs, mut ours) = (vec![0.0; len], vec![0.0; len]);
    backend.read_f32(reference.all(), &mut theirs)?;
    backend.read_f32(arena.all(), &mut ours)?;
    let differences = theirs.iter().zip(&ours).map(|(a, b)| f64::from((a - b).abs()));
    Ok(differences.fold(0.0, f64::max))
}

/// On rank 0, the arena of which every rank has a `share`; bucket by bucket, so that no device holds all of it. Every rank
/// calls it.
pub(super) fn on_rank_0(
    backend: &BackendHandle,
    sharding: &Sharding,
    share: &Tensor,
    collective: &mut dyn Collective,
) -> Result<Option<Vec<f32>>> {
    let here = collective.rank() == 0;
    let mut arena = vec![0.0; if here { sharding.arena_len() } else { 0 }];
    for bucket in sharding.plan().buckets() {
        let part = sharding.in_share(bucket);
        let gathered = match sharding.is_whole() {
            true => None,
            false => {
                let whole = backend.alloc(share.dtype(), bucket.len())?;
                collective.all_gather(share.lend(part.clone()), whole.lend(0..bucket.len()))?;
                collective.finish()?;
                Some(whole)
            }
        };
        if here {
            let values = gathered.as_ref().map_or_else(|| share.slice(part), Tensor::all);
            backend.read_f32(values, &mut arena[bucket.clone()])?;
        }
    }
    collective.check()?;
    Ok(here.then_some(arena))
}
