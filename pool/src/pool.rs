//! The public interface of the pool.

use std::panic::Location;
use std::path::Path;

use bytemuck::Pod;

use crate::backing::host::Host;
use crate::backing::{Backing, Purpose, Segments, VirtualMemory};
use crate::buf::PoolBuf;
use crate::core::{Place, Request, Site};
use crate::debug::HostMemory;
use crate::error::PoolError;
use crate::inner::{Inner, Origin, Source};
use crate::options::{Mode, Options, Space};
use crate::plan::{PlanServer, Planner};
use crate::report::Snapshot;
use crate::stats::Stats;
use crate::stream::StreamId;
use crate::tag;

/// A handle to a pool, which allocates [`PoolBuf`]s. Handles made from one another share the pool; each one has its own
/// stream, [placement](Self::persistent) and [purpose](Self::registered).
///
/// Buffers may outlive all handles.
#[derive(Debug)]
pub struct Pool {
    inner: &'static Inner,
    stream: StreamId,
    place: Place,
    purpose: Purpose,
    /// The plan server. Plans serve only general requests for the first stream, so other handles have no server.
    server: Option<&'static PlanServer>,
}

impl Clone for Pool {
    fn clone(&self) -> Self {
        self.inner.handle_created();
        let Self { inner, stream, place, purpose, server } = *self;
        Self { inner, stream, place, purpose, server }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.inner.handle_dropped();
    }
}

impl Pool {
    /// Creates a pool of host memory. Its buffers hold initialised bytes.
    pub fn host(options: impl Into<Options>) -> Self {
        let options = options.into();
        if options.mode == Mode::Off {
            return Self::from_inner(Inner::off(Space::Host, &options, Box::new(Host)));
        }
        let backing: Box<dyn Backing> = match VirtualMemory::new(Host, host_address_range()) {
            Ok(range) => Box::new(range),
            // The address space of the process is limited, or the machine is small.
            Err(_) => Box::new(Segments::new(Host)),
        };
        Self::with_backing(Space::Host, backing, options)
    }

    /// Creates a pool over a custom back end, such as one for a test. [`Options::debug`] requires that the back end
    /// provides host memory; [`Mode::Off`] is treated as [`Mode::On`].
    pub fn with_backing(space: Space, backing: Box<dyn Backing>, options: impl Into<Options>) -> Self {
        match Inner::new(space, &options.into(), backing, Box::new(HostMemory)) {
            Ok(inner) => Self::from_inner(inner),
            Err(error) => unreachable!("an empty pool is within any limit: {error}"),
        }
    }

