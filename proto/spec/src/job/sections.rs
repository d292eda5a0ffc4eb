//! The sections of `train.toml` and their defaults.
//!
//! Doc comments of fields and variants are user documentation: the JSON schema and the configuration reference contain
//! them, next to each key's type and default. So they are plain text without links, for a reader who knows PyTorch.

use std::path::Path;

use serde::{Deserialize, Serialize};

#[cfg(feature = "schema")]
use super::data_source;
use super::data_source::DataSource;
use super::{Optimizer, one_or_more};

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

/// Start and supervision of workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct LaunchSection {
    /// Number of workers (ranks) to start; `--nproc` overrides it. Default: one per GPU, or 1 without GPUs.
    pub nproc: Option<u32>,
    /// GPUs to use, by index (as nvidia-smi numbers them) or UUID. Default: all GPUs that CUDA_VISIBLE_DEVICES allows,
    /// in its order.
    pub devices: Vec<String>,
    /// Maximum number of restarts of all workers after failures. Restarts resume from the newest checkpoint, so set
    /// `checkpoint.every` too. The job also fails after three consecutive attempts without progress.
    pub max_restarts: u32,
    /// Seconds within which restarts count towards `max_restarts`; older restarts are forgotten. 0 counts all restarts
    /// of the job.
    pub restart_window: f64,
    /// Seconds that workers get to stop with a checkpoint before they are killed. The timeout starts again whenever an
    /// evaluation or the checkpoint makes progress.
    pub shutdown_timeout: f64,
    /// Maximum total seconds that workers get to stop, whatever progress they make. Keep it below the time that your
    /// scheduler allows between SIGTERM and SIGKILL.
    pub shutdown_timeout_max: f64,
    /// Seconds within which all ranks must join the rendezvous, and again to open the communicator (NCCL) after it.
    /// Increase it if opening data or reading a checkpoint takes longer.
    pub join_timeout: f64,
    /// Action when a rank hangs and blocks the others.
    pub hang: OnHang,
    /// Seconds without a completed step after which a job counts as hung. 0 means 60. Jobs with slow steps get five
    /// times the duration of those steps; checkpoints, and work that compiles kernels on a GPU, get several minutes.
    pub hang_timeout: f64,
    /// Check of the job's GPUs before every attempt, which takes at most 200 ms. A faulty GPU ends the job with exit
    /// code 76.
    pub doctor: DoctorMode,
}

/// Action when a rank hangs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum OnHang {
    /// Report the rank, with evidence in `hang.txt` beside its logs, and end the attempt. The job is restarted if
    /// `launch.max_restarts` allows it.
    #[default]
    Restart,
    /// Only report the rank, with the same evidence.
    Report,
}

/// Check of GPUs before an attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum DoctorMode {
    /// Check the driver's counters, as `xlaunch doctor --quick` does.
    #[default]
    Quick,
    /// No check.
    Off,
}

impl Default for LaunchSection {
    fn default() -> Self {
        Self {
            nproc: None,
            devices: Vec::new(),
            max_restarts: 0,
            restart_window: 0.0,
            shutdown_timeout: 30.0,
            shutdown_timeout_max: 600.0,
            join_timeout: 120.0,
            hang: OnHang::Restart,
            hang_timeout: 0.0,
            doctor: DoctorMode::default(),
        }
    }
}

/// Training and evaluation data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct DataSection {
    /// Training data: a directory written by `xlaunch data prepare`, or files as paths or globs (`**` spans
    /// directories). Relative to the configuration file. A prepared directory includes its tokenizer and validation
    /// data. Globs skip hidden directories, directories with a CACHEDIR.TAG, Python virtual environments and
    /// `job.output`. Several prepared directories are mixed in the ratio of their weights: a list of tables with `path`
    /// and `weight`.
    #[serde(deserialize_with = "one_or_more::deserialize")]
    #[cfg_attr(feature = "schema", schemars(with = "data_source::Forms"))]
    pub train: Vec<DataSource>,
    /// Evaluation data, in the same forms as `train`; of a prepared directory, the validation data is used. Default:
    /// the validation data of the prepared directories `train`, with the same weights; with files, the last
    /// `val_fraction` of the training tokens is held out.
    #[serde(deserialize_with = "one_or_more::deserialize")]
    #[cfg_attr(feature = "schema", schemars(with = "data_source::Forms"))]
    pub val: Vec<DataSource>,
    /// Fraction of the training tokens, from 0 to 0.5, that is held out for evaluation if `train` is files and `val` is
    /// empty.
    pub val_fraction: f64,
    /// Conversion of files into token ids. Has no effect with a prepared directory, which contains token ids.
    pub tokenizer: Tokenizer,
    /// Read sequences in a seeded random order that changes each epoch. false reads them in file order.
    pub shuffle: bool,
    /// Treatment of the documents in a sequence. masked and packed need a directory written by `xlaunch data prepare`.
    /// Default: packed for chats, otherwise joined.
    pub documents: Option<DocumentMode>,
}

