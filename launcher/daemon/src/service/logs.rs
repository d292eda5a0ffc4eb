//! Streams logs: from the job's agent while the job runs, from its files after it has ended.
//!
//! The job's user controls both, so neither is trusted: see [`crate::agents::connect`] and [`crate::safe_open`].

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{CWD, Dir, Mode, OFlags, openat};
use rustix::io::Errno;
use tokio::sync::{mpsc, watch};
use tonic::{Code, Status};
use xlaunch_proto::convert::Logs;
use xlaunch_proto::v1::{LogStream, LogsReply, LogsRequest, NodeJobState};

use super::access::Quota;
use super::calls;
use crate::agents::connect::connect;
use crate::safe_open::open_below;
use crate::view::{JobView, NodeView};
use xlaunch_agent::run_dir::rank_dir;
use xlaunch_agent::status::follow::{self, Open, Pieces, Start};

/// Number of chunks buffered for a slow client.
const CHUNK_CAPACITY: usize = 2;
/// Time for an agent to start its reply, and for the manager to notice the exit of an agent whose connection is broken.
pub(super) const AGENT_REPLY_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 300 } else { 10 });
/// Length to which an agent's error message is cut before it is forwarded.
const MAX_AGENT_MESSAGE_CHARS: usize = 1024;
/// Maximum number of attempts in one stream.
const MAX_ATTEMPTS: u32 = 1000;
/// Maximum number of entries read from a log directory.
const MAX_DIR_ENTRIES: usize = 100_000;

/// A requested log.
pub(super) struct Source {
    pub(super) view: watch::Receiver<Arc<NodeView>>,
    pub(super) job: Arc<JobView>,
    pub(super) logs: Logs,
    /// Quota that counts against the owner of the files: a hanging file system blocks a thread per reader.
    pub(super) file_readers: Quota,
}

/// Streams the log. Drops `guard` when the stream has ended.
///
/// # Errors
/// `FAILED_PRECONDITION` for a job that has not started. The stream contains the agent's errors, `NOT_FOUND` if there
/// is no log, or `FAILED_PRECONDITION` if the log must not be read.
pub(super) fn stream(
    source: Source,
    guard: impl Send + 'static,
) -> Result<mpsc::Receiver<Result<LogsReply, Status>>, Status> {
    use NodeJobState::{Queued, Starting, Unspecified};
    let job = &source.job.job;
    let waits = matches!(job.state(), Unspecified | Queued | Starting);
    if waits || (source.job.has_ended() && job.started_unix_ms == 0) {
        let has = if waits { "has not" } else { "never" };
        return Err(Status::failed_precondition(format!("job {} {has} started", job.id)));
    }
    Ok(calls::stream(CHUNK_CAPACITY, guard, |chunks| async move { source.send(&chunks).await }))
}

impl Source {
    async fn send(mut self, chunks: &Pieces) -> Result<(), Status> {
        if self.job.has_ended() {
            return self.send_files(chunks).await;
        }
        let AgentStream::Broken = self.send_from_agent(chunks).await? else { return Ok(()) };
        // The agent exits shortly before the manager notices the end of the job.
        let id = self.job.job.id;
        let has_ended = |view: &Arc<NodeView>| view.jobs.get(&id).is_none_or(|job| job.has_ended());
        let ended = match tokio::time::timeout(AGENT_REPLY_TIMEOUT, self.view.wait_for(has_ended)).await {
            Ok(Ok(view)) => view.jobs.get(&id).cloned(),
            _ => {
                let message = format!("the agent of job {id} does not answer; try again");
                return Err(Status::unavailable(message));
            }
        };
        let Some(job) = ended else {
            return Err(Status::not_found(format!(
                "job {id} was removed before its log was read to the end"
            )));
        };
        self.job = job;
        self.send_files(chunks).await
    }

    /// Sends the agent's stream. Afterwards, `self.logs` asks for the rest of the log.
    async fn send_from_agent(&mut self, chunks: &Pieces) -> Result<AgentStream, Status> {
        let stream = if self.logs.stderr { LogStream::Stderr } else { LogStream::Stdout };
        let request = LogsRequest {
            rank: self.logs.rank.0,
            stream: stream.into(),
            follow: self.logs.follow,
            tail_lines: self.logs.tail_lines,
            after: self.logs.after,
        };
        let call =
            async { Some(connect(&self.job.socket, self.job.job.uid).await.ok()?.logs(request).await) };
        let mut reply = match tokio::time::timeout(AGENT_REPLY_TIMEOUT, call).await {
            Ok(Some(Ok(reply))) => reply.into_inner(),
            Ok(Some(Err(status))) => return forwarded(&status),
            Ok(None) | Err(_) => return Ok(AgentStream::Broken),
        };
        loop {
            match reply.message().await {
                Ok(Some(chunk)) => {
                    self.logs.after = chunk.position.or(self.logs.after);
                    // If the client has disconnected, `stream` cancels this task.
                    let _ = chunks.send(Ok(chunk)).await;
                }
                Ok(None) => return Ok(AgentStream::Complete),
                Err(status) => return forwarded(&status),
            }
        }
    }

