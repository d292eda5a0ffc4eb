//! The state machine of a job: a pure function from (state, event, now) to actions.
//!
//! ```text
//!                 all joined                last worker exited, none failed
//! Rendezvous ---------------> Running ------------------------------------> Ended
//!      |  failed, stop           |  a worker failed, stop                      ^
//!      '------------.   .--------'                                             | all exited, no restart
//!                   v   v        deadline          deadline                    |
//!                  Stopping ----------> SIGTERM ---------> SIGKILL ------------'--> RestartDelay --> next attempt
//! ```
//! A job starts in Rendezvous; workers of a command do not join one, so their attempts start in Running. The first
//! failure, or a stop, leads to Stopping. A failure sends SIGTERM at once and SIGKILL after `shutdown_timeout`. A stop
//! first asks the trainer's workers for a checkpoint and sends SIGTERM only after `shutdown_timeout`; a command's
//! workers get the signal that xlaunch received. When the last worker has exited, the restart policy decides between
//! Ended and another attempt.
//!
//! Invariants: every started worker is accounted for by exactly one exit; the job ends once, after its last worker; an
//! unknown exit is never success; after a stop there is no restart.

mod policy;
mod types;

#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use xlaunch_proto::exit::ExitCode;

use crate::spawn::Exit;
use policy::{AttemptFailure, Decision, Policy};
pub use types::{Action, Event, Failure, Kind, Outcome, Phase, Rules, StopCause};

