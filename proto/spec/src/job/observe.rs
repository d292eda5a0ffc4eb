//! The section `[observe]`.

use serde::{Deserialize, Serialize};

/// Metrics, traces and checks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ObserveSection {
    /// Write `metrics.jsonl` to the run's directory: one JSON object per step and evaluation.
    pub metrics: bool,
    /// Write a TensorBoard event file to `tensorboard` in the run's directory.
    pub tensorboard: bool,
    /// Compare the parameters of all ranks after training, and report the largest difference, which should be 0.
    pub check_replicas: bool,
    /// Steps between comparisons of the parameters of all ranks, by a checksum that each device computes. The job fails
    /// if they differ, and the error names the ranks in the minority. Parameters are also compared before each
    /// checkpoint is saved. 0 turns this off.
    pub check_every: u64,
    /// Number of steps for which every rank writes a timeline, `trace-rank<R>.json`, to the run's directory. Open it
    /// with Perfetto. Traced steps launch operations one by one and are slower. 0 turns this off.
    pub trace: u64,
}

impl Default for ObserveSection {
    fn default() -> Self {
        Self { metrics: true, tensorboard: false, check_replicas: false, check_every: 0, trace: 0 }
    }
}
