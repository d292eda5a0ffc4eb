//! Tests of the fold over records. The tests of the scheduler and of commands are in files of their own.

mod backfill;
mod evaluate;
mod examination;
mod fairness;
mod properties;
mod schedule;

use super::record::MAX_TEXT_BYTES;
use super::*;
use xlaunch_proto::v1::{Dependency, DependencyCondition, Scheduling, WarningSignal};

pub(crate) fn submitted(job: u64, uid: u32, gpus: u32, priority: i32) -> Record {
    Record::Submitted(Box::new(Submitted {
        job,
        uid,
        gpus,
        priority,
        request_id: format!("r{job}"),
        workers: gpus.max(1),
        trainer: true,
        at: job,
        ..Submitted::default()
    }))
}

fn with(mut submitted: Submitted, change: impl FnOnce(&mut Scheduling)) -> Submitted {
    change(&mut submitted.scheduling);
    submitted
}

fn starting(job: u64, gpus: &[&str]) -> Record {
    let gpus = gpus.iter().map(|gpu| gpu.to_string()).collect();
    Record::Starting { job, start: 1, gpus, boot: "b".into(), at: 10 }
}

fn ended(job: u64, at: u64) -> Record {
    Record::Ended {
        job,
        end: End::Done,
        exit: Some(0),
        reason: String::new(),
        report: String::new(),
        at,
        order: 0,
        usage: None,
    }
}

fn requeued(job: u64, reason: &str) -> Record {
    Record::Requeued { job, reason: reason.into(), lost: false, at: 0, usage: None }
}

fn drained(gpus: &[&str], undo: bool, reason: &str) -> Record {
    let gpus = gpus.iter().map(|gpu| gpu.to_string()).collect();
    Record::Drained { gpus, undo, reason: reason.into(), uid: 0, at: 0 }
}

fn of(records: impl IntoIterator<Item = Record>) -> Jobs {
    let mut jobs = Jobs::default();
    records.into_iter().for_each(|record| jobs.apply(record));
    jobs
}

#[test]
fn records_of_every_phase_reproduce_the_jobs() {
    let reason = || "x".to_string();
    let jobs = of([
        submitted(1, 1, 0, 0),
        ended(1, 5),
        Record::Forgotten { job: 1 },
        submitted(2, 1, 1, 0),
        starting(2, &["a"]),
        ended(2, 30),
        submitted(3, 1, 1, 3),
        starting(3, &["a"]),
        Record::Cancelled { job: 3, uid: 7, user: String::new(), at: 1 },
        submitted(4, 2, 0, -1),
        starting(4, &[]),
        requeued(4, "x"),
        submitted(5, 2, 0, 0),
        Record::Ended {
            job: 5,
            end: End::Cancelled,
            exit: None,
            reason: reason(),
            report: reason(),
            at: 9,
            order: 0,
            usage: None,
        },
        submitted(6, 2, 0, 0),
        drained(&["a"], false, "x"),
        drained(&[], false, "x"),
    ]);
    assert_eq!(of(jobs.records()), jobs);
    assert_eq!((jobs.submitted, jobs.ended), (6, 3));
    assert_eq!(jobs.job_of_request(1, "", "r2"), Some(2));
    assert_eq!(jobs.job_of_request(2, "", "r2"), None);
    assert_eq!(jobs.job_of_request(1, "", "r1"), None);
}

