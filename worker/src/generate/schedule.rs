//! Decides which requests are in the batch. Pure.
//!
//! ```text
//! Arrived --> waiting --admit: a slot is free--> active --Ended--> the slot is free again
//!                '------------- Ended: cancelled -------------> gone
//! ```
//! Requests are admitted in the order of their arrival. A request that ends or is cancelled frees its slot, or its
//! place in the queue.

use std::collections::{BTreeMap, VecDeque};

/// A change that concerns the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A request waits to be admitted.
    Arrived(usize),
    /// A request has ended, or was cancelled.
    Ended(usize),
}

/// A request that enters the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Admitted {
    pub(super) request: usize,
    /// Slot of the cache that it has until it ends.
    pub(super) slot: usize,
}

/// The requests of a batch.
#[derive(Debug)]
pub(super) struct Schedule {
    waiting: VecDeque<usize>,
    /// Slots of the requests in the batch.
    active: BTreeMap<usize, usize>,
    free: Vec<usize>,
}

impl Schedule {
    pub(super) fn new(slots: usize) -> Self {
        Self { waiting: VecDeque::new(), active: BTreeMap::new(), free: (0..slots).rev().collect() }
    }

    pub(super) fn apply(&mut self, event: Event) {
        match event {
            Event::Arrived(request) => self.waiting.push_back(request),
            Event::Ended(request) => match self.active.remove(&request) {
                Some(slot) => self.free.push(slot),
                None => self.waiting.retain(|waiting| *waiting != request),
            },
        }
    }

    /// Gives the free slots to the requests that have waited longest.
    pub(super) fn admit(&mut self) -> Vec<Admitted> {
        let count = self.free.len().min(self.waiting.len());
        let requests: Vec<usize> = self.waiting.drain(..count).collect();
        let slots = self.free.split_off(self.free.len() - count);
        let admitted = requests.into_iter().zip(slots.into_iter().rev());
        let admitted: Vec<_> = admitted.map(|(request, slot)| Admitted { request, slot }).collect();
        self.active.extend(admitted.iter().map(|it| (it.request, it.slot)));
        admitted
    }

    /// Returns whether no request is waiting or active.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.active.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn admitted(schedule: &mut Schedule) -> Vec<(usize, usize)> {
        schedule.admit().into_iter().map(|it| (it.request, it.slot)).collect()
    }

    #[test]
    fn requests_are_admitted_in_order_as_slots_become_free() {
        let mut schedule = Schedule::new(2);
        [5, 6, 7, 8].into_iter().for_each(|request| schedule.apply(Event::Arrived(request)));
        assert_eq!(admitted(&mut schedule), [(5, 0), (6, 1)]);
        assert_eq!(admitted(&mut schedule), []);
        // A cancelled request is not admitted, and one that ends makes room at once.
        schedule.apply(Event::Ended(7));
        schedule.apply(Event::Ended(6));
        assert_eq!(admitted(&mut schedule), [(8, 1)]);
        [5, 8].into_iter().for_each(|request| schedule.apply(Event::Ended(request)));
        assert!(schedule.is_idle());
    }

    proptest! {
        #[test]
        fn no_slot_is_given_twice_and_no_request_is_forgotten(
            slots in 1_usize..5,
            actions in prop::collection::vec(0_usize..12, 0..60),
        ) {
            let mut schedule = Schedule::new(slots);
            let (mut next, mut waiting, mut active) = (0, Vec::new(), BTreeMap::new());
            for action in actions {
                if action < 6 {
                    schedule.apply(Event::Arrived(next));
                    waiting.push(next);
                    next += 1;
                } else if action < 11 && next > 0 {
                    let request = action * 7 % next;
                    schedule.apply(Event::Ended(request));
                    waiting.retain(|it| *it != request);
                    active.remove(&request);
                }
                for Admitted { request, slot } in schedule.admit() {
                    prop_assert_eq!(waiting.remove(0), request);
                    prop_assert!(slot < slots && !active.values().any(|it| *it == slot));
                    active.insert(request, slot);
                }
                prop_assert!(waiting.is_empty() || active.len() == slots);
                prop_assert_eq!(schedule.is_idle(), waiting.is_empty() && active.is_empty());
            }
        }
    }
}
