//! The parameters that a rank updates: its shard of every bucket (as in ZeRO), or all parameters.
//!
//! ```text
//! arena, two buckets, two ranks:   | shard 0 | shard 1 |      shard 0      |      shard 1      |
//! state of rank 1:                 | shard 1 |      shard 1      |
//! ```
//! A bucket is cut into one shard per rank. They are equal, except that the last one also has the remainder if the
//! bucket is not a multiple of the number of ranks. A rank stores its shards contiguously, in the order of the buckets,
//! so that one kernel launch updates all of them. A bucket of parameters that only some ranks have is divided among
//! those ranks.

use std::ops::Range;

use crate::bucket::Plan;
use crate::collective::{Among, Groups};

/// Division of an arena's buckets into shards, and the shard of this rank.
#[derive(Clone, Debug)]
pub struct Sharding {
    plan: Plan,
    /// Elements that are never divided.
    unit: usize,
    groups: Groups,
    is_sharded: bool,
    /// Position at which this rank stores its shard of each bucket, and the end of the last one.
    stored: Vec<usize>,
}

impl Sharding {
    /// Gives every rank one shard of every bucket, in whole units of `unit` elements.
    pub fn new(plan: Plan, unit: usize, groups: Groups) -> Self {
        Self::with_shards(plan, unit, groups, true)
    }

    /// Makes every rank update all of its parameters.
    pub fn replicated(plan: Plan, groups: Groups) -> Self {
        Self::with_shards(plan, 1, groups, false)
    }

    fn with_shards(plan: Plan, unit: usize, groups: Groups, sharded: bool) -> Self {
        let is_sharded = sharded && groups.world > 1;
        let mut sharding = Self { plan, unit, groups, is_sharded, stored: vec![0] };
        for bucket in sharding.plan.buckets() {
            let end = sharding.stored[sharding.stored.len() - 1] + sharding.in_arena(bucket).len();
            sharding.stored.push(end);
        }
        sharding
    }

    /// Returns the ranks, and this one.
    pub fn groups(&self) -> Groups {
        self.groups
    }

    /// Returns whether a rank updates only a part of the parameters.
    pub fn is_sharded(&self) -> bool {
        self.is_sharded
    }

    /// Returns whether ranks have different parts of the parameters, of their gradients or of the optimizer's state.
    pub fn is_divided(&self) -> bool {
        self.is_sharded || self.groups.size > 1
    }

    /// Returns the buckets that are cut.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns the number of elements that this rank updates.
    pub fn len(&self) -> usize {
        self.stored.last().copied().unwrap_or(0)
    }

    /// Returns whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of elements of the whole arena.
    pub fn arena_len(&self) -> usize {
        self.plan.buckets().last().map_or(0, |bucket| bucket.end)
    }

    /// Returns the position at which this rank stores its shard of a bucket of the plan.
    pub fn in_shard(&self, bucket: &Range<usize>) -> Range<usize> {
        let index = self.plan.index(bucket);
        self.stored[index]..self.stored[index + 1]
    }

    /// Returns the position of this rank's shard of a bucket in the whole arena.
    pub fn in_arena(&self, bucket: &Range<usize>) -> Range<usize> {
        if self.is_sharded { self.part(bucket) } else { bucket.clone() }
    }

    /// Returns this rank's part of a bucket that the ranks that have it divide among themselves: its shard, if there
    /// are shards.
    pub fn part(&self, bucket: &Range<usize>) -> Range<usize> {
        let (index, parts) = self.groups.member(self.plan.among(bucket));
        let len = bucket.len() / (self.unit * parts) * self.unit;
        let start = bucket.start + index * len;
        start..if index + 1 == parts { bucket.end } else { start + len }
    }

