//! State shared by the handles and buffers of one pool, and the paths of requests and frees.
//!
//! ```text
//! request -> plan server (no lock) -> lock: deferred frees, debug, allocator, recording, trace -> address
//! drop    -> plan server (no lock) -> lock if it is free, otherwise deferred
//! ```
//! [`Inner`] is never freed: buffers refer to it without a reference count, which would cost as much as the allocator.
//! When the last handle and the last buffer are dropped, the pool's memory is freed, and a few hundred bytes of state
//! remain. Programs create few pools.

mod origin;
mod state;

pub(crate) use origin::Origin;
pub(crate) use state::{Source, State};

#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicUsize, fence};

#[cfg(feature = "cuda")]
use cudarc::driver::CudaStream;

#[cfg(feature = "cuda")]
use crate::backing::cuda::StreamTable;
use crate::backing::{Backing, SegmentDriver};
use crate::core::{Core, Handle, Request};
use crate::debug::{DebugMode, MemoryAccess};
use crate::deferred::DeferredFrees;
use crate::direct::DirectAllocator;
use crate::error::PoolError;
use crate::leases::Leases;
use crate::lock::{Guard, SpinLock};
use crate::options::{Mode, Options, Space};
use crate::plan::{PlanServer, Planner};
use crate::stream::StreamId;

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) space: Space,
    pub(crate) leases: Leases,
    #[cfg(feature = "cuda")]
    streams: Option<Arc<StreamTable>>,
    server: Option<&'static PlanServer>,
    /// True if drops wait for the lock: debug mode records where each buffer was dropped.
    debug: bool,
    /// Number of [`Pool`](crate::Pool) handles; the pool is closed with the last one.
    handles: AtomicUsize,
    closed: AtomicBool,
    deferred: DeferredFrees<Handle>,
    state: SpinLock<State>,
}

impl Inner {
    /// Creates a pool with an allocator.
    pub(crate) fn new(
        space: Space,
        options: &Options,
        backing: Box<dyn Backing>,
        memory: Box<dyn MemoryAccess>,
    ) -> Result<Self, PoolError> {
        let mut core = Core::new(backing);
        core.set_limit(options.limit).map_err(PoolError::without_report)?;
        let mut inner = Self::with_source(space, options, Source::Core(Box::new(core)));
        let state = inner.state.get_mut();
        state.debug = options.debug.map(|fill| DebugMode::new(fill, memory));
        // Plans bypass the lock, but debug mode and the trace must see every request under the lock.
        if options.mode == Mode::Plan && options.debug.is_none() && options.trace == 0 {
            let server = PlanServer::new(space);
            state.planner = Some(Planner::new(server));
            inner.server = Some(server);
        }
        inner.debug = options.debug.is_some();
        Ok(inner)
    }

    /// Creates a pool that is off.
    pub(crate) fn off(space: Space, options: &Options, driver: Box<dyn SegmentDriver>) -> Self {
        Self::with_source(space, options, Source::Direct(Box::new(DirectAllocator::new(driver))))
    }

    fn with_source(space: Space, options: &Options, source: Source) -> Self {
        Self {
            space,
            leases: Leases::default(),
            #[cfg(feature = "cuda")]
            streams: None,
            server: None,
            debug: false,
            handles: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            deferred: DeferredFrees::new(),
            state: SpinLock::new(State::new(source, options)),
        }
    }

    /// Sets the streams of a CUDA pool, before the pool is shared.
    #[cfg(feature = "cuda")]
    pub(crate) fn set_streams(&mut self, streams: Arc<StreamTable>) {
        if let (Some(server), Some(stream)) = (self.server, streams.get(StreamId::default())) {
            // The server was created with this pool, so the stream is not set yet.
            let _ = server.stream.set(stream.clone());
        }
        self.streams = Some(streams);
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn streams(&self) -> Option<&Arc<StreamTable>> {
        self.streams.as_ref()
    }

    /// Returns the CUDA stream for which a live block was allocated.
    #[cfg(feature = "cuda")]
    pub(crate) fn stream_of(&self, handle: Handle) -> Option<&Arc<CudaStream>> {
        let block = match &self.lock().source {
            Source::Core(core) => core.block_info(handle)?,
            Source::Direct(_) | Source::Closed => return None,
        };
        self.stream(block.stream)
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn stream(&self, stream: StreamId) -> Option<&Arc<CudaStream>> {
        self.streams.as_ref()?.get(stream)
    }

    /// Locks the state and completes deferred frees.
    pub(crate) fn lock(&self) -> Guard<'_, State> {
        let mut state = self.state.lock();
        if !self.deferred.is_empty() {
            for handle in self.deferred.take() {
                state.deferred_frees += 1;
                state.free_block(handle);
            }
        }
        state
    }

    /// Returns the plan server, if the pool makes plans.
    pub(crate) fn server(&self) -> Option<&'static PlanServer> {
        self.server
    }

