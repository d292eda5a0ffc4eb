//! A finished plan: the size and offset of each request of a step, in order, and the slots whose memory it reuses.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::pack::{Packing, pack};
use super::record::Recording;

/// Offset of a request that the plan does not serve.
const UNPLANNED: u32 = u32::MAX;

/// Index that refers to no slot.
const NO_SLOT: u32 = u32::MAX;

/// One request of a planned step.
#[derive(Debug)]
pub(crate) struct Slot {
    /// Twice the number of the step that last used the slot, plus one after it was freed; 0 if never used.
    pub(crate) state: AtomicU32,
    pub(crate) granules: u32,
    /// Offset in granules from the start of the region, or [`UNPLANNED`].
    offset: u32,
    /// One of the slots whose memory this one reuses, or [`NO_SLOT`]. Most slots have one or none.
    predecessor: u32,
    /// The other such slots, as a range of [`SlotTable::more_predecessors`].
    more_predecessors: (u32, u32),
}

impl Slot {
    /// Returns the offset in granules from the start of the region, if the plan serves the request.
    pub(crate) fn offset(&self) -> Option<u32> {
        (self.offset != UNPLANNED).then_some(self.offset)
    }
}

/// The plan of a step, which `server` serves.
#[derive(Debug)]
pub(crate) struct SlotTable<S: 'static> {
    pub(crate) server: &'static S,
    pub(crate) slots: Box<[Slot]>,
    /// Predecessors of slots that have several: within a step, the slots that last used each of their granules.
    more_predecessors: Box<[u32]>,
    /// Number of earlier slots that the plan serves, for each slot; the additional last entry is the total.
    served_before: Box<[u32]>,
    /// Length of the region in granules.
    pub(crate) granules: u32,
}

impl<S> SlotTable<S> {
    /// Plans a recorded step within `time`; `None` if the plan would serve nothing.
    pub(crate) fn new(server: &'static S, recording: &Recording, time: Duration) -> Option<Self> {
        let requests = recording.requests();
        let lives: Vec<_> = requests.iter().filter_map(|request| request.life).collect();
        if lives.is_empty() {
            return None;
        }
        let Packing { offsets, granules } = pack(&lives, time);
        let mut offsets = offsets.into_iter();
        let mut slots = Vec::with_capacity(requests.len());
        let mut served_before = vec![0];
        let mut predecessors = Vec::new();
        // The slot that last used each part of the region, as disjoint intervals (start, end, slot).
        let mut last_users: Vec<(u32, u32, u32)> = Vec::new();
        for (request, number) in requests.iter().zip(0_u32..) {
            let offset = request.life.and_then(|_| offsets.next()).unwrap_or(UNPLANNED);
            let first = predecessors.len() as u32;
            if offset != UNPLANNED {
                let user = (offset, offset + request.granules, number);
                replace_users(&mut last_users, user, &mut predecessors);
            }
            let predecessor = if predecessors.len() as u32 > first { predecessors.pop() } else { None };
            slots.push(Slot {
                state: AtomicU32::new(0),
                granules: request.granules,
                offset,
                predecessor: predecessor.unwrap_or(NO_SLOT),
                more_predecessors: (first, predecessors.len() as u32),
            });
            served_before.push(served_before[number as usize] + u32::from(offset != UNPLANNED));
        }
        Some(Self {
            server,
            slots: slots.into(),
            more_predecessors: predecessors.into(),
            served_before: served_before.into(),
            granules,
        })
    }

    /// Returns the slots in use.
    pub(crate) fn live(&self) -> impl Iterator<Item = &Slot> {
        // Steps count from one, so nonzero even states are in use.
        self.slots
            .iter()
            .filter(|slot| !matches!(slot.state.load(Relaxed), state if state == 0 || state % 2 == 1))
    }

    /// Returns how many slots before this one the plan serves.
    pub(crate) fn served_before(&self, number: usize) -> u64 {
        self.served_before.get(number).map_or(0, |count| u64::from(*count))
    }

    /// Returns whether all slots whose memory this one reuses are in this state.
    #[inline]
    pub(crate) fn predecessors_are(&self, slot: &Slot, state: u32) -> bool {
        let is = |predecessor: u32| {
            self.slots.get(predecessor as usize).is_some_and(|slot| slot.state.load(Relaxed) == state)
        };
        let (start, end) = slot.more_predecessors;
        (slot.predecessor == NO_SLOT || is(slot.predecessor))
            && (start == end || self.more_predecessors[start as usize..end as usize].iter().copied().all(is))
    }
}

/// Inserts a new interval on top of the others, and adds the slots that lose a part to `predecessors`.
fn replace_users(last_users: &mut Vec<(u32, u32, u32)>, new: (u32, u32, u32), predecessors: &mut Vec<u32>) {
    let (start, end, _) = new;
    let first = predecessors.len();
    let mut rest = Vec::with_capacity(last_users.len() + 2);
    for (s, e, slot) in last_users.drain(..) {
        if e <= start || end <= s {
            rest.push((s, e, slot));
            continue;
        }
        if !predecessors[first..].contains(&slot) {
            predecessors.push(slot);
        }
        if s < start {
            rest.push((s, start, slot));
        }
        if end < e {
            rest.push((end, e, slot));
        }
    }
    rest.push(new);
    *last_users = rest;
}
