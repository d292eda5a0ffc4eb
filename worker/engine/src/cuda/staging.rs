//! Host to device through pinned memory: the caller's values are copied at once, the device's copy is enqueued.
//!
//! Pinned buffers come from a pool of their own. One is handed out again when the device's copy from it is known to be
//! done, which the trainer's wait at the end of a step says of all; a longer run of writes waits for the oldest itself.

use cudarc::driver::result;
use xlaunch_pool::{Mode, Pool, StreamId};

use super::device::{Device, words};
use crate::backend::{EngineError, Result};

/// Most bytes of one copy.
const CHUNK: usize = 1 << 20;

/// The pinned pool, and the compute stream's number in it.
#[derive(Debug)]
pub(super) struct Staging {
    device: Device,
    pool: Pool,
    stream: StreamId,
}

impl Staging {
    pub(super) fn new(device: &Device) -> Result<Self> {
        let pool = Pool::pinned(&device.stream, Mode::On)?;
        let stream = pool.add_cuda_stream(&device.stream)?;
        Ok(Self { device: device.clone(), pool, stream })
    }

    /// Enqueues a copy of `bytes` to `address`.
    ///
    /// # Safety
    /// `address` leads to as many bytes of this device's memory, allocated until the stream has passed this point.
    pub(super) unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        for (index, chunk) in bytes.chunks(CHUNK).enumerate() {
            let pinned = self.pool.alloc::<u8>(chunk.len())?;
            // SAFETY: pinned memory of the pool is this process's, initialised, as long as asked for, this buffer's alone
            // while it lives; and no copy reads it any more, as the pool hands it to the host.
            let from = unsafe { std::slice::from_raw_parts_mut(pinned.address() as *mut u8, chunk.len()) };
            from.copy_from_slice(chunk);
            let to = address + (index * CHUNK) as u64;
            // SAFETY: by the caller's promise the range is allocated; the source is pinned memory that the pool leaves
            // unchanged until the stream has passed this point, as it is told below.
            unsafe { result::memcpy_htod_async(to, from, self.device.stream.cu_stream()) }
                .map_err(|error| cuda("failed to copy to the device", error))?;
            pinned.record_use(self.stream)?;
        }
        Ok(())
    }

    /// The host has waited for the compute stream.
    pub(super) fn host_waited(&self) {
        self.pool.host_waited(self.stream);
    }
}

pub(super) fn cuda(what: &str, error: cudarc::driver::DriverError) -> EngineError {
    EngineError::Cuda { what: what.into(), reason: words(error) }
}
