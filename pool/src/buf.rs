//! Buffers, and leases of parts of them to another stream or thread.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::Pod;

use crate::error::PoolError;
use crate::inner::Origin;
use crate::options::Space;
use crate::stream::StreamId;

/// `len` elements of `T` in the memory of a pool. The contents are unspecified until written.
///
/// A buffer is a handle, like a device pointer: kernels, or host code that follows the rules of
/// [`address`](Self::address), read and write its memory. With the `cuda` feature it is an argument of kernel launches
/// and of cudarc's calls for copies, cuBLAS, cuBLASLt and NCCL.
///
/// Dropping it frees its memory without a driver call, from any thread.
pub struct PoolBuf<T> {
    pub(crate) address: u64,
    len: usize,
    pub(crate) origin: Origin,
    elements: PhantomData<T>,
}

impl<T> fmt::Debug for PoolBuf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PoolBuf({} elements in {:?} memory)", self.len, self.space())
    }
}

impl<T: Pod> PoolBuf<T> {
    pub(crate) fn new(address: u64, len: usize, origin: Origin) -> Self {
        Self { address, len, origin, elements: PhantomData }
    }

    /// Leases elements `range` to another thread or stream. Until the lease is dropped, the memory stays allocated even
    /// if the buffer is dropped, and [`is_leased`](Self::is_leased) is true for the range. A lease of `0..0` overlaps
    /// no other lease: it only keeps the memory allocated.
    ///
    /// # Panics
    /// If the range is out of bounds or overlaps another lease.
    pub fn lease(&self, range: Range<usize>) -> Lease {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "lease of elements {range:?} of {}",
            self.len
        );
        let bytes = range.start * size_of::<T>()..range.end * size_of::<T>();
        let leased = self.origin.leases().add(self.address, bytes.clone());
        assert!(leased, "elements {range:?} are leased already");
        Lease { buffer: self.address, bytes, origin: self.origin }
    }

    /// Returns whether any element of `range` is leased.
    pub fn is_leased(&self, range: Range<usize>) -> bool {
        let bytes = range.start * size_of::<T>()..range.end * size_of::<T>();
        self.origin.leases().overlaps(self.address, bytes)
    }
}

impl<T> PoolBuf<T> {
    /// Returns the requested number of elements: bytes added by rounding are not part of the buffer.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the first element. It is aligned to 512 bytes, and valid for `len` elements while the
    /// buffer lives.
    ///
    /// Code that accesses memory through the address is responsible for the same things as kernels: stay within `len`,
    /// read only elements that were written, and order accesses with each other and with leases
    /// ([`is_leased`](Self::is_leased)).
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the kind of memory.
    pub fn space(&self) -> Space {
        self.origin.space()
    }

    /// Records that work submitted to `stream` so far uses this buffer. After the buffer is dropped, its memory serves
    /// only work that also runs after that work. Call this after submitting the work.
    ///
    /// # Errors
    /// [`PoolError::PlannedBuffer`] if a plan determined the address. Plans exclude buffers for which use by a second
    /// stream was recorded, so steps should record such uses from their first run on.
    pub fn record_use(&self, stream: StreamId) -> Result<(), PoolError> {
        match &self.origin {
            Origin::Block { inner, handle } => inner.record_use(*handle, stream),
            // The driver itself waits for all work before it frees memory.
            Origin::Driver { .. } => Ok(()),
            Origin::Slot(_) => Err(PoolError::PlannedBuffer),
        }
    }

    /// Returns address and length in bytes of the driver allocation that contains the buffer. For a buffer of a
    /// [registered](crate::Pool::registered) pool this is the segment to pass to `ncclCommRegister`. `None` for planned
    /// buffers.
    pub fn segment(&self) -> Option<(u64, u64)> {
        self.origin.segment(self.address)
    }
}

impl<T> Drop for PoolBuf<T> {
    #[inline]
    fn drop(&mut self) {
        match &self.origin {
            // The fast path, inlined.
            Origin::Slot(slot) if !slot.server().leases.any() => slot.free(),
            origin => origin.buffer_dropped(self.address),
        }
    }
}

/// A range of a buffer that is leased to another thread or stream until the lease is dropped.
pub struct Lease {
    /// Address of the buffer.
    buffer: u64,
    /// The range, relative to the buffer.
    bytes: Range<usize>,
    origin: Origin,
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({} bytes in {:?} memory)", self.bytes(), self.space())
    }
}

impl Lease {
    /// Returns the address of the first leased byte.
    pub fn address(&self) -> u64 {
        self.buffer + self.bytes.start as u64
    }

    /// Returns the number of leased bytes.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the kind of memory.
    pub fn space(&self) -> Space {
        self.origin.space()
    }

    /// Returns the driver allocation that contains the buffer: see [`PoolBuf::segment`].
    pub fn segment(&self) -> Option<(u64, u64)> {
        self.origin.segment(self.buffer)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.origin.leases().end(self.buffer, &self.bytes) {
            self.origin.free(self.buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Mode, Pool};

    #[test]
    fn lease_keeps_range_and_memory_until_dropped() {
        let pool = Pool::host(Mode::On);
        let buf = pool.alloc::<f32>(1000).unwrap();
        let address = buf.address();
        let lease = buf.lease(10..20);
        assert!(buf.is_leased(19..30) && !buf.is_leased(0..10) && !buf.is_leased(20..1000));
        assert_eq!((lease.address(), lease.bytes()), (address + 40, 40));
        drop(buf);
        assert_ne!(pool.alloc::<f32>(1000).unwrap().address(), address);
        drop(lease);
        assert_eq!(pool.stats().live.current(), 0);
    }

    #[test]
    fn empty_lease_keeps_memory_and_overlaps_no_other() {
        let pool = Pool::host(Mode::On).registered();
        let buf = pool.alloc::<f32>(1000).unwrap();
        let segment = buf.segment();
        let kept = buf.lease(0..0);
        assert!(!buf.is_leased(0..1000));
        drop((buf.lease(0..1000), buf.lease(0..0)));
        drop(buf);
        assert!(segment.is_some() && kept.segment() == segment);
        assert_ne!(pool.stats().live.current(), 0);
        drop(kept);
        assert_eq!(pool.stats().live.current(), 0);
    }

    #[test]
    #[should_panic(expected = "leased already")]
    fn overlapping_leases_panic() {
        let buf = Pool::host(Mode::On).alloc::<f32>(8).unwrap();
        let _first = buf.lease(0..4);
        let _second = buf.lease(3..5);
    }
}
