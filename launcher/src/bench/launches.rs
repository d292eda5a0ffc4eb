//! `xlaunch bench launch`: the overhead and reaction times of launching, compared with torchrun if it is installed.
//!
//! Launchers are child processes, measured from outside. Their workers are `true` and `sleep`, and the built-in trainer
//! for hang detection. Every process of a measurement has a marker variable in its environment, so that processes left
//! behind by a killed launcher can be counted and removed.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use xlaunch_spec::exit::ExitCode;

use xlaunch_agent::status::sample::Sampler;
use xlaunch_host::process::Process;
use xlaunch_host::spawn::{Options, Spawner, Worker};
use xlaunch_spec::refusal::Refusal;

/// Environment variable of all processes of a measurement.
const MARKER_VARIABLE: &str = "XLAUNCH_BENCH";
/// Time after which a measurement has failed.
const MEASUREMENT_TIMEOUT: Duration = Duration::from_secs(120);
/// Delay between the kill of the launcher and the count of processes left behind.
const CLEANUP_DELAY: Duration = Duration::from_secs(1);
const PROCESS_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Period over which the CPU time of an idle launcher is measured.
const IDLE_TIME: Duration = Duration::from_secs(3);
/// Number of launches with torchrun, which needs seconds per launch.
const TORCHRUN_RUNS: usize = 3;
/// A job that trains until it is killed.
const ENDLESS_JOB: &str = r#"
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

/// A distribution of times in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Spread {
    median: f64,
    p99: f64,
}

/// Measurements of one launcher.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Launcher {
    /// Time from the start of the command to its exit, with workers that exit at once.
    no_op_launch_ms: Spread,
    /// Time from the death of one worker to the exit of the command and of all other workers.
    group_exit_ms: Spread,
    /// Processes left one second after the launcher was killed.
    processes_left: usize,
    /// Processes that the launcher had started.
    processes_started: usize,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Measured {
    /// Workers of each launch.
    workers: u32,
    xlaunch: Launcher,
    /// Time from the death of a worker until the launcher has its exit status.
    exit_detection_ms: Spread,
    /// Resident memory of the launcher and its cleanup process while the workers sleep.
    resident_bytes: u64,
    /// CPU time of these two processes, in percent of a core.
    cpu_percent: f64,
    /// Time from the suspension of a rank of a training job to the report that names it.
    hang_report_seconds: f64,
    torchrun: Option<Launcher>,
}

/// Measures `runs` launches of `workers` each; `torchrun` is the program to compare with.
///
/// # Errors
/// A launch failed or took too long.
pub(crate) async fn run(workers: u32, runs: usize, torchrun: Option<&Path>) -> Result<Measured, Refusal> {
    let measured = measure(workers, runs, torchrun).await;
    measured.map_err(|error| Refusal::new(ExitCode::Internal, format!("failed to measure launches: {error}")))
}

async fn measure(workers: u32, runs: usize, torchrun: Option<&Path>) -> std::io::Result<Measured> {
    let xlaunch = Program {
        path: std::env::current_exe()?,
        options: vec!["--nproc-per-node".into(), workers.to_string(), "--".into()],
    };
    let (resident_bytes, cpu_percent) = idle(&xlaunch, workers)?;
    let hang_report_seconds = hang(&xlaunch.path)?;
    let torchrun = torchrun.map(|path| Program::torchrun(path, workers));
    Ok(Measured {
        workers,
        xlaunch: launcher(&xlaunch, workers, runs)?,
        exit_detection_ms: exit_detection(runs.max(100)).await?,
        resident_bytes,
        cpu_percent,
        hang_report_seconds,
        torchrun: torchrun.map(|program| launcher(&program, workers, TORCHRUN_RUNS)).transpose()?,
    })
}

/// Returns the first `torchrun` in PATH that is not this program.
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

impl Program {
    fn torchrun(path: &Path, workers: u32) -> Self {
        let options =
            ["--standalone", "--no-python", "--nproc-per-node", &workers.to_string()].map(str::to_owned);
        Self { path: path.into(), options: options.into() }
    }

    fn start(&self, marker: &str, command: &[&str]) -> std::io::Result<Child> {
        let mut launcher = Command::new(&self.path);
        launcher.args(&self.options).args(command).env(MARKER_VARIABLE, marker).env("OMP_NUM_THREADS", "1");
        launcher.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
    }
}

