//! Resource usage of a job, measured by systemd or by the job's agent.

use serde::{Deserialize, Serialize};

/// Resource usage of a job, over all its processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub cpu_ms: u64,
    pub peak_memory_bytes: u64,
}
