//! What a pool's handles and buffers share: the way of a request and of a return.
//!
//! It is never freed: buffers point to it without a count, which would cost as much as the allocator. What it holds goes
//! when the last handle and the last buffer are gone; a shell of some hundred bytes stays. A program has few pools.
//!
//! ```text
//! request -> plan's book (no lock) -> lock: returns, debug, allocator, recording, trace -> address
//! drop    -> plan's book (no lock) -> lock if it is free, else queue
//! ```

use std::path::PathBuf;
#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicUsize, fence};

#[cfg(feature = "cuda")]
use crate::backing::cuda::Lanes;
use crate::backing::{Backing, SegmentDriver};
use crate::buf::Home;
use crate::core::{Core, Handle, Refusal, Request, StreamId};
use crate::debug::{Bytes, Debug};
use crate::direct::Direct;
use crate::error::{OutOfMemory, PoolError};
use crate::loans::Loans;
use crate::lock::{Guard, Lock};
use crate::plan::Planner;
use crate::plan::serve::Book;
use crate::pool::{Mode, Options, Space};
use crate::report::{Snapshot, by_site};
use crate::returns::Returns;
use crate::stats::Stats;
use crate::trace::{Action, Event, Trace};

/// Sites that the report of a full pool names.
const TOP_SITES: usize = 10;

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) space: Space,
    pub(crate) loans: Loans,
    #[cfg(feature = "cuda")]
    lanes: Option<Arc<Lanes>>,
    book: Option<&'static Book>,
    /// Whether drops wait for the lock, so that they can be told apart.
    debug: bool,
    /// Handles to the pool: the last one closes it.
    handles: AtomicUsize,
    closed: AtomicBool,
    returns: Returns<Handle>,
    state: Lock<State>,
}

/// What the lock guards.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) source: Source,
    pub(crate) planner: Option<Planner>,
    /// Whether planner, trace or debug mode want to see requests.
    watched: bool,
    trace: Option<Trace>,
    debug: Option<Debug>,
    pub(crate) snapshot_dir: Option<PathBuf>,
    deferred: u64,
}

/// Where buffers come from.
#[derive(Debug)]
pub(crate) enum Source {
    Core(Box<Core>),
    /// The pool is off.
    Direct(Box<Direct>),
    /// The pool is closed and its last buffer is gone.
    Gone,
}

impl Inner {
    pub(crate) fn new(
        space: Space,
        options: &Options,
        backing: Box<dyn Backing>,
        bytes: Box<dyn Bytes>,
    ) -> Result<Self, PoolError> {
        let mut core = Core::new(backing);
        core.set_limit(options.limit).map_err(PoolError::without_report)?;
        let mut inner = Self::with(space, options, Source::Core(Box::new(core)));
        let state = inner.state.get_mut();
        state.debug = options.debug.map(|fill| Debug::new(fill, bytes));
        // What is to be seen of every request must not go past the lock.
        if options.mode == Mode::Plan && options.debug.is_none() && options.trace == 0 {
            let book = Book::new(space);
            state.planner = Some(Planner::new(book));
            inner.book = Some(book);
        }
        inner.debug = options.debug.is_some();
        Ok(inner)
    }

    pub(crate) fn off(space: Space, options: &Options, driver: Box<dyn SegmentDriver>) -> Self {
        Self::with(space, options, Source::Direct(Box::new(Direct::new(driver))))
    }

    fn with(space: Space, options: &Options, source: Source) -> Self {
        Self {
            space,
            loans: Loans::default(),
            #[cfg(feature = "cuda")]
            lanes: None,
            book: None,
            debug: false,
            handles: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            returns: Returns::new(),
            state: Lock::new(State {
                source,
                planner: None,
                watched: options.trace > 0 || options.debug.is_some() || options.mode == Mode::Plan,
                trace: (options.trace > 0).then(|| Trace::new(options.trace)),
                debug: None,
                snapshot_dir: None,
                deferred: 0,
            }),
        }
    }

    /// The streams of a CUDA pool.
    #[cfg(feature = "cuda")]
    pub(crate) fn set_lanes(&mut self, lanes: Arc<Lanes>) {
        if let (Some(book), Some((stream, _))) = (self.book, lanes.get(StreamId::default())) {
            // The book is this pool's own and was made with it.
            let _ = book.lane.set(stream.clone());
        }
        self.lanes = Some(lanes);
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn lanes(&self) -> Option<&Arc<Lanes>> {
        self.lanes.as_ref()
    }

    /// The stream that a live block was handed out for.
    #[cfg(feature = "cuda")]
    pub(crate) fn lane_of(&self, handle: Handle) -> Option<&Arc<cudarc::driver::CudaStream>> {
        let block = match &self.lock().source {
            Source::Core(core) => core.block_info(handle)?,
            Source::Direct(_) | Source::Gone => return None,
        };
        self.lane(block.stream)
    }

    /// A stream of a CUDA pool.
    #[cfg(feature = "cuda")]
    pub(crate) fn lane(&self, stream: StreamId) -> Option<&Arc<cudarc::driver::CudaStream>> {
        Some(&self.lanes.as_ref()?.get(stream)?.0)
    }

    /// The state, with everything that was dropped until now taken back.
    pub(crate) fn lock(&self) -> Guard<'_, State> {
        let mut state = self.state.lock();
        if !self.returns.is_empty() {
            for handle in self.returns.take() {
                state.deferred += 1;
                state.put_back(handle);
            }
        }
        state
    }

