//! Completes a configuration from the files that it names, before the job is planned.

use xlaunch_proto::spec::{Invalid, JobSpec};

use crate::data::{DataError, Prepared};
use crate::error::WorkerError;
use crate::preflight::Refusal;

/// Why a configuration cannot be completed.
#[derive(Debug)]
pub enum FillInError {
    /// A key contradicts the files.
    Invalid(Invalid),
    /// The files cannot be used.
    Refused(Refusal),
}

impl From<DataError> for FillInError {
    fn from(error: DataError) -> Self {
        Self::Refused(WorkerError::from(error).into())
    }
}

/// Takes from the data what the configuration leaves open: the vocabulary of a prepared directory.
pub fn fill_in(spec: &mut JobSpec) -> Result<(), FillInError> {
    match Prepared::of("data.train", &spec.data.train)? {
        Some(prepared) => prepared.fill_in(spec).map_err(FillInError::Invalid),
        None => Ok(()),
    }
}
