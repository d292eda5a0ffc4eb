//! Stopping a training job and saving a checkpoint on request, by signals and by calls; leftovers of a failed save.

use std::path::{Path, PathBuf};

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{
    FrozenThread, Job, Launch, Output, Process, children, is_alive, requirements, send_signal, wait_for,
};

use crate::FAKE_WORKER;

xlaunch_harness::tests! {
    sigterm_to_every_process_saves_a_checkpoint,
    sigusr1_saves_a_checkpoint_and_training_goes_on,
    stop_that_times_out_is_retryable_and_names_the_newest_checkpoint,
    stop_waits_for_an_evaluation_that_makes_progress,
    rank_that_is_done_is_not_blamed_for_a_stop,
    checkpoint_command_prints_the_path_of_a_complete_checkpoint,
    checkpoint_is_refused_where_there_is_nothing_to_save,
    rank_that_fails_to_save_is_the_root_cause,
    stop_with_wait_returns_after_the_end_and_the_launch_names_the_caller,
    ranks_that_do_not_open_the_communicator_are_named;
    needs requirements::freeze_thread:
    blocked_disk_does_not_disturb_training;
}

/// Endless training of two ranks.
const ARGS: [&str; 6] =
    ["--nproc", "2", "--set", "train.steps=100000000", "--set", "observe.tensorboard=false"];
/// Number of lines of text, half of which are evaluated.
const LONG_EVALUATION_LINES: usize = 200_000;
/// Number of rounds of tests whose outcome could depend on timing.
const ROUNDS: usize = 10;

fn start_training(job: &Job, settings: &[&str]) -> (Process, Vec<u32>) {
    let settings = settings.iter().flat_map(|setting| ["--set", setting]).collect::<Vec<_>>();
    let run = job.spawn(&[&ARGS[..], &settings].concat());
    run.wait_for_stderr("step 1/");
    let workers = wait_for("the workers", || Some(children(run.pid())).filter(|found| found.len() == 2));
    (run, workers)
}

fn query(job: &Job, args: &[&str]) -> Output {
    Process::spawn(&mut job.command(args)).wait()
}

fn rank_that_is_done_is_not_blamed_for_a_stop() {
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130), (Signal::HUP, 129)] {
        let launch = Launch::new();
        let run = launch.spawn_shell(&[], 2, "echo rank $RANK: $$; test $RANK = 1 || exec sleep 1000");
        let pid = |rank: &str| run.stdout().lines().find_map(|line| line.strip_prefix(rank)?.parse().ok());
        wait_for("rank 0", || pid("rank 0: "));
        let done = wait_for("rank 1", || pid("rank 1: "));
        wait_for("the end of rank 1", || (!is_alive(done)).then_some(()));
        run.signal(signal);
        let run = run.wait();
        assert_eq!(run.code, code, "{}", run.stderr);
        assert!(!run.stderr.contains("rank 1"), "{}", run.stderr);
    }
}

fn stop_with_wait_returns_after_the_end_and_the_launch_names_the_caller() {
    let launch = Launch::new();
    let run = launch.spawn_shell(
        &[],
        1,
        "trap 'sleep 0.3; echo x > ended; exit' TERM; echo up; while :; do sleep 0.05; done",
    );
    wait_for("the worker", || run.stdout().contains("up").then_some(()));
    let stop = launch.run(&["stop", "--wait"]);
    assert_eq!((stop.code, launch.read("ended").as_str()), (0, "x\n"), "{}", stop.stderr);
    assert!(stop.stdout.ends_with(" has ended\n"), "{}", stop.stdout);
    let stderr = run.wait().stderr;
    assert!(stderr.contains("stop requested by ") && stderr.contains("(process "), "{stderr}");
}

/// Asserts that this is a complete checkpoint, and returns its step.
fn step_of_complete(checkpoint: &Path) -> u64 {
    let read = |name: &str| -> Value {
        let text =
            std::fs::read(checkpoint.join(name)).unwrap_or_else(|error| panic!("{checkpoint:?}: {error}"));
        serde_json::from_slice(&text).unwrap()
    };
    assert!(read("manifest.json").is_object());
    read("state.json")["step"].as_u64().unwrap()
}

fn sigterm_to_every_process_saves_a_checkpoint() {
    for round in 0..ROUNDS {
        let job = Job::new();
        let (run, workers) = start_training(&job, &["checkpoint.every=0"]);
        // Slurm and systemd send the signal to all processes, in any order.
        let mut all = [&[run.pid()], &workers[..]].concat();
        all.rotate_left(round % 3);
        all.iter().for_each(|pid| send_signal(*pid, Signal::TERM));
        let run = run.wait();
        assert_eq!(run.code, 143, "round {round}: {}", run.stderr);
        let steps = job.losses().len() as u64;
        let checkpoint = job.run_dir().join(format!("checkpoints/step-{steps:08}"));
        assert_eq!(step_of_complete(&checkpoint), steps, "round {round}");
    }
}

