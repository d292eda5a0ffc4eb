//! `observe.check_every` detects a rank whose parameters differ in one bit, and all ranks name that rank.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{Rank, on_ranks, spec};
use xlaunch_worker::error::WorkerError;
use xlaunch_worker::train::compare_replicas;

/// Trains one step, flips the lowest bit of a weight on these ranks, and returns the ranks that the error names.
fn compare_after_flip(rank: &mut Rank, flipped: &[usize]) -> Option<String> {
    let pending = rank.start(0);
    assert!(rank.finish(pending));
    if flipped.contains(&rank.collective.rank()) {
        let weight = rank.set_first_weight(0.0);
        rank.set_first_weight(f32::from_bits(weight.to_bits() ^ 1));
    }
    let Rank { backend, model, optimizer, collective, .. } = rank;
    match compare_replicas(backend, model, optimizer, &mut **collective, 1) {
        Ok(()) => None,
        Err(error @ WorkerError::ReplicasDiffer { .. }) => Some(error.to_string()),
        Err(other) => panic!("{other}"),
    }
}

fn check(world: usize, sharded: bool, flipped: &[usize], expected: Option<&str>) {
    let dir = tempfile::tempdir().unwrap();
    on_ranks(&spec(dir.path(), sharded), dir.path(), world, |mut rank| {
        let found = compare_after_flip(&mut rank, flipped);
        let named = found.as_deref().map(|text| text.split(';').next().unwrap_or_default());
        assert_eq!(named, expected, "rank {} of {world}, sharded {sharded}", rank.collective.rank());
        rank.collective.finalize().unwrap();
    });
}

#[test]
fn equal_replicas_pass() {
    for world in [1, 2, 4] {
        for sharded in [false, true] {
            check(world, sharded, &[], None);
        }
    }
}

#[test]
fn rank_with_a_flipped_bit_is_named_on_every_rank() {
    check(4, false, &[2], Some("replicas differ after step 1: rank 2"));
    check(3, false, &[0], Some("replicas differ after step 1: rank 0"));
    check(2, false, &[1], Some("replicas differ after step 1: ranks 0-1"));
}

#[test]
fn flipped_bit_of_a_shard_reaches_all_ranks_alike() {
    check(2, true, &[1], None);
}