    async fn send_files(&self, chunks: &Pieces) -> Result<(), Status> {
        let (id, uid, rank) = (self.job.job.id, self.job.job.uid, self.logs.rank);
        let _reader = self.file_readers.acquire(uid, uid == 0)?;
        let failed = |error: io::Error| {
            Status::failed_precondition(format!("failed to read the log of rank {rank} of job {id}: {error}"))
        };
        let dir = self.job.logs.clone();
        let newest = move || {
            let dir = open_dir(&dir)?;
            let attempt = newest_attempt(&dir)?;
            io::Result::Ok((dir, attempt))
        };
        let newest = tokio::task::spawn_blocking(newest).await.map_err(io::Error::other).flatten();
        let (dir, attempt) = match newest {
            Err(error) if error.kind() == io::ErrorKind::NotFound => (None, None),
            newest => newest.map(|(dir, attempt)| (Some(dir), attempt)).map_err(failed)?,
        };
        let mut found = false;
        if let (Some(dir), Some(newest)) = (dir, attempt) {
            let name = if self.logs.stderr { "stderr.log" } else { "stdout.log" };
            let open: Open = Arc::new(move |path| open_below(&dir, path, uid));
            // Continue with the attempt in which an earlier stream ended.
            let first = self
                .logs
                .after
                .map_or(newest, |after| after.attempt)
                .max(newest.saturating_sub(MAX_ATTEMPTS));
            for attempt in first..=newest {
                let path = rank_dir(Path::new(""), attempt, rank.0).join(name);
                let start = Start::of(&self.logs, attempt);
                found |=
                    follow::send_log(path, attempt, open.clone(), start, chunks).await.map_err(failed)?;
            }
        }
        // Following a missing log is not an error; the stream just ends.
        if !found && !self.logs.follow {
            return Err(Status::not_found(format!("rank {rank} of job {id} has no log")));
        }
        Ok(())
    }
}

/// End of the stream from an agent.
enum AgentStream {
    Complete,
    /// The connection broke, possibly before the end of the log.
    Broken,
}

/// Forwards an agent's error, unless the connection to the agent is broken.
fn forwarded(status: &Status) -> Result<AgentStream, Status> {
    agent_error(status).map_or(Ok(AgentStream::Broken), Err)
}

/// Converts an agent's error for the client: its message is cut, and stripped of control characters. `None` if the
/// connection is broken.
pub(super) fn agent_error(status: &Status) -> Option<Status> {
    // Errors with a source come from the transport, not from the agent.
    if std::error::Error::source(status).is_some() || status.code() == Code::Cancelled {
        return None;
    }
    let message = status.message().chars().filter(|c| !c.is_control());
    Some(Status::new(status.code(), message.take(MAX_AGENT_MESSAGE_CHARS).collect::<String>()))
}

/// Opens the log directory of a job. Its parent belongs to the daemon, but the directory itself may have been replaced
/// by a link.
fn open_dir(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let agent = openat(CWD, path.parent().unwrap_or(path), flags | OFlags::PATH, Mode::empty())?;
    openat(&agent, path.file_name().unwrap_or_default(), flags, Mode::empty()).map_err(|error| match error {
        Errno::LOOP | Errno::NOTDIR => io::Error::other("the log directory was replaced"),
        error => error.into(),
    })
}

/// Returns the highest N among the entries `attempt_N`.
fn newest_attempt(dir: &OwnedFd) -> io::Result<Option<u32>> {
    let mut newest = None;
    for entry in Dir::read_from(dir)?.take(MAX_DIR_ENTRIES) {
        let entry = entry?;
        let number = entry.file_name().to_str().ok().and_then(|name| name.strip_prefix("attempt_"));
        newest = newest.max(number.and_then(|number| number.parse().ok()));
    }
    Ok(newest)
}

#[cfg(test)]
mod tests;
