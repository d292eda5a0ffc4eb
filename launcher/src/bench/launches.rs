//! `xlaunch bench launch`: what launching itself costs, and how fast it reacts, beside torchrun where that is installed.
//!
//! Launchers are child processes, looked at from outside as a user would; the workers are `true` and `sleep`, and for a hang
//! the built-in trainer's. Every process of a measurement carries a mark in its environment, by which what a killed launcher
//! leaves behind is counted, and removed.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use xlaunch_proto::exit::ExitCode;

use xlaunch_agent::Refusal;
use xlaunch_agent::process::Process;
use xlaunch_agent::spawn::{Options, Spawner, Worker};
use xlaunch_agent::status::sample::Sampler;

/// What processes of a measurement have in their environment.
const MARK: &str = "XLAUNCH_BENCH";
/// Longest time that anything may take before it counts as hung.
const HUNG: Duration = Duration::from_secs(120);
/// When what a killed launcher left is counted.
const SECOND: Duration = Duration::from_secs(1);
/// Pause between looks at processes.
const LOOK: Duration = Duration::from_millis(1);
/// How long an idle launch is watched.
const IDLE: Duration = Duration::from_secs(3);
/// Runs of torchrun, which takes seconds for each.
const FEW: usize = 3;
/// A job that trains until it is killed.
const HANG: &str = r#"
[model]
layers = 1
dim = 32
heads = 2
ffn = 32
seq = 32
[data]
train = ["text.txt"]
[train]
steps = 100000000
eval_every = 0
[engine]
device = "cpu"
"#;

/// Milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Spread {
    /// The one in the middle.
    pub(crate) median: f64,
    /// All but one in a hundred are no longer.
    pub p99: f64,
}

/// What one launcher takes.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Launcher {
    /// From the command to its end, with workers that do nothing.
    pub(crate) nothing: Spread,
    /// From a worker's death to the end of the command, and of all other workers.
    pub(crate) group_gone: Spread,
    /// Processes left a second after the launcher was killed, of as many.
    pub(crate) left_of: (usize, usize),
}

/// All that was found.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Found {
    /// Workers of each launch.
    pub(crate) workers: u32,
    /// This program.
    pub(crate) xlaunch: Launcher,
    /// From a worker's death to the launcher's knowledge of it.
    pub(crate) reaction: Spread,
    /// Resident bytes of the launcher, its guard included, while its workers sleep.
    pub(crate) resident_bytes: u64,
    /// Its CPU time then, in percent of a core.
    pub(crate) cpu_percent: f64,
    /// Seconds until a rank of a training job is named, from when it is stopped.
    pub(crate) hang_named_seconds: f64,
    /// The other one.
    pub(crate) torchrun: Option<Launcher>,
}

/// Measures `runs` launches of `workers` each; `torchrun` is the program to compare with, if there is one.
///
/// # Errors
/// A launch that fails or hangs.
pub(crate) async fn run(workers: u32, runs: usize, torchrun: Option<&Path>) -> Result<Found, Refusal> {
    let failed =
        |error: std::io::Error| Refusal::new(ExitCode::Internal, format!("failed to measure: {error}"));
    let own = std::env::current_exe().map_err(failed)?;
    let ours =
        Program { path: own, options: vec!["--nproc-per-node".into(), workers.to_string(), "--".into()] };
    let (resident_bytes, cpu_percent) = idle(&ours, workers).map_err(failed)?;
    let hang_named_seconds = hang(&ours.path).map_err(failed)?;
    Ok(Found {
        workers,
        xlaunch: launcher(&ours, workers, runs).map_err(failed)?,
        reaction: reaction(runs.max(100)).await.map_err(failed)?,
        resident_bytes,
        cpu_percent,
        hang_named_seconds,
        torchrun: torchrun
            .map(|path| launcher(&theirs(path, workers), workers, FEW))
            .transpose()
            .map_err(failed)?,
    })
}

/// The first `torchrun` in PATH that is not this program.
pub(crate) fn torchrun() -> Option<PathBuf> {
    let own = std::env::current_exe().ok().and_then(|path| path.canonicalize().ok());
    let paths = std::env::var_os("PATH")?;
    let mut found = std::env::split_paths(&paths).map(|dir| dir.join("torchrun"));
    found.find(|path| path.is_file() && path.canonicalize().ok() != own)
}

