//! The process of one rank: trains a GPT as instructed by its agent, and reports to the agent.
//!
//! ```text
//! environment --> session: data, device, model, rendezvous --> train::Run --> teardown
//!                   control (own thread): job, join, heartbeats, reports, commands  <--gRPC--> agent
//! ```
//! [`main`] is `xlaunch worker`. The launcher calls [`fill_in()`] when it reads a configuration, [`preflight()`] before
//! it starts workers, and [`recover`] before it restarts them.
#![forbid(unsafe_code)]

pub mod adapter;
mod bench;
pub mod best;
pub mod checkpoint;
pub mod control;
pub mod data;
pub mod divergence;
pub mod dry_run;
pub mod environment;
pub mod error;
pub mod evaluate;
pub mod export;
mod fail;
mod fill_in;
#[cfg(feature = "fuzzing")]
pub mod fuzz;
pub mod generate;
mod hub;
pub mod huggingface;
pub mod inherited;
pub mod model;
pub mod nccl_windows;
pub mod optim;
mod peft;
mod phase;
mod preflight;
pub mod pretrained;
mod random;
mod rank_threads;
mod schedule;
pub mod serve;
pub mod session;
mod tracked_collective;
pub mod train;
pub mod weights;

use std::path::{Path, PathBuf};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::lineage::Recovered;

use checkpoint::directory;
use checkpoint::{CheckpointError, Lock, LockError};
use environment::Environment;
use error::WorkerError;
use fail::Place;

pub use fill_in::{FillInError, fill_in};
pub use preflight::{Preflight, preflight, preflight_data, preflight_dry_run};

/// Returns the newest complete checkpoint in `dir`.
pub fn newest_checkpoint(dir: &Path) -> Option<PathBuf> {
    directory::newest(dir)
}

/// Finds the starting point of the next attempt of `run`, which saves in `dir` and began with `source`. `snapshot` is
/// the step of the newest memory snapshot.
pub fn recover(
    dir: &Path,
    run: &str,
    source: Option<&Path>,
    snapshot: Option<u64>,
) -> Result<Recovered, CheckpointError> {
    directory::recover(dir, run, source, snapshot)
}

/// Checks that all files of a checkpoint exist and have their full length, without reading tensors.
pub fn verify_checkpoint(checkpoint: &Path) -> Result<(), CheckpointError> {
    directory::state(checkpoint).map(drop)
}

/// Locks a directory of checkpoints for the job of this name.
pub fn lock_checkpoints(dir: &Path, job: &str) -> Result<Lock, LockError> {
    Lock::acquire(dir, &preflight::holder(job))
}

/// Entry point of `xlaunch worker`: runs one rank or, with `rank_threads`, all ranks of a job on one node. Errors go to
/// stderr, whose last lines the agent includes in its failure report.
#[expect(clippy::print_stderr, reason = "the agent reports the tail of a failed worker's stderr")]
pub fn main(rank_threads: bool) -> ExitCode {
    raise_open_file_limit();
    let environment = Environment::read(|name| std::env::var(name).ok());
    let result = environment.and_then(|environment| {
        fail::arm(environment.rank.0, environment.attempt.0).map_err(WorkerError::Setting)?;
        fail::at(Place::Start);
        if rank_threads { rank_threads::run(&environment, session::run) } else { session::run(&environment) }
    });
    match result {
        Ok(exit) => exit,
        Err(error) => {
            eprintln!("error: {error}");
            error.exit()
        }
    }
}

/// Raises the soft limit of open files to the hard limit, so that data files stay open. If that fails, they are opened
/// for each read.
fn raise_open_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}
