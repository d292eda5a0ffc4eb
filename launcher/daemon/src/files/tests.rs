use std::ffi::CString;

use xlaunch_proto::convert::node::Work;
use xlaunch_spec::command::{CommandSpec, Program};

use super::*;

fn description(job: u64) -> Description {
    Description {
        protocol: PROTOCOL,
        job,
        name: "n".into(),
        work_dir: "/".into(),
        environment: vec![b"A=\xff".to_vec()],
        work: Work::Command(Box::new(CommandSpec::new(Program::Binary("a".into()), Vec::new()))),
        workers: 1,
        start: 0,
        gpus: Vec::new(),
        requeued: false,
        umask: None,
        max_output: None,
    }
}

fn on_gpu() -> StartOptions {
    StartOptions { gpus: vec!["GPU-a".into()], ..StartOptions::default() }
}

fn own() -> (u32, u32) {
    (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw())
}

#[test]
fn agent_record_and_begun_file_belong_to_one_start() {
    let state = tempfile::tempdir().unwrap();
    let dirs = JobDirs::open(state.path()).unwrap();
    dirs.create(&description(1), own().0, own().1).unwrap();
    assert_eq!(dirs.agent_record(1, 1), None);
    let process = Some(ProcessId { pid: 5, started: 6, boot: "b".into() });
    let record = AgentRecord {
        start: 1,
        process,
        user: "anna".into(),
        gpus: vec!["GPU-a".into()],
        boot: "b".into(),
        at: 7,
    };
    dirs.record_agent(1, &record).unwrap();
    assert_eq!((dirs.agent_record(1, 1), dirs.agent_record(1, 2)), (Some(record), None));
    assert!(!dirs.has_begun(1, 1));
    begin(&dirs.agent(1), 1).unwrap();
    assert!(dirs.has_begun(1, 1) && !dirs.has_begun(1, 2));
    let sent = dirs.description(1, 2, &on_gpu()).unwrap();
    let sent: Description = serde_json::from_slice(&sent).unwrap();
    assert_eq!((sent.start, sent.gpus), (2, vec!["GPU-a".to_string()]));
    assert_eq!(sent.environment, [b"A=\xff".to_vec()]);
}

