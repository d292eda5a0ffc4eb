//! Completes a configuration from the files that it names, before the job is planned.

use std::path::Path;

use xlaunch_data::walk::WILDCARDS;
use xlaunch_spec::job::{DataSource, Invalid, JobSpec};

use crate::data::{DataError, Prepared};
use crate::error::WorkerError;
use crate::weights::Weights;
use xlaunch_spec::refusal::Refusal;

/// Reason why a configuration cannot be completed.
#[derive(Debug)]
pub enum FillInError {
    /// A key contradicts the files.
    Invalid(Invalid),
    /// The files cannot be used.
    Refused(Refusal),
}

impl From<WorkerError> for FillInError {
    fn from(error: WorkerError) -> Self {
        Self::Refused(error.into())
    }
}

impl From<DataError> for FillInError {
    fn from(error: DataError) -> Self {
        WorkerError::from(error).into()
    }
}

/// Fills keys that the configuration does not set from files: the model's sizes from `checkpoint.init`, otherwise the
/// vocabulary from a prepared directory. Replaces symbolic links in paths of other runs, because `latest` points to
/// another run as soon as this one starts, and replaces a run in `checkpoint.init` with its newest checkpoint.
pub fn fill_in(spec: &mut JobSpec) -> Result<(), FillInError> {
    let checkpoint = &mut spec.checkpoint;
    for path in [Some(&mut checkpoint.resume), checkpoint.init.as_mut()].into_iter().flatten() {
        // Keep paths that do not exist (the preflight check reports them), and the values `off` and `auto`.
        let resolved = Path::new(path).is_absolute().then(|| fs_err::canonicalize(&*path).ok()).flatten();
        if let Some(resolved) = resolved.and_then(|path| path.into_os_string().into_string().ok()) {
            *path = resolved;
        }
    }
    if let Some(init) = &mut spec.checkpoint.init {
        let weights = Weights::open(Path::new(init))?;
        if let Some(path) = weights.path().to_str() {
            path.clone_into(init);
        }
        weights.fill_in(spec).map_err(FillInError::Invalid)?;
    }
    let prepared = Prepared::all("data.train", &spec.data.train)?;
    if let Some((first, others)) = prepared.split_first() {
        others.iter().try_for_each(|other| first.check_matches(other))?;
    }
    if spec.dpo.is_on() && !prepared.iter().any(Prepared::has_preferences) {
        let is_missing =
            |source: &&DataSource| !source.path.contains(WILDCARDS) && !Path::new(&source.path).exists();
        if let Some(DataSource { path, .. }) = spec.data.train.iter().find(is_missing) {
            return Err(DataError::NoFiles { key: "data.train", patterns: path.clone() }.into());
        }
        return Err(FillInError::Invalid(Invalid::new(
            "dpo.beta",
            "training on preferences needs pairs of answers, and data.train has none".into(),
            "a directory that `xlaunch data prepare --preferences` has written, or no [dpo]".into(),
        )));
    }
    for prepared in prepared {
        prepared.fill_in(spec).map_err(FillInError::Invalid)?;
    }
    Ok(())
}
