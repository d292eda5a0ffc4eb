//! Sources of given weights: a model in Hugging Face's layout, a checkpoint, or a `model.safetensors` of this trainer.
//!
//! A model may be used with shorter sequences than it was made for. The rest of its shape is a property of the weights.

use std::path::{Path, PathBuf};

use rayon::ThreadPool;
use xlaunch_data::TOKENIZER_FILE;
use xlaunch_spec::job::{Invalid, JobSpec};
use xlaunch_spec::model::{ModelShape, Positions};

use crate::checkpoint::{self, Abandoned, CheckpointError, Piece, Sink, State, directory};
use crate::data::{Dataset, TokenizerSource};
use crate::error::{Result, WorkerError};
use crate::hub;
use crate::huggingface::{Directory, ModelError, refuse_other_weights};
use crate::inherited::Inherited;
use crate::model::layout::Layout;

/// Weights of a model, before any are read.
#[derive(Clone, Debug)]
pub enum Weights {
    /// A model in Hugging Face's layout.
    HuggingFace(Box<Directory>),
    /// A checkpoint with its state.
    Checkpoint(PathBuf, Box<State>),
    /// A file of parameters under this trainer's names. It does not record the shape of the model.
    File(PathBuf),
}

impl Weights {
    /// Detects the kind of `path`: a directory in Hugging Face's layout, a checkpoint, a directory of checkpoints, a
    /// run, or a file. What does not exist counts as a file, as another job may be about to write it.
    pub fn open(path: &Path) -> Result<Self> {
        if Directory::is_one(path) {
            return Ok(Self::HuggingFace(Box::new(Directory::open(path)?)));
        }
        refuse_other_weights(path)?;
        if !path.is_dir() {
            return Ok(Self::File(path.into()));
        }
        let (path, _) = directory::locate(path)?;
        let state = directory::state(&path)?;
        state.model.check().map_err(|invalid| CheckpointError::Damaged {
            path: path.clone(),
            reason: invalid.to_string(),
        })?;
        Ok(Self::Checkpoint(path, Box::new(state)))
    }

    /// The directory or file.
    pub fn path(&self) -> &Path {
        match self {
            Self::HuggingFace(directory) => directory.path(),
            Self::Checkpoint(path, _) | Self::File(path) => path,
        }
    }

    /// Returns the shape of the model; `None` if the weights are only a file.
    pub fn shape(&self) -> Option<&ModelShape> {
        match self {
            Self::HuggingFace(directory) => Some(directory.shape()),
            Self::Checkpoint(_, state) => Some(&state.model),
            Self::File(_) => None,
        }
    }

    /// Returns a message for the user if files contradict each other.
    pub fn note(&self) -> Option<String> {
        match self {
            Self::HuggingFace(directory) => directory.note(),
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
            Self::File(path) => checkpoint::read_weights(path, layout, threads, sink)?,
        }
        Ok(())
    }

    /// Returns the files that came with the weights, other than sizes and values.
    pub fn inherited(&self) -> Option<Inherited> {
        match self {
            Self::HuggingFace(directory) => Some(Inherited::read(directory.path())),
            Self::Checkpoint(_, state) => state.inherited.clone(),
            Self::File(_) => None,
        }
    }

    /// Returns the file of the model's tokenizer, if it came with one.
    fn tokenizer(&self) -> Option<PathBuf> {
        Some(self.path().join(TOKENIZER_FILE)).filter(|path| path.is_file())
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
        let Some((key, theirs, ours)) = contradiction(own, &spec.model.resolve()?) else { return Ok(()) };
        let whose = self.path().display();
        let problem = format!("{ours} contradicts checkpoint.init: it is {theirs} in {whose}");
        Err(Invalid::new(key, problem, format!("{theirs}, or no such key")))
    }
}

/// Opens a job's data. If its tokenizer is unknown, uses that of the initial weights.
pub fn dataset(spec: &JobSpec, shape: &ModelShape) -> Result<Dataset> {
    let mut dataset = Dataset::open(spec, shape)?;
    if let Some(init) =
        spec.checkpoint.init.as_ref().filter(|_| dataset.tokenizer == TokenizerSource::Unknown)
        && let Some(path) = Weights::open(Path::new(init))?.tokenizer()
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
