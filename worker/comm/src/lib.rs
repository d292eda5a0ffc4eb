//! Sums of gradients over ranks: NCCL between GPUs, a ring over sockets between CPU workers, nothing for one rank.
//!
//! - [`Collective`] is what a trainer uses; [`Local`], [`Ring`] and [`Nccl`] implement it;
//! - [`Sharding`] says which part of every bucket a rank updates, where they share that work;
//! - [`bucket`] plans, as pure functions, which parts of the gradient arena are summed together, and says when backward
//!   has finished one.

pub mod bucket;
mod collective;
mod local;
mod nccl;
mod ring;
mod sharding;

pub use collective::{AbortHandle, Collective, CommError, Result};
pub use local::Local;
pub use nccl::{Nccl, unique_id};
pub use ring::{Ring, RingListener};
pub use sharding::Sharding;
