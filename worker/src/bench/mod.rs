//! `xlaunch bench`: measures parts of the trainer on this machine.
//!
//! - `device` and `all_reduce` run in workers, in place of training; the agent collects their reports;
//! - `skip_all_reduce` is a collective for training benchmarks and dry runs that skips most or all communication.

mod all_reduce;
mod device;
mod skip_all_reduce;

pub(crate) use all_reduce::all_reduce;
pub(crate) use device::device;
pub(crate) use skip_all_reduce::SkipAllReduce;
