//! A pool of device memory for programs that allocate the same sizes again and again, such as trainers.
//!
//! `cudaMalloc` and `cudaFree` synchronise the device and serialise all threads of a context. [`Pool`] asks the driver
//! for memory once, keeps what is freed, and hands it out again. Rules:
//!
//! - a request is rounded up to a multiple of 512 bytes, and served from freed blocks of exactly that size;
//! - [`PoolBuf::len`] is what was asked; bytes beyond it are never read;
//! - contents are unspecified: zeroing is the caller's, explicit;
//! - dropping a buffer makes no driver call, never blocks on the device and never panics;
//! - buffers are ordered by one stream: a block may be handed out again while work on its former owner is still queued,
//!   so all work on buffers of a pool goes to one stream, or is ordered after it by events. Work of a second stream
//!   holds a [`Loan`], which keeps the block from being handed out.
//!
//! [`Mode::Off`] asks the driver for every buffer; it exists to measure what the pool is worth.
//!
//! Memory comes from a CUDA context ([`Pool::cuda`]) or from the host ([`Pool::host`]), with the same interface.

mod buf;
mod driver;
mod dtype;
mod pool;

pub use buf::{Loan, PoolBuf};
pub use dtype::DType;
pub use pool::{Mode, Pool, PoolError, Space, Stats};
