//! Where the pool's memory comes from: a CUDA context or the host.

use std::alloc::Layout;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::CudaContext;

use crate::pool::{GRANULE, PoolError, Space};

/// A source of memory. Addresses are plain numbers: they mean nothing to the host when they are a device's.
#[derive(Clone)]
pub(crate) enum Driver {
    Host,
    Cuda(Arc<CudaContext>),
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("Host"),
            Self::Cuda(context) => write!(f, "Cuda({})", context.ordinal()),
        }
    }
}

impl Driver {
    pub(crate) fn space(&self) -> Space {
        match self {
            Self::Host => Space::Host,
            Self::Cuda(_) => Space::Cuda,
        }
    }

    /// A block of `bytes`, a positive multiple of [`GRANULE`], aligned to it.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<u64, PoolError> {
        let failed = |reason: String| PoolError::Driver { requested: bytes, reason };
        match self {
            Self::Host => {
                let layout = host_layout(bytes)?;
                // Zeroed so that host buffers always hold initialised memory: reading too early is wrong, never undefined.
                // SAFETY: `layout` has a size above zero, since `bytes` is a positive multiple of GRANULE.
                let address = unsafe { std::alloc::alloc_zeroed(layout) };
                if address.is_null() {
                    return Err(failed("the host has no memory left".into()));
                }
                Ok(address as u64)
            }
            Self::Cuda(context) => {
                context.bind_to_thread().map_err(|error| failed(error.to_string()))?;
                // SAFETY: the context is current on this thread and `bytes` is above zero.
                unsafe { cudarc::driver::result::malloc_sync(bytes) }
                    .map_err(|error| failed(error.to_string()))
            }
        }
    }

    /// Gives a block back. CUDA waits for all work that may use it.
    ///
    /// # Safety
    /// `address` came from [`allocate`](Self::allocate) of the same driver with the same `bytes`, and is not used again.
    pub(crate) unsafe fn release(&self, address: u64, bytes: usize) -> Result<(), PoolError> {
        match self {
            Self::Host => {
                let layout = host_layout(bytes)?;
                // SAFETY: by the caller's promise the block was allocated with this layout and is unused.
                unsafe { std::alloc::dealloc(address as *mut u8, layout) };
                Ok(())
            }
            Self::Cuda(context) => {
                let failed = |error: cudarc::driver::DriverError| PoolError::Driver {
                    requested: bytes,
                    reason: error.to_string(),
                };
                context.bind_to_thread().map_err(failed)?;
                // SAFETY: by the caller's promise the address is an allocation of this context and is unused.
                unsafe { cudarc::driver::result::free_sync(address) }.map_err(failed)
            }
        }
    }
}

fn host_layout(bytes: usize) -> Result<Layout, PoolError> {
    Layout::from_size_align(bytes, GRANULE).map_err(|_| PoolError::TooLarge { requested: bytes })
}
