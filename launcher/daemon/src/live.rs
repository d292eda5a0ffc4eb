//! What is known of a job beside the journal, while this daemon runs: what its agent says, and how that went.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::watch;
use xlaunch_proto::convert::encoded_size;
use xlaunch_proto::v1::{Progress, RankStatus, Restart, StatusReply};

use xlaunch_agent::status::board::MAX_PAST_RESTARTS;
use xlaunch_agent::status::history::{MAX_POINTS, is_sound};

/// Bytes in memory of what an agent says, which is its user's word: those of some hundred ranks.
const STATUS: usize = 128 << 10;

/// Characters of a failure's cause.
const CAUSE: usize = 500;

/// A job that is followed, or was. The default is one whose beginning another daemon has seen.
#[derive(Debug, Default)]
pub(super) struct Live {
    /// Its agent has begun.
    pub(super) runs: bool,
    /// Turned true, it is asked to end.
    pub(super) stop: watch::Sender<bool>,
    pub(super) status: Option<(Arc<StatusReply>, Instant)>,
    /// Of a training job, oldest first.
    pub(super) history: Arc<[Progress]>,
    /// The attempts whose failures have been told, where this daemon has followed it from its beginning or heard of it.
    told: Option<u32>,
}

impl Live {
    /// A job whose agent is started, or looked for.
    pub(super) fn new(fresh: bool) -> Self {
        Self { told: fresh.then_some(0), ..Self::default() }
    }

    /// Its agent has said how it does; the restarts that are new. A few bytes on the wire may be a rank, which takes some
    /// hundred here: what is too large is not kept.
    pub(super) fn says(&mut self, mut status: StatusReply) -> Vec<Restart> {
        let mut history = std::mem::take(&mut status.history);
        history.truncate(MAX_POINTS);
        self.history = history.into();
        if encoded_size(&status) + status.ranks.len() * size_of::<RankStatus>() > STATUS {
            return Vec::new();
        }
        status.totals = status.totals.filter(is_sound);
        status.past_restarts.truncate(MAX_PAST_RESTARTS);
        status.past_restarts.iter_mut().for_each(|restart| cut(&mut restart.cause));
        let failed = status.past_restarts.last().map_or(0, |restart| restart.attempt.saturating_add(1));
        let told = self.told.unwrap_or(failed);
        self.told = Some(told.max(failed));
        let new = status.past_restarts.iter().filter(|restart| restart.attempt >= told).cloned().collect();
        self.status = Some((Arc::new(status), Instant::now()));
        new
    }
}

fn cut(text: &mut String) {
    if let Some((end, _)) = text.char_indices().nth(CAUSE) {
        text.truncate(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_restart_is_told_once_and_those_of_another_daemons_time_never() {
        let status = |attempt: u32| StatusReply {
            attempt,
            past_restarts: (0..attempt).map(|attempt| Restart { attempt, ..Restart::default() }).collect(),
            ..StatusReply::default()
        };
        let told = |live: &mut Live, attempt| -> Vec<u32> {
            live.says(status(attempt)).into_iter().map(|restart| restart.attempt).collect()
        };
        let mut fresh = Live::new(true);
        assert_eq!(
            (told(&mut fresh, 2), told(&mut fresh, 2), told(&mut fresh, 3)),
            (vec![0, 1], vec![], vec![2])
        );
        let mut adopted = Live::new(false);
        assert_eq!((told(&mut adopted, 2), told(&mut adopted, 3)), (vec![], vec![2]));
    }

    #[test]
    fn what_is_too_large_is_not_kept() {
        let mut live = Live::new(true);
        live.says(StatusReply { step: 1, ..StatusReply::default() });
        let history = vec![Progress::default(); 100_000];
        live.says(StatusReply { step: 2, reason: "x".repeat(STATUS), history, ..StatusReply::default() });
        assert_eq!(live.status.as_ref().unwrap().0.step, 1);
        assert_eq!(live.history.len(), MAX_POINTS);
    }
}