fn sigusr1_saves_a_checkpoint_and_training_goes_on() {
    let job = Job::new();
    let (run, workers) = start_training(&job, &["checkpoint.every=0"]);
    let signals = [Signal::USR1, Signal::USR2, Signal::HUP, Signal::INT, Signal::TERM];
    for (worker, signal) in workers.iter().flat_map(|worker| signals.map(|signal| (*worker, signal))) {
        send_signal(worker, signal);
    }
    run.signal(Signal::USR1);
    const SAVED: &str = "saved a checkpoint of step ";
    run.wait_for_stderr(SAVED);
    let line = wait_for("the whole line", || {
        let stderr = run.stderr();
        let (_, rest) = stderr.split_once(SAVED)?;
        rest.split_once('\n').map(|(line, _)| line.to_owned())
    });
    let (step, path) = line.split_once(": ").unwrap();
    assert_eq!(step_of_complete(Path::new(path)).to_string(), step);
    let steps = job.losses().len();
    wait_for("more steps", || (job.losses().len() > steps + 2).then_some(()));
    run.signal(Signal::TERM);
    let run = run.wait();
    assert_eq!(run.code, 143, "{}", run.stderr);
    assert_eq!(run.stderr.matches(SAVED).count(), 1, "{}", run.stderr);
}

fn stop_that_times_out_is_retryable_and_names_the_newest_checkpoint() {
    for saves in [false, true] {
        let job = Job::new();
        let (run, workers) = start_training(&job, &["checkpoint.every=0", "launch.shutdown_timeout=1.0"]);
        let saved = saves.then(|| query(&job, &["checkpoint"]).stdout.trim().to_owned());
        send_signal(workers[1], Signal::STOP);
        run.signal(Signal::TERM);
        let run = run.wait();
        assert_eq!(run.code, 75, "{}", run.stderr);
        let expected = match &saved {
            Some(path) => format!("newest checkpoint: step {}, {path}", step_of_complete(Path::new(path))),
            None => "newest checkpoint: none was saved in this run".into(),
        };
        assert!(run.failure_report().contains(&expected), "{expected}: {}", run.stderr);
        assert!(run.failure_report().contains("stopped without a checkpoint"), "{}", run.stderr);
    }
}

fn stop_waits_for_an_evaluation_that_makes_progress() {
    // The evaluations take longer than the shutdown timeout, which is several times the heartbeat interval.
    for (timeout, most, code) in [("3.0", "300.0", 143), ("1.0", "0.0", 75)] {
        let job = Job::new();
        job.write("text/b.txt", "It was a dark and stormy night. ".repeat(LONG_EVALUATION_LINES));
        let limits = [("timeout", timeout), ("timeout_max", most)]
            .map(|(key, seconds)| format!("launch.shutdown_{key}={seconds}"));
        let evaluation = ["train.eval_every=1", "train.eval_batches=1000000", "data.val_fraction=0.5"];
        let (run, _) = start_training(
            &job,
            &[&evaluation[..], &["checkpoint.every=0", &limits[0], &limits[1]]].concat(),
        );
        run.signal(Signal::TERM);
        let run = run.wait();
        assert_eq!(run.code, code, "{limits:?}: {}", run.stderr);
    }
}

fn checkpoint_command_prints_the_path_of_a_complete_checkpoint() {
    let job = Job::new();
    let (run, _) = start_training(&job, &["checkpoint.every=0", "checkpoint.keep=0"]);
    let before = job.losses().len() as u64;
    // The path is absolute, as the command runs in another directory.
    let saved = Process::spawn(job.command(&["checkpoint", "train"]).current_dir("/")).wait();
    assert_eq!(saved.code, 0, "{}", saved.stderr);
    let path = PathBuf::from(saved.stdout.strip_suffix('\n').unwrap());
    assert!(path.is_absolute() && step_of_complete(&path) >= before, "{path:?}, {before}");
    let several: Vec<Process> =
        (0..3).map(|_| Process::spawn(&mut job.command(&["checkpoint", "--json"]))).collect();
    for saved in several {
        let saved: Value = serde_json::from_str(&saved.wait().stdout).unwrap();
        let path = saved["path"].as_str().unwrap();
        assert_eq!(saved["step"], step_of_complete(Path::new(path)), "{saved}");
        assert!(saved["seconds"].as_f64().is_some_and(|seconds| seconds > 0.0), "{saved}");
    }
    run.signal(Signal::TERM);
    assert_eq!(run.wait().code, 143);
    let after = query(&job, &["checkpoint"]);
    assert!(after.code == 1 && after.stderr.contains("no launch"), "{}", after.stderr);
}