fn launcher(program: &Program, workers: u32, runs: usize) -> std::io::Result<Launcher> {
    let no_op = (0..runs).map(|_| no_op_launch(program)).collect::<std::io::Result<_>>()?;
    let group_exit = (0..runs).map(|_| group_exit(program, workers)).collect::<std::io::Result<_>>()?;
    let (processes_left, processes_started) = processes_left(program, workers)?;
    Ok(Launcher {
        no_op_launch_ms: spread(no_op),
        group_exit_ms: spread(group_exit),
        processes_left,
        processes_started,
    })
}

fn no_op_launch(program: &Program) -> std::io::Result<f64> {
    let start = Instant::now();
    let status = program.start("no-op", &["true"])?.wait()?;
    if status.success() {
        Ok(milliseconds(start))
    } else {
        Err(std::io::Error::other(format!("{} -- true: {status}", program.path.display())))
    }
}

/// Kills one worker. Returns the milliseconds until the launcher and all other workers have exited.
fn group_exit(program: &Program, workers: u32) -> std::io::Result<f64> {
    let mut launcher = program.start("group", &["sleep", "1000"])?;
    let sleepers = all_asleep(&launcher, workers)?;
    let start = Instant::now();
    sleepers[sleepers.len() / 2].signal(Signal::KILL);
    launcher.wait()?;
    wait_until(|| sleepers.iter().all(|sleeper| Process::read(sleeper.pid).is_none()).then_some(()))?;
    Ok(milliseconds(start))
}

/// Kills the launcher after each worker has started a process in another session. Returns the number of processes left
/// and the number there was.
fn processes_left(program: &Program, workers: u32) -> std::io::Result<(usize, usize)> {
    let marker = format!("left-{}", std::process::id());
    let mut launcher = program.start(&marker, &["sh", "-c", "setsid sleep 1000 & exec sleep 1000"])?;
    let started = 2 * workers as usize;
    let sleepers = || marked(&marker).iter().filter(|process| process.name == "sleep").count();
    wait_until(|| (sleepers() == started).then_some(()))?;
    launcher.kill()?;
    launcher.wait()?;
    std::thread::sleep(CLEANUP_DELAY);
    let left = sleepers();
    marked(&marker).iter().for_each(|process| process.signal(Signal::KILL));
    Ok((left, started))
}

/// Measures the resident bytes, and the CPU time in percent of a core, of a launcher whose workers sleep.
fn idle(program: &Program, workers: u32) -> std::io::Result<(u64, f64)> {
    let mut launcher = program.start("idle", &["sleep", "1000"])?;
    let sleepers = all_asleep(&launcher, workers)?;
    let mut sampler = Sampler::new();
    sampler.sample(&[launcher.id()], Instant::now());
    std::thread::sleep(IDLE_TIME);
    let usage = sampler.sample(&[launcher.id()], Instant::now());
    let children: Vec<u32> = sleepers.iter().map(|sleeper| sleeper.pid).collect();
    let workers_bytes: u64 =
        sampler.sample(&children, Instant::now()).iter().map(|usage| usage.memory_bytes).sum();
    let found =
        usage.first().map_or((0, 0.0), |usage| (usage.memory_bytes - workers_bytes, usage.cpu_percent));
    kill_process(Pid::from_child(&launcher), Signal::TERM)?;
    launcher.wait()?;
    Ok(found)
}

