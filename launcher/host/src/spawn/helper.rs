//! Runs a short-lived helper program, such as a debugger, and collects its output. The program has a time limit and
//! does not outlive this process.

use std::process::{ChildStderr, ChildStdout, Command};
use std::time::{Duration, Instant};

use super::{children, sys};

/// Interval between checks whether a program has exited.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Result of a helper program.
#[derive(Debug)]
pub struct Done<T> {
    /// `None` if the program was killed at its time limit.
    pub success: Option<bool>,
    pub stdout: T,
    pub stderr: T,
}

/// Runs a command with piped output. Both readers must read to the end. Blocks.
pub fn run<T: Send + Default>(
    mut command: Command,
    timeout: Duration,
    read_stdout: impl FnOnce(ChildStdout) -> T + Send,
    read_stderr: impl FnOnce(ChildStderr) -> T + Send,
) -> std::io::Result<Done<T>> {
    // The signal is tied to the calling thread, which waits for the program and so outlives it.
    sys::die_with_parent(&mut command);
    let mut child = children::spawn(&mut command)?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let done = std::thread::scope(|scope| {
        let thread = || std::thread::Builder::new().name("helper".into());
        let stdout = thread().spawn_scoped(scope, || stdout.map(read_stdout).unwrap_or_default());
        let stderr = thread().spawn_scoped(scope, || stderr.map(read_stderr).unwrap_or_default());
        let (stdout, stderr) = match (stdout, stderr) {
            (Ok(stdout), Ok(stderr)) => (stdout, stderr),
            (Err(error), _) | (_, Err(error)) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(error);
            }
        };
        let deadline = Instant::now() + timeout;
        let success = loop {
            match child.try_wait() {
                Ok(Some(status)) => break Some(status.success()),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(POLL_INTERVAL),
                // Killing a child that has not been waited for cannot fail.
                _ => break child.kill().and_then(|()| child.wait()).map(|_| None).unwrap_or(None),
            }
        };
        // A panic has been printed already.
        let [stdout, stderr] = [stdout, stderr].map(|thread| thread.join().unwrap_or_default());
        Ok(Done { success, stdout, stderr })
    });
    children::forget(child.id());
    done
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::Stdio;

    use super::*;

    fn run_shell(script: &str, timeout: Duration) -> Done<String> {
        fn read(mut output: impl Read) -> String {
            let mut text = String::new();
            output.read_to_string(&mut text).map(|_| text).unwrap_or_default()
        }
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped());
        run(command, timeout, read, read).unwrap()
    }

    #[test]
    fn output_and_success_are_returned_and_a_late_program_is_killed() {
        let done = run_shell("echo out; echo err >&2; exit 3", Duration::from_secs(60));
        assert_eq!(
            (done.success, done.stdout.as_str(), done.stderr.as_str()),
            (Some(false), "out\n", "err\n")
        );
        let start = Instant::now();
        let late = run_shell("echo begun; exec sleep 1000", Duration::from_millis(300));
        assert_eq!((late.success, late.stdout.as_str()), (None, "begun\n"));
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    }
}