#[test]
fn directory_describes_a_job_missing_in_the_journal() {
    let state = tempfile::tempdir().unwrap();
    let dirs = JobDirs::open(state.path()).unwrap();
    assert_eq!(dirs.found(1), None);
    let (uid, gid) = own();
    dirs.create(&description(1), uid, gid).unwrap();
    let found = dirs.found(1).unwrap();
    assert_eq!(found, FoundDir { uid, gid, description: Some(description(1)), agent: None });
    // A record that version 0.2 has written.
    write(&state.path().join("jobs/1"), AGENT_RECORD, br#"{"start":3,"process":null}"#).unwrap();
    assert_eq!(dirs.found(1).unwrap().agent.map(|agent| (agent.start, agent.boot)), Some((3, String::new())));
    dirs.remove_submission(1).unwrap();
    assert_eq!(dirs.found(1).unwrap().description, None);
    // Without the user's part of the directory, the recorded process shows whose job it is.
    fs_err::remove_dir_all(dirs.agent(1)).unwrap();
    assert_eq!((dirs.found(1), dirs.are_gone(1)), (None, true));
    let (pid, started) = (std::process::id(), xlaunch_host::process::Process::own().unwrap().started);
    let process = Some(ProcessId { pid, started, boot: crate::boot_id() });
    let (user, gpus, boot) = (String::new(), Vec::new(), crate::boot_id());
    dirs.record_agent(1, &AgentRecord { start: 1, process, user, gpus, boot, at: 0 }).unwrap();
    assert_eq!(dirs.found(1).map(|found| (found.uid, found.gid)), Some((uid, gid)));
}

#[test]
fn jobs_of_an_array_share_one_submission_and_know_their_place() {
    let state = tempfile::tempdir().unwrap();
    let dirs = JobDirs::open(state.path()).unwrap();
    let mut submission = description(5);
    submission.environment.push(b"XLAUNCH_ARRAY_INDEX=stale".to_vec());
    dirs.create_array(&submission).unwrap();
    assert!(dirs.all().is_empty(), "directories are created at the start");
    let (uid, gid) = own();
    for (job, index) in [(5, 3), (6, 9)] {
        let element = Some(Element { first: 5, index, parallel: 0 });
        let options = StartOptions { element, uid, gid, requeued: job == 6, ..StartOptions::default() };
        for start in [1, 2] {
            let sent = dirs.description(job, start, &options).unwrap();
            let description: Description = serde_json::from_slice(&sent).unwrap();
            let place = ["XLAUNCH_ARRAY_JOB=5".to_string(), format!("XLAUNCH_ARRAY_INDEX={index}")];
            let expected = [b"A=\xff".to_vec(), place[0].clone().into(), place[1].clone().into()];
            assert_eq!(description.environment, expected);
            assert_eq!((description.job, description.requeued), (job, job == 6));
            begin(&dirs.agent(job), start).unwrap();
        }
    }
    assert_eq!(dirs.arrays(), [5]);
    dirs.remove_array(5).unwrap();
    dirs.remove_array(5).unwrap();
    assert!(dirs.arrays().is_empty() && dirs.agent(6).exists());
}

#[test]
fn only_regular_files_of_the_jobs_user_are_read() {
    let state = tempfile::tempdir().unwrap();
    let dirs = JobDirs::open(state.path()).unwrap();
    let (uid, gid) = own();
    dirs.create(&description(1), uid, gid).unwrap();
    let (agent, result) = (dirs.agent(1), JobResult { exit: 7, ..JobResult::default() });
    let outside = state.path().join("outside.json");
    fs_err::write(&outside, serde_json::to_vec(&result).unwrap()).unwrap();
    assert_eq!(dirs.result(1, uid), None);
    fs_err::os::unix::fs::symlink(&outside, agent.join("result.json")).unwrap();
    assert_eq!(dirs.result(1, uid), None);
    fs_err::remove_file(agent.join("result.json")).unwrap();
    let path = CString::new(agent.join("result.json").to_str().unwrap()).unwrap();
    rustix::fs::mknodat(CWD, &*path, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    assert_eq!(dirs.result(1, uid), None);
    write(&agent, "result.json", &serde_json::to_vec(&result).unwrap()).unwrap();
    assert_eq!(dirs.result(1, uid), Some(result));
    // The file of another user, which a hard link can refer to if the kernel allows that.
    assert_eq!(dirs.result(1, uid + 1), None);
}

#[test]
fn submission_is_readable_by_the_daemon_only() {
    let state = tempfile::tempdir().unwrap();
    let dirs = JobDirs::open(state.path()).unwrap();
    dirs.create(&description(1), own().0, own().1).unwrap();
    let (user, gpus, boot) = (String::new(), Vec::new(), String::new());
    dirs.record_agent(1, &AgentRecord { start: 1, process: None, user, gpus, boot, at: 0 }).unwrap();
    let mode = |path: PathBuf| fs_err::metadata(path).unwrap().permissions().mode() & 0o777;
    let dir = state.path().join("jobs/1");
    let names = ["job.json", "agent.json", "agent"];
    assert_eq!(names.map(|name| mode(dir.join(name))), [0o600, 0o600, 0o700]);
    assert!([0o710, 0o711].contains(&mode(dir.clone())), "{:o}", mode(dir.clone()));
    assert_eq!(dirs.all(), [1]);
    dirs.remove_submission(1).unwrap();
    assert_eq!(names.map(|name| dir.join(name).exists()), [false, true, true]);
    dirs.remove(1).unwrap();
    assert!(!dir.exists());
}

/// Tests files written by the first release, whose agents may still run after an upgrade of the daemon.
#[test]
fn files_of_first_release_are_read() {
    // In the first release, a queued command was a command line. This release does not parse it: the job fails with
    // that reason.
    let text = r#"{"protocol":1,"job":7,"name":"n","work_dir":"/w","environment":[[65,61,255]],
        "work":{"command":[[116]]},"workers":2,"start":1,"gpus":["GPU-a"]}"#;
    assert!(serde_json::from_str::<Description>(text).is_err());
    let text = r#"{"exit":1,"stopped":true,"reason":"r","report":"t","rank":2,"attempt":3,"start":1}"#;
    let read: JobResult = serde_json::from_str(text).unwrap();
    let (reason, report) = ("r".into(), "t".into());
    let expected = JobResult {
        exit: 1,
        stopped: true,
        reason,
        report,
        rank: Some(2),
        attempt: 3,
        start: 1,
        usage: None,
        uptime_ms: 0,
    };
    assert_eq!(read, expected);
}
