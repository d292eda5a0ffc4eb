//! Waits, on a thread of its own, until a preloading process has imported its modules, and collects their output.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use serde::Deserialize;
use tokio::sync::mpsc;

use super::channel;
use xlaunch_host::spawn::exit_status;

/// Limit on the output of the imports that is kept.
const MAX_OUTPUT_BYTES: usize = 64 << 10;

/// Result of the imports.
#[derive(Debug)]
pub(crate) struct Imported {
    /// Names of threads that the imports left running, or the reason why workers cannot be forked.
    pub(crate) threads: Result<Vec<String>, String>,
    /// Output of the imports to stdout and stderr, up to the limit.
    pub(crate) output: String,
    /// Number of output bytes beyond the limit.
    pub(crate) omitted: u64,
}

/// Output of the imports so far.
#[derive(Debug, Default)]
struct Output {
    kept: Vec<u8>,
    /// Number of bytes that did not fit into `kept`.
    omitted: u64,
}

/// The report of the preloading process.
#[derive(Debug, Deserialize)]
struct Report {
    error: Option<String>,
    threads: Vec<String>,
}

/// Sends the result to `imported` when the imports are done or the process has exited. Reads the process's output to
/// the end.
pub(super) fn watch(
    channel: UnixStream,
    mut stderr: File,
    pidfd: Arc<OwnedFd>,
    imported: mpsc::UnboundedSender<Imported>,
) -> io::Result<()> {
    std::thread::Builder::new().name("preload".into()).spawn(move || {
        let mut output = Output::default();
        let threads = wait(&channel, &mut stderr, &pidfd, &mut output);
        drop((channel, pidfd));
        let Output { kept, omitted } = output;
        let output = String::from_utf8_lossy(&kept).into_owned();
        // The driver is gone if the job has been stopped.
        let _ = imported.send(Imported { threads, output, omitted });
        // Keep reading: a thread of a module must not block on a full pipe.
        let _ = io::copy(&mut stderr, &mut io::sink());
    })?;
    Ok(())
}

fn wait(
    channel: &UnixStream,
    stderr: &mut File,
    pidfd: &OwnedFd,
    output: &mut Output,
) -> Result<Vec<String>, String> {
    let (mut open, mut printing) = (true, true);
    loop {
        // Polled in this order, so that output printed before the report is read first.
        let watched = [(open, channel.as_fd()), (true, pidfd.as_fd()), (printing, stderr.as_fd())];
        // poll reports the end of a descriptor even if no events are requested.
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

/// Reads the available output; false at the end.
fn read_some(stderr: &mut File, output: &mut Output) -> bool {
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
