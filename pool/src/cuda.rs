//! Pools of a CUDA device's memory, and buffers as arguments of cudarc's calls.

use std::sync::Arc;

use cudarc::driver::{
    CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, LaunchArgs, PushKernelArg, SyncOnDrop, result, sys,
};

use crate::backing::cuda::{Cuda, Lanes, Pinned};
use crate::backing::{Backing, DriverFailure, Result as DriverResult, Segments, Streams, Virtual};
use crate::buf::{Home, PoolBuf};
use crate::core::StreamId;
use crate::debug::{Bytes, HostBytes};
use crate::error::PoolError;
use crate::inner::Inner;
use crate::pool::{Mode, Options, Pool, Space};

/// Addresses to reserve, as multiples of the device's memory: growth always finds room in one piece.
const RANGES: [u64; 3] = [4, 2, 1];

impl Pool {
    /// A pool of the memory of this stream's device; the stream is number zero of the pool's.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn cuda(stream: &Arc<CudaStream>, options: impl Into<Options>) -> Result<Self, PoolError> {
        let options = options.into();
        let (lanes, cuda) = device(stream)?;
        let bytes = Box::new(CudaBytes(cuda.clone()));
        let mut inner = if options.mode == Mode::Off {
            Inner::off(Space::Cuda, &options, Box::new(cuda))
        } else {
            Inner::new(Space::Cuda, &options, backing(cuda), bytes)?
        };
        inner.set_lanes(lanes);
        Ok(Self::of(inner))
    }

    /// A pool of page-locked host memory for copies. Stream zero is the host itself: what [`PoolBuf::record_use`] said a
    /// stream copies from or to is handed out again when the host has waited for that stream, which it does where nothing
    /// else is free. Streams are added by [`add_cuda_stream`](Self::add_cuda_stream).
    ///
    /// # Errors
    /// The driver refuses.
    pub fn pinned(stream: &Arc<CudaStream>, options: impl Into<Options>) -> Result<Self, PoolError> {
        let options = options.into();
        let (lanes, cuda) = device(stream)?;
        let mut inner = if options.mode == Mode::Off {
            Inner::off(Space::Pinned, &options, Box::new(Pinned(cuda)))
        } else {
            let backing = Box::new(Segments::new(Pinned(cuda)));
            Inner::new(Space::Pinned, &options, backing, Box::new(HostBytes))?
        };
        inner.set_lanes(lanes);
        Ok(Self::of(inner))
    }

    /// One more stream of this pool's device.
    ///
    /// # Errors
    /// There are too many, the pool is off or not of a CUDA device, or the driver refuses.
    pub fn add_cuda_stream(&self, stream: &Arc<CudaStream>) -> Result<StreamId, PoolError> {
        let mut state = self.inner().lock();
        let core = state.core()?;
        let lanes = self.inner().lanes().ok_or(PoolError::Off)?;
        // First what can fail, then what cannot be taken back.
        if core.streams() == crate::core::MAX_STREAMS {
            return Err(PoolError::TooManyStreams);
        }
        lanes.add(stream.clone())?;
        core.add_stream().ok_or(PoolError::TooManyStreams)
    }
}

fn device(stream: &Arc<CudaStream>) -> Result<(Arc<Lanes>, Cuda), PoolError> {
    let lanes = Arc::new(Lanes::default());
    lanes.add(stream.clone())?;
    let cuda = Cuda::new(stream.context().clone(), lanes.clone())?;
    Ok((lanes, cuda))
}

/// Virtual memory, or plain allocations where there is none or its addresses cannot be had.
fn backing(cuda: Cuda) -> Box<dyn Backing> {
    if cuda.has_virtual_memory()
        && let Some((_, total)) = cuda.memory()
    {
        for times in RANGES {
            if let Ok(range) = Virtual::new(cuda.clone(), total * times) {
                return Box::new(range);
            }
        }
    }
    Box::new(Segments::new(cuda))
}

/// Device memory as debug mode sees it.
struct CudaBytes(Cuda);

impl Bytes for CudaBytes {
    fn fill(&mut self, address: u64, bytes: u64, value: u8) -> DriverResult<()> {
        self.0.synchronize()?;
        if bytes > 0 {
            // SAFETY: the context is current, the range lies in a block that no work uses, as the device was waited for.
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

fn failed(call: &'static str) -> impl Fn(cudarc::driver::DriverError) -> DriverFailure {
    move |error| DriverFailure { call, reason: error.to_string() }
}

impl<T> PoolBuf<T> {
    /// The stream of cudarc's that the buffer was handed out for.
    fn lane(&self) -> &Arc<CudaStream> {
        let lane = match self.home {
            Home::Block { inner, handle } => inner.lane_of(handle),
            Home::Driver { inner, .. } => inner.lane(StreamId::default()),
            Home::Slot(ticket) => ticket.book().lane.get(),
        };
        lane.unwrap_or_else(|| panic!("{self:?} is no memory of a CUDA pool"))
    }
}

impl<T> DeviceSlice<T> for PoolBuf<T> {
    fn len(&self) -> usize {
        PoolBuf::len(self)
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.lane()
    }
}

// Order between streams is the pool's and its user's, by `record_use`: nothing to record when a call is over.
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

// SAFETY: the argument is the address, a u64 in the buffer that is borrowed for as long as the launch's arguments.
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
