//! The pool as programs see it.

use std::panic::Location;
use std::path::Path;

use bytemuck::Pod;

use crate::backing::host::Host;
use crate::backing::{Backing, Purpose, Segments, Virtual};
use crate::buf::{Home, PoolBuf};
use crate::core::{Place, Request, Site, StreamId};
use crate::debug::HostBytes;
use crate::error::PoolError;
use crate::inner::{Inner, Source};
use crate::plan::Planner;
use crate::plan::serve::Book;
use crate::report::Snapshot;
use crate::stats::Stats;
use crate::tag;

/// Where a pool's memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Addressable by this process.
    Host,
    /// Addressable by kernels of one CUDA context.
    Cuda,
    /// Page-locked and addressable by this process.
    Pinned,
}

/// How requests are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// From memory that is kept.
    On,
    /// As `On`; and steps that repeat themselves from a plan, see [`Pool::step`].
    Plan,
    /// Every buffer is a driver allocation, and is given back to the driver at the next request: for comparison.
    Off,
}

/// How a pool is made. [`Mode`] converts into the options with that mode alone.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How requests are served.
    pub mode: Mode,
    /// Most bytes to hold of the device, registered outside bytes included.
    pub limit: u64,
    /// Debug mode, with the byte that new buffers are filled with; it waits for the device at every request, and makes no
    /// plans.
    pub debug: Option<u8>,
    /// Events kept for snapshots; with any, no plans are made.
    pub trace: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { mode: Mode::On, limit: u64::MAX, debug: None, trace: 0 }
    }
}

impl From<Mode> for Options {
    fn from(mode: Mode) -> Self {
        Self { mode, ..Self::default() }
    }
}

/// Hands out [`PoolBuf`]s. Clones share one pool; each handle says what its requests are for.
#[derive(Debug)]
pub struct Pool {
    inner: &'static Inner,
    stream: StreamId,
    place: Place,
    purpose: Purpose,
    /// The plans that may serve: none but general requests on the first stream.
    book: Option<&'static Book>,
}

impl Clone for Pool {
    fn clone(&self) -> Self {
        self.inner.opened();
        let Self { inner, stream, place, purpose, book } = *self;
        Self { inner, stream, place, purpose, book }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.inner.dropped();
    }
}

impl Pool {
    /// A pool of host memory.
    pub fn host(options: impl Into<Options>) -> Self {
        let options = options.into();
        if options.mode == Mode::Off {
            return Self::of(Inner::off(Space::Host, &options, Box::new(Host)));
        }
        let backing: Box<dyn Backing> = match Virtual::new(Host, host_range()) {
            Ok(range) => Box::new(range),
            // The process may not have that many addresses: a limit on them, a small machine.
            Err(_) => Box::new(Segments::new(Host)),
        };
        Self::with_backing(Space::Host, backing, options)
    }

    /// A pool of whatever memory there is behind `backing`. In debug mode it must be host memory.
    pub fn with_backing(space: Space, backing: Box<dyn Backing>, options: impl Into<Options>) -> Self {
        match Inner::new(space, &options.into(), backing, Box::new(HostBytes)) {
            Ok(inner) => Self::of(inner),
            Err(error) => unreachable!("an empty pool is within any limit: {error}"),
        }
    }

