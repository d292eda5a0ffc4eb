use std::path::PathBuf;

use xlaunch_proto::v1::{Job, JobKind, JobState};
use xlaunch_spec::ids::Rank;

use super::*;
use xlaunch_agent::rendezvous::service::{RunningService, serve};
use xlaunch_agent::status::board::{Board, Launch};
use xlaunch_cluster::Assignment;

const OUT: Logs = Logs { rank: Rank(0), stderr: false, follow: false, tail_lines: None, after: None };

/// A job with its log files.
struct Case {
    dir: tempfile::TempDir,
    view: watch::Sender<Arc<NodeView>>,
}

impl Case {
    fn new(state: NodeJobState) -> Self {
        let case = Self { dir: tempfile::tempdir().unwrap(), view: watch::Sender::default() };
        case.now(state);
        case
    }

    fn now(&self, state: NodeJobState) {
        self.now_of(state, rustix::process::getuid().as_raw());
    }

    fn now_of(&self, state: NodeJobState, uid: u32) {
        let job = Job { id: 7, uid, state: state.into(), started_unix_ms: 1, ..Default::default() };
        let job = JobView { job, socket: self.socket(), logs: self.logs(), ..Default::default() };
        self.view
            .send_replace(Arc::new(NodeView { jobs: [(7, Arc::new(job))].into(), ..Default::default() }));
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("agent.sock")
    }

    fn logs(&self) -> PathBuf {
        self.dir.path().join("logs")
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.logs().join(name);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(&path, text).unwrap();
        path
    }

    fn stream(&self, logs: Logs) -> Result<mpsc::Receiver<Result<LogsReply, Status>>, Status> {
        let job = self.view.borrow().jobs[&7].clone();
        stream(
            Source { view: self.view.subscribe(), job, logs, file_readers: Quota::new("readers", (1, 1)) },
            (),
        )
    }

    async fn read(&self, logs: Logs) -> Result<String, Status> {
        rest(&mut self.stream(logs)?).await
    }
}

/// Serves an agent of a job with this log directory.
async fn agent(socket: PathBuf, log_dir: PathBuf) -> (watch::Sender<Board>, RunningService) {
    let (board, serving) = agent_without_ranks(socket, log_dir).await;
    start_rank(&board);
    (board, serving)
}

fn start_rank(board: &watch::Sender<Board>) {
    let assignment = Assignment { nodes: 1, world: 1, ..Assignment::default() };
    board.send_modify(|board| board.reset(0, 1, &assignment));
}

/// Serves an agent that has not started its workers yet.
async fn agent_without_ranks(socket: PathBuf, log_dir: PathBuf) -> (watch::Sender<Board>, RunningService) {
    let board = watch::Sender::new(Board::new(Launch {
        kind: JobKind::Command,
        id: "1".into(),
        name: "n".into(),
        command_line: "n".into(),
        max_restarts: 0,
        total_steps: 0,
        log_dir,
        stall_timeout: Duration::from_secs(300),
    }));
    let serving = serve(&socket, mpsc::channel(1).0, board.clone()).await.unwrap();
    (board, serving)
}

async fn next(stream: &mut mpsc::Receiver<Result<LogsReply, Status>>) -> Option<Result<LogsReply, Status>> {
    tokio::time::timeout(Duration::from_secs(60), stream.recv())
        .await
        .expect("a chunk or the end of the stream")
}

async fn rest(stream: &mut mpsc::Receiver<Result<LogsReply, Status>>) -> Result<String, Status> {
    let mut text = Vec::new();
    while let Some(piece) = next(stream).await {
        text.extend(piece?.bytes);
    }
    Ok(String::from_utf8(text).unwrap())
}

