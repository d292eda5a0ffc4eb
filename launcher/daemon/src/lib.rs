//! The node daemon: queues jobs, places them on GPUs, starts an agent process for each, and serves their status.
//!
//! ```text
//! clients --gRPC, unix socket--> service --commands--> manager (one task) --records--> journal
//!                                   ^                   |   ^
//!                                   |       start, stop |   | status, exit
//!                                   |                   v   |
//!                                   |                 agents: one process per job, which outlives the daemon
//!                                   |                   |
//!                                   '----- view <-------'---> web: the page, /metrics
//! ```
//! Only the manager changes jobs: it writes a record to the journal, applies it, then acts on it and publishes the new
//! [`view`]. Queries read the view and never block the manager.

mod access_list;
pub mod accounting;
pub(crate) mod agents;
mod allowed_variables;
pub mod commands;
pub(crate) mod config;
mod directory_limit;
pub mod files;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzz;
pub(crate) mod gpus;
mod ids;
pub(crate) mod journal;
pub(crate) mod manager;
pub mod run;
mod runtime;
mod safe_open;
pub mod service;
mod snapshot;
pub mod state;
mod submission;
mod trash;
mod trusted_path;
pub mod users;
pub mod view;
pub(crate) mod web;

/// Returns the id of the system's current boot; empty if it is unknown.
pub fn boot_id() -> String {
    let id = fs_err::read_to_string("/proc/sys/kernel/random/boot_id");
    id.map(|id| id.trim().to_owned()).unwrap_or_default()
}
