//! Plans which gradients are reduced over ranks together.
//!
//! Gradients are stored in one arena in the order in which backward finishes them. A bucket is therefore a contiguous
//! range, and a single number, "all gradients below this offset are written", tells which buckets are ready. The first
//! bucket is smaller, so that its all-reduce starts early.
//!
//! ```text
//! parameters:   | a | b |  c  |              d              | e | f |
//! buckets:      |   0   |  1  |    2    |    3    |    4    |   5   |
//! groups:       |   0   |  1  |              2              |   3   |
//! ```
//! A bucket contains whole parameters, or a part of one parameter that is larger than the cap. The buckets of such a
//! parameter are a group: operations use the parameter as a whole, so memory that does not hold the whole arena must
//! hold a group in one piece.
//!
//! Cuts depend on sizes alone, never on the number of ranks or on what is divided among them: the buckets determine the
//! order in which gradients are summed.

use std::ops::Range;

use crate::collective::Among;

/// Buckets that cover an arena without gaps, in order of offset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    buckets: Vec<Range<usize>>,
    /// The ranks that have the parameters of each bucket.
    among: Vec<Among>,
    /// Index of the first bucket of each group.
    groups: Vec<usize>,
}

impl Plan {
    /// Plans the buckets of parameters. `ends` are the rising end offsets of the parameters, in elements of
    /// `element_size` bytes.
    ///
    /// No bucket exceeds `cap_bytes`, and a first bucket of several parameters does not exceed `first_cap_bytes`. A
    /// parameter above the cap is cut into buckets of about equal size, at offsets that are multiples of `align`
    /// elements from its start: only a bucket of at most `align` elements may exceed the cap. `usize::MAX` prevents all
    /// cuts.
    pub fn new(
        ends: &[usize],
        align: usize,
        element_size: usize,
        cap_bytes: usize,
        first_cap_bytes: usize,
    ) -> Self {
        let all = ends.iter().map(|end| (*end, Among::All));
        Self::of_ranks(all, align, element_size, cap_bytes, first_cap_bytes)
    }

    /// Same as [`new`](Self::new), with the ranks that have each parameter. A bucket has parameters of the same ranks.
    pub fn of_ranks(
        ends: impl IntoIterator<Item = (usize, Among)>,
        align: usize,
        element_size: usize,
        cap_bytes: usize,
        first_cap_bytes: usize,
    ) -> Self {
        let mut plan = Self { buckets: Vec::new(), among: Vec::new(), groups: Vec::new() };
        let (mut open, mut ranks) = (0..0, Among::All);
        for (end, among) in ends {
            let parameter = open.end..end;
            let cap = if plan.buckets.is_empty() { first_cap_bytes.min(cap_bytes) } else { cap_bytes };
            if !open.is_empty() && ((end - open.start) * element_size > cap || among != ranks) {
                plan.add_group([open], ranks);
                open = parameter.start..parameter.start;
            }
            ranks = among;
            if parameter.len() * element_size > cap_bytes {
                // Close the open bucket, since a cut parameter does not share a bucket.
                plan.add_group(cut(&parameter, align, cap_bytes / element_size), ranks);
                open = parameter.end..parameter.end;
            } else {
                open.end = parameter.end;
            }
        }
        if !open.is_empty() {
            plan.add_group([open], ranks);
        }
        plan
    }

    fn add_group(&mut self, buckets: impl IntoIterator<Item = Range<usize>>, among: Among) {
        self.groups.push(self.buckets.len());
        self.buckets.extend(buckets);
        self.among.resize(self.buckets.len(), among);
    }

    /// Returns the ranks that have the parameters of a bucket of the plan.
    pub fn among(&self, bucket: &Range<usize>) -> Among {
        self.among.get(self.index(bucket)).copied().unwrap_or_default()
    }

    /// Cuts consecutive buckets into runs of those that the same ranks have.
    pub fn runs<'a>(&self, buckets: &'a [Range<usize>]) -> impl Iterator<Item = (Among, &'a [Range<usize>])> {
        let runs = buckets.chunk_by(|a, b| self.among(a) == self.among(b));
        runs.map(|run| (run.first().map_or_else(Among::default, |bucket| self.among(bucket)), run))
    }

    /// Returns the buckets of parameters that these ranks have.
    pub fn buckets_among(&self, among: Among) -> impl Iterator<Item = &Range<usize>> {
        self.buckets
            .iter()
            .zip(&self.among)
            .filter(move |(_, ranks)| **ranks == among)
            .map(|(bucket, _)| bucket)
    }

    /// Returns the index of a bucket of the plan.
    pub(crate) fn index(&self, bucket: &Range<usize>) -> usize {
        self.buckets.partition_point(|other| other.start < bucket.start)
    }

    /// Returns the buckets in order of offset.
    pub fn buckets(&self) -> &[Range<usize>] {
        &self.buckets
    }

    /// Returns the buckets of each group: those of a parameter that is cut, or a single bucket.
    pub fn groups(&self) -> impl Iterator<Item = &[Range<usize>]> {
        let ends = self.groups.iter().skip(1).copied().chain([self.buckets.len()]);
        self.groups.iter().zip(ends).map(|(start, end)| &self.buckets[*start..end])
    }

    /// Returns bytes that are equal if and only if two plans have the same buckets. The rendezvous compares their
    /// digest.
    pub fn layout(&self) -> Vec<u8> {
        format!("{:?}", self.buckets).into_bytes()
    }
}

