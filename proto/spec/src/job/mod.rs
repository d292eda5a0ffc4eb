//! The job description, in the form shared by `train.toml`, the wire and checkpoints.
//!
//! The launcher reads it from TOML, applies the layers (file, environment, flags) and checks it with
//! [`JobSpec::check`]; workers receive it as JSON. The rendezvous compares the ranks' [`digest`](JobSpec::digest)s.
//!
//! Each longer section of `train.toml` has a file. Doc comments of its fields and variants are user documentation: the
//! JSON schema and the configuration reference contain them, next to each key's type and default. So they are plain
//! text without links, for a reader who knows PyTorch.

mod check;
mod checkpoint;
mod comm;
mod data;
mod data_source;
mod dpo;
mod engine;
mod launch;
mod lora;
mod one_or_more;
mod optimizer;
mod sizes;
mod train;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::ids::Digest;
pub use crate::invalid::Invalid;
use crate::model::ModelSection;
pub use checkpoint::{CheckpointSection, MemorySnapshots, OnSaveError};
pub use comm::{CommSection, EQUAL_SHARDS, Shard, WireDtype};
pub use data::{DataSection, DocumentMode, Tokenizer};
pub use data_source::DataSource;
pub use dpo::DpoSection;
pub use engine::{Device, EngineSection, Exec, PoolMode, Precision};
pub use launch::{DoctorMode, LaunchSection, OnHang};
pub use lora::{Layer, LoraSection, MAX_LORA_RANK, Module};
pub use optimizer::{AdjustLr, LrScaleSection, MuonSection, Optimizer, Owners};
pub use train::{NonFinite, Recompute, Schedule, TrainSection};

/// Version of the serialised form.
pub const SPEC_VERSION: u32 = 1;

/// Old and new dotted paths of renamed keys. Configuration loaders accept the old path for one release, with a warning.
/// A key cannot move to another section.
pub const RENAMED_KEYS: &[(&str, &str)] =
    &[("launch.stall_timeout", "launch.hang_timeout"), ("comm.shard_optimizer", "comm.shard")];

/// Pairs of keys of which one replaces the other: only one may be set in the same place.
pub const ALTERNATIVE_KEYS: &[(&str, &str)] = &[("train.steps", "train.epochs")];

/// A training job. Every key of `train.toml` has a default, and unknown keys are refused.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
#[expect(missing_docs, reason = "each section has its own documentation")]
pub struct JobSpec {
    pub job: JobSection,
    pub launch: LaunchSection,
    pub model: ModelSection,
    pub data: DataSection,
    pub train: TrainSection,
    pub muon: MuonSection,
    pub lr_scale: LrScaleSection,
    pub lora: LoraSection,
    pub dpo: DpoSection,
    pub comm: CommSection,
    pub engine: EngineSection,
    pub checkpoint: CheckpointSection,
    pub observe: ObserveSection,
}

/// The job's name, seed and output directory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct JobSection {
    /// Name of the job in status, logs and the run's directory, without `/`. Default: the name of the configuration
    /// file without its extension.
    pub name: String,
    /// Seed of the initial weights, the data order and text sampling. Runs with the same seed and configuration see the
    /// same data in the same order.
    pub seed: u64,
    /// Directory of runs, relative to the working directory. Each run creates `<output>/<name>/<run>` for its
    /// checkpoints, metrics and logs.
    pub output: String,
}

impl Default for JobSection {
    fn default() -> Self {
        Self { name: String::new(), seed: 1337, output: "runs".into() }
    }
}

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
    /// checkpoint is saved. A sharded optimizer hides most differences, as the owner of a weight overwrites it on the
    /// other ranks in every step. 0 turns this off.
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

impl JobSpec {
    /// Directory of all runs of the job.
    pub fn runs_dir(&self) -> PathBuf {
        Path::new(&self.job.output).join(&self.job.name)
    }

    /// Returns the hash that the rendezvous compares. Equal descriptions have equal digests. The number of workers and
    /// their devices, in which nodes may differ, are not included.
    pub fn digest(&self) -> Digest {
        let mut common = self.clone();
        (common.launch.nproc, common.launch.devices) = (None, Vec::new());
        Digest::of(&common.to_json())
    }

