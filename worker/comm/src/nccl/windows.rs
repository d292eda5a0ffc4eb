//! NCCL windows ("symmetric memory", NCCL 2.27 and later): memory of every rank that the kernels of all ranks read and
//! write directly.
//!
//! Collectives between windows occupy few SMs and need no intermediate buffers. NCCL decides for each call whether to
//! use them: both operands must be in windows, at the same offsets on all ranks, and all devices must have peer access.
//! In any other call a registered buffer is treated like an ordinary one.
//!
//! NCCL needs one physical allocation that can be exported as a file descriptor and was mapped by one call: a segment
//! of [`Pool::registered`](xlaunch_pool::Pool::registered). It finds the allocation from any address in it
//! (`cuMemGetAddressRange`, `cuMemRetainAllocationHandle`) and maps all of it on the other ranks. So a window is a
//! whole segment, whose start and length are multiples of the driver's 2 MiB granularity, rather than a buffer, which
//! may start anywhere in a segment.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use cudarc::nccl::sys::{ncclComm_t, ncclWindow_t};
use xlaunch_pool::Lease;

use super::{library::Library, order_error};
use crate::collective::Result;

/// `NCCL_WIN_COLL_SYMMETRIC` of `nccl.h`: all ranks use the same offsets.
const NCCL_WIN_COLL_SYMMETRIC: i32 = 1;

/// The windows of one rank.
#[derive(Default)]
pub(super) struct Windows {
    all: Vec<Window>,
    /// Memory that `fence` writes to. Allocated with the first window.
    fence_word: Option<CudaSlice<u32>>,
}

struct Window {
    /// Address of the window's segment.
    start: u64,
    handle: Handle,
    /// One lease per buffer registered in the segment; they keep it mapped.
    leases: Vec<Lease>,
}

/// NCCL's handle of a window; null if NCCL does not support windows for this memory.
struct Handle(ncclWindow_t);

// SAFETY: an opaque handle, which NCCL lets any thread use; calls with it are made under `Communicator::calls`.
unsafe impl Send for Handle {}

impl Windows {
    /// Registers the segment of this memory, together with all other ranks. Must not be called during graph capture.
    ///
    /// # Errors
    /// If NCCL fails. The communicator is then unusable: NCCL marks it so, and other ranks may be waiting in this call.
    pub(super) fn register(
        &mut self,
        library: &Library,
        comm: ncclComm_t,
        stream: &Arc<CudaStream>,
        memory: Lease,
    ) -> Result<bool> {
        let (Some(calls), Some((start, bytes))) = (&library.windows, memory.segment()) else {
            return Ok(false);
        };
        if let Some(window) = self.all.iter_mut().find(|window| window.start == start) {
            window.leases.push(memory);
            return Ok(!window.handle.0.is_null());
        }
        if self.fence_word.is_none() {
            self.fence_word = Some(stream.alloc_zeros(1).map_err(order_error)?);
        }
        let mut handle: ncclWindow_t = std::ptr::null_mut();
        // SAFETY: the communicator is alive; the segment stays mapped while the lease is kept; one pointer is written
        // before the call returns.
        let result = unsafe {
            (calls.register)(comm, start as *mut _, bytes as usize, &raw mut handle, NCCL_WIN_COLL_SYMMETRIC)
        };
        self.all.push(Window { start, handle: Handle(handle), leases: vec![memory] });
        library
            .check("failed to register an NCCL window; set comm.windows = false to train without", result)?;
        Ok(!handle.is_null())
    }

    /// Prevents the next NCCL kernel from starting before the work that the stream waits for has ended.
    ///
    /// NCCL's symmetric kernels use programmatic dependent launch: they may start while their predecessor is finishing,
    /// and in NCCL 2.28 to 2.30.4 they do not wait for its end. In a captured graph any kernel that the stream waits
    /// for can be that predecessor, including one of the compute stream that is still writing gradients. A memset of
    /// four bytes in between is a predecessor that does not allow an early start.
    pub(super) fn fence(&mut self, stream: &Arc<CudaStream>) -> Result<()> {
        self.fence_word.as_mut().map_or(Ok(()), |word| stream.memset_zeros(word)).map_err(order_error)
    }

    /// Deregisters all windows. No kernel may be using them, and captured graphs that use them must not be launched
    /// again.
    pub(super) fn deregister(&mut self, library: &Library, comm: ncclComm_t) -> Result<()> {
        let Some(calls) = &library.windows else { return Ok(()) };
        for window in self.all.drain(..).filter(|window| !window.handle.0.is_null()) {
            // SAFETY: the communicator is alive, and the handle is one of its windows, deregistered once.
            let result = unsafe { (calls.deregister)(comm, window.handle.0) };
            library.check("failed to deregister an NCCL window", result)?;
        }
        Ok(())
    }
}
