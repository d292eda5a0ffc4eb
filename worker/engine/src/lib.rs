//! Fused training operations behind one trait, on CUDA devices and on CPUs.
//!
//! - [`Backend`] is the list of operations: a model is written once over it;
//! - [`Tensor`] and [`Slice`] are handles to a device's memory, whichever device it is;
//! - [`cpu`] computes in f32 on threads, and is the readable reference of
//! - [`cuda`], whose kernels (`kernels/*.cu`) are compiled for the device at hand when it is opened;
//! - [`calibrate`] says what a device can do at best, [`cache`] keeps what is worth making once per machine,
//!   [`nvtx`] names phases for a profiler that is attached.
//!
//! Shape letters: B batch, T sequence, C model width, H heads, D head width, F ffn, V vocabulary, Vp padded vocabulary,
//! L layers; N = B T rows of tokens. All arrays are row-major.

pub mod backend;
pub mod cache;
pub mod calibrate;
pub mod cpu;
pub mod cuda;
pub mod nvtx;
pub mod shapes;
pub mod tensor;

pub use backend::{Backend, DeviceInfo, EngineError, KernelSpan, KernelTime, Precision, Reading, Result};
pub use shapes::*;
pub use tensor::{Slice, Tensor};
pub use xlaunch_pool::{DType, Mode as PoolMode, Options as PoolOptions, Pool, Stats as PoolStats};
