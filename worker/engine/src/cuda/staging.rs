//! Copies between host and device through pinned memory, without waiting.
//!
//! ```text
//! write: values -> pinned buffer -> device         the buffer is held until the host knows that the copy is done
//! read:  device -> pinned buffer -> event ... wait for the event -> values
//! ```
//! Once a read has completed, every earlier copy is done as well. A long series of writes without a read eventually
//! waits.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaEvent, result};
use xlaunch_pool::{Mode, Pool, PoolBuf};

use super::device::Device;
use crate::error::Result;
use crate::error::driver_error;

/// Maximum size of one copy in bytes.
const COPY_BYTES: usize = 1 << 20;
/// Maximum number of writes in flight.
const MAX_WRITES_IN_FLIGHT: usize = 64;

/// The pinned pool, and the buffers of copies in flight.
#[derive(Debug)]
pub(crate) struct Staging {
    device: Device,
    pool: Pool,
    writes: RefCell<Writes>,
    /// Events of completed reads, for reuse.
    events: RefCell<Vec<Rc<CudaEvent>>>,
}

/// Buffers of writes that the device may still read, in the order of the copies.
#[derive(Debug, Default)]
struct Writes {
    buffers: VecDeque<PoolBuf<u8>>,
    /// Number of buffers returned to the pool so far: `completed + buffers.len()` writes were started.
    completed: u64,
}

/// A copy to the host that is in flight.
#[derive(Debug)]
pub(crate) struct StagedRead {
    pinned: PoolBuf<u8>,
    done: Rc<CudaEvent>,
    /// Number of writes that were started before it.
    writes_before: u64,
}

impl Drop for StagedRead {
    fn drop(&mut self) {
        // The pool may reuse the buffer, so the copy must have ended. If waiting fails, all later work fails too.
        let _ = self.done.synchronize();
    }
}

impl Staging {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let pool = Pool::pinned(&device.stream, Mode::On)?;
        Ok(Self { device: device.clone(), pool, writes: RefCell::default(), events: RefCell::default() })
    }

    /// Enqueues a copy of `bytes` to `address`.
    ///
    /// # Safety
    /// `address` is the address of `bytes.len()` bytes of this device's memory, which stay allocated until the stream
    /// has passed this point.
    pub(crate) unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        for (index, chunk) in bytes.chunks(COPY_BYTES).enumerate() {
            let pinned = self.pool.alloc::<u8>(chunk.len())?;
            // SAFETY: pinned memory of the pool is initialised, has the requested length, and belongs to this buffer
            // alone while it lives; no copy reads it any more, because buffers are held until the host knows that their
            // copy is done.
            let from = unsafe { std::slice::from_raw_parts_mut(pinned.address() as *mut u8, chunk.len()) };
            from.copy_from_slice(chunk);
            let to = address + (index * COPY_BYTES) as u64;
            // SAFETY: by the caller's promise the range is allocated; the source is pinned memory that is held below
            // until the host knows that the copy is done.
            unsafe { result::memcpy_htod_async(to, from, self.device.stream.cu_stream()) }
                .map_err(|error| driver_error("failed to copy to the device", error))?;
            self.writes.borrow_mut().buffers.push_back(pinned);
        }
        if self.writes.borrow().buffers.len() > MAX_WRITES_IN_FLIGHT {
            let waited = self.device.stream.synchronize();
            waited.map_err(|error| driver_error("failed to wait for copies", error))?;
            self.host_waited();
        }
        Ok(())
    }

    /// Enqueues a copy of the `bytes` bytes at `address`.
    ///
    /// # Safety
    /// The same as for [`write`](Self::write).
    pub(crate) unsafe fn begin_read(&self, address: u64, bytes: usize) -> Result<StagedRead> {
        let failed = |error| driver_error("failed to read from the device", error);
        let pinned = self.pool.alloc::<u8>(bytes)?;
        // SAFETY: as in `write`.
        let to = unsafe { std::slice::from_raw_parts_mut(pinned.address() as *mut u8, bytes) };
        let stream = &self.device.stream;
        // SAFETY: by the caller's promise the range is allocated; the pinned buffer is owned by the result, whose drop
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
        let writes = self.writes.borrow();
        Ok(StagedRead { pinned, done, writes_before: writes.completed + writes.buffers.len() as u64 })
    }

    /// Waits for a read and passes its bytes to `take`.
    pub(crate) fn end_read(&self, read: StagedRead, take: impl FnOnce(&[u8])) -> Result<()> {
        read.done.synchronize().map_err(|error| driver_error("failed to read from the device", error))?;
        let mut writes = self.writes.borrow_mut();
        while writes.completed < read.writes_before && writes.buffers.pop_front().is_some() {
            writes.completed += 1;
        }
        self.events.borrow_mut().push(read.done.clone());
        // SAFETY: the copy into this buffer is done, and this read owns it.
        take(unsafe { std::slice::from_raw_parts(read.pinned.address() as *const u8, read.pinned.len()) });
        Ok(())
    }

    /// The host has waited for the compute stream, so all copies are done.
    pub(crate) fn host_waited(&self) {
        let writes = &mut *self.writes.borrow_mut();
        writes.completed += writes.buffers.len() as u64;
        writes.buffers.clear();
    }
}
