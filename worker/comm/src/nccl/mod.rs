//! Sums and copies between GPUs by NCCL, on a stream of their own.
//!
//! ```text
//! compute stream:  gradients written --event--.                    .--event-- finish: work that needs the sums
//! comm stream:                                 `-- ncclAllReduce --'
//! ```
//! The host only enqueues. Loans are dropped at [`finish`](Collective::finish), those of a gather also when it is waited for
//! by itself: from then on everything given to the compute stream, also work on a block handed out again by the pool, is
//! ordered behind what used them.

mod library;
mod windows;

use std::collections::VecDeque;
use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, sys::CUevent_flags};
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use xlaunch_pool::{DType, Lease as Loan, Space};

use crate::collective::{AbortHandle, Collective, CommError, Result, expect_parts};
use library::Library;
use windows::Windows;

/// Time between looks at NCCL's asynchronous errors.
const WATCH: Duration = Duration::from_millis(200);
/// How long an abort waits for a call of another thread to return by itself.
const PATIENCE: Duration = Duration::from_millis(500);

/// A new id, by which the ranks of one communicator find each other. A secret.
pub fn unique_id() -> Result<[u8; 128]> {
    let library = Library::get()?;
    let mut id = ncclUniqueId { internal: [0; 128] };
    // SAFETY: the function writes 128 bytes, the size of the struct.
    let result = unsafe { (library.get_unique_id)(&raw mut id) };
    library.check("failed to make a unique id", result)?;
    Ok(id.internal.map(|byte| byte.cast_unsigned()))
}

/// One rank of a communicator. Dropping it without [`finalize`](Collective::finalize) aborts it.
pub struct Nccl {
    rank: usize,
    world: usize,
    shared: Arc<Shared>,
    compute: Arc<CudaStream>,
    stream: Arc<CudaStream>,
    /// Gradients are written; sums are done. Recorded again and again: a wait takes the state at its own time.
    written: CudaEvent,
    summed: CudaEvent,
    /// Gathers that nobody waits for yet, in order: what is recorded behind each, and what it was lent.
    gathers: VecDeque<(CudaEvent, Vec<Loan>)>,
    /// Events for more of them.
    spare: Vec<CudaEvent>,
    /// What everything else was lent.
    loans: Vec<Loan>,
    windows: Windows,
    watchdog: Option<JoinHandle<()>>,
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl(rank {} of {})", self.rank, self.world)
    }
}

/// What the trainer's thread, the watchdog and abort handles share.
struct Shared {
    library: &'static Library,
    comm: Communicator,
    /// Set once, before the communicator is given up; nothing is called on it afterwards.
    ended: AtomicBool,
    /// Held during calls on the communicator.
    calls: Mutex<()>,
    failure: Mutex<Option<CommError>>,
}

/// NCCL's handle. NCCL allows calls from several threads, one at a time, and aborts at any time.
struct Communicator(ncclComm_t);

// SAFETY: the handle is a pointer that NCCL lets any thread use; `Shared::calls` keeps calls apart.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Nccl {
    /// Joins the communicator of this id. Every rank calls it; it returns when all have. `compute` is the stream whose
    /// work the sums follow and precede.
    pub fn new(compute: Arc<CudaStream>, rank: usize, world: usize, id: [u8; 128]) -> Result<Self> {
        let library = Library::get()?;
        let context = compute.context().clone();
        let cuda = |what| move |error: DriverError| CommError::Cuda { what, reason: error.to_string() };
        context.bind_to_thread().map_err(cuda("failed to use the context"))?;
        let event = || new_event(&context);
        let stream = context.new_stream_with_priority(-1).map_err(cuda("failed to create a stream"))?;
        let mut comm: ncclComm_t = std::ptr::null_mut();
        let id = ncclUniqueId { internal: id.map(|byte| byte.cast_signed()) };
        let (ranks, this) = (library::int(world), library::int(rank));
        // SAFETY: the context is current; the function writes one pointer.
        let result = unsafe { (library.comm_init_rank)(&raw mut comm, ranks, id, this) };
        library.check("failed to join the communicator", result)?;
        let shared = Arc::new(Shared {
            library,
            comm: Communicator(comm),
            ended: AtomicBool::new(false),
            calls: Mutex::default(),
            failure: Mutex::default(),
        });
        let watched = shared.clone();
        let watchdog =
            std::thread::Builder::new().name("nccl-watchdog".into()).spawn(move || watched.watch()).map_err(
                |error| CommError::Nccl { what: "failed to start the watchdog", reason: error.to_string() },
            )?;
        Ok(Self {
            rank,
            world,
            shared,
            written: event()?,
            summed: event()?,
            gathers: VecDeque::new(),
            spare: Vec::new(),
            compute,
            stream,
            loans: Vec::new(),
            windows: Windows::default(),
            watchdog: Some(watchdog),
        })
    }

    /// Orders the comm stream behind the compute stream.
    fn after_compute(&mut self) -> Result<()> {
        self.written.record(&self.compute).map_err(unordered)?;
        self.stream.wait(&self.written).map_err(unordered)?;
        self.windows.separate(&self.stream)
    }

    /// Calls NCCL on the lent memory and keeps the loans.
    fn enqueue<const N: usize>(
        &mut self,
        what: &'static str,
        loans: [Loan; N],
        call: impl FnOnce(&Library, ncclComm_t, [*mut c_void; N]) -> ncclResult_t,
    ) -> Result<()> {
        assert!(loans.iter().all(|loan| loan.space() == Space::Cuda), "NCCL works on device memory");
        self.check()?;
        self.after_compute()?;
        let shared = &self.shared;
        let result = {
            let _calls = shared.calls.lock().unwrap_or_else(PoisonError::into_inner);
            call(shared.library, shared.comm.0, loans.each_ref().map(|loan| loan.address() as *mut c_void))
        };
        self.loans.extend(loans);
        self.check()?;
        self.shared.library.check(what, result)
    }
}

