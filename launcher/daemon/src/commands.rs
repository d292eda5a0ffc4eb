//! Commands for the manager, and the handle that sends them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use xlaunch_proto::convert::node::Submit;
use xlaunch_proto::v1::{DrainRequest, ExamineReply, ExamineRequest, Job, NodeStatus, UpdateRequest};

use super::users::Account;
use super::view::{Caller, NodeView};

/// The reason why a command was refused, with a text for the caller.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// This caller is not allowed to do that, or no caller is on this node.
    #[error("{0}")]
    NotAllowed(String),
    /// The command can never succeed in this form.
    #[error("{0}")]
    Invalid(String),
    /// The job does not exist, or this caller may not see it.
    #[error("there is no job {0}")]
    JobNotFound(u64),
    /// A limit is reached; the command may succeed later.
    #[error("{0}")]
    LimitReached(String),
    /// The daemon cannot write its journal, or is shutting down.
    #[error("{0}")]
    Unavailable(String),
}

/// The channel to which the result of a command is sent.
pub type Reply<T> = oneshot::Sender<Result<T, CommandError>>;

/// The jobs that a submission has added.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Submission {
    /// The job, or all jobs of the array.
    pub jobs: Vec<Job>,
    /// True if the request repeats an earlier one.
    pub repeated: bool,
    /// Differences between the request and the job that was added.
    pub warnings: Vec<String>,
}

/// A change to one job.
#[derive(Debug)]
pub enum Change {
    /// Cancels the job.
    Cancel {
        /// True to kill a running job immediately.
        force: bool,
    },
    /// Holds or releases the queued job, or changes its priority.
    Update(UpdateRequest),
}

/// A change to one job, and its caller.
#[derive(Debug)]
pub struct JobChange {
    pub caller: Caller,
    pub job: u64,
    pub change: Change,
    pub reply: Reply<Job>,
}

/// A command to the manager.
#[derive(Debug)]
pub enum Command {
    Submit {
        caller: Caller,
        account: Account,
        submission: Box<Submit>,
        reply: Reply<Submission>,
    },
    /// Changes, each to another job.
    Change(Vec<JobChange>),
    Drain {
        caller: Caller,
        drain: DrainRequest,
        reply: Reply<NodeStatus>,
    },
    /// Examines idle GPUs. The reply has two messages, of which the first is available immediately.
    Examine {
        caller: Caller,
        examine: ExamineRequest,
        reply: Reply<mpsc::Receiver<ExamineReply>>,
    },
}

/// Number of changes to jobs that each user can have at the manager at a time.
const MAX_CHANGES: u32 = 64;

/// Limits each user to one command at the manager at a time, or to [`MAX_CHANGES`], which the manager writes to the
/// disk together. The manager's queue is first come, first served, so otherwise many calls of one user would delay
/// those of all others.
#[derive(Clone, Debug, Default)]
struct Turns(Arc<Mutex<HashMap<u32, Weak<Semaphore>>>>);

impl Turns {
    /// Waits until this user has `share` of [`MAX_CHANGES`] left, and takes them until the result is dropped. `None`
    /// would mean that the semaphore is closed, which nothing does.
    async fn wait(&self, uid: u32, share: u32) -> Option<OwnedSemaphorePermit> {
        let turn = {
            let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            turns.retain(|_, turn| turn.strong_count() > 0);
            let turn = turns.get(&uid).and_then(Weak::upgrade);
            let turn = turn.unwrap_or_else(|| Arc::new(Semaphore::new(MAX_CHANGES as usize)));
            turns.insert(uid, Arc::downgrade(&turn));
            turn
        };
        turn.acquire_many_owned(share).await.ok()
    }
}

/// Sends commands to the manager and reads the view that it publishes.
#[derive(Clone, Debug)]
pub struct NodeHandle {
    commands: mpsc::Sender<Command>,
    view: watch::Receiver<Arc<NodeView>>,
    turns: Turns,
}

impl NodeHandle {
    /// Creates a handle for the manager at the other ends of these channels.
    pub fn new(commands: mpsc::Sender<Command>, view: watch::Receiver<Arc<NodeView>>) -> Self {
        Self { commands, view, turns: Turns::default() }
    }

    /// Returns the newest view.
    pub fn view(&self) -> Arc<NodeView> {
        self.view.borrow().clone()
    }

    /// Returns a receiver of later views.
    pub fn watch(&self) -> watch::Receiver<Arc<NodeView>> {
        self.view.clone()
    }

    /// Adds a job or an array, or returns the one that an earlier request with the same id added.
    pub async fn submit(
        &self,
        caller: Caller,
        account: Account,
        submission: Submit,
    ) -> Result<Submission, CommandError> {
        self.send(caller.uid, MAX_CHANGES, |reply| Command::Submit {
            caller,
            account,
            submission: Box::new(submission),
            reply,
        })
        .await
    }

    /// Cancels a job. With `force`, a running job is killed immediately.
    pub async fn cancel(&self, caller: Caller, job: u64, force: bool) -> Result<Job, CommandError> {
        self.change(caller, job, Change::Cancel { force }).await
    }

    /// Holds or releases a queued job, or changes its priority.
    pub async fn update(&self, caller: Caller, update: UpdateRequest) -> Result<Job, CommandError> {
        let job = update.job;
        self.change(caller, job, Change::Update(update)).await
    }

    async fn change(&self, caller: Caller, job: u64, change: Change) -> Result<Job, CommandError> {
        self.send(caller.uid, 1, |reply| Command::Change(vec![JobChange { caller, job, change, reply }]))
            .await
    }

    /// Takes the node or these GPUs out of service or, with `undo`, puts them back.
    pub async fn drain(&self, caller: Caller, drain: DrainRequest) -> Result<NodeStatus, CommandError> {
        self.send(caller.uid, MAX_CHANGES, |reply| Command::Drain { caller, drain, reply }).await
    }

    /// Examines idle GPUs, and drains those that fail. The first message lists the GPUs, the last one has the results.
    pub async fn examine(
        &self,
        caller: Caller,
        examine: ExamineRequest,
    ) -> Result<mpsc::Receiver<ExamineReply>, CommandError> {
        self.send(caller.uid, MAX_CHANGES, |reply| Command::Examine { caller, examine, reply }).await
    }

    async fn send<T>(
        &self,
        uid: u32,
        share: u32,
        command: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, CommandError> {
        let _turn = self.turns.wait(uid, share).await;
        let shutting_down = || CommandError::Unavailable("the daemon is shutting down".into());
        let (reply, result) = oneshot::channel();
        self.commands.send(command(reply)).await.map_err(|_| shutting_down())?;
        result.await.map_err(|_| shutting_down())?
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn each_user_has_one_command_or_several_changes_at_a_time() {
        let turns = Turns::default();
        let first = [turns.wait(1, 1).await, turns.wait(1, 1).await];
        let mut second = std::pin::pin!(turns.wait(1, MAX_CHANGES));
        assert!(tokio::time::timeout(Duration::ZERO, &mut second).await.is_err());
        drop(turns.wait(2, MAX_CHANGES).await);
        drop(first);
        drop(second.await);
        drop(turns.wait(3, 1).await);
        assert_eq!(turns.0.lock().unwrap().len(), 1, "what is not waited for is not kept");
    }
}
