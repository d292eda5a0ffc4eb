//! One rank's NCCL communicator, shared by the training thread, the watchdog and abort handles.

use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::nccl::sys::{ncclComm_t, ncclResult_t, ncclUniqueId};

use super::library::Library;
use crate::collective::{CommError, Result};

/// Interval at which the watchdog polls `ncclCommGetAsyncError`.
const ASYNC_ERROR_POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Time that an abort gives another thread's NCCL call to return before it aborts during the call.
const ABORT_CALL_TIMEOUT: Duration = Duration::from_millis(500);
/// Interval at which an abort checks whether that call has returned.
const ABORT_CALL_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// NCCL's handle. NCCL allows calls from any thread, one at a time, and an abort at any time.
struct Handle(ncclComm_t);

// SAFETY: the handle is a pointer that NCCL lets any thread use; `Communicator::calls` serialises calls.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

pub(super) struct Communicator {
    library: &'static Library,
    handle: Handle,
    /// Set once, before the communicator is destroyed or aborted. No call is started on it afterwards.
    closed: AtomicBool,
    /// Held during calls on the communicator.
    calls: Mutex<()>,
    /// The error that the watchdog found.
    failure: Mutex<Option<CommError>>,
}

impl Communicator {
    /// Joins the communicator with this id. Every rank calls it, with its CUDA context current; it returns when all
    /// ranks have joined.
    pub(super) fn join(rank: usize, world: usize, id: [u8; 128]) -> Result<Arc<Self>> {
        let library = Library::get()?;
        let mut handle: ncclComm_t = std::ptr::null_mut();
        let id = ncclUniqueId { internal: id.map(|byte| c_char::from_ne_bytes([byte])) };
        let (ranks, this) = (int(world), int(rank));
        // SAFETY: the caller's context is current; the function writes one pointer.
        let result = unsafe { (library.comm_init_rank)(&raw mut handle, ranks, id, this) };
        library.check("failed to join the communicator", result)?;
        Ok(Self::of_handle(library, handle))
    }

    fn of_handle(library: &'static Library, handle: ncclComm_t) -> Arc<Self> {
        Arc::new(Self {
            library,
            handle: Handle(handle),
            closed: AtomicBool::new(false),
            calls: Mutex::default(),
            failure: Mutex::default(),
        })
    }

    /// Creates a communicator of the ranks that pass the same `set`, ordered by `index`. Every rank calls it.
    pub(super) fn split(&self, set: usize, index: usize) -> Result<Arc<Self>> {
        let what = "failed to split the communicator for `comm.experts`";
        let split = self.library.comm_split.ok_or_else(|| CommError::Nccl {
            what,
            reason: "this version has no ncclCommSplit; 2.18 or newer is needed".into(),
        })?;
        let mut handle: ncclComm_t = std::ptr::null_mut();
        let config = std::ptr::null_mut();
        // SAFETY: the communicator is alive during the call; null selects the default settings; the function writes one
        // pointer, before it returns, as the communicator is blocking.
        let result =
            self.call(|_, comm| unsafe { split(comm, int(set), int(index), &raw mut handle, config) })?;
        self.check_result(what, result)?;
        Ok(Self::of_handle(self.library, handle))
    }

    /// Makes a call on the communicator, unless it is closed.
    pub(super) fn call<R>(&self, call: impl FnOnce(&Library, ncclComm_t) -> R) -> Result<R> {
        let _calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        // Check under the lock: an earlier abort has destroyed the handle.
        self.check()?;
        Ok(call(self.library, self.handle.0))
    }

    /// Makes a call for each of `items`, as one operation.
    pub(super) fn call_each<T>(
        &self,
        what: &'static str,
        items: &[T],
        call: impl Fn(&Library, ncclComm_t, &T) -> ncclResult_t,
    ) -> Result<()> {
        let result =
            self.call(|library, comm| library.group(items.iter().map(|item| call(library, comm, item))))?;
        self.check_result(what, result)
    }

    /// Fails if the communicator has failed or was closed.
    pub(super) fn check(&self) -> Result<()> {
        if let Some(failure) = self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone() {
            return Err(failure);
        }
        if self.closed.load(Ordering::SeqCst) { Err(CommError::Aborted) } else { Ok(()) }
    }

    /// Converts the result of a call to an error.
    pub(super) fn check_result(&self, what: &'static str, result: ncclResult_t) -> Result<()> {
        // Check this first: after an abort, NCCL's own result does not tell the cause.
        self.check()?;
        self.library.check(what, result)
    }

    /// Destroys the communicator together with all other ranks, after calling `before`. Its streams must be idle.
    pub(super) fn close(&self, before: impl FnOnce(&Library, ncclComm_t) -> Result<()>) -> Result<()> {
        if self.closed.swap(true, Ordering::SeqCst) {
            return Err(CommError::Aborted);
        }
        let _calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let (library, comm) = (self.library, self.handle.0);
        before(library, comm)?;
        // SAFETY: no work is in progress, and `closed` keeps every other thread from using the handle.
        let result = unsafe { (library.comm_finalize)(comm) };
        library.check("failed to finalize the communicator", result)?;
        // SAFETY: as above; the handle is not used again.
        let result = unsafe { (library.comm_destroy)(comm) };
        library.check("failed to destroy the communicator", result)
    }

    /// Body of the watchdog thread: polls for errors that NCCL reports asynchronously, such as a lost peer.
    pub(super) fn watch(&self) {
        while !self.closed.load(Ordering::SeqCst) {
            std::thread::sleep(ASYNC_ERROR_POLL_INTERVAL);
            let Ok(calls) = self.calls.try_lock() else { continue };
            if self.closed.load(Ordering::SeqCst) {
                return;
            }
            let mut state = ncclResult_t::ncclSuccess;
            // SAFETY: the communicator is alive, as `closed` is not set and `calls` is held; one value is written.
            let result = unsafe { (self.library.comm_get_async_error)(self.handle.0, &raw mut state) };
            let found = self
                .library
                .check("failed to poll for errors", result)
                .and_then(|()| self.library.check("a collective failed", state));
            drop(calls);
            if let Err(error) = found {
                *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                return self.abort();
            }
        }
    }

    /// Aborts the communicator, once: running kernels end, and other threads' calls return.
    pub(super) fn abort(&self) {
        if self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        // Another thread's call may be stuck waiting for a lost peer, which is the purpose of an abort. A call that is
        // merely in progress gets time to return first.
        let deadline = Instant::now() + ABORT_CALL_TIMEOUT;
        let _calls = loop {
            match self.calls.try_lock() {
                Ok(calls) => break Some(calls),
                Err(_) if Instant::now() > deadline => break None,
                Err(_) => std::thread::sleep(ABORT_CALL_POLL_INTERVAL),
            }
        };
        // SAFETY: the handle is alive and, by `closed`, no new call is started on it; NCCL allows an abort while
        // another thread is in a call. The result is ignored: the communicator is unusable either way.
        unsafe { (self.library.comm_abort)(self.handle.0) };
    }
}

/// Converts a rank or world size to C's `int`. Saturates: NCCL refuses a number that large.
pub(super) fn int(number: usize) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}
