//! The part of each rank (`comm.shard`), and the positions of buckets that are not all in memory.

use std::ops::Range;

use xlaunch_comm::{Groups, Sharding, Slots, bucket};
use xlaunch_engine::{DType, GROUP_CHUNK};
use xlaunch_spec::job::{JobSpec, Shard, WireDtype};

use crate::model::layout::{ALIGN, Layout};

/// Size limit of the first bucket, unless the general limit is smaller: a small bucket lets communication start early
/// in backward.
const FIRST_BUCKET_BYTES: usize = 1 << 20;

/// Division of a job among its ranks.
#[derive(Clone, Debug)]
pub struct Division {
    /// Parameters that this rank updates.
    pub sharding: Sharding,
    /// Memory for the gradients of a few blocks; `None` if there is memory for all.
    pub gradients: Option<Slots>,
    /// Memory for the weights of a few blocks; `None` if there is memory for all.
    pub weights: Option<Slots>,
}

impl Division {
    /// Divides the trained parameters of a job with this layout among `ranks` ranks, as `shard` says. The buckets do
    /// not depend on `shard`, so the order in which gradients are summed does not either.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "positive by JobSpec::check; a cap above all memory means a single bucket"
    )]
    pub fn new(
        spec: &JobSpec,
        layout: &Layout,
        activations: DType,
        rank: usize,
        ranks: usize,
        shard: Shard,
    ) -> Self {
        let cap = (spec.comm.bucket_mb * f64::from(1 << 20)) as usize;
        let size = wire_dtype(spec, activations).size();
        let plan = bucket::Plan::of_ranks(layout.ends_among(), ALIGN, size, cap, FIRST_BUCKET_BYTES);
        let groups = Groups { rank, world: ranks, size: layout.expert_groups.size };
        let slots = (shard >= Shard::Gradients).then(|| Slots::shared(&plan, &parts(layout), &layout.kept()));
        Self {
            weights: slots.clone().filter(|_| shard >= Shard::Parameters),
            gradients: slots,
            sharding: match shard {
                Shard::Auto | Shard::None => Sharding::replicated(plan, groups),
                _ => Sharding::new(plan, GROUP_CHUNK, groups),
            },
        }
    }

    /// Returns the value of `comm.shard` that describes the division; empty if nothing is divided.
    pub fn sharded(&self) -> &'static str {
        match self {
            Self { weights: Some(_), .. } => "parameters",
            Self { gradients: Some(_), .. } => "gradients",
            Self { sharding, .. } if sharding.is_sharded() => "optimizer",
            Self { .. } => "",
        }
    }
}

/// Returns the parts of a forward and a backward pass.
pub(super) fn parts(layout: &Layout) -> Vec<Range<usize>> {
    [layout.forward_parts(), layout.backward_parts()].concat()
}

/// Returns the element type of gradients on the wire.
pub fn wire_dtype(spec: &JobSpec, activations: DType) -> DType {
    match spec.comm.dtype {
        WireDtype::Fp32 => DType::F32,
        WireDtype::Bf16 => DType::Bf16,
        WireDtype::Auto => activations,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use xlaunch_spec::model::PRESETS;

    use super::*;

    #[test]
    fn buckets_of_presets_can_be_divided_and_do_not_depend_on_the_division() {
        let mut spec = JobSpec::default();
        for (name, shape) in &PRESETS {
            let layout = Layout::new(shape);
            for (bucket_mb, cap) in [(25.0, 25 << 20), (0.7, 734_003)] {
                spec.comm.bucket_mb = bucket_mb;
                let division =
                    |ranks, shard| Division::new(&spec, &layout, DType::F32, ranks - 1, ranks, shard);
                let expected = division(3, Shard::None).sharding;
                let buckets = expected.plan().buckets();
                for bucket in buckets {
                    assert!(bucket.len() * DType::F32.size() <= cap, "{name}: {bucket:?}");
                    assert!(bucket.end.is_multiple_of(ALIGN), "{name}: {bucket:?}");
                }
                // A scan of a large preset's buckets for each gap would take a minute.
                let ends: BTreeMap<usize, usize> = buckets.iter().map(|it| (it.start, it.end)).collect();
                for gap in layout.gaps() {
                    let bucket = ends.range(..=gap.start).next_back();
                    assert!(bucket.is_some_and(|(_, end)| gap.end <= *end), "{name}: {gap:?}");
                }
                for (ranks, shard) in [
                    (2, Shard::Optimizer),
                    (3, Shard::Optimizer),
                    (4, Shard::Gradients),
                    (16, Shard::Parameters),
                ] {
                    let division = division(ranks, shard);
                    assert_eq!(division.sharding.plan(), expected.plan(), "{name}");
                    for slots in [division.gradients, division.weights].into_iter().flatten() {
                        let places = layout.params.iter().map(|param| slots.place(&param.range));
                        assert!(
                            places.zip(&layout.params).all(|(place, param)| place.len() == param.range.len())
                        );
                    }
                }
            }
        }
    }
}
