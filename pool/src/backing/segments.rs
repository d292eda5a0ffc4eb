//! A back end in which every growth is a separate allocation: for devices without virtual memory management and for
//! pinned host memory.

use super::{Backing, Purpose, Result, SegmentDriver};
use crate::stream::StreamId;

/// Length of the range of offsets in bytes. Offsets are not addresses here, so the length costs nothing.
const CAPACITY: u64 = 1 << 40;

/// Memory of a [`SegmentDriver`].
#[derive(Debug)]
pub struct Segments<D: SegmentDriver> {
    driver: D,
    /// Segments in order of offset.
    segments: Vec<Segment>,
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    offset: u64,
    address: u64,
}

impl<D: SegmentDriver> Segments<D> {
    /// Creates a back end without memory.
    pub fn new(driver: D) -> Self {
        Self { driver, segments: Vec::new() }
    }

    /// Returns the number of segments that start at or before `offset`.
    fn up_to(&self, offset: u64) -> usize {
        self.segments.partition_point(|segment| segment.offset <= offset)
    }
}

impl<D: SegmentDriver> Backing for Segments<D> {
    fn capacity(&self) -> u64 {
        CAPACITY
    }

    fn granularity(&self) -> u64 {
        self.driver.granularity()
    }

    fn is_contiguous(&self) -> bool {
        false
    }

    fn address(&self, offset: u64) -> u64 {
        let segment = self.segments[self.up_to(offset) - 1];
        segment.address + (offset - segment.offset)
    }

    fn map(&mut self, offset: u64, pieces: &[u64], _: Purpose) -> Result<()> {
        let address = self.driver.allocate(pieces.iter().sum())?;
        let index = self.up_to(offset);
        self.segments.insert(index, Segment { offset, address });
        Ok(())
    }

    fn unmap(&mut self, offset: u64, bytes: u64) -> Result<()> {
        let index = self.up_to(offset) - 1;
        assert_eq!(self.segments[index].offset, offset, "segments are unmapped whole");
        self.driver.free(self.segments[index].address, bytes)?;
        self.segments.remove(index);
        Ok(())
    }

    fn stranded(&self) -> u64 {
        0
    }

    fn reclaim(&mut self) -> Result<()> {
        Ok(())
    }

    fn synchronize(&mut self) -> Result<()> {
        self.driver.synchronize()
    }

    fn insert_wait(&mut self, from: StreamId, to: StreamId) -> Result<()> {
        self.driver.insert_wait(from, to)
    }

    fn memory_info(&self) -> Option<(u64, u64)> {
        self.driver.memory_info()
    }
}