    pub(crate) fn from_inner(inner: Inner) -> Self {
        inner.handle_created();
        let server = inner.server();
        Self {
            inner: Box::leak(Box::new(inner)),
            stream: StreamId::default(),
            place: Place::High,
            purpose: Purpose::General,
            server,
        }
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn inner(&self) -> &Inner {
        self.inner
    }

    /// Returns a handle to the same pool for buffers whose first use is work of `stream`.
    #[must_use]
    pub fn on_stream(&self, stream: StreamId) -> Self {
        let mut pool = self.clone();
        pool.stream = stream;
        pool.server = self.server.filter(|_| stream == StreamId::default());
        pool
    }

    /// Returns a handle to the same pool for long-lived buffers such as parameters. They are placed at the low end of
    /// the address range, away from the short-lived ones at the high end, so that neither fragments the other.
    #[must_use]
    pub fn persistent(&self) -> Self {
        let mut pool = self.clone();
        pool.place = Place::Low;
        pool
    }

    /// Returns a handle to the same pool for buffers that are registered with a communication library: each one is in a
    /// [segment](PoolBuf::segment) that is a single physical allocation and accessible to network cards.
    #[must_use]
    pub fn registered(&self) -> Self {
        let mut pool = self.persistent();
        (pool.purpose, pool.server) = (Purpose::Registered, None);
        pool
    }

    /// Returns the kind of memory.
    pub fn space(&self) -> Space {
        self.inner.space
    }

    /// Allocates a buffer of `len` elements. Its contents are unspecified. `len` may be 0.
    ///
    /// # Errors
    /// [`PoolError::OutOfMemory`] with a report, or [`PoolError::TooLarge`]; in debug mode also
    /// [`PoolError::Corrupted`]. The pool stays usable.
    #[track_caller]
    #[inline(always)]
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<PoolBuf<T>, PoolError> {
        let Some(bytes) = len.checked_mul(size_of::<T>()) else {
            return Err(PoolError::TooLarge { requested: u64::MAX });
        };
        let planned = match self.server {
            Some(server) => server.serve_bytes(bytes),
            None => None,
        };
        let (address, origin) = match planned {
            Some((address, slot)) => (address, Origin::Slot(slot)),
            None => self.alloc_unplanned(bytes as u64, Location::caller())?,
        };
        Ok(PoolBuf::new(address, len, origin))
    }

    #[inline(never)]
    fn alloc_unplanned(
        &self,
        bytes: u64,
        location: &'static Location<'static>,
    ) -> Result<(u64, Origin), PoolError> {
        let site = Some(Site { location, tag: tag::current() });
        let Self { stream, place, purpose, .. } = *self;
        self.inner.alloc(&Request { bytes, stream, place, purpose, site })
    }

    /// Begins a step, which ends when the guard is dropped. `key` identifies the kind of step, such as training with
    /// one batch shape.
    ///
    /// In [`Mode::Plan`], once two steps with the same key have made the same requests, a plan serves the following
    /// ones, without a lock and at the same addresses in every step. Only the thread that began the pool's first step
    /// is served. In other modes this has no effect.
    pub fn step(&self, key: u64) -> Step {
        let mut state = self.inner.lock();
        let state = &mut *state;
        let begun = match (&mut state.planner, &mut state.source) {
            (Some(planner), Source::Core(core)) => planner.begin(core, key),
            _ => false,
        };
        let planned = begun && state.planner.as_ref().is_some_and(Planner::is_serving);
        Step { pool: begun.then(|| self.clone()), planned }
    }

    /// Waits until the plans that are being computed on other threads are finished. Without this call, steps are served
    /// without a plan until it is ready.
    pub fn finish_planning(&self) {
        if let Some(planner) = &mut self.inner.lock().planner {
            planner.finish();
        }
    }

    /// Keeps the addresses of planned buffers for the rest of the pool's lifetime, for captured CUDA graphs that
    /// contain them.
    pub fn pin_plans(&self) {
        if let Some(planner) = &mut self.inner.lock().planner {
            planner.pin();
        }
    }

    /// Adds a stream to a pool with a custom back end. For a CUDA pool, see `add_cuda_stream`.
    ///
    /// # Errors
    /// [`PoolError::TooManyStreams`], or [`PoolError::Off`] if the pool is off.
    pub fn add_stream(&self) -> Result<StreamId, PoolError> {
        self.inner.lock().core()?.add_stream().ok_or(PoolError::TooManyStreams)
    }

    /// Records that the program has made all later work of `to` wait for all work submitted to `from` so far. The pool
    /// then need not insert a wait.
    pub fn record_wait(&self, from: StreamId, to: StreamId) {
        if let Ok(core) = self.inner.lock().core() {
            core.record_wait(from, to);
        }
    }

    /// Records that the host has waited for all work submitted to `stream` so far.
    pub fn record_synchronize(&self, stream: StreamId) {
        if let Ok(core) = self.inner.lock().core() {
            core.record_synchronize(stream);
        }
    }

    /// Returns the statistics of the pool. Takes time linear in the number of blocks.
    pub fn stats(&self) -> Stats {
        self.inner.lock().stats()
    }

    /// Resets the peaks of the statistics to the current values.
    pub fn reset_peaks(&self) {
        self.inner.lock().reset_peaks();
    }

    /// Frees all memory that holds no live buffer; returns the number of bytes freed. Synchronises the device.
    ///
    /// # Errors
    /// If a driver call fails.
    pub fn trim(&self) -> Result<u64, PoolError> {
        self.inner.lock().trim()
    }

    /// Sets the limit on the bytes that the pool maps: see [`Options::limit`]. Unused memory above it is freed at once.
    ///
    /// # Errors
    /// [`PoolError::Off`] if the pool is off, or the error of a driver call that failed while memory was freed.
    pub fn set_limit(&self, bytes: u64) -> Result<(), PoolError> {
        self.inner.lock().core()?.set_limit(bytes).map_err(PoolError::without_report)
    }

    /// Counts bytes that other libraries hold on the same device towards the limit, until the guard is dropped.
    ///
    /// # Errors
    /// [`PoolError::TooLarge`] if they exceed the limit even after unused memory was freed; [`PoolError::Off`] if the
    /// pool is off.
    pub fn reserve_external(&self, bytes: u64) -> Result<External, PoolError> {
        self.inner.lock().core()?.add_external(bytes).map_err(PoolError::without_report)?;
        Ok(External { pool: self.clone(), bytes })
    }

    /// Makes requests that fail for lack of memory write a [snapshot](Snapshot::write_memory_viz) into this directory.
    /// The error names the file.
    pub fn snapshot_on_failure(&self, dir: &Path) {
        self.inner.lock().snapshot_dir = Some(dir.to_owned());
    }

    /// Returns all blocks and recent events at one moment.
    pub fn snapshot(&self) -> Snapshot {
        self.inner.lock().snapshot()
    }
}

/// A step in progress: see [`Pool::step`].
#[derive(Debug)]
#[must_use = "the step ends when this is dropped"]
pub struct Step {
    pool: Option<Pool>,
    planned: bool,
}

impl Step {
    /// Returns whether a plan serves this step: equal requests then get the same addresses as in every other planned
    /// step with this key.
    pub fn is_planned(&self) -> bool {
        self.planned
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if let Some(pool) = &self.pool
            && let Some(planner) = &mut pool.inner.lock().planner
        {
            planner.end();
        }
    }
}

/// A reservation of bytes that count towards the limit until it is dropped: see [`Pool::reserve_external`].
#[derive(Debug)]
#[must_use = "the reservation ends when this is dropped"]
pub struct External {
    pool: Pool,
    bytes: u64,
}

impl Drop for External {
    fn drop(&mut self) {
        if let Ok(core) = self.pool.inner.lock().core() {
            core.remove_external(self.bytes);
        }
    }
}

/// Returns the bytes of addresses to reserve on the host: a multiple of its memory, so that growth always finds a
/// contiguous hole.
fn host_address_range() -> u64 {
    const TIMES_MEMORY: u64 = 4;
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit)).saturating_mul(TIMES_MEMORY)
}
