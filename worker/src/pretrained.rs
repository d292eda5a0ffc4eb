//! Opens a trained model for use outside training: its shape, tokenizer and weights, and a device.
//!
//! ```text
//! path --find--> Source: shape, where the weights are, tokenizer --load--> Model on a device
//! ```
//! The path is a checkpoint, a directory of checkpoints or a run's directory (the newest valid checkpoint is used), or
//! a model in Hugging Face's layout. Weights are verified as they are read, go to the device piece by piece, and must
//! be finite.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;

use rayon::ThreadPool;
use xlaunch_data::{TOKENIZER_FILE, Tokenizer};
use xlaunch_engine::{Backend, CudaOptions, EngineError, PoolMode, Work};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::Precision;
use xlaunch_spec::model::ModelShape;
use xlaunch_spec::quantities::shortage_texts;

use crate::checkpoint::{self, Abandoned, CheckpointError, Piece, directory};
use crate::error::WorkerError;
use crate::hub;
use crate::huggingface;
use crate::inherited::Inherited;
use crate::model::layout::Layout;
use crate::model::{BackendHandle, Model};
use crate::weights::{Weights, open_newest};
use xlaunch_spec::refusal::Refusal;

/// Number of pieces of weights, of up to 4 MiB each, that wait for the device.
const WEIGHTS_READ_AHEAD: usize = 8;

/// Device to compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The first GPU if there is one, otherwise the CPU.
    Auto,
    /// The first GPU.
    Cuda,
    /// All cores, in fp32.
    Cpu,
}

/// Device and precision of a computation, and the memory that it may use.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Device to compute on.
    pub device: Device,
    /// Precision on a GPU.
    pub precision: Precision,
    /// Bytes of the host's memory that are available; `None` if that is unknown.
    pub host_memory: Option<u64>,
}

/// A trained model on disk.
#[derive(Debug)]
pub struct Source {
    /// Sizes of the model.
    pub shape: ModelShape,
    /// Tokenizer that it was trained with, if known.
    pub tokenizer: Option<Tokenizer>,
    /// Other settings in the model's directory or, for a checkpoint, in the directory of its initial weights.
    pub inherited: Option<Inherited>,
    /// True if the source is a checkpoint of a run rather than a model in Hugging Face's layout.
    pub is_run: bool,
    /// Notes for the user.
    pub notes: Vec<String>,
    /// The path at which it was found.
    path: PathBuf,
    weights: Weights,
}

impl Source {
    /// Finds the model at `path`.
    pub fn find(path: &Path) -> Result<Self, Refusal> {
        if !path.exists() {
            let message = format!("failed to open {}: {}", path.display(), hub::missing(path));
            return Err(Refusal { exit: ExitCode::Usage, message });
        }
        if crate::peft::PeftDirectory::is_one(path) {
            let weights = Weights::open(path)?;
            return Self::find(weights.without_adapter().path())?.adapted(weights);
        }
        if huggingface::Directory::is_one(path) {
            return Self::hugging_face(path);
        }
        huggingface::refuse_other_weights(path).map_err(WorkerError::from)?;
        let open = |found: &Path| {
            Ok((directory::state(found)?, checkpoint::tokenizer(found)?, Weights::open_checkpoint(found)?))
        };
        let ((state, tokenizer, weights), rejected) =
            open_newest(path, open).map_err(|error| match error {
                WorkerError::Checkpoint(CheckpointError::None { path }) => not_a_model(&path),
                error => error.into(),
            })?;
        let (shape, inherited) = (state.model, state.inherited);
        let notes = rejected.iter().map(skipped).collect();
        Ok(Self { shape, tokenizer, inherited, is_run: true, notes, path: path.into(), weights })
    }

    fn hugging_face(path: &Path) -> Result<Self, Refusal> {
        let directory = huggingface::Directory::open(path).map_err(WorkerError::from)?;
        let (shape, notes) = (directory.shape().clone(), directory.note().into_iter().collect());
        let weights = Weights::HuggingFace(Box::new(directory));
        let (tokenizer, inherited) = (weights.tokenizer()?, Some(Inherited::read(path)));
        Ok(Self { shape, tokenizer, inherited, is_run: false, notes, path: path.into(), weights })
    }

