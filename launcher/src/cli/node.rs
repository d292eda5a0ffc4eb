//! `xlaunch node`.

use clap::Args;
use xlaunch_spec::exit::ExitCode;

use super::output::{QueryError, print, terminal_width, unix_seconds};
use crate::client::daemon::{DaemonAddress, DaemonClient};
use crate::render::{node, text};

/// Options of `xlaunch node`.
#[derive(Debug, Args)]
pub(super) struct Node {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonAddress,
}

pub(super) async fn run(options: Node) -> Result<ExitCode, QueryError> {
    let status = DaemonClient::connect(&options.daemon).await?.node().await?;
    let text = if options.json {
        text::json(&status)
    } else {
        node::table(&status, unix_seconds(), terminal_width())
    };
    print(text.as_bytes())?;
    Ok(ExitCode::Done)
}
