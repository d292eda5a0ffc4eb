//! What a job's ranks have written: from its agent while the job runs, from its files when it has ended.
//!
//! Both belong to the job's user, who may have put anything there. The agent is asked only if it runs as that user, and its
//! answers are bounded. A file is read only if it is a regular one of that user's, found without going through a link: so
//! nobody has the daemon read what they could not read themselves, or wait where nothing ever comes.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{CWD, Dir, Mode, OFlags};
use tokio::sync::{mpsc, watch};
use tonic::{Code, Status};
use xlaunch_proto::convert::Logs;
use xlaunch_proto::v1::{LogStream, LogsReply, LogsRequest, NodeJobState};

use super::access::Quota;
use crate::agents::connect::connect;
use crate::plain::open_below;
use crate::view::{JobView, NodeView};
use xlaunch_agent::run_dir::rank_dir;
use xlaunch_agent::status::follow::{self, Open, Pieces};

/// Pieces that wait for a slow caller.
const QUEUE: usize = 2;
/// Time for an agent to begin its answer, and for it to be missed when it has gone.
const PATIENCE: Duration = Duration::from_secs(10);
/// Characters of an agent's message that are passed on.
const MESSAGE: usize = 1024;
/// Entries of a log directory that are looked at.
const ENTRIES: usize = 100_000;

/// A job whose logs are wanted.
pub(super) struct Source {
    pub(super) view: watch::Receiver<Arc<NodeView>>,
    pub(super) job: Arc<JobView>,
    pub(super) logs: Logs,
    /// Of readers of files, by the files' owner: a file system that hangs keeps a thread.
    pub(super) owners: Quota,
}

/// Streams the log; `held` is dropped when the stream has ended.
///
/// # Errors
/// `FAILED_PRECONDITION` for a job that has not started; in the stream, what the agent says, `NOT_FOUND` where there is no
/// log, `FAILED_PRECONDITION` where it must not be read.
pub(super) fn stream<T: Send + 'static>(
    source: Source,
    held: T,
) -> Result<mpsc::Receiver<Result<LogsReply, Status>>, Status> {
    use NodeJobState::{Queued, Starting, Unspecified};
    let job = &source.job.job;
    let waits = matches!(job.state(), Unspecified | Queued | Starting);
    if waits || (source.job.has_ended() && job.started_unix_ms == 0) {
        let has = if waits { "has not" } else { "never" };
        return Err(Status::failed_precondition(format!("job {} {has} started", job.id)));
    }
    let (pieces, stream) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        tokio::select! {
            result = source.send(&pieces) => if let Err(status) = result {
                // The caller may be gone; as below.
                let _ = pieces.send(Err(status)).await;
            },
            () = pieces.closed() => {}
        }
        drop(held);
    });
    Ok(stream)
}

impl Source {
    async fn send(mut self, pieces: &Pieces) -> Result<(), Status> {
        if self.job.has_ended() {
            return self.send_files(pieces).await;
        }
        let Heard::Broken { anything } = self.send_agents(pieces).await? else { return Ok(()) };
        // An agent ends shortly before the job is known to have ended.
        let id = self.job.job.id;
        let ended = |view: &Arc<NodeView>| view.jobs.get(&id).is_none_or(|job| job.has_ended());
        let over = match tokio::time::timeout(PATIENCE, self.view.wait_for(ended)).await {
            Ok(Ok(view)) => view.jobs.get(&id).cloned(),
            _ => {
                return Err(Status::unavailable(format!("the agent of job {id} does not answer: ask again")));
            }
        };
        match over.filter(|_| !anything) {
            Some(job) => {
                self.job = job;
                self.send_files(pieces).await
            }
            None => Ok(()),
        }
    }

