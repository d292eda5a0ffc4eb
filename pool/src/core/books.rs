//! What the allocator has done and holds.

/// A quantity over time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Sum of all increases.
    pub added: u64,
    /// Sum of all decreases.
    pub removed: u64,
    /// Largest so far.
    pub peak: u64,
}

impl Count {
    /// Now.
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

/// All counts of an allocator. Bytes, unless a name says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Books {
    /// Asked for and live.
    pub requested: Count,
    /// Live, rounded up to granules.
    pub live: Count,
    /// Live buffers, in number.
    pub buffers: Count,
    /// Held from the driver.
    pub mapped: Count,
    /// Pieces held from the driver, in number; what was added is the number of driver allocations.
    pub chunks: Count,
    /// Requests that could not be served.
    pub refused: u64,
    /// Requests that were served after giving unused memory back.
    pub retries: u64,
    /// Waits between streams that the allocator inserted.
    pub waits_inserted: u64,
    /// Waits for the device.
    pub synchronizations: u64,
}

impl Books {
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

    pub(crate) fn mapped_one(&mut self, bytes: u64) {
        self.mapped.add(bytes);
        self.chunks.add(1);
    }

    pub(crate) fn unmapped_one(&mut self, bytes: u64) {
        self.mapped.remove(bytes);
        self.chunks.remove(1);
    }

    /// Forgets the peaks before now.
    pub fn reset_peaks(&mut self) {
        for count in
            [&mut self.requested, &mut self.live, &mut self.buffers, &mut self.mapped, &mut self.chunks]
        {
            count.peak = count.current();
        }
    }
}
