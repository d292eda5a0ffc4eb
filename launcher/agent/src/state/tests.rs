mod blame;
mod next_attempt;
mod restarts;

use proptest::prelude::*;

use super::*;
use crate::command::Restarts;

const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(30);
const SHUTDOWN_TIMEOUT_MAX: Duration = Duration::from_secs(100);
const MILLISECOND: Duration = Duration::from_millis(1);

fn rules(kind: Kind, world: u32, restarts: u32) -> Rules {
    let restarts =
        Restarts { most: restarts, not_after: [2, 65].into(), free: [78].into(), ..Restarts::default() };
    Rules {
        world,
        kind,
        restarts,
        requeue_codes: [99].into(),
        shutdown_timeout: SHUTDOWN_TIMEOUT,
        shutdown_timeout_max: SHUTDOWN_TIMEOUT_MAX,
        propagate_exit_code: false,
        seed: 1,
    }
}

fn trainer(world: u32, restarts: u32) -> Job {
    Job::new(rules(Kind::Trainer, world, restarts), Instant::now())
}

fn command(world: u32, restarts: u32) -> Job {
    Job::new(rules(Kind::Command, world, restarts), Instant::now())
}

/// The parameters of one rank differ.
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
fn stop_while_modules_are_imported_ends_the_job_before_a_worker_starts() {
    let preloading = || Job::preloading(rules(Kind::Command, 2, 1), Instant::now());
    let mut job = preloading();
    let end = outcome(&run(&mut job, &[Event::Stop(StopCause::Signal(SIGTERM)), Event::Preloaded]));
    assert_eq!((end.exit, end.root, end.stopped), (ExitCode::Signal(15), None, true));
    let mut job = preloading();
    assert_eq!(run(&mut job, &[Event::Tick]), []);
    assert_eq!(run(&mut job, &[Event::Preloaded, Event::Preloaded]), [Action::Start { attempt: 0 }]);
    assert_eq!(job.phase(), Phase::Running);
}

#[test]
fn all_workers_done_is_done() {
    let mut job = trainer(2, 0);
    let actions = run(&mut job, &[Event::AllJoined, exited(1, 0), exited(0, 0)]);
    let end = outcome(&actions);
    assert_eq!((end.exit, end.root, end.others.len(), end.stopped), (ExitCode::Done, None, 0, false));
}

#[test]
fn crash_kills_the_group_and_is_the_root_even_if_a_peer_exits_first() {
    for signal in [11, 9] {
        let mut job = trainer(3, 0);
        let actions = run(&mut job, &[Event::AllJoined, exited(0, 75)]);
        assert_eq!(actions, [], "the cause is not known yet");
        assert_eq!(run(&mut job, &[killed(1, signal)]), [Action::Kill]);
        let end = outcome(&run(&mut job, &[killed(2, 9)]));
        assert_eq!(end.others.len(), 2);
        assert_eq!(end.root.unwrap().rank, Some(1));
        assert_eq!(end.exit, ExitCode::WorkerFailed);
    }
}

#[test]
fn trainer_exit_codes_pass_through() {
    for code in [65, 70, 76] {
        let mut job = trainer(1, 0);
        let end = outcome(&run(&mut job, &[Event::AllJoined, exited(0, code)]));
        assert_eq!(i32::from(end.exit.code()), code);
    }
    let mut job = trainer(1, 0);
    assert_eq!(outcome(&run(&mut job, &[Event::AllJoined, exited(0, 3)])).exit, ExitCode::WorkerFailed);
}

#[test]
fn stop_escalates_from_request_to_sigkill() {
    let mut job = trainer(1, 0);
    let now = Instant::now();
    job.handle(Event::AllJoined, now);
    assert!(job.handle(Event::Stop(StopCause::Signal(15)), now).contains(&Action::RequestStop));
    assert_eq!(job.handle(Event::Tick, now + SHUTDOWN_TIMEOUT - MILLISECOND), []);
    assert!(job.handle(Event::Tick, now + SHUTDOWN_TIMEOUT).contains(&Action::Kill));
    let end = outcome(&job.handle(killed(0, 9), now));
    assert_eq!((end.exit, end.stopped), (ExitCode::Retryable, true));
    let root = end.root.unwrap();
    assert_eq!((root.rank, root.message.as_str()), (None, "stopped without a checkpoint of the last step"));
    assert!(end.others.iter().all(|failure| failure.consequence) && end.others.len() == 1);
    assert_eq!(end.note.unwrap(), "newest checkpoint: none was saved in this run");
}

