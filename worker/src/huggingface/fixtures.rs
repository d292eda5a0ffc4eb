//! Small models of every family, with `config.json` and tensors as transformers 5.24 writes them:
//! `python3 tests/peers/model_families.py fixture worker/src/huggingface/testdata/families.json`.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use xlaunch_spec::model::ModelShape;

use super::config;

/// One model.
#[derive(Debug, Deserialize)]
pub(super) struct Fixture {
    pub(super) config: Value,
    /// Shapes of the tensors outside of blocks, and of those of the first block.
    pub(super) tensors: BTreeMap<String, Vec<usize>>,
}

impl Fixture {
    pub(super) fn shape(&self) -> ModelShape {
        config::parse(Path::new("config.json"), self.config.to_string().as_bytes()).unwrap()
    }
}

/// Returns all models by their names.
pub(super) fn all() -> BTreeMap<String, Fixture> {
    serde_json::from_str(include_str!("testdata/families.json")).unwrap()
}
