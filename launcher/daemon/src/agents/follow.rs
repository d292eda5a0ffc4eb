//! The task that follows one start of a job, from the start of its agent to its result, and reports to the manager.
//!
//! ```text
//! this daemon starts it:        spawn, record, send the description --.
//! an earlier daemon has:        find the agent ------------------------+--> begun? --> watch, poll its status
//!                                  '--> none runs --.                  |                     |
//!                                                    +<-- exited ------'<------- exited -----'
//!                                                    v
//!                     begun: its result, or lost; otherwise not started
//! ```
//! Whether the agent is running is determined from its unit or process ([`Agent`]). The files in its directory, which
//! its user can forge, are read only after the agent is known to have exited, so that they can neither free a slot in
//! use nor keep an unused one.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;
use tracing::warn;
use xlaunch_proto::v1::StatusReply;

use super::client::Client;
use super::hooks::Moment;
use super::start::JobStart;
use super::{Agent, AgentStarter};
use crate::config::LiveConfig;
use crate::files::{AgentRecord, JobDirs, is_full};
use crate::runtime::Stop;
use crate::state::limits::AGENT_STOP_MARGIN;
use crate::state::{JobResult, Usage};
use crate::users;
use xlaunch_agent::registry::SOCKET;
use xlaunch_host::clock;

/// Time for an agent to read its description. Longer than the agent itself waits for space on a full disk.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(60);
const BEGIN_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Delay before an operation is retried that failed because the disk is full or the system manager does not respond.
const FOLLOW_RETRY_DELAY: Duration = Duration::from_secs(1);
const STATUS_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Number of status polls per reading of the usage. It is also read at the end.
const POLLS_PER_USAGE: u32 = 10;
const SIGNAL_RETRY_DELAY: Duration = Duration::from_millis(200);

/// An event of a job. Each start ends with one of the last four.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AgentEvent {
    /// The agent has begun.
    Started,
    Status(Box<StatusReply>),
    /// The job's directory exceeds a limit, which the text describes.
    Oversized(String),
    /// The agent has not begun and does not run. The text is the reason, if a failure was the cause.
    NotStarted(Option<String>),
    /// The node is not ready for jobs, for this reason: its prolog failed, or the disk is full.
    NodeFailed(String),
    /// The agent has exited and left a result. Usage is unknown without systemd.
    Ended(JobResult, Option<Usage>),
    /// The agent has exited without a result.
    Lost(String, Option<Usage>),
}

/// The task that follows one start of a job.
pub(crate) struct Follower {
    pub(crate) job_start: JobStart,
    pub(crate) dirs: JobDirs,
    pub(crate) starter: Arc<AgentStarter>,
    /// Configuration in effect, for the hooks.
    pub(crate) config: watch::Receiver<LiveConfig>,
    pub(crate) events: mpsc::Sender<(u64, AgentEvent)>,
    /// When to stop the job.
    pub(crate) stop: watch::Receiver<Stop>,
    /// Signal to send the job's workers.
    pub(crate) warning: watch::Receiver<Option<i32>>,
}

/// A description on its way to an agent.
type Input = (pipe::Sender, Vec<u8>);

impl Follower {
    /// Follows the start to its end, and sends its events with the job's id. If `fresh`, starts the agent; otherwise an
    /// earlier daemon has started it or was about to.
    pub(crate) async fn follow(self, fresh: bool) {
        let last = if fresh { self.start_and_watch().await } else { self.adopt_and_watch().await };
        // The manager is gone only if the daemon is ending. The next daemon reads the job's files.
        let _ = self.events.send((self.job_start.job, last)).await;
    }

    async fn start_and_watch(&self) -> AgentEvent {
        if let Some(reason) = self.account_problem().await {
            return AgentEvent::NotStarted(Some(reason));
        }
        let hooks = self.config.borrow().hooks.clone();
        let prolog = hooks.run(Moment::Prolog, &self.job_start.facts, &self.starter).await;
        let last = match prolog {
            Err(reason) if hooks.is_prolog_of_node() => AgentEvent::NodeFailed(reason),
            Err(reason) => AgentEvent::NotStarted(Some(reason)),
            Ok(()) if *self.stop.borrow() > Stop::No => AgentEvent::NotStarted(None),
            Ok(()) => match self.start().await {
                Err(error) => AgentEvent::NotStarted(Some(format!("failed to start its agent: {error}"))),
                Ok((agent, input)) => {
                    let failure = self.begin(&agent, Some(input)).await;
                    self.watch(agent, failure.map(Some)).await
                }
            },
        };
        self.epilog().await;
        last
    }

