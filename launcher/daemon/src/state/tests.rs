use super::orders::Rules;
use super::schedule::{Room, Schedule, Slot, schedule};
use super::*;
use crate::orders::Refused;
use crate::view::Caller;

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

fn starting(job: u64, gpus: &[&str]) -> Record {
    let gpus = gpus.iter().map(|gpu| gpu.to_string()).collect();
    Record::Starting { job, start: 1, gpus, boot: "b".into(), at: 10 }
}

fn ended(job: u64, at: u64) -> Record {
    Record::Ended { job, end: End::Done, exit: Some(0), reason: String::new(), report: String::new(), at }
}

fn of(records: impl IntoIterator<Item = Record>) -> Jobs {
    let mut jobs = Jobs::default();
    records.into_iter().for_each(|record| jobs.apply(record));
    jobs
}

fn room(gpus: &[&str], cpu_workers: u32) -> Room {
    let gpus = gpus.iter().map(|gpu| Slot { uuid: gpu.to_string(), unusable: None }).collect();
    Room { gpus, cpu_workers, gpus_per_user: 0 }
}

fn starts(schedule: &Schedule) -> Vec<(u64, String)> {
    schedule.starts.iter().map(|(job, gpus)| (*job, gpus.join(" "))).collect()
}

const USER: Caller = Caller { uid: 1000, admin: false };
const ADMIN: Caller = Caller { uid: 0, admin: true };
const RULES: Rules = Rules {
    allow_commands: false,
    allow_root: false,
    max_per_user: 2,
    only_user: None,
    gpus: 4,
    cpu_workers: 2,
};

#[test]
fn no_gpu_is_given_to_two_jobs_and_none_that_is_out_of_service_to_any() {
    let mut jobs =
        of([submitted(1, 1, 2, 0), starting(1, &["a", "b"]), submitted(2, 1, 1, 0), submitted(3, 1, 1, 0)]);
    jobs.apply(Record::Drained { gpus: vec!["c".into()], undo: false, reason: "fan".into(), uid: 0, at: 0 });
    let mut room = room(&["a", "b", "c", "d", "e"], 0);
    room.gpus[3].unusable = Some("sick".into());
    let now = schedule(&jobs, &room);
    assert_eq!(starts(&now), [(2, "e".into())]);
    assert_eq!(now.waits[&3], "waits for GPUs: 1 wanted, 0 free");
    jobs.apply(ended(1, 20));
    jobs.apply(Record::Drained { gpus: vec![], undo: true, reason: String::new(), uid: 0, at: 0 });
    assert_eq!(starts(&schedule(&jobs, &room)), [(2, "a".into()), (3, "b".into())]);
}

#[test]
fn a_large_job_is_not_passed_by_small_ones_but_higher_priority_and_cpu_jobs_pass() {
    let jobs = of([
        submitted(1, 1, 1, 0),
        starting(1, &["a"]),
        submitted(2, 1, 4, 0),
        submitted(3, 2, 1, 0),
        submitted(4, 2, 0, 0),
        submitted(5, 2, 1, 7),
    ]);
    let now = schedule(&jobs, &room(&["a", "b", "c", "d"], 1));
    assert_eq!(starts(&now), [(5, "b".into()), (4, String::new())]);
    assert_eq!(now.waits[&3], "waits behind job 2");
}

#[test]
fn a_users_limit_holds_back_that_user_alone() {
    let jobs = of([submitted(1, 1, 2, 0), submitted(2, 1, 1, 0), submitted(3, 2, 1, 0)]);
    let now = schedule(&jobs, &Room { gpus_per_user: 2, ..room(&["a", "b", "c"], 0) });
    assert_eq!(starts(&now), [(1, "a b".into()), (3, "c".into())]);
    assert!(now.waits[&2].contains("2 of at most 2"), "{now:?}");
}

#[test]
fn a_drained_node_starts_nothing_and_says_why() {
    let mut jobs = of([submitted(1, 1, 0, 0)]);
    jobs.apply(Record::Drained { gpus: vec![], undo: false, reason: "new fans".into(), uid: 0, at: 0 });
    let now = schedule(&jobs, &room(&[], 4));
    assert!(now.starts.is_empty() && now.waits[&1].contains("new fans"), "{now:?}");
}

#[test]
fn a_journal_that_is_shortened_says_the_same() {
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
        Record::Cancelled { job: 3, uid: 7, at: 1 },
        submitted(4, 2, 0, -1),
        starting(4, &[]),
        Record::Requeued { job: 4, reason: reason() },
        submitted(5, 2, 0, 0),
        Record::Ended { job: 5, end: End::Cancelled, exit: None, reason: reason(), report: reason(), at: 9 },
        submitted(6, 2, 0, 0),
        Record::Drained { gpus: vec!["a".into()], undo: false, reason: reason(), uid: 0, at: 0 },
        Record::Drained { gpus: vec![], undo: false, reason: reason(), uid: 0, at: 0 },
    ]);
    assert_eq!(of(jobs.records()), jobs);
    assert_eq!((jobs.submitted, jobs.ended), (6, 3));
    assert_eq!(jobs.of_request(1, "r2"), Some(2));
    assert_eq!(jobs.of_request(2, "r2"), None);
    assert_eq!(jobs.of_request(1, "r1"), None);
}

