//! Memory for a few buckets of an arena at a time.
//!
//! A pass over a model uses its parameters part by part. Where ranks keep a shard of each bucket only, buckets come and
//! go: they take turns in the slots of a tensor that is smaller than the arena.
//!
//! ```text
//! arena:   | 0 | 1 | 2 | 3 | 4 | 5 | kept |          parts: 5 4, 4 3, 3 2, ...
//! tensor:  | 0 | 1 | 2 | kept |
//!            3   4   5
//! ```
//! Where a bucket is stored never changes, so that captured graphs can be replayed. Two buckets share memory only if no
//! part needs one of them while the part before or after it needs the other. So the buckets of the next part can be
//! gathered, and those of the part before be reduced, while a part is being computed.

use std::ops::Range;

use crate::bucket::Plan;

/// Where the buckets of an arena are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slots {
    buckets: Vec<Range<usize>>,
    /// Where each bucket begins in the tensor.
    starts: Vec<usize>,
    /// Buckets that share their memory with no other.
    kept: Vec<bool>,
    len: usize,
}

impl Slots {
    /// Every bucket at its place in the arena.
    pub fn whole(plan: &Plan) -> Self {
        let buckets = plan.buckets().to_vec();
        let starts = buckets.iter().map(|bucket| bucket.start).collect();
        let len = buckets.last().map_or(0, |bucket| bucket.end);
        Self { kept: vec![true; buckets.len()], starts, len, buckets }
    }

    /// Slots for passes that need these `parts` of the arena in turn. Buckets with elements of `kept` share their
    /// memory with no other.
    pub fn shared(plan: &Plan, parts: &[Range<usize>], kept: &[Range<usize>]) -> Self {
        let mut slots = Self::whole(plan);
        slots.kept.fill(false);
        for range in kept {
            let needed = slots.needed(range);
            slots.kept[needed].fill(true);
        }
        let turns: Vec<usize> = (0..slots.buckets.len()).filter(|bucket| !slots.kept[*bucket]).collect();
        // Those of `turns` that two neighbouring parts need.
        let together: Vec<Vec<usize>> = parts
            .windows(2)
            .map(|pair| {
                let needed = [&pair[0], &pair[1]].map(|part| slots.needed(part));
                let is_needed = |bucket: &usize| needed.iter().any(|range| range.contains(bucket));
                turns.iter().copied().filter(is_needed).collect()
            })
            .collect();
        let size = |bucket: &usize| slots.buckets[*bucket].len();
        let mut ring: usize =
            together.iter().map(|buckets| buckets.iter().map(size).sum()).max().unwrap_or(0);
        let step = turns.iter().map(size).min().unwrap_or(0);
        // With a ring as large as all buckets, no two share memory.
        let all: usize = turns.iter().map(size).sum();
        loop {
            slots.put_in_ring(&turns, ring);
            if ring >= all || !together.iter().any(|buckets| slots.any_overlap(buckets)) {
                break;
            }
            ring += step;
        }
        slots.len = ring.min(all);
        for bucket in (0..slots.buckets.len()).filter(|bucket| slots.kept[*bucket]) {
            slots.starts[bucket] = slots.len;
            slots.len += slots.buckets[bucket].len();
        }
        slots
    }

    /// Elements of the tensor.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for an arena without buckets.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where these elements of one bucket are in the tensor.
    ///
    /// # Panics
    /// If they are in no bucket, or in two of which the memory is shared.
    pub fn place(&self, elements: &Range<usize>) -> Range<usize> {
        let found = self.buckets.partition_point(|bucket| bucket.end <= elements.start);
        let (bucket, start) = (&self.buckets[found], self.starts[found]);
        assert!(elements.end <= bucket.end, "{elements:?} is not in {bucket:?}");
        start + elements.start - bucket.start..start + elements.end - bucket.start
    }

    /// The buckets whose memory is never shared.
    pub fn kept(&self) -> impl DoubleEndedIterator<Item = &Range<usize>> {
        self.buckets.iter().zip(&self.kept).filter(|(_, kept)| **kept).map(|(bucket, _)| bucket)
    }