    /// Returns the reason why the job must not start as its user: the user id has no account any more, or that of
    /// another user. Retries while the user database does not respond.
    async fn account_problem(&self) -> Option<String> {
        let JobStart { job, uid, user, .. } = &self.job_start;
        let uid = *uid;
        loop {
            let found = tokio::task::spawn_blocking(move || users::find(uid)).await;
            match found.map_err(io::Error::other).flatten() {
                Ok(account) => return users::mismatch(uid, user, account.as_ref()),
                Err(error) => warn!(job, "failed to look up user id {uid} of job {job}, retrying: {error}"),
            }
            tokio::select! {
                () = tokio::time::sleep(FOLLOW_RETRY_DELAY) => {}
                () = self.stop_requested(Stop::Ask) => {
                    return Some(format!("the user database does not answer for user id {uid}"));
                }
            }
        }
    }

    async fn adopt_and_watch(&self) -> AgentEvent {
        let last = match self.find().await {
            // The agent may never begin, because its daemon may have ended before it sent the description.
            Some(agent) => {
                let failure = self.begin(&agent, None).await;
                self.watch(agent, failure.map(|_| None)).await
            }
            None if self.has_begun() => self.result(None, 0),
            // No epilog here: the prolog runs again when the job is started again.
            None => return AgentEvent::NotStarted(None),
        };
        self.epilog().await;
        last
    }

    async fn epilog(&self) {
        let JobStart { job, facts, .. } = &self.job_start;
        let hooks = self.config.borrow().hooks.clone();
        if let Err(problem) = hooks.run(Moment::Epilog, facts, &self.starter).await {
            warn!(job, "job {job}: {problem}");
        }
    }

    /// Starts the agent as soon as the disk has space for its record.
    async fn start(&self) -> io::Result<(Agent, Input)> {
        loop {
            match self.try_start().await {
                Err(error) if is_full(&error) => tokio::select! {
                    () = tokio::time::sleep(FOLLOW_RETRY_DELAY) => {}
                    () = self.stop_requested(Stop::Ask) => return Err(error),
                },
                started => return started,
            }
        }
    }

    async fn try_start(&self) -> io::Result<(Agent, Input)> {
        let JobStart { job, start, options, .. } = &self.job_start;
        let (job, start) = (*job, *start);
        let description = self.dirs.description(job, start, options)?;
        let (agent, pipe) = self.starter.start(&self.job_start, &self.dirs.agent(job)).await?;
        let (process, gpus, boot) = (agent.process(), options.gpus.clone(), crate::boot_id());
        let user = self.job_start.user.clone();
        let record = AgentRecord { start, process, user, gpus, boot, at: self.job_start.at };
        if let Err(error) = self.dirs.record_agent(job, &record) {
            // The agent has no description yet, so nothing is lost.
            drop(pipe);
            agent.kill().await;
            agent.exited().await;
            agent.release().await;
            return Err(error);
        }
        Ok((agent, (pipe, description)))
    }

    /// Finds the agent that an earlier daemon has started; `None` if it does not run.
    async fn find(&self) -> Option<Agent> {
        let JobStart { job, start, .. } = self.job_start;
        let record = self.dirs.agent_record(job, start);
        loop {
            match self.starter.find(job, record.as_ref()).await {
                Ok(agent) => return agent,
                // Guessing could give the job's GPUs to a second job.
                Err(error) => {
                    warn!(job, "failed to look for the agent of job {job}, retrying: {error}");
                    tokio::time::sleep(FOLLOW_RETRY_DELAY).await;
                }
            }
        }
    }

