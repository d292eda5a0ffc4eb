//! The task that follows one start of a job, from its ticket to its result, and tells the manager.
//!
//! It decides nothing but whether the agent is there: an agent says who it is once it has taken its ticket, and its process
//! is watched from then on. What it says about itself is its user's word: its result counts only when its process is gone.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, timeout};
use tonic::transport::Channel;
use tracing::warn;
use xlaunch_proto::v1::agent_client::AgentClient;
use xlaunch_proto::v1::{StatusReply, StatusRequest, StopRequest};

use super::connect::connect;
use super::process::Agent;
use super::{Gone, Start, Starter};
use crate::files::{Identity, JobDirs, JobResult, is_full};
use xlaunch_agent::registry::SOCKET;

/// For an agent to say who it is.
const BEGIN: Duration = Duration::from_secs(60);
/// Between looks whether a full disk has room again.
const ROOM: Duration = Duration::from_secs(1);
/// Between looks for its word.
const LOOK: Duration = Duration::from_millis(20);
/// Between questions how it does.
const ASK: Duration = Duration::from_secs(1);
/// For an answer.
const ANSWER: Duration = Duration::from_secs(5);
/// For an agent to end behind its workers, before it is killed.
const END: Duration = Duration::from_secs(60);

/// One start of a job.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "as in the records")]
pub struct Followed {
    pub job: u64,
    pub start: u32,
    pub name: String,
    pub uid: u32,
    pub gpus: Vec<String>,
    /// Seconds that its workers get to end.
    pub patience: f64,
}

/// What becomes of it.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    /// Its agent runs.
    Runs,
    /// How it does.
    Status(Box<StatusReply>),
    /// Its agent has never been there, and never will be; why, where something has failed.
    NotStarted(Option<String>),
    /// Its agent has gone and left this.
    Ended(JobResult),
    /// Its agent has gone without a word.
    Lost(String),
}

/// Follows a start to its end. `fresh` starts it; otherwise an earlier daemon has, or was about to. News come with the job's
/// number. When `stop` turns true, the job is asked to end.
pub async fn follow(
    followed: Followed,
    fresh: bool,
    dirs: JobDirs,
    starter: Arc<Starter>,
    news: mpsc::Sender<(u64, News)>,
    stop: watch::Receiver<bool>,
) {
    let job = followed.job;
    let task = Follow { followed, dirs, starter, news, stop };
    let last = task.run(fresh).await;
    // The manager is gone only when the daemon ends: the next one asks the files.
    let _ = task.news.send((job, last)).await;
}

struct Follow {
    followed: Followed,
    dirs: JobDirs,
    starter: Arc<Starter>,
    news: mpsc::Sender<(u64, News)>,
    stop: watch::Receiver<bool>,
}

impl Follow {
    async fn run(&self, fresh: bool) -> News {
        let (gone, problem) = match fresh {
            true => match self.start().await {
                Ok(gone) => (Some(gone), None),
                Err(error) => (None, Some(format!("its agent cannot be started: {error}"))),
            },
            false => (None, None),
        };
        if gone.is_none()
            && let Some(last) = self.take_back(problem).await
        {
            return last;
        }
        let identity = match self.identity(gone.unwrap_or_else(never)).await {
            Ok(identity) => identity,
            Err(last) => return last,
        };
        if let Some(agent) = Agent::find(&identity, self.followed.uid) {
            let _ = self.news.send((self.followed.job, News::Runs)).await;
            self.watch(&agent).await;
            self.starter.kill(self.followed.job).await;
        }
        self.result()
    }

    /// Starts it as soon as there is room for its order on disk.
    async fn start(&self) -> std::io::Result<Gone> {
        loop {
            match self.try_start().await {
                Err(error) if is_full(&error) => tokio::select! {
                    () = tokio::time::sleep(ROOM) => {}
                    () = self.stopped() => return Err(error),
                },
                started => return started,
            }
        }
    }

    async fn try_start(&self) -> std::io::Result<Gone> {
        let Followed { job, start, uid, ref name, ref gpus, patience } = self.followed;
        let input = self.dirs.prepare(job, start, gpus)?;
        let (dir, order, name) = (self.dirs.agent(job), self.dirs.order(job, start), name.clone());
        self.starter.start(Start { job, name, uid, dir, order, input, patience }).await
    }

    /// Sees to it that nobody begins this start any more; `None` where its agent has. Whether that still runs is seen by its
    /// lock.
    async fn take_back(&self, reason: Option<String>) -> Option<News> {
        loop {
            match self.dirs.revoke(self.followed.job, self.followed.start) {
                Ok(true) => return Some(News::NotStarted(reason)),
                Ok(false) => return None,
                // Guessed wrong, its GPUs would be given to two jobs.
                Err(error) => {
                    warn!(job = self.followed.job, "its directory cannot be read: {error}");
                    tokio::time::sleep(ROOM).await;
                }
            }
        }
    }