#[tokio::test]
async fn ended_job_is_read_from_files_of_last_attempt() {
    let case = Case::new(NodeJobState::Failed);
    for earlier in 0..10 {
        case.write(&format!("attempt_{earlier}/0/stdout.log"), "an earlier one");
    }
    case.write("attempt_10/0/stdout.log.1", "one\ntwo\n");
    case.write("attempt_10/0/stdout.log", "three\n");
    case.write("attempt_10/1/stderr.log", "oops");
    case.write("attempt_x/0/stdout.log", "no attempt");
    assert_eq!(case.read(OUT).await.unwrap(), "one\ntwo\nthree\n");
    assert_eq!(case.read(Logs { tail_lines: Some(2), ..OUT }).await.unwrap(), "two\nthree\n");
    assert_eq!(case.read(Logs { follow: true, tail_lines: Some(1), ..OUT }).await.unwrap(), "three\n");
    assert_eq!(case.read(Logs { rank: Rank(1), stderr: true, ..OUT }).await.unwrap(), "oops");
    let error = case.read(Logs { rank: Rank(2), ..OUT }).await.unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::NotFound, "rank 2 of job 7 has no log"));
}

#[tokio::test]
async fn missing_logs_are_reported() {
    let case = Case::new(NodeJobState::Done);
    assert_eq!(case.read(OUT).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(case.read(Logs { follow: true, ..OUT }).await.unwrap(), "");
    case.now(NodeJobState::Queued);
    let error = case.stream(OUT).unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::FailedPrecondition, "job 7 has not started"));
    case.view.send_modify(|view| {
        let job = Job { id: 7, state: NodeJobState::Cancelled.into(), ..Default::default() };
        Arc::make_mut(view).jobs.insert(7, Arc::new(JobView { job, ..Default::default() }));
    });
    assert_eq!(case.stream(OUT).unwrap_err().message(), "job 7 never started");
}

#[tokio::test]
async fn only_regular_files_of_the_jobs_user_are_streamed() {
    use fs_err::os::unix::fs::symlink;
    let log = "attempt_0/0/stdout.log";
    let refused = async |case: &Case, what: &str| {
        let error = case.read(OUT).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{what}: {error}");
        assert!(!error.message().contains("secret"), "{what}: {error}");
        error.message().to_owned()
    };

    // Links in place of the file, of the rank's directory, and of the attempt's directory.
    for (depth, name) in [(0, log), (1, "attempt_0/0"), (2, "attempt_0")] {
        let case = Case::new(NodeJobState::Done);
        let target = case.write("../elsewhere/0/stdout.log", "secret");
        let link = case.logs().join(name);
        fs_err::create_dir_all(link.parent().unwrap()).unwrap();
        symlink(target.ancestors().nth(depth).unwrap(), link).unwrap();
        refused(&case, name).await;
    }
    // A link in place of the rotated file.
    let case = Case::new(NodeJobState::Done);
    let target = case.write("../elsewhere", "secret");
    symlink(&target, case.write(log, "x").with_extension("log.1")).unwrap();
    refused(&case, "rotated").await;

    // Pipes, sockets and directories do not block the reader.
    let case = Case::new(NodeJobState::Done);
    let path = case.write(log, "");
    fs_err::remove_file(&path).unwrap();
    rustix::fs::mknodat(CWD, &path, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    assert!(refused(&case, "fifo").await.contains("not a regular file"));
    fs_err::remove_file(&path).unwrap();
    let socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
    refused(&case, "socket").await;
    drop(socket);
    fs_err::remove_file(&path).unwrap();
    fs_err::create_dir(&path).unwrap();
    refused(&case, "directory").await;

    // A file of another user, as created by a hard link.
    let case = Case::new(NodeJobState::Done);
    case.write(log, "secret");
    case.now_of(NodeJobState::Done, rustix::process::getuid().as_raw() + 1);
    // The whole message, because the owner must not be in it.
    assert_eq!(
        refused(&case, "foreign").await,
        "failed to read the log of rank 0 of job 7: attempt_0/0/stdout.log does not belong to the job's user"
    );
}

#[tokio::test]
async fn running_job_is_read_through_its_agent_to_the_end() {
    let case = Case::new(NodeJobState::Running);
    let path = case.write("attempt_0/0/stdout.log", "one\ntwo\n");
    let (board, serving) = agent(case.socket(), case.logs()).await;
    assert_eq!(case.read(Logs { tail_lines: Some(1), ..OUT }).await.unwrap(), "two\n");
    let error = case.read(Logs { rank: Rank(3), ..OUT }).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("no rank 3"), "{error}");

    let mut stream = case.stream(Logs { follow: true, ..OUT }).unwrap();
    assert_eq!(next(&mut stream).await.unwrap().unwrap().bytes, b"one\ntwo\n");
    fs_err::write(&path, "one\ntwo\nlast words").unwrap();
    board.send_modify(|board| board.set_state(JobState::Done));
    assert_eq!(rest(&mut stream).await.unwrap(), "last words");
    serving.finish().await;
    // The agent has exited, but the view does not show the end of the job yet, so the stream waits for it.
    let mut late = case.stream(OUT).unwrap();
    tokio::task::yield_now().await;
    case.now(NodeJobState::Done);
    assert_eq!(rest(&mut late).await.unwrap(), "one\ntwo\nlast words");
}

