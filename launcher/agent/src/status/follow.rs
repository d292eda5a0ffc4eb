//! A rank's log as a stream of bytes, across rotation and restarts.
//!
//! A log that has reached its size limit is renamed to `NAME.1`, which replaces the previous one; a new attempt writes
//! to a new directory. A reader keeps its file open, so rotation loses nothing of that file. A reader that falls behind
//! by more than two rotations misses the files in between, and is told how many bytes it missed, if that is known.
//! Memory is bounded: the next chunk is read when the caller has taken the last one.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt, SeekFrom};
use tokio::sync::{mpsc, watch};
use tonic::Status;
use xlaunch_proto::convert::Logs;
use xlaunch_proto::v1::{LogPosition, LogsReply};

use super::board::Board;
use crate::logs::LogRecord;
use crate::run_dir::rank_dir;

/// Maximum number of chunks that wait for a slow caller.
const REPLY_QUEUE_LENGTH: usize = 2;
const REPLY_CHUNK_BYTES: usize = 1 << 16;
/// Interval between reads at the end of a log.
const FOLLOW_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The last lines are searched for within this many bytes at the end of a file. The file may be one huge hole.
const MAX_TAIL_SEARCH_BYTES: u64 = 1 << 30;

/// Mark in place of missing bytes if their number is unknown.
const UNKNOWN_GAP: &str =
    "\n[xlaunch: bytes may be missing here: the file that was read last has been rotated away]\n";

/// Channel for a log in chunks.
pub type Pieces = mpsc::Sender<Result<LogsReply, Status>>;

/// Function that opens a log; fails with `NotFound` if there is none.
pub type Open = Arc<dyn Fn(&Path) -> std::io::Result<std::fs::File> + Send + Sync>;

/// Streams the log named by `logs`, which has a local rank, until the end of the job or the attempt. `held` is dropped
/// when the stream has ended.
///
/// # Errors
/// `INVALID_ARGUMENT` for a rank that does not exist; in the stream, `NOT_FOUND` if there is no log and `follow` is not
/// set.
pub fn stream(
    board: watch::Receiver<Board>,
    logs: Logs,
    until: Until,
    held: impl Send + 'static,
) -> Result<mpsc::Receiver<Result<LogsReply, Status>>, Status> {
    let world = board.borrow().workers();
    if logs.rank.0 >= world {
        return Err(no_such_rank(logs.rank.0, world));
    }
    let (chunks, stream) = mpsc::channel(REPLY_QUEUE_LENGTH);
    tokio::spawn(async move {
        tokio::select! {
            result = send(&board, logs, until, &chunks) => if let Err(status) = result {
                // Fails only if the caller is gone.
                let _ = chunks.send(Err(status)).await;
            },
            () = chunks.closed() => {}
        }
        drop(held);
    });
    Ok(stream)
}

/// The reply to a request about a rank of a launch that has no such rank.
pub(crate) fn no_such_rank(rank: u32, world: u32) -> Status {
    Status::invalid_argument(if world == 0 {
        "no rank has started yet; `xlaunch status` shows what the launch waits for".into()
    } else {
        format!("there is no rank {rank}: this launch has {world} ranks, counted from 0")
    })
}

/// End of a stream with `follow`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    JobEnds,
    /// The end of the attempt: another node may run the rank in the next one.
    AttemptEnds,
}

/// Beginning of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Begin with the oldest bytes that are kept.
    Beginning,
    /// Begin with this number of last lines.
    LastLines(u64),
    /// Continue an earlier stream; begin at the beginning if its file is no longer kept.
    After(LogPosition),
}

impl Start {
    /// Returns where a request for logs wants the log of this attempt to begin.
    pub fn of(logs: &Logs, attempt: u32) -> Self {
        match (logs.after, logs.tail_lines) {
            (Some(position), _) if position.attempt == attempt => Self::After(position),
            (None, Some(lines)) => Self::LastLines(lines),
            (Some(_) | None, _) => Self::Beginning,
        }
    }
}

/// Sends the log of an attempt at `path`, without following it. Returns whether there is one.
///
/// # Errors
/// Fails if the log cannot be opened or read.
pub async fn send_log(
    path: PathBuf,
    attempt: u32,
    open: Open,
    start: Start,
    chunks: &Pieces,
) -> std::io::Result<bool> {
    let mut log = Log { path, attempt, open, start, record: None, file: None };
    log.send_all(chunks).await?;
    Ok(log.file.is_some())
}

/// Converts an error of reading a log for the caller. If the agent is exiting, its runtime cancels reads: callers see
/// that as a broken connection.
fn failed(error: std::io::Error) -> Status {
    // Tokio's files keep no other trace of the cancelled task.
    if error.kind() == std::io::ErrorKind::Other && error.to_string() == "task was cancelled" {
        return Status::cancelled("the agent is exiting");
    }
    Status::internal(format!("failed to read the log: {error}"))
}

