//! `xlaunch bench` and traces of the trainer.

use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{Job, Output, Process, children, is_alive, send_signal};

xlaunch_harness::tests! {
    train_reports_consistent_figures_and_leaves_no_files,
    train_tells_waiting_for_a_slow_rank_from_communication,
    train_has_the_losses_of_the_job,
    train_that_fails_says_why,
    train_with_threads_has_the_losses_of_processes,
    train_with_threads_that_fails_says_why_and_leaves_no_process,
    allreduce_results_are_correct_and_busbw_follows_algbw,
    launch_measures_cleanup_and_hang_detection,
    device_calibration_is_cached_until_device_is_measured_again,
    trace_shows_phases_of_requested_steps_on_every_rank;
}

/// A job with its own cache and temporary directory.
fn job() -> Job {
    let mut job = Job::new();
    let cache = job.path().join("cache").display().to_string();
    job.set_env("XLAUNCH_CACHE", &cache);
    let scratch = job.path().join("scratch");
    std::fs::create_dir(&scratch).unwrap();
    job.set_env("TMPDIR", &scratch.display().to_string());
    job
}

fn bench(job: &Job, args: &[&str]) -> Output {
    Process::spawn(&mut job.command(&[&["bench"], args].concat())).wait()
}

fn json(job: &Job, args: &[&str]) -> Value {
    let output = bench(job, &[args, &["--json"]].concat());
    assert_eq!(output.code, 0, "{}", output.stderr);
    serde_json::from_str(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", output.stdout))
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("no number {key} in {value}"))
}

fn file_names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Returns the children that have become workers. A child that has only been forked may be any other process.
fn workers(pid: u32) -> Vec<u32> {
    let command_line = |pid: &u32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let is_worker = |pid: &u32| command_line(pid).split(|byte| *byte == 0).nth(1) == Some(b"worker");
    children(pid).into_iter().filter(is_worker).collect()
}

fn train_reports_consistent_figures_and_leaves_no_files() {
    let job = job();
    let args = ["train", "train.toml", "--nproc", "2", "--steps", "6", "--warmup", "2", "--profile"];
    let found = json(&job, &args);
    let close = |a: f64, b: f64| assert!((a - b).abs() <= 1e-6 * b.abs().max(1e-9), "{a} and {b} in {found}");
    let get = |key: &str| number(&found, key);
    // 2 ranks, 4 sequences of 32 tokens each.
    assert_eq!((get("ranks"), get("tokens_per_step"), get("steps")), (2.0, 256.0, 6.0));
    close(get("tokens_per_second"), get("tokens_per_step") / (get("step_ms") / 1e3));
    assert!(0.0 < get("step_ms_p5") && get("step_ms_p5") <= get("step_ms"), "{found}");
    assert!(get("step_ms") <= get("step_ms_p95"), "{found}");
    // The formula is 6 N + 12 L H D T for 2 layers, width 32, gated feed-forward of 48, vocabulary 256, sequences of
    // 32.
    close(
        get("flops_per_token"),
        6.0 * 32.0 * (2.0 * (4.0 * 32.0 + 3.0 * 48.0) + 256.0) + 12.0 * 2.0 * 32.0 * 32.0,
    );
    close(get("tflops_per_rank"), get("flops_per_token") * get("tokens_per_second") / 2.0 / 1e12);
    close(get("share_of_ceiling"), get("tflops_per_rank") / get("ceiling_tflops"));
    assert!(0.0 < get("share_of_ceiling") && get("share_of_ceiling") < 1.5, "{found}");
    close(get("waiting_ms"), get("step_ms_small_all_reduce") - get("step_ms_without_all_reduce"));
    close(get("communication_ms"), get("step_ms") - get("step_ms_small_all_reduce"));
    assert_eq!(found["clocks"], Value::Null, "on a CPU");
    assert!(get("first_step_seconds") > get("step_ms_p5") / 1e3 && get("pool_peak_bytes") > 0.0, "{found}");
    assert!(get("final_loss") > 0.0 && get("final_loss") < 6.0, "{found}");
    assert_eq!(found["kernels"], serde_json::json!([]), "kernels are timed on GPUs only");
    assert_eq!(file_names(&job.path().join("scratch")), Vec::<String>::new());
    assert!(!job.path().join("runs").exists());

    let one = json(&job, &["train", "train.toml", "--steps", "3", "--warmup", "1"]);
    assert_eq!(["waiting_ms", "communication_ms", "ranks"].map(|key| number(&one, key)), [0.0, 0.0, 1.0]);
}

