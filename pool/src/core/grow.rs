//! Mapping more memory and giving it back: the only part of the allocator that calls the driver, but for waits.
//!
//! Growth is at the edges of what is mapped, by a chunk that is a small share of all that is mapped, and by no more than
//! the request lacks when that is larger. It is a transaction: the blocks change after the driver has done its part.

use super::blocks::{Arena, Block, Blocks, GRANULE, NONE, State};
use super::clock::Stamp;
use super::{Core, Place, Refusal, Request};
use crate::backing::Purpose;

/// A chunk is this share of what is mapped, within the bounds below: memory mapped in vain stays a percent or two.
const CHUNK_SHARE: u64 = 256;
const CHUNK_MIN: u64 = 2 << 20;
const CHUNK_MAX: u64 = 512 << 20;
/// Longest piece of general memory: what can be unmapped at once.
const PIECE_MAX: u64 = 512 << 20;

/// Where to map, in granules.
#[derive(Clone, Copy, Debug)]
struct Growth {
    start: u32,
    granules: u32,
}

impl Core {
    /// Maps what a request lacks.
    pub(super) fn grow(&mut self, request: &Request, arena: Arena, granules: u32) -> Result<(), Refusal> {
        let granularity = (self.backing.granularity() / GRANULE) as u32;
        let isolated = arena == Arena::Registered || !self.backing.contiguous();
        let chunk = if arena == Arena::Registered { 0 } else { self.chunk() };
        let too_large = Refusal::TooLarge { bytes: request.bytes };
        let Growth { start, granules: needed } =
            self.room(request.place, granules, granularity, isolated).ok_or(too_large)?;
        let needed_bytes = u64::from(needed) * GRANULE;
        let held = self.held();
        let allowed = self.limit.saturating_sub(held);
        if needed_bytes > allowed {
            return Err(Refusal::Limit { limit: self.limit, needed: needed_bytes });
        }
        // Ask for a whole chunk where address range and limit have room; halve what the driver refuses.
        let unit = self.backing.granularity();
        let margin = if isolated { granularity } else { 0 };
        let mut wanted = needed_bytes.max(chunk.min(allowed / unit * unit));
        loop {
            let wanted_granules = (wanted / GRANULE) as u32;
            let at = match request.place {
                Place::High if !isolated => (start + needed).checked_sub(wanted_granules),
                _ => Some(start),
            };
            match at.filter(|at| self.is_hole(*at, wanted_granules + margin)) {
                Some(at) => match self.map(at, wanted, arena) {
                    Ok(()) => return Ok(()),
                    Err(failure) if wanted == needed_bytes => return Err(failure),
                    Err(_) => {}
                },
                None if wanted == needed_bytes => return Err(Refusal::TooLarge { bytes: request.bytes }),
                None => {}
            }
            wanted = (wanted / 2).next_multiple_of(unit).max(needed_bytes);
        }
    }

    /// Gives every chunk that lies in free blocks back to the driver; returns the bytes given back.
    ///
    /// # Errors
    /// The first failure of the driver; what was given back before it stays given back.
    pub fn trim(&mut self) -> Result<u64, Refusal> {
        let before = self.books.mapped.current() + self.backing.stranded();
        self.backing.reclaim()?;
        self.return_runs();
        let unused = self.unused_chunks();
        if unused.is_empty() {
            return Ok(before - self.books.mapped.current());
        }
        // Memory may be unmapped when no work uses it; the device cannot tell which work that is.
        self.backing.synchronize()?;
        self.books.synchronizations += 1;
        self.all_done();
        for (index, chunks) in unused {
            self.unmap(index, chunks)?;
        }
        Ok(before - self.books.mapped.current())
    }

    /// Bytes that count against the limit.
    pub fn held(&self) -> u64 {
        self.books.mapped.current() + self.external + self.backing.stranded()
    }

    /// The limit; `u64::MAX` where there is none.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Sets the limit. What is above it already is given back as far as it is free.
    pub fn set_limit(&mut self, limit: u64) -> Result<(), Refusal> {
        self.limit = limit;
        if self.held() > limit {
            self.trim()?;
        }
        Ok(())
    }

