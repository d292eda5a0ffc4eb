//! Fail points: rules that are refused, and the effect of a crash, a failed save or a flipped bit in each phase of
//! training on the result: none, as long as the job may restart.

use std::process::Command;

use rustix::process::Signal;
use xlaunch_tests::{Job, Output, Process, children, send_signal, xlaunch_with_fail_points};

xlaunch_harness::tests! {
    build_without_fail_points_refuses_the_variable,
    invalid_rule_is_refused_before_anything_starts,
    crash_in_any_phase_changes_no_bit_of_the_result_on_two_ranks,
    crash_in_any_phase_changes_no_bit_of_the_result_on_three_ranks,
    crash_in_any_phase_changes_no_bit_of_the_result_with_a_sharded_optimizer,
    failed_save_of_one_rank_costs_that_checkpoint_only,
    checkpoint_that_cannot_be_read_back_is_an_error_of_the_command_that_asked_for_it,
    flipped_bit_is_found_and_the_group_restarts_from_the_last_verified_checkpoint,
    every_flipped_bit_is_found_and_its_rank_is_named,
    hang_is_reported_with_its_rank_and_phase,
    job_whose_binary_is_replaced_restarts;
}

/// Several buckets and, in 12 steps, three evaluations and checkpoints.
const SETTINGS: [&str; 6] = [
    "train.steps=12",
    "train.batch=2",
    "train.eval_every=4",
    "checkpoint.every=4",
    "comm.bucket_mb=0.02",
    "launch.max_restarts=2",
];

fn run(job: &Job, ranks: u32, settings: &[&str]) -> Output {
    let ranks = ranks.to_string();
    let settings = SETTINGS.iter().chain(settings).flat_map(|setting| ["--set", setting]);
    job.run(&["--nproc", &ranks].into_iter().chain(settings).collect::<Vec<_>>())
}

/// Runs with these rules and expects that the job succeeds after this many restarts.
fn run_ok(rules: &str, ranks: u32, settings: &[&str], restarts: usize) -> (Job, Output) {
    let job = Job::with_fail_points(rules);
    let output = run(&job, ranks, settings);
    assert_eq!(output.code, 0, "{rules}: {}", output.stderr);
    assert_eq!(output.stderr.matches("; restarting").count(), restarts, "{rules}: {}", output.stderr);
    (job, output)
}

fn build_without_fail_points_refuses_the_variable() {
    let mut job = Job::new();
    job.set_env("XLAUNCH_FAIL", "forward@0:1=crash");
    let output = job.run(&[]);
    assert_eq!(output.code, 2, "{}", output.stderr);
    assert!(
        output.stderr.contains("XLAUNCH_FAIL") && output.stderr.contains("--features fail"),
        "{}",
        output.stderr
    );
    assert!(!job.path().join("runs").exists());
}

fn invalid_rule_is_refused_before_anything_starts() {
    let job = Job::with_fail_points("data@0:1=slow(1);forwrd@0:1=crash");
    let output = job.run(&[]);
    assert_eq!(output.code, 2, "{}", output.stderr);
    let expected = "XLAUNCH_FAIL: `forwrd@0:1=crash`: unknown place `forwrd`; did you mean `forward`?";
    assert!(output.stderr.contains(expected), "{}", output.stderr);
    assert!(!job.path().join("runs").exists());
}

fn crash_in_any_phase_changes_no_bit_of_the_result_on_two_ranks() {
    crash_in_any_phase_changes_no_bit(2, false);
}

fn crash_in_any_phase_changes_no_bit_of_the_result_on_three_ranks() {
    crash_in_any_phase_changes_no_bit(3, false);
}

fn crash_in_any_phase_changes_no_bit_of_the_result_with_a_sharded_optimizer() {
    crash_in_any_phase_changes_no_bit(2, true);
}