#[test]
fn an_end_is_final_and_what_does_not_fit_changes_nothing() {
    let before = of([submitted(1, 1, 0, 0), starting(1, &[]), ended(1, 5)]);
    let mut jobs = before.clone();
    jobs.apply(Record::Ended {
        job: 1,
        end: End::Lost,
        exit: None,
        reason: "x".into(),
        report: "y".into(),
        at: 9,
    });
    jobs.apply(Record::Cancelled { job: 1, uid: 1, at: 9 });
    jobs.apply(Record::Requeued { job: 1, reason: "x".into() });
    jobs.apply(ended(99, 5));
    assert_eq!(jobs, before);
}

#[test]
fn the_oldest_ends_are_forgotten_first() {
    let jobs =
        of([submitted(1, 1, 0, 0), submitted(2, 1, 0, 0), submitted(3, 1, 0, 0), ended(2, 7), ended(1, 8)]);
    assert_eq!(jobs.beyond(1), [2]);
    assert!(jobs.beyond(2).is_empty());
}

#[test]
fn who_may_submit_what() {
    let jobs = of([submitted(1, 1000, 0, 0)]);
    let job = |trainer, gpus, workers, priority| Submitted {
        trainer,
        gpus,
        workers,
        priority,
        ..Submitted::default()
    };
    let refused = |caller, wanted: Submitted, rules| jobs.admit(caller, &wanted, rules).unwrap_err();
    assert_eq!(jobs.admit(USER, &job(true, 4, 4, 0), &RULES), Ok(()));
    assert!(matches!(refused(ADMIN, job(true, 0, 1, 0), &RULES), Refused::NotAllowed(_)));
    assert!(matches!(refused(USER, job(false, 0, 1, 0), &RULES), Refused::NotAllowed(_)));
    assert!(matches!(refused(USER, job(true, 0, 1, 1), &RULES), Refused::NotAllowed(_)));
    assert!(matches!(refused(USER, job(true, 5, 5, 0), &RULES), Refused::Invalid(_)));
    assert!(matches!(refused(USER, job(true, 0, 3, 0), &RULES), Refused::Invalid(_)));
    let full = Rules { max_per_user: 1, ..RULES };
    assert!(matches!(refused(USER, job(true, 0, 1, 0), &full), Refused::Full(_)));
    let other = Caller { uid: 1001, admin: false };
    assert_eq!(jobs.admit(other, &job(true, 0, 1, 0), &full), Ok(()));
    let own = Rules { only_user: Some(1000), allow_commands: true, ..RULES };
    assert_eq!(jobs.admit(USER, &job(false, 0, 1, 0), &own), Ok(()));
    assert!(matches!(refused(other, job(true, 0, 1, 0), &own), Refused::NotAllowed(_)));
}

#[test]
fn a_job_is_cancelled_by_its_user_or_an_administrator_alone() {
    let jobs = of([
        submitted(1, 1000, 0, 0),
        submitted(2, 1000, 0, 0),
        starting(2, &[]),
        submitted(3, 1, 0, 0),
        ended(3, 1),
    ]);
    let other = Caller { uid: 1001, admin: false };
    assert_eq!(jobs.cancel(other, 1, 0), Err(Refused::NoJob(1)));
    assert!(matches!(jobs.cancel(USER, 1, 0), Ok(Some(Record::Ended { end: End::Cancelled, .. }))));
    assert!(matches!(jobs.cancel(ADMIN, 2, 0), Ok(Some(Record::Cancelled { uid: 0, .. }))));
    assert_eq!(jobs.cancel(ADMIN, 3, 0), Ok(None));
    let mut twice = jobs.clone();
    twice.apply(jobs.cancel(ADMIN, 2, 0).unwrap().unwrap());
    assert_eq!(twice.cancel(USER, 2, 0), Ok(None));
}

#[test]
fn gpus_are_drained_by_index_or_uuid() {
    let known = [(0, "GPU-a".to_string()), (1, "GPU-b".to_string())];
    let drained = |caller, named: &str| Jobs::drained(caller, &[named.to_string()], false, "", &known, 0);
    assert!(matches!(drained(USER, "0"), Err(Refused::NotAllowed(_))));
    for named in ["1", "GPU-b"] {
        assert!(matches!(drained(ADMIN, named), Ok(Record::Drained { gpus, .. }) if gpus == ["GPU-b"]));
    }
    let Err(Refused::Invalid(text)) = drained(ADMIN, "7") else { panic!() };
    assert!(text.contains("0 (GPU-a), 1 (GPU-b)"), "{text}");
}
