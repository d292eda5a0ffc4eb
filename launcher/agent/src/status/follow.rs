//! A rank's log as a stream of bytes, through rotation and restarts.
//!
//! A log that has grown to its limit is renamed to `NAME.1`, which replaces the one before; a new attempt writes into a new
//! directory. A reader holds the file it reads open, so it loses nothing of it, and memory is bounded: the next piece is read
//! when the caller has taken the last. Only a reader that is slower than two rotations misses what was in between.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt, SeekFrom};
use tokio::sync::{mpsc, watch};
use tonic::Status;
use xlaunch_proto::convert::Logs;
use xlaunch_proto::v1::LogsReply;

use super::board::Board;

/// Pieces that wait for a slow caller.
const QUEUE: usize = 2;
/// Bytes of a piece.
const PIECE: usize = 1 << 16;
/// Between looks at a log that has no more.
const POLL: Duration = Duration::from_millis(100);
/// Bytes at the end of a file in which its last lines are looked for: a file may be all hole.
const SEARCH: u64 = 1 << 30;

/// Where a log goes, piece by piece.
pub type Pieces = mpsc::Sender<Result<LogsReply, Status>>;

/// Opens a log; `NotFound` where there is none.
pub type Open = Arc<dyn Fn(&Path) -> std::io::Result<std::fs::File> + Send + Sync>;

/// Streams the log that `logs` names; `held` is dropped when the stream has ended.
///
/// # Errors
/// `INVALID_ARGUMENT` for a rank that does not exist; in the stream, `NOT_FOUND` where there is no log and none is waited for.
pub fn stream<T: Send + 'static>(
    board: watch::Receiver<Board>,
    logs: Logs,
    held: T,
) -> Result<mpsc::Receiver<Result<LogsReply, Status>>, Status> {
    let world = board.borrow().world();
    if logs.rank.0 >= world {
        let message = format!("there is no rank {}: this launch has {world}, counted from 0", logs.rank);
        return Err(Status::invalid_argument(message));
    }
    let (pieces, stream) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        tokio::select! {
            result = send(&board, logs, &pieces) => if let Err(status) = result {
                // The caller may be gone; as below.
                let _ = pieces.send(Err(status)).await;
            },
            () = pieces.closed() => {}
        }
        drop(held);
    });
    Ok(stream)
}

/// Sends what there is of the log at `path`, all or the last lines, as `open` gives it. Whether there is one.
///
/// # Errors
/// Those of `open` and of reading.
pub async fn send_log(
    path: PathBuf,
    open: Open,
    tail: Option<u64>,
    pieces: &Pieces,
) -> std::io::Result<bool> {
    let mut log = Log { path, open, tail, file: None };
    log.send_all(pieces).await?;
    Ok(log.file.is_some())
}

async fn send(board: &watch::Receiver<Board>, logs: Logs, pieces: &Pieces) -> Result<(), Status> {
    let failed = |error: std::io::Error| Status::internal(format!("failed to read the log: {error}"));
    let name = if logs.stderr { "stderr.log" } else { "stdout.log" };
    let mut tail = logs.tail_lines;
    let open: Open = Arc::new(|path| std::fs::File::open(path));
    loop {
        let (attempt, path) = {
            let board = board.borrow();
            (board.attempt(), board.log_dir(logs.rank.0).join(name))
        };
        let mut log = Log { path, open: open.clone(), tail: tail.take(), file: None };
        let over = loop {
            // Asked before the log is read: what was written until then is in it.
            let (over, next) = {
                let board = board.borrow();
                (board.is_over(), board.attempt() != attempt)
            };
            log.send_all(pieces).await.map_err(failed)?;
            if over || next || !logs.follow {
                break over || !logs.follow;
            }
            tokio::time::sleep(POLL).await;
        };
        if over && log.file.is_none() && !logs.follow {
            return Err(Status::not_found(format!("rank {} has no log: {}", logs.rank, log.path.display())));
        }
        if over {
            return Ok(());
        }
    }
}

/// A log of one attempt.
struct Log {
    path: PathBuf,
    open: Open,
    /// Lines to begin with, until it is opened.
    tail: Option<u64>,
    /// What is read now, and its inode.
    file: Option<(File, u64)>,
}

impl Log {
    /// Sends what there is, to the end of the newest file.
    async fn send_all(&mut self, pieces: &Pieces) -> std::io::Result<()> {
        if self.file.is_none() {
            self.file = self.first().await?;
        }
        while let Some((file, inode)) = &mut self.file {
            // Asked before the file is read: what is renamed already does not grow.
            let next = successor(&self.open, &self.path, *inode).await?;
            send_rest(file, pieces).await?;
            match next {
                Some(next) => self.file = Some(next),
                None => break,
            }
        }
        Ok(())
    }

    /// The file to begin with, at the place to begin at.
    async fn first(&mut self) -> std::io::Result<Option<(File, u64)>> {
        let (old, new) =
            (open(&self.open, rotated(&self.path)).await?, open(&self.open, self.path.clone()).await?);
        let Some(lines) = self.tail else { return Ok(old.or(new)) };
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

/// What is to be read behind the file with this inode; `None` if that is the newest.
async fn successor(with: &Open, path: &Path, inode: u64) -> std::io::Result<Option<(File, u64)>> {
    let newest = open(with, path.into()).await?.filter(|(_, newest)| *newest != inode);
    let Some(newest) = newest else { return Ok(None) };
    // Renamed twice meanwhile: the one in between is still there.
    let between = open(with, rotated(path)).await?.filter(|(_, between)| *between != inode);
    Ok(between.or(Some(newest)))
}

fn rotated(path: &Path) -> PathBuf {
    path.with_extension("log.1")
}

/// The file, if it exists, and its inode.
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
    tokio::task::spawn_blocking(open).await.map_err(std::io::Error::other)?
}

/// Sends the file from where it stands to its end.
async fn send_rest(file: &mut File, pieces: &Pieces) -> std::io::Result<()> {
    loop {
        let mut bytes = Vec::with_capacity(PIECE);
        if file.read_buf(&mut bytes).await? == 0 {
            return Ok(());
        }
        // A caller that is gone ends this task at its next wait.
        let _ = pieces.send(Ok(LogsReply { bytes })).await;
    }
}

/// Where the last `lines` lines begin, and how many there are. A line may lack its end.
async fn tail_start(file: &File, lines: u64) -> std::io::Result<(u64, u64)> {
    let file = file.try_clone().await?.into_std().await;
    let search = tokio::task::spawn_blocking(move || search_back(&file, lines));
    search.await.map_err(std::io::Error::other)?
}

fn search_back(file: &std::fs::File, lines: u64) -> std::io::Result<(u64, u64)> {
    let length = file.metadata()?.len();
    if lines == 0 || length == 0 {
        return Ok((length, 0));
    }
    let mut buffer = vec![0; PIECE];
    // The end of the last line, if it has one, ends no other.
    let (mut end, mut found) = (length - 1, 0);
    let first = length.saturating_sub(SEARCH);
    while end > first {
        let start = end.saturating_sub(PIECE as u64).max(first);
        #[expect(clippy::cast_possible_truncation, reason = "at most the length of the buffer")]
        let piece = &mut buffer[..(end - start) as usize];
        file.read_exact_at(piece, start)?;
        for (index, _) in piece.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n') {
            found += 1;
            if found == lines {
                return Ok((start + index as u64 + 1, found));
            }
        }
        end = start;
    }
    Ok((first, found + 1))
}

#[cfg(test)]
mod tests;
