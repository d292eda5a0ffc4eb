//! Building blocks of operations on the CPU.
//!
//! - `access`: checked Rust slices of tensor memory for the duration of one operation;
//! - `gemm`: strided matrix multiplication;
//! - `math`: vectorised scalar functions and sums in a fixed order;
//! - `threads`: the thread pool of one back end.

pub(crate) mod access;
pub(crate) mod gemm;
pub(crate) mod math;
pub(crate) mod threads;

pub(crate) use access::Access;
pub(crate) use threads::Threads;
