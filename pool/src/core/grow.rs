//! Maps and unmaps memory, and enforces the limit. Apart from waits, only this part of the allocator calls the driver.
//!
//! Memory grows at the edges of the mapped memory, by a chunk that is a small fraction of it, or by the amount that the
//! request lacks if that is more. Growth is a transaction: blocks change only after the driver calls have succeeded.

use super::blocks::{Arena, Block, Blocks, NONE, State};
use super::clock::Stamp;
use super::{AllocError, Core, Place, Request};
use crate::backing::{GRANULE, Purpose};

/// Mapped bytes divided by the size of a chunk, within the bounds below: unneeded memory stays at one or two percent.
const MAPPED_PER_CHUNK: u64 = 256;
/// Smallest chunk in bytes.
const CHUNK_MIN: u64 = 2 << 20;
/// Largest chunk in bytes.
const CHUNK_MAX: u64 = 512 << 20;
/// Largest piece of general memory in bytes. A piece is unmapped as a whole, so this bounds the memory that one buffer
/// keeps mapped.
const PIECE_MAX: u64 = 512 << 20;

/// The part of a hole to map, in granules.
#[derive(Clone, Copy, Debug)]
struct Growth {
    start: u32,
    granules: u32,
}

impl Core {
    /// Maps the memory that a request lacks, so that a free block fits it.
    pub(super) fn grow(&mut self, request: &Request, arena: Arena, granules: u32) -> Result<(), AllocError> {
        let granularity = (self.backing.granularity() / GRANULE) as u32;
        let isolated = arena == Arena::Registered || !self.backing.is_contiguous();
        let chunk = if arena == Arena::Registered { 0 } else { self.chunk() };
        let too_large = AllocError::TooLarge { bytes: request.bytes };
        let Growth { start, granules: needed } =
            self.find_hole(request.place, granules, granularity, isolated).ok_or(too_large)?;
        let needed_bytes = u64::from(needed) * GRANULE;
        let held = self.held();
        let allowed = self.limit.saturating_sub(held);
        if needed_bytes > allowed {
            return Err(AllocError::Limit { limit: self.limit, needed: needed_bytes });
        }
        // Map a whole chunk if the range and the limit have room for it; halve the size while the driver refuses.
        let unit = self.backing.granularity();
        let margin = if isolated { granularity } else { 0 };
        let mut wanted = needed_bytes.max(chunk.min(allowed / unit * unit));
        loop {
            let wanted_granules = (wanted / GRANULE) as u32;
            let at = match request.place {
                Place::High if !isolated => (start + needed).checked_sub(wanted_granules),
                _ => Some(start),
            };
            let at = at.filter(|at| self.is_hole(*at, wanted_granules + margin));
            match at.map(|at| self.map(at, wanted, arena)) {
                Some(Ok(())) => return Ok(()),
                Some(Err(failure)) if wanted == needed_bytes => return Err(failure),
                _ => {}
            }
            wanted = (wanted / 2).next_multiple_of(unit).max(needed_bytes);
        }
    }

    /// Unmaps every chunk without live blocks and frees its memory; returns the number of bytes freed. Synchronises the
    /// device if there is anything to unmap.
    ///
    /// # Errors
    /// The first driver call that failed; chunks unmapped before it stay unmapped.
    pub fn trim(&mut self) -> Result<u64, AllocError> {
        let before = self.held();
        self.backing.reclaim()?;
        self.recycle_slabs();
        let unused = self.unused_chunks();
        if !unused.is_empty() {
            // No work may use memory that is unmapped, and the driver cannot tell which work does, so wait for all of
            // it.
            self.backing.synchronize()?;
            self.counters.synchronizations += 1;
            self.clear_stamps();
        }
        for (index, chunks) in unused {
            self.unmap(index, chunks)?;
        }
        Ok(before - self.held())
    }

    /// Returns the bytes that count towards the limit: mapped, external and stranded.
    pub fn held(&self) -> u64 {
        self.counters.mapped.current() + self.external + self.backing.stranded()
    }

    /// Returns the limit in bytes; `u64::MAX` if there is none.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Sets the limit in bytes. If more is already held, unused memory is unmapped.
    ///
    /// # Errors
    /// If a driver call fails while unmapping. The limit applies regardless.
    pub fn set_limit(&mut self, limit: u64) -> Result<(), AllocError> {
        self.limit = limit;
        if self.held() > limit {
            self.trim()?;
        }
        Ok(())
    }

    /// Counts bytes that other libraries hold on the same device towards the limit.
    ///
    /// # Errors
    /// If they do not fit within the limit, even after unused memory was unmapped.
    pub fn add_external(&mut self, bytes: u64) -> Result<(), AllocError> {
        let error = AllocError::Limit { limit: self.limit, needed: bytes };
        let fits = |core: &Self| core.held().checked_add(bytes).is_some_and(|held| held <= core.limit);
        if !fits(self) {
            self.trim()?;
        }
        if !fits(self) {
            return Err(error);
        }
        self.external += bytes;
        Ok(())
    }

