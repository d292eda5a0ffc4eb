//! Stops: requests, signals, interrupts, deadlines.

use super::*;

#[test]
fn stop_before_the_first_attempt_ends_the_job_before_a_worker_starts() {
    let (mut job, prepared) = Job::preparing(rules(Kind::Command, 2, 1));
    let end = outcome(&run(&mut job, &[Event::Stop(StopCause::Signal(SIGTERM))]));
    assert_eq!((end.exit, end.root, end.stopped), (ExitCode::Signal(15), None, true));
    assert_eq!(job.tell(prepared, Instant::now()), []);
    let (mut job, prepared) = Job::preparing(rules(Kind::Command, 2, 1));
    assert_eq!(run(&mut job, &[Event::Tick]), []);
    assert_eq!(job.tell(prepared.clone(), Instant::now()), [Action::Start { attempt: 0 }]);
    assert_eq!(job.tell(prepared, Instant::now()), []);
    assert_eq!(job.state(), JobState::Running);
}

#[test]
fn stop_during_a_restart_delay_exits_with_its_code_and_names_the_last_failure() {
    let stopped_in_delay = |mut job: Job, saved: bool, cause| {
        let now = Instant::now();
        for code in [1, 4] {
            run(&mut job, &[Event::AllJoined]);
            if saved {
                run(&mut job, &[Event::Checkpoint { step: 10, path: "/c/step-10".into() }]);
            }
            job.handle(exited(0, code), now);
        }
        assert_eq!(job.state(), JobState::Starting);
        let before_the_end = job.deadline().unwrap() - MILLISECOND;
        assert_eq!(job.handle(Event::Tick, before_the_end), []);
        let actions = job.handle(Event::Stop(cause), before_the_end);
        let end = outcome(&actions);
        assert!(end.stopped && end.root.is_none() && end.others.is_empty(), "{end:?}");
        let said = end.elsewhere.unwrap_or_else(|| notices(&actions).concat());
        assert!(
            said.contains(" before the next attempt; the last one failed: rank 0: exit code 4"),
            "{said}"
        );
        (end.exit.code(), said)
    };
    let (sigterm, interrupt) = (StopCause::Signal(SIGTERM), StopCause::Signal(SIGINT));
    for (job, saved, cause, code, by) in [
        (command(1, 3), false, sigterm, 143, "stopped by SIGTERM "),
        (command(1, 3), false, interrupt, 130, "stopped by SIGINT "),
        (command(1, 3), false, StopCause::Call, 143, "stopped by a user "),
        (trainer(1, 3), true, sigterm, 143, "stopped by SIGTERM "),
        (trainer(1, 3), true, interrupt, 143, "stopped by SIGINT "),
        (trainer(1, 3), false, sigterm, 75, "stopped by SIGTERM "),
    ] {
        let (exit, said) = stopped_in_delay(job, saved, cause);
        assert!(exit == code && said.starts_with(by), "{exit} {said}");
        assert_eq!(said.ends_with("; no checkpoint was saved in this run"), code == 75, "{said}");
    }
}

#[test]
fn node_that_leaves_reports_no_failure_of_the_workers_it_has_ended() {
    let mut job = command(2, 0);
    let now = Instant::now();
    let pause = job.job.handle(Event::Pause("node 1 (h1) leaves".into()), now);
    assert!(pause.contains(&Action::Signal(SIGTERM)), "{pause:?}");
    for rank in [0, 1] {
        job.job.handle(killed(rank, 15), now);
    }
    let left = GroupEnd { exit_code: 143, stopped: true, notice: "left".into(), ..GroupEnd::default() };
    let actions = job.job.handle(Event::GroupEnded(left), now);
    let end = outcome(&actions);
    assert_eq!((end.exit.code(), end.root, end.stopped, notices(&actions)), (143, None, true, vec!["left"]));
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
    // A command's workers get no extension, and neither do ranks that have lost a peer.
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
        // A rank's own failure is still the root cause.
        let own = matches!(last, Event::Exited { exit: Exit::Code(65) | Exit::Signal(_), .. });
        assert_eq!(end.root.unwrap().rank, own.then_some(1), "{last:?}");
    }
}

