//! Ranks that hang, and preemption.

use super::*;

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
    assert_eq!(end.others[0].message, "hung, like rank 2");
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
    let mut propagating = Job::new(propagating(rules(Kind::Command, 1, 0)), Instant::now());
    assert_eq!(outcome(&run(&mut propagating, &[exited(0, 99)])).exit, ExitCode::Retryable);
}

/// A rank that only lost its peer exits first, or writes about an error before that.
#[test]
fn rank_that_is_preempted_is_the_root_cause_although_others_fail_first() {
    let mut job = command(3, 5);
    let now = Instant::now();
    let symptom = |rank, lost_peer| Event::Symptom { rank, error: "bad".into(), lost_peer, at: now };
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

/// Exit code 2 would be final if a rank failed with it by itself.
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
