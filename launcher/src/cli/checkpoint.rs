//! `xlaunch checkpoint`.

use clap::Args;
use xlaunch_proto::v1::CheckpointRequest;
use xlaunch_spec::exit::ExitCode;

use super::output::{QueryError, print};
use super::target::{Server, Target};
use crate::client::launches;
use crate::render::text::{self, escape};

/// Options of `xlaunch checkpoint`.
#[derive(Debug, Args)]
pub(super) struct Checkpoint {
    #[command(flatten)]
    target: Target,
    /// Print step, path and seconds as JSON
    #[arg(long)]
    json: bool,
}

/// Waits until the checkpoint is complete, without a time limit.
pub(super) async fn run(options: Checkpoint) -> Result<ExitCode, QueryError> {
    let saved = match options.target.server("checkpoint").await? {
        Server::Daemon(mut daemon, id) => daemon.checkpoint(id).await?,
        Server::Agents(launches) => {
            let launch = launches.one().await?;
            let mut agent = launches::connect_without_call_timeout(&launch).await?;
            let reply = agent.checkpoint(CheckpointRequest {}).await;
            reply.map_err(|status| launches::call_error(&launch, &status))?.into_inner()
        }
    };
    let text = if options.json {
        text::json(&saved)
    } else {
        // The reply may come from another user's agent, so the path is not trusted.
        format!("{}\n", escape(&saved.path))
    };
    print(text.as_bytes())?;
    Ok(ExitCode::Done)
}
