//! What to do about a job's events: the pure heart of the agent.
//!
//! ```text
//!             all joined               last worker exited, none failed
//! Meeting ---------------> Running ------------------------------------> Ended
//!    |  failed, interrupted   |  a worker failed, interrupt, stop           ^
//!    '----------.   .---------'                                             | all exited, no restart
//!               v   v            deadline          deadline                 |
//!              Stopping(asked) ----------> SIGTERM ---------> SIGKILL ------'--> Waiting --> Meeting (attempt + 1)
//! ```
//! Workers of a command do not meet: their attempts begin as Running, and to stop they get a signal at once. Every worker
//! that was started is accounted for by exactly one exit; the job ends once.

mod policy;
mod types;

#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use xlaunch_proto::exit::ExitCode;

use crate::spawn::Exit;
use policy::{Decision, Ended, Policy};
pub use types::{Action, Event, Failure, Kind, Outcome, Phase, Rules, StopCause};

/// Time between SIGTERM and SIGKILL where workers were asked to stop and did not.
const TERMINATE_GRACE: Duration = Duration::from_secs(5);
/// Numbers of signals.
const INTERRUPT: i32 = 2;
const TERMINATE: i32 = 15;

/// The state of a job.
#[derive(Debug)]
pub struct Job {
    rules: Rules,
    policy: Policy,
    phase: Phase,
    attempt: u32,
    /// When this attempt began.
    began: Instant,
    alive: Vec<bool>,
    failures: Vec<Failure>,
    /// Whether any worker said that it stopped early, with a checkpoint.
    stopped_early: bool,
    stop: Option<StopCause>,
    killed_at_once: bool,
    /// A signal that ends workers has been sent.
    terminated: bool,
    /// Whether this attempt's workers were sent SIGKILL, after the time they had.
    killed: bool,
    /// When to go one step further: from asking to SIGTERM to SIGKILL, or from waiting to the next attempt.
    deadline: Option<Instant>,
    /// What ends a job during the wait for its next attempt.
    last: Vec<Failure>,
}

impl Job {
    /// A job whose first attempt is being started.
    pub fn new(rules: Rules, now: Instant) -> Self {
        Self {
            policy: Policy::new(rules.restarts.clone(), rules.seed),
            phase: first_phase(rules.kind),
            attempt: 0,
            began: now,
            alive: vec![true; rules.world as usize],
            failures: Vec::new(),
            stopped_early: false,
            stop: None,
            killed_at_once: false,
            terminated: false,
            killed: false,
            deadline: None,
            last: Vec::new(),
            rules,
        }
    }

