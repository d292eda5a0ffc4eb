//! The gRPC client of the agent, on a separate thread.
//!
//! ```text
//! training thread --requests--> control thread --gRPC over the unix socket--> agent
//!                 <--flags (stop, checkpoint)--            <--commands--
//! ```
//! Invariants:
//! - the training thread waits for the network only in [`Control::get_job`] and [`Control::join`];
//! - a worker never outlives its agent: when the agent is lost, the control thread aborts the collective and, if that
//!   does not end the training thread, exits the process.

mod exchange;
mod session;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tonic::transport::Channel;
use xlaunch_comm::AbortHandle;
use xlaunch_proto::connect;
use xlaunch_proto::convert::{Join, Joined};
use xlaunch_proto::v1::agent_client::AgentClient;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{CommitCheckpoint, Failed, GetJobReply, GetJobRequest, Hello, JoinRequest};

use crate::checkpoint::saver::Exchange;
use crate::error::{Result, WorkerError};
use crate::phase::PhaseTracker;
use exchange::SessionExchange;

/// Time for the agent to acknowledge an error. Waiting longer would only delay the end of a job whose agent hangs.
const FAILURE_REPORT_TIMEOUT: Duration = Duration::from_secs(3);

/// State that both threads access.
#[derive(Debug, Default)]
struct Shared {
    stop_requested: AtomicBool,
    checkpoint_requested: AtomicBool,
    /// Completed steps, for heartbeats.
    step: AtomicU64,
    /// The training thread's phase, for heartbeats.
    trainer: Arc<PhaseTracker>,
    /// Aborts the collective when the agent is lost.
    abort: Mutex<Option<AbortHandle>>,
    /// The reason why the agent is considered lost.
    lost: Mutex<Option<String>>,
    /// Passes the parts that all ranks have written to the thread that saves checkpoints.
    commits: OnceLock<std::sync::mpsc::Sender<CommitCheckpoint>>,
}

impl Shared {
    fn lost(&self) -> Option<String> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A request of the training thread.
enum Request {
    GetJob(GetJobRequest, oneshot::Sender<std::result::Result<GetJobReply, tonic::Status>>),
    Join(Box<JoinRequest>, oneshot::Sender<std::result::Result<Joined, tonic::Status>>),
    Session(Hello),
    Report(Report),
    /// The sender is dropped once the agent has read all earlier reports, or the agent is lost.
    Flush(std::sync::mpsc::Sender<()>),
    /// The sender is dropped once the agent has acknowledged the report, or the agent is lost.
    Fail(Failed, std::sync::mpsc::Sender<()>),
}

/// The training thread's handle. Dropping it sends the queued reports and closes the session.
#[derive(Debug)]
pub struct Control {
    requests: Option<mpsc::UnboundedSender<Request>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Starts the control thread, which connects to the agent's unix socket. Heartbeats report the phase of the calling
    /// thread.
    pub fn connect(socket: &Path) -> Result<Self> {
        let io = |what: &str, source| WorkerError::Io { what: format!("failed to start {what}"), source };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| io("the control runtime", error))?;
        let trainer = PhaseTracker::of_this_thread();
        let shared = Arc::new(Shared { trainer, ..Shared::default() });
        let (sender, requests) = mpsc::unbounded_channel();
        let channel = runtime.block_on(connect::connect(socket, connect::endpoint())).map_err(|error| {
            WorkerError::AgentLost(format!("failed to connect to {}: {error}", socket.display()))
        })?;
        let thread_shared = shared.clone();
        let thread = thread::Builder::new()
            .name("control".into())
            .spawn(move || runtime.block_on(serve(AgentClient::new(channel), requests, thread_shared)))
            .map_err(|error| io("the control thread", error))?;
        Ok(Self { requests: Some(sender), shared, thread: Some(thread) })
    }

    /// Asks the agent for the job.
    pub fn get_job(&self, request: GetJobRequest) -> Result<GetJobReply> {
        let (sender, reply) = oneshot::channel();
        self.send(Request::GetJob(request, sender));
        self.wait_for(reply)
    }

    /// Joins the rendezvous: waits until all ranks have joined, or the agent reports why they cannot.
    pub fn join(&self, join: Join) -> Result<Joined> {
        let (sender, reply) = oneshot::channel();
        self.send(Request::Join(Box::new(join.into()), sender));
        self.wait_for(reply)
    }

    /// Opens the session. `abort` is used when the agent is lost.
    pub fn open_session(&self, hello: Hello, abort: AbortHandle) {
        *self.shared.abort.lock().unwrap_or_else(PoisonError::into_inner) = Some(abort);
        self.send(Request::Session(hello));
    }