fn train_tells_waiting_for_a_slow_rank_from_communication() {
    // Rank 1 takes longer in every step, by much more than a step of this model.
    let mut job = Job::with_fail_points("forward@1:*=slow(200)");
    let cache = job.path().join("cache").display().to_string();
    job.set_env("XLAUNCH_CACHE", &cache);
    let found = json(&job, &["train", "train.toml", "--nproc", "2", "--steps", "8", "--warmup", "2"]);
    // Rank 0 waits for 200 ms, rank 1 does not.
    let (waiting, communication) = (number(&found, "waiting_ms"), number(&found, "communication_ms"));
    assert!((60.0..140.0).contains(&waiting) && communication.abs() < 50.0, "{found}");
}

fn train_has_the_losses_of_the_job() {
    let job = job();
    let found = json(&job, &["train", "train.toml", "--nproc", "2", "--steps", "6", "--warmup", "2"]);
    job.run_ok(&["--nproc", "2"]);
    assert_eq!(number(&found, "final_loss"), f64::from(*job.losses().last().unwrap() as f32));
}

fn train_that_fails_says_why() {
    let job = job();
    let args = ["train", "train.toml", "--steps", "2", "--set", "engine.memory_limit_mb=1"];
    let failed = bench(&job, &args);
    assert_eq!(failed.code, 76, "{}", failed.stderr);
    assert!(failed.stderr.contains("out of memory") && failed.stdout.is_empty(), "{}", failed.stderr);
    let missing = bench(&job, &["train", "nowhere.toml"]);
    assert!(missing.code == 2 && missing.stderr.contains("nowhere.toml"), "{}", missing.stderr);
}

fn train_with_threads_has_the_losses_of_processes() {
    let job = job();
    let run = |options: &[&str]| {
        let args =
            ["bench", "train", "train.toml", "--nproc", "2", "--steps", "60", "--warmup", "2", "--json"];
        let mut process = Process::spawn(&mut job.command(&[&args, options].concat()));
        let mut most_workers = 0;
        while process.is_running() {
            most_workers = most_workers.max(workers(process.pid()).len());
            std::thread::sleep(Duration::from_millis(10));
        }
        let output = process.wait();
        assert_eq!(output.code, 0, "{}", output.stderr);
        (most_workers, serde_json::from_str::<Value>(&output.stdout).unwrap())
    };
    let divided = ["model.experts=4", "model.experts_per_token=2", "model.expert_ffn=24", "comm.experts=2"];
    let divided = divided.map(|setting| ["--set", setting]).concat();
    for options in [&[][..], &["--set", "comm.shard=\"optimizer\"", "--set", "engine.pool=off"], &divided] {
        let (workers, processes) = run(options);
        assert_eq!((workers, &processes["mode"]), (2, &"processes".into()), "{processes}");
        let (workers, threads) = run(&[options, &["--threads"]].concat());
        assert_eq!((workers, &threads["mode"]), (1, &"threads".into()), "{threads}");
        assert_eq!(number(&threads, "final_loss"), number(&processes, "final_loss"));
        let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!((keys(&threads), &threads["ranks"]), (keys(&processes), &processes["ranks"]));
    }
}

fn train_with_threads_that_fails_says_why_and_leaves_no_process() {
    let job = job();
    let args = ["bench", "train", "train.toml", "--threads", "--nproc", "2"];
    let start = |options: &[&str]| Process::spawn(&mut job.command(&[&args, options].concat()));
    let failed = start(&["--set", "engine.memory_limit_mb=1"]).wait();
    assert_eq!(failed.code, 76, "{}", failed.stderr);
    assert!(failed.stderr.contains("error: rank ") && failed.stderr.contains("out of memory"), "{failed:?}");

    let running = start(&["--steps", "100000"]);
    running.wait_for_stderr("step 1/");
    let workers = workers(running.pid());
    let [worker] = workers[..] else { panic!("{workers:?}") };
    let tasks = std::fs::read_dir(format!("/proc/{worker}/task")).unwrap().flatten();
    let names: Vec<_> =
        tasks.map(|task| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default()).collect();
    assert!(["rank 0\n", "rank 1\n"].iter().all(|name| names.iter().any(|it| it == name)), "{names:?}");
    send_signal(worker, Signal::KILL);
    let killed = running.wait();
    assert_eq!(killed.code, 1, "{}", killed.stderr);
    assert!(killed.stderr.contains("signal 9") && killed.stdout.is_empty(), "{killed:?}");
    assert!(!is_alive(worker));

    let several_nodes = start(&["--nnodes", "2"]).wait();
    assert!(several_nodes.code == 2 && several_nodes.stderr.contains("--nnodes"), "{several_nodes:?}");
}