fn checkpoint_is_refused_where_there_is_nothing_to_save() {
    let launch = Launch::new();
    let run = launch.spawn_shell(&[], 1, "echo ready >&2; exec sleep 1000");
    run.wait_for_stderr("ready");
    let refused = launch.run(&["checkpoint"]);
    assert!(refused.code == 1 && refused.stderr.contains("runs a command"), "{}", refused.stderr);
    drop(run);

    let job = Job::scripted(FAKE_WORKER, "join stderr:ready sleep");
    let run = job.spawn(&[]);
    run.wait_for_stderr("ready");
    let refused = query(&job, &["checkpoint"]);
    assert!(refused.code == 1 && refused.stderr.contains("not training yet"), "{}", refused.stderr);
    run.signal(Signal::USR1);
    run.wait_for_stderr("no checkpoint was saved: the job is not training yet");
}

fn rank_that_fails_to_save_is_the_root_cause() {
    for round in 0..ROUNDS {
        let job = Job::new();
        let (run, _) = start_training(&job, &["checkpoint.every=0", "checkpoint.on_error=\"stop\""]);
        // The directory of checkpoints cannot be created.
        std::fs::write(job.run_dir().join("checkpoints"), "").unwrap();
        let failed = query(&job, &["checkpoint"]);
        assert!(failed.code == 1 && failed.stderr.contains("rank 0: failed to create"), "{}", failed.stderr);
        let run = run.wait();
        assert_eq!(run.code, 65, "round {round}: {}", run.stderr);
        let root = run.root_cause();
        assert!(
            root.contains("rank 0 (pid ") && root.contains("failed to write checkpoint"),
            "{}",
            run.stderr
        );
        assert!(!root.contains("rank 1") && run.consequences().contains("rank 1"), "{}", run.stderr);
    }
}

fn ranks_that_do_not_open_the_communicator_are_named() {
    let job = Job::scripted(FAKE_WORKER, "join sleep");
    let run = job.run(&["--nproc", "2", "--set", "launch.join_timeout=2.0"]);
    assert_eq!(run.code, 69, "{}", run.stderr);
    let expected = "ranks 0-1 of 2 joined, but did not open the communicator within 2 s";
    assert!(run.failure_report().contains(expected), "{}", run.stderr);
}

fn blocked_disk_does_not_disturb_training() {
    let job = Job::new();
    let (run, _) = start_training(&job, &["checkpoint.every=0"]);
    // All threads that write files of the run stop, as if its disk did not respond.
    let tasks = std::fs::read_dir(format!("/proc/{}/task", run.pid())).unwrap().flatten();
    let tasks = tasks.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let name = |task: &u32| {
        let name = std::fs::read_to_string(format!("/proc/{}/task/{task}/comm", run.pid()));
        name.unwrap_or_default().trim().to_owned()
    };
    let writers: Vec<u32> = tasks.filter(|task| ["metrics.jsonl", "log"].contains(&&*name(task))).collect();
    assert_eq!(writers.len(), 5, "metrics, and stdout and stderr of two ranks");
    let frozen: Vec<_> = writers.into_iter().map(|task| FrozenThread::new(task).unwrap()).collect();
    let status = || -> Value { serde_json::from_str(&query(&job, &["status", "--json"]).stdout).unwrap() };
    let step = || status()["step"].as_u64().unwrap();
    let before = step();
    // This is longer than a rank may go without acknowledged heartbeats.
    std::thread::sleep(std::time::Duration::from_secs(20));
    run.wait_for_stderr("metrics.jsonl is written too slowly: reports are dropped");
    let after = step();
    assert!(after > before && status()["state"] == "running", "{before}, {after}");
    let hints = status()["ranks"].as_array().unwrap().iter().all(|rank| rank["hint"] == "");
    assert!(hints, "{}", status());
    drop(frozen);
    run.signal(Signal::TERM);
    let run = run.wait();
    assert_eq!(run.code, 143, "{}", run.stderr);
    let dropped = run.stderr.lines().find_map(|line| {
        let rest = line.strip_prefix("xlaunch: metrics.jsonl is incomplete: ")?;
        rest.split_once(" reports were dropped")?.0.parse::<u64>().ok()
    });
    assert!(dropped.is_some_and(|dropped| dropped > 0), "{}", run.stderr);
}
