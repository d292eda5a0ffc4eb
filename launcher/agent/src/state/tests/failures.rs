//! Failures of ranks and of the rendezvous.

use super::*;

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
fn unknown_exit_is_not_success() {
    let mut job = trainer(1, 0);
    let end = outcome(&run(&mut job, &[Event::AllJoined, Event::Exited { rank: 0, exit: Exit::Unknown }]));
    assert_eq!(end.exit, ExitCode::WorkerFailed);
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
    // The last rank hangs in a collective.
    assert!(job.handle(Event::Tick, start + FAILURE_GRACE).contains(&Action::Kill));
    let end = outcome(&job.handle(killed(2, 9), start));
    assert_eq!((end.exit, end.root.unwrap().rank), (ExitCode::Retryable, Some(1)));
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
