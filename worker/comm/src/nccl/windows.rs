//! Windows: memory of every rank that NCCL's kernels of all ranks read and write directly.
//!
//! Sums and gathers between windows need few processors and no buffers between (NCCL 2.27 and later: "symmetric memory").
//! NCCL itself decides for each call whether it goes that way: both its operands lie in windows, at the same distances from
//! their starts on all ranks, and every device reaches every other. In all else a registered buffer is one like others.
//!
//! What NCCL asks for is a segment of [`Pool::registered`](xlaunch_pool::Pool::registered): one physical allocation that can
//! be exported as a file descriptor, mapped by one call. NCCL finds it by any address in it (`cuMemGetAddressRange`,
//! `cuMemRetainAllocationHandle`) and maps all of it on the other ranks. So a window is a whole segment, whose start and
//! length are multiples of the driver's 2 MiB, and not a buffer, which may start anywhere in one.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use cudarc::nccl::sys::{ncclComm_t, ncclWindow_t};
use xlaunch_pool::Lease as Loan;

use super::{library::Library, unordered};
use crate::collective::Result;

/// `NCCL_WIN_COLL_SYMMETRIC` of `nccl.h`: all ranks register alike.
const SYMMETRIC: i32 = 1;

/// What one rank has registered.
#[derive(Default)]
pub(super) struct Windows {
    all: Vec<Window>,
    /// What `separate` writes; there from the first window on.
    word: Option<CudaSlice<u32>>,
}

struct Window {
    /// Start of its segment.
    start: u64,
    handle: Handle,
    /// Of every buffer that was registered in it.
    kept: Vec<Loan>,
}

/// NCCL's name of a window; null where it has no use for one.
struct Handle(ncclWindow_t);

// SAFETY: a name, used by whoever holds the communicator's lock, on any thread.
unsafe impl Send for Handle {}

impl Windows {
    /// Registers the segment that this memory lies in, with all other ranks. Nothing is under capture.
    ///
    /// # Errors
    /// NCCL's. The communicator cannot be used any more: NCCL marks it so, and other ranks may wait in this call.
    pub(super) fn register(
        &mut self,
        library: &Library,
        comm: ncclComm_t,
        stream: &Arc<CudaStream>,
        memory: Loan,
    ) -> Result<bool> {
        let (Some(calls), Some((start, bytes))) = (&library.windows, memory.segment()) else {
            return Ok(false);
        };
        if let Some(window) = self.all.iter_mut().find(|window| window.start == start) {
            window.kept.push(memory);
            return Ok(!window.handle.0.is_null());
        }
        if self.word.is_none() {
            self.word = Some(stream.alloc_zeros(1).map_err(unordered)?);
        }
        let mut handle: ncclWindow_t = std::ptr::null_mut();
        // SAFETY: the communicator is alive; the segment is mapped, and stays so while the loan is kept; one pointer is
        // written before the call returns.
        let result =
            unsafe { (calls.register)(comm, start as *mut _, bytes as usize, &raw mut handle, SYMMETRIC) };
        self.all.push(Window { start, handle: Handle(handle), kept: vec![memory] });
        library.check("failed to register memory, which comm.windows = false leaves out", result)?;
        Ok(!handle.is_null())
    }

    /// Parts the call that follows from what the stream waits for.
    ///
    /// The kernels between windows may be launched while the kernel before them comes to its end, and those of NCCL 2.28 to
    /// 2.30.4 do not wait for that end. In a captured graph every kernel that the stream waits for can be the one before,
    /// also that of another stream which still writes what is to be summed. Behind a write of four bytes nothing can.
    pub(super) fn separate(&mut self, stream: &Arc<CudaStream>) -> Result<()> {
        self.word.as_mut().map_or(Ok(()), |word| stream.memset_zeros(word)).map_err(unordered)
    }

    /// Gives all windows up. Nothing works on them any more, and no graph does again.
    pub(super) fn deregister(&mut self, library: &Library, comm: ncclComm_t) -> Result<()> {
        let Some(calls) = &library.windows else { return Ok(()) };
        for window in self.all.drain(..).filter(|window| !window.handle.0.is_null()) {
            // SAFETY: the communicator is alive, and the handle is one of its windows, given up once.
            let result = unsafe { (calls.deregister)(comm, window.handle.0) };
            library.check("failed to give a window up", result)?;
        }
        Ok(())
    }
}
