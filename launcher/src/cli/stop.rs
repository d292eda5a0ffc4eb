//! `xlaunch stop`.

use std::time::Duration;

use clap::Args;
use xlaunch_proto::v1::StopRequest;
use xlaunch_spec::exit::ExitCode;

use super::output::{QueryError, print};
use super::target::{Server, Target};
use crate::client::launches;
use crate::render::job;

/// Options of `xlaunch stop`.
#[derive(Debug, Args)]
pub(super) struct Stop {
    #[command(flatten)]
    target: Target,
    /// Wait until the launch or job has ended
    #[arg(long)]
    wait: bool,
}

/// Interval between checks of a stopping launch.
const WAIT_POLL_INTERVAL: Duration = Duration::from_millis(100);

pub(super) async fn run(options: Stop) -> Result<ExitCode, QueryError> {
    let answer = match options.target.server("stop").await? {
        Server::Daemon(mut daemon, id) => {
            let cancelled = daemon.cancel(id, false).await?;
            let ended = if options.wait { Some(daemon.follow(id, |_| {}).await?) } else { None };
            match ended {
                Some(ended) => format!("job {id} {}\n", job::state_and_reason(&ended)),
                None => job::cancelled(&cancelled),
            }
        }
        Server::Agents(launches) => {
            let launch = launches.one().await?;
            let mut agent = launches::connect(&launch).await?;
            agent.stop(StopRequest {}).await.map_err(|status| launches::call_error(&launch, &status))?;
            if options.wait {
                while launches::is_running(&launch) {
                    tokio::time::sleep(WAIT_POLL_INTERVAL).await;
                }
                format!("{} has ended\n", launch.name)
            } else {
                format!("{} is stopping\n", launch.name)
            }
        }
    };
    print(answer.as_bytes())?;
    Ok(ExitCode::Done)
}
