//! The task that follows one start of a job, from its ticket to its result, and reports to the manager.
//!
//! ```text
//! start --> agent introduces itself --> watch the process, poll its status --> exited --> result.json, or lost
//!   |          |
//!   '----------'--> failed, or no introduction in time: revoke the ticket --> not started
//! ```
//! An adopted job begins at the second stage, if its ticket cannot be revoked. The ticket decides in all cases of
//! doubt: a start counts as not having happened only after its ticket was revoked. The agent runs as the job's user and
//! is not trusted, so its result counts only after its process has exited.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, timeout};
use tonic::Code;
use tonic::transport::Channel;
use tracing::warn;
use xlaunch_proto::v1::agent_client::AgentClient;
use xlaunch_proto::v1::{SignalRequest, StatusReply, StatusRequest, StopRequest};

use super::connect::connect;
use super::process::AgentProcess;
use super::{AgentExit, AgentStart, AgentStarter, Started};
use crate::files::{Identity, JobDirs, JobResult, StartOptions, is_full};
use crate::runtime::Stop;
use crate::state::limits::AGENT_STOP_MARGIN;
use rustix::process::{Signal, pidfd_send_signal};
use xlaunch_agent::registry::SOCKET;

/// Time for an agent to introduce itself. Longer than it waits for a full disk before it gives up.
const INTRODUCTION_TIMEOUT: Duration = Duration::from_secs(60);
const INTRODUCTION_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Delay before a failed operation on the job's directory is retried: until a full disk has space again, for example.
const DISK_RETRY_DELAY: Duration = Duration::from_secs(1);
const STATUS_POLL_INTERVAL: Duration = Duration::from_secs(1);
const SIGNAL_RETRY_DELAY: Duration = Duration::from_millis(200);
const AGENT_CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// One start of a job.
#[derive(Clone, Debug)]
pub(crate) struct JobStart {
    pub(crate) job: u64,
    pub(crate) start: u32,
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) options: StartOptions,
    /// Time between SIGTERM and SIGKILL of its workers.
    pub(crate) shutdown_timeout: Duration,
    /// Cores; `None` if it did not ask for any.
    pub(crate) cpus: Option<u32>,
    /// Bytes; `None` for no limit.
    pub(crate) memory: Option<u64>,
}

/// What happens to a start. Each ends with one of the last three.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AgentEvent {
    /// The agent has introduced itself.
    Started,
    Status(Box<StatusReply>),
    /// No agent has run for this start or ever will; the reason, if something has failed.
    NotStarted(Option<String>),
    /// The agent has exited and left a result.
    Ended(JobResult),
    /// The agent has exited without a result.
    Lost(String),
}

/// Follows a start to its end and sends its events with the job's id. `fresh`: starts the agent; otherwise an earlier
/// daemon has started it, or was about to. `stop` says when the job is stopped, `warning` which signal its workers are to
/// get.
pub(crate) async fn follow(
    job_start: JobStart,
    fresh: bool,
    dirs: JobDirs,
    starter: Arc<AgentStarter>,
    events: mpsc::Sender<(u64, AgentEvent)>,
    stop: watch::Receiver<Stop>,
    warning: watch::Receiver<Option<i32>>,
) {
    let job = job_start.job;
    let follower = Follower { job_start, dirs, starter, events, stop, warning };
    let last = follower.run(fresh).await;
    // The manager is gone only if the daemon ends; the next daemon reads the job's files.
    let _ = follower.events.send((job, last)).await;
}

struct Follower {
    job_start: JobStart,
    dirs: JobDirs,
    starter: Arc<AgentStarter>,
    events: mpsc::Sender<(u64, AgentEvent)>,
    stop: watch::Receiver<Stop>,
    warning: watch::Receiver<Option<i32>>,
}

impl Follower {
    async fn run(&self, fresh: bool) -> AgentEvent {
        let (started, problem) = match fresh {
            true => match self.start().await {
                Ok(started) => (Some(started), None),
                Err(error) => (None, Some(format!("failed to start its agent: {error}"))),
            },
            false => (None, None),
        };
        if started.is_none()
            && let Some(last) = self.revoke(problem).await
        {
            return last;
        }
        let Started { exit, pidfd } = started.unwrap_or_else(|| Started { exit: never(), pidfd: None });
        let identity = match self.introduction(exit).await {
            Ok(identity) => identity,
            Err(last) => {
                // The rest of it must not outlive its slot.
                if let Some(pidfd) = pidfd {
                    let _ = pidfd_send_signal(pidfd, Signal::KILL);
                }
                self.starter.kill(self.job_start.job).await;
                return last;
            }
        };
        if let Some(agent) = AgentProcess::find(&identity, self.job_start.uid) {
            let _ = self.events.send((self.job_start.job, AgentEvent::Started)).await;
            self.watch(&agent).await;
            self.starter.kill(self.job_start.job).await;
        }
        self.result()
    }

