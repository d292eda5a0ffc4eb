use super::super::evaluate::AdmissionRules;
use std::borrow::Cow;

use super::*;
use crate::commands::CommandError;
use crate::view::Caller;
use xlaunch_proto::v1::{Dependency, DependencyCondition, DrainRequest, UpdateRequest};

const USER: Caller = Caller { uid: 1000, name: Cow::Borrowed(""), admin: false };
const OTHER: Caller = Caller { uid: 1001, name: Cow::Borrowed(""), admin: false };
const ADMIN: Caller = Caller { uid: 0, name: Cow::Borrowed(""), admin: true };
const RULES: AdmissionRules<'_> = AdmissionRules {
    allow_commands: false,
    allow_root: false,
    how_to_change: "in /etc/daemon.toml, then reload",
    max_per_user: 2,
    only_user: None,
    gpus: 4,
    cpu_workers: 2,
    cores: 8,
    memory: 64 << 30,
    memory_per_user: None,
    memory_per_gpu: 0,
};

fn job(trainer: bool, gpus: u32, workers: u32, priority: i32) -> Submitted {
    Submitted { trainer, gpus, workers, priority, ..Submitted::default() }
}

#[test]
fn admission_depends_on_user_kind_priority_and_size() {
    let jobs = of([submitted(1, 1000, 0, 0)]);
    let refused = |caller, wanted: Submitted, rules| jobs.admit(caller, &wanted, 1, rules).unwrap_err();
    assert_eq!(jobs.admit(&USER, &job(true, 4, 4, 0), 1, &RULES), Ok(()));
    assert!(matches!(refused(&ADMIN, job(true, 0, 1, 0), &RULES), CommandError::NotAllowed(_)));
    assert!(matches!(refused(&USER, job(false, 0, 1, 0), &RULES), CommandError::NotAllowed(_)));
    assert!(matches!(refused(&USER, job(true, 0, 1, 1), &RULES), CommandError::NotAllowed(_)));
    assert!(matches!(refused(&USER, job(true, 5, 5, 0), &RULES), CommandError::Invalid(_)));
    assert!(matches!(refused(&USER, job(true, 0, 3, 0), &RULES), CommandError::Invalid(_)));
    let full = AdmissionRules { max_per_user: 1, ..RULES };
    assert!(matches!(refused(&USER, job(true, 0, 1, 0), &full), CommandError::LimitReached(_)));
    assert_eq!(jobs.admit(&OTHER, &job(true, 0, 1, 0), 1, &full), Ok(()));
    let own = AdmissionRules { only_user: Some(1000), allow_commands: true, ..RULES };
    assert_eq!(jobs.admit(&USER, &job(false, 0, 1, 0), 1, &own), Ok(()));
    assert!(matches!(refused(&OTHER, job(true, 0, 1, 0), &own), CommandError::NotAllowed(_)));
}

#[test]
fn refusal_by_a_setting_names_the_file_and_how_to_apply_a_change() {
    let text = |caller, trainer| {
        Jobs::default().admit(caller, &job(trainer, 0, 1, 0), 1, &RULES).unwrap_err().to_string()
    };
    let root = text(&ADMIN, true);
    assert!(root.ends_with("set jobs.allow_root = true in /etc/daemon.toml, then reload"), "{root}");
    let command = text(&USER, false);
    assert!(
        command.ends_with("set jobs.allow_commands = true in /etc/daemon.toml, then reload"),
        "{command}"
    );
}

#[test]
fn admission_limits_are_inclusive() {
    let jobs = Jobs::default();
    let admit = |caller, wanted: Submitted| jobs.admit(caller, &wanted, 1, &RULES);
    assert_eq!(admit(&USER, job(true, 0, 2, 0)), Ok(()), "all CPU workers");
    assert_eq!(admit(&USER, job(true, 1, 3, 0)), Ok(()), "workers of a GPU job do not need CPU workers");
    assert_eq!(admit(&USER, job(true, 0, 1, -1)), Ok(()), "anyone may lower the priority");
    let admin = Caller { admin: true, ..USER };
    assert_eq!(admit(&admin, job(true, 0, 1, 1)), Ok(()));
    let allow_root = AdmissionRules { allow_root: true, ..RULES };
    assert_eq!(jobs.admit(&ADMIN, &job(true, 0, 1, 0), 1, &allow_root), Ok(()));
}

#[test]
fn per_user_limit_counts_queued_and_active_jobs() {
    let jobs = of([
        submitted(1, 1000, 0, 0),
        submitted(2, 1000, 0, 0),
        starting(2, &[]),
        submitted(3, 1000, 0, 0),
        ended(3, 1),
    ]);
    let limited = |max_per_user| {
        jobs.admit(&USER, &job(true, 0, 1, 0), 1, &AdmissionRules { max_per_user, ..RULES }).is_ok()
    };
    assert_eq!([1, 2, 3].map(limited), [false, false, true]);
    assert!(limited(0), "0 is no limit");
}

