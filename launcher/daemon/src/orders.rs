//! What callers can have done, and how it reaches the manager.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};
use xlaunch_proto::convert::node::Submit;
use xlaunch_proto::v1::{Job, NodeStatus};

use super::view::{Caller, NodeView};

/// Why an order is refused. The texts are for the caller.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Not this caller, or not on this node.
    #[error("{0}")]
    NotAllowed(String),
    /// It cannot work as it is.
    #[error("{0}")]
    Invalid(String),
    /// There is no such job, or none that this caller may see.
    #[error("there is no job {0}")]
    NoJob(u64),
    /// Limits are reached: later it may be taken.
    #[error("{0}")]
    Full(String),
    /// The daemon itself fails, or ends.
    #[error("{0}")]
    Broken(String),
}

/// The answer to an order.
pub type Answer<T> = oneshot::Sender<Result<T, Refused>>;

/// An order to the manager.
#[derive(Debug)]
#[expect(missing_docs, reason = "named after the calls")]
pub enum Order {
    /// Answered with the job, and whether an earlier request had added it.
    Submit {
        caller: Caller,
        submission: Box<Submit>,
        answer: Answer<(Job, bool)>,
    },
    Cancel {
        caller: Caller,
        job: u64,
        answer: Answer<Job>,
    },
    Drain {
        caller: Caller,
        gpus: Vec<String>,
        undo: bool,
        reason: String,
        answer: Answer<NodeStatus>,
    },
}

/// The node, for those who answer callers.
#[derive(Clone, Debug)]
pub struct Node {
    orders: mpsc::Sender<Order>,
    view: watch::Receiver<Arc<NodeView>>,
}

impl Node {
    /// The node whose manager takes these orders and shows this view.
    pub fn new(orders: mpsc::Sender<Order>, view: watch::Receiver<Arc<NodeView>>) -> Self {
        Self { orders, view }
    }

    /// The newest snapshot.
    pub fn view(&self) -> Arc<NodeView> {
        self.view.borrow().clone()
    }

    /// For whoever waits for the next one.
    pub fn watch(&self) -> watch::Receiver<Arc<NodeView>> {
        self.view.clone()
    }

    /// Adds a job; its request's id may have been seen before.
    pub async fn submit(&self, caller: Caller, submission: Submit) -> Result<(Job, bool), Refused> {
        self.order(|answer| Order::Submit { caller, submission: Box::new(submission), answer }).await
    }

    /// Ends a job.
    pub async fn cancel(&self, caller: Caller, job: u64) -> Result<Job, Refused> {
        self.order(|answer| Order::Cancel { caller, job, answer }).await
    }

    /// Takes the node or these GPUs out of service, or puts them back.
    pub async fn drain(
        &self,
        caller: Caller,
        gpus: Vec<String>,
        undo: bool,
        reason: String,
    ) -> Result<NodeStatus, Refused> {
        self.order(|answer| Order::Drain { caller, gpus, undo, reason, answer }).await
    }

    async fn order<T>(&self, order: impl FnOnce(Answer<T>) -> Order) -> Result<T, Refused> {
        let ends = || Refused::Broken("the daemon is ending".into());
        let (answer, answered) = oneshot::channel();
        self.orders.send(order(answer)).await.map_err(|_| ends())?;
        answered.await.map_err(|_| ends())?
    }
}
