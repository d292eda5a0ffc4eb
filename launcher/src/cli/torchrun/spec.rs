//! What a command line says about a command to launch, with torchrun's defaults for everything else.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;

use super::python::{self, As};
use super::reader::{Environment, Reader};
use super::values;
use crate::cli::bench;
use xlaunch_agent::command::{CommandSpec, LogOptions, Restarts};
use xlaunch_agent::devices::Node;

const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(30);
const SILENCE: Duration = Duration::from_secs(300);

/// The description of a launch of `target` with its arguments; `is_program` where it stands behind `--`.
pub(super) fn command(
    reader: &Reader<'_>,
    target: &[OsString],
    is_program: bool,
    node: &dyn Fn() -> Node,
) -> Result<CommandSpec, String> {
    for flag in ["set", "resume"] {
        if reader.line.last(flag).is_some() {
            return Err(format!("--{flag} is for training configurations, whose names end in .toml"));
        }
    }
    reader.parsed("nnodes", values::one_node)?;
    reader.parsed("node-rank", values::first_node)?;
    reader.parsed("rdzv-backend", values::backend)?;
    reader.parsed("logs-specs", values::logs_specs)?;
    let (name, argv) = argv(reader, target, is_program)?;
    let nproc = reader.parsed("nproc-per-node", |text| workers(text, node))?.unwrap_or(1);
    let virtual_local_rank = reader.is_set("virtual-local-rank")?;
    if virtual_local_rank {
        enough_gpus(nproc, reader.environment)?;
    }
    let (run_id, master_addr, master_port) = rendezvous(reader)?;
    let shutdown_timeout = match reader.parsed("shutdown-timeout", values::seconds)? {
        None => reader.variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", values::seconds)?,
        given => given,
    };
    let signals = reader.parsed("signals-to-handle", values::signals)?;
    Ok(CommandSpec {
        name,
        argv,
        role: reader.parsed("role", text)?.unwrap_or_else(|| "default".into()),
        run_id,
        nproc,
        master_addr,
        master_port,
        virtual_local_rank,
        binding: reader.parsed("numa-binding", values::binding)?,
        restarts: Restarts {
            most: reader.parsed("max-restarts", values::whole)?.unwrap_or(0),
            not_after: reader.parsed("no-restart-codes", values::exit_codes)?.unwrap_or_default(),
        },
        shutdown_timeout: shutdown_timeout.unwrap_or(SHUTDOWN_TIMEOUT),
        signals: signals.unwrap_or_else(|| vec![Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT]),
        propagate_exit_code: reader.is_set("propagate-exit-code")?,
        stall_timeout: reader.parsed("stall-timeout", values::seconds)?.unwrap_or(SILENCE),
        logs: logs(reader)?,
    })
}

/// The launch's name and the command of its workers.
fn argv(
    reader: &Reader<'_>,
    target: &[OsString],
    is_program: bool,
) -> Result<(String, Vec<OsString>), String> {
    let (is_module, no_python) = (reader.is_set("module")?, reader.is_set("no-python")?);
    let run_path = reader.is_set("run-path")?;
    let how = match (run_path, is_module) {
        (true, true) => return Err("--run-path and --module exclude each other".into()),
        (true, false) => As::RunPath,
        (false, true) if no_python => return Err("--no-python and --module exclude each other".into()),
        (false, true) => As::Module,
        (false, false) => As::Script,
    };
    let name = target.first().map_or_else(String::new, |first| python::name(first, is_module));
    let direct = how == As::Script && (no_python || is_program);
    Ok((name, if direct { target.to_vec() } else { python::command(target, how, reader.environment)? }))
}

fn workers(text: &str, node: &dyn Fn() -> Node) -> Result<u32, String> {
    let node = || {
        let node = node();
        (node.gpus, u32::try_from(node.cores).unwrap_or(u32::MAX))
    };
    match text {
        "auto" => Ok(match node() {
            (Ok(gpus), _) if gpus > 0 => gpus,
            (_, cores) => cores,
        }),
        "cpu" => Ok(node().1),
        "gpu" => match node().0 {
            Ok(0) => Err("no GPU is visible".into()),
            found => found.map_err(|reason| format!("no GPU was found: {reason}")),
        },
        _ => match values::whole(text) {
            Ok(workers) if workers > 0 => Ok(workers),
            _ => Err("expected a number from 1, auto, gpu or cpu".into()),
        },
    }
}

/// The parent's list names each worker's GPU, so it has to be long enough.
fn enough_gpus(nproc: u32, environment: Environment<'_>) -> Result<(), String> {
    let Some(visible) = environment("CUDA_VISIBLE_DEVICES") else { return Ok(()) };
    let visible = visible.to_string_lossy();
    let gpus = visible.split(',').filter(|gpu| !gpu.trim().is_empty()).count();
    if gpus < nproc as usize {
        return Err(format!(
            "--virtual-local-rank: {nproc} workers need a GPU each, but CUDA_VISIBLE_DEVICES={visible} has {gpus}"
        ));
    }
    Ok(())
}

/// Run id, `MASTER_ADDR` and `MASTER_PORT`. On one node there is nobody to meet elsewhere, so that the endpoint of a
/// rendezvous is where the workers meet, whatever its backend.
fn rendezvous(reader: &Reader<'_>) -> Result<(Option<String>, String, Option<u16>), String> {
    let id = reader.parsed("rdzv-id", text)?.filter(|id| id != "none");
    let endpoint = reader.parsed("rdzv-endpoint", values::endpoint)?;
    let address = reader.parsed("master-addr", values::address)?;
    let port = reader.parsed("master-port", values::port)?.flatten();
    let local = reader.parsed("local-addr", values::address)?;
    let local = || local.unwrap_or_else(|| "127.0.0.1".into());
    Ok(match endpoint {
        _ if reader.is_set("standalone")? => (None, local(), None),
        Some((host, port)) => (id, host, port),
        None => (id, address.unwrap_or_else(local), port),
    })
}

fn logs(reader: &Reader<'_>) -> Result<LogOptions, String> {
    let prefix = match reader.parsed("log-line-prefix-template", text)?.filter(|text| !text.is_empty()) {
        None => reader.variable("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", text)?,
        given => given,
    };
    Ok(LogOptions {
        dir: reader.raw("log-dir").map(PathBuf::from),
        redirects: reader.parsed("redirects", values::streams)?.unwrap_or_default(),
        tee: reader.parsed("tee", values::streams)?.unwrap_or_default(),
        shown: reader.parsed("local-ranks-filter", values::ranks)?,
        stdout_filters: reader.parsed("duplicate-stdout-filters", values::words)?.unwrap_or_default(),
        stderr_filters: reader.parsed("duplicate-stderr-filters", values::words)?.unwrap_or_default(),
        prefix,
        rotate_bytes: reader.parsed("log-rotate", bench::bytes)?,
    })
}

fn text(text: &str) -> Result<String, String> {
    Ok(text.into())
}
