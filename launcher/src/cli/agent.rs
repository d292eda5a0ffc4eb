//! `xlaunch agent DIR`: runs one job of a node's daemon, in the job's environment, and outlives the daemon.
//!
//! The daemon starts it as the job's user, with what to run on standard input; see [`xlaunch_daemon::files`] for what the two
//! leave each other in DIR. It takes the ticket of its start before it does anything, so that a start that was taken back
//! does not happen, and writes down how the job has ended before it ends itself.

use std::ffi::OsStr;
use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;
use prost::Message;
use rustix::stdio;
use xlaunch_proto::convert::node::Work;
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::spec::{Device, JobSpec};

use super::launch::{self, Ended};
use crate::trainer::Trainer;
use xlaunch_agent::Refusal;
use xlaunch_agent::command::{self, Streams};
use xlaunch_agent::devices::{self, Node};
use xlaunch_agent::process::Process;
use xlaunch_agent::run_dir::RunDir;
use xlaunch_daemon::files::{self, Description, Identity, JobResult, PROTOCOL};

/// For another agent of the same job to go.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between looks whether a full disk has room again.
const ROOM: Duration = Duration::from_secs(1);
/// For room to begin in.
const BEGIN: Duration = Duration::from_secs(45);
/// Between looks whether it has.
const LOOK: Duration = Duration::from_millis(5);

/// Options of `xlaunch agent`.
#[derive(Debug, Args)]
pub(super) struct Agent {
    /// The directory of the job that belongs to its user.
    dir: PathBuf,
    /// The environment is the job's already.
    #[arg(long)]
    prepared: bool,
}

/// Runs the job. What this process prints goes to `agent.log`, but for what goes wrong before it has begun.
pub(super) async fn run(options: &Agent, trainer: Trainer) -> ExitCode {
    match begin(options) {
        Ok(Some(begun)) => begun.finish(trainer).await,
        Ok(None) => ExitCode::Done,
        Err(error) => complain(&format!("{}: {error}", options.dir.display())),
    }
}

/// A start that is this process's.
struct Begun {
    dir: PathBuf,
    order: Description,
    /// Why it cannot run as it was asked to.
    problem: Option<String>,
    /// Tells others that the agent runs.
    _lock: File,
}

/// Takes the ticket; `None` where somebody has taken it back.
fn begin(options: &Agent) -> io::Result<Option<Begun>> {
    let dir = std::path::absolute(&options.dir)?;
    let order: Description = serde_json::from_slice(&standard_input()?)?;
    if order.protocol > PROTOCOL {
        return Err(io::Error::other(format!("a newer daemon's order (version {})", order.protocol)));
    }
    let problem = match options.prepared {
        false => Some(prepare(&order, &dir)),
        true => None,
    };
    let lock = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(dir.join("lock"))?;
    hold(&lock)?;
    if !files::claim(&dir, order.start)? {
        return Ok(None);
    }
    speak_to(&dir.join("agent.log"))?;
    let own = Process::own().ok_or_else(|| io::Error::other("/proc does not tell of this process"))?;
    let identity = Identity {
        protocol: PROTOCOL,
        version: xlaunch_proto::VERSION.into(),
        pid: own.pid,
        started: own.started,
        boot: xlaunch_daemon::boot_id(),
        start: order.start,
    };
    introduce(&dir, &identity)?;
    Ok(Some(Begun { dir, order, problem, _lock: lock }))
}

/// Says who the agent is; the daemon waits a little longer for that than this waits for a full disk.
fn introduce(dir: &Path, identity: &Identity) -> io::Result<()> {
    let (bytes, deadline) = (serde_json::to_vec(identity)?, Instant::now() + BEGIN);
    loop {
        match files::write(dir, "agent.json", &bytes) {
            Err(error) if files::is_full(&error) && Instant::now() < deadline => std::thread::sleep(ROOM),
            written => return written,
        }
    }
}

/// Waits for another agent of this job to go, as one does whose start was taken back.
fn hold(lock: &File) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(LOOK),
            Err(TryLockError::WouldBlock) => return Err(io::Error::other("another agent of this job runs")),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

