//! The allocator: places blocks in one range of addresses over any [`Backing`]. It has no lock, no device and no clock.
//!
//! The range is tiled by blocks: holes (no memory mapped), free blocks and used blocks. A request takes the best of a
//! few fitting free blocks (two-level segregated fit) and splits off the part that it does not need; a freed block is
//! immediately merged with its free neighbours. Memory is mapped at the edges of the mapped memory: persistent buffers
//! grow from the low end of the range, buffers of a step from the high end. Requests up to [`SMALL_MAX`] are served
//! from slabs of [`SLAB`] bytes, so that a small buffer never pins a large hole.
//!
//! A free block carries a stamp of the work that used it. It serves another stream only if vector clocks show that the
//! stream runs after that work; if nothing else fits, the allocator makes the stream wait.
//!
//! Invariants; [`Core::check`] verifies the first two:
//! - blocks tile the range, neighbours of the same kind are merged, every free block is in exactly one bin;
//! - the counters equal the totals recomputed from the block list;
//! - mapping never takes mapped, external and stranded bytes together above the limit;
//! - a block is allocated for a stream only if the stream runs after all work that used the block.
//!
//! Files: `alloc`: requests and frees; `grow`: mapping, unmapping and the limit; `blocks`: headers; `bins`: free blocks
//! by size; `clock`: order of streams; `counters`; `heap_walk`: queries for reports; `check`: the invariants.

mod alloc;
mod bins;
mod blocks;
mod check;
mod clock;
mod counters;
mod grow;
mod heap_walk;

pub use bins::Place;
pub use blocks::{Handle, Site};
pub use counters::{Counter, Counters};
pub use heap_walk::BlockInfo;

use std::collections::BTreeMap;

use crate::backing::{Backing, DriverFailure, GRANULE, Purpose};
use crate::stream::StreamId;
use bins::Bins;
use blocks::{Blocks, NONE};
use clock::Clocks;

/// Largest request in bytes that is served from a slab.
pub const SMALL_MAX: u64 = 64 << 10;
/// Size of a slab in bytes.
pub const SLAB: u64 = 2 << 20;

/// A request to the allocator.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Bytes; zero counts as one granule.
    pub bytes: u64,
    /// Stream whose work uses the block first.
    pub stream: StreamId,
    /// Preferred end of the range.
    pub place: Place,
    /// Use of the block: one that is to be registered needs a separate segment.
    pub purpose: Purpose,
    /// Origin of the request.
    pub site: Option<Site>,
}

impl Request {
    /// Creates a request for general memory at the low end of the range, for the first stream.
    pub fn new(bytes: u64) -> Self {
        Self {
            bytes,
            stream: StreamId::default(),
            place: Place::default(),
            purpose: Purpose::General,
            site: None,
        }
    }
}

/// Reason why a request failed. Nothing has changed, except that unused memory may have been unmapped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocError {
    /// The address range has no room for the request.
    #[error("{bytes} bytes exceed the address range of the pool")]
    TooLarge {
        /// Bytes requested.
        bytes: u64,
    },
    /// Mapping the missing memory would exceed the limit.
    #[error("mapping {needed} more bytes would exceed the limit of {limit} bytes")]
    Limit {
        /// The limit in bytes.
        limit: u64,
        /// Bytes that would have to be mapped.
        needed: u64,
    },
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverFailure),
}

/// A handle that does not name a live block: the block was freed, or it belongs to another pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the block is not live: it was freed already, or belongs to another pool")]
pub struct StaleHandle;

/// The allocator.
pub struct Core {
    backing: Box<dyn Backing>,
    /// Address of offset 0, if addresses are this base plus the offset.
    base: Option<u64>,
    blocks: Blocks,
    /// Free blocks, by arena.
    bins: [Bins; 3],
    /// Holes, from start to index.
    holes: BTreeMap<u32, u32>,
    /// Mapped pieces, from start to length, in granules. A piece is unmapped as a whole.
    chunks: BTreeMap<u32, u32>,
    clocks: Clocks,
    counters: Counters,
    /// Length of the range in granules.
    capacity: u32,
    limit: u64,
    external: u64,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core")
            .field("counters", &self.counters)
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

impl Core {
    /// Creates an allocator with nothing mapped. It uses at most 1 TiB of the range.
    pub fn new(backing: Box<dyn Backing>) -> Self {
        // Positions are 32-bit granule numbers. One bit is spare, so that the sum of two never overflows.
        let most = u64::from(NONE / 2) * GRANULE;
        let capacity = backing.capacity().min(most) / backing.granularity() * backing.granularity();
        let granules = (capacity / GRANULE) as u32;
        Self {
            base: backing.is_contiguous().then(|| backing.address(0)),
            blocks: Blocks::new(granules),
            bins: [Bins::new(), Bins::new(), Bins::new()],
            holes: BTreeMap::from([(0, 0)]),
            chunks: BTreeMap::new(),
            clocks: Clocks::new(),
            counters: Counters::default(),
            capacity: granules,
            limit: u64::MAX,
            external: 0,
            backing,
        }
    }

    /// Returns the address of a live block.
    ///
    /// # Errors
    /// If the block is not live.
    pub fn address(&self, handle: Handle) -> Result<u64, StaleHandle> {
        let block = self.blocks.live(handle).ok_or(StaleHandle)?;
        Ok(self.address_of(block.start))
    }

    /// Returns the number of streams; at least one.
    pub fn streams(&self) -> usize {
        self.clocks.streams().count()
    }

    /// Adds a stream; `None` if there are [`MAX_STREAMS`](crate::MAX_STREAMS) already.
    pub fn add_stream(&mut self) -> Option<StreamId> {
        self.clocks.add_stream()
    }

    /// Records that work submitted to `stream` so far uses the block. After the block is freed, it serves only work
    /// that also runs after that work.
    ///
    /// # Errors
    /// If the block is not live.
    pub fn record_use(&mut self, handle: Handle, stream: StreamId) -> Result<(), StaleHandle> {
        self.blocks.live(handle).ok_or(StaleHandle)?;
        self.clocks.stamp(&mut self.blocks.get_mut(handle.index()).stamp, stream);
        Ok(())
    }

    /// Records that the caller has made all later work of `to` wait for all work submitted to `from` so far.
    pub fn record_wait(&mut self, from: StreamId, to: StreamId) {
        if from != to && !self.clocks.record_wait(from, to) {
            self.reset_clocks();
        }
    }

    /// Records that the host has waited for all work submitted to `stream` so far.
    pub fn record_synchronize(&mut self, stream: StreamId) {
        if !self.clocks.record_synchronize(stream) {
            self.reset_clocks();
        }
    }

    /// Returns the counters of the allocator's holdings and operations.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Resets the peak of every counter to its current value.
    pub fn reset_peaks(&mut self) {
        self.counters.reset_peaks();
    }

    fn address_of(&self, start: u32) -> u64 {
        let offset = u64::from(start) * GRANULE;
        match self.base {
            Some(base) => base + offset,
            None => self.backing.address(offset),
        }
    }

    /// Synchronises the device and restarts all counts, because the count of a stream is exhausted, after about 2^32
    /// waits.
    #[cold]
    fn reset_clocks(&mut self) {
        // If synchronising fails, the wait is not recorded, and the next use of the memory waits again.
        if self.backing.synchronize().is_ok() {
            self.clear_stamps();
        }
    }
}
