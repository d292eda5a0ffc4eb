//! The state machine of a job: a pure function from (state, event, now) to actions.
//!
//! ```text
//!                 all joined                last worker exited, none failed
//! Rendezvous ---------------> Running ------------------------------------> Ended
//!      |  failed, stop           |  a worker failed, stop                      ^
//!      '------------.   .--------'                                             | all exited, no restart
//!                   v   v               deadline                               |
//!                  Stopping ----------------------------> SIGKILL -------------'--> RestartDelay --> next attempt
//! ```
//! A job starts in Rendezvous; workers of a command do not join one, so their attempts start in Running. The first
//! failure, or a stop, leads to Stopping, which ends with SIGKILL for those that are still there at the deadline. When
//! the last worker has exited, the restart policy decides between Ended and another attempt.
//!
//! - **Ranks that hang** are a failure that the hang detector reports: a trainer's workers are killed at once. Those of
//!   a command first print their Python stacks, for [`STACKS_TIMEOUT`] at most; then all are terminated as after any
//!   failure.
//! - **Preemption**: a command's worker that exits with a requeue code ends the job without a restart.
//! - **A command** is sent SIGTERM after a failure, or the signal that xlaunch received, and `shutdown_timeout` later
//!   SIGKILL.
//! - **A trainer's** workers ignore signals, and hold nothing that SIGTERM would save. A stop asks them for a
//!   checkpoint of the next step. The deadline, `shutdown_timeout`, moves as long as saving makes progress, up to
//!   `shutdown_timeout_max`. After a failure they are killed as soon as its cause is known: see [`FAILURE_GRACE`].
//!
//! Invariants: every started worker is accounted for by exactly one exit; the job ends once, after its last worker; an
//! unknown exit is never success; after a stop there is no restart; a stopped training job ends as such only if every
//! rank has confirmed the checkpoint of the last step.

mod exits;
mod outcome;
mod policy;
mod types;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use xlaunch_proto::exit::ExitCode;

use crate::spawn::Exit;
use policy::{AttemptFailure, Decision, Policy};
pub use types::{Action, Event, Failure, Kind, Outcome, Phase, Rules, StopCause};

/// For ranks of a trainer to exit by themselves after a failure whose cause is not known yet. A rank that fails breaks
/// the connections of the others, and those may be the first to exit; and a rank that has reported an error of its own
/// still has to exit.
const FAILURE_GRACE: Duration = Duration::from_secs(5);
/// For the Python programs of ranks that hang to print their stacks, before they are terminated.
const STACKS_TIMEOUT: Duration = Duration::from_secs(5);
const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;

/// The state of a job.
#[derive(Debug)]
pub struct Job {
    rules: Rules,
    policy: Policy,
    phase: Phase,
    attempt: u32,
    attempt_start: Instant,
    /// By rank.
    alive: Vec<bool>,
    failures: Vec<Failure>,
    /// Workers that have confirmed a checkpoint of the last step by their exit code.
    stopped: u32,
    stop: Option<StopCause>,
    /// The job had failed when the stop was requested.
    failed_before_stop: bool,
    /// Up to when progress moves the deadline: while a trainer is asked to stop.
    stop_limit: Option<Instant>,
    /// A second SIGINT has killed the workers.
    interrupted: bool,
    /// The workers of this attempt were sent a signal that ends them.
    terminated: bool,
    /// That signal was SIGKILL.
    killed: bool,
    /// When workers that have not exited are killed, or the next attempt starts.
    deadline: Option<Instant>,
    /// During the restart delay: the failures of the last attempt, in case that no other follows.
    last_failures: Vec<Failure>,
    /// The newest checkpoint of this run.
    checkpoint: Option<(u64, PathBuf)>,
}

impl Job {
    /// A job whose first attempt is about to start.
    pub fn new(rules: Rules, now: Instant) -> Self {
        Self {
            policy: Policy::new(rules.restarts.clone(), rules.seed),
            phase: first_phase(rules.kind),
            attempt: 0,
            attempt_start: now,
            alive: vec![true; rules.world as usize],
            failures: Vec::new(),
            stopped: 0,
            stop: None,
            failed_before_stop: false,
            stop_limit: None,
            interrupted: false,
            terminated: false,
            killed: false,
            deadline: None,
            last_failures: Vec::new(),
            checkpoint: None,
            rules,
        }
    }

