//! The state machine of a job on one node: a pure function from (state, event, now) to actions.
//!
//! ```text
//!          Begin               all joined                last worker exited
//! Waiting ------> Rendezvous ---------------> Running ------------------------.
//!    ^                 |  failed, stop           |  a worker failed, stop      |
//!    |                 '------------.   .--------'                             |
//!    |                              v   v               deadline               |
//!    |                             Stopping ----------------------> SIGKILL ---+
//!    '-------------------------------------------------- report to coordinator-'     Waiting --GroupEnded--> Ended
//! ```
//! An `Attempt` owns everything that is known while it lasts, from Rendezvous to the exit of its last worker; a [`Job`]
//! keeps only what outlives it. Workers of a command do not join a rendezvous, so their attempts start in Running. The
//! first failure, or a stop, leads to Stopping, which ends with SIGKILL for the workers still there at the deadline
//! (see `Shutdown`). When the last worker has exited, the coordinator is told how the attempt ended (`attempt_end`),
//! and decides between another attempt and the end of the job: see [`xlaunch_cluster`]. `blame` decides which of
//! several failures on this node came first.
//!
//! - **Ranks that hang** are a failure reported by the hang detector. A trainer's workers are killed at once. Those of
//!   a command first print their Python stacks, within [`STACKS_TIMEOUT`]; then all are terminated as after any
//!   failure.
//! - **Preemption**: a command's worker that exits with a requeue code ends the job without a restart.
//! - **A command's** workers are sent SIGTERM after a failure, or the signal that xlaunch received, and SIGKILL
//!   `shutdown_timeout` later.
//! - **A trainer's** workers ignore signals, and hold nothing that SIGTERM would save. A stop asks them for a
//!   checkpoint of the next step. The deadline, `shutdown_timeout`, is extended as long as saving makes progress, up to
//!   `shutdown_timeout_max`. After a failure they are killed as soon as its cause is known: see [`FAILURE_GRACE`].
//!
//! Invariants: every started worker is accounted for by exactly one exit; the job ends once, after its last worker; an
//! unknown exit is never success; a stopped training job ends as stopped only if every rank has confirmed the
//! checkpoint of the last step.

mod attempt;
mod attempt_end;
mod blame;
mod exits;
mod stage;
mod types;
mod worker;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use xlaunch_proto::v1::JobState;

use crate::ending::{Ending, Failure};
use attempt::{Attempt, Place};
use stage::Stage;
pub use types::{Action, Event, Kind, Rules, StopCause};

/// Time for ranks of a trainer to exit by themselves after a failure whose cause is not known yet. A rank that fails
/// breaks the connections of the others, and those may be the first to exit; a rank that has reported an error of its
/// own still has to exit.
const FAILURE_GRACE: Duration = Duration::from_secs(5);
/// An attempt of a command that ran this long before it failed counts as progress, unless the command counts steps.
const HEALTHY_AFTER: Duration = Duration::from_secs(60);
/// Time for the Python programs of hanging ranks to print their stacks before they are terminated.
const STACKS_TIMEOUT: Duration = Duration::from_secs(5);
const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;

/// The state of a job.
#[derive(Debug)]
pub struct Job {
    rules: Arc<Rules>,
    /// Place of this node in the current or last attempt.
    place: Place,
    phase: Phase,
    /// The job counts steps, so progress is judged by them.
    counts_steps: bool,
    /// Step and path of the newest checkpoint of this run.
    checkpoint: Option<(u64, PathBuf)>,
    /// Failures of the first attempt since the last that made progress.
    first_failures: Vec<Failure>,
    /// See [`take_failure`](Self::take_failure).
    new_failure: Option<Instant>,
}

#[derive(Debug)]
enum Phase {
    /// No workers exist: the coordinator begins the next attempt or ends the job. Holds how the last attempt ended on
    /// this node.
    Waiting(Option<Box<Ending>>),
    Attempt(Box<Attempt>),
    Ended {
        failed: bool,
    },
}

impl Job {
    /// Creates a job that waits for its first attempt.
    pub fn new(rules: Rules) -> Self {
        Self {
            rules: Arc::new(rules),
            place: Place::default(),
            phase: Phase::Waiting(None),
            counts_steps: false,
            checkpoint: None,
            first_failures: Vec::new(),
            new_failure: None,
        }
    }

    /// Returns the state to show to users.
    pub fn state(&self) -> JobState {
        match &self.phase {
            Phase::Waiting(_) => JobState::Starting,
            Phase::Attempt(attempt) => match attempt.stage {
                Stage::Rendezvous => JobState::Rendezvous,
                Stage::Running => JobState::Running,
                Stage::Stopping { .. } => JobState::Stopping,
            },
            Phase::Ended { failed: true } => JobState::Failed,
            Phase::Ended { failed: false } => JobState::Done,
        }
    }

    /// Returns the current or last attempt, counted from 0.
    pub fn attempt(&self) -> u32 {
        self.place.attempt
    }

    /// Time at which an [`Event::Tick`] is due.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Attempt(attempt) => attempt.deadline(),
            Phase::Waiting(_) | Phase::Ended { .. } => None,
        }
    }

    /// Returns the time at which an attempt's first failure was noticed, once per attempt.
    pub(crate) fn take_failure(&mut self) -> Option<Instant> {
        self.new_failure.take()
    }

    /// Returns whether the workers of this node have finished their part of a command's attempt.
    pub fn waits_for_other_nodes(&self) -> bool {
        let is_done = |last: &Ending| last.root.is_none() && last.others.is_empty() && !last.stopped;
        self.rules.kind == Kind::Command && matches!(&self.phase, Phase::Waiting(Some(last)) if is_done(last))
    }

    /// Handles an event at `now`. Returns the actions, in order.
    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let attempt = match &mut self.phase {
            Phase::Waiting(_) => return self.between_attempts(event, now),
            Phase::Attempt(attempt) => attempt,
            Phase::Ended { .. } => return Vec::new(),
        };
        // These outlive the attempt.
        match &event {
            Event::Advanced { by_steps } => self.counts_steps |= by_steps,
            Event::Checkpoint { step, path } => self.checkpoint = Some((*step, path.clone())),
            _ => {}
        }
        let had_failed = attempt.failed_at.is_some();
        let mut actions = attempt.handle(event, now);
        if !had_failed {
            self.new_failure = attempt.failed_at.or(self.new_failure);
        }
        actions.extend(attempt.report_failure());
        if attempt.is_over() {
            actions.extend(self.attempt_ended(now));
        }
        actions
    }

    fn between_attempts(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Begin { attempt, node_rank, first_rank } => {
                self.place = Place { attempt, node_rank: Some(node_rank), first_rank };
                self.phase = Phase::Attempt(Box::new(Attempt::new(self.rules.clone(), self.place, now)));
                vec![Action::Start { attempt }]
            }
            Event::Restarting(restarting) => self.restarting(restarting),
            Event::GroupEnded(end) => self.end(&end),
            _ => Vec::new(),
        }
    }
}
