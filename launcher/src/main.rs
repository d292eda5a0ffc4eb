//! The `xlaunch` binary: the command line; `xlaunch worker`, one rank of the built-in trainer; and, under its own name,
//! the reaper that cleans up after a launcher that was killed.
//!
//! - [`cli`]: subcommands and torchrun's flags; [`client`]: gRPC clients of agents and the daemon; [`render`]: tables;
//! - [`mod@bench`]: the measurements of `xlaunch bench`; [`report`]: training runs as a page;
//! - [`ssh`]: launches on several hosts; [`runtime`]: tokio's runtime, and reports of panics;
//! - [`trainer`]: functions of the worker crate, which is named only in this file and in `trained`.
#![forbid(unsafe_code)]

mod bench;
mod cli;
mod client;
mod console;
mod render;
mod report;
mod runtime;
mod ssh;
mod trained;
mod trainer;

use std::path::Path;
use std::process::ExitCode;

use trainer::{Checks, ExportRequest, Exported, FillInError, Memory, Needs, Preflight, Saving, Trainer};
use xlaunch_agent::environment::{DataSet, Parent};
use xlaunch_agent::spawn::environment;
use xlaunch_agent::workload::trainer::{CheckpointFiles, HeldLock, Recovered};
use xlaunch_agent::{Refusal, spawn};
use xlaunch_proto::spec::JobSpec;
use xlaunch_worker::dry_run;
use xlaunch_worker::huggingface::export as hf;

fn main() -> ExitCode {
    runtime::report_panics();
    if std::env::args_os().next().is_some_and(|name| name == spawn::reaper::NAME) {
        return spawn::reaper::main();
    }
    if std::env::args_os().next().is_some_and(|name| name == spawn::terminal::RELAY_NAME) {
        return spawn::terminal::relay_main();
    }
    if std::env::args_os().nth(1).is_some_and(|argument| argument == "worker") {
        let rank_threads = std::env::args_os().nth(2).is_some_and(|it| it == environment::RANK_THREADS);
        return xlaunch_worker::main(rank_threads).into();
    }
    let newest_checkpoint = xlaunch_worker::newest_checkpoint;
    let (generate, evaluate) = (trained::generate, trained::evaluate);
    let files = CheckpointFiles { recover, verify, lock };
    cli::main(Trainer { fill_in, preflight, memory, newest_checkpoint, files, export, generate, evaluate })
        .into()
}

fn fill_in(spec: &mut JobSpec) -> Result<(), FillInError> {
    xlaunch_worker::fill_in(spec).map_err(|error| match error {
        xlaunch_worker::FillInError::Invalid(invalid) => FillInError::Invalid(invalid),
        xlaunch_worker::FillInError::Refused(refusal) => {
            FillInError::Refused(Refusal::new(refusal.exit, refusal.message))
        }
    })
}

fn preflight(spec: &JobSpec, job_dir: &Path, world: u32, checks: Checks) -> Result<Preflight, Refusal> {
    let checked = match checks {
        Checks::Start => xlaunch_worker::preflight(spec, job_dir, world),
        Checks::Data => xlaunch_worker::preflight_data(spec),
        Checks::DryRun => xlaunch_worker::preflight_dry_run(spec, world),
    };
    let ready = checked.map_err(|refusal| Refusal::new(refusal.exit, refusal.message))?;
    let xlaunch_worker::Preflight { resume_from, parent, complete, data, state_bytes, warnings, lock } =
        ready;
    let parent = parent.zip(resume_from.as_ref()).map(|(parent, path)| {
        let checkpoint = std::path::absolute(path).unwrap_or_else(|_| path.clone());
        Parent { run: parent.run, step: parent.step, checkpoint }
    });
    let data =
        data.into_iter().map(|(split, data)| (split, DataSet { tokens: data.tokens, hash: data.hash }));
    let data = data.collect();
    let lock = lock.map(|lock| Box::new(lock) as HeldLock);
    Ok(Preflight { resume_from, parent, complete, data, state_bytes, warnings, lock })
}

fn memory(spec: &JobSpec, cuda: bool, ranks: u32, limit: Option<u64>) -> Result<Needs, Refusal> {
    let find = || {
        let needed = dry_run::memory(spec, cuda, ranks as usize)?;
        let savings = limit.map(|limit| dry_run::savings(spec, needed, cuda, ranks as usize, limit));
        Ok((needed, savings.transpose()?.unwrap_or_default()))
    };
    let (needed, savings) = find()
        .map_err(|error: xlaunch_worker::error::WorkerError| Refusal::new(error.exit(), error.to_string()))?;
    let total = needed.total();
    let dry_run::Memory { parameters, tokens, weights, gradients, optimizer, activations, libraries } =
        needed;
    let needed = Memory { parameters, tokens, weights, gradients, optimizer, activations, libraries, total };
    let saving = |saving: dry_run::Saving| Saving { total: saving.memory.total(), change: saving.change };
    Ok((needed, savings.into_iter().map(saving).collect()))
}

fn recover(dir: &Path, run: &str, source: Option<&Path>, snapshot: Option<u64>) -> Result<Recovered, String> {
    let recovered = xlaunch_worker::recover(dir, run, source, snapshot).map_err(|error| error.to_string())?;
    let xlaunch_worker::Recovered { checkpoint, from_memory, on_disk, notes } = recovered;
    Ok(Recovered { checkpoint, from_memory, on_disk, notes })
}

fn verify(checkpoint: &Path) -> Result<(), String> {
    xlaunch_worker::verify_checkpoint(checkpoint).map_err(|error| error.to_string())
}

fn lock(dir: &Path, job: &str) -> Result<HeldLock, String> {
    let lock = xlaunch_worker::lock_checkpoints(dir, job).map_err(|error| error.to_string())?;
    Ok(Box::new(lock))
}

fn export(request: ExportRequest) -> Result<Exported, Refusal> {
    let ExportRequest { checkpoint, output, bf16, tokenizer, overwrite } = request;
    let dtype = if bf16 { hf::ExportDtype::Bf16 } else { hf::ExportDtype::Fp32 };
    let options = hf::Export { checkpoint, output, dtype, tokenizer, overwrite };
    let exported = hf::export(&options).map_err(|error| Refusal::new(error.exit(), error.to_string()))?;
    let hf::Exported { checkpoint, step, output, bytes, tokenizer, notes } = exported;
    Ok(Exported { checkpoint, step, output, bytes, tokenizer, notes })
}
