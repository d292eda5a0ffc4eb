//! `xlaunch stop`.

use clap::Args;
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::StopRequest;

use super::output::{QueryError, print};
use super::target::{Server, Target};
use crate::client::launches;
use crate::render::job;

/// Options of `xlaunch stop`.
#[derive(Debug, Args)]
pub(super) struct Stop {
    #[command(flatten)]
    target: Target,
}

pub(super) async fn run(options: Stop) -> Result<ExitCode, QueryError> {
    let answer = match options.target.server("stop").await? {
        Server::Daemon(mut daemon, id) => job::cancelled(&daemon.cancel(id, false).await?),
        Server::Agents(launches) => {
            let launch = launches.one().await?;
            let mut agent = launches::connect(&launch).await?;
            agent.stop(StopRequest {}).await.map_err(|status| launches::call_error(&launch, &status))?;
            format!("{} is stopping\n", launch.name)
        }
    };
    print(answer.as_bytes())?;
    Ok(ExitCode::Done)
}