    /// The plans of this pool, if it makes any.
    pub(crate) fn book(&self) -> Option<&'static Book> {
        self.book
    }

    /// Memory for a request: its address and where it goes afterwards.
    pub(crate) fn take(&'static self, request: &Request) -> Result<(u64, Home), PoolError> {
        let mut state = self.lock();
        let state = &mut *state;
        match &mut state.source {
            Source::Core(core) => {
                if let Some(debug) = &mut state.debug {
                    debug.settle(core)?;
                }
                let (handle, address) = match core.alloc_at(request) {
                    Ok(block) => block,
                    Err(refusal) => state.last_resort(request, refusal)?,
                };
                if state.watched {
                    state.handed_out(request, handle, address)?;
                }
                Ok((address, Home::Block { inner: self, handle }))
            }
            Source::Gone => Err(PoolError::Off),
            Source::Direct(direct) => {
                let address = direct.alloc(request.bytes)?;
                Ok((address, Home::Driver { inner: self, bytes: request.bytes }))
            }
        }
    }

    /// Takes a block back from a dropped buffer. No driver call, and no waiting (but in debug mode, and for others that
    /// drop the last buffers of a closed pool).
    #[inline]
    pub(crate) fn put_back(&self, handle: Handle) {
        let wait = self.debug || self.closed.load(Relaxed);
        match if wait { Some(self.state.lock()) } else { self.state.try_lock() } {
            Some(mut state) => state.put_back(handle),
            None => {
                self.returns.push(handle);
                // Between the push and the look below, as between the mark and the look at what was pushed in `dropped`:
                // one of the two sees the other.
                fence(SeqCst);
            }
        }
        if self.closed.load(Relaxed) {
            self.give_up();
        }
    }

    /// Takes memory back that came from the driver. It waits for the lock: the driver is called under it anyway.
    pub(crate) fn put_back_direct(&self, address: u64, bytes: u64) {
        if let Source::Direct(direct) = &mut self.state.lock().source {
            direct.free(address, bytes);
        }
        if self.closed.load(Relaxed) {
            self.give_up();
        }
    }

    /// One more handle.
    pub(crate) fn opened(&self) {
        self.handles.fetch_add(1, Relaxed);
    }

    /// One handle less; the last one closes the pool.
    pub(crate) fn dropped(&self) {
        if self.handles.fetch_sub(1, AcqRel) == 1 {
            self.closed.store(true, Relaxed);
            fence(SeqCst);
            self.give_up();
        }
    }

    /// Of a closed pool, when its last buffer is gone: host memory goes back to the host. Device memory is left to the end
    /// of its context, as a drop never calls CUDA; and all is left as it is while a planned buffer may be in use.
    #[cold]
    fn give_up(&self) {
        let in_use = self.book.is_some_and(|book| if book.own() { !book.idle() } else { book.in_use() });
        let mut state = self.lock();
        if self.space != Space::Host || in_use {
            return;
        }
        let State { source, planner, .. } = &mut *state;
        // Nothing of this can fail on the host but unmapping, after which nothing can be done about it.
        let empty = match source {
            Source::Core(core) => {
                if let Some(planner) = planner {
                    planner.end();
                    planner.unpin();
                    planner.give_region_back(core);
                }
                core.books().buffers.current() == 0 && core.trim().is_ok()
            }
            Source::Direct(direct) => direct.release().is_ok() && direct.books.buffers.current() == 0,
            Source::Gone => false,
        };
        if empty {
            *source = Source::Gone;
        }
    }

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
        // A buffer's handle is live as long as the buffer.
        let _ = core.record_use(handle, stream);
        Ok(())
    }

    pub(crate) fn segment_of(&self, handle: Handle) -> Option<(u64, u64)> {
        match &self.lock().source {
            Source::Core(core) => core.segment_of(handle),
            Source::Direct(_) | Source::Gone => None,
        }
    }
}

