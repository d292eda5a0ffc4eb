//! The job description: the one definition behind `train.toml`, the wire and checkpoints.
//!
//! The launcher reads it from TOML, applies the layers (file, environment, flags) and checks it with [`JobSpec::check`];
//! workers receive it as JSON. Its [`digest`](JobSpec::digest) is what the rendezvous compares.

use serde::{Deserialize, Serialize};

use crate::ids::Digest;
use crate::model::ModelSection;

/// Version of the serialised form.
pub const SPEC_VERSION: u32 = 1;

/// A value that cannot work, by the key that holds it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {problem}; expected {expected}")]
pub struct Invalid {
    /// Dotted path of the key, such as `train.lr`.
    pub key: &'static str,
    /// What is wrong.
    pub problem: String,
    /// What would be right.
    pub expected: String,
}

impl Invalid {
    /// Names the key, what is wrong with its value and what would be right.
    pub fn new(key: &'static str, problem: String, expected: String) -> Self {
        Self { key, problem, expected }
    }
}

/// Everything `train.toml` can say. Every key has a default.
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
    pub comm: CommSection,
    pub engine: EngineSection,
    pub checkpoint: CheckpointSection,
    pub observe: ObserveSection,
}

/// `[job]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct JobSection {
    /// Shown in status and logs. Default: the configuration file's name.
    pub name: String,
    /// Seed of the initial weights, the data order and sampling.
    pub seed: u64,
    /// Directory for runs, relative to the working directory.
    pub output: String,
}

impl Default for JobSection {
    fn default() -> Self {
        Self { name: String::new(), seed: 1337, output: "runs".into() }
    }
}

/// `[launch]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct LaunchSection {
    /// Workers to start; `--nproc` overrides it. Default: one per GPU, or 1 without GPUs.
    pub nproc: Option<u32>,
    /// GPUs to use, by index or UUID; default: those visible, in order.
    pub devices: Vec<String>,
    /// How often the whole group is started again after a failure.
    pub max_restarts: u32,
    /// Seconds that workers get to end after being asked to.
    pub shutdown_timeout: f64,
    /// Seconds for all ranks to join.
    pub join_timeout: f64,
    /// Seconds without a step after which the rank that holds up the others is pointed out.
    pub stall_timeout: f64,
}

impl Default for LaunchSection {
    fn default() -> Self {
        Self {
            nproc: None,
            devices: Vec::new(),
            max_restarts: 0,
            shutdown_timeout: 30.0,
            join_timeout: 120.0,
            stall_timeout: 45.0,
        }
    }
}

/// `[data]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct DataSection {
    /// Text globs (byte tokeniser) or `.bin` files of token ids, relative to the configuration file.
    pub train: Vec<String>,
    /// The same for evaluation. Default: the last `val_fraction` of the training tokens, held out.
    pub val: Vec<String>,
    /// Share of the training tokens held out when `val` is empty.
    pub val_fraction: f64,
    /// How files become token ids.
    pub tokenizer: Tokenizer,
    /// Draw windows in a seeded random order; `false` reads them in file order.
    pub shuffle: bool,
}

impl Default for DataSection {
    fn default() -> Self {
        let globs = ["**/*.txt", "**/*.md", "**/*.rs", "**/*.py", "**/*.toml"];
        Self {
            train: globs.map(String::from).to_vec(),
            val: Vec::new(),
            val_fraction: 0.05,
            tokenizer: Tokenizer::Bytes,
            shuffle: true,
        }
    }
}

/// How files become token ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Tokenizer {
    /// Each byte of a text file is a token: V = 256.
    Bytes,
    /// Files hold token ids already: llm.c's format (magic 20240520) or nanoGPT's headerless u16.
    Bin,
}

