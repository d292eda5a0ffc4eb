//! Comparisons and agreements of ranks between steps.

use std::ops::Range;

use xlaunch_comm::{Among, Collective, Operation, Sharding};
use xlaunch_engine::{Accumulate, Cast, DType, Scale, Sum, Tensor};

use crate::error::Result;
use crate::model::BackendHandle;

/// Returns the ranges of a tensor with `len` parameters, and the ranks that have each of them.
pub(super) fn ranges(sharding: &Sharding, len: usize) -> Vec<(Among, Range<usize>)> {
    if sharding.groups().size == 1 {
        return vec![(Among::All, 0..len)];
    }
    let of = |among| sharding.ranges(among).into_iter().map(move |range| (among, range));
    [Among::All, Among::Peers].into_iter().flat_map(of).collect()
}

/// Returns the largest absolute difference between this rank's `arena` and rank 0's, in the ranges that both have.
/// Every rank calls it.
pub fn max_difference_to_rank_0(
    backend: &BackendHandle,
    sharding: &Sharding,
    arena: &Tensor,
    collective: &mut dyn Collective,
) -> Result<f64> {
    let len = arena.len();
    let reference = backend.alloc(DType::F32, len)?;
    backend.run(Cast { x: arena.all(), y: reference.all() })?;
    collective.run(Operation::Broadcast { elements: reference.lend(0..len), root: 0 })?;
    let (mut theirs, mut ours) = (vec![0.0; len], vec![0.0; len]);
    backend.read_f32(reference.all(), &mut theirs)?;
    backend.read_f32(arena.all(), &mut ours)?;
    let is_shared = |(among, _): &(Among, Range<usize>)| sharding.groups().set(*among) == 0;
    let shared = ranges(sharding, len).into_iter().filter(is_shared).map(|(_, range)| range);
    let pairs = shared.flat_map(|range| theirs[range.clone()].iter().zip(&ours[range]));
    let differences = pairs.map(|(a, b)| f64::from((a - b).abs()));
    Ok(differences.fold(0.0, f64::max))
}

/// Facts that all ranks have to know before they save a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Survey {
    /// True if every value of the tensors is finite on every rank. A sum that overflows fp32 counts as not finite.
    pub(super) finite: bool,
    /// True if any rank is still writing the previous checkpoint.
    pub(super) busy: bool,
}

/// Combines the answers of all ranks. Every rank calls it and gets the same result.
pub(super) fn survey(
    backend: &BackendHandle,
    tensors: [&Tensor; 3],
    busy: bool,
    collective: &mut dyn Collective,
) -> Result<Survey> {
    let sums = backend.alloc(DType::F32, 2)?;
    backend.write_f32(sums.all(), &[0.0, f32::from(u8::from(busy))])?;
    for x in tensors {
        backend.run(Sum {
            x: x.all(),
            scale: Scale::Constant(1.0),
            out: sums.slice(0..1),
            acc: Accumulate::Add,
        })?;
    }
    let [values, busy] = totals(backend, &sums, collective)?;
    Ok(Survey { finite: values.is_finite(), busy: busy > 0.0 })
}

/// Returns whether `flag` is true on any rank. Every rank calls it.
pub(super) fn any(backend: &BackendHandle, flag: bool, collective: &mut dyn Collective) -> Result<bool> {
    let sum = backend.alloc(DType::F32, 1)?;
    backend.write_f32(sum.all(), &[f32::from(u8::from(flag))])?;
    let [count] = totals(backend, &sum, collective)?;
    Ok(count > 0.0)
}

/// Sums these numbers over all ranks.
fn totals<const N: usize>(
    backend: &BackendHandle,
    sums: &Tensor,
    collective: &mut dyn Collective,
) -> Result<[f32; N]> {
    collective.run(Operation::AllReduce { buckets: vec![sums.lend(0..N)], dtype: DType::F32 })?;
    let mut totals = [0.0; N];
    backend.read_f32(sums.all(), &mut totals)?;
    collective.check()?;
    Ok(totals)
}