    /// Starts the agent, as soon as the disk has space for its input.
    async fn start(&self) -> std::io::Result<Started> {
        loop {
            match self.try_start().await {
                Err(error) if is_full(&error) => tokio::select! {
                    () = tokio::time::sleep(DISK_RETRY_DELAY) => {}
                    () = self.stop_requested(Stop::Ask) => return Err(error),
                },
                started => return started,
            }
        }
    }

    async fn try_start(&self) -> std::io::Result<Started> {
        let JobStart { job, start, uid, ref name, ref options, shutdown_timeout, cpus, memory } =
            self.job_start;
        let input = self.dirs.prepare(job, start, options)?;
        let (dir, input_path) = (self.dirs.agent(job), self.dirs.start_file(job, start));
        let name = name.clone();
        let start = AgentStart { job, name, uid, dir, input_path, input, shutdown_timeout, cpus, memory };
        self.starter.start(start).await
    }

    /// Revokes this start; `None` if its agent has claimed it.
    async fn revoke(&self, reason: Option<String>) -> Option<AgentEvent> {
        let JobStart { job, start, .. } = self.job_start;
        loop {
            match self.dirs.revoke(job, start) {
                Ok(true) => return Some(AgentEvent::NotStarted(reason)),
                Ok(false) => return None,
                // A guess could give the job's GPUs to a second job.
                Err(error) => {
                    warn!(job, "failed to revoke start {start} of job {job}, retrying: {error}");
                    tokio::time::sleep(DISK_RETRY_DELAY).await;
                }
            }
        }
    }

    /// Waits until the agent has introduced itself.
    async fn introduction(&self, mut exit: AgentExit) -> Result<Identity, AgentEvent> {
        let JobStart { job, start, uid, .. } = self.job_start;
        let mut deadline = Some(Instant::now() + INTRODUCTION_TIMEOUT);
        let give_up_at = Instant::now() + 2 * INTRODUCTION_TIMEOUT;
        loop {
            let failure = tokio::select! {
                biased;
                how = &mut exit => Some(format!("its agent exited before it began: {how}")),
                () = tokio::time::sleep(INTRODUCTION_POLL_INTERVAL) => deadline
                    .filter(|deadline| Instant::now() > *deadline)
                    .map(|_| format!("its agent has not begun within {} s", INTRODUCTION_TIMEOUT.as_secs())),
            };
            if let Some(identity) = self.dirs.identity(job, uid).filter(|it| it.start == start) {
                return Ok(identity);
            }
            if let Some(reason) = failure {
                (exit, deadline) = (never(), None);
                if let Some(last) = self.revoke(Some(reason)).await {
                    return Err(last);
                }
            }
            if self.is_abandoned() {
                return Err(self.result());
            }
            // Its user can claim the ticket and hold the lock without an agent.
            if Instant::now() > give_up_at || *self.stop.borrow() == Stop::Kill {
                return Err(match self.revoke(None).await {
                    Some(last) => last,
                    None => {
                        AgentEvent::Lost("its agent has claimed its start but not introduced itself".into())
                    }
                });
            }
        }
    }

    /// Whether the agent has claimed its ticket and exited without an introduction.
    fn is_abandoned(&self) -> bool {
        let JobStart { job, start, uid, .. } = self.job_start;
        // The agent locks, claims, introduces itself. Checked in this order, a running agent is never seen as
        // abandoned.
        self.dirs.has_begun(job, start)
            && !self.dirs.is_locked(job, uid)
            && self.dirs.identity(job, uid).is_none_or(|identity| identity.start != start)
    }

