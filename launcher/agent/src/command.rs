//! A command as the agent runs it: the [`CommandSpec`] of the command line, resolved on this node.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::time::Duration;

use xlaunch_proto::exit::ExitCode;

use crate::Refusal;
use crate::devices::Node;
use crate::python;

pub use crate::python::Environment;
pub use xlaunch_proto::command::{
    Binding, CommandSpec, LogOptions, Nproc, PerRank, Program, Signal, Streams, quote_line,
};

/// A [`CommandSpec`] with everything filled in that depends on the node. Fields are as documented there.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "documented in CommandSpec")]
pub struct ResolvedCommand {
    /// Name of its runs, in directories and in `xlaunch status`.
    pub name: String,
    /// Program and arguments of every worker.
    pub argv: Vec<OsString>,
    pub role: String,
    pub run_id: Option<String>,
    /// Workers on this node.
    pub nproc: u32,
    pub master_addr: String,
    pub master_port: Option<u16>,
    pub virtual_local_rank: bool,
    pub binding: Option<Binding>,
    pub restarts: Restarts,
    pub shutdown_timeout: Duration,
    pub signals: Vec<Signal>,
    pub propagate_exit_code: bool,
    pub stall_timeout: Duration,
    pub logs: LogOptions,
}

/// Which failures lead to a restart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restarts {
    /// Maximum number of restarts.
    pub most: u32,
    /// Exit codes after which there is none.
    pub not_after: BTreeSet<i32>,
}

/// Resolves a command in this environment. `node` is called only if the number of workers depends on it, as counting
/// GPUs takes a while.
///
/// # Errors
/// Usage: there is no Python interpreter, or there are too few GPUs.
pub fn resolve(
    spec: CommandSpec,
    environment: Environment<'_>,
    node: &dyn Fn() -> Node,
) -> Result<ResolvedCommand, Refusal> {
    let usage = |message: String| Refusal::new(ExitCode::Usage, message);
    let name = spec.name();
    let argv = python::argv(spec.program, spec.arguments, environment).map_err(usage)?;
    let nproc = match spec.nproc {
        Nproc::Count(count) => count,
        counted => {
            let node = node();
            let cores = u32::try_from(node.cores).unwrap_or(u32::MAX);
            counted.resolve(&node.gpus, cores).map_err(usage)?
        }
    };
    if spec.virtual_local_rank {
        check_visible_gpus(nproc, environment).map_err(usage)?;
    }
    Ok(ResolvedCommand {
        name,
        argv,
        role: spec.role,
        run_id: spec.run_id,
        nproc,
        master_addr: spec.master_addr,
        master_port: spec.master_port,
        virtual_local_rank: spec.virtual_local_rank,
        binding: spec.binding,
        restarts: Restarts { most: spec.max_restarts, not_after: spec.no_restart_codes },
        shutdown_timeout: spec.shutdown_timeout,
        signals: spec.signals,
        propagate_exit_code: spec.propagate_exit_code,
        stall_timeout: spec.stall_timeout,
        logs: spec.logs,
    })
}

/// With `--virtual-local-rank` each worker gets one entry of `CUDA_VISIBLE_DEVICES`, so the list must be long enough.
fn check_visible_gpus(nproc: u32, environment: Environment<'_>) -> Result<(), String> {
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

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A launch of one `true`, for tests of what launches have in common.
    pub fn spec(name: &str) -> ResolvedCommand {
        let spec = CommandSpec::new(Program::Binary("true".into()), Vec::new());
        let resolved = resolve(spec, &|_| None, &|| unreachable!("one worker depends on no node")).unwrap();
        ResolvedCommand { name: name.into(), ..resolved }
    }

    #[test]
    fn workers_are_counted_on_the_node_only_if_needed() {
        let resolved = |nproc, node: &dyn Fn() -> Node| {
            let spec = CommandSpec { nproc, ..CommandSpec::new(Program::Binary("a".into()), Vec::new()) };
            resolve(spec, &|_| None, node).map(|resolved| resolved.nproc).map_err(|refusal| refusal.message)
        };
        let node = |gpus: Result<u32, String>| move || Node { gpus: gpus.clone(), cores: 12 };
        assert_eq!(resolved(Nproc::Count(3), &|| unreachable!()), Ok(3));
        assert_eq!(resolved(Nproc::Auto, &node(Ok(4))), Ok(4));
        assert_eq!(resolved(Nproc::Cpu, &node(Ok(4))), Ok(12));
        let refusal = resolved(Nproc::Gpu, &node(Err("no NVML".into()))).unwrap_err();
        assert_eq!(refusal, "--nproc-per-node gpu: no GPU was found: no NVML");
    }

    #[test]
    fn virtual_local_rank_needs_one_visible_gpu_per_worker() {
        let resolved = |visible: Option<&str>| {
            let mut spec = CommandSpec::new(Program::Binary("a".into()), Vec::new());
            (spec.virtual_local_rank, spec.nproc) = (true, Nproc::Count(2));
            let find = |name: &str| visible.filter(|_| name == "CUDA_VISIBLE_DEVICES").map(OsString::from);
            resolve(spec, &find, &|| unreachable!()).map(|_| ()).map_err(|refusal| refusal.message)
        };
        assert!([None, Some("3,1"), Some("0,1,2")].into_iter().all(|visible| resolved(visible).is_ok()));
        let refusal = "--virtual-local-rank: 2 workers need a GPU each, but CUDA_VISIBLE_DEVICES=1, has 1";
        assert_eq!(resolved(Some("1,")), Err(refusal.into()));
    }
}