/// Treatment of the documents in a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum DocumentMode {
    /// All documents form one text, which is cut into sequences. Tokens attend to those of earlier documents in the
    /// sequence.
    #[default]
    Joined,
    /// The same sequences, but tokens attend to those of their own document only, and positions begin again with each
    /// document.
    Masked,
    /// Sequences of whole documents, packed so that little padding remains; attention and positions as with masked. A
    /// document longer than `model.seq` is split into parts.
    Packed,
}

impl Default for DataSection {
    fn default() -> Self {
        let globs = ["**/*.txt", "**/*.md", "**/*.rs", "**/*.py", "**/*.toml"];
        Self {
            train: globs.map(DataSource::from).to_vec(),
            val: Vec::new(),
            val_fraction: 0.05,
            tokenizer: Tokenizer::Bytes,
            shuffle: true,
            documents: None,
        }
    }
}

impl DocumentMode {
    /// Returns the name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::Joined => "joined",
            Self::Masked => "masked",
            Self::Packed => "packed",
        }
    }
}

impl DataSection {
    /// Returns the treatment of documents, with the default filled in.
    pub fn documents(&self) -> DocumentMode {
        self.documents.unwrap_or_default()
    }
}

/// Conversion of files into token ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Tokenizer {
    /// Every byte of a text file is one token; the vocabulary is 256.
    Bytes,
    /// Files contain token ids: 16-bit or 32-bit in llm.c's formats (magic numbers 20240520 and 20240801), or 16-bit in
    /// modded-nanogpt's format (278895051) or nanoGPT's (no header).
    Bin,
}

