//! Workers that exhaust resources of the host: memory, and endless output.

use serde_json::Value;
use xlaunch_tests::{Launch, LimitedCgroup, requirements, wait_for, xlaunch_path};

xlaunch_harness::tests! {
    endless_output_of_one_rank_neither_delays_others_nor_fills_memory,
    output_beyond_the_limit_on_file_sizes_is_reported_as_lost,
    launch_does_not_depend_on_the_limit_on_stacks;
    needs requirements::memory_cgroup:
    oom_kill_is_reported_as_cause;
    needs requirements::mount_namespace:
    bytes_lost_on_a_full_disk_are_counted_wherever_users_look;
}

fn oom_kill_is_reported_as_cause() {
    let cgroup = LimitedCgroup::with_memory("xlaunch-test-oom", 96 << 20).unwrap();
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

/// The logs are on a disk of 1 MiB that only the launch sees.
fn bytes_lost_on_a_full_disk_are_counted_wherever_users_look() {
    const OUTPUT_BYTES: u64 = 3_000_000;
    let launch = Launch::with_program("unshare");
    std::fs::create_dir(launch.path().join("disk")).unwrap();
    let enter = "mount -t tmpfs -o size=1m none disk && \"$@\" && tail -n 1 disk/*/attempt_0/1/stdout.log";
    let worker =
        format!("[ $RANK = 0 ] || head -c {OUTPUT_BYTES} /dev/zero; while [ ! -e go ]; do sleep 0.05; done");
    let xlaunch = xlaunch_path().to_str().unwrap();
    let words = ["--mount", "sh", "-c", enter, "sh", xlaunch, "--nproc", "2", "-r", "3", "--log-dir", "disk"];
    let run = launch.spawn(&[&words[..], &["--", "sh", "-c", &worker]].concat());
    let query = |args: &[&str]| launch.run(&[&["--mount", xlaunch], args].concat());
    let root = format!("/proc/{}/root", run.pid());
    let lost = wait_for("all output to be written or lost", || {
        let status: Value = serde_json::from_str(&query(&["status", "--json"]).stdout).ok()?;
        let log = format!("{root}{}/attempt_0/1/stdout.log", status["log_dir"].as_str()?);
        let kept = std::fs::metadata(log).ok()?.len();
        let lost = status["ranks"][1]["log_losses"][0]["lost_bytes"].as_u64()?;
        (kept + lost == OUTPUT_BYTES).then_some(lost)
    });
    let status = query(&["status"]).stdout;
    let noted = format!("{lost} bytes of stdout.log lost: No space left on device");
    assert!(status.contains(&noted) && status.matches(" lost: ").count() == 1, "{status}");
    let logs = query(&["logs", "--rank", "1"]);
    let noted = format!("{lost} bytes of this log were lost: No space left on device");
    assert!(logs.stderr.contains(&noted), "{}", logs.stderr);
    assert_eq!(logs.stdout.len() as u64, OUTPUT_BYTES - lost);
    launch.write("go", "");
    let run = run.wait();
    assert_eq!(run.code, 0, "{}", run.stderr);
    // At the end, a mark in the file takes the place of further bytes.
    let mark = run.stdout.strip_prefix("[xlaunch: ").and_then(|rest| rest.split_once(' '));
    let (number, _) = mark.unwrap_or_else(|| panic!("{}", run.stdout));
    let at_end: u64 = number.parse().unwrap();
    assert!((lost + 1..lost + 100).contains(&at_end), "{at_end} of {lost}");
    let noted = format!("xlaunch: rank 1: {at_end} bytes are missing in {}/disk/", launch.path().display());
    assert!(run.stderr.contains(&noted) && run.stderr.matches("are missing").count() == 1, "{}", run.stderr);
}

fn output_beyond_the_limit_on_file_sizes_is_reported_as_lost() {
    let xlaunch = xlaunch_path().display();
    let launch = Launch::with_program("bash");
    let worker = "head -c 100000 /dev/zero; echo end >&2";
    let line = format!("ulimit -f 4; {xlaunch} -r 1 --log-dir logs -- sh -c '{worker}'");
    let run = launch.run(&["-c", &line]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    for words in ["end\n", "bytes are missing in ", "File too large"] {
        assert!(run.stderr.contains(words), "{words} in {}", run.stderr);
    }
    // The limit itself and its default action are those of the user's shell.
    let line = format!("ulimit -f 4; {xlaunch} -- sh -c 'head -c 100000 /dev/zero > file'");
    let run = launch.run(&["-c", &line]);
    assert!(run.code == 1 && run.root_cause().contains("SIGXFSZ"), "{}", run.stderr);
}

fn launch_does_not_depend_on_the_limit_on_stacks() {
    let launch = Launch::with_program("sh");
    let line = format!("ulimit -s 64; {} -- sh -c 'echo $(ulimit -s)'", xlaunch_path().display());
    let run = launch.run(&["-c", &line]);
    assert_eq!((run.code, &*run.stdout), (0, "64\n"), "{}", run.stderr);
}
