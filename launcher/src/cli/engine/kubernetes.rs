//! Kubernetes: the index of this pod in its Indexed Job.
//!
//! No variable has the number of pods or the address of the first one, so the manifest sets them, as flags or as
//! `PET_NNODES` and `PET_RDZV_ENDPOINT`. Kubeflow Trainer sets `PET_*` itself.

use super::{Allocation, Host};

pub(super) const NAME: &str = "Kubernetes";

pub(super) fn detect(host: &Host<'_>) -> Result<Option<Allocation>, String> {
    Ok(host.number("JOB_COMPLETION_INDEX")?.map(|index| Allocation {
        engine: NAME,
        variables: host.variables(&["JOB_COMPLETION_INDEX"]),
        nodes: None,
        node_rank: Some(index),
        endpoint: None,
        run_id: None,
        munge: false,
    }))
}
