//! `xlaunch doctor`, with GPUs simulated by `tests/src/nvml.c`.

use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{Job, Launch, Output, Process, children, send_signal, wait_for};

use crate::FAKE_WORKER;

xlaunch_harness::tests! {
    node_without_gpus_is_healthy,
    gpu_with_memory_errors_fails_and_is_named,
    hanging_driver_stops_nothing,
    training_does_not_start_on_a_gpu_with_errors,
    training_does_not_restart_on_a_gpu_with_errors;
}

/// Runs `xlaunch doctor` with the library in the directory of the launch, if there is one.
fn doctor(launch: &Launch, args: &[&str]) -> Output {
    Process::spawn(launch.command(&[&["doctor"], args].concat()).env("LD_LIBRARY_PATH", launch.path())).wait()
}

fn build(launch: &Launch, source: &str) {
    let library = launch.path().join("libnvidia-ml.so.1");
    let built = Command::new("cc").args(["-shared", "-fPIC", source, "-o"]).arg(library).status();
    assert!(built.unwrap().success());
}

fn node_without_gpus_is_healthy() {
    let launch = Launch::new();
    for args in [&["--json"][..], &["--quick", "--json"]] {
        let run = doctor(&launch, args);
        // The machine may have a GPU, whose state is unknown here.
        let found: Value = serde_json::from_str(&run.stdout).unwrap();
        let findings = found["findings"].as_array().unwrap();
        assert_eq!(found["healthy"], run.code == 0, "{}", run.stdout);
        let messages: Vec<&str> = findings.iter().filter_map(|it| it["message"].as_str()).collect();
        if messages.contains(&"there is no GPU") {
            assert_eq!(run.code, 0, "{}", run.stdout);
            let measured = messages.iter().any(|message| message.contains(" MB/s"));
            assert_eq!(measured, !args.contains(&"--quick"), "directories: {messages:?}");
        }
    }
}

fn gpu_with_memory_errors_fails_and_is_named() {
    let launch = Launch::new();
    build(&launch, concat!(env!("CARGO_MANIFEST_DIR"), "/src/nvml.c"));
    launch.write("gpus", "GPU-a 0\nGPU-b 2\n");
    let run = doctor(&launch, &["--quick"]);
    assert_eq!(run.code, 76, "{}", run.stderr);
    let failures: Vec<&str> = run.stdout.lines().filter(|line| line.starts_with("failure")).collect();
    assert_eq!(failures, ["failure  GPU 1 (GPU-b): 2 uncorrected ECC errors since the driver was loaded"]);
    assert!(run.stdout.contains("ok       GPU 0 (GPU-a): "), "{}", run.stdout);
    launch.write("gpus", &format!("GPU-a 0 {}\n", std::process::id()));
    let run = doctor(&launch, &["--quick"]);
    let used = format!("warning  GPU 0 (GPU-a): in use by process {}", std::process::id());
    assert!(run.code == 0 && run.stdout.contains(&used), "{}", run.stdout);
}

fn hanging_driver_stops_nothing() {
    let launch = Launch::new();
    // Like the real library, this one must not be unloaded during a call.
    let source = launch.write(
        "hang.c",
        "#include <stdlib.h>\n#include <unistd.h>\nint nvmlInit_v2(void) { for (;;) pause(); }\n\
         __attribute__((destructor)) static void unload(void) { abort(); }\n",
    );
    build(&launch, source.to_str().unwrap());
    let run = doctor(&launch, &["--quick"]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stdout.starts_with("warning  GPUs are not checked: NVML did not answer"), "{}", run.stdout);
}

fn training_does_not_start_on_a_gpu_with_errors() {
    let driver = Launch::new();
    build(&driver, concat!(env!("CARGO_MANIFEST_DIR"), "/src/nvml.c"));
    driver.write("gpus", "GPU-a 0\nGPU-b 2\n");
    let mut job = Job::scripted(FAKE_WORKER, "join exit:0");
    job.set_env("CUDA_VISIBLE_DEVICES", "0,1");
    job.set_env("LD_LIBRARY_PATH", driver.path().to_str().unwrap());
    let on_gpus =
        |nproc, more: &[&str]| job.run(&[&["--nproc", nproc, "--set", "engine.device=cuda"], more].concat());
    let run = on_gpus("2", &[]);
    assert_eq!(run.code, 76, "{}", run.stderr);
    for words in ["rank 1", "failed to start: GPU 1 (GPU-b): 2 uncorrected ECC errors"] {
        assert!(run.root_cause().contains(words), "{words} in {}", run.stderr);
    }
    assert!(run.consequences().contains("rank 0"), "{}", run.stderr);
    for (nproc, more) in [("1", &[][..]), ("2", &["--set", "launch.doctor=off"])] {
        let run = on_gpus(nproc, more);
        assert_eq!(run.code, 0, "{nproc} {more:?}: {}", run.stderr);
    }
}

fn training_does_not_restart_on_a_gpu_with_errors() {
    let driver = Launch::new();
    build(&driver, concat!(env!("CARGO_MANIFEST_DIR"), "/src/nvml.c"));
    driver.write("gpus", "GPU-a 0\nGPU-b 0\n");
    let mut job = Job::scripted(FAKE_WORKER, "join sleep");
    job.set_env("CUDA_VISIBLE_DEVICES", "0,1");
    job.set_env("LD_LIBRARY_PATH", driver.path().to_str().unwrap());
    let run = job.spawn(&["--nproc", "2", "--set", "engine.device=cuda", "--set", "launch.max_restarts=1"]);
    let joined = |rank| job.worker_stderr(rank).contains("joined 2 ranks");
    wait_for("both ranks to join", || (joined(0) && joined(1)).then_some(()));
    driver.write("gpus", "GPU-a 0\nGPU-b 2\n");
    send_signal(children(run.pid())[0], Signal::KILL);
    let run = run.wait();
    assert_eq!(run.code, 76, "{}", run.stderr);
    assert!(run.stderr.contains("restarting (1 of 1)"), "{}", run.stderr);
    assert!(run.root_cause().contains("failed to start: GPU 1 (GPU-b)"), "{}", run.stderr);
    // The processes of the second attempt, which had already been started, have left nothing behind.
    let attempts = std::fs::read_dir(job.run_dir().join("logs")).unwrap().count();
    assert_eq!(attempts, 1);
}
