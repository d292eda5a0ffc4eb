//! Requests and frees.
//!
//! ```text
//! alloc: find --ready--> take
//!             --otherwise--> find_slow: wait for streams | slab | empty slabs | grow | trim and grow | part of a slab
//! free:  stamp, merge with free neighbours, insert into a bin
//! ```

use super::bins::{Fit, Place};
use super::blocks::{Arena, Detail, Handle, NONE, State};
use super::clock::Stamp;
use super::{AllocError, Core, Request, SLAB, SMALL_MAX, StaleHandle};
use crate::backing::{GRANULE, Purpose};
use crate::stream::StreamId;

impl Core {
    /// Allocates a block.
    ///
    /// # Errors
    /// If there is no memory for the request; the allocator stays usable.
    pub fn alloc(&mut self, request: &Request) -> Result<Handle, AllocError> {
        self.alloc_at(request).map(|(handle, _)| handle)
    }

    /// Same as [`alloc`](Self::alloc); also returns the address of the block.
    ///
    /// # Errors
    /// If there is no memory for the request; the allocator stays usable.
    pub fn alloc_at(&mut self, request: &Request) -> Result<(Handle, u64), AllocError> {
        let granules = self.granules(request.bytes)?;
        let arena = arena_of(request);
        let index = match self.find(arena, granules, request) {
            Fit::Ready(index) => index,
            other => self
                .find_slow(request, arena, granules, other)
                .inspect_err(|_| self.counters.failures += 1)?,
        };
        Ok(self.take(index, granules, request))
    }

    /// Frees a block. Its memory may be allocated again at once, for work that runs after all work that used it.
    ///
    /// # Errors
    /// If the block is not live.
    pub fn free(&mut self, handle: Handle) -> Result<(), StaleHandle> {
        self.blocks.live(handle).ok_or(StaleHandle)?;
        let clocks = &self.clocks;
        let block = self.blocks.get_mut(handle.index());
        clocks.stamp(&mut block.stamp, block.stream);
        block.generation = block.generation.wrapping_add(1);
        block.state = State::Free;
        let granules = block.granules;
        self.counters.freed(u64::from(granules) * GRANULE, self.blocks.detail(handle.index()).bytes);
        self.insert_free(handle.index());
        Ok(())
    }

    fn granules(&self, bytes: u64) -> Result<u32, AllocError> {
        let granules = bytes.max(1).div_ceil(GRANULE);
        let fits = granules <= u64::from(self.capacity);
        if fits { Ok(granules as u32) } else { Err(AllocError::TooLarge { bytes }) }
    }

    fn find(&self, arena: Arena, granules: u32, request: &Request) -> Fit {
        let clocks = &self.clocks;
        self.bins[arena as usize]
            .find(&self.blocks, granules, request.place, |block| clocks.ready(&block.stamp, request.stream))
    }

    /// Provides a ready block when `find` found none, by the cheapest means that works: insert waits, take a new slab,
    /// reuse empty slabs, map more, unmap unused memory and map again.
    #[cold]
    fn find_slow(
        &mut self,
        request: &Request,
        arena: Arena,
        granules: u32,
        found: Fit,
    ) -> Result<u32, AllocError> {
        if let Fit::NeedsWait(index) = found {
            self.insert_waits(index, request.stream)?;
            return Ok(index);
        }
        if arena == Arena::Small {
            return self.new_slab(request, granules);
        }
        self.recycle_slabs();
        if let Some(index) = self.find_and_wait(arena, granules, request)? {
            return Ok(index);
        }
        if let Err(error) = self.grow_or_remap(request, arena, granules) {
            // There is no more memory, but part of a slab may fit.
            let small = if arena == Arena::Large { Arena::Small } else { arena };
            return self.find_and_wait(small, granules, request)?.ok_or(error);
        }
        match self.find_and_wait(arena, granules, request)? {
            Some(index) => Ok(index),
            None => unreachable!("memory for the request was just mapped"),
        }
    }

    /// Maps the memory that the request lacks, after unmapping unused memory elsewhere if that is the only way.
    fn grow_or_remap(&mut self, request: &Request, arena: Arena, granules: u32) -> Result<(), AllocError> {
        let Err(error) = self.grow(request, arena, granules) else { return Ok(()) };
        if self.trim()? == 0 {
            return Err(error);
        }
        self.counters.retries += 1;
        self.grow(request, arena, granules)
    }

    /// Finds a block that fits and makes the stream wait for the work on it if needed.
    fn find_and_wait(
        &mut self,
        arena: Arena,
        granules: u32,
        request: &Request,
    ) -> Result<Option<u32>, AllocError> {
        match self.find(arena, granules, request) {
            Fit::Ready(index) => Ok(Some(index)),
            Fit::NeedsWait(index) => self.insert_waits(index, request.stream).map(|()| Some(index)),
            Fit::None => Ok(None),
        }
    }

