//! Collectives between GPUs with NCCL, on a separate CUDA stream.
//!
//! ```text
//! compute stream:  gradients written --event--.                    .--event-- waited: work that needs the results
//! comm stream:                                 `-- ncclAllReduce --'
//! ```
//! The host only enqueues. Leases are dropped by [`Wait::All`]. Leases of gathers or reduce-scatters that were started
//! together are dropped as soon as the first of them is waited for. Everything enqueued on the compute stream
//! afterwards, including work on a block that the pool has reused, is ordered after the kernels that used the leases.
//!
//! Operations among some ranks have communicators of their own. Those of a group that are
//! [exchanged](Collective::exchange) are enqueued on the compute stream itself, between the kernels that write their
//! operands and those that read their results, or on a stream beside it, and never wait for gradients on the comm
//! stream.
//!
//! A watchdog thread for each communicator polls NCCL's asynchronous errors and aborts the communicator when it finds
//! one.

mod communicator;
mod library;
mod sharded;
mod windows;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, sys::CUevent_flags};
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use xlaunch_pool::Lease;

use crate::collective::{
    AbortHandle, Among, Collective, CommError, Exchange, Groups, Operation, Result, Wait,
};
use communicator::Communicator;
use library::Library;
use sharded::{address, all_gather, data_type, reduce_scatter};
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
    groups: Groups,
    all: Member,
    /// `None` without groups.
    divided: Option<Divided>,
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
}

/// The communicators of this rank's group and of its peers, and a stream for exchanges.
struct Divided {
    group: Member,
    peers: Member,
    /// Stream of exchanges that run beside the compute stream.
    stream: Arc<CudaStream>,
    /// Recorded on the compute stream before an exchange is started, and on its stream after it.
    event: CudaEvent,
    /// The exchange in progress there, with its leases.
    started: Option<Operation>,
}

/// This rank's place in a communicator, with the communicator's watchdog.
struct Member {
    communicator: Arc<Communicator>,
    watchdog: Option<JoinHandle<()>>,
}

impl Member {
    fn new(communicator: Arc<Communicator>) -> Result<Self> {
        let watched = communicator.clone();
        let watchdog =
            std::thread::Builder::new().name("nccl-watchdog".into()).spawn(move || watched.watch());
        let watchdog = watchdog.map_err(|error| CommError::Nccl {
            what: "failed to start the watchdog",
            reason: error.to_string(),
        })?;
        Ok(Self { communicator, watchdog: Some(watchdog) })
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.communicator.abort();
        if let Some(watchdog) = self.watchdog.take() {
            // If the watchdog panicked, the panic was printed already.
            let _ = watchdog.join();
        }
    }
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
        write!(f, "Nccl(rank {} of {})", self.groups.rank, self.groups.world)
    }
}