    /// Waits for the agent to say who it is.
    async fn identity(&self, mut gone: Gone) -> Result<Identity, News> {
        let (job, uid) = (self.followed.job, self.followed.uid);
        let mut deadline = Some(Instant::now() + BEGIN);
        loop {
            let over = tokio::select! {
                biased;
                how = &mut gone => Some(format!("its agent ended before it began: {how}")),
                () = tokio::time::sleep(LOOK) => deadline
                    .filter(|deadline| Instant::now() > *deadline)
                    .map(|_| "its agent has not begun within a minute".into()),
            };
            if let Some(identity) = self.dirs.identity(job, uid).filter(|it| it.start == self.followed.start)
            {
                return Ok(identity);
            }
            if let Some(reason) = over {
                (gone, deadline) = (never(), None);
                if let Some(last) = self.take_back(Some(reason)).await {
                    return Err(last);
                }
            }
            // An agent that has taken its ticket and holds no lock is gone.
            if self.is_abandoned() {
                return Err(self.result());
            }
        }
    }

    fn is_abandoned(&self) -> bool {
        let (job, start, uid) = (self.followed.job, self.followed.start, self.followed.uid);
        // The lock is taken first: asked in this order, none that begins is taken for one that has gone.
        self.dirs.has_begun(job, start) && !self.dirs.is_locked(job, uid) && {
            self.dirs.identity(job, uid).is_none_or(|identity| identity.start != start)
        }
    }

    /// Asks how it does, and asks it to end, until it is gone.
    async fn watch(&self, agent: &Agent) {
        let mut ask = tokio::time::interval(ASK);
        ask.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut caller = Caller {
            socket: self.dirs.agent(self.followed.job).join(SOCKET),
            uid: self.followed.uid,
            client: None,
        };
        // When it is killed, once it has been asked to end.
        let mut deadline: Option<Instant> = None;
        let mut told = true;
        loop {
            let stopping = deadline.is_some();
            tokio::select! {
                biased;
                () = agent.ended() => return,
                () = self.stopped(), if !stopping => {
                    deadline = Some(Instant::now() + Duration::from_secs_f64(self.followed.patience) + END);
                    told = false;
                    ask.reset_immediately();
                }
                _ = ask.tick() => {
                    if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                        agent.kill();
                        self.starter.kill(self.followed.job).await;
                    }
                    if !told {
                        // It may have just begun, and not listen yet: then it is told the next time.
                        told = caller.stop().await;
                    }
                    let status = tokio::select! {
                        () = agent.ended() => return,
                        status = caller.status() => status,
                    };
                    if let Some(status) = status {
                        let _ = self.news.send((self.followed.job, News::Status(Box::new(status)))).await;
                    }
                }
            }
        }
    }

    /// Waits until the job shall end. A manager that is gone wants nothing: the job outlives it.
    async fn stopped(&self) {
        if self.stop.clone().wait_for(|stop| *stop).await.is_err() {
            std::future::pending().await
        }
    }

    /// What is left when the agent is gone.
    fn result(&self) -> News {
        let result = self.dirs.result(self.followed.job, self.followed.uid);
        match result.filter(|result| result.start == self.followed.start) {
            Some(result) => News::Ended(result),
            None => News::Lost("its agent has gone without saying how the job ended".into()),
        }
    }
}

fn never() -> Gone {
    Box::pin(std::future::pending())
}

/// A connection with the agent, made when it is needed.
struct Caller {
    socket: PathBuf,
    uid: u32,
    client: Option<AgentClient<Channel>>,
}

impl Caller {
    async fn client(&mut self) -> Option<&mut AgentClient<Channel>> {
        if self.client.is_none() {
            // It listens a moment after it has begun.
            let connected = timeout(ANSWER, connect(&self.socket, self.uid)).await;
            self.client = connected.ok()?.ok();
        }
        self.client.as_mut()
    }

    async fn status(&mut self) -> Option<StatusReply> {
        let asked = self.client().await?.status(StatusRequest { history: true });
        let answer = timeout(ANSWER, asked).await.ok().and_then(Result::ok);
        if answer.is_none() {
            self.client = None;
        }
        answer.map(tonic::Response::into_inner)
    }

    /// Whether the agent has heard it.
    async fn stop(&mut self) -> bool {
        let Some(client) = self.client().await else { return false };
        let heard = timeout(ANSWER, client.stop(StopRequest {})).await.is_ok_and(|answer| answer.is_ok());
        if !heard {
            self.client = None;
        }
        heard
    }
}
