//! What a worker finds in its environment, and where its output goes.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::collections::HashMap;

use xlaunch_tests::Job;

const FAKE_WORKER: &str = env!("CARGO_BIN_EXE_fake_worker");

fn environments(job: &Job, ranks: usize) -> Vec<HashMap<String, String>> {
    let read = |rank| {
        let path = job.latest().join(format!("logs/attempt_0/{rank}/stdout.log"));
        let text = std::fs::read_to_string(path).unwrap();
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        pairs.map(|(name, value)| (name.to_string(), value.to_string())).collect()
    };
    (0..ranks).map(read).collect()
}

#[test]
fn workers_get_torchruns_variables_and_everything_the_launcher_had() {
    let mut job = Job::scripted(FAKE_WORKER, "environment join");
    for name in ["NCCL_DEBUG", "NVSHMEM_BOOTSTRAP", "TORCH_LOGS", "ANYTHING_ELSE"] {
        job.set(name, "as it was");
    }
    job.run_well(&["--nproc", "2"]);
    let environments = environments(&job, 2);
    for (rank, environment) in environments.iter().enumerate() {
        let rank = rank.to_string();
        for (name, value) in [
            ("RANK", rank.as_str()),
            ("LOCAL_RANK", &rank),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("GROUP_RANK", "0"),
            ("ROLE_RANK", &rank),
            ("ROLE_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("XLAUNCH_ATTEMPT", "0"),
            ("XLAUNCH_DEVICE", "cpu"),
            ("NCCL_DEBUG", "as it was"),
            ("NVSHMEM_BOOTSTRAP", "as it was"),
            ("TORCH_LOGS", "as it was"),
            ("ANYTHING_ELSE", "as it was"),
        ] {
            assert_eq!(environment.get(name).map(String::as_str), Some(value), "{name} of rank {rank}");
        }
        assert!(environment["MASTER_PORT"].parse::<u16>().is_ok_and(|port| port > 0));
        assert!(environment["XLAUNCH_AGENT_SOCKET"].starts_with('/'));
        assert!(environment["OMP_NUM_THREADS"].parse::<usize>().is_ok_and(|threads| threads > 0));
    }
    let same = ["MASTER_PORT", "TORCHELASTIC_RUN_ID", "XLAUNCH_AGENT_SOCKET"];
    assert!(same.iter().all(|name| environments[0][*name] == environments[1][*name]));
}

#[test]
fn threads_that_the_user_chose_stay() {
    let mut job = Job::scripted(FAKE_WORKER, "environment join");
    job.set("OMP_NUM_THREADS", "5");
    job.run_well(&[]);
    assert_eq!(environments(&job, 1)[0]["OMP_NUM_THREADS"], "5");
}

#[test]
fn stderr_is_shown_with_its_rank_and_kept_with_stdout_in_files() {
    let job = Job::scripted(FAKE_WORKER, "say:hello-from-zero join;say:hello-from-one join");
    let run = job.run_well(&["--nproc", "2"]);
    assert!(
        run.stderr.contains("[rank 0] hello-from-zero") && run.stderr.contains("[rank 1] hello-from-one")
    );
    let log = std::fs::read_to_string(job.latest().join("logs/attempt_0/1/stderr.log")).unwrap();
    assert_eq!(log, "hello-from-one\njoined 2 ranks\n");
}
