//! The allocator of a pool that is off: a driver allocation for every buffer.
//!
//! Here, too, dropping a buffer makes no driver call: dropped buffers are freed at the next request.

use crate::backing::{GRANULE, Result, SegmentDriver};
use crate::core::Counters;

/// A driver, and the dropped buffers that still have to be freed.
pub(crate) struct DirectAllocator {
    driver: Box<dyn SegmentDriver>,
    /// Address and size of each dropped buffer.
    dropped: Vec<(u64, u64)>,
    pub(crate) counters: Counters,
}

impl std::fmt::Debug for DirectAllocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DirectAllocator").field("counters", &self.counters).finish_non_exhaustive()
    }
}

impl DirectAllocator {
    pub(crate) fn new(driver: Box<dyn SegmentDriver>) -> Self {
        Self { driver, dropped: Vec::new(), counters: Counters::default() }
    }

    /// Returns the size of the driver allocation for a buffer of this many bytes.
    pub(crate) fn rounded(bytes: u64) -> u64 {
        bytes.max(1).next_multiple_of(GRANULE)
    }

    /// Frees the dropped buffers, then allocates memory for one buffer.
    pub(crate) fn alloc(&mut self, bytes: u64) -> Result<u64> {
        self.release()?;
        let rounded = Self::rounded(bytes);
        let address = self.driver.allocate(rounded)?;
        self.counters.chunk_mapped(rounded);
        self.counters.allocated(rounded, bytes);
        Ok(address)
    }

    pub(crate) fn free(&mut self, address: u64, bytes: u64) {
        let rounded = Self::rounded(bytes);
        self.counters.freed(rounded, bytes);
        self.dropped.push((address, rounded));
    }

    /// Frees dropped buffers; returns their total size in bytes.
    pub(crate) fn release(&mut self) -> Result<u64> {
        let mut released = 0;
        while let Some((address, bytes)) = self.dropped.last().copied() {
            self.driver.free(address, bytes)?;
            self.dropped.pop();
            self.counters.chunk_unmapped(bytes);
            released += bytes;
        }
        Ok(released)
    }
}
