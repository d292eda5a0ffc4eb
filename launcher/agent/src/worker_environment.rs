//! Builds the environment of a worker: torchrun's and xlaunch's own variables, on top of a [`BaseEnvironment`].

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use xlaunch_proto::env;

use crate::base_environment::BaseEnvironment;
use crate::python::flight_recorder;
use xlaunch_cluster::Assignment;
use xlaunch_host::devices::Placement;
use xlaunch_host::libraries::Libraries;
use xlaunch_host::network::Interface;
use xlaunch_spec::command::CommandSpec;

/// Variables whose value differs between workers or attempts, in addition to `CUDA_VISIBLE_DEVICES` with virtual local
/// ranks.
const OF_ONE_WORKER: [&str; 8] = [
    "RANK",
    "LOCAL_RANK",
    "ROLE_RANK",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_ERROR_FILE",
    flight_recorder::DUMP_FILE,
    env::ATTEMPT,
];

/// Argument of `xlaunch worker` for a single process that runs all ranks of the job as threads. It gets the environment
/// of rank 0.
pub const RANK_THREADS: &str = "--rank-threads";

/// Settings that the workers of one attempt share, for workers of both kinds.
#[derive(Clone, Debug)]
pub(crate) struct Shared<'a> {
    pub(crate) base: &'a BaseEnvironment,
    /// `TORCHELASTIC_RUN_ID`: the id that the user chose for a command, or else the run's.
    pub(crate) run_id: &'a str,
    /// Socket on which the agent listens.
    pub(crate) socket: &'a Path,
    /// Attempt number, counted from 0.
    pub(crate) attempt: u32,
    pub(crate) max_restarts: u32,
    /// Number of workers on this node.
    pub(crate) workers: u32,
    pub(crate) role: &'a str,
    pub(crate) master_address: &'a str,
    /// Place of this node in the job.
    pub(crate) assignment: &'a Assignment,
}

/// Settings that the built-in trainer's workers of one attempt share.
#[derive(Clone, Debug)]
pub(crate) struct TrainerGroup<'a> {
    pub(crate) shared: Shared<'a>,
    pub(crate) placement: &'a Placement,
    /// Address at which other nodes reach this one.
    pub(crate) address: &'a str,
    /// True if a single process runs all ranks as threads.
    pub(crate) rank_threads: bool,
    /// Libraries of workers on GPUs.
    pub(crate) libraries: Option<&'a Libraries>,
}

/// Settings that a command's workers of one attempt share.
#[derive(Clone, Debug)]
pub(crate) struct CommandGroup<'a> {
    pub(crate) shared: Shared<'a>,
    pub(crate) spec: &'a CommandSpec,
    /// Network interface of this node's address, if the job may have several nodes.
    pub(crate) interface: Option<&'a Interface>,
}

/// Builds the command of one of the built-in trainer's workers. All other variables (`NCCL_*`, `NVSHMEM_*`, `TORCH_*`,
/// ...) are inherited unchanged.
pub(crate) fn trainer_command(group: &TrainerGroup<'_>, local_rank: u32) -> std::io::Result<Command> {
    let mut command = match group.shared.base.get(env::WORKER_PROGRAM) {
        Some(program) => Command::new(program),
        None => {
            let mut command = Command::new(own_program()?);
            command.arg("worker");
            command
        }
    };
    command.args(group.rank_threads.then_some(RANK_THREADS));
    group.shared.base.apply(&mut command);
    command.envs(group.libraries.into_iter().flat_map(Libraries::variables));
    command.envs(trainer_variables(group, local_rank));
    Ok(command)
}

/// Path of this program, even if its file was replaced on disk, for example by an upgrade while the job runs. A restart
/// must neither fail for that reason nor mix versions.
fn own_program() -> std::io::Result<PathBuf> {
    let path = std::env::current_exe()?;
    Ok(if path.exists() { path } else { PathBuf::from("/proc/self/exe") })
}

fn trainer_variables(group: &TrainerGroup<'_>, local_rank: u32) -> Vec<(&'static str, OsString)> {
    let device = if group.placement.cuda { format!("cuda:{local_rank}") } else { "cpu".into() };
    let Shared { base, assignment, .. } = group.shared;
    let mut all = group.shared.variables(local_rank);
    all.push(("LOCAL_RANK", local_rank.to_string().into()));
    all.push((env::DEVICE, device.into()));
    if base.get("OMP_NUM_THREADS").is_none() {
        all.push(("OMP_NUM_THREADS", group.placement.threads.to_string().into()));
    }
    if let Some(visible) = &group.placement.visible {
        all.push(("CUDA_VISIBLE_DEVICES", visible.into()));
    }
    if assignment.has_peers() {
        all.push((env::ADVERTISED_ADDRESS, group.address.into()));
        if assignment.writers < assignment.world {
            all.push((env::WRITERS, assignment.writers.to_string().into()));
        }
        return all;
    }
    // All ranks are on this node, so the loopback interface is enough for NCCL's bootstrap. By default, NCCL would
    // listen on the first other interface.
    if base.get("NCCL_SOCKET_IFNAME").is_none() {
        all.push(("NCCL_SOCKET_IFNAME", "lo".into()));
    }
    all
}

