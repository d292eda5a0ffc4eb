//! The part of a job's state that is not in the journal: the reports of its agent while this daemon follows it.
//!
//! An agent runs as the job's user, so its reports are bounded before they are kept.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::watch;
use xlaunch_proto::convert::encoded_size;
use xlaunch_proto::v1::{Accounting, Progress, RankStatus, Restart, StatusReply};

use xlaunch_agent::status::board::MAX_PAST_RESTARTS;
use xlaunch_agent::status::history::{MAX_POINTS, is_sound};

/// Maximum size of a kept status in memory: enough for several hundred ranks.
const MAX_STATUS_BYTES: usize = 128 << 10;

/// Maximum length of a restart's cause.
const MAX_CAUSE_CHARS: usize = 500;

/// The way in which a running job is to be stopped. The value only ever increases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stop {
    #[default]
    No,
    /// Ask the agent to stop the job, and kill it when its grace period is over.
    Ask,
    Kill,
}

/// A job that is or was followed. The default is a job that an earlier daemon started.
#[derive(Debug, Default)]
pub(super) struct JobRuntime {
    /// True if the agent has begun.
    pub(super) runs: bool,
    /// Time at which this daemon has recorded the end of the job.
    pub(super) ended: Option<Instant>,
    /// Set to stop the job.
    pub(super) stop: watch::Sender<Stop>,
    /// The reason why the job is killed, if that was not requested by a user.
    pub(super) killed_for: Option<String>,
    /// Set to send this signal to the workers, once.
    pub(super) warning: watch::Sender<Option<i32>>,
    /// The last status, and the time at which it was received.
    pub(super) status: Option<(Arc<StatusReply>, Instant)>,
    /// Loss and throughput of a training job, oldest first.
    pub(super) history: Arc<[Progress]>,
    /// Failures of attempts below this number have been logged. `None` before the first status of a job that an earlier
    /// daemon started: that daemon has logged the earlier failures.
    logged_attempts: Option<u32>,
}

impl JobRuntime {
    /// Creates the state of a job. `fresh`: this daemon starts the agent rather than adopting it.
    pub(super) fn new(fresh: bool) -> Self {
        Self { logged_attempts: fresh.then_some(0), ..Self::default() }
    }

    /// Keeps a status of the agent unless it is too large. Returns the restarts that have not been logged yet.
    pub(super) fn update(&mut self, mut status: StatusReply) -> Vec<Restart> {
        let mut history = std::mem::take(&mut status.history);
        history.truncate(MAX_POINTS);
        self.history = history.into();
        // An empty rank takes two bytes on the wire, but several hundred in memory.
        if encoded_size(&status) + status.ranks.len() * size_of::<RankStatus>() > MAX_STATUS_BYTES {
            return Vec::new();
        }
        let mut ranks = HashSet::new();
        // Duplicate ranks are removed, because metrics have one series per rank.
        status.ranks.retain(|rank| ranks.insert(rank.rank));
        status.totals = status.totals.filter(is_sound);
        status.accounting = status.accounting.filter(Accounting::is_sound);
        status.past_restarts.truncate(MAX_PAST_RESTARTS);
        status
            .past_restarts
            .iter_mut()
            .for_each(|restart| truncate_chars(&mut restart.cause, MAX_CAUSE_CHARS));
        let failed = status.past_restarts.last().map_or(0, |restart| restart.attempt.saturating_add(1));
        let logged = self.logged_attempts.unwrap_or(failed);
        self.logged_attempts = Some(logged.max(failed));
        let new = status.past_restarts.iter().filter(|restart| restart.attempt >= logged).cloned().collect();
        self.status = Some((Arc::new(status), Instant::now()));
        new
    }
}

fn truncate_chars(text: &mut String, max: usize) {
    if let Some((end, _)) = text.char_indices().nth(max) {
        text.truncate(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_restart_is_reported_once_and_none_from_before_adoption() {
        let status = |attempt: u32| StatusReply {
            attempt,
            past_restarts: (0..attempt).map(|attempt| Restart { attempt, ..Restart::default() }).collect(),
            ..StatusReply::default()
        };
        let new = |job: &mut JobRuntime, attempt| -> Vec<u32> {
            job.update(status(attempt)).into_iter().map(|restart| restart.attempt).collect()
        };
        let mut fresh = JobRuntime::new(true);
        assert_eq!(
            (new(&mut fresh, 2), new(&mut fresh, 2), new(&mut fresh, 3)),
            (vec![0, 1], vec![], vec![2])
        );
        let mut adopted = JobRuntime::new(false);
        assert_eq!((new(&mut adopted, 2), new(&mut adopted, 3)), (vec![], vec![2]));
    }

    #[test]
    fn oversized_status_is_not_kept() {
        let mut job = JobRuntime::new(true);
        job.update(StatusReply { step: 1, ..StatusReply::default() });
        let (reason, history) = ("x".repeat(MAX_STATUS_BYTES), vec![Progress::default(); 100_000]);
        job.update(StatusReply { step: 2, reason, history, ..StatusReply::default() });
        assert_eq!(job.status.as_ref().unwrap().0.step, 1);
        assert_eq!(job.history.len(), MAX_POINTS);
        let ranks = [0, 1, 0].map(|rank| RankStatus { rank, ..RankStatus::default() }).to_vec();
        job.update(StatusReply { step: 1, ranks, ..StatusReply::default() });
        assert_eq!(job.status.as_ref().unwrap().0.ranks.len(), 2, "a rank is listed once");
        let ranks = vec![RankStatus::default(); 2000];
        job.update(StatusReply { step: 3, ranks, ..StatusReply::default() });
        assert_eq!(job.status.as_ref().unwrap().0.step, 1, "ranks are counted at their size in memory");
    }
}