fn allreduce_results_are_correct_and_busbw_follows_algbw() {
    let job = job();
    let found = json(&job, &["allreduce", "--nproc", "4", "--max", "64K"]);
    let rows = found["sizes"].as_array().unwrap();
    let sizes: Vec<f64> = rows.iter().map(|row| number(row, "size")).collect();
    assert_eq!(sizes, [8.0, 32.0, 128.0, 512.0, 2048.0, 8192.0, 32768.0, 65536.0]);
    for row in rows {
        assert_eq!((number(row, "wrong"), &row["type"]), (0.0, &"float".into()), "{row}");
        let (algbw, busbw) = (number(row, "algbw"), number(row, "busbw"));
        // The factor is 2 (n - 1) / n with 4 ranks.
        assert!(algbw > 0.0 && (busbw - algbw * 1.5).abs() <= 1e-9 * busbw, "{row}");
        assert!((algbw - number(row, "size") / number(row, "time") / 1e3).abs() <= 1e-9 * algbw, "{row}");
    }
    let table = bench(&job, &["allreduce", "--nproc", "2", "--min", "8", "--max", "8"]);
    let last: Vec<&str> = table.stdout.lines().last().unwrap_or_default().split_whitespace().collect();
    let expected = (9, &["8", "2", "float", "sum", "-1"][..], "0");
    assert_eq!((last.len(), &last[..5], last[8]), expected, "{table:?}");
    let refused = bench(&job, &["allreduce", "--dtype", "bf16"]);
    assert!(refused.code == 2 && refused.stderr.contains("--dtype bf16"), "{}", refused.stderr);
}

fn launch_measures_cleanup_and_hang_detection() {
    let found = json(&job(), &["launch", "--nproc", "2", "--runs", "2"]);
    let ours = &found["xlaunch"];
    for key in ["no_op_launch_ms", "group_exit_ms"] {
        assert!(number(&ours[key], "median") > 0.0, "{key} in {found}");
    }
    // Each of the workers has daemonized another process.
    assert_eq!(ours["processes_started"], 4, "{found}");
    assert!(number(&found, "hang_report_seconds") > 1.0, "{found}");
}

fn device_calibration_is_cached_until_device_is_measured_again() {
    let job = job();
    let cache = job.path().join("cache");
    let ceiling =
        || number(&json(&job, &["train", "train.toml", "--steps", "1", "--warmup", "0"]), "ceiling_tflops");
    let first = ceiling();
    let files = file_names(&cache);
    assert_eq!(files.len(), 1, "{files:?}");
    assert_eq!(ceiling(), first, "from the cache");
    // The cached value is used.
    let file = cache.join(&files[0]);
    let mut cached: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    cached["fp32_gemm_flops"] = 5e12.into();
    std::fs::write(&file, cached.to_string()).unwrap();
    assert_eq!(ceiling(), 5.0);
    let measured = json(&job, &["device"]);
    let gemm = number(&measured["gemm_flops"], "fp32");
    assert!(gemm > 1e8 && gemm != 5e12 && number(&measured, "copy_bytes_per_second") > 1e8, "{measured}");
    assert_eq!(ceiling(), gemm / 1e12, "`bench device` refreshes the cache");
    std::fs::write(&file, "not JSON").unwrap();
    assert!(ceiling() > 0.0, "a broken file is ignored");
}

fn trace_shows_phases_of_requested_steps_on_every_rank() {
    let job = job();
    job.run_ok(&["--nproc", "2", "--set", "observe.trace=3", "--set", "train.accumulate=2"]);
    for rank in 0..2 {
        let text = std::fs::read_to_string(job.run_dir().join(format!("trace-rank{rank}.json"))).unwrap();
        let trace: Value = serde_json::from_str(&text).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        assert!(events.iter().all(|event| number(event, "pid") == f64::from(rank)));
        let name = |event: &Value| event["name"].as_str().unwrap().to_owned();
        let spans = events.iter().filter(|event| event["ph"] == "X");
        let (steps, phases): (Vec<&Value>, Vec<&Value>) =
            spans.partition(|span| name(span).starts_with("step "));
        // Eight steps are too few for ten steps before the traced ones.
        let names: Vec<String> = steps.iter().map(|step| name(step)).collect();
        assert_eq!(names, ["step 2", "step 3", "step 4"]);
        let range = |event: &Value| (number(event, "ts"), number(event, "ts") + number(event, "dur"));
        for step in steps {
            let (begin, end) = range(step);
            // The last phase ends with its step, except for rounding of start and duration.
            let within = |phase: &&&Value| range(phase).0 >= begin && range(phase).1 <= end + 0.01;
            let inside: Vec<String> = phases.iter().filter(within).map(|phase| name(phase)).collect();
            let micro = ["wait for data", "forward", "backward"];
            assert_eq!(inside[..6], [micro, micro].concat());
            assert_eq!(
                (inside.len(), &inside[7..]),
                (9, &["optimizer".to_owned(), "read back".to_owned()][..])
            );
        }
        assert_eq!(phases.len(), 3 * 9, "every phase is inside a step");
    }
    job.run_ok(&[]);
    assert!(!job.run_dir().join("trace-rank0.json").exists());
}
