//! What a look at all blocks tells: for reports, not for the way of a request.

use super::blocks::{GRANULE, Site, State};
use super::{Core, Handle, StreamId};

/// A block with memory, as reports show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockInfo {
    /// Its address.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
    /// Bytes asked for, while in use.
    pub requested: Option<u64>,
    /// Whose work it serves, or last served.
    pub stream: StreamId,
    /// Who asked for it, or did last.
    pub site: Option<Site>,
}

impl Core {
    /// All blocks with memory, in order of places; neighbours in one inner list have neighbouring addresses.
    pub fn survey(&self) -> Vec<Vec<BlockInfo>> {
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

    /// Length of the longest free block.
    pub fn largest_free(&self) -> u64 {
        let longest = |bins: &super::Bins| bins.longest(&self.blocks);
        u64::from(self.bins.iter().map(longest).max().unwrap_or(0)) * GRANULE
    }

    /// For each stream, the free bytes that its work stands against handing to `stream`.
    pub fn pending(&self, stream: StreamId) -> Vec<(StreamId, u64)> {
        let mut pending: Vec<(StreamId, u64)> = self.clocks.streams().map(|stream| (stream, 0)).collect();
        let free = self.blocks.in_order().map(|index| self.blocks.get(index));
        for block in free.filter(|block| block.state == State::Free) {
            for other in self.clocks.missing(&block.stamp, stream) {
                pending[other.index()].1 += u64::from(block.granules) * GRANULE;
            }
        }
        pending.retain(|(_, bytes)| *bytes != 0);
        pending
    }

    /// Free bytes in chunks that also hold live buffers: what cannot be given back.
    pub fn held_back(&self) -> u64 {
        let free = self.books.mapped.current() - self.books.live.current();
        let unused: u64 = self
            .unused_chunks()
            .iter()
            .flat_map(|(_, chunks)| chunks)
            .map(|(_, granules)| u64::from(*granules) * GRANULE)
            .sum();
        free - unused
    }

    /// Free and total bytes of the device, where it tells. A driver call.
    pub fn device_memory(&self) -> Option<(u64, u64)> {
        self.backing.memory()
    }

    /// The mapped chunk that a live block lies in: address and length of what a communication library registers.
    pub fn segment_of(&self, handle: Handle) -> Option<(u64, u64)> {
        let block = self.blocks.live(handle)?;
        let (start, granules) = self.chunks.range(..=block.start).next_back()?;
        Some((self.address_of(*start), u64::from(*granules) * GRANULE))
    }

    /// The request of a recorded step that a live block serves.
    pub(crate) fn ordinal(&self, handle: Handle) -> Option<u32> {
        self.blocks.live(handle)?;
        Some(self.blocks.detail(handle.index()).ordinal).filter(|ordinal| *ordinal != super::NONE)
    }

    /// Notes which request of a recorded step a live block serves.
    pub(crate) fn set_ordinal(&mut self, handle: Handle, ordinal: u32) {
        if self.blocks.live(handle).is_some() {
            self.blocks.detail_mut(handle.index()).ordinal = ordinal;
        }
    }

    /// A live block.
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