/// The optimizer, its schedule, and evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct TrainSection {
    /// Number of optimizer steps. `epochs` replaces it.
    pub steps: u64,
    /// Number of passes over the training data, instead of `steps`; may be a fraction, such as 0.5. The run has as many
    /// steps as it takes to read `epochs` times the sequences of an epoch, rounded up; a last step that is not full
    /// takes its remaining sequences from the next epoch. Counted from the sequences used so far, so a run that
    /// continues with another global batch gets another number of steps.
    pub epochs: Option<f64>,
    /// Sequences per rank and micro-step. The global batch is batch * accumulate * number of ranks sequences.
    pub batch: usize,
    /// Micro-steps per optimizer step (gradient accumulation). Increase it if the desired global batch does not fit in
    /// memory.
    pub accumulate: usize,
    /// Activations that backward recomputes instead of keeping them from forward. Saves memory, costs time, and does
    /// not change results except for rounding.
    pub recompute: Recompute,
    /// Number of tokens whose logits are in memory at a time; the gradients of the loss are computed along with it. 0
    /// means the whole micro-step. Saves memory if the vocabulary is large.
    pub classifier_chunk: usize,
    /// Factor of the load-balancing loss of a model with experts, which is added to the loss: in each layer, the number
    /// of experts times the sum over experts of their share of the choices times their mean score. 1 is a balanced
    /// load. The shares are those of a micro-step of all ranks. 0 turns it off.
    pub router_aux_loss_coef: f64,
    /// Factor of the z loss of a model with experts, which is added to the loss: in each layer, the mean square of the
    /// logarithm of the sum of the exponentials of the router's logits. It keeps them small. 0 turns it off.
    pub router_z_loss_coef: f64,
    /// Change of the bias of each expert after a step, if `model.router_bias` is true: up if the expert was chosen less
    /// often in the global batch than the mean of its layer, down if more often. 0 leaves biases unchanged.
    pub router_bias_rate: f64,
    /// Optimizer of the weights of linear layers in blocks. Embeddings, the head, norms and biases always use AdamW.
    pub optimizer: Optimizer,
    /// Peak learning rate.
    pub lr: f64,
    /// Learning-rate schedule after warm-up.
    pub schedule: Schedule,
    /// Steps of linear warm-up from 0 to `lr`, at most `steps`. Default: 5 % of `steps`, at most 100.
    pub warmup: Option<u64>,
    /// Number of final steps over which the wsd schedule lowers the learning rate. Default: 20 % of `steps`.
    pub decay_steps: Option<u64>,
    /// Learning rate at the end of the cosine and wsd schedules, as a fraction of `lr`, from 0 to 1.
    pub min_lr_ratio: f64,
    /// Decay rate of AdamW's first moment.
    pub beta1: f64,
    /// Decay rate of AdamW's second moment.
    pub beta2: f64,
    /// AdamW's epsilon, added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay. Applied to matrices only, not to biases and norms.
    pub weight_decay: f64,
    /// Maximum global gradient norm; larger gradients are scaled down to it. 0 turns clipping off.
    pub clip: f64,
    /// Action after a step whose loss or gradient norm is not finite. The update of such a step is never applied.
    pub nonfinite: NonFinite,
    /// Steps between evaluations; the last step is always evaluated. 0 turns evaluation off.
    pub eval_every: u64,
    /// Maximum number of batches of `batch` sequences per evaluation, over all ranks. The sequences are the first ones
    /// in file order, or packed ones in a fixed order, the same for any number of ranks.
    pub eval_batches: usize,
    /// Tokens per evaluation, rounded up to whole sequences: the first ones in file order, or packed ones in a fixed
    /// order, the same for any number of ranks and any `batch`. 0 uses `eval_batches` instead.
    pub eval_tokens: u64,
    /// Number of evaluations in a row without a lower validation loss after which training ends early, successfully and
    /// with a checkpoint. A checkpoint is also saved after each evaluation with the lowest loss so far, and the best
    /// one is kept. 0 turns early stopping off.
    pub patience: u64,
    /// Number of tokens (bytes with the byte tokenizer) of text to sample from the model and print after training.
    /// Needs a prepared directory or `data.tokenizer = "bytes"`. 0 turns sampling off.
    pub sample: usize,
    /// Steps between samples during training, which are written to `samples.jsonl` in the run's directory. 0 samples
    /// after training only.
    pub sample_every: u64,
    /// Text that samples continue. Default: a line of the evaluation data.
    pub sample_prompt: String,
}

impl Default for TrainSection {
    fn default() -> Self {
        Self {
            steps: 1000,
            epochs: None,
            batch: 8,
            accumulate: 1,
            recompute: Recompute::None,
            classifier_chunk: 0,
            router_aux_loss_coef: 0.01,
            router_z_loss_coef: 0.001,
            router_bias_rate: 0.001,
            optimizer: Optimizer::AdamW,
            lr: 1e-3,
            schedule: Schedule::Cosine,
            warmup: None,
            decay_steps: None,
            min_lr_ratio: 0.1,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            clip: 1.0,
            nonfinite: NonFinite::Stop,
            eval_every: 250,
            eval_batches: 16,
            eval_tokens: 0,
            patience: 0,
            sample: 240,
            sample_every: 0,
            sample_prompt: String::new(),
        }
    }
}

impl TrainSection {
    /// Sets `steps` to the number that `epochs` demands, if it is set, with data of `rows` sequences on `ranks` ranks.
    /// The first `step` steps have used `used` sequences.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a positive number of sequences, far below 2^53"
    )]
    pub fn count_steps(&mut self, rows: u64, ranks: u32, step: u64, used: u64) {
        if let Some(epochs) = self.epochs {
            let per_step = (self.batch as u64 * self.accumulate as u64).saturating_mul(ranks.into());
            let wanted = (epochs * rows as f64).round().max(1.0) as u64;
            self.steps = step + wanted.saturating_sub(used).div_ceil(per_step);
        }
    }

    /// Returns a warning if the whole run is warm-up, shorter than configured.
    pub fn short_warmup(&self) -> Option<String> {
        let (warmup, steps) = (self.warmup.filter(|warmup| *warmup > self.steps)?, self.steps);
        Some(format!("train.warmup: {warmup} steps in a run of {steps}: all {steps} are warm-up"))
    }

    /// Returns the steps of linear warm-up, with the default filled in, and at most the number of steps.
    pub fn warmup_steps(&self) -> u64 {
        self.warmup.unwrap_or_else(|| (self.steps / 20).min(100)).min(self.steps)
    }

    /// Returns the steps over which the wsd schedule lowers the learning rate, with the default filled in, and at most
    /// the number of steps after the warm-up.
    pub fn decay_steps(&self) -> u64 {
        self.decay_steps.unwrap_or_else(|| self.steps.div_ceil(5)).min(self.steps - self.warmup_steps())
    }
}

