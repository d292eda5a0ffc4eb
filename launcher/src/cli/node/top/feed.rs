//! What the daemon says, once a second and when another job is selected; orders to it, one by one.

use std::time::Duration;

use tokio::sync::{mpsc, watch};
use xlaunch_proto::v1::{CancelRequest, GetRequest, ListRequest, NodeStatusRequest};

use super::state::{News, Snapshot};
use crate::cli::node::connect::Daemon;
use crate::cli::node::control;
use xlaunch_agent::Refusal;

/// Pause between two looks.
const EVERY: Duration = Duration::from_secs(1);
/// Ended jobs that are shown.
const ENDED: u32 = 50;

/// The task that asks. It ends when nobody wants its news.
#[derive(Debug)]
pub(super) struct Feed {
    daemon: Daemon,
    selected: watch::Sender<Option<u64>>,
    sender: mpsc::Sender<News>,
    news: mpsc::Receiver<News>,
}

impl Feed {
    pub(super) fn start(daemon: Daemon, selected: Option<u64>) -> Self {
        let (sender, news) = mpsc::channel(4);
        let (select, selected) = watch::channel(selected);
        tokio::spawn(keep_asking(daemon.clone(), selected, sender.clone()));
        Self { daemon, selected: select, sender, news }
    }

    /// What comes next.
    pub(super) async fn next(&mut self) -> News {
        match self.news.recv().await {
            Some(news) => news,
            // Not reached: a sender is held here.
            None => std::future::pending().await,
        }
    }

    /// The job that is wanted with everything there is.
    pub(super) fn select(&self, job: Option<u64>) {
        self.selected.send_if_modified(|selected| std::mem::replace(selected, job) != job);
    }

    /// Cancels a job; what becomes of it is news.
    pub(super) fn cancel(&self, job: u64) {
        let (mut daemon, sender) = (self.daemon.clone(), self.sender.clone());
        tokio::spawn(async move {
            let notice = match daemon.client.cancel(CancelRequest { job }).await {
                Ok(reply) => control::cancelled(&reply.into_inner()),
                Err(status) => daemon.refusal(&status).message,
            };
            // Nobody may want to know any more.
            let _ = sender.send(News::Notice(notice)).await;
        });
    }
}

async fn keep_asking(
    mut daemon: Daemon,
    mut selected: watch::Receiver<Option<u64>>,
    news: mpsc::Sender<News>,
) {
    loop {
        let job = *selected.borrow_and_update();
        let answer = ask(&mut daemon, job).await.unwrap_or_else(|refusal| News::Problem(refusal.message));
        if news.send(answer).await.is_err() {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(EVERY) => {}
            changed = selected.changed() => if changed.is_err() {
                return;
            },
        }
    }
}

/// The node as it is now, with `job` in full.
pub(super) async fn ask(daemon: &mut Daemon, job: Option<u64>) -> Result<News, Refusal> {
    let mut client = daemon.client.clone();
    let answers = async {
        let node = client.status(NodeStatusRequest {}).await?.into_inner();
        let mut jobs = client.list(ListRequest { ended: false, limit: 0 }).await?.into_inner().jobs;
        let ended = client.list(ListRequest { ended: true, limit: ENDED }).await?.into_inner().jobs;
        for job in ended {
            // The first list has those that go on; one that has ended in between is shown as it is in the second.
            jobs.retain(|known| known.id != job.id);
            jobs.push(job);
        }
        let detail = match job {
            // A job may be forgotten while it is looked at.
            Some(job) => client.get(GetRequest { job }).await.ok().map(tonic::Response::into_inner),
            None => None,
        };
        Ok::<_, tonic::Status>(Snapshot { node, jobs, detail })
    };
    answers.await.map(|snapshot| News::Snapshot(Box::new(snapshot))).map_err(|status| daemon.refusal(&status))
}
