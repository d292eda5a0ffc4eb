//! The daemon of a node: takes jobs, places them on GPUs, has each run by an agent of its own, and answers for all.
//!
//! ```text
//! callers --gRPC, unix socket--> service --orders--> manager (one task) --records--> journal
//!                                   ^                   |   ^
//!                                   |     starts, stops |   | what agents say, how they end
//!                                   |                   v   |
//!                                   |                 agents: one process per job, which outlives the daemon
//!                                   |                   |
//!                                   '----- view <-------'---> web: the page, /metrics
//! ```
//! The manager alone changes jobs: it writes to the journal first, then acts, then shows. Whoever only looks reads the
//! [`view`], and keeps nobody waiting.

pub mod agents;
pub mod config;
pub mod files;
pub mod gpus;
pub mod journal;
mod live;
pub mod manager;
pub mod orders;
mod plain;
pub mod run;
pub mod service;
mod show;
pub mod state;
mod submission;
mod users;
pub mod view;
pub mod web;

/// Tells this start of the system from others.
pub fn boot_id() -> String {
    let id = fs_err::read_to_string("/proc/sys/kernel/random/boot_id");
    id.map(|id| id.trim().to_owned()).unwrap_or_default()
}
