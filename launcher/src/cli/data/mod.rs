//! `xlaunch data`: prepares text for training ([`prepare`]) and shows what was prepared ([`inspect`]).

mod inspect;
mod prepare;

use clap::Subcommand;
use xlaunch_data::PrepareError;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::refusal::Refusal;

use super::output::QueryError;

#[derive(Debug, Subcommand)]
pub(super) enum Data {
    /// Encode text as token files to train on
    Prepare(prepare::Prepare),
    /// Verify prepared data or token files, and show what they contain
    Inspect(inspect::Inspect),
}

pub(super) fn run(data: Data) -> Result<ExitCode, QueryError> {
    match data {
        Data::Prepare(options) => prepare::run(options),
        Data::Inspect(options) => inspect::run(&options),
    }
}

fn refusal(error: PrepareError) -> QueryError {
    let exit = match error {
        PrepareError::Usage(_) => ExitCode::Usage,
        PrepareError::Data(_) => ExitCode::Data,
        PrepareError::Internal(_) => ExitCode::Internal,
    };
    Refusal::new(exit, error.to_string()).into()
}
