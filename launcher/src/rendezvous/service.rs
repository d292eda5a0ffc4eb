//! The agent's gRPC service on its unix socket. It decides nothing: every call becomes a message to the agent's task.

use std::path::Path;
use std::pin::Pin;

use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_stream::{Stream, StreamExt};
use tonic::transport::Server;
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Response, Status, Streaming};
use xlaunch_proto::convert::Join;
use xlaunch_proto::v1::agent_command::Command;
use xlaunch_proto::v1::agent_server::{Agent, AgentServer};
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{
    AgentCommand, GetJobReply, GetJobRequest, HeartbeatAck, JoinReply, JoinRequest, StatusReply,
    StatusRequest, StopReply, StopRequest, WorkerReport,
};

/// Commands that may wait for a worker: it reads them at once, so more means that it hangs.
const COMMANDS: usize = 16;

/// What callers ask of the agent's task.
#[derive(Debug)]
#[expect(missing_docs, reason = "named after the calls")]
pub enum Message {
    GetJob(GetJobRequest, oneshot::Sender<Result<GetJobReply, Status>>),
    Join(Join, oneshot::Sender<Result<JoinReply, Status>>),
    SessionOpened { rank: u32, attempt: u32, commands: mpsc::Sender<Result<AgentCommand, Status>> },
    SessionClosed { rank: u32, attempt: u32 },
    Report { rank: u32, attempt: u32, report: Report },
    Status(oneshot::Sender<StatusReply>),
    Stop,
}

/// Serves until the process ends. Callers of other users are refused.
pub fn serve(socket: &Path, messages: mpsc::Sender<Message>) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let listener = UnixListener::bind(socket)?;
    fs_err::set_permissions(socket, std::fs::Permissions::from_mode(0o600))?;
    let own = rustix::process::getuid().as_raw();
    let check = move |request: Request<()>| match peer(&request) {
        Some(uid) if uid == own || uid == 0 => Ok(request),
        Some(uid) => Err(Status::permission_denied(format!("user {uid} may not talk to this agent"))),
        None => Err(Status::permission_denied("the caller's user is not known")),
    };
    let service = AgentServer::with_interceptor(Service { messages }, check);
    tokio::spawn(
        Server::builder().add_service(service).serve_with_incoming(UnixListenerStream::new(listener)),
    );
    Ok(())
}

fn peer(request: &Request<()>) -> Option<u32> {
    request.extensions().get::<UdsConnectInfo>()?.peer_cred.map(|credentials| credentials.uid())
}

struct Service {
    messages: mpsc::Sender<Message>,
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

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        Ok(Response::new(self.ask(Message::Status).await?))
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
