//! Entry points for the fuzz targets.

use std::path::Path;

use xlaunch_spec::model::ModelShape;

use super::families::Family;
use super::{INDEX, config, source};
use crate::inherited::CONFIG;

/// Returns the shape that a `config.json` describes, and the first key that the configuration of an export in the same
/// family does not represent.
pub(crate) fn config(json: &[u8]) -> Option<(ModelShape, Option<&'static str>)> {
    let shape = config::parse(Path::new(CONFIG), json).ok()?;
    let lost = config::unrepresented(Family::of(shape.arch), &shape).map(|(key, _)| key);
    // A class of the library may refuse what this trainer accepts.
    let lost = lost.filter(|key| *key != "model.heads");
    Some((shape, lost))
}

/// Returns the files that an index names; none if it is rejected.
pub(crate) fn index(json: &[u8]) -> Vec<String> {
    source::files_of_index(Path::new(INDEX), json).unwrap_or_default().into_keys().collect()
}
