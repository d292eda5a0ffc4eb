//! Between host and device through pinned memory, without waiting.
//!
//! ```text
//! write: values -> pinned buffer -> device         the buffer is held until the host knows that the copy is done
//! read:  device -> pinned buffer -> event ... wait for the event -> values
//! ```
//! A wait for a read tells that every copy before it is done as well. A long run of writes without one waits by itself.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaEvent, result};
use xlaunch_pool::{Mode, Pool, PoolBuf};

use super::device::{Device, cuda};
use crate::backend::Result;

/// Most bytes of one copy.
const CHUNK: usize = 1 << 20;
/// Most writes that are under way.
const MAX_HELD: usize = 64;

/// The pinned pool, and what copies under way hold of it.
#[derive(Debug)]
pub(super) struct Staging {
    device: Device,
    pool: Pool,
    held: RefCell<Held>,
    /// Of reads that were waited for.
    events: RefCell<Vec<Rc<CudaEvent>>>,
}

/// Buffers that the device may still read, in the order of their copies.
#[derive(Debug, Default)]
struct Held {
    buffers: VecDeque<PoolBuf<u8>>,
    /// Buffers that were given back so far: `given_back + buffers.len()` writes were begun.
    given_back: u64,
}

/// A copy to the host that is under way.
#[derive(Debug)]
pub(super) struct PendingRead {
    pinned: PoolBuf<u8>,
    done: Rc<CudaEvent>,
    /// Writes that were begun before it.
    writes: u64,
}

impl Drop for PendingRead {
    fn drop(&mut self) {
        // The pool may hand the buffer out again: the copy must be over. If this fails, so does everything after it.
        let _ = self.done.synchronize();
    }
}

impl Staging {
    pub(super) fn new(device: &Device) -> Result<Self> {
        let pool = Pool::pinned(&device.stream, Mode::On)?;
        Ok(Self { device: device.clone(), pool, held: RefCell::default(), events: RefCell::default() })
    }

    /// Enqueues a copy of `bytes` to `address`.
    ///
    /// # Safety
    /// `address` leads to as many bytes of this device's memory, allocated until the stream has passed this point.
    pub(super) unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        for (index, chunk) in bytes.chunks(CHUNK).enumerate() {
            let pinned = self.pool.alloc::<u8>(chunk.len())?;
            // SAFETY: pinned memory of the pool is this process's, initialised, as long as asked for, this buffer's alone
            // while it lives; and no copy reads it any more, as it was held until the host knew that.
            let from = unsafe { std::slice::from_raw_parts_mut(pinned.address() as *mut u8, chunk.len()) };
            from.copy_from_slice(chunk);
            let to = address + (index * CHUNK) as u64;
            // SAFETY: by the caller's promise the range is allocated; the source is pinned memory that is held below until
            // the host knows that the stream has passed this point.
            unsafe { result::memcpy_htod_async(to, from, self.device.stream.cu_stream()) }
                .map_err(|error| cuda("failed to copy to the device", error))?;
            self.held.borrow_mut().buffers.push_back(pinned);
        }
        if self.held.borrow().buffers.len() > MAX_HELD {
            let waited = self.device.stream.synchronize();
            waited.map_err(|error| cuda("failed to wait for copies", error))?;
            self.host_waited();
        }
        Ok(())
    }

    /// Enqueues a copy of the `bytes` bytes at `address`.
    ///
    /// # Safety
    /// As [`write`](Self::write).
    pub(super) unsafe fn begin_read(&self, address: u64, bytes: usize) -> Result<PendingRead> {
        let failed = |error| cuda("failed to read from the device", error);
        let pinned = self.pool.alloc::<u8>(bytes)?;
        // SAFETY: as in `write`.
        let to = unsafe { std::slice::from_raw_parts_mut(pinned.address() as *mut u8, bytes) };
        let stream = &self.device.stream;
        // SAFETY: by the caller's promise the range is allocated; the pinned buffer lives in what is returned, whose drop
        // waits for the copy.
        unsafe { result::memcpy_dtoh_async(to, address, stream.cu_stream()) }.map_err(failed)?;
        let done = match self.events.borrow_mut().pop() {
            Some(done) => done,
            None => {
                let flags = Some(CUevent_flags::CU_EVENT_DISABLE_TIMING);
                Rc::new(self.device.context.new_event(flags).map_err(failed)?)
            }
        };
        done.record(stream).map_err(failed)?;
        let held = self.held.borrow();
        Ok(PendingRead { pinned, done, writes: held.given_back + held.buffers.len() as u64 })
    }

    /// Waits for a read, and hands its bytes over.
    pub(super) fn end_read(&self, read: PendingRead, take: impl FnOnce(&[u8])) -> Result<()> {
        read.done.synchronize().map_err(|error| cuda("failed to read from the device", error))?;
        let mut held = self.held.borrow_mut();
        while held.given_back < read.writes && held.buffers.pop_front().is_some() {
            held.given_back += 1;
        }
        self.events.borrow_mut().push(read.done.clone());
        // SAFETY: the copy into this buffer is done, and nobody else has it.
        take(unsafe { std::slice::from_raw_parts(read.pinned.address() as *const u8, read.pinned.len()) });
        Ok(())
    }

    /// The host has waited for the compute stream.
    pub(super) fn host_waited(&self) {
        let held = &mut *self.held.borrow_mut();
        held.given_back += held.buffers.len() as u64;
        held.buffers.clear();
    }
}