/// `[train]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct TrainSection {
    /// Optimizer steps.
    pub steps: u64,
    /// B, sequences per rank and micro-step.
    pub batch: usize,
    /// Micro-steps per optimizer step.
    pub accumulate: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// Shape of the learning rate after warm-up.
    pub schedule: Schedule,
    /// Steps of linear warm-up. Default: a twentieth of `steps`, at most 100.
    pub warmup: Option<u64>,
    /// Learning rate at the end of a cosine schedule, as a share of `lr`.
    pub min_lr_ratio: f64,
    /// AdamW's decay of the first moment.
    pub beta1: f64,
    /// AdamW's decay of the second moment.
    pub beta2: f64,
    /// AdamW's epsilon.
    pub eps: f64,
    /// Decoupled weight decay, on matrices only.
    pub weight_decay: f64,
    /// Largest global gradient norm; 0 turns clipping off.
    pub clip: f64,
    /// Steps between evaluations; 0 turns them off.
    pub eval_every: u64,
    /// Most batches per evaluation and rank.
    pub eval_batches: usize,
    /// Bytes of text sampled from a byte-level model at the end.
    pub sample: usize,
}

impl Default for TrainSection {
    fn default() -> Self {
        Self {
            steps: 1000,
            batch: 8,
            accumulate: 1,
            lr: 1e-3,
            schedule: Schedule::Cosine,
            warmup: None,
            min_lr_ratio: 0.1,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            clip: 1.0,
            eval_every: 250,
            eval_batches: 16,
            sample: 240,
        }
    }
}

impl TrainSection {
    /// Steps of linear warm-up, the default filled in.
    pub fn warmup_steps(&self) -> u64 {
        self.warmup.unwrap_or_else(|| (self.steps / 20).min(100))
    }
}

/// Shape of the learning rate after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Half a cosine from `lr` down to `lr * min_lr_ratio`.
    Cosine,
    /// `lr` throughout.
    Constant,
}

/// `[comm]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct CommSection {
    /// Largest gradient bucket in MiB.
    pub bucket_mb: f64,
    /// Element type of gradients on the wire.
    pub dtype: WireDtype,
    /// Reduce buckets while backward still runs, and gather shared parameters while forward reads the first ones.
    pub overlap: bool,
    /// Each rank updates its share of the parameters, and holds the optimizer's state of no others.
    pub shard_optimizer: bool,
    /// GPUs sum and gather in each other's memory directly, where NCCL can. Not faster everywhere, so it is to be asked for.
    pub windows: bool,
}

impl Default for CommSection {
    fn default() -> Self {
        Self {
            bucket_mb: 25.0,
            dtype: WireDtype::Auto,
            overlap: true,
            shard_optimizer: false,
            windows: false,
        }
    }
}

/// Most shares of the optimizer's work. Parameters are laid out so that numbers of ranks that divide it get equal shares.
pub const MAX_SHARES: usize = 8;

impl CommSection {
    /// Whether this many ranks can work so.
    pub fn check_ranks(&self, ranks: usize) -> Result<(), Invalid> {
        if self.shard_optimizer && (ranks == 0 || !MAX_SHARES.is_multiple_of(ranks)) {
            return Err(Invalid::new(
                "comm.shard_optimizer",
                format!("{ranks} ranks cannot share the parameters equally"),
                "1, 2, 4 or 8 ranks, or false".into(),
            ));
        }
        Ok(())
    }
}

/// Element type of gradients on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum WireDtype {
    /// bf16 under `precision = "bf16"` without accumulation, fp32 otherwise.
    Auto,
    /// 4 bytes.
    Fp32,
    /// 2 bytes; needs `precision = "bf16"`.
    Bf16,
}

/// `[engine]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct EngineSection {
    /// Where to train.
    pub device: Device,
    /// Arithmetic of the matrix products. Default: bf16 on GPUs, fp32 on CPUs.
    pub precision: Option<Precision>,
    /// How a step reaches a GPU.
    pub exec: Exec,
    /// Whether a run repeated on the same kind of hardware gives the same bits. CPUs always do.
    pub deterministic: bool,
    /// Where buffers come from.
    pub pool: PoolMode,
    /// Most MiB of device memory that a rank's pool holds; no limit by default.
    pub memory_limit_mb: Option<u64>,
}

impl Default for EngineSection {
    fn default() -> Self {
        Self {
            device: Device::Auto,
            precision: None,
            exec: Exec::Graph,
            deterministic: false,
            pool: PoolMode::On,
            memory_limit_mb: None,
        }
    }
}

/// Where to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// GPUs where there are any, the CPU otherwise.
    Auto,
    /// NVIDIA GPUs, one per worker.
    Cuda,
    /// The CPU, cores shared out among workers.
    Cpu,
}

