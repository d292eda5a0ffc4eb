//! The argument `JOB` of `status`, `logs`, `stacks`, `stop` and `checkpoint`: a plain number is a job of the daemon if
//! a daemon is listening; anything else names a running launch.

use std::path::{Path, PathBuf};

use clap::Args;
use xlaunch_agent::registry::Running;

use super::output::QueryError;
use crate::client::daemon::{DaemonAddress, DaemonClient};
use crate::client::launches;

/// The arguments that `status`, `logs`, `stacks`, `stop` and `checkpoint` have in common.
#[derive(Debug, Args)]
pub(super) struct Target {
    /// Number of a daemon's job, name of a launch or a prefix of it, or a directory with a running launch below it
    /// [default: the running launch]
    #[arg(value_name = "JOB")]
    run: Option<PathBuf>,
    #[command(flatten)]
    daemon: DaemonAddress,
}

/// The server that answers for a target.
pub(super) enum Server {
    /// The daemon, for the job of this number.
    Daemon(DaemonClient, u64),
    /// The agents of the named launches.
    Agents(Launches),
}

/// Launches that have not been looked up yet.
pub(super) struct Launches {
    pub(super) run: Option<PathBuf>,
    /// The subcommand that looks for them, for messages.
    command: &'static str,
    /// Why no daemon could be asked although the target is a number. It explains why nothing was found.
    no_daemon: Option<String>,
}

impl Target {
    /// Returns the server that answers `xlaunch COMMAND`.
    pub(super) async fn server(self, command: &'static str) -> Result<Server, QueryError> {
        let launches = |no_daemon| Server::Agents(Launches { run: self.run.clone(), command, no_daemon });
        let Some(job) = self.run.as_deref().and_then(Path::to_str).and_then(|run| run.parse().ok()) else {
            return Ok(launches(None));
        };
        match DaemonClient::connect(&self.daemon).await {
            Ok(daemon) => Ok(Server::Daemon(daemon, job)),
            Err(refusal) if self.daemon.is_given() => Err(refusal.into()),
            Err(refusal) => Ok(launches(Some(refusal.message))),
        }
    }
}

impl Launches {
    /// Looks up all launches that the target names. The result is never empty.
    pub(super) async fn all(&self) -> Result<Vec<Running>, QueryError> {
        launches::find_all(self.run.as_deref(), self.command).await.map_err(|message| self.explain(message))
    }

    pub(super) async fn one(&self) -> Result<Running, QueryError> {
        launches::find_one(self.run.as_deref(), self.command).await.map_err(|message| self.explain(message))
    }

    fn explain(&self, message: String) -> QueryError {
        match &self.no_daemon {
            Some(no_daemon) => format!("{message}\nfor a job of the daemon: {no_daemon}").into(),
            None => message.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn number_is_a_job_if_a_daemon_listens_and_a_word_is_a_launch() {
        let dir = tempfile::tempdir().unwrap();
        let _daemon = tokio::net::UnixListener::bind(dir.path().join("s")).unwrap();
        let server = async |run: &str, socket: &str| {
            let daemon = DaemonAddress { socket: Some(dir.path().join(socket)) };
            match (Target { run: Some(run.into()), daemon }).server("status").await {
                Ok(Server::Daemon(_, job)) => format!("job {job}"),
                Ok(Server::Agents(_)) => "a launch".into(),
                Err(QueryError::Refused(refusal)) => refusal.message,
                Err(QueryError::StdoutClosed) => String::new(),
            }
        };
        assert_eq!(server("7", "s").await, "job 7");
        for launch in ["train", "7-train", "./7", "-7", "7.toml"] {
            assert_eq!(server(launch, "s").await, "a launch", "{launch}");
        }
        // With --socket there is no fallback to launches.
        assert!(server("7", "other").await.contains("no daemon is listening"));
    }
}
