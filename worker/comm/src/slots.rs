//! Memory for a few buckets of an arena at a time.
//!
//! A pass over a model uses its parameters part by part. If ranks keep only a shard of each bucket, whole buckets are
//! needed only temporarily: they take turns in the slots of a tensor that is smaller than the arena.
//!
//! ```text
//! arena:   | 0 | 1 | 2 | 3 | 4 | 5 | kept |          parts: 5 4, 4 3, 3 2, ...
//! tensor:  | 0 | 1 | 2 | kept |
//!            3   4   5
//! ```
//! The position of a bucket never changes, so that captured graphs can be replayed. The buckets of a group, that is, of
//! a parameter that is split, are stored in one piece, because operations use the parameter as a whole; they are still
//! gathered and reduced one by one. Two groups share memory only if no part needs one of them while the part before or
//! after it needs the other. So while a part is being computed, the buckets of the next part can be gathered, and those
//! of the previous part can be reduced.

use std::ops::Range;

use crate::bucket::Plan;

/// Positions of the buckets of an arena in a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slots {
    buckets: Vec<Range<usize>>,
    /// Index of the group of each bucket.
    group_of: Vec<usize>,
    groups: Vec<Group>,
    len: usize,
}

/// Buckets that are stored in one piece.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Group {
    /// Indices of the buckets.
    buckets: Range<usize>,
    /// Range in the arena.
    elements: Range<usize>,
    /// Start in the tensor.
    start: usize,
    /// True if the group's memory is shared with no other group.
    kept: bool,
}

impl Group {
    fn len(&self) -> usize {
        self.elements.len()
    }

    /// Returns the range in the tensor.
    fn slot(&self) -> Range<usize> {
        self.start..self.start + self.len()
    }
}

impl Slots {
    /// Stores every bucket at its position in the arena.
    pub fn whole(plan: &Plan) -> Self {
        let mut slots = Self {
            buckets: plan.buckets().to_vec(),
            group_of: Vec::new(),
            groups: Vec::new(),
            len: plan.buckets().last().map_or(0, |bucket| bucket.end),
        };
        for group in plan.groups() {
            let buckets = slots.group_of.len()..slots.group_of.len() + group.len();
            let elements = group[0].start..group[group.len() - 1].end;
            slots.group_of.resize(buckets.end, slots.groups.len());
            slots.groups.push(Group { buckets, start: elements.start, elements, kept: true });
        }
        slots
    }

    /// Plans slots for passes that need these `parts` of the arena in turn. Groups with elements of `kept` share their
    /// memory with no other group.
    pub fn shared(plan: &Plan, parts: &[Range<usize>], kept: &[Range<usize>]) -> Self {
        let mut slots = Self::whole(plan);
        for group in &mut slots.groups {
            group.kept = kept.iter().any(|range| overlaps(range, &group.elements));
        }
        let turns: Vec<usize> = (0..slots.groups.len()).filter(|group| !slots.groups[*group].kept).collect();
        // Groups of `turns` that two neighbouring parts need.
        let together: Vec<Vec<usize>> = parts
            .windows(2)
            .map(|pair| {
                let is_needed =
                    |group: &usize| pair.iter().any(|part| overlaps(part, &slots.groups[*group].elements));
                turns.iter().copied().filter(is_needed).collect()
            })
            .collect();
        let size = |group: &usize| slots.groups[*group].len();
        let mut ring: usize = together.iter().map(|groups| groups.iter().map(size).sum()).max().unwrap_or(0);
        let step = turns.iter().map(size).min().unwrap_or(0);
        // With a ring as large as all groups together, no two share memory.
        let all: usize = turns.iter().map(size).sum();
        loop {
            slots.put_in_ring(&turns, ring);
            if ring >= all || !together.iter().any(|groups| slots.any_overlap(groups)) {
                break;
            }
            ring += step;
        }
        slots.len = ring.min(all);
        for group in slots.groups.iter_mut().filter(|group| group.kept) {
            group.start = slots.len;
            slots.len += group.len();
        }
        slots
    }

