//! `xlaunch export`: turns a checkpoint into a directory that Hugging Face's libraries can load.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::PoisonError;

use fs_err::File;
use rayon::{ThreadPool, ThreadPoolBuilder};
use xlaunch_data::{TOKENIZER_FILE, Tokenizer};

use crate::adapter;
use crate::checkpoint::{self, Abandoned, Adapted, CheckpointError, Piece, Sink, State, directory};
use crate::error::Result;
use crate::huggingface::destination::Destination;
use crate::huggingface::writer::{Plan, Writer, write_error};
use crate::huggingface::{
    ADAPTER_CONFIG, ADAPTER_WEIGHTS, Directory, INDEX, ModelError, card, config, tensor_names,
};
use crate::model::layout::Layout;
use crate::peft::{self, PeftDirectory};
use crate::weights::{Weights, open_newest};

pub use crate::huggingface::writer::ExportDtype;

/// Maximum size of a file in bytes, at which the library splits models.
const MAX_FILE_BYTES: u64 = 5_000_000_000;

/// Settings of an export.
#[derive(Clone, Debug)]
pub struct Export {
    /// A checkpoint, a directory of checkpoints, or a run.
    pub checkpoint: PathBuf,
    /// The directory to write.
    pub output: PathBuf,
    /// Element type of the weights.
    pub dtype: ExportDtype,
    /// Replaces the checkpoint's tokenizer: `bytes`, `gpt2`, or the path of a `tokenizer.json`.
    pub tokenizer: Option<String>,
    /// True to replace an earlier export.
    pub overwrite: bool,
    /// Content of the export.
    pub content: Content,
}

/// Content of an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Content {
    /// The model of a checkpoint that has all weights.
    #[default]
    Model,
    /// The adapters of a checkpoint, in PEFT's layout.
    Adapter,
    /// The model of a checkpoint with adapters, which are added to the weights.
    Merged,
}

/// A finished export.
#[derive(Clone, Debug)]
pub struct Exported {
    /// The checkpoint.
    pub checkpoint: PathBuf,
    /// Steps completed by the checkpoint.
    pub step: u64,
    /// The directory that was written.
    pub output: PathBuf,
    /// Total size of the weights in bytes.
    pub bytes: u64,
    /// Name of the tokenizer; `None` if it is unknown.
    pub tokenizer: Option<String>,
    /// Messages for the user, such as about newer checkpoints that are damaged.
    pub notes: Vec<String>,
}

/// Exports a checkpoint.
pub fn export(options: &Export) -> Result<Exported> {
    export_in_files(options, MAX_FILE_BYTES)
}

pub(crate) fn export_in_files(options: &Export, max_file_bytes: u64) -> Result<Exported> {
    refuse_exported(&options.checkpoint)?;
    let export = |path: &Path| export_checkpoint(options, path, max_file_bytes);
    let (mut exported, rejected) = open_newest(&options.checkpoint, export)?;
    exported.notes.splice(..0, rejected.iter().map(|(_, error)| error.to_string()));
    Ok(exported)
}

fn export_checkpoint(options: &Export, path: &Path, max_file_bytes: u64) -> Result<Exported> {
    let state = directory::state(path)?;
    state
        .model
        .check()
        .map_err(|invalid| CheckpointError::Damaged { path: path.into(), reason: invalid.to_string() })?;
    check_content(path, state.adapted.as_ref(), options.content)?;
    let trained = checkpoint::tokenizer(path)?;
    let tokenizer = match &options.tokenizer {
        Some(name) => Some(named_tokenizer(name, trained.as_ref())?),
        None => trained,
    };
    if let Some(adapted) = state.adapted.as_ref().filter(|_| options.content == Content::Adapter) {
        let files = card::tokenizer_files(
            &state.model,
            tokenizer.as_ref(),
            &card::inherited(&state, tokenizer.as_ref()),
        )?;
        let bytes = export_adapter(options, path, (&state, adapted), files)?;
        let (output, step) = (options.output.clone(), state.step);
        let tokenizer = tokenizer.map(|tokenizer| tokenizer.name().to_owned());
        let notes = Vec::new();
        return Ok(Exported { checkpoint: path.into(), step, output, bytes, tokenizer, notes });
    }
    let layout = Layout::new(&state.model);
    let family = config::family_for(&state.model).map_err(|(key, value)| ModelError::Output {
        path: options.output.clone(),
        reason: format!(
            "no family of Hugging Face's models has `{key}` = {value} with the model's other keys"
        ),
    })?;
    let files = card::files(family, &state, &layout, options.dtype, tokenizer.as_ref())?;
    let destination = Destination::claim(&options.output, options.overwrite)?;
    let tensors = tensor_names::tensors(family.names, &state.model, &layout);
    let plan = Plan::new(tensors, options.dtype, max_file_bytes);
    let (bytes, index) = (plan.bytes(), plan.index());
    write_weights(Writer::create(plan, destination.path())?, |threads, sink| {
        Weights::open_checkpoint(path)?.read(&state.model, &layout, threads, sink)
    })?;
    let index = index.map(|index| (INDEX, format!("{index:#}\n").into_bytes()));
    for (name, contents) in index.into_iter().chain(files) {
        write_file(&destination.path().join(name), &contents)?;
    }
    let output = destination.commit()?;
    let mut notes = Vec::new();
    if tokenizer.as_ref().is_some_and(|tokenizer| card::is_replaced(family, tokenizer)) {
        notes.push(
            "`AutoTokenizer` of transformers 5 takes the pre-tokenizer of Qwen2 for all models of type `qwen2`, and \
             gives other ids than the tokenizer of this model; load it with `PreTrainedTokenizerFast`"
                .into(),
        );
    }
    let tokenizer = tokenizer.map(|tokenizer| tokenizer.name().to_owned());
    Ok(Exported { checkpoint: path.into(), step: state.step, output, bytes, tokenizer, notes })
}

