//! What is left of processes, with real ones.
//!
//! Being a parent, a reaper or a victim is a matter of a whole process. So each scene runs in one of its own: this test
//! program again, told by [`SCENE`] to play one part, which panics if something is wrong. What a scene starts carries the
//! variable too, unless it drops its environment, so that the stage can look for what is left.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::guard::{self, Guard};
use super::scope::Scope;
use super::*;
use crate::process::Process;

/// Name of the scene, and a directory of its own.
const SCENE: &str = "XLAUNCH_TEST_SCENE";
/// Longest time that anything may take before it counts as hung.
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

/// Number that a process wrote to a file.
fn pid_in(path: &Path) -> u32 {
    wait_for(&path.display().to_string(), || std::fs::read_to_string(path).ok()?.trim().parse().ok())
}

/// This program in the part of `test`, an ignored one.
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
            "guarded" => guarded(cgroup, dir, BARE).await,
            "hurried" => guarded(cgroup, dir, "").await,
            _ => panic!("no scene {name}"),
        }
    });
}

#[test]
#[ignore = "started by other tests"]
fn plays_the_guard() {
    // Its environment is empty: who runs ignored tests closes its input.
    guard::main();
}

struct Stage {
    spawner: Spawner,
    scope: Scope,
}

impl Stage {
    fn new(cgroup: bool) -> Self {
        let scope = if cgroup { Scope::create("a/test", 0, 2) } else { Scope::without_cgroup("a/test") };
        Self { spawner: Spawner::start().unwrap(), scope }
    }

    async fn spawn(&mut self, script: &str, dir: &Path) -> Spawned {
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(dir);
        self.scope.enter(0, &mut command);
        let spawned = self.spawner.spawn(command, Options::default()).await.unwrap();
        self.scope.started(spawned.worker.pid);
        spawned
    }
}

/// Both ways to find processes; the one by cgroup is the other one where there are none.
fn both(name: &str) {
    play(name);
    play(&format!("{name}+cgroup"));
}

#[test]
fn what_hides_in_other_sessions_is_gone_and_cgroups_are_removed() {
    both("hidden");
}

