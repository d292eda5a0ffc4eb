//! The client against a scripted daemon on a socket of its own.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::net::Shutdown;
use tokio::net::UnixListener;
use tokio::sync::Notify;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::node_server::{Node, NodeServer};
use xlaunch_proto::v1::*;

use super::connect::{At, Daemon};
use super::{control, logs};
use crate::cli::console::End;

/// A daemon with one user's jobs 1 and 2, and job 3 of another.
#[derive(Clone, Debug)]
pub(super) struct Fake {
    state: Arc<Mutex<State>>,
    dir: Arc<tempfile::TempDir>,
    /// Told when a client has seen the beginning of what it watches.
    seen: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    connections: Vec<OwnedFd>,
    /// Calls of `Submit` and `Watch` that break their connection instead of giving the next answer.
    lose: usize,
    submits: Vec<SubmitRequest>,
    cancelled: Vec<u64>,
    logs: Vec<JobLogsRequest>,
    watches: usize,
}

impl Fake {
    pub(super) async fn start() -> Self {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let fake = Self { state: Arc::default(), dir, seen: Arc::default() };
        let state = fake.state.clone();
        let connections =
            UnixListenerStream::new(UnixListener::bind(fake.socket()).unwrap()).map(move |found| {
                let stream = found?;
                state.lock().unwrap().connections.push(stream.as_fd().try_clone_to_owned()?);
                Ok::<_, std::io::Error>(stream)
            });
        let server = tonic::transport::Server::builder().add_service(NodeServer::new(fake.clone()));
        tokio::spawn(server.serve_with_incoming(connections));
        fake
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    fn at(&self) -> At {
        At { socket: Some(self.socket()) }
    }

    pub(super) async fn connect(&self) -> Daemon {
        Daemon::connect(&self.at()).await.unwrap()
    }

    fn look<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.state.lock().unwrap())
    }

    /// Breaks all connections, if this call is to be lost.
    fn lost(&self) -> bool {
        self.look(|state| {
            if state.lose == 0 {
                return false;
            }
            state.lose -= 1;
            for connection in state.connections.drain(..) {
                let _ = rustix::net::shutdown(connection, Shutdown::Both);
            }
            true
        })
    }
}

fn job(id: u64, state: NodeJobState) -> Job {
    Job { id, state: state.into(), ..Default::default() }
}

fn find(id: u64) -> Result<Job, Status> {
    match id {
        1 | 2 => Ok(job(id, NodeJobState::Running)),
        _ => Err(Status::not_found(format!("there is no job {id}"))),
    }
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Node for Fake {
    async fn submit(&self, request: Request<SubmitRequest>) -> Result<Response<SubmitReply>, Status> {
        let request = request.into_inner();
        if request.priority > 0 {
            return Err(Status::permission_denied("priorities above 0 are for administrators"));
        }
        let repeated = self.look(|state| {
            let repeated = state.submits.iter().any(|known| known.request_id == request.request_id);
            state.submits.push(request);
            repeated
        });
        if self.lost() {
            return std::future::pending().await;
        }
        Ok(Response::new(SubmitReply { job: Some(job(1, NodeJobState::Queued)), repeated }))
    }

    async fn list(&self, _: Request<ListRequest>) -> Result<Response<ListReply>, Status> {
        Ok(Response::new(ListReply { jobs: [1, 2].map(|id| job(id, NodeJobState::Running)).into() }))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<Job>, Status> {
        find(request.into_inner().job).map(Response::new)
    }

    type WatchStream = Answers<Job>;

    async fn watch(&self, request: Request<GetRequest>) -> Result<Response<Answers<Job>>, Status> {
        let id = find(request.into_inner().job)?.id;
        let turn = self.look(|state| {
            state.watches += 1;
            state.watches
        });
        let fake = self.clone();
        let first = tokio_stream::once(Ok(job(id, NodeJobState::Running)));
        let last = async_end(turn, fake, Job { exit_code: Some(42), ..job(id, NodeJobState::Failed) });
        Ok(Response::new(Box::pin(first.chain(last))))
    }

    type LogsStream = Answers<LogsReply>;

    async fn logs(&self, request: Request<JobLogsRequest>) -> Result<Response<Answers<LogsReply>>, Status> {
        let request = request.into_inner();
        find(request.job)?;
        self.look(|state| state.logs.push(request));
        let pieces = ["step 1\n", "\u{1b}[31mstep", " 2\n"].map(|text| Ok(LogsReply { bytes: text.into() }));
        Ok(Response::new(Box::pin(tokio_stream::iter(pieces))))
    }

    async fn cancel(&self, request: Request<CancelRequest>) -> Result<Response<Job>, Status> {
        let id = find(request.into_inner().job)?.id;
        self.look(|state| state.cancelled.push(id));
        Ok(Response::new(job(id, NodeJobState::Stopping)))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<NodeStatus>, Status> {
        Err(Status::permission_denied("draining is for administrators"))
    }

    async fn status(&self, _: Request<NodeStatusRequest>) -> Result<Response<NodeStatus>, Status> {
        Ok(Response::new(NodeStatus { host: "node-17".into(), ..Default::default() }))
    }
}

/// The end of a watched job; the first watchers may be cut off before it.
fn async_end(turn: usize, fake: Fake, last: Job) -> impl Stream<Item = Result<Job, Status>> + Send {
    let (sender, end) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        fake.seen.notified().await;
        if turn == 1 && fake.lost() {
            return std::future::pending().await;
        }
        let _ = sender.send(Ok(last)).await;
    });
    tokio_stream::wrappers::ReceiverStream::new(end)
}

async fn soon<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), work).await.expect("an answer within a minute")
}

