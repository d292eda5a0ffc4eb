//! The state machine of a job: how attempts begin and end.

mod blame;
mod failures;
mod hangs;
mod next_attempt;
mod restarts;
mod stops;

use proptest::prelude::*;
use xlaunch_spec::exit::ExitCode;

use super::*;
use xlaunch_cluster::state::{Coordinator, Input, Output};
use xlaunch_host::spawn::Exit;
use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::{Begin, Greeting, GroupEnd, GroupRules, GroupStop, NodePrepared, StopRequested};

const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(30);
const SHUTDOWN_TIMEOUT_MAX: Duration = Duration::from_secs(100);
const MILLISECOND: Duration = Duration::from_millis(1);

/// The rules of a job, with its number of restarts.
struct Given {
    rules: Rules,
    restarts: u32,
}

fn rules(kind: Kind, workers: u32, restarts: u32) -> Given {
    let rules = Rules {
        workers,
        kind,
        has_restarts: restarts > 0,
        requeue_codes: [99].into(),
        shutdown_timeout: SHUTDOWN_TIMEOUT,
        shutdown_timeout_max: SHUTDOWN_TIMEOUT_MAX,
        propagate_exit_code: false,
    };
    Given { rules, restarts }
}

impl Given {
    fn greeting(&self) -> Greeting {
        let group = GroupRules {
            trainer: self.rules.kind == Kind::Trainer,
            max_restarts: self.restarts,
            final_codes: vec![2, 65],
            free_codes: vec![78],
            fixed_ranks: true,
            join_timeout: 600.0,
            lease: 12.0,
            ..GroupRules::default()
        };
        Greeting {
            node_rank: Some(0),
            workers: self.rules.workers,
            min_nodes: 1,
            max_nodes: 1,
            new: true,
            rules: Some(group),
            ..Greeting::default()
        }
    }
}

/// A job on one node, with its coordinator. Messages between them are delivered at once.
struct Job {
    job: super::Job,
    coordinator: Coordinator,
    is_ready: bool,
}

impl Job {
    fn new(given: Given, now: Instant) -> Self {
        let mut this = Self { is_ready: true, ..Self::without_attempt(&given, now) };
        let actions = this.tell(Input::Greeted(Coordinator::HOST, given.greeting()), now);
        assert_eq!(actions, [Action::Start { attempt: 0 }]);
        this
    }

    /// A job whose node is not ready for its first attempt yet, and the message that says when it is.
    fn preparing(given: Given) -> (Self, Input) {
        let now = Instant::now();
        let mut this = Self::without_attempt(&given, now);
        assert_eq!(this.tell(Input::Greeted(Coordinator::HOST, given.greeting()), now), []);
        let prepared = FromAgent::Prepared(NodePrepared { shared: true, ..NodePrepared::default() });
        (this, Input::Message(Coordinator::HOST, prepared))
    }

    fn without_attempt(given: &Given, now: Instant) -> Self {
        let coordinator = Coordinator::new("run".into(), 1, || [0; 32], now);
        Self { job: super::Job::new(given.rules.clone()), coordinator, is_ready: false }
    }

    fn state(&self) -> JobState {
        self.job.state()
    }

    fn is_over(&self) -> bool {
        matches!(self.state(), JobState::Done | JobState::Failed)
    }

    fn attempt(&self) -> u32 {
        self.job.attempt()
    }

    fn deadline(&self) -> Option<Instant> {
        self.job.deadline().into_iter().chain(self.coordinator.deadline()).min()
    }

    fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Stop(cause) => {
                let signal = match cause {
                    StopCause::Signal(signal) => signal.try_into().unwrap(),
                    _ => 0,
                };
                let request = FromAgent::StopRequested(StopRequested { signal });
                self.tell(Input::Message(Coordinator::HOST, request), now)
            }
            Event::Tick => {
                let actions = self.tell(Input::Tick, now);
                [actions, self.act(Event::Tick, now)].concat()
            }
            event => self.act(event, now),
        }
    }

    /// Passes an event to the job. Returns its actions, and those that result from its reports.
    fn act(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut done = Vec::new();
        for action in self.job.handle(event, now) {
            let report = match action {
                Action::ReportFailure(failed) => FromAgent::Failed(failed),
                Action::ReportEnd(ended) => FromAgent::Ended(ended),
                other => {
                    done.push(other);
                    continue;
                }
            };
            done.extend(self.tell(Input::Message(Coordinator::HOST, report), now));
        }
        done
    }

    fn tell(&mut self, input: Input, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        for output in self.coordinator.handle(input, now) {
            let Output::Send(_, message) = output else { continue };
            actions.extend(match message {
                ToAgent::Prepare(_) if !self.is_ready => Vec::new(),
                ToAgent::Prepare(prepare) => {
                    let attempt = prepare.attempt;
                    let prepared = NodePrepared { attempt, shared: true, ..NodePrepared::default() };
                    self.tell(Input::Message(Coordinator::HOST, FromAgent::Prepared(prepared)), now)
                }
                ToAgent::Begin(Begin { attempt, .. }) => {
                    self.act(Event::Begin { attempt, node_rank: 0, first_rank: 0 }, now)
                }
                ToAgent::Stop(GroupStop { signal }) => {
                    let signal = Some(signal.try_into().unwrap()).filter(|signal| *signal != 0);
                    self.act(Event::Stop(signal.map_or(StopCause::Call, StopCause::Signal)), now)
                }
                ToAgent::Restarting(restarting) => self.act(Event::Restarting(restarting), now),
                ToAgent::End(end) => self.act(Event::GroupEnded(end), now),
                ToAgent::Welcome(_) => Vec::new(),
                other => panic!("{other:?}"),
            });
        }
        actions
    }
}

