//! Directories of the cache of the Hugging Face Hub, and names of models on it that were given instead of a path.

use std::path::Path;

use crate::checkpoint::directory;

pub(crate) use xlaunch_data::hub::missing;

/// Says that a directory has no model of any kind and, if it is that of a model in the hub's cache, where the model is.
pub(crate) fn no_model(path: &Path) -> String {
    let snapshots = path.join("snapshots");
    let hint = if snapshots.is_dir() {
        format!("; in the cache of Hugging Face's hub, a model is a directory in {}", snapshots.display())
    } else {
        directory::newest_run(path)
    };
    format!(
        "neither a checkpoint, nor a directory of checkpoints, nor a run's directory with checkpoints, nor a model in \
         Hugging Face's layout with a config.json{hint}"
    )
}
