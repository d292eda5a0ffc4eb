//! The memory pool from the perspective of the trainer's users: modes, limits, debug fill, traces.

use std::collections::HashSet;

use xlaunch_tests::Job;

xlaunch_harness::tests! {
    losses_do_not_depend_on_pool_mode_or_fill_byte,
    metrics_show_pool_counters_and_pool_off_allocates_every_step,
    memory_limit_error_names_largest_holders_and_writes_snapshot,
    invalid_fill_byte_is_named,
    trace_of_first_step_is_a_valid_log_of_allocations;
}

fn losses_do_not_depend_on_pool_mode_or_fill_byte() {
    let train = |job: Job, mode: &str| {
        job.run_ok(&["--nproc", "2", "--set", &format!("engine.pool=\"{mode}\"")]);
        (job.losses(), job.checkpoint(8, "model.safetensors"))
    };
    let on = train(Job::new(), "on");
    assert_eq!(on.0.len(), 8);
    for mode in ["plan", "off"] {
        assert_eq!(train(Job::new(), mode), on, "{mode}");
    }
    for fill in ["0x00", "0xff", "0x7f"] {
        let mut job = Job::new();
        job.set_env("XLAUNCH_POOL_DEBUG", fill);
        assert_eq!(train(job, "on"), on, "new buffers filled with {fill}");
    }
}

fn metrics_show_pool_counters_and_pool_off_allocates_every_step() {
    let driver_calls = |mode: &str| {
        let job = Job::new();
        job.run_ok(&["--set", &format!("engine.pool=\"{mode}\"")]);
        let calls = |line: &serde_json::Value| line["pool/driver_allocations"].as_u64();
        let metrics = job.metrics();
        let first = metrics.first().unwrap_or(&serde_json::Value::Null);
        for key in ["pool/live_bytes", "pool/mapped_bytes", "pool/peak_bytes"] {
            assert!(first[key].as_u64().is_some_and(|bytes| bytes > 0), "{key} in {first}");
        }
        assert!(first["pool/fragmentation"].is_f64(), "{first}");
        metrics.iter().filter_map(calls).collect::<Vec<_>>()
    };
    let (on, off) = (driver_calls("on"), driver_calls("off"));
    assert_eq!((on.len(), on[7]), (8, on[2]), "no driver call after the first steps");
    assert!(off[7] > off[6] + 20, "{off:?}");
}

fn memory_limit_error_names_largest_holders_and_writes_snapshot() {
    let job = Job::new();
    let run = job.run(&["--set", "engine.memory_limit_mb=2", "--set", "train.batch=64"]);
    assert_eq!(run.code, 76, "{}", run.stderr);
    for words in
        ["out of memory:", "cannot allocate", "largest holders", "limit 2.0 MiB", "help: raise the limit"]
    {
        assert!(run.stderr.contains(words), "{words} in {}", run.stderr);
    }
    let files = std::fs::read_dir(job.run_dir()).into_iter().flatten().flatten();
    let snapshots = files.filter(|file| file.path().extension().is_some_and(|end| end == "pickle"));
    assert_eq!(snapshots.count(), 1, "one snapshot in the run directory");
}

fn invalid_fill_byte_is_named() {
    let mut job = Job::new();
    job.set_env("XLAUNCH_POOL_DEBUG", "always");
    let run = job.run(&[]);
    assert_ne!(run.code, 0);
    for words in ["XLAUNCH_POOL_DEBUG", "always", "0xff"] {
        assert!(run.stderr.contains(words), "{words} in {}", run.stderr);
    }
}

fn trace_of_first_step_is_a_valid_log_of_allocations() {
    let mut job = Job::new();
    let dir = job.path().join("trace");
    job.set_env("XLAUNCH_POOL_TRACE", &dir.display().to_string());
    job.run_ok(&["--nproc", "2"]);
    for rank in 0..2 {
        for kind in ["pickle", "json", "csv"] {
            let path = dir.join(format!("pool-rank{rank}.{kind}"));
            assert!(path.metadata().is_ok_and(|file| file.len() > 1000), "{}", path.display());
        }
    }
    // RAPIDS' replay format; xlaunch-pool has a test that such a log can be replayed.
    let trace = std::fs::read_to_string(dir.join("pool-rank1.csv")).unwrap();
    let mut lines = trace.lines();
    assert_eq!(lines.next(), Some("Thread,Time,Action,Pointer,Size,Stream"));
    let mut live = HashSet::new();
    for line in lines {
        let fields: Vec<&str> = line.split(',').collect();
        let [_, _, action, pointer, bytes, _] = fields[..] else { panic!("six fields in {line}") };
        assert!(bytes.parse::<u64>().is_ok(), "{line}");
        match action {
            "allocate" => assert!(live.insert(pointer), "{line}: the address is live"),
            "free" => assert!(live.remove(pointer), "{line}: the address is not live"),
            _ => panic!("{line}"),
        }
    }
    assert!(!live.is_empty(), "parameters are live after the first step");
}
