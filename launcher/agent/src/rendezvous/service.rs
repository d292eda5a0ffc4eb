//! The agent's gRPC services on its unix socket: its own, health (`grpc.health.v1`) and reflection
//! (`grpc.reflection.v1` and `v1alpha`).
//!
//! They decide nothing. A call that changes the job becomes a [`Message`] to the driver's task. Queries are answered
//! without that task, from the status board and the log files, so that callers neither keep it busy nor wait for it.
//!
//! Any agent of a multi-node job answers for all nodes: callers use the job's ranks, and queries about ranks of other
//! nodes are passed on to those nodes (`peers`, `peer_queries`).

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};
use tonic_health::server::HealthReporter;
use xlaunch_host::net::Peer;
use xlaunch_proto::convert::Join;
use xlaunch_proto::convert::node::check_signal;
use xlaunch_proto::v1::agent_command::Command;
use xlaunch_proto::v1::agent_server::{Agent, AgentServer};
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{
    AgentCommand, CheckpointReply, CheckpointRequest, GetJobReply, GetJobRequest, HeartbeatAck, JoinReply,
    JoinRequest, LogsReply, LogsRequest, Query, SignalReply, SignalRequest, StacksReply, StacksRequest,
    StatusReply, StatusRequest, StopReply, StopRequest, WorkerReport,
};

use super::local_queries::{MAX_LOG_READERS, Service};
use super::message::Message;
use super::peers::Peers;
use super::{answers, listener, peer_queries};
use crate::status::board::Board;
use crate::status::{Monitor, follow, merge};
use xlaunch_host::process::Process;

/// Maximum number of commands that wait for a worker. It reads them at once, so a full queue means that it hangs.
const COMMAND_QUEUE: usize = 16;
/// Concurrent calls on one connection. A worker makes two: its session and one more.
const MAX_CALLS: u32 = 16;
/// The largest request is a profile, with a line per kernel.
const MAX_REQUEST_BYTES: usize = 1 << 20;
const MAX_HEADER_BYTES: u32 = 16 << 10;
/// Flow-control window of a worker's stream: what it may send before the agent reads it. h2 closes a connection with
/// too many small unread frames (more than half of the connection's window of 1 MiB, where each frame counts 256 bytes
/// less its own size). While the agent is suspended, step reports would reach that within seconds unless flow control
/// stops them first.
const STREAM_WINDOW_BYTES: u32 = 64 << 10;
/// Time for callers to receive the last replies when the job is over.
const SERVICE_DRAIN_TIMEOUT: Duration = Duration::from_millis(500);

/// The running services. They end with the process, or in [`finish`](Self::finish).
#[derive(Debug)]
pub struct RunningService {
    /// The other nodes, in a job that may have several.
    pub(crate) peers: Option<Peers>,
    health: HealthReporter,
    shutdown: oneshot::Sender<()>,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
}

/// Starts the services of a single-node job on `socket`. Other users are refused.
pub async fn serve(
    socket: &Path,
    messages: mpsc::Sender<Message>,
    board: watch::Sender<Board>,
) -> std::io::Result<RunningService> {
    serve_node(socket, messages, board, None).await
}