/// Returns the variables that a command's worker gets in addition to those it inherits. `dir` is the worker's directory
/// of this attempt, `threads` its share of the cores.
///
/// `TORCHELASTIC_USE_AGENT_STORE` is `False`: rank 0 hosts the store of `torch.distributed`, not the agent.
pub(crate) fn command_variables(
    group: &CommandGroup<'_>,
    local_rank: u32,
    dir: &Path,
    threads: usize,
) -> Vec<(&'static str, OsString)> {
    let (spec, inherited) = (group.spec, |name: &str| group.shared.base.get(name));
    let mut all = group.shared.variables(local_rank);
    if spec.virtual_local_rank {
        all.push(("LOCAL_RANK", "0".into()));
        all.push(("CUDA_VISIBLE_DEVICES", own_gpu(local_rank, inherited("CUDA_VISIBLE_DEVICES"))));
    } else {
        all.push(("LOCAL_RANK", local_rank.to_string().into()));
    }
    let errors = inherited("TORCH_NCCL_ASYNC_ERROR_HANDLING").unwrap_or_else(|| "1".into());
    all.push(("TORCHELASTIC_USE_AGENT_STORE", "False".into()));
    all.push(("TORCHELASTIC_ERROR_FILE", dir.join("error.json").into()));
    all.push((
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
        spec.signals.iter().map(|signal| signal.name()).collect::<Vec<_>>().join(",").into(),
    ));
    all.push(("TORCH_NCCL_ASYNC_ERROR_HANDLING", errors));
    if inherited("OMP_NUM_THREADS").is_none() {
        all.push(("OMP_NUM_THREADS", threads.to_string().into()));
    }
    // Makes Python print its stacks on SIGABRT, which is sent to hung ranks.
    if inherited("PYTHONFAULTHANDLER").is_none() {
        all.push(("PYTHONFAULTHANDLER", "1".into()));
    }
    all.extend(interface_variables(group));
    if spec.flight_recorder {
        all.extend(flight_recorder::variables(&inherited, dir, group.shared.socket));
    }
    all
}