fn crash_in_any_phase_changes_no_bit(ranks: u32, sharded: bool) {
    let sharded = format!("comm.shard={:?}", if sharded { "optimizer" } else { "none" });
    let (whole, _) = run_ok("", ranks, &[&sharded], 0);
    let last = ranks - 1;
    // Saves of the last step, because any other save is skipped if the previous one takes long.
    for (rules, restarts) in [
        (format!("join@{last}:0/0=crash"), 1),
        (format!("session@{last}:0/0=crash"), 1),
        (format!("data@{last}:6/0=crash"), 1),
        (format!("forward@{last}:6/0=crash"), 1),
        (format!("backward@{last}:6/0=crash"), 1),
        (format!("all_reduce@{last}:6/0=crash"), 1),
        (format!("optimizer@{last}:6/0=crash"), 1),
        (format!("read_back@{last}:6/0=crash"), 1),
        (format!("evaluation@{last}:8/0=crash"), 1),
        (format!("snapshot@{last}:12/0=crash"), 1),
        (format!("save_write@{last}:12/0=crash"), 1),
        (format!("save_sync@{last}:12/0=crash"), 1),
        ("save_commit@0:12/0=crash".to_owned(), 1),
        (format!("forward@0:7/0=crash;resume@{last}:0/1=crash"), 2),
    ] {
        // If training continued while a save is written, the previous save might be incomplete at the time of the
        // crash, and the job would start over.
        let asynchronous =
            format!("checkpoint.async={}", rules.contains("save") || rules.contains("snapshot"));
        let (job, _) = run_ok(&rules, ranks, &[&sharded, &asynchronous], restarts);
        let series = |job: &Job, key: &str| -> Vec<f64> {
            job.metrics().iter().filter_map(|line| line[key].as_f64()).collect()
        };
        for key in ["train/loss", "val/loss"] {
            let (found, expected) = (series(&job, key), series(&whole, key));
            assert_eq!(found.last(), expected.last(), "{rules}, {ranks} ranks, {sharded}: {key}");
        }
        assert!(job.saved_state(12) == whole.saved_state(12), "{rules}, {ranks} ranks, {sharded}");
    }
}

fn failed_save_of_one_rank_costs_that_checkpoint_only() {
    let keep = ["checkpoint.async=false", "checkpoint.keep=0"];
    let (whole, _) = run_ok("", 2, &keep, 0);
    for (rule, reason) in [
        ("save_write@1:8=errno(28)", "No space left on device"),
        ("save_sync@0:8=errno(5)", "Input/output error"),
        ("save_commit@0:8=errno(28)", "No space left on device"),
    ] {
        let (job, output) = run_ok(rule, 2, &keep, 0);
        assert!(
            output.stderr.contains(reason) && output.stderr.contains("step-00000008"),
            "{}",
            output.stderr
        );
        let entries = std::fs::read_dir(job.run_dir().join("checkpoints")).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names, ["step-00000004", "step-00000012"], "{rule}");
        assert!(job.saved_state(12) == whole.saved_state(12), "{rule}");
    }
}

fn checkpoint_that_cannot_be_read_back_is_an_error_of_the_command_that_asked_for_it() {
    // The manifest is damaged after the workers have checked the files, and before they rename the directory.
    let job = Job::with_fail_points("save_commit@0:*=slow(3000)");
    let settings = ["train.steps=1000000", "train.batch=1", "checkpoint.every=0", "checkpoint.dir=\"saved\""];
    let process = job.spawn(&settings.iter().flat_map(|setting| ["--set", setting]).collect::<Vec<_>>());
    process.wait_for_stderr("step 1/");
    let asked = Process::spawn(&mut job.command(&["checkpoint"]));
    process.wait_for_stderr("fail point reached");
    let mut saved = std::fs::read_dir(job.path().join("saved")).unwrap().map(|entry| entry.unwrap().path());
    let saving = saved.find(|path| path.display().to_string().contains("/.tmp-step-")).unwrap();
    std::fs::write(saving.join("manifest.json"), "{}").unwrap();
    let asked = asked.wait();
    assert_eq!((asked.code, asked.stdout.as_str()), (1, ""), "{}", asked.stderr);
    let name = saving.file_name().unwrap().to_str().unwrap().replace(".tmp-", "");
    for text in ["the checkpoint of step ", " was not saved: ", &name, "manifest.json"] {
        assert!(asked.stderr.contains(text), "{text} in {}", asked.stderr);
    }
    assert!(process.stderr().contains(" was not saved: "), "{}", process.stderr());
}

