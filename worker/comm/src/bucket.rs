//! Which gradients are reduced over ranks together.
//!
//! Gradients are stored in one arena in the order in which backward finishes them. So a bucket is a contiguous range,
//! and one number, "all gradients below this offset are written", tells which buckets are ready. The first bucket is
//! smaller, so that its all-reduce starts early. A parameter is never split: one larger than the cap is a bucket of its
//! own.

use std::ops::Range;

/// Buckets that cover an arena without gaps, by rising offset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    buckets: Vec<Range<usize>>,
}

impl Plan {
    /// Buckets of whole parameters. `ends` are the rising end offsets of the parameters in elements of `element_size`
    /// bytes; no bucket of several parameters exceeds `cap_bytes`, and the first one `first_cap_bytes`.
    pub fn new(ends: &[usize], element_size: usize, cap_bytes: usize, first_cap_bytes: usize) -> Self {
        let mut buckets: Vec<Range<usize>> = Vec::new();
        let mut open = 0..0;
        for end in ends {
            let cap = if buckets.is_empty() { first_cap_bytes } else { cap_bytes };
            if !open.is_empty() && (end - open.start) * element_size > cap {
                let start = open.end;
                buckets.push(open);
                open = start..start;
            }
            open.end = *end;
        }
        if !open.is_empty() {
            buckets.push(open);
        }
        Self { buckets }
    }

    /// The buckets, by rising offset.
    pub fn buckets(&self) -> &[Range<usize>] {
        &self.buckets
    }

    /// Bytes that are equal exactly when two plans are. The rendezvous compares their digest.
    pub fn layout(&self) -> Vec<u8> {
        format!("{:?}", self.buckets).into_bytes()
    }
}

/// Tracks which buckets of one backward pass are ready to be reduced.
#[derive(Clone, Debug)]
pub struct ReduceProgress<'a> {
    pending: &'a [Range<usize>],
}

impl<'a> ReduceProgress<'a> {
    /// The start of backward: no bucket is ready.
    pub fn new(plan: &'a Plan) -> Self {
        Self { pending: &plan.buckets }
    }

    /// The buckets that became ready now that all gradients below `offset` are written. Each is returned once.
    pub fn written_up_to(&mut self, offset: usize) -> impl Iterator<Item = Range<usize>> + use<'a> {
        let count = self.pending.partition_point(|bucket| bucket.end <= offset);
        let (ready, pending) = self.pending.split_at(count);
        self.pending = pending;
        ready.iter().cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn first_bucket_is_small_and_oversized_parameters_get_their_own() {
        let plan = Plan::new(&[10, 20, 40, 60, 500, 510], 4, 160, 60);
        assert_eq!(plan.buckets(), [0..10, 10..40, 40..60, 60..500, 500..510]);
    }

    #[test]
    fn layouts_are_equal_if_plans_are() {
        let layout = |ends: &[usize], cap| Plan::new(ends, 4, cap, 60).layout();
        assert_eq!(layout(&[10, 20, 40], 160), layout(&[10, 20, 40], 160));
        assert_ne!(layout(&[10, 20, 40], 160), layout(&[10, 20, 40], 80));
        assert_ne!(layout(&[10, 20, 40], 160), layout(&[10, 20, 41], 160));
    }

    proptest! {
        #[test]
        fn buckets_cover_the_arena_at_parameter_ends(
            sizes in prop::collection::vec(1usize..500, 0..60),
            cap in 1usize..4000,
        ) {
            let ends: Vec<usize> = sizes.iter().scan(0, |end, size| { *end += size; Some(*end) }).collect();
            let plan = Plan::new(&ends, 4, cap, cap / 4);
            let mut at = 0;
            for bucket in plan.buckets() {
                prop_assert_eq!(bucket.start, at);
                prop_assert!(ends.contains(&bucket.end));
                let parameters = ends.iter().filter(|end| bucket.contains(&(**end - 1))).count();
                prop_assert!(parameters == 1 || bucket.len() * 4 <= cap);
                at = bucket.end;
            }
            prop_assert_eq!(at, ends.last().copied().unwrap_or(0));
        }

        #[test]
        fn each_bucket_is_ready_once_and_not_before_its_end(
            sizes in prop::collection::vec(1usize..50, 1..40),
            steps in prop::collection::vec(0usize..60, 0..60),
        ) {
            let ends: Vec<usize> = sizes.iter().scan(0, |end, size| { *end += size; Some(*end) }).collect();
            let plan = Plan::new(&ends, 4, 300, 100);
            let mut progress = ReduceProgress::new(&plan);
            let (mut offset, mut seen) = (0, Vec::new());
            let total = *ends.last().unwrap();
            for step in steps.into_iter().chain([total]) {
                offset = (offset + step).min(total);
                for bucket in progress.written_up_to(offset) {
                    prop_assert!(bucket.end <= offset);
                    seen.push(bucket);
                }
            }
            prop_assert_eq!(seen, plan.buckets());
        }
    }
}
