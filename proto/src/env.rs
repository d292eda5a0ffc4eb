//! Environment variables that the agent sets for a worker beside torchrun's own.

/// Path of the agent's unix socket.
pub const AGENT_SOCKET: &str = "XLAUNCH_AGENT_SOCKET";
/// Number of this start of the group, from 0.
pub const ATTEMPT: &str = "XLAUNCH_ATTEMPT";
/// Where this worker computes: `cpu`, or `cuda:N` with N the device number within this process.
pub const DEVICE: &str = "XLAUNCH_DEVICE";
/// Id of the job.
pub const JOB_ID: &str = "XLAUNCH_JOB_ID";
/// Read by workers, set by users: 1 to say on stderr which of several ways each GPU operation went, and why.
pub const LOG_FALLBACK: &str = "XLAUNCH_LOG_FALLBACK";
/// Read by workers, set by users: a byte such as `0xff` that turns on the pool's debug mode and fills new buffers.
pub const POOL_DEBUG: &str = "XLAUNCH_POOL_DEBUG";
/// Read by workers, set by users: a directory for what the pool did in the first step.
pub const POOL_TRACE: &str = "XLAUNCH_POOL_TRACE";
/// Read by workers, set by users: the number of a step whose kernels are timed; the table goes to stderr.
pub const PROFILE: &str = "XLAUNCH_PROFILE";
/// Which launch a process belongs to, and no other on this host: workers pass it on to all that they start.
pub const SCOPE: &str = "XLAUNCH_SCOPE";
/// Read by the agent: a program to start instead of `xlaunch worker`. For tests of the launcher.
pub const WORKER_PROGRAM: &str = "XLAUNCH_WORKER_PROGRAM";
