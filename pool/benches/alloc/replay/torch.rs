//! A model of PyTorch's caching allocator with its default settings, on one stream: the rules of
//! `CUDACachingAllocator.cpp` (`round_size`, `get_allocation_size`, `should_split`, `free_block`) without memory.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::Model;

const MIN_BLOCK: u64 = 512;
/// Largest request of the small pool.
const SMALL_SIZE: u64 = 1 << 20;
const SMALL_BUFFER: u64 = 2 << 20;
const LARGE_BUFFER: u64 = 20 << 20;
/// Smallest request that gets a segment of exactly its size.
const MIN_LARGE_ALLOC: u64 = 10 << 20;
const ROUND_LARGE: u64 = 2 << 20;
/// Gap between segments, so that blocks of different segments are never merged.
const GAP: u64 = 1 << 20;

#[derive(Clone, Copy)]
struct Block {
    bytes: u64,
    free: bool,
}

#[derive(Default)]
pub(super) struct Torch {
    /// Blocks by address.
    blocks: BTreeMap<u64, Block>,
    /// Size and address of the free blocks of the small and of the large pool.
    free: [BTreeSet<(u64, u64)>; 2],
    /// Pool of each used block, by address.
    pools: HashMap<u64, usize>,
    next_segment: u64,
    mapped: u64,
}

impl Model for Torch {
    /// Serves a request. The token is the address.
    fn alloc(&mut self, bytes: u64, _: bool) -> u64 {
        let bytes = bytes.max(1).next_multiple_of(MIN_BLOCK);
        let pool = usize::from(bytes > SMALL_SIZE);
        let found = self.free[pool].range((bytes, 0)..).next().copied();
        let (size, address) = found.unwrap_or_else(|| self.segment(bytes, pool));
        self.free[pool].remove(&(size, address));
        let rest = size - bytes;
        let split = if pool == 0 { rest >= MIN_BLOCK } else { rest > SMALL_SIZE };
        let bytes = if split {
            self.insert_free(address + bytes, rest, pool);
            bytes
        } else {
            size
        };
        self.blocks.insert(address, Block { bytes, free: false });
        self.pools.insert(address, pool);
        address
    }

    fn free(&mut self, mut address: u64) {
        let (Some(block), Some(pool)) = (self.blocks.remove(&address), self.pools.remove(&address)) else {
            return;
        };
        let mut bytes = block.bytes;
        if let Some((next, other)) = self.blocks.range(address..).next().map(|(at, block)| (*at, *block))
            && next == address + bytes
            && other.free
        {
            self.remove_free(next, other.bytes, pool);
            bytes += other.bytes;
        }
        if let Some((before, other)) =
            self.blocks.range(..address).next_back().map(|(at, block)| (*at, *block))
            && before + other.bytes == address
            && other.free
        {
            self.remove_free(before, other.bytes, pool);
            (address, bytes) = (before, bytes + other.bytes);
        }
        self.insert_free(address, bytes, pool);
    }

    fn mapped(&self) -> u64 {
        self.mapped
    }
}

impl Torch {
    /// Maps a segment for a request; returns its size and address.
    fn segment(&mut self, bytes: u64, pool: usize) -> (u64, u64) {
        let size = match bytes {
            _ if pool == 0 => SMALL_BUFFER,
            bytes if bytes < MIN_LARGE_ALLOC => LARGE_BUFFER,
            bytes => bytes.next_multiple_of(ROUND_LARGE),
        };
        let address = self.next_segment;
        self.next_segment += size + GAP;
        self.mapped += size;
        (size, address)
    }

    fn insert_free(&mut self, address: u64, bytes: u64, pool: usize) {
        self.blocks.insert(address, Block { bytes, free: true });
        self.free[pool].insert((bytes, address));
    }

    fn remove_free(&mut self, address: u64, bytes: u64, pool: usize) {
        self.blocks.remove(&address);
        self.free[pool].remove(&(bytes, address));
    }
}
