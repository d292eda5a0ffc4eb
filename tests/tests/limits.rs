//! What a worker may do to its host, and what the launcher makes of it: memory that runs out, output without end.

use std::fs;
use std::path::{Path, PathBuf};

use xlaunch_tests::{Launch, wait_for, xlaunch};

/// A cgroup whose processes get 96 MiB of memory, all of them together.
struct Small(PathBuf);

impl Small {
    /// `None` where this user may not make one.
    fn new() -> Option<Self> {
        let text = fs::read_to_string("/proc/self/cgroup").ok()?;
        let of = |controllers: &str| {
            let mut parts = text.lines().map(|line| line.splitn(3, ':').skip(1).collect::<Vec<_>>());
            parts
                .find(|parts| parts[0] == controllers)
                .map(|parts| parts[1].trim_start_matches('/').to_owned())
        };
        let name = format!("xlaunch-test-{}", std::process::id());
        // Version 1 has one below any other; version 2 only where the parent has turned the controller on.
        let one =
            of("memory").map(|own| (Path::new("/sys/fs/cgroup/memory").join(own), "memory.limit_in_bytes"));
        let two = of("").and_then(|own| {
            let parent = Path::new("/sys/fs/cgroup").join(own).parent()?.to_path_buf();
            let on = fs::read_to_string(parent.join("cgroup.subtree_control")).ok()?;
            on.contains("memory").then_some((parent, "memory.max"))
        });
        let (parent, limit) = one.or(two)?;
        let small = Self(parent.join(name));
        fs::create_dir(&small.0).ok()?;
        fs::write(small.0.join(limit), (96 << 20).to_string()).ok()?;
        // Not every system has swap, or this setting.
        let _ = fs::write(small.0.join("memory.swap.max"), "0");
        Some(small)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        wait_for("an empty cgroup", || (!self.0.exists() || fs::remove_dir(&self.0).is_ok()).then_some(()));
    }
}

#[test]
fn a_worker_that_the_kernel_kills_for_lack_of_memory_is_said_to_be() {
    let Some(small) = Small::new() else {
        eprintln!("skipped: this user may not limit memory by cgroups here");
        return;
    };
    let enter = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", small.0.display());
    let worker = "[ $RANK = 1 ] || exec sleep 1000; exec tail /dev/zero";
    let launcher = xlaunch().to_str().unwrap();
    let run = Launch::of("sh".as_ref())
        .run(&["-c", &enter, "sh", launcher, "--nproc", "2", "--", "sh", "-c", worker]);
    assert_eq!(run.code, 1, "{}", run.stderr);
    let report = run.stderr.split("the job failed").nth(1).unwrap_or_default();
    assert!(report.contains("rank 1") && report.contains("SIGKILL"), "{}", run.stderr);
    assert!(report.contains("cause: killed by the kernel's OOM killer"), "{}", run.stderr);
}

#[test]
fn a_rank_that_writes_without_end_delays_no_other_and_fills_no_memory() {
    // One line of a GiB, as fast as it can be made.
    let flood = "head -c 1073741824 /dev/zero | tr '\\0' z; echo flood over >&2; while [ ! -e go ]; do sleep 0.05; done";
    let ticks = "while [ ! -e go ]; do echo tick >&2; sleep 0.02; done";
    let launch = Launch::of("sh".as_ref());
    let script = format!("if [ $RANK = 0 ]; then {flood}; else {ticks}; fi");
    let launcher = xlaunch().to_str().unwrap();
    let words = ["-c", "exec \"$@\" > /dev/null", "sh", launcher, "--nproc", "2", "--", "sh", "-c", &script];
    let run = launch.start(&words);
    run.wait_for_stderr("flood over");
    let before = run.stderr().split("flood over").next().unwrap_or_default().matches("tick").count();
    let status = fs::read_to_string(format!("/proc/{}/status", run.pid())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    let peak: u64 = peak.unwrap().trim().parse().unwrap();
    launch.write("go", "");
    assert_eq!(run.finish().code, 0);
    assert!(before >= 5, "{before} lines of the other rank came during the flood");
    assert!(peak < 64 << 10, "{peak} KiB of memory");
}
