//! The agent's gRPC services on its unix socket: its own, health (`grpc.health.v1`) and reflection (`grpc.reflection.v1`).
//!
//! They decide nothing. What changes a job becomes a message to the agent's task; what only looks at it is answered here, from
//! the board and the log files, so that the task is never kept busy by callers, and callers never wait for the task.

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
use xlaunch_proto::convert::{Join, Logs};
use xlaunch_proto::v1::agent_command::Command;
use xlaunch_proto::v1::agent_server::{Agent, AgentServer};
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{
    AgentCommand, GetJobReply, GetJobRequest, HeartbeatAck, JoinReply, JoinRequest, LogsReply, LogsRequest,
    StatusReply, StatusRequest, StopReply, StopRequest, WorkerReport,
};

use super::listener;
use super::meeting::Reply;
use crate::status::board::Board;
use crate::status::{Monitor, follow};

/// Commands that may wait for a worker: it reads them at once, so more means that it hangs.
const COMMANDS: usize = 16;
/// Calls at a time on one connection: a worker makes two, a session and one more.
const CALLS: u32 = 16;
/// Bytes of a request: the largest is a profile, a line per kernel.
const REQUEST: usize = 1 << 20;
/// Headers of a request.
const HEADERS: u32 = 16 << 10;
/// Logs that are read at a time: each reader has a thread of the runtime look at its file now and then.
const READERS: usize = 64;
/// Time for callers to take the last of what they asked for when the job is over.
const FAREWELL: Duration = Duration::from_millis(500);

/// What callers ask of the agent's task.
#[derive(Debug)]
#[expect(missing_docs, reason = "named after the calls")]
pub enum Message {
    GetJob(GetJobRequest, oneshot::Sender<Result<GetJobReply, Status>>),
    Join(Join, Reply),
    SessionOpened { rank: u32, attempt: u32, commands: mpsc::Sender<Result<AgentCommand, Status>> },
    SessionClosed { rank: u32, attempt: u32 },
    Report { rank: u32, attempt: u32, report: Report },
    Stop,
}

/// The running services. They end with the process, or in [`finish`](Self::finish).
#[derive(Debug)]
pub struct Serving {
    health: HealthReporter,
    end: oneshot::Sender<()>,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
}

/// Serves on `socket` from now on. Callers of other users are refused.
pub async fn serve(
    socket: &Path,
    messages: mpsc::Sender<Message>,
    board: watch::Sender<Board>,
) -> std::io::Result<Serving> {
    let incoming = listener::bind(socket)?;
    let service = Service {
        messages,
        board: board.subscribe(),
        monitor: Monitor::start(board)?,
        readers: Arc::new(Semaphore::new(READERS)),
    };
    let agent = AgentServer::new(service).max_decoding_message_size(REQUEST);
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<AgentServer<Service>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(xlaunch_proto::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .map_err(std::io::Error::other)?;
    let (end, ended) = oneshot::channel();
    let server = Server::builder()
        .max_concurrent_streams(CALLS)
        .http2_max_header_list_size(HEADERS)
        .add_service(agent)
        .add_service(health_service.max_decoding_message_size(REQUEST))
        .add_service(reflection.max_decoding_message_size(REQUEST))
        .serve_with_incoming_shutdown(incoming, async {
            // Dropped, it means the end as well.
            let _ = ended.await;
        });
    Ok(Serving { health, end, server: tokio::spawn(server) })
}

impl Serving {
    /// Ends the services, once the board says that the job is over: callers get what they asked for, as far as they take it
    /// within a moment.
    pub async fn finish(self) {
        self.health.set_not_serving::<AgentServer<Service>>().await;
        // The server may have failed: then there is nobody left to wait for.
        let _ = self.end.send(());
        let _ = tokio::time::timeout(FAREWELL, self.server).await;
    }
}

#[derive(Debug)]
struct Service {
    messages: mpsc::Sender<Message>,
    board: watch::Receiver<Board>,
    monitor: Monitor,
    readers: Arc<Semaphore>,
}

impl Service {
    async fn ask<T>(&self, message: impl FnOnce(oneshot::Sender<T>) -> Message) -> Result<T, Status> {
        let gone = || Status::unavailable("the agent is ending");
        let (reply, answer) = oneshot::channel();
        self.messages.send(message(reply)).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())
    }
}

#[tonic::async_trait]
impl Agent for Service {
    async fn get_job(&self, request: Request<GetJobRequest>) -> Result<Response<GetJobReply>, Status> {
        let reply = self.ask(|reply| Message::GetJob(request.into_inner(), reply)).await??;
        Ok(Response::new(reply))
    }

    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinReply>, Status> {
        let join = Join::try_from(request.into_inner())
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        Ok(Response::new(self.ask(|reply| Message::Join(join, reply)).await??))
    }

    type SessionStream = Pin<Box<dyn Stream<Item = Result<AgentCommand, Status>> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<WorkerReport>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let (commands, outgoing) = mpsc::channel(COMMANDS);
        tokio::spawn(listen(request.into_inner(), self.messages.clone(), commands));
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
            Status::resource_exhausted(format!("{READERS} others read logs of this launch: end one of them"))
        })?;
        Ok(Response::new(ReceiverStream::new(follow::stream(self.board.clone(), logs, reader)?)))
    }

    async fn stop(&self, _: Request<StopRequest>) -> Result<Response<StopReply>, Status> {
        let gone = |_| Status::unavailable("the agent is ending");
        self.messages.send(Message::Stop).await.map_err(gone)?;
        Ok(Response::new(StopReply {}))
    }
}

/// One session: Hello first, then reports, until the worker closes its side; then ours closes too.
async fn listen(
    mut reports: Streaming<WorkerReport>,
    messages: mpsc::Sender<Message>,
    commands: mpsc::Sender<Result<AgentCommand, Status>>,
) {
    let Some(Ok(WorkerReport { report: Some(Report::Hello(hello)) })) = reports.next().await else {
        // A stream that does not begin with Hello is nobody's; the caller may be gone already.
        let _ = commands.send(Err(Status::invalid_argument("a session begins with Hello"))).await;
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
            // A worker that does not read its commands gets no more of them; its exit is seen elsewhere.
            let _ = commands.try_send(Ok(ack));
        }
        if messages.send(Message::Report { rank, attempt, report }).await.is_err() {
            return;
        }
    }
    // The agent may have ended.
    let _ = messages.send(Message::SessionClosed { rank, attempt }).await;
}