async fn send(
    board: &watch::Receiver<Board>,
    logs: Logs,
    until: Until,
    chunks: &Pieces,
) -> Result<(), Status> {
    let name = if logs.stderr { "stderr.log" } else { "stdout.log" };
    let open: Open = Arc::new(|path| std::fs::File::open(path));
    let (current, root) = (board.borrow().attempt(), board.borrow().log_root());
    // First, the parts of finished attempts that an earlier stream has missed.
    for attempt in logs.after.map_or(current, |after| after.attempt)..current {
        let (path, start) = (rank_dir(&root, attempt, logs.rank.0).join(name), Start::of(&logs, attempt));
        send_log(path, attempt, open.clone(), start, chunks).await.map_err(failed)?;
    }
    let mut start = Start::of(&logs, current);
    loop {
        let (attempt, path, record) = {
            let board = board.borrow();
            let record = board.log_record(logs.rank.0, logs.stderr);
            (board.attempt(), board.log_dir(logs.rank.0).join(name), record)
        };
        let first = std::mem::replace(&mut start, Start::Beginning);
        let mut log = Log { path, attempt, open: open.clone(), start: first, record, file: None };
        let over = loop {
            // Checked before the log is read, so that everything written until then is sent.
            let (over, next) = {
                let board = board.borrow();
                let next = board.attempt() != attempt;
                let is_last = until == Until::AttemptEnds && (next || board.is_attempt_over());
                (board.is_over() || is_last, next)
            };
            log.send_all(chunks).await.map_err(failed)?;
            if over || next || !logs.follow {
                break over || !logs.follow;
            }
            tokio::time::sleep(FOLLOW_POLL_INTERVAL).await;
        };
        if over && log.file.is_none() && !logs.follow {
            let rank = board.borrow().rank_of(logs.rank.0);
            return Err(Status::not_found(format!("rank {rank} has no log: {}", log.path.display())));
        }
        if over {
            return Ok(());
        }
    }
}

/// The log of one attempt.
struct Log {
    path: PathBuf,
    attempt: u32,
    open: Open,
    start: Start,
    /// Record of how much a reader has missed; `None` if this process did not write the log.
    record: Option<Arc<LogRecord>>,
    /// The open file and its inode.
    file: Option<(File, u64)>,
}

impl Log {
    /// Sends everything up to the end of the newest file.
    async fn send_all(&mut self, chunks: &Pieces) -> std::io::Result<()> {
        if self.file.is_none() {
            self.file = self.first().await?;
            if let (Start::After(LogPosition { inode, offset, .. }), Some((_, first))) =
                (self.start, &self.file)
                && inode != *first
            {
                // If nothing is known about the removed file, the caller may have read it to its end.
                let missing = self.missing((inode, offset), *first);
                let mark = missing.map_or_else(|| Some(UNKNOWN_GAP.to_owned()), gap_mark);
                self.send_mark(mark, *first, chunks).await;
            }
            if let (Some((file, inode)), Start::LastLines(_)) = (&mut self.file, self.start) {
                // Send the position, so that the caller can continue from here even if nothing is written for now.
                let position = LogPosition {
                    attempt: self.attempt,
                    inode: *inode,
                    offset: file.stream_position().await?,
                };
                let _ = chunks.send(Ok(LogsReply { bytes: Vec::new(), position: Some(position) })).await;
            }
        }
        while let Some((file, inode)) = &mut self.file {
            // Checked before the file is read: a file that has already been renamed does not grow.
            let next = successor(&self.open, &self.path, *inode).await?;
            send_rest(file, self.attempt, *inode, chunks).await?;
            let end = (*inode, file.stream_position().await?);
            let Some(next) = next else { break };
            let mark = self.missing(end, next.1).and_then(gap_mark);
            self.send_mark(mark, next.1, chunks).await;
            self.file = Some(next);
        }
        Ok(())
    }

    /// Returns the number of bytes between the end of the last file that was sent and the next one; `None` if unknown.
    fn missing(&self, end: (u64, u64), next: u64) -> Option<u64> {
        self.record.as_ref()?.between(end, next)
    }

    /// Tells the caller what is missing before the file with inode `next`.
    async fn send_mark(&self, mark: Option<String>, next: u64, chunks: &Pieces) {
        let Some(mark) = mark else { return };
        let position = Some(LogPosition { attempt: self.attempt, inode: next, offset: 0 });
        // If the caller is gone, this task ends at its next await.
        let _ = chunks.send(Ok(LogsReply { bytes: mark.into_bytes(), position })).await;
    }

