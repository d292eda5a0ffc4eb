//! The last lines of a log for the page, which shows them whole.

use std::sync::Arc;

use tokio::sync::mpsc;
use tonic::Status;
use xlaunch_proto::convert::Logs;
use xlaunch_proto::ids::Rank;
use xlaunch_proto::v1::LogsReply;

use super::access::Quota;
use super::logs::{self, Source};
use super::{OWNERS, quota};
use crate::orders::Node;
use crate::web::LogTail;

/// Bytes of lines that are shown: the rest of a longer log is left out at its beginning.
const BYTES: usize = 256 << 10;

/// What the page asks for lines.
pub fn log_tail(node: Node) -> LogTail {
    let owners = quota(OWNERS);
    Arc::new(move |job, rank, stderr, lines| {
        let (node, owners) = (node.clone(), owners.clone());
        Box::pin(async move {
            let pieces = open(&node, owners, job, rank, stderr, lines).map_err(|status| said(&status))?;
            collect(pieces).await.map_err(|status| said(&status))
        })
    })
}

fn said(status: &Status) -> String {
    status.message().to_owned()
}

fn open(
    node: &Node,
    owners: Quota,
    job: u64,
    rank: u32,
    stderr: bool,
    lines: usize,
) -> Result<mpsc::Receiver<Result<LogsReply, Status>>, Status> {
    let found = node.view().jobs.get(&job).cloned();
    let found = found.ok_or_else(|| Status::not_found(format!("there is no job {job}")))?;
    let logs = Logs { rank: Rank(rank), stderr, follow: false, tail_lines: Some(lines as u64) };
    logs::stream(Source { view: node.watch(), job: found, logs, owners }, ())
}

async fn collect(mut pieces: mpsc::Receiver<Result<LogsReply, Status>>) -> Result<Vec<String>, Status> {
    let mut bytes = Vec::new();
    while let Some(piece) = pieces.recv().await {
        bytes.extend_from_slice(&piece?.bytes);
        let over = bytes.len().saturating_sub(BYTES);
        bytes.drain(..over);
    }
    Ok(String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect())
}
