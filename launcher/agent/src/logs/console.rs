//! xlaunch's own stdout and stderr, shared by all ranks.
//!
//! Whoever wants to write takes its turn, in the order of asking, and then writes to the descriptor itself: nothing
//! waits in a queue, memory is bounded, and a rank that floods the console is slowed to its share of what the console
//! takes. Lines of two writers never mix: one that comes upon another's unfinished line ends it first, and the rest of
//! that one goes out later behind a mark.

use std::fs::File;
use std::io::{ErrorKind, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use rustix::event::{PollFd, PollFlags, poll};

use super::lines::{Lines, Piece};
use super::lock;

/// Bytes that a writer puts out in a turn, and perhaps one line more.
const TURN: usize = 32 << 10;
/// Begins the rest of a line that another one interrupted.
const MARK: &[u8] = b"[...]";
/// xlaunch itself, among writers.
const OWN: u64 = 0;

/// One descriptor that lines go to.
#[derive(Debug)]
pub(super) struct Console {
    /// Whether a person looks at it.
    pub(super) terminal: bool,
    queue: Mutex<Queue>,
    next: Condvar,
    output: Mutex<Output>,
    /// Bytes taken so far.
    pub(super) taken: AtomicU64,
    writers: AtomicU64,
}

/// Turns that were asked for, and turns that are over.
#[derive(Debug, Default)]
struct Queue {
    asked: u64,
    over: u64,
}

#[derive(Debug)]
struct Output {
    fd: File,
    /// Whose line has not ended.
    open: Option<u64>,
}

impl Console {
    pub(super) fn new(fd: OwnedFd) -> Arc<Self> {
        let terminal = fd.is_terminal();
        Arc::new(Self {
            terminal,
            queue: Mutex::default(),
            next: Condvar::new(),
            output: Mutex::new(Output { fd: fd.into(), open: None }),
            taken: AtomicU64::new(0),
            writers: AtomicU64::new(OWN + 1),
        })
    }

    /// xlaunch's stdout and stderr: one console where both are the same terminal, pipe or file.
    pub(super) fn own() -> std::io::Result<[Arc<Self>; 2]> {
        let (out, err) = (std::io::stdout(), std::io::stderr());
        let same = match (rustix::fs::fstat(&out), rustix::fs::fstat(&err)) {
            (Ok(out), Ok(err)) => (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino),
            _ => false,
        };
        let stdout = Self::new(out.as_fd().try_clone_to_owned()?);
        let stderr = if same { stdout.clone() } else { Self::new(err.as_fd().try_clone_to_owned()?) };
        Ok([stdout, stderr])
    }

    /// Lines of xlaunch's own.
    pub(super) fn say(&self, lines: &[u8]) {
        self.write(OWN, true, b"", lines);
    }

    /// Writes `text` of `writer`, in a turn of its own. `fresh`: it begins with a line, otherwise it continues one;
    /// `prefix` is put before it unless it continues where the last writer, this one, left off.
    fn write(&self, writer: u64, fresh: bool, prefix: &[u8], text: &[u8]) {
        self.turn(|output| {
            let interrupts = output.open.is_some_and(|open| open != writer);
            let (lead, text) = match output.open == Some(writer) && !fresh {
                true => (Vec::new(), text),
                false => begin(fresh, prefix, text),
            };
            if text.is_empty() {
                return;
            }
            let newline: &[u8] = if interrupts { b"\n" } else { b"" };
            self.put(output, &[newline, &lead].concat());
            self.put(output, text);
            output.open = (!text.ends_with(b"\n")).then_some(writer);
        });
    }

    /// Writes `bytes` of `writer` as they are.
    fn pass(&self, writer: u64, bytes: &[u8]) {
        self.turn(|output| {
            self.put(output, bytes);
            output.open = (!bytes.ends_with(b"\n")).then_some(writer);
        });
    }

    /// A mutex alone would let the one that floods come back before the others wake up.
    fn turn(&self, work: impl FnOnce(&mut Output)) {
        let mut queue = lock(&self.queue);
        let mine = queue.asked;
        queue.asked += 1;
        while queue.over != mine {
            queue = self.next.wait(queue).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        drop(queue);
        work(&mut lock(&self.output));
        lock(&self.queue).over += 1;
        self.next.notify_all();
    }

    /// What a closed console does not take is dropped: the worker goes on, and the files have all.
    fn put(&self, output: &mut Output, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match output.fd.write(bytes) {
                Ok(0) => return,
                Ok(count) => {
                    bytes = &bytes[count..];
                    self.taken.fetch_add(count as u64, Ordering::Relaxed);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Another program that has the same terminal may have made it non-blocking.
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // An interrupted or failed wait ends in another attempt, which says what is wrong.
                    let _ = poll(&mut [PollFd::new(&output.fd, PollFlags::OUT)], None);
                }
                Err(_) => return,
            }
        }
    }
}

/// What goes before a text at the beginning of a line, and what of the text is left to show.
fn begin<'a>(fresh: bool, prefix: &[u8], text: &'a [u8]) -> (Vec<u8>, &'a [u8]) {
    // The line was ended when it was interrupted: its own end comes too late.
    let ended = text.strip_prefix(b"\n").or(text.strip_prefix(b"\r\n"));
    match ended {
        Some(after) if !fresh => (Vec::new(), after),
        // What is written over the line is not its rest.
        _ if fresh || text.starts_with(b"\r") => (prefix.to_vec(), text),
        _ => ([prefix, MARK].concat(), text),
    }
}