/// Same as [`serve`], for one node of a job that may have several: `others` are the other nodes and their queries.
pub(crate) async fn serve_node(
    socket: &Path,
    messages: mpsc::Sender<Message>,
    board: watch::Sender<Board>,
    others: Option<(Peers, mpsc::UnboundedReceiver<Query>)>,
) -> std::io::Result<RunningService> {
    let incoming = listener::listen(socket)?;
    let service = Arc::new(Service {
        messages,
        board: board.subscribe(),
        monitor: Monitor::start(board, socket.parent().unwrap_or(socket))?,
        readers: Arc::new(Semaphore::new(MAX_LOG_READERS)),
        examiners: Arc::new(Semaphore::new(1)),
        peers: others.as_ref().map(|(peers, _)| peers.clone()),
    });
    let peers = service.peers.clone();
    if let Some((peers, questions)) = others {
        tokio::spawn(answers::answer(questions, service.clone(), peers));
    }
    let agent = AgentServer::from_arc(service).max_decoding_message_size(MAX_REQUEST_BYTES);
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<AgentServer<Service>>().await;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(xlaunch_proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let reflection_v1 = reflection().build_v1().map_err(std::io::Error::other)?;
    // Many clients, such as older releases of grpcurl, know only this version of the protocol.
    let reflection_v1alpha = reflection().build_v1alpha().map_err(std::io::Error::other)?;
    let (shutdown, stopped) = oneshot::channel();
    let server = Server::builder()
        .max_concurrent_streams(MAX_CALLS)
        .http2_max_header_list_size(MAX_HEADER_BYTES)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .add_service(agent)
        .add_service(health_service.max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(reflection_v1.max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(reflection_v1alpha.max_decoding_message_size(MAX_REQUEST_BYTES))
        .serve_with_incoming_shutdown(incoming, async {
            // An error means that the sender was dropped, which stops the server too.
            let _ = stopped.await;
        });
    Ok(RunningService { peers, health, shutdown, server: tokio::spawn(server) })
}

impl RunningService {
    /// Stops the services. Must be called after the board has the final state, so that streams end. Callers receive
    /// their pending replies within [`SERVICE_DRAIN_TIMEOUT`].
    pub async fn finish(self) {
        self.health.set_not_serving::<AgentServer<Service>>().await;
        // The receiver is gone if the server has failed.
        let _ = self.shutdown.send(());
        let _ = tokio::time::timeout(SERVICE_DRAIN_TIMEOUT, self.server).await;
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
        let StatusRequest { history, local } = request.into_inner();
        let Some(peers) = self.peers.as_ref().filter(|_| !local) else {
            return Ok(Response::new(self.local_status(history).await));
        };
        let survey = peers.survey(self.node_rank().is_none());
        let (own, survey) = tokio::join!(self.local_status(history), survey);
        Ok(Response::new(merge::merge(own, survey.nodes, survey.replies)))
    }

    type LogsStream = ReceiverStream<Result<LogsReply, Status>>;

    async fn logs(&self, request: Request<LogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let request = request.into_inner();
        if request.follow && self.node_rank().is_some() {
            // A follower may come before the first rank has started. Fails if the launch ends before that.
            let has_ranks = |board: &Board| board.assignment().world > 0 || board.is_over();
            let _ = self.board.clone().wait_for(has_ranks).await;
        }
        let (mut world, is_here) = {
            let board = self.board.borrow();
            (board.assignment().world, board.local_rank(request.rank).is_some())
        };
        if let Some(peers) = self.peers.as_ref().filter(|_| self.node_rank().is_none()) {
            world = peer_queries::world(peers).await;
        }
        if request.rank >= world {
            return Err(follow::no_such_rank(request.rank, world));
        }
        let chunks = match self.peers_of_attempt().filter(|_| !is_here) {
            Some(peers) => peer_queries::logs(peers, self.board.clone(), request, self.log_reader()?),
            None => self.local_logs(request)?,
        };
        Ok(Response::new(ReceiverStream::new(chunks)))
    }

    type StacksStream = Pin<Box<dyn Stream<Item = Result<StacksReply, Status>> + Send>>;

    async fn stacks(&self, request: Request<StacksRequest>) -> Result<Response<Self::StacksStream>, Status> {
        let StacksRequest { rank } = request.into_inner();
        let is_here = rank.is_some_and(|rank| self.board.borrow().local_rank(rank).is_some());
        let replies: Self::StacksStream = match (self.peers_of_attempt().filter(|_| !is_here), rank) {
            (Some(peers), Some(of)) => Box::pin(peer_queries::stacks(peers, &[of], rank)),
            (Some(peers), None) => {
                let own = self.node_rank();
                let nodes = peer_queries::first_ranks(peers, own).await;
                let others = peer_queries::stacks(peers, &nodes, None);
                let here = if own.is_some() { self.local_stacks(None).await? } else { Vec::new() };
                Box::pin(tokio_stream::iter(here).map(Ok).chain(others))
            }
            (None, rank) => Box::pin(tokio_stream::iter(self.local_stacks(rank).await?).map(Ok)),
        };
        Ok(Response::new(replies))
    }

    async fn stop(&self, request: Request<StopRequest>) -> Result<Response<StopReply>, Status> {
        let ending = |_| Status::unavailable("the agent is shutting down");
        let by = request.extensions().get::<Peer>().map_or_else(|| "an unknown caller".into(), caller);
        self.messages.send(Message::Stop(by)).await.map_err(ending)?;
        Ok(Response::new(StopReply {}))
    }

    async fn checkpoint(&self, _: Request<CheckpointRequest>) -> Result<Response<CheckpointReply>, Status> {
        let is_elsewhere = self.node_rank() != Some(0);
        let reply = match self.peers_of_attempt().filter(|_| is_elsewhere) {
            Some(peers) => peer_queries::checkpoint(peers).await?,
            None => self.local_checkpoint().await?,
        };
        Ok(Response::new(reply))
    }

    async fn signal(&self, request: Request<SignalRequest>) -> Result<Response<SignalReply>, Status> {
        let SignalRequest { signal } = request.into_inner();
        check_signal("signal", signal).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let ending = |_| Status::unavailable("the agent is shutting down");
        self.messages.send(Message::Signal(signal)).await.map_err(ending)?;
        Ok(Response::new(SignalReply {}))
    }
}

/// Describes the process that made a call.
fn caller(peer: &Peer) -> String {
    let user = if peer.uid == 0 { "root".into() } else { format!("uid {}", peer.uid) };
    let process = peer.pid.and_then(Process::read);
    let process = process.map(|process| format!(" (process {}, {})", process.pid, process.name));
    format!("{user}{}", process.unwrap_or_default())
}

/// Runs one session: Hello, then reports, until the worker closes its side; then closes this side too.
async fn run_session(
    mut reports: Streaming<WorkerReport>,
    messages: mpsc::Sender<Message>,
    commands: mpsc::Sender<Result<AgentCommand, Status>>,
) {
    let Some(Ok(WorkerReport { report: Some(Report::Hello(hello)) })) = reports.next().await else {
        // Fails only if the caller is gone.
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
            // A worker that does not read its commands misses acknowledgements; its own lease then ends it.
            let _ = commands.try_send(Ok(ack));
        }
        if messages.send(Message::Report { rank, attempt, report }).await.is_err() {
            return;
        }
    }
    // Fails only if the driver has ended.
    let _ = messages.send(Message::SessionClosed { rank, attempt }).await;
}
