//! Block headers: every granule of the address range belongs to exactly one block, and neighbours know each other.
//!
//! Headers live in a slab and are named by index, so no pointer is ever stored. A [`Handle`] adds a generation, which
//! changes whenever the block it names ends: a stale handle is told apart from a live one.

use std::panic::Location;

use super::clock::{Stamp, StreamId};

/// Every block starts and ends on a multiple of this many bytes.
pub const GRANULE: u64 = 512;

/// No block.
pub(crate) const NONE: u32 = u32::MAX;

/// What a block's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Addresses without memory behind them.
    Hole,
    /// Mapped, and nobody's.
    Free,
    /// Handed out.
    Used,
}

/// Which requests a block's memory serves. Neighbours of different arenas are never merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arena {
    /// Requests above [`SMALL`](super::SMALL), and runs for the small ones.
    Large,
    /// Parts of runs, so that a small buffer never pins a large hole.
    Small,
    /// Segments of their own, for registration with a communication library.
    Registered,
}

/// Who asked for a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// The line that asked.
    pub location: &'static Location<'static>,
    /// What it was for, see [`tag`](crate::tag); empty if not said.
    pub tag: &'static str,
}

/// One block, in one cache line. Sizes and places are in granules.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(crate) struct Block {
    pub(crate) start: u32,
    pub(crate) granules: u32,
    /// Neighbours in the address range.
    pub(crate) before: u32,
    pub(crate) after: u32,
    /// Neighbours in the bin, while free.
    pub(crate) bin_before: u32,
    pub(crate) bin_after: u32,
    pub(crate) generation: u32,
    pub(crate) state: State,
    pub(crate) arena: Arena,
    /// Whose work it was handed out for.
    pub(crate) stream: StreamId,
    /// While free: the work that must be done before it is used again. While used: other streams' work on it so far.
    pub(crate) stamp: Stamp,
}

/// What a block was handed out for; true of used blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Detail {
    /// Bytes asked for.
    pub(crate) bytes: u64,
    pub(crate) site: Option<Site>,
    /// Which request of a recorded step this serves; [`NONE`] outside one.
    pub(crate) ordinal: u32,
}

impl Block {
    /// A hole of no length.
    fn new() -> Self {
        Self {
            start: 0,
            granules: 0,
            before: NONE,
            after: NONE,
            bin_before: NONE,
            bin_after: NONE,
            generation: 0,
            state: State::Hole,
            arena: Arena::Large,
            stream: StreamId::default(),
            stamp: Stamp::default(),
        }
    }

    /// One granule past the block.
    pub(crate) fn end(&self) -> u32 {
        self.start + self.granules
    }
}

/// Names a block that was handed out: its index, and the generation in the upper half. (One word: two halves, written
/// apart and read together as the handle is moved about, would cost nanoseconds.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle(u64);

impl Handle {
    pub(crate) fn new(index: u32, generation: u32) -> Self {
        Self(u64::from(index) | u64::from(generation) << 32)
    }

    pub(crate) fn index(self) -> u32 {
        self.0 as u32
    }

    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// All headers, chained in address order from the first.
#[derive(Debug)]
pub(crate) struct Blocks {
    slots: Vec<Block>,
    details: Vec<Detail>,
    vacant: Vec<u32>,
    /// The block at address zero. Splits and merges keep the index of the lower part.
    first: u32,
}

impl Blocks {
    /// One hole of this many granules.
    pub(crate) fn new(granules: u32) -> Self {
        let mut blocks = Self { slots: Vec::new(), details: Vec::new(), vacant: Vec::new(), first: 0 };
        let first = blocks.grow();
        blocks.get_mut(first).granules = granules;
        blocks
    }

    pub(crate) fn get(&self, index: u32) -> &Block {
        &self.slots[index as usize]
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> &mut Block {
        &mut self.slots[index as usize]
    }

    pub(crate) fn detail(&self, index: u32) -> &Detail {
        &self.details[index as usize]
    }

    pub(crate) fn detail_mut(&mut self, index: u32) -> &mut Detail {
        &mut self.details[index as usize]
    }

    /// The block that a live handle names.
    pub(crate) fn live(&self, handle: Handle) -> Option<&Block> {
        self.slots
            .get(handle.index() as usize)
            .filter(|block| block.generation == handle.generation() && block.state == State::Used)
    }

    /// Indices in address order.
    pub(crate) fn in_order(&self) -> impl Iterator<Item = u32> {
        std::iter::successors(Some(self.first), |index| {
            Some(self.get(*index).after).filter(|after| *after != NONE)
        })
    }

    /// Cuts a block in two; the upper part, of the same kind, gets the index returned.
    pub(crate) fn split(&mut self, index: u32, lower: u32) -> u32 {
        let new = self.vacant.pop().unwrap_or_else(|| self.grow());
        let whole = self.get_mut(index);
        debug_assert!(lower > 0 && lower < whole.granules);
        let (start, granules, after) = (whole.start + lower, whole.granules - lower, whole.after);
        let (state, arena, stamp) = (whole.state, whole.arena, whole.stamp);
        whole.granules = lower;
        whole.after = new;
        if after != NONE {
            self.get_mut(after).before = new;
        }
        let upper = self.get_mut(new);
        upper.start = start;
        upper.granules = granules;
        upper.before = index;
        upper.after = after;
        upper.state = state;
        upper.arena = arena;
        upper.stamp = stamp;
        // Handles to the former block of this slot must not name this one.
        upper.generation = upper.generation.wrapping_add(1);
        new
    }

    /// Joins a block with the next one, whose index ends; the work to wait for is that of both.
    pub(crate) fn merge_with_next(&mut self, index: u32) {
        let next = self.get(index).after;
        let upper = self.get(next);
        let (granules, after, stamp) = (upper.granules, upper.after, upper.stamp);
        debug_assert!(self.get(index).end() == upper.start && self.get(index).state == upper.state);
        let block = self.get_mut(index);
        block.granules += granules;
        block.after = after;
        block.stamp.join(&stamp);
        if after != NONE {
            self.get_mut(after).before = index;
        }
        self.vacant.push(next);
    }

    /// One more slot.
    #[cold]
    fn grow(&mut self) -> u32 {
        self.slots.push(Block::new());
        self.details.push(Detail { bytes: 0, site: None, ordinal: NONE });
        // The range has fewer granules than u32::MAX, and each block has at least one.
        (self.slots.len() - 1) as u32
    }
}