fn flipped_bit_is_found_and_the_group_restarts_from_the_last_verified_checkpoint() {
    let check = ["observe.check_every=1", "checkpoint.async=false"];
    let (whole, _) = run_ok("", 3, &check, 0);
    let (job, output) = run_ok("parameters@1:7/0=corrupt(100001);parameters@2:8/1=corrupt", 3, &check, 2);
    for text in ["replicas differ after step 7: rank 1;", "replicas differ after step 8: rank 2;"] {
        assert!(output.stderr.contains(text), "{text} in {}", output.stderr);
    }
    assert_eq!(output.stderr.matches("resuming at step 5 from").count(), 2, "{}", output.stderr);
    assert!(job.saved_state(12) == whole.saved_state(12));
}

fn every_flipped_bit_is_found_and_its_rank_is_named() {
    let check =
        ["observe.check_every=3", "train.eval_every=0", "checkpoint.every=0", "launch.max_restarts=0"];
    let assert_named = |ranks: u32, rank: u32, bit: u64, named: &str| {
        let job = Job::with_fail_points(&format!("parameters@{rank}:3=corrupt({bit})"));
        let output = run(&job, ranks, &check);
        assert_eq!(output.code, 76, "rank {rank}, bit {bit}: {}", output.stderr);
        let expected = format!("replicas differ after step 3: {named};");
        assert!(output.stderr.contains(&expected), "bit {bit}: {expected} in {}", output.stderr);
    };
    // Elements are in all parts of the model. Bits 0 to 22 are the mantissa, the least significant one first.
    for (number, bit) in
        [0, 0, 0, 1, 1, 2, 3, 5, 7, 9, 11, 13, 16, 19, 22, 23, 26, 29, 30, 31].into_iter().enumerate()
    {
        let (rank, element) = (number as u32 % 3, number as u64 * 1249);
        assert_named(3, rank, element * 32 + bit, &format!("rank {rank}"));
    }
    assert_named(2, 1, 5000, "ranks 0-1");
}

fn hang_is_reported_with_its_rank_and_phase() {
    let job = Job::with_fail_points("data@1:5=hang");
    let settings = SETTINGS.iter().chain(&["launch.stall_timeout=1"]).flat_map(|setting| ["--set", setting]);
    let process = job.spawn(&["--nproc", "2"].into_iter().chain(settings).collect::<Vec<_>>());
    process.wait_for_stderr("rank 1 made no progress");
    assert!(process.stderr().contains("wait for data"), "{}", process.stderr());
}

fn job_whose_binary_is_replaced_restarts() {
    let job = Job::with_fail_points("forward@1:6/0=hang");
    let (program, next) = (job.path().join("xlaunch"), job.path().join("next"));
    // Not by this process: a child that another test starts meanwhile would have the copy open for writing, which
    // prevents its execution.
    let copied = Command::new("cp").args([xlaunch_with_fail_points(), program.as_path()]).status().unwrap();
    assert!(copied.success());
    let command = job.command(&["train.toml", "--nproc", "2", "--set", "launch.max_restarts=1"]);
    let environment = command.get_envs().filter_map(|(name, value)| Some((name, value?)));
    let mut copy = Command::new(&program);
    let process = Process::spawn(copy.args(command.get_args()).current_dir(job.path()).envs(environment));
    process.wait_for_stderr("fail point reached");
    job.write("next", "a later version");
    std::fs::rename(&next, &program).unwrap();
    send_signal(children(process.pid())[0], Signal::KILL);
    let output = process.wait();
    assert_eq!(output.code, 0, "{}", output.stderr);
    assert_eq!(output.stderr.matches("; restarting").count(), 1, "{}", output.stderr);
}
