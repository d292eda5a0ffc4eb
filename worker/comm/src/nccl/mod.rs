//! Collectives between GPUs by NCCL, on a separate CUDA stream.
//!
//! ```text
//! compute stream:  gradients written --event--.                    .--event-- waited: work that needs the results
//! comm stream:                                 `-- ncclAllReduce --'
//! ```
//! The host only enqueues. Leases are dropped by [`Wait::All`]. Leases of gathers or reduce-scatters that were started
//! together are dropped as soon as the first of them is waited for. Everything that
//! is enqueued on the compute stream afterwards, including work on a block that the pool has reused, is ordered after
//! the kernels that used the leases.
//!
//! A watchdog thread polls NCCL's asynchronous errors and aborts the communicator when it finds one.

mod communicator;
mod library;
mod windows;

use std::collections::VecDeque;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, sys::CUevent_flags};
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use xlaunch_pool::{DType, Lease, Space};

use crate::collective::{AbortHandle, Collective, CommError, Operation, Result, Shards, Wait};
use communicator::Communicator;
use library::Library;
use windows::Windows;

/// Loads NCCL ahead of its first use. The first use reports a missing library.
pub fn load_library() {
    let _ = Library::get();
}

/// Creates an id with which the ranks of one communicator find each other. It is a secret: anyone who has it can join.
pub fn unique_id() -> Result<[u8; 128]> {
    let library = Library::get()?;
    let mut id = ncclUniqueId { internal: [0; 128] };
    // SAFETY: the function writes 128 bytes, the size of the struct.
    let result = unsafe { (library.get_unique_id)(&raw mut id) };
    library.check("failed to make a unique id", result)?;
    Ok(id.internal.map(|byte| byte.to_ne_bytes()[0]))
}

/// One rank of a communicator. Dropping it without [`finalize`](Collective::finalize) aborts it.
pub struct Nccl {
    rank: usize,
    world: usize,
    communicator: Arc<Communicator>,
    compute: Arc<CudaStream>,
    stream: Arc<CudaStream>,
    /// Recorded on the compute stream before, and on the comm stream after, collectives. Both events are reused: a
    /// stream waits for the record that is current when the wait is enqueued.
    compute_done: CudaEvent,
    comm_done: CudaEvent,
    pending_gathers: Pending,
    pending_scatters: Pending,
    /// Events of completed waits, for reuse: creating events each time would cost a driver call per bucket and step.
    spare_events: Vec<CudaEvent>,
    /// Leases of all other collectives in progress.
    leases: Vec<Lease>,
    windows: Windows,
    watchdog: Option<JoinHandle<()>>,
}

/// Collectives of one kind that have not been waited for, oldest first.
type Pending = VecDeque<Group>;

/// Collectives that were started together.
struct Group {
    /// Event recorded after the group.
    done: CudaEvent,
    /// Leases of the group. Empty once the compute stream is ordered after the event.
    leases: Vec<[Lease; 2]>,
    /// Number of collectives in the group that have not been waited for.
    pending: usize,
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl(rank {} of {})", self.rank, self.world)
    }
}

impl Nccl {
    /// Joins the communicator with this id. Every rank calls it; it returns when all have joined. Collectives are
    /// ordered after and before work on the stream `compute`.
    pub fn new(compute: Arc<CudaStream>, rank: usize, world: usize, id: [u8; 128]) -> Result<Self> {
        let context = compute.context().clone();
        let cuda = |what| move |error: DriverError| CommError::Cuda { what, reason: error.to_string() };
        context.bind_to_thread().map_err(cuda("failed to use the context"))?;
        let event = || new_event(&context);
        let stream = context.new_stream_with_priority(-1).map_err(cuda("failed to create a stream"))?;
        let communicator = Communicator::join(rank, world, id)?;
        let watched = communicator.clone();
        let watchdog =
            std::thread::Builder::new().name("nccl-watchdog".into()).spawn(move || watched.watch()).map_err(
                |error| CommError::Nccl { what: "failed to start the watchdog", reason: error.to_string() },
            )?;
        Ok(Self {
            rank,
            world,
            communicator,
            compute_done: event()?,
            comm_done: event()?,
            pending_gathers: Pending::new(),
            pending_scatters: Pending::new(),
            spare_events: Vec::new(),
            compute,
            stream,
            leases: Vec::new(),
            windows: Windows::default(),
            watchdog: Some(watchdog),
        })
    }

    /// Makes the comm stream wait for the compute stream.
    fn wait_for_compute(&mut self) -> Result<()> {
        self.compute_done.record(&self.compute).map_err(order_error)?;
        self.stream.wait(&self.compute_done).map_err(order_error)?;
        self.windows.fence(&self.stream)
    }

