use proptest::prelude::*;
use xlaunch_proto::v1::{CheckpointReport, CheckpointSkipped, EvalReport, SampleReport, TrainStarted};

use super::*;

fn step(number: u64, seconds: f64, checkpoint: f64) -> Report {
    Report::Step(StepReport {
        step: number,
        step_seconds: seconds,
        checkpoint_seconds: checkpoint,
        ..StepReport::default()
    })
}

fn started(total_steps: u64) -> Report {
    Report::TrainStarted(TrainStarted { total_steps, ..TrainStarted::default() })
}

/// Seconds of all kinds, rounded to milliseconds.
fn kinds(account: &TimeAccount, now: Instant) -> [f64; 7] {
    account.accounting(now).kinds().map(|(_, seconds)| (seconds * 1e3).round() / 1e3)
}

#[test]
fn time_of_a_job_with_a_restart_is_divided_by_kind() {
    let begin = Instant::now();
    let at = |seconds: f64| begin + Duration::from_secs_f64(seconds);
    let mut account = TimeAccount::new(begin);
    account.begin_attempt(at(1.0));
    account.reported(&started(4), at(3.0));
    // start 4, step 2
    account.reported(&step(1, 2.0, 0.0), at(6.0));
    account.reported(&step(2, 2.0, 0.0), at(8.0));
    // evaluation 1 and a sample 0.25
    account.reported(&Report::Eval(EvalReport::default()), at(9.0));
    let sample = Report::Sample(SampleReport::default());
    account.reported(&sample, at(9.25));
    // checkpoint 0.5, step 1.75
    account.reported(&step(3, 2.0, 0.5), at(11.5));
    // A checkpoint written in the background takes no time.
    account.reported(
        &Report::Checkpoint(CheckpointReport { seconds: 1.0, ..CheckpointReport::default() }),
        at(12.0),
    );
    // step 1.5, all of which is lost
    account.failed(at(13.0));
    account.failed(at(13.5));
    account.restarts("killed", at(14.0));
    account.begin_attempt(at(15.0));
    account.reported(&started(4), at(16.0));
    account.reported(&sample, at(16.5));
    account.reported(&step(3, 1.0, 0.0), at(18.0));
    assert_eq!(
        account.take_restart_times().as_deref(),
        Some("restarted in 5.0 s: stop 1.0, delay 1.0, resume 1.0, first step 2.0")
    );
    assert_eq!(account.take_restart_times(), None);
    account.reported(&step(4, 2.0, 0.0), at(20.0));
    account.reported(&Report::Eval(EvalReport::default()), at(20.5));
    account.reported(&Report::Checkpoint(CheckpointReport::default()), at(21.5));
    // A sample 0.5, which is not reported because of a stop.
    account.end(at(22.0));
    //   step  repeated checkpoint evaluation start hang down
    let expected = [9.25, 1.0, 1.5, 2.25, 6.0, 0.0, 2.0];
    assert_eq!(kinds(&account, at(100.0)), expected);
    let count = RestartCount { cause: "killed".into(), restarts: 1 };
    assert_eq!(account.accounting(at(100.0)).restarts, [count]);
}

#[test]
fn open_interval_counts_as_the_current_use() {
    let begin = Instant::now();
    let at = |seconds: u64| begin + Duration::from_secs(seconds);
    let mut account = TimeAccount::new(begin);
    account.begin_attempt(begin);
    assert_eq!(kinds(&account, at(2)), [0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0]);
    account.reported(&step(1, 1.0, 0.0), at(2));
    account.reported(&step(2, 1.0, 0.0), at(3));
    assert_eq!(kinds(&account, at(9)), [8.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]);
    account.hung();
    account.hung();
    assert_eq!(kinds(&account, at(13)), [2.0, 0.0, 0.0, 0.0, 1.0, 10.0, 0.0], "since the last progress");
    account.failed(at(13));
    assert_eq!(kinds(&account, at(15)), [2.0, 0.0, 0.0, 0.0, 1.0, 10.0, 2.0]);
    account.begin_attempt(at(15));
    // Resumed at step 1: the second step is repeated, the third is new.
    account.reported(&step(2, 1.0, 0.0), at(16));
    account.reported(&step(3, 1.0, 0.0), at(17));
    assert_eq!(kinds(&account, at(17)), [3.0, 1.0, 0.0, 0.0, 1.0, 10.0, 2.0]);
    account.hung();
    account.continues(at(20));
    assert_eq!(account.accounting(at(20)).hangs, 2);
    assert_eq!(kinds(&account, at(21)), [4.0, 1.0, 0.0, 0.0, 1.0, 13.0, 2.0]);
}

