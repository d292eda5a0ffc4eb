//! Rust slices of tensor memory for the duration of one operation: the only unsafe code of the CPU back end besides the
//! GEMM call.
//!
//! Why this is sound: an operation opens one [`Access`] and takes all its operands through it. Each operand is checked
//! against the earlier ones: nothing that is written overlaps anything else, and memory lent to another thread is not
//! touched. So within an operation the slices obey Rust's aliasing rules. Between operations there are no slices: they
//! live no longer than the `Access`, and a thread has one `Access` at a time. Other threads cannot interfere: a
//! [`Tensor`](crate::Tensor) is not `Sync`, so its handles stay on this thread, and memory that a lease lets another
//! thread touch (see [`Tensor::lend`](crate::Tensor::lend)) is refused here. Pool memory of the host is zeroed when it
//! is mapped, so it is always initialised.

use std::cell::{Cell, RefCell};

use xlaunch_pool::DType;

use crate::tensor::Slice;

thread_local! {
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

/// The operands of one operation.
pub(crate) struct Access {
    op: &'static str,
    /// Address ranges taken so far, and whether they are written.
    taken: RefCell<Vec<(u64, u64, bool)>>,
}

impl Access {
    /// Starts the operation `op`; panic messages use this name.
    ///
    /// # Panics
    /// If another operation of this thread is in progress.
    pub(crate) fn new(op: &'static str) -> Self {
        assert!(!BUSY.replace(true), "{op} within another operation");
        Self { op, taken: RefCell::default() }
    }

    /// Returns `len` elements to read.
    pub(crate) fn read<'a>(&'a self, x: Slice<'a>, len: usize) -> &'a [f32] {
        let address = self.take(x, DType::F32, len, false);
        // SAFETY: the range is initialised host memory of `len` f32, aligned to 4 (blocks are to 512), alive as long as
        // the tensor that `x` borrows, and `take` ensures that no other slice of this `Access` writes it.
        unsafe { std::slice::from_raw_parts(address as *const f32, len) }
    }

    /// Returns `len` elements to write (and read).
    pub(crate) fn write<'a>(&'a self, x: Slice<'a>, len: usize) -> &'a mut [f32] {
        let address = self.take(x, DType::F32, len, true);
        // SAFETY: as in `read`; `take` ensures that this `Access` has no other slice of the range.
        unsafe { std::slice::from_raw_parts_mut(address as *mut f32, len) }
    }

    /// Returns `len` token ids to read.
    pub(crate) fn read_i32<'a>(&'a self, x: Slice<'a>, len: usize) -> &'a [i32] {
        let address = self.take(x, DType::I32, len, false);
        // SAFETY: as in `read`, with elements of type i32.
        unsafe { std::slice::from_raw_parts(address as *const i32, len) }
    }

    /// Returns `len` token ids to write (and read).
    pub(crate) fn write_i32<'a>(&'a self, x: Slice<'a>, len: usize) -> &'a mut [i32] {
        let address = self.take(x, DType::I32, len, true);
        // SAFETY: as in `write`, with elements of type i32.
        unsafe { std::slice::from_raw_parts_mut(address as *mut i32, len) }
    }

    /// Returns all bytes to read.
    pub(crate) fn read_bytes<'a>(&'a self, x: Slice<'a>) -> &'a [u8] {
        let address = self.take(x, x.dtype(), x.len(), false);
        // SAFETY: as in `read`; any initialised memory is valid as bytes.
        unsafe { std::slice::from_raw_parts(address as *const u8, x.len() * x.dtype().size()) }
    }

    /// Returns all bytes to write.
    pub(crate) fn write_bytes<'a>(&'a self, x: Slice<'a>) -> &'a mut [u8] {
        let address = self.take(x, x.dtype(), x.len(), true);
        // SAFETY: as in `write`; every element type is valid with any bytes.
        unsafe { std::slice::from_raw_parts_mut(address as *mut u8, x.len() * x.dtype().size()) }
    }

    fn take(&self, x: Slice<'_>, dtype: DType, len: usize, written: bool) -> u64 {
        let op = self.op;
        assert!(x.dtype() == dtype, "{op}: {x:?} should hold {}", dtype.name());
        assert!(x.len() == len, "{op}: {x:?} should have {len} elements");
        assert!(!x.is_lent(), "{op}: {x:?} is lent to a collective");
        let start = x.address();
        let end = start + (len * dtype.size()) as u64;
        let mut taken = self.taken.borrow_mut();
        let clash = taken.iter().any(|(s, e, w)| start < *e && *s < end && (written || *w));
        assert!(!clash, "{op}: {x:?} overlaps another operand");
        taken.push((start, end, written));
        start
    }
}

impl Drop for Access {
    fn drop(&mut self) {
        BUSY.set(false);
    }
}
