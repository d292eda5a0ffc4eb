//! A step whose loss or gradients are not finite on one rank does not change the state of any rank, sharded or not, on
//! CPU and GPU. With the limit reached, neither does the step that was enqueued after it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{Rank, on_ranks, spec};
use xlaunch_comm::Local;
use xlaunch_engine::testing::require_gpu;
use xlaunch_engine::{Backend, CudaOptions, PoolMode, Precision};
use xlaunch_spec::job::NonFinite;
use xlaunch_worker::model::BackendHandle;

xlaunch_harness::suite! {
    bad_step_on_one_rank_changes_the_state_of_no_rank;
    needs require_gpu: bad_step_in_a_graph_changes_nothing;
}

/// Number of good steps: enough for steps to be captured on a GPU.
const GOOD_STEPS: u64 = 4;

/// Runs two steps. The first is bad because one weight of the last rank is `bad`; the second is enqueued before the
/// results of the first are read.
fn check(mut rank: Rank, nonfinite: NonFinite, bad: f32) {
    for step in 0..GOOD_STEPS {
        let pending = rank.start(step);
        assert!(rank.finish(pending));
    }
    let before = rank.state();
    let is_last = rank.collective.rank() + 1 == rank.collective.world_size();
    let weight = is_last.then(|| rank.set_first_weight(bad));
    let first = rank.start(GOOD_STEPS);
    if let Some(weight) = weight {
        rank.set_first_weight(weight);
    }
    let after_bad_step = rank.state();
    let second = rank.start(GOOD_STEPS + 1);
    assert!(!rank.finish(first), "{bad} is noticed");
    assert!(rank.finish(second));
    assert!(after_bad_step == before, "the bad step changed the state");
    assert_eq!(rank.state() != before, nonfinite == NonFinite::Skip, "the step after it, {nonfinite:?}");
    rank.stepper.drop_graphs();
    rank.collective.finalize().unwrap();
}

fn bad_step_on_one_rank_changes_the_state_of_no_rank() {
    for world in [1, 2, 4] {
        for sharded in [false, true] {
            for (nonfinite, bad) in [(NonFinite::Stop, f32::NAN), (NonFinite::Skip, 3e38)] {
                let dir = tempfile::tempdir().unwrap();
                let mut spec = spec(dir.path(), sharded);
                spec.train.nonfinite = nonfinite;
                on_ranks(&spec, dir.path(), world, |rank| check(rank, nonfinite, bad));
            }
        }
    }
}

fn bad_step_in_a_graph_changes_nothing() {
    for (nonfinite, bad) in [(NonFinite::Stop, f32::NAN), (NonFinite::Skip, 3e38)] {
        let dir = tempfile::tempdir().unwrap();
        let mut spec = spec(dir.path(), false);
        spec.train.nonfinite = nonfinite;
        let options = CudaOptions::new(Precision::Fp32, PoolMode::Plan);
        let backend = BackendHandle::new(Backend::cuda(0, options).unwrap());
        check(Rank::new(backend, &spec, Box::new(Local)), nonfinite, bad);
    }
}