    /// Polls the agent's status, and stops the agent on request, until it has exited.
    async fn watch(&self, agent: &AgentProcess) {
        let mut poll = tokio::time::interval(STATUS_POLL_INTERVAL);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let socket = self.dirs.agent(self.job_start.job).join(SOCKET);
        let mut client = Client { job: self.job_start.job, socket, uid: self.job_start.uid, connected: None };
        // When a stopped agent is killed; `None` until a stop is requested.
        let mut kill_at: Option<Instant> = None;
        let (mut stop_sent, mut killed, mut warned) = (false, false, false);
        loop {
            tokio::select! {
                biased;
                () = agent.exited() => return,
                () = self.stop_requested(Stop::Kill), if !killed => {
                    killed = true;
                    agent.kill();
                    self.starter.kill(self.job_start.job).await;
                }
                () = self.stop_requested(Stop::Ask), if kill_at.is_none() => {
                    kill_at = Some(Instant::now() + self.job_start.shutdown_timeout + AGENT_STOP_MARGIN);
                    poll.reset_immediately();
                }
                signal = self.warning_due(), if !warned && kill_at.is_none() => {
                    // Retried like a stop.
                    warned = client.signal(signal).await;
                    if !warned {
                        tokio::select! {
                            () = agent.exited() => return,
                            () = tokio::time::sleep(SIGNAL_RETRY_DELAY) => {}
                        }
                    }
                }
                _ = poll.tick() => {
                    if kill_at.is_some_and(|kill_at| Instant::now() > kill_at) {
                        agent.kill();
                        self.starter.kill(self.job_start.job).await;
                    }
                    if kill_at.is_some() && !stop_sent {
                        // Retried at the next poll: an agent that has just started may not listen yet.
                        stop_sent = client.stop().await;
                    }
                    let status = tokio::select! {
                        () = agent.exited() => return,
                        status = client.status() => status,
                    };
                    if let Some(status) = status {
                        let event = AgentEvent::Status(Box::new(status));
                        let _ = self.events.send((self.job_start.job, event)).await;
                    }
                }
            }
        }
    }

    /// Waits until the job is to be stopped in this way: forever if the manager is gone, since the job outlives the
    /// daemon.
    async fn stop_requested(&self, how: Stop) {
        if self.stop.clone().wait_for(|stop| *stop >= how).await.is_err() {
            std::future::pending().await
        }
    }

    /// Waits until the workers are to get a signal, and returns it.
    async fn warning_due(&self) -> i32 {
        let due = self.warning.clone().wait_for(Option::is_some).await.ok().and_then(|signal| *signal);
        match due {
            Some(signal) => signal,
            // The manager is gone.
            None => std::future::pending().await,
        }
    }

    /// The result of an agent that has exited.
    fn result(&self) -> AgentEvent {
        let result = self.dirs.result(self.job_start.job, self.job_start.uid);
        match result.filter(|result| result.start == self.job_start.start) {
            Some(result) => AgentEvent::Ended(result),
            None => AgentEvent::Lost("its agent exited without a result".into()),
        }
    }
}

fn never() -> AgentExit {
    Box::pin(std::future::pending())
}

/// A client of the agent that connects when needed, and again after an error.
struct Client {
    job: u64,
    socket: PathBuf,
    uid: u32,
    connected: Option<AgentClient<Channel>>,
}

impl Client {
    async fn connected(&mut self) -> Option<&mut AgentClient<Channel>> {
        if self.connected.is_none() {
            let connected = timeout(AGENT_CALL_TIMEOUT, connect(&self.socket, self.uid)).await;
            self.connected = connected.ok()?.ok();
        }
        self.connected.as_mut()
    }

    async fn status(&mut self) -> Option<StatusReply> {
        let call = self.connected().await?.status(StatusRequest { history: true });
        let reply = timeout(AGENT_CALL_TIMEOUT, call).await.ok().and_then(Result::ok);
        if reply.is_none() {
            self.connected = None;
        }
        reply.map(tonic::Response::into_inner)
    }

    /// Returns whether the agent has answered. One that refuses is not asked again.
    async fn signal(&mut self, signal: i32) -> bool {
        let Some(client) = self.connected().await else { return false };
        let sent = timeout(AGENT_CALL_TIMEOUT, client.signal(SignalRequest { signal })).await;
        match sent {
            Ok(Ok(_)) => true,
            Ok(Err(status)) if matches!(status.code(), Code::Unimplemented | Code::InvalidArgument) => {
                warn!(
                    job = self.job,
                    "failed to signal the workers of job {}: {}",
                    self.job,
                    status.message()
                );
                true
            }
            _ => {
                self.connected = None;
                false
            }
        }
    }

    /// Returns whether the agent has accepted the request.
    async fn stop(&mut self) -> bool {
        let Some(client) = self.connected().await else { return false };
        let stopped =
            timeout(AGENT_CALL_TIMEOUT, client.stop(StopRequest {})).await.is_ok_and(|it| it.is_ok());
        if !stopped {
            self.connected = None;
        }
        stopped
    }
}