/// One stream of one rank on the console.
#[derive(Debug)]
pub(super) struct View {
    console: Arc<Console>,
    writer: u64,
    /// `None` passes bytes as they are.
    lines: Option<Prefixed>,
}

#[derive(Debug)]
struct Prefixed {
    lines: Lines,
    prefix: Vec<u8>,
    /// The last byte was a carriage return: what follows is written over the line, its prefix too.
    returned: bool,
}

impl View {
    /// A stream whose lines begin with `prefix`; one that goes out as it is for `None`.
    pub(super) fn new(console: Arc<Console>, prefix: Option<Vec<u8>>) -> Self {
        let writer = console.writers.fetch_add(1, Ordering::Relaxed);
        let lines = prefix.map(|prefix| Prefixed { lines: Lines::default(), prefix, returned: false });
        Self { console, writer, lines }
    }

    pub(super) fn feed(&mut self, bytes: &[u8]) {
        match &mut self.lines {
            None => bytes.chunks(TURN).for_each(|part| self.console.pass(self.writer, part)),
            Some(Prefixed { lines, prefix, returned }) => {
                let mut turn = Turn::new(&self.console, self.writer, prefix, returned);
                lines.feed(bytes, |piece| turn.push(piece));
                turn.end();
            }
        }
    }

    /// Shows the beginning of a line that has not ended.
    pub(super) fn flush(&mut self) {
        if let Some(Prefixed { lines, prefix, returned }) = &mut self.lines {
            let mut turn = Turn::new(&self.console, self.writer, prefix, returned);
            lines.flush(|piece| turn.push(piece));
            turn.end();
        }
    }

    /// Whether [`flush`](Self::flush) has something to show.
    pub(super) fn waits(&self) -> bool {
        self.lines.as_ref().is_some_and(|prefixed| prefixed.lines.waits())
    }
}

/// Lines that go out together.
struct Turn<'a> {
    console: &'a Console,
    writer: u64,
    prefix: &'a [u8],
    returned: &'a mut bool,
    fresh: bool,
    /// Without the prefix of its beginning.
    text: Vec<u8>,
}

impl<'a> Turn<'a> {
    fn new(console: &'a Console, writer: u64, prefix: &'a [u8], returned: &'a mut bool) -> Self {
        Self { console, writer, prefix, returned, fresh: true, text: Vec::new() }
    }

    fn push(&mut self, piece: Piece<'_>) {
        let mut fresh = !piece.continues;
        // Without a prefix there is none to repeat.
        let returns = |byte: &u8| *byte == b'\r' && !self.prefix.is_empty();
        for part in piece.bytes.split_inclusive(returns) {
            fresh |= *self.returned && part != b"\n";
            *self.returned = part.ends_with(b"\r") && !self.prefix.is_empty();
            if self.text.is_empty() {
                self.fresh = fresh;
            } else if fresh {
                self.text.extend_from_slice(self.prefix);
            }
            self.text.extend_from_slice(part);
            fresh = false;
            if self.text.len() >= TURN {
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

    /// What appears when `script` writes through two views, the second one with another prefix.
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
    fn every_line_has_its_prefix_and_no_two_mix() {
        let text = shown([Some("[0] "), Some("[1] ")], |_, a, b| {
            a.feed(b"one\ntw");
            b.feed(b"eins\n\nzwei\n");
            a.feed(b"o\n");
        });
        assert_eq!(text, "[0] one\n[1] eins\n[1] \n[1] zwei\n[0] two\n");
    }

    #[test]
    fn a_prompt_is_continued_where_it_stands_or_behind_a_mark() {
        let text = shown([Some("[0] "), Some("[1] ")], |console, a, b| {
            a.feed(b"name? ");
            a.flush();
            a.feed(b"me\nage? ");
            a.flush();
            b.feed(b"line\n");
            a.feed(b"7\nsex? ");
            a.flush();
            console.say(b"xlaunch: stopping\n");
        });
        let expected =
            "[0] name? me\n[0] age? \n[1] line\n[0] [...]7\n[0] sex? \nxlaunch: stopping\n".to_string();
        assert_eq!(text, expected);
    }

    #[test]
    fn a_bar_that_is_drawn_again_keeps_its_prefix() {
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
    fn without_a_prefix_lines_are_whole_and_a_single_rank_is_not_touched() {
        let text = shown([Some(""), Some("")], |_, a, b| {
            a.feed(b"\rone\ntw");
            b.feed(b"eins\n");
            a.feed(b"o\n");
        });
        assert_eq!(text, "\rone\neins\ntwo\n");
        let text = shown([None, None], |console, a, b| {
            a.feed(b"ab");
            b.feed(b"\r12");
            console.say(b"xlaunch: hm\n");
            a.feed(b"c\n");
        });
        assert_eq!(text, "ab\r12\nxlaunch: hm\nc\n");
    }

    #[test]
    fn a_line_longer_than_the_limit_is_in_pieces_only_where_others_come_between() {
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
}
