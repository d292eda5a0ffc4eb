//! Tests the cleanup of processes with real ones.
//!
//! Parenthood, reaping and death concern whole processes, so each scene runs in a process of its own: this test
//! program, started again with the name of the scene in [`SCENE`]. It panics if a check fails. Processes of a scene
//! inherit the variable unless they clear their environment, so the test can find the ones that remain.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::process_tree::ProcessTree;
use super::reaper::{self, Reaper};
use super::*;
use crate::process::Process;

/// Variable with the name of the scene and its directory.
const SCENE: &str = "XLAUNCH_TEST_SCENE";
/// Longer than any operation takes unless it hangs.
const DEADLINE: Duration = Duration::from_secs(120);

fn wait_for<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(start.elapsed() < DEADLINE, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn alive(pid: u32) -> bool {
    Process::read(pid).is_some_and(|process| !process.ended())
}

/// Waits for a file that contains a process id.
fn pid_in(path: &Path) -> u32 {
    wait_for(&path.display().to_string(), || std::fs::read_to_string(path).ok()?.trim().parse().ok())
}

/// Makes the command run an ignored test of this program.
fn part(command: &mut Command, test: &str) {
    command
        .args(["--ignored", "--exact", "--nocapture", "--test-threads=1"])
        .arg(format!("spawn::tests::{test}"));
}

fn scene(name: &str, dir: &Path) -> Child {
    let mut command = Command::new("/proc/self/exe");
    part(&mut command, "plays_a_scene");
    let command = command.env(SCENE, format!("{name}:{}", dir.display()));
    command.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0).spawn().unwrap()
}

/// Runs a scene to its end.
fn play(name: &str) {
    let dir = tempfile::tempdir().unwrap();
    let mut child = scene(name, dir.path());
    let status = wait_for(name, || child.try_wait().unwrap());
    assert!(status.success(), "{name}: {status}");
}

#[test]
#[ignore = "started by other tests"]
fn plays_a_scene() {
    let Ok(scene) = std::env::var(SCENE) else { return };
    let (name, dir) = scene.split_once(':').unwrap();
    let dir = Path::new(dir);
    let (name, cgroup) = name.split_once('+').map_or((name, false), |(name, _)| (name, true));
    adopt_orphans().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        match name {
            "hidden" => hidden(Stage::new(cgroup), dir).await,
            "breeder" => breeder(Stage::new(cgroup), dir).await,
            "stopped" => stopped(Stage::new(cgroup)).await,
            "zombies" => zombies(Stage::new(cgroup)).await,
            "codes" => codes(Stage::new(false)).await,
            "bound" => bound(&Stage::new(false), dir).await,
            "ignored" => ignored(&Stage::new(false), dir).await,
            "guarded" => guarded(cgroup, dir, BARE).await,
            "hurried" => guarded(cgroup, dir, "").await,
            _ => panic!("no scene {name}"),
        }
    });
}

#[test]
#[ignore = "started by other tests"]
fn plays_the_reaper() {
    // Returns at once if its input is closed, as when ignored tests are run.
    reaper::main();
}

struct Stage {
    spawner: Spawner,
    tree: ProcessTree,
}

impl Stage {
    fn new(cgroup: bool) -> Self {
        let tree =
            if cgroup { ProcessTree::create("a/test", 0, 2) } else { ProcessTree::without_cgroup("a/test") };
        Self { spawner: Spawner::start().unwrap(), tree }
    }

    async fn spawn(&mut self, script: &str, dir: &Path) -> Spawned {
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(dir);
        self.tree.prepare(0, &mut command);
        let spawned = self.spawner.spawn(command, Options::default()).await.unwrap();
        self.tree.add(spawned.worker.pid);
        spawned
    }
}

/// Runs a scene with and without cgroups (twice without, on a host that has none).
fn both(name: &str) {
    play(name);
    play(&format!("{name}+cgroup"));
}

