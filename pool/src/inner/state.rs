//! The part of a pool that is protected by its lock.

use std::path::PathBuf;

use crate::core::{AllocError, Core, Handle, Request};
use crate::debug::DebugMode;
use crate::direct::DirectAllocator;
use crate::error::{OutOfMemory, PoolError};
use crate::options::{Mode, Options};
use crate::plan::Planner;
use crate::report::{Snapshot, by_site};
use crate::stats::Stats;
use crate::trace::{Action, Event, EventRing};

/// Number of sites in the report of a failed request.
const REPORTED_SITES: usize = 10;

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) source: Source,
    pub(crate) planner: Option<Planner>,
    /// True if the planner, the trace or debug mode observes requests.
    pub(super) watched: bool,
    trace: Option<EventRing>,
    pub(super) debug: Option<DebugMode>,
    pub(crate) snapshot_dir: Option<PathBuf>,
    pub(super) deferred_frees: u64,
}

/// Source of buffers.
#[derive(Debug)]
pub(crate) enum Source {
    Core(Box<Core>),
    /// The pool is off.
    Direct(Box<DirectAllocator>),
    /// The pool is closed and its memory is freed.
    Closed,
}

impl State {
    pub(super) fn new(source: Source, options: &Options) -> Self {
        Self {
            source,
            planner: None,
            watched: options.trace > 0 || options.debug.is_some() || options.mode == Mode::Plan,
            trace: (options.trace > 0).then(|| EventRing::new(options.trace)),
            debug: None,
            snapshot_dir: None,
            deferred_frees: 0,
        }
    }