/// Cuts a parameter, at multiples of `align` from its start, into the smallest number of parts with at most `cap`
/// elements each. Their sizes differ by at most `align`.
fn cut(parameter: &Range<usize>, align: usize, cap: usize) -> impl Iterator<Item = Range<usize>> {
    let (start, end) = (parameter.start, parameter.end);
    let units = parameter.len().div_ceil(align);
    let parts = units.div_ceil((cap / align).max(1));
    let at = move |part: usize| if part == parts { end } else { start + units * part / parts * align };
    (0..parts).map(move |part| at(part)..at(part + 1))
}

/// Tracks which buckets of one backward pass are ready to be reduced.
#[derive(Clone, Debug)]
pub struct ReduceProgress<'a> {
    pending: &'a [Range<usize>],
}

impl<'a> ReduceProgress<'a> {
    /// Starts a backward pass, with no bucket ready.
    pub fn new(plan: &'a Plan) -> Self {
        Self { pending: &plan.buckets }
    }

    /// Returns the buckets that have become ready now that all gradients below `offset` are written. Each bucket is
    /// returned once.
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

    fn ends(sizes: &[usize]) -> Vec<usize> {
        let end = |end: &mut usize, size: &usize| {
            *end += size;
            Some(*end)
        };
        sizes.iter().scan(0, end).collect()
    }

    #[test]
    fn first_bucket_is_small_and_large_parameters_get_buckets_of_their_own() {
        let plan = Plan::new(&[10, 20, 40, 60, 500, 510], usize::MAX, 4, 160, 60);
        assert_eq!(plan.buckets(), [0..10, 10..40, 40..60, 60..500, 500..510]);
        assert_eq!(plan.groups().count(), 5);
    }

    #[test]
    fn parameter_above_the_cap_is_cut_into_equal_parts() {
        let plan = Plan::new(&[8, 16, 108, 116], 4, 4, 160, 64);
        // 92 elements with a cap of 40: 23 units of 4 in three parts.
        assert_eq!(plan.buckets(), [0..16, 16..44, 44..76, 76..108, 108..116]);
        let groups: Vec<usize> = plan.groups().map(<[Range<usize>]>::len).collect();
        assert_eq!(groups, [1, 3, 1]);
        // The first bucket is limited as well; no other bucket counts as the first.
        assert_eq!(Plan::new(&[20, 36], 4, 4, 64, 16).buckets(), [0..8, 8..20, 20..36]);
        // A single unit that is larger than the cap.
        assert_eq!(Plan::new(&[16], 8, 4, 4, 4).buckets(), [0..8, 8..16]);
    }

    #[test]
    fn layouts_are_equal_only_for_equal_plans() {
        let layout = |ends: &[usize], cap| Plan::new(ends, usize::MAX, 4, cap, 60).layout();
        assert_eq!(layout(&[10, 20, 40], 160), layout(&[10, 20, 40], 160));
        assert_ne!(layout(&[10, 20, 40], 160), layout(&[10, 20, 40], 80));
        assert_ne!(layout(&[10, 20, 40], 160), layout(&[10, 20, 41], 160));
    }

    proptest! {
        #[test]
        fn buckets_cover_the_arena_and_do_not_exceed_the_cap(
            units in prop::collection::vec(1usize..50, 0..60),
            align in 1usize..10,
            cap in 1usize..4000,
        ) {
            let ends: Vec<usize> = ends(&units).into_iter().map(|end| end * align).collect();
            let plan = Plan::new(&ends, align, 4, cap, cap / 4);
            let mut at = 0;
            for group in plan.groups() {
                for bucket in group {
                    prop_assert_eq!(bucket.start, at);
                    prop_assert!(!bucket.is_empty() && bucket.end.is_multiple_of(align));
                    // A bucket that cannot be cut is a whole unit.
                    prop_assert!(bucket.len() * 4 <= cap || bucket.len() == align);
                    at = bucket.end;
                }
                let elements = group[0].start..at;
                prop_assert!(ends.contains(&elements.end));
                let parameters = ends.iter().filter(|end| elements.contains(&(**end - 1))).count();
                if group.len() > 1 {
                    prop_assert!(parameters == 1 && elements.len() * 4 > cap);
                    let sizes = group.iter().map(Range::len);
                    let (least, most) = (sizes.clone().min().unwrap(), sizes.max().unwrap());
                    prop_assert!(most - least <= align, "{group:?}");
                }
                if elements.start == 0 {
                    prop_assert!(parameters == 1 || elements.len() * 4 <= cap / 4);
                }
            }
            prop_assert_eq!(at, ends.last().copied().unwrap_or(0));
            prop_assert_eq!(plan.groups().flatten().count(), plan.buckets().len());
        }

        #[test]
        fn each_bucket_is_ready_once_and_not_before_its_end(
            sizes in prop::collection::vec(1usize..50, 1..40),
            steps in prop::collection::vec(0usize..60, 0..60),
        ) {
            let ends = ends(&sizes);
            // Some parameters are cut.
            let plan = Plan::new(&ends, 3, 4, 150, 50);
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