impl State {
    /// The allocator, unless the pool is off.
    pub(crate) fn core(&mut self) -> Result<&mut Core, PoolError> {
        match &mut self.source {
            Source::Core(core) => Ok(core),
            Source::Direct(_) | Source::Gone => Err(PoolError::Off),
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut stats = match &self.source {
            Source::Gone => Stats::default(),
            Source::Direct(direct) => Stats::of(&direct.books),
            Source::Core(core) => Stats {
                free: core.books().mapped.current() - core.books().live.current(),
                largest_free: core.largest_free(),
                held_back: core.held_back(),
                ..Stats::of(core.books())
            },
        };
        if let Some(planner) = &self.planner {
            planner.count(&mut stats);
        }
        stats.deferred_frees = self.deferred;
        stats
    }

    pub(crate) fn reset_peaks(&mut self) {
        match &mut self.source {
            Source::Core(core) => core.reset_peaks(),
            Source::Direct(direct) => direct.books.reset_peaks(),
            Source::Gone => {}
        }
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let segments = match &self.source {
            Source::Core(core) => core.survey(),
            Source::Direct(_) | Source::Gone => Vec::new(),
        };
        let events = self.trace.as_ref().map(Trace::events).unwrap_or_default();
        Snapshot { device: 0, segments, events, stats: self.stats() }
    }

    /// Notes a block that the allocator handed out.
    fn handed_out(&mut self, request: &Request, handle: Handle, address: u64) -> Result<(), PoolError> {
        let Self { source: Source::Core(core), planner, trace, debug, .. } = self else {
            unreachable!("the allocator handed it out")
        };
        if let Some(planner) = planner {
            planner.note(core, request, handle);
        }
        if let Some(trace) = trace
            && let Some(block) = core.block_info(handle)
        {
            trace.add(event(core, Action::Alloc, request, address, block.bytes));
        }
        if let Some(debug) = debug
            && let Some(block) = core.block_info(handle)
            && let Err(error) = debug.hand_out(core, block)
        {
            let _ = core.free(handle);
            return Err(error);
        }
        Ok(())
    }

    fn put_back(&mut self, handle: Handle) {
        let Self { source: Source::Core(core), planner, trace, debug, watched, .. } = self else { return };
        let block = if *watched { core.block_info(handle) } else { None };
        if *watched
            && let Some(recording) = planner.as_mut().and_then(Planner::recording)
            && let Some(ordinal) = core.ordinal(handle)
        {
            recording.free(ordinal);
        }
        if let (Some(debug), Some(block)) = (debug, block) {
            debug.dropped(block);
        }
        // A buffer gives its handle back once.
        let _ = core.free(handle);
        if let (Some(trace), Some(block)) = (trace, block) {
            let request = Request { stream: block.stream, site: block.site, ..Request::new(0) };
            trace.add(event(core, Action::Free, &request, block.address, block.bytes));
        }
    }

    /// The plans' region goes before a request is refused; then the report.
    #[cold]
    fn last_resort(&mut self, request: &Request, refusal: Refusal) -> Result<(Handle, u64), PoolError> {
        let Self { source: Source::Core(core), planner, .. } = self else { return Err(PoolError::Off) };
        if let Refusal::TooLarge { bytes } = refusal {
            return Err(PoolError::TooLarge { requested: bytes });
        }
        if planner.as_mut().is_some_and(|planner| planner.give_region_back(core))
            && let Ok(block) = core.alloc_at(request)
        {
            return Ok(block);
        }
        if let Some(trace) = &mut self.trace {
            trace.add(event(core, Action::OutOfMemory, request, 0, request.bytes));
        }
        let mut report = report(core, request, refusal);
        if let Some(dir) = &self.snapshot_dir {
            let path = dir.join(format!("out-of-memory-{}.pickle", std::process::id()));
            // The report matters more than why a snapshot could not be written.
            report.snapshot = self.snapshot().write_memory_viz(&path).ok().map(|()| path);
        }
        Err(PoolError::OutOfMemory(Box::new(report)))
    }
}

fn event(core: &Core, action: Action, request: &Request, address: u64, bytes: u64) -> Event {
    let books = core.books();
    Event {
        action,
        micros: 0,
        address,
        bytes,
        stream: request.stream,
        site: request.site,
        live: books.live.current(),
        mapped: books.mapped.current(),
    }
}

fn report(core: &Core, request: &Request, refusal: Refusal) -> OutOfMemory {
    let sites = by_site(&core.survey()).into_iter().take(TOP_SITES);
    let books = core.books();
    OutOfMemory {
        requested: request.bytes,
        stream: request.stream,
        site: request.site,
        refusal,
        live: books.live.current(),
        mapped: books.mapped.current(),
        external: core.external(),
        limit: (core.limit() != u64::MAX).then(|| core.limit()),
        device: core.device_memory(),
        largest_free: core.largest_free(),
        pending: core.pending(request.stream),
        top: sites.map(|(site, bytes, buffers)| (bytes, buffers, site)).collect(),
        snapshot: None,
    }
}
