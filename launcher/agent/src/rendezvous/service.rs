//! The agent's gRPC services on its unix socket: its own, health (`grpc.health.v1`) and reflection
//! (`grpc.reflection.v1`).
//!
//! They decide nothing. A call that changes the job becomes a [`Message`] to the driver's task; queries are answered
//! here, from the status board and the log files, so that callers neither keep that task busy nor wait for it.

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};
use tonic_health::server::HealthReporter;
use xlaunch_proto::convert::scheduling::check_signal;
use xlaunch_proto::convert::{Join, Logs};
use xlaunch_proto::v1::agent_command::Command;
use xlaunch_proto::v1::agent_server::{Agent, AgentServer};
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{
    AgentCommand, CheckpointReply, CheckpointRequest, GetJobReply, GetJobRequest, HeartbeatAck, JoinReply,
    JoinRequest, LogsReply, LogsRequest, SignalReply, SignalRequest, StacksReply, StacksRequest, StatusReply,
    StatusRequest, StopReply, StopRequest, WorkerReport,
};

use super::barrier::Reply;
use super::listener;
use crate::stacks::{self, Detail};
use crate::status::board::Board;
use crate::status::{Monitor, follow};

/// Commands that may wait for a worker. It reads them at once: a full queue means that it hangs.
const COMMAND_QUEUE: usize = 16;
/// Concurrent calls on one connection. A worker makes two: its session and one more.
const MAX_CALLS: u32 = 16;
/// The largest request is a profile, with a line per kernel.
const MAX_REQUEST_BYTES: usize = 1 << 20;
const MAX_HEADER_BYTES: u32 = 16 << 10;
/// Concurrent readers of logs. Each occupies a thread of the runtime whenever it polls its file.
const MAX_LOG_READERS: usize = 64;
/// For callers to receive the last replies when the job is over.
const SERVICE_DRAIN_TIMEOUT: Duration = Duration::from_millis(500);

/// A call for the driver's task.
#[derive(Debug)]
pub enum Message {
    GetJob(GetJobRequest, oneshot::Sender<Result<GetJobReply, Status>>),
    Join(Join, Reply),
    SessionOpened {
        rank: u32,
        attempt: u32,
        commands: mpsc::Sender<Result<AgentCommand, Status>>,
    },
    SessionClosed {
        rank: u32,
        attempt: u32,
    },
    Report {
        rank: u32,
        attempt: u32,
        report: Report,
    },
    Stop,
    /// Answered when a checkpoint is complete, or refused.
    Checkpoint(oneshot::Sender<Result<CheckpointReply, Status>>),
    /// For every worker.
    Signal(i32),
}

/// The running services. They end with the process, or in [`finish`](Self::finish).
#[derive(Debug)]
pub struct RunningService {
    health: HealthReporter,
    shutdown: oneshot::Sender<()>,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
}

