//! Times of device allocators: a pool on this device, and the driver's own.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use xlaunch_pool::backing::DriverFailure;
use xlaunch_pool::{Mode, Pool, PoolError};

use super::timings::{Timing, median};

const BYTES: usize = 1 << 20;

/// Opens a stream on the first GPU. The error is the reason why there is none.
pub(super) fn open() -> Result<Arc<CudaStream>, String> {
    // SAFETY: the call opens the library, whose initialisers have no preconditions.
    if !unsafe { sys::is_culib_present() } {
        return Err("no CUDA driver library".into());
    }
    let context = CudaContext::new(0).map_err(|error| format!("no GPU: {error}"))?;
    // SAFETY: no CudaSlice exists whose use would have to be tracked.
    unsafe { context.disable_event_tracking() };
    context.new_stream().map_err(|error| format!("cannot create a stream: {error}"))
}

/// Times of allocations of 1 MiB.
pub(super) fn timings(stream: &Arc<CudaStream>, runs: usize) -> Result<Vec<Timing>, PoolError> {
    stream.context().bind_to_thread().map_err(failed("cuCtxSetCurrent"))?;
    let timing = |name, nanoseconds| Timing { name, nanoseconds };
    Ok(vec![
        timing("xlaunch-pool, 1 MiB of device memory", pool(stream, runs)?),
        timing("cudaMalloc + cudaFree", synchronous(runs)?),
        timing("cudaMallocAsync + cudaFreeAsync, threshold raised", stream_ordered(stream, runs)?),
    ])
}

fn pool(stream: &Arc<CudaStream>, runs: usize) -> Result<f64, PoolError> {
    const PAIRS: usize = 300_000;
    let pool = Pool::cuda(stream, Mode::On)?;
    let time = median(runs, PAIRS, || (0..PAIRS).try_for_each(|_| pool.alloc::<u8>(BYTES).map(drop)))?;
    pool.trim()?;
    Ok(time)
}

fn synchronous(runs: usize) -> Result<f64, PoolError> {
    const PAIRS: usize = 500;
    median(runs, PAIRS, || {
        for _ in 0..PAIRS {
            // SAFETY: the context is current and the size is not zero.
            let address = unsafe { result::malloc_sync(BYTES) }.map_err(failed("cuMemAlloc"))?;
            // SAFETY: the address was allocated above and never used.
            unsafe { result::free_sync(address) }.map_err(failed("cuMemFree"))?;
        }
        Ok(())
    })
}

/// Raises the release threshold of the default memory pool, so that it keeps freed memory. By default it frees all of
/// that at every synchronisation.
fn stream_ordered(stream: &Arc<CudaStream>, runs: usize) -> Result<f64, PoolError> {
    const PAIRS: usize = 20_000;
    let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let mut keep = u64::MAX;
    // SAFETY: the device is that of the context; the attribute is a u64, which outlives the call.
    unsafe {
        result::device::get_default_mem_pool(stream.context().cu_device())
            .and_then(|pool| sys::cuMemPoolSetAttribute(pool, threshold, (&raw mut keep).cast()).result())
    }
    .map_err(failed("cuMemPoolSetAttribute"))?;
    median(runs, PAIRS, || {
        for _ in 0..PAIRS {
            // SAFETY: the context is current, the stream belongs to it, and the size is not zero.
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