/// All of standard input, which stays as it is: it is read again behind [`prepare`].
fn standard_input() -> io::Result<Vec<u8>> {
    let input = File::from(stdio::stdin().try_clone_to_owned()?);
    let mut bytes = vec![0; usize::try_from(input.metadata()?.len()).unwrap_or(usize::MAX)];
    input.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Becomes this program again with the job's environment and directory. Returns only if that fails, with the reason.
fn prepare(order: &Description, dir: &Path) -> String {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("xlaunch").arg("agent").arg(dir).arg("--prepared").env_clear();
    for variable in &order.environment {
        if let Some(at) = variable.iter().position(|byte| *byte == b'=').filter(|at| *at > 0) {
            command.env(OsStr::from_bytes(&variable[..at]), OsStr::from_bytes(&variable[at + 1..]));
        }
    }
    // A job on the CPU sees no GPU: others may hold them.
    command.env("CUDA_VISIBLE_DEVICES", order.gpus.join(",")).env("CUDA_DEVICE_ORDER", "PCI_BUS_ID");
    let error = command.current_dir(&order.work_dir).exec();
    format!("failed to start in {}: {error}", order.work_dir.display())
}

/// From now on, what this process prints goes there, and it reads nothing.
fn speak_to(log: &Path) -> io::Result<()> {
    let log = std::fs::OpenOptions::new().append(true).create(true).mode(0o600).open(log)?;
    stdio::dup2_stdout(&log)?;
    stdio::dup2_stderr(&log)?;
    stdio::dup2_stdin(File::open("/dev/null")?)?;
    Ok(())
}

impl Begun {
    async fn finish(self, trainer: Trainer) -> ExitCode {
        let ended = match &self.problem {
            Some(problem) => Err(Refusal::new(ExitCode::Usage, problem.clone())),
            None => self.work(trainer).await,
        };
        let result = self.result(ended.as_ref());
        let status = ended.as_ref().map(|ended| ended.status.encode_to_vec()).unwrap_or_default();
        loop {
            let written = files::write(&self.dir, files::STATUS, &status)
                .and_then(|()| Ok(serde_json::to_vec(&result)?))
                .and_then(|bytes| files::write(&self.dir, files::RESULT, &bytes));
            match written {
                Ok(()) => return ExitCode::Done,
                // Nobody else knows it: a full disk is waited for.
                Err(error) if files::is_full(&error) => tokio::time::sleep(ROOM).await,
                Err(error) => {
                    return complain(&format!("failed to write down how the job has ended: {error}"));
                }
            }
        }
    }

    async fn work(&self, trainer: Trainer) -> Result<Ended, Refusal> {
        match &self.order.work {
            Work::Trainer(spec) => {
                let spec = for_node(spec, &self.order);
                let placement = devices::place(&spec, &Node::inspect())?;
                launch::train(&spec, &placement, trainer, |spec| RunDir::create_for_agent(spec, &self.dir))
                    .await
            }
            Work::Command(spec) => {
                let variable = |name: &str| std::env::var_os(name);
                let mut command = command::resolve((**spec).clone(), &variable, &Node::inspect)?;
                // All output goes to files, which the daemon serves: there is no console.
                command.logs.redirects.all = Streams { stdout: true, stderr: true };
                command.name.clone_from(&self.order.name);
                launch::run_workers(&command, || Ok(RunDir::for_agent(&command, self.order.job, &self.dir)))
                    .await
            }
        }
    }

    fn result(&self, ended: Result<&Ended, &Refusal>) -> JobResult {
        let start = self.order.start;
        match ended {
            Ok(Ended { exit, reason, rank, status, report, .. }) => {
                let stopped = matches!(exit, ExitCode::Stopped | ExitCode::Interrupted | ExitCode::Signal(_));
                JobResult {
                    exit: exit.code(),
                    stopped,
                    reason: reason.clone(),
                    report: report.clone(),
                    rank: *rank,
                    attempt: status.attempt,
                    start,
                }
            }
            Err(Refusal { exit, message }) => JobResult {
                exit: exit.code(),
                reason: exit.meaning().into(),
                report: format!("error: {}\n", message.trim()),
                start,
                ..JobResult::default()
            },
        }
    }
}

/// The description with the devices that the daemon has chosen.
fn for_node(spec: &JobSpec, order: &Description) -> JobSpec {
    let mut spec = spec.clone();
    spec.launch.nproc = Some(order.workers);
    spec.launch.devices.clear();
    spec.engine.device = if order.gpus.is_empty() { Device::Cpu } else { Device::Cuda };
    spec
}

#[expect(clippy::print_stderr, reason = "to the daemon's log, or the agent's")]
fn complain(problem: &str) -> ExitCode {
    eprintln!("xlaunch agent: {problem}");
    ExitCode::Internal
}