    /// Calls NCCL on the leased memory of each bucket and keeps the leases.
    fn enqueue(
        &mut self,
        what: &'static str,
        buckets: Vec<Lease>,
        call: impl Fn(&Library, ncclComm_t, &Lease) -> ncclResult_t,
    ) -> Result<()> {
        let started = self.call(what, &buckets, call);
        self.leases.extend(buckets);
        started
    }

    /// Same as `enqueue`, with an event recorded afterwards. Returns the group to wait for.
    fn enqueue_with_event(
        &mut self,
        what: &'static str,
        buckets: Vec<[Lease; 2]>,
        call: impl Fn(&Library, ncclComm_t, &[Lease; 2]) -> ncclResult_t,
    ) -> Result<Group> {
        let done = self.spare_events.pop().map_or_else(|| new_event(self.compute.context()), Ok);
        let started = done.and_then(|done| {
            self.call(what, &buckets, call)?;
            done.record(&self.stream).map_err(order_error)?;
            Ok(done)
        });
        match started {
            Ok(done) => Ok(Group { done, pending: buckets.len(), leases: buckets }),
            // The collectives may have been started, so keep their leases.
            Err(error) => {
                self.leases.extend(buckets.into_iter().flatten());
                Err(error)
            }
        }
    }

    fn call<B>(
        &mut self,
        what: &'static str,
        buckets: &[B],
        call: impl Fn(&Library, ncclComm_t, &B) -> ncclResult_t,
    ) -> Result<()> {
        self.check()?;
        self.wait_for_compute()?;
        let result = self
            .communicator
            .call(|library, comm| library.group(buckets.iter().map(|bucket| call(library, comm, bucket))))?;
        self.communicator.check_result(what, result)
    }

    /// Orders the compute stream after the oldest bucket, and thereby after all buckets of its group.
    fn wait_for_oldest(&mut self, pending: fn(&mut Self) -> &mut Pending) -> Result<()> {
        let Some(mut group) = pending(self).pop_front() else { return Ok(()) };
        let leases = std::mem::take(&mut group.leases);
        if !leases.is_empty()
            && let Err(error) = self.compute.wait(&group.done).map_err(order_error)
        {
            self.leases.extend(leases.into_iter().flatten());
            return Err(error);
        }
        group.pending -= 1;
        match group.pending {
            0 => self.spare_events.push(group.done),
            _ => pending(self).push_front(group),
        }
        Ok(())
    }

    /// Orders the compute stream after everything.
    fn wait_for_all(&mut self) -> Result<()> {
        self.comm_done.record(&self.stream).map_err(order_error)?;
        self.compute.wait(&self.comm_done).map_err(order_error)?;
        let pending = self.pending_gathers.drain(..).chain(self.pending_scatters.drain(..));
        self.spare_events.extend(pending.map(|group| group.done));
        self.leases.clear();
        Ok(())
    }
}