    /// Returns the number of elements of the tensor.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true for an arena without buckets.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the range of the tensor that holds these elements, which belong to one parameter or bucket.
    ///
    /// # Panics
    /// If they are in no group, or in two groups, which are not stored in one piece.
    pub fn place(&self, elements: &Range<usize>) -> Range<usize> {
        let found = self.groups.partition_point(|group| group.elements.end <= elements.start);
        let Group { elements: group, start, .. } = &self.groups[found];
        assert!(elements.end <= group.end, "{elements:?} is not in {group:?}");
        start + elements.start - group.start..start + elements.end - group.start
    }

    /// Returns the buckets whose memory is never shared.
    pub fn kept(&self) -> impl DoubleEndedIterator<Item = &Range<usize>> {
        self.groups.iter().filter(|group| group.kept).flat_map(|group| &self.buckets[group.buckets.clone()])
    }

    /// Returns what to gather, and what to wait for, before each of `parts`, which are computed in this order. `ahead`
    /// is the number of parts for which buckets are gathered ahead. With `kept_present`, kept buckets are in memory
    /// already.
    pub fn gathers(&self, parts: &[Range<usize>], ahead: usize, kept_present: bool) -> Vec<Turn> {
        let is_kept = |group: &usize| self.groups[*group].kept;
        let mut present: Vec<bool> =
            self.group_of.iter().map(|group| is_kept(group) && kept_present).collect();
        // Number of the last gather of each bucket.
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
            let mut later: Vec<_> = parts[index + 1..].iter().take(ahead).map(&mut gather).collect();
            later.retain(|buckets| !buckets.is_empty());
            let needed = self.needed(part).map(|bucket| number[bucket]).max().unwrap_or(0);
            turns.push(Turn { now, waits: needed.saturating_sub(waited), later });
            waited = waited.max(needed);
        }
        turns
    }

    /// Returns what to wait for before each of `parts`, which are written in this order. Buckets are reduced in order,
    /// each as soon as the last part that needs it is written.
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

    /// Returns the indices of the buckets with elements of `part`.
    fn needed(&self, part: &Range<usize>) -> Range<usize> {
        let start = self.buckets.partition_point(|bucket| bucket.end <= part.start);
        start..self.buckets.partition_point(|bucket| bucket.start < part.end).max(start)
    }

    /// Stores groups one after the other in a ring of `len` elements, continuing at its start if the rest is too short.
    fn put_in_ring(&mut self, groups: &[usize], len: usize) {
        let mut at = 0;
        for group in groups {
            let group = &mut self.groups[*group];
            group.start = if at + group.len() > len { 0 } else { at };
            at = group.slot().end;
        }
    }

    fn any_overlap(&self, groups: &[usize]) -> bool {
        let mut slots: Vec<Range<usize>> = groups.iter().map(|group| self.groups[*group].slot()).collect();
        slots.sort_by_key(|slot| slot.start);
        slots.windows(2).any(|pair| overlaps(&pair[0], &pair[1]))
    }

    /// Returns the other buckets that share memory with this one.
    fn sharing_with(&self, bucket: usize) -> impl Iterator<Item = usize> + '_ {
        let slot = self.slot(bucket);
        // Iterate over groups, which are few; a large model has many buckets.
        let groups = self.groups.iter().filter({
            let slot = slot.clone();
            move |group| overlaps(&group.slot(), &slot)
        });
        let buckets = groups.flat_map(|group| group.buckets.clone());
        buckets.filter(move |other| *other != bucket && overlaps(&self.slot(*other), &slot))
    }

    /// Returns the range of a bucket in the tensor.
    fn slot(&self, bucket: usize) -> Range<usize> {
        let (Range { start, end }, group) = (&self.buckets[bucket], &self.groups[self.group_of[bucket]]);
        let at = |element| group.start + element - group.elements.start;
        at(*start)..at(*end)
    }
}

/// Operations before a part is computed, in this order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// Buckets to gather because this part needs them.
    pub now: Vec<Range<usize>>,
    /// Number of further gathers, the oldest first, that must have finished.
    pub waits: usize,
    /// Buckets to gather while the part is computed; those for one part are gathered together.
    pub later: Vec<Vec<Range<usize>>>,
}

/// Operations before a part is written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Write {
    /// Number of further buckets, in order, that must have been reduced.
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
