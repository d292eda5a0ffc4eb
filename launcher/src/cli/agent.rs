//! `xlaunch agent DIR`: runs one job of a node's daemon, and outlives the daemon.
//!
//! The daemon starts the agent as the job's user, with a minimal environment, and sends a [`Description`] through
//! standard input: see [`xlaunch_daemon::files`]. The agent does nothing before it has read the whole description. Only
//! the workers get the job's environment. The agent writes the result before it exits.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use prost::Message;
use rustix::stdio;
use xlaunch_proto::convert::node::Work;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::{Device, JobSpec};
use xlaunch_worker::newest_checkpoint;

use super::launch::{self, Place};
use xlaunch_agent::base_environment::BaseEnvironment;
use xlaunch_agent::ending::Ending;
use xlaunch_agent::registry::SOCKET;
use xlaunch_agent::report;
use xlaunch_agent::resolved_command::{self, ResolvedCommand, Streams};
use xlaunch_agent::run_dir::RunDir;
use xlaunch_agent::stderr::print_line;
use xlaunch_agent::workload::command::stop_signals;
use xlaunch_agent::workload::trainer::STOP_SIGNALS;
use xlaunch_daemon::files::{self, Description, PROTOCOL};
use xlaunch_daemon::state::{JobResult, Usage};
use xlaunch_host::clock;
use xlaunch_host::devices::{self, Node};
use xlaunch_host::signals::Signals;
use xlaunch_spec::refusal::Refusal;

/// Interval between attempts to write to a full disk.
const FULL_DISK_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Time that the agent waits for space on a full disk before the job begins. The daemon waits slightly longer for the
/// agent.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(45);
/// Time that the agent waits for space on a full disk to write the result, although space was reserved for it. After
/// that the job is lost: a job that has ended must not hold its GPUs.
const RESULT_TIMEOUT: Duration = Duration::from_secs(30);
/// File with the directories of the job's training runs, oldest first, each terminated by a zero byte.
const RUNS: &str = "runs";

/// Options of `xlaunch agent`.
#[derive(Debug, Args)]
pub(super) struct Agent {
    /// Directory of the job, owned by its user
    dir: PathBuf,
}

/// Runs the job. Output of this process goes to `agent.log`.
pub(super) async fn run(options: &Agent) -> ExitCode {
    match begin(options) {
        Ok(start) => start.finish().await,
        Err(error) => report_failure(&format!("{}: {error}", options.dir.display())),
    }
}

/// A start of the job that is recorded as begun.
struct Start {
    dir: PathBuf,
    description: Description,
    base: BaseEnvironment,
}

fn begin(options: &Agent) -> io::Result<Start> {
    let dir = std::path::absolute(&options.dir)?;
    redirect_output(&dir.join("agent.log"))?;
    let mut input = Vec::new();
    File::from(stdio::stdin().try_clone_to_owned()?).read_to_end(&mut input)?;
    stdio::dup2_stdin(File::open("/dev/null")?)?;
    // The description is incomplete if the daemon was killed: then this start does not count.
    let description: Description = serde_json::from_slice(&input)?;
    if description.protocol != PROTOCOL {
        return Err(io::Error::other(format!(
            "the daemon uses agent protocol {}, but this agent uses {PROTOCOL}: their versions differ",
            description.protocol
        )));
    }
    let deadline = Instant::now() + BEGIN_TIMEOUT;
    loop {
        match files::reserve_result(&dir).and_then(|()| files::begin(&dir, description.start)) {
            Err(error) if files::is_full(&error) && Instant::now() < deadline => {
                std::thread::sleep(FULL_DISK_RETRY_DELAY)
            }
            begun => break begun?,
        }
    }
    // The socket may be left over from a lost start. Its agent no longer runs, or this one would not have been started.
    files::remove_if_present(&dir.join(SOCKET))?;
    let base = BaseEnvironment::Submitted(environment(&description));
    Ok(Start { dir, description, base })
}

/// Redirects stdout and stderr to `log`.
fn redirect_output(log: &Path) -> io::Result<()> {
    let log = std::fs::OpenOptions::new().append(true).create(true).mode(0o600).open(log)?;
    stdio::dup2_stdout(&log)?;
    stdio::dup2_stderr(&log)?;
    Ok(())
}

/// The environment of the job's workers.
fn environment(description: &Description) -> BTreeMap<OsString, OsString> {
    let pairs = description.environment.iter().filter_map(|variable| {
        let at = variable.iter().position(|byte| *byte == b'=').filter(|at| *at > 0)?;
        Some((OsStr::from_bytes(&variable[..at]).into(), OsStr::from_bytes(&variable[at + 1..]).into()))
    });
    let mut variables: BTreeMap<OsString, OsString> = pairs.collect();
    // The daemon has chosen the GPUs, and given this process the same two variables.
    for name in ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"] {
        variables.extend(std::env::var_os(name).map(|value| (name.into(), value)));
    }
    variables
}

impl Start {
    async fn finish(self) -> ExitCode {
        let ended = self.work().await;
        let result = JobResult { uptime_ms: clock::uptime_ms(), ..self.result(ended.as_ref()) };
        let status = ended.as_ref().map(|ended| ended.status.encode_to_vec()).unwrap_or_default();
        if let Err(error) = files::write(&self.dir, files::STATUS, &status) {
            report_failure(&format!("failed to write the last status of the job: {error}"));
        }
        let deadline = Instant::now() + RESULT_TIMEOUT;
        loop {
            let bytes = serde_json::to_vec(&result).map_err(io::Error::from);
            match bytes.and_then(|bytes| files::write_result(&self.dir, &bytes)) {
                Ok(()) => return ExitCode::Done,
                // The job has removed the file with the reserved space.
                Err(error) if files::is_full(&error) && Instant::now() < deadline => {
                    tokio::time::sleep(FULL_DISK_RETRY_DELAY).await;
                }
                Err(error) => {
                    return report_failure(&format!("failed to write the result of the job: {error}"));
                }
            }
        }
    }

