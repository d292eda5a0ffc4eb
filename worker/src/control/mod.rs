//! The worker's side of the conversation with its agent, on a thread of its own.
//!
//! ```text
//! trainer thread --requests--> control thread --gRPC over the unix socket--> agent
//!                <--flags (stop, checkpoint)--            <--commands--
//! ```
//! The trainer never waits for the network but in [`Control::get_job`] and [`Control::join`]. When the agent is lost the
//! control thread aborts the collective and, should the trainer not end by itself, ends the process: a worker never
//! outlives its agent.

mod session;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

use tokio::sync::{mpsc, oneshot};
use tonic::transport::Channel;
use xlaunch_comm::AbortHandle;
use xlaunch_proto::convert::{Join, Joined};
use xlaunch_proto::net;
use xlaunch_proto::v1::agent_client::AgentClient;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{GetJobReply, GetJobRequest, Hello, JoinRequest};

use crate::doing::Doing;
use crate::error::{Result, WorkerError};

/// What both threads see.
#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    checkpoint: AtomicBool,
    /// Steps completed, for heartbeats.
    step: AtomicU64,
    /// What the trainer's thread is doing, for heartbeats.
    trainer: OnceLock<Arc<Doing>>,
    /// What to abort when the agent is lost.
    abort: Mutex<Option<AbortHandle>>,
    /// Why the agent is considered lost.
    lost: Mutex<Option<String>>,
}

/// One request of the trainer.
enum Request {
    GetJob(GetJobRequest, oneshot::Sender<std::result::Result<GetJobReply, tonic::Status>>),
    Join(Box<JoinRequest>, oneshot::Sender<std::result::Result<Joined, tonic::Status>>),
    Session(Hello),
    Report(Report),
}

/// The trainer's handle. Dropping it sends what is queued and ends the conversation.
#[derive(Debug)]
pub struct Control {
    requests: Option<mpsc::UnboundedSender<Request>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Starts the control thread; it connects to the agent's unix socket.
    pub fn connect(socket: &Path) -> Result<Self> {
        let io = |what: &str, source| WorkerError::Io { what: format!("failed to start {what}"), source };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| io("the control runtime", error))?;
        let shared = Arc::new(Shared::default());
        let (sender, requests) = mpsc::unbounded_channel();
        let channel = runtime
            .block_on(net::connect(socket, net::connect::endpoint()))
            .map_err(|error| WorkerError::AgentLost(format!("no answer on {}: {error}", socket.display())))?;
        let theirs = shared.clone();
        let thread = thread::Builder::new()
            .name("control".into())
            .spawn(move || runtime.block_on(serve(AgentClient::new(channel), requests, theirs)))
            .map_err(|error| io("the control thread", error))?;
        Ok(Self { requests: Some(sender), shared, thread: Some(thread) })
    }

    /// What to do.
    pub fn get_job(&self, request: GetJobRequest) -> Result<GetJobReply> {
        let (sender, reply) = oneshot::channel();
        self.send(Request::GetJob(request, sender));
        self.answer(reply)
    }

    /// Meets the other ranks. Waits until all have joined, or the agent says why they will not.
    pub fn join(&self, join: Join) -> Result<Joined> {
        let (sender, reply) = oneshot::channel();
        self.send(Request::Join(Box::new(join.into()), sender));
        self.answer(reply)
    }

    /// Opens the session: heartbeats from now on, which tell what the calling thread is doing. `abort` is what to abort when
    /// the agent is lost.
    pub fn open_session(&self, hello: Hello, abort: AbortHandle) {
        // There is one session, and one trainer.
        let _ = self.shared.trainer.set(Doing::here());
        *self.shared.abort.lock().unwrap_or_else(PoisonError::into_inner) = Some(abort);
        self.send(Request::Session(hello));
    }

    /// Queues a report.
    pub fn report(&self, report: Report) {
        if let Report::Step(step) = &report {
            self.shared.step.store(step.step + 1, Ordering::Relaxed);
        }
        self.send(Request::Report(report));
    }

    /// Whether the agent asked for a stop.
    pub fn stop_asked(&self) -> bool {
        self.shared.stop.load(Ordering::Relaxed)
    }

    /// Whether the agent asked for a checkpoint since the last call.
    pub fn checkpoint_asked(&self) -> bool {
        self.shared.checkpoint.swap(false, Ordering::Relaxed)
    }

    /// Why the agent is lost, if it is.
    pub fn lost(&self) -> Option<String> {
        self.shared.lost.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A send fails only when the control thread has ended, which `answer` and `lost` report.
    fn send(&self, request: Request) {
        if let Some(requests) = &self.requests {
            let _ = requests.send(request);
        }
    }

    fn answer<T>(&self, reply: oneshot::Receiver<std::result::Result<T, tonic::Status>>) -> Result<T> {
        match reply.blocking_recv() {
            Ok(Ok(answer)) => Ok(answer),
            // The agent is there and said no.
            Ok(Err(status)) if status.code() != tonic::Code::Unavailable => {
                Err(WorkerError::Rendezvous(status.message().into()))
            }
            Ok(Err(status)) => Err(WorkerError::AgentLost(status.message().into())),
            Err(_) => {
                Err(WorkerError::AgentLost(self.lost().unwrap_or_else(|| "the connection broke".into())))
            }
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the control thread has been printed already.
            let _ = thread.join();
        }
    }
}

/// The control thread: one request after the other until the session begins, then the session.
async fn serve(
    mut agent: AgentClient<Channel>,
    mut requests: mpsc::UnboundedReceiver<Request>,
    shared: Arc<Shared>,
) {
    while let Some(request) = requests.recv().await {
        match request {
            Request::GetJob(request, reply) => {
                // The trainer waits for the reply; it is gone only if its thread is.
                let _ = reply.send(agent.get_job(request).await.map(tonic::Response::into_inner));
            }
            Request::Join(request, reply) => {
                let joined = agent.join(*request).await.and_then(|joined| {
                    Joined::try_from(joined.into_inner())
                        .map_err(|error| tonic::Status::invalid_argument(error.to_string()))
                });
                let _ = reply.send(joined);
            }
            Request::Session(hello) => return session::run(agent, hello, requests, shared).await,
            Request::Report(_) => {}
        }
    }
}