/// A launcher and its options before the command.
struct Program {
    path: PathBuf,
    options: Vec<String>,
}

fn theirs(path: &Path, workers: u32) -> Program {
    let options =
        ["--standalone", "--no-python", "--nproc-per-node", &workers.to_string()].map(str::to_owned);
    Program { path: path.into(), options: options.into() }
}

impl Program {
    fn start(&self, mark: &str, command: &[&str]) -> std::io::Result<Child> {
        let mut launcher = Command::new(&self.path);
        launcher.args(&self.options).args(command).env(MARK, mark).env("OMP_NUM_THREADS", "1");
        launcher.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
    }
}

fn launcher(program: &Program, workers: u32, runs: usize) -> std::io::Result<Launcher> {
    let nothing = (0..runs).map(|_| nothing(program)).collect::<std::io::Result<_>>()?;
    let group_gone = (0..runs).map(|_| group_gone(program, workers)).collect::<std::io::Result<_>>()?;
    Ok(Launcher {
        nothing: spread(nothing),
        group_gone: spread(group_gone),
        left_of: left(program, workers)?,
    })
}

fn nothing(program: &Program) -> std::io::Result<f64> {
    let start = Instant::now();
    let status = program.start("nothing", &["true"])?.wait()?;
    match status.success() {
        true => Ok(milliseconds(start)),
        false => Err(std::io::Error::other(format!("{} -- true: {status}", program.path.display()))),
    }
}

/// One worker is killed.
fn group_gone(program: &Program, workers: u32) -> std::io::Result<f64> {
    let mut launcher = program.start("group", &["sleep", "1000"])?;
    let sleepers = all_asleep(&launcher, workers)?;
    let start = Instant::now();
    sleepers[sleepers.len() / 2].signal(Signal::KILL);
    launcher.wait()?;
    until(|| sleepers.iter().all(|sleeper| Process::read(sleeper.pid).is_none()).then_some(()))?;
    Ok(milliseconds(start))
}

/// The launcher is killed; each worker has hidden a process in a session of its own.
fn left(program: &Program, workers: u32) -> std::io::Result<(usize, usize)> {
    let mark = format!("left-{}", std::process::id());
    let mut launcher = program.start(&mark, &["sh", "-c", "setsid sleep 1000 & exec sleep 1000"])?;
    let all = 2 * workers as usize;
    let sleepers = || marked(&mark).iter().filter(|process| process.name == "sleep").count();
    until(|| (sleepers() == all).then_some(()))?;
    launcher.kill()?;
    launcher.wait()?;
    std::thread::sleep(SECOND);
    let left = sleepers();
    marked(&mark).iter().for_each(|process| process.signal(Signal::KILL));
    Ok((left, all))
}

/// Resident bytes, and CPU time in percent of a core, of a launcher whose workers sleep.
fn idle(program: &Program, workers: u32) -> std::io::Result<(u64, f64)> {
    let mut launcher = program.start("idle", &["sleep", "1000"])?;
    let sleepers = all_asleep(&launcher, workers)?;
    let mut sampler = Sampler::new();
    sampler.sample(&[launcher.id()], Instant::now());
    std::thread::sleep(IDLE);
    let usage = sampler.sample(&[launcher.id()], Instant::now());
    let children: Vec<u32> = sleepers.iter().map(|sleeper| sleeper.pid).collect();
    let theirs: u64 = sampler.sample(&children, Instant::now()).iter().map(|usage| usage.memory_bytes).sum();
    let found = usage.first().map_or((0, 0.0), |usage| (usage.memory_bytes - theirs, usage.cpu_percent));
    kill_process(Pid::from_child(&launcher), Signal::TERM)?;
    launcher.wait()?;
    Ok(found)
}

