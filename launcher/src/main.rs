//! The `xlaunch` binary: `xlaunch worker` is one rank of the built-in trainer, everything else is the command line, and,
//! under its own name, the reaper that cleans up after a killed launcher.
//!
//! - [`cli`]: subcommands, torchrun's flags, tables and JSON for people and programs;
//! - [`bench`]: the measurements of `xlaunch bench`;
//! - [`trainer`]: what the command line needs of the worker crate, which only this file names.
#![forbid(unsafe_code)]

mod bench;
mod cli;
mod client;
mod trainer;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use trainer::{Preflight, Trainer};
use xlaunch_agent::{Refusal, spawn};
use xlaunch_proto::spec::JobSpec;

fn main() -> ExitCode {
    if std::env::args_os().next().is_some_and(|name| name == spawn::reaper::NAME) {
        return spawn::reaper::main();
    }
    if std::env::args_os().nth(1).is_some_and(|argument| argument == "worker") {
        return xlaunch_worker::main().into();
    }
    let newest_checkpoint = xlaunch_worker::newest_checkpoint;
    cli::main(Trainer { preflight, newest_checkpoint, bench_alloc }).into()
}

fn preflight(spec: &JobSpec, job_dir: &Path) -> Result<Preflight, Refusal> {
    let ready = xlaunch_worker::preflight(spec, job_dir)
        .map_err(|refusal| Refusal::new(refusal.exit, refusal.message))?;
    Ok(Preflight { resume_from: ready.resume_from, warnings: ready.warnings })
}

fn bench_alloc(traces: &[PathBuf]) -> Result<String, Refusal> {
    xlaunch_worker::bench::alloc(traces).map_err(|error| Refusal::new(error.exit(), error.to_string()))
}