    /// Counts bytes that others hold of the same device against the limit.
    pub fn add_external(&mut self, bytes: u64) -> Result<(), Refusal> {
        let refusal = Refusal::Limit { limit: self.limit, needed: bytes };
        let fits = |core: &Self| core.held().checked_add(bytes).is_some_and(|held| held <= core.limit);
        if !fits(self) {
            self.trim()?;
        }
        if !fits(self) {
            return Err(refusal);
        }
        self.external += bytes;
        Ok(())
    }

    /// Others hold less than before.
    pub fn remove_external(&mut self, bytes: u64) {
        self.external = self.external.saturating_sub(bytes);
    }

    /// Bytes that others hold.
    pub fn external(&self) -> u64 {
        self.external
    }

    /// Forgets all order: every stream's work so far is done.
    pub(super) fn all_done(&mut self) {
        self.clocks.restart();
        let all: Vec<u32> = self.blocks.in_order().collect();
        for index in all {
            self.blocks.get_mut(index).stamp = Stamp::default();
        }
    }

    fn chunk(&self) -> u64 {
        (self.books.mapped.current() / CHUNK_SHARE)
            .clamp(CHUNK_MIN, CHUNK_MAX)
            .next_multiple_of(self.backing.granularity())
    }

    /// The least that must be mapped, and where, so that a free block of `granules` comes to be.
    fn room(&self, place: Place, granules: u32, granularity: u32, isolated: bool) -> Option<Growth> {
        let whole = granules.checked_next_multiple_of(granularity)?;
        let fits = |hole: &u32| -> Option<Growth> {
            let block = self.blocks.get(*hole);
            if isolated {
                // One granularity of distance on both sides: segments are no neighbours.
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
            Place::High if !isolated => self.holes.values().rev().find_map(fits),
            _ => self.holes.values().find_map(fits),
        }
    }

    /// What is missing to `granules` when the free block `edge`, if it is one, grows.
    fn lacking(&self, granules: u32, edge: u32) -> u32 {
        let free = (edge != NONE)
            .then(|| self.blocks.get(edge))
            .filter(|edge| edge.state == State::Free && edge.arena == Arena::Large)
            .map_or(0, |edge| edge.granules);
        // At least one: a block that is large enough would have been found.
        granules.saturating_sub(free).max(1)
    }

    fn is_hole(&self, start: u32, granules: u32) -> bool {
        self.hole_at(start).is_some_and(|index| start + granules <= self.blocks.get(index).end())
    }

    /// The hole that this place lies in.
    fn hole_at(&self, start: u32) -> Option<u32> {
        let (_, index) = self.holes.range(..=start).next_back()?;
        (start < self.blocks.get(*index).end()).then_some(*index)
    }

    fn map(&mut self, start: u32, bytes: u64, arena: Arena) -> Result<(), Refusal> {
        let purpose = if arena == Arena::Registered { Purpose::Registered } else { Purpose::General };
        let whole = purpose == Purpose::Registered || !self.backing.contiguous();
        let most = if whole { bytes } else { PIECE_MAX };
        let pieces: Vec<u64> =
            (0..bytes.div_ceil(most)).map(|piece| most.min(bytes - piece * most)).collect();
        self.backing.map(u64::from(start) * GRANULE, &pieces, purpose)?;

        let mut at = start;
        for bytes in pieces {
            self.chunks.insert(at, (bytes / GRANULE) as u32);
            at += (bytes / GRANULE) as u32;
            self.books.mapped_one(bytes);
        }
        let Some(hole) = self.hole_at(start) else { unreachable!("memory is mapped into holes") };
        let index = self.carve(hole, start, at - start);
        let block = self.blocks.get_mut(index);
        (block.state, block.arena) = (State::Free, arena);
        block.stamp = Stamp::default();
        self.insert_free(index);
        Ok(())
    }

    /// Cuts a part out of a hole, keeping the books of holes; the part is in none of them.
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

    /// Free blocks that hold whole chunks, with those chunks, the highest first.
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

    /// Unmaps chunks of one free block, given from the highest to the lowest.
    fn unmap(&mut self, index: u32, chunks: Vec<(u32, u32)>) -> Result<(), Refusal> {
        for (start, granules) in chunks {
            let bytes = u64::from(granules) * GRANULE;
            self.backing.unmap(u64::from(start) * GRANULE, bytes)?;
            self.chunks.remove(&start);
            self.books.unmapped_one(bytes);
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

    /// Turns a block that is in no bin into a hole, merged with its neighbours.
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