    /// Where the job is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// This start of the group, from 0.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// When a [`Event::Tick`] is due.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// What to do about `event` at `now`.
    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match (self.phase, event) {
            (Phase::Ended, _) => Vec::new(),
            (Phase::Waiting, event) => self.while_waiting(&event, now),
            (_, event) => {
                let mut actions = self.while_workers_live(event, now);
                if self.alive.iter().all(|alive| !alive) {
                    actions.extend(self.all_gone(now));
                }
                actions
            }
        }
    }

    fn while_workers_live(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::SpawnFailed { rank, reason } => {
                self.alive[rank as usize] = false;
                let failure = Failure {
                    rank: Some(rank),
                    what: format!("failed to start: {reason}"),
                    status: None,
                    exit: ExitCode::WorkerFailed,
                    follows: false,
                };
                self.fail(failure, now)
            }
            Event::Met => {
                if self.phase == Phase::Meeting {
                    self.phase = Phase::Running;
                }
                Vec::new()
            }
            Event::MeetingFailed(what) => {
                let exit = ExitCode::Rendezvous;
                self.fail(Failure { rank: None, what, status: None, exit, follows: false }, now)
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

    /// The failure that this exit of the built-in trainer's worker is, if it is one.
    fn trainer_exited(&mut self, rank: u32, exit: Exit) -> Option<Failure> {
        let known = match exit {
            Exit::Code(code) => ExitCode::from_code(code),
            Exit::Signal(_) | Exit::Unknown => None,
        };
        let failure = |what, exit_code, follows| {
            Some(Failure { rank: Some(rank), what, status: Some(exit), exit: exit_code, follows })
        };
        match known {
            Some(ExitCode::Done) if self.phase == Phase::Meeting => {
                failure("ended before it joined".into(), ExitCode::Rendezvous, self.terminated)
            }
            Some(ExitCode::Done) => None,
            Some(ExitCode::Stopped) if self.stop.is_some() => {
                self.stopped_early = true;
                None
            }
            _ => {
                // Peers of a failed rank lose their connection, are told that the meeting failed, or obey our SIGTERM.
                let told = known == Some(ExitCode::Rendezvous) && !self.failures.is_empty();
                let ours = match exit {
                    Exit::Signal(TERMINATE) | Exit::Code(143) => self.terminated,
                    // A SIGKILL that is not ours is the kernel's, for lack of memory: a cause.
                    Exit::Signal(9) => self.killed || self.killed_at_once,
                    _ => false,
                };
                let follows = known == Some(ExitCode::Retryable) || ours || told;
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
                failure(exit.to_string(), code, follows)
            }
        }
    }

    /// The same of a command's. What ends after we have sent a signal ends because of it, whatever it says.
    fn command_exited(&mut self, rank: u32, exit: Exit) -> Option<Failure> {
        if exit == Exit::Code(0) {
            return None;
        }
        let own = match exit {
            Exit::Code(code) => u8::try_from(code).unwrap_or(1),
            Exit::Signal(signal) => u8::try_from(signal).map_or(1, |signal| 128 | signal),
            Exit::Unknown => 1,
        };
        let what = match exit {
            // Our table says nothing of another program's codes.
            Exit::Code(code) => format!("exit code {code}"),
            Exit::Signal(_) | Exit::Unknown => exit.to_string(),
        };
        let passed_on = self.rules.propagate_exit_code.then_some(ExitCode::Worker(own));
        Some(Failure {
            rank: Some(rank),
            what,
            status: Some(exit),
            exit: passed_on.unwrap_or(ExitCode::WorkerFailed),
            follows: self.terminated,
        })
    }

    fn fail(&mut self, failure: Failure, now: Instant) -> Vec<Action> {
        self.failures.push(failure);
        self.phase = Phase::Stopping;
        if self.terminated {
            return Vec::new();
        }
        self.end_workers(TERMINATE, now)
    }

    fn end_workers(&mut self, signal: i32, now: Instant) -> Vec<Action> {
        self.terminated = true;
        self.deadline = Some(now + self.rules.shutdown_timeout);
        vec![Action::Signal(signal)]
    }

    fn stop(&mut self, cause: StopCause, now: Instant) -> Vec<Action> {
        if self.stop.is_some() {
            if cause == StopCause::Signal(INTERRUPT) && !self.killed_at_once {
                self.killed_at_once = true;
                return vec![Action::Say("second interrupt: ending at once".into()), Action::Kill];
            }
            return Vec::new();
        }
        self.stop = Some(cause);
        let meeting = self.phase == Phase::Meeting;
        self.phase = Phase::Stopping;
        if self.terminated {
            return Vec::new();
        }
        let interrupted = cause == StopCause::Signal(INTERRUPT);
        let again = if interrupted { " (interrupt again to end at once)" } else { "" };
        match self.rules.kind {
            Kind::Command => {
                let signal = match cause {
                    StopCause::Signal(signal) => signal,
                    StopCause::Call => TERMINATE,
                };
                let seconds = self.rules.shutdown_timeout.as_secs_f64();
                let said = format!("stopping: the workers have {seconds} s to end{again}");
                [vec![Action::Say(said)], self.end_workers(signal, now)].concat()
            }
            Kind::Trainer if meeting => {
                let said = Action::Say("stopping before training began".into());
                [vec![said], self.end_workers(TERMINATE, now)].concat()
            }
            Kind::Trainer => {
                self.deadline = Some(now + self.rules.shutdown_timeout);
                let said = format!("stopping at the next step, with a checkpoint{again}");
                vec![Action::Say(said), Action::AskToStop]
            }
        }
    }

    fn tick(&mut self, now: Instant) -> Vec<Action> {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return Vec::new();
        }
        let left: Vec<String> = (0..self.rules.world)
            .filter(|rank| self.alive[*rank as usize])
            .map(|rank| rank.to_string())
            .collect();
        let left = left.join(", ");
        if self.terminated {
            self.deadline = None;
            self.killed = true;
            return vec![
                Action::Say(format!("ranks that did not end in time are killed: {left}")),
                Action::Kill,
            ];
        }
        self.terminated = true;
        self.deadline = Some(now + TERMINATE_GRACE);
        vec![Action::Say(format!("ranks that did not stop in time: {left}")), Action::Signal(TERMINATE)]
    }

    /// Every worker is gone: the attempt is over.
    fn all_gone(&mut self, now: Instant) -> Vec<Action> {
        self.deadline = None;
        let failures = std::mem::take(&mut self.failures);
        let root = root_of(&failures);
        if self.stop.is_some() {
            return self.end(failures);
        }
        let Some(root) = root.map(|index| &failures[index]) else { return self.end(failures) };
        let who = root.rank.map_or_else(|| "the group".into(), |rank| format!("rank {rank}"));
        let what = format!("{who}: {}", root.what);
        let code = match root.status {
            Some(Exit::Code(code)) => Some(code),
            _ => None,
        };
        match self.policy.decide(Ended { what: &what, code, lived: now.duration_since(self.began) }) {
            Decision::Final(reason) => {
                let said = reason.map(Action::Say);
                said.into_iter().chain(self.end(failures)).collect()
            }
            Decision::Again { after } => {
                self.attempt += 1;
                let (attempt, most) = (self.attempt, self.policy.most());
                let when =
                    if after.is_zero() { String::new() } else { format!(" in {:.1} s", after.as_secs_f64()) };
                let said = Action::Say(format!("{what}; restarting{when} ({attempt} of {most})"));
                let restart =
                    Action::Restart { attempt: attempt - 1, rank: root.rank, cause: root.what.clone() };
                self.last = failures;
                (self.phase, self.deadline) = (Phase::Waiting, Some(now + after));
                let rest = if after.is_zero() { self.begin_attempt(now) } else { Vec::new() };
                [vec![Action::Kill, said, restart], rest].concat()
            }
        }
    }

    /// Between two attempts there is nobody to end.
    fn while_waiting(&mut self, event: &Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Stop(cause) => {
                self.stop = Some(*cause);
                let last = std::mem::take(&mut self.last);
                self.end(last)
            }
            Event::Tick if self.deadline.is_some_and(|deadline| now >= deadline) => self.begin_attempt(now),
            _ => Vec::new(),
        }
    }

    fn begin_attempt(&mut self, now: Instant) -> Vec<Action> {
        self.phase = first_phase(self.rules.kind);
        self.began = now;
        self.alive.fill(true);
        (self.terminated, self.killed, self.deadline) = (false, false, None);
        self.last.clear();
        vec![Action::Start { attempt: self.attempt }]
    }

    fn end(&mut self, failures: Vec<Failure>) -> Vec<Action> {
        self.phase = Phase::Ended;
        self.deadline = None;
        let root = root_of(&failures);
        // What a stop broke is not a failure of the job.
        let stopping = self.stop.is_some() && failures.iter().all(|failure| failure.follows);
        let exit = match (self.stop, root, self.rules.kind) {
            _ if self.killed_at_once => ExitCode::Interrupted,
            (Some(_), Some(root), _) if !stopping => failures[root].exit,
            (Some(cause), _, Kind::Command) => stopped_by(cause),
            (Some(_), Some(_), Kind::Trainer) => ExitCode::Stopped,
            (Some(_), None, Kind::Trainer) if self.stopped_early => ExitCode::Stopped,
            (Some(_), None, Kind::Trainer) => ExitCode::Done,
            (None, Some(root), _) => failures[root].exit,
            (None, None, _) => ExitCode::Done,
        };
        let (mut root_failure, mut others) = (None, Vec::new());
        if !(stopping || self.killed_at_once) {
            for (index, failure) in failures.into_iter().enumerate() {
                if Some(index) == root { root_failure = Some(failure) } else { others.push(failure) }
            }
        }
        vec![Action::Kill, Action::End(Outcome { exit, root: root_failure, others })]
    }
}

fn first_phase(kind: Kind) -> Phase {
    match kind {
        Kind::Trainer => Phase::Meeting,
        Kind::Command => Phase::Running,
    }
}

/// Which of these is the cause of the others.
fn root_of(failures: &[Failure]) -> Option<usize> {
    failures.iter().position(|failure| !failure.follows).or((!failures.is_empty()).then_some(0))
}

/// What a command's launch that was stopped exits with.
fn stopped_by(cause: StopCause) -> ExitCode {
    let signal = match cause {
        StopCause::Signal(signal) => signal,
        StopCause::Call => TERMINATE,
    };
    u8::try_from(signal).map_or(ExitCode::Internal, ExitCode::Signal)
}
