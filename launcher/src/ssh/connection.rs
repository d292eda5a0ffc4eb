//! One ssh client: started, and followed until its host is ready to start the job.
//!
//! The client runs in its own session, so it does not get Ctrl-C from the terminal, which is passed on as a byte
//! instead, and it cannot ask for a password. It is killed when this process dies.

use std::ffi::OsStr;
use std::pin::pin;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;
use xlaunch_host::spawn::sys;

use super::outcome::Failure;
use super::wire::{GREETING, READY};

/// Maximum time for ssh to connect and for the host to answer. ssh's own timeouts are shorter, as their messages
/// explain more.
const START_TIMEOUT: Duration = Duration::from_secs(90);
/// Time for a client to exit after its output has ended.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum size of output before the greeting, such as that of a login script.
const MAX_EARLY_BYTES: usize = 64 << 10;

/// A host that waits for the start signal.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) child: Child,
    pub(super) input: ChildStdin,
    pub(super) stdout: BufReader<ChildStdout>,
    pub(super) stderr: ChildStderr,
    /// The output on stderr so far.
    pub(super) early_stderr: Vec<u8>,
}

/// Returns the command of the client that runs `remote_command` on `host`.
pub(super) fn command(ssh: &[String], host: &str, remote_command: &OsStr) -> Command {
    let (program, arguments) =
        ssh.split_first().map_or(("ssh", ssh), |(program, rest)| (program.as_str(), rest));
    let mut command = std::process::Command::new(program);
    command.args(arguments).arg(host).arg(remote_command);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    sys::start_in_session(&mut command, None);
    sys::die_with_parent(&mut command);
    let mut command = Command::from(command);
    command.kill_on_drop(true);
    command
}

/// Starts a client and sends the description.
pub(super) async fn open(mut command: Command, description: &[u8], build: &str) -> Result<Ready, Failure> {
    let mut child = command.spawn().map_err(|error| Failure::NoClient(error.to_string()))?;
    let (Some(mut input), Some(stdout), Some(mut stderr)) =
        (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        return Err(Failure::NoClient("it has no pipes".into()));
    };
    let mut stdout = BufReader::new(stdout);
    let mut early_stderr = Vec::new();
    let answer = {
        let mut collected = pin!(collect(&mut stderr, &mut early_stderr));
        let handshake = handshake(&mut input, &mut stdout, description, build);
        let mut handshake = pin!(timeout(START_TIMEOUT, handshake));
        tokio::select! {
            answer = &mut handshake => answer,
            () = &mut collected => handshake.await,
        }
    };
    match answer {
        // Before it goes to the background, ssh neither sends nor receives data for the command.
        Ok(Answer::Ready) if matches!(child.try_wait(), Ok(Some(status)) if status.success()) => {
            Err(Failure::Background)
        }
        Ok(Answer::Ready) => Ok(Ready { child, input, stdout, stderr, early_stderr }),
        Ok(Answer::OtherBuild(other)) => Err(Failure::OtherBuild(other)),
        Ok(Answer::Ended { greeted, printed }) => {
            drop(input);
            // A background process of the client may keep the pipe open.
            let _ = timeout(EXIT_TIMEOUT, collect(&mut stderr, &mut early_stderr)).await;
            let status = timeout(EXIT_TIMEOUT, child.wait()).await.ok().and_then(Result::ok);
            let mut stderr = text(&early_stderr);
            if stderr.trim().is_empty() {
                // nologin(8) prints its reason to stdout.
                stderr = printed;
            }
            Err(Failure::Ended { status: status.and_then(|status| status.code()), greeted, stderr })
        }
        Err(_) => Err(Failure::Silent { seconds: START_TIMEOUT.as_secs(), stderr: text(&early_stderr) }),
    }
}

enum Answer {
    Ready,
    OtherBuild(String),
    /// The output has ended, and contained `printed` before the greeting.
    Ended {
        greeted: bool,
        printed: String,
    },
}

async fn handshake(
    input: &mut ChildStdin,
    stdout: &mut BufReader<ChildStdout>,
    description: &[u8],
    build: &str,
) -> Answer {
    let mut printed = String::new();
    let theirs = loop {
        let Some(line) = line(stdout).await else { return Answer::Ended { greeted: false, printed } };
        // A login script may have begun the line, for example with a title for the terminal.
        if let Some((_, build)) = line.split_once(GREETING) {
            break build.to_owned();
        }
        if printed.len() > MAX_EARLY_BYTES {
            return Answer::Ended { greeted: false, printed };
        }
        printed += &line;
        printed.push('\n');
    };
    if theirs != build {
        return Answer::OtherBuild(theirs);
    }
    // If the client has ended, its exit code says why.
    let _ = input.write_all(description).await;
    match line(stdout).await {
        Some(line) if line == READY => Answer::Ready,
        _ => Answer::Ended { greeted: true, printed },
    }
}

/// Reads a line, without its line feed; `None` at the end of the stream.
async fn line(from: &mut BufReader<ChildStdout>) -> Option<String> {
    let mut line = Vec::new();
    let mut from = from.take(MAX_EARLY_BYTES as u64);
    from.read_until(b'\n', &mut line).await.ok()?;
    let line = line.strip_suffix(b"\n")?;
    Some(text(line.strip_suffix(b"\r").unwrap_or(line)))
}

/// Reads to the end, and keeps the last [`MAX_EARLY_BYTES`].
async fn collect(from: &mut (impl AsyncRead + Unpin), kept: &mut Vec<u8>) {
    let mut chunk = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut chunk).await {
        kept.extend(chunk.iter().take(count));
        let excess = kept.len().saturating_sub(MAX_EARLY_BYTES);
        kept.drain(..excess);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn greeting_may_follow_an_unfinished_line_of_a_login_script() {
        let mut client = Command::new("sh");
        let script =
            format!("printf 'Welcome\\n\\033]0;title\\007'; echo '{GREETING}BUILD'; echo {READY}; cat");
        client.arg("-c").arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let opened = open(client, b"", "BUILD").await;
        assert!(opened.is_ok(), "{opened:?}");
    }

    #[tokio::test]
    async fn client_in_the_background_is_refused() {
        let mut client = Command::new("sh");
        let script = format!("(sleep 0.2; echo '{GREETING}BUILD'; echo {READY}; sleep 1) & exit 0");
        client.arg("-c").arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        assert_eq!(open(client, b"", "BUILD").await.map(drop), Err(Failure::Background));
    }

    #[tokio::test]
    async fn reason_on_stdout_is_kept_if_there_is_none_on_stderr() {
        let reason = async |script: &str| {
            let mut client = Command::new("sh");
            client.arg("-c").arg(script);
            client.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            match open(client, b"", "BUILD").await {
                Err(Failure::Ended { stderr, .. }) => stderr,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(reason("echo 'not available'; exit 1").await, "not available\n");
        assert_eq!(reason("echo welcome; echo refused >&2; exit 1").await, "refused\n");
    }
}
