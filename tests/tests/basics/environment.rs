//! The environment of a trainer's workers, and the destination of their output.

use std::collections::HashMap;

use xlaunch_tests::Job;

use crate::FAKE_WORKER;

xlaunch_harness::tests! {
    workers_get_torchrun_variables_and_environment_of_launcher,
    omp_num_threads_of_user_is_kept,
    stderr_is_prefixed_with_rank_and_logged_without_prefix;
}

/// Returns the output of `env` of each rank.
fn environments(job: &Job, ranks: usize) -> Vec<HashMap<String, String>> {
    let read = |rank| {
        let path = job.run_dir().join(format!("logs/attempt_0/{rank}/stdout.log"));
        let text = std::fs::read_to_string(path).unwrap();
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        pairs.map(|(name, value)| (name.to_string(), value.to_string())).collect()
    };
    (0..ranks).map(read).collect()
}

fn workers_get_torchrun_variables_and_environment_of_launcher() {
    let mut job = Job::scripted(FAKE_WORKER, "env join");
    for name in ["NCCL_DEBUG", "NVSHMEM_BOOTSTRAP", "TORCH_LOGS", "ANYTHING_ELSE"] {
        job.set_env(name, "unchanged");
    }
    job.run_ok(&["--nproc", "2"]);
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
            ("NCCL_DEBUG", "unchanged"),
            ("NVSHMEM_BOOTSTRAP", "unchanged"),
            ("TORCH_LOGS", "unchanged"),
            ("ANYTHING_ELSE", "unchanged"),
        ] {
            assert_eq!(environment.get(name).map(String::as_str), Some(value), "{name} of rank {rank}");
        }
        assert!(environment["MASTER_PORT"].parse::<u16>().is_ok_and(|port| port > 0));
        assert!(environment["XLAUNCH_AGENT_SOCKET"].starts_with('/'));
        assert!(environment["OMP_NUM_THREADS"].parse::<usize>().is_ok_and(|threads| threads > 0));
    }
    let common = ["MASTER_PORT", "TORCHELASTIC_RUN_ID", "XLAUNCH_AGENT_SOCKET"];
    assert!(common.iter().all(|name| environments[0][*name] == environments[1][*name]));
}

fn omp_num_threads_of_user_is_kept() {
    let mut job = Job::scripted(FAKE_WORKER, "env join");
    job.set_env("OMP_NUM_THREADS", "5");
    job.run_ok(&[]);
    assert_eq!(environments(&job, 1)[0]["OMP_NUM_THREADS"], "5");
}

fn stderr_is_prefixed_with_rank_and_logged_without_prefix() {
    let job = Job::scripted(FAKE_WORKER, "stderr:hello-from-zero join;stderr:hello-from-one join");
    let run = job.run_ok(&["--nproc", "2"]);
    for line in ["[rank 0] hello-from-zero", "[rank 1] hello-from-one"] {
        assert!(run.stderr.contains(line), "{line} in {}", run.stderr);
    }
    assert_eq!(job.worker_stderr(1), "hello-from-one\njoined 2 ranks\n");
}
