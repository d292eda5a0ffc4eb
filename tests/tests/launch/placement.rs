//! Placement of a launch: invalid flags for several nodes, engines, and `xlaunch env`.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use xlaunch_tests::{Launch, Output, Process};

xlaunch_harness::tests! {
    impossible_groups_exit_with_2_and_name_what_is_wrong,
    engine_without_a_place_for_the_launch_says_what_to_do,
    one_node_of_an_engine_runs_as_without_it,
    daemon_refuses_several_nodes,
    env_shows_engine_and_settings_but_no_token,
    env_reports_problems_and_succeeds,
    batch_script_queues_again_after_retryable_exit_codes_only;
}

/// The second of two nodes of a step, as described by Slurm 22.05.
const STEP: [(&str, &str); 7] = [
    ("SLURM_JOB_ID", "7"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NUM_NODES", "2"),
    ("SLURM_STEP_NUM_TASKS", "2"),
    ("SLURM_STEP_NODELIST", "h[0-1]"),
    ("SLURM_NODEID", "1"),
    ("SLURM_NNODES", "2"),
];
const TOKEN: &str = "0123456789abcdef-secret";

fn run(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let launch = Launch::new();
    Process::spawn(launch.command(arguments).envs(variables.iter().copied())).wait()
}

fn impossible_groups_exit_with_2_and_name_what_is_wrong() {
    for (flags, words) in [
        ("--nnodes 2 --node-rank 2 --rdzv-endpoint h --rdzv-insecure", "--node-rank 2 is outside the range"),
        ("--nnodes 1:2 --rdzv-endpoint h --rdzv-insecure", "use --rdzv-backend c10d"),
        ("--nnodes 2 --rdzv-backend etcd --rdzv-endpoint h", "etcd is not supported"),
        ("--nnodes 2 --rdzv-insecure", "use --rdzv-endpoint HOST:PORT"),
        ("--nnodes 2 --rdzv-endpoint h", "--rdzv-insecure turns authentication off"),
        ("--nnodes 2 --rdzv-endpoint h", "--token-file FILE or XLAUNCH_TOKEN"),
    ] {
        for target in [&["--", "true"][..], &["train.toml"]] {
            let run = run(&[&flags.split(' ').collect::<Vec<_>>()[..], target].concat(), &[]);
            assert_eq!(run.code, 2, "{flags}: {}", run.stderr);
            assert!(run.stderr.contains(words), "{flags}: {}", run.stderr);
        }
    }
}

fn engine_without_a_place_for_the_launch_says_what_to_do() {
    let batch = [("SLURM_JOB_ID", "7"), ("SLURM_NNODES", "2"), ("SLURM_NODEID", "0")];
    let four_tasks = [&STEP[..], &[("SLURM_STEP_NUM_TASKS", "4")]].concat();
    for (flags, variables, words) in [
        ("", &batch[..], "srun -N 2 -n 2 xlaunch"),
        ("", &four_tasks, "several tasks per node (SLURM_STEP_NUM_TASKS=4"),
        ("--nnodes=3", &STEP, "--nnodes 3 contradicts SLURM_STEP_NUM_NODES=2"),
        ("--node-rank=0", &STEP, "--node-rank 0 contradicts SLURM_NODEID=1"),
    ] {
        let flags = flags.split_whitespace().chain(["--", "true"]).collect::<Vec<_>>();
        let run = run(&flags, variables);
        assert_eq!(run.code, 2, "{flags:?}: {}", run.stderr);
        assert!(run.stderr.contains(words), "{flags:?}: {}", run.stderr);
    }
}

fn one_node_of_an_engine_runs_as_without_it() {
    let alone = [&STEP[..], &[("SLURM_STEP_NUM_NODES", "1"), ("SLURM_STEP_NUM_TASKS", "1")]].concat();
    let alone = [&alone[..], &[("SLURM_STEP_NODELIST", "h0"), ("SLURM_NODEID", "0")]].concat();
    let script = "echo $RANK $WORLD_SIZE $GROUP_WORLD_SIZE";
    for (flags, variables) in [("--role=x", &alone[..]), ("--standalone", &STEP), ("--nnodes=1", &STEP)] {
        let run = run(&[flags, "--", "sh", "-c", script], variables);
        assert_eq!((run.code, run.stdout.as_str()), (0, "0 1 1\n"), "{flags}: {}", run.stderr);
    }
}

fn daemon_refuses_several_nodes() {
    for target in [&["--", "true"][..], &["train.toml"]] {
        let run = run(&[&["submit", "--nnodes", "2"][..], target].concat(), &[]);
        assert_eq!(run.code, 2, "{}", run.stderr);
        assert!(run.stderr.contains("use Slurm or Kubernetes, or run `xlaunch --nnodes` on each node"));
    }
}

fn env_shows_engine_and_settings_but_no_token() {
    let variables = [&STEP[..], &[("XLAUNCH_TOKEN", TOKEN), ("PET_RDZV_ID", "night")]].concat();
    let shown = run(&["env"], &variables);
    assert_eq!(shown.code, 0, "{}", shown.stderr);
    for words in
        ["cluster environment: Slurm", "SLURM_NODEID=1", "h0:2", "PET_RDZV_ID=night", "XLAUNCH_TOKEN"]
    {
        assert!(shown.stdout.contains(words), "{words} in {}", shown.stdout);
    }
    let as_json = run(&["env", "--json"], &variables);
    let found: Value = serde_json::from_str(&as_json.stdout).unwrap();
    let setting = |name: &str| {
        let settings = found["settings"].as_array().unwrap();
        let setting = settings.iter().find(|setting| setting["name"] == name).unwrap();
        (setting["value"].as_str().unwrap().to_owned(), setting["source"].as_str().unwrap().to_owned())
    };
    assert_eq!(found["engine"]["variables"]["SLURM_STEP_NODELIST"], "h[0-1]");
    assert_eq!(setting("nodes"), ("2".into(), "SLURM_STEP_NUM_NODES=2".into()));
    assert_eq!(setting("node rank"), ("1".into(), "SLURM_NODEID=1".into()));
    assert_eq!(setting("security"), ("token".into(), "XLAUNCH_TOKEN".into()));
    assert!(found["problem"].is_null());
    assert!(!(shown.stdout + &as_json.stdout).contains(TOKEN));
}

fn env_reports_problems_and_succeeds() {
    let batch = [("SLURM_JOB_ID", "7"), ("SLURM_NNODES", "2")];
    for (variables, words) in [
        (&batch[..], "srun -N 2 -n 2 xlaunch"),
        (&[("PET_NNODES", "many")], "PET_NNODES=many: expected a number of nodes"),
    ] {
        let shown = run(&["env"], variables);
        assert_eq!(shown.code, 0, "{}", shown.stderr);
        assert!(shown.stdout.contains("problem: ") && shown.stdout.contains(words), "{}", shown.stdout);
    }
    let outside = run(&["env"], &[]);
    assert!(outside.stdout.starts_with("cluster environment: none\n") && !outside.stdout.contains("problem"));
}

/// Runs the script of `deploy/slurm` with programs that replace Slurm's and record how they are called.
fn batch_script_queues_again_after_retryable_exit_codes_only() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/slurm/train.sbatch");
    for (code, running, restarts, preempted, requeued) in [
        (75, "7", "", "None", true),
        (137, "7", "", "None", true),
        (143, "7", "3", "2026-11-25T10:00:00", true),
        // Stopped by a user.
        (143, "7", "", "None", false),
        (0, "7", "", "None", false),
        (1, "7", "", "None", false),
        (2, "7", "", "None", false),
        (65, "7", "", "None", false),
        // Cancelled, or without an end.
        (143, "", "", "2026-11-25T10:00:00", false),
        (75, "7", "100", "None", false),
    ] {
        let launch = Launch::new();
        let path = format!("{}:/usr/bin:/bin", launch.path().display());
        let stub = |name: &str, script: &str| {
            let file = launch.write(name, &format!("#!/bin/sh\n{script}\n"));
            std::fs::set_permissions(file, PermissionsExt::from_mode(0o755)).unwrap();
        };
        stub("srun", &format!("echo srun \"$@\"; exit {code}"));
        stub("squeue", &format!("[ -z \"{running}\" ] || echo {running}"));
        stub("scontrol", &format!("echo scontrol \"$@\"; echo PreemptTime={preempted}"));
        let mut bash = Command::new("bash");
        bash.arg(&script)
            .arg("train.toml")
            .env("PATH", path)
            .envs([("SLURM_JOB_ID", "7"), ("SLURM_NNODES", "2")]);
        let run = Process::spawn(bash.env("SLURM_RESTART_COUNT", restarts)).wait();
        assert_eq!(run.code, code, "{}", run.stderr);
        assert!(run.stdout.starts_with("srun --nodes=2 --ntasks=2 "), "{}", run.stdout);
        assert!(run.stdout.contains("xlaunch train.toml --resume\n"), "{}", run.stdout);
        assert_eq!(run.stdout.contains("scontrol requeue 7\n"), requeued, "{code}: {}", run.stdout);
    }
}
