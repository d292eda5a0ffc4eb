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
//! An attempt starts in Rendezvous; workers of a command do not join one, so their attempts start in Running. The first
//! failure, or a stop, leads to Stopping, which ends with SIGKILL for the workers still there at the deadline. When the
//! last worker has exited, the coordinator is told how the attempt ended (`attempt_end`), and decides between another
//! attempt and the end of the job: see [`group`](crate::group). `blame` decides which of several failures on this node
//! came first.
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

mod attempt_end;
mod blame;
mod exits;
mod outcome;
mod types;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use xlaunch_proto::v1::{GroupEnd, NodeFailed};
use xlaunch_spec::exit::ExitCode;

use blame::Written;
pub use types::{Action, Event, Failure, Kind, Outcome, Phase, Rules, StopCause};
use xlaunch_host::spawn::Exit;

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

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reported {
    Consequence,
    Cause,
}

/// The state of a job.
#[derive(Debug)]
pub struct Job {
    rules: Rules,
    phase: Phase,
    attempt: u32,
    /// Rank of this node in the current attempt.
    node_rank: Option<u32>,
    /// Global rank of local rank 0.
    first_rank: u32,
    attempt_start: Instant,
    /// Whether each worker is alive, by local rank.
    alive: Vec<bool>,
    failures: Vec<Failure>,
    /// Time at which the first failure was noticed.
    failed_at: Option<Instant>,
    /// Same, until it is taken by [`take_failure`](Self::take_failure).
    new_failure: Option<Instant>,
    /// This attempt has got further than those before.
    progressed: bool,
    /// The job counts steps, so progress is judged by them. Kept across attempts.
    counts_steps: bool,
    /// Sessions of the trainer's ranks, from when they begin to train.
    sessions: blame::Sessions,
    /// Symptoms of a command's ranks that have exited.
    symptoms: blame::Symptoms,
    /// First rank of a command that has exited with code 0.
    first_done: Option<u32>,
    /// Ranks that the OOM killer has ended.
    out_of_memory: BTreeSet<u32>,
    /// Ranks that a signal has killed but that have not exited yet.
    dying: BTreeSet<u32>,
    /// Devices whose parameters differ from those of other ranks.
    differing: Vec<String>,
    /// Number of workers that have confirmed a checkpoint of the last step by their exit code.
    stopped: u32,
    stop: Option<StopCause>,
    /// The job had already failed when the stop was requested.
    failed_before_stop: bool,
    /// Latest time to which progress extends the deadline, while a trainer is asked to stop.
    stop_limit: Option<Instant>,
    /// A second SIGINT has killed the workers.
    interrupted: bool,
    /// The workers of this attempt have been sent a signal that ends them.
    terminated: bool,
    /// The workers of this attempt have been sent SIGKILL.
    killed: bool,
    /// Time at which the remaining workers are terminated or killed.
    deadline: Option<Instant>,
    /// Report of a failure of this attempt that the coordinator has: the cause, or only a consequence.
    reported: Option<Reported>,
    /// How the last attempt ended on this node.
    last: Option<Outcome>,
    /// Failures of the first attempt since the last that made progress.
    first_failures: Vec<Failure>,
    /// The end of the job, which takes effect when the last worker is gone.
    group_end: Option<GroupEnd>,
    /// Step and path of the newest checkpoint of this run.
    checkpoint: Option<(u64, PathBuf)>,
    /// Reason why the checkpoint last reported in this attempt is not complete.
    incomplete: Option<String>,
}

impl Job {
    /// Creates a job that waits for its first attempt.
    pub fn new(rules: Rules, now: Instant) -> Self {
        Self {
            phase: Phase::Waiting,
            attempt: 0,
            node_rank: None,
            first_rank: 0,
            attempt_start: now,
            alive: vec![false; rules.workers as usize],
            failures: Vec::new(),
            failed_at: None,
            new_failure: None,
            progressed: false,
            counts_steps: false,
            sessions: blame::Sessions::new(),
            symptoms: blame::Symptoms::new(),
            first_done: None,
            out_of_memory: BTreeSet::new(),
            dying: BTreeSet::new(),
            differing: Vec::new(),
            stopped: 0,
            stop: None,
            failed_before_stop: false,
            stop_limit: None,
            interrupted: false,
            terminated: false,
            killed: false,
            deadline: None,
            reported: None,
            last: None,
            first_failures: Vec::new(),
            group_end: None,
            checkpoint: None,
            incomplete: None,
            rules,
        }
    }

    /// Returns the current phase.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Returns the current attempt, counted from 0.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Time at which an [`Event::Tick`] is due.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Returns the time at which an attempt's first failure was noticed, once per attempt.
    pub(crate) fn take_failure(&mut self) -> Option<Instant> {
        self.new_failure.take()
    }

