//! Counters of the allocator's holdings and operations.

/// A quantity over time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counter {
    /// Total of all increases.
    pub added: u64,
    /// Total of all decreases.
    pub removed: u64,
    /// Largest value so far, or since the peaks were last reset.
    pub peak: u64,
}

impl Counter {
    /// Returns the current value.
    pub fn current(&self) -> u64 {
        self.added - self.removed
    }

    fn add(&mut self, amount: u64) {
        self.added += amount;
        self.peak = self.peak.max(self.current());
    }

    fn remove(&mut self, amount: u64) {
        self.removed += amount;
    }
}

/// The counters of an allocator, in bytes unless noted otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes of live buffers as requested.
    pub requested: Counter,
    /// Bytes of live buffers, rounded up to granules.
    pub live: Counter,
    /// Number of live buffers.
    pub buffers: Counter,
    /// Bytes allocated from the driver.
    pub mapped: Counter,
    /// Number of pieces allocated from the driver; `added` is the number of driver allocations.
    pub chunks: Counter,
    /// Number of requests that failed.
    pub failures: u64,
    /// Number of requests for which unused memory was unmapped and mapped again elsewhere.
    pub retries: u64,
    /// Number of waits between streams that the allocator inserted.
    pub waits_inserted: u64,
    /// Number of times the allocator synchronised the device.
    pub synchronizations: u64,
}

impl Counters {
    pub(crate) fn allocated(&mut self, rounded: u64, requested: u64) {
        self.live.add(rounded);
        self.requested.add(requested);
        self.buffers.add(1);
    }

    pub(crate) fn freed(&mut self, rounded: u64, requested: u64) {
        self.live.remove(rounded);
        self.requested.remove(requested);
        self.buffers.remove(1);
    }

    pub(crate) fn chunk_mapped(&mut self, bytes: u64) {
        self.mapped.add(bytes);
        self.chunks.add(1);
    }

    pub(crate) fn chunk_unmapped(&mut self, bytes: u64) {
        self.mapped.remove(bytes);
        self.chunks.remove(1);
    }

    /// Resets every peak to the current value.
    pub fn reset_peaks(&mut self) {
        for counter in
            [&mut self.requested, &mut self.live, &mut self.buffers, &mut self.mapped, &mut self.chunks]
        {
            counter.peak = counter.current();
        }
    }
}