impl Collective for Nccl {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world
    }

    fn register(&mut self, memory: Lease) -> Result<bool> {
        let (windows, stream) = (&mut self.windows, &self.stream);
        let result =
            self.communicator.call(|library, comm| windows.register(library, comm, stream, memory))?;
        self.check()?;
        result
    }

    fn start(&mut self, operation: Operation) -> Result<()> {
        operation.expect_shards(self.rank, self.world);
        let (stream, sum) = (self.stream.cu_stream().cast(), ncclRedOp_t::ncclSum);
        let bytes = ncclDataType_t::ncclUint8;
        let (rank, world, last) = (self.rank, self.world, communicator::int(self.world - 1));
        match operation {
            Operation::AllReduce { buckets, dtype } => {
                let kind = data_type(dtype);
                self.enqueue("failed to start an all-reduce", buckets, |library, comm, elements| {
                    let (data, count) = (address(elements), elements.bytes() / dtype.size());
                    // SAFETY: the lease gives exclusive access to `count` elements of device memory until they are
                    // waited for, which orders the compute stream after this call; in place is allowed; the stream
                    // lives as long as `self`.
                    unsafe { (library.all_reduce)(data, data, count, kind, sum, comm, stream) }
                })
            }
            Operation::ReduceScatter { buckets, dtype } => {
                let (kind, what) = (data_type(dtype), "failed to start a reduce-scatter");
                let group = self.enqueue_with_event(what, buckets, |library, comm, [from, into]| {
                    let Shards { equal, rest } = Shards::new(from.bytes(), into.bytes(), rank, world);
                    let (from, into) = (address(from), address(into));
                    let [count, others] = [equal, rest].map(|bytes| bytes / dtype.size());
                    // SAFETY: as above; `into` has `count` elements, `from` has `count` per rank, and two leases never
                    // overlap.
                    let equal_shards =
                        || unsafe { (library.reduce_scatter)(from, into, count, kind, sum, comm, stream) };
                    // SAFETY: as above; after that, both have `others` elements on the last rank, and `from` on all;
                    // NCCL does not use `into` on other ranks.
                    let rest = || unsafe {
                        let (from, into) = (from.byte_add(equal * world), into.byte_add(equal));
                        (library.reduce)(from, into, others, kind, sum, last, comm, stream)
                    };
                    both((count > 0).then_some(equal_shards), (others > 0).then_some(rest))
                })?;
                self.pending_scatters.push_back(group);
                Ok(())
            }
            Operation::AllGather { buckets } => {
                let what = "failed to start an all-gather";
                let group = self.enqueue_with_event(what, buckets, |library, comm, [from, into]| {
                    let Shards { equal, rest } = Shards::new(into.bytes(), from.bytes(), rank, world);
                    let (from, into) = (address(from), address(into));
                    // SAFETY: as in a reduce-scatter, with bytes as elements and the roles of the two swapped.
                    let equal_shards =
                        || unsafe { (library.all_gather)(from, into, equal, bytes, comm, stream) };
                    // SAFETY: as above.
                    let others = || unsafe {
                        let (from, into) = (from.byte_add(equal), into.byte_add(equal * world));
                        (library.broadcast)(from, into, rest, bytes, last, comm, stream)
                    };
                    both((equal > 0).then_some(equal_shards), (rest > 0).then_some(others))
                })?;
                self.pending_gathers.push_back(group);
                Ok(())
            }
            Operation::Broadcast { elements, root } => {
                let root = communicator::int(root);
                self.enqueue("failed to start a broadcast", vec![elements], |library, comm, elements| {
                    let (data, count) = (address(elements), elements.bytes());
                    // SAFETY: as in an all-reduce, with bytes as elements.
                    unsafe { (library.broadcast)(data, data, count, bytes, root, comm, stream) }
                })
            }
        }
    }

    fn wait(&mut self, wait: Wait) -> Result<()> {
        self.check()?;
        match wait {
            Wait::OldestScatter => self.wait_for_oldest(|this| &mut this.pending_scatters),
            Wait::OldestGather => self.wait_for_oldest(|this| &mut this.pending_gathers),
            Wait::All => self.wait_for_all(),
        }
    }

    fn check(&self) -> Result<()> {
        self.communicator.check()
    }

    fn abort_handle(&self) -> AbortHandle {
        let communicator = self.communicator.clone();
        AbortHandle::new(move || communicator.abort())
    }

    fn finalize(mut self: Box<Self>) -> Result<()> {
        self.check()?;
        let cuda = |error: DriverError| CommError::Cuda {
            what: "failed to wait for collectives",
            reason: error.to_string(),
        };
        self.stream.synchronize().map_err(cuda)?;
        self.pending_gathers.clear();
        self.pending_scatters.clear();
        self.leases.clear();
        let windows = &mut self.windows;
        self.communicator.close(|library, comm| windows.deregister(library, comm))
    }
}

/// Makes up to two calls, the second one only if the first does not fail.
fn both(
    first: Option<impl FnOnce() -> ncclResult_t>,
    second: Option<impl FnOnce() -> ncclResult_t>,
) -> ncclResult_t {
    let result = first.map_or(ncclResult_t::ncclSuccess, |call| call());
    if library::has_failed(result) { result } else { second.map_or(result, |call| call()) }
}

/// Creates an event for ordering streams. As CUDA recommends for that, it has no timing, which makes waits fastest.
fn new_event(context: &Arc<CudaContext>) -> Result<CudaEvent> {
    let event = context.new_event(Some(CUevent_flags::CU_EVENT_DISABLE_TIMING));
    event.map_err(|error| CommError::Cuda { what: "failed to create an event", reason: error.to_string() })
}

/// # Panics
/// If the lease is not device memory.
fn address(lease: &Lease) -> *mut c_void {
    assert_eq!(lease.space(), Space::Cuda, "NCCL takes device memory only");
    lease.address() as *mut c_void
}

fn order_error(error: DriverError) -> CommError {
    CommError::Cuda { what: "failed to order streams", reason: error.to_string() }
}

fn data_type(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::Bf16 => ncclDataType_t::ncclBfloat16,
        other => panic!("all-reduce of {} is not supported", other.name()),
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        self.communicator.abort();
        if let Some(watchdog) = self.watchdog.take() {
            // If the watchdog panicked, the panic was printed already.
            let _ = watchdog.join();
        }
    }
}
