//! `xlaunch bench` and traces, as users of the trainer meet them: workers on CPUs.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::path::Path;

use serde_json::Value;
use xlaunch_tests::{Finished, Job, Launch, Running, xlaunch};

/// A job whose calibration goes to its own directory.
fn job() -> Job {
    let mut job = Job::new();
    let cache = job.path().join("cache").display().to_string();
    job.set("XLAUNCH_CACHE", &cache);
    let scratch = job.path().join("scratch");
    std::fs::create_dir(&scratch).unwrap();
    job.set("TMPDIR", &scratch.display().to_string());
    job
}

fn bench(job: &Job, args: &[&str]) -> Finished {
    Running::start(&mut job.command(&[&["bench"], args].concat())).finish()
}

fn json(job: &Job, args: &[&str]) -> Value {
    let found = bench(job, &[args, &["--json"]].concat());
    assert_eq!(found.code, 0, "{}", found.stderr);
    serde_json::from_str(&found.stdout).unwrap_or_else(|error| panic!("{error}: {}", found.stdout))
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("no number {key} in {value}"))
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn a_training_bench_says_what_a_step_takes_and_leaves_nothing_behind() {
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
    // 2 blocks of 2 heads, width 32, feed-forward 48 with gates, vocabulary 256: 6 N + 6 L T C.
    close(
        get("flops_per_token"),
        6.0 * 32.0 * (2.0 * (4.0 * 32.0 + 3.0 * 48.0) + 256.0) + 6.0 * 2.0 * 32.0 * 32.0,
    );
    close(get("tflops_per_rank"), get("flops_per_token") * get("tokens_per_second") / 2.0 / 1e12);
    close(get("share_of_ceiling"), get("tflops_per_rank") / get("ceiling_tflops"));
    assert!(0.0 < get("share_of_ceiling") && get("share_of_ceiling") < 1.5, "{found}");
    close(get("exposed_communication_ms"), get("step_ms") - get("step_ms_without_all_reduce"));
    assert!(get("first_step_seconds") > get("step_ms_p5") / 1e3 && get("pool_peak_bytes") > 0.0, "{found}");
    assert!(get("final_loss") > 0.0 && get("final_loss") < 6.0, "{found}");
    assert_eq!(found["kernels"], serde_json::json!([]), "the CPU times no kernels");
    assert_eq!(names(&job.path().join("scratch")), Vec::<String>::new(), "runs are removed");
    assert!(!job.path().join("runs").exists());

    let one = json(&job, &["train", "train.toml", "--steps", "3", "--warmup", "1"]);
    assert_eq!((number(&one, "exposed_communication_ms"), number(&one, "ranks")), (0.0, 1.0));
}

#[test]
fn the_losses_of_a_training_bench_are_those_of_the_job() {
    let job = job();
    let found = json(&job, &["train", "train.toml", "--nproc", "2", "--steps", "6", "--warmup", "2"]);
    job.run_well(&["--nproc", "2"]);
    assert_eq!(number(&found, "final_loss"), f64::from(*job.losses().last().unwrap() as f32));
}

#[test]
fn a_training_bench_that_fails_says_why() {
    let job = job();
    let args = ["train", "train.toml", "--steps", "2", "--set", "engine.memory_limit_mb=1"];
    let found = bench(&job, &args);
    assert_eq!(found.code, 76, "{}", found.stderr);
    assert!(found.stderr.contains("out of memory") && found.stdout.is_empty(), "{}", found.stderr);
    let missing = bench(&job, &["train", "nowhere.toml"]);
    assert!(missing.code == 2 && missing.stderr.contains("nowhere.toml"), "{}", missing.stderr);
}

#[test]
fn sums_are_right_and_busbw_follows_algbw() {
    let job = job();
    let found = json(&job, &["allreduce", "--nproc", "4", "--max", "64K"]);
    let rows = found["sizes"].as_array().unwrap();
    let sizes: Vec<f64> = rows.iter().map(|row| number(row, "size")).collect();
    assert_eq!(sizes, [8.0, 32.0, 128.0, 512.0, 2048.0, 8192.0, 32768.0, 65536.0]);
    for row in rows {
        assert_eq!((number(row, "wrong"), &row["type"]), (0.0, &"float".into()), "{row}");
        let (algbw, busbw) = (number(row, "algbw"), number(row, "busbw"));
        assert!(algbw > 0.0 && (busbw - algbw * 1.5).abs() <= 1e-9 * busbw, "{row}");
        assert!((algbw - number(row, "size") / number(row, "time") / 1e3).abs() <= 1e-9 * algbw, "{row}");
    }
    let table = bench(&job, &["allreduce", "--nproc", "2", "--min", "8", "--max", "8"]);
    let last: Vec<&str> = table.stdout.lines().last().unwrap_or_default().split_whitespace().collect();
    assert_eq!(
        (last.len(), &last[..5], last[8]),
        (9, &["8", "2", "float", "sum", "-1"][..], "0"),
        "{table:?}"
    );
    let refused = bench(&job, &["allreduce", "--dtype", "bf16"]);
    assert!(refused.code == 2 && refused.stderr.contains("--dtype bf16"), "{}", refused.stderr);
}

