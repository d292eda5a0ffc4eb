//! Supervises the workers of one job on this node: starts one process per rank, monitors the processes, and restarts or
//! stops them.
//!
//! ```text
//! JobSpec or CommandSpec --devices, command, run_dir--> driver (the one task that owns the job)
//!     worker processes        --exits-->  |  <--Join, Session, Stop-- rendezvous (gRPC service)
//!     signals ------------------------->  |  --> state (pure): the next actions, with reasons
//!     status: a board, read by queries <--|
//!     workload: trainer or command -------'--> sinks (writer threads), report
//! logs: output of the workers --> files, console, tail
//! ```
//! - [`state`] decides what happens on this node: a pure function from events to actions;
//! - [`work`]: what the nodes of a job must agree on; its coordinator and the link to it are in `xlaunch-cluster`;
//! - [`waiting`]: an agent before its first attempt;
//! - [`driver`] acts: the only code that touches processes and sockets on behalf of the job;
//! - [`workload`]: the two kinds of job behind one trait; hang detection;
//! - [`environment`]: the environment variables of workers; `interpreter` finds Python, `python` has what only its
//!   programs need;
//! - [`rendezvous`], [`status`], `logs`: gRPC calls of workers and clients;
//! - [`stacks`]: stacks of the processes of a rank;
//! - [`ending`]: how a job ended, for all who tell of it; [`report`]: why it failed; [`sinks`]: progress, metrics, TensorBoard, summary;
//! - [`environment_file`] and [`run_summary`]: files of a run's directory: what the run used, how it ended;
//! - [`config`]: builds a checked job description from `train.toml`, environment and flags.
//!
//! Processes, devices and whatever else one machine has are in `xlaunch-host`.
#![forbid(unsafe_code)]

mod activity;
pub mod base_environment;
pub mod command;
pub mod config;
pub mod driver;
pub mod ending;
pub mod environment;
pub mod environment_file;
mod interpreter;
pub mod logs;
mod python;
pub mod registry;
pub mod rendezvous;
pub mod report;
pub mod run_dir;
pub mod run_summary;
#[cfg(test)]
mod simulation;
pub mod sinks;
pub mod stacks;
pub mod state;
pub mod status;
pub mod waiting;
pub mod work;
pub mod workload;