#[test]
fn unreadable_checkpoint_does_not_count() {
    let saved = |step| Event::Checkpoint { step, path: format!("/c/step-{step}").into() };
    let incomplete = || Event::CheckpointIncomplete("a file is missing".into());
    let end = |events: &[Event]| {
        let mut job = trainer(1, 0);
        outcome(&run(&mut job, &[&[Event::AllJoined, saved(10)], events].concat()))
    };
    let stopped = || [Event::Stop(StopCause::Call), exited(0, 143)];
    let lost = end(&[&[incomplete()][..], &stopped()].concat());
    assert_eq!((lost.exit, lost.root.unwrap().message.as_str()), (ExitCode::Retryable, "a file is missing"));
    assert_eq!(lost.note.as_deref(), Some("newest checkpoint: step 10, /c/step-10"));
    let later = end(&[&[incomplete(), saved(20)][..], &stopped()].concat());
    assert_eq!(later.exit, ExitCode::Stopped);
    // The last checkpoint of a job that has done all its steps.
    let done = end(&[incomplete(), exited(0, 0)]);
    assert_eq!((done.exit, done.root.unwrap().message.as_str()), (ExitCode::Data, "a file is missing"));
}

#[test]
fn node_that_has_paused_reports_whether_its_workers_have_saved() {
    let code = |events: &[Event]| {
        let mut job = trainer(2, 3).job;
        let events = [&[Event::AllJoined, Event::Pause("h1 joins".into())], events].concat();
        let now = Instant::now();
        let mut actions = events.into_iter().flat_map(|event| job.handle(event, now));
        let ended = actions.find_map(|action| match action {
            Action::ReportEnd(ended) => Some(ended),
            _ => None,
        });
        ended.map(|ended| (ended.exit_code, ended.r#final)).unwrap()
    };
    assert_eq!(code(&[exited(0, 143), exited(1, 143)]), (143, false));
    assert_eq!(code(&[exited(0, 0), exited(1, 0)]), (0, false), "all steps were done");
    assert_eq!(code(&[exited(0, 143), exited(1, 75)]).0, 75);
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

#[test]
fn a_second_all_joined_does_not_restart_a_stopping_job() {
    let mut job = trainer(2, 0);
    run(&mut job, &[Event::AllJoined, exited(0, 1), Event::AllJoined]);
    assert_eq!(job.state(), JobState::Stopping);
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
fn stop_of_a_failing_job_only_prevents_the_restart() {
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
fn escalation_names_the_remaining_ranks() {
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
fn rank_that_was_done_before_a_stop_is_not_blamed_for_the_end_of_the_others() {
    let now = Instant::now();
    for (cause, signal) in [
        (StopCause::Signal(SIGTERM), SIGTERM),
        (StopCause::Signal(SIGINT), SIGINT),
        (StopCause::Call, SIGTERM),
    ] {
        let mut job = command(2, 1);
        run(&mut job, &[exited(1, 0)]);
        job.handle(Event::Stop(cause), now);
        let end = outcome(&job.handle(killed(0, signal), now));
        let expected = (128 + u8::try_from(signal).unwrap(), None, true);
        assert_eq!((end.exit.code(), end.root, end.stopped), expected, "{cause:?}");
    }
    // The group changes, and another attempt follows.
    let mut job = command(2, 0);
    run(&mut job, &[exited(1, 0)]);
    job.job.handle(Event::Pause("node 1 (h1) joins".into()), now);
    let actions = job.job.handle(killed(0, SIGTERM), now);
    let ended = actions.iter().find_map(|action| match action {
        Action::ReportEnd(ended) => Some(ended),
        _ => None,
    });
    assert_eq!(ended.unwrap().root, None, "{actions:?}");
}