    /// Sends the description, if there is one, and waits until the agent has begun. Returns the reason if it has not,
    /// in which case it is about to exit.
    ///
    /// An adopted agent gets no description any more. One that lives on has therefore begun, even if the file that
    /// shows it was removed.
    async fn begin(&self, agent: &Agent, input: Option<Input>) -> Option<String> {
        // Without a description, the agent cannot begin.
        if input.is_some() && *self.stop.borrow() > Stop::No {
            agent.kill().await;
            return Some("stopped before it began".to_owned());
        }
        let is_adopted = input.is_none();
        let send = async {
            if let Some((mut pipe, description)) = input {
                // The agent may have exited, which is noticed below.
                let _ = pipe.write_all(&description).await;
            }
            std::future::pending::<()>().await
        };
        let (mut send, mut exited) = (std::pin::pin!(send), std::pin::pin!(agent.exited()));
        let deadline = Instant::now() + BEGIN_TIMEOUT;
        loop {
            let failure = tokio::select! {
                biased;
                () = &mut exited => Some("its agent exited before it began".to_owned()),
                () = self.stop_requested(Stop::Kill) => Some("killed before it began".to_owned()),
                () = tokio::time::sleep(BEGIN_POLL_INTERVAL) => (Instant::now() > deadline)
                    .then(|| format!("its agent has not begun within {} s", BEGIN_TIMEOUT.as_secs())),
                () = &mut send => None,
            };
            if self.has_begun() {
                return None;
            }
            if is_adopted && (self.dirs.are_gone(self.job_start.job) || Instant::now() > deadline) {
                let job = self.job_start.job;
                warn!(job, "job {job} runs, but its files were removed: its output and result are lost");
                return None;
            }
            if failure.is_some() {
                agent.kill().await;
                return failure;
            }
        }
    }

    fn has_begun(&self) -> bool {
        self.dirs.has_begun(self.job_start.job, self.job_start.start)
    }

    /// Watches the agent until it has exited. `failure` is set if the agent has not begun; the inner value is the
    /// reason if that is a failure.
    async fn watch(&self, agent: Agent, failure: Option<Option<String>>) -> AgentEvent {
        let (mut usage, mut seen) = (None, 0);
        let last = match failure {
            None => {
                let _ = self.events.send((self.job_start.job, AgentEvent::Started)).await;
                self.poll(&agent, &mut usage, &mut seen).await;
                usage = later(usage, agent.usage().await);
                self.result(usage, seen)
            }
            Some(reason) => {
                agent.exited().await;
                // The agent may have begun at the last moment.
                if self.has_begun() { self.result(agent.usage().await, 0) } else { self.not_started(reason) }
            }
        };
        agent.release().await;
        last
    }

    /// Returns the event of an agent that has exited before it began. With a full disk, all jobs would fail like this
    /// one.
    fn not_started(&self, reason: Option<String>) -> AgentEvent {
        let JobStart { job, uid, .. } = self.job_start;
        let reason = reason.map(|reason| match self.dirs.last_line(job, uid) {
            Some(line) => format!("{reason}: {line}"),
            None => reason,
        });
        match reason {
            Some(reason) if self.dirs.is_full() => AgentEvent::NodeFailed(reason),
            reason => AgentEvent::NotStarted(reason),
        }
    }

