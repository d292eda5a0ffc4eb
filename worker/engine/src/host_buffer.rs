//! Host memory for large copies from the device: pinned where there is a GPU, as it copies several times faster to
//! memory that cannot be paged out.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result};

use crate::cuda::driver_error;
use crate::error::Result;

/// Allocates [`HostBuffer`]s on any thread: pinning gigabytes takes a while.
#[derive(Clone, Debug, Default)]
pub struct HostAllocator {
    /// `None` on the CPU.
    context: Option<Arc<CudaContext>>,
}

/// Host values, all zero at first.
pub struct HostBuffer(Memory);

enum Memory {
    Ordinary(Vec<f32>),
    Pinned(Pinned),
}

struct Pinned {
    address: NonNull<f32>,
    len: usize,
    context: Arc<CudaContext>,
}

// SAFETY: the memory belongs to this value alone, and the driver lets any thread use and free it.
unsafe impl Send for Pinned {}

impl HostAllocator {
    pub(crate) fn pinned(context: Arc<CudaContext>) -> Self {
        Self { context: Some(context) }
    }

    /// A buffer of `len` values.
    ///
    /// # Errors
    /// The driver cannot pin that much memory.
    pub fn alloc(&self, len: usize) -> Result<HostBuffer> {
        match &self.context {
            Some(context) if len > 0 => {
                Pinned::new(context, len).map(|pinned| HostBuffer(Memory::Pinned(pinned)))
            }
            _ => Ok(HostBuffer::from(vec![0.0; len])),
        }
    }
}

impl Pinned {
    fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self> {
        let failed = |error| driver_error("failed to pin host memory", error);
        context.bind_to_thread().map_err(failed)?;
        // SAFETY: the memory is initialised below, before anything reads it.
        let address = unsafe { result::malloc_host(len * size_of::<f32>(), 0) }.map_err(failed)?;
        let address = NonNull::new(address.cast::<f32>());
        let address = address.ok_or_else(|| failed(result::DriverError(OUT_OF_MEMORY)))?;
        // SAFETY: the allocation has room for `len` values, of which zero bytes are valid ones.
        unsafe { address.write_bytes(0, len) };
        Ok(Self { address, len, context: context.clone() })
    }
}

const OUT_OF_MEMORY: cudarc::driver::sys::CUresult = cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;

impl Drop for Pinned {
    fn drop(&mut self) {
        // If the context is gone, so is the memory.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated by `malloc_host`, and freed once. Copies to it were waited for by those who began them.
            let _ = unsafe { result::free_host(self.address.as_ptr().cast()) };
        }
    }
}

impl From<Vec<f32>> for HostBuffer {
    fn from(values: Vec<f32>) -> Self {
        Self(Memory::Ordinary(values))
    }
}

impl Deref for HostBuffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match &self.0 {
            Memory::Ordinary(values) => values,
            // SAFETY: `len` initialised values that belong to this buffer.
            Memory::Pinned(Pinned { address, len, .. }) => unsafe {
                std::slice::from_raw_parts(address.as_ptr(), *len)
            },
        }
    }
}

impl DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        match &mut self.0 {
            Memory::Ordinary(values) => values,
            // SAFETY: as in `deref`; the borrow is unique.
            Memory::Pinned(Pinned { address, len, .. }) => unsafe {
                std::slice::from_raw_parts_mut(address.as_ptr(), *len)
            },
        }
    }
}

impl Default for HostBuffer {
    fn default() -> Self {
        Self::from(Vec::new())
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if matches!(self.0, Memory::Pinned(_)) { "pinned" } else { "ordinary" };
        write!(f, "HostBuffer({} values, {kind})", self.len())
    }
}