#[test]
fn scheduling_is_read_as_earlier_builds_wrote_it_and_empty_values_are_not_written() {
    let earlier = r#"{"record":"submitted","job":1,"time_limit":60,"warning":{"signal":10,"before":5},
        "memory":1024,"after":[{"job":3,"condition":"fail","met":true},{"job":4,"condition":"any"}],"requeue":true}"#;
    let Record::Submitted(read) = serde_json::from_str(earlier).unwrap() else { panic!() };
    let dependency =
        |job, condition: DependencyCondition, met| Dependency { job, condition: condition.into(), met };
    let expected = Scheduling {
        time_limit_seconds: Some(60),
        warning: Some(WarningSignal { signal: 10, seconds_before: 5 }),
        memory_bytes: Some(1024),
        after: vec![
            dependency(3, DependencyCondition::Fail, Some(true)),
            dependency(4, DependencyCondition::Any, None),
        ],
        requeue: true,
        ..Scheduling::default()
    };
    assert_eq!(read.scheduling, expected);
    let written = serde_json::to_string(&Record::Submitted(read.clone())).unwrap();
    assert_eq!(serde_json::from_str::<Record>(&written).unwrap(), Record::Submitted(read));
    let written = serde_json::to_value(Submitted::default()).unwrap();
    let empty = ["time_limit_seconds", "warning", "memory_bytes", "cpus", "after", "requeue"];
    assert!(empty.iter().all(|key| written.get(key).is_none()), "{written}");
}

#[test]
fn compacted_records_are_minimal() {
    let counted = |submitted, ended| Record::Counted { submitted, ended };
    assert_eq!(of([]).records(), [counted(0, 0)]);
    let queued = submitted(1, 1, 0, 0);
    let clock = |latest| Record::Clock { boot: String::new(), offset: 0, latest };
    assert_eq!(of([queued.clone()]).records(), [counted(1, 0), clock(1), queued.clone()]);
    let mut end = ended(1, 5);
    let Record::Ended { order, .. } = &mut end else { unreachable!() };
    *order = 1;
    let records = [counted(1, 0), clock(5), queued.clone(), end];
    assert_eq!(of(records.clone()).records(), records, "an end without a start");
    let records = [counted(1, 0), clock(10), queued.clone(), starting(1, &["a"])];
    assert_eq!(of(records.clone()).records(), records, "a job that was not cancelled");
    let requeued = requeued(1, "x");
    let bare = Record::Starting { job: 1, start: 1, gpus: vec![], boot: String::new(), at: 0 };
    let jobs = of([queued.clone(), starting(1, &["a"]), requeued.clone()]);
    assert_eq!(jobs.records(), [counted(1, 0), clock(10), queued, bare, requeued]);
}

#[test]
fn phases_follow_the_records() {
    let mut jobs = of([submitted(1, 1, 2, 0)]);
    let phase = |jobs: &Jobs| jobs.jobs[&1].phase.clone();
    let queued = |starts, reason: &str| Phase::Queued { starts, reason: reason.into() };
    assert_eq!(phase(&jobs), queued(0, ""));
    jobs.apply(Record::Cancelled { job: 1, uid: 1, user: String::new(), at: 1 });
    assert_eq!(phase(&jobs), queued(0, ""), "a queued job is cancelled by its end");
    let starting =
        |start| Record::Starting { job: 1, start, gpus: vec!["a".into()], boot: "b".into(), at: 7 };
    let active = |start, cancelled| Phase::Active {
        start,
        gpus: vec!["a".into()],
        boot: "b".into(),
        at: 7,
        cancelled,
        warned: false,
        over_limit: None,
    };
    jobs.apply(starting(1));
    assert_eq!(phase(&jobs), active(1, None));
    jobs.apply(requeued(1, "x"));
    assert_eq!(phase(&jobs), queued(1, "x"));
    jobs.apply(starting(2));
    jobs.apply(Record::Cancelled { job: 1, uid: 5, user: String::new(), at: 1 });
    assert_eq!(phase(&jobs), active(2, Some(Canceller { uid: 5, user: String::new() })));
    assert_eq!(jobs.active().map(|(job, _)| job).collect::<Vec<_>>(), [1]);
    jobs.apply(ended(1, 9));
    let Phase::Ended { gpus, started: 7, at: 9, end: End::Done, exit: Some(0), .. } = phase(&jobs) else {
        panic!("{jobs:?}");
    };
    assert_eq!(gpus, ["a"], "kept for display");
    assert_eq!((jobs.active().count(), jobs.queue(10).len(), jobs.ended), (0, 0, 1));
}

