//! The job description, in the form shared by `train.toml`, the wire and checkpoints.
//!
//! The launcher reads it from TOML, applies the layers (file, environment, flags) and checks it with
//! [`JobSpec::check`]; workers receive it as JSON. The rendezvous compares the ranks' [`digest`](JobSpec::digest)s.
//!
//! Each longer section of `train.toml` has a file. Doc comments of its fields and variants are user documentation: the
//! JSON schema and the configuration reference contain them, next to each key's type and default. So they are plain
//! text without links, for a reader who knows PyTorch.

mod checkpoint;
mod comm;
mod data;
mod data_source;
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
pub use engine::{Device, EngineSection, Exec, PoolMode, Precision};
pub use launch::{DoctorMode, LaunchSection, OnHang};
pub use lora::{Layer, LoraSection, Module};
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

    /// Checks all rules that depend only on the values, and returns the first violation.
    pub fn check(&self) -> Result<(), Invalid> {
        let train = &self.train;
        let at_least_1 = |key, value: usize| match value {
            0 => Err(Invalid::new(key, "0 is out of range".into(), "at least 1".into())),
            _ => Ok(()),
        };
        if self.launch.nproc == Some(0) {
            return Err(Invalid::new("launch.nproc", "0 is out of range".into(), "at least 1".into()));
        }
        self.job.check_name()?;
        at_least_1("train.steps", usize::try_from(train.steps).unwrap_or(usize::MAX))?;
        at_least_1("train.batch", train.batch)?;
        at_least_1("train.accumulate", train.accumulate)?;
        at_least_1("train.eval_batches", train.eval_batches)?;
        if train.patience != 0 && train.eval_every == 0 {
            return Err(Invalid::new(
                "train.patience",
                "early stopping needs evaluations, but train.eval_every = 0 turns them off".into(),
                "0, or train.eval_every of at least 1".into(),
            ));
        }
        at_least_1("data.train", self.data.train.len())?;
        data_source::check("data.train", &self.data.train)?;
        data_source::check("data.val", &self.data.val)?;
        self.lora.check(self)?;
        self.check_model()?;
        positive_in_fp32("train.lr", train.lr)?;
        positive_in_fp32("train.eps", train.eps)?;
        self.muon.check()?;
        self.lr_scale.check(self)?;
        positive("comm.bucket_mb", self.comm.bucket_mb)?;
        positive("launch.join_timeout", self.launch.join_timeout)?;
        within("launch.join_timeout", self.launch.join_timeout, 0.0, 86_400.0)?;
        within("launch.restart_window", self.launch.restart_window, 0.0, 1e9)?;
        within("launch.hang_timeout", self.launch.hang_timeout, 0.0, 86_400.0)?;
        within("launch.shutdown_timeout", self.launch.shutdown_timeout, 0.0, 86_400.0)?;
        within("launch.shutdown_timeout_max", self.launch.shutdown_timeout_max, 0.0, 86_400.0)?;
        within("train.min_lr_ratio", train.min_lr_ratio, 0.0, 1.0)?;
        match train.epochs {
            Some(epochs) => {
                positive("train.epochs", epochs)?;
                within("train.epochs", epochs, 0.0, 1e6)?;
            }
            // With epochs, the number of steps is known only with the data.
            None => self.check_schedule()?,
        }
        within("train.beta1", train.beta1, 0.0, 0.999_999)?;
        within("train.beta2", train.beta2, 0.0, 0.999_999)?;
        within("train.weight_decay", train.weight_decay, 0.0, 100.0)?;
        within("train.clip", train.clip, 0.0, f64::MAX)?;
        within("train.router_aux_loss_coef", train.router_aux_loss_coef, 0.0, 1e6)?;
        within("train.router_bias_rate", train.router_bias_rate, 0.0, 1.0)?;
        within("train.router_z_loss_coef", train.router_z_loss_coef, 0.0, 1e6)?;
        within("data.val_fraction", self.data.val_fraction, 0.0, 0.5)?;
        within("checkpoint.every_seconds", self.checkpoint.every_seconds, 0.0, 1e9)?;
        let precision = self.engine.precision;
        if self.comm.dtype == WireDtype::Bf16 && precision.is_some_and(|p| !p.has_bf16_activations()) {
            return Err(Invalid::new(
                "comm.dtype",
                "bf16 gradients need bf16 activations".into(),
                "engine.precision = \"bf16\" or \"fp8\"".into(),
            ));
        }
        if self.engine.device == Device::Cpu && self.comm.dtype == WireDtype::Bf16 {
            return Err(Invalid::new(
                "comm.dtype",
                "bf16 gradients need bf16 activations, and the CPU back end supports fp32 only".into(),
                "\"auto\" or \"fp32\" with engine.device = \"cpu\"".into(),
            ));
        }
        if self.engine.device == Device::Cpu && precision.is_some_and(|p| p != Precision::Fp32) {
            return Err(Invalid::new(
                "engine.precision",
                "the CPU back end supports fp32 only".into(),
                "\"fp32\" with engine.device = \"cpu\"".into(),
            ));
        }
        Ok(())
    }

    /// Checks that a decay set by the user fits after the warm-up. The default decay is shortened instead.
    pub fn check_schedule(&self) -> Result<(), Invalid> {
        let train = &self.train;
        let Some(decay) = train.decay_steps.filter(|_| train.schedule == Schedule::Wsd) else {
            return Ok(());
        };
        let (steps, warmup) = (train.steps, train.warmup_steps());
        if (1..=steps - warmup).contains(&decay) {
            return Ok(());
        }
        let run = match train.epochs {
            Some(epochs) => format!("{steps} steps, train.epochs = {epochs}"),
            None => format!("train.steps = {steps}"),
        };
        Err(Invalid::new(
            "train.decay_steps",
            format!("{decay} steps of decay with {warmup} of warm-up in a run of {run}"),
            format!("1 to {}", steps - warmup),
        ))
    }

    /// Checks the model. Sizes that come from initial weights are checked once they are known.
    fn check_model(&self) -> Result<(), Invalid> {
        let model = match self.model.resolve() {
            Err(_) if self.checkpoint.init.is_some() && self.model.has_open_sizes() => return Ok(()),
            resolved => resolved?,
        };
        self.check_divided_experts(&model)?;
        sizes::check(self, &model)?;
        self.lr_scale.check_model(&model)?;
        if self.lora.is_on() && !self.model.has_open_sizes() {
            self.lora.modules(&model)?;
        }
        if self.data.tokenizer == Tokenizer::Bytes && model.vocab < 256 {
            return Err(Invalid::new(
                "model.vocab",
                format!("{} token ids for the byte tokenizer", model.vocab),
                "at least 256".into(),
            ));
        }
        Ok(())
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

impl JobSection {
    /// Checks the name, which is also the name of a directory below `output`.
    fn check_name(&self) -> Result<(), Invalid> {
        if self.name.contains(['/', '\0']) || [".", ".."].contains(&self.name.as_str()) {
            let expected = "a name without `/`, as it is that of a directory in job.output".into();
            return Err(Invalid::new(
                "job.name",
                format!("{:?} cannot be the name of a job", self.name),
                expected,
            ));
        }
        Ok(())
    }
}

fn positive(key: &'static str, value: f64) -> Result<(), Invalid> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(Invalid::new(key, format!("{value} is not a positive number"), "a finite number above 0".into()))
}

/// Checks that a value is positive and finite, also after rounding to fp32, in which the optimizer computes.
fn positive_in_fp32(key: &'static str, value: f64) -> Result<(), Invalid> {
    positive(key, value)?;
    if (f32::MIN_POSITIVE.into()..=f32::MAX.into()).contains(&value) {
        return Ok(());
    }
    Err(Invalid::new(key, format!("{value:e} is out of the range of fp32"), "1.2e-38 to 3.4e38".into()))
}

fn within(key: &'static str, value: f64, low: f64, high: f64) -> Result<(), Invalid> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    let expected = if high == f64::MAX { format!("at least {low}") } else { format!("{low} to {high}") };
    Err(Invalid::new(key, format!("{value} is out of range"), expected))
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
    fn check_names_the_key_of_an_invalid_value() {
        let key = |change: fn(&mut JobSpec)| {
            let mut spec = JobSpec::default();
            change(&mut spec);
            spec.check().unwrap_err().key
        };
        assert_eq!(key(|s| s.train.lr = f64::NAN), "train.lr");
        assert_eq!(key(|s| s.train.batch = 0), "train.batch");
        assert_eq!(key(|s| s.train.eval_batches = 0), "train.eval_batches");
        assert_eq!(key(|s| (s.train.patience, s.train.eval_every) = (3, 0)), "train.patience");
        for name in ["..", ".", "../up", "/etc", "a/b", "a\0"] {
            let mut spec = JobSpec::default();
            spec.job.name = name.into();
            assert_eq!(spec.check().unwrap_err().key, "job.name", "{name:?}");
        }
        assert_eq!(key(|s| s.launch.nproc = Some(0)), "launch.nproc");
        assert_eq!(key(|s| s.train.lr = 1e39), "train.lr");
        assert_eq!(key(|s| s.train.eps = 1e-60), "train.eps");
        let bf16_on_cpu = |s: &mut JobSpec| {
            s.comm.dtype = WireDtype::Bf16;
            s.engine.device = Device::Cpu;
        };
        assert_eq!(key(bf16_on_cpu), "comm.dtype");
        assert_eq!(key(|s| s.train.beta2 = 1.0), "train.beta2");
        assert_eq!(key(|s| s.muon.momentum = 1.0), "muon.momentum");
        assert_eq!(key(|s| s.muon.lr = 0.0), "muon.lr");
        assert_eq!(key(|s| s.muon.beta2 = 1.0), "muon.beta2");
        assert_eq!(key(|s| s.muon.weight_decay = Some(-0.1)), "muon.weight_decay");
        assert_eq!(key(|s| s.model.vocab = Some(100)), "model.vocab");
        assert_eq!(key(|s| s.data.train.clear()), "data.train");
        let long_decay = |s: &mut JobSpec| {
            s.train.schedule = Schedule::Wsd;
            (s.train.steps, s.train.warmup, s.train.decay_steps) = (100, Some(20), Some(81));
        };
        assert_eq!(key(long_decay), "train.decay_steps");
        for epochs in [0.0, -1.0, f64::NAN, f64::INFINITY, 2e6] {
            let spec = JobSpec {
                train: TrainSection { epochs: Some(epochs), ..TrainSection::default() },
                ..JobSpec::default()
            };
            assert_eq!(spec.check().unwrap_err().key, "train.epochs", "{epochs}");
        }
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
    fn sizes_that_are_still_to_be_read_from_weights_are_not_compared_with_the_default_model() {
        let mut spec = JobSpec::default();
        spec.model.kv_heads = Some(3);
        assert_eq!(spec.check().unwrap_err().key, "model.kv_heads");
        spec.checkpoint.init = Some("model".into());
        assert_eq!(spec.check(), Ok(()));
        spec.model.preset = Some("byte-tiny".into());
        assert_eq!(spec.check().unwrap_err().key, "model.kv_heads");
    }

    #[test]
    fn unknown_version_is_refused() {
        let json = br#"{"version":9,"spec":{"a_later_section":{}}}"#;
        assert!(matches!(JobSpec::from_json(json), Err(SpecError::Version(9))));
    }
}
