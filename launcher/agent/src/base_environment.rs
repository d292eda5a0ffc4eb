//! The environment that workers inherit, before [`worker_environment`](crate::worker_environment) adds variables of its
//! own.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::process::Command;

use xlaunch_proto::env;

/// The environment that workers inherit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum BaseEnvironment {
    /// The environment of this process.
    #[default]
    Own,
    /// The environment of the user who submitted the job. The daemon's agent does not run in that environment itself:
    /// `LD_PRELOAD` and similar variables must not affect the process that supervises the job.
    Submitted(BTreeMap<OsString, OsString>),
}

impl BaseEnvironment {
    /// Returns the value of a variable.
    pub fn get(&self, name: impl AsRef<OsStr>) -> Option<OsString> {
        match self {
            Self::Own => std::env::var_os(name),
            Self::Submitted(variables) => variables.get(name.as_ref()).cloned(),
        }
    }

    /// Returns all variables.
    pub(crate) fn variables(&self) -> BTreeMap<OsString, OsString> {
        match self {
            Self::Own => std::env::vars_os().collect(),
            Self::Submitted(variables) => variables.clone(),
        }
    }

    /// Makes a command inherit this environment.
    pub(crate) fn apply(&self, command: &mut Command) {
        if let Self::Submitted(variables) = self {
            command.env_clear().envs(variables);
        }
        // The token is a secret of the agents.
        command.env_remove(env::TOKEN);
    }
}
