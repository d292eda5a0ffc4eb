//! Host to device through pinned memory: the caller's values are copied at once, the device's copy is enqueued.
//!
//! A ring of slots; one is used again only when the copy that last used it is done. With a few writes per step and one
//! wait per step, that wait never happens on the way.

use std::cell::{Cell, RefCell};
use std::ptr::NonNull;

use cudarc::driver::{CudaEvent, result};

use super::device::{Device, words};
use crate::backend::{EngineError, Result};

const SLOTS: usize = 8;
const SLOT_BYTES: usize = 1 << 20;

/// The ring. Its pinned memory lives as long as the context, which the process keeps.
#[derive(Debug)]
pub(super) struct Staging {
    device: Device,
    memory: NonNull<u8>,
    /// When each slot's last copy is done.
    done: RefCell<Vec<CudaEvent>>,
    next: Cell<usize>,
}

impl Staging {
    pub(super) fn new(device: &Device) -> Result<Self> {
        let failed = |error| cuda("failed to allocate pinned memory", error);
        device.context.bind_to_thread().map_err(failed)?;
        // SAFETY: the context is current on this thread; the size is above zero.
        let memory = unsafe { result::malloc_host(SLOTS * SLOT_BYTES, 0) }.map_err(failed)?;
        let memory = NonNull::new(memory.cast::<u8>()).ok_or_else(|| EngineError::Cuda {
            what: "failed to allocate pinned memory".into(),
            reason: "the driver gave a null pointer".into(),
        })?;
        let done = (0..SLOTS)
            .map(|_| device.stream.record_event(None).map_err(|error| cuda("failed to make an event", error)))
            .collect::<Result<_>>()?;
        Ok(Self { device: device.clone(), memory, done: RefCell::new(done), next: Cell::new(0) })
    }

    /// Enqueues a copy of `bytes` to `address`.
    ///
    /// # Safety
    /// `address` leads to as many bytes of this device's memory, allocated until the stream has passed this point.
    pub(super) unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        let failed = |error| cuda("failed to copy to the device", error);
        let done = self.done.borrow_mut();
        for (index, chunk) in bytes.chunks(SLOT_BYTES).enumerate() {
            let slot = self.next.get();
            self.next.set((slot + 1) % SLOTS);
            done[slot].synchronize().map_err(failed)?;
            // SAFETY: the slot lies inside the ring and no copy reads it any more; one thread uses the ring at a time, as
            // the cells make it not Sync.
            let pinned = unsafe {
                let start = self.memory.as_ptr().add(slot * SLOT_BYTES);
                std::slice::from_raw_parts_mut(start, chunk.len())
            };
            pinned.copy_from_slice(chunk);
            let to = address + (index * SLOT_BYTES) as u64;
            // SAFETY: by the caller's promise the range is allocated; the source is pinned memory that stays unchanged
            // until the event below.
            unsafe { result::memcpy_htod_async(to, pinned, self.device.stream.cu_stream()) }
                .map_err(failed)?;
            done[slot].record(&self.device.stream).map_err(failed)?;
        }
        Ok(())
    }
}

pub(super) fn cuda(what: &str, error: cudarc::driver::DriverError) -> EngineError {
    EngineError::Cuda { what: what.into(), reason: words(error) }
}