    async fn work(&self) -> Result<Ending, Refusal> {
        let work_dir = &self.description.work_dir;
        if let Some(mask) = self.description.umask {
            rustix::process::umask(rustix::fs::Mode::from_raw_mode(mask));
        }
        std::env::set_current_dir(work_dir).map_err(|error| {
            Refusal::new(ExitCode::Usage, format!("failed to start in {}: {error}", work_dir.display()))
        })?;
        match &self.description.work {
            Work::Trainer(spec) => {
                let mut spec = for_node(spec, &self.description);
                if self.description.requeued {
                    self.resume(&mut spec);
                }
                let placement = devices::place(&spec, &Node::inspect())?;
                let create = |spec: &JobSpec, run_id: &str, _| {
                    let run = RunDir::create_for_agent(spec, run_id, &self.dir)?;
                    self.remember_run(&run.path);
                    Ok(run)
                };
                let place = Place { base: &self.base, group: None, declared: None };
                let signals = Signals::listen(&STOP_SIGNALS)?;
                launch::train(&spec, &placement, place, signals, create).await
            }
            Work::Command(spec) => {
                let variable = |name: &str| self.base.get(name);
                let mut command = resolved_command::resolve((**spec).clone(), &variable, &Node::inspect)?;
                // All output goes to files, which the daemon serves: there is no console.
                command.spec.logs.redirects.all = Streams { stdout: true, stderr: true };
                if let Some(most) = self.description.max_output {
                    // Two files are kept, the rotated and the current one, so each gets half of the limit.
                    command.spec.logs.rotate_bytes = Some((most / 2).max(1));
                }
                command.name.clone_from(&self.description.name);
                // No program that expects torchrun's exit code runs this launcher.
                command.spec.propagate_exit_code = true;
                command.spec.run_id.get_or_insert_with(|| format!("job-{}", self.description.job));
                let create =
                    |_: &ResolvedCommand, run_id: &str, _, _| Ok(RunDir::for_agent(run_id, &self.dir));
                let place = Place { base: &self.base, group: None, declared: None };
                let signals = Signals::listen(&stop_signals(&command.spec.signals))?;
                launch::run_workers(&command, place, signals, create).await
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
    fn resume(&self, spec: &mut JobSpec) {
        if spec.checkpoint.dir.is_some() {
            spec.checkpoint.resume = "auto".into();
            return;
        }
        let runs = std::fs::read(self.dir.join(RUNS)).unwrap_or_default();
        let dirs = runs.split(|byte| *byte == b'\0').filter(|run| !run.is_empty()).rev();
        let mut checkpoints = dirs.map(|run| Path::new(OsStr::from_bytes(run)).join("checkpoints"));
        // Name the directory instead of the checkpoint: if the newest one is damaged, the one before it is used.
        if let Some(dir) = checkpoints.find(|dir| newest_checkpoint(dir).is_some()) {
            spec.checkpoint.resume = dir.to_string_lossy().into_owned();
        }
    }

    fn result(&self, ended: Result<&Ending, &Refusal>) -> JobResult {
        let start = self.description.start;
        match ended {
            Ok(ending) => JobResult {
                exit: ending.exit.code(),
                stopped: ending.stopped,
                reason: report::reason(ending),
                report: report::at_end(ending),
                rank: ending.rank(),
                attempt: ending.status.attempt,
                start,
                usage: usage(ending.peak_memory_bytes),
                ..JobResult::default()
            },
            Err(Refusal { exit, message }) => JobResult {
                exit: exit.code(),
                stopped: matches!(exit, ExitCode::Signal(_)),
                reason: message.trim().lines().next().unwrap_or_default().into(),
                report: format!("error: {}\n", message.trim()),
                start,
                ..JobResult::default()
            },
        }
    }
}

/// Returns the resource usage of the workers, all of which have been waited for. Samples miss short peaks, so the peak
/// is at least that of the largest single process, which the kernel records.
fn usage(sampled_peak: u64) -> Option<Usage> {
    let used = getrusage(UsageWho::RUSAGE_CHILDREN).ok()?;
    let cpu_ms = (used.user_time() + used.system_time()).num_milliseconds();
    let peak = u64::try_from(used.max_rss()).unwrap_or(0) * 1024;
    let cpu_ms = u64::try_from(cpu_ms).unwrap_or(0);
    Some(Usage { cpu_ms, peak_memory_bytes: Some(sampled_peak.max(peak)) })
}

/// The job description with the devices that the daemon has chosen.
fn for_node(spec: &JobSpec, description: &Description) -> JobSpec {
    let mut spec = spec.clone();
    spec.launch.nproc = Some(description.workers);
    spec.launch.devices.clear();
    spec.engine.device = if description.gpus.is_empty() { Device::Cpu } else { Device::Cuda };
    spec
}

fn report_failure(message: &str) -> ExitCode {
    print_line(format_args!("xlaunch agent: {message}"));
    ExitCode::Internal
}
