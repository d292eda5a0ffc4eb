//! Tests which GPUs are examined, which GPUs jobs get during an examination, and its result.

use std::time::Duration;

use xlaunch_host::doctor::{Finding, GpuName, Level, Report};

use super::super::examination::{Examination, ExaminationEnd, Verdict};
use super::super::schedule::{GpuSlot, Resources, schedule};
use std::borrow::Cow;

use super::*;
use crate::commands::CommandError;
use crate::view::Caller;

const ADMIN: Caller = Caller { uid: 7, name: Cow::Borrowed(""), admin: true };

fn slots(gpus: &[&str]) -> Vec<(u32, GpuSlot)> {
    let slot = |gpu: &&str| GpuSlot { uuid: (*gpu).to_owned(), unusable: None };
    (0..).zip(gpus.iter().map(slot)).collect()
}

fn node(gpus: &[&str]) -> Resources {
    let gpus = slots(gpus).into_iter().map(|(_, slot)| slot).collect();
    Resources { gpus, cores: 64, memory: 64 << 30, cpu_workers: 4, ..Resources::default() }
}

fn examined(mut jobs: Jobs, gpus: &[&str], until: u64) -> Jobs {
    let gpus = gpus.iter().map(|gpu| gpu.to_string()).collect();
    jobs.examination = Some(Examination { gpus, until });
    jobs
}

fn chosen(jobs: &Jobs, named: &[&str], slots: &[(u32, GpuSlot)]) -> Vec<(u32, Option<String>)> {
    let named: Vec<String> = named.iter().map(|name| name.to_string()).collect();
    let chosen = jobs.choose(&ADMIN, &named, slots).unwrap();
    chosen.into_iter().map(|choice| (choice.index, choice.skipped)).collect()
}

#[test]
fn gpus_in_use_and_unusable_ones_are_skipped_but_drained_ones_are_examined() {
    let jobs = of([submitted(1, 1, 1, 0), starting(1, &["b"]), drained(&["c"], false, "fan")]);
    let mut slots = slots(&["a", "b", "c", "d"]);
    slots[3].1.unusable = Some("used by a process outside any job".into());
    let skipped = |reason: &str| Some(reason.to_owned());
    let outside = skipped("used by a process outside any job");
    let all = [(0, None), (1, skipped("job 1 runs on it")), (2, None), (3, outside)];
    assert_eq!(chosen(&jobs, &[], &slots), all);
    assert_eq!(chosen(&jobs, &["c", "0"], &slots), [(0, None), (2, None)]);
}

#[test]
fn examination_is_for_administrators_and_one_at_a_time() {
    let (jobs, slots) = (of([]), slots(&["a"]));
    let user = Caller { admin: false, ..ADMIN };
    assert!(matches!(jobs.choose(&user, &[], &slots), Err(CommandError::NotAllowed(_))));
    assert!(matches!(jobs.choose(&ADMIN, &["z".into()], &slots), Err(CommandError::Invalid(_))));
    let jobs = examined(jobs, &["a"], 10);
    assert!(matches!(jobs.choose(&ADMIN, &[], &slots), Err(CommandError::LimitReached(_))));
}

#[test]
fn examined_gpus_get_no_job_and_count_as_free_at_the_deadline() {
    let jobs = of([submitted(1, 1, 2, 0), submitted(2, 1, 1, 0)]);
    let free = node(&["a", "b"]);
    let now = schedule(&examined(jobs.clone(), &["a"], 500), &free, 10);
    assert!(now.starts.is_empty(), "job 2 must not delay job 1: {now:?}");
    assert_eq!(now.waits[&1].starts_by, Some(500));
    assert_eq!(now.waits[&1].reason, "waits for GPUs: 2 wanted, 1 free");
    assert_eq!(schedule(&jobs, &free, 10).starts.len(), 1);
    let one = of([submitted(2, 1, 1, 0)]);
    assert_eq!(schedule(&examined(one, &["a"], 500), &free, 10).starts, [(2, vec!["b".to_owned()])]);
}

#[test]
fn replayed_journal_has_no_examination() {
    let jobs = examined(of([submitted(1, 1, 1, 0)]), &["a"], 500);
    assert_eq!(of(jobs.records()).examination, None);
}

#[test]
fn verdict_follows_the_findings_of_the_gpu() {
    let of_gpu = |uuid: &str, level, check, message: &str| {
        Finding::of_gpu(level, &GpuName { index: 3, uuid: uuid.into() }, check, message)
    };
    let verdict =
        |findings: Vec<Finding>| ExaminationEnd::Report(Report { healthy: true, findings }).verdict(3, "a");
    let measured = of_gpu("a", Level::Ok, "rates", "fast");
    assert_eq!(verdict(vec![measured.clone()]), Verdict::Passed);
    let unknown = Verdict::Unknown("it could not be measured".into());
    assert_eq!(verdict(vec![of_gpu("a", Level::Ok, "counters", "H100")]), unknown);
    assert_eq!(verdict(vec![of_gpu("b", Level::Ok, "rates", "another GPU")]), unknown);
    let wrong = of_gpu("a", Level::Failure, "results", "2 wrong elements");
    let lost = of_gpu("", Level::Failure, "driver", "it is lost");
    assert_eq!(
        verdict(vec![measured.clone(), wrong, lost]),
        Verdict::Failed("doctor: results: 2 wrong elements; driver: it is lost".into())
    );
    let of_node = Finding::of_node(Level::Failure, "all-reduce", "wrong");
    assert_eq!(verdict(vec![measured, of_node]), Verdict::Passed, "it is not known which GPU is at fault");
    let late = ExaminationEnd::TimedOut(Duration::from_secs(9)).verdict(3, "a");
    assert_eq!(late, Verdict::Failed("doctor: timeout: no result within 9 s".into()));
    assert_eq!(ExaminationEnd::Broken("x".into()).verdict(3, "a"), Verdict::Unknown("x".into()));
}
