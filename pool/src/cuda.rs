//! Pools of CUDA memory; buffers as arguments of cudarc's calls.

use std::sync::Arc;

use cudarc::driver::{
    CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, LaunchArgs, PushKernelArg, SyncOnDrop, result, sys,
};

use crate::backing::cuda::{Cuda, Pinned, StreamTable, failed};
use crate::backing::{Backing, Result as DriverResult, Segments, Streams, VirtualMemory};
use crate::buf::PoolBuf;
use crate::debug::{HostMemory, MemoryAccess};
use crate::error::PoolError;
use crate::inner::{Inner, Origin};
use crate::options::{Mode, Options, Space};
use crate::pool::Pool;
use crate::stream::{MAX_STREAMS, StreamId};

/// Lengths of the address range to try, as multiples of the device's memory. With a longer range, growth is more likely
/// to find a contiguous hole.
const RANGE_TIMES_MEMORY: [u64; 3] = [4, 2, 1];

impl Pool {
    /// Creates a pool of memory of the device of `stream`, which becomes the pool's stream 0.
    ///
    /// # Errors
    /// If a driver call fails.
    pub fn cuda(stream: &Arc<CudaStream>, options: impl Into<Options>) -> Result<Self, PoolError> {
        let options = options.into();
        let (streams, cuda) = device(stream)?;
        let memory = Box::new(DeviceMemory(cuda.clone()));
        let mut inner = if options.mode == Mode::Off {
            Inner::off(Space::Cuda, &options, Box::new(cuda))
        } else {
            Inner::new(Space::Cuda, &options, backing(cuda), memory)?
        };
        inner.set_streams(streams);
        Ok(Self::from_inner(inner))
    }

    /// Creates a pool of page-locked host memory, for copies to and from the device of `stream`. Its stream 0 is the
    /// host.
    ///
    /// Add the streams that copy with [`add_cuda_stream`](Self::add_cuda_stream), and call [`PoolBuf::record_use`]
    /// after every copy: the memory is reused once the host has waited for that stream. If nothing else is free, the
    /// pool waits for it.
    ///
    /// # Errors
    /// If a driver call fails.
    pub fn pinned(stream: &Arc<CudaStream>, options: impl Into<Options>) -> Result<Self, PoolError> {
        let options = options.into();
        let (streams, cuda) = device(stream)?;
        let mut inner = if options.mode == Mode::Off {
            Inner::off(Space::Pinned, &options, Box::new(Pinned(cuda)))
        } else {
            let backing = Box::new(Segments::new(Pinned(cuda)));
            Inner::new(Space::Pinned, &options, backing, Box::new(HostMemory))?
        };
        inner.set_streams(streams);
        Ok(Self::from_inner(inner))
    }

    /// Adds a stream of the pool's device.
    ///
    /// # Errors
    /// [`PoolError::TooManyStreams`]; [`PoolError::Off`] if the pool is off or not a pool of CUDA memory; or the error
    /// of a failed driver call.
    pub fn add_cuda_stream(&self, stream: &Arc<CudaStream>) -> Result<StreamId, PoolError> {
        let mut state = self.inner().lock();
        let core = state.core()?;
        let streams = self.inner().streams().ok_or(PoolError::Off)?;
        // Operations that can fail come first: a stream cannot be removed from the allocator.
        if core.streams() == MAX_STREAMS {
            return Err(PoolError::TooManyStreams);
        }
        streams.add(stream.clone())?;
        core.add_stream().ok_or(PoolError::TooManyStreams)
    }
}

fn device(stream: &Arc<CudaStream>) -> Result<(Arc<StreamTable>, Cuda), PoolError> {
    let streams = Arc::new(StreamTable::default());
    streams.add(stream.clone())?;
    let cuda = Cuda::new(stream.context().clone(), streams.clone())?;
    Ok((streams, cuda))
}

/// Returns virtual memory, or plain allocations if the device does not support it or no address range can be reserved.
fn backing(cuda: Cuda) -> Box<dyn Backing> {
    if cuda.has_virtual_memory()
        && let Some((_, total)) = cuda.memory_info()
    {
        for times in RANGE_TIMES_MEMORY {
            if let Ok(range) = VirtualMemory::new(cuda.clone(), total * times) {
                return Box::new(range);
            }
        }
    }
    Box::new(Segments::new(cuda))
}

/// Device memory for debug mode.
struct DeviceMemory(Cuda);

impl MemoryAccess for DeviceMemory {
    fn fill(&mut self, address: u64, bytes: u64, value: u8) -> DriverResult<()> {
        self.0.synchronize()?;
        if bytes > 0 {
            // SAFETY: the context is current, and the range is in a block that no work uses: the device was
            // synchronised.
            unsafe { result::memset_d8_async(address, value, bytes as usize, std::ptr::null_mut()) }
                .map_err(failed("cuMemsetD8Async"))?;
        }
        self.0.synchronize()
    }

    fn read(&mut self, address: u64, to: &mut [u8]) -> DriverResult<()> {
        self.0.synchronize()?;
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: the context is current and the range is mapped.
        unsafe { result::memcpy_dtoh_sync(to, address) }.map_err(failed("cuMemcpyDtoH"))
    }
}

impl<T> PoolBuf<T> {
    /// Returns the stream for which the buffer was allocated.
    fn cuda_stream(&self) -> &Arc<CudaStream> {
        let stream = match self.origin {
            Origin::Block { inner, handle } => inner.stream_of(handle),
            Origin::Driver { inner, .. } => inner.stream(StreamId::default()),
            Origin::Slot(slot) => slot.server().stream.get(),
        };
        stream.unwrap_or_else(|| panic!("{self:?} has no CUDA stream: it is not from a CUDA pool"))
    }
}

/// # Panics
/// [`stream`](DeviceSlice::stream) panics if the buffer is not from a CUDA pool.
impl<T> DeviceSlice<T> for PoolBuf<T> {
    fn len(&self) -> usize {
        PoolBuf::len(self)
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.cuda_stream()
    }
}

// The pool and its user order streams with `record_use`, so there is nothing to record at the end of a call.
impl<T> DevicePtr<T> for PoolBuf<T> {
    fn device_ptr<'a>(&'a self, _: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        (self.address, SyncOnDrop::Sync(None))
    }
}

impl<T> DevicePtrMut<T> for PoolBuf<T> {
    fn device_ptr_mut<'a>(&'a mut self, _: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        (self.address, SyncOnDrop::Sync(None))
    }
}

// SAFETY: the argument is the address, a u64 inside the buffer, which is borrowed as long as the launch arguments.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b PoolBuf<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b PoolBuf<T>) -> &mut Self {
        self.arg(&arg.address)
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b mut PoolBuf<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b mut PoolBuf<T>) -> &mut Self {
        let arg: &'b PoolBuf<T> = arg;
        self.arg(&arg.address)
    }
}
