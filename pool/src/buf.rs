//! Buffers handed out by a pool, and loans of parts of them to a second stream or thread.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::Pod;

use crate::core::{Handle, StreamId};
use crate::direct::Direct;
use crate::error::PoolError;
use crate::inner::Inner;
use crate::loans::Loans;
use crate::plan::serve::Ticket;
use crate::pool::Space;

/// Where a buffer's memory goes when it is dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Home {
    /// The allocator.
    Block { inner: &'static Inner, handle: Handle },
    /// The driver, as the pool is off; with the bytes asked for.
    Driver { inner: &'static Inner, bytes: u64 },
    /// The step's plan.
    Slot(Ticket),
}

impl Home {
    fn loans(&self) -> &Loans {
        match self {
            Self::Block { inner, .. } | Self::Driver { inner, .. } => &inner.loans,
            Self::Slot(ticket) => &ticket.book().loans,
        }
    }

    fn space(&self) -> Space {
        match self {
            Self::Block { inner, .. } | Self::Driver { inner, .. } => inner.space,
            Self::Slot(ticket) => ticket.book().space,
        }
    }

    /// The buffer at `address` is gone; its memory too, unless it is lent.
    #[inline(never)]
    fn dropped(self, address: u64) {
        if !self.loans().keep(address, self) {
            self.give_back(address);
        }
    }

    fn segment(&self, address: u64) -> Option<(u64, u64)> {
        match self {
            Self::Block { inner, handle } => inner.segment_of(*handle),
            Self::Driver { bytes, .. } => Some((address, Direct::rounded(*bytes))),
            Self::Slot(_) => None,
        }
    }

    fn give_back(&self, address: u64) {
        match self {
            Self::Block { inner, handle } => inner.put_back(*handle),
            Self::Driver { inner, bytes } => inner.put_back_direct(address, *bytes),
            Self::Slot(ticket) => ticket.free(),
        }
    }
}

/// `len` elements of `T` in the pool's memory, contents unspecified until written.
///
/// A buffer is a handle, as a device pointer is: reading and writing is the business of kernels, or on the host of code
/// that upholds what [`address`](Self::address) says. With the `cuda` feature it is an argument of kernel launches and of
/// cudarc's copies, cuBLAS, cuBLASLt and NCCL calls.
pub struct PoolBuf<T> {
    pub(crate) address: u64,
    len: usize,
    pub(crate) home: Home,
    elements: PhantomData<T>,
}

impl<T> fmt::Debug for PoolBuf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PoolBuf({} elements in {:?} memory)", self.len, self.space())
    }
}

impl<T: Pod> PoolBuf<T> {
    pub(crate) fn new(address: u64, len: usize, home: Home) -> Self {
        Self { address, len, home, elements: PhantomData }
    }

    /// Lends elements `range` to another thread or stream: the block outlives the loan, and
    /// [`is_lent`](Self::is_lent) is true of the range until the loan is dropped. A loan of `0..0` overlaps no other: it
    /// keeps the block, and nothing else.
    ///
    /// # Panics
    /// If the range is out of bounds or overlaps another loan.
    pub fn lend(&self, range: Range<usize>) -> Loan {
        assert!(range.start <= range.end && range.end <= self.len, "loan {range:?} of {} elements", self.len);
        let bytes = range.start * size_of::<T>()..range.end * size_of::<T>();
        let lent = self.home.loans().lend(self.address, bytes.clone());
        assert!(lent, "elements {range:?} are lent already");
        Loan { buffer: self.address, bytes, home: self.home }
    }

    /// Whether any element of `range` is lent out.
    pub fn is_lent(&self, range: Range<usize>) -> bool {
        let bytes = range.start * size_of::<T>()..range.end * size_of::<T>();
        self.home.loans().is_lent(self.address, bytes)
    }
}

impl<T> PoolBuf<T> {
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
        self.address
    }

    /// Where the memory lies.
    pub fn space(&self) -> Space {
        self.home.space()
    }

    /// Work of `stream` that was given until now uses this buffer: when it is dropped, its memory goes to work of other
    /// streams only in an order after that. Call it after giving the work.
    ///
    /// # Errors
    /// [`PoolError::PlannedBuffer`] if the buffer's place is planned: make steps that share buffers between streams
    /// record that use from their first run on, and plans leave such buffers out.
    pub fn record_use(&self, stream: StreamId) -> Result<(), PoolError> {
        match &self.home {
            Home::Block { inner, handle } => inner.record_use(*handle, stream),
            // The driver waits for all work itself before it takes memory back.
            Home::Driver { .. } => Ok(()),
            Home::Slot(_) => Err(PoolError::PlannedBuffer),
        }
    }

    /// Address and length of the segment that a buffer of a [registered](crate::Pool::registered) pool lies in, for
    /// `ncclCommRegister`; of the driver allocation around any other buffer.
    pub fn segment(&self) -> Option<(u64, u64)> {
        self.home.segment(self.address)
    }
}

impl<T> Drop for PoolBuf<T> {
    #[inline]
    fn drop(&mut self) {
        match &self.home {
            // The fast one, in place.
            Home::Slot(ticket) if !ticket.book().loans.any() => ticket.free(),
            home => home.dropped(self.address),
        }
    }
}

/// Part of a buffer, lent to another thread or stream until dropped.
pub struct Loan {
    /// Address of the buffer.
    buffer: u64,
    bytes: Range<usize>,
    home: Home,
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loan({} bytes in {:?} memory)", self.bytes(), self.space())
    }
}

impl Loan {
    /// Address of the first byte lent.
    pub fn address(&self) -> u64 {
        self.buffer + self.bytes.start as u64
    }

    /// Bytes lent.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Where the memory lies.
    pub fn space(&self) -> Space {
        self.home.space()
    }

    /// The segment of the buffer: see [`PoolBuf::segment`].
    pub fn segment(&self) -> Option<(u64, u64)> {
        self.home.segment(self.buffer)
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(home) = self.home.loans().end(self.buffer, &self.bytes) {
            home.give_back(self.buffer);
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
        assert_eq!(pool.stats().live.current(), 0);
    }

    #[test]
    fn a_loan_of_nothing_keeps_the_block_beside_other_loans() {
        let pool = Pool::host(Mode::On).registered();
        let buf = pool.alloc::<f32>(1000).unwrap();
        let segment = buf.segment();
        let kept = buf.lend(0..0);
        assert!(!buf.is_lent(0..1000));
        drop((buf.lend(0..1000), buf.lend(0..0)));
        drop(buf);
        assert!(segment.is_some() && kept.segment() == segment);
        assert_ne!(pool.stats().live.current(), 0);
        drop(kept);
        assert_eq!(pool.stats().live.current(), 0);
    }

    #[test]
    #[should_panic(expected = "lent already")]
    fn a_range_is_lent_once() {
        let buf = Pool::host(Mode::On).alloc::<f32>(8).unwrap();
        let _first = buf.lend(0..4);
        let _second = buf.lend(3..5);
    }
}