    /// Returns the ranges of the whole arena that these ranks have. Neighbouring buckets are one range.
    pub fn ranges(&self, among: Among) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for bucket in self.plan.buckets_among(among) {
            match ranges.last_mut().filter(|last| last.end == bucket.start) {
                Some(last) => last.end = bucket.end,
                None => ranges.push(bucket.clone()),
            }
        }
        ranges
    }

    /// Returns this rank's shards of `arena`, which holds one value for every `chunk` elements. Shards are multiples of
    /// `chunk`.
    pub fn shard_of<T: Copy>(&self, arena: &[T], chunk: usize) -> Vec<T> {
        let shards = self.plan.buckets().iter().map(|bucket| self.in_arena(bucket));
        shards.flat_map(|shard| &arena[shard.start / chunk..shard.end / chunk]).copied().collect()
    }

    /// Returns bytes that are equal if and only if two ranks cut the arena in the same way. The rendezvous compares
    /// their digest.
    pub fn layout(&self) -> Vec<u8> {
        let shards = if self.is_sharded { self.groups.world } else { 1 };
        let groups = match self.groups.size {
            1 => String::new(),
            size => format!(" in groups of {size}"),
        };
        [self.plan.layout(), format!(" in {shards} shards{groups}").into_bytes()].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn shards_are_stored_contiguously_per_rank() {
        let plan = Plan::new(&[8, 24], 4, 4, 64, 32);
        assert_eq!(plan.buckets(), [0..8, 8..24]);
        let sharding = Sharding::new(plan, 4, Groups::single(1, 2));
        let places = [0..8, 8..24].map(|bucket| (sharding.in_arena(&bucket), sharding.in_shard(&bucket)));
        assert_eq!(places, [(4..8, 0..4), (16..24, 4..12)]);
        assert_eq!(sharding.len(), 12);
        let chunks = ["a", "b", "c", "d", "e", "f"];
        assert_eq!(sharding.shard_of(&chunks, 4), ["b", "e", "f"]);
    }

    #[test]
    fn last_shard_has_what_is_left() {
        let plan = Plan::new(&[8, 40], 4, 4, 128, 32);
        let places = |rank| {
            let sharding = Sharding::new(plan.clone(), 4, Groups::single(rank, 3));
            [0..8, 8..40].map(|bucket| (sharding.in_arena(&bucket), sharding.in_shard(&bucket)))
        };
        assert_eq!(places(0), [(0..0, 0..0), (8..16, 0..8)]);
        assert_eq!(places(1), [(0..0, 0..0), (16..24, 0..8)]);
        assert_eq!(places(2), [(0..8, 0..8), (24..40, 8..24)]);
    }

    #[test]
    fn replicated_and_sharded_arenas_are_told_apart() {
        let plan = Plan::new(&[8, 24], 4, 4, 64, 32);
        let sharded = Sharding::new(plan.clone(), 4, Groups::single(0, 2));
        assert!(sharded.is_sharded() && !sharded.is_empty());
        let replicated = Sharding::replicated(plan, Groups::single(1, 2));
        assert!(!replicated.is_sharded());
        assert_eq!((replicated.len(), replicated.arena_len()), (24, 24));
        assert!(Sharding::replicated(Plan::new(&[], 4, 4, 64, 32), Groups::single(0, 1)).is_empty());
    }

    #[test]
    fn layout_depends_on_world_size_and_not_on_rank() {
        let plan = Plan::new(&[8, 24], 4, 4, 64, 32);
        let layout = |rank, ranks| Sharding::new(plan.clone(), 4, Groups::single(rank, ranks)).layout();
        assert_eq!(layout(0, 2), layout(1, 2));
        assert_ne!(layout(0, 2), layout(0, 1));
        let other = Plan::new(&[16, 24], 4, 4, 64, 32);
        assert_ne!(layout(0, 2), Sharding::new(other, 4, Groups::single(0, 2)).layout());
    }

    proptest! {
        #[test]
        fn every_element_is_in_exactly_one_shard(
            sizes in prop::collection::vec(1usize..9, 1..30),
            ranks in 1usize..6,
            unit in 1usize..4,
        ) {
            let step = |end: &mut usize, size: &usize| { *end += size * unit; Some(*end) };
            let ends: Vec<usize> = sizes.iter().scan(0, step).collect();
            let plan = Plan::new(&ends, unit, 4, 60, 30);
            let arena: Vec<usize> = (0..*ends.last().unwrap()).collect();
            let mut seen = vec![0; arena.len()];
            for rank in 0..ranks {
                let sharding = Sharding::new(plan.clone(), unit, Groups::single(rank, ranks));
                let shard = sharding.shard_of(&arena, 1);
                prop_assert_eq!(shard.len(), sharding.len());
                for bucket in plan.buckets() {
                    let own: Vec<usize> = sharding.in_arena(bucket).collect();
                    prop_assert!(own.first().is_none_or(|first| first.is_multiple_of(unit)));
                    prop_assert_eq!(&shard[sharding.in_shard(bucket)], own);
                }
                shard.iter().for_each(|element| seen[*element] += 1);
            }
            prop_assert!(seen.iter().all(|count| *count == 1));
        }
    }
}
