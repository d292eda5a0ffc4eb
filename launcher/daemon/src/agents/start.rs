//! Processes that the daemon starts, detached or as systemd units: agents of jobs, examinations of GPUs, and hooks.

use std::fs::DirBuilder;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::facts::Facts;
use crate::files::StartOptions;

const PATH: &str = "/usr/local/bin:/usr/bin:/bin";
/// Variables of the daemon that are passed to agents: the operator's location of the driver's libraries.
const PASSED_TO_AGENTS: [&str; 1] = ["LD_LIBRARY_PATH"];
/// Arguments of the process that examines GPUs.
pub(super) const DOCTOR: [&str; 3] = ["doctor", "--json", "--while-stdin-is-open"];
/// Prefixes of the daemon's variables that are passed to that process: the operator's settings for libraries and
/// workers.
const PASSED_ON_PREFIXES: [&str; 3] = ["LD_LIBRARY_PATH", "XLAUNCH_", "NCCL_"];

/// One start of a job, and of its agent.
#[derive(Clone, Debug)]
pub(crate) struct JobStart {
    pub(crate) job: u64,
    pub(crate) start: u32,
    /// Start time, in milliseconds on the node's clock.
    pub(crate) at: u64,
    pub(crate) name: String,
    pub(crate) uid: u32,
    /// Name of the user who submitted the job; empty if unknown.
    pub(crate) user: String,
    pub(crate) options: StartOptions,
    /// Device nodes of the job's GPUs; `None` on a node without GPUs, where no devices need to be hidden from the job.
    pub(crate) gpu_nodes: Option<Vec<PathBuf>>,
    /// Longest time between the request to stop and SIGKILL of the workers.
    pub(crate) shutdown_timeout: Duration,
    /// Facts about the job that hooks get.
    pub(crate) facts: Facts,
    /// Number of cores; `None` if the job did not request any.
    pub(crate) cpus: Option<u32>,
    /// Memory limit in bytes; `None` for no limit.
    pub(crate) memory: Option<u64>,
    /// Limit on processes and threads.
    pub(crate) max_tasks: u64,
}

impl JobStart {
    /// Builds the agent's environment. The environment of the job is for its workers only.
    pub(super) fn environment(&self) -> Vec<(&'static str, String)> {
        let passed_on = PASSED_TO_AGENTS.iter().filter_map(|name| Some((*name, std::env::var(name).ok()?)));
        // For a CPU job the list is empty, which hides all GPUs: they may belong to other jobs.
        let own = [
            ("PATH", PATH.to_owned()),
            ("CUDA_VISIBLE_DEVICES", self.options.gpus.join(",")),
            ("CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned()),
        ];
        own.into_iter().chain(passed_on).collect()
    }
}

/// An examination to start.
#[derive(Clone, Debug)]
pub(crate) struct ExaminationStart {
    /// UUIDs of the GPUs.
    pub(crate) gpus: Vec<String>,
    /// Directory for the files of the process. It belongs to the daemon's user.
    pub(crate) dir: PathBuf,
    pub(crate) timeout: Duration,
}

impl ExaminationStart {
    pub(super) fn temporary(&self) -> PathBuf {
        self.dir.join("tmp")
    }

    /// Creates an empty directory that other users can neither read nor write.
    pub(super) fn prepare(&self) -> io::Result<()> {
        let temporary = self.temporary();
        match fs_err::remove_dir_all(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let create = |dir: &Path| DirBuilder::new().recursive(true).mode(0o700).create(dir);
        create(&temporary)
    }

    pub(super) fn environment(&self) -> Vec<(String, String)> {
        let is_passed_on = |name: &str| PASSED_ON_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
        let passed_on = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok().filter(|name| is_passed_on(name))?, value.into_string().ok()?))
        });
        let (temporary, cache) = (self.temporary().display().to_string(), self.dir.join("cache"));
        let own = [
            ("PATH", PATH.to_owned()),
            ("CUDA_VISIBLE_DEVICES", self.gpus.join(",")),
            ("CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned()),
            ("HOME", temporary.clone()),
            ("TMPDIR", temporary.clone()),
            ("XDG_RUNTIME_DIR", temporary),
            ("XLAUNCH_CACHE", cache.display().to_string()),
        ];
        passed_on.chain(own.map(|(name, value)| (name.to_owned(), value))).collect()
    }
}

/// The process's ends of its pipes.
pub(super) struct Stdio {
    pub(super) input: OwnedFd,
    pub(super) output: OwnedFd,
    pub(super) errors: OwnedFd,
}

/// A hook to run.
#[derive(Clone, Debug)]
pub(crate) struct HookStart {
    pub(crate) job: u64,
    /// `None` runs it as the daemon's user.
    pub(crate) uid: Option<u32>,
    pub(crate) moment: &'static str,
    pub(crate) program: PathBuf,
    pub(crate) environment: Vec<(String, String)>,
    pub(crate) timeout: Duration,
}

/// Describes a hook that was killed at its timeout, as a predicate.
pub(crate) fn took_too_long(timeout: Duration) -> String {
    format!("took longer than {} s (hooks.timeout)", timeout.as_secs())
}
