//! Workers that are being torn down, and the processes that start in the meantime.

use super::*;

fn killed_by(rank: u32, signal: i32) -> Event {
    Event::Killed { rank, signal }
}

#[test]
fn peers_of_a_killed_rank_are_ended_and_their_successors_started_before_it_has_exited() {
    let mut job = trainer(3, 1);
    let actions = run(&mut job, &[Event::AllJoined, killed_by(1, 9)]);
    assert_eq!(actions, [Action::Kill, Action::Prepare { attempt: 1 }]);
    assert_eq!(run(&mut job, &[killed_by(0, 9), killed(2, 9), killed(0, 9)]), [], "consequences");
    let actions = run(&mut job, &[killed(1, 9)]);
    assert_eq!(notices(&actions), ["rank 1: signal 9 (SIGKILL: killed); restarting (1 of 1)"]);
    assert!(actions.contains(&Action::Start { attempt: 1 }), "{actions:?}");
}

#[test]
fn nothing_is_prepared_if_no_attempt_can_follow() {
    let mut job = trainer(2, 0);
    assert_eq!(run(&mut job, &[Event::AllJoined, killed_by(1, 11)]), [Action::Kill], "no restarts");
    let mut job = trainer(2, 1);
    let stopped = [Event::AllJoined, Event::Stop(StopCause::Call), killed_by(1, 11)];
    assert!(!run(&mut job, &stopped).iter().any(|action| matches!(action, Action::Prepare { .. })), "stop");
    let mut job = command(2, 1);
    assert_eq!(run(&mut job, &[killed_by(1, 11)]), [], "a command's worker counts when it has exited");
}

#[test]
fn rank_that_has_exited_is_not_killed_again() {
    let mut job = trainer(2, 1);
    let actions = run(&mut job, &[Event::AllJoined, exited(0, 0), killed_by(0, 9)]);
    assert_eq!(actions, []);
}
