//! Verification of the invariants of the module documentation: for tests, fuzzing and debugging.

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

    /// Blocks tile the range, and neighbours of the same kind are merged.
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

    /// Memory is mapped exactly where blocks are not holes, and every hole is in the map of holes.
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

    /// Every free block is in the bin of its size.
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

    /// The counters equal the totals recomputed from the block list and the number of chunks.
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
