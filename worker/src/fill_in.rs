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

/// Takes from the data what the configuration leaves open: the vocabulary of a prepared directory. Replaces symbolic
/// links in the path to resume from, as `latest` is another run as soon as this one starts.
pub fn fill_in(spec: &mut JobSpec) -> Result<(), FillInError> {
    let resume = &mut spec.checkpoint.resume;
    if resume != "off" && resume != "auto" {
        // What does not exist is reported by the preflight check.
        let resolved =
            fs_err::canonicalize(&*resume).ok().and_then(|path| path.into_os_string().into_string().ok());
        *resume = resolved.unwrap_or_else(|| std::mem::take(resume));
    }
    match Prepared::of("data.train", &spec.data.train)? {
        Some(prepared) => prepared.fill_in(spec).map_err(FillInError::Invalid),
        None => Ok(()),
    }
}
