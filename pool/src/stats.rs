//! What a pool has done and holds, in numbers.

use crate::core::{Books, Count};
use crate::error::fragmentation;

/// Counts of a pool at one moment. Bytes, unless a name says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// In buffers, rounded up to granules.
    pub live: Count,
    /// In buffers, as asked for.
    pub requested: Count,
    /// Buffers, in number.
    pub buffers: Count,
    /// Held from the driver.
    pub mapped: Count,
    /// Pieces held from the driver, in number: `added` counts driver allocations, `removed` what was given back.
    pub chunks: Count,
    /// Mapped, and neither in a buffer nor in the plans' region.
    pub free: u64,
    /// The longest free block.
    pub largest_free: u64,
    /// Free in chunks that also hold live buffers.
    pub held_back: u64,
    /// Requests refused for want of memory.
    pub out_of_memory: u64,
    /// Requests served after unused memory had been given back.
    pub retries: u64,
    /// Waits of one stream for another that reuse made necessary.
    pub waits_inserted: u64,
    /// Waits for the whole device.
    pub synchronizations: u64,
    /// Buffers whose drop found the pool busy, and left it to the next request.
    pub deferred_frees: u64,
    /// Requests served from a plan.
    pub plan_hits: u64,
    /// Requests of planned steps that departed from the plan.
    pub plan_misses: u64,
    /// Bytes of the plans' region; `live` counts what lies in it, not the region.
    pub plan_region: u64,
}

impl Stats {
    pub(crate) fn of(books: &Books) -> Self {
        Self {
            live: books.live,
            requested: books.requested,
            buffers: books.buffers,
            mapped: books.mapped,
            chunks: books.chunks,
            out_of_memory: books.refused,
            retries: books.retries,
            waits_inserted: books.waits_inserted,
            synchronizations: books.synchronizations,
            ..Self::default()
        }
    }

    /// Share of the free bytes that the longest free block cannot serve: 0 is one piece.
    pub fn fragmentation(&self) -> f64 {
        fragmentation(self.free, self.largest_free)
    }

    /// The counters under the names of `torch.cuda.memory_stats()`, those that have a meaning here.
    pub fn torch(&self) -> Vec<(String, u64)> {
        let mut all = Vec::new();
        let groups = [
            ("allocated_bytes", &self.live),
            ("active_bytes", &self.live),
            ("requested_bytes", &self.requested),
            ("reserved_bytes", &self.mapped),
            ("allocation", &self.buffers),
            ("active", &self.buffers),
            ("segment", &self.chunks),
        ];
        for (name, count) in groups {
            let (current, Count { peak, added, removed }) = (count.current(), *count);
            for (part, value) in
                [("current", current), ("peak", peak), ("allocated", added), ("freed", removed)]
            {
                all.push((format!("{name}.all.{part}"), value));
            }
        }
        all.push(("inactive_split_bytes.all.current".into(), self.held_back));
        let singles = [
            ("num_ooms", self.out_of_memory),
            ("num_alloc_retries", self.retries),
            ("num_device_alloc", self.chunks.added),
            ("num_device_free", self.chunks.removed),
            ("num_sync_all_streams", self.synchronizations),
        ];
        all.extend(singles.map(|(name, value)| (name.to_owned(), value)));
        all
    }
}
