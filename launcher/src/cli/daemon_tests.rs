//! Tests of the daemon client against a scripted daemon on its own socket.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::net::Shutdown;
use tokio::net::UnixListener;
use tokio::sync::{Barrier, Notify};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};
use xlaunch_proto::v1::node_server::{Node, NodeServer};
use xlaunch_proto::v1::*;
use xlaunch_spec::exit::ExitCode;

use super::cancel;
use super::job_list::call_for_each;
use crate::client::daemon::{Candidate, DaemonAddress, DaemonClient};
use xlaunch_spec::refusal::Refusal;

/// A daemon with one user's jobs 1 and 2, and job 3 of another.
#[derive(Clone, Debug)]
struct FakeDaemon {
    state: Arc<Mutex<State>>,
    dir: Arc<tempfile::TempDir>,
    /// Notified when a client has seen the first state of the job it watches.
    first_state_seen: Arc<Notify>,
    /// Makes calls of `Update` wait for each other, in pairs.
    updates: Arc<Barrier>,
}

#[derive(Debug, Default)]
struct State {
    connections: Vec<OwnedFd>,
    /// Number of `Submit` and `Watch` calls that break their connection instead of replying.
    calls_to_lose: usize,
    submits: Vec<SubmitRequest>,
    cancelled: Vec<u64>,
    logs: Vec<JobLogsRequest>,
    watches: usize,
}

