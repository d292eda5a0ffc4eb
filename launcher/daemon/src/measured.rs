//! What a job has used, as systemd or the job's agent has measured it.

use serde::{Deserialize, Serialize};

/// What a job has used, over all its processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub cpu_ms: u64,
    pub peak_memory_bytes: u64,
}