#[tokio::test]
async fn follower_waits_for_the_first_rank() {
    let case = Case::new(NodeJobState::Running);
    case.write("attempt_0/0/stdout.log", "one\n");
    let (board, _serving) = agent_without_ranks(case.socket(), case.logs()).await;
    let error = case.read(OUT).await.unwrap_err();
    assert!(error.message().contains("no rank has started yet"), "{error}");
    let mut stream = case.stream(Logs { follow: true, ..OUT }).unwrap();
    let early = tokio::time::timeout(Duration::from_millis(50), stream.recv()).await;
    assert!(early.is_err(), "{early:?}");
    start_rank(&board);
    assert_eq!(next(&mut stream).await.unwrap().unwrap().bytes, b"one\n");
}

#[tokio::test]
async fn follower_continues_with_the_files_after_the_agent_has_exited() {
    let case = Case::new(NodeJobState::Running);
    let path = case.write("attempt_0/0/stdout.log", "one\n");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let _agent = runtime.spawn(agent(case.socket(), case.logs())).await.unwrap();
    let mut stream = case.stream(Logs { follow: true, ..OUT }).unwrap();
    assert_eq!(next(&mut stream).await.unwrap().unwrap().bytes, b"one\n");
    runtime.shutdown_background();
    // Output that the agent had no time to send, before and after a rotation.
    fs_err::write(&path, "one\ntwo\n").unwrap();
    fs_err::rename(&path, path.with_extension("log.1")).unwrap();
    fs_err::write(&path, "last\n").unwrap();
    case.now(NodeJobState::Lost);
    assert_eq!(rest(&mut stream).await.unwrap(), "two\nlast\n");
}

#[tokio::test]
async fn socket_of_another_user_sees_no_connection() {
    let case = Case::new(NodeJobState::Running);
    case.now_of(NodeJobState::Running, rustix::process::getuid().as_raw() + 1);
    let listener = tokio::net::UnixListener::bind(case.socket()).unwrap();
    let mut stream = case.stream(OUT).unwrap();
    case.now(NodeJobState::Lost);
    assert_eq!(next(&mut stream).await.unwrap().unwrap_err().code(), Code::NotFound);
    assert!(tokio::time::timeout(Duration::from_millis(20), listener.accept()).await.is_err());
}

#[test]
fn agent_message_is_stripped_of_control_characters_and_bounded() {
    let status = Status::internal(format!("\x1b[2Jno{}", "o".repeat(10_000)));
    let Err(status) = forwarded(&status) else { panic!("it is forwarded") };
    assert!(status.message().starts_with("[2Jnooo") && status.message().len() == MAX_AGENT_MESSAGE_CHARS);
}
