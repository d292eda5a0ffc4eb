//! Environment variables that the agent sets for a worker beside torchrun's own.

/// Path of the agent's unix socket.
pub const AGENT_SOCKET: &str = "XLAUNCH_AGENT_SOCKET";
/// Number of this start of the group, from 0.
pub const ATTEMPT: &str = "XLAUNCH_ATTEMPT";
/// Id of the job.
pub const JOB_ID: &str = "XLAUNCH_JOB_ID";
