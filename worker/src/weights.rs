//! Sources of initial weights that the user names: a model in Hugging Face's layout, a checkpoint, or a
//! `model.safetensors` of this trainer.
//!
//! A model may be used with shorter sequences than it was made for. The rest of its shape is a property of the weights.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::{ThreadPool, ThreadPoolBuilder};
use xlaunch_data::{TOKENIZER_FILE, Tokenizer};
use xlaunch_spec::job::{Invalid, JobSpec};
use xlaunch_spec::model::{ModelShape, Positions};

use crate::adapter::{Adapter, ValuesHash};
use crate::checkpoint::{self, Abandoned, CheckpointError, Frozen, Piece, Sink, State, directory};
use crate::data::{DataError, Dataset, TokenizerSource};
use crate::error::{Result, WorkerError};
use crate::hub;
use crate::huggingface::{Directory, ModelError, refuse_other_weights};
use crate::inherited::Inherited;
use crate::model::layout::Layout;
use crate::peft::PeftDirectory;

/// Maximum number of checkpoints that a running job may delete while one of them is opened.
const MAX_DELETED: usize = 10;

/// Weights of a model, before any are read.
#[derive(Clone, Debug)]
pub enum Weights {
    /// A model in Hugging Face's layout.
    HuggingFace(Box<Directory>),
    /// A checkpoint with its state.
    Checkpoint(PathBuf, Box<State>),
    /// A model in one of the other forms, and an adapter for it.
    Adapted(Box<Adapted>),
    /// A file of parameters under this trainer's names. It does not record the shape of the model.
    File(PathBuf),
}

/// Weights and an adapter that is added to them.
#[derive(Clone, Debug)]
pub struct Adapted {
    /// The checkpoint or directory of the adapter.
    path: PathBuf,
    base: Weights,
    adapter: Adapter,
    /// State of the checkpoint of the adapter, which has the hash of the weights. `None` for PEFT's layout.
    state: Option<Box<State>>,
}

impl Adapted {
    /// Returns the files that came with the weights. Those of a tokenizer beside the adapter come first: trainers for
    /// PEFT save the tokenizer and the template that the adapter was trained with.
    fn inherited(&self) -> Option<Inherited> {
        match &self.state {
            Some(state) => state.inherited.clone().or_else(|| self.base.inherited()),
            None if self.path.join(TOKENIZER_FILE).is_file() => {
                let Inherited { config, generation_config, .. } = self.base.inherited().unwrap_or_default();
                Some(Inherited { config, generation_config, ..Inherited::read(&self.path) })
            }
            None => self.base.inherited(),
        }
    }

    /// Reads the weights with the adapter added, and requires that they are those that the adapter was trained with.
    fn read(&self, shape: &ModelShape, layout: &Layout, threads: &ThreadPool, sink: Sink<'_>) -> Result<()> {
        let (hash, abandoned) = (ValuesHash::default(), AtomicBool::new(false));
        let read = |merge: Sink<'_>| {
            let hashed = |piece: Piece| {
                hash.add(piece.at, &piece.values);
                merge(piece).inspect_err(|Abandoned| abandoned.store(true, Ordering::Relaxed))
            };
            self.base.read(shape, layout, threads, &hashed)
        };
        self.adapter.merge(shape, read, sink)?;
        let saved = self
            .state
            .as_ref()
            .filter(|state| Layout::new(&state.model).fingerprint() == layout.fingerprint());
        match saved.and_then(|state| state.adapted.as_ref()) {
            Some(adapted) if !abandoned.into_inner() => {
                let found = Frozen { path: self.base.path().into(), hash: hash.finish() };
                Ok(adapted.frozen.check(&self.path, &found)?)
            }
            _ => Ok(()),
        }
    }
}

impl Weights {
    /// Detects the kind of `path`: a directory in Hugging Face's layout, a checkpoint, a directory of checkpoints, a
    /// run, or a file. What does not exist counts as a file, as another job may be about to write it.
    pub fn open(path: &Path) -> Result<Self> {
        if PeftDirectory::is_one(path) {
            let directory = PeftDirectory::open(path)?;
            let base = open_base(path, &directory.base()?)?;
            return Self::adapted(&directory, base);
        }
        if Directory::is_one(path) {
            return Ok(Self::HuggingFace(Box::new(Directory::open(path)?)));
        }
        refuse_other_weights(path)?;
        if !path.is_dir() {
            return Ok(Self::File(path.into()));
        }
        let opened = open_newest(path, Self::open_checkpoint).map_err(|error| match error {
            WorkerError::Checkpoint(CheckpointError::None { path }) => {
                let reason = format!("it is {}", hub::no_model(&path));
                WorkerError::from(ModelError::Read { path, reason })
            }
            error => error,
        });
        opened.map(|(weights, _)| weights)
    }