    /// Polls the agent's status and usage, and stops the agent on request, until it has exited. `seen` is set to the
    /// time since the boot at which it was last seen running.
    async fn poll(&self, agent: &Agent, usage: &mut Option<Usage>, seen: &mut u64) {
        let mut poll = tokio::time::interval(STATUS_POLL_INTERVAL);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let socket = self.dirs.agent(self.job_start.job).join(SOCKET);
        let mut client = Client::new(self.job_start.job, socket, self.job_start.uid);
        let mut exited = std::pin::pin!(agent.exited());
        // The time at which a stopped agent is killed; `None` until a stop is requested.
        let mut kill_at: Option<Instant> = None;
        let (mut stop_sent, mut killed, mut warned, mut polls) = (false, false, false, 0);
        loop {
            tokio::select! {
                biased;
                () = &mut exited => return,
                () = self.stop_requested(Stop::Kill), if !killed => {
                    killed = true;
                    agent.kill().await;
                }
                () = self.stop_requested(Stop::Ask), if kill_at.is_none() => {
                    kill_at = Some(Instant::now() + self.job_start.shutdown_timeout + AGENT_STOP_MARGIN);
                    poll.reset_immediately();
                }
                signal = self.warning_due(), if !warned && kill_at.is_none() => {
                    // Retried, like a stop.
                    warned = client.signal(signal).await;
                    if !warned {
                        tokio::select! {
                            () = &mut exited => return,
                            () = tokio::time::sleep(SIGNAL_RETRY_DELAY) => {}
                        }
                    }
                }
                _ = poll.tick() => {
                    let now = clock::uptime_ms();
                    if agent.runs() {
                        *seen = now;
                    }
                    if kill_at.is_some_and(|kill_at| Instant::now() > kill_at) {
                        agent.kill().await;
                    }
                    if kill_at.is_some() && !stop_sent {
                        // Retried at the next poll, because an agent that has just started may not listen yet.
                        stop_sent = client.stop().await;
                    }
                    polls += 1;
                    if polls % POLLS_PER_USAGE == 0 {
                        *usage = later(*usage, agent.usage().await);
                    }
                    let status = tokio::select! {
                        () = &mut exited => return,
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

    /// Waits until the job is to be stopped in this way or a stronger one. Waits forever if the manager is gone,
    /// because the job outlives the daemon.
    async fn stop_requested(&self, how: Stop) {
        if self.stop.clone().wait_for(|stop| *stop >= how).await.is_err() {
            std::future::pending().await
        }
    }

    /// Waits until the workers are to be warned, and returns the signal for that.
    async fn warning_due(&self) -> i32 {
        let due = self.warning.clone().wait_for(Option::is_some).await.ok().and_then(|signal| *signal);
        match due {
            Some(signal) => signal,
            // The manager is gone.
            None => std::future::pending().await,
        }
    }

    /// Returns the result of an agent that has begun and exited. At `seen` it was still running, whatever time its
    /// result names.
    fn result(&self, usage: Option<Usage>, seen: u64) -> AgentEvent {
        let result = self.dirs.result(self.job_start.job, self.job_start.uid);
        match result.filter(|result| result.start == self.job_start.start) {
            Some(mut result) => {
                if result.uptime_ms > 0 {
                    result.uptime_ms = result.uptime_ms.max(seen);
                }
                AgentEvent::Ended(result, usage)
            }
            None if self.dirs.are_gone(self.job_start.job) => AgentEvent::Lost(
                "its files were removed while it ran, so its result is unknown".into(),
                usage,
            ),
            None => AgentEvent::Lost("its agent exited without a result".into(), usage),
        }
    }
}

/// Combines two readings of the usage: the larger CPU time and the higher peak.
fn later(before: Option<Usage>, now: Option<Usage>) -> Option<Usage> {
    match (before, now) {
        (Some(before), Some(now)) => Some(Usage {
            cpu_ms: now.cpu_ms.max(before.cpu_ms),
            peak_memory_bytes: now.peak_memory_bytes.max(before.peak_memory_bytes),
        }),
        (before, now) => now.or(before),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tokio::io::AsyncReadExt;

    use super::*;
    use crate::agents::facts::Facts;
    use crate::agents::process::AgentProcess;
    use crate::files::StartOptions;

    fn job_start(user: &str) -> JobStart {
        JobStart {
            job: 1,
            start: 1,
            at: 5,
            name: "n".into(),
            uid: rustix::process::getuid().as_raw(),
            user: user.into(),
            options: StartOptions::default(),
            gpu_nodes: None,
            shutdown_timeout: Duration::ZERO,
            facts: Facts::default(),
            cpus: None,
            memory: None,
            max_tasks: 1000,
        }
    }

    /// Returns a follower with the senders of its requests, which live as long as the manager.
    fn follower(
        state: &Path,
        user: &str,
        events: mpsc::Sender<(u64, AgentEvent)>,
    ) -> (Follower, (watch::Sender<Stop>, watch::Sender<Option<i32>>)) {
        let (stop, warning) = (watch::Sender::new(Stop::No), watch::Sender::new(None));
        let follower = Follower {
            job_start: job_start(user),
            dirs: JobDirs::open(state).unwrap(),
            starter: Arc::new(AgentStarter::Detached(None)),
            config: watch::channel(LiveConfig::default()).1,
            events,
            stop: stop.subscribe(),
            warning: warning.subscribe(),
        };
        (follower, (stop, warning))
    }

    /// Tests the case that the account of the job's user was removed and its id given to another user.
    #[tokio::test(flavor = "multi_thread")]
    async fn job_does_not_start_as_another_user_who_got_the_user_id() {
        let state = tempfile::tempdir().unwrap();
        let (events, mut received) = mpsc::channel(8);
        let (follower, _manager) = follower(state.path(), "removed-user", events);
        follower.follow(true).await;
        let Some((1, AgentEvent::NotStarted(Some(reason)))) = received.recv().await else { panic!() };
        assert!(reason.contains("belonged to `removed-user`") || reason.contains("no account"), "{reason}");
    }

    /// Tests a cancel that arrives between the prolog and the description.
    #[tokio::test(flavor = "multi_thread")]
    async fn job_cancelled_while_its_agent_is_started_does_not_begin() {
        let state = tempfile::tempdir().unwrap();
        let (follower, (stop, _warning)) = follower(state.path(), "", mpsc::channel(8).0);
        let mut child = tokio::process::Command::new("sleep").arg("1000").kill_on_drop(true).spawn().unwrap();
        let agent = Agent::Process(AgentProcess::of_child(child.id().unwrap()).unwrap());
        let (sender, mut receiver) = pipe::pipe().unwrap();
        stop.send_replace(Stop::Ask);
        let begun = follower.begin(&agent, Some((sender, b"description".to_vec())));
        let failure = tokio::time::timeout(BEGIN_TIMEOUT / 2, begun).await.unwrap();
        assert_eq!(failure.as_deref(), Some("stopped before it began"));
        child.wait().await.unwrap();
        let mut sent = Vec::new();
        receiver.read_to_end(&mut sent).await.unwrap();
        assert_eq!(sent, b"");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn agent_that_exits_before_it_begins_is_reported_with_its_last_line() {
        let state = tempfile::tempdir().unwrap();
        let (events, _received) = mpsc::channel(8);
        let (mut follower, _manager) = follower(state.path(), "", events);
        let begin = "its agent exited before it began";
        let not_started = |follower: &Follower| match follower.not_started(Some(begin.to_owned())) {
            AgentEvent::NotStarted(Some(reason)) => reason,
            other => panic!("{other:?}"),
        };
        assert_eq!(not_started(&follower), begin);
        let dir = follower.dirs.agent(1);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("agent.log"), "first\nno space left\x1b[2J\n\n").unwrap();
        follower.job_start.uid = rustix::process::getuid().as_raw();
        assert_eq!(not_started(&follower), format!("{begin}: no space left\\u{{1b}}[2J"));
    }

    #[tokio::test]
    async fn result_does_not_name_an_end_before_the_agent_was_last_seen() {
        let state = tempfile::tempdir().unwrap();
        let (follower, _manager) = follower(state.path(), "", mpsc::channel(1).0);
        std::fs::create_dir_all(follower.dirs.agent(1)).unwrap();
        for (named, end) in [(50, 60), (70, 70), (0, 0)] {
            let result = JobResult { start: 1, uptime_ms: named, ..JobResult::default() };
            let file = follower.dirs.agent(1).join(crate::files::RESULT);
            std::fs::write(file, serde_json::to_vec(&result).unwrap()).unwrap();
            let expected = JobResult { uptime_ms: end, ..result };
            assert_eq!(follower.result(None, 60), AgentEvent::Ended(expected, None));
        }
    }

    /// Tests a unit that is found in systemd's list after journal and files were lost.
    #[tokio::test(flavor = "multi_thread")]
    async fn adopted_job_without_files_runs_until_its_agent_ends() {
        let state = tempfile::tempdir().unwrap();
        let (events, mut received) = mpsc::channel(8);
        let (follower, _manager) = follower(state.path(), "", events);
        let mut child = tokio::process::Command::new("sleep").arg("1000").kill_on_drop(true).spawn().unwrap();
        let agent = Agent::Process(AgentProcess::of_child(child.id().unwrap()).unwrap());
        let begun = tokio::time::timeout(BEGIN_TIMEOUT / 2, follower.begin(&agent, None)).await;
        assert_eq!(begun, Ok(None), "it is not shown as starting, and not killed");
        let (last, ()) = tokio::join!(follower.watch(agent, None), async {
            assert_eq!(received.recv().await, Some((1, AgentEvent::Started)));
            child.kill().await.unwrap();
        });
        let AgentEvent::Lost(reason, None) = last else { panic!("{last:?}") };
        assert!(reason.contains("files were removed"), "{reason}");
    }
}
