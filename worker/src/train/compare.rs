//! `observe.check_every`: compares the parameters of all ranks by a checksum.
//!
//! ```text
//! parameters --device--> 64-bit checksum --all-gather--> checksums of all ranks --> the ranks that differ
//! ```
//! Every rank compares the same checksums, so all ranks reach the same result.

use std::collections::BTreeSet;

use xlaunch_comm::{Collective, Operation};
use xlaunch_engine::{CHECKSUM_DIGITS, Checksum, DType};

use super::replicas::ranges;
use crate::error::{Result, WorkerError};
use crate::model::{BackendHandle, Model};
use crate::optim::AdamW;

/// Compares the parameters after step `step`, numbered from 1. With a sharded optimizer these are the gathered weights.
/// Every rank calls it.
///
/// # Errors
/// If they differ; the error is the same on every rank.
pub fn compare_replicas(
    backend: &BackendHandle,
    model: &Model,
    optimizer: &AdamW,
    collective: &mut dyn Collective,
    step: u64,
) -> Result<()> {
    let world = collective.world_size();
    if world == 1 {
        return Ok(());
    }
    optimizer.gather(model, collective)?;
    let (sharding, replica) = (optimizer.sharding(), optimizer.replica(model));
    let ranges = ranges(sharding, replica.len());
    let own = backend.alloc(DType::F32, ranges.len() * CHECKSUM_DIGITS)?;
    let all = backend.alloc(DType::F32, world * own.len())?;
    for (index, (_, range)) in ranges.iter().enumerate() {
        let out = own.slice(index * CHECKSUM_DIGITS..(index + 1) * CHECKSUM_DIGITS);
        backend.run(Checksum { x: replica.slice(range.clone()), out })?;
    }
    let buckets = vec![[own.lend(0..own.len()), all.lend(0..all.len())]];
    collective.run(Operation::AllGather { buckets })?;
    let mut digits = vec![0.0; all.len()];
    backend.read_f32(all.all(), &mut digits)?;
    collective.check()?;
    let checksums: Vec<&[f32]> = digits.chunks_exact(own.len()).collect();
    let mut differing_ranks = BTreeSet::new();
    for (index, (among, _)) in ranges.iter().enumerate() {
        let sets = sharding.groups().sets(*among);
        for set in &sets {
            let of = |rank: &usize| &checksums[*rank][index * CHECKSUM_DIGITS..(index + 1) * CHECKSUM_DIGITS];
            let different = differing(&set.iter().map(of).collect::<Vec<_>>());
            differing_ranks.extend(different.into_iter().map(|member| set[member]));
        }
    }
    let ranks: Vec<u32> = differing_ranks.into_iter().filter_map(|rank| u32::try_from(rank).ok()).collect();
    if ranks.is_empty() { Ok(()) } else { Err(WorkerError::ReplicasDiffer { step, ranks }) }
}

/// Returns the ranks whose checksum is not that of the largest group of equal ones; all ranks if no group is the
/// largest.
fn differing<T: PartialEq>(checksums: &[T]) -> Vec<usize> {
    let group_size = |checksum: &T| checksums.iter().filter(|other| *other == checksum).count();
    let sizes: Vec<usize> = checksums.iter().map(group_size).collect();
    let largest = sizes.iter().copied().max().unwrap_or(0);
    // Each rank of a group counts the whole group, so a single group of the largest size has that number of ranks.
    let unique = sizes.iter().filter(|size| **size == largest).count() == largest;
    (0..).zip(sizes).filter(|(_, size)| !unique || *size != largest).map(|(rank, _)| rank).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_outside_of_the_largest_group_differ() {
        assert_eq!(differing(&[7, 7, 7, 7]), [0; 0]);
        assert_eq!(differing(&[7, 7, 1, 7]), [2]);
        assert_eq!(differing(&[7, 2, 1, 7]), [1, 2]);
    }

    #[test]
    fn all_ranks_differ_if_no_group_is_the_largest() {
        assert_eq!(differing(&[7, 1]), [0, 1]);
        assert_eq!(differing(&[7, 1, 7, 1]), [0, 1, 2, 3]);
        assert_eq!(differing(&[7, 1, 2]), [0, 1, 2]);
    }
}
