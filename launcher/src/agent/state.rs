//! What to do about a job's events: the pure heart of the agent.
//!
//! ```text
//!             all joined               last worker exited, none failed
//! Meeting ---------------> Running ------------------------------------> Ended(Done | Stopped)
//!    |  failed, interrupted   |  a worker failed, interrupt, stop           ^
//!    '----------.   .---------'                                             | all exited
//!               v   v            deadline          deadline                 |
//!              Stopping(asked) ----------> SIGTERM ---------> SIGKILL ------'--> Meeting (attempt + 1), or Ended(Failed)
//! ```
//! Every worker that was started is accounted for by exactly one exit; the job ends once.

use std::time::{Duration, Instant};

use xlaunch_proto::exit::ExitCode;

use crate::spawn::Exit;

/// Time between SIGTERM and SIGKILL where workers were asked to stop and did not.
const TERMINATE_GRACE: Duration = Duration::from_secs(5);

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A worker could not be started.
    SpawnFailed {
        /// Whose process.
        rank: u32,
        /// In the system's words.
        reason: String,
    },
    /// All ranks have joined.
    Met,
    /// The ranks did not meet.
    MeetingFailed(String),
    /// A worker is gone.
    Exited {
        /// Whose process.
        rank: u32,
        /// Its status.
        exit: Exit,
    },
    /// SIGINT, SIGTERM, or a Stop call.
    Stop(StopCause),
    /// Time has passed.
    Tick,
}

/// Who asked for a stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// SIGINT: a second one ends at once.
    Interrupt,
    /// SIGTERM, SIGHUP.
    Terminate,
    /// The gRPC call.
    Call,
}

/// Something to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start all workers of this attempt, and a new meeting.
    Start {
        /// From 0.
        attempt: u32,
    },
    /// Ask all workers to stop at a step boundary, with a checkpoint.
    AskToStop,
    /// SIGTERM to the groups of all workers that are left.
    Terminate,
    /// SIGKILL to the groups of all workers.
    Kill,
    /// Tell the user.
    Say(String),
    /// The job is over.
    End(Outcome),
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// What `xlaunch` exits with.
    pub exit: ExitCode,
    /// The failure that started it all.
    pub root: Option<Failure>,
    /// What failed in its wake.
    pub others: Vec<Failure>,
}

/// One failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Whose; `None` for the group's.
    pub rank: Option<u32>,
    /// In words.
    pub what: String,
    exit: ExitCode,
    /// Whether it is the wake of another one: a lost peer, or our own signal.
    follows: bool,
}

/// Where the job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Workers start and join.
    Meeting,
    /// Workers train.
    Running,
    /// Workers are to end.
    Stopping,
    /// The job is over.
    Ended,
}

/// The state of a job.
#[derive(Debug)]
pub struct Job {
    world: u32,
    max_restarts: u32,
    shutdown_timeout: Duration,
    phase: Phase,
    attempt: u32,
    alive: Vec<bool>,
    failures: Vec<Failure>,
    /// Whether any worker said that it stopped early, with a checkpoint.
    stopped_early: bool,
    stop: Option<StopCause>,
    killed_at_once: bool,
    /// SIGTERM has been sent.
    terminated: bool,
    /// Whether this attempt's workers were sent SIGKILL, after the time they had.
    killed: bool,
    /// When to go one step further, from asking to SIGTERM to SIGKILL.
    deadline: Option<Instant>,
}

