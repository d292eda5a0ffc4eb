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

pub mod config;
pub mod orders;
pub mod service;
pub mod view;