async fn hidden(mut stage: Stage, dir: &Path) {
    // Children that left their parents, their session and in part their environment, deaf to what asks them to end.
    let script = "trap '' TERM HUP INT
        deaf='trap \"\" TERM HUP INT; echo $$ > $0; while :; do sleep 1000; done'
        (setsid sh -c \"$deaf\" one &)
        (env -i setsid sh -c \"$deaf\" two &)
        (env -i sh -c \"$deaf\" three &)
        sh -c \"$deaf\" four &
        while :; do sleep 1000; done";
    let spawned = stage.spawn(script, dir).await;
    let hidden = ["one", "two", "three", "four"].map(|name| pid_in(&dir.join(name)));
    let left: Vec<u32> = stage.scope.left().into_iter().map(|left| left.pid).collect();
    assert!(hidden.iter().all(|pid| left.contains(pid)) && left.contains(&spawned.worker.pid), "{left:?}");
    stage.scope.signal(Signal::TERM);
    assert!(hidden.iter().all(|pid| alive(*pid)));
    assert_eq!(stage.scope.oom_kills(0).rank, 0);
    assert_eq!(stage.scope.gone(DEADLINE).await, []);
    assert!(!hidden.iter().chain([&spawned.worker.pid]).any(|pid| alive(*pid)));
    let cgroup = stage.scope.cgroup().map(Path::to_path_buf);
    assert_eq!(cgroup.is_some(), stage.scope.has_cgroup());
    assert!(cgroup.iter().all(|path| path.join("1").exists()));
    drop(stage);
    assert!(!cgroup.is_some_and(|path| path.exists()));
}

#[test]
fn what_appears_while_others_are_killed_is_gone_too() {
    both("breeder");
}

async fn breeder(mut stage: Stage, dir: &Path) {
    let script = "touch ready; while :; do (setsid sh -c 'setsid sleep 1000 & sleep 1000' &); done";
    for _ in 0..5 {
        let spawned = stage.spawn(script, dir).await;
        wait_for("a crowd", || (stage.scope.left().len() > 20).then_some(()));
        assert_eq!(stage.scope.gone(DEADLINE).await, []);
        assert!(!alive(spawned.worker.pid));
        let left: Vec<Process> = marked(&dir.display().to_string());
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn stopped_workers_go_on_and_still_hear_that_they_shall_end() {
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
    stage.scope.suspend();
    outside.wait().unwrap();
    wait_for("the worker's stop", || (state() == Some('T')).then_some(()));
    stage.scope.resume();
    wait_for("the worker's continuation", || (state() != Some('T')).then_some(()));
    stage.scope.signal(Signal::STOP);
    wait_for("the worker's stop", || (state() == Some('T')).then_some(()));
    stage.scope.signal(Signal::TERM);
    assert_eq!(Worker::exit(spawned.worker.watch().unwrap()).await, Exit::Signal(15));
}

#[test]
fn orphans_that_end_do_not_stay() {
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
fn exits_of_workers_are_not_lost_to_the_reaping_of_orphans() {
    play("codes");
}

async fn codes(stage: Stage) {
    std::thread::spawn(|| {
        loop {
            reap_orphans();
            // The lock favours who has just had it.
            std::thread::sleep(Duration::from_micros(200));
        }
    });
    for code in 0..60 {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("(setsid true &); exit {code}")]);
        let spawned = stage.spawner.spawn(command, Options::default()).await.unwrap();
        assert_eq!(Worker::exit(spawned.worker.watch().unwrap()).await, Exit::Code(code));
        let missing = stage.spawner.spawn(Command::new("/no/such/program"), Options::default()).await;
        assert_eq!(missing.unwrap_err().kind(), std::io::ErrorKind::NotFound);
    }
}

#[test]
fn workers_are_bound_to_cpus_and_read_nothing() {
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
    assert_eq!(Worker::exit(spawned.worker.watch().unwrap()).await, Exit::Code(0));
    let text = std::fs::read_to_string(dir.join("cpus")).unwrap();
    assert_eq!(text.split_whitespace().last(), Some(last.to_string().as_str()));
}

/// Processes of a scene, other than guards.
fn marked(dir: &str) -> Vec<Process> {
    let of_scene = |process: &Process| {
        let text = std::fs::read(format!("/proc/{}/environ", process.pid)).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        text.split('\0').any(|it| it.starts_with(SCENE) && it.ends_with(dir))
    };
    let own = std::process::id();
    Process::all().into_iter().filter(|it| it.pid != own && !it.ended() && of_scene(it)).collect()
}

/// Ends a scene as nothing can prevent, and waits until nothing of it is left.
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
fn a_killed_launcher_leaves_no_process_and_no_directory() {
    for name in ["guarded", "guarded+cgroup"] {
        let dir = tempfile::tempdir().unwrap();
        let mut child = scene(name, dir.path());
        let started = ["one", "two", "three"].map(|name| pid_in(&dir.path().join(name)));
        wait_for("the last record", || dir.path().join("watched").exists().then_some(()));
        assert!(dir.path().join("private/socket").exists() && started.iter().all(|pid| alive(*pid)));
        kill_scene(&mut child, dir.path());
        // One of them has dropped the environment by which the others are found here.
        wait_for("the end of all", || (!started.iter().any(|pid| alive(*pid))).then_some(()));
    }
}

/// Starts a process that has dropped its environment: the guard finds it by its group, once it knows of the worker.
const BARE: &str = "(env -i sh -c 'trap \"\" TERM; echo $$ > two; sleep 1000' &)";

async fn guarded(cgroup: bool, dir: &Path, more: &str) {
    let private = dir.join("private");
    let mut program = Command::new("/proc/self/exe");
    part(&mut program, "plays_the_guard");
    let guard = Guard::start_as(program, "a/test", std::slice::from_ref(&private)).unwrap();
    std::fs::create_dir(&private).unwrap();
    std::fs::write(private.join("socket"), "").unwrap();
    let mut stage = Stage::new(cgroup);
    let script = format!(
        "(setsid sh -c 'echo $$ > one; sleep 1000' &)
        {more}
        sh -c 'echo $$ > three; sleep 1000'"
    );
    let spawned = stage.spawn(&script, dir).await;
    guard.watch(&stage.scope);
    std::fs::write(dir.join("watched"), "").unwrap();
    Worker::exit(spawned.worker.watch().unwrap()).await;
}

#[test]
fn two_hundred_launchers_killed_at_any_time_leave_nothing() {
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
fn a_guard_that_is_not_needed_ends_and_removes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut program = Command::new("/proc/self/exe");
    part(&mut program, "plays_the_guard");
    let guard = Guard::start_as(program, "a/test", &[dir.path().to_path_buf()]).unwrap();
    let pid = guard.pid();
    assert!(alive(pid));
    drop(guard);
    assert!(!alive(pid) && dir.path().exists());
}
