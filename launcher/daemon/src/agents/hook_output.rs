//! Output of a detached hook: its lines for the daemon's log, up to a limit, and its last line for the reason of a
//! failure.
//!
//! A hook may leave processes behind that keep its output open. So the streams are read until they end, but the hook's
//! end waits for them only for [`HOOK_OUTPUT_TIMEOUT`].

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::task::JoinHandle;
use tracing::info;
use xlaunch_host::escape::escaped;

use super::start::HookStart;

/// Number of bytes of each stream that get into the daemon's log.
const MAX_HOOK_LOG_BYTES: usize = 16 << 10;
/// Length to which a line is cut.
const MAX_HOOK_LINE_BYTES: usize = 512;
const HOOK_READ_BYTES: usize = 16 << 10;
/// Time for the last output of a hook that has exited.
const HOOK_OUTPUT_TIMEOUT: Duration = Duration::from_millis(500);

/// One stream of a hook, which is read in the background.
pub(super) struct HookStream {
    lines: Arc<Mutex<Lines>>,
    reader: JoinHandle<()>,
}

impl HookStream {
    /// Reads the stream. Its lines are logged, unless the hook runs as the job's user, who must not write to the
    /// daemon's log.
    pub(super) fn read(hook: &HookStart, mut from: impl AsyncRead + Unpin + Send + 'static) -> Self {
        let (job, moment, is_logged) = (hook.job, hook.moment, hook.uid.is_none());
        let log = move |line: &str| {
            if is_logged {
                info!(job, "{moment} of job {job}: {line}");
            }
        };
        let lines = Arc::new(Mutex::new(Lines::default()));
        let shared = lines.clone();
        let reader = tokio::spawn(async move {
            let lines = || shared.lock().unwrap_or_else(PoisonError::into_inner);
            let mut buffer = vec![0; HOOK_READ_BYTES];
            while let Ok(read @ 1..) = from.read(&mut buffer).await {
                let complete = lines().push(buffer.get(..read).unwrap_or_default());
                complete.iter().for_each(|line| log(line));
            }
            let (rest, unlogged) = {
                let mut lines = lines();
                (lines.end_line(), lines.unlogged)
            };
            rest.iter().for_each(|line| log(line));
            if unlogged > 0 {
                log(&format!("{unlogged} bytes of its output are not in this log"));
            }
        });
        Self { lines, reader }
    }

    /// Returns the last line that is not empty, safe to print. Called when the hook has exited.
    pub(super) async fn last_line(mut self) -> Option<String> {
        // If it is still open, the lines so far count.
        let _ = tokio::time::timeout(HOOK_OUTPUT_TIMEOUT, &mut self.reader).await;
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).last.take()
    }
}

/// Splits output into lines. Memory is bounded.
#[derive(Debug, Default)]
struct Lines {
    /// Beginning of the current line.
    line: Vec<u8>,
    /// The last line that is not empty.
    last: Option<String>,
    logged: usize,
    unlogged: u64,
}

impl Lines {
    /// Adds output. Returns the complete lines to log.
    fn push(&mut self, output: &[u8]) -> Vec<String> {
        let mut complete = Vec::new();
        for part in output.split_inclusive(|byte| *byte == b'\n') {
            let text = part.strip_suffix(b"\n").unwrap_or(part);
            let (kept, cut) = text.split_at(text.len().min(MAX_HOOK_LINE_BYTES - self.line.len()));
            self.line.extend_from_slice(kept);
            self.unlogged += cut.len() as u64;
            if text.len() < part.len() {
                complete.extend(self.end_line());
            }
        }
        complete
    }

    /// Ends the current line. Returns it if it is to be logged.
    fn end_line(&mut self) -> Option<String> {
        let line = std::mem::take(&mut self.line);
        let text = escaped(String::from_utf8_lossy(&line).trim_end());
        if text.is_empty() {
            return None;
        }
        self.last = Some(text.clone());
        if self.logged + line.len() > MAX_HOOK_LOG_BYTES {
            // Later lines are left out, too, even short ones.
            self.logged = MAX_HOOK_LOG_BYTES;
            self.unlogged += line.len() as u64;
            return None;
        }
        self.logged += line.len();
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_split_escaped_and_cut() {
        let mut lines = Lines::default();
        assert_eq!(lines.push(b"one\r\n\n\x1b[2Jtw"), ["one"]);
        assert_eq!(lines.push(b"o\n"), ["\\u{1b}[2Jtwo"]);
        assert_eq!(lines.push(&[b'x'; MAX_HOOK_LINE_BYTES + 7]), [""; 0]);
        assert_eq!(lines.push(b"x\n"), ["x".repeat(MAX_HOOK_LINE_BYTES)]);
        assert_eq!(lines.unlogged, 8);
        assert_eq!((lines.push(b"end"), lines.end_line().as_deref()), (Vec::new(), Some("end")));
        assert_eq!((lines.end_line(), lines.last.as_deref()), (None, Some("end")));
    }

    #[test]
    fn long_output_is_logged_up_to_the_limit_and_its_last_line_is_kept() {
        let mut lines = Lines::default();
        let mut logged = 0;
        for _ in 0..10_000 {
            logged += lines.push(b"123456789\n").len();
        }
        assert_eq!(logged, MAX_HOOK_LOG_BYTES / 9);
        assert_eq!(lines.unlogged, 9 * (10_000 - logged as u64));
        assert!(lines.push(b"no scratch here\n").is_empty());
        assert_eq!(lines.last.as_deref(), Some("no scratch here"));
    }
}