/// Activations that backward recomputes instead of keeping them from forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// Outputs of norms and of the activation function, which need no matrix multiplication.
    Cheap,
    /// Everything in a block except its input. Most of the forward pass runs twice.
    Block,
}

/// Learning-rate schedule after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Cosine decay from `lr` to `lr * min_lr_ratio`, which would be reached one step after the last.
    Cosine,
    /// Warm-up, stable, decay: `lr`, then linear decay over the last `decay_steps` to `lr * min_lr_ratio`, which would
    /// be reached one step after the last. A run can be continued for more steps from a checkpoint before the decay.
    Wsd,
    /// `lr` at every step.
    Constant,
}

/// Action after a step whose loss or gradient norm is not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum NonFinite {
    /// The job fails with exit code 1 and is not restarted. No checkpoint is saved.
    Stop,
    /// The step is skipped: weights and optimizer state do not change, while schedule, bias correction and data
    /// advance. After 10 consecutive skipped steps, or if the last step of the job is skipped, the same as stop.
    Skip,
}

/// Number of consecutive skipped steps that end a job with `train.nonfinite = "skip"`.
const MAX_SKIPPED_STEPS: u32 = 10;

impl NonFinite {
    /// Returns the number of consecutive steps without a finite loss and norm that ends the job.
    pub fn limit(self) -> u32 {
        match self {
            Self::Stop => 1,
            Self::Skip => MAX_SKIPPED_STEPS,
        }
    }
}

/// Device, arithmetic and memory of each worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct EngineSection {
    /// Kind of device to train on.
    pub device: Device,
    /// Arithmetic of matrix multiplications. Default: bf16 on GPUs, fp32 on CPUs.
    pub precision: Option<Precision>,
    /// Method of launching the operations of a step on a GPU.
    pub exec: Exec,
    /// Make repeated runs on the same kind of GPU bit-identical, by avoiding cuDNN's attention and kernels selected by
    /// timing. Slower. CPU runs are always bit-identical.
    pub deterministic: bool,
    /// Allocator of device memory.
    pub pool: PoolMode,
    /// Maximum device memory of each rank's allocator in MiB. Default: no limit.
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

/// Kind of device to train on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// GPUs if there are any, otherwise the CPU.
    Auto,
    /// NVIDIA GPUs, one per worker.
    Cuda,
    /// The CPU. Its cores are divided among the workers.
    Cpu,
}

/// Arithmetic of matrix multiplications. Master weights and optimizer state are always fp32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// fp32 throughout, without TF32. Slow on GPUs; for comparisons.
    Fp32,
    /// fp32 tensors, TF32 tensor cores.
    Tf32,
    /// bf16 weights, activations and matrix multiplications, with fp32 accumulation.
    Bf16,
    /// Like bf16, but the linear layers of all blocks multiply in FP8 (E4M3, gradients E5M2) with a scale per tensor.
    /// Faster above about a billion parameters. Needs compute capability 8.9, and sizes that are multiples of 16.
    Fp8,
}

impl Precision {
    /// Returns whether activations, and gradients on the wire, are bf16.
    pub fn has_bf16_activations(self) -> bool {
        matches!(self, Self::Bf16 | Self::Fp8)
    }

    /// Returns the name used in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Tf32 => "tf32",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        }
    }
}

/// Method of launching the operations of a step on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Exec {
    /// The third step is captured as a CUDA graph, and later steps replay it. Gives the same results as stream. On the
    /// CPU, and with `engine.pool = "off"`, the same as stream.
    Graph,
    /// Operations are launched one by one.
    Stream,
}