#[test]
fn only_its_user_and_admins_can_cancel_a_job() {
    let mut jobs = of([
        submitted(1, 1000, 0, 0),
        submitted(2, 1000, 0, 0),
        starting(2, &[]),
        submitted(3, 1, 0, 0),
        ended(3, 1),
    ]);
    jobs.jobs.get_mut(&1).unwrap().submitted.user = "anna".into();
    assert_eq!([1000, 0, 1].map(|uid| jobs.user_label(uid, "")), ["anna", "root", "1"]);
    assert_eq!(jobs.cancel(&OTHER, 1, 0), Err(CommandError::JobNotFound(1)));
    assert_eq!(jobs.cancel(&USER, 99, 0), Err(CommandError::JobNotFound(99)));
    let anna = Caller { name: Cow::Borrowed("anna"), ..USER };
    let Ok(Some(Record::Ended { end, reason, .. })) = jobs.cancel(&anna, 1, 0) else { panic!() };
    assert_eq!((end, reason.as_str()), (End::Cancelled, "cancelled by user anna before it started"));
    assert!(matches!(jobs.cancel(&ADMIN, 2, 0), Ok(Some(Record::Cancelled { uid: 0, .. }))));
    assert_eq!(jobs.cancel(&ADMIN, 3, 0), Ok(None));
    let mut twice = jobs.clone();
    twice.apply(jobs.cancel(&ADMIN, 2, 0).unwrap().unwrap());
    assert_eq!(twice.cancel(&USER, 2, 0), Ok(None));
}

#[test]
fn gpus_are_drained_by_index_or_uuid() {
    let known = [(0, "GPU-a".to_string()), (1, "GPU-b".to_string())];
    let request = |named: &str| DrainRequest { gpus: vec![named.into()], ..DrainRequest::default() };
    let drain = |caller, named: &str| Jobs::drain(caller, &request(named), &known, 0);
    assert!(matches!(drain(&USER, "0"), Err(CommandError::NotAllowed(_))));
    for named in ["1", "GPU-b"] {
        assert!(matches!(drain(&ADMIN, named), Ok(Record::Drained { gpus, .. }) if gpus == ["GPU-b"]));
    }
    let Err(CommandError::Invalid(text)) = drain(&ADMIN, "7") else { panic!() };
    assert!(text.contains("0 (GPU-a), 1 (GPU-b)"), "{text}");
    let Err(CommandError::Invalid(text)) = Jobs::drain(&ADMIN, &request("0"), &[], 0) else { panic!() };
    assert!(text.ends_with("its GPUs: none"), "{text}");
}

#[test]
fn drain_record_has_user_time_and_reason() {
    let drain = |undo, reason: &str| {
        let request = DrainRequest { undo, reason: reason.into(), ..DrainRequest::default() };
        Jobs::drain(&ADMIN, &request, &[], 7).unwrap()
    };
    let record =
        |undo, reason: &str| Record::Drained { gpus: vec![], undo, reason: reason.into(), uid: 0, at: 7 };
    assert_eq!(drain(false, "fan"), record(false, "fan"));
    assert_eq!(drain(false, ""), record(false, "by an administrator"));
    assert_eq!(drain(true, ""), Record::Resumed { uid: ADMIN.uid, at: 7 }, "GPUs stay drained");
}

fn hold(job: u64, held: bool) -> UpdateRequest {
    UpdateRequest { job, held: Some(held), priority: None }
}

#[test]
fn hold_of_an_administrator_is_released_by_administrators_only() {
    let mut jobs = of([submitted(1, 1000, 0, 0), submitted(2, 1000, 0, 0)]);
    let apply = |jobs: &mut Jobs, caller, update| {
        let records = jobs.update(caller, update, 7)?;
        let changes = !records.is_empty();
        records.into_iter().for_each(|record| jobs.apply(record));
        Ok::<_, CommandError>(changes)
    };
    assert_eq!(apply(&mut jobs, &OTHER, hold(1, true)), Err(CommandError::JobNotFound(1)));
    assert_eq!(apply(&mut jobs, &USER, hold(1, true)), Ok(true));
    assert_eq!(apply(&mut jobs, &USER, hold(1, true)), Ok(false), "held already");
    assert_eq!(apply(&mut jobs, &USER, hold(1, false)), Ok(true));
    assert_eq!(apply(&mut jobs, &USER, hold(1, false)), Ok(false));
    assert_eq!(apply(&mut jobs, &USER, hold(1, true)), Ok(true));
    assert_eq!(apply(&mut jobs, &ADMIN, hold(1, true)), Ok(true), "stronger than the user's own");
    assert_eq!(apply(&mut jobs, &USER, hold(1, true)), Ok(false), "not weakened");
    let Err(CommandError::NotAllowed(text)) = apply(&mut jobs, &USER, hold(1, false)) else { panic!() };
    assert!(text.contains("held by an administrator"), "{text}");
    assert_eq!(of(jobs.records()), jobs);
    assert_eq!(apply(&mut jobs, &ADMIN, hold(1, false)), Ok(true));
    let own_admin = Caller { admin: true, ..USER };
    assert_eq!(apply(&mut jobs, &own_admin, hold(2, true)), Ok(true));
    assert_eq!(apply(&mut jobs, &USER, hold(2, false)), Ok(true), "a hold of their own job is their own");
}

