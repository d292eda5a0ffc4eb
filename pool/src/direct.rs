//! The pool switched off: a driver allocation for every buffer.
//!
//! A buffer's drop makes no driver call here either: what was dropped goes back to the driver at the next request.

use crate::backing::{Result, SegmentDriver};
use crate::core::{Books, GRANULE};

/// A driver, and the buffers to give back to it.
pub(crate) struct Direct {
    driver: Box<dyn SegmentDriver>,
    dropped: Vec<(u64, u64)>,
    pub(crate) books: Books,
}

impl std::fmt::Debug for Direct {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Direct").field("books", &self.books).finish_non_exhaustive()
    }
}

impl Direct {
    pub(crate) fn new(driver: Box<dyn SegmentDriver>) -> Self {
        Self { driver, dropped: Vec::new(), books: Books::default() }
    }

    /// What is allocated for a buffer.
    pub(crate) fn rounded(bytes: u64) -> u64 {
        bytes.max(1).next_multiple_of(GRANULE)
    }

    /// Memory for one buffer.
    pub(crate) fn alloc(&mut self, bytes: u64) -> Result<u64> {
        self.release()?;
        let rounded = Self::rounded(bytes);
        let address = self.driver.allocate(rounded)?;
        self.books.mapped_one(rounded);
        self.books.allocated(rounded, bytes);
        Ok(address)
    }

    pub(crate) fn free(&mut self, address: u64, bytes: u64) {
        let rounded = Self::rounded(bytes);
        self.books.freed(rounded, bytes);
        self.dropped.push((address, rounded));
    }

    /// Gives dropped buffers back; returns their bytes.
    pub(crate) fn release(&mut self) -> Result<u64> {
        let mut released = 0;
        while let Some((address, bytes)) = self.dropped.last().copied() {
            self.driver.free(address, bytes)?;
            self.dropped.pop();
            self.books.unmapped_one(bytes);
            released += bytes;
        }
        Ok(released)
    }
}
