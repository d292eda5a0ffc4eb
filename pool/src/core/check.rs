//! Verifies the invariants listed in the module documentation: for tests, fuzzing and debugging.

use super::Core;
use super::blocks::{NONE, State};
use crate::backing::GRANULE;

impl Core {
    /// Walks all blocks and verifies the invariants. Linear in the number of blocks.
    ///
    /// # Errors
    /// A description of the first violation.
    pub fn check(&self) -> Result<(), String> {
        self.check_tiling()?;
        self.check_chunks()?;
        self.check_bins()?;
        self.check_counters()
    }

    /// Checks that blocks tile the range, and that neighbours of the same kind are merged.
    fn check_tiling(&self) -> Result<(), String> {
        let (mut before, mut end) = (NONE, 0);
        let mut last = None;
        for index in self.blocks.in_order() {
            let block = self.blocks.get(index);
            if block.start != end || block.granules == 0 || block.before != before {
                return Err(format!("block {index} does not follow block {before}: {block:?}"));
            }
            let kind = (block.state, block.arena);
            if last == Some(kind) && block.state != State::Used {
                return Err(format!("blocks {before} and {index} are both {kind:?} but not merged"));
            }
            last = Some(kind);
            (before, end) = (index, block.end());
        }
        if end != self.capacity {
            return Err(format!("blocks end at granule {end} of {}", self.capacity));
        }
        Ok(())
    }

    /// Checks that memory is mapped exactly where blocks are not holes, and that every hole is in the map of holes.
    fn check_chunks(&self) -> Result<(), String> {
        let mut mapped = Vec::new();
        for (start, granules) in &self.chunks {
            match mapped.last_mut() {
                Some((_, end)) if *end == *start => *end = start + granules,
                _ => mapped.push((*start, start + granules)),
            }
        }
        let mut blocks = Vec::new();
        let mut holes = 0;
        for index in self.blocks.in_order() {
            let block = self.blocks.get(index);
            if block.state == State::Hole {
                holes += 1;
                if self.holes.get(&block.start) != Some(&index) {
                    return Err(format!("hole {index} is not in the map of holes"));
                }
                continue;
            }
            match blocks.last_mut() {
                Some((_, end)) if *end == block.start => *end = block.end(),
                _ => blocks.push((block.start, block.end())),
            }
        }
        if holes != self.holes.len() {
            return Err(format!("{holes} holes, but {} in the map of holes", self.holes.len()));
        }
        if mapped != blocks {
            return Err(format!("mapped {mapped:?}, blocks {blocks:?}"));
        }
        Ok(())
    }

    /// Checks that every free block is in the bin of its size.
    fn check_bins(&self) -> Result<(), String> {
        for index in self.blocks.in_order() {
            let block = self.blocks.get(index);
            if block.state != State::Free {
                continue;
            }
            if !self.bins[block.arena as usize].holds(&self.blocks, index) {
                return Err(format!("free block {index} is in no bin: {block:?}"));
            }
        }
        Ok(())
    }

    /// Checks that the counters equal the totals recomputed from the block list and the number of chunks.
    fn check_counters(&self) -> Result<(), String> {
        let total = |state| -> u64 {
            let blocks = self.blocks.in_order().map(|index| self.blocks.get(index));
            blocks.filter(|block| block.state == state).map(|block| u64::from(block.granules) * GRANULE).sum()
        };
        let (live, free) = (total(State::Used), total(State::Free));
        let counters = &self.counters;
        let counted = (counters.live.current(), counters.mapped.current(), counters.chunks.current());
        let expected = (live, live + free, self.chunks.len() as u64);
        if counted != expected {
            return Err(format!("counters of live, mapped and chunks are {counted:?}, not {expected:?}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Place;
    use crate::backing::host::Host;
    use crate::backing::{Segments, VirtualMemory};
    use crate::core::Request;
    use crate::core::bins::Bins;

    const MIB: u64 = 1 << 20;

    type Damage = fn(&mut Core);

    /// Creates two adjacent chunks at the low end of the range and one at the high end.
    fn core() -> Core {
        let mut core = Core::new(Box::new(VirtualMemory::new(Host, 64 * MIB).unwrap()));
        for (bytes, place) in [(3, Place::Low), (1, Place::Low), (1, Place::Low), (3, Place::High)] {
            core.alloc(&Request { place, ..Request::new(bytes * MIB) }).unwrap();
        }
        core
    }

    #[test]
    fn every_kind_of_damage_is_detected() {
        let states: Vec<_> = (0..7).map(|position| core().blocks.get(nth(&core(), position)).state).collect();
        let (hole, free, used) = (State::Hole, State::Free, State::Used);
        assert_eq!(states, [used, used, used, free, hole, free, used]);
        let damages: [(Damage, &str); 13] = [
            (|core| core.blocks.get_mut(nth(core, 1)).start += 1, "does not follow block 0:"),
            (|core| core.blocks.get_mut(nth(core, 1)).granules = 0, "does not follow block 0:"),
            (|core| core.blocks.get_mut(nth(core, 1)).before = NONE, "does not follow block 0:"),
            (|core| assert_ne!(core.blocks.split(nth(core, 3), 1), NONE), "but not merged"),
            (
                |core| core.blocks.get_mut(nth(core, 6)).granules -= 1,
                "blocks end at granule 131071 of 131072",
            ),
            (|core| assert!(core.chunks.pop_first().is_some()), "mapped ["),
            (|core| assert_eq!(core.chunks.insert(1, 1), None), "mapped ["),
            (|core| core.holes.clear(), "is not in the map of holes"),
            (|core| assert_eq!(core.holes.insert(0, 0), None), "1 holes, but 2 in the map of holes"),
            (|core| core.bins[0] = Bins::new(), "is in no bin"),
            (|core| core.counters.live.removed += 512, "counters of live, mapped and chunks"),
            (|core| core.counters.mapped.removed += 512, "counters of live, mapped and chunks"),
            (|core| core.counters.chunks.removed += 1, "counters of live, mapped and chunks"),
        ];
        for (number, (damage, expected)) in damages.into_iter().enumerate() {
            let mut core = core();
            core.check().unwrap();
            damage(&mut core);
            let error = core.check().unwrap_err();
            assert!(error.contains(expected), "damage {number}: {error}");
        }
    }

    /// Returns the index of the block at this position in address order.
    fn nth(core: &Core, position: usize) -> u32 {
        core.blocks.in_order().nth(position).unwrap()
    }

    #[test]
    fn new_allocator_satisfies_invariants() {
        Core::new(Box::new(Segments::new(Host))).check().unwrap();
    }
}
