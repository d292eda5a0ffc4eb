//! Runs the process that examines GPUs: this program as `xlaunch doctor`, under the daemon's user. The daemon itself
//! never calls CUDA.
//!
//! ```text
//! files of the last examination removed --> process (under systemd: a unit) --its stdout--> report
//!                                             ^ ends when its stdin does, as at the timeout and with the daemon
//! ```
//! The process uses no files or directories that a job's user can write: a full or manipulated `/tmp` must not make a
//! GPU fail. Its cache is kept, because later examinations compare with the rates in it.

use std::fs::DirBuilder;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::unix::pipe;
use tokio::time::timeout;
use tracing::warn;
use xlaunch_host::doctor::Report;
use xlaunch_host::spawn::sys;

use super::process::AgentProcess;
use super::unit::Unit;
use super::{Agent, AgentStarter, PATH};
use crate::state::bounded;
use crate::state::examination::Ending;

/// Time for the process to end after its stdin has been closed; then it is killed.
pub(crate) const EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Arguments of the process.
pub(super) const DOCTOR: [&str; 3] = ["doctor", "--json", "--while-stdin-is-open"];
/// Limit on the bytes read from each output. Reports are smaller.
const MAX_OUTPUT_BYTES: u64 = 4 << 20;
/// Prefixes of the daemon's variables that are passed to the process: the operator's settings for libraries and
/// workers.
const PASSED_ON_PREFIXES: [&str; 3] = ["LD_LIBRARY_PATH", "XLAUNCH_", "NCCL_"];

/// An examination to start.
#[derive(Clone, Debug)]
pub(crate) struct ExaminationStart {
    /// UUIDs of the GPUs.
    pub(crate) gpus: Vec<String>,
    /// Directory for the files of the process. It belongs to the daemon's user.
    pub(crate) dir: PathBuf,
    pub(crate) timeout: Duration,
}

/// The process's ends of its pipes.
pub(super) struct Stdio {
    pub(super) input: OwnedFd,
    pub(super) output: OwnedFd,
    pub(super) errors: OwnedFd,
}

impl AgentStarter {
    /// Examines GPUs. Takes at most the timeout plus [`EXIT_TIMEOUT`].
    pub(crate) async fn examine(&self, start: &ExaminationStart) -> Ending {
        match self.run_examination(start).await {
            Ok(ending) => ending,
            Err(error) => Ending::Broken(format!("failed to start the examination: {error}")),
        }
    }

    async fn run_examination(&self, start: &ExaminationStart) -> io::Result<Ending> {
        tokio::task::block_in_place(|| start.prepare())?;
        let (input, theirs_in) = pipe::pipe()?;
        let (theirs_out, mut output) = pipe::pipe()?;
        let (theirs_err, mut errors) = pipe::pipe()?;
        let stdio = Stdio {
            input: theirs_in.into_blocking_fd()?,
            output: theirs_out.into_blocking_fd()?,
            errors: theirs_err.into_blocking_fd()?,
        };
        let process = match self {
            Self::Detached => start_detached(start, stdio).map(Agent::Process)?,
            Self::Systemd(bus) => {
                Unit::start_doctor(bus, start, stdio).await.map(Agent::Unit).map_err(io::Error::other)?
            }
        };
        let finished = timeout(start.timeout, async {
            let texts = tokio::join!(read(&mut output), read(&mut errors));
            process.exited().await;
            texts
        });
        let ending = match finished.await {
            Ok((output, errors)) => ending(&output, &errors),
            Err(_) => Ending::TimedOut(start.timeout),
        };
        drop(input);
        if timeout(EXIT_TIMEOUT, process.exited()).await.is_err() {
            warn!("the examination of GPUs did not end in time and is killed");
            process.kill().await;
        }
        process.release().await;
        Ok(ending)
    }
}

impl ExaminationStart {
    pub(super) fn temporary(&self) -> PathBuf {
        self.dir.join("tmp")
    }

    /// Creates an empty directory that other users can neither read nor write.
    fn prepare(&self) -> io::Result<()> {
        let temporary = self.temporary();
        match fs_err::remove_dir_all(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let create = |dir: &Path| DirBuilder::new().recursive(true).mode(0o700).create(dir);
        create(&temporary)
    }

    pub(super) fn environment(&self) -> Vec<(String, String)> {
        let is_passed_on = |name: &str| PASSED_ON_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
        let passed_on = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok().filter(|name| is_passed_on(name))?, value.into_string().ok()?))
        });
        let (temporary, cache) = (self.temporary().display().to_string(), self.dir.join("cache"));
        let own = [
            ("PATH", PATH.to_owned()),
            ("CUDA_VISIBLE_DEVICES", self.gpus.join(",")),
            ("CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned()),
            ("HOME", temporary.clone()),
            ("TMPDIR", temporary.clone()),
            ("XDG_RUNTIME_DIR", temporary),
            ("XLAUNCH_CACHE", cache.display().to_string()),
        ];
        passed_on.chain(own.map(|(name, value)| (name.to_owned(), value))).collect()
    }
}

fn start_detached(start: &ExaminationStart, stdio: Stdio) -> io::Result<AgentProcess> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("xlaunch").args(DOCTOR).current_dir(start.temporary());
    command.env_clear().envs(start.environment());
    command.stdin(stdio.input).stdout(stdio.output).stderr(stdio.errors);
    sys::start_in_session(&mut command, None);
    let mut child = tokio::process::Command::from(command).spawn()?;
    // The child has not been waited for yet, so its process id cannot have been reused.
    let process = child.id().and_then(AgentProcess::of_child);
    tokio::spawn(async move { child.wait().await });
    // This error closes the stdin of the process, which ends it.
    process.ok_or_else(|| io::Error::other("failed to open its process"))
}

async fn read(from: &mut (impl AsyncRead + Unpin)) -> Vec<u8> {
    let mut text = Vec::new();
    // Errors are ignored: incomplete text does not parse as a report.
    let _ = from.take(MAX_OUTPUT_BYTES).read_to_end(&mut text).await;
    text
}

fn ending(output: &[u8], errors: &[u8]) -> Ending {
    if let Ok(report) = serde_json::from_slice::<Report>(output) {
        return Ending::Report(report);
    }
    let errors = String::from_utf8_lossy(errors);
    let last = errors.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it printed no report");
    Ending::Broken(bounded(format!("the examination failed: {last}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_without_a_report_is_explained_by_the_last_error() {
        let report = Report { healthy: true, findings: Vec::new() };
        let json = serde_json::to_vec(&report).unwrap();
        assert_eq!(ending(&json, b"a warning\n"), Ending::Report(report));
        let broken = |output: &[u8], errors: &[u8]| match ending(output, errors) {
            Ending::Broken(problem) => problem,
            other => panic!("{other:?}"),
        };
        assert_eq!(broken(&json[1..], b"x\nerror: y\n\n"), "the examination failed: error: y");
        assert_eq!(broken(b"", b""), "the examination failed: it printed no report");
    }
}