/// Tells gloo and NCCL which network interface connects the nodes. Otherwise both search for one themselves; gloo goes
/// by the host name, which often resolves to the loopback interface.
fn interface_variables(group: &CommandGroup<'_>) -> Vec<(&'static str, OsString)> {
    let Some(interface) = group.interface.filter(|_| group.shared.assignment.has_peers()) else {
        return Vec::new();
    };
    let names: &[&'static str] = if interface.is_chosen_by_user {
        // NCCL must then use the user's choice too.
        &["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    } else {
        &["GLOO_SOCKET_IFNAME"]
    };
    let unset = names.iter().filter(|name| group.shared.base.get(name).is_none());
    unset.map(|name| (*name, interface.name.clone().into())).collect()
}

/// Returns the variables that have the same value in all of a command's workers and attempts.
pub(crate) fn common_variables(group: &CommandGroup<'_>, threads: usize) -> Vec<(&'static str, OsString)> {
    let mut all = command_variables(group, 0, Path::new(""), threads);
    all.retain(|(name, _)| !OF_ONE_WORKER.contains(name) && *name != "CUDA_VISIBLE_DEVICES");
    all
}

/// Returns this rank's entry of the inherited list. The command line refuses a list that is too short.
fn own_gpu(local_rank: u32, visible: Option<OsString>) -> OsString {
    let rank = local_rank.to_string();
    let Some(visible) = visible else { return rank.into() };
    let visible = visible.to_string_lossy();
    visible.split(',').nth(local_rank as usize).map_or(rank, |gpu| gpu.trim().to_owned()).into()
}

impl Shared<'_> {
    /// Returns all shared variables, without `LOCAL_RANK`.
    fn variables(&self, local_rank: u32) -> Vec<(&'static str, OsString)> {
        let text = |number: u32| OsString::from(number.to_string());
        let Assignment { node_rank, nodes, first_rank, world, restarts, master_port, .. } = self.assignment;
        let rank = first_rank + local_rank;
        vec![
            ("RANK", text(rank)),
            ("WORLD_SIZE", text(*world)),
            ("LOCAL_WORLD_SIZE", text(self.workers)),
            ("GROUP_RANK", text(*node_rank)),
            ("GROUP_WORLD_SIZE", text(*nodes)),
            ("ROLE_RANK", text(rank)),
            ("ROLE_NAME", self.role.into()),
            ("ROLE_WORLD_SIZE", text(*world)),
            ("MASTER_ADDR", self.master_address.into()),
            ("MASTER_PORT", master_port.to_string().into()),
            ("TORCHELASTIC_RESTART_COUNT", text(*restarts)),
            ("TORCHELASTIC_MAX_RESTARTS", text(self.max_restarts)),
            ("TORCHELASTIC_RUN_ID", self.run_id.into()),
            (env::AGENT_SOCKET, self.socket.into()),
            (env::ATTEMPT, text(self.attempt)),
            (env::JOB_ID, self.run_id.into()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::resolved_command::{self, Signal};

    fn spec() -> CommandSpec {
        CommandSpec {
            role: "trainer".into(),
            max_restarts: 3,
            signals: vec![Signal::Term, Signal::Hup],
            ..resolved_command::tests::command("train").spec
        }
    }

    /// The variables of rank 1 of 2 in the second attempt.
    fn variables(spec: &CommandSpec, inherited: &[(&str, &str)]) -> BTreeMap<&'static str, String> {
        let socket = Path::new("/run/agent.sock");
        let inherited = inherited.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        let base = &BaseEnvironment::Submitted(inherited.collect());
        let assignment =
            &Assignment { nodes: 1, world: 2, restarts: 1, master_port: 20_001, ..Assignment::default() };
        let shared = Shared {
            base,
            run_id: "id",
            socket,
            attempt: 1,
            max_restarts: spec.max_restarts,
            workers: 2,
            role: &spec.role,
            master_address: &spec.master_addr,
            assignment,
        };
        let group = CommandGroup { shared, spec, interface: None };
        let all = command_variables(&group, 1, Path::new("/logs/1"), 6);
        let count = all.len();
        let map: BTreeMap<_, _> =
            all.into_iter().map(|(name, value)| (name, value.into_string().unwrap())).collect();
        assert_eq!(map.len(), count, "a variable is set twice");
        map
    }

    #[test]
    fn command_workers_get_torchruns_variables() {
        let found = variables(&spec(), &[("CUDA_VISIBLE_DEVICES", "4,5")]);
        for (name, value) in [
            ("RANK", "1"),
            ("LOCAL_RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("ROLE_NAME", "trainer"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "20001"),
            ("TORCHELASTIC_RESTART_COUNT", "1"),
            ("TORCHELASTIC_MAX_RESTARTS", "3"),
            ("TORCHELASTIC_RUN_ID", "id"),
            ("TORCHELASTIC_USE_AGENT_STORE", "False"),
            ("TORCHELASTIC_ERROR_FILE", "/logs/1/error.json"),
            ("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGHUP"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            ("OMP_NUM_THREADS", "6"),
            ("XLAUNCH_AGENT_SOCKET", "/run/agent.sock"),
            ("XLAUNCH_JOB_ID", "id"),
            ("PYTHONFAULTHANDLER", "1"),
        ] {
            assert_eq!(found.get(name).map(String::as_str), Some(value), "{name}");
        }
        // Inherited unchanged.
        assert!(!found.contains_key("CUDA_VISIBLE_DEVICES"));
        assert!(!found.keys().any(|name| name.starts_with("TORCH_NCCL_TRACE")), "without --flight-recorder");
    }

    #[test]
    fn variables_set_by_the_user_are_kept() {
        let inherited =
            [("OMP_NUM_THREADS", "5"), ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"), ("PYTHONFAULTHANDLER", "")];
        let found = variables(&spec(), &inherited);
        assert!(!found.contains_key("OMP_NUM_THREADS") && !found.contains_key("PYTHONFAULTHANDLER"));
        assert_eq!(found["TORCH_NCCL_ASYNC_ERROR_HANDLING"], "3");
    }

    #[test]
    fn virtual_local_rank_sees_its_entry_of_the_inherited_list() {
        let spec = CommandSpec { virtual_local_rank: true, ..spec() };
        for (visible, own) in [(None, "1"), (Some("GPU-a, GPU-b"), "GPU-b"), (Some("7,3"), "3")] {
            let inherited = visible.map(|list| ("CUDA_VISIBLE_DEVICES", list));
            let found = variables(&spec, inherited.as_slice());
            assert_eq!((found["LOCAL_RANK"].as_str(), found["CUDA_VISIBLE_DEVICES"].as_str()), ("0", own));
        }
    }
}
