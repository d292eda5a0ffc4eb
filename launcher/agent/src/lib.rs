//! Supervises the workers of one job on this node: starts one process per rank, follows them, restarts or ends them.
//!
//! ```text
//! JobSpec or CommandSpec --devices, command, run_dir--> driver (the one task that owns the job)
//!     spawn: worker processes --exits-->  |  <--Join, Session, Stop-- rendezvous (gRPC service)
//!     signals ------------------------->  |  --> state (pure): what to do next, and why
//!     status: answered from a board  <----|
//!     workload: what is particular to training jobs and to commands --> sinks, report
//! logs: output of the workers --> files, console, last lines
//! ```
//! - [`state`] decides: a pure function from events to actions, each with its reason, and the restart policy;
//! - [`driver`] acts: the only code that touches processes and sockets on behalf of the job;
//! - [`workload`]: the two kinds of job;
//! - [`spawn`]: process trees, cgroups, environment, CPU affinity, exit codes;
//! - [`rendezvous`], [`status`], [`logs`]: what workers and clients ask for over gRPC;
//! - [`report`]: why a job failed; [`sinks`]: progress, metrics, TensorBoard, summary;
//! - [`config`]: from `train.toml`, environment and flags to a checked job description.
//!
//! The agent never calls CUDA; NVML, loaded at run time, is asked for GPUs and their use.

pub mod clock;
pub mod command;
pub mod config;
pub mod devices;
pub mod driver;
pub mod logs;
pub mod names;
pub mod process;
mod python;
mod refusal;
pub mod registry;
pub mod rendezvous;
pub mod report;
pub mod run_dir;
mod signals;
pub mod sinks;
pub mod spawn;
pub mod state;
pub mod status;
pub mod workload;

pub use refusal::Refusal;
