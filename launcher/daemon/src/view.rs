//! The node as callers are shown it: a snapshot that the manager replaces whenever something changes.
//!
//! It is whole and hides nothing; who may see what is decided by those who answer, with [`Caller::may_see`].

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use xlaunch_proto::v1::{Job, NodeJobState, NodeStatus, Progress, StatusReply};

/// The node and its jobs at one moment.
#[derive(Clone, Debug, Default)]
pub struct NodeView {
    /// The node, and for each GPU the job that holds it.
    pub node: NodeStatus,
    /// By id. Of those that have ended, the newest.
    pub jobs: BTreeMap<u64, Arc<JobView>>,
}

/// A job at one moment.
#[derive(Clone, Debug, Default)]
pub struct JobView {
    /// The job, without `status` and `history`.
    pub job: Job,
    /// What its agent last said, and when.
    pub status: Option<(Arc<StatusReply>, Instant)>,
    /// Of a training job, oldest first.
    pub history: Arc<[Progress]>,
    /// Where its agent listens, while it runs.
    pub socket: PathBuf,
    /// Holds `attempt_N/LOCAL_RANK/stdout.log` and `stderr.log`: files of the job's user, who may have put anything there.
    pub logs: PathBuf,
}

impl JobView {
    /// The job for an answer, with its status and, if `whole`, its history.
    pub fn answer(&self, whole: bool) -> Job {
        let mut job = self.job.clone();
        if let Some((status, at)) = &self.status {
            job.status = Some(StatusReply::clone(status));
            job.status_age_seconds = at.elapsed().as_secs_f64();
        }
        if whole {
            job.history = self.history.to_vec();
        }
        job
    }

    /// Whether nothing more will happen to it.
    pub fn has_ended(&self) -> bool {
        has_ended(self.job.state())
    }
}

/// Whether nothing more will happen to a job in this state.
pub fn has_ended(state: NodeJobState) -> bool {
    use NodeJobState::{Cancelled, Done, Failed, Lost};
    matches!(state, Done | Failed | Cancelled | Lost)
}

/// Who asks, as the kernel says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The user.
    pub uid: u32,
    /// Root, the daemon's own user, or a member of the administrators' group.
    pub admin: bool,
}

impl Caller {
    /// Whether the jobs of this user are theirs to see and to cancel.
    pub fn may_see(&self, uid: u32) -> bool {
        self.admin || self.uid == uid
    }
}