#[tokio::test]
async fn a_submission_whose_answer_is_lost_is_repeated_under_its_id_once() {
    let fake = Fake::start().await;
    fake.look(|state| state.lose = 1);
    let request = SubmitRequest { request_id: "a".into(), ..Default::default() };
    let mut daemon = fake.connect().await;
    let reply = soon(daemon.submit(request.clone())).await.unwrap();
    assert!(reply.repeated && reply.job.unwrap().id == 1);
    fake.look(|state| {
        assert_eq!(state.submits.iter().map(|known| &*known.request_id).collect::<Vec<_>>(), ["a", "a"]);
        state.lose = 2;
    });
    let refusal = soon(daemon.submit(request)).await.unwrap_err();
    assert_eq!(refusal.exit, ExitCode::Retryable);
    assert!(refusal.message.contains("`xlaunch jobs`"), "{}", refusal.message);
    assert_eq!(fake.look(|state| state.submits.len()), 4);
}

#[tokio::test]
async fn what_the_daemon_refuses_is_not_repeated_and_told_in_its_words() {
    let fake = Fake::start().await;
    let request = SubmitRequest { request_id: "a".into(), priority: 1, ..Default::default() };
    let refusal = soon(fake.connect().await.submit(request)).await.unwrap_err();
    assert_eq!(refusal.exit, ExitCode::Usage);
    assert_eq!(refusal.message, "priorities above 0 are for administrators");
    let drained = soon(control::drain(control::Drain::all(fake.at()))).await;
    assert!(
        matches!(&drained, Err(End::Problem(refusal)) if refusal.message.contains("administrators")),
        "{drained:?}"
    );
}

#[tokio::test]
async fn a_job_is_followed_through_a_break_to_its_end() {
    let fake = Fake::start().await;
    fake.look(|state| state.lose = 1);
    let mut seen = Vec::new();
    let mut daemon = fake.connect().await;
    let ended = soon(daemon.follow(1, |job| {
        seen.push(job.state());
        fake.seen.notify_one();
    }))
    .await
    .unwrap();
    assert_eq!(ended.exit_code, Some(42));
    assert_eq!(seen, [NodeJobState::Running, NodeJobState::Running, NodeJobState::Failed]);
    assert_eq!(fake.look(|state| state.watches), 2);
    let refusal = soon(daemon.follow(3, |_| ())).await.unwrap_err();
    assert_eq!((refusal.exit, &*refusal.message), (ExitCode::WorkerFailed, "there is no job 3"));
}

#[tokio::test]
async fn logs_arrive_unchanged() {
    let fake = Fake::start().await;
    let request =
        LogsRequest { rank: 1, stream: LogStream::Stderr.into(), follow: true, tail_lines: Some(3) };
    let mut got = Vec::new();
    let put = |bytes: &[u8]| {
        got.extend_from_slice(bytes);
        Ok(())
    };
    soon(logs(fake.connect().await, 2, request, put)).await.unwrap();
    assert_eq!(got, b"step 1\n\x1b[31mstep 2\n");
    assert_eq!(fake.look(|state| state.logs.clone()), [JobLogsRequest { job: 2, logs: Some(request) }]);
    let missing = soon(logs(fake.connect().await, 3, request, |_| Ok(()))).await;
    assert!(
        matches!(&missing, Err(End::Problem(refusal)) if refusal.message == "there is no job 3"),
        "{missing:?}"
    );
}

#[tokio::test]
async fn one_job_that_is_not_there_keeps_no_other_from_being_cancelled() {
    let fake = Fake::start().await;
    let (text, exit) = soon(control::cancel_all(&mut fake.connect().await, &[1, 3, 2])).await;
    assert_eq!(fake.look(|state| state.cancelled.clone()), [1, 2]);
    assert_eq!(exit, ExitCode::WorkerFailed);
    assert_eq!(text.answer(), "job 1 is asked to stop\njob 2 is asked to stop\n");
    assert_eq!(text.problems, "error: there is no job 3\n");
}

#[tokio::test]
async fn a_daemon_that_is_gone_is_told_from_one_that_refuses() {
    let fake = Fake::start().await;
    let gone = At { socket: Some(fake.dir.path().join("other")) };
    let refusal = soon(Daemon::connect(&gone)).await.unwrap_err();
    assert!(refusal.message.contains("other: No such file or directory"), "{}", refusal.message);
    // One that goes between the connection and the call.
    let going = fake.dir.path().join("going");
    let listener = std::os::unix::net::UnixListener::bind(&going).unwrap();
    let mut daemon = Daemon::connect(&At { socket: Some(going.clone()) }).await.unwrap();
    drop(listener);
    let refusal = soon(daemon.get(1)).await.unwrap_err();
    assert_eq!(refusal.exit, ExitCode::Retryable);
    assert!(refusal.message.contains(going.to_str().unwrap()), "{}", refusal.message);
    let dead = fake.dir.path().join("dead");
    drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
    let refusal = soon(Daemon::connect(&At { socket: Some(dead) })).await.unwrap_err();
    assert!(refusal.message.contains("dead: Connection refused"), "{}", refusal.message);
}
