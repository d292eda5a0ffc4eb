//! Polls the daemon or the agents of launches, every second and whenever another job is selected, and passes commands
//! on to them.

use std::time::Duration;

use tokio::sync::{mpsc, watch};

use super::launches;
use super::state::{Snapshot, Update};
use crate::client::daemon::{DaemonAddress, DaemonClient};
use crate::render::job;
use xlaunch_agent::registry;
use xlaunch_spec::refusal::Refusal;

const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// Number of the newest ended jobs that are shown as well.
const MAX_ENDED_JOBS: u32 = 50;

/// Source of the jobs.
#[derive(Clone, Debug)]
pub(super) enum Source {
    Daemon(DaemonClient),
    /// This user's launches on this host, if no daemon is listening.
    Launches,
}

impl Source {
    /// Returns the daemon or, without one, the running launches.
    pub(super) async fn find(address: &DaemonAddress) -> Result<Self, Refusal> {
        match DaemonClient::connect(address).await {
            Ok(daemon) => Ok(Self::Daemon(daemon)),
            Err(_) if !address.is_given() && !registry::running().is_empty() => Ok(Self::Launches),
            Err(refusal) if address.is_given() => Err(refusal),
            Err(Refusal { exit, message }) => {
                Err(Refusal::new(exit, format!("no launch of yours is running on this host, and {message}")))
            }
        }
    }

    /// Returns the current state of the node, with the details of `job`.
    pub(super) async fn snapshot(&mut self, job: Option<u64>) -> Result<Update, Refusal> {
        let snapshot = match self {
            Self::Daemon(daemon) => of_daemon(daemon, job).await?,
            Self::Launches => launches::snapshot(job).await,
        };
        Ok(Update::Snapshot(Box::new(snapshot)))
    }

    /// Cancels a job. Returns a message for the user.
    async fn cancel(&mut self, job: u64) -> String {
        match self {
            Self::Daemon(daemon) => match daemon.cancel(job, false).await {
                Ok(job) => job::cancelled(&job),
                Err(refusal) => refusal.message,
            },
            Self::Launches => launches::stop(job).await,
        }
    }
}

/// Handle of the polling task, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct Feed {
    source: Source,
    selected: watch::Sender<Option<u64>>,
    sender: mpsc::Sender<Update>,
    updates: mpsc::Receiver<Update>,
}

impl Feed {
    pub(super) fn start(source: Source, selected: Option<u64>) -> Self {
        let (sender, updates) = mpsc::channel(4);
        let (select, selected) = watch::channel(selected);
        tokio::spawn(poll(source.clone(), selected, sender.clone()));
        Self { source, selected: select, sender, updates }
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
        let (mut source, sender) = (self.source.clone(), self.sender.clone());
        tokio::spawn(async move {
            // The user may have quit.
            let _ = sender.send(Update::Notice(source.cancel(job).await)).await;
        });
    }
}

async fn poll(mut source: Source, mut selected: watch::Receiver<Option<u64>>, updates: mpsc::Sender<Update>) {
    loop {
        let job = *selected.borrow_and_update();
        let update = source.snapshot(job).await;
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

async fn of_daemon(daemon: &mut DaemonClient, job: Option<u64>) -> Result<Snapshot, Refusal> {
    let node = daemon.node().await?;
    let mut jobs = daemon.list(false, None).await?;
    for job in daemon.list(true, Some(MAX_ENDED_JOBS)).await? {
        // A job can end between the two calls. The second list has its newer state.
        jobs.retain(|known| known.id != job.id);
        jobs.push(job);
    }
    let detail = match job {
        // The daemon may have forgotten the job meanwhile.
        Some(job) => daemon.get(job).await.ok(),
        None => None,
    };
    Ok(Snapshot { node, jobs, detail })
}