/// Refuses a directory that has the layout of an export.
fn refuse_exported(path: &Path) -> Result<()> {
    let what = if PeftDirectory::is_one(path) {
        "an adapter in PEFT's layout"
    } else if Directory::is_one(path) {
        "a model in Hugging Face's layout"
    } else {
        return Ok(());
    };
    let reason = format!("it is {what} already; name a checkpoint or a run");
    Err(ModelError::Read { path: path.into(), reason }.into())
}

/// Requires that a checkpoint has the content to export.
fn check_content(path: &Path, adapted: Option<&Adapted>, content: Content) -> Result<()> {
    let difference = match (adapted, content) {
        (None, Content::Adapter | Content::Merged) => {
            "it has all weights of a model, no adapters; leave out `--adapter` and `--merge`".into()
        }
        (Some(adapted), Content::Model) => format!(
            "it has adapters (LoRA) of {}; pass `--adapter` to export them, or `--merge` for the whole model",
            adapted.frozen.path.display()
        ),
        _ => return Ok(()),
    };
    Err(ModelError::Content { path: path.into(), reason: difference }.into())
}

/// Exports the adapters of a checkpoint with these files. Returns the size of the weights in bytes.
fn export_adapter(
    options: &Export,
    path: &Path,
    (state, adapted): (&State, &Adapted),
    files: Vec<(&'static str, Vec<u8>)>,
) -> Result<u64> {
    let (shape, lora) = (&state.model, &adapted.lora);
    let layout = adapter::layout(shape, lora)?;
    let config = peft::config(shape, lora, &adapted.frozen.path)?;
    let destination = Destination::claim(&options.output, options.overwrite)?;
    let plan = Plan::single(ADAPTER_WEIGHTS, peft::tensors(shape, &layout), options.dtype);
    let bytes = plan.bytes();
    write_weights(Writer::create(plan, destination.path())?, |threads, sink| {
        checkpoint::read(path, shape, layout.trained(), &[], threads, sink)?;
        Ok(())
    })?;
    for (name, contents) in files {
        write_file(&destination.path().join(name), &contents)?;
    }
    write_file(&destination.path().join(ADAPTER_CONFIG), format!("{config:#}\n").as_bytes())?;
    destination.commit()?;
    Ok(bytes)
}

/// Reads and verifies weights, and writes them as they are read.
fn write_weights(writer: Writer, read: impl FnOnce(&ThreadPool, Sink<'_>) -> Result<()>) -> Result<()> {
    let threads = ThreadPoolBuilder::new().build().map_err(|error| ModelError::Write {
        path: writer.dir().into(),
        reason: format!("failed to start threads: {error}"),
    })?;
    let failure = Mutex::new(None);
    let sink = |piece: Piece| {
        writer.put(piece.at, &piece.values).map_err(|error| {
            failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            Abandoned
        })
    };
    read(&threads, &sink)?;
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error.into()),
        None => Ok(writer.finish()?),
    }
}

fn write_file(path: &Path, contents: &[u8]) -> std::result::Result<(), ModelError> {
    let written = File::create(path).and_then(|mut file| {
        file.write_all(contents)?;
        file.sync_all()
    });
    written.map_err(|error| write_error(path, &error))
}

/// Opens the tokenizer given by `--tokenizer`. It must start texts in the same way as the data that the model was
/// trained on.
fn named_tokenizer(name: &str, trained: Option<&Tokenizer>) -> std::result::Result<Tokenizer, ModelError> {
    let tokenizer = Tokenizer::open(name).map_err(|error| ModelError::Tokenizer {
        name: name.into(),
        reason: format!("{error}; `bytes`, `gpt2` or the path of a {TOKENIZER_FILE}"),
    })?;
    let describe = |tokenizer: &Tokenizer| match tokenizer.bos() {
        Some(id) => format!("with `{}`", tokenizer.decode(&[id])),
        None => "without a token before them".into(),
    };
    match trained.filter(|trained| trained.bos() != tokenizer.bos()) {
        None => Ok(tokenizer),
        Some(trained) => Err(ModelError::Tokenizer {
            name: name.into(),
            reason: format!(
                "it begins texts {}, but the model was trained on texts {}; leave out --tokenizer",
                describe(&tokenizer),
                describe(trained)
            ),
        }),
    }
}

#[cfg(test)]
mod tests {
    use xlaunch_spec::job::LoraSection;

    use super::*;
    use crate::checkpoint::Frozen;

    #[test]
    fn checkpoint_without_the_content_to_export_is_named_as_the_source() {
        let frozen = Frozen { path: "base".into(), hash: String::new() };
        let adapted = Adapted { lora: LoraSection::default(), frozen };
        let refused = |adapted, content| {
            check_content(Path::new("runs/lm/a"), adapted, content).unwrap_err().to_string()
        };
        let adapters = refused(Some(&adapted), Content::Model);
        assert!(
            adapters.starts_with("cannot export runs/lm/a: it has adapters (LoRA) of base"),
            "{adapters}"
        );
        let weights = refused(None, Content::Adapter);
        assert!(weights.starts_with("cannot export runs/lm/a: it has all weights of a model"), "{weights}");
    }
}