    /// Adds the adapter at `path`, if there is one.
    pub fn with_adapter(self, path: Option<&Path>) -> Result<Self, Refusal> {
        let Some(path) = path else { return Ok(self) };
        let weights = self.weights.clone().with_adapter(path)?;
        self.adapted(weights)
    }

    /// Replaces the weights by the same with an adapter. Files of a tokenizer that came with it come first.
    fn adapted(self, weights: Weights) -> Result<Self, Refusal> {
        let (tokenizer, inherited) =
            (weights.tokenizer()?.or(self.tokenizer), weights.inherited().or(self.inherited));
        Ok(Self { tokenizer, inherited, weights, ..self })
    }

    /// Returns the tokenizer of this name (`bytes`, `gpt2`, or a file), or by default the model's own.
    pub fn tokenizer(&self, name: Option<&str>) -> Result<Tokenizer, Refusal> {
        let tokenizer = match (name, &self.tokenizer) {
            (Some(name), _) => {
                Tokenizer::open(name).map_err(|error| Refusal::new(ExitCode::Usage, error.to_string()))?
            }
            (None, Some(tokenizer)) => tokenizer.clone(),
            (None, None) if !self.is_run => {
                let message = format!(
                    "{} has no {TOKENIZER_FILE}: write it in Python with \
                     `AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`, or name another tokenizer with \
                     `--tokenizer`",
                    self.weights.path().display()
                );
                return Err(Refusal { exit: ExitCode::Usage, message });
            }
            (None, None) => {
                let message = format!(
                    "{} has no tokenizer: it was trained on token files; name theirs with `--tokenizer \
                     gpt2|bytes|FILE.json`",
                    self.weights.path().display()
                );
                return Err(Refusal { exit: ExitCode::Usage, message });
            }
        };
        let (ids, vocab) = (tokenizer.required_vocab(), self.shape.vocab);
        if ids > vocab {
            let message = format!(
                "tokenizer `{}` has {ids} ids, but the model's vocabulary has {vocab}: it was trained with another one",
                tokenizer.name()
            );
            let exit = if name.is_some() { ExitCode::Usage } else { ExitCode::Data };
            return Err(Refusal { exit, message });
        }
        Ok(tokenizer)
    }

    /// Opens a device, as [`open_device`] does, and [loads](Self::load) the weights onto it.
    ///
    /// # Errors
    /// If they do not fit into the host's memory: the kernel's OOM killer would end this process without a message.
    pub fn load_on(
        &self,
        target: Target,
        timed: bool,
        note: &mut dyn FnMut(&str),
        interrupted: &dyn Fn() -> bool,
    ) -> Result<(BackendHandle, Model), Refusal> {
        let backend = open_device(target.device, target.precision, timed)?;
        if let Some(available) = target.host_memory.filter(|_| !backend.is_asynchronous()) {
            let parameters = Layout::new(&self.shape).whole().parameters() as u64;
            let needed = parameters.saturating_mul(size_of::<f32>() as u64);
            if needed > available {
                let [needed, available] = shortage_texts(needed, available);
                let message = format!(
                    "the weights of {} need {needed} of memory on the CPU, in fp32, but only {available} are \
                     available",
                    self.weights.path().display()
                );
                return Err(Refusal { exit: ExitCode::Usage, message });
            }
        }
        let model = self.load(&backend, note, interrupted)?;
        Ok((backend, model))
    }

