//! Connects the ranks that save a checkpoint, through their sessions with the agent.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use tokio::sync::mpsc;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{CommitCheckpoint, SavedChunk, SavedFile, ShardSaved};

use super::{Request, Shared};
use crate::checkpoint::saver::{Exchange, Written};
use crate::checkpoint::{Chunk, parse_hash};

/// Interval at which a wait for the other ranks checks that the agent is still there.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Time for the agent to read the reports. It takes longer only if the agent hangs.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);

/// The saving thread's end of the session.
#[derive(Debug)]
pub(super) struct SessionExchange {
    /// Weak: the session ends with the training thread, even if a save hangs.
    pub(super) requests: mpsc::WeakUnboundedSender<Request>,
    pub(super) shared: Arc<Shared>,
    pub(super) commits: Receiver<CommitCheckpoint>,
}

impl Exchange for SessionExchange {
    fn written(&mut self, step: u64, result: Result<Vec<Written>, String>) {
        let (files, error) = match result {
            Ok(files) => (files.into_iter().map(to_wire).collect(), String::new()),
            Err(error) => (Vec::new(), error),
        };
        self.report(Report::ShardSaved(ShardSaved { step, files, error }));
    }

    fn all_written(&mut self, step: u64) -> Result<Vec<Written>, String> {
        loop {
            match self.commits.recv_timeout(POLL_INTERVAL) {
                Ok(commit) if commit.step != step => {}
                Ok(CommitCheckpoint { error, .. }) if !error.is_empty() => return Err(error),
                Ok(CommitCheckpoint { files, .. }) => return files.into_iter().map(from_wire).collect(),
                Err(RecvTimeoutError::Timeout) if self.shared.lost().is_none() => {}
                Err(_) => return Err("lost the agent".into()),
            }
        }
    }

    fn flush(&mut self) {
        let Some(requests) = self.requests.upgrade() else { return };
        let (sender, flushed) = std::sync::mpsc::channel();
        // A failure is handled as in `Control::send`.
        let _ = requests.send(Request::Flush(sender));
        drop(requests);
        // Nothing is ever sent: `recv_timeout` returns when the sender is dropped.
        let _ = flushed.recv_timeout(FLUSH_TIMEOUT);
    }

    fn report(&mut self, report: Report) {
        if let Some(requests) = self.requests.upgrade() {
            // A failure is handled as in `Control::send`.
            let _ = requests.send(Request::Report(report));
        }
    }
}

fn to_wire(file: Written) -> SavedFile {
    let chunk = |Chunk { offset, bytes, xxh3_128 }: Chunk| SavedChunk {
        offset,
        bytes,
        xxh3_128: parse_hash(&xxh3_128).map_or_else(Vec::new, |hash| hash.to_be_bytes().to_vec()),
    };
    SavedFile { name: file.name, chunks: file.chunks.into_iter().map(chunk).collect() }
}

fn from_wire(file: SavedFile) -> Result<Written, String> {
    let chunk = |SavedChunk { offset, bytes, xxh3_128 }: SavedChunk| {
        let hash =
            <[u8; 16]>::try_from(&*xxh3_128).map_err(|_| format!("a rank sent no hash of {}", file.name))?;
        Ok(Chunk { offset, bytes, xxh3_128: format!("{:032x}", u128::from_be_bytes(hash)) })
    };
    let chunks = file.chunks.into_iter().map(chunk).collect::<Result<_, String>>()?;
    Ok(Written { name: file.name, chunks })
}
