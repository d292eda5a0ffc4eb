//! Settings of a job on several nodes, and the keys that its connections use.

use std::path::{Path, PathBuf};

use xlaunch_spec::command::{self, GroupSpec};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::refusal::Refusal;

use super::net::{Security, TOKEN_VARIABLE, Token};

/// Settings of a job on several nodes.
#[derive(Clone, Debug)]
pub struct Nodes {
    /// Description of the group of nodes.
    pub spec: GroupSpec,
    /// File with the token, unless the token is in the environment.
    pub token_file: Option<PathBuf>,
}

impl Nodes {
    /// Returns how connections of this job are secured.
    pub(super) async fn security(&self) -> Result<Security, Refusal> {
        let Self { spec, token_file } = self;
        let security = keys(spec, token_file.as_deref()).await?;
        match &spec.run_id {
            // Coordinators of other jobs may occupy some of the ports.
            Some(run_id) if spec.endpoint.ports.len() > 1 => Ok(security.for_job(run_id)),
            _ => Ok(security),
        }
    }
}

async fn keys(spec: &GroupSpec, token_file: Option<&Path>) -> Result<Security, Refusal> {
    let token = match (spec.security, token_file) {
        (command::Security::Insecure, _) => return Ok(Security::Insecure),
        (command::Security::Munge, _) => {
            let munge = Security::munge().await;
            return munge.map_err(|error| Refusal::new(ExitCode::Usage, error.to_string()));
        }
        (command::Security::Token, Some(path)) => Token::read(path).map(Some),
        (command::Security::Token, None) => Token::from_environment(),
    };
    let token = token.map_err(|error| Refusal::new(error.exit_code(), error.to_string()))?;
    let missing = || Refusal::new(ExitCode::Usage, format!("{TOKEN_VARIABLE} is not set"));
    Security::from_token(&token.ok_or_else(missing)?)
        .map_err(|error| Refusal::new(ExitCode::Internal, error.to_string()))
}

/// The refusal of a node that cannot take part in its job.
pub(super) fn refuse(message: String) -> Refusal {
    Refusal::new(ExitCode::Rendezvous, message)
}