/// Allocator of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum PoolMode {
    /// A caching allocator, which reuses freed buffers. With `engine.exec = "graph"` on a GPU, the same as plan.
    On,
    /// Like on, but the addresses of repeated steps are planned once, so that every step gets the same addresses.
    Plan,
    /// Every buffer is a driver allocation. Very slow; for comparisons.
    Off,
}

/// Saving checkpoints and resuming from them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointSection {
    /// Steps between checkpoints. The last step is always saved; 0 saves only the last step.
    pub every: u64,
    /// Seconds between checkpoints, in addition to `every`. 0 turns this off.
    pub every_seconds: f64,
    /// Write checkpoints while training continues: a step waits only until the state is copied to host memory. A
    /// checkpoint that is due while another one is being written is skipped. false waits until each is written.
    #[serde(rename = "async")]
    pub asynchronous: bool,
    /// Keep the two newest snapshots of every rank in memory, so that a restart resumes without reading a checkpoint.
    /// They take 24 bytes of host memory per parameter in total; without them, checkpoints take 12.
    pub memory: MemorySnapshots,
    /// Action if a checkpoint cannot be saved. If the final checkpoint cannot be saved, the job always fails.
    pub on_error: OnSaveError,
    /// Number of newest checkpoints to keep; older ones of this run, and of the runs that it continues, are deleted. 0
    /// keeps all. A checkpoint whose directory is renamed to `step-<N>.keep` is neither counted nor deleted.
    pub keep: usize,
    /// Keep checkpoints whose step is a multiple of this number, in addition to the newest. 0 turns this off.
    pub keep_every: u64,
    /// Number of checkpoints with the lowest validation loss to keep in addition to the newest. Only checkpoints of
    /// steps that were evaluated have a validation loss.
    pub keep_best: usize,
    /// Directory of checkpoints. Default: `checkpoints` in the run's directory.
    pub dir: Option<String>,
    /// "off", "auto" (the newest complete checkpoint in `dir` or, without `dir`, of the job's earlier runs; a fresh
    /// start if there is none), or the path of a checkpoint, of a directory of checkpoints or of a run's directory.
    pub resume: String,
    /// Resume although the data, the batch, the seed or the order of the data have changed; `--resume-changed`.
    pub resume_changed: bool,
    /// Start afresh in a `dir` that contains checkpoints, which are renamed to `step-<N>.abandoned`; `--overwrite`.
    pub overwrite: bool,
    /// Initial weights, instead of random ones: a model in Hugging Face's layout (a directory with a config.json), a
    /// checkpoint, a run, or a model.safetensors file of xlaunch. Unless `preset` is set or this is a file, keys of
    /// `[model]` that are not set take their values from the model; `seq` may be smaller.
    pub init: Option<String>,
}

impl CheckpointSection {
    /// Returns the path in `resume`; `None` if it is "off" or "auto".
    pub fn resume_path(&self) -> Option<&Path> {
        (!["off", "auto"].contains(&self.resume.as_str())).then(|| Path::new(&self.resume))
    }
}

impl Default for CheckpointSection {
    fn default() -> Self {
        Self {
            every: 0,
            every_seconds: 0.0,
            asynchronous: true,
            memory: MemorySnapshots::Auto,
            on_error: OnSaveError::Continue,
            keep: 2,
            keep_every: 0,
            keep_best: 0,
            dir: None,
            resume: "off".into(),
            resume_changed: false,
            overwrite: false,
            init: None,
        }
    }
}

/// Policy for snapshots in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum MemorySnapshots {
    /// Keep snapshots if the job may restart, saves checkpoints at intervals, and its snapshots fit into a quarter of
    /// the memory that training leaves free.
    Auto,
    /// Always keep snapshots. The job fails if there is not enough memory.
    On,
    /// Never keep snapshots: restarts read the newest checkpoint.
    Off,
}

/// Action if a checkpoint cannot be saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum OnSaveError {
    /// Report the failure and continue training; the next checkpoint is tried as usual.
    Continue,
    /// End the attempt. The job is restarted if `launch.max_restarts` allows it, otherwise it ends with exit code 65.
    Stop,
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