/// Arithmetic of the matrix products. Master weights and optimizer state are fp32 in all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Strict: no tf32 anywhere.
    Fp32,
    /// fp32 storage, tf32 matrix units.
    Tf32,
    /// bf16 activations and matrix products with fp32 accumulation.
    Bf16,
}

/// How a step reaches a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Exec {
    /// Captured once its buffers have found their addresses, and replayed in one call since. On the CPU, and with the pool
    /// off, the same as `Stream`.
    Graph,
    /// Operation by operation.
    Stream,
}

/// Where buffers come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum PoolMode {
    /// Freed buffers are kept and handed out again.
    On,
    /// As `On`, and steps that repeat themselves get the same addresses each time, worked out once.
    Plan,
    /// Every buffer is a driver allocation: for comparison only.
    Off,
}

/// `[checkpoint]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointSection {
    /// Steps between checkpoints; 0 saves at the end only.
    pub every: u64,
    /// Newest checkpoints to keep; 0 keeps all.
    pub keep: usize,
    /// Directory of checkpoints. Default: `checkpoints` in the run's directory.
    pub dir: Option<String>,
    /// `off`, `auto` (newest valid checkpoint in `dir`, if any), or a checkpoint directory.
    pub resume: String,
    /// A `model.safetensors` whose weights replace the random initial ones.
    pub init: Option<String>,
}

impl Default for CheckpointSection {
    fn default() -> Self {
        Self { every: 0, keep: 2, dir: None, resume: "off".into(), init: None }
    }
}

/// `[observe]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ObserveSection {
    /// Write `metrics.jsonl` into the run's directory.
    pub metrics: bool,
    /// Write TensorBoard's event file into `tensorboard` in the run's directory.
    pub tensorboard: bool,
    /// Compare all ranks' parameters at the end and report the largest difference.
    pub check_replicas: bool,
    /// Steps of which every rank writes a timeline, `trace-rank<R>.json`, into the run's directory.
    pub trace: u64,
}

impl Default for ObserveSection {
    fn default() -> Self {
        Self { metrics: true, tensorboard: false, check_replicas: false, trace: 0 }
    }
}

impl JobSpec {
    /// All rules that need nothing but the values. The first broken one is returned.
    pub fn check(&self) -> Result<(), Invalid> {
        let model = self.model.resolve()?;
        let train = &self.train;
        let at_least_1 = |key, value: usize| match value {
            0 => Err(Invalid::new(key, "0 does nothing".into(), "at least 1".into())),
            _ => Ok(()),
        };
        if self.launch.nproc == Some(0) {
            return Err(Invalid::new("launch.nproc", "no worker to start".into(), "at least 1".into()));
        }
        at_least_1("train.steps", usize::try_from(train.steps).unwrap_or(usize::MAX))?;
        at_least_1("train.batch", train.batch)?;
        at_least_1("train.accumulate", train.accumulate)?;
        at_least_1("data.train", self.data.train.len())?;
        positive("train.lr", train.lr)?;
        positive("train.eps", train.eps)?;
        positive("comm.bucket_mb", self.comm.bucket_mb)?;
        if let Some(ranks) = self.launch.nproc {
            self.comm.check_ranks(ranks as usize)?;
        }
        positive("launch.join_timeout", self.launch.join_timeout)?;
        within("launch.join_timeout", self.launch.join_timeout, 0.0, 86_400.0)?;
        positive("launch.stall_timeout", self.launch.stall_timeout)?;
        within("launch.stall_timeout", self.launch.stall_timeout, 0.0, 86_400.0)?;
        within("launch.shutdown_timeout", self.launch.shutdown_timeout, 0.0, 86_400.0)?;
        within("train.min_lr_ratio", train.min_lr_ratio, 0.0, 1.0)?;
        within("train.beta1", train.beta1, 0.0, 0.999_999)?;
        within("train.beta2", train.beta2, 0.0, 0.999_999)?;
        within("train.weight_decay", train.weight_decay, 0.0, 100.0)?;
        within("train.clip", train.clip, 0.0, f64::MAX)?;
        within("data.val_fraction", self.data.val_fraction, 0.0, 0.5)?;
        if train.warmup_steps() > train.steps {
            return Err(Invalid::new(
                "train.warmup",
                format!("{} steps of warm-up in a run of {}", train.warmup_steps(), train.steps),
                "at most train.steps".into(),
            ));
        }
        if self.data.tokenizer == Tokenizer::Bytes && model.vocab < 256 {
            return Err(Invalid::new(
                "model.vocab",
                format!("{} token ids for the byte tokenizer", model.vocab),
                "at least 256".into(),
            ));
        }
        if self.comm.dtype == WireDtype::Bf16 && self.engine.precision.is_some_and(|p| p != Precision::Bf16) {
            return Err(Invalid::new(
                "comm.dtype",
                "bf16 gradients of a run in another precision".into(),
                "engine.precision = \"bf16\"".into(),
            ));
        }
        if self.engine.device == Device::Cpu && self.engine.precision.is_some_and(|p| p != Precision::Fp32) {
            return Err(Invalid::new(
                "engine.precision",
                "the CPU back end computes in fp32".into(),
                "\"fp32\" with engine.device = \"cpu\"".into(),
            ));
        }
        Ok(())
    }