    /// Returns the allocator, unless the pool is off.
    pub(crate) fn core(&mut self) -> Result<&mut Core, PoolError> {
        match &mut self.source {
            Source::Core(core) => Ok(core),
            Source::Direct(_) | Source::Closed => Err(PoolError::Off),
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut stats = match &self.source {
            Source::Closed => Stats::default(),
            Source::Direct(direct) => Stats::of(&direct.counters),
            Source::Core(core) => Stats {
                free: core.counters().mapped.current() - core.counters().live.current(),
                largest_free: core.largest_free(),
                inactive_split: core.inactive_split(),
                ..Stats::of(core.counters())
            },
        };
        if let Some(planner) = &self.planner {
            planner.fill_stats(&mut stats);
        }
        stats.deferred_frees = self.deferred_frees;
        stats
    }

    pub(crate) fn reset_peaks(&mut self) {
        match &mut self.source {
            Source::Core(core) => core.reset_peaks(),
            Source::Direct(direct) => direct.counters.reset_peaks(),
            Source::Closed => {}
        }
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let segments = match &self.source {
            Source::Core(core) => core.heap_walk(),
            Source::Direct(_) | Source::Closed => Vec::new(),
        };
        let events = self.trace.as_ref().map(EventRing::events).unwrap_or_default();
        Snapshot { device: 0, segments, events, stats: self.stats() }
    }

    /// See [`Pool::trim`](crate::Pool::trim).
    pub(crate) fn trim(&mut self) -> Result<u64, PoolError> {
        match &mut self.source {
            Source::Core(core) => {
                if let Some(planner) = &mut self.planner {
                    planner.release_region(core);
                }
                core.trim().map_err(PoolError::without_report)
            }
            Source::Direct(direct) => Ok(direct.release()?),
            Source::Closed => Ok(0),
        }
    }

    /// Frees all memory of a closed pool if no buffer is live.
    pub(super) fn release_if_unused(&mut self) {
        // On the host only unmapping can fail, and that cannot be handled.
        let empty = match &mut self.source {
            Source::Core(core) => {
                if let Some(planner) = &mut self.planner {
                    planner.end();
                    planner.unpin();
                    planner.release_region(core);
                }
                core.counters().buffers.current() == 0 && core.trim().is_ok()
            }
            Source::Direct(direct) => direct.release().is_ok() && direct.counters.buffers.current() == 0,
            Source::Closed => false,
        };
        if empty {
            self.source = Source::Closed;
        }
    }

    /// Lets the planner, the trace and debug mode observe an allocated block.
    pub(super) fn allocated(
        &mut self,
        request: &Request,
        handle: Handle,
        address: u64,
    ) -> Result<(), PoolError> {
        let Self { source: Source::Core(core), planner, trace, debug, .. } = self else {
            unreachable!("the allocator returned the handle")
        };
        if let Some(planner) = planner {
            planner.record_alloc(core, request, handle);
        }
        if let Some(trace) = trace
            && let Some(block) = core.block_info(handle)
        {
            trace.add(event(core, Action::Alloc, request, address, block.bytes));
        }
        if let Some(debug) = debug
            && let Some(block) = core.block_info(handle)
            && let Err(error) = debug.after_alloc(core, block)
        {
            let _ = core.free(handle);
            return Err(error);
        }
        Ok(())
    }

    pub(super) fn free_block(&mut self, handle: Handle) {
        let Self { source: Source::Core(core), planner, trace, debug, watched, .. } = self else { return };
        let block = if *watched { core.block_info(handle) } else { None };
        if *watched
            && let Some(recording) = planner.as_mut().and_then(Planner::recording)
            && let Some(ordinal) = core.ordinal(handle)
        {
            recording.free(ordinal);
        }
        if let (Some(debug), Some(block)) = (debug, block) {
            debug.note_drop(block);
        }
        // The handle cannot be stale: a buffer frees its handle once.
        let _ = core.free(handle);
        if let (Some(trace), Some(block)) = (trace, block) {
            let request = Request { stream: block.stream, site: block.site, ..Request::new(0) };
            trace.add(event(core, Action::Free, &request, block.address, block.bytes));
        }
    }

    /// Last attempt before a request fails: frees the plan region and tries again, then writes the report.
    #[cold]
    pub(super) fn last_resort(
        &mut self,
        request: &Request,
        error: AllocError,
    ) -> Result<(Handle, u64), PoolError> {
        let Self { source: Source::Core(core), planner, .. } = self else { return Err(PoolError::Off) };
        if let AllocError::TooLarge { bytes } = error {
            return Err(PoolError::TooLarge { requested: bytes });
        }
        if planner.as_mut().is_some_and(|planner| planner.release_region(core))
            && let Ok(block) = core.alloc_at(request)
        {
            return Ok(block);
        }
        if let Some(trace) = &mut self.trace {
            trace.add(event(core, Action::OutOfMemory, request, 0, request.bytes));
        }
        let mut report = report(core, request, error);
        if let Some(dir) = &self.snapshot_dir {
            let path = dir.join(format!("out-of-memory-{}.pickle", std::process::id()));
            // The report must not fail because its snapshot could not be written.
            report.snapshot = self.snapshot().write_memory_viz(&path).ok().map(|()| path);
        }
        Err(PoolError::OutOfMemory(Box::new(report)))
    }
}

fn event(core: &Core, action: Action, request: &Request, address: u64, bytes: u64) -> Event {
    let counters = core.counters();
    Event {
        action,
        // The ring fills this in.
        micros: 0,
        address,
        bytes,
        stream: request.stream,
        site: request.site,
        live: counters.live.current(),
        mapped: counters.mapped.current(),
    }
}

fn report(core: &Core, request: &Request, cause: AllocError) -> OutOfMemory {
    let sites = by_site(&core.heap_walk()).into_iter().take(REPORTED_SITES);
    let counters = core.counters();
    OutOfMemory {
        requested: request.bytes,
        stream: request.stream,
        site: request.site,
        cause,
        live: counters.live.current(),
        mapped: counters.mapped.current(),
        external: core.external(),
        limit: (core.limit() != u64::MAX).then(|| core.limit()),
        device: core.device_memory(),
        largest_free: core.largest_free(),
        pending: core.pending(request.stream),
        top: sites.map(|(site, bytes, buffers)| (bytes, buffers, site)).collect(),
        snapshot: None,
    }
}
