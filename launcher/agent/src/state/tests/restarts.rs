//! Progress, budgets, and the exit code of a job that has used up its restarts.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// Fails the only rank of an attempt, and starts the next one at once. Returns the actions.
fn fail(job: &mut Job, events: &[Event], now: Instant) -> Vec<Action> {
    let mut actions: Vec<Action> = events.iter().flat_map(|event| job.handle(event.clone(), now)).collect();
    if let Some(due) = job.deadline() {
        actions.extend(job.handle(Event::Tick, due));
    }
    actions
}

#[test]
fn restart_after_progress_is_immediate_however_often_the_job_fails() {
    let (mut job, now) = (trainer(1, 50), Instant::now());
    for attempt in 1..=50 {
        let events = [Event::AllJoined, Event::Advanced { by_steps: true }, killed(0, 9)];
        let actions: Vec<Action> = events.into_iter().flat_map(|event| job.handle(event, now)).collect();
        assert!(actions.contains(&Action::Start { attempt }), "{attempt}: {actions:?}");
    }
}

#[test]
fn third_attempt_without_progress_ends_the_job_with_the_first_error() {
    let (mut job, now) = (trainer(2, 50), Instant::now());
    let first = fail(&mut job, &[Event::AllJoined, exited(1, 3), killed(0, 9)], now);
    let kept = |actions: &[Action]| {
        actions.iter().any(|action| matches!(action, Action::Restart { keep_evidence: true, .. }))
    };
    assert!(kept(&first), "{first:?}");
    let second = fail(&mut job, &[Event::AllJoined, exited(0, 4), killed(1, 9)], now + 60 * SECOND);
    assert!(!kept(&second), "{second:?}");
    let last = fail(&mut job, &[Event::AllJoined, exited(0, 5), killed(1, 9)], now + 120 * SECOND);
    assert_eq!(notices(&last), ["no restart: 3 attempts in a row made no progress"]);
    let end = outcome(&last);
    let root = end.root.unwrap();
    assert_eq!((root.rank, root.status, end.of_kept_attempt), (Some(1), Some(Exit::Code(3)), true));
    let note = "this is the first error of 3 attempts without progress; the last one failed with rank 0: exit code 5";
    assert_eq!(end.note.as_deref(), Some(note));
}

#[test]
fn restart_that_is_not_counted_does_not_replace_the_first_error() {
    let (mut job, now) = (trainer(1, 50), Instant::now());
    let mut actions = Vec::new();
    for code in [3, 78, 4, 5] {
        actions = fail(&mut job, &[Event::AllJoined, exited(0, code)], now);
    }
    assert_eq!(outcome(&actions).root.unwrap().status, Some(Exit::Code(3)));
}

#[test]
fn attempts_that_fail_in_the_same_way_end_with_the_evidence_of_the_last() {
    let (mut job, now) = (trainer(1, 2), Instant::now());
    let mut actions = Vec::new();
    for _ in 0..3 {
        actions = fail(&mut job, &[Event::AllJoined, exited(0, 3)], now);
    }
    assert_eq!(notices(&actions), ["all 2 restarts are used up"]);
    let end = outcome(&actions);
    assert_eq!((end.of_kept_attempt, end.note), (false, None));
}

#[test]
fn error_before_the_last_progress_is_not_kept() {
    let (mut job, now) = (trainer(1, 50), Instant::now());
    fail(&mut job, &[Event::AllJoined, exited(0, 3)], now);
    fail(&mut job, &[Event::AllJoined, Event::Advanced { by_steps: true }, exited(0, 4)], now);
    let mut actions = Vec::new();
    for code in [5, 6, 7] {
        actions = fail(&mut job, &[Event::AllJoined, exited(0, code)], now);
    }
    assert_eq!(outcome(&actions).root.unwrap().status, Some(Exit::Code(5)));
}