    /// Opens the first file to send and seeks to the start position.
    async fn first(&mut self) -> std::io::Result<Option<(File, u64)>> {
        let (old, new) =
            (open(&self.open, rotated(&self.path)).await?, open(&self.open, self.path.clone()).await?);
        let lines = match self.start {
            Start::Beginning => return Ok(old.or(new)),
            Start::After(LogPosition { inode, offset, .. }) => {
                let is_same = |file: &&(File, u64)| file.1 == inode;
                let Some((file, _)) = [&new, &old].into_iter().flatten().find(is_same) else {
                    return Ok(old.or(new));
                };
                let mut file = file.try_clone().await?;
                file.seek(SeekFrom::Start(offset)).await?;
                return Ok(Some((file, inode)));
            }
            Start::LastLines(lines) => lines,
        };
        let Some((mut file, inode)) = new else { return Ok(old) };
        let (start, found) = tail_start(&file, lines).await?;
        if let Some((mut old, old_inode)) = old
            && found < lines
        {
            let (start, _) = tail_start(&old, lines - found).await?;
            old.seek(SeekFrom::Start(start)).await?;
            return Ok(Some((old, old_inode)));
        }
        file.seek(SeekFrom::Start(start)).await?;
        Ok(Some((file, inode)))
    }
}

/// Returns the mark in place of this number of missing bytes; `None` if none are missing.
fn gap_mark(missing: u64) -> Option<String> {
    (missing > 0).then(|| format!("\n[xlaunch: {missing} bytes were rotated away before they were read]\n"))
}

/// Opens the file after the one with this inode; `None` if that one is the newest.
async fn successor(with: &Open, path: &Path, inode: u64) -> std::io::Result<Option<(File, u64)>> {
    let newest = open(with, path.into()).await?.filter(|(_, newest)| *newest != inode);
    let Some(newest) = newest else { return Ok(None) };
    // After two renames, the file in between still exists.
    let between = open(with, rotated(path)).await?.filter(|(_, between)| *between != inode);
    Ok(between.or(Some(newest)))
}

fn rotated(path: &Path) -> PathBuf {
    path.with_extension("log.1")
}

/// Opens the file, if it exists. Returns it with its inode.
async fn open(with: &Open, path: PathBuf) -> std::io::Result<Option<(File, u64)>> {
    let with = with.clone();
    let open = move || match with(&path) {
        Ok(file) => {
            let inode = file.metadata()?.ino();
            Ok(Some((File::from_std(file), inode)))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    };
    tokio::task::spawn_blocking(open).await?
}

/// Sends the file from its current position to its end.
async fn send_rest(file: &mut File, attempt: u32, inode: u64, chunks: &Pieces) -> std::io::Result<()> {
    let mut offset = file.stream_position().await?;
    loop {
        let mut bytes = Vec::with_capacity(REPLY_CHUNK_BYTES);
        if file.read_buf(&mut bytes).await? == 0 {
            return Ok(());
        }
        // If the caller is gone, `stream` ends this task at its next await.
        offset += bytes.len() as u64;
        let position = Some(LogPosition { attempt, inode, offset });
        let _ = chunks.send(Ok(LogsReply { bytes, position })).await;
    }
}

/// Finds the offset of the last `lines` lines. Returns it with the number of lines found. The last line may be
/// unfinished.
async fn tail_start(file: &File, lines: u64) -> std::io::Result<(u64, u64)> {
    let file = file.try_clone().await?.into_std().await;
    tokio::task::spawn_blocking(move || search_back(&file, lines)).await?
}

fn search_back(file: &std::fs::File, lines: u64) -> std::io::Result<(u64, u64)> {
    let length = file.metadata()?.len();
    if lines == 0 || length == 0 {
        return Ok((length, 0));
    }
    let mut buffer = vec![0; REPLY_CHUNK_BYTES];
    // Skips the newline that may end the last line.
    let (mut end, mut found) = (length - 1, 0);
    let first = length.saturating_sub(MAX_TAIL_SEARCH_BYTES);
    while end > first {
        let start = end.saturating_sub(REPLY_CHUNK_BYTES as u64).max(first);
        #[expect(clippy::cast_possible_truncation, reason = "at most the length of the buffer")]
        let chunk = &mut buffer[..(end - start) as usize];
        file.read_exact_at(chunk, start)?;
        end = start;
        // Many chunks are parts of a long line, which `contains` passes over quickly.
        if !chunk.contains(&b'\n') {
            continue;
        }
        for (index, _) in chunk.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n') {
            found += 1;
            if found == lines {
                return Ok((start + index as u64 + 1, found));
            }
        }
    }
    Ok((first, found + 1))
}

#[cfg(test)]
mod tests;
