//! Completes a configuration from the files that it names, before the job is planned.

use std::path::Path;

use xlaunch_proto::spec::{Invalid, JobSpec};

use crate::data::{DataError, Prepared};
use crate::error::WorkerError;
use crate::preflight::Refusal;
use crate::weights::Weights;

/// Why a configuration cannot be completed.
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

/// Takes what the configuration leaves open from the files: the model's sizes from `checkpoint.init`, otherwise the
/// vocabulary from a prepared directory.
pub fn fill_in(spec: &mut JobSpec) -> Result<(), FillInError> {
    if let Some(init) = &spec.checkpoint.init {
        let weights = Weights::open(Path::new(init))?;
        weights.fill_in(spec).map_err(FillInError::Invalid)?;
    }
    match Prepared::of("data.train", &spec.data.train)? {
        Some(prepared) => prepared.fill_in(spec).map_err(FillInError::Invalid),
        None => Ok(()),
    }
}
