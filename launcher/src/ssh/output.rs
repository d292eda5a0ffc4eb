//! The output of a host on the console of the launch.
//!
//! Bytes are passed on unchanged, in whole lines, as an agent does for the ranks of its node. Only lines of `xlaunch`
//! itself are marked with their host, except those of node rank 0, which reports for the job.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;
use xlaunch_agent::logs::console::{Console, View};

const CHUNK_BYTES: usize = 64 << 10;
/// Age at which an unfinished line, such as a prompt, is printed.
const PARTIAL_LINE_DELAY: Duration = Duration::from_millis(100);
/// Time without output after which a pipe is abandoned that a background process of the ssh client keeps open.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);
/// Prefixes of lines that `xlaunch` itself prints.
const OWN_LINES: [&[u8]; 4] = [b"xlaunch: ", b"error: ", b"warning: ", b"help: "];

/// A stream of one host on the console.
#[derive(Debug)]
pub(super) struct HostStream {
    view: View,
    tagger: Option<Tagger>,
    /// Time at which the unfinished line began.
    held: Option<Instant>,
}

impl HostStream {
    /// Creates a stream. `host` marks the lines of `xlaunch` itself.
    pub(super) fn new(console: &Arc<Console>, host: Option<&str>) -> Self {
        // An empty prefix keeps lines whole.
        let view = View::new(console.clone(), Some(Vec::new()));
        Self { view, tagger: host.map(Tagger::new), held: None }
    }

    fn feed(&mut self, bytes: &[u8]) {
        match &mut self.tagger {
            Some(tagger) => self.view.feed(&tagger.feed(bytes)),
            None => self.view.feed(bytes),
        }
        let begun = self.held.filter(|_| !bytes.contains(&b'\n'));
        self.held = self.is_partial().then(|| begun.unwrap_or_else(Instant::now));
    }

    /// Prints an unfinished line once it is due.
    fn flush(&mut self) {
        if let Some(tagger) = &mut self.tagger {
            self.view.feed(&tagger.flush());
        }
        if self.held.is_none_or(|since| since.elapsed() >= self.view.partial_line_delay()) {
            self.view.flush();
            self.held = None;
        }
    }

    /// Prints the rest at the end of the stream.
    fn end(&mut self) {
        if let Some(tagger) = &mut self.tagger {
            self.view.feed(&tagger.flush());
        }
        self.view.end();
    }

    fn is_partial(&self) -> bool {
        self.view.has_partial_line() || self.tagger.as_ref().is_some_and(|tagger| !tagger.held.is_empty())
    }
}

/// A task that moves a stream to the console.
#[derive(Debug)]
pub(super) struct Pump {
    task: JoinHandle<()>,
    /// Sum of the number of chunks read and the number of chunks printed.
    progress: Arc<AtomicU64>,
}

impl Pump {
    /// Starts the task. `early` is output that was read before.
    pub(super) fn start(
        early: Vec<u8>,
        from: impl AsyncRead + Unpin + Send + 'static,
        stream: HostStream,
    ) -> Self {
        let progress = Arc::<AtomicU64>::default();
        Self { task: tokio::spawn(pump(early, from, stream, progress.clone())), progress }
    }

    /// Waits for the end of the stream of a client that has exited.
    pub(super) async fn finish(mut self) {
        loop {
            let before = self.progress.load(Ordering::Relaxed);
            if timeout(DRAIN_TIMEOUT, &mut self.task).await.is_ok() {
                return;
            }
            let now = self.progress.load(Ordering::Relaxed);
            // If the count is odd, a chunk waits for a slow console.
            if now == before && now.is_multiple_of(2) {
                self.task.abort();
                return;
            }
        }
    }
}