    /// What to gather, and what to wait for, before each of `parts`, which are computed in this order. `ahead` is the
    /// number of parts for which buckets are gathered ahead. With `kept_present`, kept buckets are in memory already.
    pub fn gathers(&self, parts: &[Range<usize>], ahead: usize, kept_present: bool) -> Vec<Turn> {
        let mut present: Vec<bool> = self.kept.iter().map(|kept| *kept && kept_present).collect();
        // The number of the last gather of each bucket.
        let mut number = vec![0_usize; self.buckets.len()];
        let (mut started, mut waited) = (0, 0);
        let mut turns = Vec::with_capacity(parts.len());
        for (index, part) in parts.iter().enumerate() {
            let mut gather = |part: &Range<usize>| -> Vec<Range<usize>> {
                let missing: Vec<usize> =
                    self.needed(part).rev().filter(|bucket| !present[*bucket]).collect();
                for bucket in &missing {
                    for other in self.sharing_with(*bucket) {
                        present[other] = false;
                    }
                    present[*bucket] = true;
                    started += 1;
                    number[*bucket] = started;
                }
                missing.into_iter().map(|bucket| self.buckets[bucket].clone()).collect()
            };
            let now = gather(part);
            let later = parts[index + 1..].iter().take(ahead).flat_map(&mut gather).collect();
            let needed = self.needed(part).map(|bucket| number[bucket]).max().unwrap_or(0);
            turns.push(Turn { now, waits: needed.saturating_sub(waited), later });
            waited = waited.max(needed);
        }
        turns
    }

    /// What to wait for before each of `parts`, which are written in this order. Buckets are reduced in their order,
    /// each when the last part that needs it was written.
    pub fn writes(&self, parts: &[Range<usize>]) -> Vec<Write> {
        let (mut written, mut waited) = (0, 0);
        let mut writes = Vec::with_capacity(parts.len());
        for part in parts {
            let needed = self.needed(part);
            let new = needed.start.max(written)..needed.end;
            let before = |bucket| self.sharing_with(bucket).filter(|old| *old < bucket).max();
            let reduced = new.clone().filter_map(before).map(|old| old + 1).max().unwrap_or(0);
            let buckets = new.map(|bucket| self.buckets[bucket].clone()).collect();
            writes.push(Write { waits: reduced.saturating_sub(waited), buckets });
            (written, waited) = (written.max(needed.end), waited.max(reduced));
        }
        writes
    }

    /// Indices of the buckets with elements of `part`.
    fn needed(&self, part: &Range<usize>) -> Range<usize> {
        let start = self.buckets.partition_point(|bucket| bucket.end <= part.start);
        start..self.buckets.partition_point(|bucket| bucket.start < part.end).max(start)
    }

    /// Stores buckets one after the other in a ring of `len` elements, at its start again where the rest is too short.
    fn put_in_ring(&mut self, buckets: &[usize], len: usize) {
        let mut at = 0;
        for bucket in buckets {
            let size = self.buckets[*bucket].len();
            let start = if at + size > len { 0 } else { at };
            self.starts[*bucket] = start;
            at = start + size;
        }
    }

    fn any_overlap(&self, buckets: &[usize]) -> bool {
        let mut slots: Vec<Range<usize>> = buckets.iter().map(|bucket| self.slot(*bucket)).collect();
        slots.sort_by_key(|slot| slot.start);
        slots.windows(2).any(|pair| overlaps(&pair[0], &pair[1]))
    }

    /// Other buckets with some of this one's memory.
    fn sharing_with(&self, bucket: usize) -> impl Iterator<Item = usize> + '_ {
        let slot = self.slot(bucket);
        (0..self.buckets.len()).filter(move |other| *other != bucket && overlaps(&self.slot(*other), &slot))
    }

    fn slot(&self, bucket: usize) -> Range<usize> {
        self.starts[bucket]..self.starts[bucket] + self.buckets[bucket].len()
    }
}

/// What happens before a part is computed, in this order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// Buckets to gather because this part needs them.
    pub now: Vec<Range<usize>>,
    /// How many more gathers, the oldest first, must have finished.
    pub waits: usize,
    /// Buckets to gather while the part is computed.
    pub later: Vec<Range<usize>>,
}

/// What happens before a part is written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Write {
    /// How many more buckets, the first ones first, must have been reduced.
    pub waits: usize,
    /// Buckets that the part is the first to write.
    pub buckets: Vec<Range<usize>>,
}

fn overlaps(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

#[cfg(test)]
#[path = "slots/tests.rs"]
mod tests;
