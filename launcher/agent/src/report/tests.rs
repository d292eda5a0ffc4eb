//! Tests of complete reports.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use xlaunch_proto::v1::GroupEnd;

use super::*;
use crate::ending::SpawnFailure;
use crate::state::{Action, Event, Job, Kind, Rules};

fn job(kind: Kind, workers: u32) -> Job {
    let rules = Rules {
        workers,
        kind,
        has_restarts: false,
        requeue_codes: [99].into(),
        shutdown_timeout: Duration::from_secs(30),
        shutdown_timeout_max: Duration::from_secs(600),
        propagate_exit_code: false,
    };
    let mut job = Job::new(rules);
    job.handle(Event::Begin { attempt: 0, node_rank: 0, first_rank: 0 }, Instant::now());
    job
}

/// The ending of a job whose ranks exit in this order.
fn ending(world: u32, exits: &[(u32, Exit)]) -> Ending {
    ending_of(Kind::Command, world, exits)
}

fn ending_of(kind: Kind, world: u32, exits: &[(u32, Exit)]) -> Ending {
    let mut job = job(kind, world);
    let now = Instant::now();
    job.handle(Event::AllJoined, now);
    let events = exits.iter().map(|(rank, exit)| Event::Exited { rank: *rank, exit: *exit });
    let actions = events.flat_map(|event| job.handle(event, now)).collect::<Vec<_>>();
    end_after(&mut job, &actions)
}

/// The ending if the attempt that ended with these actions is the last one.
fn end_after(job: &mut Job, actions: &[Action]) -> Ending {
    let ended = actions.iter().find_map(|action| match action {
        Action::ReportEnd(ended) => Some(ended.clone()),
        _ => None,
    });
    let ended = ended.unwrap();
    let root = ended.root.map_or_else(String::new, |root| root.message);
    let end = GroupEnd { exit_code: ended.exit_code, node_rank: Some(0), root, ..GroupEnd::default() };
    let actions = job.handle(Event::GroupEnded(end), Instant::now());
    let Some(Action::End(ending)) = actions.last() else { panic!("{actions:?}") };
    (**ending).clone()
}

fn of(pid: u32, exit: Exit, seconds: u64, stderr: &[&str]) -> Evidence {
    Evidence {
        pid,
        host: "node7".into(),
        exit: Some(exit),
        exit_time: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_236_635 + seconds)),
        stderr: stderr.iter().map(|line| line.to_string()).collect(),
        program: "python".into(),
        ..Evidence::default()
    }
}

#[test]
fn root_cause_is_first_and_other_failures_take_a_line_each() {
    let exits = [(1, Exit::Code(1)), (0, Exit::Signal(9)), (2, Exit::Signal(11)), (3, Exit::Code(1))];
    let traceback = [
        "Traceback (most recent call last):",
        "  File \"/w/train.py\", line 12, in <module>",
        "    import flash_attn",
        "ModuleNotFoundError: No module named 'flash_attn'",
    ];
    let evidence = [
        Evidence { signalled: true, ..of(100, exits[1].1, 1, &[]) },
        of(101, exits[0].1, 0, &traceback),
        of(102, exits[2].1, 2, &[]),
        Evidence {
            host: "node8".into(),
            ..of(103, exits[3].1, 3, &["  File \"/w/train.py\", line 40, in f", "ValueError: bad"])
        },
    ];
    let logs = Some(PathBuf::from("/runs/1/logs"));
    let ending = Ending { evidence: evidence.into(), logs, ..ending(4, &exits) };
    let text = text(&ending).unwrap();
    let line = "rank 1 (pid 101): exit code 1: ModuleNotFoundError: No module named 'flash_attn' \
                (/w/train.py, line 12)";
    assert_eq!(headline(&ending).as_deref(), Some(line));
    insta::assert_snapshot!("failures", text);
}

#[test]
fn rank_of_one_of_several_nodes_is_named_with_local_rank_and_node() {
    let exits = [(1, Exit::Code(7)), (0, Exit::Signal(11))];
    let of_node = |pid, exit| Evidence { node_rank: Some(2), ..of(pid, exit, 0, &[]) };
    let evidence = vec![of_node(100, exits[1].1), of_node(101, exits[0].1)];
    let text = text(&Ending { first_rank: 4, evidence, ..ending(2, &exits) }).unwrap();
    insta::assert_snapshot!("several-nodes", text);
}