#[test]
fn command_runs_from_the_start_of_its_processes() {
    let begin = Instant::now();
    let at = |seconds: u64| begin + Duration::from_secs(seconds);
    let mut account = TimeAccount::new(begin);
    account.begin_attempt(begin);
    account.spawned(true, at(1));
    account.failed(at(5));
    account.begin_attempt(at(6));
    account.spawned(true, at(7));
    assert_eq!(account.take_restart_times().as_deref(), Some("restarted in 2.0 s: delay 1.0, start 1.0"));
    assert_eq!(kinds(&account, at(9)), [6.0, 0.0, 0.0, 0.0, 2.0, 0.0, 1.0]);
}

#[test]
fn final_checkpoint_of_a_stop_counts_as_checkpoint_time() {
    let begin = Instant::now();
    let at = |seconds: u64| begin + Duration::from_secs(seconds);
    let mut account = TimeAccount::new(begin);
    account.begin_attempt(begin);
    account.reported(&started(100), at(1));
    account.reported(&step(1, 1.0, 0.0), at(2));
    account.stopping();
    account.reported(&step(2, 1.0, 0.0), at(3));
    account.reported(&Report::Checkpoint(CheckpointReport::default()), at(5));
    account.end(at(5));
    assert_eq!(kinds(&account, at(9)), [2.0, 0.0, 2.0, 0.0, 1.0, 0.0, 0.0]);
}

#[derive(Clone, Debug)]
enum Input {
    Attempt,
    Spawned(bool),
    Report(Report),
    Hung,
    Continues,
    Stopping,
    Failed,
    End,
}

fn input() -> impl Strategy<Value = Input> {
    let report = prop_oneof![
        5 => (1_u64..20, -1.0_f64..10.0, -1.0_f64..10.0).prop_map(|(number, took, save)| step(number, took, save)),
        1 => Just(started(19)),
        1 => Just(Report::Eval(EvalReport::default())),
        1 => Just(Report::Sample(SampleReport::default())),
        1 => Just(Report::Checkpoint(CheckpointReport::default())),
        1 => Just(Report::CheckpointSkipped(CheckpointSkipped::default())),
    ];
    prop_oneof![
        2 => Just(Input::Attempt),
        1 => any::<bool>().prop_map(Input::Spawned),
        8 => report.prop_map(Input::Report),
        1 => Just(Input::Hung),
        1 => Just(Input::Continues),
        1 => Just(Input::Stopping),
        2 => Just(Input::Failed),
        1 => Just(Input::End),
    ]
}

proptest! {
    #[test]
    fn kinds_add_up_to_the_wall_time_whatever_happens(
        inputs in prop::collection::vec((0_u64..5_000, input()), 0..60),
    ) {
        let begin = Instant::now();
        let (mut account, mut now, mut over) = (TimeAccount::new(begin), begin, None);
        for (milliseconds, input) in inputs {
            now += Duration::from_millis(milliseconds);
            match input {
                Input::Attempt => account.begin_attempt(now),
                Input::Spawned(runs) => account.spawned(runs, now),
                Input::Report(report) => account.reported(&report, now),
                Input::Hung => account.hung(),
                Input::Continues => account.continues(now),
                Input::Stopping => account.stopping(),
                Input::Failed => account.failed(now),
                Input::End => {
                    account.end(now);
                    over.get_or_insert(now);
                }
            }
            let wall = (over.unwrap_or(now) - begin).as_secs_f64();
            let sum = account.accounting(now).wall_seconds();
            prop_assert!((sum - wall).abs() < 1e-6, "{} of {}: {:?}", sum, wall, account);
        }
    }
}
