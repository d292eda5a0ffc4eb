//! Entry points for the fuzz targets.

use std::path::Path;

use xlaunch_spec::model::ModelShape;

use super::{INDEX, config, source};
use crate::inherited::CONFIG;

/// Returns the shape that a `config.json` describes, and the shape read back from the configuration that an export
/// writes for it.
pub(crate) fn config(json: &[u8]) -> Option<(ModelShape, Option<ModelShape>)> {
    let shape = config::parse(Path::new(CONFIG), json).ok()?.shape;
    let written = config::write(&shape, config::TokenIds::default(), "float32").to_string();
    let again = config::parse(Path::new(CONFIG), written.as_bytes()).ok().map(|described| described.shape);
    Some((shape, again))
}

/// Returns the files that an index names; none if it is rejected.
pub(crate) fn index(json: &[u8]) -> Vec<String> {
    source::files_of_index(Path::new(INDEX), json).unwrap_or_default().into_keys().collect()
}
