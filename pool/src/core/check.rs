//! The invariants of the module's documentation, checked in full: for tests, and for a doubt in the field.

use super::Core;
use super::blocks::{GRANULE, NONE, State};

impl Core {
    /// Walks all blocks; says what does not hold.
    pub fn check(&self) -> Result<(), String> {
        self.check_tiling()?;
        self.check_chunks()?;
        self.check_free()?;
        self.check_books()
    }

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
                return Err(format!("blocks {before} and {index} are both {kind:?} and not merged"));
            }
            last = Some(kind);
            (before, end) = (index, block.end());
        }
        let capacity = (self.backing.capacity() / GRANULE).min(u64::from(NONE / 2));
        if u64::from(end) + self.backing.granularity() / GRANULE <= capacity {
            return Err(format!("blocks end at {end} of {capacity}"));
        }
        Ok(())
    }

    /// Memory is mapped where blocks are not holes, and nowhere else.
    fn check_chunks(&self) -> Result<(), String> {
        let mut mapped = Vec::new();
        for (start, granules) in &self.chunks {
            match mapped.last_mut() {
                Some((_, end)) if *end == *start => *end = start + granules,
                Some((_, end)) if *end > *start => return Err(format!("two chunks at {start}")),
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
                    return Err(format!("hole {index} is not in its book"));
                }
                continue;
            }
            match blocks.last_mut() {
                Some((_, end)) if *end == block.start => *end = block.end(),
                _ => blocks.push((block.start, block.end())),
            }
        }
        if holes != self.holes.len() {
            return Err(format!("{holes} holes, {} in the book", self.holes.len()));
        }
        if mapped != blocks {
            return Err(format!("mapped {mapped:?}, blocks {blocks:?}"));
        }
        Ok(())
    }

    /// Every free block is in the bin of its size.
    fn check_free(&self) -> Result<(), String> {
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

    fn check_books(&self) -> Result<(), String> {
        let sum = |state| -> u64 {
            let blocks = self.blocks.in_order().map(|index| self.blocks.get(index));
            blocks.filter(|block| block.state == state).map(|block| u64::from(block.granules) * GRANULE).sum()
        };
        let (live, free) = (sum(State::Used), sum(State::Free));
        let chunks: u64 = self.chunks.values().map(|granules| u64::from(*granules) * GRANULE).sum();
        let books = (self.books.live.current(), self.books.mapped.current(), self.books.chunks.current());
        if books != (live, live + free, self.chunks.len() as u64) || chunks != live + free {
            return Err(format!("books {books:?}, live {live}, free {free}, chunks {chunks}"));
        }
        Ok(())
    }
}
