//! xlaunch's own stdout and stderr, which all ranks share.
//!
//! Writers take turns in the order in which they ask, and write to the descriptor themselves. So there is no queue,
//! memory is bounded, and a rank that floods the console is throttled to its share. Lines of two writers never mix: a
//! writer that finds another writer's unfinished line terminates it first, and the rest of that line is printed later,
//! after a mark.

use std::fs::File;
use std::io::{ErrorKind, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use xlaunch_host::spawn::output::follow_size;

use super::lines::{Lines, Piece};
use super::lock;
use crate::stderr::wait_for_room;

/// Limit on the bytes that a writer writes in one turn. A single line may exceed it.
const TURN_BYTES: usize = 32 << 10;
/// Age at which an unfinished line, such as a prompt, is printed.
pub(super) const PARTIAL_LINE_DELAY: Duration = Duration::from_millis(100);
/// Age at which an unfinished line is printed although it interrupts that of another writer. The delay doubles with
/// each interruption, so that ranks that print dots do not get a line for each dot.
const INTERRUPTION_DELAY: Duration = Duration::from_secs(1);
const MAX_INTERRUPTION_DELAY: Duration = Duration::from_secs(64);
/// Limit on the wait of bytes that pass unchanged for the end of another writer's unfinished line, such as that of a
/// progress bar. The two streams of a rank arrive by different ways, and not always in the order of writing.
const LINE_END_TIMEOUT: Duration = Duration::from_millis(5);
const LINE_END_POLL_INTERVAL: Duration = Duration::from_micros(500);
/// Mark before the rest of an interrupted line.
const CONTINUATION_MARK: &[u8] = b"[...]";
/// Writer id of xlaunch itself.
const OWN_WRITER: u64 = 0;

/// An output descriptor that several writers share.
#[derive(Debug)]
pub struct Console {
    pub(super) terminal: bool,
    queue: Mutex<Queue>,
    turn_over: Condvar,
    fd: File,
    /// The writer of an unfinished line.
    open: Mutex<Option<u64>>,
    /// Bytes written so far.
    pub(super) written: AtomicU64,
    /// Bytes that could not be written.
    lost: AtomicU64,
    /// The reason of the first failed write.
    reason: OnceLock<String>,
    next_writer: AtomicU64,
}

/// A ticket lock, which serves writers in the order of their requests.
#[derive(Debug, Default)]
struct Queue {
    next_ticket: u64,
    now_serving: u64,
}

impl Console {
    pub(super) fn new(fd: OwnedFd) -> Arc<Self> {
        let terminal = fd.is_terminal();
        Arc::new(Self {
            terminal,
            queue: Mutex::default(),
            turn_over: Condvar::new(),
            fd: fd.into(),
            open: Mutex::default(),
            written: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            reason: OnceLock::new(),
            next_writer: AtomicU64::new(OWN_WRITER + 1),
        })
    }

    /// Opens xlaunch's stdout and stderr, as a single console if both are the same terminal, pipe or file.
    pub fn own() -> std::io::Result<[Arc<Self>; 2]> {
        let (out, err) = (std::io::stdout(), std::io::stderr());
        let same = match (rustix::fs::fstat(&out), rustix::fs::fstat(&err)) {
            (Ok(out), Ok(err)) => (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino),
            _ => false,
        };
        let stdout = Self::new(out.as_fd().try_clone_to_owned()?);
        let stderr = if same { stdout.clone() } else { Self::new(err.as_fd().try_clone_to_owned()?) };
        Ok([stdout, stderr])
    }

    /// Gives a worker's terminal the size of this one.
    pub(super) fn resize(&self, workers: &File) {
        follow_size(workers, &self.fd);
    }

    /// Prints xlaunch's own lines.
    pub(super) fn print(&self, lines: &[u8]) {
        self.write(OWN_WRITER, true, b"", lines);
    }

    /// Ends an unfinished line, so that the next text begins a line even if xlaunch writes it directly.
    pub(super) fn end_line(&self) {
        self.turn(|open| {
            if open.take().is_some() {
                self.write_all(b"\n");
            }
        });
    }

    /// Writes `text` in one turn. If `fresh`, the text starts a line, otherwise it continues one. `prefix` precedes it
    /// unless it continues this writer's own unfinished line.
    fn write(&self, writer: u64, fresh: bool, prefix: &[u8], text: &[u8]) {
        self.turn(|open| {
            let interrupts = open.is_some_and(|open| open != writer);
            let (lead, text) = if *open == Some(writer) && !fresh {
                (Vec::new(), text)
            } else {
                line_start(fresh, prefix, text)
            };
            if text.is_empty() {
                return;
            }
            let newline: &[u8] = if interrupts { b"\n" } else { b"" };
            // In a single write, as other processes may write to the same file.
            self.write_all(&[newline, &lead, text].concat());
            *open = (!text.ends_with(b"\n")).then_some(writer);
        });
    }

    /// Writes bytes unchanged, in one turn.
    fn pass(&self, writer: u64, bytes: &[u8]) {
        let give_up = Instant::now() + LINE_END_TIMEOUT;
        while self.has_line_of_another(writer) && Instant::now() < give_up {
            std::thread::sleep(LINE_END_POLL_INTERVAL);
        }
        self.turn(|open| {
            self.write_all(bytes);
            *open = (!bytes.ends_with(b"\n") && !bytes.ends_with(b"\r")).then_some(writer);
        });
    }

    fn has_line_of_another(&self, writer: u64) -> bool {
        lock(&self.open).is_some_and(|open| open != writer)
    }

    /// Waits for a turn, and runs `work`. A mutex alone would be unfair: a flooding writer would retake it before the
    /// others wake up.
    fn turn(&self, work: impl FnOnce(&mut Option<u64>)) {
        let mut queue = lock(&self.queue);
        let ticket = queue.next_ticket;
        queue.next_ticket += 1;
        while queue.now_serving != ticket {
            queue = self.turn_over.wait(queue).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        drop(queue);
        work(&mut lock(&self.open));
        lock(&self.queue).now_serving += 1;
        self.turn_over.notify_all();
    }

    /// Writes to the descriptor. Output to a closed console is lost, but the worker continues and the log files are
    /// complete.
    fn write_all(&self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match (&self.fd).write(bytes) {
                Ok(0) => return self.lose(bytes, &ErrorKind::WriteZero.into()),
                Ok(count) => {
                    bytes = &bytes[count..];
                    self.written.fetch_add(count as u64, Ordering::Relaxed);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Another program may have set the shared terminal to non-blocking.
                Err(error) if error.kind() == ErrorKind::WouldBlock => wait_for_room(&self.fd),
                Err(error) => return self.lose(bytes, &error),
            }
        }
    }

    fn lose(&self, bytes: &[u8], error: &std::io::Error) {
        self.lost.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.reason.get_or_init(|| error.to_string());
    }

    /// Number of bytes that could not be written, and the reason.
    pub(super) fn lost(&self) -> Option<(u64, &str)> {
        let lost = self.lost.load(Ordering::Relaxed);
        Some((lost, self.reason.get()?.as_str())).filter(|(lost, _)| *lost > 0)
    }
}

/// Returns the bytes to print before `text` if the console is not at the end of the writer's own unfinished line, and
/// the part of `text` that remains to be printed.
fn line_start<'a>(fresh: bool, prefix: &[u8], text: &'a [u8]) -> (Vec<u8>, &'a [u8]) {
    // The interrupted line has already been terminated, so its own line ending is dropped.
    let ended = text.strip_prefix(b"\n").or(text.strip_prefix(b"\r\n"));
    match ended {
        Some(after) if !fresh => (Vec::new(), after),
        // After a carriage return the text overwrites the line, so it is not a continuation.
        _ if fresh || text.starts_with(b"\r") => (prefix.to_vec(), text),
        _ => ([prefix, CONTINUATION_MARK].concat(), text),
    }
}

/// One stream of one rank on the console.
#[derive(Debug)]
pub struct View {
    console: Arc<Console>,
    writer: u64,
    /// `None` passes bytes through unchanged.
    lines: Option<Prefixed>,
}

#[derive(Debug)]
struct Prefixed {
    lines: Lines,
    prefix: Vec<u8>,
    /// The last byte was a carriage return: the next text overwrites the line, including its prefix.
    after_return: bool,
    /// Number of times that the current unfinished line has interrupted another writer's line.
    interruptions: u32,
}

impl View {
    /// Creates a stream whose lines get this prefix; with `None` bytes pass through unchanged.
    pub fn new(console: Arc<Console>, prefix: Option<Vec<u8>>) -> Self {
        let writer = console.next_writer.fetch_add(1, Ordering::Relaxed);
        let lines = prefix.map(|prefix| Prefixed {
            lines: Lines::default(),
            prefix,
            after_return: false,
            interruptions: 0,
        });
        Self { console, writer, lines }
    }

    /// Prints the lines that these bytes complete.
    pub fn feed(&mut self, bytes: &[u8]) {
        match &mut self.lines {
            None => bytes.chunks(TURN_BYTES).for_each(|part| self.console.pass(self.writer, part)),
            Some(Prefixed { lines, prefix, after_return, interruptions }) => {
                if bytes.contains(&b'\n') {
                    *interruptions = 0;
                }
                let mut turn = Turn::new(&self.console, self.writer, prefix, after_return);
                lines.feed(bytes, |piece| turn.push(piece));
                turn.end();
            }
        }
    }

    /// Prints an unfinished line.
    pub fn flush(&mut self) {
        let interrupts = self.would_interrupt();
        if let Some(Prefixed { lines, prefix, after_return, interruptions }) = &mut self.lines {
            *interruptions += u32::from(interrupts);
            let mut turn = Turn::new(&self.console, self.writer, prefix, after_return);
            lines.flush(|piece| turn.push(piece));
            turn.end();
        }
    }

    /// Prints the remaining bytes at the end of the stream.
    pub fn end(&mut self) {
        if let Some(Prefixed { lines, prefix, after_return, .. }) = &mut self.lines {
            let mut turn = Turn::new(&self.console, self.writer, prefix, after_return);
            lines.end(|piece| turn.push(piece));
            turn.end();
        }
    }

    /// Age at which to [`flush`](Self::flush) an unfinished line.
    pub fn partial_line_delay(&self) -> Duration {
        if !self.would_interrupt() {
            return PARTIAL_LINE_DELAY;
        }
        let interruptions = self.lines.as_ref().map_or(0, |lines| lines.interruptions);
        INTERRUPTION_DELAY.saturating_mul(1 << interruptions.min(16)).min(MAX_INTERRUPTION_DELAY)
    }

    /// Returns whether the console shows an unfinished line of another writer.
    fn would_interrupt(&self) -> bool {
        self.console.has_line_of_another(self.writer)
    }

    /// Returns whether an unfinished line is held back.
    pub fn has_partial_line(&self) -> bool {
        self.lines.as_ref().is_some_and(|prefixed| prefixed.lines.has_partial_line())
    }
}

/// Lines that are written in one turn.
struct Turn<'a> {
    console: &'a Console,
    writer: u64,
    prefix: &'a [u8],
    after_return: &'a mut bool,
    fresh: bool,
    /// Text to write, without the first prefix, which `Console::write` may have to omit.
    text: Vec<u8>,
}

