//! `xlaunch bench`: what parts of the trainer cost on this machine.
//!
//! - `device` and `all_reduce` are what workers of these benches do instead of training; the agent collects their reports;
//! - `skip_all_reduce` is the collective of a training bench that leaves its sums out.

mod all_reduce;
mod device;
mod skip_all_reduce;

pub(crate) use all_reduce::all_reduce;
pub(crate) use device::device;
pub(crate) use skip_all_reduce::SkipAllReduce;
