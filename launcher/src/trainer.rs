//! The functions of the worker crate that the command line needs. `main.rs` fills them in, so that no other module
//! depends on the worker.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use xlaunch_agent::Refusal;
use xlaunch_agent::environment::{DataSet, Parent};
use xlaunch_agent::workload::trainer::{CheckpointFiles, HeldLock};
use xlaunch_proto::spec::{Invalid, JobSpec, Precision};

/// These run in the launcher's process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trainer {
    /// Takes what a configuration leaves open from the weights and data that it names.
    pub(crate) fill_in: FillIn,
    /// Validates a job before any worker starts. The path is the directory of the job's earlier runs, the number that
    /// of ranks.
    pub(crate) preflight: fn(&JobSpec, &Path, u32, Checks) -> Result<Preflight, Refusal>,
    /// The memory that a job needs on each rank, and changes with which it fits into so many bytes. On GPUs or not, by
    /// this many ranks.
    pub(crate) memory: fn(&JobSpec, bool, u32, Option<u64>) -> Result<Needs, Refusal>,
    /// The newest complete checkpoint in a directory.
    pub(crate) newest_checkpoint: fn(&Path) -> Option<PathBuf>,
    /// What agents need to know of the checkpoints of a run.
    pub(crate) files: CheckpointFiles,
    /// Continues prompts.
    pub(crate) generate: GenerateFn,
    /// Measures a trained model.
    pub(crate) evaluate: EvaluateFn,
    /// Writes a checkpoint in Hugging Face's layout.
    pub(crate) export: fn(ExportRequest) -> Result<Exported, Refusal>,
}

/// What a job needs as it is, and changes that save memory.
pub(crate) type Needs = (Memory, Vec<Saving>);

/// Bytes of memory on each rank, unless noted otherwise.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    /// Parameters of the model.
    pub(crate) parameters: u64,
    /// Tokens of one rank in a step.
    pub(crate) tokens: u64,
    pub(crate) weights: u64,
    pub(crate) gradients: u64,
    pub(crate) optimizer: u64,
    pub(crate) activations: u64,
    pub(crate) libraries: u64,
    pub(crate) total: u64,
}

/// A change of the configuration, and all bytes that each rank needs with it and those before it.
#[derive(Clone, Debug)]
pub(crate) struct Saving {
    pub(crate) change: String,
    pub(crate) total: u64,
}