fn trainer(world: u32, restarts: u32) -> Job {
    Job::new(rules(Kind::Trainer, world, restarts), Instant::now())
}

fn command(world: u32, restarts: u32) -> Job {
    Job::new(rules(Kind::Command, world, restarts), Instant::now())
}

/// Event for one rank whose parameters differ.
fn differs(rank: u32) -> Event {
    let ranks = vec![(rank, format!("rank {rank}"))];
    Event::ReplicasDiffer { ranks, message: "replicas differ".into() }
}

fn exited(rank: u32, code: i32) -> Event {
    Event::Exited { rank, exit: Exit::Code(code) }
}

fn run(job: &mut Job, events: &[Event]) -> Vec<Action> {
    let now = Instant::now();
    events.iter().flat_map(|event| job.handle(event.clone(), now)).collect()
}

fn outcome(actions: &[Action]) -> Ending {
    let ends: Vec<Ending> = actions
        .iter()
        .filter_map(|action| match action {
            Action::End(ending) => Some((**ending).clone()),
            _ => None,
        })
        .collect();
    assert_eq!(ends.len(), 1, "{actions:?}");
    ends[0].clone()
}

#[test]
fn all_workers_done_is_done() {
    let mut job = trainer(2, 0);
    let actions = run(&mut job, &[Event::AllJoined, exited(1, 0), exited(0, 0)]);
    let end = outcome(&actions);
    assert_eq!((end.exit, end.root, end.others.len(), end.stopped), (ExitCode::Done, None, 0, false));
}

#[test]
fn trainer_exit_codes_pass_through() {
    for code in [2, 65, 70, 76] {
        let mut job = trainer(1, 0);
        let end = outcome(&run(&mut job, &[Event::AllJoined, exited(0, code)]));
        assert_eq!(i32::from(end.exit.code()), code);
    }
    let mut job = trainer(1, 0);
    assert_eq!(outcome(&run(&mut job, &[Event::AllJoined, exited(0, 3)])).exit, ExitCode::WorkerFailed);
}

fn own_error(rank: u32) -> Event {
    Event::OwnError { rank, message: "the disk is full".into(), exit: ExitCode::Data }
}

#[test]
fn restarts_are_counted_and_bad_data_is_not_retried() {
    let mut job = trainer(1, 2);
    for attempt in 1..=2 {
        let mut actions = run(&mut job, &[Event::AllJoined, exited(0, 1)]);
        if let Some(due) = job.deadline() {
            actions.extend(job.handle(Event::Tick, due));
        }
        assert!(actions.contains(&Action::Start { attempt }), "{actions:?}");
    }
    assert_eq!(outcome(&run(&mut job, &[Event::AllJoined, exited(0, 1)])).exit, ExitCode::WorkerFailed);
    let unready = Event::SpawnFailed { rank: 0, reason: "no checkpoint".into(), exit: ExitCode::Data };
    for events in [&[Event::AllJoined, exited(0, 65)][..], &[unready]] {
        assert_eq!(outcome(&run(&mut trainer(1, 2), events)).exit, ExitCode::Data, "{events:?}");
    }
}

fn any_event() -> impl Strategy<Value = Event> {
    let exit = prop_oneof![
        prop::sample::select(vec![0, 1, 65, 69, 75, 143]).prop_map(Exit::Code),
        prop::sample::select(vec![9, 11, 15]).prop_map(Exit::Signal),
        Just(Exit::Unknown),
    ];
    let cause = prop::sample::select(vec![StopCause::Signal(2), StopCause::Signal(15), StopCause::Call]);
    prop_oneof![
        Just(Event::AllJoined),
        Just(Event::RendezvousFailed("no".into())),
        Just(Event::Tick),
        Just(Event::Progress),
        any::<bool>().prop_map(|by_steps| Event::Advanced { by_steps }),
        (0u32..4).prop_map(|rank| Event::SessionOpened { rank }),
        (0u32..4).prop_map(|rank| Event::Finished { rank }),
        (0u32..4).prop_map(|rank| Event::SessionClosed { rank }),
        (0u32..4).prop_map(|rank| Event::OomKilled { rank }),
        (0u32..4).prop_map(differs),
        Just(Event::Checkpoint { step: 1, path: "/c".into() }),
        (0u32..4).prop_map(own_error),
        prop::collection::vec(0u32..4, 1..3).prop_map(|ranks| hung(&ranks)),
        cause.prop_map(Event::Stop),
        (0u32..3, exit).prop_map(|(rank, exit)| Event::Exited { rank, exit }),
    ]
}