async fn pump(
    early: Vec<u8>,
    mut from: impl AsyncRead + Unpin,
    mut stream: HostStream,
    progress: Arc<AtomicU64>,
) {
    let mut chunk = early;
    loop {
        let is_flush = chunk.is_empty();
        progress.fetch_add(1, Ordering::Relaxed);
        // Printing may block: the console may be slow, or another stream may be using it.
        let printed = spawn_blocking(move || {
            if is_flush {
                stream.flush()
            } else {
                stream.feed(&chunk)
            }
            (stream, chunk)
        });
        let Ok(returned) = printed.await else { return };
        (stream, chunk) = returned;
        progress.fetch_add(1, Ordering::Relaxed);
        chunk.resize(CHUNK_BYTES, 0);
        let read = if stream.is_partial() {
            timeout(PARTIAL_LINE_DELAY, from.read(&mut chunk)).await
        } else {
            Ok(from.read(&mut chunk).await)
        };
        match read {
            Ok(Ok(count @ 1..)) => chunk.truncate(count),
            Ok(_) => break,
            // A line that has been unfinished for this long is printed as it is.
            Err(_) => chunk.clear(),
        }
    }
    let _ = spawn_blocking(move || stream.end()).await;
}

/// Marks lines of `xlaunch` itself with their host.
#[derive(Debug)]
struct Tagger {
    tag: Vec<u8>,
    /// The beginning of a line, as long as it may still match one of [`OWN_LINES`].
    held: Vec<u8>,
    within_line: bool,
}

impl Tagger {
    fn new(host: &str) -> Self {
        Self { tag: format!("[{host}] ").into_bytes(), held: Vec::new(), within_line: false }
    }

    /// Takes the next bytes of the stream, and returns the bytes to print.
    fn feed(&mut self, mut bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(bytes.len() + self.tag.len());
        while let Some((first, rest)) = bytes.split_first() {
            if self.within_line {
                let end = bytes.iter().position(|byte| *byte == b'\n').map(|at| at + 1);
                let (line, after) = bytes.split_at(end.unwrap_or(bytes.len()));
                out.extend_from_slice(line);
                self.within_line = end.is_none();
                bytes = after;
                continue;
            }
            bytes = rest;
            self.held.push(*first);
            let is_own = OWN_LINES.contains(&self.held.as_slice());
            if is_own {
                out.extend_from_slice(&self.tag);
            }
            if is_own || !OWN_LINES.iter().any(|own| own.starts_with(&self.held)) {
                out.append(&mut self.held);
                self.within_line = *first != b'\n';
            }
        }
        out
    }

    /// Returns the bytes that are held back, at the end of the stream or of a line that stays unfinished.
    fn flush(&mut self) -> Vec<u8> {
        self.within_line |= !self.held.is_empty();
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lines_of_xlaunch_itself_are_marked() {
        let text =
            b"xlaunch: 2 x CPU\nxlaun\nstep 1\n\nwarning: x\n  error: no\nerror: yes\nrank 0: error: no\n";
        let expected = "[b] xlaunch: 2 x CPU\nxlaun\nstep 1\n\n[b] warning: x\n  error: no\n\
            [b] error: yes\nrank 0: error: no\n";
        for size in [1, 2, 7, text.len()] {
            let mut tagger = Tagger::new("b");
            let mut shown: Vec<u8> = text.chunks(size).flat_map(|chunk| tagger.feed(chunk)).collect();
            shown.extend(tagger.flush());
            assert_eq!(String::from_utf8(shown).unwrap(), expected, "in chunks of {size}");
        }
    }

    #[test]
    fn prompt_that_looks_like_the_start_of_an_own_line_is_not_kept_back() {
        let mut tagger = Tagger::new("b");
        assert!(tagger.feed(b"err").is_empty());
        assert_eq!(tagger.flush(), b"err");
        assert_eq!(tagger.feed(b"or: x\nerror: y\n"), b"or: x\n[b] error: y\n");
    }

    #[test]
    fn invalid_utf8_passes_unchanged() {
        let mut tagger = Tagger::new("b");
        assert_eq!(tagger.feed(b"\xff\xfe\n\0w\n"), b"\xff\xfe\n\0w\n");
    }
}
