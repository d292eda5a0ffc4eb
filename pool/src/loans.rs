//! Which parts of buffers are lent out.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::buf::Home;
use crate::lock::Lock;

/// Loans by the address of their buffer. Buffers that are not lent, nearly all, cost one load.
#[derive(Debug, Default)]
pub(crate) struct Loans {
    count: AtomicUsize,
    lent: Lock<HashMap<u64, Lent>>,
}

#[derive(Debug, Default)]
struct Lent {
    ranges: Vec<Range<usize>>,
    /// The block, when its buffer is gone and the last loan is to give it back.
    orphan: Option<Home>,
}

impl Loans {
    /// Lends bytes `range` of the buffer at `address`; false if part of it is lent already.
    pub(crate) fn lend(&self, address: u64, range: Range<usize>) -> bool {
        let mut lent = self.lent.lock();
        let entry = lent.entry(address).or_default();
        if entry.ranges.iter().any(|other| overlap(other, &range)) {
            return false;
        }
        entry.ranges.push(range);
        self.count.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Whether any byte of `range` is lent.
    pub(crate) fn is_lent(&self, address: u64, range: Range<usize>) -> bool {
        self.any()
            && self
                .lent
                .lock()
                .get(&address)
                .is_some_and(|lent| lent.ranges.iter().any(|other| overlap(other, &range)))
    }

    /// The buffer at `address` is dropped: true if a loan keeps its block, and now owns it.
    pub(crate) fn keep(&self, address: u64, home: Home) -> bool {
        self.any() && self.adopt(address, home)
    }

    /// Whether anything is lent.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    #[cold]
    fn adopt(&self, address: u64, home: Home) -> bool {
        match self.lent.lock().get_mut(&address) {
            Some(entry) => {
                entry.orphan = Some(home);
                true
            }
            None => false,
        }
    }

    /// Ends a loan; the block, if this was the last and the buffer is gone.
    pub(crate) fn end(&self, address: u64, range: &Range<usize>) -> Option<Home> {
        let mut lent = self.lent.lock();
        let entry = lent.get_mut(&address)?;
        let index = entry.ranges.iter().position(|other| other == range)?;
        entry.ranges.swap_remove(index);
        self.count.fetch_sub(1, Ordering::Relaxed);
        if entry.ranges.is_empty() { lent.remove(&address)?.orphan } else { None }
    }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}
