//! A rank's log as a stream of bytes, through rotation and restarts.
//!
//! A log that has grown to its limit is renamed to `NAME.1`, which replaces the one before; a new attempt writes into a new
//! directory. A reader holds the file it reads open, so it loses nothing of it, and memory is bounded: the next piece is read
//! when the caller has taken the last. Only a reader that is slower than two rotations misses what was in between.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
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

type Pieces = mpsc::Sender<Result<LogsReply, Status>>;

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

async fn send(board: &watch::Receiver<Board>, logs: Logs, pieces: &Pieces) -> Result<(), Status> {
    let failed = |error: std::io::Error| Status::internal(format!("failed to read the log: {error}"));
    let name = if logs.stderr { "stderr.log" } else { "stdout.log" };
    let mut tail = logs.tail_lines;
    loop {
        let (attempt, path) = {
            let board = board.borrow();
            (board.attempt(), board.log_dir(logs.rank.0).join(name))
        };
        let mut log = Log::at(path, tail.take());
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
    /// Lines to begin with, until it is opened.
    tail: Option<u64>,
    /// What is read now, and its inode.
    file: Option<(File, u64)>,
}

impl Log {
    fn at(path: PathBuf, tail: Option<u64>) -> Self {
        Self { path, tail, file: None }
    }

    /// Sends what there is, to the end of the newest file.
    async fn send_all(&mut self, pieces: &Pieces) -> std::io::Result<()> {
        if self.file.is_none() {
            self.file = self.first().await?;
        }
        while let Some((file, inode)) = &mut self.file {
            // Asked before the file is read: what is renamed already does not grow.
            let next = successor(&self.path, *inode).await?;
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
        let (old, new) = (open(&rotated(&self.path)).await?, open(&self.path).await?);
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
async fn successor(path: &Path, inode: u64) -> std::io::Result<Option<(File, u64)>> {
    let Some(newest) = open(path).await?.filter(|(_, newest)| *newest != inode) else { return Ok(None) };
    // Renamed twice meanwhile: the one in between is still there.
    let between = open(&rotated(path)).await?.filter(|(_, between)| *between != inode);
    Ok(between.or(Some(newest)))
}

fn rotated(path: &Path) -> PathBuf {
    path.with_extension("log.1")
}

/// The file, if it exists, and its inode.
async fn open(path: &Path) -> std::io::Result<Option<(File, u64)>> {
    match File::open(path).await {
        Ok(file) => {
            let inode = file.metadata().await?.ino();
            Ok(Some((file, inode)))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
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
    while end > 0 {
        let start = end.saturating_sub(PIECE as u64);
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
    Ok((0, found + 1))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use xlaunch_proto::ids::Rank;
    use xlaunch_proto::v1::{JobKind, JobState};

    use super::super::board::Launch;
    use super::*;

    struct Case {
        dir: tempfile::TempDir,
        board: watch::Sender<Board>,
    }

    impl Case {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let launch = Launch {
                kind: JobKind::Command,
                id: "1".into(),
                name: "n".into(),
                command_line: "n".into(),
                max_restarts: 1,
                log_dir: dir.path().into(),
                silence: Duration::from_secs(300),
            };
            let case = Self { dir, board: watch::Sender::new(Board::new(launch)) };
            case.attempt(0);
            case
        }

        fn attempt(&self, attempt: u32) {
            fs_err::create_dir_all(self.dir.path().join(format!("attempt_{attempt}/0"))).unwrap();
            self.board.send_modify(|board| board.reset(attempt, 1));
        }

        fn path(&self) -> PathBuf {
            self.board.borrow().log_dir(0).join("stdout.log")
        }

        fn write(&self, text: &str) {
            let mut file = fs_err::OpenOptions::new().create(true).append(true).open(self.path()).unwrap();
            file.write_all(text.as_bytes()).unwrap();
        }

        fn rotate(&self) {
            fs_err::rename(self.path(), self.path().with_file_name("stdout.log.1")).unwrap();
        }

        fn stream(&self, follow: bool, tail_lines: Option<u64>) -> mpsc::Receiver<Result<LogsReply, Status>> {
            let logs = Logs { rank: Rank(0), stderr: false, follow, tail_lines };
            stream(self.board.subscribe(), logs, ()).unwrap()
        }

        async fn read(&self, tail_lines: Option<u64>) -> String {
            rest(&mut self.stream(false, tail_lines)).await
        }
    }

    async fn rest(stream: &mut mpsc::Receiver<Result<LogsReply, Status>>) -> String {
        let mut text = Vec::new();
        while let Some(piece) = stream.recv().await {
            text.extend(piece.unwrap().bytes);
        }
        String::from_utf8(text).unwrap()
    }

    /// Reads until `text` has come.
    async fn expect(stream: &mut mpsc::Receiver<Result<LogsReply, Status>>, text: &str) {
        let mut got = String::new();
        while got != text {
            let piece = tokio::time::timeout(Duration::from_secs(60), stream.recv()).await;
            let piece = piece.unwrap_or_else(|_| panic!("{got:?} instead of {text:?}"));
            got += std::str::from_utf8(&piece.unwrap().unwrap().bytes).unwrap();
            assert!(text.starts_with(&got), "{got:?} instead of {text:?}");
        }
    }

    #[tokio::test]
    async fn the_last_lines_are_found_across_pieces_and_rotation() {
        let case = Case::new();
        let long = "x".repeat(PIECE + 7);
        case.write(&format!("old 1\n{long}\n"));
        case.rotate();
        case.write("new 1\nnew 2\nnew 3");
        assert_eq!(case.read(None).await, format!("old 1\n{long}\nnew 1\nnew 2\nnew 3"));
        assert_eq!(case.read(Some(2)).await, "new 2\nnew 3");
        assert_eq!(case.read(Some(3)).await, "new 1\nnew 2\nnew 3");
        assert_eq!(case.read(Some(4)).await, format!("{long}\nnew 1\nnew 2\nnew 3"));
        assert_eq!(case.read(Some(99)).await, case.read(None).await);
        assert_eq!(case.read(Some(0)).await, "");
    }

    #[tokio::test]
    async fn a_follower_goes_through_rotation_and_restarts_to_the_end() {
        let case = Case::new();
        case.write("one\ntwo\n");
        let mut stream = case.stream(true, Some(1));
        expect(&mut stream, "two\n").await;
        case.write("three\n");
        case.rotate();
        case.write("four\n");
        expect(&mut stream, "three\nfour\n").await;
        case.attempt(1);
        case.write("five\n");
        expect(&mut stream, "five\n").await;
        case.write("last words");
        case.board.send_modify(|board| board.now_in(JobState::Failed));
        assert_eq!(rest(&mut stream).await, "last words");
    }

    #[tokio::test]
    async fn a_reader_that_stops_reading_holds_little_and_one_that_leaves_holds_nothing() {
        let case = Case::new();
        case.write(&"a line\n".repeat(1_000_000));
        let held = std::sync::Arc::new(());
        let logs = Logs { rank: Rank(0), stderr: false, follow: true, tail_lines: None };
        let mut reader = stream(case.board.subscribe(), logs, held.clone()).unwrap();
        reader.recv().await.unwrap().unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(reader.len() <= QUEUE, "{}", reader.len());
        drop(reader);
        while std::sync::Arc::strong_count(&held) > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn what_is_not_there_is_said() {
        let case = Case::new();
        let error = case.stream(false, None).recv().await.unwrap().unwrap_err();
        assert!(error.message().contains("stdout.log"), "{error}");
        let logs = Logs { rank: Rank(3), stderr: false, follow: false, tail_lines: None };
        let error = stream(case.board.subscribe(), logs, ()).unwrap_err();
        assert!(error.message().contains("no rank 3"), "{error}");
    }
}
