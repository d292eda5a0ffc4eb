//! Block headers. Every granule of the address range belongs to exactly one block, and blocks are linked in address
//! order.
//!
//! Headers are elements of a `Vec` and are referred to by index, so no pointers are stored. A [`Handle`] also has a
//! generation, which changes when the block is freed, so that a stale handle is detected.

use std::panic::Location;

use super::clock::Stamp;
use crate::stream::StreamId;

/// Index that refers to no block.
pub(crate) const NONE: u32 = u32::MAX;

/// State of the memory of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// No memory is mapped.
    Hole,
    /// Mapped and not in use.
    Free,
    /// Allocated.
    Used,
}

/// Kind of requests that the memory of a block serves. Neighbours of different arenas are never merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arena {
    /// Requests above [`SMALL_MAX`](super::SMALL_MAX), and slabs for the small ones.
    Large,
    /// Parts of slabs, so that a small buffer never pins a large hole.
    Small,
    /// Separate segments for registration with a communication library.
    Registered,
}

/// Origin of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// Line of code that made the request.
    pub location: &'static Location<'static>,
    /// The [`tag`](fn@crate::tag) of the request; empty if there was none.
    pub tag: &'static str,
}

/// A block header, which fills one cache line. Positions and sizes are in granules.
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
    /// Stream for which the block was last allocated.
    pub(crate) stream: StreamId,
    /// While free: the work that must complete before the block is used again. While used: the work of other streams on
    /// it.
    pub(crate) stamp: Stamp,
}

/// The request that a used block serves. It is separate from the header, which the search for a free block reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Detail {
    /// Bytes requested.
    pub(crate) bytes: u64,
    pub(crate) site: Option<Site>,
    /// Position of the request in a recorded step; [`NONE`] outside a step.
    pub(crate) ordinal: u32,
}

impl Block {
    /// An empty hole.
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

    /// Returns the first granule after the block.
    pub(crate) fn end(&self) -> u32 {
        self.start + self.granules
    }
}

/// Refers to an allocated block: index in the lower half, generation in the upper half. It is one word rather than two
/// fields: moving two fields that were written separately stalls store forwarding, which costs nanoseconds.
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

/// All headers, linked in address order.
#[derive(Debug)]
pub(crate) struct Blocks {
    slots: Vec<Block>,
    details: Vec<Detail>,
    /// Slots that are not in use.
    vacant: Vec<u32>,
    /// Index of the block at offset 0. Splits and merges keep the index of the lower part.
    first: u32,
}

impl Blocks {
    /// Creates a single hole of this many granules.
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

    /// Returns the block of a handle; `None` if the handle is stale.
    pub(crate) fn live(&self, handle: Handle) -> Option<&Block> {
        self.slots
            .get(handle.index() as usize)
            .filter(|block| block.generation == handle.generation() && block.state == State::Used)
    }

    /// Returns the indices of all blocks in address order.
    pub(crate) fn in_order(&self) -> impl Iterator<Item = u32> {
        std::iter::successors(Some(self.first), |index| {
            Some(self.get(*index).after).filter(|after| *after != NONE)
        })
    }

    /// Splits a block after `lower` granules. The upper part is of the same kind; returns its index.
    pub(crate) fn split(&mut self, index: u32, lower: u32) -> u32 {
        let new = self.vacant.pop().unwrap_or_else(|| self.grow());
        let whole = self.get_mut(index);
        assert!(lower > 0 && lower < whole.granules);
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
        // Handles to the previous block of this slot must stay stale.
        upper.generation = upper.generation.wrapping_add(1);
        new
    }

    /// Merges a block with the next one, whose index becomes vacant. The new stamp covers the work on both.
    pub(crate) fn merge_with_next(&mut self, index: u32) {
        let next = self.get(index).after;
        let upper = self.get(next);
        let (granules, after, stamp) = (upper.granules, upper.after, upper.stamp);
        assert!(self.get(index).end() == upper.start && self.get(index).state == upper.state);
        let block = self.get_mut(index);
        block.granules += granules;
        block.after = after;
        block.stamp.join(&stamp);
        if after != NONE {
            self.get_mut(after).before = index;
        }
        self.vacant.push(next);
    }

    /// Adds a slot.
    #[cold]
    fn grow(&mut self) -> u32 {
        self.slots.push(Block::new());
        self.details.push(Detail { bytes: 0, site: None, ordinal: NONE });
        // This cannot overflow: every block has at least one granule, and the range has fewer than u32::MAX / 2.
        (self.slots.len() - 1) as u32
    }
}
