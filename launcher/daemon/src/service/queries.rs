//! Queries of the view, restricted to the jobs that the caller may see.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tonic::Status;
use xlaunch_proto::convert::encoded_size;
use xlaunch_proto::v1::{HistoryRequest, Job, ListReply, ListRequest, NodeStatus};

use crate::accounting::Query;
use crate::commands::CommandError;
use crate::view::{Caller, JobView, NodeView};

/// Maximum number of jobs in a list.
const MAX_LISTED_JOBS: usize = 1000;
/// Maximum size of a list. A client can request many lists without reading any.
const MAX_LIST_BYTES: usize = 256 << 10;
/// Maximum length of a user name or number in a request.
const MAX_USER_BYTES: usize = 256;
/// Minimum interval between updates of a watched job.
const WATCH_INTERVAL: Duration = Duration::from_millis(250);

/// Returns a job, if the caller may see it.
pub(super) fn job(view: &NodeView, caller: &Caller, id: u64) -> Result<Arc<JobView>, Status> {
    let job = view.jobs.get(&id).filter(|job| caller.may_see_job(&job.job));
    job.cloned().ok_or_else(|| to_status(CommandError::JobNotFound(id)))
}

/// Returns the newest jobs that the caller may see, as many as fit, and whether there are more.
pub(super) fn list(view: &NodeView, caller: &Caller, request: &ListRequest) -> ListReply {
    let limit = match request.limit as usize {
        0 => MAX_LISTED_JOBS,
        limit => limit.min(MAX_LISTED_JOBS),
    };
    let wanted = |job: &&Arc<JobView>| caller.may_see_job(&job.job) && (request.ended || !job.has_ended());
    let before = if request.before == 0 { u64::MAX } else { request.before };
    let (mut jobs, mut bytes) = (Vec::new(), 0);
    for job in view.jobs.range(..before).rev().map(|(_, job)| job).filter(wanted) {
        let message = job.to_message_for(caller, view, false);
        bytes += encoded_size(&message);
        // Each page has at least one job, however large, so that paging makes progress.
        if jobs.len() == limit || (bytes > MAX_LIST_BYTES && !jobs.is_empty()) {
            return ListReply { jobs, more: true };
        }
        jobs.push(message);
    }
    ListReply { jobs, more: false }
}

/// Converts a history request to a query, restricted to the accounts that the caller may see.
pub(super) fn history(caller: &Caller, request: HistoryRequest) -> Result<Query, Status> {
    if request.user.len() > MAX_USER_BYTES {
        return Err(Status::invalid_argument(format!("user: more than {MAX_USER_BYTES} bytes")));
    }
    Ok(Query {
        owner: (!caller.admin).then(|| (caller.uid, caller.name.clone().into_owned())),
        user: (!request.user.is_empty()).then_some(request.user),
        since: request.since_unix_ms,
        limit: request.limit as usize,
        before: (request.before != 0).then_some(request.before),
    })
}

/// Returns the node's status, without the ids of jobs that the caller may not see.
pub(super) fn status(view: &NodeView, caller: &Caller) -> NodeStatus {
    let mut node = view.node.clone();
    let may_see = |id| view.jobs.get(&id).is_some_and(|job| caller.may_see_job(&job.job));
    for gpu in node.gpus.iter_mut().filter(|gpu| !caller.admin && !may_see(gpu.job)) {
        gpu.job = 0;
    }
    node
}

/// Sends a job, and then each change of it until it has ended. A slow receiver misses intermediate changes.
pub(super) async fn watch(
    mut view: watch::Receiver<Arc<NodeView>>,
    caller: Caller,
    id: u64,
    jobs: &mpsc::Sender<Result<Job, Status>>,
) {
    let mut sent: Option<Arc<JobView>> = None;
    // Space is reserved before the view is read, so that the newest state is sent once the receiver has space.
    while let Ok(permit) = jobs.reserve().await {
        let now = view.borrow_and_update().clone();
        let Some(job) = now.jobs.get(&id).cloned() else {
            return permit.send(Err(to_status(CommandError::JobNotFound(id))));
        };
        // The manager replaces the Arc of a job only when the job has changed.
        if sent.as_ref().is_none_or(|sent| !Arc::ptr_eq(sent, &job)) {
            permit.send(Ok(job.to_message_for(&caller, &now, true)));
            if job.has_ended() {
                return;
            }
            sent = Some(job);
            tokio::time::sleep(WATCH_INTERVAL).await;
        } else if view.changed().await.is_err() {
            let error = CommandError::Unavailable("the daemon is shutting down".into());
            return permit.send(Err(to_status(error)));
        }
    }
}

pub(super) fn to_status(error: CommandError) -> Status {
    let message = error.to_string();
    match error {
        CommandError::NotAllowed(_) => Status::permission_denied(message),
        CommandError::Invalid(_) => Status::invalid_argument(message),
        CommandError::JobNotFound(_) => Status::not_found(message),
        CommandError::LimitReached(_) => Status::resource_exhausted(message),
        CommandError::Unavailable(_) => Status::unavailable(message),
    }
}

#[cfg(test)]
mod tests;