    pub(crate) fn of(inner: Inner) -> Self {
        inner.opened();
        let book = inner.book();
        Self {
            inner: Box::leak(Box::new(inner)),
            stream: StreamId::default(),
            place: Place::High,
            purpose: Purpose::General,
            book,
        }
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn inner(&self) -> &Inner {
        self.inner
    }

    /// The same pool, for work of this stream.
    #[must_use]
    pub fn on_stream(&self, stream: StreamId) -> Self {
        let mut pool = self.clone();
        pool.stream = stream;
        pool.book = self.book.filter(|_| stream == StreamId::default());
        pool
    }

    /// The same pool, for buffers that stay: they lie at the low end, away from those that come and go.
    #[must_use]
    pub fn persistent(&self) -> Self {
        let mut pool = self.clone();
        pool.place = Place::Low;
        pool
    }

    /// The same pool, for buffers in segments of their own that a communication library can register:
    /// [`PoolBuf::segment`].
    #[must_use]
    pub fn registered(&self) -> Self {
        let mut pool = self.persistent();
        (pool.purpose, pool.book) = (Purpose::Registered, None);
        pool
    }

    /// Where the memory lies.
    pub fn space(&self) -> Space {
        self.inner.space
    }

    /// A buffer of `len` elements with unspecified contents. An empty buffer is valid.
    ///
    /// # Errors
    /// No memory, or no address range that long; the pool stays usable.
    #[track_caller]
    #[inline(always)]
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<PoolBuf<T>, PoolError> {
        let Some(bytes) = len.checked_mul(size_of::<T>()) else {
            return Err(PoolError::TooLarge { requested: u64::MAX });
        };
        let planned = match self.book {
            Some(book) => book.serve_bytes(bytes),
            None => None,
        };
        let (address, home) = match planned {
            Some((address, ticket)) => (address, Home::Slot(ticket)),
            None => self.take(bytes as u64, Location::caller())?,
        };
        Ok(PoolBuf::new(address, len, home))
    }

    #[inline(never)]
    fn take(&self, bytes: u64, location: &'static Location<'static>) -> Result<(u64, Home), PoolError> {
        let site = Some(Site { location, tag: tag::current() });
        let Self { stream, place, purpose, .. } = *self;
        self.inner.take(&Request { bytes, stream, place, purpose, site })
    }

    /// Begins a step of this kind (its key: a batch shape, training or evaluation) until the guard is dropped. In
    /// [`Mode::Plan`], once two steps of a kind were equal, the next ones are served from a plan, on the thread that began
    /// the pool's first step. In other modes nothing happens.
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

    /// Waits until plans in the making are made.
    pub fn finish_planning(&self) {
        if let Some(planner) = &mut self.inner.lock().planner {
            planner.finish();
        }
    }

    /// From now on the addresses of planned buffers stay what they are, for captured graphs that hold them.
    pub fn pin_plans(&self) {
        if let Some(planner) = &mut self.inner.lock().planner {
            planner.pin();
        }
    }

    /// One more stream of a pool that is not CUDA's.
    pub fn add_stream(&self) -> Result<StreamId, PoolError> {
        self.inner.lock().core()?.add_stream().ok_or(PoolError::TooManyStreams)
    }

    /// All further work of `to` was made to wait for all work of `from` so far.
    pub fn joined(&self, from: StreamId, to: StreamId) {
        if let Ok(core) = self.inner.lock().core() {
            core.joined(from, to);
        }
    }

    /// The host has waited for all work of `stream` so far.
    pub fn host_waited(&self, stream: StreamId) {
        if let Ok(core) = self.inner.lock().core() {
            core.host_waited(stream);
        }
    }

    /// Counts so far.
    pub fn stats(&self) -> Stats {
        self.inner.lock().stats()
    }

    /// Forgets the peaks before now.
    pub fn reset_peaks(&self) {
        self.inner.lock().reset_peaks();
    }

    /// Gives all memory that no buffer lies in back to the driver; returns the bytes given back. It waits for the device.
    pub fn trim(&self) -> Result<u64, PoolError> {
        let mut state = self.inner.lock();
        let state = &mut *state;
        match &mut state.source {
            Source::Core(core) => {
                if let Some(planner) = &mut state.planner {
                    planner.give_region_back(core);
                }
                core.trim().map_err(PoolError::without_report)
            }
            Source::Direct(direct) => Ok(direct.release()?),
            Source::Gone => Ok(0),
        }
    }

    /// Sets the limit on all bytes held; free memory above it is given back at once.
    pub fn set_limit(&self, bytes: u64) -> Result<(), PoolError> {
        self.inner.lock().core()?.set_limit(bytes).map_err(PoolError::without_report)
    }

    /// Counts bytes that others hold of the same device against the limit, until the guard is dropped.
    ///
    /// # Errors
    /// [`PoolError::TooLarge`] if they do not fit under the limit even after giving unused memory back.
    pub fn external(&self, bytes: u64) -> Result<External, PoolError> {
        self.inner.lock().core()?.add_external(bytes).map_err(PoolError::without_report)?;
        Ok(External { pool: self.clone(), bytes })
    }

    /// Where a snapshot is written when memory runs out.
    pub fn snapshot_on_failure(&self, dir: &Path) {
        self.inner.lock().snapshot_dir = Some(dir.to_owned());
    }

    /// All blocks and the events kept, as of one moment.
    pub fn snapshot(&self) -> Snapshot {
        self.inner.lock().snapshot()
    }
}

/// A step in progress.
#[derive(Debug)]
#[must_use = "the step ends when this is dropped"]
pub struct Step {
    pool: Option<Pool>,
    planned: bool,
}

impl Step {
    /// Whether this step is served from a plan: the same requests get the same addresses as in every other step of its kind
    /// that is.
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

/// Bytes of the device that others hold.
#[derive(Debug)]
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

/// Addresses to reserve on the host: several times its memory, so that growth always finds room in one piece.
fn host_range() -> u64 {
    const SHARE: u64 = 4;
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit)).saturating_mul(SHARE)
}
