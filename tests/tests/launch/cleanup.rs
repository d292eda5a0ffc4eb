//! A launch leaves no process, file or cgroup behind, regardless of what its workers start and how it ends.

use std::time::Duration;

use rustix::process::Signal;
use xlaunch_tests::{
    Launch, children, is_alive, process_name, reaper, requirements, send_signal, sorted_lines, wait_for,
    xlaunch_path,
};

xlaunch_harness::tests! {
    daemonized_processes_of_workers_are_killed,
    killed_launcher_leaves_no_process_file_or_cgroup,
    hundreds_of_launches_leave_no_file_or_cgroup,
    launcher_killed_at_any_moment_leaves_nothing;
    needs requirements::python3:
    shared_memory_of_workers_is_removed_by_their_resource_trackers;
    needs requirements::pid_namespace:
    runs_in_pid_namespace_without_own_session;
}

/// Starts an orphan that ignores SIGTERM in its own session, and writes its process id to a file.
const START_DAEMONIZED: &str =
    "setsid sh -c 'trap \"\" TERM; (echo $$ > pid.$RANK; exec sleep 1000) & wait' >/dev/null 2>&1 & ";

fn daemonized(launch: &Launch, ranks: u32) -> Vec<u32> {
    wait_for("daemonized processes", || {
        let pids = (0..ranks).map(|rank| launch.read(&format!("pid.{rank}")).trim().parse().ok());
        pids.collect::<Option<Vec<u32>>>()
    })
}

/// Files in the runtime directory.
fn runtime_files(launch: &Launch) -> Vec<String> {
    let mut found = Vec::new();
    let mut dirs = vec![launch.runtime_dir()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                dirs.push(entry.path())
            } else {
                found.push(entry.path().display().to_string())
            }
        }
    }
    found
}

/// Returns the cgroups of launches with this run id.
fn cgroups(run_id: &str) -> Vec<String> {
    let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
    let names = roots.iter().flat_map(|root| std::fs::read_dir(root).into_iter().flatten().flatten());
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(&format!("xlaunch-{run_id}."))).collect()
}

/// Returns a run id that launches of other tests do not have.
fn unique_run_id(test: &str) -> String {
    format!("{test}_{}", std::process::id())
}

fn wait_until_clean(launch: &Launch, run_id: &str) {
    wait_for("an empty runtime directory", || runtime_files(launch).is_empty().then_some(()));
    wait_for("the removal of all cgroups", || cgroups(run_id).is_empty().then_some(()));
}

fn daemonized_processes_of_workers_are_killed() {
    for (code, announced) in [(0, 1), (9, 0)] {
        let launch = Launch::new();
        let run = launch.run_shell(&[], 2, &format!("{START_DAEMONIZED} sleep 0.5; exit {code}"));
        let pids = daemonized(&launch, 2);
        assert!(!pids.iter().any(|pid| is_alive(*pid)), "{code}: {}", run.stderr);
        // The shells that wait for them run, too.
        let line = "xlaunch: ended 4 processes that the workers had left running: ";
        let lines: Vec<&str> = run.stderr.lines().filter(|it| it.starts_with(line)).collect();
        assert_eq!(lines.len(), announced, "{}", run.stderr);
        let named = |pid: &u32| lines.iter().all(|line| line.contains(&format!("sh ({pid})")));
        assert!(pids.iter().all(named), "{pids:?}: {lines:?}");
    }
    let helper = "sleep 0.2 & exit 0";
    let run = Launch::new().run_shell(&[], 2, helper);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""), "a helper ends by itself");
}

/// Leaves many segments, so that the resource tracker needs more time than killing it.
const SHARED_MEMORY: &str = "
import os, sys, time
from multiprocessing import shared_memory
rank = os.environ['RANK']
held = [shared_memory.SharedMemory(create=True, size=1, name=f'{sys.argv[1]}-{rank}-{i}') for i in range(200)]
if sys.argv[2] == 'kill' and rank == '1':
    os.kill(os.getpid(), 9)
if sys.argv[2] == 'wait':
    open(f'ready{rank}', 'w').close()
    time.sleep(1000)
os._exit(0)
";

/// Number of shared memory segments with this name.
fn segments(name: &str) -> usize {
    let files = std::fs::read_dir("/dev/shm").unwrap().flatten();
    files.filter(|file| file.file_name().to_string_lossy().starts_with(name)).count()
}