/// Trains a small model on the CPU, and stops rank 1 of 2 in the middle of it.
fn hang(own: &Path) -> std::io::Result<f64> {
    let dir = super::scratch()?;
    fs_err::write(dir.path().join("text.txt"), "what ranks learn until one hangs\n".repeat(1000))?;
    fs_err::write(dir.path().join("hang.toml"), HANG)?;
    let told = dir.path().join("told");
    let mark = format!("hang-{}", std::process::id());
    let mut launcher = Command::new(own);
    launcher.args(["--nproc", "2", "hang.toml"]).current_dir(dir.path()).env(MARK, &mark);
    launcher.stdin(Stdio::null()).stdout(Stdio::null()).stderr(std::fs::File::create(&told)?);
    let mut launcher = launcher.spawn()?;
    let says = |text| until(|| fs_err::read_to_string(&told).ok()?.contains(text).then_some(()));
    let named = says("step 1/").and_then(|()| {
        let mut rank_1 = Process::all();
        rank_1.retain(|process| process.parent == launcher.id() && process.carries(b"RANK=1"));
        let start = Instant::now();
        rank_1.iter().for_each(|process| process.signal(Signal::STOP));
        says("rank 1 sent no heartbeat")?;
        Ok(start.elapsed().as_secs_f64())
    });
    launcher.kill()?;
    launcher.wait()?;
    // Before the directory that they work in goes.
    until(|| marked(&mark).is_empty().then_some(()))?;
    named
}

/// From the signal that kills a worker to its exit status in our hands.
async fn reaction(runs: usize) -> std::io::Result<Spread> {
    let spawner = Spawner::start()?;
    let mut times = Vec::new();
    for _ in 0..runs {
        let mut command = Command::new("sleep");
        command.arg("1000");
        let worker = spawner.spawn(command, Options::default()).await?.worker;
        let exit = tokio::spawn(Worker::exit(worker.watch()?));
        let start = Instant::now();
        worker.signal(Signal::KILL);
        exit.await.map_err(std::io::Error::other)?;
        times.push(milliseconds(start));
    }
    Ok(spread(times))
}

/// The launcher's workers, when all of them are `sleep`.
fn all_asleep(launcher: &Child, workers: u32) -> std::io::Result<Vec<Process>> {
    until(|| {
        let mut found = Process::all();
        found.retain(|process| process.parent == launcher.id() && process.name == "sleep");
        (found.len() == workers as usize).then_some(found)
    })
}

/// Processes with this mark that have not ended.
fn marked(mark: &str) -> Vec<Process> {
    let mut found = Process::all();
    found.retain(|process| process.carries(format!("{MARK}={mark}").as_bytes()));
    found
}

fn until<T>(mut ready: impl FnMut() -> Option<T>) -> std::io::Result<T> {
    let start = Instant::now();
    while start.elapsed() < HUNG {
        if let Some(value) = ready() {
            return Ok(value);
        }
        std::thread::sleep(LOOK);
    }
    Err(std::io::Error::other("a launch hangs"))
}

fn milliseconds(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

fn spread(mut times: Vec<f64>) -> Spread {
    times.sort_by(f64::total_cmp);
    let at = |share: usize| times.get((times.len() * share / 100).min(times.len().saturating_sub(1)));
    let [median, p99] = [50, 99].map(|share| at(share).copied().unwrap_or(f64::NAN));
    Spread { median, p99 }
}

/// The table.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub(crate) fn table(found: &Found) -> String {
    let mut out = format!("{} workers; milliseconds, median and 99th percentile\n\n", found.workers);
    let mut line = |name: &str, ours: String, theirs: Option<String>| {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{name:<46}{ours:<20}{}", theirs.unwrap_or_default());
    };
    let other = found.torchrun.as_ref();
    let times = |spread: Spread| format!("{:.1}  {:.1}", spread.median, spread.p99);
    let of = |(left, all): (usize, usize)| format!("{left} of {all}");
    line("", "xlaunch".into(), Some(other.map_or("torchrun: not in PATH".into(), |_| "torchrun".into())));
    let launches = |launcher: &Launcher| times(launcher.nothing);
    line("a command that does nothing", launches(&found.xlaunch), other.map(launches));
    let gone = |launcher: &Launcher| times(launcher.group_gone);
    line("one worker dies: all gone, reported", gone(&found.xlaunch), other.map(gone));
    let left = |launcher: &Launcher| of(launcher.left_of);
    line("launcher killed: processes left after 1 s", left(&found.xlaunch), other.map(left));
    line("a worker's death to the launcher's knowledge", times(found.reaction), None);
    line("a rank hangs: named after", format!("{:.0}", found.hang_named_seconds * 1e3), None);
    line("memory of the launcher", format!("{:.1} MB", found.resident_bytes as f64 / 1e6), None);
    line("its CPU while workers sleep", format!("{:.2} %", found.cpu_percent), None);
    out
}
