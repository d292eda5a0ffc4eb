//! Queries over all blocks, for reports. They take time linear in the number of blocks, and are never part of a
//! request.

use super::blocks::{Handle, Site, State};
use super::{Core, NONE};
use crate::backing::GRANULE;
use crate::stream::StreamId;

/// A free or used block, as shown in reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockInfo {
    /// Address of the block's first byte.
    pub address: u64,
    /// Length of the block in bytes.
    pub bytes: u64,
    /// Bytes requested, while the block is in use.
    pub requested: Option<u64>,
    /// Stream for which the block was last allocated.
    pub stream: StreamId,
    /// Origin of the last allocation.
    pub site: Option<Site>,
}

impl Core {
    /// Returns all free and used blocks in address order. Blocks with consecutive addresses form one inner list.
    pub fn heap_walk(&self) -> Vec<Vec<BlockInfo>> {
        let mut segments: Vec<Vec<BlockInfo>> = Vec::new();
        let mut end = None;
        for index in self.blocks.in_order() {
            if self.blocks.get(index).state == State::Hole {
                continue;
            }
            let info = self.info(index);
            match segments.last_mut() {
                Some(segment) if end == Some(info.address) => segment.push(info),
                _ => segments.push(vec![info]),
            }
            end = Some(info.address + info.bytes);
        }
        segments
    }

    /// Returns the size of the largest free block in bytes.
    pub fn largest_free(&self) -> u64 {
        let largest = |bins: &super::Bins| bins.largest(&self.blocks);
        u64::from(self.bins.iter().map(largest).max().unwrap_or(0)) * GRANULE
    }

    /// Returns, for each stream that `stream` would have to wait for, the free bytes that the work of that stream may
    /// still use.
    pub fn pending(&self, stream: StreamId) -> Vec<(StreamId, u64)> {
        let mut pending: Vec<(StreamId, u64)> = self.clocks.streams().map(|stream| (stream, 0)).collect();
        let blocks = self.blocks.in_order().map(|index| self.blocks.get(index));
        for block in blocks.filter(|block| block.state == State::Free) {
            for other in self.clocks.missing(&block.stamp, stream) {
                pending[other.index()].1 += u64::from(block.granules) * GRANULE;
            }
        }
        pending.retain(|(_, bytes)| *bytes != 0);
        pending
    }

    /// Returns the free bytes in chunks that also hold live buffers, which therefore cannot be unmapped.
    pub fn inactive_split(&self) -> u64 {
        let free = self.counters.mapped.current() - self.counters.live.current();
        let unused: u64 = self
            .unused_chunks()
            .iter()
            .flat_map(|(_, chunks)| chunks)
            .map(|(_, granules)| u64::from(*granules) * GRANULE)
            .sum();
        free - unused
    }

    /// Returns free and total bytes of the device, if the driver reports them. Makes a driver call.
    pub fn device_memory(&self) -> Option<(u64, u64)> {
        self.backing.memory_info()
    }

    /// Returns address and length of the chunk that contains a live block, as registered with a communication library.
    pub fn segment_of(&self, handle: Handle) -> Option<(u64, u64)> {
        let block = self.blocks.live(handle)?;
        let (start, granules) = self.chunks.range(..=block.start).next_back()?;
        Some((self.address_of(*start), u64::from(*granules) * GRANULE))
    }

    /// Returns the index of the request of a recorded step that a live block serves.
    pub(crate) fn ordinal(&self, handle: Handle) -> Option<u32> {
        self.blocks.live(handle)?;
        Some(self.blocks.detail(handle.index()).ordinal).filter(|ordinal| *ordinal != NONE)
    }

    /// Sets the index of the request of a recorded step that a live block serves.
    pub(crate) fn set_ordinal(&mut self, handle: Handle, ordinal: u32) {
        if self.blocks.live(handle).is_some() {
            self.blocks.detail_mut(handle.index()).ordinal = ordinal;
        }
    }

    /// Describes a live block.
    pub(crate) fn block_info(&self, handle: Handle) -> Option<BlockInfo> {
        self.blocks.live(handle).map(|_| self.info(handle.index()))
    }

    fn info(&self, index: u32) -> BlockInfo {
        let (block, detail) = (self.blocks.get(index), self.blocks.detail(index));
        BlockInfo {
            address: self.address_of(block.start),
            bytes: u64::from(block.granules) * GRANULE,
            requested: (block.state == State::Used).then_some(detail.bytes),
            stream: block.stream,
            site: detail.site,
        }
    }
}