#[test]
fn sixty_seconds_until_the_failure_are_progress_of_a_command_but_not_of_a_trainer() {
    for (seconds, kind, delayed) in
        [(60, Kind::Command, false), (59, Kind::Command, true), (60, Kind::Trainer, true)]
    {
        let start = Instant::now();
        let mut job = Job::new(rules(kind, 2, 9), start);
        let mut now = start;
        for _ in 0..2 {
            now = job.deadline().unwrap_or(now);
            job.handle(Event::Tick, now);
            job.handle(exited(0, 1), now + seconds * SECOND);
            // The time that the other ranks take to end does not count.
            now += (seconds + 30) * SECOND;
            job.handle(killed(1, 15), now);
        }
        assert_eq!(job.state() == JobState::Starting, delayed, "{seconds} {kind:?}");
    }
}

#[test]
fn restarts_used_up_by_infrastructure_are_retryable_and_by_a_gpu_76() {
    let joined = |event: Event| vec![Event::AllJoined, event];
    let not_saved = Event::OwnError { rank: 0, message: "no space".into(), exit: ExitCode::SaveFailed };
    let cases = [
        (joined(killed(0, 9)), 1, 75),
        (joined(killed(0, 11)), 1, 1),
        (vec![Event::AllJoined, Event::OomKilled { rank: 0 }, killed(0, 9)], 76, 76),
        (joined(exited(0, 75)), 75, 75),
        (vec![exited(0, 69)], 69, 75),
        (vec![Event::RendezvousFailed("nobody came".into()), killed(0, 9)], 69, 75),
        (vec![Event::AllJoined, not_saved, exited(0, 79)], 65, 75),
        (joined(exited(0, 79)), 65, 75),
        (joined(exited(0, 76)), 76, 76),
        (joined(exited(0, 3)), 1, 1),
    ];
    for (events, without_restarts, spent) in cases {
        let now = Instant::now();
        let mut job = trainer(1, 0);
        let end = outcome(&fail(&mut job, &events, now));
        assert_eq!(i32::from(end.exit.code()), without_restarts, "{events:?}");
        let mut job = trainer(1, 1);
        fail(&mut job, &events, now);
        let end = outcome(&fail(&mut job, &events, now));
        assert_eq!(i32::from(end.exit.code()), spent, "{events:?}");
    }
    // This is torchrun's exit code.
    let mut job = command(1, 1);
    fail(&mut job, &[killed(0, 9)], Instant::now());
    assert_eq!(outcome(&fail(&mut job, &[killed(0, 9)], Instant::now())).exit, ExitCode::WorkerFailed);
}

#[test]
fn replica_that_differs_twice_ends_the_job_with_76_and_its_name() {
    let (mut job, now) = (trainer(3, 9), Instant::now());
    let attempt = |rank| {
        let reports = [
            Event::AllJoined,
            Event::Advanced { by_steps: true },
            differs(rank),
            differs(rank),
            exited(rank, 76),
        ];
        let others = (0..3).filter(move |other| *other != rank).map(|other| exited(other, 76));
        reports.into_iter().chain(others).collect::<Vec<_>>()
    };
    for rank in [1, 2] {
        let actions = fail(&mut job, &attempt(rank), now);
        assert!(notices(&actions)[0].contains("; restarting ("), "{actions:?}");
        assert!(actions.iter().any(|it| matches!(it, Action::Restart { rank: Some(it), .. } if *it == rank)));
    }
    let actions = fail(&mut job, &attempt(1), now);
    let reason = "no restart: the parameters on rank 1 differed for the second time; test its memory";
    assert_eq!(notices(&actions), [reason]);
    let end = outcome(&actions);
    assert_eq!((end.exit, end.root.unwrap().rank, end.others.len()), (ExitCode::Gpu, Some(1), 2));
    assert!(end.others.iter().all(|failure| failure.consequence), "{:?}", end.others);
}

#[test]
fn long_life_of_a_command_is_progress_until_it_counts_steps() {
    let is_delayed = |first: &[Event]| {
        let (mut job, mut now) = (command(1, 50), Instant::now());
        first.iter().for_each(|event| drop(job.handle(event.clone(), now)));
        (0..3).any(|_| {
            now += 61 * SECOND;
            job.handle(exited(0, 3), now);
            job.state() == JobState::Starting
        })
    };
    let advanced = |by_steps| Event::Advanced { by_steps };
    assert!(!is_delayed(&[]) && !is_delayed(&[advanced(false)]));
    assert!(is_delayed(&[advanced(true)]), "steps stand still");
}