impl Nccl {
    /// Joins the communicator with this id. Every rank calls it; it returns when all have joined. Collectives are
    /// ordered after and before work on the stream `compute`.
    pub fn new(compute: Arc<CudaStream>, rank: usize, world: usize, id: [u8; 128]) -> Result<Self> {
        let context = compute.context().clone();
        context.bind_to_thread().map_err(|error| CommError::Cuda {
            what: "failed to use the context",
            reason: error.to_string(),
        })?;
        let event = || new_event(&context);
        let stream = new_stream(&context)?;
        let all = Member::new(Communicator::join(rank, world, id)?)?;
        Ok(Self {
            groups: Groups::single(rank, world),
            all,
            divided: None,
            compute_done: event()?,
            comm_done: event()?,
            pending_gathers: Pending::new(),
            pending_scatters: Pending::new(),
            spare_events: Vec::new(),
            compute,
            stream,
            leases: Vec::new(),
            windows: Windows::default(),
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
        (what, among): (&'static str, Among),
        buckets: Vec<Lease>,
        call: impl Fn(&Library, ncclComm_t, &Lease) -> ncclResult_t,
    ) -> Result<()> {
        let started = self.call((what, among), &buckets, call);
        self.leases.extend(buckets);
        started
    }

    /// Same as `enqueue`, with an event recorded afterwards. Returns the group to wait for.
    fn enqueue_with_event(
        &mut self,
        (what, among): (&'static str, Among),
        buckets: Vec<[Lease; 2]>,
        call: impl Fn(&Library, ncclComm_t, &[Lease; 2]) -> ncclResult_t,
    ) -> Result<Group> {
        let done = self.spare_events.pop().map_or_else(|| new_event(self.compute.context()), Ok);
        let started = done.and_then(|done| {
            self.call((what, among), &buckets, call)?;
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
        (what, among): (&'static str, Among),
        buckets: &[B],
        call: impl Fn(&Library, ncclComm_t, &B) -> ncclResult_t,
    ) -> Result<()> {
        self.check()?;
        self.wait_for_compute()?;
        self.member(among)?.call_each(what, buckets, call)
    }

    /// Returns the communicator of these ranks.
    fn member(&self, among: Among) -> Result<&Communicator> {
        let member = match (among, &self.divided) {
            // Without groups, all ranks have the same parameters.
            (Among::All, _) | (Among::Peers, None) => &self.all,
            (Among::Group, Some(divided)) => &divided.group,
            (Among::Peers, Some(divided)) => &divided.peers,
            (Among::Group, None) => return Err(no_groups()),
        };
        Ok(&member.communicator)
    }

    /// Returns all communicators.
    fn members(&self) -> impl Iterator<Item = &Member> {
        self.divided.iter().flat_map(|divided| [&divided.group, &divided.peers]).chain([&self.all])
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

impl Divided {
    /// Enqueues an exchange on a stream. It needs its leases until it ends.
    fn exchange(&self, stream: &CudaStream, member: (usize, usize), operation: &Operation) -> Result<()> {
        operation.expect_shards(member);
        let (stream, group) = (stream.cu_stream().cast(), &self.group.communicator);
        match operation {
            Operation::ReduceScatter { buckets, dtype } => {
                group.call_each("failed to exchange a reduce-scatter", buckets, |library, comm, pair| {
                    // SAFETY: as in `start_among`; work that uses the memory again is enqueued on the compute stream
                    // once the leases have ended, and ordered after this call by that stream or an event.
                    unsafe { reduce_scatter(library, comm, stream, member, pair, *dtype) }
                })
            }
            Operation::AllGather { buckets } => {
                group.call_each("failed to exchange an all-gather", buckets, |library, comm, pair| {
                    // SAFETY: as above.
                    unsafe { all_gather(library, comm, stream, member, pair) }
                })
            }
            Operation::AllReduce { .. } | Operation::Broadcast { .. } => {
                panic!("only shards are exchanged in groups")
            }
        }
    }
}

impl Collective for Nccl {
    fn rank(&self) -> usize {
        self.groups.rank
    }

    fn world_size(&self) -> usize {
        self.groups.world
    }

    fn divide(&mut self, size: usize) -> Result<()> {
        self.groups.size = size;
        let split = |among| {
            let communicator =
                self.all.communicator.split(self.groups.set(among), self.groups.member(among).0)?;
            Member::new(communicator)
        };
        let (group, peers, context) = (split(Among::Group)?, split(Among::Peers)?, self.compute.context());
        let (stream, event) = (new_stream(context)?, new_event(context)?);
        self.divided = Some(Divided { group, peers, stream, event, started: None });
        Ok(())
    }

    fn register(&mut self, memory: Lease) -> Result<bool> {
        let (windows, stream) = (&mut self.windows, &self.stream);
        let result =
            self.all.communicator.call(|library, comm| windows.register(library, comm, stream, memory))?;
        self.check()?;
        result
    }

    fn start_among(&mut self, among: Among, operation: Operation) -> Result<()> {
        let member = self.groups.member(among);
        operation.expect_shards(member);
        let stream = self.stream.cu_stream().cast();
        match operation {
            Operation::AllReduce { buckets, dtype } => {
                let (kind, sum) = (data_type(dtype), ncclRedOp_t::ncclSum);
                let what = ("failed to start an all-reduce", among);
                self.enqueue(what, buckets, |library, comm, elements| {
                    let (data, count) = (address(elements), elements.bytes() / dtype.size());
                    // SAFETY: the lease gives exclusive access to `count` elements of device memory until they are
                    // waited for, which orders the compute stream after this call; in place is allowed; the stream
                    // lives as long as `self`.
                    unsafe { (library.all_reduce)(data, data, count, kind, sum, comm, stream) }
                })
            }
            Operation::ReduceScatter { buckets, dtype } => {
                let what = ("failed to start a reduce-scatter", among);
                let group = self.enqueue_with_event(what, buckets, |library, comm, pair| {
                    // SAFETY: as above.
                    unsafe { reduce_scatter(library, comm, stream, member, pair, dtype) }
                })?;
                self.pending_scatters.push_back(group);
                Ok(())
            }
            Operation::AllGather { buckets } => {
                let what = ("failed to start an all-gather", among);
                let group = self.enqueue_with_event(what, buckets, |library, comm, pair| {
                    // SAFETY: as above.
                    unsafe { all_gather(library, comm, stream, member, pair) }
                })?;
                self.pending_gathers.push_back(group);
                Ok(())
            }
            Operation::Broadcast { elements, root } => {
                let (root, bytes) = (communicator::int(root), ncclDataType_t::ncclUint8);
                let what = ("failed to start a broadcast", Among::All);
                self.enqueue(what, vec![elements], |library, comm, elements| {
                    let (data, count) = (address(elements), elements.bytes());
                    // SAFETY: as in an all-reduce, with bytes as elements.
                    unsafe { (library.broadcast)(data, data, count, bytes, root, comm, stream) }
                })
            }
        }
    }

    fn exchange(&mut self, exchange: Exchange) -> Result<()> {
        self.check()?;
        let member = self.groups.member(Among::Group);
        let divided = self.divided.as_mut().ok_or_else(no_groups)?;
        match exchange {
            // The leases end at once: the compute stream orders all later uses of their memory, also by the comm
            // stream, which waits for it.
            Exchange::Run(operation) => divided.exchange(&self.compute, member, &operation),
            Exchange::Start(operation) => {
                divided.event.record(&self.compute).map_err(order_error)?;
                divided.stream.wait(&divided.event).map_err(order_error)?;
                let started = divided.exchange(&divided.stream, member, &operation);
                divided.started = Some(operation);
                started?;
                divided.event.record(&divided.stream).map_err(order_error)
            }
            Exchange::Finish => {
                self.compute.wait(&divided.event).map_err(order_error)?;
                divided.started = None;
                Ok(())
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
        self.members().try_for_each(|member| member.communicator.check())
    }

    fn abort_handle(&self) -> AbortHandle {
        let communicators: Vec<_> = self.members().map(|member| member.communicator.clone()).collect();
        AbortHandle::new(move || communicators.iter().for_each(|communicator| communicator.abort()))
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
        if let Some(Divided { group, peers, .. }) = &self.divided {
            group.communicator.close(|_, _| Ok(()))?;
            peers.communicator.close(|_, _| Ok(()))?;
        }
        let windows = &mut self.windows;
        self.all.communicator.close(|library, comm| windows.deregister(library, comm))
    }
}

/// Creates a stream whose kernels start before waiting ones of the compute stream.
fn new_stream(context: &Arc<CudaContext>) -> Result<Arc<CudaStream>> {
    let stream = context.new_stream_with_priority(-1);
    stream.map_err(|error| CommError::Cuda { what: "failed to create a stream", reason: error.to_string() })
}

/// Creates an event for ordering streams. As CUDA recommends for that, it has no timing, which makes waits fastest.
fn new_event(context: &Arc<CudaContext>) -> Result<CudaEvent> {
    let event = context.new_event(Some(CUevent_flags::CU_EVENT_DISABLE_TIMING));
    event.map_err(|error| CommError::Cuda { what: "failed to create an event", reason: error.to_string() })
}

fn no_groups() -> CommError {
    let what = "failed to start an operation of a group";
    CommError::Nccl { what, reason: "there are no groups".into() }
}

fn order_error(error: DriverError) -> CommError {
    CommError::Cuda { what: "failed to order streams", reason: error.to_string() }
}