    /// Allocates memory. Returns its address, and its origin for the free.
    pub(crate) fn alloc(&'static self, request: &Request) -> Result<(u64, Origin), PoolError> {
        let mut state = self.lock();
        let state = &mut *state;
        match &mut state.source {
            Source::Core(core) => {
                if let Some(debug) = &mut state.debug {
                    debug.before_alloc(core)?;
                }
                let (handle, address) = match core.alloc_at(request) {
                    Ok(block) => block,
                    Err(error) => state.last_resort(request, error)?,
                };
                if state.watched {
                    state.allocated(request, handle, address)?;
                }
                Ok((address, Origin::Block { inner: self, handle }))
            }
            Source::Closed => Err(PoolError::Off),
            Source::Direct(direct) => {
                let address = direct.alloc(request.bytes)?;
                Ok((address, Origin::Driver { inner: self, bytes: request.bytes }))
            }
        }
    }

    /// Frees the block of a dropped buffer, without a driver call and without waiting. Exceptions that wait for the
    /// lock: debug mode, and the last buffers of a closed pool.
    #[inline]
    pub(crate) fn free_block(&self, handle: Handle) {
        let wait = self.debug || self.closed.load(Relaxed);
        match if wait { Some(self.state.lock()) } else { self.state.try_lock() } {
            Some(mut state) => state.free_block(handle),
            None => {
                self.deferred.push(handle);
                // Store-load order, paired with the fence in `handle_dropped`: either this thread sees that the pool is
                // closed, or the thread that closes it sees the deferred free.
                fence(SeqCst);
            }
        }
        if self.closed.load(Relaxed) {
            self.release_if_unused();
        }
    }

    /// Frees a driver allocation. Waits for the lock, under which the driver is called anyway.
    pub(crate) fn free_direct(&self, address: u64, bytes: u64) {
        if let Source::Direct(direct) = &mut self.state.lock().source {
            direct.free(address, bytes);
        }
        if self.closed.load(Relaxed) {
            self.release_if_unused();
        }
    }

    pub(crate) fn handle_created(&self) {
        self.handles.fetch_add(1, Relaxed);
    }

    /// Closes the pool when its last handle is dropped.
    pub(crate) fn handle_dropped(&self) {
        if self.handles.fetch_sub(1, AcqRel) == 1 {
            self.closed.store(true, Release);
            fence(SeqCst);
            self.release_if_unused();
        }
    }

    /// Frees the host memory of a closed pool whose last buffer is gone. Device memory is freed at the end of its
    /// context, because a drop never calls CUDA. Nothing is freed while a planned buffer may be in use.
    #[cold]
    fn release_if_unused(&self) {
        // Paired with the store of `closed`, which the caller has read: the end of the last step is visible here.
        fence(Acquire);
        let in_use = self
            .server
            .is_some_and(|server| if server.is_owner() { !server.is_idle() } else { server.may_be_in_use() });
        let mut state = self.lock();
        if self.space == Space::Host && !in_use {
            state.release_if_unused();
        }
    }

    /// See [`PoolBuf::record_use`](crate::PoolBuf::record_use).
    pub(crate) fn record_use(&self, handle: Handle, stream: StreamId) -> Result<(), PoolError> {
        let mut state = self.lock();
        let State { source: Source::Core(core), planner, .. } = &mut *state else {
            return Err(PoolError::Off);
        };
        if let Some(ordinal) = core.ordinal(handle)
            && let Some(recording) = planner.as_mut().and_then(Planner::recording)
        {
            recording.share(ordinal);
        }
        // The handle of a buffer is live as long as the buffer is.
        let _ = core.record_use(handle, stream);
        Ok(())
    }

    pub(crate) fn segment_of(&self, handle: Handle) -> Option<(u64, u64)> {
        match &self.lock().source {
            Source::Core(core) => core.segment_of(handle),
            Source::Direct(_) | Source::Closed => None,
        }
    }
}