    /// Returns the values that the [`digest`](Self::digest) depends on, as JSON, each with its key, such as `train.lr`.
    pub fn values(&self) -> Vec<(String, String)> {
        let mut common = self.clone();
        (common.launch.nproc, common.launch.devices) = (None, Vec::new());
        let Ok(serde_json::Value::Object(sections)) = serde_json::to_value(&common) else {
            return Vec::new();
        };
        let keys = sections.into_iter().flat_map(|(section, value)| match value {
            serde_json::Value::Object(keys) => {
                let named = |(key, value): (String, serde_json::Value)| {
                    (format!("{section}.{key}"), value.to_string())
                };
                keys.into_iter().map(named).collect()
            }
            value => vec![(section, value.to_string())],
        });
        keys.collect()
    }

    /// Returns the serialised form that workers receive.
    pub fn to_json(&self) -> Vec<u8> {
        // Structs of numbers, strings and lists: serialisation cannot fail.
        serde_json::to_vec(&Versioned { version: SPEC_VERSION, spec: self.clone() }).unwrap_or_default()
    }

    /// Parses the form of [`to_json`](Self::to_json) and checks the result.
    pub fn from_json(json: &[u8]) -> Result<Self, SpecError> {
        // The version is read first, because the rest of another version may have any form.
        let Header { version } = serde_json::from_slice(json)?;
        if version != SPEC_VERSION {
            return Err(SpecError::Version(version));
        }
        let Versioned { spec, .. } = serde_json::from_slice(json)?;
        spec.check()?;
        Ok(spec)
    }
}

/// Why a job description cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The text is not a job description in JSON.
    #[error("invalid job description: {0}")]
    Json(#[from] serde_json::Error),
    /// The description was written by another version of xlaunch.
    #[error("job description has version {0}, but this build reads version {SPEC_VERSION}")]
    Version(u32),
    /// A value that cannot work.
    #[error(transparent)]
    Invalid(#[from] Invalid),
}

#[derive(Deserialize)]
struct Header {
    version: u32,
}

#[derive(Serialize, Deserialize)]
struct Versioned {
    version: u32,
    spec: JobSpec,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_and_round_trip_through_json() {
        let spec = JobSpec::default();
        spec.check().unwrap();
        assert_eq!(JobSpec::from_json(&spec.to_json()).unwrap(), spec);
    }

    #[test]
    fn digest_depends_on_every_value_that_nodes_share() {
        let mut other = JobSpec::default();
        other.train.lr *= 1.000_001;
        assert_ne!(JobSpec::default().digest(), other.digest());
        let mut node = JobSpec::default();
        (node.launch.nproc, node.launch.devices) = (Some(2), vec!["1".into()]);
        assert_eq!(JobSpec::default().digest(), node.digest());
    }

    #[test]
    fn epochs_are_rounded_up_to_whole_steps_that_follow_those_already_made() {
        let steps = |epochs, rows, batch, step, used| {
            let mut train = TrainSection { epochs: Some(epochs), batch, ..TrainSection::default() };
            train.count_steps(rows, 1, step, used);
            train.steps
        };
        assert_eq!([steps(1.0, 10, 4, 0, 0), steps(2.0, 10, 4, 0, 0), steps(0.5, 10, 4, 0, 0)], [3, 5, 2]);
        assert_eq!(steps(0.01, 10, 4, 0, 0), 1);
        // 0.07 * 100 is 7.000000000000001.
        assert_eq!(steps(0.07, 100, 7, 0, 0), 1);
        // The same batch: as many as without a break. Another batch: the rest of the sequences.
        assert_eq!((steps(2.0, 10, 4, 3, 12), steps(2.0, 10, 8, 3, 12)), (5, 4));
        assert_eq!((steps(2.0, 10, 4, 5, 20), steps(1.0, 10, 4, 5, 20)), (5, 5));
        let mut fixed = TrainSection::default();
        fixed.count_steps(10, 4, 0, 0);
        assert_eq!(fixed.steps, TrainSection::default().steps);
        let mut divided =
            TrainSection { epochs: Some(3.0), batch: 2, accumulate: 3, ..TrainSection::default() };
        divided.count_steps(100, 5, 0, 0);
        assert_eq!(divided.steps, 10);
    }

    #[test]
    fn default_decay_is_a_fifth_of_the_steps_and_starts_after_the_warm_up() {
        let decay = |steps, warmup| {
            let train = TrainSection { steps, warmup: Some(warmup), ..TrainSection::default() };
            train.decay_steps()
        };
        assert_eq!((decay(1000, 10), decay(1000, 900), decay(1, 1)), (200, 100, 0));
    }

    #[test]
    fn unknown_version_is_refused() {
        let json = br#"{"version":9,"spec":{"a_later_section":{}}}"#;
        assert!(matches!(JobSpec::from_json(json), Err(SpecError::Version(9))));
    }
}
