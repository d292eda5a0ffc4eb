//! Workers that exhaust resources of the host: memory, and endless output.

use xlaunch_tests::{Launch, MemoryCgroup, requirements, xlaunch_path};

xlaunch_harness::tests! {
    endless_output_of_one_rank_neither_delays_others_nor_fills_memory;
    needs requirements::memory_cgroup:
    oom_kill_is_reported_as_cause;
}

fn oom_kill_is_reported_as_cause() {
    let cgroup = MemoryCgroup::new("xlaunch-test-oom", 96 << 20).unwrap();
    let enter = format!("echo $$ > {} && exec \"$@\"", cgroup.procs_file().display());
    let worker = "[ $RANK = 1 ] || exec sleep 1000; exec tail /dev/zero";
    let xlaunch = xlaunch_path().to_str().unwrap();
    let launch = Launch::with_program("sh");
    let run = launch.run(&["-c", &enter, "sh", xlaunch, "--nproc", "2", "--", "sh", "-c", worker]);
    assert_eq!(run.code, 1, "{}", run.stderr);
    for words in ["rank 1", "SIGKILL", "cause:", "memory"] {
        assert!(run.root_cause().contains(words), "{words} in {}", run.stderr);
    }
}

fn endless_output_of_one_rank_neither_delays_others_nor_fills_memory() {
    // One line of 1 GiB, as fast as possible.
    let flood = "head -c 1073741824 /dev/zero | tr '\\0' z; echo flood over >&2; \
                 while [ ! -e go ]; do sleep 0.05; done";
    let ticks = "while [ ! -e go ]; do echo tick >&2; sleep 0.02; done";
    let launch = Launch::with_program("sh");
    let script = format!("if [ $RANK = 0 ]; then {flood}; else {ticks}; fi");
    let xlaunch = xlaunch_path().to_str().unwrap();
    let words = ["-c", "exec \"$@\" > /dev/null", "sh", xlaunch, "--nproc", "2", "--", "sh", "-c", &script];
    let run = launch.spawn(&words);
    run.wait_for_stderr("flood over");
    let ticks = run.stderr().split("flood over").next().unwrap_or_default().matches("tick").count();
    let status = std::fs::read_to_string(format!("/proc/{}/status", run.pid())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    let peak_kib: u64 = peak.unwrap().trim().parse().unwrap();
    launch.write("go", "");
    assert_eq!(run.wait().code, 0);
    assert!(ticks >= 5, "{ticks} lines of the other rank arrived during the flood");
    assert!(peak_kib < 64 << 10, "peak memory of the launcher: {peak_kib} KiB");
}
