//! Statistics of a pool.

use crate::core::{Counter, Counters};

/// Statistics of a pool at one moment, in bytes unless noted otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of live buffers, rounded up to granules of 512 bytes.
    pub live: Counter,
    /// Bytes of live buffers as requested.
    pub requested: Counter,
    /// Number of live buffers.
    pub buffers: Counter,
    /// Bytes allocated from the driver.
    pub mapped: Counter,
    /// Number of pieces allocated from the driver: `added` counts driver allocations, `removed` frees.
    pub chunks: Counter,
    /// Mapped bytes that neither a buffer nor the plan region uses.
    pub free: u64,
    /// Size of the largest free block.
    pub largest_free: u64,
    /// Free bytes in pieces that also hold live buffers, which therefore cannot be unmapped.
    pub inactive_split: u64,
    /// Number of requests that failed.
    pub out_of_memory: u64,
    /// Number of requests for which unused memory was unmapped and mapped again elsewhere.
    pub retries: u64,
    /// Number of waits between streams that the allocator inserted.
    pub waits_inserted: u64,
    /// Number of times the allocator synchronised the device.
    pub synchronizations: u64,
    /// Number of buffers that were dropped while the pool was locked and freed by the next request.
    pub deferred_frees: u64,
    /// Number of requests served from a plan, in completed steps.
    pub plan_hits: u64,
    /// Number of requests of planned steps that departed from the plan.
    pub plan_misses: u64,
    /// Size of the region that plans share. `live` counts the buffers in it, not the region.
    pub plan_region: u64,
}

impl Stats {
    pub(crate) fn of(counters: &Counters) -> Self {
        Self {
            live: counters.live,
            requested: counters.requested,
            buffers: counters.buffers,
            mapped: counters.mapped,
            chunks: counters.chunks,
            out_of_memory: counters.failures,
            retries: counters.retries,
            waits_inserted: counters.waits_inserted,
            synchronizations: counters.synchronizations,
            ..Self::default()
        }
    }

    /// Returns the fraction of the free bytes that is outside the largest free block: 0 if the free bytes are one
    /// block.
    pub fn fragmentation(&self) -> f64 {
        fragmentation(self.free, self.largest_free)
    }

    /// Returns the counters under the names of `torch.cuda.memory_stats()`, as far as they have a meaning here.
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
        for (name, counter) in groups {
            let (current, Counter { peak, added, removed }) = (counter.current(), *counter);
            for (part, value) in
                [("current", current), ("peak", peak), ("allocated", added), ("freed", removed)]
            {
                all.push((format!("{name}.all.{part}"), value));
            }
        }
        all.push(("inactive_split_bytes.all.current".into(), self.inactive_split));
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

/// See [`Stats::fragmentation`].
#[expect(clippy::cast_precision_loss, reason = "a fraction that is shown with a few digits")]
pub(crate) fn fragmentation(free: u64, largest: u64) -> f64 {
    if free == 0 { 0.0 } else { 1.0 - largest as f64 / free as f64 }
}
