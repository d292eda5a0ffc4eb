//! The process of one rank: trains a GPT as its agent says, and reports to it.
//!
//! ```text
//! environment --> session: data, device, model, rendezvous --> train::Run --> teardown
//!                   control (own thread): job, join, heartbeats, reports, commands  <--gRPC--> agent
//! ```
//! [`main`] is `xlaunch worker`; [`preflight`] and [`newest_checkpoint`] are what the launcher asks before it starts one.
#![forbid(unsafe_code)]

mod bench;
pub mod checkpoint;
pub mod control;
pub mod data;
mod doing;
pub mod environment;
pub mod error;
pub mod model;
pub mod optim;
mod preflight;
pub mod session;
pub mod train;
pub mod windows;

use std::path::{Path, PathBuf};

use xlaunch_proto::exit::ExitCode;

use environment::Environment;

pub use preflight::{Preflight, Refusal, preflight};

/// The newest complete checkpoint in `dir`.
pub fn newest_checkpoint(dir: &Path) -> Option<PathBuf> {
    checkpoint::newest(dir)
}

/// `xlaunch worker`. Errors go to stderr, which the agent keeps for its report.
#[expect(clippy::print_stderr, reason = "a worker's stderr is its agent's evidence")]
pub fn main() -> ExitCode {
    let environment = Environment::read(|name| std::env::var(name).ok());
    match environment.and_then(|environment| session::run(&environment)) {
        Ok(exit) => exit,
        Err(error) => {
            eprintln!("error: {error}");
            error.exit()
        }
    }
}
