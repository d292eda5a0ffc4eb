//! The launcher: starts one worker process per rank, of the built-in trainer or of any command, and looks after them.
//!
//! ```text
//! train.toml + environment + flags --config--> JobSpec --devices--.
//! torchrun's flags, PET_* --cli::torchrun--> CommandSpec ---------+--run_dir--> agent::driver (one task)
//!     spawn: worker processes --exits-->  |  <--Join, Session, Stop-- rendezvous::service (gRPC)
//!     signals ------------------------->  |  --> agent::state (pure): what to do, and why
//!     status: answered from a board  <----|
//!     progress, metrics, summary, report <'
//! logs: workers' output --> files, console, last lines
//! daemon: a queue of such launches, each run by an agent, `xlaunch agent`, that outlives it
//! ```
//! It never calls CUDA; NVML, loaded at run time, is asked for the number of GPUs. `main.rs` alone knows the worker.

pub mod agent;
pub mod bench;
mod channel;
pub mod cli;
mod clock;
pub mod command;
pub mod config;
mod connection;
pub mod daemon;
pub mod devices;
pub mod logs;
pub mod metrics;
mod process;
pub mod progress;
pub mod registry;
pub mod rendezvous;
pub mod report;
pub mod run_dir;
pub mod spawn;
pub mod status;
pub mod summary;
pub mod tensorboard;

use std::path::{Path, PathBuf};

use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::spec::JobSpec;

/// What the launcher asks of the built-in trainer. `main.rs` fills it in.
#[derive(Clone, Copy, Debug)]
pub struct Trainer {
    /// Checks data and checkpoint before any worker starts; the path is the job's directory of earlier runs.
    pub preflight: fn(&JobSpec, &Path) -> Result<Preflight, Refusal>,
    /// The newest complete checkpoint in a directory.
    pub newest_checkpoint: fn(&Path) -> Option<PathBuf>,
}

/// A job that can start.
#[derive(Clone, Debug, Default)]
pub struct Preflight {
    /// Checkpoint to resume from.
    pub resume_from: Option<PathBuf>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

/// A job that cannot start: what to exit with, and why.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// The code.
    pub exit: ExitCode,
    /// The reason, for people.
    pub message: String,
}

impl Refusal {
    /// A refusal with this code.
    pub fn new(exit: ExitCode, message: impl Into<String>) -> Self {
        Self { exit, message: message.into() }
    }
}
