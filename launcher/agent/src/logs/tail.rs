//! Keeps the end of a stream for the report.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Instant;

use super::lines::whole_characters;
use super::lock;

/// Minimum size of the tail of a long stream. It holds at most twice as much.
const TAIL_BYTES: usize = 64 << 10;
/// Maximum number of lines returned: enough for a complete traceback.
const MAX_LINES: usize = 200;
/// Number of arrival times that are remembered. A traceback arrives in a few chunks.
const MAX_TIMES: usize = 1024;
/// Length at which lines are cut.
const MAX_TAIL_LINE_BYTES: usize = 4096;

/// The last bytes of a stream. Feeding it only copies bytes; lines are split on request.
#[derive(Debug, Default)]
pub(super) struct Tail(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    bytes: Vec<u8>,
    /// True if earlier bytes were discarded.
    cut: bool,
    /// Arrival times: each applies to the bytes from its offset up to that of the next entry.
    times: VecDeque<(usize, Instant)>,
}

impl Tail {
    pub(super) fn feed(&self, bytes: &[u8]) {
        let mut kept = lock(&self.0);
        let begin = kept.bytes.len();
        kept.times.push_back((begin, Instant::now()));
        kept.bytes.extend_from_slice(bytes);
        if kept.times.len() > MAX_TIMES {
            kept.times.pop_front();
        }
        if kept.bytes.len() > 2 * TAIL_BYTES {
            let gone = kept.bytes.len() - TAIL_BYTES;
            kept.bytes.drain(..gone);
            kept.cut = true;
            kept.times.iter_mut().for_each(|(begin, _)| *begin = begin.saturating_sub(gone));
        }
    }

    /// Returns the last lines, oldest first, without colours and without text that a carriage return has overwritten,
    /// each with the time at which it began to arrive, if known.
    pub(super) fn timed_lines(&self) -> Vec<(String, Option<Instant>)> {
        lock(&self.0).lines()
    }
}

impl Kept {
    fn lines(&self) -> Vec<(String, Option<Instant>)> {
        let mut offset = 0;
        let lines = self.bytes.split(|byte| *byte == b'\n').map(|line| {
            let begin = offset;
            offset += line.len() + 1;
            (begin, line)
        });
        let mut lines: Vec<(usize, &[u8])> = lines.collect();
        // Nothing follows the last newline, and the first line may be incomplete.
        if lines.last().is_some_and(|(_, line)| line.is_empty()) {
            lines.pop();
        }
        let first = usize::from(self.cut && lines.len() > 1);
        let last = &lines[first.max(lines.len().saturating_sub(MAX_LINES))..];
        last.iter().map(|(begin, line)| (shown(line), self.arrival(*begin))).collect()
    }

    /// Returns the time at which the byte at this offset arrived.
    fn arrival(&self, offset: usize) -> Option<Instant> {
        self.times.iter().rev().find(|(begin, _)| *begin <= offset).map(|(_, at)| *at)
    }
}

fn shown(line: &[u8]) -> String {
    let line = line.trim_ascii_end();
    let line = line.rsplit(|byte| *byte == b'\r').next().unwrap_or(line);
    let line = colourless(line);
    match line.get(..MAX_TAIL_LINE_BYTES) {
        Some(begin) if line.len() > MAX_TAIL_LINE_BYTES => {
            format!("{} [...]", String::from_utf8_lossy(whole_characters(begin)))
        }
        _ => String::from_utf8_lossy(&line).into_owned(),
    }
}

/// Removes colour sequences such as `ESC [ 1 ; 31 m` from a line.
fn colourless(mut line: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(line.len());
    while let Some(at) = line.windows(2).position(|pair| pair == b"\x1b[") {
        out.extend_from_slice(&line[..at]);
        let digits = line[at + 2..].iter().take_while(|byte| byte.is_ascii_digit() || **byte == b';').count();
        let end = at + 2 + digits;
        if line.get(end) == Some(&b'm') {
            line = &line[end + 1..];
        } else {
            out.extend_from_slice(&line[at..end]);
            line = &line[end..];
        }
    }
    out.extend_from_slice(line);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tail(text: &[u8]) -> Vec<String> {
        let tail = Tail::default();
        // Fed in chunks, as from a pipe.
        text.chunks(1000).for_each(|piece| tail.feed(piece));
        tail.timed_lines().into_iter().map(|(line, _)| line).collect()
    }

    #[test]
    fn last_200_lines_are_kept_including_an_unfinished_one() {
        assert_eq!(tail(b""), Vec::<String>::new());
        assert_eq!(tail(b"a\n\nb\r\nc"), ["a", "", "b", "c"]);
        let many: String = (0..100_000).map(|i| format!("line {i}\n")).collect();
        let lines = tail(many.as_bytes());
        assert_eq!((lines.len(), lines[0].as_str(), lines[199].as_str()), (200, "line 99800", "line 99999"));
    }

    #[test]
    fn overwritten_text_and_colours_are_removed_and_invalid_utf8_replaced() {
        assert_eq!(tail(b"\r 10%\r 20%\nError\xff\n"), [" 20%", "Error\u{fffd}"]);
        assert_eq!(tail(b"\x1b[1;31mError\x1b[0m: \x1b[2Jno\x1b["), ["Error: \u{1b}[2Jno\u{1b}["]);
    }

    #[test]
    fn arrival_times_survive_discarding_earlier_lines() {
        let tail = Tail::default();
        tail.feed(&vec![b'x'; 3 * TAIL_BYTES]);
        tail.feed(b"\nerror\n  in");
        let between = Instant::now();
        tail.feed(b" main\nend\n");
        let lines = tail.timed_lines();
        let (texts, times): (Vec<String>, Vec<Option<Instant>>) = lines.into_iter().unzip();
        assert_eq!(texts, ["error", "  in main", "end"]);
        let before: Vec<bool> = times.into_iter().map(|at| at.unwrap() <= between).collect();
        assert_eq!(before, [true, true, false]);
    }

    #[test]
    fn huge_line_is_cut() {
        let lines = tail(&[&[b'y'; 1 << 20][..], b"\nlast\n"].concat());
        assert_eq!(lines, ["last"]);
        let lines = tail(&[b'y'; 1 << 20]);
        assert_eq!((lines.len(), lines[0].len()), (1, MAX_TAIL_LINE_BYTES + " [...]".len()));
    }
}
