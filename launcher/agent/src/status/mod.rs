//! The status of a running launch.
//!
//! ```text
//! driver --events--> board <--usage, output, every few seconds-- monitor (a thread) <-- sample, gpu
//!                      |
//!                      '--a snapshot--> rendezvous::service: Status
//!    log files --------------> follow --> rendezvous::service: Logs
//! ```
//! `time` is the part of the board that accounts for the job's time. `merge` makes one status out of those of several
//! nodes.
//!
//! Nothing here waits for the driver or makes it wait: the board is changed and read in place, under a lock that is
//! held for microseconds.

pub mod board;
pub mod follow;
mod gpu;
pub mod history;
pub mod merge;
mod monitor;
pub mod sample;
pub(crate) mod time;

pub(crate) use monitor::Monitor;
