//! Supervises the workers of one job on this node: starts one process per rank, monitors the processes, and restarts or
//! stops them.
//!
//! ```text
//! JobSpec or CommandSpec --devices, command, run_dir--> driver (the one task that owns the job)
//!     spawn: worker processes --exits-->  |  <--Join, Session, Stop-- rendezvous (gRPC service)
//!     signals ------------------------->  |  --> state (pure): the next actions, with reasons
//!     status: a board, read by queries <--|
//!     workload: trainer or command -------'--> sinks (writer threads), report
//! logs: output of the workers --> files, console, tail
//! ```
//! - [`state`] decides what happens on this node: a pure function from events to actions;
//! - [`group`]: the agents of a job's nodes; the coordinator, which decides about membership and restarts, and the link
//!   to it;
//! - [`waiting`]: an agent before its first attempt;
//! - [`driver`] acts: the only code that touches processes and sockets on behalf of the job;
//! - [`workload`]: the two kinds of job behind one trait; hang detection;
//! - [`spawn`]: process trees, cgroups, environment, CPU affinity, exit codes;
//! - [`rendezvous`], [`status`], `logs`: gRPC calls of workers and clients;
//! - [`stacks`]: stacks of the processes of a rank;
//! - [`report`]: why a job failed; [`sinks`]: progress, metrics, TensorBoard, summary;
//! - [`environment_file`] and [`run_summary`]: files of a run's directory: what the run used, how it ended;
//! - [`doctor`]: health of the node's GPUs; [`gpu_clocks`]: their clocks; [`memory`]: free memory;
//! - [`libraries`]: the CUDA libraries of workers; [`system_errors`]: advice for errors of the system;
//! - [`config`]: builds a checked job description from `train.toml`, environment and flags.
//!
//! The agent never calls CUDA; GPUs and their usage come from NVML, loaded at run time.

mod activity;
pub mod clock;
pub mod command;
pub mod config;
pub mod devices;
pub mod doctor;
pub mod driver;
pub mod environment_file;
mod escape;
pub mod gpu_clocks;
pub mod group;
pub mod libraries;
pub mod logs;
pub mod memory;
pub mod naming;
pub mod process;
mod python;
mod redact;
pub mod registry;
pub mod rendezvous;
pub mod report;
pub mod run_dir;
pub mod run_summary;
pub mod signals;
pub mod sinks;
pub mod spawn;
pub mod stacks;
pub mod state;
pub mod status;
pub mod system_errors;
pub mod waiting;
pub mod workload;
