//! Which parameters a rank updates: its part of every bucket, or all.
//!
//! ```text
//! arena:    | part 0 | part 1 |     part 0     |     part 1     |     two buckets, two ranks
//! share 1:  | part 1 |     part 1     |
//! ```
//! A bucket is cut into as many equal parts as there are ranks; part r is rank r's. A rank's share is its parts behind each
//! other, in the order of the buckets, so that one launch works on all of them. Buckets cover the arena without gaps: the
//! part of a bucket that starts at a lies at a / ranks.

use std::ops::Range;

use crate::bucket::Plan;

/// The cut of an arena's buckets, and one rank's share.
#[derive(Clone, Debug)]
pub struct Sharding {
    plan: Plan,
    rank: usize,
    parts: usize,
}

impl Sharding {
    /// Every rank has a share of its own. The ends of all buckets are multiples of `ranks`.
    ///
    /// # Panics
    /// If they are not, or there is no such rank.
    pub fn new(plan: Plan, rank: usize, ranks: usize) -> Self {
        assert!(rank < ranks, "rank {rank} of {ranks}");
        assert!(plan.buckets().iter().all(|bucket| bucket.end.is_multiple_of(ranks)), "{plan:?} for {ranks}");
        Self { plan, rank, parts: ranks }
    }

    /// Every rank has all.
    pub fn whole(plan: Plan) -> Self {
        Self::new(plan, 0, 1)
    }

    /// Whether every rank has all.
    pub fn is_whole(&self) -> bool {
        self.parts == 1
    }

    /// The buckets.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Elements of this rank's share.
    pub fn len(&self) -> usize {
        self.arena_len() / self.parts
    }

    /// Whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements of the arena.
    pub fn arena_len(&self) -> usize {
        self.plan.buckets().last().map_or(0, |bucket| bucket.end)
    }

    /// Where this rank's part of a bucket lies in its share.
    pub fn in_share(&self, bucket: &Range<usize>) -> Range<usize> {
        bucket.start / self.parts..bucket.end / self.parts
    }

    /// Where it lies in the arena.
    pub fn in_arena(&self, bucket: &Range<usize>) -> Range<usize> {
        let len = bucket.len() / self.parts;
        let start = bucket.start + self.rank * len;
        start..start + len
    }

    /// This rank's share of `arena`, which holds one value for every `chunk` elements; parts are multiples of that.
    pub fn share_of<T: Copy>(&self, arena: &[T], chunk: usize) -> Vec<T> {
        let part = |bucket: &Range<usize>| self.in_arena(bucket);
        let parts = self.plan.buckets().iter().map(part);
        parts.flat_map(|part| &arena[part.start / chunk..part.end / chunk]).copied().collect()
    }

    /// Bytes that are equal exactly when two ranks cut alike.
    pub fn layout(&self) -> Vec<u8> {
        [self.plan.layout(), format!(" in {} parts", self.parts).into_bytes()].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn parts_lie_as_drawn() {
        let plan = Plan::new(&[8, 24], 4, 64, 32);
        assert_eq!(plan.buckets(), [0..8, 8..24]);
        let sharding = Sharding::new(plan, 1, 2);
        let places = [0..8, 8..24].map(|bucket| (sharding.in_arena(&bucket), sharding.in_share(&bucket)));
        assert_eq!(places, [(4..8, 0..4), (16..24, 4..12)]);
        assert_eq!(sharding.len(), 12);
        let chunks = ["a", "b", "c", "d", "e", "f"];
        assert_eq!(sharding.share_of(&chunks, 4), ["b", "e", "f"]);
    }

    #[test]
    fn ranks_that_cut_differently_differ() {
        let plan = Plan::new(&[8, 24], 4, 64, 32);
        let layout = |rank, ranks| Sharding::new(plan.clone(), rank, ranks).layout();
        assert_eq!(layout(0, 2), layout(1, 2));
        assert_ne!(layout(0, 2), layout(0, 1));
    }

    proptest! {
        #[test]
        fn every_element_has_one_owner_and_one_place(
            sizes in prop::collection::vec(1usize..9, 1..30),
            ranks in 1usize..5,
        ) {
            let step = |end: &mut usize, size: &usize| { *end += size * ranks; Some(*end) };
            let ends: Vec<usize> = sizes.iter().scan(0, step).collect();
            let plan = Plan::new(&ends, 4, 100, 30);
            let arena: Vec<usize> = (0..*ends.last().unwrap()).collect();
            let mut seen = vec![0; arena.len()];
            for rank in 0..ranks {
                let sharding = Sharding::new(plan.clone(), rank, ranks);
                let share = sharding.share_of(&arena, 1);
                prop_assert_eq!(share.len(), sharding.len());
                for bucket in plan.buckets() {
                    let own: Vec<usize> = sharding.in_arena(bucket).collect();
                    prop_assert_eq!(&share[sharding.in_share(bucket)], own);
                }
                share.iter().for_each(|element| seen[*element] += 1);
            }
            prop_assert!(seen.iter().all(|count| *count == 1));
        }
    }
}
