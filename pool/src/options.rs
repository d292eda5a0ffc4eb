//! Options for creating a pool: the kind of its memory, and how requests are served.

/// The kind of memory that a pool hands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Memory of this process.
    Host,
    /// Device memory, addressable by the kernels of one CUDA context.
    Cuda,
    /// Page-locked memory of this process, which the device copies at full speed.
    Pinned,
}

/// Mode of serving requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Requests are served from memory that the pool keeps.
    On,
    /// Same as [`On`](Self::On), but repeated steps are served from a plan: see [`Pool::step`](crate::Pool::step).
    Plan,
    /// Every buffer is a driver allocation, freed by the driver at the next request. For comparison.
    Off,
}

/// Options of a new pool. A [`Mode`] converts into the default options with that mode.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Mode of serving requests. Default: [`Mode::On`].
    pub mode: Mode,
    /// Maximum number of bytes that the pool may map, including bytes reserved by [`Pool::reserve_external`]. Default:
    /// `u64::MAX`, no limit. Ignored in [`Mode::Off`].
    ///
    /// [`Pool::reserve_external`]: crate::Pool::reserve_external
    pub limit: u64,
    /// Debug mode: new buffers are filled with this byte; writes to freed memory or past the end of a buffer are
    /// detected at a later request. Synchronises the device at every request and disables plans. Default: off.
    pub debug: Option<u8>,
    /// Number of recent events kept for [`Snapshot::events`](crate::Snapshot::events); above zero, plans are disabled.
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