fn shared_memory_of_workers_is_removed_by_their_resource_trackers() {
    let launch = Launch::new();
    launch.write("shared.py", SHARED_MEMORY);
    let name = |how| format!("xlaunch-test-{}-{how}", std::process::id());
    for (how, code) in [("exit", 0), ("kill", 1)] {
        let run = launch.run(&["--nproc-per-node", "2", "shared.py", &name(how), how]);
        assert_eq!(segments(&name(how)), 0, "{how}");
        assert_eq!(run.code, code, "{}", run.stderr);
        assert!(!run.stderr.contains("left running"), "{}", run.stderr);
    }
    let name = name("wait");
    let run = launch.spawn(&["--nproc-per-node", "2", "shared.py", &name, "wait"]);
    let is_ready = |rank: u32| launch.path().join(format!("ready{rank}")).exists();
    wait_for("shared memory", || (is_ready(0) && is_ready(1)).then_some(()));
    assert_eq!(segments(&name), 400);
    run.signal(Signal::KILL);
    wait_for("the end of shared memory", || (segments(&name) == 0).then_some(()));
}

fn killed_launcher_leaves_no_process_file_or_cgroup() {
    let (launch, run_id) = (Launch::new(), unique_run_id("killed"));
    let run = launch.spawn_shell(&["--rdzv-id", &run_id], 2, &format!("{START_DAEMONIZED} exec sleep 1000"));
    let pids = daemonized(&launch, 2);
    let workers = wait_for("two workers", || {
        let workers = children(run.pid()).into_iter().filter(|pid| process_name(*pid) == "sleep");
        Some(workers.collect::<Vec<u32>>()).filter(|workers| workers.len() == 2)
    });
    // A guard process that is killed is replaced.
    let guard = wait_for("the guard process", || reaper(run.pid()));
    send_signal(guard, Signal::KILL);
    wait_for("another guard process", || reaper(run.pid()).filter(|other| *other != guard));
    // The launcher has written to the new one by the time of its answer.
    assert_eq!(launch.run(&["status"]).code, 0);
    run.signal(Signal::KILL);
    wait_for("all processes to be killed", || {
        (!pids.iter().chain(&workers).any(|pid| is_alive(*pid))).then_some(())
    });
    wait_until_clean(&launch, &run_id);
}

fn runs_in_pid_namespace_without_own_session() {
    // As with `docker exec`: session and process group began outside the namespace, so inside they have no number.
    let namespace = ["--user", "--map-root-user", "--pid", "--fork", "--mount-proc"];
    let unshare = Launch::with_program("unshare");
    let worker = "(setsid sleep 1000 &); (env -i setsid sleep 1000 &); echo rank $RANK; exit $RANK";
    let launch = format!("\"$0\" --propagate-exit-code --nproc 2 -- sh -c '{worker}'");
    let count = "echo left $(cat /proc/[0-9]*/comm | grep -c sleep)";
    // Once as the namespace's init process, and once not.
    for script in [format!("exec {launch}"), format!("{launch}; code=$?; {count}; exit $code")] {
        let program = xlaunch_path().to_str().unwrap();
        let run = unshare.run(&[namespace.as_slice(), &["sh", "-c", &script, program]].concat());
        assert_eq!(run.code, 1, "{}", run.stderr);
        assert!(run.stderr.contains("rank 1") && run.reports_exit_code(1), "{}", run.stderr);
        let lines = sorted_lines(&run.stdout);
        assert!(lines.iter().all(|line| ["left 0", "rank 0", "rank 1"].contains(line)), "{lines:?}");
        assert!(lines.contains(&"rank 1"), "{lines:?}");
        assert!(script.starts_with("exec") || lines.contains(&"left 0"), "{lines:?}");
    }
}

fn hundreds_of_launches_leave_no_file_or_cgroup() {
    let (launch, run_id) = (Launch::new(), unique_run_id("hundreds"));
    for _ in 0..300 {
        let run = launch.run(&["--nproc", "2", "--rdzv-id", &run_id, "--", "true"]);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    }
    assert_eq!(runtime_files(&launch), Vec::<String>::new());
    wait_for("the removal of all cgroups", || cgroups(&run_id).is_empty().then_some(()));
}

fn launcher_killed_at_any_moment_leaves_nothing() {
    let (launch, run_id) = (Launch::new(), unique_run_id("kills"));
    for round in 0..128_u64 {
        let run =
            launch.spawn_shell(&["--rdzv-id", &run_id], 2, &format!("{START_DAEMONIZED} exec sleep 1000"));
        // Spread over slightly more than the time that a launch takes to start.
        std::thread::sleep(Duration::from_micros(round * 317 % 40_000));
        run.signal(Signal::KILL);
        run.wait();
    }
    wait_for("all processes to be killed", || (processes_of(&launch) == 0).then_some(()));
    wait_until_clean(&launch, &run_id);
}

/// Returns the number of processes that have this launch's runtime directory in their environment.
fn processes_of(launch: &Launch) -> usize {
    let variable = format!("XDG_RUNTIME_DIR={}", launch.runtime_dir().display());
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let marked = all.filter(|entry| {
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes())
    });
    marked.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(|pid| is_alive(*pid)).count()
}
