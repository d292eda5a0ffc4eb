//! The part of the arenas that one rank saves, so that all ranks together save everything once.
//!
//! A rank saves the shards that it updates if the optimizer is sharded. Otherwise every rank has the whole state, and
//! saves an equal part of it. If ranks divide experts among themselves, those that have the same bucket each save an
//! equal part of it. Checkpoints have the whole arena, so they do not depend on which rank has which experts.

use std::ops::Range;

use xlaunch_comm::Sharding;

use crate::model::layout::{Layout, Segment};

/// Ranges of the arena, in order of offset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Portion {
    ranges: Vec<Owned>,
}

/// A range that the rank saves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owned {
    /// Range in the arena.
    pub arena: Range<usize>,
    /// Range in the rank's tensors of master weights and moments.
    pub stored: Range<usize>,
}

impl Portion {
    /// Computes the portion of rank `rank` if the ranks below `writers` write checkpoints. A sharded optimizer and
    /// divided experts need all ranks; then it is the rank of the layout and the sharding.
    pub fn new(layout: &Layout, sharding: &Sharding, rank: usize, writers: usize) -> Self {
        if sharding.is_divided() {
            let owned = |bucket: &Range<usize>| {
                let (part, own) = (sharding.part(bucket), sharding.in_arena(bucket));
                let stored = sharding.in_shard(bucket).start + part.start - own.start;
                let owned = move |Segment { whole, own }: Segment| {
                    let start = stored + own.start - part.start;
                    Owned { stored: start..start + own.len(), arena: whole }
                };
                layout.whole_parts(&sharding.part(bucket)).into_iter().map(owned)
            };
            return Self { ranges: sharding.plan().buckets().iter().flat_map(owned).collect() };
        }
        if rank >= writers {
            return Self { ranges: Vec::new() };
        }
        // The product of a length and a rank exceeds 64 bits only in theory, but must not wrap: u128.
        let cut = |rank: usize| {
            let cut = sharding.arena_len() as u128 * rank as u128 / writers.max(1) as u128;
            usize::try_from(cut).unwrap_or(usize::MAX)
        };
        let arena = cut(rank)..cut(rank + 1);
        Self { ranges: vec![Owned { stored: arena.clone(), arena }] }
    }

    /// The ranges.
    pub fn ranges(&self) -> &[Owned] {
        &self.ranges
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.ranges.iter().map(|owned| owned.arena.len()).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Maps `packed`, a range of a buffer that holds the portion's ranges back to back, to a range of the rank's
    /// tensors. `packed` must lie within one of the portion's ranges.
    pub fn stored(&self, packed: &Range<usize>) -> Range<usize> {
        let mut start = 0;
        for owned in &self.ranges {
            if packed.end <= start + owned.stored.len() {
                let at = owned.stored.start + packed.start - start;
                return at..at + packed.len();
            }
            start += owned.stored.len();
        }
        0..0
    }

    /// Intersects the portion with a range of the arena. Yields each part's range in the arena, and its offset in a
    /// buffer that holds the portion's ranges back to back.
    pub fn within(&self, range: &Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        let range = range.clone();
        let places = self.ranges.iter().scan(0, |packed, owned| {
            let at = *packed;
            *packed += owned.arena.len();
            Some((owned, at))
        });
        places.filter_map(move |(owned, packed)| {
            let part = owned.arena.start.max(range.start)..owned.arena.end.min(range.end);
            (part.start < part.end).then(|| {
                let at = packed + part.start - owned.arena.start;
                (part, at)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::TestCaseError;
    use xlaunch_comm::Groups;
    use xlaunch_comm::bucket::Plan;
    use xlaunch_spec::model::{Arch, ModelShape, PRESETS};

    use super::*;
    use crate::model::layout::ALIGN;

    /// Checks that the portions of all ranks contain every element of the whole arena, except `gaps`, once.
    fn check_all(portions: &[Portion], len: usize, gaps: &[Range<usize>]) -> Result<(), TestCaseError> {
        let mut seen = vec![0; len];
        gaps.iter().for_each(|gap| seen[gap.clone()].fill(1));
        for portion in portions {
            let packed: Vec<usize> = portion.ranges().iter().flat_map(|owned| owned.arena.clone()).collect();
            prop_assert_eq!(packed.len(), portion.len());
            packed.iter().for_each(|element| seen[*element] += 1);
            for (part, at) in portion.within(&(3..len - 1)) {
                prop_assert_eq!(&packed[at..at + part.len()], part.collect::<Vec<_>>());
            }
            let stored: Vec<usize> = portion.ranges().iter().flat_map(|owned| owned.stored.clone()).collect();
            for (part, at) in portion.within(&(0..len)) {
                let packed = at..at + part.len();
                prop_assert_eq!(&stored[packed.clone()], portion.stored(&packed).collect::<Vec<_>>());
            }
            let within: usize = portion.within(&(3..len - 1)).map(|(part, _)| part.len()).sum();
            let expected = packed.iter().filter(|element| (3..len - 1).contains(*element)).count();
            prop_assert_eq!(within, expected);
        }
        prop_assert!(seen.iter().all(|count| *count == 1));
        Ok(())
    }

    proptest! {
        #[test]
        fn all_ranks_together_save_every_element_once(
            sizes in prop::collection::vec(1usize..9, 1..30),
            world in 1usize..6,
            sharded: bool,
        ) {
            let step = |end: &mut usize, size: &usize| { *end += size * world; Some(*end) };
            let ends: Vec<usize> = sizes.iter().scan(0, step).collect();
            let (plan, len) = (Plan::new(&ends, world, 4, 60, 30), *ends.last().unwrap());
            let layout = Layout::new(&PRESETS[0].1);
            let portion = |rank| {
                let (plan, groups) = (plan.clone(), Groups::single(rank, world));
                let sharding =
                    if sharded { Sharding::new(plan, 1, groups) } else { Sharding::replicated(plan, groups) };
                Portion::new(&layout, &sharding, rank, world)
            };
            check_all(&(0..world).map(portion).collect::<Vec<_>>(), len, &[])?;
            let replicated = Sharding::replicated(plan, Groups::single(0, world));
            prop_assert!(Portion::new(&layout, &replicated, world, world).is_empty(), "it does not write");
        }

        #[test]
        fn ranks_that_divide_experts_together_save_every_element_once(
            size in prop::sample::select(vec![1usize, 2, 4]),
            groups in 1usize..4,
            experts in 1usize..3,
            kilobytes in 1usize..100,
            sharded: bool,
        ) {
            let base = Arch::Mixtral.base();
            let sizes = ModelShape { layers: 2, dim: 24, ffn: 40, vocab: 70, heads: 2, ..base };
            let shape = ModelShape { kv_heads: 2, head_dim: 8, experts: 4 * experts, ..sizes };
            let whole = Layout::new(&shape);
            let world = size * groups;
            let portion = |rank| {
                let groups = Groups { rank, world, size };
                let layout = Layout::in_groups(&shape, groups);
                let plan = Plan::of_ranks(layout.ends_among(), ALIGN, 4, kilobytes << 10, 4 << 10);
                let sharding =
                    if sharded { Sharding::new(plan, 8, groups) } else { Sharding::replicated(plan, groups) };
                Portion::new(&layout, &sharding, rank, world)
            };
            let portions: Vec<_> = (0..world).map(portion).collect();
            let gaps = if size > 1 { whole.gaps() } else { Vec::new() };
            check_all(&portions, whole.len, &gaps)?;
        }
    }
}