/// Trains a small model on the CPU, and suspends rank 1 of 2 during training. Returns the seconds until rank 1 is
/// reported.
fn hang(own: &Path) -> std::io::Result<f64> {
    let dir = super::scratch_dir()?;
    fs_err::write(dir.path().join("text.txt"), "text to train on until a rank hangs\n".repeat(1000))?;
    fs_err::write(dir.path().join("hang.toml"), ENDLESS_JOB)?;
    let stderr = dir.path().join("stderr");
    let marker = format!("hang-{}", std::process::id());
    let mut launcher = Command::new(own);
    launcher.args(["--nproc", "2", "hang.toml"]).current_dir(dir.path()).env(MARKER_VARIABLE, &marker);
    launcher.stdin(Stdio::null()).stdout(Stdio::null()).stderr(std::fs::File::create(&stderr)?);
    let mut launcher = launcher.spawn()?;
    let wait_for_text =
        |text| wait_until(|| fs_err::read_to_string(&stderr).ok()?.contains(text).then_some(()));
    let seconds = wait_for_text("step 1/").and_then(|()| {
        let mut rank_1 = Process::all();
        rank_1.retain(|process| {
            process.parent == launcher.id() && process.variable("RANK").is_some_and(|rank| rank == "1")
        });
        let start = Instant::now();
        rank_1.iter().for_each(|process| process.signal(Signal::STOP));
        // The hang detector's report is the only line that starts with a rank.
        wait_for_text("xlaunch: rank 1 ")?;
        Ok(start.elapsed().as_secs_f64())
    });
    launcher.kill()?;
    launcher.wait()?;
    // The workers use the directory, so it must not be removed before they have exited.
    wait_until(|| marked(&marker).is_empty().then_some(()))?;
    seconds
}

/// Measures the time from the signal that kills a worker until the agent receives its exit status.
async fn exit_detection(runs: usize) -> std::io::Result<Spread> {
    let spawner = Spawner::start()?;
    let mut times = Vec::new();
    for _ in 0..runs {
        let mut command = Command::new("sleep");
        command.arg("1000");
        let worker = spawner.spawn(command, Options::default()).await?.worker;
        let exit = tokio::spawn(Worker::exit(worker.watch()));
        let start = Instant::now();
        worker.signal(Signal::KILL);
        exit.await.map_err(std::io::Error::other)?;
        times.push(milliseconds(start));
    }
    Ok(spread(times))
}

/// Waits until all workers have executed `sleep`, and returns them.
fn all_asleep(launcher: &Child, workers: u32) -> std::io::Result<Vec<Process>> {
    wait_until(|| {
        let mut found = Process::all();
        found.retain(|process| process.parent == launcher.id() && process.name == "sleep");
        (found.len() == workers as usize).then_some(found)
    })
}

/// Returns the live processes with this marker.
fn marked(marker: &str) -> Vec<Process> {
    let mut found = Process::all();
    found.retain(|process| process.variable(MARKER_VARIABLE).is_some_and(|found| found == *marker));
    found
}

fn wait_until<T>(mut ready: impl FnMut() -> Option<T>) -> std::io::Result<T> {
    let start = Instant::now();
    while start.elapsed() < MEASUREMENT_TIMEOUT {
        if let Some(value) = ready() {
            return Ok(value);
        }
        std::thread::sleep(PROCESS_POLL_INTERVAL);
    }
    Err(std::io::Error::other(format!("a launch did not react within {} s", MEASUREMENT_TIMEOUT.as_secs())))
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

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub(crate) fn table(measured: &Measured) -> String {
    let mut out = format!("{} workers; times in ms: median, 99th percentile\n\n", measured.workers);
    let mut line = |name: &str, xlaunch: String, torchrun: Option<String>| {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{name:<46}{xlaunch:<20}{}", torchrun.unwrap_or_default());
    };
    let (ours, other) = (&measured.xlaunch, measured.torchrun.as_ref());
    let times = |spread: Spread| format!("{:.1}  {:.1}", spread.median, spread.p99);
    line("", "xlaunch".into(), Some(other.map_or("torchrun: not in PATH".into(), |_| "torchrun".into())));
    let no_op = |launcher: &Launcher| times(launcher.no_op_launch_ms);
    line("launch of `true`", no_op(ours), other.map(no_op));
    let group_exit = |launcher: &Launcher| times(launcher.group_exit_ms);
    line("worker killed: until the whole group has exited", group_exit(ours), other.map(group_exit));
    let left = |launcher: &Launcher| format!("{} of {}", launcher.processes_left, launcher.processes_started);
    line("launcher killed: processes left after 1 s", left(ours), other.map(left));
    line("worker killed: until the agent has its status", times(measured.exit_detection_ms), None);
    line("rank stopped: until it is reported", format!("{:.0}", measured.hang_report_seconds * 1e3), None);
    line("memory of the idle launcher", format!("{:.1} MB", measured.resident_bytes as f64 / 1e6), None);
    line("CPU use of the idle launcher", format!("{:.2} %", measured.cpu_percent), None);
    out
}
