//! Byte ranges of buffers that are leased to another thread or stream.

use std::collections::HashMap;
use std::ops::Range;

use crate::lock::SpinLock;
use crate::sync::{AtomicUsize, Ordering};

/// Leases by the address of their buffer. While there are none, which is nearly always the case, a query costs one
/// load.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    count: AtomicUsize,
    leased: SpinLock<HashMap<u64, LeasedBuffer>>,
}

#[derive(Debug, Default)]
struct LeasedBuffer {
    ranges: Vec<Range<usize>>,
    /// True if the buffer was dropped, so that the last lease owns its memory.
    dropped: bool,
}

impl Leases {
    /// Leases bytes `range` of the buffer at `address`. Returns false if the range overlaps another lease.
    pub(crate) fn add(&self, address: u64, range: Range<usize>) -> bool {
        let mut leased = self.leased.lock();
        let buffer = leased.entry(address).or_default();
        if buffer.ranges.iter().any(|other| overlap(other, &range)) {
            return false;
        }
        buffer.ranges.push(range);
        self.count.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Returns whether any byte of `range` is leased.
    pub(crate) fn overlaps(&self, address: u64, range: Range<usize>) -> bool {
        self.any()
            && self
                .leased
                .lock()
                .get(&address)
                .is_some_and(|buffer| buffer.ranges.iter().any(|other| overlap(other, &range)))
    }

    /// Records that the buffer at `address` is dropped. Returns true if its memory now belongs to its last lease.
    pub(crate) fn inherit(&self, address: u64) -> bool {
        self.any() && self.mark_dropped(address)
    }

    /// Returns whether anything is leased. If not, the last uses of leased memory happened before this call: the
    /// caller may free it and use it again.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) != 0
    }

    #[cold]
    fn mark_dropped(&self, address: u64) -> bool {
        self.leased.lock().get_mut(&address).is_some_and(|buffer| {
            buffer.dropped = true;
            true
        })
    }

    /// Ends a lease. Returns true if it was the last one of a dropped buffer; then the caller must free the memory.
    pub(crate) fn end(&self, address: u64, range: &Range<usize>) -> bool {
        let mut leased = self.leased.lock();
        let Some(buffer) = leased.get_mut(&address) else { return false };
        let Some(index) = buffer.ranges.iter().position(|other| other == range) else { return false };
        buffer.ranges.swap_remove(index);
        self.count.fetch_sub(1, Ordering::Release);
        buffer.ranges.is_empty() && leased.remove(&address).is_some_and(|buffer| buffer.dropped)
    }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}