#[test]
fn priority_above_zero_is_for_administrators_and_only_queued_jobs_change() {
    let mut jobs = of([submitted(1, 1000, 0, 0), submitted(2, 1000, 0, 0), starting(2, &[])]);
    let priority = |priority| UpdateRequest { job: 1, held: None, priority: Some(priority) };
    assert!(matches!(jobs.update(&USER, priority(1), 7), Err(CommandError::NotAllowed(_))));
    assert_eq!(jobs.update(&USER, priority(0), 7), Ok(vec![]));
    for (caller, value) in [(&USER, -5), (&USER, 0), (&ADMIN, 9)] {
        for record in jobs.update(caller, priority(value), 7).unwrap() {
            jobs.apply(record);
        }
        assert_eq!(jobs.jobs[&1].submitted.priority, value);
    }
    assert_eq!(of(jobs.records()), jobs);
    for (state, update) in [("has started", hold(2, true)), ("has started", hold(2, false))] {
        let Err(CommandError::Invalid(text)) = jobs.update(&USER, update, 7) else { panic!() };
        assert!(text.starts_with(&format!("job 2 {state}")), "{text}");
    }
    jobs.apply(ended(2, 9));
    assert_eq!(jobs.update(&USER, hold(2, true), 7), Err(CommandError::Invalid("job 2 has ended".into())));
}

#[test]
fn dependencies_must_be_visible_jobs() {
    let mut jobs = of([submitted(1, 1000, 0, 0), submitted(2, 1000, 0, 0), submitted(3, 1001, 0, 0)]);
    jobs.apply(ended(1, 5));
    let met = |caller, job, condition: DependencyCondition| {
        // The outcome is not what the caller says.
        let mut after = [Dependency { job, condition: condition.into(), met: Some(true) }];
        jobs.look_up_dependencies(caller, &mut after).map(|()| after[0].met)
    };
    use DependencyCondition::{Any, Fail, Ok as Done};
    assert_eq!(met(&USER, 1, Done), Ok(Some(true)));
    assert_eq!(met(&USER, 1, Fail), Ok(Some(false)));
    assert_eq!(met(&USER, 2, Done), Ok(None));
    assert_eq!(met(&USER, 3, Any), Err(CommandError::JobNotFound(3)));
    assert_eq!(met(&ADMIN, 3, Any), Ok(None));
    assert_eq!(met(&USER, 99, Any), Err(CommandError::JobNotFound(99)));
}

#[test]
fn more_than_the_node_has_is_refused() {
    let refused =
        |wanted: Submitted| Jobs::default().admit(&USER, &wanted, 1, &RULES).unwrap_err().to_string();
    let cpus = |gpus, cpus| with(job(true, gpus, 1, 0), |scheduling| scheduling.cpus = Some(cpus));
    assert!(refused(cpus(1, 9)).contains("9 CPUs, but a job can get at most 8"));
    assert!(
        refused(cpus(0, 3)).contains("3 CPUs, but a job can get at most 2 on this node (jobs.cpu_workers)")
    );
    let memory = with(job(true, 1, 1, 0), |scheduling| scheduling.memory_bytes = Some(65 << 30));
    assert!(refused(memory).contains("65 GiB of memory, but a job can get at most 64 GiB on this node"));
    let fits = with(cpus(0, 2), |scheduling| scheduling.memory_bytes = Some(64 << 30));
    assert_eq!(Jobs::default().admit(&USER, &fits, 1, &RULES), Ok(()));
    let array = Jobs::default().admit(&USER, &job(true, 0, 1, 0), 3, &RULES).unwrap_err().to_string();
    assert!(array.starts_with("3 jobs are too many"), "{array}");
    assert_eq!(Jobs::default().admit(&USER, &job(true, 0, 1, 0), 2, &RULES), Ok(()));
}

#[test]
fn reused_user_id_grants_no_access_to_earlier_jobs() {
    let named = |name: &'static str| Caller { uid: 1000, name: Cow::Borrowed(name), admin: false };
    let (anna, bob) = (named("anna"), named("bob"));
    let Record::Submitted(mut submitted) = super::submitted(1, 1000, 0, 0) else { unreachable!() };
    submitted.user = "anna".into();
    let jobs = super::of([Record::Submitted(submitted)]);
    assert_eq!(jobs.cancel(&bob, 1, 0), Err(CommandError::JobNotFound(1)));
    assert_eq!(jobs.update(&bob, hold(1, true), 0), Err(CommandError::JobNotFound(1)));
    let mut after = [Dependency { job: 1, ..Dependency::default() }];
    assert_eq!(jobs.look_up_dependencies(&bob, &mut after), Err(CommandError::JobNotFound(1)));
    let seen_by = |name| jobs.job_of_request(1000, name, "r1");
    assert_eq!((seen_by("anna"), seen_by("bob")), (Some(1), None));
    let Ok(Some(Record::Ended { reason, .. })) = jobs.cancel(&anna, 1, 0) else { panic!() };
    assert_eq!(reason, "cancelled by user anna before it started");
}