    /// Opens the checkpoint `path`.
    pub(crate) fn open_checkpoint(path: &Path) -> Result<Self> {
        let state = directory::state(path)?;
        state
            .model
            .check()
            .map_err(|invalid| CheckpointError::Damaged { path: path.into(), reason: invalid.to_string() })?;
        match state.adapted.clone() {
            None => Ok(Self::Checkpoint(path.into(), Box::new(state))),
            Some(adapted) => Self::adapted_checkpoint(path.into(), &state, &adapted, None),
        }
    }

    /// Adds the adapter at `path`, which is in PEFT's layout or a checkpoint of a run that trains adapters, to these
    /// weights.
    pub fn with_adapter(self, path: &Path) -> Result<Self> {
        if PeftDirectory::is_one(path) {
            return Self::adapted(&PeftDirectory::open(path)?, self);
        }
        if !path.is_dir() {
            return Err(ModelError::Read { path: path.into(), reason: hub::missing(path) }.into());
        }
        refuse_other_weights(path)?;
        let (path, _) = directory::locate(path)?;
        let state = directory::state(&path)?;
        let Some(adapted) = state.adapted.clone() else {
            let difference = "it has all weights of a model, no adapter".into();
            return Err(WorkerError::Checkpoint(CheckpointError::OtherTraining { path, difference }));
        };
        if let Some((key, theirs, ours)) = self.shape().and_then(|own| contradiction(&state.model, own)) {
            let difference =
                format!("{key} of its model is {theirs}, but {ours} in {}", self.path().display());
            return Err(WorkerError::Checkpoint(CheckpointError::OtherModel { path, difference }));
        }
        Self::adapted_checkpoint(path, &state, &adapted, Some(self))
    }

    fn adapted(directory: &PeftDirectory, base: Self) -> Result<Self> {
        let path = directory.path().to_path_buf();
        let Some(shape) = base.shape() else {
            let reason = format!("{} does not record the shape of its model", base.path().display());
            return Err(ModelError::Read { path, reason }.into());
        };
        let adapter = directory.read(shape)?;
        Ok(Self::Adapted(Box::new(Adapted { path, base, adapter, state: None })))
    }

    /// Opens a checkpoint of a run that trains adapters, with the weights `base`, or those that the run adapted.
    fn adapted_checkpoint(
        path: PathBuf,
        state: &State,
        adapted: &checkpoint::Adapted,
        base: Option<Self>,
    ) -> Result<Self> {
        let threads = ThreadPoolBuilder::new().build().map_err(|error| WorkerError::Io {
            what: "failed to start threads".into(),
            source: std::io::Error::other(error),
        })?;
        let adapter = Adapter::read_checkpoint(&path, state, &adapted.lora, &threads)?;
        let base = base.map_or_else(|| open_base(&path, &adapted.frozen.path), Ok)?;
        Ok(Self::Adapted(Box::new(Adapted { path, base, adapter, state: Some(Box::new(state.clone())) })))
    }

    /// Returns the weights that the adapter adapts, or these weights if there is none.
    pub fn without_adapter(&self) -> &Self {
        if let Self::Adapted(adapted) = self { &adapted.base } else { self }
    }

    /// Returns the adapter, if there is one.
    pub fn adapter(&self) -> Option<&Adapter> {
        if let Self::Adapted(adapted) = self { Some(&adapted.adapter) } else { None }
    }

    /// Checks that a job that trains adapters can start from the adapter of these weights, if they have one.
    pub fn check_adapter(&self, spec: &JobSpec, shape: &ModelShape) -> Result<()> {
        let Some(adapter) = self.adapter().filter(|_| spec.lora.is_on()) else { return Ok(()) };
        match adapter.lora.difference(&spec.lora, shape) {
            None => Ok(()),
            Some((key, theirs, ours)) => Err(WorkerError::Checkpoint(CheckpointError::OtherTraining {
                path: self.path().into(),
                difference: format!("{key} is {theirs} there, {ours} in this job"),
            })),
        }
    }

    /// The directory or file.
    pub fn path(&self) -> &Path {
        match self {
            Self::HuggingFace(directory) => directory.path(),
            Self::Adapted(adapted) => &adapted.path,
            Self::Checkpoint(path, _) | Self::File(path) => path,
        }
    }