    /// Handles an event at `now`. Returns the actions, in order.
    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match self.phase {
            Phase::Ended => Vec::new(),
            Phase::Waiting => self.between_attempts(event, now),
            _ => {
                let mut actions = self.during_attempt(event, now);
                actions.extend(self.report_failure());
                if self.alive.iter().all(|alive| !alive) {
                    actions.extend(self.attempt_ended(now));
                }
                actions
            }
        }
    }

    fn between_attempts(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Begin { attempt, node_rank, first_rank } => {
                (self.node_rank, self.first_rank) = (Some(node_rank), first_rank);
                self.begin_attempt(attempt, now)
            }
            Event::Restarting(restarting) => self.restarting(restarting),
            Event::GroupEnded(end) => self.end(&end),
            Event::Stop(cause) => {
                self.stop = Some(cause);
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    fn during_attempt(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::SpawnFailed { rank, reason, exit } => {
                self.alive[rank as usize] = false;
                let message = format!("failed to start: {reason}");
                self.fail(Failure::of_rank(rank, message, exit), now)
            }
            Event::Begin { .. } | Event::Restarting(_) => Vec::new(),
            Event::PeerFailed(message) => self.peer_failed(message, now),
            Event::Pause(reason) => self.pause(reason, now),
            Event::CutOff(reason) => self.cut_off(reason, now),
            Event::GroupEnded(end) => {
                self.group_end = Some(end);
                self.kill()
            }
            Event::AllJoined => {
                if self.phase == Phase::Rendezvous {
                    self.phase = Phase::Running;
                }
                Vec::new()
            }
            Event::RendezvousFailed(message) => {
                self.fail(Failure::of_group(message, ExitCode::Rendezvous), now)
            }
            Event::OwnError { rank, message, exit } => self.own_error(rank, message, exit, now),
            Event::ReplicasDiffer { ranks, message } => self.replicas_differ(ranks, message, now),
            Event::SessionOpened { .. } | Event::Finished { .. } | Event::SessionClosed { .. } => {
                self.session_event(&event, now)
            }
            Event::OomKilled { rank } => {
                self.out_of_memory.insert(rank);
                Vec::new()
            }
            Event::Symptom { rank, error, lost_peer, at } => {
                let kind = if lost_peer { Written::LostPeer } else { Written::OwnError };
                self.symptoms.insert(rank, blame::Symptom { kind, error: Some(error), at });
                Vec::new()
            }
            Event::Advanced { by_steps } => {
                self.progressed = true;
                self.counts_steps |= by_steps;
                Vec::new()
            }
            Event::Hung { ranks, message } => self.hung(&ranks, &message, now),
            Event::NoStacks if self.rules.kind == Kind::Command && !self.terminated => {
                self.terminate(SIGTERM, now)
            }
            Event::NoStacks => Vec::new(),
            Event::Killed { rank, signal } => self.killed_by(rank, signal, now),
            Event::Exited { rank, exit } => self.exited(rank, exit, now),
            Event::Stop(cause) => self.stop(cause, now),
            Event::Progress => {
                if let Some(limit) = self.stop_limit {
                    self.deadline = Some(limit.min(now + self.rules.shutdown_timeout));
                }
                Vec::new()
            }
            Event::Checkpoint { step, path } => {
                (self.checkpoint, self.incomplete) = (Some((step, path)), None);
                Vec::new()
            }
            Event::CheckpointIncomplete(problem) => {
                self.incomplete = Some(problem);
                Vec::new()
            }
            Event::Tick => self.tick(now),
        }
    }

    /// Returns whether the workers of this node have finished their part of a command's attempt.
    pub fn waits_for_other_nodes(&self) -> bool {
        let is_done = |last: &Outcome| last.root.is_none() && last.others.is_empty() && !last.stopped;
        self.rules.kind == Kind::Command
            && self.phase == Phase::Waiting
            && self.last.as_ref().is_some_and(is_done)
    }

    fn exited(&mut self, rank: u32, exit: Exit, now: Instant) -> Vec<Action> {
        self.alive[rank as usize] = false;
        // There is at most one: the error that the rank has reported, or its hang.
        let reported = self.failures.iter_mut().find(|failure| failure.rank == Some(rank));
        if let Some(failure) = reported {
            failure.exited(exit);
            return self.after_failure(now);
        }
        let failure = match self.rules.kind {
            Kind::Trainer if exit == exits::STOPPED && self.stop.is_some() => {
                self.stopped += 1;
                None
            }
            Kind::Trainer => exits::of_trainer(rank, exit, &self.circumstances(rank)),
            Kind::Command => self.command_failure(rank, exit, now),
        };
        match failure {
            Some(failure) => self.fail(failure, now),
            None if exit == Exit::Code(0) => self.exited_with_0(rank, now),
            None => Vec::new(),
        }
    }

    /// A trainer's worker has been killed but has not exited. The cause is known, so its peers need not wait for its
    /// exit.
    fn killed_by(&mut self, rank: u32, signal: i32, now: Instant) -> Vec<Action> {
        let is_known = self.failures.iter().any(|failure| failure.rank == Some(rank));
        if self.rules.kind == Kind::Command || self.killed || is_known || !self.is_alive(rank) {
            return Vec::new();
        }
        self.dying.insert(rank);
        let failure = exits::of_trainer(rank, Exit::Signal(signal), &self.circumstances(rank));
        failure.map_or_else(Vec::new, |failure| self.fail(failure, now))
    }

    fn is_alive(&self, rank: u32) -> bool {
        self.alive.get(rank as usize).is_some_and(|alive| *alive)
    }

    fn circumstances(&self, rank: u32) -> exits::Circumstances {
        exits::Circumstances {
            joining: self.phase == Phase::Rendezvous,
            another_failed: !self.failures.is_empty(),
            killed: self.killed || self.interrupted,
            out_of_memory: self.out_of_memory.contains(&rank),
            replicas_differ: !self.differing.is_empty(),
        }
    }

    fn fail(&mut self, failure: Failure, now: Instant) -> Vec<Action> {
        self.failures.push(failure);
        self.note_failure(now);
        self.phase = Phase::Stopping;
        self.after_failure(now)
    }

    fn note_failure(&mut self, now: Instant) {
        if self.failed_at.is_none() {
            (self.failed_at, self.new_failure) = (Some(now), Some(now));
        }
    }

    /// Ends the other workers once the cause of the failure is known.
    fn after_failure(&mut self, now: Instant) -> Vec<Action> {
        if self.killed || (self.rules.kind == Kind::Command && self.terminated) {
            return Vec::new();
        }
        let is_cause = |failure: &Failure| failure.elsewhere || !failure.consequence;
        let is_known = self.first_done.is_some() || self.failures.iter().any(is_cause);
        let is_exiting =
            self.failures.iter().filter_map(|failure| failure.rank).any(|rank| self.is_about_to_exit(rank));
        if self.rules.kind == Kind::Command && is_known {
            // Hanging ranks may still print their stacks.
            return if is_exiting { Vec::new() } else { self.terminate(SIGTERM, now) };
        }
        if is_known && !is_exiting {
            return [self.kill(), self.prepare_next()].concat();
        }
        let due = now + FAILURE_GRACE;
        self.stop_limit = None;
        // The first failure sets the deadline; later ones do not move it.
        self.deadline = Some(self.deadline.map_or(due, |deadline| deadline.min(due)));
        Vec::new()
    }

    /// Returns whether a rank that has failed is going to exit by itself.
    fn is_about_to_exit(&self, rank: u32) -> bool {
        self.is_alive(rank) && !self.dying.contains(&rank)
    }

    /// Prepares the next attempt, because starting processes takes as long as ending others. Whether they are needed is
    /// decided when those have ended.
    pub(super) fn prepare_next(&self) -> Vec<Action> {
        if self.stop.is_none() && self.rules.has_restarts {
            vec![Action::Prepare { attempt: self.attempt + 1 }]
        } else {
            Vec::new()
        }
    }

    fn terminate(&mut self, signal: i32, now: Instant) -> Vec<Action> {
        self.terminated = true;
        self.deadline = Some(now + self.rules.shutdown_timeout);
        vec![Action::Signal(signal)]
    }

    fn kill(&mut self) -> Vec<Action> {
        (self.terminated, self.killed) = (true, true);
        (self.deadline, self.stop_limit) = (None, None);
        vec![Action::Kill]
    }

    fn stop(&mut self, cause: StopCause, now: Instant) -> Vec<Action> {
        if self.stop.is_some_and(|earlier| earlier != StopCause::Pause) {
            if cause == StopCause::Signal(SIGINT) && !self.interrupted {
                self.interrupted = true;
                return vec![Action::Notify("second interrupt: killing the workers".into()), Action::Kill];
            }
            return Vec::new();
        }
        self.stop = Some(cause);
        let joining = self.phase == Phase::Rendezvous;
        self.phase = Phase::Stopping;
        self.failed_before_stop = !self.failures.is_empty();
        if self.failed_before_stop {
            return Vec::new();
        }
        if self.terminated || self.stop_limit.is_some() {
            // The workers have already been asked to end, because the group changes.
            return Vec::new();
        }
        let by_interrupt = cause == StopCause::Signal(SIGINT);
        let again = if by_interrupt { " (interrupt again to kill the workers)" } else { "" };
        self.ask_to_stop(cause, joining, again, now)
    }

    /// Tells the workers to end, and tells the user.
    fn ask_to_stop(&mut self, cause: StopCause, joining: bool, again: &str, now: Instant) -> Vec<Action> {
        match self.rules.kind {
            Kind::Command => {
                let seconds = self.rules.shutdown_timeout.as_secs_f64();
                let message = format!("stopping: the workers have {seconds} s to exit{again}");
                [vec![Action::Notify(message)], self.terminate(cause.signal(), now)].concat()
            }
            Kind::Trainer if joining => {
                let notice = Action::Notify("stopping before training began".into());
                [vec![notice], self.kill()].concat()
            }
            Kind::Trainer => {
                let Rules { shutdown_timeout, shutdown_timeout_max, .. } = self.rules;
                self.deadline = Some(now + shutdown_timeout);
                self.stop_limit = Some(now + shutdown_timeout.max(shutdown_timeout_max));
                let message = format!("stopping at the next step, with a checkpoint{again}");
                vec![Action::Notify(message), Action::RequestStop]
            }
        }
    }

    /// Workers on another node have failed. The workers here may not have noticed, or never will.
    fn peer_failed(&mut self, message: String, now: Instant) -> Vec<Action> {
        if self.failures.iter().any(|failure| failure.rank.is_none()) {
            return Vec::new();
        }
        let failure = Failure::of_group(message, ExitCode::Retryable);
        // Failures noticed here first are consequences of it.
        self.failures.push(Failure { consequence: true, elsewhere: true, ..failure });
        self.note_failure(now);
        self.phase = Phase::Stopping;
        self.after_failure(now)
    }

    /// Makes the workers save and end, because another attempt follows.
    fn pause(&mut self, reason: String, now: Instant) -> Vec<Action> {
        if self.stop.is_some() || !self.failures.is_empty() {
            return Vec::new();
        }
        let notice = Action::Notify(format!("{reason}: starting again with a checkpoint"));
        let joining = self.phase == Phase::Rendezvous;
        (self.stop, self.phase) = (Some(StopCause::Pause), Phase::Stopping);
        let actions = self.ask_to_stop(StopCause::Pause, joining, "", now);
        let others = actions.into_iter().filter(|action| !matches!(action, Action::Notify(_)));
        std::iter::once(notice).chain(others).collect()
    }

    /// Kills the workers, because the coordinator may start the ranks of this node elsewhere.
    fn cut_off(&mut self, reason: String, now: Instant) -> Vec<Action> {
        let line = format!("{reason}: ending the workers of this node");
        // Only the coordinator knows whether this node, the network or the coordinator itself is to blame.
        let failure = Failure::of_group(reason, ExitCode::Retryable);
        self.failures.push(Failure { consequence: true, ..failure });
        self.note_failure(now);
        self.phase = Phase::Stopping;
        [vec![Action::Notify(line)], self.kill()].concat()
    }

    /// Reports the first failure to the coordinator, and once more if a cause is found after a mere loss of a peer.
    fn report_failure(&mut self) -> Option<Action> {
        let own = || self.failures.iter().filter(|failure| !failure.elsewhere);
        let is_stopped = self.stop.is_some();
        let root = own().find(|failure| !failure.consequence).or_else(|| own().next())?;
        // The loss of a peer is reported at once too: its node may not know that it has failed.
        let kind = if root.consequence { Reported::Consequence } else { Reported::Cause };
        if self.reported >= Some(kind) || is_stopped {
            return None;
        }
        let cause = Some(self.cause(root));
        self.reported = Some(kind);
        Some(Action::ReportFailure(NodeFailed { attempt: self.attempt, cause }))
    }

    fn tick(&mut self, now: Instant) -> Vec<Action> {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return Vec::new();
        }
        if self.rules.kind == Kind::Command && !self.terminated {
            // Ranks have lost a peer, but no other rank has failed in the meantime; or not all hanging ranks have
            // printed their stacks.
            return self.terminate(SIGTERM, now);
        }
        let alive = (0..).zip(&self.alive).filter(|(_, alive)| **alive);
        let ranks = alive
            .map(|(rank, _): (u32, _)| (self.first_rank + rank).to_string())
            .collect::<Vec<_>>()
            .join(", ");
        let notice = Action::Notify(format!("killing ranks that did not exit in time: {ranks}"));
        [vec![notice], self.kill()].concat()
    }
}

fn first_phase(kind: Kind) -> Phase {
    match kind {
        Kind::Trainer => Phase::Rendezvous,
        Kind::Command => Phase::Running,
    }
}