impl Collective for Nccl {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn register(&mut self, memory: Loan) -> Result<bool> {
        self.check()?;
        let shared = &self.shared;
        let result = {
            let _calls = shared.calls.lock().unwrap_or_else(PoisonError::into_inner);
            self.windows.register(shared.library, shared.comm.0, &self.stream, memory)
        };
        self.check()?;
        result
    }

    fn all_reduce(&mut self, elements: Loan, dtype: DType) -> Result<()> {
        let (count, stream) = (elements.bytes() / dtype.size(), self.stream.cu_stream().cast());
        let (kind, sum) = (data_type(dtype), ncclRedOp_t::ncclSum);
        self.enqueue("failed to sum", [elements], |library, comm, [data]| {
            // SAFETY: the loan keeps `count` elements of device memory alive and unused by others until `finish`, which
            // orders the compute stream behind this; in place is allowed; the stream lives as long as `self`.
            unsafe { (library.all_reduce)(data, data, count, kind, sum, comm, stream) }
        })
    }

    fn reduce_scatter(&mut self, from: Loan, into: Loan, dtype: DType) -> Result<()> {
        expect_parts(&from, &into, self.world);
        let (count, stream) = (into.bytes() / dtype.size(), self.stream.cu_stream().cast());
        let (kind, sum) = (data_type(dtype), ncclRedOp_t::ncclSum);
        self.enqueue("failed to sum", [from, into], |library, comm, [from, into]| {
            // SAFETY: as in `all_reduce`; `into` has `count` elements, `from` as many for every rank, and two loans do not
            // overlap.
            unsafe { (library.reduce_scatter)(from, into, count, kind, sum, comm, stream) }
        })
    }

    fn all_gather(&mut self, from: Loan, into: Loan) -> Result<()> {
        expect_parts(&into, &from, self.world);
        let (bytes, stream) = (from.bytes(), self.stream.cu_stream().cast());
        self.enqueue("failed to gather", [from, into], |library, comm, [from, into]| {
            // SAFETY: as in `reduce_scatter`, with bytes as elements and the roles of the two changed.
            unsafe { (library.all_gather)(from, into, bytes, ncclDataType_t::ncclUint8, comm, stream) }
        })?;
        let gathered = self.spare.pop().map_or_else(|| new_event(self.compute.context()), Ok)?;
        gathered.record(&self.stream).map_err(unordered)?;
        let lent = self.loans.split_off(self.loans.len() - 2);
        self.gathers.push_back((gathered, lent));
        Ok(())
    }

    fn finish_gather(&mut self) -> Result<()> {
        self.check()?;
        let Some((gathered, _)) = self.gathers.front() else { return Ok(()) };
        self.compute.wait(gathered).map_err(unordered)?;
        self.spare.extend(self.gathers.pop_front().map(|(gathered, _)| gathered));
        Ok(())
    }

    fn broadcast(&mut self, elements: Loan, root: usize) -> Result<()> {
        let (bytes, stream) = (elements.bytes(), self.stream.cu_stream().cast());
        let (kind, root) = (ncclDataType_t::ncclUint8, library::int(root));
        self.enqueue("failed to broadcast", [elements], |library, comm, [data]| {
            // SAFETY: as in `all_reduce`, with bytes as elements.
            unsafe { (library.broadcast)(data, data, bytes, kind, root, comm, stream) }
        })
    }

