//! Detects the engine that started this launch on several nodes: Slurm, Kubernetes, `mpirun`, LSF or PBS. A pure
//! function of the environment, the host's name and the host files that the environment names.
//!
//! ```text
//! variables, host file, host name --detect--> Allocation --torchrun/group (flags and PET_* first)--> GroupSpec
//! ```
//! Invariants:
//! - a value that the engine does not provide is absent from its allocation, never guessed; without flags, a launch
//!   spans several nodes only if the engine knows their number;
//! - if an engine's variables exist but are unusable, the error says what to do; the job never falls back to one node;
//! - all nodes of a job derive the same first host, ports and run id;
//! - the size of the engine's texts is checked before anything is allocated for them.

mod host_files;
mod hostlist;
mod slurm;

pub(super) use slurm::SLURM;

use std::ffi::OsString;
use std::io::Read;
use std::path::Path;
use std::str::FromStr;

use xlaunch_host::devices::host_name;
use xlaunch_host::spawn::run_of;
use xlaunch_spec::command::{MAX_ENDPOINT_PORTS, MAX_NODES};

/// Maximum size of a list of hosts, in a variable or a file.
const MAX_HOSTS_BYTES: usize = 1 << 20;
/// Range of the ports derived from a job's id: below the ephemeral ports of Linux.
const PORTS: std::ops::Range<u64> = 20_000..30_000;
const MPIRUN: &str = "mpirun";
const KUBERNETES: &str = "Kubernetes";
/// Socket of munged.
pub(super) const MUNGE_SOCKET: &str = "/run/munge/munge.socket.2";

/// The properties of this process and host that detection reads.
pub(super) struct Host<'a> {
    pub(super) environment: &'a dyn Fn(&str) -> Option<OsString>,
    /// Reads a host file.
    pub(super) read: &'a dyn Fn(&Path) -> Result<String, String>,
    pub(super) name: &'a str,
    /// True if munged runs on this host.
    pub(super) munge: bool,
    /// The step of Slurm that has started this process, if known.
    pub(super) slurm_step: Option<&'a str>,
}

/// A value with its source: `--nnodes 2`, `PET_NNODES=2`, `SLURM_STEP_NUM_NODES=2`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sourced<T> {
    pub(super) value: T,
    pub(super) source: String,
}

impl<T> Sourced<T> {
    /// Converts the value and keeps the source.
    pub(super) fn map<U>(&self, change: impl FnOnce(&T) -> U) -> Sourced<U> {
        Sourced { value: change(&self.value), source: self.source.clone() }
    }
}

/// The place of this launch in an engine's allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Allocation {
    pub(super) engine: &'static str,
    /// The variables that were used.
    pub(super) variables: Vec<(&'static str, String)>,
    pub(super) nodes: Option<Sourced<u32>>,
    pub(super) node_rank: Option<Sourced<u32>>,
    /// The host of node rank 0, and the ports to try there.
    pub(super) endpoint: Option<Sourced<(String, Vec<u16>)>>,
    pub(super) run_id: Option<Sourced<String>>,
    /// True if munge can replace a token.
    pub(super) munge: bool,
}

impl Allocation {
    /// Returns whether SIGTERM to one of the launches means that the engine removes its node and will start it again.
    pub(super) fn preempts_by_sigterm(&self) -> bool {
        self.engine == KUBERNETES
    }
}

/// Detects the engine of this process.
pub(super) fn of_this_process() -> Result<Option<Allocation>, String> {
    detect(&Host {
        environment: &|name| std::env::var_os(name),
        read: &read_hosts,
        name: &host_name(),
        munge: Path::new(MUNGE_SOCKET).exists(),
        slurm_step: slurm::step_of_this_process().as_deref(),
    })
}

