//! Reads the last lines of a log for the web page.

use std::sync::Arc;

use tokio::sync::mpsc;
use tonic::Status;
use xlaunch_proto::convert::Logs;
use xlaunch_proto::v1::LogsReply;
use xlaunch_spec::ids::Rank;

use super::access::Quota;
use super::file_readers;
use super::logs::{self, Source};
use crate::commands::NodeHandle;
use crate::web::LogTail;

/// Maximum size of a tail. Longer tails lose their beginning.
const MAX_TAIL_BYTES: usize = 256 << 10;

/// Returns the function with which the page reads log lines.
pub(crate) fn log_tail(node: NodeHandle) -> LogTail {
    let file_readers = file_readers();
    Arc::new(move |job, rank, stderr, lines| {
        let (node, file_readers) = (node.clone(), file_readers.clone());
        Box::pin(async move {
            let message = |status: Status| status.message().to_owned();
            let chunks = open(&node, file_readers, job, rank, stderr, lines).map_err(message)?;
            collect(chunks).await.map_err(message)
        })
    })
}

fn open(
    node: &NodeHandle,
    file_readers: Quota,
    job: u64,
    rank: u32,
    stderr: bool,
    lines: usize,
) -> Result<mpsc::Receiver<Result<LogsReply, Status>>, Status> {
    let found = node.view().jobs.get(&job).cloned();
    let found = found.ok_or_else(|| Status::not_found(format!("there is no job {job}")))?;
    let logs = Logs { rank: Rank(rank), stderr, follow: false, tail_lines: Some(lines as u64), after: None };
    logs::stream(Source { view: node.watch(), job: found, logs, file_readers }, ())
}

async fn collect(mut chunks: mpsc::Receiver<Result<LogsReply, Status>>) -> Result<Vec<String>, Status> {
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.recv().await {
        bytes.extend_from_slice(&chunk?.bytes);
        let excess = bytes.len().saturating_sub(MAX_TAIL_BYTES);
        bytes.drain(..excess);
    }
    Ok(String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect())
}