#[test]
fn simulated_ranks_meet_where_there_are_descriptors_for_them() {
    let job = job();
    let met = json(&job, &["rendezvous", "--ranks", "50", "--ranks", "200"]);
    assert_eq!([0, 1].map(|row| number(&met[row], "ranks")), [50.0, 200.0]);
    assert!(number(&met[1], "seconds") > 0.0, "{met}");
    let few = format!("ulimit -n 150; exec {} bench rendezvous --ranks 200", xlaunch().display());
    let run = Launch::of("sh".as_ref()).run(&["-c", &few]);
    assert_eq!(run.code, 70, "{}", run.stderr);
    assert!(run.stderr.contains("200 ranks need 300 file descriptors, 150 are allowed"), "{}", run.stderr);
}

#[test]
fn launches_are_measured_from_outside() {
    let found = json(&job(), &["launch", "--nproc", "2", "--runs", "2"]);
    let ours = &found["xlaunch"];
    assert!(
        number(&ours["no_op_launch_ms"], "median") > 0.0 && number(&ours["group_exit_ms"], "median") > 0.0,
        "{found}"
    );
    // Each worker has hidden another process.
    assert_eq!(ours["processes_started"], 4, "{found}");
    assert!(number(&found, "hang_report_seconds") > 1.0, "{found}");
}

#[test]
fn a_device_is_measured_once_and_again_when_it_is_asked_for() {
    let job = job();
    let cache = job.path().join("cache");
    let train =
        || number(&json(&job, &["train", "train.toml", "--steps", "1", "--warmup", "0"]), "ceiling_tflops");
    let first = train();
    let files = names(&cache);
    assert_eq!(files.len(), 1, "{files:?}");
    assert_eq!(train(), first, "from the cache");
    // What lies there is what is used.
    let file = cache.join(&files[0]);
    let mut kept: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    kept["fp32_gemm_flops"] = 5e12.into();
    std::fs::write(&file, kept.to_string()).unwrap();
    assert_eq!(train(), 5.0);
    let fresh = json(&job, &["device"]);
    let product = number(&fresh["gemm_flops"], "fp32");
    assert!(product > 1e8 && product != 5e12 && number(&fresh, "copy_bytes_per_second") > 1e8, "{fresh}");
    assert_eq!(train(), product / 1e12, "what was measured again is kept");
    std::fs::write(&file, "no JSON").unwrap();
    assert!(train() > 0.0, "a broken file is as none");
}

#[test]
fn a_trace_shows_the_phases_of_the_steps_asked_for_on_every_rank() {
    let job = job();
    job.run_well(&["--nproc", "2", "--set", "observe.trace=3", "--set", "train.accumulate=2"]);
    for rank in 0..2 {
        let text = std::fs::read_to_string(job.latest().join(format!("trace-rank{rank}.json"))).unwrap();
        let trace: Value = serde_json::from_str(&text).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        assert!(events.iter().all(|event| number(event, "pid") == f64::from(rank)));
        let spans: Vec<&Value> = events.iter().filter(|event| event["ph"] == "X").collect();
        let of = |event: &Value| (number(event, "ts"), number(event, "ts") + number(event, "dur"));
        let (steps, phases): (Vec<&Value>, Vec<&Value>) =
            spans.iter().partition(|span| span["name"].as_str().unwrap().starts_with("step "));
        // The job has 8 steps: too few for ten before the traced ones.
        let named: Vec<_> = steps.iter().map(|step| step["name"].as_str().unwrap()).collect();
        assert_eq!(named, ["step 2", "step 3", "step 4"]);
        for step in steps {
            let (begin, end) = of(step);
            let inside: Vec<_> = phases
                .iter()
                // The last phase ends with its step, but for the rounding of start and duration.
                .filter(|phase| of(phase).0 >= begin && of(phase).1 <= end + 0.01)
                .map(|phase| phase["name"].as_str().unwrap())
                .collect();
            let micro = ["wait for data", "forward", "backward"];
            assert_eq!(inside, [&micro[..], &micro[..], &["sums", "optimizer", "read back"]].concat());
        }
        assert_eq!(phases.len(), 3 * 9, "every phase lies in a step");
    }
    job.run_well(&[]);
    assert!(!job.latest().join("trace-rank0.json").exists());
}
