//! Collectives over ranks: NCCL between GPUs, a ring over sockets between CPU workers, and nothing for a single rank.
//!
//! - a trainer starts [`Operation`]s of a [`Collective`] and waits for them; [`Nccl`], [`Ring`] and [`Local`] implement
//!   it;
//! - [`bucket`] plans, as pure functions, which ranges of the gradient arena are reduced together, and tracks which of
//!   them backward has finished;
//! - [`Sharding`] decides which shard of every bucket a rank updates when the optimizer is sharded;
//! - [`Slots`] lets buckets take turns in memory when gradients or parameters are sharded, too.
//!
//! This crate knows about buffers of the pool, not about models or steps.

pub mod bucket;
mod collective;
mod local;
mod nccl;
mod ring;
mod sharding;
mod slots;

pub use collective::{AbortHandle, Among, Collective, CommError, Exchange, Groups, Operation, Result, Wait};
pub use local::Local;
pub use nccl::{Nccl, load_library, unique_id};
pub use ring::{Ring, RingListener, RingPlace};
pub use sharding::Sharding;
pub use slots::{Slots, Turn, Write};
