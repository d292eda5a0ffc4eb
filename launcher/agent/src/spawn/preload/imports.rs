//! Waits for the imports of a preloading process, in a thread of its own, and collects what they print.

use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ChildStderr;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use serde::Deserialize;
use tokio::sync::mpsc;

use super::channel;
use crate::spawn::exit_status;

/// Output of the imports that is kept.
const MAX_OUTPUT_BYTES: usize = 64 << 10;

/// What became of the imports.
#[derive(Debug)]
pub(crate) struct Imported {
    /// Names of the threads that they left, or why workers cannot be forked.
    pub(crate) threads: Result<Vec<String>, String>,
    /// What they wrote to stdout and stderr.
    pub(crate) output: String,
    /// Bytes of output that are not in it.
    pub(crate) omitted: u64,
}

/// What the imports have written so far.
#[derive(Debug, Default)]
struct Output {
    kept: Vec<u8>,
    /// Bytes that followed.
    omitted: u64,
}

/// The report of the preloading process.
#[derive(Debug, Deserialize)]
struct Report {
    error: Option<String>,
    threads: Vec<String>,
}

/// Sends the result to `imported` when the imports are done or the process has exited. Its output is read to the end.
pub(super) fn watch(
    channel: UnixStream,
    mut stderr: ChildStderr,
    pidfd: Arc<OwnedFd>,
    imported: mpsc::UnboundedSender<Imported>,
) -> io::Result<()> {
    std::thread::Builder::new().name("preload".into()).spawn(move || {
        let mut output = Output::default();
        let threads = wait(&channel, &mut stderr, &pidfd, &mut output);
        drop((channel, pidfd));
        let Output { kept, omitted } = output;
        let output = String::from_utf8_lossy(&kept).into_owned();
        // The driver is gone if the job was stopped meanwhile.
        let _ = imported.send(Imported { threads, output, omitted });
        // A module's thread must not block on a full pipe.
        let _ = io::copy(&mut stderr, &mut io::sink());
    })?;
    Ok(())
}

fn wait(
    channel: &UnixStream,
    stderr: &mut ChildStderr,
    pidfd: &OwnedFd,
    output: &mut Output,
) -> Result<Vec<String>, String> {
    let (mut open, mut printing) = (true, true);
    loop {
        // In this order: what was printed before the report is then seen with it.
        let watched = [(open, channel.as_fd()), (true, pidfd.as_fd()), (printing, stderr.as_fd())];
        // A descriptor without events is still reported at its end.
        let mut polled: Vec<_> = watched
            .iter()
            .filter(|(wanted, _)| *wanted)
            .map(|(_, fd)| PollFd::new(fd, PollFlags::IN))
            .collect();
        match poll(&mut polled, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.to_string()),
            Ok(_) => {}
        }
        let mut ready = polled.iter().map(|it| !it.revents().is_empty());
        let [reported, exited, printed] = watched.map(|(wanted, _)| wanted && ready.next() == Some(true));
        if printed {
            printing = read_some(stderr, output);
        } else if reported {
            match channel::receive::<Report>(channel) {
                Ok(Report { error: Some(error), .. }) => return Err(error),
                Ok(Report { threads, .. }) => return Ok(threads),
                Err(_) => open = false,
            }
        } else if exited {
            return Err(format!("the interpreter ended during the imports: {}", exit_status(pidfd.as_fd())));
        }
    }
}

/// Reads what there is; false at the end.
fn read_some(stderr: &mut ChildStderr, output: &mut Output) -> bool {
    let mut buffer = [0; 4096];
    match stderr.read(&mut buffer) {
        Ok(0) => false,
        Ok(length) => {
            let kept = length.min(MAX_OUTPUT_BYTES.saturating_sub(output.kept.len()));
            output.kept.extend_from_slice(&buffer[..kept]);
            output.omitted += (length - kept) as u64;
            true
        }
        Err(error) => error.kind() == io::ErrorKind::Interrupted,
    }
}
