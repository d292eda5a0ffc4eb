//! `xlaunch stacks`.

use clap::Args;
use serde_json::json;
use xlaunch_agent::stacks;
use xlaunch_proto::v1::StacksRequest;
use xlaunch_spec::exit::ExitCode;

use super::choice::whole;
use super::output::{QueryError, print};
use super::target::{Server, Target};
use crate::client::launches;
use crate::render::text;

/// Options of `xlaunch stacks`.
#[derive(Debug, Args)]
pub(super) struct Stacks {
    #[command(flatten)]
    target: Target,
    /// Rank whose processes to show [default: all ranks]
    #[arg(long, value_name = "R", value_parser = whole(0..=u32::MAX))]
    rank: Option<u32>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(options: Stacks) -> Result<ExitCode, QueryError> {
    let request = StacksRequest { rank: options.rank };
    let ranks = match options.target.server("stacks").await? {
        Server::Daemon(mut daemon, id) => daemon.stacks(id, request).await?,
        Server::Agents(launches) => {
            let launch = launches.one().await?;
            // Debuggers may take as long as the time limit of other calls.
            let mut agent = launches::connect_without_call_timeout(&launch).await?;
            let failed = |status| launches::call_error(&launch, &status);
            let mut replies = agent.stacks(request).await.map_err(failed)?.into_inner();
            let mut all = Vec::new();
            while let Some(reply) = replies.message().await.map_err(failed)? {
                all.push(reply);
            }
            stacks::join(all)
        }
    };
    let shown = if options.json {
        text::json(&json!({ "ranks": ranks }))
    } else {
        ranks.iter().map(stacks::text).collect::<Vec<_>>().join("\n")
    };
    print(shown.as_bytes())?;
    Ok(ExitCode::Done)
}