impl<'a> Turn<'a> {
    fn new(console: &'a Console, writer: u64, prefix: &'a [u8], after_return: &'a mut bool) -> Self {
        Self { console, writer, prefix, after_return, fresh: true, text: Vec::new() }
    }

    fn push(&mut self, piece: Piece<'_>) {
        let mut fresh = !piece.continues;
        // Without a prefix there is nothing to repeat.
        let returns = |byte: &u8| *byte == b'\r' && !self.prefix.is_empty();
        for part in piece.bytes.split_inclusive(returns) {
            fresh |= *self.after_return && part != b"\n";
            *self.after_return = part.ends_with(b"\r") && !self.prefix.is_empty();
            if self.text.is_empty() {
                self.fresh = fresh;
            } else if fresh {
                self.text.extend_from_slice(self.prefix);
            }
            self.text.extend_from_slice(part);
            fresh = false;
            if self.text.len() >= TURN_BYTES {
                self.end();
            }
        }
    }

    fn end(&mut self) {
        if !self.text.is_empty() {
            self.console.write(self.writer, self.fresh, self.prefix, &self.text);
            self.text.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// The output of `script`, which writes through two views with these prefixes.
    fn shown(prefixes: [Option<&str>; 2], script: impl FnOnce(&Console, &mut View, &mut View)) -> String {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let console = Console::new(writer.into());
        let [mut a, mut b] = prefixes
            .map(|prefix| View::new(console.clone(), prefix.map(|prefix| prefix.as_bytes().to_vec())));
        script(&console, &mut a, &mut b);
        drop((console, a, b));
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn lines_have_their_prefix_and_do_not_mix() {
        let text = shown([Some("[0] "), Some("[1] ")], |_, a, b| {
            a.feed(b"one\ntw");
            b.feed(b"eins\n\nzwei\n");
            a.feed(b"o\n");
        });
        assert_eq!(text, "[0] one\n[1] eins\n[1] \n[1] zwei\n[0] two\n");
    }

    #[test]
    fn prompt_is_continued_in_place_or_after_a_mark() {
        let text = shown([Some("[0] "), Some("[1] ")], |console, a, b| {
            a.feed(b"name? ");
            a.flush();
            a.feed(b"me\nage? ");
            a.flush();
            b.feed(b"line\n");
            a.feed(b"7\nsex? ");
            a.flush();
            console.print(b"xlaunch: stopping\n");
        });
        let expected =
            "[0] name? me\n[0] age? \n[1] line\n[0] [...]7\n[0] sex? \nxlaunch: stopping\n".to_string();
        assert_eq!(text, expected);
    }

    #[test]
    fn redrawn_progress_bar_keeps_its_prefix() {
        let text = shown([Some("[0] "), Some("[1] ")], |_, a, b| {
            a.feed(b"\r10%");
            a.flush();
            a.feed(b"\r20%\r");
            a.flush();
            b.feed(b"x\r\n");
            a.feed(b"30%\n");
        });
        assert_eq!(text, "[0] \r[0] 10%\r[0] 20%\r\n[1] x\r\n[0] 30%\n");
        let text = shown([Some("[0] "), Some("[1] ")], |_, a, b| {
            a.feed(b"\r10%");
            a.flush();
            b.feed(b"x\n");
            a.feed(b"\r20%");
            a.flush();
            b.feed(b"y\n");
            a.feed(b"\n");
            a.feed(b"next\n");
        });
        assert_eq!(text, "[0] \r[0] 10%\n[1] x\n[0] \r[0] 20%\n[1] y\n[0] next\n");
    }

    #[test]
    fn lines_without_prefix_are_whole_and_a_single_rank_passes_unchanged() {
        let text = shown([Some(""), Some("")], |_, a, b| {
            a.feed(b"\rone\ntw");
            b.feed(b"eins\n");
            a.feed(b"o\n");
        });
        assert_eq!(text, "\rone\neins\ntwo\n");
        let text = shown([None, None], |console, a, b| {
            a.feed(b"ab");
            b.feed(b"\r12");
            console.print(b"xlaunch: hm\n");
            a.feed(b"c\n");
        });
        assert_eq!(text, "ab\r12\nxlaunch: hm\nc\n");
    }

    #[test]
    fn overlong_line_is_split_only_by_interruptions() {
        let text = std::thread::scope(|scope| {
            let (mut reader, writer) = std::io::pipe().unwrap();
            let read = scope.spawn(move || {
                let mut bytes = Vec::new();
                reader.read_to_end(&mut bytes).unwrap();
                bytes
            });
            let console = Console::new(writer.into());
            let mut views =
                ["[0] ", "[1] "].map(|prefix| View::new(console.clone(), Some(prefix.as_bytes().to_vec())));
            let long = vec![b'y'; 300 << 10];
            views[0].feed(&long);
            views[0].feed(&long);
            views[1].feed(b"between\n");
            views[0].feed(b"end\n");
            drop((console, views));
            String::from_utf8(read.join().unwrap()).unwrap()
        });
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!((lines.len(), lines[1]), (3, "[1] between"));
        assert!(lines[0].starts_with("[0] yyy") && lines[2].starts_with("[0] [...]yyy"));
        assert!(lines[2].ends_with("yend"));
        assert_eq!(text.matches('y').count(), 600 << 10);
    }

    #[test]
    fn unfinished_lines_that_interrupt_each_other_are_held_for_longer_each_time() {
        let mut delays = Vec::new();
        let text = shown([Some("[0] "), Some("[1] ")], |_, a, b| {
            for _ in 0..3 {
                for view in [&mut *a, &mut *b] {
                    view.feed(b"...");
                    delays.push(view.partial_line_delay().as_millis());
                    view.flush();
                    view.feed(b".");
                    assert_eq!(view.partial_line_delay(), PARTIAL_LINE_DELAY, "its own line");
                    view.flush();
                }
            }
            a.feed(b"\n.");
            delays.push(a.partial_line_delay().as_millis());
        });
        assert_eq!(delays, [100, 1000, 1000, 2000, 2000, 4000, 1000]);
        assert!(text.starts_with("[0] ....\n[1] ....\n[0] [...]....\n[1] [...]....\n"), "{text}");
    }
}
