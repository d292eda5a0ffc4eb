//! Handles to device memory: a [`Tensor`] owns a buffer, a [`Slice`] refers to a part of one.
//!
//! They carry a run-time element type and bounds, but no shape, which operations take separately. As with device
//! pointers, several slices of one tensor may be passed to one operation. Each back end ensures that this is sound:
//! before every operation, the CPU checks that an output overlaps no other operand and is not lent out.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use xlaunch_pool::{DType, Lease, Pool, PoolBuf};

use crate::error::Result;

/// `len` elements of one type in a pool's memory. Contents are unspecified until written.
pub struct Tensor {
    buf: PoolBuf<u8>,
    dtype: DType,
    len: usize,
    /// Makes the type `!Sync`: only one thread uses a tensor at a time, so the CPU's checks are sufficient.
    single_thread: PhantomData<Cell<()>>,
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {})", self.len, self.dtype.name())
    }
}

impl Tensor {
    /// Allocates a tensor from this pool with unspecified contents.
    #[track_caller]
    pub fn new(pool: &Pool, dtype: DType, len: usize) -> Result<Self> {
        let bytes = len.saturating_mul(dtype.size());
        Ok(Self { buf: pool.alloc(bytes)?, dtype, len, single_thread: PhantomData })
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns all elements.
    pub fn all(&self) -> Slice<'_> {
        Slice { tensor: self, start: 0, len: self.len }
    }

    /// Returns elements `range`.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn slice(&self, range: Range<usize>) -> Slice<'_> {
        self.all().slice(range)
    }

    /// Lends elements `range` to a collective: see [`PoolBuf::lease`].
    pub fn lend(&self, range: Range<usize>) -> Lease {
        let size = self.dtype.size();
        self.buf.lease(range.start * size..range.end * size)
    }

    /// Returns whether any element of `range` is lent out.
    pub fn is_lent(&self, range: Range<usize>) -> bool {
        let size = self.dtype.size();
        self.buf.is_leased(range.start * size..range.end * size)
    }
}

/// Part of a tensor. Copying it copies the handle.
#[derive(Clone, Copy)]
pub struct Slice<'a> {
    tensor: &'a Tensor,
    start: usize,
    len: usize,
}

impl fmt::Debug for Slice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slice({}..{} of {:?})", self.start, self.start + self.len, self.tensor)
    }
}

impl<'a> Slice<'a> {
    /// Returns elements `range` of this slice.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn slice(self, range: Range<usize>) -> Slice<'a> {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "slice {range:?} of {} elements",
            self.len
        );
        Slice { tensor: self.tensor, start: self.start + range.start, len: range.len() }
    }

    /// Returns the number of elements.
    pub fn len(self) -> usize {
        self.len
    }

    /// Returns whether there are no elements.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Returns the element type.
    pub fn dtype(self) -> DType {
        self.tensor.dtype
    }

    /// Returns the address of the first element; see [`PoolBuf::address`] for its safety rules.
    pub fn address(self) -> u64 {
        self.tensor.buf.address() + (self.start * self.tensor.dtype.size()) as u64
    }

    /// Returns whether any of these elements is lent out.
    pub fn is_lent(self) -> bool {
        self.tensor.is_lent(self.start..self.start + self.len)
    }
}