#[test]
fn progress_moves_the_deadline_of_a_stop_up_to_the_maximum() {
    let mut job = trainer(2, 0);
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    job.handle(Event::AllJoined, start);
    job.handle(Event::Progress, at(1));
    assert_eq!(job.deadline(), None, "an evaluation of a running job");
    job.handle(Event::Stop(StopCause::Call), at(10));
    assert_eq!(job.deadline(), Some(at(40)));
    for (now, due) in [(15, 45), (44, 74), (73, 103), (102, 110), (109, 110)] {
        assert_eq!(job.handle(Event::Tick, at(now)), []);
        assert_eq!((job.handle(Event::Progress, at(now)), job.deadline()), (vec![], Some(at(due))), "{now}");
    }
    assert!(job.handle(Event::Tick, at(110)).contains(&Action::Kill));
    job.handle(Event::Progress, at(110));
    assert_eq!(job.deadline(), None, "killed workers get no more time");
    // A command's workers, and ranks that have lost one, get none either.
    let mut job = command(1, 0);
    job.handle(Event::Stop(StopCause::Call), start);
    job.handle(Event::Progress, at(20));
    assert_eq!(job.deadline(), Some(at(30)));
    let mut job = trainer(2, 0);
    for event in [Event::AllJoined, Event::Stop(StopCause::Call), exited(0, 75), Event::Progress] {
        job.handle(event, start);
    }
    assert_eq!(job.deadline(), Some(start + FAILURE_GRACE));
}

#[test]
fn stop_without_the_last_checkpoint_is_retryable_and_names_the_newest_one() {
    let saved = |step| Event::Checkpoint { step, path: format!("/c/step-{step}").into() };
    for last in [killed(1, 9), exited(1, 75), exited(1, 65), killed(1, 11), exited(1, 0)] {
        let mut job = trainer(2, 3);
        let events = [Event::AllJoined, saved(10), saved(20), Event::Stop(StopCause::Call), exited(0, 143)];
        run(&mut job, &events);
        let end = outcome(&run(&mut job, std::slice::from_ref(&last)));
        assert_eq!((end.exit, end.stopped), (ExitCode::Retryable, true), "{last:?}");
        assert_eq!(end.note.as_deref(), Some("newest checkpoint: step 20, /c/step-20"), "{last:?}");
        // A failure of a rank's own is still the root cause.
        let own = matches!(last, Event::Exited { exit: Exit::Code(65) | Exit::Signal(_), .. });
        assert_eq!(end.root.unwrap().rank, own.then_some(1), "{last:?}");
    }
}

#[test]
fn one_interrupt_stops_cleanly_and_two_kill() {
    let interrupt = Event::Stop(StopCause::Signal(2));
    let mut job = trainer(2, 3);
    let events = [Event::AllJoined, interrupt.clone(), exited(0, 143), exited(1, 143)];
    assert_eq!(outcome(&run(&mut job, &events)).exit, ExitCode::Stopped);

    let mut job = trainer(1, 3);
    let actions = run(&mut job, &[Event::AllJoined, interrupt.clone(), interrupt]);
    assert!(actions.contains(&Action::Kill));
    let end = outcome(&run(&mut job, &[Event::Exited { rank: 0, exit: Exit::Signal(9) }]));
    assert_eq!(end.exit, ExitCode::Interrupted);
}

