use std::io::Write;

use xlaunch_proto::v1::{JobKind, JobState};
use xlaunch_spec::ids::Rank;

use super::super::board::Launch;
use super::*;
use xlaunch_cluster::Assignment;

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
            total_steps: 0,
            log_dir: dir.path().into(),
            stall_timeout: Duration::from_secs(300),
        };
        let case = Self { dir, board: watch::Sender::new(Board::new(launch)) };
        case.attempt(0);
        case
    }

    fn attempt(&self, attempt: u32) {
        fs_err::create_dir_all(self.dir.path().join(format!("attempt_{attempt}/0"))).unwrap();
        self.board.send_modify(|board| board.reset(attempt, 1, &Assignment::default()));
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
        let logs = Logs { rank: Rank(0), stderr: false, follow, tail_lines, after: None };
        stream(self.board.subscribe(), logs, Until::JobEnds, ()).unwrap()
    }

    async fn read(&self, tail_lines: Option<u64>) -> String {
        rest(&mut self.stream(false, tail_lines)).await
    }
}

async fn rest(stream: &mut mpsc::Receiver<Result<LogsReply, Status>>) -> String {
    let mut text = Vec::new();
    while let Some(chunk) = stream.recv().await {
        text.extend(chunk.unwrap().bytes);
    }
    String::from_utf8(text).unwrap()
}

/// Reads until `text` has arrived.
async fn expect(stream: &mut mpsc::Receiver<Result<LogsReply, Status>>, text: &str) {
    let mut got = String::new();
    while got != text {
        let chunk = tokio::time::timeout(Duration::from_secs(60), stream.recv()).await;
        let chunk = chunk.unwrap_or_else(|_| panic!("{got:?} instead of {text:?}"));
        got += std::str::from_utf8(&chunk.unwrap().unwrap().bytes).unwrap();
        assert!(text.starts_with(&got), "{got:?} instead of {text:?}");
    }
}

#[tokio::test]
async fn last_lines_are_found_across_chunks_and_rotation() {
    let case = Case::new();
    let long = "x".repeat(REPLY_CHUNK_BYTES + 7);
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
async fn search_for_last_lines_is_bounded() {
    let case = Case::new();
    case.write("a line\n");
    let file = fs_err::OpenOptions::new().write(true).open(case.path()).unwrap();
    let length = 1 << 42;
    file.set_len(length).expect("the file system has no files with holes of this length");
    let found = tail_start(&File::open(case.path()).await.unwrap(), 1).await.unwrap();
    assert_eq!(found, (length - MAX_TAIL_SEARCH_BYTES, 1));
}

#[tokio::test]
async fn follower_survives_rotation_and_restarts_and_reads_to_the_end() {
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
    case.board.send_modify(|board| board.set_state(JobState::Failed));
    assert_eq!(rest(&mut stream).await, "last words");
}

#[tokio::test]
async fn slow_reader_is_bounded_and_a_closed_one_is_released() {
    let case = Case::new();
    case.write(&"a line\n".repeat(1_000_000));
    let held = std::sync::Arc::new(());
    let logs = Logs { rank: Rank(0), stderr: false, follow: true, tail_lines: None, after: None };
    let mut reader = stream(case.board.subscribe(), logs, Until::JobEnds, held.clone()).unwrap();
    reader.recv().await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(reader.len() <= REPLY_QUEUE_LENGTH, "{}", reader.len());
    drop(reader);
    while std::sync::Arc::strong_count(&held) > 1 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn missing_log_and_missing_rank_are_errors() {
    let case = Case::new();
    let error = case.stream(false, None).recv().await.unwrap().unwrap_err();
    assert!(error.message().contains("stdout.log"), "{error}");
    let logs = Logs { rank: Rank(3), stderr: false, follow: false, tail_lines: None, after: None };
    let error = stream(case.board.subscribe(), logs, Until::JobEnds, ()).unwrap_err();
    assert!(error.message().contains("no rank 3"), "{error}");
}

#[tokio::test]
async fn log_for_another_node_ends_with_its_attempt_and_goes_on_with_the_next() {
    let case = Case::new();
    case.write("first\n");
    let ask = |after| {
        let logs = Logs { rank: Rank(0), stderr: false, follow: true, tail_lines: None, after };
        stream(case.board.subscribe(), logs, Until::AttemptEnds, ()).unwrap()
    };
    let mut followed = ask(None);
    let chunk = followed.recv().await.unwrap().unwrap();
    case.write("last\n");
    case.board.send_modify(Board::attempt_ended);
    assert_eq!((chunk.bytes.as_slice(), rest(&mut followed).await.as_str()), (&b"first\n"[..], "last\n"));
    case.attempt(1);
    case.write("second attempt\n");
    case.board.send_modify(Board::attempt_ended);
    assert_eq!(rest(&mut ask(chunk.position)).await, "last\nsecond attempt\n");
}

#[tokio::test]
async fn reader_that_missed_a_rotated_file_is_told_how_many_bytes() {
    let case = Case::new();
    let record = Arc::new(LogRecord::new(&case.path(), Some(0)));
    case.board.send_modify(|board| board.set_logs(0, [record.clone(), record.clone()]));
    let (mut begin, mut files) = (0, Vec::new());
    for text in ["one\n", "two\n", "three\n", "four\n"] {
        if begin > 0 {
            case.rotate();
        }
        case.write(text);
        // The file is kept open, so that its inode is not reused.
        files.push(fs_err::File::open(case.path()).unwrap());
        record.begin(files.last().unwrap().metadata().unwrap().ino(), begin);
        begin += text.len() as u64;
    }
    let read = async |offset| {
        let after = Some(LogPosition { attempt: 0, inode: files[0].metadata().unwrap().ino(), offset });
        let logs = Logs { rank: Rank(0), stderr: false, follow: false, tail_lines: None, after };
        rest(&mut stream(case.board.subscribe(), logs, Until::JobEnds, ()).unwrap()).await
    };
    let mark = |bytes| format!("\n[xlaunch: {bytes} bytes were rotated away before they were read]\n");
    assert_eq!(read(1).await, format!("{}three\nfour\n", mark(7)));
    assert_eq!(read(4).await, format!("{}three\nfour\n", mark(4)));
    // Nothing is known about the files of an agent that has exited.
    case.board.send_modify(|board| board.reset(0, 1, &Assignment::default()));
    assert_eq!(read(1).await, format!("{UNKNOWN_GAP}three\nfour\n"));
}