    /// Returns the shape of the model; `None` if the weights are only a file.
    pub fn shape(&self) -> Option<&ModelShape> {
        match self {
            Self::HuggingFace(directory) => Some(directory.shape()),
            Self::Checkpoint(_, state) => Some(&state.model),
            Self::Adapted(adapted) => adapted.base.shape(),
            Self::File(_) => None,
        }
    }

    /// Returns a message for the user if files contradict each other.
    pub fn note(&self) -> Option<String> {
        match self {
            Self::HuggingFace(directory) => directory.note(),
            Self::Adapted(adapted) => adapted.base.note(),
            Self::Checkpoint(..) | Self::File(_) => None,
        }
    }

    /// Checks that these are weights of such a model, as far as that is possible without reading the values.
    pub fn check(&self, shape: &ModelShape) -> Result<()> {
        self.check_shape(shape)?;
        match self {
            Self::HuggingFace(directory) => drop(directory.weights(shape, &Layout::new(shape))?),
            // Opening it has checked the names and sizes of its files.
            Self::Checkpoint(..) => {}
            Self::Adapted(adapted) => adapted.base.check(shape)?,
            Self::File(path) if !path.exists() => {
                return Err(ModelError::Read { path: path.clone(), reason: hub::missing(path) }.into());
            }
            Self::File(path) => checkpoint::check_weights(path, &Layout::new(shape))?,
        }
        Ok(())
    }

    /// Reads all values as parameters in the arena of `layout`, which is the layout of `shape`.
    pub fn read(
        &self,
        shape: &ModelShape,
        layout: &Layout,
        threads: &ThreadPool,
        sink: Sink<'_>,
    ) -> Result<()> {
        self.check_shape(shape)?;
        match self {
            Self::HuggingFace(directory) => directory.weights(shape, layout)?.read(threads, sink)?,
            Self::Checkpoint(path, state) => read_checkpoint(path, &state.model, layout, threads, sink)?,
            Self::Adapted(adapted) => {
                adapted.read(shape, layout, threads, sink)?;
            }
            Self::File(path) => checkpoint::read_weights(path, layout, threads, sink)?,
        }
        Ok(())
    }

    /// Returns the files that came with the weights, other than sizes and values.
    pub fn inherited(&self) -> Option<Inherited> {
        match self {
            Self::HuggingFace(directory) => Some(Inherited::read(directory.path())),
            Self::Checkpoint(_, state) => state.inherited.clone(),
            Self::Adapted(adapted) => adapted.inherited(),
            Self::File(_) => None,
        }
    }

    /// Returns the file of the model's tokenizer, if it came with one.
    fn tokenizer_file(&self) -> Option<PathBuf> {
        let own = Some(self.path().join(TOKENIZER_FILE)).filter(|path| path.is_file());
        own.or_else(|| self.adapter().and_then(|_| self.without_adapter().tokenizer_file()))
    }

    /// Opens the tokenizer that the model was trained with, if it is known. That of an adapter comes first.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        let (path, of_run) = match self {
            Self::HuggingFace(directory) => (directory.path(), false),
            Self::Checkpoint(path, _) => (&**path, true),
            Self::Adapted(adapted) => (&*adapted.path, adapted.state.is_some()),
            Self::File(_) => return Ok(None),
        };
        let own = if of_run {
            checkpoint::tokenizer(path)?
        } else {
            let file = path.join(TOKENIZER_FILE);
            let opened = file.is_file().then(|| Tokenizer::from_file(&file)).transpose();
            opened.map_err(|error| DataError::Tokenizer { reason: error.to_string() })?
        };
        match self {
            Self::Adapted(adapted) if own.is_none() => adapted.base.tokenizer(),
            _ => Ok(own),
        }
    }

    fn check_shape(&self, wanted: &ModelShape) -> Result<()> {
        let Some(own) = self.shape() else { return Ok(()) };
        match contradiction(own, wanted) {
            None => Ok(()),
            Some((key, theirs, ours)) => Err(WorkerError::Checkpoint(CheckpointError::OtherModel {
                path: self.path().into(),
                difference: format!("{key} is {theirs} there, {ours} in this job"),
            })),
        }
    }

    /// Completes `[model]`: without a preset, keys that are not set take their values from the weights.
    ///
    /// # Errors
    /// If a key, or the preset, contradicts the weights.
    pub fn fill_in(&self, spec: &mut JobSpec) -> std::result::Result<(), Invalid> {
        let Some(own) = self.shape() else { return spec.model.resolve().map(drop) };
        if spec.model.preset.is_none() {
            spec.model.complete(own);
        }
        // A key that contradicts the weights is named first: it may not fit the other sizes, which are theirs.
        let wanted = if spec.model.preset.is_none() { spec.model.over(own) } else { spec.model.resolve()? };
        let Some((key, theirs, ours)) = contradiction(own, &wanted) else {
            return spec.model.resolve().map(drop);
        };
        let whose = self.path().display();
        let problem = format!("{ours} contradicts checkpoint.init: it is {theirs} in {whose}");
        Err(Invalid::new(key, problem, format!("{theirs}, or no such key")))
    }
}