#[test]
fn failed_rendezvous_is_the_root_and_its_workers_are_consequences() {
    let mut job = trainer(2, 0);
    let failed = Event::RendezvousFailed("rank 1 did not join".into());
    assert_eq!(run(&mut job, &[failed]), [Action::Kill]);
    let end = outcome(&run(&mut job, &[exited(0, 69), killed(1, 9)]));
    assert_eq!((end.exit, end.root.unwrap().rank, end.others.len()), (ExitCode::Rendezvous, None, 2));
    assert!(end.others.iter().all(|failure| failure.consequence));
}

#[test]
fn ranks_that_do_not_open_the_communicator_fail_the_attempt() {
    let mut job = trainer(2, 0);
    let actions = run(&mut job, &[Event::AllJoined, Event::RendezvousFailed("rank 1 hangs".into())]);
    assert_eq!(actions, [Action::Kill]);
    let end = outcome(&run(&mut job, &[killed(0, 9), killed(1, 9)]));
    assert_eq!((end.exit, end.root.unwrap().message.as_str()), (ExitCode::Rendezvous, "rank 1 hangs"));
}

fn own_error(rank: u32) -> Event {
    Event::OwnError { rank, message: "the disk is full".into(), exit: ExitCode::Data }
}

#[test]
fn rank_that_reported_an_error_is_the_root_in_whatever_order_ranks_exit() {
    let exits = [exited(1, 75), exited(0, 65), exited(2, 75)];
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut job = trainer(3, 0);
        let mut actions = run(&mut job, &[Event::AllJoined, own_error(0)]);
        assert_eq!(actions, [], "it needs time to exit");
        actions.extend(order.iter().flat_map(|index| run(&mut job, &[exits[*index].clone()])));
        let end = outcome(&actions);
        let root = end.root.unwrap();
        assert_eq!((root.rank, end.exit), (Some(0), ExitCode::Data), "{order:?}");
        assert_eq!(root.message, format!("{}: the disk is full", Exit::Code(65)), "{order:?}");
        assert!(end.others.len() == 2 && end.others.iter().all(|failure| failure.consequence), "{order:?}");
    }
}

#[test]
fn others_are_killed_as_soon_as_the_rank_that_failed_has_exited() {
    let mut job = trainer(3, 0);
    let start = Instant::now();
    job.handle(Event::AllJoined, start);
    job.handle(own_error(1), start);
    assert_eq!(job.handle(own_error(1), start), [], "it is repeated");
    assert_eq!(job.deadline(), Some(start + FAILURE_GRACE));
    assert_eq!(job.handle(exited(0, 75), start + FAILURE_GRACE / 2), []);
    assert_eq!(job.deadline(), Some(start + FAILURE_GRACE), "later failures do not move the deadline");
    assert_eq!(job.handle(exited(1, 65), start + FAILURE_GRACE / 2), [Action::Kill]);
    assert_eq!(outcome(&job.handle(killed(2, 9), start)).others.len(), 2);
}

#[test]
fn rank_that_hangs_after_its_own_error_is_killed_and_still_the_root() {
    let mut job = trainer(2, 0);
    let start = Instant::now();
    for event in [Event::AllJoined, own_error(1), exited(0, 75)] {
        job.handle(event, start);
    }
    let actions = job.handle(Event::Tick, start + FAILURE_GRACE);
    assert_eq!(notices(&actions), ["killing ranks that did not exit in time: 1"]);
    let end = outcome(&job.handle(killed(1, 9), start));
    let root = end.root.unwrap();
    assert_eq!((root.rank, root.message.as_str(), end.exit), (Some(1), "the disk is full", ExitCode::Data));
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
    let mut job = trainer(1, 2);
    assert_eq!(outcome(&run(&mut job, &[Event::AllJoined, exited(0, 65)])).exit, ExitCode::Data);
}

#[test]
fn unknown_exit_is_not_success() {
    let mut job = trainer(1, 0);
    let end = outcome(&run(&mut job, &[Event::AllJoined, Event::Exited { rank: 0, exit: Exit::Unknown }]));
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
                // The driver reports one exit per worker.
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
        prop_assert_eq!(job.phase(), Phase::Ended);
    }
}

