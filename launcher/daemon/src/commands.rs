//! Commands to the manager, and the handle that sends them.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};
use xlaunch_proto::convert::node::Submit;
use xlaunch_proto::v1::{Job, NodeStatus};

use super::users::Account;
use super::view::{Caller, NodeView};

/// Why a command was refused. The texts are for the caller.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// This caller may not do that, or no caller may on this node.
    #[error("{0}")]
    NotAllowed(String),
    /// The command can never succeed as it is.
    #[error("{0}")]
    Invalid(String),
    /// No such job, or not one that this caller may see.
    #[error("there is no job {0}")]
    JobNotFound(u64),
    /// May succeed later.
    #[error("{0}")]
    LimitReached(String),
    /// The daemon cannot write its journal, or is shutting down.
    #[error("{0}")]
    Unavailable(String),
}

/// Where the result of a command is sent.
pub type Reply<T> = oneshot::Sender<Result<T, CommandError>>;

/// A command to the manager.
#[derive(Debug)]
pub enum Command {
    /// The reply is the job, and whether the request is a repetition of an earlier one.
    Submit {
        caller: Caller,
        account: Account,
        submission: Box<Submit>,
        reply: Reply<(Job, bool)>,
    },
    Cancel {
        caller: Caller,
        job: u64,
        /// Kill a running job at once.
        force: bool,
        reply: Reply<Job>,
    },
    Drain {
        caller: Caller,
        gpus: Vec<String>,
        undo: bool,
        reason: String,
        reply: Reply<NodeStatus>,
    },
}

/// Sends commands to the manager and reads the view that it publishes.
#[derive(Clone, Debug)]
pub struct NodeHandle {
    commands: mpsc::Sender<Command>,
    view: watch::Receiver<Arc<NodeView>>,
}

impl NodeHandle {
    /// A handle to the manager at the other ends of these channels.
    pub fn new(commands: mpsc::Sender<Command>, view: watch::Receiver<Arc<NodeView>>) -> Self {
        Self { commands, view }
    }

    /// The newest view.
    pub fn view(&self) -> Arc<NodeView> {
        self.view.borrow().clone()
    }

    /// Receives later views.
    pub fn watch(&self) -> watch::Receiver<Arc<NodeView>> {
        self.view.clone()
    }

    /// Adds a job, or finds the one that an earlier request with this id added.
    pub async fn submit(
        &self,
        caller: Caller,
        account: Account,
        submission: Submit,
    ) -> Result<(Job, bool), CommandError> {
        self.send(|reply| Command::Submit { caller, account, submission: Box::new(submission), reply }).await
    }

    /// Cancels a job; with `force`, a running one is killed at once.
    pub async fn cancel(&self, caller: Caller, job: u64, force: bool) -> Result<Job, CommandError> {
        self.send(|reply| Command::Cancel { caller, job, force, reply }).await
    }

    /// Takes the node or these GPUs out of service, or with `undo` puts them back.
    pub async fn drain(
        &self,
        caller: Caller,
        gpus: Vec<String>,
        undo: bool,
        reason: String,
    ) -> Result<NodeStatus, CommandError> {
        self.send(|reply| Command::Drain { caller, gpus, undo, reason, reply }).await
    }

    async fn send<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, CommandError> {
        let shutting_down = || CommandError::Unavailable("the daemon is shutting down".into());
        let (reply, result) = oneshot::channel();
        self.commands.send(command(reply)).await.map_err(|_| shutting_down())?;
        result.await.map_err(|_| shutting_down())?
    }
}