impl FakeDaemon {
    async fn start() -> Self {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let updates = Arc::new(Barrier::new(2));
        let fake = Self { state: Arc::default(), dir, first_state_seen: Arc::default(), updates };
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

    fn address(&self) -> DaemonAddress {
        DaemonAddress { socket: Some(self.socket()) }
    }

    async fn connect(&self) -> DaemonClient {
        DaemonClient::connect(&self.address()).await.unwrap()
    }

    fn with_state<T>(&self, access: impl FnOnce(&mut State) -> T) -> T {
        access(&mut self.state.lock().unwrap())
    }

    /// Breaks all connections if this call is one of those to lose.
    fn loses_call(&self) -> bool {
        self.with_state(|state| {
            if state.calls_to_lose == 0 {
                return false;
            }
            state.calls_to_lose -= 1;
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

type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Node for FakeDaemon {
    async fn submit(&self, request: Request<SubmitRequest>) -> Result<Response<SubmitReply>, Status> {
        let request = request.into_inner();
        if request.priority > 0 {
            return Err(Status::permission_denied("priorities above 0 are for administrators"));
        }
        let repeated = self.with_state(|state| {
            let repeated = state.submits.iter().any(|known| known.request_id == request.request_id);
            state.submits.push(request);
            repeated
        });
        if self.loses_call() {
            return std::future::pending().await;
        }
        Ok(Response::new(SubmitReply {
            job: Some(job(1, NodeJobState::Queued)),
            repeated,
            array: Vec::new(),
            warnings: Vec::new(),
        }))
    }

    async fn history(&self, _: Request<HistoryRequest>) -> Result<Response<HistoryReply>, Status> {
        Ok(Response::new(HistoryReply::default()))
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<ListReply>, Status> {
        // One job per page.
        let id = if request.into_inner().before == 0 { 2 } else { 1 };
        Ok(Response::new(ListReply { jobs: vec![job(id, NodeJobState::Running)], more: id == 2 }))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<Job>, Status> {
        find(request.into_inner().job).map(Response::new)
    }

    type WatchStream = Replies<Job>;

    async fn watch(&self, request: Request<GetRequest>) -> Result<Response<Replies<Job>>, Status> {
        let id = find(request.into_inner().job)?.id;
        let call = self.with_state(|state| {
            state.watches += 1;
            state.watches
        });
        let fake = self.clone();
        let first = tokio_stream::once(Ok(job(id, NodeJobState::Running)));
        let last = last_state(call, fake, Job { exit_code: Some(42), ..job(id, NodeJobState::Failed) });
        Ok(Response::new(Box::pin(first.chain(last))))
    }

    type LogsStream = Replies<LogsReply>;

    async fn logs(&self, request: Request<JobLogsRequest>) -> Result<Response<Replies<LogsReply>>, Status> {
        let request = request.into_inner();
        find(request.job)?;
        self.with_state(|state| state.logs.push(request));
        let pieces = ["step 1\n", "\u{1b}[31mstep", " 2\n"]
            .map(|text| Ok(LogsReply { bytes: text.into(), position: None }));
        Ok(Response::new(Box::pin(tokio_stream::iter(pieces))))
    }

    type CheckpointStream = Replies<CheckpointReply>;

    async fn checkpoint(
        &self,
        request: Request<JobCheckpointRequest>,
    ) -> Result<Response<Replies<CheckpointReply>>, Status> {
        let reply = match find(request.into_inner().job)?.id {
            1 => Ok(CheckpointReply { step: 7, path: "/c/step-7".into(), seconds: 0.5 }),
            _ => Err(Status::aborted("rank 0 failed: the disk is full")),
        };
        Ok(Response::new(Box::pin(tokio_stream::once(reply))))
    }

    type StacksStream = Replies<StacksReply>;

    async fn stacks(
        &self,
        request: Request<JobStacksRequest>,
    ) -> Result<Response<Replies<StacksReply>>, Status> {
        let request = request.into_inner();
        let rank = request.stacks.and_then(|stacks| stacks.rank).unwrap_or(0);
        let id = find(request.job)?.id;
        let part = move |pid| {
            let processes = vec![ProcessStacks { pid, ..ProcessStacks::default() }];
            Ok(StacksReply { ranks: vec![RankStacks { rank, processes, ..RankStacks::default() }] })
        };
        let replies =
            if id == 1 { vec![part(7), part(8)] } else { vec![Err(Status::not_found("no rank is running"))] };
        Ok(Response::new(Box::pin(tokio_stream::iter(replies))))
    }

    async fn cancel(&self, request: Request<CancelRequest>) -> Result<Response<Job>, Status> {
        let id = find(request.into_inner().job)?.id;
        self.with_state(|state| state.cancelled.push(id));
        Ok(Response::new(job(id, NodeJobState::Stopping)))
    }

    async fn update(&self, request: Request<UpdateRequest>) -> Result<Response<Job>, Status> {
        let id = request.into_inner().job;
        self.updates.wait().await;
        find(id).map(Response::new)
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<NodeStatus>, Status> {
        Err(Status::permission_denied("draining is for administrators"))
    }

    type ExamineStream = Replies<ExamineReply>;

    async fn examine(&self, _: Request<ExamineRequest>) -> Result<Response<Self::ExamineStream>, Status> {
        Err(Status::permission_denied("examining is for administrators"))
    }

    async fn status(&self, _: Request<NodeStatusRequest>) -> Result<Response<NodeStatus>, Status> {
        Ok(Response::new(NodeStatus { host: "node-17".into(), ..Default::default() }))
    }
}

/// Streams the last state of a watched job. The first watcher's connection may break before it arrives.
fn last_state(call: usize, fake: FakeDaemon, last: Job) -> impl Stream<Item = Result<Job, Status>> + Send {
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        fake.first_state_seen.notified().await;
        if call == 1 && fake.loses_call() {
            return std::future::pending().await;
        }
        let _ = sender.send(Ok(last)).await;
    });
    tokio_stream::wrappers::ReceiverStream::new(receiver)
}

async fn within_a_minute<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), work).await.expect("the call hangs")
}

#[tokio::test]
async fn submission_with_lost_reply_is_repeated_once_under_the_same_id() {
    let fake = FakeDaemon::start().await;
    fake.with_state(|state| state.calls_to_lose = 1);
    let request = SubmitRequest { request_id: "a".into(), ..Default::default() };
    let mut daemon = fake.connect().await;
    let reply = within_a_minute(daemon.submit(request.clone())).await.unwrap();
    assert!(reply.repeated && reply.job.unwrap().id == 1);
    fake.with_state(|state| {
        assert_eq!(state.submits.iter().map(|known| &*known.request_id).collect::<Vec<_>>(), ["a", "a"]);
        state.calls_to_lose = 2;
    });
    let refusal = within_a_minute(daemon.submit(request)).await.unwrap_err();
    assert_eq!(refusal.exit, ExitCode::Retryable);
    assert!(refusal.message.contains("`xlaunch jobs`"), "{}", refusal.message);
    assert_eq!(fake.with_state(|state| state.submits.len()), 4);
}

#[tokio::test]
async fn refused_call_is_not_repeated_and_shows_the_daemons_message() {
    let fake = FakeDaemon::start().await;
    let request = SubmitRequest { request_id: "a".into(), priority: 1, ..Default::default() };
    let refusal = within_a_minute(fake.connect().await.submit(request)).await.unwrap_err();
    assert_eq!(refusal.exit, ExitCode::Usage);
    assert_eq!(refusal.message, "priorities above 0 are for administrators");
    let drained = within_a_minute(fake.connect().await.drain(DrainRequest::default())).await.unwrap_err();
    assert!(drained.message.contains("administrators"), "{drained:?}");
}

#[tokio::test]
async fn follow_survives_a_lost_connection() {
    let fake = FakeDaemon::start().await;
    fake.with_state(|state| state.calls_to_lose = 1);
    let mut seen = Vec::new();
    let mut daemon = fake.connect().await;
    let ended = within_a_minute(daemon.follow(1, |job| {
        seen.push(job.state());
        fake.first_state_seen.notify_one();
    }))
    .await
    .unwrap();
    assert_eq!(ended.exit_code, Some(42));
    assert_eq!(seen, [NodeJobState::Running, NodeJobState::Running, NodeJobState::Failed]);
    assert_eq!(fake.with_state(|state| state.watches), 2);
    let refusal = within_a_minute(daemon.follow(3, |_| ())).await.unwrap_err();
    assert_eq!((refusal.exit, &*refusal.message), (ExitCode::WorkerFailed, "there is no job 3"));
}

#[tokio::test]
async fn logs_are_passed_on_unchanged() {
    let fake = FakeDaemon::start().await;
    let request = LogsRequest {
        rank: 1,
        stream: LogStream::Stderr.into(),
        follow: false,
        tail_lines: Some(3),
        after: None,
    };
    let mut got = Vec::new();
    let mut daemon = fake.connect().await;
    let print = |bytes: &[u8]| {
        got.extend_from_slice(bytes);
        Ok::<_, Refusal>(())
    };
    within_a_minute(daemon.logs(2, request, print)).await.unwrap();
    assert_eq!(got, b"step 1\n\x1b[31mstep 2\n");
    assert_eq!(fake.with_state(|state| state.logs.clone()), [JobLogsRequest { job: 2, logs: Some(request) }]);
    let missing = within_a_minute(daemon.logs(3, request, |_| Ok::<_, Refusal>(()))).await.unwrap_err();
    assert_eq!(missing.message, "there is no job 3");
}

#[tokio::test]
async fn checkpoint_is_waited_for_and_its_failure_shown() {
    let mut daemon = FakeDaemon::start().await.connect().await;
    let saved = within_a_minute(daemon.checkpoint(1)).await.unwrap();
    assert_eq!((saved.step, saved.path.as_str()), (7, "/c/step-7"));
    let failed = within_a_minute(daemon.checkpoint(2)).await.unwrap_err();
    assert_eq!((failed.exit, &*failed.message), (ExitCode::WorkerFailed, "rank 0 failed: the disk is full"));
    assert_eq!(within_a_minute(daemon.checkpoint(3)).await.unwrap_err().message, "there is no job 3");
}

#[tokio::test]
async fn stacks_of_all_processes_are_collected_by_rank() {
    let mut daemon = FakeDaemon::start().await.connect().await;
    let request = StacksRequest { rank: Some(4) };
    let ranks = within_a_minute(daemon.stacks(1, request)).await.unwrap();
    let pids: Vec<u32> = ranks[0].processes.iter().map(|process| process.pid).collect();
    assert_eq!((ranks.len(), ranks[0].rank, pids), (1, 4, vec![7, 8]));
    let failed = within_a_minute(daemon.stacks(2, request)).await.unwrap_err();
    assert_eq!(failed.message, "no rank is running");
}

#[tokio::test]
async fn newest_job_is_cancelled_first_and_an_unknown_one_does_not_prevent_the_others() {
    let fake = FakeDaemon::start().await;
    let jobs = [1, 3, 2, 1];
    let results = within_a_minute(cancel::cancel_all(&fake.connect().await, &jobs, false)).await;
    assert_eq!(fake.with_state(|state| state.cancelled.clone()), [2, 1]);
    assert_eq!(results.exit, ExitCode::WorkerFailed);
    assert_eq!(results.text(crate::render::job::cancelled), "job 1 is stopping\njob 2 is stopping\n");
    assert_eq!(results.errors, "error: there is no job 3\n");
}

#[tokio::test]
async fn several_jobs_are_changed_at_a_time_and_the_replies_are_in_order() {
    let daemon = FakeDaemon::start().await.connect().await;
    let update = |mut daemon: DaemonClient, job| async move {
        daemon.update(UpdateRequest { job, held: Some(true), priority: None }).await
    };
    let replies = within_a_minute(call_for_each(&daemon, &[2, 3, 1, 2], update)).await;
    let jobs: Vec<Option<u64>> = replies.into_iter().map(|reply| reply.ok().map(|job| job.id)).collect();
    assert_eq!(jobs, [Some(2), None, Some(1), Some(2)]);
}

#[tokio::test]
async fn default_socket_of_another_user_is_not_used() {
    let fake = FakeDaemon::start().await;
    let connect = async || {
        let own = Candidate { socket: fake.socket(), any_owner: false };
        within_a_minute(DaemonClient::connect_to_first(vec![own])).await
    };
    assert!(connect().await.is_ok());
    if !rustix::process::getuid().is_root() {
        return;
    }
    for path in [fake.socket(), fake.dir.path().to_owned()] {
        std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
        let refused = connect().await.unwrap_err().message;
        assert!(refused.contains("belongs to user 65534; --socket uses it"), "{refused}");
        fake.connect().await;
        std::os::unix::fs::chown(&path, Some(0), None).unwrap();
    }
}

#[tokio::test]
async fn unreachable_daemon_errors_name_the_socket() {
    let fake = FakeDaemon::start().await;
    let gone = DaemonAddress { socket: Some(fake.dir.path().join("other")) };
    let refusal = within_a_minute(DaemonClient::connect(&gone)).await.unwrap_err();
    assert!(refusal.message.contains("other: No such file or directory"), "{}", refusal.message);
    // A daemon that goes away between the connection and the call.
    let going = fake.dir.path().join("going");
    let listener = std::os::unix::net::UnixListener::bind(&going).unwrap();
    let mut daemon = DaemonClient::connect(&DaemonAddress { socket: Some(going.clone()) }).await.unwrap();
    drop(listener);
    let refusal = within_a_minute(daemon.get(1)).await.unwrap_err();
    assert_eq!(refusal.exit, ExitCode::Retryable);
    assert!(refusal.message.contains(going.to_str().unwrap()), "{}", refusal.message);
    let dead = fake.dir.path().join("dead");
    drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
    let refusal =
        within_a_minute(DaemonClient::connect(&DaemonAddress { socket: Some(dead) })).await.unwrap_err();
    assert!(refusal.message.contains("dead: Connection refused"), "{}", refusal.message);
}
