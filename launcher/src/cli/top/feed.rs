//! Polls the daemon, every second and whenever another job is selected, and passes commands on to it.

use std::time::Duration;

use tokio::sync::{mpsc, watch};

use super::state::{Snapshot, Update};
use crate::client::daemon::DaemonClient;
use crate::render::job;
use xlaunch_agent::Refusal;

const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// The newest ended jobs are shown as well.
const MAX_ENDED_JOBS: u32 = 50;

/// Handle of the polling task, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct Feed {
    daemon: DaemonClient,
    selected: watch::Sender<Option<u64>>,
    sender: mpsc::Sender<Update>,
    updates: mpsc::Receiver<Update>,
}

impl Feed {
    pub(super) fn start(daemon: DaemonClient, selected: Option<u64>) -> Self {
        let (sender, updates) = mpsc::channel(4);
        let (select, selected) = watch::channel(selected);
        tokio::spawn(poll(daemon.clone(), selected, sender.clone()));
        Self { daemon, selected: select, sender, updates }
    }

    pub(super) async fn next(&mut self) -> Update {
        match self.updates.recv().await {
            Some(update) => update,
            // Unreachable: this struct holds a sender.
            None => std::future::pending().await,
        }
    }

    /// The job to fetch with all its details.
    pub(super) fn select(&self, job: Option<u64>) {
        self.selected.send_if_modified(|selected| std::mem::replace(selected, job) != job);
    }

    /// Cancels a job; the result arrives as an update.
    pub(super) fn cancel(&self, job: u64) {
        let (mut daemon, sender) = (self.daemon.clone(), self.sender.clone());
        tokio::spawn(async move {
            let notice = match daemon.cancel(job, false).await {
                Ok(job) => job::cancelled(&job),
                Err(refusal) => refusal.message,
            };
            // The user may have quit.
            let _ = sender.send(Update::Notice(notice)).await;
        });
    }
}

async fn poll(
    mut daemon: DaemonClient,
    mut selected: watch::Receiver<Option<u64>>,
    updates: mpsc::Sender<Update>,
) {
    loop {
        let job = *selected.borrow_and_update();
        let update = snapshot(&mut daemon, job).await;
        let update = update.unwrap_or_else(|refusal| Update::Error(refusal.message));
        if updates.send(update).await.is_err() {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(REFRESH_INTERVAL) => {}
            changed = selected.changed() => if changed.is_err() {
                return;
            },
        }
    }
}

/// The current state of the node, with the details of `job`.
pub(super) async fn snapshot(daemon: &mut DaemonClient, job: Option<u64>) -> Result<Update, Refusal> {
    let node = daemon.node().await?;
    let mut jobs = daemon.list(false, None).await?;
    for job in daemon.list(true, Some(MAX_ENDED_JOBS)).await? {
        // A job can end between the two calls: the second list has its newer state.
        jobs.retain(|known| known.id != job.id);
        jobs.push(job);
    }
    let detail = match job {
        // The daemon may have forgotten the job meanwhile.
        Some(job) => daemon.get(job).await.ok(),
        None => None,
    };
    Ok(Update::Snapshot(Box::new(Snapshot { node, jobs, detail })))
}
