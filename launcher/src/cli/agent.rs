//! `xlaunch agent DIR`: runs one job of a node's daemon, in the job's environment, and outlives the daemon.
//!
//! The daemon starts it as the job's user, with a [`Description`] on standard input. The two exchange files in DIR, see
//! [`xlaunch_daemon::files`]. The agent claims the ticket of its start before it does anything, so that a start that
//! the daemon has revoked does not happen, and it writes the job's result before it exits.

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

/// Time for the previous agent of the job, whose start was revoked, to exit.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Interval between attempts to write to a full disk.
const FULL_DISK_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Time for a full disk to get space again before the job begins. The daemon waits a little longer than this for the
/// agent.
const IDENTITY_TIMEOUT: Duration = Duration::from_secs(45);
/// The directories of the job's training runs, oldest first, each ended by a zero byte.
const RUNS: &str = "runs";

/// Options of `xlaunch agent`.
#[derive(Debug, Args)]
pub(super) struct Agent {
    /// Directory of the job, owned by its user
    dir: PathBuf,
    /// The environment is already the job's
    #[arg(long)]
    prepared: bool,
}

/// Runs the job. Output of this process goes to `agent.log`.
pub(super) async fn run(options: &Agent, trainer: Trainer) -> ExitCode {
    match claim(options) {
        Ok(Some(start)) => start.finish(trainer).await,
        Ok(None) => ExitCode::Done,
        Err(error) => report_failure(&format!("{}: {error}", options.dir.display())),
    }
}

/// A start that this process has claimed.
struct ClaimedStart {
    dir: PathBuf,
    description: Description,
    /// Why the job cannot run.
    problem: Option<String>,
    /// Held while the agent runs.
    _lock: File,
}

/// Claims the ticket of this start; `None` if the daemon has revoked it.
fn claim(options: &Agent) -> io::Result<Option<ClaimedStart>> {
    let dir = std::path::absolute(&options.dir)?;
    let description: Description = serde_json::from_slice(&standard_input()?)?;
    if description.protocol > PROTOCOL {
        return Err(io::Error::other(format!(
            "the daemon is newer than this agent: protocol {}, at most {PROTOCOL} is supported",
            description.protocol
        )));
    }
    let problem = match options.prepared {
        false => {
            // First: what the user's environment loads must find no descriptor of the daemon or the system's journal.
            redirect_output(&dir.join("agent.log"))?;
            Some(prepare(&description, &dir))
        }
        true => None,
    };
    let lock = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(dir.join("lock"))?;
    acquire(&lock)?;
    if !files::claim(&dir, description.start)? {
        return Ok(None);
    }
    stdio::dup2_stdin(File::open("/dev/null")?)?;
    let own = Process::own().ok_or_else(|| io::Error::other("failed to read /proc for this process"))?;
    let identity = Identity {
        protocol: PROTOCOL,
        version: xlaunch_proto::VERSION.into(),
        pid: own.pid,
        started: own.started,
        boot: xlaunch_daemon::boot_id(),
        start: description.start,
    };
    write_identity(&dir, &identity)?;
    Ok(Some(ClaimedStart { dir, description, problem, _lock: lock }))
}

/// Tells the daemon who the agent is.
fn write_identity(dir: &Path, identity: &Identity) -> io::Result<()> {
    let (bytes, deadline) = (serde_json::to_vec(identity)?, Instant::now() + IDENTITY_TIMEOUT);
    loop {
        match files::write(dir, "agent.json", &bytes) {
            Err(error) if files::is_full(&error) && Instant::now() < deadline => {
                std::thread::sleep(FULL_DISK_RETRY_DELAY)
            }
            written => return written,
        }
    }
}

/// Waits for a previous agent of this job to exit.
fn acquire(lock: &File) -> io::Result<()> {
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                std::thread::sleep(LOCK_POLL_INTERVAL)
            }
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::other("another agent of this job is running"));
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