#[test]
fn end_is_final_and_unfitting_records_change_nothing() {
    let before = of([submitted(1, 1, 0, 0), starting(1, &[]), ended(1, 5)]);
    let mut jobs = before.clone();
    jobs.apply(Record::Ended {
        job: 1,
        end: End::Lost,
        exit: None,
        reason: "x".into(),
        report: "y".into(),
        at: 9,
        order: 0,
        usage: None,
    });
    jobs.apply(Record::Cancelled { job: 1, uid: 1, user: String::new(), at: 9 });
    jobs.apply(requeued(1, "x"));
    jobs.apply(starting(1, &["a"]));
    jobs.apply(submitted(1, 2, 1, 1));
    jobs.apply(ended(99, 5));
    jobs.apply(starting(99, &[]));
    jobs.apply(Record::Forgotten { job: 99 });
    assert_eq!(jobs, before);
}

#[test]
fn request_id_of_a_later_job_means_that_the_earlier_one_was_forgotten() {
    let Record::Submitted(mut later) = submitted(2, 1, 0, 0) else { unreachable!() };
    later.request_id = "r1".into();
    let jobs = of([submitted(1, 1, 0, 0), ended(1, 5), Record::Submitted(later)]);
    assert_eq!(jobs.jobs.keys().copied().collect::<Vec<_>>(), [2]);
    assert_eq!(jobs.job_of_request(1, "", "r1"), Some(2));
    assert_eq!(of(jobs.records()), jobs);
}

#[test]
fn extreme_numbers_in_a_journal_are_kept() {
    let counted = Record::Counted { submitted: u64::MAX, ended: u64::MAX };
    let jobs = of([counted, submitted(1, 1, 0, i32::MIN), submitted(2, 1, 0, i32::MAX), ended(2, 0)]);
    assert_eq!((jobs.queue(0), jobs.ended), (vec![1], u64::MAX));
    assert_eq!(of(jobs.records()), jobs);
    let at_zero = Record::Starting { job: 1, start: 0, gpus: vec!["a".into()], boot: String::new(), at: 0 };
    for end in [ended(1, 0), requeued(1, "x")] {
        let jobs = of([submitted(1, 1, 1, 0), at_zero.clone(), end]);
        assert_eq!(of(jobs.records()), jobs);
    }
}

#[test]
fn array_ends_at_the_last_job_number() {
    let Record::Submitted(first) = submitted(u64::MAX, 1, 0, 0) else { unreachable!() };
    let array = Record::SubmittedArray { first, indices: vec![0, 1] };
    assert_eq!(array.jobs(), u64::MAX..=u64::MAX);
    let jobs = of([array]);
    assert_eq!(jobs.jobs.keys().copied().collect::<Vec<_>>(), [u64::MAX]);
}

#[test]
fn counters_never_decrease() {
    let counted = |submitted, ended| Record::Counted { submitted, ended };
    let mut jobs = of([counted(10, 8), submitted(3, 1, 0, 0)]);
    assert_eq!((jobs.submitted, jobs.ended), (10, 8), "ids are not reused");
    jobs.apply(counted(9, 7));
    assert_eq!((jobs.submitted, jobs.ended), (10, 8));
    jobs.apply(submitted(11, 1, 0, 0));
    jobs.apply(ended(11, 1));
    assert_eq!((jobs.submitted, jobs.ended), (11, 9));
    jobs.apply(Record::Forgotten { job: 11 });
    assert_eq!(of(jobs.records()), jobs);
}

#[test]
fn queue_is_ordered_by_priority_then_id() {
    let jobs = of([
        submitted(1, 1, 0, 0),
        submitted(2, 1, 0, 5),
        submitted(3, 1, 0, -5),
        submitted(4, 1, 0, 5),
        submitted(5, 1, 0, 9),
        starting(5, &[]),
    ]);
    assert_eq!(jobs.queue(10), [2, 4, 1, 3]);
}

/// Marks all ended jobs as written to the accounting file.
fn accounted(mut jobs: Jobs) -> Jobs {
    jobs.unaccounted.clear();
    jobs
}