    /// Stops counting bytes that were added by [`add_external`](Self::add_external).
    pub fn remove_external(&mut self, bytes: u64) {
        self.external = self.external.saturating_sub(bytes);
    }

    /// Returns the number of bytes that other libraries hold.
    pub fn external(&self) -> u64 {
        self.external
    }

    /// Clears every stamp and restarts the clocks; all work of all streams has completed.
    pub(super) fn clear_stamps(&mut self) {
        self.clocks.reset();
        let all: Vec<u32> = self.blocks.in_order().collect();
        for index in all {
            self.blocks.get_mut(index).stamp = Stamp::default();
        }
    }

    /// Returns the size of the next chunk in bytes.
    fn chunk(&self) -> u64 {
        (self.counters.mapped.current() / MAPPED_PER_CHUNK)
            .clamp(CHUNK_MIN, CHUNK_MAX)
            .next_multiple_of(self.backing.granularity())
    }

    /// Returns the smallest part of a hole to map to obtain a free block of `granules`. An `isolated` mapping does not
    /// touch other memory.
    fn find_hole(&self, place: Place, granules: u32, granularity: u32, isolated: bool) -> Option<Growth> {
        let whole = granules.checked_next_multiple_of(granularity)?;
        let fits = |hole: &u32| -> Option<Growth> {
            let block = self.blocks.get(*hole);
            if isolated {
                // A gap of one granularity on both sides prevents segments from being merged.
                let start = block.start + granularity;
                let fits = start + whole + granularity <= block.end();
                return fits.then_some(Growth { start, granules: whole });
            }
            let edge = if place == Place::Low { block.before } else { block.after };
            let needed = self.lacking(granules, edge).next_multiple_of(granularity);
            let start = if place == Place::Low { block.start } else { block.end().checked_sub(needed)? };
            (needed <= block.granules).then_some(Growth { start, granules: needed })
        };
        match place {
            Place::High => self.holes.values().rev().find_map(fits),
            Place::Low => self.holes.values().find_map(fits),
        }
    }

    /// Returns how many of `granules` are missing if the block `edge` is free and grows; all of them if it is not free.
    fn lacking(&self, granules: u32, edge: u32) -> u32 {
        let free = (edge != NONE)
            .then(|| self.blocks.get(edge))
            .filter(|edge| edge.state == State::Free && edge.arena == Arena::Large)
            .map_or(0, |edge| edge.granules);
        // At least one is missing: a block that is large enough would have been found before.
        granules.saturating_sub(free).max(1)
    }

    fn is_hole(&self, start: u32, granules: u32) -> bool {
        self.hole_at(start).is_some_and(|index| start + granules <= self.blocks.get(index).end())
    }

    /// Returns the hole that contains this granule.
    fn hole_at(&self, start: u32) -> Option<u32> {
        let (_, index) = self.holes.range(..=start).next_back()?;
        (start < self.blocks.get(*index).end()).then_some(*index)
    }

    /// Maps `bytes` at `start` and turns them into a free block.
    fn map(&mut self, start: u32, bytes: u64, arena: Arena) -> Result<(), AllocError> {
        let purpose = if arena == Arena::Registered { Purpose::Registered } else { Purpose::General };
        let whole = purpose == Purpose::Registered || !self.backing.is_contiguous();
        let piece_max = if whole { bytes } else { PIECE_MAX };
        let pieces: Vec<u64> =
            (0..bytes.div_ceil(piece_max)).map(|piece| piece_max.min(bytes - piece * piece_max)).collect();
        self.backing.map(u64::from(start) * GRANULE, &pieces, purpose)?;

        let mut at = start;
        for bytes in pieces {
            self.chunks.insert(at, (bytes / GRANULE) as u32);
            at += (bytes / GRANULE) as u32;
            self.counters.chunk_mapped(bytes);
        }
        let Some(hole) = self.hole_at(start) else { unreachable!("memory is mapped in holes only") };
        let index = self.carve(hole, start, at - start);
        let block = self.blocks.get_mut(index);
        (block.state, block.arena) = (State::Free, arena);
        block.stamp = Stamp::default();
        self.insert_free(index);
        Ok(())
    }

    /// Splits a part off a hole and removes the part from the map of holes.
    fn carve(&mut self, hole: u32, start: u32, granules: u32) -> u32 {
        let first = self.blocks.get(hole).start;
        self.holes.remove(&first);
        let mut index = hole;
        if start > first {
            index = self.blocks.split(hole, start - first);
            self.holes.insert(first, hole);
        }
        if self.blocks.get(index).granules > granules {
            let rest = self.blocks.split(index, granules);
            self.holes.insert(self.blocks.get(rest).start, rest);
        }
        index
    }

