//! From handles to Rust slices, for the duration of one operation: the only unsafe code of the CPU back end beside the
//! call of the matrix product.
//!
//! Why this is sound. An operation opens one [`Access`] and takes all its operands through it. Each is checked against
//! those taken before: nothing written overlaps anything else, and nothing lent to another thread is touched. So within
//! an operation the slices obey Rust's rules. Between operations there are none: slices live no longer than the
//! `Access`, and a thread has one `Access` at a time. Other threads cannot interfere: a [`Tensor`](crate::Tensor) is not
//! `Sync`, so its handles stay on this thread, and what a [`Lease`](xlaunch_pool::Lease) lets another thread touch is
//! refused here. Pool memory of the host is zeroed when it is mapped, so it is always initialised.

use std::cell::{Cell, RefCell};

use xlaunch_pool::DType;

use crate::tensor::Slice;

thread_local! {
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

/// The operands of one operation.
pub(super) struct Access {
    op: &'static str,
    /// Byte ranges taken so far, and whether they are written.
    taken: RefCell<Vec<(u64, u64, bool)>>,
}

impl Access {
    /// Begins an operation.
    ///
    /// # Panics
    /// Inside another operation of this thread.
    pub(super) fn new(op: &'static str) -> Self {
        assert!(!BUSY.replace(true), "{op} inside another operation");
        Self { op, taken: RefCell::default() }
    }

    /// `len` elements to read.
    pub(super) fn read<'a>(&'a self, x: Slice<'a>, len: usize) -> &'a [f32] {
        let address = self.take(x, DType::F32, len, false);
        // SAFETY: the range is initialised host memory of `len` f32, aligned to 4 (blocks are to 512), alive as long as
        // the tensor that `x` borrows, and by `take` not written by anyone while this `Access` lives.
        unsafe { std::slice::from_raw_parts(address as *const f32, len) }
    }

    /// `len` elements to write (and read).
    pub(super) fn write<'a>(&'a self, x: Slice<'a>, len: usize) -> &'a mut [f32] {
        let address = self.take(x, DType::F32, len, true);
        // SAFETY: as in `read`; and by `take` no other slice of this range exists while this `Access` lives.
        unsafe { std::slice::from_raw_parts_mut(address as *mut f32, len) }
    }

    /// `len` token ids to read.
    pub(super) fn read_i32<'a>(&'a self, x: Slice<'a>, len: usize) -> &'a [i32] {
        let address = self.take(x, DType::I32, len, false);
        // SAFETY: as in `read`, with elements of type i32.
        unsafe { std::slice::from_raw_parts(address as *const i32, len) }
    }

    /// All bytes, to read.
    pub(super) fn read_bytes<'a>(&'a self, x: Slice<'a>) -> &'a [u8] {
        let address = self.take(x, x.dtype(), x.len(), false);
        // SAFETY: as in `read`; any initialised memory is valid as bytes.
        unsafe { std::slice::from_raw_parts(address as *const u8, x.len() * x.dtype().size()) }
    }

    /// All bytes, to write.
    pub(super) fn write_bytes<'a>(&'a self, x: Slice<'a>) -> &'a mut [u8] {
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