    /// Queues a report.
    pub fn report(&self, report: Report) {
        if let Report::Step(step) = &report {
            self.shared.step.store(step.step, Ordering::Relaxed);
        }
        self.send(Request::Report(report));
    }

    /// Reports an error to the agent before it ends this rank, and waits until the agent has acted on it. Call it while
    /// the collective is still open: when the other ranks lose this one, the agent already knows which rank is at
    /// fault. The exit code tells the agent whether a peer was lost or this rank itself failed.
    pub fn report_failure(&self, error: WorkerError) -> WorkerError {
        if !matches!(error, WorkerError::AgentLost(_)) {
            let (sender, acknowledged) = std::sync::mpsc::channel();
            let failed = Failed {
                message: error.to_string(),
                exit_code: error.exit().code().into(),
                differing_ranks: error.differing_ranks(),
            };
            self.send(Request::Fail(failed, sender));
            // Nothing is ever sent: `recv_timeout` returns when the sender is dropped.
            let _ = acknowledged.recv_timeout(FAILURE_REPORT_TIMEOUT);
        }
        // Ranks that lose the agent abort the collective, which then fails on all ranks.
        match self.lost() {
            Some(reason) if matches!(error, WorkerError::Comm(_)) => WorkerError::AgentLost(reason),
            _ => error,
        }
    }

    /// Returns whether the agent requested a stop.
    pub fn stop_requested(&self) -> bool {
        self.shared.stop_requested.load(Ordering::Relaxed)
    }

    /// Returns whether the agent requested a checkpoint since the last call.
    pub fn take_checkpoint_request(&self) -> bool {
        self.shared.checkpoint_requested.swap(false, Ordering::Relaxed)
    }

    /// Returns the reason why the agent is considered lost, if it is.
    pub fn lost(&self) -> Option<String> {
        self.shared.lost()
    }

    /// Returns the connection between the ranks of a save. `None` if it was taken already.
    pub fn exchange(&self) -> Option<Box<dyn Exchange>> {
        let requests = self.requests.as_ref()?.downgrade();
        let (sender, commits) = std::sync::mpsc::channel();
        self.shared.commits.set(sender).ok()?;
        Some(Box::new(SessionExchange { requests, shared: self.shared.clone(), commits }))
    }

    /// Sending fails only if the control thread has ended; `wait_for` and `lost` report that.
    fn send(&self, request: Request) {
        if let Some(requests) = &self.requests {
            let _ = requests.send(request);
        }
    }

    fn wait_for<T>(&self, reply: oneshot::Receiver<std::result::Result<T, tonic::Status>>) -> Result<T> {
        match reply.blocking_recv() {
            Ok(Ok(reply)) => Ok(reply),
            // The agent is reachable, but refused.
            Ok(Err(status)) if status.code() != tonic::Code::Unavailable => {
                Err(WorkerError::Rendezvous(status.message().into()))
            }
            Ok(Err(status)) => Err(WorkerError::AgentLost(status.message().into())),
            Err(_) => {
                Err(WorkerError::AgentLost(self.lost().unwrap_or_else(|| "the connection was closed".into())))
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

/// Body of the control thread: handles unary requests until the session is opened, then the session.
async fn serve(
    mut agent: AgentClient<Channel>,
    mut requests: mpsc::UnboundedReceiver<Request>,
    shared: Arc<Shared>,
) {
    while let Some(request) = requests.recv().await {
        match request {
            Request::GetJob(request, reply) => {
                // The receiver is dropped only when the training thread has ended.
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
            Request::Report(_) | Request::Flush(_) | Request::Fail(..) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use xlaunch_comm::CommError;

    use super::*;

    #[test]
    fn loss_of_the_agent_is_the_cause_of_an_aborted_collective() {
        let reported = |lost: Option<&str>, error: WorkerError| {
            let shared = Shared { lost: Mutex::new(lost.map(str::to_owned)), ..Shared::default() };
            let control = Control { requests: None, shared: Arc::new(shared), thread: None };
            control.report_failure(error).to_string()
        };
        let aborted = || WorkerError::Comm(CommError::Aborted);
        assert_eq!(
            reported(Some("it closed the session"), aborted()),
            "lost the agent: it closed the session"
        );
        assert_eq!(reported(None, aborted()), "the collective was aborted");
        let full = || WorkerError::Setting("full".into());
        assert_eq!(reported(Some("it closed the session"), full()), full().to_string());
    }
}
