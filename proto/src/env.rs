//! Environment variables that the agent sets for a worker beside torchrun's own.

/// Path of the agent's unix socket.
pub const AGENT_SOCKET: &str = "XLAUNCH_AGENT_SOCKET";
/// Number of this start of the group, from 0.
pub const ATTEMPT: &str = "XLAUNCH_ATTEMPT";
/// Where this worker computes: `cpu`, or `cuda:N` with N the device number within this process.
pub const DEVICE: &str = "XLAUNCH_DEVICE";
/// Id of the job.
pub const JOB_ID: &str = "XLAUNCH_JOB_ID";
/// Read by the agent: a program to start instead of `xlaunch worker`. For tests of the launcher.
pub const WORKER_PROGRAM: &str = "XLAUNCH_WORKER_PROGRAM";
