//! A device memory pool for programs that allocate in a rhythm, such as trainers.
//!
//! `cudaMalloc` and `cudaFree` cost tens of microseconds, synchronise the device and serialise the threads of a context.
//! [`Pool`] asks the driver rarely and keeps what is freed:
//!
//! - requests are served from one growable range of addresses by two-level segregated fit, in multiples of 512 bytes,
//!   and what is freed is merged with its neighbours at once: memory mapped stays within a few percent of memory live;
//! - [`PoolBuf::len`] is what was asked for; bytes beyond it are never read. Contents are unspecified: zeroing is the
//!   caller's, explicit;
//! - a freed buffer's memory goes to work of the same stream at once, and to that of another stream when it is known to
//!   come later; where nothing else fits, that other stream is made to wait, once. Work of a second stream on a buffer is
//!   told by [`PoolBuf::record_use`], or holds a [`Loan`];
//! - steps that repeat themselves are served from a plan ([`Mode::Plan`], [`Pool::step`]), without a lock, at the same
//!   addresses every time;
//! - a limit on all bytes held is exact. Memory that runs out is an error that says who holds what ([`OutOfMemory`]);
//! - dropping a buffer makes no driver call, never waits and never panics.
//!
//! ```
//! use xlaunch_pool::{Mode, Pool};
//!
//! let pool = Pool::host(Mode::On);
//! let buf = pool.alloc::<f32>(1000)?;
//! assert_eq!(buf.len(), 1000);
//! drop(buf);
//! assert_eq!(pool.stats().live.current(), 0);
//! # Ok::<(), xlaunch_pool::PoolError>(())
//! ```
//!
//! # Where things are
//! [`core`] decides, over a [`backing`]; [`plan`] packs steps; [`Pool`] and [`PoolBuf`] are what programs hold;
//! [`Snapshot`] is what they show; [`replay`] compares allocators on recorded traces.
//!
//! # What ends
//! Fork: a child must not use a CUDA pool; requests that need the driver are refused there, and those that do not return
//! addresses that mean nothing to the child. A context lost to a fault: requests that need the driver fail with the
//! driver's words; drops and requests that need none go on. End of the process: CUDA memory is left to the driver; host memory is given back with the last buffer.

pub mod backing;
pub mod bench;
mod buf;
pub mod core;
#[cfg(feature = "cuda")]
mod cuda;
mod debug;
mod direct;
mod dtype;
mod error;
mod inner;
mod loans;
mod lock;
pub mod plan;
mod pool;
pub mod replay;
mod report;
mod returns;
mod stats;
mod sync;
mod tag;
mod trace;

pub use buf::{Loan, PoolBuf};
pub use dtype::DType;
pub use error::{Corruption, CorruptionKind, OutOfMemory, PoolError};
pub use pool::{External, Mode, Options, Pool, Space, Step};
pub use report::Snapshot;
pub use stats::Stats;
pub use tag::{Tag, tag};
pub use trace::{Action, Event};

pub use crate::core::{Count, Place, Site, StreamId};
