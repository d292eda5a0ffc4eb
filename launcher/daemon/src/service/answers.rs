//! Answers from the view: what of the node a caller may see.
//!
//! A job that is not theirs to see does not exist for them.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tonic::Status;
use xlaunch_proto::convert::encoded_size;
use xlaunch_proto::v1::{Job, ListReply, ListRequest, NodeStatus};

use crate::orders::Refused;
use crate::view::{Caller, JobView, NodeView};

/// Jobs in a list.
const JOBS: usize = 1000;
/// Bytes of a list: callers may ask for many and read none.
const BYTES: usize = 256 << 10;
/// Between two answers about a job that is watched.
const PACE: Duration = Duration::from_millis(250);

/// A job, if the caller may see it.
pub(super) fn job(view: &NodeView, caller: Caller, id: u64) -> Result<Arc<JobView>, Status> {
    let job = view.jobs.get(&id).filter(|job| caller.may_see(job.job.uid));
    job.cloned().ok_or_else(|| refused(Refused::NoJob(id)))
}

/// The newest of the caller's jobs, as many as fit.
pub(super) fn list(view: &NodeView, caller: Caller, request: &ListRequest) -> ListReply {
    let limit = match request.limit as usize {
        0 => JOBS,
        limit => limit.min(JOBS),
    };
    let wanted = |job: &&Arc<JobView>| caller.may_see(job.job.uid) && (request.ended || !job.has_ended());
    let mut bytes = 0;
    let jobs = view.jobs.values().rev().filter(wanted).take(limit).map(|job| job.answer(false));
    let jobs = jobs.take_while(|job| {
        bytes += encoded_size(job);
        bytes <= BYTES
    });
    ListReply { jobs: jobs.collect() }
}

/// The node, without the numbers of jobs that are none of the caller's.
pub(super) fn status(view: &NodeView, caller: Caller) -> NodeStatus {
    let mut node = view.node.clone();
    let may_see = |id| view.jobs.get(&id).is_some_and(|job| caller.may_see(job.job.uid));
    for gpu in node.gpus.iter_mut().filter(|gpu| !caller.admin && !may_see(gpu.job)) {
        gpu.job = 0;
    }
    node
}

/// Sends the job, and again when it has changed, to its end. A slow caller gets what is newest when there is room for it.
pub(super) async fn watch(
    mut view: watch::Receiver<Arc<NodeView>>,
    id: u64,
    jobs: &mpsc::Sender<Result<Job, Status>>,
) {
    let mut told: Option<Arc<JobView>> = None;
    while let Ok(place) = jobs.reserve().await {
        let Some(job) = view.borrow_and_update().jobs.get(&id).cloned() else {
            return place.send(Err(refused(Refused::NoJob(id))));
        };
        if told.as_ref().is_none_or(|told| !Arc::ptr_eq(told, &job)) {
            place.send(Ok(job.answer(true)));
            if job.has_ended() {
                return;
            }
            told = Some(job);
            tokio::time::sleep(PACE).await;
        } else if view.changed().await.is_err() {
            return place.send(Err(refused(Refused::Broken("the daemon is ending".into()))));
        }
    }
}

/// What a caller is told of a refusal.
pub(super) fn refused(refused: Refused) -> Status {
    let message = refused.to_string();
    match refused {
        Refused::NotAllowed(_) => Status::permission_denied(message),
        Refused::Invalid(_) => Status::invalid_argument(message),
        Refused::NoJob(_) => Status::not_found(message),
        Refused::Full(_) => Status::resource_exhausted(message),
        Refused::Broken(_) => Status::unavailable(message),
    }
}

#[cfg(test)]
mod tests;