    /// What the rendezvous compares: equal descriptions have equal digests.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.to_json())
    }

    /// The form that travels to workers.
    pub fn to_json(&self) -> Vec<u8> {
        // Plain structs of numbers, strings and lists: serialisation has no way to fail.
        serde_json::to_vec(&Versioned { version: SPEC_VERSION, spec: self.clone() }).unwrap_or_default()
    }

    /// Reads [`to_json`](Self::to_json)'s form; the result is checked.
    pub fn from_json(json: &[u8]) -> Result<Self, SpecError> {
        let Versioned { version, spec } = serde_json::from_slice(json)?;
        if version != SPEC_VERSION {
            return Err(SpecError::Version(version));
        }
        spec.check()?;
        Ok(spec)
    }
}

/// A job description that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// Not the JSON form of a job description.
    #[error("job description is not readable: {0}")]
    Json(#[from] serde_json::Error),
    /// Written by another version of xlaunch.
    #[error("job description has version {0}, this build reads version {SPEC_VERSION}")]
    Version(u32),
    /// A value that cannot work.
    #[error(transparent)]
    Invalid(#[from] Invalid),
}

#[derive(Serialize, Deserialize)]
struct Versioned {
    version: u32,
    spec: JobSpec,
}

fn positive(key: &'static str, value: f64) -> Result<(), Invalid> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(Invalid::new(key, format!("{value} is not a positive number"), "a finite number above 0".into()))
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
    fn the_defaults_are_valid_and_survive_json() {
        let spec = JobSpec::default();
        spec.check().unwrap();
        assert_eq!(JobSpec::from_json(&spec.to_json()).unwrap(), spec);
    }

    #[test]
    fn any_difference_changes_the_digest() {
        let mut other = JobSpec::default();
        other.train.lr *= 1.000_001;
        assert_ne!(JobSpec::default().digest(), other.digest());
    }

    #[test]
    fn impossible_values_name_their_key() {
        let key = |change: fn(&mut JobSpec)| {
            let mut spec = JobSpec::default();
            change(&mut spec);
            spec.check().unwrap_err().key
        };
        assert_eq!(key(|s| s.train.lr = f64::NAN), "train.lr");
        assert_eq!(key(|s| s.train.batch = 0), "train.batch");
        assert_eq!(key(|s| s.launch.nproc = Some(0)), "launch.nproc");
        assert_eq!(key(|s| s.train.warmup = Some(2000)), "train.warmup");
        let shared_by_three = |s: &mut JobSpec| {
            s.comm.shard_optimizer = true;
            s.launch.nproc = Some(3);
        };
        assert_eq!(key(shared_by_three), "comm.shard_optimizer");
        assert_eq!(key(|s| s.train.beta2 = 1.0), "train.beta2");
        assert_eq!(key(|s| s.model.vocab = Some(100)), "model.vocab");
        assert_eq!(key(|s| s.data.train.clear()), "data.train");
    }

    #[test]
    fn another_version_is_refused() {
        let json = String::from_utf8(JobSpec::default().to_json())
            .unwrap()
            .replace("\"version\":1", "\"version\":9");
        assert!(matches!(JobSpec::from_json(json.as_bytes()), Err(SpecError::Version(9))));
    }
}