/// Starts to serve on `socket`. Other users are refused.
pub async fn serve(
    socket: &Path,
    messages: mpsc::Sender<Message>,
    board: watch::Sender<Board>,
) -> std::io::Result<RunningService> {
    let incoming = listener::bind(socket)?;
    let service = Service {
        messages,
        board: board.subscribe(),
        monitor: Monitor::start(board)?,
        readers: Arc::new(Semaphore::new(MAX_LOG_READERS)),
        examiners: Arc::new(Semaphore::new(1)),
    };
    let agent = AgentServer::new(service).max_decoding_message_size(MAX_REQUEST_BYTES);
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<AgentServer<Service>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(xlaunch_proto::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .map_err(std::io::Error::other)?;
    let (shutdown, stopped) = oneshot::channel();
    let server = Server::builder()
        .max_concurrent_streams(MAX_CALLS)
        .http2_max_header_list_size(MAX_HEADER_BYTES)
        .add_service(agent)
        .add_service(health_service.max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(reflection.max_decoding_message_size(MAX_REQUEST_BYTES))
        .serve_with_incoming_shutdown(incoming, async {
            // An error means that the sender was dropped, which stops the server, too.
            let _ = stopped.await;
        });
    Ok(RunningService { health, shutdown, server: tokio::spawn(server) })
}

impl RunningService {
    /// Stops the services. Call it after the board has the final state, so that streams end. Callers receive what they
    /// asked for within [`SERVICE_DRAIN_TIMEOUT`].
    pub async fn finish(self) {
        self.health.set_not_serving::<AgentServer<Service>>().await;
        // The server may have failed before.
        let _ = self.shutdown.send(());
        let _ = tokio::time::timeout(SERVICE_DRAIN_TIMEOUT, self.server).await;
    }
}

#[derive(Debug)]
struct Service {
    messages: mpsc::Sender<Message>,
    board: watch::Receiver<Board>,
    monitor: Monitor,
    readers: Arc<Semaphore>,
    /// Of stacks: one call at a time.
    examiners: Arc<Semaphore>,
}

impl Service {
    /// Sends a message to the driver's task and waits for the reply.
    async fn call<T>(&self, message: impl FnOnce(oneshot::Sender<T>) -> Message) -> Result<T, Status> {
        let ending = || Status::unavailable("the agent is ending");
        let (reply, answer) = oneshot::channel();
        self.messages.send(message(reply)).await.map_err(|_| ending())?;
        answer.await.map_err(|_| ending())
    }
}

#[tonic::async_trait]
impl Agent for Service {
    async fn get_job(&self, request: Request<GetJobRequest>) -> Result<Response<GetJobReply>, Status> {
        let reply = self.call(|reply| Message::GetJob(request.into_inner(), reply)).await??;
        Ok(Response::new(reply))
    }

    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinReply>, Status> {
        let join = Join::try_from(request.into_inner())
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        Ok(Response::new(self.call(|reply| Message::Join(join, reply)).await??))
    }

    type SessionStream = Pin<Box<dyn Stream<Item = Result<AgentCommand, Status>> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<WorkerReport>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let (commands, outgoing) = mpsc::channel(COMMAND_QUEUE);
        tokio::spawn(run_session(request.into_inner(), self.messages.clone(), commands));
        Ok(Response::new(Box::pin(ReceiverStream::new(outgoing))))
    }

    async fn status(&self, request: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        let mut board = self.board.clone();
        self.monitor.refresh(&mut board).await;
        let reply = board.borrow().reply(Instant::now(), request.into_inner().history);
        Ok(Response::new(reply))
    }

    type LogsStream = ReceiverStream<Result<LogsReply, Status>>;

    async fn logs(&self, request: Request<LogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let logs = Logs::try_from(request.into_inner())
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let reader = self.readers.clone().try_acquire_owned().map_err(|_| {
            Status::resource_exhausted(format!(
                "{MAX_LOG_READERS} clients are reading logs of this launch: close one of them"
            ))
        })?;
        Ok(Response::new(ReceiverStream::new(follow::stream(self.board.clone(), logs, reader)?)))
    }

    type StacksStream = tokio_stream::Iter<std::vec::IntoIter<Result<StacksReply, Status>>>;

    async fn stacks(&self, request: Request<StacksRequest>) -> Result<Response<Self::StacksStream>, Status> {
        let StacksRequest { rank } = request.into_inner();
        let mut subjects = self.board.borrow().subjects();
        subjects.retain(|subject| rank.is_none_or(|rank| subject.rank == rank));
        if subjects.is_empty() {
            let who = rank.map_or_else(|| "no rank is".into(), |rank| format!("rank {rank} is not"));
            return Err(Status::not_found(format!("{who} running")));
        }
        let examiner = self.examiners.clone().try_acquire_owned().map_err(|_| {
            Status::resource_exhausted("stacks of this launch are being taken: try again in some seconds")
        })?;
        let taken = tokio::task::spawn_blocking(move || {
            let subjects: Vec<_> = subjects.into_iter().map(|subject| (subject, Detail::Stacks)).collect();
            let ranks = stacks::collect(&subjects);
            // Held by the thread rather than the call: two debuggers cannot be attached to a process.
            drop(examiner);
            ranks
        });
        let ranks = taken.await.map_err(|error| Status::internal(error.to_string()))?;
        let replies: Vec<_> = stacks::split(ranks).into_iter().map(Ok).collect();
        Ok(Response::new(tokio_stream::iter(replies)))
    }

    async fn stop(&self, _: Request<StopRequest>) -> Result<Response<StopReply>, Status> {
        let ending = |_| Status::unavailable("the agent is ending");
        self.messages.send(Message::Stop).await.map_err(ending)?;
        Ok(Response::new(StopReply {}))
    }

    async fn checkpoint(&self, _: Request<CheckpointRequest>) -> Result<Response<CheckpointReply>, Status> {
        Ok(Response::new(self.call(Message::Checkpoint).await??))
    }

    async fn signal(&self, request: Request<SignalRequest>) -> Result<Response<SignalReply>, Status> {
        let SignalRequest { signal } = request.into_inner();
        check_signal("signal", signal).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let ending = |_| Status::unavailable("the agent is ending");
        self.messages.send(Message::Signal(signal)).await.map_err(ending)?;
        Ok(Response::new(SignalReply {}))
    }
}

/// One session: Hello, then reports, until the worker closes its side; then ours is closed, too.
async fn run_session(
    mut reports: Streaming<WorkerReport>,
    messages: mpsc::Sender<Message>,
    commands: mpsc::Sender<Result<AgentCommand, Status>>,
) {
    let Some(Ok(WorkerReport { report: Some(Report::Hello(hello)) })) = reports.next().await else {
        // The caller may be gone.
        let _ = commands
            .send(Err(Status::invalid_argument("the first message of a session must be Hello")))
            .await;
        return;
    };
    let (rank, attempt) = (hello.rank, hello.attempt);
    let opened = Message::SessionOpened { rank, attempt, commands: commands.clone() };
    if messages.send(opened).await.is_err() {
        return;
    }
    while let Some(Ok(message)) = reports.next().await {
        let Some(report) = message.report else { continue };
        if matches!(report, Report::Heartbeat(_)) {
            let ack = AgentCommand { command: Some(Command::HeartbeatAck(HeartbeatAck {})) };
            // A worker that does not read its commands misses acknowledgements; its lease ends it.
            let _ = commands.try_send(Ok(ack));
        }
        if messages.send(Message::Report { rank, attempt, report }).await.is_err() {
            return;
        }
    }
    // The driver may have ended.
    let _ = messages.send(Message::SessionClosed { rank, attempt }).await;
}