impl Job {
    /// A job whose first attempt is being started.
    pub fn new(world: u32, max_restarts: u32, shutdown_timeout: Duration) -> Self {
        Self {
            world,
            max_restarts,
            shutdown_timeout,
            phase: Phase::Meeting,
            attempt: 0,
            alive: vec![true; world as usize],
            failures: Vec::new(),
            stopped_early: false,
            stop: None,
            killed_at_once: false,
            terminated: false,
            killed: false,
            deadline: None,
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
        if self.phase == Phase::Ended {
            return Vec::new();
        }
        let mut actions = match event {
            Event::SpawnFailed { rank, reason } => {
                self.alive[rank as usize] = false;
                self.fail(
                    Some(rank),
                    format!("failed to start: {reason}"),
                    ExitCode::WorkerFailed,
                    false,
                    now,
                )
            }
            Event::Met => {
                if self.phase == Phase::Meeting {
                    self.phase = Phase::Running;
                }
                Vec::new()
            }
            Event::MeetingFailed(reason) => self.fail(None, reason, ExitCode::Rendezvous, false, now),
            Event::Exited { rank, exit } => self.exited(rank, exit, now),
            Event::Stop(cause) => self.stop(cause, now),
            Event::Tick => self.tick(now),
        };
        if self.alive.iter().all(|alive| !alive) {
            actions.extend(self.all_gone());
        }
        actions
    }

    fn exited(&mut self, rank: u32, exit: Exit, now: Instant) -> Vec<Action> {
        self.alive[rank as usize] = false;
        let known = match exit {
            Exit::Code(code) => ExitCode::from_code(code),
            Exit::Signal(_) | Exit::Unknown => None,
        };
        match known {
            Some(ExitCode::Done) if self.phase == Phase::Meeting => {
                let what = "ended before it joined".to_string();
                self.fail(Some(rank), what, ExitCode::Rendezvous, self.terminated, now)
            }
            Some(ExitCode::Done) => Vec::new(),
            Some(ExitCode::Stopped) if self.stop.is_some() => {
                self.stopped_early = true;
                Vec::new()
            }
            _ => {
                // Peers of a failed rank lose their connection, are told that the meeting failed, or obey our SIGTERM.
                let told = known == Some(ExitCode::Rendezvous) && !self.failures.is_empty();
                let ours = match exit {
                    Exit::Signal(15) | Exit::Code(143) => self.terminated,
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
                self.fail(Some(rank), exit.to_string(), code, follows, now)
            }
        }
    }

    fn fail(
        &mut self,
        rank: Option<u32>,
        what: String,
        exit: ExitCode,
        follows: bool,
        now: Instant,
    ) -> Vec<Action> {
        self.failures.push(Failure { rank, what, exit, follows });
        self.phase = Phase::Stopping;
        if self.terminated {
            return Vec::new();
        }
        self.terminated = true;
        self.deadline = Some(now + self.shutdown_timeout);
        vec![Action::Terminate]
    }

    fn stop(&mut self, cause: StopCause, now: Instant) -> Vec<Action> {
        if self.stop.is_some() {
            if cause == StopCause::Interrupt && !self.killed_at_once {
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
        self.deadline = Some(now + self.shutdown_timeout);
        if meeting {
            self.terminated = true;
            return vec![Action::Say("stopping before training began".into()), Action::Terminate];
        }
        let again = if cause == StopCause::Interrupt { " (interrupt again to end at once)" } else { "" };
        vec![Action::Say(format!("stopping at the next step, with a checkpoint{again}")), Action::AskToStop]
    }

    fn tick(&mut self, now: Instant) -> Vec<Action> {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return Vec::new();
        }
        let left: Vec<String> =
            (0..self.world).filter(|rank| self.alive[*rank as usize]).map(|rank| rank.to_string()).collect();
        let left = left.join(", ");
        if self.terminated {
            self.deadline = None;
            self.killed = true;
            return vec![Action::Say(format!("ranks still running after SIGTERM: {left}")), Action::Kill];
        }
        self.terminated = true;
        self.deadline = Some(now + TERMINATE_GRACE);
        vec![Action::Say(format!("ranks that did not stop in time: {left}")), Action::Terminate]
    }

    /// Every worker is gone: the attempt is over.
    fn all_gone(&mut self) -> Vec<Action> {
        self.deadline = None;
        let failures = std::mem::take(&mut self.failures);
        let root =
            failures.iter().position(|failure| !failure.follows).or((!failures.is_empty()).then_some(0));
        // What a stop broke is not a failure of the job.
        let stopping = self.stop.is_some() && failures.iter().all(|failure| failure.follows);
        if let Some(root) = root.filter(|_| !stopping) {
            let again = self.stop.is_none()
                && self.attempt < self.max_restarts
                && !matches!(failures[root].exit, ExitCode::Data | ExitCode::Usage);
            if again {
                return self.restart(&failures[root]);
            }
        }
        self.phase = Phase::Ended;
        let exit = match (self.stop, root) {
            _ if self.killed_at_once => ExitCode::Interrupted,
            (Some(_), Some(_)) if stopping => ExitCode::Stopped,
            (Some(_), None) if self.stopped_early => ExitCode::Stopped,
            (_, Some(root)) => failures[root].exit,
            (Some(_), None) | (None, None) => ExitCode::Done,
        };
        let (mut root_failure, mut others) = (None, Vec::new());
        if !(stopping || self.killed_at_once) {
            for (index, failure) in failures.into_iter().enumerate() {
                if Some(index) == root { root_failure = Some(failure) } else { others.push(failure) }
            }
        }
        vec![Action::Kill, Action::End(Outcome { exit, root: root_failure, others })]
    }

    fn restart(&mut self, root: &Failure) -> Vec<Action> {
        let who = root.rank.map_or_else(|| "the group".into(), |rank| format!("rank {rank}"));
        self.attempt += 1;
        self.phase = Phase::Meeting;
        self.alive.fill(true);
        self.terminated = false;
        self.killed = false;
        let (attempt, most) = (self.attempt, self.max_restarts);
        let said = format!("{who}: {}; restarting ({attempt} of {most})", root.what);
        vec![Action::Kill, Action::Say(said), Action::Start { attempt }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GRACE: Duration = Duration::from_secs(30);

    fn exited(rank: u32, code: i32) -> Event {
        Event::Exited { rank, exit: Exit::Code(code) }
    }

    fn run(job: &mut Job, events: &[Event]) -> Vec<Action> {
        let now = Instant::now();
        events.iter().flat_map(|event| job.handle(event.clone(), now)).collect()
    }

    fn outcome(actions: &[Action]) -> Outcome {
        let ends: Vec<_> = actions
            .iter()
            .filter_map(|action| match action {
                Action::End(outcome) => Some(outcome.clone()),
                _ => None,
            })
            .collect();
        assert_eq!(ends.len(), 1, "{actions:?}");
        ends[0].clone()
    }

    #[test]
    fn all_done_is_done() {
        let mut job = Job::new(2, 0, GRACE);
        let actions = run(&mut job, &[Event::Met, exited(1, 0), exited(0, 0)]);
        assert_eq!(outcome(&actions), Outcome { exit: ExitCode::Done, root: None, others: vec![] });
        assert!(!actions.contains(&Action::Terminate));
    }

    #[test]
    fn a_crash_ends_the_others_and_is_the_root_even_when_a_peer_is_seen_first() {
        for signal in [11, 9] {
            let mut job = Job::new(3, 0, GRACE);
            let crash = Event::Exited { rank: 1, exit: Exit::Signal(signal) };
            let mut actions = run(&mut job, &[Event::Met, exited(0, 75)]);
            assert!(actions.contains(&Action::Terminate));
            // Killed by a signal, not by the SIGTERM that went out meanwhile: but that is known only by the signal.
            actions.extend(run(&mut job, &[crash, Event::Exited { rank: 2, exit: Exit::Signal(15) }]));
            let end = outcome(&actions);
            assert_eq!(end.others.len(), 2);
            assert_eq!(end.root.unwrap().rank, Some(1));
            assert_eq!(end.exit, ExitCode::WorkerFailed);
        }
    }

    #[test]
    fn known_codes_pass_through() {
        for code in [65, 70, 76] {
            let mut job = Job::new(1, 0, GRACE);
            let end = outcome(&run(&mut job, &[Event::Met, exited(0, code)]));
            assert_eq!(i32::from(end.exit.code()), code);
        }
        let mut job = Job::new(1, 0, GRACE);
        assert_eq!(outcome(&run(&mut job, &[Event::Met, exited(0, 3)])).exit, ExitCode::WorkerFailed);
    }

    #[test]
    fn a_stop_is_asked_for_then_enforced() {
        let mut job = Job::new(1, 0, GRACE);
        let now = Instant::now();
        job.handle(Event::Met, now);
        assert!(job.handle(Event::Stop(StopCause::Terminate), now).contains(&Action::AskToStop));
        assert_eq!(job.handle(Event::Tick, now + GRACE / 2), []);
        assert!(job.handle(Event::Tick, now + GRACE).contains(&Action::Terminate));
        assert!(job.handle(Event::Tick, now + GRACE + TERMINATE_GRACE).contains(&Action::Kill));
        let end = outcome(&job.handle(Event::Exited { rank: 0, exit: Exit::Signal(9) }, now));
        assert_eq!((end.exit, end.root), (ExitCode::Stopped, None));
    }

    #[test]
    fn one_interrupt_stops_cleanly_and_two_end_at_once() {
        let interrupt = Event::Stop(StopCause::Interrupt);
        let mut job = Job::new(2, 3, GRACE);
        let events = [Event::Met, interrupt.clone(), exited(0, 143), exited(1, 143)];
        assert_eq!(outcome(&run(&mut job, &events)).exit, ExitCode::Stopped);

        let mut job = Job::new(1, 3, GRACE);
        let actions = run(&mut job, &[Event::Met, interrupt.clone(), interrupt]);
        assert!(actions.contains(&Action::Kill));
        let end = outcome(&run(&mut job, &[Event::Exited { rank: 0, exit: Exit::Signal(9) }]));
        assert_eq!(end.exit, ExitCode::Interrupted);
    }

    #[test]
    fn a_failed_meeting_is_the_root_and_its_workers_follow() {
        let mut job = Job::new(2, 0, GRACE);
        let events = [
            Event::MeetingFailed("rank 1 did not join".into()),
            exited(0, 69),
            Event::Exited { rank: 1, exit: Exit::Signal(15) },
        ];
        let end = outcome(&run(&mut job, &events));
        assert_eq!((end.exit, end.root.unwrap().rank, end.others.len()), (ExitCode::Rendezvous, None, 2));
    }

    #[test]
    fn restarts_are_counted_and_bad_data_is_not_retried() {
        let mut job = Job::new(1, 2, GRACE);
        for attempt in 1..=2 {
            let actions = run(&mut job, &[Event::Met, exited(0, 1)]);
            assert!(actions.contains(&Action::Start { attempt }), "{actions:?}");
        }
        assert_eq!(outcome(&run(&mut job, &[Event::Met, exited(0, 1)])).exit, ExitCode::WorkerFailed);
        let mut job = Job::new(1, 2, GRACE);
        assert_eq!(outcome(&run(&mut job, &[Event::Met, exited(0, 65)])).exit, ExitCode::Data);
    }

    #[test]
    fn an_unknown_exit_is_no_success() {
        let mut job = Job::new(1, 0, GRACE);
        let end = outcome(&run(&mut job, &[Event::Met, Event::Exited { rank: 0, exit: Exit::Unknown }]));
        assert_eq!(end.exit, ExitCode::WorkerFailed);
    }

    fn any_event() -> impl Strategy<Value = Event> {
        let exit = prop_oneof![
            prop::sample::select(vec![0, 1, 65, 69, 75, 143]).prop_map(Exit::Code),
            prop::sample::select(vec![9, 11, 15]).prop_map(Exit::Signal),
            Just(Exit::Unknown),
        ];
        let cause = prop::sample::select(vec![StopCause::Interrupt, StopCause::Terminate, StopCause::Call]);
        prop_oneof![
            Just(Event::Met),
            Just(Event::MeetingFailed("no".into())),
            Just(Event::Tick),
            cause.prop_map(Event::Stop),
            (0u32..3, exit).prop_map(|(rank, exit)| Event::Exited { rank, exit }),
        ]
    }

    proptest! {
        #[test]
        fn a_job_ends_once_and_not_before_its_last_worker(events in prop::collection::vec(any_event(), 0..60), restarts in 0u32..3) {
            let mut job = Job::new(3, restarts, GRACE);
            let mut alive = [true; 3];
            let (mut now, mut ends) = (Instant::now(), 0);
            for event in events {
                now += Duration::from_secs(7);
                if let Event::Exited { rank, .. } = event {
                    // The driver sends one exit per worker.
                    if !std::mem::replace(&mut alive[rank as usize], false) { continue; }
                }
                for action in job.handle(event, now) {
                    match action {
                        Action::Start { attempt } => {
                            prop_assert!(alive.iter().all(|alive| !alive) && attempt <= restarts);
                            alive = [true; 3];
                        }
                        Action::End(_) => {
                            prop_assert!(alive.iter().all(|alive| !alive));
                            ends += 1;
                        }
                        _ => {}
                    }
                }
            }
            prop_assert_eq!(ends, u32::from(job.phase() == Phase::Ended));
        }

        #[test]
        fn whatever_happened_killing_all_workers_ends_the_job(events in prop::collection::vec(any_event(), 0..20)) {
            let mut job = Job::new(3, 0, GRACE);
            let mut alive = [true; 3];
            let now = Instant::now();
            for event in events {
                if let Event::Exited { rank, .. } = event
                    && !std::mem::replace(&mut alive[rank as usize], false) { continue; }
                job.handle(event, now);
            }
            for rank in (0..3).filter(|rank| alive[*rank as usize]) {
                job.handle(Event::Exited { rank, exit: Exit::Signal(9) }, now);
            }
            prop_assert_eq!(job.phase(), Phase::Ended);
        }
    }
}