#[test]
fn processes_in_other_sessions_are_killed_and_cgroups_removed() {
    both("hidden");
}

async fn hidden(mut stage: Stage, dir: &Path) {
    // Children that leave their parents, sessions and environments, in all combinations, and ignore signals.
    let script = "trap '' TERM HUP INT
        deaf='trap \"\" TERM HUP INT; echo $$ > $0; while :; do sleep 1000; done'
        (setsid sh -c \"$deaf\" one &)
        (env -i setsid sh -c \"$deaf\" two &)
        (env -i sh -c \"$deaf\" three &)
        sh -c \"$deaf\" four &
        while :; do sleep 1000; done";
    let spawned = stage.spawn(script, dir).await;
    let hidden = ["one", "two", "three", "four"].map(|name| pid_in(&dir.join(name)));
    let left: Vec<u32> = stage.tree.survivors().into_iter().map(|survivor| survivor.pid).collect();
    assert!(hidden.iter().all(|pid| left.contains(pid)) && left.contains(&spawned.worker.pid), "{left:?}");
    stage.tree.signal(Signal::TERM, &[]);
    assert!(hidden.iter().all(|pid| alive(*pid)));
    assert_eq!(stage.tree.oom_kills(0).rank, 0);
    assert_eq!(stage.tree.kill_and_wait(DEADLINE).await, []);
    assert!(!hidden.iter().chain([&spawned.worker.pid]).any(|pid| alive(*pid)));
    let cgroup = stage.tree.cgroup().map(Path::to_path_buf);
    assert_eq!(cgroup.is_some(), stage.tree.has_cgroup());
    assert!(cgroup.iter().all(|path| path.join("1").exists()));
    drop(stage);
    assert!(!cgroup.is_some_and(|path| path.exists()));
}

#[test]
fn processes_that_keep_forking_are_killed() {
    both("breeder");
}

async fn breeder(mut stage: Stage, dir: &Path) {
    let script = "touch ready; while :; do (setsid sh -c 'setsid sleep 1000 & sleep 1000' &); done";
    for _ in 0..5 {
        let spawned = stage.spawn(script, dir).await;
        wait_for("a crowd", || (stage.tree.survivors().len() > 20).then_some(()));
        assert_eq!(stage.tree.kill_and_wait(DEADLINE).await, []);
        assert!(!alive(spawned.worker.pid));
        let left: Vec<Process> = marked(&dir.display().to_string());
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn suspended_workers_resume_and_stopped_ones_can_be_terminated() {
    both("stopped");
}

async fn stopped(mut stage: Stage) {
    let spawned = stage.spawn("exec sleep 1000", Path::new("/")).await;
    let own = std::process::id();
    let name = || Process::read(spawned.worker.pid).map(|process| process.name);
    wait_for("the program", || (name()? == "sleep").then_some(()));
    let state = || Process::read(spawned.worker.pid).map(|process| process.state);
    // The scene itself is stopped with its worker, and continued from outside.
    let script = format!(
        "while [ \"$(cut -d' ' -f3 /proc/{own}/stat)\" != T ]; do sleep 0.01; done; kill -CONT {own}"
    );
    let mut outside = Command::new("sh").args(["-c", &script]).spawn().unwrap();
    stage.tree.suspend(Signal::STOP);
    outside.wait().unwrap();
    wait_for("the worker's stop", || (state() == Some('T')).then_some(()));
    stage.tree.resume();
    wait_for("the worker's continuation", || (state() != Some('T')).then_some(()));
    stage.tree.signal(Signal::STOP, &[]);
    wait_for("the worker's stop", || (state() == Some('T')).then_some(()));
    stage.tree.signal(Signal::TERM, &[]);
    assert_eq!(Worker::exit(spawned.worker.watch()).await, Exit::Signal(15));
}

#[test]
fn orphans_that_exit_are_reaped() {
    both("zombies");
}

async fn zombies(mut stage: Stage) {
    let spawned = stage.spawn("(setsid sh -c 'exit 3' &); sleep 1000", Path::new("/")).await;
    let own = std::process::id();
    let zombies = || {
        let all = Process::all().into_iter().filter(|process| process.parent == own && process.ended());
        all.map(|process| process.pid).collect::<Vec<_>>()
    };
    let zombie = wait_for("a zombie", || zombies().first().copied());
    wait_for("its end", || {
        reap_orphans();
        (!zombies().contains(&zombie)).then_some(())
    });
    assert!(alive(spawned.worker.pid));
}

#[test]
fn reaping_orphans_does_not_steal_exits_of_workers() {
    play("codes");
}

async fn codes(stage: Stage) {
    std::thread::spawn(|| {
        loop {
            reap_orphans();
            // Without the pause this thread would hold the lock nearly all the time.
            std::thread::sleep(Duration::from_micros(200));
        }
    });
    for code in 0..60 {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("(setsid true &); exit {code}")]);
        let spawned = stage.spawner.spawn(command, Options::default()).await.unwrap();
        assert_eq!(Worker::exit(spawned.worker.watch()).await, Exit::Code(code));
        let missing = stage.spawner.spawn(Command::new("/no/such/program"), Options::default()).await;
        assert_eq!(missing.unwrap_err().kind(), std::io::ErrorKind::NotFound);
    }
}

#[test]
fn workers_are_bound_to_cpus_with_empty_stdin() {
    play("bound");
}

async fn bound(stage: &Stage, dir: &Path) {
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let last = (0..CpuSet::MAX_CPU).rfind(|cpu| allowed.is_set(*cpu)).unwrap();
    let mut cpus = CpuSet::new();
    cpus.set(last);
    let mut command = Command::new("sh");
    command.args(["-c", "cat; grep Cpus_allowed_list /proc/self/status > cpus"]).current_dir(dir);
    let options = Options { cpus: Some(cpus), ..Options::default() };
    let spawned = stage.spawner.spawn(command, options).await.unwrap();
    assert_eq!(Worker::exit(spawned.worker.watch()).await, Exit::Code(0));
    let text = std::fs::read_to_string(dir.join("cpus")).unwrap();
    assert_eq!(text.split_whitespace().last(), Some(last.to_string().as_str()));
}

#[test]
fn only_workers_that_leave_signals_to_the_agent_ignore_them() {
    play("ignored");
}

async fn ignored(stage: &Stage, dir: &Path) {
    for leave_signals_to_agent in [false, true] {
        let mut command = Command::new("sh");
        command.args(["-c", "grep SigIgn /proc/self/status > ignored"]).current_dir(dir);
        let options = Options { leave_signals_to_agent, ..Options::default() };
        let spawned = stage.spawner.spawn(command, options).await.unwrap();
        assert_eq!(Worker::exit(spawned.worker.watch()).await, Exit::Code(0));
        let text = std::fs::read_to_string(dir.join("ignored")).unwrap();
        let mask = u64::from_str_radix(text.split_whitespace().last().unwrap(), 16).unwrap();
        // If the tests run in the background of a shell, they inherit other ignored signals.
        let ignores = |signal: Signal| mask >> (signal.as_raw() - 1) & 1 == 1;
        assert_eq!(ignores(Signal::USR2), leave_signals_to_agent, "{text}");
        for signal in [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM, Signal::USR1] {
            assert!(ignores(signal) || !leave_signals_to_agent, "{text}");
        }
    }
}

/// Processes of a scene, except reapers.
fn marked(dir: &str) -> Vec<Process> {
    let of_scene = |process: &Process| {
        let text = std::fs::read(format!("/proc/{}/environ", process.pid)).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        text.split('\0').any(|it| it.starts_with(SCENE) && it.ends_with(dir))
    };
    let own = std::process::id();
    Process::all().into_iter().filter(|it| it.pid != own && !it.ended() && of_scene(it)).collect()
}

/// Kills a scene with SIGKILL, and waits until nothing of it remains.
fn kill_scene(child: &mut Child, dir: &Path) {
    kill_process(Pid::from_child(child), Signal::KILL).unwrap();
    child.wait().unwrap();
    let text = dir.display().to_string();
    wait_for("the processes' end", || marked(&text).is_empty().then_some(()));
    wait_for("the directory's end", || (!dir.join("private").exists()).then_some(()));
    let cgroup = |prefix: PathBuf| {
        let name = prefix.file_name().unwrap().to_str().unwrap().to_string();
        prefix.with_file_name(name.replace(&std::process::id().to_string(), &child.id().to_string()))
    };
    if let Some(prefix) = cgroup::path_prefix("a/test").map(cgroup) {
        wait_for("the cgroup's end", || cgroup::with_prefix(&prefix).is_empty().then_some(()));
    }
}

#[test]
fn killed_launcher_leaves_no_process_and_no_directory() {
    for name in ["guarded", "guarded+cgroup"] {
        let dir = tempfile::tempdir().unwrap();
        let mut child = scene(name, dir.path());
        let started = ["one", "two", "three"].map(|name| pid_in(&dir.path().join(name)));
        wait_for("the last record", || dir.path().join("watched").exists().then_some(()));
        assert!(dir.path().join("private/socket").exists() && started.iter().all(|pid| alive(*pid)));
        kill_scene(&mut child, dir.path());
        // One process has cleared the environment by which `marked` finds the others.
        wait_for("the end of all", || (!started.iter().any(|pid| alive(*pid))).then_some(()));
    }
}

/// Shell script that starts a process without an environment, which the reaper finds only by its process group.
const BARE: &str = "(env -i sh -c 'trap \"\" TERM; echo $$ > two; sleep 1000' &)";

async fn guarded(cgroup: bool, dir: &Path, more: &str) {
    let private = dir.join("private");
    let mut program = Command::new("/proc/self/exe");
    part(&mut program, "plays_the_reaper");
    let mut reaper = Reaper::start_as(program, "a/test", std::slice::from_ref(&private)).unwrap();
    std::fs::create_dir(&private).unwrap();
    std::fs::write(private.join("socket"), "").unwrap();
    let mut stage = Stage::new(cgroup);
    let script = format!(
        "(setsid sh -c 'echo $$ > one; sleep 1000' &)
        {more}
        sh -c 'echo $$ > three; sleep 1000'"
    );
    let spawned = stage.spawn(&script, dir).await;
    reaper.watch([&stage.tree].into_iter());
    std::fs::write(dir.join("watched"), "").unwrap();
    Worker::exit(spawned.worker.watch()).await;
}

#[test]
fn two_hundred_launchers_killed_at_random_times_leave_nothing() {
    let root = tempfile::tempdir().unwrap();
    // A fixed sequence that looks random.
    let mut random = 12345_u64;
    for round in 0..200 {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let dir = root.path().join(round.to_string());
        std::fs::create_dir(&dir).unwrap();
        let mut child = scene(if round % 2 == 0 { "hurried" } else { "hurried+cgroup" }, &dir);
        std::thread::sleep(Duration::from_micros((random >> 33) % 40_000));
        kill_scene(&mut child, &dir);
    }
}

#[test]
fn dropped_reaper_exits_and_removes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut program = Command::new("/proc/self/exe");
    part(&mut program, "plays_the_reaper");
    let reaper = Reaper::start_as(program, "a/test", &[dir.path().to_path_buf()]).unwrap();
    let pid = reaper.pid();
    assert!(alive(pid));
    drop(reaper);
    assert!(!alive(pid) && dir.path().exists());
}

#[test]
fn pidfd_of_an_adopted_worker_needs_no_newer_kernel_than_others() {
    let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
    let worker = Worker::adopted(child.id()).unwrap();
    let flags = rustix::fs::fcntl_getfl(&*worker.watch()).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK), "{flags:?}");
}
