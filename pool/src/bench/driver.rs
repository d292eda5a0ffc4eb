//! What the driver's own allocations cost on a device.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError, result, sys};

use super::{Pair, median};
use crate::backing::DriverFailure;
use crate::error::PoolError;
use crate::{Mode, Pool};

const BYTES: usize = 1 << 20;

/// Pairs of the driver's allocations of 1 MiB, and of a pool on this device.
///
/// # Errors
/// The driver refuses.
pub fn driver_pairs(stream: &Arc<CudaStream>) -> Result<Vec<Pair>, PoolError> {
    stream.context().bind_to_thread().map_err(failed("cuCtxSetCurrent"))?;
    Ok(vec![
        Pair { name: "xlaunch, one buffer of 1 MiB on the device", nanoseconds: pool(stream)? },
        Pair { name: "cudaMalloc + cudaFree", nanoseconds: plain()? },
        Pair { name: "cudaMallocAsync + cudaFreeAsync, memory kept", nanoseconds: ordered(stream)? },
    ])
}

fn pool(stream: &Arc<CudaStream>) -> Result<f64, PoolError> {
    const PAIRS: usize = 300_000;
    let pool = Pool::cuda(stream, Mode::On)?;
    let time = median(PAIRS, || (0..PAIRS).try_for_each(|_| pool.alloc::<u8>(BYTES).map(drop)))?;
    pool.trim()?;
    Ok(time)
}

fn plain() -> Result<f64, PoolError> {
    const PAIRS: usize = 500;
    median(PAIRS, || {
        for _ in 0..PAIRS {
            // SAFETY: the context is current and the size is above zero.
            let address = unsafe { result::malloc_sync(BYTES) }.map_err(failed("cuMemAlloc"))?;
            // SAFETY: the address was allocated above and never used.
            unsafe { result::free_sync(address) }.map_err(failed("cuMemFree"))?;
        }
        Ok(())
    })
}

/// With the default pool told to keep what is freed, as programs that care do.
fn ordered(stream: &Arc<CudaStream>) -> Result<f64, PoolError> {
    const PAIRS: usize = 20_000;
    let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let mut keep = u64::MAX;
    // SAFETY: the device is this context's; the attribute is a u64, which lives through the call.
    unsafe {
        result::device::get_default_mem_pool(stream.context().cu_device())
            .and_then(|pool| sys::cuMemPoolSetAttribute(pool, threshold, (&raw mut keep).cast()).result())
    }
    .map_err(failed("cuMemPoolSetAttribute"))?;
    median(PAIRS, || {
        for _ in 0..PAIRS {
            // SAFETY: the context is current, the stream is its own, and the size is above zero.
            let address = unsafe { result::malloc_async(stream.cu_stream(), BYTES) }
                .map_err(failed("cuMemAllocAsync"))?;
            // SAFETY: the address was allocated above on the same stream.
            unsafe { result::free_async(address, stream.cu_stream()) }.map_err(failed("cuMemFreeAsync"))?;
        }
        stream.synchronize().map_err(failed("cuStreamSynchronize"))
    })
}

fn failed(call: &'static str) -> impl Fn(DriverError) -> PoolError {
    move |error| PoolError::Driver(DriverFailure { call, reason: error.to_string() })
}
