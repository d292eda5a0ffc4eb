//! Supervises the workers of one job on this node: starts one process per rank, monitors the processes, and restarts or
//! stops them.
//!
//! ```text
//! JobSpec or CommandSpec --devices, resolved_command, run_dir--> driver (the one task that owns the job)
//!     worker processes        --exits-->  |  <--Join, Session, Stop-- rendezvous (gRPC service)
//!     signals ------------------------->  |  --> state (pure): the next actions, with reasons
//!     status: a board, read by queries <--|
//!     workload: trainer or command -------'--> sinks (writer threads), report
//! logs: output of the workers --> files, console, tail
//! ```
//! Before the job starts:
//! - [`config`]: builds a checked job description from `train.toml`, environment and flags;
//! - [`resolved_command`]: a command of the user, resolved on this node; `interpreter`: finds its Python;
//! - [`work`]: describes the job for the other nodes, which must agree on it;
//! - [`base_environment`], [`worker_environment`]: the environment variables of workers.
//!
//! While it runs:
//! - [`waiting`]: an agent before its first attempt; [`driver`]: the only code that touches processes and sockets on
//!   behalf of the job; [`state`]: decides what happens on this node, as a pure function from events to actions;
//! - [`workload`]: the two kinds of job behind one trait, and hang detection; `python`: support for workers that run
//!   Python; `activity`: what a worker's training thread does; [`stacks`]: stacks of the processes of a rank;
//! - [`rendezvous`], [`status`], [`logs`]: calls of workers and clients.
//!
//! For the user:
//! - [`registry`], [`run_dir`]: running launches and the directories of runs; [`environment_file`], [`run_summary`]:
//!   files in them, about what the run used and how it ended;
//! - [`sinks`]: progress, metrics, TensorBoard, summary; [`ending`]: how a job ended; [`report`]: why it failed.
//!
//! Processes, devices and libraries of this machine are in `xlaunch-host`, the coordinator and the link to it in
//! `xlaunch-cluster`.
#![forbid(unsafe_code)]

mod activity;
pub mod base_environment;
pub mod config;
pub mod driver;
pub mod ending;
pub mod environment_file;
mod interpreter;
pub mod logs;
mod python;
pub mod registry;
pub mod rendezvous;
pub mod report;
pub mod resolved_command;
pub mod run_dir;
pub mod run_summary;
#[cfg(test)]
mod simulation;
pub mod sinks;
pub mod stacks;
pub mod state;
pub mod status;
pub mod stderr;
mod template;
pub mod waiting;
pub mod work;
pub mod worker_environment;
pub mod workload;