/// Detects the engine; `None` if there is none.
///
/// # Errors
/// There is an engine, but its variables do not place this launch. The message says why, and what to do.
pub(super) fn detect(host: &Host<'_>) -> Result<Option<Allocation>, String> {
    // A launch in a worker of another launch inherits the variables of an engine that did not start it, unless the
    // worker has started it as another job or step.
    if run_of(host.environment).is_some() {
        return Ok(None);
    }
    if let Some(mpi) = mpirun(host)? {
        // mpirun knows the number of nodes and the rank; the host file of the engine around it has the host names.
        let files = [host_files::lsf(host)?, host_files::pbs(host)?].into_iter().flatten().next();
        let same = |files: &Allocation| counts(files) == counts(&mpi);
        return Ok(Some(files.filter(same).unwrap_or(mpi)));
    }
    for engine in [slurm::detect, host_files::lsf, host_files::pbs, hydra, kubernetes] {
        if let Some(found) = engine(host)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Open MPI's `mpirun`: the rank of this process, one per node. There is no list of hosts, so a flag gives the address
/// of the coordinator.
fn mpirun(host: &Host<'_>) -> Result<Option<Allocation>, String> {
    let Some(nodes) = host.number::<u32>("OMPI_COMM_WORLD_SIZE")? else { return Ok(None) };
    let rank = match host.number("OMPI_COMM_WORLD_RANK")? {
        None => host.required("PMIX_RANK", MPIRUN)?,
        Some(rank) => rank,
    };
    let variables =
        ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_RANK"];
    of_mpi(host, nodes, rank, "OMPI_COMM_WORLD_LOCAL_SIZE", "mpirun -npernode 1", &variables).map(Some)
}

/// Hydra, the `mpirun` of MPICH and Intel MPI. Under Slurm, LSF and PBS its processes have the variables of the engine,
/// which also names the hosts. Slurm sets `PMI_SIZE` too, for programs that use its PMI.
fn hydra(host: &Host<'_>) -> Result<Option<Allocation>, String> {
    let variables = ["PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"];
    let is_started = host.text("MPI_LOCALNRANKS")?.is_some();
    let Some(nodes) = host.number("PMI_SIZE")?.filter(|_| is_started) else { return Ok(None) };
    let rank = host.required("PMI_RANK", MPIRUN)?;
    of_mpi(host, nodes, rank, "MPI_LOCALNRANKS", "mpirun -ppn 1", &variables).map(Some)
}

/// Builds the allocation of an MPI process. There must be one per node.
fn of_mpi(
    host: &Host<'_>,
    nodes: Sourced<u32>,
    rank: Sourced<u32>,
    local_size: &str,
    one_per_node: &str,
    variables: &[&'static str],
) -> Result<Allocation, String> {
    check_place(&nodes, &rank)?;
    if let Some(local) = host.number::<u32>(local_size)?.filter(|local| local.value > 1) {
        return Err(format!(
            "mpirun has started several processes on this host ({}), but one launch starts all workers of a node: use \
             `{one_per_node} xlaunch ...` and --nproc-per-node",
            local.source
        ));
    }
    Ok(Allocation {
        engine: MPIRUN,
        variables: host.variables(variables),
        nodes: Some(nodes),
        node_rank: Some(rank),
        endpoint: None,
        run_id: None,
        munge: false,
    })
}

/// Kubernetes: the index of this pod in its Indexed Job. No variable has the number of pods or the address of the first
/// one, so the manifest sets them, as flags or as `PET_NNODES` and `PET_RDZV_ENDPOINT`. Kubeflow Trainer sets `PET_*`
/// itself.
fn kubernetes(host: &Host<'_>) -> Result<Option<Allocation>, String> {
    Ok(host.number("JOB_COMPLETION_INDEX")?.map(|index| Allocation {
        engine: KUBERNETES,
        variables: host.variables(&["JOB_COMPLETION_INDEX"]),
        nodes: None,
        node_rank: Some(index),
        endpoint: None,
        run_id: None,
        munge: false,
    }))
}

fn counts(allocation: &Allocation) -> Option<u32> {
    allocation.nodes.as_ref().map(|nodes| nodes.value)
}

/// Returns the ports for a job's coordinator, which listens on the first free one. They are the same on all nodes of a
/// job, and differ between jobs that share a host.
fn ports(job: &str) -> Vec<u16> {
    // FNV-1a, then splitmix64 for each port.
    let seed = job.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mut ports = Vec::with_capacity(MAX_ENDPOINT_PORTS);
    let mut state = seed;
    while ports.len() < MAX_ENDPOINT_PORTS {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let port = PORTS.start + (mixed ^ (mixed >> 31)) % (PORTS.end - PORTS.start);
        // The range ends below 2^16.
        let port = u16::try_from(port).unwrap_or(u16::MAX);
        if !ports.contains(&port) {
            ports.push(port);
        }
    }
    ports
}

fn read_hosts(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    let limit = MAX_HOSTS_BYTES as u64 + 1;
    let file = fs_err::File::open(path).map_err(|error| error.to_string())?;
    file.take(limit).read_to_string(&mut text).map_err(|error| format!("{}: {error}", path.display()))?;
    if text.len() > MAX_HOSTS_BYTES {
        Err(format!("{} is longer than {MAX_HOSTS_BYTES} bytes", path.display()))
    } else {
        Ok(text)
    }
}

impl Host<'_> {
    /// Returns the value of a variable. An empty one counts as unset.
    fn text(&self, name: &str) -> Result<Option<String>, String> {
        let value = (self.environment)(name).filter(|value| !value.is_empty());
        value.map(|value| value.into_string().map_err(|_| format!("{name}: expected UTF-8"))).transpose()
    }

    fn number<T: FromStr>(&self, name: &str) -> Result<Option<Sourced<T>>, String> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        let source = format!("{name}={text}");
        let value = text.trim().parse().map_err(|_| format!("{source}: expected a whole number"))?;
        Ok(Some(Sourced { value, source }))
    }

    /// Returns the value of a variable that the engine must set; otherwise an error says what is missing.
    fn required<T: FromStr>(&self, name: &str, engine: &str) -> Result<Sourced<T>, String> {
        self.number(name)?.ok_or_else(|| {
            format!(
                "{engine}: {name} is not set, so this node's place in the job is unknown; pass the variables of the \
                 cluster environment on, or give --nnodes, --node-rank and --rdzv-endpoint"
            )
        })
    }

    /// Returns the variables among `names` that are set.
    fn variables(&self, names: &[&'static str]) -> Vec<(&'static str, String)> {
        let value = |name| (self.environment)(name).filter(|value| !value.is_empty());
        names
            .iter()
            .filter_map(|&name| value(name).map(|value| (name, value.to_string_lossy().into_owned())))
            .collect()
    }
}

/// Checks that this node's rank is below the number of nodes.
fn check_place(nodes: &Sourced<u32>, rank: &Sourced<u32>) -> Result<(), String> {
    let count = nodes.value;
    if count == 0 || count > MAX_NODES {
        return Err(format!("{}: expected 1 to {MAX_NODES} nodes", nodes.source));
    }
    if rank.value >= count {
        return Err(format!(
            "{} is outside the range: {} means ranks below {count}",
            rank.source, nodes.source
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