    /// Loads the weights onto a device. Those of a run are the newest valid ones; `note` receives lines about newer
    /// ones that are damaged.
    pub fn load(
        &self,
        backend: &BackendHandle,
        note: &mut dyn FnMut(&str),
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Model, Refusal> {
        let model = Model::zeroed(backend, &self.shape).map_err(WorkerError::from)?;
        let threads = threads()?;
        let read = |weights: &Weights| self.read(weights, &model, &threads, interrupted);
        let not_finite = match &self.weights {
            // Only reading a checkpoint shows whether its hashes match, and a running job may have deleted it by now.
            Weights::Checkpoint(..) => {
                let open = |found: &Path| read(&Weights::open_checkpoint(found)?);
                let (not_finite, rejected) = open_newest(&self.path, open)?;
                let damaged = rejected.iter().filter(|(found, error)| error.rejects(found)).map(skipped);
                damaged.filter(|line| !self.notes.contains(line)).for_each(|line| note(&line));
                not_finite
            }
            weights => read(weights)?,
        };
        if interrupted() {
            return Err(Refusal::interrupted());
        }
        match not_finite {
            None => Ok(model),
            Some(path) => {
                let message =
                    format!("{}: weights are not finite; take an earlier checkpoint", path.display());
                Err(Refusal { exit: ExitCode::Data, message })
            }
        }
    }

    /// Reads weights into a model, until interrupted. Returns their path if they are not finite.
    fn read(
        &self,
        weights: &Weights,
        model: &Model,
        threads: &ThreadPool,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<PathBuf>, WorkerError> {
        let not_finite = AtomicBool::new(false);
        let (sender, pieces) = sync_channel::<Piece>(WEIGHTS_READ_AHEAD);
        std::thread::scope(|scope| {
            let not_finite = &not_finite;
            let reader = std::thread::Builder::new().name("weights".into());
            let reader = reader.spawn_scoped(scope, move || {
                let sink = |piece: Piece| {
                    if !piece.values.iter().all(|value| value.is_finite()) {
                        not_finite.store(true, Ordering::Relaxed);
                        return Err(Abandoned);
                    }
                    sender.send(piece).map_err(|_| Abandoned)
                };
                weights.read(&self.shape, &Layout::new(&self.shape), threads, &sink)
            });
            let reader = reader
                .map_err(|source| WorkerError::Io { what: "failed to start threads".into(), source })?;
            // On an early return this is dropped, which ends the reader.
            let pieces = pieces;
            for Piece { at, values, .. } in pieces.iter().take_while(|_| !interrupted()) {
                model.write_weights(at, &values)?;
            }
            drop(pieces);
            reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })?;
        Ok(not_finite.into_inner().then(|| weights.path().into()))
    }
}

/// Opens a device. `precision` applies to GPUs. `timed` selects kernels by timing them, which pays off for long work
/// only.
pub fn open_device(device: Device, precision: Precision, timed: bool) -> Result<BackendHandle, Refusal> {
    if device != Device::Cpu {
        let precision = crate::model::engine_precision(precision);
        let options = CudaOptions { deterministic: !timed, ..CudaOptions::new(precision, PoolMode::On) };
        match Backend::cuda(0, options) {
            Ok(backend) => {
                backend.prepare(Work::Any);
                return Ok(BackendHandle::new(backend));
            }
            Err(error)
                if device == Device::Cuda
                    || !matches!(error, EngineError::Library { .. } | EngineError::Device { .. }) =>
            {
                let Refusal { exit, message } = WorkerError::from(error).into();
                return Err(Refusal { exit, message: format!("{message}; `--device cpu` needs no GPU") });
            }
            // This host has no driver or no GPU.
            Err(_) => {}
        }
    }
    Ok(BackendHandle::new(Backend::cpu(cores(), PoolMode::On)))
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn threads() -> Result<ThreadPool, Refusal> {
    rayon::ThreadPoolBuilder::new().num_threads(cores()).build().map_err(no_threads)
}

fn no_threads(error: impl std::fmt::Display) -> Refusal {
    Refusal { exit: ExitCode::Internal, message: format!("failed to start threads: {error}") }
}

/// Returns a line for the user about a checkpoint that was rejected.
fn skipped((path, error): &(PathBuf, CheckpointError)) -> String {
    format!("skipped {}: {error}", path.display())
}

fn not_a_model(path: &Path) -> Refusal {
    let message = format!("{} is {}", path.display(), hub::no_model(path));
    Refusal { exit: ExitCode::Usage, message }
}