#[test]
fn worker_that_failed_to_start_is_reported_without_pid_and_logs() {
    let mut job = job(Kind::Command, 1);
    let reason = "No such file or directory (os error 2)".to_string();
    let actions = job.handle(
        Event::SpawnFailed { rank: 0, reason, exit: xlaunch_spec::exit::ExitCode::WorkerFailed },
        Instant::now(),
    );
    let ending = end_after(&mut job, &actions);
    let evidence = Evidence {
        spawn_failure: Some(SpawnFailure { errno: 2, limit: None, first_line: None }),
        program: "trian".into(),
        search_path: "/bin".into(),
        ..Evidence::default()
    };
    insta::assert_snapshot!("failed-to-start", text(&Ending { evidence: vec![evidence], ..ending }).unwrap());
}

#[test]
fn control_characters_of_a_worker_are_escaped() {
    let exits = [(0, Exit::Code(1))];
    let lines = ["\x1b[2Jgone\x07", "a\tb \u{202e}txt \u{9b}31m", "ValueError: \x1b]0;title\x07"];
    let evidence = vec![of(7, exits[0].1, 0, &lines)];
    let text = text(&Ending { evidence, ..ending(1, &exits) }).unwrap();
    insta::assert_snapshot!("control-characters", text);
}

#[test]
fn trainer_exit_codes_are_explained_and_a_long_tail_is_cut() {
    let lines: Vec<String> = (0..30).map(|i| format!("line {i}")).collect();
    let evidence = Evidence { pid: 7, stderr: lines, ..Evidence::default() };
    let ending = ending_of(Kind::Trainer, 1, &[(0, Exit::Code(65))]);
    let text = text(&Ending { evidence: vec![evidence], ..ending }).unwrap();
    insta::assert_snapshot!("trainer", text);
}

#[test]
fn report_of_an_early_exit_of_rank_0_mentions_the_store() {
    let (mut job, now) = (job(Kind::Command, 2), Instant::now());
    let lost = Event::Symptom { rank: 1, error: "Broken pipe".into(), lost_peer: true, at: now };
    let exited = |rank, code| Event::Exited { rank, exit: Exit::Code(code) };
    let events = [Event::AllJoined, exited(0, 0), lost, exited(1, 1)];
    let actions = events.into_iter().flat_map(|event| job.handle(event, now)).collect::<Vec<_>>();
    let ending = end_after(&mut job, &actions);
    let report = |first_rank| {
        let evidence = vec![of(7, Exit::Code(0), 0, &[]), of(8, Exit::Code(1), 0, &[])];
        text(&Ending { evidence, first_rank, ..ending.clone() }).unwrap()
    };
    assert!(report(0).contains("\n  help: rank 0 hosts the store"), "{}", report(0));
    assert!(!report(4).contains("help: "), "{}", report(4));
}

#[test]
fn successful_job_has_no_report() {
    assert_eq!(text(&ending(1, &[(0, Exit::Code(0))])), None);
}

#[test]
fn hang_is_the_reported_cause_and_names_the_evidence() {
    let mut job = job(Kind::Trainer, 2);
    let now = Instant::now();
    let message = "no progress for 61 s (phase: forward, step 9); rank 0 is waiting for it".to_owned();
    let killed = |rank| Event::Exited { rank, exit: Exit::Signal(9) };
    let events = [Event::AllJoined, Event::Hung { ranks: vec![1], message }, killed(0), killed(1)];
    let actions = events.into_iter().flat_map(|event| job.handle(event, now)).collect::<Vec<_>>();
    let ending = end_after(&mut job, &actions);
    let hang_file = Some(PathBuf::from("/run/logs/attempt_0/1/hang.txt"));
    let evidence =
        |pid| Evidence { signalled: true, hang_file: hang_file.clone(), ..of(pid, Exit::Signal(9), 0, &[]) };
    let report = text(&Ending { evidence: vec![evidence(10), evidence(11)], ..ending }).unwrap();
    insta::assert_snapshot!("hang", report);
}
