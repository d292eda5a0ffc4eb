//! A finished plan: for each request of a step, in order, its size, its place, and whose place it takes over.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::pack::{Packing, pack};
use super::record::Recording;
use super::serve::Book;

/// A request that the plan does not serve.
const ELSEWHERE: u32 = u32::MAX;

/// No slot.
const NOBODY: u32 = u32::MAX;

/// One request of a planned step.
#[derive(Debug)]
pub(crate) struct Slot {
    /// The step that last used it, twice, plus one when it was freed again.
    pub(crate) state: AtomicU32,
    pub(crate) granules: u32,
    /// Granules from the region's start; [`ELSEWHERE`].
    offset: u32,
    /// The first of those that it takes memory over from, if any: most have one or none.
    first_before: u32,
    /// The others, as a part of [`Table::before`].
    before: (u32, u32),
}

impl Slot {
    /// Granules from the region's start, if the plan serves it.
    pub(crate) fn offset(&self) -> Option<u32> {
        (self.offset != ELSEWHERE).then_some(self.offset)
    }
}

/// The plan of a step.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) book: &'static Book,
    pub(crate) slots: Box<[Slot]>,
    /// For each slot, the slots whose memory it takes over within a step: those that were last on each of its granules.
    before: Box<[u32]>,
    /// For each slot, how many before it the plan serves; one more for all.
    served_before: Box<[u32]>,
    /// Length of the region.
    pub(crate) granules: u32,
}

impl Table {
    /// Plans a recorded step; `None` if there is nothing in it to plan.
    pub(crate) fn new(book: &'static Book, recording: &Recording, time: Duration) -> Option<Self> {
        let requests = recording.requests();
        let lives: Vec<_> = requests.iter().filter_map(|request| request.life).collect();
        if lives.is_empty() {
            return None;
        }
        let Packing { offsets, granules } = pack(&lives, time);
        let mut places = offsets.into_iter();
        let mut slots = Vec::with_capacity(requests.len());
        let mut served_before = vec![0];
        let mut all_before = Vec::new();
        // Who was last on each part of the region: disjoint intervals (start, end, slot).
        let mut last: Vec<(u32, u32, u32)> = Vec::new();
        for (request, number) in requests.iter().zip(0_u32..) {
            let offset = request.life.and_then(|_| places.next()).unwrap_or(ELSEWHERE);
            let first = all_before.len() as u32;
            if offset != ELSEWHERE {
                take_over(&mut last, (offset, offset + request.granules, number), &mut all_before);
            }
            let first_before = if all_before.len() as u32 > first { all_before.pop() } else { None };
            let before = (first, all_before.len() as u32);
            let first_before = first_before.unwrap_or(NOBODY);
            let state = AtomicU32::new(0);
            served_before.push(served_before[number as usize] + u32::from(offset != ELSEWHERE));
            slots.push(Slot { state, granules: request.granules, offset, first_before, before });
        }
        Some(Self {
            book,
            slots: slots.into(),
            before: all_before.into(),
            served_before: served_before.into(),
            granules,
        })
    }

    /// Slots in use.
    pub(crate) fn live(&self) -> impl Iterator<Item = &Slot> {
        // Steps count from one: zero was never used.
        self.slots
            .iter()
            .filter(|slot| !matches!(slot.state.load(Relaxed), state if state == 0 || state % 2 == 1))
    }

    /// Of the slots before this number, those that the plan serves.
    pub(crate) fn served_before(&self, number: usize) -> u64 {
        self.served_before.get(number).map_or(0, |count| u64::from(*count))
    }

    /// Whether all slots that this one takes memory over from are in this state.
    #[inline]
    pub(crate) fn all_before(&self, slot: &Slot, state: u32) -> bool {
        let is = |before: u32| {
            self.slots.get(before as usize).is_some_and(|slot| slot.state.load(Relaxed) == state)
        };
        (slot.first_before == NOBODY || is(slot.first_before))
            && (slot.before.0 == slot.before.1 || self.others(slot).iter().copied().all(is))
    }

    #[inline]
    fn others(&self, slot: &Slot) -> &[u32] {
        &self.before[slot.before.0 as usize..slot.before.1 as usize]
    }
}

/// Puts a new interval over the others; those that lose a part are added to `lost`.
fn take_over(last: &mut Vec<(u32, u32, u32)>, new: (u32, u32, u32), lost: &mut Vec<u32>) {
    let (start, end, _) = new;
    let first = lost.len();
    let mut rest = Vec::with_capacity(last.len() + 2);
    for (s, e, slot) in last.drain(..) {
        if e <= start || end <= s {
            rest.push((s, e, slot));
            continue;
        }
        if !lost[first..].contains(&slot) {
            lost.push(slot);
        }
        if s < start {
            rest.push((s, start, slot));
        }
        if end < e {
            rest.push((end, e, slot));
        }
    }
    rest.push(new);
    *last = rest;
}