/// Opens the newest checkpoint at a path as [`directory::locate`] finds it. If `open` finds it damaged, or its job has
/// deleted it in the meantime, tries the next one, unless `path` is the checkpoint itself. Also returns the rejected
/// ones.
pub(crate) fn open_newest<T>(
    path: &Path,
    mut open: impl FnMut(&Path) -> Result<T>,
) -> Result<(T, Vec<(PathBuf, CheckpointError)>)> {
    let (mut rejected, mut deleted) = (Vec::new(), 0);
    loop {
        let (found, newer) = directory::locate_except(path, rejected)?;
        rejected = newer;
        match open(&found) {
            Err(WorkerError::Checkpoint(error)) if found != path && error.rejects(&found) => {
                if found.symlink_metadata().is_ok() {
                    rejected.push((found, error));
                } else if deleted < MAX_DELETED {
                    deleted += 1;
                } else {
                    return Err(error.into());
                }
            }
            result => return Ok((result?, rejected)),
        }
    }
}

/// Opens the weights that the adapter `path` adapts.
fn open_base(path: &Path, base: &Path) -> Result<Weights> {
    if base.exists() {
        // PEFT's path may be relative to the working directory, which may be another one when a run is used.
        return Weights::open(&std::path::absolute(base).unwrap_or_else(|_| base.into()));
    }
    let reason = format!(
        "its adapters need the weights in {0}, but {1}; if they have moved, make {0} a link to them, or give \
         `generate`, `eval` or `serve` the new directory and `--adapter {2}`",
        base.display(),
        hub::missing(base),
        path.display()
    );
    Err(ModelError::Read { path: path.into(), reason }.into())
}

/// Opens a job's data. If its tokenizer is unknown, uses that of the initial weights.
pub fn dataset(spec: &JobSpec, shape: &ModelShape) -> Result<Dataset> {
    let mut dataset = Dataset::open(spec, shape)?;
    if let Some(init) =
        spec.checkpoint.init.as_ref().filter(|_| dataset.tokenizer == TokenizerSource::Unknown)
        && let Some(path) = Weights::open(Path::new(init))?.tokenizer_file()
    {
        dataset.tokenizer = TokenizerSource::File { path, manifest: None };
    }
    Ok(dataset)
}

/// Reads the parameters of a checkpoint into the arena of a model that may have shorter sequences.
fn read_checkpoint(
    path: &Path,
    own: &ModelShape,
    layout: &Layout,
    threads: &ThreadPool,
    sink: Sink<'_>,
) -> Result<()> {
    let saved = Layout::new(own);
    // Both models have the same parameters, except that position embeddings may have fewer rows here.
    let moved = |mut piece: Piece| {
        let index = saved.params.partition_point(|param| param.range.end <= piece.at);
        let (Some(from), Some(to)) = (saved.params.get(index), layout.params.get(index)) else {
            return Err(Abandoned);
        };
        let first = piece.at - from.range.start;
        piece.values.truncate(to.stored().len().saturating_sub(first));
        piece.at = to.range.start + first;
        if piece.values.is_empty() { Ok(()) } else { sink(piece) }
    };
    checkpoint::read(path, own, &saved, &[], threads, &moved)?;
    Ok(())
}

/// Returns the first key for which a model of shape `wanted` cannot use weights of shape `own`, with both values.
fn contradiction(own: &ModelShape, wanted: &ModelShape) -> Option<(&'static str, String, String)> {
    // Sequences may be shorter. Rotary positions have no weights, so with them sequences may also be longer.
    let seq = match own.positions {
        Positions::Learned => wanted.seq.max(own.seq),
        Positions::Rotary => own.seq,
    };
    own.difference(&ModelShape { seq, ..wanted.clone() })
}
