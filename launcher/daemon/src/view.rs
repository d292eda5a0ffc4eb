//! The view: a snapshot of the node and its jobs, which the manager replaces after every change.
//!
//! It contains the jobs of all users. Each reader must restrict it to the jobs that its caller may see
//! ([`Caller::may_see`]).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use xlaunch_proto::v1::{Job, NodeJobState, NodeStatus, Progress, StatusReply};

/// Snapshot of the node and its jobs.
#[derive(Clone, Debug, Default)]
pub struct NodeView {
    /// The node, its GPUs, and the jobs that hold them.
    pub node: NodeStatus,
    /// Number of GPUs examined since the daemon was started, by result: passed, failed, unknown.
    pub examined: [u64; 3],
    /// Jobs by id. Ended jobs are included until they are forgotten.
    pub jobs: BTreeMap<u64, Arc<JobView>>,
}

/// Snapshot of a job.
#[derive(Clone, Debug, Default)]
pub struct JobView {
    /// The job's message, without `status` and `history`.
    pub job: Job,
    /// The job that must start before this one, which is queued.
    pub first: Option<u64>,
    /// The last status of the agent, and the time at which it was received.
    pub status: Option<(Arc<StatusReply>, Instant)>,
    /// Loss and throughput of a training job, oldest first.
    pub history: Arc<[Progress]>,
    /// True if the job is queued, needs GPUs, is not held, and has no open dependencies.
    pub waits_for_gpus: bool,
    /// The socket of the agent.
    pub socket: PathBuf,
    /// The directory of `attempt_N/LOCAL_RANK/{stdout,stderr}.log`. The job's user can change its contents.
    pub logs: PathBuf,
}

impl JobView {
    /// Returns the message with the status and, if `with_history`, the history.
    pub fn to_message(&self, with_history: bool) -> Job {
        let mut job = self.job.clone();
        if let Some((status, at)) = &self.status {
            job.status = Some(StatusReply::clone(status));
            job.status_age_seconds = at.elapsed().as_secs_f64();
        }
        if with_history {
            job.history = self.history.to_vec();
        }
        job
    }

    /// [`to_message`](Self::to_message) for a caller: leaves out the id of the job that this one waits for if the
    /// caller may not see it.
    pub fn to_message_for(&self, caller: &Caller, view: &NodeView, with_history: bool) -> Job {
        let mut job = self.to_message(with_history);
        let is_visible =
            |first: u64| view.jobs.get(&first).is_some_and(|first| caller.may_see_job(&first.job));
        if self.first.is_some_and(|first| !is_visible(first)) {
            job.reason = "waits for a job of another user to start first".into();
        }
        job
    }

    /// Returns whether the job is in a final state.
    pub fn has_ended(&self) -> bool {
        has_ended(self.job.state())
    }
}

/// Returns whether this state is final.
pub fn has_ended(state: NodeJobState) -> bool {
    use NodeJobState::{Cancelled, Done, Failed, Lost};
    matches!(state, Done | Failed | Cancelled | Lost)
}

/// The user who makes a call, from the credentials of the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    pub uid: u32,
    /// Current name of the user; empty if the user id has no account.
    pub name: Cow<'static, str>,
    /// True if the user is root, the daemon's own user, or a member of `daemon.admin_group`.
    pub admin: bool,
}

impl Caller {
    /// Returns whether the caller may see and cancel the jobs of a user with this id and name. The name is compared
    /// too, because an id may be given to another user after its account is removed. Jobs of version 0.1 have no user
    /// name.
    pub fn may_see(&self, uid: u32, user: &str) -> bool {
        self.admin || (self.uid == uid && (user.is_empty() || self.name == user))
    }

    /// [`may_see`](Self::may_see) for the user of this job.
    pub fn may_see_job(&self, job: &Job) -> bool {
        self.may_see(job.uid, &job.user)
    }

    /// Returns the label of the caller in messages: the name, or the user id if it has no account.
    pub(crate) fn label(&self) -> Cow<'_, str> {
        if self.name.is_empty() { self.uid.to_string().into() } else { (*self.name).into() }
    }
}