/// Asked between steps or batches: whether to stop.
pub(crate) type Interrupted<'a> = &'a dyn Fn() -> bool;
/// Gets lines for the user.
pub(crate) type Note<'a> = &'a mut dyn FnMut(&str);
/// Gets what happens to the texts, by the numbers of prompt and sample.
pub(crate) type TextSink<'a> = &'a mut dyn FnMut(usize, usize, Generated<'_>);
pub(crate) type GenerateFn =
    fn(&GenerateCommand, Interrupted<'_>, Note<'_>, TextSink<'_>) -> Result<(), Refusal>;
pub(crate) type EvaluateFn = fn(&EvaluateCommand, Note<'_>, Interrupted<'_>) -> Result<Evaluation, Refusal>;

/// Where to use a trained model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    Auto,
    Cuda,
    Cpu,
}

/// `xlaunch generate`.
#[derive(Clone, Debug)]
pub(crate) struct GenerateCommand {
    pub(crate) model: PathBuf,
    pub(crate) tokenizer: Option<String>,
    pub(crate) prompts: Vec<PromptInput>,
    pub(crate) samples: usize,
    /// Prompts are text alone, and what the model's directory says of generation is ignored.
    pub(crate) raw: bool,
    pub(crate) max_tokens: usize,
    /// In place of what the directory says, as are the two after it.
    pub(crate) temperature: Option<f64>,
    pub(crate) top_k: Option<usize>,
    pub(crate) top_p: Option<f64>,
    pub(crate) seed: u64,
    pub(crate) stop: Vec<String>,
    pub(crate) device: Device,
    pub(crate) precision: Precision,
}

/// What to continue.
#[derive(Clone, Debug)]
pub(crate) enum PromptInput {
    Text(String),
    /// A list of messages.
    Chat(serde_json::Value),
}

/// What happens to a text.
#[derive(Debug)]
pub(crate) enum Generated<'a> {
    /// It goes on with this.
    Text(&'a str),
    /// It is complete.
    Finished { tokens: usize, reason: &'static str, seconds: f64 },
}

/// `xlaunch eval`.
#[derive(Clone, Debug)]
pub(crate) struct EvaluateCommand {
    pub(crate) model: PathBuf,
    pub(crate) data: Option<String>,
    pub(crate) tokens: Option<u64>,
    pub(crate) hellaswag: Option<PathBuf>,
    pub(crate) device: Device,
    pub(crate) precision: Precision,
}

/// Its results.
#[derive(Clone, Debug)]
pub(crate) struct Evaluation {
    pub(crate) loss: Option<HeldOutLoss>,
    pub(crate) hellaswag: Option<Score>,
}

/// Loss on held-out data, in nats per token.
#[derive(Clone, Debug)]
pub(crate) struct HeldOutLoss {
    pub(crate) loss: f64,
    pub(crate) tokens: u64,
    pub(crate) bits_per_byte: Option<f64>,
}

/// Answers to questions.
#[derive(Clone, Debug)]
pub(crate) struct Score {
    pub(crate) questions: usize,
    pub(crate) correct: usize,
}

impl Score {
    /// Share of right answers.
    #[expect(clippy::cast_precision_loss, reason = "a count of questions")]
    pub(crate) fn accuracy(&self) -> f64 {
        self.correct as f64 / self.questions.max(1) as f64
    }
}

/// What to export, and where to.
#[derive(Clone, Debug)]
pub(crate) struct ExportRequest {
    pub(crate) checkpoint: PathBuf,
    pub(crate) output: PathBuf,
    /// Round the weights to bf16.
    pub(crate) bf16: bool,
    pub(crate) tokenizer: Option<String>,
    pub(crate) overwrite: bool,
}

/// A finished export.
#[derive(Clone, Debug)]
pub(crate) struct Exported {
    pub(crate) checkpoint: PathBuf,
    pub(crate) step: u64,
    pub(crate) output: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) tokenizer: Option<String>,
    /// For the user.
    pub(crate) notes: Vec<String>,
}

/// Completes a configuration from the files that it names.
pub(crate) type FillIn = fn(&mut JobSpec) -> Result<(), FillInError>;

/// Why a configuration cannot be completed.
#[derive(Debug)]
pub(crate) enum FillInError {
    /// A key contradicts the files.
    Invalid(Invalid),
    /// The files cannot be used.
    Refused(Refusal),
}

/// What a preflight check looks at, beside configuration and initial weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Checks {
    /// Data and checkpoints, whose directory is locked: on the node that has rank 0.
    Start,
    /// Data: on other nodes.
    Data,
    /// Data and a checkpoint that the job names. Changes nothing.
    DryRun,
}

/// The result of a successful preflight check.
#[derive(Debug, Default)]
pub(crate) struct Preflight {
    /// Checkpoint to resume from.
    pub(crate) resume_from: Option<PathBuf>,
    /// The run that wrote it.
    pub(crate) parent: Option<Parent>,
    /// It has all steps of the job: this many.
    pub(crate) complete: Option<u64>,
    /// The data, by split.
    pub(crate) data: BTreeMap<&'static str, DataSet>,
    /// Bytes of the state that checkpoints contain.
    pub(crate) state_bytes: u64,
    /// Printed before the workers start.
    pub(crate) warnings: Vec<String>,
    /// Held until the job has ended.
    pub(crate) lock: Option<HeldLock>,
}