/// All of standard input. The file offset stays where it is, because the input is read again after [`prepare`].
fn standard_input() -> io::Result<Vec<u8>> {
    let input = File::from(stdio::stdin().try_clone_to_owned()?);
    let mut bytes = vec![0; usize::try_from(input.metadata()?.len()).unwrap_or(usize::MAX)];
    input.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Executes this program again with the job's environment and working directory. Returns the reason if that fails.
fn prepare(description: &Description, dir: &Path) -> String {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("xlaunch").arg("agent").arg(dir).arg("--prepared").env_clear();
    for variable in &description.environment {
        if let Some(at) = variable.iter().position(|byte| *byte == b'=').filter(|at| *at > 0) {
            command.env(OsStr::from_bytes(&variable[..at]), OsStr::from_bytes(&variable[at + 1..]));
        }
    }
    // A CPU job has no GPUs, so this hides them all: they may belong to other jobs.
    command.env("CUDA_VISIBLE_DEVICES", description.gpus.join(",")).env("CUDA_DEVICE_ORDER", "PCI_BUS_ID");
    let error = command.current_dir(&description.work_dir).exec();
    format!("failed to start in {}: {error}", description.work_dir.display())
}

/// Redirects stdout and stderr to `log`.
fn redirect_output(log: &Path) -> io::Result<()> {
    let log = std::fs::OpenOptions::new().append(true).create(true).mode(0o600).open(log)?;
    stdio::dup2_stdout(&log)?;
    stdio::dup2_stderr(&log)?;
    Ok(())
}

impl ClaimedStart {
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
                // Nothing else has the result, so wait for space on the disk.
                Err(error) if files::is_full(&error) => tokio::time::sleep(FULL_DISK_RETRY_DELAY).await,
                Err(error) => {
                    return report_failure(&format!("failed to write the result of the job: {error}"));
                }
            }
        }
    }

    async fn work(&self, trainer: Trainer) -> Result<Ended, Refusal> {
        match &self.description.work {
            Work::Trainer(spec) => {
                let mut spec = for_node(spec, &self.description);
                if self.description.requeued {
                    self.resume(&mut spec, trainer.newest_checkpoint);
                }
                let placement = devices::place(&spec, &Node::inspect())?;
                launch::train(&spec, &placement, trainer, |spec| {
                    let run = RunDir::create_for_agent(spec, &self.dir)?;
                    self.remember_run(&run.path);
                    Ok(run)
                })
                .await
            }
            Work::Command(spec) => {
                let variable = |name: &str| std::env::var_os(name);
                let mut command = command::resolve((**spec).clone(), &variable, &Node::inspect)?;
                // All output goes to files, which the daemon serves: there is no console.
                command.logs.redirects.all = Streams { stdout: true, stderr: true };
                command.name.clone_from(&self.description.name);
                launch::run_workers(&command, || {
                    Ok(RunDir::for_agent(&command, self.description.job, &self.dir))
                })
                .await
            }
        }
    }

    /// Lists a run, so that a later start of the job finds its checkpoints.
    fn remember_run(&self, run: &Path) {
        let mut runs = std::fs::read(self.dir.join(RUNS)).unwrap_or_default();
        runs.extend_from_slice(run.as_os_str().as_bytes());
        runs.push(b'\0');
        if let Err(error) = files::write(&self.dir, RUNS, &runs) {
            report_failure(&format!("failed to write the list of runs: {error}"));
        }
    }

    /// Continues from the newest checkpoint of this job's lost starts, not of other jobs of the same name. Without one,
    /// the job starts as it was submitted.
    fn resume(&self, spec: &mut JobSpec, newest: fn(&Path) -> Option<PathBuf>) {
        if spec.checkpoint.dir.is_some() {
            spec.checkpoint.resume = "auto".into();
            return;
        }
        let runs = std::fs::read(self.dir.join(RUNS)).unwrap_or_default();
        let dirs = runs.split(|byte| *byte == b'\0').filter(|run| !run.is_empty()).rev();
        let checkpoints = dirs.map(|run| Path::new(OsStr::from_bytes(run)).join("checkpoints"));
        if let Some(checkpoint) = checkpoints.filter_map(|dir| newest(&dir)).next() {
            spec.checkpoint.resume = checkpoint.to_string_lossy().into_owned();
        }
    }

    fn result(&self, ended: Result<&Ended, &Refusal>) -> JobResult {
        let start = self.description.start;
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

/// The job description with the devices that the daemon has chosen.
fn for_node(spec: &JobSpec, description: &Description) -> JobSpec {
    let mut spec = spec.clone();
    spec.launch.nproc = Some(description.workers);
    spec.launch.devices.clear();
    spec.engine.device = if description.gpus.is_empty() { Device::Cpu } else { Device::Cuda };
    spec
}

#[expect(clippy::print_stderr, reason = "goes to the log of the daemon or of the agent")]
fn report_failure(message: &str) -> ExitCode {
    eprintln!("xlaunch agent: {message}");
    ExitCode::Internal
}
