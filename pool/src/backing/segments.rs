//! Every growth is an allocation of its own: for devices without virtual memory, and for pinned host memory.

use super::{Backing, Purpose, Result, SegmentDriver};
use crate::core::StreamId;

/// Length of the range of offsets, which are not addresses here: 2^40 bytes.
const CAPACITY: u64 = 1 << 40;

/// Memory of a [`SegmentDriver`].
#[derive(Debug)]
pub struct Segments<D: SegmentDriver> {
    driver: D,
    /// In order of offsets.
    segments: Vec<Segment>,
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    offset: u64,
    address: u64,
}

impl<D: SegmentDriver> Segments<D> {
    /// Memory of this driver.
    pub fn new(driver: D) -> Self {
        Self { driver, segments: Vec::new() }
    }

    /// The number of segments that begin at or before `offset`.
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

    fn contiguous(&self) -> bool {
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
        debug_assert_eq!(self.segments[index].offset, offset, "segments are given back whole");
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

    fn order(&mut self, from: StreamId, to: StreamId) -> Result<()> {
        self.driver.order(from, to)
    }

    fn memory(&self) -> Option<(u64, u64)> {
        self.driver.memory()
    }
}
