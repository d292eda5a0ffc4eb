//! Buffers handed out by a pool, and loans of parts of them to a second stream or thread.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;

use crate::pool::{Inner, Space};

/// A block on its way: returns to the pool when the last owner, buffer or loan, is gone.
pub(crate) struct Block {
    pub(crate) pool: Arc<Inner>,
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

impl Drop for Block {
    fn drop(&mut self) {
        self.pool.put_back(self.address, self.bytes);
    }
}

/// The block and the byte ranges of it that are lent out.
struct Shared {
    block: Block,
    lent: Mutex<Vec<Range<usize>>>,
}

impl Shared {
    fn lent(&self) -> std::sync::MutexGuard<'_, Vec<Range<usize>>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `len` elements of `T` in the pool's memory, contents unspecified until written.
///
/// A buffer is a handle, as a device pointer is: reading and writing is the business of kernels, or on the host of code
/// that upholds what [`address`](Self::address) says.
pub struct PoolBuf<T> {
    shared: Arc<Shared>,
    len: usize,
    elements: PhantomData<T>,
}

impl<T> fmt::Debug for PoolBuf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PoolBuf({} elements in {:?} memory)", self.len, self.space())
    }
}

impl<T: Pod> PoolBuf<T> {
    pub(crate) fn new(block: Block, len: usize) -> Self {
        Self { shared: Arc::new(Shared { block, lent: Mutex::default() }), len, elements: PhantomData }
    }

    /// Elements asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no elements were asked for.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first element, aligned to 512 bytes, valid for `len` elements while the buffer lives.
    ///
    /// Whoever reads or writes through it answers for what a device leaves to its programmers: accesses stay within
    /// `len`, read only what was written, and are ordered with each other and with loans ([`is_lent`](Self::is_lent)).
    pub fn address(&self) -> u64 {
        self.shared.block.address
    }

    /// Lends elements `range` to another thread or stream: the block outlives the loan, and
    /// [`is_lent`](Self::is_lent) is true of the range until the loan is dropped.
    ///
    /// # Panics
    /// If the range is out of bounds or overlaps another loan.
    pub fn lend(&self, range: Range<usize>) -> Loan {
        assert!(range.start <= range.end && range.end <= self.len, "loan {range:?} of {} elements", self.len);
        let bytes = range.start * size_of::<T>()..range.end * size_of::<T>();
        let mut lent = self.shared.lent();
        assert!(!lent.iter().any(|other| overlap(other, &bytes)), "elements {range:?} are lent already");
        lent.push(bytes.clone());
        Loan { shared: self.shared.clone(), bytes }
    }

    /// Whether any element of `range` is lent out.
    pub fn is_lent(&self, range: Range<usize>) -> bool {
        let bytes = range.start * size_of::<T>()..range.end * size_of::<T>();
        self.shared.lent().iter().any(|other| overlap(other, &bytes))
    }
}

impl<T> PoolBuf<T> {
    /// Where the memory lies.
    pub fn space(&self) -> Space {
        self.shared.block.pool.space()
    }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Part of a buffer, lent to another thread or stream until dropped.
pub struct Loan {
    shared: Arc<Shared>,
    bytes: Range<usize>,
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loan({} bytes in {:?} memory)", self.bytes(), self.space())
    }
}

impl Loan {
    /// Address of the first byte lent.
    pub fn address(&self) -> u64 {
        self.shared.block.address + self.bytes.start as u64
    }

    /// Bytes lent.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Where the memory lies.
    pub fn space(&self) -> Space {
        self.shared.block.pool.space()
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let mut lent = self.shared.lent();
        if let Some(index) = lent.iter().position(|range| *range == self.bytes) {
            lent.swap_remove(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Mode, Pool};

    #[test]
    fn a_loan_keeps_its_range_and_block_until_dropped() {
        let pool = Pool::host(Mode::On);
        let buf = pool.alloc::<f32>(1000).unwrap();
        let address = buf.address();
        let loan = buf.lend(10..20);
        assert!(buf.is_lent(19..30) && !buf.is_lent(0..10) && !buf.is_lent(20..1000));
        assert_eq!((loan.address(), loan.bytes()), (address + 40, 40));
        drop(buf);
        assert_ne!(pool.alloc::<f32>(1000).unwrap().address(), address);
        drop(loan);
        assert_eq!(pool.stats().live, 0);
    }

    #[test]
    #[should_panic(expected = "lent already")]
    fn a_range_is_lent_once() {
        let buf = Pool::host(Mode::On).alloc::<f32>(8).unwrap();
        let _first = buf.lend(0..4);
        let _second = buf.lend(3..5);
    }
}
