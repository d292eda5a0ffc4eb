//! Entry points of the fuzz targets in `fuzz/`: parsers of untrusted files. Requires the feature `fuzzing`; not part of
//! the crate's public interface.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use serde_json::Value;
use xlaunch_spec::job::{JobSpec, Tokenizer};
use xlaunch_spec::model::{ModelSection, ModelShape};

pub use crate::checkpoint::fuzz::ListedFile;
use crate::checkpoint::fuzz::{read_tensors, valid_files};
use crate::checkpoint::{Batch, Parent, State, VERSION};
use crate::data::{fingerprint, open_tokens};
use xlaunch_spec::lineage::Fingerprint;

use crate::model::layout::Layout;

/// A directory in memory: writing to a disk would take longer than the code under test.
const SHARED_MEMORY: &str = "/dev/shm";
const VOCABULARY: usize = 1000;

static SHAPE: LazyLock<ModelShape> = LazyLock::new(|| {
    let section = ModelSection {
        layers: Some(1),
        dim: Some(16),
        heads: Some(2),
        ffn: Some(24),
        vocab: Some(33),
        ..ModelSection::default()
    };
    section.resolve().unwrap_or_else(|error| panic!("{error}"))
});
static LAYOUT: LazyLock<Layout> = LazyLock::new(|| Layout::new(&SHAPE));
static PARAMETERS: LazyLock<Vec<(String, Vec<usize>)>> =
    LazyLock::new(|| LAYOUT.params.iter().map(|param| (param.name.clone(), param.shape.clone())).collect());
static FILE: LazyLock<PathBuf> =
    LazyLock::new(|| Path::new(SHARED_MEMORY).join(format!("xlaunch-fuzz-{}", std::process::id())));

/// Returns the files of a manifest; `None` if the manifest is rejected.
pub fn manifest(json: &[u8]) -> Option<Vec<ListedFile>> {
    valid_files(json)
}

/// Returns a valid `state.json`.
pub fn example_state() -> Value {
    let spec = JobSpec::default();
    let state = State {
        version: VERSION,
        step: 10,
        sequences: 160,
        world_size: 2,
        model: SHAPE.clone(),
        seed: 1,
        run: "r".into(),
        parents: vec![Parent { run: "q".into(), step: 5 }],
        data: Some(Fingerprint { tokens: 7, hash: "00".into() }),
        batch: Some(Batch::of(&spec)),
        warmup: Some(3),
        val_loss: Some(1.5),
        best: None,
        end_of_text: Some(0),
        inherited: None,
        spec: serde_json::to_value(&spec).unwrap_or_default(),
        adapted: None,
        reference: None,
    };
    serde_json::to_value(state).unwrap_or_default()
}

/// Reads a state and compares it with a job.
pub fn state(json: &[u8]) {
    let Ok(read) = serde_json::from_slice::<State>(json) else { return };
    let written = serde_json::to_vec(&read).unwrap_or_default();
    assert_eq!(serde_json::from_slice::<State>(&written).ok(), Some(read.clone()), "as written");
    for world in [1, u32::MAX] {
        read.changes(&JobSpec::default(), world, &Fingerprint { tokens: 7, hash: "00".into() });
    }
}

/// Names and shapes of the parameters of the model whose files [`tensors`] reads.
pub fn parameters() -> &'static [(String, Vec<usize>)] {
    &PARAMETERS
}

/// Reads a file of parameters or moments.
pub fn tensors(bytes: &[u8], moments: bool) {
    if std::fs::write(&*FILE, bytes).is_ok() {
        read_tensors(&FILE, &LAYOUT, moments);
    }
}

/// Reads a file of token ids.
pub fn tokens(bytes: &[u8]) {
    if std::fs::write(&*FILE, bytes).is_err() {
        return;
    }
    let Ok(tokens) = open_tokens(std::slice::from_ref(&FILE), Tokenizer::Bin, VOCABULARY) else { return };
    assert!(tokens.len() <= bytes.len() as u64 / 2);
    let mut ids = Vec::new();
    let count = usize::try_from(tokens.len()).unwrap_or(0);
    if tokens.read(0, count, &mut ids).is_ok() {
        assert!(
            ids.len() == count && ids.iter().all(|id| usize::try_from(*id).is_ok_and(|id| id < VOCABULARY))
        );
    }
    let _ = fingerprint(&tokens);
}

/// Reads a `config.json`. If the model is accepted, an export of it describes the same model.
pub fn config(json: &[u8]) {
    if let Some((shape, lost)) = crate::huggingface::fuzz::config(json) {
        assert_eq!(shape.check(), Ok(()));
        assert_eq!(lost, None, "as written: {shape:?}");
    }
}

/// Returns the files that a `model.safetensors.index.json` names.
pub fn index(json: &[u8]) -> Vec<String> {
    crate::huggingface::fuzz::index(json)
}