fn killed(rank: u32, signal: i32) -> Event {
    Event::Exited { rank, exit: Exit::Signal(signal) }
}

#[test]
fn command_skips_the_rendezvous_and_its_codes_are_not_interpreted() {
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
fn root_cause_code_is_propagated_on_request() {
    for (event, code) in [(exited(1, 85), 85), (killed(1, 11), 139), (exited(1, 1), 1)] {
        let mut job =
            Job::new(Rules { propagate_exit_code: true, ..rules(Kind::Command, 2, 0) }, Instant::now());
        assert_eq!(outcome(&run(&mut job, &[event, exited(0, 3)])).exit.code(), code);
    }
}

#[test]
fn stop_signal_is_forwarded_to_command_workers_and_sets_the_exit_code() {
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
fn crash_before_a_stop_is_still_the_failure() {
    let mut job = command(2, 0);
    let events = [exited(1, 7), Event::Stop(StopCause::Signal(2)), killed(0, 15)];
    let end = outcome(&run(&mut job, &events));
    assert_eq!((end.exit, end.root.unwrap().rank), (ExitCode::WorkerFailed, Some(1)));
}

fn notices(actions: &[Action]) -> Vec<&str> {
    let texts = actions.iter().filter_map(|action| match action {
        Action::Notify(text) => Some(text.as_str()),
        _ => None,
    });
    texts.collect()
}

#[test]
fn rank_that_fails_the_rendezvous_by_itself_is_the_root() {
    let mut job = trainer(2, 0);
    let end = outcome(&run(&mut job, &[exited(0, 69), exited(1, 1)]));
    assert_eq!((end.exit, end.root.unwrap().rank), (ExitCode::Rendezvous, Some(0)));
    assert!(!end.others[0].consequence);
}

#[test]
fn rank_that_exits_before_it_joined_fails_the_rendezvous() {
    let mut job = trainer(2, 0);
    let end = outcome(&run(&mut job, &[exited(1, 0), exited(0, 0)]));
    let root = end.root.unwrap();
    assert_eq!((end.exit, root.rank, root.consequence), (ExitCode::Rendezvous, Some(1), false));
    assert_eq!(root.message, "exited before it joined");
    assert_eq!(end.others, [], "after the first failure the phase is Stopping, and exit code 0 is success");
}

#[test]
fn exit_code_143_without_a_stop_is_a_failure_and_our_sigkill_a_consequence() {
    let mut job = trainer(3, 0);
    assert_eq!(run(&mut job, &[Event::AllJoined, exited(2, 143)]), [Action::Kill]);
    let end = outcome(&run(&mut job, &[killed(0, 15), killed(1, 9)]));
    assert_eq!((end.exit, end.root.unwrap().rank), (ExitCode::WorkerFailed, Some(2)));
    let consequences: Vec<bool> = end.others.iter().map(|failure| failure.consequence).collect();
    assert_eq!(consequences, [false, true], "xlaunch sends no SIGTERM to trainers");
}

#[test]
fn lost_peers_alone_make_the_first_of_them_the_root() {
    let mut job = trainer(3, 0);
    let start = Instant::now();
    for event in [Event::AllJoined, exited(1, 75), exited(0, 75)] {
        assert_eq!(job.handle(event, start), []);
    }
    // The last one hangs in a collective.
    assert!(job.handle(Event::Tick, start + FAILURE_GRACE).contains(&Action::Kill));
    let end = outcome(&job.handle(killed(2, 9), start));
    assert_eq!((end.exit, end.root.unwrap().rank), (ExitCode::Retryable, Some(1)));
}

#[test]
fn a_second_all_joined_does_not_restart_a_stopping_job() {
    let mut job = trainer(2, 0);
    run(&mut job, &[Event::AllJoined, exited(0, 1), Event::AllJoined]);
    assert_eq!(job.phase(), Phase::Stopping);
}

#[test]
fn failed_start_is_the_root_and_stops_the_group() {
    let mut job = command(2, 0);
    let reason = "no such file".to_owned();
    let mut actions = run(&mut job, &[Event::SpawnFailed { rank: 0, reason, exit: ExitCode::WorkerFailed }]);
    assert_eq!(actions, [Action::Signal(15)]);
    actions.extend(run(&mut job, &[killed(1, 15)]));
    let root = outcome(&actions).root.unwrap();
    assert_eq!(
        (root.rank, root.message.as_str(), root.status),
        (Some(0), "failed to start: no such file", None)
    );
}

#[test]
fn stop_during_the_rendezvous_kills_at_once() {
    let mut job = trainer(2, 1);
    let actions = run(&mut job, &[Event::Stop(StopCause::Call)]);
    assert_eq!(actions, [Action::Notify("stopping before training began".into()), Action::Kill]);
    assert_eq!(job.deadline(), None);
    let end = outcome(&run(&mut job, &[killed(0, 9), killed(1, 9)]));
    assert_eq!((end.exit, end.stopped, end.others.len()), (ExitCode::Retryable, true, 2));
}

#[test]
fn stop_of_a_failing_job_changes_nothing_but_prevents_the_restart() {
    let mut job = command(2, 3);
    run(&mut job, &[exited(0, 1)]);
    let deadline = job.deadline();
    assert_eq!(job.handle(Event::Stop(StopCause::Call), Instant::now()), []);
    assert_eq!(job.deadline(), deadline);
    assert_eq!(outcome(&run(&mut job, &[killed(1, 15)])).exit, ExitCode::WorkerFailed);
}

#[test]
fn only_the_second_sigint_kills() {
    let mut job = trainer(1, 0);
    let stop = |signal| Event::Stop(StopCause::Signal(signal));
    let first = run(&mut job, &[Event::AllJoined, stop(15)]);
    assert_eq!(notices(&first), ["stopping at the next step, with a checkpoint"]);
    assert_eq!(run(&mut job, &[stop(15), Event::Stop(StopCause::Call)]), []);
    let second = run(&mut job, &[stop(2)]);
    assert_eq!(second, [Action::Notify("second interrupt: killing the workers".into()), Action::Kill]);
    assert_eq!(run(&mut job, &[stop(2)]), []);
}

#[test]
fn first_sigint_explains_the_second() {
    let interrupt = Event::Stop(StopCause::Signal(2));
    let actions = run(&mut trainer(1, 0), &[Event::AllJoined, interrupt.clone()]);
    let text = "stopping at the next step, with a checkpoint (interrupt again to kill the workers)";
    assert_eq!(notices(&actions), [text]);
    let text = "stopping: the workers have 30 s to exit (interrupt again to kill the workers)";
    assert_eq!(notices(&run(&mut command(1, 0), &[interrupt])), [text]);
    let actions = run(&mut command(1, 0), &[Event::Stop(StopCause::Call)]);
    assert_eq!(notices(&actions), ["stopping: the workers have 30 s to exit"]);
    assert_eq!(actions[1], Action::Signal(15));
}

#[test]
fn escalation_names_the_ranks_that_are_left() {
    let mut job = trainer(3, 0);
    let start = Instant::now();
    job.handle(Event::AllJoined, start);
    job.handle(Event::Stop(StopCause::Call), start);
    job.handle(exited(1, 143), start);
    let kill_at = start + SHUTDOWN_TIMEOUT;
    assert_eq!(job.handle(Event::Tick, kill_at - MILLISECOND), []);
    let kill = job.handle(Event::Tick, kill_at);
    assert_eq!(notices(&kill), ["killing ranks that did not exit in time: 0, 2"]);
    assert_eq!((job.deadline(), job.handle(Event::Tick, kill_at + SHUTDOWN_TIMEOUT)), (None, vec![]));
}

#[test]
fn stop_after_which_all_ranks_complete_is_done() {
    let mut job = trainer(2, 0);
    let events = [Event::AllJoined, Event::Stop(StopCause::Call), exited(0, 0), exited(1, 0)];
    assert_eq!(outcome(&run(&mut job, &events)).exit, ExitCode::Done);
    let mut job = trainer(2, 0);
    let events = [Event::AllJoined, Event::Stop(StopCause::Call), exited(0, 143), exited(1, 143)];
    let end = outcome(&run(&mut job, &events));
    assert_eq!((end.exit, end.stopped, end.note), (ExitCode::Stopped, true, None));
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
    assert_eq!((job.phase(), job.attempt(), job.deadline()), (Phase::Rendezvous, 1, None));
    // Nothing of the first attempt remains: SIGKILL is sent again, and a SIGKILL before it is a failure of its own.
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
    assert_eq!((job.phase(), job.deadline()), (Phase::Ended, None));
}

fn hung(ranks: &[u32]) -> Event {
    Event::Hung { ranks: ranks.into(), message: "made no progress for 60 s".into() }
}

#[test]
fn hung_rank_of_a_trainer_is_killed_at_once_and_is_the_root() {
    let mut job = trainer(4, 0);
    assert_eq!(run(&mut job, &[Event::AllJoined, hung(&[2, 3])]), [Action::Kill]);
    let end = outcome(&run(&mut job, &[killed(0, 9), killed(1, 9), killed(2, 9), killed(3, 9)]));
    assert_eq!(end.exit, ExitCode::Retryable);
    let root = end.root.unwrap();
    assert_eq!((root.rank, root.message.as_str()), (Some(2), "made no progress for 60 s"));
    let others: Vec<_> = end.others.iter().map(|other| (other.rank.unwrap(), other.consequence)).collect();
    assert_eq!(others, [(3, false), (0, true), (1, true)]);
    assert_eq!(end.others[0].message, "hung, as rank 2 did");
}

#[test]
fn hang_of_a_command_without_stacks_is_terminated_then_killed() {
    let mut job = command(2, 0);
    let start = Instant::now();
    assert_eq!(job.handle(hung(&[1]), start), [Action::PrintStacks(vec![1])]);
    assert_eq!(job.handle(Event::NoStacks, start), [Action::Signal(15)]);
    assert_eq!(job.handle(Event::NoStacks, start), []);
    assert_eq!(job.deadline(), Some(start + SHUTDOWN_TIMEOUT));
    assert_eq!(job.handle(killed(0, 15), start), []);
    assert!(job.handle(Event::Tick, start + SHUTDOWN_TIMEOUT).contains(&Action::Kill));
    let end = outcome(&job.handle(killed(1, 9), start + SHUTDOWN_TIMEOUT));
    let root = end.root.unwrap();
    assert_eq!((end.exit, root.rank, root.consequence), (ExitCode::Retryable, Some(1), false));
    assert!(end.others[0].consequence);
}

#[test]
fn group_is_terminated_when_the_hung_ranks_have_printed_their_stacks() {
    let mut job = command(4, 0);
    let actions = run(&mut job, &[hung(&[1, 2]), killed(1, 6)]);
    assert_eq!(actions, [Action::PrintStacks(vec![1, 2])], "rank 2 still prints");
    assert_eq!(run(&mut job, &[exited(3, 1)]), [], "it has lost its peer");
    assert_eq!(run(&mut job, &[killed(2, 6)]), [Action::Signal(15)]);
    let end = outcome(&run(&mut job, &[killed(0, 15)]));
    let root = end.root.unwrap();
    assert_eq!(
        (end.exit, root.rank, root.message.as_str()),
        (ExitCode::Retryable, Some(1), "made no progress for 60 s")
    );
    let others: Vec<_> = end.others.iter().map(|other| (other.rank.unwrap(), other.consequence)).collect();
    assert_eq!(others, [(2, false), (3, true), (0, true)]);
}

#[test]
fn group_is_terminated_after_the_stacks_timeout() {
    let mut job = command(2, 0);
    let start = Instant::now();
    job.handle(hung(&[1]), start);
    assert_eq!(job.deadline(), Some(start + STACKS_TIMEOUT));
    assert_eq!(job.handle(Event::Tick, start + STACKS_TIMEOUT - MILLISECOND), []);
    assert_eq!(job.handle(Event::Tick, start + STACKS_TIMEOUT), [Action::Signal(15)]);
    assert_eq!(job.deadline(), Some(start + STACKS_TIMEOUT + SHUTDOWN_TIMEOUT));
}

#[test]
fn requeue_code_of_any_rank_ends_the_job_without_a_restart() {
    let mut job = command(3, 5);
    let end = outcome(&run(&mut job, &[exited(0, 0), exited(2, 99), killed(1, 15)]));
    let root = end.root.unwrap();
    assert_eq!((end.exit, root.rank, end.stopped), (ExitCode::Retryable, Some(2), false));
    assert_eq!(root.message, "exit code 99: preempted (--requeue-codes)");
    let mut propagating =
        Job::new(Rules { propagate_exit_code: true, ..rules(Kind::Command, 1, 0) }, Instant::now());
    assert_eq!(outcome(&run(&mut propagating, &[exited(0, 99)])).exit, ExitCode::Retryable);
}

/// A rank that only lost its peer exits first, or writes of an error before.
#[test]
fn rank_that_is_preempted_is_the_root_cause_although_others_fail_first() {
    let mut job = command(3, 5);
    let now = Instant::now();
    let symptom = |rank, lost_peer| Event::Symptom { rank, lost_peer, at: now };
    assert_eq!(run(&mut job, &[symptom(0, true), exited(0, 1)]), [], "waits for the culprit");
    assert_eq!(run(&mut job, &[exited(1, 99)]), [Action::Signal(15)]);
    let end = outcome(&run(&mut job, &[symptom(2, false), exited(2, 1)]));
    let root = end.root.unwrap();
    assert_eq!((end.exit, root.rank, root.infrastructure), (ExitCode::Retryable, Some(1), true));
}

#[test]
fn requeue_code_after_sigterm_is_preemption_unless_a_rank_has_failed() {
    let mut stopped = command(2, 0);
    let end =
        outcome(&run(&mut stopped, &[Event::Stop(StopCause::Signal(15)), killed(0, 15), exited(1, 99)]));
    assert_eq!((end.exit, end.stopped, end.root.unwrap().rank), (ExitCode::Retryable, true, Some(1)));
    let mut failed = command(2, 0);
    let end = outcome(&run(&mut failed, &[exited(0, 1), exited(1, 99)]));
    assert_eq!((end.exit, end.root.unwrap().rank), (ExitCode::WorkerFailed, Some(0)));
    let mut trainer = trainer(1, 0);
    let end = outcome(&run(&mut trainer, &[Event::AllJoined, exited(0, 99)]));
    assert_eq!(end.exit, ExitCode::WorkerFailed, "codes of the trainer have their own meanings");
}

/// Exit code 2 is final if a rank fails with it by itself.
#[test]
fn hang_is_restarted_whatever_the_exit_code_after_sigterm() {
    let mut job = command(1, 1);
    let actions = run(&mut job, &[hung(&[0]), exited(0, 2)]);
    assert_eq!(notices(&actions), ["rank 0: made no progress for 60 s; restarting (1 of 1)"]);
    assert!(actions.contains(&Action::Start { attempt: 1 }));
}

#[test]
fn hang_verdict_that_comes_too_late_changes_nothing() {
    let mut job = trainer(3, 0);
    assert_eq!(run(&mut job, &[Event::AllJoined, exited(1, 0), hung(&[1])]), [], "it has exited meanwhile");
    assert_eq!(run(&mut job, &[exited(0, 1), hung(&[2])]), [Action::Kill], "the job has failed meanwhile");
    assert_eq!(outcome(&run(&mut job, &[killed(2, 9)])).root.unwrap().rank, Some(0));
    let mut job = trainer(2, 0);
    run(&mut job, &[Event::AllJoined, Event::Stop(StopCause::Call)]);
    let deadline = job.deadline();
    assert_eq!(
        (run(&mut job, &[hung(&[0])]), job.deadline()),
        (vec![], deadline),
        "a stop has its own deadline"
    );
}