    /// Makes empty slabs available to large requests. Called only when a large request lacks memory: otherwise slabs
    /// stay where they are, so that equal steps find equal memory.
    pub(super) fn recycle_slabs(&mut self) {
        let small = |index: u32| index != NONE && self.blocks.get(index).arena == Arena::Small;
        let empty = |index: &u32| {
            let block = self.blocks.get(*index);
            // The block has the size of a slab, or is the rest of a slab whose other parts were recycled before.
            let whole =
                u64::from(block.granules) * GRANULE >= SLAB || !(small(block.before) || small(block.after));
            block.state == State::Free && block.arena == Arena::Small && whole
        };
        let slabs: Vec<u32> = self.blocks.in_order().filter(empty).collect();
        for index in slabs {
            self.bins[Arena::Small as usize].remove(&mut self.blocks, index);
            self.blocks.get_mut(index).arena = Arena::Large;
            self.insert_free(index);
        }
    }

    /// Provides a block of a new slab, or a separate block if there is no memory for a whole slab.
    fn new_slab(&mut self, request: &Request, granules: u32) -> Result<u32, AllocError> {
        let slab = (SLAB / GRANULE) as u32;
        let ready = |core: &mut Self, granules| match core.find(Arena::Large, granules, request) {
            Fit::Ready(index) => Ok(index),
            other => core.find_slow(request, Arena::Large, granules, other),
        };
        match ready(self, slab) {
            Ok(index) => {
                let arena = self.blocks.get(index).arena;
                self.bins[arena as usize].remove(&mut self.blocks, index);
                let index = self.split_off(index, slab, request.place);
                self.blocks.get_mut(index).arena = Arena::Small;
                let index = self.insert_free(index);
                // The slab may have been merged with part of another slab that another stream still uses.
                self.insert_waits(index, request.stream)?;
                Ok(index)
            }
            Err(AllocError::Limit { .. } | AllocError::Driver(_)) => ready(self, granules),
            Err(other) => Err(other),
        }
    }

    /// Allocates a free block that is ready, after splitting off the part that is not needed.
    fn take(&mut self, index: u32, granules: u32, request: &Request) -> (Handle, u64) {
        let arena = self.blocks.get(index).arena;
        self.bins[arena as usize].remove(&mut self.blocks, index);
        let index = self.split_off(index, granules, request.place);
        let block = self.blocks.get_mut(index);
        block.state = State::Used;
        block.stream = request.stream;
        // The stream runs after all earlier work on the block, so later users need to wait for the stream only.
        block.stamp = Stamp::default();
        let (handle, start) = (Handle::new(index, block.generation), block.start);
        *self.blocks.detail_mut(index) = Detail { bytes: request.bytes, site: request.site, ordinal: NONE };
        self.counters.allocated(u64::from(granules) * GRANULE, request.bytes);
        (handle, self.address_of(start))
    }

    /// Splits `granules` off a block that is in no bin, puts the rest into its bin, and returns the part split off.
    fn split_off(&mut self, index: u32, granules: u32, place: Place) -> u32 {
        let Some(rest) = self.blocks.get(index).granules.checked_sub(granules).filter(|rest| *rest > 0)
        else {
            return index;
        };
        let arena = self.blocks.get(index).arena;
        let (wanted, rest) = match place {
            Place::Low => (index, self.blocks.split(index, granules)),
            Place::High => (self.blocks.split(index, rest), index),
        };
        self.bins[arena as usize].insert(&mut self.blocks, rest);
        wanted
    }

    /// Merges a free block that is in no bin with its free neighbours and puts the result into its bin.
    pub(super) fn insert_free(&mut self, mut index: u32) -> u32 {
        let block = self.blocks.get(index);
        let (before, after, arena) = (block.before, block.after, block.arena);
        let mergeable = |other: u32| {
            other != NONE && {
                let other = self.blocks.get(other);
                other.state == State::Free && other.arena == arena
            }
        };
        let (with_before, with_after) = (mergeable(before), mergeable(after));
        let bins = &mut self.bins[arena as usize];
        if with_after {
            bins.remove(&mut self.blocks, after);
            self.blocks.merge_with_next(index);
        }
        if with_before {
            bins.remove(&mut self.blocks, before);
            self.blocks.merge_with_next(before);
            index = before;
        }
        bins.insert(&mut self.blocks, index);
        index
    }

    /// Makes `stream` wait for all work that may still use a free block.
    fn insert_waits(&mut self, index: u32, stream: StreamId) -> Result<(), AllocError> {
        let stamp = self.blocks.get(index).stamp;
        for from in self.clocks.missing(&stamp, stream) {
            self.backing.insert_wait(from, stream)?;
            self.counters.waits_inserted += 1;
            self.record_wait(from, stream);
        }
        Ok(())
    }
}

fn arena_of(request: &Request) -> Arena {
    match request.purpose {
        Purpose::Registered => Arena::Registered,
        Purpose::General if request.bytes <= SMALL_MAX => Arena::Small,
        Purpose::General => Arena::Large,
    }
}
