//! Choice of the root cause among several failures.

use super::*;

fn lost_peer(rank: u32) -> Event {
    Event::OwnError { rank, message: "lost rank 1".into(), exit: ExitCode::Retryable }
}

fn root(actions: &[Action]) -> (Option<u32>, String) {
    let root = outcome(actions).root.unwrap();
    (root.rank, root.message)
}

#[test]
fn rank_that_reports_the_loss_of_a_peer_is_a_consequence_with_its_reason() {
    let mut job = trainer(3, 0);
    let waits = run(&mut job, &[Event::AllJoined, lost_peer(0), exited(0, 75)]);
    assert_eq!(waits, [], "the cause is not known yet");
    assert_eq!(run(&mut job, &[killed(1, 9)]), [Action::Kill]);
    let end = outcome(&run(&mut job, &[killed(2, 9)]));
    assert_eq!(end.root.unwrap().rank, Some(1));
    assert_eq!(end.others[0].message, format!("{}: lost rank 1", Exit::Code(75)));
    assert!(end.others[0].consequence && end.others[0].infrastructure);
}

#[test]
fn exit_with_0_before_the_end_of_the_work_is_the_root_in_any_order() {
    let opened = |rank| Event::SessionOpened { rank };
    let closed = Event::SessionClosed { rank: 1 };
    let exits = [exited(1, 0), closed, exited(0, 75)];
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut job = trainer(2, 0);
        run(&mut job, &[Event::AllJoined, opened(0), opened(1)]);
        let actions: Vec<Action> =
            order.iter().flat_map(|index| run(&mut job, &[exits[*index].clone()])).collect();
        let expected = (Some(1), "exited with code 0 while other ranks needed it".to_owned());
        assert_eq!(root(&actions), expected, "{order:?}");
    }
}

#[test]
fn early_exit_ends_ranks_that_would_wait_for_it() {
    let mut job = trainer(2, 0);
    run(&mut job, &[Event::AllJoined, Event::SessionOpened { rank: 1 }, exited(1, 0)]);
    assert_eq!(job.state(), JobState::Running, "its last reports may not have been read");
    assert_eq!(run(&mut job, &[Event::SessionClosed { rank: 1 }]), [Action::Kill]);
}

#[test]
fn ranks_that_have_finished_may_exit_at_any_time() {
    let mut job = trainer(2, 0);
    let opened = |rank| Event::SessionOpened { rank };
    let finished = |rank| Event::Finished { rank };
    let first = [Event::AllJoined, opened(0), opened(1), finished(1), exited(1, 0)];
    run(&mut job, &first);
    // The last rank's report is read after its exit.
    let actions = run(&mut job, &[Event::SessionClosed { rank: 1 }, exited(0, 0)]);
    assert_eq!(outcome(&actions).exit, ExitCode::Done);
}

fn symptom(rank: u32, lost_peer: bool, at: Instant) -> Event {
    Event::Symptom { rank, error: "ValueError: bad".into(), lost_peer, at }
}

#[test]
fn command_whose_peers_exit_first_is_the_root() {
    let start = Instant::now();
    let mut job = command(3, 0);
    // Rank 1 has raised an exception and takes a while to exit.
    let waits = run(&mut job, &[symptom(0, true, start + 2 * MILLISECOND), exited(0, 1)]);
    assert_eq!(waits, [], "ranks that have lost a peer are not the cause");
    assert_eq!(job.deadline().map(|at| at > start), Some(true));
    let actions = run(&mut job, &[symptom(1, false, start), exited(1, 1)]);
    assert_eq!(actions, [Action::Signal(15)]);
    let actions = run(&mut job, &[symptom(2, true, start + MILLISECOND), killed(2, 15)]);
    let end = outcome(&actions);
    assert_eq!((end.root.unwrap().rank, end.others.len()), (Some(1), 2));
    assert!(end.others.iter().all(|failure| failure.consequence), "{:?}", end.others);
}

#[test]
fn restart_of_a_command_names_the_error_that_its_rank_wrote() {
    let mut job = command(2, 1);
    run(&mut job, &[symptom(1, false, Instant::now()), killed(1, 6)]);
    let actions = run(&mut job, &[killed(0, 15)]);
    let what = "signal 6 (SIGABRT: aborted): ValueError: bad";
    assert!(actions.contains(&Action::Notify(format!("rank 1: {what}; restarting (1 of 1)"))), "{actions:?}");
    let restart = |action: &Action| matches!(action, Action::Restart { cause, .. } if cause == what);
    assert!(actions.iter().any(restart), "{actions:?}");
}

#[test]
fn error_that_was_written_first_is_the_root_also_if_that_rank_was_terminated() {
    let start = Instant::now();
    let mut job = command(2, 0);
    let first = [symptom(0, false, start + MILLISECOND), exited(0, 1)];
    assert_eq!(run(&mut job, &first), [Action::Signal(15)]);
    let actions = run(&mut job, &[symptom(1, false, start), killed(1, 15)]);
    assert_eq!(outcome(&actions).root.unwrap().rank, Some(1));
}

#[test]
fn ranks_of_a_command_that_all_lost_a_peer_are_terminated_after_a_while() {
    let start = Instant::now();
    let mut job = command(2, 0);
    for event in [symptom(0, true, start), exited(0, 1)] {
        assert_eq!(job.handle(event, start), []);
    }
    assert_eq!(job.handle(Event::Tick, start + FAILURE_GRACE), [Action::Signal(15)]);
    assert!(job.handle(Event::Tick, start + FAILURE_GRACE + SHUTDOWN_TIMEOUT).contains(&Action::Kill));
    assert_eq!(outcome(&job.handle(killed(1, 9), start)).root.unwrap().rank, Some(0));
}

#[test]
fn rank_of_a_command_that_was_done_too_early_is_the_root() {
    let start = Instant::now();
    let mut job = command(3, 0);
    let lost = |rank| [symptom(rank, true, start), exited(rank, 1)];
    let actions = run(&mut job, &[vec![exited(1, 0)], lost(0).into(), lost(2).into()].concat());
    assert_eq!(root(&actions), (Some(1), "exited with code 0 while other ranks needed it".into()));
    // If a rank fails by itself, that is the root cause instead.
    let mut job = command(2, 0);
    let actions = run(&mut job, &[exited(1, 0), symptom(0, false, start), exited(0, 1)]);
    assert_eq!(root(&actions).0, Some(0));
}