#[test]
fn oldest_ended_jobs_are_forgotten_first() {
    let jobs =
        of([submitted(1, 1, 0, 0), submitted(2, 1, 0, 0), submitted(3, 1, 0, 0), ended(2, 7), ended(1, 8)]);
    let jobs = accounted(jobs);
    assert_eq!(jobs.ended_beyond(0, |_| false), [2, 1]);
    assert_eq!(jobs.ended_beyond(1, |_| false), [2]);
    assert_eq!(jobs.ended_beyond(0, |job| job == 1), [2], "a client may wait for the end of job 1");
    assert!(jobs.ended_beyond(2, |_| false).is_empty() && jobs.ended_beyond(3, |_| false).is_empty());
}

#[test]
fn keep_limit_applies_to_each_user_separately() {
    let mut jobs = of([submitted(1, 1, 0, 0), starting(1, &[]), ended(1, 5)]);
    for job in 2..=KEPT_UNSTARTED as u64 + 3 {
        jobs.apply(submitted(job, 2, 0, 0));
        jobs.apply(ended(job, 6));
    }
    jobs = accounted(jobs);
    let kept = "of jobs that never started, only the last are kept";
    assert_eq!(jobs.ended_beyond(1000, |_| false), [2, 3], "{kept}");
    assert_eq!(jobs.ended_beyond(0, |job| job > 1), [1, 2, 3], "{kept}");
    jobs.apply(submitted(900, 2, 0, 0));
    jobs.apply(starting(900, &[]));
    jobs.apply(ended(900, 7));
    let jobs = accounted(jobs);
    assert!(!jobs.ended_beyond(1, |_| false).iter().any(|job| [1, 900].contains(job)));
}

#[test]
fn jobs_are_forgotten_in_order_of_their_end_even_if_the_clock_is_set_back() {
    let of_two = |first_end, second_end| {
        let started = |job| [submitted(job, 1, 0, 0), starting(job, &[])];
        let ends = [ended(2, first_end), ended(1, second_end)];
        accounted(of(started(1).into_iter().chain(started(2)).chain(ends)))
    };
    let jobs = of_two(1000, 10);
    assert_eq!(jobs.ended_beyond(1, |_| false), [2]);
    assert_eq!(of(jobs.records()).ended_beyond(1, |_| false), [2], "also after the journal was rewritten");
}

#[test]
fn resuming_the_node_keeps_drained_gpus_drained() {
    let gpus = |jobs: &Jobs| jobs.drained_gpus.keys().cloned().collect::<Vec<_>>();
    let mut jobs = of([drained(&["a", "b"], false, "fan"), drained(&[], false, "move")]);
    assert_eq!((gpus(&jobs), jobs.drained_gpus["b"].as_str()), (vec!["a".into(), "b".into()], "fan"));
    assert_eq!(jobs.drained.as_deref(), Some("move"));
    jobs.apply(drained(&["a", "z"], true, ""));
    assert_eq!((gpus(&jobs), jobs.drained.is_some()), (vec!["b".into()], true));
    jobs.apply(Record::Resumed { uid: 0, at: 0 });
    assert_eq!((gpus(&jobs), jobs.drained.is_some()), (vec!["b".into()], false));
    // A record of version 0.2 keeps its meaning.
    jobs.apply(drained(&[], false, "move"));
    jobs.apply(drained(&[], true, ""));
    assert_eq!(jobs, Jobs::default());
}

#[test]
fn long_texts_are_cut_at_a_character() {
    assert_eq!(bounded("short".into()), "short");
    let cut = bounded("é".repeat(MAX_TEXT_BYTES));
    assert!(cut.len() <= MAX_TEXT_BYTES && cut.ends_with("é…"), "{}", cut.len());
}

#[test]
fn ended_job_is_not_forgotten_before_it_is_in_the_accounting_file() {
    let mut jobs = of([submitted(1, 1, 0, 0), ended(1, 5), submitted(2, 1, 0, 0), ended(2, 6)]);
    assert_eq!((jobs.ended_beyond(0, |_| false), jobs.unaccounted.len()), (vec![], 2));
    jobs.apply(Record::Accounted { jobs: vec![1] });
    assert_eq!(jobs.ended_beyond(0, |_| false), [1]);
    assert_eq!(of(jobs.records()), jobs, "the rewritten journal knows it");
}
