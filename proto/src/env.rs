//! Names of environment variables: those that the agent sets for workers in addition to torchrun's variables, and those
//! that users set for workers.

/// Set by the agent: descriptor of the file in which the training thread records its activity. See
/// [`activity`](crate::activity).
pub const ACTIVITY_FD: &str = "XLAUNCH_ACTIVITY_FD";
/// Set by the agent of a job on several nodes: the IP address at which other nodes reach this one.
pub const ADVERTISED_ADDRESS: &str = "XLAUNCH_ADVERTISED_ADDRESS";
/// Set by the agent: path of its unix socket.
pub const AGENT_SOCKET: &str = "XLAUNCH_AGENT_SOCKET";
/// Set by the agent: the attempt, which is the number of restarts so far.
pub const ATTEMPT: &str = "XLAUNCH_ATTEMPT";
/// Set by the agent: the worker's device, `cpu` or `cuda:N` with the CUDA ordinal N within the worker's process.
pub const DEVICE: &str = "XLAUNCH_DEVICE";
/// Set by users: the fail points of tests, in builds with the feature `fail` only.
pub const FAIL: &str = "XLAUNCH_FAIL";
/// Set by the agent: the heartbeat file of a command's rank. A touch, or a step number written to it, is a heartbeat.
pub const HEARTBEAT: &str = "XLAUNCH_HEARTBEAT";
/// Set by the agent: the job's id.
pub const JOB_ID: &str = "XLAUNCH_JOB_ID";
/// Set by users: `1` makes workers print to stderr which variant was selected for each GPU operation, and why.
pub const LOG_FALLBACK: &str = "XLAUNCH_LOG_FALLBACK";
/// Set by users: a byte such as `0xff` turns on the pool's debug mode, which fills new buffers with it.
pub const POOL_DEBUG: &str = "XLAUNCH_POOL_DEBUG";
/// Set by users: a directory for a trace of the pool's requests during the first step.
pub const POOL_TRACE: &str = "XLAUNCH_POOL_TRACE";
/// Set by users: the number of a step, from 1, whose kernels are timed. The table is printed to stderr.
pub const PROFILE: &str = "XLAUNCH_PROFILE";
/// Set by the agent: an id of this launch that is unique on the host, and the ids of the worker's job and step. All
/// descendants of workers inherit it, which is how the agent finds them when it cleans up. Jobs that they submit
/// inherit it, too, but have other ids.
pub const SCOPE: &str = "XLAUNCH_SCOPE";
/// Set by users: the token that clients of `xlaunch serve` need. A secret.
pub const SERVE_TOKEN: &str = "XLAUNCH_SERVE_TOKEN";
/// Set by the agent: the worker's descriptors for memory snapshots, as `N,M`. Not set without them.
pub const SNAPSHOT_FDS: &str = "XLAUNCH_SNAPSHOT_FDS";
/// Set by users: the token of a job on several nodes. A secret: never in a worker's environment.
pub const TOKEN: &str = "XLAUNCH_TOKEN";
/// Read by the agent: a program to start in place of `xlaunch worker`. For tests of the launcher.
pub const WORKER_PROGRAM: &str = "XLAUNCH_WORKER_PROGRAM";
/// Set by the agent of a job whose nodes do not share the directory of the run: ranks below this number see the
/// directory of rank 0. Not set if all ranks do.
pub const WRITERS: &str = "XLAUNCH_WRITERS";
/// First job of the job's array.
pub const ARRAY_JOB: &str = "XLAUNCH_ARRAY_JOB";
/// Index of the job in its array.
pub const ARRAY_INDEX: &str = "XLAUNCH_ARRAY_INDEX";