    /// What the agent sends, until it ends.
    async fn send_agents(&self, pieces: &Pieces) -> Result<Heard, Status> {
        let stream = if self.logs.stderr { LogStream::Stderr } else { LogStream::Stdout };
        let request = LogsRequest {
            rank: self.logs.rank.0,
            stream: stream.into(),
            follow: self.logs.follow,
            tail_lines: self.logs.tail_lines,
        };
        let answer =
            async { Some(connect(&self.job.socket, self.job.job.uid).await.ok()?.logs(request).await) };
        let mut anything = false;
        let mut answer = match tokio::time::timeout(PATIENCE, answer).await {
            Ok(Some(Ok(answer))) => answer.into_inner(),
            Ok(Some(Err(status))) => return passed_on(&status, anything),
            Ok(None) | Err(_) => return Ok(Heard::Broken { anything }),
        };
        loop {
            match answer.message().await {
                Ok(Some(piece)) => {
                    anything = true;
                    // A caller that is gone ends this task at its next wait.
                    let _ = pieces.send(Ok(piece)).await;
                }
                Ok(None) => return Ok(Heard::All),
                Err(status) => return passed_on(&status, anything),
            }
        }
    }

    async fn send_files(&self, pieces: &Pieces) -> Result<(), Status> {
        let (id, uid, rank) = (self.job.job.id, self.job.job.uid, self.logs.rank);
        let _reader = self.owners.take(uid).map_err(|count| {
            Status::resource_exhausted(format!("{count} others read logs of ended jobs: ask again"))
        })?;
        let failed = |error: io::Error| {
            Status::failed_precondition(format!("the log of rank {rank} of job {id} cannot be read: {error}"))
        };
        let dir = self.job.logs.clone();
        let newest = move || {
            let dir = directory(&dir)?;
            let attempt = newest_attempt(&dir)?;
            io::Result::Ok((dir, attempt))
        };
        let newest = tokio::task::spawn_blocking(newest).await.map_err(io::Error::other).flatten();
        let (dir, attempt) = match newest {
            Err(error) if error.kind() == io::ErrorKind::NotFound => (None, None),
            newest => newest.map(|(dir, attempt)| (Some(dir), attempt)).map_err(failed)?,
        };
        let mut found = false;
        if let (Some(dir), Some(attempt)) = (dir, attempt) {
            let name = if self.logs.stderr { "stderr.log" } else { "stdout.log" };
            let path = rank_dir(Path::new(""), attempt, rank.0).join(name);
            let open: Open = Arc::new(move |path| open_below(&dir, path, uid));
            found = follow::send_log(path, open, self.logs.tail_lines, pieces).await.map_err(failed)?;
        }
        // Who follows a log that never came has seen the end of it.
        if !found && !self.logs.follow {
            return Err(Status::not_found(format!("rank {rank} of job {id} has no log")));
        }
        Ok(())
    }
}

/// How an agent's answer ended.
enum Heard {
    All,
    /// The connection broke, after a part of the log or before.
    Broken {
        anything: bool,
    },
}

/// A refusal by an agent, in its words as far as they can be shown.
fn passed_on(status: &Status, anything: bool) -> Result<Heard, Status> {
    // Not the agent's words: the connection broke.
    if std::error::Error::source(status).is_some() || status.code() == Code::Cancelled {
        return Ok(Heard::Broken { anything });
    }
    let message: String = status.message().chars().filter(|c| !c.is_control()).take(MESSAGE).collect();
    Err(Status::new(status.code(), message))
}

/// The directory of a job's logs. Where it lies is the manager's to say; what it holds is the user's.
fn directory(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(CWD, path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// The highest N among the entries `attempt_N`.
fn newest_attempt(dir: &OwnedFd) -> io::Result<Option<u32>> {
    let mut newest = None;
    for entry in Dir::read_from(dir)?.take(ENTRIES) {
        let entry = entry?;
        let number = entry.file_name().to_str().ok().and_then(|name| name.strip_prefix("attempt_"));
        newest = newest.max(number.and_then(|number| number.parse().ok()));
    }
    Ok(newest)
}

#[cfg(test)]
mod tests;
