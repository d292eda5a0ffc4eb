//! Sums of gradients over ranks: NCCL between GPUs, a ring over sockets between CPU workers, nothing for one rank.
//!
//! - [`Collective`] is what a trainer uses.

mod collective;

pub use collective::{AbortHandle, Collective, CommError, Result};
