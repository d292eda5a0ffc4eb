//! Fused training operations on CUDA devices and on CPUs.
//!
//! Modules, each depending only on those above it:
//!
//! - `error`, `options`, `handles`, `profile`: arguments and results of calls;
//! - [`cache`]: files that are computed once per machine; [`nvtx`]: named ranges for an attached profiler;
//! - [`random`]: streams of random numbers, the same on every machine;
//! - [`tensor`]: [`Tensor`] and [`Slice`], handles to memory of any device;
//! - `cpu`, [`cuda`]: building blocks of operations on either device; CUDA kernels are compiled when it is opened;
//! - `ops`: the operations ([`Op`]), one folder each, with the maths, arguments, both implementations and the kernel;
//! - `backend`: [`Backend`], an open device that runs them;
//! - [`calibrate`]: the peak rates of a device.
//!
//! Shape letters are listed in `ops`. All arrays are row-major.

mod backend;
pub mod cache;
pub mod calibrate;
mod cpu;
pub mod cuda;
mod error;
mod handles;
mod host_buffer;
pub mod nvtx;
mod ops;
mod options;
mod profile;
pub mod random;
pub mod tensor;
#[doc(hidden)]
pub mod testing;

pub use backend::Backend;
pub use error::{EngineError, Result};
pub use handles::{Capture, PendingRead};
pub use host_buffer::{HostAllocator, HostBuffer};
pub use ops::*;
pub use options::{CudaOptions, DeviceInfo, Precision};
pub use profile::{KernelSpan, KernelTime};
pub use tensor::{Slice, Tensor};
pub use xlaunch_pool::{DType, Mode as PoolMode, Options as PoolOptions, Pool, Stats as PoolStats};
