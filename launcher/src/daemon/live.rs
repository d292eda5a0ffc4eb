//! What is known of a job beside the journal, while this daemon runs: what its agent says, and how that went.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::watch;
use xlaunch_proto::convert::encoded_size;
use xlaunch_proto::v1::{JobKind, Progress, RankStatus, StatusReply};

use super::view::POINTS;
use crate::clock::unix_ms;

/// Bytes in memory of what an agent says, which is its user's word: those of some hundred ranks.
const STATUS: usize = 128 << 10;

/// A job that is followed.
#[derive(Debug)]
pub(super) struct Live {
    /// Its agent has begun.
    pub(super) runs: bool,
    /// Turned true, it is asked to end.
    pub(super) stop: watch::Sender<bool>,
    pub(super) status: Option<(Arc<StatusReply>, Instant)>,
    pub(super) history: History,
}

impl Live {
    /// A job whose agent is started, or looked for.
    pub(super) fn new() -> Self {
        Self { runs: false, stop: watch::Sender::new(false), status: None, history: History::default() }
    }

    /// A job that has ended, as its agent left it.
    pub(super) fn ended(status: StatusReply) -> Self {
        let mut live = Self::new();
        live.keep(status);
        live
    }

    /// Its agent has said how it does.
    pub(super) fn says(&mut self, status: StatusReply) {
        self.history.add(&status);
        self.keep(status);
    }

    /// A few bytes on the wire may be a rank, which takes some hundred here: what is too large is not kept.
    fn keep(&mut self, status: StatusReply) {
        if encoded_size(&status) + status.ranks.len() * size_of::<RankStatus>() <= STATUS {
            self.status = Some((Arc::new(status), Instant::now()));
        }
    }
}

/// The progress of a training job, thinned out evenly: when there are too many points, every second one goes, and only so
/// many are taken from then on.
#[derive(Debug, Default)]
pub(super) struct History {
    points: Vec<Progress>,
    /// Of so many points that come, one is taken.
    stride: u64,
    come: u64,
}

impl History {
    fn add(&mut self, status: &StatusReply) {
        if status.kind() != JobKind::Trainer || status.step == 0 {
            return;
        }
        if self.points.last().is_some_and(|last| last.step == status.step) {
            return;
        }
        if self.points.last().is_some_and(|last| last.step > status.step) {
            // A new attempt began at an earlier checkpoint: what was lost is not shown twice.
            self.points.retain(|point| point.step < status.step);
        }
        self.stride = self.stride.max(1);
        self.come += 1;
        if !self.come.is_multiple_of(self.stride) {
            return;
        }
        self.points.push(Progress {
            unix_ms: unix_ms(),
            step: status.step,
            loss: status.loss,
            tokens_per_second: status.tokens_per_second,
        });
        if self.points.len() > POINTS {
            let mut keep = false;
            self.points.retain(|_| {
                keep = !keep;
                keep
            });
            self.stride *= 2;
        }
    }

    pub(super) fn points(&self) -> Arc<[Progress]> {
        self.points.as_slice().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_history_is_thinned_out_evenly_and_a_new_attempt_takes_back_what_was_lost() {
        let mut history = History::default();
        let status = |step| StatusReply { kind: JobKind::Trainer.into(), step, ..StatusReply::default() };
        for step in 1..=10_000 {
            history.add(&status(step));
            history.add(&status(step));
        }
        let steps: Vec<u64> = history.points().iter().map(|point| point.step).collect();
        assert!((POINTS / 2..=POINTS).contains(&steps.len()), "{}", steps.len());
        let gaps: Vec<u64> = steps.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let (least, most) = (gaps.iter().min().unwrap(), gaps.iter().max().unwrap());
        assert!(most <= &(2 * least) && steps[0] < 100 && steps.last().unwrap() > &9_900, "{least} {most}");
        history.add(&status(5_000));
        assert!(history.points().iter().all(|point| point.step <= 5_000));
    }
}
