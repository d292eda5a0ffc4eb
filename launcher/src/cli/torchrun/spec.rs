//! The [`CommandSpec`] of a command line: torchrun's flags and defaults, independent of the node.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;

use xlaunch_spec::command::{CommandSpec, LogOptions, Program};

use super::reader::Reader;
use super::{flags, group, values};
use crate::cli::bench;

/// Returns the launch of `target`, a program or script with its arguments; it has at least one element. `is_program`
/// means that it follows `--`. With several nodes, the result is the same on all of them.
pub(super) fn command(
    reader: &Reader<'_>,
    target: &[OsString],
    is_program: bool,
    several_nodes: bool,
) -> Result<CommandSpec, String> {
    for flag in flags::TRAINING {
        if reader.line.last(flag).is_some() {
            return Err(format!("--{flag} is for training configurations, whose names end in .toml"));
        }
    }
    check_ignored(reader, several_nodes)?;
    let defaults = CommandSpec::new(program(reader, target, is_program)?, Vec::new());
    let (run_id, master_addr, master_port) = if several_nodes {
        // With several nodes, the coordinator sends these to the nodes.
        (None, defaults.master_addr, None)
    } else {
        rendezvous(reader)?
    };
    let shutdown_timeout = match reader.parsed("shutdown-timeout", values::seconds)? {
        None => reader.variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", values::seconds)?,
        given => given,
    };
    let preload = reader.parsed("preload", values::modules)?.unwrap_or_default();
    if !preload.is_empty() && matches!(defaults.program, Program::Binary(_)) {
        return Err(
            "--preload imports Python modules: it needs a script or -m MODULE, and no --no-python".into()
        );
    }
    Ok(CommandSpec {
        nproc: reader.parsed("nproc-per-node", values::nproc)?.unwrap_or(defaults.nproc),
        arguments: target.get(1..).unwrap_or_default().to_vec(),
        preload,
        role: reader.parsed("role", text)?.unwrap_or(defaults.role),
        run_id,
        master_addr,
        master_port,
        virtual_local_rank: reader.is_set("virtual-local-rank")?,
        binding: reader.parsed("numa-binding", values::binding)?,
        max_restarts: reader.parsed("max-restarts", values::whole)?.unwrap_or(defaults.max_restarts),
        no_restart_codes: reader.parsed("no-restart-codes", values::exit_codes)?.unwrap_or_default(),
        requeue_codes: reader.parsed("requeue-codes", values::exit_codes)?.unwrap_or_default(),
        shutdown_timeout: shutdown_timeout.unwrap_or(defaults.shutdown_timeout),
        signals: reader.parsed("signals-to-handle", values::signals)?.unwrap_or(defaults.signals),
        propagate_exit_code: reader.is_set("propagate-exit-code")?,
        stall_timeout: reader.parsed("stall-timeout", values::seconds)?.unwrap_or(defaults.stall_timeout),
        hang_timeout: reader.parsed("hang-timeout", values::seconds)?,
        flight_recorder: reader.is_set("flight-recorder")?,
        logs: logs(reader)?,
        program: defaults.program,
        interpreter: None,
    })
}

/// Checks the values of flags that have no effect, so that a mistake in them is still reported.
fn check_ignored(reader: &Reader<'_>, several_nodes: bool) -> Result<(), String> {
    reader.parsed("logs-specs", values::logs_specs)?;
    reader.parsed("monitor-interval", values::seconds)?;
    reader.parsed("start-method", values::start_method)?;
    reader.parsed("event-log-handler", text)?;
    if !several_nodes && let Some(conf) = reader.sourced("rdzv-conf", values::pairs)? {
        group::check_conf(&conf)?;
    }
    Ok(())
}

/// Returns the program that each worker runs.
fn program(reader: &Reader<'_>, target: &[OsString], is_program: bool) -> Result<Program, String> {
    let (is_module, no_python) = (reader.is_set("module")?, reader.is_set("no-python")?);
    let first = target.first().cloned().unwrap_or_default();
    Ok(match (reader.is_set("run-path")?, is_module) {
        // As in torchrun, --run-path takes precedence.
        (true, _) => Program::RunPath(first),
        (false, true) if no_python => return Err("--no-python and --module cannot be combined".into()),
        (false, true) => Program::Module(first),
        (false, false) if no_python || is_program => Program::Binary(first),
        (false, false) => Program::Script(first),
    })
}

/// Returns run id, `MASTER_ADDR` and `MASTER_PORT`. With one node, the rendezvous endpoint only sets the address at
/// which the workers connect, whatever the backend.
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
    // As in torchrun.
    let dir = reader.raw("log-dir").filter(|dir| !dir.is_empty());
    Ok(LogOptions {
        dir: dir.map(PathBuf::from),
        redirects: reader.parsed("redirects", values::streams)?.unwrap_or_default(),
        tee: reader.parsed("tee", values::streams)?.unwrap_or_default(),
        shown: reader.parsed("local-ranks-filter", shown)?.flatten(),
        stdout_filters: reader.parsed("duplicate-stdout-filters", values::words)?.unwrap_or_default(),
        stderr_filters: reader.parsed("duplicate-stderr-filters", values::words)?.unwrap_or_default(),
        prefix,
        rotate_bytes: reader.parsed("log-rotate", bench::bytes)?,
    })
}

/// Parses the ranks whose output is shown. An empty text, torchrun's default, means all: `None`.
fn shown(text: &str) -> Result<Option<BTreeSet<u32>>, String> {
    if text.is_empty() { Ok(None) } else { values::ranks(text).map(Some) }
}

fn text(text: &str) -> Result<String, String> {
    Ok(text.into())
}
