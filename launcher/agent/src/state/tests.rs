use proptest::prelude::*;

use super::*;
use crate::command::Restarts;

const GRACE: Duration = Duration::from_secs(30);

fn rules(kind: Kind, world: u32, restarts: u32) -> Rules {
    let restarts = Restarts { most: restarts, not_after: [2, 65].into() };
    Rules { world, kind, restarts, shutdown_timeout: GRACE, propagate_exit_code: false, seed: 1 }
}

fn trainer(world: u32, restarts: u32) -> Job {
    Job::new(rules(Kind::Trainer, world, restarts), Instant::now())
}

fn command(world: u32, restarts: u32) -> Job {
    Job::new(rules(Kind::Command, world, restarts), Instant::now())
}

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
    let mut job = trainer(2, 0);
    let actions = run(&mut job, &[Event::Met, exited(1, 0), exited(0, 0)]);
    assert_eq!(outcome(&actions), Outcome { exit: ExitCode::Done, root: None, others: vec![] });
    assert!(!actions.contains(&Action::Signal(15)));
}

#[test]
fn a_crash_ends_the_others_and_is_the_root_even_when_a_peer_is_seen_first() {
    for signal in [11, 9] {
        let mut job = trainer(3, 0);
        let crash = Event::Exited { rank: 1, exit: Exit::Signal(signal) };
        let mut actions = run(&mut job, &[Event::Met, exited(0, 75)]);
        assert!(actions.contains(&Action::Signal(15)));
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
        let mut job = trainer(1, 0);
        let end = outcome(&run(&mut job, &[Event::Met, exited(0, code)]));
        assert_eq!(i32::from(end.exit.code()), code);
    }
    let mut job = trainer(1, 0);
    assert_eq!(outcome(&run(&mut job, &[Event::Met, exited(0, 3)])).exit, ExitCode::WorkerFailed);
}

#[test]
fn a_stop_is_asked_for_then_enforced() {
    let mut job = trainer(1, 0);
    let now = Instant::now();
    job.handle(Event::Met, now);
    assert!(job.handle(Event::Stop(StopCause::Signal(15)), now).contains(&Action::AskToStop));
    assert_eq!(job.handle(Event::Tick, now + GRACE / 2), []);
    assert!(job.handle(Event::Tick, now + GRACE).contains(&Action::Signal(15)));
    assert!(job.handle(Event::Tick, now + GRACE + TERMINATE_GRACE).contains(&Action::Kill));
    let end = outcome(&job.handle(Event::Exited { rank: 0, exit: Exit::Signal(9) }, now));
    assert_eq!((end.exit, end.root), (ExitCode::Stopped, None));
}

#[test]
fn one_interrupt_stops_cleanly_and_two_end_at_once() {
    let interrupt = Event::Stop(StopCause::Signal(2));
    let mut job = trainer(2, 3);
    let events = [Event::Met, interrupt.clone(), exited(0, 143), exited(1, 143)];
    assert_eq!(outcome(&run(&mut job, &events)).exit, ExitCode::Stopped);

    let mut job = trainer(1, 3);
    let actions = run(&mut job, &[Event::Met, interrupt.clone(), interrupt]);
    assert!(actions.contains(&Action::Kill));
    let end = outcome(&run(&mut job, &[Event::Exited { rank: 0, exit: Exit::Signal(9) }]));
    assert_eq!(end.exit, ExitCode::Interrupted);
}

#[test]
fn a_failed_meeting_is_the_root_and_its_workers_follow() {
    let mut job = trainer(2, 0);
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
    let mut job = trainer(1, 2);
    for attempt in 1..=2 {
        let mut actions = run(&mut job, &[Event::Met, exited(0, 1)]);
        if let Some(due) = job.deadline() {
            actions.extend(job.handle(Event::Tick, due));
        }
        assert!(actions.contains(&Action::Start { attempt }), "{actions:?}");
    }
    assert_eq!(outcome(&run(&mut job, &[Event::Met, exited(0, 1)])).exit, ExitCode::WorkerFailed);
    let mut job = trainer(1, 2);
    assert_eq!(outcome(&run(&mut job, &[Event::Met, exited(0, 65)])).exit, ExitCode::Data);
}

