//! The tokenizer of a checkpoint's model.

use std::path::Path;

use xlaunch_data::Tokenizer;

use super::manifest::{self, Checked};
use super::{CheckpointError, TOKENIZER};
use crate::data::MAX_TOKENIZER_BYTES;

/// Returns the tokenizer of the checkpoint `dir`: from its `tokenizer.json`, or bytes if its run read files as bytes.
/// `None` if it is unknown.
pub fn tokenizer(dir: &Path) -> Result<Option<Tokenizer>, CheckpointError> {
    let Checked { state, manifest } = manifest::check(dir)?;
    if manifest.files.iter().any(|entry| entry.name == TOKENIZER) {
        let json = manifest::read_verified(dir, &manifest, TOKENIZER, MAX_TOKENIZER_BYTES)?;
        let damaged = |reason: String| CheckpointError::Damaged { path: dir.into(), reason };
        let tokenizer = Tokenizer::from_json(&json);
        let end_of_text = state.end_of_text;
        // Older checkpoints do not record the id; the tokenizer determines it.
        let known = tokenizer.map(|tokenizer| match end_of_text {
            Some(_) => tokenizer.with_end_of_text(end_of_text),
            None => tokenizer,
        });
        return known.map(Some).map_err(|error| damaged(format!("{TOKENIZER}: {error}")));
    }
    let is_bytes = state.spec["data"]["tokenizer"] == "bytes";
    Ok(is_bytes.then(Tokenizer::bytes))
}
