//! `xlaunch jobs`.

use clap::Args;
use xlaunch_proto::json;
use xlaunch_spec::exit::ExitCode;

use super::choice::whole;
use super::output::{QueryError, print, terminal_width};
use crate::client::daemon::{DaemonAddress, DaemonClient};
use crate::render::{jobs, text};
use xlaunch_host::clock::unix_ms;

/// Options of `xlaunch jobs`.
#[derive(Debug, Args)]
pub(super) struct Jobs {
    /// Include jobs that have ended
    #[arg(short, long)]
    all: bool,
    /// Show only the N newest jobs
    #[arg(long, value_name = "N", value_parser = whole(1..=u32::MAX))]
    limit: Option<u32>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonAddress,
}

pub(super) async fn run(options: Jobs) -> Result<ExitCode, QueryError> {
    let mut daemon = DaemonClient::connect(&options.daemon).await?;
    let mut list = daemon.list(options.all, options.limit).await?;
    jobs::sort_by_number(&mut list);
    let text = if options.json {
        text::json(&list.iter().map(json::job).collect::<Vec<_>>())
    } else {
        jobs::table(&list, unix_ms(), terminal_width())
    };
    print(text.as_bytes())?;
    Ok(ExitCode::Done)
}