/// Between SIGTERM and SIGKILL, for workers that did not obey a request to stop.
const TERMINATE_GRACE: Duration = Duration::from_secs(5);
const SIGINT: i32 = 2;
const SIGKILL: i32 = 9;
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
    /// A worker exited with the code for "stopped early, with a checkpoint".
    stopped_early: bool,
    stop: Option<StopCause>,
    /// A second SIGINT has killed the workers.
    interrupted: bool,
    /// The workers of this attempt were sent a signal that ends them.
    terminated: bool,
    /// The workers of this attempt were sent SIGKILL when their time was up.
    killed: bool,
    /// The next escalation (request, SIGTERM, SIGKILL), or the start of the next attempt.
    deadline: Option<Instant>,
    /// During the restart delay: the failures of the last attempt, in case that no other follows.
    last_failures: Vec<Failure>,
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
            stopped_early: false,
            stop: None,
            interrupted: false,
            terminated: false,
            killed: false,
            deadline: None,
            last_failures: Vec::new(),
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
            Event::SpawnFailed { rank, reason } => {
                self.alive[rank as usize] = false;
                let failure = Failure {
                    rank: Some(rank),
                    message: format!("failed to start: {reason}"),
                    status: None,
                    exit: ExitCode::WorkerFailed,
                    consequence: false,
                };
                self.fail(failure, now)
            }
            Event::AllJoined => {
                if self.phase == Phase::Rendezvous {
                    self.phase = Phase::Running;
                }
                Vec::new()
            }
            Event::RendezvousFailed(message) => {
                let exit = ExitCode::Rendezvous;
                self.fail(Failure { rank: None, message, status: None, exit, consequence: false }, now)
            }
            Event::Exited { rank, exit } => {
                self.alive[rank as usize] = false;
                let failure = match self.rules.kind {
                    Kind::Trainer => self.trainer_exited(rank, exit),
                    Kind::Command => self.command_exited(rank, exit),
                };
                failure.map_or_else(Vec::new, |failure| self.fail(failure, now))
            }
            Event::Stop(cause) => self.stop(cause, now),
            Event::Tick => self.tick(now),
        }
    }

    /// The failure, if this exit of a trainer's worker is one.
    fn trainer_exited(&mut self, rank: u32, exit: Exit) -> Option<Failure> {
        let known = match exit {
            Exit::Code(code) => ExitCode::from_code(code),
            Exit::Signal(_) | Exit::Unknown => None,
        };
        let failure = |message, exit_code, consequence| {
            Some(Failure { rank: Some(rank), message, status: Some(exit), exit: exit_code, consequence })
        };
        match known {
            Some(ExitCode::Done) if self.phase == Phase::Rendezvous => {
                failure("exited before it joined".into(), ExitCode::Rendezvous, self.terminated)
            }
            Some(ExitCode::Done) => None,
            Some(ExitCode::Stopped) if self.stop.is_some() => {
                self.stopped_early = true;
                None
            }
            _ => {
                // Peers of a failed rank lose a connection, are refused by the rendezvous, or obey our SIGTERM.
                let refused = known == Some(ExitCode::Rendezvous) && !self.failures.is_empty();
                let ours = match exit {
                    Exit::Signal(SIGTERM) | Exit::Code(143) => self.terminated,
                    // Any other SIGKILL may come from the OOM killer, which makes it a root cause.
                    Exit::Signal(SIGKILL) => self.killed || self.interrupted,
                    _ => false,
                };
                let consequence = known == Some(ExitCode::Retryable) || ours || refused;
                let code = match known {
                    Some(
                        code @ (ExitCode::Data
                        | ExitCode::Rendezvous
                        | ExitCode::Internal
                        | ExitCode::Retryable
                        | ExitCode::Gpu),
                    ) => code,
                    _ => ExitCode::WorkerFailed,
                };
                failure(exit.to_string(), code, consequence)
            }
        }
    }

    /// The failure, if this exit of a command's worker is one. After our signal, every exit is a consequence of it.
    fn command_exited(&mut self, rank: u32, exit: Exit) -> Option<Failure> {
        if exit == Exit::Code(0) {
            return None;
        }
        let own = match exit {
            Exit::Code(code) => u8::try_from(code).unwrap_or(1),
            Exit::Signal(signal) => u8::try_from(signal).map_or(1, |signal| 128 | signal),
            Exit::Unknown => 1,
        };
        let message = match exit {
            // xlaunch's table of exit codes does not apply to other programs.
            Exit::Code(code) => format!("exit code {code}"),
            Exit::Signal(_) | Exit::Unknown => exit.to_string(),
        };
        let propagated = self.rules.propagate_exit_code.then_some(ExitCode::Worker(own));
        Some(Failure {
            rank: Some(rank),
            message,
            status: Some(exit),
            exit: propagated.unwrap_or(ExitCode::WorkerFailed),
            consequence: self.terminated,
        })
    }

    fn fail(&mut self, failure: Failure, now: Instant) -> Vec<Action> {
        self.failures.push(failure);
        self.phase = Phase::Stopping;
        if self.terminated {
            return Vec::new();
        }
        self.terminate(SIGTERM, now)
    }

    fn terminate(&mut self, signal: i32, now: Instant) -> Vec<Action> {
        self.terminated = true;
        self.deadline = Some(now + self.rules.shutdown_timeout);
        vec![Action::Signal(signal)]
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
        if self.terminated {
            return Vec::new();
        }
        let by_interrupt = cause == StopCause::Signal(SIGINT);
        let again = if by_interrupt { " (interrupt again to kill the workers)" } else { "" };
        match self.rules.kind {
            Kind::Command => {
                let signal = match cause {
                    StopCause::Signal(signal) => signal,
                    StopCause::Call => SIGTERM,
                };
                let seconds = self.rules.shutdown_timeout.as_secs_f64();
                let message = format!("stopping: the workers have {seconds} s to exit{again}");
                [vec![Action::Notify(message)], self.terminate(signal, now)].concat()
            }
            Kind::Trainer if joining => {
                let notice = Action::Notify("stopping before training began".into());
                [vec![notice], self.terminate(SIGTERM, now)].concat()
            }
            Kind::Trainer => {
                self.deadline = Some(now + self.rules.shutdown_timeout);
                let message = format!("stopping at the next step, with a checkpoint{again}");
                vec![Action::Notify(message), Action::RequestStop]
            }
        }
    }

    fn tick(&mut self, now: Instant) -> Vec<Action> {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return Vec::new();
        }
        let alive = (0..).zip(&self.alive).filter(|(_, alive)| **alive);
        let ranks = alive.map(|(rank, _): (u32, _)| rank.to_string()).collect::<Vec<_>>().join(", ");
        if self.terminated {
            self.deadline = None;
            self.killed = true;
            return vec![
                Action::Notify(format!("killing ranks that did not exit in time: {ranks}")),
                Action::Kill,
            ];
        }
        self.terminated = true;
        self.deadline = Some(now + TERMINATE_GRACE);
        let message = format!("sending SIGTERM to ranks that did not stop in time: {ranks}");
        vec![Action::Notify(message), Action::Signal(SIGTERM)]
    }

    /// The last worker is gone.
    fn attempt_ended(&mut self, now: Instant) -> Vec<Action> {
        self.deadline = None;
        let failures = std::mem::take(&mut self.failures);
        let root = root_of(&failures);
        if self.stop.is_some() {
            return self.end(failures);
        }
        let Some(root) = root.map(|index| &failures[index]) else { return self.end(failures) };
        let who = root.rank.map_or_else(|| "the group".into(), |rank| format!("rank {rank}"));
        let message = format!("{who}: {}", root.message);
        let code = match root.status {
            Some(Exit::Code(code)) => Some(code),
            _ => None,
        };
        let duration = now.duration_since(self.attempt_start);
        match self.policy.decide(AttemptFailure { message: &message, code, duration }) {
            Decision::Final(reason) => {
                let notice = reason.map(Action::Notify);
                notice.into_iter().chain(self.end(failures)).collect()
            }
            Decision::Restart { delay } => {
                self.attempt += 1;
                let (attempt, most) = (self.attempt, self.policy.max_restarts());
                let when = match delay.is_zero() {
                    true => String::new(),
                    false => format!(" in {:.1} s", delay.as_secs_f64()),
                };
                let notice = Action::Notify(format!("{message}; restarting{when} ({attempt} of {most})"));
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
                self.stop = Some(*cause);
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
        let root = root_of(&failures);
        // Consequences of a stop are not failures of the job.
        let stopped_cleanly = self.stop.is_some() && failures.iter().all(|failure| failure.consequence);
        let exit = match (self.stop, root, self.rules.kind) {
            _ if self.interrupted => ExitCode::Interrupted,
            (Some(_), Some(root), _) if !stopped_cleanly => failures[root].exit,
            (Some(cause), _, Kind::Command) => stopped_by(cause),
            (Some(_), Some(_), Kind::Trainer) => ExitCode::Stopped,
            (Some(_), None, Kind::Trainer) if self.stopped_early => ExitCode::Stopped,
            (Some(_), None, Kind::Trainer) => ExitCode::Done,
            (None, Some(root), _) => failures[root].exit,
            (None, None, _) => ExitCode::Done,
        };
        let (mut root_failure, mut others) = (None, Vec::new());
        if !(stopped_cleanly || self.interrupted) {
            for (index, failure) in failures.into_iter().enumerate() {
                if Some(index) == root { root_failure = Some(failure) } else { others.push(failure) }
            }
        }
        vec![Action::Kill, Action::End(Outcome { exit, root: root_failure, others })]
    }
}

fn first_phase(kind: Kind) -> Phase {
    match kind {
        Kind::Trainer => Phase::Rendezvous,
        Kind::Command => Phase::Running,
    }
}

/// The index of the root cause.
fn root_of(failures: &[Failure]) -> Option<usize> {
    failures.iter().position(|failure| !failure.consequence).or((!failures.is_empty()).then_some(0))
}

/// The exit code of a command's launch that was stopped.
fn stopped_by(cause: StopCause) -> ExitCode {
    let signal = match cause {
        StopCause::Signal(signal) => signal,
        StopCause::Call => SIGTERM,
    };
    u8::try_from(signal).map_or(ExitCode::Internal, ExitCode::Signal)
}
