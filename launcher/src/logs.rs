//! The output of workers: whole and unchanged to files, stderr also line by line to the console, its end kept for the
//! report.
//!
//! One thread per pipe does nothing but move bytes, so a noisy worker is slowed by the disk alone, and never waits for
//! the console: lines that the console does not take in time are left to the file.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use fs_err::File;
use tokio::sync::{mpsc, oneshot};

/// Lines of stderr that the failure report shows.
const TAIL: usize = 20;
/// Bytes of a line that the console shows; the file has all.
const LINE: usize = 4096;

/// The last lines that a worker wrote to stderr.
#[derive(Clone, Debug, Default)]
pub struct Tail(Arc<Mutex<VecDeque<String>>>);

impl Tail {
    /// The lines so far, oldest first.
    pub fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    fn push(&self, line: &str) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == TAIL {
            lines.pop_front();
        }
        lines.push_back(line.to_string());
    }
}

/// Copies `pipe` into `path` until its end, which the returned receiver reports.
pub fn to_file(pipe: impl Read + Send + 'static, path: &Path) -> std::io::Result<oneshot::Receiver<()>> {
    copy(pipe, path, |_| {})
}

/// Copies `pipe` into `path`, keeps its last lines in `tail` and offers every line to `console`.
pub fn to_file_and_console(
    pipe: impl Read + Send + 'static,
    path: &Path,
    tail: Tail,
    console: mpsc::Sender<String>,
) -> std::io::Result<oneshot::Receiver<()>> {
    let mut lines = Lines::default();
    copy(pipe, path, move |bytes| {
        lines.feed(bytes, |line| {
            tail.push(line);
            // A console that lags behind leaves the line to the file.
            let _ = console.try_send(line.to_string());
        });
    })
}

/// `look` sees every piece, then an empty one at the end.
fn copy(
    mut pipe: impl Read + Send + 'static,
    path: &Path,
    mut look: impl FnMut(&[u8]) + Send + 'static,
) -> std::io::Result<oneshot::Receiver<()>> {
    let mut file = File::create(path)?;
    let (done, end) = oneshot::channel();
    std::thread::Builder::new().name("log".into()).spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        let mut writable = true;
        loop {
            match pipe.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => {
                    // A full disk must not stop the worker: its output is drained all the same.
                    writable = writable && file.write_all(&buffer[..count]).is_ok();
                    look(&buffer[..count]);
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        look(&[]);
        // Nobody waits once the job has ended.
        let _ = done.send(());
    })?;
    Ok(end)
}

/// Cuts a stream of bytes into lines of bounded length.
#[derive(Debug, Default)]
struct Lines {
    line: Vec<u8>,
    /// The line is longer than [`LINE`]: the rest is skipped.
    cut: bool,
}

impl Lines {
    /// Calls `each` for every line that `bytes` complete; an empty piece completes the last one.
    fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(&str)) {
        if bytes.is_empty() && !self.line.is_empty() {
            self.flush(&mut each);
        }
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (text, ends) = match piece.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (piece, false),
            };
            let room = LINE.saturating_sub(self.line.len());
            self.cut |= text.len() > room;
            self.line.extend_from_slice(&text[..text.len().min(room)]);
            if ends {
                self.flush(&mut each);
            }
        }
    }

    fn flush(&mut self, each: &mut impl FnMut(&str)) {
        let text = String::from_utf8_lossy(&self.line);
        let text = text.trim_end_matches('\r');
        if self.cut {
            each(&format!("{text} [...]"))
        } else {
            each(text)
        }
        self.line.clear();
        self.cut = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(pieces: &[&[u8]]) -> Vec<String> {
        let (mut lines, mut out) = (Lines::default(), Vec::new());
        for piece in pieces.iter().chain([&&[][..]]) {
            lines.feed(piece, |line| out.push(line.to_string()));
        }
        out
    }

    #[test]
    fn lines_survive_any_cut_into_pieces() {
        assert_eq!(lines(&[b"a\nb", b"c\n", b"\nlast"]), ["a", "bc", "", "last"]);
        assert_eq!(lines(&[b"x\r\n", b"\xff\n"]), ["x", "\u{fffd}"]);
    }

    #[test]
    fn a_huge_line_is_cut_and_the_next_one_is_whole() {
        let huge = vec![b'y'; 3 * LINE];
        let out = lines(&[&huge, &huge, b"\nnext\n"]);
        assert_eq!((out.len(), out[0].len(), out[1].as_str()), (2, LINE + 6, "next"));
    }

    #[test]
    fn the_file_has_every_byte_and_the_tail_the_last_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stderr.log");
        let text: String = (0..100).map(|i| format!("line {i}\n")).collect();
        let (console, mut shown) = mpsc::channel(3);
        let tail = Tail::default();
        let pipe = std::io::Cursor::new(text.clone().into_bytes());
        let end = to_file_and_console(pipe, &path, tail.clone(), console).unwrap();
        end.blocking_recv().unwrap();
        assert_eq!(fs_err::read_to_string(path).unwrap(), text);
        assert_eq!((tail.lines().len(), tail.lines()[19].as_str()), (20, "line 99"));
        assert_eq!(shown.blocking_recv().unwrap(), "line 0");
    }
}
