//! A memory pool for CUDA devices and for the host. It is meant for programs that repeat similar allocations, such as
//! trainers.
//!
//! `cudaMalloc` and `cudaFree` take tens of microseconds, synchronise the device and serialise the threads of a
//! context. A [`Pool`] rarely calls the driver, and keeps freed memory:
//!
//! - Requests are served from one growable address range by two-level segregated fit, in multiples of 512 bytes. Freed
//!   memory is merged with its neighbours at once, so mapped memory stays within a few percent of live memory.
//! - [`PoolBuf::len`] is the requested length; bytes added by rounding are never read. The contents of a new buffer are
//!   unspecified.
//! - The memory of a freed buffer serves work of the same stream at once, and work of another stream if that work is
//!   known to run later. If nothing else fits, the pool makes the other stream wait. When a second stream uses a
//!   buffer, record that with [`PoolBuf::record_use`], or let it hold a [`Lease`].
//! - Repeated steps are served from a plan ([`Mode::Plan`], [`Pool::step`]): without a lock, at the same addresses.
//! - A limit on the bytes held is exact. When memory runs out, the error lists the largest holders ([`OutOfMemory`]).
//! - Dropping a buffer makes no driver call and does not panic. It does not wait for a lock either, except in debug
//!   mode and with the pool off.
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
//! # Structure
//! [`core`] is the allocator, without locks and devices; [`backing`] maps memory; [`plan`] serves repeated steps.
//! Programs use [`Pool`] and [`PoolBuf`]; [`Snapshot`] is the basis of reports.
//!
//! # Fork, faults, exit
//! - After `fork`, the child must not use a CUDA pool: requests that need the driver fail there, and addresses from
//!   requests that do not are meaningless to the child.
//! - After a fault, which makes the CUDA context unusable, requests that need the driver fail with the driver's
//!   message. Drops, and requests that do not need the driver, still work.
//! - CUDA memory is freed by the driver when the context ends. Host memory is freed when the last handle and the last
//!   buffer of its pool are dropped.

pub mod backing;
mod buf;
pub mod core;
#[cfg(feature = "cuda")]
mod cuda;
mod debug;
mod deferred;
mod direct;
mod dtype;
mod error;
mod inner;
mod leases;
mod lock;
mod options;
pub mod plan;
mod pool;
mod report;
mod stats;
mod stream;
mod sync;
mod tag;
mod trace;

pub use buf::{Lease, PoolBuf};
pub use dtype::DType;
pub use error::{Corruption, CorruptionKind, OutOfMemory, PoolError};
pub use options::{Mode, Options, Space};
pub use pool::{External, Pool, Step};
pub use report::Snapshot;
pub use stats::Stats;
pub use stream::{MAX_STREAMS, StreamId};
pub use tag::{Tag, tag};
pub use trace::{Action, Event};

pub use crate::core::{Counter, Place, Site};