proptest! {
    #[test]
    fn job_ends_once_and_after_its_last_worker(
        events in prop::collection::vec(any_event(), 0..60),
        restarts in 0u32..3,
    ) {
        let mut job = trainer(3, restarts);
        let mut alive = [true; 3];
        let (mut now, mut ends) = (Instant::now(), 0);
        for event in events {
            now += Duration::from_secs(7);
            if let Event::Exited { rank, .. } = event {
                // The driver reports exactly one exit per worker.
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
        prop_assert_eq!(ends, u32::from(job.is_over()));
    }

    #[test]
    fn killing_all_workers_ends_the_job_whatever_happened(events in prop::collection::vec(any_event(), 0..20)) {
        let mut job = trainer(3, 0);
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
        prop_assert!(job.is_over());
    }
}

fn killed(rank: u32, signal: i32) -> Event {
    Event::Exited { rank, exit: Exit::Signal(signal) }
}

#[test]
fn command_skips_the_rendezvous_and_its_codes_are_not_interpreted() {
    let mut job = command(2, 0);
    assert_eq!(job.state(), JobState::Running);
    assert_eq!(outcome(&run(&mut job, &[exited(0, 0), exited(1, 0)])).exit, ExitCode::Done);
    for code in [1, 65, 75, 143] {
        let mut job = command(2, 0);
        let actions = run(&mut job, &[exited(1, code), killed(0, 15)]);
        assert!(actions.contains(&Action::Signal(15)));
        let end = outcome(&actions);
        assert_eq!(
            (end.exit, end.root.unwrap().rank, end.others.len()),
            (ExitCode::WorkerFailed, Some(1), 1)
        );
    }
}

#[test]
fn root_cause_code_is_propagated_on_request() {
    for (event, code) in [(exited(1, 85), 85), (killed(1, 11), 139), (exited(1, 1), 1)] {
        let mut job = Job::new(propagating(rules(Kind::Command, 2, 0)), Instant::now());
        assert_eq!(outcome(&run(&mut job, &[event, exited(0, 3)])).exit.code(), code);
    }
}

fn propagating(mut given: Given) -> Given {
    given.rules.propagate_exit_code = true;
    given
}

fn notices(actions: &[Action]) -> Vec<&str> {
    let texts = actions.iter().filter_map(|action| match action {
        Action::Notify(text) => Some(text.as_str()),
        _ => None,
    });
    texts.collect()
}

#[test]
fn restart_is_recorded_announced_and_starts_a_fresh_attempt() {
    let mut job = trainer(2, 3);
    let start = Instant::now();
    job.handle(Event::AllJoined, start);
    job.handle(killed(1, 11), start + Duration::from_secs(10));
    let actions = job.handle(exited(0, 75), start + Duration::from_secs(10));
    let cause = Exit::Signal(11).to_string();
    let expected = [
        Action::Kill,
        Action::Notify(format!("rank 1: {cause}; restarting (1 of 3)")),
        Action::Restart { attempt: 0, rank: Some(1), cause, keep_evidence: true, counted_as: "crash" },
        Action::Start { attempt: 1 },
    ];
    assert_eq!(actions, expected);
    assert_eq!((job.state(), job.attempt(), job.deadline()), (JobState::Rendezvous, 1, None));
    // No state of the first attempt remains: SIGKILL is sent again, and a SIGKILL before it is a failure of its own.
    let again = job.handle(killed(0, 9), start + Duration::from_secs(20));
    assert_eq!(again, [Action::Kill, Action::Prepare { attempt: 2 }]);
    let delayed = job.handle(exited(1, 75), start + Duration::from_secs(20));
    assert!(notices(&delayed)[0].contains("; restarting in 1."), "{delayed:?}");
    assert!(matches!(&delayed[2], Action::Restart { attempt: 1, rank: Some(0), .. }), "{delayed:?}");
}

#[test]
fn failed_rendezvous_restarts_as_a_failure_of_the_group() {
    let mut job = trainer(1, 1);
    let events = [Event::RendezvousFailed("rank 0 did not join".into()), killed(0, 15)];
    let actions = run(&mut job, &events);
    assert_eq!(notices(&actions), ["the group: rank 0 did not join; restarting (1 of 1)"]);
    assert!(actions.contains(&Action::Restart {
        attempt: 0,
        rank: None,
        cause: "rank 0 did not join".into(),
        keep_evidence: true,
        counted_as: "rendezvous",
    }));
}

#[test]
fn nothing_happens_after_the_end() {
    let mut job = command(1, 0);
    outcome(&run(&mut job, &[exited(0, 0)]));
    assert_eq!(run(&mut job, &[Event::Tick, Event::Stop(StopCause::Call), exited(0, 1)]), []);
    assert_eq!((job.state(), job.deadline()), (JobState::Done, None));
}

fn hung(ranks: &[u32]) -> Event {
    Event::Hung { ranks: ranks.into(), message: "made no progress for 60 s".into() }
}
