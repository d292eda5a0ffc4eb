//! Runs the process that examines GPUs: this program as `xlaunch doctor`, under the daemon's user. The daemon itself
//! never calls CUDA.
//!
//! ```text
//! files of the last examination removed --> process (under systemd: a unit) --its stdout--> report
//!                                             ^ ends when its stdin does, as at the timeout and with the daemon
//! ```
//! The process uses no files or directories that a job's user can write: a full or manipulated `/tmp` must not make a
//! GPU fail. Its cache is kept, because later examinations compare with the rates in it.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::unix::pipe;
use tokio::time::timeout;
use tracing::warn;
use xlaunch_host::doctor::Report;
use xlaunch_host::spawn::sys;

use super::process::AgentProcess;
use super::start::{DOCTOR, ExaminationStart, Stdio};
use super::unit::Unit;
use super::{Agent, AgentStarter};
use crate::state::bounded;
use crate::state::examination::ExaminationEnd;

/// Time for the process to end after its stdin has been closed; then it is killed.
pub(crate) const EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit on the bytes read from each output. Reports are smaller.
const MAX_OUTPUT_BYTES: u64 = 4 << 20;
impl AgentStarter {
    /// Examines GPUs. Takes at most the timeout plus [`EXIT_TIMEOUT`].
    pub(crate) async fn examine(&self, start: &ExaminationStart) -> ExaminationEnd {
        match self.run_examination(start).await {
            Ok(ending) => ending,
            Err(error) => ExaminationEnd::Broken(format!("failed to start the examination: {error}")),
        }
    }

    async fn run_examination(&self, start: &ExaminationStart) -> io::Result<ExaminationEnd> {
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
            Self::Detached(_) => start_detached(start, stdio).map(Agent::Process)?,
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
            Err(_) => ExaminationEnd::TimedOut(start.timeout),
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

fn ending(output: &[u8], errors: &[u8]) -> ExaminationEnd {
    if let Ok(report) = serde_json::from_slice::<Report>(output) {
        return ExaminationEnd::Report(report);
    }
    let errors = String::from_utf8_lossy(errors);
    let last = errors.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it printed no report");
    ExaminationEnd::Broken(bounded(format!("the examination failed: {last}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_without_a_report_is_explained_by_the_last_error() {
        let report = Report { healthy: true, findings: Vec::new() };
        let json = serde_json::to_vec(&report).unwrap();
        assert_eq!(ending(&json, b"a warning\n"), ExaminationEnd::Report(report));
        let broken = |output: &[u8], errors: &[u8]| match ending(output, errors) {
            ExaminationEnd::Broken(problem) => problem,
            other => panic!("{other:?}"),
        };
        assert_eq!(broken(&json[1..], b"x\nerror: y\n\n"), "the examination failed: error: y");
        assert_eq!(broken(b"", b""), "the examination failed: it printed no report");
    }
}