#[test]
fn an_unknown_exit_is_no_success() {
    let mut job = trainer(1, 0);
    let end = outcome(&run(&mut job, &[Event::Met, Event::Exited { rank: 0, exit: Exit::Unknown }]));
    assert_eq!(end.exit, ExitCode::WorkerFailed);
}

fn any_event() -> impl Strategy<Value = Event> {
    let exit = prop_oneof![
        prop::sample::select(vec![0, 1, 65, 69, 75, 143]).prop_map(Exit::Code),
        prop::sample::select(vec![9, 11, 15]).prop_map(Exit::Signal),
        Just(Exit::Unknown),
    ];
    let cause = prop::sample::select(vec![StopCause::Signal(2), StopCause::Signal(15), StopCause::Call]);
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
        let mut job = trainer(3, restarts);
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
        prop_assert_eq!(job.phase(), Phase::Ended);
    }
}

fn killed(rank: u32, signal: i32) -> Event {
    Event::Exited { rank, exit: Exit::Signal(signal) }
}

#[test]
fn a_command_needs_no_meeting_and_its_codes_mean_nothing_to_us() {
    let mut job = command(2, 0);
    assert_eq!(job.phase(), Phase::Running);
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
fn the_root_causes_code_is_passed_on_where_that_is_asked_for() {
    for (event, code) in [(exited(1, 85), 85), (killed(1, 11), 139), (exited(1, 1), 1)] {
        let mut job =
            Job::new(Rules { propagate_exit_code: true, ..rules(Kind::Command, 2, 0) }, Instant::now());
        assert_eq!(outcome(&run(&mut job, &[event, exited(0, 3)])).exit.code(), code);
    }
}

#[test]
fn a_signal_is_passed_to_a_commands_workers_and_is_the_exit_code() {
    for signal in [1, 2, 3, 15] {
        let mut job = command(2, 3);
        let actions = run(&mut job, &[Event::Stop(StopCause::Signal(signal))]);
        assert!(actions.contains(&Action::Signal(signal)), "{actions:?}");
        let end = outcome(&run(&mut job, &[killed(0, signal), exited(1, 1)]));
        assert_eq!((i32::from(end.exit.code()), end.root), (128 + signal, None));
    }
    let mut job = command(1, 0);
    run(&mut job, &[Event::Stop(StopCause::Call)]);
    assert_eq!(outcome(&run(&mut job, &[exited(0, 0)])).exit.code(), 143);
}

#[test]
fn a_crash_before_the_stop_is_still_the_failure() {
    let mut job = command(2, 0);
    let events = [exited(1, 7), Event::Stop(StopCause::Signal(2)), killed(0, 15)];
    let end = outcome(&run(&mut job, &events));
    assert_eq!((end.exit, end.root.unwrap().rank), (ExitCode::WorkerFailed, Some(1)));
}

#[test]
fn later_restarts_wait_and_a_stop_in_the_meantime_ends_the_job() {
    let mut job = command(1, 5);
    let start = Instant::now();
    let first = job.handle(exited(0, 1), start + Duration::from_secs(10));
    assert!(first.contains(&Action::Start { attempt: 1 }), "{first:?}");
    let second = job.handle(exited(0, 1), start + Duration::from_secs(20));
    assert_eq!(job.phase(), Phase::Waiting);
    assert!(!second.iter().any(|action| matches!(action, Action::Start { .. })), "{second:?}");
    let due = job.deadline().unwrap();
    assert_eq!(job.handle(Event::Tick, due - Duration::from_millis(1)), []);
    assert_eq!(job.handle(Event::Tick, due), [Action::Start { attempt: 2 }]);
    job.handle(exited(0, 4), due + Duration::from_secs(10));
    let end = outcome(&job.handle(Event::Stop(StopCause::Signal(15)), due + Duration::from_secs(11)));
    assert_eq!((end.exit, end.root.unwrap().status), (ExitCode::WorkerFailed, Some(Exit::Code(4))));
}