    /// The phase that the job is in.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// The current attempt, from 0.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// When an [`Event::Tick`] is due.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// The actions for an event at `now`, in order.
    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match (self.phase, event) {
            (Phase::Ended, _) => Vec::new(),
            (Phase::RestartDelay, event) => self.during_restart_delay(&event, now),
            (_, event) => {
                let mut actions = self.during_attempt(event, now);
                if self.alive.iter().all(|alive| !alive) {
                    actions.extend(self.attempt_ended(now));
                }
                actions
            }
        }
    }

    fn during_attempt(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::SpawnFailed { rank, reason, exit } => {
                self.alive[rank as usize] = false;
                let message = format!("failed to start: {reason}");
                self.fail(Failure::of_rank(rank, message, exit), now)
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
            Event::OwnError { rank, message, exit } => {
                let is_known = self.failures.iter().any(|failure| failure.rank == Some(rank));
                if self.killed || is_known || !self.is_alive(rank) {
                    return Vec::new();
                }
                self.fail(Failure::of_rank(rank, message, exits::passed_on(Some(exit))), now)
            }
            Event::Hung { ranks, message } => self.hung(&ranks, &message, now),
            Event::NoStacks if self.rules.kind == Kind::Command && !self.terminated => {
                self.terminate(SIGTERM, now)
            }
            Event::NoStacks => Vec::new(),
            Event::Exited { rank, exit } => self.exited(rank, exit, now),
            Event::Stop(cause) => self.stop(cause, now),
            Event::Progress => {
                if let Some(limit) = self.stop_limit {
                    self.deadline = Some(limit.min(now + self.rules.shutdown_timeout));
                }
                Vec::new()
            }
            Event::Checkpoint { step, path } => {
                self.checkpoint = Some((step, path));
                Vec::new()
            }
            Event::Tick => self.tick(now),
        }
    }

    fn exited(&mut self, rank: u32, exit: Exit, now: Instant) -> Vec<Action> {
        self.alive[rank as usize] = false;
        // At most one: the error that the rank has reported, or its hang.
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
            Kind::Trainer => exits::of_trainer(rank, exit, &self.circumstances()),
            Kind::Command => self.of_command(rank, exit),
        };
        failure.map_or_else(Vec::new, |failure| self.fail(failure, now))
    }

    /// The failure, if this exit of a command's worker is one.
    fn of_command(&self, rank: u32, exit: Exit) -> Option<Failure> {
        // A worker may use a requeue code after SIGTERM, too: that is preemption if xlaunch was stopped, but not if
        // another rank has failed.
        let has_failed = self.failures.iter().any(|failure| !failure.consequence && !failure.preempted);
        match exit {
            Exit::Code(code) if self.rules.requeue_codes.contains(&code) && !has_failed => {
                Some(Failure::preempted(rank, exit, code))
            }
            _ => {
                let hung = self.failures.iter().any(|failure| failure.hung);
                exits::of_command(rank, exit, self.rules.propagate_exit_code, self.terminated || hung)
            }
        }
    }

    /// Ends the attempt at once: a rank that hangs never exits by itself. While the job is stopping there is a deadline
    /// for that already.
    fn hung(&mut self, ranks: &[u32], message: &str, now: Instant) -> Vec<Action> {
        if self.phase == Phase::Stopping {
            return Vec::new();
        }
        let hung: Vec<u32> = ranks.iter().copied().filter(|rank| self.is_alive(*rank)).collect();
        let Some((&first, others)) = hung.split_first() else { return Vec::new() };
        self.failures.push(Failure::hung(first, message.to_owned()));
        let others = others.iter().map(|rank| Failure::hung(*rank, format!("hung, as rank {first} did")));
        self.failures.extend(others);
        self.phase = Phase::Stopping;
        match self.rules.kind {
            Kind::Trainer => self.kill(),
            Kind::Command => {
                self.deadline = Some(now + STACKS_TIMEOUT);
                vec![Action::PrintStacks(hung)]
            }
        }
    }

    fn is_alive(&self, rank: u32) -> bool {
        self.alive.get(rank as usize).is_some_and(|alive| *alive)
    }

    fn circumstances(&self) -> exits::Circumstances {
        exits::Circumstances {
            joining: self.phase == Phase::Rendezvous,
            another_failed: !self.failures.is_empty(),
            killed: self.killed || self.interrupted,
        }
    }

    fn fail(&mut self, failure: Failure, now: Instant) -> Vec<Action> {
        self.failures.push(failure);
        self.phase = Phase::Stopping;
        self.after_failure(now)
    }

    /// Ends the other workers: those of a trainer once the cause of the failure is known.
    fn after_failure(&mut self, now: Instant) -> Vec<Action> {
        if self.killed || (self.rules.kind == Kind::Command && self.terminated) {
            return Vec::new();
        }
        let is_exiting =
            self.failures.iter().any(|failure| failure.rank.is_some_and(|rank| self.is_alive(rank)));
        if self.rules.kind == Kind::Command {
            // Ranks that hang may still print their stacks.
            return if is_exiting { Vec::new() } else { self.terminate(SIGTERM, now) };
        }
        let is_known = self.failures.iter().any(|failure| !failure.consequence);
        if is_known && !is_exiting {
            return self.kill();
        }
        let due = now + FAILURE_GRACE;
        self.stop_limit = None;
        // The first failure counts: later ones do not move the deadline.
        self.deadline = Some(self.deadline.map_or(due, |deadline| deadline.min(due)));
        Vec::new()
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
        if self.stop.is_some() {
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
        let by_interrupt = cause == StopCause::Signal(SIGINT);
        let again = if by_interrupt { " (interrupt again to kill the workers)" } else { "" };
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

    fn tick(&mut self, now: Instant) -> Vec<Action> {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return Vec::new();
        }
        if self.rules.kind == Kind::Command && !self.terminated {
            // Not all ranks that hang have printed their stacks.
            return self.terminate(SIGTERM, now);
        }
        let alive = (0..).zip(&self.alive).filter(|(_, alive)| **alive);
        let ranks = alive.map(|(rank, _): (u32, _)| rank.to_string()).collect::<Vec<_>>().join(", ");
        let notice = Action::Notify(format!("killing ranks that did not exit in time: {ranks}"));
        [vec![notice], self.kill()].concat()
    }

    /// The last worker is gone.
    fn attempt_ended(&mut self, now: Instant) -> Vec<Action> {
        self.deadline = None;
        let failures = std::mem::take(&mut self.failures);
        let root = outcome::root_of(&failures);
        if self.stop.is_some() || failures.iter().any(|failure| failure.preempted) {
            return self.end(failures);
        }
        let Some(root) = root.map(|index| &failures[index]) else { return self.end(failures) };
        let who = root.rank.map_or_else(|| "the group".into(), |rank| format!("rank {rank}"));
        let message = format!("{who}: {}", root.message);
        let duration = now.duration_since(self.attempt_start);
        match self.policy.decide(AttemptFailure { message: &message, code: root.code(), duration }) {
            Decision::Final(reason) => {
                let notice = reason.map(Action::Notify);
                notice.into_iter().chain(self.end(failures)).collect()
            }
            Decision::Restart { delay, number } => {
                self.attempt += 1;
                let attempt = self.attempt;
                let when = match delay.is_zero() {
                    true => String::new(),
                    false => format!(" in {:.1} s", delay.as_secs_f64()),
                };
                let number = number
                    .map_or(String::new(), |number| format!(" ({number} of {})", self.policy.max_restarts()));
                let notice = Action::Notify(format!("{message}; restarting{when}{number}"));
                let restart =
                    Action::Restart { attempt: attempt - 1, rank: root.rank, cause: root.message.clone() };
                self.last_failures = failures;
                (self.phase, self.deadline) = (Phase::RestartDelay, Some(now + delay));
                let start = if delay.is_zero() { self.begin_attempt(now) } else { Vec::new() };
                [vec![Action::Kill, notice, restart], start].concat()
            }
        }
    }

    /// No worker exists, so a stop ends the job at once.
    fn during_restart_delay(&mut self, event: &Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Stop(cause) => {
                (self.stop, self.failed_before_stop) = (Some(*cause), true);
                let failures = std::mem::take(&mut self.last_failures);
                self.end(failures)
            }
            Event::Tick if self.deadline.is_some_and(|deadline| now >= deadline) => self.begin_attempt(now),
            _ => Vec::new(),
        }
    }

    fn begin_attempt(&mut self, now: Instant) -> Vec<Action> {
        self.phase = first_phase(self.rules.kind);
        self.attempt_start = now;
        self.alive.fill(true);
        (self.terminated, self.killed, self.deadline) = (false, false, None);
        self.last_failures.clear();
        vec![Action::Start { attempt: self.attempt }]
    }

    fn end(&mut self, failures: Vec<Failure>) -> Vec<Action> {
        self.phase = Phase::Ended;
        self.deadline = None;
        let end = outcome::End {
            kind: self.rules.kind,
            stop: self.stop,
            failed_before_stop: self.failed_before_stop,
            interrupted: self.interrupted,
            all_stopped: self.stopped == self.rules.world,
            none_stopped: self.stopped == 0,
            checkpoint: self.checkpoint.as_ref(),
        };
        vec![Action::Kill, Action::End(end.outcome(failures))]
    }
}

fn first_phase(kind: Kind) -> Phase {
    match kind {
        Kind::Trainer => Phase::Rendezvous,
        Kind::Command => Phase::Running,
    }
}