    fn finish(&mut self) -> Result<()> {
        self.check()?;
        self.summed.record(&self.stream).map_err(unordered)?;
        self.compute.wait(&self.summed).map_err(unordered)?;
        self.spare.extend(self.gathers.drain(..).map(|(gathered, _)| gathered));
        self.loans.clear();
        Ok(())
    }

    fn check(&self) -> Result<()> {
        if let Some(failure) = self.shared.failure.lock().unwrap_or_else(PoisonError::into_inner).clone() {
            return Err(failure);
        }
        match self.shared.ended.load(Ordering::SeqCst) {
            true => Err(CommError::Aborted),
            false => Ok(()),
        }
    }

    fn abort_handle(&self) -> AbortHandle {
        let shared = self.shared.clone();
        AbortHandle::new(move || shared.abort())
    }

    fn finalize(mut self: Box<Self>) -> Result<()> {
        self.check()?;
        let cuda = |error: DriverError| CommError::Cuda {
            what: "failed to wait for sums",
            reason: error.to_string(),
        };
        self.stream.synchronize().map_err(cuda)?;
        self.gathers.clear();
        self.loans.clear();
        let shared = self.shared.clone();
        if shared.ended.swap(true, Ordering::SeqCst) {
            return Err(CommError::Aborted);
        }
        let _calls = shared.calls.lock().unwrap_or_else(PoisonError::into_inner);
        self.windows.deregister(shared.library, shared.comm.0)?;
        // SAFETY: nothing is under way on the stream, and `ended` keeps every other thread off the handle.
        let result = unsafe { (shared.library.comm_finalize)(shared.comm.0) };
        shared.library.check("failed to leave the communicator", result)?;
        // SAFETY: as above; the handle is not used again.
        let result = unsafe { (shared.library.comm_destroy)(shared.comm.0) };
        shared.library.check("failed to free the communicator", result)
    }
}

/// An event that streams wait for.
fn new_event(context: &Arc<CudaContext>) -> Result<CudaEvent> {
    let event = context.new_event(Some(CUevent_flags::CU_EVENT_DISABLE_TIMING));
    event.map_err(|error| CommError::Cuda { what: "failed to create an event", reason: error.to_string() })
}

fn unordered(error: DriverError) -> CommError {
    CommError::Cuda { what: "failed to order streams", reason: error.to_string() }
}

/// NCCL's name for what is summed.
fn data_type(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::Bf16 => ncclDataType_t::ncclBfloat16,
        other => panic!("sums of {} are not defined", other.name()),
    }
}

impl Shared {
    /// The watchdog's thread: looks for errors that show only between calls.
    fn watch(&self) {
        while !self.ended.load(Ordering::SeqCst) {
            std::thread::sleep(WATCH);
            let Ok(_calls) = self.calls.try_lock() else { continue };
            if self.ended.load(Ordering::SeqCst) {
                return;
            }
            let mut state = ncclResult_t::ncclSuccess;
            // SAFETY: the communicator is alive: `ended` is not set and `calls` is held; one value is written.
            let result = unsafe { (self.library.comm_get_async_error)(self.comm.0, &raw mut state) };
            let found = self
                .library
                .check("failed to look for errors", result)
                .and_then(|()| self.library.check("a sum failed", state));
            if let Err(error) = found {
                *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                drop(_calls);
                return self.abort();
            }
        }
    }

    /// Gives the communicator up, once: kernels under way end, other threads' calls return.
    fn abort(&self) {
        if self.ended.swap(true, Ordering::SeqCst) {
            return;
        }
        // A call of another thread may be stuck waiting for a lost peer: what abort is for. One that is merely under way
        // gets the time to return.
        let deadline = std::time::Instant::now() + PATIENCE;
        let _calls = loop {
            match self.calls.try_lock() {
                Ok(calls) => break Some(calls),
                Err(_) if std::time::Instant::now() > deadline => break None,
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        // SAFETY: the handle is alive and, by `ended`, no new call will be made on it; NCCL allows an abort while another
        // thread is in a call. The result is of no use: the communicator is gone either way.
        unsafe { (self.library.comm_abort)(self.comm.0) };
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        self.shared.abort();
        if let Some(watchdog) = self.watchdog.take() {
            // A panic of the watchdog has been printed already.
            let _ = watchdog.join();
        }
    }
}
