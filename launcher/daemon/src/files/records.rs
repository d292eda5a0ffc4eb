//! The contents of the files: what the daemon tells an agent, what an agent reports, and what the daemon notes for its
//! successor.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use xlaunch_host::process::Process;
use xlaunch_proto::convert::node::Work;

/// Version of the files that daemon and agent exchange. Since 2, a command is a `CommandSpec` instead of a command
/// line. Since 3, the agent waits for its description and does not run in the job's environment.
pub const PROTOCOL: u32 = 3;
/// Name of the file with the agent's last `StatusReply`.
pub const STATUS: &str = "status.pb";
/// Name of the file with the [`JobResult`](crate::state::JobResult).
pub const RESULT: &str = "result.json";

/// Describes a job to its agent, which reads this from standard input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Description {
    pub protocol: u32,
    pub job: u64,
    pub name: String,
    pub work_dir: PathBuf,
    /// Mask of permissions for new files; `None` for submissions of version 0.3 and before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub umask: Option<u32>,
    /// Variables as `NAME=VALUE`, not necessarily UTF-8.
    pub environment: Vec<Vec<u8>>,
    pub work: Work,
    pub workers: u32,
    /// Number of the start, counted from 1; 0 in `job.json`.
    pub start: u32,
    /// UUIDs of the GPUs that the job holds; empty for a CPU job and in `job.json`.
    pub gpus: Vec<String>,
    /// True if an earlier start was lost, so that training continues from its newest checkpoint.
    #[serde(default)]
    pub requeued: bool,
    /// Maximum output kept of each stream of each worker of a command, in bytes. `None` for the agent's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_output: Option<u64>,
}

/// Record of a start's agent, written by the daemon that started it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentRecord {
    /// Number of the start, counted from 1.
    pub start: u32,
    /// `None` if the agent runs in a systemd unit.
    pub process: Option<ProcessId>,
    /// Name of the job's user.
    #[serde(default)]
    pub user: String,
    /// UUIDs of the GPUs that the job holds.
    #[serde(default)]
    pub gpus: Vec<String>,
    /// [`boot_id`](crate::boot_id) at the start; empty in records of version 0.2.
    #[serde(default)]
    pub boot: String,
    /// Start time, in milliseconds on the node's clock.
    #[serde(default)]
    pub at: u64,
}

/// Identifies a process. A process id alone is not enough, as it may be reused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    pub pid: u32,
    /// Start time in clock ticks since boot.
    pub started: u64,
    /// [`boot_id`](crate::boot_id) at the start of the process.
    pub boot: String,
}

impl ProcessId {
    /// Returns the user and group of the process, if it runs.
    pub(super) fn owner(&self) -> Option<(u32, u32)> {
        let found = fs_err::metadata(format!("/proc/{}", self.pid)).ok()?;
        let process = Process::read(self.pid)?;
        let is_same = self.boot == crate::boot_id() && process.started == self.started && !process.ended();
        is_same.then(|| (found.uid(), found.gid()))
    }
}