    /// Returns the free blocks that contain whole chunks, with those chunks from the highest to the lowest.
    pub(super) fn unused_chunks(&self) -> Vec<(u32, Vec<(u32, u32)>)> {
        let inside = |index: u32| {
            let block = self.blocks.get(index);
            let whole = |(start, granules): (&u32, &u32)| {
                (*start + *granules <= block.end()).then_some((*start, *granules))
            };
            self.chunks.range(block.start..block.end()).rev().filter_map(whole).collect::<Vec<_>>()
        };
        self.blocks
            .in_order()
            .filter(|index| {
                let block = self.blocks.get(*index);
                block.state == State::Free && block.arena != Arena::Small
            })
            .map(|index| (index, inside(index)))
            .filter(|(_, chunks)| !chunks.is_empty())
            .collect()
    }

    /// Unmaps chunks of one free block, from the highest to the lowest, so that the block keeps its index while it
    /// shrinks.
    fn unmap(&mut self, index: u32, chunks: Vec<(u32, u32)>) -> Result<(), AllocError> {
        for (start, granules) in chunks {
            let bytes = u64::from(granules) * GRANULE;
            self.backing.unmap(u64::from(start) * GRANULE, bytes)?;
            self.chunks.remove(&start);
            self.counters.chunk_unmapped(bytes);
            let Block { start: first, arena, .. } = *self.blocks.get(index);
            self.bins[arena as usize].remove(&mut self.blocks, index);
            if start + granules < self.blocks.get(index).end() {
                let rest = self.blocks.split(index, start + granules - first);
                self.bins[arena as usize].insert(&mut self.blocks, rest);
            }
            let part = if start > first {
                let part = self.blocks.split(index, start - first);
                self.bins[arena as usize].insert(&mut self.blocks, index);
                part
            } else {
                index
            };
            self.insert_hole(part);
        }
        Ok(())
    }

    /// Turns a block that is in no bin into a hole and merges it with neighbouring holes.
    fn insert_hole(&mut self, mut index: u32) {
        let block = self.blocks.get_mut(index);
        (block.state, block.arena) = (State::Hole, Arena::Large);
        let (before, after) = (block.before, block.after);
        let is_hole = |blocks: &Blocks, other: u32| other != NONE && blocks.get(other).state == State::Hole;
        if is_hole(&self.blocks, after) {
            self.holes.remove(&self.blocks.get(after).start);
            self.blocks.merge_with_next(index);
        }
        if is_hole(&self.blocks, before) {
            self.blocks.merge_with_next(before);
            index = before;
        }
        self.holes.insert(self.blocks.get(index).start, index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::Segments;
    use crate::backing::host::Host;
    use crate::core::Handle;

    /// Creates an allocator over separate segments, with a granularity of one granule.
    fn segments() -> Core {
        Core::new(Box::new(Segments::new(Host)))
    }

    fn alloc(core: &mut Core, granules: u32) -> Handle {
        core.alloc(&Request::new(u64::from(granules) * GRANULE)).unwrap()
    }

    /// Allocates two segments on either side of an unmapped one of `granules`; returns the handle of the last one.
    fn segments_around_hole(core: &mut Core, granules: u32) -> Handle {
        alloc(core, 5000);
        // The limit prevents the segment from being rounded up to a whole chunk.
        core.set_limit(core.held() + u64::from(granules) * GRANULE).unwrap();
        let middle = alloc(core, granules);
        core.set_limit(u64::MAX).unwrap();
        let last = alloc(core, 5000);
        core.free(middle).unwrap();
        core.trim().unwrap();
        last
    }

    #[test]
    fn smallest_chunk_is_independent_of_granularity() {
        for place in [Place::Low, Place::High] {
            let mut core = segments();
            core.alloc(&Request { place, ..Request::new(200 * GRANULE) }).unwrap();
            assert_eq!(core.counters.mapped.current(), CHUNK_MIN, "{place:?}");
        }
    }

    #[test]
    fn segment_of_the_size_of_a_hole_is_mapped_there() {
        let mut core = segments();
        segments_around_hole(&mut core, 5000);
        let starts = [(); 2].map(|()| {
            let handle = alloc(&mut core, 5000);
            core.blocks.live(handle).unwrap().start
        });
        assert_eq!(starts, [5002, 15004]);
        core.check().unwrap();
    }

    #[test]
    fn segments_never_touch() {
        let mut core = segments();
        let chunk = (CHUNK_MIN / GRANULE) as u32;
        // The hole is one granule too small for a whole chunk with gaps on both sides.
        let last = segments_around_hole(&mut core, chunk - 1);
        let mapped = core.counters.mapped.current();
        let handle = alloc(&mut core, 200);
        assert_eq!(core.counters.mapped.current() - mapped, CHUNK_MIN / 2);
        core.free(handle).unwrap();
        core.free(last).unwrap();
        core.check().unwrap();
        assert_eq!(core.heap_walk().len(), 3);
    }
}
